"""Wrong uses that are found when a policy or a unit is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_parity.models import Extended
from fsdp_wrong_uses.run import (
    BF16,
    Case,
    DIM,
    Errors,
    FP8,
    FP32,
    INT32,
    Run,
    Scaled,
)

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import Shard


MAKING = Errors()

# Policies #


def policy(**dtypes: Any) -> Case:
    """Of a policy that cannot be made."""
    return lambda run: lambda: MixedPrecisionPolicy(**dtypes)


def by_name(patterns: Any, module: Any = Scaled) -> Case:
    return lambda run: lambda: MixedPrecisionPolicy.by_name(module(), patterns)


def sharding(make: Callable[[], nn.Module] = Scaled, **kwargs: Any) -> Case:
    """Of one unit that cannot be made."""
    return lambda run: lambda: run.fully_shard(make().to(run.device), **kwargs)


def under(**fields: Any) -> Case:
    return lambda run: sharding(mp_policy=MixedPrecisionPolicy(**fields))(run)


for _name in ("param_dtype", "reduce_dtype", "output_dtype", "grad_comm_dtype"):
    MAKING.add(
        TypeError,
        f"{_name} is 'bfloat16': give a torch.dtype",
        **{f"{_name}_is_text": policy(**{_name: "bfloat16"})},
    )
MAKING.add(
    TypeError,
    "param_dtype_override_fn is …give a function from a parameter to a dtype",
    override_is_a_dtype=policy(param_dtype_override_fn=FP32),
)
MAKING.add(
    TypeError,
    "cast_forward_inputs is torch.float32: give a bool, and what follows output_dtype by "
    "keyword",
    four_dtypes=lambda run: lambda: MixedPrecisionPolicy(BF16, FP32, FP32, FP32),
)
MAKING.add(
    ValueError,
    "Pattern '*.gian' matches no parameter of Scaled. Give patterns over whole",
    pattern_matches_nothing=by_name({"*.gian": {"param_dtype": FP32}}),
)
MAKING.add(
    ValueError,
    "Patterns 'gain' and 'g*' set param_dtype of gain…Change one",
    patterns_contradict=by_name(
        {"gain": {"param_dtype": FP32}, "g*": {"param_dtype": BF16}}
    ),
)
MAKING.add(
    ValueError,
    "Pattern 'gain' sets output_dtype: set only …give by_name the other",
    pattern_sets_what_modules_have=by_name(
        {"gain": MixedPrecisionPolicy(output_dtype=FP32)}
    ),
)
MAKING.add(
    ValueError,
    "Pattern 'gain' sets param_dtype_override_fn: set only param_dtype",
    pattern_policy_has_overrides=by_name(
        {"gain": MixedPrecisionPolicy(param_dtype_override_fn=id)}
    ),
)
MAKING.add(
    ValueError,
    "The gradient of parameter weight of Scaled cannot be reduced in "
    "torch.float8_e4m3fn. Set reduce_dtype to one of torch.float64",
    reduce_dtype_is_float8=under(reduce_dtype=FP8),
    override_returns_float8=under(reduce_dtype_override_fn=lambda p: FP8),
)
MAKING.add(
    ValueError,
    "The gradient of parameter weight of Scaled cannot be reduced in torch.float8_e4m3fn. "
    "Set grad_comm_dtype to one of",
    grad_comm_dtype_is_float8=under(grad_comm_dtype=FP8),
)
MAKING.add(
    ValueError,
    "The gradient of parameter weight of Scaled cannot be sent in torch.float32…Set a "
    "reduce_dtype that holds",
    grad_comm_dtype_does_not_fit=under(grad_comm_dtype=FP32, reduce_dtype=BF16),
)
MAKING.add(
    ValueError,
    "The gradient of parameter weight of Scaled cannot be reduced in torch.int32",
    reduce_dtype_is_integer=under(reduce_dtype=INT32),
)
MAKING.add(
    ValueError,
    "Parameter weight of Scaled cannot be trained in param_dtype=…Give a floating-point",
    param_dtype_is_integer=under(param_dtype=INT32),
    param_dtype_is_packed=under(param_dtype=torch.float4_e2m1fn_x2),
)
MAKING.add(
    TypeError,
    "mp_policy of unit 'Scaled' got …pass a MixedPrecisionPolicy",
    policy_is_none=sharding(mp_policy=None),
    policy_is_a_class=sharding(mp_policy=MixedPrecisionPolicy),
)
MAKING.add(
    TypeError,
    "offload_policy of unit 'Scaled' got …pass CPUOffloadPolicy()",
    offload_policy_is_a_class=sharding(offload_policy=CPUOffloadPolicy),
)

# Parameters #


class CannotSplit(Extended):
    """As torchao's weights for inference."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError(f"no {func}")
        return super().__torch_dispatch__(func, *args)


def beside(make: Callable[[], torch.Tensor]) -> Case:
    """Of a unit that has another parameter."""
    return sharding(lambda: Scaled(other=nn.Parameter(make(), requires_grad=False)))


MAKING.add(
    NotImplementedError,
    "FSDP does not support non-contiguous …Parameter other of Scaled cannot be sharded",
    not_contiguous=beside(lambda: torch.ones(DIM, DIM).t()[:, :4]),
)
MAKING.add(
    NotImplementedError,
    "Parameter other of Scaled cannot be sharded.",
    sparse_parameter=beside(lambda: torch.ones(DIM).to_sparse()),
    quantized_parameter=beside(
        lambda: torch.quantize_per_tensor(torch.ones(DIM), 1.0, 0, torch.qint8)
    ),
)
MAKING.add(
    NotImplementedError,
    "Parameter other of Scaled cannot be sharded. Implement …in CannotSplit, or put it "
    "in ignored_params",
    subclass_that_cannot_be_cut=beside(lambda: CannotSplit(torch.ones(DIM, DIM))),
)


def placed(dim: int) -> Case:
    """Of a unit whose matrix is sharded on a dim."""
    return sharding(shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)


def uneven_dim(run: Run) -> Callable[[], object]:
    linear = nn.Linear(7, 8, bias=False, device=run.device)
    return sharding(lambda: linear, shard_placement_fn=lambda p: Shard(1))(run)


MAKING.add(
    AssertionError,
    "…dim…Parameter weight of Scaled cannot be sharded",
    dim_too_high=placed(2),
    dim_too_low=placed(-3),
)
MAKING.add(
    NotImplementedError,
    "FSDP does not support uneven sharding on dim 1…Parameter weight of Linear cannot be",
    uneven_dim=uneven_dim,
)


def parent_before_child(make_mesh: Callable[[Run], DeviceMesh | None]) -> Case:
    def case(run: Run) -> Callable[[], object]:
        child, mesh = Scaled().to(run.device), make_mesh(run)
        run.fully_shard(nn.Sequential(child), mesh=mesh)
        return lambda: run.fully_shard(child, mesh=mesh)

    return case


ALREADY = (
    "Parameter weight of Scaled cannot be sharded. It is a DTensor already. Call "
    "fully_shard on children before their parents"
)
MAKING.add(
    TypeError,
    ALREADY,
    parent_before_child_by_default=parent_before_child(lambda run: None),
)
MAKING.add(
    RuntimeError,
    ALREADY,
    parent_before_child_named=parent_before_child(lambda run: run.mesh),
)


def already_sharded(run: Run) -> Callable[[], object]:
    return sharding(lambda: Scaled(other=nn.Parameter(run.replicated())))(run)


MAKING.add(
    RuntimeError,
    "Parameter other of Scaled cannot be sharded. It is a DTensor already…"
    "named mesh dims other than FSDP's",
    already_sharded=already_sharded,
)
MAKING.add(
    ValueError,
    "…all parameters must be DTensors on the full SPMD mesh…Parameter weight of Scaled",
    dims_of_plain_parameters=lambda run: sharding(
        dp_mesh_dims=DataParallelMeshDims(shard=run.mesh.mesh_dim_names[0])
    )(run),
)
