"""The collectives of one step, seen where FSDP2 calls torch.distributed."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist


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
