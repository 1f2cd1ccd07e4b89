"""Checks of users' settings, and the setters that are not methods of ``FSDPModule``."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp.api import BackwardPrefetch

from . import _fsdp_comms as comms
from ._fsdp_api import AllGather, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from ._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from ._fsdp_layout import dtypes_of
from ._fsdp_registrations import fqns_of, groups_of


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup


def set_backward_prefetch(
    module: nn.Module,
    backward_prefetch: BackwardPrefetch | None,
    *,
    recurse: bool = True,
) -> None:
    """
    Sets when units start the all-gather of the unit whose backward comes next, where
    ``set_modules_to_backward_prefetch`` does not say which. All ranks must agree.

    Args:
        module (nn.Module): A module with units in it.
        backward_prefetch (BackwardPrefetch, optional): ``BACKWARD_PRE``, the default:
            before a unit's backward, beside it, while both units' parameters are in
            memory. ``BACKWARD_POST``: after it, when parameters are freed, beside the
            reduce-scatter only; a unit none of whose inputs needs a gradient prefetches
            nothing. ``None``: each unit gathers when its backward begins.
        recurse (bool): False: for the module's unit only.

    Raises:
        TypeError: if ``backward_prefetch`` is neither.
        ValueError: if there is no such unit.
    """
    if not isinstance(backward_prefetch, BackwardPrefetch | None):
        raise TypeError(f"{backward_prefetch=}: give a BackwardPrefetch or None")
    for group in groups_of(module, "set_backward_prefetch", recurse):
        group.backward_prefetch = backward_prefetch


def set_reduce_bucket_cap(
    module: nn.Module,
    bucket_cap_mb: float | None = 1.0,
    *,
    small_kb: float = 64.0,
    recurse: bool = True,
) -> None:
    """
    Joins small reductions of several units, to save latency. With a cap, gradients of a
    unit whose reduce-scatter would send at most ``small_kb`` wait. They are reduced with
    those of other units, in one reduce-scatter (and one all-reduce over replicas) for
    each reduce dtype, at ``bucket_cap_mb`` and at the end of backward, or by the handle
    of ``finalize_backward(async_op=True)`` (2.15). Reentrant checkpoints have a backward
    each. Until then gradients stay in memory, sharded ones are not set, and no
    post-accumulate-grad hooks run. With more than two ranks, sums may round differently
    (not with ``grad_comm_dtype``). All ranks must set the same.

    Units that differ in process groups, divide factors or dtypes are not joined. Those
    with a custom reduce-scatter or copy-in, an all-reduce hook, deferred all-reduces, or
    memory from the process group or symmetric memory never wait.

    Args:
        module (nn.Module): A module with units in it.
        bucket_cap_mb (float, optional): How many MiB are reduced at once, the gradients
            of one rank for all of them. ``None``: no reduction waits.
        small_kb (float): Up to how many KiB one reduction waits.
        recurse (bool): False: for the module's unit only.

    Raises:
        ValueError: if a size is not finite and positive, or there is no such unit.
    """
    cap = None
    if bucket_cap_mb is not None:
        sizes = bucket_cap_mb, small_kb
        if not all(_is_number(size) and 0 < size * 2**20 < math.inf for size in sizes):
            raise ValueError(f"{bucket_cap_mb=} and {small_kb=} must be finite and > 0")
        cap = int(small_kb * 2**10), int(bucket_cap_mb * 2**20)
    for group in groups_of(module, "set_reduce_bucket_cap", recurse):
        group.reduce_bucket_cap = cap


def set_coalesced_collectives(
    module: nn.Module, min_nbytes: int | None = 2**20, *, recurse: bool = True
) -> None:
    """
    Gathers large parameters straight into their unsharded memory, and reduces straight
    from their gradients. One grouped call each way moves them and a buffer with all
    others, which saves the copies into and out of that. All ranks must set the same.

    A parameter is sent uncopied if it has no all-gather extension, at least
    ``min_nbytes``, and is sharded on dim 0, or on dim d into at most 32 pieces, one for
    each index of the first d dims; its gradient, if it is also sharded evenly, has no
    ``grad_comm_dtype`` and shares its memory with none. A hook that keeps it must not
    write to it before the end of backward. With more than two ranks sums may round
    differently. Memory of the last resharded unit is kept until the next gather, the end
    of backward, a user's ``reshard()`` or a state dict. Not for custom collectives, memory
    from the process group or symmetric memory, nor gathers over a smaller mesh.

    Args:
        module (nn.Module): A module with units in it.
        min_nbytes (int, optional): The least size of the unsharded parameter, or of its
            gradient, in the dtype it is sent in. ``None``: all are copied.
        recurse (bool): False: for the module's unit only.

    Raises:
        ValueError: if ``min_nbytes`` is not a number of bytes, or there is no such unit.
        RuntimeError: if an all-reduce of a unit has been deferred.
    """
    if min_nbytes is not None and not (type(min_nbytes) is int and min_nbytes >= 0):
        raise ValueError(f"{min_nbytes=} must be a number of bytes >= 0, or None")
    groups = groups_of(module, "set_coalesced_collectives", recurse)
    changed = [g for g in groups if g._direct_memory.min_nbytes != min_nbytes]
    if deferred := [g._unit_name for g in changed if g._partial_reduces]:
        # Their slots could not be sorted again
        fix = "call set_coalesced_collectives before the first of these microbatches"
        raise RuntimeError(f"The all-reduce of units {deferred} is deferred: {fix}")
    for group in changed:
        memory, cache = group._direct_memory, group._get_cache()
        memory.min_nbytes, memory.gather_min_nbytes = min_nbytes, None
        cache.plans.clear()
        cache.buckets.clear()
        group._agreement.has_compared_gathers = False  # ranks are compared again


class OnSet:
    """An attribute of a param group. A function, which may refuse it, is called before."""

    def __init__(self, on_set: Callable[[FSDPParamGroup, Any], None]):
        self._on_set = on_set

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, group: FSDPParamGroup, value: Any) -> None:
        self._on_set(group, value)
        vars(group)[self._name] = value


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_scalar or isinstance(value, numbers.Real)


def _refuse(group: Any, name: str, value: Any, fix: str, cls: type = TypeError) -> None:
    raise cls(f"{name} of unit '{group._unit_name}' got {value!r}: pass {fix}")


def check_policies(group: FSDPParamGroup, mp_policy: Any, offload: Any = None) -> None:
    if not isinstance(offload, OffloadPolicy | None):  # None: no offload, as always
        _refuse(group, "offload_policy", offload, "CPUOffloadPolicy()")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        _refuse(group, "mp_policy", mp_policy, "a MixedPrecisionPolicy")


def note_deferral(group: FSDPParamGroup, all_reduce_grads: bool) -> None:
    defers = group.reduce_grads and not all_reduce_grads
    group._has_deferred |= defers and isinstance(group.mesh_info, DDPMeshInfo)


def check_divide_factor(group: FSDPParamGroup, factor: Any) -> None:
    is_number = _is_number(factor)
    if factor is not None and not (is_number and math.isfinite(factor) and factor != 0):
        cls = ValueError if is_number else TypeError
        fix = "a finite number other than 0"
        _refuse(group, "set_gradient_divide_factor", factor, fix, cls)


def _check_comm(group: Any, comm: Any, cls: type = AllGather) -> None:
    """Raises if a comm lacks the methods, or is of the other collective alone."""
    has_methods = callable(comm) and callable(getattr(comm, "allocate", None))
    is_other = not isinstance(comm, cls) and isinstance(comm, AllGather | ReduceScatter)
    if isinstance(comm, type) or not has_methods or is_other:
        kind = "all_gather" if cls is AllGather else "reduce_scatter"
        fix = f"an object with the methods of {cls.__name__}"
        _refuse(group, f"set_custom_{kind}", comm, fix)


def check_reduce_scatter_comm(group: FSDPParamGroup, comm: Any) -> None:
    _check_comm(group, comm, ReduceScatter)
    check_can_exchange(group, type(comm))
    is_fresh = group._has_fresh_buffers = comms.allocates_anew(comm)
    # Else a second input would need more of the pool
    group._holds_one_input = not is_fresh or isinstance(comm, comms.SymmMemAllocMixin)


def check_can_exchange(group: FSDPParamGroup, cls: type) -> None:
    """Raises if a reduce-scatter cannot send in a parameter's ``grad_comm_dtype``."""
    for fsdp_param in () if getattr(cls, "exchange", None) else group.fsdp_params:
        if (dtype := dtypes_of(fsdp_param).comm) is not None:
            raise ValueError(
                f"{cls.__name__} of unit '{group._unit_name}' cannot reduce "
                f"{fqns_of(group, fsdp_param)[0]}, whose grad_comm_dtype is {dtype}: set "
                "none, or add exchange(output_tensor, input_tensor, group), an all-to-all"
            )


def check_no_custom_comm(group: FSDPParamGroup, setter: str, *allowed: type) -> None:
    """Raises if users have set a comm that is neither a default one nor of these."""
    allowed += comms.DefaultAllGather, comms.DefaultReduceScatter
    for comm in (group._all_gather_comm, group._reduce_scatter_comm):
        if not isinstance(comm, allowed):
            custom = f"unit '{group._unit_name}' has a custom {type(comm).__name__}"
            raise AssertionError(f"{setter} cannot be called: {custom}")


def as_mesh(mesh_info: Any, cls: type) -> Any:
    if not isinstance(mesh_info, cls):
        expected = f"Expected mesh_info to be {cls.__name__}"
        raise AssertionError(f"{expected}, got {mesh_info}")
    return mesh_info


class GroupSettings:
    """A param group's settings, by methods of ``FSDPModule`` and the functions above."""

    mesh_info: Any
    gradient_divide_factor: Any = OnSet(check_divide_factor)
    _all_gather_comm: Any = OnSet(_check_comm)
    _reduce_scatter_comm: Any = OnSet(check_reduce_scatter_comm)
    _has_fresh_buffers: bool  # these two follow from that comm
    _holds_one_input: bool
    _all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    _all_reduce_hook_stream: torch.Stream | None = None  # used only without replicas
    reduce_grads: bool = True
    all_reduce_grads: Any = OnSet(note_deferral)  # over replicas
    _has_deferred: bool = False  # ever: all ranks know, unlike who has a partial reduce
    reshard_after_backward: bool = True
    force_sum_reduction_for_comms: bool = False  # then divide
    reduce_scatter_unused_params: bool = False  # zeros, so that all ranks reduce alike
    reduce_scatter_max_input_buffers: int = 1  # all use the largest
    unshard_async_op: bool = False  # gathers in the current stream, to save memory
    # Bytes up to which buckets wait for others, and at which all are reduced
    reduce_bucket_cap: tuple[int, int] | None = None
    unshard_in_backward: bool = True  # some do not need it, e.g. embeddings
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE

    def _set_separate_reduce_scatter_group(self, enable: bool, groups: dict) -> None:
        """Gives reduce-scatter a process group, from ``groups`` by ranks, or none."""
        mesh_info, group = as_mesh(self.mesh_info, FSDPMeshInfo), None
        if enable:
            ranks = tuple(dist.get_process_group_ranks(mesh_info.shard_process_group))
            group = groups.get(ranks) or mesh_info.reduce_scatter_process_group
            if group is None:
                # Under HSDP other ranks make other groups, and never come to this one
                name: Any = {"group_desc": "fsdp_reduce_scatter"}
                group = dist.new_group([*ranks], use_local_synchronization=True, **name)
            groups[ranks] = group
        mesh_info.reduce_scatter_process_group = group

    def set_symm_mem(self: Any, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocates from symmetric memory; for reduce-scatter only if sums are forced."""
        gather, reduce_scatter = comms.SymmMemAllGather, comms.SymmMemReduceScatter
        check_no_custom_comm(self, "set_symm_mem", gather, reduce_scatter)
        scatter_group = self._reduce_scatter_process_group  # of a mesh that shards
        if self.force_sum_reduction_for_comms:
            check_can_exchange(self, reduce_scatter)  # before the constructor's barrier
            self._reduce_scatter_comm = reduce_scatter(scatter_group, backend)
        self._all_gather_comm = gather(self.mesh_info.shard_process_group, backend)

    def set_allocate_memory_from_process_group(self: Any, enable: bool) -> None:
        """Allocates buffers of collectives from their groups, or by default again."""
        kinds = comms.ProcessGroupAllocAllGather, comms.ProcessGroupAllocReduceScatter
        check_no_custom_comm(self, "set_allocate_memory_from_process_group", *kinds)
        if enable:
            self._reduce_scatter_comm = kinds[1](self._reduce_scatter_process_group)
            self._all_gather_comm = kinds[0](self.mesh_info.shard_process_group)
        else:
            self._all_gather_comm = comms.DefaultAllGather()
            self._reduce_scatter_comm = comms.DefaultReduceScatter()

    def _validate_reduce_scatter_max_input_buffers(self: Any) -> None:
        comm, wanted = self._reduce_scatter_comm, self.reduce_scatter_max_input_buffers
        if wanted > 1 and isinstance(comm, comms.SymmMemReduceScatter):
            fix = "1, as symmetric memory reuses no buffer"
            setter = "set_reduce_scatter_max_input_buffers"
            _refuse(self, setter, wanted, fix, ValueError)
