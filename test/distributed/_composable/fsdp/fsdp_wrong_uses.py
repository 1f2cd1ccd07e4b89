"""
The wrong uses of ``fully_shard`` that are found, one function for each: it prepares
what is needed, and returns the call that must raise. Of each is told when it is
found, how the error begins and what to do, in the words of the error.

The table in ``docs/wrong_uses.md`` is what ``python fsdp_wrong_uses.py`` prints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from features_models import Extended

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Replicate, Shard


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
INT32, FP8 = torch.int32, torch.float8_e4m3fn
# Divides by no number of ranks, so that one of 4 has no row
DIM = 6


class Scaled(nn.Module):
    """A bf16 matrix beside an fp32 gain."""

    def __init__(self, **others: nn.Parameter) -> None:
        super().__init__()
        values = torch.arange(DIM * DIM, dtype=FP32).view(DIM, DIM) % 7 - 3
        self.weight = nn.Parameter(values.to(BF16))
        self.gain = nn.Parameter(torch.arange(DIM, dtype=FP32) - 2)
        for name, param in others.items():
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).to(FP32) * self.gain


class Lookup(nn.Module):
    """An embedding, whose gradients are sparse if it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(DIM, DIM, sparse=True)
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.table((x > 0).long()[:, 0]))


class Narrow(Scaled):
    """Trains a parameter of 8 bits."""

    def __init__(self) -> None:
        super().__init__(narrow=nn.Parameter(torch.ones(DIM).to(FP8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.narrow.to(FP32)


@dataclass
class Run:
    """One rank, on which one wrong use is tried."""

    device: torch.device
    mesh: DeviceMesh
    # Of what can go on: how to undo what was wrong, before `reset_iter_state`
    root: Any = None
    mend: Callable[[], object] | None = None
    blocks: list[Any] = field(default_factory=list)

    def fully_shard(self, module: Any, **kwargs: Any) -> Any:
        return fully_shard(module, **{"mesh": self.mesh, **kwargs})

    def model(self, **kwargs: Any) -> Any:
        """Returns two blocks, each a unit, in a root that is one as well."""
        self.blocks = [Scaled().to(self.device) for _ in range(2)]
        model = nn.Sequential(*self.blocks)
        for block in self.blocks:
            self.fully_shard(block, **kwargs)
        self.root = self.fully_shard(model, **kwargs)
        return self.root

    def trained(self, **kwargs: Any) -> Any:
        model = self.model(**kwargs)
        self.step(model)
        model.zero_grad()
        return model

    def input(self) -> torch.Tensor:
        x = torch.arange(2 * DIM, dtype=FP32, device=self.device).view(2, DIM) - 5
        return x.requires_grad_()

    def step(self, model: nn.Module) -> None:
        model(self.input()).sum().backward()

    def like(self, param: torch.Tensor, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local.to(self.device), self.mesh, [Shard(0)], run_check=False,
            shape=param.size(), stride=param.stride(),
        )  # fmt: skip

    def replicated(self, size: int = DIM) -> DTensor:
        ones = torch.ones(size, device=self.device)
        return DTensor.from_local(ones, self.mesh, [Replicate()], run_check=False)


Case = Callable[[Run], Callable[[], object]]


@dataclass(frozen=True)
class WrongUse:
    name: str
    use: str
    found: str
    kind: type[Exception]
    begins: str
    do: str
    # The parameter or unit that the error must name, where one is concerned
    about: str
    # Whether the error has the words of ``do``. Others are the release's, or torch's,
    # or say it in words that depend on the case
    is_ours: bool
    case: Case

    def cells(self) -> list[str]:
        # A bar would end the cell
        error = f"`{self.kind.__name__}: {self.begins} …`".replace("|", "\\|")
        return [self.use, self.found, error, self.do]


WRONG_USES: dict[str, WrongUse] = {}
SECTIONS: dict[str, list[str]] = {}
MAKING = "Policies and `fully_shard`"
SETTING = "Settings"
STARTING = "Before the first step"
STEPPING = "In a step"


def wrong(
    section: str,
    use: str,
    found: str,
    kind: type[Exception],
    begins: str,
    do: str,
    about: str = "",
    is_ours: bool = True,
) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        name = case.__name__
        row = WrongUse(name, use, found, kind, begins, do, about, is_ours, case)
        WRONG_USES[name] = row
        SECTIONS.setdefault(section, []).append(name)
        return case

    return add


def add_each(
    section: str,
    rows: Iterable[tuple[str, str, Case, type[Exception], str]],
    *,
    found: str,
    do: str,
    about: str = "",
    is_ours: bool = True,
) -> None:
    """Adds rows that differ in little: (name, use, case, kind, begins) of each."""
    for name, use, case, kind, begins in rows:
        row = WrongUse(name, use, found, kind, begins, do, about, is_ours, case)
        WRONG_USES[name] = row
        SECTIONS.setdefault(section, []).append(name)


# Policies and `fully_shard` #


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
            f"`{name}` is a text",
            policy(**{name: "bfloat16"}),
            TypeError,
            f"{name} of MixedPrecisionPolicy is 'bfloat16'",
        )
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
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
            "override_returns_text",
            "an override returns a text",
            under(param_dtype_override_fn=lambda p: "bfloat16"),
            TypeError,
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
    do="mend the override: what it raised is the cause",
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
            f"{name}_{what}",
            f"`{name}` is {dtype}, and parameters train",
            under(**{name: dtype}),
            ValueError,
            f"{name} of the policy is {dtype}, in which parameter weight of Scaled",
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
            "mp_policy of unit 'Scaled' must be a MixedPrecisionPolicy",
        )
        for what, shown, value in (
            ("a_dtype", "a dtype", BF16),
            ("none", "None", None),
            ("a_class", "a class", MixedPrecisionPolicy),
        )
    ],
    found="`fully_shard`",
    do="pass MixedPrecisionPolicy(param_dtype=...), or leave it out",
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
            "offload_policy of unit 'Scaled' must be an OffloadPolicy",
        )
        for what, shown, value in (
            ("text", "a text", "cpu"),
            ("a_class", "a class", CPUOffloadPolicy),
        )
    ],
    found="`fully_shard`",
    do="pass CPUOffloadPolicy(), or leave it out",
    about="Scaled",
)


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
            "Parameter other of Scaled cannot be sharded. Only dense parameters",
        )
        for what, make in (
            ("sparse", lambda: nn.Parameter(torch.ones(DIM).to_sparse())),
            ("quantized", quantized_param),
        )
    ],
    found="`fully_shard`",
    do="call to_dense() or dequantize() on it first, or put it in ignored_params",
    about="other of Scaled",
)
add_each(
    MAKING,
    [
        (
            "dim_too_high",
            "`shard_placement_fn` returns a dim that is not there",
            placed(Shard(2)),
            AssertionError,
            "Parameter weight of Scaled cannot be sharded",
        ),
        (
            "dim_too_low",
            "it returns a negative dim that is not there",
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


@wrong(
    MAKING,
    "a parent is sharded before its child",
    "`fully_shard`",
    RuntimeError,
    "Parameter weight of Scaled cannot be sharded. It is a DTensor already",
    "call fully_shard on children before their parents",
    "weight of Scaled",
)
def parent_before_child(run: Run) -> Callable[[], object]:
    child = Scaled().to(run.device)
    run.fully_shard(nn.Sequential(child))
    return lambda: run.fully_shard(child)


@wrong(
    MAKING,
    "a parameter is a DTensor over FSDP's own mesh",
    "`fully_shard`",
    RuntimeError,
    "Parameter other of Holder cannot be sharded. It is a DTensor already",
    "or name those in dp_mesh_dims",
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
            "`dp_mesh_dims` names a dim that the mesh has not",
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


# Settings #


def setting(method: str, *args: Any, **kwargs: Any) -> Case:
    """Of the second unit of a model that has run."""

    def case(run: Run) -> Callable[[], object]:
        run.trained()
        run.mend = lambda: None
        return lambda: getattr(run.blocks[1], method)(*args, **kwargs)

    return case


class Uncallable:
    allocate = DefaultAllGather.allocate


add_each(
    SETTING,
    [
        (
            f"gather_is_{what}",
            f"a custom all-gather is {shown}",
            setting("set_custom_all_gather", comm),
            TypeError,
            "set_custom_all_gather of unit '1' got",
        )
        for what, shown, comm in (
            ("a_class", "a class, not an object of it", DefaultAllGather),
            ("none", "`None`", None),
            ("not_callable", "an object without `__call__`", Uncallable()),
            ("a_scatter", "a `ReduceScatter`", DefaultReduceScatter()),
        )
    ],
    found="`set_custom_all_gather`",
    do="pass an object that has allocate and __call__ as AllGather has them",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"scatter_is_{what}",
            f"a custom reduce-scatter is {shown}",
            setting("set_custom_reduce_scatter", comm),
            TypeError,
            "set_custom_reduce_scatter of unit '1' got",
        )
        for what, shown, comm in (
            ("a_number", "a number", 3),
            ("a_gather", "an `AllGather`", DefaultAllGather()),
        )
    ],
    found="`set_custom_reduce_scatter`",
    do="pass an object that has allocate and __call__ as ReduceScatter has them",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            "hook_is_text",
            "an all-reduce hook cannot be called",
            setting("set_all_reduce_hook", "all_reduce"),
            TypeError,
            "set_all_reduce_hook of unit '1' got 'all_reduce'",
        )
    ],
    found="`set_all_reduce_hook`",
    do="pass a function of the reduced buffer",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"divide_factor_is_{what}",
            f"a divide factor of {factor}",
            setting("set_gradient_divide_factor", factor),
            ValueError,
            f"set_gradient_divide_factor of unit '1' got {factor}",
        )
        for what, factor in (("0", 0), ("nan", float("nan")), ("inf", float("inf")))
    ],
    found="`set_gradient_divide_factor`",
    do="pass a finite number other than 0",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"divide_factor_is_{what}",
            f"a divide factor that is a {what}",
            setting("set_gradient_divide_factor", factor),
            TypeError,
            "set_gradient_divide_factor of unit '1' got",
        )
        for what, factor in (("text", "2"), ("vector", torch.ones(2)))
    ],
    found="`set_gradient_divide_factor`",
    do="pass a number to divide by",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"input_buffers_are_{shown}".lower(),
            f"`set_reduce_scatter_max_input_buffers({shown})`",
            setting("set_reduce_scatter_max_input_buffers", value),
            kind,
            begins,
        )
        for shown, value, kind, begins in (
            ("0", 0, ValueError, "max_input_buffers must be a positive int, got 0"),
            ("True", True, TypeError, "max_input_buffers must be an int, got bool"),
        )
    ],
    found="the setter",
    do="pass 1 or more",
    is_ours=False,
)
add_each(
    SETTING,
    [
        (
            "prefetch_of_no_unit",
            "prefetching a module that is no unit",
            setting("set_modules_to_forward_prefetch", [nn.Linear(2, 2)]),
            ValueError,
            "Expects FSDPModule but got",
        ),
    ],
    found="`set_modules_to_forward_prefetch`",
    do="pass modules that `fully_shard` was called on",
    about="Linear",
    is_ours=False,
)
add_each(
    SETTING,
    [
        (
            "reshard_later_to_two",
            "`set_reshard_after_forward(2)`",
            setting("set_reshard_after_forward", 2),
            ValueError,
            "reshard_after_forward should be a bool",
        ),
    ],
    found="the setter",
    do="pass a bool; a number of ranks is for `fully_shard`",
    is_ours=False,
)


# Before the first step #


def before_the_first(
    change: Callable[[Run, Scaled], object], call: str = "forward"
) -> Case:
    """Of a model whose second block is changed between `fully_shard` and forward."""

    def case(run: Run) -> Callable[[], object]:
        model = run.model()
        change(run, run.blocks[1])
        if call == "unshard":
            return run.blocks[1].unshard
        return lambda: model(run.input())

    return case


def replace(value: Callable[[Run], Any], name: str = "gain") -> Case:
    def change(run: Run, block: Scaled) -> None:
        delattr(block, name)
        setattr(block, name, value(run))

    return before_the_first(change)


def on_meta(run: Run, block: Scaled) -> None:
    block.to("meta")


def resized(run: Run, block: Scaled) -> None:
    block.gain.data = torch.ones(7, device=run.device)


def resized_shard(run: Run, block: Scaled) -> None:
    block.gain._local_tensor = torch.ones(7, device=run.device)


def forgotten_shard(run: Run, block: Scaled) -> None:
    block.gain._local_tensor = torch.ones(1, device=run.device)


add_each(
    STARTING,
    [
        (
            "resharded_across",
            "a dim other than 0 is sharded, and `reshard_after_forward` is a number "
            "that dim 0 does not divide by",
            lambda run: (
                lambda: run.fully_shard(
                    nn.Linear(8, 3, bias=False, device=run.device),
                    shard_placement_fn=lambda p: Shard(1),
                    reshard_after_forward=2,
                )
            ),
            ValueError,
            "weight of Linear of size (3, 8) is sharded on dim 1",
        )
    ],
    found="`fully_shard`",
    do="let reshard_after_forward be True or False, or a factor of that dim",
    about="weight of Linear",
)
add_each(
    STARTING,
    [
        (
            "meta_at_forward",
            "parameters are on the meta device",
            before_the_first(on_meta),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['1.weight', "
            "'1.gain']",
        )
    ],
    found="first forward",
    do="Call module.to_empty(device=...)",
    about="'1.gain'",
)
add_each(
    STARTING,
    [
        (
            "one_on_meta",
            "one parameter is on the meta device, the others are not",
            lambda run: (
                lambda: run.fully_shard(
                    Scaled(other=nn.Parameter(torch.ones(DIM, device="meta")))
                )(run.input())
            ),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['other']",
        )
    ],
    found="first forward",
    do="Call module.to_empty(device=...)",
    about="'other'",
)
add_each(
    STARTING,
    [
        (
            "meta_at_unshard",
            "the same, with `unshard` before a forward",
            before_the_first(on_meta, "unshard"),
            RuntimeError,
            "FSDP parameters should be materialized from meta device before "
            "training, but the following were still on meta device: ['weight of "
            "Scaled', 'gain of Scaled']",
        )
    ],
    found="`unshard`",
    do="Call module.to_empty(device=...)",
    about="gain of Scaled",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            case,
            RuntimeError,
            "1.gain is a DTensor of size",
        )
        for name, use, case in (
            (
                "resized",
                "a parameter's `data` is set to another size",
                before_the_first(resized),
            ),
            (
                "larger_shard",
                "a shard is set to a larger one",
                before_the_first(resized_shard),
            ),
            (
                "smaller_shard",
                "a shard is set to a smaller one",
                before_the_first(forgotten_shard),
            ),
            (
                "replicated",
                "a parameter is replaced by a replicated DTensor",
                replace(lambda run: nn.Parameter(run.replicated())),
            ),
        )
    ],
    found="first forward",
    do="Change its size before fully_shard, and load what is sharded alike",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            replace(value),
            AttributeError,
            "1.gain must be the DTensor that fully_shard made of it",
        )
        for name, use, value in (
            (
                "plain_parameter",
                "a parameter is replaced by a plain one",
                lambda run: nn.Parameter(torch.ones(DIM, device=run.device)),
            ),
            (
                "plain_tensor",
                "a parameter is replaced by a tensor",
                lambda run: torch.ones(DIM, device=run.device),
            ),
        )
    ],
    found="first forward",
    do="Replace it before fully_shard, or copy into it",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            name,
            use,
            before_the_first(change),
            AttributeError,
            "1.gain is gone, but it was sharded",
        )
        for name, use, change in (
            (
                "deleted",
                "a parameter is deleted",
                lambda run, block: delattr(block, "gain"),
            ),
            (
                "set_to_none",
                "a parameter is set to `None`",
                lambda run, block: setattr(block, "gain", None),
            ),
        )
    ],
    found="first forward",
    do="Delete it before fully_shard",
    about="1.gain",
)


@wrong(
    STARTING,
    "`grad_dtype` is an integer dtype",
    "first forward",
    ValueError,
    "grad_dtype of 1.gain is torch.int32",
    "set a floating-point dtype, or leave it as it was",
    "1.gain",
)
def integer_grad_dtype(run: Run) -> Callable[[], object]:
    model = run.model()
    run.blocks[1].gain.grad_dtype = INT32
    return lambda: model(run.input())


@wrong(
    STARTING,
    "a parameter is in two units",
    "first forward",
    ValueError,
    "Parameter '1.gain' is shared with a parameter already managed by another FSDP",
    "fully_shard([module_a, module_b])",
    "1.gain",
)
def in_two_units(run: Run) -> Callable[[], object]:
    blocks = [Scaled().to(run.device) for _ in range(2)]
    blocks[1].gain = blocks[0].gain
    for block in blocks:
        run.fully_shard(block)
    model = run.fully_shard(nn.Sequential(*blocks))
    return lambda: model(run.input())


@wrong(
    STARTING,
    "a unit runs before the root around it",
    "the root's forward",
    RuntimeError,
    "FSDP state has already been lazily initialized for 1",
    "FSDP requires running forward through the root module first",
    "for 1",
)
def child_runs_first(run: Run) -> Callable[[], object]:
    model = run.model()
    run.blocks[1](run.input())
    return lambda: model(run.input())


@wrong(
    STARTING,
    "the root is a unit of several modules",
    "first forward",
    RuntimeError,
    "FSDP requires a single root module but got (FSDPScaled(), FSDPScaled())",
    "shard a module around them, and run that",
    "FSDPScaled",
    is_ours=False,
)
def several_roots(run: Run) -> Callable[[], object]:
    blocks = [Scaled().to(run.device) for _ in range(2)]
    run.fully_shard(blocks)
    return lambda: blocks[0](run.input())


@wrong(
    STARTING,
    "a unit of another root is prefetched",
    "first forward",
    AttributeError,
    "Unit 'FSDPScaled' cannot be prefetched",
    "prefetch units of the same root",
    "FSDPScaled",
)
def foreign_prefetch(run: Run) -> Callable[[], object]:
    model = run.model()
    other = run.fully_shard(Scaled().to(run.device))
    run.blocks[0].set_modules_to_forward_prefetch([other])
    return lambda: model(run.input())


def loading(change: Callable[[Run, dict[str, Any]], object], assign: bool) -> Case:
    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        state = dict(model.state_dict())
        change(run, state)
        return lambda: model.load_state_dict(state, assign=assign)

    return case


def load_plain(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = torch.ones(DIM, device=run.device)


def load_replicated(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = run.replicated()


def load_another_size(run: Run, state: dict[str, Any]) -> None:
    state["1.gain"] = run.replicated(DIM + 1)


add_each(
    STARTING,
    [
        (
            "loads_plain_tensor",
            "a plain tensor is loaded with `assign=True`",
            loading(load_plain, assign=True),
            AttributeError,
            "1.gain must be the DTensor that fully_shard made of it",
        )
    ],
    found="`load_state_dict`",
    do="shard with distribute_tensor what is not",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            "loads_replicated",
            "a replicated DTensor is loaded with `assign=True`",
            loading(load_replicated, assign=True),
            RuntimeError,
            "1.gain is a DTensor of size",
        )
    ],
    found="`load_state_dict`",
    do="load what is sharded alike",
    about="1.gain",
)
add_each(
    STARTING,
    [
        (
            "loads_another_size",
            "a DTensor of another size is loaded",
            loading(load_another_size, assign=False),
            RuntimeError,
            "Error(s) in loading state_dict for FSDPSequential",
        ),
        (
            "copies_plain_tensor",
            "a plain tensor is loaded without `assign=True`",
            loading(load_plain, assign=False),
            RuntimeError,
            "Error(s) in loading state_dict for FSDPSequential",
        ),
    ],
    found="`load_state_dict`",
    do="load DTensors of the model's sizes, from `distribute_tensor`",
    about="1.gain",
    is_ours=False,
)


@wrong(
    STARTING,
    "a sharded model is copied",
    "`deepcopy`",
    AssertionError,
    "FSDP does not support deepcopy",
    "Please use state dict for serialization",
)
def copied(run: Run) -> Callable[[], object]:
    model = run.model()
    return lambda: copy.deepcopy(model)


@wrong(
    STARTING,
    "`reset_iter_state` of a unit that is not the root",
    "`reset_iter_state`",
    RuntimeError,
    "reset_iter_state must be called on the root FSDP module",
    "call it on the module whose forward ran first",
    is_ours=False,
)
def reset_of_a_child(run: Run) -> Callable[[], object]:
    run.trained()
    return run.blocks[1].reset_iter_state


# In a step: gradients #


def with_hook(change: Callable[[Run, nn.Parameter], object]) -> Case:
    """Of a step in which a gradient of the second block is changed by a hook."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained(reshard_after_forward=False)
        loss = model(run.input()).sum()
        param = run.blocks[1].gain
        handle = param.register_post_accumulate_grad_hook(lambda p: change(run, p))
        param.grad_dtype = None

        def mend() -> None:
            handle.remove()
            param.grad_dtype = param.dtype

        run.mend = mend
        return loss.backward

    return case


def set_grad(grad: Callable[[Run], torch.Tensor]) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad = None
        param.grad = grad(run)

    return with_hook(change)


def set_grad_data(numel: int) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad.data = torch.ones(numel, device=run.device)

    return with_hook(change)


add_each(
    STEPPING,
    [
        (
            f"gradient_of_{numel}",
            f"a hook sets the data of a gradient to {what} one",
            set_grad_data(numel),
            RuntimeError,
            f"The gradient of 1.gain has size ({numel},), but the parameter has size",
        )
        for numel, what in ((9, "a larger"), (1, "a smaller"))
    ],
    found="backward",
    do="Look for a hook that resizes it or sets its data",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            "sparse_gradient",
            "a hook makes a gradient sparse",
            set_grad(lambda run: torch.ones(DIM, device=run.device).to_sparse()),
            RuntimeError,
            "The gradient of 1.gain is sparse",
        )
    ],
    found="backward",
    do="only dense ones are reduced",
    about="1.gain",
)


@wrong(
    STEPPING,
    "`nn.Embedding(sparse=True)`",
    "backward",
    RuntimeError,
    "The gradient of table.weight is sparse",
    "Use nn.Embedding(sparse=False), or put the parameter in ignored_params",
    "table.weight",
)
def sparse_embedding(run: Run) -> Callable[[], object]:
    model = run.fully_shard(Lookup().to(run.device))
    return lambda: run.step(model)


add_each(
    STEPPING,
    [
        (
            "distributed_gradient",
            "a hook sets a DTensor as the gradient of a whole parameter",
            set_grad(lambda run: run.replicated()),
            RuntimeError,
            "The gradient of 1.gain is a DTensor",
        )
    ],
    found="backward",
    do="Set its to_local() or full_tensor() instead",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            "integer_gradient",
            "a hook sets an integer gradient",
            set_grad(lambda run: torch.ones(DIM, dtype=INT32, device=run.device)),
            RuntimeError,
            "The gradients of 1.gain cannot be averaged in torch.int32",
        )
    ],
    found="backward",
    do="Set reduce_dtype to torch.float32 for them, or do not train them",
    about="1.gain",
)


@wrong(
    STEPPING,
    "a float8 parameter trains where nothing adds float8",
    "backward",
    NotImplementedError,
    "The gradients of narrow cannot be averaged in torch.float8_e4m3fn",
    "Set reduce_dtype to torch.float32 for them, or do not train them",
    "narrow",
)
def float8_parameter(run: Run) -> Callable[[], object]:
    model = run.fully_shard(Narrow().to(run.device))
    return lambda: run.step(model)


def on_sharded(grad: Callable[[Run, nn.Parameter], torch.Tensor]) -> Case:
    """Of a step that finds a gradient on the sharded parameter."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        param = run.blocks[1].gain
        param.grad_dtype = None
        param.grad = grad(run, param)

        def mend() -> None:
            param.grad = None
            param.grad_dtype = param.dtype

        run.mend = mend
        return lambda: run.step(model)

    return case


def plain_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return torch.ones(DIM, device=run.device)


def whole_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return run.replicated()


def integer_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return run.like(param, torch.ones_like(param.to_local(), dtype=INT32))


add_each(
    STEPPING,
    [
        (
            "plain_gradient_of_shard",
            "a plain tensor is set as the gradient of a sharded parameter",
            on_sharded(plain_grad),
            AssertionError,
            "The gradient of 1.gain must be a DTensor like its sharded parameter",
        )
    ],
    found="backward",
    do="do not set the gradient of a sharded parameter to a plain tensor",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            name,
            f"{what} is set as the gradient of a sharded parameter",
            on_sharded(grad),
            RuntimeError,
            "The gradient that 1.gain has is",
        )
        for name, what, grad in (
            ("whole_gradient_of_shard", "a replicated DTensor", whole_grad),
            ("integer_gradient_of_shard", "an integer DTensor", integer_grad),
        )
    ],
    found="backward",
    do="Set None, or one that is sharded like the parameter",
    about="1.gain",
)


@wrong(
    STEPPING,
    "a custom `autograd.Function` returns a gradient of another shape",
    "backward",
    RuntimeError,
    "Function ShapelessBackward returned an invalid gradient at index 0",
    "return one of the input's shape",
    is_ours=False,
)
def function_of_another_shape(run: Run) -> Callable[[], object]:
    class Shapeless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gain: torch.Tensor) -> torch.Tensor:
            return gain.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.ones(DIM + 1, device=run.device)

    model = run.trained()
    handle = run.blocks[1].register_forward_hook(
        lambda block, args, output: output * Shapeless.apply(block.gain),
        prepend=True,  # before the unit reshards
    )
    run.mend = handle.remove
    return lambda: run.step(model)


@wrong(
    STEPPING,
    "a second backward through the same graph",
    "second backward",
    RuntimeError,
    "Trying to backward through the graph a second time",
    "`backward(retain_graph=True)` the first time",
    is_ours=False,
)
def second_backward(run: Run) -> Callable[[], object]:
    loss = run.trained()(run.input()).sum()
    loss.backward()
    run.mend = lambda: None
    return loss.backward


# In a step: dtypes #


@wrong(
    STEPPING,
    "a module is cast after it ran",
    "next forward",
    RuntimeError,
    "1.weight was gathered as torch.bfloat16 before, and would be as torch.float64",
    "cast a model, or load another dtype with assign=True, before its first forward",
    "1.weight",
)
def cast_between_steps(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.blocks[1].to(FP64)
    return lambda: model(run.input())


@wrong(
    STEPPING,
    "another dtype of the same width is loaded with `assign=True` after a step",
    "next forward",
    RuntimeError,
    "1.weight was gathered as torch.bfloat16 before, and would be as torch.float16",
    "cast a model, or load another dtype with assign=True, before its first forward",
    "1.weight",
)
def loads_another_dtype(run: Run) -> Callable[[], object]:
    model = run.trained()
    state = dict(model.state_dict())
    state["1.weight"] = state["1.weight"].to(torch.float16)
    model.load_state_dict(state, assign=True)
    return lambda: model(run.input())


@wrong(
    STEPPING,
    "a parameter's `data` is cast after a step",
    "backward",
    RuntimeError,
    "1.gain is torch.bfloat16 now, but its gradients are torch.float32",
    "cast a model before its first forward, not between steps",
    "1.gain",
)
def cast_data(run: Run) -> Callable[[], object]:
    model = run.trained()
    gain = run.blocks[1].gain
    gain.data = gain.data.to(BF16)
    return lambda: run.step(model)


# In a step: collectives #


def allocating(kind: type, allocate: Callable[..., Any]) -> Case:
    """Of a step in which a custom collective allocates something else."""

    class Custom(kind):  # type: ignore[misc, valid-type]
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return allocate(size[0], dtype, device)

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        setter = run.blocks[1].set_custom_reduce_scatter
        if kind is DefaultAllGather:
            setter = run.blocks[1].set_custom_all_gather
        setter(Custom())
        run.mend = lambda: setter(kind())
        return lambda: run.step(model)

    return case


ALLOCATES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "nothing": ("`None`", lambda n, dtype, device: None, "a NoneType"),
    "too_little": (
        "too small a buffer",
        lambda n, dtype, device: torch.empty(n - 1, dtype=dtype, device=device),
        "",
    ),
    "too_much": (
        "too large a buffer",
        lambda n, dtype, device: torch.empty(n + 1, dtype=dtype, device=device),
        "",
    ),
    "with_gaps": (
        "a buffer with gaps",
        lambda n, dtype, device: torch.empty(2 * n, dtype=dtype, device=device)[::2],
        "a tensor that is not contiguous",
    ),
    "on_meta": (
        "a buffer on the meta device",
        lambda n, dtype, device: torch.empty(n, dtype=dtype, device="meta"),
        "a tensor on the meta device",
    ),
}
for _kind, _setter, _found in (
    (DefaultAllGather, "set_custom_all_gather", "next forward"),
    (DefaultReduceScatter, "set_custom_reduce_scatter", "backward"),
):
    _what = "all-gather" if _kind is DefaultAllGather else "reduce-scatter"
    add_each(
        STEPPING,
        [
            (
                f"{_what.replace('-', '_')}_allocates_{name}",
                f"a custom {_what} allocates {shown}",
                allocating(_kind, allocate),
                ValueError,
                f"Custom.allocate, from {_setter}, returned {returned}".rstrip(),
            )
            for name, (shown, allocate, returned) in ALLOCATES.items()
        ],
        found=_found,
        do="return a contiguous tensor of the size, dtype and device that it is asked",
        about=_setter,
    )
add_each(
    STEPPING,
    [
        (
            "all_gather_allocates_floats",
            "a custom all-gather allocates another dtype",
            allocating(
                DefaultAllGather,
                lambda n, dtype, device: torch.empty(n, dtype=FP64, device=device),
            ),
            ValueError,
            "Custom.allocate, from set_custom_all_gather, returned one of torch.float64",
        )
    ],
    found="next forward",
    do="return a contiguous tensor of the size, dtype and device that it is asked",
    about="set_custom_all_gather",
)


# In a step: extensions #


def extension(
    pre: Callable[[torch.Tensor], Any] | None = None,
    post: Callable[[torch.Tensor], Any] | None = None,
) -> Case:
    """Of a first step with a tensor whose extension returns something else."""

    class Wrong(Extended):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            whole = self.whole_shard()
            return ((whole,), type(self).__name__) if pre is None else pre(whole)

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None
        ) -> Any:
            (values,) = outputs
            if out is None:
                return (values, (values,)) if post is None else post(values)
            return None

    def case(run: Run) -> Callable[[], object]:
        block = Scaled().to(run.device)
        block.gain = nn.Parameter(Wrong(block.gain.detach()))
        model = run.fully_shard(nn.Sequential(run.fully_shard(block)))
        return lambda: run.step(model)

    return case


add_each(
    STEPPING,
    [
        (
            f"pre_all_gather_returns_{name}",
            f"`fsdp_pre_all_gather` returns {shown}",
            extension(pre=pre),
            kind,
            begins,
        )
        for name, shown, pre, kind, begins in (
            (
                "none",
                "`None`",
                lambda whole: None,
                TypeError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
            (
                "three",
                "three values",
                lambda whole: ((whole,), None, None),
                ValueError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
            (
                "numbers",
                "numbers",
                lambda whole: ((1, 2), None),
                AttributeError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
        )
    ],
    found="first forward",
    do="((contiguous tensor, ...), metadata)",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            "pre_all_gather_returns_nothing",
            "`fsdp_pre_all_gather` returns no tensor",
            extension(pre=lambda whole: ((), None)),
            ValueError,
            "fsdp_pre_all_gather of 0.gain returned no tensor to gather",
        )
    ],
    found="first forward",
    do="return ((tensor, ...), metadata)",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            "pre_all_gather_returns_meta",
            "`fsdp_pre_all_gather` returns a tensor on another device",
            extension(pre=lambda whole: ((whole.to("meta"),), None)),
            RuntimeError,
            "fsdp_pre_all_gather of 0.gain failed, or did not return tensors on",
        )
    ],
    found="first forward",
    do="return tensors on",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            f"post_all_gather_returns_{name}",
            f"`fsdp_post_all_gather` returns {shown}",
            extension(post=post),
            kind,
            "fsdp_post_all_gather of 0.gain failed, or did not return",
        )
        for name, shown, post, kind in (
            ("none", "`None`", lambda values: None, TypeError),
            ("one", "a tensor alone", lambda values: values, ValueError),
            (
                "too_little",
                "too small a tensor",
                lambda values: (values[:1].clone(), (values,)),
                RuntimeError,
            ),
            (
                "meta",
                "a tensor on another device",
                lambda values: (values.to("meta"), (values,)),
                ValueError,
            ),
            (
                "nothing_to_free",
                "`None` for the tensors to free",
                lambda values: (values, None),
                TypeError,
            ),
        )
    ],
    found="first forward",
    do="(tensor, (tensor to free, ...))",
    about="0.gain",
)


def table() -> list[str]:
    """Returns the page's lines that tell of all rows."""
    lines = []
    for section, names in SECTIONS.items():
        lines += ["", f"## {section}", ""]
        lines += [
            "| wrong use | when it is found | the error's beginning | what to do |"
        ]
        lines += ["|---|---|---|---|"]
        for name in names:
            lines.append(f"| {' | '.join(WRONG_USES[name].cells())} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
