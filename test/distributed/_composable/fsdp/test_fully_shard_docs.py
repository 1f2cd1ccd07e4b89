# Owner(s): ["oncall: distributed"]
"""``docs/errors.md`` fits the commonest errors; the code of ``README.md`` runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fsdp_helpers.build
import fsdp_helpers.clients.real_models  # noqa: F401
from fsdp_helpers.common.utils import DeviceFreeTest, FakeGroupTest

import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


# Not where torch is: this file may be run on another one
ROOT = Path(__file__).resolve().parents[4]
README, ERRORS = ROOT / "README.md", ROOT / "docs/errors.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def error_rows() -> list[list[str]]:
    """Returns the cells of the table of errors."""
    table = ERRORS.read_text().split("| error | why | what to do |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def quoted(cell: str) -> list[str]:
    """Returns the errors that a cell quotes, if it begins with one."""
    return [text for _, text in re.findall(r"(`+)(.+?)\1", cell) if cell[0] == "`"]


class TestPages(DeviceFreeTest):
    def test_pages_stay_short(self) -> None:
        words = {page: len(page.read_text().split()) for page in PAGES}
        # The page about other libraries counts apart
        self.assertLessEqual(words.pop(ROOT / "docs/surprises.md"), 900)
        self.assertLessEqual(sum(words.values()), 11_800)
        self.assertLessEqual(len(README.read_text().splitlines()), 120)

    def test_releases_are_those_that_the_branch_fits(self) -> None:
        versions = {*json.loads((ROOT / "tools/release_digests.json").read_text())}
        for page in ("README.md", "docs/parity.md", "docs/install.md", "CHANGELOG.md"):
            named = {*re.findall(r"\b2\.\d+\.\d+\b", (ROOT / page).read_text())}
            self.assertEqual(named, versions, page)


class Routed(nn.Module):
    """bf16 activations meet an fp32 router."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.router = nn.Linear(4, 2, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.proj(x.to(self.proj.weight.dtype)))


def linear(*, dtype: torch.dtype | None = None) -> nn.Linear:
    return fully_shard(nn.Linear(4, 4, dtype=dtype))


def load(assign: bool) -> None:
    linear().load_state_dict(nn.Linear(4, 4).state_dict(), assign=assign)


def clip_over_two_meshes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit, shape, names in ((model[0], (2,), "s"), (model[1], (2, 1), "rs")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
        fully_shard(unit, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def wider_gradients_in_adamw() -> None:
    model = linear(dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


# What users do wrong most often, and what the table must say to do
COMMON: dict[str, tuple[Callable[[], object], str]] = {
    "bf16_into_an_fp32_router": (
        lambda: fully_shard(Routed(bias=True))(torch.ones(2, 4)),
        "`x.to(self.weight.dtype)`",
    ),
    "the_same_without_bias": (
        lambda: fully_shard(Routed(bias=False))(torch.ones(2, 4)),
        "`x.to(self.weight.dtype)`",
    ),
    "two_meshes": (clip_over_two_meshes, "recipes/clip_grad_norm.py"),
    "full_state_dict": (lambda: load(False), "for loading see the next row"),
    "assigned": (lambda: load(True), "StateDictOptions(full_state_dict=True)"),
    "parent_before_child": (
        lambda: fully_shard(fully_shard(nn.Sequential(nn.Linear(4, 4)))[0]),
        "call it on children first",
    ),
    "sharded_twice": (lambda: fully_shard(linear()), "once for each module"),
    "wider_gradients": (wider_gradients_in_adamw, "`reduce_dtype=torch.float32`"),
}


class TestErrors(FakeGroupTest):
    ranks = 2

    @parametrize("name", [*COMMON])
    def test_is_in_one_row_which_says_what_to_do(self, name: str) -> None:
        wrong, expected = COMMON[name]
        with self.assertRaises(Exception) as caught:
            wrong()
        notes = getattr(caught.exception, "__notes__", ())  # from Python 3.11 on
        found, raised = [], "\n".join([str(caught.exception), *notes])
        for error, _, to_do in error_rows():
            for text in quoted(error):
                parts = map(re.escape, text.split("…"))
                if re.search(".+".join(parts), raised, re.DOTALL):
                    found.append(to_do)
        self.assertEqual(len(found), 1, raised)
        self.assertIn(expected, found[0])


class TestReadme(FakeGroupTest):
    """Its first page of code runs, in a group that sends nothing."""

    ranks = 2

    def test_code_runs(self) -> None:
        blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", README.read_text())
        self.assertEqual(len(blocks), 4)
        model = nn.Module()
        model.layers = nn.ModuleList(Routed(bias=True) for _ in range(2))
        model.router = nn.Linear(4, 2)
        names = {name: getattr(fsdp, name) for name in fsdp.__all__}
        names |= {"torch": torch, "model": model}
        shards, *by_policy, prints = blocks  # no policy changes units that exist
        for block in (*by_policy, shards, prints):
            exec(block, names)
        reduced: dict[str, set[object]] = {}
        for row in fsdp.layout_summary(model).rows:
            key = row.reduce_dtype, row.comm_dtype
            reduced.setdefault(row.unit, set()).update([key] if row.names else [])
        self.assertEqual([*reduced], ["(root)", "layers.0", "layers.1"])
        self.assertEqual([*map(len, reduced.values())], [1, 2, 2])
        self.assertEqual(names["policy"].grad_comm_dtype, torch.bfloat16)


if __name__ == "__main__":
    run_tests()
