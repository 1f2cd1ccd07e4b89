# Owner(s): ["oncall: distributed"]
"""``docs/architecture.md`` names what is there, and its picture is as drawn."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

from tools import draw_architecture
from torch.testing._internal.common_utils import run_tests, TestCase


ROOT = Path(draw_architecture.__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCES = ROOT / "torch/distributed/fsdp/_fully_shard"
# Ours, and not in the picture
AROUND = (
    "_fsdp_api.py",
    "_fsdp_agreement.py",
    "_fsdp_errors.py",
    "_fsdp_kept_names.py",
    "_fsdp_observers.py",
    "_fsdp_summary.py",
)


def defined_in(*files: str) -> set[str]:
    """Returns the names of what the files define, of methods too."""
    texts = [(SOURCES / file).read_text() for file in files]
    return {
        name
        for text in texts
        for name in re.findall(r"(?m)^ *(?:def|class) (\w+)", text)
    }


class TestArchitecture(TestCase):
    def test_picture_is_as_drawn(self):
        drawn = draw_architecture.draw()
        again = "run python3 tools/draw_architecture.py again"
        self.assertEqual(draw_architecture.OUTPUT.read_text(), drawn, again)
        ElementTree.fromstring(drawn)
        files = [file for _, file, _ in draw_architecture.ROOMS]
        shown = re.findall(r">(_\w+)</text>", drawn)
        self.assertGreater(len(shown), 5)
        self.assertEqual(set(shown) - defined_in(*files), set())

    def test_every_name_is_in_the_file_beside_it(self):
        rows = re.findall(
            r"(?m)^\| [^|]+\? \| `(\w+\.py)` \| (.+) \|$", PAGE.read_text()
        )
        self.assertGreater(len(rows), 10)
        for file, cell in rows:
            for name in re.findall(r"`(\w+)`", cell):
                self.assertIn(name, defined_in(file))

    def test_every_name_in_the_text_is_there(self):
        files = [file for _, file, _ in draw_architecture.ROOMS]
        defined = defined_in(*files, *AROUND, "_fully_shard.py")
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
