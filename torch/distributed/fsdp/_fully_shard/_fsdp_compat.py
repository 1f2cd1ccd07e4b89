"""
Names of the release that only plugins and trainers use: each says who does. None takes
part in a step until somebody calls, sets or replaces it. For uniform units they behave
as in the release. Of mixed units they say what is true, or refuse to say.
"""

# Tests: plugins
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import get_all_gather_inputs, get_shards, has_extension
from ._fsdp_releases import IS_2_14


@torch.no_grad()
def _get_param_all_gather_inputs(
    fsdp_params: list[FSDPParam],
) -> list[list[torch.Tensor]]:
    """
    Returns each parameter's 1D all-gather inputs, cast. Called and replaced by
    torchtitan-npu, torch_musa, XTuner, ODC, torch_npu: what a replacement returns is
    gathered, in parameter order.
    """
    inputs: list[list[torch.Tensor]] = []
    # Plain shards on the device are cast at once, as in the release
    casts: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for fsdp_param in fsdp_params:
        dtype = fsdp_param.param_dtype
        if dtype is None or fsdp_param.offload_to_cpu or has_extension(fsdp_param):
            inputs.append(get_all_gather_inputs(fsdp_param))
            continue
        (shard,) = get_shards([fsdp_param])
        targets, shards = casts.setdefault(dtype, ([], []))
        targets.append(shard.new_empty(shard.size(), dtype=dtype))
        shards.append(shard)
        inputs.append(targets[-1:])
    for targets, shards in casts.values():
        torch._foreach_copy_(targets, shards)
    return inputs


def _get_all_gather_input_metadatas(
    param_all_gather_inputs: list[list[torch.Tensor]],
) -> tuple[list[list[torch.dtype]], list[list[int]], torch.dtype]:
    """
    Returns each input's dtype and number of elements, and the dtype of a buffer for all
    of them: their common one, else uint8. Called and replaced by the same.
    """
    dtypes = [[tensor.dtype for tensor in own] for own in param_all_gather_inputs]
    numels = [[tensor.numel() for tensor in own] for own in param_all_gather_inputs]
    return dtypes, numels, _common([*chain(*dtypes)]) or torch.uint8


class PluginNames:
    """A mixin: plugins find these names on a group, or replace them on its class."""

    # Storage dtype and reduce dtype of the trainable parameters, None for several or
    # none. Read by tests and by trainers that check gradients.
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None

    def _init_mp_dtypes(self: Any) -> None:
        """Replaced by NVIDIA ModelOpt, ms-swift and UniRL; some call this one."""
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        counted = [p for p in self.fsdp_params if p.sharded_param.requires_grad]
        if not counted and IS_2_14:
            counted = [p for p in self.fsdp_params if p.orig_dtype.is_floating_point]
        self._orig_dtype = _common([p.orig_dtype for p in counted])
        self._reduce_dtype = _common([p.reduce_dtype for p in counted])

    @property
    def _replaces_init_dtypes(self: Any) -> bool:
        return getattr(self._init_mp_dtypes, "__func__", None) is not _OWN_INIT

    def _call_init_mp_dtypes(self: Any) -> None:
        self._init_mp_dtypes()
        for fsdp_param in self.fsdp_params if self._replaces_init_dtypes else ():
            if fsdp_param.mp_policy is not self.mp_policy:
                # A replacement may know of one policy only
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)

    # Called by upstream's comm test, torchtitan-npu, torch_musa and ODC
    def _to_sharded(self: Any) -> None:
        self._to_state(ShardedState.SHARDED)

    def _to_sharded_post_forward(self: Any) -> None:
        self._to_state(ShardedState.SHARDED_POST_FORWARD)

    def _to_unsharded(self: Any) -> None:
        self._to_state(ShardedState.UNSHARDED)

    # Read by few
    @property
    def _all_reduce_state(self: Any) -> Any:
        all_held = self.comm_ctx.all_reduce_states
        own = [held for held in all_held if held.param_group is self]
        return own[-1].states[-1] if own else None

    @property
    def _all_gather_output(self: Any) -> torch.Tensor:
        """Of a unit of one rank, which gathers nothing: empty."""
        return torch.empty(0, device=self.device)

    # Read and set by a plugin that defers all-reduces. Since 2.15 the root refuses to
    # finalize backward by hand unless it is None.
    @property
    def _partial_reduce_output(
        self: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """
        The 1D sum of the microbatches whose all-reduce is deferred, None without any; a
        tuple where a mixed unit has several. May be set, to None or as many elements.
        """
        partial_reduces = self._reducer.partial_reduces.values()
        outputs = tuple(partial.output for partial in partial_reduces)
        return outputs if len(outputs) > 1 else next(iter(outputs), None)

    @_partial_reduce_output.setter
    def _partial_reduce_output(self: Any, output: torch.Tensor | None) -> None:
        if output is None:
            self._reducer.partial_reduces.clear()
            return
        try:
            self._reducer.set_partial_reduce(output)
        except ValueError as error:
            name = f"_partial_reduce_output of unit '{self._unit_name}'"
            raise ValueError(f"{name} {error}") from None


_OWN_INIT = PluginNames._init_mp_dtypes


def _common(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Returns the dtype that all have, None if they have several."""
    return dtypes[0] if dtypes and all(d == dtypes[0] for d in dtypes) else None
