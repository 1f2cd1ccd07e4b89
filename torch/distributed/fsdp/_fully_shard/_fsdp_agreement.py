"""
Whether all ranks have laid a unit out alike, found out before it sends anything.

[Note: When ranks are compared]
Ranks that disagree would send buffers of different sizes: a hang, or sums of the
wrong elements. So each unit compares its ranks once, right before its first
collective over a group, and over that group: its first gather, or its first
all-reduce where nothing is gathered. Every rank is about to issue that
collective, so that none waits here for a rank that would not come. Lazy init
itself is no such place: one rank may evaluate replicated parameters alone, or
may call ``unshard`` where the others start with a forward.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_collectives import backend_name
from ._fsdp_param import FSDPParam
from ._fsdp_unit import dtypes_of


_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
# A message need not list more of what differs: mostly one thing is wrong
_MAX_LISTED = 8


class _Described(NamedTuple):
    """What must be the same of a parameter on every rank, as text."""

    name: str
    size: str
    placement: str
    stored: str
    compute: str
    reduce: str
    grad: str


_TEXTS = _Described(
    "is {}",
    "has size {}",
    "is sharded as {}",
    "is stored in {}",
    "computes in {}",
    "reduces in {}",
    "has a gradient in {}",
)


def check_ranks_agree(
    fsdp_params: Sequence[FSDPParam],
    names: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
    unit: str,
) -> None:
    """
    Raises on every rank of ``group`` if one lays the unit's parameters out in
    another way than the rest: one all-gather of 32 bytes a rank.

    Args:
        names: Of the parameters within the unit, which no rank knows otherwise.
        group: Ranks that are about to communicate for this unit.
        device: That ``group`` communicates for.
        unit: What the unit is called, for the message.
    """
    if not _is_wanted(fsdp_params, group, device):
        return
    described = [*map(_describe, fsdp_params, names)]
    digest = hashlib.sha256(repr(described).encode()).digest()
    # Counters of a user's collectives or memory are not about this
    with torch.no_grad(), _disable_current_modes():
        mine = torch.tensor([*digest], dtype=torch.uint8, device=device)
        digests = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(digests, mine, group=group)
        if len({bytes(digest.tolist()) for digest in digests}) == 1:
            return
        fqns = [p._param_fqn or name for p, name in zip(fsdp_params, names)]
        by_rank: list = [None] * group.size()
        dist.all_gather_object(by_rank, (fqns, described), group=group)
    ranks = dist.get_process_group_ranks(group)
    _raise(dict(zip(ranks, by_rank, strict=True)), unit)


def _is_wanted(
    fsdp_params: Sequence[FSDPParam], group: dist.ProcessGroup, device: torch.device
) -> bool:
    if group.size() == 1 or os.environ.get(_SWITCH) == "0":
        return False
    if backend_name(group, device) == "fake":  # has no other ranks
        return False
    return detect_fake_mode([p._sharded_local_tensor for p in fsdp_params]) is None


def _describe(fsdp_param: FSDPParam, name: str) -> _Described:
    dtypes = dtypes_of(fsdp_param)
    return _Described(
        name,
        str(tuple(fsdp_param._orig_size)),
        str(fsdp_param.fsdp_placement),
        *map(str, dtypes),
    )


def _raise(by_rank: dict[int, tuple[list[str], list[_Described]]], unit: str) -> None:
    counts = {rank: len(described) for rank, (_, described) in by_rank.items()}
    if len({*counts.values()}) > 1:
        lines = [_by_value("the unit has {} parameters", counts)]
    else:
        lines = _differences(by_rank)
    more = len(lines) - _MAX_LISTED
    if more > 0:
        lines = [*lines[:_MAX_LISTED], f"and {more} more"]
    listed = "".join(f"\n  {line}" for line in lines)
    raise RuntimeError(
        f"Ranks disagree about the parameters of unit '{unit}':{listed}\n"
        "Overrides of MixedPrecisionPolicy must return the same on every rank, and "
        "parameters must be stored in the same dtypes, e.g. loaded from the same "
        f"checkpoint. ({_SWITCH}=0 on all ranks turns this check off.)"
    )


def _differences(by_rank: dict[int, tuple[list[str], list[_Described]]]) -> list[str]:
    lines = []
    fqns, _ = next(iter(by_rank.values()))
    for i, fqn in enumerate(fqns):
        for field, text in zip(_Described._fields, _TEXTS):
            values = {
                rank: getattr(described[i], field)
                for rank, (_, described) in by_rank.items()
            }
            if len({*values.values()}) > 1:
                lines.append(f"{fqn}: {_by_value(text, values)}")
    return lines


def _by_value(text: str, values: Mapping[int, object]) -> str:
    """Returns what is so on which ranks, for all values that there are."""
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{text.format(value)} on {'ranks' if len(of) > 1 else 'rank'} "
        + ", ".join(map(str, of))
        for value, of in ranks.items()
    )
