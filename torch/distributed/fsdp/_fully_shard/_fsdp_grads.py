"""
From the gradients that autograd makes to the buckets to reduce: popping them from the
unsharded parameters, adding up those of microbatches, and the partial reduces of
deferred all-reduces.

:mod:`_fsdp_param_group` decides when, and in which stream partial reduces are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from ._fsdp_copies import copy_between
from ._fsdp_dtypes import bucket_key, default_reduce_dtype, dtypes_of, is_mixed
from ._fsdp_layout import (
    bucket_rank,
    BucketKey,
    describe_key,
    extend_bucket,
    plan_buckets,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
)
from ._fsdp_param import FSDPParam
from ._fsdp_param_cache import ParamGroupCache
from ._fsdp_release import FOLLOWS_GRAD_DTYPE


# Gradient patterns (which parameters have one, in which dtype) whose buckets a group
# caches. Most groups see one; conditional ones see more.
_MAX_CACHED_PATTERNS = 32


# On the unsharded parameters #


# [Note: Microbatches]
# While gradients are not reduced they add up in the reduce dtype. Before 2.15 that is
# ours to do: they move from the unsharded parameters to `unsharded_accumulated_grad`.
# Since 2.15 they stay, and autograd adds to them in the unsharded parameters'
# `grad_dtype`. Where that is wider than what forward computes in, autograd would upcast
# each gradient, also those that are reduced at once and cast on their way into the
# bucket. So backward runs without it, and gradients that stay are cast at its end.


def _unsharded_params(
    fsdp_params: Iterable[FSDPParam],
) -> Iterator[tuple[FSDPParam, nn.Parameter]]:
    """Yields those that have been unsharded before."""
    for fsdp_param in fsdp_params:
        if (param := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield fsdp_param, param


def is_upcast_by_autograd(fsdp_param: FSDPParam) -> bool:
    """Returns whether autograd would upcast gradients, see [Note: Microbatches]."""
    if not FOLLOWS_GRAD_DTYPE:
        return False
    compute_dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
    # pyrefly: ignore [missing-attribute]
    dtype = fsdp_param.unsharded_grad_dtype
    if dtype is None or not (
        dtype.is_floating_point and compute_dtype.is_floating_point
    ):
        return False
    # What is summed over another mesh first is summed in the wider one, too
    # pyrefly: ignore [missing-attribute]
    outside_dp = fsdp_param.may_reduce_grad_outside_dp
    return dtype.itemsize > compute_dtype.itemsize and not outside_dp


def suspend_upcasts(cache: ParamGroupCache, reduces: bool) -> None:
    """Spares autograd the casts that the reduction makes, if there is one."""
    for _, param in _unsharded_params(cache.upcast_by_autograd):
        if param.requires_grad and (reduces or param.grad is not None):
            param.grad_dtype = None


def resume_upcasts(cache: ParamGroupCache) -> None:
    """Casts the gradients that stay to what the next ones are added in."""
    for fsdp_param, param in _unsharded_params(cache.upcast_by_autograd):
        # pyrefly: ignore [missing-attribute]
        dtype = fsdp_param.unsharded_grad_dtype
        if param.grad is not None and param.grad.dtype != dtype:
            param.grad = param.grad.to(dtype)
        if param.requires_grad:
            param.grad_dtype = dtype


def accumulate_grads(fsdp_params: Sequence[FSDPParam]) -> None:
    """Adds this microbatch's gradients to those of earlier ones, if there are any."""
    for fsdp_param in fsdp_params:
        if (accumulated := fsdp_param.unsharded_accumulated_grad) is None:
            continue
        param = fsdp_param.unsharded_param
        if param.grad is not None:
            accumulated += param.grad
            param.grad = None


def upcast_unreduced_grads(fsdp_params: Sequence[FSDPParam]) -> None:
    """Moves gradients that are not reduced yet off the parameters, in the reduce dtype."""
    for fsdp_param, param in _unsharded_params(fsdp_params):
        grad, dtype = param.grad, fsdp_param.reduce_dtype
        if grad is None or dtype is None or grad.dtype == dtype:
            continue
        if grad.is_floating_point():  # see `reduce_dtype_of`
            param.grad = None
            fsdp_param.unsharded_accumulated_grad = grad.to(dtype)


def pop_grads(
    fsdp_params: Sequence[FSDPParam], zeros_for_unused: bool
) -> list[torch.Tensor | None]:
    """Pops the accumulated or new gradients, None or zeros where there is none."""
    if zeros_for_unused:
        _check_zeros_have_a_dtype(fsdp_params)
    grads: list[torch.Tensor | None] = []
    for fsdp_param in fsdp_params:
        param: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
        if param is None:  # has not been unsharded yet
            grads.append(None)
            continue
        grad = param.grad
        param.grad = None
        if not FOLLOWS_GRAD_DTYPE:
            if (accumulated := fsdp_param.unsharded_accumulated_grad) is not None:
                grad, fsdp_param.unsharded_accumulated_grad = accumulated, None
        if grad is not None:
            if fsdp_param.is_dtensor:
                grad = fsdp_param._get_grad_inner_tensor(grad)
        elif zeros_for_unused and param.requires_grad:
            grad = fsdp_param.unsharded_zero_grad_data
        grads.append(grad)
    return grads


def _check_zeros_have_a_dtype(fsdp_params: Sequence[FSDPParam]) -> None:
    """Raises, on all ranks alike, if one without a gradient could not know its dtype."""
    for fsdp_param in fsdp_params if FOLLOWS_GRAD_DTYPE else ():
        if not fsdp_param.sharded_param.requires_grad:
            continue
        if default_reduce_dtype(fsdp_param) is None:
            raise ValueError(
                f"grad_dtype of {fsdp_param._param_fqn} is None, so that a rank that "
                "does not use it cannot know in which dtype the others reduce it: set "
                "MixedPrecisionPolicy.reduce_dtype to the dtype of its gradients, or "
                "do not call set_reduce_scatter_unused_params. (Reducing unused "
                "parameters with grad_dtype=None requires an explicit reduce_dtype.)"
            )


def drop_grads(cache: ParamGroupCache) -> None:
    """Drops the gradients of an iteration that failed."""
    for fsdp_param, param in _unsharded_params(cache.fsdp_params):
        param.grad = None
        if not FOLLOWS_GRAD_DTYPE:
            fsdp_param.unsharded_accumulated_grad = None
    if FOLLOWS_GRAD_DTYPE:
        for fsdp_param in cache.fsdp_params:
            fsdp_param.sharded_param.grad = None
    resume_upcasts(cache)


# Their buckets #


def get_buckets(
    cache: ParamGroupCache, grads: Sequence[torch.Tensor | None]
) -> tuple[ReduceBucket, ...]:
    """Returns the buckets to reduce, in the order that all ranks reduce them in."""
    dtypes = tuple([None if grad is None else grad.dtype for grad in grads])
    if (buckets := cache.buckets.get(dtypes)) is None:
        if len(cache.buckets) >= _MAX_CACHED_PATTERNS:
            cache.buckets.clear()
        buckets = cache.buckets[dtypes] = _plan_buckets(cache.fsdp_params, dtypes)
    return buckets


def _plan_buckets(
    fsdp_params: Sequence[FSDPParam], grad_dtypes: Sequence[torch.dtype | None]
) -> tuple[ReduceBucket, ...]:
    """Plans the buckets of gradients of these dtypes, None where there is none."""
    reduce_dtypes = {
        i: reduce_dtype_of(dtype, default_reduce_dtype(fsdp_params[i]))
        for i, dtype in enumerate(grad_dtypes)
        if dtype is not None
    }
    if FOLLOWS_GRAD_DTYPE:
        _promote(fsdp_params, reduce_dtypes)
    slots, keys = [], []
    for i, dtype in reduce_dtypes.items():
        fsdp_param = fsdp_params[i]
        numel = fsdp_param.padded_sharded_param_size.numel()
        grad_dtype = fsdp_param.sharded_param.grad_dtype
        slots.append(ReduceSlot(i, grad_dtype, numel, fsdp_param.fsdp_placement.dim))
        keys.append(bucket_key(fsdp_param, dtype))
    return plan_buckets(slots, keys, is_aligned=is_mixed(fsdp_params))


def _promote(
    fsdp_params: Sequence[FSDPParam], reduce_dtypes: dict[int, torch.dtype]
) -> None:
    """
    Reduces gradients of one storage dtype without a policy's reduce dtype in a dtype that
    holds all of theirs, as the release does in a unit.
    """
    promoted: dict[torch.dtype, torch.dtype] = {}
    without_policy = [
        (i, fsdp_params[i].sharded_param.dtype)
        for i in reduce_dtypes
        if fsdp_params[i].mp_policy.reduce_dtype is None
    ]
    for i, stored in without_policy:
        other = promoted.setdefault(stored, reduce_dtypes[i])
        if reduce_dtypes[i] != other:  # of equal ones, float8 has none
            promoted[stored] = torch.promote_types(reduce_dtypes[i], other)
    for i, stored in without_policy:
        reduce_dtypes[i] = promoted[stored]


# Deferred all-reduces #


@dataclass(frozen=True)
class PartialReduce:
    """A bucket's sum over microbatches and the shard group, not yet over replicas."""

    bucket: ReduceBucket
    output: torch.Tensor  # 1D, in the bucket's dtype

    @torch.no_grad()
    def laid_out_as(self, bucket: ReduceBucket) -> torch.Tensor:
        """Returns the output as ``bucket`` lays it out, zero where this has no slot."""
        if bucket == self.bucket:
            return self.output
        output = self.output.new_zeros(bucket.shard_numel)
        copy_between(self.bucket, self.output, bucket, output)
        return output


class PartialReduces(dict[BucketKey, PartialReduce]):
    """A group's partial reduces by bucket, to be used in the stream that reduces."""

    def complete(
        self,
        fsdp_params: Sequence[FSDPParam],
        fresh: tuple[ReduceBucket, ...],
        all_reduces: bool,
    ) -> tuple[ReduceBucket, ...]:
        """
        Returns the buckets of fresh gradients and, if all-reduces are no longer
        deferred, an empty one for each partial reduce that no gradient is added to.

        Raises:
            RuntimeError: if a gradient would be reduced in another dtype than those of
                earlier microbatches.
        """
        keys = {slot.param: b.key for b in fresh for slot in b.slots}
        for partial in self.values():
            for slot in partial.bucket.slots:
                key = keys.get(slot.param, partial.bucket.key)
                if key != partial.bucket.key:
                    raise RuntimeError(
                        f"{fsdp_params[slot.param]._param_fqn} was reduced in "
                        f"{describe_key(partial.bucket.key)} in an earlier microbatch, "
                        f"whose all-reduce was deferred, and would be in "
                        f"{describe_key(key)} now: keep the dtypes of gradients until "
                        "set_requires_all_reduce(True), or set reduce_dtype in "
                        "MixedPrecisionPolicy"
                    )
        if not all_reduces:
            return fresh
        present = [bucket.key for bucket in fresh]
        empty = [
            replace(partial.bucket, slots=(), num_new=None)
            for key, partial in self.items()
            if key not in present
        ]
        return tuple(sorted((*fresh, *empty), key=lambda b: bucket_rank(b.key)))

    def pop_for(self, fresh: ReduceBucket) -> tuple[ReduceBucket, torch.Tensor | None]:
        """Pops a bucket's partial reduce, whose other parameters extend the bucket."""
        partial = self.pop(fresh.key, None)
        if partial is None:
            return fresh, None
        extended = extend_bucket(fresh, partial.bucket)
        return extended, partial.laid_out_as(extended)

    def set_output(
        self, fsdp_params: Sequence[FSDPParam], output: torch.Tensor
    ) -> None:
        """Makes ``output`` (1D) the only one, or raises if no bucket is like it."""
        trained = [
            dtypes_of(p).compute if p.sharded_param.requires_grad else None
            for p in fsdp_params
        ]
        buckets = _plan_buckets(fsdp_params, trained)
        if len(self) == 1:  # which not all parameters may have had a gradient for
            buckets = (*(partial.bucket for partial in self.values()), *buckets)
        for bucket in buckets:
            if (bucket.dtype, bucket.shard_numel) == (output.dtype, output.numel()):
                self.clear()
                self[bucket.key] = PartialReduce(bucket, output)
                return
        expected = [f"{b.shard_numel} of {b.dtype}" for b in buckets]
        raise ValueError(
            f"got {output.numel()} elements of {output.dtype}, but the unit reduces "
            f"{', '.join(dict.fromkeys(expected))}"
        )
