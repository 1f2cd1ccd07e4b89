"""Cases that raise: the release and the branch the same, in uniform and mixed units."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fsdp_common.utils import shard_blocks
from fsdp_parity.cases import Case, CASES, groups_of, Place
from fsdp_parity.comms import Gather, MEMORY, Scatter, SymmMemStub
from fsdp_parity.modes import Record
from fsdp_parity.waves import Extended, extended_stack, HighLow, stack_of, Waves

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard


def refused(pattern: str) -> Callable[[Callable[[Place], Any]], None]:
    """
    Adds a case that raises.

    Args:
        pattern: What the error must say, such as the parameter's name.
    """

    def add(run: Callable[[Place], Any]) -> None:
        def raising(place: Place) -> Record:
            try:
                run(place)
            except Exception as error:
                return {"error": (type(error).__name__, str(error))}
            return {"error": (None, "")}

        CASES[f"error_{run.__name__}"] = Case(raising, ranks=4, refusal=pattern)

    return add


def waves(place: Place, **kwargs: Any) -> nn.Module:
    return shard_blocks(stack_of(Waves, place.dtypes), **{"mesh": place.mesh} | kwargs)


def run_waves(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@refused(r"meta device.*\['0\.0\.params\.0', '0\.0\.params\.1'")
def on_meta_device(place: Place) -> None:
    with torch.device("meta"):
        model = stack_of(Waves, place.dtypes)
    run_waves(shard_blocks(model, mesh=place.mesh))


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


@refused(r"got 2 for module '0' using SymmMemReduceS")
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
IS_CUSTOM, OF_GROUP = r"set_symm_mem\(\).*", r"from_process_group\(\).*"
NO_SHARDS = "to be FSDPMeshInfo, got .*DDPMeshInfo"

for _name, _pattern, *_calls in (
    (
        "symm_mem_custom_gather",
        IS_CUSTOM + r"all gather.*\bGather",
        GATHER,
        (SYMM_MEM,),
    ),
    ("symm_mem_custom_scatter", IS_CUSTOM + "reduce sc.*Scat", SCATTER, (SYMM_MEM,)),
    ("memory_custom_gather", OF_GROUP + r"\bGather\b", GATHER, (MEMORY, True)),
    ("memory_custom_scatter", OF_GROUP + r"\bScatter\b", SCATTER, (MEMORY, False)),
    ("memory_symm_mem", OF_GROUP + "SymmMemAllGather", (SYMM_MEM,), (MEMORY, True)),
    ("separate_group_of_replicas", NO_SHARDS, (SEPARATE,)),
    ("symm_mem_of_replicas", NO_SHARDS, (SYMM_MEM,)),
    ("memory_of_replicas", NO_SHARDS, (MEMORY, True)),
):
    refuse_calls(_name, _pattern, *_calls)


@refused(r"dim 1: torch\.Size\(\[8, 3\]\).*size: 4")
def uneven_shards_of_another_dim(place: Place) -> None:
    def place_param(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 else None

    waves(place, shard_placement_fn=place_param)


@refused("Unknown pass type: sideways")
def unknown_pass(place: Place) -> None:
    (group,) = groups_of(waves(place)[0])
    FSDPParamGroup._prefetch_unshard(group, "sideways")


@refused(r"not in the module tree of \(Linear")
def parameter_not_in_the_modules(place: Place) -> None:
    (group,) = groups_of(waves(place)[0])
    foreign, modules = [nn.Parameter(torch.zeros(4))], (nn.Linear(2, 2),)
    policies = MixedPrecisionPolicy(), OffloadPolicy()
    device = torch.device("cpu")
    FSDPParamGroup(foreign, modules, group.mesh_info, None, device, None, *policies)


@refused("fsdp_post_all_gather should be defined")
def extension_without_post_all_gather(place: Place) -> None:
    class Half(Extended):
        fsdp_post_all_gather = property()  # there is none

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            raise AssertionError("Should not come here")

    model = stack_of(Waves, place.dtypes)
    model[0][0].params.append(nn.Parameter(Half(torch.ones(8, 2))))
    shard_blocks(model, mesh=place.mesh)


@refused("Invalid fsdp_pre_all_gather.*size: 'Any'")
def extension_with_another_signature(place: Place) -> None:
    class Odd(HighLow):
        def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:
            raise AssertionError("Should not come here")

    model = extended_stack(Odd, 8, place.dtypes[1:])
    run_waves(shard_blocks(model, mesh=place.mesh))


@refused(r"padded sharded size torch\.Size\(\[2, 3\]\)|has no padding")
def extension_that_does_not_pad(place: Place) -> None:
    class Short(HighLow):
        def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
            if self.whole_shard().size() == self.size():  # or it would wait
                raise AssertionError("has no padding")
            return (self._values,), None

    model = extended_stack(Short, 5, place.dtypes[1:])
    run_waves(shard_blocks(model, mesh=place.mesh))


# Of the release's own files, which must come to it #


@refused("factor of 4, not 3")
def reshard_after_forward_to_no_factor(place: Place) -> None:
    waves(place, reshard_after_forward=3)


@refused(r"non-contiguous.*torch\.Size\(\[4, 8\]\)")
def parameter_is_not_contiguous(place: Place) -> None:
    model = stack_of(Waves, place.dtypes)
    model[0][0].params[0] = nn.Parameter(torch.zeros(8, 4).t())
    shard_blocks(model, mesh=place.mesh)


@refused("scalar parameters. Change 1 to a 1D")
def parameter_has_no_dims(place: Place) -> None:
    model = stack_of(Waves, place.dtypes)
    model[0][0].params[1] = nn.Parameter(torch.zeros(()))
    shard_blocks(model, mesh=place.mesh)


@refused("Parameter '1.0.params.0' is shared")
def parameter_in_two_units(place: Place) -> None:
    model = stack_of(Waves, place.dtypes)
    model[1][0].params[0] = model[0][0].params[0]
    run_waves(shard_blocks(model, mesh=place.mesh))


@refused("already been lazily initialized for 0")
def root_is_not_first(place: Place) -> None:
    model = waves(place)
    run_waves(model[0])
    run_waves(model)
