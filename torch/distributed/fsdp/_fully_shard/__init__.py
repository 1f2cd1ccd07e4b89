"""FSDP2: ``fully_shard`` and what goes with it."""

# ruff: noqa: F401  (whatever is imported here is exported)
from ._fsdp_api import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from ._fsdp_summary import layout_summary
from ._fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    UnshardHandle,
)


__all__ = [name for name in globals() if not name.startswith("_")]
