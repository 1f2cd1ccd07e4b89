"""The second change: gradients of a param group are reduced dtype by dtype."""

from __future__ import annotations

from tools.upstream.edits import Change, Edit


SOURCES = "torch/distributed/fsdp/_fully_shard"
API = f"{SOURCES}/_fsdp_api.py"
GROUP = f"{SOURCES}/_fsdp_param_group.py"
STATE = f"{SOURCES}/_fsdp_state.py"
FULLY_SHARD = f"{SOURCES}/_fully_shard.py"
TESTS = "test/distributed/_composable/fsdp"

# What is kept for each key, instead of once #

FIELDS = (
    Edit(
        GROUP,
        "ReduceScatterState",
        "lines",
        (
            "reduce_scatter_input: torch.Tensor",
            "event: torch.Event | None  # reduce-scatter event",
        ),
        """
reduce_scatter_inputs: list[torch.Tensor]  # one for each reduce key
event: torch.Event | None  # last reduce-scatter's event
""",
    ),
    Edit(
        GROUP,
        "AllReduceState",
        "lines",
        (
            "# Holding all_reduce_input (the reduce-dtype AR buffer, or the RS output",
            "# passed to the all-reduce hook) keeps the caching allocator from reusing",
        ),
        """
# Holding all_reduce_inputs (the reduce-dtype AR buffers, or the RS outputs
# passed to the all-reduce hook) keeps the caching allocator from reusing
""",
    ),
    Edit(
        GROUP,
        "AllReduceState",
        "replace",
        (
            "all_reduce_input: torch.Tensor",
            "event: torch.Event | None  # all-reduce event",
        ),
        """
all_reduce_inputs: list[torch.Tensor]  # one for each reduce key
event: torch.Event | None  # last all-reduce's event
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup.__init__",
        "replace",
        "self._reduce_scatter_param_indices: list[int] = []",
        """
# For each reduce key, see `_init_reduce_scatter_param_order`
self._reduce_scatter_param_indices: dict[torch.dtype, list[int]] = {}
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup.__init__",
        "lines",
        (
            "# Gradients awaiting all-reduce (HSDP or replication), in reduction dtype.",
            "self._partial_reduce_output: torch.Tensor | None = None",
        ),
        """
# Gradients awaiting all-reduce (HSDP or replication), in reduction dtype,
# for each reduce key that has any.
self._partial_reduce_outputs: dict[torch.dtype, torch.Tensor] = {}
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup.__init__",
        "replace",
        "self._partial_reduce_output_layout: dict[FSDPParam, tuple[int, int]] = {}",
        """
self._partial_reduce_output_layouts: dict[
    torch.dtype, dict[FSDPParam, tuple[int, int]]
] = {}
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reset_iter_state",
        "replace",
        "self._partial_reduce_output = None",
        "self._partial_reduce_outputs.clear()",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reset_iter_state",
        "replace",
        "self._partial_reduce_output_layout.clear()",
        "self._partial_reduce_output_layouts.clear()",
    ),
    Edit(
        STATE,
        "FSDPState._validate_finalize_backward",
        "lines",
        ("(", "),"),
        "(group for group in param_groups if group._partial_reduce_outputs),",
        within="if partial_group := next(",
    ),
)

# What is reduced together #

KEYS = (
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "replace",
        "dtype_indices: dict[torch.dtype | None, list[int]] = {}",
        """
#
# Gradients of one reduce key are reduced together. The key is static, so
# that ranks agree on the reductions and their order: the accumulation
# dtypes of a storage dtype's parameters, promoted. A group of one storage
# dtype has one key, and storage dtypes that accumulate alike share one.
# Promoting over storage dtypes, too, would send low-precision gradients
# at the width of the widest and drop their own pre-/post-division.
accumulation_dtypes: dict[torch.dtype, set[torch.dtype]] = {}
for p in self.fsdp_params:
    accumulation_dtypes.setdefault(p.orig_dtype, set()).add(
        p.unsharded_grad_dtype or p.orig_dtype
    )
reduce_keys = {
    orig_dtype: functools.reduce(torch.promote_types, dtypes)
    for orig_dtype, dtypes in accumulation_dtypes.items()
}
dtype_indices: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "replace",
        "dtype_indices.setdefault(fsdp_param.sharded_grad_dtype, []).append(index)",
        """
dtypes = (reduce_keys[fsdp_param.orig_dtype], fsdp_param.sharded_grad_dtype)
dtype_indices.setdefault(dtypes, []).append(index)
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._init_reduce_scatter_param_order",
        "replace",
        "self._reduce_scatter_param_indices = [",
        """
self._reduce_scatter_param_indices = {}
for (key, _), indices in dtype_indices.items():
    self._reduce_scatter_param_indices.setdefault(key, []).extend(indices)
""",
    ),
)

# From the gradients of a group to those of each key #

POST_BACKWARD = (
    Edit(
        GROUP,
        "FSDPParamGroup.post_backward",
        "replace",
        "fsdp_params_with_grad, unsharded_grads = (",
        """
grads_to_reduce = [
    (key, params, grads)
    for key in self._reduce_scatter_param_indices
    for params, grads in [self._take_unsharded_grads_to_reduce(key)]
    if grads
]
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup.post_backward",
        "expression",
        "not unsharded_grads",
        "not grads_to_reduce",
    ),
    # The rest of the function, indented as it is, becomes the body of a loop
    Edit(
        GROUP,
        "FSDPParamGroup.post_backward",
        "split",
        'with record_function(self._with_fqn("FSDP::post_backward_reduce")):',
        '''
        self._reduce_unsharded_grads(grads_to_reduce, is_partial_group_backward)

def _reduce_unsharded_grads(
    self,
    grads_to_reduce: list[tuple[torch.dtype, list[FSDPParam], list[torch.Tensor]]],
    is_partial_group_backward: bool,
) -> None:
    """Reduces the gradients of each reduce key, one reduction after the other."""
    reduce_scatter_inputs: list[torch.Tensor] = []
    all_reduce_inputs: list[torch.Tensor] = []
    for reduce_key, fsdp_params_with_grad, unsharded_grads in grads_to_reduce:
''',
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "lines",
        "fsdp_params_with_grad, unsharded_grads",
        "fsdp_params_with_grad, unsharded_grads, reduce_key",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "expression",
        "self._partial_reduce_output is not None",
        "reduce_key in self._partial_reduce_outputs",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "lines",
        "fsdp_params_with_grad, partial_sizes, reduce_dtype",
        """
fsdp_params_with_grad,
partial_sizes,
reduce_dtype,
reduce_key,
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "lines",
        "self._partial_reduce_output,",
        "partial_output,",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "replace",
        "self.comm_ctx.reduce_scatter_states.append(",
        """
reduce_scatter_inputs.append(reduce_scatter_input)
if partial_output is not None:
    self._partial_reduce_outputs[reduce_key] = partial_output
else:
    self._partial_reduce_outputs.pop(reduce_key, None)
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "lines",
        "if is_partial_group_backward:",
        "if is_partial_group_backward and reduce_key == grads_to_reduce[-1][0]:",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "lines",
        "all_reduce_input, all_reduce_event",
        "all_reduce_inputs, all_reduce_event",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "before",
        "self._all_reduce_state = AllReduceState(",
        "all_reduce_inputs.append(all_reduce_input)",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._reduce_unsharded_grads",
        "after",
        "for reduce_key, fsdp_params_with_grad, unsharded_grads in grads_to_reduce:",
        """
# One state for all reductions: max_input_buffers counts post-backwards
current_stream = self.device_handle.current_stream()
state = ReduceScatterState(
    reduce_scatter_inputs, reduce_scatter_event, current_stream, self
)
self.comm_ctx.reduce_scatter_states.append(state)
""",
    ),
)

# The gradients, the reduce dtype and the partial sum of one key #

ONE_KEY = (
    Edit(
        GROUP,
        "FSDPParamGroup",
        "lines",
        "def _get_partial_reduce_grad(self, param: FSDPParam) -> torch.Tensor | None:",
        """
def _get_partial_reduce_grad(
    self, param: FSDPParam, reduce_key: torch.dtype
) -> torch.Tensor | None:
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_partial_reduce_grad",
        "replace",
        "output = self._partial_reduce_output",
        """
output = self._partial_reduce_outputs.get(reduce_key)
layout = self._partial_reduce_output_layouts.get(reduce_key, {})
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_partial_reduce_grad",
        "expression",
        "param not in self._partial_reduce_output_layout",
        "param not in layout",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_partial_reduce_grad",
        "replace",
        "offset, _ = self._partial_reduce_output_layout[param]",
        "offset, _ = layout[param]",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_reduce_dtype",
        "lines",
        "self, fsdp_params: list[FSDPParam], grads: list[torch.Tensor]",
        """
self,
fsdp_params: list[FSDPParam],
grads: list[torch.Tensor],
reduce_key: torch.dtype,
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_reduce_dtype",
        "lines",
        "if self._partial_reduce_output is not None:",
        """
if (partial_output := self._partial_reduce_outputs.get(reduce_key)) is not None:
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_reduce_dtype",
        "replace",
        "dtypes.add(self._partial_reduce_output.dtype)",
        "dtypes.add(partial_output.dtype)",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._take_unsharded_grads_to_reduce",
        "lines",
        "self,",
        "self, reduce_key: torch.dtype",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._take_unsharded_grads_to_reduce",
        "replace",
        '"""Returns the gradients to reduce, clearing them from the unsharded parameters."""',
        '"""Returns a key\'s gradients to reduce, clearing them from the unsharded parameters."""',
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._take_unsharded_grads_to_reduce",
        "lines",
        "for index in self._reduce_scatter_param_indices:",
        "for index in self._reduce_scatter_param_indices[reduce_key]:",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._take_unsharded_grads_to_reduce",
        "lines",
        "if (grad := self._get_unsharded_grad_to_reduce(fsdp_param)) is None:",
        """
grad = self._get_unsharded_grad_to_reduce(fsdp_param, reduce_key)
if grad is None:
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup",
        "lines",
        "def _get_unsharded_grad_to_reduce(self, param: FSDPParam) -> torch.Tensor | None:",
        """
def _get_unsharded_grad_to_reduce(
    self, param: FSDPParam, reduce_key: torch.dtype
) -> torch.Tensor | None:
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._get_unsharded_grad_to_reduce",
        "expression",
        "self._get_partial_reduce_grad(param)",
        "self._get_partial_reduce_grad(param, reduce_key)",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "lines after",
        "dtype: torch.dtype,",
        "reduce_key: torch.dtype,",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "replace",
        "output = self._partial_reduce_output",
        """
output = self._partial_reduce_outputs.get(reduce_key)
layout = self._partial_reduce_output_layouts.get(reduce_key, {})
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "expression",
        "len(self._partial_reduce_output_layout)",
        "len(layout)",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "expression",
        "self._partial_reduce_output_layout.items()",
        "layout.items()",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "replace",
        "self._partial_reduce_output = output.to(dtype)",
        "self._partial_reduce_outputs[reduce_key] = output = output.to(dtype)",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "replace",
        "return self._partial_reduce_output",
        "return output",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "replace",
        "grad_pending_all_reduce = self._get_partial_reduce_grad(param)",
        """
grad_pending_all_reduce = self._get_partial_reduce_grad(
    param, reduce_key
)
""",
    ),
    Edit(
        GROUP,
        "FSDPParamGroup._prepare_partial_reduce_output",
        "replace",
        (
            "self._partial_reduce_output_layout = new_layout",
            "self._partial_reduce_output = repacked_output",
        ),
        """
self._partial_reduce_output_layouts[reduce_key] = new_layout
if repacked_output is not None:
    self._partial_reduce_outputs[reduce_key] = repacked_output
""",
    ),
)

# What users read #

DOCSTRINGS = (
    Edit(
        API,
        "MixedPrecisionPolicy",
        "lines",
        "(e.g. fp32 for bf16 and fp32). Reduced shards retain the input",
        """
(e.g. fp32 for bf16 and fp32) if their parameters are stored in one
dtype. If not, each storage dtype has a promoted dtype of its own,
and each of these dtypes a reduction. Reduced shards retain the input
""",
    ),
    Edit(
        FULLY_SHARD,
        "",
        "lines",
        "reduce-scattered in one collective. Partitioning the model into multiple",
        """
reduce-scattered in one collective for each dtype in which they are reduced
(see ``MixedPrecisionPolicy.reduce_dtype``). Partitioning the model into multiple
""",
    ),
    Edit(
        FULLY_SHARD,
        "FSDPModule.set_all_reduce_hook",
        "lines after",
        "using FSDP or the all-reduce output if using native HSDP.",
        "It runs once for each dtype in which gradients are reduced.",
    ),
)

CHANGE = Change(
    title="[FSDP2] Reduce the gradients of a param group dtype by dtype",
    message="""\
A group of several storage dtypes reduces its gradients once, in the promoted dtype.
That costs bytes and bits: of 344,064 bf16, 6,144 fp16 and 816 fp32 gradients it sends
1,404,096 bytes, where each in its own dtype takes 703,680. The bf16 gradients are not
those of a bf16 group, fp16 ones are not divided before the sum, and an all-reduce hook
sees one dtype.

Each gradient has a reduce key, fixed at lazy init so that ranks agree: the accumulation
dtypes of its storage dtype, promoted. A group of one storage dtype has one key and
reduces once, as before; with reduce_dtype set, so does any group. Keys come in the
order of parameters. The end of post_backward becomes the body of a loop over keys, and
keeps its indentation. Partial sums that await an all-reduce have a layout for each key:
microbatches may use other parameters. Buffers in flight are held for all keys together:
max_input_buffers counts post-backwards, and a partial group waits once.

The gradients of a mixed group are those of one group for each dtype, bit for bit: FSDP,
HSDP, accumulation, deferred all-reduces, unused parameters, divide factors.

Test plan:

    cd test/distributed/_composable/fsdp
    python -m pytest test_fully_shard_reduce_dtypes.py

Host time: of a group of 16 fp32 parameters 3,291 function calls a step, before 3,287
(cProfile, one process, fake process group). Processor time is the same in ten rounds.
""",
    edits=(*FIELDS, *KEYS, *POST_BACKWARD, *ONE_KEY, *DOCSTRINGS),
    files=(
        (
            f"{TESTS}/test_fully_shard_reduce_dtypes.py",
            "tools/upstream/tests/test_fully_shard_reduce_dtypes.py",
        ),
    ),
)
