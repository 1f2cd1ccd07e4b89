"""All parts of ``gpu.py``, in the order in which they run: what is right comes first."""

import _gpu_launches
import _gpu_memory
import _gpu_right
from _gpu_part import Part, Where


def all_parts(where: Where) -> list[Part]:
    return [
        _gpu_right.part(where, "threaded"),
        _gpu_right.part(where, "gloo"),
        _gpu_right.part(where, "nccl"),
        _gpu_memory.part(where),
        _gpu_launches.part(where),
    ]
