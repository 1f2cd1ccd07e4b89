"""The collectives of one step, seen where FSDP2 calls torch.distributed."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class Call(NamedTuple):
    """One collective."""

    kind: str
    nbytes: int  # of its larger buffer, or buffers
    ranks: int
    stride: int  # from one rank of its group to the next

    @property
    def sent_nbytes(self) -> float:
        """What a rank sends in a ring: an all-reduce is a reduce-scatter and a gather."""
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.nbytes / self.ranks * (self.ranks - 1)


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
# Methods of a process group, by which its larger buffers are the first or second argument
COALESCED = {
    "allgather_into_tensor_coalesced": ("all-gather", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1),
}


def call_of(kind: str, group: dist.ProcessGroup, buffers: Iterable[Tensor]) -> Call:
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return Call(kind, sum(buffer.nbytes for buffer in buffers), len(ranks), stride)


@contextlib.contextmanager
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
            group: Any = given.get("group") or dist.group.WORLD
            see(call_of(kind, group, [given[buffer]]))
            inside.append(kind)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        return call

    def shown_method(original: Callable[..., Any], kind: str, position: int) -> Any:
        @functools.wraps(original)
        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            see(call_of(kind, group, args[position]))
            return original(group, *args)

        return call

    with contextlib.ExitStack() as patches:
        for owner, called, show in (
            (dist, CALLED, shown),
            (dist.ProcessGroup, COALESCED, shown_method),
        ):
            for name in filter(functools.partial(hasattr, owner), called):
                replaced = show(getattr(owner, name), *called[name])
                patches.enter_context(mock.patch.object(owner, name, replaced))
        yield
