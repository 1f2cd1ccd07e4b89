"""All parts of ``gpu.py``, in the order in which they run: what is right comes first."""

import _gpu_coalesced
import _gpu_host
import _gpu_launches
import _gpu_memory
import _gpu_right
import _gpu_sanitizer
import _gpu_steps
import _gpu_streams
from _gpu_part import Part, Where


def all_parts(where: Where) -> list[Part]:
    return [
        _gpu_right.part(where, "threaded"),
        _gpu_right.part(where, "gloo"),
        _gpu_right.part(where, "nccl"),
        _gpu_streams.part(where),
        _gpu_sanitizer.part(where),
        _gpu_memory.part(where),
        _gpu_launches.part(where),
        _gpu_host.copies_part(where),
        _gpu_host.host_part(where),
        _gpu_steps.part(where),
        _gpu_steps.part_of_several(where),
        _gpu_coalesced.part(where),
    ]
