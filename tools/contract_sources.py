"""What the files of one release say, read and not imported: names, uses, operators."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import re
import sys
import zipfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO


# Where the base declares functions that are not written in Python.
_STUBS = {"torch": "torch/_C/_VariableFunctions.pyi"}
_MODULE_FILES = ("{}.py", "{}/__init__.py", "{}.pyi", "{}/__init__.pyi")
# The ones that register operators in C++. Those of devices only add kernels.
_LIBRARY = re.compile(r"torch/lib/(lib)?torch_(cpu|python)\.(so|dylib|dll)")
_CHUNK_NBYTES = 1 << 24
# No operator's name is longer
_OVERLAP_NBYTES = 1 << 10

PROPERTY = " [property without a setter]"
SETTABLE = " [property with a setter]"


class Release:
    """One release: a folder, or a wheel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: Callable[[str], IO[bytes]]
        if path.is_dir():
            found = [*(path / "torch").rglob("*.py*"), *path.glob("torch/lib/*")]
            names = {file.relative_to(path).as_posix() for file in found}
            self._open = lambda name: (path / name).open("rb")
        elif path.is_file() and zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            names = set(archive.namelist())
            self._open = archive.open
        else:
            raise SetupError(f"{path} is neither a folder nor a wheel")
        self.files = {
            n for n in names if n.startswith("torch/") and n.endswith((".py", ".pyi"))
        }
        self.libraries = sorted(n for n in names if _LIBRARY.fullmatch(n))
        if "torch/__init__.py" not in self.files:
            raise SetupError(f"{path} does not hold torch/__init__.py")

    @functools.cache  # noqa: B019  # two of them live as long as the program
    def text(self, file: str) -> str:
        if file not in self.files:
            return ""
        with self._open(file) as source:
            return source.read().decode()

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

    def operators_in_libraries(self, spaces: set[str], names: set[str]) -> set[str]:
        """Returns the operators of ``spaces``, and which of ``names`` there are.

        Only names are certain: compilers cut a schema that is copied into pieces.
        """
        either = "|".join(f"{space}::" for space in sorted(spaces))
        known = "|".join(sorted(names)) or "(?!)"
        # Behind the byte that ends another string
        form = rf"\0(?:(?:{either})(\w+)(?=\0)|({known})\([\w)*])"
        found: set[str] = set()
        for library in self.libraries if spaces else ():
            with self._open(library) as source:
                kept = b"\0"
                while chunk := source.read(_CHUNK_NBYTES):
                    data = kept + chunk
                    for match in re.finditer(form.encode(), data):
                        found.add((match[1] or match[2]).decode())
                    kept = data[-_OVERLAP_NBYTES:]
        return found


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


def method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns the signature, or how a property may be used."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(mark.endswith(".setter") for mark in marks):
        return SETTABLE
    if any(mark.rpartition(".")[2] == "property" for mark in marks):
        return PROPERTY
    kinds = [mark for mark in marks if mark in ("staticmethod", "classmethod")]
    return signature(node) + "".join(f" [{kind}]" for kind in kinds)


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
            # Overloads, in a stub: all of them. Else the one behind them is called.
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            is_overload = any(mark.endswith("overload") for mark in marks)
            before = found.get(node.name, "") if is_overload else ""
            found[node.name] = before + signature(node)
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
            found[item.name] = method(item)
            for inner in ast.walk(item):
                if isinstance(inner, ast.Attribute) and _is_set_on_self(inner):
                    found.setdefault(inner.attr, "")
        else:
            found |= dict.fromkeys(targets(item), "")
    return found


def _is_set_on_self(node: ast.Attribute) -> bool:
    is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_self and isinstance(node.ctx, ast.Store)


def classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    found = statements(module.body)
    return {node.name: node for node in found if isinstance(node, ast.ClassDef)}


def inherited(name: str, known: dict[str, ast.ClassDef]) -> set[str]:
    """Returns what a class has, with what its bases among the ``known`` have."""
    found: set[str] = set()
    pending = [name]
    while pending:
        if (node := known.get(pending.pop())) is not None:
            found |= members(node).keys()
            pending += [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            known = {k: v for k, v in known.items() if v is not node}
    return found


def imported(module: ast.Module, file: str) -> dict[str, str]:
    """Returns where each name that a module imports by ``from`` comes from."""
    found = statements(module.body)
    return {
        alias.asname or alias.name: imported_module(node, file)
        for node in found
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@dataclass
class Parts:
    """What a function or class is made of, apart from names and defaults."""

    code: list[str] = field(default_factory=list)
    """Of functions alone: what a class holds has names of its own."""
    types: list[str] = field(default_factory=list)
    documentation: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    """The attributes that the code uses, and the functions that it calls."""


def parts(module: ast.Module) -> dict[str, Parts]:
    """Returns functions, classes and methods by name; comments are in none of them."""
    found: defaultdict[str, Parts] = defaultdict(Parts)

    def take(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in statements(body):
            if not isinstance(
                node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ):
                continue
            # Getter and setter have one name, and overloads
            own = found[f"{prefix}{node.name}"]
            text = ast.get_docstring(node)
            own.documentation.append(text or "")
            if isinstance(node, ast.ClassDef):
                take(node.body, f"{prefix}{node.name}.")
            else:
                lines = node.body[text is not None :]
                own.code += [ast.unparse(line) for line in lines]
                own.types += _annotations(node)
                own.touched |= {name for line in lines for name in _touched(line)}

    take(module.body, "")
    return found


def _touched(line: ast.stmt) -> Iterator[str]:
    for node in ast.walk(line):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = (n for n in ast.walk(node.args) if isinstance(n, ast.arg))
    for annotation in (*(a.annotation for a in arguments), node.returns):
        yield "" if annotation is None else ast.unparse(annotation)


@dataclass(frozen=True)
class Record:
    """A class that is made of named fields, in an order that callers rely on."""

    kind: str
    fields: dict[str, str]
    """By name, in order: what stands behind it in the class."""


def records(module: ast.Module) -> dict[str, Record]:
    """Returns the dataclasses, named tuples, typed dicts and enums of a module."""
    found: dict[str, Record] = {}
    for name, node in classes(module).items():
        marks = [
            ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
            for mark in node.decorator_list
        ]
        stems = {text.rpartition(".")[2] for text in marks}
        stems |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        known = ("dataclass", "NamedTuple", "TypedDict", "Enum", "IntEnum", "Flag")
        if kind := next((stem for stem in known if stem in stems), None):
            lines = [item for item in statements(node.body) if targets(item)]
            is_enum = kind in ("Enum", "IntEnum", "Flag")
            found[name] = Record(
                kind,
                {
                    targets(line)[0]: _behind_name(line)
                    for line in lines
                    if is_enum or isinstance(line, ast.AnnAssign)
                },
            )
    return found


def _behind_name(line: ast.stmt) -> str:
    annotation = getattr(line, "annotation", None)
    value = getattr(line, "value", None)
    type_text = f": {ast.unparse(annotation)}" if annotation is not None else ""
    return type_text + (f" = {ast.unparse(value)}" if value is not None else "")


def raised(module: ast.Module) -> Iterator[str]:
    """Yields the errors that a module raises: ``ValueError: text``, on one line."""
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [_text(argument) for argument in node.exc.args[:1]]
            yield f"{ast.unparse(node.exc.func)}: {' '.join(''.join(texts).split())}"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    return "…"


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

Places = defaultdict[str, set[str]]


@dataclass
class Uses:
    """What a file takes from elsewhere, and in which of its functions."""

    names: defaultdict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Of modules, by module and name."""
    attributes: Places = field(default_factory=lambda: defaultdict(set))
    """Of objects, by name; but not what a class of the file finds in itself."""
    stored: set[str] = field(default_factory=set)
    """Attributes that it sets."""


class _Reader(ast.NodeVisitor):
    def __init__(self, source: ast.Module, file: str, release: Release) -> None:
        self.file, self.release, self.found = file, release, Uses()
        self.aliases: dict[str, str] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        self.places: list[str] = []
        known = classes(source)
        self.own = {name: inherited(name, known) for name in known}
        for node in ast.walk(source):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.take_aliases(node)
        self.visit(source)

    @property
    def place(self) -> str:
        # What is in a function's function is in that
        return ".".join(self.places[:2]) or "the file itself"

    def take_aliases(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                top = alias.name.partition(".")[0]
                self.aliases[alias.asname or top] = alias.name if alias.asname else top
            else:
                module = imported_module(node, self.file)
                known = alias.asname or alias.name
                self.imported[known] = module, alias.name
                self.found.names[module, alias.name] = set()
                if self.release.module_file(f"{module}.{alias.name}"):
                    self.aliases[known] = f"{module}.{alias.name}"

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.imported:
            self.found.names[self.imported[node.id]].add(self.place)

    def visit_within(
        self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) -> None:
        for mark in node.decorator_list:
            self.visit(mark)
        self.places.append(node.name)
        for child in ast.iter_child_nodes(node):
            if child not in node.decorator_list:
                self.visit(child)
        self.places.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = visit_within

    def visit_Call(self, node: ast.Call) -> None:
        by_name = ("getattr", "hasattr", "setattr", "delattr")
        if isinstance(node.func, ast.Name) and node.func.id in by_name:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                is_set = node.func.id == "setattr"
                self.take(node.args[0], name.value, is_set)
        elif ast.unparse(node.func).endswith("attrgetter"):
            for path in filter(None, map(_text, node.args)):
                for name in path.split("."):
                    self.found.attributes[name].add(self.place)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.take(node.value, node.attr, isinstance(node.ctx, ast.Store))
        self.generic_visit(node)

    def take(self, holder: ast.expr, name: str, is_set: bool) -> None:
        top, dot, rest = ast.unparse(holder).partition(".")
        # Not what a call or an index returns
        if top in self.aliases and re.fullmatch(r"[\w.]*", rest):
            module = f"{self.aliases[top]}{dot}{rest}"
            self.found.names[module, name].add(self.place)
        own_class = self.places[0] if self.places else ""
        is_own = name in self.own.get(own_class, ())
        if top not in ("self", "cls") or rest or not is_own:
            self.found.attributes[name].add(self.place)
            if is_set:
                self.found.stored.add(name)


def uses_of(source: ast.Module, file: str, release: Release) -> Uses:
    return _Reader(source, file, release).found


def everybodys() -> set[str]:
    """Returns names that say nothing: of Python's own functions, dicts and lists."""
    kinds = (builtins, dict, list, set, str)
    return {name for kind in kinds for name in dir(kind)}


def is_foreign(module: str) -> bool:
    """Whether a module is neither Python's own nor a name that is no module."""
    return module.partition(".")[0] not in {"", *sys.stdlib_module_names}


# Operators.


def schemas(module: ast.Module) -> Iterator[str]:
    """Yields the schemas that ``Library.define`` is given, written in one way.

    ``torch.library.define`` has a name and the rest apart, ``custom_op`` a name only.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [
                a.value
                for a in node.args[:2]
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            if texts and node.func.attr == "define":
                yield in_one_way("".join(texts[: 1 if "(" in texts[0] else 2]))
            elif texts and node.func.attr == "custom_op":
                yield texts[0]


def in_one_way(schema: str) -> str:
    text = " ".join(schema.split())
    return re.sub(r",? \)", ")", text.replace("( ", "("))


def namespaces(module: ast.Module) -> set[str]:
    """Returns the names that a module gives to ``torch.library.Library``."""
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    return {
        str(call.args[0].value)
        for call in calls
        if ast.unparse(call.func).endswith("Library")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
