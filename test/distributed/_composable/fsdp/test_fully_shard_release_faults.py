# Owner(s): ["oncall: distributed"]

"""
Faults of the release that lie outside of this branch's files, shown on the release.
Uniform units have them all. If a test fails, a release has mended that fault: then update
docs/parity.md.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fsdp_common.utils import DeviceFreeTest, REPO_ROOT, run_python

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
    StateDictOptions,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = 4
SHOW = "--show"


def stepped(module: Any, **kwargs: Any) -> Any:
    """Returns the module, sharded, with gradients."""
    fully_shard(module, **kwargs)
    module(torch.ones(2, module.in_features)).sum().backward()
    return module


def params_of(module: Any) -> list[nn.Parameter]:
    return [*stepped(module).parameters()]


def views_out_of_bounds() -> None:
    """`Shard(1)`, and a number for `reshard_after_forward` that dim 0 does not divide by"""
    linear = nn.Linear(8, 3, bias=False)
    stepped(linear, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(1))


def forgets_requires_grad() -> None:
    """`requires_grad_(True)` on an unsharded parameter, and the next unshard"""
    linear: Any = nn.Linear(4, 4)
    linear.weight.requires_grad_(False)
    fully_shard(linear)
    linear.unshard()
    linear.weight.requires_grad_(True)
    linear.reshard()
    linear.unshard()
    assert linear.weight.requires_grad, "requires no gradient"


def counts_as_initialized() -> None:
    """a first forward on the meta device, then `to_empty`, and another"""
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    fully_shard(linear)
    assert error_of(lambda: linear(torch.ones(1, 4)))
    linear.to_empty(device="cpu")
    linear(torch.ones(1, 4))


def adafactor() -> None:
    """`torch.optim.Adafactor` over sharded parameters"""
    torch.optim.Adafactor(params_of(nn.Linear(4, 4))).step()


def fused_sgd() -> None:
    """`torch.optim.SGD(..., fused=True)` over sharded parameters"""
    torch.optim.SGD(params_of(nn.Linear(4, 4)), fused=True).step()


def norm_of_nothing() -> None:
    """`clip_grad_norm_` with `norm_type=math.inf`, on a rank that has no row"""
    nn.utils.clip_grad_norm_(params_of(nn.Linear(4, 1)), 1.0, norm_type=math.inf)


def replaces_what_it_is_given() -> None:
    """`set_model_state_dict` with `broadcast_from_rank0`, and the dict after it"""
    linear = nn.Linear(4, 4)
    fully_shard(linear)
    given: dict[str, Any] = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(linear, given, options=options)
    types = {type(value).__name__ for value in given.values()}
    assert types == {"Tensor"}, f"now holds {types}"


# With how the error begins
FAULTS: dict[Callable[[], None], str] = {
    views_out_of_bounds: "IndexError: list index out of range",
    forgets_requires_grad: "AssertionError: requires no gradient",
    counts_as_initialized: "AttributeError: 'FSDPParam' object has no attribute",
    adafactor: "RuntimeError: aten.pow_.Scalar",
    fused_sgd: "NotImplementedError: Operator aten._fused_sgd_.default",
    norm_of_nothing: "RuntimeError: _foreach_norm",
    replaces_what_it_is_given: "AssertionError: now holds {'DTensor'}",
}
BY_NAME = {fault.__name__: fault for fault in FAULTS}


def error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def show() -> None:
    warnings.simplefilter("ignore")
    errors = {}
    for name, fault in BY_NAME.items():
        # The last rank has no part of a small parameter
        rank = 0 if fault is replaces_what_it_is_given else RANKS - 1
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        errors[name] = error_of(fault)
        dist.destroy_process_group()
    print(json.dumps(errors))


@functools.cache
def shown_by_release() -> dict[str, str]:
    return json.loads(run_python(__file__, SHOW, on_release=True))


class TestReleaseFaults(DeviceFreeTest):
    @parametrize("name", list(BY_NAME))
    def test_is_there(self, name: str) -> None:
        expected = FAULTS[BY_NAME[name]]
        self.assertEqual(shown_by_release()[name][: len(expected)], expected)

    def test_pages_tell_of_it(self) -> None:
        pages = (REPO_ROOT / "docs").rglob("*.*")
        text = " ".join("".join(page.read_text() for page in pages).split())
        for fault in FAULTS:
            for name in re.findall(r"`([^`]+)`", fault.__doc__ or ""):
                self.assertIn(name.split(".")[-1], text, fault.__name__)


instantiate_parametrized_tests(TestReleaseFaults)


if __name__ == "__main__":
    if SHOW in sys.argv:
        show()
    else:
        run_tests()
