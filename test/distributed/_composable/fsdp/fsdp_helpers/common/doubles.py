"""Stand-ins for what others bring, and who looks on. The release runs them, too."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def dispatched() -> Iterator[list[str]]:
    names: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watching():
        yield names


def copying_unobserved() -> contextlib.AbstractContextManager:
    """Lets the branch copy as it does while nobody looks at it."""
    stack = contextlib.ExitStack()
    for name in ("_fsdp_collectives", "_fsdp_reduce"):
        with contextlib.suppress(AttributeError, ImportError):  # as in the release
            module = importlib.import_module(f".{name}", _fsdp_collectives.__package__)
            patch = mock.patch.object(module, "gets_operators", lambda _: False)
            stack.enter_context(patch)
    return stack


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


class Gather(AllGather):
    """Uses nothing of the default one."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if input_tensor.data_ptr() - output_tensor.data_ptr() != (
            group.rank() * input_tensor.nbytes
        ):
            raise AssertionError("A rank's input is no part of the output")
        if torch.is_grad_enabled():
            raise AssertionError("A gather is no part of the graph")
        return dist.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class Scatter(ReduceScatter):
    """Notes the groups that it sends over."""

    groups: set[str] = set()  # by description, of all in this process
    allocate = Gather.allocate

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        Scatter.groups.add(group.group_desc)
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class Kept:
    """The same bytes again and again: whoever still has them sees that they are gone."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(size).numel() * dtype.itemsize
        if self.bytes.numel() < nbytes:
            self.bytes = torch.empty(max(nbytes, 1 << 12), dtype=torch.uint8)
        return self.bytes.fill_(77)[:nbytes].view(dtype).view(tuple(size))


class KeptGather(Gather):
    """One for each unit: a gather may be started before the last one is used."""

    def __init__(self) -> None:
        self.kept = Kept()

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return self.kept.view(size, dtype)


class KeptScatter(Scatter):
    """May serve all units: gives out an input and a result in turns."""

    def __init__(self, keeps_results: bool = False) -> None:
        self.inputs, self.results = Kept(), Kept() if keeps_results else None
        self.is_result = True

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        self.is_result = not self.is_result
        kept = self.results if self.is_result else self.inputs
        if kept is None:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        return kept.view(size, dtype)


class SymmMemStub:
    """Stands in for symmetric memory, and notes what is asked of it."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self.registered: list[tuple[str, int]] = []
        self.pools = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[SymmMemStub]:
        def rendezvous(tensor: torch.Tensor, group: str) -> None:
            self.registered.append((str(tensor.dtype), tensor.numel()))

        @contextlib.contextmanager
        def use(pool: object) -> Iterator[None]:
            self.pools += 1
            yield

        with (
            mock.patch.object(symm_mem, "set_backend", self.backends.append),
            mock.patch.object(symm_mem, "rendezvous", rendezvous),
            mock.patch.object(symm_mem, "get_mem_pool", lambda device: None),
            # Which of them it is asked of depends on the release
            mock.patch.object(torch.cuda, "use_mem_pool", use),
            mock.patch.object(torch.cpu, "use_mem_pool", use, create=True),
        ):
            yield self


class OneBuffer(KeptScatter, _fsdp_collectives.DefaultReduceScatter):
    """Gives out the same memory for every input, as communication pools do."""
