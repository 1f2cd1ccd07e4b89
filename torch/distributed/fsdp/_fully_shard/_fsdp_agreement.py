"""
Compares ranks before they gather or reduce a unit.

[Note: When ranks are compared]
Ranks that disagree would send buffers of different sizes or contents: a hang, a crash,
or sums of the wrong elements. So they are compared where every rank is about to issue
that collective, over the same group:

- Before a unit's first gather: how its parameters are laid out. Not in lazy init: one
  rank may evaluate replicated parameters alone, or call ``unshard`` where the others
  start with a forward.
- Before a reduction with a pattern (which parameters have a gradient, reduced in which
  dtypes) that is new for this unit and group. Ranks that have agreed so far know the
  same patterns, so all of them compare, or none does. After ``_MAX_PATTERNS`` a unit is
  compared no more, or it might wait at every step.

Resetting an iteration forgets none of this: the other ranks may not do so.

If a pattern is new on some ranks only, their comparison meets the others' reduction, and
the time limit passes. If none is new but they differ, nothing is seen, as in a program
that compares nothing. ``TORCH_FSDP_CHECK_RANKS_AGREE=always`` compares before every
gather and every reduction, and which unit came before as well: all ranks raise where
they drift apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_comms import is_of_group
from ._fsdp_described_unit import DescribedUnit
from ._fsdp_dtypes import dtypes_of
from ._fsdp_layout import describe_key, ReduceBucket
from ._fsdp_param import FSDPParam
from ._fsdp_scaling import backend_name


# Imported by name, so that patched `dist` functions do not intercept it
all_gather_single = dist.all_gather_single
_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
# In one message: mostly one thing is wrong
_MAX_LISTED = 8
# Of a unit over one group. A loop that shows more is not a steady one.
_MAX_PATTERNS = 8
# Which parameters of a unit have a gradient, by position, and what each is reduced in
_Pattern: TypeAlias = tuple[tuple[int, torch.dtype], ...]
# FQN of the unit last reduced over a group, if ranks are always compared
_last_reduced: WeakKeyDictionary[dist.ProcessGroup, str | None] = WeakKeyDictionary()


class UnitAgreement:
    """Checks that all ranks are about to do the same for one unit."""

    def __init__(self, describe: Callable[[], DescribedUnit]):
        self._describe = describe
        # Whether gathers have been compared, and are not compared again
        self.on_gathers = False
        self._patterns: dict[dist.ProcessGroup, set[_Pattern]] = {}
        # Those last checked, which a steady loop repeats
        self._last_buckets: dict[dist.ProcessGroup, Sequence[ReduceBucket]] = {}

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""
        if is_of_group(comm):
            unit = self._describe()
            has_compared = _compare(unit, group, _announce(unit))
            self.on_gathers = has_compared and not _compares_always()

    def check_reduction(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[ReduceBucket],
        comm: ReduceScatter | None = None,
    ) -> None:
        """Does so before a reduction by ``comm``, or without one by all-reduces."""
        if self._last_buckets.get(group) is buckets:
            return
        if comm is not None and not is_of_group(comm):
            return
        always, pattern = _compares_always(), _pattern_of(buckets)
        known = self._patterns.setdefault(group, set())
        is_new = pattern not in known and len(known) < _MAX_PATTERNS
        if pattern and (always or is_new):  # else nothing is sent over this group
            unit = self._describe()
            mine = _announce(unit, pattern)
            if always:
                adds, last = _accumulates(unit, pattern), _last_reduced.get(group)
                mine = mine._replace(accumulates=adds, after=last)
            if not _compare(unit, group, mine):
                return
            if always:
                _last_reduced[group] = mine.unit
            if is_new:
                known.add(pattern)
        if not always:
            self._last_buckets[group] = buckets

    def add_note(
        self, error: BaseException, buckets: Sequence[ReduceBucket] | None = None
    ) -> None:
        """Adds what a backend does not know to an error in a gather or a reduction."""
        with contextlib.suppress(Exception):  # the error comes first
            pattern = None if buckets is None else _pattern_of(buckets)
            _add_note(error, _announce(self._describe(), pattern))


# What is compared #


class _Announced(NamedTuple):
    """What one rank is about to do for a unit, and with what."""

    does: str  # "gathers" or "reduces"
    unit: str | None
    params: list[tuple[str, ...]]  # what is so of each
    # Is not compared: before the root's lazy init one rank may know less
    fqns: tuple[str, ...]
    # Only if ranks are always compared: whether there are gradients of earlier
    # reductions to add to, and the unit last reduced over the group
    accumulates: bool | None = None
    after: str | None = None
    # How `set_reduce_bucket_cap` was called for the unit
    cap: str = ""

    def __str__(self) -> str:
        text = f"{self.does} {_unit(self.unit)}"
        if self.after is not None:
            text += f" after {_unit(self.after)}"
        if self.accumulates is not None:
            has = "with" if self.accumulates else "without"
            text += f", {has} earlier gradients to add to"
        return text


_NO_GRADIENT = "gets no gradient"


def _unit(name: str | None) -> str:
    return f"unit '{name}'" if name else "a unit"


def _announce(unit: DescribedUnit, pattern: _Pattern | None = None) -> _Announced:
    """Returns what is known before a gather, or before a reduction with a pattern."""
    reduced, params = dict(pattern or ()), []
    # A plugin may have removed parameters from the list
    for i, (fsdp_param, name) in enumerate(zip(unit.params, unit.names)):
        dtypes, grad = dtypes_of(fsdp_param), _NO_GRADIENT
        if i in reduced:
            grad = f"gets a gradient, sent in {reduced[i]}"
        params.append(
            (
                f"is {name}",
                f"has size {tuple(fsdp_param._orig_size)}",
                f"is sharded as {fsdp_param.fsdp_placement}",
                f"computes in {dtypes.compute}",
                f"reduces in {describe_key((dtypes.reduce, dtypes.comm))}",
                grad,
            )
        )
    does = "gathers" if pattern is None else "reduces"
    name = "(root)" if unit.fqn == "" else unit.fqn
    cap = str(unit.reduce_bucket_cap)
    return _Announced(does, name, params, unit.fqns, cap=cap)


def _pattern_of(buckets: Sequence[ReduceBucket]) -> _Pattern:
    dtypes = {slot.param: bucket.dtype for bucket in buckets for slot in bucket.slots}
    return tuple(sorted(dtypes.items()))


def _accumulates(unit: DescribedUnit, pattern: _Pattern) -> bool | None:
    """Returns None if this rank has no element to add to, whose gradient may be unset."""
    if unit.has_partial_reduces:
        return True
    for i, _ in pattern:
        if unit.params[i].sharded_size.numel() > 0:
            return unit.params[i].sharded_param.grad is not None
    return None


# Asking the others #


def _compares_always() -> bool:
    return os.environ.get(_SWITCH) == "always"


def _compare(unit: DescribedUnit, group: dist.ProcessGroup, mine: _Announced) -> bool:
    """
    Compares the ranks of ``group``: one all-gather of 32 bytes a rank. Returns
    False where nothing was compared that another time would be.
    """
    if not _has_others(group, unit.device):
        return True
    if _is_traced(unit.params, unit.device):
        return False
    digest = hashlib.sha256(repr(mine._replace(fqns=())).encode()).digest()
    by_rank: list[Any] = [mine] * group.size()
    try:
        # Counters of a user's collectives or memory are not about this
        with torch.no_grad(), _disable_current_modes():
            tensor = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
            tensor = tensor.to(unit.device)
            digests = tensor.new_empty(group.size() * len(digest))
            all_gather_single(digests, tensor, group=group)
            rows = digests.cpu().view(group.size(), len(digest))
            if bool((rows == rows[0]).all()):
                return True
            dist.all_gather_object(by_rank, mine, group=group)
    except BaseException as error:
        _add_note(error, mine)
        raise
    ranks = dist.get_process_group_ranks(group)
    _raise_if_different(dict(zip(ranks, by_rank, strict=True)))
    return True


def _has_others(group: dist.ProcessGroup, device: torch.device) -> bool:
    if group.size() == 1 or os.environ.get(_SWITCH) == "0":
        return False
    if not type(group).__module__.startswith("torch."):
        return False  # it may have no all-gather, or members that come and go
    return backend_name(group, device) != "fake"


def _is_traced(fsdp_params: Sequence[FSDPParam], device: torch.device) -> bool:
    """Whether what is issued now is recorded or simulated, and not run."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True  # a graph is not captured before steps have been run
    return detect_fake_mode([p._sharded_local_tensor for p in fsdp_params]) is not None


# What is said #

_ORDER_ADVICE = (
    "Every rank must have the same units, run them in the same order for the same "
    "number of microbatches, and sync gradients in the same ones."
)
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
    "Each backward must give gradients to the same parameters on every rank. Where it "
    "cannot, call set_reduce_scatter_unused_params(True) on the unit, which reduces "
    "zeros for the others."
)
_HANG_ADVICE = (
    "If no rank has failed before, the others do something else, see what they say "
    f"here. {_SWITCH}=always on all ranks finds where that begins."
)


def _add_note(error: BaseException, mine: _Announced) -> None:
    if not hasattr(error, "add_note"):  # from Python 3.11 on
        return
    note = f"This rank {mine}"
    if mine.does == "reduces":
        params = zip(mine.fqns, mine.params)
        missing = [fqn for fqn, said in params if _NO_GRADIENT in said]
        note += f", and has no gradient of {_listed(missing)}" if missing else ""
    # Whether a backend says that other ranks did not come, or came with other data
    is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)
    is_about_ranks = is_gloos or isinstance(error, dist.DistError)
    error.add_note(f"{note}. {_HANG_ADVICE}" if is_about_ranks else f"{note}.")


def _raise_if_different(by_rank: Mapping[int, _Announced]) -> None:
    said = by_rank.values()
    units = {mine.unit for mine in said if mine.unit is not None}
    drift = "Ranks have drifted apart", [_by_value(by_rank)], _ORDER_ADVICE
    if len(units) > 1 or len({mine.does for mine in said}) > 1:
        _refuse(*drift)
    unit = _unit(min(units, default=None))
    caps = {rank: mine.cap for rank, mine in by_rank.items()}
    if len({*caps.values()}) > 1:
        title = f"Ranks have called set_reduce_bucket_cap differently for {unit}"
        _refuse(title, [_by_value(caps)], "Every rank must pass the same sizes.")
    title = f"Ranks disagree about the parameters of {unit}"
    counts = {
        rank: f"the unit has {len(mine.params)} parameters"
        for rank, mine in by_rank.items()
    }
    if len({*counts.values()}) > 1:
        _refuse(title, [_by_value(counts)], _SHARDING_ADVICE)
    _refuse(title, _differing(by_rank, 0, 3), _SHARDING_ADVICE)
    _refuse(title, _differing(by_rank, 3, 5), _DTYPE_ADVICE)
    title = f"Ranks disagree about the gradients of {unit}"
    _refuse(title, _differing(by_rank, 5, 6), _GRADIENT_ADVICE)
    accumulate = {mine.accumulates for mine in said} - {None}
    if len({mine.after for mine in said}) > 1 or len(accumulate) > 1:
        _refuse(*drift)
    # Else one rank does not know the unit's name yet, before the root's lazy init


def _refuse(title: str, lines: Sequence[str], advice: str) -> None:
    if lines:
        off = f"({_SWITCH}=0 on all ranks turns this check off.)"
        listed = _listed(lines, "\n  ")
        raise RuntimeError(f"{title}:\n  {listed}\n{advice} {off}")


def _differing(by_rank: Mapping[int, _Announced], first: int, last: int) -> list[str]:
    """Returns a line for each of these statements on a parameter that differs."""
    lines = []
    for i, fqn in enumerate(next(iter(by_rank.values())).fqns):
        for which in range(first, last):
            said = {rank: mine.params[i][which] for rank, mine in by_rank.items()}
            if len({*said.values()}) > 1:
                lines.append(f"{fqn}: {_by_value(said)}")
    return lines


def _by_value(said: Mapping[int, object]) -> str:
    """Returns what is so on which ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, value in said.items():
        ranks.setdefault(str(value), []).append(str(rank))
    return ", ".join(
        f"{text} on {'ranks' if len(of) > 1 else 'rank'} {', '.join(of)}"
        for text, of in ranks.items()
    )


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - _MAX_LISTED
    if more > 0:
        texts = [*texts[:_MAX_LISTED], f"and {more} more"]
    return separator.join(texts)
