# Owner(s): ["oncall: distributed"]

"""
Large parameters that are gathered and reduced without copies, as
``set_coalesced_collectives`` says: the same bits as with copies, in grouped calls.

The order of streams and the reuse of memory are in ``test_fully_shard_streams.py``,
with units of the kind "mixed, direct".
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.comms import backward, BF16, GivenGrads
from fsdp_helpers.common.utils import (
    DEVICE_TYPE,
    FSDPProcessTest,
    random_input,
    shard_blocks,
)
from fsdp_helpers.parity.modes import differing, Record, train_with

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    fully_shard,
    layout_summary,
    MixedPrecisionPolicy,
    set_coalesced_collectives,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    foreach_all_gather,
)
from torch.distributed.fsdp._fully_shard._fsdp_direct import DirectMemory
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)

# Of `fsdp_helpers/parity/modes.py`, what random cases do not do
CASES = (
    "uniform backward_twice",
    "uniform unused_by_rank",
    "mixed group_run_in_chunks",
    "mixed state_dict_before_backward",
    "mixed step_in_backward",
    "mixed two_forwards_resharded",
    "mixed unfrozen_later",
    "mixed unshard_ahead",
)
BLOCKS, DIM = 3, 16
GROUPED = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
SINGLE = ("all_gather_single", "reduce_scatter_single")
COPIES = ("cat", "_foreach_copy_", "_chunk_cat", "split_with_sizes_copy")
# A few bytes: matrices alone are direct
SOME_NBYTES = 80


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts collectives, members of grouped calls, and the copies around them."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name in GROUPED:
                counts[f"members of {name}"] += len(args[1])
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        for owner, names in (
            (dist.ProcessGroup, GROUPED),
            (dist, SINGLE),
            (torch, COPIES),
        ):
            for name in names:
                stack.enter_context(count(owner, name))
        yield counts


class Affine(nn.Module):
    """A matrix in bf16 and a vector in fp32, both sharded evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM).bfloat16() / DIM)
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)


def make(dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Affine() for _ in range(BLOCKS)))
    model = model if dtype is None else model.to(dtype)
    return shard_blocks(model.to(DEVICE_TYPE), **kwargs)


class TestCoalesced(FSDPProcessTest):
    world_size = 4

    def step(self, model: nn.Module) -> None:
        model(random_input(3, DIM, seed=self.rank)).float().sum().backward()

    # Bits #

    def train(self, case: str, min_nbytes: int | None) -> Record:
        """Over two ranks: a sum over more may round differently in another place."""
        return train_with(
            lambda model: set_coalesced_collectives(model, min_nbytes), case, self.rank
        )

    @parametrize("case", CASES)
    def test_has_the_bits_of_copies(self, case: str) -> None:
        expected, actual = (self.train(case, n) for n in (None, SOME_NBYTES))
        self.assertNotEqual(expected["step 0 loss"], expected["step 1 loss"])
        self.assertEqual(differing(actual, expected), [])

    # Collectives and copies #

    @parametrize("dtype", [None, torch.float32, torch.float16])
    def test_one_grouped_call_each_way_and_no_copy(self, dtype: Any) -> None:
        model = make(dtype)
        set_coalesced_collectives(model, 0)
        self.step(model)  # ranks are compared
        self.step(model)
        for param in model.parameters():
            param.grad = None
        with counted() as counts:
            self.step(model)
        dtypes = {p.dtype for p in model[0].parameters()}
        # Every unit twice
        self.assertEqual(counts[GROUPED[0]], 2 * BLOCKS)
        self.assertEqual(counts[GROUPED[1]], len(dtypes) * BLOCKS)
        self.assertEqual([counts[name] for name in SINGLE], [0, 0])
        params = len([*model[0].parameters()])
        self.assertEqual(counts[f"members of {GROUPED[0]}"], 2 * BLOCKS * params)
        # But for the last unit, whose memory compute still reads when backward begins
        copies = {name: counts[name] for name in COPIES if counts[name]}
        self.assertEqual(copies, {"_foreach_copy_": len(dtypes)})

    def test_small_parameters_are_one_more_member(self) -> None:
        model = make()
        set_coalesced_collectives(model, SOME_NBYTES)
        self.step(model)
        summary = layout_summary(model)
        self.assertIn(" direct", str(summary))
        direct = [len(row.direct) for row in summary.rows if row.names]
        self.assertIn(sum(direct), range(1, BLOCKS * len([*model[0].parameters()])))
        with counted() as counts:
            self.step(model)
        members = 2 * (sum(direct) + BLOCKS)  # a buffer for each unit
        self.assertEqual(counts[f"members of {GROUPED[0]}"], members)

    @parametrize("change", ["comm", "mesh", "exchange", "off"])
    def test_a_replaced_step_keeps_the_copies(self, change: str) -> None:
        kwargs: dict[str, dict[str, Any]] = {
            "mesh": {"reshard_after_forward": 2},
            "exchange": {"mp_policy": MixedPrecisionPolicy(grad_comm_dtype=BF16)},
        }
        model = make(torch.float32, **kwargs.get(change, {}))
        set_coalesced_collectives(model, 0)
        for block in model if change == "comm" else ():
            block.set_custom_all_gather(type("Gather", (DefaultAllGather,), {})())
        if change == "off":
            self.step(model)
            set_coalesced_collectives(model, None)
        self.step(model)
        with counted() as counts:
            self.step(model)
        gathers, reductions = (counts[name] for name in GROUPED)
        self.assertEqual(gathers > 0, change == "exchange")
        self.assertEqual(reductions > 0, change in ("comm", "mesh"))

    def test_the_size_may_change_between_steps(self) -> None:
        x = random_input(3, DIM, seed=self.rank).requires_grad_()
        policy = MixedPrecisionPolicy(BF16)
        model, expected = make(mp_policy=policy), make(mp_policy=policy)(x)
        for min_nbytes in (SOME_NBYTES, 0, None, SOME_NBYTES):
            set_coalesced_collectives(model, min_nbytes)
            output = model(x)
            self.assertEqual(output, expected, atol=0, rtol=0)
            output.float().sum().backward()
            with torch.no_grad():
                model[0](x)  # which is gathered next

    def test_a_plugin_may_start_the_gather(self) -> None:
        model, x = make(), random_input(3, DIM, seed=self.rank)
        set_coalesced_collectives(model, 0)
        with torch.no_grad():
            model[0](model(x))
            group = model[0]._get_fsdp_state()._fsdp_param_group
            context = group.comm_ctx
            group._all_gather_result = foreach_all_gather(
                group.fsdp_params,
                group._all_gather_process_group,
                False,
                context.all_gather_copy_in_stream,
                context.all_gather_stream,
                group.device,
                group._all_gather_comm,
            )
            group.wait_for_unshard()
            self.assertEqual(model[0](x), make()[0](x), atol=0, rtol=0)

    def test_observed_step_packs_what_is_not_direct(self) -> None:
        """The shard of the direct parameter is no whole number of fp32 elements."""
        weight, bias = torch.ones(4, 601, dtype=BF16), torch.ones(8)
        model = fully_shard(GivenGrads(weight=weight, bias=bias).to(DEVICE_TYPE))
        set_coalesced_collectives(model, 1024)
        with CommDebugMode():
            backward(model, weight=1.0, bias=2.0)
        self.assertEqual(model.bias.grad.full_tensor(), torch.full((8,), 2.0))

    # Memory #

    def test_two_units_have_unsharded_memory(self) -> None:
        model = make()
        set_coalesced_collectives(model, 0)
        self.step(model)
        memories = [block._get_fsdp_state()._fsdp_param_group for block in model]
        memories = [group._direct_memory for group in memories]
        most, original = [0], DirectMemory.prepare

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            most[0] = max(most[0], sum(1 for each in memories if each.rotating))
            return result

        with mock.patch.object(DirectMemory, "prepare", noting):
            self.step(model)
        self.assertEqual(most[0], 2)
        self.assertEqual([each.rotating for each in memories], [{}] * BLOCKS)

    def test_a_gradient_that_is_held_is_not_written(self) -> None:
        """Gradients of fp16 are divided before they are summed."""
        model = make(torch.float16)
        set_coalesced_collectives(model, 0)
        self.step(model)
        group = model[0]._get_fsdp_state()._fsdp_param_group
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        param = group.fsdp_params[0].unsharded_param
        param.register_post_accumulate_grad_hook(
            lambda p: held.append((p.grad, p.grad.clone()))
        )
        self.step(model)
        ((grad, before),) = held
        self.assertEqual(grad, before, rtol=0, atol=0)

    @parametrize("value", [-1, 0.5, True, "one"])
    def test_wrong_sizes_are_refused(self, value: Any) -> None:
        with self.assertRaisesRegex(ValueError, "a number of bytes"):
            set_coalesced_collectives(make(), value)

    def test_modules_without_a_unit_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "set_coalesced_collectives"):
            set_coalesced_collectives(nn.Linear(2, 2))


if __name__ == "__main__":
    run_tests()
