"""The branch as a stack of commits for upstream: which file belongs to which.

Each commit holds whole files, and trains with what it and those below it brought.  The
package's ``__init__`` grows with them: what it imports from a file that is not there yet
is left out, and what it does with that.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping


SOURCES = "torch/distributed/fsdp/_fully_shard"
TESTS = "test/distributed/_composable/fsdp"
PAGES = "docs/source/notes/fully_shard"
INIT = f"{SOURCES}/__init__.py"


@dataclass(frozen=True)
class Commit:
    """One commit of the stack, and one pull request."""

    title: str
    why: str
    what: str
    sources: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    """Names of test files, and of what they share, without their ending."""
    pages: tuple[str, ...] = ()

    @property
    def test_files(self) -> list[str]:
        return [name for name in self.tests if name.startswith("test_")]

    def message(self) -> str:
        tests = [f"{TESTS}/{name}.py" for name in self.test_files]
        lines = ["python -m pytest", *tests] if tests else ["lintrunner"]
        plan = "Test plan:\n\n    " + " \\\n        ".join(lines)
        return "\n\n".join([self.title, self.why, self.what, plan]) + "\n"


STACK = (
    Commit(
        title="[FSDP2] Shard parameters of several dtypes as one unit",
        why="""fully_shard refuses a module whose trainable parameters have several storage
dtypes (#156784): bf16 weights beside fp32 A_log, norms, routers or adapters.
Upcasting costs memory and bytes, one unit for each dtype costs collectives.""",
        what="""A unit has one all-gather whatever its dtypes: one byte buffer, by dtype and
aligned, into which shards are cast as they are copied. Gradients are reduced in
one bucket for each reduce dtype, with the divide factors of that dtype. HSDP,
put-off all-reduces, offload, extensions and custom collectives work for each.
Uniform units have the buffers, bytes and bits that they had. Plans, views and
registrations are kept between steps, which halves the time on the host.""",
        sources=(
            "_fsdp_release",
            "_fsdp_common",
            "_fsdp_layout",
            "_fsdp_scaling",
            "_fsdp_observers",
            "_fsdp_unit",
            "_fsdp_comms",
            "_fsdp_kept_names",
            "_fsdp_copies",
            "_fsdp_tree",
            "_fsdp_collectives",
            "_fsdp_grads",
            "_fsdp_doors",
            "_fsdp_context",
            "_fsdp_settings",
            "_fsdp_registrations",
            "_fsdp_param_group",
            "_fsdp_state",
            "_fsdp_prefetch",
        ),
        tests=(
            "comm_test_utils",
            "composition_contract",
            "composition_scenarios",
            "features_cases",
            "features_comms",
            "features_extensions",
            "features_memory",
            "features_models",
            "features_order",
            "features_parity",
            "features_refusals",
            "fsdp_happens_before",
            "fsdp_late_device",
            "fsdp_run_both",
            "fsdp_run_ranks",
            "fsdp_test_utils",
            "startup/sitecustomize",
            "late_device_collectives",
            "late_device_memory",
            "late_device_orders",
            "late_device_queues",
            "late_device_races",
            "late_device_ranks",
            "late_device_record",
            "late_device_runs",
            "late_device_schedules",
            "late_device_steps",
            "mixed_dtype_mlp",
            "mixed_dtype_models",
            "mixed_dtype_parity",
            "mixed_dtype_reference",
            "parity_layers",
            "plugins_collectives",
            "plugins_groups",
            "plugins_modules",
            "plugins_runs",
            "plugins_scenarios",
            "plugins_since",
            "release_rules",
            "stream_schedules",
            "test_fully_shard_checkpoint",
            "test_fully_shard_comm",
            "test_fully_shard_composition",
            "test_fully_shard_divide_factors",
            "test_fully_shard_features",
            "test_fully_shard_gather",
            "test_fully_shard_hsdp",
            "test_fully_shard_late_device",
            "test_fully_shard_layout",
            "test_fully_shard_operators",
            "test_fully_shard_optim",
            "test_fully_shard_plugins",
            "test_fully_shard_prefetch",
            "test_fully_shard_reduce",
            "test_fully_shard_since",
            "test_fully_shard_state",
            "test_fully_shard_streams",
        ),
    ),
    Commit(
        title="[FSDP2] Let a policy set the dtypes of single parameters",
        why="""Some parameters of a unit are to compute or reduce in fp32 and the rest in bf16:
routers, norms, state-space parameters. Until now they had to be a unit of their
own, with a policy of its own. And what is sent in bf16 was added in bf16.""",
        what="""MixedPrecisionPolicy has param_dtype_override_fn and reduce_dtype_override_fn,
and by_name makes them from patterns over names. grad_comm_dtype says what gradients
are sent in, to be added in the reduce dtype in one order on any mesh.""",
        sources=("_fsdp_policies", "_fsdp_api"),
        tests=(
            "determinism_rounds",
            "fsdp_growth",
            "fsdp_random_cases",
            "hook_order_scenarios",
            "test_fully_shard_determinism",
            "test_fully_shard_grad_comm",
            "test_fully_shard_growth",
            "test_fully_shard_mixed_dtype",
            "test_fully_shard_overrides",
            "test_fully_shard_policy",
            "test_fully_shard_random",
            "test_fully_shard_undisturbed_hooks",
        ),
    ),
    Commit(
        title="[FSDP2] Find ranks that disagree before they hang",
        why="""Ranks whose units differ in dtypes, or whose gradients are of other parameters,
send buffers of different sizes or contents: a hang, a crash or wrong sums.""",
        what="""Each unit compares 32 bytes over its ranks before its first gather, and before a
reduction with a pattern of gradients that is new. Steady loops compare nothing.
TORCH_FSDP_CHECK_RANKS_AGREE=always compares each time, 0 never.""",
        sources=("_fsdp_agreement",),
        tests=(
            "fsdp_drift",
            "schedule_scenarios",
            "test_fully_shard_agreement",
            "test_fully_shard_drift",
            "test_fully_shard_schedules",
            "test_fully_shard_undisturbed",
            "undisturbed_scenarios",
        ),
    ),
    Commit(
        title="[FSDP2] Say which parameter an error is about",
        why="""An error in a step names a tensor's size or a kernel, not the parameter, and some
settings that cannot work fail long after they were made, or not at all.""",
        what="""Errors keep their kind, and say first which parameter or setting is wrong and what
to do. What is wrong is looked for only after something failed.""",
        sources=("_fsdp_errors",),
        tests=(
            "fsdp_wrong_uses",
            "test_fully_shard_bad_input",
            "test_fully_shard_faults",
            "wrong_uses_gradients",
            "wrong_uses_making",
            "wrong_uses_rows",
            "wrong_uses_settings",
            "wrong_uses_starting",
            "wrong_uses_stepping",
        ),
    ),
    Commit(
        title="[FSDP2] Show how units are laid out",
        why="""With a dtype for each parameter, what a unit sends is no longer plain from its
size.""",
        what="""layout_summary(model) returns, and prints as a table, what each unit stores,
computes and reduces in, and the bytes that this sends. Units also log it.""",
        sources=("_fsdp_summary",),
        tests=("test_fully_shard_summary",),
    ),
    Commit(
        title="[FSDP2] Describe units of several dtypes",
        why="Users choose dtypes for each parameter, and reviewers read how it works.",
        what="""How to choose dtypes and what each costs, what ranks must agree on, which wrong
uses are found, and how the files hang together.""",
        pages=(
            "architecture.md",
            "architecture.svg",
            "per_parameter_precision.md",
            "ranks_that_drift.md",
            "wrong_uses.md",
        ),
    ),
)


def commit_of(path: str) -> int | None:
    """Returns the number of the commit that brings a file, None if none does.

    ``path`` is where the file is here.
    """
    if path == INIT:
        return 0
    name = path.removesuffix(".py")
    source, test = (name.removeprefix(f"{folder}/") for folder in (SOURCES, TESTS))
    for number, commit in enumerate(STACK):
        if source in commit.sources or test in commit.tests:
            return number
    return None


def without_later(text: str, number: int) -> str:
    """Returns the package's ``__init__`` as it is at a commit."""
    later = {name for commit in STACK[number + 1 :] for name in commit.sources}
    # The release has this one, with fewer names
    later.discard("_fsdp_api")
    lines = text.splitlines(keepends=True)
    missing: set[str] = set()
    dropped: set[int] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module in later:
            missing |= {alias.asname or alias.name for alias in node.names}
        elif not names_in(node) & missing:
            continue
        dropped |= {*range(node.lineno - 1, node.end_lineno or node.lineno)}
    return "".join(line for i, line in enumerate(lines) if i not in dropped)


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def as_page(text: str) -> str:
    """Returns a page without links to what stays here, but with their texts."""
    return re.sub(r"\[([^]]+)\]\(\.\./[^)]*\)", r"\1", text)


def files_by_commit(files: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns, for each commit, what it puts where: a path there to a path here.

    ``files`` maps paths of sources and tests here to those in a checkout.
    """
    commits: list[dict[str, str]] = [{} for _ in STACK]
    for path, target in files.items():
        if (number := commit_of(path)) is not None and path != INIT:
            commits[number][target] = path
    for number, commit in enumerate(STACK):
        commits[number] |= {f"{PAGES}/{page}": f"docs/{page}" for page in commit.pages}
    return commits
