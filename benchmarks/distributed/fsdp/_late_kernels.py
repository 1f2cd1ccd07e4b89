"""
Schedules of the tests of streams on real streams, with kernels slowed down between.

Each runs with a wait after each operator, and then late in each of :data:`LATE`.
Gradients at each optimizer step, and parameters at the end, must have the same bits.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from _calls import seen_by
from _models import digest_of
from _ratios import Row
from _sides import Side, SideError

from fsdp_helpers.late_device.operators import is_view
from fsdp_helpers.late_device.schedules import KINDS, ScheduleKit, SCHEDULES

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.utils._python_dispatch import TorchDispatchMode


CYCLES = 1_000_000  # half a millisecond or more
SECONDS = 120  # of one schedule
# These look into streams that tests have made up
NEED_STAND_INS = ("pooled_reduce_input",)
ON_CPU = ("implicit_prefetch", "hsdp", "one_rank")  # nothing is late there


class DeviceRank:
    """Does for a schedule what the rank of a recording does, with real streams."""

    def __init__(self, device: str, number: int):
        self.number = number
        self.handle = torch.get_device_module(device)

    def new_stream(self, name: str) -> Any:
        return self.handle.Stream()

    def put_on_host(self, tensors: Any) -> None:
        """There they are."""

    def end_step(self) -> None:
        """Nothing is counted."""


def sleep(cycles: int = CYCLES) -> None:
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)


@dataclass
class DeviceKit(ScheduleKit):
    """Notes gradients."""

    sleeps: bool = False  # before what is computed and before the optimizer
    modules: list[nn.Module] = field(default_factory=list)
    noted: list[Tensor] = field(default_factory=list)

    def shard(self, module: Any, **kwargs: Any) -> Any:
        unit = super().shard(module, **kwargs)
        self.modules += unit if isinstance(unit, list) else [unit]
        return unit

    def input(self) -> Tensor:
        if self.sleeps:
            sleep()
        return super().input()

    def optimize(self, module: nn.Module) -> None:
        if self.sleeps:
            sleep()
        grads: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
        self.noted += [grad._local_tensor.detach().clone() for grad in grads]
        super().optimize(module)

    def digests(self) -> list[str]:
        handle: Any = self.rank.handle  # the device's own
        handle.synchronize()
        params: Any = nn.ModuleList(self.modules).parameters()  # each once
        last = [p._local_tensor for p in params]
        return [digest_of(tensor) for tensor in [*self.noted, *last]]


class AfterEach(TorchDispatchMode):
    """Does something after each operator that is no view."""

    def __init__(self, action: Callable[[], None]):
        super().__init__()
        self.action = action

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if not is_view(func):
            self.action()
        return result


@contextlib.contextmanager
def late_compute(kit: DeviceKit) -> Iterator[None]:
    kit.sleeps = True
    yield


def late_operators(kit: DeviceKit) -> Any:
    generator = random.Random(kit.rank.number)
    return AfterEach(lambda: sleep(CYCLES // 4) if generator.random() < 0.3 else None)


LATE: dict[str, Callable[[DeviceKit], Any]] = {
    "collectives": lambda kit: seen_by(lambda call: sleep()),
    "compute": late_compute,
    "operators": late_operators,
}


def run_schedule(name: str, kind: str, device: str, how: Any) -> list[str]:
    """Returns digests of all that a run of the schedule has made."""
    torch.manual_seed(0)
    rank: Any = DeviceRank(device, dist.get_rank())
    kit = DeviceKit(rank, KINDS[kind], device)
    with torch.device(device), how(kit):
        SCHEDULES[name](kit)
    return kit.digests()


def measure(*, device: str, schedule: str, kind: str) -> dict[str, Any]:
    """Returns how many tensors differ if kernels are late, over all ranks."""
    expected = run_schedule(
        schedule, kind, device, lambda kit: AfterEach(kit.rank.handle.synchronize)
    )
    own = {}
    for name, how in LATE.items():
        found = run_schedule(schedule, kind, device, how)
        own[name] = sum(a != b for a, b in zip(found, expected, strict=True))
    all_ranks: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own)
    differ = {name: sum(each[name] for each in all_ranks) for name in LATE}
    return {"differ": differ, "tensors": len(expected)}


def run(sides: dict[str, Side], **options: Any) -> list[Row]:
    """Counts, of the branch, the tensors that are others if kernels are late."""
    side, rows = sides["branch"], []
    for kind in KINDS:
        for name in SCHEDULES:
            is_wanted = kind == "mixed" or name in ("implicit_prefetch", "hsdp")
            if side.device == "cpu":
                is_wanted &= kind == "mixed" and name in ON_CPU
            if not is_wanted or name in NEED_STAND_INS:
                continue
            side.start()
            case, request = f"{name}, {kind}", {"schedule": name, "kind": kind}
            found: dict[str, Any]
            try:
                found = side.ask(__name__, request, seconds=SECONDS)
            except SideError as error:  # the next one gets new processes
                case = f"{case}: {str(error).splitlines()[0]}"
                found = {"tensors": 1, "differ": {"ended": 1}}
            of = found["tensors"]
            for how, count in found["differ"].items():
                counts = (of + count, "in order", of)
                quantity = f"tensors, and those that differ, late {how}"
                rows.append(Row("late", case, quantity, *counts, 1.0))
    return rows
