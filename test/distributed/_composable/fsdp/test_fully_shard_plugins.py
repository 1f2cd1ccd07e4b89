# Owner(s): ["oncall: distributed"]

"""
What plugins and trainers outside of torch use of ``fully_shard``'s modules: names that
they read, write, call and replace. Under this branch a unit of one dtype gives them
what it gives under the release, and what they replace is called as often.

What is run is in ``fsdp_plugins/scenarios.py``, under both torches.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_common.release_rules import CHUNK_CAT, FOLLOWS_GRAD_DTYPE, TELLS_FROZEN_DTYPES
from fsdp_common.run_both import Results, run_on_both
from fsdp_common.utils import DeviceFreeTest

from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.long


POLICIES = ("none", "bf16_reduce_fp32", "bf16", "reduce_bf16")


def told(*dtypes: str) -> tuple[str, ...]:
    """Returns which of storage and reduce dtype a group of this release tells."""
    return dtypes[1:] if FOLLOWS_GRAD_DTYPE else dtypes


class TestPlugins(DeviceFreeTest):
    """Each use under the release and under this branch."""

    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        script, mixed = "fsdp_plugins.scenarios", ("--mixed",)
        cls.release, cls.branch = run_on_both(script, only_branch=mixed)

    def results_of(self, name: str) -> list[Any]:
        """Returns what each rank of this branch found, which did not fail."""
        results = [results[name] for results in self.branch]
        self.assertEqual([r["error"] for r in results if "error" in r], [])
        return results

    def check(self, name: str) -> dict[str, Any]:
        """Returns what the first rank of the release found, if the branch found it."""
        for release, branch in zip(self.release, self.branch, strict=True):
            self.assertNotIn("error", release[name])
            self.assertEqual(branch[name].get("error"), None)
            self.assertEqual(branch[name].keys(), release[name].keys())
            self.assertGreater(len(release[name]), 0)
            for key, expected in release[name].items():
                self.check_same(key, branch[name][key], expected)
        return self.release[0][name]

    def check_same(self, key: str, actual: Any, expected: Any) -> None:
        if isinstance(actual, dict) and isinstance(expected, dict):
            names = {**actual, **expected}
            different = [n for n in names if actual.get(n) != expected.get(n)]
            pairs = [(n, actual.get(n), expected.get(n)) for n in different]
            self.assertEqual(pairs, [], key)
        else:
            self.assertTrue(actual == expected, f"{key}: {actual} != {expected}"[:3000])

    # Dtypes #

    def test_a_replaced_init_mp_dtypes_is_called(self) -> None:
        seen = self.check("replaced_init_mp_dtypes")
        for policy in POLICIES:
            self.assertEqual(seen[policy]["calls"], ["", "blocks.0", "blocks.1"])

    def test_a_replaced_init_mp_dtypes_may_call_the_original(self) -> None:
        seen = self.check("init_mp_dtypes_that_calls_the_original")
        dtypes = {dtype for _, dtype in seen["calls"]}
        self.assertEqual(dtypes, {"torch.float32"})

    def test_a_mixed_unit_trains_with_a_replaced_init_mp_dtypes(self) -> None:
        """Which knows of one dtype for all of the unit's parameters."""
        for results in self.results_of("mixed_with_replaced_init_mp_dtypes"):
            self.assertEqual({*results}, {*POLICIES})
            for policy, (plain, replaced) in results.items():
                calls = replaced.pop("calls")
                self.assertEqual(calls, ["", "blocks.0", "blocks.1"], policy)
                del replaced["calls after unshard"]
                self.check_same(policy, replaced, plain)

    def test_a_group_tells_its_dtypes(self) -> None:
        seen = self.check("dtypes_of_a_group")
        root, frozen, trained = seen["bf16_reduce_fp32 torch.float32"]
        self.assertEqual(root, told("torch.float32", "torch.float32"))
        expected = root if TELLS_FROZEN_DTYPES else told("None", "None")
        self.assertEqual((frozen, trained), (expected, root))

    def test_a_mixed_group_has_no_one_dtype(self) -> None:
        for results in self.results_of("dtypes_of_a_mixed_group"):
            root, *blocks = results["dtypes"]
            self.assertEqual(root, told("torch.float32", "None"))
            self.assertEqual(blocks, [told("None", "None")] * 2)

    def test_a_policy_set_before_the_first_forward_holds(self) -> None:
        seen = self.check("policy_set_before_the_first_forward")
        for policy in POLICIES:
            self.assertTrue(seen[f"{policy} like that from the start"])
        self.assertEqual({*seen["bf16 dtypes"]}, {"torch.bfloat16"})

    @pytest.mark.skipif(FOLLOWS_GRAD_DTYPE, reason="the release needs one since 2.15")
    def test_a_group_is_built_without_policies(self) -> None:
        seen = self.check("group_that_is_built_directly")
        inside, after, sizes = seen["two"]
        self.assertEqual(
            (inside, after), ("TrainingState.FORWARD", "TrainingState.IDLE")
        )
        self.assertEqual(len(sizes), 2)

    # The list of parameters #

    def test_a_parameter_is_replaced_while_unsharded(self) -> None:
        seen = self.check("parameter_replaced_while_unsharded")
        for reshard in ("True", "False"):
            self.assertEqual({*seen[reshard]["kinds"]}, {"DTensor"})
            self.assertEqual(seen[reshard]["places"], [3, 6, 6])

    def test_a_parameter_of_a_mixed_unit_is_replaced_while_unsharded(self) -> None:
        for results in self.results_of("mixed_parameter_replaced_while_unsharded"):
            for before, after in ((0, 1), (1, 2), (2, 3)):
                self.assertNotEqual(results[f"{before} loss"], results[f"{after} loss"])
            gradients = [n for n in results if n.startswith("3 gradient")]
            self.assertEqual(len(gradients), 3 * (1 + 2 * 2))
            self.assertNotIn(None, [results[name] for name in gradients])

    def test_a_parameter_is_replaced_before_the_first_forward(self) -> None:
        self.check("parameter_replaced_before_the_first_forward")

    def test_a_plain_list_of_the_same_parameters_trains_on(self) -> None:
        self.check("same_parameters_in_a_plain_list")

    def test_a_parameter_is_taken_out_of_the_list(self) -> None:
        self.assertEqual(self.check("list_changed_in_place")["left"], 5)

    # States #

    def test_states_are_changed_by_hand(self) -> None:
        for record in self.check("states_changed_by_hand").values():
            names = [state[0] for state in record["seen"] if isinstance(state, tuple)]
            self.assertEqual((names[0], names[-1]), ("UNSHARDED", "SHARDED"))

    def test_a_replaced_wait_and_post_forward_change_the_states(self) -> None:
        seen = self.check("replaced_wait_for_unshard_and_post_forward")
        self.assertGreater(seen["calls"]["wait"], 0)
        last = seen["True"]["orders"][-2:]
        self.assertEqual(last, [["blocks.0", "blocks.1", ""], [2]])

    def test_each_forward_is_recorded_through_record_post_forward(self) -> None:
        calls = self.check("record_post_forward")["calls"]
        self.assertEqual(calls, 2 * ["blocks.0", "blocks.1", ""])

    # What is kept between steps #

    def test_a_put_off_sum_is_read_and_written(self) -> None:
        seen = self.check("partial_reduce_output")
        for policy in POLICIES[:2]:
            kept = seen[f"read {policy}"]["seen"]
            self.assertEqual(kept[:3], [None] * 3)  # before the first step
            self.assertNotIn(None, kept[3:6])
            self.assertEqual(kept[6:9], [None] * 3)
            last = {
                name: seen[f"{name} {policy}"]["0 gradient head.weight"]
                for name in ("read", "dropped", "replaced", "of_ones")
            }
            self.assertEqual(len({*last.values()}), 4, last)

    def test_several_put_off_sums_are_read_as_a_tuple(self) -> None:
        for results in self.results_of("several_partial_reduce_outputs"):
            root, *blocks = results["kept"]
            # Over two ranks: 18 of weight, 3 of gain, and two rows of six of shift
            wide, narrow = (
                ("Tensor", f"torch.{d}", (33,)) for d in ("float32", "bfloat16")
            )
            self.assertEqual(root, wide)
            self.assertEqual(blocks, [("tuple", [wide, narrow])] * 2)
            self.assertEqual(results["left"], [None] * 3)

    def test_a_put_off_sum_is_taken_away_and_given_back(self) -> None:
        self.check("partial_reduce_output_set_where_none_is_kept")

    def test_what_is_all_reduced_is_read(self) -> None:
        seen = self.check("all_reduce_state")["seen"]
        kinds = {each[0] for each in seen if isinstance(each, tuple)}
        self.assertIn("AllReduceState", kinds)
        self.assertEqual(seen[-3:], ["NoneType"] * 3)

    def test_the_output_of_no_gather_is_empty(self) -> None:
        seen = self.check("all_gather_output")
        self.assertEqual({*seen["before"]}, {("Tensor", "torch.float32", (0,))})

    def test_handles_of_state_dict_hooks_are_by_module(self) -> None:
        seen = self.check("handles_of_state_dict_hooks")
        for attribute, handles in seen["after"].items():
            self.assertEqual([len(of_group) for of_group in handles], [1, 2, 2])
            self.assertEqual(handles[0], [("head", "RemovableHandle")], attribute)
        self.assertEqual({*seen["kinds"].values()}, {"DTensor"})

    def test_state_dict_hooks_are_removed(self) -> None:
        seen = self.check("state_dict_hooks_that_are_removed")
        self.assertEqual(seen["counts"], [2, 2])
        detached = {n for n, kind in seen["kinds"].items() if kind != "DTensor"}
        self.assertEqual(
            {name.rpartition(".layers")[0] for name in detached}, {"blocks.0"}
        )
        self.assertEqual(seen["left"], 2 * [(0, 0)] + 3 * [(1, 1)])

    # What is gathered #

    def test_inputs_and_their_dtypes_are_asked_for(self) -> None:
        seen = self.check("inputs_and_metadatas_called")
        self.assertIn("torch.uint8", seen["of several dtypes"])

    def test_replaced_inputs_are_what_is_gathered(self) -> None:
        seen = self.check("replaced_inputs")
        for reshard, gathers in (("True", 5), ("False", 3), ("2", 6)):
            for policy in POLICIES:
                calls = seen[f"{policy} {reshard}"]["calls"]
                self.assertGreaterEqual(len(calls), gathers)

    def test_replaced_inputs_of_no_other_values_change_no_bits(self) -> None:
        self.assertTrue(self.check("replaced_inputs_that_change_nothing")["same"])

    def test_replaced_inputs_of_another_dtype_are_gathered_in_it(self) -> None:
        self.check("replaced_inputs_of_another_dtype")

    def test_inputs_that_are_replaced_between_steps_are_gathered(self) -> None:
        self.check("inputs_replaced_between_steps")

    def test_a_mixed_unit_takes_replaced_inputs(self) -> None:
        for results in self.results_of("mixed_replaced_inputs_that_change_nothing"):
            self.assertTrue(results["same"])
            self.assertGreater(results["calls"], 0)

    def test_replaced_metadatas_are_called_for_each_gather(self) -> None:
        self.assertGreater(len(self.check("replaced_metadatas")["calls"]), 4)

    def test_a_backend_replaces_inputs_and_metadatas(self) -> None:
        calls = self.check("replaced_inputs_and_metadatas")["calls"]
        self.assertEqual(calls["inputs"], calls["metadatas"])

    # What is reduced #

    def test_a_replaced_copy_in_fills_what_is_reduced(self) -> None:
        seen = self.check("replaced_reduce_scatter_copy_in")
        for policy in POLICIES:
            self.assertGreater(len(seen[policy]["calls"]), 2)

    def test_a_mixed_unit_takes_a_replaced_copy_in(self) -> None:
        """Which gets gradients of one dtype."""
        for results in self.results_of("mixed_with_replaced_reduce_scatter_copy_in"):
            for policy in POLICIES:
                calls = results[policy]["calls"]
                self.assertEqual({dtypes for _, dtypes, *_ in calls}, {1})

    # Operators #

    def test_a_dispatch_mode_sees_the_operators(self) -> None:
        seen = self.check("operators_that_a_dispatch_mode_sees")
        for policy in POLICIES:
            self.assertEqual(len(seen[f"{policy} counts"]), 3, policy)

    def test_profilers_see_operators_and_ranges(self) -> None:
        seen = self.check("operators_and_ranges_that_profilers_see")
        counts = {n: c for n, c in seen.items() if not n.endswith("then not")}
        self.assertEqual(len(counts), 4)
        for name in counts:
            self.assertGreater(counts[name]["FSDP::all_gather (blocks.0)"], 0, name)
            self.assertGreater(counts[name][f"fsdp::{CHUNK_CAT}"], 0, name)

    def test_an_execution_trace_sees_operators_and_ranges(self) -> None:
        counts = self.check("operators_and_ranges_of_an_execution_trace")["counts"]
        self.assertGreater(counts["FSDP::all_gather (blocks.0)"], 0)

    def test_another_device_gets_operators_though_nobody_listens(self) -> None:
        calls = self.check("operators_of_another_device")["calls"]
        self.assertEqual(calls, {"copy in": 1, "split": 1, "cat": 1})

    # Divide factors #

    def test_divide_factors_are_as_in_the_release(self) -> None:
        """But where gloo would have to scale while it sums, which it cannot."""
        for release, branch in zip(self.release, self.branch, strict=True):
            expected, actual = release["divide_factors"], branch["divide_factors"]
            self.assertEqual(actual.keys(), expected.keys())
            for key, factors in expected.items():
                allowed = [factors]
                if factors[2][0] == "PREMUL_SUM":
                    scale, sums = float(key.split()[3]), (("SUM", None), factors[3])
                    allowed += [(None, scale, *sums), (scale, None, *sums)]
                self.assertIn(actual[key], allowed, key)

    def test_a_group_of_one_sums(self) -> None:
        for results in (*self.release, *self.branch):
            nothing = (None, None, ("SUM", None), ("SUM", None))
            self.assertEqual(results["divide_factors"]["group of one"], nothing)

    def test_divide_factors_of_other_devices_are_as_in_the_release(self) -> None:
        self.check("divide_factors_of_another_device")

    def test_divide_factors_where_sums_can_scale_are_as_in_the_release(self) -> None:
        seen = self.check("divide_factors_where_sums_can_scale")
        kinds = {ops[2][0] for ops in seen.values()}
        self.assertEqual(kinds, {"AVG", "SUM", "PREMUL_SUM"})

    # Calling and replacing the functions #

    def test_gathers_are_called_with_plain_lists(self) -> None:
        self.check("gather_called_with_plain_lists")

    def test_reductions_are_called_with_plain_lists(self) -> None:
        self.check("reduce_called_with_plain_lists")

    def test_replaced_globals_are_called(self) -> None:
        calls = self.check("replaced_globals")["calls"]
        self.assertEqual(calls["reduce"], 6)
        self.assertEqual(calls["AllGatherResult"], calls["gather"])

    # Late changes #

    def test_a_setattr_that_comes_after_lazy_init_is_called(self) -> None:
        calls = self.check("setattr_replaced_after_lazy_init")["calls"]
        self.assertGreater(calls["weight Parameter"], 0)

    def test_a_setattr_that_goes_after_lazy_init_is_not_called(self) -> None:
        seen = self.check("setattr_that_is_taken_away_after_lazy_init")
        self.assertGreater(seen["before"]["weight"], 0)
        self.assertEqual(seen["after"], seen["before"])

    def test_an_extension_that_comes_after_lazy_init_is_not_passed_over(self) -> None:
        for release, branch in zip(self.release, self.branch, strict=True):
            expected = release["extension_after_lazy_init"]
            actual = branch["extension_after_lazy_init"]
            self.assertIn("raised", expected)
            self.assertIn("raised", actual)

    def test_an_extension_that_is_initialized_late_is_gathered(self) -> None:
        self.check("extension_after_lazy_init_that_is_initialized")


if __name__ == "__main__":
    run_tests()
