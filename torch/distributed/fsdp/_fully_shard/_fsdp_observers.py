"""
Whether anybody observes a step, so that what is only for observers is left out where
nobody does.

[Note: Who observes]
A range of `record_function` costs several microseconds, and an operator that is written
in Python more than the launch of what it calls. A step makes a dozen of the one and five
of the other for each unit. So they are made where somebody listens:

- A profiler, of this thread or of all: torch keeps a flag.
- An execution trace (`ExecutionTraceObserver`): nothing tells that one is running. But
  it takes the arguments of what it records, and a range whose argument it cannot take
  fails. So the root asks with such a range, once at the start of each forward, and each
  unit at an explicit unshard. A trace is seen from there on.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _record_function_with_args_enter
from torch.autograd import profiler
from torch.profiler import record_function


NO_RANGE = contextlib.nullcontext()

_has_trace = False
_NO_VALUE = object()  # which no observer can take


def look_for_traces() -> None:
    """Finds out whether an execution trace is running."""
    global _has_trace
    if profiler._is_profiler_enabled:
        return  # which would see what is asked
    try:
        _record_function_with_args_enter("FSDP::look_for_traces", _NO_VALUE)
        _has_trace = False
    except RuntimeError:
        _has_trace = True


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
