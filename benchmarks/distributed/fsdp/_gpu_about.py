"""What a report begins with: the device and what drives it. Asked of a process of its
own, so that no fault of a driver ends the run."""

import platform
import subprocess
from typing import Any

import torch


def measure(*, device: str) -> dict[str, Any]:
    if device == "cpu":
        return {
            "device": "CPU only",
            "devices": 0,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    count = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "device": f"{count} x {torch.cuda.get_device_name()}, {memory:.0f} GiB",
        "devices": count,
        "driver": _driver(),
        "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, nccl)) or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return found.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"
