"""
Compares ranks, which would hang, crash, or sum the wrong elements if they disagreed. This
happens where every rank is about to issue a collective over the same group:

- Before a unit's first gather: its parameters, and whether it gathers again in backward.
  In lazy init one rank may evaluate alone, or call ``unshard`` unlike others.
- Before a reduction with a pattern (which parameters have a gradient, reduced in which
  dtypes) that is new for this unit and group. Ranks that have agreed so far know the
  same patterns, so all of them compare, or none does. A unit with more patterns than
  ``_MAX_PATTERNS`` is in no steady loop, and would wait at every step.

A pattern that is new on some ranks only meets another collective of the others, until
the time limit passes. If it is new on none, only ``always`` notices a difference.
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
_Buckets: TypeAlias = Sequence[ReduceBucket] | None  # None: of a gather
# How many comparisons a group has made: the same on its ranks, also after one that failed
_num_comparisons: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_NO_GRADIENT = "gets no gradient"
# An input that needs no gradient may move the unit's reduction to the end of backward
_ADVICE = (
    "Every rank must call fully_shard on the same modules with the same settings and "
    "dtypes (overrides of MixedPrecisionPolicy must return the same), and run the same "
    "units in the same order in each microbatch. A rank without data for a unit must run "
    "it in its turn nevertheless, on a dummy input that requires a gradient if the "
    "others' does, and add its output times 0. Where backward gives gradients to other "
    "parameters than elsewhere, call set_reduce_scatter_unused_params(True) on the unit."
)


class UnitAgreement:
    """Compares ranks for a param group, which asks just before a collective."""

    def __init__(self, param_group: FSDPParamGroup):
        self._param_group = param_group
        _mode()  # raises if it is unknown
        # Whether gathers have been compared, and are not compared again
        self.has_compared_gathers = False
        # By group: the number of its first equal comparison, as names may differ by rank
        self._numbers: dict[dist.ProcessGroup, int] = {}
        self._patterns: dict[dist.ProcessGroup, set[frozenset]] = {}
        # The last reductions that need no comparison if the next step repeats them
        self.agreed: Any = None

    def check_gather(self, group: dist.ProcessGroup, comm: AllGather) -> None:
        """Raises if the ranks of ``group``, about to gather by ``comm``, disagree."""
        if getattr(comm, "needs_all_ranks", False):
            self.has_compared_gathers = self._compare(group) and _mode() != "always"

    def check_reductions(self, buckets: Sequence[ReduceBucket], *settings: Any) -> None:
        """Raises if ranks are about to reduce other ``buckets``, by these ``settings``."""
        scatter_group, replicate_group, comm, all_reduces = settings
        groups = [scatter_group] if getattr(comm, "needs_all_ranks", False) else []
        groups += [replicate_group] if all_reduces else []
        pattern = frozenset((i, b.key) for b in buckets for i in b.params)
        always = _mode() == "always"
        for group in filter(None, groups):
            known = self._patterns.setdefault(group, set())
            is_new = pattern not in known and len(known) < _MAX_PATTERNS
            if (always or is_new) and not self._compare(group, buckets):
                return  # to be tried again
            if is_new:
                known.add(pattern)
        if not always:
            self.agreed = buckets, *settings

    def add_note(self, error: BaseException, buckets: _Buckets = None) -> None:
        """Names the unit, which backends do not know, in an error of a gather or reduction."""
        with contextlib.suppress(Exception):  # the error comes first
            (unit, _), *params, _ = _announce(self._param_group, buckets)
            doing = "gathering" if buckets is None else "reducing the gradients of"
            missing = [fqn for fqn, text in params if _NO_GRADIENT in text]
            without = f", without a gradient of {listed(missing)}" if missing else ""
            note = f"Raised while {doing} {unit}{without}."
            # Backends raise these where other ranks did not come, or came with other data
            is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)
            if is_gloos or isinstance(error, dist.DistError):
                note += " Look for an earlier error on another rank. If there is none, "
                note += f"{_SWITCH}=always on all ranks finds the difference. {_ADVICE}"
            add_note(error, note)

    def _compare(self, group: dist.ProcessGroup, buckets: _Buckets = None) -> bool:
        """Compares ranks, if any, by an all-gather of 32 bytes. False while tracing."""
        device, backend = self._param_group.device, "fake"
        # A group of another class may have no all-gather, or members that come and go
        if type(group).__module__.startswith("torch.") and _mode() != "0":
            backend = backend_name(group, device)
        if backend == "fake" or group.size() == 1:
            return True
        if _is_traced(self._param_group):
            return False
        count = _num_comparisons[group] = _num_comparisons.get(group, 0) + 1
        number = self._numbers.get(group, count)
        mine = _announce(self._param_group, buckets, number)
        data = hashlib.sha256(str([text for _, text in mine]).encode()).digest()
        by_rank: list[Any] = [mine] * group.size()
        try:
            # Users' counters of collectives or memory must not see this
            with torch.no_grad(), _disable_current_modes():
                digest = torch.tensor([*data], dtype=torch.uint8, device=device)
                digests = digest.new_empty(group.size() * digest.numel())
                if backend == "gloo":
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
            self.add_note(error, buckets)
            raise
        ranks = dist.get_process_group_ranks(group)
        _raise_if_different(dict(zip(ranks, by_rank, strict=True)))
        return True


def _announce(group: FSDPParamGroup, buckets: _Buckets, number: int = 0) -> list[Any]:
    """
    Returns lines for the unit, each parameter and the unit's state: a name, which may
    differ between ranks, and a string, which may not, "" if the rank does not know it.
    """
    params, fqn = group.fsdp_params, group._module_fqn
    unit = "a unit" if fqn is None else f"unit '{fqn or '(root)'}'"
    size, state = f"{len(params)} parameters", ""
    if (min_nbytes := group._direct_memory.min_nbytes) is not None:
        size += f", those of {min_nbytes} bytes or more coalesced"
    if buckets is None:
        verb = "gathered"
        texts = [f"computes in {dtypes_of(p).compute}" for p in params]
        # Before lazy init the root is unknown, and evaluation gathers only once
        if fqn is not None and torch.is_grad_enabled():
            num_ranks = getattr(group.post_forward_mesh_info, "shard_mesh_size", 1)
            state = f"is sharded over {num_ranks} ranks after forward"
    else:
        verb, texts = "reduced", [_NO_GRADIENT] * len(params)
        size += f", reduce bucket cap {group.reduce_bucket_cap}"
        for i, key in [(i, bucket.key) for bucket in buckets for i in bucket.params]:
            texts[i] = f"gets a gradient, reduced in {describe_key(key)}"
            # A rank whose shard is empty may have no gradient
            if _mode() == "always" and shards_evenly(params[i]):
                article = "no" if params[i].sharded_param.grad is None else "an"
                texts[i] += f", has {article} earlier one to add to"
    texts = [
        f"{text}, has size {tuple(p._orig_size)}, is sharded as {p.fsdp_placement},"
        for text, p in zip(texts, params, strict=True)
    ]
    first = unit, f"is {verb} ({size}) as number {number}"
    return [first, *zip(fqns_of(group), texts), (unit, state)]


def _mode() -> str:
    """Returns the environment's mode, or raises if that is unknown."""
    mode = os.environ.get(_SWITCH) or "1"
    if mode not in ("0", "1", "always"):
        raise ValueError(f"{_SWITCH} is {mode!r}: set it to always or 0, or unset it")
    return mode


def _is_traced(group: FSDPParamGroup) -> bool:
    """Whether collectives are recorded by a graph, or simulated, and not run."""
    shards = [fsdp_param._sharded_local_tensor for fsdp_param in group.fsdp_params]
    is_cuda = group.device.type == "cuda"
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or detect_fake_mode(shards) is not None


def _raise_if_different(by_rank: Mapping[int, Sequence[Any]]) -> None:
    """Raises with the first lines that are not the same on all ranks, if any."""
    columns = [dict(zip(by_rank, lines)) for lines in zip(*by_rank.values())]
    unit, *others = map(_find_difference, columns)
    # Where units differ, their parameters say no more
    if differences := [unit] if unit else [*filter(None, others)]:
        units = " and ".join(dict.fromkeys(name for name, _ in columns[0].values()))
        listing = listed(differences, separator="\n  ")
        switch = f"({_SWITCH}=0 on all ranks turns this check off.)"
        title = f"Ranks disagree about {units}:"
        raise RuntimeError(f"{title}\n  {listing}\n{_ADVICE} {switch}")


def _find_difference(lines: Mapping[int, tuple[str, str]]) -> str:
    """Returns each text with its ranks, if the ranks that know it have several."""
    names = {text: name for name, text in lines.values() if text}
    ranks = {text: [r for r in lines if lines[r][1] == text] for text in names}
    parts = [f"{names[text]} {text} on ranks {ranks[text]}" for text in names]
    return "; ".join(parts) if len(parts) > 1 else ""
