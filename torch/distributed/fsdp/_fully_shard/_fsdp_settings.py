"""
Who a unit is: what users set of it, mostly through ``FSDPModule``, who takes part in
its collectives, and what it is called.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp.api import BackwardPrefetch
from torch.profiler import record_function

from ._fsdp_api import AllGather, OffloadPolicy, ReduceScatter
from ._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from ._fsdp_comms import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
)
from ._fsdp_doors import doors
from ._fsdp_layout import BucketKey
from ._fsdp_observers import is_observed, NO_RANGE
from ._fsdp_scaling import (
    _get_gradient_divide_factors,
    Factors,
    get_tree_divide_factors,
    scatter_divisor,
)


logger = logging.getLogger("torch.distributed.fsdp.fully_shard")


class UnitSettings:
    """The settings of a parameter group; those that can be wrong are properties."""

    # Set by the root's lazy init: the modules' name, and the group's place among the
    # groups of the same modules, one for each mesh
    _module_fqn: str | None = None
    _param_group_index: int = 0
    _num_param_groups: int = 1

    # Gradient sync: none at all, or no all-reduce (HSDP)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    # Scale apart from the collectives, which then only sum
    force_sum_reduction_for_comms: bool = False
    # Reduce zeros for parameters without a gradient, so that ranks that use
    # different parameters still issue the same collectives
    reduce_scatter_unused_params: bool = False
    # This group's wish; the shared context holds what is granted
    reduce_scatter_max_input_buffers: int = 1
    # Gather in the current stream and wait for the work, which spares memory
    # in the streams for prefetching but prefetches explicitly only
    unshard_async_op: bool = False
    # False if backward does not need the parameters, e.g. an embedding's
    unshard_in_backward: bool = True
    # When the gather that comes next in backward starts, None for not ahead
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    # Only without native HSDP, which has a stream of its own for the hook.
    # Users may set it before lazy init, so it is not in the shared context.
    _all_reduce_hook_stream: torch.Stream | None = None

    # Behind the properties, and for reading them without Python's running
    _divide_factor: float | None = None
    _reduce_hook: Callable[[torch.Tensor], None] | None = None
    _gather_comm: AllGather
    _scatter_comm: ReduceScatter

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh_info: DataParallelMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        offload_policy: OffloadPolicy,
    ):
        self.modules = modules  # a reference cycle of one lifetime
        self.mesh_info, self.post_forward_mesh_info = mesh_info, post_forward_mesh_info
        self.device, self.device_handle = device, _get_device_handle(device.type)
        doors.errors.check_setting("offload_policy", offload_policy, self._unit_name)
        self.offload_policy = offload_policy
        self._gather_comm = DefaultAllGather()
        self._scatter_comm = DefaultReduceScatter()

    @property
    def _unit_name(self) -> str:
        # The root's is empty
        return self._module_fqn or type(self.modules[0]).__name__

    @property
    def gradient_divide_factor(self) -> float | None:
        """Replaces the number of data-parallel ranks."""
        return self._divide_factor

    @gradient_divide_factor.setter
    def gradient_divide_factor(self, factor: float | None) -> None:
        setter = "set_gradient_divide_factor"
        doors.errors.check_setting(setter, factor, self._unit_name)
        self._divide_factor = factor

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        return self._reduce_hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        doors.errors.check_setting("set_all_reduce_hook", hook, self._unit_name)
        self._reduce_hook = hook

    @property
    def _all_gather_comm(self) -> AllGather:
        return self._gather_comm

    @_all_gather_comm.setter
    def _all_gather_comm(self, comm: AllGather) -> None:
        doors.errors.check_setting("set_custom_all_gather", comm, self._unit_name)
        self._gather_comm = comm

    @property
    def _reduce_scatter_comm(self) -> ReduceScatter:
        return self._scatter_comm

    @_reduce_scatter_comm.setter
    def _reduce_scatter_comm(self, comm: ReduceScatter) -> None:
        doors.errors.check_setting("set_custom_reduce_scatter", comm, self._unit_name)
        self._check_exchanges(type(comm))
        self._scatter_comm = comm

    def set_symm_mem(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """
        Takes the communication buffers from symmetric memory. Reduce-scatter
        takes part only with sums forced, the one reduction that NCCL's
        symmetric kernels know.
        """
        self._check_comms_are(
            "set_symm_mem",
            (DefaultAllGather, SymmMemAllGather),
            (DefaultReduceScatter, SymmMemReduceScatter),
        )
        if self.force_sum_reduction_for_comms:
            self._check_exchanges(SymmMemReduceScatter)
        group = self._shard_process_group
        self._all_gather_comm = SymmMemAllGather(group, backend)
        if self.force_sum_reduction_for_comms:
            group = self._reduce_scatter_process_group
            self._reduce_scatter_comm = SymmMemReduceScatter(group, backend)

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        """
        Takes the communication buffers from the process groups' allocators
        where they have one, or from the default one again.
        """
        self._check_comms_are(
            "set_allocate_memory_from_process_group",
            (DefaultAllGather, ProcessGroupAllocAllGather),
            (DefaultReduceScatter, ProcessGroupAllocReduceScatter),
        )
        if not enable:
            self._all_gather_comm = DefaultAllGather()
            self._reduce_scatter_comm = DefaultReduceScatter()
            return
        gather_group = self._shard_process_group
        self._all_gather_comm = ProcessGroupAllocAllGather(gather_group)
        reduce_group = self._reduce_scatter_process_group
        self._reduce_scatter_comm = ProcessGroupAllocReduceScatter(reduce_group)

    def _check_comms_are(
        self,
        caller: str,
        all_gather_types: tuple[type, ...],
        reduce_scatter_types: tuple[type, ...],
    ) -> None:
        for name, comm, types in (
            ("all gather", self._all_gather_comm, all_gather_types),
            ("reduce scatter", self._reduce_scatter_comm, reduce_scatter_types),
        ):
            if not isinstance(comm, types):
                raise AssertionError(
                    f"cannot call {caller}() when {name} comm is custom: module "
                    f"'{self._module_fqn}' uses {type(comm).__name__}, which "
                    "allocates its own buffers"
                )

    def _check_exchanges(self, kind: type) -> None:
        """Raises if a reduce-scatter cannot send what the parameters are to send."""

    def _validate_reduce_scatter_max_input_buffers(self):
        wanted = self.reduce_scatter_max_input_buffers
        comm = self._reduce_scatter_comm
        # Called before the shared context is set up, if users unshard first,
        # so the group's own wish is what there is to check
        if wanted > 1 and isinstance(comm, SymmMemReduceScatter):
            raise ValueError(
                "set_reduce_scatter_max_input_buffers(>1) is not supported with the "
                f"symmetric-memory reduce-scatter comm, but got {wanted} for module "
                f"'{self._module_fqn}' using {type(comm).__name__}: its pool gives "
                "a buffer again once it is free, and each one that is held registers "
                "more memory. "
                "Set 1, or use the default reduce-scatter comm"
            )

    # Meshes and process groups #
    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        smaller = self.post_forward_mesh_info
        return smaller is not None and smaller != self.mesh_info

    @property
    def _is_hsdp(self) -> bool:
        return isinstance(self.mesh_info, HSDPMeshInfo)

    @property
    def _shard_process_group(self) -> dist.ProcessGroup:
        return as_mesh(self.mesh_info, FSDPMeshInfo).shard_process_group

    @property
    def _reduce_scatter_process_group(self) -> dist.ProcessGroup:
        mesh_info = as_mesh(self.mesh_info, FSDPMeshInfo)
        return mesh_info.reduce_scatter_process_group or mesh_info.shard_process_group

    @property
    def _all_reduce_process_group(self) -> dist.ProcessGroup:
        return as_mesh(self.mesh_info, DDPMeshInfo).replicate_process_group

    @property
    def _reduce_scatter_group(self) -> dist.ProcessGroup | None:
        is_sharded = isinstance(self.mesh_info, FSDPMeshInfo)
        return self._reduce_scatter_process_group if is_sharded else None

    @property
    def _all_reduce_group(self) -> dist.ProcessGroup | None:
        is_replicated = isinstance(self.mesh_info, DDPMeshInfo)
        return self._all_reduce_process_group if is_replicated else None

    def _divide_factors(
        self, dtype: torch.dtype, comm_dtype: torch.dtype | None = None
    ) -> Factors:
        if comm_dtype is not None:
            return get_tree_divide_factors(
                self._reduce_scatter_group, self._all_reduce_group, self._divide_factor
            )
        return _get_gradient_divide_factors(
            self._reduce_scatter_group,
            self._all_reduce_group,
            dtype,
            self.device.type,
            self._divide_factor,
            self.force_sum_reduction_for_comms,
        )

    def _scatter_divisor(self, key: BucketKey) -> float:
        factors, custom = self._divide_factors(*key), self._divide_factor
        return scatter_divisor(self._reduce_scatter_group, factors, custom)

    def _set_separate_reduce_scatter_group(
        self, enable: bool, new_groups: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        """
        Gives reduce-scatter a process group of its own, so that it can overlap
        with all-gather on the wire, or the shared one again.

        Args:
            new_groups: By shard ranks, what one call over many groups has made
                so far: meshes over the same ranks share one communicator.
        """
        mesh_info = as_mesh(self.mesh_info, FSDPMeshInfo)
        if not enable:
            mesh_info.reduce_scatter_process_group = None
            return
        ranks = tuple(dist.get_process_group_ranks(mesh_info.shard_process_group))
        group = new_groups.get(ranks) or mesh_info.reduce_scatter_process_group
        if group is None:
            # Synchronized among its own ranks only: under HSDP the others make
            # groups of theirs and never come to this one
            group = dist.new_group(
                list(ranks),
                group_desc="fsdp_reduce_scatter",
                use_local_synchronization=True,
            )
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise AssertionError(
                    f"This rank is not in the process group of ranks {ranks} that "
                    f"unit '{self._unit_name}' would reduce over"
                )
        new_groups[ranks] = mesh_info.reduce_scatter_process_group = group

    # Labels #
    def _range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns a profiler range named after the step and the unit."""
        if not is_observed():
            return NO_RANGE  # without the label
        return record_function(self._with_fqn(name))

    def _log_hook(self, name: str) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self._with_fqn(name))

    def _hook_range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns the range of a hook, which is logged as well."""
        self._log_hook(name)
        return self._range(name)

    def _with_fqn(self, label: str) -> str:
        if self._module_fqn:
            label += f" ({self._module_fqn})"
        if self._num_param_groups > 1 and isinstance(self.mesh_info, FSDPMeshInfo):
            label += f" [pg={self.mesh_info.shard_mesh_size}]"
        return label

    def __repr__(self):
        return f"FSDPParamGroup(fqn={self._module_fqn})"


def as_mesh(mesh_info: DataParallelMeshInfo | None, kind: type) -> Any:
    if not isinstance(mesh_info, kind):
        raise AssertionError(
            f"Expected mesh_info to be {kind.__name__}, got {type(mesh_info).__name__}"
        )
    return mesh_info
