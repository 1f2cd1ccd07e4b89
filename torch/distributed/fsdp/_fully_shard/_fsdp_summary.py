"""Summaries of a model's units for people: their dtypes, and the bytes that are sent."""

from __future__ import annotations

import contextlib
import copy
import logging
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby
from typing import Any, TYPE_CHECKING

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _fsdp_layout as layouts
from ._fsdp_param import ShardedState
from ._fsdp_param_cache import GatherPlan, has_extension
from ._fsdp_policies import resolve, tables_of
from ._fsdp_registrations import get_param_names, groups_of
from ._fsdp_scaling import get_divide_factors, Scaling


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup


# Not the logger of steps, so that users can turn off tables alone
_logger = logging.getLogger("torch.distributed.fsdp.fully_shard.layout")
_COLUMNS = "unit", "parameters", "elements", "stored in", "computes in"
_COLUMNS += "bytes gathered", "reduced in", "bytes reduced", "divided by", "all-reduced"
_ALIGNED = "<>><<><>>>"
_SUMMED = "names direct numel gathered_nbytes reduced_nbytes all_reduced_nbytes".split()


@dataclass(frozen=True)
class LayoutRow:
    """
    Parameters of a unit that have all of their dtypes in common. The last row of each
    unit sums up the others: it has no names, dtypes or divide factors.
    """

    unit: str
    names: tuple[str, ...]  # as seen from the unit
    numel: int
    # Of all ranks, with padding in the last row only. None while dtypes are unknown
    gathered_nbytes: int | None
    reduced_nbytes: int | None
    shard_world_size: int
    stored_dtypes: tuple[torch.dtype, ...] = ()  # inside a tensor subclass
    compute_dtype: torch.dtype | None = None  # None while a name is ambiguous
    # Rows with the same reduce and comm dtype share a reduction. None if frozen
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None  # None if it is the reduce dtype
    # The divisor, and its factors before and after the sum, None if the collective divides
    divided_by: float | None = None
    before: float | None = None
    after: float | None = None
    direct: tuple[str, ...] = ()  # those of `names` that are gathered without copies
    all_reduced_nbytes: int | None = 0  # in `reduce_dtype`, after a reduce-scatter
    num_replicas: int = 1


@dataclass(frozen=True)
class LayoutSummary:
    """All units of a model, in the order of its modules; prints as a table."""

    rows: tuple[LayoutRow, ...]

    def __str__(self) -> str:
        table = [[*_COLUMNS]]
        for i, row in enumerate(self.rows):
            # A row that sums up only the one before it says nothing new
            if row.names or row.numel != self.rows[i - 1].numel:
                table.append(_cells(row))
        widths = [max(map(len, column)) for column in zip(*table)]
        if all(cells[-1] == "0" for cells in table[1:]):
            widths.pop()  # no all-reduce follows
        table.insert(1, ["-" * width for width in widths])
        line = "  ".join(map("{{:{}{}}}".format, _ALIGNED, widths))
        return "\n".join(line.format(*cells).rstrip() for cells in table)


def layout_summary(module: nn.Module) -> LayoutSummary:
    """
    Returns the layout of a model's units, to print or to read. It sends and changes
    nothing. Until the first forward dtypes and ``requires_grad`` may still change, and a
    part of a model may not tell which dtypes ``by_name`` has chosen: it prints ``?``.

    Args:
        module (nn.Module): The root, or any module that has units in it.

    Raises:
        ValueError: if there is no unit.
    """
    rows: list[LayoutRow] = []
    for group, names in groups_of(module, "layout_summary").items():
        rows += _rows_of(group, ", ".join(names), _resolve_policies(group, module))
    return LayoutSummary(tuple(rows))


def log_layout(group: FSDPParamGroup) -> None:
    """Logs the table of one unit if its logger is on."""
    if _logger.isEnabledFor(logging.DEBUG):
        rows = _rows_of(group, group._module_fqn or "(root)", group.fsdp_params)
        _logger.debug("%s", LayoutSummary(tuple(rows)))


def _resolve_policies(group: FSDPParamGroup, module: nn.Module) -> list[Any]:
    """Returns parameters with their policies, None where these are not known yet."""
    is_same_policy = group.mp_policy is group._resolved_policy[0]
    fqns = get_param_names([p._module_info for p in group.fsdp_params], (module,))
    # A part of the model has fewer names, which may be names of other parts too
    num_names = len([*module.named_parameters(remove_duplicate=False)])
    is_whole = all(num_names >= len(t.by_fqn) for t in tables_of(group.mp_policy))
    copies: list[Any] = [*map(copy.copy, group.fsdp_params)]
    for copied, fqn in zip(copies, fqns, strict=True):
        policy = copied.mp_policy if is_same_policy else group.mp_policy
        copied.mp_policy = None
        with contextlib.suppress(ValueError):  # raised if the name is ambiguous
            copied.mp_policy = resolve(policy, copied.sharded_param, fqn, is_whole)
    return copies


def _rows_of(group: FSDPParamGroup, unit: str, params: list[Any]) -> list[LayoutRow]:
    world_size, replicas = (g.size() if g else 1 for g in group._reduce_groups())
    names = get_param_names([p._module_info for p in params], group.modules)
    plan = _get_plan(group, params) if world_size > 1 else None
    gathered = 0 if world_size == 1 else None
    by_param, direct = [gathered] * len(params), ()
    if plan is not None:
        by_param = [world_size * sum(plan.nbytes_of(i)) for i in range(len(params))]
        direct = [i for i, _ in plan.direct]
        gathered = world_size * sum(region.nbytes for region in plan.layout.regions)
        gathered += sum(by_param[i] for i in direct)
    total = LayoutRow(unit, (), 0, gathered, 0, world_size, num_replicas=replicas)
    rows: list[LayoutRow] = []
    for i, (fsdp_param, name) in enumerate(zip(params, names, strict=True)):
        row = replace(total, names=(name,), gathered_nbytes=by_param[i])
        row = replace(row, direct=row.names if i in direct else ())
        rows.append(_with_dtypes(row, group, fsdp_param))
    rows.sort(key=_sort_key)
    rows = [reduce(_join, same) for _, same in groupby(rows, _sort_key)]
    total = reduce(_join, rows, total)
    return [*rows, replace(total, names=(), direct=(), gathered_nbytes=gathered)]


def _join(row: LayoutRow, other: LayoutRow) -> LayoutRow:
    """Returns the first row with the sums of both, None where either is unknown."""
    sums: dict[str, Any] = {}
    for name in _SUMMED:
        mine, others = getattr(row, name), getattr(other, name)
        sums[name] = None if None in (mine, others) else mine + others
    return replace(row, **sums)


def _get_plan(group: FSDPParamGroup, params: list[Any]) -> GatherPlan | None:
    """Returns the gather's plan, None if only the first gather of an extension shows it."""
    if any(p.mp_policy is None or has_extension(p) for p in params):
        return group._cache.plans.get(ShardedState.SHARDED)
    dtypes = [layouts.dtypes_of(fsdp_param).compute for fsdp_param in params]
    numels = [p.padded_sharded_param_size.numel() for p in params]
    nbytes = group._direct_memory.min_nbytes if group._can_gather_directly() else None
    return GatherPlan(params, dtypes, [None] * len(params), numels, None, nbytes)


def _with_dtypes(row: LayoutRow, group: FSDPParamGroup, fsdp_param: Any) -> LayoutRow:
    """Returns the row of a parameter with its dtypes, and how its gradient is divided."""
    stored = tuple(dict.fromkeys(_inner_dtypes(fsdp_param._sharded_local_tensor)))
    row = replace(row, numel=fsdp_param._orig_size.numel(), stored_dtypes=stored)
    has_two = row.shard_world_size > 1 and row.num_replicas > 1
    if fsdp_param.mp_policy is None:
        all_reduced = None if has_two else 0
        return replace(row, reduced_nbytes=None, all_reduced_nbytes=all_reduced)
    dtypes = layouts.dtypes_of(fsdp_param)
    row = replace(row, compute_dtype=dtypes.compute)
    if not fsdp_param.sharded_param.requires_grad:
        return row
    row = replace(row, reduce_dtype=dtypes.reduce, grad_dtype=dtypes.grad)
    factor, is_sum = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    scaling = Scaling(*group._reduce_groups(), group.device.type, factor, is_sum)
    before, after, *_ = get_divide_factors((dtypes.reduce, dtypes.comm), scaling)
    divisor = factor or group.mesh_info.mesh.size()
    row = replace(row, comm_dtype=dtypes.comm, before=before, after=after)
    sent_dtype = (row.shard_world_size > 1 and dtypes.comm) or dtypes.reduce
    numel = fsdp_param.padded_sharded_param_size.numel()
    sent = row.shard_world_size * numel * sent_dtype.itemsize
    sums = has_two * numel * dtypes.reduce.itemsize
    return replace(
        row, divided_by=divisor, reduced_nbytes=sent, all_reduced_nbytes=sums
    )


def _inner_dtypes(tensor: torch.Tensor) -> list[torch.dtype]:
    """Returns the dtype of a plain tensor, or those inside a subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.dtype]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [*chain(*map(_inner_dtypes, inner))]


def _sort_key(row: LayoutRow) -> tuple:
    """Puts rows in the order of reductions. Those of one key have the same dtypes."""
    reduced: Any = row.reduce_dtype, row.comm_dtype
    bucket = layouts.bucket_sort_key(reduced)
    dtypes = filter(None, (row.compute_dtype, *row.stored_dtypes, row.grad_dtype))
    is_unknown = row.compute_dtype is None
    return not bucket, bucket, is_unknown, *map(layouts.dtype_sort_key, dtypes)


def _cells(row: LayoutRow) -> list[str]:
    compute, reduced, factor = row.compute_dtype, "(frozen)", ""
    all_reduced: Any = row.all_reduced_nbytes
    if not row.names:
        compute = reduced = ""
    elif compute is None:
        reduced = "?"
    elif row.reduce_dtype is not None:
        verb = "sent in" if row.shard_world_size > 1 else "cast to"
        reduced = layouts.describe_key((row.reduce_dtype, row.comm_dtype), verb)
        if all_reduced:
            ranks = f"{row.num_replicas} ranks"
            all_reduced = f"{all_reduced:,} in {row.reduce_dtype}, {ranks}"
        factor = f"{row.divided_by:g}"
        if row.before not in (None, 1) and row.after not in (None, 1):
            factor += f" ({row.before:g}, then {row.after:g})"
    direct = f" ({len(row.direct)} direct)" if row.direct else ""
    count, stored = len(row.names) or "all", " + ".join(map(str, row.stored_dtypes))
    cells = [row.unit, f"{count}{direct}", row.numel, stored, compute]
    cells += [row.gathered_nbytes, reduced, row.reduced_nbytes, factor, all_reduced]
    cells = ["?" if cell is None else cell for cell in cells]
    texts = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]
    return [text.replace("torch.", "") for text in texts]
