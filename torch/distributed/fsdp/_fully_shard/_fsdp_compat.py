"""
Names of the release that only plugins and trainers use.

A step uses none of them until somebody calls, sets or replaces it. For uniform units
they behave as in the release. Of mixed units they say what is true, or refuse to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ._fsdp_common import DDPMeshInfo
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import get_all_gather_inputs
from ._fsdp_releases import IS_2_14
from ._fsdp_settings import as_mesh


@torch.no_grad()
def _get_param_all_gather_inputs(
    fsdp_params: list[FSDPParam],
) -> list[list[torch.Tensor]]:
    """
    Returns each parameter's 1D all-gather inputs, cast. torchtitan-npu, torch_musa,
    XTuner, ODC and torch_npu call and replace it. What a replacement returns is gathered
    in parameter order.
    """
    return [get_all_gather_inputs(fsdp_param) for fsdp_param in fsdp_params]


def _get_all_gather_input_metadatas(
    param_all_gather_inputs: list[list[torch.Tensor]],
) -> tuple[list[list[torch.dtype]], list[list[int]], torch.dtype]:
    """
    Returns each input's dtype and number of elements, and the dtype of a buffer for all
    of them: their common one, else uint8. The same plugins call and replace it.
    """
    dtypes = [[tensor.dtype for tensor in p] for p in param_all_gather_inputs]
    numels = [[tensor.numel() for tensor in p] for p in param_all_gather_inputs]
    return dtypes, numels, _common([*chain(*dtypes)]) or torch.uint8


class PluginNames:
    """A mixin: plugins find these names on a group, or replace them on its class."""

    # Of the trained parameters; None without any, and where they have several dtypes.
    # Tests and trainers that check gradients read them.
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None

    def _init_mp_dtypes(self: Any) -> None:
        """NVIDIA ModelOpt, ms-swift and UniRL replace it, and some then call this one."""
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        params = [p for p in self.fsdp_params if p.sharded_param.requires_grad]
        if not params and IS_2_14:
            params = [p for p in self.fsdp_params if p.orig_dtype.is_floating_point]
        self._orig_dtype = _common([p.orig_dtype for p in params])
        self._reduce_dtype = _common([p.reduce_dtype for p in params])

    @property
    def _plugin_sets_dtypes(self: Any) -> bool:
        own = PluginNames._init_mp_dtypes
        return getattr(self._init_mp_dtypes, "__func__", None) is not own

    def _wait_all_gather_streams_on_event(self: Any, event: torch.Event | None) -> None:
        """The release's ``wait_for_unshard``, which plugins change, calls it."""
        self.comm_ctx.wait_all_gather_streams_on_event(event)

    # Upstream's comm test, torchtitan-npu, torch_musa and ODC call these
    def _to_sharded(self: Any) -> None:
        self._to_state(ShardedState.SHARDED)

    def _to_sharded_post_forward(self: Any) -> None:
        self._to_state(ShardedState.SHARDED_POST_FORWARD)

    def _to_unsharded(self: Any) -> None:
        self._to_state(ShardedState.UNSHARDED)

    # Few plugins read these
    @property
    def is_sharded_post_forward(self: Any) -> bool:
        return self._sharded_state is ShardedState.SHARDED_POST_FORWARD

    @property
    def _all_reduce_process_group(self: Any) -> torch.distributed.ProcessGroup:
        return as_mesh(self.mesh_info, DDPMeshInfo).replicate_process_group

    @property
    def _all_reduce_state(self: Any) -> Any:
        held = [h for h in self.comm_ctx.all_reduce_states if h.param_group is self]
        return held[-1].state if held else None

    @property
    def _all_gather_output(self: Any) -> torch.Tensor:
        """Empty, as in a unit of one rank, which gathers nothing."""
        return torch.empty(0, device=self.device)

    @property
    def _partial_reduce_output(self: Any) -> Any:
        """
        The 1D sum of the microbatches whose all-reduce is deferred, None without any; a
        tuple where a mixed unit has several. A plugin that defers all-reduces sets it to
        None or as many elements. Since 2.15 the root refuses to finalize backward by
        hand unless it is None.
        """
        outputs = tuple(p.output for p in self._partial_reduces.values())
        return outputs if len(outputs) > 1 else next(iter(outputs), None)

    @_partial_reduce_output.setter
    def _partial_reduce_output(self: Any, output: torch.Tensor | None) -> None:
        if output is None:
            self._partial_reduces.clear()
        else:
            self._partial_reduces.assign(self, output)


def _common(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Returns the dtype that all have, None if they have several."""
    return dtypes[0] if dtypes and all(d == dtypes[0] for d in dtypes) else None
