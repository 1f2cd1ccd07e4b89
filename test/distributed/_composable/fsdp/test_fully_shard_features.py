# Owner(s): ["oncall: distributed"]

"""
Every feature of ``fully_shard`` that concerns communication, memory, order,
offload or extensions, one at a time: in units of one dtype it leaves the bits,
the order of steps and the collectives of the release, and in units of
several dtypes the bits of one unit for each dtype.

What is run is in ``fsdp_features/parity.py``, under both torches.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_common.run_both import Results, run_on
from fsdp_common.run_forked import run_forked
from fsdp_common.utils import (
    FSDPThreadTest,
    on_first_rank,
    run_python,
)
from fsdp_features.cases import shard_children, STEPS
from fsdp_features.memory import FP16, MIXED, MODES, UNALIGNED, UNIFORM
from fsdp_features.models import Extended, extended_stack, Fp8, HighLow
from fsdp_features.parity import CASES
from fsdp_mixed_dtype.models import BF16, FP32

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.long


def run_cases(units: str, *, on_release: bool) -> Results:
    return run_on("fsdp_features.parity", "--units", units, on_release=on_release)


ERRORS = [name for name in CASES if name.startswith("error_")]
TRAINED = [name for name in CASES if name not in ("stream_priorities", *ERRORS)]
EXTENSIONS = [name for name in TRAINED if name.startswith(("fp8", "highlow"))]
PLAIN = [name for name in TRAINED if CASES[name].is_plain]

# What each error must name: the parameter, the module, or what was given
NAMED = {
    "on_meta_device": r"meta device.*\['0\.0\.params\.0', '0\.0\.params\.1'",
    "offloaded_elsewhere": r"on CPU.*'1\.0\.params\.0', device\(type='cuda', index=3",
    "input_buffers_of_symmetric_memory": r"got 2 for module '0' using SymmMemReduceS",
    "symmetric_memory_with_custom_gather": r"set_symm_mem\(\).*all gather.*\bGather\b",
    "symmetric_memory_with_custom_scatter": r"set_symm_mem\(\).*reduce scatter.*Scat",
    "memory_from_group_with_custom_gather": r"from_process_group\(\).*\bGather\b",
    "memory_from_group_with_custom_scatter": r"from_process_group\(\).*\bScatter\b",
    "memory_from_group_with_symmetric_memory": r"_group\(\).*SymmMemAllGather",
    "hook_stream_without_hook": r"hook stream.*hook itself is missing.*'1'",
    "hook_stream_of_hybrid": "stream cannot be set when using native HSDP",
    "separate_group_of_replicas": "to be FSDPMeshInfo, got .*DDPMeshInfo",
    "symmetric_memory_of_replicas": "to be FSDPMeshInfo, got .*DDPMeshInfo",
    "memory_from_group_of_replicas": "to be FSDPMeshInfo, got .*DDPMeshInfo",
    "uneven_shards_of_another_dim": r"dim 1: torch\.Size\(\[8, 3\]\).*size: 4",
    "unknown_pass": "Unknown pass type: sideways",
    "parameter_not_in_the_modules": r"not in the module tree of \(Linear",
    "extension_without_post_all_gather": "fsdp_post_all_gather should be defined",
    "extension_with_another_signature": "Invalid fsdp_pre_all_gather.*size: 'Any'",
    "extension_that_does_not_pad": r"padded sharded size torch\.Size\(\[2, 3\]\)",
    "comm_of_two_meshes": "set_custom_all_gather is not supported with multiple",
    "reduction_of_two_meshes": "set_custom_reduce_scatter is not supported with",
    "hook_of_two_meshes": "set_all_reduce_hook is not supported with multiple",
    "one_group_of_two_meshes": "at most 1 param group.*got 2",
    "no_root_of_several_modules": "single root module but got .*Waves",
    "reset_of_no_root": "reset_iter_state must be called on the root",
    "reshard_after_forward_to_two_later": "should be a bool, got .*int",
    "reshard_after_forward_to_no_factor": "factor of 4, not 3",
    "no_such_method": "does not have a method predict",
    "parameter_is_not_contiguous": r"non-contiguous.*torch\.Size\(\[4, 8\]\)",
    "parameter_has_no_dims": "scalar parameters. Change 1 to a 1D",
    "no_such_dim_to_shard": r"Shard dim 3 is invalid for 2D.*torch\.Size\(\[8, 3\]\)",
    "plain_parameter_on_full_mesh": "plain tensor for parameter '0'",
    "root_is_not_first": "already been lazily initialized for 0",
    "parameter_in_two_units": "Parameter '1.0.params.0' is shared",
    "text_input_buffers": "int, got str",
    "bool_input_buffers": "int, got bool",
    "zero_input_buffers": "positive int, got 0",
    "negative_input_buffers": "positive int, got -1",
    "prefetch_of_no_unit": "FSDPModule but got .*Linear",
    "shared_context_of_no_unit": "FSDPModules but got Linear",
}


@on_first_rank
def without_stale_prefetch(name: str, release: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a record of the release without what comes of forwards that no backward
    follows: it records them for prefetching, and the last unit of backward looks once
    more for one to prefetch, which finds nothing to gather.
    """
    if name != "evaluated_before" or "ranges" not in release:
        return release
    ranges = [*release["ranges"]]
    prefetches = [i for i, label in enumerate(ranges) if "backward_prefetch" in label]
    del ranges[prefetches[-1]]
    return release | {"ranges": ranges}


class TestFeatures(TestCase):
    """Each feature under the release and under this branch."""

    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with ThreadPoolExecutor() as pool:
            release = pool.submit(run_cases, "dtype", on_release=True)
            branch = pool.submit(run_cases, "block", on_release=False)
        cls.release, cls.branch = release.result(), branch.result()

    def by_rank(self, results: Results, units: str, name: str, size: int) -> list[Any]:
        """Returns what each rank has that ran a case: as many as the case says."""
        key = f"{units} {name} {size}"
        found = [of_rank[key] for of_rank in results if key in of_rank]
        self.assertEqual(len(found), 2 if CASES[name].takes_turns(size) else 4, key)
        return found

    def both(self, units: str, name: str, size: int) -> list[tuple[Any, Any]]:
        """Returns what the release and this branch have of a case, by rank."""
        of_side = (
            self.by_rank(r, units, name, size) for r in (self.release, self.branch)
        )
        return [*zip(*of_side, strict=True)]

    def check_same(self, name: str, actual: Any, expected: Any, keys: Any) -> None:
        different = [key for key in keys if actual.get(key) != expected.get(key)]
        texts = [f"{k}: {actual.get(k)} != {expected.get(k)}" for k in different[:1]]
        self.assertEqual(different, [], f"{name}: {texts}"[:2000])

    def tensors_of(self, *records: dict[str, Any]) -> list[str]:
        """Returns the names of losses, gradients and parameters, in any of them."""
        names = {key: None for record in records for key in record}
        for last in (f"step {STEPS - 1} loss", "final "):
            self.assertTrue(any(name.startswith(last) for name in names), [*names])
        return [name for name in names if name.startswith(("step", "final"))]

    # Whether what a feature computes is right #

    @parametrize("name", TRAINED)
    def test_uniform_unit_equals_the_release(self, name: str) -> None:
        """In bits, order of ranges, collectives, and what is held meanwhile."""
        for ranks in CASES[name].uniform:
            for release, branch in self.both("uniform", name, ranks):
                keys = {**release, **branch}
                if name in EXTENSIONS:  # inputs of two dtypes, which are aligned now
                    keys.pop("collectives", None)
                # Nothing is, see below, where the release may keep a gather's buffer
                keys.pop("left", None)
                release = without_stale_prefetch(name, release)
                self.check_same(name, branch, release, keys)
                self.assertNotEqual(release["step 0 loss"], release["step 1 loss"])

    @parametrize("name", [name for name in TRAINED if CASES[name].mixed])
    def test_mixed_unit_equals_one_unit_of_the_release_per_dtype(
        self, name: str
    ) -> None:
        for ranks in CASES[name].mixed:
            for release, branch in self.both("mixed", name, ranks):
                names = self.tensors_of(release, branch)
                dtypes = {branch[n][0] for n in names if "gradient" in n}
                hooked = "hooks" in name  # step in backward, and keep no gradient
                self.assertTrue(hooked or len(dtypes) == 3, dtypes)
                self.check_same(name, branch, release, names)

    @parametrize("name", PLAIN)
    def test_feature_leaves_no_trace_in_the_bits(self, name: str) -> None:
        for kind, ranks in (("uniform", 2), ("uniform", 4), ("mixed", 4)):
            plain = self.by_rank(self.branch, kind, "plain", ranks)
            records = self.by_rank(self.branch, kind, name, ranks)
            # Either half of the ranks, or both, ran a case of two
            for rank, actual in enumerate(records):
                expected = plain[rank % ranks]
                names = self.tensors_of(actual, expected)
                self.check_same(name, actual, expected, names)

    # Whether a mixed unit takes the steps of a uniform one #

    @parametrize(
        "name", [n for n in TRAINED if {*CASES[n].mixed} & {*CASES[n].uniform}]
    )
    def test_mixed_unit_in_the_order_of_a_uniform_one(self, name: str) -> None:
        (ranks,) = {*CASES[name].mixed} & {*CASES[name].uniform}
        uniform = [r[u] for r in self.release if (u := f"uniform {name} {ranks}") in r]
        uniform = [without_stale_prefetch(name, record) for record in uniform]
        mixed = [r[m] for r in self.branch if (m := f"mixed {name} {ranks}") in r]
        expected = next(record for record in uniform if "ranges" in record)
        actual = next(record for record in mixed if "ranges" in record)
        self.assertEqual(actual["ranges"], expected["ranges"])
        for key in ("waits", "contexts", "comms"):
            self.assertEqual(actual.get(key), expected.get(key), key)
        self.assertEqual(inputs_held(actual), inputs_held(expected))
        gathers = [calls_of(r, "all_gather") for r in (actual, expected)]
        self.assertEqual(*([call[-1] for call in calls] for calls in gathers))

    def test_every_order_is_seen(self) -> None:
        """What is compared is there: prefetches, reductions, and waits for them."""
        ranges = self.branch[0]["uniform two_meshes 2"]["ranges"]
        for part in ("backward_prefetch for", "[pg=2]", "[pg=1]", "reduce", "rs_wait"):
            self.assertTrue(any(part in name for name in ranges), part)

    # Communication #

    def records(self, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """Returns all records of a case that the branch must have."""
        case = CASES[name]
        mixed = {*case.mixed, 4} if case.is_plain else {*case.mixed}
        for kind, sizes in (("uniform", case.uniform), ("mixed", mixed)):
            for size in sizes:
                for record in self.by_rank(self.branch, kind, name, size):
                    yield f"{kind} {name} {size}", record

    @parametrize("name, most", [("one", 1), ("two", 2), ("three", 3)])
    def test_input_buffers_held(self, name: str, most: int) -> None:
        """By module, however many reduce dtypes it has."""
        for key, record in self.records(f"{name}_input_buffer{'s' * (most > 1)}"):
            held = inputs_held(record)
            self.assertEqual(max(held), most, key)
            self.assertEqual(held[:3], [min(i, most) for i in (1, 2, 3)], key)

    def test_most_input_buffers_wanted_count(self) -> None:
        for key, record in self.records("two_input_buffers_in_one_block"):
            self.assertEqual(max(inputs_held(record)), 2, key)

    def test_symmetric_memory_is_asked_for(self) -> None:
        for name in ("symmetric_memory", "symmetric_memory_sums"):
            for key, record in self.records(name):
                made, backends, registered, pools = record["symmetric memory"]
                self.assertEqual(backends, {"NCCL"}, key)
                self.assertEqual(made, 6 if "sums" in name else 3, key)
                self.assertEqual(len(registered), pools, key)  # each buffer once
                self.assertGreaterEqual(len(registered), 2 * 5, key)
                both = {dtype for dtype, _ in registered}
                is_mixed = key.startswith("mixed") and "sums" in name
                self.assertEqual(len(both), 4 if is_mixed else 1, key)

    def test_stream_priorities(self) -> None:
        priorities = self.branch[0]["uniform stream_priorities 4"]
        self.assertEqual(priorities, self.release[0]["uniform stream_priorities 4"])
        names = {name for name, priority in priorities.items() if priority == -1}
        expected = ("all_gather_copy_in", "all_gather", "reduce_scatter")
        self.assertEqual(names, {f"{name}_stream" for name in expected})
        self.assertEqual(priorities["all_reduce_stream"], 0)

    def test_gathers_wait_for_the_given_event_once(self) -> None:
        once = ["in step 0:", "copy-in", "gather"]
        then = ["in step 1:", "copy-in for all", "gather for all"]
        for key, record in self.records("post_optim_event"):
            self.assertEqual(record["waits"], once + then, key)

    def test_comms_are_the_chosen_ones(self) -> None:
        default = ("DefaultAllGather", "DefaultReduceScatter", False)
        from_group = ("ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter")
        for name, expected in (
            ("plain", default),
            ("custom_comms", ("Gather", "Scatter", False)),
            ("memory_from_group", (*from_group, False)),
            ("memory_from_group_and_back", default),
            ("separate_group", ("DefaultAllGather", "SeparateScatter", True)),
            ("separate_group_and_back", default),
            ("symmetric_memory", ("SymmMemAllGather", *default[1:])),
            (
                "symmetric_memory_sums",
                ("SymmMemAllGather", "SymmMemReduceScatter", False),
            ),
        ):
            for key, record in self.records(name):
                self.assertEqual({*record["comms"]}, {expected}, key)

    def test_reductions_use_the_separate_group(self) -> None:
        for name in ("separate_group", "hybrid_separate_group"):
            for key, record in self.records(name):
                self.assertEqual(record["groups"], ["fsdp_reduce_scatter"], key)

    def test_shared_context(self) -> None:
        for key, record in self.records("shared_context"):
            self.assertEqual(record["contexts"], 1, key)

    def test_units_of_several_meshes_gather_over_each(self) -> None:
        """But nothing is sent over a single rank."""
        for name, expected in (("two_meshes", {2}), ("three_meshes", {2, 4})):
            for gathers in self.profiled_gathers(name):
                self.assertEqual({call[-1] for call in gathers}, expected, name)

    def test_not_unsharded_in_backward(self) -> None:
        for gathers in self.profiled_gathers("not_unsharded_in_backward"):
            self.assertEqual(len(gathers), 2)

    def profiled_gathers(self, name: str) -> list[list[tuple]]:
        """Returns the gathers of a case that a first rank recorded, by kind of unit."""
        records = [record for _, record in self.records(name)]
        found = [calls_of(r, "all_gather") for r in records if "collectives" in r]
        self.assertEqual(len(found), 2, name)
        return found

    # Memory #

    def test_nothing_is_left_after_backward(self) -> None:
        for name in TRAINED:
            for key, record in self.records(name):
                self.assertEqual(record["left"], 0, key)

    def test_one_gather_buffer_is_kept_in_forward(self) -> None:
        """The last one's, so that the next copy-in may run beside its copy-out."""
        for key, record in self.records("buffers_of_gathers"):
            # In the tower of "mixed" or in the other; after forward and backward none
            of_step = [1] * (14 if key.startswith("mixed") else 8) + [0, 0]
            self.assertEqual(record["alive"], of_step * STEPS, key)

    def test_async_gathers_keep_no_buffer(self) -> None:
        for key, record in self.records("async_unshard_op"):
            kept = {is_kept for what, is_kept in record["held"] if what == "gather"}
            self.assertEqual(kept, {False}, key)

    # Offload #

    @parametrize("name, overlaps", [("", {True}), ("_add_up", {True, False})])
    def test_copies_to_pinned_memory_overlap(self, name: str, overlaps: set) -> None:
        """But those that an addition reads at once."""
        for key, record in self.records(f"offload_pinned{name}"):
            self.assertEqual({*record["copies"]}, overlaps, key)

    def test_copies_that_a_hook_reads_do_not_overlap(self) -> None:
        for key, record in self.records("offload_pinned_hooks"):
            self.assertEqual({*record["copies"]}, {False}, key)

    # Extensions #

    @parametrize("name", EXTENSIONS)
    def test_extension_makes_the_inputs(self, name: str) -> None:
        for key, record in self.records(name):
            # Two parameters in each of two blocks, in forward and in backward
            gathers = 2 * 2 * 2 * (1 if name.endswith("kept") else 2)
            self.assertEqual(record["gathers"], gathers, key)

    # Errors #

    def errors_of(self, results: Results, units: str, name: str) -> list[Any]:
        errors = [r["error"] for r in self.by_rank(results, units, name, 4)]
        if name == "error_extension_that_does_not_pad":
            # Of five rows, the ranks with two of them have no padding to leave out
            errors = [error for error in errors if "has no padding" not in error[1]]
            self.assertEqual(len(errors), 2)
        return errors

    @parametrize("name", ERRORS)
    def test_error_is_still_raised(self, name: str) -> None:
        release, branch = (
            self.errors_of(side, "uniform", name)
            for side in (self.release, self.branch)
        )
        self.assertEqual(*([kind for kind, _ in side] for side in (release, branch)))
        for _, text in branch:
            self.check_text(name, text)

    @parametrize("name", ERRORS)
    def test_error_is_raised_for_a_mixed_unit_too(self, name: str) -> None:
        mixed, uniform = (
            self.errors_of(self.branch, units, name) for units in ("mixed", "uniform")
        )
        self.assertEqual(*([kind for kind, _ in side] for side in (mixed, uniform)))
        for _, text in mixed:
            self.check_text(name, text)

    def check_text(self, name: str, text: str) -> None:
        flat = " ".join(text.split())
        self.assertRegex(flat, NAMED[name.removeprefix("error_")])


instantiate_parametrized_tests(TestFeatures)


def inputs_held(record: dict[str, Any]) -> list[int]:
    return [count for what, count in record["held"] if what == "inputs"]


def calls_of(record: dict[str, Any], name: str) -> list[tuple]:
    return [call for call in record.get("collectives", []) if call[0] == name]


class TestExtensionOfOneRank(FSDPThreadTest):
    """Several inputs of a parameter, with nobody to gather from."""

    world_size = 1

    @pytest.mark.quick
    def test_every_input_counts(self) -> None:
        mesh = init_device_mesh("cpu", (1,))
        for kind in (Fp8, HighLow):
            for dtypes in ((), (BF16,)):
                self.check(kind, extended_stack(kind, 5, dtypes), mesh)

    def check(self, kind: type[Extended], model: torch.nn.Module, mesh: Any) -> None:
        values = [
            param.detach()._values.clone()
            for param in model.parameters()
            if isinstance(param, Extended)
        ]
        shard_children(model, "block", mesh=mesh)
        for _ in range(2):
            model[0].unshard()
            unsharded = list(model[0][0].params)[-2:]
            for param, value in zip(unsharded, values):
                error = (param.detach() - value).abs().max()
                bound = value.abs().max() / 16 if kind is Fp8 else 1e-3
                self.assertLess(error, bound)
                self.assertEqual(param.dtype, FP32)
            model[0].reshard()
        model(torch.ones(2, 3)).sum().backward()
        for param in model.parameters():
            self.assertGreater(param.grad.to_local().abs().sum(), 0)


@on_first_rank
class TestMemory(TestCase):
    """Peaks of a step, to the byte, from what the allocator reports."""

    release: dict[str, dict[str, int]]
    branch: dict[str, dict[str, int]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        release = run_python("-m", "fsdp_features.memory", on_release=True)
        branch = run_forked("fsdp_features.memory", "--mixed")
        cls.release, cls.branch = (
            json.loads(t.splitlines()[-1]) for t in (release, branch)
        )

    @parametrize("mode", list(MODES))
    def test_uniform_unit_takes_at_most_what_the_release_does(self, mode: str) -> None:
        for name in UNIFORM:
            most = self.release[name][mode]
            if (name, mode) == ("fp16", "reduce_fp32"):
                # Kernels cast bf16 to fp32, but fp16 is cast ahead of them
                most += 4 * sum(numel_of(spec) for spec in UNIFORM[name])
            self.assertLessEqual(self.branch[name][mode], most, name)

    @parametrize("mode", list(MODES))
    def test_mixed_unit_takes_at_most_what_as_many_bytes_do(self, mode: str) -> None:
        """Each byte as much as in a uniform unit of its dtype in the release."""
        of_dtype = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
        for name, specs in MIXED.items():
            nbytes = [numel_of(spec) * spec[1].itemsize for spec in specs]
            peaks = [self.release[of_dtype[dtype]][mode] for _, dtype in specs]
            most = sum(n * p for n, p in zip(nbytes, peaks)) / sum(nbytes)
            halves = sum(numel_of(s) for s in specs if s[1] == FP16)
            if mode == "reduce_fp32" and name != "two dtypes":
                most += 4 * halves
            if mode == "param_bf16" and FOLLOWS_GRAD_DTYPE:
                most += 2 * halves  # bf16 gradients that are reduced in fp16
            self.assertLessEqual(self.branch[name][mode], most, name)

    def test_alignment_takes_no_more_than_its_padding(self) -> None:
        nbytes = sum(numel_of(spec) * spec[1].itemsize for spec in UNALIGNED)
        whole = sum(numel_of(spec) * spec[1].itemsize for spec in UNIFORM["fp32"])
        for mode in ("plain", "no_reshard", "resharded", "accumulate", "hybrid"):
            most = self.release["fp32"][mode] * nbytes / whole
            # Of two regions of each rank, in the gather buffer and in what takes it
            padding = 2 * 4 * 2 * 15
            self.assertLessEqual(self.branch["unaligned"][mode], most + padding)


def numel_of(spec: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(spec[0]).numel()


instantiate_parametrized_tests(TestMemory)


if __name__ == "__main__":
    run_tests()
