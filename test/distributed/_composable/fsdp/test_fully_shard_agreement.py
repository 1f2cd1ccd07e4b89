# Owner(s): ["oncall: distributed"]

"""
Ranks that lay a unit out differently are found before the unit sends anything,
and every one of them raises. Ranks that agree pay one small collective for each
unit, once, and no correct program waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import unittest
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest import mock

from fsdp_common.utils import (
    FakeGroupTest,
    FSDPProcessTest,
    FSDPThreadTest,
    hybrid_mesh,
    LAUNCHED_RANK,
    record_collectives,
    shard_mesh,
    WORLD_SIZE,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_agreement as agreement
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import run_tests


BF16, FP32 = torch.bfloat16, torch.float32
SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"


class Scales(nn.Module):
    def __init__(self, dtype: torch.dtype = FP32, **sizes: int):
        super().__init__()
        for name, size in (sizes or {"gate": 4, "up": 8}).items():
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def forward(self, x: torch.Tensor, used: Sequence[str] = ()) -> torch.Tensor:
        for name, param in self.named_parameters():
            if not used or name in used:
                x = x * param.float().mean().to(x.dtype)
        return x


class Chain(nn.Sequential):
    """Runs those of its blocks, with those of their parameters, that it is told to."""

    def forward(
        self,
        x: torch.Tensor,
        used: Sequence[str] = (),
        run: Sequence[int] | None = None,
    ) -> torch.Tensor:
        for i in range(len(self)) if run is None else run:
            x = self[i](x, used)
        return x


def blocks(count: int = 2, **kwargs: Any) -> Chain:
    return Chain(*(Scales(**kwargs) for _ in range(count)))


def shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    for child in model.children():
        fully_shard(child, **kwargs)
    return fully_shard(model, **kwargs)


@contextlib.contextmanager
def counting_comparisons() -> Iterator[list[int]]:
    """Notes the bytes of each all-gather that compares, and of nothing else."""
    sent: list[int] = []
    all_gather = agreement.all_gather_single

    def noting(output: torch.Tensor, tensor: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_gather(output, tensor, **kwargs)

    with mock.patch.object(agreement, "all_gather_single", noting):
        yield sent


class Elastic(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 2)


class TestRanksDisagree(FSDPProcessTest):
    """
    Real processes. Whether all of them raise is found out by a collective, which
    only those come to that did.
    """

    def step(self, model: nn.Module) -> None:
        x = torch.ones(2, device=self.device, requires_grad=True)
        model(x).sum().backward()

    def refused(self, run: Callable[[], None], gathers: int = 0) -> str:
        """Returns what all ranks alike raise, before more than some gathers was sent."""
        with record_collectives() as recorder:
            with self.assertRaises(RuntimeError) as caught:
                run()
        self.assertEqual(len(recorder.calls), gathers)
        self.assertEqual(len(recorder.all_gathers), gathers)
        messages: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(messages, str(caught.exception))
        self.assertEqual(messages, messages[:1] * WORLD_SIZE)
        return messages[0]

    def policy_by_rank(self, field: str, odd: int = 2) -> MixedPrecisionPolicy:
        """Returns a policy that differs for one parameter on one rank."""
        dtype = BF16 if self.rank == odd else FP32

        def override(param: nn.Parameter) -> torch.dtype | None:
            return dtype if param.numel() == 4 else None

        return MixedPrecisionPolicy(**{f"{field}_override_fn": override})

    def test_an_override_that_differs(self) -> None:
        """Before the first gather, or where the last unit is the first to reduce."""
        for field, verb, unit, gathers in (
            ("param_dtype", "computes", 0, 0),
            ("reduce_dtype", "reduces", 1, 2),
        ):
            model = shard(
                blocks().to(self.device),
                mesh=shard_mesh(),
                reshard_after_forward=False,
                mp_policy=self.policy_by_rank(field),
            )
            message = self.refused(lambda model=model: self.step(model), gathers)
            self.assertIn(f"unit '{unit}'", message)
            text = (
                f"{unit}.gate: {verb} in torch.float32 on ranks 0, 1, 3, "
                f"{verb} in torch.bfloat16 on rank 2"
            )
            self.assertIn(text, message)
            self.assertNotIn(f"{unit}.up", message)
            self.assertIn("MixedPrecisionPolicy must return the same", message)
            self.assertIn(SWITCH, message)

    def test_message_lists_a_few(self) -> None:
        model = Scales(**{f"w{i}": 4 for i in range(20)}).to(self.device)
        policy = self.policy_by_rank("reduce_dtype")
        fully_shard(model, mp_policy=policy, mesh=shard_mesh())
        message = self.refused(lambda: self.step(model), gathers=1)
        self.assertIn("\n  w0: reduces in torch.float32 on ranks 0, 1, 3, red", message)
        for text in ("float32 on ranks 0, 1, 3", "bfloat16 on rank 2"):
            self.assertEqual(message.count(f"reduces in torch.{text}"), 8)
        self.assertIn("\n  and 12 more\n", message)

    def test_what_is_sent_differs(self) -> None:
        model = blocks(1).to(self.device)
        policy = self.policy_by_rank("grad_comm_dtype")
        fully_shard(model, mp_policy=policy, mesh=shard_mesh())
        message = self.refused(lambda: self.step(model), gathers=1)
        for dtype, ranks in (("float32", "ranks 0, 1, 3"), ("bfloat16", "rank 2")):
            text = f"reduces in torch.float32, sent in torch.{dtype} on {ranks}"
            self.assertIn(text, message)

    def test_stored_dtypes_that_no_policy_casts_differ(self) -> None:
        dtype = BF16 if self.rank == 0 else FP32
        model = blocks(1, dtype=dtype).to(self.device)
        fully_shard(model, mesh=shard_mesh())
        message = self.refused(lambda: self.step(model))
        for name in ("0.gate", "0.up"):
            text = f"{name}: computes in torch.bfloat16 on rank 0, computes in torch."
            self.assertIn(text, message)

    def test_stored_dtypes_that_a_policy_casts_are_each_ranks_own(self) -> None:
        model = blocks(1, dtype=BF16 if self.rank == 0 else FP32).to(self.device)
        fully_shard(
            model, mesh=shard_mesh(), mp_policy=MixedPrecisionPolicy(BF16, BF16)
        )
        self.step(model)
        for param in model.parameters():
            self.assertEqual(param.grad.dtype, param.dtype)

    def test_dtypes_of_sharded_gradients_are_each_ranks_own(self) -> None:
        model = Scales(BF16).to(self.device)
        if self.rank == 1:
            model.gate.grad_dtype = FP32
        policy = MixedPrecisionPolicy(reduce_dtype=BF16)
        fully_shard(model, mesh=shard_mesh(), mp_policy=policy)
        self.step(model)
        expected = FP32 if self.rank == 1 else BF16
        self.assertEqual(model.gate.grad.dtype, expected)

    def test_cast_after_sharding_on_one_rank(self) -> None:
        model = shard(blocks().to(self.device), mesh=shard_mesh())
        if self.rank == 1:
            model[1].bfloat16()
        # The first unit agrees and is gathered; the second is not
        with record_collectives() as recorder:
            with self.assertRaisesRegex(RuntimeError, "1.gate: computes in"):
                self.step(model)
        self.assertEqual(len(recorder.all_gathers), 1)
        dist.barrier()

    def test_sizes_and_counts_that_differ(self) -> None:
        is_odd = self.rank == 1
        cases: list[tuple[nn.Module, str]] = []
        model = Scales(gate=8 if is_odd else 4)
        cases.append(
            (model, r"gate: has size \(4,\) on ranks 0, 2, 3, has size \(8,\)")
        )
        model = Scales(**({"gate": 4} if is_odd else {"gate": 4, "up": 4}))
        cases.append((model, "has 2 parameters, on ranks 0, 2, 3, .* has 1 param"))
        for model, text in cases:
            fully_shard(model.to(self.device), mesh=shard_mesh())
            message = self.refused(lambda model=model: self.step(model))
            self.assertRegex(message, text)

    def test_one_rank_forgets_to_shard_a_child(self) -> None:
        """It has the child's parameters in the root, where others have their own."""
        stays = r"unit '\(root\)', which stays unsharded after forward, on rank 2"
        for own, expected in (
            ({"gate": 4}, "has 1 parameters, on ranks 0, 1, 3, .* has 2 par"),
            (
                {},
                rf"'0', which .* to 4 ranks after forward, on ranks 0, 1, 3, .* {stays}",
            ),
        ):
            model = Chain(Scales(gate=4))
            for name, size in own.items():
                model.register_parameter(name, nn.Parameter(torch.ones(size)))
            model.to(self.device)
            if self.rank != 2:
                fully_shard(model[0], mesh=shard_mesh())
            fully_shard(model, mesh=shard_mesh())
            message = self.refused(lambda model=model: self.step(model))
            self.assertRegex(message, expected)
            advice = "call fully_shard on the same modules" if own else "the same units"
            self.assertIn(advice, message)
            self.assertNotIn("MixedPrecisionPolicy", message)

    def test_dims_that_are_sharded_differ(self) -> None:
        model = nn.Linear(8, 8, bias=False, device=self.device)
        dim = 1 if self.rank == 0 else 0
        fully_shard(model, mesh=shard_mesh(), shard_placement_fn=lambda _: Shard(dim))
        message = self.refused(lambda: self.step_linear(model))
        self.assertIn("weight: is sharded as S(1) on rank 0", message)

    def step_linear(self, model: nn.Module) -> None:
        model(torch.ones(2, 8, device=self.device)).sum().backward()

    def test_replicas_that_disagree(self) -> None:
        """Nothing is gathered, so the first all-reduce is what comes after it."""
        model = blocks(1).to(self.device)
        policy = self.policy_by_rank("reduce_dtype")
        replicate(model, mp_policy=policy, mesh=shard_mesh())
        message = self.refused(lambda: self.step(model))
        self.assertIn("0.gate: reduces in torch.float32 on ranks 0, 1, 3", message)

    def test_shard_groups_compare_within_themselves(self) -> None:
        mesh = hybrid_mesh(2)
        ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
        model = blocks(1).to(self.device)
        # An odd rank in each shard group
        odd = self.policy_by_rank("param_dtype", odd=self.rank // 2 * 2)
        fully_shard(model, mp_policy=odd, mesh=mesh)
        with self.assertRaises(RuntimeError) as caught:
            self.step(model)
        text = (
            f"bfloat16 on rank {ranks[0]}, computes in torch.float32 on rank {ranks[1]}"
        )
        self.assertIn(text, str(caught.exception))
        dist.barrier()

    def test_raises_again_at_the_next_try(self) -> None:
        model = blocks(1).to(self.device)
        policy = self.policy_by_rank("param_dtype")
        fully_shard(model, mp_policy=policy, mesh=shard_mesh())
        for _ in range(2):
            self.refused(model.unshard)

    def test_one_rank_evaluates_replicated_parameters_alone(self) -> None:
        model = replicate(blocks(1).to(self.device), mesh=shard_mesh())
        with counting_comparisons() as sent:
            if self.rank == 1:
                with torch.no_grad():
                    model(torch.ones(2, device=self.device))
                model.unshard()
                model.reshard()
            dist.barrier()
            self.assertEqual(sent, [])
            self.step(model)
            self.assertEqual(sent, [32])

    def test_ranks_that_begin_in_different_ways(self) -> None:
        """One gathers a unit itself, which the others come to in their forward."""
        model = shard(blocks().to(self.device), mesh=shard_mesh())
        if self.rank == 1:
            model[0].unshard()
        with counting_comparisons() as sent:
            self.step(model)
        gathers = 1 if self.rank == 1 else 2
        self.assertEqual(sent, [32] * (gathers + 2))


class TestRanksAgree(FSDPProcessTest):
    def step(self, model: nn.Module) -> None:
        x = torch.ones(2, requires_grad=True, device=self.device)
        model(x).sum().backward()

    def sharded(self, **kwargs: Any) -> nn.Module:
        return shard(blocks(3).to(self.device), **({"mesh": shard_mesh()} | kwargs))

    def test_costs_a_few_small_collectives_for_each_unit_once(self) -> None:
        # Before gathers, before reduce-scatters and before all-reduces
        for kwargs, first in (
            ({}, 3 + 3),
            ({"mesh": hybrid_mesh(2)}, 3 + 3 + 3),
            ({"mesh": hybrid_mesh(1)}, 3),
            ({"reshard_after_forward": True}, 3 + 3),
        ):
            model = self.sharded(**kwargs)
            with counting_comparisons() as sent:
                self.step(model)
                self.assertEqual(sent, [32] * first)
                for child in model:
                    child.unshard()
                    child.reshard()
                for _ in range(3):
                    self.step(model)
                self.assertEqual(sent, [32] * first)

    def test_one_comparison_is_one_gather_and_one_copy(self) -> None:
        model, groups = self.sharded(), []
        all_gather_object = dist.all_gather_object

        def noting(found: list, mine: Any, group: Any = None) -> None:
            groups.append(group)
            all_gather_object(found, mine, group=group)

        with mock.patch.object(dist, "all_gather_object", noting):
            with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
                self.step(model)
        self.assertEqual(groups, [])

    def test_is_not_seen_by_counters_of_collectives(self) -> None:
        model, counter = self.sharded(reshard_after_forward=False), CommDebugMode()
        with counting_comparisons() as sent, counter:
            self.step(model)
        self.assertEqual(len(sent), 6)
        # Three gathers, and three reductions
        self.assertEqual(counter.get_total_counts(), 6)

    def test_environment_turns_it_off(self) -> None:
        for value, expected in (("0", 0), ("1", 6)):
            with mock.patch.dict(os.environ, {SWITCH: value}):
                with counting_comparisons() as sent:
                    self.step(self.sharded())
            self.assertEqual(len(sent), expected)

    def test_a_single_rank_is_not_asked(self) -> None:
        with counting_comparisons() as sent:
            self.step(self.sharded(mesh=shard_mesh(1)))
        self.assertEqual(sent, [])

    def test_put_off_all_reduce_is_not_compared_for(self) -> None:
        """With one shard, nothing is sent before the last microbatch."""
        model = self.sharded(mesh=hybrid_mesh(1))
        model.set_requires_all_reduce(False)
        with counting_comparisons() as sent:
            self.step(model)
            self.assertEqual(sent, [])
            model.set_requires_all_reduce(True)
            self.step(model)
            self.assertEqual(sent, [32] * 3)

    def test_in_inference_mode(self) -> None:
        model = self.sharded()
        with counting_comparisons() as sent, torch.inference_mode():
            model(torch.ones(2, device=self.device))
        self.assertEqual(len(sent), 3)  # of gathers
        self.step(model)


class Timed(Scales):
    pass


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inner(*args)


class TestEachRanksOwn(FSDPProcessTest):
    """What no collective depends on may differ, and ranks train as if it did not."""

    def check(
        self,
        change: Callable[[Chain], Any],
        run: Sequence[int] = (0, 1),
        later: bool = False,
    ) -> None:
        """Trains, where rank 0 changes its model before or ``later`` after a step."""
        x = torch.ones(2, device=self.device, requires_grad=True)
        blocks().to(self.device)(x).sum().backward()
        expected, x.grad = x.grad, None
        run = run if self.rank == 0 else (0, 1)
        for value, apply in product(("1", "always"), (fully_shard, replicate)):
            model = blocks().to(self.device)
            if self.rank == 0 and not later:
                change(model)
            for unit in (*model, model):
                inner = getattr(unit, "inner", unit)
                apply(inner, mesh=shard_mesh())
            with mock.patch.dict(os.environ, {SWITCH: value}):
                for step in range(3):
                    model(x, (), run).sum().backward()
                    self.assertEqual(x.grad, expected)
                    model.zero_grad()
                    x.grad = None
                    if self.rank == 0 and later and step == 0:
                        change(model)

    def test_class_and_names_of_parameters(self) -> None:
        def change(model: Chain) -> None:
            model[1] = Timed(opened=4, raised=8).to(self.device)

        self.check(change)

    def test_a_wrapper(self) -> None:
        def change(model: Chain) -> None:
            model[1] = Wrapped(model[1])

        for later in (False, True):
            self.check(change, later=later)

    def test_the_order_in_which_blocks_are_registered(self) -> None:
        def change(model: Chain) -> None:
            model[0], model[1] = model[1], model[0]

        self.check(change, run=(1, 0))

    def test_dtypes_that_no_collective_has(self) -> None:
        """In which replicas compute, and in which a frozen parameter would reduce."""
        dtype = BF16 if self.rank == 0 else FP32
        computes = MixedPrecisionPolicy(dtype, FP32)
        reduces = MixedPrecisionPolicy(reduce_dtype=dtype)
        for apply, policy, trains in (
            (replicate, computes, True),
            (fully_shard, reduces, False),
        ):
            model = blocks(1).to(self.device).requires_grad_(trains)
            apply(model, mesh=shard_mesh(), mp_policy=policy)
            x = torch.ones(2, device=self.device, requires_grad=True)
            model(x).sum().backward()
            self.assertEqual(x.grad, torch.ones(2))
            for param in model.parameters():
                self.assertEqual(param.grad is not None, trains)

    def test_how_a_rank_came_to_the_first_gather(self) -> None:
        """One does not know yet that the root stays unsharded."""
        model = blocks(1).to(self.device)
        fully_shard(model, mesh=shard_mesh())
        if self.rank == 1:
            model.unshard()
        model(torch.ones(2, device=self.device)).sum().backward()


class TestReductions(FSDPProcessTest):
    """What each backward gives gradients to: the same on all ranks, or all raise."""

    def sharded(self, **kwargs: Any) -> nn.Module:
        model = blocks(3, gate=4, up=4).to(self.device)
        return shard(model, **({"mesh": shard_mesh()} | kwargs))

    def backward(self, model: nn.Module, **kwargs: Any) -> None:
        x = torch.ones(2, requires_grad=True, device=self.device)
        model(x, **kwargs).sum().backward()

    def step(self, model: nn.Module, microbatches: int = 1, **kwargs: Any) -> None:
        for _ in range(microbatches):
            self.backward(model, **kwargs)
        model.zero_grad()

    def count(self, model: nn.Module, times: int, **kwargs: Any) -> list[int]:
        """Returns how often ranks were compared in each of some steps."""
        counts = []
        for _ in range(times):
            with counting_comparisons() as sent:
                self.step(model, **kwargs)
            counts.append(len(sent))
        return counts

    def refused(self, run: Callable[[], None]) -> str:
        """Returns what all ranks alike raise, before they reduced anything."""
        with record_collectives() as recorder:
            with self.assertRaises(RuntimeError) as caught:
                run()
        self.assertEqual(recorder.reduce_scatters + recorder.all_reduces, [])
        messages: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(messages, str(caught.exception))
        self.assertEqual(messages, messages[:1] * WORLD_SIZE)
        return messages[0]

    def test_patterns_are_compared_once_each(self) -> None:
        model = self.sharded()
        self.assertEqual(self.count(model, 3), [6, 0, 0])
        self.assertEqual(self.count(model, 2, used=["gate"]), [3, 0])
        self.assertEqual(self.count(model, 2, used=["up"]), [3, 0])
        for used in ((), ["gate"], ["up"]):
            self.assertEqual(self.count(model, 1, used=used), [0])
        # Which unit came before makes no difference
        self.assertEqual(self.count(model, 2, run=[0, 2]), [0, 0])

    def test_steady_loops_compare_nothing(self) -> None:
        """From the third optimizer step on, in every microbatch of it."""

        def accumulates(model: nn.Module, i: int) -> None:
            self.step(model, microbatches=3)

        def syncs_the_last(model: nn.Module, i: int) -> None:
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                self.backward(model)
            model.zero_grad()

        def puts_off(model: nn.Module, i: int) -> None:
            for microbatch in range(4):
                model.set_requires_all_reduce(microbatch == 3)
                self.backward(model)
            model.zero_grad()

        def takes_turns(model: nn.Module, i: int) -> None:
            self.step(model, used=["gate"] if i % 2 else ["up"])

        def keeps_gradients(model: nn.Module, i: int) -> None:
            self.backward(model)
            model.zero_grad(set_to_none=False)

        for loop, kwargs in (
            (accumulates, {}),
            (syncs_the_last, {}),
            (puts_off, {"mesh": hybrid_mesh(2)}),
            (takes_turns, {}),
            (keeps_gradients, {}),
        ):
            model = self.sharded(**kwargs)
            for i in range(6):
                with counting_comparisons() as sent:
                    loop(model, i)
                if i >= 2:
                    self.assertEqual(sent, [], loop.__name__)

    def test_a_unit_that_never_settles_is_compared_no_more(self) -> None:
        names = [f"p{i}" for i in range(10)]
        model = Scales(**dict.fromkeys(names, 4)).to(self.device)
        fully_shard(model, mesh=shard_mesh())
        counts = [self.count(model, 1, used=[name])[0] for name in names]
        self.assertEqual(counts, [2] + [1] * 7 + [0, 0])
        with mock.patch.dict(os.environ, {SWITCH: "always"}):
            self.assertEqual(self.count(model, 1, used=names[:2]), [1])

    def test_one_rank_gives_up_what_all_skip(self) -> None:
        """Its data is bad, say: the others have nothing to compare."""
        for value, settled in (("1", 0), ("always", 9)):
            with mock.patch.dict(os.environ, {SWITCH: value}):
                model = self.sharded()
                self.assertEqual(self.count(model, 2)[1], settled)
                if self.rank == 1:
                    model.reset_iter_state()
                self.assertEqual(self.count(model, 2), [settled] * 2)

    def test_collectives_of_ones_own_are_not_compared(self) -> None:
        """They may need neither the other ranks nor the group."""

        class OwnGather(DefaultAllGather):
            needs_all_ranks = False

        class OwnScatter(DefaultReduceScatter):
            needs_all_ranks = False

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        class OwnMemory(DefaultAllGather):
            def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                return super().allocate(*args, **kwargs)

        # The second unit's gathers, and reductions of the second and the third
        for value, expected in (("1", [1 + 2, 0]), ("always", [2 + 2] * 2)):
            with mock.patch.dict(os.environ, {SWITCH: value}):
                model = self.sharded()
                for unit in model:
                    unit.set_custom_all_gather(OwnGather())
                model[0].set_custom_reduce_scatter(OwnScatter())
                model[1].set_custom_all_gather(OwnMemory())
                self.assertEqual(self.count(model, 2), expected)

    def test_a_subclass_is_compared_as_its_base(self) -> None:
        """It may wrap the call on one rank alone, e.g. to time or to count it."""

        class TimedGather(DefaultAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        class TimedScatter(DefaultReduceScatter):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        model = self.sharded()
        for unit in model if self.rank == 0 else ():
            unit.set_custom_all_gather(TimedGather())
            unit.set_custom_reduce_scatter(TimedScatter())
        self.assertEqual(self.count(model, 2), [3 + 3, 0])
        used = "gate" if self.rank == 1 else "up"
        refused = self.refused(lambda: self.step(model, used=[used], run=[0]))
        self.assertIn("unit '0'", refused)

    def test_functions_in_place_of_ours_are_not_compared(self) -> None:
        for name, expected in (("foreach_all_gather", 3), ("foreach_reduce", 3)):
            wrapped = functools.partial(getattr(param_group, name))
            with mock.patch.object(param_group, name, wrapped):
                model = self.sharded()
                self.assertEqual(self.count(model, 2), [expected, 0])

    def test_groups_of_ones_own_are_not_compared(self) -> None:
        """Their ranks may come and go, and they may have no all-gather."""
        group = Elastic()
        self.assertFalse(agreement._has_others(group, self.device))
        self.assertTrue(agreement._has_others(shard_mesh().get_group(), self.device))

    def test_what_was_traced_is_not_remembered(self) -> None:
        model = self.sharded()
        with mock.patch.object(agreement, "_is_traced", lambda *_: True):
            self.assertEqual(self.count(model, 2), [0, 0])
        self.assertEqual(self.count(model, 2), [6, 0])

    def test_whether_a_rank_keeps_gradients_is_its_own_matter(self) -> None:
        """One that has no element of a parameter need not keep its gradient."""
        for value in ("1", "always"):
            model = Scales(gate=2, up=2).to(self.device)
            fully_shard(model, mesh=shard_mesh())
            with mock.patch.dict(os.environ, {SWITCH: value}):
                for _ in range(3):
                    self.backward(model)
                    if self.rank >= 2:
                        model.zero_grad()
        model = self.sharded()
        for _ in range(3):
            self.backward(model)
            if self.rank == 0:
                model.zero_grad()

    def test_how_many_microbatches_accumulate_is_not_compared(self) -> None:
        model = replicate(blocks(3).to(self.device), mesh=shard_mesh())
        self.count(model, 2)
        for microbatches in (1, 3 if self.rank else 2):
            with counting_comparisons() as sent:
                for i in range(microbatches):
                    model.set_requires_gradient_sync(i == microbatches - 1)
                    self.backward(model)
                model.zero_grad()
            self.assertEqual(sent, [])

    def test_other_parameters(self) -> None:
        """In the first step, and after steps that were alike."""
        mine = ["up" if self.rank == 2 else "gate"]
        for steps in (0, 2):
            model = self.sharded()
            self.count(model, steps)
            message = self.refused(lambda model=model: self.step(model, used=mine))
            self.assertIn("the gradients of unit '2':\n  2.gate: gets a gra", message)
            self.assertRegex(message, "2.up: gets no gradient on ranks 0, 1, 3, gets a")
            self.assertIn("set_reduce_scatter_unused_params(True)", message)

    def test_other_parameters_are_fine_where_zeros_stand_in(self) -> None:
        model = self.sharded()
        model.set_reduce_scatter_unused_params(True)
        mine = ["up" if self.rank == 2 else "gate"]
        self.assertEqual(self.count(model, 3, used=mine), [6, 0, 0])
        self.backward(model, used=mine)
        share = [model[1].gate.grad.full_tensor(), model[1].up.grad.full_tensor()]
        self.assertEqual([grad[0].item() for grad in share], [3 / 8, 1 / 8])

    def test_replicas_that_reduce_other_parameters(self) -> None:
        """Each shard group agrees within itself."""
        model = self.sharded(mesh=hybrid_mesh(2))
        with self.assertRaises(RuntimeError) as caught:
            self.step(model, used=["up" if self.rank >= 2 else "gate"])
        ranks = (self.rank % 2, self.rank % 2 + 2)
        text = "2.up: gets no gradient on rank {}, gets a gradient on rank {}"
        self.assertRegex(str(caught.exception), text.format(*ranks))
        dist.barrier()

    def test_a_unit_that_stays_unsharded(self) -> None:
        """Which is not gathered again in backward."""
        model = self.sharded()
        if self.rank == 3:
            model[1].set_reshard_after_forward(False)
        message = self.refused(lambda: self.step(model))
        self.assertRegex(message, "'1', which stays unsharded .*, on rank 3\nEvery")

    def test_another_unit(self) -> None:
        """After a step that was alike, if ranks are always compared."""
        mine = [1 if self.rank == 2 else 0]
        with mock.patch.dict(os.environ, {SWITCH: "always"}):
            model = blocks(2).to(self.device)
            for block in model:
                replicate(block, mesh=shard_mesh())
            self.step(replicate(model, mesh=shard_mesh()))
            message = self.refused(lambda: self.step(model, run=mine))
        text = r"reduces unit '0' as number \d+ on ranks 0, 1, 3, reduces unit '1' as"
        self.assertRegex(message, text)

    def test_always_compares_every_collective(self) -> None:
        with mock.patch.dict(os.environ, {SWITCH: "always"}):
            for kwargs, each in (({}, 2), ({"mesh": hybrid_mesh(2)}, 3)):
                model = self.sharded(reshard_after_forward=False, **kwargs)
                self.assertEqual(self.count(model, 3), [3 * each] * 3)
            model = self.sharded()
            self.step(model)
            mine = [0, 2] if self.rank == 1 else [0, 1, 2]
            message = self.refused(lambda: self.step(model, run=mine))
        text = (
            r"gathers unit '1' as number \d+ on ranks 0, 2, 3, gathers unit '2' as .* 1"
        )
        self.assertRegex(message, text)

    def test_always_finds_microbatches_that_are_skipped(self) -> None:
        """Where the next step meets the microbatch that is left out."""
        with mock.patch.dict(os.environ, {SWITCH: "always"}):
            model = replicate(blocks(2).to(self.device), mesh=shard_mesh())
            self.step(model, microbatches=2)
            self.backward(model)
            if self.rank == 1:
                model.zero_grad()
            message = self.refused(lambda: self.backward(model))
        text = "with earlier gradients to add to, on ranks 0, 2, 3, .* without earlier"
        self.assertRegex(message, text)


class TestThreads(FSDPThreadTest):
    """Ranks that are threads compare and raise like processes."""

    world_size = 4

    def test_all_raise(self) -> None:
        dtype = BF16 if self.rank == 3 else FP32
        policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda _: dtype)
        model = fully_shard(Scales().to(self.device), mp_policy=policy)
        text = "of a unit:(?s:.*)gate of FSDPScales: computes in .* on ranks 0, 1, 2,"
        with self.assertRaisesRegex(RuntimeError, text):
            model.unshard()


@unittest.skipIf(LAUNCHED_RANK is not None, "the launched group is there already")
class TestWithoutOtherRanks(FakeGroupTest):
    """A process group that sends nothing, or no data to send."""

    ranks = 2

    def test_fake_process_group(self) -> None:
        with counting_comparisons() as sent:
            fully_shard(Scales())(torch.ones(2)).sum().backward()
        self.assertEqual(sent, [])

    def test_fake_tensors(self) -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        name = mock.patch.object(agreement, "backend_name", lambda *_: "gloo")
        with FakeTensorMode(), name:
            with counting_comparisons() as sent:
                model = fully_shard(Scales(), mesh=mesh)
                model(torch.ones(2)).sum().backward()
        self.assertEqual(sent, [])


if __name__ == "__main__":
    run_tests()
