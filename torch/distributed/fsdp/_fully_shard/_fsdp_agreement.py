"""
Whether all ranks are about to do the same for a unit, found out before they do.

[Note: When ranks are compared]
Ranks that disagree would send buffers of different sizes, or of one size but
with other contents: a hang, a crash, or sums of the wrong elements. So they are
compared where every rank is about to issue the collective that it is about, and
over the same group, so that none waits here for a rank that would not come:

- Before a unit's first gather: how its parameters are laid out. Lazy init
  itself is no such place: one rank may evaluate replicated parameters alone, or
  may call ``unshard`` where the others start with a forward.
- Before a reduction with a pattern (which parameters have a gradient, reduced in
  which dtypes) that this unit has not yet shown over that group. Ranks that have
  agreed so far know the same patterns, so all of them compare, or none does: a
  loop that shows the same few patterns again compares nothing. A unit that has
  shown ``_MAX_PATTERNS`` is not compared again, as one that uses other parameters
  at every step would wait for the device at every step.

What was agreed on stays so: a rank that gives up an iteration, e.g. for its data, while
the others skip it, must not ask what they have no reason to answer.

If only some ranks show a new pattern, a comparison meets a reduction, which is not
taken for one: the time limit passes. If each shows one that is known, but not the
same, nothing tells, as in a program that compares nothing at all.

``TORCH_FSDP_CHECK_RANKS_AGREE=always`` compares before every gather and every
reduction, and which unit came before as well: it finds the collective where ranks
drift apart, and says so on all of them at once.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_comms import is_of_group
from ._fsdp_doors import Agreement, DescribedUnit
from ._fsdp_layout import describe_key
from ._fsdp_param import FSDPParam
from ._fsdp_scaling import backend_name
from ._fsdp_unit import dtypes_of, UnitBucket


# By itself: who replaces what units call, e.g. a test, does not mean this
all_gather_single = dist.all_gather_single
_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
# A message need not list more of what differs: mostly one thing is wrong
_MAX_LISTED = 8


class _Described(NamedTuple):
    """What must be the same of a parameter on every rank, as text."""

    name: str
    size: str
    placement: str
    compute: str
    reduce: str
    # What this collective does with it, if it reduces
    reduced: str = ""


_TEXTS = _Described(
    "is {}",
    "has size {}",
    "is sharded as {}",
    "computes in {}",
    "reduces in {}",
    "{}",
)


class Collective(NamedTuple):
    """A collective that a rank is about to issue for a unit."""

    # FQN of the unit, None before the root has given it one
    unit: str | None
    # "gathers" or "reduces"
    does: str
    # FQN of the unit that this rank last reduced over the group, None if this is
    # not compared
    after: str | None = None
    # Whether what is reduced is added to gradients of earlier reductions, None if
    # this is not compared
    accumulates: bool | None = None

    def __str__(self) -> str:
        text = f"{self.does} unit '{self.unit}'" if self.unit else f"{self.does} a unit"
        if self.after is not None:
            text += f" after unit '{self.after}'"
        if self.accumulates is not None:
            has = "with" if self.accumulates else "without"
            text += f", {has} earlier gradients to add to"
        return text


# Of a unit over one group. A loop that shows more is not a steady one.
_MAX_PATTERNS = 8
# Which parameters of a unit have a gradient, by position, and what each is reduced in
_Pattern: TypeAlias = tuple[tuple[int, torch.dtype], ...]


class _Announced(NamedTuple):
    """What one rank is about to do, and with what."""

    collective: Collective
    params: list[_Described]
    fqns: list[str]


_SHARDING_ADVICE = (
    "Every rank must build the same model and call fully_shard on the same modules of "
    "it, with the same ignored_params and shard_placement_fn."
)
_DTYPE_ADVICE = (
    "Overrides of MixedPrecisionPolicy must return the same on every rank, and "
    "parameters that no policy casts must be stored in the same dtypes, e.g. loaded "
    "from the same checkpoint."
)
_GRADIENT_ADVICE = (
    "Each backward must give gradients to the same parameters on every rank. Where "
    "it cannot, call set_reduce_scatter_unused_params(True) on the unit, which "
    "reduces zeros for the others."
)
_ORDER_ADVICE = (
    "Every rank must have the same units, run them in the same order for the same "
    "number of microbatches, and sync gradients in the same ones."
)
_HANG_ADVICE = (
    "If no rank has failed before, the others do something else, see what they say "
    f"here. {_SWITCH}=always on all ranks finds where that begins."
)


# FQN of the unit last reduced over a group: reductions come in the same order on all
# of its ranks
_last_reduced: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None]
_last_reduced = weakref.WeakKeyDictionary()


class UnitAgreement(Agreement):
    """What all ranks of a unit do alike, as far as they have been compared."""

    def __init__(self, describe: Callable[[], DescribedUnit]):
        self._describe = describe
        # Whether they have laid out alike what they gather
        self.on_gathers = False
        self._patterns: dict[dist.ProcessGroup, set[_Pattern]] = {}
        # What was last looked up, which a steady loop repeats
        self._last_buckets: dict[dist.ProcessGroup, Sequence[UnitBucket]] = {}

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        if not is_of_group(comm):
            return
        unit = self._describe()
        has_compared = _check(unit, group, Collective(_name(unit), "gathers"))
        self.on_gathers = has_compared and not _compares_always()

    def check_reduction(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[UnitBucket],
        comm: ReduceScatter | None = None,
    ) -> None:
        """Asks only about a pattern that is new to this unit."""
        if self._last_buckets.get(group) is buckets:
            return
        if comm is not None and not is_of_group(comm):
            return
        if _compares_always():
            self._check_always(group, buckets)
            return
        known = self._patterns.setdefault(group, set())
        pattern = _pattern_of(buckets)
        if pattern and pattern not in known and len(known) < _MAX_PATTERNS:
            unit = self._describe()
            if not _check(unit, group, Collective(_name(unit), "reduces"), pattern):
                return
            known.add(pattern)
        self._last_buckets[group] = buckets

    def _check_always(
        self, group: dist.ProcessGroup, buckets: Sequence[UnitBucket]
    ) -> None:
        if not (pattern := _pattern_of(buckets)):
            return  # nothing is sent over this group
        unit = self._describe()
        after, adds = _last_reduced.get(group), _accumulates(unit, buckets)
        _check(unit, group, Collective(_name(unit), "reduces", after, adds), pattern)
        _last_reduced[group] = _name(unit)

    def tell(
        self, error: BaseException, buckets: Sequence[UnitBucket] | None = None
    ) -> None:
        """What a backend says, e.g. that its time limit has passed, does not tell."""
        unit = self._describe()
        if buckets is None:
            _tell(unit, error, Collective(_name(unit), "gathers"))
        else:
            adds = _accumulates(unit, buckets)
            collective = Collective(_name(unit), "reduces", None, adds)
            _tell(unit, error, collective, _pattern_of(buckets))


# What is compared #


def _name(unit: DescribedUnit) -> str | None:
    return "(root)" if unit.fqn == "" else unit.fqn


def _pattern_of(buckets: Sequence[UnitBucket]) -> _Pattern:
    dtypes = {
        slot.param: bucket.dtype for _, bucket, _ in buckets for slot in bucket.slots
    }
    return tuple(sorted(dtypes.items()))


def _accumulates(unit: DescribedUnit, buckets: Sequence[UnitBucket]) -> bool | None:
    """
    Whether what is reduced is added to gradients of earlier reductions, None
    if this rank has no element to add to, and need not keep any.
    """
    if unit.has_partial_reduces:
        return True
    for _, bucket, _ in buckets:
        for slot in bucket.slots:
            fsdp_param = unit.params[slot.param]
            if fsdp_param.sharded_size.numel() > 0:
                return fsdp_param.sharded_param.grad is not None
    return None


def _check(
    unit: DescribedUnit,
    group: dist.ProcessGroup,
    collective: Collective,
    pattern: _Pattern | None = None,
) -> bool:
    """
    Compares the ranks of ``group``: one all-gather of 32 bytes a rank. Returns
    False where nothing was compared that another time would be.
    """
    if not _has_others(group, unit.device):
        return True
    if _is_traced(unit.params, unit.device):
        return False
    described = [*map(_describe_param, unit.params, unit.names)]
    if pattern is not None:
        dtypes = dict(pattern)
        described = [
            param._replace(reduced=_reduced_text(dtypes.get(i)))
            for i, param in enumerate(described)
        ]
    mine = _Announced(collective, described, [*unit.fqns])
    try:
        by_rank = _exchange(mine, group, unit.device)
    except BaseException as error:
        _tell(unit, error, collective, pattern)
        raise
    if by_rank is not None:
        _raise_if_different(by_rank)
    return True


def _tell(
    unit: DescribedUnit,
    error: BaseException,
    collective: Collective,
    pattern: _Pattern | None = None,
) -> None:
    if not hasattr(error, "add_note"):  # from Python 3.11 on
        return
    note = f"This rank {collective}"
    if pattern is not None:
        dtypes = dict(pattern)
        missing = [fqn for i, fqn in enumerate(unit.fqns) if i not in dtypes]
        note += f", and has no gradient of {_listed(missing)}" if missing else ""
    advice = f" {_HANG_ADVICE}" if _is_about_peers(error) else ""
    error.add_note(f"{note}.{advice}")


# Asking the others #


def _compares_always() -> bool:
    return os.environ.get(_SWITCH) == "always"


def _exchange(
    mine: _Announced, group: dist.ProcessGroup, device: torch.device
) -> dict[int, _Announced] | None:
    """Returns what each rank has announced, None if all of it is the same."""
    said = repr((mine.collective, mine.params))
    digest = hashlib.sha256(said.encode()).digest()
    # Counters of a user's collectives or memory are not about this
    with torch.no_grad(), _disable_current_modes():
        tensor = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        digests = tensor.new_empty(group.size() * len(digest))
        all_gather_single(digests, tensor, group=group)
        rows = digests.cpu().view(group.size(), len(digest))
        if bool((rows == rows[0]).all()):
            return None
        by_rank: list = [None] * group.size()
        dist.all_gather_object(by_rank, mine, group=group)
    return dict(zip(dist.get_process_group_ranks(group), by_rank, strict=True))


def _has_others(group: dist.ProcessGroup, device: torch.device) -> bool:
    if group.size() == 1 or os.environ.get(_SWITCH) == "0":
        return False
    if not type(group).__module__.startswith("torch."):
        return False  # it may have no all-gather, or members that come and go
    return backend_name(group, device) != "fake"


def _is_traced(fsdp_params: Sequence[FSDPParam], device: torch.device) -> bool:
    """Whether what is issued now is noted or simulated, and not run."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True  # a graph is not captured before steps have been run
    return detect_fake_mode([p._sharded_local_tensor for p in fsdp_params]) is not None


def _is_about_peers(error: BaseException) -> bool:
    """Whether a backend says that other ranks did not come, or came with other data."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _describe_param(fsdp_param: FSDPParam, name: str) -> _Described:
    dtypes = dtypes_of(fsdp_param)
    return _Described(
        name,
        str(tuple(fsdp_param._orig_size)),
        str(fsdp_param.fsdp_placement),
        str(dtypes.compute),
        describe_key((dtypes.reduce, dtypes.comm)),
    )


def _reduced_text(dtype: torch.dtype | None) -> str:
    return "gets no gradient" if dtype is None else f"gets a gradient, sent in {dtype}"


# What is said #


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - _MAX_LISTED
    if more > 0:
        texts = [*texts[:_MAX_LISTED], f"and {more} more"]
    return separator.join(texts)


def _raise_if_different(by_rank: Mapping[int, _Announced]) -> None:
    difference = _find_difference(by_rank)
    if difference is None:
        return  # a unit has no name yet where it is gathered before the root's forward
    title, lines, advice = difference
    off = f"({_SWITCH}=0 on all ranks turns this check off.)"
    listed = _listed(lines, "\n  ")
    raise RuntimeError(f"{title}:\n  {listed}\n{advice} {off}")


def _find_difference(
    by_rank: Mapping[int, _Announced],
) -> tuple[str, list[str], str] | None:
    """Returns a title, what is so on which ranks and what to do about it."""
    collectives = {rank: said.collective for rank, said in by_rank.items()}
    units = {said.unit for said in collectives.values() if said.unit is not None}
    kinds = {said.does for said in collectives.values()}
    drift = ("Ranks have drifted apart", [_by_value("{}", collectives)], _ORDER_ADVICE)
    if len(units) > 1 or len(kinds) > 1:
        return drift
    unit = f"unit '{min(units)}'" if units else "a unit"
    title = f"Ranks disagree about the parameters of {unit}"
    counts = {rank: len(said.params) for rank, said in by_rank.items()}
    if len({*counts.values()}) > 1:
        lines = [_by_value("the unit has {} parameters", counts)]
        return title, lines, _SHARDING_ADVICE
    if lines := _differences(by_rank, ("name", "size", "placement")):
        return title, lines, _SHARDING_ADVICE
    if lines := _differences(by_rank, ("compute", "reduce")):
        return title, lines, _DTYPE_ADVICE
    if lines := _differences(by_rank, ("reduced",)):
        title = f"Ranks disagree about the gradients of {unit}"
        return title, lines, _GRADIENT_ADVICE
    before = {said.after for said in collectives.values()}
    accumulate = {said.accumulates for said in collectives.values()} - {None}
    return drift if max(len(before), len(accumulate)) > 1 else None


def _differences(by_rank: Mapping[int, _Announced], fields: Sequence[str]) -> list[str]:
    lines = []
    for i, fqn in enumerate(next(iter(by_rank.values())).fqns):
        for field in fields:
            values = {
                rank: getattr(said.params[i], field) for rank, said in by_rank.items()
            }
            if len({*values.values()}) > 1:
                lines.append(f"{fqn}: {_by_value(getattr(_TEXTS, field), values)}")
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
