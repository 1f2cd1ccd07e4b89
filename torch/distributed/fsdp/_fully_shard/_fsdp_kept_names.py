"""
Names of the release that this branch has no use for, and that others use. Each says
who does. None of them takes part in a step until somebody calls, sets or replaces it.

[Note: Kept names]
Plugins and trainers reach into the release's two modules: they call methods of a
parameter group, read what it found out, or put a function of their own in place of
one. What they find here behaves as in the release for uniform units. Of mixed units
it says what is true, or refuses to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_release import TELLS_FROZEN_DTYPES
from ._fsdp_unit import get_shards


# Of `_fsdp_collectives` #


@torch.no_grad()
def _get_param_all_gather_inputs(
    fsdp_params: list[FSDPParam],
) -> list[list[torch.Tensor]]:
    """
    Returns each parameter's 1D all-gather inputs in the dtype that they are gathered
    in. Where it is replaced, ``foreach_all_gather`` gathers what the replacement
    returns, in parameter order.

    Used by torchtitan-npu, torch_musa, XTuner, ODC, torch_npu.
    """
    inputs: list[list[torch.Tensor]] = [[] for _ in fsdp_params]
    # Several are cast at once, where nothing else is to do with them
    cast: dict[torch.dtype, list[int]] = {}
    for i, fsdp_param in enumerate(fsdp_params):
        has_extension = hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
        dtype = fsdp_param.param_dtype
        if dtype is None or has_extension or fsdp_param.offload_to_cpu:
            inputs[i] = fsdp_param.all_gather_inputs
        else:
            cast.setdefault(dtype, []).append(i)
    for dtype, members in cast.items():
        shards = get_shards([fsdp_params[i] for i in members])
        numels = [shard.numel() for shard in shards]
        flat = torch.empty(sum(numels), dtype=dtype, device=shards[0].device)
        pieces = flat.split(numels)
        torch._foreach_copy_(pieces, shards)
        for i, piece in zip(members, pieces, strict=True):
            inputs[i] = [piece]
    return inputs


def _get_all_gather_input_metadatas(
    param_all_gather_inputs: list[list[torch.Tensor]],
) -> tuple[list[list[torch.dtype]], list[list[int]], torch.dtype]:
    """
    Returns the dtype and the number of elements of each input, and the dtype that a
    buffer for all of them has: the inputs' own if they have one, else uint8. Where it
    is replaced, ``foreach_all_gather`` calls the replacement.

    Used by torchtitan-npu, torch_musa, XTuner, ODC, torch_npu.
    """
    dtypes = [[tensor.dtype for tensor in own] for own in param_all_gather_inputs]
    numels = [[tensor.numel() for tensor in own] for own in param_all_gather_inputs]
    first = dtypes[0][0]
    is_uniform = all(dtype == first for own in dtypes for dtype in own)
    return dtypes, numels, first if is_uniform else torch.uint8


# Of `FSDPParamGroup` #


class KeptNames:
    """What others use of a parameter group, besides what the group itself uses."""

    # Storage dtype and reduce dtype of the trainable parameters, None where they
    # have several or there are none. Set at lazy init and read by trainers that
    # check gradients, and by tests; or set by a replaced `_init_mp_dtypes`.
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None

    def _init_mp_dtypes(self: Any) -> None:
        """
        Finds out the parameters' dtypes.

        Replaced by NVIDIA ModelOpt, ms-swift and UniRL, some of which call the one
        that they have replaced.
        """
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        told = [p for p in self.fsdp_params if p.sharded_param.requires_grad]
        if not told and TELLS_FROZEN_DTYPES:
            told = [p for p in self.fsdp_params if p.orig_dtype.is_floating_point]
        self._orig_dtype = _common([p.orig_dtype for p in told])
        self._reduce_dtype = _common([p.reduce_dtype for p in told])

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
        """What the last all-reduce in flight holds, None if there is none."""
        return self._all_reduce_states[-1] if self._all_reduce_states else None

    @property
    def _all_gather_output(self: Any) -> torch.Tensor:
        """Of a unit of one rank, which gathers nothing: empty."""
        return torch.empty(0, device=self.device)

    # Read and set by a plugin that puts all-reduces off; and since 2.15 by the root,
    # which refuses to finalize backward by hand unless it is None
    @property
    def _partial_reduce_output(
        self: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """
        What the microbatches whose all-reduce was put off sum to, 1D in the reduce
        dtype, None if there is nothing; a tuple where a mixed unit has several. May
        be set, to as many elements as the unit reduces or to None.
        """
        kept = [partial.output for partial in self._partial_reduces.values()]
        if len(kept) > 1:
            return tuple(kept)
        return kept[0] if kept else None

    @_partial_reduce_output.setter
    def _partial_reduce_output(self: Any, output: torch.Tensor | None) -> None:
        if output is None:
            self._partial_reduces.clear()
            return
        try:
            self._partial_reduces.put(self.fsdp_params, output)
        except ValueError as error:
            name = f"_partial_reduce_output of unit '{self._unit_name}'"
            raise ValueError(f"{name} {error}") from None


def _common(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Returns the dtype that all have, None if they have several."""
    return dtypes[0] if dtypes and all(d == dtypes[0] for d in dtypes) else None
