# Owner(s): ["oncall: distributed"]
"""Where parameters lie in a unit's buffers: plans, checked without a device."""

import functools
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_helpers.common.comms import BF16, count_operators, FP8, FP16, FP32, FP64
from fsdp_helpers.common.utils import as_bytes, DeviceFreeTest

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_cache import (
    GatherInputs,
    GatherOutputs,
    SplitSizes,
)
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.quick

NAMES = (
    "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
    "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex128 complex64 complex32 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
ALL_DTYPES = tuple(getattr(torch, name) for name in NAMES.split())
FLOATING = ALL_DTYPES[:6]

MIXES = {
    "one": [(BF16, 5)],
    "uniform": [(FP32, 3), (FP32, 1), (FP32, 8)],
    "uniform 1-byte": [(FP8, 3), (FP8, 5)],
    "narrow first": [(BF16, 3), (FP32, 2), (FP16, 1), (FP64, 1), (torch.bool, 3)],
    "hybrid block": [(BF16, 12), (FP32, 3), (FP32, 1), (BF16, 7), (FP16, 9)],
    "nothing of the widest": [(FP64, 0), (BF16, 3), (torch.uint8, 1)],
    "1-byte dtypes": [(FP8, 3), (torch.uint8, 2), (torch.bool, 1)],
    "complex": [(torch.complex64, 1), (BF16, 1), (torch.complex128, 2)],
    "empty": [],
}


def mixes(min_size=0):
    """Draws lists of (dtype, elements of one rank's shard)."""
    numels = st.one_of(st.sampled_from([0, 1]), st.integers(0, 40))
    inputs = st.tuples(st.sampled_from(ALL_DTYPES), numels)
    return st.lists(inputs, min_size=min_size, max_size=12)


def floating_params(min_size=0):
    """Draws lists of (dtype, another one, elements of one rank's shard)."""
    dtypes, numels = st.sampled_from(FLOATING), st.integers(0, 9)
    return st.lists(st.tuples(dtypes, dtypes, numels), min_size=min_size, max_size=12)


# The same examples in every run, and however long one takes
plans = settings(max_examples=150, deadline=None, derandomize=True, database=None)
copies = settings(plans, max_examples=50)


def examples(*values):
    """Runs a test of one drawn argument with each of these, too."""
    return lambda test: functools.reduce(lambda t, v: example(v)(t), values, test)


def plan(mix: list[tuple[torch.dtype, int]]) -> layouts.GatherLayout:
    return layouts.plan_gather(*zip(*mix)) if mix else layouts.plan_gather((), ())


class TestDtypes(DeviceFreeTest):
    def test_wider_dtypes_come_first_and_those_of_one_width_have_a_fixed_order(self):
        ordered = [FP64, FP32, torch.int32, BF16, FP16, torch.int16, FP8, torch.uint8]
        for seed in range(20):
            mixed = random.Random(seed).sample(ordered, len(ordered))
            self.assertEqual(sorted(mixed, key=layouts.dtype_sort_key), ordered)
        keys = {layouts.dtype_sort_key(dtype) for dtype in ALL_DTYPES}
        self.assertEqual(len(keys), len(ALL_DTYPES))

    def test_policy_sets_the_reduce_dtype_of_floating_gradients_alone(self):
        found = {dtype: layouts.reduce_dtype_of(dtype, FP32) for dtype in ALL_DTYPES}
        expected = {d: FP32 if d.is_floating_point else d for d in ALL_DTYPES}
        self.assertEqual(found, expected)


class TestGatherLayout(DeviceFreeTest):
    def check_mixed(self, mix, layout) -> None:
        """Regions by dtype, in each the best aligned first, and padding at its end."""
        self.assertEqual(layout.buffer_dtype, torch.uint8)
        dtypes = sorted({dtype for dtype, _ in mix}, key=layouts.dtype_sort_key)
        self.assertEqual([region.dtype for region in layout.regions], dtypes)
        for region in layout.regions:
            of_dtype = [i for i, (dtype, _) in enumerate(mix) if dtype == region.dtype]
            of_dtype.sort(key=lambda i: -math.gcd(nbytes(mix[i]), 16))
            self.assertEqual([i for i, _ in region.slots if i is not None], of_dtype)
            self.assertEqual(region.start_nbytes % 16, 0)
            used = sum(nbytes(mix[i]) for i in of_dtype)
            self.assertEqual(region.nbytes, used + -used % 16)

    @plans
    @given(mixes())
    @examples(*MIXES.values(), *([(d, n) for n in (3, 0, 7)] for d in ALL_DTYPES))
    def test_gather_orders_and_pads_regions_by_dtype(self, mix):
        layout = plan(mix)
        if len({dtype for dtype, _ in mix}) > 1:
            self.check_mixed(mix, layout)
        elif mix:  # as in the release
            numels = [numel for _, numel in mix]
            self.assertEqual(layout.slots, (*enumerate(numels),))
            self.assertEqual(layout.buffer_dtype, layouts.storage_dtype(mix[0][0]))
        segment_nbytes = layout.segment_numel * layout.buffer_dtype.itemsize
        self.assertEqual(segment_nbytes, sum(each.nbytes for each in layout.regions))
        self.assertEqual(sum(n for _, n in layout.slots), layout.segment_numel)


def nbytes(entry: tuple[torch.dtype, int]) -> int:
    dtype, numel = entry
    return numel * dtype.itemsize


def random_shard(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Returns random bits, among them those of NaNs, as elements of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    high, size = 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,)
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype)


def random_shards(mix, world_size: int) -> list[list[torch.Tensor]]:
    """Returns for each rank its shard of each input."""
    return [
        [random_shard(*entry, seed=100 * rank + i) for i, entry in enumerate(mix)]
        for rank in range(world_size)
    ]


def make_inputs(shards, copies, device) -> GatherInputs:
    return GatherInputs(shards, SimpleNamespace(copies=copies), device)


def gather_by_copies(
    layout: layouts.GatherLayout, shards: list[list[torch.Tensor]]
) -> torch.Tensor:
    """Fills each rank's segment of one buffer, as all ranks together would."""
    numel = layout.segment_numel
    buffer = torch.zeros(len(shards) * numel, dtype=layout.buffer_dtype)
    for segment, inputs in zip(buffer.split(max(numel, 1)), shards):
        copies = layouts.plan_copy_in(layout, [tensor.dtype for tensor in inputs])
        last = [copy.region.slots[-1][0] for copy in copies if not copy.casts]
        assert None not in last, "padding at the end is copied"
        collectives._copy_in(segment, make_inputs(inputs, copies, segment.device))
    return buffer


class TestCopies(DeviceFreeTest):
    def assert_copied_out(self, buffer, layout, mix, shards) -> None:
        world_size = len(shards)
        outputs = [
            torch.full((world_size * numel * dtype.itemsize,), 1, dtype=torch.uint8)
            .view(dtype)
            .contiguous()
            for dtype, numel in mix
        ]
        params = [SimpleNamespace(all_gather_outputs=[output]) for output in outputs]
        gathered = GatherOutputs(params)
        split_sizes = SplitSizes(layout, ShardedState.SHARDED_POST_FORWARD)
        collectives.copy_out(buffer, split_sizes, gathered, world_size)
        for i, output in enumerate(outputs):
            expected = torch.cat([inputs[i].view(torch.uint8) for inputs in shards])
            self.assert_same(as_bytes(output), expected)

    @copies
    @given(mixes(min_size=1), st.integers(1, 5))
    @example(MIXES["narrow first"], 3)
    @example(MIXES["nothing of the widest"], 2)
    @example(MIXES["1-byte dtypes"], 4)
    @example(MIXES["complex"], 5)
    @example(MIXES["hybrid block"], 128)
    def test_what_all_ranks_copy_in_is_copied_out_unchanged(self, mix, world_size):
        layout, shards = plan(mix), random_shards(mix, world_size)
        self.assert_copied_out(gather_by_copies(layout, shards), layout, mix, shards)

    def test_what_one_rank_has_alone_is_copied_by_one_kernel_for_each_pair(self):
        for dtype in ALL_DTYPES:
            ((shard,),) = random_shards([(dtype, 3)], 1)
            collectives.copy_each([target := torch.empty_like(shard)], [shard])
            self.assert_same(as_bytes(target), as_bytes(shard), str(dtype))
        stored, computed = (BF16, FP32, BF16, FP32), (BF16, BF16, FP32, FP32)
        sources = [torch.ones(3, dtype=dtype) for dtype in stored * 2]
        targets = [torch.zeros(3, dtype=dtype) for dtype in computed * 2]
        with count_operators() as counts:
            collectives.copy_each(targets, sources)
        self.assertEqual(counts, {"aten::_foreach_copy_": 4})

    def test_host_shards_are_moved_one_at_a_time_if_they_are_cast(self):
        """Others go straight into the segment, as what an extension has moved."""
        for stored, devices, moves in (
            ([FP32, BF16, FP32], ["cpu"] * 3, 0),
            ([BF16, BF16, FP32], ["cpu"] * 3, 1),
            ([BF16, FP32, BF16], ["meta", "cpu", "cpu"], 2),
        ):
            layout = plan([(FP32, 3), (BF16, 5), (FP32, 8)])
            pairs = zip(stored, (3, 5, 8), devices, strict=True)
            shards = [torch.ones(n, dtype=d, device=device) for d, n, device in pairs]
            nbytes = {"dtype": torch.uint8, "device": "meta"}
            segment = torch.empty(layout.segment_numel, **nbytes)
            with self.subTest(f"{moves} moves"):
                with count_operators() as counts:
                    copies = layouts.plan_copy_in(layout, stored)
                    inputs = make_inputs(shards, copies, segment.device)
                    collectives._copy_in(segment, inputs)
                found = counts["aten::_to_copy"], counts["aten::copy_"]
                self.assertEqual(found, (moves, 3))


class TestPieces(DeviceFreeTest):
    @parametrize(
        "size,dim,count",
        [
            ((8, 128, 128), 1, 8),  # of 32 KiB in bf16
            ((8, 128, 127), 1, 0),
            ((2, 4, 128, 128), 2, 8),
            ((1, 2, 3), 1, 1),  # in order as it is
            ((3, 4), 0, 1),
        ],
    )
    def test_large_pieces_are_copied_apart(self, size, dim, count):
        sizes = {"padded_sharded_param_size": torch.Size(size)}
        param = SimpleNamespace(fsdp_placement=SimpleNamespace(dim=dim), **sizes)
        self.assertEqual(layouts.count_pieces(param, BF16), count)


class TestReduceBuckets(DeviceFreeTest):
    def plan(self, params) -> tuple[layouts.ReduceBucket, ...]:
        slots = [layouts.ReduceSlot(i, d, n) for i, (d, _, n) in enumerate(params)]
        return layouts.plan_buckets(slots, [(dtype, None) for _, dtype, _ in params])

    @plans
    @given(floating_params())
    def test_each_stored_dtype_is_one_run_of_the_bucket_it_reduces_in(self, params):
        """Each parameter is (storage dtype, reduce dtype, elements of a padded shard)."""
        buckets = self.plan(params)
        slots = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
        self.assertEqual(sorted(slot.param for slot, _ in slots), [*range(len(params))])
        for slot, bucket in slots:
            found = (slot.grad_dtype, bucket.dtype, slot.shard_numel)
            self.assertEqual(found, params[slot.param])
        dtypes = {reduce_dtype for _, reduce_dtype, _ in params}
        expected = sorted(dtypes, key=layouts.dtype_sort_key)
        self.assertEqual([bucket.dtype for bucket in buckets], expected)
        for bucket in buckets:
            self.check_runs_cover(bucket)
            dtypes = {slot.grad_dtype for slot in bucket.slots}
            runs = [dtype for dtype, _ in bucket.runs]
            self.assertEqual(runs, sorted(dtypes, key=layouts.dtype_sort_key))
            for _, indices in bucket.runs:
                members = [bucket.slots[i].param for i in indices]
                self.assertEqual(members, sorted(members))

    def check_runs_cover(self, bucket: layouts.ReduceBucket) -> None:
        numels = [slot.shard_numel for slot in bucket.slots]
        starts = [sum(numels[:i]) for i in range(len(numels) + 1)]
        self.assertEqual(bucket.starts, starts)
        self.assertEqual(bucket.shard_numel, starts[-1])
        dtypes = [dtype for dtype, indices in bucket.runs for _ in indices]
        self.assertEqual(dtypes, [slot.grad_dtype for slot in bucket.slots])
        indices = [i for _, indices in bucket.runs for i in indices]
        self.assertEqual(indices, [*range(len(dtypes))])


if __name__ == "__main__":
    run_tests()
