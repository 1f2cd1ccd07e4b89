"""Trains a tiny DeepSeek-V3: latent attention and experts in bf16 with an fp32 router,
so that near ties between experts are not decided by rounding.

    python examples/train_deepseek_v3.py [--nproc N] [--replicas N] [--steps N]

Each step is compared with one process without FSDP; exit status 1 says that they
differ. ``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import torch
from _real_model import cast_parameters, main, VOCABULARY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


FP32 = ("gate.weight",)


def build_model() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,  # then one layer of experts
        initializer_range=0.1,
        intermediate_size=48,
        # Latent attention
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        # Mixture of experts
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
    )
    model = DeepseekV3ForCausalLM(config)
    cast_parameters(model, torch.bfloat16, but_fp32=FP32)
    return model


def shard(model: DeepseekV3ForCausalLM, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, build_model, shard, sys.argv[1:]))
