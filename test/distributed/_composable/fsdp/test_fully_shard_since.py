# Owner(s): ["oncall: distributed"]

"""
What releases later than 2.13 added to FSDP2: on the release that has it, a uniform unit
does as the release, and a mixed unit does it too.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

import unittest
from typing import Any

from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE, HAS_SPMD_TYPES
from fsdp_common.run_both import Results, run_on
from fsdp_common.utils import DeviceFreeTest

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


UNIFORM = (
    "storage_that_is_kept",
    "finalized_by_hand",
    "finalization_that_is_refused",
    "outputs_that_an_extension_releases",
    "steps_of_ones_own",
    "inputs_that_are_padded",
    "grad_dtypes_of_all",
    "iteration_that_is_given_up",
    "unused_without_a_dtype",
)
MIXED = (
    "mixed_storage_that_is_kept",
    "mixed_finalized_by_hand",
    "mixed_finalization_that_is_refused",
    "mixed_outputs_that_an_extension_releases",
    "mixed_steps_of_ones_own",
    "mixed_inputs_that_are_padded",
)
SCRIPT = "fsdp_plugins.scenarios"


class SinceTest(DeviceFreeTest):
    release: Results
    branch: Results

    def results_of(self, name: str) -> list[Any]:
        for results in self.branch:
            self.assertNotIn("error", results[name])
        return [results[name] for results in self.branch]

    def assert_equal_bits(self, actual: Any, expected: Any) -> None:
        if isinstance(expected, torch.Tensor):
            self.assertEqual(actual.dtype, expected.dtype)
            self.assertTrue(torch.equal(actual, expected))
        elif isinstance(expected, dict):
            self.assertEqual(actual.keys(), expected.keys())
            self.assert_equal_bits([*actual.values()], [*expected.values()])
        elif isinstance(expected, (list, tuple)):
            for one, other in zip(actual, expected, strict=True):
                self.assert_equal_bits(one, other)
        else:
            self.assertEqual(actual, expected)


@unittest.skipUnless(FOLLOWS_GRAD_DTYPE, "came with 2.15")
class TestSince215(SinceTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release = run_on(SCRIPT, "--only", *UNIFORM, on_release=True)
        names = (*UNIFORM, *MIXED)
        cls.branch = run_on(SCRIPT, "--mixed", "--only", *names, on_release=False)

    @parametrize("name", UNIFORM)
    def test_uniform_unit_does_as_the_release(self, name: str) -> None:
        for release, mine in zip(self.release, self.results_of(name), strict=True):
            self.assertNotIn("error", release[name])
            self.assertGreater(len(release[name]), 0)
            self.assert_equal_bits(mine, release[name])

    def test_storage_is_kept_until_it_need_not_be(self) -> None:
        for results in self.results_of("mixed_storage_that_is_kept"):
            kept, plain = results["kept"], results["plain"]
            for fact in ("allocated", "same places", "freed"):
                self.assertTrue(kept.pop(fact), fact)
            self.assertEqual(kept, plain)

    @parametrize("in_background", [False, True])
    def test_gradients_wait_for_finalization(self, in_background: bool) -> None:
        for results in self.results_of("mixed_finalized_by_hand"):
            record = dict(results[str(in_background)])
            seen, left = record.pop("seen"), record.pop("left")
            self.assertEqual(record, results["plain"])
            self.assertEqual({*left}, {False})
            texts = [text for text in seen if isinstance(text, str)]
            self.assertEqual([text for text in seen if text not in texts], [True] * 2)
            # Neither forward nor another finalization before the handle's wait
            self.assertEqual(len(texts), 4 * in_background)
            for text in texts:
                self.assertIn("must be waited on before", text)

    def test_put_off_all_reduces_cannot_be_finalized(self) -> None:
        for results in self.results_of("mixed_finalization_that_is_refused"):
            self.assertEqual(len(results), 2)
            for text in results.values():
                self.assertIn("does not support partial", text)
                self.assertIn("parameter group '<root>'", text)

    def test_extension_lets_go_of_its_inputs(self) -> None:
        for results in self.results_of("mixed_outputs_that_an_extension_releases"):
            for turn in range(4):
                self.assertTrue(results[f"{turn} freed"])
                self.assert_equal_bits(results[f"{turn} values"], results["0 values"])

    def test_inputs_are_prepared_by_others(self) -> None:
        """For each bucket; what is gathered must be of one dtype."""
        for results in self.results_of("mixed_steps_of_ones_own"):
            # Two steps of two blocks of two dtypes, and a root of one
            self.assertEqual(results["calls"], {"outputs": 0, "inputs": 2 * 5})
            self.assertIn("blocks.0.layers.0.weight", results["refused"])
        (doubled, *_) = self.results_of("steps_of_ones_own")
        self.assertEqual(doubled["calls"]["inputs"], 2 * 3)

    def test_inputs_are_padded_by_others(self) -> None:
        """Whatever is behind a rank's part, and whichever dim it is sharded on."""
        for results in self.results_of("mixed_inputs_that_are_padded"):
            self.assertEqual(results["padded"], results["plain"])


class TestExtensions(SinceTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        name = "inputs_that_an_extension_changes"
        cls.branch = run_on(SCRIPT, "--mixed", "--only", name, on_release=False)

    def test_extension_gathers_other_inputs_by_turns(self) -> None:
        for results in self.results_of("inputs_that_an_extension_changes"):
            in_parts, whole = ["torch.bfloat16", "torch.float16"], ["torch.float32"]
            dtypes = [results[f"{turn} dtypes"] for turn in range(4)]
            self.assertEqual(dtypes, [in_parts, whole] * 2)
            exact = results["1 values"]
            self.assert_equal_bits(results["3 values"], exact)
            for turn in (0, 2):
                error = (results[f"{turn} values"] - exact).abs().max()
                self.assertLess(error, 1e-5)


@unittest.skipUnless(HAS_SPMD_TYPES, "needs spmd_types, and a release that knows it")
class TestSpmdTypes(SinceTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        uniform, mixed = "annotated_parameters", "mixed_annotated_parameters"
        cls.release = run_on(SCRIPT, "--only", uniform, on_release=True)
        names = (uniform, mixed)
        cls.branch = run_on(SCRIPT, "--mixed", "--only", *names, on_release=False)

    def test_uniform_unit_does_as_the_release(self) -> None:
        results = self.results_of("annotated_parameters")
        for release, mine in zip(self.release, results, strict=True):
            self.assertNotIn("error", release["annotated_parameters"])
            self.assert_equal_bits(mine, release["annotated_parameters"])

    def test_annotations_are_there_where_types_are_checked(self) -> None:
        for results in self.results_of("mixed_annotated_parameters"):
            (_, none), (is_checking, types) = results["seen"]
            self.assertTrue(is_checking)
            self.assertEqual(none, ["{}"] * 2)
            for text in types:
                self.assertRegex(text, r"_replicate: I, .*_shard: R")
            dtypes = [grad.dtype for grad in results["grads"]]
            self.assertEqual(dtypes, [torch.float32, torch.bfloat16])


instantiate_parametrized_tests(TestSince215)


if __name__ == "__main__":
    run_tests()
