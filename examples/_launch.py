"""The command line of the examples, and how they start their own processes."""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    record,
)


DEFAULT_STEPS = 120
# The exit status of a rank that has said itself, in one line, what is wrong
TOLD = 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, without the usage, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every example has; set_defaults changes what they default to."""
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=positive, metavar="N", help="processes (default: 2)")
    add(
        "--steps",
        type=positive,
        default=DEFAULT_STEPS,
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


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_worker() -> bool:
    """Whether torchrun, or :func:`launch`, started this process."""
    return dist.is_torchelastic_launched()


def launch(script: str, nproc: int, argv: Sequence[str]) -> int:
    """Runs ``script`` in ``nproc`` processes by torchrun; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    # Where other programs use the cores too, threads that wait must not spin on them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = run.parse_args(["--standalone", f"--nproc-per-node={nproc}", script])
    options.training_script_args = list(argv)  # unseen by torchrun's own parser
    logging.disable(logging.ERROR)  # of torchrun, which tells the same in a page
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != TOLD:
            print(f"error: rank {rank} {_cause(failure)}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except (OSError, RuntimeError) as error:  # no free port, no more processes
        print(f"error: torchrun: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


def _cause(failure: ProcessFailure) -> str:
    """What ended a rank: the first line of its exception, a signal or a status."""
    if failure.exitcode < 0:
        return f"was ended by {failure.signal_name()}"
    recorded = failure.error_file_data.get("message")
    if not isinstance(recorded, dict):
        return f"ended with exit status {failure.exitcode}"
    return f"failed: {recorded['message']}".splitlines()[0]


def as_rank(work: Callable[[], int]) -> NoReturn:
    """Does the work of one rank, and ends its process with the exit status.

    What an exception says is printed, and its first line goes to the process that
    launched this one.
    """
    if os.environ["RANK"] != "0":  # what libraries remark is said once
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        status = record(work)() or 0
    except KeyboardInterrupt:  # torchrun passes it on to each process
        status = 130
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Ends this process at once, while the interpreter still runs.

    Gloo's threads outlive destroy_process_group once a DTensor was gathered. A thread
    that drops a tensor takes the GIL; once the interpreter has begun to finalize, that
    aborts the process ("terminate called without an active exception").
    """
    with contextlib.suppress(OSError):  # of a pipe that nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def positive(text: str) -> int:
    """The number that an option is given as."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value
