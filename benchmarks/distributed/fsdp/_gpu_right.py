"""
Whether what the branch computes is right: bits beside the release's, and gradients
beside those of one process.

[Note: What is compared]
A case trains a tower of the tests on several ranks for three steps, by the branch and by
another way that gives the same bits: the release in the same units, the release with one
unit for each dtype, or the branch over another mesh. ``differs`` counts the tensors
(losses, sharded gradients, parameters) of which a bit differs on any rank.

``beyond_rounding`` needs no release: each rank also runs the batches of all ranks through
the unsharded model, adds up the gradients in fp64, and counts the gradients of the first
step that are farther from that than rounding explains.
"""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from _gpu_part import Ask, BRANCH, Case, Figure, Found, on_both, Part, RELEASE, Where
from _gpu_ranks import as_threads, stage_what_gloo_lacks, threads_run_twice

from fsdp_common.release_rules import reduce_dtype
from fsdp_features.models import extended_stack, HighLow
from fsdp_mixed_dtype import parity
from fsdp_mixed_dtype.models import BF16, FP16, FP32, MIXED, Tower
from fsdp_mixed_dtype.parity import Batches, Mode

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import distribute_tensor


RANKS = 4
# What other kernels, chosen by alignment, may add to the roundings of one process
DEVICE_ROUNDINGS = 16


# What is set, which the release does not have #


def shard_sending(
    model: nn.Module, mp_policy: Any, *, dtype: torch.dtype, **kwargs: Any
) -> None:
    policy = replace(mp_policy, grad_comm_dtype=dtype)
    parity.shard_blocks(model, mp_policy=policy, **kwargs)


def gather_after_backward(model: nn.Module) -> None:
    from torch.distributed.fsdp import set_backward_prefetch

    set_backward_prefetch(model, BackwardPrefetch.BACKWARD_POST)


def join_small_reductions(model: nn.Module) -> None:
    from torch.distributed.fsdp import set_reduce_bucket_cap

    set_reduce_bucket_cap(model)


def allocate_from_group(model: nn.Module) -> None:
    for unit in parity.units_of(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)


def use_symmetric_memory(model: nn.Module) -> None:
    for unit in parity.units_of(model):
        unit.set_symm_mem_for_comm()


def shard_children(model: nn.Sequential, units: str, **kwargs: Any) -> None:
    for block in model.children():
        for module in block.children() if units == "dtype" else (block,):
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)


# Cases #

PER_DTYPE = "one unit per dtype"


@dataclass(frozen=True)
class Trained:
    """What a case trains."""

    mode: Mode
    dtypes: tuple[tuple[torch.dtype, ...], ...] = MIXED
    ranks: int = RANKS  # of a mesh
    extends: bool = False  # has extension tensors
    # Another way of the branch that gives the same bits; else it is the release
    other: Mode | None = None
    backends: tuple[str, ...] = ("threaded", "gloo", "nccl")


def _offload(is_pinned: bool) -> Mode:
    return Mode(kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=is_pinned)})


UNIFORM = ((FP32, FP32, FP32),) * 2
NARROW = Mode(policy=(BF16, FP32), shard=partial(shard_sending, dtype=BF16))
# In fp32 most sums of a few bf16 values are exact, in whatever order they are added
WIDE = Mode(policy=(None, FP32), shard=partial(shard_sending, dtype=FP32))
CASES: dict[str, Trained] = {
    "uniform": Trained(Mode(), UNIFORM),
    "uniform_bf16_compute": Trained(Mode(policy=(BF16, FP32)), UNIFORM),
    "mixed": Trained(Mode()),
    # Buckets of several units lie otherwise in a buffer: a sum of two is any way the same
    "mixed_reduced_in_fp32": Trained(Mode(policy=(None, FP32)), ranks=2),
    "mixed_bf16_compute": Trained(Mode(policy=(BF16, FP32)), ranks=2),
    "no_reshard": Trained(Mode(kwargs={"reshard_after_forward": False})),
    "hsdp": Trained(Mode(is_hybrid=True)),
    "accumulation": Trained(Mode(step=parity.accumulate)),
    "deferred_all_reduce": Trained(Mode(step=parity.defer_all_reduce, is_hybrid=True)),
    "offload": Trained(_offload(False)),
    "offload_pinned": Trained(_offload(True)),
    "extensions": Trained(Mode(), extends=True),
    "shard_1": Trained(Mode(kwargs={"shard_placement_fn": parity.shard_last_dim})),
    "grad_comm_dtype": Trained(NARROW, other=replace(NARROW, is_hybrid=True)),
    "grad_comm_dtype_fp32": Trained(WIDE, other=replace(WIDE, is_hybrid=True)),
    "backward_post": Trained(Mode(prepare=gather_after_backward)),
    "small_reductions": Trained(Mode(prepare=join_small_reductions), ranks=2),
    "group_memory": Trained(Mode(prepare=allocate_from_group), backends=("nccl",)),
    "symmetric_memory": Trained(Mode(prepare=use_symmetric_memory), backends=("nccl",)),
}


SEED_LOCK = threading.Lock()  # of threads that draw from one generator


def tower(trained: Trained) -> nn.Module:
    """Returns the model, with the same values on every rank."""
    with SEED_LOCK:
        if trained.extends:
            return extended_stack(HighLow, 5, (BF16, FP16))
        stem, head = (BF16, FP32) if trained.dtypes is MIXED else (FP32, FP32)
        torch.manual_seed(0)
        # Of two uses autograd may round the sum in another dtype
        return Tower(trained.dtypes, stem=stem, head=head, is_tied=False)


def way_of(trained: Trained, way: str) -> Mode:
    """Returns the mode, for the branch or for what it is compared with."""
    mode = trained.mode
    if way == BRANCH or trained.dtypes is UNIFORM:
        units = "block"
    elif trained.other is not None:
        return trained.other
    else:
        units, mode = "dtype", replace(mode, prepare=None)
    if trained.extends:
        return replace(mode, shard=partial(shard_children, units=units))
    return replace(mode, shard=parity.shard_dtypes) if units == "dtype" else mode


# On each rank #


def meshes(device: str) -> dict[Any, DeviceMesh]:
    """Returns meshes by their number of ranks, and the hybrid one."""
    world_size = dist.get_world_size()
    shape = (2, world_size // 2)
    hybrid = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh(device, (world_size,))
    half = flat if world_size == 2 else hybrid["shard"]
    return {world_size: flat, RANKS: flat, 2: half, "hybrid": hybrid}


def train(trained: Trained, way: str, device: str, rank: int) -> dict[str, Any]:
    """Returns a digest of each tensor, and which gradients are beyond rounding."""
    mode = way_of(trained, way)
    mesh = meshes(device)["hybrid" if mode.is_hybrid else trained.ranks]
    mesh_rank = rank % mesh.size()
    record = parity.train(mode, tower(trained).to(device), mesh, mesh_rank, device)
    bits = {name: dtype.encode() + bits for name, (dtype, bits) in record.items()}
    if trained.other is not None:  # over another mesh are other shards of the same
        bits = whole(record, mesh)
    digests = {n: hashlib.sha256(b).hexdigest()[:12] for n, b in bits.items()}
    beyond = []
    if way == BRANCH and not trained.extends:
        exact = one_process(trained, device, mesh.size())
        beyond = [*beyond_rounding(trained, mesh, exact, record)]
    return {"digests": digests, "beyond": beyond}


def whole(record: parity.Record, mesh: DeviceMesh) -> dict[str, bytes]:
    """Returns the bits of sharded tensors, put together from all ranks' rows."""
    parts: list[parity.Record] = [{}] * mesh.size(-1)
    dist.all_gather_object(parts, record, group=mesh.get_group(mesh.ndim - 1))
    names = [name for name in record if not name.endswith("loss")]
    return {name: b"".join(part[name][1] for part in parts) for name in names}


class Unsharded(nn.Module):
    """Does without what steps set on a sharded model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.model(x if self.dtype is None else x.to(self.dtype), **kwargs)

    def _ignore(self, *args: Any) -> None:
        return None

    set_requires_gradient_sync = set_requires_all_reduce = _ignore
    set_reshard_after_backward = set_is_last_backward = _ignore


def one_process(trained: Trained, device: str, ranks: int) -> dict[str, list[Tensor]]:
    """
    Returns by parameter the gradients of one step in fp64, one of each rank and
    microbatch, all as this process computes them.
    """
    compute, _ = trained.mode.policy
    model = Unsharded(tower(trained).to(device), compute)
    grads: dict[str, list[Tensor]] = {}
    for name, param in model.model.named_parameters():
        if param.requires_grad:
            found = grads.setdefault(name, [])
            param.register_hook(lambda grad, found=found: found.append(grad.double()))
    for rank in range(ranks):
        trained.mode.step(model, Batches(0, rank, device))  # type: ignore[arg-type]
    return grads


def beyond_rounding(
    trained: Trained,
    mesh: DeviceMesh,
    exact: dict[str, list[Tensor]],
    record: parity.Record,
) -> Iterator[str]:
    """Yields the gradients that are farther from exact ones than rounding explains."""
    policy = MixedPrecisionPolicy(*trained.mode.policy)
    params = dict(tower(trained).named_parameters())
    for name, grads in exact.items():
        stored, (dtype, bits) = params[name].dtype, record[f"step 0 gradient {name}"]
        placement = trained.mode.kwargs.get("shard_placement_fn", lambda _: None)
        expected, bound = _bounds(grads, reduce_dtype(policy, stored), stored, mesh)
        local = [
            _local(tensor, placement(params[name]), mesh)
            for tensor in (expected, bound)
        ]
        found = torch.empty(0)
        if bits:  # of no shard there are none
            found = torch.frombuffer(bytearray(bits), dtype=getattr(torch, dtype[6:]))
        excess = (found.double() - local[0]).abs() - local[1]
        # A NaN is not below the bound
        if dtype != str(stored) or not bool((excess <= 0).all()):
            yield name


def _bounds(
    grads: list[Tensor], reduced: torch.dtype, stored: torch.dtype, mesh: DeviceMesh
) -> tuple[Tensor, Tensor]:
    """
    Returns the exact gradient, and how far a reduced one may be from it: each addition
    rounds in ``reduced`` by at most half an eps of a sum of magnitudes, and so does each
    division; then there is one cast to ``stored``.
    """
    divisor = mesh.size()
    exact = torch.stack(grads).sum(0) / divisor
    magnitude = torch.stack(grads).abs().sum(0) / divisor
    roundings = len(grads) + 3 + (DEVICE_ROUNDINGS if exact.is_cuda else 0)
    info = torch.finfo(reduced)
    bound = (
        roundings * info.eps / 2 * magnitude
        + torch.finfo(stored).eps * exact.abs()
        + roundings * info.smallest_normal * info.eps
    )
    return exact, bound


def _local(full: Tensor, placement: Any, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard

    placements = [Replicate()] * (mesh.ndim - 1) + [placement or Shard(0)]
    local = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return local.reshape(-1).cpu()


def measure(*, device: str, case: str, way: str, backend: str) -> dict[str, Any]:
    """Trains a case on all ranks, and joins what they found."""
    trained = CASES[case]
    staged: list[str] = []
    if backend == "threaded":
        run = partial(train, trained, way, device)
        found = as_threads(RANKS, device, lambda rank: run(rank))
    else:
        if backend == "gloo" and device == "cuda":
            staged = stage_what_gloo_lacks()
        found = [{}] * dist.get_world_size()
        own = train(trained, way, device, dist.get_rank())
        dist.all_gather_object(found, own)
    names = found[0]["digests"]
    return {
        "digests": {name: [each["digests"][name] for each in found] for name in names},
        "beyond": sorted({name for each in found for name in each["beyond"]}),
        "staged": staged,
    }


# What is compared #


def figures_of(trained: Trained, found: Found) -> list[Figure]:
    branch = found[BRANCH]
    staged = f"; over the host: {', '.join(branch['staged'])}" * bool(branch["staged"])
    figures = []
    if not trained.extends:
        beyond = branch["beyond"]
        detail = ": ".join([f"beside one process{staged}", *beyond[:1]])
        figures.append(Figure("beyond_rounding", len(beyond), detail))
    for who, other in found.items():
        if who != BRANCH:
            figures.append(_differing(branch["digests"], who, other["digests"]))
    return figures


def _differing(digests: dict[str, Any], who: str, others: dict[str, Any]) -> Figure:
    names = digests.keys() | others.keys()
    differ = sorted(n for n in names if digests.get(n) != others.get(n))
    detail = f"of {len(names)} tensors, beside {who}"
    return Figure("differs", len(differ), ": ".join([detail, *differ[:1]]))


def _asks(name: str, trained: Trained, backend: str) -> dict[str, Ask]:
    request = {"case": name, "way": BRANCH, "backend": backend}
    if trained.other is not None:
        another = Ask(BRANCH, request | {"way": "another mesh"})
        return {BRANCH: Ask(BRANCH, request), "another mesh": another}
    return on_both(request, way=RELEASE)


def part(where: Where, backend: str) -> Part:
    """Returns all cases, over ranks as threads, or processes with gloo or NCCL."""
    ranks = RANKS if backend != "nccl" or where.devices >= RANKS else 2
    cases = []
    for name, trained in CASES.items():
        if backend not in trained.backends:
            continue
        reason = ""
        if name == "offload_pinned" and not where.is_cuda:
            reason = "pinned memory needs CUDA"
        if backend == "nccl" and where.devices < 2:
            reason = "needs two CUDA devices or more"
        asks = _asks(name, trained, backend)
        cases.append(Case(name, asks, partial(figures_of, trained), reason))
    how = {"threaded": "threads", "gloo": "processes", "nccl": "nccl"}[backend]
    options: dict[str, Any] = {"backend": backend, "world_size": ranks}
    if backend == "nccl":
        checks = ("TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_ENABLE_MONITORING")
        options["env"] = dict.fromkeys(checks, "1")
    about = (
        f"Bits and gradients of {ranks} ranks as {how}, beside the release's and "
        "those of one process."
    )
    return Part(
        f"right_{how}",
        about,
        "right",
        cases,
        seconds=120,
        starts_anew=backend == "threaded" and not threads_run_twice(),
        side=options,
    )
