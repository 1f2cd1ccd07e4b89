"""
Where the host time of a unit goes, in microseconds of its forward and its backward.

[Note: Where host time goes]
The model and the step are those of the host benchmark. The functions that a unit's step
calls are replaced by ones that take the time, on each side its own: ``POINTS`` says
which. What a function takes is without what the functions that it calls take, if those
are points as well. A point costs time itself, partly in it and partly in what calls it:
both are measured with a function that does nothing and subtracted. The fastest of a
round's steps counts. What no point has is the rest: hooks of ``nn.Module`` and autograd
around a unit's own, and the model, whose time without ``fully_shard`` is subtracted.
"""

import functools
import importlib
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from _host_time import build, MIN_STEPS, Pair, UNITS
from _models import SHAPE
from _ratios import alternate, Group, Samples, stop, Subject
from _rows import PartResult
from _sides import Side
from tabulate import tabulate

import torch
from torch import nn


PACKAGE = "torch.distributed.fsdp._fully_shard."
PASSES = ("forward", "backward")
REST = "the rest"


@dataclass(frozen=True)
class Point:
    """What a line of the table takes the time of, by names within the package."""

    label: str
    both: Sequence[str] = ()
    release: Sequence[str] = ()
    branch: Sequence[str] = ()


POINTS = (
    Point(
        "state's hooks",
        both=[
            f"_fsdp_state.FSDPState.{hook}"
            for hook in (
                "_pre_forward",
                "_post_forward",
                "_pre_backward",
                "_root_post_backward_final_callback",
            )
        ],
    ),
    Point(
        "inputs to autograd's nodes",
        both=[
            "_fsdp_param_group.FSDPParamGroup._register_post_backward_hook",
            "_fsdp_state.FSDPState._register_pre_backward_hook",
        ],
    ),
    Point(
        "group's hooks",
        both=[
            f"_fsdp_param_group.FSDPParamGroup.{hook}"
            for hook in (
                "pre_forward",
                "post_forward",
                "pre_backward",
                "post_backward",
                "finalize_backward",
                "unshard",
                "wait_for_unshard",
                "reshard",
            )
        ],
    ),
    Point(
        "inputs of the gather",
        release=[
            "_fsdp_collectives._get_param_all_gather_inputs",
            "_fsdp_collectives._get_all_gather_input_metadatas",
        ],
        branch=["_fsdp_param_cache.ParamGroupCache.prepare_gather"],
    ),
    Point(
        "gather's copy-in",
        release=["_fsdp_collectives.torch.ops.fsdp.all_gather_copy_in"],
        branch=["_fsdp_collectives.fill_segment"],
    ),
    Point(
        "gather, its streams and events", both=["_fsdp_param_group.foreach_all_gather"]
    ),
    Point("all-gather", both=["_fsdp_collectives.DefaultAllGather.__call__"]),
    Point("copy-out", both=["_fsdp_param_group.foreach_all_gather_copy_out"]),
    Point(
        "storage of parameters",
        release=[
            "_fsdp_param.FSDPParam.init_all_gather_outputs",
            "_fsdp_param.FSDPParam.alloc_all_gather_outputs",
            "_fsdp_param.FSDPParam.free_unsharded_param",
        ],
        branch=[
            "_fsdp_param_cache.GatherOutputs.alloc",
            "_fsdp_param_cache.GatherOutputs.free",
        ],
    ),
    Point(
        "registration",
        release=[
            "_fsdp_param.FSDPParam.init_unsharded_param",
            "_fsdp_param.FSDPParam.to_unsharded",
            "_fsdp_param.FSDPParam.to_sharded",
        ],
        branch=["_fsdp_param_cache.ParamGroupCache.to_state"],
    ),
    Point(
        "buffers",
        both=[
            "_fsdp_collectives.DefaultAllGather.allocate",
            "_fsdp_collectives.DefaultReduceScatter.allocate",
        ],
    ),
    Point(
        "gradients popped, buckets",
        release=["_fsdp_param.FSDPParam.unsharded_grad_data"],
        branch=[
            "_fsdp_param_group.pop_grads",
            "_fsdp_param_group.get_buckets",
        ],
    ),
    Point(
        "reduction's copy-in",
        release=["_fsdp_collectives.foreach_reduce_scatter_copy_in"],
        branch=["_fsdp_collectives.copy_in_grads"],
    ),
    Point("reduce-scatter", both=["_fsdp_collectives.DefaultReduceScatter.__call__"]),
    Point(
        "reduction, sharded gradients",
        release=["_fsdp_param_group.foreach_reduce"],
        branch=[
            "_fsdp_param_group.reduce_buckets",
            "_fsdp_collectives.accumulate_sharded_grads",
        ],
    ),
)


# Taking the time #


@dataclass
class _Spent:
    calls: int = 0
    called: int = 0  # of other points, from here
    ns: int = 0  # without theirs

    def net_ns(self, inside: float, outside: float) -> float:
        """Returns the time without what the points cost, see :func:`own_cost`."""
        return self.ns - self.calls * inside - self.called * outside


class Stopwatch:
    """Takes the time that functions spend, without that of those that they call."""

    def __init__(self) -> None:
        self.current = PASSES[0]
        self.spent: defaultdict[tuple[str, str], _Spent] = defaultdict(_Spent)
        self._within: list[list[int]] = [[0, 0]]  # of points that are in others

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        within = self._within

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = [0, 0]
            within.append(frame)
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                ns = time.perf_counter_ns() - start
                within.pop()
                outer = within[-1]
                outer[0] += ns
                outer[1] += 1
                spent = self.spent[label, self.current]
                spent.calls += 1
                spent.called += frame[1]
                spent.ns += ns - frame[0]

        return call


def own_cost(calls: int = 2000) -> tuple[float, float]:
    """Returns what a point costs, in nanoseconds: in itself, and in what calls it."""
    watch = Stopwatch()
    nothing = watch.timed("inner", lambda: None)

    def many() -> None:
        for _ in range(calls):
            nothing()

    def none() -> None:
        for _ in range(calls):
            pass

    watch.timed("outer", many)()
    watch.timed("loop", none)()
    inner, outer, loop = (
        watch.spent[label, PASSES[0]].ns for label in ("inner", "outer", "loop")
    )
    return inner / calls, (outer - loop) / calls


def time_points(side: str) -> Stopwatch:
    """
    Replaces what the points name, for good: hooks are registered once.

    Raises:
        AttributeError: if this side has nothing of a point, which would be a line of
            the table that says 0.
    """
    watch = Stopwatch()
    for point in POINTS:
        names = [*point.both, *getattr(point, side)]
        found = [place for name in names if (place := _place_of(name)) is not None]
        if not found:
            raise AttributeError(f"{side} has nothing that {point.label!r} names")
        for owner, name, is_property in found:
            if is_property:
                getter = watch.timed(point.label, vars(owner)[name].fget)
                setattr(owner, name, property(getter))
            else:
                setattr(owner, name, watch.timed(point.label, getattr(owner, name)))
    return watch


def _place_of(name: str) -> tuple[Any, str, bool] | None:
    """Returns what has the attribute, its name there, and whether it is a property."""
    module, _, path = name.partition(".")
    within, _, last = path.rpartition(".")
    try:
        owner = importlib.import_module(PACKAGE + module)
        owner = attrgetter(within)(owner) if within else owner
        found = inspect.getattr_static(owner, last, None) or getattr(owner, last)
    except (ImportError, AttributeError):
        return None  # another release has it elsewhere
    return owner, last, isinstance(found, property)


# A side's process #


@functools.cache
def _watch(side: str) -> Stopwatch:
    return time_points(side)


@functools.cache
def _models(side: str, precision: str, params: int, device: str) -> Pair:
    _watch(side)  # before hooks are registered
    return build(precision, UNITS, params, False, device)


def measure(
    *, device: str, side: str, precision: str, params: int, seconds: float
) -> dict[str, float]:
    """Returns the microseconds of each point in each pass, per unit and step."""
    watch, models = _watch(side), _models(side, precision, params, device)
    sharded = _fastest_step(watch, models.sharded, device, seconds)
    plain = _fastest_step(watch, models.plain, device, seconds / 4)
    return {
        metric: (us - plain.get(metric, 0.0)) / UNITS for metric, us in sharded.items()
    }


def _fastest_step(
    watch: Stopwatch, model: nn.Module, device: str, seconds: float
) -> dict[str, float]:
    """Returns the microseconds that each point takes of the fastest step."""
    inside, outside = own_cost()
    x = torch.ones(SHAPE, device=device, requires_grad=True)
    forward = watch.timed(REST, lambda: model(x).sum())
    backward = watch.timed(REST, torch.Tensor.backward)
    steps: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(steps) < MIN_STEPS or time.perf_counter() < end:
        watch.spent.clear()
        watch.current = "forward"
        loss = forward()
        watch.current = "backward"
        backward(loss)
        for parameter in model.parameters():
            parameter.grad = None
        steps.append(
            {
                f"{label}, {in_pass}": spent.net_ns(inside, outside) / 1e3
                for (label, in_pass), spent in watch.spent.items()
            }
        )
    return min(steps, key=lambda step: sum(step.values()))


# The table #

PARAMS = (4, 16)
# Column: side and precision. The release takes no unit of several dtypes.
COLUMNS = {
    "release": ("release", "fp32"),
    "branch": ("branch", "fp32"),
    "branch, mixed": ("branch", "mixed"),
}
LABELS = [*(point.label for point in POINTS), REST]


def _group(params: int, seconds: float) -> Group:
    subjects = []
    for column, (side, precision) in COLUMNS.items():
        request = {
            "side": side,
            "precision": precision,
            "params": params,
            "seconds": seconds,
        }
        subjects.append(Subject(column, side, request))
    return Group(f"{params} parameters", tuple(subjects))


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Says what each point takes, on both sides."""
    seconds = 0.06 if quick else 0.12
    groups = [_group(params, seconds) for params in PARAMS]
    stop(sides)  # a process in which the points are replaced measures nothing else
    samples = alternate("where", sides, groups, rounds=rounds or (2 if quick else 12))
    stop(sides)
    tables = {group.name: _lines(group, samples) for group in groups}
    return PartResult([], {"tables": tables})


def _lines(group: Group, samples: Samples) -> list[list[float | str | None]]:
    """
    Returns a line for each point: what it takes, by column and pass, and a sum. None
    stands where the pass does not call it.
    """
    lines: list[list[float | str | None]] = []
    for label in LABELS:
        values = [
            samples.spread(group.name, subject.name, f"{label}, {in_pass}").median
            if f"{label}, {in_pass}" in samples.values[group.name, subject.name]
            else None
            for subject in group.subjects
            for in_pass in PASSES
        ]
        lines.append([label, *values])
    columns = zip(*(line[1:] for line in lines), strict=True)
    sums = [sum(us for us in column if us is not None) for column in columns]
    return [*lines, ["sum", *sums]]


def tables(result: PartResult, style: str = "simple") -> str:
    """Returns the tables of all sizes of units."""
    header = [f"{column}, {in_pass}" for column in COLUMNS for in_pass in PASSES]
    return "\n\n".join(
        tabulate(lines, [f"us, {name}", *header], style, floatfmt=".1f")
        for name, lines in result.data["tables"].items()
    )
