"""
Which policy each parameter of a unit has: overrides of the unit's policy, and patterns
over names, which are overrides too.

What is here takes a ``MixedPrecisionPolicy`` and makes others of it, and does not know
the class.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

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


def resolve(policy: _P, param: nn.Parameter, fqn: str, device: torch.device) -> _P:
    """
    Returns a policy for one parameter, which has no overrides left. To be
    called once for it, while its module still has it under its name.

    Args:
        policy (MixedPrecisionPolicy): That of its unit.
        param (nn.Parameter): The parameter as the user made it.
        fqn (str): Its name, for messages.
        device (torch.device): Where its gradient will be reduced.

    Raises: what ``MixedPrecisionPolicy`` says of ``fully_shard``.
    """
    found = {name: _override(policy, name, param, fqn) for name in OVERRIDDEN}
    fields: dict[str, Any] = {name: d for name, d in found.items() if d is not None}
    fields |= {
        f"{name}_override_fn": None
        for name in OVERRIDDEN
        if getattr(policy, f"{name}_override_fn") is not None
    }
    resolved = replace(policy, **fields) if fields else policy
    if found["reduce_dtype"] is not None:
        _check_reduce_dtype(found["reduce_dtype"], param, fqn, device)
    elif found["param_dtype"] is not None and resolved.reduce_dtype is None:
        _check_default_reduces(found["param_dtype"], param, fqn, device)
    _check_cuts_nothing(resolved, param, fqn)
    _check_grad_comm(resolved, param, fqn)
    return resolved


def _override(
    policy: Any, name: str, param: nn.Parameter, fqn: str
) -> torch.dtype | None:
    """Returns what the override of a field says of ``param``, checked."""
    what = f"{name}_override_fn"
    override_fn = getattr(policy, what)
    if override_fn is None:
        return None
    try:
        dtype = override_fn(param)
    except Exception as error:
        # A ValueError is the way to refuse a parameter, as `by_name` does
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


class _Location(NamedTuple):
    """One of a parameter's names, and where it is registered under it."""

    fqn: str
    owner: weakref.ref[nn.Module]
    attr: str

    def holds(self, param: nn.Parameter) -> bool:
        owner = self.owner()
        return owner is not None and owner._parameters.get(self.attr) is param


# By the identity of each parameter
_Locations = dict[int, list[_Location]]


def _names_by_param(module: nn.Module) -> _Locations:
    """Returns all names of all parameters, without what wrappers add to them."""
    found: _Locations = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        path = [name for name in prefix.split(".") if name and name not in _WRAPPERS]
        for attr, param in owner._parameters.items():
            if param is not None:
                fqn = ".".join([*path, attr])
                location = _Location(fqn, weakref.ref(owner), attr)
                found.setdefault(id(param), []).append(location)
    return found


class Overrides:
    """
    What patterns set for the parameters that they match.

    [Note: Parameters by identity and place]
    A parameter is found by its identity, and is the one that was meant if its
    module still has it in the same place. That keeps no parameter alive and
    takes no weak reference to one, which would forbid to move or convert it in
    place (``torch.utils.swap_tensors``). Should a new object in that place have
    the identity of the old one by chance, it has its name too.
    """

    def __init__(
        self,
        module: nn.Module,
        patterns: Mapping[str, Mapping[str, torch.dtype | None]],
    ):
        self._module_name = type(module).__name__
        self._locations = _names_by_param(module)
        for pattern, fields in patterns.items():
            _check_pattern(pattern, fields, self._locations)
        self._fields = {name for fields in patterns.values() for name in fields}
        self._dtypes = {
            key: _merge(locations, patterns)
            for key, locations in self._locations.items()
        }

    def fn(self, name: str) -> OverrideFn | None:
        """Returns the override of a field, if any pattern sets it."""
        return functools.partial(self.look_up, name) if name in self._fields else None

    def look_up(self, name: str, param: nn.Parameter) -> torch.dtype | None:
        key = id(param)
        if any(location.holds(param) for location in self._locations.get(key, ())):
            return self._dtypes[key].get(name)
        raise ValueError(
            f"{self._module_name} did not have this parameter when "
            "MixedPrecisionPolicy.by_name was called on it, or has it no more. Was it "
            "replaced by to_empty, load_state_dict(assign=True) or tensor parallelism? "
            "Call by_name after that, on the whole model, right before fully_shard."
        )


def with_overrides(unit: _P, module: nn.Module, patterns: Mapping[str, Any]) -> _P:
    """
    Returns a policy with what patterns over names set, and ``unit``
    (MixedPrecisionPolicy) where none does.

    Raises: what ``by_name`` says.
    """
    overrides = Overrides(
        module,
        {
            pattern: _fields_of(pattern, given, unit) if _is_policy(given) else given
            for pattern, given in patterns.items()
        },
    )
    fields: dict[str, Any] = {
        f"{name}_override_fn": overrides.fn(name) for name in OVERRIDDEN
    }
    return replace(unit, **fields)


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
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def _cannot_differ(pattern: str, name: str, value: Any) -> ValueError:
    return ValueError(
        f"Pattern {pattern!r} sets {name} to {value!r}, which cannot differ between "
        "the parameters of a unit: it is about what goes into a module or comes out "
        f"of it. Pass {name} to by_name itself, beside the patterns."
    )


def _check_pattern(
    pattern: str, fields: Mapping[str, torch.dtype | None], names: _Locations
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
    fqns = [location.fqn for locations in names.values() for location in locations]
    if not any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
        nearest = ", ".join(_nearest(pattern, fqns)) or "none, it has no parameters"
        raise ValueError(
            f"Pattern {pattern!r} matches no parameter. The nearest names are: {nearest}"
        )


def _merge(
    locations: Sequence[_Location],
    patterns: Mapping[str, Mapping[str, torch.dtype | None]],
) -> dict[str, torch.dtype | None]:
    """Returns what the patterns together set for one parameter."""
    # Field to (its dtype, the pattern that set it, the name that it matched)
    merged: dict[str, tuple[torch.dtype | None, str, str]] = {}
    for pattern, fields in patterns.items():
        matched = [x.fqn for x in locations if fnmatch.fnmatchcase(x.fqn, pattern)]
        if not matched:
            continue
        for name, dtype in fields.items():
            first = merged.setdefault(name, (dtype, pattern, matched[0]))
            if first[0] == dtype:
                continue
            fqns = " and ".join(dict.fromkeys((first[2], matched[0])))
            shared = ", one shared parameter," if first[2] != matched[0] else ""
            raise ValueError(
                f"Patterns {first[1]!r} and {pattern!r} set {name} of {fqns}{shared} to "
                f"{first[0]} and {dtype}. Change one so that it does not match, or let "
                "both set the same."
            )
    return {name: dtype for name, (dtype, *_) in merged.items()}


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
