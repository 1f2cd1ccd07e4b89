"""
What the tests of ``fully_shard`` share: base classes of tests with ranks in processes
(under torchrun the launched ones), in threads and none, a recorder of collectives,
small models of several dtypes, and a way to run Python on the release.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdp_helpers.common.parity_layers import seeded

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiThreadedTestCase,
)
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore


# Where the tests run #

_IS_LAUNCHED = dist.is_torchelastic_launched()
# None unless torchrun launched this process
LAUNCHED_RANK = int(os.environ["RANK"]) if _IS_LAUNCHED else None
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if _IS_LAUNCHED else 4


def _device_type(ranks: int) -> str:
    """Returns the accelerator's type, if each rank can have one, or share one of CUDA."""
    accelerator = torch.accelerator.current_accelerator()
    devices = torch.accelerator.device_count()
    if accelerator is None or devices == 0:  # a build for CUDA without a device
        return "cpu"
    shares = accelerator.type == "cuda"
    return accelerator.type if shares or devices >= ranks else "cpu"


# Where each rank is a process
DEVICE_TYPE = _device_type(WORLD_SIZE)
BACKEND = dist.get_default_backend_for_device(DEVICE_TYPE)
# Where ranks are threads, which share one device
THREAD_DEVICE_TYPE = _device_type(1)

# Work that needs no other process is done once, by the first that is launched
on_first_rank = unittest.skipIf(
    LAUNCHED_RANK not in (None, 0), "needs no process but the first"
)

# Where the tests lie, and the packages that they share
TESTS = Path(__file__).absolute().parents[2]
REPO_ROOT = TESTS.parents[3]
# Where torch is. Set-up keeps the release, unmodified, beside the tree of links
TREE_ROOT = Path(torch.__file__).absolute().parents[1]
RELEASE_ROOT = TREE_ROOT.parent / "base"
# Torch's files are compiled once, and not by each process that imports them. Apart
# from them: the release stays as it came.
BYTECODE_CACHE = {
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(REPO_ROOT / "build" / "pycache"),
}


def run_python(
    *args: str,
    on_release: bool = False,
    env: dict[str, str] | None = None,
    timeout: float = 1200,
) -> str:
    """Returns what Python prints, run with ``args``, on the branch or the release."""
    if on_release and not RELEASE_ROOT.is_dir():
        raise unittest.SkipTest("needs the release beside the branch")
    root = RELEASE_ROOT if on_release else TREE_ROOT
    done = subprocess.run(
        [sys.executable, *args],
        env=environment(root) | (env or {}),
        cwd=root,  # the interpreter looks for modules there before anywhere else
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise AssertionError(f"Exit status {done.returncode}:\n{done.stderr}")
    return done.stdout


def environment(root: Path) -> dict[str, str]:
    """Returns the variables of an interpreter that has ``torch`` from ``root``."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "MASTER_", "LOCAL_", "PYTHON"))
        and name not in ("RANK", "WORLD_SIZE", "GROUP_RANK")
    }
    path = os.pathsep.join(map(str, (root, TESTS)))
    defaults = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **BYTECODE_CACHE}
    return inherited | defaults


# Recording collectives #


@dataclass(frozen=True)
class Collective:
    """A collective as one rank issued it."""

    name: str  # "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
    dtype: torch.dtype
    # The larger buffer's: a gather's output, a reduce-scatter's input
    numel: int
    op: str | None  # "SUM", "AVG" or "PREMUL_SUM"; None for a gather
    group_size: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def nbytes_per_rank(self) -> int:
        return self.nbytes // self.group_size


@dataclass(eq=False)
class CollectiveRecorder:
    """The collectives of one rank, in the order in which it issued them."""

    calls: list[Collective] = field(default_factory=list)

    def named(self, name: str) -> list[Collective]:
        return [call for call in self.calls if call.name == name]

    all_gathers = property(lambda self: self.named("all_gather"))
    reduce_scatters = property(lambda self: self.named("reduce_scatter"))
    all_reduces = property(lambda self: self.named("all_reduce"))


# Function of `torch.distributed` to the names of its input and its output
COLLECTIVES = {
    "all_gather_single": ("input_tensor", "output_tensor"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "reduce_scatter_single": ("input", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "all_reduce": ("tensor", "tensor"),
    "all_to_all_single": ("input", "output"),
}
_recording_lock = threading.Lock()
# By rank: each records what it issues itself, where ranks are threads as well. Backward
# may run in a thread of autograd's, but only where a process is one rank.
_recorders: defaultdict[int, list[CollectiveRecorder]] = defaultdict(list)
_originals: dict[str, Callable[..., Any]] = {}


def op_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    """Returns the name of an operation, of a scaled sum as of a plain one."""
    return getattr(op, "op", op).name


def _record(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    kind = re.sub("_(single|into_tensor|tensor)$", "", name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        group = arguments["group"]
        size = dist.get_world_size() if group is None else group.size()
        buffers = [arguments[each] for each in COLLECTIVES[name]]
        buffer = max(buffers, key=torch.Tensor.numel)
        op = op_name(arguments["op"]) if "op" in arguments else None
        entry = Collective(kind, buffer.dtype, buffer.numel(), op, size)
        with _recording_lock:
            for recorder in _recorders[dist.get_rank()]:
                recorder.calls.append(entry)
        return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveRecorder]:
    """Records what this rank, a process or a thread, issues inside the context."""
    recorder, rank = CollectiveRecorder(), dist.get_rank()
    with _recording_lock:
        if not any(_recorders.values()):
            for name in COLLECTIVES:
                _originals[name] = getattr(dist, name)
                setattr(dist, name, _record(name, _originals[name]))
        _recorders[rank].append(recorder)
    try:
        yield recorder
    finally:
        with _recording_lock:
            _recorders[rank].remove(recorder)
            if not any(_recorders.values()):
                for name, original in _originals.items():
                    setattr(dist, name, original)


# Models #


class CastLinear(nn.Linear):
    """Computes in its weight's dtype, whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class MixedBlock(nn.Module):
    """Siblings of three dtypes, also of one element. No size divides by 2 or 4."""

    def __init__(self, dim: int = 9, hidden: int = 7):
        super().__init__()
        self.up = CastLinear(dim, hidden, bias=False, dtype=torch.bfloat16)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(dim))
        self.decay = nn.Parameter(torch.tensor([0.5]))
        self.down = CastLinear(hidden, dim, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain, decay = self.gain, self.decay
        normed = F.layer_norm(x.to(gain.dtype), (x.size(-1),), gain)
        hidden = torch.tanh(self.up(normed).to(decay.dtype) * decay)
        return x + self.down(hidden).to(x.dtype)


def mixed_model(blocks: int = 2, *, dim: int = 9, seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(*(MixedBlock(dim) for _ in range(blocks)))


def linear_stack(dtypes: Sequence[torch.dtype]) -> nn.Sequential:
    """Returns square linear layers of these dtypes."""
    with seeded():
        return nn.Sequential(*(CastLinear(9, 9, dtype=dtype) for dtype in dtypes))


def random_input(
    *size: int, seed: int, dtype: torch.dtype = torch.float32, device: str | None = None
) -> torch.Tensor:
    """Returns what depends on ``seed`` alone, in a thread of many as well."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return values.to(device or DEVICE_TYPE, dtype)


def shard_blocks(model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    """Makes each child a unit, and the root of them one."""
    for block in model:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


# Ranks #


@functools.cache
def shard_mesh(size: int = WORLD_SIZE) -> DeviceMesh:
    """Returns the mesh of all ranks, or of this one's part of ``size`` ranks."""
    return hybrid_mesh(size)["shard"]


@functools.cache
def hybrid_mesh(shard_size: int) -> DeviceMesh:
    """Returns the mesh of all ranks, to replicate over and to shard over."""
    if WORLD_SIZE % shard_size != 0:
        raise AssertionError(f"{WORLD_SIZE} ranks make no groups of {shard_size}")
    shape, names = (WORLD_SIZE // shard_size, shard_size), ("replicate", "shard")
    return init_device_mesh(DEVICE_TYPE, shape, mesh_dim_names=names)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """One empty folder for all ranks, the first's, until all are done with it."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class ParametrizedTest(TestCase):
    """Makes the tests of what ``parametrize`` says, without a decorator of the class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        common_utils.instantiate_parametrized_tests(cls)
        for test in filter(inspect.isfunction, vars(cls).values()):
            vars(test).pop("parametrize_fn", None)  # in classes that derive from it

    def assert_same(
        self, actual: torch.Tensor, expected: Any, what: Any = None
    ) -> None:
        """Checks dtypes and all bits, those of NaNs and zeros as well."""
        TestCase.assertEqual(self, actual, expected, what, rtol=0, atol=0)
        TestCase.assertEqual(self, as_bytes(actual), as_bytes(expected), what)


@on_first_rank
class DeviceFreeTest(ParametrizedTest):
    """Compares plain values: exactly, by type as well, and fast."""

    assertEqual = unittest.TestCase.assertEqual
    assertNotEqual = unittest.TestCase.assertNotEqual


class FakeGroupTest(DeviceFreeTest):
    """Is the first of ``ranks`` of which there are no others: nothing is sent."""

    ranks: int = 8

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cls.ranks)

    @classmethod
    def tearDownClass(cls) -> None:
        dist.destroy_process_group()
        super().tearDownClass()

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks, on the CPU whatever devices there are."""
        return init_device_mesh("cpu", (self.ranks,))


# What ranks would import in each process anew: the first hook of a unit asks for the
# compiler. Tests of clients add to it.
PRELOADED = ["torch._dynamo", "torch.testing._internal.common_fsdp"]


def fork_server() -> multiprocessing.context.BaseContext:
    """Has one process that has imported torch, for all ranks of all classes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class FSDPProcessTest(ParametrizedTest, MultiProcContinuousTest):
    """Each test runs in processes that live as long as the class: no ``setUp``."""

    world_size: int = WORLD_SIZE
    # Beside a busy file, a rank may come long after the others
    timeout = timedelta(seconds=300)

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    def assertRaisesRegex(self, *args: Any, **kwargs: Any) -> Any:
        # torch's own looks at no message if `device_type` is a method, as here
        return unittest.TestCase.assertRaisesRegex(self, *args, **kwargs)

    @classmethod
    def device_type(cls) -> str:
        return DEVICE_TYPE

    @property
    def device(self) -> torch.device:
        if DEVICE_TYPE == "cpu":
            return torch.device("cpu")
        return torch.device(DEVICE_TYPE, torch.accelerator.current_device_index())

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        if not torch.accelerator.is_available():  # which no fork could use
            multiprocessing.set_start_method("forkserver", force=True)
            fork_server()
        super()._spawn_processes(world_size)

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        _take_device(rank)
        super()._init_pg(rank, world_size, rdvz_file)

    # Under torchrun: this process is one of the ranks, and starts none
    def setUp(self) -> None:
        if LAUNCHED_RANK is None:
            super().setUp()
            return
        TestCase.setUp(self)
        if FSDPProcessTest.poison_pill:
            self.skipTest("an earlier test failed, other ranks may be out of step")
        _join_launched_group()
        self.rank = LAUNCHED_RANK
        common_utils.set_rng_seed()

    def _worker_run_main_wait(self, fn: Callable[[], None]) -> types.MethodType:
        if LAUNCHED_RANK is None:
            return super()._worker_run_main_wait(fn)

        @functools.wraps(fn)
        def run(self: FSDPProcessTest) -> None:
            try:
                fn()
            except unittest.SkipTest:
                raise
            except BaseException:
                FSDPProcessTest.poison_pill = True
                raise

        return types.MethodType(run, self)


def _take_device(local_rank: int) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    gc.freeze()  # and the memory of what was imported before they forked
    if DEVICE_TYPE != "cpu":
        devices = torch.accelerator.device_count()
        torch.accelerator.set_device_index(local_rank % devices)
        if devices < WORLD_SIZE:
            # NCCL takes ranks that share a device only for those of several hosts
            os.environ["NCCL_HOSTID"] = f"rank{local_rank}"


def _join_launched_group() -> None:
    if dist.is_initialized():
        return
    _take_device(int(os.environ["LOCAL_RANK"]))
    # The others may wait for what the first rank does alone
    dist.init_process_group(BACKEND, timeout=2 * FSDPProcessTest.timeout)
    atexit.register(_leave_launched_group)


def _leave_launched_group() -> None:
    # After a failure other ranks may never reach this
    if dist.is_initialized() and not FSDPProcessTest.poison_pill:
        dist.destroy_process_group()


@on_first_rank
class FSDPThreadTest(ParametrizedTest, MultiThreadedTestCase):
    """Ranks are threads, which share generators: a test patches nothing here."""

    world_size: int = 2

    def setUp(self) -> None:
        # Ranks that find the accelerator in use do not each take another one
        torch.empty(1, device=THREAD_DEVICE_TYPE)
        super().setUp()
        self._spawn_threads()

    @property
    def device(self) -> torch.device:
        return torch.device(THREAD_DEVICE_TYPE)
