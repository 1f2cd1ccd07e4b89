"""Cases of how a model gets parameters, of offload and of own gathers."""

import contextlib
import sys
from functools import partial
from typing import Any
from unittest import mock

from fsdp_helpers.common.parity_layers import Record
from fsdp_helpers.common.scenarios import Setup
from fsdp_helpers.parity import models, modes
from fsdp_helpers.parity.cases import add_case, train_children, train_tower
from fsdp_helpers.parity.models import BF16, Extended, Fp8, FP32, stack_of, Waves

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard


@add_case()
def ignored_parameters(setup: Setup) -> Record:
    model = stack_of(Waves, setup.dtypes)
    ignored = {waves.params[1] for block in model for waves in block}
    return train_children(model, setup, ignored_params=ignored)


@add_case()
def loaded_by_assignment(setup: Setup) -> Record:
    """Of vectors plain shards, of others such whose elements lie apart."""

    def doubled(value: DTensor) -> DTensor:
        local = value.to_local() * 2
        if local.ndim > 1:
            local = torch.stack([local, torch.zeros_like(local)], -1)[..., 0]
        mesh, placements = value.device_mesh, value.placements
        size, stride = value.size(), value.stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=size, stride=stride
        )

    def load(model: nn.Module) -> None:
        values = {name: doubled(value) for name, value in model.state_dict().items()}
        model.load_state_dict(values, assign=True)

    def step(model: nn.Module, batches: modes.Batches) -> torch.Tensor:
        if batches.step == 1:
            load(model)
        return modes.one_backward(model, batches)

    return train_children(stack_of(Waves, setup.dtypes), setup, load, step)


# Sizes of grouped matrices, and the dim that each is sharded on
EXPERTS = {(3, 8, 4): 1, (5, 2, 8): 2, (1, 4, 3): 1, (8, 3): 0, (5,): 0}


def train_experts(
    setup: Setup, pieces: bool = True, mesh: str = "mesh", **kwargs: Any
) -> Record:
    """Copied in pieces, or reordered. Over four ranks, experts shard over two."""
    model = stack_of(partial(Waves, sizes=[*EXPERTS]), setup.dtypes)
    layouts = sys.modules.get(f"{FSDPParamGroup.__module__[:-11]}layout")
    info = FSDPMeshInfo(setup.pairs["shard"], shard_mesh_dim=0)

    def place_param(param: nn.Parameter) -> Any:
        placement = Shard(EXPERTS[tuple(param.size())])
        has_own_mesh = mesh == "mesh" and setup.mesh.size() == 4 and param.ndim == 3
        return ShardPlacementResult(placement, info) if has_own_mesh else placement

    kwargs |= {"shard_placement_fn": place_param, "mesh": getattr(setup, mesh)}
    with contextlib.ExitStack() as stack:
        if layouts is not None and pieces:  # not in the release
            stack.enter_context(mock.patch.object(layouts, "_MIN_PIECE_NBYTES", 0))
        return train_children(model, setup, **kwargs)


for _name, _settings in {
    "experts": {},
    "experts_reordered": {"pieces": False},
    "experts_cast": {"mp_policy": MixedPrecisionPolicy(BF16, FP32)},
    "experts_offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "experts_no_reshard": {"reshard_after_forward": False},
    "experts_mesh": {},
    "experts_hsdp": {"mesh": "pairs"},
}.items():
    _ranks = 4 if _name in ("experts_mesh", "experts_hsdp") else 2
    add_case(_name, ranks=_ranks)(partial(train_experts, **_settings))


def play_pinned_memory(setup: Setup, **settings: Any) -> Record:
    """Notes which copies of gradients may overlap."""
    to, post_backward = torch.Tensor.to, FSDPParamGroup.post_backward
    copies: list[bool] = []
    reducing: list[FSDPParamGroup] = []

    def noting_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if reducing and "non_blocking" in kwargs:
            copies.append(kwargs["non_blocking"])
        return to(tensor, *args, **kwargs)

    def noting_reduction(group: FSDPParamGroup, *args: Any) -> None:
        reducing.append(group)
        post_backward(group, *args)
        reducing.pop()

    with (
        mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
        mock.patch.object(torch.Tensor, "to", noting_to),
        mock.patch.object(FSDPParamGroup, "post_backward", noting_reduction),
    ):
        kwargs = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
        record = train_tower(modes.Mode(kwargs=kwargs, **settings), setup)
    return record | {"copies": copies}


add_case("pinned_add_up")(partial(play_pinned_memory, step=modes.gradients_add_up))
add_case("pinned_step_in_backward")(
    partial(play_pinned_memory, prepare=modes.step_in_backward)
)


def train_extensions(
    setup: Setup, kind: type[Extended], rows: int = 5, **kwargs: Any
) -> Record:
    model = models.extended_stack(kind, rows, setup.dtypes[1:])  # extensions are fp32
    before = Extended.gathers
    record = train_children(model, setup, **kwargs)
    return record | {"gathers": Extended.gathers - before}


_OFFLOAD = CPUOffloadPolicy(pin_memory=False)
EXTENSIONS: dict[str, dict[str, Any]] = {
    "fp8_policy": {"kind": Fp8, "mp_policy": MixedPrecisionPolicy(BF16, FP32)},
    "fp8_offload": {"kind": Fp8, "rows": 8, "offload_policy": _OFFLOAD},
    "highlow_fewer_rows_than_ranks": {"kind": models.HighLow, "rows": 1},
    "highlow_no_reshard": {"kind": models.HighLow, "reshard_after_forward": False},
}
for _name, _settings in EXTENSIONS.items():
    add_case(_name)(partial(train_extensions, **_settings))
