"""The command line of the examples, and how they start their own processes."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, without the usage, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every example has; set_defaults changes what they default to."""
    parser = _Parser(description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--nproc", type=positive, metavar="N", help="processes (default: 2)")
    add(
        "--steps",
        type=positive,
        default=200,
        metavar="N",
        help="optimizer steps (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="sequences of a step, over all processes (default: %(default)s)",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda where there is a device for each process, else cpu",
    )
    return parser


def parse_args(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace:
    """The options, completed and checked against this machine, or exit status 2."""
    args = parser.parse_args(argv)
    launched = int(os.environ["WORLD_SIZE"]) if is_worker() else None
    if args.nproc is None:
        args.nproc = launched or 2
    elif launched and args.nproc != launched:
        parser.error(f"--nproc {args.nproc}: torchrun started {launched} processes")
    if args.nproc > args.batch_size:
        parser.error(
            f"{args.nproc} processes are more than the work: a step has "
            f"{args.batch_size} sequences (--batch-size)"
        )
    if args.batch_size % args.nproc:
        parser.error(
            f"a step's {args.batch_size} sequences (--batch-size) do not divide "
            f"evenly among {args.nproc} processes"
        )
    wanted = int(os.environ["LOCAL_WORLD_SIZE"]) if is_worker() else args.nproc
    there = torch.cuda.device_count()
    if args.device is None:
        args.device = "cuda" if there >= wanted else "cpu"
    elif args.device == "cuda" and there < wanted:
        parser.error(
            f"--device cuda: {wanted} processes need a CUDA device each, "
            f"and {there or 'none'} can be seen"
        )
    return args


def is_worker() -> bool:
    """Whether torchrun, or :func:`launch`, started this process."""
    return dist.is_torchelastic_launched()


def launch(script: str, nproc: int, argv: Sequence[str]) -> int:
    """Runs ``script`` in ``nproc`` processes by torchrun; returns the exit status."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # Where other programs use the cores too, threads that wait must not spin on them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = run.parse_args(["--standalone", f"--nproc-per-node={nproc}", script])
    options.training_script_args = list(argv)  # unseen by torchrun's own parser
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        name = Path(script).name
        print(f"{name}: rank {rank} ended with status {status}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def positive(text: str) -> int:
    """The number that an option is given as."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value
