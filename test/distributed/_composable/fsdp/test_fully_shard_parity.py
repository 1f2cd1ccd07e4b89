# Owner(s): ["oncall: distributed"]

"""
Whatever ``fully_shard`` can do, under the release and under this branch, with the same
seeds and batches. Units of one dtype keep the release's bits, order of steps and
collectives. Units of several have the bits of one unit of the release for each dtype,
or for each policy, and the order of a uniform unit.

What is run is in ``fsdp_parity/run.py``.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_common.run_both import read_results, Results, run_on
from fsdp_common.run_forked import run_forked
from fsdp_common.utils import (
    FSDPThreadTest,
    on_first_rank,
    run_python,
    shard_blocks,
)
from fsdp_parity.memory import (
    FOUR,
    FP16,
    MIXED,
    MODES,
    ODD_NUMEL,
    ONE_UNIT,
    UNALIGNED,
    UNIFORM,
)
from fsdp_parity.models import BF16, Extended, extended_stack, Fp8, FP32, HighLow
from fsdp_parity.modes import STEPS
from fsdp_parity.params import EXTENSIONS
from fsdp_parity.run import CASES, KINDS, RANKS

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.timeout(600)

TRAINED = [name for name, case in CASES.items() if case.refusal is None]
REFUSED = [name for name, case in CASES.items() if case.refusal is not None]
ORDERED = [name for name in TRAINED if {"uniform", "mixed"} <= {*CASES[name].kinds}]
MODULE = "fsdp_parity.run"
# Of the series for upstream, uniform units alone
KIND_ARGS = ("--kinds", *os.environ.get("FSDP_PARITY_KINDS", " ".join(KINDS)).split())


def kinds_of(names: list[str]) -> list[str]:
    return [f"{kind} {name}" for name in names for kind in CASES[name].kinds]


def run_release() -> Results:
    return run_on(MODULE, "--by-dtype", *KIND_ARGS, on_release=True)


def run_branch() -> Results:
    """
    Runs every other rank in another interpreter. Dtypes, which hash by address, and
    strings have other hashes in each, and sets another order.
    """
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as met:
        args = ("--out", out, "--store", f"{met}/store")

        def run_half(half: str) -> None:
            env = {"PYTHONHASHSEED": half}
            run_python("-m", MODULE, *args, *KIND_ARGS, "--half", half, env=env)

        with ThreadPoolExecutor() as pool:
            list(pool.map(run_half, ("1", "0")))
        return read_results(out)


def without_stale_prefetch(name: str, release: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the release's record without what comes of forwards that no backward
    follows: the last unit of a later one looks once more for a unit to prefetch.
    """
    if name != "evaluated_before" or "ranges" not in release:
        return release
    ranges = [*release["ranges"]]
    prefetches = [i for i, label in enumerate(ranges) if "backward_prefetch" in label]
    del ranges[prefetches[-1]]
    return release | {"ranges": ranges}


@on_first_rank
class TestParity(TestCase):
    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with ThreadPoolExecutor() as pool:
            release, branch = pool.submit(run_release), pool.submit(run_branch)
        cls.release, cls.branch = release.result(), branch.result()

    def by_rank(self, results: Results, kind: str, name: str) -> list[dict[str, Any]]:
        """Returns what each rank has that ran a case: as many as the case says."""
        key = f"{kind} {name}"
        found = [of_rank[key] for of_rank in results if key in of_rank]
        self.assertEqual(len(found), 2 if CASES[name].takes_turns else RANKS, key)
        if CASES[name].refusal is None:
            self.assertEqual([r["error"] for r in found if "error" in r], [], key)
        return found

    def records(self, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yields all that the branch has of a case, by kind."""
        for kind in CASES[name].kinds:
            for record in self.by_rank(self.branch, kind, name):
                yield kind, record

    # Whether what a case computes is right #

    @parametrize("case", kinds_of(TRAINED))
    def test_bits(self, case: str) -> None:
        """Of a uniform unit also the order of ranges, collectives, and what is held."""
        kind, name = case.split()
        sides = (self.by_rank(r, kind, name) for r in (self.release, self.branch))
        for release, branch in zip(*sides, strict=True):
            release = without_stale_prefetch(name, release)
            names = dict.fromkeys((*release, *branch))
            if kind != "uniform":
                names = [n for n in names if n.startswith(("step", "final"))]
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
            self.assertTrue(any(n.startswith("final") for n in names))

    def test_every_kind_of_parameter_has_gradients(self) -> None:
        """What is compared is there: all dtypes, each with a gradient that is not 0."""
        record = self.by_rank(self.branch, "mixed", "plain")[0]
        found = {
            (of.removeprefix("torch."), name.split(".")[-1])
            for name, (of, bits) in (i for i in record.items() if "gradient" in i[0])
            if any(bits)
        }
        dtypes = ("float32", "bfloat16", "float16")
        kinds = ("gain", "up", "down", "code", "scale")
        self.assertEqual(found, {*itertools.product(dtypes, kinds)})

    # Whether a mixed unit takes the steps of a uniform one #

    @parametrize("name", ORDERED)
    def test_mixed_unit_in_the_order_of_a_uniform_one(self, name: str) -> None:
        expected = self.by_rank(self.release, "uniform", name)[0]
        expected = seen_in(without_stale_prefetch(name, expected))
        actual = seen_in(self.by_rank(self.branch, "mixed", name)[0])
        self.assertEqual(list(actual), list(expected))
        for key, seen in actual.items():
            self.assertEqual(seen, expected[key], key)

    def test_every_order_is_seen(self) -> None:
        """What is compared is there: prefetches, reductions, and waits for them."""
        ranges = self.by_rank(self.branch, "uniform", "two_meshes")[0]["ranges"]
        for part in ("backward_prefetch for", "[pg=2]", "[pg=1]", "reduce", "rs_wait"):
            self.assertTrue(any(part in name for name in ranges), part)
        for name, key in (
            ("three_input_buffers", "inputs held"),
            ("pinned_add_up", "copies"),
            ("post_optim_event", "waits"),
        ):
            seen = seen_in(self.by_rank(self.branch, "mixed", name)[0])[key]
            self.assertGreater(len({*seen}), 1, name)

    @parametrize("name", TRAINED)
    def test_nothing_is_left_after_backward(self, name: str) -> None:
        for kind, record in self.records(name):
            self.assertEqual(record["left"], 0, kind)

    def test_symmetric_memory_of_each_dtype(self) -> None:
        for kind, record in self.records("symmetric_memory_sums"):
            registered, pools = record["symmetric memory"]
            self.assertEqual(len(registered), pools, kind)  # each buffer once
            dtypes = {dtype for dtype, _ in registered}
            self.assertEqual(len(dtypes), 4 if kind == "mixed" else 1, kind)

    # Errors #

    @parametrize("case", kinds_of(REFUSED))
    def test_error_of_the_release(self, case: str) -> None:
        kind, name = case.split()
        release = self.by_rank(self.release, "uniform", name)
        for theirs, ours in zip(release, self.by_rank(self.branch, kind, name)):
            self.assertIn("error", ours)
            (wanted, _), (actual, text) = theirs["error"], ours["error"]
            self.assertEqual(actual, wanted)
            self.assertRegex(" ".join(text.split()), CASES[name].refusal)


instantiate_parametrized_tests(TestParity)


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
        params = [*model[0][0].params][-2:]
        values = [param.detach()._values.clone() for param in params]
        shard_blocks(model, mesh=mesh)
        for _ in range(2):
            model[0].unshard()
            for param, value in zip([*model[0][0].params][-2:], values):
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
        release = run_python("-m", "fsdp_parity.memory", on_release=True)
        mixed = ["--mixed"] if "mixed" in KIND_ARGS else []
        branch = run_forked("fsdp_parity.memory", *mixed)
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
            if mode == "reduce_fp32":
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

    def test_one_unit_takes_at_most_what_the_release_does(self) -> None:
        for name in ONE_UNIT:
            nbytes = self.branch["one unit"][name]
            self.assertLessEqual(nbytes, self.release["one unit"][name], name)

    def test_one_odd_gradient_takes_its_own_bytes_alone(self) -> None:
        """Itself, its columns of the reduction's input and output, and its shard."""
        peaks = self.branch["one unit"]
        columns = ODD_NUMEL * FP32.itemsize
        own = columns + 2 * columns // RANKS
        most = peaks["bf16"] + ODD_NUMEL * FP32.itemsize + own
        self.assertLessEqual(peaks["bf16 and one fp32"], most)
        # And a copy that the kernel for CPUs makes of what stands in for it
        most = peaks["fp32"] + ODD_NUMEL * (2 * BF16.itemsize + FP32.itemsize) + own
        self.assertLessEqual(peaks["fp32 and one bf16"], most)

    def test_a_factor_over_a_single_rank_takes_no_memory(self) -> None:
        """The release makes a buffer for what is divided, and copies that."""
        peaks = self.branch["one unit"]
        self.assertEqual(peaks["one rank, divided"], peaks["one rank"])
        more = self.release["one unit"]["one rank, divided"] - peaks["one rank"]
        nbytes = sum(numel_of(spec) * spec[1].itemsize for spec in FOUR[FP32])
        self.assertGreaterEqual(more, nbytes)


def numel_of(spec: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(spec[0]).numel()


instantiate_parametrized_tests(TestMemory)


if __name__ == "__main__":
    run_tests()
