#!/usr/bin/env bash
# The file keeps each dtype, but config.json names a single one, the first parameter's.
. "$(dirname "$0")/common.sh" transformers==5.23.0
python - <<'END'
import tempfile
import torch
import transformers
from safetensors.torch import load_file

config = transformers.LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
)
print("transformers", transformers.__version__)
for part, expected in (("norm", torch.bfloat16), ("embed_tokens", torch.float32)):
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for name, param in model.named_parameters():
        if part in name:
            param.data = param.data.float() + 1e-4
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = {value.dtype for value in load_file(f"{folder}/model.safetensors").values()}
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        dtypes = {param.dtype for param in loaded.parameters()}
        loaded.load_state_dict(load_file(f"{folder}/model.safetensors"), assign=True)
    print(f"fp32 {part}: file has {stored}, loaded {dtypes}")
    assert stored == {torch.bfloat16, torch.float32}
    assert dtypes == {expected} and stored == {param.dtype for param in loaded.parameters()}
END
