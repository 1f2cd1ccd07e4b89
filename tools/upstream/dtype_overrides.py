"""The fourth change: a parameter may have a compute and a reduce dtype of its own."""

from __future__ import annotations

from tools.upstream.edits import Change, Edit


SOURCES = "torch/distributed/fsdp/_fully_shard"
API = f"{SOURCES}/_fsdp_api.py"
GROUP = f"{SOURCES}/_fsdp_param_group.py"
STATE = f"{SOURCES}/_fsdp_state.py"
TESTS = "test/distributed/_composable/fsdp"

POLICY = (
    Edit(
        API,
        "MixedPrecisionPolicy",
        "lines",
        (
            "``param_dtype_override_fn`` must return the same result for each logical parameter",
            "on every rank. Rank-dependent results may cause ranks to build incompatible",
        ),
        """
``param_dtype_override_fn`` and ``reduce_dtype_override_fn`` must return the
same result for each logical parameter on every rank.
Rank-dependent results may cause ranks to build incompatible
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy",
        "lines",
        "the default ``param_dtype``. Other dtypes are not supported.",
        """
the default ``param_dtype``. Any other floating-point dtype is the
parameter's own ``param_dtype``.
""",
    ),
    # With the end of the docstring, for its indentation
    Edit(
        API,
        "MixedPrecisionPolicy",
        "lines",
        '"""',
        '''
    reduce_dtype_override_fn (Optional[Callable[[nn.Parameter], Optional[torch.dtype]]]):
        Optional per-parameter override for ``reduce_dtype``, evaluated like
        ``param_dtype_override_fn``. Returning a floating-point dtype reduces
        that parameter's gradient in it; returning ``None`` uses the default
        ``reduce_dtype``. A communication group has one reduction for each
        dtype. (Default: ``None``)
"""
''',
    ),
    Edit(
        API,
        "MixedPrecisionPolicy",
        "after",
        "param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (",
        """
reduce_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
    field(default=None, kw_only=True)
)
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "lines",
        "if self.param_dtype_override_fn is None:",
        """
if self.param_dtype_override_fn is None and (
    self.reduce_dtype_override_fn is None
):
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "after",
        "param_dtype = self.param_dtype",
        "reduce_dtype = self.reduce_dtype",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "lines",
        "if param_dtype_override not in (self.param_dtype, param.dtype):",
        """
if (
    param_dtype_override not in (self.param_dtype, param.dtype)
    and not param_dtype_override.is_floating_point
):
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "lines",
        (
            '"param_dtype_override_fn must return None, param_dtype, or the "',
            '"parameter\'s original dtype but got "',
        ),
        """
"param_dtype_override_fn must return None, a floating-point "
"dtype, or the parameter's original dtype but got "
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "before",
        "return replace(",
        """
if self.reduce_dtype_override_fn is not None:
    reduce_dtype_override = self.reduce_dtype_override_fn(param)
    if reduce_dtype_override is not None:
        if (
            not isinstance(reduce_dtype_override, torch.dtype)
            or not reduce_dtype_override.is_floating_point
        ):
            raise ValueError(
                "reduce_dtype_override_fn must return a floating-point dtype "
                f"or None but got {reduce_dtype_override!r}"
            )
        reduce_dtype = reduce_dtype_override
""",
    ),
    Edit(
        API,
        "MixedPrecisionPolicy._resolve_for_param",
        "lines",
        ("param_dtype=param_dtype,", "param_dtype_override_fn=None,"),
        """
param_dtype=param_dtype,
reduce_dtype=reduce_dtype,
param_dtype_override_fn=None,
reduce_dtype_override_fn=None,
""",
    ),
    Edit(
        STATE,
        "FSDPState.init",
        "expression",
        "replace(mp_policy, param_dtype_override_fn=None)",
        """
replace(
    mp_policy, param_dtype_override_fn=None, reduce_dtype_override_fn=None
)
""",
    ),
)

KEYS = (
    Edit(
        GROUP,
        "FSDPParamGroup._init_mp_dtypes",
        "replace",
        "reduce_dtypes = {p.reduce_dtype for p in params_for_dtype}",
        "reduce_dtypes = {p.reduce_dtype for p in self.fsdp_params}",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_mp_dtypes",
        "remove",
        "if len(trainable_params) > 0 and len(reduce_dtypes) != 1:",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "lines",
        "# dtypes of a storage dtype's parameters, promoted. A group of one storage",
        """
# dtypes of a storage dtype's parameters, promoted, or the reduce dtype that
# the policy sets for a parameter. Without one, a group of one storage
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "replace",
        "accumulation_dtypes.setdefault(p.orig_dtype, set()).add(",
        """
if p.reduce_dtype is None:
    accumulation_dtypes.setdefault(p.orig_dtype, set()).add(
        p.unsharded_grad_dtype or p.orig_dtype
    )
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "replace",
        "dtypes = (reduce_keys[fsdp_param.orig_dtype], fsdp_param.sharded_grad_dtype)",
        """
key = fsdp_param.reduce_dtype or reduce_keys[fsdp_param.orig_dtype]
dtypes = (key, fsdp_param.sharded_grad_dtype)
""",
    ),
)

CHANGE = Change(
    title="[FSDP2] Let a policy choose each parameter's compute and reduce dtype",
    message="""\
param_dtype_override_fn may keep a parameter in its original dtype, and nothing else: a
group of fp32 parameters cannot compute some in bf16 and some in fp16. The reduce dtype
is the whole group's, so a router reduces in fp32 only if all do.

param_dtype_override_fn may return any floating-point dtype. reduce_dtype_override_fn
chooses the dtype that a parameter's gradient is reduced in, which is its reduce key.

Test plan:

    cd test/distributed/_composable/fsdp
    python -m pytest test_fully_shard_dtype_overrides.py

Host time: the same function calls a step.
""",
    edits=(*POLICY, *KEYS),
    files=(
        (
            f"{TESTS}/test_fully_shard_dtype_overrides.py",
            "tools/upstream/tests/test_fully_shard_dtype_overrides.py",
        ),
    ),
)
