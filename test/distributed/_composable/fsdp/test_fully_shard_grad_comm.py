# Owner(s): ["oncall: distributed"]

"""
``grad_comm_dtype``: gradients that are sent in one dtype and added in another, in an
order that does not depend on the mesh.

Gradients are given, see :class:`Weighted`, and compared bit for bit with what one
process adds up by the definition of the tree.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_common.comms import (
    BF16,
    FP16,
    FP32,
    FP64,
    group_of,
    mixed_specs,
    sharded,
    Spec,
    ThreadTest,
    Weighted,
)
from fsdp_common.utils import (
    DEVICE_TYPE,
    DeviceFreeTest,
    FakeGroupTest,
    FSDPProcessTest,
    hybrid_mesh,
    shard_mesh,
    THREAD_DEVICE_TYPE,
)
from fsdp_parity import modes as parity
from fsdp_parity.memory import peak_nbytes
from fsdp_parity.models import mixed_tower, uniform_tower
from fsdp_wrong_uses.settings import OwnReduction

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_scaling as tree
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_policies import resolve
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.long


def policy(
    comm: torch.dtype | None = BF16, reduce: torch.dtype | None = None, **kwargs: Any
) -> MixedPrecisionPolicy:
    kwargs = {"param_dtype": BF16} | kwargs
    return MixedPrecisionPolicy(reduce_dtype=reduce, grad_comm_dtype=comm, **kwargs)


def sent_in(i: int) -> torch.dtype:
    return (BF16, FP32, FP16)[i % 3]


def added_in(i: int) -> torch.dtype:
    """So that buckets do not come in the order in which they are laid out."""
    return (FP64, FP32, FP32)[i % 3]


def policy_of_several(
    comm: Callable[[int], torch.dtype | None] = sent_in,
    compute: torch.dtype | None = BF16,
) -> MixedPrecisionPolicy:
    """Sends the gradients of a unit's parameters in three dtypes, by their positions."""
    positions = itertools.count(), itertools.count()
    return MixedPrecisionPolicy(
        compute,
        reduce_dtype_override_fn=lambda param: added_in(next(positions[0])),
        grad_comm_dtype_override_fn=lambda param: comm(next(positions[1])),
    )


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tree, by its definition."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return add(parts[:left]) + add(parts[left:])


def given_weight(rank: int, i: int, spec: Spec, batch: int = 0) -> torch.Tensor:
    """What the ``i``-th parameter gets on a rank: of more magnitudes than fp32 adds."""
    generator = torch.Generator().manual_seed((rank * 100 + i) * 100 + batch)
    size = spec.size
    scale = torch.randint(-14, 10, size, generator=generator).double().exp2()
    values = torch.randn(size, generator=generator, dtype=FP64) * scale
    return values.to(THREAD_DEVICE_TYPE)


class TestTree(TestCase):
    """The sum alone."""

    def rows(self, count: int, numel: int, dtype: torch.dtype, seed: int):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.randint(-8, 9, (count, numel), generator=generator)
        values = torch.randn(count, numel, generator=generator)
        return (values * scale.double().exp2()).to(dtype)

    def sum_of(self, rows: torch.Tensor, dtype: torch.dtype, extra: int = 0):
        output = torch.full((rows.size(1),), math.nan, dtype=dtype)
        scratch = torch.empty(rows.numel() + extra, dtype=rows.dtype)[extra:]
        tree.add_in_tree(rows.clone(), output, scratch)
        return output

    @settings(max_examples=1000, deadline=None)
    @given(
        count=st.integers(2, 40),
        numel=st.integers(1, 70),
        dtypes=st.sampled_from(
            [(BF16, FP32), (FP16, FP32), (BF16, FP64), (FP32, FP32), (BF16, BF16)]
        ),
        extra=st.integers(0, 3),
        seed=st.integers(0, 10**6),
    )
    def test_adds_in_the_order_of_the_tree(self, count, numel, dtypes, extra, seed):
        sent, added = dtypes
        rows = self.rows(count, numel, sent, seed)
        actual = self.sum_of(rows, added, extra)
        self.assertTrue(torch.equal(actual, add([*rows.to(added)])))
        # Each element takes part in as many additions as the tree is high, each of
        # which rounds by at most half an ulp of what is no larger than all magnitudes
        height = (count - 1).bit_length()
        bound = rows.double().abs().sum(0) * torch.finfo(added).eps / 2 * height * 1.01
        error = (actual.double() - rows.double().sum(0)).abs()
        self.assertTrue(bool((error <= bound + torch.finfo(added).tiny).all()))

    @pytest.mark.quick
    def test_a_narrow_sum_would_lose_what_this_one_keeps(self):
        rows = torch.tensor([[256.0], [1.0]], dtype=BF16)
        self.assertEqual(self.sum_of(rows, FP32).item(), 257)
        self.assertEqual(rows.sum(0).item(), 256)

    def test_the_order_is_another_than_from_left_to_right(self):
        rows = torch.tensor([[2.0**24], [1.0], [1.0], [1.0]])
        self.assertEqual(self.sum_of(rows, FP32).item(), 2.0**24 + 2)
        self.assertEqual(add([*rows]).item(), 2.0**24 + 2)

    def test_equal_rows_of_a_power_of_two_are_exact(self):
        row = self.rows(1, 50, BF16, 0)
        for count in (2, 4, 8, 16):
            total = self.sum_of(row.repeat(count, 1), FP32)
            self.assertTrue(torch.equal(total / count, row[0].float()))

    def test_goes_by_pieces_where_there_is_little_scratch(self):
        rows = self.rows(6, 31, BF16, 1)
        output = torch.empty(31)
        tree.add_in_tree(rows, output, torch.empty(3 * 31, dtype=BF16))
        self.assertTrue(torch.equal(output, add([*rows.float()])))

    def test_nothing_is_added_to_nothing(self):
        self.assertEqual(self.sum_of(torch.empty(3, 0, dtype=BF16), FP32).numel(), 0)


class GradCommTest(ThreadTest):
    def meshes(self) -> dict[str, DeviceMesh]:
        """All ways to lay out the ranks whose shard groups are powers of two."""
        ranks, names = self.world_size, ("replicate", "shard")
        meshes = {"shard": init_device_mesh(THREAD_DEVICE_TYPE, (ranks,))}
        for shards in (1, 2, 4):
            if ranks % shards == 0 and shards < ranks:
                shape = (ranks // shards, shards)
                mesh = init_device_mesh(THREAD_DEVICE_TYPE, shape, mesh_dim_names=names)
                meshes[f"{shape[0]}x{shards}"] = mesh
        return meshes

    def backward(
        self, module: torch.nn.Module, specs: Sequence[Spec], batch: int = 0, **how: Any
    ) -> None:
        weights = []
        for i, spec in enumerate(specs):
            dtype = module.get_parameter(f"p{i}").dtype if "as_stored" in how else BF16
            weights.append(given_weight(self.rank, i, spec, batch).to(dtype))
        module(weights).backward()

    def full_grads(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [param.grad.full_tensor() for param in module.parameters()]

    def expected(
        self,
        i: int,
        spec: Spec,
        *,
        comm: torch.dtype = BF16,
        reduce: torch.dtype = FP32,
        batch: int = 0,
        divisor: float | None = None,
        ranks: int | None = None,
        compute: torch.dtype = BF16,
    ) -> torch.Tensor:
        ranks = ranks or self.world_size
        weights = [given_weight(rank, i, spec, batch) for rank in range(ranks)]
        total = add([weight.to(compute).to(comm).to(reduce) for weight in weights])
        return (total / (divisor or ranks)).to(spec.dtype)

    def expected_mix(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """With :func:`policy_of_several`."""
        return [
            self.expected(i, spec, comm=sent_in(i), reduce=added_in(i))
            for i, spec in enumerate(specs)
        ]

    def assert_all_same(
        self, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> None:
        for one, other in zip(actual, expected, strict=True):
            self.assert_same(one, other)


def bucket_numels(
    specs: Sequence[Spec], ranks: int
) -> dict[tuple[torch.dtype, torch.dtype], int]:
    """Returns the elements of a rank by what they are added and sent in."""
    numels: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for i, spec in enumerate(specs):
        numels[added_in(i), sent_in(i)] += spec.padded_shard_numel(ranks)
    return numels


class TestRanks(GradCommTest):
    """The first of them, however many there are."""

    world_size = 7

    @parametrize("ranks", (1, 2, 3, 4, 5, 7))
    def test_sums_are_those_of_the_tree(self, ranks: int) -> None:
        mesh = DeviceMesh(THREAD_DEVICE_TYPE, torch.arange(ranks))
        if self.rank >= ranks:
            return
        specs = mixed_specs(ranks)
        for comm, reduce in ((BF16, None), (BF16, FP64), (FP32, FP32), (BF16, BF16)):
            module = sharded(
                specs, mesh, device=THREAD_DEVICE_TYPE, mp_policy=policy(comm, reduce)
            )
            self.backward(module, specs)
            how = {"comm": comm, "reduce": reduce or FP32, "ranks": ranks}
            expected = [self.expected(i, s, **how) for i, s in enumerate(specs)]
            self.assert_all_same(self.full_grads(module), expected)

    @parametrize("ranks", (1, 2, 3, 4, 5, 7))
    @parametrize("is_cast", (True, False))
    def test_one_all_to_all_for_any_mix(self, ranks: int, is_cast: bool) -> None:
        mesh = DeviceMesh(THREAD_DEVICE_TYPE, torch.arange(ranks))
        if self.rank >= ranks:
            return
        specs, how = mixed_specs(ranks), {}
        policy = policy_of_several()
        if not is_cast:  # what is copied in at once
            specs = [Spec(spec.size, sent_in(i)) for i, spec in enumerate(specs)]
            policy, how = policy_of_several(compute=None), {"as_stored": True}
        module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, mp_policy=policy)
        module.set_custom_reduce_scatter(comm := Counted())
        self.backward(module, specs, **how)
        expected = [
            self.expected(
                i,
                spec,
                comm=sent_in(i),
                reduce=added_in(i),
                ranks=ranks,
                compute=BF16 if is_cast else spec.dtype,
            )
            for i, spec in enumerate(specs)
        ]
        self.assert_all_same(self.full_grads(module), expected)
        regions: Counter[torch.dtype] = Counter()
        for (_, dtype), numel in bucket_numels(specs, ranks).items():
            regions[dtype] += numel * dtype.itemsize
        nbytes = sum(n + -n % 16 for n in regions.values())  # each is padded
        sent = [("exchange", torch.uint8, ranks * nbytes)] if ranks > 1 else []
        self.assertEqual(comm.sent, sent)


instantiate_parametrized_tests(TestRanks)


class TestMeshes(GradCommTest):
    """The same bits, however the ranks are laid out."""

    world_size = 8

    def test_all_meshes_give_the_same_bits(self):
        specs = mixed_specs(self.world_size)
        flat = [Spec(spec.size, spec.dtype) for spec in specs]
        expected = [self.expected(i, spec) for i, spec in enumerate(flat)]
        for name, mesh in self.meshes().items():
            with self.subTest(name):
                kwargs: dict[str, Any] = {"mp_policy": policy()}
                module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, **kwargs)
                self.backward(module, specs)
                self.assert_all_same(self.full_grads(module), expected)
        mesh = init_device_mesh(THREAD_DEVICE_TYPE, (self.world_size,))
        module = replicate(
            Weighted(flat, THREAD_DEVICE_TYPE), mesh=mesh, mp_policy=policy()
        )
        self.backward(module, flat)
        self.assert_all_same(self.full_grads(module), expected)

    def test_the_backends_own_order_gives_other_bits(self):
        """So that the test above says something."""
        specs = [Spec((64,), FP32)]
        found = []
        for mesh in self.meshes().values():
            kwargs: dict[str, Any] = {"mp_policy": policy(None, BF16)}
            module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, **kwargs)
            self.backward(module, specs)
            found += self.full_grads(module)
        expected = self.expected(0, specs[0])
        self.assertFalse(any(torch.equal(grad, expected) for grad in found))


class TestBytes(GradCommTest):
    """One kernel copies in what is not cast."""

    world_size = 3

    def setUp(self) -> None:
        others = mock.patch.object(_fsdp_collectives.copies, "copy_in_grads", None)
        others.start()  # before the threads
        self.addCleanup(others.stop)
        super().setUp()

    def test_no_other_copies_in(self):
        specs = [Spec((3, 5), BF16), Spec((1,), FP32), Spec((9,), FP16)]
        policy = policy_of_several(compute=None)
        module = sharded(
            specs, self.mesh(), device=THREAD_DEVICE_TYPE, mp_policy=policy
        )
        self.backward(module, specs, as_stored=True)
        expected = [
            self.expected(
                i, spec, comm=spec.dtype, reduce=added_in(i), compute=spec.dtype
            )
            for i, spec in enumerate(specs)
        ]
        self.assert_all_same(self.full_grads(module), expected)


class TestOneAllToAll(GradCommTest):
    """Buckets that are sent together."""

    world_size = 4
    SPECS = (Spec((5, 3), FP32), Spec((1,), FP32), Spec((6,), BF16), Spec((3, 1), FP64))

    def module(self, mesh: DeviceMesh | None = None, **kwargs: Any) -> Weighted:
        mesh = self.mesh() if mesh is None else mesh
        how: dict[str, Any] = {"mp_policy": policy_of_several()} | kwargs
        return sharded(self.SPECS, mesh, device=THREAD_DEVICE_TYPE, **how)

    # Sizes of what replicas add, by thread
    added: dict[int, list[int]] = defaultdict(list)

    def setUp(self) -> None:
        def add(tensor: torch.Tensor, group: Any) -> None:
            self.added[threading.get_ident()].append(tensor.numel())
            tree.all_reduce_in_tree(tensor, group)

        patched = mock.patch.object(_fsdp_collectives, "all_reduce_in_tree", add)
        patched.start()  # before the threads
        self.addCleanup(patched.stop)
        super().setUp()

    def test_replicas_add_one_buffer(self):
        added = self.added[threading.get_ident()]
        for name, mesh in self.meshes().items():
            with self.subTest(name):
                module = self.module(mesh)
                added.clear()
                self.backward(module, self.SPECS)
                grads = self.full_grads(module)
                self.assert_all_same(grads, self.expected_mix(self.SPECS))
                shards = mesh.size(-1)
                numels = {FP64: 0, FP32: 0}
                for (dtype, _), numel in bucket_numels(self.SPECS, shards).items():
                    numels[dtype] += numel
                self.assertEqual(added, [] if name == "shard" else [*numels.values()])

    def test_beside_a_collective(self):
        """Which replicas add by itself: two pairs are added in the order of the tree."""
        policy = policy_of_several(lambda i: None if i == 1 else sent_in(i))
        module = self.module(self.meshes()["2x2"], mp_policy=policy)
        self.backward(module, self.SPECS)
        self.assert_all_same(self.full_grads(module), self.expected_mix(self.SPECS))

    def weight(self, rank: int, i: int, batch: int = 0) -> torch.Tensor:
        return given_weight(rank, i, self.SPECS[i], batch).to(BF16)

    def test_microbatches_use_what_they_like(self):
        """Partial reduces of some buckets, with gradients of others."""
        uses = ((0, 1), (1, 2, 3))
        for ranks_alike in (True, False):
            module = self.module(self.meshes()["2x2"])
            for batch in range(2):
                module.set_requires_all_reduce(batch == 1)
                # Replicas may have used other parameters in another order
                swap = not ranks_alike and self.rank >= 2
                used = uses[1 - batch if swap else batch]
                weights = [
                    self.weight(self.rank, i, batch) if i in used else None
                    for i in range(len(self.SPECS))
                ]
                module(weights).backward()
            for i, (spec, grad) in enumerate(zip(self.SPECS, self.full_grads(module))):
                sums = []
                for replica in (0, 1):
                    swap = not ranks_alike and replica == 1
                    ranks = (2 * replica, 2 * replica + 1)
                    batches = [
                        add(
                            [
                                self.weight(r, i, b).to(sent_in(i)).to(added_in(i))
                                for r in ranks
                            ]
                        )
                        for b in range(2)
                        if i in uses[1 - b if swap else b]
                    ]
                    sums.append(sum(reversed(batches[:-1]), start=batches[-1]))
                self.assert_same(grad, (add(sums) / 4).to(spec.dtype))

    def test_gradients_that_have_to_be_cast_first(self):
        """Added up in fp32 without sync, and sent narrower."""
        module = self.module()
        for batch in range(2):
            module.set_requires_gradient_sync(batch == 1)
            self.backward(module, self.SPECS, batch)
        for i, (spec, grad) in enumerate(zip(self.SPECS, self.full_grads(module))):
            parts = []
            for rank in range(self.world_size):
                first, second = (
                    self.weight(rank, i, b).to(added_in(i)) for b in range(2)
                )
                parts.append((first + second).to(sent_in(i)).to(added_in(i)))
            self.assert_same(grad, (add(parts) / self.world_size).to(spec.dtype))

    def test_settings_that_change_no_bits(self):
        for name, change in CHANGE_NO_BITS.items():
            with self.subTest(name):
                module = self.module()
                change(module)
                for _ in range(2):  # the second in buffers that are there
                    self.backward(module, self.SPECS)
                expected = self.expected_mix(self.SPECS)
                doubled = [grad + grad for grad in expected]
                self.assert_all_same(self.full_grads(module), doubled)

    def test_zeros_for_what_a_rank_does_not_use(self):
        module = self.module()
        module.set_reduce_scatter_unused_params(True)
        weights: list[torch.Tensor | None] = [None] * len(self.SPECS)
        used = self.rank % len(self.SPECS)
        weights[used] = self.weight(self.rank, used)
        module(weights).backward()
        ranks = range(self.world_size)
        for i, (spec, grad) in enumerate(zip(self.SPECS, self.full_grads(module))):
            parts = [self.weight(rank, i) * (rank == i) for rank in ranks]
            total = add([part.to(sent_in(i)).to(added_in(i)) for part in parts])
            self.assert_same(grad, (total / self.world_size).to(spec.dtype))

    def test_a_buffer_that_is_not_aligned(self):
        module = self.module()
        module.set_custom_reduce_scatter(Unaligned())
        with self.assertRaisesRegex(
            ValueError, r"Unaligned\.allocate .* starts at byte 1 .* aligned to 4 bytes"
        ):
            self.backward(module, self.SPECS)


class TestPieces(GradCommTest):
    """What replicas exchange is more than they may at once."""

    world_size = 8

    def setUp(self) -> None:
        pieces = mock.patch.object(tree, "_MAX_PIECE_NBYTES", 12)
        pieces.start()  # before the threads
        self.addCleanup(pieces.stop)
        super().setUp()

    def test_replicas_are_reduced_in_pieces(self):
        specs = mixed_specs(self.world_size)
        expected = [self.expected(i, spec) for i, spec in enumerate(specs)]
        mesh = self.meshes()["4x2"]
        module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, mp_policy=policy())
        self.backward(module, specs)
        self.assert_all_same(self.full_grads(module), expected)


def policy_maker(compute: torch.dtype | None, comm: torch.dtype | None) -> Any:
    """Makes policies that reduce in fp32, whatever they are asked for."""

    def make(**kwargs: Any) -> MixedPrecisionPolicy:
        kwargs |= {"param_dtype": compute, "reduce_dtype": FP32}
        return MixedPrecisionPolicy(grad_comm_dtype=comm, **kwargs)

    return make


# One of each kind, of `fsdp_parity/modes.py`
UNIFORM = (
    "root_only no_reshard accumulate accumulate_in_turns several_backwards "
    "explicit_prefetch unshard_ahead shard_last_dim group group_run_in_part frozen "
    "skipped_part unused_by_rank cpu_offload cpu_offload_accumulate divide_fp32 "
    "sum_only two_input_buffers step_in_backward hybrid hybrid_deferred replicate"
)
MIXED = "plain accumulate shard_last_dim skipped_part unfrozen_later divide"
NAMES = [f"uniform_{name}" for name in UNIFORM.split()]
NAMES += [f"mixed_{name}" for name in MIXED.split()]


class TestModes(FSDPProcessTest):
    """
    All that FSDP2 can do. Two ranks, and two replicas of two, have one order to add in.
    So what is sent in the dtype that gradients have gives the bits of a reduction in
    fp32, which the other tests compare with the release's.
    """

    world_size = 4

    def train(self, name: str, compute: Any, comm: Any) -> parity.Record:
        kind, _, name = name.partition("_")
        if kind == "mixed":
            mode = parity.MIXED_MODES[name]
            mode = replace(mode, shard=parity.shard_blocks)
        else:
            mode = parity.UNIFORM_MODES[name]
        model = mixed_tower() if kind == "mixed" else uniform_tower(mode.dtype)
        mesh = hybrid_mesh(2) if mode.is_hybrid else shard_mesh(2)
        rank = self.rank if mode.is_hybrid else self.rank % 2
        make = policy_maker(compute, comm)
        with (
            mock.patch.object(parity, "MixedPrecisionPolicy", make),
            mock.patch.object(parity, "STEPS", 2),
        ):
            model = model.to(DEVICE_TYPE)
            return parity.train(mode, model, mesh, rank, DEVICE_TYPE)

    @parametrize("name", NAMES)
    def test_equals_a_reduction_in_fp32(self, name: str) -> None:
        # Without sync gradients add up in fp32, and would be rounded to be sent
        compute, comm = (None, FP32) if "accumulate" in name else (BF16, BF16)
        expected = self.train(name, compute, None)
        self.assertNotEqual(expected["step 0 loss"], expected["step 1 loss"])
        actual = self.train(name, compute, comm)
        self.assertEqual(parity.differing(actual, expected), [])

    def test_over_tensor_parallelism(self) -> None:
        names = ("dp", "tp")
        mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=names)
        found = []
        for comm in (None, BF16):
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 8).to(DEVICE_TYPE)
            parallelize_module(model, mesh["tp"], ColwiseParallel())
            fully_shard(model, mesh=mesh["dp"], mp_policy=policy(comm, FP32))
            x = torch.arange(32.0).view(4, 8).sin() * (1 + mesh["dp"].get_local_rank())
            model(x.to(DEVICE_TYPE)).float().square().sum().backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        for plain, exchanged in zip(*found, strict=True):
            self.assertTrue(bool(plain.any()))
            self.assertTrue(torch.equal(plain, exchanged))


instantiate_parametrized_tests(TestModes)


class Counted(DefaultReduceScatter):
    """Notes what is sent, and how."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __call__(self, output_tensor, input_tensor, *args: Any, **kwargs: Any) -> None:
        self.sent.append(("reduce", input_tensor.dtype, input_tensor.nbytes))
        super().__call__(output_tensor, input_tensor, *args, **kwargs)

    def exchange(self, output_tensor, input_tensor, group) -> None:
        self.sent.append(("exchange", input_tensor.dtype, input_tensor.nbytes))
        super().exchange(output_tensor, input_tensor, group)


class Unaligned(DefaultReduceScatter):
    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        return super().allocate((size[0] + 1,), dtype=dtype, device=device)[1:]


class Kept(DefaultReduceScatter):
    """Gives out the same buffer whenever it is asked for one of a kind."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        if (tuple(size), dtype) not in self.buffers:
            buffer = super().allocate(size, dtype=dtype, device=device)
            self.buffers[tuple(size), dtype] = buffer
        return self.buffers[tuple(size), dtype]


CHANGE_NO_BITS: dict[str, Callable[[Any], None]] = {
    "sum only": lambda m: m.set_force_sum_reduction_for_comms(True),
    "unused": lambda m: m.set_reduce_scatter_unused_params(True),
    "buffers": lambda m: m.set_reduce_scatter_max_input_buffers(2),
    "kept buffers": lambda m: m.set_custom_reduce_scatter(Kept()),
    "own group": lambda m: m.set_separate_reduce_scatter_group(True),
}


class TestSettings(GradCommTest):
    """What can be set beside it."""

    world_size = 4
    SPECS = (Spec((5, 3), FP32), Spec((6,), FP32), Spec((4, 2), BF16))

    def module(self, mesh: DeviceMesh | None = None, **kwargs: Any) -> Weighted:
        kwargs = {"mp_policy": policy()} | kwargs
        mesh = self.mesh() if mesh is None else mesh
        return sharded(self.SPECS, mesh, device=THREAD_DEVICE_TYPE, **kwargs)

    def assert_is_tree(self, module: Weighted, **how: Any) -> None:
        expected = [self.expected(i, s, **how) for i, s in enumerate(self.SPECS)]
        self.assert_all_same(self.full_grads(module), expected)

    def test_half_of_the_bytes(self):
        sent = {}
        for name, comm in (("wide", None), ("narrow", BF16)):
            module = self.module(mp_policy=policy(comm, FP32))
            module.set_custom_reduce_scatter(comm := Counted())
            self.backward(module, self.SPECS)
            sent[name] = comm.sent
        # Of a rank 8 elements stored in fp32 and 2 in bf16
        self.assertEqual(sent["wide"], [("reduce", FP32, 4 * 4 * 10)])
        self.assertEqual(sent["narrow"], [("exchange", BF16, 4 * 2 * 10)])

    def test_one_all_to_all_beside_each_reduce_scatter(self):
        patterns = {
            "p0": {"grad_comm_dtype": BF16},
            "p1": {"grad_comm_dtype": FP16, "reduce_dtype": FP32},
            "p2": {"reduce_dtype": FP32},
        }
        plain = Weighted(self.SPECS, THREAD_DEVICE_TYPE)
        module = fully_shard(
            plain,
            mesh=self.mesh(),
            mp_policy=MixedPrecisionPolicy.by_name(plain, patterns, param_dtype=BF16),
        )
        module.set_custom_reduce_scatter(comm := Counted())
        self.backward(module, self.SPECS)
        # What is sent is padded to 16 bytes of a rank for each dtype
        sent = ("exchange", torch.uint8, 2 * 16 * self.world_size)
        numel = self.SPECS[2].padded_shard_numel(self.world_size)
        reduced = ("reduce", FP32, 4 * numel * self.world_size)
        self.assertEqual(comm.sent, [sent, reduced])
        for i, sent in enumerate((BF16, FP16)):
            grad = module.get_parameter(f"p{i}").grad.full_tensor()
            self.assert_same(grad, self.expected(i, self.SPECS[i], comm=sent))

    def test_units_do_not_matter(self):
        mixed = self.module()
        self.backward(mixed, self.SPECS)
        found = []
        for i, spec in enumerate(self.SPECS):
            alone = Weighted([spec], THREAD_DEVICE_TYPE)
            fully_shard(alone, mesh=self.mesh(), mp_policy=policy())
            alone([given_weight(self.rank, i, spec).to(BF16)]).backward()
            found += self.full_grads(alone)
        self.assert_all_same(found, self.full_grads(mixed))

    def test_put_off_all_reduces_keep_sums_of_subtrees(self):
        module = self.module(self.meshes()["2x2"])
        uses = ((0, 1), (1, 2))  # by the microbatches
        for batch, used in enumerate(uses):
            module.set_requires_all_reduce(batch == 1)
            weights = [
                given_weight(self.rank, i, spec, batch).to(BF16) if i in used else None
                for i, spec in enumerate(self.SPECS)
            ]
            module(weights).backward()
        for i, grad in enumerate(self.full_grads(module)):
            sums = []
            for replica in ((0, 1), (2, 3)):
                batches = [
                    add([self.sent(rank, i, batch) for rank in replica])
                    for batch, used in enumerate(uses)
                    if i in used
                ]
                sums.append(sum(reversed(batches[:-1]), start=batches[-1]))
            expected = (add(sums) / 4).to(self.SPECS[i].dtype)
            self.assert_same(grad, expected)

    def sent(self, rank: int, i: int, batch: int) -> torch.Tensor:
        return given_weight(rank, i, self.SPECS[i], batch).to(BF16).to(FP32)

    def test_without_sync_microbatches_are_added_before_they_are_sent(self):
        module = self.module()
        for batch in range(2):
            module.set_requires_gradient_sync(batch == 1)
            self.backward(module, self.SPECS, batch)
        for i, grad in enumerate(self.full_grads(module)):
            ranks = range(self.world_size)
            sums = [self.sent(r, i, 0) + self.sent(r, i, 1) for r in ranks]
            total = add([part.to(BF16).to(FP32) for part in sums])
            self.assert_same(grad, (total / 4).to(self.SPECS[i].dtype))

    def test_divides_once_after_the_sum(self):
        for mesh in self.meshes().values():
            module = self.module(mesh)
            module.set_gradient_divide_factor(3.0)
            self.backward(module, self.SPECS)
            self.assert_is_tree(module, divisor=3.0)

    def test_sums_that_fp16_could_not_hold(self):
        half = {"param_dtype": FP16}
        module = self.module(mp_policy=policy(FP16, FP32, **half))
        weights = [torch.full(spec.size, 6e4, dtype=FP16) for spec in self.SPECS]
        module([w.to(THREAD_DEVICE_TYPE) for w in weights]).backward()
        for spec, grad in zip(self.SPECS, self.full_grads(module)):
            self.assertTrue(
                bool((grad == torch.tensor(6e4, dtype=FP16).to(spec.dtype)).all())
            )

    def test_sums_in_fp16_are_divided_before(self):
        """By a power of two that depends on the number of ranks alone."""
        value = 1.5 * 2**16 / self.world_size  # whose sum fp16 does not hold
        half = policy(FP16, FP16, param_dtype=FP16)
        for mesh in self.meshes().values():
            module = self.module(mesh, mp_policy=half)
            weights = [torch.full(spec.size, value, dtype=FP16) for spec in self.SPECS]
            module([w.to(THREAD_DEVICE_TYPE) for w in weights]).backward()
            for grad in self.full_grads(module):
                self.assertEqual({*grad.double().flatten().tolist()}, {value})

    def test_hook_sees_the_sum(self):
        module = self.module()
        seen = []
        module.set_all_reduce_hook(lambda output: seen.append(output.clone()))
        self.backward(module, self.SPECS)
        self.assert_is_tree(module)
        [output] = seen
        self.assertEqual(output.dtype, FP32)
        grads = [p.grad.to_local().flatten() for p in module.parameters()]
        numel = sum(grad.numel() for grad in grads)
        self.assertGreaterEqual(output.numel(), numel)

    def test_settings_that_change_no_bits(self):
        for name, change in CHANGE_NO_BITS.items():
            with self.subTest(name):
                module = self.module()
                change(module)
                self.backward(module, self.SPECS)
                self.assert_is_tree(module)
        for kwargs in (
            {"reshard_after_forward": False},
            {"reshard_after_forward": 2},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ):
            with self.subTest(str(kwargs)):
                if "offload_policy" in kwargs and THREAD_DEVICE_TYPE != "cpu":
                    continue
                module = self.module(**kwargs)
                self.backward(module, self.SPECS)
                self.assert_is_tree(module)

    def test_unused_parameters_get_zeros_or_nothing(self):
        for fills in (True, False):
            module = self.module()
            module.set_reduce_scatter_unused_params(fills)
            weights = [given_weight(self.rank, 0, self.SPECS[0]).to(BF16), None, None]
            module(weights).backward()
            first, *others = module.parameters()
            expected = self.expected(0, self.SPECS[0])
            self.assert_same(first.grad.full_tensor(), expected)
            for param in others:
                self.assertEqual(param.grad is not None, fills)
                if fills:
                    self.assertFalse(bool(param.grad.to_local().any()))

    def test_foreach_reduce_follows_the_policy(self):
        unit = self.unit(self.SPECS, mp_policy=policy())
        grads = [
            given_weight(self.rank, i, spec).to(BF16)
            for i, spec in enumerate(self.SPECS)
        ]
        result = self.reduce(unit, grads, reduce_dtype=FP32)
        self.assertEqual(result.reduce_scatter_input.dtype, BF16)
        for i, (fsdp_param, spec) in enumerate(zip(unit.fsdp_params, self.SPECS)):
            expected = spec.shard(self.expected(i, spec), self.rank, self.world_size)
            self.assert_same(fsdp_param.sharded_param.grad.to_local(), expected)

    def test_foreach_reduce_takes_one_pair_of_dtypes(self):
        unit = self.unit(self.SPECS, mp_policy=policy())
        unit.fsdp_params[1].mp_policy = policy(None, FP32)
        grads = [torch.zeros(spec.size, dtype=BF16) for spec in self.SPECS]
        with self.assertRaisesRegex(AssertionError, "p0 and p1 .* sent in torch.bf"):
            self.reduce(unit, grads, reduce_dtype=FP32)

    def test_a_reduction_of_ones_own_must_say_how_to_send(self):
        module = self.module()
        message = (
            r"OwnReduction of unit 'FSDPWeighted' cannot reduce p0.*sent in torch\.bf"
        )
        with self.assertRaisesRegex(ValueError, message):
            module.set_custom_reduce_scatter(OwnReduction())
        self.backward(module, self.SPECS)  # as if it had not been tried
        self.assert_is_tree(module)
        plain = self.module(mp_policy=policy(None, FP32))
        plain.set_custom_reduce_scatter(OwnReduction())
        group_of(plain).mp_policy = policy()
        with self.assertRaisesRegex(ValueError, message):
            self.backward(plain, self.SPECS)

    def test_symmetric_memory_reduces_in_its_own_way(self):
        module = self.module()
        module.set_force_sum_reduction_for_comms(True)
        with self.assertRaisesRegex(
            ValueError,
            "SymmMemReduceScatter.* grad_comm|SymmMemReduceScatter.*grad_comm",
        ):
            module.set_symm_mem_for_comm()
        self.backward(module, self.SPECS)
        self.assert_is_tree(module)


class TestPolicies(DeviceFreeTest):
    """What can be asked for."""

    def test_reduces_in_fp32_unless_said_otherwise(self):
        def added_in(given: MixedPrecisionPolicy) -> torch.dtype | None:
            param = torch.nn.Parameter(torch.zeros(2))
            return resolve(given, param, "weight", torch.device("cpu")).reduce_dtype

        self.assertEqual(added_in(policy()), FP32)
        self.assertEqual(added_in(policy(BF16, FP64)), FP64)
        self.assertIsNone(added_in(policy(None)))
        fn = {"grad_comm_dtype_override_fn": lambda param: BF16}
        self.assertEqual(added_in(replace(policy(None), **fn)), FP32)

    def test_fields_stay_as_given(self):
        self.assertIsNone(policy().reduce_dtype)
        taken_back = replace(policy(), grad_comm_dtype=None)
        self.assertEqual(taken_back, policy(None))

    def test_wrong_values_are_refused(self):
        with self.assertRaisesRegex(TypeError, "grad_comm_dtype .* is 'bf16'"):
            MixedPrecisionPolicy(grad_comm_dtype="bf16")
        with self.assertRaisesRegex(TypeError, "grad_comm_dtype_override_fn takes"):
            MixedPrecisionPolicy(grad_comm_dtype_override_fn=3)
        module = torch.nn.Linear(2, 2)
        with self.assertRaisesRegex(
            ValueError, "grad_comm_dtype to .*: give|matches no"
        ):
            MixedPrecisionPolicy.by_name(module, {"x": {"grad_comm_dtype": BF16}})
        with self.assertRaisesRegex(
            ValueError, "none of param_dtype, reduce_dtype, grad_"
        ):
            MixedPrecisionPolicy.by_name(module, {"*": {"dtype": BF16}})


class TestUnitsOfFakeRanks(FakeGroupTest):
    def module(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        module = torch.nn.Linear(4, 4)
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(*args, **kwargs))

    def test_dtypes_that_cannot_be_sent_or_would_be_rounded_twice(self):
        with self.assertRaisesRegex(
            ValueError, "parameter weight of Linear is torch.fl"
        ):
            self.module(grad_comm_dtype=torch.float8_e4m3fn)
        for reduce in (FP16, BF16):
            with self.assertRaisesRegex(
                ValueError, "weight of Linear would be sent in"
            ):
                self.module(None, reduce, grad_comm_dtype=FP32)
        with self.assertRaisesRegex(
            ValueError, "sent in torch.float16 .* torch.bfloat16"
        ):
            self.module(None, BF16, grad_comm_dtype_override_fn=lambda param: FP16)

    def test_an_override_says_it_for_each_parameter(self):
        def only_matrices(param: torch.nn.Parameter) -> torch.dtype | None:
            return BF16 if param.ndim == 2 else None

        module = self.module(BF16, FP32, grad_comm_dtype_override_fn=only_matrices)
        module(torch.ones(2, 4, dtype=BF16, requires_grad=True)).sum().backward()
        dtypes = [
            fsdp_param.mp_policy.grad_comm_dtype
            for fsdp_param in group_of(module).fsdp_params
        ]
        self.assertEqual(dtypes, [BF16, None])

    def test_integers_and_frozen_parameters_may_be_anything(self):
        module = torch.nn.Linear(4, 4)
        module.weight = torch.nn.Parameter(torch.ones(4, 4).long(), requires_grad=False)
        fully_shard(module, mp_policy=MixedPrecisionPolicy(grad_comm_dtype=BF16))

    def test_post_backward_needs_no_more_memory_than_in_fp32(self):
        specs = [((128, 32), BF16), ((128, 32), BF16), ((64, 16), BF16)]
        modes: dict[str, dict[str, Any]] = {"plain": {}, "hybrid": {"is_hybrid": True}}
        for mode in modes.values():
            wide, narrow = (
                peak_nbytes(specs, mode | {"mp_policy": policy(comm, FP32)})
                for comm in (None, BF16)
            )
            self.assertLessEqual(narrow, wide)


if __name__ == "__main__":
    run_tests()
