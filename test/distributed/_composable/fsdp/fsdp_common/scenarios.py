"""
Scenarios that four ranks run with whatever torch is imported, the release or this
branch, so that a test can compare what came of them. A scenario that raises is saved
as its error, so that each of them is told apart.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    gradients,
    loss_of,
    LR,
    parameters,
    Record,
    shard_stack,
    Stack,
    stack,
)
from fsdp_common.run_ranks import run_ranks

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


RANKS = 4
COPIES = "torch.distributed.fsdp._fully_shard._fsdp_copies"
IS_BRANCH = find_spec(COPIES) is not None
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "bf16": MixedPrecisionPolicy(BF16),
    "reduce_bf16": MixedPrecisionPolicy(None, BF16),
}


@dataclass(frozen=True)
class Place:
    """What a scenario runs with."""

    rank: int  # in the mesh
    mesh: DeviceMesh  # of all ranks, or of the two that share a scenario
    pairs: DeviceMesh  # of all ranks, in two dims
    is_mixed: bool = False

    def sharded(self, policy: str = "none", model: Any = None, **kwargs: Any) -> Stack:
        kwargs = {"mesh": self.mesh, "mp_policy": POLICIES[policy]} | kwargs
        return shard_stack(stack() if model is None else model, **kwargs)

    def mixed(self, policy: str = "none", **kwargs: Any) -> Stack:
        return self.sharded(policy, stack((FP32, BF16)), **kwargs)

    def of_kind(self, policy: str = "none", **kwargs: Any) -> Stack:
        """Returns a mixed model if the scenario is to run with one."""
        make = self.mixed if self.is_mixed else self.sharded
        return make(policy, **kwargs)


# Runs the step of a number, and returns the loss where there is one
Step = Callable[[nn.Module, Place, int], Any]


@dataclass(frozen=True)
class Scenario:
    run: Callable[[Place], Record]
    is_mixed: bool = False
    is_on_release: bool = True
    by_halves: bool = False  # run by two of the ranks, while the others run another


class Scenarios(dict[str, Scenario]):
    """Those of one script, by name."""

    def on_both(self, run: Callable[[Place], Record]) -> Callable[[Place], Record]:
        self[run.__name__] = Scenario(run)
        return run

    def on_branch(self, run: Callable[[Place], Record]) -> Callable[[Place], Record]:
        self[run.__name__] = Scenario(run, is_on_release=False)
        return run

    def of_both_kinds(
        self, run: Callable[[Place], Record]
    ) -> Callable[[Place], Record]:
        """Lets the branch run it with mixed units as well, which the release refuses."""
        name = f"mixed_{run.__name__}"
        self[name] = Scenario(run, is_mixed=True, is_on_release=False)
        return self.on_both(run)

    def names(self, is_on_release: bool) -> list[str]:
        return [n for n, each in self.items() if each.is_on_release == is_on_release]

    def run_all(self, args: argparse.Namespace, rank: int) -> dict[str, Record]:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (RANKS,))
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        whole, half = Place(rank, mesh, pairs), Place(rank % 2, pairs["shard"], pairs)
        results: dict[str, Record] = {}
        turns = itertools.cycle(range(2))
        for name, scenario in self.items():
            is_asked_for = not args.only or name in args.only
            if not is_asked_for or not (IS_BRANCH or scenario.is_on_release):
                continue
            if scenario.by_halves and next(turns) != rank // 2:
                continue  # the other half's
            place = half if scenario.by_halves else whole
            try:
                results[name] = scenario.run(replace(place, is_mixed=scenario.is_mixed))
            except Exception as error:
                # All ranks do the same, so that they also fail alike
                results[name] = {"error": f"{type(error).__name__}: {error}"}
        return results

    def main(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--out", required=True, help="folder for a file by rank")
        parser.add_argument("--only", nargs="+", help="scenarios to run, default all")
        run_ranks(self.run_all, parser.parse_args(), RANKS)


def one_backward(model: nn.Module, place: Place, step: int) -> torch.Tensor:
    loss = loss_of(model(batch_of(step, place.rank)))
    loss.backward()
    return loss


def train(
    model: nn.Module,
    place: Place,
    *,
    steps: range = range(2),
    run: Step = one_backward,
) -> Record:
    """Returns each step's loss, sharded gradients and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    record: Record = {}
    for step in steps:
        record[f"{step} loss"] = digest(run(model, place, step))
        record |= {f"{step} {name}": bits for name, bits in gradients(model)}
        optimizer.step()
        optimizer.zero_grad()
        record |= {f"{step} {name}": bits for name, bits in parameters(model)}
    return record


def describe(value: Any) -> Any:
    """Returns what can be compared between processes."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape)
    if isinstance(value, list):
        return [describe(each) for each in value]
    if isinstance(value, tuple):
        return type(value).__name__, [describe(each) for each in value]
    plain_types = (str, bool, int, float, torch.dtype, torch.device, type(None))
    return str(value) if isinstance(value, plain_types) else type(value).__name__
