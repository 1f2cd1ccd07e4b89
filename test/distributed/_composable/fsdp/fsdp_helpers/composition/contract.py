"""
What the rest of torch, vendors and users find of FSDP's modules and of sharded ones:
names, signatures and attributes, what comes of copies, and what a part keeps alive.
"""

import contextlib
import copy
import gc
import inspect
import io
import itertools
import pickle
import sys
import typing
import weakref
from types import ModuleType
from typing import Any
from unittest import mock

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common.parity_layers import FP32
from fsdp_helpers.common.scenarios import IS_BRANCH

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.testing._internal.distributed.fake_pg import FakeStore


PACKAGE = "torch.distributed.fsdp._fully_shard"
MODULES = {
    "_fsdp_collectives": _fsdp_collectives,
    "_fsdp_param_group": _fsdp_param_group,
}
# Files that the release has as well
RELEASED = (*MODULES, "_fsdp_api", "_fsdp_common", "_fsdp_param", "_fully_shard")
RANKS = 4


def parameters_of(function: Any) -> list[tuple[str, str, str]]:
    """Returns name, kind and default of each, without what it is annotated with."""
    if inspect.isclass(function) and issubclass(function, (dict, list)):
        return []  # as its builtin base
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        default = getattr(default, "__name__", repr(default))
        found.append((name, parameter.kind.name, default))
    return found


def is_defined_here(value: Any, module: ModuleType) -> bool:
    """Whether a module defines what it has, or the branch does so in a new file."""
    where = getattr(value, "__module__", None) or ""
    is_new = where.startswith(PACKAGE) and where.rpartition(".")[2] not in RELEASED
    return where == module.__name__ or is_new


def signatures() -> dict[str, Any]:
    """Returns those of all public functions, classes and methods."""
    found = {}
    for module in MODULES.values():
        for name, value in vars(module).items():
            is_public = name[0] != "_" and callable(value)
            if not is_public or not is_defined_here(value, module):
                continue
            found[name] = parameters_of(value)
            methods = inspect.getmembers(value, inspect.isfunction)
            for method_name, method in methods if inspect.isclass(value) else ():
                if method_name == "__call__" or method_name[0] != "_":
                    found[f"{name}.{method_name}"] = parameters_of(method)
    return found


def is_pythons(name: str, value: Any) -> bool:
    """Whether it is the standard library's, which others import from there."""
    if inspect.isclass(value) or inspect.isroutine(value):
        where = value.__module__ or ""
    else:
        where = value.__name__ if inspect.ismodule(value) else ""
    return name in typing.__all__ or where.partition(".")[0] in sys.stdlib_module_names


def names() -> dict[str, list[str]]:
    """What can be imported from each module, but for what is Python's own."""
    return {
        name: [n for n in dir(m) if n[:2] != "__" and not is_pythons(n, vars(m)[n])]
        for name, m in MODULES.items()
    }


def class_names(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """Returns names of each class, and of its instance, made with a group or nothing."""
    found = {}
    for module in MODULES.values():
        for name, value in vars(module).items():
            if not inspect.isclass(value) or not is_defined_here(value, module):
                continue
            owner: Any = value
            for args in ((), (group,)):
                with contextlib.suppress(Exception):
                    owner = value(*args)
            found[name] = [n for n in dir(owner) if not n.startswith("__")]
    return found


def described(value: Any) -> str:
    """Returns a plain value, or what kind of value it is and how many it holds."""
    if inspect.isroutine(value):
        return "callable"
    if isinstance(value, (list, tuple, dict)):
        kind = next(k for k in (list, tuple, dict) if isinstance(value, k))
        return f"{kind.__name__} of {len(value)}"
    if value is None or isinstance(value, (bool, int, float, str, torch.device)):
        return repr(value)
    return type(value).__name__


def sharded(kind: str, mesh: DeviceMesh) -> layers.Stack:
    model = layers.stack((FP32, FP32 if kind == "uniform" else layers.BF16))
    return layers.shard_stack(model, mesh=mesh, reshard_after_forward=True)


def train(model: nn.Module, steps: int) -> nn.Module:
    for step in range(steps):
        layers.loss_of(model(layers.batch_of(step))).backward()
    return model


def attributes(model: nn.Module) -> dict[str, dict[str, str]]:
    """Returns those of a group and the context, initialized, private ones too."""
    (group,) = model.blocks[1]._get_fsdp_state()._fsdp_param_groups
    found: dict[str, dict[str, str]] = {}
    for title, owner in (("group", group), ("context", group.comm_ctx)):
        of_owner = found[title] = {}
        for name in dir(owner):
            if not name.startswith("__"):
                with contextlib.suppress(AssertionError):  # of another mesh
                    of_owner[name] = described(getattr(owner, name))
    found["group"]["__repr__"] = repr(group)
    return found


def stream_priorities() -> dict[str, int]:
    """Returns what the context asks of a device for each of its streams."""
    context, handle = FSDPCommContext(), mock.MagicMock()
    handle.Stream = lambda priority=0: mock.Mock(priority=priority)
    module = sys.modules[FSDPCommContext.__module__]
    with mock.patch.object(module, "_get_device_handle", return_value=handle):
        context.lazy_init(torch.device("cpu"))
    streams = {n: s for n, s in vars(context).items() if n.endswith("_stream")}
    return {name: stream.priority for name, stream in streams.items()}


def step_on_fake_tensors(kind: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the gradients' dtypes and sizes, without computing any."""
    with FakeTensorMode():
        model = train(sharded(kind, mesh), 1)
        return {
            name: (str(param.grad.dtype), list(param.grad.to_local().size()))
            for name, param in model.named_parameters()
        }


# By what gradients are divided #

SHARDS = (None, 1, 2, 3, 4, 6, 8, 32, 128)
REPLICAS = (None, 1, 2, 6)
DTYPES = ("float32", "bfloat16", "float16", "float64")
FACTORS = (None, 0.5, 1.0, 1.5, 3.0, 8.0, 48.0, 100.0)
FACTOR_CASES = [*itertools.product(SHARDS, REPLICAS, DTYPES, FACTORS, (False, True))]


class FakeGroup:
    def __init__(self, size: int):
        self.size = lambda: size


def divide_factors(case: tuple) -> list[Any]:
    """Returns two factors, the reduce-scatter's op, its scale, and the all-reduce's op."""
    *sizes, dtype, factor, force_sum = case
    groups = [None if size is None else FakeGroup(size) for size in sizes]
    before, after, *ops = _fsdp_collectives._get_gradient_divide_factors(
        *groups, getattr(torch, dtype), "cuda", factor, force_sum
    )
    shard_op, replica_op = (getattr(op, "op", op).name for op in ops)
    scale = ops[0].factor if shard_op == "PREMUL_SUM" else None
    return [before, after, shard_op, scale, replica_op]


def factors_of_branch(
    case: tuple, backend: str = "nccl", *, scales_bf16: bool = True
) -> list[Any]:
    """Returns what :func:`divide_factors` does, over groups of that backend."""
    from torch.distributed.fsdp._fully_shard import _fsdp_scaling

    names = {"backend_name": lambda *_: backend, "SCALES_BF16": scales_bf16}
    with mock.patch.multiple(_fsdp_scaling, **names):
        return divide_factors(case)


def schemas() -> dict[str, str]:
    names = "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"
    return {n: str(getattr(torch.ops.fsdp, n).default._schema) for n in names}


# Attributes and hooks of modules and parameters #


def hung_on(thing: Any) -> dict[str, Any]:
    """Returns the class of each attribute, and of what dicts of hooks hold."""
    found: dict[str, Any] = {}
    for name, value in getattr(thing, "__dict__", {}).items():
        name = name.partition("_key_")[0]  # some end with random digits
        found[name] = type(value).__name__
        if name.endswith("hooks"):
            found[name] = [type(hook).__name__ for hook in value.values()]
    return found


def tried(function: Any, *args: Any) -> str:
    """Returns what class of object comes of a call, or how its error begins."""
    try:
        return type(function(*args)).__name__
    except Exception as error:
        first_line = str(error).partition("\n")[0]  # C++'s stack comes after it
        begins, _, _ = f"{type(error).__name__}: {first_line}".partition("'")
        return begins


def save(thing: Any) -> None:
    torch.save(thing, io.BytesIO())


def load_into_copy(part: nn.Module) -> str:
    """Returns what zeros are loaded into, if they are loaded into a copy."""
    copied, zeros = copy.deepcopy(part), torch.zeros_like(part.weight)
    copied.load_state_dict({"weight": zeros}, strict=False)
    is_zero = [bool((p.weight.to_local() == 0).all()) for p in (copied, part)]
    return f"copy {is_zero[0]}, part {is_zero[1]}"


def examine(kind: str, mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """Returns what hangs on things, what copying gives, and what stays alive."""
    model = train(sharded(kind, mesh), steps)
    block = model.blocks[0]
    part, sibling = block.layers
    things = {
        "model": model,
        "unit": block,
        "part": part,
        "parameter": part.weight,
        "gradient": part.weight.grad,
        "state dict": model.state_dict(),
    }
    found: dict[str, Any] = {}
    if steps == 0:  # after a step, the release cannot copy it either
        found["loaded"] = load_into_copy(part)
    for name, thing in things.items():
        found[name] = hung_on(thing)
        for function in (copy.copy, copy.deepcopy, pickle.dumps, save):
            found[f"{function.__name__} of {name}"] = tried(function, thing)
    others = {
        "another part": weakref.ref(sibling),
        "its weight": weakref.ref(sibling.weight),
        "another unit": weakref.ref(model.blocks[1]),
        "part": weakref.ref(part),
    }
    del model, block, sibling, things, thing
    gc.collect()
    found["a part keeps"] = [name for name, ref in others.items() if ref() is not None]
    del part
    gc.collect()
    found["left"] = [name for name, ref in others.items() if ref() is not None]
    return found


def find_all() -> dict[str, dict[str, Any]]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {
        "signatures": signatures(),
        "names": names(),
        "class names": class_names(mesh.get_group()),
        "schemas": schemas(),
        "priorities": stream_priorities(),
        "divide factors": [] if IS_BRANCH else [*map(divide_factors, FACTOR_CASES)],
        # Asked by functorch of whatever a unit's inputs pass through
        "has_vmap_rule": _fsdp_param_group.RegisterPostBackwardFunction.generate_vmap_rule,
    }
    for kind in ("uniform", "mixed") if IS_BRANCH else ("uniform",):
        held = {f"held after {n} steps": examine(kind, mesh, n) for n in (0, 2)}
        fake = {"fake": step_on_fake_tensors(kind, mesh)}
        found[kind] = attributes(train(sharded(kind, mesh), 1)) | fake | held
    return {"contract": found}
