# Owner(s): ["oncall: distributed"]

"""
Wrong uses: each is told by a clear error, on every rank, at the call where it can
first be known, and training goes on after it. What is merely unusual works.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.comms import FP64
from fsdp_helpers.common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_helpers.common.utils import (
    FakeGroupTest,
    FSDPProcessTest,
    shard_blocks,
    shard_mesh,
)
from fsdp_helpers.parity.models import Extended
from fsdp_helpers.wrong_uses import CASES, DIM, OwnReduction, Run, Scaled

import torch
import torch._dynamo
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    fully_shard,
    MixedPrecisionPolicy,
    set_reduce_bucket_cap,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.timeout(600)


def expected_grads(device: torch.device) -> list[torch.Tensor]:
    """
    Returns the gradients of the model of a run in one process. All ranks have the
    same input, so that their average is the same to the last bit.
    """
    model = nn.Sequential(Scaled(), Scaled()).to(device)
    model(Run(device, None).input()).sum().backward()
    return [param.grad for param in model.parameters()]


def check_text(test: TestCase, error: BaseException, text: str) -> None:
    """``text`` is how a line of the error or its notes begins. "…" is anything."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        found = "\n".join([str(error), *getattr(error, "__notes__", ())])
        pattern = ".*".join(re.escape(part.strip()) for part in text.split("…"))
        test.assertRegex(found, f"(?ms)^{pattern}")


class CannotSplit(Extended):
    """As torchao's weights for inference."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError(f"no {func}")
        return super().__torch_dispatch__(func, *args)


class Uncallable:
    allocate = DefaultAllGather.allocate


class TestRefusedAtOnce(FakeGroupTest):
    """By ``fully_shard`` and by setters, before anything has changed."""

    ranks = 2

    def check(
        self, kind: type[Exception], text: str, call: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self.subTest(text, args=args, **kwargs):
            with self.assertRaises(kind) as caught:
                call(*args, **kwargs)
            self.assertIs(type(caught.exception), kind)
            check_text(self, caught.exception, text)

    def check_sharding(
        self, kind: type[Exception], text: str, module: Any = None, **kwargs: Any
    ) -> None:
        kwargs = {"mesh": self.named_mesh()} | kwargs
        self.check(kind, text, fully_shard, module or Scaled(), **kwargs)

    def named_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("shard",))

    def test_policies_of_another_type_are_refused(self) -> None:
        text = "mp_policy of unit 'Scaled' got …pass a MixedPrecisionPolicy"
        if FOLLOWS_GRAD_DTYPE:  # since then a unit's state copies the policy
            text = "replace() should be called on dataclass instances"
        for policy in (None, MixedPrecisionPolicy):
            self.check_sharding(TypeError, text, mp_policy=policy)
        text = "offload_policy of unit 'Scaled' got …pass CPUOffloadPolicy()"
        self.check_sharding(TypeError, text, offload_policy=CPUOffloadPolicy)

    def test_parameters_that_cannot_be_sharded_are_named(self) -> None:
        text = "Parameter other of Scaled cannot be sharded."
        strided = torch.ones(6, 6).t()[:, :4]
        for data, text_of_data in (
            (strided, f"FSDP does not support non-contiguous …{text}"),
            (torch.ones(6).to_sparse(), text),
            (
                CannotSplit(torch.ones(6, 6)),
                f"{text} Implement …in CannotSplit, or put it in ignored_params",
            ),
        ):
            other = nn.Parameter(data, requires_grad=False)
            self.check_sharding(NotImplementedError, text_of_data, Scaled(other=other))

        def second_dim(param: nn.Parameter) -> Shard | None:
            return Shard(2) if param.ndim == 2 else None

        text = "…dim…Parameter weight of Scaled cannot be sharded"
        self.check_sharding(AssertionError, text, shard_placement_fn=second_dim)
        dims = DataParallelMeshDims(shard="shard")
        text = (
            "…all parameters must be DTensors on the full SPMD mesh…Parameter weight of"
        )
        self.check_sharding(ValueError, text, dp_mesh_dims=dims)

    def test_parameters_that_are_sharded_already_are_named(self) -> None:
        text = (
            "Parameter {} of Scaled cannot be sharded. It is a DTensor already. Call "
            "fully_shard on children before their parents…named mesh dims other"
        )
        named = self.named_mesh()
        for kind, mesh in (
            (TypeError, self.mesh),
            (RuntimeError, named),
        ):
            child = Scaled()
            fully_shard(nn.Sequential(child), mesh=mesh)
            self.check_sharding(kind, text.format("weight"), child, mesh=mesh)
        other = DTensor.from_local(torch.ones(6), named, [Replicate()])
        module = Scaled(other=nn.Parameter(other))
        self.check_sharding(RuntimeError, text.format("other"), module)

    def test_setters_refuse_what_they_cannot_use(self) -> None:
        policy = MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64)
        model = shard_blocks(nn.Sequential(Scaled(), Scaled()), mp_policy=policy)
        model(torch.ones(1, DIM))
        gather, scatter, factor = (
            getattr(model[1], f"set_{name}")
            for name in (
                "custom_all_gather",
                "custom_reduce_scatter",
                "gradient_divide_factor",
            )
        )
        for setter, wrong in (
            (gather, (DefaultAllGather, Uncallable(), DefaultReduceScatter())),
            (scatter, (DefaultAllGather(),)),
            (factor, (0, float("nan"), "2", torch.ones(2))),
        ):
            for value in wrong:
                kind = ValueError if isinstance(value, int | float) else TypeError
                text = f"{setter.__name__} of unit '1' got …pass a"
                self.check(kind, text, setter, value)
        text = (
            "OwnReduction of unit '1' cannot reduce 1.weight, whose grad_comm_dtype is "
            "…Add a method exchange(output_tensor, input_tensor, group)"
        )
        self.check(ValueError, text, scatter, OwnReduction())
        text = "bucket_cap_mb=…small_kb=…must be finite and > 0"
        for cap in (0, float("inf"), "1"):
            self.check(ValueError, text, set_reduce_bucket_cap, model, cap)
        self.check(ValueError, text, set_reduce_bucket_cap, model, small_kb=0)


class Checks(FSDPProcessTest):
    """Ranks of which the last has no row."""

    def run_here(self) -> Run:
        return Run(self.device, shard_mesh())

    def check_step(self, run: Run, model: nn.Module) -> None:
        run.step(model)
        grads = [param.grad.full_tensor() for param in model.parameters()]
        for grad, expected in zip(grads, expected_grads(run.device), strict=True):
            self.assertEqual(grad, expected, atol=0, rtol=0)
            self.assertEqual(grad.dtype, expected.dtype)


@instantiate_parametrized_tests
class TestRefusedInTraining(Checks):
    @parametrize("name", CASES)
    def test_is_refused_and_training_goes_on(self, name: str) -> None:
        (kind, expected, case), run = CASES[name], self.run_here()
        call = case(run)
        with self.assertRaises(kind) as caught:
            call()
        self.assertIs(type(caught.exception), kind)
        check_text(self, caught.exception, expected)
        if run.undo is None:
            run.model()
        else:
            run.undo()
            run.root.reset_iter_state()
            run.root.zero_grad()
        self.check_step(run, run.root)


# What is unusual and right #


class TestAllowed(Checks):
    """None of these is refused, and the gradients are right to the last bit."""

    def setting_up(self, **kwargs: Any) -> tuple[Run, nn.Module]:
        run = self.run_here()
        return run, run.model(**kwargs)

    def test_factors_of_any_sign_and_kind(self) -> None:
        run, model = self.setting_up(offload_policy=None)
        run.blocks[0].set_all_reduce_hook(None)
        for factor in (-1, torch.tensor(2.0), True, None, 0.5):
            for block in run.blocks:
                block.set_gradient_divide_factor(factor)
            run.step(model)
            by = run.mesh.size() if factor is None else float(factor)
            grads = [param.grad.full_tensor() for param in model.parameters()]
            for grad, expected in zip(grads, expected_grads(run.device), strict=True):
                self.assertEqual(grad, expected * run.mesh.size() / by, atol=0, rtol=0)
            model.zero_grad()

    def test_reduce_buffers_may_be_wider(self) -> None:
        class Wider(DefaultReduceScatter):
            def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
                return torch.empty(*size, dtype=FP64, device=device)

        run, model = self.setting_up()
        run.blocks[1].set_custom_reduce_scatter(Wider())
        self.check_step(run, model)

    def test_casts_after_a_forward_are_found_where_nothing_is_gathered(self) -> None:
        text = "weight was gathered in torch.bfloat16 before, but is now torch.fl"
        for apply, mesh in ((fully_shard, shard_mesh(1)), (replicate, shard_mesh())):
            model = apply(Scaled().to(self.device), mesh=mesh)
            x = torch.ones(1, DIM, device=self.device)
            model(x).sum().backward()
            model.half()
            with self.assertRaisesRegex(RuntimeError, text):
                model(x)

    def test_error_of_another_kind_does_not_speak_of_sizes(self) -> None:
        run = self.run_here()
        model = run.model()
        error = RuntimeError("no device")
        fails = mock.patch.object(FSDPParam, "reset_sharded_param", side_effect=error)
        with fails, self.assertRaises(RuntimeError) as caught:
            run.step(model)
        self.assertIs(caught.exception, error)
        check_text(
            self, error, "no device\n…weight cannot be taken as it is registered."
        )


if __name__ == "__main__":
    run_tests()
