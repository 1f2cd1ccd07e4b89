"""Ranks on fewer devices than there are ranks: as threads, or over gloo."""

import functools
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from _calls import CALLED

import torch
import torch.distributed as dist


T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)


@functools.cache
def threads_run_twice() -> bool:
    """Whether a process may run several groups of threads: 2.11 crashes in the second."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    return hasattr(ThreadLocalWorld, "comms")


def as_threads(count: int, device: str, run: Callable[[int], T]) -> list[T]:
    """Runs each rank in a thread of this process, in a group of these threads."""
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    if not threads_run_twice():  # 2.11 lacks what it looks for
        threaded.ThreadLocalWorld.comms = []
    threaded._install_threaded_pg()
    store = dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    if device == "cuda":
        _wait_for_streams()

    def run_rank(rank: int) -> None:
        dist.init_process_group(
            "threaded", rank=rank, world_size=count, store=store, timeout=TIMEOUT
        )
        try:
            results[rank] = run(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run_rank, args=(r,)) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded._uninstall_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]


@functools.cache
def _wait_for_streams() -> None:
    """
    One thread copies for all, in its own stream: what the others have issued must be
    done before, and it must be done before they go on.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    threads: Any = multi_threaded_pg.Collective
    join = threads.join

    def join_in_order(collective: Any, rank: int, data: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        if rank == 0:
            kind = collective._collective
            work = kind.work

            def work_and_wait(data: Any) -> None:
                work(data)
                torch.cuda.current_stream().synchronize()

            kind.work = work_and_wait
        return join(collective, rank, data)

    threads.join = join_in_order


class Done(dist.Work):
    """What was waited for already."""

    def wait(self, timeout: Any = None) -> bool:
        return True


WRITTEN = {"output_tensor", "output", "tensor"}


def _staged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the collective, over copies on the host."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        devices = {
            name: tensor
            for name, tensor in given.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda
        }
        hosts = {name: tensor.cpu() for name, tensor in devices.items()}
        is_async = given.pop("async_op", False)
        original(**given | hosts)
        for name in WRITTEN & {*devices}:
            devices[name].copy_(hosts[name])
        return Done() if is_async else None

    return call


@functools.cache
def stage_what_gloo_lacks() -> list[str]:
    """
    Lets collectives that gloo does not have for CUDA tensors go over the host. Returns
    their names.
    """
    count = dist.get_world_size()
    one, all_ranks = torch.ones(1, device="cuda"), torch.ones(count, device="cuda")
    tensors = {
        "all-gather": (all_ranks, one),
        "reduce-scatter": (one, all_ranks),
        "all-to-all": (torch.empty_like(all_ranks), all_ranks),
        "all-reduce": (one,),
    }
    staged = []
    for name, (kind, _) in CALLED.items():
        original = getattr(dist, name, None)
        if original is None:
            continue
        try:
            original(*tensors[kind])
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, NotImplementedError):
            setattr(dist, name, _staged(original))
            staged.append(name)
    return staged
