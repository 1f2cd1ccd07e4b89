"""
Caches that live across steps, and state transitions of a group's parameters.

[Note: Cached between steps]
A step repeats the last one: the same dtypes, sizes and outputs. Nothing announces that
a parameter's data or its all-gather outputs were replaced, so a cached plan is compared
with the parameters at each use, which costs far less than to plan anew. Plans hold
dtypes and sizes only, and keep no shard alive.
"""

# Tests: module_hooks, gather, plugins
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, ne
from typing import Any

import torch

from . import _fsdp_layout as layouts
from . import _fsdp_registrations as registrations
from ._fsdp_errors import explain_extension
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE


# Read of all parameters several times a step, so without a loop in Python
_get_stored = attrgetter("_sharded_param_data")
_get_post_forward_data = attrgetter("_sharded_post_forward_param_data")
_get_compute_dtype = attrgetter("param_dtype")
_get_outputs = attrgetter("all_gather_outputs")
_get_sharded_param = attrgetter("sharded_param")
_get_unsharded_param = attrgetter("_unsharded_param")
_get_requires_grad = attrgetter("requires_grad")
_get_local_tensor = attrgetter("sharded_param._local_tensor")
_get_keeps_storage = attrgetter("keep_unsharded_storage")
_get_version = attrgetter("_version")
_get_kind = attrgetter("device", "dtype", "grad_dtype", "requires_grad")


class ParamVersions:
    """
    How often sharded and unsharded parameters were written to, while both stay: of the
    first trained ones only, so that a step costs the same in large units.
    """

    MAX_PARAMS = 32

    def __init__(self, fsdp_params: Sequence[FSDPParam]):
        trained = (p for p in fsdp_params if p.sharded_param.requires_grad)
        first = [*islice(trained, self.MAX_PARAMS)]
        # Operators write to the DTensor, users to what `to_local` returns
        kinds = ("sharded_param", "_sharded_local_tensor"), ("_unsharded_param",)
        owned = [[(p, getattr(p, n)) for n in kind for p in first] for kind in kinds]
        # Inference tensors have no versions
        self._owned = [
            [of for of in kind if not of[1].is_inference()] for kind in owned
        ]
        self._tensors = [[tensor for _, tensor in kind] for kind in self._owned]
        self._noted = [self._read(0), self._read(1)]

    def _read(self, kind: int) -> list[int]:
        return [*map(_get_version, self._tensors[kind])]

    def note_unsharded(self) -> None:
        """Notes what forward or backward has written, which nobody else reads."""
        self._noted[1] = self._read(1)

    def find_written(self, kind: int) -> FSDPParam | None:
        """Returns a sharded (0) or an unsharded (1) one that was written to since."""
        noted, now = self._noted[kind], self._read(kind)
        if noted == now:
            return None
        return self._owned[kind][[*map(ne, noted, now)].index(True)][0]


class SplitSizes(list[int]):
    """The split sizes in a gather's result, with the layout that they come from."""

    layout: layouts.GatherLayout


class GatherPlan:
    """
    What is known of a gather before its data: what each tensor is stored in, what it is
    cast to on the way or None, its elements, and each parameter's count (None: one).
    """

    def __init__(
        self,
        stored_dtypes: list[torch.dtype],
        compute_dtypes: list[torch.dtype | None],
        numels: list[int],
        counts: list[int] | None = None,
    ):
        self.made_for = stored_dtypes, compute_dtypes, numels, counts
        pairs = zip(compute_dtypes, stored_dtypes, strict=True)
        dtypes = [compute_dtype or stored for compute_dtype, stored in pairs]
        rest = iter(zip(dtypes, numels))
        by_param = [[*islice(rest, count)] for count in counts or [1] * len(dtypes)]
        # The fields of the gather's result
        self.dtypes = [[dtype for dtype, _ in own] for own in by_param]
        self.numels = [[numel for _, numel in own] for own in by_param]
        is_mixed = any(own != self.dtypes[0] for own in self.dtypes)
        self.layout = layouts.plan_gather(dtypes, numels, is_mixed=is_mixed)
        self.copies = layouts.plan_copy_in(self.layout, stored_dtypes)
        self.split_sizes = SplitSizes(self.layout.split_sizes)
        self.split_sizes.layout = self.layout


def get_shards(fsdp_params: Sequence[FSDPParam]) -> list[torch.Tensor]:
    """Returns the flat local shards of plain parameters."""
    is_resharded = fsdp_params[0].sharded_state is ShardedState.SHARDED_POST_FORWARD
    return [*map(_get_post_forward_data if is_resharded else _get_stored, fsdp_params)]


def has_extension(fsdp_param: FSDPParam) -> bool:
    makes_inputs = hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
    return makes_inputs or hasattr(fsdp_param, "_extensions_data")


def get_all_gather_inputs(fsdp_param: FSDPParam) -> list[torch.Tensor]:
    """Returns what the parameter, or its ``fsdp_pre_all_gather``, gives to gather."""
    try:
        return fsdp_param.all_gather_inputs
    except Exception as error:
        raise explain_extension(error, fsdp_param, "fsdp_pre_all_gather")  # noqa: B904


class GatherOutputs:
    """All parameters' all-gather outputs, whose storages are resized to free them."""

    def __init__(self, fsdp_params: Iterable[FSDPParam]):
        # A parameter that gets new outputs gets them in a new list
        self.lists = [*map(_get_outputs, fsdp_params)]
        self.tensors = [*chain.from_iterable(self.lists)]
        self.have_unsharded_params = False  # over them
        # The views that the last gather in a state was copied out to
        self.columns: dict[ShardedState, tuple[layouts.GatherLayout, list]] = {}
        self.storages = [(t.untyped_storage(), t.nbytes) for t in self.tensors]


class ParamGroupCache(list[FSDPParam]):
    """A group's parameters, as ``foreach_*`` are given them, and what is cached."""

    @classmethod
    def of(cls, fsdp_params: Sequence[FSDPParam]) -> ParamGroupCache:
        """Returns a group's list itself, or a new one for someone else's."""
        return fsdp_params if isinstance(fsdp_params, cls) else cls(fsdp_params)

    def __init__(self, fsdp_params: Iterable[FSDPParam]):
        super().__init__(fsdp_params)
        self.invalidate()

    def invalidate(self) -> None:
        self._cached_for = [*self]
        self._local_classes: list[type] = []
        self._has_extensions = any(map(has_extension, self))
        self.has_empty_params = any(p._orig_size.numel() == 0 for p in self)
        self._places = registrations.places_of(self)
        # One each for the shards and for those resharded after forward
        self.plans: dict[ShardedState, GatherPlan] = {}
        self._outputs: GatherOutputs | None = None
        # By the dtype of each parameter's gradient, None without one
        self.buckets: dict[tuple, tuple[layouts.ReduceBucket, ...]] = {}
        self._buckets_depend_on: list[Any] = []
        # See [Note: Microbatches]
        self.upcast_by_autograd: list[FSDPParam] = []
        # Registered instead of the sharded ones, and what users have set there so far
        self._in_use: list[Any] = []
        self._requires_grad: list[bool] = []

    def invalidate_if_changed(self) -> None:
        """Invalidates all if the list holds other parameters now."""
        if self != self._cached_for:
            self.invalidate()

    def invalidate_buckets_if_changed(self) -> bool:
        """
        Invalidates the buckets if what they depend on has changed: policies, devices,
        dtypes, or which parameters are trained. Returns whether it has.
        """
        self.invalidate_if_changed()
        depend_on = [(p.mp_policy, *_get_kind(p.sharded_param)) for p in self]
        if self._buckets_depend_on == depend_on:
            return False
        self.buckets.clear()
        self._buckets_depend_on = depend_on
        return True

    def prepare_gather(self) -> tuple[list[torch.Tensor], GatherPlan]:
        """Returns this rank's 1D tensors to gather, shards uncast, and their plan."""
        self.invalidate_if_changed()
        # A parameter may be replaced, or be given another local tensor, at any time
        classes = [*map(type, map(_get_local_tensor, self))]
        if classes != self._local_classes:
            self._local_classes = classes
            self._has_extensions = any(map(has_extension, self))
        counts = None
        if not self._has_extensions:
            tensors = get_shards(self)
            compute_dtypes = [*map(_get_compute_dtype, self)]
        else:
            tensors, compute_dtypes, counts = [], [], []
            for fsdp_param in self:
                if hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather"):
                    own, dtype = get_all_gather_inputs(fsdp_param), None
                else:
                    own, dtype = get_shards([fsdp_param]), fsdp_param.param_dtype
                tensors += own
                compute_dtypes += [dtype] * len(own)
                counts.append(len(own))
        stored_dtypes = [tensor.dtype for tensor in tensors]
        numels = [tensor.numel() for tensor in tensors]
        made_for = stored_dtypes, compute_dtypes, numels, counts
        state = self[0].sharded_state
        plan = self.plans.get(state)
        if plan is None or plan.made_for != made_for:
            last, plan = plan, GatherPlan(*made_for)
            self._fit_outputs(iter(tensors), plan, last)
            self.plans[state] = plan
        return tensors, plan

    def _fit_outputs(self, tensors: Iterator, plan: GatherPlan, last: Any) -> None:
        """
        Drops an extension's outputs if it gathers other inputs than last time, e.g.
        those quantized by row in forward and by column in backward. Raises if a plain
        parameter's dtype has changed: autograd and kernels hold views of its outputs.
        """
        for i, fsdp_param in enumerate(self):
            name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
            dtypes, numels, device = plan.dtypes[i], plan.numels[i], fsdp_param.device
            own = [*islice(tensors, len(numels))]
            if has_extension(fsdp_param):
                if last and (dtypes, numels) != (last.dtypes[i], last.numels[i]):
                    fsdp_param.all_gather_outputs = []  # for new ones
                if not own:
                    raise ValueError(
                        f"fsdp_pre_all_gather of {name} returned no tensor to gather: "
                        "return ((tensor, ...), metadata)"
                    )
                if not {tensor.device.type for tensor in own} <= {"cpu", device.type}:
                    raise RuntimeError(
                        f"fsdp_pre_all_gather of {name} failed, or did not return "
                        f"tensors on {device}"
                    )
            first_dtypes = [output.dtype for output in fsdp_param.all_gather_outputs]
            if first_dtypes and first_dtypes != dtypes:
                before, now = (", ".join(map(str, of)) for of in (first_dtypes, dtypes))
                raise RuntimeError(
                    f"{name} was gathered in {before} before, but is now {now}. Change "
                    "a model's dtype, by to() or by load_state_dict(assign=True), only "
                    "before its first forward"
                )

    @property
    def outputs(self) -> GatherOutputs | None:
        """The all-gather outputs, None if a parameter's were never made or replaced."""
        outputs, lists = self._outputs, map(_get_outputs, self)
        return outputs if outputs and all(map(is_, lists, outputs.lists)) else None

    def alloc_outputs(
        self, dtypes: list, numels: list, world_size: int, device: torch.device
    ) -> GatherOutputs:
        """Makes the all-gather outputs, or gives them their storage back."""
        if (outputs := self.outputs) is not None:
            for storage, nbytes in outputs.storages:
                if storage.nbytes() != nbytes:
                    storage.resize_(nbytes)
            return outputs
        for fsdp_param, own, of in zip(self, numels, dtypes, strict=True):
            fsdp_param.init_all_gather_outputs(own, of, world_size, device)
            fsdp_param.alloc_all_gather_outputs()
        self._outputs = GatherOutputs(self)
        return self._outputs

    def init_unsharded_params(self) -> None:
        """Makes the unsharded parameters from new all-gather outputs."""
        outputs = self._outputs
        is_first = outputs is None or not outputs.have_unsharded_params
        if not is_first and not self._has_extensions:
            return
        for fsdp_param in self:
            try:
                fsdp_param.init_unsharded_param()
                if not is_first or not has_extension(fsdp_param):
                    continue
                # Nothing looks later at what an extension has returned
                device, found = fsdp_param.device, fsdp_param._unsharded_param.device
                if found.type != device.type:
                    raise ValueError(f"the tensor is on {found}, not {device}")
                inner = fsdp_param._unsharded_inner_tensors
                if any(not isinstance(tensor, torch.Tensor) for tensor in inner):
                    raise TypeError(f"the tensors to free are {inner!r}")
            except Exception as error:
                method = "fsdp_post_all_gather"
                raise explain_extension(error, fsdp_param, method)  # noqa: B904
        if outputs is not None:
            outputs.have_unsharded_params = True

    def keep_requires_grad(self) -> None:
        """Gives sharded parameters the flags that users have set on those in use."""
        before, now = self._requires_grad, [*map(_get_requires_grad, self._in_use)]
        if now != before:
            for fsdp_param, was_trained, is_trained in zip(self, before, now):
                if is_trained is not was_trained:
                    fsdp_param.sharded_param.requires_grad_(is_trained)
            self._requires_grad = now

    def to_state(self, state: ShardedState) -> None:
        """Brings all parameters to ``state``, and their registrations with them."""
        self.invalidate_if_changed()
        self.keep_requires_grad()
        self._in_use, self._requires_grad = [], []
        sharded, outputs = [*map(_get_sharded_param, self)], None
        if state is not ShardedState.SHARDED:
            self._requires_grad = [*map(_get_requires_grad, sharded)]
        if state is ShardedState.UNSHARDED:
            params = [*map(_get_unsharded_param, self)]
            if [*map(_get_requires_grad, params)] != self._requires_grad:
                for param, is_trained in zip(params, self._requires_grad):
                    param.requires_grad_(is_trained)
            self._in_use = params
            if self[0].sharded_state is ShardedState.SHARDED_POST_FORWARD:
                # Gathered and copied out in the stream that allocated them: no wait
                for fsdp_param in self:
                    fsdp_param._sharded_post_forward_param = None
                    fsdp_param._sharded_post_forward_param_data = None
        elif (
            state is ShardedState.SHARDED_POST_FORWARD
            or (outputs := self.outputs) is None
            or self._has_extensions
            or FOLLOWS_GRAD_DTYPE  # storage may outlive resharding
            and any(map(_get_keeps_storage, self))
        ):
            for fsdp_param in self:
                if state is ShardedState.SHARDED:
                    fsdp_param.to_sharded()
                else:
                    fsdp_param.to_sharded_post_forward()
            if state is ShardedState.SHARDED_POST_FORWARD:
                self._in_use = [p._sharded_post_forward_param for p in self]
            return
        else:
            params = sharded
        registrations.register(self._places, params)
        for fsdp_param in self:
            fsdp_param.sharded_state = state
        for storage, _ in outputs.storages if outputs else ():
            if storage.nbytes():
                storage.resize_(0)
