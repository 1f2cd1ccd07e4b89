# Owner(s): ["oncall: distributed"]

"""
Faults of the release that lie outside of this branch's files, shown on the release.
Uniform units have them all. If a test fails, a release has mended that fault: then update
docs/parity.md.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fsdp_common.utils import DeviceFreeTest, run_python

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


def params_of(module: Any, **kwargs: Any) -> list[nn.Parameter]:
    """Returns sharded parameters with gradients."""
    fully_shard(module, **kwargs)
    module(torch.ones(2, module.in_features)).sum().backward()
    return [*module.parameters()]


# Each fault with how its error begins


def views_out_of_bounds() -> None:
    """IndexError: list index out of range"""
    linear = nn.Linear(8, 3, bias=False)
    params_of(linear, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(1))


def forgets_requires_grad() -> None:
    """AssertionError: requires no gradient"""
    linear: Any = nn.Linear(4, 4)
    linear.weight.requires_grad_(False)
    fully_shard(linear)
    linear.unshard()
    linear.weight.requires_grad_(True)
    linear.reshard()
    linear.unshard()
    assert linear.weight.requires_grad, "requires no gradient"


def counts_as_initialized() -> None:
    """AttributeError: 'FSDPParam' object has no attribute"""
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    fully_shard(linear)
    assert error_of(lambda: linear(torch.ones(1, 4)))
    linear.to_empty(device="cpu")
    linear(torch.ones(1, 4))


def adafactor() -> None:
    """RuntimeError: aten.pow_.Scalar"""
    torch.optim.Adafactor(params_of(nn.Linear(4, 4))).step()


def fused_sgd() -> None:
    """NotImplementedError: Operator aten._fused_sgd_.default"""
    torch.optim.SGD(params_of(nn.Linear(4, 4)), fused=True).step()


def norm_of_no_row() -> None:
    """RuntimeError: _foreach_norm"""
    nn.utils.clip_grad_norm_(params_of(nn.Linear(4, 1)), 1.0, norm_type=math.inf)


def replaces_what_it_is_given() -> None:
    """AssertionError: now holds {'DTensor'}"""
    linear = nn.Linear(4, 4)
    fully_shard(linear)
    given: dict[str, Any] = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(linear, given, options=options)
    types = {type(value).__name__ for value in given.values()}
    assert types == {"Tensor"}, f"now holds {types}"


# By the rank: the last one has no part of a small parameter
FAULTS: dict[Callable[[], None], int] = {
    views_out_of_bounds: RANKS - 1,
    forgets_requires_grad: 0,
    counts_as_initialized: 0,
    adafactor: 0,
    fused_sgd: 0,
    norm_of_no_row: RANKS - 1,
    replaces_what_it_is_given: 0,
}


def error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def show() -> None:
    warnings.simplefilter("ignore")
    for fault, rank in FAULTS.items():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        print(json.dumps(error_of(fault)))
        dist.destroy_process_group()


class TestReleaseFaults(DeviceFreeTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.shown = run_python(__file__, SHOW, on_release=True).splitlines()

    @parametrize("index", range(len(FAULTS)), lambda index: [*FAULTS][index].__name__)
    def test_is_there(self, index: int) -> None:
        expected = [*FAULTS][index].__doc__
        self.assertEqual(json.loads(self.shown[index])[: len(expected)], expected)


instantiate_parametrized_tests(TestReleaseFaults)


if __name__ == "__main__":
    if SHOW in sys.argv:
        show()
    else:
        run_tests()
