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


def error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Faults:
    """Each raises the error that begins with its docstring."""

    def views_out_of_bounds() -> None:
        """IndexError: list index out of range"""
        linear, dim_1 = nn.Linear(8, 3, bias=False), lambda _: Shard(1)
        params_of(linear, reshard_after_forward=2, shard_placement_fn=dim_1)

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
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(linear, given, options=options)
        types = {type(value).__name__ for value in given.values()}
        assert types == {"Tensor"}, f"now holds {types}"


FAULTS = {name: fault for name, fault in vars(Faults).items() if name[0] != "_"}


def show() -> None:
    warnings.simplefilter("ignore")
    # Has no part of a small parameter
    store, rank = FakeStore(), RANKS - 1
    dist.init_process_group("fake", store=store, rank=rank, world_size=RANKS)
    print(json.dumps({name: error_of(fault) for name, fault in FAULTS.items()}))


class TestReleaseFaults(DeviceFreeTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.shown = json.loads(run_python(__file__, SHOW, on_release=True))

    @parametrize("name", list(FAULTS))
    def test_is_there(self, name: str) -> None:
        expected = FAULTS[name].__doc__
        self.assertEqual(self.shown[name][: len(expected)], expected)


instantiate_parametrized_tests(TestReleaseFaults)


if __name__ == "__main__":
    if SHOW in sys.argv:
        show()
    else:
        run_tests()
