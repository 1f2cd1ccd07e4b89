"""
What plugins do with modules and parameters: hooks of state dicts, attributes that are
set, and extensions that come late.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fsdp_common.parity_layers import (
    batch_of,
    gradients,
    groups_of,
    Layer,
    loss_of,
    Record,
    Stack,
    stack,
)
from fsdp_common.scenarios import Place, train
from fsdp_plugins.runs import scenario

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
def state_dict_hooks(place: Place) -> Record:
    """Detaches the first block's, so that it is saved as it is."""
    model = place.sharded()
    record: Record = {"before": handles_of(model)}
    record |= train(model, place)
    record |= {"after": handles_of(model), "kinds": kinds_while_unsharded(model)}
    for attribute in HANDLES:
        for handle in getattr(groups_of(model)[1], attribute).values():
            handle.remove()
    record["kinds without"] = kinds_while_unsharded(model)
    record["left"] = [
        (len(module._state_dict_pre_hooks), len(module._load_state_dict_pre_hooks))
        for module in model.modules()
        if isinstance(module, Layer)
    ]
    return record | {"again": train(model, place)}


# Late changes #


@scenario
def setattr_of_a_class(place: Place) -> Record:
    """Comes after lazy init, and goes again."""

    class Watched(Layer):
        pass

    model = stack()
    for block in model.blocks:
        for layer in block.layers:
            layer.__class__ = Watched
    place.sharded(model=model)
    record = train(model, place)
    calls: Counter[str] = Counter()

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[f"{name} {type(value).__name__}"] += 1
        nn.Module.__setattr__(module, name, value)

    Watched.__setattr__ = set_and_count
    record |= train(model, place, steps=range(2, 4)) | {"calls": dict(calls)}
    del Watched.__setattr__
    return record | train(model, place, steps=range(4, 6)) | {"left": dict(calls)}


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


@scenario
def extension_after_lazy_init(place: Place) -> Record:
    """Comes in the place of a plain parameter's local tensor."""
    record: Record = {}
    for is_initialized in (False, True):
        model = place.sharded(model=stack(dim=8))
        step = lambda i: loss_of(model(batch_of(i, place.rank, dim=8)))  # noqa: B023, E731
        step(1).backward()
        model.zero_grad()
        group = groups_of(model)[1]
        names = [p._module_info.param_name for p in group.fsdp_params]
        fsdp_param = group.fsdp_params[names.index("weight")]
        sharded = fsdp_param.sharded_param
        sharded._local_tensor = sharded._local_tensor.detach().as_subclass(Doubled)
        if is_initialized:
            fsdp_param._init_extensions()
        try:
            for i in (2, 3):
                step(i).backward()
            record[f"{is_initialized}"] = dict(gradients(model))
        except Exception as error:  # of each release another
            record[f"{is_initialized}"] = {"raised": isinstance(error, Exception)}
    return record
