"""
Where a program stands: its calls that order streams, so that one of them can be left
out, and the line that issues what is looked at.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed.fsdp._fully_shard as fsdp_package
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_context,
    _fsdp_grads,
    _fsdp_param_group,
    _fsdp_reduce,
)


# Calls that order streams #

MODULES = (
    _fsdp_collectives,
    _fsdp_context,
    _fsdp_grads,
    _fsdp_param_group,
    _fsdp_reduce,
)

# Methods of streams, events and works, and the handle's context
_ORDERING_METHODS = frozenset(
    ("wait_stream", "wait_event", "wait", "synchronize", "record_event", "record")
    + ("stream",)
)
# Functions that only wait, by the names that their modules give them
_WAITING_HELPER = re.compile(
    r"_(wait|order|drop)_|wait_(all_gather_streams|current_stream)"
)


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
    leaves out the calls of some sites.
    """

    def __init__(self, without: Sequence[Site]):
        self.visited: set[tuple[str, int]] = set()  # files and lines
        self._files = {inspect.getsourcefile(module) for module in MODULES}
        self._without = without

    def comes_to_call(self) -> bool:
        """Says whether the call that orders streams now is made."""
        is_made = True
        for frame, number in traceback.walk_stack(sys._getframe(1)):
            line = frame.f_code.co_filename, number
            if line[0] in self._files:
                self.visited.add(line)
                is_made &= not any(site.is_at(line) for site in self._without)
        return is_made


# Lines #

_PACKAGE_DIR = str(Path(fsdp_package.__file__).parent)
_TORCH_DIR = str(Path(torch.__file__).parent)
# Files that look on, whose lines tell nothing
_CHECKERS = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("devices", "operators", "record", "sites")
)


@functools.cache
def _is_worth_telling(file: str) -> bool:
    is_other = file.startswith((_TORCH_DIR, "<", *_CHECKERS)) or "importlib" in file
    return file.startswith(_PACKAGE_DIR) or not is_other


def caller_line() -> tuple[str, int, str]:
    """
    Returns the innermost line of ``fully_shard`` or of what is not torch: in
    backward that is a hook's line or the call of backward.
    """
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        if _is_worth_telling(frame.f_code.co_filename):
            return frame.f_code.co_filename, number, frame.f_code.co_name
    return "unknown", 0, ""
