"""
Shows faults of the release that lie outside of this branch's files, one after the
other: what is done, and what comes of it. Uniform units have them all.

    PYTHONPATH=build/base python tools/release_faults.py
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any


try:
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        StateDictOptions,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as missing:
    raise SystemExit(f"error: {missing}: run `make setup` first") from None


RANKS = 4
FAULTS: list[Callable[[], str]] = []


def fault(shown: Callable[[], str]) -> Callable[[], str]:
    FAULTS.append(shown)
    return shown


def stepped(module: Any, **kwargs: Any) -> Any:
    """Returns the module, sharded, with gradients."""
    fully_shard(module, **kwargs)
    module(torch.ones(2, module.in_features)).sum().backward()
    return module


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise SystemExit("nothing is raised: is this another release?")


@fault
def views_out_of_bounds() -> str:
    """`Shard(1)`, and a number for `reshard_after_forward` that dim 0 does not divide by"""
    linear = nn.Linear(8, 3, bias=False)
    placed = {"shard_placement_fn": lambda _: Shard(1)}
    return raised_by(lambda: stepped(linear, reshard_after_forward=2, **placed))


@fault
def forgets_requires_grad() -> str:
    """`requires_grad_(True)` on an unsharded parameter, and the next unshard"""
    linear: Any = nn.Linear(4, 4)
    linear.weight.requires_grad_(False)
    fully_shard(linear)
    linear.unshard()
    linear.weight.requires_grad_(True)
    linear.reshard()
    linear.unshard()
    return f"requires_grad is {linear.weight.requires_grad}"


@fault
def counts_as_initialized() -> str:
    """a first forward on the meta device, then `to_empty`, and another"""
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    fully_shard(linear)
    raised_by(lambda: linear(torch.ones(1, 4)))
    linear.to_empty(device="cpu")
    return raised_by(lambda: linear(torch.ones(1, 4)))


@fault
def adafactor() -> str:
    """`torch.optim.Adafactor` over sharded parameters"""
    params = stepped(nn.Linear(4, 4)).parameters()
    return raised_by(torch.optim.Adafactor(params).step)


@fault
def fused_sgd() -> str:
    """`torch.optim.SGD(..., fused=True)` over sharded parameters"""
    params = stepped(nn.Linear(4, 4)).parameters()
    return raised_by(torch.optim.SGD(params, fused=True).step)


@fault
def norm_of_nothing() -> str:
    """`clip_grad_norm_` with `norm_type=math.inf`, on a rank that has no row"""
    params = [*stepped(nn.Linear(4, 1)).parameters()]
    clip = nn.utils.clip_grad_norm_
    return raised_by(lambda: clip(params, 1.0, norm_type=math.inf))


@fault
def replaces_what_it_is_given() -> str:
    """`set_model_state_dict` with `broadcast_from_rank0`, and the dict after it"""
    linear = nn.Linear(4, 4)
    fully_shard(linear)
    given: dict[str, Any] = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(linear, given, options=options)
    return f"its entries are {', '.join(type(t).__name__ for t in given.values())}"


def main() -> None:
    warnings.simplefilter("ignore")
    for shown in FAULTS:
        # The last rank has no part of a small parameter
        rank = 0 if shown is replaces_what_it_is_given else RANKS - 1
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        print(f"{shown.__doc__}:\n    {shown()}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
