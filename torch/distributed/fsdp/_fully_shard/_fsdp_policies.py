"""
``MixedPrecisionPolicy``, and the policy of each parameter: overrides of its unit's, by
function or by patterns over parameter names.
"""

# Tests: policy, overrides
from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn as nn

from . import _fsdp_api
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE


# The fields that may differ between a unit's parameters, by f"{name}_override_fn"
OVERRIDDEN = ("param_dtype", "reduce_dtype", "grad_comm_dtype")
# The fields that apply to a module's inputs and outputs, with their defaults
_OF_MODULES = {"output_dtype": None, "cast_forward_inputs": True}
OverrideFn: TypeAlias = Callable[[nn.Parameter], torch.dtype | None]
# The branch's or the release's, which is the default of `fully_shard`
_P = TypeVar("_P", bound=_fsdp_api.MixedPrecisionPolicy)
_PACKED = torch.float4_e2m1fn_x2
# The floating-point dtypes that are summed and divided everywhere
REDUCIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REDUCIBLE_NAMES = ", ".join(map(str, REDUCIBLE))
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class MixedPrecisionPolicy(_fsdp_api.MixedPrecisionPolicy):
    """
    The dtypes in which a unit computes and reduces, for all of its parameters or for
    each. Unlike autocast's they hold for a whole module: it saves activations in them,
    and casts are at its boundary. Sharded parameters, and so the optimizer, stay in the
    dtypes in which they were stored.

    Attributes:
        param_dtype (torch.dtype, optional): What floating-point parameters are cast to
            before they are gathered, and so what forward and backward see. ``None``:
            each keeps the dtype it is stored in.
        reduce_dtype (torch.dtype, optional): What gradients are summed in over the
            ranks, and accumulated in while :meth:`set_requires_gradient_sync` is off:
            float64, float32, float16 or bfloat16. ``None``: since 2.15 each parameter's
            ``grad_dtype``, by default the dtype it is stored in; before, that of its
            parameter in backward.
        output_dtype (torch.dtype, optional): What floating-point tensors that forward
            returns are cast to. ``None``: they stay as they are.
        cast_forward_inputs (bool): Whether floating-point tensors given to forward are
            cast to ``param_dtype``, where it is set, and whatever overrides say.
        param_dtype_override_fn (callable, optional): Called by ``fully_shard`` once
            with each parameter that it manages, as the user made it. Returns its
            ``param_dtype``: any floating-point dtype, its own to keep it as stored, or
            ``None`` for the default. Must return the same on every rank.
        reduce_dtype_override_fn (callable, optional): The same for ``reduce_dtype``.
        grad_comm_dtype (torch.dtype, optional): What gradients are sent in: float64,
            float32, float16 or bfloat16. If set, an all-to-all in this dtype replaces
            the reduce-scatter, and FSDP adds in ``reduce_dtype`` (float32 if that is
            ``None``), which must hold every value of this one, and divides once at the
            end. It adds in one fixed order, so that the bits depend neither on the
            unit's other parameters nor, if shard groups have a power of two of ranks,
            on how the mesh shards and replicates. ``None``: they are sent in what the
            backend sums them in.
        grad_comm_dtype_override_fn (callable, optional): Same for ``grad_comm_dtype``.

    :meth:`by_name` makes the overrides from patterns over parameter names.

    Raises:
        TypeError: if a dtype is not a torch.dtype, an override not callable, or
            ``cast_forward_inputs`` a dtype.
        ValueError: in ``fully_shard``, if an override raised one, or if a dtype does
            not fit a parameter, or its gradient cannot be reduced in it.
        RuntimeError: in ``fully_shard``, if an override raised anything else.
    """

    param_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    reduce_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    grad_comm_dtype: torch.dtype | None = field(default=None, kw_only=True)
    grad_comm_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*OVERRIDDEN, "output_dtype"):
            if not isinstance(value := getattr(self, name), torch.dtype | None):
                raise TypeError(
                    f"{name} of MixedPrecisionPolicy is {value!r}: give a torch.dtype"
                )
        if isinstance(self.cast_forward_inputs, torch.dtype):
            raise TypeError(
                "cast_forward_inputs of MixedPrecisionPolicy is "
                f"{self.cast_forward_inputs}: give a bool, and what follows "
                "output_dtype by keyword"
            )
        for name, override_fn in _overrides_of(self).items():
            if not callable(override_fn):
                raise TypeError(
                    f"{name}_override_fn takes a parameter and returns a dtype or "
                    f"None, but {override_fn!r} cannot be called"
                )

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

        A parameter that several patterns match gets what each of them sets: they must
        not contradict one another. The policy can be copied, pickled, and used on
        another model with the same names. A part of the model does not know all of its
        names: there ``layers.0.*``, for one, takes effect at the first forward.

        Args:
            module (nn.Module): The model, or the part whose units get this policy.
            patterns (Mapping): From case-sensitive shell patterns (:mod:`fnmatch`:
                ``*``, which also matches dots, ``?``, ``[seq]``) over the names of
                ``module``'s parameters, without what activation checkpointing and
                ``torch.compile`` add, to what they set: any of ``param_dtype``,
                ``reduce_dtype`` and ``grad_comm_dtype`` (``None``: the default), or a
                policy that sets them. A shared parameter has all of its names.
            param_dtype, ..., grad_comm_dtype: The fields, where no pattern sets them.

        Raises:
            TypeError: if ``module`` is not a module, ``patterns`` not a mapping, or a
                pattern not a string, or if it maps neither to dtypes nor to a policy.
            ValueError: if a pattern matches no parameter, sets another field than
                these three, or maps to a policy with overrides, or if two set the same
                field of one parameter to different dtypes. In ``fully_shard``: if
                ``module`` had no such parameter. At the first forward: if a name could
                be that of several which patterns treat differently.
        """
        fields = (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)
        unit = cls(*fields, grad_comm_dtype=grad_comm_dtype)
        return with_overrides(unit, module, patterns)


def resolve(
    policy: _P,
    param: nn.Parameter,
    fqn: str,
    is_whole_fqn: bool | None = None,
) -> _P:
    """
    Returns one parameter's policy, without overrides and with its reduce dtype. Calls
    users' overrides, so once for each parameter, before it is sharded.
    ``is_whole_fqn``: whether ``fqn`` is the whole name in the model that ``by_name``
    was called on, or may be the end of it. None while that is unknown.
    """
    changes: dict[str, Any] = {}
    for name, override_fn in _overrides_of(policy).items():
        changes[f"{name}_override_fn"] = None
        if isinstance(override_fn, DtypeByName):
            dtype = override_fn.look_up(fqn, is_whole_fqn)
        else:
            try:
                dtype = override_fn(param)
            except Exception as error:
                # Users refuse a parameter with a ValueError
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                message = f"{name}_override_fn failed for parameter {fqn}: {error!r}"
                raise kind(message) from error
        if dtype is not None:
            _check_override(name, dtype, param, fqn)
            changes[name] = dtype
    resolved = replace(policy, **changes) if changes else policy
    if (reduce_dtype := reduce_dtype_of_policy(resolved)) != resolved.reduce_dtype:
        resolved = replace(resolved, reduce_dtype=reduce_dtype)
    if param.requires_grad and param.dtype.is_floating_point:
        _check_can_train(resolved, changes.get("param_dtype"), param, fqn)
    return resolved


def resolve_all(
    policy: _P,
    params: Sequence[nn.Parameter],
    fqns: Sequence[str],
    is_named: bool | None = None,  # by a root; None: not yet
) -> tuple[list[_P], bool]:
    """Resolves a unit's policies. Also returns whether they hold once it is named."""
    overrides = _overrides_of(policy).values()
    tables = [table for table in overrides if isinstance(table, DtypeByName)]
    is_whole = is_named and all(
        _clean(fqn) in table.by_fqn for table in tables for fqn in fqns
    )
    named = zip(params, fqns, strict=True)
    return [resolve(policy, *of, is_whole) for of in named], not tables


def reduce_dtype_of_policy(policy: Any) -> torch.dtype | None:
    """Returns what a policy reduces gradients in, None for the gradient's default."""
    if policy.reduce_dtype is None and getattr(policy, "grad_comm_dtype", None):
        return torch.float32
    return policy.reduce_dtype


def _overrides_of(policy: Any) -> dict[str, OverrideFn]:
    """Returns a policy's overrides, by the field that each overrides."""
    found = {name: getattr(policy, f"{name}_override_fn", None) for name in OVERRIDDEN}
    return {name: override for name, override in found.items() if override is not None}


def _check_override(name: str, dtype: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if an override returned what does not fit its parameter."""
    stored = param.dtype
    if not isinstance(dtype, torch.dtype):
        wrong = ". Return a torch.dtype"
    elif not stored.is_floating_point and dtype != stored:
        wrong = ": only floating-point parameters are cast. Return its own dtype"
    elif stored.is_floating_point and not dtype.is_floating_point:
        wrong = ". Return a floating-point dtype"
    elif dtype == _PACKED != stored:
        wrong = ": no cast packs several values in one element. Return another"
    else:
        return
    raise ValueError(
        f"{name}_override_fn returned {dtype!r} for parameter {fqn}, which is "
        f"{stored}{wrong}, or None for the policy's default."
    )


def _check_can_train(policy: Any, override: Any, param: nn.Parameter, fqn: str) -> None:
    """Raises if a gradient could not be summed or sent, or fractions would be lost."""
    sent, added = getattr(policy, "grad_comm_dtype", None), policy.reduce_dtype
    if override is not None and added is None:
        dtype = (param.grad_dtype if FOLLOWS_GRAD_DTYPE else None) or override
        if dtype not in REDUCIBLE:
            raise ValueError(
                f"param_dtype_override_fn returned {override} for parameter {fqn}, "
                f"whose gradient cannot be averaged in {dtype}. Set reduce_dtype, or "
                "let reduce_dtype_override_fn return one for it."
            )
    computed = policy.param_dtype or torch.float32
    is_wide = computed.is_floating_point or computed.is_complex
    if not is_wide or computed == _PACKED:
        raise ValueError(
            f"param_dtype of the policy is {computed}, which cannot hold the values of "
            f"parameter {fqn}. Give a floating-point dtype, or an override."
        )
    if added not in (None, *REDUCIBLE) and not added.is_complex:
        raise ValueError(
            f"reduce_dtype of parameter {fqn} is {added}, in which its gradient cannot "
            f"be averaged. Give one of {_REDUCIBLE_NAMES}."
        )
    if sent not in (None, *REDUCIBLE):
        raise ValueError(
            f"grad_comm_dtype of parameter {fqn} is {sent}, in which its gradient "
            f"cannot be sent without a scale. Give one of {_REDUCIBLE_NAMES}."
        )
    if sent and (added not in REDUCIBLE or torch.promote_types(sent, added) != added):
        raise ValueError(
            f"The gradient of parameter {fqn} would be sent in {sent} "
            f"(grad_comm_dtype) and added in {added} (reduce_dtype), which does not "
            "hold all values of it. Give a reduce_dtype that does, e.g. "
            f"{torch.promote_types(sent, added)}."
        )


def names_in(module: nn.Module) -> set[str]:
    """Returns all names of a module's parameters, also of shared ones."""
    named = module.named_parameters(remove_duplicate=False)
    return {_clean(fqn) for fqn, _ in named}


def is_for_names(policy: Any, names: set[str]) -> bool:
    """Returns whether all overrides by name were made for such a model, or in it."""
    for table in _overrides_of(policy).values():
        fqns = [*table.by_fqn] if isinstance(table, DtypeByName) else []
        prefixes = {n.removesuffix(f) for f in fqns[:1] for n in names if n.endswith(f)}
        if fqns and not any(names.issuperset(p + f for f in fqns) for p in prefixes):
            return False
    return True


def _clean(fqn: str) -> str:
    """Returns a name without what checkpointing and compilation add to it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class DtypeByName:
    """
    An override of one field, by the names that a model's parameters had. It holds no
    module, so that it can be copied and pickled.

    ``fully_shard`` may get a part of a model, in which ``norm.weight`` may be that of
    any layer. The end of a name is enough if all that end so are treated alike.
    Otherwise the default holds until the root's first forward has named all units.
    """

    model: str  # the class, for messages
    # That set this field, and to what
    patterns: dict[str, torch.dtype | None] = field(hash=False)
    by_fqn: dict[str, torch.dtype | None] = field(repr=False, hash=False)

    @cached_property
    def _by_end(self) -> dict[str, dict[torch.dtype | None, str]]:
        """For each end of names: the dtypes that are set, each with one such name."""
        found: dict[str, dict[torch.dtype | None, str]] = {}
        for fqn, dtype in self.by_fqn.items():
            for end in _ends(fqn):
                found.setdefault(end, {}).setdefault(dtype, fqn)
        return found

    def __call__(self, param: nn.Parameter) -> torch.dtype | None:
        raise TypeError("An override of MixedPrecisionPolicy.by_name is asked by name")

    def look_up(self, fqn: str, is_whole: bool | None) -> torch.dtype | None:
        """Returns what ``fqn`` is set to, see :func:`resolve`."""
        name = _clean(fqn.partition(" of ")[0])
        if is_whole:
            return self.by_fqn[name]
        if (dtypes := self._by_end.get(name)) is None:
            for end in _ends(name):  # `by_name` was called on a part of the root
                if end in self.by_fqn:
                    return self.by_fqn[end]
            raise ValueError(
                f"by_name was called on a {self.model}, which has no parameter {fqn}: "
                "call it on the whole model, after what adds parameters"
            )
        if len(dtypes) == 1:
            return next(iter(dtypes))
        if is_whole is None:
            return None
        (first, one), (second, other), *_ = dtypes.items()
        raise ValueError(
            f"Parameter {fqn} may be {one} or {other} of {self.model}, which patterns "
            f"set to {first or 'the default'} and {second or 'the default'}. Call "
            "by_name on the root, and run its forward before you unshard units."
        )


def _ends(fqn: str) -> Iterator[str]:
    """Yields a name and the ends of it, the longest first."""
    parts = fqn.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


def with_overrides(unit: _P, module: nn.Module, patterns: Mapping[str, Any]) -> _P:
    """Returns a policy with overrides by patterns. Raises what ``by_name`` says."""
    if not isinstance(module, nn.Module) or not isinstance(patterns, Mapping):
        raise TypeError(
            "by_name(module, patterns) expects a module and a dict of patterns, e.g. "
            "{'*norm*': dict(param_dtype=torch.float32)}, but got a "
            f"{type(module).__name__} and a {type(patterns).__name__}"
        )
    names: dict[nn.Parameter, list[str]] = {}  # all of each parameter
    for fqn, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(_clean(fqn))
    # By field and parameter: its dtype, the pattern that set it, the name that matched
    set_by: dict[str, dict[nn.Parameter, tuple[torch.dtype | None, str, str]]] = {}
    for pattern, given in patterns.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"Pattern {pattern!r} is not a string: give a shell pattern over names "
                "of parameters, e.g. '*norm*'"
            )
        fields, matched = _fields_of(pattern, given, unit), {}
        for param, same in names.items():
            if of_param := [fqn for fqn in same if fnmatch.fnmatchcase(fqn, pattern)]:
                matched[param] = of_param[0]
        if not matched:
            literal = re.sub(r"[][*?!]", "", pattern).strip(".").lower()
            size, by_part = literal.count(".") + 1, dict[str, list[str]]()
            for fqn in (fqn for same in names.values() for fqn in same):
                parts = fqn.lower().split(".")
                for i in range(len(parts)):
                    by_part.setdefault(".".join(parts[i : i + size]), []).append(fqn)
            like = difflib.get_close_matches(literal, by_part, cutoff=0)
            nearest = dict.fromkeys(fqn for part in like for fqn in by_part[part])
            listed = ", ".join([*nearest][:3])
            raise ValueError(
                f"Pattern {pattern!r} matches no parameter. Pass shell patterns over "
                "their names, e.g. 'layers.0.norm.*' for all of a module. The nearest "
                f"names are: {listed or 'none, it has no parameters'}"
            )
        for (name, dtype), (param, fqn) in product(fields.items(), matched.items()):
            of_field = set_by.setdefault(name, {})
            other, first, same = of_field.setdefault(param, (dtype, pattern, fqn))
            if other != dtype:
                both = "" if same == fqn else f" and {fqn}, one shared parameter,"
                raise ValueError(
                    f"Patterns {first!r} and {pattern!r} set {name} of {same}{both} to "
                    f"{other} and {dtype}: change one, or let both set the same"
                )
    overrides: dict[str, Any] = {}
    for name, of_field in set_by.items():
        setters = {pattern: dtype for dtype, pattern, _ in of_field.values()}
        dtypes = {param: dtype for param, (dtype, *_) in of_field.items()}
        by_fqn = {fqn: dtypes.get(p) for p, same in names.items() for fqn in same}
        table = DtypeByName(type(module).__name__, setters, by_fqn)
        overrides[f"{name}_override_fn"] = table
    return replace(unit, **overrides)


def _fields_of(pattern: str, given: Any, unit: Any) -> Mapping[str, torch.dtype | None]:
    """Returns what a pattern sets. Raises if that cannot be set by name."""
    fields = given
    if isinstance(given, _fsdp_api.MixedPrecisionPolicy):
        for name in _overrides_of(given):
            raise ValueError(
                f"Pattern {pattern!r} maps to a policy with {name}_override_fn, which "
                "chooses again. Give each choice a pattern of its own."
            )
        fields = {name: getattr(given, name, None) for name in OVERRIDDEN}
        fields["reduce_dtype"] = reduce_dtype_of_policy(given)
        fields = {name: dtype for name, dtype in fields.items() if dtype is not None}
        for name, default in _OF_MODULES.items():
            if (value := getattr(given, name)) not in (default, getattr(unit, name)):
                fields[name] = value
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"Pattern {pattern!r} must map to what it sets, e.g. dict(param_dtype="
            f"torch.float32) or a MixedPrecisionPolicy, not to {fields!r}"
        )
    for name, dtype in fields.items():
        if name in _OF_MODULES:
            raise ValueError(
                f"Pattern {pattern!r} sets {name} to {dtype!r}, which cannot differ "
                f"between the parameters of a unit. Pass {name} to by_name itself."
            )
        if name not in OVERRIDDEN:
            wrong = f"Pattern {pattern!r} sets {name!r}"
            raise ValueError(f"{wrong}, which is none of {', '.join(OVERRIDDEN)}")
        if not isinstance(dtype, torch.dtype | None):
            wrong = f"Pattern {pattern!r} sets {name} to {dtype!r}"
            raise TypeError(f"{wrong}: give a torch.dtype, or None for the default")
    return fields
