"""
Names of the release that only plugins and trainers use, and how units gather and reduce
whose functions they have replaced: with the release's arguments, a bucket at a time.

A step uses none of it until somebody calls, sets or replaces it. For uniform units names
behave as in the release. Of mixed units they say what is true, or refuse to say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import _fsdp_layout as layouts
from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from ._fsdp_comms import allocates_anew
from ._fsdp_grads import make_slot
from ._fsdp_layout import ReduceBucket
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import get_all_gather_inputs
from ._fsdp_reduce import (
    _default_reduce_scatter_input_fn,
    BucketGrads,
    copy_in_grads,
    foreach_reduce_scatter_copy_in,
    reduce_buckets,
    Reduction,
)
from ._fsdp_releases import RELEASE
from ._fsdp_settings import as_mesh


class AllReduceState(NamedTuple):
    """A bucket's reduced buffer, which its all-reduce uses until ``event``."""

    all_reduce_input: Tensor
    event: torch.Event | None


class PluginNames:
    """A mixin: plugins find these names on a group, or replace them on its class."""

    # The trained parameters' dtypes: None without any, and where they have several.
    # Tests and trainers that check gradients read them.
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None

    def _init_mp_dtypes(self: Any) -> None:
        """NVIDIA ModelOpt, ms-swift and UniRL replace it, and some then call this one."""
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        params = [p for p in self.fsdp_params if p.sharded_param.requires_grad]
        if not params and RELEASE.names_frozen_dtypes:
            params = [p for p in self.fsdp_params if p.orig_dtype.is_floating_point]
        self._orig_dtype = _common([p.orig_dtype for p in params])
        self._reduce_dtype = _common([p.reduce_dtype for p in params])

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
    def _all_gather_process_group(self: Any) -> dist.ProcessGroup:
        as_mesh(self.mesh_info, FSDPMeshInfo)
        return self._get_gather_group()

    @property
    def _all_reduce_process_group(self: Any) -> dist.ProcessGroup:
        return as_mesh(self.mesh_info, DDPMeshInfo).replicate_process_group

    @property
    def _all_reduce_state(self: Any) -> Any:
        ours = [s for s in self.comm_ctx.all_reduce_states if s.param_group is self]
        return AllReduceState(ours[-1].buffers[-1], ours[-1].event) if ours else None

    @property
    def _all_gather_output(self: Any) -> torch.Tensor:
        """Empty, as in a unit of one rank, which gathers nothing."""
        return torch.empty(0, device=self.device)

    @property
    def _partial_reduce_output(self: Any) -> Any:
        """
        The 1D partial reduce, None without any, a tuple if there are several. A plugin
        that defers all-reduces sets it to None or as many elements. Since 2.15 the root
        refuses to finalize backward by hand unless it is None.
        """
        outputs = tuple(output for _, output in self._partial_reduces.values())
        return outputs if len(outputs) > 1 else next(iter(outputs), None)

    @_partial_reduce_output.setter
    def _partial_reduce_output(self: Any, output: torch.Tensor | None) -> None:
        if output is None:
            self._partial_reduces.clear()
        else:
            self._partial_reduces.assign(self, output)


@torch.no_grad()
def _get_param_all_gather_inputs(fsdp_params: list[FSDPParam]) -> list[list[Tensor]]:
    """
    Returns each parameter's 1D all-gather inputs, cast. torchtitan-npu, torch_musa,
    XTuner, ODC and torch_npu call and replace it. Its results are gathered in order.
    """
    return [get_all_gather_inputs(fsdp_param) for fsdp_param in fsdp_params]


def _get_all_gather_input_metadatas(
    param_all_gather_inputs: list[list[Tensor]],
) -> tuple[list[list[torch.dtype]], list[list[int]], torch.dtype]:
    """
    Returns each input's dtype and number of elements, and the dtype of a buffer for all
    of them: their common one, else uint8. The same plugins call and replace it.
    """
    dtypes = [[tensor.dtype for tensor in p] for p in param_all_gather_inputs]
    numels = [[tensor.numel() for tensor in p] for p in param_all_gather_inputs]
    return dtypes, numels, _common([*chain(*dtypes)]) or torch.uint8


def stage_inputs(
    param_inputs: list[list[Tensor]],
    metadatas: tuple[list, list, torch.dtype],
    group: dist.ProcessGroup,
    device: torch.device,
    comm: AllGather,
) -> tuple[Tensor, Tensor, tuple[list, list, list[int]]]:
    """
    Returns buffer and segment (1D) and the last fields of a gather's result, given the
    results of the two functions above, of which a plugin has replaced one.
    """
    (dtypes, numels, dtype), inputs = metadatas, [*chain.from_iterable(param_inputs)]
    if dtype == torch.uint8:
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
    split_sizes = [tensor.numel() for tensor in inputs]
    numel = sum(split_sizes)
    output = comm.allocate((group.size() * numel,), dtype=dtype, device=device)
    args = inputs, output, split_sizes, numel, group.rank()
    segment, output = torch.ops.fsdp.all_gather_copy_in(*args)
    return output, segment, (dtypes, numels, split_sizes)


def check_uniform(dtypes: Sequence[list[torch.dtype]], params: list[FSDPParam]) -> None:
    """Raises if a custom ``all_gather_output_fn`` would get several dtypes."""
    if len({*chain(*dtypes)}) > 1:
        names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in params)
        fault = "_all_gather_output_fn needs units of one dtype"
        raise NotImplementedError(f"{fault}, not {names}")


def get_copy_out_options(default: Any, output_fn: Any) -> dict[str, Any]:
    """Returns the options of a copy-out that plugins have replaced in part."""
    return {} if output_fn is default else {"all_gather_output_fn": output_fn}


class CopyInPlugins(NamedTuple):
    """The functions of the copy-in, of which plugins have replaced one or both."""

    copy_in: Callable[[list[Tensor], Tensor, int], None]
    prepare: Callable[[list[FSDPParam], list[Tensor], int], Sequence[torch.Size]]

    def prepare_part(self, part: BucketGrads, world_size: int) -> None:
        """Lets a plugin prepare gradients, and gives the bucket their new sizes."""
        if self.prepare is _default_reduce_scatter_input_fn:
            return
        sizes = self.prepare(part.fsdp_params, part.unsharded_grads, world_size)
        numels = [size.numel() // world_size for size in sizes]
        slots = [
            replace(slot, shard_numel=numel, shard_dim=0, num_pieces=1)
            for slot, numel in zip(part.bucket.slots, numels, strict=True)
        ]
        part.bucket = replace(part.bucket, slots=tuple(slots))

    def copy_in_part(self, part: BucketGrads, buffer: Tensor, world_size: int) -> None:
        """Fills ``buffer`` (1D). A plugin gets gradients of one dtype, sharded on dim 0."""
        grads = part.unsharded_grads
        if self.copy_in is foreach_reduce_scatter_copy_in:
            copy_in_grads(part.bucket, grads, buffer.view(world_size, -1))
            return
        if self.prepare is _default_reduce_scatter_input_fn:
            self.prepare(part.fsdp_params, grads, world_size)
        if any(grad.dtype != grads[0].dtype for grad in grads):
            grads[:] = [grad.to(buffer.dtype) for grad in grads]
        self.copy_in(grads, buffer, world_size)


# Fields of `BucketGrads` that `foreach_reduce` returns, after the reduce-scatter's input
_IN_FLIGHT = "reduce_scatter_event", "post_reduce_stream", "post_reduce_event"
_IN_FLIGHT += "all_reduce_input", "all_reduce_event", "partial_reduce_output"
_DEFAULTS = foreach_reduce_scatter_copy_in, _default_reduce_scatter_input_fn
DEFAULT_COPY_IN = CopyInPlugins(*_DEFAULTS)


def foreach_reduce(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[Tensor],
    reduce_scatter_group: dist.ProcessGroup | None,
    reduce_scatter_stream: torch.Stream,
    reduce_scatter_comm: ReduceScatter,
    orig_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    gradient_divide_factor: float | None,
    all_reduce_group: dist.ProcessGroup | None,
    all_reduce_stream: torch.Stream,
    all_reduce_grads: bool,
    partial_reduce_output: Tensor | None,
    all_reduce_hook: Callable[[Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
    *,
    prepare_reduce_scatter_inputs: Callable | None = _default_reduce_scatter_input_fn,
    copy_in: Callable[[list[Tensor], Tensor, int], None],
) -> tuple[Any, ...]:
    """
    Reduces gradients in one reduce dtype, by default the one they share, and accumulates
    them in the sharded parameters, in each one's ``grad_dtype``; ignores ``orig_dtype``.
    Plugins and tests call it; a step calls :func:`reduce_buckets`.

    Empties ``unsharded_grads`` once copied. ``all_reduce_grads=False`` returns the sum so
    far (1D, laid out as ``fsdp_params``) for the next call to add.
    """
    prepare = prepare_reduce_scatter_inputs or _default_reduce_scatter_input_fn
    plugins = CopyInPlugins(copy_in, prepare)
    scatter = reduce_scatter_group, reduce_scatter_stream, reduce_scatter_comm
    all_reduce = all_reduce_group, all_reduce_stream, all_reduce_grads, all_reduce_hook
    scaling = gradient_divide_factor, force_sum_reduction_for_comms
    reduction = Reduction(
        *(*scatter, *all_reduce, *scaling, device),
        plugins=None if plugins == DEFAULT_COPY_IN else plugins,
        clones_output=not allocates_anew(reduce_scatter_comm),
    )
    grad_dtypes = [grad.dtype for grad in unsharded_grads]
    bucket = _plan_one_bucket(fsdp_params, grad_dtypes, reduce_dtype)
    part = BucketGrads(fsdp_params, bucket, unsharded_grads, partial_reduce_output)
    plugins.prepare_part(part, reduction.shard_world_size)
    reduce_buckets(reduction, [part])
    if part.all_reduce_input is None:
        part.all_reduce_event = None
    return part.inputs[0], *(vars(part)[name] for name in _IN_FLIGHT)


_HIDDEN = "copy_in", RELEASE.lacking_argument
_signature = inspect.signature(foreach_reduce)
_parameters = [p for p in _signature.parameters.values() if p.name not in _HIDDEN]
_REDUCE_SIGNATURE = _signature.replace(parameters=_parameters)


def fit_release(get_copy_in: Callable[[], Any]) -> Callable[..., tuple[Any, ...]]:
    """
    Returns :func:`foreach_reduce` with the release's arguments: None for the one that it
    lacks, and the copy-in that plugins may have replaced by the time of a call.
    """

    @functools.wraps(foreach_reduce)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        arguments: dict[str, Any] = dict(zip(_HIDDEN, (get_copy_in(), None)))
        arguments |= _REDUCE_SIGNATURE.bind(*args, **kwargs).arguments
        return foreach_reduce(**arguments)

    call.__signature__ = _REDUCE_SIGNATURE  # pyrefly: ignore [missing-attribute]
    return call


def reduce_monkeypatched(
    replacement: Callable[..., Any],
    prepare: Callable[..., Any],
    reduction: Reduction,
    parts: Sequence[BucketGrads],
) -> None:
    """Reduces buckets by a plugin's replacement of :func:`foreach_reduce`."""
    names = _REDUCE_SIGNATURE.parameters
    for part in parts:
        values = vars(reduction) | vars(part)
        values["prepare_reduce_scatter_inputs"] = prepare
        values["reduce_dtype"] = part.bucket.dtype
        values["orig_dtype"] = _common([dtype for dtype, _ in part.bucket.runs])
        bound = _REDUCE_SIGNATURE.bind(**{name: values[name] for name in names})
        reduce_input, *in_flight = replacement(*bound.args, **bound.kwargs)
        part.unsharded_grads = []  # the plugin may not have emptied it
        part.inputs = [] if reduce_input is None else [reduce_input]
        vars(part).update(zip(_IN_FLIGHT, in_flight, strict=True))


def _plan_one_bucket(
    fsdp_params: Sequence[FSDPParam],
    grad_dtypes: Sequence[torch.dtype],
    reduce_dtype: torch.dtype | None,
) -> ReduceBucket:
    """Plans the bucket of a caller. Raises if the gradients do not fit in one."""
    dtypes = [layouts.reduce_dtype_of(dtype, reduce_dtype) for dtype in grad_dtypes]
    keys = [*map(layouts.bucket_key, fsdp_params, dtypes)]
    if len({*keys}) != 1:
        names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in fsdp_params)
        found = " and ".join(dict.fromkeys(map(layouts.describe_key, keys))) or "none"
        fix = "pass reduce_dtype, or reduce them in several calls"
        raise AssertionError(f"Gradients of {names} would be reduced in {found}: {fix}")
    slots = (make_slot(i, p, dtypes[0]) for i, p in enumerate(fsdp_params))
    return ReduceBucket(keys[0], tuple(slots))


def _common(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Returns the dtype that all have, None if they have several."""
    return dtypes[0] if dtypes and dtypes.count(dtypes[0]) == len(dtypes) else None
