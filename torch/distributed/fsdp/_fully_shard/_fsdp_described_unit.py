"""A parameter group as comparisons of ranks and summaries see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_common import FSDPMeshInfo
from ._fsdp_layout import BucketKey, ReduceBucketCap
from ._fsdp_param import FSDPParam
from ._fsdp_param_cache import GatherPlan
from ._fsdp_scaling import Factors


@dataclass(frozen=True)
class DescribedUnit:
    """A unit as it is when it is described."""

    fqn: str | None  # None before the root's lazy init
    params: Sequence[FSDPParam]
    names: tuple[str, ...]  # of the parameters, as seen from the unit
    fqns: tuple[str, ...]  # and as seen from the model
    device: torch.device
    post_forward_mesh_info: FSDPMeshInfo | None
    gather_world_size: int
    gather_plan: GatherPlan | None  # None before the first gather
    # What the sum over all data-parallel ranks is divided by, and how in a bucket
    divided_by: float
    divide_factors: Callable[[BucketKey], Factors]
    comms: tuple[AllGather, ReduceScatter]
    has_partial_reduces: bool
    reduce_bucket_cap: ReduceBucketCap | None
