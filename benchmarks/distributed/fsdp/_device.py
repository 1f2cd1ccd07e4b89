"""What only a device shows: races that CUDA's sanitizer finds, and alignment."""

import platform
from dataclasses import replace
from typing import Any

from _models import AS_IT_IS, ask_both, BLOCKS, language_model, PER_DTYPE, training_step
from _ratios import Row, stop
from _sides import Side

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


SANITIZER = "TORCH_CUDA_SANITIZER"
MOVES = ("aten::split_with_sizes_copy", "aten::_foreach_copy_", "aten::_chunk_cat")
MOVES = (*MOVES, "fsdp::", "c10d::")
WIDE, LARGE = 16, 256  # bytes of one load, and of tensors that should begin on it


def measure(*, device: str, what: str, block: str, way: str) -> dict[str, Any]:
    return {"sanitizer": sanitized, "alignment": unaligned}[what](device, block, way)


def about(device: str) -> dict[str, Any]:
    """Returns what a report begins with. A process of its own looks at the device."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cpu":
        return found | {"device": "CPU only", "devices": 0}
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    return found | {
        "device": f"{torch.cuda.get_device_name()}, {memory:.0f} GiB",
        "devices": torch.cuda.device_count(),
        "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, nccl)) or "none",
    }


def sanitized(device: str, block: str, way: str) -> dict[str, Any]:
    """Returns how many accesses nothing orders, in three steps."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    model, x = language_model(block, way, device, "small")
    try:
        for _ in range(3):
            training_step(model, x)
    except CUDASanitizerErrors as errors:
        return {"count": len(errors.errors), "first": str(errors.errors[0])[:500]}
    return {"count": 0, "first": ""}


class Pointers(TorchDispatchMode):
    """Notes the large tensors that operators move, by whether they begin on 16 bytes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.key = getattr(torch._C.DispatchKey, device.upper())
        self.found: dict[bool, list[str]] = {True: [], False: []}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := func._schema.name).startswith(MOVES):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.nbytes >= LARGE:
                    is_aligned = tensor.data_ptr() % WIDE == 0
                    if is_aligned or tensor.nbytes % WIDE == 0:
                        what = f"{name}: {tensor.dtype} of {tensor.numel()}"
                        self.found[is_aligned].append(what)
        if not name.startswith("fsdp::"):
            return func(*args, **(kwargs or {}))
        with self:  # what its kernel calls is seen as well
            return func._op_dk(self.key, *args, **(kwargs or {}))


def unaligned(device: str, block: str, way: str) -> dict[str, Any]:
    """Returns how many of those of one step are not, and how many there are."""
    model, x = language_model(block, way, device)
    training_step(model, x)
    with Pointers(device) as pointers:
        training_step(model, x)
    aligned, others = pointers.found[True], pointers.found[False]
    first = others[0] if others else ""
    return {"count": len(others), "of": len(others) + len(aligned), "first": first}


def run_sanitizer(sides: dict[str, Side], **options: Any) -> list[Row]:
    """Runs the branch, and the release to tell what is not the branch's."""
    env = {SANITIZER: "1"}
    sanitized = {name: replace(side, env=env) for name, side in sides.items()}
    return _rows(sanitized, "sanitizer", "accesses that nothing orders")


def run_alignment(sides: dict[str, Side], **options: Any) -> list[Row]:
    return _rows(sides, "alignment", "large tensors that begin on no 16 bytes")


def _rows(sides: dict[str, Side], what: str, quantity: str) -> list[Row]:
    rows = []
    for block in BLOCKS:
        ways = AS_IT_IS, PER_DTYPE
        found = ask_both(sides, __name__, *ways, what=what, block=block)
        of = found["branch"].get("of")
        case = f"{block}{f', of {of}' if of else ''} {found['branch']['first']}".strip()
        ours, theirs = found["branch"]["count"], found["release"]["count"]
        rows.append(Row(what, case, quantity, ours, "release", theirs))
        # None at all, whatever the release has
        rows.append(Row(what, case, quantity, ours, "none", 0, 1.0))
    stop(sides)
    return rows
