"""
The modes that towers are trained in. Uniform towers are cut alike into units on the
release and on this branch. Mixed ones are blocks of three dtypes on this branch, and on
the release, which refuses those, one unit for each dtype, or for each policy.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_helpers.common.parity_layers import (
    BF16,
    FP16,
    FP32,
    loss_of,
    LR,
    Record,
    train_steps,
    units_of,
)
from fsdp_helpers.common.utils import DEVICE_TYPE, hybrid_mesh, shard_mesh
from fsdp_helpers.parity.models import batch_of, mixed_tower, Tower, uniform_tower

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Shard


# What a step leaves wrong shows in the next one
STEPS = 2


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
Policies = tuple[Policy, Policy, Policy]  # of the three parts of a block
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
    """Communicates in the last microbatch's backward only."""
    model.set_reshard_after_forward(False)
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        model.set_reshard_after_backward(i == 1)
        loss = loss_of(model(batches[i]))
        loss.backward()
    return loss


def two_microbatches(last: str) -> Callable[[Tower, Batches], torch.Tensor]:
    """Returns a step that calls the method ``last`` to say which one is the last."""

    def step(model: Tower, batches: Batches) -> torch.Tensor:
        for i in range(2):
            getattr(model, last)(i == 1)
            loss = one_backward(model, replace(batches, step=batches.step + 10 * i))
        return loss

    return step


def gradients_add_up(model: Tower, batches: Batches) -> torch.Tensor:
    """Adds to sharded gradients that are there already."""
    one_backward(model, batches)
    return one_backward(model, replace(batches, step=batches.step + 10))


def two_forwards(model: Tower, batches: Batches) -> torch.Tensor:
    loss = sum(loss_of(model(batches[i])) for i in range(2))
    loss.backward()
    return loss


def backward_twice(model: Tower, batches: Batches) -> torch.Tensor:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def unshard_ahead(model: Tower, batches: Batches) -> torch.Tensor:
    """Waits for all units but the root, the last first, and twice for each."""
    units = units_of(model)
    handles = [unit.unshard(async_op=True) for unit in units]
    for handle in reversed(handles[1:]):
        handle.wait()
        handle.wait()
    units[-1].reshard()
    units[-1].unshard()
    return one_backward(model, batches)


def skip_one_part(model: Tower, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, skip=(1,))


def skip_by_rank(model: Tower, batches: Batches) -> torch.Tensor:
    """Gives other parameters a gradient on one rank than on the next."""
    return one_backward(model, batches, skip=(batches.rank % 2,))


def only_first_block(model: Tower, batches: Batches) -> torch.Tensor:
    return one_backward(model, batches, blocks=(0,))


def second_block_in_chunks(model: Tower, batches: Batches) -> torch.Tensor:
    """Runs a block apart, as a loss computed in chunks does."""
    chunks = model(batches[0], blocks=(0,)).chunk(2)
    loss = sum(loss_of(model.blocks[1](chunk.clone())) for chunk in chunks)
    loss.backward()
    return loss


def thaw_and_freeze(model: Tower, batches: Batches) -> torch.Tensor:
    """After the first step, trains a block that was frozen, and less of another."""
    if batches.step == 1:
        model.blocks[0].requires_grad_(True)
        model.blocks[1].parts[1].requires_grad_(False)
    return one_backward(model, batches)


def fail(*_: Any) -> None:
    raise InterruptedError


def give_up_twice(model: Tower, batches: Batches) -> torch.Tensor:
    """In forward with a prefetch under way, and in backward before any gradient."""
    first, second = model.blocks
    model.set_modules_to_forward_prefetch(units_of(second))
    handle = first.parts[-1].register_forward_pre_hook(fail)
    with contextlib.suppress(InterruptedError):
        model(batches[1])
    handle.remove()
    model.reset_iter_state()
    output = model(batches[1])
    output.register_hook(fail)
    with contextlib.suppress(InterruptedError):
        loss_of(output).backward()
    model.reset_iter_state()
    return one_backward(model, batches)


def evaluate_before(model: Tower, batches: Batches) -> torch.Tensor:
    # The release cannot train what it first gathered for inference
    if batches.step > 0:
        with torch.no_grad():
            expected = model(batches[1])
        with torch.inference_mode():
            actual = model(batches[1])
        if not torch.equal(actual, expected):
            raise AssertionError("Inference mode gives something else")
    return one_backward(model, batches)


def state_dict_before_backward(model: Tower, batches: Batches) -> torch.Tensor:
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


def shard_blocks(model: Tower, apply: Any = fully_shard, **kwargs: Any) -> None:
    for block in model.blocks:
        apply(block, **kwargs)
    apply(model, **kwargs)


def shard_dtypes(model: Tower, apply: Any = fully_shard, **kwargs: Any) -> None:
    for part in model.all_parts:
        apply(part, **kwargs)
    apply(model, **kwargs)  # holds no parameter itself


def shard_blocks_as_group(model: Tower, **kwargs: Any) -> None:
    fully_shard([*model.blocks], **kwargs)
    fully_shard(model, **kwargs)


def shard_dtypes_as_groups(model: Tower, **kwargs: Any) -> None:
    parts = [part for block in model.blocks for part in block.parts]
    for dtype in dict.fromkeys(part.up.dtype for part in parts):
        fully_shard([part for part in parts if part.up.dtype == dtype], **kwargs)
    for unit in (model.stem, model.head, model):
        fully_shard(unit, **kwargs)


def shard_root_only(model: Tower, **kwargs: Any) -> None:
    fully_shard(model, **kwargs)


def replicate_blocks(model: Tower, **kwargs: Any) -> None:
    shard_blocks(model, replicate, **kwargs)


def replicate_dtypes(model: Tower, **kwargs: Any) -> None:
    shard_dtypes(model, replicate, **kwargs)


def ignoring_gains(cut: Callable[..., None]) -> Callable[..., None]:
    """Leaves some parameters of every unit to the user."""

    def shard(model: Tower, **kwargs: Any) -> None:
        cut(model, ignored_params={part.gain for part in model.all_parts}, **kwargs)

    return shard


shard_blocks_without_gains = ignoring_gains(shard_blocks)

# How the release is to cut a mixed tower where this branch cuts it so
BY_DTYPE = {
    shard_blocks_without_gains: ignoring_gains(shard_dtypes),
    shard_blocks: shard_dtypes,
    shard_root_only: shard_dtypes,
    shard_blocks_as_group: shard_dtypes_as_groups,
    replicate_blocks: replicate_dtypes,
}


def shard_policies(
    model: Tower, policies: Policies, mp_policy: Any, **kwargs: Any
) -> None:
    """Makes each part a unit with a policy of its own."""
    for part, policy in zip(model.all_parts, parts_policies(model, policies)):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(*policy, **UNCAST), **kwargs)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**UNCAST), **kwargs)


def shard_overrides(
    model: Tower, policies: Policies, mp_policy: Any, **kwargs: Any
) -> None:
    """Makes each block a unit, whose parts have the same policies by override."""
    names = {part: name for name, part in model.named_modules()}
    pairs = zip(model.all_parts, parts_policies(model, policies))
    patterns = {
        f"{names[part]}.*": {"param_dtype": compute, "reduce_dtype": reduce}
        for part, (compute, reduce) in pairs
    }
    policy = MixedPrecisionPolicy.by_name(model, patterns, **UNCAST)
    shard_blocks(model, mp_policy=policy, **kwargs)


def parts_policies(model: Tower, policies: Policies) -> list[Policy]:
    # The stem's and the head's, which are of one unit, are the first and the last
    of_block = [policies] * len(model.blocks)
    return [policies[0], *itertools.chain(*of_block), policies[-1]]


def shard_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.size(1) % 4 == 0 else None


# What is set on a model once it is sharded #


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


def prefetch_what_does_not_run(model: Tower) -> None:
    """Starts gathers in forward and backward that nothing waits for."""
    first, other = (units_of(block)[0] for block in model.blocks)
    model.set_modules_to_forward_prefetch([other])
    first.set_modules_to_forward_prefetch([other])
    first.set_modules_to_backward_prefetch([other])


def freeze_first_block(model: Tower) -> None:
    model.blocks[0].requires_grad_(False)


def freeze_matrices(model: Tower) -> None:
    for part in model.blocks[0].parts:
        part.up.requires_grad_(False)
        part.down.requires_grad_(False)


reduce_unused = each_unit("set_reduce_scatter_unused_params", True)
sum_only = each_unit("set_force_sum_reduction_for_comms", True)


def divide_by_six(model: Tower) -> None:
    sum_only(model)  # gloo cannot scale while it sums, and the release would have it
    each_unit("set_gradient_divide_factor", 6.0)(model)


def keep_inputs(count: int) -> Callable[[nn.Module], None]:
    return each_unit("set_reduce_scatter_max_input_buffers", count)


def keep_two_inputs_of_one_block(model: Tower) -> None:
    """The most that any unit wants counts for all."""
    units_of(model)[1].set_reduce_scatter_max_input_buffers(2, recurse=False)


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

ALL = ("uniform", "mixed", "override")


@dataclass(frozen=True)
class Mode:
    """A setting, and all that else is as it is by default."""

    kinds: tuple[str, ...] = ("uniform", "mixed")
    dtype: torch.dtype = FP32  # of a uniform tower
    policy: Policy = (None, None)
    # Of towers with overrides: stored in fp32, bf16, fp16 and in fp16, fp32, bf16
    policies: Policies = ((FP32, None), (BF16, FP32), (None, BF16))
    kwargs: dict[str, Any] = field(default_factory=dict)  # of `fully_shard`
    shard: Callable[..., None] = shard_blocks
    prepare: Callable[[Any], None] | None = None
    step: Callable[[Any, Batches], torch.Tensor] = one_backward
    # Over two ranks the bits of a sum depend on no order, nor on any layout
    ranks: int = 2
    is_hybrid: bool = False  # of two replicas, on all four ranks


UNIFORM, OVERRIDE = ("uniform",), ("override",)
_OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
_NO_RESHARD = {"reshard_after_forward": False}
_RESHARD = {"reshard_after_forward": True}
_TO_TWO = {"reshard_after_forward": 2}
_HYBRID: dict[str, Any] = {"is_hybrid": True, "ranks": 4}

MODES: dict[str, Mode] = {
    "plain": Mode(ALL),
    "param_bf16_reduce_fp32": Mode(policy=(BF16, FP32)),
    "param_bf16": Mode(policy=(BF16, None)),
    "reduce_bf16": Mode(policy=(None, BF16)),
    "reduce_fp32": Mode(policy=(None, FP32)),
    "compute_only": Mode(OVERRIDE, policies=((BF16, None), (FP32, None), (None, None))),
    "reduce_only": Mode(OVERRIDE, policies=((None, FP32), (None, BF16), (None, FP16))),
    "one_bucket": Mode(OVERRIDE, policies=((BF16, FP32), (FP32, None), (FP16, FP32))),
    "root_only": Mode(shard=shard_root_only),
    "reshard_to_two": Mode(UNIFORM, kwargs=_TO_TWO, ranks=4),
    "accumulate": Mode(step=accumulate),
    "accumulate_in_turns": Mode(step=accumulate_in_turns),
    # In which the release fails for uniform units (pytorch 196996)
    "accumulate_in_turns_bf16": Mode(
        ("mixed",), policy=(BF16, FP32), step=accumulate_in_turns
    ),
    "accumulate_keeping_params": Mode(step=accumulate_keeping_params),
    "gradients_add_up": Mode(step=gradients_add_up),
    "several_backwards": Mode(step=two_microbatches("set_is_last_backward")),
    "two_forwards_resharded": Mode(kwargs=_RESHARD, step=two_forwards),
    "backward_twice": Mode(step=backward_twice),
    "mistargeted_prefetch": Mode(
        step=only_first_block, prepare=prefetch_what_does_not_run
    ),
    "unshard_ahead": Mode(step=unshard_ahead),
    "given_up_twice": Mode(step=give_up_twice),
    "evaluated_before": Mode(step=evaluate_before),
    "state_dict_before_backward": Mode(
        kwargs=_NO_RESHARD, step=state_dict_before_backward
    ),
    "shard_last_dim": Mode(kwargs={"shard_placement_fn": shard_last_dim}),
    "group_run_in_part": Mode(shard=shard_blocks_as_group, step=only_first_block),
    "group_run_in_chunks": Mode(
        shard=shard_blocks_as_group, step=second_block_in_chunks
    ),
    "ignored_parameters": Mode(shard=shard_blocks_without_gains),
    "unfrozen_later": Mode(prepare=freeze_first_block, step=thaw_and_freeze),
    # The release forgets the dtypes of a unit that was frozen whole (pytorch 186998)
    "unfrozen_in_part": Mode(OVERRIDE, prepare=freeze_matrices, step=thaw_and_freeze),
    "skipped_part": Mode(step=skip_one_part),
    "unused_by_rank": Mode(UNIFORM, prepare=reduce_unused, step=skip_by_rank),
    "cpu_offload_accumulate": Mode(
        ALL, policy=(BF16, FP32), kwargs=_OFFLOAD, step=accumulate
    ),
    "divide_fp16": Mode(UNIFORM, dtype=FP16, prepare=divide_by_six),
    "divide": Mode(("mixed", "override"), prepare=divide_by_six),
    "two_input_buffers_in_one_block": Mode(prepare=keep_two_inputs_of_one_block),
    "step_in_backward": Mode(prepare=step_in_backward),
    "hybrid_deferred": Mode(
        ALL, step=two_microbatches("set_requires_all_reduce"), **_HYBRID
    ),
    "replicate": Mode(shard=replicate_blocks),
}


def cut_for(mode: Mode, kind: str, *, by_dtype: bool) -> Mode:
    """
    Returns the mode with its tower cut for one of its kinds, and with ``by_dtype`` for
    the release: a unit for each dtype, or for each policy.
    """
    if kind == "override":
        cut = shard_policies if by_dtype else shard_overrides

        def shard(model: Tower, **kwargs: Any) -> None:
            cut(model, mode.policies, **kwargs)

        return replace(mode, shard=shard)
    return replace(mode, shard=BY_DTYPE[mode.shard]) if by_dtype else mode


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

    record = train_steps(model, run, range(STEPS))
    return {f"step {what}": bits for what, bits in record.items()}


def train_with(
    setter: Callable[[nn.Module], Any], case: str, rank: int, *, ranks: int = 2
) -> Record:
    """
    Trains the tower of a case, e.g. "mixed plain", over so many ranks, or over two
    replicas if its mode is hybrid, once ``setter`` has changed the sharded model.
    """
    kind, name = case.split()
    mode = MODES[name]

    def shard(model: Tower, **kwargs: Any) -> None:
        mode.shard(model, **kwargs)
        setter(model)

    model = mixed_tower() if kind == "mixed" else uniform_tower(mode.dtype)
    mesh = hybrid_mesh(2) if mode.is_hybrid else shard_mesh(ranks)
    if not mode.is_hybrid:
        rank %= ranks
    changed = replace(mode, shard=shard)
    return train(changed, model.to(DEVICE_TYPE), mesh, rank, DEVICE_TYPE)
