"""
Compares ranks before they gather or reduce a unit.

[Note: When ranks are compared]
Ranks that disagree would hang, crash, or sum the wrong elements. So they are compared
where every rank is about to issue a collective over the same group:

- Before a unit's first gather: its parameters, and whether it will gather again in
  backward. Lazy init is too early: one rank may evaluate replicated parameters alone,
  or call ``unshard`` where the others start with a forward.
- Before a reduction with a pattern (which parameters have a gradient, reduced in which
  dtypes) that is new for this unit and group. Ranks that have agreed so far know the
  same patterns, so all of them compare, or none does. A unit with more patterns than
  ``_MAX_PATTERNS`` is in no steady loop, and would wait at every step.

A pattern that is new on some ranks only meets another collective of the others, until
the time limit passes. If it is new on none, a difference is not noticed.
``TORCH_FSDP_CHECK_RANKS_AGREE=always`` compares before every gather and reduction, so
that all ranks raise where they drift apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from ._fsdp_api import AllGather
from ._fsdp_direct import shards_evenly
from ._fsdp_errors import add_note, listed
from ._fsdp_layout import describe_key, dtypes_of, ReduceBucket
from ._fsdp_registrations import fqns_of
from ._fsdp_scaling import backend_name


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup


# Bound at import, so that functions that users patch in `dist` do not see comparisons
all_gather_single = dist.all_gather_single
_SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
_MAX_PATTERNS = 8  # of one unit over one group
# What a rank announces: a line for the unit, each parameter and the unit's state. A line
# is a name, which may differ between ranks, and a string, "" if the rank does not know it
_Lines: TypeAlias = list[tuple[str, str]]
# How many comparisons a group has made: the same on its ranks, also after one that failed
_num_comparisons: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

_GATHERED, _NO_GRADIENT = "is gathered", "gets no gradient"
# An input that needs no gradient may move the unit's reduction to the end of backward
_UNIT_ADVICE = (
    "Every rank must call fully_shard on the same modules with the same settings, and "
    "run the same units in the same order in each microbatch. A rank without data for a "
    "unit must run it in its turn nevertheless, on a dummy input that requires a "
    "gradient if the others' does, and add its output times 0."
)
_PARAM_ADVICE = (
    "Every rank must shard the same model. Overrides of MixedPrecisionPolicy must return "
    "the same, and what no policy casts must be stored in the same dtypes."
)
_GRADIENT_ADVICE = (
    "Each backward must give gradients to the same parameters on every rank. Where it "
    "cannot, call set_reduce_scatter_unused_params(True) on the unit."
)
_HANG_ADVICE = (
    "Look for an earlier error on another rank. If there is none, the ranks have run "
    f"different steps: {_SWITCH}=always on all ranks finds the first difference."
)


class UnitAgreement:
    """Checks that all ranks are about to do the same for a param group."""

    def __init__(self, param_group: FSDPParamGroup):
        self._param_group = param_group
        _mode()  # raises if it is unknown
        # Whether gathers have been compared, and are not compared again
        self.has_compared_gathers = False
        # By group: the number of its first equal comparison, as names may differ by rank
        self._numbers: dict[dist.ProcessGroup, int] = {}
        self._patterns: dict[dist.ProcessGroup, set[frozenset]] = {}
        # What `check_reductions` has found to be agreed on: a steady loop repeats it
        self.agreed: Any = None

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""
        if getattr(comm, "needs_all_ranks", False):
            has_compared = self._compare(group)
            self.has_compared_gathers = has_compared and _mode() != "always"

    def check_reductions(self, buckets: Sequence[ReduceBucket], *settings: Any) -> None:
        """
        Raises if ranks are about to reduce other buckets, given the groups and the comm
        that this one reduces them with, and whether it all-reduces.
        """
        scatter_group, replicate_group, comm, all_reduces = settings
        groups = [scatter_group] if getattr(comm, "needs_all_ranks", False) else []
        groups += [replicate_group] if all_reduces else []
        pattern = frozenset((i, b.key) for b in buckets for i in b.params)
        is_agreed, always = True, _mode() == "always"
        for group in filter(None, groups):
            known = self._patterns.setdefault(group, set())
            is_new = pattern not in known and len(known) < _MAX_PATTERNS
            if always or is_new:
                has_compared = self._compare(group, buckets)
                is_agreed &= has_compared and not always
                if is_new and has_compared:
                    known.add(pattern)
        if is_agreed:
            self.agreed = buckets, *settings

    def add_note(
        self, error: BaseException, buckets: Sequence[ReduceBucket] | None = None
    ) -> None:
        """Names the unit, which backends do not know, in an error of a gather or reduction."""
        with contextlib.suppress(Exception):  # the error comes first
            _add_note(error, _announce(self._param_group, buckets))

    def _compare(
        self, group: dist.ProcessGroup, buckets: Sequence[ReduceBucket] | None = None
    ) -> bool:
        """Compares ranks by an all-gather of 32 bytes. Returns False while tracing."""
        device = self._param_group.device
        if not _has_others(group, device):
            return True
        if _is_traced(self._param_group):
            return False  # to be tried again
        mine = _announce(self._param_group, buckets)
        count = _num_comparisons[group] = _num_comparisons.get(group, 0) + 1
        number = self._numbers.get(group, count)
        unit, text = mine[0]
        mine[0] = unit, f"{text} as number {number}"
        texts = "\n".join(text for _, text in mine)
        by_rank: list[Any] = [mine] * group.size()
        try:
            # Users' counters of collectives or memory must not see this
            with torch.no_grad(), _disable_current_modes():
                data = hashlib.sha256(texts.encode()).digest()
                digest = torch.tensor([*data], dtype=torch.uint8, device=device)
                digests = digest.new_empty(group.size() * digest.numel())
                if backend_name(group, device) == "gloo":
                    # All-gathers of two sizes would abort the process. Where a barrier
                    # meets another collective, both time out.
                    # pyrefly: ignore [missing-attribute]
                    group._get_backend(device).barrier().wait()
                all_gather_single(digests, digest, group=group)
                rows = digests.cpu().view(group.size(), -1)
                if bool((rows == rows[0]).all()):
                    self._numbers[group] = number
                    return True
                dist.all_gather_object(by_rank, mine, group=group)
        except BaseException as error:
            _add_note(error, mine)
            raise
        ranks = dist.get_process_group_ranks(group)
        _raise_if_different(dict(zip(ranks, by_rank, strict=True)))
        return True


def _announce(
    group: FSDPParamGroup, buckets: Sequence[ReduceBucket] | None = None
) -> _Lines:
    """Returns what must be the same on all ranks in a gather, or in a reduction."""
    params, fqn = group.fsdp_params, group._module_fqn
    unit = "a unit" if fqn is None else f"unit '{fqn or '(root)'}'"
    size, state = f"{len(params)} parameters", ""
    if (min_nbytes := group._direct_memory.min_nbytes) is not None:
        size += f", those of {min_nbytes} bytes or more coalesced"
    if buckets is None:
        verb, texts = _GATHERED, [f"computes in {dtypes_of(p).compute}" for p in params]
        # Before lazy init the root is unknown, and evaluation gathers only once
        if fqn is not None and torch.is_grad_enabled():
            state = "stays unsharded after forward"
            if (mesh_info := group.post_forward_mesh_info) is not None:
                num_ranks = mesh_info.shard_mesh_size
                state = f"is resharded to {num_ranks} ranks after forward"
    else:
        verb, texts = "is reduced", [_NO_GRADIENT] * len(params)
        size += f", {group.reduce_bucket_cap or 'no reduce bucket cap'}"
        for bucket in buckets:
            for i in bucket.params:
                texts[i] = f"gets a gradient, reduced in {describe_key(bucket.key)}"
        # A rank whose shard is empty may have no gradient
        on_all = [p for p, text in zip(params, texts) if text is not _NO_GRADIENT]
        on_all = [*filter(shards_evenly, on_all)]
        if _mode() == "always" and on_all:
            has_earlier = on_all[0].sharded_param.grad is not None
            state = f"has {'' if has_earlier else 'no '}earlier gradients to add to"
    texts = [
        f"{text}, has size {tuple(p._orig_size)}, is sharded as {p.fsdp_placement},"
        for text, p in zip(texts, params, strict=True)
    ]
    return [(unit, f"{verb} ({size})"), *zip(fqns_of(group), texts), (unit, state)]


def _mode() -> str:
    """Returns the environment's mode, or raises if that is unknown."""
    mode = os.environ.get(_SWITCH) or "1"
    if mode not in ("0", "1", "always"):
        raise ValueError(f"{_SWITCH} is {mode!r}: set it to always or 0, or unset it")
    return mode


def _has_others(group: dist.ProcessGroup, device: torch.device) -> bool:
    # A group of another class may have no all-gather, or members that come and go
    is_known = type(group).__module__.startswith("torch.")
    if group.size() == 1 or _mode() == "0" or not is_known:
        return False
    return backend_name(group, device) != "fake"


def _is_traced(group: FSDPParamGroup) -> bool:
    """Whether what a param group issues now is recorded or simulated, and not run."""
    if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    shards = [fsdp_param._sharded_local_tensor for fsdp_param in group.fsdp_params]
    return detect_fake_mode(shards) is not None


def _add_note(error: BaseException, lines: _Lines) -> None:
    (unit, text), *params, _ = lines
    doing = "gathering" if _GATHERED in text else "reducing the gradients of"
    missing = [fqn for fqn, text in params if _NO_GRADIENT in text]
    without = f", without a gradient of {listed(missing)}" if missing else ""
    note = f"Raised while {doing} {unit}{without}."
    # Backends raise these where other ranks did not come, or came with other data
    is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)
    if is_gloos or isinstance(error, dist.DistError):
        note += f" {_HANG_ADVICE} {_UNIT_ADVICE}"
    add_note(error, note)


def _raise_if_different(by_rank: Mapping[int, _Lines]) -> None:
    """Raises with the first lines that are not the same on all ranks, if any."""
    columns = [dict(zip(by_rank, lines)) for lines in zip(*by_rank.values())]
    unit, *params, state = map(_find_difference, columns)
    differences = [unit or state]
    title, advice = "Ranks have drifted apart", _UNIT_ADVICE
    if any(params) and not unit:  # where units differ, their parameters say no more
        differences = [*filter(None, params)]
        units = [*dict.fromkeys(name for name, _ in columns[0].values())]
        kind, advice = "parameters", _PARAM_ADVICE
        if any(_NO_GRADIENT in difference for difference in differences):
            kind, advice = "gradients", _GRADIENT_ADVICE
        title = f"Ranks disagree about the {kind} of {' and '.join(units)}"
        advice += f" {_UNIT_ADVICE}" if len(units) > 1 else ""
    if any(differences):
        listing = listed(differences, separator="\n  ")
        switch = f"({_SWITCH}=0 on all ranks turns this check off.)"
        raise RuntimeError(f"{title}:\n  {listing}\n{advice} {switch}")


def _find_difference(lines: Mapping[int, tuple[str, str]]) -> str:
    """Returns what is said on which ranks, if those that know it do not say the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in lines.items():
        if text:
            ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) < 2:
        return ""
    return "; ".join(
        f"{lines[ranks[0]][0]} {text} on {'ranks' if ranks[1:] else 'rank'} "
        f"{', '.join(map(str, ranks))}"
        for text, ranks in ranks_of.items()
    )
