#!/usr/bin/env python3
"""Shows what a change of base means for the branch: the contract of two releases.

    python3 tools/contract_diff.py OLD NEW

OLD and NEW are wheels, or folders that hold torch/: build/base, site-packages, a
source checkout.  Nothing is imported; the sources are read.  *Replaced* are the files
of the base in whose place ours stand, *beside* are the base's own in the same folders.
It tells

    which of these files are not the same, and what in them is new, gone or changed;
    what the functions whose code is another newly touch, and what no longer;
    which names that ours use of the base are gone or have another signature, or are
    properties that can no longer be set;
    which names that the rest of torch uses of the replaced files are new or gone,
    and whether ours have them;
    which names of elsewhere the replaced files newly use, and whether ours do: what
    there may be to do that ours leave out;
    which methods beside ours, that the replaced files use, have other code;
    which attributes of objects the files beside ours newly use;
    which public names, of both kinds of files, are new, gone or changed;
    which names torch's packages newly export from there;
    which fields of dataclasses, named tuples and enums are new, gone or changed;
    which operators are registered otherwise, in Python or in C++;
    which errors are raised that were not, or no longer.

A name is found by its text: what is put together at run time is not seen, and an
attribute is anybody's who has one of that name.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import sys
import textwrap
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.contract_sources import (  # noqa: E402
    classes,
    definitions,
    everybodys,
    find,
    imported,
    inherited,
    is_foreign,
    module_name,
    namespaces,
    parts,
    PROPERTY,
    raised,
    Record,
    records,
    Release,
    schemas,
    Uses,
    uses_of,
)
from tools.setup_helpers import tree  # noqa: E402
from tools.setup_helpers.report import explain, SetupError  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True)
class Contract:
    """The two releases, and our files between them."""

    old: Release
    new: Release
    ours: dict[str, str]
    """Source by path, of our Python files under torch/."""

    @property
    def releases(self) -> tuple[Release, Release]:
        return self.old, self.new

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

    @property
    def near(self) -> tuple[str, ...]:
        return (*self.replaced, *self.beside)

    @functools.cached_property
    def our_modules(self) -> dict[str, ast.Module]:
        return {file: ast.parse(text) for file, text in self.ours.items()}

    @functools.cached_property
    def our_members(self) -> dict[str, set[str]]:
        """What our classes have, with what they inherit from others of ours."""
        parsed = self.our_modules.values()
        known = {k: v for module in parsed for k, v in classes(module).items()}
        return {name: inherited(name, known) for name in known}

    @functools.cached_property
    def our_uses(self) -> Uses:
        parsed = self.our_modules.items()
        return _together(uses_of(module, file, self.old) for file, module in parsed)

    def has(self, name: str, file: str) -> str:
        """Says whether our ``file`` has ``name``, defined there or imported."""
        owner, dot, member = name.rpartition(".")
        if dot:
            is_there = member in self.our_members.get(owner, ())
        else:
            module = self.our_modules[file]
            is_there = name in definitions(module) or name in imported(module, file)
        return "ours has it" if is_there else "OURS LACKS IT"


def changed_files(contract: Contract) -> Iterator[str]:
    for file in contract.near:
        old, new = contract.old.text(file), contract.new.text(file)
        if old != new:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0)
            marks = [line[0] for line in lines if line[:3] not in ("---", "+++")]
            kind = "replaced by ours" if file in contract.ours else "beside ours"
            yield f"{file} ({kind}): +{marks.count('+')} -{marks.count('-')}"
            names = [release.definitions(file) for release in contract.releases]
            yield from _wrapped("new", names[1].keys() - names[0].keys())
            yield from _wrapped("gone", names[0].keys() - names[1].keys())
            yield from _other_parts(*(r.parsed(file) for r in contract.releases))


def _other_parts(old: ast.Module, new: ast.Module) -> Iterator[str]:
    for kind in ("code", "types", "documentation"):
        yield from _wrapped(f"other {kind}", _changed(kind, old, new))


def _changed(kind: str, old: ast.Module, new: ast.Module) -> set[str]:
    before, after = (
        {name: getattr(part, kind) for name, part in parts(module).items()}
        for module in (old, new)
    )
    return {n for n in before.keys() & after.keys() if before[n] != after[n]}


def _wrapped(title: str, names: Iterable[str]) -> Iterator[str]:
    """Yields the names of one kind on lines of a readable width, a class's together."""
    by_owner: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        owner, _, member = name.rpartition(".")
        by_owner[owner].append(member)
    for owner, found in by_owner.items():
        start = f"  {title}, {owner}: " if owner else f"  {title}: "
        yield from textwrap.wrap(
            start + ", ".join(found), 96, subsequent_indent="      "
        )


def touched(contract: Contract) -> Iterator[str]:
    """What functions with other code newly touch (+), and what no longer (-)."""
    for file in contract.near:
        modules = [release.parsed(file) for release in contract.releases]
        old, new = (parts(module) for module in modules)
        for name in sorted(_changed("code", *modules)):
            before, after = (side[name].touched - everybodys() for side in (old, new))
            added, dropped = sorted(after - before), sorted(before - after)
            texts = [f"+{text}" for text in added] + [f"-{text}" for text in dropped]
            if texts:
                text = f"{name}: {' '.join(texts)}"
                yield from textwrap.wrap(text, 96, subsequent_indent="    ")


def used_by_ours(contract: Contract) -> Iterator[str]:
    """Names of the base that ours use, where the new release has them otherwise."""
    own_modules = {module_name(file) for file in contract.ours}
    uses = contract.our_uses
    for module, name in sorted(uses.names):
        before = find(contract.old, module, name)
        if before is not None and module not in own_modules:
            after = find(contract.new, module, name)
            yield from difference(f"{module}.{name}", before, after)
    for file in contract.beside:
        old, new = (r.definitions(file) for r in contract.releases)
        for name, before in old.items():
            attribute = name.rpartition(".")[2]
            if "." in name and attribute in uses.attributes:
                after = new.get(name)
                is_set = attribute in uses.stored and after == PROPERTY
                for text in difference(name, before, after):
                    yield text + (": OURS SETS IT" if is_set else "")


def used_by_torch(contract: Contract) -> Iterator[str]:
    """What the rest of torch uses of the replaced files, where that is not the same."""
    sides = [_outside_uses(release, contract) for release in contract.releases]
    for name in sorted(sides[1].keys()):
        before, after = (
            _providers(release, contract.replaced, name)
            for release in contract.releases
        )
        where = ", ".join(sorted(sides[1][name]))
        # Used before, it may have been found elsewhere
        needed = after - before if name in sides[0] else after or before
        for owner, file in sorted(needed):
            yield f"+ {owner}: {contract.has(owner, file)}; used in {where}"
    for name in sorted(sides[0].keys() - sides[1].keys()):
        owners = sorted(_providers(contract.old, contract.replaced, name))
        yield f"- {', '.join(owner for owner, _ in owners) or name}: no longer used"


def _providers(
    release: Release, files: Iterable[str], name: str
) -> set[tuple[str, str]]:
    """Returns what of ``files`` may be meant by ``name``: an attribute, or a module's.

    Each is a definition and its file.
    """
    module, _, last = name.rpartition(".")
    if module:
        return {(last, file) for file in files if module_name(file) == module}
    return {
        (defined, file)
        for file in files
        for defined in release.definitions(file)
        if "." in defined and defined.rpartition(".")[2] == last
    }


def _outside_uses(release: Release, contract: Contract) -> dict[str, set[str]]:
    """Returns names ``module.name`` and attributes, with the files that use them.

    An attribute counts although other classes have one of that name, too: which
    object it is of, the text does not tell.
    """
    modules = {module_name(file) for file in contract.replaced}
    provided = {
        name.rpartition(".")[2]
        for either in contract.releases
        for file in contract.replaced
        for name in either.definitions(file)
        if "." in name
    }
    words = {module.rpartition(".")[2] for module in modules}
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(release.files - contract.ours.keys()):
        text = release.text(file)
        if file not in contract.beside and not any(word in text for word in words):
            continue
        uses = uses_of(release.parsed(file), file, release)
        for module, name in uses.names:
            if module in modules:
                found[f"{module}.{name}"].add(file)
        for attribute in uses.attributes.keys() & provided:
            found[attribute].add(file)
    return found


def duties(contract: Contract) -> Iterator[str]:
    """What the replaced files of the new release newly use of elsewhere."""
    own_modules = {module_name(file) for file in contract.replaced}
    old, new = (uses_of_files(r, contract.replaced) for r in contract.releases)
    ours = contract.our_uses
    for name in sorted(new.names.keys() - old.names.keys()):
        if name[0] not in own_modules and is_foreign(name[0]):
            places = new.names[name], ours.names.get(name)
            yield f"+ {'.'.join(name)}: {_where(*places)}"
    for attribute, owners in _of_elsewhere(contract, contract.new, new, old):
        places = new.attributes[attribute], ours.attributes.get(attribute)
        yield f"+ {owners}: {_where(*places)}"
    for attribute, owners in _of_elsewhere(contract, contract.old, old, new):
        if found := ours.attributes.get(attribute):
            yield f"- {owners}: no longer used; ours use it in {_listed(found)}"


def other_code(contract: Contract) -> Iterator[str]:
    """Methods beside ours that the replaced files call, where their code changed."""
    uses = uses_of_files(contract.new, contract.replaced)
    for file in contract.beside:
        modules = (release.parsed(file) for release in contract.releases)
        for name in sorted(_changed("code", *modules)):
            attribute = name.rpartition(".")[2]
            is_method = "." in name and not attribute.startswith("__")
            if is_method and attribute in uses.attributes:
                found = contract.our_uses.attributes.get(attribute)
                yield f"{name}: {_where(uses.attributes[attribute], found)}"


def _where(places: set[str], ours: set[str] | None) -> str:
    mark = "OURS DO NOT USE IT" if ours is None else f"ours use it in {_listed(ours)}"
    return f"{mark}; used in {_listed(places)}"


def _listed(places: set[str]) -> str:
    first, rest = sorted(places)[:4], len(places) - 4
    more = f" and {rest} more" if rest > 0 else ""
    return (", ".join(first) or "the file itself") + more


def _of_elsewhere(
    contract: Contract, release: Release, uses: Uses, others: Uses
) -> Iterator[tuple[str, str]]:
    """Yields the attributes that only ``uses`` has, and who may be meant by each.

    That is no class of the replaced files, nor what every dict and list has.
    """
    known = everybodys() | {name for _, name in uses.names}
    for attribute in sorted(uses.attributes.keys() - others.attributes.keys() - known):
        beside = _providers(release, contract.beside, attribute)
        if beside or not _providers(release, contract.replaced, attribute):
            owners = ", ".join(sorted(owner for owner, _ in beside))
            yield attribute, owners or f"….{attribute}"


def used_beside(contract: Contract) -> Iterator[str]:
    """What the files beside ours newly need of objects that neither kind defines."""
    old, new = (uses_of_files(r, contract.beside) for r in contract.releases)
    for attribute, owner in _of_elsewhere(contract, contract.new, new, old):
        if owner.startswith("…"):
            yield f"+ {owner}: used in {_listed(new.attributes[attribute])}"


def uses_of_files(release: Release, files: Iterable[str]) -> Uses:
    parsed = {file: release.parsed(file) for file in files}
    return _together(uses_of(module, file, release) for file, module in parsed.items())


def _together(found: Iterable[Uses]) -> Uses:
    everything = Uses()
    for uses in found:
        everything.stored |= uses.stored
        for name, places in uses.names.items():
            everything.names[name] |= places
        for attribute, places in uses.attributes.items():
            everything.attributes[attribute] |= places
    return everything


def public_names(contract: Contract) -> Iterator[str]:
    for file in contract.near:
        old, new = (r.definitions(file) for r in contract.releases)
        for name in sorted(old.keys() | new.keys()):
            is_public = not any(part.startswith("_") for part in name.split("."))
            is_attribute = "." in name and not (old.get(name) or new.get(name))
            if not is_public or is_attribute:
                continue
            if name not in old:
                is_ours = file in contract.ours
                whose = contract.has(name, file) if is_ours else "beside ours"
                yield f"+ {name}{new[name]}: {whose}"
            else:
                yield from difference(name, old[name], new.get(name))


def exports(contract: Contract) -> Iterator[str]:
    """Names that packages bring out of the folders of the replaced files."""
    near = {module_name(file) for file in contract.near}
    old, new = (_exports(release, near) for release in contract.releases)
    for package, name in sorted(old ^ new):
        file = contract.old.module_file(package) or contract.new.module_file(package)
        is_ours = file in contract.ours
        known = f": {contract.has(name, str(file))}" if is_ours else ""
        sign = "+" if (package, name) in new else "-"
        yield f"{sign} {package}.{name}{known}"


def _exports(release: Release, near: set[str]) -> set[tuple[str, str]]:
    words = {module.rpartition(".")[2] for module in near}
    packages = [file for file in release.files if file.endswith("/__init__.py")]
    return {
        (module_name(file), name)
        for file in packages
        if any(word in release.text(file) for word in words)
        for name, source in imported(release.parsed(file), file).items()
        if source in near and not name.startswith("_")
    }


def fields(contract: Contract) -> Iterator[str]:
    for file in contract.near:
        old, new = (records(release.parsed(file)) for release in contract.releases)
        for name in sorted(old.keys() | new.keys()):
            before, after = (
                side.get(name, Record("", {})).fields for side in (old, new)
            )
            kind = (new.get(name) or old[name]).kind
            for added in (field for field in after if field not in before):
                is_ours = file in contract.ours
                full = f"{name}.{added}"
                whose = contract.has(full, file) if is_ours else "beside ours"
                yield f"+ {full}{after[added]} ({kind}): {whose}"
            for known, behind in before.items():
                yield from difference(f"{name}.{known}", behind, after.get(known))
            order = [
                [n for n in s if n in before and n in after] for s in (before, after)
            ]
            if order[0] != order[1]:
                lists = [f"({', '.join(names)})" for names in order]
                yield from difference(name, *lists)


def operators(contract: Contract) -> Iterator[str]:
    ours = contract.our_modules.values()
    own = {schema for module in ours for schema in schemas(module)}
    old, new = (_schemas_in_python(r, contract.near) for r in contract.releases)
    for schema in sorted(old ^ new):
        known = "ours registers it" if schema in own else "ours does not register it"
        yield f"{'-' if schema in old else '+'} {schema}: {known}"
    lacking = [r.path.name for r in contract.releases if not r.libraries]
    if len(lacking) == 1:
        yield f"of C++ nothing is known: {lacking[0]} has no libtorch_cpu"
        return
    needed = [_needed_of_cpp(release, contract.near) for release in contract.releases]
    spaces, names = (first | second for first, second in zip(*needed))
    old, new = (r.operators_in_libraries(spaces, names) for r in contract.releases)
    for name in sorted(old ^ new):
        yield f"{'-' if name in old else '+'} {name}: in C++"


def _schemas_in_python(release: Release, files: Iterable[str]) -> set[str]:
    modules = [release.parsed(file) for file in files]
    return {schema for module in modules for schema in schemas(module)}


def _needed_of_cpp(release: Release, files: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns the namespaces in which the files define operators, and the names of
    those that they call there and do not define.
    """
    modules = [release.parsed(file) for file in files]
    spaces = {space for module in modules for space in namespaces(module)}
    known = {s.partition("(")[0] for s in _schemas_in_python(release, files)}
    called = {
        name
        for module, name in uses_of_files(release, files).names
        if module in {f"torch.ops.{space}" for space in spaces}
    }
    return spaces, called - known


def errors(contract: Contract) -> Iterator[str]:
    old, new = (
        {text for file in contract.near for text in raised(release.parsed(file))}
        for release in contract.releases
    )
    for text in sorted(old ^ new):
        yield f"{'-' if text in old else '+'} {textwrap.shorten(text, 120)}"


def difference(name: str, before: str, after: str | None) -> Iterator[str]:
    if after is None:
        yield f"- {name} is gone"
    elif after != before:
        both = before or " [attribute]", after or " [attribute]"
        yield f"- {name}{both[0]}\n  + {name}{both[1]}"


SECTIONS: dict[str, Callable[[Contract], Iterator[str]]] = {
    "Files that changed: read their diff first": changed_files,
    "What functions with other code newly touch, or no longer": touched,
    "Names that ours use of the base": used_by_ours,
    "Names that the rest of torch uses of the replaced files": used_by_torch,
    "Names of elsewhere that the replaced files newly use": duties,
    "Methods beside ours that have other code, and that the replaced files use": other_code,
    "Attributes that the files beside ours newly use": used_beside,
    "Public names": public_names,
    "Exports": exports,
    "Fields": fields,
    "Operators": operators,
    "Errors": errors,
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
