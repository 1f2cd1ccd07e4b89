"""Precision policies to try on the example's model, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn, Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_policies import resolve
from torch.func import functional_call


BF16, FP32 = torch.bfloat16, torch.float32
# What is small but sensitive computes and reduces in fp32.
_IN_FP32 = {"param_dtype": FP32, "reduce_dtype": FP32}
_SENSITIVE = {"*norm.*": _IN_FP32, "*.A_log": _IN_FP32}


@dataclass(frozen=True)
class Choice:
    """What to make a policy of, once there is a model."""

    meaning: str
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    patterns: Mapping[str, Mapping[str, torch.dtype]] = field(default_factory=dict)

    def policy_for(self, model: nn.Module) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy.by_name(
            model,
            self.patterns,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            grad_comm_dtype=self.grad_comm_dtype,
            # The residual stream between the blocks stays fp32.
            cast_forward_inputs=False,
        )


CHOICES = {
    "stored": Choice("each parameter computes and reduces as it is stored"),
    "bf16": Choice("all compute and reduce in bf16", BF16, BF16),
    "bf16-fp32-norms": Choice(
        "bf16, but norms and A_log compute and reduce in fp32",
        BF16,
        BF16,
        patterns=_SENSITIVE,
    ),
    "bf16-fp32-sums": Choice(
        "as bf16-fp32-norms, and all gradients reduce in fp32",
        BF16,
        FP32,
        patterns=_SENSITIVE,
    ),
    "bf16-narrow-sums": Choice(
        "as bf16-fp32-sums, but gradients are sent in what they are computed in",
        BF16,
        FP32,
        BF16,
        {name: {**of, "grad_comm_dtype": FP32} for name, of in _SENSITIVE.items()},
    ),
    "bf16-embedding-sums": Choice(
        "as bf16-fp32-sums, but the embedding's gradient reduces in bf16",
        BF16,
        FP32,
        patterns={**_SENSITIVE, "embedding.*": {"reduce_dtype": BF16}},
    ),
    "fp32": Choice("all compute and reduce in fp32", FP32, FP32),
}
DEFAULT = "stored"


@dataclass(frozen=True)
class Dtypes:
    """What one parameter computes in, and what its gradient is reduced and sent in."""

    compute: torch.dtype
    reduce: torch.dtype
    sent: torch.dtype


def dtypes_under(
    policy: MixedPrecisionPolicy, model: nn.Module, device: torch.device
) -> dict[str, Dtypes]:
    """What the policy says of each parameter of a model that is not yet sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        resolved = resolve(policy, parameter, name, device)
        compute = resolved.param_dtype or parameter.dtype
        reduce = resolved.reduce_dtype or compute
        found[name] = Dtypes(compute, reduce, resolved.grad_comm_dtype or reduce)
    return found


class Casting(nn.Module):
    """Computes in what a policy says, without FSDP: casts at each forward."""

    def __init__(self, model: nn.Module, dtypes: Mapping[str, Dtypes]) -> None:
        super().__init__()
        self.model = model
        self.dtypes = dtypes

    def forward(self, tokens: Tensor) -> Tensor:
        cast = {
            name: parameter.to(self.dtypes[name].compute)
            for name, parameter in self.model.named_parameters()
        }
        return functional_call(self.model, cast, (tokens,))
