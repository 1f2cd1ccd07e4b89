"""
Runs the parts of ``gpu.py``, so that one that hangs or dies loses nothing of the others.

Each side's processes live as long as a part, or until a case has ended them by an error
or by its time: the next case starts new ones.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu_part import Ask, BRANCH, Case, Part, Where
from _gpu_report import DIED, NOT_RUN, Report, TIMED_OUT
from _sides import Side, SideError, SideTimeoutError


# Has a reason why an ask gave nothing, by verdict, or its answer
Answer = tuple[str, Any]
NO_RELEASE = "there is no release: give its folder by --release"


class Runner:
    """Runs parts of two torches on one device, and reports."""

    def __init__(self, roots: dict[str, Path | None], where: Where, report: Report):
        self.roots = roots
        self.where = where
        self.report = report

    def run(self, part: Part, wanted: Callable[[str, str], bool]) -> None:
        """Runs those of a part's cases that are wanted."""
        self.report.abouts[part.name] = part.about
        sides = self._sides_of(part)
        deadline = time.monotonic() + part.seconds
        try:
            for case in part.cases:
                if wanted(part.name, case.name):
                    self._run_case(part, case, sides, deadline)
                    if part.starts_anew:
                        _stop(sides)
        finally:
            _stop(sides)

    def _sides_of(self, part: Part) -> dict[str, Side]:
        options: dict[str, Any] = {"device": self.where.device} | part.side
        return {
            name: Side(name, root, **options)
            for name, root in self.roots.items()
            if root is not None
        }

    def _run_case(
        self, part: Part, case: Case, sides: dict[str, Side], deadline: float
    ) -> None:
        names, tell = (part.name, case.name), self.report.tell
        reason = part.not_run or case.not_run
        if not reason and time.monotonic() > deadline:
            reason = f"the {part.seconds:.0f} s of this part were over"
        if reason:
            tell(*names, NOT_RUN, reason)
            return
        end = min(time.monotonic() + part.case_seconds, deadline)
        found: dict[str, Any] = {}
        for who, ask in case.asks.items():
            if ask.side not in sides:
                verdict, answer = NOT_RUN, NO_RELEASE
            else:
                verdict, answer = _answer(sides[ask.side], part.module, ask, end)
            if verdict and who != BRANCH:  # that says nothing of the branch
                verdict, answer = NOT_RUN, f"nothing to compare with: {answer}"
            if verdict:
                tell(*names, verdict, answer)
            else:
                found[who] = answer
            if who == BRANCH and verdict:
                return
        for figure in case.figures(found):
            self.report.judge(*names, *figure)


def _answer(side: Side, module: str, ask: Ask, end: float) -> Answer:
    side.start()
    try:
        seconds = max(end - time.monotonic(), 1)
        answer = side.ask(module, ask.request, seconds=seconds)
    except SideTimeoutError as error:
        return TIMED_OUT, str(error)
    except SideError as error:
        return DIED, str(error)
    if "not_run" in answer:
        return NOT_RUN, answer["not_run"]
    return "", answer


def _stop(sides: dict[str, Side]) -> None:
    for side in sides.values():
        side.stop()
