"""The models of ``gpu.py``'s parts: how large blocks are, and which ways are compared."""

from _models import (
    ALL_FP32,
    AS_IT_IS,
    LATE,
    NARROW,
    PER_DTYPE,
    PROMOTED,
    WIDE,
)


# Arguments of a block, as in models of 8 billion parameters: a Llama-like one has 218
# million
LARGE = {
    "Llama-like": {"dim": 4096, "heads": 32, "hidden": 12288},
    "Nemotron-H-like": {"dim": 4096, "heads": 128, "state": 128},
    "fp32 adapters": {"dim": 4096, "heads": 32, "hidden": 12288},
}
# By case: block, the branch's way, the release's
WAYS = {
    "llama": ("Llama-like", AS_IT_IS, PER_DTYPE),
    "llama_reduced_in_fp32": ("Llama-like", WIDE, WIDE),
    "llama_grad_comm_dtype": ("Llama-like", NARROW, WIDE),
    "llama_backward_post": ("Llama-like", LATE, PER_DTYPE),
    "nemotron_h": ("Nemotron-H-like", AS_IT_IS, PER_DTYPE),
    "nemotron_h_backward_post": ("Nemotron-H-like", LATE, PER_DTYPE),
    "nemotron_h_beside_fp32": ("Nemotron-H-like", AS_IT_IS, ALL_FP32),
    "nemotron_h_promoted": ("Nemotron-H-like", AS_IT_IS, PROMOTED),
    "adapters": ("fp32 adapters", AS_IT_IS, PER_DTYPE),
}
