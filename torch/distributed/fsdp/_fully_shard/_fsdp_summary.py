"""
How a model's units are laid out, for people to look at: which parameters are
stored, computed with and reduced in which dtype, and the bytes that this sends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._fsdp_agreement import DescribedUnit
from ._fsdp_comms import declares
from ._fsdp_errors import check_has_units, check_is_module
from ._fsdp_layout import (
    bucket_sort_key,
    describe_key,
    dtype_sort_key,
    dtypes_of,
    is_mixed,
    plan_buckets,
    ReduceBucket,
    ReduceSlot,
)
from ._fsdp_param_cache import GatherPlan


# A logger of its own, so that tables can be turned off apart from the steps
_logger = logging.getLogger("torch.distributed.fsdp.fully_shard.layout")


@dataclass(frozen=True)
class ParamsSummary:
    """Parameters of a unit that have all of their dtypes in common."""

    names: tuple[str, ...]  # as seen from the unit
    numel: int
    # Their part of the buffers, over all ranks. None before the first gather of an
    # extension tensor
    gathered_nbytes: int | None
    reduced_nbytes: int
    stored_dtype: torch.dtype
    compute_dtype: torch.dtype
    # Which reduce-scatter they share, None if they are frozen
    reduce_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    # What gradients are cast to before the unit sends them, None if to the reduce dtype
    comm_dtype: torch.dtype | None
    # Of the tensors in a tensor subclass, which itself is of stored_dtype
    inner_dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class BucketSummary:
    """One reduction of a unit."""

    dtype: torch.dtype
    # Of its input, with padding: the gradients of one rank for all of them
    nbytes: int
    # What the sum over all ranks is divided by; and before and after the sum, unless
    # the collective divides
    divided_by: float
    before: float | None
    after: float | None
    comm_dtype: torch.dtype | None  # as above


@dataclass(frozen=True)
class UnitSummary:
    """What one unit gathers at once, and reduces in one collective for each dtype."""

    name: str
    params: tuple[ParamsSummary, ...]
    # Of the all-gather's output, with padding
    gathered_nbytes: int | None
    buckets: tuple[BucketSummary, ...]
    # Over how many ranks it is sharded. Between replicas, sums are sent in the reduce
    # dtype whatever the comm dtype
    shard_world_size: int
    # Classes of custom collectives before which its ranks are not compared
    uncompared: tuple[str, ...]

    def __str__(self) -> str:
        return _table([self])


@dataclass(frozen=True)
class LayoutSummary:
    """All units of a model, in the order of its modules; prints as a table."""

    units: tuple[UnitSummary, ...]

    def __str__(self) -> str:
        return _table(self.units)


def layout_summary(module: nn.Module) -> LayoutSummary:
    """
    Returns how the units of a model are laid out, to be printed or looked into.

    To be called at any time after ``fully_shard`` or ``replicate``; it sends nothing.
    Bytes are those of a collective's larger buffer, over all ranks. It shows parameters
    as they are now: a dtype or ``requires_grad`` may change until the first forward.

    Args:
        module (nn.Module): The root, or any module that has units in it.

    Raises:
        TypeError: if it is not a module.
        ValueError: if there is no unit in it.
    """
    check_is_module(module, "layout_summary")
    names: dict[Any, list[str]] = {}  # by param group
    module_names = {submodule: name for name, submodule in module.named_modules()}
    for submodule, name in module_names.items():
        # Of an `FSDPModule`, whose file imports this one
        if (get_state := getattr(type(submodule), "_get_fsdp_state", None)) is not None:
            for group in get_state(submodule)._fsdp_param_groups:
                names.setdefault(group, []).append(name or "(root)")
    check_has_units(module, names, "layout_summary")
    for group in names:
        group.resolve_by_name(module_names)
    units = (
        _summarize(group._describe(), ", ".join(of)) for group, of in names.items()
    )
    return LayoutSummary(tuple(units))


def log_layout(describe: Callable[[], DescribedUnit]) -> None:
    """Logs the table of one unit if its logger is on."""
    if _logger.isEnabledFor(logging.DEBUG):
        unit = describe()
        _logger.debug("%s", _summarize(unit, unit.fqn or "(root)"))


# Units #


def _summarize(unit: DescribedUnit, name: str) -> UnitSummary:
    gathered, gathered_nbytes = _gathered_nbytes(unit)
    members: dict[tuple, list[int]] = {}
    for i, fsdp_param in enumerate(unit.params):
        stored, compute, *reduced = dtypes_of(fsdp_param)
        if not fsdp_param.sharded_param.requires_grad:
            reduced = [None] * len(reduced)
        inner = dict.fromkeys(_inner_dtypes(fsdp_param._sharded_local_tensor))
        dtypes = stored, compute, *reduced, tuple(inner)
        members.setdefault(dtypes, []).append(i)
    rows = []
    for dtypes, of in members.items():
        _, _, reduce, _, comm, _ = dtypes
        params, sent = [unit.params[i] for i in of], reduce
        if comm is not None and unit.gather_world_size > 1:
            sent = comm
        numel = sum(p.padded_sharded_param_size.numel() for p in params)
        row = ParamsSummary(
            # Without the class of the unit's module, which the table names
            tuple(unit.names[i].partition(" of ")[0] for i in of),
            sum(fsdp_param._orig_size.numel() for fsdp_param in params),
            None if gathered is None else sum(gathered[i] for i in of),
            unit.gather_world_size * numel * sent.itemsize if sent else 0,
            *dtypes,
        )
        rows.append(row)
    rows.sort(key=_rank)
    buckets = []
    for bucket in _buckets_of(unit):
        before, after, *_ = unit.divide_factors(bucket.key)
        sent = bucket.wire_dtype if unit.gather_world_size > 1 else bucket.dtype
        nbytes = unit.gather_world_size * bucket.shard_numel * sent.itemsize
        factors = unit.divided_by, before, after
        buckets.append(BucketSummary(bucket.dtype, nbytes, *factors, bucket.comm_dtype))
    comms = unit.comms if unit.gather_world_size > 1 else ()
    uncompared = tuple(
        kind.__name__ for kind in map(type, comms) if not declares(kind, "needs_all_ranks")
    )
    return UnitSummary(
        name,
        tuple(rows),
        gathered_nbytes,
        tuple(buckets),
        unit.gather_world_size,
        uncompared,
    )


def _buckets_of(unit: DescribedUnit) -> tuple[ReduceBucket, ...]:
    """Plans the reductions of a backward that gives all trained ones a gradient."""
    slots, keys = [], []
    for i, fsdp_param in enumerate(unit.params):
        if fsdp_param.sharded_param.requires_grad:
            dtypes, numel = dtypes_of(fsdp_param), fsdp_param.padded_sharded_param_size
            slots.append(ReduceSlot(i, dtypes.grad, numel.numel()))
            keys.append((dtypes.reduce, dtypes.comm))
    return plan_buckets(slots, keys, is_mixed(unit.params))


def _inner_dtypes(tensor: torch.Tensor) -> Iterator[torch.dtype]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            yield from [*_inner_dtypes(inner)] or [inner.dtype]


def _rank(row: ParamsSummary) -> tuple:
    """Returns a sort key: buckets in the order of their reductions, then frozen ones."""
    bucket = ((0, ""),)
    if row.reduce_dtype is not None:
        bucket = bucket_sort_key((row.reduce_dtype, row.comm_dtype))
    return bucket, dtype_sort_key(row.compute_dtype), dtype_sort_key(row.stored_dtype)


def _gathered_nbytes(unit: DescribedUnit) -> tuple[list[int] | None, int | None]:
    """Returns the bytes of each parameter in a gather over all ranks, and of it all."""
    params, world_size = unit.params, unit.gather_world_size
    if world_size == 1:
        return [0] * len(params), 0
    if (plan := unit.gather_plan) is None:
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in params):
            return None, None
        dtypes = [dtypes_of(fsdp_param).compute for fsdp_param in params]
        numels = [p.padded_sharded_param_size.numel() for p in params]
        plan = GatherPlan.of(dtypes, [None] * len(dtypes), numels)
    nbytes = [
        world_size * sum(dtype.itemsize * numel for dtype, numel in zip(*of_param))
        for of_param in zip(plan.dtypes, plan.numels, strict=True)
    ]
    return nbytes, world_size * plan.layout.segment_nbytes


# Table #

# With how they are aligned
_COLUMNS = {
    "unit": "<",
    "parameters": ">",
    "elements": ">",
    "stored in": "<",
    "computes in": "<",
    "bytes gathered": ">",
    "reduced in": "<",
    "bytes reduced": ">",
    "divided by": ">",
}


def _table(units: Sequence[UnitSummary]) -> str:
    rows = [[*_COLUMNS], *([*map(_cell, row)] for unit in units for row in _rows(unit))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        columns = zip(row, _COLUMNS.values(), widths)
        cells = [f"{cell:{align}{width}}" for cell, align, width in columns]
        lines.append("  ".join(cells).rstrip())
    for kind in dict.fromkeys(kind for unit in units for kind in unit.uncompared):
        names = [unit.name for unit in units if kind in unit.uncompared]
        lines.append(
            f"Ranks are not compared before calls of {kind}, which does not set "
            f"needs_all_ranks = True: {', '.join(names)}"
        )
    return "\n".join(lines)


def _rows(unit: UnitSummary) -> Iterator[list[str | int | None]]:
    factors = {(b.dtype, b.comm_dtype): _factor(b) for b in unit.buckets}
    name, rows = unit.name, unit.params
    verb = "sent in" if unit.shard_world_size > 1 else "cast to"
    for row in rows:
        stored = " + ".join(map(_plain, row.inner_dtypes or [row.stored_dtype]))
        computed, reduced, factor = _plain(row.compute_dtype), "(frozen)", ""
        if row.reduce_dtype is not None:
            key = row.reduce_dtype, row.comm_dtype
            reduced, factor = _plain(describe_key(key, verb)), factors[key]
        gathered, sent = row.gathered_nbytes, row.reduced_nbytes
        cells = [name, len(row.names), row.numel, stored, computed, gathered]
        yield [*cells, reduced, sent, factor]
        name = ""
    if len(rows) > 1:
        count = sum(len(row.names) for row in rows)
        numel = sum(row.numel for row in rows)
        sent = sum(bucket.nbytes for bucket in unit.buckets)
        yield ["", count, numel, "all", "", unit.gathered_nbytes, "", sent, ""]


def _cell(value: str | int | None) -> str:
    if value is None:
        return "?"
    return value if isinstance(value, str) else f"{value:,}"


def _plain(dtype: object) -> str:
    return str(dtype).replace("torch.", "")


def _factor(bucket: BucketSummary) -> str:
    text = f"{bucket.divided_by:g}"
    if bucket.before in (None, 1) or bucket.after in (None, 1):
        return text
    return f"{text} ({bucket.before:g}, then {bucket.after:g})"
