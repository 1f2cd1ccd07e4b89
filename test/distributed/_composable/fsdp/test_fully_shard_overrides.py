# Owner(s): ["oncall: distributed"]
"""
Units whose policy has an override for each parameter, and gradients in another
dtype than their parameter: what is gathered, computed, reduced and kept.

That overrides leave the bits of one unit of the release for each policy, also over
microbatches and replicas, is in ``test_fully_shard_parity.py``; what a policy says at all is in
``test_fully_shard_policy.py``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_helpers.common import comms, utils
from fsdp_helpers.common.comms import backward, BF16, FP16, FP32, FP64, GivenGrads
from fsdp_helpers.common.release_rules import IS_2_15

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy
from torch.testing._internal.common_utils import parametrize, run_tests


# A parameter's policy: param_dtype, reduce_dtype
Pair = tuple["torch.dtype | None", "torch.dtype | None"]


def module_of(**dtypes: torch.dtype) -> GivenGrads:
    params = {name: torch.zeros(4, dtype=dtype) for name, dtype in dtypes.items()}
    return GivenGrads(**params).to(utils.THREAD_DEVICE_TYPE)


def by_name(
    model: nn.Module, policies: Mapping[str, Pair], **fields: Any
) -> MixedPrecisionPolicy:
    patterns = {
        name: {"param_dtype": compute, "reduce_dtype": reduce}
        for name, (compute, reduce) in policies.items()
    }
    return MixedPrecisionPolicy.by_name(model, patterns, **fields)


def reduced(model: nn.Module, **grads: float) -> list[tuple[torch.dtype, int]]:
    """Returns dtype and size of each reduction of a backward."""
    with utils.record_collectives() as recorder:
        backward(model, **grads)
    return [(call.dtype, call.numel) for call in recorder.reduce_scatters]


def grad_of(param: nn.Parameter) -> torch.Tensor:
    """Returns the full gradient, in the dtype that its shards have."""
    local = param.grad.to_local()
    full = param.grad.full_tensor()
    if full.dtype != local.dtype:
        raise AssertionError(f"shards are {local.dtype}, but all of it {full.dtype}")
    return full


class TestUnits(utils.FSDPThreadTest):
    world_size = 2

    def test_overrides_stay_when_the_sharded_parameters_are_cast(self) -> None:
        model = module_of(a=FP32, b=FP32)
        policies = {"a": (FP32, None)}
        fully_shard(model, mp_policy=by_name(model, policies))
        model.bfloat16()
        # Since 2.15 in what they are stored in
        expected = [(BF16, 8)] if IS_2_15 else [(FP32, 4), (BF16, 4)]
        self.assertEqual(reduced(model, a=1.0, b=1.0), expected)
        self.assertEqual(model.seen, {"a": FP32, "b": BF16})
        self.assertEqual({p.grad.dtype for p in model.parameters()}, {BF16})

    def test_a_refused_override_leaves_all_parameters_as_they_are(self) -> None:
        model = nn.Sequential(module_of(a=FP32), module_of(b=FP32))
        before = dict(model.named_parameters())

        def override(param: nn.Parameter) -> Any:
            return torch.int8 if param is before["1.b"] else BF16

        policy = MixedPrecisionPolicy(param_dtype_override_fn=override)
        text = r"returned torch.int8 for parameter 1.b, which is torch.fl"
        with self.assertRaisesRegex(ValueError, text):
            fully_shard([nn.Linear(4, 4), model], mp_policy=policy)
        for name, param in model.named_parameters():
            self.assertIs(param, before[name])

    def test_functions_are_asked_once_with_the_users_parameter(self) -> None:
        """Also where another field of the policy waits for the root's names."""
        model, asked = nn.Sequential(module_of(w=BF16), module_of(w=BF16)), []
        indices = torch.zeros(4, device=utils.THREAD_DEVICE_TYPE).long()
        model[0].indices = nn.Parameter(indices, requires_grad=False)

        def override(param: nn.Parameter) -> torch.dtype | None:
            asked.append(param)
            return FP32 if param is kept else None

        policy = by_name(model, {"0.w": (FP32, None)}, param_dtype=BF16)
        overrides = {"reduce_dtype_override_fn": override, "reduce_dtype": FP16}
        policy, params = replace(policy, **overrides), [*model.parameters()]
        kept = model[1].w
        for unit in model:
            fully_shard(unit, mp_policy=policy)
        fully_shard(model)
        layout_summary(model)
        model(torch.zeros(1, device=utils.THREAD_DEVICE_TYPE))
        self.assertEqual([*map(id, asked)], [*map(id, params)])
        found = [comms.group_of(unit).fsdp_params[0].mp_policy for unit in model]
        pairs = [(each.param_dtype, each.reduce_dtype) for each in found]
        self.assertEqual(pairs, [(FP32, FP16), (BF16, FP32)])


class TestGradDtype(utils.FSDPThreadTest):
    """
    ``grad_dtype`` set on parameters before they are sharded. Microbatches, offload and
    overrides with it are in ``test_fully_shard_random.py``.
    """

    world_size = 2

    def sharded(
        self, grad_dtypes: Mapping[str, torch.dtype | None], **kwargs: Any
    ) -> GivenGrads:
        """Returns a unit of bf16 a, b and fp32 c, d."""
        model = module_of(a=BF16, b=BF16, c=FP32, d=FP32)
        for name, dtype in grad_dtypes.items():
            model.get_parameter(name).grad_dtype = dtype
        kwargs.setdefault("mp_policy", MixedPrecisionPolicy(reduce_dtype=FP32))
        return fully_shard(model, **kwargs)

    def grads(self, names: str) -> dict[str, float]:
        """Their mean over the ranks is 128.5, which is 128 in bf16."""
        return dict.fromkeys(names, (256.0, 1.0)[self.rank])

    def backward(self, model: GivenGrads) -> None:
        backward(model, **self.grads("abcd"))

    def check(self, param: nn.Parameter, dtype: torch.dtype, value: float) -> None:
        grad = grad_of(param)
        self.assertEqual(grad.dtype, dtype)
        self.assertEqual(grad.tolist(), [value] * 4)
        self.assertEqual(param.grad._spec.tensor_meta.dtype, dtype)

    @parametrize("in_fp32", [True, False])
    def test_grad_dtype_none_is_what_the_reduction_gave(self, in_fp32: bool) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=FP32 if in_fp32 else None)
        model = self.sharded({"a": None}, mp_policy=policy)
        self.backward(model)
        self.assertIsNone(model.a.grad_dtype)
        self.check(model.a, *((FP32, 128.5) if in_fp32 else (BF16, 128.0)))
        self.check(model.b, BF16, 128.0)

    def test_parameters_stored_alike_are_reduced_together(self) -> None:
        """As in the release, where they are one unit."""
        model = module_of(a=FP32, b=FP32, c=BF16)
        model.a.grad_dtype = BF16
        fully_shard(model)
        found = reduced(model, **self.grads("abc"))  # each is cast once
        self.assertEqual(found, [(FP32, 8), (BF16, 4)])
        self.check(model.a, BF16, 128.0)
        self.check(model.b, FP32, 128.5)

    def test_grad_dtype_stays_when_the_parameter_is_cast(self) -> None:
        model = self.sharded({})
        model.a.grad_dtype = FP64  # or set on the sharded parameter
        model.float()
        self.backward(model)
        self.check(model.a, FP64, 128.5)
        self.check(model.b, FP32, 128.5)


if __name__ == "__main__":
    run_tests()
