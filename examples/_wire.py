"""Counts what FSDP2 sends: collectives and bytes, per kind of unit and dtype."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _policies import Dtypes
from torch import nn, Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


@dataclass(frozen=True)
class Traffic:
    """Collectives, and the bytes of their buffers over all ranks together."""

    calls: float = 0
    nbytes: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.calls + other.calls, self.nbytes + other.nbytes)

    def per(self, steps: int) -> "Traffic":
        """The mean of ``steps`` steps."""
        return Traffic(self.calls / steps, self.nbytes / steps)


@dataclass
class UnitKind:
    """FSDP units of one kind, for example all blocks, and what they have sent."""

    name: str
    units: int
    unshards: int  # of one unit in one step
    world_size: int
    # Of all the units, by what they compute in and by what their gradients are sent in
    numel: Counter[torch.dtype] = field(default_factory=Counter)
    reduced_numel: Counter[torch.dtype] = field(default_factory=Counter)
    gathers: Traffic = Traffic()
    reductions: defaultdict[torch.dtype, Traffic] = field(
        default_factory=lambda: defaultdict(Traffic)
    )

    def least_gathers(self) -> Traffic:
        """One all-gather per unshard, of what the parameters compute in."""
        if self.world_size == 1:
            return Traffic()
        nbytes = sum(n * dtype.itemsize for dtype, n in self.numel.items())
        return Traffic(self.units * self.unshards, nbytes * self.unshards)

    def least_reductions(self, *dtypes: torch.dtype) -> Traffic:
        """One reduce-scatter per unit and dtype: of these dtypes, or of all."""
        if self.world_size == 1:
            return Traffic()
        held = [d for d in dtypes or self.reduced_numel if self.reduced_numel[d]]
        nbytes = sum(self.reduced_numel[d] * d.itemsize for d in held)
        return Traffic(self.units * len(held), nbytes)


def meter(
    name: str,
    units: Sequence[nn.Module],
    *,
    unshards: int,
    dtypes: Mapping[nn.Parameter, Dtypes],
) -> UnitKind:
    """Counts the collectives of ``units`` from here on.

    FSDP2 lets a unit bring its own collectives. These are the default ones, except
    that they note the buffer of each call. ``unshards`` is how often one unit has to
    gather its parameters in one step, and ``dtypes`` are those it is to do so in.
    """
    kind = UnitKind(name, len(units), unshards, dist.get_world_size())
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(_CountedAllGather(kind))
        unit.set_custom_reduce_scatter(_CountedReduceScatter(kind))
        for parameter in _managed_parameters(unit):
            kind.numel[dtypes[parameter].compute] += parameter.numel()
            kind.reduced_numel[dtypes[parameter].sent] += parameter.numel()
    return kind


def _managed_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``unit`` that no unit inside it manages."""
    nested = [m for m in unit.modules() if m is not unit and isinstance(m, FSDPModule)]
    theirs = {id(p) for m in nested for p in m.parameters()}
    return [p for p in unit.parameters() if id(p) not in theirs]


@dataclass(frozen=True)
class StepTraffic:
    """What one step sends in one way of grouping and storing the parameters."""

    label: str
    gathers: Traffic
    reductions: Traffic


def measured(label: str, kinds: Iterable[UnitKind], steps: int) -> StepTraffic:
    """What the units have sent in ``steps`` steps, per step."""
    gathers, reductions = Traffic(), Traffic()
    for kind in kinds:
        gathers += kind.gathers
        reductions += sum(kind.reductions.values(), Traffic())
    return StepTraffic(label, gathers.per(steps), reductions.per(steps))


def one_unit_per_dtype(label: str, kinds: Iterable[UnitKind]) -> StepTraffic:
    """What the same parameters need where each unit is split up by dtype."""
    gathers, reductions = Traffic(), Traffic()
    for kind in kinds:
        least = kind.least_gathers()
        gathers += Traffic(least.calls * len(kind.numel), least.nbytes)
        reductions += kind.least_reductions()
    return StepTraffic(label, gathers, reductions)


class _CountedAllGather(DefaultAllGather):
    def __init__(self, kind: UnitKind) -> None:
        super().__init__()
        self.kind = kind

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.kind.gathers += Traffic(1, output_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _CountedReduceScatter(DefaultReduceScatter):
    def __init__(self, kind: UnitKind) -> None:
        super().__init__()
        self.kind = kind

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.kind.reductions[input_tensor.dtype] += Traffic(1, input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)

    def exchange(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup
    ) -> None:
        """
        Is called in place of the above where ``grad_comm_dtype`` is set: with bytes
        (uint8) if it is several dtypes.
        """
        self.kind.reductions[input_tensor.dtype] += Traffic(1, input_tensor.nbytes)
        super().exchange(output_tensor, input_tensor, group)
