"""
What a case of ``run.py`` is: where it runs, what it trains, and what is seen of it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from fsdp_helpers.common.parity_layers import groups_of, Record, units_of
from fsdp_helpers.common.scenarios import Scenarios, Setup
from fsdp_helpers.common.utils import record_collectives
from fsdp_helpers.parity import modes
from fsdp_helpers.parity.models import mixed_tower, uniform_tower
from fsdp_helpers.parity.modes import Mode

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


# Records of a run #


@contextlib.contextmanager
def noting_post_backwards(held: list[Any]) -> Iterator[None]:
    """Notes how many reductions' inputs are alive after each post-backward."""
    post_backward = FSDPParamGroup.post_backward

    def noting(group: FSDPParamGroup, *args: Any) -> None:
        post_backward(group, *args)
        held.append(("inputs", len(group.comm_ctx.reduce_scatter_states)))

    with mock.patch.object(FSDPParamGroup, "post_backward", noting):
        yield


def note_gathers(model: nn.Module, held: list[Any]) -> None:
    """Notes after each forward whether the last gather's buffer is alive."""

    def note(module: nn.Module, *_: Any) -> None:
        state = units_of(model)[0]._get_fsdp_state()
        held.append(("gather", state._comm_ctx.all_gather_state is not None))

    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_hook(note)


def watched(
    step: Callable[..., Any], seen: dict[str, Any], profiles: bool
) -> Callable[..., Any]:
    """Notes the last step's collectives and profiler ranges, in their order."""

    def run(model: nn.Module, batches: modes.Batches) -> torch.Tensor:
        if batches.step < modes.STEPS - 1:
            return step(model, batches)
        cpu = torch.profiler.ProfilerActivity.CPU
        profiler = torch.profiler.profile(activities=[cpu])
        with record_collectives() as recorder:
            with profiler if profiles else contextlib.nullcontext():
                loss = step(model, batches)
        seen["collectives"] = [
            (c.name, str(c.dtype), c.numel, c.op, c.group_size) for c in recorder.calls
        ]
        if profiles:
            # As recorded: `profiler.events` makes a tree of all that ran, which takes
            # longer than the steps
            recorded = profiler.profiler.kineto_results.events()
            ours = [event for event in recorded if event.name().startswith("FSDP::")]
            ours.sort(key=lambda event: event.start_ns())
            seen["ranges"] = [event.name() for event in ours]
        return loss

    return run


def run_mode(mode: Mode, model: nn.Module, setup: Setup, mesh: Any = None) -> Record:
    held: list[Any] = []
    seen: dict[str, Any] = {"held": held}

    def prepare(model: nn.Module) -> None:
        if mode.prepare is not None:
            mode.prepare(model)
        note_gathers(model, held)

    # All ranks do the same
    is_first = setup.rank == 0
    step = watched(mode.step, seen, not setup.is_by_dtype) if is_first else mode.step
    mesh = mesh or (setup.pairs if mode.is_hybrid else setup.mesh)
    observed = replace(mode, step=step, prepare=prepare)
    with noting_post_backwards(held):
        record = modes.train(observed, model, mesh, setup.rank, "cpu")
    left = [unit for unit in units_of(model) if has_something_left(unit)]
    return record | seen | {"left": len(left), "comms": comms_of(model)}


def comms_of(model: nn.Module) -> list[tuple[str, str, bool]]:
    """Returns who sends for each unit, and whether reductions have their own group."""
    return [
        (
            type(group._all_gather_comm).__name__,
            type(group._reduce_scatter_comm).__name__,
            getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None,
        )
        for group in groups_of(model)
    ]


def has_something_left(unit: nn.Module) -> bool:
    """Whether a unit's group holds more after backward than its shards."""
    return any(
        group._all_gather_result is not None
        or group.comm_ctx.all_gather_state is not None
        or group.comm_ctx.post_forward_order != []
        or group.comm_ctx._last_post_reduce_events != {}
        or (group._reshard_after_forward and group.is_unsharded)
        for group in unit._get_fsdp_state()._fsdp_param_groups
    )


# Cases #


# The series for upstream is compared by uniform units alone
KINDS = os.environ.get("FSDP_PARITY_KINDS", "uniform mixed").split()
CASES = Scenarios()  # by kind and name
REFUSALS: dict[str, str] = {}  # by name, of those that raise, what the error must say


def run_case(setup: Setup, run: Callable[[Setup], Record | None]) -> Record:
    return run(setup) or {}


def add_case(
    name: str = "", *, kinds: tuple[str, ...] = ("uniform", "mixed"), ranks: int = 2
) -> Callable[..., Any]:
    """Adds a case, of the function's name by default. One that makes groups has 4 ranks."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        case = name or run.__name__
        CASES.add(
            partial(run_case, run=run),
            case,
            kinds=filter(KINDS.__contains__, kinds),
            # An error is not compared with that of one unit for each dtype
            as_by_dtype=case not in REFUSALS,
            by_halves=ranks == 2,
        )
        return run

    return add


def train_tower(mode: Mode, setup: Setup, mesh: DeviceMesh | None = None) -> Record:
    model = mixed_tower() if setup.is_mixed else uniform_tower(mode.dtype)
    if setup.is_by_dtype:
        mode = replace(mode, shard=modes.BY_DTYPE[mode.shard])
    return run_mode(mode, model, setup, mesh)


def add_mode(name: str, mode: Mode) -> None:
    def run(setup: Setup) -> Record:
        return train_tower(mode, setup)

    add_case(name, kinds=mode.kinds, ranks=mode.ranks)(run)


for _name, _mode in modes.MODES.items():
    add_mode(_name, _mode)


def cut_children(model: nn.Module, setup: Setup, **kwargs: Any) -> None:
    """Cuts a sequence of blocks into units like a tower."""
    for block in model:
        for module in block if setup.is_by_dtype else [block]:
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)


def train_children(
    model: nn.Module,
    setup: Setup,
    prepare: Any = None,
    step: Any = modes.one_backward,
    **kwargs: Any,
) -> Record:
    """Trains a sequence of blocks, cut with these arguments of ``fully_shard``."""

    def shard(model: nn.Module, **others: Any) -> None:
        cut_children(model, setup, **others | kwargs)

    return run_mode(Mode(shard=shard, prepare=prepare, step=step), model, setup)
