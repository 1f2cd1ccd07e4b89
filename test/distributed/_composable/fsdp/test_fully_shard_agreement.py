# Owner(s): ["oncall: distributed"]
"""
Ranks that lay a unit out differently, or reduce other gradients of it, all raise before
it sends anything. Ranks that agree pay one small collective for each unit, once. Where
ranks drift apart later, none goes on with a wrong gradient.
"""

import contextlib
import datetime
import functools
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from fsdp_helpers.common import utils

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_agreement as agreement
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import parametrize, run_tests


BF16, FP32 = torch.bfloat16, torch.float32
SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"


class Scales(nn.Module):
    """Parameters of these sizes. Uses those whose names it is given."""

    def __init__(self, dtype: torch.dtype = FP32, **sizes: Any):
        super().__init__()
        for name, size in (sizes or {"gate": 4, "up": 8}).items():
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def forward(self, x: torch.Tensor, used: Sequence[str] = ()) -> torch.Tensor:
        for name, param in self.named_parameters():
            if not used or name in used:
                x = x * param.float().mean().to(x.dtype)
        return x


class Chain(nn.Sequential):
    """Runs the given blocks with the given parameters of theirs."""

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


def switched(value: str) -> Any:
    return mock.patch.dict(os.environ, {SWITCH: value})


def backward(model: nn.Module, **kwargs: Any) -> None:
    x = torch.ones(2, requires_grad=True, device=next(model.parameters()).device)
    model(x, **kwargs).sum().backward()


def step(model: nn.Module, microbatches: int = 1, **kwargs: Any) -> None:
    for _ in range(microbatches):
        backward(model, **kwargs)
    model.zero_grad()


def counting_comparisons() -> Any:
    """Notes the calls of all-gathers that compare, and of no other."""
    all_gather = agreement.all_gather_single
    return mock.patch.object(agreement, "all_gather_single", wraps=all_gather)


class AgreementTest(utils.FSDPProcessTest):
    """A collective that only those that raised issue shows that all did."""

    def sharded(self, **kwargs: Any) -> Any:
        model = blocks(3, gate=4, up=4).to(self.device)
        return utils.shard_blocks(model, **({"mesh": utils.shard_mesh()} | kwargs))

    def count(self, model: nn.Module, times: int, **kwargs: Any) -> list[int]:
        """Returns how often ranks were compared in each of some steps."""
        counts = []
        of_others = mock.patch.object(dist, "all_gather_object", AssertionError)
        for _ in range(times):
            with counting_comparisons() as sent, of_others:
                step(model, **kwargs)
            for call in sent.call_args_list:
                self.assertEqual(call.args[1].nbytes, 32)
            counts.append(sent.call_count)
        return counts

    def refused(self, run: Callable[[], object], gathers: int | None) -> str:
        """Returns what all ranks alike raise before more than some gathers."""
        with utils.record_collectives() as recorder:
            with self.assertRaises(RuntimeError) as caught:
                run()
        if gathers is not None:
            self.assertEqual(len(recorder.calls), len(recorder.all_gathers))
            self.assertEqual(len(recorder.calls), gathers)
        message = str(caught.exception)
        messages: list[Any] = [None] * utils.WORLD_SIZE
        dist.all_gather_object(messages, message)
        self.assertEqual(messages, messages[:1] * utils.WORLD_SIZE)
        return message


@dataclass(frozen=True)
class Setup:
    """How a rank shards and runs three blocks, whose sizes double."""

    size: int = 4
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    dim: int = 0
    reshard: bool = True
    units: Sequence[int] = (0, 1, 2)
    apply: Callable[..., Any] = fully_shard
    change: Callable[[Any], None] = lambda model: None
    steps: int = 0  # that are alike on all ranks, with so many microbatches
    microbatches: int = 1
    last: dict[str, Any] = field(default_factory=lambda: {"used": ("gate",)})

    def model(self, device: torch.device) -> nn.Module:
        sizes = [(self.size << i, 4) for i in range(3)]
        model = Chain(*(Scales(gate=n, up=n) for n in sizes)).to(device)
        kwargs: dict[str, Any] = {"mesh": utils.shard_mesh(), "mp_policy": self.policy}
        of_blocks = dict(kwargs)
        if self.apply is fully_shard:
            of_blocks["reshard_after_forward"] = self.reshard
            of_blocks["shard_placement_fn"] = lambda _: Shard(self.dim)
        for i in self.units:
            self.apply(model[i], **of_blocks)
        self.apply(model, **kwargs)
        self.change(model)
        return model


class Disagreement(NamedTuple):
    says: tuple[str, str]  # of ranks 0, 1 and 3, and of rank 2
    odd: dict[str, Any]  # what rank 2 has
    alike: dict[str, Any] = {}  # what all have
    gathers: int | None = 0  # before all ranks raise; None: any number
    advice: str = "MixedPrecisionPolicy must return the same"
    compares: str = "1"  # or "always"


ON_UNITS = "call fully_shard on the same modules .* must run it in its turn"
# What ranks that always compare say where they drift apart
DRIFTED: dict[str, Any] = {
    "gathers": None,
    "advice": "run the same units in the same order",
    "compares": "always",
}
DISAGREEMENTS = {
    "param_dtype": Disagreement(
        ("0.gate computes in torch.float32", "0.gate computes in torch.bfloat16"),
        {"policy": MixedPrecisionPolicy(BF16, FP32)},
    ),
    # The last unit is the first to reduce
    "reduce_dtype": Disagreement(
        ("2.gate .* reduced in torch.float32", "2.gate .* reduced in torch.bfloat16"),
        {"policy": MixedPrecisionPolicy(reduce_dtype=BF16)},
        {"reshard": False},
        gathers=3,
    ),
    "size": Disagreement((r"0.gate .* size \(4, 4\)", r"size \(8, 4\)"), {"size": 8}),
    "dim": Disagreement((r"sharded as S\(0\)", r"sharded as S\(1\)"), {"dim": 1}),
    "bucket_cap": Disagreement(
        (r"'2' is reduced .*, 1048576\)", r"'2' is reduced .*reduce bucket cap None"),
        {"change": lambda model: None},
        {"change": fsdp.set_reduce_bucket_cap, "reshard": False},
        gathers=3,
        advice=ON_UNITS,
    ),
    "coalesced": Disagreement(
        (
            r"'0' is gathered \(2 parameters\)",
            "those of 1048576 bytes or more coalesced",
        ),
        {"change": fsdp.set_coalesced_collectives},
        advice=ON_UNITS,
    ),
    "two_children_that_are_not_sharded": Disagreement(
        (r"'0' is gathered \(2 param", r"'\(root\)' is gathered \(4 param"),
        {"units": (2,)},
        advice=ON_UNITS,
    ),
    "unit_that_stays_unsharded": Disagreement(
        ("'0' is sharded over 4 ranks after forward", "over 1 ranks after forward"),
        {"reshard": False},
        advice=ON_UNITS,
    ),
    "other_gradients_after_steps_that_were_alike": Disagreement(
        ("2.up gets no gradient", "2.up gets a gradient"),
        {"last": {"used": ("up",)}},
        {"steps": 2},
        gathers=None,
        advice=r"set_reduce_scatter_unused_params\(True\)",
    ),
    "unit_skipped": Disagreement(
        ("unit '1' is", "unit '2' is"),
        {"last": {"run": (0, 2)}},
        {"last": {}, "steps": 3},
        **DRIFTED,
    ),
    "replicated_unit_skipped": Disagreement(
        ("unit '1' is", "unit '0' is"),
        {"last": {"run": (0, 2)}},
        {"last": {}, "steps": 3, "apply": replicate},
        **DRIFTED,
    ),
    "microbatch_skipped": Disagreement(
        ("has an earlier one", "has no earlier one"),
        {"last": {"microbatches": 1}},
        {"last": {"microbatches": 2}, "steps": 3, "microbatches": 2},
        **DRIFTED,
    ),
}


class TestRanksDisagree(AgreementTest):
    @parametrize("name", DISAGREEMENTS)
    def test_all_ranks_raise_where_they_disagree(self, name: str) -> None:
        case = DISAGREEMENTS[name]
        setup = Setup(**case.alike | (case.odd if self.rank == 2 else {}))
        most, odd = case.says
        text = rf"(?s){most}.* on ranks \[0, 1, 3\]; .*{odd}.* on ranks \[2\].*{case.advice}"
        with switched(case.compares):
            model = setup.model(self.device)
            for _ in range(setup.steps):
                step(model, setup.microbatches)

            def run() -> None:
                for _ in range(2 if case.compares == "always" else 1):
                    step(model, **setup.last)

            for _ in range(2 if case.gathers == 0 else 1):  # as well if tried again
                self.assertRegex(self.refused(run, case.gathers), text)
                model.reset_iter_state()

    @parametrize("is_new", [True, False])
    def test_training_goes_on_after_a_drift(self, is_new: bool) -> None:
        """With a new model, or one of whose units none has been gathered."""
        model = Setup().model(self.device)
        text = "Ranks disagree about unit '0' and unit '1'"
        if is_new:  # the first units of rank 2 look like the others' first
            model = self.sharded(reshard_after_forward=False)
            text = r":\n.* is gathered .* on ranks \[0, 1, 3\]; .* is reduced "
        run = functools.partial(step, model, run=range(self.rank == 2, 3))
        self.assertRegex(self.refused(run, None), text)
        model.reset_iter_state()
        model = self.sharded() if is_new else model
        self.assertEqual(self.count(model, 2), [6, 0])

    def test_root_input_that_needs_gradients_on_one_rank_is_a_drift(self) -> None:
        """There the root reduces last, elsewhere it does so first."""
        model = blocks(1, gate=4).to(self.device)
        model.own = nn.Parameter(torch.ones(4, device=self.device))
        model.register_forward_hook(lambda root, _, output: output * root.own.mean())
        utils.shard_blocks(model, mesh=utils.shard_mesh(), reshard_after_forward=False)
        x = torch.ones(2, device=self.device, requires_grad=self.rank == 2)
        message = self.refused(lambda: model(x).sum().backward(), 2)
        text = r":\n  unit '\(root\)' is reduced .*; unit '0' is reduced "
        self.assertRegex(message, text)

    def test_hsdp_shard_groups_compare_within_themselves(self) -> None:
        mesh = utils.hybrid_mesh(2)
        ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
        model = blocks(1).to(self.device)
        policy = MixedPrecisionPolicy(BF16 if self.rank % 2 == 0 else FP32)
        fully_shard(model, mp_policy=policy, mesh=mesh)
        # Before the root's forward nobody knows what the unit is called
        text = "about a unit:(?s:.*)0.gate of unit 'FSDPChain' computes in torch.bfloat16, "
        text += r".* on ranks \[{}\]; .* computes in torch.float32, .* on ranks \[{}\]"
        with self.assertRaisesRegex(RuntimeError, text.format(*ranks)):
            model.unshard()
        dist.barrier()


class TestRanksAgree(AgreementTest):
    # Before gathers, before reduce-scatters and before all-reduces
    FIRST = {
        "shards": (utils.shard_mesh, utils.WORLD_SIZE, 3 + 3),
        "both": (utils.hybrid_mesh, 2, 3 + 3 + 3),
        "replicas": (utils.hybrid_mesh, 1, 3),
        "neither": (utils.shard_mesh, 1, 0),
    }

    @parametrize("name", FIRST)
    def test_comparison_costs_few_small_collectives_once(self, name: str) -> None:
        make_mesh, shards, first = self.FIRST[name]
        model = self.sharded(mesh=make_mesh(shards), reshard_after_forward=False)
        with CommDebugMode() as counter:  # which does not see comparisons
            self.assertEqual(self.count(model, 1), [first])
        self.assertEqual(counter.get_total_counts(), first)
        for child in model:
            child.unshard()
            child.reshard()
        self.assertEqual(self.count(model, 2), [0, 0])

    @parametrize("value", ["0", "1", "", "always"])
    def test_environment_turns_it_off_or_compares_always(self, value: str) -> None:
        times = {"0": [0, 0], "always": [1, 1]}.get(value, [1, 0])
        with switched(value):
            for mesh, each in ((utils.shard_mesh(), 6), (utils.hybrid_mesh(2), 9)):
                model = self.sharded(reshard_after_forward=False, mesh=mesh)
                found = self.count(model, 2)
                self.assertEqual(found, [each * n for n in times], f"{each} at once")
        with switched("Always"), self.assertRaisesRegex(ValueError, "'Always': set it"):
            self.sharded()

    def test_deferred_all_reduce_is_not_compared_for(self) -> None:
        """With one shard, nothing is sent before the last microbatch."""
        model = self.sharded(mesh=utils.hybrid_mesh(1))
        for is_last, expected in ((False, 0), (True, 3)):
            model.set_requires_all_reduce(is_last)
            self.assertEqual(self.count(model, 1), [expected])

    def test_one_rank_may_evaluate_replicated_parameters_alone(self) -> None:
        model = replicate(blocks(1).to(self.device), mesh=utils.shard_mesh())
        with counting_comparisons() as sent:
            if self.rank == 1:
                with torch.no_grad():
                    model(torch.ones(2, device=self.device))
                model.unshard()
                model.reshard()
            dist.barrier()
        sent.assert_not_called()
        self.assertEqual(self.count(model, 1), [1])

    def test_ranks_may_begin_in_different_ways(self) -> None:
        """One gathers a unit itself, which the others gather in their forward."""
        model = utils.shard_blocks(blocks().to(self.device), mesh=utils.shard_mesh())
        if self.rank == 1:
            model[0].unshard()
        with counting_comparisons() as sent:
            step(model)
        gathers = 1 if self.rank == 1 else 2
        self.assertEqual(sent.call_count, gathers + 2)


def wrap(model: Chain) -> None:
    model[1] = Chain(model[1])


def swap(model: Chain) -> None:
    model[0], model[1] = model[1], model[0]


class TestRanksMayDiffer(AgreementTest):
    """What no collective depends on may differ, and ranks train as if it did not."""

    # How rank 0 changes its model, what it runs then, and whether after its first step
    CHANGES = {
        "wrapper": (wrap, (0, 1), False),
        "wrapper_later": (wrap, (0, 1), True),
        "order_of_registration": (swap, (1, 0), False),
    }

    @parametrize("name", CHANGES)
    @parametrize("value", ["1", "always"])
    @parametrize("apply", [fully_shard, replicate], name_fn=lambda of: of.__name__)
    def test_names_and_order_of_registration_may_differ(
        self, name: str, value: str, apply: Callable[..., Any]
    ) -> None:
        change, run, later = self.CHANGES[name]
        x = torch.ones(2, device=self.device, requires_grad=True)
        blocks().to(self.device)(x).sum().backward()
        expected, x.grad = x.grad, None
        run = run if self.rank == 0 else (0, 1)
        model = blocks().to(self.device)
        if self.rank == 0 and not later:
            change(model)
        for block in model:
            apply(block[0] if type(block) is Chain else block, mesh=utils.shard_mesh())
        apply(model, mesh=utils.shard_mesh())
        with switched(value):
            for step in range(3):
                model(x, (), run).sum().backward()
                self.assertEqual(x.grad, expected)
                model.zero_grad()
                x.grad = None
                if self.rank == 0 and later and step == 0:
                    change(model)

    @parametrize("what", ["stored", "computed", "frozen"])
    def test_dtypes_that_no_collective_has_may_differ(self, what: str) -> None:
        """Stored dtypes that a policy casts, compute dtypes of replicas, frozen ones."""
        dtype = BF16 if self.rank == 0 else FP32
        policy = {
            "stored": MixedPrecisionPolicy(BF16, BF16),
            "computed": MixedPrecisionPolicy(dtype, FP32),
            "frozen": MixedPrecisionPolicy(reduce_dtype=dtype),
        }[what]
        apply = replicate if what == "computed" else fully_shard
        stored, trains = dtype if what == "stored" else FP32, what != "frozen"
        model = blocks(1, dtype=stored).to(self.device).requires_grad_(trains)
        if trains:
            model[0].gate.grad_dtype = dtype
        apply(model, mesh=utils.shard_mesh(), mp_policy=policy)
        backward(model)
        for param in model.parameters():
            self.assertEqual(param.grad is not None, trains)
        if trains:
            self.assertEqual(model[0].gate.grad.dtype, dtype)

    @parametrize("value,gone", [("1", "0"), ("1", "23"), ("always", "23")])
    def test_some_ranks_may_keep_gradients(self, value: str, gone: str) -> None:
        """A rank without elements of a parameter need not keep its gradient."""
        model = Scales(gate=2, up=2).to(self.device)
        fully_shard(model, mesh=utils.shard_mesh())
        with switched(value):
            for _ in range(3):
                backward(model)
                if str(self.rank) in gone:
                    model.zero_grad()


class TestReductions(AgreementTest):
    """What each backward gives gradients to: the same on all ranks, or all raise."""

    def test_patterns_are_compared_once_each(self) -> None:
        model = self.sharded()
        self.assertEqual(self.count(model, 3), [6, 0, 0])
        self.assertEqual(self.count(model, 2, used=["gate"]), [3, 0])
        self.assertEqual(self.count(model, 2, used=["up"]), [3, 0])
        for used in ((), ["gate"], ["up"]):
            self.assertEqual(self.count(model, 1, used=used), [0])
        # Which unit came before makes no difference
        self.assertEqual(self.count(model, 2, run=[0, 2]), [0, 0])

    def test_unit_that_never_settles_is_compared_no_more(self) -> None:
        names = [f"p{i}" for i in range(10)]
        model = Scales(**dict.fromkeys(names, 4)).to(self.device)
        fully_shard(model, mesh=utils.shard_mesh())
        counts = [self.count(model, 1, used=[name])[0] for name in names]
        self.assertEqual(counts, [2] + [1] * 7 + [0, 0])
        with switched("always"):
            self.assertEqual(self.count(model, 1, used=names[:2]), [1])

    @parametrize("value,settled", [("1", 0), ("always", 9)])
    def test_one_rank_may_give_up_what_all_skip(self, value: str, settled: int) -> None:
        """Its data is bad, say: the others have nothing to compare."""
        with switched(value):
            model = self.sharded()
            self.assertEqual(self.count(model, 2)[1], settled)
            if self.rank == 1:
                model.reset_iter_state()
            self.assertEqual(self.count(model, 2), [settled] * 2)

    @parametrize("value", ["1", "always"])
    def test_custom_collectives_are_not_compared(self, value: str) -> None:
        """Custom collectives may need neither the other ranks nor the group."""

        def derived(kind: type, **attributes: Any) -> Any:
            return type("Derived", (kind,), attributes)()

        gather, reduce = collectives.DefaultAllGather, collectives.DefaultReduceScatter
        with switched(value):
            model = self.sharded()
            for unit in model:
                unit.set_custom_all_gather(derived(gather, needs_all_ranks=False))
            model[0].set_custom_reduce_scatter(derived(reduce, needs_all_ranks=False))
            if self.rank == 0:  # which other ranks need not know
                own = derived(gather, allocate=gather.allocate)
                model[1].set_custom_all_gather(own)
                own = derived(reduce, allocate=reduce.allocate)
                model[1].set_custom_reduce_scatter(own)
            else:
                model[1].set_custom_all_gather(gather())
            # The second unit's gathers, and reductions of the second and the third
            expected = [1 + 2, 0] if value == "1" else [2 + 2] * 2
            self.assertEqual(self.count(model, 2), expected)

    @parametrize("name", ["foreach_all_gather", "foreach_reduce"])
    def test_monkeypatched_functions_are_not_compared(self, name: str) -> None:
        wrapped = functools.partial(getattr(param_group, name))
        with mock.patch.object(param_group, name, wrapped):
            self.assertEqual(self.count(self.sharded(), 2), [3, 0])

    def test_traced_steps_are_not_compared(self) -> None:
        model = self.sharded()
        with mock.patch.object(agreement, "_is_traced", lambda *_: True):
            self.assertEqual(self.count(model, 2), [0, 0])
        self.assertEqual(self.count(model, 2), [6, 0])

    def test_other_parameters_are_fine_where_zeros_stand_in(self) -> None:
        model = self.sharded()
        model.set_reduce_scatter_unused_params(True)
        mine = ["up" if self.rank == 2 else "gate"]
        self.assertEqual(self.count(model, 3, used=mine), [6, 0, 0])
        backward(model, used=mine)
        share = [model[1].gate.grad.full_tensor(), model[1].up.grad.full_tensor()]
        self.assertEqual([grad[0].item() for grad in share], [3 / 8, 1 / 8])


@unittest.skipIf(utils.LAUNCHED_RANK is not None, "the launched group is there already")
class TestWithoutOtherRanks(utils.FakeGroupTest):
    """A process group that sends nothing, or no data to send."""

    ranks = 2

    @parametrize("is_real", [False, True])
    def test_groups_without_other_ranks_compare_nothing(self, is_real: bool) -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        # Whose ranks may come and go, and which may have no all-gather
        elastic = type("Elastic", (dist.ProcessGroup,), {})(0, 2)
        agreement.UnitAgreement(SimpleNamespace(device=None))._compare(elastic)
        real = mock.patch.object(agreement, "backend_name", lambda *_: "gloo")
        with contextlib.ExitStack() as stack, counting_comparisons() as sent:
            for context in (FakeTensorMode(), real) if is_real else ():
                stack.enter_context(context)
            fully_shard(Scales(), mesh=mesh)(torch.ones(2)).sum().backward()
        sent.assert_not_called()


# Only the limit ends ranks that have drifted apart by default, and wait for each other
SHORT_TIME_LIMIT = datetime.timedelta(seconds=6)
ENDED = "Connection closed by peer|Connection reset by peer|Timed out waiting"
NOTE = (
    r"(?s)Raised while (gathering|reducing the gradients of) unit '(\(root\)|\d)'"
    ".*must run it .* on a dummy input"
)
ODD = 1
# A difference of the odd rank, how often the others do it, and the steps that
# each has then done
DRIFTS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "parameter_skipped": ({"used": ("up",)}, 1, [0, 0]),
    "unit_skipped": ({"run": (0, 2)}, 1, [0, 0]),
    # Until one has ended, whom the other waits for
    "microbatch_skipped": ({"microbatches": 1}, 2, [1, 2]),
}


def drift(name: str, rank: int, folder: str) -> None:
    """Writes how many steps a rank has done, and what it raised."""
    odd, microbatches, steps = DRIFTS[name]
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store of {name}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, done, error = utils.shard_blocks(blocks(3, gate=4, up=4)), 0, ""
    for _ in range(3):
        step(model, microbatches)
    if not any(steps):
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(SHORT_TIME_LIMIT)
    try:
        for _ in range(2):
            alike = {"microbatches": microbatches}
            step(model, **alike | (odd if rank == ODD else {}))
            done += 1
    except RuntimeError as caught:
        error = "\n".join([str(caught), *getattr(caught, "__notes__", ())])
    Path(folder, f"{name} {rank}").write_text(f"{done} {error}")
    os._exit(0)  # without a word to the other


@unittest.skipIf(utils.LAUNCHED_RANK is not None, "starts ranks of its own")
@unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
class TestRanksDriftApart(utils.DeviceFreeTest):
    """By default ranks are not compared where nothing is new, and none goes on."""

    def test_no_rank_goes_on_after_a_drift(self) -> None:
        ranks = [*product(DRIFTS, range(2))]
        with tempfile.TemporaryDirectory() as folder:
            start = utils.fork_server().Process
            processes = [start(target=drift, args=(*who, folder)) for who in ranks]
            for process in processes:  # most of them wait most of the time
                process.start()
            for process in processes:
                process.join()
            found = {
                (name, rank): Path(folder, f"{name} {rank}").read_text()
                for name, rank in ranks
            }
        for (name, rank), text in found.items():
            done, _, error = text.partition(" ")
            expected = DRIFTS[name][2][rank]
            with self.subTest(name, rank=rank):
                self.assertEqual(int(done), expected, text)
                if expected < 2:
                    self.assertRegex(error, ENDED)
                    self.assertRegex(error, NOTE)
        text = "gradients of unit '2', without a gradient of 2.gate."
        self.assertIn(text, found["parameter_skipped", ODD])


if __name__ == "__main__":
    run_tests()
