"""
What the pages take from the code: cog runs these functions, and writes what they return.

    .venv/bin/cog -r -I docs docs/*.md         after a change of what they read
    .venv/bin/cog --check -I docs docs/*.md    what the tests do
"""

import ast
import dataclasses
import graphlib
import inspect
import operator
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path


DOCS = Path(__file__).resolve().parent
SOURCES = DOCS.parent / "torch/distributed/fsdp/_fully_shard"


def imports_of(file: Path) -> set[str]:
    """Returns which files beside it a file imports from, also in a function."""
    names: set[str] = set()
    tree = ast.parse(file.read_text())
    # Only types refer to what imports the file
    tree.body = [node for node in tree.body if not is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.name for alias in node.names}
            names.add(getattr(node, "module", None) or "")
    stems = {path.stem for path in file.parent.glob("*.py")}
    return {name.split(".")[-1] for name in names} & (stems - {file.stem})


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def layers(folder: Path = SOURCES) -> list[str]:
    """
    Returns all files, each before those that it imports from. Raises
    ``graphlib.CycleError`` where files import from one another.
    """
    imports = {path.stem: imports_of(path) for path in sorted(folder.glob("*.py"))}
    height: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(imports).static_order():
        height[name] = 1 + max((height[below] for below in imports[name]), default=0)
    return sorted(height, key=lambda name: (-height[name], name))


def files() -> str:
    """Returns a table of the files, with the first paragraph of their docstrings."""
    rows = []
    for name in layers():
        text = ast.get_docstring(ast.parse((SOURCES / f"{name}.py").read_text()))
        rows.append((f"`{name}.py`", plain((text or "").split("\n\n")[0])))
    return table(("file", "what it does"), rows)


def recipes() -> str:
    """Returns a list of the programs, by the first lines of their docstrings."""
    lines = []
    for path in sorted((DOCS / "recipes").glob("*.py")):
        title = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        lines.append(f"- [{title}](recipes/{path.name})")
    return "\n".join(lines)


def functions() -> str:
    """Returns each new function: its call, what it does, and the values it is called with."""
    import torch.distributed.fsdp as fsdp

    added = ["MixedPrecisionPolicy.by_name", "set_backward_prefetch"]
    added += ["set_coalesced_collectives", "set_reduce_bucket_cap", "layout_summary"]
    parts = []
    for name in added:
        function = operator.attrgetter(name)(fsdp)
        signature = inspect.signature(function)
        given = signature.parameters.values()
        bare = [each.replace(annotation=signature.empty) for each in given]
        call = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
        text = inspect.getdoc(function) or ""
        values = re.search(r"\(BackwardPrefetch, \w+\): (.+?)\n    \w", text, re.S)
        first = first_sentence(text) + (f" {plain(values[1])}" if values else "")
        code = "\n".join(textwrap.wrap(call, 84, subsequent_indent="    "))
        body = textwrap.fill(first, 88)
        parts.append(f"### `{name}`\n\n```\n{code}\n```\n\n{body}")
    return "\n\n".join(parts)


def fields() -> str:
    """Returns a table of the policy's fields, by the first sentences of their descriptions."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    text = (inspect.getdoc(MixedPrecisionPolicy) or "").split("Attributes:\n")[1]
    text = text.split("\nRaises:")[0]
    found = re.findall(r"^    (\w+) \(.*?\): (.+?)(?=^    \w|\Z)", text, re.M | re.S)
    described = {name: first_sentence(rest) for name, rest in found}
    rows = [
        (f"`{field.name}`", f"`{field.default}`", described[field.name])
        for field in dataclasses.fields(MixedPrecisionPolicy)
    ]
    return table(("field", "default", "meaning"), rows)


def summary() -> str:
    """Returns what is printed of a mixed unit over two ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.Linear(72, 64, bias=False), nn.RMSNorm(24)
    )
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy.by_name(
        model, {"2.*": fp32}, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        lines = str(layout_summary(model)).splitlines()
    finally:
        dist.destroy_process_group()
    return "\n".join(("```", *(line.rstrip() for line in lines), "```"))


def summary_fields() -> str:
    """Returns a table of what ``layout_summary`` has."""
    from torch.distributed.fsdp._fully_shard import _fsdp_summary

    rows = []
    for kind in ("LayoutSummary", "LayoutRow"):
        cls = getattr(_fsdp_summary, kind)
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(cls))
        rows.append((f"`{kind}`", plain(inspect.getdoc(cls) or ""), names))
    return table(("class", "is", "fields"), rows)


def first_sentence(text: str) -> str:
    return plain(text.split("\n\n")[0]).split(". ")[0].rstrip(".:") + "."


def plain(text: str) -> str:
    """Returns a paragraph of reStructuredText as one line of Markdown."""
    text = re.sub(r":mod:`(\w+)`", r"`\1.py`", " ".join(text.split()))
    return re.sub(r"(?::\w+:)?(`+)(.+?)\1", r"`\2`", text)


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
