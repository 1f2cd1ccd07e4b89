"""FSDP2: ``fully_shard`` and what goes with it."""

# ruff: noqa: F401  (whatever is imported here is exported)
import contextlib as _contextlib

from ._fsdp_agreement import UnitAgreement as _UnitAgreement
from ._fsdp_api import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from ._fsdp_doors import doors as _doors
from ._fsdp_errors import ExplainedErrors as _ExplainedErrors
from ._fsdp_policies import resolve_all as _resolve_all
from ._fsdp_prefetch import set_backward_prefetch
from ._fsdp_summary import layout_summary
from ._fsdp_summary import log_layout as _log_layout
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

# See [Note: Doors]
_doors.policies_of = _resolve_all
_doors.agreement = _UnitAgreement
_doors.errors = _ExplainedErrors()
_doors.show_layout = _log_layout

__all__ = [name for name in globals() if not name.startswith("_")]
