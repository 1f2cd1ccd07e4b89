"""
What plugins do with the functions and operators that gather and reduce: they replace
them, listen to them, and call them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_common.parity_layers import (
    BF16,
    digest,
    FP32,
    groups_of,
    Record,
    Stack,
    stack,
)
from fsdp_common.release_rules import CHUNK_CAT
from fsdp_common.scenarios import one_backward, Place, train
from fsdp_plugins import mixed, of_both_kinds, scenario

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode


# What is gathered #


@scenario
def inputs_and_metadatas_called(place: Place) -> Record:
    get_inputs = _fsdp_collectives._get_param_all_gather_inputs
    get_metadatas = _fsdp_collectives._get_all_gather_input_metadatas
    record: Record = {}
    for policy, dtype in (("bf16", FP32), ("none", BF16)):
        model = place.sharded(policy, stack((dtype, dtype)))
        one_backward(model, place, 0)
        for i, group in enumerate(groups_of(model)):
            inputs = get_inputs(group.fsdp_params)
            record[f"{policy} {dtype} {i}"] = (
                [[digest(tensor) for tensor in of_param] for of_param in inputs],
                str(get_metadatas(inputs)),
            )
    mix = [[torch.ones(3)], [torch.ones(2, dtype=BF16), torch.ones(5)]]
    record["of several dtypes"] = str(get_metadatas(mix))
    return record


def train_with_inputs(
    place: Place, model: Stack, change: Callable[[torch.Tensor], torch.Tensor]
) -> Record:
    """Lets ``change`` make what is gathered of each tensor."""
    original, calls = _fsdp_collectives._get_param_all_gather_inputs, []

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        inputs = original(fsdp_params)
        calls.append([[t.numel() for t in tensors] for tensors in inputs])
        return [[change(t) for t in tensors] for tensors in inputs]

    name = "_get_param_all_gather_inputs"
    with mock.patch.object(_fsdp_collectives, name, get_inputs):
        record = train(model, place)
    return record | {"calls": calls}


@scenario
def replaced_inputs(place: Place) -> Record:
    record = {
        f"{policy} {reshard}": train_with_inputs(
            place, place.sharded(policy, reshard_after_forward=reshard), lambda t: 2 * t
        )
        for policy, reshard in (("none", True), ("none", 2), ("bf16", False))
    }
    narrow = train_with_inputs(place, place.sharded(), lambda t: t.to(BF16))
    return record | {"of another dtype": narrow}


@scenario
def inputs_replaced_between_steps(place: Place) -> Record:
    """What was found out before must not be what is gathered afterwards."""
    model = place.sharded()
    record = train(model, place)
    record |= {"doubled": train_with_inputs(place, model, lambda t: 2 * t)}
    return record | {"afterwards": train(model, place)}


@mixed
def mixed_replaced_inputs(place: Place) -> Record:
    """By what they would have been."""
    record = train_with_inputs(place, place.mixed(), lambda tensor: tensor)
    calls = record.pop("calls")
    return {"plain": train(place.mixed(), place), "replaced": record, "calls": calls}


@scenario
def replaced_metadatas(place: Place) -> Record:
    """Alone, and with the inputs: as a backend does that has its own of all of it."""
    calls: Counter[str] = Counter()

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        calls["inputs"] += 1
        return [param.all_gather_inputs for param in fsdp_params]

    def get_metadatas(inputs: list[list[torch.Tensor]]) -> Any:
        calls["metadatas"] += 1
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
        numels = [[tensor.numel() for tensor in tensors] for tensors in inputs]
        return dtypes, numels, dtypes[0][0]

    found: Record = {}
    new = {"_get_all_gather_input_metadatas": get_metadatas}
    for more in ({}, {"_get_param_all_gather_inputs": get_inputs}):
        with mock.patch.multiple(_fsdp_collectives, **new, **more):
            record = train(place.sharded("bf16_reduce_fp32"), place)
        found[str(len(more))] = record | {"calls": dict(calls)}
    return found


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
def profiled(*, all_threads: bool) -> Iterator[list[str]]:
    cpu, names = [torch.profiler.ProfilerActivity.CPU], []
    experimental = torch._C._profiler._ExperimentalConfig
    config = experimental(profile_all_threads=True) if all_threads else None
    with torch.profiler.profile(activities=cpu, experimental_config=config) as profiler:
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
    "profiler": partial(profiled, all_threads=False),
    "profiler of all threads": partial(profiled, all_threads=True),
    "profiler on demand": profiled_on_demand,
    "profiler on demand, once more": profiled_on_demand,
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


def replace_kernels(library: torch.library.Library, key: str, seen: list[str]) -> None:
    """Registers a vendor's kernels of the operators for a kind of device."""

    def copy_in(inputs, output, split_sizes, numel, rank):
        seen.append("copy in")
        return output.narrow(0, numel * rank, numel), output

    # As there are no data, nothing is to be done
    kernels = {
        "all_gather_copy_in": copy_in,
        "split_with_sizes_copy": lambda *_, out, **__: seen.append("split"),
        CHUNK_CAT: lambda *_, out: seen.append("cat"),
    }
    for operator, kernel in kernels.items():
        library.impl(operator, kernel, key)


@scenario
def operators_of_another_device(place: Place) -> Record:
    """Of tensors that are on neither a CPU nor a GPU, while nobody listens."""
    with torch.device("meta"):
        model = stack()
    model = place.sharded("bf16", model)
    group = groups_of(model)[1]
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        fsdp_param.device = torch.device("meta")
    device, stream = torch.device("meta"), torch.cpu.current_stream()
    process_group, seen = group.mesh_info.shard_process_group, []
    with (
        torch.library._scoped_library("fsdp", "IMPL") as library,
        mock.patch.object(_fsdp_collectives, "_get_device_handle", lambda _: torch.cpu),
        mock.patch.object(dist, "all_gather_single", lambda *args, **kwargs: None),
    ):
        replace_kernels(library, "Meta", seen)
        comm = _fsdp_collectives.DefaultAllGather()
        params = [*group.fsdp_params]
        result = _fsdp_collectives.foreach_all_gather(
            params, process_group, False, stream, stream, device, comm
        )
        _fsdp_collectives.foreach_all_gather_copy_out(result, params, process_group)
        grads = [torch.empty(8, 3, device=device), torch.empty(4, device=device)]
        output = torch.empty(4 * 7, device=device)
        _fsdp_collectives.foreach_reduce_scatter_copy_in(grads, output, 4)
    return {"calls": seen}


# What is reduced #


def train_with_replaced_copy_in(place: Place, model: Stack) -> Record:
    name, calls = "foreach_reduce_scatter_copy_in", []
    original = getattr(_fsdp_collectives, name)

    def copy_in(grads: list[torch.Tensor], output: torch.Tensor, world_size: int):
        dtypes = {str(grad.dtype) for grad in grads}
        calls.append((len(grads), len(dtypes), output.numel(), world_size))
        original([2 * grad for grad in grads], output, world_size)

    with mock.patch.object(_fsdp_collectives, name, copy_in):
        return train(model, place) | {"calls": calls}


@of_both_kinds
def replaced_reduce_scatter_copy_in(place: Place) -> Record:
    return {
        policy: train_with_replaced_copy_in(place, place.of_kind(policy))
        for policy in ("none", "bf16_reduce_fp32", "reduce_bf16")
    }


# Divide factors #


@scenario
def divide_factors(place: Place) -> Record:
    """As upstream's test calls it, and of devices whose backends force sums or not."""
    get_factors = _fsdp_collectives._get_gradient_divide_factors
    one = dist.new_group([place.rank], use_local_synchronization=True)
    found = {"one rank": get_factors(one, None, FP32)}
    for device, factor in itertools.product(("", "mtia"), (None, 2.0)):
        arguments = (dist.group.WORLD, None, FP32, device, factor, device == "")
        found[f"{device} {factor}"] = get_factors(*arguments)
    return {
        key: (before, after, *(getattr(op, "op", op).name for op in ops))
        for key, (before, after, *ops) in found.items()
    }


# Globals #


@scenario
def replaced_globals(place: Place) -> Record:
    """Of the module whose functions test utilities replace."""
    calls: Counter[str] = Counter()
    foreach_copy_out = _fsdp_param_group.foreach_all_gather_copy_out
    foreach_reduce = _fsdp_param_group.foreach_reduce

    def copy_out(result: Any, params: Any, group: Any, **kwargs: Any) -> Any:
        calls[type(result).__name__] += 1
        return foreach_copy_out(result, params, group, **kwargs)

    def reduce(params: Any, grads: list[torch.Tensor], *args: Any, **kwargs: Any):
        calls["reduce"] += 1
        grads[:] = [2 * grad for grad in grads]
        return foreach_reduce(params, grads, *args, **kwargs)

    new = {"foreach_all_gather_copy_out": copy_out, "foreach_reduce": reduce}
    with mock.patch.multiple(_fsdp_param_group, **new):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": dict(calls)}
