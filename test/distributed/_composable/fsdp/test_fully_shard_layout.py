# Owner(s): ["oncall: distributed"]
"""
Where the parameters of a unit lie in its buffers. Needs no device and no
process group: the plans are checked by themselves, and on plain CPU tensors.
"""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_common.comms import BF16, count_operators, FP8, FP16, FP32, FP64
from fsdp_common.utils import DeviceFreeTest

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    BucketGrads,
    join_parts,
)
from torch.distributed.fsdp._fully_shard._fsdp_copies import (
    _copy_in,
    _split_copy,
    _to_columns,
    copy_each,
    relaid,
)
from torch.distributed.fsdp._fully_shard._fsdp_layout import (
    dtype_sort_key,
    extend_bucket,
    GatherLayout,
    in_plan_order,
    padded_shard_numel,
    plan_all_to_all,
    plan_buckets,
    plan_copy_in,
    plan_gather,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
    storage_dtype,
)
from torch.testing._internal.common_utils import run_tests


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


# The same examples in every run, and however long one takes
plans = settings(max_examples=150, deadline=None, derandomize=True, database=None)
copies = settings(plans, max_examples=50)


def plan(mix: list[tuple[torch.dtype, int]], **kwargs) -> GatherLayout:
    return plan_gather([dtype for dtype, _ in mix], [n for _, n in mix], **kwargs)


def slots_of(layout: GatherLayout) -> dict[int, tuple[torch.dtype, int, int]]:
    """Returns dtype, start and end, in bytes of a segment, of each input."""
    slots = {}
    for region in layout.regions:
        start = region.start_nbytes
        for i, numel in region.slots:
            end = start + numel * region.dtype.itemsize
            if i is not None:
                slots[i] = (region.dtype, start, end)
            start = end
    return slots


def order_of(layout: GatherLayout) -> list[int]:
    """Returns the positions of the inputs, as a segment orders them."""
    return [i for i, _ in layout.slots if i is not None]


class TestDtypes(DeviceFreeTest):
    def test_wider_dtypes_come_first_and_those_of_one_width_have_a_fixed_order(self):
        ordered = [FP64, FP32, torch.int32, BF16, FP16, torch.int16, FP8, torch.uint8]
        for seed in range(20):
            mixed = random.Random(seed).sample(ordered, len(ordered))
            self.assertEqual(sorted(mixed, key=dtype_sort_key), ordered)
        self.assertEqual(len({dtype_sort_key(d) for d in ALL_DTYPES}), len(ALL_DTYPES))

    def test_policy_sets_the_reduce_dtype_of_floating_gradients_alone(self):
        for dtype in ALL_DTYPES:
            self.assertEqual(reduce_dtype_of(dtype, None), dtype)
            expected = FP32 if dtype.is_floating_point else dtype
            self.assertEqual(reduce_dtype_of(dtype, FP32), expected)


class TestPaddedShards(DeviceFreeTest):
    SIZES = [(1,), (2,), (7,), (128,), (129,), (5, 3), (3, 1, 4), (127, 2), (6, 0)]

    def test_shards_are_as_large_as_the_largest_chunk(self):
        for ranks in range(1, 129):
            cases = [(size, 0) for size in self.SIZES]
            cases += [((3, 2 * ranks, 5), 1), ((3, 2, 5 * ranks), 2)]
            for size, dim in cases:
                chunks = torch.empty(size, device="meta").chunk(ranks, dim=dim)
                largest = max(chunk.numel() for chunk in chunks)
                numel = padded_shard_numel(torch.Size(size), ranks, dim)
                self.assertEqual(numel, largest, msg=f"{size} over {ranks}")


class TestGatherLayout(DeviceFreeTest):
    def check_mixed(self, mix, layout) -> None:
        """Regions by dtype, in each the best aligned first, and padding at its end."""
        self.assertEqual(layout.buffer_dtype, torch.uint8)
        dtypes = sorted({dtype for dtype, _ in mix}, key=dtype_sort_key)
        self.assertEqual([region.dtype for region in layout.regions], dtypes)
        for region in layout.regions:
            of_dtype = [i for i, (dtype, _) in enumerate(mix) if dtype == region.dtype]
            of_dtype.sort(key=lambda i: -math.gcd(nbytes(mix[i]), 16))
            self.assertEqual([*region.inputs], of_dtype)
            used = sum(nbytes(mix[i]) for i in of_dtype)
            self.assertEqual(region.nbytes, used + -used % 16)

    def check(self, mix) -> None:
        layout = plan(mix)
        self.assertEqual(sorted(order_of(layout)), [*range(len(mix))])
        is_mixed = len({dtype for dtype, _ in mix}) > 1
        if is_mixed:
            self.check_mixed(mix, layout)
        elif mix:  # as in the release
            self.assertEqual(order_of(layout), [*range(len(mix))])
            self.assertEqual(layout.buffer_dtype, storage_dtype(mix[0][0]))
            self.assertEqual(layout.split_sizes, tuple(numel for _, numel in mix))
        slots, position = slots_of(layout), 0
        for i, size in layout.slots:
            start, position = position, position + size * layout.buffer_dtype.itemsize
            if i is None:
                self.assertIn(position - start, range(1, 16))
                self.assertEqual(position % 16, 0)
                continue
            dtype, *extent = slots[i]
            self.assertEqual(dtype, mix[i][0])
            self.assertEqual(extent, [start, position])
            self.assertEqual(position - start, nbytes(mix[i]))
            multiple = math.gcd(position - start, 16) if is_mixed else dtype.itemsize
            for rank in (0, 1, 127):
                place = rank * layout.segment_nbytes + start
                self.assertEqual(place % multiple, 0)
        self.assertEqual(position, layout.segment_nbytes)
        self.assertEqual(sum(layout.split_sizes), layout.segment_numel)

    def check_unsorted(self, mix) -> None:
        layout = plan(mix, by_dtype=False)
        self.assertEqual([i for i, _ in layout.slots], [*range(len(mix))])
        self.assertEqual(layout.segment_nbytes, sum(map(nbytes, mix)))

    def test_fixed_mixes(self):
        uniform = [[(dtype, n) for n in (3, 0, 7)] for dtype in ALL_DTYPES]
        for mix in (*MIXES.values(), *uniform):
            with self.subTest(mix=mix):
                self.check(mix)
                self.check_unsorted(mix)

    @plans
    @given(mixes())
    def test_random_mixes(self, mix):
        self.check(mix)
        self.check_unsorted(mix)

    def test_a_size_for_each_dtype_is_required(self):
        with self.assertRaisesRegex(ValueError, "2 dtypes for 1 sizes"):
            plan_gather([FP32, BF16], [3])


def nbytes(entry: tuple[torch.dtype, int]) -> int:
    dtype, numel = entry
    return numel * dtype.itemsize


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def random_shard(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Returns random bits, among them those of NaNs, as elements of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    high, size = 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,)
    bits = torch.randint(high, size, dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def random_shards(mix, world_size: int) -> list[list[torch.Tensor]]:
    """Returns for each rank its shard of each input."""
    return [
        [random_shard(*entry, seed=100 * rank + i) for i, entry in enumerate(mix)]
        for rank in range(world_size)
    ]


def gather_by_copies(
    layout: GatherLayout, shards: list[list[torch.Tensor]]
) -> torch.Tensor:
    """Fills each rank's segment of one buffer, as all ranks together would."""
    numel = layout.segment_numel
    buffer = torch.zeros(len(shards) * numel, dtype=layout.buffer_dtype)
    for segment, inputs in zip(buffer.split(max(numel, 1)), shards):
        copies = plan_copy_in(layout, [tensor.dtype for tensor in inputs])
        last = [copy.slots[-1][0] for copy in copies if not copy.casts]
        assert None not in last, "padding at the end is copied"
        _copy_in(segment, copies, inputs)
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
        _split_copy(buffer, layout, _to_columns(outputs, layout, world_size))
        for i, output in enumerate(outputs):
            expected = torch.cat([inputs[i].view(torch.uint8) for inputs in shards])
            self.assertEqual(as_bytes(output), expected.tolist())

    @copies
    @given(mixes(min_size=1), st.integers(1, 5))
    @example(MIXES["narrow first"], 3)
    @example(MIXES["nothing of the widest"], 2)
    @example(MIXES["1-byte dtypes"], 4)
    @example(MIXES["complex"], 5)
    @example(MIXES["hybrid block"], 128)
    def test_what_all_ranks_copy_in_is_copied_out_unchanged(self, mix, world_size):
        layout, shards = plan(mix), random_shards(mix, world_size)
        buffer = gather_by_copies(layout, shards)
        self.assert_copied_out(buffer, layout, mix, shards)

    @copies
    @given(mixes(min_size=1), st.integers(1, 5))
    @example(MIXES["narrow first"], 3)
    def test_inputs_in_parameter_order_are_copied_out_unchanged(self, mix, world_size):
        layout, shards = plan(mix, by_dtype=False), random_shards(mix, world_size)
        pieces = [shard.view(torch.uint8) for inputs in shards for shard in inputs]
        buffer = torch.cat(pieces).view(layout.buffer_dtype)
        self.assert_copied_out(buffer, layout, mix, shards)

    def test_shards_may_start_anywhere_in_their_storage(self):
        mix = [(BF16, 4), (FP32, 2), (BF16, 2), (FP8, 4)]
        (shards,) = random_shards(mix, 1)
        pieces = [torch.cat([shard[:1], shard])[1:] for shard in shards]
        self.assertEqual({piece.storage_offset() for piece in pieces}, {1})
        buffer = gather_by_copies(plan(mix), [pieces])
        self.assert_copied_out(buffer, plan(mix), mix, [shards])

    def test_what_one_rank_has_alone_is_copied_by_one_kernel_for_each_pair(self):
        for dtype in ALL_DTYPES:
            ((shard,),) = random_shards([(dtype, 3)], 1)
            copy_each([target := torch.empty_like(shard)], [shard])
            self.assertEqual(as_bytes(target), as_bytes(shard), str(dtype))
        stored, computed = (BF16, FP32, BF16, FP32), (BF16, BF16, FP32, FP32)
        sources = [torch.ones(3, dtype=dtype) for dtype in stored * 2]
        targets = [torch.zeros(3, dtype=dtype) for dtype in computed * 2]
        with count_operators() as counts:
            copy_each(targets, sources)
        self.assertEqual(counts, {"aten::_foreach_copy_": 4})
        self.assertTrue(all(bool((target == 1).all()) for target in targets))

    @copies
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(FLOATING), st.sampled_from(FLOATING), st.integers(0, 9)
            ),
            min_size=1,
            max_size=10,
        )
    )
    def test_shards_are_cast_into_their_slots(self, params):
        """Each is (stored dtype, compute dtype, elements)."""
        mix = [(compute, numel) for _, compute, numel in params]
        values = [
            torch.linspace(-3 - i, 5 + i, numel).to(stored)
            for i, (stored, _, numel) in enumerate(params)
        ]
        layout = plan(mix)
        segment = gather_by_copies(layout, [values])
        for i, (dtype, start, end) in slots_of(layout).items():
            slot = segment.view(torch.uint8)[start:end]
            self.assertEqual(as_bytes(slot), as_bytes(values[i].to(dtype)))


class TestReduceBuckets(DeviceFreeTest):
    # Of each parameter: storage dtype, reduce dtype, elements of a padded shard
    MIXED = (
        (BF16, FP32, 3),
        (FP32, FP32, 1),
        (FP16, FP16, 4),
        (BF16, FP32, 2),
        (BF16, BF16, 5),
        (FP32, FP32, 0),
    )
    params = st.lists(
        st.tuples(
            st.sampled_from(FLOATING), st.sampled_from(FLOATING), st.integers(0, 9)
        ),
        max_size=12,
    )

    def plan(self, params, is_aligned: bool = False) -> tuple[ReduceBucket, ...]:
        slots = [ReduceSlot(i, orig, n) for i, (orig, _, n) in enumerate(params)]
        keys = [(dtype, None) for _, dtype, _ in params]
        buckets = plan_buckets(slots, keys)
        if not is_aligned:
            return buckets
        # As joined ones of several units
        return tuple(in_plan_order(replace(b, is_aligned=True)) for b in buckets)

    def check(self, params, buckets) -> None:
        slots = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
        self.assertEqual(sorted(slot.param for slot, _ in slots), [*range(len(params))])
        for slot, bucket in slots:
            found = (slot.grad_dtype, bucket.dtype, slot.shard_numel)
            self.assertEqual(found, params[slot.param])
        dtypes = {reduce_dtype for _, reduce_dtype, _ in params}
        expected = sorted(dtypes, key=dtype_sort_key)
        self.assertEqual([bucket.dtype for bucket in buckets], expected)
        for bucket in buckets:
            self.check_runs_cover(bucket)
            dtypes = {slot.grad_dtype for slot in bucket.slots}
            runs = [run.grad_dtype for run in bucket.runs]
            self.assertEqual(runs, sorted(dtypes, key=dtype_sort_key))
            for run in bucket.runs:
                itemsize = min(run.grad_dtype.itemsize, bucket.dtype.itemsize)
                members = [
                    (-math.gcd(s.shard_numel * itemsize, 16), s.param)
                    if bucket.is_aligned
                    else s.param
                    for s in bucket.slots[run.first : run.last]
                ]
                self.assertEqual(members, sorted(members))

    @plans
    @given(params, st.booleans())
    @example(MIXED, False)
    @example(MIXED, True)
    def test_each_storage_dtype_is_one_run_of_the_bucket_of_its_reduce_dtype(
        self, params, is_aligned
    ):
        self.check(params, self.plan(params, is_aligned))

    def check_runs_cover(self, bucket: ReduceBucket) -> None:
        position, first = 0, 0
        for run in bucket.runs:
            self.assertEqual((run.start_numel, run.first), (position, first))
            self.assertGreater(run.last, run.first)
            members = bucket.slots[run.first : run.last]
            self.assertEqual({slot.grad_dtype for slot in members}, {run.grad_dtype})
            starts = bucket.starts[run.first : run.last]
            for slot, start in zip(members, starts, strict=True):
                self.assertEqual(start, position)
                position += slot.shard_numel
            self.assertEqual(run.numel, position - run.start_numel)
            padding = 0
            if bucket.is_aligned:
                padding = -position * bucket.wire_dtype.itemsize % 16
                padding //= bucket.wire_dtype.itemsize
            self.assertEqual(run.padding, padding)
            position, first = position + padding, run.last
        self.assertEqual((position, first), (bucket.shard_numel, len(bucket.slots)))

    def assert_aligned(self, bucket: ReduceBucket, start: int, row: int) -> None:
        """In the input of two ranks, from ``start``, in the output and if cast."""
        wire, dtype = bucket.wire_dtype.itemsize, bucket.dtype.itemsize
        for run in bucket.runs:
            grad = run.grad_dtype.itemsize
            for i in range(run.first, run.last):
                if bucket.slots[i].shard_numel * min(wire, dtype, grad) % 16 == 0:
                    at, base = bucket.starts[i], run.start_numel
                    places = (start + at * wire, row, at * dtype, (at - base) * grad)
                    self.assertEqual([place % 16 for place in places], [0] * 4)

    @plans
    @given(
        st.lists(
            st.tuples(
                st.sampled_from((FP32, BF16)), st.sampled_from((0, 1, 3, 4, 8, 24))
            ),
            min_size=1,
            max_size=12,
        ),
        st.sampled_from((None, "as stored", BF16)),
    )
    def test_what_is_joined_or_sent_is_aligned(self, params, sent):
        slots = [ReduceSlot(i, dtype, n) for i, (dtype, n) in enumerate(params)]
        keys = [(FP32, d if sent == "as stored" else sent) for d, _ in params]
        buckets = plan_buckets(slots, keys, is_mixed=True)
        for bucket in buckets:
            grads = [torch.empty(0)] * len(bucket.slots)
            parts = [BucketGrads(grads, bucket, [*grads], None) for _ in range(3)]
            joined = join_parts(parts).bucket
            self.assertEqual(len(joined.slots), 3 * len(bucket.slots))
            row = joined.shard_numel * joined.wire_dtype.itemsize
            self.assert_aligned(joined, 0, row)
        if len(buckets) > 1:
            numels = tuple(bucket.shard_numel for bucket in buckets)
            layout = plan_all_to_all(tuple(b.wire_dtype for b in buckets), numels)
            for region in layout.regions:
                bucket = buckets[region.inputs[0]]
                self.assert_aligned(bucket, region.start_nbytes, layout.segment_nbytes)

    @plans
    @given(params, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
    def test_an_extended_bucket_keeps_its_slots_and_gains_the_missing(
        self, params, new, earlier
    ):
        slots = [ReduceSlot(i, orig, n) for i, (orig, _, n) in enumerate(params)]
        fresh, kept = (
            ReduceBucket(FP32, tuple(s for s in slots if s.param in of))
            for of in (new, earlier)
        )
        extended = extend_bucket(fresh, kept)
        self.assertEqual(extended.slots[: len(fresh.slots)], fresh.slots)
        gained = extended.slots[len(fresh.slots) :]
        self.assertEqual(
            {s.param for s in gained}, earlier & {*range(len(slots))} - new
        )
        self.assertEqual(len({s.param for s in extended.slots}), len(extended.slots))
        self.check_runs_cover(extended)
        # The new ones are as in a bucket of their own, which is what is sent
        count = len(fresh.slots)
        self.assertEqual(extended.starts[:count], fresh.starts)
        if gained:
            self.assertEqual(extended.starts[count], fresh.shard_numel)
        in_order = in_plan_order(extended)
        self.assertEqual(in_plan_order(in_order), in_order)

    @plans
    @given(params, st.sets(st.integers(0, 11)), st.randoms(use_true_random=False))
    def test_moves_take_each_parameter_to_its_place(self, params, part, random):
        slots = [ReduceSlot(i, orig, n) for i, (orig, _, n) in enumerate(params)]
        shuffled = random.sample(slots, len(slots))
        source = ReduceBucket(FP32, tuple(s for s in slots if s.param in part))
        target = ReduceBucket(FP32, tuple(shuffled))
        held = [
            99 * s.param + i + 1 for s in source.slots for i in range(s.shard_numel)
        ]
        moved = relaid(source, torch.tensor(held, dtype=torch.int64), target)
        expected = [
            99 * s.param + i + 1 if s.param in part else 0
            for s in target.slots
            for i in range(s.shard_numel)
        ]
        self.assertEqual(moved.tolist(), expected)


if __name__ == "__main__":
    run_tests()
