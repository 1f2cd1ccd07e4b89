# Owner(s): ["oncall: distributed"]
"""``docs/architecture.md`` names what is there, and its picture is as drawn."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import fsdp_build  # noqa: F401
from fsdp_common.utils import TREE_ROOT

from tools import draw_architecture
from torch.testing._internal.common_utils import run_tests, TestCase


ROOT = Path(draw_architecture.__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCES = ROOT / "torch/distributed/fsdp/_fully_shard"
# From the highest room to the lowest; each imports only from those after it
ROOMS = [room[0] for row in draw_architecture.ROOMS for room in row if room]


def own_files() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def imports_of(file: str) -> set[str]:
    """Returns which files beside it a file imports from, for types as well."""
    nodes = [*ast.walk(ast.parse((SOURCES / f"{file}.py").read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    named = {node.module.split(".")[-1] for node in imports if node.module}
    named |= {alias.name for node in imports if not node.module for alias in node.names}
    named |= {
        a.name for node in nodes if isinstance(node, ast.Import) for a in node.names
    }
    return {name.split(".")[-1] for name in named} & {*own_files()}


def reached_from(file: str) -> set[str]:
    """Returns which files it imports, and which those do."""
    reached, left = set(), [file]
    while left:
        new = imports_of(left.pop()) - reached
        reached |= new
        left += new
    return reached


def defined_in(*files: str | Path) -> set[str]:
    """Returns the names of what the files define, of methods too."""
    texts = [(SOURCES / file).read_text() for file in files]
    return {
        name
        for text in texts
        for name in re.findall(r"(?m)^ *(?:def|class) (\w+)", text)
    }


def shown_in(picture: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the texts of a picture, and its shapes with their colors and lines."""
    nodes = [*ElementTree.parse(picture).iter()]
    texts = [node.text or "" for node in nodes if node.tag.endswith("}text")]
    paths = [node for node in nodes if node.tag.endswith("}path")]
    shapes = [(path.get("d", ""), path.get("style", "")) for path in paths]
    return texts, shapes


class TestArchitecture(TestCase):
    def test_picture_is_as_drawn(self):
        """Its texts and shapes; where fonts put a text is no matter."""
        with tempfile.TemporaryDirectory() as folder:
            drawn = Path(folder) / "drawn.svg"
            draw_architecture.draw(drawn)
            texts, shapes = shown_in(drawn)
        again = "run .venv/bin/python tools/draw_architecture.py again"
        self.assertEqual(shown_in(draw_architecture.OUTPUT), (texts, shapes), again)
        self.assertGreater(len(shapes), 100)
        names = {text for text in texts if re.fullmatch(r"_\w+|foreach_\w+", text)}
        self.assertGreater(len(names), 20)
        self.assertLessEqual({*ROOMS}, names)
        files = [f"{room}.py" for room in ROOMS]
        self.assertEqual(names - defined_in(*files) - {*ROOMS}, set())

    def test_every_file_has_a_room(self):
        self.assertEqual(sorted(ROOMS), own_files())

    def test_imports_go_one_way(self):
        number = {room: i for i, room in enumerate(ROOMS)}
        self.assertIn("_fsdp_layout", imports_of("_fsdp_collectives"))
        for room in ROOMS:
            for module in imports_of(room):
                self.assertGreater(number[module], number[room], f"{room}: {module}")

    def test_what_training_does_not_need_knows_no_group(self):
        self.assertIn("_fsdp_registrations", reached_from("_fsdp_param_group"))
        of_group = {"_fsdp_param_group", "_fsdp_registrations"}
        of_group |= {"_fsdp_context", "_fsdp_collectives", "_fsdp_reduce"}
        for room in draw_architecture.BESIDE:
            self.assertEqual(reached_from(room) & of_group, set(), room)

    def test_every_name_is_in_the_file_beside_it(self):
        rows = re.findall(
            r"(?m)^\| [^|]+\? \| `(\w+\.py)` \| (.+) \|$", PAGE.read_text()
        )
        self.assertGreater(len(rows), 10)
        for file, cell in rows:
            for name in re.findall(r"`(\w+)`", cell):
                self.assertIn(name, defined_in(file))

    def test_every_name_in_the_text_is_there(self):
        files = [f"{room}.py" for room in ROOMS]
        of_release = TREE_ROOT / SOURCES.relative_to(ROOT) / "_fully_shard.py"
        defined = defined_in(*files, of_release)
        text = PAGE.read_text()
        named = re.findall(r"`(?:\w+\.)?(\w+)`", re.sub(r"`\w+\.py`", "", text))
        self.assertGreater(len(named), 30)
        self.assertEqual(set(named) - defined, set())
        for note in re.findall(r"`(\[Note: [^`]+\])`", text):
            group = (SOURCES / "_fsdp_param_group.py").read_text()
            self.assertIn(note, group)

    def test_the_readme_leads_there(self):
        text = (ROOT / "README.md").read_text()
        self.assertIn("(docs/architecture.md)", text)
        self.assertIn("`_get_gradient_divide_factors`", text)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
