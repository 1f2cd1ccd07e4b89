"""
From the gradients that autograd makes to the sharded gradients of one param group:
their buckets, when they are reduced, and what is kept until then: partial reduces of
deferred all-reduces, and small buckets, which wait for other units'.

:mod:`_fsdp_param_group` says when backward of the group is over, and
:mod:`_fsdp_collectives` reduces the buckets.
"""

# Tests: reduce, hsdp, grad_comm, streams
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from . import _fsdp_collectives as collectives
from . import _fsdp_layout as layouts
from ._fsdp_collectives import BucketGrads, foreach_reduce, ReduceResult, Reduction
from ._fsdp_copies import accumulate_sharded_grad, relaid
from ._fsdp_layout import BucketKey, ReduceBucket, ReduceBucketCap, ReduceSlot
from ._fsdp_param import FSDPParam
from ._fsdp_param_cache import ParamGroupCache
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE


# To detect monkeypatching: a replacement is called with the release's arguments
_OWN_REDUCE = foreach_reduce
# Of small reductions of several units
_SHARED_COMM = collectives.DefaultReduceScatter()

# Gradient patterns (which parameters have one, in which dtype) whose buckets a group
# caches. Most groups see one; conditional ones see more.
_MAX_CACHED_PATTERNS = 32

# [Note: Microbatches]
# While gradients are not reduced they add up in the reduce dtype, or in a wider
# `grad_dtype` that users have set. Before 2.15 that is ours to do: they move from the
# unsharded parameters to `unsharded_accumulated_grad`. Since 2.15 they stay, and
# autograd adds to them in the unsharded parameters' `grad_dtype`. Where that is wider
# than what forward computes in, autograd would upcast each gradient, also those that
# are reduced at once and cast on their way into the bucket. So backward runs without
# it, and gradients that stay are cast at its end.


def _unsharded_params(
    fsdp_params: Iterable[FSDPParam],
) -> Iterator[tuple[FSDPParam, nn.Parameter]]:
    """Yields those that have been unsharded before."""
    for fsdp_param in fsdp_params:
        if (param := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield fsdp_param, param


def _unsharded_grad_dtype(fsdp_param: Any) -> torch.dtype | None:
    dtype = fsdp_param.unsharded_grad_dtype
    return None if dtype is None else layouts.accumulation_dtype(fsdp_param, dtype)


def is_upcast_by_autograd(fsdp_param: Any) -> bool:
    """Returns whether autograd would upcast gradients, see [Note: Microbatches]."""
    # What is summed over another mesh first is summed in the wider dtype, too
    if not FOLLOWS_GRAD_DTYPE or fsdp_param.may_reduce_grad_outside_dp:
        return False
    compute_dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
    dtype = _unsharded_grad_dtype(fsdp_param)
    if dtype is None or not dtype.is_floating_point:
        return False
    return compute_dtype.is_floating_point and dtype.itemsize > compute_dtype.itemsize


def get_buckets(
    cache: ParamGroupCache, grads: Sequence[Tensor | None]
) -> tuple[ReduceBucket, ...]:
    """Returns the buckets to reduce, in the order that all ranks reduce them in."""
    dtypes = tuple([None if grad is None else grad.dtype for grad in grads])
    if (buckets := cache.buckets.get(dtypes)) is None:
        if len(cache.buckets) >= _MAX_CACHED_PATTERNS:
            cache.buckets.clear()
        buckets = cache.buckets[dtypes] = _plan_buckets(cache, dtypes)
    return buckets


def _plan_buckets(
    fsdp_params: Sequence[FSDPParam], grad_dtypes: Sequence[torch.dtype | None]
) -> tuple[ReduceBucket, ...]:
    """Plans the buckets of gradients of these dtypes, None where there is none."""
    reduce_dtypes = {
        i: layouts.reduce_dtype_of(dtype, layouts.default_reduce_dtype(fsdp_params[i]))
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
        keys.append(layouts.bucket_key(fsdp_param, dtype))
    return layouts.plan_buckets(slots, keys, is_mixed=layouts.is_mixed(fsdp_params))


def _promote(
    fsdp_params: Sequence[FSDPParam], reduce_dtypes: dict[int, torch.dtype]
) -> None:
    """
    Reduces gradients of one storage dtype without a policy's reduce dtype in a dtype
    that holds all of theirs, as the release does in a unit.
    """
    promoted: dict[torch.dtype, torch.dtype] = {}
    without_policy = [
        (i, fsdp_params[i].sharded_param.dtype)
        for i in reduce_dtypes
        if fsdp_params[i].mp_policy.reduce_dtype is None
    ]
    for i, stored in without_policy:
        other = promoted.setdefault(stored, reduce_dtypes[i])
        if reduce_dtypes[i] != other:  # two equal float8 dtypes cannot be promoted
            promoted[stored] = torch.promote_types(reduce_dtypes[i], other)
    for i, stored in without_policy:
        reduce_dtypes[i] = promoted[stored]


@dataclass(frozen=True)
class PartialReduce:
    """A bucket's sum over microbatches and the shard group, not yet over replicas."""

    bucket: ReduceBucket
    output: Tensor  # 1D, in the `BucketGrads.partial_dtype`


@dataclass
class SmallReductions:
    """
    Small buckets that wait for one reduction, with the streams that computed their
    gradients. All ranks add the same in the same order.
    """

    parts: list[tuple[BucketGrads, torch.Stream]] = field(default_factory=list)
    nbytes: int = 0  # of the collective's input


class GradReducer:
    """
    Pops and reduces the gradients of one param group, with the group's settings, and
    keeps what lives from one backward to the next: partial reduces and the last event.
    """

    def __init__(self, group: Any):  # an FSDPParamGroup
        self._group = group
        # Of microbatches whose all-reduce is deferred, for the stream that reduces
        self.partial_reduces: dict[BucketKey, PartialReduce] = {}
        # After the last reduction, including what follows it
        self.event: torch.Event | None = None

    # Gradients of the unsharded parameters #
    def suspend_upcasts(self) -> None:
        """Turns off upcasting of gradients to reduce at once, or to add to others."""
        reduces = self._group.reduce_grads
        for _, param in _unsharded_params(self._group._cache.upcast_by_autograd):
            if param.requires_grad and (reduces or param.grad is not None):
                param.grad_dtype = None

    def resume_upcasts(self) -> None:
        """Turns upcasting on again, and upcasts gradients that were not reduced."""
        upcast = self._group._cache.upcast_by_autograd
        for fsdp_param, param in _unsharded_params(upcast):
            dtype = _unsharded_grad_dtype(fsdp_param)
            # A gradient must have the dtype that is set
            grad, param.grad = param.grad, None
            if param.requires_grad:
                param.grad_dtype = dtype
            if grad is not None:
                param.grad = grad.to(dtype)

    def upcast_unreduced_grads(self) -> None:
        """Before 2.15, moves gradients off parameters to be added in another dtype."""
        params = () if FOLLOWS_GRAD_DTYPE else self._group._cache
        for fsdp_param, param in _unsharded_params(params):
            if (grad := param.grad) is None or not grad.is_floating_point():
                continue  # see `reduce_dtype_of`
            dtype = fsdp_param.reduce_dtype or grad.dtype
            dtype = layouts.accumulation_dtype(fsdp_param, dtype)
            if grad.dtype != dtype:
                param.grad = None
                fsdp_param.unsharded_accumulated_grad = grad.to(dtype)

    def pop_grads(self) -> list[Tensor | None]:
        """Pops the accumulated or new gradients, None or zeros where there is none."""
        if zeros_for_unused := self._group.reduce_scatter_unused_params:
            self._check_zeros_have_a_dtype()
        grads: list[Tensor | None] = []
        for fsdp_param in self._group._cache:
            param: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
            if param is None:  # has not been unsharded yet
                grads.append(None)
                continue
            grad, param.grad = param.grad, None
            if not FOLLOWS_GRAD_DTYPE:
                if (accumulated := fsdp_param.unsharded_accumulated_grad) is not None:
                    grad, fsdp_param.unsharded_accumulated_grad = accumulated, None
                    if layouts.default_reduce_dtype(fsdp_param) is None:
                        # Other ranks may have fresh ones only, which set the bucket
                        grad = grad.to(param.dtype)
            if grad is not None and fsdp_param.is_dtensor:
                grad = fsdp_param._get_grad_inner_tensor(grad)
            elif grad is None and zeros_for_unused and param.requires_grad:
                grad = fsdp_param.unsharded_zero_grad_data
            grads.append(grad)
        return grads

    def _check_zeros_have_a_dtype(self) -> None:
        """Raises, on all ranks alike, if zeros for one would have no dtype."""
        params = self._group._cache if FOLLOWS_GRAD_DTYPE else ()
        for fsdp_param, param in _unsharded_params(params):
            has_dtype = layouts.default_reduce_dtype(fsdp_param) is not None
            if param.requires_grad and not has_dtype:
                raise ValueError(
                    f"grad_dtype of {fsdp_param._param_fqn} is None: reducing zeros "
                    "where it is unused requires an explicit MixedPrecisionPolicy."
                    "reduce_dtype, the one of its gradients. Set that, or do not call "
                    "set_reduce_scatter_unused_params"
                )

    def _accumulate_empty(self, grads: list[Tensor | None]) -> None:
        """Pops gradients without elements, which no kernel or collective accepts."""
        stream = self._group.device_handle.current_stream()
        for i, (fsdp_param, grad) in enumerate(zip(self._group._cache, grads)):
            if grad is not None and grad.numel() == 0:
                grads[i] = None
                param = fsdp_param.sharded_param
                size, dtype = fsdp_param.sharded_size, param.grad_dtype or grad.dtype
                empty = grad.new_empty(size, dtype=dtype, device=param.device)
                accumulate_sharded_grad(fsdp_param, empty, stream)

    # Reducing them #
    def reduce(self, grads: list[Tensor | None], reduce: Callable[..., Any]) -> None:
        """
        Reduces the gradients of the parameters, None where there is none, and removes
        them from the list. ``reduce`` is :func:`foreach_reduce` or its replacement.
        """
        group = self._group
        if group._cache.has_empty_params:
            self._accumulate_empty(grads)
        group.comm_ctx.recycle_reduce_buffers(group)
        buckets = get_buckets(group._cache, grads)
        if self.partial_reduces:
            buckets = self._with_partial_reduces(buckets)
        if not buckets:
            return
        replacement = None if reduce is _OWN_REDUCE else reduce
        if replacement is None:  # which may need no other ranks
            self._check_ranks(buckets)
        with group._range("FSDP::post_backward_reduce"):
            self.wait()
            comm = group._reduce_scatter_comm
            reuses_output = len(buckets) > 1 and not collectives.allocates_anew(comm)
            reduction = self._reduction(replacement, reuses_output)
            if (cap := group.reduce_bucket_cap) is not None:
                buckets = self._defer_small(cap, reduction, buckets, grads)
            # All at once, or one by one where a plugin or a comm needs that
            batches: Sequence[Sequence[ReduceBucket]] = [buckets] if buckets else []
            if replacement is not None:
                batches = [(bucket,) for bucket in buckets]
            elif len(buckets) > 1 and collectives.holds_one_input(comm):
                batches = layouts.by_collective(buckets)
            parts = (
                [self._pop_part(reduction, bucket, grads) for bucket in batch]
                for batch in batches
            )
            self._reduce_parts(reduction, parts, buckets)

    def wait(self) -> None:
        """Waits for the last reduction, if backward comes to the group again."""
        if self.event is None:
            return
        group, context = self._group, self._group.comm_ctx
        group._wait_current_stream(self.event)
        held = [h for h in context.all_reduce_states if h.param_group is group]
        context.drop_all_reduces(held)
        self.event = None

    def finish(self) -> None:
        """Orders the current stream behind all reductions, at the end of backward."""
        self._reduce_all_small()
        self._group.comm_ctx.wait_current_stream_on_reductions()
        self.event = None

    def reset(self) -> None:
        """Waits for what is in flight, and drops what is kept, with all gradients."""
        self.wait()
        self.partial_reduces.clear()
        context, cache = self._group.comm_ctx, self._group._cache
        small, own = context.small_reductions, {*cache}
        for reduction, waiting in [*small.items()]:
            parts = [of for of in waiting.parts if own.isdisjoint(of[0].fsdp_params)]
            nbytes = sum(reduction.input_nbytes(part.bucket) for part, _ in parts)
            small[reduction] = SmallReductions(parts, nbytes)
            if not parts:
                del small[reduction]
        for fsdp_param, param in _unsharded_params(cache):
            param.grad = None
            if not FOLLOWS_GRAD_DTYPE:
                fsdp_param.unsharded_accumulated_grad = None
        for fsdp_param in cache if FOLLOWS_GRAD_DTYPE else ():
            fsdp_param.sharded_param.grad = None
        self.resume_upcasts()

    # Deferred all-reduces #
    def _with_partial_reduces(
        self, fresh: tuple[ReduceBucket, ...]
    ) -> tuple[ReduceBucket, ...]:
        """
        Adds to the buckets of fresh gradients, if all-reduces are no longer deferred,
        an empty one for each partial reduce that they do not complete.
        Raises if a gradient would be reduced in another dtype than before.
        """
        keys = {slot.param: b.key for b in fresh for slot in b.slots}
        for earlier, partial in self.partial_reduces.items():
            for slot in partial.bucket.slots:
                if (key := keys.get(slot.param, earlier)) != earlier:
                    raise RuntimeError(
                        f"{self._group.fsdp_params[slot.param]._param_fqn} was reduced "
                        f"in {layouts.describe_key(earlier)} in an earlier microbatch, "
                        "whose all-reduce was deferred, and would be in "
                        f"{layouts.describe_key(key)} now: keep the dtypes of "
                        "gradients until set_requires_all_reduce(True), or set "
                        "reduce_dtype in MixedPrecisionPolicy"
                    )
        if not self._group.all_reduce_grads:
            return fresh
        present = [bucket.key for bucket in fresh]
        kept = [p.bucket for p in self.partial_reduces.values()]
        empty = [replace(b, slots=()) for b in kept if b.key not in present]
        buckets = [*fresh, *empty]
        return tuple(sorted(buckets, key=lambda b: layouts.bucket_sort_key(b.key)))

    def set_partial_reduce(self, output: Tensor) -> None:
        """Makes ``output`` (1D) the only one, or raises if no bucket is like it."""
        fsdp_params = self._group.fsdp_params
        trained = [
            layouts.dtypes_of(p).compute if p.sharded_param.requires_grad else None
            for p in fsdp_params
        ]
        buckets = _plan_buckets(fsdp_params, trained)
        if len(self.partial_reduces) == 1:  # of which not all may have had a gradient
            (kept,) = self.partial_reduces.values()
            buckets = kept.bucket, *buckets
        for bucket in buckets:
            params = [fsdp_params[slot.param] for slot in bucket.slots]
            dtypes = bucket.dtype, BucketGrads(params, bucket, [], None).partial_dtype
            if output.dtype in dtypes and output.numel() == bucket.shard_numel:
                self.partial_reduces = {bucket.key: PartialReduce(bucket, output)}
                return
        expected = [f"{b.shard_numel} of {b.dtype}" for b in buckets]
        raise ValueError(
            f"got {output.numel()} elements of {output.dtype}, but the unit reduces "
            f"{', '.join(dict.fromkeys(expected))}"
        )

    def _check_ranks(self, buckets: tuple[ReduceBucket, ...]) -> None:
        """Raises if the ranks that are about to reduce ``buckets`` disagree."""
        group, agreement = self._group, self._group._agreement
        if (ranks := group._reduce_scatter_group) is not None:
            agreement.check_reduction(ranks, buckets, group._reduce_scatter_comm)
        if group.all_reduce_grads and (ranks := group._all_reduce_group) is not None:
            if partial := [p.bucket for p in self.partial_reduces.values()]:
                buckets = (*buckets, *partial)
            agreement.check_reduction(ranks, buckets)

    def _reduction(
        self, replacement: Callable[..., Any] | None, reuses_output: bool
    ) -> Reduction:
        group = self._group
        all_reduce_group = group._all_reduce_group
        all_reduce_stream = group._all_reduce_hook_stream
        if all_reduce_stream is None or all_reduce_group is not None:
            all_reduce_stream = group.comm_ctx.all_reduce_stream
        elif group._all_reduce_hook is None:
            raise AssertionError(
                "all reduce hook stream is specified but hook itself is missing: call "
                f"set_all_reduce_hook with a hook on module '{group._module_fqn}'"
            )
        return Reduction(
            group._reduce_scatter_group,
            group.comm_ctx.reduce_scatter_stream,
            group._reduce_scatter_comm,
            all_reduce_group,
            all_reduce_stream,
            group.all_reduce_grads,
            group._all_reduce_hook,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
            group.device,
            group._prepare_reduce_scatter_inputs,
            reuses_output,
            replacement,
        )

    def _reduce_parts(
        self,
        reduction: Reduction,
        batches: Iterable[list[BucketGrads]],
        buckets: tuple[ReduceBucket, ...] = (),
        joined: Sequence[FSDPParam] = (),
    ) -> None:
        """
        Reduces batches one after another, and holds what they use until done: all
        ``buckets`` of this unit, or those that several units' parameters have joined.
        """
        group, comm, results = self._group, reduction.reduce_scatter_comm, []
        are_viewed = True
        try:
            for parts in batches:
                if any(part.bucket.needs_casts for part in parts):
                    are_viewed = False
                if results and collectives.holds_one_input(comm):
                    group._wait_current_stream(results[-1].reduce_scatter_event)
                    results = [r._replace(reduce_scatter_input=None) for r in results]
                results += self._reduce_batch(reduction, parts)
        except BaseException as error:
            streams = reduction.reduce_scatter_stream, reduction.all_reduce_stream
            group._clean_up(error, streams, buckets, joined)
            raise
        group.comm_ctx.hold_reduce_buffers(group, results, are_viewed=are_viewed)

    def _reduce_batch(
        self, reduction: Reduction, parts: list[BucketGrads]
    ) -> list[ReduceResult]:
        """Reduces some buckets, and keeps their events and partial reduces."""
        if reduction.replacement is None:
            results = collectives.reduce_buckets(reduction, parts)
        else:
            results = [collectives.call_monkeypatched(reduction, *parts)]
        last_events = self._group.comm_ctx._last_post_reduce_events
        for part, result in zip(parts, results):
            self.event = result.post_reduce_event
            last_events[result.post_reduce_stream] = self.event
            if (output := result.partial_reduce_output) is not None:
                partial = PartialReduce(part.bucket, output)
                self.partial_reduces[part.bucket.key] = partial
        return results

    def _pop_part(
        self, reduction: Reduction, bucket: ReduceBucket, grads: list[Any]
    ) -> BucketGrads:
        """Moves a bucket's gradients out of ``grads``, for copy-in to free them."""
        popped, all_params = [], self._group.fsdp_params
        for slot in bucket.slots:
            popped.append(grads[slot.param])
            grads[slot.param] = None
        fsdp_params = [all_params[slot.param] for slot in bucket.slots]
        if reduction.replacement is None:
            # Before a partial reduce is added, which is laid out as it was prepared
            bucket = collectives.prepare_inputs(reduction, bucket, fsdp_params, popped)
        output, partial = None, None
        if self.partial_reduces:
            partial = self.partial_reduces.pop(bucket.key, None)
        if partial is not None:
            bucket = layouts.extend_bucket(bucket, partial.bucket)
            with self._group.device_handle.stream(reduction.reduce_scatter_stream):
                output = relaid(partial.bucket, partial.output, bucket)
            fsdp_params = [all_params[slot.param] for slot in bucket.slots]
        return BucketGrads(fsdp_params, bucket, popped, output)

    # Small buckets #
    def _defer_small(
        self,
        cap: ReduceBucketCap,
        reduction: Reduction,
        buckets: tuple[ReduceBucket, ...],
        grads: list[Tensor | None],
    ) -> tuple[ReduceBucket, ...]:
        """Defers small buckets, for reductions with other units'. Returns the rest."""
        if (
            self.partial_reduces
            or reduction.defers_all_reduce
            or reduction.all_reduce_hook is not None
            or not reduction.prepares_by_default
            or type(reduction.reduce_scatter_comm) is not type(_SHARED_COMM)
            or reduction.replacement is not None
        ):
            return buckets
        context = self._group.comm_ctx
        reduction = reduction._replace(reduce_scatter_comm=_SHARED_COMM)
        stream, others = self._group.device_handle.current_stream(), []
        for batch in layouts.by_collective(buckets):
            nbytes = sum(map(reduction.input_nbytes, batch))
            if nbytes > cap.small_nbytes:
                others += batch
                continue
            waiting = context.small_reductions.setdefault(reduction, SmallReductions())
            for bucket in batch:
                part = self._pop_part(reduction, bucket, grads)
                waiting.parts.append((part, stream))
            waiting.nbytes += nbytes
            if waiting.nbytes >= cap.nbytes:
                self._reduce_small(reduction)
        task = torch._C._current_graph_task_id()
        if task not in (-1, context.small_reductions_task):
            # At the end of every backward: `finalize_backward` runs for the last
            context.small_reductions_task = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._reduce_small_at_end_of_backward)
        return tuple(others)

    def _reduce_small_at_end_of_backward(self) -> None:
        """Reduces what waits unless the root, whose end comes later, will do it."""
        context = self._group.modules[0]._get_fsdp_state()._state_ctx
        # Backward inside of backward, as reentrant checkpointing runs it for a segment
        is_nested = context.post_backward_final_callback_queued
        by_hand = getattr(context, "manual_backward_finalization_active", False)
        if not is_nested or not context.is_last_backward or by_hand:
            self._reduce_all_small()

    def _reduce_all_small(self) -> None:
        """Reduces what waits of all units."""
        for reduction in [*self._group.comm_ctx.small_reductions]:
            self._reduce_small(reduction)

    def _reduce_small(self, reduction: Reduction) -> None:
        group = self._group
        group.comm_ctx.recycle_reduce_buffers(group)
        waiting = group.comm_ctx.small_reductions.pop(reduction).parts
        by_key: dict[BucketKey, list[BucketGrads]] = {}
        for part, _ in waiting:
            by_key.setdefault(part.bucket.key, []).append(part)
        keys = sorted(by_key, key=layouts.bucket_sort_key)
        parts = [collectives.join_parts(by_key[key]) for key in keys]
        current_stream = group.device_handle.current_stream()
        streams = dict.fromkeys(s for _, s in waiting if s != current_stream)
        for stream in streams:
            current_stream.wait_stream(stream)
        joined = [fsdp_param for part in parts for fsdp_param in part.fsdp_params]
        self._reduce_parts(reduction, [parts], joined=joined)
        for stream in streams:  # which may reuse the memory of the gradients
            stream.wait_stream(current_stream)
