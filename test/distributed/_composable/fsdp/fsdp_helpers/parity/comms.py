"""Cases of communication: who allocates, who sends, and over which meshes."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp_helpers.common.parity_layers import (
    FP16,
    groups_of,
    loss_of,
    Record,
    units_of,
)
from fsdp_helpers.common.scenarios import Place
from fsdp_helpers.parity.cases import (
    add_case,
    add_mode,
    Case,
    CASES,
    cut_children,
    run_mode,
    train_children,
    train_tower,
)
from fsdp_helpers.parity.models import Offsets, stack_of, Waves
from fsdp_helpers.parity.modes import (
    Batches,
    each_unit,
    keep_inputs,
    Mode,
    one_backward,
    prefetch_explicitly,
    UNIFORM,
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
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
)
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


# Who allocates, and who sends #


class Gather(AllGather):
    """Uses nothing of the default one."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if input_tensor.data_ptr() - output_tensor.data_ptr() != (
            group.rank() * input_tensor.nbytes
        ):
            raise AssertionError("A rank's input is no part of the output")
        if torch.is_grad_enabled():
            raise AssertionError("A gather is no part of the graph")
        return dist.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class AsyncGather(Gather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if not async_op:
            raise AssertionError("Expected a gather that is waited for later")
        return super().__call__(output_tensor, input_tensor, group, async_op)


class Scatter(ReduceScatter):
    """Notes the groups that it sends over."""

    groups: set[str] = set()  # by description, of all in this process

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        Scatter.groups.add(group.group_desc)
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


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


class KeptByTurns(KeptScatter):
    """Takes each second buffer for a result, as nothing is called between them."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        is_result = not self.is_first
        buffer = super().allocate(size, dtype=dtype, device=device)
        self.is_first = is_result
        return buffer


def set_comms(gather: Callable[[], Any], scatter: Callable[[], Any]) -> Any:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            unit.set_custom_all_gather(gather())
            unit.set_custom_reduce_scatter(scatter())

    return prepare


def share_scatter(kind: type[Scatter]) -> Callable[[nn.Module], None]:
    """One buffer for the inputs of all units."""
    return lambda model: each_unit("set_custom_reduce_scatter", kind())(model)


def gather_asynchronously(model: nn.Module) -> None:
    model._set_unshard_async_op(True)
    set_comms(AsyncGather, Scatter)(model)


MEMORY = "set_allocate_memory_from_process_group_for_comm"


def take_back(model: nn.Module) -> None:
    """Sets what is not the default, and the default again."""
    each_unit(MEMORY, True)(model)
    each_unit(MEMORY, False)(model)
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group(False)


def take_sine_in_hook(has_stream: bool = False) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            kwargs = {"stream": torch.cpu.Stream()} if has_stream else {}
            unit.set_all_reduce_hook(lambda grad: grad.sin_(), **kwargs)

    return prepare


_HYBRID: dict[str, Any] = {"is_hybrid": True, "ranks": 4}
for _name, _prepare in {
    "kept_buffers": set_comms(KeptGather, KeptScatter),
    "one_kept_buffer_for_all_units": share_scatter(KeptScatter),
    "kept_results": set_comms(Gather, KeptResults),
    "async_unshard_op": gather_asynchronously,
    "memory_from_group": each_unit(MEMORY, True),
    "all_reduce_hook_with_stream": take_sine_in_hook(has_stream=True),
}.items():
    add_mode(_name, Mode(prepare=_prepare))
# Only with more than two ranks most segments are neither the first nor the last
add_mode(
    "custom_comms",
    Mode(UNIFORM, dtype=FP16, prepare=set_comms(Gather, Scatter), ranks=4),
)
add_mode("taken_back", Mode(prepare=take_back), makes_groups=True)


@add_case(ranks=4)
def hybrid_separate_group(place: Place) -> Record:
    """With a hook as well, and buffers that are kept."""

    def prepare(model: nn.Module) -> None:
        model.set_separate_reduce_scatter_group()
        model.set_separate_reduce_scatter_group()  # makes no other one
        set_comms(KeptGather, KeptScatter)(model)
        take_sine_in_hook()(model)

    Scatter.groups.clear()
    record = train_tower(Mode(prepare=prepare, **_HYBRID), place)
    return record | {"groups": [*Scatter.groups]}


@add_case()
def single_rank(place: Place) -> Record:
    return train_tower(Mode(), place, place.singles["shard"])


@add_case(ranks=4)
def kept_buffer_of_replicas(place: Place) -> Record:
    """With one shard each: nothing is sent before the all-reduce."""
    mode = Mode(prepare=share_scatter(KeptByTurns))
    return train_tower(mode, place, place.singles)


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


def ask_for_symmetric_memory(place: Place, *, sums: bool) -> Record:
    def prepare(model: nn.Module) -> None:
        if sums:
            each_unit("set_force_sum_reduction_for_comms", True)(model)
        each_unit("set_symm_mem_for_comm")(model)

    with SymmMemStub().patched() as stub:
        record = train_tower(Mode(prepare=prepare), place)
    seen = {"symmetric memory": (stub.registered, stub.pools)}
    return record | seen | {"backends": stub.backends}


CASES["symmetric_memory"] = Case(partial(ask_for_symmetric_memory, sums=False))
CASES["symmetric_memory_sums"] = Case(partial(ask_for_symmetric_memory, sums=True))


# Meshes and contexts #


def train_on_two_meshes(place: Place, prepare: Any = None) -> Record:
    """Gives vectors and single elements to a smaller group of ranks."""
    meshes = (place.mesh, place.singles["shard"])
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in meshes]

    def place_param(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[param.ndim == 1])

    kwargs = {"shard_placement_fn": place_param}
    return train_tower(Mode(kwargs=kwargs, prepare=prepare), place)


def prefetch_and_keep_inputs(model: nn.Module) -> None:
    prefetch_explicitly(model)
    keep_inputs(2)(model)


CASES["two_meshes"] = Case(train_on_two_meshes)
CASES["two_meshes_prefetched"] = Case(
    partial(train_on_two_meshes, prepare=prefetch_and_keep_inputs)
)


GROUPS = 3  # of a module, each with a mesh of its own


def train_on_three_meshes(place: Place, **settings: Any) -> Record:
    """Which of a module's groups prefetches does not show with two of them."""
    meshes = place.mesh, place.pairs["shard"], place.singles["shard"]
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in meshes]

    def place_param(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[param.ndim % GROUPS])

    # And how far it prefetches does not show with two modules
    stacks = stack_of(Waves, place.dtypes), stack_of(Waves, place.dtypes)
    model = nn.Sequential(*itertools.chain(*stacks))
    return train_children(model, place, shard_placement_fn=place_param, **settings)


CASES["three_meshes"] = Case(train_on_three_meshes, ranks=4)


# In which order the post-backwards of a module's groups come: all of them once the last
# has come, or one of them at the end of backward
ORDERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "first_to_last": ((0, 1, 2), None),
    "first_one_last": ((1, 2, 0), None),
    "first_one_late": ((), 0),
    "last_one_late": ((), GROUPS - 1),
}


class PostBackwards:
    """Brings them into an order, and notes the groups' indices."""

    def __init__(self, permutation: tuple[int, ...], late: int | None):
        self.permutation, self.late = permutation, late
        self.ran: list[int] = []
        self._waiting: dict[int, list[tuple[FSDPParamGroup, Any]]] = {}
        self._held_back: set[int] = set()

    def one_backward(self, model: nn.Module, batches: Batches) -> torch.Tensor:
        original = FSDPParamGroup.post_backward
        self._held_back.clear()

        def post_backward(group: FSDPParamGroup, *args: Any) -> None:
            for each in self._due(group):
                self.ran.append(each._param_group_index)
                original(each)

        with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
            # So that autograd comes to every unit, and not only the root's callback
            loss = loss_of(model(batches[0].requires_grad_()))
            loss.backward()
        return loss

    def _due(self, group: FSDPParamGroup) -> list[FSDPParamGroup]:
        """Returns the groups whose turn it is when this one's hook comes."""
        if not self.permutation:
            # Held back once: then the root's final callback runs its post-backward
            is_early = group._param_group_index == self.late
            if is_early and id(group) not in self._held_back:
                self._held_back.add(id(group))
                return []
            return [group]
        waiting = self._waiting.setdefault(id(group.modules[0]), [])
        waiting.append((group, group._training_state))
        if len(waiting) < GROUPS:
            # As if it had run, so that the root's callback does not come to it
            group._training_state = TrainingState.POST_BACKWARD
            return []
        for each, state in waiting:
            each._training_state = state
        by_index = {each._param_group_index: each for each, _ in waiting}
        waiting.clear()
        return [by_index[index] for index in self.permutation]


def reorder_post_backwards(place: Place, order: str) -> Record:
    calls = PostBackwards(*ORDERS[order])
    record = train_on_three_meshes(place, step=calls.one_backward)
    return record | {"ran": calls.ran}


for _order in ORDERS:
    CASES[f"three_meshes_{_order}"] = Case(
        partial(reorder_post_backwards, order=_order), ranks=4, is_on_release=False
    )


@cache
def dp_tp_mesh() -> DeviceMesh:
    """Returns the one mesh of these names: FSDP wants the object that DTensors have."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@add_case(ranks=4)
def tensor_parallel(place: Place) -> Record:
    """Trains DTensors on a mesh of all ranks, of which some are sharded already."""
    mesh = dp_tp_mesh()
    model = stack_of(Waves, place.dtypes)
    for waves in (module for module in model.modules() if type(module) is Waves):
        for i, param in enumerate(waves.params):
            on_tp = Shard(param.ndim - 1) if param.ndim == 3 else Replicate()
            placements = [Replicate(), on_tp]
            local = distribute_tensor(param.detach(), mesh, placements).to_local()
            data = DTensor.from_local(local.contiguous(), mesh, placements)
            waves.params[i] = nn.Parameter(data)
    dims = DataParallelMeshDims(shard="dp")
    return train_children(model, place, mesh=mesh, dp_mesh_dims=dims)


@add_case()
def shared_context(place: Place) -> Record:
    """Two roots, one after the other, with one set of streams."""
    model = nn.Sequential(*(stack_of(Waves, place.dtypes) for _ in range(2)))

    def shard(model: nn.Module, **kwargs: Any) -> None:
        for part in model:
            cut_children(part, place, **kwargs)
        share_comm_ctx([*model])

    record = run_mode(Mode(shard=shard), model, place)
    return record | {"contexts": len({id(g.comm_ctx) for g in groups_of(model)})}


@add_case()
def not_unsharded_in_backward(place: Place) -> Record:
    model = stack_of(Offsets, place.dtypes)
    prepare = each_unit("set_unshard_in_backward", False)
    return train_children(model, place, prepare, reshard_after_forward=True)


def stream_priorities() -> dict[str, int]:
    """Returns what streams the shared context asks of a device."""
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

    record = train_tower(Mode(step=step), place)
    return record | {"waits": waits, "priorities": stream_priorities()}
