"""The command line of the examples: each script starts its processes by torchrun."""

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
from _half_products import widen_half_products
from torch.distributed import run as torchrun
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every example has; set_defaults changes what they default to."""
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=positive, default=2, metavar="N", help="default: %(default)s")
    add("--steps", type=positive, default=5, metavar="N", help="default: %(default)s")
    where = "default: cuda where there is a device for each process, else cpu"
    add("--device", choices=("cpu", "cuda"), help=where)
    return parser


def parse_args(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace:
    """The options, checked against this machine; or exit status 2."""
    args = parser.parse_args(argv)
    if dist.is_torchelastic_launched():
        args.nproc = int(os.environ["WORLD_SIZE"])
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", args.nproc))
    there = torch.cuda.device_count()
    if args.device is None:
        args.device = "cuda" if there >= wanted else "cpu"
    elif args.device == "cuda" and there < wanted:
        parser.error(f"--device cuda: {wanted} processes, but {there or 'no'} devices")
    return args


def positive(text: str) -> int:
    """The number that an option is given as."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def run(
    args: argparse.Namespace, argv: Sequence[str], work: Callable[[torch.device], int]
) -> int:
    """Does the work of one rank on its device, or starts this script once for each."""
    if dist.is_torchelastic_launched():
        return as_rank(lambda: in_group(args.device, work))
    threads = max(1, len(os.sched_getaffinity(0)) // args.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Where other programs use the cores too, threads that wait must not spin on them
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start = ["--standalone", f"--nproc-per-node={args.nproc}", sys.argv[0]]
    options = torchrun.parse_args(start)
    options.training_script_args = [*argv]  # which its parser would take for its own
    try:
        torchrun.run(options)
    except ChildFailedError as error:  # a rank has said why
        print(f"error: {str(error).strip().splitlines()[1]}", file=sys.stderr)
        return 1
    return 0


def in_group(device_type: str, work: Callable[[torch.device], int]) -> int:
    """Does the work of one rank, and returns its exit status."""
    widen_half_products()
    status = work(join(device_type))
    dist.destroy_process_group()
    return status


def join(device_type: str) -> torch.device:
    """Makes this process one of the group, and returns its device."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """All ranks to shard over, or groups of them that each have the whole model."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,))
    shape, names = (replicas, ranks // replicas), ("replicate", "shard")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def as_rank(work: Callable[[], int]) -> NoReturn:
    """Does the work of one rank, and ends its process with the exit status."""
    if os.environ["RANK"] != "0":  # what libraries remark is said once
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        status = work() or 0
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
