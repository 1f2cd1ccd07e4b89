"""The page of facts that ``gpu.py`` writes, anew after each result."""

import json
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from _gpu_expected import Expectation, EXPECTED


AS_EXPECTED = "as expected"
NOT_RUN, TIMED_OUT, DIED = "not run", "timed out", "died"
NOT_PREDICTED = "not predicted"
SCRIPT = "benchmarks/distributed/fsdp/gpu.py"


@dataclass(frozen=True)
class Line:
    """What was found, and what it means."""

    part: str
    case: str
    figure: str
    value: float | None
    expected: str
    verdict: str
    detail: str
    command: str


def expectation_of(part: str, case: str, figure: str) -> Expectation | None:
    """Returns the first row of the table that is about this figure."""
    name = f"{part}.{case}.{figure}"
    return next((row for row in EXPECTED if fnmatchcase(name, row.figures)), None)


def command_of(device: str, part: str, case: str) -> str:
    return f"python3 {SCRIPT} --device {device} --only {part}.{case}"


@dataclass
class Report:
    """All lines so far. Every line that is added is on the disk at once."""

    folder: Path
    device: str
    header: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    abouts: dict[str, str] = field(default_factory=dict)

    def judge(
        self, part: str, case: str, figure: str, value: float, detail: str
    ) -> None:
        """Adds a figure, compared with what is expected of it."""
        row = expectation_of(part, case, figure)
        verdict, expected = NOT_PREDICTED, ""
        if row is not None:
            expected = row.bound
            verdict = AS_EXPECTED if row.holds(value) else row.otherwise
        self._add(part, case, figure, value, expected, verdict, detail)

    def tell(self, part: str, case: str, verdict: str, reason: str) -> None:
        """Adds a case that gave no figure."""
        self._add(part, case, "", None, "", verdict, reason)

    def _add(self, part: str, case: str, *rest: Any) -> None:
        found: Any = (part, case, *rest, command_of(self.device, part, case))
        self.lines.append(Line(*found))
        self.save()

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {
            "header": self.header,
            "lines": [asdict(line) for line in self.lines],
        }
        text = json.dumps(found, indent=1) + "\n"
        for name, page in (("report.json", text), ("report.md", self.page())):
            partial = self.folder / f"{name}.partial"
            partial.write_text(page)
            partial.replace(self.folder / name)

    def page(self) -> str:
        texts = ["# What is so on this device\n"]
        texts += [f"- {name}: {value}" for name, value in self.header.items()]
        counts = {line.verdict: 0 for line in self.lines}
        for line in self.lines:
            counts[line.verdict] += 1
        texts += ["", *(f"- **{n}** {verdict}" for verdict, n in counts.items())]
        for part in dict.fromkeys(line.part for line in self.lines):
            texts += ["", f"## {part}", "", self.abouts.get(part, ""), ""]
            texts += table([line for line in self.lines if line.part == part])
        return "\n".join([*texts, ""])


def table(lines: list[Line]) -> list[str]:
    texts = [
        "| case | figure | value | expected | verdict | detail | repeat |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        value = "" if line.value is None else f"{line.value:.4g}"
        # The last lines of an error are in the JSON
        detail = line.detail.strip().splitlines() or [""]
        shown = detail[0] if len(detail) == 1 else f"{detail[0]} … {detail[-1]}"
        cells = (
            line.case,
            line.figure,
            value,
            line.expected,
            line.verdict if line.verdict == AS_EXPECTED else f"**{line.verdict}**",
            shown,
            f"`{line.command}`",
        )
        texts.append(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |")
    return texts
