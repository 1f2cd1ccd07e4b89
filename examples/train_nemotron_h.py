"""Trains a tiny Nemotron-H: Mamba, attention, MoE and MLP layers in bf16, but fp32
state-space parameters and routers, as its checkpoints store them.

    python examples/train_nemotron_h.py [--nproc N] [--replicas N] [--steps N]

Each step is compared with one process without FSDP; exit status 1 says that they
differ. ``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
from transformers import NemotronHConfig, NemotronHForCausalLM

import torch
from _real_model import cast_parameters, main, VOCABULARY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


FP32 = ("A_log", "D", "dt_bias", "gate.weight")


def build_model() -> NemotronHForCausalLM:
    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        initializer_range=0.1,
        # Mamba
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        # Attention and MLP
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        # Mixture of experts
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )
    model = NemotronHForCausalLM(config)
    cast_parameters(model, torch.bfloat16, but_fp32=FP32)
    return model


def shard(model: NemotronHForCausalLM, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, build_model, shard, sys.argv[1:]))
