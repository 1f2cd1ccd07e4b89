"""
Compares ranks before they gather or reduce a unit.

[Note: When ranks are compared]
Ranks that disagree would send buffers of different sizes or contents: a hang, a crash,
or sums of the wrong elements. So they are compared where every rank is about to issue
that collective, over the same group:

- Before a unit's first gather: what it gathers, and whether it will gather again in
  backward. Not in lazy init: one rank may evaluate replicated parameters alone, or call
  ``unshard`` where the others start with a forward.
- Before a reduction with a pattern (which parameters have a gradient, reduced in which
  dtypes) that is new for this unit and group. Ranks that have agreed so far know the
  same patterns, so all of them compare, or none does. After ``_MAX_PATTERNS`` a unit is
  compared no more, or it might wait at every step.

Only what the collectives depend on is compared. Names and classes may differ between
ranks, e.g. if one of them wraps a module to log what it does. So units are told apart by
the order in which they first came over a group, which is the same on all ranks that issue
the same collectives.

Resetting an iteration forgets none of this: the other ranks may not do so.

If a pattern is new on some ranks only, their comparison meets the others' reduction, and
the time limit passes. If none is new but they differ, nothing is seen, as in a program
that compares nothing. ``TORCH_FSDP_CHECK_RANKS_AGREE=always`` compares before every
gather and every reduction: all ranks raise where they drift apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_common import FSDPMeshInfo
from ._fsdp_comms import declares
from ._fsdp_layout import (
    BucketKey,
    describe_key,
    dtypes_of,
    ReduceBucket,
    ReduceBucketCap,
)
from ._fsdp_param import FSDPParam
from ._fsdp_param_cache import GatherPlan
from ._fsdp_scaling import backend_name, Factors


# Imported by name, so that patched `dist` functions do not intercept it
all_gather_single = dist.all_gather_single
_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
# In one message: mostly one thing is wrong
_MAX_LISTED = 8
# Of a unit over one group. A loop that shows more is not a steady one.
_MAX_PATTERNS = 8
# Which parameters of a unit have a gradient, by position, and what each is reduced in
_Pattern: TypeAlias = tuple[tuple[int, BucketKey], ...]
# How many units have been compared over a group
_num_units: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class DescribedUnit:
    """A unit as it is when it is described."""

    fqn: str | None  # None before the root's lazy init
    params: Sequence[FSDPParam]
    names: tuple[str, ...]  # of the parameters, as seen from the unit
    fqns: tuple[str, ...]  # and as seen from the model
    device: torch.device
    post_forward_mesh_info: FSDPMeshInfo | None
    gather_world_size: int
    gather_plan: GatherPlan | None  # None before the first gather
    # What the sum over all data-parallel ranks is divided by, and how in a bucket
    divided_by: float
    divide_factors: Callable[[BucketKey], Factors]
    comms: tuple[AllGather, ReduceScatter]
    has_partial_reduces: bool
    reduce_bucket_cap: ReduceBucketCap | None


class UnitAgreement:
    """Checks that all ranks are about to do the same for one unit."""

    def __init__(self, describe: Callable[[], DescribedUnit]):
        self._describe = describe
        # Whether gathers have been compared, and are not compared again
        self.on_gathers = False
        # By group: the place among its units, from 1 on, in the order of first use
        self._numbers: dict[dist.ProcessGroup, int] = {}
        self._patterns: dict[dist.ProcessGroup, set[_Pattern]] = {}
        # Those last checked, which a steady loop repeats
        self._last_buckets: dict[dist.ProcessGroup, Sequence[ReduceBucket]] = {}

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""
        if declares(type(comm), "needs_all_ranks"):
            unit = self._describe()
            has_compared = self._compare(unit, group, _announce(unit))
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
        if comm is not None and not declares(type(comm), "needs_all_ranks"):
            return
        always, pattern = _compares_always(), _pattern_of(buckets)
        known = self._patterns.setdefault(group, set())
        is_new = pattern not in known and len(known) < _MAX_PATTERNS
        if pattern and (always or is_new):  # else nothing is sent over this group
            unit = self._describe()
            mine = _announce(unit, pattern)
            if always:
                mine = mine._replace(accumulates=_accumulates(unit, pattern))
            if not self._compare(unit, group, mine):
                return
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

    def _compare(
        self, unit: DescribedUnit, group: dist.ProcessGroup, mine: _Announced
    ) -> bool:
        """
        Compares the ranks of ``group``: one all-gather of 32 bytes a rank. Returns
        False where nothing was compared that another time would be.
        """
        if not _has_others(group, unit.device):
            return True
        if _is_traced(unit.params, unit.device):
            return False
        if group not in self._numbers:
            _num_units[group] = _num_units.get(group, 0) + 1
            self._numbers[group] = _num_units[group]
        numbered = mine._replace(number=self._numbers[group])
        by_rank: list[Any] = [numbered] * group.size()
        try:
            # Counters of a user's collectives or memory are not about this
            with torch.no_grad(), _disable_current_modes():
                digest = torch.frombuffer(numbered.digest(), dtype=torch.uint8)
                digest = digest.to(unit.device)
                digests = digest.new_empty(group.size() * digest.numel())
                all_gather_single(digests, digest, group=group)
                rows = digests.cpu().view(group.size(), -1)
                if bool((rows == rows[0]).all()):
                    return True
                dist.all_gather_object(by_rank, numbered, group=group)
        except BaseException as error:
            _add_note(error, mine)
            raise
        ranks = dist.get_process_group_ranks(group)
        _raise_if_different(dict(zip(ranks, by_rank, strict=True)))
        return True


# What is compared #


class _Announced(NamedTuple):
    """What one rank is about to do for a unit, and with what."""

    does: str  # "gathers" or "reduces"
    params: list[tuple[str, ...]]  # what is so of each, "" where nothing is said
    unit: str | None  # this and the parameters' FQNs are not compared
    fqns: tuple[str, ...]
    number: int = 0  # of the unit, see `UnitAgreement`; 0 outside of comparisons
    # Of a gather; None before the root's lazy init
    after_forward: str | None = None
    # How `set_reduce_bucket_cap` was called for the unit; of a reduction
    cap: str = ""
    # Only if ranks are always compared: whether there are gradients of earlier
    # reductions to add to
    accumulates: bool | None = None

    def digest(self) -> bytearray:
        compared = repr(self._replace(unit=None, fqns=()))
        return bytearray(hashlib.sha256(compared.encode()).digest())

    def __str__(self) -> str:
        text = f"{self.does} {_unit(self.unit)}"
        if self.number > 0:
            text += f" as number {self.number}"
        if self.accumulates is not None:
            has = "with" if self.accumulates else "without"
            text += f", {has} earlier gradients to add to"
        return text


_NO_GRADIENT = "gets no gradient"


def _unit(name: str | None) -> str:
    return f"unit '{name}'" if name else "a unit"


def _announce(unit: DescribedUnit, pattern: _Pattern | None = None) -> _Announced:
    """Returns what is known before a gather, or before a reduction with a pattern."""
    keys, params = dict(pattern or ()), []
    for i, fsdp_param in enumerate(unit.params):
        if pattern is None:
            said = [f"computes in {dtypes_of(fsdp_param).compute}", ""]
        elif i in keys:
            said = [f"reduces in {describe_key(keys[i])}", "gets a gradient"]
        else:
            said = ["", _NO_GRADIENT]
        size, placement = tuple(fsdp_param._orig_size), fsdp_param.fsdp_placement
        params.append((f"has size {size}", f"is sharded as {placement}", *said))
    name = "(root)" if unit.fqn == "" else unit.fqn
    if pattern is not None:
        cap = str(unit.reduce_bucket_cap)
        return _Announced("reduces", params, name, unit.fqns, cap=cap)
    after_forward = None if unit.fqn is None else _after_forward(unit)
    return _Announced("gathers", params, name, unit.fqns, after_forward=after_forward)


def _after_forward(unit: DescribedUnit) -> str:
    if (mesh_info := unit.post_forward_mesh_info) is None:
        return "stays unsharded after forward"
    return f"is resharded to {mesh_info.shard_mesh_size} ranks after forward"


def _pattern_of(buckets: Sequence[ReduceBucket]) -> _Pattern:
    keys = {slot.param: bucket.key for bucket in buckets for slot in bucket.slots}
    return tuple(sorted(keys.items()))


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
    "Every rank must have the same units with the same reshard_after_forward, run them "
    "in the same order for the same number of microbatches, and sync gradients in the "
    "same ones. (Units are numbered in the order in which they first came.)"
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
    drift = "Ranks have drifted apart"
    if len({(mine.does, mine.number) for mine in said}) > 1:
        _refuse(drift, [_by_value(by_rank)], _ORDER_ADVICE)
    unit = _unit(min((mine.unit for mine in said if mine.unit), default=None))
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
    _refuse(title, _differing(by_rank, 0, 2), _SHARDING_ADVICE)
    _refuse(title, _differing(by_rank, 2, 3), _DTYPE_ADVICE)
    title = f"Ranks disagree about the gradients of {unit}"
    _refuse(title, _differing(by_rank, 3, 4), _GRADIENT_ADVICE)
    if len({mine.accumulates for mine in said} - {None}) > 1:
        _refuse(drift, [_by_value(by_rank)], _ORDER_ADVICE)
    if len({mine.after_forward for mine in said} - {None}) > 1:
        texts = [f"{mine}, which {mine.after_forward}," for mine in said]
        _refuse(drift, [_by_value(dict(zip(by_rank, texts)))], _ORDER_ADVICE)
    # Else one rank does not know yet what comes after forward


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
            texts = {rank: mine.params[i][which] for rank, mine in by_rank.items()}
            said = {rank: text for rank, text in texts.items() if text}
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
