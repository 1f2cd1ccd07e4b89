"""
Uses one feature of ``fully_shard`` at a time with whatever torch is imported, and
saves what came of it: every step's loss and sharded gradients, the final
parameters, the order of profiler ranges, the collectives, and what was held.

The tests run it on the base release and on this branch and compare:

- uniform units are cut alike in both;
- mixed units are blocks of three dtypes with ``--units block``, and one unit for
  each dtype with ``--units dtype``, as the base wants them;
- with ``--units block`` what should leave no trace in the numbers also runs on
  four ranks, beside the default settings.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mixed_dtype_parity
from features_models import (
    Extended,
    extended_stack,
    Fp8,
    Hidden,
    HighLow,
    NestedWaves,
    Offsets,
    stack_of,
    Waves,
)
from fsdp_run_ranks import run_ranks
from fsdp_test_utils import record_collectives
from mixed_dtype_models import BF16, FP16, FP32, loss_of, Tower
from mixed_dtype_parity import (
    accumulate,
    Batches,
    Mode,
    one_backward,
    Record,
    run_one_of_group,
    run_rest_in_chunks,
    several_backwards,
    shard_blocks,
    shard_dtypes,
    step_in_backward,
    train,
    units_of,
)

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    fully_shard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


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


def tower(*, dtype: torch.dtype = FP32, **kwargs: Any) -> Callable[[Place], Any]:
    """Returns a run that trains a tower in a mode of these settings."""

    def run(place: Place) -> Record:
        SeparateScatter.groups.clear()
        if place.units == "uniform":
            model = tower_of((dtype,), (dtype,), stem=dtype, head=dtype)
        else:
            model = tower_of((BF16, FP32, FP16), (FP16, FP32))
        shard = kwargs.get("shard")
        if shard is None:
            shard = shard_dtypes if place.units == "dtype" else shard_blocks
        mode = Mode(**kwargs | {"shard": shard})
        record = run_mode(mode, model.to(place.device), place)
        groups = [description for description, _ in SeparateScatter.groups]
        return record | {"groups": groups} if groups else record

    return run


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


# Communication: who allocates, and who sends #


class Gather(AllGather):
    """Uses nothing of the default one."""

    def __init__(self) -> None:
        self.buffers: list[weakref.ref] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        buffer = torch.full(tuple(size), 77, dtype=dtype, device=device)
        self.buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if input_tensor.data_ptr() - output_tensor.data_ptr() != (
            group.rank() * input_tensor.nbytes
        ):
            raise AssertionError("A rank's input is no part of the output")
        return dist.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class AsyncGather(Gather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if not async_op:
            raise AssertionError("Expected a gather that is waited for later")
        return super().__call__(output_tensor, input_tensor, group, async_op)


class Scatter(ReduceScatter):
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class SeparateScatter(Scatter):
    """Notes which group each reduction is sent over."""

    groups: set[tuple[str, str]] = set()

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.groups.add((group.group_desc, group.group_name))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class KeptBuffers:
    """
    Gives out the same bytes again and again. The first buffer asked for before a
    call is kept, which is what is sent; results are new, gradients live in them.
    """

    kept: torch.Tensor | None = None
    is_first = True

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        if not self.is_first:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        self.is_first = False
        nbytes = torch.Size(size).numel() * dtype.itemsize
        if self.kept is None or self.kept.numel() < nbytes:
            self.kept = torch.empty(max(nbytes, 1 << 12), dtype=torch.uint8)
        return self.kept[:nbytes].view(dtype).view(tuple(size))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_first = True
        return super().__call__(*args, **kwargs)


class KeptGather(KeptBuffers, Gather):
    """One for each unit: a gather may be started before the last one is used."""


class KeptScatter(KeptBuffers, Scatter):
    """May serve all units: an input is sent before the next one is filled."""


def set_comms(gather: Callable[[], Any], scatter: Callable[[], Any]) -> Any:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            unit.set_custom_all_gather(gather())
            unit.set_custom_reduce_scatter(scatter())

    return prepare


def each_unit(method: str, *args: Any) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            getattr(unit, method)(*args)

    return prepare


def share_kept_scatter(model: nn.Module) -> None:
    """One buffer for the inputs of all units."""
    scatter = KeptScatter()
    for unit in units_of(model):
        unit.set_custom_reduce_scatter(scatter)


def gather_asynchronously(model: nn.Module) -> None:
    model._set_unshard_async_op(True)
    set_comms(AsyncGather, Scatter)(model)


def memory_from_group_and_back(model: nn.Module) -> None:
    each_unit("set_allocate_memory_from_process_group_for_comm", True)(model)
    each_unit("set_allocate_memory_from_process_group_for_comm", False)(model)


def separate_group(model: nn.Module) -> None:
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group()  # makes no other one
    for unit in units_of(model):
        unit.set_custom_reduce_scatter(SeparateScatter())


def separate_group_and_back(model: nn.Module) -> None:
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group(False)


def many_input_buffers(model: nn.Module) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def two_buffers_in_one_block(model: nn.Module) -> None:
    """The most that any unit wants counts for all."""
    units_of(model)[1].set_reduce_scatter_max_input_buffers(2, recurse=False)


MEMORY = "set_allocate_memory_from_process_group_for_comm"

add_tower("custom_comms", prepare=set_comms(Gather, Scatter))
add_tower("kept_buffers", prepare=set_comms(KeptGather, KeptScatter))
add_tower("one_kept_buffer_for_all_units", prepare=share_kept_scatter)
add_tower("memory_from_group", prepare=each_unit(MEMORY, True))
add_tower("memory_from_group_and_back", prepare=memory_from_group_and_back)
add_tower("separate_group", prepare=separate_group, makes_groups=True)
add_tower("separate_group_and_back", prepare=separate_group_and_back, makes_groups=True)
add_tower(
    "one_input_buffer", prepare=each_unit("set_reduce_scatter_max_input_buffers", 1)
)
add_tower(
    "two_input_buffers", prepare=each_unit("set_reduce_scatter_max_input_buffers", 2)
)
add_tower("three_input_buffers", prepare=many_input_buffers)
add_tower("two_input_buffers_in_one_block", prepare=two_buffers_in_one_block)
add_tower("async_unshard_op", prepare=gather_asynchronously)


def take_sine_in_hook(stream: bool) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            kwargs = {"stream": torch.cpu.Stream()} if stream else {}
            unit.set_all_reduce_hook(lambda grad: grad.sin_(), **kwargs)

    return prepare


_HYBRID = {"is_hybrid": True}
CASES["hybrid_separate_group"] = Case(
    tower(prepare=separate_group, **_HYBRID), uniform=(4,), mixed=(4,)
)
CASES["all_reduce_hook"] = Case(tower(prepare=take_sine_in_hook(stream=False)))
CASES["all_reduce_hook_with_stream"] = Case(
    tower(prepare=take_sine_in_hook(stream=True))
)
CASES["hybrid_all_reduce_hook"] = Case(
    tower(prepare=take_sine_in_hook(stream=False), **_HYBRID), uniform=(4,), mixed=(4,)
)
CASES["hybrid_custom_comms"] = Case(
    tower(prepare=set_comms(Gather, Scatter), **_HYBRID), uniform=(4,), mixed=(4,)
)


class SymmMemStub:
    """Stands in for symmetric memory, and notes what is asked of it."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self.registered: list[tuple[str, int]] = []
        self.pools = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[SymmMemStub]:
        def rendezvous(tensor: torch.Tensor, group: str) -> None:
            self.registered.append((str(tensor.dtype), tensor.numel()))

        @contextlib.contextmanager
        def use(pool: object) -> Iterator[None]:
            self.pools += 1
            yield

        with (
            mock.patch.object(symm_mem, "set_backend", self.backends.append),
            mock.patch.object(symm_mem, "rendezvous", rendezvous),
            mock.patch.object(symm_mem, "get_mem_pool", lambda device: None),
            mock.patch.object(torch.cuda, "use_mem_pool", use),
        ):
            yield self


def symmetric_memory(sums: bool) -> Callable[[Place], Record]:
    def prepare(model: nn.Module) -> None:
        if sums:
            each_unit("set_force_sum_reduction_for_comms", True)(model)
        each_unit("set_symm_mem_for_comm")(model)

    def run(place: Place) -> Record:
        with SymmMemStub().patched() as stub:
            record = tower(prepare=prepare)(place)
        seen = (len(stub.backends), {*stub.backends}, stub.registered, stub.pools)
        return record | {"symmetric memory": seen}

    return run


CASES["symmetric_memory"] = Case(symmetric_memory(sums=False))
CASES["symmetric_memory_sums"] = Case(symmetric_memory(sums=True))


# Communication: meshes and contexts #


def shard_on_two_meshes(place: Place, **kwargs: Any) -> Callable[..., None]:
    """Gives vectors and single elements to a smaller group of ranks."""

    def shard(model: nn.Module, *, mesh: DeviceMesh, **others: Any) -> None:
        smaller = place.pairs["shard"] if mesh.size() == 4 else place.singles["shard"]
        infos = FSDPMeshInfo(mesh, shard_mesh_dim=0), FSDPMeshInfo(smaller, 0)

        def place_param(param: nn.Parameter) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), infos[param.ndim == 1])

        cut = shard_dtypes if place.units == "dtype" else shard_blocks
        if not isinstance(model, Tower):
            cut = functools.partial(shard_children, units=place.units)
        cut(model, mesh=mesh, shard_placement_fn=place_param, **others, **kwargs)

    return shard


@add_case()
def two_meshes(place: Place) -> Record:
    return tower(shard=shard_on_two_meshes(place))(place)


@add_case()
def two_meshes_resharded(place: Place) -> Record:
    return tower(shard=shard_on_two_meshes(place, reshard_after_forward=True))(place)


@add_case()
def two_meshes_prefetched(place: Place) -> Record:
    shard = shard_on_two_meshes(place)
    return tower(shard=shard, prepare=prefetch_in_order)(place)


@add_case()
def two_meshes_two_input_buffers(place: Place) -> Record:
    shard = shard_on_two_meshes(place)
    prepare = each_unit("set_reduce_scatter_max_input_buffers", 2)
    return tower(shard=shard, prepare=prepare)(place)


@add_case(uniform=(4,), mixed=(4,))
def three_meshes(place: Place) -> Record:
    """Which of a module's groups prefetches does not show with two of them."""
    meshes = place.mesh, place.pairs["shard"], place.singles["shard"]
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in meshes]

    def place_param(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[param.ndim % 3])

    def shard(model: nn.Module, **kwargs: Any) -> None:
        kwargs["shard_placement_fn"] = place_param
        shard_children(model, place.units, **kwargs)

    # And how far it prefetches does not show with two modules
    stacks = stack_of(Waves, place.dtypes), stack_of(Waves, place.dtypes)
    model = nn.Sequential(*itertools.chain(*stacks))
    return run_mode(Mode(shard=shard, step=step_on_waves), model, place)


def prefetch_in_order(model: nn.Module) -> None:
    """Each unit starts the gather of the next, or of the one before in backward."""
    units = [unit for unit in units_of(model) if unit is not model]
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


add_tower("prefetched_in_order", prepare=prefetch_in_order)


@functools.cache
def full_mesh(names: tuple[str, str]) -> DeviceMesh:
    """Returns the one mesh of these names: FSDP wants the object that DTensors have."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def spmd(dims: DataParallelMeshDims, names: tuple[str, str]) -> Callable[[Place], Any]:
    """Trains DTensors on the mesh of all ranks, replicated but for "tp"."""

    def run(place: Place) -> Record:
        full = full_mesh(names)
        model = stack_of(Waves, place.dtypes)
        for waves in (module for module in model.modules() if type(module) is Waves):
            for i, param in enumerate(waves.params):
                on_tp = Shard(param.ndim - 1) if param.ndim == 3 else Replicate()
                placements = [on_tp if name == "tp" else Replicate() for name in names]
                data = distribute_tensor(param.detach(), full, placements)
                if param.ndim == 3:
                    data = DTensor.from_local(
                        data.to_local().contiguous(), full, placements, run_check=False
                    )
                waves.params[i] = nn.Parameter(data)

        def shard(model: nn.Module, *, mesh: Any, **kwargs: Any) -> None:
            shard_children(model, place.units, mesh=full, dp_mesh_dims=dims, **kwargs)

        return run_mode(Mode(shard=shard, step=step_on_waves), model, place)

    return run


def step_on_waves(model: nn.Module, batches: Batches) -> torch.Tensor:
    loss = loss_of(model(batches[0]))
    loss.backward()
    return loss


_FOUR = {"uniform": (4,), "mixed": (4,)}
CASES["spmd_mesh"] = Case(spmd(DataParallelMeshDims(shard="dp"), ("dp", "tp")), **_FOUR)
CASES["spmd_mesh_hybrid"] = Case(
    spmd(DataParallelMeshDims(shard="fsdp", replicate="dp"), ("dp", "fsdp")), **_FOUR
)
CASES["spmd_mesh_flattened"] = Case(
    spmd(DataParallelMeshDims(shard=("dp", "fsdp")), ("dp", "fsdp")), **_FOUR
)


@add_case()
def shared_context(place: Place) -> Record:
    """Two roots, one after the other, with one set of streams."""
    model = nn.Sequential(*(stack_of(Waves, place.dtypes) for _ in range(2)))

    def shard(model: nn.Module, **kwargs: Any) -> None:
        for part in model:
            shard_children(part, place.units, **kwargs)
        share_comm_ctx([*model])

    record = run_mode(Mode(shard=shard, step=step_on_waves), model, place)
    contexts = [
        group.comm_ctx
        for unit in units_of(model)
        for group in unit._get_fsdp_state()._fsdp_param_groups
    ]
    return record | {"contexts": len({*map(id, contexts)})}


@add_case()
def not_unsharded_in_backward(place: Place) -> Record:
    model = stack_of(Offsets, place.dtypes)

    def shard(model: nn.Module, **kwargs: Any) -> None:
        shard_children(model, place.units, reshard_after_forward=True, **kwargs)
        each_unit("set_unshard_in_backward", False)(model)

    return run_mode(Mode(shard=shard, step=step_on_waves), model, place)


@add_case(mixed=())
def stream_priorities(place: Place) -> dict[str, Any]:
    """Notes what streams the shared context asks of a device."""
    handle = mock.MagicMock()
    context = FSDPCommContext()
    module = sys.modules[FSDPCommContext.__module__]
    with mock.patch.object(module, "_get_device_handle", return_value=handle):
        handle.Stream = lambda priority=0: SimpleNamespace(priority=priority)
        context.lazy_init(torch.device("cpu"))
    streams = {n: s for n, s in vars(context).items() if n.endswith("_stream")}
    return {name: stream.priority for name, stream in streams.items()}


@add_case()
def post_optim_event(place: Place) -> Record:
    """Notes which streams wait for the event, and that they do so once."""
    waits: list[str] = []

    class Stream(torch.cpu.Stream):
        def __init__(self, name: str):
            self.name = name

        def wait_event(self, event: object) -> None:
            if event == "optimizer":
                waits.append(self.name)

        def wait_stream(self, stream: object) -> None:
            if not isinstance(stream, Stream):
                waits.append(f"{self.name} for all")

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        if batches.step == 0:
            one_backward(model, batches)  # makes the streams
            context = model._get_fsdp_state()._comm_ctx
            context.all_gather_stream = Stream("gather")
            context.all_gather_copy_in_stream = Stream("copy-in")
            model.set_post_optim_event("optimizer")
        waits.append(f"in step {batches.step}:")
        return one_backward(model, batches)

    return tower(step=step)(place) | {"waits": waits}


# Memory and order #


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
    if batches.step > 0:  # the base cannot train what it first gathered for inference
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
def buffers_of_gathers(place: Place) -> Record:
    """Counts the gather buffers alive while each module runs, and after."""
    gather, alive = Gather(), []

    def count(*_: Any) -> None:
        """The fewest seen: the backend's thread lets go of a buffer a bit later."""
        counts = []
        for _ in range(4):
            counts.append(sum(ref() is not None for ref in gather.buffers))
            time.sleep(0.003)
        alive.append(min(counts))

    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            unit.set_custom_all_gather(gather)
        for module in model.modules():
            if module._parameters:
                module.register_forward_hook(count)
        model.register_forward_hook(count)

    def step(model: nn.Module, batches: Batches) -> torch.Tensor:
        loss = one_backward(model, batches)
        count()
        return loss

    return tower(prepare=prepare, step=step)(place) | {"alive": alive}


# Offload #


def offload(pin_memory: bool = False, **kwargs: Any) -> Callable[[Place], Record]:
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    return tower(kwargs={"offload_policy": policy}, **kwargs)


def pinned(**kwargs: Any) -> Callable[[Place], Record]:
    """Plays pinned memory, and notes which copies of gradients may overlap."""
    to, post_backward = torch.Tensor.to, FSDPParamGroup.post_backward
    copies: list[bool] = []
    reducing: list[FSDPParamGroup] = []

    def noting_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if reducing and "non_blocking" in kwargs:
            copies.append(kwargs["non_blocking"])
        return to(tensor, *args, **kwargs)

    def noting_reduction(group: FSDPParamGroup, *args: Any) -> None:
        reducing.append(group)
        post_backward(group, *args)
        reducing.pop()

    def run(place: Place) -> Record:
        copies.clear()
        with (
            mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone),
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
            mock.patch.object(torch.Tensor, "to", noting_to),
            mock.patch.object(FSDPParamGroup, "post_backward", noting_reduction),
        ):
            record = offload(True, **kwargs)(place)
        return record | {"copies": [*copies]}

    return run


CASES["offload"] = Case(offload())
CASES["offload_accumulate"] = Case(offload(step=accumulate))
CASES["offload_gradients_add_up"] = Case(offload(step=gradients_add_up))
CASES["offload_hooks"] = Case(offload(prepare=step_in_backward))
CASES["offload_policy"] = Case(offload(policy=(BF16, FP32)))
CASES["offload_hybrid"] = Case(offload(is_hybrid=True), (4,), (4,))
CASES["offload_pinned"] = Case(pinned())
CASES["offload_pinned_add_up"] = Case(pinned(step=gradients_add_up))
CASES["offload_pinned_hooks"] = Case(pinned(prepare=step_in_backward))


# Extensions #


def extensions(
    kind: type[Extended], rows: int, **kwargs: Any
) -> Callable[[Place], Record]:
    def run(place: Place) -> Record:
        others = place.dtypes[1:]  # what extension tensors have is fp32
        model = extended_stack(kind, rows, others)

        def shard(model: nn.Module, **others: Any) -> None:
            shard_children(model, place.units, **others)

        mode = Mode(**{"shard": shard, "step": step_on_waves} | kwargs)
        before = Extended.gathers
        record = run_mode(mode, model, place)
        return record | {"gathers": Extended.gathers - before}

    return run


_OFFLOAD = {"kwargs": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}

for _kind in (Fp8, HighLow):
    _name = _kind.__name__.lower()
    CASES[_name] = Case(extensions(_kind, 8))
    CASES[f"{_name}_uneven"] = Case(extensions(_kind, 5))
    CASES[f"{_name}_fewer_rows_than_ranks"] = Case(extensions(_kind, 1))
    CASES[f"{_name}_policy"] = Case(extensions(_kind, 5, policy=(BF16, FP32)))
    CASES[f"{_name}_kept"] = Case(
        extensions(_kind, 5, kwargs={"reshard_after_forward": False})
    )
    CASES[f"{_name}_offload"] = Case(extensions(_kind, 8, **_OFFLOAD))


# Errors #


def add_error(run: Callable[[Place], None]) -> Callable[[Place], None]:
    """Adds a case that raises: what is compared is what, and of which type."""

    def raising(place: Place) -> dict[str, Any]:
        try:
            run(place)
        except Exception as error:
            return {"error": (type(error).__name__, str(error))}
        return {"error": None}

    CASES[run.__name__] = Case(raising, uniform=(4,), mixed=(4,))
    return run


def waves(place: Place, shard: bool = True, **kwargs: Any) -> nn.Sequential:
    model = stack_of(Waves, place.dtypes)
    if shard:
        shard_children(model, "block", **{"mesh": place.mesh} | kwargs)
    return model


def run_waves(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def group_of(unit: nn.Module) -> FSDPParamGroup:
    (group,) = unit._get_fsdp_state()._fsdp_param_groups
    return group


@add_error
def error_on_meta_device(place: Place) -> None:
    with torch.device("meta"):
        model = waves(place, shard=False)
    shard_children(model, "block", mesh=place.mesh)
    run_waves(model)


@add_error
def error_offloaded_elsewhere(place: Place) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    model = waves(place, offload_policy=policy)
    run_waves(model)
    group = group_of(model[1])
    elsewhere = SimpleNamespace(device=torch.device("cuda:3"))
    group.fsdp_params[0].sharded_param = elsewhere
    group.lazy_init()


@add_error
def error_input_buffers_of_symmetric_memory(place: Place) -> None:
    model = waves(place)
    with SymmMemStub().patched():
        model[0].set_force_sum_reduction_for_comms(True)
        model[0].set_symm_mem_for_comm()
        model.set_reduce_scatter_max_input_buffers(2)
        run_waves(model)


@add_error
def error_symmetric_memory_with_custom_gather(place: Place) -> None:
    model = waves(place)
    model[0].set_custom_all_gather(Gather())
    with SymmMemStub().patched():
        model[0].set_symm_mem_for_comm()


@add_error
def error_symmetric_memory_with_custom_scatter(place: Place) -> None:
    model = waves(place)
    model[0].set_custom_reduce_scatter(Scatter())
    with SymmMemStub().patched():
        model[0].set_symm_mem_for_comm()


@add_error
def error_memory_from_group_with_custom_gather(place: Place) -> None:
    model = waves(place)
    model[0].set_custom_all_gather(Gather())
    getattr(model[0], MEMORY)(True)


@add_error
def error_memory_from_group_with_custom_scatter(place: Place) -> None:
    model = waves(place)
    model[0].set_custom_reduce_scatter(Scatter())
    getattr(model[0], MEMORY)(False)


@add_error
def error_memory_from_group_with_symmetric_memory(place: Place) -> None:
    model = waves(place)
    with SymmMemStub().patched():
        model[0].set_symm_mem_for_comm()
        getattr(model[0], MEMORY)(True)


@add_error
def error_hook_stream_without_hook(place: Place) -> None:
    model = waves(place)
    model[1].set_all_reduce_hook(None, stream=torch.cpu.Stream())
    run_waves(model)


@add_error
def error_hook_stream_of_hybrid(place: Place) -> None:
    model = waves(place, mesh=place.pairs)
    model[0].set_all_reduce_hook(print, stream=torch.cpu.Stream())


def replicated(place: Place) -> nn.Module:
    return replicate(waves(place, shard=False), mesh=place.mesh)


@add_error
def error_separate_group_of_replicas(place: Place) -> None:
    replicated(place).set_separate_reduce_scatter_group()


@add_error
def error_symmetric_memory_of_replicas(place: Place) -> None:
    with SymmMemStub().patched():
        replicated(place).set_symm_mem_for_comm()


@add_error
def error_memory_from_group_of_replicas(place: Place) -> None:
    getattr(replicated(place), MEMORY)(True)


@add_error
def error_uneven_shards_of_another_dim(place: Place) -> None:
    def place_param(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 else None

    waves(place, shard_placement_fn=place_param)


@add_error
def error_unknown_pass(place: Place) -> None:
    FSDPParamGroup._prefetch_unshard(group_of(waves(place)[0]), "sideways")


@add_error
def error_parameter_not_in_the_modules(place: Place) -> None:
    info = group_of(waves(place)[0]).mesh_info
    foreign, modules = [nn.Parameter(torch.zeros(4))], (nn.Linear(2, 2),)
    policies = MixedPrecisionPolicy(), OffloadPolicy()
    FSDPParamGroup(foreign, modules, info, None, torch.device("cpu"), None, *policies)


@add_error
def error_extension_without_post_all_gather(place: Place) -> None:
    class Half(Extended):
        fsdp_post_all_gather = property()  # there is none

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            raise AssertionError("Should not come here")

    model = waves(place, shard=False)
    model[0][0].params.append(nn.Parameter(Half(torch.ones(8, 2))))
    shard_children(model, "block", mesh=place.mesh)


@add_error
def error_extension_with_another_signature(place: Place) -> None:
    class Odd(HighLow):
        def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:
            raise AssertionError("Should not come here")

    model = extended_stack(Odd, 8, place.dtypes[1:])
    shard_children(model, "block", mesh=place.mesh)
    run_waves(model)


@add_error
def error_extension_that_does_not_pad(place: Place) -> None:
    class Short(HighLow):
        def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
            if self.whole_shard().size() == self.size():  # or it would wait
                raise AssertionError("has no padding")
            return (self._values,), None

    model = extended_stack(Short, 5, place.dtypes[1:])
    shard_children(model, "block", mesh=place.mesh)
    run_waves(model)


@add_error
def error_comm_of_two_meshes(place: Place) -> None:
    model = waves(place, shard=False)
    shard_on_two_meshes(place)(model, mesh=place.mesh)
    model[0].set_custom_all_gather(Gather())


@add_error
def error_reduction_of_two_meshes(place: Place) -> None:
    model = waves(place, shard=False)
    shard_on_two_meshes(place)(model, mesh=place.mesh)
    model[0].set_custom_reduce_scatter(Scatter())


@add_error
def error_hook_of_two_meshes(place: Place) -> None:
    model = waves(place, shard=False)
    shard_on_two_meshes(place)(model, mesh=place.mesh)
    model[0].set_all_reduce_hook(print)


@add_error
def error_one_group_of_two_meshes(place: Place) -> None:
    model = waves(place, shard=False)
    shard_on_two_meshes(place)(model, mesh=place.mesh)
    print(model[0]._get_fsdp_state()._fsdp_param_group)


@add_error
def error_no_root_of_several_modules(place: Place) -> None:
    model = waves(place, shard=False)
    fully_shard([*model], mesh=place.mesh)
    run_waves(model)


@add_error
def error_reset_of_no_root(place: Place) -> None:
    model = waves(place)
    run_waves(model)
    model[0].reset_iter_state()


@add_error
def error_reshard_after_forward_to_two_later(place: Place) -> None:
    waves(place).set_reshard_after_forward(2)


@add_error
def error_reshard_after_forward_to_no_factor(place: Place) -> None:
    waves(place, reshard_after_forward=3)


@add_error
def error_no_such_method(place: Place) -> None:
    register_fsdp_forward_method(waves(place), "predict")


@add_error
def error_parameter_is_not_contiguous(place: Place) -> None:
    model = waves(place, shard=False)
    model[0][0].params[0] = nn.Parameter(torch.zeros(8, 4).t())
    shard_children(model, "block", mesh=place.mesh)


@add_error
def error_parameter_has_no_dims(place: Place) -> None:
    model = waves(place, shard=False)
    model[0][0].params[1] = nn.Parameter(torch.zeros(()))
    shard_children(model, "block", mesh=place.mesh)


@add_error
def error_no_such_dim_to_shard(place: Place) -> None:
    waves(place, shard_placement_fn=lambda param: Shard(3))


@add_error
def error_plain_parameter_on_full_mesh(place: Place) -> None:
    dims = DataParallelMeshDims(shard="shard")
    waves(place, mesh=place.pairs, dp_mesh_dims=dims)


@add_error
def error_root_is_not_first(place: Place) -> None:
    model = waves(place)
    run_waves(model[0])
    run_waves(model)


@add_error
def error_parameter_in_two_units(place: Place) -> None:
    model = waves(place, shard=False)
    model[1][0].params[0] = model[0][0].params[0]
    shard_children(model, "block", mesh=place.mesh)
    run_waves(model)


@add_error
def error_text_input_buffers(place: Place) -> None:
    waves(place).set_reduce_scatter_max_input_buffers("two")


@add_error
def error_bool_input_buffers(place: Place) -> None:
    waves(place).set_reduce_scatter_max_input_buffers(True)


@add_error
def error_zero_input_buffers(place: Place) -> None:
    waves(place).set_reduce_scatter_max_input_buffers(0)


@add_error
def error_negative_input_buffers(place: Place) -> None:
    waves(place).set_reduce_scatter_max_input_buffers(-1)


@add_error
def error_prefetch_of_no_unit(place: Place) -> None:
    waves(place).set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@add_error
def error_shared_context_of_no_unit(place: Place) -> None:
    share_comm_ctx([waves(place), nn.Linear(2, 2)])


# Running #


def cases_to_run(args: argparse.Namespace) -> Iterator[tuple[str, Case, str, int]]:
    """Yields each case's name, the case, how units are cut and the ranks."""
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        for size in case.uniform:
            yield f"uniform {name} {size}", case, "uniform", size
        if args.units == "dtype" and name.startswith("error_"):
            continue  # what the base would say to other units
        sizes = {*case.mixed}
        if args.units == "block" and case.is_plain:
            sizes.add(4)
        for size in sorted(sizes):
            yield f"mixed {name} {size}", case, args.units, size


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    world = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    singles = init_device_mesh("cpu", (4, 1), mesh_dim_names=names)
    results: dict[str, Any] = {}
    turns = itertools.cycle(range(2))
    for name, case, units, size in cases_to_run(args):
        in_turns = size == 2 and not case.makes_groups
        if in_turns and next(turns) != rank // 2:
            continue  # the other half's
        mesh = pairs["shard"] if size == 2 else world
        place = Place(
            units,
            rank=rank % size,
            mesh=mesh,
            pairs=pairs,
            singles=singles,
            device="cpu",
            is_profiled=rank % size == 0 and size == min(case.uniform),
        )
        try:
            results[name] = case.run(place)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--units", required=True, choices=("dtype", "block"))
    parser.add_argument("--only", help="only cases whose name has this in it")
    args = parser.parse_args()
    mixed_dtype_parity.STEPS = STEPS
    run_ranks(run_all, args, 4)


if __name__ == "__main__":
    sys.exit(main())
