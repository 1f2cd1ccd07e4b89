# Owner(s): ["oncall: distributed"]
"""
What moves: all-gather and reduce-scatter of a unit against plain references,
how many collectives there are and how many bytes they carry, and by what
gradients are divided.
"""

import contextlib
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp_test_utils import (
    BACKEND,
    BASE_ROOT,
    Collective,
    DEVICE_TYPE,
    DeviceFreeTest,
    FSDPProcessTest,
    FSDPThreadTest,
    mixed_model,
    op_name,
    random_input,
    record_collectives,
    run_python,
    shard_blocks,
    shard_mesh,
    THREAD_DEVICE_TYPE,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import (
    _get_device_handle,
    DeviceMesh,
    init_device_mesh,
)
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
    AllGatherResult,
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_layout import GatherLayout
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8, INT64 = torch.float8_e4m3fn, torch.int64
# Integers up to here, of at most 64 ranks, sum up exactly in any order, in the
# gradients' own dtype or in one that holds more
EXACT = {BF16: 4, FP16: 4, FP32: 4000, FP64: 4000}


@dataclass(frozen=True)
class Spec:
    """A parameter of a test."""

    size: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int = 0

    def shard(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Returns a rank's part of ``full``, none of which is padding."""
        chunks = full.chunk(ranks, dim=self.shard_dim)
        return chunks[rank] if rank < len(chunks) else full.narrow(0, 0, 0)

    def padded_shard_numel(self, ranks: int) -> int:
        rows = self.size[self.shard_dim]
        return math.ceil(rows / ranks) * math.prod(self.size) // rows


def mixed_specs(ranks: int) -> list[Spec]:
    """Uneven, 1-element and empty shards, in no order of dtypes."""
    return [
        Spec((5, 3), BF16),
        Spec((1,), FP32),
        Spec((3, 2 * ranks), FP16, shard_dim=1),
        Spec((7,), FP32),
        Spec((ranks + 1, 2), FP64),
        Spec((4, 2, ranks), BF16, shard_dim=2),
        Spec((2 * ranks, 2), FP32),
    ]


class Weighted(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, specs: Sequence[Spec], device: str):
        super().__init__()
        self.specs = specs
        for i, spec in enumerate(specs):
            value = random_input(*spec.size, seed=i, dtype=spec.dtype, device=device)
            param = nn.Parameter(value, requires_grad=spec.dtype.is_floating_point)
            self.register_parameter(f"p{i}", param)

    def forward(self, weights: Sequence[torch.Tensor | None]) -> torch.Tensor:
        terms = [
            (param.to(weight.dtype) * weight).sum().double()
            for param, weight in zip(self.parameters(), weights)
            if weight is not None
        ]
        return torch.stack(terms).sum()


def sharded(
    specs: Sequence[Spec], mesh: DeviceMesh, *, device: str, **kwargs: Any
) -> Weighted:
    """Returns a unit of these parameters, the same on every rank."""
    module = Weighted(specs, device)
    dims = {id(p): spec.shard_dim for p, spec in zip(module.parameters(), specs)}
    placements = {i: Shard(dim) for i, dim in dims.items()}
    return fully_shard(
        module,
        mesh=mesh,
        shard_placement_fn=lambda param: placements[id(param)],
        **kwargs,
    )


def policy_of(
    param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def group_of(module: nn.Module) -> FSDPParamGroup:
    return module._get_fsdp_state()._fsdp_param_group


def integers(
    size: Sequence[int], limit: int, *, seed: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-limit, limit + 1, tuple(size), generator=generator)
    return values.to(device, dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class ThreadTest(FSDPThreadTest):
    """Calls into the collectives directly, on a unit of this thread's rank."""

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(THREAD_DEVICE_TYPE, (self.world_size,))

    def unit(self, specs: Sequence[Spec], **kwargs: Any) -> FSDPParamGroup:
        module = sharded(specs, self.mesh(), device=THREAD_DEVICE_TYPE, **kwargs)
        group = group_of(module)
        group.lazy_init()
        for i, fsdp_param in enumerate(group.fsdp_params):
            fsdp_param._param_fqn = f"p{i}"
        return group

    @property
    def stream(self) -> torch.Stream:
        # One stream for all: the threads' collectives know of no other
        return _get_device_handle(THREAD_DEVICE_TYPE).current_stream()

    def assert_same(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.assertEqual(actual.dtype, expected.dtype)
        self.assertEqual(actual.size(), expected.size())
        self.assertTrue(torch.equal(as_bytes(actual), as_bytes(expected)))

    # All-gather
    def all_gather(
        self, unit: FSDPParamGroup, params: list | None = None, **changes: Any
    ) -> AllGatherResult:
        arguments = {
            "fsdp_params": unit.fsdp_params if params is None else params,
            "group": unit.mesh_info.shard_process_group,
            "async_op": False,
            "all_gather_copy_in_stream": self.stream,
            "all_gather_stream": self.stream,
            "device": self.device,
            "all_gather_comm": DefaultAllGather(),
        }
        return foreach_all_gather(**(arguments | changes))

    def copy_out(self, unit: FSDPParamGroup, result: AllGatherResult) -> None:
        group = unit.mesh_info.shard_process_group
        foreach_all_gather_copy_out(result, unit.fsdp_params, group)
        for fsdp_param in unit.fsdp_params:
            fsdp_param.init_unsharded_param()

    def assert_unsharded(
        self, unit: FSDPParamGroup, specs: Sequence[Spec], dtype: Any = None
    ) -> None:
        for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, specs)):
            full = random_input(
                *spec.size, seed=i, dtype=spec.dtype, device=THREAD_DEVICE_TYPE
            )
            casts = dtype is not None and spec.dtype.is_floating_point
            expected = full.to(dtype) if casts else full
            self.assert_same(fsdp_param.unsharded_param, expected)

    # Reduce
    def grad(self, rank: int, i: int, spec: Spec, dtype, limit=None) -> torch.Tensor:
        """Returns the gradient of the ``i``-th parameter on ``rank``."""
        limit = EXACT[dtype] if limit is None else limit
        how = {"dtype": dtype, "device": THREAD_DEVICE_TYPE}
        return integers(spec.size, limit, seed=1000 * rank + i, **how)

    def grads(
        self, specs: Sequence[Spec], dtypes: Sequence[torch.dtype], **how: Any
    ) -> list[torch.Tensor]:
        pairs = enumerate(zip(specs, dtypes, strict=True))
        return [self.grad(self.rank, i, s, dtype, **how) for i, (s, dtype) in pairs]

    def mean_shard(
        self, i: int, spec: Spec, dtype, reduce_dtype, divisor=None, **how: Any
    ) -> torch.Tensor:
        """Returns this rank's part of what the gradients are reduced to."""
        ranks = range(self.world_size)
        parts = [self.grad(rank, i, spec, dtype, **how) for rank in ranks]
        total = torch.stack(parts).to(reduce_dtype).double().sum(0).to(reduce_dtype)
        mean = total / (self.world_size if divisor is None else divisor)
        return spec.shard(mean.to(spec.dtype), self.rank, self.world_size)

    def reduce_arguments(
        self, unit: FSDPParamGroup, grads: list[torch.Tensor], **changes: Any
    ) -> dict[str, Any]:
        """Returns what the base takes, in its order."""
        arguments = {
            "fsdp_params": [*unit.fsdp_params],
            "unsharded_grads": grads,
            "reduce_scatter_group": unit.mesh_info.shard_process_group,
            "reduce_scatter_stream": self.stream,
            "reduce_scatter_comm": DefaultReduceScatter(),
            "orig_dtype": None,
            "reduce_dtype": None,
            "device": self.device,
            "gradient_divide_factor": None,
            "all_reduce_group": None,
            "all_reduce_stream": self.stream,
            "all_reduce_grads": True,
            "partial_reduce_output": None,
            "all_reduce_hook": None,
            "force_sum_reduction_for_comms": False,
        }
        if unknown := changes.keys() - arguments.keys():
            raise AssertionError(f"No such arguments: {unknown}")
        return arguments | changes

    def reduce(self, unit: FSDPParamGroup, grads: list[torch.Tensor], **changes: Any):
        return foreach_reduce(**self.reduce_arguments(unit, grads, **changes))

    def assert_reduced(
        self, unit, specs, dtypes, reduce_dtype, *, times: int = 1, **how: Any
    ) -> None:
        for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, specs)):
            expected = self.mean_shard(i, spec, dtypes[i], reduce_dtype, **how)
            expected = sum([expected] * (times - 1), start=expected)
            grad = fsdp_param.sharded_param.grad
            self.assertEqual(grad.size(), spec.size)
            self.assert_same(grad.to_local(), expected)


class GatherAndReduceTests:
    """Run at every world size."""

    def test_gathers_parameters_of_several_dtypes(self):
        specs = mixed_specs(self.world_size)
        unit = self.unit(specs)
        self.copy_out(unit, self.all_gather(unit))
        self.assert_unsharded(unit, specs)

    def test_gathers_in_the_compute_dtype(self):
        specs = [*mixed_specs(self.world_size), Spec((3,), INT64)]
        unit = self.unit(specs, mp_policy=policy_of(BF16))
        self.copy_out(unit, self.all_gather(unit))
        self.assert_unsharded(unit, specs, BF16)

    def test_reduces_gradients_of_several_dtypes_in_one(self):
        """Into parameters of several storage dtypes."""
        specs = mixed_specs(self.world_size)
        dtypes = [FP32, BF16, FP16, FP32, FP64, BF16, BF16]
        unit = self.unit(specs)
        self.reduce(unit, self.grads(specs, dtypes), reduce_dtype=FP32)
        self.assert_reduced(unit, specs, dtypes, FP32)

    def test_reduces_each_dtype_by_itself(self):
        for dtype in (FP32, BF16, FP16, FP64):
            specs = [
                Spec((5, 3), dtype),
                Spec((1,), dtype),
                Spec((2, self.world_size), dtype, shard_dim=1),
            ]
            unit = self.unit(specs)
            grads = self.grads(specs, [dtype] * 3, limit=4)
            self.reduce(unit, grads, orig_dtype=dtype)
            self.assert_reduced(unit, specs, [dtype] * 3, dtype, limit=4)


class TestOn2Ranks(GatherAndReduceTests, ThreadTest):
    world_size = 2


class TestOn8Ranks(GatherAndReduceTests, ThreadTest):
    world_size = 8


class TestOn64Ranks(GatherAndReduceTests, ThreadTest):
    world_size = 64


class TestOn3Ranks(GatherAndReduceTests, ThreadTest):
    """Three divides no size evenly, and no sum exactly."""

    world_size = 3


class TestAllGather(ThreadTest):
    world_size = 3

    def test_takes_base_arguments_by_position_and_a_plain_list(self):
        specs = mixed_specs(self.world_size)
        unit = self.unit(specs)
        group = unit.mesh_info.shard_process_group
        params, stream = [*unit.fsdp_params], self.stream
        result = foreach_all_gather(
            params, group, False, stream, stream, self.device, DefaultAllGather()
        )
        foreach_all_gather_copy_out(result, params, group)
        for fsdp_param in params:
            fsdp_param.init_unsharded_param()
        self.assert_unsharded(unit, specs)

    def test_result_has_six_fields(self):
        specs = [Spec((5, 3), BF16), Spec((1,), FP32), Spec((4,), BF16)]
        unit = self.unit(specs)
        output, _, work, dtypes, numels, sizes = self.all_gather(unit)
        self.assertIsNone(work)
        self.assertEqual(dtypes, [[BF16], [FP32], [BF16]])
        self.assertEqual(numels, [[6], [1], [2]])
        # fp32 first, then bf16 in parameter order: 20 bytes and a padding of none
        self.assertEqual((output.dtype, output.numel()), (torch.uint8, 60))
        self.assertEqual(sizes, [4, 12, 4, 0])

    def test_uniform_result_is_laid_out_as_the_base_does(self):
        specs = [Spec((5, 3), BF16), Spec((1,), BF16), Spec((4,), BF16)]
        unit = self.unit(specs)
        result = self.all_gather(unit)
        self.assertEqual(result.all_gather_input_split_sizes, [6, 1, 2])
        own = torch.cat([p._sharded_param_data for p in unit.fsdp_params])
        row = result.all_gather_output.view(3, 9)[self.rank]
        self.assert_same(row, own)

    def gather_in_parameter_order(self, unit: FSDPParamGroup) -> AllGatherResult:
        """Makes a result of six fields, as somebody else's gather would."""
        inputs = [fsdp_param.all_gather_inputs for fsdp_param in unit.fsdp_params]
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
        numels = [[tensor.numel() for tensor in tensors] for tensors in inputs]
        pieces = [*itertools.chain(*inputs)]
        if len({*itertools.chain(*dtypes)}) > 1:
            pieces = [as_bytes(piece) for piece in pieces]
        mine = torch.cat(pieces)
        output = mine.new_empty(self.world_size * mine.numel())
        group = unit.mesh_info.shard_process_group
        dist.all_gather_single(output, mine, group=group)
        sizes = [piece.numel() for piece in pieces]
        return AllGatherResult(output, None, None, dtypes, numels, sizes)

    def test_copies_out_what_somebody_else_gathered_in_parameter_order(self):
        for policy in (policy_of(), policy_of(FP16)):
            # The second's sizes are the same in both orders
            for specs in (mixed_specs(self.world_size), self.ambiguous_specs()):
                unit = self.unit(specs, mp_policy=policy)
                self.copy_out(unit, self.gather_in_parameter_order(unit))
                self.assert_unsharded(unit, specs, policy.param_dtype)

    def ambiguous_specs(self) -> list[Spec]:
        size = self.world_size
        return [Spec((2 * size,), BF16), Spec((size,), FP32)]

    def test_own_and_other_gathers_take_turns(self):
        specs = [Spec((5, 3), BF16), Spec((4,), FP32), Spec((9,), FP16)]
        unit = self.unit(specs)
        for factor, is_own in ((1, True), (-2, False), (4, True), (-8, False)):
            gather = self.all_gather if is_own else self.gather_in_parameter_order
            self.copy_out(unit, gather(unit))
            self.assert_scaled(unit, specs, factor)
            self.reshard_scaled(unit)

    def test_copies_out_to_where_the_outputs_are_now(self):
        specs = [Spec((5, 3), BF16), Spec((4,), FP32), Spec((9,), FP16)]
        unit = self.unit(specs)
        for factor in (1, -2, 4):
            self.copy_out(unit, self.all_gather(unit))
            self.assert_scaled(unit, specs, factor)
            self.reshard_scaled(unit)
            for fsdp_param in unit.fsdp_params:
                fsdp_param.all_gather_outputs = []
                del fsdp_param._unsharded_param

    def test_copies_out_a_copy_of_its_own_result(self):
        for policy in (policy_of(), policy_of(FP16)):
            specs = mixed_specs(self.world_size)
            unit = self.unit(specs, mp_policy=policy)
            self.copy_out(unit, AllGatherResult(*self.all_gather(unit)))
            self.assert_unsharded(unit, specs, policy.param_dtype)

    def test_buffer_that_is_not_aligned_is_an_error_that_names_the_comm(self):
        class Shifted(DefaultAllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size[0] + 1, dtype=dtype, device=device)[1:]

        mixed = self.unit([Spec((3,), BF16), Spec((6,), FP32)])
        with self.assertRaisesRegex(ValueError, "Shifted.*aligned to 4 bytes"):
            self.all_gather(mixed, all_gather_comm=Shifted())
        specs = [Spec((3,), BF16), Spec((6,), BF16)]
        uniform = self.unit(specs)
        self.copy_out(uniform, self.all_gather(uniform, all_gather_comm=Shifted()))
        self.assert_unsharded(uniform, specs)

    def test_next_gather_takes_new_values_into_the_same_outputs(self):
        mixed = mixed_specs(self.world_size)
        on_dim_0 = [spec for spec in mixed if spec.shard_dim == 0]
        for specs in (mixed, on_dim_0):
            unit = self.unit(specs)
            self.copy_out(unit, self.all_gather(unit))
            before = [fsdp_param.unsharded_param for fsdp_param in unit.fsdp_params]
            versions = [param._version for param in before]
            for factor in (-2, 4, -8):
                self.reshard_scaled(unit)
                self.copy_out(unit, self.all_gather(unit))
                self.assert_scaled(unit, specs, factor)
            for fsdp_param, param in zip(unit.fsdp_params, before, strict=True):
                self.assertIs(fsdp_param.unsharded_param, param)
            # Autograd must not take it for a change of what it saved
            self.assertEqual([param._version for param in before], versions)

    def reshard_scaled(self, unit: FSDPParamGroup) -> None:
        """Doubles the shards and turns their sign, as an optimizer would."""
        for fsdp_param in unit.fsdp_params:
            fsdp_param.to_unsharded()
            fsdp_param.to_sharded()
            fsdp_param._sharded_param_data.mul_(-2)

    def assert_scaled(self, unit, specs: Sequence[Spec], factor: int) -> None:
        for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, specs)):
            how = {"dtype": spec.dtype, "device": THREAD_DEVICE_TYPE}
            expected = random_input(*spec.size, seed=i, **how) * factor
            self.assert_same(fsdp_param.unsharded_param, expected)

    def test_layout_follows_a_changed_compute_dtype(self):
        specs = mixed_specs(self.world_size)
        unit = self.unit(specs)
        self.assertEqual(self.all_gather(unit).all_gather_output.dtype, torch.uint8)
        for fsdp_param in unit.fsdp_params:
            fsdp_param.init_dtype_attrs(policy_of(BF16))
        result = self.all_gather(unit)
        self.assertEqual(result.all_gather_output.dtype, BF16)
        self.copy_out(unit, result)
        self.assert_unsharded(unit, specs, BF16)

    def test_gathers_all_inputs_of_an_extension_tensor(self):
        """It sends fp8 data and an fp64 scale in place of a bf16 parameter."""
        specs = [Spec((3,), FP32), Spec((6, 2), BF16), Spec((5,), FP16)]
        unit = self.unit(specs)
        extended = unit.fsdp_params[1]
        local = extended._sharded_local_tensor
        scale = torch.tensor([2.0**-self.rank], dtype=FP64, device=self.device)
        data = torch.full((2, 2), self.rank + 1.0, device=self.device).to(FP8)
        local.fsdp_pre_all_gather = lambda mesh: ((data, scale), None)
        local.fsdp_post_all_gather = None
        extended._init_extensions()
        unit.fsdp_params.refresh()  # as lazy init does
        result = self.all_gather(unit)
        self.assertEqual(
            result.param_all_gather_input_dtypes, [[FP32], [FP8, FP64], [FP16]]
        )
        group = unit.mesh_info.shard_process_group
        foreach_all_gather_copy_out(result, unit.fsdp_params, group)
        gathered_data, gathered_scale = extended.all_gather_outputs
        rows = [float(rank + 1) for rank in range(3) for _ in range(4)]
        self.assertEqual(gathered_data.float().tolist(), rows)
        self.assertEqual(gathered_scale.tolist(), [1.0, 0.5, 0.25])
        for i in (0, 2):
            unit.fsdp_params[i].init_unsharded_param()
        others = SimpleNamespace(fsdp_params=[unit.fsdp_params[0]])
        self.assert_unsharded(others, specs[:1])

    def test_copies_do_not_multiply_with_parameters(self):
        """One copy-in for each pair of dtypes, and one copy-out."""
        dtypes = {"aten::cat": None, "aten::_foreach_copy_": BF16}
        for copy_in, param_dtype in dtypes.items():
            specs = [Spec((4,), dtype) for dtype in (BF16, FP32, FP16)] * 7
            unit = self.unit(specs, mp_policy=policy_of(param_dtype))
            with count_operators() as counts:
                result = self.all_gather(unit, all_gather_comm=NoGather())
            self.assertEqual(
                [counts.pop(op, 0) for op in dtypes],
                [3 * (op == copy_in) for op in dtypes],
            )
            # The rest is as much as one parameter would take
            self.assertLess(counts.total(), 3 * 7)
            self.assertEqual(counts["aten::copy_"], 0)
            with count_operators() as counts:
                self.copy_out(unit, result)
            self.assertEqual(counts["aten::split_with_sizes_copy"], 1)
            self.assertEqual(counts["aten::copy_"], 0)


class TestKeptBetweenSteps(ThreadTest):
    """What a step found out is used by the next, unless it is no longer so."""

    world_size = 3
    SPECS = (Spec((5, 3), BF16), Spec((4,), FP32), Spec((7,), FP32))

    def layout(self, unit: FSDPParamGroup) -> GatherLayout:
        """Gathers, checks what this rank sent, and returns the layout."""
        result = self.all_gather(unit)
        layout = result.all_gather_input_split_sizes.layout
        numel = layout.segment_numel
        segment = result.all_gather_output.narrow(0, self.rank * numel, numel)
        slots = [s for r in layout.regions for s in r.view(segment).split(r.numels)]
        for i, slot in zip(layout.order, slots, strict=True):
            fsdp_param = unit.fsdp_params[i]
            shard = fsdp_param._sharded_param_data
            self.assert_same(slot, shard.to(fsdp_param.param_dtype or shard.dtype))
        return layout

    def test_layout_is_planned_once(self):
        unit = self.unit(self.SPECS)
        first = self.layout(unit)
        for _ in range(2):
            self.assertIs(self.layout(unit), first)

    def test_layout_follows_what_it_was_made_of(self):
        unit = self.unit(self.SPECS)
        param = unit.fsdp_params[1]

        def cast(data: torch.Tensor) -> None:
            param._sharded_param_data = data.half()

        def lengthen(data: torch.Tensor) -> None:
            param._sharded_param_data = torch.cat([data, data])

        def compute_in_bf16(data: torch.Tensor) -> None:
            param.init_dtype_attrs(policy_of(BF16))

        layouts = [self.layout(unit)]
        for change in (cast, lengthen, compute_in_bf16):
            change(param._sharded_param_data)
            layouts.append(self.layout(unit))
            self.assertIs(self.layout(unit), layouts[-1])
        self.assertEqual(len({*map(id, layouts)}), 4)

    def test_outputs_on_another_device_are_not_those_that_were_kept(self):
        unit = self.unit(self.SPECS)
        self.copy_out(unit, self.all_gather(unit))
        kept = unit.fsdp_params.outputs
        self.assertIs(unit.fsdp_params.outputs, kept)
        param = unit.fsdp_params[0]
        param.all_gather_outputs = [t.to("meta") for t in param.all_gather_outputs]
        self.assertIsNone(unit.fsdp_params.outputs)
        param.all_gather_outputs = kept.lists[0]
        self.assertIs(unit.fsdp_params.outputs, kept)
        unit.fsdp_params.refresh()
        self.assertIsNone(unit.fsdp_params.outputs)

    def test_unsharded_parameters_follow_requires_grad(self):
        unit = self.unit(self.SPECS)
        self.copy_out(unit, self.all_gather(unit))
        for requires_grad in (True, False, True):
            unit.fsdp_params[1].sharded_param.requires_grad_(requires_grad)
            unit.fsdp_params.to_state(ShardedState.UNSHARDED)
            found = [p.unsharded_param.requires_grad for p in unit.fsdp_params]
            self.assertEqual(found, [True, requires_grad, True])
            unit.fsdp_params.to_state(ShardedState.SHARDED)

    def test_each_name_of_a_parameter_is_given_its_states(self):
        plain, other = nn.Linear(6, 4, bias=False), nn.Linear(6, 4)
        other.weight = plain.weight
        listening = Listening(plain.weight)
        module = nn.Sequential(plain, other, listening)
        module = module.to(THREAD_DEVICE_TYPE)
        unit = group_of(fully_shard(module, mesh=self.mesh()))
        unit.lazy_init()
        self.copy_out(unit, self.all_gather(unit))
        weight, bias = unit.fsdp_params
        states = [
            (ShardedState.UNSHARDED, weight._unsharded_param, bias._unsharded_param),
            (ShardedState.SHARDED, weight.sharded_param, bias.sharded_param),
        ]
        self.assertIs(listening.given[-1], weight.sharded_param)
        del listening.given[:]
        for state, for_weight, for_bias in states:
            unit.fsdp_params.to_state(state)
            names = (plain.weight, other.weight, listening.listened)
            for registered in names:
                self.assertIs(registered, for_weight)
            self.assertIs(other.bias, for_bias)
            self.assertIs(listening.given[-1], for_weight)
        self.assertEqual(len(listening.given), 2)

    def test_buckets_are_planned_once_for_each_pattern_of_gradients(self):
        unit = self.unit(self.SPECS)
        patterns = [(BF16, FP32, FP32), (BF16, None, FP32), (FP32, FP32, FP32)]

        def buckets(pattern) -> list:
            specs = zip(self.SPECS, pattern)
            return unit._get_buckets(
                [d and torch.empty(spec.size, dtype=d) for spec, d in specs]
            )

        found = [buckets(pattern) for pattern in patterns]
        members = [[[*map(unit.fsdp_params.index, b)] for b in bs] for bs in found]
        self.assertEqual(members, [[[1, 2], [0]], [[2], [0]], [[1, 2, 0]]])
        for pattern, first in zip(patterns, found):
            self.assertIs(buckets(pattern), first)
        unit.lazy_init()  # as an explicit unshard does
        for pattern, first in zip(patterns, found):
            self.assertIs(buckets(pattern), first)
        unit.fsdp_params[1].sharded_param.grad_dtype = BF16
        unit.lazy_init()
        for pattern, first in zip(patterns, found):
            self.assertIsNot(buckets(pattern), first)


class NoGather(DefaultAllGather):
    """Leaves only the copies to be counted."""

    def __call__(self, **kwargs: Any) -> None:
        pass


class NoReduceScatter(DefaultReduceScatter):
    """Likewise."""

    def __call__(self, **kwargs: Any) -> None:
        pass


@contextlib.contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Counts the operators that this thread calls where nobody counts them."""
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    with _kernels_called_directly(), Counting():
        yield counts


_direct_lock = threading.Lock()
_direct: list[mock._patch] = []  # one for each thread that counts


@contextlib.contextmanager
def _kernels_called_directly() -> Iterator[None]:
    """As if the mode that counts, which gets operators, were not there."""
    with _direct_lock:
        _direct.append(mock.patch.object(collectives, "gets_operators", lambda _: 0))
        _direct[-1].start()
    try:
        yield
    finally:
        with _direct_lock:
            # In any order of threads, the last that was started is stopped first
            _direct.pop().stop()


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


class TestReduce(ThreadTest):
    world_size = 3
    SPECS = (Spec((5, 3), BF16), Spec((1,), FP32), Spec((2, 6), FP32, shard_dim=1))
    DTYPES = (BF16, FP32, BF16)

    def new_unit(self) -> FSDPParamGroup:
        return self.unit(self.SPECS)

    def new_grads(self) -> list[torch.Tensor]:
        return self.grads(self.SPECS, self.DTYPES)

    def test_takes_base_arguments_by_position(self):
        unit = self.new_unit()
        arguments = self.reduce_arguments(unit, self.new_grads(), reduce_dtype=FP32)
        foreach_reduce(*arguments.values())
        self.assert_reduced(unit, self.SPECS, self.DTYPES, FP32)

    def test_force_sum_may_be_left_out(self):
        unit = self.new_unit()
        arguments = self.reduce_arguments(unit, self.new_grads(), reduce_dtype=FP32)
        del arguments["force_sum_reduction_for_comms"]
        foreach_reduce(**arguments)
        self.assert_reduced(unit, self.SPECS, self.DTYPES, FP32)

    def test_uniform_call_of_a_vendor(self):
        """Both dtypes given, fp32 parameters computed and reduced in bf16."""
        specs, dtypes = [Spec((4, 2), FP32), Spec((3,), FP32)], [BF16, BF16]
        unit = self.unit(specs, mp_policy=policy_of(BF16))
        grads = self.grads(specs, dtypes)
        self.reduce(unit, grads, orig_dtype=FP32, reduce_dtype=BF16)
        self.assert_reduced(unit, specs, dtypes, BF16)

    def test_result_has_seven_values(self):
        unit, grads = self.new_unit(), self.new_grads()
        reduced = self.reduce(unit, grads, reduce_dtype=FP32)
        reduce_input, _, stream, _, all_reduce_input, all_reduce_event, kept = reduced
        # Padded shards of 2 x 3, 1 and 2 x 2 elements
        self.assertEqual((reduce_input.dtype, reduce_input.numel()), (FP32, 3 * 11))
        self.assertEqual(stream, self.stream)
        self.assertEqual((all_reduce_input, all_reduce_event, kept), (None, None, None))

    def test_gradients_are_let_go_of(self):
        unit, grads = self.new_unit(), self.new_grads()
        self.reduce(unit, grads, reduce_dtype=FP32)
        self.assertEqual(grads, [])

    def test_adds_to_the_sharded_gradient_that_is_there(self):
        unit = self.new_unit()
        for _ in range(3):
            self.reduce(unit, self.new_grads(), reduce_dtype=FP32)
        self.assert_reduced(unit, self.SPECS, self.DTYPES, FP32, times=3)

    def test_gradient_that_is_no_dtensor_is_an_error_that_names_the_parameter(self):
        unit = self.new_unit()
        plain = torch.zeros(1, device=self.device)
        unit.fsdp_params[1].sharded_param = SimpleNamespace(
            grad=plain, _post_accumulate_grad_hooks=None
        )
        with self.assertRaisesRegex(AssertionError, "p1"):
            self.reduce(unit, self.new_grads(), reduce_dtype=FP32)

    def test_gradients_need_not_be_contiguous(self):
        specs = [Spec((5, 3), FP32), Spec((4, 6), FP32, shard_dim=1), Spec((6,), FP32)]
        dtypes = [FP32, FP32, FP32]
        unit, grads = self.unit(specs), self.grads(specs, dtypes)
        grads[0] = grads[0].t().contiguous().t()
        grads[1] = torch.stack([grads[1], -grads[1]], dim=-1)[..., 0]
        grads[2] = torch.stack([grads[2], -grads[2]], dim=-1)[..., 0]
        self.assertFalse(any(grad.is_contiguous() for grad in grads))
        self.reduce(unit, grads, orig_dtype=FP32)
        self.assert_reduced(unit, specs, dtypes, FP32)

    def test_mixed_gradients_without_a_reduce_dtype_are_an_error(self):
        unit = self.new_unit()
        with self.assertRaisesRegex(AssertionError, "p0.*p1.*bfloat16.*float32"):
            self.reduce(unit, self.new_grads())

    def test_uneven_shards_on_another_dim_are_an_error(self):
        unit = self.unit([Spec((2, 6), FP32, shard_dim=1)])
        uneven = torch.zeros(2, 7, device=self.device)
        with self.assertRaisesRegex(AssertionError, "even sharding"):
            self.reduce(unit, [uneven])

    def test_custom_factor_and_forced_sums(self):
        for factor, force_sum in itertools.product((None, 2.0, 3.0), (False, True)):
            unit = self.new_unit()
            changes = {"gradient_divide_factor": factor, "reduce_dtype": FP32}
            changes["force_sum_reduction_for_comms"] = force_sum
            with record_collectives() as recorded:
                self.reduce(unit, self.new_grads(), **changes)
            averages = not force_sum and factor in (None, 3.0)
            self.assertEqual(recorded.calls[0].op, "AVG" if averages else "SUM")
            self.assert_reduced(unit, self.SPECS, self.DTYPES, FP32, divisor=factor)

    def test_hook_sees_the_reduced_bucket_before_the_cast(self):
        unit, seen = self.new_unit(), []

        def hook(buffer: torch.Tensor) -> None:
            seen.append((buffer.dtype, buffer.numel()))
            buffer.mul_(-2)

        self.reduce(unit, self.new_grads(), reduce_dtype=FP32, all_reduce_hook=hook)
        self.assertEqual(seen, [(FP32, 11)])
        self.assert_reduced(unit, self.SPECS, self.DTYPES, FP32, divisor=-1.5)

    def test_post_accumulate_grad_hooks_run_once_for_each_parameter(self):
        unit, seen = self.new_unit(), []
        for i, fsdp_param in enumerate(unit.fsdp_params):
            fsdp_param.sharded_param.register_post_accumulate_grad_hook(
                lambda param, i=i: seen.append((i, param.grad is not None))
            )
        self.reduce(unit, self.new_grads(), reduce_dtype=FP32)
        self.assertEqual(sorted(seen), [(0, True), (1, True), (2, True)])

    def test_copy_in_does_not_multiply_with_parameters(self):
        specs = [Spec((4,), dtype) for dtype in (FP32, BF16, FP16) for _ in range(7)]
        threes = [dtype for dtype in (FP32, BF16, FP16) for _ in range(7)]
        for dtypes, fused, copied in (
            ([FP32] * 21, 1, 0),
            ([BF16] * 21, 1, 0),  # cast by the kernel itself
            (threes, 3, 2),  # two runs of those that are not like the largest
            ([FP32] + [BF16] * 20, 2, 1),  # an uneven one takes its own detour
        ):
            unit, grads = self.unit(specs), self.grads(specs, dtypes)
            with count_operators() as counts:
                self.reduce(
                    unit,
                    grads,
                    reduce_dtype=FP32,
                    reduce_scatter_comm=NoReduceScatter(),
                )
            self.assertEqual(counts["aten::_chunk_cat"], fused)
            self.assertEqual(counts["aten::copy_"], copied)
            self.assertEqual(counts["aten::_foreach_copy_"], 0)
            # To the other storage dtypes and, in a copy of its own, fp32
            self.assertLessEqual(counts["aten::_to_copy"], 3)


class TestHybridReduce(ThreadTest):
    world_size = 4
    SPECS = (Spec((3, 2), BF16), Spec((1,), FP32), Spec((2, 4), FP32, shard_dim=1))
    DTYPES = (BF16, FP32, BF16)

    def hybrid_unit(self) -> tuple[FSDPParamGroup, dict[str, Any]]:
        names = ("replicate", "shard")
        mesh = init_device_mesh(THREAD_DEVICE_TYPE, (2, 2), mesh_dim_names=names)
        unit = group_of(sharded(self.SPECS, mesh, device=THREAD_DEVICE_TYPE))
        unit.lazy_init()
        groups = {"all_reduce_group": unit.mesh_info.replicate_process_group}
        return unit, groups | {"reduce_dtype": FP32}

    def assert_hybrid_mean(self, unit: FSDPParamGroup, times: int) -> None:
        for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, self.SPECS)):
            parts = [self.grad(r, i, spec, self.DTYPES[i]) for r in range(4)]
            mean = (torch.stack(parts).float().sum(0) * times / 4).to(spec.dtype)
            expected = spec.shard(mean, self.rank % 2, 2)
            self.assert_same(fsdp_param.sharded_param.grad.to_local(), expected)

    def test_reduces_over_shards_and_then_replicas(self):
        unit, how = self.hybrid_unit()
        with record_collectives() as recorded:
            result = self.reduce(unit, self.grads(self.SPECS, self.DTYPES), **how)
        self.assert_hybrid_mean(unit, times=1)
        self.assertEqual(len(recorded.reduce_scatters), 1)
        self.assertEqual([call.numel for call in recorded.all_reduces], [9])
        self.assertEqual(result[4].numel(), 9)  # held until it has been read

    def test_sum_of_microbatches_is_kept_in_the_reduce_dtype(self):
        unit, how = self.hybrid_unit()
        kept = None
        for _ in range(2):
            grads = self.grads(self.SPECS, self.DTYPES)
            result = self.reduce(
                unit,
                grads,
                all_reduce_grads=False,
                partial_reduce_output=kept,
                **how,
            )
            kept = result[6]
            self.assertEqual((kept.dtype, kept.numel()), (FP32, 9))
            self.assertIsNone(unit.fsdp_params[0].sharded_param.grad)
        grads = self.grads(self.SPECS, self.DTYPES)
        self.reduce(unit, grads, partial_reduce_output=kept, **how)
        self.assert_hybrid_mean(unit, times=3)


# Operators, factors #


# Of the base, which compiled graphs are matched with
SCHEMAS = {
    "all_gather_copy_in": (
        "fsdp::all_gather_copy_in(Tensor[] all_gather_inputs, Tensor "
        "all_gather_output, SymInt[] inp_split_sizes, SymInt all_gather_input_numel, "
        "SymInt rank) -> (Tensor, Tensor)"
    ),
    "split_with_sizes_copy": (
        "fsdp::split_with_sizes_copy(Tensor all_gather_output, SymInt[] "
        "all_gather_input_split_sizes, int dim=0, *, Tensor(a!)[] out) -> ()"
    ),
    "chunk_cat": (
        "fsdp::chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, "
        "Tensor(a!) out) -> ()"
    ),
}


class TestOperators(DeviceFreeTest):
    def test_schemas_are_the_base_ones(self):
        for name, schema in SCHEMAS.items():
            operator = getattr(torch.ops.fsdp, name).default
            self.assertEqual(str(operator._schema), schema)

    def test_copy_in_fills_the_segment_of_its_rank(self):
        for device in ("cpu", "meta"):
            inputs = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
            inputs = [tensor.to(device) for tensor in inputs]
            output = torch.zeros(15, device=device)
            segment, same = torch.ops.fsdp.all_gather_copy_in(
                inputs, output, [3, 2], 5, 1
            )
            self.assertEqual(segment.size(), (5,))
            self.assertEqual(segment.storage_offset(), 5)
            self.assertEqual((same.size(), same.device.type), ((15,), device))
            if device == "cpu":
                self.assertEqual(output.tolist(), [0] * 5 + [1, 2, 3, 4, 5] + [0] * 5)

    def test_split_copy_takes_columns(self):
        for device in ("cpu", "meta"):
            rows = torch.arange(10.0).view(2, 5).to(device)
            out = [torch.empty(2, size, device=device) for size in (3, 2)]
            torch.ops.fsdp.split_with_sizes_copy(rows, [3, 2], dim=1, out=out)
            self.assertEqual([t.size() for t in out], [(2, 3), (2, 2)])
            if device == "cpu":
                self.assertEqual(out[1].tolist(), [[3, 4], [8, 9]])

    def test_chunk_cat_gives_each_rank_a_padded_row(self):
        for device in ("cpu", "meta"):
            tensors = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
            tensors = [tensor.to(device) for tensor in tensors]
            out = torch.full((2, 3), -1.0, device=device)
            torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=2, out=out)
            self.assertEqual(out.size(), (2, 3))
            if device == "cpu":
                self.assertEqual(out.tolist(), [[1, 2, 4], [3, 0, 5]])


class FakeGroup:
    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size


@dataclass(frozen=True)
class Factors:
    """What gradients are divided by, and how they are reduced."""

    before: float | None
    after: float | None
    shard_op: str
    scale: float | None  # of a scaled sum
    replica_op: str

    @classmethod
    def of(cls, result: tuple) -> "Factors":
        before, after, shard_op, replica_op = result
        scale = getattr(shard_op, "factor", None)
        scale = scale if op_name(shard_op) == "PREMUL_SUM" else None
        return cls(before, after, op_name(shard_op), scale, op_name(replica_op))

    def divisor(self, shards: int, replicas: int) -> float:
        """Returns what the sum over all ranks is divided by, all in all."""
        divisor = (self.before or 1) * (self.after or 1)
        # Over one rank no collective runs: its input is divided in its place
        divisor *= shards if self.shard_op == "AVG" else 1 / (self.scale or 1)
        return divisor * (replicas if self.replica_op == "AVG" else 1)


SIZES = (1, 2, 3, 4, 6, 8, 32, 128)
DTYPES = ("float32", "bfloat16", "float16", "float64")

# The same calls, made on the base
_PRINT_BASE = """
import json, sys
import torch, torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups

class Group:
    def __init__(self, size):
        self.size = lambda: size

results = []
for shards, replicas, dtype, factor, force_sum in json.loads(sys.argv[1]):
    groups = [None if size is None else Group(size) for size in (shards, replicas)]
    before, after, shard_op, replica_op = collectives._get_gradient_divide_factors(
        *groups, getattr(torch, dtype), "cuda", factor, force_sum
    )
    names = [getattr(op, "op", op).name for op in (shard_op, replica_op)]
    scale = shard_op.factor if names[0] == "PREMUL_SUM" else None
    results.append([before, after, names[0], scale, names[1]])
schemas = {
    name: str(getattr(torch.ops.fsdp, name).default._schema)
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
}
print(json.dumps([torch.__file__, schemas, results]))
"""


class TestDivideFactors(DeviceFreeTest):
    def raw_factors(
        self, shards, replicas, dtype, factor=None, force_sum=False, *, premul=True
    ) -> tuple:
        sizes, dtype = (shards, replicas), getattr(torch, dtype)
        groups = [None if size is None else FakeGroup(size) for size in sizes]
        with mock.patch.object(collectives, "_has_premul_sum", lambda *_: premul):
            return _get_gradient_divide_factors(
                *groups, dtype, "cuda", factor, force_sum
            )

    def factors(self, *case: Any, **how: Any) -> Factors:
        return Factors.of(self.raw_factors(*case, **how))

    def test_fp32_and_bf16_are_averaged_by_the_collective(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), SIZES[1:]):
            for replicas in (None, 2, 8):
                factors = self.factors(shards, replicas, dtype)
                self.assertEqual(factors, Factors(None, None, "AVG", None, "AVG"))

    def test_fp16_is_divided_before_and_after(self):
        for workers, before, after in (
            (1, 1, 1),
            (2, 2, 1),
            (3, 2, 1.5),
            (4, 2, 2),
            (6, 4, 1.5),
            (8, 4, 2),
            (32, 8, 4),
            (128, 16, 8),
        ):
            expected = Factors(before, after, "SUM", None, "SUM")
            self.assertEqual(self.factors(workers, None, "float16"), expected)
            self.assertEqual(self.factors(workers, 1, "float16"), expected)
            self.assertEqual(self.factors(1, workers, "float16"), expected)
            self.assertEqual(self.factors(None, workers, "float16"), expected)
            if workers % 2 == 0:
                halves = self.factors(workers // 2, 2, "float16")
                self.assertEqual(halves, expected)

    def test_fp16_factors_multiply_to_the_divisor_and_are_balanced(self):
        for factor in (*SIZES, 5, 7, 12, 24, 48, 96, 100, 256, 0.5, 1.5, 10.0):
            found = self.factors(4, 2, "float16", float(factor))
            powers = (2**k for k in itertools.count())
            before = next(f for f in powers if factor % f or factor <= f * f)
            self.assertEqual((found.before, found.after), (before, factor / before))
            self.assertEqual((found.shard_op, found.replica_op), ("SUM", "SUM"))

    def test_forced_sums_are_divided_after(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), SIZES):
            for replicas, factor in itertools.product((None, 2), (None, 5.0)):
                divisor = shards * (replicas or 1) if factor is None else factor
                factors = self.factors(shards, replicas, dtype, factor, True)
                self.assertEqual(factors, Factors(None, divisor, "SUM", None, "SUM"))

    def test_custom_factor_is_a_scaled_sum_where_the_backend_has_one(self):
        for dtype in ("float32", "bfloat16"):
            scaled = Factors(None, None, "PREMUL_SUM", 0.2, "SUM")
            self.assertEqual(self.factors(8, None, dtype, 5.0), scaled)
            self.assertEqual(self.factors(8, 4, dtype, 5.0), scaled)
            plain = Factors(None, 5.0, "SUM", None, "SUM")
            self.assertEqual(self.factors(8, None, dtype, 5.0, premul=False), plain)
            self.assertEqual(self.factors(8, 4, dtype, 5.0, premul=False), plain)

    def test_factor_of_the_shard_group_is_its_average(self):
        for premul in (True, False):
            factors = self.factors(8, 4, "float32", 8.0, premul=premul)
            self.assertEqual(factors, Factors(None, None, "AVG", None, "SUM"))

    def test_no_average_where_there_is_a_single_rank_in_all(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), (None, 1)):
            for replicas in (None, 1):
                found = self.factors(shards, replicas, dtype)
                self.assertEqual((found.shard_op, found.replica_op), ("SUM", "SUM"))
            found = self.factors(shards, 4, dtype)
            self.assertEqual((found.shard_op, found.replica_op), ("AVG", "AVG"))
            found = self.factors(4, 1, dtype)
            self.assertEqual((found.shard_op, found.replica_op), ("AVG", "AVG"))

    def test_all_in_all_it_is_the_number_of_ranks_or_the_factor(self):
        shards, replicas = (None, *SIZES), (None, 1, 2, 6)
        factors, flags = (None, 1.0, 3.0, 8.0), (False, True)
        wrong = []
        for case in itertools.product(shards, replicas, DTYPES, factors, flags, flags):
            *case, premul = case
            found = self.factors(*case, premul=premul)
            sizes = [size or 1 for size in case[:2]]
            expected = math.prod(sizes) if case[3] is None else case[3]
            if not math.isclose(found.divisor(*sizes), expected):
                wrong.append((case, premul, found))
        self.assertEqual(wrong, [])

    def test_divisor_of_a_partial_result_leaves_the_rest_to_come(self):
        """As a kept result is scaled where its dtype widens."""
        replicas, factors, flags = (1, 2, 6), (None, 3.0, 8.0), (False, True)
        wrong = []
        for case in itertools.product(SIZES, replicas, DTYPES, factors, flags):
            group, result = FakeGroup(case[0]), self.raw_factors(*case)
            scattered = collectives.scatter_divisor(group, result, case[3])
            found = Factors.of(result)
            rest = replace(found, before=None, shard_op="SUM", scale=None)
            product = scattered * rest.divisor(*case[:2])
            if not math.isclose(product, found.divisor(*case[:2])):
                wrong.append((case, scattered, found))
        self.assertEqual(wrong, [])

    def test_equal_to_the_base_and_so_are_the_schemas(self):
        replicas, factors = (None, 1, 2, 6), (None, 1.0, 3.0, 8.0)
        cases = [
            *itertools.product((None, *SIZES), replicas, DTYPES, factors, (False, True))
        ]
        printed = run_python("-c", _PRINT_BASE, json.dumps(cases), on_base=True)
        path, schemas, results = json.loads(printed)
        self.assertTrue(Path(path).resolve().is_relative_to(BASE_ROOT.resolve()))
        self.assertEqual(schemas, SCHEMAS)
        differing = [
            (case, self.factors(*case), Factors(*result))
            for case, result in zip(cases, results, strict=True)
            if self.factors(*case) != Factors(*result)
        ]
        self.assertEqual(differing, [])


# Units, with processes #


class TestUnits(FSDPProcessTest):
    """Counts what ``fully_shard`` issues in training, and checks the gradients."""

    THREE = (
        Spec((5, 3), BF16),
        Spec((1,), FP32),
        Spec((7, 2), FP16),
        Spec((3,), FP32),
    )

    def module(self, specs: Sequence[Spec], ranks: int = 0, **kwargs: Any) -> Weighted:
        mesh = shard_mesh(ranks or self.world_size)
        return sharded(specs, mesh, device=DEVICE_TYPE, **kwargs)

    def weights(
        self, specs: Sequence[Spec], rank: int | None = None, step: int = 0
    ) -> list[torch.Tensor]:
        """Returns small integers, which every dtype holds."""
        rank = self.rank if rank is None else rank
        return [
            integers(
                spec.size,
                4,
                seed=10000 * step + 100 * rank + i,
                dtype=FP32,
                device=DEVICE_TYPE,
            )
            for i, spec in enumerate(specs)
        ]

    def weight_sums(self, specs: Sequence[Spec], steps: int = 1) -> list[torch.Tensor]:
        calls = itertools.product(range(self.world_size), range(steps))
        return [sum(parts) for parts in zip(*(self.weights(specs, *c) for c in calls))]

    def assert_grads(
        self, module: Weighted, totals: Sequence[torch.Tensor], divisor: float
    ) -> None:
        """Over all ranks, and in each parameter's own dtype."""
        params = module.parameters()
        for param, spec, total in zip(params, module.specs, totals, strict=True):
            expected = (total / divisor).to(spec.dtype)
            expected = spec.shard(expected, self.rank, self.world_size)
            self.assertEqual(param.grad.dtype, spec.dtype)
            self.assertEqual(param.grad.to_local(), expected)

    def step(self, module: Weighted, step: int = 0) -> list[Collective]:
        with record_collectives() as recorded:
            module(self.weights(module.specs, step=step)).backward()
        return recorded.calls

    def padded_numel(self, specs: Sequence[Spec]) -> int:
        return sum(spec.padded_shard_numel(self.world_size) for spec in specs)

    def assert_gathers(
        self, call: Collective, specs: Sequence[Spec], dtypes: Sequence[torch.dtype]
    ) -> None:
        """In no more bytes than the parameters have, and less than an element."""
        self.assertEqual((call.name, call.group_size), ("all_gather", self.world_size))
        sizes = [self.padded_numel([spec]) for spec in specs]
        own = sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True))
        padding = call.nbytes_per_rank - own
        self.assertGreaterEqual(padding, 0)
        self.assertLess(padding, max(dtype.itemsize for dtype in dtypes))
        if len({*dtypes}) == 1:
            self.assertEqual((call.dtype, padding), (dtypes[0], 0))

    def assert_reduces(
        self, call: Collective, specs: Sequence[Spec], dtype: torch.dtype
    ) -> None:
        numel = self.world_size * self.padded_numel(specs)
        op = "AVG" if dtype in (BF16, FP32) else "SUM"
        expected = Collective("reduce_scatter", dtype, numel, op, self.world_size)
        self.assertEqual(call, expected)

    def assert_same_on_all_ranks(self, calls: list[Collective]) -> None:
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, calls)
        for others in everywhere:
            self.assertEqual(others, calls)

    def test_one_gather_whatever_the_dtypes_and_one_reduction_for_each(self):
        for dtypes in (
            [FP32],
            [BF16],
            [FP16, FP16, FP16],
            [BF16, FP32],
            [FP32, BF16, FP32, BF16],
            [FP16, BF16, FP64, FP32, FP16],
        ):
            specs = [Spec((3 + i, 3), dtype) for i, dtype in enumerate(dtypes)]
            module = self.module(specs, reshard_after_forward=True)
            forward, backward, *reductions = self.step(module)
            for gather in (forward, backward):
                self.assert_gathers(gather, specs, dtypes)
            in_order = [d for d in (FP64, FP32, BF16, FP16) if d in dtypes]
            for call, dtype in zip(reductions, in_order, strict=True):
                self.assert_reduces(call, [s for s in specs if s.dtype == dtype], dtype)
            self.assert_same_on_all_ranks([forward, backward, *reductions])
            self.assert_grads(module, self.weight_sums(specs), self.world_size)

    def test_reduce_dtype_makes_one_reduction(self):
        specs = [Spec((5, 3), BF16), Spec((1,), FP32)]
        module = self.module(specs, mp_policy=policy_of(reduce_dtype=FP32))
        gather, reduction = self.step(module)
        self.assert_gathers(gather, specs, [BF16, FP32])
        self.assert_reduces(reduction, specs, FP32)
        self.assert_grads(module, self.weight_sums(specs), self.world_size)

    def test_param_dtype_makes_one_reduction_in_it(self):
        for dtype in (BF16, FP16):
            module = self.module(self.THREE, mp_policy=policy_of(dtype))
            gather, reduction = self.step(module)
            self.assert_gathers(gather, self.THREE, [dtype] * 4)
            self.assert_reduces(reduction, self.THREE, dtype)
            self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_gather_in_one_dtype_and_reduction_in_another(self):
        module = self.module(self.THREE, mp_policy=policy_of(BF16, FP32))
        gather, reduction = self.step(module)
        self.assert_gathers(gather, self.THREE, [BF16] * 4)
        self.assert_reduces(reduction, self.THREE, FP32)
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_each_nested_unit_has_its_own_in_the_same_order_on_every_rank(self):
        model = shard_blocks(mixed_model(3), mesh=shard_mesh())
        with record_collectives() as recorded:
            model(random_input(2, 9, seed=self.rank)).sum().backward()
        self.assertEqual(len(recorded.all_gathers), 3 + 3)
        dtypes = [call.dtype for call in recorded.reduce_scatters]
        self.assertEqual(dtypes, [FP32, BF16, FP16] * 3)
        self.assertEqual(len(recorded.calls), 6 + 9)
        self.assert_same_on_all_ranks(recorded.calls)

    def test_frozen_parameters_gather_and_never_reduce(self):
        module = self.module(self.THREE)
        module.p0.requires_grad_(False)
        module.p3.requires_grad_(False)
        gather, fp32, fp16 = self.step(module)
        self.assert_gathers(gather, self.THREE, [s.dtype for s in self.THREE])
        self.assert_reduces(fp32, self.THREE[1:2], FP32)
        self.assert_reduces(fp16, self.THREE[2:3], FP16)
        self.assertIsNone(module.p0.grad)
        self.assertIsNone(module.p3.grad)
        module.zero_grad()
        module.requires_grad_(True)
        dtypes = [call.dtype for call in self.step(module)[1:]]
        self.assertEqual(dtypes, [FP32, BF16, FP16])
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_any_parameters_may_have_gradients_in_a_step(self):
        """More patterns of them than a unit remembers."""
        specs = [Spec((3 + i,), (BF16, FP32, FP16)[i % 3]) for i in range(6)]
        module, totals = self.module(specs), self.weight_sums(specs)
        weights = self.weights(specs)
        patterns = [p for p in itertools.product((False, True), repeat=6) if any(p)]
        for used in patterns + patterns[:3]:
            with record_collectives() as recorded:
                module([w if u else None for w, u in zip(weights, used)]).backward()
            dtypes = {spec.dtype for spec, u in zip(specs, used) if u}
            found = [call.dtype for call in recorded.reduce_scatters]
            self.assertEqual(found, [d for d in (FP32, BF16, FP16) if d in dtypes])
            for i, param in enumerate(module.parameters()):
                self.assertEqual(param.grad is not None, used[i])
                if used[i]:
                    mean = (totals[i] / self.world_size).to(param.dtype)
                    expected = specs[i].shard(mean, self.rank, self.world_size)
                    self.assertEqual(param.grad.to_local(), expected)
            module.zero_grad()

    def test_units_are_gathered_without_autograd_and_trained_afterwards(self):
        module = self.module(self.THREE, reshard_after_forward=True)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode(), record_collectives() as recorded:
                module(self.weights(self.THREE))
            (gather,) = recorded.calls
            self.assert_gathers(gather, self.THREE, [s.dtype for s in self.THREE])
        self.step(module)
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_a_unit_that_is_all_frozen_reduces_nothing(self):
        model = mixed_model(2)
        model[1].requires_grad_(False)
        shard_blocks(model, mesh=shard_mesh())
        with record_collectives() as recorded:
            model(random_input(2, 9, seed=self.rank)).sum().backward()
        self.assertEqual(len(recorded.all_gathers), 4)
        dtypes = [call.dtype for call in recorded.reduce_scatters]
        self.assertEqual(dtypes, [FP32, BF16, FP16])

    def test_unsharded_parameters_are_the_whole_ones(self):
        specs = [*self.THREE, Spec((2, self.world_size), FP64, shard_dim=1)]
        module = self.module(specs)
        for is_async in (False, True):
            with record_collectives() as recorded:
                handle = module.unshard(async_op=is_async)
                if is_async:
                    handle.wait()
            self.assertEqual(len(recorded.calls), 1)
            for i, (param, spec) in enumerate(zip(module.parameters(), specs)):
                full = random_input(*spec.size, seed=i, dtype=spec.dtype)
                self.assertTrue(torch.equal(param, full))
            module.reshard()

    def test_gathers_once_again_in_backward_if_resharded(self):
        specs = [*self.THREE, Spec((2, self.world_size), BF16, shard_dim=1)]
        smaller = self.world_size // 2
        for reshard, groups in (
            (True, [self.world_size, self.world_size]),
            (False, [self.world_size]),
            (smaller, [self.world_size, smaller] if smaller > 1 else [self.world_size]),
        ):
            module = self.module(specs, reshard_after_forward=reshard)
            for step in range(2):
                calls = self.step(module, step)
                gathers = [c.group_size for c in calls if c.name == "all_gather"]
                # Without resharding, backward reshards nevertheless
                self.assertEqual(gathers, groups)
                module.zero_grad()
            self.step(module)
            self.assert_grads(module, self.weight_sums(specs), self.world_size)

    def test_accumulation_reduces_only_the_last_microbatch(self):
        for policy, reductions in (
            (policy_of(), 3),
            (policy_of(None, FP32), 1),
            (policy_of(BF16, FP32), 1),
            (policy_of(BF16, BF16), 1),
        ):
            module = self.module(self.THREE, mp_policy=policy)
            module.set_requires_gradient_sync(False)
            calls = self.step(module, 0)
            self.assertEqual({call.name for call in calls}, {"all_gather"})
            self.assertIsNone(module.p0.grad)
            module.set_requires_gradient_sync(True)
            calls = self.step(module, 1)
            names = [call.name for call in calls if call.name != "all_gather"]
            self.assertEqual(names, ["reduce_scatter"] * reductions)
            totals = self.weight_sums(self.THREE, steps=2)
            self.assert_grads(module, totals, self.world_size)

    def test_accumulated_and_fresh_gradients_share_a_reduction(self):
        """The former are kept in fp32, the latter come in bf16."""
        module = self.module(self.THREE, mp_policy=policy_of(BF16, FP32))
        first, second = self.weights(self.THREE)[:2]
        module.set_requires_gradient_sync(False)
        module([first]).backward()
        module.set_requires_gradient_sync(True)
        with record_collectives() as recorded:
            module([None, second]).backward()
        (reduction,) = recorded.reduce_scatters
        self.assert_reduces(reduction, self.THREE[:2], FP32)
        totals = self.weight_sums(self.THREE)
        for param, spec, total in zip(module.parameters(), self.THREE[:2], totals):
            expected = (total / self.world_size).to(spec.dtype)
            expected = spec.shard(expected, self.rank, self.world_size)
            self.assertEqual(param.grad.to_local(), expected)

    def test_custom_factor_divides_once_on_any_backend(self):
        scaled = "PREMUL_SUM" if BACKEND == "nccl" else "SUM"
        for factor, op in ((2.0, scaled), (float(self.world_size), "AVG")):
            module = self.module(self.THREE)
            module.set_gradient_divide_factor(factor)
            reductions = self.step(module)[-3:]
            # fp32 and bf16, and then fp16, which is divided apart
            self.assertEqual([call.op for call in reductions], [op, op, "SUM"])
            self.assert_grads(module, self.weight_sums(self.THREE), factor)

    def test_forced_sums_divide_once(self):
        for factor in (None, 2.0):
            module = self.module(self.THREE)
            module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            ops = [call.op for call in self.step(module)[-3:]]
            self.assertEqual(ops, ["SUM"] * 3)
            divisor = factor or self.world_size
            self.assert_grads(module, self.weight_sums(self.THREE), divisor)

    def test_over_one_rank_nothing_is_sent_and_the_factor_divides_once(self):
        for factor, force_sum in itertools.product((None, 4.0), (False, True)):
            module = self.module(self.THREE, ranks=1)
            module.set_force_sum_reduction_for_comms(force_sum)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            self.assertEqual(self.step(module), [])
            weights = self.weights(self.THREE)
            for param, weight in zip(module.parameters(), weights, strict=True):
                expected = (weight / (factor or 1)).to(param.dtype)
                self.assertEqual(param.grad.to_local(), expected)

    def test_unused_parameters_reduce_zeros_in_their_own_dtype(self):
        """Even ranks use the first parameter, odd ones the second, none the rest."""
        mine = self.rank % 2
        for policy, dtypes in (
            (policy_of(), [FP32, BF16, FP16]),
            (policy_of(BF16), [BF16]),
            (policy_of(BF16, FP32), [FP32]),
        ):
            module = self.module(self.THREE, mp_policy=policy)
            module.p3.requires_grad_(False)
            module.set_reduce_scatter_unused_params(True)
            weights = [
                w if i == mine else None for i, w in enumerate(self.weights(self.THREE))
            ]
            with record_collectives() as recorded:
                module(weights).backward()
            found = [call.dtype for call in recorded.reduce_scatters]
            self.assertEqual(found, dtypes)
            self.assert_same_on_all_ranks(recorded.calls)
            self.assertIsNone(module.p3.grad)
            self.assert_unused_grads(module)

    def assert_unused_grads(self, module: Weighted) -> None:
        for i in range(3):
            spec, param = self.THREE[i], getattr(module, f"p{i}")
            users = [r for r in range(self.world_size) if i < 2 and r % 2 == i]
            total = sum(self.weights(self.THREE, rank)[i] for rank in users)
            mean = torch.as_tensor(total / self.world_size, device=self.device)
            mean = mean.expand(spec.size).to(spec.dtype)
            expected = spec.shard(mean, self.rank, self.world_size)
            self.assertEqual(param.grad.to_local(), expected)

    def test_without_unused_parameters_only_used_dtypes_are_reduced(self):
        module = self.module(self.THREE)
        weights = self.weights(self.THREE)
        with record_collectives() as recorded:
            module([None, weights[1]]).backward()
        (reduction,) = recorded.reduce_scatters
        self.assert_reduces(reduction, self.THREE[1:2], FP32)
        self.assertEqual([p.grad is None for p in module.parameters()], [1, 0, 1, 1])

    def test_a_wrapper_may_ask_for_another_reduce_dtype(self):
        """Utilities replace the function in the module that calls it."""

        def in_fp32(*args, **kwargs):
            params, grads, *others = args
            others[4] = FP32
            return foreach_reduce(params, grads, *others, **kwargs)

        module = self.module(self.THREE)
        with mock.patch.object(param_groups, "foreach_reduce", in_fp32):
            reductions = self.step(module)[-3:]
        self.assertEqual([call.dtype for call in reductions], [FP32] * 3)
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_input_buffers_are_counted_by_module_not_by_bucket(self):
        for cap, held in ((None, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (3, [1, 2, 3, 3])):
            model = shard_blocks(mixed_model(4), mesh=shard_mesh())
            if cap is not None:
                model.set_reduce_scatter_max_input_buffers(cap)
            found, buffers = [], []
            post_backward = FSDPParamGroup.post_backward

            def watch(group, *args, found=found, buffers=buffers, inner=post_backward):
                inner(group, *args)
                states = group.comm_ctx.reduce_scatter_states
                found.append(len(states))
                buffers.append(len(states[-1].reduce_scatter_inputs))

            with mock.patch.object(FSDPParamGroup, "post_backward", watch):
                x = random_input(2, 9, seed=self.rank).requires_grad_()
                model(x).sum().backward()
            self.assertEqual(found[:4], held)
            self.assertEqual({*buffers}, {3})  # one for each dtype
            states = group_of(model[0]).comm_ctx.reduce_scatter_states
            self.assertEqual(states, [])


if __name__ == "__main__":
    run_tests()
