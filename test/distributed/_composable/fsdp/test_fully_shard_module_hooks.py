# Owner(s): ["oncall: distributed"]

"""
What the release's hooks of a unit's modules do around a unit of the branch: how inputs
and outputs are cast, when its parameters are whole, and what is warned of.

In which order units are gathered is in ``test_fully_shard_prefetch.py``, which waits
there are in ``test_fully_shard_streams.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from fsdp_common.utils import CastLinear, FakeGroupTest

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    MixedPrecisionPolicy,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_context import HeldAllReduces
from torch.distributed.fsdp._fully_shard._fsdp_param_cache import ParamVersions
from torch.distributed.fsdp._fully_shard._fsdp_reduce import SmallReductions
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


class TestValues(StateTest):
    """A unit that stays unsharded is warned of where its values are not those meant."""

    OLD = "forward uses the old values. Call reshard"
    LOST = "which is lost when the unit reshards"

    def model(self) -> Any:
        """Returns a root that stays unsharded, of a unit that does not."""
        inner = self.shard(nn.Linear(DIM, DIM))
        return self.shard(nn.Sequential(inner, nn.Linear(DIM, DIM, bias=False)))

    def evaluate(self, model: Any, context: Any = torch.no_grad) -> None:
        with context():
            model(self.x)

    def train(self, model: Any) -> None:
        model(self.x).sum().backward()

    def assert_warns(self, expected: str | None, run: Any, *args: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(*args)
        said = [str(warning.message) for warning in caught]
        self.assertEqual(len(said), expected is not None, said)
        if expected is not None:
            self.assertRegex(
                said[0], "Parameter 1.weight of unit 'FSDPSeq.*' (has|was)"
            )
            self.assertIn(expected, said[0])

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Yields trained models that were evaluated, with what changes their shards."""
        model = self.model()
        # Those of foreach and fused do not count as writing to a DTensor
        optim = torch.optim.SGD(model.parameters(), lr=1, foreach=False)
        self.train(model)
        self.evaluate(model)
        yield model, optim.step
        for context in (torch.no_grad, torch.inference_mode):
            for change in (
                lambda shards: [shard.copy_(shard + 1) for shard in shards],
                lambda shards: [shard.to_local().mul_(2) for shard in shards],
            ):
                model = self.model()
                shards = [*model.parameters()]
                self.evaluate(model, context)
                yield model, functools.partial(change, shards)

    def test_values_from_before(self) -> None:
        for is_training in (False, True):
            for model, change in self.steps():
                with torch.no_grad():
                    change()
                run = self.train if is_training else self.evaluate
                self.assert_warns(self.OLD, run, model)
                with torch.no_grad():
                    change()
                self.assert_warns(None, run, model)  # once

    def test_a_reshard_brings_new_values(self) -> None:
        for model, change in self.steps():
            with torch.no_grad():
                change()
            self.assert_warns(None, model.reshard)
            self.assert_warns(None, self.evaluate, model)

    def test_backwards_that_do_not_reshard(self) -> None:
        model = self.model()
        optim = torch.optim.SGD(model.parameters(), lr=1, foreach=False)
        for is_last in (False, True):
            for microbatch in range(3):
                resharded = is_last and microbatch == 2
                model.set_reshard_after_backward(resharded, recurse=False)
                self.assert_warns(None, self.train, model)
            if is_last:
                optim.step()
        model.set_reshard_after_backward(False, recurse=False)
        self.assert_warns(None, self.train, model)
        optim.step()
        self.assert_warns(self.OLD, self.train, model)

    def test_unsharded_parameters_that_are_written_to(self) -> None:
        for find in (self.evaluate, self.train, lambda model: model.reshard()):
            model = self.model()
            self.evaluate(model)
            self.evaluate(model)
            with torch.no_grad():
                model[1].weight.mul_(2)
            self.assert_warns(self.LOST, find, model)

    def test_forwards_that_write_to_their_parameters(self) -> None:
        model = self.shard(nn.Embedding(RANKS, DIM, max_norm=0.1))
        ids = torch.arange(RANKS)
        for _ in range(3):
            with torch.no_grad():
                self.assert_warns(None, model, ids)
        self.assert_warns(None, lambda: model(ids).sum().backward())

    def test_units_that_reshard_are_not_looked_at(self) -> None:
        with mock.patch.object(
            ParamVersions, "_read", autospec=True, side_effect=ParamVersions._read
        ) as read:
            model = self.model()
            optim = torch.optim.SGD(model.parameters(), lr=1, foreach=False)
            for _ in range(2):
                self.train(model)
                optim.step()
            read.assert_not_called()
            for _ in range(2):
                self.evaluate(model)
            # Of the root alone: noted, both compared, and one noted again
            self.assertEqual(read.call_count, 2 + 2 + 1)


class TestSharedContext(StateTest):
    def test_a_second_root_keeps_what_the_first_has_started(self) -> None:
        """Its first forward comes before the backward of the first."""
        first, second = (self.shard(nn.Linear(DIM, DIM)) for _ in range(2))
        share_comm_ctx([first, second])
        loss = first(self.x).sum()
        context = first._get_fsdp_state()._comm_ctx
        context.small_reductions = {"waiting": []}  # as if
        before = dict(vars(context))
        (unit,) = context.post_forward_order
        with torch.no_grad():
            second(self.x)
        self.assertEqual({k: vars(context)[k] for k in before}, before)
        for name, value in before.items():
            if name != "all_gather_state":
                self.assertIs(vars(context)[name], value, name)
        self.assertEqual(context.post_forward_order, [unit])
        context.small_reductions.clear()
        loss.backward()
        self.assertIsNotNone(first.weight.grad)

    def test_a_reset_drops_what_is_the_roots_own(self) -> None:
        roots = [self.shard(nn.Linear(DIM, DIM)) for _ in range(2)]
        share_comm_ctx(roots)
        for root in roots:
            root(self.x)
        groups = [root._get_fsdp_state()._fsdp_param_group for root in roots]
        context = groups[0].comm_ctx
        held = [HeldAllReduces((), (), group, []) for group in groups]
        parts = [(mock.Mock(fsdp_params=[*g.fsdp_params]), None) for g in groups]
        reduction = mock.Mock(**{"input_nbytes.return_value": 4})
        context.all_reduce_states = [*held]
        context.small_reductions = {reduction: SmallReductions([*parts], 8)}
        roots[1].reset_iter_state()
        self.assertEqual(context.all_reduce_states, held[:1])
        expected = {reduction: SmallReductions(parts[:1], 4)}
        self.assertEqual(context.small_reductions, expected)
        roots[0].reset_iter_state()
        self.assertFalse(context.all_reduce_states or context.small_reductions)


if __name__ == "__main__":
    run_tests()
