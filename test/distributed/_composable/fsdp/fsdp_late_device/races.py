"""
Races that were published of FSDP2, put back into the branch from what is told of
them, and the schedules in which a device that is late has to find them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fsdp_late_device import schedules
from fsdp_late_device.queues import Recording
from fsdp_late_device.ranks import Rank
from fsdp_streams.devices import Event

import torch
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param_group as param_group,
)


Broken = Callable[..., contextlib.AbstractContextManager]

_GROUP, _CONTEXT = param_group.FSDPParamGroup, param_group.FSDPCommContext


@dataclass(frozen=True)
class Race:
    """What is put back, and where it shows."""

    told: str
    broken: Broken
    schedules: tuple[str, ...]
    kinds: tuple[str, ...] = ("uniform", "mixed")
    shows: bool = True  # else the order of calls is kept by something else


# What is put back #


def _all(*broken: Broken) -> Broken:
    @contextlib.contextmanager
    def breaks_all() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in broken:
                stack.enter_context(one())
            yield

    return breaks_all


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple):
        items = [_without_tensors(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class _Forgetful(list):
    def append(self, item: Any) -> None:
        super().append(_without_tensors(item))


def forgets(owner: type, name: str) -> Broken:
    """Keeps the events of what is set or appended there, but not the tensors."""

    def set_attribute(instance: Any, attribute: str, value: Any) -> None:
        if attribute == name:
            is_list = isinstance(value, list)
            value = _Forgetful(value) if is_list else _without_tensors(value)
        object.__setattr__(instance, attribute, value)

    return lambda *unused: mock.patch.object(owner, "__setattr__", set_attribute)


def _takes_pool_for_new() -> contextlib.AbstractContextManager:
    """A second bucket gets the first one's input buffer, and waits for nothing."""
    wait = _GROUP._wait_current_stream

    def wait_elsewhere(group: Any, event: Any) -> None:
        if (
            sys._getframe(1).f_code
            is not param_group.GradReducer._reduce_parts.__code__
        ):
            wait(group, event)

    return mock.patch.object(_GROUP, "_wait_current_stream", wait_elsewhere)


def _frees_gather_before_copy_out() -> contextlib.AbstractContextManager:
    """The gather streams do not wait for the event of the copy-out."""
    return mock.patch.object(
        _CONTEXT, "wait_all_gather_streams_on_event", lambda *unused: None
    )


def _drained_by_last_group_only() -> contextlib.AbstractContextManager:
    """The shared inputs are let go of by the last group of a module alone."""

    def recycle(shared: Any, group: Any) -> None:
        states = shared.reduce_scatter_states
        if group._param_group_index != group._num_param_groups - 1:
            return
        while len(states) >= shared.reduce_scatter_max_input_buffers:
            if (event := states.pop(0).event) is not None:
                shared.device_handle.current_stream().wait_event(event)

    return mock.patch.object(_CONTEXT, "recycle_reduce_buffers", recycle)


def _drained_without_waiting() -> contextlib.AbstractContextManager:
    """... and whoever is not the last takes it for done."""

    def recycle(shared: Any, group: Any) -> None:
        states = shared.reduce_scatter_states
        is_last = group._param_group_index == group._num_param_groups - 1
        while len(states) >= shared.reduce_scatter_max_input_buffers:
            event = states.pop(0).event
            if is_last and event is not None:
                shared.device_handle.current_stream().wait_event(event)

    return mock.patch.object(_CONTEXT, "recycle_reduce_buffers", recycle)


def never_blocks() -> contextlib.AbstractContextManager:
    """Gradients are copied to pinned memory, and nobody waits for the copies."""
    copy = Rank.copy_across
    return mock.patch.object(
        Rank, "copy_across", lambda rank, tensor, non_blocking: copy(rank, tensor, True)
    )


def _never_synchronizes() -> contextlib.AbstractContextManager:
    return mock.patch.object(Event, "synchronize", lambda event: None)


def _goes_on_after_part() -> contextlib.AbstractContextManager:
    """Backward goes on after a part of a unit without waiting for its reduction."""
    wait = _GROUP._wait_current_stream

    def wait_current_stream(group: Any, event: Any) -> None:
        is_after_part = event is not None and event is group._reducer.event
        if not (is_after_part and len(group.modules) > 1):
            wait(group, event)

    return mock.patch.object(_GROUP, "_wait_current_stream", wait_current_stream)


# Races #

RACES = {
    "output of a reduce-scatter dropped while a hook's stream reads it": Race(
        "a fault of the release, docs/parity.md",
        forgets(_CONTEXT, "all_reduce_states"),
        ("all_reduce_hook", "hsdp", "hsdp_deferred"),
        ("uniform, cast", "mixed, cast"),  # else the gradients keep it
    ),
    "a pool's buffer given to the second bucket too": Race(
        "a custom reduce-scatter that gives out one buffer",
        _takes_pool_for_new,
        ("pooled_reduce_input",),
        ("mixed",),
    ),
    "gather buffer freed before the copy-out's event": Race(
        "the release's comment on freeing it late",
        forgets(_CONTEXT, "all_gather_state"),
        ("implicit_prefetch", "evaluation_between"),
    ),
    "gather streams that do not wait for the copy-out": Race(
        "the same, with the buffer held",
        _frees_gather_before_copy_out,
        ("implicit_prefetch", "evaluation_between"),
    ),
    "inputs drained by the last group only": Race(
        "pytorch 177319, ROCm 3500 and 3501",
        _drained_by_last_group_only,
        ("two_groups_of_a_module",),
        shows=False,
    ),
    "inputs drained by any group, waited for by the last": Race(
        "pytorch 177319, ROCm 3500 and 3501, with hooks in another order",
        _drained_without_waiting,
        ("two_groups_of_a_module",),
    ),
    "gradients read in pinned memory without waiting": Race(
        "offloading with pinned memory",
        _all(never_blocks, _never_synchronizes),
        ("offload_pinned_accumulation", "offload_pinned", "offload_pinned_hook"),
    ),
    "backward goes on after a part of a unit": Race(
        "pytorch 181218, with the buffers held",
        _goes_on_after_part,
        ("part_of_a_unit_after_the_root",),
        shows=False,
    ),
    "backward goes on after a part of a unit, inputs let go": Race(
        "pytorch 181218, as its reproduction does",
        _all(_goes_on_after_part, forgets(_CONTEXT, "reduce_scatter_states")),
        ("part_of_a_unit_after_the_root",),
    ),
    "inputs reused between reductions": Race(
        "pytorch 180665",
        forgets(_CONTEXT, "reduce_scatter_states"),
        ("implicit_prefetch", "two_input_buffers", "hsdp"),
    ),
}


def record(race: Race, name: str, kind: str, **options: Any) -> Recording:
    """Records a schedule of the branch with the race in it."""
    return schedules.record(name, kind, broken=race.broken, **options)
