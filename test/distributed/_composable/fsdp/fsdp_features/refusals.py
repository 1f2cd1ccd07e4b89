"""Cases that raise: what is compared is what, and of which type."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fsdp_features.cases import Case, CASES, Place, shard_children
from fsdp_features.comms import (
    Gather,
    MEMORY,
    Scatter,
    shard_on_two_meshes,
    SymmMemStub,
)
from fsdp_features.models import Extended, extended_stack, HighLow, stack_of, Waves

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    fully_shard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard


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
    dtypes = {"dtype": torch.float32, "grad_dtype": torch.float32}
    elsewhere = SimpleNamespace(
        device=torch.device("cuda:3"), requires_grad=True, **dtypes
    )
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
