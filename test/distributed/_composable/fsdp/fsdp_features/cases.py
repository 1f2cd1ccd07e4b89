"""
What a case of ``parity.py`` is: where it runs, what it trains, and what is
seen of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from fsdp_common.utils import record_collectives
from fsdp_mixed_dtype.models import BF16, FP16, FP32, loss_of, Tower
from fsdp_mixed_dtype.parity import (
    Batches,
    Mode,
    Record,
    shard_blocks,
    shard_dtypes,
    train,
    units_of,
)

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


# What a step leaves wrong shows in the next one
STEPS = 2
MIXED_DTYPES = (FP32, BF16, FP16)


def tower_of(*blocks: Sequence[torch.dtype], **kwargs: Any) -> Tower:
    """Returns a tower of these dtypes, with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tower(blocks, **kwargs)


# Where a case runs #


@dataclass(frozen=True)
class Place:
    units: str  # "uniform", "dtype" or "block"
    rank: int  # in the mesh
    mesh: DeviceMesh  # to shard over
    pairs: DeviceMesh  # of all ranks, in two dims
    singles: DeviceMesh  # this rank alone
    device: str
    # Profiling costs more than a step, and all ranks do the same
    is_profiled: bool

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        return (FP32, FP32) if self.units == "uniform" else MIXED_DTYPES


def shard_children(model: nn.Module, units: str, **kwargs: Any) -> None:
    """Cuts a sequence of blocks into units like a tower."""
    for block in model:
        for module in block if units == "dtype" else [block]:
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)


# What is seen of a run #


@contextlib.contextmanager
def noting_post_backwards(held: list[Any]) -> Iterator[None]:
    """Notes how many reductions' inputs are held after each post-backward."""
    post_backward = FSDPParamGroup.post_backward

    def noting(group: FSDPParamGroup, *args: Any) -> None:
        post_backward(group, *args)
        held.append(("inputs", len(group.comm_ctx.reduce_scatter_states)))

    with mock.patch.object(FSDPParamGroup, "post_backward", noting):
        yield


def note_gathers(model: nn.Module, held: list[Any]) -> None:
    """Notes after each forward whether the last gather is held."""

    def note(module: nn.Module, *_: Any) -> None:
        state = units_of(model)[0]._get_fsdp_state()
        held.append(("gather", state._comm_ctx.all_gather_state is not None))

    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_hook(note)


def profiled(step: Callable[..., Any], seen: dict[str, Any]) -> Callable[..., Any]:
    """Notes the last step's profiler ranges and collectives, in their order."""

    def run(model: nn.Module, batches: Batches) -> torch.Tensor:
        if batches.step < STEPS - 1:
            return step(model, batches)
        cpu = torch.profiler.ProfilerActivity.CPU
        with (
            record_collectives() as recorder,
            torch.profiler.profile(activities=[cpu]) as profiler,
        ):
            loss = step(model, batches)
        # As recorded: `profiler.events` makes a tree of all that ran, which takes
        # longer than the steps
        recorded = profiler.profiler.kineto_results.events()
        ours = [event for event in recorded if event.name().startswith("FSDP::")]
        ours.sort(key=lambda event: event.start_ns())
        seen["ranges"] = [event.name() for event in ours]
        seen["collectives"] = [
            (c.name, str(c.dtype), c.numel, c.op, c.group_size) for c in recorder.calls
        ]
        return loss

    return run


def run_mode(mode: Mode, model: nn.Module, place: Place) -> Record:
    held: list[Any] = []
    seen: dict[str, Any] = {"held": held}

    def prepare(model: nn.Module) -> None:
        if mode.prepare is not None:
            mode.prepare(model)
        note_gathers(model, held)

    mesh = place.pairs if mode.is_hybrid else place.mesh
    step = profiled(mode.step, seen) if place.is_profiled else mode.step
    observed = replace(mode, step=step, prepare=prepare)
    with noting_post_backwards(held):
        record = train(observed, model, mesh, place.rank, place.device)
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
        for unit in units_of(model)
        for group in unit._get_fsdp_state()._fsdp_param_groups
    ]


def has_something_left(unit: nn.Module) -> bool:
    """Whether a unit's group holds more after backward than its shards."""
    state = unit._get_fsdp_state()
    return any(
        group._all_gather_result is not None
        or group.comm_ctx.all_gather_state is not None
        or group.comm_ctx.post_forward_order != []
        or group.comm_ctx._last_post_reduce_events != {}
        or (group._reshard_after_forward and group.is_unsharded)
        for group in state._fsdp_param_groups
    )


# Cases #


@dataclass(frozen=True)
class Case:
    run: Callable[[Place], dict[str, Any]]
    uniform: tuple[int, ...] = (2, 4)  # world sizes
    mixed: tuple[int, ...] = (2,)
    # Has the bits that the default settings have
    is_plain: bool = False
    # Makes process groups, which all ranks must make as many of
    makes_groups: bool = False

    def takes_turns(self, size: int) -> bool:
        """Whether one half of the ranks runs it, while the other runs another case."""
        return size == 2 and not self.makes_groups


def tower(*, dtype: torch.dtype = FP32, **kwargs: Any) -> Callable[[Place], Any]:
    """Returns a run that trains a tower in a mode of these settings."""

    def run(place: Place) -> Record:
        GROUPS_NOTED.clear()
        if place.units == "uniform":
            model = tower_of((dtype,), (dtype,), stem=dtype, head=dtype)
        else:
            model = tower_of((BF16, FP32, FP16), (FP16, FP32))
        shard = kwargs.get("shard")
        if shard is None:
            shard = shard_dtypes if place.units == "dtype" else shard_blocks
        mode = Mode(**kwargs | {"shard": shard})
        record = run_mode(mode, model.to(place.device), place)
        groups = [description for description, _ in GROUPS_NOTED]
        return record | {"groups": groups} if groups else record

    return run


# Descriptions and names of the process groups of reductions, in cases that note them
GROUPS_NOTED: set[tuple[str, str]] = set()

CASES: dict[str, Case] = {
    "plain": Case(tower(), is_plain=True),
}


def add_tower(name: str, *, makes_groups: bool = False, **kwargs: Any) -> None:
    """Adds a case that has the bits of the default settings."""
    run = tower(**kwargs)
    CASES[name] = Case(run, is_plain=True, makes_groups=makes_groups)


def add_case(*names: Any, **kwargs: Any) -> Callable[..., Any]:
    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        CASES[run.__name__] = Case(run, **kwargs)
        return run

    return add


def each_unit(method: str, *args: Any) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            getattr(unit, method)(*args)

    return prepare


def step_on_waves(model: nn.Module, batches: Batches) -> torch.Tensor:
    loss = loss_of(model(batches[0]))
    loss.backward()
    return loss
