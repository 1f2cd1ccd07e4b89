"""Wrong uses that are found when a policy or a unit is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_parity.waves import Extended
from fsdp_wrong_uses.rows import (
    add_each,
    BF16,
    Case,
    DIM,
    FP8,
    FP32,
    INT32,
    MAKING,
    Run,
    Scaled,
    wrong,
)

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import Replicate, Shard


def policy(**dtypes: Any) -> Case:
    """Of a policy that cannot be made."""
    return lambda run: lambda: MixedPrecisionPolicy(**dtypes)


def by_name(patterns: Any) -> Case:
    return lambda run: lambda: MixedPrecisionPolicy.by_name(Scaled(), patterns)


def sharding(make: Callable[[], nn.Module] = Scaled, **kwargs: Any) -> Case:
    """Of one unit that cannot be made."""
    return lambda run: lambda: run.fully_shard(make().to(run.device), **kwargs)


def under(**fields: Any) -> Case:
    return lambda run: sharding(mp_policy=MixedPrecisionPolicy(**fields))(run)


def placed(result: Any, **others: Callable[[], nn.Parameter]) -> Case:
    def make() -> nn.Module:
        return Scaled(**{name: param() for name, param in others.items()})

    return sharding(make, shard_placement_fn=lambda p: result if p.ndim == 2 else None)


add_each(
    MAKING,
    [
        (
            f"{name}_is_text",
            f"`{name}` is a string",
            policy(**{name: "bfloat16"}),
            TypeError,
            f"{name} of MixedPrecisionPolicy is 'bfloat16'",
        )
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "grad_comm_dtype")
    ],
    found="`MixedPrecisionPolicy`",
    do="give a torch.dtype",
)
add_each(
    MAKING,
    [
        (
            "override_is_a_dtype",
            "an override is a dtype, not a function",
            policy(param_dtype_override_fn=FP32),
            TypeError,
            "param_dtype_override_fn takes a parameter",
        )
    ],
    found="`MixedPrecisionPolicy`",
    do="takes a parameter and returns a dtype or None",
)
add_each(
    MAKING,
    [
        (
            "pattern_matches_nothing",
            "a pattern matches no parameter",
            by_name({"*.gian": {"param_dtype": FP32}}),
            ValueError,
            "Pattern '*.gian' matches no parameter",
        )
    ],
    found="`MixedPrecisionPolicy.by_name`",
    do="take one of the nearest names, which the error lists",
    is_ours=False,
)
add_each(
    MAKING,
    [
        (
            "patterns_contradict",
            "two patterns set different dtypes",
            by_name({"gain": {"param_dtype": FP32}, "g*": {"param_dtype": BF16}}),
            ValueError,
            "Patterns 'gain' and 'g*' set param_dtype of gain",
        )
    ],
    found="`MixedPrecisionPolicy.by_name`",
    do="let both set the same",
    about="gain",
)
add_each(
    MAKING,
    [
        (
            "pattern_sets_what_modules_have",
            "a pattern sets what a unit has as a whole",
            by_name({"gain": MixedPrecisionPolicy(output_dtype=FP32)}),
            ValueError,
            "Pattern 'gain' sets output_dtype to torch.float32",
        )
    ],
    found="`MixedPrecisionPolicy.by_name`",
    do="Pass output_dtype to by_name itself",
    about="gain",
)
add_each(
    MAKING,
    [
        (
            "pattern_policy_has_overrides",
            "a pattern maps to a policy that has overrides",
            by_name({"gain": MixedPrecisionPolicy(param_dtype_override_fn=id)}),
            ValueError,
            "Pattern 'gain' maps to a policy with param_dtype_override_fn",
        )
    ],
    found="`MixedPrecisionPolicy.by_name`",
    do="Give each choice a pattern of its own",
    about="gain",
)
add_each(
    MAKING,
    [
        (
            "override_returns_text",
            "an override returns a string",
            under(param_dtype_override_fn=lambda p: "bfloat16"),
            ValueError,
            "param_dtype_override_fn returned 'bfloat16' for parameter weight of Scaled",
        )
    ],
    found="`fully_shard`",
    do="Return a torch.dtype",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            "override_raises",
            "an override raises",
            under(reduce_dtype_override_fn=lambda p: p.no_such_thing),
            RuntimeError,
            "reduce_dtype_override_fn failed for parameter weight of Scaled",
        )
    ],
    found="`fully_shard`",
    do="fix the override: what it raised is the cause",
    about="weight of Scaled",
    is_ours=False,
)
add_each(
    MAKING,
    [
        (
            "override_returns_float8",
            "gradients reduced in float8 where nothing adds them",
            under(reduce_dtype_override_fn=lambda p: torch.float8_e4m3fnuz),
            ValueError,
            "reduce_dtype_override_fn returned torch.float8_e4m3fnuz for parameter "
            "weight of Scaled",
        )
    ],
    found="`fully_shard`",
    do="Return one of torch.float64",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            "grad_comm_dtype_is_float8",
            "gradients sent in float8, which have no scale",
            under(grad_comm_dtype=FP8),
            ValueError,
            "grad_comm_dtype of parameter weight of Scaled is torch.float8_e4m3fn",
        )
    ],
    found="`fully_shard`",
    do="Give one of torch.float64",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            "grad_comm_dtype_does_not_fit",
            "gradients sent in a dtype whose values `reduce_dtype` does not hold",
            under(grad_comm_dtype=FP32, reduce_dtype=BF16),
            ValueError,
            "The gradient of parameter weight of Scaled would be sent in torch.float32",
        )
    ],
    found="`fully_shard`",
    do="Give a reduce_dtype that does",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            f"{name}_{what}",
            f"`{name}` is {dtype}, and parameters train",
            under(**{name: dtype}),
            ValueError,
            f"{name} of the policy is {dtype}, which cannot hold the",
        )
        for name, what, dtype in (
            ("param_dtype", "is_integer", INT32),
            ("reduce_dtype", "is_integer", INT32),
            ("param_dtype", "is_packed", torch.float4_e2m1fn_x2),
        )
    ],
    found="`fully_shard`",
    do="Give a floating-point dtype",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            f"policy_is_{what}",
            f"`mp_policy` is {shown}",
            sharding(mp_policy=value),
            TypeError,
            "mp_policy of unit 'Scaled' is ",
        )
        for what, shown, value in (
            ("a_dtype", "a dtype", BF16),
            ("none", "None", None),
            ("a_class", "a class", MixedPrecisionPolicy),
        )
    ],
    found="`fully_shard`",
    do="pass a MixedPrecisionPolicy, or leave it out",
    about="Scaled",
)
add_each(
    MAKING,
    [
        (
            f"offload_policy_is_{what}",
            f"`offload_policy` is {shown}",
            sharding(offload_policy=value),
            TypeError,
            "offload_policy of unit 'Scaled' is ",
        )
        for what, shown, value in (
            ("text", "a string", "cpu"),
            ("a_class", "a class", CPUOffloadPolicy),
        )
    ],
    found="`fully_shard`",
    do="pass CPUOffloadPolicy(), or leave it out",
    about="Scaled",
)


class CannotSplit(Extended):
    """As torchao's weights for inference."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError(f"no {func}")
        return super().__torch_dispatch__(func, *args)


def subclass_param() -> nn.Parameter:
    return nn.Parameter(CannotSplit(torch.ones(DIM, DIM)))


def strided_param() -> nn.Parameter:
    return nn.Parameter(torch.ones(DIM, DIM).t()[:, :4])


def quantized_param() -> nn.Parameter:
    values = torch.quantize_per_tensor(torch.ones(DIM), 1.0, 0, torch.qint8)
    return nn.Parameter(values, requires_grad=False)


add_each(
    MAKING,
    [
        (
            "not_contiguous",
            "a parameter is not contiguous",
            sharding(lambda: Scaled(other=strided_param())),
            NotImplementedError,
            "Parameter other of Scaled cannot be sharded",
        )
    ],
    found="`fully_shard`",
    do="Make it contiguous first",
    about="other of Scaled",
)
add_each(
    MAKING,
    [
        (
            f"{what}_parameter",
            f"a parameter is {what}",
            sharding(lambda make=make: Scaled(other=make())),
            NotImplementedError,
            "Parameter other of Scaled cannot be sharded. Call to_dense()",
        )
        for what, make in (
            ("sparse", lambda: nn.Parameter(torch.ones(DIM).to_sparse())),
            ("quantized", quantized_param),
        )
    ],
    found="`fully_shard`",
    do="Call to_dense() or dequantize() on it first, or put it in ignored_params",
    about="other of Scaled",
)
add_each(
    MAKING,
    [
        (
            "subclass_that_cannot_be_cut",
            "a parameter is of a tensor subclass that cannot be cut, e.g. as `quantize_` "
            "of torchao makes them for inference",
            sharding(lambda: Scaled(other=subclass_param())),
            NotImplementedError,
            "Parameter other of Scaled cannot be sharded. Its class, CannotSplit, must",
        )
    ],
    found="`fully_shard`",
    do="Dequantize it first, or put it in ignored_params",
    about="other of Scaled",
)
add_each(
    MAKING,
    [
        (
            "dim_too_high",
            "`shard_placement_fn` returns a dim that does not exist",
            placed(Shard(2)),
            AssertionError,
            "Parameter weight of Scaled cannot be sharded",
        ),
        (
            "dim_too_low",
            "it returns a negative dim that does not exist",
            placed(Shard(-3)),
            AssertionError,
            "Parameter weight of Scaled cannot be sharded",
        ),
        (
            "uneven_dim",
            "it returns another dim than 0 that does not divide by the ranks",
            lambda run: (
                lambda: run.fully_shard(
                    nn.Linear(7, 8, bias=False, device=run.device),
                    shard_placement_fn=lambda p: Shard(1),
                )
            ),
            NotImplementedError,
            "Parameter weight of Linear cannot be sharded",
        ),
    ],
    found="`fully_shard`",
    do="shard_placement_fn must return Shard of a dim that it has",
    about="weight of",
)
add_each(
    MAKING,
    [
        (
            "placement_replicates",
            "`shard_placement_fn` returns `Replicate()`",
            placed(Replicate()),
            ValueError,
            "Invalid shard_placement_fn result",
        )
    ],
    found="`fully_shard`",
    do="return `Shard`, `None` or a `ShardPlacementResult`",
    is_ours=False,
)
add_each(
    MAKING,
    [
        (
            "scalar",
            "a parameter has no dim",
            sharding(lambda: Scaled(other=nn.Parameter(torch.tensor(1.0)))),
            ValueError,
            "fully_shard doesn't support scalar parameters. Change other",
        )
    ],
    found="`fully_shard`",
    do="to a 1D tensor with numel equal to 1",
    about="other",
)


def parent_before_child(make_mesh: Callable[[Run], DeviceMesh | None]) -> Case:
    def case(run: Run) -> Callable[[], object]:
        child, mesh = Scaled().to(run.device), make_mesh(run)
        run.fully_shard(nn.Sequential(child), mesh=mesh)
        return lambda: run.fully_shard(child, mesh=mesh)

    return case


def unnamed_mesh(run: Run) -> DeviceMesh:
    return DeviceMesh.from_group(run.mesh.get_group(), run.mesh.device_type)


add_each(
    MAKING,
    [
        (
            f"parent_before_child_{what}",
            f"a parent is sharded before its child, {shown}",
            parent_before_child(make_mesh),
            kind,
            "Parameter weight of Scaled cannot be sharded. It is a DTensor already",
        )
        for what, shown, make_mesh, kind in (
            ("by_default", "without a `mesh`", lambda run: None, TypeError),
            ("unnamed", "over a mesh without names", unnamed_mesh, TypeError),
            ("named", "over a mesh with names", lambda run: run.mesh, RuntimeError),
        )
    ],
    found="`fully_shard`",
    do="call fully_shard on children before their parents",
    about="weight of Scaled",
)


@wrong(
    MAKING,
    "a parameter is a DTensor over FSDP's own mesh",
    "`fully_shard`",
    RuntimeError,
    "Parameter other of Holder cannot be sharded. It is a DTensor already",
    "or name FSDP's in dp_mesh_dims",
    "other of Holder",
)
def already_sharded(run: Run) -> Callable[[], object]:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(run.replicated())

    return lambda: run.fully_shard(Holder())


add_each(
    MAKING,
    [
        (
            "dims_of_plain_parameters",
            "`dp_mesh_dims`, but parameters are plain tensors",
            lambda run: sharding(
                dp_mesh_dims=DataParallelMeshDims(shard=run.mesh.mesh_dim_names[0])
            )(run),
            ValueError,
            "Parameter weight of Scaled cannot be sharded",
        )
    ],
    found="`fully_shard`",
    do="all parameters must be DTensors on the full SPMD mesh",
    about="weight of Scaled",
)
add_each(
    MAKING,
    [
        (
            "unknown_mesh_dim",
            "`dp_mesh_dims` names a dim that does not exist in the mesh",
            sharding(dp_mesh_dims=DataParallelMeshDims(shard="nowhere")),
            ValueError,
            "Mesh dim name 'nowhere' not found",
        ),
        (
            "mesh_of_three_dims",
            "a mesh of 3 dims",
            lambda run: sharding(
                mesh=DeviceMesh(
                    run.mesh.device_type,
                    run.mesh.mesh.view(1, 1, -1),
                    mesh_dim_names=("a", "b", "c"),
                )
            )(run),
            ValueError,
            "fully_shard expects a 1D or 2D DeviceMesh",
        ),
        (
            "mesh_without_names",
            "a 2-D mesh without names",
            lambda run: sharding(
                mesh=DeviceMesh(run.mesh.device_type, run.mesh.mesh.view(1, -1))
            )(run),
            AssertionError,
            "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        ),
    ],
    found="`fully_shard`",
    do="name one or two dims of the mesh: `init_device_mesh(..., mesh_dim_names=...)`",
    is_ours=False,
)
add_each(
    MAKING,
    [
        (
            f"reshard_to_{what}",
            f"`reshard_after_forward={shown}`",
            sharding(reshard_after_forward=value),
            ValueError,
            begins,
        )
        for what, shown, value, begins in (
            ("none", "0", 0, "If passing reshard_after_forward as an int"),
            ("less_than_none", "-1", -1, "If passing reshard_after_forward as an int"),
            ("no_factor", "3", 3, "If passing reshard_after_forward as an int"),
            (
                "text",
                '"yes"',
                "yes",
                "reshard_after_forward should be a bool or an int",
            ),
        )
    ],
    found="`fully_shard`",
    do="pass a bool, or a factor of the number of ranks",
    is_ours=False,
)


@wrong(
    MAKING,
    "a module is sharded twice",
    "`fully_shard`",
    AssertionError,
    "Each distinct composable distributed API can only be applied to a module once",
    "call it once for each module",
    "FSDPScaled",
    is_ours=False,
)
def sharded_twice(run: Run) -> Callable[[], object]:
    unit = run.fully_shard(Scaled().to(run.device))
    return lambda: run.fully_shard(unit)


add_each(
    MAKING,
    [
        (
            "container",
            "a `ModuleList`, which has no forward",
            sharding(lambda: nn.ModuleList([Scaled()])),
            ValueError,
            "fully_shard does not support containers that do not implement forward",
        )
    ],
    found="`fully_shard`",
    do="shard what is in it",
    about="ModuleList",
    is_ours=False,
)
