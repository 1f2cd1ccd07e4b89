"""Fine-tunes a tiny Llama with peft: frozen bf16 weights, fp32 adapters in every layer
and at the embedding, and a head that is trained whole, in bf16.

    python examples/train_llama_peft.py [--nproc N] [--replicas N] [--steps N]

Embedding, its adapter and the head are one unit, of two trainable dtypes. Each step
is compared with one process without FSDP; exit status 1 says that they differ.
``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
from peft import get_peft_model, LoraConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

import torch
from _real_model import cast_parameters, main, VOCABULARY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def build_model() -> PeftModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    cast_parameters(model, torch.bfloat16, but_fp32=())
    # peft makes the adapters of bf16 weights fp32, and leaves the head as it is
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
    )
    return get_peft_model(model, adapters)


def shard(model: PeftModel, mesh: DeviceMesh) -> None:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, build_model, shard, sys.argv[1:]))
