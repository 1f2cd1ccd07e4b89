"""
How a model's units are laid out, for people to look at: which parameters are
stored, computed with and reduced in which dtype, and the bytes that this sends.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _fsdp_layout as layouts
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import GatherPlan, has_extension
from ._fsdp_policies import num_names_of, resolve_all
from ._fsdp_registrations import fqns_of, get_param_names, groups_of
from ._fsdp_scaling import get_divide_factors


# A logger of its own, so that tables can be turned off apart from the steps
_logger = logging.getLogger("torch.distributed.fsdp.fully_shard.layout")
_COLUMNS = "unit", "parameters", "elements", "stored in", "computes in"
_COLUMNS += "bytes gathered", "reduced in", "bytes reduced", "divided by"
_ALIGNED = "<>><<><>>"


@dataclass(frozen=True)
class LayoutRow:
    """
    Parameters of a unit that have all of their dtypes in common. The last row of each
    unit sums up the others: it has no names, dtypes or divide factors.
    """

    unit: str
    names: tuple[str, ...]  # as seen from the unit
    numel: int
    # Sent and received by all ranks; only the last row counts padding. None: unknown
    # before the first gather of an extension tensor, or while a name is ambiguous
    gathered_nbytes: int | None
    reduced_nbytes: int | None
    shard_world_size: int
    stored_dtypes: tuple[torch.dtype, ...] = ()  # of a subclass those that it holds
    compute_dtype: torch.dtype | None = None  # None while a name is ambiguous
    # Rows with the same reduce and comm dtype share a reduction. None if frozen
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None  # None if it is the reduce dtype
    # By what the sum is divided; before and after it, None if the collective divides
    divided_by: float | None = None
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class LayoutSummary:
    """All units of a model, in the order of its modules; prints as a table."""

    rows: tuple[LayoutRow, ...]
    # (unit, class) of each custom collective before which ranks are not compared
    uncompared: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = _table(self.rows)
        for name in dict.fromkeys(name for _, name in self.uncompared):
            units = ", ".join(unit for unit, other in self.uncompared if other == name)
            lines.append(
                f"Ranks are not compared before calls of {name}, which does not set "
                f"needs_all_ranks = True: {units}"
            )
        return "\n".join(lines)


def layout_summary(module: nn.Module) -> LayoutSummary:
    """
    Returns how the units of a model are laid out, to print or to read. It sends and
    changes nothing. Until the first forward a parameter's dtype or ``requires_grad``
    may still change, and a part of the model may be too small to tell which dtypes
    ``by_name`` has chosen, for which it prints a question mark.

    Args:
        module (nn.Module): The root, or any module that has units in it.

    Raises:
        TypeError: if it is not a module.
        ValueError: if there is no unit in it.
    """
    groups = groups_of(module, "layout_summary")
    params = {group: _resolve_policies(group, module) for group in groups}
    return _summarize(groups, params)


def _resolve_policies(group: Any, module: nn.Module) -> list[Any]:
    """Returns parameters with their policies, None where these are not known yet."""
    if group.mp_policy is group._resolved_policy:
        return group.fsdp_params
    fqns, is_named = fqns_of(group), group._module_fqn is not None
    num_names = len([*module.named_parameters(remove_duplicate=False)])
    if not is_named and num_names >= num_names_of(group.mp_policy):
        # No part of the model, so it names them as the root will
        infos = [fsdp_param._module_info for fsdp_param in group.fsdp_params]
        fqns, is_named = get_param_names(infos, (module,), module_fqn=""), True
    copies: list[Any] = [copy.copy(fsdp_param) for fsdp_param in group.fsdp_params]
    for fsdp_param, fqn in zip(copies, fqns, strict=True):
        params, fsdp_param.mp_policy = [fsdp_param.sharded_param], None
        with contextlib.suppress(ValueError):  # the name is ambiguous
            policies, _ = resolve_all(group.mp_policy, params, [fqn], is_named)
            (fsdp_param.mp_policy,) = policies
    return copies


def log_layout(group: Any) -> None:
    """Logs the table of one unit if its logger is on."""
    if _logger.isEnabledFor(logging.DEBUG):
        names = [group._module_fqn or "(root)"]
        _logger.debug("%s", _summarize({group: names}, {group: group.fsdp_params}))


def _summarize(
    groups: Mapping[Any, Sequence[str]], params: Mapping[Any, list[Any]]
) -> LayoutSummary:
    rows: list[LayoutRow] = []
    uncompared: list[tuple[str, str]] = []
    for group, names in groups.items():
        rows += _rows_of(group, params[group], unit := ", ".join(names))
        if rows[-1].shard_world_size > 1:
            comms = group._all_gather_comm, group._reduce_scatter_comm
            custom = [c for c in comms if not getattr(c, "needs_all_ranks", False)]
            uncompared += [(unit, type(comm).__name__) for comm in custom]
    return LayoutSummary(tuple(rows), tuple(uncompared))


def _rows_of(group: Any, params: Sequence[FSDPParam], unit: str) -> list[LayoutRow]:
    shard_group, _ = group._reduce_groups()
    world_size = 1 if shard_group is None else shard_group.size()
    infos = [fsdp_param._module_info for fsdp_param in params]
    names = get_param_names(infos, group.modules, module_fqn="")
    gathered, total_gathered = _gathered_nbytes(group, params, world_size)
    total = LayoutRow(unit, (), 0, total_gathered, 0, world_size)
    positions: dict[LayoutRow, list[int]] = {}
    for i, fsdp_param in enumerate(params):
        row = _with_dtypes(total, group, fsdp_param)
        positions.setdefault(row, []).append(i)
    rows = []
    for row in sorted(positions, key=_sort_key):
        own, reduced = positions[row], None if row.compute_dtype is None else 0
        if row.reduce_dtype is not None:
            sent = (row.comm_dtype if world_size > 1 else None) or row.reduce_dtype
            shard_numel = sum(params[i].padded_sharded_param_size.numel() for i in own)
            reduced = world_size * shard_numel * sent.itemsize
        row = replace(
            row,
            names=tuple(names[i].partition(" of ")[0] for i in own),  # without a class
            numel=sum(params[i]._orig_size.numel() for i in own),
            gathered_nbytes=_sum(gathered[i] for i in own),
            reduced_nbytes=reduced,
        )
        rows.append(row)
    numel, reduced = sum(r.numel for r in rows), _sum(r.reduced_nbytes for r in rows)
    return [*rows, replace(total, numel=numel, reduced_nbytes=reduced)]


def _sum(counts: Iterable[int | None]) -> int | None:
    return None if None in (counts := [*counts]) else sum(filter(None, counts))


def _gathered_nbytes(
    group: Any, params: Sequence[FSDPParam], world_size: int
) -> tuple[Sequence[int | None], int | None]:
    """Returns the bytes of each parameter, and of all with padding, if known."""
    if world_size == 1:
        return [0] * len(params), 0
    if (plan := group._cache.plans.get(ShardedState.SHARDED)) is None:
        # Only the first gather shows what an extension gathers
        if any(p.mp_policy is None or has_extension(p) for p in params):
            return [None] * len(params), None
        dtypes = [layouts.dtypes_of(fsdp_param).compute for fsdp_param in params]
        numels = [p.padded_sharded_param_size.numel() for p in params]
        plan = GatherPlan(dtypes, [None] * len(params), numels)
    by_param = zip(plan.dtypes, plan.numels, strict=True)
    sizes = [sum(d.itemsize * n for d, n in zip(*pair)) for pair in by_param]
    return [world_size * n for n in sizes], world_size * sum(
        region.nbytes for region in plan.layout.regions
    )


def _with_dtypes(row: LayoutRow, group: Any, fsdp_param: FSDPParam) -> LayoutRow:
    """Returns a row with a parameter's dtypes, and how its gradient is divided."""
    param = fsdp_param.sharded_param
    stored = tuple(dict.fromkeys(_inner_dtypes(fsdp_param._sharded_local_tensor)))
    row = replace(row, stored_dtypes=stored or (param.dtype,))
    if fsdp_param.mp_policy is None:
        return row
    dtypes, factor = layouts.dtypes_of(fsdp_param), group.gradient_divide_factor
    row = replace(row, compute_dtype=dtypes.compute)
    if not param.requires_grad:
        return row
    shard_group, replicate_group = group._reduce_groups()
    is_sum = group.force_sum_reduction_for_comms
    scaling = shard_group, replicate_group, group.device.type, factor, is_sum
    before, after, *_ = get_divide_factors((dtypes.reduce, dtypes.comm), *scaling)
    return replace(
        row,
        reduce_dtype=dtypes.reduce,
        grad_dtype=dtypes.grad,
        comm_dtype=dtypes.comm,
        divided_by=factor or group.mesh_info.mesh.size(),
        before=before,
        after=after,
    )


def _inner_dtypes(tensor: torch.Tensor) -> Iterator[torch.dtype]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            yield from [*_inner_dtypes(inner)] or [inner.dtype]


def _sort_key(row: LayoutRow) -> tuple:
    """Returns a sort key: in the order of reductions, then frozen ones."""
    reduced: Any = row.reduce_dtype, row.comm_dtype
    bucket = layouts.bucket_sort_key(reduced)
    dtypes = filter(None, (row.compute_dtype, *row.stored_dtypes))
    return not bucket, bucket, *map(layouts.dtype_sort_key, dtypes)


def _table(rows: Sequence[LayoutRow]) -> list[str]:
    table = [[*_COLUMNS]]
    for i, row in enumerate(rows):
        # A row that sums up only the one before it says nothing new
        if row.names or row.numel != rows[i - 1].numel:
            table.append(_cells(row))
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    line = "  ".join(f"{{:{align}{width}}}" for align, width in zip(_ALIGNED, widths))
    return [line.format(*cells).rstrip() for cells in table]


def _cells(row: LayoutRow) -> list[str]:
    stored = compute = reduced = factor = ""
    if row.names:
        stored, compute = " + ".join(map(str, row.stored_dtypes)), row.compute_dtype
        reduced = "?" if compute is None else "(frozen)"
    if row.reduce_dtype is not None:
        verb = "sent in" if row.shard_world_size > 1 else "cast to"
        reduced = layouts.describe_key((row.reduce_dtype, row.comm_dtype), verb)
        factor = f"{row.divided_by:g}"
        if row.before not in (None, 1) and row.after not in (None, 1):
            factor += f" ({row.before:g}, then {row.after:g})"
    cells = [row.unit, len(row.names) or "all", row.numel, stored, compute]
    cells += [row.gathered_nbytes, reduced, row.reduced_nbytes, factor]
    cells = ["?" if cell is None else cell for cell in cells]
    texts = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]
    return [text.replace("torch.", "") for text in texts]
