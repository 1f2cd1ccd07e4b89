"""Cases of memory and order: how a model comes to its parameters, and what it holds."""

from __future__ import annotations

import time

from fsdp_parity.cases import (
    add_case,
    Place,
    train_children,
    train_tower,
)
from fsdp_parity.comms import Gather
from fsdp_parity.models import loss_of
from fsdp_parity.modes import (
    Batches,
    each_unit,
    Mode,
    one_backward,
    Record,
)
from fsdp_parity.waves import Hidden, NestedWaves, stack_of, Waves

import torch
import torch.nn as nn
from torch.distributed.tensor import distribute_tensor, DTensor


@add_case()
def nested_inputs(place: Place) -> Record:
    """Units pass tensors on in a dataclass."""

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        loss = loss_of(model(Hidden({"x": batches[0]})).tensors["x"])
        loss.backward()
        return loss

    return train_children(stack_of(NestedWaves, place.dtypes), place, step=step)


@add_case()
def made_on_meta_device(place: Place) -> Record:
    values = stack_of(Waves, place.dtypes).state_dict()
    with torch.device("meta"):
        model = stack_of(Waves, place.dtypes)

    def fill(model: nn.Module) -> None:
        model.to_empty(device="cpu")
        for name, param in model.named_parameters():
            full = distribute_tensor(values[name], param.device_mesh, param.placements)
            param.detach().copy_(full)

    return train_children(model, place, fill)


@add_case()
def loaded_by_assignment(place: Place) -> Record:
    """
    Before the first forward and between steps: of vectors plain shards, of others such
    whose elements lie apart.
    """

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

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        if batches.step == 1:
            load(model)
        return one_backward(model, batches)

    return train_children(stack_of(Waves, place.dtypes), place, load, step)


@add_case()
def buffers_of_gathers(place: Place) -> Record:
    """
    Counts the gather buffers alive while each module runs, and after. The backend's
    thread lets go of one later than the gather is waited for: only of what is never let
    go of, the time limit ends the wait.
    """
    gather, alive = Gather(), []
    end_s = time.monotonic() + 120

    def count(most: int) -> None:
        while True:
            found = sum(ref() is not None for ref in gather.buffers)
            if found <= most or time.monotonic() > end_s:
                break
            time.sleep(0.001)
        alive.append(found)

    def prepare(model: nn.Module) -> None:
        each_unit("set_custom_all_gather", gather)(model)
        for module in model.modules():
            if module._parameters:
                module.register_forward_hook(lambda *_: count(1))
        model.register_forward_hook(lambda *_: count(0))

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        loss = one_backward(model, batches)
        count(0)
        return loss

    return train_tower(Mode(prepare=prepare, step=step), place) | {"alive": alive}
