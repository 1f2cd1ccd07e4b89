# Owner(s): ["oncall: distributed"]

"""
Every row of the tables in ``docs/feature_parity.md``, and of the table of models and
tools in ``docs/supported.md``, names tests, which are there. The errors that ``docs/index.md``
quotes are raised somewhere, its pictures are what its script draws, and its memory is what
is counted. Links lead somewhere. ``docs/api.md`` has all names, fields and arguments. What
``README.md`` shows runs as shown. ``docs/wrong_uses.md`` has the table that its tests go through.
"""

import ast
import dataclasses
import fnmatch
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path

import matplotlib
import pytest

import fsdp_build  # noqa: F401
import fsdp_clients.real_models  # noqa: F401
from fsdp_common.utils import (
    BYTECODE_CACHE,
    DeviceFreeTest,
    FakeGroupTest,
    RELEASE_ROOT,
    run_python,
    TREE_ROOT,
)
from fsdp_wrong_uses.table import SECTIONS, table

import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
import train_mixed_dtype
from _byte_lm import text_batches
from _policies import CHOICES
from _report import wire_table
from tools.releases import RELEASES
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_summary import (
    BucketSummary,
    LayoutSummary,
    ParamsSummary,
    UnitSummary,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


# Not where torch is: this file may be run on another one
ROOT = Path(__file__).parents[4]
VERSIONS = [*RELEASES]
# The columns of the tables on each page that name tests
PARITY = "docs/feature_parity.md"
SUPPORTED = "docs/supported.md"
COLUMNS = {
    PARITY: [
        ["feature", "release", "branch, uniform", "branch, mixed", "test"],
        ["feature", *VERSIONS, "mixed units of the branch", "test"],
    ],
    "docs/index.md": [["error", "why", "what to do"]],
    SUPPORTED: [["model or tool", "the release", "this branch", "test"]],
}


def rows(page: str) -> list[list[str]]:
    """Returns the cells of all rows of the tables that have a column of tests."""
    found, columns = [], []
    for line in (ROOT / page).read_text().splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif columns in COLUMNS[page] and set(line) != {"|", "-"}:
            found.append(cells)
    return found


@functools.cache
def names_in(file: str, class_name: str) -> list[str]:
    module = importlib.import_module(f"test_fully_shard_{file}")
    names = dir(getattr(module, class_name, None))
    return [name for name in names if name.startswith("test_")]


class TestTables(DeviceFreeTest):
    @parametrize("page,at_least", [(PARITY, 80), (SUPPORTED, 15)])
    def test_every_row_names_tests_that_are_there(
        self, page: str, at_least: int
    ) -> None:
        self.assertGreaterEqual(len(rows(page)), at_least)
        for cells in rows(page):
            with self.subTest(cells[0]):
                self.assertIn(len(cells), map(len, COLUMNS[page]))
                self.assertTrue(all(cells))
                named = re.findall(r"`(\w+)::(\w+)::([^`]+)`", cells[-1])
                self.assertGreater(len(named), 0)
                self.assertEqual(len(named), cells[-1].count("`") // 2)
                for file, class_name, pattern in named:
                    tests = names_in(file, class_name)
                    self.assertTrue(fnmatch.filter(tests, pattern), pattern)

    @pytest.mark.quick
    def test_every_feature_is_one_row(self) -> None:
        features = [cells[0] for cells in rows(PARITY) if not cells[0].startswith("…")]
        self.assertEqual(len(features), len({*features}))


# Where the errors come from that the page quotes, and, of the release alone, the last
SOURCES = [
    "torch/distributed/fsdp/_fully_shard/*.py",
    "torch/_meta_registrations.py",
    "torch/distributed/_composable/contract.py",
    "torch/distributed/tensor/_dispatch.py",
    "torch/distributed/tensor/_sharding_prop.py",
    "torch/utils/checkpoint.py",
    f"{RELEASE_ROOT}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
]


def texts_in(source: str) -> list[str]:
    """Returns all strings of a file, with an ellipsis for what is filled in."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", None) for part in node.values)
            texts.append("".join(p if isinstance(p, str) else "…" for p in parts))
    return [" ".join(text.split()) for text in texts]


def quoted(cell: str) -> list[str]:
    """Returns the errors that a cell quotes, if it begins with one."""
    return [text for _, text in re.findall(r"(`+)(.+?)\1", cell) if cell[0] == "`"]


# How errors begin that are raised in C++; `TestErrors` raises them
NOT_IN_PYTHON = ("mat1 and mat2 must", "expected m1 and m2 to")


def anchors(page: Path) -> list[str]:
    """Returns what links to the headings of a page end in."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return ["#" + heading.replace(" ", "-") for heading in plain]


class TestIndex(DeviceFreeTest):
    def test_quoted_errors_are_raised(self) -> None:
        # An absolute path stays what it is
        paths = [path for source in SOURCES for path in glob(str(TREE_ROOT / source))]
        texts = [text for path in paths for text in texts_in(Path(path).read_text())]
        errors = [text for cells in rows("docs/index.md") for text in quoted(cells[0])]
        self.assertGreater(len(errors), 10)
        for error in errors:
            if error.startswith(NOT_IN_PYTHON):
                continue
            # The ellipsis at the end stands for the rest of the text
            fixed = error.removesuffix("…")
            self.assertTrue(any(fixed in text for text in texts), error)

    def test_traffic_is_what_the_script_counts(self) -> None:
        script = ROOT / "benchmarks/distributed/fsdp/grad_comm_traffic.py"
        page = (ROOT / "docs/grad_comm_dtype.md").read_text()
        printed = run_python(str(script))
        self.assertGreater(len(printed.splitlines()), 10)
        self.assertIn(printed, page)

    def test_ratios_are_those_of_the_benchmarks(self) -> None:
        """Where somebody chooses: on the first page, and where memory is explained."""
        measured: dict[tuple[str, ...], float] = {}
        last = ["", "", ""]
        for line in (ROOT / "docs/benchmarks.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != 10 or not re.fullmatch(r"\d\.\d+", cells[6]):
                continue
            # A cell that is left out is that of the row above
            new = next((i for i in range(3) if cells[i]), 3)
            last = last[:new] + cells[new:3]
            measured[(*last[:2], cells[4])] = float(cells[6])
        cases = {
            "Llama-like blocks": "release",
            "Nemotron-H-like blocks": "release, one unit per dtype",
            "fp32 adapters blocks": "release, one unit per dtype",
        }
        for page, heading, parts in (
            ("README.md", "| blocks | peak |", ("memory", "step")),
            ("docs/index.md", "| blocks | release |", ("memory",)),
        ):
            text = (ROOT / page).read_text().split(heading)[1].split("\n\n")[0]
            for line, (case, other) in zip(
                text.splitlines()[2:], cases.items(), strict=True
            ):
                expected = [
                    f"{measured[part, name, other] + 1e-9:.2f}"
                    for name in (case, f"{case}, BACKWARD_POST")
                    for part in parts
                ]
                self.assertEqual(re.findall(r"\b\d\.\d\d\b", line), expected)

    def test_links_lead_somewhere(self) -> None:
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
            text = page.read_text()
            for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text):
                path = page.parent / target if target else page
                self.assertTrue(path.exists(), (page.name, target))
                if anchor:
                    self.assertIn(anchor, anchors(path), (page.name, target))

    def test_pictures_are_what_the_script_draws(self) -> None:
        folder = ROOT / "docs" / "pictures"
        with tempfile.TemporaryDirectory() as drawn:
            run_python(str(folder / "draw.py"), drawn)
            names = sorted(path.name for path in Path(drawn).iterdir())
            self.assertEqual(names, sorted(p.name for p in folder.glob("*.svg")))
            for name in names:
                mine, other = ((f / name).read_text() for f in (folder, Path(drawn)))
                self.assertEqual(re.findall(r">(.+)</text>", mine),
                                 re.findall(r">(.+)</text>", other))  # fmt: skip
                # Another matplotlib may place the same texts elsewhere
                if f"Matplotlib v{matplotlib.__version__}," in mine:
                    self.assertEqual(mine, other)


class Routed(nn.Module):
    """bf16 activations meet an fp32 router."""

    def __init__(self, bias: bool, casts: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.router = nn.Linear(4, 2, bias=bias)
        self.casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x.to(self.proj.weight.dtype))
        return self.router(x.to(self.router.weight.dtype) if self.casts else x)


def bf16_into_an_fp32_router() -> None:
    fully_shard(Routed(bias=True))(torch.ones(2, 4))


def bf16_into_an_fp32_router_without_bias() -> None:
    fully_shard(Routed(bias=False))(torch.ones(2, 4))


def full_state_dict() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.load_state_dict(nn.Linear(4, 4).state_dict())


def full_state_dict_assigned() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)


def parent_before_child() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    fully_shard(model[0])


def sharded_twice() -> None:
    fully_shard(fully_shard(nn.Linear(4, 4)))


def wider_gradients_in_adamw() -> None:
    model = fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    model.weight.grad_dtype = torch.float32
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


# And what the table must say to do
COMMON = {
    bf16_into_an_fp32_router: "`x.to(self.weight.dtype)`",
    bf16_into_an_fp32_router_without_bias: "`x.to(self.weight.dtype)`",
    full_state_dict: "for loading see the next row",
    full_state_dict_assigned: "StateDictOptions(full_state_dict=True)",
    parent_before_child: "call it on children first",
    sharded_twice: "once for each module",
    wider_gradients_in_adamw: "`reduce_dtype=torch.float32`",
}


@instantiate_parametrized_tests
class TestErrors(FakeGroupTest):
    """What users do wrong most often is in the table of errors, with what to do."""

    ranks = 2

    @parametrize("wrong", [*COMMON], name_fn=lambda wrong: wrong.__name__)
    def test_table_tells_what_to_do(self, wrong: Callable[[], None]) -> None:
        with self.assertRaises(Exception) as caught:
            wrong()
        found = []
        for error, _, to_do in rows("docs/index.md"):
            for text in quoted(error):
                parts = map(re.escape, text.split("…"))
                if re.search(".+".join(parts), str(caught.exception), re.DOTALL):
                    found.append(to_do)
        self.assertEqual(len(found), 1, str(caught.exception))
        self.assertIn(COMMON[wrong], found[0])

    def test_first_row_says_what_lets_bf16_meet_fp32(self) -> None:
        for bias in (True, False):
            model = fully_shard(Routed(bias, casts=True))
            model(torch.ones(2, 4)).sum().backward()
            dtypes = {
                name: param.grad.dtype for name, param in model.named_parameters()
            }
            self.assertEqual(dtypes["proj.weight"], torch.bfloat16)
            self.assertEqual(dtypes["router.weight"], torch.float32)
        self.assertIn("mat1 and mat2", rows("docs/index.md")[0][0])

    def test_second_row_is_the_optimizer_that_steps_nothing(self) -> None:
        """One that was made before ``fully_shard`` says nothing, and changes nothing."""
        model = nn.Linear(4, 4)
        early = torch.optim.SGD(model.parameters(), lr=1.0)
        fully_shard(model)
        late = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.to_local().clone()
        model(torch.ones(2, 4)).sum().backward()
        early.step()
        self.assertIsNone(early.param_groups[0]["params"][0].grad)
        self.assertTrue(torch.equal(model.weight.to_local(), before))
        late.step()
        self.assertFalse(torch.equal(model.weight.to_local(), before))
        _, why, to_do = rows("docs/index.md")[1]
        self.assertIn("before `fully_shard`", why)
        self.assertIn("after `fully_shard`", to_do)


class TestApi(DeviceFreeTest):
    """``docs/api.md`` has what can be imported, with all fields and arguments."""

    def setUp(self) -> None:
        super().setUp()
        self.sections = {
            title.strip("`"): text
            for title, text in re.findall(
                r"^#+ ([^\n]+)\n(.*?)(?=^##|\Z)",
                (ROOT / "docs/api.md").read_text(),
                re.MULTILINE | re.DOTALL,
            )
        }

    def test_names_can_be_imported(self) -> None:
        code = re.findall(r"^```python\n(.*?)^```$", self.sections["API"], re.M | re.S)
        names: dict[str, object] = {}
        exec(code[0], names)
        for name in names.keys() - {"__builtins__"}:
            self.assertIn(name, self.sections)

    def test_signatures_are_theirs(self) -> None:
        functions = {
            "MixedPrecisionPolicy.by_name": fsdp.MixedPrecisionPolicy.by_name,
            "set_backward_prefetch": fsdp.set_backward_prefetch,
            "set_reduce_bucket_cap": fsdp.set_reduce_bucket_cap,
            "layout_summary": fsdp.layout_summary,
        }
        for name, function in functions.items():
            (shown,) = re.findall(r"^\w+\((.*?)\)$", self.sections[name], re.M | re.S)
            arguments = inspect.signature(function).parameters.values()
            bare = [a.replace(annotation=inspect.Parameter.empty) for a in arguments]
            expected = str(inspect.Signature(bare))[1:-1]
            self.assertEqual(" ".join(shown.split()), expected)

    def test_all_fields_are_there(self) -> None:
        text = self.sections["MixedPrecisionPolicy"]
        policy = [f.name for f in dataclasses.fields(fsdp.MixedPrecisionPolicy)]
        self.assertEqual(re.findall(r"^\| `(\w+)`", text, re.M), policy)
        text = self.sections["layout_summary"]
        for kind in (LayoutSummary, UnitSummary, ParamsSummary, BucketSummary):
            row = rf"^\| `{kind.__name__}` .*?(?=^\| `|\Z)"
            (of_kind,) = re.findall(row, text, re.M | re.S)
            named = [line.split("|")[2] for line in of_kind.splitlines() if "|" in line]
            fields = {field.name for field in dataclasses.fields(kind)}
            self.assertEqual({*re.findall(r"`(\w+)`", "".join(named))}, fields)


class Product(nn.Module):
    """Multiplies by its matrices, which do nothing but take memory."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        matrices = (nn.Parameter(torch.ones(512, 512, dtype=d)) for d in dtypes)
        self.matrices = nn.ParameterList(matrices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = x.to(matrix.dtype) @ matrix / 512
        return x


class TestMemory(FakeGroupTest):
    """The example of ``docs/index.md``: what its sum says, and what is counted."""

    ranks = 8
    UNITS = 6

    def peak(
        self,
        dtypes: Sequence[torch.dtype],
        policy: fsdp.MixedPrecisionPolicy,
        post: bool,
    ) -> float:
        mesh = init_device_mesh("cpu", (self.ranks,))
        model = nn.Sequential(*(Product(dtypes) for _ in range(self.UNITS)))
        for unit in [*model, model]:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        if post:
            fsdp.set_backward_prefetch(model, fsdp.BackwardPrefetch.BACKWARD_POST)
        x = torch.ones(1, 512, dtype=dtypes[0])

        def step() -> None:
            model(x).float().sum().backward()
            model.zero_grad()

        step()  # what is made once is there before it is tracked
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((x,))
        with tracker:
            step()
        return (
            tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / 2**20
        )

    def test_example_is_what_is_counted(self) -> None:
        bf16, fp32 = torch.bfloat16, torch.float32
        kept = fsdp.MixedPrecisionPolicy()
        cast = fsdp.MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)
        cases = [
            ([bf16] * 4, kept, False),
            ([bf16] * 4, kept, True),
            ([fp32] * 4, cast, False),
            ([bf16] * 3 + [fp32], kept, False),
        ]
        text = (ROOT / "docs/index.md").read_text()
        shown = text.split("| matrices, MiB |")[1].split("\n\n")[0].splitlines()[2:]
        for line, (dtypes, policy, post) in zip(shown, cases, strict=True):
            quarter = 1 / 4  # MiB of a byte in each element of a matrix
            stored = sum(dtype.itemsize for dtype in dtypes) * quarter
            computed, reduced = (
                stored if d is None else len(dtypes) * d.itemsize * quarter
                for d in (policy.param_dtype, policy.reduce_dtype)
            )
            shards = self.UNITS * stored / self.ranks
            total = 2 * shards + (2 if post else 3) * computed + reduced
            peak = self.peak(dtypes, policy, post)
            # At most two units have no sharded gradients yet
            self.assertLess(peak, total)
            self.assertGreater(peak, total - shards * 2.01 / self.UNITS)
            values = (shards, computed, reduced, total, peak)
            cells = line.strip("|").split("|")[1:]
            self.assertEqual([c.strip() for c in cells], [f"{v:.1f}" for v in values])


class TestReadme(DeviceFreeTest):
    """Its script prints what it shows, and the release refuses it as it says."""

    def blocks(self) -> list[tuple[str, str]]:
        text = (ROOT / "README.md").read_text().split("## Before and after")[1]
        return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def run_script(self, variable: str = "") -> subprocess.CompletedProcess[str]:
        """Runs it as shown: in the clone's root, by the shell."""
        (language, code), (_, command), *_ = self.blocks()
        self.assertEqual(language, "python")
        script = ROOT / command.split()[-1]
        command = f"{variable} {command}"
        if Path(sys.prefix) != ROOT / ".venv":  # of another release, or somebody's own
            command = command.replace(".venv/bin", os.path.dirname(sys.executable))
            release = os.path.relpath(RELEASE_ROOT, ROOT)
            command = command.replace("build/base", release)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC", "MASTER_", "LOCAL_", "PYTHON"))
            and name not in ("RANK", "WORLD_SIZE", "GROUP_RANK")
        }
        with open(script, "x") as file:
            self.addCleanup(script.unlink)
            file.write(code)
        return subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env=environment | BYTECODE_CACHE,
            capture_output=True,
            text=True,
        )

    def test_script_prints_what_is_shown(self) -> None:
        done = self.run_script()
        self.assertEqual(done.stdout, self.blocks()[2][1], done.stderr)

    def test_release_refuses_the_script(self) -> None:
        text = (ROOT / "README.md").read_text()
        (variable,) = re.findall(r"With `(PYTHONPATH=\S+)` before the command", text)
        done = self.run_script(variable)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        # The dtypes are a set: they come in any order
        refusal, _, dtypes = self.blocks()[3][1].strip(" }\n").partition("{")
        self.assertIn(refusal, done.stderr)
        for dtype in dtypes.split(", "):
            self.assertIn(dtype, done.stderr)


@instantiate_parametrized_tests
class TestTraining(FakeGroupTest):
    """The table of what ``make train`` sends, in one step of the first of two ranks."""

    ranks = 2

    def lines(self, policy: str) -> list[str]:
        model = train_mixed_dtype.build_model()
        mesh = init_device_mesh("cpu", (self.ranks,))
        kinds = train_mixed_dtype.shard(model, mesh, policy)
        tokens, targets = next(text_batches(1, 1))
        train_mixed_dtype.loss_of(model, tokens, targets).backward()
        return wire_table(kinds, steps=1).splitlines()

    def test_readme_shows_it(self) -> None:
        (shown,) = re.findall(
            r"^```\n(unit  .*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
        )
        lines = shown.splitlines()
        self.assertGreater(len(lines), 8)
        self.assertEqual(self.lines("stored")[: len(lines)], lines)

    @parametrize("policy", [*CHOICES])
    def test_rows_count_what_is_sent_in_their_dtype(self, policy: str) -> None:
        numels: list[int] = []  # of gathers and of reductions, in turns
        row = r"(b?float\d+|all) +([\d,]+)(?: +[1-9]\d* +([\d,]+) +([\d,]+))?$"
        collective, total = "", 0  # of one collective, in bytes
        for line in self.lines(policy):
            if found := re.search(r"all-gather|reduce-scatter|all-to-all", line):
                collective, total = found[0], 0
                numels.append(0)
            if found := re.search(row, line):
                dtype, *numbers = found.groups(default="0")
                numel, *nbytes = (int(number.replace(",", "")) for number in numbers)
                if dtype == "all":
                    if collective != "all-gather":  # of which there may be two
                        self.assertEqual(nbytes, [total, total])
                    self.assertEqual(numel, numels[-1])
                    continue
                numels[-1] += numel
                total += (own := getattr(torch, dtype).itemsize * numel)
                # Others are sent together with those of other dtypes
                if collective == "reduce-scatter" or (
                    collective == "all-to-all" and found[3]
                ):
                    self.assertEqual(nbytes, [own, own])
        self.assertEqual(numels, [351_024, 351_024, 65_664, 65_664])


class TestWrongUses(DeviceFreeTest):
    PAGE = ROOT / "docs" / "wrong_uses.md"

    def test_every_row_is_on_the_page(self) -> None:
        lines = self.PAGE.read_text().splitlines()
        first = f"## {next(iter(SECTIONS))}"
        start, end = lines.index(first), lines.index("## Warned of")
        printed = table()[1:]
        again = "print the tables again: python fsdp_wrong_uses"
        self.assertEqual(lines[start : end - 1], printed, again)

    def test_the_note_is_there(self) -> None:
        folder = ROOT / "torch/distributed/fsdp/_fully_shard"
        notes = re.findall(
            r"`(\[Note: [^`]+\])` in\s`(\w+\.py)`", self.PAGE.read_text()
        )
        self.assertGreater(len(notes), 0)
        for note, file in notes:
            self.assertIn(note, (folder / file).read_text())


instantiate_parametrized_tests(TestTables)


if __name__ == "__main__":
    run_tests()
