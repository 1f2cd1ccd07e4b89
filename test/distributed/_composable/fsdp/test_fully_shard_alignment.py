# Owner(s): ["oncall: distributed"]
"""
Where large shards of real models start in the buffers: at multiples of 16 bytes, over
any number of ranks. Needs no device and no process group.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

from fsdp_common.utils import DeviceFreeTest

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    BucketGrads,
    join_parts,
)
from torch.distributed.fsdp._fully_shard._fsdp_layout import (
    BucketKey,
    padded_shard_numel,
    plan_all_to_all,
    plan_buckets,
    plan_gather,
    ReduceBucket,
    ReduceSlot,
)
from torch.testing._internal.common_utils import run_tests


BF16, FP32 = torch.bfloat16, torch.float32
Unit = list[tuple[tuple[int, ...], torch.dtype]]


def mamba2(hidden: int, heads: int, groups: int = 1, state: int = 128) -> Unit:
    """Returns the parameters of a block, in the order and dtypes of a checkpoint."""
    inner = 64 * heads
    mixed = inner + 2 * groups * state
    vectors: Unit = [((heads,), FP32)] * 3  # dt_bias, A_log, D
    return [
        ((hidden,), BF16),
        *vectors,
        ((mixed, 1, 4), BF16),
        ((mixed,), BF16),
        ((inner + mixed + heads, hidden), BF16),
        ((inner,), BF16),
        ((hidden, inner), BF16),
    ]


UNITS = {
    "Mamba-2 130M": mamba2(768, 24),
    "Mamba-2 2.7B": mamba2(2560, 80),
    "Nemotron-H 8B": mamba2(4096, 128, groups=8),
}
RANKS = range(2, 1025)
LARGE = 256  # bytes of a shard that must lie aligned if it is a multiple of 16

# What each parameter is reduced and sent in
POLICIES = {
    "none": lambda dtype: (dtype, None),
    "reduce_dtype=fp32": lambda dtype: (FP32, None),
    "reduce_dtype=bf16": lambda dtype: (BF16, None),
    "fp32, sent as stored": lambda dtype: (FP32, dtype),
    "fp32, sent in bf16": lambda dtype: (FP32, BF16),
}


def numels_of(unit: Unit, ranks: int) -> list[int]:
    return [padded_shard_numel(torch.Size(size), ranks, 0) for size, _ in unit]


def buckets_of(unit: Unit, ranks: int, policy: str) -> tuple[ReduceBucket, ...]:
    numels = numels_of(unit, ranks)
    slots = [ReduceSlot(i, d, n) for i, ((_, d), n) in enumerate(zip(unit, numels))]
    keys: list[BucketKey] = [POLICIES[policy](dtype) for _, dtype in unit]
    return plan_buckets(slots, keys, is_mixed=True)


def misaligned(start_nbytes: int, row_nbytes: int, numel: int, itemsize: int) -> bool:
    """Whether a large shard, whose size allows it, is unaligned in any rank's row."""
    nbytes = numel * itemsize
    allowed = nbytes >= LARGE and nbytes % 16 == 0
    # Rows of two ranks tell of all: each is as far from the next
    return allowed and any((rank * row_nbytes + start_nbytes) % 16 for rank in (0, 1))


def misaligned_in(bucket: ReduceBucket) -> Iterator[ReduceSlot]:
    """Yields slots that are unaligned in the input, the output, or what is cast."""
    wire, dtype = bucket.wire_dtype.itemsize, bucket.dtype.itemsize
    for run in bucket.runs:
        grad, base = run.grad_dtype.itemsize, run.start_numel
        for i in range(run.first, run.last):
            slot, start = bucket.slots[i], bucket.starts[i]
            numel = slot.shard_numel
            if (
                misaligned(start * wire, bucket.shard_numel * wire, numel, wire)
                or misaligned(start * dtype, 0, numel, dtype)
                or misaligned((start - base) * grad, 0, numel, grad)
            ):
                yield slot


def part_of(bucket: ReduceBucket) -> BucketGrads:
    count = len(bucket.slots)
    params = [SimpleNamespace() for _ in range(count)]
    return BucketGrads(params, bucket, [torch.empty(0)] * count, None)


class TestAlignment(DeviceFreeTest):
    def test_gathers(self):
        for (name, unit), ranks in itertools.product(UNITS.items(), RANKS):
            dtypes = [dtype for _, dtype in unit]
            layout = plan_gather(dtypes, numels_of(unit, ranks))
            for region in layout.regions:
                position, itemsize = region.start_nbytes, region.dtype.itemsize
                self.assertEqual(position % 16, 0)
                for numel in region.sizes:
                    unaligned = misaligned(
                        position, layout.segment_nbytes, numel, itemsize
                    )
                    self.assertFalse(unaligned, f"{name} over {ranks}")
                    position += numel * itemsize
            padding = [size for i, size in layout.slots if i is None]
            self.assertLessEqual(sum(padding), 15 * len(layout.regions))

    def test_what_a_backend_sums_lies_as_in_a_unit_of_one_dtype(self):
        for unit, ranks in itertools.product(UNITS.values(), (2, 8, 24, 96, 1000)):
            for bucket in buckets_of(unit, ranks, "none"):
                params = [slot.param for slot in bucket.slots]
                self.assertEqual(params, sorted(params))
                held = sum(slot.shard_numel for slot in bucket.slots)
                self.assertEqual(bucket.shard_numel, held)

    def test_what_one_all_to_all_sends(self):
        for (name, unit), ranks in itertools.product(UNITS.items(), RANKS):
            buckets = buckets_of(unit, ranks, "fp32, sent as stored")
            dtypes = tuple(bucket.wire_dtype for bucket in buckets)
            layout = plan_all_to_all(dtypes, tuple(b.shard_numel for b in buckets))
            self.assertEqual(layout.segment_nbytes % 16, 0, f"{name} over {ranks}")
            for region in layout.regions:
                (i,), itemsize = region.inputs, region.dtype.itemsize
                bucket = buckets[i]
                for slot, start in zip(bucket.slots, bucket.starts):
                    place = region.start_nbytes + start * itemsize
                    row_nbytes, numel = layout.segment_nbytes, slot.shard_numel
                    self.assertFalse(misaligned(place, row_nbytes, numel, itemsize))

    def test_joined_reductions(self):
        cases = itertools.product(UNITS.values(), (2, 8, 24, 96, 1000), POLICIES)
        for unit, ranks, policy in cases:
            for bucket in buckets_of(unit, ranks, policy):
                joined = join_parts([part_of(bucket) for _ in range(3)])
                self.assertTrue(joined.bucket.is_aligned)
                self.assertEqual(len(joined.bucket.slots), 3 * len(bucket.slots))
                self.assertEqual([*misaligned_in(joined.bucket)], [])


if __name__ == "__main__":
    run_tests()
