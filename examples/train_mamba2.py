"""Trains a tiny Mamba-2 in bf16 with the fp32 ``A_log``, ``D`` and ``dt_bias`` that
its recurrence wants: bare parameters beside the matrices, in one module.

    python examples/train_mamba2.py [--nproc N] [--replicas N] [--steps N]

Each step is compared with one process without FSDP; exit status 1 says that they
differ. ``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
from transformers import Mamba2Config, Mamba2ForCausalLM

import torch
from _real_model import cast_parameters, main, VOCABULARY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


FP32 = ("A_log", "D", "dt_bias")


def build_model() -> Mamba2ForCausalLM:
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    )
    model = Mamba2ForCausalLM(config)
    cast_parameters(model, torch.bfloat16, but_fp32=FP32)
    return model


def shard(model: Mamba2ForCausalLM, mesh: DeviceMesh) -> None:
    for layer in model.backbone.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, build_model, shard, sys.argv[1:]))
