"""
Where a program stands: its calls that order streams, so that one of them can be left
out, and the line that issues what is looked at.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

import torch
import torch.distributed.fsdp._fully_shard as fsdp_package


# Calls that order streams #

# The release has no context of its own, but all of it in the last one
MODULES = [
    importlib.import_module(f"{fsdp_package.__name__}._fsdp{name}")
    for name in ("_collectives", "_context", "_param_group", "_reduce")
    if importlib.util.find_spec(f"{fsdp_package.__name__}._fsdp{name}")
]

# Methods of streams, events and works, and the handle's context
_ORDERING_METHODS = frozenset(
    ("wait_stream", "wait_event", "wait", "synchronize", "record_event", "record")
    + ("stream",)
)
# Functions that only wait, by the names that their modules give them
_WAITING_HELPER = re.compile(r"_(wait|order|drop)_|wait_all_gather_streams")


class Site(NamedTuple):
    """
    A call that orders streams, and where it stands. It prints as function,
    callee and the call's place among such calls there, which edits elsewhere
    do not change.
    """

    function: str
    callee: str
    ordinal: int
    file: str
    first_line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.function} > {self.callee} #{self.ordinal}"

    def is_at(self, line: tuple[str, int]) -> bool:
        file, number = line
        return file == self.file and self.first_line <= number <= self.last_line


def find_sites(module: ModuleType) -> list[Site]:
    """Lists all calls in the module that order streams, used or not."""
    file = inspect.getsourcefile(module)
    sites: list[Site] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            callee = node.func.attr
            if callee in _ORDERING_METHODS or _WAITING_HELPER.match(callee):
                same = [s for s in sites if s[:2] == (function, callee)]
                lines = (node.lineno, node.end_lineno or node.lineno)
                sites.append(Site(function, callee, len(same), file, *lines))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(Path(file).read_text()), "")
    return sites


class Watch:
    """
    Takes note in ``visited`` of the lines of :data:`MODULES` that order streams, and
    leaves out the calls of one site.
    """

    def __init__(self, without: Site | None):
        self.visited: set[tuple[str, int]] = set()  # files and lines
        self._files = {inspect.getsourcefile(module) for module in MODULES}
        self._without = without

    def comes_to_call(self) -> bool:
        """Says whether the call that orders streams now is made."""
        frame: FrameType | None = sys._getframe(1)
        is_made = True
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._files:
                self.visited.add(line := (file, frame.f_lineno))
                if self._without is not None:
                    is_made &= not self._without.is_at(line)
            elif file not in CHECKERS and file != contextlib.__file__:
                break
            frame = frame.f_back
        return is_made


# Lines #

_PACKAGE_DIR = str(Path(fsdp_package.__file__).parent)
_TORCH_DIR = str(Path(torch.__file__).parent)
# Files that look on, whose lines tell nothing
CHECKERS = {__file__}


@functools.cache
def _is_worth_telling(file: str) -> bool:
    is_torch = file.startswith((_TORCH_DIR, "<")) or "importlib" in file
    return file.startswith(_PACKAGE_DIR) or not (is_torch or file in CHECKERS)


def caller_line() -> tuple[str, int, str]:
    """
    Returns the innermost line of ``fully_shard`` or of what is not torch: in
    backward that is a hook's line or the call of backward.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if _is_worth_telling(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "unknown", 0, ""
