"""
Wrong uses that are found between ``fully_shard`` and the end of the first forward,
or when a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_wrong_uses.run import BF16, Case, DIM, Errors, INT32, Run, Scaled

import torch
import torch.nn as nn
from torch.func import functional_call


STARTING = Errors()


def changed(change: Callable[[Run, Scaled], object], call: str = "forward") -> Case:
    """Of a model whose second block is changed between `fully_shard` and forward."""

    def case(run: Run) -> Callable[[], object]:
        model = run.model()
        change(run, run.blocks[1])
        if call == "unshard":
            return run.blocks[1].unshard
        return lambda: model(run.input())

    return case


def replaced(value: Callable[[Run], Any], *calls: str) -> Case:
    def change(run: Run, block: Scaled) -> None:
        for call in calls:
            getattr(block, call)()
        del block.gain
        block.gain = value(run)

    return changed(change)


def with_shard(numel: int) -> Case:
    def change(run: Run, block: Scaled) -> None:
        block.gain._local_tensor = run.ones(numel)

    return changed(change)


def with_data(data: Callable[[Run, torch.Tensor], torch.Tensor]) -> Case:
    def change(run: Run, block: Scaled) -> None:
        block.gain.data = data(run, block.gain.data)

    return changed(change)


# Parameters #


def one_on_meta(run: Run) -> Callable[[], object]:
    other = nn.Parameter(torch.ones(DIM, device="meta"))
    return lambda: run.fully_shard(Scaled(other=other))(run.input())


ON_META = (
    "FSDP parameters should be materialized from meta device before training, but the "
    "following were still on meta device: [{}]…Call module.to_empty(device=...)"
)
STARTING.add(
    RuntimeError,
    ON_META.format("'1.weight', '1.gain'"),
    meta_at_forward=changed(lambda run, block: block.to("meta")),
)
STARTING.add(RuntimeError, ON_META.format("'other'"), one_on_meta=one_on_meta)
STARTING.add(
    RuntimeError,
    ON_META.format("'weight of FSDPScaled', 'gain of FSDPScaled'"),
    meta_at_unshard=changed(lambda run, block: block.to("meta"), "unshard"),
)
STARTING.add(
    RuntimeError,
    "1.gain is torch.float32 [… with a shard that is …Resize it before fully_shard",
    resized=with_data(lambda run, data: run.ones(7)),
    larger_shard=with_shard(7),
    smaller_shard=with_shard(1),
    replicated=replaced(lambda run: nn.Parameter(run.replicated())),
)
STARTING.add(
    RuntimeError,
    "1.gain is torch.bfloat16 [6] with a shard that is torch.float32…cast it by "
    "module.to(dtype)",
    data_is_cast=with_data(lambda run, data: data.to(BF16)),
)
STARTING.add(
    AttributeError,
    "1.gain must be the DTensor that fully_shard made of it…Replace or delete it before "
    "fully_shard",
    plain_parameter=replaced(lambda run: nn.Parameter(run.ones(DIM))),
    plain_tensor=replaced(lambda run: run.ones(DIM)),
    after_unshard=replaced(lambda run: run.ones(DIM), "unshard", "reshard"),
    deleted=changed(lambda run, block: delattr(block, "gain")),
    set_to_none=changed(lambda run, block: setattr(block, "gain", None)),
)


def loads_plain_tensor(run: Run) -> Callable[[], object]:
    model = run.trained()
    state = model.state_dict() | {"1.gain": run.ones(DIM)}
    return lambda: model.load_state_dict(state, assign=True)


STARTING.add(
    AttributeError,
    "1.gain must be the DTensor that fully_shard made of it…by set_model_state_dict",
    loads_plain_tensor=loads_plain_tensor,
)


def functional_call_first(run: Run) -> Callable[[], object]:
    model = run.model()
    computed = {"1.gain": model[1].gain * 2}
    return lambda: functional_call(model, computed, (run.input(),))


STARTING.add(
    RuntimeError,
    "1.gain is computed from other tensors…run a forward before a functional_call",
    functional_call_first=functional_call_first,
)
STARTING.add(
    ValueError,
    "grad_dtype of 1.gain is torch.int32…set a floating-point dtype",
    integer_grad_dtype=changed(
        lambda run, block: setattr(block.gain, "grad_dtype", INT32)
    ),
)

# Units #


def foreign_prefetch(run: Run) -> Callable[[], object]:
    model = run.model()
    other = run.fully_shard(Scaled().to(run.device))
    run.blocks[0].set_modules_to_forward_prefetch([other])
    return lambda: model(run.input())


STARTING.add(
    AttributeError,
    "A unit cannot be prefetched before a root…prefetch units of the same root",
    foreign_prefetch=foreign_prefetch,
)
