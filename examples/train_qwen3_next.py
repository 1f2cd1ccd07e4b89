"""Trains a tiny Qwen3-Next: gated delta rule, attention and experts in bf16, but fp32
decay (``A_log``, ``dt_bias``) and fp32 norms of the linear attention.

    python examples/train_qwen3_next.py [--nproc N] [--replicas N] [--steps N]

Each step is compared with one process without FSDP; exit status 1 says that they
differ. ``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import torch
from _real_model import cast_parameters, main, VOCABULARY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


def build_model() -> Qwen3NextForCausalLM:
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        initializer_range=0.1,
        # Linear attention
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        # Attention
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        # Mixture of experts
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = Qwen3NextForCausalLM(config)
    cast_parameters(model, torch.bfloat16, but_fp32=FP32)
    return model


def shard(model: Qwen3NextForCausalLM, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, build_model, shard, sys.argv[1:]))
