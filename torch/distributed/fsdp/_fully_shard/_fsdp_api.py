"""
What users hand to ``fully_shard``: policies for precision and for offloading,
collectives of their own, and the names of mesh dimensions.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn


_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
# Returns None for the policy's default
_OverrideFn = Callable[[nn.Parameter], torch.dtype | None]


# Precision #


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """
    The dtypes in which a unit computes and reduces, for all of its parameters
    or for each. They hold for a module as a whole, where autocast decides
    operator by operator: activations are saved in them, and casts happen where
    modules meet. Sharded parameters, and so the optimizer, stay in the dtypes
    in which the parameters were stored. No second copy of them is kept.

    Attributes:
        param_dtype (torch.dtype, optional): What floating-point parameters are
            cast to before they are gathered, and so what forward and backward
            see. ``None``: each keeps the dtype it is stored in.
        reduce_dtype (torch.dtype, optional): What gradients are summed in over
            the ranks, and accumulated in while
            :meth:`set_requires_gradient_sync` is off. ``None``: each
            gradient's own dtype, which is that of its parameter in backward.
        output_dtype (torch.dtype, optional): What floating-point tensors that
            forward returns are cast to. ``None``: they stay as they are.
        cast_forward_inputs (bool): Whether floating-point tensors given to
            forward are cast to ``param_dtype``, where it is set. Of several
            modules sharded as one unit, each casts its own. Overrides have no
            say in this.
        param_dtype_override_fn (callable, optional): Called by ``fully_shard``
            once with each parameter that it manages, as the user made it.
            Returns what to use in place of ``param_dtype`` for this one: any
            floating-point dtype, its own to keep it as stored, or ``None`` for
            the default. Must return the same on every rank.
        reduce_dtype_override_fn (callable, optional): The same for
            ``reduce_dtype``: float64, float32, float16 or bfloat16. Also
            float8_e4m3fn and float8_e5m2 where NCCL is 2.24 or newer and the
            GPU has compute capability 9.0 or higher.

    Raises:
        TypeError: if a dtype is none, or an override not callable; in
            ``fully_shard``, if one returns anything but a dtype or ``None``.
        ValueError: in ``fully_shard``, if a dtype that an override returned
            does not fit its parameter or cannot be reduced there, or if the
            override raised a ValueError itself, or if the policy's own dtypes
            would cut a trainable parameter or its gradient to integers.
        RuntimeError: in ``fully_shard``, if an override raised anything else.
            Each names the parameter; what an override raised is the cause.

    :meth:`by_name` makes the overrides from patterns over parameter names.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: _OverrideFn | None = field(default=None, kw_only=True)
    reduce_dtype_override_fn: _OverrideFn | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(
                    f"{name} of MixedPrecisionPolicy is {value!r}: give a torch.dtype, "
                    "or None to leave it as it is"
                )
        for name in ("param_dtype_override_fn", "reduce_dtype_override_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(
                    f"{name} takes a parameter and returns a dtype or None, "
                    f"but {value!r} cannot be called"
                )

    @classmethod
    def by_name(
        cls,
        module: nn.Module,
        patterns: Mapping[str, Mapping[str, torch.dtype | None]],
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        cast_forward_inputs: bool = True,
    ) -> MixedPrecisionPolicy:
        """
        Makes a policy that treats some of a model's parameters by their names::

            policy = MixedPrecisionPolicy.by_name(
                model,
                {
                    "*.A_log": dict(param_dtype=torch.float32),
                    "*norm*": dict(reduce_dtype=torch.float32),
                },
                param_dtype=torch.bfloat16,
            )
            fully_shard(model, mp_policy=policy)

        A parameter that several patterns match gets what each of them sets.
        They must not contradict one another, so their order has no meaning.
        Parameters are told apart by what they are, not by name, once this
        returns: call it when they are the final ones, after ``to_empty`` and
        tensor parallelism, and before ``fully_shard``. None is kept alive.

        Args:
            module (nn.Module): The whole model, or the part of it whose units
                get this policy.
            patterns (Mapping): From shell patterns (:mod:`fnmatch`: ``*``,
                ``?``, ``[seq]``, with regard to case) over the fully qualified
                names of ``module``'s parameters to what they set:
                ``param_dtype``, ``reduce_dtype`` or both. ``*`` also matches
                dots. A name is as without activation checkpointing and
                ``torch.compile``, and a shared parameter has all of its names.
                ``None`` stands for the policy's default.
            param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: The
                fields of the policy, for whatever no pattern sets.

        Raises:
            TypeError: if what a pattern sets is not a mapping to dtypes.
            ValueError: if a pattern sets an unknown field or matches no
                parameter, or if two set the same field of one parameter to
                different dtypes. Later, in ``fully_shard``: if a parameter is
                not one that ``module`` had, and still has.
        """
        overrides = _Overrides(module, patterns)
        return cls(
            param_dtype,
            reduce_dtype,
            output_dtype,
            cast_forward_inputs,
            param_dtype_override_fn=overrides.fn("param_dtype"),
            reduce_dtype_override_fn=overrides.fn("reduce_dtype"),
        )

    def resolve(
        self, param: nn.Parameter, fqn: str, device: torch.device
    ) -> MixedPrecisionPolicy:
        """
        Returns the policy of one parameter, which has no overrides left. To be
        called once for it, while its module still has it under its name.

        Args:
            param (nn.Parameter): The parameter as the user made it.
            fqn (str): Its name, for messages.
            device (torch.device): Where its gradient will be reduced.

        Raises: what the class says of ``fully_shard``.
        """
        if self.param_dtype_override_fn is None:
            if self.reduce_dtype_override_fn is None:
                _check_cuts_nothing(self, param, fqn)
                return self
        param_dtype = self._override("param_dtype", param, fqn)
        reduce_dtype = self._override("reduce_dtype", param, fqn)
        if reduce_dtype is not None:
            _check_reduce_dtype(reduce_dtype, param, fqn, device)
        elif param_dtype is not None and self.reduce_dtype is None:
            _check_compute_dtype_reduces(param_dtype, param, fqn, device)
        resolved = replace(
            self,
            param_dtype=self.param_dtype if param_dtype is None else param_dtype,
            reduce_dtype=self.reduce_dtype if reduce_dtype is None else reduce_dtype,
            param_dtype_override_fn=None,
            reduce_dtype_override_fn=None,
        )
        _check_cuts_nothing(resolved, param, fqn)
        return resolved

    def _override(self, name: str, param: nn.Parameter, fqn: str) -> torch.dtype | None:
        """Returns what the override of a field says of ``param``, checked."""
        what = f"{name}_override_fn"
        override_fn = getattr(self, what)
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
        raise TypeError(
            f"{what} returned {dtype!r} for parameter {fqn}. Return a torch.dtype, "
            "or None for the policy's default."
        )


def _check_cuts_nothing(
    policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str
) -> None:
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


def _is_reducible(dtype: torch.dtype, device: torch.device) -> bool:
    # Of a complex parameter its own, which leaves it as it is
    if dtype in _REDUCIBLE or not dtype.is_floating_point:
        return True
    return dtype in _NCCL_FLOAT8 and _sums_float8(device)


def _check_compute_dtype_reduces(
    dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    if not param.requires_grad or _is_reducible(dtype, device):
        return
    raise ValueError(
        f"param_dtype_override_fn returned {dtype} for parameter {fqn}, which is "
        f"{param.dtype}: without a reduce dtype its gradient would be summed in "
        f"{dtype} as well, which cannot be done on {device}. Set reduce_dtype, or "
        "let reduce_dtype_override_fn return one for it."
    )


def _check_reduce_dtype(
    dtype: torch.dtype, param: nn.Parameter, fqn: str, device: torch.device
) -> None:
    if _is_reducible(dtype, device):
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


class _Overrides:
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

    def fn(self, name: str) -> _OverrideFn | None:
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


def _check_pattern(
    pattern: str, fields: Mapping[str, torch.dtype | None], names: _Locations
) -> None:
    """Raises unless the pattern matches something and sets what can be set."""
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"Pattern {pattern!r} must map to what it sets, e.g. "
            f"dict(param_dtype=torch.float32), not to {fields!r}"
        )
    for name, dtype in fields.items():
        if name not in ("param_dtype", "reduce_dtype"):
            raise ValueError(
                f"Pattern {pattern!r} sets {name!r}: only param_dtype and "
                "reduce_dtype can be set by name"
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


# Collectives #


class Comm(ABC):
    """
    A collective that a unit can be given in place of the default one. It
    decides three things: whether a buffer is made for each call or kept for the
    next; in which memory it lies (the caching allocator's, say, or a pool
    registered with NCCL); and what a call does with it.
    """

    @abstractmethod
    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """
        Returns a buffer to communicate in. The plainest way is ``torch.empty``,
        perhaps inside ``torch.cuda.use_mem_pool``.

        Args:
            size (Sequence[int | torch.SymInt]): Of the buffer.
            dtype (torch.dtype): Of its elements. uint8 where a unit's
                parameters are gathered in several dtypes.
            device (torch.device): Where it must be.
        """
        ...


class AllGather(Comm):
    """A way to gather a unit's parameters from all ranks."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Comm):
    """A way to reduce a unit's gradients and to give each rank its shards."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None: ...


# Meshes #


@dataclass
class DataParallelMeshDims:
    """
    Which dimensions of a mesh are for data parallelism, where the mesh given to
    ``fully_shard`` is that of all parallelisms and parameters are DTensors over
    it already.

    Attributes:
        shard (str | tuple[str, ...], optional): Names of the dimensions to
            shard over. Several are flattened into one.
        replicate (str | tuple[str, ...], optional): Names of the dimensions to
            replicate over, as HSDP and DDP do. Several are flattened into one.

    Raises:
        ValueError: if neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in "
                "DataParallelMeshDims: name the mesh dimensions to use"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


# Offloading #


@dataclass
class OffloadPolicy:
    """Offloads nothing: the default, and the base of policies that do."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """
    Keeps sharded parameters, their gradients and the optimizer's states in CPU
    memory, where the optimizer then steps. Shards are copied to the device
    before they are gathered, and reduced gradients are copied back during
    backward. When gathered parameters are freed is up to
    ``reshard_after_forward``.

    Attributes:
        pin_memory (bool): Whether shards and gradients are in pinned memory:
            then copies are faster and overlap with compute, but no other
            process can use that memory. Turn it off where CPU memory is short.
    """

    pin_memory: bool = True
