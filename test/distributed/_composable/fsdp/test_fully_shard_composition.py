# Owner(s): ["oncall: distributed"]

"""
``fully_shard`` with what else torch has: activation checkpointing, functorch, the
compiler, pipelining, the memory tracker, the profiler, logging, and what the rest of
torch, its tests and vendors use of FSDP's modules.

``fsdp_composition/scenarios.py`` runs everything on four ranks, once on the release
and once on this branch, and ``contract.py`` prints what is used of the modules, of
both. Units of one dtype come to the same as in the release; units of several dtypes
come to the same as one unit of the release for each dtype, in numbers, and to the same
as units of one dtype in everything else.

Runs with pytest, python or ``torchrun --nproc-per-node 4``, where the first rank does
all of it.
"""

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_common import kept
from fsdp_common.run_both import check_torch, run_on
from fsdp_common.utils import DeviceFreeTest, RELEASE_ROOT, run_anew
from fsdp_composition.scenarios import (
    CALL_PATCHES,
    FACTS,
    FOR_ALL,
    GROUP_PATCHES,
    PIPELINES,
    TRAINING,
)

from torch.distributed import fsdp
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


# Of each scenario, which other one it must equal on the same torch
SAME_AS = {
    "plain": (
        "checkpoint_in_unit",
        "checkpoint_in_unit_reentrant",
        "wrapper_around_unit",
        "wrapper_around_unit_reentrant",
        "unit_around_wrapper",
        "unit_around_wrapper_reentrant",
        "nested_wrapper_around_unit",
        "moved_before_first_forward",
    ),
    "plain_two_forwards": ("nested_unit_around_wrapper_two_forwards",),
    "plain_small": (
        "compiled_blocks_in_place",
        "compiled_blocks",
        "compiled_model",
        "compiled_model_in_place",
        "compiled_checkpointed_blocks",
    ),
}
REFERENCES = {name: ref for ref, names in SAME_AS.items() for name in names}

# By kind and name of a scenario
Results = dict[str, Any]


def run_scenarios(on_release: bool) -> list[Results]:
    """Returns what each rank comes to."""
    units = "dtype" if on_release else "block"
    return run_on("fsdp_composition.scenarios", "--units", units, on_release=on_release)


def run_contract(on_release: bool) -> Results:
    """Returns what is used of the modules, and the lines of ``TORCH_LOGS=+fsdp``."""
    kinds = ("uniform",) if on_release else ("uniform", "mixed")
    args, env = ("-m", "fsdp_composition.contract", *kinds), {"TORCH_LOGS": "+fsdp"}

    def run() -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as out:
            log = Path(out) / "log"
            logged = env | {"TORCH_LOGS_OUT": str(log)}
            return run_anew(*args, on_release=on_release, env=logged), log.read_text()

    both = kept.of_release(RELEASE_ROOT, args, env, run) if on_release else run()
    found = json.loads(both[0])
    check_torch(found["torch"], on_release)
    # Each begins with rank, level, time and place, in brackets
    return found | {"log": both[1].splitlines()}


@functools.cache
def started(run: Callable[[bool], Any]) -> tuple[Future[Any], Future[Any]]:
    """Runs on the release and on this branch at once, and only once if it fails."""
    pool = ThreadPoolExecutor()
    return pool.submit(run, True), pool.submit(run, False)


def of_scenarios() -> tuple[list[Results], list[Results]]:
    """Returns what the release comes to, and what this branch does."""
    release, branch = started(run_scenarios)
    return release.result(), branch.result()


def of_contract() -> tuple[Results, Results]:
    release, branch = started(run_contract)
    return release.result(), branch.result()


def of_mesh(results: list[Results]) -> list[Results]:
    """Returns one result for each rank of a half: the halves take turns."""
    return [results[0] | results[2], results[1] | results[3]]


class CompositionTest(DeviceFreeTest):
    def check_same(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        """Names what differs, and not its bits."""
        self.assertGreater(len(expected), 0)
        self.assertEqual(list(actual), list(expected))
        self.assertEqual([k for k in expected if actual[k] != expected[k]], [])

    def each_rank(self) -> Any:
        release, branch = of_scenarios()
        return zip(of_mesh(release), of_mesh(branch), strict=True)


class TestTraining(CompositionTest):
    """Losses, sharded gradients and parameters, to the last bit."""

    @parametrize("name", list(TRAINING))
    def test_uniform_unit_equals_the_release(self, name: str) -> None:
        for release, branch in self.each_rank():
            self.check_same(branch[f"uniform {name}"], release[f"uniform {name}"])

    @parametrize("name", list(TRAINING))
    def test_mixed_unit_equals_one_unit_of_the_release_per_dtype(
        self, name: str
    ) -> None:
        for release, branch in self.each_rank():
            self.check_same(branch[f"mixed {name}"], release[f"mixed {name}"])

    @parametrize("kind", ["uniform", "mixed"])
    @parametrize("name", list(REFERENCES))
    def test_equals_plain_training(self, kind: str, name: str) -> None:
        for _, branch in self.each_rank():
            reference = branch[f"{kind} {REFERENCES[name]}"]
            self.check_same(branch[f"{kind} {name}"], reference)

    def test_models_train(self) -> None:
        """Equal bits say nothing of a model that did not."""
        for name in TRAINING:
            for kind in ("uniform", "mixed"):
                for _, branch in self.each_rank():
                    record = branch[f"{kind} {name}"]
                    losses = record["step 0 loss"], record["step 1 loss"]
                    self.assertNotEqual(*losses, (kind, name))
                    grads = [v for k, (_, v) in record.items() if "gradient" in k]
                    self.assertGreater(sum(map(any, grads)), len(grads) / 2)


class TestPipelines(CompositionTest):
    """Two stages' ranks, and two ranks to shard over."""

    @parametrize("name", list(PIPELINES))
    def test_uniform_unit_equals_the_release(self, name: str) -> None:
        for release, branch in zip(*of_scenarios(), strict=True):
            self.check_same(branch[f"uniform {name}"], release[f"uniform {name}"])

    @parametrize("name", list(PIPELINES))
    def test_mixed_unit_equals_one_unit_of_the_release_per_dtype(
        self, name: str
    ) -> None:
        for release, branch in zip(*of_scenarios(), strict=True):
            self.check_same(branch[f"mixed {name}"], release[f"mixed {name}"])

    @parametrize("kind", ["uniform", "mixed"])
    @parametrize("name", [name for name in PIPELINES if name != "not_pipelined"])
    def test_equals_accumulation_without_a_pipeline(self, kind: str, name: str) -> None:
        _, branch = of_scenarios()
        losses = 0
        for results in branch:
            mine, whole = results[f"{kind} {name}"], results[f"{kind} not_pipelined"]
            self.check_same(mine, {k: v for k, v in whole.items() if k in mine})
            self.assertLess(len(mine), len(whole))
            losses += "step 0 loss" in mine
        self.assertEqual(losses, 2)  # of the last stage's ranks


class TestFacts(CompositionTest):
    """What is seen from outside of a step."""

    @parametrize("name", [name for name in FACTS if name != "memory_tracker"])
    def test_uniform_unit_is_seen_as_in_the_release(self, name: str) -> None:
        for release, branch in self.each_rank():
            self.check_same(branch[f"uniform {name}"], release[f"uniform {name}"])

    @parametrize("name", ["functorch_of_inputs", "copies"])
    def test_mixed_unit_equals_one_unit_of_the_release_per_dtype(
        self, name: str
    ) -> None:
        for release, branch in self.each_rank():
            self.check_same(branch[f"mixed {name}"], release[f"mixed {name}"])

    def test_functorch_transforms_run(self) -> None:
        for _, branch in self.each_rank():
            for kind in ("uniform", "mixed"):
                outcomes = branch[f"{kind} functorch_of_inputs"]
                refused = [k for k, v in outcomes.items() if isinstance(v, str)]
                # As in the release: the hook on a unit's inputs passes them as they are
                self.assertEqual(refused, ["dual, grad"])

    def test_copying_a_model_is_refused(self) -> None:
        for _, branch in self.each_rank():
            for kind in ("uniform", "mixed"):
                refusal = branch[f"{kind} copies"]["deepcopy of the model"]
                self.assertIn("FSDP does not support deepcopy", refusal)

    def test_mixed_unit_has_the_ranges_of_a_uniform_one(self) -> None:
        for _, branch in self.each_rank():
            expected = Counter(branch["uniform profiler_ranges"]["ranges"])
            del expected["FSDP::cast_forward_inputs"]  # that policy casts none
            self.assertEqual(branch["mixed profiler_ranges"]["ranges"], expected)

    @parametrize("name", ["log_messages", "log_messages_of_checkpointed"])
    def test_mixed_unit_logs_what_a_uniform_one_does(self, name: str) -> None:
        for _, branch in self.each_rank():
            self.check_same(branch[f"mixed {name}"], branch[f"uniform {name}"])
            messages = next(iter(branch[f"mixed {name}"].values()))
            self.assertIn(("DEBUG", "FSDP::post_backward (blocks.0)"), messages)

    def test_only_reentrant_checkpointing_runs_hooks_again(self) -> None:
        message = ("DEBUG", "FSDP::pre_forward (blocks.1)")
        for _, branch in self.each_rank():
            facts = branch["mixed log_messages_of_checkpointed"]
            self.assertEqual(facts["REENTRANT"].count(message), 2)
            self.assertEqual(facts["NO_REENTRANT"].count(message), 1)
            for impl in ("REENTRANT", "NO_REENTRANT"):  # nor is anything gathered
                self.assertEqual(facts[f"{impl} gathers"], 6)

    def test_mixed_unit_gathers_once_and_reduces_once_for_each_dtype(self) -> None:
        for _, branch in self.each_rank():
            uniform, mixed = (
                branch[f"{kind} comm_debug_counts"]["counts"]
                for kind in ("uniform", "mixed")
            )
            gathers, reductions = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
            # The root and two blocks, in forward and again in backward
            self.assertEqual(uniform, {gathers: 6, reductions: 3})
            # The root has two dtypes, each block three
            self.assertEqual(mixed, {gathers: 6, reductions: 2 + 3 + 3})


class TestMemoryTracker(CompositionTest):
    def test_uniform_unit_is_tracked_as_in_the_release(self) -> None:
        for release, branch in self.each_rank():
            mine, other = (
                branch["uniform memory_tracker"],
                release["uniform memory_tracker"],
            )
            self.assertEqual(mine["phases"], other["phases"])
            self.assertEqual(mine["categories"], other["categories"])
            self.assertLessEqual(mine["total"], other["total"])

    def test_mixed_unit_is_tracked_in_the_same_phases(self) -> None:
        for _, branch in self.each_rank():
            mixed, uniform = (
                branch["mixed memory_tracker"],
                branch["uniform memory_tracker"],
            )
            self.assertEqual(mixed["phases"], uniform["phases"])
            self.assertEqual(mixed["categories"], uniform["categories"])
            for name in ("", "blocks.0", "blocks.1"):
                phases = [*mixed["phases"][f"FSDPTower.{name}".rstrip(".")]]
                self.assertIn("After Post-Backward", phases)


class TestPatches(CompositionTest):
    """What the utilities of torch's own tests intercept of a step."""

    @parametrize("name", list(FOR_ALL))
    def test_uniform_unit_is_intercepted_as_in_the_release(self, name: str) -> None:
        for release, branch in self.each_rank():
            self.check_same(branch[f"uniform {name}"], release[f"uniform {name}"])

    @parametrize("name", list(FOR_ALL))
    def test_mixed_unit_is_intercepted(self, name: str) -> None:
        """As often as a uniform one, but for a reduction for each dtype."""
        for _, branch in self.each_rank():
            uniform, mixed = branch[f"uniform {name}"], branch[f"mixed {name}"]
            never = set() if "hybrid" in name else {"patch_all_reduce"}
            called = {patch for patch, calls in mixed.items() if calls}
            self.assertEqual(called, {*GROUP_PATCHES, *CALL_PATCHES} - never)
            for patch, calls in mixed.items():
                if "reduce" in patch:  # two in the root and three in each block
                    expected = 2 + 3 + 3 if uniform[patch] else 0
                    self.assertEqual(len(calls), expected, patch)
                elif "gather" in patch:
                    self.assertEqual(len(calls), len(uniform[patch]), patch)
                else:
                    self.assertEqual(calls, uniform[patch], patch)


instantiate_parametrized_tests(TestTraining)
instantiate_parametrized_tests(TestPipelines)
instantiate_parametrized_tests(TestFacts)
instantiate_parametrized_tests(TestPatches)


# Names of the release that may be gone: its own helpers, and what it imports for them
GONE = {
    "_fsdp_collectives": {
        "_get_all_gather_input_metadatas",
        "_get_dim0_padded_size",
        "_get_param_all_gather_inputs",
        "_raise_assert_with_print",
        "_to_dtype_if_needed",
        # Of 2.15
        "_cast_and_view_sharded_grads",
        "_copy_all_gather_outputs",
        "_reassemble_all_gather_outputs",
        "_record_grad_output_stream_default",
    },
    "_fsdp_param_group": {
        "_ModuleToHandleDict",
        "alloc_storage",
        "RemovableHandle",
        # Of 2.15
        "_spmd_no_typecheck",
        "spmd_types",
    },
}
# Keywords that may be left out, and that only 2.15 has
SINCE_2_15 = ("all_gather_output_fn",)
SINCE_2_15_KINDS = {(name, "KEYWORD_ONLY") for name in SINCE_2_15}
# One record holds the reduce-scatter inputs of all dtypes
CHANGED_RECORD = "ReduceScatterState"


class TestContract(DeviceFreeTest):
    """What the rest of torch, and vendors, use of the two modules."""

    maxDiff = None

    def test_names_of_the_release_can_be_imported(self) -> None:
        release, branch = of_contract()
        for module, names in release["names"].items():
            missing = {*names} - {*branch["names"][module]}
            self.assertLessEqual(missing, GONE[module], module)

    def test_functions_and_methods_take_what_they_do_in_the_release(self) -> None:
        release, branch = (found["signatures"] for found in of_contract())
        differing = {}
        for name, parameters in release.items():
            mine = branch.get(name)
            if mine is None or not self.is_taken(parameters, mine):
                differing[name] = (parameters, mine)
        self.assertEqual(set(differing), {CHANGED_RECORD}, differing)

    @staticmethod
    def is_taken(parameters: list[Any], mine: list[Any]) -> bool:
        """Whether what ``mine`` has after ``parameters`` may be left out."""
        more = mine[len(parameters) :]
        optional = all(
            kind.startswith("VAR_") or name in SINCE_2_15 for name, kind, _ in more
        )
        return mine[: len(parameters)] == parameters and optional

    @parametrize(
        "name", ["foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"]
    )
    def test_vendors_calls_take_the_same_arguments(self, name: str) -> None:
        release, branch = (found["signatures"][name] for found in of_contract())
        more = branch[len(release) :]
        self.assertEqual(branch[: len(release)], release)
        self.assertLessEqual({(name, kind) for name, kind, _ in more}, SINCE_2_15_KINDS)

    def test_results_have_the_fields_of_the_release(self) -> None:
        release, branch = (found["fields"] for found in of_contract())
        kept = [name for name in release if name != CHANGED_RECORD]
        self.assertEqual(
            [branch[name] for name in kept], [release[name] for name in kept]
        )
        self.assertIn("AllGatherResult", kept)
        self.assertEqual(len(branch["ReduceResult"]), 7)

    def test_functorch_can_map_over_what_inputs_pass_through(self) -> None:
        release, branch = of_contract()
        self.assertEqual(
            (release["has_vmap_rule"], branch["has_vmap_rule"]), (True, True)
        )

    @parametrize("owner", ["group", "context"])
    def test_attributes_after_lazy_init(self, owner: str) -> None:
        release, branch = of_contract()
        self.assertEqual(branch["uniform"][owner], release["uniform"][owner])
        mixed = dict(branch["mixed"][owner])
        if owner == "group":  # of parts of three dtypes, not two
            self.assertEqual(mixed.pop("fsdp_params"), "list of 18")
        expected = {name: release["uniform"][owner][name] for name in mixed}
        self.assertEqual(mixed, expected)

    @parametrize("mode", ["fake", "meta"])
    def test_operators_run_without_data(self, mode: str) -> None:
        release, branch = (found["operators"][mode] for found in of_contract())
        self.assertEqual(branch, release)
        kind, device = ("FakeTensor", "cpu") if mode == "fake" else ("Tensor", "meta")
        self.assertEqual({(seen[0], seen[2]) for seen in branch}, {(kind, device)})

    def test_step_on_fake_tensors(self) -> None:
        release, branch = of_contract()
        self.assertEqual(branch["uniform"]["fake"], release["uniform"]["fake"])
        mixed = branch["mixed"]["fake"]
        self.assertEqual(mixed["blocks.1.parts.0.up"], ["torch.float16", [2, 8]])
        self.assertEqual(mixed["blocks.1.parts.1.scale"], ["torch.float32", [0]])
        self.assertEqual(mixed["blocks.1.parts.2.gain"], ["torch.bfloat16", [2]])
        none = [name.endswith("shift") for name in mixed if mixed[name] is None]
        self.assertTrue(none and all(none))

    def test_torch_logs(self) -> None:
        """Every step is logged alike: two of uniform units, two of mixed ones."""
        release, branch = (
            [(line.split(":")[1][0], line.split("] ", 2)[-1]) for line in found["log"]]
            for found in of_contract()
        )
        # What the release does not log: a table for each unit of the four models, if
        # the branch has come to tables
        has_tables = hasattr(fsdp, "layout_summary")
        tables = [text for _, text in branch if not text.startswith("FSDP::")]
        headings = [text for text in tables if text.startswith("unit ")]
        self.assertEqual(len(headings), 4 * 3 * has_tables)
        self.assertEqual(
            [line for line in branch if line[1] not in tables], release * 2
        )
        self.assertIn(("V", "FSDP::pre_backward (blocks.1)"), release)


instantiate_parametrized_tests(TestContract)


if __name__ == "__main__":
    run_tests()
