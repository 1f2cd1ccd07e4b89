"""
What plugins do with the functions and operators that gather and reduce: they replace
them, listen to them, and call them.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_helpers.common.parity_layers import Record
from fsdp_helpers.common.scenarios import Place, train
from fsdp_helpers.plugins import of_both_kinds, scenario

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode


# What is gathered #


@of_both_kinds
def replaced_inputs(place: Place) -> Record:
    """
    Between two steps that gather what the unit does. In mixed units a plugin may replace
    inputs by what they would have been, as then all steps are those without it.
    """
    scale = 1 if place.is_mixed else 2
    original = _fsdp_collectives._get_param_all_gather_inputs

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        return [[scale * t for t in tensors] for tensors in original(fsdp_params)]

    new = {"_get_param_all_gather_inputs": get_inputs}
    record: Record = {"plain": train(place.sharded(), place, steps=range(3))}
    for reshard in (True, 2):
        model = place.sharded(reshard_after_forward=reshard)
        found = train(model, place, steps=range(1))
        with mock.patch.multiple(_fsdp_collectives, **new):
            found |= train(model, place, steps=range(1, 2))
        record[str(reshard)] = found | train(model, place, steps=range(2, 3))
    return record


@scenario
def replaced_metadatas(place: Place) -> Record:
    """Alone, and with the inputs: as a backend does that has its own of all of it."""
    calls: list[str] = []

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        calls.append("inputs")
        return [param.all_gather_inputs for param in fsdp_params]

    def get_metadatas(inputs: list[list[torch.Tensor]]) -> Any:
        calls.append("metadatas")
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
        numels = [[tensor.numel() for tensor in tensors] for tensors in inputs]
        return dtypes, numels, dtypes[0][0]

    record: Record = {}
    new = {"_get_all_gather_input_metadatas": get_metadatas}
    for more in ({}, {"_get_param_all_gather_inputs": get_inputs}):
        with mock.patch.multiple(_fsdp_collectives, **new, **more):
            found = train(place.sharded("bf16_reduce_fp32"), place)
        record[" ".join(more)] = found
    return record | {"calls": calls}


# Operators #


def count_of(names: list[str]) -> dict[str, int]:
    """Returns how often each operator and range is there."""
    ours = Counter(name for name in names if name.startswith(("fsdp::", "FSDP::")))
    del ours["FSDP::look_for_traces"]  # by which a profiler without a flag is found
    return dict(sorted(ours.items()))


@contextlib.contextmanager
def dispatched() -> Iterator[list[str]]:
    names: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watching():
        yield names


@contextlib.contextmanager
def profiled() -> Iterator[list[str]]:
    cpu, names = [torch.profiler.ProfilerActivity.CPU], []
    with torch.profiler.profile(activities=cpu) as profiler:
        yield names
    names += [event.name for event in profiler.events()]


@contextlib.contextmanager
def profiled_on_demand() -> Iterator[list[str]]:
    """Profiles as a daemon does: torch's Python is not told of it."""
    activities = {torch.profiler.ProfilerActivity.CPU}
    state, flags = torch.autograd.ProfilerState.KINETO, [False] * 5
    experimental = torch._C._profiler._ExperimentalConfig()
    # pyrefly: ignore [bad-argument-count]
    config = torch.autograd.ProfilerConfig(state, *flags, experimental)
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(config, activities)
    names: list[str] = []
    yield names
    events = torch.autograd._disable_profiler().events()
    names += [event.name() for event in events]


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    observer, names = torch.profiler.ExecutionTraceObserver(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer.register_callback(str(path))
        observer.start()
        yield names
        observer.stop()
        observer.unregister_callback()
        names += [node["name"] for node in json.loads(path.read_text())["nodes"]]


OBSERVERS = {
    "dispatch mode": dispatched,
    "profiler": profiled,
    "profiler on demand": profiled_on_demand,
    "execution trace": traced,
}


@scenario
def operators_and_ranges_that_observers_see(place: Place) -> Record:
    model = place.sharded("bf16_reduce_fp32")
    record = train(model, place)
    for name, observe in OBSERVERS.items():
        with observe() as names:
            observed = train(model, place, steps=range(2, 3))
        afterwards = train(model, place, steps=range(3, 4))
        record[name] = observed | afterwards | {"calls": count_of(names)}
    return record


# What is reduced #


@of_both_kinds
def replaced_reduce_scatter_copy_in(place: Place) -> Record:
    """It gets gradients of one dtype at a time."""
    name, calls = "foreach_reduce_scatter_copy_in", []
    original = getattr(_fsdp_collectives, name)

    def copy_in(grads: list[torch.Tensor], output: torch.Tensor, world_size: int):
        calls.append((len(grads), len({grad.dtype for grad in grads}), output.numel()))
        original([2 * grad for grad in grads], output, world_size)

    with mock.patch.object(_fsdp_collectives, name, copy_in):
        return train(place.sharded("reduce_bf16"), place) | {"calls": calls}


# Globals #


@scenario
def replaced_copy_out(place: Place) -> Record:
    """A global of the module that calls it, as test utilities replace it."""
    calls: list[str] = []
    original = _fsdp_param_group.foreach_all_gather_copy_out

    def copy_out(result: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(type(result).__name__)
        original(result, *args, **kwargs)

    with mock.patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copy_out):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": calls}
