"""FSDP2: ``fully_shard`` and what goes with it."""

# ruff: noqa: F401  (whatever is imported here is exported)
import contextlib as _contextlib

from ._fsdp_api import CPUOffloadPolicy, DataParallelMeshDims, OffloadPolicy
from ._fsdp_policies import MixedPrecisionPolicy
from ._fsdp_settings import set_backward_prefetch, set_reduce_bucket_cap
from ._fsdp_summary import layout_summary
from ._fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    UnshardHandle,
)


with _contextlib.suppress(ImportError):  # since 2.15
    # pyrefly: ignore [missing-module-attribute]
    from ._fully_shard import GradientReductionHandle

__all__ = [name for name in globals() if not name.startswith("_")]
