"""What 2.14 and 2.15 added to FSDP2: scenarios for the releases that have it."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common.doubles import with_a_row_more
from fsdp_helpers.common.parity_layers import BF16, FP32, gradients, groups_of, Record
from fsdp_helpers.common.release_rules import HAS_SPMD_TYPES, IS_2_15
from fsdp_helpers.common.scenarios import one_backward, Setup, train
from fsdp_helpers.parity.models import extended_stack, HighLow
from fsdp_helpers.plugins import of_both_kinds, scenario

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import Shard


if HAS_SPMD_TYPES:
    import spmd_types
    from spmd_types.checker import typecheck
else:
    spmd_types = typecheck = None


Add = Callable[[Callable[[Setup], Record]], Any]


def where(is_there: bool, add: Add) -> Add:
    """Returns a decorator that adds a scenario if the release has what it runs."""
    return add if is_there else lambda run: run


since_2_15 = where(IS_2_15, of_both_kinds)


# Storage that stays #


@since_2_15
def storage_that_is_kept(setup: Setup) -> Record:
    plain = train(setup.sharded("bf16_reduce_fp32"), setup, steps=range(3))
    model, record = setup.sharded("bf16_reduce_fp32"), {}
    nbytes: list[set[int]] = []
    places: list[list[int]] = []
    for step, is_kept in enumerate((True, True, False)):
        model.set_keep_unsharded_storage(is_kept)
        record |= train(model, setup, steps=range(step, step + 1))
        for unit in layers.units_of(model):
            unit.reshard()
        params = [param for group in groups_of(model) for param in group.fsdp_params]
        outputs = [output for param in params for output in param.all_gather_outputs]
        nbytes.append({output.untyped_storage().nbytes() for output in outputs})
        places.append([output.data_ptr() for output in outputs])
    facts = [0 not in nbytes[0], places[0] == places[1], nbytes[2] == {0}]
    return {"plain": plain, "kept": record, "allocated, in place, freed": facts}


# Finalization by hand #


def error_of(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def two_backwards(
    model: layers.Stack, setup: Setup, step: int, *, how: str, seen: list[Any]
) -> torch.Tensor:
    """The first reduces nothing, nor does the second if it is finalized by hand."""
    by_hand = how != "plain"
    model.set_requires_gradient_sync(False)
    one_backward(model, setup, 2 * step)
    model.set_requires_gradient_sync(not by_hand)
    loss = one_backward(model, setup, 2 * step + 1)
    if by_hand:
        seen.append(all(param.grad is None for param in model.parameters()))
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=how == "in background")
        if handle is not None:
            seen.append(error_of(lambda: model(layers.batch_of(0, setup.rank))))
            seen.append(error_of(model.finalize_backward))
            handle.wait()
    return loss


@since_2_15
def finalized_by_hand(setup: Setup) -> Record:
    record: Record = {}
    for how in ("plain", "at once", "in background"):
        model, seen, left = setup.sharded(), [], []
        model.set_manual_backward_finalization(how != "plain")
        run = functools.partial(two_backwards, how=how, seen=seen)
        record[how] = train(model, setup, run=run)
        if how == "plain":
            continue
        # A backward that is to reduce at once waits for the finalization all the same
        one_backward(model, setup, 9)
        model.finalize_backward()
        left += [group._post_backward_pending for group in groups_of(model)]
        # Nor is anything left to finalize of an iteration that is given up
        model.set_requires_gradient_sync(False)
        one_backward(model, setup, 10)
        model.reset_iter_state()
        left += [group._post_backward_pending for group in groups_of(model)]
        left += [param.grad is not None for param in model.parameters()]
        record |= {f"{how} seen": seen, f"{how} left": left}
    return record


@since_2_15
def finalization_that_is_refused(setup: Setup) -> Record:
    """The root keeps one sum, or in a mixed unit several where it is the only one."""
    record: Record = {}
    whole = fully_shard(setup.stack(), mesh=setup.pairs)
    for name, model in (("units", setup.sharded(mesh=setup.pairs)), ("whole", whole)):
        model.set_requires_all_reduce(False)
        one_backward(model, setup, 0)
        model.set_manual_backward_finalization(True)
        record[name] = error_of(model.finalize_backward)
    return record


# Extensions #


class Released(HighLow):
    """Needs its inputs no more once it is made of them."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


@since_2_15
def outputs_that_an_extension_releases(setup: Setup) -> Record:
    model = extended_stack(Released, 8, (BF16,) if setup.is_mixed else ())
    for block in model:
        fully_shard(block, mesh=setup.mesh)
    record: Record = {"values": [], "freed": []}
    for _ in range(4):
        model[0].unshard()
        params = groups_of(model[0])[0].fsdp_params
        wrapped = next(p for p in params if hasattr(p, "_extensions_data"))
        record["values"].append(wrapped.unsharded_param.detach().tolist())
        nbytes = [o.untyped_storage().nbytes() for o in wrapped.all_gather_outputs]
        record["freed"].append(not any(nbytes))
        model[0].reshard()
    return record


# Steps that a plugin replaces #


@since_2_15
def replaced_output_step(setup: Setup) -> Record:
    """Mixed units refuse it: what is gathered has one dtype."""
    calls: list[int] = []

    def outputs(*args: Any) -> None:
        calls.append(len(args))
        _fsdp_collectives._default_all_gather_output_fn(*args)

    model = setup.sharded()
    for group in groups_of(model)[1:]:
        group._all_gather_output_fn = outputs
    if setup.is_mixed:
        return {"refused": error_of(lambda: one_backward(model, setup, 0))}
    return train(model, setup) | {"calls": calls}


@since_2_15
def inputs_that_are_padded(setup: Setup) -> Record:
    calls: list[int] = []

    def pad(params: Any, grads: list[torch.Tensor], world_size: int) -> Any:
        calls.append(len(grads))
        return with_a_row_more(params, grads, world_size)

    reduce, record = _fsdp_param_group.foreach_reduce, {}

    def reduce_padded(*args: Any, **kwargs: Any) -> Any:
        return reduce(*args, **kwargs | {"prepare_reduce_scatter_inputs": pad})

    for name in ("plain", "padded", "passed on"):
        model = setup.sharded(
            mesh=setup.pairs, shard_placement_fn=lambda param: Shard(param.ndim - 1)
        )
        for group in groups_of(model) if name == "padded" else ():
            group._prepare_reduce_scatter_inputs = pad
        new = reduce_padded if name == "passed on" else reduce
        with mock.patch.object(_fsdp_param_group, "foreach_reduce", new):
            record[name] = train(model, setup)
    return record | {"calls": calls}


# Gradients' dtypes #


def set_grad_dtypes(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    for param in model.parameters():
        param.grad_dtype = dtype
    return model


@where(IS_2_15, scenario)
def grad_dtypes_of_all(setup: Setup) -> Record:
    """Reduced, summed and kept in them, which is another dtype than is stored."""
    record: Record = {}
    for policy, stored, dtype in (
        ("none", BF16, FP32),
        ("bf16", FP32, None),
        ("reduce_bf16", BF16, FP32),
        ("bf16", BF16, BF16),
    ):
        model = set_grad_dtypes(layers.stack((stored, stored)), dtype)
        model = setup.sharded(policy, model)
        losses = [one_backward(model, setup, step).item() for step in range(2)]
        record[f"{policy} {stored} {dtype}"] = dict(gradients(model)) | {"": losses}
        model.float()  # an explicit one stays
        dtypes = [str(param.grad.dtype) for param in model.parameters()]
        record[f"{policy} {stored} {dtype} cast"] = {"": dtypes}
    return record


@where(IS_2_15, scenario)
def unused_without_a_dtype(setup: Setup) -> Record:
    model = set_grad_dtypes(setup.sharded(), None)
    model.set_reduce_scatter_unused_params(True)
    error = error_of(lambda: one_backward(model, setup, 0))
    return {"names the dtype": "grad_dtype" in str(error)}


# Types of what ranks hold (2.14) #


class Annotated(nn.Module):
    """Parameters with annotations of ``spmd_types``, and notes what forward sees."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], mesh: DeviceMesh):
        super().__init__()
        self.params = nn.ParameterList(torch.randn(4, 4, dtype=d) for d in dtypes)
        names = mesh.mesh_dim_names or ()
        axes = [spmd_types.MeshAxis.of(mesh.get_group(name)) for name in names]
        for param in self.params:
            types = dict(zip(axes, (spmd_types.I, spmd_types.R)))
            spmd_types.assert_type(param, types)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_checking = spmd_types.is_type_checking()
        types = [str(spmd_types.get_local_type(param)) for param in self.params]
        self.seen.append((is_checking, types))
        for param in self.params:
            x = x @ param.float()
        return x


@where(HAS_SPMD_TYPES, of_both_kinds)
def annotated_parameters(setup: Setup) -> Record:
    torch.manual_seed(0)
    mesh = setup.pairs
    model = Annotated((FP32, BF16) if setup.is_mixed else (FP32, FP32), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard"))
    x = torch.ones(2, 4) * (1 + mesh.get_local_rank("shard"))
    model(x).sum().backward()
    groups = [mesh.get_group(name) for name in ("replicate", "shard")]
    tp, dp = map(spmd_types.MeshAxis.of, groups)
    with typecheck(), spmd_types.set_current_mesh(mesh):
        spmd_types.assert_type(x, {tp: spmd_types.I, dp: spmd_types.V})
        output = model(x)
    output.sum().backward()
    return {"seen": model.seen} | dict(gradients(model))
