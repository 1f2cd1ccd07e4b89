# Owner(s): ["oncall: distributed"]
"""
``set_coalesced_collectives``: the bits of copies, in grouped calls. Streams and the
reuse of memory are in ``test_fully_shard_streams.py``.
"""

import contextlib
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common import utils
from fsdp_helpers.common.comms import backward, BF16, GivenGrads, group_of
from fsdp_helpers.common.parity_layers import groups_of, units_of
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.parity.models import extended_stack, Fp8
from fsdp_helpers.parity.modes import differing, Record, train_with

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, set_coalesced_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.distributed.fsdp._fully_shard._fsdp_comms import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_direct import DirectMemory
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)

# Cases of `fsdp_helpers/parity/modes.py` that random cases do not cover
CASES = (
    "uniform backward_twice",
    "uniform unused_by_rank",
    "mixed group_run_in_chunks",
    "mixed state_dict_before_backward",
    "mixed step_in_backward",
    "mixed two_forwards_resharded",
    "mixed unfrozen_later",
    "mixed unshard_ahead",
)
BLOCKS, DIM = 3, 16
GROUPED = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
SINGLE = ("all_gather_single", "reduce_scatter_single")
COPIES = ("cat", "_foreach_copy_", "_chunk_cat", "split_with_sizes_copy")
# A few bytes: matrices alone are direct
SOME_NBYTES = 80


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts collectives, members of grouped calls, and the copies around them."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name in GROUPED:
                counts[f"members of {name}"] += len(args[1])
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    owners = {GROUPED: dist.ProcessGroup, SINGLE: dist, COPIES: torch}
    with contextlib.ExitStack() as stack:
        for names, owner in owners.items():
            for name in names:
                stack.enter_context(count(owner, name))
        yield counts


class Affine(nn.Module):
    """A matrix in bf16 and a vector in fp32, both sharded evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM).bfloat16() / DIM)
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)


class Blocks(nn.Sequential):
    blocks_to_run = BLOCKS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self][: self.blocks_to_run]:
            x = block(x)
        return x


def make_blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks(*(Affine() for _ in range(BLOCKS))).to(utils.DEVICE_TYPE)


def make(
    dtype: torch.dtype | None = None, min_nbytes: int | None = None, **kwargs: Any
) -> Any:
    model = utils.shard_blocks(make_blocks().to(dtype), **kwargs)
    set_coalesced_collectives(model, min_nbytes)
    return model


def on_last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def fail_once(model: Any) -> None:
    """Fails in a forward. The next step follows without ``reset_iter_state``."""
    handle = model[1].register_forward_hook(mock.Mock(side_effect=KeyError))
    with contextlib.suppress(KeyError):
        model(utils.random_input(3, DIM, seed=0))
    handle.remove()


def extended() -> Any:
    blocks = extended_stack(Fp8, 8, [BF16])
    return utils.shard_blocks(blocks.to(utils.DEVICE_TYPE), mesh=utils.shard_mesh(2))


def over_two_ranks(**kwargs: Any) -> Any:
    return make(mesh=utils.shard_mesh(2), **kwargs)


# How else a model is made
WAYS: dict[str, Any] = {
    "extension": extended,
    "replicate": lambda: replicate(make_blocks(), mesh=utils.shard_mesh(2)),
    "compiled": lambda: torch.compile(over_two_ranks(), backend="aot_eager"),
    "cast": lambda: over_two_ranks().to(torch.float64),
    "one_rank": lambda: make(mesh=utils.shard_mesh(1)),
    "failed": over_two_ranks,
    "pieces": lambda: over_two_ranks(shard_placement_fn=on_last_dim),
}


def outputs_of(
    model: nn.Module, state: ShardedState = ShardedState.SHARDED
) -> list[torch.Tensor]:
    params = [p for group in groups_of(model) for p in group.fsdp_params]
    params = [p for p in params if p.sharded_state is state]
    return [output for p in params for output in p.all_gather_outputs]


def unsharded_nbytes(model: nn.Module, *states: ShardedState) -> int:
    """Returns the bytes of unsharded memory of the parameters in a state."""
    return sum(t.untyped_storage().nbytes() for t in outputs_of(model, *states))


class TestCoalesced(utils.FSDPProcessTest):
    world_size = 4

    def step(self, model: nn.Module) -> None:
        model(utils.random_input(3, DIM, seed=self.rank)).float().sum().backward()

    def train(self, case: str, min_nbytes: int | None) -> Record:
        """Over two ranks: a sum over more may round differently in another place."""
        return train_with(
            lambda model: set_coalesced_collectives(model, min_nbytes), case, self.rank
        )

    @parametrize("case", CASES)
    def test_has_the_bits_of_copies(self, case: str) -> None:
        expected, actual = (self.train(case, n) for n in (None, SOME_NBYTES))
        self.assertNotEqual(expected["step 0 loss"], expected["step 1 loss"])
        self.assertEqual(differing(actual, expected), [])

    @mock.patch.object(layouts, "_MIN_PIECE_NBYTES", 0)
    @parametrize("way", [*WAYS])
    def test_has_the_bits_of_copies_where(self, way: str) -> None:
        seen = []
        for min_nbytes in (None, 0):
            model = WAYS[way]()
            set_coalesced_collectives(model, min_nbytes)
            if way == "failed":
                fail_once(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                self.step(model)
                optimizer.step()
            tensors = [t.to_local() for p in model.parameters() for t in (p, p.grad)]
            seen.append([t.clone() for t in tensors])
        self.assertEqual(*seen, rtol=0, atol=0)

    @parametrize("dtype", [None, torch.float32, torch.float16])
    def test_one_grouped_call_each_way_and_no_copy(self, dtype: Any) -> None:
        model = make(dtype, 0)
        self.step(model)  # ranks are compared
        self.step(model)
        for param in model.parameters():
            param.grad = None
        with counted() as counts:
            self.step(model)
        dtypes = {p.dtype for p in model[0].parameters()}
        # Every unit twice
        self.assertEqual(counts[GROUPED[0]], 2 * BLOCKS)
        self.assertEqual(counts[GROUPED[1]], len(dtypes) * BLOCKS)
        self.assertEqual([counts[name] for name in SINGLE], [0, 0])
        params = len([*model[0].parameters()])
        self.assertEqual(counts[f"members of {GROUPED[0]}"], 2 * BLOCKS * params)
        # But for the last unit, whose memory compute still reads when backward begins
        copies = {name: counts[name] for name in COPIES if counts[name]}
        self.assertEqual(copies, {"_foreach_copy_": len(dtypes)})

    @mock.patch.object(layouts, "_MIN_PIECE_NBYTES", 0)
    @parametrize("rows", [4, 64])
    def test_each_of_few_pieces_is_a_member(self, rows: int) -> None:
        experts = torch.randn(rows, DIM, device=utils.DEVICE_TYPE)
        model = fully_shard(GivenGrads(w=experts), shard_placement_fn=on_last_dim)
        set_coalesced_collectives(model, 0)
        backward(model, w=1.0)
        with counted() as counts:
            backward(model, w=1.0)
        for name in GROUPED:
            self.assertEqual(counts[f"members of {name}"], rows * (rows == 4))
        self.assertEqual(sum(counts[name] for name in COPIES), 0 if rows == 4 else 3)

    def test_small_parameters_are_one_more_member(self) -> None:
        model = make(min_nbytes=SOME_NBYTES)
        self.step(model)
        summary = fsdp.layout_summary(model)
        self.assertRegex(str(summary), r" \(\d+ direct\) ")
        direct = [len(row.direct) for row in summary.rows if row.names]
        self.assertIn(sum(direct), range(1, BLOCKS * len([*model[0].parameters()])))
        with counted() as counts:
            self.step(model)
        members = 2 * (sum(direct) + BLOCKS)  # a buffer for each unit
        self.assertEqual(counts[f"members of {GROUPED[0]}"], members)

    @parametrize("change", ["comm", "mesh", "exchange", "off"])
    def test_a_replaced_step_keeps_the_copies(self, change: str) -> None:
        kwargs: dict[str, dict[str, Any]] = {
            "mesh": {"reshard_after_forward": 2},
            "exchange": {"mp_policy": fsdp.MixedPrecisionPolicy(grad_comm_dtype=BF16)},
        }
        model = make(torch.float32, 0, **kwargs.get(change, {}))
        for block in model if change == "comm" else ():
            block.set_custom_all_gather(type("Gather", (DefaultAllGather,), {})())
        if change == "off":
            self.step(model)
            set_coalesced_collectives(model, None)
        self.step(model)
        with counted() as counts:
            self.step(model)
        gathers, reductions = (counts[name] for name in GROUPED)
        self.assertEqual(gathers > 0, change == "exchange")
        self.assertEqual(reductions > 0, change in ("comm", "mesh"))

    def test_the_size_may_change_between_steps(self) -> None:
        x = utils.random_input(3, DIM, seed=self.rank).requires_grad_()
        policy = fsdp.MixedPrecisionPolicy(BF16)
        model, expected = make(mp_policy=policy), make(mp_policy=policy)(x)
        for min_nbytes in (SOME_NBYTES, 0, None, SOME_NBYTES):
            set_coalesced_collectives(model, min_nbytes)
            output = model(x)
            self.assertEqual(output, expected, atol=0, rtol=0)
            output.float().sum().backward()
            with torch.no_grad():
                model[0](x)  # which is gathered next

    def test_a_plugin_may_start_the_gather(self) -> None:
        model, x = make(min_nbytes=0), utils.random_input(3, DIM, seed=self.rank)
        with torch.no_grad():
            model[0](model(x))
            group = group_of(model[0])
            context = group.comm_ctx
            of_group = group.fsdp_params, group._all_gather_process_group
            streams = context.all_gather_copy_in_stream, context.all_gather_stream
            how = *streams, group.device, group._all_gather_comm
            group._all_gather_result = foreach_all_gather(*of_group, False, *how)
            group.wait_for_unshard()
            self.assertEqual(model[0](x), make()[0](x), atol=0, rtol=0)

    def test_observed_step_packs_what_is_not_direct(self) -> None:
        """The shard of the direct parameter is no whole number of fp32 elements."""
        weight, bias = torch.ones(4, 601, dtype=BF16), torch.ones(8)
        model = fully_shard(GivenGrads(weight=weight, bias=bias).to(utils.DEVICE_TYPE))
        set_coalesced_collectives(model, 1024)
        with CommDebugMode():
            backward(model, weight=1.0, bias=2.0)
        self.assertEqual(model.bias.grad.full_tensor(), torch.full((8,), 2.0))

    def test_two_units_have_unsharded_memory(self) -> None:
        model = make(min_nbytes=0)
        self.step(model)
        memories = [group_of(block)._direct_memory for block in model]
        most, original = [0], DirectMemory.prepare

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            most[0] = max(most[0], sum(1 for each in memories if each.allocated))
            return result

        with mock.patch.object(DirectMemory, "prepare", noting):
            self.step(model)
        self.assertEqual(most[0], 2)
        self.assertEqual([each.allocated for each in memories], [{}] * BLOCKS)

    @parametrize("how", ["reshard", "state_dict", "unused_gather", "unused_prefetch"])
    def test_sharded_units_free_their_memory(self, how: str) -> None:
        model = make(min_nbytes=0, reshard_after_forward=True)
        self.step(model)
        if how == "unused_prefetch":
            model._set_unshard_async_op(True)
            model[1].set_modules_to_backward_prefetch([model[2]])
        if how.startswith("unused"):
            if how == "unused_gather":
                model[2].unshard(async_op=True)
            model.blocks_to_run = BLOCKS - 1
            self.step(model)
        else:
            with torch.no_grad():
                model(utils.random_input(3, DIM, seed=0))
            self.assertGreater(unsharded_nbytes(model), 0)
            for unit in units_of(model) if how == "reshard" else ():
                unit.reshard()
            if how == "state_dict":
                model.state_dict()
        self.assertEqual(unsharded_nbytes(model), 0)

    def test_a_context_may_be_shared_after_a_step(self) -> None:
        """What the earlier context was to free may be in use when it gathers again."""
        x = utils.random_input(3, DIM, seed=0)
        first, second = (make(None, 0, reshard_after_forward=True) for _ in range(2))
        for model in (first, second):
            with torch.no_grad():
                expected = model(x)
        fsdp.share_comm_ctx([first[2], second[2]])
        with torch.no_grad():
            second[2].unshard()
            second[0](x)
            second[1](x)
        self.assertEqual(second(x), expected, rtol=0, atol=0)

    @unittest.skipUnless(IS_2_15, "since 2.15")
    def test_storage_is_kept_of_what_is_unsharded(self) -> None:
        model = make(min_nbytes=0, reshard_after_forward=False)
        model(utils.random_input(3, DIM, seed=0))
        model.set_keep_unsharded_storage(True)
        nbytes = unsharded_nbytes(model, ShardedState.UNSHARDED)
        outputs = outputs_of(model, ShardedState.UNSHARDED)
        pointers = [output.data_ptr() for output in outputs]
        for _ in range(2):
            self.step(model)
            self.assertEqual(unsharded_nbytes(model), nbytes)
        self.assertEqual([output.data_ptr() for output in outputs_of(model)], pointers)
        model.set_keep_unsharded_storage(False)
        self.step(model)
        self.assertEqual(unsharded_nbytes(model), 0)

    def test_a_gradient_that_is_held_is_not_written(self) -> None:
        """Gradients of fp16 are divided before they are summed."""
        model = make(torch.float16, 0)
        self.step(model)
        group = group_of(model[0])
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        group.fsdp_params[0].unsharded_param.register_post_accumulate_grad_hook(
            lambda p: held.append((p.grad, p.grad.clone()))
        )
        self.step(model)
        ((grad, before),) = held
        self.assertEqual(grad, before, rtol=0, atol=0)

    @parametrize("value", [-1, 0.5, True, "one"])
    def test_wrong_min_nbytes_is_refused(self, value: Any) -> None:
        with self.assertRaisesRegex(ValueError, "a number of bytes"):
            set_coalesced_collectives(make(), value)


if __name__ == "__main__":
    run_tests()
