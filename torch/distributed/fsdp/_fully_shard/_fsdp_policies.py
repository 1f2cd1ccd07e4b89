"""
The policy of each parameter: overrides of its unit's ``MixedPrecisionPolicy`` (a class
that this module does not import), by function or by patterns over parameter names.
"""

from __future__ import annotations

import difflib
import fnmatch
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from ._fsdp_release import FOLLOWS_GRAD_DTYPE


# The fields of a policy that may differ between the parameters of a unit. Each has a
# function beside it, f"{name}_override_fn".
OVERRIDDEN = ("param_dtype", "reduce_dtype", "grad_comm_dtype")
# The fields that apply to a module's inputs and outputs, with their defaults
_OF_MODULES = {"output_dtype": None, "cast_forward_inputs": True}
# Returns None for the policy's default
OverrideFn: TypeAlias = Callable[[nn.Parameter], torch.dtype | None]
# MixedPrecisionPolicy
_P = TypeVar("_P", bound=Any)


def resolve(
    policy: _P,
    param: nn.Parameter,
    fqn: str,
    device: torch.device,
    is_whole_fqn: bool | None = None,
) -> _P:
    """
    Returns a policy for one parameter, without overrides and with the dtype in which
    its gradient is reduced on ``device``. To be called once for each parameter, while
    its module still has it under its name, because it calls users' overrides.

    ``fqn`` may be the end of a name. ``is_whole_fqn`` says whether it is the whole name
    in the model that ``by_name`` was called on, None while that is unknown.

    Raises: what ``MixedPrecisionPolicy`` says of ``fully_shard``.
    """
    changes: dict[str, Any] = {}
    for name in OVERRIDDEN:
        if getattr(policy, f"{name}_override_fn") is None:
            continue
        changes[f"{name}_override_fn"] = None
        dtype = _call_override(policy, name, param, fqn, is_whole_fqn)
        if dtype is not None:
            _check_override(name, dtype, param, fqn, device)
            changes[name] = dtype
    resolved = replace(policy, **changes) if changes else policy
    reduce_dtype = reduce_dtype_of_policy(resolved)
    if reduce_dtype != resolved.reduce_dtype:
        resolved = replace(resolved, reduce_dtype=reduce_dtype)
    if param.requires_grad and param.dtype.is_floating_point:
        if "param_dtype" in changes and reduce_dtype is None:
            _check_default_reduces(changes["param_dtype"], param, fqn, device)
        _check_can_train(resolved, param, fqn)
        _check_grad_comm(resolved, fqn)
    return resolved


def resolve_all(
    policy: _P,
    params: Sequence[nn.Parameter],
    fqns: Sequence[str],
    device: torch.device,
    is_named: bool | None = None,
) -> tuple[list[_P], bool]:
    """
    Does as :func:`resolve` for the parameters of a unit, which a root has named or not
    (None: not yet). Also returns whether the policies hold once it has.
    """
    overrides = [getattr(policy, f"{name}_override_fn") for name in OVERRIDDEN]
    tables = [table for table in overrides if isinstance(table, DtypeByName)]
    is_whole = is_named and all(
        _clean(fqn) in table.by_fqn for table in tables for fqn in fqns
    )
    resolved = [
        resolve(policy, param, fqn, device, is_whole)
        for param, fqn in zip(params, fqns, strict=True)
    ]
    return resolved, not tables


def reduce_dtype_of_policy(policy: Any) -> torch.dtype | None:
    """Returns what a policy reduces gradients in, None if it does not say."""
    if policy.reduce_dtype is None and policy.grad_comm_dtype is not None:
        return torch.float32
    return policy.reduce_dtype


def _call_override(
    policy: Any, name: str, param: nn.Parameter, fqn: str, is_whole_fqn: bool | None
) -> torch.dtype | None:
    override_fn = getattr(policy, f"{name}_override_fn")
    if isinstance(override_fn, DtypeByName):
        return override_fn.look_up(fqn, is_whole_fqn)
    try:
        dtype = override_fn(param)
    except Exception as error:
        # Users refuse a parameter with a ValueError
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        message = f"{name}_override_fn failed for parameter {fqn}: {error!r}"
        raise kind(message) from error
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(
        f"{name}_override_fn returned {dtype!r} for parameter {fqn}. Return a "
        "torch.dtype, or None for the policy's default."
    )


# Which dtypes fit #

_PACKED = (torch.float4_e2m1fn_x2,)
# What every backend sums
_REDUCIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REDUCIBLE_NAMES = ", ".join(map(str, _REDUCIBLE))
# What NCCL has a type of its own for, rather than moving it as bytes
_NCCL_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _check_override(
    name: str, dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    """Raises if an override returned a dtype that does not fit its parameter."""
    stored = param.dtype
    if not stored.is_floating_point and dtype != stored:
        wrong = (
            ": only floating-point parameters are cast. Return None, or its own dtype."
        )
    elif stored.is_floating_point and not dtype.is_floating_point:
        wrong = ". Return a floating-point dtype, or None for the policy's default."
    elif dtype in _PACKED and dtype != stored:
        wrong = (
            ": nothing casts to a dtype that packs several values in one element. "
            "Return another, or None for the policy's default."
        )
    elif name == "reduce_dtype" and not is_reducible(dtype, device):
        wrong = (
            f": gradients cannot be summed in it on {device}. Return one of "
            f"{_REDUCIBLE_NAMES}, or None for the policy's default. (float8_e4m3fn and "
            "float8_e5m2 need NCCL 2.24 and a GPU of compute capability 9.0.)"
        )
    else:
        return
    raise ValueError(
        f"{name}_override_fn returned {dtype} for parameter {fqn}, which is "
        f"{stored}{wrong}"
    )


def _check_default_reduces(
    param_dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    """Raises if a gradient could not be reduced where no reduce dtype is set."""
    dtype = (param.grad_dtype if FOLLOWS_GRAD_DTYPE else None) or param_dtype
    if not is_reducible(dtype, device):
        raise ValueError(
            f"param_dtype_override_fn returned {param_dtype} for parameter {fqn}, "
            f"which is {param.dtype}: without a reduce dtype its gradient would be "
            f"summed in {dtype}, which cannot be done on {device}. Set reduce_dtype, "
            "or let reduce_dtype_override_fn return one for it."
        )


def _check_can_train(policy: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if a policy rounds to integers what training needs fractions of."""
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is None or dtype.is_complex:
            continue
        if not dtype.is_floating_point or dtype in _PACKED:
            raise ValueError(
                f"{name} of the policy is {dtype}, in which parameter {fqn}, which is "
                f"{param.dtype}, cannot be trained. Give a floating-point dtype, or an "
                "override that returns one for it."
            )


def _check_grad_comm(policy: Any, fqn: str) -> None:
    """Raises if what is sent of a gradient cannot be, or would be rounded again."""
    sent, added = policy.grad_comm_dtype, policy.reduce_dtype
    if sent is None:
        return
    if sent not in _REDUCIBLE:
        raise ValueError(
            f"grad_comm_dtype of parameter {fqn} is {sent}, in which its gradient "
            f"cannot be sent without a scale. Give one of {_REDUCIBLE_NAMES}."
        )
    if added not in _REDUCIBLE or torch.promote_types(sent, added) != added:
        raise ValueError(
            f"The gradient of parameter {fqn} would be sent in {sent} "
            f"(grad_comm_dtype) and added in {added} (reduce_dtype), which does not "
            "hold all values of it. Give a reduce_dtype that does, e.g. torch.float32."
        )


def is_reducible(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether gradients can be summed in ``dtype``."""
    # Gradients that are not floating point keep their own dtype
    if dtype in _REDUCIBLE or not dtype.is_floating_point:
        return True
    # NCCL adds 8-bit floats in hardware only
    if dtype not in _NCCL_FLOAT8 or device.type != "cuda" or torch.version.hip:
        return False
    if not dist.is_nccl_available() or torch.cuda.nccl.version() < (2, 24):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


# Precision by name #

# What wraps a module for checkpointing or compilation puts into its name
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def _clean(fqn: str) -> str:
    """Returns a name without what wrappers add to it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class DtypeByName:
    """
    An override of one field, by the names that a model's parameters had.

    [Note: Names known in part]
    ``fully_shard`` may get a part of a model, whose parameters do not know their whole
    names yet: ``norm.weight`` may be that of any layer. The end of a name is enough if
    all parameters whose names end so are treated alike. Otherwise the default holds
    until the root's first forward has named all units. So a policy keeps no module, and
    can be copied and sent to other processes.
    """

    model: str  # the class, for messages
    # By name, None for the policy's default
    dtypes: tuple[tuple[str, torch.dtype | None], ...]

    @cached_property
    def by_fqn(self) -> dict[str, torch.dtype | None]:
        return dict(self.dtypes)

    @cached_property
    def _by_end(self) -> dict[str, dict[torch.dtype | None, str]]:
        """For each end of names: the dtypes that are set, each with one such name."""
        found: dict[str, dict[torch.dtype | None, str]] = {}
        for fqn, dtype in self.dtypes:
            for end in _ends(fqn):
                found.setdefault(end, {}).setdefault(dtype, fqn)
        return found

    def __call__(self, param: nn.Parameter) -> torch.dtype | None:
        raise TypeError("An override of MixedPrecisionPolicy.by_name is asked by name")

    def look_up(self, fqn: str, is_whole: bool | None) -> torch.dtype | None:
        """
        Returns what ``fqn``, perhaps the end of a name, is set to, see :func:`resolve`.
        Raises a ValueError if no name fits, or several that are set differently.
        """
        name = _clean(fqn.partition(" of ")[0])
        if is_whole:
            return self.by_fqn[name]
        if (dtypes := self._by_end.get(name)) is None:
            # Called on a part of the root
            for end in _ends(name):
                if end in self.by_fqn:
                    return self.by_fqn[end]
            raise ValueError(
                f"{self.model} had no parameter of the name {fqn} when "
                "MixedPrecisionPolicy.by_name was called on it. Call by_name on the "
                "whole model, after what adds parameters or changes their names."
            )
        if len(dtypes) == 1:
            return next(iter(dtypes))
        if is_whole is None:
            return None
        (first, one), (second, other), *_ = dtypes.items()
        raise ValueError(
            f"Parameter {fqn} may be {one} or {other} of {self.model}, which the "
            f"patterns of MixedPrecisionPolicy.by_name set to {first or 'the default'} "
            f"and {second or 'the default'}. "
            "Call by_name on the module whose forward runs first, and let that run "
            "before units are unsharded."
        )


def _ends(fqn: str) -> Iterator[str]:
    """Yields a name and the ends of it, the longest first."""
    yield fqn
    while "." in fqn:
        fqn = fqn.partition(".")[2]
        yield fqn


def with_overrides(unit: _P, module: nn.Module, patterns: Mapping[str, Any]) -> _P:
    """
    Returns ``unit`` (MixedPrecisionPolicy) with what patterns over names set as
    overrides. Raises what ``by_name`` says.
    """
    names: dict[nn.Parameter, list[str]] = {}  # all of each parameter
    for fqn, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(_clean(fqn))
    fqns = [fqn for same in names.values() for fqn in same]
    fields_of: dict[str, Mapping[str, torch.dtype | None]] = {}
    for pattern, given in patterns.items():
        if all(hasattr(given, f"{name}_override_fn") for name in OVERRIDDEN):
            given = _fields_of_policy(pattern, given, unit)
        _check_fields(pattern, given)
        if not any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
            nearest = ", ".join(_nearest(pattern, fqns)) or "none, it has no parameters"
            raise ValueError(
                f"Pattern {pattern!r} matches no parameter. The nearest names are: "
                f"{nearest}"
            )
        fields_of[pattern] = given
    merged = [(same, _merge(same, fields_of)) for same in names.values()]
    overrides: dict[str, Any] = {
        f"{field}_override_fn": DtypeByName(
            type(module).__name__,
            tuple((fqn, dtypes.get(field)) for same, dtypes in merged for fqn in same),
        )
        for field in OVERRIDDEN
        if any(field in fields for fields in fields_of.values())
    }
    return replace(unit, **overrides)


def _fields_of_policy(pattern: str, policy: Any, unit: Any) -> dict[str, Any]:
    """Returns what a policy sets, and ``unit`` does not for all parameters anyway."""
    for name in map("{}_override_fn".format, OVERRIDDEN):
        if getattr(policy, name) is not None:
            raise ValueError(
                f"Pattern {pattern!r} maps to a policy with {name}, which chooses "
                "parameters a second time. Give each choice a pattern of its own."
            )
    dtypes = {name: getattr(policy, name) for name in OVERRIDDEN}
    dtypes["reduce_dtype"] = reduce_dtype_of_policy(policy)
    fields = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    for name, default in _OF_MODULES.items():
        if getattr(policy, name) not in (default, getattr(unit, name)):
            fields[name] = getattr(policy, name)
    return fields


def _check_fields(pattern: str, fields: Mapping[str, Any]) -> None:
    """Raises if a pattern sets what cannot be set by name."""
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"Pattern {pattern!r} must map to what it sets, e.g. dict(param_dtype="
            f"torch.float32) or a MixedPrecisionPolicy, not to {fields!r}"
        )
    for name, dtype in fields.items():
        if name in _OF_MODULES:
            raise ValueError(
                f"Pattern {pattern!r} sets {name} to {dtype!r}, which cannot differ "
                "between the parameters of a unit: it is about what goes into a module "
                f"or comes out of it. Pass {name} to by_name itself, beside the "
                "patterns."
            )
        if name not in OVERRIDDEN:
            raise ValueError(
                f"Pattern {pattern!r} sets {name!r}: only {', '.join(OVERRIDDEN)} can "
                "be set by name"
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"Pattern {pattern!r} sets {name} to {dtype!r}: give a torch.dtype, "
                "or None for the policy's default"
            )


def _merge(
    names: Sequence[str],
    patterns: Mapping[str, Mapping[str, torch.dtype | None]],
) -> dict[str, torch.dtype | None]:
    """Returns what the patterns together set for one parameter, which has ``names``."""
    # By field: its dtype, the pattern that set it, the name that this matched
    merged: dict[str, tuple[torch.dtype | None, str, str]] = {}
    for pattern, fields in patterns.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        for field, dtype in fields.items() if matched else ():
            first = merged.setdefault(field, (dtype, pattern, matched[0]))
            if first[0] == dtype:
                continue
            fqns = " and ".join(dict.fromkeys((first[2], matched[0])))
            shared = ", one shared parameter," if first[2] != matched[0] else ""
            raise ValueError(
                f"Patterns {first[1]!r} and {pattern!r} set {field} of {fqns}{shared} "
                f"to {first[0]} and {dtype}. Change one so that it does not match, or "
                "let both set the same."
            )
    return {field: dtype for field, (dtype, *_) in merged.items()}


def _nearest(pattern: str, fqns: Sequence[str], count: int = 3) -> list[str]:
    """
    Returns the names most like a pattern. What is left of it without wildcards is
    compared with the parts of a name that have as many components.
    """
    literal = pattern.translate(str.maketrans("", "", "*?[]!"))
    components = [component for component in literal.split(".") if component]
    size, matcher = len(components), difflib.SequenceMatcher(b=".".join(components))

    @cache
    def likeness(part: str) -> float:
        matcher.set_seq1(part)
        return matcher.ratio()

    def best(fqn: str) -> float:
        parts = fqn.split(".")
        starts = range(max(len(parts) - size, 0) + 1)
        return max(likeness(".".join(parts[i : i + size])) for i in starts)

    return heapq.nlargest(count, fqns, key=best)
