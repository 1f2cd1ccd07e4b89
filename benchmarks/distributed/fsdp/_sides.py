"""The two sides of a comparison: processes that import the release, or the branch."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
REPO_ROOT = HERE.parents[2]
RELEASE_ROOT = REPO_ROOT / "build" / "base"
CACHE = REPO_ROOT / "build" / "pycache"


class SideError(RuntimeError):
    """A process of a side failed. What it said itself is on standard error."""


class Side:
    """
    One or more processes that import ``torch`` from ``root``. They live on between
    measurements and wait for the next request, without using a core meanwhile.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        *,
        backend: str = "fake",
        world_size: int = 8,
        device: str = "cpu",
    ):
        self.name = name
        self.root = root
        self.backend = backend
        self.world_size = world_size
        self.device = device
        self._processes: list[subprocess.Popen[str]] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """
        Starts the processes, if there are none: one with a fake process group, else
        one a rank. Does not wait until they are ready.
        """
        if self._processes:
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="fsdp_bench_")
        ranks = 1 if self.backend == "fake" else self.world_size
        for rank in range(ranks):
            options = {
                "backend": self.backend,
                "world_size": self.world_size,
                "rank": rank,
                "device": self.device,
                "store": os.path.join(self._scratch.name, "store"),
                "root": str(self.root),
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "_worker.py"), json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=self._environment(),
                    cwd=self._scratch.name,  # nothing to import lies there
                )
            )

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TORCH_LOGS", "OMP_", "MKL_"))
        }
        # One thread, so that process time is the time of the thread that issues
        paths = os.pathsep.join([str(self.root), str(REPO_ROOT / "examples")])
        ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        # Compiled once, but not into the release, which nothing writes to
        return inherited | ours | {"PYTHONPYCACHEPREFIX": str(CACHE)}

    def ask(self, part: str, request: dict[str, Any]) -> dict[str, Any]:
        """Has all processes measure; returns the first rank's result."""
        line = json.dumps({"part": part, "request": request}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._replies()[0]

    def _replies(self) -> list[dict[str, Any]]:
        replies = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                status = process.wait()
                raise SideError(f"{self.name}, rank {rank}: ended with status {status}")
            replies.append(json.loads(line))
        return replies

    def stop(self) -> None:
        for process in self._processes:
            process.kill()  # nothing that it holds is of use to anyone
        for process in self._processes:
            process.communicate()
        self._processes.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
