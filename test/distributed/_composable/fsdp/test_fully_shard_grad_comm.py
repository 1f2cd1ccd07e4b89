# Owner(s): ["oncall: distributed"]
"""``grad_comm_dtype``: given gradients, sent in one dtype and added in another."""

import functools
import importlib.util
import itertools
import math
import os
import sys
import threading
import unittest
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_helpers.common import comms, utils
from fsdp_helpers.common.comms import BF16, FP16, FP32, FP64, Spec, Weighted
from fsdp_helpers.parity.memory import peak_nbytes, peak_nbytes_of

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_scaling as tree
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase


pytestmark = pytest.mark.timeout(600)


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


def policy_of_several() -> MixedPrecisionPolicy:
    """Sends the gradients of a unit's parameters in three dtypes, by their positions."""
    positions = itertools.count(), itertools.count()
    return MixedPrecisionPolicy(
        BF16,
        reduce_dtype_override_fn=lambda param: added_in(next(positions[0])),
        grad_comm_dtype_override_fn=lambda param: sent_in(next(positions[1])),
    )


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tree, by its definition."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return add(parts[:left]) + add(parts[left:])


def given_weight(rank: int, i: int, spec: Spec) -> torch.Tensor:
    """What the ``i``-th parameter gets on a rank: of more magnitudes than fp32 adds."""
    generator = torch.Generator().manual_seed(rank * 100 + i)
    size = spec.size
    scale = torch.randint(-14, 10, size, generator=generator).double().exp2()
    values = torch.randn(size, generator=generator, dtype=FP64) * scale
    return values.to(utils.THREAD_DEVICE_TYPE)


class TestTree(TestCase):
    @pytest.mark.quick
    @settings(max_examples=400, deadline=None)
    @given(
        count=st.integers(2, 40),
        numel=st.integers(0, 70),
        dtypes=st.sampled_from(
            [(BF16, FP32), (FP16, FP32), (BF16, FP64), (FP32, FP32), (BF16, BF16)]
        ),
        piece_nbytes=st.sampled_from([1, 200, 2**24]),
        divisor=st.sampled_from([None, 3.0]),
        seed=st.integers(0, 10**6),
    )
    def test_adds_in_the_order_of_the_tree(
        self, count, numel, dtypes, piece_nbytes, divisor, seed
    ):
        sent, added = dtypes
        generator = torch.Generator().manual_seed(seed)
        scale = torch.randint(-8, 9, (count, numel), generator=generator)
        values = torch.randn(count, numel, generator=generator)
        rows = (values * scale.double().exp2()).to(sent)
        actual = torch.full((numel,), math.nan, dtype=added)
        with mock.patch.object(tree, "_MIN_PIECE_NBYTES", piece_nbytes):
            tree.add_in_tree(rows.clone(), actual, divisor)
        expected = add([*rows.to(added)])
        self.assertEqual(actual, expected / (divisor or 1), rtol=0, atol=0)
        # Each element takes part in as many additions as the tree is high, each of
        # which rounds by at most half an ulp of what is no larger than all magnitudes
        height = (count - 1).bit_length()
        bound = rows.double().abs().sum(0) * torch.finfo(added).eps / 2 * height * 1.01
        error = (expected.double() - rows.double().sum(0)).abs()
        self.assertTrue(bool((error <= bound + torch.finfo(added).tiny).all()))


KERNELS = "torch.distributed.fsdp._fully_shard._fsdp_triton"
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = unittest.skipUnless(HAS_TRITON, "needs Triton")


def cast_by_torch(builder: Any, handle: Any, to: Any) -> Any:
    """Casts in the interpreter, which rounds to bf16 towards zero, as a GPU does."""
    if to.scalar.name != "bf16":
        return builder.cast_impl(handle, to)
    cast = torch.from_numpy(handle.data).to(BF16).view(torch.uint16)
    return type(handle)(cast.numpy(), to.scalar)


@unittest.skipUnless(
    HAS_TRITON and (IS_INTERPRETED or torch.cuda.is_available()),
    "needs Triton and a GPU. Without one another process interprets it",
)
class TestKernel(utils.ParametrizedTest):
    """The sum in Triton, on a GPU or interpreted."""

    device = "cpu" if IS_INTERPRETED else "cuda"

    def setUp(self) -> None:
        super().setUp()
        change = {"_KERNEL_DEVICE_TYPE": self.device, "_has_kernel": True}
        patches = [mock.patch.multiple(tree, **change)]
        if IS_INTERPRETED:
            from triton.runtime.interpreter import InterpreterBuilder as Builder

            patches.append(mock.patch.object(Builder, "create_fp_trunc", cast_by_torch))
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)

    def rows(
        self, count: int, numel: int, dtype: torch.dtype, offset: int = 0, gap: int = 0
    ) -> torch.Tensor:
        """Returns rows with ``gap`` elements between them. First in each is -0.0."""
        generator = torch.Generator().manual_seed(count)
        scale = torch.randint(-8, 9, (count, numel + gap), generator=generator)
        values = torch.randn(scale.size(), generator=generator) * scale.double().exp2()
        values[:, :1] = -0.0
        memory = torch.empty(offset + values.numel(), dtype=dtype, device=self.device)
        return memory[offset:].view(values.size()).copy_(values)[:, :numel]

    def check(self, rows: torch.Tensor, added: torch.dtype, divisor: Any) -> None:
        """Compares the bits of the kernel and of the operators."""
        numel, before = rows.size(1), rows.clone()
        target = torch.full((numel + 2,), math.nan, dtype=added, device=self.device)
        expected = torch.empty(numel, dtype=added, device=self.device)
        with mock.patch.object(tree, "_has_kernel", False):
            tree.add_in_tree(rows.clone(), expected)
        if self.device == "cuda":
            tree._div_if_needed(expected, divisor)
        elif divisor is not None:  # as CUDA divides by a number
            inverse = torch.tensor(divisor, dtype=FP32).reciprocal()
            expected.copy_(expected.float() * inverse)
        tree.add_in_tree(rows, target[1:-1], divisor)
        self.assert_same(target[1:-1].contiguous(), expected)
        self.assert_same(rows, before)
        self.assertTrue(bool(target[[0, -1]].isnan().all()))

    def test_kernel_has_the_bits_of_the_operators(self):
        for count in (2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 64):
            with self.subTest(f"{count} rows"):
                self.check(self.rows(count, 32, BF16), FP32, None)
                self.check(self.rows(count, 33, FP16, offset=1, gap=3), FP16, 3.0)
                rows = self.rows(count, 40, FP32)
                expected = add([*rows.clone()])
                # In place of the first row, as between replicas
                self.assertTrue(tree._add_by_kernel(rows, rows[0]))
                self.assert_same(rows[0], expected)
        for sent, added in ((FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16)):
            for numel in (0, 1, 2049):  # the last one takes three blocks
                with self.subTest(f"{numel} of {sent} in {added}"):
                    self.check(self.rows(5, numel, sent), added, 8.0)

    def test_divides_as_the_operator_by_factors_that_fp32_rounds(self):
        """Whose sums over replicas the operator divides, with the same bits."""
        for divisor in (1.1, 2.2, 3.3, 0.3, 3.14159, 6.4, 12.8, 1 / 3, 7.6):
            with self.subTest(divisor=divisor):
                self.check(self.rows(4, 500, BF16), FP32, divisor)
                self.check(self.rows(4, 500, FP16), FP16, divisor)

    def test_kernel_adds_rows_far_apart(self):
        if self.device == "cpu" or torch.cuda.mem_get_info()[0] < 2**34:
            self.skipTest("needs a GPU with 16 GiB")
        memory = torch.empty(3 * 2**30 + 8, dtype=BF16, device=self.device)
        rows = memory.as_strided((4, 8), (2**30, 1)).copy_(self.rows(4, 8, BF16))
        self.check(rows, FP32, None)


class TestAroundKernel(utils.ParametrizedTest):
    """Cases that need no GPU."""

    @needs_triton
    def test_kernel_runs_interpreted(self):
        # `run_tests` would write what CI of PyTorch reads, by a package of its own
        env = {"TRITON_INTERPRET": "1", "CI": ""}
        utils.run_python(__file__, "TestKernel", env=env, on_release=False)

    @parametrize("has_triton", [False, True])
    def test_falls_back_to_operators(self, has_triton: bool) -> None:
        """Silently without Triton, and with a warning where it fails, once."""
        fail = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
        module = SimpleNamespace(add_rows=fail) if has_triton else None
        rows = torch.ones(3, 5)
        with (
            mock.patch.dict(sys.modules, {KERNELS: module}),
            mock.patch.object(tree, "_KERNEL_DEVICE_TYPE", "cpu"),
            mock.patch.object(tree, "_has_kernel", True),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                actual = torch.empty(5)
                tree.add_in_tree(rows.clone(), actual, 2.0)
                self.assertEqual(actual.tolist(), [1.5] * 5)
        texts = [str(warning.message) for warning in warned]
        self.assertEqual([len(texts), fail.call_count], [int(has_triton)] * 2)
        for text in texts:
            self.assertIn("C compiler'). Gradients with a grad_comm_dtype", text)

    def test_leaves_other_sums_to_operators(self):
        """Other dtypes, other devices, and where a dispatch mode wants to see them."""
        asked = SimpleNamespace(add_rows=mock.Mock(side_effect=AssertionError))
        rows = torch.ones(2, 3)
        with mock.patch.dict(sys.modules, {KERNELS: asked}):
            with mock.patch.object(tree, "_KERNEL_DEVICE_TYPE", "xpu"):
                self.assertFalse(tree._add_by_kernel(rows, rows[0]))
            with mock.patch.object(tree, "_KERNEL_DEVICE_TYPE", "cpu"):
                self.assertFalse(tree._add_by_kernel(rows.double(), rows[0]))
                with CommDebugMode():
                    self.assertFalse(tree._add_by_kernel(rows, rows[0]))
        self.assertTrue(tree._has_kernel)


class GradCommTest(comms.ThreadTest):
    def mesh_over(self, shards: int) -> DeviceMesh:
        """Returns the mesh of all ranks that are replicas beyond so many shards."""
        replicas = self.world_size // shards
        return comms.mesh_of(replicas, shards) if replicas > 1 else self.mesh()

    def backward(self, module: torch.nn.Module, specs: Sequence[Spec]) -> None:
        weights = (given_weight(self.rank, i, spec) for i, spec in enumerate(specs))
        module([weight.to(BF16) for weight in weights]).backward()

    def full_grads(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [param.grad.full_tensor() for param in module.parameters()]

    def expected(
        self, i: int, spec: Spec, dtypes: Any = (BF16, FP32), divisor: Any = None
    ) -> torch.Tensor:
        """In the dtypes to send in and to add in."""
        ranks, (comm, reduce) = self.world_size, dtypes
        made = [given_weight(rank, i, spec).to(BF16) for rank in range(ranks)]
        total = add([grad.to(comm).to(reduce) for grad in made])
        return (total / (divisor or ranks)).to(spec.dtype)

    def expected_mix(self, specs: Sequence[Spec], divisor: Any = None) -> list[Any]:
        """With :func:`policy_of_several`."""
        dtypes = [(sent_in(i), added_in(i)) for i in range(len(specs))]
        cases = enumerate(zip(specs, dtypes))
        return [self.expected(i, *case, divisor) for i, case in cases]

    def assert_all_same(self, actual: Sequence[Any], expected: Sequence[Any]) -> None:
        for one, other in zip(actual, expected, strict=True):
            self.assert_same(one, other)


class TestMeshes(GradCommTest):
    """The same bits, however the ranks are laid out, and in however many pieces."""

    world_size = 8

    def setUp(self) -> None:
        pieces = mock.patch.object(tree, "_MIN_PIECE_NBYTES", 12)
        pieces.start()  # before the threads
        self.addCleanup(pieces.stop)
        super().setUp()

    @parametrize("shards", [8, 4, 2, 1, 0])  # 0: by `replicate`
    def test_all_meshes_give_the_same_bits(self, shards: int) -> None:
        specs = comms.mixed_specs(self.world_size)
        flat = [Spec(spec.size, spec.dtype) for spec in specs]
        expected = [self.expected(i, spec) for i, spec in enumerate(flat)]
        device, mesh = utils.THREAD_DEVICE_TYPE, self.mesh_over(shards or 8)
        if shards:
            module = comms.sharded(specs, mesh, device=device, mp_policy=policy())
        else:
            module = Weighted(flat, device)
            replicate(module, mesh=mesh, mp_policy=policy())
        self.backward(module, specs)
        self.assert_all_same(self.full_grads(module), expected)

    # A piece of 32 fp32 elements is the least whose parts begin on 16 bytes
    @parametrize("numel,pieces", [(5, 1), (32, 1), (33, 2), (256, 8), (1001, 8)])
    def test_hsdp_adds_a_buffer_in_at_most_eight_pieces_with_the_same_bits(
        self, numel: int, pieces: int
    ) -> None:
        """Each takes a few bytes, or an eighth of the buffer if that is more."""
        ranks, spec = range(self.world_size), Spec((numel,), FP32)
        parts = [given_weight(rank, 0, spec).float() for rank in ranks]
        found = parts[self.rank].clone()
        with utils.record_collectives() as recorder:
            tree.all_reduce_in_tree(found, self.mesh().get_group())
        self.assertEqual(found, add(parts), atol=0, rtol=0)
        self.assertEqual(len(recorder.named("all_to_all")), pieces)
        self.assertEqual(len(recorder.named("all_gather")), pieces)


class Kept(DefaultReduceScatter):
    """Gives out the same buffer whenever a thread asks for one of a kind."""

    buffers = threading.local()

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        kept = vars(self.buffers)
        if (size, dtype) not in kept:
            kept[size, dtype] = super().allocate(size, dtype=dtype, device=device)
        return kept[size, dtype]


class TestOneAllToAll(GradCommTest):
    """Buckets that are sent together."""

    world_size = 4
    SPECS = (Spec((5, 3), FP32), Spec((1,), FP32), Spec((6,), BF16), Spec((3, 1), FP64))

    def module(self, mesh: DeviceMesh | None = None, **kwargs: Any) -> Weighted:
        mesh = self.mesh() if mesh is None else mesh
        how: dict[str, Any] = {"mp_policy": policy_of_several()} | kwargs
        return comms.sharded(self.SPECS, mesh, device=utils.THREAD_DEVICE_TYPE, **how)

    @parametrize("shards", [4, 2, 1])
    def test_hsdp_adds_a_buffer_of_each_dtype_and_divides_once(self, shards: int):
        module = self.module(self.mesh_over(shards))
        module.set_gradient_divide_factor(3.0)
        with utils.record_collectives() as recorder:
            self.backward(module, self.SPECS)
        grads = self.full_grads(module)
        self.assert_all_same(grads, self.expected_mix(self.SPECS, divisor=3.0))
        expected = [torch.uint8] if shards > 1 else []
        expected += [FP64, FP32] if shards < self.world_size else []
        sent = [call.dtype for call in recorder.named("all_to_all")]
        self.assertEqual(sent, expected)

    def test_hook_sees_each_sum_before_the_division(self):
        module, seen = self.module(), []

        def fill(output: torch.Tensor) -> None:
            seen.append(output.dtype)
            output.fill_(self.world_size)

        module.set_all_reduce_hook(fill)
        self.backward(module, self.SPECS)
        self.assertEqual(seen, [FP64, FP32, FP32])
        for grad in self.full_grads(module):
            self.assertEqual({*grad.flatten().tolist()}, {1.0})

    @parametrize("shards", [4, 2, 1])
    def test_sums_in_fp16_are_divided_before(self, shards: int) -> None:
        """By a power of two that depends on the number of ranks alone."""
        value = 1.5 * 2**16 / self.world_size  # whose sum fp16 does not hold
        half = policy(FP16, FP16, param_dtype=FP16)
        module = self.module(self.mesh_over(shards), mp_policy=half)
        weights = [torch.full(spec.size, value, dtype=FP16) for spec in self.SPECS]
        module([w.to(utils.THREAD_DEVICE_TYPE) for w in weights]).backward()
        for grad in self.full_grads(module):
            self.assertEqual({*grad.double().flatten().tolist()}, {value})

    @parametrize(
        "setter,value",
        [
            ("set_force_sum_reduction_for_comms", True),
            ("set_reduce_scatter_unused_params", True),
            ("set_reduce_scatter_max_input_buffers", 2),
            ("set_custom_reduce_scatter", Kept()),
            ("set_separate_reduce_scatter_group", True),
        ],
        name_fn=lambda setter, _: setter,
    )
    def test_settings_that_change_no_bits(self, setter: str, value: Any) -> None:
        module = self.module()
        getattr(module, setter)(value)
        for _ in range(2):  # the second in buffers that are there
            self.backward(module, self.SPECS)
        doubled = [grad + grad for grad in self.expected_mix(self.SPECS)]
        self.assert_all_same(self.full_grads(module), doubled)

    def test_reductions_that_cannot_send(self):
        module = self.module(mp_policy=policy(None, FP32))
        module.set_custom_reduce_scatter(comms.OwnReduction())
        # Too late for the setter to refuse it
        comms.group_of(module).mp_policy = policy()
        text = r"OwnReduction of unit 'FSDPWeighted' cannot reduce p0.*dtype is torch\."
        with self.assertRaisesRegex(ValueError, text):
            self.backward(module, self.SPECS)
        module = self.module()
        module.set_force_sum_reduction_for_comms(True)
        with self.assertRaisesRegex(ValueError, "SymmMemReduceScatter.*grad_comm"):
            module.set_symm_mem_for_comm()


class TestUnitsOfFakeRanks(utils.FakeGroupTest):
    @parametrize("is_hybrid", [False, True])
    def test_post_backward_hardly_needs_more_memory(self, is_hybrid: bool) -> None:
        """Than in fp32: for half of a piece's rows, which a kernel does without."""
        specs = [((128, 32), BF16), ((128, 32), BF16), ((64, 16), BF16)]
        policies = policy(None, FP32), policy(BF16, FP32)
        modes = ({"is_hybrid": is_hybrid, "mp_policy": each} for each in policies)
        with mock.patch.object(tree, "_MIN_PIECE_NBYTES", 12):
            wide, narrow = (peak_nbytes(specs, mode) for mode in modes)
        self.assertLessEqual(narrow, 1.07 * wide)

    def test_hsdp_adds_in_the_memory_of_one_piece(self):
        tensor = torch.ones(2**20)
        run = functools.partial(tree.all_reduce_in_tree, tensor, dist.group.WORLD)
        with mock.patch.object(tree, "_MIN_PIECE_NBYTES", 12):
            peak = peak_nbytes_of(run)
        self.assertLess(peak, 1.1 * tensor.nbytes / 8)


if __name__ == "__main__":
    run_tests()
