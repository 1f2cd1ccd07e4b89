"""Cases of memory and order: what a step does when, and what is held meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp_features.cases import (
    add_case,
    add_tower,
    Case,
    CASES,
    Place,
    run_mode,
    shard_children,
    step_on_waves,
    tower,
)
from fsdp_features.comms import Gather
from fsdp_features.models import Hidden, NestedWaves, stack_of, Waves
from fsdp_mixed_dtype.models import loss_of, Tower
from fsdp_mixed_dtype.parity import (
    Batches,
    Mode,
    one_backward,
    Record,
    run_one_of_group,
    run_rest_in_chunks,
    several_backwards,
    shard_blocks,
    shard_dtypes,
    units_of,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor, DTensor


def two_forwards(model: nn.Module, batches: Batches) -> torch.Tensor:
    loss = sum(loss_of(model(batches[i])) for i in range(2))
    loss.backward()
    return loss


def forward_of_one_block_again(model: nn.Module, batches: Batches) -> torch.Tensor:
    x = model.blocks[0](batches[1]) if batches.step > 0 else batches[1]
    loss = loss_of(model(batches[0])) + loss_of(x)
    loss.backward()
    return loss


def backward_twice(model: nn.Module, batches: Batches) -> torch.Tensor:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def backward_twice_of_one_iteration(model: nn.Module, batches: Batches) -> Any:
    loss = loss_of(model(batches[0]))
    model.set_is_last_backward(False)
    loss.backward(retain_graph=True)
    model.set_is_last_backward(True)
    loss.backward()
    return loss


def two_losses(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Both graphs are there before the first of them is gone back through."""
    losses = [loss_of(model(batches[i])) for i in range(2)]
    for i, loss in enumerate(losses):
        model.set_is_last_backward(i == 1)
        loss.backward()
    return torch.stack(losses)


def unshard_in_another_order(model: nn.Module, batches: Batches) -> torch.Tensor:
    units = units_of(model)
    handles = [unit.unshard(async_op=True) for unit in units]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()  # again does nothing
    units[-1].reshard()
    units[-1].unshard()
    return one_backward(model, batches)


def gradients_add_up(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Adds to sharded gradients that are there already."""
    one_backward(model, batches)
    return one_backward(model, replace(batches, step=batches.step + 10))


def only_first_block(model: nn.Module, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, blocks=(0,))


def fail(*_: Any) -> None:
    raise InterruptedError


def give_up_twice(model: nn.Module, batches: Batches) -> torch.Tensor:
    """In forward with a prefetch under way, and in backward before any gradient."""
    second = model.blocks[1]
    model.set_modules_to_forward_prefetch(units_of(second))
    handle = model.blocks[0].parts[-1].register_forward_pre_hook(fail)
    with contextlib.suppress(InterruptedError):
        model(batches[1])
    handle.remove()
    model.reset_iter_state()
    output = model(batches[1])
    output.register_hook(fail)
    with contextlib.suppress(InterruptedError):
        loss_of(output).backward()
    model.reset_iter_state()
    return one_backward(model, batches)


def evaluate_before(model: nn.Module, batches: Batches) -> torch.Tensor:
    # The release cannot train what it first gathered for inference
    if batches.step > 0:
        with torch.no_grad():
            expected = model(batches[1])
        with torch.inference_mode():
            actual = model(batches[1])
        if not torch.equal(actual, expected):
            raise AssertionError("Inference mode gives something else")
    return one_backward(model, batches)


def reshard_after_first_forward(model: nn.Module, batches: Batches) -> torch.Tensor:
    model.set_reshard_after_forward(batches.step == 0)
    return one_backward(model, batches)


def state_dict_before_backward(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Takes one, or loads one, while the parameters are unsharded."""
    before = model.state_dict()
    loss = loss_of(model(batches[0]))
    if batches.step == 0:
        model.load_state_dict(before)
    elif not all(isinstance(value, DTensor) for value in model.state_dict().values()):
        raise AssertionError("The state dict is not of the shards")
    loss.backward()
    return loss


def run_another_method(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Runs a method that is not called forward, with the hooks that forward has."""
    if batches.step == 0:
        model.run = model.forward
        register_fsdp_forward_method(model, "run")
    loss = loss_of(model.run(batches[0]))
    loss.backward()
    return loss


def prefetch_what_does_not_run(model: nn.Module) -> None:
    """Starts gathers in forward and backward that nothing waits for."""
    first = next(u for u in units_of(model.blocks[0]))
    other = next(u for u in units_of(model.blocks[1]))
    model.set_modules_to_forward_prefetch([other])
    first.set_modules_to_forward_prefetch([other])
    first.set_modules_to_backward_prefetch([other])


_RESHARD = {"kwargs": {"reshard_after_forward": True}}

CASES["two_forwards"] = Case(tower(step=two_forwards))
CASES["two_forwards_resharded"] = Case(tower(step=two_forwards, **_RESHARD))
CASES["backward_twice"] = Case(tower(step=backward_twice))
CASES["backward_twice_of_one_iteration"] = Case(
    tower(step=backward_twice_of_one_iteration)
)
CASES["two_losses"] = Case(tower(step=two_losses))
CASES["several_backwards"] = Case(tower(step=several_backwards))
CASES["gradients_add_up"] = Case(tower(step=gradients_add_up))
add_tower("unshard_in_another_order", step=unshard_in_another_order)
add_tower("given_up_twice", step=give_up_twice)
add_tower("evaluated_before", step=evaluate_before)
add_tower("resharded_after_first_forward", step=reshard_after_first_forward)
add_tower(
    "state_dict_before_backward",
    step=state_dict_before_backward,
    kwargs={"reshard_after_forward": False},
)
add_tower("another_method", step=run_another_method)
CASES["mistargeted_prefetch"] = Case(
    tower(step=only_first_block, prepare=prefetch_what_does_not_run)
)
CASES["only_first_block"] = Case(tower(step=only_first_block))


def group(step: Callable[..., Any]) -> Callable[[Place], Record]:
    """Trains one unit of all blocks, or one for each dtype that they have."""

    def run(place: Place) -> Record:
        def shard(model: Tower, **kwargs: Any) -> None:
            parts = [part for block in model.blocks for part in block.parts]
            dtypes = {part.up.dtype: None for part in parts}
            units = [[part for part in parts if part.up.dtype == d] for d in dtypes]
            if place.units == "dtype":
                fully_shard(model.stem, **kwargs)
                fully_shard(model.head, **kwargs)
            else:
                units = [[*model.blocks]]
            for unit in units:
                fully_shard(unit, **kwargs)
            fully_shard(model, **kwargs)

        return tower(shard=shard, step=step)(place)

    return run


CASES["group"] = Case(group(one_backward))
CASES["group_in_part"] = Case(group(run_one_of_group))
CASES["group_in_chunks"] = Case(group(run_rest_in_chunks))


@add_case()
def ignored_parameters(place: Place) -> Record:
    """Some of every unit are left to the user."""

    def shard(model: nn.Module, **kwargs: Any) -> None:
        cut = shard_dtypes if place.units == "dtype" else shard_blocks
        cut(model, ignored_params={part.gain for part in model.all_parts}, **kwargs)

    return tower(shard=shard)(place)


@add_case()
def nested_inputs(place: Place) -> Record:
    """Units pass tensors on in a dataclass, and take some by keyword."""

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        loss = loss_of(model(Hidden({"x": batches[0]})).tensors["x"])
        loss.backward()
        return loss

    def shard(model: nn.Module, **kwargs: Any) -> None:
        shard_children(model, place.units, **kwargs)

    model = stack_of(NestedWaves, place.dtypes)
    return run_mode(Mode(shard=shard, step=step), model, place)


@add_case()
def made_on_meta_device(place: Place) -> Record:
    values = stack_of(Waves, place.dtypes).state_dict()
    with torch.device("meta"):
        model = stack_of(Waves, place.dtypes)

    def shard(model: nn.Module, **kwargs: Any) -> None:
        shard_children(model, place.units, **kwargs)
        model.to_empty(device=place.device)
        for name, param in model.named_parameters():
            full = distribute_tensor(values[name], param.device_mesh, param.placements)
            param.detach().copy_(full)

    return run_mode(Mode(shard=shard, step=step_on_waves), model, place)


@add_case()
def loaded_by_assignment(place: Place) -> Record:
    """Replaces the sharded parameters before the first forward."""

    def shard(model: nn.Module, **kwargs: Any) -> None:
        shard_children(model, place.units, **kwargs)
        doubled = {key: value * 2 for key, value in model.state_dict().items()}
        model.load_state_dict(doubled, assign=True)

    model = stack_of(Waves, place.dtypes)
    return run_mode(Mode(shard=shard, step=step_on_waves), model, place)


@add_case()
def loaded_by_assignment_of_columns(place: Place) -> Record:
    """Shards whose elements do not lie side by side."""

    def as_column(value: DTensor) -> DTensor:
        local = value.to_local()
        column = torch.stack([local * 2, torch.zeros_like(local)], -1)[..., 0]
        mesh, placements = value.device_mesh, value.placements
        size, stride = value.size(), value.stride()
        return DTensor.from_local(
            column, mesh, placements, run_check=False, shape=size, stride=stride
        )

    def shard(model: nn.Module, **kwargs: Any) -> None:
        shard_children(model, place.units, **kwargs)
        columns = {key: as_column(value) for key, value in model.state_dict().items()}
        model.load_state_dict(columns, assign=True)

    model = stack_of(Waves, place.dtypes)
    return run_mode(Mode(shard=shard, step=step_on_waves), model, place)


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
        for unit in units_of(model):
            unit.set_custom_all_gather(gather)
        for module in model.modules():
            if module._parameters:
                module.register_forward_hook(lambda *_: count(1))
        model.register_forward_hook(lambda *_: count(0))

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        loss = one_backward(model, batches)
        count(0)
        return loss

    return tower(prepare=prepare, step=step)(place) | {"alive": alive}
