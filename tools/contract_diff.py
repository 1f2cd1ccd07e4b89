#!/usr/bin/env python3
"""Shows what another release means for the files that this branch replaces.

    .venv/bin/python tools/contract_diff.py build/OLD/base build/NEW/base

Each is a folder that holds a torch/, of which nothing is imported.
*Replaced* are the files in whose place ours stand, *beside* are the release's own in
the same folders.  It tells

    which of these files differ, and by how many lines;
    which definitions in them are new, gone or changed, and whether ours have them;
    what the rest of NEW's torch may use of the replaced files, and ours do not provide.

What the code of a function newly does is in the diff itself, which the first section
names.  Whether NEW has what ours use of it is up to the type checker: `make lint`.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.releases import files_under  # noqa: E402


try:
    import griffe
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first, then .venv/bin/python")

Item = griffe.Object | griffe.Alias


def read(folder: Path, file: str) -> dict[str, Item | None]:
    """Returns what a file has: ``f``, ``C``, ``C.method`` and ``C.attribute``.

    None stands for an attribute that only a method sets.
    """
    path = folder / file
    text = path.read_text() if path.is_file() else ""
    found: dict[str, Item | None] = {}
    found |= griffe.visit(file.removesuffix(".py"), filepath=path, code=text).members
    for node in ast.walk(ast.parse(text)):
        owner = found.get(node.name) if isinstance(node, ast.ClassDef) else None
        if isinstance(owner, griffe.Class):
            set_there = {
                each.attr: None
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            }
            members = set_there | owner.members
            found |= {f"{owner.name}.{name}": item for name, item in members.items()}
    return found


def definitions(folder: Path, file: str) -> dict[str, Item | None]:
    """Returns what a file has but for what it imports."""
    found = read(folder, file)
    return {name: item for name, item in found.items() if not (item and item.is_alias)}


def shape(item: Item | None) -> str:
    """Returns how something is called or set; annotations alone do not matter."""
    if isinstance(item, griffe.Function):
        kinds = (p.kind.value if p.kind else "" for p in item.parameters)
        names = (f"{p.name}={p.default}" for p in item.parameters)
        return f"({', '.join(f'{n} [{kind}]' for n, kind in zip(names, kinds))})"
    if isinstance(item, griffe.Attribute) and "class-attribute" in item.labels:
        return f": {item.annotation} = {item.value}"
    return " ".join(sorted(item.labels & {"property", "writable"})) if item else ""


def shown(name: str, item: Item | None) -> str:
    if isinstance(item, griffe.Function):
        return f"{name.rpartition('.')[0]}.{item.signature()}".lstrip(".")
    return f"{name} {shape(item)}".strip()


@dataclass(frozen=True)
class Contract:
    """Two releases, and our files by path in them."""

    old: Path
    new: Path
    ours: Path
    own: set[str]

    @property
    def folders(self) -> list[str]:
        return sorted({str(PurePosixPath(file).parent) for file in self.replaced})

    @property
    def replaced(self) -> list[str]:
        sides = self.old, self.new
        return sorted(f for f in self.own if any((s / f).is_file() for s in sides))

    @property
    def near(self) -> list[str]:
        """The replaced files, and those beside them."""
        return sorted(
            f"{folder}/{path.name}"
            for folder in self.folders
            for path in {
                path.name: path
                for side in (self.old, self.new)
                for path in (side / folder).glob("*.py")
            }.values()
        )

    def provided(self) -> set[str]:
        """Returns what our files have, and each class from those that it extends."""
        found: dict[str, Item | None] = {}
        for file in sorted(self.own):
            found |= read(self.ours, file)
        names = {*found}
        for owner in [c for c in found.values() if isinstance(c, griffe.Class)]:
            line = [owner.name]
            for each in line:  # grows by what they extend
                base = found.get(each)
                if isinstance(base, griffe.Class):
                    more = (str(b).rpartition(".")[2] for b in base.bases)
                    line += [name for name in more if name not in line]
                own = (n.partition(".") for n in found if n.startswith(f"{each}."))
                names |= {f"{owner.name}.{member}" for _, _, member in own}
        return names


def changed_files(contract: Contract) -> Iterator[str]:
    for folder in contract.folders:
        sides = [str(side / folder) for side in (contract.old, contract.new)]
        command = ["git", "diff", "--no-index", "--function-context", *sides]
        yield " ".join(command)
        command[3:4] = ["--stat=100"]
        done = subprocess.run(command, capture_output=True, text=True)
        yield from done.stdout.replace(f"{sides[0]} => ", "").splitlines()


def changed_definitions(contract: Contract) -> Iterator[str]:
    provided = contract.provided()
    for file in contract.near:
        old, new = (definitions(s, file) for s in (contract.old, contract.new))
        for name in sorted(old.keys() | new.keys()):
            if name not in old:
                mark = beside_or_ours(file, name, contract, provided)
                yield f"+ {shown(name, new[name])}: {mark}"
            elif name not in new:
                yield f"- {name} is gone"
            elif shape(old[name]) != shape(new[name]):
                yield f"- {shown(name, old[name])}\n  + {shown(name, new[name])}"


def beside_or_ours(file: str, name: str, contract: Contract, provided: set[str]) -> str:
    if file not in contract.own:
        return "beside ours"
    return "ours have it" if name in provided else "OURS LACK IT"


def lacking(contract: Contract) -> Iterator[str]:
    """What ours do not provide, though others mention a name like that.

    An attribute counts although other classes have one of that name, too: which object
    it is of, the text does not tell.
    """
    provided = contract.provided()
    texts = {
        path.relative_to(contract.new).as_posix(): path.read_text()
        for path in sorted((contract.new / "torch").rglob("*.py"))
    }
    users = {
        file: {*re.findall(r"\w+", text)}
        for file, text in texts.items()
        if "fsdp" in text and file not in contract.own
    }
    for file in contract.replaced:
        for name in sorted(definitions(contract.new, file).keys() - provided):
            last = name.rpartition(".")[2]
            if not last.startswith("__"):
                where = [user for user, words in users.items() if last in words]
                if where:
                    yield f"{name}: mentioned in {', '.join(where)}"


SECTIONS = {
    "Files": changed_files,
    "Definitions": changed_definitions,
    "Names that ours do not provide": lacking,
}


def main(arguments: Iterable[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parsed = parser.parse_args([*arguments])
    for folder in (parsed.old, parsed.new):
        if not (folder / "torch/__init__.py").is_file():
            print(f"error: {folder} does not hold torch/__init__.py", file=sys.stderr)
            return 1
    own = {file for file in files_under(root, "torch") if file.endswith(".py")}
    contract = Contract(parsed.old, parsed.new, root, own)
    for title, section in SECTIONS.items():
        lines = [line for text in section(contract) for line in text.split("\n")]
        print(title, *(lines or ["none"]), sep="\n  ", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
