"""
Which policy each parameter of a unit has: overrides of the unit's policy, and patterns
over names, which are overrides too.

What is here takes a ``MixedPrecisionPolicy`` and makes others of it, and does not know
the class.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from ._fsdp_release import FOLLOWS_GRAD_DTYPE


# What may differ between the parameters of a unit: fields of a policy that have a
# function beside them, f"{name}_override_fn"
OVERRIDDEN = ("param_dtype", "reduce_dtype", "grad_comm_dtype")
# What may not, and what stands for nothing that a policy says of it: they are about
# what goes into modules and comes out of them
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
    Returns a policy for one parameter, which has no overrides left and says what the
    gradient is reduced in. Users' overrides are to be called once for it, while its
    module still has it under its name.

    Args:
        policy (MixedPrecisionPolicy): That of its unit.
        param (nn.Parameter): The parameter as the user made it.
        fqn (str): Its name, or the end of it.
        device (torch.device): Where its gradient will be reduced.
        is_whole_fqn (bool, optional): Whether ``fqn`` is the whole name in the model
            that ``by_name`` was called on. None: that is not known yet.

    Raises: what ``MixedPrecisionPolicy`` says of ``fully_shard``.
    """
    found = {
        name: _override(policy, name, param, fqn, is_whole_fqn) for name in OVERRIDDEN
    }
    fields: dict[str, Any] = {name: d for name, d in found.items() if d is not None}
    fields |= {
        f"{name}_override_fn": None
        for name in OVERRIDDEN
        if getattr(policy, f"{name}_override_fn") is not None
    }
    resolved = replace(policy, **fields) if fields else policy
    if reduce_dtype_of_policy(resolved) != resolved.reduce_dtype:
        resolved = replace(resolved, reduce_dtype=reduce_dtype_of_policy(resolved))
    if found["reduce_dtype"] is not None:
        _check_reduce_dtype(found["reduce_dtype"], param, fqn, device)
    elif found["param_dtype"] is not None and resolved.reduce_dtype is None:
        _check_default_reduces(found["param_dtype"], param, fqn, device)
    _check_cuts_nothing(resolved, param, fqn)
    _check_grad_comm(resolved, param, fqn)
    return resolved


def resolve_all(
    policy: _P,
    params: Sequence[nn.Parameter],
    fqns: Sequence[str],
    device: torch.device,
    is_named: bool | None = None,
) -> tuple[list[_P], bool]:
    """
    Does as :func:`resolve` for the parameters of a unit.

    Args:
        is_named: Whether a root has named the unit, None if that is still to come.

    Returns:
        The policies, and whether they stay as they are when the unit is named.
    """
    tables = _tables(policy)
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


def _override(
    policy: Any, name: str, param: nn.Parameter, fqn: str, is_whole_fqn: bool | None
) -> torch.dtype | None:
    """Returns what the override of a field says of ``param``, checked."""
    what = f"{name}_override_fn"
    override_fn = getattr(policy, what)
    if override_fn is None:
        return None
    if isinstance(override_fn, DtypeByName):
        dtype = override_fn.look_up(fqn, is_whole_fqn)
    else:
        try:
            dtype = override_fn(param)
        except Exception as error:
            # A ValueError is the way to refuse a parameter
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"{what} failed for parameter {fqn}: {error!r}") from error
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        _check_dtype(what, dtype, param, fqn)
        return dtype
    raise ValueError(
        f"{what} returned {dtype!r} for parameter {fqn}. Return a torch.dtype, "
        "or None for the policy's default."
    )


def _check_cuts_nothing(policy: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if a policy makes integers of what training needs fractions of."""
    if not param.requires_grad or not param.dtype.is_floating_point:
        return
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


def _check_grad_comm(policy: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if what is sent of a gradient cannot be, or would be rounded again."""
    sent, added = policy.grad_comm_dtype, policy.reduce_dtype
    if sent is None or not (param.requires_grad and param.dtype.is_floating_point):
        return
    allowed = ", ".join(map(str, _REDUCIBLE))
    if sent not in _REDUCIBLE:
        raise ValueError(
            f"grad_comm_dtype of parameter {fqn} is {sent}, in which its gradient "
            f"cannot be sent without a scale. Give one of {allowed}."
        )
    if added not in _REDUCIBLE or torch.promote_types(sent, added) != added:
        raise ValueError(
            f"The gradient of parameter {fqn} would be sent in {sent} (grad_comm_dtype) "
            f"and added in {added} (reduce_dtype), which does not hold all values of "
            "it. Give a reduce_dtype that does, e.g. torch.float32."
        )


def _check_dtype(what: str, dtype: torch.dtype, param: nn.Parameter, fqn: str) -> None:
    if dtype == param.dtype:
        return
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"{what} returned {dtype} for parameter {fqn}, which is {param.dtype}: "
            "only floating-point parameters are cast. Return None, or its own dtype."
        )
    if not dtype.is_floating_point:
        raise ValueError(
            f"{what} returned {dtype} for parameter {fqn}, which is {param.dtype}. "
            "Return a floating-point dtype, or None for the policy's default."
        )
    if dtype in _PACKED:
        raise ValueError(
            f"{what} returned {dtype} for parameter {fqn}, which is {param.dtype}: "
            "nothing casts to a dtype that packs several values in one element. "
            "Return another, or None for the policy's default."
        )


_PACKED = (torch.float4_e2m1fn_x2,)
# What every backend sums
_REDUCIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What NCCL has a type of its own for, rather than moving it as bytes
_NCCL_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_reducible(dtype: torch.dtype, device: torch.device) -> bool:
    # Of a complex parameter its own, which leaves it as it is
    if dtype in _REDUCIBLE or not dtype.is_floating_point:
        return True
    return dtype in _NCCL_FLOAT8 and _sums_float8(device)


def _check_default_reduces(
    param_dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    """Raises if a gradient could not be reduced where no reduce dtype is set."""
    dtype = param.grad_dtype if FOLLOWS_GRAD_DTYPE else None
    dtype = dtype or param_dtype
    if not param.requires_grad or is_reducible(dtype, device):
        return
    raise ValueError(
        f"param_dtype_override_fn returned {param_dtype} for parameter {fqn}, which is "
        f"{param.dtype}: without a reduce dtype its gradient would be summed in "
        f"{dtype}, which cannot be done on {device}. Set reduce_dtype, or "
        "let reduce_dtype_override_fn return one for it."
    )


def _check_reduce_dtype(
    dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    if is_reducible(dtype, device):
        return
    allowed = ", ".join(map(str, _REDUCIBLE))
    raise ValueError(
        f"reduce_dtype_override_fn returned {dtype} for parameter {fqn}, which is "
        f"{param.dtype}: gradients cannot be summed in it on {device}. Return one of "
        f"{allowed}, or None for the policy's default. (float8_e4m3fn and float8_e5m2 "
        "need NCCL 2.24 and a GPU of compute capability 9.0.)"
    )


def _sums_float8(device: torch.device) -> bool:
    """Returns whether NCCL adds 8-bit floats on this device, in hardware."""
    if device.type != "cuda" or torch.version.hip or not dist.is_nccl_available():
        return False
    if torch.cuda.nccl.version() < (2, 24):
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
        """For each end of names: the dtypes set, each with one name that it is set of."""
        found: dict[str, dict[torch.dtype | None, str]] = {}
        for fqn, dtype in self.dtypes:
            for end in _ends(fqn):
                found.setdefault(end, {}).setdefault(dtype, fqn)
        return found

    def __call__(self, param: nn.Parameter) -> torch.dtype | None:
        raise TypeError("An override of MixedPrecisionPolicy.by_name is asked by name")

    def look_up(self, fqn: str, is_whole: bool | None) -> torch.dtype | None:
        """
        Returns the dtype of the parameter ``fqn``.

        Args:
            is_whole: Whether that is its whole name, None if this is not known yet.

        Raises:
            ValueError: if the model has no parameter of such a name, or several of
                different dtypes.
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


def _tables(policy: Any) -> list[DtypeByName]:
    overrides = [getattr(policy, f"{name}_override_fn") for name in OVERRIDDEN]
    return [table for table in overrides if isinstance(table, DtypeByName)]


def _fqns_by_param(module: nn.Module) -> dict[int, list[str]]:
    """Returns all names of all parameters, in lists by the identity of each."""
    found: dict[int, list[str]] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(_clean(fqn))
    return found


def with_overrides(unit: _P, module: nn.Module, patterns: Mapping[str, Any]) -> _P:
    """
    Returns a policy with what patterns over names set, and ``unit``
    (MixedPrecisionPolicy) where none does.

    Raises: what ``by_name`` says.
    """
    fields_of = {
        pattern: _fields_of(pattern, given, unit) if _is_policy(given) else given
        for pattern, given in patterns.items()
    }
    names = _fqns_by_param(module)
    fqns = [fqn for same in names.values() for fqn in same]
    for pattern, fields in fields_of.items():
        _check_pattern(pattern, fields, fqns)
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


def _is_policy(given: Any) -> bool:
    return all(hasattr(given, f"{name}_override_fn") for name in OVERRIDDEN)


def _fields_of(pattern: str, policy: Any, unit: Any) -> dict[str, torch.dtype]:
    """Returns the dtypes that a policy has, which may say nothing else than ``unit``."""
    for name, unset in _OF_MODULES.items():
        value = getattr(policy, name)
        if value not in (unset, getattr(unit, name)):
            raise _cannot_differ(pattern, name, value)
    for name in map("{}_override_fn".format, OVERRIDDEN):
        if getattr(policy, name) is not None:
            raise ValueError(
                f"Pattern {pattern!r} maps to a policy with {name}, which chooses "
                "parameters a second time. Give each choice a pattern of its own."
            )
    dtypes = {name: getattr(policy, name) for name in OVERRIDDEN}
    dtypes["reduce_dtype"] = reduce_dtype_of_policy(policy)
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def _cannot_differ(pattern: str, name: str, value: Any) -> ValueError:
    return ValueError(
        f"Pattern {pattern!r} sets {name} to {value!r}, which cannot differ between "
        "the parameters of a unit: it is about what goes into a module or comes out "
        f"of it. Pass {name} to by_name itself, beside the patterns."
    )


def _check_pattern(
    pattern: str, fields: Mapping[str, torch.dtype | None], fqns: Sequence[str]
) -> None:
    """Raises unless the pattern matches something and sets what can be set."""
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"Pattern {pattern!r} must map to what it sets, e.g. dict(param_dtype="
            f"torch.float32) or a MixedPrecisionPolicy, not to {fields!r}"
        )
    for name, dtype in fields.items():
        if name in _OF_MODULES:
            raise _cannot_differ(pattern, name, dtype)
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
    if not any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
        nearest = ", ".join(_nearest(pattern, fqns)) or "none, it has no parameters"
        raise ValueError(
            f"Pattern {pattern!r} matches no parameter. The nearest names are: {nearest}"
        )


def _merge(
    names: Sequence[str],
    patterns: Mapping[str, Mapping[str, torch.dtype | None]],
) -> dict[str, torch.dtype | None]:
    """Returns what the patterns together set for one parameter, which has ``names``."""
    # Field to (its dtype, the pattern that set it, the name that it matched)
    merged: dict[str, tuple[torch.dtype | None, str, str]] = {}
    for pattern, fields in patterns.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            continue
        for field, dtype in fields.items():
            first = merged.setdefault(field, (dtype, pattern, matched[0]))
            if first[0] == dtype:
                continue
            fqns = " and ".join(dict.fromkeys((first[2], matched[0])))
            shared = ", one shared parameter," if first[2] != matched[0] else ""
            raise ValueError(
                f"Patterns {first[1]!r} and {pattern!r} set {field} of {fqns}{shared} to "
                f"{first[0]} and {dtype}. Change one so that it does not match, or let "
                "both set the same."
            )
    return {field: dtype for field, (dtype, *_) in merged.items()}


def _nearest(pattern: str, fqns: Sequence[str], count: int = 3) -> list[str]:
    """
    Returns the names that are most like a pattern, of which only what is not a
    wildcard counts: it is compared with parts of names, of as many components.
    """
    literal = pattern.translate(str.maketrans("", "", "*?[]!"))
    components = [component for component in literal.split(".") if component]
    parts: dict[str, list[str]] = {}
    for fqn in fqns:
        for part in _parts(fqn, len(components)):
            parts.setdefault(part, []).append(fqn)
    wanted = ".".join(components)
    close = difflib.get_close_matches(wanted, parts, n=count, cutoff=0.0)
    found = dict.fromkeys(fqn for part in close for fqn in parts[part])
    return [*islice(found, count)]


def _parts(fqn: str, size: int) -> Iterator[str]:
    """Yields all runs of ``size`` components, or the whole name if it has fewer."""
    components = fqn.split(".")
    for start in range(max(len(components) - size, 0) + 1):
        yield ".".join(components[start : start + size])
