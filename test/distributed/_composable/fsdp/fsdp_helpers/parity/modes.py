"""
The modes that towers are trained in. Uniform towers are cut alike into units on the
release and on this branch. Mixed ones are blocks of three dtypes on this branch, and on
the release, which refuses those, one unit for each dtype, or for each policy.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common.parity_layers import FP32, loss_of, Record, Stack, units_of
from fsdp_helpers.common.utils import DEVICE_TYPE, hybrid_mesh, shard_mesh
from fsdp_helpers.parity import models
from fsdp_helpers.parity.models import parts_of

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


# What a step leaves wrong shows in the next one
STEPS = 2


@dataclass(frozen=True)
class Batches:
    """The microbatches of one rank in one step."""

    step: int
    rank: int
    device: str

    def __getitem__(self, microbatch: int) -> torch.Tensor:
        return models.batch_of(self.step, microbatch, self.rank).to(self.device)


# Parts compute in whatever they get: FSDP casts the inputs of units only
UNCAST = {"cast_forward_inputs": False}


# One step each, up to and including the backward; returns the loss #


def one_backward(model: Stack, batches: Batches, **forward: Any) -> torch.Tensor:
    loss = loss_of(model(batches[0], **forward))
    loss.backward()
    return loss


def accumulate(model: Stack, batches: Batches) -> torch.Tensor:
    """Syncs after the last microbatch only."""
    losses = []
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        losses.append(loss_of(model(batches[i])))
        losses[-1].backward()
    return torch.stack(losses)


def defer_all_reduce(model: Stack, batches: Batches) -> torch.Tensor:
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        loss = one_backward(model, replace(batches, step=batches.step + 10 * i))
    return loss


def gradients_add_up(model: Stack, batches: Batches) -> torch.Tensor:
    """Adds to sharded gradients that are there already."""
    one_backward(model, batches)
    return one_backward(model, replace(batches, step=batches.step + 10))


def two_forwards(model: Stack, batches: Batches) -> torch.Tensor:
    loss = sum(loss_of(model(batches[i])) for i in range(2))
    loss.backward()
    return loss


def backward_twice(model: Stack, batches: Batches) -> torch.Tensor:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def unshard_ahead(model: Stack, batches: Batches) -> torch.Tensor:
    """Waits for all units but the root, the last first, and twice for each."""
    units = units_of(model)
    handles = [unit.unshard(async_op=True) for unit in units]
    for handle in reversed(handles[1:]):
        handle.wait()
        handle.wait()
    units[-1].reshard()
    units[-1].unshard()
    return one_backward(model, batches)


def skip_by_rank(model: Stack, batches: Batches) -> torch.Tensor:
    """Gives other parameters a gradient on one rank than on the next."""
    return one_backward(model, batches, skip=(batches.rank % 2,))


def only_first_block(model: Stack, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, blocks=(0,))


def second_block_in_chunks(model: Stack, batches: Batches) -> torch.Tensor:
    """Runs a block apart, as a loss computed in chunks does."""
    chunks = model(batches[0], blocks=(0,)).chunk(2)
    loss = sum(loss_of(model.blocks[1](chunk.clone())) for chunk in chunks)
    loss.backward()
    return loss


def thaw_and_freeze(model: Stack, batches: Batches) -> torch.Tensor:
    """After the first step, trains a block that was frozen, and less of another."""
    if batches.step == 1:
        model.blocks[0].requires_grad_(True)
        model.blocks[1].layers[1].requires_grad_(False)
    return one_backward(model, batches)


def state_dict_before_backward(model: Stack, batches: Batches) -> torch.Tensor:
    """Takes one, or loads one, while the parameters are unsharded."""
    before = model.state_dict()
    loss = loss_of(model(batches[0]))
    if batches.step == 0:
        model.load_state_dict(before)
    elif not all(isinstance(value, DTensor) for value in model.state_dict().values()):
        raise AssertionError("The state dict is not of the shards")
    loss.backward()
    return loss


# How a model is cut into units #


def shard_dtypes(model: Stack, **kwargs: Any) -> None:
    for part in (*parts_of(model).values(), model):  # which holds no parameter itself
        fully_shard(part, **kwargs)


def shard_blocks_as_group(model: Stack, **kwargs: Any) -> None:
    fully_shard([*model.blocks], **kwargs)
    fully_shard(model, **kwargs)


def shard_dtypes_as_groups(model: Stack, **kwargs: Any) -> None:
    parts = [part for block in model.blocks for part in block.layers]
    for dtype in dict.fromkeys(part.up.dtype for part in parts):
        fully_shard([part for part in parts if part.up.dtype == dtype], **kwargs)
    for unit in (model.stem, model.head, model):
        fully_shard(unit, **kwargs)


def policies_of(model: Stack) -> dict[str, MixedPrecisionPolicy]:
    """Returns one for each part, by its name."""
    pairs = itertools.cycle(((FP32, None), (layers.BF16, FP32), (None, layers.BF16)))
    return {
        name: MixedPrecisionPolicy(*pair, **UNCAST)
        for name, pair in zip(parts_of(model), pairs)
    }


def shard_policies(model: Stack, mp_policy: Any, **kwargs: Any) -> None:
    """Makes each part a unit with a policy of its own."""
    for name, policy in policies_of(model).items():
        fully_shard(model.get_submodule(name), mp_policy=policy, **kwargs)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**UNCAST), **kwargs)


def shard_overrides(model: Stack, mp_policy: Any, **kwargs: Any) -> None:
    """Makes each block a unit, whose parts have the same policies by override."""
    patterns = {f"{name}.*": policy for name, policy in policies_of(model).items()}
    policy = MixedPrecisionPolicy.by_name(model, patterns, **UNCAST)
    layers.shard_stack(model, mp_policy=policy, **kwargs)


# How the release is to cut a mixed tower where this branch cuts it so
BY_DTYPE = {
    layers.shard_stack: shard_dtypes,
    fully_shard: shard_dtypes,
    shard_blocks_as_group: shard_dtypes_as_groups,
    shard_overrides: shard_policies,
}


# Settings of a sharded model #


def each_unit(method: str, *args: Any) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for unit in units_of(model):
            getattr(unit, method)(*args)

    return prepare


def prefetch_explicitly(model: nn.Module) -> None:
    """Each unit starts the gather of the next, or of the one before in backward."""
    root, *units = units_of(model)
    root.set_modules_to_forward_prefetch(units[:2])
    root.set_modules_to_backward_prefetch(units[:-3:-1])
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def freeze_first_block(model: Stack) -> None:
    model.blocks[0].requires_grad_(False)


reduce_unused = each_unit("set_reduce_scatter_unused_params", True)
sum_only = each_unit("set_force_sum_reduction_for_comms", True)


def divide_by_six(model: Stack) -> None:
    sum_only(model)  # gloo cannot scale while it sums, and the release would have it
    each_unit("set_gradient_divide_factor", 6.0)(model)


def keep_two_inputs_of_one_block(model: Stack) -> None:
    """The most that any unit wants counts for all."""
    units_of(model)[1].set_reduce_scatter_max_input_buffers(2, recurse=False)


def step_in_backward(model: Stack) -> None:
    """Steps each parameter as soon as it has its gradient, and drops that."""

    def step(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=layers.LR)
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)


# Modes #


@dataclass(frozen=True)
class Mode:
    """A setting, and all that else is as it is by default."""

    kinds: tuple[str, ...] = ("uniform", "mixed")
    dtype: torch.dtype = FP32  # of a uniform tower
    policy: tuple[torch.dtype | None, ...] = ()  # arguments of `MixedPrecisionPolicy`
    kwargs: dict[str, Any] = field(default_factory=dict)  # of `fully_shard`
    shard: Callable[..., Any] = layers.shard_stack
    prepare: Callable[[Any], None] | None = None
    step: Callable[[Any, Batches], torch.Tensor] = one_backward
    # Over two ranks the bits of a sum depend on no order, nor on any layout
    ranks: int = 2
    is_hybrid: bool = False  # of two replicas, on all four ranks


UNIFORM, MIXED = ("uniform",), ("mixed",)
_OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
_NO_RESHARD = {"reshard_after_forward": False}
_RESHARD = {"reshard_after_forward": True}
_DEFERRED: dict[str, Any] = {"step": defer_all_reduce, "is_hybrid": True, "ranks": 4}

MODES: dict[str, Mode] = {
    "plain": Mode(),
    "overrides": Mode(MIXED, shard=shard_overrides),
    "param_bf16_reduce_fp32": Mode(policy=(layers.BF16, FP32)),
    "reduce_bf16": Mode(policy=(None, layers.BF16)),
    "root_only": Mode(shard=fully_shard),
    "two_forwards_resharded": Mode(kwargs=_RESHARD, step=two_forwards),
    "backward_twice": Mode(step=backward_twice),
    "unshard_ahead": Mode(step=unshard_ahead),
    "state_dict_before_backward": Mode(
        kwargs=_NO_RESHARD, step=state_dict_before_backward
    ),
    "group_run_in_part": Mode(shard=shard_blocks_as_group, step=only_first_block),
    "group_run_in_chunks": Mode(
        shard=shard_blocks_as_group, step=second_block_in_chunks
    ),
    "unfrozen_later": Mode(prepare=freeze_first_block, step=thaw_and_freeze),
    "unused_by_rank": Mode(UNIFORM, prepare=reduce_unused, step=skip_by_rank),
    "cpu_offload_accumulate": Mode(
        policy=(layers.BF16, FP32), kwargs=_OFFLOAD, step=accumulate
    ),
    "overrides_accumulate": Mode(
        MIXED, shard=shard_overrides, kwargs=_OFFLOAD, step=accumulate
    ),
    "divide_fp16": Mode(UNIFORM, dtype=layers.FP16, prepare=divide_by_six),
    "two_input_buffers_in_one_block": Mode(prepare=keep_two_inputs_of_one_block),
    "step_in_backward": Mode(prepare=step_in_backward),
    "hsdp_deferred": Mode(**_DEFERRED),
    "overrides_deferred": Mode(MIXED, shard=shard_overrides, **_DEFERRED),
}


# Running #


def differing(actual: Record, expected: Record) -> list[str]:
    """Returns the names of what is not the same, or is there on one side only."""
    names = dict.fromkeys((*expected, *actual))
    return [name for name in names if actual.get(name) != expected.get(name)]


def train(
    mode: Mode, model: nn.Module, mesh: DeviceMesh, rank: int, device: str
) -> Record:
    """Returns every step's loss, sharded gradients and parameters."""
    policy = MixedPrecisionPolicy(*mode.policy)
    mode.shard(model, mesh=mesh, mp_policy=policy, **mode.kwargs)
    if mode.prepare is not None:
        mode.prepare(model)

    def run(step: int) -> torch.Tensor:
        return mode.step(model, Batches(step, rank, device))

    record = layers.train_steps(model, run, range(STEPS))
    return {f"step {what}": bits for what, bits in record.items()}


def train_with(setter: Callable[[nn.Module], Any], case: str, rank: int) -> Record:
    """Trains a case's tower, once ``setter`` has changed the sharded model."""
    kind, name = case.split()
    mode = MODES[name]

    def shard(model: Stack, **kwargs: Any) -> None:
        mode.shard(model, **kwargs)
        setter(model)

    model = (
        models.mixed_tower() if kind == "mixed" else models.uniform_tower(mode.dtype)
    )
    mesh = hybrid_mesh(2) if mode.is_hybrid else shard_mesh(2)
    rank = rank if mode.is_hybrid else rank % 2
    changed = replace(mode, shard=shard)
    return train(changed, model.to(DEVICE_TYPE), mesh, rank, DEVICE_TYPE)
