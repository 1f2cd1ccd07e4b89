# Owner(s): ["oncall: distributed"]
"""A unit's all-gather: what is sent and copied out, and what is kept of it."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common import comms, utils
from fsdp_helpers.common.comms import BF16, FP8, FP16, FP32, FP64, Spec, ThreadTest
from fsdp_helpers.common.release_rules import IS_2_15

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_grads as grads_file
from torch.distributed.fsdp._fully_shard._fsdp_layout import GatherLayout, ReduceBucket
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_cache import ParamGroupCache
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.quick


class TestAllGather(ThreadTest):
    world_size = 3

    def gather_in_parameter_order(self, unit: FSDPParamGroup) -> Any:
        """Makes a result of six fields, as a plugin's gather would."""
        inputs = [tensor for p in unit.fsdp_params for tensor in p.all_gather_inputs]
        pieces = [*map(utils.as_bytes, inputs)]
        mine = torch.cat(pieces)
        output = mine.new_empty(self.world_size * mine.numel())
        dist.all_gather_single(output, mine, group=unit.mesh_info.shard_process_group)
        of_inputs = [[t.dtype] for t in inputs], [[t.numel()] for t in inputs]
        sizes = [piece.numel() for piece in pieces]
        return collectives.AllGatherResult(output, None, None, *of_inputs, sizes)

    @parametrize("is_ambiguous", [False, True])
    def test_any_gathers_take_turns(self, is_ambiguous: bool) -> None:
        """The branch's, a plugin's, and a copy of the result."""
        ways = (
            self.all_gather,
            self.gather_in_parameter_order,
            lambda unit: collectives.AllGatherResult(*self.all_gather(unit)),
        )
        specs = comms.mixed_specs(self.world_size)
        if is_ambiguous:  # their sizes are the same in both orders
            specs = [Spec((6,), BF16), Spec((3,), FP32)]
        unit, factor = self.unit(specs), 1
        for gather in ways * 2:
            self.copy_out(unit, gather(unit))
            for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, specs)):
                how = {"dtype": spec.dtype, "device": utils.THREAD_DEVICE_TYPE}
                expected = utils.random_input(*spec.size, seed=i, **how) * factor
                self.assert_same(fsdp_param.unsharded_param, expected)
                # As an optimizer changes shards
                fsdp_param.to_unsharded()
                fsdp_param.to_sharded()
                fsdp_param._sharded_param_data.mul_(-2)
            factor *= -2

    def test_an_extension_may_gather_other_inputs_than_before(self):
        """As a weight that is quantized by row in forward, and by column in backward."""
        unit = self.unit([Spec((3,), FP32), Spec((6, 2), BF16), Spec((5,), FP16)])
        extended = unit.fsdp_params[1]
        local = extended._sharded_local_tensor
        inputs: list[torch.Tensor] = []
        local.fsdp_pre_all_gather = lambda mesh: ((*inputs,), None)
        local.fsdp_post_all_gather = None
        extended._init_extensions()
        unit._cache = ParamGroupCache(unit.fsdp_params)  # as lazy init does
        self.assertTrue(unit._cache._has_extensions)  # also if a plugin gathers
        group = unit.mesh_info.shard_process_group
        for dtypes, numel in (((FP8, FP64), 4), ((FP8,), 2), ((FP64, FP8), 2)):
            inputs[:] = [
                torch.full((numel,), self.rank + 1.0, device=self.device).to(dtype)
                for dtype in dtypes
            ]
            result = self.all_gather(unit)
            found = result.param_all_gather_input_dtypes
            self.assertEqual(found, [[FP32], [*dtypes], [FP16]])
            collectives.foreach_all_gather_copy_out(
                result, unit.fsdp_params, group, cache=unit._cache
            )
            rows = [rank + 1.0 for rank in range(3) for _ in range(numel)]
            for output in extended.all_gather_outputs:
                self.assertEqual(output.float().tolist(), rows)
        plain = unit.fsdp_params[0]
        plain.init_unsharded_param()
        values = utils.random_input(3, seed=0).to(self.device)
        self.assert_same(plain.unsharded_param, values)

    @parametrize("dtypes", [(FP32, torch.uint8, BF16), (torch.uint8, FP32, FP8)])
    @parametrize("is_single", [False, True])
    def test_an_extension_may_view_the_same_bytes_in_another_dtype(
        self, dtypes: Sequence[torch.dtype], is_single: bool
    ) -> None:
        """Its post hook gets the dtype of the first call, as in the release."""
        values = utils.random_input(3, 4, seed=0).to(self.device)
        layer = nn.Linear(4, 3, bias=False, device=self.device)
        layer.weight.data.copy_(values)
        single = comms.mesh_of(self.world_size, 1)["shard"]
        fully_shard(layer, mesh=single if is_single else self.mesh())
        shard, views, made_in = layer.weight._local_tensor, [*dtypes], []

        @torch.no_grad()
        def post(outputs: Any, *args: Any, out: Any = None) -> Any:
            made_in.append(outputs[0].dtype)
            weight = outputs[0].view(-1).view(FP32).view(3, 4)
            if out is None:
                return weight.clone(), ()
            out.data.copy_(weight)

        flat = shard.view(-1)
        shard.fsdp_pre_all_gather = lambda mesh: ((flat.view(views.pop(0)),), None)
        shard.fsdp_post_all_gather = post
        for _ in dtypes:
            layer.unshard()
            self.assert_same(layer.weight.detach(), values)
            layer.reshard()
        self.assertEqual(made_in, [dtypes[0]] * len(dtypes))

    @parametrize("param_dtype,number", [(None, 1), (BF16, 3)])
    def test_copies_do_not_multiply_with_parameters(
        self, param_dtype: torch.dtype | None, number: int
    ) -> None:
        """One copy-out, and one copy-in, or one by dtypes if any is cast."""
        specs = [Spec((4,), dtype) for dtype in (BF16, FP32, FP16)] * 9
        unit = self.unit(specs, mp_policy=comms.policy_of(param_dtype))
        with comms.count_operators() as counts:
            result = self.all_gather(unit, all_gather_comm=comms.NoGather())
        copies = ("aten::cat", "aten::_foreach_copy_", "aten::copy_")
        found = {op: counts[op] for op in copies if counts[op]}
        self.assertEqual(found, {copies[param_dtype is not None]: number})
        with comms.count_operators() as counts:
            self.copy_out(unit, result)
        self.assertEqual(counts["aten::split_with_sizes_copy"], 1)
        self.assertEqual(counts["aten::copy_"], 0)


class TestSmallerMesh(ThreadTest):
    world_size = 4

    def test_a_gather_is_copied_out_over_the_ranks_that_it_came_from(self):
        """Also if a state dict reshards it first: these pieces are flat."""
        full = torch.arange(64.0, device=self.device).view(8, 8)
        model = nn.Linear(8, 8, bias=False, device=self.device)
        model.weight.data.copy_(full)
        columns = {"shard_placement_fn": lambda _: Shard(1)}
        fully_shard(model, mesh=self.mesh(), reshard_after_forward=2, **columns)
        model(full)
        unit = comms.group_of(model)
        self.assertTrue(unit.is_sharded_post_forward)
        handle = model.unshard(async_op=True)
        model.state_dict()
        self.assertTrue(unit.is_sharded)
        handle.wait()
        self.assert_same(model.weight.detach(), full)
        self.assertIsNone(unit._all_gather_group)
        model.reshard()
        self.assert_same(model(full).detach(), full @ full.T)


class TestKeptBetweenSteps(ThreadTest):
    """A step's caches serve the next step, unless something they depend on changed."""

    world_size = 3
    SPECS = (Spec((5, 3), BF16), Spec((4,), FP32), Spec((7,), FP32))

    def layout(self, unit: FSDPParamGroup) -> GatherLayout:
        return self.all_gather(unit).all_gather_input_split_sizes.layout

    def test_layout_follows_what_it_was_made_of(self):
        unit = self.unit(self.SPECS)
        param = unit.fsdp_params[1]

        changes = (
            lambda data: setattr(param, "_sharded_param_data", data.half()),
            lambda data: setattr(param, "_sharded_param_data", data.repeat(2)),
            lambda data: param.init_dtype_attrs(comms.policy_of(BF16)),
        )
        layouts = [self.layout(unit)]
        for change in changes:
            change(param._sharded_param_data)
            layouts.append(self.layout(unit))
            unit.lazy_init()  # as an explicit unshard does
            self.assertIs(self.layout(unit), layouts[-1])
        of_param = [
            next((r.dtype, n) for r in layout.regions for i, n in r.slots if i == 1)
            for layout in layouts
        ]
        self.assertEqual(of_param, [(FP32, 2), (FP16, 2), (FP16, 4), (BF16, 4)])

    def test_buckets_are_planned_once_for_each_pattern_of_gradients(self):
        unit = self.unit(self.SPECS)
        unit._module_fqn = ""  # as the root's lazy init sets it
        unit.lazy_init()
        patterns = [(BF16, FP32, FP32), (BF16, None, FP32), (FP32, FP32, FP32)]

        def buckets(pattern) -> tuple[ReduceBucket, ...]:
            specs = zip(self.SPECS, pattern)
            grads = [d and torch.empty(spec.size, dtype=d) for spec, d in specs]
            return grads_file.PartialReduces().plan(unit._cache, grads, defers=False)

        found = [buckets(pattern) for pattern in patterns]
        members = [[[slot.param for slot in b.slots] for b in each] for each in found]
        # The last has an fp32 gradient for the bf16 parameter
        last = [[1, 2], [0]] if IS_2_15 else [[1, 2, 0]]
        self.assertEqual(members, [[[1, 2], [0]], [[2], [0]], last])
        unit.lazy_init()  # as an explicit unshard does
        for pattern, first in zip(patterns, found):
            self.assertIs(buckets(pattern), first)
        unit.fsdp_params[1].sharded_param.grad_dtype = BF16
        unit.lazy_init()
        for pattern, first in zip(patterns, found):
            self.assertIsNot(buckets(pattern), first)
        unit._cache.buckets.clear()
        most = grads_file._MAX_CACHED_PATTERNS
        many = list(itertools.product((None, FP16, BF16, FP32), repeat=3))
        self.assertGreater(len(many), most)
        for pattern in many:
            buckets(pattern)
            self.assertLessEqual(len(unit._cache.buckets), most)


class Listening(nn.Module):
    """Wants to know which parameters it is given."""

    def __init__(self, param: nn.Parameter):
        super().__init__()
        self.given: list[nn.Parameter] = []
        self.listened = param

    def __setattr__(self, name: str, value: object) -> None:
        if name == "listened":
            self.given.append(value)
        super().__setattr__(name, value)


class Affine(nn.Module):
    """A copy without casts views the shard of ``bias`` in bf16."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size, dtype=BF16))
        self.bias = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype) + self.bias


class TestExplicitUnshard(utils.FakeGroupTest):
    ranks = 2

    def test_each_name_of_a_parameter_is_given_its_states(self) -> None:
        linear = nn.Linear(4, 4)
        listening = Listening(linear.weight)
        model = fully_shard(nn.Sequential(linear, listening), mesh=self.mesh)
        sharded = linear.weight
        for _ in range(2):
            model.unshard()
            unsharded = linear.weight
            self.assertIs(listening.listened, unsharded)
            del listening.given[:-1]
            model.reshard()
            self.assertIs(linear.weight, sharded)
            self.assertEqual([*map(id, listening.given)], [id(unsharded), id(sharded)])

    @parametrize("change", ["load", "to", "to after an error", "reset"])
    def test_a_replaced_shard_is_freed_at_once(self, change: str) -> None:
        """Not at the next gather: users move models off a device to free it."""
        model = fully_shard(Affine(), mesh=self.mesh, reshard_after_forward=True)
        model(torch.zeros(8)).sum().backward()
        model.zero_grad()
        shard = StorageWeakRef(model.bias.to_local().untyped_storage())
        state = {k: v + 1 for k, v in model.state_dict().items()}
        if change == "load":
            model.load_state_dict(state, assign=True)
        elif change == "reset":
            for name, fsdp_param in zip(state, comms.group_of(model).fsdp_params):
                model._parameters[name] = nn.Parameter(state[name])
                fsdp_param.reset_sharded_param()
        else:
            if change == "to after an error":
                with self.assertRaises(RuntimeError):
                    model(torch.zeros(7))
            model.to(FP64)
        del state
        self.assertTrue(shard.expired())

    @parametrize("is_dense", [False, True])
    @parametrize("size", [2, 8])
    def test_a_gather_sends_what_shards_are(self, is_dense: bool, size: int) -> None:
        model = fully_shard(Affine(size), mesh=self.mesh)
        for start in (1.0, 5.0):
            shard = torch.ones(size // 2, 2)[:, 0]
            shard = shard.clone() if is_dense else shard
            bias = DTensor.from_local(shard, self.mesh, [Shard(0)], run_check=False)
            model.load_state_dict({"bias": bias}, assign=True, strict=False)
            for value in (start, start + 1, start + 2):
                shard.fill_(value)
                output = model(torch.zeros(size, requires_grad=True))
                self.assertEqual(output.tolist(), [value] * size)
                output.sum().backward()
                model.zero_grad()
        _, bias = comms.group_of(model).fsdp_params
        bias._sharded_param_data.data = torch.full((size // 2,), 9.0)
        self.assertEqual(model(torch.zeros(size)).tolist(), [9.0] * size)

    def test_requires_grad_may_change_in_each_state(self) -> None:
        model = fully_shard(Affine(), mesh=self.mesh)
        for flag in (False, True, True, False):
            model.bias.requires_grad_(not flag)
            model.unshard()
            self.assertEqual(model.bias.requires_grad, not flag)
            model.bias.requires_grad_(flag)
            unsharded = model.bias
            model.reshard()
            self.assertEqual(model.bias.requires_grad, flag)
            unsharded.requires_grad_(not flag)  # is not the module's parameter now
            model.unshard()
            self.assertEqual(model.bias.requires_grad, flag)
            model.reshard()

    def test_modules_that_are_equal_have_their_own_parameters(self) -> None:
        class Same(nn.Linear):
            __eq__ = lambda self, other: type(other) is Same  # noqa: E731
            __hash__ = lambda self: 1  # noqa: E731

        pair = nn.Sequential(Same(4, 4), Same(4, 4))
        pair[1].weight = pair[0].weight
        fully_shard(pair, mesh=self.mesh)
        pair.unshard()
        self.assertEqual({type(p.data) for p in pair.parameters()}, {torch.Tensor})
        self.assertIs(pair[0].weight, pair[1].weight)

    def test_inputs_of_a_fake_gather_are_not_held(self) -> None:
        model = fully_shard(Affine(), mesh=self.mesh)
        group = comms.group_of(model)
        group.lazy_init()
        with FakeTensorMode(allow_non_fake_inputs=True):
            group._get_cache().prepare_gather().make_sources()
        model.unshard()
        self.assertEqual(model.bias[:4].tolist(), [1.0] * 4)

    @parametrize("has_own", [False, True])
    def test_an_explicit_unshard_reads_what_has_changed(self, has_own: bool) -> None:
        """A parameter's dtypes are read once, if it has a policy of its own as well."""
        dtypes: Any = {"param_dtype": BF16}
        if has_own:
            dtypes = {"reduce_dtype": FP32, "param_dtype_override_fn": lambda _: BF16}
        policy = MixedPrecisionPolicy(**dtypes)
        model = fully_shard(nn.Linear(4, 4), mesh=self.mesh, mp_policy=policy)
        group = comms.group_of(model)
        params, read = group.fsdp_params, FSDPParam.init_dtype_attrs
        changes = (
            partial(setattr, model.bias, "grad_dtype", BF16),
            partial(setattr, model.bias, "grad_dtype", FP32),
            partial(model.requires_grad_, False),
            partial(setattr, group, "mp_policy", MixedPrecisionPolicy(BF16, FP32)),
        )
        noting = mock.Mock(side_effect=read)

        def reads_of(run: Callable[..., Any], *args: Any) -> list[Any]:
            noting.reset_mock()
            run(*args)
            model.reshard()
            return [call.args[0] for call in noting.call_args_list]

        with mock.patch.object(FSDPParam, "init_dtype_attrs", lambda *a: noting(*a)):
            self.assertEqual(reads_of(model, torch.ones(1, 4, dtype=BF16)), params)
            for change in changes:
                self.assertEqual(reads_of(model.unshard), [])
                change()
                self.assertEqual(reads_of(model.unshard), params)
            with mock.patch.object(FSDPParamGroup, "_init_mp_dtypes") as replaced:
                model.unshard()
                model.unshard()
            self.assertEqual(replaced.call_count, 2)
            # What replaced it may have set anything
            self.assertEqual(reads_of(model.unshard), params)
            model.to("meta")
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, "materialized"):
                    model.unshard()


if __name__ == "__main__":
    run_tests()
