# Owner(s): ["oncall: distributed"]
"""
``fully_shard`` with what else torch has: activation checkpointing, functorch, the
compiler, pipelining, the memory tracker, logging, copying and saving, and what others
use of FSDP's modules.

Units of one dtype behave as in the release; units of several give the numbers of one
unit of the release for each dtype, and else behave as units of one.
"""

import itertools
import math
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.comms import count_operators
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.scenario_test import ScenarioTest
from fsdp_helpers.common.scenarios import RANKS
from fsdp_helpers.common.utils import DeviceFreeTest, op_name
from fsdp_helpers.composition import contract
from fsdp_helpers.composition.contract import FACTOR_CASES, factors_of_branch
from fsdp_helpers.composition.scenarios import PATCHES, SCENARIOS

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_scaling as scaling
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


class TestComposition(ScenarioTest):
    script = "fsdp_helpers.composition.scenarios"

    @parametrize("name", SCENARIOS.names(is_on_release=True))
    def test_unit_composes_as_in_the_release(self, name: str) -> None:
        """To the last bit, a mixed unit as one of the release for each dtype."""
        record = self.check(name)
        for found in (record, *(v for v in record.values() if isinstance(v, dict))):
            # Equal records alone do not show that it trained
            gradients = [v for k, v in found.items() if k.startswith("1 gradient")]
            self.assertNotIn(None, gradients)
            if found.get("0 loss") is not None:
                self.assertNotEqual(found["0 loss"], found["1 loss"])

    @parametrize("name", ["log_messages", "memory_tracker"])
    def test_mixed_unit_is_seen_as_a_uniform_one(self, name: str) -> None:
        mixed, uniform = (self.results_of(f"{k} {name}") for k in ("mixed", "uniform"))
        self.assertEqual(mixed, uniform)

    def test_mixed_unit_is_intercepted(self) -> None:
        """As often as a uniform one, but for a reduction for each dtype."""
        sides = (self.results_of(f"{kind} patches") for kind in ("uniform", "mixed"))
        for uniform, mixed in zip(*sides, strict=True):
            self.assertEqual({*mixed}, {*PATCHES})
            for patch, calls in mixed.items():
                self.assertGreater(len(calls), 0, patch)
                units, expected = ([u for u, _ in c] for c in (calls, uniform[patch]))
                if "reduce" in patch:  # one in the root and two in each block
                    expected = [None] * (1 + 2 + 2)
                self.assertEqual(units, expected, patch)


CHANGED_RECORD = "ReduceScatterState"
# Names of the release that are gone: its own helpers, and what it imports for them. What
# comes with 2.15 begins a line
GONE = {
    "_fsdp_collectives": """
        _get_dim0_padded_size _raise_assert_with_print _ReduceOp symm_mem
        _to_dtype_if_needed
        _cast_and_view_sharded_grads _copy_all_gather_outputs
        _reassemble_all_gather_outputs _record_grad_output_stream_default
    """,
    "_fsdp_param_group": """
        _dynamo_disable _GradInputs _ModuleToHandleDict alloc_storage RemovableHandle
        _spmd_no_typecheck spmd_types
    """,
    # Attributes of a group
    "FSDPParamGroup": """
        _validate_cpu_offload_params _validate_no_meta_params
        _fsdp_params_with_wider_grad_dtype _get_partial_reduce_grad _get_reduce_dtype
        _get_unsharded_grad_to_reduce _init_reduce_scatter_param_order
        _partial_reduce_output_layout _prepare_partial_reduce_output
        _reduce_scatter_param_indices _set_unsharded_grad_dtypes
        _take_unsharded_grads_to_reduce _validate_unused_param_grad_dtypes
    """,
    # One record holds the reduce-scatter inputs of all dtypes
    CHANGED_RECORD: "reduce_scatter_input",
}
# What a group of several dtypes has no one of, and says so
OF_ONE_DTYPE = {"_orig_dtype": "None", "_reduce_dtype": "None"}
# A keyword that may be left out, and that only 2.15 has
NEW_KEYWORDS = {"all_gather_output_fn", "cache"}


class TestContract(ScenarioTest):
    """What the rest of torch, and vendors, use of the two modules."""

    script = TestComposition.script
    maxDiff = None

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release = cls.release[RANKS]["contract"]
        cls.branch = cls.branch[RANKS]["contract"]

    def test_names_of_the_release_can_be_imported(self) -> None:
        for module, names in self.release["names"].items():
            with self.subTest(module):
                self.assert_gone(names, self.branch["names"][module], module)

    def test_classes_have_the_names_of_the_release(self) -> None:
        for kind, names in self.release["class names"].items():
            with self.subTest(kind):
                self.assert_gone(names, self.branch["class names"][kind], kind)

    def assert_gone(self, names: Any, found: Any, owner: str) -> set[str]:
        """Checks that ``found`` lacks no ``names`` but those gone, which are returned."""
        gone = {*names} & {*GONE.get(owner, "").split()}
        self.assertEqual({*names} - {*found}, gone)
        return gone

    def test_functions_and_methods_take_what_they_do_in_the_release(self) -> None:
        differing = {}
        for name, parameters in self.release["signatures"].items():
            mine = self.branch["signatures"].get(name)
            if mine is None or not self.is_taken(parameters, mine):
                differing[name] = (parameters, mine)
        self.assertEqual(set(differing), {CHANGED_RECORD}, differing)
        # With its fields
        self.assertEqual(len(self.branch["signatures"]["AllGatherResult"]), 6)

    @staticmethod
    def is_taken(parameters: list[Any], mine: list[Any]) -> bool:
        """Whether what ``mine`` has after ``parameters`` may be left out."""
        more = mine[len(parameters) :]
        optional = all(
            kind.startswith("VAR_") or name in NEW_KEYWORDS for name, kind, _ in more
        )
        return mine[: len(parameters)] == parameters and optional

    def test_gradients_are_divided_by_what_the_release_divides_by(self) -> None:
        found = [*map(factors_of_branch, FACTOR_CASES)]
        expected = self.release["divide factors"]
        wrong = [i for i in zip(FACTOR_CASES, found, expected) if i[1] != i[2]]
        self.assertEqual(wrong, [])
        self.assertEqual(len(found), len(expected))

    def test_operators_take_what_they_do_in_the_release(self) -> None:
        self.assertEqual(self.branch["schemas"], self.release["schemas"])

    def test_streams_have_the_priorities_of_the_release(self) -> None:
        self.assertEqual(self.branch["priorities"], self.release["priorities"])

    def test_functorch_can_map_over_what_inputs_pass_through(self) -> None:
        found = self.release["has_vmap_rule"], self.branch["has_vmap_rule"]
        self.assertEqual(found, (True, True))

    @parametrize("owner", ["group", "context"])
    @parametrize("kind", ["uniform", "mixed"])
    def test_attributes_after_lazy_init(self, owner: str, kind: str) -> None:
        found, expected = self.branch[kind][owner], dict(self.release["uniform"][owner])
        if kind == "mixed" and owner == "group":
            expected |= OF_ONE_DTYPE
        gone = self.assert_gone(expected, found, "FSDPParamGroup")
        for name in expected.keys() - gone:
            self.assertEqual(found[name], expected[name], name)

    def test_step_on_fake_tensors(self) -> None:
        """Which have no data."""
        found, expected = self.branch["uniform"], self.release["uniform"]
        self.assertEqual(found["fake"], expected["fake"])
        mixed = self.branch["mixed"]["fake"]
        self.assertEqual(mixed["blocks.1.layers.0.weight"], ("torch.float32", [2, 6]))
        self.assertEqual(mixed["blocks.1.layers.1.gain"], ("torch.bfloat16", [2]))

    @parametrize("steps", [0, 2])
    @parametrize("kind", ["uniform", "mixed"])
    def test_modules_are_copied_saved_and_freed_as_in_the_release(
        self, steps: int, kind: str
    ) -> None:
        expected = self.release["uniform"][f"held after {steps} steps"]
        self.assertEqual(self.branch[kind][f"held after {steps} steps"], expected)
        self.assertIn("does not support deepcopy", expected["deepcopy of model"])
        self.assertEqual(expected["left"], [])
        if steps == 0:
            self.assertEqual(expected["a part keeps"], ["part"])
            self.assertEqual(expected["loaded"], "copy True, part False")


class TestOperators(DeviceFreeTest):
    @parametrize("device", ["cpu", "meta"])
    def test_operators_fill_their_outputs(self, device: str) -> None:
        """A segment of its rank, columns, and a padded row for each rank."""
        ops = torch.ops.fsdp
        inputs = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
        inputs = [tensor.to(device) for tensor in inputs]
        output = torch.zeros(15, device=device)
        segment, same = ops.all_gather_copy_in(inputs, output, [3, 2], 5, 1)
        self.assertEqual((segment.size(), segment.storage_offset()), ((5,), 5))
        self.assertEqual((same.size(), same.device.type), ((15,), device))
        columns = [torch.empty(2, size, device=device) for size in (3, 2)]
        rows = torch.arange(10.0).view(2, 5).to(device)
        ops.split_with_sizes_copy(rows, [3, 2], dim=1, out=columns)
        padded = torch.full((2, 3), -1.0, device=device)
        ops.chunk_cat(inputs, dim=0, num_chunks=2, out=padded)
        if device == "cpu":
            self.assertEqual(output.tolist(), [0] * 5 + [1, 2, 3, 4, 5] + [0] * 5)
            self.assertEqual(columns[1].tolist(), [[3, 4], [8, 9]])
            self.assertEqual(padded.tolist(), [[1, 2, 4], [3, 0, 5]])


class TestDivideFactors(DeviceFreeTest):
    """Where the release has no rule, or its rule does not hold."""

    def test_gloo_divides_after_the_sum(self):
        """And bf16, where its scaled sum may be wrong: 2.15.0 has the fix of NCCL's."""
        self.assertEqual(scaling.SCALES_BF16, IS_2_15)
        for case in FACTOR_CASES:
            shards, _, dtype, factor, _ = case
            nccl, gloo = (factors_of_branch(case, name) for name in ("nccl", "gloo"))
            # Over one rank no collective runs that would scale
            is_scaled = nccl[2] == "PREMUL_SUM" and (shards or 1) > 1
            plain = [None, factor, "SUM", None, "SUM"]
            self.assertEqual(gloo, plain if is_scaled else nccl, case)
            found = factors_of_branch(case, "nccl", scales_bf16=False)
            self.assertEqual(found, gloo if dtype == "bfloat16" else nccl, case)

    def test_over_one_rank_nothing_is_left_to_the_reduce_scatter(self):
        """Which does not run there, so that its input is divided."""
        keys = [(getattr(torch, dtype), None) for dtype in contract.DTYPES]
        keys.append((torch.float32, torch.bfloat16))
        of_all = keys, contract.REPLICAS, contract.FACTORS, (False, True)
        for case in itertools.product((None, 1), *of_all):
            shards, key, replicas, factor, force_sum = case
            groups = [n and contract.FakeGroup(n) for n in (shards, replicas)]
            settings = scaling.Scaling(*groups, "cuda", factor, force_sum)
            before, after, _, replica_op = scaling.get_divide_factors(key, settings)
            divisor = (before or 1) * (after or 1)
            divisor *= (replicas or 1) if op_name(replica_op) == "AVG" else 1
            expected = (replicas or 1) if factor is None else factor
            self.assertTrue(math.isclose(divisor, expected), case)

    def test_a_factor_of_one_is_no_kernel(self):
        grad = torch.ones(2)
        with count_operators() as counts:
            for factor in (None, 1, 1.0, 2.0):
                scaling._div_if_needed(grad, factor)
        self.assertEqual(counts, {"aten::div_": 1})

    def test_a_group_has_a_backend_for_each_device(self):
        class Both:
            def _get_backend(self, device: torch.device) -> Any:
                names = {"cpu": "gloo", "cuda": "nccl"}
                return mock.Mock(**{"name.return_value": names[device.type]})

        group: Any = Both()
        for device, name in (("cpu", "gloo"), ("cuda", "nccl"), ("cpu", "gloo")):
            self.assertEqual(scaling.backend_name(group, torch.device(device)), name)


if __name__ == "__main__":
    run_tests()
