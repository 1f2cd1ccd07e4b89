"""
Whether anybody observes a step, so that what is only for observers is left out where
nobody does.

[Note: Who observes]
A range of `record_function` costs several microseconds, and an operator that is written
in Python more than the launch of what it calls. A step makes a dozen of the one and five
of the other for each unit. So they are made where somebody listens:

- A profiler, of this thread or of all: torch keeps a flag.
- A profiler that a daemon has started on demand (Kineto), which sets no flag. But a fast
  range takes hold of it when it is entered, and fails if it is entered once more.
- An execution trace (`ExecutionTraceObserver`): nothing tells that one is running. But
  it takes the arguments of what it records, and a range whose argument it cannot take
  fails.

So the root asks for the last two with such ranges, once at the start of each forward, and
each unit at an explicit unshard. What has started is seen from there on.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _record_function_with_args_enter
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.profiler import record_function


NO_RANGE = contextlib.nullcontext()

_has_trace = False
_LOOK = "FSDP::look_for_traces"
_NO_VALUE = object()  # which no observer can take


def look_for_traces() -> None:
    """Finds out whether anybody observes that torch keeps no flag of."""
    global _has_trace
    if profiler._is_profiler_enabled:
        return  # which would see what is asked
    _has_trace = _is_profiled_on_demand() or _has_execution_trace()


def _is_profiled_on_demand() -> bool:
    fast_range = _RecordFunctionFast(_LOOK)
    fast_range.__enter__()
    try:
        fast_range.__enter__()
    except RuntimeError:
        return True
    finally:
        fast_range.__exit__(None, None, None)
    return False


def _has_execution_trace() -> bool:
    try:
        _record_function_with_args_enter(_LOOK, _NO_VALUE)
    except RuntimeError:
        return True
    return False


def is_observed() -> bool:
    """Whether ranges and operators are seen by anybody."""
    return _has_trace or profiler._is_profiler_enabled


def gets_operators(device: torch.device) -> bool:
    """
    Whether a step goes by way of the ``fsdp::`` operators: a dispatch mode gets them
    as well, and vendors of other devices put kernels of their own in their place.
    """
    return is_observed() or _len_torch_dispatch_stack() > 0 or _is_vendors(device)


@functools.cache
def _is_vendors(device: torch.device) -> bool:
    return device.type not in ("cpu", "cuda")


def range_of(label: str) -> contextlib.AbstractContextManager:
    """Returns a profiler range, or nothing where nobody would see it."""
    return record_function(label) if is_observed() else NO_RANGE
