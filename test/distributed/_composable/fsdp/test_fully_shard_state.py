# Owner(s): ["oncall: distributed"]

"""
What a unit's state does around forward and backward, beside what its parameter groups
do: which root it has and what errors say of it, how inputs and outputs are cast, what
is done once for all units, and what ends a backward.

In which order units are gathered is in ``test_fully_shard_prefetch.py``, which waits
there are in ``test_fully_shard_streams.py``.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from fsdp_common.utils import CastLinear, FakeGroupTest

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param_group as group_file,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_state as state_file,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_context import (
    _GradientReductionState,
    AllGatherState,
    ReduceScatterState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.testing._internal.common_utils import run_tests


RANKS, DIM = 2, 4
FP32, BF16 = torch.float32, torch.bfloat16
IN_BF16 = MixedPrecisionPolicy(param_dtype=BF16)
OUT_BF16 = MixedPrecisionPolicy(output_dtype=BF16)


def state_of(module: nn.Module) -> FSDPState:
    return module._get_fsdp_state()


def name_of(module: nn.Module) -> str | None:
    (group,) = state_of(module)._fsdp_param_groups
    return group._module_fqn


def has_grads(module: nn.Module) -> bool:
    """Whether those of all shards are there."""
    return all(isinstance(param.grad, DTensor) for param in module.parameters())


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

    def layers(self, count: int = 2, **kwargs: Any) -> nn.Sequential:
        """Returns layers, each a unit, in a root that has no parameters."""
        model = nn.Sequential(*(CastLinear(DIM, DIM) for _ in range(count)))
        for layer in model:
            self.shard(layer, **kwargs)
        return self.shard(model, **kwargs)

    def assert_at_rest(self, model: nn.Module) -> None:
        context = state_of(model)._state_ctx
        self.assertIsNone(context.iter_forward_root)
        self.assertFalse(context.post_backward_final_callback_queued)
        self.assertIsNone(context.manual_backward_finalization_active)
        self.assertFalse(context.gradient_reduction_pending)
        streams = state_of(model)._comm_ctx
        self.assertIsNone(streams.active_gradient_reduction)
        self.assertIsNone(streams.all_gather_state)
        self.assertEqual(streams.post_forward_order, [])
        self.assertEqual(streams.reduce_scatter_states, [])
        self.assertEqual(streams._last_post_reduce_events, {})
        for state in context.all_states:
            self.assertIs(state._comm_ctx, streams)
            self.assertIs(state._training_state, TrainingState.IDLE)
            self.assertEqual(state._modules_to_run_forward, set())
            for group in state._fsdp_param_groups:
                self.assertIs(group.comm_ctx, streams)
                self.assertIs(group._training_state, TrainingState.IDLE)


class TestState(StateTest):
    def test_forward_after_one_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = self.layers()
        with self.assertRaisesRegex(RuntimeError, "meta device.*'0.weight', '0.bias'"):
            model(self.x)
        model.to_empty(device="cpu")
        for _ in range(2):
            model(self.x).sum().backward()
        self.assertTrue(has_grads(model))
        self.assertEqual([*map(name_of, model)], ["0", "1"])
        states = [*map(state_of, (model, *model))]
        self.assertEqual([state._is_root for state in states], [True, False, False])
        self.assertEqual(states[1]._state_ctx.all_states, states)

    def test_other_roots_after_an_error(self) -> None:
        """Each ends its own backward: their inputs have no gradients."""
        model = self.layers(2)
        with torch.device("meta"):
            model.append(self.shard(CastLinear(DIM, DIM)))
        with self.assertRaisesRegex(RuntimeError, "meta device"):
            model(self.x)
        first, second, _ = model
        (first(self.x) + second(self.x)).sum().backward()
        self.assertTrue(has_grads(first) and has_grads(second))
        self.assertEqual(state_of(first)._state_ctx.all_states, [state_of(first)])

    def test_traces_are_looked_for_once_whatever_the_number_of_units(self) -> None:
        for count in (1, 5):
            model = self.layers(count)
            with mock.patch.object(state_file, "look_for_traces") as looks:
                for forwards in (1, 2, 3):
                    with mock.patch.object(group_file, "look_for_traces") as others:
                        model(self.x).sum().backward()
                    self.assertEqual(looks.call_count, forwards)
            others.assert_not_called()  # each unit did, but in its lazy init alone

    def test_forwards_without_backward_come_one_after_the_other(self) -> None:
        model = self.layers()
        with mock.patch.object(state_file, "look_for_traces") as looks, torch.no_grad():
            for forwards in (1, 2, 3):
                model(self.x)
                self.assertEqual(looks.call_count, forwards)
                self.assertIsNone(state_of(model)._comm_ctx.all_gather_state)

    def test_groups_know_how_many_they_are(self) -> None:
        """One for each mesh."""
        meshes = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("all", "one"))
        others = FSDPMeshInfo(meshes["one"], 0)

        def place(param: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(None, others) if param.dim() == 1 else None

        model = self.shard(CastLinear(DIM, DIM), shard_placement_fn=place)
        ended: list[int] = []
        model(self.x)
        groups = state_of(model)._fsdp_param_groups
        self.assertEqual([group._param_group_index for group in groups], [0, 1])
        self.assertEqual([group._num_param_groups for group in groups], [2, 2])
        with mock.patch.object(
            FSDPState, "_end_group", lambda *a: ended.append(a[-2]._param_group_index)
        ):
            model(self.x).sum().backward()
        self.assertEqual(ended, [1, 0])
        with self.assertRaisesRegex(AssertionError, "at most 1 param group.* got 2"):
            getattr(state_of(model), "_fsdp_param_group")  # noqa: B009

    def test_the_most_input_buffers_hold(self) -> None:
        model = self.layers(3)
        model[1].set_reduce_scatter_max_input_buffers(3)
        model(self.x)
        self.assertEqual(state_of(model)._comm_ctx.reduce_scatter_max_input_buffers, 3)

    @unittest.skipUnless(
        hasattr(IN_BF16, "param_dtype_override_fn"), "has no functions"
    )
    def test_a_policys_function_is_asked_once(self) -> None:
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda *_: FP32)
        kept = state_of(self.shard(CastLinear(DIM, DIM), mp_policy=policy))._mp_policy
        self.assertIsNone(kept.param_dtype_override_fn)
        self.assertIs(kept.param_dtype, BF16)

    def test_a_unit_of_several_modules_is_named_after_all(self) -> None:
        model = nn.Sequential(*(CastLinear(DIM, DIM) for _ in range(3)))
        self.shard([model[0], model[2]])
        self.shard(model)(self.x)
        (group,) = state_of(model[0])._fsdp_param_groups
        self.assertEqual(group._module_fqn, "0, 2")
        names = [fsdp_param._param_fqn for fsdp_param in group.fsdp_params]
        self.assertEqual(names, ["0.weight", "0.bias", "2.weight", "2.bias"])


class TestCasts(StateTest):
    """Floating-point tensors are cast wherever they are, and nothing else is."""

    def arrived(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any], int]:
        """Returns what arrives, and how often containers were walked through."""
        model = self.shard(Given(), mp_policy=IN_BF16)
        with self.counted_walks() as walks:
            model(*args, **kwargs)
        return *model.given, walks.call_count

    @contextmanager
    def counted_walks(self) -> Iterator[mock.Mock]:
        walk = state_file._apply_to_tensors
        with mock.patch.object(state_file, "_apply_to_tensors", wraps=walk) as walks:
            yield walks

    def test_flat_inputs_are_cast_without_a_walk(self) -> None:
        ids, cast, x = torch.arange(3), self.x.to(BF16), self.x
        args, kwargs, walks = self.arrived(x, ids, None, 3, x=x, ids=ids, y=cast, n="a")
        self.assertEqual(walks, 0)
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
        args, kwargs, walks = self.arrived(
            Batch(x, 3), {"x": x, "ids": ids, "n": 2}, pair=Pair(x, None), list=[x, ids]
        )
        self.assertGreater(walks, 0)
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


class TestObservers(StateTest):
    def step(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
        model = Part(*(CastLinear(DIM, DIM) for _ in range(4)))
        self.shard([*model[:2]], mp_policy=policy)
        self.shard(model, mp_policy=policy)(self.x).sum().backward()

    def test_nobody_observes(self) -> None:
        enter = mock.patch.object(record_function, "__enter__", side_effect=KeyError)
        with enter:
            self.step()

    def test_a_profiler_sees_ranges(self) -> None:
        with torch.profiler.profile() as profiler:
            self.step()
        events = profiler.profiler.kineto_results.events()
        expected = {
            "FSDP::cast_forward_inputs",
            "FSDP::cast_forward_outputs",
            "FSDP::root_post_backward_callback",
            "FSDP::root_pre_forward",
        }
        self.assertLessEqual(expected, {event.name() for event in events})

    def test_logs_tell_of_the_root(self) -> None:
        with self.assertLogs(state_file.logger, "DEBUG") as logs:
            self.step()
        messages = [record.getMessage() for record in logs.records]
        for message in (
            "FSDP::root_pre_forward",
            "FSDP::force_complete_post_forward",
            "FSDP::root_post_backward",
        ):
            self.assertEqual(messages.count(message), 1, message)


class TestForward(StateTest):
    def test_gathers_wait_for_the_optimizer(self) -> None:
        """Of the current stream, or for the event that users say."""
        model = self.layers()
        model(self.x)
        state, event = state_of(model), mock.Mock()
        streams = state._comm_ctx
        current = streams.device_handle.current_stream()
        streams.all_gather_copy_in_stream, streams.all_gather_stream = both = (
            mock.Mock(),
            mock.Mock(),
        )
        state._state_ctx.post_optim_event = event
        for _ in range(2):
            state._root_pre_forward(model, (), {})
            state._state_ctx.iter_forward_root = None
        expected = [mock.call.wait_event(event), mock.call.wait_stream(current)]
        for stream in both:
            self.assertEqual(stream.mock_calls, expected)

    def test_groups_of_other_states_are_prefetched_in_order(self) -> None:
        """Forward comes to the first of them first, and backward to the last."""
        model = self.shard(CastLinear(DIM, DIM))
        state, other = state_of(model), FSDPState()
        other._fsdp_param_groups = ["first", "last"]
        state._states_to_forward_prefetch = [other]
        state._states_to_backward_prefetch = [other]
        with mock.patch.object(FSDPParamGroup, "_prefetch_unshard") as prefetch:
            model(self.x).sum().backward()
        order = [("first", "forward"), ("last", "forward")]
        order += [("last", "backward"), ("first", "backward")]
        self.assertEqual([call.args for call in prefetch.mock_calls], order)

    def test_a_root_of_parameters_keeps_them_for_backward(self) -> None:
        """Unless users have said what is to become of them."""
        for kwargs, is_kept in (({}, True), ({"reshard_after_forward": True}, False)):
            model = self.shard(CastLinear(DIM, DIM), **kwargs)
            model(self.x)
            (group,) = state_of(model)._fsdp_param_groups
            self.assertEqual(group.is_unsharded, is_kept)

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

    def test_several_modules_prefetch_once(self) -> None:
        model = nn.Sequential(*(CastLinear(DIM, DIM) for _ in range(3)))
        self.shard([*model[:2]]), self.shard(model[2]), self.shard(model)
        state_of(model[0])._states_to_forward_prefetch = [state_of(model[2])]
        for _ in range(2):
            with mock.patch.object(FSDPParamGroup, "_prefetch_unshard") as prefetch:
                model(self.x)
            (group,) = state_of(model[2])._fsdp_param_groups
            prefetch.assert_called_once_with(group, "forward")

    def test_a_module_that_fails_is_over(self) -> None:
        model = nn.Sequential(CastLinear(DIM, DIM), Failing())
        self.shard([*model])
        with self.assertRaises(ArithmeticError):
            self.shard(model)(self.x)
        state = state_of(model[0])
        self.assertTrue(state._fsdp_param_groups[0].is_sharded)
        self.assertEqual(state._modules_to_run_forward, set())

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
        self.assertEqual(state_of(model[0])._modules_to_run_forward, set())

    def test_a_forward_in_backward_is_cast_and_is_no_end(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float16)
        model = self.shard(CastLinear(DIM, DIM), mp_policy=policy)
        model(self.x)
        state = state_of(model)
        (group,) = state._fsdp_param_groups
        group.reshard()
        state._training_state = TrainingState.PRE_BACKWARD
        (x,), _ = state._pre_forward(model, (self.x,), {})
        self.assertEqual(x.dtype, BF16)
        self.assertTrue(group.is_unsharded)
        output = state._post_forward(model, (x,), x.detach().requires_grad_())
        self.assertEqual(output.dtype, torch.float16)
        self.assertIs(state._training_state, TrainingState.PRE_BACKWARD)

    def test_inputs_are_moved_to_devices(self) -> None:
        model = self.layers()
        model(self.x)
        state = state_of(model)
        moved = ((self.x,),), ({},)
        vendors = torch._C._get_privateuse1_backend_name()
        for kind, args, times in (
            ("cuda", (self.x,), 1),
            (vendors, (self.x,), 1),
            ("cpu", (self.x,), 0),
            ("cuda", (), 0),
        ):
            state._device = torch.device(kind)
            with mock.patch.object(state_file, "_to_kwargs", return_value=moved) as to:
                state._root_pre_forward(model, args, {})
            self.assertEqual(to.call_count, times, kind)
            state._state_ctx.iter_forward_root = None


class TestBackward(StateTest):
    def test_a_backward_ends_once(self) -> None:
        ends = FSDPState._root_post_backward_final_callback
        calls: list[TrainingState] = []

        def end(state: FSDPState) -> None:
            calls.append(state._training_state)
            ends(state)

        model = self.layers(3)
        with mock.patch.object(FSDPState, "_root_post_backward_final_callback", end):
            for steps in (1, 2):
                model(self.x).sum().backward()
                self.assertEqual(calls, [TrainingState.PRE_BACKWARD] * steps)
                self.assert_at_rest(model)

    def test_a_part_that_runs_by_itself_leaves_nothing(self) -> None:
        """As the loss may call a head in chunks, whether it is the last or not."""
        model = Part(*(CastLinear(DIM, DIM) for _ in range(4)))
        self.shard([*model[:2]]), self.shard([*model[2:]]), self.shard(model)
        context = state_of(model)
        for is_last in (True, False, True):
            model.set_is_last_backward(is_last)
            loss = sum(model[3](chunk).sum() for chunk in model(self.x).split(2))
            self.assertIsNotNone(state_of(model)._comm_ctx.all_gather_state)
            loss.backward()
            if is_last:
                self.assert_at_rest(model)
            else:
                self.assertIsNone(context._comm_ctx.all_gather_state)
                self.assertNotEqual(context._comm_ctx.post_forward_order, [])

    def test_one_may_be_ended_that_never_began(self) -> None:
        """As a pipeline does for a stage that is frozen."""
        model = self.layers().requires_grad_(False)
        model(self.x)
        state_of(model)._root_post_backward_final_callback()
        self.assert_at_rest(model)

    def test_without_gradients_no_backward_is_waited_for(self) -> None:
        x = torch.ones(1, requires_grad=True)
        with torch.no_grad():
            self.shard(Given(x))()
        self.assertIsNone(x._backward_hooks)

    def test_outputs_in_a_transform_have_a_node(self) -> None:
        """They may need gradients outside of it. Integers cannot, wherever."""
        state, node = FSDPState(), state_file.RegisterPreBackwardFunction
        values = torch.ones(2), torch.ones(2, dtype=torch.complex64), torch.arange(2)

        def register(*outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return state._register_pre_backward_hook(outputs)

        with mock.patch.object(node, "apply", side_effect=lambda _, x: x) as apply:
            torch.func.vmap(register)(*values)
            dtypes = [call.args[1].dtype for call in apply.mock_calls]
            self.assertEqual(dtypes, [FP32, torch.complex64])
            apply.reset_mock()
            register(*values)
            apply.assert_not_called()
            # What has a tangent has a node for it
            self.assertIsNone(node.jvp(mock.Mock(), None, None))
            apply.assert_not_called()
            node.jvp(mock.Mock(state=state), None, values[0])
            apply.assert_called_once_with(state, values[0])

    def test_a_view_is_warned_of(self) -> None:
        model = self.shard(Viewing())
        text = r"FSDP2-wrapped module \(FSDPViewing\) returned a view tensor"
        with self.assertWarnsRegex(UserWarning, text):
            model(torch.ones(DIM))

    def test_what_is_under_way_is_given_up(self) -> None:
        model = self.layers()
        loss = model(self.x).sum()
        root, child = state_of(model), state_of(model[0])
        text = "reset_iter_state must be called on the root FSDP module"
        with self.assertRaisesRegex(RuntimeError, text):
            child._reset_iter_state()
        context, streams = root._state_ctx, root._comm_ctx
        model.unshard()
        context.iter_forward_root = child
        context.post_backward_final_callback_queued = True
        context.manual_backward_finalization_active = False
        context.gradient_reduction_pending = True
        streams.active_gradient_reduction = _GradientReductionState(context)
        streams.post_forward_order.append(child._fsdp_param_groups[0])
        child._modules_to_run_forward.add(model[0])
        child._training_state = TrainingState.FORWARD
        child._fsdp_param_groups[0]._training_state = TrainingState.FORWARD
        gathered, scattered, reduced = (mock.Mock() for _ in range(3))
        stream, handle = mock.Mock(), mock.Mock()
        streams.all_gather_state = AllGatherState(mock.Mock(), gathered)
        held = ReduceScatterState((), scattered, stream, child._fsdp_param_groups[0])
        streams.reduce_scatter_states.append(held)
        streams._last_post_reduce_events[stream] = reduced
        with mock.patch.object(streams, "device_handle", handle):
            root._reset_iter_state()
        stream.wait_event.assert_called_once_with(scattered)
        waits = handle.current_stream().wait_event.mock_calls
        self.assertEqual(waits, [mock.call(gathered), mock.call(reduced)])
        self.assert_at_rest(model)
        del loss
        model(self.x).sum().backward()
        self.assertTrue(has_grads(model))


class TestByHand(StateTest):
    """
    A backward that users end, with the methods of the state: `FSDPModule` has them
    since 2.15.
    """

    def setUp(self) -> None:
        super().setUp()
        # Nothing before the first needs gradients, so that it is left to the end
        self.model = self.layers()
        self.state = state_of(self.model)
        self.context, self.streams = self.state._state_ctx, self.state._comm_ctx
        self.context.manual_backward_finalization = True

    def backward(self) -> None:
        self.model(self.x).sum().backward()

    def assert_refused(self, text: str, state: FSDPState | None = None) -> None:
        with self.assertRaisesRegex(RuntimeError, text):
            (state or self.state)._validate_finalize_backward()

    def test_gradients_come_when_it_is_ended(self) -> None:
        for _ in range(2):
            self.model.zero_grad()
            self.backward()
            self.assertFalse(has_grads(self.model[0]))
            self.state.finalize_backward(wait_for_gradient_reduction=False)
            self.assertNotEqual(self.streams._last_post_reduce_events, {})
            self.assertTrue(has_grads(self.model))
            self.state.wait_for_gradient_reduction()
            self.assert_at_rest(self.model)

    def test_it_waits_itself(self) -> None:
        self.backward()
        self.assertNotEqual(self.streams._last_post_reduce_events, {})
        self.state.finalize_backward()
        self.assertEqual(self.streams._last_post_reduce_events, {})

    def test_a_backward_that_began_so_ends_so(self) -> None:
        self.backward()
        self.context.manual_backward_finalization = False
        self.state.finalize_backward()
        self.assertTrue(has_grads(self.model))
        self.backward()
        self.assert_at_rest(self.model)

    def test_the_last_unit_comes_first(self) -> None:
        self.model.set_requires_gradient_sync(False)
        self.backward()
        self.model.set_requires_gradient_sync(True)
        order: list[str] = []
        reduce = FSDPParamGroup.post_backward

        def note(group: FSDPParamGroup) -> None:
            order.append(group._module_fqn)
            reduce(group)

        with mock.patch.object(FSDPParamGroup, "post_backward", note):
            self.state.finalize_backward()
        self.assertEqual(order, ["1", "0"])
        self.assertTrue(has_grads(self.model))

    def test_what_is_not_pending_is_resharded(self) -> None:
        self.model.set_reshard_after_backward(False)
        self.backward()
        (group,) = state_of(self.model[1])._fsdp_param_groups
        self.assertTrue(group.is_unsharded)
        self.model.set_reshard_after_backward(True)
        self.state.finalize_backward()
        self.assertTrue(group.is_sharded)

    def test_before_the_first_forward_nothing_is_ended(self) -> None:
        self.assertIsNone(self.state.finalize_backward())
        self.assert_refused("must be called after the first forward")

    def test_what_cannot_be_ended(self) -> None:
        self.model(self.x)
        root = "must be called on the root FSDP module"
        self.assert_refused(root, state_of(self.model[0]))
        with self.assertRaisesRegex(RuntimeError, root):
            state_of(self.model[0]).finalize_backward()
        self.context.post_backward_final_callback_queued = True
        self.assert_refused("must be called after backward completes")
        self.context.post_backward_final_callback_queued = False
        self.context.gradient_reduction_pending = True
        self.assert_refused("waited on before finalizing backward again")
        self.context.gradient_reduction_pending = False
        (group,) = state_of(self.model[1])._fsdp_param_groups
        numel = sum(shard.numel() for shard in self.model[1].parameters()) // RANKS
        group._partial_reduce_output = torch.ones(numel)
        self.assert_refused("does not support partial gradient reductions .*group '1'")
        group._partial_reduce_output = None
        self.context.manual_backward_finalization = False
        self.assert_refused("requires manual backward finalization. Call set_manual")

    def test_all_reduces_cannot_be_put_off(self) -> None:
        names = ("replicate", "shard")
        self.mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=names)
        model = self.layers()
        state_of(model)._state_ctx.manual_backward_finalization = True
        model.set_requires_all_reduce(False, recurse=True)
        model(self.x).sum().backward()
        (group,) = state_of(model[1])._fsdp_param_groups
        group._partial_reduce_output = None  # which would be refused before
        text = r"requires all-reduce for parameter group '0'. Call set_requires_all_"
        self.assert_refused(text, state_of(model))

    def test_only_a_root_is_ended_by_hand(self) -> None:
        state_of(self.model[1])._state_ctx.manual_backward_finalization = True
        text = "manual_backward_finalization must be called on the root FSDP module"
        with self.assertRaisesRegex(RuntimeError, text):
            self.model(self.x)

    def test_a_forward_waits_for_the_reductions_before(self) -> None:
        self.backward()
        reduction = _GradientReductionState(self.context)
        text = "previous gradient reduction must be waited on before forward"
        self.streams.active_gradient_reduction = reduction
        with self.assertRaisesRegex(RuntimeError, text):
            self.model(self.x)
        self.streams.active_gradient_reduction = None
        self.context.gradient_reduction_pending = True
        with self.assertRaisesRegex(RuntimeError, text):
            self.model(self.x)
        self.streams.active_gradient_reduction = reduction
        with self.assertRaisesRegex(RuntimeError, "handle was invalidated"):
            self.state.wait_for_gradient_reduction(_GradientReductionState(self.state))
        self.state.wait_for_gradient_reduction(reduction)
        self.model(self.x)

    def test_reductions_of_another_root_are_not_given_up(self) -> None:
        self.backward()
        others = _GradientReductionState(object())
        self.streams.active_gradient_reduction = others
        with self.assertRaisesRegex(RuntimeError, "owned by another FSDP root"):
            self.state._reset_iter_state()


class TestErrors(StateTest):
    def assert_raised(self, error: type, text: str, run: Callable[[], Any]) -> None:
        with self.assertRaises(error) as raised:
            run()
        self.assertIn(text, str(raised.exception))

    def test_a_unit_runs_before_its_root(self) -> None:
        model = self.layers()
        model[1](self.x)
        text = (
            "FSDP state has already been lazily initialized for 1\n"
            "FSDP requires running forward through the root module first"
        )
        self.assert_raised(RuntimeError, text, lambda: model(self.x))
        model[1](self.x)  # which is a root as before

    def test_several_modules_are_no_root(self) -> None:
        modules = [CastLinear(DIM, DIM), CastLinear(DIM, DIM)]
        self.shard(modules)
        text = "FSDP requires a single root module but got (FSDPCastLinear("
        for _ in range(2):
            self.assert_raised(RuntimeError, text, lambda: modules[0](self.x))

    def test_a_parameter_is_in_two_units(self) -> None:
        first, second = CastLinear(DIM, DIM), CastLinear(DIM, DIM)
        second.weight = first.weight
        model = nn.Sequential(self.shard(first), self.shard(second))
        self.shard(model)
        text = (
            "is shared with a parameter already managed by another FSDP group. For "
            "shared/tied parameters, use fully_shard([module_a, module_b])"
        )
        for _ in range(2):
            self.assert_raised(ValueError, text, lambda: model(self.x))


if __name__ == "__main__":
    run_tests()
