"""Cases of what is not plain tensors on one device: offload and extensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from fsdp_features.cases import (
    Case,
    CASES,
    Place,
    run_mode,
    shard_children,
    step_on_waves,
    tower,
)
from fsdp_features.models import Extended, extended_stack, Fp8, HighLow
from fsdp_features.order import gradients_add_up
from fsdp_mixed_dtype.models import BF16, FP32
from fsdp_mixed_dtype.parity import accumulate, Mode, Record, step_in_backward

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


# Offload #


def offload(pin_memory: bool = False, **kwargs: Any) -> Callable[[Place], Record]:
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    return tower(kwargs={"offload_policy": policy}, **kwargs)


def pinned(**kwargs: Any) -> Callable[[Place], Record]:
    """Plays pinned memory, and notes which copies of gradients may overlap."""
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

    def run(place: Place) -> Record:
        copies.clear()
        with (
            mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
            mock.patch.object(torch.Tensor, "to", noting_to),
            mock.patch.object(FSDPParamGroup, "post_backward", noting_reduction),
        ):
            record = offload(True, **kwargs)(place)
        return record | {"copies": [*copies]}

    return run


CASES["offload"] = Case(offload())
CASES["offload_accumulate"] = Case(offload(step=accumulate))
CASES["offload_gradients_add_up"] = Case(offload(step=gradients_add_up))
CASES["offload_hooks"] = Case(offload(prepare=step_in_backward))
CASES["offload_policy"] = Case(offload(policy=(BF16, FP32)))
CASES["offload_hybrid"] = Case(offload(is_hybrid=True), (4,), (4,))
CASES["offload_pinned"] = Case(pinned())
CASES["offload_pinned_add_up"] = Case(pinned(step=gradients_add_up))
CASES["offload_pinned_hooks"] = Case(pinned(prepare=step_in_backward))


# Extensions #


def extensions(
    kind: type[Extended], rows: int, **kwargs: Any
) -> Callable[[Place], Record]:
    def run(place: Place) -> Record:
        others = place.dtypes[1:]  # what extension tensors have is fp32
        model = extended_stack(kind, rows, others)

        def shard(model: nn.Module, **others: Any) -> None:
            shard_children(model, place.units, **others)

        mode = Mode(**{"shard": shard, "step": step_on_waves} | kwargs)
        before = Extended.gathers
        record = run_mode(mode, model, place)
        return record | {"gathers": Extended.gathers - before}

    return run


_OFFLOAD = {"kwargs": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}

for _kind in (Fp8, HighLow):
    _name = _kind.__name__.lower()
    CASES[_name] = Case(extensions(_kind, 8))
    CASES[f"{_name}_uneven"] = Case(extensions(_kind, 5))
    CASES[f"{_name}_fewer_rows_than_ranks"] = Case(extensions(_kind, 1))
    CASES[f"{_name}_policy"] = Case(extensions(_kind, 5, policy=(BF16, FP32)))
    CASES[f"{_name}_kept"] = Case(
        extensions(_kind, 5, kwargs={"reshard_after_forward": False})
    )
    CASES[f"{_name}_offload"] = Case(extensions(_kind, 8, **_OFFLOAD))
