"""
Tells whether anything observes a step: else profiler ranges and operators are skipped.

[Note: Who observes]
A dozen `record_function` ranges and five Python operators of each unit cost more than the
launches of its kernels. So they run only for a profiler started from Python, for which
torch sets a flag, or, as each lazy init and the first unit of a forward find out, for one
started on demand (Kineto) or an execution trace.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter
from torch.autograd import profiler
from torch.profiler import record_function


NO_CONTEXT = contextlib.nullcontext()
# Cached: a lookup takes less time than reading the device's type
_is_vendor_device = functools.cache(lambda device: device.type not in ("cpu", "cuda"))
has_unflagged_observer = False


def look_for_traces() -> None:
    """Finds observers that torch sets no flag for. A flagged one would see the probe."""
    global has_unflagged_observer
    if not profiler._is_profiler_enabled:
        try:  # a trace cannot record the object
            _record_function_with_args_enter("FSDP::look_for_traces", object())
            has_unflagged_observer = _profiler_enabled()
        except RuntimeError:
            has_unflagged_observer = True


def is_observed() -> bool:
    return has_unflagged_observer or profiler._is_profiler_enabled


def gets_operators(device: torch.device) -> bool:
    """Whether anybody expects the ``fsdp::`` operators instead of direct kernels."""
    return is_observed() or _len_torch_dispatch_stack() > 0 or _is_vendor_device(device)


def range_of(label: str) -> contextlib.AbstractContextManager:
    """Returns a profiler range, or one that does nothing if nobody sees it."""
    return record_function(label) if is_observed() else NO_CONTEXT
