"""What 2.14 and 2.15 added to FSDP2: scenarios for the releases that have it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    FP32,
    gradients,
    groups_of,
    loss_of,
    Record,
    Stack,
    stack,
    units_of,
)
from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE, HAS_SPMD_TYPES
from fsdp_common.scenarios import one_backward, Place, train
from fsdp_parity.waves import extended_stack, HighLow
from fsdp_plugins.runs import mixed, scenario

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import Shard


if HAS_SPMD_TYPES:
    import spmd_types
    from spmd_types.checker import typecheck
else:
    spmd_types = typecheck = None


def since_2_15(run: Callable[[Place], Record]) -> Callable[[Place], Record]:
    return scenario(run) if FOLLOWS_GRAD_DTYPE else run


def mixed_since_2_15(run: Callable[[Place], Record]) -> Callable[[Place], Record]:
    return mixed(run) if FOLLOWS_GRAD_DTYPE else run


def outputs_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for group in groups_of(model):
        for fsdp_param in group.fsdp_params:
            yield from fsdp_param.all_gather_outputs


# Storage that stays #


def keep_storage(model: Stack, place: Place) -> Record:
    model.set_keep_unsharded_storage(True)
    record = train(model, place)
    for unit in units_of(model):
        unit.reshard()
    before = [output.data_ptr() for output in outputs_of(model)]
    record["allocated"] = all(o.untyped_storage().nbytes() for o in outputs_of(model))
    record |= train(model, place, steps=range(2, 4))
    after = [output.data_ptr() for output in outputs_of(model)]
    record["same places"] = before == after
    model.set_keep_unsharded_storage(False)
    record |= train(model, place, steps=range(4, 5))
    for unit in units_of(model):
        unit.reshard()
    record["freed"] = not any(o.untyped_storage().nbytes() for o in outputs_of(model))
    return record


@since_2_15
def storage_that_is_kept(place: Place) -> Record:
    return keep_storage(place.sharded("bf16_reduce_fp32"), place)


@mixed_since_2_15
def mixed_storage_that_is_kept(place: Place) -> Record:
    plain = train(place.mixed(), place, steps=range(5))
    return {"plain": plain, "kept": keep_storage(place.mixed(), place)}


# Finalization by hand #


def error_of(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


def finalized_step(
    model: Stack, place: Place, step: int, *, in_background: bool, seen: list[Any]
) -> torch.Tensor:
    """Two backwards, of which the first reduces nothing, and then the reduction."""
    model.set_requires_gradient_sync(False)
    one_backward(model, place, 2 * step)
    loss = one_backward(model, place, 2 * step + 1)
    seen.append(all(param.grad is None for param in model.parameters()))
    model.set_requires_gradient_sync(True)
    if not in_background:
        model.finalize_backward()
        return loss
    handle = model.finalize_backward(async_op=True)
    seen.append(error_of(lambda: model(batch_of(0, place.rank))))
    seen.append(error_of(model.finalize_backward))
    handle.wait()
    return loss


def synced_step(model: Stack, place: Place, step: int) -> torch.Tensor:
    """The same without finalization by hand."""
    model.set_requires_gradient_sync(False)
    one_backward(model, place, 2 * step)
    model.set_requires_gradient_sync(True)
    return one_backward(model, place, 2 * step + 1)


def finalize_by_hand(model: Stack, place: Place, *, in_background: bool) -> Record:
    model.set_manual_backward_finalization(True)
    seen: list[Any] = []
    step = functools.partial(finalized_step, in_background=in_background, seen=seen)
    record = train(model, place, run=step)
    # A backward that is to reduce at once waits for the finalization all the same
    one_backward(model, place, 9)
    model.finalize_backward()
    record |= {
        "seen": seen,
        "left": [g._post_backward_pending for g in groups_of(model)],
    }
    return record


@since_2_15
def finalized_by_hand(place: Place) -> Record:
    return {
        str(in_background): finalize_by_hand(
            place.sharded("bf16_reduce_fp32"), place, in_background=in_background
        )
        for in_background in (False, True)
    }


@mixed_since_2_15
def mixed_finalized_by_hand(place: Place) -> Record:
    record: Record = {"plain": train(place.mixed(), place, run=synced_step)}
    for in_background in (False, True):
        record[str(in_background)] = finalize_by_hand(
            place.mixed(), place, in_background=in_background
        )
    return record


def refused_finalization(model: Stack, place: Place) -> str | None:
    model.set_requires_all_reduce(False)
    one_backward(model, place, 0)
    model.set_manual_backward_finalization(True)
    return error_of(model.finalize_backward)


@since_2_15
def finalization_that_is_refused(place: Place) -> Record:
    return {"refused": refused_finalization(place.sharded(mesh=place.pairs), place)}


@mixed_since_2_15
def mixed_finalization_that_is_refused(place: Place) -> Record:
    """The root keeps one sum, or several where it is the only unit."""
    whole = fully_shard(stack((FP32, BF16)), mesh=place.pairs)
    return {
        "refused": refused_finalization(place.mixed(mesh=place.pairs), place),
        "refused with several sums": refused_finalization(whole, place),
    }


# Extensions #


class Released(HighLow):
    """Needs its inputs no more once it is made of them."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Turning(HighLow):
    """Gathered in two parts for forward, and whole for backward."""

    turns = 0

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, policy):
        self.turns += 1
        if self.turns % 2:
            arguments = (mesh, outer_size, outer_stride, module, policy)
            return super().fsdp_pre_all_gather(*arguments)
        return (self.whole_shard(),), type(self).__name__

    def unpack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return inputs[0] if len(inputs) == 1 else super().unpack(inputs)


def unshard_twice(model: nn.Sequential, place: Place) -> Record:
    for block in model:
        fully_shard(block, mesh=place.mesh)
    record: Record = {}
    for turn in range(4):
        model[0].unshard()
        params = groups_of(model[0])[0].fsdp_params
        wrapped = next(p for p in params if hasattr(p, "_extensions_data"))
        record[f"{turn} values"] = wrapped.unsharded_param.detach().tolist()
        outputs = wrapped.all_gather_outputs
        record[f"{turn} dtypes"] = [str(output.dtype) for output in outputs]
        nbytes = [output.untyped_storage().nbytes() for output in outputs]
        record[f"{turn} freed"] = not any(nbytes)
        model[0].reshard()
    return record


@since_2_15
def outputs_that_an_extension_releases(place: Place) -> Record:
    return unshard_twice(extended_stack(Released, 8, ()), place)


@mixed_since_2_15
def mixed_outputs_that_an_extension_releases(place: Place) -> Record:
    return unshard_twice(extended_stack(Released, 8, (BF16,)), place)


@mixed
def inputs_that_an_extension_changes(place: Place) -> Record:
    return unshard_twice(extended_stack(Turning, 8, (BF16,)), place)


# What others put in place of a step #


def with_own_steps(model: Stack, place: Place, *, gathers: bool) -> Record:
    calls = {"outputs": 0, "inputs": 0}

    def outputs(*args: Any) -> None:
        calls["outputs"] += 1
        _fsdp_collectives._default_all_gather_output_fn(*args)

    def inputs(params: Any, grads: list[torch.Tensor], world_size: int) -> Any:
        calls["inputs"] += 1
        # In place, as it is meant
        grads[:] = [2 * grad for grad in grads]
        default = _fsdp_collectives._default_reduce_scatter_input_fn
        return default(params, grads, world_size)

    for group in groups_of(model):
        group._prepare_reduce_scatter_inputs = inputs
        if gathers:
            group._all_gather_output_fn = outputs
    return train(model, place) | {"calls": calls}


@since_2_15
def steps_of_ones_own(place: Place) -> Record:
    return with_own_steps(place.sharded("bf16_reduce_fp32"), place, gathers=True)


@mixed_since_2_15
def mixed_steps_of_ones_own(place: Place) -> Record:
    record = with_own_steps(place.mixed(), place, gathers=False)
    try:
        with_own_steps(place.mixed(), place, gathers=True)
    except NotImplementedError as error:
        record["refused"] = str(error)
    return record


def with_a_row_more(params: Any, grads: list[torch.Tensor], world_size: int) -> Any:
    """Gives each rank a row of zeros behind its own ones."""
    default = _fsdp_collectives._default_reduce_scatter_input_fn
    for i, size in enumerate(default(params, grads, world_size)):
        whole = grads[i].new_zeros(size)
        whole[: grads[i].size(0)] = grads[i]
        by_rank = whole.unflatten(0, (world_size, -1))
        row = torch.zeros_like(by_rank[:, :1])
        grads[i] = torch.cat([by_rank, row], 1).flatten(0, 1)
    return tuple(grad.size() for grad in grads)


def train_with_a_row_more(model: Stack, place: Place) -> Record:
    for group in groups_of(model):
        group._prepare_reduce_scatter_inputs = with_a_row_more
    return train(model, place)


def on_the_last_dim(place: Place) -> dict[str, Any]:
    return {
        "mesh": place.pairs,
        "shard_placement_fn": lambda param: Shard(param.ndim - 1),
    }


@since_2_15
def inputs_that_are_padded(place: Place) -> Record:
    model = place.sharded("bf16_reduce_fp32", **on_the_last_dim(place))
    return train_with_a_row_more(model, place)


@mixed_since_2_15
def mixed_inputs_that_are_padded(place: Place) -> Record:
    plain = train(place.mixed(**on_the_last_dim(place)), place)
    padded = train_with_a_row_more(place.mixed(**on_the_last_dim(place)), place)
    return {"plain": plain, "padded": padded}


# Gradients' dtypes #


def set_grad_dtypes(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    for param in model.parameters():
        param.grad_dtype = dtype
    return model


@since_2_15
def grad_dtypes_of_all(place: Place) -> Record:
    """Reduced, summed and kept in them, which is another dtype than is stored."""
    record: Record = {}
    for policy in ("none", "bf16", "reduce_bf16"):
        for stored, dtype in ((BF16, FP32), (FP32, None), (BF16, BF16)):
            model = set_grad_dtypes(stack((stored, stored)), dtype)
            model = place.sharded(policy, model)
            key = f"{policy} {stored} {dtype}"
            losses = [one_backward(model, place, step) for step in range(2)]
            record[key] = (
                [loss.item() for loss in losses],
                dict(gradients(model)),
            )
            model.float()  # an explicit one stays
            record[f"{key} cast"] = [str(p.grad.dtype) for p in model.parameters()]
    return record


@since_2_15
def iteration_that_is_given_up(place: Place) -> Record:
    model = place.sharded()
    one_backward(model, place, 0)
    loss_of(model(batch_of(1, place.rank)))
    model.reset_iter_state()
    left = [param.grad is None for param in model.parameters()]
    model.set_requires_gradient_sync(False)
    loss_of(model(batch_of(2, place.rank))).backward()
    pending = [[g._post_backward_pending for g in groups_of(model)]]
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    pending.append([g._post_backward_pending for g in groups_of(model)])
    return train(model, place) | {"left": left, "pending": pending}


@since_2_15
def unused_without_a_dtype(place: Place) -> Record:
    model = place.sharded(model=set_grad_dtypes(stack(), None))
    model.set_reduce_scatter_unused_params(True)
    try:
        one_backward(model, place, 0)
    except ValueError as error:
        return {"raised": "requires an explicit" in str(error)}
    return {"raised": False}


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


def train_annotated(dtypes: tuple[torch.dtype, ...], place: Place) -> Record:
    torch.manual_seed(0)
    mesh = place.pairs
    model = Annotated(dtypes, mesh)
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


if spmd_types is not None:

    @scenario
    def annotated_parameters(place: Place) -> Record:
        return train_annotated((FP32, FP32), place)

    @mixed
    def mixed_annotated_parameters(place: Place) -> Record:
        return train_annotated((FP32, BF16), place)
