# Owner(s): ["oncall: distributed"]
"""
``docs/guide.md`` shows what is counted. Scripts count what a step calls, and their plans
are of the same collectives. Times are never asserted, but the arithmetic of the model.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from unittest import mock

from fsdp_common.utils import DeviceFreeTest, FakeGroupTest, REPO_ROOT

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import set_reduce_bucket_cap
from torch.distributed.fsdp._fully_shard._fsdp_layout import ReduceBucketCap
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


FOLDER = REPO_ROOT / "benchmarks" / "distributed" / "fsdp"
sys.path.insert(0, str(FOLDER))

import _calls  # noqa: E402
import _models  # noqa: E402
import collective_latency  # noqa: E402
import collective_times  # noqa: E402
import fewer_collectives  # noqa: E402
from _calls import (  # noqa: E402
    Call,
    EXCHANGED,
    JOINED,
    TODAY,
    UPCAST,
)
from collective_times import calls_of, Mesh, Network, seconds  # noqa: E402


PAGE = REPO_ROOT / "docs" / "guide.md"


def kinds_of(calls: list[Call]) -> dict[str, int]:
    return dict(Counter(call.kind for call in calls))


def cells_of(row: str) -> dict[str, str]:
    """Returns the cells of a row of the page's table, by the way."""
    ways, rows = PAGE.read_text().split("| model | ")[1].split(" |\n", 1)
    (line,) = re.findall(rf"(?m)^\| {re.escape(row)} \| (.+) \|$", rows)
    return dict(zip(ways.split(" | "), line.split(" | "), strict=True))


class TestTraining(FakeGroupTest):
    """The model of ``make train``, over two ranks."""

    ranks = 2

    def calls(self, way: str) -> list[Call]:
        mesh = init_device_mesh("cpu", (self.ranks,))
        return fewer_collectives.of_training(way, mesh)

    def test_collectives(self) -> None:
        reductions = {
            TODAY: {"reduce-scatter": 11},
            EXCHANGED: {"all-to-all": 4},
            JOINED: {"reduce-scatter": 6},
            UPCAST: {"reduce-scatter": 4},
        }
        nbytes = {}
        for way, expected in reductions.items():
            calls = self.calls(way)
            self.assertEqual(kinds_of(calls), {"all-gather": 7, **expected})
            nbytes[way] = sum(call.nbytes for call in calls)
        model = fewer_collectives.build_model()
        blocks = sum(p.nbytes for p in model.blocks.parameters())
        root = sum(p.nbytes for p in model.parameters()) - blocks
        least = (2 + 1) * blocks + (1 + 1) * root  # gathered and reduced
        self.assertEqual(
            {nbytes.pop(way) for way in (TODAY, EXCHANGED, JOINED)}, {least}
        )
        self.assertGreater(nbytes[UPCAST], 1.9 * least)

    def test_page_shows_it(self) -> None:
        mesh = init_device_mesh("cpu", (self.ranks,))
        name = fewer_collectives.TRAINED
        for way, shown in cells_of(name).items():
            self.assertEqual(shown, fewer_collectives.cell(name, way, mesh), way)


def nemotron() -> nn.Module:
    return _models.NemotronHBlock(dim=64, heads=4, state=16)


def adapters() -> nn.Module:
    return _models.AdapterBlock(dim=64, heads=4, hidden=96)


class Padded(nn.Module):
    """Its rows divide by no number of ranks, and its segments need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))
        self.gain = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight.sum() + self.gain.sum()).to(x.dtype)


BLOCKS = {"nemotron": nemotron, "adapters": adapters, "padded": Padded}
COUNT = 5


@instantiate_parametrized_tests
class TestPlans(FakeGroupTest):
    """Blocks are small, so that some of their buckets are and others are not."""

    def mesh(self, mesh: Mesh) -> DeviceMesh:
        if mesh.replicas == 1:
            return init_device_mesh("cpu", (mesh.shards,))
        shape, names = (mesh.replicas, mesh.shards), ("replicate", "shard")
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    @parametrize("replicas", (1, 2))
    @parametrize("way", collective_times.WAYS)
    @parametrize("name", [*BLOCKS])
    def test_a_step_calls_what_is_planned(
        self, name: str, way: str, replicas: int
    ) -> None:
        block, mesh = BLOCKS[name], Mesh(replicas, self.ranks // replicas)
        model = _calls.sharded([block() for _ in range(COUNT)], way, self.mesh(mesh))
        planned = block().float() if way == UPCAST else block()
        x = torch.randn(1, 4, 64, dtype=next(planned.parameters()).dtype)
        # The second is filled before the end, and the third holds all
        for cap in ((8, 1024), (8, 2), (1024, 1024)):
            if way in _calls.JOINS:
                set_reduce_bucket_cap(model, cap[1] / 1024, small_kb=cap[0])
            calls = fewer_collectives.calls_in(lambda: model(x))
            sizes = ReduceBucketCap(*(2**10 * kib for kib in cap))
            plan = calls_of([planned] * COUNT, way, mesh, sizes)
            self.assertEqual(Counter(calls), Counter(plan))

    def test_one_all_to_all_for_each_unit(self) -> None:
        for block in BLOCKS.values():
            mesh = self.mesh(Mesh(1, self.ranks))
            model = _calls.sharded([block() for _ in range(COUNT)], EXCHANGED, mesh)
            x = torch.randn(1, 4, 64, dtype=torch.bfloat16)
            step = functools.partial(model, x)
            kinds = kinds_of(fewer_collectives.calls_in(step))
            self.assertEqual(kinds, {"all-gather": 2 * COUNT, "all-to-all": COUNT})

    def test_page_shows_the_blocks_of_the_step_benchmark(self) -> None:
        for name in ("Nemotron-H-like", "fp32 adapters"):
            block, shown = _models.BLOCKS[name], cells_of(name)
            for way in {*collective_times.WAYS} & {*shown}:
                with torch.device("meta"):
                    planned = block().float() if way == UPCAST else block()
                blocks = [planned] * _models.NUM_BLOCKS
                calls = [*calls_of(blocks, way, Mesh(1, self.ranks))]
                gathers = kinds_of(calls)["all-gather"]
                kib = sum(call.nbytes for call in calls) / 2**10
                cell = f"{gathers} + {len(calls) - gathers}; {kib:,.0f}"
                self.assertEqual(shown[way], cell, (name, way))

    def test_waits_are_those_of_a_ring(self) -> None:
        self.addCleanup(collective_latency._build.cache_clear)
        for way, count in {TODAY: 24, EXCHANGED: 18, JOINED: 19}.items():
            with mock.patch.object(collective_latency.time, "sleep") as sleep:
                found = collective_latency.measure(way, hop_us=100, steps=1)
            self.assertEqual(found["collectives"], count)
            waits = [round(call.args[0] * 1e6) for call in sleep.call_args_list]
            self.assertEqual(waits, 2 * count * [(self.ranks - 1) * 100])


# A hop in a node takes 1 us, and 1 GB/s is 1000 bytes a us
NETWORK = Network(
    hop_us=1, hop_between_us=10, gb_per_s=100, gb_per_s_between=10, node=4
)


class TestTimes(DeviceFreeTest):
    def assert_us(self, call: Call, *, rings: float, trees: float) -> None:
        for is_tree, expected in ((False, rings), (True, trees)):
            us = seconds(call, NETWORK, trees=is_tree) * 1e6
            self.assertAlmostEqual(us, expected, msg=str(call))

    def test_in_a_node(self) -> None:
        # 3 of 4 parts of 4 MB at 100 GB/s: 30 us
        for kind, passes in {
            "all-gather": 1,
            "reduce-scatter": 1,
            "all-reduce": 2,
        }.items():
            call = Call(kind, 4_000_000, 4, 1)
            self.assert_us(call, rings=passes * (3 + 30), trees=passes * (2 + 30))
        self.assert_us(Call("all-to-all", 4_000_000, 4, 1), rings=3 + 30, trees=1 + 30)

    def test_between_nodes(self) -> None:
        # 7 of 8 parts of 8 MB at what four links have, 40 GB/s: 175 us
        call = Call("reduce-scatter", 8_000_000, 8, 1)
        self.assert_us(call, rings=6 + 10 + 175, trees=2 + 10 + 175)
        # 3 parts in the node, 30 us, and 4 over the rank's own link, 400 us
        call = Call("all-to-all", 8_000_000, 8, 1)
        self.assert_us(call, rings=3 + 40 + 430, trees=1 + 10 + 430)

    def test_over_replicas(self) -> None:
        """Each is in another node: 3 of 4 parts of 4 MB at 10 GB/s are 300 us."""
        call = Call("all-reduce", 4_000_000, 4, 4)
        self.assert_us(call, rings=2 * (30 + 300), trees=2 * (20 + 300))
        call = Call("all-to-all", 4_000_000, 4, 4)
        self.assert_us(call, rings=30 + 300, trees=10 + 300)


if __name__ == "__main__":
    run_tests()
