"""
Gradients of a param group: their buckets, accumulation over microbatches, and those that
wait for a later reduction: partial reduces of deferred all-reduces, and small buckets.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle

from . import _fsdp_layout as layouts
from ._fsdp_direct import can_be_direct, shards_evenly
from ._fsdp_errors import listed
from ._fsdp_layout import BucketKey, count_pieces, ReduceBucket, ReduceSlot
from ._fsdp_param import FSDPParam
from ._fsdp_param_cache import ParamGroupCache
from ._fsdp_reduce import accumulate_sharded_grad, BucketGrads, make_parts, Reduction
from ._fsdp_releases import RELEASE
from ._fsdp_scaling import get_remaining_divisor, Scaling


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup


# Which parameters have a gradient, in which dtype: mostly one
_MAX_CACHED_PATTERNS = 32

# [Note: Microbatches]
# While gradients are not reduced they add up in the reduce dtype, or in a wider
# `grad_dtype` that users have set. Before 2.15 FSDP adds them in
# `unsharded_accumulated_grad`. Since 2.15 they stay on the unsharded parameters, and
# autograd adds to them in these parameters' `grad_dtype`. If that is wider than the
# compute dtype, autograd would upcast every gradient, even one that is reduced at once
# and cast by the copy-in. So FSDP unsets `grad_dtype` during backward, and at its end
# casts the gradients that were not reduced.


def _unsharded_params(
    fsdp_params: Iterable[FSDPParam],
) -> Iterator[tuple[FSDPParam, nn.Parameter]]:
    """Yields each parameter that was ever unsharded, with its unsharded parameter."""
    for fsdp_param in fsdp_params:
        if (param := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield fsdp_param, param


def _plan_buckets(
    cache: ParamGroupCache,
    grad_dtypes: Sequence[torch.dtype | None],
    earlier: Mapping[int, torch.dtype],
) -> tuple[ReduceBucket, ...]:
    """
    Plans buckets by the dtypes of gradients, None where there is none, and of ``earlier``
    partial reduces, by parameter.
    """
    fsdp_params, min_nbytes = cache.fsdp_params, cache.direct_memory.min_nbytes
    reduce_dtypes = {
        i: layouts.reduce_dtype_of(dtype, layouts.default_reduce_dtype(fsdp_params[i]))
        for i, dtype in enumerate(grad_dtypes)
        if dtype is not None
    }
    if RELEASE.accumulates_by_autograd:
        # As in a unit of the release: a dtype that holds those of all gradients, and
        # partial reduces, of one storage dtype for which the policy sets no reduce dtype
        promoted: dict[torch.dtype, torch.dtype] = {}
        sets_none = [p.mp_policy.reduce_dtype is None for p in fsdp_params]
        stored = [p.sharded_param.dtype for p in fsdp_params]
        for i, dtype in [*reduce_dtypes.items(), *earlier.items()]:
            # Two equal float8 dtypes cannot be promoted
            if sets_none[i] and promoted.setdefault(stored[i], dtype) != dtype:
                promoted[stored[i]] = torch.promote_types(promoted[stored[i]], dtype)
        for i in reduce_dtypes:
            if sets_none[i]:
                reduce_dtypes[i] = promoted[stored[i]]
    by_param = [(i, fsdp_params[i], dtype) for i, dtype in reduce_dtypes.items()]
    slots = [make_slot(*item, min_nbytes) for item in by_param]
    keys = [layouts.bucket_key(fsdp_param, dtype) for _, fsdp_param, dtype in by_param]
    trained = [p for p in fsdp_params if p.sharded_param.requires_grad]
    is_mixed = len({*map(layouts.dtypes_of, trained)}) > 1
    return layouts.plan_buckets(slots, keys, is_mixed)


def make_slot(
    index: int, fsdp_param: FSDPParam, dtype: torch.dtype, min_nbytes: int | None = None
) -> ReduceSlot:
    """Returns the slot of a parameter that has this position among its unit's."""
    grad_dtype = fsdp_param.sharded_param.grad_dtype
    numel = fsdp_param.padded_sharded_param_size.numel()
    if not (dtype.is_floating_point and shards_evenly(fsdp_param)):
        min_nbytes = None  # gradients, which are not padded, are then packed
    is_direct = can_be_direct(fsdp_param, dtype, min_nbytes)
    dim, num_pieces = fsdp_param.fsdp_placement.dim, count_pieces(fsdp_param, dtype)
    return ReduceSlot(index, grad_dtype, numel, dim, is_direct, num_pieces)


# Gradients of the unsharded parameters #


class Accumulation:
    """How gradients of unsharded parameters add up, see [Note: Microbatches]."""

    @staticmethod
    def _grad_dtype_of(fsdp_param: Any) -> torch.dtype | None:
        dtype = fsdp_param.unsharded_grad_dtype
        return None if dtype is None else layouts.accumulation_dtype(fsdp_param, dtype)

    def find_upcast(self, fsdp_params: Iterable[Any]) -> list[Any]:
        """Returns the parameters whose gradients autograd would upcast."""
        upcast: list[Any] = []
        for fsdp_param in fsdp_params:
            compute_dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
            dtype = self._grad_dtype_of(fsdp_param) or compute_dtype
            is_wider = dtype.itemsize > compute_dtype.itemsize
            are_floats = dtype.is_floating_point and compute_dtype.is_floating_point
            # Gradients that are first summed over another mesh need the wider dtype there
            if is_wider and are_floats and not fsdp_param.may_reduce_grad_outside_dp:
                upcast.append(fsdp_param)
        return upcast

    def begin_backward(self, cache: ParamGroupCache, *, reduces: bool) -> None:
        """Turns upcasting off for gradients that are reduced at once or added to others."""
        for _, param in _unsharded_params(cache.upcast_by_autograd):
            if param.requires_grad and (reduces or param.grad is not None):
                param.grad_dtype = None

    def add_up(self, group: FSDPParamGroup) -> None:
        """Adds the new gradients to those that FSDP keeps apart."""

    def end_backward(self, cache: ParamGroupCache) -> None:
        """Turns upcasting on, in new parameters as well, and upcasts unreduced gradients."""
        for fsdp_param, param in _unsharded_params(cache.upcast_by_autograd):
            # A gradient must have the dtype that is set
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype = self._grad_dtype_of(fsdp_param)  # also if frozen
            if grad is not None:
                param.grad = grad.to(dtype)

    def keep_unreduced(self, fsdp_params: Iterable[FSDPParam]) -> None:
        """Keeps gradients apart, after a backward that reduces none."""

    def check_zeros(self, fsdp_params: Iterable[FSDPParam]) -> None:
        """Raises, on all ranks alike, if zeros for unused parameters have no dtype."""
        for fsdp_param, param in _unsharded_params(fsdp_params):
            if param.requires_grad and layouts.default_reduce_dtype(fsdp_param) is None:
                fix = "so zeros have no dtype: set reduce_dtype in its policy"
                raise ValueError(f"{fsdp_param._param_fqn}.grad_dtype is None, {fix}")

    def pop(self, fsdp_param: Any, param: nn.Parameter) -> Tensor | None:
        grad, param.grad = param.grad, None
        return grad

    def pop_grads(self, group: FSDPParamGroup) -> list[Tensor | None]:
        """Pops the accumulated or new gradients, None or zeros where there is none."""
        if zeros_for_unused := group.reduce_scatter_unused_params:
            self.check_zeros(group.fsdp_params)
        grads: list[Tensor | None] = []
        for fsdp_param in group.fsdp_params:
            # None if it was never unsharded
            param: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
            grad = None if param is None else self.pop(fsdp_param, param)
            if grad is not None:
                if fsdp_param.is_dtensor:
                    grad = fsdp_param._get_grad_inner_tensor(grad)
            elif zeros_for_unused and param is not None and param.requires_grad:
                grad = fsdp_param.unsharded_zero_grad_data
            grads.append(grad)
        return grads

    def drop_grads(self, cache: ParamGroupCache) -> None:
        """Drops the gradients of unsharded and of sharded parameters."""
        for fsdp_param, param in _unsharded_params(cache.fsdp_params):
            self.pop(fsdp_param, param)
        for fsdp_param in cache.fsdp_params:
            fsdp_param.sharded_param.grad = None
        self.end_backward(cache)


class AccumulationBefore215(Accumulation):
    """FSDP adds gradients up itself, in `unsharded_accumulated_grad`."""

    def find_upcast(self, fsdp_params: Iterable[Any]) -> list[Any]:
        return []

    def add_up(self, group: FSDPParamGroup) -> None:
        with group._range("FSDP::post_backward_accumulate"):
            for fsdp_param in group.fsdp_params:
                if fsdp_param.unsharded_accumulated_grad is not None:
                    fsdp_param.accumulate_unsharded_grad_if_needed()

    def keep_unreduced(self, fsdp_params: Iterable[Any]) -> None:
        """Moves gradients off parameters where they add up in another dtype."""
        for fsdp_param, param in _unsharded_params(fsdp_params):
            if (grad := param.grad) is None:
                continue
            dtype = layouts.reduce_dtype_of(grad.dtype, fsdp_param.reduce_dtype)
            dtype = layouts.accumulation_dtype(fsdp_param, dtype)
            if grad.dtype != dtype:
                param.grad = None
                fsdp_param.unsharded_accumulated_grad = grad.to(dtype)

    def check_zeros(self, fsdp_params: Iterable[FSDPParam]) -> None: ...

    def pop(self, fsdp_param: Any, param: nn.Parameter) -> Tensor | None:
        grad, param.grad = param.grad, None
        if (accumulated := fsdp_param.unsharded_accumulated_grad) is not None:
            grad, fsdp_param.unsharded_accumulated_grad = accumulated, None
            if layouts.default_reduce_dtype(fsdp_param) is None:
                # As a rank without earlier microbatches has it: all need one bucket
                grad = grad.to(param.dtype)
        return grad

    def drop_grads(self, cache: ParamGroupCache) -> None:
        for fsdp_param, param in _unsharded_params(cache.fsdp_params):
            self.pop(fsdp_param, param)


_kind = Accumulation if RELEASE.accumulates_by_autograd else AccumulationBefore215
accumulation = _kind()


def accumulate_empty_grads(group: FSDPParamGroup, grads: list[Tensor | None]) -> None:
    """Pops gradients without elements, which no kernel or collective accepts."""
    stream = group.device_handle.current_stream()
    for i, (fsdp_param, grad) in enumerate(zip(group.fsdp_params, grads)):
        if grad is not None and grad.numel() == 0:
            grads[i] = None
            param = fsdp_param.sharded_param
            size, dtype = fsdp_param.sharded_size, param.grad_dtype or grad.dtype
            empty = grad.new_empty(size, dtype=dtype, device=param.device)
            accumulate_sharded_grad(fsdp_param, empty, stream)


def reduce_late_grads(group: FSDPParamGroup) -> None:
    """
    Reduces gradients that came after the group's post-backward. A later microbatch in an
    autocast region uses the casts that autocast has kept of an earlier one, and autograd
    runs last what was recorded first. That is so on all ranks, or on none.
    """
    params = _unsharded_params(group.fsdp_params) if group.reduce_grads else ()
    late = [str(p._param_fqn) for p, param in params if param.grad is not None]
    if late and group.reduce_scatter_unused_params:  # not so: others may have used none
        warnings.warn(
            f"Gradients of {listed(late)} came after their unit had reduced, and wait for "
            "its next reduction: autocast has kept casts of an earlier microbatch. Give "
            "each microbatch an autocast region, or pass cache_enabled=False",
            stacklevel=2,
        )
    elif late:
        with group.use_training_state(group._training_state):  # as it is after it
            group.post_backward()


# Deferred all-reduces #


@torch.no_grad()
def relayout(
    bucket: ReduceBucket, shard: Tensor, target_bucket: ReduceBucket, scaling: Scaling
) -> Tensor:
    """Moves a partial reduce (1D) to another bucket's slots, zeros in new ones."""
    dtype = torch.promote_types(shard.dtype, target_bucket.dtype)
    target = shard.new_zeros(target_bucket.shard_numel, dtype=dtype)
    starts = dict(zip(bucket.params, bucket.starts))
    for slot, target_start in zip(target_bucket.slots, target_bucket.starts):
        if (start := starts.get(slot.param)) is not None:
            piece = shard.narrow(0, start, slot.shard_numel)
            target.narrow(0, target_start, slot.shard_numel).copy_(piece)
    old = get_remaining_divisor(bucket.key, scaling)
    new = get_remaining_divisor(target_bucket.key, scaling)
    return target if new == old else target.mul_(new / old)


class PartialReduces(dict[BucketKey, tuple[ReduceBucket, Tensor]]):
    """
    A param group's buckets, by key, with their sums over microbatches and the shard group,
    not yet over replicas (1D, in the `BucketGrads.partial_dtype`).
    """

    def plan(
        self, cache: ParamGroupCache, grads: list[Tensor | None], *, defers: bool
    ) -> tuple[ReduceBucket, ...]:
        """
        Returns the buckets to reduce, in the same order on all ranks. A parameter with only
        a partial reduce gets zeros, as other ranks may have a gradient for it; before 2.15
        not in a unit without any gradient, if this microbatch ``defers`` the all-reduce.
        """
        fsdp_params = cache.fsdp_params
        earlier = {i: b.dtype for b, _ in self.values() for i in b.params}
        if earlier and hasattr(fsdp_params[0], "_unsharded_param"):
            by_autograd = RELEASE.accumulates_by_autograd
            if by_autograd or not defers or any(g is not None for g in grads):
                for i, dtype in earlier.items():
                    if grads[i] is None:
                        grads[i] = fsdp_params[i].unsharded_zero_grad_data.to(dtype)
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        pattern = (*dtypes,), (*earlier.items(),)
        if (buckets := cache.buckets.get(pattern)) is None:
            if len(cache.buckets) >= _MAX_CACHED_PATTERNS:
                cache.buckets.clear()
            buckets = cache.buckets[pattern] = _plan_buckets(cache, dtypes, earlier)
        return buckets

    def prepare(self, reduction: Reduction, part: BucketGrads) -> None:
        """
        Lets plugins prepare a bucket's gradients, and sets the sum of its partial reduces,
        whatever dtypes these were reduced in. Called in the compute stream.
        """
        if reduction.plugins is not None:
            reduction.plugins.prepare_part(part, reduction.shard_world_size)
        bucket, stream = part.bucket, reduction.reduce_scatter_stream
        for earlier, partial in self.values():
            if earlier == bucket:
                part.partial_reduce_output = partial
                return
            if {*bucket.params}.isdisjoint(earlier.params):
                continue
            # New memory may have been freed after waits of the current stream only
            handle = _get_device_handle(reduction.device.type)
            stream.wait_stream(handle.current_stream())
            with handle.stream(stream):
                moved = relayout(earlier, partial, bucket, reduction.scaling)
                output = part.partial_reduce_output
                part.partial_reduce_output = moved if output is None else output + moved

    def assign(self, group: FSDPParamGroup, output: Tensor) -> None:
        """Makes ``output`` (1D) the only partial reduce. Raises if it fits no bucket."""
        cache, fsdp_params = group._get_cache(), group.fsdp_params
        compute_dtypes = [
            layouts.dtypes_of(p).compute if p.sharded_param.requires_grad else None
            for p in fsdp_params
        ]
        # The bucket of a partial reduce may lack parameters that had no gradient
        buckets = [bucket for bucket, _ in self.values()]
        buckets += _plan_buckets(cache, compute_dtypes, {})
        for bucket in buckets:
            params = [fsdp_params[i] for i in bucket.params]
            dtypes = bucket.dtype, BucketGrads(params, bucket, []).partial_dtype
            if output.dtype in dtypes and output.numel() == bucket.shard_numel:
                self.clear()
                self[bucket.key] = bucket, output
                return
        expected = dict.fromkeys(f"{b.shard_numel} of {b.dtype}" for b in buckets)
        found = f"got {output.numel()} elements of {output.dtype}"
        fix = f"{found}, but the unit reduces {', '.join(expected)}"
        raise ValueError(f"_partial_reduce_output of unit '{group._unit_name}' {fix}")


@dataclass(eq=False)
class JoinedReduction:
    """Small buckets that wait for one reduction, in the same order on all ranks."""

    reduction: Reduction
    parts: list[BucketGrads] = field(default_factory=list)
    streams: dict[torch.Stream, None] = field(default_factory=dict)  # of their backward
    nbytes: int = 0  # of the collective's input

    def join(self) -> list[BucketGrads]:
        """Returns a bucket for each key, with the gradients of all units."""
        slots, keys, fsdp_params, grads = [], [], [], []
        for part in self.parts:
            for slot in part.bucket.slots:
                slots.append(replace(slot, param=len(slots), is_direct=False))
                keys.append(part.bucket.key)
            fsdp_params += part.fsdp_params
            grads += part.unsharded_grads
            part.unsharded_grads.clear()
        is_mixed = any(part.bucket.is_mixed for part in self.parts)
        buckets = layouts.plan_buckets(slots, keys, is_mixed)
        return make_parts(buckets, fsdp_params, grads)
