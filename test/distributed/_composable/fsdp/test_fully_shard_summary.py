# Owner(s): ["oncall: distributed"]
"""The summary of units says what they send, as the collectives of a step show."""

import logging
import operator
from dataclasses import replace
from itertools import chain
from typing import Any

from fsdp_helpers.common import utils
from fsdp_helpers.common.comms import BF16, FP16, FP32, FP64, group_of, mesh_of
from fsdp_helpers.parity.models import Fp8

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_summary import LayoutRow, LayoutSummary
from torch.testing._internal.common_utils import parametrize, run_tests


def rows_by_unit(summary: LayoutSummary) -> list[list[LayoutRow]]:
    """Returns the rows of each unit, of which the last one sums up the others."""
    units: list[list[LayoutRow]] = [[]]
    for row in summary.rows:
        units[-1].append(row)
        if not row.names:
            units.append([])
    return units[:-1]


def reduced_bytes(rows: list[LayoutRow]) -> list[tuple[torch.dtype, int]]:
    """Returns reduce dtype and bytes of a unit's reductions, which have no padding."""
    nbytes: dict[Any, int] = {}
    for row in rows:
        if row.reduce_dtype is not None:
            key = row.reduce_dtype, row.comm_dtype
            nbytes[key] = nbytes.get(key, 0) + row.reduced_nbytes
    return [(dtype, count) for (dtype, _), count in nbytes.items()]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = utils.CastLinear(16, 16, dtype=BF16)
        self.norm = nn.LayerNorm(16)
        self.down = utils.CastLinear(16, 16, bias=False, dtype=FP16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.up(x).to(self.norm.weight.dtype))
        return self.down(normed).to(x.dtype)


def sharded_units() -> nn.Sequential:
    model = nn.Sequential(Unit(), Unit(), utils.CastLinear(16, 16))
    model[0].norm.requires_grad_(False)
    patterns = {"*.norm.*": {"param_dtype": FP32}, "*.down.*": {"reduce_dtype": FP16}}
    policy = MixedPrecisionPolicy.by_name(model, patterns, param_dtype=BF16)
    for unit in (*model[:2], model):
        fully_shard(unit, mp_policy=policy)
    return model


class TestSummaryOfOneRank(utils.FakeGroupTest):
    """Runs as one of eight ranks, whose group sends nothing."""

    def test_parts_whose_names_are_ambiguous_until_the_first_forward(self) -> None:
        """It knows what it says, and changes nothing."""
        linears = [utils.CastLinear(8, 8) for _ in range(3)]
        blocks = [nn.Sequential(linear, nn.LayerNorm(8)) for linear in linears[:2]]
        model = nn.Sequential(*blocks, linears[2])
        # "1.weight" is a name of a part's norm, and the end of those of both norms;
        # "0.weight" is the root's only as the end of the names of two others
        patterns = {"1.1.*": {"param_dtype": FP32}, "0.0.*": {"reduce_dtype": FP64}}
        policy = MixedPrecisionPolicy.by_name(model, patterns, param_dtype=BF16)
        for unit in (*blocks, model):
            fully_shard(unit, mp_policy=policy)
        params = [p for unit in (*blocks, model) for p in group_of(unit).fsdp_params]
        policies = [fsdp_param.mp_policy for fsdp_param in params]
        whole = layout_summary(model)
        for block in blocks:
            line = str(layout_summary(block)).splitlines()[2].split()
            self.assertEqual(line, ["(root)", "4", "88", "float32", *"????"])
        after = [fsdp_param.mp_policy for fsdp_param in params]
        self.assertTrue(all(map(operator.is_, after, policies)))
        of_wrapped = layout_summary(nn.Sequential(model)).rows
        for row, expected in zip(of_wrapped, whole.rows, strict=True):
            self.assertEqual(replace(row, unit=expected.unit), expected)
        model(torch.ones(2, 8)).sum().backward()
        self.assertEqual(layout_summary(model), whole)
        for block, rows in zip(blocks, rows_by_unit(whole)[1:], strict=True):
            found = [row.compute_dtype for row in layout_summary(block).rows]
            self.assertEqual(found, [row.compute_dtype for row in rows])

    def test_group_of_modules_and_compiled_root_are_one_unit_each(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard([model[0], model[2]])
        fully_shard(model)
        rows = layout_summary(torch.compile(model)).rows
        units = [row.unit for row in rows if not row.names]
        self.assertEqual(units, ["_orig_mod", "_orig_mod.0, _orig_mod.2"])

    def test_dtypes_that_users_set_make_rows_of_their_own(self) -> None:
        model = nn.Linear(4, 4, dtype=BF16)
        model.weight.grad_dtype, model.bias.grad_dtype = FP64, None
        patterns = {"weight": {"grad_comm_dtype": BF16}}
        policy = MixedPrecisionPolicy.by_name(model, patterns, reduce_dtype=FP32)
        fully_shard(model, mp_policy=policy)
        found = {
            row.names: (row.grad_dtype, row.comm_dtype, row.reduced_nbytes, row.after)
            for row in layout_summary(model).rows[:-1]
        }
        # Each rank has one row of both, which some have only as padding
        expected = {
            ("bias",): (FP32, None, 4 * self.ranks, None),
            ("weight",): (FP64, BF16, 8 * self.ranks, float(self.ranks)),
        }
        self.assertEqual(found, expected)
        group_of(model).mp_policy = MixedPrecisionPolicy(FP16)  # as trainers set it
        model.set_gradient_divide_factor(3)
        row, _ = layout_summary(model).rows[:-1]
        found = row.compute_dtype, row.comm_dtype, row.divided_by
        self.assertEqual(found, (FP16, None, 3))

    def test_debug_log_at_first_forwards(self) -> None:
        logger = "torch.distributed.fsdp.fully_shard.layout"
        model = sharded_units()
        summary = layout_summary(model)
        model[1].unshard()
        with self.assertLogs(logger, logging.DEBUG) as logs:
            for _ in range(2):
                model(torch.ones(2, 16)).sum().backward()
                model[0].unshard()
        tables = [record.getMessage() for record in logs.records]
        self.assertEqual(len(tables), 3)
        self.assertEqual(layout_summary(model), summary)
        for rows, table in zip(rows_by_unit(summary), tables, strict=True):
            self.assertEqual(str(LayoutSummary(tuple(rows))), table)
        # Titles, a line, three rows of dtypes, a frozen one, and their sum
        lines = [line.split() for line in tables[1].splitlines()]
        self.assertEqual({line[0] for line in lines[2:]}, {"0"})
        self.assertEqual(lines[3][-5:], ["512", "8", "(4,", "then", "2)"])
        self.assertIn("(frozen)", lines[4])
        self.assertEqual(lines[5], ["0", "all", "560", "1,280", "1,056"])


class TestSummaryOfSteps(utils.FSDPThreadTest):
    """What the summary says is what a step sends."""

    world_size = 4

    def check_step(self, model: Any, dim: int, kind: str) -> LayoutSummary:
        """Returns what was said before a step, if the step sends it."""
        summary = layout_summary(model)
        x = torch.ones(2, dim, device=self.device, requires_grad=True)
        with utils.record_collectives() as recorder:
            model(x).sum().backward()
        self.assertEqual(summary, layout_summary(model))
        units = rows_by_unit(summary)
        gathered = [call.nbytes for call in recorder.all_gathers]
        said = [rows[-1].gathered_nbytes for rows in units]
        # Replicated parameters gather nothing
        self.assertEqual(gathered, [nbytes for nbytes in said if nbytes])
        reduced = [(call.dtype, call.nbytes) for call in recorder.named(kind)]
        self.assertEqual(reduced, [*chain(*map(reduced_bytes, units[::-1]))])
        total = sum(rows[-1].reduced_nbytes for rows in units)
        self.assertEqual(total, sum(nbytes for _, nbytes in reduced))
        if kind == "reduce_scatter":
            said = [
                (row.reduce_dtype, row.all_reduced_nbytes, row.num_replicas)
                for row in chain(*units[::-1])
                if row.names and row.all_reduced_nbytes
            ]
            sent = [(c.dtype, c.nbytes, c.group_size) for c in recorder.all_reduces]
            self.assertEqual(said, sent)
        return summary

    @parametrize("has_policy", [False, True])
    def test_bytes_are_those_of_a_step(self, has_policy: bool) -> None:
        model: Any = utils.mixed_model(2)
        patterns = {"*.down.*": {"reduce_dtype": BF16}, "*.up.*": {"param_dtype": FP32}}
        policy = MixedPrecisionPolicy()
        if has_policy:
            model = nn.Sequential(Unit(), Unit())
            model[0].norm.requires_grad_(False)
            policy = MixedPrecisionPolicy.by_name(model, patterns)
        # The root holds nothing itself
        utils.shard_blocks(model, reshard_after_forward=False, mp_policy=policy)
        self.check_step(model, 16 if has_policy else 9, "reduce_scatter")

    @parametrize("is_sharded", [False, True])
    def test_hsdp_and_replicate_divide_by_all_ranks(self, is_sharded: bool) -> None:
        model = Unit().to(self.device)
        if is_sharded:
            fully_shard(model, mesh=mesh_of(2, 2))
        else:
            replicate(model, mesh=mesh_of(4))
        kind = "reduce_scatter" if is_sharded else "all_reduce"
        summary = self.check_step(model, 16, kind)
        *rows, total = summary.rows
        self.assertEqual(total.gathered_nbytes > 0, is_sharded)
        title, _, first, *_ = str(summary).splitlines()
        self.assertRegex(title, "all-reduced$" if is_sharded else "divided by$")
        self.assertRegex(first, " 64 in float32, 2 ranks$" if is_sharded else " 4$")
        factors = {r.reduce_dtype: (r.divided_by, r.before, r.after) for r in rows}
        self.assertEqual(factors[FP32], (4, None, None))
        self.assertEqual(factors[FP16], (4, 2, 2))

    @parametrize("sizes", ["", "41", "4"])  # of the mesh, or by `replicate`
    def test_one_shard_rank_sends_nothing_in_the_comm_dtype(self, sizes: str) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=FP32, grad_comm_dtype=BF16)
        model = nn.Linear(16, 16, bias=False, dtype=BF16, device=self.device)
        shard = fully_shard if sizes else replicate
        shard(model, mesh=mesh_of(*map(int, sizes or "4")), mp_policy=policy)
        summary = layout_summary(model)
        with utils.record_collectives() as recorder:
            model(torch.ones(2, 16, dtype=BF16, device=self.device)).sum().backward()
        first = recorder.named("all_to_all")[0]
        self.assertEqual(summary.rows[0].reduced_nbytes, first.nbytes)
        self.assertEqual(first.dtype, BF16 if sizes == "4" else FP32)
        verb = "sent in" if sizes == "4" else "cast to"
        self.assertIn(f"float32, {verb} bfloat16", str(summary))

    def test_extension_tensors_are_known_after_their_first_gather(self) -> None:
        model = nn.Linear(2, 8)
        model.weight = nn.Parameter(Fp8(torch.randn(8, 2)))
        fully_shard(model)
        summary = layout_summary(model)
        self.assertIsNone(summary.rows[-1].gathered_nbytes)
        self.assertIn(" ?  ", str(summary))
        with utils.record_collectives() as recorder:
            model.unshard()
        rows = layout_summary(model).rows
        self.assertEqual(rows[-1].gathered_nbytes, recorder.all_gathers[0].nbytes)
        self.assertIn("weight", rows[0].names)
        model.reshard()
        model(torch.ones(1, 2)).sum().backward()
        self.assertEqual(layout_summary(model).rows, rows)


if __name__ == "__main__":
    run_tests()
