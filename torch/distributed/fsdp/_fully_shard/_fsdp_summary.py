"""
How a model's units are laid out, for people to look at: which parameters are
stored, computed with and reduced in which dtype, and the bytes that this sends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._fsdp_comms import is_of_group
from ._fsdp_doors import DescribedUnit
from ._fsdp_layout import bucket_rank, BucketKey, dtype_rank, plan_gather
from ._fsdp_param import FSDPParam
from ._fsdp_unit import dtypes_of
from ._fully_shard import FSDPModule


# Of tables, which can be turned off apart from the steps
_logger = logging.getLogger("torch.distributed.fsdp.fully_shard.layout")


@dataclass(frozen=True)
class ParamsSummary:
    """Parameters of a unit that have all of their dtypes in common."""

    names: tuple[str, ...]  # as seen from the unit
    numel: int
    stored_dtype: torch.dtype
    compute_dtype: torch.dtype
    # Which reduce-scatter they share, None if they are frozen
    reduce_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    # Their part of the buffers, over all ranks. None as long as an extension
    # tensor has not told what it gathers.
    gathered_nbytes: int | None
    reduced_nbytes: int
    # What gradients are sent in, None if in the reduce dtype
    comm_dtype: torch.dtype | None = None
    # Of the tensors inside of a tensor subclass, which is of stored_dtype to others
    inner_dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class BucketSummary:
    """One reduction of a unit."""

    dtype: torch.dtype
    nbytes: int  # of its input: the gradients of one rank for all of them
    # What the sum over all ranks is divided by, before and after it is taken if
    # that is not left to the collective
    divided_by: float
    before: float | None
    after: float | None
    comm_dtype: torch.dtype | None = None  # as above


@dataclass(frozen=True)
class UnitSummary:
    """What one unit gathers at once, and reduces in one collective for each dtype."""

    name: str
    params: tuple[ParamsSummary, ...]
    # Of the all-gather's output, with what aligns its end
    gathered_nbytes: int | None
    buckets: tuple[BucketSummary, ...]
    # Classes of custom collectives before which its ranks are not compared
    uncompared: tuple[str, ...] = ()

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

    To be called at any time after ``fully_shard`` or ``replicate``; it sends
    nothing. Bytes are those of a collective's larger buffer, over all of the
    ranks that take part. It shows parameters as they are now: a dtype or
    ``requires_grad`` that is changed before the first forward changes it too.

    Args:
        module (nn.Module): The root, or any module that has units in it.
    """
    names: dict[Any, list[str]] = {}
    module_names = {submodule: name for name, submodule in module.named_modules()}
    for submodule, name in module_names.items():
        if isinstance(submodule, FSDPModule):
            for group in submodule._get_fsdp_state()._fsdp_param_groups:
                names.setdefault(group, []).append(name or "(root)")
    for group in names:
        group.resolve_by_name(module_names)
    return LayoutSummary(
        tuple(
            _summarize_unit(group._describe(), ", ".join(of))
            for group, of in names.items()
        )
    )


def log_layout(describe: Callable[[], DescribedUnit]) -> None:
    """Logs the table of one unit, where somebody wants it."""
    if _logger.isEnabledFor(logging.DEBUG):
        unit = describe()
        _logger.debug("%s", _summarize_unit(unit, unit.fqn or "(root)"))


def _summarize_unit(unit: DescribedUnit, name: str) -> UnitSummary:
    gathered = _gathered_nbytes(unit)
    members: dict[_Dtypes, list[int]] = {}
    for i, fsdp_param in enumerate(unit.params):
        members.setdefault(_dtypes_of(fsdp_param), []).append(i)
    rows = [
        _summarize_params(unit, positions, dtypes, gathered)
        for dtypes, positions in sorted(members.items(), key=_row_rank)
    ]
    total = None
    if gathered is not None:
        total = sum(gathered.by_param) + gathered.padding
    comms = unit.comms if unit.gather_world_size > 1 else ()
    uncompared = tuple(type(comm).__name__ for comm in comms if not is_of_group(comm))
    buckets = tuple(_buckets(unit, rows))
    return UnitSummary(name, tuple(rows), total, buckets, uncompared)


class _Dtypes(NamedTuple):
    inner: tuple[torch.dtype, ...]
    stored: torch.dtype
    compute: torch.dtype
    # None if frozen
    reduce: torch.dtype | None
    grad: torch.dtype | None
    comm: torch.dtype | None


def _dtypes_of(fsdp_param: FSDPParam) -> _Dtypes:
    inner = dict.fromkeys(_inner_dtypes(fsdp_param._sharded_local_tensor))
    dtypes = _Dtypes(tuple(inner), *dtypes_of(fsdp_param))
    if not fsdp_param.sharded_param.requires_grad:
        return dtypes._replace(reduce=None, grad=None, comm=None)
    return dtypes


def _inner_dtypes(tensor: torch.Tensor) -> Iterator[torch.dtype]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            yield from [*_inner_dtypes(inner)] or [inner.dtype]


def _row_rank(item: tuple[_Dtypes, list[int]]) -> tuple:
    dtypes, positions = item
    # By bucket, in the order of their reductions; frozen ones last
    bucket = ((0, ""),)
    if dtypes.reduce is not None:
        bucket = bucket_rank((dtypes.reduce, dtypes.comm))
    return bucket, dtype_rank(dtypes.compute), dtype_rank(dtypes.stored), positions


def _summarize_params(
    unit: DescribedUnit,
    positions: Sequence[int],
    dtypes: _Dtypes,
    gathered: _Gathered | None,
) -> ParamsSummary:
    params = [unit.params[i] for i in positions]
    shards_nbytes = 0
    if dtypes.reduce is not None:
        sent = dtypes.comm or dtypes.reduce
        shards_nbytes = sum(map(_padded_numel, params)) * sent.itemsize
    return ParamsSummary(
        # Without the class of the unit's module, which the table names
        tuple(unit.names[i].partition(" of ")[0] for i in positions),
        sum(p._orig_size.numel() for p in params),
        *dtypes[1:5],
        None if gathered is None else sum(gathered.by_param[i] for i in positions),
        shards_nbytes * unit.gather_world_size,
        dtypes.comm,
        dtypes.inner,
    )


def _padded_numel(fsdp_param: FSDPParam) -> int:
    return fsdp_param.padded_sharded_param_size.numel()


class _Gathered(NamedTuple):
    """Bytes of a gather over all ranks."""

    by_param: list[int]
    padding: int


def _gathered_nbytes(unit: DescribedUnit) -> _Gathered | None:
    params, world_size = unit.params, unit.gather_world_size
    if world_size == 1:
        return _Gathered([0] * len(params), 0)
    if (plan := params.gather_plan) is not None:
        dtypes, numels = plan.dtypes, plan.numels
        padding = plan.layout.padding_nbytes
    elif params.has_extensions:
        return None
    else:
        dtypes = [[dtypes_of(fsdp_param).compute] for fsdp_param in params]
        numels = [[_padded_numel(fsdp_param)] for fsdp_param in params]
        layout = plan_gather([d for (d,) in dtypes], [n for (n,) in numels])
        padding = layout.padding_nbytes
    by_param = [
        world_size * sum(n * dtype.itemsize for n, dtype in zip(*of_param))
        for of_param in zip(numels, dtypes)
    ]
    return _Gathered(by_param, world_size * padding)


def _buckets(
    unit: DescribedUnit, rows: Sequence[ParamsSummary]
) -> Iterator[BucketSummary]:
    nbytes: dict[BucketKey, int] = {}
    for row in rows:
        if row.reduce_dtype is not None:
            key = row.reduce_dtype, row.comm_dtype
            nbytes[key] = nbytes.get(key, 0) + row.reduced_nbytes
    for key in sorted(nbytes, key=bucket_rank):
        dtype, comm_dtype = key
        before, after, *_ = unit.divide_factors(*key)
        divided_by = unit.divide_factor or unit.world_size
        yield BucketSummary(dtype, nbytes[key], divided_by, before, after, comm_dtype)


# Text #

_HEADINGS = (
    "unit",
    "parameters",
    "elements",
    "stored in",
    "computes in",
    "bytes gathered",
    "reduced in",
    "bytes reduced",
    "divided by",
)
# Of text rather than numbers
_LEFT = (0, 3, 4, 6)


def _table(units: Sequence[UnitSummary]) -> str:
    rows = [list(_HEADINGS)]
    for unit in units:
        rows += _rows(unit)
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        cells = (
            text.ljust(width) if i in _LEFT else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells).rstrip())
    units_of: dict[str, list[str]] = {}
    for unit in units:
        for kind in unit.uncompared:
            units_of.setdefault(kind, []).append(unit.name)
    for kind, names in units_of.items():
        lines.append(
            f"Ranks are not compared before calls of {kind}, which does not set "
            f"needs_all_ranks = True: {', '.join(names)}"
        )
    return "\n".join(lines)


def _rows(unit: UnitSummary) -> Iterator[list[str]]:
    factors = {(b.dtype, b.comm_dtype): _factor(b) for b in unit.buckets}
    for i, params in enumerate(unit.params):
        dtype = params.reduce_dtype
        yield [
            unit.name if i == 0 else "",
            f"{len(params.names):,}",
            f"{params.numel:,}",
            " + ".join(map(_name, params.inner_dtypes or (params.stored_dtype,))),
            _name(params.compute_dtype),
            _bytes(params.gathered_nbytes),
            "(frozen)" if dtype is None else _reduced_in(dtype, params.comm_dtype),
            f"{params.reduced_nbytes:,}",
            "" if dtype is None else factors[dtype, params.comm_dtype],
        ]
    if len(unit.params) > 1:
        yield [
            "",
            f"{sum(len(params.names) for params in unit.params):,}",
            f"{sum(params.numel for params in unit.params):,}",
            "all",
            "",
            _bytes(unit.gathered_nbytes),
            "",
            f"{sum(bucket.nbytes for bucket in unit.buckets):,}",
            "",
        ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reduced_in(dtype: torch.dtype, comm_dtype: torch.dtype | None) -> str:
    name = _name(dtype)
    return name if comm_dtype is None else f"{name}, sent in {_name(comm_dtype)}"


def _bytes(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes:,}"


def _factor(bucket: BucketSummary) -> str:
    text = f"{bucket.divided_by:g}"
    if bucket.before in (None, 1) or bucket.after in (None, 1):
        return text
    return f"{text} ({bucket.before:g}, then {bucket.after:g})"
