# Owner(s): ["oncall: distributed"]
"""``docs/ranks_that_drift.md`` has what ``test_fully_shard_drift.py`` finds."""

from __future__ import annotations

from pathlib import Path

from fsdp_common.utils import DeviceFreeTest
from fsdp_drift.cases import CASES, OUTCOMES

from torch.testing._internal.common_utils import run_tests


PAGE = Path(__file__).parents[4] / "docs" / "ranks_that_drift.md"


def page_rows() -> dict[str, tuple[str, ...]]:
    """Returns the outcomes of each case, one for each mode, as the page has them."""
    lines = PAGE.read_text().splitlines()
    table = lines[
        lines.index("| one rank, unlike the others | by default | with `always` |") :
    ]
    rows = {}
    for line in table[2:]:
        if not line.startswith("|"):
            break
        case, *outcomes = (cell.strip() for cell in line.strip("|").split("|"))
        rows[case] = tuple(outcomes)
    return rows


class TestPage(DeviceFreeTest):
    def test_page_has_every_case(self) -> None:
        self.assertEqual([*page_rows()], [*CASES])

    def test_page_says_what_comes_of_each(self) -> None:
        self.assertEqual(page_rows(), OUTCOMES)


if __name__ == "__main__":
    run_tests()
