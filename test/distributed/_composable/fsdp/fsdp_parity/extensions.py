"""Cases of what is not plain tensors on one device: pinned memory and extensions."""

from __future__ import annotations

from typing import Any
from unittest import mock

from fsdp_parity.cases import add_case, Case, CASES, Place, train_children, train_tower
from fsdp_parity.models import BF16, FP32
from fsdp_parity.modes import gradients_add_up, Mode, Record, step_in_backward
from fsdp_parity.waves import Extended, extended_stack, Fp8, HighLow

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def play_pinned_memory(place: Place, **settings: Any) -> Record:
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
        record = train_tower(Mode(kwargs=kwargs, **settings), place)
    return record | {"copies": copies}


@add_case()
def pinned(place: Place) -> Record:
    return play_pinned_memory(place)


@add_case()
def pinned_add_up(place: Place) -> Record:
    return play_pinned_memory(place, step=gradients_add_up)


@add_case()
def pinned_step_in_backward(place: Place) -> Record:
    return play_pinned_memory(place, prepare=step_in_backward)


def add_extension(
    name: str, kind: type[Extended], rows: int = 5, **kwargs: Any
) -> None:
    def run(place: Place) -> Record:
        model = extended_stack(kind, rows, place.dtypes[1:])  # extensions are fp32
        before = Extended.gathers
        record = train_children(model, place, **kwargs)
        return record | {"gathers": Extended.gathers - before}

    CASES[name] = Case(run)


_OFFLOAD = CPUOffloadPolicy(pin_memory=False)
add_extension("fp8", Fp8)
add_extension("fp8_policy", Fp8, mp_policy=MixedPrecisionPolicy(BF16, FP32))
add_extension("fp8_offload", Fp8, 8, offload_policy=_OFFLOAD)
add_extension("highlow", HighLow, 8)
add_extension("highlow_fewer_rows_than_ranks", HighLow, 1)
add_extension("highlow_no_reshard", HighLow, reshard_after_forward=False)
EXTENSIONS = [name for name in CASES if name.startswith(("fp8", "highlow"))]
