"""Counts what transformers' own FSDP2 sends for a tiny DeepSeek-V4, three times:

    python examples/count_distributed_config.py [--nproc N] [--steps N]

- with the units that ``DistributedConfig(fsdp_size=N)`` makes, one for each dtype,
- with that splitting switched off: one unit for each layer,
- upcast to fp32, where it splits nothing.

Each is loaded by ``from_pretrained`` from one checkpoint. On a release, which refuses
what mixes dtypes, the error stands in the row. ``make models`` installs what is needed.
"""

import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import _setup  # noqa: F401


# isort: split
import transformers
from tabulate import tabulate
from transformers.distributed import DistributedConfig, mixin

import torch
import torch.distributed as dist
from _half_products import widen_half_products
from _launch import as_rank, is_worker, launch, make_parser, parse_args
from _real_model import causal_loss, join, token_batches
from _tiny_models import TINY_MODELS
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode


TINY = TINY_MODELS["deepseek_v4"]
# The larger buffer of each collective, by its place among the operator's arguments
BUFFERS = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}


class Sent(TorchDispatchMode):
    """Notes the bytes of each collective that is called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[str, list[int]] = {name: [] for name in BUFFERS}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in BUFFERS:
            self.nbytes[name].append(args[BUFFERS[name]].nbytes)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unsplit() -> Iterator[None]:
    """Has transformers (5.23) find nothing to make units of because of its dtype.

    Loading looks names up by its own import of the function: dtypes stay as they are.
    """
    splits = mixin.build_glob_alternation
    mixin.build_glob_alternation = lambda names: (re.compile("(?!)"), {}, {})
    try:
        yield
    finally:
        mixin.build_glob_alternation = splits


@dataclass
class Way:
    """How the model is loaded, and what one step of it then sends."""

    name: str
    dtype: torch.dtype
    context: Callable[[], contextlib.AbstractContextManager[None]]
    units: int = 0
    gathers: list[int] = field(default_factory=list)  # bytes of each
    reductions: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step
    error: str = ""

    def load(self, folder: str) -> nn.Module:
        ranks = DistributedConfig(fsdp_size=dist.get_world_size())
        architecture = getattr(transformers, TINY.architecture[0])
        with self.context():
            return architecture.from_pretrained(
                folder, dtype=self.dtype, distributed_config=ranks
            )

    def row(self) -> list[object]:
        if self.error:
            return [self.name, self.units, "refused"]
        counts = [len(self.gathers), sum(self.gathers)]
        counts += [len(self.reductions), sum(self.reductions)]
        step = f"{1000 * statistics.median(self.seconds):.1f}"
        return [self.name, self.units, *map("{:,}".format, counts), step]


def ways() -> list[Way]:
    return [
        Way("a unit for each dtype", torch.bfloat16, contextlib.nullcontext),
        Way("a unit for each layer", torch.bfloat16, unsplit),
        Way("upcast to fp32", torch.float32, contextlib.nullcontext),
    ]


def units_of(model: nn.Module) -> int:
    """Returns how many units there are that have parameters."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    units = {id(each._get_fsdp_state()): each._get_fsdp_state() for each in modules}
    return sum(len(unit._fsdp_param_groups) > 0 for unit in units.values())


def step(way: Way, model: nn.Module, tokens: torch.Tensor) -> None:
    """Runs a step, unless an earlier one failed, and notes what it sends."""
    if way.error:
        return
    started = time.perf_counter()
    try:
        with Sent() as sent:
            causal_loss(model, tokens).backward()
    except AssertionError as error:
        way.error = f"{type(error).__name__}: {error}"
        return
    way.seconds.append(time.perf_counter() - started)
    way.gathers, way.reductions = sent.nbytes.values()
    model.zero_grad()


def count(steps: int, device: torch.device) -> list[Way]:
    """Trains in turns, as times drift; the first step of each warms up."""
    found = ways()
    paths: list[str] = [""]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            paths[0] = stack.enter_context(tempfile.TemporaryDirectory())
            torch.manual_seed(0)
            model: Any = TINY.build_model()
            model.save_pretrained(paths[0])
        dist.broadcast_object_list(paths)
        models = [way.load(paths[0]) for way in found]
        dist.barrier()
    for way, model in zip(found, models, strict=True):
        way.units = units_of(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for batch in token_batches(steps + 1, 2 * ranks, device):
        for way, model in zip(found, models, strict=True):
            step(way, model, batch.chunk(ranks)[rank])
    for way in found:
        way.seconds = way.seconds[1:]
    return found


def report(steps: int, device_type: str) -> int:
    widen_half_products()
    transformers.utils.logging.disable_progress_bar()
    device = join(device_type)
    found = count(steps, device)
    if dist.get_rank() == 0:
        headers = ["", "units", "gathers", "bytes", "reductions", "bytes", "ms a step"]
        align = ["left", *["right"] * 6]
        rows = [way.row() for way in found]
        print(tabulate(rows, headers, colalign=align, disable_numparse=True))
        for error in dict.fromkeys(way.error for way in found if way.error):
            print(f"\nrefused: {error}")
    dist.destroy_process_group()
    return 0


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(steps=20)
    args = parse_args(parser, argv)
    if not is_worker():
        return launch(__file__, args.nproc, argv)
    return as_rank(lambda: report(args.steps, args.device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
