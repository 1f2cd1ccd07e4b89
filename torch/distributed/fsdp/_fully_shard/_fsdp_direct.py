"""
Direct parameters, which :func:`set_coalesced_collectives` gathers and reduces uncopied.

[Note: Direct gathers]
A direct parameter's shard is sent as it is, or cast, and received in the memory of its
unsharded parameter, piece by piece (see [Note: Pieces]). One grouped call gathers all
pieces, and the buffer of the unit's other parameters.

The all-gather's stream writes this memory, and so it is allocated there. At reshard
compute still reads it. It is freed after the next gather has been started: only then
does the gather stream wait for compute. So the memory of two units rotates. A unit that
is gathered before is gathered into temporaries, and copied. Outside of a step, reshard
waits and frees at once. A context only lists memory to free: contexts may be replaced.

[Note: Direct reductions]
The gradient of a direct parameter that is sharded evenly is the input of its
reduce-scatter, whose output is the parameter's slot in the bucket's output. One grouped
call reduces these, and the rows of those that are packed between them. A gradient that is
not contiguous, or shares memory that backward may overwrite with, say, an activation's
gradient, is copied: one rank alone knows that, so it must change no collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._fsdp_layout import count_pieces
from ._fsdp_param import FSDPParam


_MAX_MEMBERS = 32  # of a grouped call, for one parameter


def shards_evenly(fsdp_param: FSDPParam) -> bool:
    num_ranks = getattr(fsdp_param.mesh_info, "shard_mesh_size", 1)
    return fsdp_param._orig_size[fsdp_param.fsdp_placement.dim] % num_ranks == 0


def can_be_direct(param: FSDPParam, dtype: torch.dtype, min_nbytes: int | None) -> bool:
    """Whether the unsharded tensor has ``min_nbytes`` in ``dtype``, and few pieces."""
    if min_nbytes is None or not 0 < count_pieces(param, dtype) <= _MAX_MEMBERS:
        return False
    return param._orig_size.numel() * dtype.itemsize >= max(min_nbytes, 1)


def alloc_storages(storages: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    """Allocates freed storages again, each with its number of bytes."""
    for storage, nbytes in storages:
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)


def split(tensors: Iterable[torch.Tensor], counts: Iterable[int]) -> list[torch.Tensor]:
    """Returns the pieces of 1D tensors, so many of each."""
    pieces: list[torch.Tensor] = []
    for tensor, count in zip(tensors, counts):
        pieces += tensor.view(count, -1).unbind() if count > 1 else (tensor,)
    return pieces


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor may share the memory of ``tensor``."""
    storage = tensor.untyped_storage()
    num_owners = torch._C._storage_Use_Count(storage._cdata)
    return num_owners > 2 or storage.nbytes() != tensor.nbytes  # `storage` is one


class DirectMemory:
    """The unsharded memory of a group's direct parameters, while it is allocated."""

    def __init__(self) -> None:
        self.min_nbytes: int | None = None  # None: no parameter is direct
        # That of the next gather, which may not be direct
        self.gather_min_nbytes: int | None = None
        # By address: storages that a direct gather has allocated, with their parameters
        self.allocated: dict[int, tuple[torch.UntypedStorage, Any]] = {}
        self._stream: Any = None  # that allocated it
        # Since reshard: the stream that read it last, and the event after that
        self._last_read: tuple[torch.Stream, torch.Event] | None = None
        # The outputs of the last plan's direct parameters
        self._plan: Any = None
        self._outputs: list[torch.Tensor] = []

    def prepare(
        self, fsdp_params: list[Any], plan: Any, world_size: int, stream: torch.Stream
    ) -> tuple[list[torch.Tensor], tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """
        Returns what to gather into, in ``stream``: the 1D pieces of all-gather outputs or,
        if these are still allocated, of temporaries. Then also returns what to copy.
        """
        if self._plan is not plan:
            with torch.inference_mode(False):  # see `wait_for_unshard`
                for i, _ in plan.direct:
                    args = plan.numels[i], plan.dtypes[i], world_size
                    fsdp_params[i].init_all_gather_outputs(*args, fsdp_params[i].device)
            self._plan = plan
            outputs = [fsdp_params[i].all_gather_outputs[0] for i, _ in plan.direct]
            self._outputs = [output.data for output in outputs]  # see `_make_columns`
        if self.allocated:
            temporaries = [*map(torch.empty_like, self._outputs)]
            pieces = split(temporaries, plan.direct_pieces)
            return pieces, (self._outputs, temporaries)
        storages = [output.untyped_storage() for output in self._outputs]
        alloc_storages(zip(storages, [output.nbytes for output in self._outputs]))
        owners = [fsdp_params[i] for i, _ in plan.direct]
        self.allocated = {s._cdata: (s, p) for s, p in zip(storages, owners)}
        self._stream = stream
        return split(self._outputs, plan.direct_pieces), ([], [])

    def end_use(self, stream: torch.Stream) -> bool:
        """Called once ``stream`` reads no more. Returns whether memory is to be freed."""
        if self.allocated:
            self._last_read = stream, stream.record_event()
            if stream == self._stream:
                self.free()
        return self._last_read is not None

    def begin_use(self, stream: torch.Stream) -> None:
        """Called before ``stream`` uses the memory, which must not be freed from now on."""
        if self._last_read is not None and self._last_read[0] != stream:
            stream.wait_event(self._last_read[1])
        self._last_read = None

    def free(self) -> None:
        """Frees memory that no stream uses after a reshard, unless users keep it."""
        if self._last_read is None:
            return
        self._stream.wait_event(self._last_read[1])
        self._last_read = None
        for key, (storage, fsdp_param) in [*self.allocated.items()]:
            if not getattr(fsdp_param, "keep_unsharded_storage", False):  # since 2.15
                storage.resize_(0)
                del self.allocated[key]
