"""Schedules of ``fully_shard`` that tests of streams record, by :data:`KINDS`."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from fsdp_helpers.common.comms import BF16, FP16, FP32, FP64, GivenGrads, mesh_of
from fsdp_helpers.common.doubles import OneBuffer
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.utils import CastLinear, MixedBlock
from fsdp_helpers.late_device.devices import Recording
from fsdp_helpers.late_device.record import Rank
from fsdp_helpers.late_device.record import record as record_program

import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, share_comm_ctx
from torch.distributed.fsdp._fully_shard import _fsdp_context, _fsdp_layout
from torch.distributed.tensor import Shard


RANKS = 4
DIM = 16  # divides by the ranks, for Shard(1)


# Models #


@dataclass(frozen=True)
class Kind:
    """How a schedule makes its units."""

    is_mixed: bool
    shard_dim: int = 0
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    # Up to this size, reductions of several units are joined
    bucket_cap_mb: float | None = None
    # From which size on parameters are gathered and reduced without copies
    direct_min_nbytes: int | None = None
    min_piece_nbytes: int = 2**15


KINDS = {
    "uniform": Kind(False),
    "uniform, cast": Kind(False, policy=MixedPrecisionPolicy(reduce_dtype=BF16)),
    "mixed": Kind(True),
    "mixed, Shard(1)": Kind(True, shard_dim=1),
    "mixed, cast": Kind(True, policy=MixedPrecisionPolicy(BF16, FP32)),
    # The first and the last bucket are sent by one all-to-all, the second is not
    "mixed, exchanged": Kind(
        True,
        policy=MixedPrecisionPolicy(
            FP32,
            reduce_dtype_override_fn=lambda param: FP32 if param.ndim == 2 else FP64,
            grad_comm_dtype_override_fn=lambda param: (
                None if param.dtype is FP16 else FP32 if param.ndim == 1 else BF16
            ),
        ),
    ),
    "mixed, joined": Kind(True, bucket_cap_mb=2 / 2**10),
    # Matrices alone
    "mixed, direct": Kind(True, direct_min_nbytes=128),
    "mixed, pieces": Kind(True, shard_dim=1, min_piece_nbytes=0),
    "mixed, direct pieces": Kind(
        True, shard_dim=1, direct_min_nbytes=128, min_piece_nbytes=0
    ),
}


class Net(nn.Module):
    """Three units and a root with parameters of its own, all of several dtypes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock(DIM, DIM // 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = CastLinear(DIM, DIM, dtype=torch.bfloat16)
        self.blocks_to_run = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks[: self.blocks_to_run]:
            x = block(x)
        return self.head(x).float()


@dataclass
class ScheduleKit:
    """A rank's tools to write a schedule with."""

    rank: Rank
    kind: Kind
    device: str = "cpu"
    meshes: dict[tuple[int, ...], DeviceMesh] = field(default_factory=dict)
    inputs: int = 0

    def mesh(self, *shape: int) -> DeviceMesh:
        if shape not in self.meshes:
            self.meshes[shape] = mesh_of(*shape, device=self.device)
        return self.meshes[shape]

    def net(self) -> Net:
        net = Net()
        return net if self.kind.is_mixed else net.float()

    def placement(self, param: nn.Parameter) -> Shard:
        return Shard(min(self.kind.shard_dim, param.ndim - 1))

    def shard(self, module: Any, *, api: Callable = fully_shard, **kwargs: Any) -> Any:
        kwargs.setdefault("mesh", self.mesh(RANKS))
        kwargs.setdefault("mp_policy", self.kind.policy)
        if api is fully_shard:
            kwargs.setdefault("shard_placement_fn", self.placement)
        unit = api(module, **kwargs)
        first = unit[0] if isinstance(unit, list) else unit
        if (cap := self.kind.bucket_cap_mb) is not None:
            fsdp.set_reduce_bucket_cap(first, cap, recurse=False)
        if (nbytes := self.kind.direct_min_nbytes) is not None:
            fsdp.set_coalesced_collectives(first, nbytes, recurse=False)
        return unit

    def sharded_net(self, **kwargs: Any) -> Net:
        net = self.net()
        for block in net.blocks:
            self.shard(block, **kwargs)
        return self.shard(net, **kwargs)

    def input(self) -> torch.Tensor:
        """Returns another one for each rank and each microbatch."""
        self.inputs += 1
        number = 1 + 0.25 * self.rank.number + 0.0625 * self.inputs
        return torch.ones(2, DIM) * number

    def loss(self, module: nn.Module) -> torch.Tensor:
        return module(self.input()).sum()

    def backward(self, module: nn.Module) -> None:
        self.loss(module).backward()

    def optimize(self, module: nn.Module) -> None:
        with torch.no_grad():
            for param in module.parameters():
                if param.grad is not None:
                    param._local_tensor.sub_(param.grad._local_tensor)
                    param.grad = None
        self.rank.end_step()

    def train(self, module: nn.Module, steps: int = 2) -> None:
        for _ in range(steps):
            self.backward(module)
            self.optimize(module)


# Schedules #

SCHEDULES: dict[str, Callable[[ScheduleKit], None]] = {}


def schedule(function: Callable[[ScheduleKit], None]) -> Callable[[ScheduleKit], None]:
    SCHEDULES[function.__name__] = function
    return function


@schedule
def implicit_prefetch(kit: ScheduleKit) -> None:
    """With evaluation between steps."""
    net = kit.sharded_net()
    for context in (torch.no_grad, torch.inference_mode):
        kit.train(net, steps=1)
        with context():
            kit.loss(net)
    kit.train(net, steps=1)


@schedule
def two_forwards_on_smaller_mesh(kit: ScheduleKit) -> None:
    """The second gathers from what the first resharded."""
    net = kit.sharded_net(reshard_after_forward=2)
    for _ in range(2):
        (kit.loss(net) + kit.loss(net)).backward()
        kit.optimize(net)


@schedule
def asynchronous_gathers(kit: ScheduleKit) -> None:
    """The last one is dropped, as the iteration is given up."""
    net = kit.sharded_net()
    net._set_unshard_async_op(True)
    net.blocks[0].set_modules_to_forward_prefetch([*net.blocks[1:]])
    kit.train(net)
    net.blocks[1].unshard(async_op=True)
    net.reset_iter_state()
    kit.optimize(net)
    with torch.no_grad():
        for param in net.parameters():
            param._local_tensor.zero_()
    kit.train(net, steps=1)


@schedule
def joined_from_several_streams(kit: ScheduleKit) -> None:
    """
    A pipeline ends units outside of backward, with zeros for what was not used: each in
    a stream of its own, and what they have set aside in another one.
    """
    net, handle = kit.sharded_net(), kit.rank.handle
    net.set_reduce_scatter_unused_params(True)
    fsdp.set_reduce_bucket_cap(net)
    state = net._get_fsdp_state()
    streams = [kit.rank.new_stream(f"side {i}") for i in range(4)]
    zeros = [*net.blocks[2].parameters()]
    for step in range(2):
        net.blocks_to_run = 3 - step
        net.set_is_last_backward(False)
        net.set_requires_gradient_sync(False)
        kit.backward(net)
        net.set_is_last_backward(True)
        net.set_requires_gradient_sync(True)
        units = reversed(state._state_ctx.all_states)
        for unit, stream in zip(units, streams, strict=True):
            stream.wait_stream(handle.current_stream())
            with handle.stream(stream):
                for group in unit._fsdp_param_groups:
                    group.post_backward()
        state._root_post_backward_final_callback()
        for stream in streams:
            with handle.stream(stream):  # it goes on, in memory that it has freed
                [torch.zeros(*param.size(), dtype=param.dtype) for param in zeros]
            handle.current_stream().wait_stream(stream)
        kit.optimize(net)


@schedule
def hsdp(kit: ScheduleKit) -> None:
    kit.train(kit.sharded_net(mesh=kit.mesh(2, 2)), steps=3)


@schedule
def hsdp_without_room(kit: ScheduleKit) -> None:
    """Reduced buffers that gradients do not view are not held for later units."""
    with mock.patch.object(_fsdp_context, "_MAX_HELD_NBYTES", 0):
        for sizes in ((2, 2), (4, 1)):
            kit.train(kit.sharded_net(mesh=kit.mesh(*sizes)), steps=3)


@schedule
def hsdp_deferred_other_parameters(kit: ScheduleKit) -> None:
    dtypes = (FP32, BF16, FP16)
    params = {
        f"{name}{i}": torch.ones(DIM, dtype=dtype if kit.kind.is_mixed else dtypes[0])
        for name in "pq"
        for i, dtype in enumerate(dtypes)
    }
    unit = kit.shard(GivenGrads(**params), mesh=kit.mesh(2, 2))
    # Its all-reduces, in buffers that no gradient views, are not deferred
    before = kit.net().blocks[0]
    share_comm_ctx([kit.shard(before, mesh=kit.mesh(2, 2)), unit])
    microbatches = ("p0", "p1"), ("p1", "q1", "p2"), ("q0", "q1", "q2")
    for _ in range(2):
        for i, chosen in enumerate(microbatches):
            unit.set_requires_all_reduce(i == 2)
            x = kit.input().requires_grad_()
            unit(before(x), **dict.fromkeys(chosen, 2.0)).sum().backward()
        kit.optimize(before)
        kit.optimize(unit)


@schedule
def one_rank(kit: ScheduleKit) -> None:
    kit.train(kit.sharded_net(mesh=kit.mesh(RANKS, 1)["shard"]), steps=3)


@schedule
def backwards_in_two_streams(kit: ScheduleKit) -> None:
    """The second goes on with buffers that the first has in another stream."""
    handle = kit.rank.handle
    side = kit.rank.new_stream("side")
    for mesh in (kit.mesh(RANKS), kit.mesh(2, 2)):
        net = kit.sharded_net(mesh=mesh)
        for _ in range(2):
            default = handle.current_stream()
            side.wait_stream(default)
            net.set_is_last_backward(False)
            with handle.stream(side):
                kit.backward(net)
                # Makes place for what the reductions still read
                kit.input()
            default.wait_stream(side)
            net.set_is_last_backward(True)
            kit.backward(net)
            with handle.stream(side):
                kit.input()
            kit.optimize(net)


@schedule
def forwards_in_two_streams(kit: ScheduleKit) -> None:
    """Neither waits for the other, and both gather the same units."""
    net = kit.sharded_net(reshard_after_forward=True)
    kit.train(net, steps=1)
    default, losses = kit.rank.handle.current_stream(), []
    for name in ("first", "second"):
        stream, x = kit.rank.new_stream(name), kit.input()
        stream.wait_stream(default)
        with kit.rank.handle.stream(stream):
            losses.append((stream, net(x).sum()))
    for stream, _ in losses:
        default.wait_stream(stream)
    (losses[0][1] + losses[1][1]).backward()
    kit.optimize(net)


class Doubled(torch.autograd.Function):
    """Its backward works in the memory that it is given, as fused kernels' do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(2)


class Offsets(nn.Module):
    """The gradient of its parameter is a view of its output's: the batch is 1."""

    def __init__(self):
        super().__init__()
        self.offsets = nn.Parameter(torch.ones(2 * DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(1, -1) + self.offsets.unsqueeze(0)).tanh()


@schedule
def gradient_is_an_activation_s(kit: ScheduleKit) -> None:
    before, after = kit.shard(kit.net().blocks[0]), kit.shard(Offsets())
    share_comm_ctx([before, after])
    for _ in range(2):
        x = kit.input().requires_grad_()
        after(Doubled.apply(before(x))).sum().backward()
        kit.optimize(before)
        kit.optimize(after)


def finalized_in_its_own_stream(kit: ScheduleKit) -> None:
    """Between, one microbatch reduces at once. What is left is copied in there."""
    handle, side = kit.rank.handle, kit.rank.new_stream("finalization")
    for mesh in (kit.mesh(RANKS), kit.mesh(2, 2)):
        net = kit.sharded_net(mesh=mesh)
        net.set_manual_backward_finalization(True)
        for microbatches in (2, 1, 2):
            net.set_requires_gradient_sync(microbatches == 1)
            for _ in range(microbatches):
                kit.backward(net)
            net.set_requires_gradient_sync(True)
            default = handle.current_stream()
            side.wait_stream(default)
            with handle.stream(side):
                reduction = net.finalize_backward(async_op=True)
            default.wait_stream(side)
            reduction.wait()
            with handle.stream(side):
                kit.input()
            kit.optimize(net)


if IS_2_15:  # since 2.15
    schedule(finalized_in_its_own_stream)


# On the host and in hooks #


@schedule
def offload_pinned(kit: ScheduleKit) -> None:
    """At last, a second backward adds to what the first has brought to the host."""
    for mesh in (kit.mesh(RANKS), kit.mesh(2, 2)):
        net = kit.sharded_net(offload_policy=fsdp.CPUOffloadPolicy(), mesh=mesh)
        kit.rank.put_on_host(param._local_tensor for param in net.parameters())
        kit.train(net, steps=1)
        kit.backward(net)
        kit.backward(net)
        kit.optimize(net)


class Parts(nn.Module):
    """Two of its modules are one unit, of which ``forward`` runs only the first."""

    def __init__(self):
        super().__init__()
        self.before = MixedBlock(DIM, DIM // 2)
        self.first, self.second = (MixedBlock(DIM, DIM // 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.before(x))


@schedule
def part_of_a_unit_after_the_root(kit: ScheduleKit) -> None:
    """A loss in chunks: the unit reduces after each, and again after its first part."""
    for mesh in (kit.mesh(RANKS), kit.mesh(2, 2), kit.mesh(RANKS, 1)["shard"]):
        model = Parts() if kit.kind.is_mixed else Parts().float()
        kit.shard(model.before, mesh=mesh)
        kit.shard([model.first, model.second], mesh=mesh)
        kit.shard(model, mesh=mesh)
        for _ in range(2):
            model.set_is_last_backward(False)
            hidden = model(kit.input())
            detached = hidden.detach().requires_grad_()
            for chunk in detached.chunk(2):
                model.second(chunk).sum().backward()
            model.set_is_last_backward(True)
            (model.second(hidden).sum() + (hidden * detached.grad).sum()).backward()
            kit.optimize(model)


@schedule
def all_reduce_hook(kit: ScheduleKit) -> None:
    net = kit.sharded_net()
    for module in (*net.blocks, net):
        stream = kit.rank.new_stream("hook")
        module.set_all_reduce_hook(lambda grad: grad.mul_(2), stream=stream)
    kit.train(net)


@schedule
def pooled_reduce_input(kit: ScheduleKit) -> None:
    net = kit.sharded_net()
    comm = OneBuffer()
    for module in (*net.blocks, net):
        module.set_custom_reduce_scatter(comm)
    kit.train(net)


@schedule
def reduction_given_up(kit: ScheduleKit) -> None:
    """In its first bucket, and in the one after that if there are several."""
    for mesh in (kit.mesh(RANKS), kit.mesh(2, 2)):
        for at in (1, 2):
            net = kit.sharded_net(mesh=mesh)
            kit.train(net, steps=1)
            calls = itertools.count(1)

            def interrupt(_: Any, calls: Any = calls, at: int = at) -> None:
                if next(calls) == at:
                    raise ArithmeticError("as meant")

            net.blocks[1].set_all_reduce_hook(interrupt)
            with contextlib.suppress(ArithmeticError):
                kit.backward(net)
            gc.collect()  # what the error holds
            net.blocks[1].set_all_reduce_hook(lambda _: None)
            net.reset_iter_state()
            kit.optimize(net)
            kit.train(net, steps=1)


# Recording them #


def record(
    schedule: str | Callable[[ScheduleKit], None], kind: str, **options: Any
) -> Recording:
    """Records a schedule, or the one of that name. Options are the recorder's."""
    run = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    min_nbytes = KINDS[kind].min_piece_nbytes
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object(_fsdp_layout, "_MIN_PIECE_NBYTES", min_nbytes)
        stack.enter_context(patch)
        if "pinned" in run.__name__:  # all memory is, without a device to pin it for
            pinned = {"pin_memory": lambda self: self, "is_pinned": lambda self: True}
            stack.enter_context(mock.patch.multiple(torch.Tensor, **pinned))
        return record_program(
            lambda rank: run(ScheduleKit(rank, KINDS[kind])), RANKS, **options
        )
