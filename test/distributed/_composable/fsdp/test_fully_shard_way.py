# Owner(s): ["oncall: distributed"]
"""
What a warm step of a unit of two parameters passes through in FSDP2's files, which
shall have nothing that a step does not need, and how often it looks for observers. A
condition is an ``if``, a ternary, or an operand after the first of ``and`` or ``or``.
"""

import ast
import functools
import sys
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.utils import FakeGroupTest, shard_blocks

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_observers as observers
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.quick

# At most: conditions, functions, lines, files, crossings
BOUNDS = {
    "unshard": (42, 22, 140, 8, 18),
    "wait_for_unshard": (38, 19, 135, 8, 20),
    "post_backward": (140, 64, 460, 10, 50),
}


class Affine(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.float()) * self.bias


@functools.cache
def functions_of(path: str) -> dict[int, ast.FunctionDef]:
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    lines = [(f, [f.lineno, *(d.lineno for d in f.decorator_list)]) for f in functions]
    return {line: f for f, starts in lines for line in starts}


def weigh(code: CodeType) -> tuple[int, int]:
    """Returns a function's conditions and lines; those of a loop are its function's."""
    function = functions_of(code.co_filename).get(code.co_firstlineno)
    has_docstring = function is not None and ast.get_docstring(function) is not None
    body = [] if function is None else function.body[has_docstring:]
    nodes = [node for statement in body for node in ast.walk(statement)]
    conditions = sum(isinstance(node, (ast.If, ast.IfExp)) for node in nodes)
    conditions += sum(len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp))
    statements = [n for n in nodes if isinstance(n, (ast.stmt, ast.expr))]
    return conditions, len({node.lineno for node in statements})


class TestWay(FakeGroupTest):
    ranks = 4

    @parametrize("name", [*BOUNDS])
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_step_passes_few_functions(self, name: str, dtype: torch.dtype) -> None:
        model = fully_shard(Affine(dtype), mesh=self.mesh)
        x, original = torch.ones(2, 8).requires_grad_(), getattr(FSDPParamGroup, name)
        for _ in range(3):
            model(x).sum().backward()
        entered: list[CodeType] = []
        stack: list[str] = []
        crossings = 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal crossings
            path = frame.f_code.co_filename
            if event not in ("call", "return") or "_fully_shard" not in path:
                return
            if event == "call":
                entered.append(frame.f_code)
                stack.append(path)
            elif stack:
                stack.pop()
            other = stack[-2:-1] if event == "call" else stack[-1:]
            crossings += other not in ([], [path])

        def watched(group: FSDPParamGroup, *args: Any) -> Any:
            sys.setprofile(None if entered else profile)
            try:
                return original(group, *args)
            finally:
                sys.setprofile(None)

        with mock.patch.object(FSDPParamGroup, name, watched):
            model(x).sum().backward()
        conditions, lines = map(sum, zip(*map(weigh, {*entered})))
        files = {code.co_filename for code in entered}
        # Comprehensions are functions before Python 3.12 only
        functions = {code for code in entered if code.co_name != "<listcomp>"}
        actual = conditions, len(functions), lines, len(files), crossings
        within = [n <= most for n, most in zip(actual, BOUNDS[name], strict=True)]
        self.assertTrue(all(within), f"{actual} of at most {BOUNDS[name]}")


class TestObservers(FakeGroupTest):
    """Whether operators are called, and how often that is asked."""

    ranks = 2

    def test_devices_of_vendors_get_operators_also_if_nobody_observes(self) -> None:
        """Backends may have replaced the kernels."""
        devices = map(torch.device, ("cpu", "cuda", "meta"))
        found = {each.type: observers.gets_operators(each) for each in devices}
        self.assertEqual(found, {"cpu": False, "cuda": False, "meta": True})

    def looks(self, run: Any) -> int:
        with mock.patch.object(observers, "look_for_traces") as look:
            run(torch.ones(1, self.ranks))
        return look.call_count

    def test_who_observes_is_asked_once_a_forward(self) -> None:
        # Units in a root that has no parameters
        model = nn.Sequential(*(nn.Linear(self.ranks, self.ranks) for _ in range(5)))
        shard_blocks(model, mesh=self.mesh)(torch.ones(1, self.ranks))
        model.set_is_last_backward(False)  # as in all microbatches but the last
        for _ in range(2):
            self.assertEqual(self.looks(lambda x: model(x).sum().backward()), 1)
        with torch.no_grad():
            for run in (model, model, model[:3]):
                self.assertEqual(self.looks(run), 1)
            self.assertEqual(self.looks(model[3:]), 0)  # the rest of that forward
            self.assertEqual(self.looks(model[:2]), 1)


if __name__ == "__main__":
    run_tests()
