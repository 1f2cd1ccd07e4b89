# Owner(s): ["oncall: distributed"]

"""
Who mixes no dtypes pays for nothing that mixing needs: copy-in takes no more memory
than the release's, plans outlive an explicit unshard, offloaded shards are moved one at
a time, inputs are looked at once, what hangs on modules is copied and freed as ever,
hooks of who does not compile know nothing of the compiler, and an error that is not
about other ranks does not speak of them.

What plugins use is in ``test_fully_shard_plugins.py``, whole schedules of steps are in
``test_fully_shard_schedules.py``.
"""

from __future__ import annotations

import json
import sys
import unittest
import weakref
from typing import Any
from unittest import mock

import pytest

from fsdp_common.run_forked import run_forked
from fsdp_common.utils import DeviceFreeTest, FakeGroupTest, run_python
from fsdp_undisturbed.scenarios import (
    ALONE,
    BF16,
    CASES,
    ELEMENTS,
    FP32,
    MIXED,
    RANKS,
    step,
    unit_alone,
    unit_of,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import (
    _fsdp_agreement as agreement,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_copies as copies,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_layout as layouts,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param_group as group_file,
)
from torch.distributed.fsdp._fully_shard._fsdp_observers import _dynamo_disable
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


pytestmark = pytest.mark.long


SCRIPT = "fsdp_undisturbed.scenarios"
ODD_NUMEL = 64


class TestMemory(DeviceFreeTest):
    """The peak within post-backward, of four weights."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        printed = run_python("-m", SCRIPT, on_release=True), run_forked(SCRIPT)
        cls.release, cls.branch = (json.loads(t.splitlines()[-1]) for t in printed)

    def test_uniform_units_take_at_most_what_the_release_takes(self) -> None:
        self.assertEqual(self.release.keys(), {*CASES, *ALONE})
        for name, nbytes in self.release.items():
            self.assertLessEqual(self.branch[name], nbytes, name)

    def test_one_odd_gradient_takes_its_own_bytes_alone(self) -> None:
        """Itself, and its columns of the reduction's input and output."""
        fused = self.branch["bf16, reduce fp32"]
        own = ODD_NUMEL * (FP32.itemsize + FP32.itemsize)
        self.assertLessEqual(self.branch["bf16 and one fp32, reduce fp32"], fused + own)
        fused = self.branch["fp32"]
        # And a copy that the kernel for CPUs makes of what stands in for it
        own = ODD_NUMEL * (2 * BF16.itemsize + FP32.itemsize + FP32.itemsize)
        self.assertLessEqual(self.branch["fp32 and one bf16, reduce fp32"], fused + own)
        self.assertEqual({*self.branch} - {*self.release}, {*MIXED})

    def test_a_factor_over_a_single_rank_takes_no_memory(self) -> None:
        """The release makes a buffer for what is divided, and copies that."""
        plain, divided = ALONE
        self.assertEqual(self.branch[divided], self.branch[plain])
        more = self.release[divided] - self.branch[divided]
        self.assertGreaterEqual(more, ELEMENTS * FP32.itemsize)


class TestUsersModules(DeviceFreeTest):
    def test_are_copied_saved_and_freed_as_in_the_release(self) -> None:
        args = ("-m", "fsdp_undisturbed.held")
        branch, release = (
            json.loads(run_python(*args, on_release=on_release).splitlines()[-1])
            for on_release in (False, True)
        )
        self.assertEqual(branch, release)
        found = release["after 0 steps"]
        self.assertEqual(found["deepcopy of part"], "Linear")
        self.assertEqual(found["loaded"], "copy True, part False")
        self.assertEqual(found["a part keeps"], ["part"])
        self.assertEqual(found["left"], [])


class TestKept(FakeGroupTest):
    ranks = RANKS

    @pytest.mark.quick
    def test_an_explicit_unshard_plans_nothing_anew(self) -> None:
        for name, case in (CASES | MIXED).items():
            model = unit_of(case)
            step(model)
            with (
                mock.patch.object(layouts, "plan_gather", side_effect=AssertionError),
                mock.patch.object(layouts, "plan_copy_in", side_effect=AssertionError),
            ):
                group = model._get_fsdp_state()._fsdp_param_groups[0]
                buckets = dict(group._cache.buckets)
                for _ in range(2):
                    model.unshard()
                    model.reshard()
                    step(model)
            self.assertEqual(len(buckets), 1, name)
            for pattern, planned in group._cache.buckets.items():
                self.assertIs(buckets[pattern], planned, name)

    def test_an_explicit_unshard_reads_what_has_changed(self) -> None:
        """A parameter's dtypes are read once, if it has a policy of its own as well."""
        own = MixedPrecisionPolicy(
            reduce_dtype=FP32, param_dtype_override_fn=lambda _: BF16
        )
        reads: list[Any] = []
        read = FSDPParam.init_dtype_attrs

        def noting(fsdp_param: FSDPParam, policy: Any) -> None:
            reads.append(fsdp_param)
            read(fsdp_param, policy)

        def again() -> list[Any]:
            reads.clear()
            model.unshard()
            model.reshard()
            return [*reads]

        mesh = init_device_mesh("cpu", (RANKS,))
        for policy in (MixedPrecisionPolicy(param_dtype=BF16), own):
            model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
            group = model._get_fsdp_state()._fsdp_param_group
            params = group.fsdp_params
            with mock.patch.object(FSDPParam, "init_dtype_attrs", noting):
                model(torch.ones(1, 4, dtype=BF16))
                self.assertEqual(reads, params)
                self.assertEqual(again(), [])
                model.bias.grad_dtype = BF16
                self.assertEqual(again(), params)
                model.bias.grad_dtype = FP32
                self.assertEqual(again(), params)
                model.requires_grad_(False)
                self.assertEqual(again(), params)
                self.assertEqual(again(), [])
                group.mp_policy = MixedPrecisionPolicy(BF16, FP32)
                self.assertEqual(again(), params)
                group.fsdp_params = [*params]  # as plugins do
                self.assertEqual(again(), params)
                with mock.patch.object(FSDPParamGroup, "_init_mp_dtypes") as replaced:
                    model.unshard()
                    model.unshard()
                self.assertEqual(replaced.call_count, 2)
                # What replaced it may have set anything
                self.assertEqual(again(), params)
                self.assertEqual(again(), [])
                model.to("meta")
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, "materialized"):
                        model.unshard()

    def test_a_single_rank_divides_gradients_where_they_are(self) -> None:
        """What is held until the next reduction is the gradients themselves."""
        held: list[int] = []
        finalize = FSDPParamGroup.finalize_backward

        def noting(group: FSDPParamGroup) -> None:
            for state in group.comm_ctx.reduce_scatter_states:
                held.extend(t.data_ptr() for t in state.reduce_scatter_inputs)
            finalize(group)

        for factor in ALONE.values():
            held.clear()
            model = unit_alone(factor)
            with mock.patch.object(FSDPParamGroup, "finalize_backward", noting):
                model(torch.ones(1, requires_grad=True)).sum().backward()
            grad = next(model.parameters()).grad
            self.assertEqual(held, [grad.to_local().untyped_storage().data_ptr()])

    def test_a_dtype_that_changes_plans_anew(self) -> None:
        model = unit_of(CASES["bf16"])
        step(model)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        (planned,) = group._cache.buckets.values()
        group.fsdp_params[0].sharded_param.grad_dtype = FP32
        model.unshard()
        step(model)
        (planned_anew,) = group._cache.buckets.values()
        self.assertIsNot(planned_anew, planned)
        local = torch.ones(1, requires_grad=True)
        model(local).sum().backward()
        dtypes = [param.grad.dtype for param in model.parameters()]
        self.assertEqual(dtypes, [FP32, BF16, BF16, BF16])


class Moves(TorchDispatchMode):
    """Notes how many tensors that were moved are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[weakref.ref] = []
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.moved.append(weakref.ref(result))
            alive = [ref for ref in self.moved if ref() is not None]
            self.most = max(self.most, len(alive))
        return result


class TestOffload(DeviceFreeTest):
    @pytest.mark.quick
    def test_shards_are_moved_one_at_a_time(self) -> None:
        """From the host to a device, which has no memory here, if to be cast there."""
        shards = [torch.ones(8) for _ in range(5)]
        for dtype, expected in ((FP32, (0, 0)), (BF16, (5, 1))):
            layout = layouts.plan_gather([dtype] * 5, [8] * 5)
            planned = layouts.plan_copy_in(layout, [FP32] * 5)
            segment = torch.empty(40, dtype=dtype, device="meta")
            with Moves() as moves:
                copies._copy_in(segment, planned, shards)
            self.assertEqual((len(moves.moved), moves.most), expected)

    def test_what_an_extension_has_moved_is_not_moved_again(self) -> None:
        shards = [torch.ones(8, device=device) for device in ("meta", "cpu", "cpu")]
        layout = layouts.plan_gather([BF16] * 3, [8] * 3)
        segment = torch.empty(24, dtype=BF16, device="meta")
        with Moves() as moves:
            copies._copy_in(segment, layouts.plan_copy_in(layout, [FP32] * 3), shards)
            copies.copy_each([*segment.split(8)], shards)
        self.assertEqual(len(moves.moved), 4)


class Arguments(nn.Module):
    """Keeps what its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(RANKS))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given = args, kwargs
        needing = [
            value
            for value in tree_leaves(self.given)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        return sum(value.sum() for value in needing) + self.weight.sum()


class TestInputs(FakeGroupTest):
    """Inputs of forward arrive as they were given, but for those that need gradients."""

    ranks = RANKS

    def _run(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Returns what arrives."""
        model = fully_shard(Arguments(), mesh=init_device_mesh("cpu", (RANKS,)))
        model(*args, **kwargs).backward()
        (weight,) = model.parameters()
        self.assertIsNotNone(weight.grad)
        return model.given

    def _assert_passed(self, arrived: torch.Tensor, given: torch.Tensor) -> None:
        node = type(arrived.grad_fn).__name__
        self.assertEqual(node, "RegisterPostBackwardFunctionBackward")
        self.assertTrue(torch.equal(arrived, given))
        self.assertEqual(given.grad.tolist(), [1.0, 1.0])

    def test_tensors_of_their_own_are_passed(self) -> None:
        x, y = (torch.rand(2, requires_grad=True) for _ in range(2))
        mask, scale = torch.ones(2), 0.5
        args, kwargs = self._run(
            x, mask, None, 3, mask=mask, y=y, scale=scale, name="a", causal=True
        )
        self._assert_passed(args[0], x)
        self._assert_passed(kwargs["y"], y)
        self.assertIs(args[1], mask)
        self.assertEqual(args[2:], (None, 3))
        self.assertEqual([*kwargs], ["mask", "y", "scale", "name", "causal"])
        self.assertIs(kwargs["mask"], mask)
        self.assertIs(kwargs["scale"], scale)
        self.assertEqual((kwargs["name"], kwargs["causal"]), ("a", True))

    def test_tensors_in_containers_are_passed(self) -> None:
        x, y, z = (torch.rand(2, requires_grad=True) for _ in range(3))
        mask, other = torch.ones(2), object()
        args, kwargs = self._run(
            [x, mask], other, states={"y": (y, None)}, z=z, mask=mask
        )
        self._assert_passed(args[0][0], x)
        self._assert_passed(kwargs["states"]["y"][0], y)
        self._assert_passed(kwargs["z"], z)
        self.assertIs(args[0][1], mask)
        self.assertIs(args[1], other)
        self.assertEqual([*kwargs], ["states", "z", "mask"])

    def test_without_gradients_nothing_is_replaced(self) -> None:
        x, mask = torch.rand(2), torch.ones(2)
        args, kwargs = self._run(x, mask=mask)
        self.assertIs(args[0], x)
        self.assertIs(kwargs["mask"], mask)


class TestObservers(FakeGroupTest):
    """Who observes is asked once for each forward, whatever the number of units."""

    ranks = RANKS

    def model(self, units: int) -> nn.Sequential:
        """Returns units in a root that has no parameters, after a first forward."""
        mesh = init_device_mesh("cpu", (RANKS,))
        model = nn.Sequential(*(nn.Linear(RANKS, RANKS) for _ in range(units)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)(torch.ones(1, RANKS))
        return model

    def test_training(self) -> None:
        for units in (1, 5):
            model = self.model(units)
            model.set_is_last_backward(False)  # as in all microbatches but the last
            with mock.patch.object(group_file.observers, "look_for_traces") as look:
                for forwards in (1, 2, 3):
                    model(torch.ones(1, RANKS)).sum().backward()
                    self.assertEqual(look.call_count, forwards)

    @torch.no_grad()
    def test_without_gradients(self) -> None:
        model = self.model(5)
        with mock.patch.object(group_file.observers, "look_for_traces") as look:
            for forwards in (1, 2, 3):
                model(torch.ones(1, RANKS))
                self.assertEqual(look.call_count, forwards)

    def test_parts_that_run_by_turns(self) -> None:
        model = self.model(5)
        with mock.patch.object(group_file.observers, "look_for_traces") as look:
            for part, looks in ((model[:3], 1), (model[3:], 1), (model[:2], 2)):
                part(torch.ones(1, RANKS))
                self.assertEqual(look.call_count, looks)


class TestCompiler(DeviceFreeTest):
    """Dynamo is kept out of hooks where it is in, and is not asked for where not."""

    def test_a_hook_of_eager_training_is_called_as_it_is(self) -> None:
        hook = _dynamo_disable(lambda: "called")
        with mock.patch.object(torch._dynamo, "disable", side_effect=AssertionError):
            self.assertEqual(hook(), "called")

    def test_a_hook_of_what_is_exported_says_why_it_is_skipped(self) -> None:
        hook = _dynamo_disable(lambda: "called")
        disable = torch._dynamo.disable
        with (
            mock.patch.object(torch.compiler, "_is_compiling_flag", True),
            mock.patch.object(torch._dynamo, "disable", wraps=disable) as disabling,
        ):
            self.assertEqual([hook(), hook()], ["called", "called"])
        disabling.assert_called_once()
        self.assertEqual(disabling.call_args.kwargs["reason"], "skipping FSDP hooks")

    def test_a_hook_of_a_compiled_program_is_not_traced(self) -> None:
        callbacks, graphs = [], []

        @_dynamo_disable
        def hook() -> None:
            callbacks.append(get_eval_frame_callback())

        def program(x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            hook()
            return x + 2

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(program, backend=backend)
        self.assertEqual(compiled(torch.ones(1)).item(), 4.0)
        self.assertEqual(callbacks, [None])
        self.assertEqual(len(graphs), 2)  # before the hook, and after it


@unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
class TestNotes(FakeGroupTest):
    ranks = RANKS

    def test_only_errors_about_other_ranks_speak_of_them(self) -> None:
        model = unit_of(CASES["bf16"])
        step(model)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        for error, is_about_them in (
            (torch.OutOfMemoryError("CUDA out of memory"), False),
            (RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting"), True),
            (dist.DistBackendError("NCCL error: remote process exited"), True),
            (RuntimeError("expected all tensors on one device"), False),
            (ValueError("a user's own"), False),
        ):
            group._agreement.add_note(error)
            (note,) = error.__notes__
            self.assertIn("Raised while gathering unit '(root)'.", note)
            self.assertEqual(agreement._HANG_ADVICE in note, is_about_them, error)


if __name__ == "__main__":
    run_tests()
