"""
A sharded model beside the same model unsharded, trained on the same batches.

Every rank runs the batches of all ranks through the unsharded model, so that it knows
each rank's loss bit for bit, and the exact sum of the gradients. A reduced gradient is
within the rounding of its own reduction, see ``bound``. The reference steps with the
gradients of the sharded model, which were checked just before: after that parameters
are equal, and rounding does not add up over steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from fsdp_common.release_rules import autograd_dtype, compute_dtype, reduce_dtype
from fsdp_common.utils import DEVICE_TYPE, FSDPProcessTest, shard_mesh, WORLD_SIZE
from fsdp_parity.models import batch_of, loss_of
from fsdp_parity.modes import LR, shard_blocks

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor, DTensor, Shard


# Accelerators may choose other kernels for the same operators
_IS_EXACT = DEVICE_TYPE == "cpu"


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` in a dtype in which sums of few terms are as good as exact."""
    is_complex = tensor.is_complex()
    return tensor.detach().to(torch.complex128 if is_complex else torch.float64)


def local_part(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Returns this rank's part of ``full``, which every rank has, if laid out alike."""
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def full_tensors(tensors: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    """Returns what every rank together has of each, in one exchange."""
    own = {name: tensor.to_local().cpu() for name, tensor in tensors.items()}
    parts: list[dict[str, torch.Tensor]] = [{}] * WORLD_SIZE
    dist.all_gather_object(parts, own)
    full = {}
    for name, tensor in tensors.items():
        pieces, dim = [own[name]], 0
        for mesh_dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                group = tensor.device_mesh.get_group(mesh_dim)
                ranks = dist.get_process_group_ranks(group)
                pieces, dim = [parts[rank][name] for rank in ranks], placement.dim
        full[name] = torch.cat(pieces, dim).to(tensor.device)
    return full


class Reference:
    """The unsharded model, and the exact gradients of one step."""

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy):
        self.policy = policy
        # In their own dtypes, as the optimizer has them
        self.model = copy.deepcopy(model)
        # In the dtypes that are computed in
        self._compute = copy.deepcopy(model)
        self._compute.register_forward_pre_hook(self._cast_inputs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        # Whether gradients are reduced after each backward
        self.reduces = True
        self.forget()

    def _cast_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        policy = self.policy
        if not policy.cast_forward_inputs or policy.param_dtype is None:
            return args
        return tuple(arg.to(policy.param_dtype) for arg in args)

    def forget(self) -> None:
        """Forgets the gradients of the step so far."""
        self.gradients: dict[str, torch.Tensor] = {}  # summed over ranks
        self._magnitudes: dict[str, torch.Tensor] = {}  # sums of absolute values
        self._microbatches = 0

    def computing(self) -> nn.Module:
        """Returns the model as forward sees it, from the parameters of now."""
        named = self.model.named_parameters()
        for (name, param), computed in zip(named, self._compute.parameters()):
            dtype = compute_dtype(self.policy, param.dtype)
            computed.data = param.detach().to(dtype, copy=True)
            computed.requires_grad_(param.requires_grad)
            is_deferred = self.reduces or name in self.gradients
            computed.grad_dtype = autograd_dtype(self.policy, param.dtype, is_deferred)
        return self._compute

    def backward(self, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Adds the gradients of every rank's batch, and returns their losses."""
        model, losses = self.computing(), []
        for x in batches:
            loss = loss_of(model(x))
            loss.backward()
            losses.append(loss.detach())
            for name, param in model.named_parameters():
                if param.grad is not None:
                    grad = wide(param.grad)
                    zero = torch.zeros_like(grad)
                    self.gradients.setdefault(name, zero).add_(grad)
                    magnitude = self._magnitudes.setdefault(name, zero.abs())
                    magnitude.add_(grad.abs())
                    param.grad = None
        self._microbatches += 1
        return losses

    def bound(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """
        Returns how far a reduced gradient may be from the exact one.

        Each addition, one for each rank and microbatch, rounds by at most half an eps
        of the sum of the absolute values, and so do two divisions. Then the result is
        cast to the parameter's dtype. What fp16 divides before may be subnormal.
        """
        info = torch.finfo(reduce_dtype(self.policy, param.dtype))
        roundings = WORLD_SIZE + self._microbatches + 2
        roundings += 0 if _IS_EXACT else 1000
        magnitude = self._magnitudes[name] / WORLD_SIZE
        exact = self.gradients[name].abs() / WORLD_SIZE
        subnormals = roundings * info.smallest_normal * info.eps
        return (
            roundings * info.eps / 2 * magnitude
            + torch.finfo(param.dtype).eps * exact
            + subnormals
        )


class SideBySide:
    """
    A model that ``shard`` shards, and that is trained step by step beside its
    reference.
    """

    def __init__(
        self,
        test: FSDPProcessTest,
        model: nn.Module,
        shard: Callable[..., None] = shard_blocks,
        *,
        policy: MixedPrecisionPolicy | None = None,
        **kwargs: Any,
    ):
        policy = policy or MixedPrecisionPolicy()
        self.test = test
        self.model = model.to(test.device)
        self.reference = Reference(model, policy)
        kwargs.setdefault("mesh", shard_mesh())
        shard(model, mp_policy=policy, **kwargs)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self._batch = 0

    def next_batches(self) -> list[torch.Tensor]:
        """Returns a batch of every rank that no other call returns."""
        self._batch += 1
        device = self.test.device
        return [batch_of(self._batch, rank).to(device) for rank in range(WORLD_SIZE)]

    def backward(self) -> None:
        """Runs one microbatch on both, and compares this rank's loss."""
        batches, rank = self.next_batches(), self.test.rank
        expected = self.reference.backward(batches)[rank]
        loss = loss_of(self.model(batches[rank]))
        self.check_equal(loss.detach(), expected)
        loss.backward()

    def check_equal(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = 0 if _IS_EXACT else 1e-2
        self.test.assertEqual(actual, expected, atol=tolerance, rtol=tolerance)

    def check_gradients(self) -> None:
        """Compares every gradient with the exact one."""
        for name, param in self.model.named_parameters():
            grad, exact = param.grad, self.reference.gradients.get(name)
            if exact is None or grad is None:
                self._check(grad is exact, name, grad, exact)
                continue
            expected = local_part(exact / WORLD_SIZE, param)
            bound = self.reference.bound(name, param)
            excess = (wide(grad.to_local()) - expected).abs() - local_part(bound, param)
            # A NaN is not below the bound
            is_close = bool((excess <= 0).all()) and grad.dtype == param.dtype
            self._check(is_close, name, grad, expected)

    def check_params(self) -> None:
        expected = dict(self.reference.model.named_parameters())
        actual = dict(self.model.named_parameters())
        self.test.assertEqual(list(actual), list(expected))
        for name, param in actual.items():
            full, local = expected[name], param.to_local()
            same = (param.dtype, param.requires_grad) == (
                full.dtype,
                full.requires_grad,
            )
            part = local_part(full.detach(), param)
            self._check(same and torch.equal(local, part), name, param, full)

    def _check(self, is_right: bool, name: str, actual: Any, expected: Any) -> None:
        if not is_right:  # tensors take long to print
            self.test.fail(f"{name}: got {actual}, expected {expected}")

    def step(self) -> None:
        """Checks the gradients, steps both and checks the parameters."""
        self.check_gradients()
        params = dict(self.model.named_parameters())
        grads = {n: p.grad for n, p in params.items() if p.grad is not None}
        full = full_tensors(grads)
        for name, param in self.reference.model.named_parameters():
            param.grad = full.get(name)
        for optimizer in (self.optimizer, self.reference.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.reference.forget()
        self.check_params()

    def train(self, *, steps: int = 2) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def accumulate(self, microbatches: int) -> None:
        """Syncs after the last microbatch only."""
        for i in range(microbatches):
            is_last = i == microbatches - 1
            self.model.set_requires_gradient_sync(is_last)
            self.reference.reduces = is_last
            self.backward()
