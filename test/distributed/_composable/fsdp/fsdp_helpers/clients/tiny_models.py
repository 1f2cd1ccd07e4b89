"""
Tiny random configurations of models that mix dtypes: one row each. Those of
``transformers`` take tokens and compute their loss themselves.

Which parameters are fp32 is asked of the model (``examples/kept_in_fp32.py``). Where a
model lists none, the row does, by the ends of names, and says why.

[Note: What several units read]
Each use of a tensor adds to its gradient. Where units of FSDP read it, the uses in one
unit are added up first, on any release: in 16 bits that is another sum than that of one
process. So only one unit reads what an encoder gives.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_helpers.clients.real_models import cast_parameters, causal_loss, VOCABULARY

import torch
import torch.nn as nn
from kept_in_fp32 import kept_in_fp32
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


# What the recurrences of linear attention are computed from, in fp32 by their code
STATE_SPACE = ("A_log", "D", "dt_bias")
# Nothing ends a sequence, nor fills one up
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
# Names that a configuration does not know do no harm
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
    **TOKENS,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
}
COMPRESS_RATES = {"heavily_compressed_attention": 4, "compressed_sparse_attention": 2}


@dataclass(frozen=True)
class TinyModel:
    """
    A model: ``build_model`` and ``shard``.

    Attributes:
        architecture: Its class, and that of its configuration, if it has one.
        settings: What the configuration is made with, or the model itself.
        fp32: What a model that lists none has in fp32, by the ends of names.
        units: Modules that are units, by the names of the lists that they are in.
        dtype: What all other parameters are stored in.
        build: Builds the model in another way.
    """

    architecture: tuple[str, ...]
    settings: Mapping[str, Any]
    fp32: tuple[str, ...] = ()
    units: tuple[str, ...] = ("layers",)
    dtype: torch.dtype = torch.bfloat16
    library: str = "transformers"
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = causal_loss
    build: Callable[[], nn.Module] | None = None

    def build_model(self) -> nn.Module:
        if self.build is not None:
            return self.build()
        library = importlib.import_module(self.library)
        build, *config = (getattr(library, name) for name in self.architecture)
        settings = self.settings
        model = build(config[0](**settings)) if config else build(**settings)
        fp32 = self.fp32 or kept_in_fp32(model, self.dtype)
        cast_parameters(model, self.dtype, but_fp32=fp32)
        return model

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        lists = [m for n, m in model.named_modules() if n.split(".")[-1] in self.units]
        for unit in (unit for each in lists for unit in each):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)


def scaled_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """As a GradScaler makes it, so that no gradient of fp16 is subnormal."""
    return causal_loss(model, tokens) * 2**10


def denoising_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns a video model's loss; videos are one frame of 2 by 2 pixels, 4 channels."""
    values = (tokens / VOCABULARY).bfloat16()
    video = values.view(-1, 4, 1, 2, 2)
    text = values.unsqueeze(-1).expand(-1, -1, model.config.text_dim)
    (found,) = model(video, tokens[:, 0], text, return_dict=False)
    return (found.float() - video.float()).square().mean()


def llama_with_adapters() -> nn.Module:
    """Frozen bf16 weights, fp32 adapters beside them, and a head that is trained whole."""
    from peft import get_peft_model, LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**DECODER, num_key_value_heads=2))
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


TINY_MODELS = {
    "mamba2": TinyModel(
        ("Mamba2ForCausalLM", "Mamba2Config"),
        {**DECODER, "num_heads": 8, "state_size": 8},
        fp32=STATE_SPACE,
    ),
    "nemotron_h": TinyModel(
        ("NemotronHForCausalLM", "NemotronHConfig"),
        {
            **DECODER,
            **EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "num_key_value_heads": 2,
            "moe_shared_expert_intermediate_size": 16,
        },
        # As its checkpoints store them. Near ties between experts are not decided by
        # rounding
        fp32=(*STATE_SPACE, "gate.weight"),
    ),
    "llama_peft": TinyModel(("LlamaForCausalLM",), {}, build=llama_with_adapters),
    "deepseek_v4": TinyModel(
        ("DeepseekV4ForCausalLM", "DeepseekV4Config"),
        {
            **DECODER,
            **EXPERTS,
            "intermediate_size": 16,  # of experts
            "layer_types": [*COMPRESS_RATES],
            "compress_rates": COMPRESS_RATES,
            "mlp_layer_types": ["hash_moe", "moe"],
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 8,
            "o_lora_rank": 8,
            "o_groups": 2,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "sliding_window": 4,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 2,
        },
    ),
    "qwen3_next": TinyModel(
        ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
        {
            **DECODER,
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
        },
        fp32=("A_log", "dt_bias", "linear_attn.norm.weight"),
    ),
    "t5": TinyModel(
        ("T5ForConditionalGeneration", "T5Config"),
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_heads": 4,
            "num_layers": 2,
            # See [Note: What several units read]
            "num_decoder_layers": 1,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
        },
        units=("block",),
        # `wo` is listed for fp16 alone, where its sums overflow
        dtype=torch.float16,
        loss_of=scaled_loss,
    ),
    "wan": TinyModel(
        ("WanTransformer3DModel",),
        {
            "patch_size": (1, 1, 1),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 8,
            "ffn_dim": 48,
            # See [Note: What several units read]
            "num_layers": 1,
        },
        units=("blocks",),
        library="diffusers",
        loss_of=denoising_loss,
    ),
}
