"""The first change: a param group may hold parameters of several storage dtypes."""

from __future__ import annotations

from tools.upstream.edits import Change, Edit


GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
TESTS = "test/distributed/_composable/fsdp"

CHANGE = Change(
    title="[FSDP2] Let a param group hold several storage dtypes",
    message="""\
fully_shard refuses a module whose trainable parameters have several storage dtypes
(#156784): bf16 weights beside fp32 A_log, D and dt_bias of Mamba-2, fp32 norms and
routers, fp32 adapters beside a bf16 head. Upcasting them costs memory and bytes, one
group for each dtype costs collectives.

Nothing but the assertion is in the way. The all-gather moves bytes where dtypes differ,
since frozen parameters may have another dtype already. Gradients of several dtypes are
promoted and reduced once, since grad_dtype may differ within a group, and each is cast
back to its parameter's dtype.

The promoted reduction is correct, and wider than it need be: a group of bf16 and fp32
sends all gradients in fp32. The next change reduces each dtype in its own.

Groups of one storage dtype run the code that they ran.

Test plan:

    cd test/distributed/_composable/fsdp
    python -m pytest test_fully_shard_storage_dtypes.py

Host time: the same function calls, since nothing of a step is changed.
""",
    edits=(
        Edit(
            GROUP,
            "FSDPParamGroup._init_mp_dtypes",
            "remove",
            "if len(trainable_params) > 0 and len(orig_dtypes) != 1:",
        ),
    ),
    files=(
        (
            f"{TESTS}/test_fully_shard_storage_dtypes.py",
            "tools/upstream/tests/test_fully_shard_storage_dtypes.py",
        ),
    ),
)
