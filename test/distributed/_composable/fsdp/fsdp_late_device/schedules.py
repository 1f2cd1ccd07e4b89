"""
The schedules of the happens-before checker on 4 ranks of a device that is late,
see :mod:`fsdp_streams.schedules`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fsdp_late_device.queues import Recording
from fsdp_late_device.ranks import Rank
from fsdp_late_device.record import Recorder
from fsdp_streams import schedules
from fsdp_streams.schedules import KINDS, Kit, SCHEDULES

import torch
from torch.distributed.device_mesh import DeviceMesh


RANKS = 4

_local = threading.local()
_make_mesh = schedules.mesh_of.__wrapped__


def _mesh_of(*shape: int) -> DeviceMesh:
    """The meshes that the schedules ask for, with half of the ranks on the last dim."""
    if shape == (2, 4):
        shape = 2, 2
    meshes = _local.meshes
    if shape not in meshes:
        meshes[shape] = _make_mesh(*shape)
    return meshes[shape]


@dataclass
class LateKit(Kit):
    """Gives each rank and each microbatch another input."""

    inputs: int = 0

    def input(self) -> torch.Tensor:
        self.inputs += 1
        rank: Any = self.checker
        return super().input() * (1 + 0.25 * rank.number + 0.0625 * self.inputs)


def record(
    name: str,
    kind: str,
    *,
    broken: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    **options: Any,
) -> Recording:
    """Records a schedule, with what ``broken`` breaks. Options are the recorder's."""

    def program(rank: Rank) -> None:
        _local.meshes = {}
        SCHEDULES[name](LateKit(rank, KINDS[kind]))

    with _schedules_patched(name), broken():
        return Recorder(RANKS, **options).record(program)


@contextlib.contextmanager
def _schedules_patched(name: str) -> Iterator[None]:
    patch = functools.partial(mock.patch.object, schedules)
    # Threads would not undo in the order that they patch in
    pinning = schedules._pinning
    with patch("_pinning", contextlib.nullcontext), patch("RANKS", RANKS):
        with patch("mesh_of", _mesh_of):
            with pinning() if "pinned" in name else contextlib.nullcontext():
                yield
