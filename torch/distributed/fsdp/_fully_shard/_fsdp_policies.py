"""``MixedPrecisionPolicy``, with overrides for parameters by function or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn as nn

from . import _fsdp_api
from ._fsdp_releases import RELEASE


# The fields that f"{name}_override_fn" may set for each parameter
OVERRIDDEN = ("param_dtype", "reduce_dtype", "grad_comm_dtype")
OverrideFn: TypeAlias = Callable[[nn.Parameter], torch.dtype | None]
_P = TypeVar("_P", bound=_fsdp_api.MixedPrecisionPolicy)  # the release's class
_PACKED = torch.float4_e2m1fn_x2
# The floating-point dtypes that are summed and divided everywhere
REDUCIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MixedPrecisionPolicy(_fsdp_api.MixedPrecisionPolicy):
    """
    The dtypes in which a unit computes and reduces, for all of its parameters or for
    each. Sharded parameters, and so the optimizer, stay in the dtypes in which they
    were stored. :meth:`by_name` makes overrides from patterns over parameter names.

    Attributes:
        param_dtype (torch.dtype, optional): Dtype in which floating-point parameters are
            gathered, and seen by forward and backward. ``None``: the stored dtype.
        reduce_dtype (torch.dtype, optional): Dtype in which gradients are summed over
            the ranks, and accumulated while :meth:`set_requires_gradient_sync` is off:
            float64, float32, float16 or bfloat16. ``None``: since 2.15 each parameter's
            ``grad_dtype``, by default the stored dtype; before, the gradient's dtype.
        output_dtype (torch.dtype, optional): Dtype to which floating-point outputs of
            forward are cast. ``None``: they stay as they are.
        cast_forward_inputs (bool): Whether floating-point tensors given to forward are
            cast to ``param_dtype``, where it is set, and whatever overrides say.
        param_dtype_override_fn (callable, optional): Called by ``fully_shard`` once
            with each parameter that it manages, as the user made it. Returns its
            ``param_dtype``: any floating-point dtype, the stored one for no cast, or
            ``None`` for the default. Must return the same on every rank.
        reduce_dtype_override_fn (callable, optional): The same for ``reduce_dtype``.
        grad_comm_dtype (torch.dtype, optional): Dtype in which gradients are sent: float64,
            float32, float16 or bfloat16. If set, an all-to-all in this dtype replaces
            the reduce-scatter, and FSDP adds in ``reduce_dtype``, then float32 by default,
            which must hold every value of this one. It adds in one order: the bits depend
            neither on the unit's other parameters nor, if shard groups have a power of two
            of ranks, on the mesh. ``None``: the dtype in which the backend sums them.
        grad_comm_dtype_override_fn (callable, optional): For ``grad_comm_dtype``.
    """

    param_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    reduce_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    grad_comm_dtype: torch.dtype | None = field(default=None, kw_only=True)
    grad_comm_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*OVERRIDDEN, "output_dtype"):
            if not isinstance(value := getattr(self, name), torch.dtype | None):
                raise TypeError(f"{name} is {value!r}: give a torch.dtype")
        if isinstance(self.cast_forward_inputs, torch.dtype):
            raise TypeError("cast_forward_inputs is a dtype: give fields by keyword")
        for name, fn in _overrides_of(self).items():
            if not callable(fn):
                raise TypeError(f"{name}_override_fn is {fn!r}: give a function")

    @classmethod
    def by_name(
        cls,
        module: nn.Module,
        patterns: Mapping[str, Mapping[str, torch.dtype | None] | MixedPrecisionPolicy],
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        cast_forward_inputs: bool = True,
        grad_comm_dtype: torch.dtype | None = None,
    ) -> MixedPrecisionPolicy:
        """
        Makes a policy that treats some of a model's parameters by their names::

            patterns = {"*.A_log": dict(param_dtype=torch.float32)}
            by_name = MixedPrecisionPolicy.by_name
            policy = by_name(model, patterns, param_dtype=torch.bfloat16)

        A parameter gets the fields that any of its patterns sets, and the others from the
        call: with ``grad_comm_dtype=torch.bfloat16``, ``A_log`` is sent in that. The policy
        is for units that ``fully_shard`` makes with it. It can be copied, pickled, and used
        on another model with the same names. Where only parts are sharded with it,
        ``layers.0.*`` applies from the first forward on.

        Args:
            module (nn.Module): The model, or the part whose units get this policy.
            patterns (Mapping): From case-sensitive shell patterns (:mod:`fnmatch`; ``*``
                matches dots as well) over the names of ``module``'s parameters, all of
                them if shared, without what activation checkpointing and
                ``torch.compile`` add, to any of ``param_dtype``, ``reduce_dtype`` and
                ``grad_comm_dtype`` (``None``: the default), or to a policy with them.
            param_dtype, ..., grad_comm_dtype: The fields, where no pattern sets them.

        Raises:
            ValueError: if patterns match nothing or contradict each other.
        """
        values = param_dtype, reduce_dtype, output_dtype, cast_forward_inputs
        policy = cls(*values, grad_comm_dtype=grad_comm_dtype)
        return _with_overrides(policy, module, patterns)


def resolve(
    policy: _P, param: nn.Parameter, fqn: str, is_whole: bool | None, unit: Any = None
) -> _P:
    """
    Returns one parameter's policy, without overrides. ``is_whole``: whether ``fqn`` is the
    whole name in the model that ``by_name`` was called on. While nobody knows, it is None,
    and overrides by name stay, so that this may be called again with the returned policy.
    """
    changes: dict[str, Any] = {}
    for name, override_fn in _overrides_of(policy).items():
        if is_table := isinstance(override_fn, DtypeByName):
            dtype = override_fn.look_up(fqn, is_whole)
        else:
            try:
                dtype = override_fn(param)
            except Exception as error:
                # Users refuse a parameter with a ValueError
                cls = ValueError if isinstance(error, ValueError) else RuntimeError
                raise cls(f"{name}_override_fn failed for {fqn}: {error!r}") from error
        is_float = param.dtype.is_floating_point
        is_float_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        can_cast = is_float and is_float_dtype and dtype != _PACKED  # no cast packs
        if dtype not in (None, param.dtype) and not can_cast:
            fix = "an unpacked floating-point dtype" if is_float else "that dtype"
            fault = f"{name}_override_fn returned {dtype!r} for parameter {fqn}"
            raise ValueError(f"{fault}, which is {param.dtype}. Return {fix}, or None.")
        if not is_table or is_whole is not None:
            changes[f"{name}_override_fn"] = None
        if dtype is not None:
            changes[name] = dtype
    comm_dtype = getattr(policy, "grad_comm_dtype", None)  # not in the release's class
    comm_dtype = changes.get("grad_comm_dtype", comm_dtype)
    if comm_dtype and changes.get("reduce_dtype", policy.reduce_dtype) is None:
        changes["reduce_dtype"] = torch.float32
    resolved = replace(policy, **changes) if changes else policy
    if param.requires_grad and param.dtype.is_floating_point:
        _check_can_train(resolved, (unit or policy).param_dtype, param, fqn)
    return resolved


def resolve_all(
    policy: _P,
    params: Sequence[nn.Parameter],
    fqns: Sequence[str],
    is_named: bool | None = None,  # by the root; None: not yet
    earlier: Sequence[_P] = (),  # from the same policy, when nobody knew the names
) -> list[_P]:
    """Returns the policies of a unit's parameters, see :func:`resolve`."""
    names = {_ends_of(fqn)[0] for fqn in fqns}
    is_whole = is_named and all(names <= t.by_fqn.keys() for t in tables_of(policy))
    named = zip(earlier or [policy] * len(fqns), params, fqns, strict=True)
    return [resolve(*each, is_whole, policy) for each in named]


def tables_of(policy: Any) -> list[DtypeByName]:
    """Returns the overrides that ``by_name`` has made: they need the root's names."""
    overrides = _overrides_of(policy).values()
    return [table for table in overrides if isinstance(table, DtypeByName)]


def _overrides_of(policy: Any) -> dict[str, OverrideFn]:
    """Returns a policy's overrides, by the field that each overrides."""
    overrides = {n: getattr(policy, f"{n}_override_fn", None) for n in OVERRIDDEN}
    return {name: fn for name, fn in overrides.items() if fn is not None}


def _check_can_train(policy: Any, default: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if ``policy``, over the unit's ``default`` param_dtype, cannot train."""
    dtype = policy.param_dtype or torch.float32
    if dtype == _PACKED or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{fqn} trains in {dtype}: set a floating-point param_dtype")
    reduce_dtype, fault = policy.reduce_dtype, f"The gradient of {fqn} cannot be"
    comm_dtype = getattr(policy, "grad_comm_dtype", None)
    if reduce_dtype is None and policy.param_dtype not in (None, default):
        reduce_dtype = RELEASE.default_reduce_dtype(param) or dtype
    dtypes = {"reduce_dtype": reduce_dtype, "grad_comm_dtype": comm_dtype}
    for name, dtype in dtypes.items():
        # Real gradients may be summed in a complex dtype
        is_complex_sum = dtype and dtype.is_complex and comm_dtype is None
        if dtype not in (None, *REDUCIBLE) and not is_complex_sum:
            fix = f"Set {name} to one of {', '.join(map(str, REDUCIBLE))}."
            raise ValueError(f"{fault} reduced in {dtype}. {fix}")
    if comm_dtype and torch.promote_types(comm_dtype, reduce_dtype) != reduce_dtype:
        fault = f"{fault} sent in {comm_dtype} and added in {reduce_dtype}"
        raise ValueError(f"{fault}. Set a reduce_dtype that holds all values of both.")


def _ends_of(fqn: str) -> list[str]:
    """Returns a name, without wrappers' parts, and its ends, the longest first."""
    wrappers = "_checkpoint_wrapped_module", "_orig_mod"
    parts = [part for part in fqn.split(".") if part not in wrappers]
    return [".".join(parts[i:]) for i in range(len(parts))]


@dataclass(frozen=True)
class DtypeByName:
    """An override of one field by names, without their module: it can be pickled."""

    model: str  # the class, for messages
    patterns: dict[str, torch.dtype | None] = field(hash=False)  # that set this field
    by_fqn: dict[str, torch.dtype | None] = field(repr=False, hash=False)

    @cached_property
    def _by_end(self) -> dict[str, dict[torch.dtype | None, str]]:
        """For each end of names: the dtypes that are set, each with one such name."""
        by_end: dict[str, Any] = {}
        for fqn, dtype in self.by_fqn.items():
            for end in _ends_of(fqn):
                by_end.setdefault(end, {}).setdefault(dtype, fqn)
        return by_end

    def __call__(self, param: nn.Parameter) -> torch.dtype | None:
        raise TypeError("An override of MixedPrecisionPolicy.by_name is asked by name")

    def look_up(self, fqn: str, is_whole: bool | None) -> torch.dtype | None:
        """Returns the dtype of a name, of all names that end so, or None until known."""
        name, *ends = _ends_of(fqn)
        if is_whole and name in self.by_fqn:
            return self.by_fqn[name]
        if (dtypes := self._by_end.get(name)) is None:
            # `by_name` was called on a part of the root
            if known := [end for end in ends if end in self.by_fqn]:
                return self.by_fqn[known[0]]
            fix = "call it on the whole model, after parameters are added"
            raise ValueError(f"by_name: {self.model} has no parameter {fqn}: {fix}")
        if len(dtypes) == 1:
            return next(iter(dtypes))
        if is_whole is None:
            return None
        names = f"{' or '.join(dtypes.values())} of {self.model}, which patterns set"
        fix = "Call by_name on the root, and run its forward before you unshard units"
        raise ValueError(f"{fqn} may be {names} to different dtypes. {fix}")


def _with_overrides(policy: _P, module: nn.Module, patterns: Mapping[str, Any]) -> _P:
    """Returns a policy with overrides by patterns, see ``by_name``."""
    kind = type(module).__name__
    if hasattr(type(module), "_get_fsdp_state"):
        raise ValueError(f"{kind} is a unit already: call by_name before fully_shard")
    if not isinstance(patterns, Mapping):
        raise TypeError(f"patterns is {patterns!r}: give {{pattern: dict(...)}}")
    named = module.named_parameters(remove_duplicate=False)
    params = {_ends_of(fqn)[0]: p for fqn, p in named}  # several times if shared
    # By field: each parameter's dtype, and the pattern that has set it
    set_by: dict[str, dict[nn.Parameter, tuple[torch.dtype | None, str]]] = {}
    for pattern, value in patterns.items():
        fqns = [fqn for fqn in params if fnmatchcase(fqn, pattern)]
        if not fqns:
            fix = "give patterns over whole names, e.g. 'layers.0.norm.*'"
            raise ValueError(f"Pattern {pattern!r} matches nothing in {kind}: {fix}")
        for (name, dtype), fqn in product(_dtypes_of(pattern, value, policy), fqns):
            by_param = set_by.setdefault(name, {})
            first = by_param.setdefault(params[fqn], (dtype, pattern))
            if first[0] != dtype:
                aliases = " alias ".join(f for f in params if params[f] is params[fqn])
                fault = f"Patterns set {name} of {aliases} to two dtypes"
                raise ValueError(f"{fault}: {first} and {(dtype, pattern)}")
    overrides: dict[str, Any] = {}
    for name, by_param in set_by.items():
        setters = {pattern: dtype for dtype, pattern in by_param.values()}
        by_fqn = {fqn: by_param.get(p, (None, ""))[0] for fqn, p in params.items()}
        overrides[f"{name}_override_fn"] = DtypeByName(kind, setters, by_fqn)
    return replace(policy, **overrides)


def _dtypes_of(pattern: str, value: Any, policy: Any) -> Iterable[tuple[str, Any]]:
    """Returns fields and dtypes that a pattern sets. Raises if it sets other fields."""
    if isinstance(value, _fsdp_api.MixedPrecisionPolicy):
        unset = [(f.name, f.default) for f in fields(value)]
        # Fields of whole modules may repeat arguments of by_name
        unset += [item for item in vars(policy).items() if item[0] not in OVERRIDDEN]
        value = dict(item for item in vars(value).items() if item not in unset)
        if value.get("grad_comm_dtype"):
            value.setdefault("reduce_dtype", torch.float32)
    if not isinstance(value, Mapping):
        raise TypeError(f"Pattern {pattern!r} sets {value!r}: give a dict or a policy")
    for name, dtype in value.items():
        if name not in OVERRIDDEN:
            raise ValueError(f"Pattern {pattern!r} sets {name}: set only {OVERRIDDEN}")
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"Pattern {pattern!r} sets {name}={dtype!r}: give a dtype")
    return value.items()
