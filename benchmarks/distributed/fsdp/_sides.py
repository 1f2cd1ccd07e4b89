"""The two sides of a comparison: processes that import the release, or the branch."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, KW_ONLY
from pathlib import Path
from typing import Any, NoReturn

import torch.version


HERE = Path(__file__).resolve().parent
REPO_ROOT = HERE.parents[2]
# Where torch is. Set-up keeps the release, unmodified, beside the tree of links
TREE_ROOT = Path(torch.version.__file__).absolute().parents[1]
# Where an overlay keeps the files that it replaced, from the folder that holds torch/
KEPT = "torch/.mixed_dtype/release"
MADE = REPO_ROOT / "build" / "release"
CACHE = REPO_ROOT / "build" / "pycache"
TESTS = REPO_ROOT / "test" / "distributed" / "_composable" / "fsdp"
LAST_LINES = 20  # of what a process that failed wrote to standard error


def find_release(given: Path | None) -> Path | None:
    """Returns a folder with the release's ``torch/``: given, kept or of links."""
    folder, kept = given or TREE_ROOT.parent / "base", TREE_ROOT / KEPT
    if (folder / "torch").is_dir():
        return folder
    if given or not (kept / "torch").is_dir():
        return None
    from tools.overlay import lay_links, torch_links
    from tools.releases import files_under

    lay_links(MADE, torch_links(TREE_ROOT, kept, files_under(kept, "torch")))
    return MADE


class SideError(RuntimeError):
    """A process of a side has ended, and so the side."""


@dataclass
class Side:
    """
    One or more processes that import ``torch`` from ``root``. They live on between
    measurements and wait for the next request, without using a core meanwhile.

    Attributes:
        backend: ``fake`` takes one process for all ranks.
        env: Variables that its processes get beside those of this one.
    """

    name: str
    root: Path
    _: KW_ONLY
    backend: str = "fake"
    world_size: int = 8
    device: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    _processes: list[Any] = field(init=False, default_factory=list)
    _scratch: tempfile.TemporaryDirectory[str] | None = field(init=False, default=None)

    def start(self) -> None:
        """Starts the processes, if there are none, and does not wait for them."""
        if self._processes:
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="fsdp_bench_")
        for rank in range(1 if self.backend == "fake" else self.world_size):
            options = {"store": os.path.join(self._scratch.name, "store"), "rank": rank}
            for name in ("backend", "world_size", "device", "root"):
                options[name] = getattr(self, name)
            with self._errors_of(rank).open("w") as errors:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        HERE / "_worker.py",
                        json.dumps(options, default=str),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=self._environment(),
                    cwd=self._scratch.name,  # nothing to import lies there
                )
            self._processes.append(process)

    def _errors_of(self, rank: int) -> Path:
        """A file, not a pipe, which would be full once nobody reads it."""
        assert self._scratch is not None
        return Path(self._scratch.name, f"stderr_{rank}")

    def _environment(self) -> dict[str, str]:
        others = ("PYTHON", "TORCH_LOGS", "OMP_", "MKL_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        # One thread, so that process time is the time of the thread that issues
        paths = os.pathsep.join(map(str, (self.root, TESTS)))
        # Compiled once, but not into the release, which nothing writes to
        ours = {"PYTHONPATH": paths, "PYTHONPYCACHEPREFIX": str(CACHE)}
        return inherited | ours | {"OMP_NUM_THREADS": "1", **self.env}

    def ask(
        self, module: str, request: dict[str, Any], *, seconds: float | None = None
    ) -> dict[str, Any]:
        """
        Has ``measure`` of a module run in all processes; returns the first rank's result.

        Raises:
            SideError: as soon as one of them has ended, or if one has not answered
                after ``seconds``. The others would wait for it in a collective; they
                are ended too.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        line = json.dumps({"module": module, "request": request}) + "\n"
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # its output has ended as well
                process.stdin.write(line)
                process.stdin.flush()
        return self._replies(deadline)[0]

    def _replies(self, deadline: float | None) -> dict[int, dict[str, Any]]:
        """Returns a reply of each rank, in whatever order they come."""
        replies: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(replies) < len(self._processes):
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                if not (ready := selector.select(left)):
                    late = {*range(len(self._processes))} - {*replies}
                    named = ", ".join(map(str, sorted(late)))
                    self._give_up(min(late), f": no answer of rank {named} in time")
                for key, _ in ready:
                    process = self._processes[key.data]
                    if not (line := process.stdout.readline()):
                        ended = f"ended with status {process.wait()}"
                        self._give_up(key.data, f", rank {key.data}: {ended}")
                    replies[key.data] = json.loads(line)
        return replies

    def _give_up(self, rank: int, why: str) -> NoReturn:
        said = self._errors_of(rank).read_text(errors="replace").splitlines()
        self.stop()
        raise SideError("\n".join([f"{self.name}{why}", *said[-LAST_LINES:]]))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()  # nothing that it holds is of use to anyone
        for process in self._processes:
            process.communicate()
        self._processes.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
