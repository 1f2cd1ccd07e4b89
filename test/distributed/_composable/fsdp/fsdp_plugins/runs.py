"""
What the scenarios of ``scenarios.py`` run on: sharded stacks of layers, steps
of training, and functions that stand in for those of a plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

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

import torch
import torch._dynamo  # the first hook would, in each rank anew
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


RANKS = 4
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "bf16": MixedPrecisionPolicy(BF16),
    "reduce_bf16": MixedPrecisionPolicy(None, BF16),
}


@dataclass(frozen=True)
class Place:
    rank: int
    mesh: DeviceMesh  # of all ranks
    pairs: DeviceMesh  # of all ranks, in two dims

    def sharded(self, policy: str = "none", model: Any = None, **kwargs: Any) -> Stack:
        kwargs = {"mesh": self.mesh, "mp_policy": POLICIES[policy]} | kwargs
        return shard_stack(stack() if model is None else model, **kwargs)

    def mixed(self, policy: str = "none", **kwargs: Any) -> Stack:
        return self.sharded(policy, stack((FP32, BF16)), **kwargs)


Scenario = Callable[[Place], Record]
Step = Callable[[Stack, Place, int], torch.Tensor]

SCENARIOS: dict[str, Scenario] = {}
# Of units with several dtypes
MIXED: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def mixed(run: Scenario) -> Scenario:
    MIXED[run.__name__] = run
    return run


def one_backward(model: Stack, place: Place, step: int) -> torch.Tensor:
    loss = loss_of(model(batch_of(step, place.rank)))
    loss.backward()
    return loss


def train(
    model: Stack, place: Place, *, steps: range = range(2), run: Step = one_backward
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


@contextlib.contextmanager
def replaced(owner: Any, **new: Any) -> Iterator[None]:
    """Replaces attributes that must be there, and puts them back."""
    with contextlib.ExitStack() as patches:
        for name, value in new.items():
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape)
    if isinstance(value, tuple):
        return type(value).__name__, [describe(each) for each in value]
    return type(value).__name__


def gather_by_hand(group: FSDPParamGroup, *, by_keyword: bool = False) -> None:
    """Unshards with the functions alone, as a test or a backend of one's own does."""
    stream = torch.cpu.current_stream()
    process_group = group.mesh_info.shard_process_group
    comm = _fsdp_collectives.DefaultAllGather()
    if by_keyword:
        result = _fsdp_collectives.foreach_all_gather(
            fsdp_params=[*group.fsdp_params],
            group=process_group,
            async_op=True,
            all_gather_copy_in_stream=stream,
            all_gather_stream=stream,
            device=group.device,
            all_gather_comm=comm,
        )
        _fsdp_collectives.foreach_all_gather_copy_out(
            all_gather_result=result,
            fsdp_params=[*group.fsdp_params],
            group=process_group,
        )
    else:
        params = [*group.fsdp_params]
        result = _fsdp_collectives.foreach_all_gather(
            params, process_group, False, stream, stream, group.device, comm
        )
        _fsdp_collectives.foreach_all_gather_copy_out(result, params, process_group)
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_unsharded_param()
