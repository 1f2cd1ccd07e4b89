"""What a part of ``gpu.py`` is: cases that processes of release and branch run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


RELEASE, BRANCH = "release", "branch"
# A fake process group has so many ranks, of which the process is the first
FAKE_RANKS = 8


class Where(NamedTuple):
    """What the parts run on."""

    device: str  # "cuda" or "cpu"
    devices: int  # of CUDA

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


class Figure(NamedTuple):
    """One line of the report."""

    name: str
    value: float
    detail: str = ""


# From who was asked to what it answered. Of the branch there is an answer always
Found = Mapping[str, dict[str, Any]]
# From what was found to the lines
Figures = Callable[[Found], list[Figure]]


class Ask(NamedTuple):
    """What one side measures: arguments of the module's ``measure``."""

    side: str
    request: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is asked together, and compared."""

    name: str
    asks: Mapping[str, Ask]
    figures: Figures
    not_run: str = ""  # why, if it cannot run here


@dataclass(frozen=True)
class Part:
    """
    Cases that the same processes run one after the other.

    Args:
        module: A key of ``_worker.MODULES``.
        seconds: After which its next case is not begun, and no case goes on.
        case_seconds: That one case may take, with the start of processes.
        starts_anew: Whether each case has new processes.
        side: Arguments of :class:`_sides.Side`.
    """

    name: str
    about: str
    module: str
    cases: list[Case]
    seconds: float = 100
    case_seconds: float = 60
    starts_anew: bool = False
    side: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""


def on_both(request: dict[str, Any], **of_release: Any) -> dict[str, Ask]:
    """Asks both sides the same, but for what the release alone gets."""
    return {
        BRANCH: Ask(BRANCH, request),
        RELEASE: Ask(RELEASE, request | of_release),
    }
