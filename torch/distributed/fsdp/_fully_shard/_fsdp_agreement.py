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
  same patterns, so all of them compare, or none does, and resetting an iteration, which
  one rank may do alone, forgets none. After ``_MAX_PATTERNS`` a unit is compared no
  more, or it might wait at every step.

Only what the collectives depend on is compared. Names and classes may differ between
ranks, e.g. if one of them wraps a module to log what it does. So units are told apart
by the order in which they first came over a group.

If something is new on some ranks only, their comparison meets another collective of
the others, and the time limit passes. If nothing is new but they differ, nothing is
seen, as in a program that compares nothing. ``TORCH_FSDP_CHECK_RANKS_AGREE=always``
compares before every gather and every reduction: all ranks raise where they drift
apart.
"""

# Tests: agreement, drift
from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_api import AllGather
from ._fsdp_errors import listed
from ._fsdp_layout import BucketKey, describe_key, dtypes_of, ReduceBucket
from ._fsdp_param import FSDPParam
from ._fsdp_registrations import fqns_of
from ._fsdp_scaling import backend_name


# Imported by name, so that patched `dist` functions do not intercept it
all_gather_single = dist.all_gather_single
_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
# Of a unit over one group. A loop that shows more is not a steady one.
_MAX_PATTERNS = 8
# Which parameters of a unit have a gradient, by position, and what each is reduced in
_Pattern: TypeAlias = tuple[tuple[int, BucketKey], ...]
# How many units have been compared over a group
_num_units: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class UnitAgreement:
    """Checks that all ranks are about to do the same for a param group."""

    def __init__(self, param_group: Any):
        self._param_group = param_group
        _mode()  # raises if it is unknown
        # Whether gathers have been compared, and are not compared again
        self.on_gathers = False
        # By group: the place among its units, from 1 on, in the order of first use
        self._numbers: dict[dist.ProcessGroup, int] = {}
        self._patterns: dict[dist.ProcessGroup, set[_Pattern]] = {}
        # Those last checked, which a steady loop repeats
        self._last_buckets: dict[dist.ProcessGroup, Sequence[ReduceBucket]] = {}

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""
        if getattr(comm, "needs_all_ranks", False):
            has_compared = self._compare(group, _announce(self._param_group))
            self.on_gathers = has_compared and _mode() != "always"

    def check_reduction(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[ReduceBucket],
        comm: Any = None,
    ) -> None:
        """Does so before a reduction by ``comm``, or without one by all-reduces."""
        if self._last_buckets.get(group) is buckets:
            return
        if comm is not None and not getattr(comm, "needs_all_ranks", False):
            return
        always, pattern = _mode() == "always", _pattern_of(buckets)
        known = self._patterns.setdefault(group, set())
        is_new = pattern not in known and len(known) < _MAX_PATTERNS
        if pattern and (always or is_new):  # else nothing is sent over this group
            if not self._compare(group, _announce(self._param_group, pattern)):
                return
            if is_new:
                known.add(pattern)
        if not always:
            self._last_buckets[group] = buckets

    def add_note(
        self,
        error: BaseException,
        buckets: Sequence[ReduceBucket] | None = None,
        joined: Sequence[FSDPParam] = (),
    ) -> None:
        """
        Adds what a backend does not know to an error in a gather, in a reduction of
        ``buckets``, or in one that several units' parameters have ``joined``.
        """
        with contextlib.suppress(Exception):  # the error comes first
            if joined:
                names = listed([str(p._param_fqn) for p in joined])
                what = f"{names}, joined by set_reduce_bucket_cap"
                return _add_note(error, _Announced("reduces", {}, what, []))
            pattern = None if buckets is None else _pattern_of(buckets)
            _add_note(error, _announce(self._param_group, pattern))

    def _compare(self, group: dist.ProcessGroup, mine: _Announced) -> bool:
        """
        Compares the ranks of ``group``: one all-gather of 32 bytes a rank, over gloo
        after a barrier. Returns False if it must be tried again, as nothing is compared
        while tracing.
        """
        device = self._param_group.device
        if not _has_others(group, device):
            return True
        if _is_traced(self._param_group.fsdp_params, device):
            return False
        if group not in self._numbers:
            _num_units[group] = _num_units.get(group, 0) + 1
            self._numbers[group] = _num_units[group]
        mine.said["order"] = [f" as number {self._numbers[group]}"]
        compared = hashlib.sha256(repr((mine.does, mine.said)).encode()).digest()
        by_rank: list[Any] = [mine] * group.size()
        try:
            # Counters of a user's collectives or memory are not about this
            with torch.no_grad(), _disable_current_modes():
                digest = torch.tensor([*compared], dtype=torch.uint8, device=device)
                digests = digest.new_empty(group.size() * digest.numel())
                if backend_name(group, device) == "gloo":
                    # Which aborts a process if all-gathers of two sizes meet. Where a
                    # barrier meets another collective, both time out.
                    # pyrefly: ignore [missing-attribute]
                    group._get_backend(device).barrier().wait()
                all_gather_single(digests, digest, group=group)
                rows = digests.cpu().view(group.size(), -1)
                if bool((rows == rows[0]).all()):
                    return True
                dist.all_gather_object(by_rank, mine, group=group)
        except BaseException as error:
            _add_note(error, mine)
            raise
        ranks = dist.get_process_group_ranks(group)
        _raise_if_different(dict(zip(ranks, by_rank, strict=True)))
        return True


class _Announced(NamedTuple):
    """What one rank is about to do for a unit, and with what."""

    does: str  # "gathers" or "reduces"
    # By key of `_ADVICE`: of the unit or of each parameter, "" where nothing is said
    said: dict[str, list[str]]
    # Names, which are not compared
    unit: str
    fqns: list[str]


def _announce(group: Any, pattern: _Pattern | None = None) -> _Announced:
    """Returns what is known before a gather, or before a reduction with a pattern."""
    params, fqn = group.fsdp_params, group._module_fqn
    unit = "a unit" if fqn is None else f"unit '{fqn or '(root)'}'"
    said = {
        "count": [f", which has {len(params)} parameters,"],
        "size": [f"has size {tuple(p._orig_size)}" for p in params],
        "placement": [f"is sharded as {p.fsdp_placement}" for p in params],
    }
    if pattern is None:
        said["dtype"] = [f"computes in {dtypes_of(p).compute}" for p in params]
        after = ", which stays unsharded after forward,"
        if (mesh_info := group.post_forward_mesh_info) is not None:
            ranks = mesh_info.shard_mesh_size
            after = f", which is resharded to {ranks} ranks after forward,"
        # Before lazy init the root is unknown, and evaluation gathers only once
        is_known = fqn is not None and torch.is_grad_enabled()
        said["after forward"] = [after if is_known else ""]
        return _Announced("gathers", said, unit, fqns_of(group))
    said["cap"] = [f", with {group.reduce_bucket_cap or 'no reduce bucket cap'},"]
    said["dtype"], said["gradient"] = [""] * len(params), [_NO_GRADIENT] * len(params)
    for i, key in pattern:
        said["dtype"][i] = f"reduces in {describe_key(key)}"
        said["gradient"][i] = "gets a gradient"
    if _mode() == "always":  # whether there are gradients of earlier reductions
        added = [params[i] for i, _ in pattern]
        # Without an element on this rank, the gradient may be unset
        held = [p.sharded_param.grad for p in added if p.sharded_size.numel() > 0]
        has_earlier = group._reducer.partial_reduces or (held and held[0] is not None)
        is_known, which = has_earlier or held, "with" if has_earlier else "without"
        text = f", {which} earlier gradients to add to,"
        said["microbatch"] = [text if is_known else ""]
    return _Announced("reduces", said, unit, fqns_of(group))


def _pattern_of(buckets: Sequence[ReduceBucket]) -> _Pattern:
    keys = {slot.param: bucket.key for bucket in buckets for slot in bucket.slots}
    return tuple(sorted(keys.items()))


def _mode() -> str:
    """Returns what the environment says, or raises if that is unknown."""
    mode = os.environ.get(_SWITCH) or "1"
    if mode not in ("0", "1", "always"):
        raise ValueError(
            f"The environment variable {_SWITCH} is {mode!r}: set it to always to "
            "compare ranks before every collective, to 0 to never compare them, or "
            "unset it to compare them before what is new"
        )
    return mode


def _has_others(group: dist.ProcessGroup, device: torch.device) -> bool:
    if group.size() == 1 or _mode() == "0":
        return False
    if not type(group).__module__.startswith("torch."):
        return False  # it may have no all-gather, or members that come and go
    return backend_name(group, device) != "fake"


def _is_traced(fsdp_params: Sequence[FSDPParam], device: torch.device) -> bool:
    """Whether what is issued now is recorded or simulated, and not run."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True  # a graph is not captured before steps have been run
    return detect_fake_mode([p._sharded_local_tensor for p in fsdp_params]) is not None


_NO_GRADIENT = "gets no gradient"
# `x + 0 * unit(x)` is alike in any place: an input that needs no gradient may move the
# unit's reduction to the end of backward
_SKIP_ADVICE = (
    "A rank without data for a unit, e.g. with a batch without images, must run it in "
    "its turn nevertheless, on a dummy input that requires a gradient if the others' "
    "does, and add its output times 0. set_reduce_scatter_unused_params(True) is for "
    "parameters that a unit which runs does not use."
)
_ORDER_ADVICE = (
    "Every rank must have the same units with the same reshard_after_forward, run them "
    "in the same order for the same number of microbatches, and sync gradients in the "
    "same ones. (Units are numbered in the order in which they first came.) "
    f"{_SKIP_ADVICE}"
)
_SHARDING_ADVICE = (
    "Every rank must build the same model and call fully_shard on the same modules of "
    "it, with the same ignored_params and shard_placement_fn."
)
# What may differ, in the order in which it is looked for
_ADVICE = {
    "order": _ORDER_ADVICE,
    "cap": "Every rank must pass the same sizes to set_reduce_bucket_cap.",
    "count": _SHARDING_ADVICE,
    "size": _SHARDING_ADVICE,
    "placement": _SHARDING_ADVICE,
    "dtype": "Overrides of MixedPrecisionPolicy must return the same on every rank, "
    "and parameters that no policy casts must be stored in the same dtypes, e.g. "
    "loaded from the same checkpoint.",
    "gradient": "The same parameters must require gradients on every rank, and each "
    "backward must give gradients to the same ones. Where it cannot, call "
    "set_reduce_scatter_unused_params(True) on the unit, which reduces zeros for the "
    "others.",
    "microbatch": _ORDER_ADVICE,
    "after forward": _ORDER_ADVICE,
}
_OF_PARAMS = ("size", "placement", "dtype", "gradient")  # of these, what each has
_HANG_ADVICE = (
    "Look first for an earlier error on another rank. If there is none, the ranks have "
    f"run different steps: {_SWITCH}=always on all ranks finds the first difference. "
    f"{_SKIP_ADVICE}"
)


def _add_note(error: BaseException, mine: _Announced) -> None:
    if not hasattr(error, "add_note"):  # from Python 3.11 on
        return
    what = {"gathers": "gathering", "reduces": "reducing the gradients of"}[mine.does]
    note, gradients = f"Raised while {what} {mine.unit}", mine.said.get("gradient", ())
    missing = [fqn for fqn, s in zip(mine.fqns, gradients) if s == _NO_GRADIENT]
    note += f", without a gradient of {listed(missing)}" if missing else ""
    # Whether a backend says that other ranks did not come, or came with other data
    is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)
    is_about_ranks = is_gloos or isinstance(error, dist.DistError)
    error.add_note(f"{note}. {_HANG_ADVICE}" if is_about_ranks else f"{note}.")


def _raise_if_different(by_rank: Mapping[int, _Announced]) -> None:
    """Raises with what is said on which ranks, where that is not the same."""
    units = {mine.unit: mine for mine in by_rank.values()}
    if len(units) > 1:
        units.pop("a unit", None)  # of ranks that do not know its name yet
    unit = " and ".join(units)
    for what, advice in _ADVICE.items():
        title = "Ranks have drifted apart"
        if what == "gradient":
            title = f"Ranks disagree about the gradients of {unit}"
        elif what in _OF_PARAMS:
            title = f"Ranks disagree about the parameters of {unit}"
        lines: list[str] = []
        said = [mine.said.get(what, ()) for mine in by_rank.values()]
        for i, texts in enumerate(zip(*said)):
            ranks_of: dict[tuple[str, str], list[str]] = {}
            for (rank, mine), text in zip(by_rank.items(), texts):
                words = text if what in _OF_PARAMS else f"{mine.does} {mine.unit}{text}"
                if text:
                    ranks_of.setdefault((mine.does, text), [words]).append(str(rank))
            parts = [
                f"{words} on {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
                for words, *ranks in ranks_of.values()
            ]
            if len(parts) > 1:
                name = ""
                if what in _OF_PARAMS:
                    name = " or ".join(mine.fqns[i] for mine in units.values()) + ": "
                lines.append(name + ", ".join(parts))
        if lines:
            if len(units) > 1 and advice != _ORDER_ADVICE:
                advice = f"{advice} {_ORDER_ADVICE}"
            off = f"({_SWITCH}=0 on all ranks turns this check off.)"
            listing = listed(lines, "\n  ")
            raise RuntimeError(f"{title}:\n  {listing}\n{advice} {off}")
