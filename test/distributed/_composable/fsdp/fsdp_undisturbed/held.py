"""
Prints as JSON what hangs on the modules and parameters of sharded units, what comes of
copying and saving them, and what a part of a model keeps alive.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = 2


def train(steps: int) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (RANKS,))
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
    return model


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


def load_into_copy(part: nn.Linear) -> str:
    """Returns what zeros are loaded into, if they are loaded into a copy."""
    copied, zeros = copy.deepcopy(part), torch.zeros_like(part.weight)
    copied.load_state_dict({"weight": zeros}, strict=False)
    is_zero = [bool((p.weight.to_local() == 0).all()) for p in (copied, part)]
    return f"copy {is_zero[0]}, part {is_zero[1]}"


def examine(steps: int) -> dict[str, Any]:
    model = train(steps)
    block = model[0]
    part, sibling = block
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
        "another unit": weakref.ref(model[1]),
        "part": weakref.ref(part),
    }
    del model, block, sibling, things, thing
    gc.collect()
    found["a part keeps"] = [name for name, ref in others.items() if ref() is not None]
    del part
    gc.collect()
    found["left"] = [name for name, ref in others.items() if ref() is not None]
    return found


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(json.dumps({f"after {steps} steps": examine(steps) for steps in (0, 2)}))


if __name__ == "__main__":
    main()
