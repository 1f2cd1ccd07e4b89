# Owner(s): ["oncall: distributed"]
"""The reduction of a unit's gradients over shards, against sums on paper."""

import functools
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common import comms
from fsdp_helpers.common.comms import BF16, FP16, FP32, mesh_of, sharded, Spec
from fsdp_helpers.common.doubles import dispatched, KeptScatter, SymmMemStub
from fsdp_helpers.common.utils import DeviceFreeTest, FakeGroupTest

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_compat
from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_reduce as reduce_file
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_comms import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_context import FSDPCommContext
from torch.distributed.fsdp._fully_shard._fsdp_reduce import BucketGrads
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.quick


class TestRefused(FakeGroupTest):
    def test_mixed_gradients_without_a_reduce_dtype(self):
        specs = (Spec((5, 3), BF16), Spec((1,), FP32))
        model = sharded(specs, self.mesh, device="cpu")
        model([torch.ones(spec.size) for spec in specs])  # names the parameters
        params = comms.group_of(model).fsdp_params
        with self.assertRaisesRegex(AssertionError, "p0.*p1.*bfloat16.*float32"):
            _fsdp_compat._plan_one_bucket(params, (BF16, FP32), None)

    def test_uneven_shards_on_another_dim(self):
        with self.assertRaisesRegex(AssertionError, "requires even sharding"):
            reduce_file._view_by_rank(torch.zeros(2, 7), 1, 3)


class TestCopyIn(DeviceFreeTest):
    """Operators that are one kernel each on CUDA, for what policies may ask for."""

    RANKS, COUNT = 4, 16
    # Gradients' dtypes by turns, what each is added and sent in, fused and other copies
    HALVES = (FP32, BF16)
    CASES = {
        "as they are": ((BF16,), (BF16, None), 1, 0),
        "cast in the kernel": ((BF16,), (FP32, None), 1, 0),
        "narrowed": ((FP32,), (BF16, None), 1, 1),
        "fp16 widened": ((FP16,), (FP32, None), 1, 1),
        "sent in bf16": ((FP32,), (FP32, BF16), 1, 1),
        "two dtypes widened": (HALVES, (FP32, None), 2, 1),
        "two dtypes narrowed": (HALVES, (BF16, None), 2, 1),
        "fp16 and bf16 widened": ((FP16, BF16), (FP32, None), 2, 1),
        "sent as they are": (HALVES, {FP32: (FP32, FP32), BF16: (FP32, BF16)}, 2, 2),
        "sent in two others": (HALVES, {FP32: (FP32, FP16), BF16: (FP32, FP32)}, 2, 2),
    }

    def copy_in(self, dtypes, keys, is_dense=True) -> Counter[str]:
        """Copies all in, each into its place. Returns the operators."""
        in_turn = sorted((dtypes * self.COUNT)[: self.COUNT], key=str)
        numels = [2 * (i % 3 + 1) for i in range(self.COUNT)]
        slots = [*map(layouts.ReduceSlot, range(self.COUNT), in_turn, numels)]
        keys = [keys[d] if isinstance(keys, dict) else keys for d in in_turn]
        buckets = layouts.plan_buckets(slots, keys, is_mixed=True)
        sizes = [(self.RANKS * n.shard_numel // 2 - n.param % 2, 2) for n in slots]
        full = [torch.randn(size).to(d) for size, d in zip(sizes, in_turn)]
        full = full if is_dense else [grad.t().contiguous().t() for grad in full]
        grads = [[full[slot.param] for slot in bucket.slots] for bucket in buckets]
        layout = layouts.plan_gather(
            tuple(b.wire_dtype for b in buckets), tuple(b.shard_numel for b in buckets)
        )
        numel = self.RANKS * layout.segment_numel
        buffer = torch.empty(numel, dtype=layout.buffer_dtype)
        columns = reduce_file._as_columns(buffer, layout, self.RANKS)
        by_rank = {"shard_world_size": self.RANKS, "allocate": lambda *_: buffer}
        reduction: Any = SimpleNamespace(**by_rank)
        parts = [BucketGrads([], *pair) for pair in zip(buckets, grads)]
        with comms.count_operators() as counts:
            if len(buckets) > 1:
                reduce_file.Exchanged().copy_in(reduction, parts)
            else:
                reduce_file.copy_in_grads(buckets[0], grads[0], columns[0])
        for bucket, rows in zip(buckets, columns):
            for slot, start in zip(bucket.slots, bucket.starts):
                padded = torch.zeros(self.RANKS * slot.shard_numel)
                padded[: full[slot.param].numel()] = full[slot.param].flatten()
                expected = padded.view(self.RANKS, -1).to(rows.dtype)
                self.assert_same(rows.narrow(1, start, slot.shard_numel), expected)
        return counts

    def test_a_fused_copy_for_each_pair_of_dtypes(self) -> None:
        for name, (dtypes, keys, fused, copied) in self.CASES.items():
            with self.subTest(name):
                counts = self.copy_in(dtypes, keys)
                found = counts["aten::_chunk_cat"], counts["aten::copy_"]
                self.assertEqual(found, (fused, copied))
        counts = self.copy_in((BF16,), (FP32, None), is_dense=False)
        self.assertEqual(counts["aten::copy_"], self.COUNT + self.COUNT // 2)

    def test_all_may_have_to_be_reordered(self) -> None:
        slots = tuple(layouts.ReduceSlot(i, FP32, 4, 1, num_pieces=0) for i in (0, 1))
        grads = [torch.randn(2, 8) for _ in slots]
        shards = [[g.flatten() for g in grad.chunk(self.RANKS, 1)] for grad in grads]
        for is_mixed in (False, True):
            bucket = layouts.ReduceBucket((FP32, None), slots, is_mixed)
            rows = torch.empty(self.RANKS, bucket.shard_numel)
            # Of a mixed unit where a profiler wants to see operators
            with mock.patch.object(
                reduce_file, "gets_operators", return_value=is_mixed
            ):
                reduce_file.copy_in_grads(bucket, [*grads], rows)
            self.assert_same(rows, torch.cat([*map(torch.stack, shards)], dim=1))

    def test_large_ones_are_cast_without_a_temporary(self) -> None:
        for case in ("narrowed", "sent in bf16", "fp16 widened"):
            dtypes, keys, *_ = self.CASES[case]
            are_large = mock.patch.object(reduce_file, "_MAX_RUN_NUMEL", 0)
            with self.subTest(case), are_large:
                counts = self.copy_in(dtypes, keys)
                # Twice where parameters do not divide by the ranks
                self.assertEqual(counts["aten::copy_"], self.COUNT + self.COUNT // 2)
                self.assertEqual(counts["aten::_chunk_cat"], 0)


class TestSymmetricMemory(FakeGroupTest):
    """A pool registers all that is in use at once, which is why units hold one input."""

    def test_an_input_is_waited_for_and_freed_before_the_next(self) -> None:
        specs = [Spec((8, 8), dtype) for dtype in (FP32, BF16, FP16)]
        model = sharded(specs, self.mesh, device="cpu")
        model.set_force_sum_reduction_for_comms(True)
        inputs: list[StorageWeakRef] = []
        alive: list[int] = []
        waited: list[int] = []  # when so many inputs had been there
        allocate = reduce_file.allocate

        def noting(comm: Any, numel: int, *args: Any) -> torch.Tensor:
            buffer = allocate(comm, numel, *args)
            if numel == 64:
                alive.append(sum(not ref.expired() for ref in inputs))
                inputs.append(StorageWeakRef(buffer.untyped_storage()))
            return buffer

        def wait(*unused: Any) -> None:
            waited.append(len(inputs))

        with (
            SymmMemStub().patched(),
            mock.patch.object(reduce_file, "allocate", noting),
            mock.patch.object(FSDPCommContext, "wait_current_stream", wait),
        ):
            model.set_symm_mem_for_comm()
            for _ in range(2):
                model([torch.ones(spec.size) for spec in specs]).backward()
                model.zero_grad()
        self.assertEqual(alive, [0] * 6)
        # Wherever a unit has had one or two of its three
        self.assertEqual([n for n in waited if n % 3], [1, 2, 4, 5])


class Proxy:
    """Has the methods of another object, as a wrapper that logs or times them does."""

    def __init__(self, comm: ReduceScatter) -> None:
        self.allocate, self.reduce = comm.allocate, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reduce(*args, **kwargs)


class TestOrder(FakeGroupTest):
    """In which order a unit of three reduce dtypes issues what."""

    COPY_IN, SCATTER = "fsdp::chunk_cat", "c10d::_reduce_scatter_base_"
    ALL_REDUCE = "c10d::allreduce_"

    def forward(self, mesh: DeviceMesh, comm: Any = None) -> torch.Tensor:
        specs = [Spec((8, 2), dtype) for dtype in (BF16, FP32, FP16)]
        model = sharded(specs, mesh, device="cpu")
        if comm is not None:
            model.set_custom_reduce_scatter(comm)
        return model([torch.ones(spec.size) for spec in specs])

    def issued(self, mesh: DeviceMesh, comm: Any = None) -> list[str]:
        loss = self.forward(mesh, comm)
        with dispatched() as names:
            loss.backward()
        issued = [name.replace("_mixed_dtype", "") for name in names]
        return [n for n in issued if n in (self.COPY_IN, self.SCATTER, self.ALL_REDUCE)]

    def test_sizes_of_other_gradients_than_those_to_prepare_are_refused(self) -> None:
        name = "_default_reduce_scatter_input_fn"
        replaced = mock.patch.object(param_group, name, lambda *_: ())
        with replaced, self.assertRaisesRegex(ValueError, "shorter"):
            self.forward(self.mesh).backward()

    def test_buckets_of_a_wrapped_reduction_share_no_memory(self) -> None:
        wrapped = functools.partial(param_group.foreach_reduce)
        specs = [Spec((8, 2), FP32), Spec((8, 4), BF16)]
        model = sharded(specs, self.mesh, device="cpu")
        model.set_custom_reduce_scatter(KeptScatter(keeps_results=True))
        with mock.patch.object(param_group, "foreach_reduce", wrapped):
            model([torch.ones(spec.size) for spec in specs]).backward()
        grads = {param.grad._local_tensor.data_ptr() for param in model.parameters()}
        self.assertEqual(len(grads), 2)

    def test_gradients_of_a_reduced_bucket_are_let_go(self) -> None:
        """Also by a wrapped reduction that does not empty the list that it gets."""
        own, alive, seen = param_group.foreach_reduce, [], []

        def reduce(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            alive.append(sum(reference() is not None for reference in seen))
            seen.extend(map(weakref.ref, grads))
            return own(params, [*grads], *args, **kwargs)

        loss = self.forward(self.mesh)
        with mock.patch.object(param_group, "foreach_reduce", reduce):
            loss.backward()
        self.assertEqual((alive, len(seen)), ([0] * 3, 3))

    def test_hsdp_deferred_sum_shares_no_memory_with_the_next(self) -> None:
        hybrid = mesh_of(2, self.ranks // 2, device="cpu")
        model = sharded([Spec((8, 2), FP32)], hybrid, device="cpu")
        model.set_custom_reduce_scatter(KeptScatter(keeps_results=True))
        model.set_requires_all_reduce(False)
        for value in (1.0, 3.0):
            model([torch.full((8, 2), value)]).backward()
        found = comms.group_of(model)._partial_reduce_output
        self.assertEqual({*found.tolist()}, {4.0})

    def test_order_of_copies_and_collectives(self) -> None:
        hybrid = mesh_of(2, self.ranks // 2, device="cpu")
        copies, scatters = [self.COPY_IN] * 3, [self.SCATTER] * 3
        both = [self.SCATTER, self.ALL_REDUCE] * 3
        in_turns = [self.COPY_IN, self.SCATTER] * 3
        for name, mesh, comm, expected in (
            ("all copies come first", self.mesh, None, copies + scatters),
            ("an all-reduce beside the next scatter", hybrid, None, copies + both),
            ("one buffer is sent before a refill", self.mesh, KeptScatter(), in_turns),
            ("or what may be one", self.mesh, Proxy(DefaultReduceScatter()), in_turns),
        ):
            with self.subTest(name):
                self.assertEqual(self.issued(mesh, comm), expected)


if __name__ == "__main__":
    run_tests()
