#!/usr/bin/env python3
"""Shows what a change of base means for the branch: the contract of two releases.

    python3 tools/contract_diff.py OLD NEW

OLD and NEW are wheels, or folders that hold torch/: build/base, site-packages, a
source checkout.  Nothing is imported; the sources are read.  It tells

    which files that ours replace, or that lie beside them, are not the same;
    which names that ours use of the base are gone or have another signature;
    which names that the rest of torch uses of the replaced files are new or gone,
    and whether ours have them;
    which public signatures of the replaced files changed;
    which operators are registered under another schema.

A name is found by its text: what is put together at run time is not seen.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import functools
import re
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.setup_helpers import tree  # noqa: E402
from tools.setup_helpers.report import explain, SetupError  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# Where the base declares functions that are not written in Python.
_STUBS = {"torch": "torch/_C/_VariableFunctions.pyi"}
_MODULE_FILES = ("{}.py", "{}/__init__.py", "{}.pyi", "{}/__init__.pyi")


class Release:
    """The Python sources of one release: a folder, or a wheel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            files = (path / "torch").rglob("*.py*")
            names = {file.relative_to(path).as_posix() for file in files}
            self._read = lambda name: (path / name).read_bytes()
        elif path.is_file() and zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            names = set(archive.namelist())
            self._read = archive.read
        else:
            raise SetupError(f"{path} is neither a folder nor a wheel")
        self.files = {
            n for n in names if n.startswith("torch/") and n.endswith((".py", ".pyi"))
        }
        if "torch/__init__.py" not in self.files:
            raise SetupError(f"{path} does not hold torch/__init__.py")

    @functools.cache  # noqa: B019  # two of them live as long as the program
    def text(self, file: str) -> str:
        return self._read(file).decode() if file in self.files else ""

    @functools.cache  # noqa: B019
    def parsed(self, file: str) -> ast.Module:
        return ast.parse(self.text(file))

    @functools.cache  # noqa: B019
    def definitions(self, file: str) -> dict[str, str]:
        return definitions(self.parsed(file))

    def module_file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        names = (form.format(stem) for form in _MODULE_FILES)
        return next((name for name in names if name in self.files), None)


def module_name(file: str) -> str:
    parts = PurePosixPath(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_module(node: ast.ImportFrom, file: str) -> str:
    """Returns what a ``from`` import in ``file`` names, dots resolved."""
    if not node.level:
        return node.module or ""
    parents = PurePosixPath(file).parts[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


# Definitions.


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, those below ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from statements(node.body)
            yield from statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns names, kinds and defaults of the parameters, without annotations."""
    bare = copy.deepcopy(node.args)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(bare)})"


def targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign):
        assigned = [node.target]
    else:
        assigned = node.targets if isinstance(node, ast.Assign) else []
    return [t.id for t in assigned if isinstance(t, ast.Name)]


def definitions(module: ast.Module) -> dict[str, str]:
    """Returns what a module defines: ``f``, ``C``, ``C.method``, ``C.attribute``."""
    found: dict[str, str] = {}
    for node in statements(module.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Overloads, in a stub: all of them.
            found[node.name] = found.get(node.name, "") + signature(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ""
            found |= {f"{node.name}.{k}": v for k, v in members(node).items()}
        else:
            found |= dict.fromkeys(targets(node), "")
    return found


def members(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in statements(node.body):
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[item.name] = signature(item)
            for inner in ast.walk(item):
                if isinstance(inner, ast.Attribute) and _is_set_on_self(inner):
                    found.setdefault(inner.attr, "")
        else:
            found |= dict.fromkeys(targets(item), "")
    return found


def _is_set_on_self(node: ast.Attribute) -> bool:
    is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_self and isinstance(node.ctx, ast.Store)


@functools.cache
def find(release: Release, module: str, name: str, depth: int = 8) -> str | None:
    """Returns the signature of ``module.name``, "" where it has none, None if gone."""
    file = release.module_file(module)
    if file is None or not depth:
        return None
    found = release.definitions(file).get(name)
    if found is not None:
        return found
    for node in statements(release.parsed(file).body):
        if isinstance(node, ast.ImportFrom):
            source = imported_module(node, file)
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    wanted = name if alias.name == "*" else alias.name
                    found = find(release, source, wanted, depth - 1)
                    if found is not None:
                        return found
        elif isinstance(node, ast.Import):
            if any((a.asname or a.name) == name for a in node.names):
                return ""
    if release.module_file(f"{module}.{name}"):
        return ""
    stub = release.definitions(_STUBS[module]) if module in _STUBS else {}
    return stub.get(name)


# Uses.


@dataclass
class Uses:
    """What a file takes from elsewhere: names of modules, and attributes by name."""

    names: set[tuple[str, str]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def uses_of(source: ast.Module, file: str, release: Release) -> Uses:
    found, aliases = Uses(), {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            module = imported_module(node, file)
            for alias in node.names:
                found.names.add((module, alias.name))
                if release.module_file(f"{module}.{alias.name}"):
                    aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
            module, _, name = ast.unparse(node).rpartition(".")
            top, dot, rest = module.partition(".")
            if top in aliases:
                found.names.add((f"{aliases[top]}{dot}{rest}", name))
    return found


@dataclass(frozen=True)
class Contract:
    """The two releases, and our files between them."""

    old: Release
    new: Release
    ours: dict[str, str]
    """Source by path, of our Python files under torch/."""

    @functools.cached_property
    def replaced(self) -> list[str]:
        both = self.old.files | self.new.files
        return sorted(file for file in self.ours if file in both)

    @functools.cached_property
    def beside(self) -> list[str]:
        """The base's own files in the folders of those that ours replace."""
        folders = {PurePosixPath(file).parent for file in self.replaced}
        both = self.old.files | self.new.files
        return sorted(
            f for f in both - {*self.ours} if PurePosixPath(f).parent in folders
        )

    @functools.cached_property
    def our_definitions(self) -> set[str]:
        parsed = (ast.parse(text) for text in self.ours.values())
        return {name for module in parsed for name in definitions(module)}

    def has(self, name: str) -> str:
        return "ours has it" if name in self.our_definitions else "OURS LACKS IT"


def changed_files(contract: Contract) -> Iterator[str]:
    for file in (*contract.replaced, *contract.beside):
        old, new = contract.old.text(file), contract.new.text(file)
        if old != new:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0)
            marks = [line[0] for line in lines if line[:3] not in ("---", "+++")]
            kind = "replaced by ours" if file in contract.ours else "beside ours"
            yield f"{file} ({kind}): +{marks.count('+')} -{marks.count('-')}"


def used_by_ours(contract: Contract) -> Iterator[str]:
    """Names of the base that ours use, where the new release has them otherwise."""
    own_modules = {module_name(file) for file in contract.ours}
    attributes: set[str] = set()
    names: set[tuple[str, str]] = set()
    for file, text in contract.ours.items():
        uses = uses_of(ast.parse(text), file, contract.old)
        attributes |= uses.attributes
        names |= {use for use in uses.names if use[0] not in own_modules}
    for module, name in sorted(names):
        before = find(contract.old, module, name)
        if before is not None:
            after = find(contract.new, module, name)
            yield from difference(f"{module}.{name}", before, after)
    for file in contract.beside:
        old, new = (r.definitions(file) for r in (contract.old, contract.new))
        for name, before in old.items():
            if "." in name and name.rpartition(".")[2] in attributes:
                yield from difference(name, before, new.get(name))


def used_by_torch(contract: Contract) -> Iterator[str]:
    """What the rest of torch uses of the replaced files, where that is not the same."""
    sides = [_outside_uses(r, contract) for r in (contract.old, contract.new)]
    for name in sorted(sides[1].keys() - sides[0].keys()):
        where = ", ".join(sorted(sides[1][name]))
        yield f"+ {name}: {contract.has(name)}; used in {where}"
    for name in sorted(sides[0].keys() - sides[1].keys()):
        yield f"- {name}: no longer used"


def _outside_uses(release: Release, contract: Contract) -> dict[str, set[str]]:
    modules = {module_name(file) for file in contract.replaced}
    provided: dict[str, str] = {}
    for file in contract.replaced:
        for name in release.definitions(file):
            if "." in name:
                provided[name.rpartition(".")[2]] = name
    words = re.compile("|".join(rf"\b{m.rpartition('.')[2]}\b" for m in modules))
    found: dict[str, set[str]] = {}
    for file in sorted(release.files - contract.ours.keys()):
        near = file in contract.beside
        if not near and not words.search(release.text(file)):
            continue
        uses = uses_of(release.parsed(file), file, release)
        taken = {name for module, name in uses.names if module in modules}
        own = {n.rpartition(".")[2] for n in release.definitions(file)}
        taken |= {provided[a] for a in uses.attributes & provided.keys() - own}
        for name in taken:
            found.setdefault(name, set()).add(file)
    return found


def signatures(contract: Contract) -> Iterator[str]:
    for file in contract.replaced:
        old, new = (r.definitions(file) for r in (contract.old, contract.new))
        for name in sorted(old.keys() | new.keys()):
            is_public = not any(part.startswith("_") for part in name.split("."))
            if not is_public or ("." in name and not (old | new)[name]):
                continue
            if name not in old:
                yield f"+ {name}{new[name]}: {contract.has(name)}"
            else:
                yield from difference(name, old[name], new.get(name))


def operators(contract: Contract) -> Iterator[str]:
    files = (*contract.replaced, *contract.beside)
    old, new = (
        {schema for file in files for schema in schemas(release.parsed(file))}
        for release in (contract.old, contract.new)
    )
    own = {s for text in contract.ours.values() for s in schemas(ast.parse(text))}
    for schema in sorted(old ^ new):
        known = "ours registers it" if schema in own else "ours does not register it"
        yield f"{'-' if schema in old else '+'} {schema}: {known}"


def schemas(module: ast.Module) -> Iterator[str]:
    """Yields the schemas that ``Library.define`` is given, written in one way."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "define" and isinstance(node.args[0], ast.Constant):
                text = " ".join(str(node.args[0].value).split())
                yield re.sub(r",? \)", ")", text.replace("( ", "("))


def difference(name: str, before: str, after: str | None) -> Iterator[str]:
    if after is None:
        yield f"- {name} is gone"
    elif after != before:
        yield f"- {name}{before}\n  + {name}{after}"


SECTIONS = {
    "Files that changed: read their diff first": changed_files,
    "Names that ours use of the base": used_by_ours,
    "Names that the rest of torch uses of the replaced files": used_by_torch,
    "Public signatures of the replaced files": signatures,
    "Operators": operators,
}


def our_files(root: Path) -> dict[str, str]:
    tracked = tree.tracked_files(root) if tree.has_git(root) else set()
    own = tree.own_files(root, tracked)
    names = sorted(n for n in own if n.startswith("torch/") and n.endswith(".py"))
    return {name: (root / name).read_text() for name in names}


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Returns 0 also where there are differences; an error is one line, and 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the present base")
    parser.add_argument("new", type=Path, help="the one to come")
    parsed = parser.parse_args(arguments)
    try:
        contract = Contract(Release(parsed.old), Release(parsed.new), our_files(root))
        for title, section in SECTIONS.items():
            lines = list(section(contract))
            print(f"{title}\n" + "".join(f"  {line}\n" for line in lines or ["none"]))
    except (SetupError, OSError, SyntaxError, zipfile.BadZipFile) as error:
        text = explain(error) if isinstance(error, OSError) else str(error)
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
