"""
Where what is not needed to train comes in.

[Note: Doors]
A unit gathers and reduces without comparing ranks, without explaining errors, without
tables and without policies for single parameters. Each of these is a file of its own,
which knows no parameter group, and comes in through one attribute of ``doors``. What
stands there by default does nothing. ``__init__`` of the package opens the doors, so
that leaving a file out means to leave its two lines there out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from ._fsdp_api import AllGather, MixedPrecisionPolicy, ReduceScatter
from ._fsdp_param import FSDPParam
from ._fsdp_scaling import Factors
from ._fsdp_unit import UnitBucket, UnitParams


@dataclass(frozen=True)
class DescribedUnit:
    """A unit as it is when somebody asks."""

    fqn: str | None  # None before the root has given it one
    params: UnitParams
    # Of each parameter: in the unit's modules, and in the model
    names: tuple[str, ...]
    fqns: tuple[str, ...]
    device: torch.device
    # Ranks to gather over, and all data-parallel ones
    gather_world_size: int
    world_size: int
    # The user's own, and what it means for a reduction in some dtype, with the dtype
    # that gradients are sent in if that is another
    divide_factor: float | None
    divide_factors: Callable[..., Factors]
    comms: tuple[AllGather, ReduceScatter]
    # Whether put-off all-reduces have left something to add to
    has_partial_reduces: bool


# Ranks #


class Agreement:
    """Sees to it that all ranks are about to do the same for one unit."""

    # Whether nothing has to be compared before a gather
    on_gathers = True

    def __init__(self, describe: Callable[[], DescribedUnit]):
        pass

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""

    def check_reduction(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[UnitBucket],
        comm: ReduceScatter | None = None,
    ) -> None:
        """
        Raises if the ranks of ``group`` disagree, which are about to reduce ``buckets``
        by ``comm``, or without one by all-reduces.
        """

    def tell(
        self, error: BaseException, buckets: Sequence[UnitBucket] | None = None
    ) -> None:
        """Notes on an error in a gather, or in a reduction, which unit's it was."""


# Errors #


class Sharding(NamedTuple):
    """What fails is to shard a parameter."""

    param: nn.Parameter
    name: str
    # From parameter and place, with the other arguments of `FSDPParam`
    make_fsdp_param: functools.partial[FSDPParam]


class Taking(NamedTuple):
    """What fails is to take what a module has under a parameter's name."""

    fsdp_param: FSDPParam
    name: str


class Step(NamedTuple):
    """What fails is a unit's gather, or the reduction of a bucket."""

    unit: DescribedUnit
    failed: UnitBucket | None = None
    grads: Sequence[torch.Tensor] = ()  # those that have not been copied in


class Errors:
    """Finds what is wrong with what users give, and what an error was about."""

    def check_setting(self, setter: str, value: Any, unit: str) -> None:
        """Raises if ``value``, which ``setter`` was given, cannot work."""

    def check_param(self, fsdp_param: FSDPParam, name: str) -> None:
        """Raises if a parameter, as it was just taken, cannot work."""

    def explain(self, error: Exception, at: Sharding | Taking | Step) -> Exception:
        """Returns ``error``, or one that says more, which it is the cause of."""
        return error


@dataclass
class Doors:
    agreement: type[Agreement] = Agreement  # of each unit
    errors: Errors = Errors()
    # From a unit's policy, its parameters, their names and the device: each parameter's
    # own, and whether these are final before the unit has a name
    policies_of: Callable[..., tuple[list[MixedPrecisionPolicy], bool]] = (
        lambda policy, params, *_: ([policy] * len(params), True)
    )
    # Is told of each unit at its first forward, by a function that describes it
    show_layout: Callable[[Callable[[], DescribedUnit]], None] = lambda describe: None


doors = Doors()
