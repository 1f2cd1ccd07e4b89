"""
From the gradients that autograd makes to the buckets to reduce: taking them from the
unsharded parameters, adding up those of microbatches, and what is kept of reductions
whose last part, the all-reduce, was put off.

It needs parameters only: when gradients are taken, and in which stream what is kept
is written, :mod:`_fsdp_param_group` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from ._fsdp_copies import copy_between
from ._fsdp_layout import (
    bucket_rank,
    BucketKey,
    extend_bucket,
    plan_buckets,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
)
from ._fsdp_param import FSDPParam
from ._fsdp_release import default_reduce_dtype, FOLLOWS_GRAD_DTYPE
from ._fsdp_unit import comm_dtype_of, dtypes_of, grad_dtype_of, UnitBucket, UnitParams


# Gradient patterns (which parameters have one, reduced in which dtype) whose
# buckets a unit remembers. Most units see one; conditional ones see more.
_MAX_CACHED_PATTERNS = 32


# On the unsharded parameters #


# [Note: Microbatches]
# While gradients are not reduced they add up in the reduce dtype. Before 2.15 that is
# ours to do: they move from the unsharded parameters to `unsharded_accumulated_grad`.
# Since 2.15 they stay, and autograd adds to them in the unsharded parameters'
# `grad_dtype`. Where that is wider than what forward computes in, it would cast each
# gradient, also those that are reduced at once and cast on their way into the bucket.
# So it is taken away for the time of the backward, and gradients that stay are cast
# at its end.


def _unsharded_params(
    fsdp_params: Sequence[FSDPParam],
) -> Iterator[tuple[FSDPParam, nn.Parameter]]:
    """Yields those that have been unsharded before."""
    for fsdp_param in fsdp_params:
        if (param := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield fsdp_param, param


def find_widened(fsdp_params: UnitParams) -> None:
    """Finds whose gradients autograd would cast, see [Note: Microbatches]."""
    fsdp_params.widened = [p for p in fsdp_params if _is_widened(p)]


def _is_widened(fsdp_param: FSDPParam) -> bool:
    if not FOLLOWS_GRAD_DTYPE:
        return False
    computed = fsdp_param.param_dtype or fsdp_param.orig_dtype
    # pyrefly: ignore [missing-attribute]
    wanted = fsdp_param.unsharded_grad_dtype
    if wanted is None or not (wanted.is_floating_point and computed.is_floating_point):
        return False
    is_wider = wanted.itemsize > computed.itemsize
    # What is summed over another mesh first is summed in the wider one, too
    # pyrefly: ignore [missing-attribute]
    return is_wider and not fsdp_param.may_reduce_grad_outside_dp


def begin_backward(fsdp_params: UnitParams, reduces: bool) -> None:
    """Spares autograd the casts that the reduction makes, if there is one."""
    for _, param in _unsharded_params(fsdp_params.widened):
        if param.requires_grad and (reduces or param.grad is not None):
            param.grad_dtype = None


def end_backward(fsdp_params: UnitParams) -> None:
    """Casts the gradients that stay to what the next ones are added in."""
    for fsdp_param, param in _unsharded_params(fsdp_params.widened):
        # pyrefly: ignore [missing-attribute]
        dtype = fsdp_param.unsharded_grad_dtype
        if param.grad is not None and param.grad.dtype != dtype:
            param.grad = param.grad.to(dtype)
        if param.requires_grad:
            param.grad_dtype = dtype


def accumulate_grads(fsdp_params: UnitParams) -> None:
    """Adds this microbatch's gradients to those that earlier ones left, if any did."""
    for fsdp_param in fsdp_params:
        if (kept := fsdp_param.unsharded_accumulated_grad) is None:
            continue
        param = fsdp_param.unsharded_param
        if param.grad is not None:
            kept += param.grad
            param.grad = None


def keep_grads(fsdp_params: UnitParams) -> None:
    """Takes the gradients from the unsharded parameters, in the reduce dtype."""
    for fsdp_param, param in _unsharded_params(fsdp_params):
        grad, dtype = param.grad, fsdp_param.reduce_dtype
        if grad is None or dtype is None or grad.dtype == dtype:
            continue
        if grad.is_floating_point():  # see `reduce_dtype_of`
            param.grad = None
            fsdp_param.unsharded_accumulated_grad = grad.to(dtype)


def take_grads(
    fsdp_params: UnitParams, zeros_for_unused: bool
) -> list[torch.Tensor | None]:
    """
    Takes each parameter's gradient away from it, None where there is none to reduce:
    kept from earlier microbatches, or new, or zeros.
    """
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
            if (kept := fsdp_param.unsharded_accumulated_grad) is not None:
                grad, fsdp_param.unsharded_accumulated_grad = kept, None
        if grad is not None:
            if fsdp_param.is_dtensor:
                grad = fsdp_param._get_grad_inner_tensor(grad)
        elif zeros_for_unused and param.requires_grad:
            grad = fsdp_param.unsharded_zero_grad_data
        grads.append(grad)
    return grads


def _check_zeros_have_a_dtype(fsdp_params: UnitParams) -> None:
    """
    Raises if ranks without a gradient could not tell its dtype. Asks for what all
    ranks have set alike, so that all of them raise.
    """
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


def drop_grads(fsdp_params: UnitParams) -> None:
    """Drops what an iteration that is given up has left."""
    for fsdp_param, param in _unsharded_params(fsdp_params):
        param.grad = None
        if not FOLLOWS_GRAD_DTYPE:
            fsdp_param.unsharded_accumulated_grad = None
    if FOLLOWS_GRAD_DTYPE:
        for fsdp_param in fsdp_params:
            fsdp_param.sharded_param.grad = None
    end_backward(fsdp_params)


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
        (
            p.mp_policy.reduce_dtype,
            comm_dtype_of(p, torch.float32),
            p.sharded_param.dtype,
            p.sharded_param.grad_dtype,
            p.padded_sharded_param_size,
        )
        for p in fsdp_params
    ]
    if fsdp_params.buckets_of != depends_on:
        fsdp_params.buckets.clear()
        fsdp_params.buckets_of = depends_on


def _reduce_dtypes(
    fsdp_params: UnitParams, grad_dtypes: Sequence[torch.dtype | None]
) -> list[torch.dtype | None]:
    """Returns what each parameter's gradient is reduced in, if it has one."""
    reduce_dtypes = [
        None
        if dtype is None
        else reduce_dtype_of(dtype, default_reduce_dtype(fsdp_param))
        for dtype, fsdp_param in zip(grad_dtypes, fsdp_params)
    ]
    return _promote(fsdp_params, reduce_dtypes) if FOLLOWS_GRAD_DTYPE else reduce_dtypes


def _promote(
    fsdp_params: UnitParams, reduce_dtypes: Sequence[torch.dtype | None]
) -> list[torch.dtype | None]:
    """
    Where no policy says in what to reduce, lets parameters of one storage dtype, which
    could be a unit of the release, go together in a dtype that holds all of theirs.
    """
    promoted: dict[torch.dtype, torch.dtype] = {}
    for fsdp_param, dtype in zip(fsdp_params, reduce_dtypes):
        if dtype is not None and fsdp_param.mp_policy.reduce_dtype is None:
            stored = fsdp_param.sharded_param.dtype
            other = promoted.setdefault(stored, dtype)
            if dtype != other:  # of equal ones, float8 has none
                promoted[stored] = torch.promote_types(dtype, other)
    return [
        dtype
        if dtype is None or fsdp_param.mp_policy.reduce_dtype is not None
        else promoted[fsdp_param.sharded_param.dtype]
        for fsdp_param, dtype in zip(fsdp_params, reduce_dtypes)
    ]


def _plan_buckets(
    fsdp_params: UnitParams, reduce_dtypes: Sequence[torch.dtype | None]
) -> list[UnitBucket]:
    slots, dtypes, comm_dtypes = [], [], []
    for i, (fsdp_param, dtype) in enumerate(zip(fsdp_params, reduce_dtypes)):
        if dtype is not None:
            shard_numel = fsdp_param.padded_sharded_param_size.numel()
            slots.append(ReduceSlot(i, grad_dtype_of(fsdp_param), shard_numel))
            dtypes.append(dtype)
            comm_dtypes.append(comm_dtype_of(fsdp_param, dtype))
    buckets = plan_buckets(slots, dtypes, comm_dtypes)
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
        divisors: Mapping[BucketKey, float] | None = None,
    ) -> PartialReduce:
        """
        Returns what ``partials`` have of the bucket's parameters, where and in
        the dtype that ``bucket`` has them, zero where none has any.

        ``divisors`` gives what a sum of each bucket's dtypes has been divided by, from
        :func:`scatter_divisor`; needed only if these differ.
        """
        output = partials[0].output.new_zeros(bucket.shard_numel, dtype=bucket.dtype)
        for partial in partials:
            factor = 1.0
            if divisors is not None:
                factor = divisors[partial.bucket.key] / divisors[bucket.key]
            copy_between(partial.bucket, partial.output, bucket, output, factor)
        return cls(bucket, output)


class PartialReduces(dict[BucketKey, PartialReduce]):
    """
    What is kept of a unit for each bucket. Its methods are to be called in the stream
    that reduces, which writes what is kept.
    """

    def get_buckets(
        self,
        fsdp_params: UnitParams,
        grads: Sequence[torch.Tensor | None],
        divisor_of: Callable[[BucketKey], float],
        reduces_all: bool,
    ) -> list[UnitBucket]:
        """
        Does as the function of this name, where something is kept. If that is to be
        reduced as well, it has a bucket even if no gradient meets it.
        """
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        reduce_dtypes = _reduce_dtypes(fsdp_params, dtypes)
        reduce_dtypes = self._align(fsdp_params, reduce_dtypes, divisor_of)
        buckets = _plan_buckets(fsdp_params, reduce_dtypes)
        if reduces_all:
            fresh = [bucket.key for _, bucket, _ in buckets]
            buckets += [
                UnitBucket.of(fsdp_params, ReduceBucket(dtype, (), comm_dtype))
                for dtype, comm_dtype in self
                if (dtype, comm_dtype) not in fresh
            ]
            buckets.sort(key=lambda unit_bucket: bucket_rank(unit_bucket.bucket.key))
        return buckets

    def _align(
        self,
        fsdp_params: UnitParams,
        reduce_dtypes: Sequence[torch.dtype | None],
        divisor_of: Callable[[BucketKey], float],
    ) -> list[torch.dtype | None]:
        """
        Lets a parameter whose reduce dtype has changed since a part of it was
        kept go on in the wider of both, and returns the dtypes to reduce in.
        """
        aligned = [*reduce_dtypes]
        slots: list[ReduceSlot] = []
        keys: list[BucketKey] = []
        is_moved = False
        for kept_key, partial in self.items():
            for slot in partial.bucket.slots:
                fresh_dtype = reduce_dtypes[slot.param] or kept_key[0]
                dtype = torch.promote_types(kept_key[0], fresh_dtype)
                if reduce_dtypes[slot.param] is not None:
                    aligned[slot.param] = dtype
                slots.append(slot)
                keys.append((dtype, comm_dtype_of(fsdp_params[slot.param], dtype)))
                is_moved |= keys[-1] != kept_key
        if is_moved:
            kept = [*self.values()]
            divisors = {key: divisor_of(key) for key in [*self, *keys]}
            self.clear()
            for bucket in plan_buckets(slots, *zip(*keys)):
                self[bucket.key] = PartialReduce.merge(bucket, kept, divisors)
        return aligned

    def take(
        self, fsdp_params: UnitParams, fresh: UnitBucket
    ) -> tuple[UnitBucket, torch.Tensor | None]:
        """
        Takes what is kept for a bucket, together with the bucket, to which the
        parameters that only have a part of that are appended.
        """
        partial = self.pop(fresh.bucket.key, None)
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
        [kept] = [*self.values()] if len(self) == 1 else [None]
        like = (output.dtype, output.numel())
        if kept is None or (kept.bucket.dtype, kept.bucket.shard_numel) != like:
            made = [
                dtypes_of(p).compute if p.sharded_param.requires_grad else None
                for p in fsdp_params
            ]
            dtypes = _reduce_dtypes(fsdp_params, made)
            buckets = [b.bucket for b in _plan_buckets(fsdp_params, dtypes)]
        else:
            buckets = [kept.bucket]
        for bucket in buckets:
            if (bucket.dtype, bucket.shard_numel) == like:
                self.clear()
                self[bucket.key] = PartialReduce(bucket, output)
                return
        wanted = [f"{bucket.shard_numel} of {bucket.dtype}" for bucket in buckets]
        raise ValueError(
            f"got {output.numel()} elements of {output.dtype}, but the unit reduces "
            f"{', '.join(wanted)}"
        )
