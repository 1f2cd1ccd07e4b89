# Owner(s): ["oncall: distributed"]

"""
The reduction of a unit's gradients, over shards and over replicas, against sums on
paper.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp_common.comms import (
    BF16,
    count_operators,
    FP16,
    FP32,
    group_of,
    NoReduceScatter,
    policy_of,
    sharded,
    Spec,
    ThreadTest,
)
from fsdp_common.utils import FakeGroupTest, record_collectives, THREAD_DEVICE_TYPE
from fsdp_features.comms import KeptScatter, SymmMemStub

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_agreement import UnitAgreement
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode


class TestReduce(ThreadTest):
    world_size = 3
    SPECS = (Spec((5, 3), BF16), Spec((1,), FP32), Spec((2, 6), FP32, shard_dim=1))
    DTYPES = (BF16, FP32, BF16)

    def new_unit(self) -> FSDPParamGroup:
        return self.unit(self.SPECS)

    def new_grads(self) -> list[torch.Tensor]:
        return self.grads(self.SPECS, self.DTYPES)

    def test_takes_arguments_of_the_release_by_position(self):
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
            grad=plain,
            dtype=plain.dtype,
            grad_dtype=plain.dtype,
            _post_accumulate_grad_hooks=None,
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


class NeverSplitPool:
    """
    Counts the segments of a pool that has one for each tensor, and gives it to the next
    tensor of that size once it is free.
    """

    def __init__(self) -> None:
        self.tenants: dict[int, list[StorageWeakRef]] = {}  # by bytes

    @contextlib.contextmanager
    def use(self, pool: object) -> Iterator[None]:
        class Noting(TorchDispatchMode):
            def __torch_dispatch__(mode, func, types, args=(), kwargs=None):
                tensor = func(*args, **(kwargs or {}))
                tenants = self.tenants.setdefault(tensor.nbytes, [])
                tenant = StorageWeakRef(tensor.untyped_storage())
                for i, earlier in enumerate(tenants):
                    if earlier.expired():
                        tenants[i] = tenant
                        return tensor
                tenants.append(tenant)
                return tensor

        with Noting():
            yield


class TestSymmetricMemory(FakeGroupTest):
    """What it registers: the pool is a stand-in, as are those who register."""

    def test_one_input_is_held_at_a_time(self) -> None:
        """As `set_reduce_scatter_max_input_buffers` wants it of units of one dtype."""
        sizes = {FP32: (8, 2), BF16: (8, 4), FP16: (8, 4)}  # all of 64 bytes
        specs = [Spec(size, dtype) for dtype, size in sizes.items()]
        model = sharded(specs, init_device_mesh("cpu", (self.ranks,)), device="cpu")
        model.set_force_sum_reduction_for_comms(True)
        pool, waited = NeverSplitPool(), []

        def inputs() -> list[int]:
            return [numel for _, numel in stub.registered if numel in (16, 32)]

        def wait(*unused: Any) -> None:
            waited.append(len(inputs()))

        with (
            SymmMemStub().patched() as stub,
            mock.patch.object(torch.cpu, "use_mem_pool", pool.use),
            mock.patch.object(FSDPParamGroup, "_wait_current_stream", wait),
        ):
            model.set_symm_mem_for_comm()
            for _ in range(2):
                model([torch.ones(spec.size) for spec in specs]).backward()
                # Of a gather, an input, and the gradients, which parameters keep
                segments = {size: len(of) for size, of in pool.tenants.items()}
                self.assertEqual(segments, {8 * 24: 1, 64: 1, 8: 3})
                model.zero_grad()
        self.assertEqual(inputs(), [16, 32, 32] * 2)
        # For the one before, wherever a unit has had one or two of its three
        self.assertEqual([n for n in waited if n % 3], [1, 2, 4, 5])


class TestEmptyParameters(FakeGroupTest):
    """Parameters without elements train like the rest, and take part in nothing."""

    def test_they_get_gradients(self) -> None:
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(8, 4))
                self.rows = torch.nn.Parameter(torch.ones(0, 4, dtype=BF16))
                self.columns = torch.nn.Parameter(torch.ones(8, 0))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * self.weight).sum() + self.rows.sum() + self.columns.sum()

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        for zeros, syncs in itertools.product((False, True), repeat=2):
            model = fully_shard(Model(), mesh=mesh)
            model.set_reduce_scatter_unused_params(zeros)
            seen: list[torch.nn.Parameter] = []
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(seen.append)
            for step in range(2):
                model.set_requires_gradient_sync(syncs or step == 1)
                with record_collectives() as calls:
                    model(torch.ones(8, 4)).backward()
                if syncs or step == 1:
                    self.assertEqual([c.numel for c in calls.reduce_scatters], [32])
            self.assertEqual(len(seen), 6 if syncs else 3)
            for param in model.parameters():
                self.assertEqual(param.grad.size(), param.size())
                self.assertEqual(param.grad.dtype, param.dtype)


class TestOrder(FakeGroupTest):
    """In which order a unit of three reduce dtypes issues what."""

    COPY_IN, SCATTER, ALL_REDUCE = (
        "fsdp::chunk_cat",
        "c10d::_reduce_scatter_base_",
        "c10d::allreduce_",
    )

    def forward(
        self, mesh: DeviceMesh, comm: ReduceScatter | None = None
    ) -> torch.Tensor:
        specs = [Spec((8, 2), dtype) for dtype in (BF16, FP32, FP16)]
        model = sharded(specs, mesh, device="cpu")
        if comm is not None:
            model.set_custom_reduce_scatter(comm)
        return model([torch.ones(spec.size) for spec in specs])

    def issued(self, mesh: DeviceMesh, comm: ReduceScatter | None = None) -> list[str]:
        loss, issued = self.forward(mesh, comm), []

        class Recording(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                issued.append(func._schema.name.replace("_mixed_dtype", ""))
                return func(*args, **(kwargs or {}))

        with Recording():
            loss.backward()
        return [n for n in issued if n in (self.COPY_IN, self.SCATTER, self.ALL_REDUCE)]

    def test_all_copy_ins_come_first(self) -> None:
        issued = self.issued(init_device_mesh("cpu", (self.ranks,)))
        self.assertEqual(issued, [self.COPY_IN] * 3 + [self.SCATTER] * 3)

    def test_each_all_reduce_runs_beside_the_next_reduce_scatter(self) -> None:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=names)
        issued = self.issued(mesh)
        both = [self.SCATTER, self.ALL_REDUCE]
        self.assertEqual(issued, [self.COPY_IN] * 3 + both * 3)

    def test_a_buffer_that_serves_all_is_sent_before_it_is_filled_again(self) -> None:
        mesh = init_device_mesh("cpu", (self.ranks,))
        issued = self.issued(mesh, KeptScatter())
        self.assertEqual(issued, [self.COPY_IN, self.SCATTER] * 3)

    def explained(self, fails: Any) -> list[tuple[torch.dtype, int]]:
        """Returns dtype and gradients of the bucket that a failing step is about."""
        explained = []

        def explain(error, fsdp_params, bucket, grads, device):
            explained.append((bucket.dtype, len(grads)))
            return error

        loss = self.forward(init_device_mesh("cpu", (self.ranks,)))
        with (
            fails,
            mock.patch.object(_fsdp_collectives, "explain_reduction", explain),
            mock.patch.object(UnitAgreement, "add_note") as add_note,
            self.assertRaisesRegex(ValueError, "failed"),
        ):
            loss.backward()
        (_, buckets), _ = add_note.call_args
        self.assertEqual((add_note.call_count, len(buckets)), (1, 3))
        return explained

    def test_an_error_is_explained_with_the_bucket_that_failed(self) -> None:
        steps = {"_reduce_copy_in": 1, "_reduce_scatter": 0}  # gradients still there
        for (step, number), dtype in itertools.product(
            steps.items(), (FP32, BF16, FP16)
        ):
            own = getattr(_fsdp_collectives, step)

            def fail(reduction, part, *rest, dtype=dtype, own=own):
                if part.bucket.dtype == dtype:
                    raise ValueError("failed")
                return own(reduction, part, *rest)

            fails = mock.patch.object(_fsdp_collectives, step, fail)
            self.assertEqual(self.explained(fails), [(dtype, number)])

    def test_an_error_while_a_plugin_prepares_is_explained_with_its_bucket(
        self,
    ) -> None:
        own = _fsdp_collectives._default_reduce_scatter_input_fn
        prepare = "_prepare_reduce_scatter_inputs"
        for dtype in (FP32, BF16, FP16):

            def fail(params, grads, world_size, dtype=dtype):
                if grads[0].dtype == dtype:
                    raise ValueError("failed")
                return own(params, grads, world_size)

            fails = mock.patch.object(FSDPParamGroup, prepare, staticmethod(fail))
            self.assertEqual(self.explained(fails), [(dtype, 1)])


if __name__ == "__main__":
    run_tests()
