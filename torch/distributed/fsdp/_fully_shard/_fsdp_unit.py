"""
The parameters of one unit, taken together: what they contribute to a gather,
where it goes, and the changes of state that all of them make at once.

[Note: Kept between steps]
A step repeats the last one: the same dtypes, the same sizes, the same outputs.
What was found out once is kept here. Nothing tells when a parameter's data or
its all-gather outputs are replaced, so what is kept says what it was made of
and is compared with the parameters at each use, which costs far less than to
make it anew. No shard is kept alive for that: only dtypes and sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch
import torch.nn as nn

from ._fsdp_layout import (
    GatherLayout,
    plan_copy_in,
    plan_gather,
    reduce_dtype_of,
    ReduceBucket,
    RegionCopy,
)
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_release import default_reduce_dtype, keeps_storage


# Read of all parameters several times a step, so without a loop in Python
_get_stored = attrgetter("_sharded_param_data")
_get_compute_dtype = attrgetter("param_dtype")
_get_outputs = attrgetter("all_gather_outputs")
_get_sharded_param = attrgetter("sharded_param")
_get_unsharded_param = attrgetter("_unsharded_param")
_get_requires_grad = attrgetter("sharded_param.requires_grad")
_get_local_tensor = attrgetter("sharded_param._local_tensor")


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter, those that a policy does not touch included."""

    stored: torch.dtype
    compute: torch.dtype
    # If its gradient is in the compute dtype, as autograd makes it
    reduce: torch.dtype
    grad: torch.dtype
    # What is sent to be reduced, None if what it is reduced in
    comm: torch.dtype | None


def dtypes_of(fsdp_param: FSDPParam) -> ParamDtypes:
    """Returns a parameter's dtypes as they are now, before lazy init as well."""
    policy, param = fsdp_param.mp_policy, fsdp_param.sharded_param
    compute = param.dtype
    if policy.param_dtype is not None and compute.is_floating_point:
        compute = policy.param_dtype
    reduce = reduce_dtype_of(compute, default_reduce_dtype(fsdp_param))
    comm = comm_dtype_of(fsdp_param, reduce)
    return ParamDtypes(param.dtype, compute, reduce, param.grad_dtype or reduce, comm)


def comm_dtype_of(
    fsdp_param: FSDPParam, reduce_dtype: torch.dtype
) -> torch.dtype | None:
    """Returns what a gradient is sent in, None if in what it is reduced in."""
    if not reduce_dtype.is_floating_point:
        return None  # see `reduce_dtype_of`
    # Users may have a policy class of their own
    return getattr(fsdp_param.mp_policy, "grad_comm_dtype", None)


def grad_dtype_of(
    fsdp_param: FSDPParam, orig_dtype: torch.dtype | None = None
) -> torch.dtype | None:
    """
    Returns what a sharded gradient is cast to, None if to nothing: what users set on
    the parameter comes before what the caller says, and that before the storage dtype.
    """
    param = fsdp_param.sharded_param
    is_set = param.grad_dtype != param.dtype
    return param.grad_dtype if is_set else orig_dtype or param.dtype


class UnitBucket(NamedTuple):
    """One reduction of a unit: a bucket, and its parameters in slot order."""

    params: list[FSDPParam]
    bucket: ReduceBucket
    # What all sharded gradients are in, None if in several dtypes
    grad_dtype: torch.dtype | None

    @classmethod
    def of(cls, fsdp_params: Sequence[FSDPParam], bucket: ReduceBucket) -> UnitBucket:
        """Returns the bucket with those of a unit's parameters that are in it."""
        first, *others = [run.grad_dtype for run in bucket.runs] or [None]
        params = [fsdp_params[slot.param] for slot in bucket.slots]
        is_one = all(dtype == first for dtype in others)
        return cls(params, bucket, first if is_one else None)


# What is gathered #


class GatherInputs(NamedTuple):
    """What is known of the tensors that one rank contributes to a gather."""

    stored_dtypes: list[torch.dtype]
    numels: list[int]
    # What each is cast to on the way, None if to nothing
    compute_dtypes: list[torch.dtype | None]
    # How many of the tensors are each parameter's, None if one is
    counts: list[int] | None


@dataclass(frozen=True)
class GatherPlan:
    """All that is known of a gather before its data."""

    layout: GatherLayout
    copies: tuple[RegionCopy, ...]
    # The fields of the gather's result
    dtypes: list[list[torch.dtype]]
    numels: list[list[int]]
    # Of several regions with that of the padding, even if it is 0: so that they are
    # one more than the inputs, and nobody else's (see `layout_of`)
    split_sizes: list[int]


def _get_gather_inputs(
    fsdp_params: Sequence[FSDPParam], has_extensions: bool
) -> tuple[list[torch.Tensor], GatherInputs]:
    """
    Collects this rank's 1D tensors to gather. A plain shard is taken as it is
    stored and where it is, to be moved and cast by the copy-in; an extension
    gives what its ``fsdp_pre_all_gather`` makes, in whatever number and dtypes.
    """
    counts = None
    if not has_extensions:
        tensors = get_shards(fsdp_params)
        compute_dtypes = [*map(_get_compute_dtype, fsdp_params)]
    else:
        tensors, compute_dtypes, counts = [], [], []
        for fsdp_param in fsdp_params:
            if hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather"):
                own, dtype = fsdp_param.all_gather_inputs, None
            else:
                own, dtype = get_shards([fsdp_param]), fsdp_param.param_dtype
            tensors += own
            compute_dtypes += [dtype] * len(own)
            counts.append(len(own))
    stored_dtypes = [tensor.dtype for tensor in tensors]
    numels = [tensor.numel() for tensor in tensors]
    return tensors, GatherInputs(stored_dtypes, numels, compute_dtypes, counts)


def _has_extension(fsdp_param: FSDPParam) -> bool:
    if hasattr(fsdp_param, "_extensions_data"):
        return True
    return hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")


def _check_unsharded(fsdp_param: FSDPParam) -> None:
    """Looks at what an extension returned first, which is used without a look."""
    param, inner = fsdp_param._unsharded_param, fsdp_param._unsharded_inner_tensors
    if param.device.type != fsdp_param.device.type:
        raise ValueError(f"the tensor is on {param.device}, not {fsdp_param.device}")
    if any(not isinstance(tensor, torch.Tensor) for tensor in inner):
        raise TypeError(f"the tensors to free are {inner!r}")


def get_shards(fsdp_params: Sequence[FSDPParam]) -> list[torch.Tensor]:
    """Returns the flat local shards of plain parameters."""
    if fsdp_params[0].sharded_state is ShardedState.SHARDED_POST_FORWARD:
        # pyrefly: ignore [bad-return]
        return [
            fsdp_param._sharded_post_forward_param_data for fsdp_param in fsdp_params
        ]
    return [*map(_get_stored, fsdp_params)]


def _plan_unit(inputs: GatherInputs) -> GatherPlan:
    pairs = zip(inputs.stored_dtypes, inputs.compute_dtypes, strict=True)
    dtypes = [compute_dtype or stored_dtype for stored_dtype, compute_dtype in pairs]
    counts = inputs.counts or [1] * len(dtypes)
    layout = plan_gather(dtypes, inputs.numels)
    split_sizes = [*layout.split_sizes]
    if len(layout.regions) > 1 and not layout.padding_nbytes:
        split_sizes.append(0)
    return GatherPlan(
        layout,
        plan_copy_in(layout, inputs.stored_dtypes),
        dtypes=_in_groups(dtypes, counts),
        numels=_in_groups(inputs.numels, counts),
        split_sizes=split_sizes,
    )


def _gathers_others(
    fsdp_param: FSDPParam, last: GatherPlan, plan: GatherPlan, i: int
) -> bool:
    """
    Returns whether an extension gives other inputs than last time: a weight that is
    quantized by row for forward may be so by column for backward.
    """
    if not _has_extension(fsdp_param):
        return False
    return (last.dtypes[i], last.numels[i]) != (plan.dtypes[i], plan.numels[i])


def _check_fits(fsdp_param: FSDPParam, plan: GatherPlan, i: int) -> None:
    """
    Raises if what is now to be gathered would not become what was gathered first,
    which views of autograd's and kernels keep to.
    """
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    if not plan.numels[i]:
        raise ValueError(
            f"fsdp_pre_all_gather of {name} returned no tensor to gather: return "
            "((tensor, ...), metadata)"
        )
    outputs = fsdp_param.all_gather_outputs
    if not outputs or [output.numel() for output in outputs] == plan.numels[i]:
        return  # the latter of a single rank's, copied and cast
    kept, fresh = [output.dtype for output in outputs], plan.dtypes[i]
    if kept != fresh:
        raise RuntimeError(
            f"{name} was gathered as {', '.join(map(str, kept))} before, and would be "
            f"as {', '.join(map(str, fresh))} now: cast a model, or load another dtype "
            "with assign=True, before its first forward"
        )


def _in_groups(values: Iterable, counts: Sequence[int]) -> list[list]:
    values = iter(values)
    return [list(islice(values, count)) for count in counts]


# Where it goes #


class GatherOutputs:
    """
    The all-gather outputs of all parameters. They are allocated and freed by
    resizing their storage, so that views of them last.
    """

    def __init__(self, fsdp_params: Iterable[FSDPParam]):
        # The parameters' own lists, which new outputs would come in a new one of
        self.lists = [*map(_get_outputs, fsdp_params)]
        self.tensors = [*chain.from_iterable(self.lists)]
        # Whether the unsharded parameters over them have been made
        self.have_params = False
        self._storages = [(t.untyped_storage(), t.nbytes) for t in self.tensors]

    def alloc(self) -> None:
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        for storage, _ in self._storages:
            if storage.nbytes():
                storage.resize_(0)


class _KeptColumns(NamedTuple):
    layout: GatherLayout
    outputs: GatherOutputs
    columns: list[torch.Tensor]


class UnitParams(list[FSDPParam]):
    """A unit's parameters, with what is found out about them."""

    @classmethod
    def of(cls, fsdp_params: Sequence[FSDPParam]) -> UnitParams:
        """Returns them as a unit. Of anyone else's list nothing is kept."""
        return fsdp_params if isinstance(fsdp_params, cls) else cls(fsdp_params)

    def __init__(self, params: Iterable[FSDPParam] = ()):
        super().__init__(params)
        self.refresh()

    def refresh(self) -> None:
        """Forgets what is kept, where parameters may have become others."""
        self._made_of = [*self]
        self._local_classes: list[type] = []
        self._has_extensions = any(map(_has_extension, self))
        self._find_places()
        # One each for the shards and for those resharded after forward
        self._plans: dict[ShardedState, tuple[GatherInputs, GatherPlan]] = {}
        self._columns: dict[ShardedState, _KeptColumns] = {}
        self._outputs: GatherOutputs | None = None
        # By the dtype of each parameter's gradient, None without one
        self.buckets: dict[tuple[torch.dtype | None, ...], list[UnitBucket]] = {}
        self.buckets_of: list = []  # what they depend on
        # Whose gradients autograd would cast, from `_fsdp_grads`
        self.widened: list[FSDPParam] = []

    def follow(self) -> None:
        """Forgets what is kept if the list has other parameters now."""
        if self != self._made_of:
            self.refresh()

    @property
    def has_extensions(self) -> bool:
        """Whether any parameter makes its all-gather inputs itself."""
        # A parameter may be replaced, or be given another local tensor, at any time
        classes = [*map(type, map(_get_local_tensor, self))]
        if classes != self._local_classes:
            self._local_classes = classes
            self._has_extensions = any(map(_has_extension, self))
        return self._has_extensions

    def prepare_gather(self) -> tuple[list[torch.Tensor], GatherPlan]:
        """
        Returns this rank's 1D tensors to gather and the plan of their gather: the
        last one, if they are as before.
        """
        self.follow()
        tensors, inputs = _get_gather_inputs(self, self.has_extensions)
        state = self[0].sharded_state
        kept = self._plans.get(state)
        if kept is None or kept[0] != inputs:
            plan = _plan_unit(inputs)
            for i, fsdp_param in enumerate(self):
                if kept is not None and _gathers_others(fsdp_param, kept[1], plan, i):
                    fsdp_param.all_gather_outputs = []  # for new ones
                _check_fits(fsdp_param, plan, i)
            kept = self._plans[state] = (inputs, plan)
        return tensors, kept[1]

    def layout_of(
        self,
        dtypes: Sequence[Sequence[torch.dtype]],
        numels: Sequence[Sequence[int]],
        split_sizes: Sequence[int],
    ) -> GatherLayout:
        """
        Returns the layout of a gathered buffer, from the fields of its gather's
        result. One that was laid out elsewhere holds the inputs in parameter order.
        """
        _, plan = self._plans.get(self[0].sharded_state, (None, None))
        if plan is not None and split_sizes is plan.split_sizes:
            return plan.layout
        flat_dtypes = [*chain.from_iterable(dtypes)]
        flat_numels = [*chain.from_iterable(numels)]
        by_dtype = len(split_sizes) > len(flat_dtypes)
        return plan_gather(flat_dtypes, flat_numels, by_dtype=by_dtype)

    @property
    def gather_plan(self) -> GatherPlan | None:
        """The plan of the last gather of the shards, if there was one."""
        kept = self._plans.get(ShardedState.SHARDED)
        return None if kept is None else kept[1]

    @property
    def outputs(self) -> GatherOutputs | None:
        """The kept outputs, if the parameters still have them."""
        outputs = self._outputs
        if outputs and all(map(is_, map(_get_outputs, self), outputs.lists)):
            return outputs
        return None

    def keep_outputs(self, outputs: GatherOutputs) -> None:
        self._outputs = outputs

    def columns(
        self, layout: GatherLayout, outputs: GatherOutputs
    ) -> list[torch.Tensor] | None:
        """Returns the views that the last gather was copied out to, if still so."""
        kept = self._columns.get(self[0].sharded_state)
        if kept is None or kept.layout is not layout or kept.outputs is not outputs:
            return None
        return kept.columns

    def keep_columns(
        self,
        layout: GatherLayout,
        outputs: GatherOutputs,
        columns: list[torch.Tensor],
    ) -> None:
        state = self[0].sharded_state
        self._columns[state] = _KeptColumns(layout, outputs, columns)

    # Changes of state #
    def init_unsharded_params(self) -> None:
        """Makes the unsharded parameters of what was gathered, where it is new."""
        outputs = self.outputs
        if outputs is not None and outputs.have_params and not self._has_extensions:
            return
        is_first = outputs is None or not outputs.have_params
        for fsdp_param in self:
            fsdp_param.init_unsharded_param()
            if is_first and _has_extension(fsdp_param):
                _check_unsharded(fsdp_param)
        if outputs is not None:
            outputs.have_params = True

    def to_state(self, state: ShardedState) -> None:
        """Brings all parameters to ``state``, and their registrations with them."""
        self.follow()
        if state is ShardedState.UNSHARDED:
            self._to_unsharded()
        elif state is ShardedState.SHARDED_POST_FORWARD:
            for fsdp_param in self:
                fsdp_param.to_sharded_post_forward()
        elif (
            (outputs := self.outputs) is None
            or self._has_extensions
            or keeps_storage(self)
        ):
            for fsdp_param in self:
                fsdp_param.to_sharded()
        else:
            self._register([*map(_get_sharded_param, self)])
            for fsdp_param in self:
                fsdp_param.sharded_state = state
            outputs.free()

    def _to_unsharded(self) -> None:
        params = [*map(_get_unsharded_param, self)]
        wanted = [*map(_get_requires_grad, self)]
        if [param.requires_grad for param in params] != wanted:
            for param, requires_grad in zip(params, wanted):
                param.requires_grad_(requires_grad)
        self._register(params)
        if self[0].sharded_state is ShardedState.SHARDED_POST_FORWARD:
            # Gathered and copied out in the stream that they were allocated in,
            # so that nothing else has to be waited for
            for fsdp_param in self:
                fsdp_param._sharded_post_forward_param = None
                fsdp_param._sharded_post_forward_param_data = None
        for fsdp_param in self:
            fsdp_param.sharded_state = ShardedState.UNSHARDED

    def _register(self, params: Sequence[nn.Parameter]) -> None:
        """Makes ``params`` what the modules have under the parameters' names."""
        plain = nn.Module.__setattr__
        # A class of its own may want to know, and may get it at any time
        others = [m for m in self._modules if type(m).__setattr__ is not plain]
        for module, name, i in self._places:
            # Past the checks of `nn.Module.__setattr__`, which cost more than all
            # the rest: the name is taken and has had a parameter
            if not others or module not in others:
                module._parameters[name] = params[i]
            else:
                setattr(module, name, params[i])

    def _find_places(self) -> None:
        # Module, name in it and position of the parameter, for each name that one
        # of the parameters has
        self._places: list[tuple[nn.Module, str, int]] = []
        for i, fsdp_param in enumerate(self):
            info = fsdp_param._module_info
            modules = [info.module, *info.shared_modules]
            names = [info.param_name, *info.shared_param_names]
            self._places += zip(modules, names, repeat(i))
        self._modules = [*dict.fromkeys(module for module, _, _ in self._places)]
