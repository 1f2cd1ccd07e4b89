# Owner(s): ["oncall: distributed"]
"""
Gradients of mixed dtypes over shards and replicas: what is all-reduced, what waits for
a later microbatch, and how long buffers live. Random schedules, meshes and policies are
in ``test_fully_shard_random.py``, all-reduce hooks in ``test_fully_shard_parity.py``.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp_helpers.common import comms, utils
from fsdp_helpers.common.comms import backward, BF16, FP16, FP32, FP64, GivenGrads
from fsdp_helpers.common.doubles import with_a_row_more
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.utils import DEVICE_TYPE, hybrid_mesh
from fsdp_helpers.random.cases import Case, Microbatch, Param, Step
from fsdp_helpers.random.exact import check_case

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_context
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.testing._internal.common_utils import parametrize, run_tests


def model_of(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> GivenGrads:
    zeros = {name: torch.zeros(size, dtype=d) for name, (size, d) in shapes.items()}
    return GivenGrads(**zeros).to(DEVICE_TYPE)


def full_grad(param: nn.Parameter) -> torch.Tensor:
    return param.grad.full_tensor().double().cpu()


# Dim 0 is smaller than a shard group, not divisible by it, and divisible by it
PARAMS = (
    Param((9, 3), FP32),
    Param((1,), FP32),
    Param((16, 2), BF16),
    Param((5, 2), BF16),
    Param((8,), FP16),
)
ALL = {*range(len(PARAMS))}
# Parameters that get gradients in three microbatches
THREE_DIFFERENT = ({0, 2}, {3, 4}, {0, 1})


def deferring(*used: set[int]) -> Case:
    """Returns microbatches that use these parameters, all-reduced after the last."""
    microbatches = [
        Microbatch(
            "all" if i == len(used) else "scatter",
            skipped_params=frozenset((0, param) for param in ALL - params),
            is_last=i == len(used),
        )
        for i, params in enumerate(used, 1)
    ]
    return Case((PARAMS,), "hybrid", (2, 2), (Step((*microbatches,)),))


class TestProcesses(utils.FSDPProcessTest):
    """2 replicas of 2 shards, each rank a process."""

    def test_partial_reduces_are_all_reduced_in_the_order_of_buckets(self):
        """Zeros stand for those that the last microbatch has no gradient of."""
        with utils.record_collectives() as recorder:
            check_case(deferring({2}, {0}, {4}), DEVICE_TYPE)
        scattered = [call.dtype for call in recorder.reduce_scatters]
        self.assertEqual(scattered, [BF16, FP32, BF16, FP32, BF16, FP16])
        reduced = [call.dtype for call in recorder.all_reduces]
        self.assertEqual(reduced, [FP32, BF16, FP16])

    @parametrize("how", ["plain", "wrapped", "set_again", "averaged_by_a_hook"])
    def test_replicas_whose_gradients_differ_add_up(self, how: str):
        """Each has both in a deferred microbatch, and only one has both in the last."""
        has_hook, own = "hook" in how, param_group.foreach_reduce
        mesh = hybrid_mesh(2)["shard"] if has_hook else hybrid_mesh(2)
        model = model_of({"w": ((2,), FP32), "b": ((8,), FP32)})
        group = comms.group_of(fully_shard(model, mesh=mesh))
        # One of them is direct
        fsdp.set_coalesced_collectives(model, 24 if how == "set_again" else None)
        model.set_requires_all_reduce(False)
        if has_hook:
            # A mesh without replicas defers nothing: a plugin does
            values = torch.tensor([1.0] + [2.0] * 4, device=DEVICE_TYPE)
            group._partial_reduce_output = values
            ranks = hybrid_mesh(2).get_group(0)
            model.set_all_reduce_hook(lambda g: dist.all_reduce(g.div_(2), group=ranks))
        else:
            backward(model, w=1.0, b=2.0)
        if how == "set_again":
            kept, group._partial_reduce_output = group._partial_reduce_output, None
            group._partial_reduce_output = kept
        model.set_requires_all_reduce(True)
        wrapped = functools.partial(own) if how == "wrapped" else own
        with mock.patch.object(param_group, "foreach_reduce", wrapped):
            backward(model, **{"w": 4.0, "b": 8.0} if self.rank < 2 else {"b": 8.0})
        self.assertEqual(full_grad(model.w), torch.full((2,), 3.0).double())
        self.assertEqual(full_grad(model.b), torch.full((8,), 10.0).double())

    @parametrize(
        "dtype,first,even,odd,expected",
        [
            (FP32, "wb", "b", "wb", (6.0, 16.0)),
            (BF16, "wb", "b", "b", (4.0, 16.0)),
            (BF16, "b", "w", "w", (4.0, 8.0)),
        ],
        name_fn=lambda dtype, *used: "_".join(used[:3]),
    )
    def test_microbatches_may_lack_gradients_that_were_deferred(
        self, dtype: torch.dtype, first: str, even: str, odd: str, expected: Any
    ):
        """On some ranks of a shard group or on all. Dtypes that were promoted stay so."""
        grads = {"w": 4.0, "b": 8.0}
        model = model_of({name: ((2 if name == "w" else 8,), dtype) for name in grads})
        model.w.grad_dtype = FP32
        fully_shard(model, mesh=hybrid_mesh(2))
        model.set_requires_all_reduce(False)
        backward(model, **{name: grads[name] for name in first})
        with utils.record_collectives() as recorder:
            backward(model)  # of its input alone
        if not IS_2_15:
            self.assertEqual(recorder.reduce_scatters, [])
        model.set_requires_all_reduce(True)
        last = odd if self.rank % 2 else even
        backward(model, **{name: grads[name] for name in last})
        found = full_grad(model.w)[0].item(), full_grad(model.b)[0].item()
        self.assertEqual(found, expected)

    def test_coalescing_is_not_changed_between_deferred_microbatches(self):
        model = fully_shard(model_of({"w": ((2,), FP32)}), mesh=hybrid_mesh(2))
        model.set_requires_all_reduce(False)
        backward(model, w=1.0)
        with self.assertRaisesRegex(RuntimeError, r"Grads'\] is deferred: call"):
            fsdp.set_coalesced_collectives(model, 0)

    def test_partial_reduce_that_a_plugin_sets_is_divided_as_well(self):
        policy, mesh = MixedPrecisionPolicy(grad_comm_dtype=BF16), hybrid_mesh(2)
        model = model_of({"w": ((2,), FP32)})
        fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
        output = torch.full((1,), 6.0, device=DEVICE_TYPE)
        comms.group_of(model)._partial_reduce_output = output
        backward(model, w=2.0)
        self.assertEqual(full_grad(model.w), torch.full((2,), 5.0).double())

    def test_units_whose_replicas_ran_others_are_not_joined(self):
        def grads(bucket_cap_mb: float | None) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE_TYPE)
            for unit in (*model, model):
                fully_shard(unit, mesh=hybrid_mesh(2))
            fsdp.set_reduce_bucket_cap(model, bucket_cap_mb)
            x = torch.ones(1, 4, device=DEVICE_TYPE)
            model(x).sum().backward()
            model.set_requires_all_reduce(False)
            model[self.rank // 2](x).sum().backward()
            model.set_requires_all_reduce(True)
            model(x).sum().backward()
            return [full_grad(param) for param in model.parameters()]

        self.assertEqual(grads(1.0), grads(None))

    USED = {"different": THREE_DIFFERENT, "all": [ALL] * 3, "fewer": [ALL, ALL, {4}]}

    @parametrize("used", USED)
    def test_what_others_prepare_is_kept_as_it_was_reduced(self, used: str):
        """Whichever parameters the next microbatch has, if any of them."""
        name = "_default_reduce_scatter_input_fn"
        with mock.patch.object(param_group, name, with_a_row_more):
            check_case(deferring(*self.USED[used]), DEVICE_TYPE)

    @parametrize("setter", ["set_requires_all_reduce", "set_requires_gradient_sync"])
    @parametrize("by_default", [False, True])
    def test_microbatches_add_up_in_a_wider_dtype(self, setter: str, by_default: bool):
        """The ``grad_dtype`` that users set: bf16 adds up 256, 1 and -256 to 0."""
        policy = MixedPrecisionPolicy(reduce_dtype=None if by_default else BF16)
        model = model_of({"p": ((4,), BF16), "q": ((4,), BF16)})
        for param in model.parameters():
            param.grad_dtype = FP32
        fully_shard(model, mesh=hybrid_mesh(2), mp_policy=policy)
        for i, value in enumerate((256.0, 1.0, -256.0)):
            getattr(model, setter)(i == 2)
            # The last microbatch leaves one out
            backward(model, **dict.fromkeys("pq" if i != 2 else "p", value))
        self.assertEqual(full_grad(model.p), torch.full((4,), 1.0).double())
        # 257, which bf16 rounds to 256 where it is what all ranks add
        in_fp32 = IS_2_15 and by_default
        expected = torch.full((4,), 257.0 if in_fp32 else 256.0).double()
        self.assertEqual(full_grad(model.q), expected)
        self.assertEqual(model.p.grad.dtype, FP32)

    @parametrize("is_frozen_at_first", [False, True])
    def test_the_first_microbatch_is_not_rounded(self, is_frozen_at_first: bool):
        """To the reduce dtype: bf16 rounds 257, fp16 and a wider ``grad_dtype`` do not."""
        policy = MixedPrecisionPolicy(reduce_dtype=BF16)
        model = model_of({"p": ((4,), FP16), "q": ((4,), FP16)})
        model.p.grad_dtype = FP32
        model.p.requires_grad_(not is_frozen_at_first)
        fully_shard(model, mesh=hybrid_mesh(2), mp_policy=policy)
        if is_frozen_at_first:
            backward(model, q=1.0)
            model.p.requires_grad_(True)
        for is_last, value in ((False, 257.0), (True, -256.0)):
            model.set_requires_gradient_sync(is_last)
            backward(model, p=value)
        self.assertEqual(full_grad(model.p), torch.full((4,), 1.0).double())

    def test_replaced_reduction_gets_the_arguments_of_the_release(self):
        own, calls = param_group.foreach_reduce, []

        def foreach_reduce(*args, **kwargs):
            calls.append((len(args), [*kwargs]))
            self.assertEqual(len(args[0]), len(args[1]))  # a gradient for each
            if not IS_2_15:  # `orig_dtype`, of all sharded gradients
                dtypes = [param.sharded_param.dtype for param in args[0]]
                is_one = all(dtype == dtypes[0] for dtype in dtypes)
                self.assertEqual(args[5], dtypes[0] if is_one else None)
            return tuple(own(*args, **kwargs))

        with mock.patch.object(param_group, "foreach_reduce", foreach_reduce):
            check_case(deferring(*THREE_DIFFERENT), DEVICE_TYPE)
        self.assertGreater(len(calls), 3)  # one for each bucket
        expected = (15, [])
        if IS_2_15:
            expected = (14, ["prepare_reduce_scatter_inputs"])
        self.assertEqual(calls, [expected] * len(calls))

    @parametrize("dtype", [BF16, FP16])
    def test_deferred_sums_may_become_wider(self, dtype: torch.dtype):
        """
        As since 2.15, where a gradient with a wider ``grad_dtype`` joins them. Also on a
        replica that has no earlier sum, by the same collectives.
        """
        sizes = {"a": (3, dtype), "b": (8, dtype), "c": (5, dtype), "d": (4, FP32)}
        model = model_of({name: ((n,), d) for name, (n, d) in sizes.items()})
        model.b.grad_dtype = FP32
        fully_shard(model, mesh=hybrid_mesh(2))
        model.set_gradient_divide_factor(8.0)  # of which fp16 divides 4 before the sum
        has_earlier = self.rank < 2
        model.set_requires_all_reduce(False)
        backward(model, **dict.fromkeys("acd" if has_earlier else "", 4.0))
        model.set_requires_all_reduce(True)
        with utils.record_collectives() as recorder:
            backward(model, **dict.fromkeys("dba" if has_earlier else "abcd", 1.0))
        reduced = [call.dtype for call in recorder.all_reduces]
        self.assertEqual(reduced, [FP32] if IS_2_15 else [FP32, dtype])
        found = [full_grad(param).unique().item() for param in model.parameters()]
        self.assertEqual(found, [1.5, 0.5, 1.25, 1.5])

    POLICIES = {
        "narrower": ({"reduce_dtype": FP32}, {"reduce_dtype": BF16}),
        "divided_before": ({"reduce_dtype": FP32}, {"reduce_dtype": FP16}),
        "not_divided_before": ({"reduce_dtype": FP16}, {"reduce_dtype": FP32}),
        "exchanged": ({"reduce_dtype": FP16}, {"grad_comm_dtype": BF16}),
    }

    @parametrize("change", POLICIES)
    @parametrize("factor", [None, 8.0])
    def test_reduce_dtype_may_change_before_all_reduce(self, change: str, factor: Any):
        model = model_of({"p": ((3,), FP32), "q": ((4,), FP32)})
        fully_shard(model, mesh=hybrid_mesh(2))
        model.set_gradient_divide_factor(factor)
        group, (first, second) = comms.group_of(model), self.POLICIES[change]
        for i, kwargs in enumerate((first, second, second)):
            for fsdp_param in group.fsdp_params[: 1 + (i == 2)]:  # one, then both
                fsdp_param.mp_policy = MixedPrecisionPolicy(**kwargs)
            group._cache.buckets.clear()
            model.set_requires_all_reduce(i == 2)
            backward(model, p=1.0, q=2.0)
        self.assertEqual(group._partial_reduces, {})
        mean = 12 / (factor or 4)
        self.assertEqual(full_grad(model.p), torch.full((3,), mean, dtype=FP64))
        self.assertEqual(full_grad(model.q), torch.full((4,), 2 * mean, dtype=FP64))


class TestBuffers(utils.FakeGroupTest):
    """How long inputs and reduced buffers live."""

    ranks = 4

    def test_reduced_buffers_beyond_the_limit_are_dropped_oldest_first(self) -> None:
        """Never the newest, which would keep compute waiting."""
        context = _fsdp_context.FSDPCommContext()
        sizes = 5, 0, 4, 3, 2, 7
        context.all_reduce_states = [
            _fsdp_context.Handoff((), None, (), None, nbytes) for nbytes in sizes
        ]
        group = SimpleNamespace(modules="a")
        for limit, kept in ((21, 6), (20, 5), (16, 5), (15, 3), (6, 1), (0, 1)):
            with mock.patch.object(_fsdp_context, "_MAX_HELD_NBYTES", limit):
                context.recycle_reduce_buffers(group)
            found = [held.nbytes for held in context.all_reduce_states]
            self.assertEqual(found, [*sizes[-kept:]])

    def test_a_unit_drops_its_last_buffer_before_it_reduces_again(self) -> None:
        """Also where events are None, as on a CPU."""
        mesh = comms.mesh_of(2, 2, device="cpu")
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        model.set_is_last_backward(False)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            held = comms.group_of(model[0]).comm_ctx.all_reduce_states
            self.assertEqual(len(held), 2)

    def test_inputs_of_one_module_are_held_in_any_order_of_its_groups(self) -> None:
        """It has one for each mesh, and autograd may run them in any order."""

        def held(groups: Iterable[Any]) -> list[int]:
            context, counts = _fsdp_context.FSDPCommContext(), []
            context.device_handle = torch.cpu
            for group in groups:
                context.recycle_reduce_buffers(group)
                state = (), None, (torch.cpu.current_stream(),), group
                states = context.reduce_scatter_states
                states.append(_fsdp_context.Handoff(*state))
                counts.append(len(states))
            return counts

        names, count = "abc", range(3)
        groups = {
            (name, i): SimpleNamespace(modules=name, index=i, _module_fqn=name)
            for name in names
            for i in count
        }
        for order in itertools.permutations(count):
            with self.subTest(order=order):
                for modules in (names * 2, names[0] * 2):
                    ran = [groups[name, i] for name in modules for i in order]
                    self.assertEqual(held(ran), [1, 2, 3] * len(modules))
                # The first one of all modules at the end of backward
                early = [groups[name, i] for name in names for i in order[1:]]
                late = [groups[name, order[0]] for name in names[::-1]]
                self.assertEqual(held(early + late), [1, 2] * 3 + [3, 1, 1])

    def test_reduced_buffers_count_unless_gradients_view_them(self) -> None:
        """Gradients do not where they are cast, or added to existing ones."""
        context, counted = _fsdp_context.FSDPCommContext, []
        hold = context._hold_reduce_buffers

        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            hold(self, *args, **kwargs)
            counted.append(self.all_reduce_states[-1].nbytes)

        with mock.patch.object(context, "_hold_reduce_buffers", noting):
            for dtype in (None, FP32):
                policy = MixedPrecisionPolicy(reduce_dtype=dtype)
                model = model_of({"p": ((256,), BF16)})
                mesh = comms.mesh_of(2, 2, device="cpu")
                fully_shard(model, mesh=mesh, mp_policy=policy)
                for _ in range(2):
                    backward(model, p=1.0)
        self.assertEqual(counted, [0, 256, 512, 512])

    def test_assigned_partial_reduce_must_be_one_of_the_unit(self) -> None:
        """A plugin's own sum, see ``_partial_reduce_output``."""
        model = model_of({"p": ((8,), FP32)})
        fully_shard(model, mesh=comms.mesh_of(2, 2, device="cpu"))
        group = comms.group_of(model)
        for dtype, numel in ((BF16, 4), (FP32, 5)):
            text = f"_partial_reduce_output of unit .* got {numel} elements of {dtype}"
            text += ", but the unit reduces 4 of torch.float32"
            with self.subTest(dtype=dtype), self.assertRaisesRegex(ValueError, text):
                group._partial_reduce_output = torch.zeros(numel, dtype=dtype)
        self.assertIsNone(group._partial_reduce_output)
        output = group._partial_reduce_output = torch.zeros(4)
        self.assertIs(group._partial_reduce_output, output)


if __name__ == "__main__":
    run_tests()
