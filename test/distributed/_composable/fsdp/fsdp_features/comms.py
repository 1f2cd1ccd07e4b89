"""Cases of communication: who allocates, who sends, and over which meshes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp_features.cases import (
    add_case,
    add_tower,
    Case,
    CASES,
    each_unit,
    GROUPS_NOTED,
    Place,
    run_mode,
    shard_children,
    step_on_waves,
    tower,
)
from fsdp_features.models import Offsets, stack_of, Waves
from fsdp_mixed_dtype.models import Tower
from fsdp_mixed_dtype.parity import (
    Batches,
    Mode,
    one_backward,
    Record,
    shard_blocks,
    shard_dtypes,
    units_of,
)

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


# Who allocates, and who sends #


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

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        GROUPS_NOTED.add((group.group_desc, group.group_name))
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
        # Whatever still has it sees that it is another one's now
        return self.kept.fill_(77)[:nbytes].view(dtype).view(tuple(size))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_first = True
        return super().__call__(*args, **kwargs)


class KeptGather(KeptBuffers, Gather):
    """One for each unit: a gather may be started before the last one is used."""


class KeptScatter(KeptBuffers, Scatter):
    """May serve all units: an input is sent before the next one is filled."""


class KeptResults(Scatter):
    """
    One for each unit: its results are kept as well, in memory of their own. Until the
    next reduction of the unit nobody else gets them.
    """

    def __init__(self) -> None:
        self.inputs, self.results = KeptScatter(), KeptScatter()

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        kept = self.inputs if self.inputs.is_first else self.results
        return kept.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.results.is_first = True
        return self.inputs(*args, **kwargs)


def set_comms(gather: Callable[[], Any], scatter: Callable[[], Any]) -> Any:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            unit.set_custom_all_gather(gather())
            unit.set_custom_reduce_scatter(scatter())

    return prepare


def share_kept_scatter(model: nn.Module) -> None:
    """One buffer for the inputs of all units."""
    scatter = KeptScatter()
    for unit in units_of(model):
        unit.set_custom_reduce_scatter(scatter)


class KeptByTurns(KeptScatter):
    """Takes each second buffer for a result, as nothing is called between them."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        is_result = not self.is_first
        buffer = super().allocate(size, dtype=dtype, device=device)
        self.is_first = is_result
        return buffer


def share_kept_buffers_by_turns(model: nn.Module) -> None:
    scatter = KeptByTurns()
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
add_tower("kept_results", prepare=set_comms(Gather, KeptResults))
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


@add_case(uniform=(4,), mixed=(4,))
def kept_buffer_of_replicas(place: Place) -> Record:
    """With one shard each: nothing is sent before the all-reduce."""
    cut = shard_dtypes if place.units == "dtype" else shard_blocks

    def shard(model: nn.Module, **kwargs: Any) -> None:
        cut(model, **kwargs | {"mesh": place.singles})

    return tower(shard=shard, prepare=share_kept_buffers_by_turns)(place)


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
            # Which of them it is asked of depends on the release
            mock.patch.object(torch.cuda, "use_mem_pool", use),
            mock.patch.object(torch.cpu, "use_mem_pool", use, create=True),
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


# Meshes and contexts #


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
