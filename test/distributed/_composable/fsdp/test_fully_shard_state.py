# Owner(s): ["oncall: distributed"]

"""
What the release's hooks of a unit's modules do around a unit of the branch: how inputs
and outputs are cast, when its parameters are whole, and what is warned of.

In which order units are gathered is in ``test_fully_shard_prefetch.py``, which waits
there are in ``test_fully_shard_streams.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_common.utils import CastLinear, FakeGroupTest

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_utils import run_tests


RANKS, DIM = 2, 4
FP32, BF16 = torch.float32, torch.bfloat16
IN_BF16 = MixedPrecisionPolicy(param_dtype=BF16)
OUT_BF16 = MixedPrecisionPolicy(output_dtype=BF16)


@dataclass
class Batch:
    values: torch.Tensor
    size: int


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


class Given(nn.Module):
    """Keeps what its forward is given, and returns what it is told to."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(RANKS))
        self.result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = args, kwargs
        return self.weight.sum() if self.result is None else self.result


class Failing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


class Part(nn.Sequential):
    """Runs the first of two modules, and that of the two behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[0](x)).float()


class Viewing(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight.sum()).view(2, -1)


class StateTest(FakeGroupTest):
    ranks = RANKS

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (RANKS,))
        self.x = torch.ones(1, DIM)

    def shard(self, module: Any, **kwargs: Any) -> Any:
        return fully_shard(module, mesh=self.mesh, **kwargs)


class TestCasts(StateTest):
    """Floating-point tensors are cast wherever they are, and nothing else is."""

    def arrived(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        model = self.shard(Given(), mp_policy=IN_BF16)
        model(*args, **kwargs)
        return model.given

    def test_flat_inputs_are_cast(self) -> None:
        ids, cast, x = torch.arange(3), self.x.to(BF16), self.x
        args, kwargs = self.arrived(x, ids, None, 3, x=x, ids=ids, y=cast, n="a")
        self.assertEqual((args[0].dtype, kwargs["x"].dtype), (BF16, BF16))
        self.assertTrue(torch.equal(args[0], cast))
        self.assertIs(args[1], ids)
        self.assertEqual(args[2:], (None, 3))
        self.assertEqual([*kwargs], ["x", "ids", "y", "n"])
        self.assertIs(kwargs["ids"], ids)
        self.assertIs(kwargs["y"], cast)
        self.assertEqual(kwargs["n"], "a")

    def test_nested_inputs_are_cast(self) -> None:
        ids, x = torch.arange(3), self.x
        args, kwargs = self.arrived(
            Batch(x, 3), {"x": x, "ids": ids, "n": 2}, pair=Pair(x, None), list=[x, ids]
        )
        batch, by_name = args
        self.assertEqual((type(batch), batch.size), (Batch, 3))
        self.assertEqual((by_name["n"], [*by_name]), (2, ["x", "ids", "n"]))
        pair, (listed, listed_ids) = kwargs["pair"], kwargs["list"]
        self.assertEqual((type(pair), pair.second), (Pair, None))
        for cast in (batch.values, by_name["x"], pair.first, listed):
            self.assertEqual(cast.dtype, BF16)
        for kept in (by_name["ids"], listed_ids):
            self.assertIs(kept, ids)
        self.assertEqual(x.dtype, FP32)

    def test_inputs_are_left_alone_where_the_policy_says_so(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
        model = self.shard(Given(), mp_policy=policy)
        model(self.x, x=[self.x])
        args, kwargs = model.given
        self.assertIs(args[0], self.x)
        self.assertIs(kwargs["x"][0], self.x)

    def test_outputs_are_cast(self) -> None:
        ids, x = torch.arange(3), self.x
        for result, cast, kept in (
            ((x, ids), 0, 1),
            ({"x": x, "ids": ids}, "x", "ids"),
            ([x, ids], 0, 1),
            (Pair(x, ids), 0, 1),
        ):
            output = self.shard(Given(result), mp_policy=OUT_BF16)()
            self.assertIs(type(output), type(result))
            self.assertEqual(output[cast].dtype, BF16)
            self.assertIs(output[kept], ids)


class TestForward(StateTest):
    def test_a_root_of_parameters_keeps_them_for_backward(self) -> None:
        """Unless users have said what is to become of them."""
        for kwargs, is_kept in (({}, True), ({"reshard_after_forward": True}, False)):
            model = self.shard(CastLinear(DIM, DIM), **kwargs)
            model(self.x)
            self.assertEqual(not isinstance(model.weight, DTensor), is_kept)

    def test_hooks_of_users_find_unsharded_parameters(self) -> None:
        """Those that were there before, too."""
        seen: list[bool] = []

        def note(module: nn.Module, *_: Any) -> None:
            seen.append(isinstance(module.weight, DTensor))

        for modules in ([CastLinear(DIM, DIM)], [CastLinear(DIM, DIM) for _ in "ab"]):
            for module in modules:
                module.register_forward_pre_hook(note)
            self.shard(modules)
            self.shard(nn.Sequential(*modules))(self.x)
        self.assertEqual(seen, [False] * 3)

    def test_a_module_that_fails_is_over(self) -> None:
        model = nn.Sequential(CastLinear(DIM, DIM), Failing())
        self.shard([*model])
        with self.assertRaises(ArithmeticError):
            self.shard(model)(self.x)
        self.assertIsInstance(model[0].weight, DTensor)

    def test_units_of_which_a_part_ran_cast_outputs(self) -> None:
        """The module's own, and then the root's: that of the outermost unit holds."""
        model = Part(*(CastLinear(DIM, DIM) for _ in range(4)))
        outputs: list[torch.dtype] = []
        for modules, dtype in ((model[:2], BF16), (model[2:], torch.float16)):
            policy = MixedPrecisionPolicy(output_dtype=dtype)
            self.shard([*modules], mp_policy=policy)
            modules[0].register_forward_hook(lambda *a: outputs.append(a[-1].dtype))
        self.assertEqual(self.shard(model)(self.x).dtype, BF16)
        self.assertEqual(outputs, [BF16, torch.float16])

    def test_a_view_is_warned_of(self) -> None:
        model = self.shard(Viewing())
        text = r"FSDP2-wrapped module \(FSDPViewing\) returned a view tensor"
        with self.assertWarnsRegex(UserWarning, text):
            model(torch.ones(DIM))


if __name__ == "__main__":
    run_tests()
