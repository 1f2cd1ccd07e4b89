"""A pytest plugin for gpu.py: counts on which device tests ran, and writes it as JSON."""

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import torch


_counts: Counter[str] = Counter()
_devices: dict[str, str] = {}


def _num_allocations() -> int:
    if not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    before = _num_allocations()
    try:
        return (yield)
    finally:
        # Ranks that are processes allocate unseen, but their class knows where
        in_processes = hasattr(item.cls, "backend_str")
        is_on_cuda = _num_allocations() > before
        found = "cuda" if is_on_cuda else "cpu"
        _devices[item.nodeid] = item.cls.device_type() if in_processes else found


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and not report.skipped:
        _counts[f"on {_devices[report.nodeid]}"] += 1
    if report.outcome != "passed":
        _counts[report.outcome] += 1


def pytest_collectreport(report: Any) -> None:
    if report.skipped:  # the whole file
        _counts["skipped"] += 1


def pytest_sessionfinish() -> None:
    Path(os.environ["FSDP_TESTS_RAN"]).write_text(json.dumps(_counts))
