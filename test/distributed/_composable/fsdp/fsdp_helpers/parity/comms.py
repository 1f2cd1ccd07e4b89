"""Cases of communication: who allocates, who sends, over which meshes, and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from fsdp_helpers.common import doubles
from fsdp_helpers.common.parity_layers import FP16, groups_of, Record, units_of
from fsdp_helpers.common.scenarios import Setup
from fsdp_helpers.common.utils import shard_blocks
from fsdp_helpers.parity import cases
from fsdp_helpers.parity.cases import add_case, add_mode, train_children, train_tower
from fsdp_helpers.parity.models import Offsets, stack_of, Waves
from fsdp_helpers.parity.modes import each_unit, Mode, UNIFORM

import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard


# Custom collectives: allocation and transport #


def set_comms(gather: Callable[[], Any], scatter: Callable[[], Any]) -> Any:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            unit.set_custom_all_gather(gather())
            unit.set_custom_reduce_scatter(scatter())

    return prepare


MEMORY = "set_allocate_memory_from_process_group_for_comm"


def take_back(model: nn.Module) -> None:
    """Sets what is not the default, and the default again."""
    each_unit(MEMORY, True)(model)
    each_unit(MEMORY, False)(model)
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group(False)


def take_sine_in_hook(model: nn.Module, **kwargs: Any) -> None:
    for unit in units_of(model):
        unit.set_all_reduce_hook(lambda grad: grad.sin_(), **kwargs)


_HYBRID: dict[str, Any] = {"is_hybrid": True, "ranks": 4}
for _name, _prepare in {
    "kept_buffers": set_comms(doubles.KeptGather, cache(doubles.KeptScatter)),
    "kept_results": set_comms(
        doubles.Gather, partial(doubles.KeptScatter, keeps_results=True)
    ),
    "async_unshard_op": lambda model: model._set_unshard_async_op(True),
    "memory_from_group": each_unit(MEMORY, True),
    "all_reduce_hook_with_stream": partial(
        take_sine_in_hook, stream=torch.cpu.Stream()
    ),
}.items():
    add_mode(_name, Mode(prepare=_prepare))
# Only with more than two ranks most segments are neither the first nor the last
_own = set_comms(doubles.Gather, doubles.Scatter)
add_mode("custom_comms", Mode(UNIFORM, dtype=FP16, prepare=_own, ranks=4))
add_mode("taken_back", Mode(prepare=take_back, **_HYBRID))


@add_case(ranks=4)
def hsdp_separate_group(setup: Setup) -> Record:
    """With a hook as well, and buffers that are kept."""

    def prepare(model: nn.Module) -> None:
        model.set_separate_reduce_scatter_group()
        model.set_separate_reduce_scatter_group()  # makes no other one
        set_comms(doubles.KeptGather, doubles.KeptScatter)(model)
        take_sine_in_hook(model)

    doubles.Scatter.groups.clear()
    record = train_tower(Mode(prepare=prepare, **_HYBRID), setup)
    return record | {"groups": [*doubles.Scatter.groups]}


@add_case()
def single_rank(setup: Setup) -> Record:
    return train_tower(Mode(), setup, setup.singles["shard"])


@add_case(ranks=4)
def hsdp_kept_buffer(setup: Setup) -> Record:
    """With one shard each: nothing is sent before the all-reduce."""
    mode = Mode(prepare=each_unit("set_custom_reduce_scatter", doubles.KeptScatter()))
    return train_tower(mode, setup, setup.singles)


@add_case()
def symmetric_memory(setup: Setup) -> Record:
    """Reduces from it where sums are forced: in the blocks."""

    def prepare(model: nn.Module) -> None:
        for unit in units_of(model.blocks):
            unit.set_force_sum_reduction_for_comms(True)
        each_unit("set_symm_mem_for_comm")(model)

    with doubles.SymmMemStub().patched() as stub:
        record = train_tower(Mode(prepare=prepare), setup)
    seen = {"symmetric memory": (stub.registered, stub.pools)}
    return record | seen | {"backends": stub.backends}


# Meshes and contexts #


@add_case(ranks=4)
def three_meshes(setup: Setup) -> Record:
    """Which of a module's groups prefetches does not show with two of them."""
    meshes = setup.mesh, setup.pairs["shard"], setup.singles["shard"]
    infos = [_fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in meshes]

    def place_param(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[param.ndim % 3])

    # And how far it prefetches does not show with two modules
    stacks = stack_of(Waves, setup.dtypes), stack_of(Waves, setup.dtypes)
    model = nn.Sequential(*itertools.chain(*stacks))
    return train_children(model, setup, shard_placement_fn=place_param)


@cache
def dp_tp_mesh() -> DeviceMesh:
    """Returns the one mesh of these names: FSDP wants the object that DTensors have."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@add_case(ranks=4)
def tensor_parallel(setup: Setup) -> Record:
    """Trains DTensors on a mesh of all ranks, of which some are sharded already."""
    mesh = dp_tp_mesh()
    model = stack_of(Waves, setup.dtypes)
    for waves in (module for module in model.modules() if type(module) is Waves):
        for i, param in enumerate(waves.params):
            on_tp = Shard(param.ndim - 1) if param.ndim == 3 else Replicate()
            placements = [Replicate(), on_tp]
            local = distribute_tensor(param.detach(), mesh, placements).to_local()
            data = DTensor.from_local(local.contiguous(), mesh, placements)
            waves.params[i] = nn.Parameter(data)
    dims = fsdp.DataParallelMeshDims(shard="dp")
    return train_children(model, setup, mesh=mesh, dp_mesh_dims=dims)


@add_case()
def shared_context(setup: Setup) -> Record:
    """Two roots, one after the other, with one set of streams."""
    model = nn.Sequential(*(stack_of(Waves, setup.dtypes) for _ in range(2)))

    def shard(model: nn.Module, **kwargs: Any) -> None:
        for part in model:
            cases.cut_children(part, setup, **kwargs)
        fsdp.share_comm_ctx([*model])

    record = cases.run_mode(Mode(shard=shard), model, setup)
    return record | {"contexts": len({id(g.comm_ctx) for g in groups_of(model)})}


@add_case()
def not_unsharded_in_backward(setup: Setup) -> Record:
    model = stack_of(Offsets, setup.dtypes)
    prepare = each_unit("set_unshard_in_backward", False)
    return train_children(model, setup, prepare, reshard_after_forward=True)


# Refused by the release and the branch alike #


def refused(pattern: str) -> Callable[[Callable[[Setup], None]], None]:
    """Adds a case that raises, with what the error must say."""

    def add(run: Callable[[Setup], None]) -> None:
        cases.REFUSALS[name := f"error_{run.__name__}"] = pattern
        add_case(name, ranks=4)(run)

    return add


def waves(setup: Setup, **kwargs: Any) -> nn.Module:
    return shard_blocks(stack_of(Waves, setup.dtypes), **{"mesh": setup.mesh} | kwargs)


def run_waves(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@refused(r"on CPU.*'1\.0\.params\.0', device\(type='cuda', index=3")
def offloaded_elsewhere(setup: Setup) -> None:
    model = waves(setup, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    run_waves(model)
    (group,) = groups_of(model[1])
    dtypes = {"dtype": torch.float32, "grad_dtype": torch.float32}
    elsewhere = SimpleNamespace(
        device=torch.device("cuda:3"), requires_grad=True, **dtypes
    )
    group.fsdp_params[0].sharded_param = elsewhere
    group.lazy_init()


@refused("max_input_buffers of unit '0' got 2: pass 1, as symmetric memory")
def input_buffers_of_symmetric_memory(setup: Setup) -> None:
    model = waves(setup)
    with doubles.SymmMemStub().patched():
        model[0].set_force_sum_reduction_for_comms(True)
        model[0].set_symm_mem_for_comm()
        model.set_reduce_scatter_max_input_buffers(2)
        run_waves(model)


@refused(r"hook stream.*hook itself is missing.*'1'")
def hook_stream_without_hook(setup: Setup) -> None:
    model = waves(setup)
    model[1].set_all_reduce_hook(None, stream=torch.cpu.Stream())
    run_waves(model)


def refuse_calls(name: str, pattern: str, *calls: tuple) -> None:
    """Adds a case of calls of one unit's methods, of which the last raises."""

    def run(setup: Setup) -> None:
        if name.endswith("of_replicas"):
            unit = replicate(stack_of(Waves, setup.dtypes), mesh=setup.mesh)
        else:
            unit = waves(setup)[0]
        with doubles.SymmMemStub().patched():
            for method, *args in calls:
                getattr(unit, method)(*args)

    run.__name__ = name
    refused(pattern)(run)


SYMM_MEM, SEPARATE = "set_symm_mem_for_comm", "set_separate_reduce_scatter_group"
GATHER = ("set_custom_all_gather", doubles.Gather())
SCATTER = ("set_custom_reduce_scatter", doubles.Scatter())
IS_CUSTOM, OF_GROUP = "set_symm_mem cannot .*", "from_process_group cannot .*"
NO_SHARDS = "to be FSDPMeshInfo, got .*DDPMeshInfo"

for _name, _pattern, *_calls in (
    ("symm_mem_custom_gather", IS_CUSTOM + r"\bGather\b", GATHER, (SYMM_MEM,)),
    ("symm_mem_custom_scatter", IS_CUSTOM + r"\bScatter\b", SCATTER, (SYMM_MEM,)),
    ("memory_custom_gather", OF_GROUP + r"\bGather\b", GATHER, (MEMORY, True)),
    ("memory_custom_scatter", OF_GROUP + r"\bScatter\b", SCATTER, (MEMORY, False)),
    ("memory_symm_mem", OF_GROUP + "SymmMemAllGather", (SYMM_MEM,), (MEMORY, True)),
    ("separate_group_of_replicas", NO_SHARDS, (SEPARATE,)),
    ("symm_mem_of_replicas", NO_SHARDS, (SYMM_MEM,)),
    ("memory_of_replicas", NO_SHARDS, (MEMORY, True)),
):
    refuse_calls(_name, _pattern, *_calls)


@refused("Unknown pass type: sideways")
def unknown_pass(setup: Setup) -> None:
    (group,) = groups_of(waves(setup)[0])
    FSDPParamGroup._prefetch_unshard(group, "sideways")
