"""
Trains towers in many modes with whatever torch is imported, and saves what came
of each step.

The tests run it once on the release and once on this branch, with the same seeds
and batches, and compare the two bit for bit:

- uniform modes cut the same model into the same units in both;
- mixed modes cut it into one unit for each dtype with ``--units dtype``, which the
  release can do, and into blocks of three dtypes with ``--units block``, which only
  this branch can;
- modes with overrides cut it alike, into one unit for each policy or into blocks
  whose policy has an override for each parameter.

With four ranks the modes of two run two at a time, one on either half.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_common.run_ranks import run_rank, run_ranks
from fsdp_mixed_dtype.models import (
    batch_of,
    BF16,
    FP16,
    FP32,
    loss_of,
    mixed_tower,
    Tower,
    uniform_tower,
)

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Shard


STEPS = 3
# A power of two: `param - LR * grad` rounds once, however it is computed
LR = 0.125


@dataclass(frozen=True)
class Batches:
    """The microbatches of one rank in one step."""

    step: int
    rank: int
    device: str

    def __getitem__(self, microbatch: int) -> torch.Tensor:
        return batch_of(self.step, microbatch, self.rank).to(self.device)


# Of `MixedPrecisionPolicy`: param_dtype, reduce_dtype
Policy = tuple["torch.dtype | None", "torch.dtype | None"]
# Of the three parts of a block
Policies = tuple[Policy, Policy, Policy]
# Each part takes whatever it is given: only of a unit all inputs are cast
UNCAST = {"cast_forward_inputs": False}


# One step each, up to and including the backward; returns the loss #


def one_backward(model: Tower, batches: Batches, **forward: Any) -> torch.Tensor:
    loss = loss_of(model(batches[0], **forward))
    loss.backward()
    return loss


def accumulate(
    model: Tower, batches: Batches, skips: Sequence[tuple[int, ...]] = ((), (), ())
) -> torch.Tensor:
    """Syncs after the last microbatch only, of which each may skip some parts."""
    losses = []
    for i, skip in enumerate(skips):
        model.set_requires_gradient_sync(i == len(skips) - 1)
        losses.append(loss_of(model(batches[i], skip=skip)))
        losses[-1].backward()
    return torch.stack(losses)


def accumulate_in_turns(model: Tower, batches: Batches) -> torch.Tensor:
    if batches.step == 0:  # the release must have run a unit once
        return one_backward(model, batches)
    return accumulate(model, batches, skips=((0,), (1,)))


def accumulate_keeping_params(model: Tower, batches: Batches) -> torch.Tensor:
    model.set_reshard_after_backward(False)
    loss = accumulate(model, batches)
    model.set_reshard_after_backward(True)
    return loss


def defer_all_reduce(model: Tower, batches: Batches) -> torch.Tensor:
    """Reduces every microbatch over the shards, and the last over replicas too."""
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        loss = loss_of(model(batches[i]))
        loss.backward()
    return loss


def several_backwards(model: Tower, batches: Batches) -> torch.Tensor:
    for i in range(2):
        model.set_is_last_backward(i == 1)
        loss = loss_of(model(batches[i]))
        loss.backward()
    return loss


def unshard_ahead(model: Tower, batches: Batches) -> torch.Tensor:
    """Waits for one unit's parameters itself, and leaves the others to forward."""
    handles = [unit.unshard(async_op=True) for unit in (model, *model.blocks)]
    handles[1].wait()
    return one_backward(model, batches)


def skip_one_part(model: Tower, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, skip=(1,))


def skip_by_rank(model: Tower, batches: Batches) -> torch.Tensor:
    """Gives other parameters a gradient on one rank than on the next."""
    return one_backward(model, batches, skip=(batches.rank % 2,))


def run_one_of_group(model: Tower, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, blocks=(0,))


def run_rest_in_chunks(model: Tower, batches: Batches) -> torch.Tensor:
    """Runs the group's second module apart, as a loss computed in chunks does."""
    chunks = model(batches[0], blocks=(0,)).chunk(2)
    loss = sum(loss_of(model.blocks[1](chunk.clone())) for chunk in chunks)
    loss.backward()
    return loss


def unfreeze_after_first_step(model: Tower, batches: Batches) -> torch.Tensor:
    if batches.step == 1:
        model.blocks[0].requires_grad_(True)
    return one_backward(model, batches)


# How a model is cut into units #


def shard_blocks(model: Tower, **kwargs: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)


def shard_dtypes(model: Tower, **kwargs: Any) -> None:
    for part in model.all_parts:
        fully_shard(part, **kwargs)
    fully_shard(model, **kwargs)  # holds no parameter itself


def shard_blocks_as_group(model: Tower, **kwargs: Any) -> None:
    fully_shard([*model.blocks], **kwargs)
    fully_shard(model, **kwargs)


def shard_root_only(model: Tower, **kwargs: Any) -> None:
    fully_shard(model, **kwargs)


def replicate_blocks(model: Tower, **kwargs: Any) -> None:
    for block in model.blocks:
        replicate(block, **kwargs)
    replicate(model, **kwargs)


def shard_policies(model: Tower, policies: Policies, **kwargs: Any) -> None:
    """Makes each part a unit with a policy of its own."""
    apply = kwargs.pop("apply")
    for part, policy in zip(model.all_parts, parts_policies(model, policies)):
        apply(part, mp_policy=MixedPrecisionPolicy(*policy, **UNCAST), **kwargs)
    apply(model, mp_policy=MixedPrecisionPolicy(**UNCAST), **kwargs)


def shard_overrides(model: Tower, policies: Policies, **kwargs: Any) -> None:
    """Makes each block a unit, whose parts have the same policies by override."""
    apply = kwargs.pop("apply")
    names = {part: name for name, part in model.named_modules()}
    pairs = zip(model.all_parts, parts_policies(model, policies))
    patterns = {
        f"{names[part]}.*": {"param_dtype": compute, "reduce_dtype": reduce}
        for part, (compute, reduce) in pairs
    }
    kwargs["mp_policy"] = MixedPrecisionPolicy.by_name(model, patterns, **UNCAST)
    for unit in (*model.blocks, model):
        apply(unit, **kwargs)


def parts_policies(model: Tower, policies: Policies) -> list[Policy]:
    # The stem's and the head's, which are of one unit, are the first and the last
    of_block = [policies] * len(model.blocks)
    return [policies[0], *itertools.chain(*of_block), policies[-1]]


def shard_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.size(1) % 4 == 0 else None


# What is set on a model once it is sharded #


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prefetch_explicitly(model: Tower) -> None:
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    model.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])


def freeze_some(model: Tower) -> None:
    model.blocks[0].requires_grad_(False)  # a whole unit
    model.blocks[1].parts[0].requires_grad_(False)


def freeze_first_block(model: Tower) -> None:
    model.blocks[0].requires_grad_(False)


def freeze_matrices(model: Tower) -> None:
    for part in model.blocks[0].parts:
        part.up.requires_grad_(False)
        part.down.requires_grad_(False)


def reduce_unused(model: Tower) -> None:
    model.set_reduce_scatter_unused_params(True)


def sum_only(model: Tower) -> None:
    for unit in units_of(model):
        unit.set_force_sum_reduction_for_comms(True)


def divide_by_six(model: Tower) -> None:
    sum_only(model)  # gloo cannot scale while it sums, and the release would have it
    for unit in units_of(model):
        unit.set_gradient_divide_factor(6.0)


def keep_two_inputs(model: Tower) -> None:
    model.set_reduce_scatter_max_input_buffers(2)


def step_in_backward(model: Tower) -> None:
    """Steps each parameter as soon as it has its gradient, and drops that."""

    def step(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=LR)
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)


# Modes #


@dataclass(frozen=True)
class Mode:
    dtype: torch.dtype = FP32  # of a uniform tower
    policy: Policy = (None, None)
    policies: Policies | None = None  # overrides, of each part of a block
    kwargs: dict[str, Any] = field(default_factory=dict)  # of `fully_shard`
    shard: Callable[..., None] = shard_blocks
    prepare: Callable[[Tower], None] | None = None
    step: Callable[[Tower, Batches], torch.Tensor] = one_backward
    world_sizes: tuple[int, ...] = (2, 4)
    is_hybrid: bool = False


_OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}

UNIFORM_MODES: dict[str, Mode] = {
    "fp32": Mode(),
    "bf16": Mode(dtype=BF16),
    "fp16": Mode(dtype=FP16),
    "param_bf16_reduce_fp32": Mode(policy=(BF16, FP32)),
    "param_bf16": Mode(policy=(BF16, None)),
    "reduce_bf16": Mode(policy=(None, BF16)),
    "root_only": Mode(shard=shard_root_only),
    "reshard": Mode(kwargs={"reshard_after_forward": True}),
    "no_reshard": Mode(kwargs={"reshard_after_forward": False}),
    "reshard_to_two": Mode(kwargs={"reshard_after_forward": 2}, world_sizes=(4,)),
    "reshard_to_two_bf16": Mode(
        policy=(BF16, FP32), kwargs={"reshard_after_forward": 2}, world_sizes=(4,)
    ),
    "accumulate": Mode(step=accumulate),
    "accumulate_bf16_reduce_fp32": Mode(policy=(BF16, FP32), step=accumulate),
    "accumulate_reduce_bf16": Mode(policy=(None, BF16), step=accumulate),
    "accumulate_in_turns": Mode(step=accumulate_in_turns),
    "accumulate_keeping_params": Mode(step=accumulate_keeping_params),
    "several_backwards": Mode(step=several_backwards),
    "explicit_prefetch": Mode(prepare=prefetch_explicitly),
    "unshard_ahead": Mode(step=unshard_ahead),
    "shard_last_dim": Mode(kwargs={"shard_placement_fn": shard_last_dim}),
    "group": Mode(shard=shard_blocks_as_group),
    "group_run_in_part": Mode(shard=shard_blocks_as_group, step=run_one_of_group),
    "group_run_in_chunks": Mode(shard=shard_blocks_as_group, step=run_rest_in_chunks),
    "frozen": Mode(prepare=freeze_some),
    "unfrozen_later": Mode(prepare=freeze_first_block, step=unfreeze_after_first_step),
    "skipped_part": Mode(step=skip_one_part),
    "unused_by_rank": Mode(prepare=reduce_unused, step=skip_by_rank),
    "cpu_offload": Mode(kwargs=_OFFLOAD),
    "cpu_offload_accumulate": Mode(
        policy=(BF16, FP32), kwargs=_OFFLOAD, step=accumulate
    ),
    "divide_fp16": Mode(dtype=FP16, prepare=divide_by_six),
    "divide_fp32": Mode(prepare=divide_by_six),
    "sum_only": Mode(prepare=sum_only),
    "two_input_buffers": Mode(prepare=keep_two_inputs),
    "step_in_backward": Mode(prepare=step_in_backward),
    "hybrid": Mode(is_hybrid=True, world_sizes=(4,)),
    "hybrid_fp16": Mode(dtype=FP16, is_hybrid=True, world_sizes=(4,)),
    "hybrid_deferred": Mode(
        policy=(BF16, FP32), step=defer_all_reduce, is_hybrid=True, world_sizes=(4,)
    ),
    "replicate": Mode(shard=replicate_blocks),
    "replicate_bf16_reduce_fp32": Mode(policy=(BF16, FP32), shard=replicate_blocks),
}

# `shard` is chosen by `--units`
MIXED_MODES: dict[str, Mode] = {
    "plain": Mode(),
    "reduce_fp32": Mode(policy=(None, FP32)),
    "reduce_bf16": Mode(policy=(None, BF16)),
    "param_bf16": Mode(policy=(BF16, None)),
    "param_bf16_reduce_fp32": Mode(policy=(BF16, FP32)),
    "param_fp32": Mode(policy=(FP32, None)),
    "no_reshard": Mode(kwargs={"reshard_after_forward": False}),
    "accumulate": Mode(step=accumulate),
    "accumulate_reduce_fp32": Mode(policy=(None, FP32), step=accumulate),
    "accumulate_in_turns": Mode(policy=(BF16, FP32), step=accumulate_in_turns),
    "several_backwards": Mode(step=several_backwards),
    "shard_last_dim": Mode(kwargs={"shard_placement_fn": shard_last_dim}),
    "frozen": Mode(prepare=freeze_some),
    "unfrozen_later": Mode(prepare=freeze_first_block, step=unfreeze_after_first_step),
    "skipped_part": Mode(step=skip_one_part),
    "cpu_offload": Mode(kwargs=_OFFLOAD),
    "divide": Mode(prepare=divide_by_six),
    "step_in_backward": Mode(prepare=step_in_backward),
}


# Stored in fp32, bf16, fp16 and in fp16, fp32, bf16, one after the other
_MIXED_POLICIES: Policies = ((FP32, None), (BF16, FP32), (None, BF16))
_OVERRIDES = Mode(policies=_MIXED_POLICIES)
_HYBRID = {"is_hybrid": True, "world_sizes": (4,)}

# `apply` and how the model is cut are chosen by `--units`
OVERRIDE_MODES: dict[str, Mode] = {
    "plain": _OVERRIDES,
    "compute_only": Mode(policies=((BF16, None), (FP32, None), (None, None))),
    "reduce_only": Mode(policies=((None, FP32), (None, BF16), (None, FP16))),
    "one_bucket": Mode(policies=((BF16, FP32), (FP32, None), (FP16, FP32))),
    "no_reshard": replace(_OVERRIDES, kwargs={"reshard_after_forward": False}),
    "accumulate": replace(_OVERRIDES, step=accumulate),
    "accumulate_in_turns": replace(_OVERRIDES, step=accumulate_in_turns),
    "several_backwards": replace(_OVERRIDES, step=several_backwards),
    "shard_last_dim": replace(
        _OVERRIDES, kwargs={"shard_placement_fn": shard_last_dim}
    ),
    "frozen": replace(_OVERRIDES, prepare=freeze_some),
    # The release forgets the dtypes of a unit that was frozen whole (pytorch 186998)
    "unfrozen_later": replace(
        _OVERRIDES, prepare=freeze_matrices, step=unfreeze_after_first_step
    ),
    "skipped_part": replace(_OVERRIDES, step=skip_one_part),
    "cpu_offload": replace(_OVERRIDES, kwargs=_OFFLOAD),
    "cpu_offload_accumulate": replace(_OVERRIDES, kwargs=_OFFLOAD, step=accumulate),
    "divide": replace(_OVERRIDES, prepare=divide_by_six),
    "step_in_backward": replace(_OVERRIDES, prepare=step_in_backward),
    "replicate": replace(_OVERRIDES, kwargs={"apply": replicate}),
    "replicate_accumulate": replace(
        _OVERRIDES, kwargs={"apply": replicate}, step=accumulate
    ),
    "hybrid": replace(_OVERRIDES, **_HYBRID),
    "hybrid_accumulate": replace(_OVERRIDES, step=accumulate, **_HYBRID),
    "hybrid_deferred": replace(_OVERRIDES, step=defer_all_reduce, **_HYBRID),
}


# Running #

# What a tensor is of, to its dtype and bits
Record = dict[str, tuple[str, bytes]]


def differing(actual: Record, expected: Record) -> list[str]:
    """Returns the names of what is not the same, or is there on one side only."""
    names = dict.fromkeys((*expected, *actual))
    return [name for name in names if actual.get(name) != expected.get(name)]


def bits_of(tensor: torch.Tensor) -> tuple[str, bytes]:
    """Returns the dtype and the bytes of this rank's part of ``tensor``."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().cpu().reshape(-1)
    # Also of one element that lies in a wider tensor
    as_bytes = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return str(local.dtype), as_bytes.numpy().tobytes()


def train(mode: Mode, model: Tower, mesh: DeviceMesh, rank: int, device: str) -> Record:
    """Returns every step's loss and sharded gradients, and the final parameters."""
    param_dtype, reduce_dtype = mode.policy
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if mode.policies is None:
        mode.shard(model, mesh=mesh, mp_policy=policy, **mode.kwargs)
    else:
        kwargs = {"apply": fully_shard, "mesh": mesh} | mode.kwargs
        mode.shard(model, mode.policies, **kwargs)
    if mode.prepare is not None:
        mode.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    record: Record = {}
    for step in range(STEPS):
        loss = mode.step(model, Batches(step, rank, device))
        record[f"step {step} loss"] = bits_of(loss)
        for name, param in model.named_parameters():
            if param.grad is not None:
                record[f"step {step} gradient {name}"] = bits_of(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        record[f"final {name}"] = bits_of(param)
    return record


def refusal_of_mixed_unit(mesh: DeviceMesh) -> str:
    """Returns what a unit of several dtypes raises, or nothing."""
    model = mixed_tower().to(mesh.device_type)
    shard_blocks(model, mesh=mesh)
    try:
        one_backward(model, Batches(0, 0, mesh.device_type))
    except AssertionError as error:
        return str(error)
    return ""


def modes_to_run(args: argparse.Namespace) -> Iterator[tuple[str, Mode, int]]:
    """Yields the name of each mode that is asked for, the mode and its ranks."""
    for name, mode, size in all_modes(args):
        if not args.modes or name in args.modes:
            yield name, mode, size


def all_modes(args: argparse.Namespace) -> Iterator[tuple[str, Mode, int]]:
    shard = {"dtype": shard_dtypes, "block": shard_blocks}[args.units]
    for name, mode in MIXED_MODES.items():
        yield f"mixed {name}", replace(mode, shard=shard), 2
    shard = {"dtype": shard_policies, "block": shard_overrides}[args.units]
    for name, mode in OVERRIDE_MODES.items():
        if not (args.only_mixed and mode.is_hybrid):
            size = 4 if mode.is_hybrid else 2
            yield f"override {name}", replace(mode, shard=shard), size
    if not args.only_mixed:
        for name, mode in UNIFORM_MODES.items():
            for size in mode.world_sizes:
                yield f"uniform {name} {size}", mode, size


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    device = args.device
    shape, names = (args.ranks // 2, 2), ("replicate", "shard")
    pairs = init_device_mesh(device, shape, mesh_dim_names=names)
    meshes = {2: pairs["shard"], args.ranks: init_device_mesh(device, (args.ranks,))}
    results: dict[str, Any] = {"refusal": refusal_of_mixed_unit(meshes[2])}
    turns = itertools.cycle(range(args.ranks // 2))
    for name, mode, size in modes_to_run(args):
        if size == 2 and next(turns) != rank // 2:
            continue  # the other half's
        is_uniform = name.startswith("uniform")
        model = uniform_tower(mode.dtype) if is_uniform else mixed_tower()
        mesh = pairs if mode.is_hybrid else meshes[size]
        results[name] = train(mode, model.to(device), mesh, rank % size, device)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--units", required=True, choices=("dtype", "block"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4))
    parser.add_argument("--only-mixed", action="store_true", help="no uniform modes")
    parser.add_argument("--modes", nargs="*", help="run these alone")
    parser.add_argument("--rank", type=int, help="be this rank, and start no others")
    parser.add_argument("--store", help="file to meet the other ranks by")
    args = parser.parse_args()
    if args.rank is None:
        run_ranks(run_all, args, args.ranks, args.device)
    else:
        run_rank(args.rank, run_all, args, args.store, args.ranks, args.device)


if __name__ == "__main__":
    sys.exit(main())
