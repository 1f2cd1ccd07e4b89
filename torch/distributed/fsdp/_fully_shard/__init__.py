"""FSDP2: ``fully_shard`` and what goes with it."""

from ._fsdp_api import (
    CPUOffloadPolicy as CPUOffloadPolicy,
    DataParallelMeshDims as DataParallelMeshDims,
    MixedPrecisionPolicy as MixedPrecisionPolicy,
    OffloadPolicy as OffloadPolicy,
)
from ._fsdp_summary import layout_summary as layout_summary
from ._fully_shard import (
    FSDPModule as FSDPModule,
    fully_shard as fully_shard,
    register_fsdp_forward_method as register_fsdp_forward_method,
    share_comm_ctx as share_comm_ctx,
    UnshardHandle as UnshardHandle,
)


__all__ = [name for name in dir() if not name.startswith("_")]
