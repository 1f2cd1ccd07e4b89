# Owner(s): ["oncall: distributed"]
"""
Where the parameters of a unit lie in its buffers. Needs no device and no
process group: the plans are checked by themselves, and on plain CPU tensors.
"""

import functools
import math
import random
import weakref

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_helpers.common.comms import (
    as_bytes,
    BF16,
    count_operators,
    FP8,
    FP16,
    FP32,
    FP64,
)
from fsdp_helpers.common.utils import DeviceFreeTest

import torch
from torch.distributed.fsdp._fully_shard._fsdp_copies import (
    _copy_in,
    _split_copy,
    _view_outputs,
    copy_each,
)
from torch.distributed.fsdp._fully_shard._fsdp_layout import (
    dtype_sort_key,
    extend_bucket,
    GatherLayout,
    plan_buckets,
    plan_copy_in,
    plan_gather,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
    sort_slots,
    storage_dtype,
)
from torch.distributed.fsdp._fully_shard._fsdp_reduce import relayout
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode


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


def plan(mix: list[tuple[torch.dtype, int]]) -> GatherLayout:
    return plan_gather([dtype for dtype, _ in mix], [n for _, n in mix])


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


class TestGatherLayout(DeviceFreeTest):
    def check_mixed(self, mix, layout) -> None:
        """Regions by dtype, in each the best aligned first, and padding at its end."""
        self.assertEqual(layout.buffer_dtype, torch.uint8)
        dtypes = sorted({dtype for dtype, _ in mix}, key=dtype_sort_key)
        self.assertEqual([region.dtype for region in layout.regions], dtypes)
        for region in layout.regions:
            of_dtype = [i for i, (dtype, _) in enumerate(mix) if dtype == region.dtype]
            of_dtype.sort(key=lambda i: -math.gcd(nbytes(mix[i]), 16))
            inputs = [i for i, _ in region.slots if i is not None]
            self.assertEqual(inputs, of_dtype)
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
            self.assertEqual(layout.split_sizes, [numel for _, numel in mix])
        slots, position = slots_of(layout), 0
        segment_nbytes = sum(region.nbytes for region in layout.regions)
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
                place = rank * segment_nbytes + start
                self.assertEqual(place % multiple, 0)
        self.assertEqual(position, segment_nbytes)
        self.assertEqual(sum(layout.split_sizes), layout.segment_numel)

    @plans
    @given(mixes())
    @examples(*MIXES.values(), *([(d, n) for n in (3, 0, 7)] for d in ALL_DTYPES))
    def test_mixes(self, mix):
        self.check(mix)


def nbytes(entry: tuple[torch.dtype, int]) -> int:
    dtype, numel = entry
    return numel * dtype.itemsize


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
        last = [copy.region.slots[-1][0] for copy in copies if not copy.casts]
        assert None not in last, "padding at the end is copied"
        _copy_in(segment, copies, inputs)
    return buffer


class Moves(TorchDispatchMode):
    """Notes how many tensors that were moved are there at once, and who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[weakref.ref] = []
        self.most = 0
        self.wait_not: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self.moved.append(weakref.ref(result))
            alive = [ref for ref in self.moved if ref() is not None]
            self.most = max(self.most, len(alive))
        if func._schema.name in ("aten::copy_", "aten::_to_copy", "aten::cat"):
            self.wait_not.append(kwargs.get("non_blocking", args[2:3] == (True,)))
        return result


class TestCopies(DeviceFreeTest):
    def assert_copied_out(self, buffer, layout, mix, shards) -> None:
        world_size = len(shards)
        outputs = [
            torch.full((world_size * numel * dtype.itemsize,), 1, dtype=torch.uint8)
            .view(dtype)
            .contiguous()
            for dtype, numel in mix
        ]
        _split_copy(buffer, layout, _view_outputs(outputs, layout, world_size))
        for i, output in enumerate(outputs):
            expected = torch.cat([inputs[i].view(torch.uint8) for inputs in shards])
            self.assertTrue(torch.equal(as_bytes(output), expected))

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

    def test_what_one_rank_has_alone_is_copied_by_one_kernel_for_each_pair(self):
        for dtype in ALL_DTYPES:
            ((shard,),) = random_shards([(dtype, 3)], 1)
            copy_each([target := torch.empty_like(shard)], [shard])
            self.assertTrue(torch.equal(as_bytes(target), as_bytes(shard)), str(dtype))
        stored, computed = (BF16, FP32, BF16, FP32), (BF16, BF16, FP32, FP32)
        sources = [torch.ones(3, dtype=dtype) for dtype in stored * 2]
        targets = [torch.zeros(3, dtype=dtype) for dtype in computed * 2]
        with count_operators() as counts:
            copy_each(targets, sources)
        self.assertEqual(counts, {"aten::_foreach_copy_": 4})
        self.assertTrue(all(bool((target == 1).all()) for target in targets))

    def test_host_shards_are_moved_one_at_a_time_if_they_are_cast(self):
        """Others go straight into the segment, as what an extension has moved."""
        for stored, devices, most in (
            ([FP32, BF16, FP32], ["cpu"] * 3, 0),
            ([BF16, BF16, FP32], ["cpu"] * 3, 1),
            ([BF16, FP32, BF16], ["meta", "cpu", "cpu"], 1),
        ):
            layout = plan([(FP32, 3), (BF16, 5), (FP32, 8)])
            pairs = zip(stored, (3, 5, 8), devices, strict=True)
            shards = [torch.ones(n, dtype=d, device=device) for d, n, device in pairs]
            segment = torch.empty(
                layout.segment_numel, dtype=torch.uint8, device="meta"
            )
            with Moves() as moves:
                _copy_in(segment, plan_copy_in(layout, stored), shards)
            self.assertEqual(moves.most, most)
            casts = zip(stored, (FP32, BF16, FP32), devices)
            moved = [s for s, c, device in casts if s != c and device == "cpu"]
            self.assertEqual(len(moves.moved), len(moved))
            self.assertTrue(all(moves.wait_not))

    @copies
    @given(floating_params(min_size=1))
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
            self.assertTrue(torch.equal(slot, as_bytes(values[i].to(dtype))))


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
    params = floating_params()

    def plan(self, params) -> tuple[ReduceBucket, ...]:
        slots = [ReduceSlot(i, orig, n) for i, (orig, _, n) in enumerate(params)]
        return plan_buckets(slots, [(dtype, None) for _, dtype, _ in params])

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
            runs = [dtype for dtype, _ in bucket.runs]
            self.assertEqual(runs, sorted(dtypes, key=dtype_sort_key))
            for _, indices in bucket.runs:
                members = [bucket.slots[i].param for i in indices]
                self.assertEqual(members, sorted(members))

    @plans
    @given(params)
    @example(MIXED)
    def test_each_storage_dtype_is_one_run_of_the_bucket_of_its_reduce_dtype(
        self, params
    ):
        self.check(params, self.plan(params))

    def check_runs_cover(self, bucket: ReduceBucket) -> None:
        numels = [slot.shard_numel for slot in bucket.slots]
        starts = [sum(numels[:i]) for i in range(len(numels) + 1)]
        self.assertEqual(bucket.starts, starts)
        self.assertEqual(bucket.shard_numel, starts[-1])
        dtypes = [dtype for dtype, indices in bucket.runs for _ in indices]
        self.assertEqual(dtypes, [slot.grad_dtype for slot in bucket.slots])
        indices = [i for _, indices in bucket.runs for i in indices]
        self.assertEqual(indices, [*range(len(dtypes))])

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
        self.assertEqual(extended.starts[: len(fresh.starts)], fresh.starts)
        in_order = sort_slots(extended)
        self.assertEqual(sort_slots(in_order), in_order)

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
        moved = relayout(source, torch.tensor(held, dtype=torch.int64), target)
        expected = [
            99 * s.param + i + 1 if s.param in part else 0
            for s in target.slots
            for i in range(s.shard_numel)
        ]
        self.assertEqual(moved.tolist(), expected)


if __name__ == "__main__":
    run_tests()
