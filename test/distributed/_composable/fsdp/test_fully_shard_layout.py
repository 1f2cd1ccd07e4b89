# Owner(s): ["oncall: distributed"]
"""
Where the parameters of a unit lie in its buffers. Needs no device and no
process group: the plans are checked by themselves, and on plain CPU tensors.
"""

import dataclasses
import itertools
import json
import math
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_common.comms import count_operators
from fsdp_common.utils import DeviceFreeTest, run_python, TREE_ROOT

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
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
    plan_buckets,
    plan_copy_in,
    plan_gather,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
    storage_dtype,
)
from torch.testing._internal.common_utils import run_tests


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn
WORLD_SIZES = range(1, 129)

FLOATING = (FP64, FP32, BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2)
ALL_DTYPES = (
    *FLOATING,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)

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


def mixes(dtypes=ALL_DTYPES, max_numel=40, min_size=0):
    """Draws lists of (dtype, elements of one rank's shard)."""
    numels = st.one_of(st.sampled_from([0, 1]), st.integers(0, max_numel))
    inputs = st.tuples(st.sampled_from(dtypes), numels)
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


def padding_nbytes(layout: GatherLayout) -> int:
    itemsize = layout.buffer_dtype.itemsize
    return sum(size * itemsize for i, size in layout.slots if i is None)


class TestDtypes(DeviceFreeTest):
    def test_wider_dtypes_come_first(self):
        for a, b in itertools.product(ALL_DTYPES, repeat=2):
            if a.itemsize > b.itemsize:
                self.assertLess(dtype_sort_key(a), dtype_sort_key(b))

    def test_no_two_dtypes_have_the_same_rank(self):
        self.assertEqual(len({dtype_sort_key(d) for d in ALL_DTYPES}), len(ALL_DTYPES))

    def test_dtypes_of_one_width_have_a_fixed_order(self):
        for mixed in itertools.permutations([FP16, BF16, torch.int16, FP32, FP64]):
            ordered = [FP64, FP32, BF16, FP16, torch.int16]
            self.assertEqual(sorted(mixed, key=dtype_sort_key), ordered)

    def test_dtypes_are_moved_as_themselves_but_for_single_bytes(self):
        for dtype in ALL_DTYPES:
            expected = torch.uint8 if dtype.itemsize == 1 else dtype
            self.assertEqual(storage_dtype(dtype), expected)

    def test_policy_sets_the_reduce_dtype_of_floating_gradients(self):
        for grad_dtype, policy in itertools.product(FLOATING, FLOATING):
            self.assertEqual(reduce_dtype_of(grad_dtype, policy), policy)

    def test_gradients_reduce_in_their_own_dtype_without_a_policy(self):
        for dtype in ALL_DTYPES:
            self.assertEqual(reduce_dtype_of(dtype, None), dtype)

    def test_policy_never_drops_an_imaginary_part(self):
        for dtype in (torch.complex32, torch.complex64, torch.complex128):
            self.assertEqual(reduce_dtype_of(dtype, BF16), dtype)


class TestPaddedShards(DeviceFreeTest):
    SIZES = [(1,), (2,), (7,), (128,), (129,), (5, 3), (3, 1, 4), (127, 2), (6, 0)]

    def test_shards_on_dim_0_are_as_large_as_the_largest_chunk(self):
        for size, world_size in itertools.product(self.SIZES, WORLD_SIZES):
            chunks = torch.empty(size, device="meta").chunk(world_size, dim=0)
            largest = max(chunk.numel() for chunk in chunks)
            numel = padded_shard_numel(torch.Size(size), world_size, 0)
            self.assertEqual(numel, largest, msg=f"{size} over {world_size}")

    def test_shards_on_other_dims_are_even_chunks(self):
        for dim, world_size in itertools.product((1, 2), WORLD_SIZES):
            size = [3, 2, 5]
            size[dim] *= world_size
            chunks = torch.empty(size, device="meta").chunk(world_size, dim=dim)
            numel = padded_shard_numel(torch.Size(size), world_size, dim)
            self.assertEqual({numel}, {chunk.numel() for chunk in chunks})

    def test_all_ranks_together_hold_the_tensor_and_less_than_a_row_each(self):
        for size, world_size in itertools.product(self.SIZES, WORLD_SIZES):
            size = torch.Size(size)
            numel = padded_shard_numel(size, world_size, 0)
            excess = world_size * numel - size.numel()
            self.assertGreaterEqual(excess, 0)
            self.assertLessEqual(excess, (world_size - 1) * size[1:].numel())


class TestGatherLayout(DeviceFreeTest):
    def for_each_mix(self, check) -> None:
        """Checks the layouts of fixed mixes, and of random ones."""
        for name, mix in MIXES.items():
            with self.subTest(mix=name):
                check(mix)

        @plans
        @given(mixes())
        def check_random(mix):
            check(mix)

        check_random()

    def test_every_input_is_there_once_with_its_dtype_and_size(self):
        def check(mix):
            layout = plan(mix)
            self.assertEqual(sorted(order_of(layout)), [*range(len(mix))])
            for i, (dtype, start, end) in slots_of(layout).items():
                self.assertEqual((dtype, end - start), (mix[i][0], nbytes(mix[i])))

        self.for_each_mix(check)

    def test_inputs_lie_one_after_the_other_with_the_least_padding_of_regions(self):
        def check(mix):
            layout, position = plan(mix), 0
            is_mixed = len({dtype for dtype, _ in mix}) > 1
            slots, padding = slots_of(layout), 0
            for region in layout.regions:
                self.assertEqual(region.start_nbytes, position)
                for i in region.inputs:
                    _, start, position_after = slots[i]
                    self.assertEqual(start, position)
                    position = position_after
                gap = next(n for n in range(16) if (position + n) % 16 == 0)
                gap = gap if is_mixed else 0
                position, padding = position + gap, padding + gap
            self.assertEqual(position, layout.segment_nbytes)
            self.assertEqual(padding, padding_nbytes(layout))
            self.assertEqual(padding, position - sum(map(nbytes, mix)))

        self.for_each_mix(check)

    def test_every_slot_is_aligned_as_its_size_allows_at_every_rank(self):
        def check(mix):
            # A rank of a larger world lies where it does in a smaller one
            layout = plan(mix)
            is_mixed = len({dtype for dtype, _ in mix}) > 1
            misaligned = [
                (rank, dtype)
                for dtype, start, end in slots_of(layout).values()
                for rank in range(WORLD_SIZES[-1])
                if (rank * layout.segment_nbytes + start)
                % (math.gcd(end - start, 16) if is_mixed else dtype.itemsize)
            ]
            self.assertEqual(misaligned, [])

        self.for_each_mix(check)

    def test_uniform_inputs_keep_their_order_and_dtype_and_are_not_padded(self):
        for dtype, numels in itertools.product(ALL_DTYPES, [(3, 1, 7), (0, 5), (1,)]):
            layout = plan_gather([dtype] * len(numels), numels)
            self.assertEqual(order_of(layout), [*range(len(numels))])
            self.assertEqual(layout.buffer_dtype, storage_dtype(dtype))
            self.assertEqual(padding_nbytes(layout), 0)
            self.assertEqual(layout.segment_numel, sum(numels))
            self.assertEqual(layout.split_sizes, numels)

    def test_mixed_inputs_are_gathered_as_bytes(self):
        def check(mix):
            layout, dtypes = plan(mix), {dtype for dtype, _ in mix}
            if len(dtypes) > 1:
                self.assertEqual(layout.buffer_dtype, torch.uint8)
                self.assertEqual(layout.segment_numel, layout.segment_nbytes)

        self.for_each_mix(check)

    def test_split_sizes_cover_the_segment(self):
        def check(mix):
            layout = plan(mix)
            slots, itemsize, position = (
                slots_of(layout),
                layout.buffer_dtype.itemsize,
                0,
            )
            for i, size in layout.slots:
                start, position = position, position + size * itemsize
                if i is None:
                    self.assertIn(position - start, range(1, 16))
                    self.assertEqual(position % 16, 0)
                else:
                    self.assertEqual((start, position), slots[i][1:])
            self.assertEqual(layout.split_sizes, tuple(n for _, n in layout.slots))
            self.assertEqual(sum(layout.split_sizes), layout.segment_numel)

        self.for_each_mix(check)

    def test_one_region_for_each_dtype_widest_first_and_what_is_aligned_first(self):
        def check(mix):
            layout, dtypes = plan(mix), {dtype for dtype, _ in mix}
            self.assertEqual(
                [region.dtype for region in layout.regions],
                sorted(dtypes, key=dtype_sort_key),
            )
            for region in layout.regions:
                of_dtype = [i for i, (d, _) in enumerate(mix) if d == region.dtype]
                if len(dtypes) > 1:
                    of_dtype.sort(key=lambda i: -math.gcd(nbytes(mix[i]), 16))
                self.assertEqual([*region.inputs], of_dtype)

        self.for_each_mix(check)

    @plans
    @given(mixes(min_size=1).flatmap(lambda mix: st.permutations([*enumerate(mix)])))
    def test_order_of_dtypes_does_not_depend_on_the_order_of_inputs(self, shuffled):
        def extents(layout):
            return [(r.dtype, r.start_nbytes, r.nbytes) for r in layout.regions]

        layout = plan([entry for _, entry in sorted(shuffled)])
        other = plan([entry for _, entry in shuffled])
        self.assertEqual(extents(other), extents(layout))
        self.assertEqual(other.segment_nbytes, layout.segment_nbytes)

    def test_unsorted_layout_keeps_the_inputs_as_given(self):
        def check(mix):
            layout = plan(mix, by_dtype=False)
            self.assertEqual(order_of(layout), [*range(len(mix))])
            self.assertEqual(padding_nbytes(layout), 0)
            self.assertEqual(layout.segment_nbytes, sum(map(nbytes, mix)))

        self.for_each_mix(check)

    def test_a_size_for_each_dtype_is_required(self):
        with self.assertRaisesRegex(ValueError, "2 dtypes for 1 sizes"):
            plan_gather([FP32, BF16], [3])

    def test_a_plan_cannot_be_changed(self):
        layout = plan(MIXES["hybrid block"])
        with self.assertRaises(dataclasses.FrozenInstanceError):
            layout.regions = ()
        with self.assertRaises(dataclasses.FrozenInstanceError):
            layout.regions[0].start_nbytes = 1


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

    def test_uniform_buffer_is_the_shards_in_parameter_order(self):
        for dtype in ALL_DTYPES:
            mix = [(dtype, 3), (dtype, 1), (dtype, 4)]
            shards = random_shards(mix, 3)
            buffer = gather_by_copies(plan(mix), shards)
            expected = [as_bytes(shard) for inputs in shards for shard in inputs]
            self.assertEqual(as_bytes(buffer), [*itertools.chain(*expected)])
            self.assertEqual(buffer.dtype, storage_dtype(dtype))

    def test_one_kernel_copies_in_whatever_the_dtypes(self):
        for mix in filter(None, MIXES.values()):
            with count_operators() as counts:
                gather_by_copies(plan(mix), random_shards(mix, 1))
            self.assertEqual(counts["aten::cat"], 1)
            self.assertEqual(counts["aten::copy_"] + counts["aten::_foreach_copy_"], 0)

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

    def test_each_slot_of_a_segment_is_viewed_in_its_own_dtype(self):
        for mix in MIXES.values():
            layout = plan(mix)
            segment = torch.zeros(layout.segment_numel, dtype=layout.buffer_dtype)
            for number, region in enumerate(layout.regions, start=1):
                region_view = region.view(segment)
                self.assertEqual(region_view.dtype.itemsize, region.dtype.itemsize)
                self.assertEqual(region_view.numel(), sum(region.sizes))
                region_view.view(torch.uint8).add_(number)
            expected = [0] * layout.segment_nbytes
            for number, region in enumerate(layout.regions, start=1):
                for k in range(
                    region.start_nbytes, region.start_nbytes + region.nbytes
                ):
                    expected[k] = number
            self.assertEqual(as_bytes(segment), expected)

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

    def for_each_plan(self, check) -> None:
        for is_aligned in (False, True):
            check(self.MIXED, self.plan(self.MIXED, is_aligned))

        @plans
        @given(self.params, st.booleans())
        def check_random(params, is_aligned):
            check(params, self.plan(params, is_aligned))

        check_random()

    def test_every_parameter_is_in_the_bucket_of_its_reduce_dtype_once(self):
        def check(params, buckets):
            slots = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
            self.assertEqual(
                sorted(slot.param for slot, _ in slots), [*range(len(params))]
            )
            for slot, bucket in slots:
                expected = params[slot.param]
                found = (slot.grad_dtype, bucket.dtype, slot.shard_numel)
                self.assertEqual(found, expected)

        self.for_each_plan(check)

    def test_one_bucket_for_each_reduce_dtype_widest_first(self):
        def check(params, buckets):
            dtypes = {reduce_dtype for _, reduce_dtype, _ in params}
            self.assertEqual(
                [bucket.dtype for bucket in buckets], sorted(dtypes, key=dtype_sort_key)
            )

        self.for_each_plan(check)

    def test_slots_lie_one_after_the_other_and_runs_are_padded_if_aligned(self):
        def check(params, buckets):
            for bucket in buckets:
                self.check_runs_cover(bucket)

        self.for_each_plan(check)

    def test_each_storage_dtype_is_one_run_and_what_is_aligned_comes_first(self):
        def check(params, buckets):
            for bucket in buckets:
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

        self.for_each_plan(check)

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

    def test_the_mixed_plan_in_full(self):
        fp32, bf16, fp16 = self.plan(self.MIXED)
        self.assertEqual([slot.param for slot in fp32.slots], [1, 5, 0, 3])
        self.assertEqual(
            [(r.grad_dtype, r.numel) for r in fp32.runs], [(FP32, 1), (BF16, 5)]
        )
        self.assertEqual([slot.param for slot in bf16.slots], [4])
        self.assertEqual([slot.param for slot in fp16.slots], [2])
        self.assertEqual([b.shard_numel for b in (fp32, bf16, fp16)], [6, 5, 4])
        fp32, bf16, fp16 = self.plan(self.MIXED, is_aligned=True)
        # The empty one is a multiple of 16 bytes, and two bf16 of 4
        self.assertEqual([slot.param for slot in fp32.slots], [5, 1, 3, 0])
        self.assertEqual(fp32.starts, (0, 0, 4, 6))
        self.assertEqual([run.padding for run in fp32.runs], [3, 3])
        self.assertEqual([b.shard_numel for b in (fp32, bf16, fp16)], [12, 8, 8])

    def test_nothing_to_reduce_makes_no_bucket(self):
        self.assertEqual(plan_buckets([], []), ())

    def test_a_reduce_dtype_for_each_parameter_is_required(self):
        with self.assertRaises(ValueError):
            plan_buckets([ReduceSlot(0, FP32, 1)], [])
        with self.assertRaises(ValueError):
            plan_buckets([], [(FP32, None)])

    def test_a_bucket_that_has_everything_is_not_extended(self):
        (bucket,) = self.plan([(BF16, FP32, 3), (FP32, FP32, 1)])
        part = ReduceBucket(FP32, bucket.slots[1:])
        self.assertIs(extend_bucket(bucket, part), bucket)
        self.assertIs(extend_bucket(bucket, bucket), bucket)

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


# Prints what every rank must agree on. The layout module is loaded by itself,
# because that takes less time than the package does.
_PRINT_PLANS = """
import json, sys
import torch
import torch.distributed.fsdp._fully_shard._fsdp_layout as layouts

names = sys.argv[1].split(",")
dtypes = [getattr(torch, name) for name in names]
gather = layouts.plan_gather(dtypes * 2, range(2 * len(dtypes)))
slots = [
    layouts.ReduceSlot(i, dtype, i) for i, dtype in enumerate(reversed(dtypes * 2))
]
buckets = layouts.plan_buckets(slots, [(dtype, None) for dtype in dtypes * 2])
print(json.dumps([repr(gather), repr(gather.slots), repr(buckets)]))
"""


class TestAcrossProcesses(DeviceFreeTest):
    def test_every_process_makes_the_same_plans(self):
        path = str(TREE_ROOT / "torch/distributed/fsdp/_fully_shard/_fsdp_layout.py")
        self.assertEqual(layouts.__file__, path)
        names = ",".join(str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES)
        printed = [
            run_python("-c", _PRINT_PLANS, names, env={"PYTHONHASHSEED": seed})
            for seed in ("0", "4242")
        ]
        self.assertEqual(len({*printed}), 1)
        dtypes = [*ALL_DTYPES] * 2
        here = plan_gather(dtypes, range(len(dtypes)))
        self.assertEqual(json.loads(printed[0])[:2], [repr(here), repr(here.slots)])


if __name__ == "__main__":
    run_tests()
