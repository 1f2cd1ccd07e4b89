# Owner(s): ["oncall: distributed"]
"""
What hooks of a unit's modules leave of what users set, and of gradients that users take
themselves, what they warn of, and what loading a state dict costs. Also what the roots
of one context share.
"""

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.comms import mesh_of
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.utils import FakeGroupTest
from fsdp_helpers.parity.models import Fp8

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, share_comm_ctx
from torch.distributed.fsdp._fully_shard import _fsdp_registrations as registrations
from torch.distributed.fsdp._fully_shard._fsdp_comms import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_context import Handoff
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.utils.checkpoint import checkpoint


BF16, FP32 = torch.bfloat16, torch.float32
DIM = 4
X = torch.ones(1, DIM)


@dataclass
class Boxed:
    """In which hooks must find the tensor."""

    z: torch.Tensor


class TestInputs(FakeGroupTest):
    ranks = 2

    @parametrize("trained", [False, True])
    def test_inputs_without_gradients_arrive_as_given(self, trained: bool) -> None:
        mask, other, seen = torch.ones(2), object(), []
        x, y, z = (torch.rand(2, requires_grad=trained) for _ in "xyz")
        model: Any = nn.Linear(2, 2)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.extend([*args, *kwargs.values()])
            return model.weight.sum() + x.sum() + kwargs["boxed"].z.sum()

        model.forward = forward
        fully_shard(model, mesh=self.mesh)
        given = {"y": y, "mask": {"m": mask}, "other": other, "boxed": Boxed(z)}
        model([x, None], mask, 3, **given).backward()
        self.assertIsNotNone(model.weight.grad)
        (own_x, none), own_mask, three, own_y, masks, own_other, boxed = seen
        for own, value in ((own_x, x), (own_y, y), (boxed.z, z)):
            self.assert_same(own, value)
            node = type(own.grad_fn).__name__
            is_passed = node == "RegisterPostBackwardFunctionBackward"
            self.assertEqual((is_passed, own is value), (trained, not trained))
        found = none, own_mask, three, masks["m"], own_other
        for value, expected in zip(found, (None, mask, 3, mask, other)):
            self.assertIs(value, expected)


def train(model: Any, is_last: bool = True) -> None:
    model.set_reshard_after_backward(is_last)
    model(X.clone().requires_grad_()).sum().backward()


@torch.no_grad()
def evaluate(model: Any) -> None:
    model(X)


def unshard(model: Any) -> None:
    model.unshard()


def in_all_units(name: str) -> Callable[[Any], None]:
    return lambda model: [getattr(unit, name)() for unit in (model, *model[:2])]


class TestRequiresGrad(FakeGroupTest):
    """What users set on parameters stays, whether they are sharded then or not."""

    ranks = 4
    CHANGED = ("0.bias", "1.weight", "2.weight")
    LEAVES_UNSHARDED = {
        "evaluation": evaluate,
        "backward": functools.partial(train, is_last=False),
        "unshard": in_all_units("unshard"),
    }
    RESHARDS = {
        "backward": train,
        "evaluation": evaluate,
        "reshard": in_all_units("reshard"),
        "state dict": lambda model: model.state_dict(),
    }

    def model(self, reshard_after_forward: Any) -> Any:
        model: Any = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
        how = {"mesh": self.mesh, "reshard_after_forward": reshard_after_forward}
        for unit in (*model[:2], model):
            fully_shard(unit, **how)
        forward = model[1].forward
        model[1].forward = functools.partial(checkpoint, forward, use_reentrant=True)
        train(model)
        return model

    @parametrize("leave", LEAVES_UNSHARDED)
    @parametrize("reshard", RESHARDS)
    @parametrize("on_shards", [False, True])
    @parametrize("reshard_after_forward", [True, False, 2])
    def test_requires_grad_stays_when_units_reshard(
        self, leave: str, reshard: str, on_shards: bool, reshard_after_forward: Any
    ) -> None:
        model = self.model(reshard_after_forward)
        shards = dict(model.named_parameters())
        for is_trained in (False, True):
            self.LEAVES_UNSHARDED[leave](model)
            params = shards if on_shards else dict(model.named_parameters())
            for name in self.CHANGED:
                params[name].requires_grad_(is_trained)
            self.RESHARDS[reshard](model)
            in_all_units("reshard")(model)
            model.zero_grad()
            train(model)
            for name, param in model.named_parameters():
                self.assertIs(param, shards[name])
                expected = is_trained or name not in self.CHANGED
                self.assertEqual(param.requires_grad, expected, name)
                self.assertEqual(param.grad is not None, expected, name)


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM, bias=False)


def set_hook(model: Any) -> Any:
    return model[-1].weight.register_hook(print)


def set_post_hook(model: Any) -> Any:
    return model[-1].weight.register_post_accumulate_grad_hook(lambda param: None)


def warnings_of(run: Callable[..., object], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return [str(warning.message) for warning in caught]


class TestLost(FakeGroupTest):
    """The first forward warns once of settings that FSDP ignores, and of no others."""

    ranks = 2
    HOOKS = r"^Hooks on 1\.weight are lost.*register_post_accumulate_grad_hook"
    # Settings before `fully_shard` and after it, and the warning
    CASES: dict[str, tuple[Callable | None, Callable | None, str]] = {
        "hook_before": (set_hook, None, HOOKS),
        "hook_after": (None, set_hook, HOOKS),
        "post_hook_before": (set_post_hook, None, HOOKS),
        "removed_hook": (lambda model: set_hook(model).remove(), None, ""),
        "post_hook_after": (set_post_hook, set_post_hook, ""),
        # As torch's `MemTracker`
        "both_hooks": (None, lambda model: (set_hook(model), set_post_hook(model)), ""),
        "frozen": (set_hook, lambda m: (set_hook(m), m.requires_grad_(False)), ""),
        "parameter": (
            None,
            lambda model: setattr(model[1], "bias", nn.Parameter(torch.ones(DIM))),
            r"^1\.bias of unit 'FSDPSequential' came after .* Register them before",
        ),
        "module": (
            None,
            lambda model: setattr(model[0], "lora", linear()),
            r"^lora\.weight of unit '0' came after",
        ),
        "replaced": (
            None,
            lambda model: setattr(model, "1", linear()),
            r"^1\.weight of unit 'FSDPSequential' came after",
        ),
        "frozen_module": (None, lambda m: m.append(linear().requires_grad_(False)), ""),
        # Averaged by a hook, as by the Trainer of transformers
        "averaged": (None, lambda model: set_post_hook(model.append(linear())), ""),
        "unit": (None, lambda model: model.append(fully_shard(linear())), ""),
        "ddp": (None, lambda m: m.append(DistributedDataParallel(linear())), ""),
        "moved": (None, lambda m: setattr(m, "1", nn.Sequential(m[1])), ""),
        "unsharded": (None, lambda model: model.unshard(), ""),
        "ignored": (lambda m: setattr(m, "own", nn.Parameter(torch.ones(1))), None, ""),
    }

    def run_with(self, before: Any, after: Any, ranks: int = 2) -> list[str]:
        mesh = mesh_of(2 // ranks, ranks, device="cpu")["shard"]
        model = nn.Sequential(linear(), linear())
        if before:
            before(model)
        fully_shard(model[0], mesh=mesh)
        ignored = {param for name, param in model.named_parameters() if name == "own"}
        fully_shard(model, mesh=mesh, ignored_params=ignored)
        if after:
            after(model)
        texts = warnings_of(model, X)
        self.assertEqual(warnings_of(model, X), [])
        return texts

    @parametrize("name", CASES)
    def test_lost_hook_or_parameter_is_warned_of_once(self, name: str) -> None:
        *changes, expected = self.CASES[name]
        texts = self.run_with(*changes)
        self.assertEqual(len(texts), bool(expected), texts)
        for text in texts:
            self.assertRegex(text, expected)

    def test_one_rank_alone_trains_late_parameters(self) -> None:
        for ranks in (1, 2):
            texts = self.run_with(None, lambda model: model.append(linear()), ranks)
            self.assertEqual(len(texts), ranks - 1)


class Rounding(DefaultAllGather):
    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        output_tensor.round_()


class TestStale(FakeGroupTest):
    """Writes to shards of an unsharded unit, as a root is after evaluation."""

    ranks = 2
    # The use after evaluation, and whether the next forward warns
    CASES: dict[str, tuple[Callable[[Any], object], bool]] = {
        "step": (lambda test: test.step(foreach=False), True),
        "foreach_step": (lambda test: test.step(foreach=True), True),
        "fused_step": (lambda test: test.step(torch.optim.AdamW, fused=True), True),
        "write": (lambda test: test.scale(2), True),
        "write_local": (lambda test: test.scale(2, is_local=True), True),
        "reshard_step": (lambda test: (test.model.reshard(), test.step()), False),
        "step_reshard": (lambda test: (test.step(), test.model.reshard()), False),
        "save_step": (lambda test: (test.model.state_dict(), test.step()), False),
        "load": (lambda test: test.load(), False),
        "write_and_restore": (lambda test: (test.scale(2), test.scale(0.5)), False),
        "drop_gradients": (lambda test: test.step(lr=0), False),
        "microbatch_step": (lambda test: (train(test.model), test.step()), False),
        "replace": (lambda test: test.replace_fsdp_params(), False),
    }

    def evaluated(self, ranks: int = 2) -> Any:
        """Returns a model after a backward and evaluation."""
        mesh = mesh_of(2 // ranks, ranks, device="cpu")["shard"]
        self.model: Any = nn.Sequential(linear(), nn.Tanh(), linear())
        for unit in (self.model[0], self.model):
            fully_shard(unit, mesh=mesh)
        self.shards = [*self.model.parameters()]
        train(self.model)
        evaluate(self.model)
        evaluate(self.model)
        return self.model

    def step(self, cls: Any = torch.optim.SGD, lr: float = 1, **how: Any) -> None:
        optimizer = cls(self.shards, lr=lr, **how)
        optimizer.step()
        optimizer.zero_grad()

    def scale(self, factor: float, is_local: bool = False) -> None:
        for param in self.shards:
            (param.to_local() if is_local else param).detach().mul_(factor)

    def load(self) -> None:
        state = self.model.state_dict()
        evaluate(self.model)
        self.model.load_state_dict({name: value * 2 for name, value in state.items()})

    def replace_fsdp_params(self) -> None:
        """As ModelOpt does to update weights."""
        (group,) = self.model._get_fsdp_state()._fsdp_param_groups
        group.fsdp_params = [copy.copy(param) for param in group.fsdp_params]
        self.step()
        self.model.reshard()

    def check(self, is_told: bool, *run: Any) -> None:
        texts = warnings_of(*run)
        self.assertEqual(len(texts), is_told, texts)
        for text in texts:
            self.assertRegex(text, r"^2\.weight was written to .* Call reshard\(\)")

    @parametrize("name", CASES)
    @parametrize("ranks", [1, 2])
    @parametrize("run", [train, evaluate, unshard])
    def test_late_write_is_warned_of(self, name: str, ranks: int, run: Any) -> None:
        (then, is_told), model = self.CASES[name], self.evaluated(ranks)
        before = model[2].weight.detach().clone()
        then(self)
        if is_told:  # it is lost so far
            self.assert_same(model[2].weight, before)
        self.check(is_told, run, model)
        self.check(False, run, model)

    def test_average_is_told_that_no_backward_reshards(self) -> None:
        model = self.evaluated().requires_grad_(False)
        model.reshard()
        evaluate(model)
        self.scale(2)
        self.check(True, evaluate, model)

    @parametrize("what", ["writes", "casts", "is_custom", "extends", "has_columns"])
    def test_unsharded_parameters_may_have_other_values(self, what: str) -> None:
        """As forward, or the gather, makes them, or in another order."""
        model: Any = nn.Embedding(DIM, DIM, max_norm=0.1 if what == "writes" else None)
        if what == "extends":
            model.weight = nn.Parameter(Fp8(model.weight.detach()))
        dim = Shard(int(what == "has_columns"))
        policy = MixedPrecisionPolicy(BF16 if what == "casts" else None)
        how = {"mp_policy": policy, "shard_placement_fn": lambda param: dim}
        fully_shard(model, mesh=self.mesh, **how)
        if what == "is_custom":
            model.set_custom_all_gather(Rounding())
        shard, ids = model.weight, torch.arange(DIM)
        model(ids).sum().backward()
        torch.no_grad()(model)(ids)
        shard.grad = None
        self.check(False, model, ids)

    def test_steps_do_not_look_and_evaluation_compares_once(self) -> None:
        model = self.evaluated()
        train(model)
        train(model)
        with mock.patch.object(registrations, "get_marks") as get_marks:
            train(model)
        get_marks.assert_not_called()
        with mock.patch.object(Tensor, "equal", return_value=True) as equal:
            for _ in range(3):
                evaluate(model)
                self.step()
                train(model)
        equal.assert_called_once()


class TestCost(FakeGroupTest):
    ranks = 2

    def calls(self, size: int) -> Iterator[int]:
        """Yields how many functions of FSDP2 each load into so many modules calls."""
        modules = [nn.Linear(1, 2, bias=False) for _ in range(size)]
        model = fully_shard(nn.Sequential(*modules), mesh=self.mesh)
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            path = frame.f_code.co_filename
            count += event == "call" and "_fully_shard" in path

        for _ in ("before a forward", "after it"):
            for assign in (False, True):
                state, count = model.state_dict(), 0
                sys.setprofile(profile)
                model.load_state_dict(state, assign=assign)
                sys.setprofile(None)
                yield count
            model.unshard()
            model.reshard()

    def test_load_calls_few_functions_for_each_parameter(self) -> None:
        """Counts them before the first forward, and after it."""
        limits = (3, 4, 6, 7) if IS_2_15 else (2, 2, 5, 5)
        counts = zip(self.calls(20), self.calls(100), limits, strict=True)
        for few, many, most in counts:
            self.assertEqual(many, 5 * few)
            self.assertIn(few, range(20, 20 * most + 1))  # each was looked at


class TestGradDtype(FakeGroupTest):
    """``grad_dtype`` of a sharded parameter is what users set last."""

    ranks = 2

    def unit(self, grad_dtype: torch.dtype | None = FP32) -> nn.Linear:
        module = nn.Linear(4, 4, bias=False, dtype=BF16)
        if grad_dtype is not None:
            module.weight.grad_dtype = grad_dtype
        policy = MixedPrecisionPolicy(reduce_dtype=FP32)
        return fully_shard(module, mesh=self.mesh, mp_policy=policy)

    def load_move_or_run(self, module: nn.Linear, what: str) -> None:
        match what:
            case "load" | "assign":
                module.load_state_dict(module.state_dict(), assign=what == "assign")
            case "unshard":
                module.unshard()
                module.reshard()
            case "move":
                module.to("cpu")
                module.reshard()
            case "forward":
                module(torch.ones(2, 4, dtype=BF16)).sum().backward()

    def test_model_that_was_loaded_wrongly_can_be_loaded_again(self) -> None:
        module = self.unit()
        sharded, whole = module.state_dict(), {"weight": torch.ones(4, 4)}
        with self.assertRaises(RuntimeError):
            module.load_state_dict(whole, assign=True)
        module.load_state_dict(sharded, assign=True)
        self.load_move_or_run(module, "forward")

    @pytest.mark.quick
    @parametrize("what", ["load", "assign", "unshard", "move", "forward"])
    @parametrize("first,last", [(FP32, BF16), (FP32, FP32), (None, FP32)])
    def test_grad_dtype_that_was_set_last_stays(
        self, what: str, first: torch.dtype | None, last: torch.dtype
    ) -> None:
        module = self.unit(first)
        module.weight.grad_dtype = last
        for _ in range(2):
            self.load_move_or_run(module, what)
            self.assertEqual(module.weight.grad_dtype, last)


class TestOverOneRank(FakeGroupTest):
    """Where gradients are whole, they are those of the model without FSDP."""

    ranks = 2

    def models(self, activation: type[nn.Module] = nn.Tanh) -> Iterator[Any]:
        mesh = mesh_of(self.ranks, 1, device="cpu")["shard"]
        block = nn.Sequential(nn.Linear(DIM, DIM), activation(), nn.Linear(DIM, DIM))
        self.plain: Any = nn.Sequential(nn.Linear(DIM, DIM), block, nn.Linear(DIM, DIM))
        self.sharded = copy.deepcopy(self.plain)
        units = self.sharded[1], self.sharded
        for unit in units:
            fully_shard(unit, mesh=mesh)
        yield from (self.plain, self.sharded)
        for unit in units:
            unit.reshard()
        pairs = zip(self.sharded.named_parameters(), self.plain.parameters())
        for (name, param), expected in pairs:
            grad = torch.zeros(()) if param.grad is None else param.grad.full_tensor()
            self.assertEqual(grad.tolist(), expected.grad.tolist(), name)

    def test_microbatches_before_a_parameter_was_frozen_count(self) -> None:
        for model in self.models():
            for microbatch, is_trained in enumerate((True, False, True, False)):
                if model is self.sharded:
                    model.set_requires_gradient_sync(microbatch == 3)
                loss = model(X + microbatch).sum()
                # Before the backward of what has used them
                for name in ("1.0.weight", "2.bias", "2.weight"):
                    model.get_parameter(name).requires_grad_(is_trained)
                loss.backward()

    @parametrize("activation", [nn.Tanh, nn.Identity])
    @parametrize("of_input", [False, True])
    @parametrize("reshards", [False, True])
    def test_gradients_over_one_rank_may_be_differentiated_again(
        self, activation: type[nn.Module], of_input: bool, reshards: bool
    ) -> None:
        for model in self.models(activation):
            if model is self.sharded:
                model.set_reshard_after_forward(reshards)
                model.set_reshard_after_backward(reshards)
            outputs: list[torch.Tensor] = []
            model[0].register_forward_hook(lambda *args, to=outputs: to.append(args[2]))
            for _ in range(2):
                x = X.clone().requires_grad_(of_input)
                loss = model(x).square().sum()
                # Or of what the root has computed for its first unit
                inner = x if of_input else outputs[-1]
                (grad,) = torch.autograd.grad(loss, inner, create_graph=True)
                grad.square().sum().backward()


class TestSharedContext(FakeGroupTest):
    ranks = 2

    def sharing_linears(self) -> list[Any]:
        roots = [fully_shard(nn.Linear(DIM, DIM), mesh=self.mesh) for _ in range(2)]
        share_comm_ctx(roots)
        return roots

    def test_a_second_root_keeps_what_the_first_has_started(self) -> None:
        """Its first forward comes before the backward of the first."""
        first, second = self.sharing_linears()
        loss = first(X).sum()
        context = first._get_fsdp_state()._comm_ctx
        context.joined_reductions = {"waiting": []}  # as if
        before = dict(vars(context))
        (unit,) = context.post_forward_order
        with torch.no_grad():
            second(X)
        for name, value in before.items():
            self.assertEqual(vars(context)[name], value, name)
            if name != "all_gather_state":
                self.assertIs(vars(context)[name], value, name)
        self.assertEqual(context.post_forward_order, [unit])
        context.joined_reductions.clear()
        loss.backward()
        self.assertIsNotNone(first.weight.grad)

    def test_a_root_runs_backward_after_another_has_finished(self) -> None:
        roots = [nn.Sequential(*(nn.Linear(DIM, DIM) for _ in "abc")) for _ in "ab"]
        for unit in (*roots[0], *roots[1], *roots):
            fully_shard(unit, mesh=self.mesh)
        share_comm_ctx(roots)
        losses = [root(X).sum() for root in roots]
        for loss, root in zip(losses[::-1], roots[::-1]):
            loss.backward()
            self.assertIsNotNone(root[0].weight.grad)

    def test_a_reset_drops_what_is_the_roots_own(self) -> None:
        roots = self.sharing_linears()
        for root in roots:
            root(X)
        groups = [root._get_fsdp_state()._fsdp_param_group for root in roots]
        context = groups[0].comm_ctx
        event = torch.cpu.Event()
        held = [Handoff((), event, (), group) for group in groups]
        context.all_reduce_states = [*held]
        for group in groups:
            group._post_reduce_event = event
        offloaded = groups[1].fsdp_params[0].grad_offload_event = mock.Mock()
        roots[1].reset_iter_state()
        offloaded.synchronize.assert_called_once_with()
        self.assertEqual(context.all_reduce_states, held[:1])
        roots[0].reset_iter_state()
        self.assertFalse(context.all_reduce_states)


if __name__ == "__main__":
    run_tests()
