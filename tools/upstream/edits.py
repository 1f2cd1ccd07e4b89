"""What a change of the series is, and how its edits are made to a source file.

An edit names a function or class and finds its place there by an anchor: the first line
of a statement, an expression, a line or the name of a function.  All lines that are not
edited stay as they are, byte for byte.  Nothing is read or written here.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from dataclasses import dataclass
from typing import Literal, TYPE_CHECKING, TypeVar

from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


T = TypeVar("T")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Do = Literal[
    "before",
    "after",
    "replace",
    "remove",
    "expression",
    "function",
    "new function",
    "split",
    "lines",
    "lines before",
    "lines after",
]


@dataclass(frozen=True)
class Edit:
    """One edit of one function, class or module.

    Each edit finds its anchor in what those before it left.  It must be there once:

    - ``before``, ``after``, ``replace`` and ``remove`` are about statements. The anchor
      is a statement's first line without its indentation: of a function with decorators
      that with ``def``.  Statements in nested blocks count, but those in functions and
      classes of the scope do not: these are scopes of their own.  To replace or remove
      several statements of one block, name the first and the last.
    - ``expression`` replaces a part of a statement; the anchor is that part as
      ``ast.unparse`` gives it, or in any other layout.
    - ``function`` replaces the function or class of the scope that is named; ``new
      function`` adds one behind it.
    - ``split`` ends the function of the scope before a statement. The code, which is put
      there, starts with what the function ends with, and ends with the head of another
      function, whose indentation is that of the first.
    - ``lines``, ``lines before`` and ``lines after`` are about what is no statement:
      docstrings, comments, parameters.  The anchor is a line of the scope without its
      indentation, or the first and the last; ``lines`` without code removes them.
    """

    file: str
    scope: str
    """The qualified name of a function or class; empty: the module."""
    do: Do
    anchor: str | tuple[str, str]
    code: str = ""
    """From column 0; one line break at its start and one at its end are ignored."""
    within: str = ""
    """The first line of a statement that the anchor is in, where that is not unique."""
    with_comment: bool = False
    """Whether the comment right above what is replaced or removed goes, too."""


@dataclass(frozen=True)
class Change:
    """One commit of the series, and one pull request."""

    title: str
    message: str
    """Why, what, test plan and host time."""
    edits: tuple[Edit, ...]
    files: tuple[tuple[str, str], ...] = ()
    """Whole files of ours: where they go, and where they are in this repository."""


def apply_edit(source: str, edit: Edit) -> str:
    """Returns ``source`` with one edit made; an error says what is wrong with it."""
    # Not `splitlines`, which knows breaks that the parser does not
    lines = source.split("\n")
    area = scope = _scope(ast.parse(source), edit.scope)
    if edit.within:
        area, _ = _statement(lines, scope, edit.within)
    first, last = (edit.anchor,) * 2 if isinstance(edit.anchor, str) else edit.anchor
    code = textwrap.dedent(edit.code.removeprefix("\n")).removesuffix("\n")
    if edit.do == "expression":
        return _with_expression(lines, area, first, code)
    if edit.do.startswith("lines"):
        start, end = _lines(lines, area, first, last)
    elif edit.do.endswith("function"):
        start, end = _span(_definition(area, first))
    else:
        start, end = _statements(lines, area, first, last)
    line = lines[start]
    if edit.do == "split" and isinstance(scope, ast.stmt):
        line = lines[_span(scope)[0]]
    indent = line[: len(line) - len(line.lstrip())]
    put = textwrap.indent(code, indent).split("\n") if code else []
    if edit.do == "new function":
        put = [""] * (1 if indent else 2) + put
    if edit.do == "before" or edit.with_comment:
        while start > 0 and lines[start - 1].lstrip().startswith("#"):
            start -= 1
    if edit.do in ("before", "split", "lines before"):
        end = start
    elif edit.do in ("after", "lines after", "new function"):
        start = end
    elif not put and not lines[start - 1].strip():
        while end < len(lines) - 1 and not lines[end].strip():
            end += 1
    return _compiled("\n".join([*lines[:start], *put, *lines[end:]]))


def _compiled(source: str) -> str:
    """Returns ``source``, which must still be Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "", "exec", dont_inherit=True)
    except SyntaxError as error:
        what = f"line {error.lineno} would be no Python"
        raise SetupError(f"{what}: {error.msg}") from None
    return source


def _only(found: Iterable[tuple[int, T]], what: str) -> T:
    """Returns the only one of what is found in the lines of these numbers."""
    found = [*found]
    if len(found) != 1:
        if not found:
            raise SetupError(f"{what} is not there")
        numbers = ", ".join(str(number) for number, _ in found)
        times = f"{len(found)} times, in lines {numbers}"
        raise SetupError(f"{what} is there {times}, and must be once")
    return found[0][1]


def _scope(module: ast.Module, name: str) -> ast.AST:
    scope: ast.AST = module
    for part in filter(None, name.split(".")):
        scope = _definition(scope, part)
    return scope


def _definition(scope: ast.AST, name: str) -> Definition:
    found = (node for block in _blocks(scope) for node in block)
    named = ((n.lineno, n) for n in found if isinstance(n, Definition))
    return _only(((i, n) for i, n in named if n.name == name), f"{name!r}")


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields the blocks below ``node``, but those of functions and classes in it."""
    for _, value in ast.iter_fields(node):
        if not isinstance(value, list):
            continue
        if value and isinstance(value[0], ast.stmt):
            yield value
        for child in value:
            kinds = (ast.stmt, ast.excepthandler, ast.match_case)
            if isinstance(child, kinds) and not isinstance(child, Definition):
                yield from _blocks(child)


def _span(node: ast.stmt) -> tuple[int, int]:
    """Returns where the lines of a statement start and end, with its decorators."""
    decorators = node.decorator_list if isinstance(node, Definition) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return first - 1, node.end_lineno or node.lineno


def _statement(
    lines: list[str], area: ast.AST, anchor: str
) -> tuple[ast.stmt, list[ast.stmt]]:
    """Returns the statement whose first line is ``anchor``, and those behind it."""
    found = (
        (node.lineno, (node, block[i + 1 :]))
        for block in _blocks(area)
        for i, node in enumerate(block)
        if _starts_as(lines, node, anchor)
    )
    return _only(found, f"{anchor!r}")


def _starts_as(lines: list[str], node: ast.stmt, anchor: str) -> bool:
    line = lines[node.lineno - 1]
    return line.strip() == anchor and not line[: node.col_offset].strip()


def _statements(
    lines: list[str], area: ast.AST, first: str, last: str
) -> tuple[int, int]:
    """Returns where the lines from one statement to another of its block are."""
    node, behind = _statement(lines, area, first)
    start, end = _span(node)
    if last != first:
        found = ((n.lineno, n) for n in behind if _starts_as(lines, n, last))
        node = _only(found, f"{last!r}, behind {first!r}")
        _, end = _span(node)
    rest = lines[end - 1].encode()[node.end_col_offset or 0 :].decode().strip()
    if rest and not rest.startswith("#"):
        raise SetupError(f"line {end} has more than the end of {last!r}")
    return start, end


def _lines(lines: list[str], area: ast.AST, first: str, last: str) -> tuple[int, int]:
    top, bottom = _span(area) if isinstance(area, ast.stmt) else (0, len(lines))
    found = ((i + 1, i) for i in range(top, bottom) if lines[i].strip() == first)
    start = _only(found, f"{first!r}")
    if last == first:
        return start, start + 1
    found = ((i + 1, i) for i in range(start + 1, bottom) if lines[i].strip() == last)
    return start, _only(found, f"{last!r}, below {first!r}") + 1


def _with_expression(lines: list[str], area: ast.AST, anchor: str, code: str) -> str:
    wanted = ast.unparse(ast.parse(anchor, mode="eval").body)
    found = ((n.lineno, n) for n in _expressions(area) if ast.unparse(n) == wanted)
    node = _only(found, f"{anchor!r}")
    start, end = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    # The parser counts columns in bytes
    before = lines[start].encode()[: node.col_offset].decode()
    after = lines[end].encode()[node.end_col_offset :].decode()
    indent = before[: len(before) - len(before.lstrip())]
    put = before + textwrap.indent(code, indent).removeprefix(indent) + after
    return _compiled("\n".join([*lines[:start], put, *lines[end + 1 :]]))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions below ``node``, but those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        # Where the parts of f-strings are, older parsers do not know
        if not isinstance(child, Definition | ast.JoinedStr):
            yield from _expressions(child)
