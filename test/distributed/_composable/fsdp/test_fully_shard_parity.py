# Owner(s): ["oncall: distributed"]
"""
The release and this branch, with the same seeds and batches.

Units of one dtype keep the release's bits, order of steps and collectives. Units of
several have the bits of one unit of the release for each dtype or policy, and the order
of a uniform one.
"""

from typing import Any

import pytest

from fsdp_helpers.common.comms import BF16, FP32
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.scenario_test import ScenarioTest
from fsdp_helpers.common.scenarios import RANKS
from fsdp_helpers.common.utils import FakeGroupTest, shard_blocks
from fsdp_helpers.parity import memory
from fsdp_helpers.parity.cases import REFUSALS
from fsdp_helpers.parity.models import Extended, extended_stack, Fp8, HighLow
from fsdp_helpers.parity.modes import STEPS
from fsdp_helpers.parity.params import EXTENSIONS
from fsdp_helpers.parity.run import CASES

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)

TRAINED = [case for case in CASES if case.split()[1] not in REFUSALS]
REFUSED = [case for case in CASES if case not in TRAINED]
ORDERED = [
    name
    for kind, name in map(str.split, TRAINED)
    if kind == "mixed" and f"uniform {name}" in TRAINED
]


class TestParity(ScenarioTest):
    script = "fsdp_helpers.parity.run"
    in_halves = True

    @parametrize("case", TRAINED)
    def test_has_the_bits_of_the_release(self, case: str) -> None:
        """For uniform units also the order of ranges, collectives, and what is alive."""
        kind, name = case.split()
        sides = (self.records_of(r, case) for r in (self.release, self.branch))
        for release, branch in zip(*sides, strict=True):
            names = dict.fromkeys((*release, *branch))
            if kind != "uniform":
                names = [n for n in names if n.startswith("step")]
                self.assertEqual(reductions_of(branch), reductions_of(release))
            elif name in EXTENSIONS:  # inputs of two dtypes, which are aligned now
                names.pop("collectives", None)
            different = [
                f"{n}: {branch.get(n)} != {release.get(n)}"[:2000]
                for n in names
                # Nothing is, see below, where the release may keep a gather's buffer
                if n != "left" and branch.get(n) != release.get(n)
            ]
            self.assertEqual(different[:1], [])
            # Equal bits say nothing of a model that did not train
            losses = [branch[f"step {step} loss"] for step in range(STEPS)]
            self.assertEqual(len({*losses}), STEPS)
            self.assertTrue(any("parameter" in n for n in names))

    def test_mixed_unit_in_the_order_of_a_uniform_one(self) -> None:
        for name in ORDERED:
            with self.subTest(name):
                expected = self.records_of(self.release, f"uniform {name}")[0]
                actual = seen_in(self.results_of(f"mixed {name}")[0])
                self.check_same(name, actual, seen_in(expected))

    @parametrize("case", TRAINED)
    def test_nothing_is_left_after_backward(self, case: str) -> None:
        self.assertEqual({record["left"] for record in self.results_of(case)}, {0})

    @parametrize("kind,count", [("uniform", 1), ("mixed", 4)])
    def test_symmetric_memory_of_each_dtype(self, kind: str, count: int) -> None:
        for record in self.results_of(f"{kind} symmetric_memory"):
            registered, pools = record["symmetric memory"]
            self.assertEqual(len(registered), pools)  # each buffer once
            self.assertEqual(len({dtype for dtype, _ in registered}), count)

    @parametrize("case", REFUSED)
    def test_raises_the_error_of_the_release(self, case: str) -> None:
        name = case.split()[-1]
        for release, branch in zip(self.release[:RANKS], self.branch):
            wanted = release[f"uniform {name}"]["error"].partition(":")[0]
            actual, _, text = branch[case]["error"].partition(":")
            self.assertEqual(actual, wanted)
            self.assertRegex(" ".join(text.split()), REFUSALS[name])


def reductions_of(record: dict[str, Any]) -> set[tuple]:
    """Returns what kinds of reductions there were, of what dtypes, with what op."""
    calls = record.get("collectives", [])
    return {(name, dtype, op) for name, dtype, _, op, _ in calls if op is not None}


def seen_in(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what does not depend on how many dtypes or modules a unit has."""
    calls, held = record["collectives"], record["held"]
    seen = {
        "sizes of gathers": [call[-1] for call in calls if call[0] == "all_gather"],
        "inputs held": [count for what, count in held if what == "inputs"],
        "gathers held": {is_held for what, is_held in held if what == "gather"},
    }
    same = ("ranges", "comms", "waits", "contexts", "groups", "gathers", "backends")
    seen |= {key: record[key] for key in same if key in record}
    if "copies" in record:  # to pinned memory, of each dtype
        seen["copies"] = {*record["copies"]}
    return seen


class TestExtensionOfOneRank(FakeGroupTest):
    """Several inputs of a parameter over one rank, which no release accepts."""

    ranks = 1

    @pytest.mark.quick
    @parametrize("kind", [Fp8, HighLow], name_fn=lambda kind: kind.__name__)
    @parametrize("is_mixed", [False, True])
    def test_every_input_counts(self, kind: type[Extended], is_mixed: bool) -> None:
        model = extended_stack(kind, 5, (BF16,) if is_mixed else ())
        params = [*model[0][0].params][-2:]
        values = [param.detach()._values.clone() for param in params]
        shard_blocks(model, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(2):
            model[0].unshard()
            for param, value in zip([*model[0][0].params][-2:], values):
                error = (param.detach() - value).abs().max().item()
                bound = value.abs().max().item() / 16 if kind is Fp8 else 1e-3
                self.assertLess(error, bound)
            model[0].reshard()
        model(torch.ones(2, 3)).sum().backward()


class TestMemory(ScenarioTest):
    """Peaks of a step, to the byte, from what the allocator reports."""

    script = TestParity.script
    in_halves = TestParity.in_halves

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release = cls.release[RANKS]["peaks"]
        cls.branch = cls.branch[RANKS]["peaks"]

    @parametrize("mode", list(memory.MODES))
    def test_uniform_unit_takes_at_most_what_the_release_does(self, mode: str) -> None:
        for name in memory.UNIFORM:
            most = self.release[name][mode]
            if (name, mode) == ("fp16", "reduce_fp32"):
                # Kernels cast bf16 to fp32, but fp16 is cast ahead of them
                most += 4 * sum(numel_of(spec) for spec in memory.UNIFORM[name])
            self.assertLessEqual(self.branch[name][mode], most, name)

    @parametrize("mode", list(memory.MODES))
    def test_mixed_unit_takes_at_most_what_as_many_bytes_do(self, mode: str) -> None:
        """Each byte as much as in a uniform unit of its dtype in the release."""
        of_dtype = {FP32: "fp32", BF16: "bf16", memory.FP16: "fp16"}
        for name, specs in memory.MIXED.items():
            nbytes = [numel_of(spec) * spec[1].itemsize for spec in specs]
            peaks = [self.release[of_dtype[dtype]][mode] for _, dtype in specs]
            most = sum(n * p for n, p in zip(nbytes, peaks)) / sum(nbytes)
            halves = sum(numel_of(s) for s in specs if s[1] == memory.FP16)
            if mode == "reduce_fp32":
                most += 4 * halves
            if mode == "param_bf16" and IS_2_15:
                most += 2 * halves  # bf16 gradients that are reduced in fp16
            self.assertLessEqual(self.branch[name][mode], most, name)

    def test_one_unit_takes_at_most_what_the_release_does(self) -> None:
        for name in memory.ONE_UNIT:
            nbytes = self.branch["one unit"][name]
            self.assertLessEqual(nbytes, self.release["one unit"][name], name)

    def test_one_odd_gradient_takes_its_own_bytes_alone(self) -> None:
        """Itself, its columns of the reduction's input and output, and its shard."""
        peaks = self.branch["one unit"]
        columns = memory.ODD_NUMEL * FP32.itemsize
        own = columns + 2 * columns // RANKS
        self.assertLessEqual(peaks["bf16 and one fp32"], peaks["bf16"] + columns + own)
        # And a copy that the kernel for CPUs makes of what stands in for it
        odd = memory.ODD_NUMEL * (2 * BF16.itemsize + FP32.itemsize)
        self.assertLessEqual(peaks["fp32 and one bf16"], peaks["fp32"] + odd + own)

    def test_a_factor_over_a_single_rank_takes_no_memory(self) -> None:
        """The release makes a buffer for what is divided, and copies that."""
        peaks = self.branch["one unit"]
        self.assertEqual(peaks["one rank, divided"], peaks["one rank"])
        more = self.release["one unit"]["one rank, divided"] - peaks["one rank"]
        nbytes = sum(numel_of(spec) * spec[1].itemsize for spec in memory.FOUR[FP32])
        self.assertGreaterEqual(more, nbytes)


def numel_of(spec: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(spec[0]).numel()


if __name__ == "__main__":
    run_tests()
