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

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    gradients,
    groups_of,
    Record,
    Stack,
    stack,
)
from fsdp_common.release_rules import (
    CHUNK_CAT,
    FOLLOWS_GRAD_DTYPE,
    reduce_arguments,
    reduce_dtype,
)
from fsdp_common.scenarios import (
    describe,
    one_backward,
    Place,
    POLICIES,
    replaced,
    train,
)
from fsdp_plugins.runs import gather_by_hand, mixed, scenario

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

    with replaced(_fsdp_collectives, _get_param_all_gather_inputs=get_inputs):
        record = train(model, place)
    return record | {"calls": calls}


@scenario
def replaced_inputs(place: Place) -> Record:
    return {
        f"{policy} {reshard}": train_with_inputs(
            place, place.sharded(policy, reshard_after_forward=reshard), lambda t: 2 * t
        )
        for policy, reshard in (("none", True), ("none", 2), ("bf16", False))
    }


@scenario
def replaced_inputs_of_another_dtype(place: Place) -> Record:
    return train_with_inputs(place, place.sharded(), lambda t: t.to(BF16))


@scenario
def inputs_replaced_between_steps(place: Place) -> Record:
    """What was found out before must not be what is gathered afterwards."""
    model = place.sharded()
    record = train(model, place)
    record |= {"doubled": train_with_inputs(place, model, lambda t: 2 * t)}
    return record | {"afterwards": train(model, place)}


@mixed
def mixed_replaced_inputs_that_change_nothing(place: Place) -> Record:
    model = place.mixed()
    record = train_with_inputs(place, model, lambda tensor: tensor)
    calls = record.pop("calls")
    return {"same": record == train(place.mixed(), place), "calls": len(calls)}


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
        with replaced(_fsdp_collectives, **new, **more):
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


@contextlib.contextmanager
def kernels_of_a_vendor(key: str) -> Iterator[Counter[str]]:
    """Replaces the operators' kernels for a kind of device, and counts their calls."""
    calls: Counter[str] = Counter()

    def copy_in(inputs, output, split_sizes, numel, rank):
        calls["copy in"] += 1
        own = output.narrow(0, numel * rank, numel)
        for slot, tensor in zip(own.split(split_sizes), inputs, strict=True):
            slot.copy_(tensor)
        return own, output

    def split(output, split_sizes, dim=0, *, out):
        calls["split"] += 1
        for piece, target in zip(output.split(split_sizes, dim), out, strict=True):
            target.copy_(piece)

    def chunk_cat(tensors, dim, num_chunks, out):
        calls["cat"] += 1
        torch._chunk_cat(tensors, dim, num_chunks, out=out)

    library = torch.library.Library("fsdp", "IMPL")
    kernels = {
        "all_gather_copy_in": copy_in,
        "split_with_sizes_copy": split,
        CHUNK_CAT: chunk_cat,
    }
    try:
        for operator, kernel in kernels.items():
            library.impl(operator, kernel, key)
        yield calls
    finally:
        library._destroy()


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
    process_group = group.mesh_info.shard_process_group
    with (
        kernels_of_a_vendor("Meta") as calls,
        replaced(_fsdp_collectives, _get_device_handle=lambda kind: torch.cpu),
        # There are no data to send
        replaced(dist, all_gather_single=lambda *args, **kwargs: None),
    ):
        comm = _fsdp_collectives.DefaultAllGather()
        params = [*group.fsdp_params]
        result = _fsdp_collectives.foreach_all_gather(
            params, process_group, False, stream, stream, device, comm
        )
        _fsdp_collectives.foreach_all_gather_copy_out(result, params, process_group)
        grads = [torch.empty(8, 3, device=device), torch.empty(4, device=device)]
        output = torch.empty(4 * 7, device=device)
        _fsdp_collectives.foreach_reduce_scatter_copy_in(grads, output, 4)
    return {"calls": dict(calls)}


# What is reduced #


def train_with_replaced_copy_in(place: Place, model: Stack) -> Record:
    original, calls = _fsdp_collectives.foreach_reduce_scatter_copy_in, []

    def copy_in(grads: list[torch.Tensor], output: torch.Tensor, world_size: int):
        dtypes = {str(grad.dtype) for grad in grads}
        calls.append((len(grads), len(dtypes), output.numel(), world_size))
        original([2 * grad for grad in grads], output, world_size)

    with replaced(_fsdp_collectives, foreach_reduce_scatter_copy_in=copy_in):
        return train(model, place) | {"calls": calls}


@scenario
def replaced_reduce_scatter_copy_in(place: Place) -> Record:
    return {
        policy: train_with_replaced_copy_in(place, place.sharded(policy))
        for policy in ("none", "bf16_reduce_fp32")
    }


@mixed
def mixed_with_replaced_reduce_scatter_copy_in(place: Place) -> Record:
    return {
        policy: train_with_replaced_copy_in(place, place.mixed(policy))
        for policy in ("none", "reduce_bf16")
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


# Calling the functions #


@scenario
def gather_called_with_plain_lists(place: Place) -> Record:
    record: Record = {}
    for by_keyword, policy in ((False, "none"), (True, "bf16_reduce_fp32")):
        model = place.sharded(policy)
        one_backward(model, place, 0)
        model.zero_grad()
        group = groups_of(model)[1]
        gather_by_hand(group, by_keyword=by_keyword)
        unsharded = [digest(p._unsharded_param) for p in group.fsdp_params]
        group._to_unsharded()
        group._to_sharded()
        record[policy] = train(model, place) | {"unsharded": unsharded}
    return record


def reduce_by_hand(place: Place, policy: str, *, is_hybrid: bool, keyword: bool) -> Any:
    mesh = place.pairs if is_hybrid else place.mesh
    model = place.sharded(policy, mesh=mesh)
    one_backward(model, place, 0)
    model.zero_grad()
    group, mp_policy = groups_of(model)[1], POLICIES[policy]
    grads = [
        batch_of(i, place.rank, dim=p._orig_size.numel())[0].view(p._orig_size)
        for i, p in enumerate(group.fsdp_params)
    ]
    grads = [grad.to(mp_policy.param_dtype or FP32) for grad in grads]
    replicas = group.mesh_info.replicate_process_group if is_hybrid else None
    arguments = reduce_arguments(
        fsdp_params=[*group.fsdp_params],
        unsharded_grads=grads,
        reduce_scatter_group=group.mesh_info.shard_process_group,
        reduce_scatter_stream=torch.cpu.current_stream(),
        reduce_scatter_comm=_fsdp_collectives.DefaultReduceScatter(),
        orig_dtype=FP32,
        reduce_dtype=(
            reduce_dtype(mp_policy, FP32)
            if FOLLOWS_GRAD_DTYPE
            else mp_policy.reduce_dtype
        ),
        device=group.device,
        gradient_divide_factor=None,
        all_reduce_group=replicas,
        all_reduce_stream=torch.cpu.current_stream(),
        all_reduce_grads=True,
        partial_reduce_output=None,
        all_reduce_hook=None,
    )
    foreach_reduce = _fsdp_collectives.foreach_reduce
    if keyword:
        results = foreach_reduce(**arguments, force_sum_reduction_for_comms=False)
    else:
        results = foreach_reduce(*arguments.values())
    (scattered, _, post, _, shared, _, partial) = results
    return (
        digest(scattered) if shared is None else describe(scattered),
        type(post).__name__,
        digest(shared),
        partial is None,
        len(grads),  # which it empties
        dict(gradients(model.blocks[0])),
    )


@scenario
def reduce_called_with_plain_lists(place: Place) -> Record:
    return {
        f"{policy} {is_hybrid}": reduce_by_hand(
            place, policy, is_hybrid=is_hybrid, keyword=is_hybrid
        )
        for policy in ("none", "bf16_reduce_fp32")
        for is_hybrid in (False, True)
    }


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

    with replaced(
        _fsdp_param_group,
        foreach_all_gather_copy_out=copy_out,
        foreach_reduce=reduce,
    ):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": dict(calls)}
