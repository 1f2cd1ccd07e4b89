# Owner(s): ["oncall: distributed"]
"""
What plugins and trainers outside of torch use of ``fully_shard``'s modules.

A unit of one dtype gives them what it gives under the release, and what they replace is
called as often. The same of what later releases than 2.13 added.
"""

import unittest
from itertools import chain

import pytest

from fsdp_helpers.common.release_rules import HAS_SPMD_TYPES, IS_2_15
from fsdp_helpers.common.scenario_test import ScenarioTest
from fsdp_helpers.plugins.scenarios import SCENARIOS

from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


# What plugins do in these changes nothing: a model that is trained without it is "plain"
AS_PLAIN = ["replaced_init_mp_dtypes", "replaced_inputs"]
AS_PLAIN_SINCE_2_15 = [
    "storage_that_is_kept",
    "finalized_by_hand",
    # Whatever is behind a rank's part, and whichever dim it is sharded on
    "inputs_that_are_padded",
]


class TestPlugins(ScenarioTest):
    script = "fsdp_helpers.plugins.scenarios"

    @parametrize("name", SCENARIOS.names(is_on_release=True))
    def test_uniform_unit_does_as_the_release(self, name: str) -> None:
        """What plugins replace is called as often."""
        self.assertTrue(self.check(name).get("calls", True))

    def test_partial_reduce_is_read_and_written(self) -> None:
        for results in self.results_of("uniform partial_reduce_output"):
            seen = results["read"]["seen"]
            self.assertNotIn(None, seen[:3])
            self.assertEqual(seen[3:6], [None] * 3)
            last = {record["0 gradient head.weight"] for record in results.values()}
            # As read, dropped, replaced, and scaled in place
            self.assertEqual(len(last), 4)

    @parametrize("name", AS_PLAIN + AS_PLAIN_SINCE_2_15 * IS_2_15)
    def test_mixed_unit_trains_as_without(self, name: str) -> None:
        for results in self.results_of(f"mixed {name}"):
            records = {k: v for k, v in results.items() if isinstance(v, dict)}
            plain = records.pop("plain")
            self.assertGreater(len(records), 0)
            for key, record in records.items():
                self.check_same(key, record, plain)
            self.assertTrue(results.get("calls", True))

    def test_mixed_group_has_no_one_dtype(self) -> None:
        for results in self.results_of("mixed dtypes_of_a_group"):
            root, *blocks = results["none"]
            by_release = "None" if IS_2_15 else "torch.float32"
            self.assertEqual(root[0], by_release)
            self.assertEqual({*chain(*blocks)}, {"None"})

    def test_mixed_unit_trains_on_with_other_parameters(self) -> None:
        """Some of which were replaced while the unit was unsharded."""
        for results in self.results_of("mixed list_of_parameters_changed"):
            for name, record in results.items():
                losses = {record[f"{step} loss"] for step in range(4)}
                self.assertEqual(len(losses), 4, name)
                missing = [k for k, v in record.items() if v is None]
                # The parameter is frozen
                dropped = [f"{i} gradient blocks.0.layers.0.shift" for i in (2, 3)]
                self.assertEqual(missing, dropped if "drop" in name else [], name)

    def test_several_partial_reduces_are_read_as_a_tuple(self) -> None:
        for results in self.results_of("mixed several_partial_reduce_outputs"):
            root, *blocks = results["kept"]
            # Over two ranks: 18 of weight, 3 of gain, and two rows of six of shift
            names = "torch.float32", "torch.bfloat16"
            wide, narrow = (("Tensor", name, (33,)) for name in names)
            self.assertEqual(root, wide)
            self.assertEqual(blocks, [("tuple", [wide, narrow])] * 2)
            self.assertEqual(results["left"], [None] * 3)

    def test_replaced_copy_in_gets_gradients_of_one_dtype(self) -> None:
        for results in self.results_of("mixed replaced_reduce_scatter_copy_in"):
            self.assertEqual({dtypes for _, dtypes, _ in results["calls"]}, {1})

    @unittest.skipUnless(HAS_SPMD_TYPES, "needs spmd_types, and a release that has it")
    def test_annotations_are_there_where_types_are_checked(self) -> None:
        for results in self.results_of("mixed annotated_parameters"):
            (_, none), (is_checking, types) = results["seen"]
            self.assertTrue(is_checking)
            self.assertEqual(none, ["{}"] * 2)
            for text in types:
                self.assertRegex(text, r"_replicate: I, .*_shard: R")
            for i, dtype in enumerate(("float32", "bfloat16")):
                self.assertIn(dtype, results[f"gradient params.{i}"])


@unittest.skipUnless(IS_2_15, "came with 2.15")
class TestMixedUnitsOf215(ScenarioTest):
    """What 2.15 added works in mixed units as in uniform ones."""

    script = "fsdp_helpers.plugins.scenarios"

    def test_storage_is_kept_until_it_need_not_be(self) -> None:
        for results in self.results_of("mixed storage_that_is_kept"):
            self.assertEqual(results["allocated, in place, freed"], [True] * 3)

    def test_gradients_wait_for_finalization(self) -> None:
        for results in self.results_of("mixed finalized_by_hand"):
            self.assertEqual(results["at once seen"], [True] * 2)
            # In both steps no gradient is there yet, and neither forward nor another
            # finalization may precede the handle's wait
            seen = results["in background seen"]
            self.assertEqual(seen[::3], [True] * 2)
            self.assertEqual(len(seen), 6)
            for text in (*seen[1:3], *seen[4:]):
                self.assertIn("must be waited on before", text)
            for how in ("at once", "in background"):
                self.assertEqual({*results[f"{how} left"]}, {False})

    def test_deferred_all_reduces_cannot_be_finalized(self) -> None:
        for results in self.results_of("mixed finalization_that_is_refused"):
            for text in results.values():
                self.assertIn("does not support partial", text)
                self.assertIn("parameter group '<root>'", text)

    def test_extension_lets_go_of_its_inputs(self) -> None:
        for results in self.results_of("mixed outputs_that_an_extension_releases"):
            self.assertEqual(results["freed"], [True] * 4)
            self.assertEqual(results["values"], results["values"][:1] * 4)

    def test_plugin_prepares_inputs_for_each_bucket(self) -> None:
        for results in self.results_of("mixed inputs_that_are_padded"):
            # Both ways in two steps of two blocks of two dtypes, and a root of one
            self.assertEqual(results["calls"], [3] * 4 * 5)

    def test_plugin_that_replaces_what_is_gathered_is_refused(self) -> None:
        for results in self.results_of("mixed replaced_output_step"):
            self.assertIn("blocks.0.layers.0.weight", results["refused"])


if __name__ == "__main__":
    run_tests()
