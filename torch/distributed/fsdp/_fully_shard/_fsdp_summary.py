"""
How a model's units are laid out, for people to look at: which parameters are
stored, computed with and reduced in which dtype, and the bytes that this sends.
"""

# Tests: summary, overrides
from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _fsdp_layout as layouts
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import GatherPlan, has_extension
from ._fsdp_policies import is_for_names, names_in, resolve_all
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
    # Of the gather's output and the reduction's input, the shards of all ranks; only
    # the last row counts padding. None before the first gather of an extension tensor
    gathered_nbytes: int | None
    reduced_nbytes: int | None
    shard_world_size: int
    stored_dtypes: tuple[torch.dtype, ...] = ()  # of a subclass those that it holds
    # None, like all that follows, where only the root's first forward tells the names
    # by which a policy chooses
    compute_dtype: torch.dtype | None = None
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
        for kind in dict.fromkeys(kind for _, kind in self.uncompared):
            units = ", ".join(unit for unit, other in self.uncompared if other == kind)
            lines.append(
                f"Ranks are not compared before calls of {kind}, which does not set "
                f"needs_all_ranks = True: {units}"
            )
        return "\n".join(lines)


def layout_summary(module: nn.Module) -> LayoutSummary:
    """
    Returns how the units of a model are laid out. Print it, or read its rows. Call it
    at any time after ``fully_shard`` or ``replicate``: it sends and changes nothing. A
    parameter's dtype or ``requires_grad`` may still change until the first forward.
    Until then a part of the model may be too small to tell which dtypes ``by_name``
    has chosen, for which it prints a question mark.

    Args:
        module (nn.Module): The root, or any module that has units in it.

    Raises:
        TypeError: if it is not a module.
        ValueError: if there is no unit in it.
    """
    groups = groups_of(module, "layout_summary")
    modules, names = {*module.modules()}, names_in(module)
    unresolved: dict[Any, list[FSDPParam]] = {}
    for group in groups:
        if (policy := group.mp_policy) is group._resolved_policy:
            continue
        fqns, is_named = fqns_of(group), group._module_fqn is not None
        infos = [fsdp_param._module_info for fsdp_param in group.fsdp_params]
        has_all = modules.issuperset(info.module for info in infos)
        if not is_named and has_all and is_for_names(policy, names):
            # As the root will name them
            fqns, is_named = get_param_names(infos, (module,), module_fqn=""), True
        named = zip(group.fsdp_params, fqns)
        unresolved[group] = [_with_policy(policy, *of, is_named) for of in named]
    return _summarize(groups, unresolved)


def _with_policy(
    policy: Any, fsdp_param: FSDPParam, fqn: str, is_named: bool
) -> FSDPParam:
    """Returns a copy with a parameter's policy, None if its name is ambiguous."""
    described: Any = copy.copy(fsdp_param)
    named = [fsdp_param.sharded_param], [fqn], is_named
    try:
        (described.mp_policy,), _ = resolve_all(policy, *named)
    except ValueError:
        described.mp_policy = None
    return described


def log_layout(group: Any) -> None:
    """Logs the table of one unit if its logger is on."""
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", _summarize({group: [group._module_fqn or "(root)"]}, {}))


def _summarize(
    groups: Mapping[Any, Sequence[str]], unresolved: Mapping[Any, list[FSDPParam]]
) -> LayoutSummary:
    rows: list[LayoutRow] = []
    uncompared: list[tuple[str, str]] = []
    for group, names in groups.items():
        params = unresolved.get(group, group.fsdp_params)
        rows += _rows_of(group, params, unit := ", ".join(names))
        if rows[-1].shard_world_size > 1:
            comms = group._all_gather_comm, group._reduce_scatter_comm
            custom = [c for c in comms if not getattr(c, "needs_all_ranks", False)]
            uncompared += [(unit, type(comm).__name__) for comm in custom]
    return LayoutSummary(tuple(rows), tuple(uncompared))


def _rows_of(group: Any, params: Sequence[FSDPParam], unit: str) -> list[LayoutRow]:
    shard_group = group._reduce_scatter_group
    world_size = 1 if shard_group is None else shard_group.size()
    infos = [fsdp_param._module_info for fsdp_param in params]
    names = get_param_names(infos, group.modules, module_fqn="")
    plan, gathered = group._cache.plans.get(ShardedState.SHARDED), None
    is_known = all(fsdp_param.mp_policy is not None for fsdp_param in params)
    # Only the first gather shows what an extension gathers
    if world_size > 1 and any(map(has_extension, params)):
        is_known = False
    if plan is None and is_known:
        computed = [layouts.dtypes_of(fsdp_param).compute for fsdp_param in params]
        numels = [p.padded_sharded_param_size.numel() for p in params]
        plan = GatherPlan(computed, [None] * len(params), numels)
    num_gathered = world_size if world_size > 1 else 0
    if plan is not None:
        by_param = zip(plan.dtypes, plan.numels, strict=True)
        sizes = [sum(d.itemsize * n for d, n in zip(*own)) for own in by_param]
        gathered = [num_gathered * size for size in sizes]
    members: dict[tuple, list[int]] = {}
    for i, fsdp_param in enumerate(params):
        stored, compute = fsdp_param.sharded_param.dtype, None
        reduced: list[torch.dtype | None] = [None, None, None]
        if fsdp_param.mp_policy is not None:
            stored, compute, *reduced = layouts.dtypes_of(fsdp_param)
        inner = dict.fromkeys(_inner_dtypes(fsdp_param._sharded_local_tensor))
        if not fsdp_param.sharded_param.requires_grad:
            reduced = [None, None, None]
        key = tuple(inner) or (stored,), compute, *reduced
        members.setdefault(key, []).append(i)
    factor, is_sum = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    scaling = shard_group, group._all_reduce_group, group.device.type, factor, is_sum
    rows = []
    for dtypes in sorted(members, key=_sort_key):
        of, (*_, reduce_dtype, _, comm_dtype) = members[dtypes], dtypes
        sent = (comm_dtype if world_size > 1 else None) or reduce_dtype
        numel = sum(params[i].padded_sharded_param_size.numel() for i in of)
        factors: tuple[float | None, ...] = ()
        if sent:
            applied = get_divide_factors((reduce_dtype, comm_dtype), *scaling)
            factors = factor or group.mesh_info.mesh.size(), *applied[:2]
        reduced_nbytes = world_size * numel * sent.itemsize if sent else 0
        row = LayoutRow(
            unit,
            # Without the class of the unit's module
            tuple(names[i].partition(" of ")[0] for i in of),
            sum(params[i]._orig_size.numel() for i in of),
            None if gathered is None else sum(gathered[i] for i in of),
            reduced_nbytes if dtypes[1] else None,
            world_size,
            *dtypes,
            *factors,
        )
        rows.append(row)
    numel = sum(row.numel for row in rows)
    nbytes = plan and num_gathered * plan.layout.segment_nbytes
    sizes = [row.reduced_nbytes for row in rows]
    total = None if None in sizes else sum(filter(None, sizes))
    return [*rows, LayoutRow(unit, (), numel, nbytes, total, world_size)]


def _inner_dtypes(tensor: torch.Tensor) -> Iterator[torch.dtype]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            yield from [*_inner_dtypes(inner)] or [inner.dtype]


def _sort_key(dtypes: tuple) -> tuple:
    """Returns a sort key: in the order of reductions, then frozen ones."""
    stored, compute, reduce, _, comm = dtypes
    bucket = layouts.bucket_sort_key((reduce, comm))
    by_dtype = (layouts.dtype_sort_key(d) for d in (compute, *stored) if d)
    return not bucket, bucket, *by_dtype


def _table(rows: Sequence[LayoutRow]) -> list[str]:
    table, count, num_rows = [[*_COLUMNS]], 0, 0
    for row in rows:
        num_rows, count = num_rows + 1, count + len(row.names)
        if row.names:
            unit = row.unit if num_rows == 1 else ""
            table.append(_cells(row, unit, len(row.names)))
            continue
        if num_rows > 2:  # there is more than one row to sum up
            table.append(_cells(row, "", count))
        count = num_rows = 0
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    line = "  ".join(f"{{:{align}{width}}}" for align, width in zip(_ALIGNED, widths))
    return [line.format(*cells).rstrip() for cells in table]


def _cells(row: LayoutRow, unit: str, count: int) -> list[str]:
    reduced, factor = "", ""
    if row.names:
        reduced = "?" if row.compute_dtype is None else "(frozen)"
    if row.reduce_dtype is not None:
        verb = "sent in" if row.shard_world_size > 1 else "cast to"
        reduced = layouts.describe_key((row.reduce_dtype, row.comm_dtype), verb)
        factor = f"{row.divided_by:g}"
        if row.before not in (None, 1) and row.after not in (None, 1):
            factor += f" ({row.before:g}, then {row.after:g})"
    stored = " + ".join(map(str, row.stored_dtypes)) or "all"
    compute = row.compute_dtype if row.names else ""
    cells = [unit, count, row.numel, stored, compute, row.gathered_nbytes]
    cells += [reduced, row.reduced_nbytes, factor]
    cells = ["?" if cell is None else cell for cell in cells]
    texts = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]
    return [text.replace("torch.", "") for text in texts]
