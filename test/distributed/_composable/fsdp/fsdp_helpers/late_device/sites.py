"""Where a program stands: its calls that order streams, and the line that issues."""

import functools
import linecache
import re
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.fsdp._fully_shard as fsdp_package


_PACKAGE_DIR = str(Path(fsdp_package.__file__).parent)
_OF_RELEASE = ("_fsdp_state.py", "_fsdp_param.py")
_TORCH_DIR = str(Path(torch.__file__).parent)
# Files that look on, whose lines tell nothing
_CHECKERS = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("devices", "operators", "record", "sites")
)
# Functions that only wait: whoever calls them orders streams as well
_WAITING_HELPER = re.compile(
    r"_(wait|order|drop)_|wait_(all_gather_streams|current_stream)"
)


class Line(NamedTuple):
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """Returns what edits elsewhere do not change."""
        return f"{self.function}: {linecache.getline(*self[:2]).strip()}"


class Watch:
    """Notes the lines that order streams, and leaves out the calls of one."""

    def __init__(self, without: Line | None):
        self.visited: set[Line] = set()
        self._without = without

    def comes_to_call(self) -> bool:
        """Says whether the call that orders streams now is made."""
        is_made = is_site = True
        for frame, number in traceback.walk_stack(sys._getframe(1)):
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if file.startswith(_PACKAGE_DIR) and not file.endswith(_OF_RELEASE):
                line = Line(file, number, function)
                is_made &= line != self._without
                if is_site:
                    self.visited.add(line)
                is_site &= bool(_WAITING_HELPER.match(function))
        return is_made


@functools.cache
def _is_worth_telling(file: str) -> bool:
    is_other = file.startswith((_TORCH_DIR, "<", *_CHECKERS)) or "importlib" in file
    return file.startswith(_PACKAGE_DIR) or not is_other


def caller_line() -> Line:
    """Returns the innermost line of ``fully_shard``, of a hook or of no torch."""
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        if _is_worth_telling(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, number, frame.f_code.co_name)
    return Line("unknown", 0, "")
