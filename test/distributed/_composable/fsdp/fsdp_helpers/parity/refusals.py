"""Cases that raise: the release and the branch the same, in uniform and mixed units."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fsdp_helpers.common.parity_layers import groups_of
from fsdp_helpers.common.scenarios import Place
from fsdp_helpers.common.utils import shard_blocks
from fsdp_helpers.parity.cases import Case, CASES
from fsdp_helpers.parity.comms import Gather, MEMORY, Scatter, SymmMemStub
from fsdp_helpers.parity.models import stack_of, Waves

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def refused(pattern: str) -> Callable[[Callable[[Place], None]], None]:
    """Adds a case that raises, with what the error must say."""

    def add(run: Callable[[Place], None]) -> None:
        CASES[f"error_{run.__name__}"] = Case(run, ranks=4, refusal=pattern)

    return add


def waves(place: Place, **kwargs: Any) -> nn.Module:
    return shard_blocks(stack_of(Waves, place.dtypes), **{"mesh": place.mesh} | kwargs)


def run_waves(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@refused(r"on CPU.*'1\.0\.params\.0', device\(type='cuda', index=3")
def offloaded_elsewhere(place: Place) -> None:
    model = waves(place, offload_policy=CPUOffloadPolicy(pin_memory=False))
    run_waves(model)
    (group,) = groups_of(model[1])
    dtypes = {"dtype": torch.float32, "grad_dtype": torch.float32}
    elsewhere = SimpleNamespace(
        device=torch.device("cuda:3"), requires_grad=True, **dtypes
    )
    group.fsdp_params[0].sharded_param = elsewhere
    group.lazy_init()


@refused(r"max_input_buffers\(2\) of unit '0' would hold .* symmetric memory")
def input_buffers_of_symmetric_memory(place: Place) -> None:
    model = waves(place)
    with SymmMemStub().patched():
        model[0].set_force_sum_reduction_for_comms(True)
        model[0].set_symm_mem_for_comm()
        model.set_reduce_scatter_max_input_buffers(2)
        run_waves(model)


@refused(r"hook stream.*hook itself is missing.*'1'")
def hook_stream_without_hook(place: Place) -> None:
    model = waves(place)
    model[1].set_all_reduce_hook(None, stream=torch.cpu.Stream())
    run_waves(model)


def refuse_calls(name: str, pattern: str, *calls: tuple) -> None:
    """Adds a case of calls of one unit's methods, of which the last raises."""

    def run(place: Place) -> None:
        if name.endswith("of_replicas"):
            unit = replicate(stack_of(Waves, place.dtypes), mesh=place.mesh)
        else:
            unit = waves(place)[0]
        with SymmMemStub().patched():
            for method, *args in calls:
                getattr(unit, method)(*args)

    run.__name__ = name
    refused(pattern)(run)


SYMM_MEM, SEPARATE = "set_symm_mem_for_comm", "set_separate_reduce_scatter_group"
GATHER = ("set_custom_all_gather", Gather())
SCATTER = ("set_custom_reduce_scatter", Scatter())
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
def unknown_pass(place: Place) -> None:
    (group,) = groups_of(waves(place)[0])
    FSDPParamGroup._prefetch_unshard(group, "sideways")
