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
            Returns what to use in place of ``param_dtype`` for this one: any
            floating-point dtype, its own to keep it as stored, or ``None`` for
            the default. Must return the same on every rank.
        reduce_dtype_override_fn (callable, optional): The same for
            ``reduce_dtype``: float64, float32, float16 or bfloat16. Also
            float8_e4m3fn and float8_e5m2 where NCCL is 2.24 or newer and the
            GPU has compute capability 9.0 or higher.
        grad_comm_dtype (torch.dtype, optional): What gradients are sent in:
            float64, float32, float16 or bfloat16. Set, each rank gets what all
            ranks have for its shards in this dtype, and adds it in
            ``reduce_dtype`` (float32 if that is ``None``), which must hold
            every value of this one. The sum is
            divided once, at its end. It is taken in one fixed order over all
            data-parallel ranks, so that its bits depend neither on how the
            mesh shards and replicates, if it shards over a power of two of
            ranks, nor on the other parameters of the unit. ``None``: gradients
            are sent in what they are summed in, and the backend adds.
        grad_comm_dtype_override_fn (callable, optional): The same for
            ``grad_comm_dtype``.

    Raises:
        TypeError: if a dtype is none, or an override not callable.
        ValueError: in ``fully_shard``, if an override returned anything but a
            dtype or ``None``, or a dtype that does not fit its parameter or
            cannot be reduced there, or if the override raised a ValueError
            itself, or if the policy's own dtypes would cut a trainable
            parameter or its gradient to integers.
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
        They must not contradict one another, so their order has no meaning.
        The policy holds names and no module: it can be copied, pickled, and
        used on another model with the same names. Where the end of a name, which
        is what a part of the model knows, is not enough for the patterns, as
        for ``layers.0.*``, they take effect at the first forward.

        Args:
            module (nn.Module): The model, or the part whose units get this policy.
            patterns (Mapping): From shell patterns (:mod:`fnmatch`: ``*``,
                ``?``, ``[seq]``, with regard to case) over the fully qualified
                names of ``module``'s parameters to what they set: any of
                ``param_dtype``, ``reduce_dtype`` and ``grad_comm_dtype``, where
                ``None`` stands for the policy's default, or a policy, which sets
                those of them that it has. ``*`` also matches dots. A name is as
                without activation checkpointing and ``torch.compile``, and a
                shared parameter has all of its names.
            param_dtype, ..., grad_comm_dtype: The fields, where no pattern sets them.

        Raises:
            TypeError: if a pattern maps neither to dtypes nor to a policy.
            ValueError: if a pattern matches no parameter, sets an unknown field
                or one that all parameters of a unit share (``output_dtype``,
                ``cast_forward_inputs``), or maps to a policy with overrides, or
                if two set the same field of one parameter to different dtypes.
                Later, in ``fully_shard``: if ``module`` had no such parameter.
                At the first forward: if a name below the root could be that of
                several in ``module``, which the patterns treat differently.
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
    A collective that a unit can be given in place of the default one. It
    decides three things: whether a buffer is made for each call or kept for the
    next; in which memory it lies (the caching allocator's, say, or a pool
    registered with NCCL); and what a call does with it.

    Attributes:
        needs_all_ranks (bool): Whether a call completes only if all ranks of the group
            come to it. If so, they may be compared before it. A class with a
            ``__call__`` of its own that does not set it is taken to need none of them.
    """

    needs_all_ranks: ClassVar[bool]

    @abstractmethod
    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
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
