"""
Runs a module on this branch in a fork of a process that has imported torch. It starts in
a tenth of the time that an interpreter takes, which imports torch and its compiler first.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

from fsdp_helpers.common.utils import environment, fork_server, run_anew, TREE_ROOT

import torch


def run_forked(module: str, *args: str, timeout: float = 1200) -> str:
    """
    Does as ``run_python("-m", module, ...)`` for what reads no variable before torch is
    imported, and what is not about how an interpreter starts or ends.
    """
    if torch.accelerator.is_available():  # which a fork could not use
        return run_anew("-m", module, *args, on_release=False, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        process = fork_server().Process(target=_run, args=(module, args, folder))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{module} was not done after {timeout} s")
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    if process.exitcode != 0:
        raise AssertionError(f"Exit status {process.exitcode}:\n{err}")
    return out


def _run(module: str, args: tuple[str, ...], folder: str) -> None:
    """Turns this fork into an interpreter that was started with ``-m module``."""
    gc.freeze()  # or a collection would copy all that is imported
    for descriptor, name in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(os.path.join(folder, name), flags), descriptor)
    os.chdir(TREE_ROOT)
    variables = environment(TREE_ROOT)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[1:] = args
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
