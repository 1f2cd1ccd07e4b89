"""
What users hand to ``fully_shard``: policies for precision and for offloading,
collectives of their own, and the names of mesh dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
import torch.distributed as dist
import torch.nn as nn

from ._fsdp_policies import OVERRIDDEN, OverrideFn, with_overrides


_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
_Size: TypeAlias = Sequence[int | torch.SymInt]


# Precision #


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """
    The dtypes in which a unit computes and reduces, for all of its parameters
    or for each. Where autocast decides operator by operator, they hold for a whole
    module: it saves activations in them, and casts are at its boundary. Sharded
    parameters, and so the optimizer, stay in the dtypes in which they were stored,
    of which there is no second copy.

    Attributes:
        param_dtype (torch.dtype, optional): What floating-point parameters are
            cast to before they are gathered, and so what forward and backward
            see. ``None``: each keeps the dtype it is stored in.
        reduce_dtype (torch.dtype, optional): What gradients are summed in over
            the ranks, and accumulated in while
            :meth:`set_requires_gradient_sync` is off. ``None``: since 2.15
            each parameter's ``grad_dtype``, the dtype it is stored in unless
            set; before, each gradient's own dtype, which is that of its
            parameter in backward.
        output_dtype (torch.dtype, optional): What floating-point tensors that
            forward returns are cast to. ``None``: they stay as they are.
        cast_forward_inputs (bool): Whether floating-point tensors given to
            forward are cast to ``param_dtype``, where it is set. Of several
            modules sharded as one unit, each casts its own. Overrides have no
            say in this.
        param_dtype_override_fn (callable, optional): Called by ``fully_shard``
            once with each parameter that it manages, as the user made it.
            Returns what replaces ``param_dtype`` for this one: any floating-point
            dtype, its own to keep it as stored, or ``None`` for the default. Must
            return the same on every rank.
        reduce_dtype_override_fn (callable, optional): The same for
            ``reduce_dtype``: float64, float32, float16 or bfloat16. Also
            float8_e4m3fn and float8_e5m2 where NCCL is 2.24 or newer and the
            GPU has compute capability 9.0 or higher.
        grad_comm_dtype (torch.dtype, optional): What gradients are sent in:
            float64, float32, float16 or bfloat16. If set, an all-to-all in this
            dtype replaces the reduce-scatter, and FSDP adds in ``reduce_dtype``
            (float32 if that is ``None``), which must hold every value of this
            one, and divides once at the end. It adds in one fixed order over all
            data-parallel ranks, so that the bits depend neither on the other
            parameters of the unit nor, if shard groups have a power of two of
            ranks, on how the mesh shards and replicates. ``None``: gradients
            are sent in what they are summed in, and the backend adds.
        grad_comm_dtype_override_fn (callable, optional): The same for
            ``grad_comm_dtype``.

    Raises:
        TypeError: if a dtype is not a torch.dtype, or an override not callable.
        ValueError: in ``fully_shard``, if an override raised a ValueError, or
            returned anything but ``None`` or a dtype that fits its parameter and
            can be reduced on its device, or if the policy's own dtypes would round
            a trainable parameter or its gradient to integers.
        RuntimeError: in ``fully_shard``, if an override raised anything else.
            Each names the parameter; what an override raised is the cause.

    :meth:`by_name` makes the overrides from patterns over parameter names.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    reduce_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)
    grad_comm_dtype: torch.dtype | None = field(default=None, kw_only=True)
    grad_comm_dtype_override_fn: OverrideFn | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "grad_comm_dtype"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(
                    f"{name} of MixedPrecisionPolicy is {value!r}: give a torch.dtype, "
                    "or None to leave it as it is"
                )
        for name in map("{}_override_fn".format, OVERRIDDEN):
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

            policy = MixedPrecisionPolicy.by_name(
                model,
                {
                    "*.A_log": MixedPrecisionPolicy(param_dtype=torch.float32),
                    "*norm*": dict(reduce_dtype=torch.float32),
                },
                param_dtype=torch.bfloat16,
            )
            fully_shard(model, mp_policy=policy)

        A parameter that several patterns match gets what each of them sets.
        They must not contradict one another, so their order does not matter.
        The policy holds names and no module: it can be copied, pickled, and
        used on another model with the same names. Where a part of the model does
        not know enough of its names, as for ``layers.0.*``, patterns take effect
        at the first forward.

        Args:
            module (nn.Module): The model, or the part whose units get this policy.
            patterns (Mapping): From case-sensitive shell patterns (:mod:`fnmatch`:
                ``*``, which also matches dots, ``?``, ``[seq]``) over the fully
                qualified names of ``module``'s parameters to what they set: any of
                ``param_dtype``, ``reduce_dtype`` and ``grad_comm_dtype``, where
                ``None`` is the policy's default, or a policy, which sets those of
                them that it has. Names are those without activation checkpointing
                and ``torch.compile``. A shared parameter has all of its names.
            param_dtype, ..., grad_comm_dtype: The fields, where no pattern sets them.

        Raises:
            TypeError: if a pattern maps neither to dtypes nor to a policy.
            ValueError: if a pattern matches no parameter, sets an unknown field
                or one that all parameters of a unit share (``output_dtype``,
                ``cast_forward_inputs``), or maps to a policy with overrides, or
                if two set the same field of one parameter to different dtypes.
                In ``fully_shard``: if ``module`` had no such parameter. At the
                first forward: if a name could be that of several parameters of
                ``module``, which the patterns treat differently.
        """
        unit = cls(
            param_dtype,
            reduce_dtype,
            output_dtype,
            cast_forward_inputs,
            grad_comm_dtype=grad_comm_dtype,
        )
        return with_overrides(unit, module, patterns)


# Collectives #


class Comm(ABC):
    """
    A collective that can replace a unit's default one. It decides whether each call
    gets a new buffer, in which memory that lies (the caching allocator's, or a pool
    registered with NCCL), and what a call does with it.

    Attributes:
        needs_all_ranks (bool): Whether a call completes only once all ranks of the
            group have made it, so that FSDP may compare ranks before it. A class with
            a ``__call__`` of its own must set it, or counts as needing none of them.
    """

    needs_all_ranks: ClassVar[bool]

    @abstractmethod
    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """
        Returns a buffer to communicate in, e.g. from ``torch.empty``, perhaps inside
        ``torch.cuda.use_mem_pool``.

        Args:
            size (Sequence[int | torch.SymInt]): Of the buffer.
            dtype (torch.dtype): Of its elements. uint8 where a unit's
                parameters are gathered in several dtypes.
            device (torch.device): Where it must be.
        """
        ...


class AllGather(Comm):
    """Gathers a unit's parameters from all ranks."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Comm):
    """Reduces a unit's gradients, of which each rank gets its shards."""

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
    The data-parallel dimensions of a mesh of all parallelisms that is given to
    ``fully_shard``, over which parameters are DTensors already.

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
    """Offloads nothing. The default, and the base class of policies that do."""


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
