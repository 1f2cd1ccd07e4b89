"""
Wrong uses that are found between ``fully_shard`` and the end of the first forward,
or when a state dict is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from fsdp_wrong_uses.rows import (
    add_each,
    BF16,
    Case,
    DIM,
    INT32,
    Run,
    Scaled,
    STARTING,
    wrong,
)

import torch
import torch.nn as nn
from torch.distributed.tensor import Shard
from torch.func import functional_call


def before_the_first(
    change: Callable[[Run, Scaled], object], call: str = "forward"
) -> Case:
    """Of a model whose second block is changed between `fully_shard` and forward."""

    def case(run: Run) -> Callable[[], object]:
        model = run.model()
        change(run, run.blocks[1])
        if call == "unshard":
            return run.blocks[1].unshard
        return lambda: model(run.input())

    return case


def replace(value: Callable[[Run], Any], name: str = "gain") -> Case:
    def change(run: Run, block: Scaled) -> None:
        delattr(block, name)
        setattr(block, name, value(run))

    return before_the_first(change)


def on_meta(run: Run, block: Scaled) -> None:
    block.to("meta")


def resized(run: Run, block: Scaled) -> None:
    block.gain.data = torch.ones(7, device=run.device)


def resized_shard(run: Run, block: Scaled) -> None:
    block.gain._local_tensor = torch.ones(7, device=run.device)


def cast_data(run: Run, block: Scaled) -> None:
    block.gain.data = block.gain.data.to(BF16)


def forgotten_shard(run: Run, block: Scaled) -> None:
    block.gain._local_tensor = torch.ones(1, device=run.device)


add_each(
    STARTING,
    [
        (
            "resharded_across",
            "a dim other than 0 is sharded, and `reshard_after_forward` is a number "
            "that dim 0 does not divide by",
            lambda run: (
                lambda: run.fully_shard(
                    nn.Linear(8, 3, bias=False, device=run.device),
                    shard_placement_fn=lambda p: Shard(1),
                    reshard_after_forward=2,
                )
            ),
            ValueError,
            "weight of Linear of size (3, 8) is sharded on dim 1",
        )
    ],
    found="`fully_shard`",
    do="let reshard_after_forward be True or False, or a factor of that dim",
    about="weight of Linear",
)
add_each(
    STARTING,
    [
        (
            "meta_at_forward",
            "parameters are on the meta device",
            before_the_first(on_meta),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['1.weight', "
            "'1.gain']",
        )
    ],
    found="first forward",
    do="Call module.to_empty(device=...)",
    about="'1.gain'",
)
add_each(
    STARTING,
    [
        (
            "one_on_meta",
            "one parameter is on the meta device, the others are not",
            lambda run: (
                lambda: run.fully_shard(
                    Scaled(other=nn.Parameter(torch.ones(DIM, device="meta")))
                )(run.input())
            ),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['other']",
        )
    ],
    found="first forward",
    do="Call module.to_empty(device=...)",
    about="'other'",
)
add_each(
    STARTING,
    [
        (
            "meta_at_unshard",
            "the same, with `unshard` before a forward",
            before_the_first(on_meta, "unshard"),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['weight of "
            "FSDPScaled', 'gain of FSDPScaled']",
        )
    ],
    found="`unshard`",
    do="Call module.to_empty(device=...)",
    about="gain of FSDPScaled",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            case,
            RuntimeError,
            "1.gain is a DTensor of size",
        )
        for name, use, case in (
            (
                "resized",
                "a parameter's `data` is set to another size",
                before_the_first(resized),
            ),
            (
                "larger_shard",
                "a shard is set to a larger one",
                before_the_first(resized_shard),
            ),
            (
                "smaller_shard",
                "a shard is set to a smaller one",
                before_the_first(forgotten_shard),
            ),
            (
                "replicated",
                "a parameter is replaced by a replicated DTensor",
                replace(lambda run: nn.Parameter(run.replicated())),
            ),
        )
    ],
    found="first forward",
    do="Change its size before fully_shard, and load what is sharded alike",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            "casts_data_first",
            "a parameter's `data` is cast",
            before_the_first(cast_data),
            RuntimeError,
            "1.gain is torch.bfloat16 now, but its shard is torch.float32",
        )
    ],
    found="first forward",
    do="Cast by module.to(dtype), before the first forward",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            replace(value),
            AttributeError,
            "1.gain must be the DTensor that fully_shard made of it",
        )
        for name, use, value in (
            (
                "plain_parameter",
                "a parameter is replaced by a plain one",
                lambda run: nn.Parameter(torch.ones(DIM, device=run.device)),
            ),
            (
                "plain_tensor",
                "a parameter is replaced by a tensor",
                lambda run: torch.ones(DIM, device=run.device),
            ),
        )
    ],
    found="first forward",
    do="Replace it before fully_shard, or copy into it",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            before_the_first(change),
            AttributeError,
            "1.gain is gone. Put it back",
        )
        for name, use, change in (
            (
                "deleted",
                "a parameter is deleted",
                lambda run, block: delattr(block, "gain"),
            ),
            (
                "set_to_none",
                "a parameter is set to `None`",
                lambda run, block: setattr(block, "gain", None),
            ),
        )
    ],
    found="first forward",
    do="delete it before fully_shard",
    about="1.gain",
)


@wrong(
    STARTING,
    "bf16 activations meet an fp32 matrix",
    "first forward",
    RuntimeError,
    "mat1 and mat2 must have the same dtype",
    "cast them in that module: `x.to(self.weight.dtype)`",
    is_ours=False,
)
def bf16_meets_fp32(run: Run) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(DIM, DIM, dtype=BF16), nn.Linear(DIM, DIM))
    run.fully_shard(model.to(run.device))
    return lambda: model(run.input().to(BF16))


@wrong(
    STARTING,
    "`grad_dtype` is an integer dtype",
    "first forward",
    ValueError,
    "grad_dtype of 1.gain is torch.int32",
    "set a floating-point dtype, or leave it as it was",
    "1.gain",
)
def integer_grad_dtype(run: Run) -> Callable[[], object]:
    model = run.model()
    run.blocks[1].gain.grad_dtype = INT32
    return lambda: model(run.input())


@wrong(
    STARTING,
    "a parameter is in two units",
    "first forward",
    ValueError,
    "Parameter '1.gain' is shared with a parameter already managed by another FSDP",
    "fully_shard([module_a, module_b])",
    "1.gain",
)
def in_two_units(run: Run) -> Callable[[], object]:
    blocks = [Scaled().to(run.device) for _ in range(2)]
    blocks[1].gain = blocks[0].gain
    for block in blocks:
        run.fully_shard(block)
    model = run.fully_shard(nn.Sequential(*blocks))
    return lambda: model(run.input())


@wrong(
    STARTING,
    "a unit runs before the root around it",
    "the root's forward",
    RuntimeError,
    "FSDP state has already been lazily initialized for 1",
    "FSDP requires running forward through the root module first",
    "for 1",
)
def child_runs_first(run: Run) -> Callable[[], object]:
    model = run.model()
    run.blocks[1](run.input())
    return lambda: model(run.input())


@wrong(
    STARTING,
    "the root is a unit of several modules",
    "first forward",
    RuntimeError,
    "FSDP requires a single root module but got (FSDPScaled(), FSDPScaled())",
    "shard a module around them, and run that",
    "FSDPScaled",
    is_ours=False,
)
def several_roots(run: Run) -> Callable[[], object]:
    blocks = [Scaled().to(run.device) for _ in range(2)]
    run.fully_shard(blocks)
    return lambda: blocks[0](run.input())


@wrong(
    STARTING,
    "a unit of another root is prefetched",
    "first forward",
    AttributeError,
    "Unit 'FSDPScaled' cannot be prefetched",
    "prefetch units of the same root",
    "FSDPScaled",
)
def foreign_prefetch(run: Run) -> Callable[[], object]:
    model = run.model()
    other = run.fully_shard(Scaled().to(run.device))
    run.blocks[0].set_modules_to_forward_prefetch([other])
    return lambda: model(run.input())


def loading(change: Callable[[Run, dict[str, Any]], object], assign: bool) -> Case:
    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        state = dict(model.state_dict())
        change(run, state)
        return lambda: model.load_state_dict(state, assign=assign)

    return case


def load_plain(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = torch.ones(DIM, device=run.device)


def load_replicated(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = run.replicated()


def load_another_size(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = run.replicated(DIM + 1)


add_each(
    STARTING,
    [
        (
            "loads_plain_tensor",
            "a plain tensor is loaded with `assign=True`",
            loading(load_plain, assign=True),
            AttributeError,
            "1.gain must be the DTensor that fully_shard made of it",
        )
    ],
    found="`load_state_dict`",
    do="set_model_state_dict(..., options=StateDictOptions(full_state_dict=True))",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            "loads_replicated",
            "a replicated DTensor is loaded with `assign=True`",
            loading(load_replicated, assign=True),
            RuntimeError,
            "1.gain is a DTensor of size",
        )
    ],
    found="`load_state_dict`",
    do="load what is sharded alike",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            "loads_another_size",
            "a DTensor of another size is loaded",
            loading(load_another_size, assign=False),
            RuntimeError,
            "Error(s) in loading state_dict for FSDPSequential",
        ),
    ],
    found="`load_state_dict`",
    do="load DTensors of the model's sizes",
    about="1.gain",
    is_ours=False,
)
add_each(
    STARTING,
    [
        (
            "copies_plain_tensor",
            "a plain tensor is loaded without `assign=True`",
            loading(load_plain, assign=False),
            RuntimeError,
            "Error(s) in loading state_dict for FSDPSequential",
        ),
    ],
    found="`load_state_dict`",
    do="`set_model_state_dict(..., options=StateDictOptions(full_state_dict=True))`",
    about="1.gain",
    is_ours=False,
)


@wrong(
    STARTING,
    "the first forward is a `functional_call` with values that are computed",
    "first forward",
    RuntimeError,
    "1.gain is computed from other tensors",
    "run a first forward before a functional_call",
    about="1.gain",
)
def functional_call_first(run: Run) -> Callable[[], object]:
    model = run.model()
    computed = {"1.gain": model[1].gain * 2}
    return lambda: functional_call(model, computed, (run.input(),))


@wrong(
    STARTING,
    "a sharded model is copied",
    "`deepcopy`",
    AssertionError,
    "FSDP does not support deepcopy",
    "copy it before `fully_shard`, or save a state dict",
    is_ours=False,
)
def copied(run: Run) -> Callable[[], object]:
    model = run.model()
    return lambda: copy.deepcopy(model)


@wrong(
    STARTING,
    "`reset_iter_state` of a unit that is not the root",
    "`reset_iter_state`",
    RuntimeError,
    "reset_iter_state must be called on the root FSDP module",
    "call it on the module whose forward ran first",
    is_ours=False,
)
def reset_of_a_child(run: Run) -> Callable[[], object]:
    run.trained()
    return run.blocks[1].reset_iter_state
