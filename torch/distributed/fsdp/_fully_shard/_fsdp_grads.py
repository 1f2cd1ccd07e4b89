"""
From the gradients that autograd makes to the buckets to reduce: taking them from the
unsharded parameters, adding up those of microbatches, and what is kept of reductions
whose last part, the all-reduce, was put off.

It needs parameters only: when gradients are taken, and in which stream what is kept
is written, :mod:`_fsdp_param_group` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from ._fsdp_collectives import copy_between
from ._fsdp_layout import (
    dtype_rank,
    extend_bucket,
    plan_buckets,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
)
from ._fsdp_param import FSDPParam
from ._fsdp_unit import dtypes_of, grad_dtype_of, UnitBucket, UnitParams


# Gradient patterns (which parameters have one, reduced in which dtype) whose
# buckets a unit remembers. Most units see one; conditional ones see more.
_MAX_CACHED_PATTERNS = 32


# On the unsharded parameters #


def accumulate_grads(fsdp_params: UnitParams) -> None:
    """Adds this microbatch's gradients to those that earlier ones left, if any did."""
    for fsdp_param in fsdp_params:
        if fsdp_param.unsharded_accumulated_grad is not None:
            fsdp_param.accumulate_unsharded_grad_if_needed()


def keep_grads(fsdp_params: UnitParams) -> None:
    """Keeps the gradients on the unsharded parameters, in the reduce dtype."""
    for fsdp_param in fsdp_params:
        if not hasattr(fsdp_param, "_unsharded_param"):
            continue  # has not been unsharded yet
        grad = fsdp_param.unsharded_param.grad
        if grad is not None and grad.is_floating_point():  # see `reduce_dtype_of`
            fsdp_param.to_accumulated_grad_if_needed()


def take_grads(
    fsdp_params: UnitParams, zeros_for_unused: bool
) -> list[torch.Tensor | None]:
    """
    Takes each parameter's gradient away from it, None where there is none to reduce:
    kept from earlier microbatches, or new, or zeros.
    """
    grads: list[torch.Tensor | None] = []
    for fsdp_param in fsdp_params:
        param: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
        if param is None:  # has not been unsharded yet
            grads.append(None)
            continue
        grad = param.grad
        if (
            grad is None
            or fsdp_param.unsharded_accumulated_grad is not None
            or fsdp_param.is_dtensor
        ):
            grad = _take_unusual_grad(fsdp_param, param, zeros_for_unused)
        else:
            param.grad = None
        grads.append(grad)
    return grads


def _take_unusual_grad(
    fsdp_param: FSDPParam, unsharded_param: nn.Parameter, zeros_for_unused: bool
) -> torch.Tensor | None:
    if (grad := fsdp_param.unsharded_accumulated_grad) is not None:
        fsdp_param.unsharded_accumulated_grad = None
        return fsdp_param._get_grad_inner_tensor(grad)
    if (grad := unsharded_param.grad) is not None:
        unsharded_param.grad = None
        return fsdp_param._get_grad_inner_tensor(grad)
    if zeros_for_unused and unsharded_param.requires_grad:
        return fsdp_param.unsharded_zero_grad_data
    return None


def drop_grads(fsdp_params: UnitParams) -> None:
    for fsdp_param in fsdp_params:
        fsdp_param.unsharded_accumulated_grad = None
        if hasattr(fsdp_param, "_unsharded_param"):
            fsdp_param.unsharded_param.grad = None


# Their buckets #


def get_buckets(
    fsdp_params: UnitParams, grads: Sequence[torch.Tensor | None]
) -> list[UnitBucket]:
    """Returns the reductions to run, in the order that all ranks run them in."""
    dtypes = tuple([None if grad is None else grad.dtype for grad in grads])
    kept = fsdp_params.buckets
    if (buckets := kept.get(dtypes)) is None:
        if len(kept) >= _MAX_CACHED_PATTERNS:
            kept.clear()
        reduce_dtypes = _reduce_dtypes(fsdp_params, dtypes)
        buckets = kept[dtypes] = _plan_buckets(fsdp_params, reduce_dtypes)
    return buckets


def forget_if_changed(fsdp_params: UnitParams) -> None:
    """Forgets the buckets if what they depend on is not what it was when last asked."""
    depends_on = [
        (p.mp_policy.reduce_dtype, grad_dtype_of(p), p.padded_sharded_param_size)
        for p in fsdp_params
    ]
    if fsdp_params.buckets_of != depends_on:
        fsdp_params.buckets.clear()
        fsdp_params.buckets_of = depends_on


def _reduce_dtypes(
    fsdp_params: UnitParams, grad_dtypes: Sequence[torch.dtype | None]
) -> list[torch.dtype | None]:
    """Returns what each parameter's gradient is reduced in, if it has one."""
    return [
        None
        if dtype is None
        else reduce_dtype_of(dtype, fsdp_param.mp_policy.reduce_dtype)
        for dtype, fsdp_param in zip(grad_dtypes, fsdp_params)
    ]


def _plan_buckets(
    fsdp_params: UnitParams, reduce_dtypes: Sequence[torch.dtype | None]
) -> list[UnitBucket]:
    slots, slot_dtypes = [], []
    for i, (fsdp_param, dtype) in enumerate(zip(fsdp_params, reduce_dtypes)):
        if dtype is not None:
            shard_numel = fsdp_param.padded_sharded_param_size.numel()
            slots.append(ReduceSlot(i, grad_dtype_of(fsdp_param), shard_numel))
            slot_dtypes.append(dtype)
    buckets = plan_buckets(slots, slot_dtypes)
    return [UnitBucket.of(fsdp_params, bucket) for bucket in buckets]


# What is left of put-off all-reduces #


@dataclass(frozen=True)
class PartialReduce:
    """
    What a bucket's microbatches so far sum to on this rank, reduced over the
    shard group and not yet over the replicas, with the layout that it has.
    """

    bucket: ReduceBucket
    output: torch.Tensor  # 1D, in the bucket's dtype

    @classmethod
    @torch.no_grad()
    def merge(
        cls,
        bucket: ReduceBucket,
        partials: Sequence[PartialReduce],
        divisors: Mapping[torch.dtype, float] | None = None,
    ) -> PartialReduce:
        """
        Returns what ``partials`` have of the bucket's parameters, where and in
        the dtype that ``bucket`` has them, zero where none has any.

        ``divisors`` gives what a sum in each dtype has been divided by, from
        :func:`scatter_divisor`; needed only if the dtypes differ.
        """
        output = partials[0].output.new_zeros(bucket.shard_numel, dtype=bucket.dtype)
        for partial in partials:
            factor = 1.0
            if divisors is not None:
                factor = divisors[partial.bucket.dtype] / divisors[bucket.dtype]
            copy_between(partial.bucket, partial.output, bucket, output, factor)
        return cls(bucket, output)


class PartialReduces(dict[torch.dtype, PartialReduce]):
    """
    What is kept of a unit by reduce dtype. Its methods are to be called in the stream
    that reduces, which writes what is kept.
    """

    def get_buckets(
        self,
        fsdp_params: UnitParams,
        grads: Sequence[torch.Tensor | None],
        divisor_of: Callable[[torch.dtype], float],
        reduces_all: bool,
    ) -> list[UnitBucket]:
        """
        Does as the function of this name, where something is kept. If that is to be
        reduced as well, it has a bucket even if no gradient meets it.
        """
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        reduce_dtypes = self._align(_reduce_dtypes(fsdp_params, dtypes), divisor_of)
        buckets = _plan_buckets(fsdp_params, reduce_dtypes)
        if reduces_all:
            fresh = [bucket.dtype for _, bucket, _ in buckets]
            buckets += [
                UnitBucket.of(fsdp_params, ReduceBucket(dtype, ()))
                for dtype in self
                if dtype not in fresh
            ]
            buckets.sort(key=lambda unit_bucket: dtype_rank(unit_bucket.bucket.dtype))
        return buckets

    def _align(
        self,
        reduce_dtypes: Sequence[torch.dtype | None],
        divisor_of: Callable[[torch.dtype], float],
    ) -> list[torch.dtype | None]:
        """
        Lets a parameter whose reduce dtype has changed since a part of it was
        kept go on in the wider of both, and returns the dtypes to reduce in.
        """
        aligned = [*reduce_dtypes]
        slots, slot_dtypes, is_moved = [], [], False
        for kept_dtype, partial in self.items():
            for slot in partial.bucket.slots:
                fresh_dtype = reduce_dtypes[slot.param] or kept_dtype
                dtype = torch.promote_types(kept_dtype, fresh_dtype)
                if reduce_dtypes[slot.param] is not None:
                    aligned[slot.param] = dtype
                slots.append(slot)
                slot_dtypes.append(dtype)
                is_moved |= dtype != kept_dtype
        if is_moved:
            kept = [*self.values()]
            divisors = {dtype: divisor_of(dtype) for dtype in [*self, *slot_dtypes]}
            self.clear()
            for bucket in plan_buckets(slots, slot_dtypes):
                self[bucket.dtype] = PartialReduce.merge(bucket, kept, divisors)
        return aligned

    def take(
        self, fsdp_params: UnitParams, fresh: UnitBucket
    ) -> tuple[UnitBucket, torch.Tensor | None]:
        """
        Takes what is kept for a bucket, together with the bucket, to which the
        parameters that only have a part of that are appended.
        """
        partial = self.pop(fresh.bucket.dtype, None)
        if partial is None:
            return fresh, None
        extended = extend_bucket(fresh.bucket, partial.bucket)
        if extended.slots != partial.bucket.slots:
            partial = PartialReduce.merge(extended, [partial])
        return UnitBucket.of(fsdp_params, extended), partial.output

    def put(self, fsdp_params: UnitParams, output: torch.Tensor) -> None:
        """
        Keeps ``output`` (1D) alone, as what all trainable parameters have summed to.

        Raises:
            ValueError: if no bucket of them has its dtype and size.
        """
        kept = self.get(output.dtype)
        if kept is None or kept.bucket.shard_numel != output.numel():
            dtypes = [
                dtypes_of(p).reduce if p.sharded_param.requires_grad else None
                for p in fsdp_params
            ]
            buckets = [b.bucket for b in _plan_buckets(fsdp_params, dtypes)]
        else:
            buckets = [kept.bucket]
        for bucket in buckets:
            if (bucket.dtype, bucket.shard_numel) == (output.dtype, output.numel()):
                self.clear()
                self[bucket.dtype] = PartialReduce(bucket, output)
                return
        wanted = [f"{bucket.shard_numel} of {bucket.dtype}" for bucket in buckets]
        raise ValueError(
            f"got {output.numel()} elements of {output.dtype}, but the unit reduces "
            f"{', '.join(wanted)}"
        )
