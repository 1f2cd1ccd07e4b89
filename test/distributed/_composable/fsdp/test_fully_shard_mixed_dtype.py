# Owner(s): ["oncall: distributed"]

"""
Units whose parameters have several dtypes train, in every mode of 1D FSDP:

- like the same model unsharded (``TestMixedDtypeTraining``);
- bit for bit like one unit for each dtype, and units of one dtype bit for bit
  like before (``TestParityWithRelease``, against the release itself).

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fsdp_common.release_rules import compute_dtype
from fsdp_common.run_both import read_results, Results, run_on
from fsdp_common.run_forked import run_forked
from fsdp_common.utils import (
    DEVICE_TYPE,
    FSDPProcessTest,
    hybrid_mesh,
    LAUNCHED_RANK,
    linear_stack,
    on_first_rank,
    record_collectives,
    run_python,
    shard_mesh,
)
from fsdp_mixed_dtype import mlp
from fsdp_mixed_dtype.models import (
    BF16,
    DIM,
    FP16,
    FP32,
    loss_of,
    mixed_tower,
    Part,
    Tower,
)
from fsdp_mixed_dtype.parity import (
    differing,
    LR,
    MIXED_MODES,
    OVERRIDE_MODES,
    prefetch_explicitly,
    replicate_blocks,
    shard_blocks,
    shard_blocks_as_group,
    shard_last_dim,
    shard_root_only,
    UNIFORM_MODES,
    units_of,
)
from fsdp_mixed_dtype.reference import (
    local_part,
    Reference,
    run_model,
    run_skipping,
    SideBySide,
)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    StateDictOptions,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import checkpoint


pytestmark = pytest.mark.long


if LAUNCHED_RANK is None and DEVICE_TYPE == "cpu":
    # Processes that fork from one which has imported this come four times as fast
    # as four that import it, and a test's own process may have threads by now
    modules = ("torch._dynamo", "torch.testing._internal.common_fsdp")
    torch.multiprocessing.set_forkserver_preload([*modules])
    torch.multiprocessing.set_start_method("forkserver", force=True)

POLICIES = {
    "none": MixedPrecisionPolicy(),
    "param_bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "param_fp32": MixedPrecisionPolicy(param_dtype=FP32),
    "reduce_fp32": MixedPrecisionPolicy(reduce_dtype=FP32),
    "reduce_bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "param_bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "param_fp16_reduce_bf16": MixedPrecisionPolicy(FP16, BF16),
    "inputs_not_cast": MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False),
}
ACCUMULATING = ("none", "reduce_fp32", "param_bf16", "param_bf16_reduce_fp32")


def group_of(unit: nn.Module) -> FSDPParamGroup:
    (group,) = unit._get_fsdp_state()._fsdp_param_groups
    return group


def is_gathering(unit: nn.Module) -> bool:
    """Whether a gather of the unit has been started and not waited for."""
    return group_of(unit)._all_gather_result is not None


def shard_root_and_children(model: nn.Module, **kwargs: Any) -> None:
    for child in model.children():
        fully_shard(child, **kwargs)
    fully_shard(model, **kwargs)


class Boom(Exception):
    pass


@contextlib.contextmanager
def failing_backward(module: nn.Module) -> Iterator[None]:
    """Makes backward raise when it comes to the module's output."""

    def fail(grad: torch.Tensor) -> None:
        raise Boom

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class OddSizes(nn.Module):
    """Parameters of 1 to 9 elements, whose dtypes take turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (FP16, FP32, BF16)
        generator = torch.Generator().manual_seed(0)
        self.params = nn.ParameterList(
            torch.randn(size, generator=generator).to(dtypes[size % 3])
            for size in range(1, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.params:
            x = x + torch.sin(param.float()).mean().to(x.dtype) * x
        return x


class ComplexPart(nn.Module):
    """A complex parameter beside two real ones, as in a state-space model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        pole = torch.randn(DIM, 2, generator=generator)
        self.pole = nn.Parameter(torch.view_as_complex(pole))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.mix = nn.Parameter(torch.randn(3, DIM, generator=generator).to(BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        response = (x.to(torch.complex64) * self.pole).square()
        y = torch.tanh(response.real + 2 * response.imag) * self.gain
        return F.linear(y.to(self.mix.dtype), self.mix)


class Tables(nn.Module):
    """Frozen parameters that are no floating-point numbers, or of one byte."""

    def __init__(self) -> None:
        super().__init__()
        for name, values in self.expected().items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.seen: dict[str, torch.Tensor] = {}

    @staticmethod
    def expected() -> dict[str, torch.Tensor]:
        return {
            "index": torch.arange(DIM) * 3_000_000_019,
            "mask": torch.arange(DIM) % 3 != 0,
            "small": torch.arange(5, dtype=torch.uint8) * 50,
            "byte": torch.tensor([-128, 127, 3], dtype=torch.int8),
            "eighth": torch.linspace(-2, 2, 7).to(torch.float8_e4m3fn),
            "wide": torch.linspace(0, 1, 3, dtype=torch.float64),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: p.detach().clone() for name, p in self.named_parameters()}
        kept = torch.where(self.mask, x, 0)
        return kept + (self.index % 7 + self.byte.sum()).to(x.dtype) / 64


class TestMixedDtypeTraining(FSDPProcessTest):
    """Units of fp32, bf16 and fp16 parameters beside the model unsharded."""

    def side_by_side(self, *args: Any, **kwargs: Any) -> SideBySide:
        return SideBySide(self, mixed_tower(), *args, **kwargs)

    # Mixed precision #

    @parametrize("policy", list(POLICIES))
    def test_policy(self, policy: str) -> None:
        self.side_by_side(policy=POLICIES[policy]).train()

    @parametrize("dtype", [BF16, FP16])
    def test_output_dtype(self, dtype: torch.dtype) -> None:
        policy = MixedPrecisionPolicy(FP32, FP32, output_dtype=dtype)
        pair = self.side_by_side(shard_root_only, policy=policy)
        self.assertEqual(pair.model(pair.next_batches()[0]).dtype, dtype)
        pair.train()

    @parametrize("casts", [True, False])
    def test_forward_inputs_are_cast_only_if_wanted(self, casts: bool) -> None:
        policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=casts)
        pair = self.side_by_side(policy=policy)
        seen = {}
        for i, part in enumerate(pair.model.all_parts):
            part.register_forward_pre_hook(
                lambda _, args, i=i: seen.__setitem__(i, args[0].dtype)
            )
        pair.backward()
        self.assertEqual(set(seen.values()), {BF16 if casts else FP32})

    def test_forward_sees_each_parameter_in_its_compute_dtype(self) -> None:
        for policy in (POLICIES["none"], POLICIES["param_bf16"]):
            pair = self.side_by_side(policy=policy)
            named = pair.reference.model.named_parameters()
            expected = {n: compute_dtype(policy, param.dtype) for n, param in named}
            for unit in units_of(pair.model):
                unit.unshard()
            params = dict(pair.model.named_parameters())
            self.assertEqual({n: p.dtype for n, p in params.items()}, expected)
            for name, full in pair.reference.model.named_parameters():
                cast = full.to(expected[name])
                self.assertTrue(torch.equal(params[name], cast), name)

    # Unshard and reshard #

    def test_one_unit_for_the_whole_model(self) -> None:
        self.side_by_side(shard_root_only).train()

    @parametrize("is_explicit", [False, True])
    def test_prefetch(self, is_explicit: bool) -> None:
        pair = self.side_by_side(reshard_after_forward=True)
        if is_explicit:
            prefetch_explicitly(pair.model)
        first, second = pair.model.blocks
        seen: dict[str, bool] = {}

        def backward_of_second(grad: torch.Tensor) -> None:
            seen["backward"] = is_gathering(first)

        def forward_of_first(module: nn.Module, args: Any, output: Any) -> None:
            seen["forward"] = is_gathering(second)

        def forward_of_second(module: nn.Module, args: Any, output: Any) -> None:
            output.register_hook(backward_of_second)

        first.parts[0].register_forward_hook(forward_of_first)
        second.parts[0].register_forward_hook(forward_of_second)
        pair.train()
        # In forward the next gather is issued early only if asked for
        self.assertEqual(seen, {"forward": is_explicit, "backward": True})

    def test_a_unit_is_reduced_before_backward_goes_on(self) -> None:
        pair = self.side_by_side()
        first, seen = pair.model.blocks[0], []

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda _: seen.append(len(recorder.reduce_scatters)))

        first.parts[2].register_forward_hook(hook)
        with record_collectives() as recorder:
            pair.backward()
        # The second block's three dtypes; then the first's, and two of the root
        self.assertEqual(seen, [3])
        self.assertEqual(len(recorder.reduce_scatters), 3 + 3 + 2)
        pair.step()

    def test_async_unshard(self) -> None:
        pair = self.side_by_side()
        first, second = pair.model.blocks
        for _ in range(2):
            handle = first.unshard(async_op=True)
            second.unshard(async_op=True)
            for block in pair.model.blocks:
                self.assertTrue(is_gathering(block))
                self.assertIsInstance(block.parts[0].up, DTensor)
            handle.wait()
            self.assertNotIsInstance(first.parts[0].up, DTensor)
            pair.train(steps=1)

    @parametrize("reshard", [True, False, 2])
    def test_reshard_after_forward(self, reshard: bool | int) -> None:
        pair = self.side_by_side(reshard_after_forward=reshard)
        pair.train(steps=1)
        with record_collectives() as recorder:
            loss = loss_of(pair.model(pair.next_batches()[self.rank]))
            self.assertEqual(len(recorder.all_gathers), 3)  # one a unit
            recorder.clear()
            self.check_resharded(pair.model, reshard)
            loss.backward()
        sizes = [call.group_size for call in recorder.all_gathers]
        self.assertEqual(sizes, {True: [4] * 3, False: [], 2: [2] * 3}[reshard])
        pair.model.zero_grad()
        pair.train(steps=1)

    def check_resharded(self, model: Tower, reshard: bool | int) -> None:
        for name, param in model.named_parameters():
            self.assertEqual(isinstance(param, DTensor), reshard is not False, name)
            if reshard == 2 and reshard is not True:
                self.assertEqual(param.device_mesh.shape, (2, 2), name)

    def test_shard_on_another_dim(self) -> None:
        pair = self.side_by_side(shard_placement_fn=shard_last_dim)
        dims = {param.placements[0].dim for param in pair.model.parameters()}
        self.assertEqual(dims, {0, 1})
        pair.train()

    def test_shard_on_another_dim_resharded_to_two(self) -> None:
        kwargs = {"reshard_after_forward": 2, "shard_placement_fn": shard_last_dim}
        model = linear_stack([BF16, FP32, FP16], dim=DIM)
        # Both dims divide: the release's own part of this wants no less
        SideBySide(self, model, shard_root_and_children, **kwargs).train()

    def test_single_rank(self) -> None:
        pair = self.side_by_side(mesh=shard_mesh(1))
        model, reference = pair.model, pair.reference
        x = pair.next_batches()[0]
        reference.backward([x], lambda rank: run_model)
        run_model(model, x).backward()
        for name, param in model.named_parameters():
            expected = reference.gradients.get(name)
            self.assertEqual(param.grad is None, expected is None, name)
            if expected is not None:
                actual = param.grad.to_local().double()
                self.assertTrue(torch.equal(actual, expected), name)

    # Units of several modules #

    def test_group_of_modules(self) -> None:
        pair = self.side_by_side(shard_blocks_as_group)
        with record_collectives() as recorder:
            pair.backward()
        # Once for the group and once for the root, whatever their modules are
        self.assertEqual(len(recorder.reduce_scatters), 3 + 2)
        pair.step()
        pair.train()

    def test_group_of_modules_of_which_one_runs(self) -> None:
        pair = self.side_by_side(shard_blocks_as_group)
        for blocks in ((0,), (1,), (0, 1), (0,)):
            pair.train(lambda model, x, b=blocks: loss_of(model(x, blocks=b)), steps=1)

    def test_group_of_modules_run_in_chunks(self) -> None:
        def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            chunks = model(x, blocks=(0,)).chunk(2)
            return sum(loss_of(model.blocks[1](chunk.clone())) for chunk in chunks)

        self.side_by_side(shard_blocks_as_group).train(run)

    # Accumulation #

    @parametrize("policy", ACCUMULATING)
    def test_accumulate(self, policy: str) -> None:
        pair = self.side_by_side(policy=POLICIES[policy])
        for _ in range(2):
            pair.accumulate(run_model, run_model, run_model)
            pair.step()

    @parametrize("policy", ACCUMULATING)
    def test_accumulate_in_turns(self, policy: str) -> None:
        """
        Fresh and accumulated gradients meet in one unit, in bf16 and in fp32 if
        they are reduced in another dtype than computed (pytorch 196996).
        """
        pair = self.side_by_side(policy=POLICIES[policy])
        for _ in range(2):
            pair.accumulate(run_skipping(1, 2), run_skipping(0, 2), run_skipping(0))
            pair.step()

    def test_accumulated_and_fresh_gradients_share_one_reduction(self) -> None:
        policy = POLICIES["param_bf16_reduce_fp32"]
        pair = self.side_by_side(shard_root_only, policy=policy)
        with record_collectives() as recorder:
            pair.accumulate(run_skipping(1, 2), run_skipping(0))
        (reduction,) = recorder.reduce_scatters
        self.assertEqual(reduction.dtype, FP32)
        pair.step()

    def test_accumulate_without_communication(self) -> None:
        pair = self.side_by_side(reshard_after_forward=False)
        pair.train(steps=1)
        pair.model.set_requires_gradient_sync(False)
        pair.model.set_reshard_after_backward(False)
        pair.backward()
        with record_collectives() as recorder:
            pair.backward()
            self.assertEqual(recorder.calls, [])
            pair.model.set_requires_gradient_sync(True)
            pair.model.set_reshard_after_backward(True)
            pair.backward()
        self.assertEqual(len(recorder.reduce_scatters), 2 + 3 + 3)
        pair.step()

    def test_unused_parameters_reduce_zeros(self) -> None:
        """Ranks run different parts, so each lacks gradients that others have."""
        pair = self.side_by_side()
        pair.model.set_reduce_scatter_unused_params(True)
        for _ in range(2):
            # No rank runs the third part
            pair.backward(by_rank=lambda rank: run_skipping(rank % 2, 2))
            pair.step(zeros=True)

    def test_unused_parameters_have_no_gradient(self) -> None:
        self.side_by_side().train(run_skipping(1))

    @parametrize("factor", [2.0, 3.0])
    def test_gradient_divide_factor(self, factor: float) -> None:
        pair = self.side_by_side(divisor=factor)
        for unit in units_of(pair.model):
            unit.set_gradient_divide_factor(factor)
        pair.train()

    # Frozen parameters #

    @parametrize("dtype", [FP32, BF16, FP16])
    def test_frozen_dtype(self, dtype: torch.dtype) -> None:
        pair = self.side_by_side()
        pair.set_requires_grad(
            False, lambda model: [p for p in model.all_parts if p.up.dtype == dtype]
        )
        pair.train()

    def test_frozen_unit(self) -> None:
        pair = self.side_by_side()
        pair.set_requires_grad(False, lambda model: [model.blocks[0]])
        with record_collectives() as recorder:
            pair.train(steps=1)
        self.assertEqual(len(recorder.reduce_scatters), 2 + 3)
        pair.train(steps=1)

    def test_freeze_and_unfreeze_between_steps(self) -> None:
        pair = self.side_by_side()
        pair.train(steps=1)
        pair.set_requires_grad(False, lambda model: model.blocks[0].parts[:2])
        pair.train(steps=1)
        pair.set_requires_grad(True, lambda model: [model.blocks[0].parts[1]])
        pair.train(steps=1)

    @parametrize("policy", ["none", "param_bf16_reduce_fp32", "reduce_bf16"])
    def test_unfreeze_after_a_first_forward(self, policy: str) -> None:
        """What is reduced later is reduced in the policy's dtype (pytorch 186998)."""
        kwargs = {"policy": POLICIES[policy], "reshard_after_forward": True}
        pair = self.side_by_side(shard_root_only, **kwargs)
        pair.set_requires_grad(False, lambda model: [model])
        self.assertFalse(pair.model(pair.next_batches()[0]).requires_grad)
        pair.set_requires_grad(True, lambda model: [model])
        with record_collectives() as recorder:
            pair.backward()
        dtypes = [call.dtype for call in recorder.reduce_scatters]
        self.assertEqual(
            dtypes,
            {
                "none": [FP32, BF16, FP16],
                "param_bf16_reduce_fp32": [FP32],
                "reduce_bf16": [BF16],
            }[policy],
        )
        pair.step()
        pair.train(steps=1)

    @parametrize("policy", ["none", "param_bf16", "reduce_fp32"])
    def test_frozen_parameters_of_other_types(self, policy: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Part(BF16), Tables(), Part(FP32))
        pair = SideBySide(self, model, shard_root_only, policy=POLICIES[policy])
        pair.train()
        expected = Tables.expected()
        param_dtype = POLICIES[policy].param_dtype
        self.assertEqual({*model[1].seen}, {*expected})
        for name, seen in model[1].seen.items():
            full = expected[name].to(self.device)
            if param_dtype is not None and full.is_floating_point():
                full = full.to(param_dtype)
            self.assertEqual(seen.dtype, full.dtype, name)
            same = torch.equal(seen.view(torch.uint8), full.view(torch.uint8))
            self.assertTrue(same, name)

    # Kinds of parameters #

    def test_odd_sizes(self) -> None:
        pair = SideBySide(self, OddSizes(), shard_root_only)
        pair.train()
        with record_collectives() as recorder:
            pair.backward()
        # Shards are padded to equal sizes, and those of one dtype to 16 bytes
        nbytes: Counter[torch.dtype] = Counter()
        for p in pair.reference.model.parameters():
            nbytes[p.dtype] += -(-p.numel() // 4) * p.dtype.itemsize
        (gather,) = recorder.all_gathers
        padded = sum(n + -n % 16 for n in nbytes.values())
        self.assertEqual(gather.nbytes_per_rank, padded)

    def test_dtype_changed_before_the_first_forward(self) -> None:
        pair = self.side_by_side()
        for model in (pair.model, pair.reference.model):
            model.head.to(BF16)
            model.blocks[0].parts[1].to(FP16)
        pair.check_params()
        pair.reference = Reference(pair.reference.model, MixedPrecisionPolicy())
        pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=LR)
        pair.train()

    def test_shared_parameters_stay_shared(self) -> None:
        pair = self.side_by_side()
        pair.train()
        for part in pair.model.all_parts:
            self.assertIs(part.code, part.decoder.weight)
        names = [name for name, _ in pair.model.named_parameters()]
        self.assertFalse([name for name in names if "decoder" in name])

    @parametrize("reduce_dtype", [None, FP32])
    def test_complex_parameter(self, reduce_dtype: torch.dtype | None) -> None:
        """The policy's reduce dtype must not take its imaginary part away."""
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        pair = SideBySide(self, ComplexPart(), shard_root_only, policy=policy)
        with record_collectives() as recorder:
            pair.backward()
        dtypes = [call.dtype for call in recorder.reduce_scatters]
        real = [FP32] if reduce_dtype else [FP32, BF16]
        self.assertEqual(dtypes, [torch.complex64, *real])
        self.assertTrue((pair.reference.gradients["pole"].imag != 0).all())
        pair.step()
        pair.train()

    def test_complex_parameter_accumulates(self) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=FP32)
        pair = SideBySide(self, ComplexPart(), shard_root_only, policy=policy)
        pair.accumulate(run_model, run_model)
        pair.step()

    # State dicts #

    def test_meta_device_init(self) -> None:
        values = mixed_tower(is_tied=False)
        full = dict(values.named_parameters())
        with torch.device("meta"):
            model = Tower(is_tied=False)
        shard_blocks(model, mesh=shard_mesh())
        model.to_empty(device=self.device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                self.assertEqual(param.dtype, full[name].dtype)
                shard = local_part(full[name].detach().to(self.device), param)
                param.to_local().copy_(shard)
        pair = SideBySide(self, values, lambda *args, **kwargs: None)
        pair.model = model
        pair.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        pair.train()

    def test_meta_device_is_refused_by_name(self) -> None:
        with torch.device("meta"):
            model = Tower()
        shard_blocks(model, mesh=shard_mesh())
        with self.assertRaisesRegex(RuntimeError, "meta device.*stem.gain"):
            model(torch.zeros(1, DIM, device=self.device))

    def test_state_dict_keeps_dtypes(self) -> None:
        pair = self.side_by_side(policy=POLICIES["param_bf16_reduce_fp32"])
        pair.train(steps=1)
        pair.model(pair.next_batches()[0])  # leaves the root unsharded
        expected = pair.reference.model.state_dict()
        actual = pair.model.state_dict()
        self.assertEqual(list(actual), list(expected))
        for name, full in expected.items():
            self.assertIsInstance(actual[name], DTensor, name)
            self.assertEqual(actual[name].dtype, full.dtype, name)
            local = actual[name].to_local()
            self.assertTrue(torch.equal(local, local_part(full, actual[name])), name)

    @parametrize("assign", [False, True])
    def test_load_state_dict_before_and_between_steps(self, assign: bool) -> None:
        # What assigns makes a parameter of each name, and so unties
        pair = SideBySide(self, mixed_tower(is_tied=False))
        for seed in (1, 2):
            self.load(pair, mixed_tower(seed=seed, is_tied=False), assign=assign)
            pair.check_params()
            pair.train(steps=1)
            pair.model(pair.next_batches()[0])  # leaves the root unsharded

    def load(self, pair: SideBySide, values: Tower, *, assign: bool) -> None:
        full = {n: v.to(self.device) for n, v in values.state_dict().items()}
        pair.reference.model.load_state_dict(full)
        own = pair.model.state_dict()
        shards = {
            name: DTensor.from_local(
                local_part(full[name], own[name]).clone(),
                own[name].device_mesh,
                own[name].placements,
                shape=full[name].shape,
                stride=full[name].stride(),
            )
            for name in own
        }
        pair.model.load_state_dict(shards, assign=assign)
        if assign:  # the parameters are other objects now
            for param in pair.model.parameters():
                param.requires_grad_(True)
            for name, param in pair.reference.model.named_parameters():
                pair.model.get_parameter(name).requires_grad_(param.requires_grad)
            lr = LR
            pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=lr)

    def test_full_state_dict_between_models(self) -> None:
        source, target = self.side_by_side(), self.side_by_side()
        source.train(steps=1)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        full = get_model_state_dict(source.model, options=options)
        expected = source.reference.model.state_dict()
        if self.rank == 0:
            self.assertEqual(
                {n: v.dtype for n, v in full.items()},
                {n: v.dtype for n, v in expected.items()},
            )
        set_model_state_dict(target.model, full, options=options)
        target.reference.model.load_state_dict(expected)
        target.check_params()
        target.train(steps=1)

    # Recovery #

    @parametrize("policy", ["none", "param_bf16_reduce_fp32"])
    @parametrize("accumulates", [False, True])
    def test_reset_after_failed_backward(self, policy: str, accumulates: bool) -> None:
        pair = self.side_by_side(policy=POLICIES[policy])
        pair.train(steps=1)
        model = pair.model
        if accumulates:
            model.set_requires_gradient_sync(False)
            pair.backward()
        # Half of the first block has its gradients then, and all that follows
        with failing_backward(model.blocks[0].parts[1]), self.assertRaises(Boom):
            loss_of(model(pair.next_batches()[self.rank])).backward()
        model.reset_iter_state()
        self.check_nothing_left(model)
        model.set_requires_gradient_sync(True)
        model.zero_grad()
        pair.reference.forget()
        pair.train()

    def check_nothing_left(self, model: nn.Module) -> None:
        for unit in units_of(model):
            group = group_of(unit)
            self.assertTrue(group.is_sharded)
            self.assertFalse(is_gathering(unit))
            self.assertEqual(group.comm_ctx.reduce_scatter_states, [])
            self.assertIsNone(group.comm_ctx.all_gather_state)
            for fsdp_param in group.fsdp_params:
                self.assertIsNone(fsdp_param.unsharded_accumulated_grad)
                self.assertIsNone(fsdp_param._unsharded_param.grad)

    def test_reset_after_failed_forward(self) -> None:
        def fail(module: nn.Module, args: Any) -> None:
            raise Boom

        pair = self.side_by_side()
        pair.train(steps=1)
        first, second = pair.model.blocks
        prefetch_explicitly(pair.model)
        handle = first.parts[1].register_forward_pre_hook(fail)
        with self.assertRaises(Boom):
            pair.model(pair.next_batches()[self.rank])
        handle.remove()
        self.assertTrue(is_gathering(second))
        pair.model.reset_iter_state()
        self.check_nothing_left(pair.model)
        pair.train()

    # Inference #

    @parametrize("mode", [torch.no_grad, torch.inference_mode])
    @parametrize("is_first", [True, False])
    def test_inference_and_training(self, mode: Any, is_first: bool) -> None:
        pair = self.side_by_side()
        if not is_first:
            pair.train(steps=1)
        for _ in range(2):
            x = pair.next_batches()[0]
            with mode():
                pair.check_equal(pair.model(x), pair.reference.computing()(x))
            pair.train(steps=1)

    # What other modes have in common with these #

    @parametrize("wraps_unit", [True, False])
    def test_activation_checkpointing(self, wraps_unit: bool) -> None:
        pair = self.side_by_side(reshard_after_forward=True)
        for model in (pair.model, pair.reference.computing()):
            for block in model.blocks:
                for module in [block] if wraps_unit else block.parts:
                    self.checkpoint_forward(module)
        pair.train()

    @staticmethod
    def checkpoint_forward(module: nn.Module) -> None:
        """Computes the module, its hooks included, again in backward."""
        call = module.__call__

        class Checkpointed(type(module)):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return checkpoint(call, *args, use_reentrant=False, **kwargs)

        module.__class__ = Checkpointed

    @pytest.mark.quick
    def test_cpu_offload(self) -> None:
        policy = CPUOffloadPolicy(pin_memory=DEVICE_TYPE != "cpu")
        pair = self.side_by_side(offload_policy=policy)
        if DEVICE_TYPE == "cpu":
            pair.train()
        self.assertEqual({p.device.type for p in pair.model.parameters()}, {"cpu"})

    @pytest.mark.quick
    def test_hybrid(self) -> None:
        self.side_by_side(mesh=hybrid_mesh(2)).train()

    @parametrize("policy", ["none", "param_bf16_reduce_fp32"])
    def test_hybrid_defers_all_reduce(self, policy: str) -> None:
        pair = self.side_by_side(mesh=hybrid_mesh(2), policy=POLICIES[policy])
        for _ in range(2):
            runs = (run_skipping(1), run_skipping(0), run_skipping(2))
            for i, run in enumerate(runs):
                pair.model.set_requires_all_reduce(i == len(runs) - 1)
                pair.backward(run)
            pair.step()

    @pytest.mark.quick
    def test_replicate(self) -> None:
        self.side_by_side(replicate_blocks).train()


instantiate_parametrized_tests(TestMixedDtypeTraining)


@on_first_rank
class TestOneUnitOfTwoDtypes(TestCase):
    """The script of pytorch issue 156784, before and after."""

    def test_release_refuses_it(self) -> None:
        message = "FSDP expects uniform original parameter dtype but got"
        with self.assertRaisesRegex(AssertionError, message):
            run_python("-m", "fsdp_mixed_dtype.mlp", on_release=True)

    def test_it_trains(self) -> None:
        printed = run_forked("fsdp_mixed_dtype.mlp")
        losses = [float.fromhex(line) for line in printed.split()]
        self.assertEqual(losses, self.losses_of_one_process(), atol=0, rtol=0)
        self.assertLess(losses[-1], losses[0] / 2)
        self.assertEqual(sorted(losses, reverse=True), losses)

    @staticmethod
    def losses_of_one_process() -> list[float]:
        model, losses = mlp.seeded_mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=mlp.LR)
        ranks = range(mlp.RANKS)
        for _ in range(mlp.STEPS):
            of_ranks = [mlp.loss_of(model, rank) for rank in ranks]
            sum(of_ranks).backward()
            for param in model.parameters():
                param.grad.div_(len(ranks))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(of_ranks[0].item())
        return losses


def hash_seed(number: int) -> dict[str, str]:
    return {"PYTHONHASHSEED": str(number)}


def run_parity(units: str, *, on_release: bool, env: dict[str, str]) -> Results:
    """Runs all modes on 4 ranks."""
    args = ("--units", units, "--device", DEVICE_TYPE)
    return run_on("fsdp_mixed_dtype.parity", *args, on_release=on_release, env=env)


def run_parity_with_other_hash_seeds() -> Results:
    """Runs the mixed modes on 2 ranks, each a process with a hash seed of its own."""
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as met:
        args = ("--device", DEVICE_TYPE, "--out", out, "--store", f"{met}/store")
        args += ("--units", "block", "--only-mixed", "--ranks", "2")

        def run_rank(rank: int) -> None:
            command = ("-m", "fsdp_mixed_dtype.parity", *args, "--rank", str(rank))
            run_python(*command, env=hash_seed(100 + rank))

        with ThreadPoolExecutor() as pool:
            list(pool.map(run_rank, range(2)))
        return read_results(out)


@on_first_rank
class TestParityWithRelease(TestCase):
    """
    Losses, sharded gradients and parameters of this branch and of the release, to
    the last bit.
    """

    release: Results
    branch: Results
    reseeded: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with ThreadPoolExecutor() as pool:
            release = pool.submit(
                run_parity, "dtype", on_release=True, env=hash_seed(0)
            )
            branch = pool.submit(
                run_parity, "block", on_release=False, env=hash_seed(1)
            )
            reseeded = pool.submit(run_parity_with_other_hash_seeds)
        cls.release, cls.branch = release.result(), branch.result()
        cls.reseeded = reseeded.result()

    def check_same_bits(
        self, mode: str, ranks: int, actual: Results, expected: Results
    ) -> None:
        # Of modes that want half of the ranks, each half runs some
        both = [(a[mode], e[mode]) for a, e in zip(actual, expected) if mode in a]
        self.assertEqual(len(both), ranks)
        for mine, other in both:
            self.assertEqual(list(mine), list(other))
            self.assertEqual(differing(mine, other), [])
            # Equal bits say nothing of a model that did not train
            self.assertNotEqual(other["step 0 loss"], other["step 2 loss"])

    def test_only_the_release_refuses_a_mixed_unit(self) -> None:
        message = "FSDP expects uniform original parameter dtype but got {torch."
        for release, branch in zip(self.release, self.branch, strict=True):
            self.assertTrue(release["refusal"].startswith(message))
            self.assertEqual(branch["refusal"], "")

    @parametrize("mode", list(MIXED_MODES))
    def test_mixed_unit_equals_one_unit_of_the_release_per_dtype(
        self, mode: str
    ) -> None:
        self.check_same_bits(f"mixed {mode}", 2, self.branch, self.release)

    @parametrize("mode", list(OVERRIDE_MODES))
    def test_overrides_equal_one_unit_of_the_release_per_policy(
        self, mode: str
    ) -> None:
        ranks = 4 if OVERRIDE_MODES[mode].is_hybrid else 2
        self.check_same_bits(f"override {mode}", ranks, self.branch, self.release)

    @parametrize("mode", list(UNIFORM_MODES))
    def test_uniform_unit_equals_the_release(self, mode: str) -> None:
        for ranks in UNIFORM_MODES[mode].world_sizes:
            name = f"uniform {mode} {ranks}"
            self.check_same_bits(name, ranks, self.branch, self.release)

    @parametrize("mode", list(MIXED_MODES))
    def test_hash_seed_does_not_matter(self, mode: str) -> None:
        branch = [results for results in self.branch if f"mixed {mode}" in results]
        self.check_same_bits(f"mixed {mode}", 2, self.reseeded, branch)

    def test_every_kind_of_parameter_has_gradients(self) -> None:
        """What is compared is there: all dtypes, each with a gradient that is not 0."""
        record = self.branch[0]["mixed plain"]
        for dtype in ("float32", "bfloat16", "float16"):
            for kind in ("gain", "up", "down", "code", "scale"):
                grads = [
                    bits
                    for name, (of, bits) in record.items()
                    if "gradient" in name and name.endswith(kind) and dtype in of
                ]
                self.assertTrue(any(any(bits) for bits in grads), (dtype, kind))


instantiate_parametrized_tests(TestParityWithRelease)


if __name__ == "__main__":
    run_tests()
