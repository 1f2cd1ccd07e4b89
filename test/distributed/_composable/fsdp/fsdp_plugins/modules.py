"""
What plugins do with modules and parameters: hooks of state dicts, attributes that are
set, and extensions that come late.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fsdp_common.parity_layers import (
    batch_of,
    digest,
    gradients,
    groups_of,
    Layer,
    loss_of,
    Record,
    Stack,
    stack,
)
from fsdp_plugins.runs import Place, scenario, train

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh


# Hooks of state dicts #

HANDLES = (
    "_module_to_pre_save_state_dict_hook_handle",
    "_module_to_pre_load_state_dict_hook_handle",
)


def handles_of(model: nn.Module) -> dict[str, list[Any]]:
    """Returns the modules and the kinds of handles that each group has."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for attribute in HANDLES:
        by_group = [getattr(group, attribute) for group in groups_of(model)]
        found[attribute] = [
            sorted((names[m], type(handle).__name__) for m, handle in handles.items())
            for handles in by_group
        ]
    return found


def kinds_while_unsharded(model: Stack) -> dict[str, str]:
    """Returns what a state dict has of units that are unsharded now."""
    for unit in (model, *model.blocks):
        unit.unshard()
    kinds = {name: type(value).__name__ for name, value in model.state_dict().items()}
    for unit in (model, *model.blocks):
        unit.reshard()
    return kinds


@scenario
def handles_of_state_dict_hooks(place: Place) -> Record:
    model = place.sharded()
    record: Record = {"before": handles_of(model)}
    record |= train(model, place)
    return record | {"after": handles_of(model), "kinds": kinds_while_unsharded(model)}


@scenario
def state_dict_hooks_that_are_removed(place: Place) -> Record:
    """Detaches the first block's hooks, so that it is saved as it is."""
    model = place.sharded()
    record = train(model, place)
    group = groups_of(model)[1]
    counts = []
    for attribute in HANDLES:
        handles = getattr(group, attribute)
        counts.append(len(handles))
        for handle in handles.values():
            handle.remove()
    record["kinds"] = kinds_while_unsharded(model)
    record["left"] = [
        (len(module._state_dict_pre_hooks), len(module._load_state_dict_pre_hooks))
        for module in model.modules()
        if isinstance(module, Layer)
    ]
    record |= {f"again {name}": bits for name, bits in train(model, place).items()}
    return record | {"counts": counts}


# Late changes #


def watched_layers(model: Stack) -> type[Layer]:
    """Gives all layers of the blocks a class of their own."""

    class Watched(Layer):
        pass

    for block in model.blocks:
        for layer in block.layers:
            layer.__class__ = Watched
    return Watched


@scenario
def setattr_replaced_after_lazy_init(place: Place) -> Record:
    model = stack()
    kind = watched_layers(model)
    place.sharded(model=model)
    record = train(model, place)
    calls: Counter[str] = Counter()

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[f"{name} {type(value).__name__}"] += 1
        nn.Module.__setattr__(module, name, value)

    kind.__setattr__ = set_and_count
    record |= train(model, place, steps=range(2, 4))
    return record | {"calls": dict(calls)}


@scenario
def setattr_that_is_taken_away_after_lazy_init(place: Place) -> Record:
    model = stack()
    kind = watched_layers(model)
    calls: Counter[str] = Counter()

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[name] += 1
        nn.Module.__setattr__(module, name, value)

    kind.__setattr__ = set_and_count
    place.sharded(model=model)
    record = train(model, place)
    before = dict(calls)
    del kind.__setattr__
    record |= train(model, place, steps=range(2, 4))
    return record | {"before": before, "after": dict(calls)}


class Doubled(torch.Tensor):
    """Is gathered as twice its values."""

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        plain = self.as_subclass(torch.Tensor).detach()
        return (2 * plain.contiguous(),), "doubled"

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None) -> Any:
        (gathered,) = outputs
        if out is None:
            return gathered, (gathered,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered.view_as(out))
        return None


def give_extension(model: Stack, *, is_initialized: bool) -> None:
    """Puts an extension tensor in the place of a plain parameter's local tensor."""
    group = groups_of(model)[1]
    fsdp_param = next(
        p for p in group.fsdp_params if p._module_info.param_name == "weight"
    )
    sharded = fsdp_param.sharded_param
    sharded._local_tensor = sharded._local_tensor.detach().as_subclass(Doubled)
    if is_initialized:
        fsdp_param._init_extensions()


def train_with_late_extension(place: Place, *, is_initialized: bool) -> Record:
    model = place.sharded(model=stack(dim=8))
    step = lambda i: loss_of(model(batch_of(i, place.rank, dim=8)))  # noqa: E731
    record = {"before": digest(step(0))}
    step(1).backward()
    model.zero_grad()
    give_extension(model, is_initialized=is_initialized)
    for i in (2, 3):
        try:
            loss = step(i)
            loss.backward()
        except Exception as error:  # which of them is told apart by the test
            return record | {"raised": f"{type(error).__name__}: {error}"}
        record[f"{i} loss"] = digest(loss)
        record |= {f"{i} {name}": bits for name, bits in gradients(model)}
    return record


@scenario
def extension_after_lazy_init(place: Place) -> Record:
    return train_with_late_extension(place, is_initialized=False)


@scenario
def extension_after_lazy_init_that_is_initialized(place: Place) -> Record:
    return train_with_late_extension(place, is_initialized=True)
