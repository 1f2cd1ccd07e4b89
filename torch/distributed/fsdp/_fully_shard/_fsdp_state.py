"""
What runs around a unit's forward and backward: the hooks of its modules, and what the
root does once for all units.

A unit's state has one parameter group for each mesh. The first state whose forward runs
is the root of all those below its module. It names them, gives them one context, and
ends their backward. What its groups do in a hook is in :mod:`_fsdp_param_group`.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.autograd.graph import _MultiHandle
from torch.distributed._composable_state import (
    _get_module_state,
    _insert_module_state,
    _State,
)
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

from ._fsdp_api import MixedPrecisionPolicy
from ._fsdp_common import (
    _cast_fp_tensor,
    _dynamo_disable,
    are_leaves,
    DDPMeshInfo,
    TrainingState,
)
from ._fsdp_context import _GradientReductionState, FSDPCommContext
from ._fsdp_observers import look_for_traces, range_of
from ._fsdp_param_group import FSDPParamGroup
from ._fsdp_release import not_type_checked


logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_StateType = TypeVar("_StateType", bound="FSDPState")
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

# Devices that inputs are moved to, besides the one that a vendor registers
_MOVES_INPUTS_TO = ("cuda", "hpu", "xpu", "mtia")


class FSDPStateContext(Generic[_StateType]):
    """What the states of one root share."""

    def __init__(self) -> None:
        # In the order of `named_modules`, a module before those in it
        self.all_states: list[_StateType] = []
        # Whose forward runs what is run once in each. It may be below the root of all,
        # if only a part of the model is used.
        self.iter_forward_root: _StateType | None = None
        # Of this backward, which the engine calls back once
        self.post_backward_final_callback_queued: bool = False
        # Whether sharded gradients are waited for at the end of this backward
        self.is_last_backward: bool = True
        # After the optimizer's step, if users say what to wait for
        self.post_optim_event: torch.Event | None = None
        # Whether users end backward themselves, and whether they do so with the one
        # that has begun, None outside of one (2.15)
        self.manual_backward_finalization: bool = False
        self.manual_backward_finalization_active: bool | None = None
        # Until the user's handle of that has been waited for (2.15)
        self.gradient_reduction_pending: bool = False


class FSDPState(_State):
    """The state of a unit: of one module, or of several that are used together."""

    # In messages
    _state_name: str = "FSDP"

    def __init__(self) -> None:
        super().__init__()
        self._training_state = TrainingState.IDLE
        self._fsdp_param_groups: list[FSDPParamGroup] = []
        self._is_root: bool | None = None  # until a first forward
        self._comm_ctx = FSDPCommContext()
        self._state_ctx: FSDPStateContext[Any] = FSDPStateContext()
        # What users want to be gathered beside this unit's
        self._states_to_backward_prefetch: list[FSDPState] = []
        self._states_to_forward_prefetch: list[FSDPState] = []
        # Of several modules, those whose forward in this pass is still to come
        self._modules_to_run_forward: set[nn.Module] = set()
        # Not where users have said whether to reshard
        self._auto_reshard_after_forward: bool | None = True

    # Called by `fully_shard`: Python's own is called by `contract`, without arguments
    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
    ) -> None:
        self._modules = modules
        for module in modules:
            _insert_module_state(module, self)
        self._device_handle = _get_device_handle(device.type)
        self._device = device
        # Each parameter's own policy has what the function returned
        if getattr(mp_policy, "param_dtype_override_fn", None) is not None:
            mp_policy = replace(mp_policy, param_dtype_override_fn=None)
        self._mp_policy = mp_policy
        self._auto_reshard_after_forward = auto_reshard_after_forward
        if len(modules) > 1:
            hooks = (self._pre_forward, self._post_forward)
            handle = _register_group_forward_hooks(
                modules, *hooks, self._modules_to_run_forward, self._cast_output_dtype
            )
            self._pre_forward_hook_handle = self._post_forward_hook_handle = handle
            return
        (module,) = modules
        self._pre_forward_hook_handle = module.register_forward_pre_hook(
            self._pre_forward, prepend=True, with_kwargs=True
        )
        self._post_forward_hook_handle = module.register_forward_hook(
            self._post_forward
        )

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        """The one parameter group, None if there is none to manage."""
        match self._fsdp_param_groups:
            case []:
                return None
            case [group]:
                return group
        names = [group._module_fqn for group in self._fsdp_param_groups]
        raise AssertionError(
            "Expected at most 1 param group for backward compatibility, but got "
            f"{len(names)} (fqns: {names}), one for each mesh. Use `_fsdp_param_groups`"
        )

    def _get_state_for_module(self, module: nn.Module) -> FSDPState | None:
        """Returns a module's state of this kind; other kinds have their own."""
        return _get_module_fsdp_state(module)

    def _all_groups(self) -> Iterator[FSDPParamGroup]:
        for state in self._state_ctx.all_states:
            yield from state._fsdp_param_groups

    # The first forward #
    def _lazy_init(self) -> None:
        """
        Makes this state the root of those below its modules. Put off to the first
        forward, when parallelism has been applied to all that there is.
        """
        if self._is_root is not None:
            return
        states = self._state_ctx.all_states = self._find_states()
        self._init_fqns()
        self._init_shared_state()
        self._validate_no_duplicate_params()
        for group in self._all_groups():
            group.lazy_init()
        # Only now: after an error in the above users may try again, with other roots too
        if self._auto_reshard_after_forward:
            # Backward would gather again at once what is freed at the end of forward
            for group in self._fsdp_param_groups:
                group.post_forward_mesh_info = None
        for state in states:
            state._state_ctx = self._state_ctx
            state._is_root = state is self

    def _find_states(self) -> list[FSDPState]:
        """Returns the states below, with this one, each once."""
        if len(self._modules) > 1:
            raise RuntimeError(
                f"{self._state_name} requires a single root module but got "
                f"{self._modules}: apply fully_shard to a module that has them, and "
                "run its forward first"
            )
        (root,) = self._modules
        found: dict[FSDPState, None] = {}
        for name, module in root.named_modules():
            state = self._get_state_for_module(module)
            if state is None:
                continue
            found[state] = None
            if state is self:
                continue
            if state._state_ctx.manual_backward_finalization:
                raise RuntimeError(
                    "set_manual_backward_finalization must be called on the root "
                    f"{self._state_name} module, but it was on {name}"
                )
            if state._is_root is not None:
                raise RuntimeError(
                    f"{self._state_name} state has already been lazily initialized for "
                    f"{name}\n{self._state_name} requires running forward through the "
                    "root module first"
                )
        return [*found]

    def _init_fqns(self) -> None:
        """Tells groups and parameters what they are called in the root."""
        (root,) = self._modules
        names = {param: name for name, param in root.named_parameters()}
        names_of: dict[FSDPParamGroup, list[str]] = {}
        groups_of: dict[nn.Module, list[FSDPParamGroup]] = {}
        for group in self._all_groups():
            for module in group.modules:
                groups_of.setdefault(module, []).append(group)
            for fsdp_param in group.fsdp_params:
                if (name := names.get(fsdp_param.sharded_param)) is not None:
                    fsdp_param._param_fqn = name
        for name, module in root.named_modules():
            for group in groups_of.get(module, ()):
                names_of.setdefault(group, []).append(name)
        for group, module_names in names_of.items():
            group._module_fqn = ", ".join(module_names)

    def _init_shared_state(self) -> None:
        """Gives all states and groups this root's streams."""
        comm_ctx = self._comm_ctx
        comm_ctx.lazy_init(self._device)
        for state in self._state_ctx.all_states:
            state._comm_ctx = comm_ctx
            groups = state._fsdp_param_groups
            for i, group in enumerate(groups):
                group.comm_ctx = comm_ctx
                group._param_group_index = i
                group._num_param_groups = len(groups)
        # The inputs in flight are in one list, so that one number holds: the largest,
        # as a smaller one of some group would take back what others ask for
        numbers = [
            group.reduce_scatter_max_input_buffers for group in self._all_groups()
        ]
        comm_ctx.reduce_scatter_max_input_buffers = max(numbers, default=1)

    def _validate_no_duplicate_params(self) -> None:
        seen: set[int] = set()
        for group in self._all_groups():
            for fsdp_param in group.fsdp_params:
                if fsdp_param._orig_param_uid in seen:
                    raise ValueError(
                        f"Parameter '{fsdp_param._param_fqn}' is shared with a parameter "
                        "already managed by another FSDP group. For shared/tied "
                        "parameters, use fully_shard([module_a, module_b]) to place them "
                        "in the same FSDP group."
                    )
                seen.add(fsdp_param._orig_param_uid)

    # Forward #
    @not_type_checked
    def _root_pre_forward(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        """Runs what comes once before each forward, if this state is the first in it."""
        self._lazy_init()
        context = self._state_ctx
        if context.iter_forward_root is not None:
            return args, kwargs
        logger.debug("FSDP::root_pre_forward")
        context.iter_forward_root = self
        look_for_traces()
        with range_of("FSDP::root_pre_forward"):
            # The first gathers read what the optimizer has written
            event, context.post_optim_event = context.post_optim_event, None
            if event is not None:
                self._comm_ctx.wait_all_gather_streams_on_event(event)
            else:
                stream = self._device_handle.current_stream()
                self._comm_ctx.all_gather_copy_in_stream.wait_stream(stream)
                self._comm_ctx.all_gather_stream.wait_stream(stream)
            device_type = self._device.type
            moves_to = (*_MOVES_INPUTS_TO, torch._C._get_privateuse1_backend_name())
            if device_type not in moves_to or not (args or kwargs):
                return args, kwargs
            with range_of("FSDP::inputs_to_device"):
                # As DDP has it, which allows for several devices
                all_args, all_kwargs = _to_kwargs(args, kwargs, self._device, False)
                return all_args[0], all_kwargs[0]

    @_dynamo_disable
    def _pre_forward(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        if (
            self._state_ctx.gradient_reduction_pending
            or self._comm_ctx.active_gradient_reduction is not None
        ):
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward"
            )
        if self._training_state is TrainingState.PRE_BACKWARD:
            self._unshard_for_recomputation()
            return self._cast_forward_inputs(args, kwargs)
        # Of several modules each comes here, and the first for all
        is_first = self._training_state is not TrainingState.FORWARD
        if is_first:
            args, kwargs = self._root_pre_forward(module, args, kwargs)
        self._training_state = TrainingState.FORWARD
        args, kwargs = self._cast_forward_inputs(args, kwargs)
        for group in self._fsdp_param_groups:
            args, kwargs = group.pre_forward(module, args, kwargs)
        if is_first and self._states_to_forward_prefetch:
            self._prefetch_in_forward()
        return args, kwargs

    @not_type_checked
    def _unshard_for_recomputation(self) -> None:
        """
        Gathers what activation checkpointing computes with again. Backward has done so
        already, unless another forward's backward has resharded it since.
        """
        for group in self._fsdp_param_groups:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()

    @not_type_checked
    def _prefetch_in_forward(self) -> None:
        for state in self._states_to_forward_prefetch:
            for group in state._fsdp_param_groups:
                FSDPParamGroup._prefetch_unshard(group, "forward")

    @_dynamo_disable
    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        # Of a forward that is run again in backward, backward's end is the end
        if self._training_state is TrainingState.PRE_BACKWARD:
            return not_type_checked(self._cast_output_dtype)(output)
        output = self._end_forward(module, input, output)
        if (context := self._state_ctx).iter_forward_root is self:
            output = self._force_complete_incomplete_states(output)
            # See [Note: Freeing the gather buffer late]
            self._comm_ctx.release_all_gather_state_for_comm_reuse()
            context.iter_forward_root = None
        return self._cast_output_dtype(output)

    @not_type_checked
    def _end_forward(self, module: Any, input: Any, output: Any) -> Any:
        for group in self._fsdp_param_groups:
            output = group.post_forward(module, input, output)
        output = self._register_pre_backward_hook(output)
        self._training_state = TrainingState.IDLE
        return output

    @not_type_checked
    def _force_complete_incomplete_states(self, output: Any) -> Any:
        """
        Ends the forward of units of which some modules did not run, e.g. a head that
        the loss calls in chunks. The innermost comes first, as if all had run.
        """
        for state in reversed(self._state_ctx.all_states):
            if state is not self and state._modules_to_run_forward:
                logger.debug("FSDP::force_complete_post_forward")
                output = state._end_forward(None, None, output)
                output = state._cast_output_dtype(output)
                state._modules_to_run_forward.clear()
        return output

    def _cast_forward_inputs(
        self, args: _Args, kwargs: _Kwargs
    ) -> tuple[_Args, _Kwargs]:
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        with range_of("FSDP::cast_forward_inputs"):
            return _cast(dtype, args), _cast(dtype, kwargs) if kwargs else kwargs

    def _cast_output_dtype(self, output: Any) -> Any:
        dtype = self._mp_policy.output_dtype
        if dtype is None:
            return output
        with range_of("FSDP::cast_forward_outputs"):
            return _cast(dtype, output)

    # Backward #
    def _register_pre_backward_hook(self, output: Any) -> Any:
        """Lets backward start with the unit's pre-backward, wherever it comes in."""
        if not torch.is_grad_enabled():
            return output
        for tensor in collect_grad_tensors(output):
            if tensor._base is not None:
                self._warn_of_view()
            tensor.register_hook(self._pre_backward)
        if not torch._C._are_functorch_transforms_active():
            return output
        # In a transform an output that does not say that it requires gradients may
        # have some from outside
        return _apply_to_tensors(self._pass_through_node, output)

    def _pass_through_node(self, tensor: torch.Tensor) -> torch.Tensor:
        can_have_grad = torch.is_floating_point(tensor) or torch.is_complex(tensor)
        if tensor.requires_grad or not can_have_grad:
            return tensor
        return RegisterPreBackwardFunction.apply(self, tensor)

    def _warn_of_view(self) -> None:
        names = ", ".join(type(module).__name__ for module in self._modules)
        warnings.warn(
            f"FSDP2-wrapped module ({names or '?'}) returned a view tensor. An in-place "
            "op on this view (e.g., `x += y`) will silently drop the pre-backward hook "
            "and skip the all-gather, which can cause backward to fail or produce wrong "
            "gradients. Use out-of-place ops (`out = out + y`, not `out += y`) or "
            "`.clone()` the output before any in-place op.",
            UserWarning,
            stacklevel=3,
        )

    @_dynamo_disable
    @not_type_checked
    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self._training_state = TrainingState.PRE_BACKWARD
        self._register_root_post_backward_final_callback()
        own_prefetch = self._states_to_backward_prefetch
        for group in self._fsdp_param_groups:
            group.pre_backward(not own_prefetch)
        for state in own_prefetch:
            # As backward comes to them: the last group of a state first
            for group in reversed(state._fsdp_param_groups):
                FSDPParamGroup._prefetch_unshard(group, "backward")
        return grad

    def _register_root_post_backward_final_callback(self) -> None:
        context = self._state_ctx
        if context.post_backward_final_callback_queued:
            return
        context.manual_backward_finalization_active = self._is_finalized_by_hand()
        context.post_backward_final_callback_queued = True
        Variable._execution_engine.queue_callback(
            self._root_post_backward_final_callback
        )

    @_dynamo_disable
    def _root_post_backward_final_callback(self) -> None:
        """Ends a backward when autograd has ended it."""
        logger.debug("FSDP::root_post_backward")
        context = self._state_ctx
        is_manual = self._is_finalized_by_hand()
        with range_of("FSDP::root_post_backward_callback"):
            # Of modules that were called by themselves, e.g. a head for each chunk of
            # the loss, no root's forward ended
            context.iter_forward_root = None
            for state in context.all_states:
                state._modules_to_run_forward.clear()
                for group in reversed(state._fsdp_param_groups):
                    self._end_group(group, is_manual)
                state._training_state = TrainingState.IDLE
            if context.is_last_backward and not is_manual:
                self.wait_for_gradient_reduction()
            else:
                # Kept by a forward that did not run all modules of a unit
                self._comm_ctx.release_all_gather_state_on_current_stream()
            context.post_backward_final_callback_queued = False

    def _is_finalized_by_hand(self) -> bool:
        """As it was when backward began. Pipelines also end one that never did."""
        context = self._state_ctx
        if (is_manual := context.manual_backward_finalization_active) is None:
            return context.manual_backward_finalization
        return is_manual

    @staticmethod
    def _end_group(group: FSDPParamGroup, is_manual: bool) -> None:
        """Runs what autograd did not: no input of the unit had a gradient."""
        if group._training_state is not TrainingState.POST_BACKWARD:
            if is_manual and group.reduce_grads:
                group._post_backward_pending = True
            else:
                group.post_backward()
        group._training_state = TrainingState.IDLE

    # The end of an iteration #
    def finalize_backward(self, *, wait_for_gradient_reduction: bool = True) -> None:
        """Reduces what backward has left to reduce, where users end it themselves."""
        if self._is_root is None:
            return
        logger.debug("%s::finalize_backward", self._state_name)
        with range_of(f"{self._state_name}::finalize_backward"):
            self._validate_finalize_backward()
            for group in reversed([*self._all_groups()]):
                if group._post_backward_pending:
                    group.post_backward()
                elif group.reshard_after_backward:
                    not_type_checked(group.reshard)()
                group._training_state = TrainingState.IDLE
            if wait_for_gradient_reduction:
                self.wait_for_gradient_reduction()

    def _validate_finalize_backward(self) -> None:
        """
        Raises:
            RuntimeError: if this is no time for it, no root, or no unit that can.
        """
        context, name = self._state_ctx, self._state_name
        if self._is_root is None:
            self._raise_about_finalizing("must be called after the first forward")
        if context.gradient_reduction_pending:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before finalizing "
                "backward again"
            )
        if not self._is_root:
            self._raise_about_finalizing(f"must be called on the root {name} module")
        if not self._is_finalized_by_hand():
            self._raise_about_finalizing(
                "requires manual backward finalization. Call "
                "set_manual_backward_finalization(True) before forward"
            )
        if context.post_backward_final_callback_queued:
            self._raise_about_finalizing("must be called after backward completes")
        for group in self._all_groups():
            if group._partial_reduce_output is not None:
                raise RuntimeError(
                    f"{name} manual backward finalization does not support partial "
                    "gradient reductions for parameter group "
                    f"{group._module_fqn or '<root>'!r}. Use automatic backward "
                    "finalization for this configuration"
                )
        for group in self._all_groups():
            reduces = group._post_backward_pending and group.reduce_grads
            if not reduces or group.all_reduce_grads:
                continue
            if isinstance(group.mesh_info, DDPMeshInfo):
                raise RuntimeError(
                    f"{name} manual backward finalization requires all-reduce for "
                    f"parameter group {group._module_fqn or '<root>'!r}. Call "
                    "set_requires_all_reduce(True) before finalization"
                )

    def _raise_about_finalizing(self, what: str) -> NoReturn:
        raise RuntimeError(f"{self._state_name} finalize_backward {what}")

    def wait_for_gradient_reduction(
        self, reduction: _GradientReductionState | None = None
    ) -> None:
        """
        Orders the current stream behind all reductions and ends the iteration.

        Args:
            reduction: What a user's handle waits for, None if there is none.

        Raises:
            RuntimeError: if another one has begun since.
        """
        if reduction is None:
            self._end_backward_iteration()
            return
        if self._comm_ctx.active_gradient_reduction is not reduction:
            raise RuntimeError("This gradient reduction handle was invalidated")
        self._end_backward_iteration()
        self._state_ctx.gradient_reduction_pending = False
        self._comm_ctx.active_gradient_reduction = None

    def _end_backward_iteration(self) -> None:
        for group in self._all_groups():
            group.finalize_backward()  # the first of them waits for the reductions
        self._comm_ctx.release_all_gather_state_on_current_stream()
        self._comm_ctx.post_forward_order.clear()
        self._comm_ctx.release_reduce_scatter_inputs()
        self._state_ctx.manual_backward_finalization_active = None

    def _reset_iter_state(self) -> None:
        """
        Gives up an iteration in which there was an exception: waits for what is in
        flight, reshards, and drops the gradients that were under way.
        """
        if self._is_root is False:
            raise RuntimeError(
                "reset_iter_state must be called on the root FSDP module"
            )
        context, comm_ctx = self._state_ctx, self._comm_ctx
        reduction = comm_ctx.active_gradient_reduction
        if reduction is not None and reduction.owner is not context:
            raise RuntimeError(
                "reset_iter_state cannot reset a gradient reduction owned by another "
                "FSDP root sharing the communication context"
            )
        comm_ctx.release_all_gather_state_on_current_stream()
        comm_ctx.release_reduce_scatter_inputs()
        comm_ctx.wait_current_stream_on_reductions()
        comm_ctx.post_forward_order.clear()
        for state in context.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
        for group in self._all_groups():
            group._reset_iter_state()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        context.manual_backward_finalization_active = None
        context.gradient_reduction_pending = False
        comm_ctx.active_gradient_reduction = None


def _get_module_fsdp_state(module: nn.Module) -> FSDPState | None:
    state = _get_module_state(module)
    return state if isinstance(state, FSDPState) else None


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """Casts the floating-point tensors in ``values``, in containers of any kind."""
    cast = functools.partial(_cast_fp_tensor, dtype)
    if type(values) is tuple and are_leaves(values):
        return tuple(map(cast, values))
    if type(values) is dict and are_leaves(values.values()):
        return dict(zip(values, map(cast, values.values())))
    return _apply_to_tensors(cast, values)


class RegisterPreBackwardFunction(torch.autograd.Function):
    """The identity on an output, whose backward starts with the unit's pre-backward."""

    generate_vmap_rule = True

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(state: FSDPState, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.state = inputs[0]

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.state._pre_backward(grad)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def jvp(ctx: Any, state_tangent: object, output_tangent: torch.Tensor | None):
        # The state has no tangent. The backward of the output's is a backward, too.
        if output_tangent is None:
            return None
        return RegisterPreBackwardFunction.apply(ctx.state, output_tangent)


def _register_group_forward_hooks(
    modules: Sequence[nn.Module],
    pre_hook: Callable[..., Any],
    post_hook: Callable[..., Any],
    modules_to_run: set[nn.Module],
    cast_output_dtype: Callable[[Any], Any],
) -> _MultiHandle:
    """
    Registers the hooks of a unit of several modules: the pre-hook runs before each of
    them, the post-hook after the last one that is still to run in this pass. Until
    then ``modules_to_run`` has the others, whose outputs are only cast. If some never
    run, the root ends the forward in their place.
    """

    @_dynamo_disable
    @functools.wraps(pre_hook)
    def begin(*args: Any, **kwargs: Any) -> Any:
        if not modules_to_run:
            modules_to_run.update(modules)
        return pre_hook(*args, **kwargs)

    @_dynamo_disable
    @functools.wraps(post_hook)
    def end(module: nn.Module, input: Any, output: Any) -> Any:
        is_new = module in modules_to_run
        modules_to_run.discard(module)
        if is_new and not modules_to_run:
            return post_hook(module, input, output)
        return cast_output_dtype(output)

    begins = [
        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        for module in modules
    ]
    ends = [module.register_forward_hook(end, always_call=True) for module in modules]
    return _MultiHandle((*begins, *ends))
