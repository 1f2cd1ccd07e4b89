"""The collectives of one step, seen where FSDP2 calls torch.distributed, and ways to
have fewer of them."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy


class Call(NamedTuple):
    """One collective."""

    kind: str
    nbytes: int  # of its larger buffer
    ranks: int
    stride: int  # from one rank of its group to the next


# By function: the collective, and the position of its larger buffer. What releases call
# differs in name.
CALLED = {
    "all_gather_single": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "all_to_all_single": ("all-to-all", 1),
    "all_reduce": ("all-reduce", 0),
}


@contextmanager
def seen_by(see: Callable[[Call], None]) -> Iterator[None]:
    """Shows ``see`` each collective of this process before it is called."""

    inside: list[str] = []  # of one that calls another of them

    def shown(original: Callable[..., Any], kind: str, position: int) -> Any:
        signature = inspect.signature(original)
        buffer = [*signature.parameters][position]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            ranks = dist.get_process_group_ranks(given.get("group") or dist.group.WORLD)
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            see(Call(kind, given[buffer].nbytes, len(ranks), stride))
            inside.append(kind)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        return call

    originals = {name: getattr(dist, name) for name in CALLED if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, shown(original, *CALLED[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# Ways to train units of several dtypes #

TODAY = "default"
EXCHANGED = "grad_comm_dtype"  # as wide as the gradient
JOINED = "set_reduce_bucket_cap"
BOTH = "both"
UPCAST = "all fp32"
PER_DTYPE = "one unit per dtype"

EXCHANGES = (EXCHANGED, BOTH)
JOINS = (JOINED, BOTH)


def prepared(
    model: nn.Module, way: str, policy: MixedPrecisionPolicy | None = None
) -> MixedPrecisionPolicy:
    """Casts a model that is not yet sharded, if the way is to. Returns its policy."""
    policy = policy or MixedPrecisionPolicy()
    if way == UPCAST:
        model.float()
    if way in EXCHANGES:
        policy = replace(policy, grad_comm_dtype_override_fn=lambda p: p.dtype)
    return policy


def finished(model: nn.Module, way: str) -> nn.Module:
    """Sets what is set of units that are there."""
    if way in JOINS:
        from torch.distributed.fsdp import set_reduce_bucket_cap

        set_reduce_bucket_cap(model)
    return model


def sharded(
    blocks: Sequence[nn.Module],
    way: str,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Makes each block a unit, or one for each of its dtypes."""
    model = nn.Sequential(*blocks)
    policy = prepared(model, way, policy)
    for block in model:
        second: list[nn.Module] = []
        if way == PER_DTYPE:
            second = block.second_unit()  # type: ignore[operator]
        if second:
            fully_shard(second, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return finished(model, way)
