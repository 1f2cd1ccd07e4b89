"""
How long a step would take on a device whose host is always ahead, by simulated clocks.

[Note: Simulated clocks]
The real code runs on a CPU, as one of 8 ranks of a fake group. Each stream has a clock, in
microseconds. Collectives, copies between parameters, gradients and buffers, and the compute
of each block move the clock of the stream that issues them; waits and events order the
streams as on a device. Rates are those of one H200, with a link of 200 GB/s, and 50 GB/s
between replicas. Tensors are small, and each of their bytes counts ``SCALE`` times. So the
figures are the same in every run, on any machine.

``measure`` must come before anything else imports FSDP, which then gets these streams.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from _calls import Call, seen_by
from _picture import draw
from _ratios import Row
from _sides import Side

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import device_mesh
from torch.distributed.tensor import Shard


SCALE = 3400.0
LATENCY, LAUNCH = 25.0, 5.0  # us
LINK, LINK_OF_REPLICAS = 200e3, 50e3  # bytes / us
# Name of each copy, and the bytes / us that it reads and writes
COPIES = {
    "cat": ("copy-in", 2.0e6),
    "_foreach_copy_": ("copy-in", 2.3e6),
    "split_with_sizes_copy": ("copy-out", 3.3e6),
    "_chunk_cat": ("reduce copy-in", 2.9e6),
}
COPY_RATE, MIN_COPY_NBYTES = 3.2e6, 1e6
CAST_RATE = 2.0e6  # of `_chunk_cat` that casts
COMPUTE = "compute"
DIRECT = "set_coalesced_collectives"


class Stream:
    count = 0

    def __init__(self, priority: int = 0, name: str = ""):
        Stream.count += 1
        self.clock, self.name = 0.0, name or f"stream {Stream.count}"
        self.stream_id = self.device_index = self.device_type = 0

    def wait_event(self, event: "Event") -> None:
        self.clock = max(self.clock, event.time)

    def wait_stream(self, other: "Stream") -> None:
        self.clock = max(self.clock, other.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.time = self.clock
        return event


class Event:
    time = 0.0

    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, stream: Stream | None = None) -> None:
        (stream or Handle.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Handle.current).wait_event(self)

    def synchronize(self) -> None: ...


class Handle:
    """Stands for ``torch.cuda`` in FSDP."""

    Stream, Event = Stream, Event
    current = Stream(name=COMPUTE)
    # This step's: stream, what it did, from when to when, bytes that it sent
    spans: list[tuple[str, str, float, float, float]] = []

    @classmethod
    def current_stream(cls, *unused: Any) -> Stream:
        return cls.current

    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    is_initialized = is_available = staticmethod(lambda: True)
    set_device = synchronize = staticmethod(lambda device=None: None)

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream: Stream) -> Iterator[None]:
        before, cls.current = cls.current, stream
        try:
            yield
        finally:
            cls.current = before

    @classmethod
    def spend(cls, what: str, us: float, sent_nbytes: float = 0.0) -> None:
        stream, begun = cls.current, cls.current.clock
        stream.clock += us
        cls.spans.append((stream.name, what, begun, stream.clock, sent_nbytes))


def scaled_nbytes(tensors: Tensor | Iterable[Tensor]) -> float:
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    return SCALE * sum(tensor.nbytes for tensor in tensors)


def spend_collective(call: Call) -> None:
    link = LINK if call.stride == 1 else LINK_OF_REPLICAS
    nbytes = SCALE * call.sent_nbytes
    Handle.spend(call.kind, LATENCY + nbytes / link, nbytes)


def counting(function: Callable, spend: Callable[..., None]) -> Callable:
    """Returns a function that spends time too, unless what it calls has done so."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = Handle.current.clock
        result = function(*args, **kwargs)
        if Handle.current.clock == before:
            spend(*args, **kwargs)
        return result

    # Of an operator, which is asked for it where tensors are fake
    call.default = getattr(function, "default", None)  # type: ignore[attr-defined]
    return call


def spend_copy(what: str, rate: float, tensors: Any, *args: Any, **kwargs: Any) -> None:
    Handle.spend(what, LAUNCH + 2 * scaled_nbytes(tensors) / rate)


def spend_mixed_copy(tensors: list[Tensor], *args: Any, out: Tensor, **kw: Any) -> None:
    what, rate = COPIES["_chunk_cat"]
    nbytes = scaled_nbytes(tensors) + scaled_nbytes(out)
    is_cast = any(tensor.dtype != out.dtype for tensor in tensors)
    Handle.spend(what, LAUNCH + nbytes / (CAST_RATE if is_cast else rate))


def spend_plain_copy(target: Tensor, *args: Any, **kwargs: Any) -> None:
    if scaled_nbytes(target) > MIN_COPY_NBYTES:
        spend_copy("copies", COPY_RATE, target)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Has FSDP's collectives and copies spend time."""
    with contextlib.ExitStack() as stack:

        def count(owner: Any, name: str, spend: Callable[..., None]) -> None:
            if (function := getattr(owner, name, None)) is not None:
                patch = mock.patch.object(owner, name, counting(function, spend))
                stack.enter_context(patch)

        for name, how in COPIES.items():
            count(torch, name, functools.partial(spend_copy, *how))
        count(torch.ops.fsdp, "chunk_cat_mixed_dtype", spend_mixed_copy)
        count(Tensor, "copy_", spend_plain_copy)
        stack.enter_context(seen_by(spend_collective))
        yield


class Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, us: float) -> Tensor:
        ctx.us = us
        Handle.spend(COMPUTE, us)
        return x.clone()

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Handle.spend(COMPUTE, 2 * ctx.us)
        return grad, None


class Block(nn.Module):
    """Eight matrices in fp16, and a vector in another dtype if the block is mixed."""

    def __init__(self, us: float = 1700.0, rows: int = 64, mixed: bool = False):
        super().__init__()
        self.us = us
        matrices = (torch.randn(rows, 128).half() for _ in range(8))
        self.matrices = nn.ParameterList(map(nn.Parameter, matrices))
        self.norm = nn.LayerNorm(16, bias=False)
        self.norm.to(torch.float32 if mixed else torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        used = sum(matrix.float().sum() for matrix in self.matrices)
        gain = self.norm(x.to(self.norm.weight.dtype)).float()
        return Compute.apply(x + 1e-6 * used + 1e-6 * gain, self.us)


class ExpertsBlock(Block):
    """The matrices are those of experts, in one parameter, and the router's in fp32."""

    def __init__(self, us: float = 1700.0):
        super().__init__(us, mixed=True)
        self.matrices = nn.ParameterList([nn.Parameter(torch.stack([*self.matrices]))])


def with_head() -> list[Block]:
    return [*(Block(us=900.0, rows=8) for _ in range(14)), Block(us=900.0, rows=128)]


CASES: dict[str, Callable[[], list[Block]]] = {
    "compute-bound": lambda: [Block() for _ in range(6)],
    "link-bound": lambda: [Block(us=600.0) for _ in range(6)],
    "mixed": lambda: [Block(mixed=True) for _ in range(6)],
    "experts on dim 1": lambda: [ExpertsBlock() for _ in range(6)],
    "HSDP, large head": with_head,
    "replicate, large head": with_head,
}


def shard(model: nn.Sequential, case: str, *, per_dtype: bool) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    names, ranks = ("replicate", "shard"), dist.get_world_size()
    mesh = device_mesh.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
    if not case.startswith("HSDP"):
        mesh = device_mesh.init_device_mesh("cpu", (ranks,))
    make_unit: Any = replicate if case.startswith("replicate") else fully_shard
    options: dict[str, Any] = {"mesh": mesh}
    if is_experts := case.startswith("experts"):
        options["shard_placement_fn"] = lambda param: Shard(int(param.ndim == 3))
    for block in model:
        if per_dtype and (is_experts or case == "mixed"):
            make_unit(block.norm, mesh=mesh)
        make_unit(block, **options)
    make_unit(model, mesh=mesh)


def use_simulated_streams() -> None:
    if not hasattr(device_mesh._get_device_handle, "is_simulated"):
        if "torch.distributed.fsdp._fully_shard" in sys.modules:
            raise RuntimeError("FSDP has been imported, with other streams")

        def get_handle(device_type: str = "cuda") -> Any:
            return Handle

        get_handle.is_simulated = True  # type: ignore[attr-defined]
        device_mesh._get_device_handle = get_handle  # type: ignore[assignment]


def measure(*, device: str, case: str, per_dtype: bool, coalesced: bool) -> dict:
    """Returns the simulated milliseconds of a step, and when each stream did what."""
    use_simulated_streams()
    import torch.distributed.fsdp as fsdp

    if hasattr(fsdp, "layout_summary"):  # the branch
        from torch.distributed.fsdp._fully_shard import _fsdp_layout

        _fsdp_layout._MIN_PIECE_NBYTES = int(2**15 / SCALE)
    torch.manual_seed(0)
    model = nn.Sequential(*CASES[case]())
    shard(model, case, per_dtype=per_dtype)
    if coalesced:
        fsdp.set_coalesced_collectives(model, 0)
    begun = 0.0
    with simulated():
        for _ in range(3):
            begun = Handle.current.clock
            Handle.spans.clear()
            model(torch.ones(2, 16, requires_grad=True)).sum().backward()
            model.zero_grad()
    spans = [(s, what, b - begun, e - begun, n) for s, what, b, e, n in Handle.spans]
    return {"ms": (Handle.current.clock - begun) / 1e3, "spans": spans}


def run(sides: dict[str, Side], **options: Any) -> list[Row]:
    """Compares the branch with the release, and the branch without copies with itself."""
    rows = []
    for case in CASES:
        found = []
        for side, coalesced in (
            ("release", False),
            ("branch", False),
            ("branch", True),
        ):
            sides[side].start()
            request = {"case": case, "coalesced": coalesced}
            request["per_dtype"] = side == "release"
            found.append(sides[side].ask(__name__, request))
        release, branch, direct = (each["ms"] for each in found)
        # Half a percent: `cat` is charged at what it takes for small shards
        is_experts = case.startswith("experts")
        of_direct, default = f"{case}, {DIRECT}", "the default (by the branch)"
        bar, told = 0.93 if is_experts else 1.005, list[Any]()
        told += [(case, branch, "release", release, bar)]
        told += [(of_direct, direct, default, branch, 1.0)]
        told += [(of_direct, direct, "release", release, 0.88)] * is_experts
        for name, *row in told:
            rows.append(Row("timeline", name, "simulated ms / step", *row))
        if case == "mixed":
            titles = ("One unit for each dtype", "One mixed unit", f"… {DIRECT}")
            draw(dict(zip(titles, found, strict=True)))
    return rows
