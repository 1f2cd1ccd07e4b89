# Owner(s): ["oncall: distributed"]
"""After an exception and ``reset_iter_state``, the next steps are exactly right."""

import copy
import gc
import sys
import time
import unittest
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common import parity_layers, utils
from fsdp_helpers.common.comms import FP32
from fsdp_helpers.common.parity_layers import gradients, loss_of, parameters
from fsdp_helpers.parity import modes
from fsdp_helpers.parity.models import batch_of, mixed_tower, parts_of

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_agreement as agreement
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_registrations as registrations
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_cache import ParamGroupCache
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


class Boom(Exception):
    pass


class Alarm:
    """Raises at the ``at``-th of its calls after it was set."""

    calls_left = 0

    def set(self, error: type[BaseException], at: int) -> None:
        self.error, self.calls_left = error, at

    def __call__(self, *args: Any) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error("on purpose")


class _Watched:
    """A collective that remembers the buffers it gave out, and may fail."""

    def __init__(self, in_allocate: Alarm, in_call: Alarm):
        self.in_allocate, self.in_call = in_allocate, in_call
        self.buffers: list[weakref.ref[torch.Tensor]] = []

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.in_allocate()
        buffer = super().allocate(*args, **kwargs)
        self.buffers.append(weakref.ref(buffer))
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.in_call()
        return super().__call__(*args, **kwargs)


class WatchedAllGather(_Watched, collectives.DefaultAllGather):
    pass


class WatchedReduceScatter(_Watched, collectives.DefaultReduceScatter):
    pass


class Faults:
    """The places of a model's step that can be made to fail."""

    def __init__(self, model: nn.Module):
        self.alarms = alarms = {name: Alarm() for name in PLACES}
        self.comms: list[_Watched] = []
        for unit in modes.units_of(model):
            gather = WatchedAllGather(alarms["allocate_gather"], alarms["gather"])
            reduce = WatchedReduceScatter(alarms["allocate_reduce"], alarms["reduce"])
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
            unit.set_all_reduce_hook(alarms["all_reduce_hook"])
            self.comms += [gather, reduce]
        for part in parts_of(model).values():
            part.register_forward_pre_hook(alarms["forward"])
            part.register_forward_hook(self._watch_backward)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(alarms["hook"])

    def _watch_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(self.alarms["backward"])

    def buffers_alive(self) -> list[torch.Tensor]:
        refs = [ref for comm in self.comms for ref in comm.buffers]
        return [buffer for ref in refs if (buffer := ref()) is not None]


# Name of a place to which of its calls fail: early and late in the step
PLACES = {
    "allocate_gather": (1, 2, 4),
    "gather": (1, 3, 4),
    "allocate_reduce": (1, 4),
    "reduce": (1, 2, 5),
    "forward": (1, 4, 6),
    "backward": (1, 3, 6),
    "hook": (1, 9),
    "all_reduce_hook": (1, 3),
}
ERRORS = (Boom, KeyboardInterrupt, torch.OutOfMemoryError)
MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "sharded": dict,
    "prefetch": dict,
    "kept": lambda: {"reshard_after_forward": False},
    "hsdp": lambda: {
        "mesh": utils.hybrid_mesh(utils.WORLD_SIZE // 2),
        "mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=FP32),
    },
    "offload": lambda: {
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=utils.DEVICE_TYPE != "cpu")
    },
}


class SideBySide:
    """A model beside an untouched twin: after each step both have the same bits."""

    def __init__(self, test: utils.FSDPProcessTest, **kwargs: Any):
        self.test = test
        self.model: Any = mixed_tower().to(test.device)
        self.twin: Any = copy.deepcopy(self.model)
        self.optimizers = []
        for each in (self.model, self.twin):
            parity_layers.shard_stack(each, **{"mesh": utils.shard_mesh()} | kwargs)
            self.optimizers.append(SGD(each.parameters(), lr=parity_layers.LR))
        self._batch = 0

    def next_batch(self) -> torch.Tensor:
        """Returns a batch of this rank that no other call returns."""
        self._batch += 1
        return batch_of(self._batch, self.test.rank).to(self.test.device)

    def backward(self, after: str | None = None) -> None:
        """Runs one microbatch on both."""
        batch = self.next_batch()
        losses = [loss_of(each(batch)) for each in (self.model, self.twin)]
        self.test.assertEqual(*losses, after, atol=0, rtol=0)
        for loss in losses:
            loss.backward()

    def forget(self) -> None:
        """Gives up the step so far, of both."""
        for each in (self.model, self.twin):
            each.reset_iter_state()
            each.zero_grad()

    def train(self, after: str | None = None) -> None:
        """Runs a step, and compares gradients and then parameters."""
        self.backward(after)
        self._compare(gradients, after)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._compare(parameters, after)

    def _compare(self, bits_of: Callable[..., Any], after: str | None) -> None:
        actual, expected = (dict(bits_of(each)) for each in (self.model, self.twin))
        self.test.assertEqual(modes.differing(actual, expected), [], after)


class TestExceptions(utils.FSDPProcessTest):
    @parametrize("mode", [*MODES])
    def test_step_after_an_exception_is_right(self, mode: str) -> None:
        pair, faults = self.start(mode)
        cases = [(place, at) for place, ats in PLACES.items() for at in ats]
        if mode != "sharded":  # there are many, and each takes its time
            cases = [(place, ats[1]) for place, ats in PLACES.items()]
        for i, (place, at) in enumerate(cases):
            error = ERRORS[i % len(ERRORS)]
            # No subtest: after a failure this rank would go on where others wait
            faults.alarms[place].set(error, at)
            with self.assertRaises(error):
                loss_of(pair.model(pair.next_batch())).backward()
            after = f"{error.__name__} in {place} {at}"
            self.recover(pair, faults, after)
            pair.train(after)

    @parametrize("mode", ["sharded", "hsdp"])
    def test_accumulated_microbatches_are_lost(self, mode: str) -> None:
        """Gradients that were not reduced, or among shards alone."""
        pair, faults = self.start(mode)
        model = pair.model
        for place in ("forward", "backward", "reduce"):
            model.set_requires_gradient_sync(mode == "hsdp")
            model.set_requires_all_reduce(False)
            pair.backward()
            model.set_requires_gradient_sync(True)
            model.set_requires_all_reduce(True)
            faults.alarms[place].set(Boom, at=2)
            with self.assertRaises(Boom):
                loss_of(model(pair.next_batch())).backward()
            self.recover(pair, faults, place)
            pair.train(place)

    def start(self, mode: str) -> tuple[SideBySide, Faults]:
        pair = SideBySide(self, **MODES[mode]())
        if mode == "prefetch":
            modes.prefetch_explicitly(pair.model)
        faults = Faults(pair.model)
        pair.train()
        gc.freeze()  # the collections to come need not look through all that is there
        self.addCleanup(gc.unfreeze)
        return pair, faults

    def recover(self, pair: SideBySide, faults: Faults, after: str) -> None:
        pair.forget()
        for group in registrations.groups_of(pair.model, "recover"):
            of_step = group._post_forward_indices, group.comm_ctx.reduce_scatter_states
            self.assertEqual(of_step, ([], []), after)
            self.assertEqual(group._training_state, TrainingState.IDLE, after)
        gc.collect()  # what autograd keeps of the lost step is in cycles
        deadline = time.monotonic() + 60
        while faults.buffers_alive() and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread of gloo's may just be done with one
        self.assertEqual([b.size() for b in faults.buffers_alive()], [], after)


class TestExplanations(utils.FakeGroupTest):
    """A note never replaces its error, even where making the note fails."""

    ranks = 2

    def unit(self) -> Any:
        return fsdp.fully_shard(nn.Linear(4, 4), mesh=self.mesh)

    @unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
    def test_note_names_the_parameters_of_all_joined_units(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
        utils.shard_blocks(model, mesh=self.mesh)
        fsdp.set_reduce_bucket_cap(model)
        fails = mock.patch.object(dist, "reduce_scatter_single", side_effect=ValueError)
        with fails, self.assertRaises(ValueError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        (note,) = caught.exception.__notes__
        text = "reducing the gradients of 2.weight, 1.weight, 0.weight in torch.float32"
        self.assertIn(text, note)

    @parametrize("interrupts", [False, True])
    def test_note_that_fails_leaves_the_error(self, interrupts: bool) -> None:
        kind = KeyboardInterrupt if interrupts else RuntimeError
        model, alarm = self.unit(), Alarm()
        model.set_custom_reduce_scatter(WatchedReduceScatter(Alarm(), alarm))
        x = torch.ones(2, 4, requires_grad=True)
        model(x).sum().backward()  # ranks are compared before their first reduction
        fails = mock.patch.object(agreement, "_announce", side_effect=LookupError)
        alarm.set(kind, at=1)
        with fails, self.assertRaises(kind) as caught:
            model(x).sum().backward()
        self.assertIs(type(caught.exception), kind)
        model.reset_iter_state()

    @parametrize(
        "owner,name",
        [
            (torch, "split_with_sizes_copy"),
            (ParamGroupCache, "init_unsharded_params"),
            (registrations, "register"),
        ],
        name_fn=lambda _, name: name,
    )
    def test_copy_out_that_fails_leaves_nothing(self, owner: Any, name: str) -> None:
        """Outputs are freed, and names are registered as they were."""
        model = self.unit()
        group = model._get_fsdp_state()._fsdp_param_group
        if owner is registrations:
            model(torch.ones(2, 4)).sum().backward()
        original = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            raise Boom

        with mock.patch.object(owner, name, fails), self.assertRaises(Boom):
            model(torch.ones(2, 4))
        model.reset_iter_state()
        for fsdp_param in group.fsdp_params:
            for output in fsdp_param.all_gather_outputs:
                self.assertEqual(output.untyped_storage().nbytes(), 0)
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)
        model(torch.ones(2, 4)).sum().backward()


if __name__ == "__main__":
    run_tests()
