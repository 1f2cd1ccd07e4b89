"""
Caches that live across steps, and state transitions of a group's parameters.

[Note: Cached between steps]
Most steps repeat the one before: the same shards, dtypes and outputs. Nothing announces
that a parameter's data or its all-gather outputs were replaced, so what is cached is
compared with the parameters at each use. Plans have dtypes and sizes only. The inputs of
the last gather do have shards: `reset_sharded_param`, which replaces one, drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _fsdp_layout as layouts
from . import _fsdp_registrations as registrations
from ._fsdp_direct import alloc_storages, can_be_direct, DirectMemory
from ._fsdp_errors import note_extension
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_releases import RELEASE


class SplitSizes(list[int]):
    """
    A gather's split sizes, with its layout, the state that it gathers from, and of a
    direct gather what is sent until then, and then copied: (outputs, temporaries).
    """

    def __init__(self, layout: layouts.GatherLayout, state: ShardedState, *direct: Any):
        super().__init__(numel for _, numel in layout.slots)
        self.layout, self.state = layout, state
        self.sent, self.copies = direct or ((), ())


class GatherPlan:
    """
    A gather's layout and copies, ``made_for`` lists of the inputs' stored dtypes, those to
    cast them to (None: none), their elements on one rank, and how many each parameter has
    (no list: one), and for a threshold in bytes, see `can_be_direct`.
    """

    def __init__(self, fsdp_params: Sequence[FSDPParam], *made_for: Any):
        stored_dtypes, compute_dtypes, numels, counts, min_nbytes = made_for
        self.made_for = made_for
        self.facts = compute_dtypes, min_nbytes
        pairs = zip(compute_dtypes, stored_dtypes, strict=True)
        dtypes = [compute_dtype or stored for compute_dtype, stored in pairs]
        counts = counts or [1] * len(dtypes)
        starts = [*accumulate(counts, initial=0)]
        # Direct parameters with their input's position, their pieces, and which are cast
        self.direct: list[tuple[int, int]] = []
        self.direct_pieces: list[int] = []
        self.direct_casts: list[int] = []
        for i, (p, k) in enumerate(zip(fsdp_params, starts)):
            if can_be_direct(p, dtypes[k], min_nbytes) and not has_extension(p):
                if dtypes[k] != stored_dtypes[k]:
                    self.direct_casts.append(len(self.direct))
                self.direct.append((i, k))
                self.direct_pieces.append(layouts.count_pieces(p, dtypes[k]))
        # Fields of the gather's result, which have a list for each parameter
        spans = [*zip(starts, starts[1:])]
        self.dtypes = [dtypes[start:end] for start, end in spans]
        self.numels = [numels[start:end] for start, end in spans]
        is_mixed = self.dtypes.count(self.dtypes[0]) != len(self.dtypes)
        direct = tuple(k for _, k in self.direct)
        self.layout = layouts.plan_gather((*dtypes,), (*numels,), is_mixed, direct)
        self.copies = layouts.plan_copy_in(self.layout, stored_dtypes)
        self.split_sizes = SplitSizes(self.layout, fsdp_params[0].sharded_state)

    def nbytes_of(self, i: int) -> list[int]:
        """Returns the sizes of a parameter's inputs in bytes."""
        return [n * d.itemsize for n, d in zip(self.numels[i], self.dtypes[i])]


class GatherInputs:
    """A rank's inputs of a gather: 1D tensors, as they are stored, and their plan."""

    def __init__(self, tensors: list[Tensor], plan: GatherPlan, device: torch.device):
        self.tensors, self.plan = tensors, plan
        # Whether any are offloaded, so that a copy to ``device`` moves them
        self.are_on_host = device.type != "cpu" and any(t.is_cpu for t in tensors)
        # The tensors that each copy of the plan reads, once made
        self.sources: list[list[Tensor]] = []
        # Those of which it reads views, which would be stale if their `data` were set
        slots = [copy.region.slots[: copy.num_viewed] for copy in plan.copies]
        viewed = [tensors[i] for i, _ in chain(*slots) if i is not None]
        self.viewed = [tensor for tensor in viewed if type(tensor) is Tensor]
        self.addresses = [tensor.data_ptr() for tensor in self.viewed]

    def make_sources(self) -> list[list[Tensor]]:
        """Returns tensors and padding, viewed in the dtype of a copy without casts."""
        tensors, sources = self.tensors, []
        for region, _, num_viewed in self.plan.copies:
            inputs = [
                tensors[0].new_empty(n, dtype=region.dtype) if i is None else tensors[i]
                for i, n in region.slots
            ]
            inputs[:num_viewed] = view_as(region.dtype, inputs[:num_viewed])
            sources.append(inputs)
        if {tensor.stride(0) for tensor in tensors} == {1}:  # else some are copies
            self.sources = sources
        return sources


def view_as(dtype: torch.dtype, shards: Sequence[Tensor]) -> list[Tensor]:
    try:
        return [shard.view(dtype) for shard in shards]
    except RuntimeError:  # one is not dense, loaded with `assign=True`
        dense = torch.contiguous_format
        return [shard.clone(memory_format=dense).view(dtype) for shard in shards]


def has_extension(fsdp_param: Any) -> bool:
    shard, method = fsdp_param.sharded_param._local_tensor, "fsdp_pre_all_gather"
    return hasattr(shard, method) or hasattr(fsdp_param, "_extensions_data")


def get_all_gather_inputs(fsdp_param: FSDPParam) -> list[Tensor]:
    """Returns the tensors that the parameter, or its extension, gives to gather."""
    try:
        inputs, devices = fsdp_param.all_gather_inputs, {"cpu", fsdp_param.device.type}
        if not inputs or not {tensor.device.type for tensor in inputs} <= devices:
            raise ValueError(f"got {len(inputs)} tensors for {fsdp_param.device}")
        return inputs
    except Exception as error:
        if has_extension(fsdp_param):
            result = "((contiguous tensor, ...), metadata)"
            note_extension(error, fsdp_param, "fsdp_pre_all_gather", result)
        raise


class Columns(NamedTuple):
    """Where a gather's buffer, with a row for each rank, is copied out to."""

    layout: layouts.GatherLayout  # of a row
    tensors: list[Tensor]  # (world_size, size), views of the outputs
    sizes: list[int]
    # (parameter, temporary, output that this is reordered to)
    reordered: list[tuple[FSDPParam, Tensor, Tensor]]


class GatherOutputs:
    """All parameters' 1D all-gather outputs, which resizing their storages frees."""

    def __init__(self, fsdp_params: Sequence[FSDPParam]):
        self.lists = [fsdp_param.all_gather_outputs for fsdp_param in fsdp_params]
        self.tensors = [*chain.from_iterable(self.lists)]
        self.owners = [p for p in fsdp_params for _ in p.all_gather_outputs]
        self.columns: dict[ShardedState, Columns] = {}
        self.storages = [(t.untyped_storage(), t.nbytes) for t in self.tensors]


class ParamGroupCache:
    """
    A group's caches. The group calls it between collectives, which it must not issue, in
    the current stream: that of copy-ins to prepare a gather, of compute to change states.
    """

    def __init__(self, fsdp_params: Iterable[Any], memory: DirectMemory | None = None):
        self.fsdp_params: list[Any] = [*fsdp_params]
        self.direct_memory = memory or DirectMemory()
        self._local_classes = self._get_local_classes()
        self._has_extensions = any(map(has_extension, self.fsdp_params))
        self.has_empty_params = not all(p._orig_size.numel() for p in self.fsdp_params)
        self._places = registrations.places_of(self.fsdp_params)
        # By the state that was gathered from
        self.plans: dict[ShardedState, GatherPlan] = {}
        # Those of the last gather in the sharded state: [Note: Cached between steps]
        self.held_inputs: GatherInputs | None = None
        self._outputs: GatherOutputs | None = None
        self.has_unsharded_params = False
        # By the dtypes of gradients and of partial reduces, see `PartialReduces.plan`
        self.buckets: dict[tuple, tuple[layouts.ReduceBucket, ...]] = {}
        self.noted_facts: list[tuple] | None = None  # see `get_facts`
        # See [Note: Microbatches]
        self.upcast_by_autograd: list[FSDPParam] = []
        # The parameters registered instead of the sharded ones, their `requires_grad`
        self._registered: list[Any] = []
        self._flags: list[bool] = []
        # `_registered`, a parameter and its marks. False: once compared
        self.watched: Any = None

    def get_facts(self) -> list[tuple]:
        """Returns what the dtypes of a step and the buckets follow from."""
        return [
            (policy, p.device, p.dtype, p.grad_dtype, p.requires_grad)
            for policy, p in [(p.mp_policy, p.sharded_param) for p in self.fsdp_params]
        ]

    def _get_local_classes(self) -> list[type]:
        return [type(p.sharded_param._local_tensor) for p in self.fsdp_params]

    def prepare_gather(self) -> GatherInputs:
        """Returns this rank's inputs of a gather, the last ones if these are the same."""
        params, held = self.fsdp_params, self.held_inputs
        # A parameter may be replaced, or be given another local tensor, at any time
        classes = self._get_local_classes()
        if classes != self._local_classes:
            self._local_classes = classes
            self._has_extensions = any(map(has_extension, params))
            self.has_unsharded_params &= not self._has_extensions
        if self._has_extensions:
            by_param = [*map(get_all_gather_inputs, params)]  # cast by the release
            tensors, counts = [*chain(*by_param)], [*map(len, by_param)]
            return self._prepare_anew(tensors, [None] * len(tensors), counts)
        tensors = [p._sharded_param_data for p in params]
        if params[0].sharded_state is ShardedState.SHARDED_POST_FORWARD:
            tensors = [p._sharded_post_forward_param_data for p in params]
        dtypes = [p.param_dtype for p in params]
        facts = dtypes, self.direct_memory.gather_min_nbytes
        if held and held.plan.facts == facts and all(map(is_, tensors, held.tensors)):
            if held.addresses == [tensor.data_ptr() for tensor in held.viewed]:
                return held
        return self._prepare_anew(tensors, dtypes, None)

    def _prepare_anew(self, tensors: list, dtypes: list, counts: Any) -> GatherInputs:
        """Returns new inputs, with the last plan of their state if that still fits."""
        params, min_nbytes = self.fsdp_params, self.direct_memory.gather_min_nbytes
        state = params[0].sharded_state
        stored_dtypes, numels = [t.dtype for t in tensors], [t.numel() for t in tensors]
        made_for = stored_dtypes, dtypes, numels, counts, min_nbytes
        previous = plan = self.plans.get(state)
        if plan is None or plan.made_for != made_for:
            plan = GatherPlan(params, *made_for)
            self._check_outputs(plan, previous)
            self.plans[state] = plan
        inputs = GatherInputs(tensors, plan, params[0].device)
        # Shards after forward are soon freed, and dispatch modes may make fake tensors
        is_sharded = state is ShardedState.SHARDED and counts is None
        if is_sharded and not torch._C._len_torch_dispatch_stack():
            self.held_inputs = inputs
        return inputs

    def _check_outputs(self, plan: GatherPlan, previous: GatherPlan | None) -> None:
        """Raises if outputs have other dtypes than ``plan``, or replaces extensions'."""
        for i, fsdp_param in enumerate(self.fsdp_params):
            if self._has_extensions and has_extension(fsdp_param):
                # It may quantize by row in forward, and by column in backward. As many
                # bytes keep the dtype of the first gather, whatever they are viewed in
                if previous and plan.nbytes_of(i) != previous.nbytes_of(i):
                    fsdp_param.all_gather_outputs = []
                continue
            for output, dtype in zip(fsdp_param.all_gather_outputs, plan.dtypes[i]):
                if output.dtype != dtype:  # and autograd still has views of the output
                    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
                    fault = f"{name} was gathered in {output.dtype} before, but is now {dtype}"
                    fix = "Cast or load with assign=True only before the first forward"
                    raise RuntimeError(f"{fault}. {fix}")

    @property
    def outputs(self) -> GatherOutputs | None:
        """The all-gather outputs, None if a parameter's were never made or replaced."""
        outputs, lists = self._outputs, [p.all_gather_outputs for p in self.fsdp_params]
        return outputs if outputs and all(map(is_, lists, outputs.lists)) else None

    def alloc_outputs(
        self, dtypes: list, numels: list, world_size: int, device: torch.device
    ) -> GatherOutputs:
        """Makes the all-gather outputs, or gives them their storage back."""
        if (outputs := self.outputs) is not None:
            alloc_storages(outputs.storages)
            return outputs
        for fsdp_param, *sizes in zip(self.fsdp_params, numels, dtypes, strict=True):
            fsdp_param.init_all_gather_outputs(*sizes, world_size, device)
            fsdp_param.alloc_all_gather_outputs()
        self._outputs = GatherOutputs(self.fsdp_params)
        return self._outputs

    def init_unsharded_params(self) -> None:
        """Makes the unsharded parameters from new all-gather outputs."""
        fsdp_param = self.fsdp_params[0]
        try:
            for fsdp_param in self.fsdp_params:
                fsdp_param.init_unsharded_param()
        except Exception as error:
            if has_extension(fsdp_param):
                result = "(tensor, (tensor to free, ...))"
                note_extension(error, fsdp_param, "fsdp_post_all_gather", result)
            raise
        self.has_unsharded_params = not self._has_extensions  # those make theirs anew

    def keep_requires_grad(self) -> None:
        """Gives sharded parameters the flags that users have set on registered ones."""
        flags, noted_flags = [p.requires_grad for p in self._registered], self._flags
        if flags != noted_flags:
            for fsdp_param, flag, noted in zip(self.fsdp_params, flags, noted_flags):
                if flag is not noted:
                    fsdp_param.sharded_param.requires_grad_(flag)
            self._flags = flags

    def to_state(self, state: ShardedState) -> None:
        """Brings all parameters to ``state``, and their registrations with them."""
        self._registered = _TO_STATE[state](self)

    def _to_unsharded(self) -> list[Any]:
        """Returns the parameters that are registered instead of the sharded ones."""
        fsdp_params = self.fsdp_params
        params = [p._unsharded_param for p in fsdp_params]
        if fsdp_params[0].sharded_state is not ShardedState.SHARDED:
            self.keep_requires_grad()
            for fsdp_param in fsdp_params:
                fsdp_param.to_unsharded()
            self._flags = [param.requires_grad for param in params]
            return params
        with torch._C.DisableTorchFunctionSubclass():  # DTensor overrides nothing
            flags = [p.sharded_param.requires_grad for p in fsdp_params]
        if flags != [param.requires_grad for param in params]:
            for param, flag in zip(params, flags):
                param.requires_grad_(flag)
        self._flags = flags
        self._register(params, ShardedState.UNSHARDED)
        return params

    def _to_sharded(self) -> list[Any]:
        self.keep_requires_grad()
        outputs, allocated = self.outputs, self.direct_memory.allocated
        params = self.fsdp_params if RELEASE.may_keep_storage else ()
        keeps = any(p.keep_unsharded_storage for p in params)
        if outputs is not None and not (self._has_extensions or keeps):
            for storage, _ in outputs.storages:
                if not allocated or storage._cdata not in allocated:
                    storage.resize_(0)
            params = [p.sharded_param for p in self.fsdp_params]
            self._register(params, ShardedState.SHARDED)
            return []
        for fsdp_param in self.fsdp_params:
            outputs = fsdp_param.all_gather_outputs
            # All but the memory of a direct gather, which is still read
            if any(t.untyped_storage()._cdata in allocated for t in outputs):
                fsdp_param.all_gather_outputs = []
            fsdp_param.to_sharded()
            fsdp_param.all_gather_outputs = outputs
        return []

    def _to_sharded_post_forward(self) -> list[Any]:
        self.keep_requires_grad()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded_post_forward()
        params = [p._sharded_post_forward_param for p in self.fsdp_params]
        self._flags = [param.requires_grad for param in params]
        return params

    def _register(self, params: Sequence[Any], state: ShardedState) -> None:
        registrations.register(self._places, params)
        for fsdp_param in self.fsdp_params:
            fsdp_param.sharded_state = state

    def watch(self) -> None:
        """Notes marks of a shard, see `warn_if_stale`, whose parameters stay unsharded."""
        is_noted = self.watched and self.watched[0] is self._registered
        if self.watched is not False and not is_noted:
            watched = max(self.fsdp_params, key=lambda p: p.sharded_param.requires_grad)
            marks = registrations.get_marks(watched)
            self.watched = self._registered, watched, marks


_TO_STATE = {
    ShardedState.SHARDED: ParamGroupCache._to_sharded,
    ShardedState.SHARDED_POST_FORWARD: ParamGroupCache._to_sharded_post_forward,
    ShardedState.UNSHARDED: ParamGroupCache._to_unsharded,
}
