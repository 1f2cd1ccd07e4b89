# Owner(s): ["oncall: distributed"]
"""
accelerate, by itself and under transformers' ``Trainer`` and TRL's ``SFTTrainer``, and
Lightning Fabric: each optimizer step beside one process, and resuming from a
checkpoint. accelerate takes DDP on a CPU; ``fsdp_accelerator`` has it take FSDP there.
"""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_helpers.clients import real_models
from fsdp_helpers.clients.common import as_launched, ClientTest, fsdp_accelerator
from fsdp_helpers.clients.real_models import causal_loss, OneProcess, token_batches
from fsdp_helpers.clients.tiny_models import TINY_MODELS
from fsdp_helpers.common.utils import shared_folder

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_utils import parametrize, run_tests


BF16, FP32 = torch.bfloat16, torch.float32
RATE = 2**-8
# Example to the class of its layers
LAYERS = {"mamba2": "Mamba2Block", "llama_peft": "LlamaDecoderLayer"}
ACCUMULATED = 2


def arguments(
    kind: type, folder: Path | str, layers: str, *, loads: bool = False, **kwargs: Any
) -> Any:
    """Returns those of a trainer whose units are ``layers``."""
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "transformer_layer_cls_to_wrap": [layers],
            "cpu_ram_efficient_loading": loads,
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATED,
        optim="adamw_torch",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **kwargs},
    )


def token_rows(count: int) -> Any:
    """Returns a data set of sequences that count up from their number."""
    from datasets import Dataset

    steps = range(real_models.SEQUENCE_LENGTH)
    rows = [
        [(7 * i + step) % real_models.VOCABULARY for step in steps]
        for i in range(count)
    ]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """TRL's loss of one of four microbatches, divided by the tokens of all."""
    outputs = model(
        input_ids=tokens, labels=tokens, use_cache=False, fused_lm_head=True
    )
    return -outputs.log_probs.sum() / (4 * tokens[:, 1:].numel()) * 4


def beside_one_process(
    model: nn.Module, loss_of: real_models.LossFunction = causal_loss
) -> Any:
    """Returns a callback that compares each step with ``model``, and notes what differs."""
    from transformers import TrainerCallback

    class Beside(TrainerCallback):
        def __init__(self) -> None:
            self.reference = OneProcess(model, loss_of)
            self.reference.optimizer = torch.optim.AdamW(
                self.reference.model.parameters(), lr=RATE, weight_decay=0.0
            )
            self.seen: list[torch.Tensor] = []
            self.wrong: list[str] = []
            self.kinds: set[str] = set()
            self.steps = 0

        def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            # This rank's part of each microbatch
            model.register_forward_pre_hook(
                lambda _, args, kwargs: self.seen.append(kwargs["input_ids"]),
                with_kwargs=True,
            )

        def on_pre_optimizer_step(
            self, *args: Any, model: nn.Module, **kwargs: Any
        ) -> None:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self.seen)
            self.reference.backward(tuple(seen for rank in ranks for seen in rank))
            found = [*self.reference.gradient_differences(model)]
            self.kinds |= {each.what for each in found}
            self.wrong += [str(each) for each in found if not each.ok]
            self.reference.step(model)
            self.seen.clear()

        def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            found = self.reference.parameter_differences(model)
            self.wrong += [str(each) for each in found if not each.ok]
            self.steps += 1

    return Beside()


class TrainerTest(ClientTest):
    def check_beside(self, beside: Any, steps: int) -> None:
        """The trainer's steps were those of one process, with gradients of both dtypes."""
        self.assertFalse(beside.wrong, beside.wrong)
        self.assertEqual(beside.steps, steps)
        self.assertEqual(beside.kinds, {"bfloat16 gradients", "float32 gradients"})


class TestTrainer(TrainerTest):
    def trainer(self, name: str, folder: Path, **kwargs: Any) -> tuple[Any, Any]:
        from transformers import Trainer, TrainingArguments

        torch.manual_seed(0)
        model = TINY_MODELS[name].build_model()
        beside = beside_one_process(copy.deepcopy(model))
        # Whether the first rank's weights are loaded for all
        loads = name == "llama_peft"
        for param in model.parameters() if loads and self.rank > 0 else ():
            param.data.zero_()
        kwargs["loads"] = loads
        with mock.patch("transformers.trainer.Accelerator", fsdp_accelerator):
            args = arguments(TrainingArguments, folder, LAYERS[name], **kwargs)
            rows = token_rows(32)
            trainer = Trainer(model, args, train_dataset=rows, callbacks=[beside])
        return trainer, beside

    @parametrize("name", [*LAYERS])
    def test_each_step_equals_one_process(self, name: str) -> None:
        with as_launched(self.rank, self.world_size), shared_folder() as folder:
            trainer, beside = self.trainer(name, folder, max_steps=3)
            self.assertTrue(trainer.is_fsdp_enabled)
            trainer.train()
        self.check_beside(beside, steps=3)

    def test_resumes_where_it_was(self) -> None:
        with as_launched(self.rank, self.world_size), shared_folder() as folder:
            saving = {"save_strategy": "steps", "save_steps": 2}
            first, _ = self.trainer("mamba2", folder, max_steps=4, **saving)
            first.train()
            second, beside = self.trainer("mamba2", folder, max_steps=4, **saving)
            second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        self.assertEqual(beside.steps, 2)
        pairs = zip(
            first.model.named_parameters(), second.model.parameters(), strict=True
        )
        for (name, one), other in pairs:
            self.assert_same(one.to_local(), other.to_local(), name)

    def test_accelerate_keeps_a_policy_by_name(self) -> None:
        """With mixed precision off nothing is upcast, and the policy holds."""
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        model = TINY_MODELS["mamba2"].build_model()
        stored = [param.dtype for param in model.parameters()]
        fp32 = dict.fromkeys(("*.A_log", "*.D"), MixedPrecisionPolicy(FP32, FP32))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[LAYERS["mamba2"]],
            mixed_precision_policy=MixedPrecisionPolicy.by_name(
                model, fp32, param_dtype=BF16, cast_forward_inputs=False
            ),
        )
        options = {"cpu": True, "mixed_precision": "no", "fsdp_plugin": plugin}
        with as_launched(self.rank, self.world_size):
            accelerator = fsdp_accelerator(**options)
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            AcceleratorState._reset_state(reset_partial_state=True)
        self.assertEqual([param.dtype for param in model.parameters()], stored)
        mixer, seen = model.get_submodule("backbone.layers.0.mixer"), {}
        mixer.register_forward_pre_hook(
            lambda module, _: seen.update(
                {name: param.dtype for name, param in module.named_parameters()}
            )
        )
        causal_loss(model, next(token_batches(1, self.world_size, self.device)))
        # Two are stored in fp32, and one of them is cast
        dtypes = seen["A_log"], seen["dt_bias"], seen["in_proj.weight"]
        self.assertEqual(dtypes, (FP32, BF16, BF16))


class TestSFT(TrainerTest):
    def trainer(self, folder: Path) -> Any:
        """TRL is given a model and a configuration, and calls peft itself."""
        from trl import SFTConfig, SFTTrainer

        torch.manual_seed(0)
        model = TINY_MODELS["llama_peft"].build_model()
        config = copy.deepcopy(model.peft_config["default"])
        # Norms are trained whole. A head's gradient would not be reduced: TRL's fused
        # loss gathers the weight by itself.
        config.modules_to_save = ["norm"]
        # TRL turns bf16 on by itself, with which accelerate upcasts
        settings = {"max_steps": 3, "bf16": False, "max_length": None}
        args = arguments(SFTConfig, folder, LAYERS["llama_peft"], **settings)
        with mock.patch("transformers.trainer.Accelerator", fsdp_accelerator):
            return SFTTrainer(
                model.unload(),
                args,
                train_dataset=token_rows(32),
                peft_config=config,
                processing_class=tokenizer(),
            )

    def test_lora_and_norms_beside_one_process(self) -> None:
        """fp32 adapters and bf16 norms. Forward is replaced: no copy would do."""
        with as_launched(self.rank, self.world_size), shared_folder() as folder:
            trainer, other = (self.trainer(folder) for _ in range(2))
            other.model.load_state_dict(trainer.model.state_dict())
            beside = beside_one_process(other.model, token_loss)
            trainer.add_callback(beside)
            trainer.train()
        self.check_beside(beside, steps=3)


def tokenizer() -> Any:
    """Returns one of numbers, which SFTTrainer wants and does not use here."""
    from tokenizers import models, Tokenizer
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(real_models.VOCABULARY)}
    of_words = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, eos_token="1", pad_token="2", unk_token="0"
    )


class TestFabric(ClientTest):
    """Lightning Fabric with its ``ModelParallelStrategy``, whose function shards the model."""

    def fabric(self) -> Any:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            TINY_MODELS["nemotron_h"].shard(model, mesh["data_parallel"])
            return model

        strategy = ModelParallelStrategy(parallelize, self.world_size, 1)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=self.world_size)
        fabric.launch()
        return fabric

    def test_trains_saves_and_loads(self) -> None:
        with as_launched(self.rank, self.world_size), shared_folder() as folder:
            fabric = self.fabric()
            torch.manual_seed(0)
            built = TINY_MODELS["nemotron_h"].build_model()
            reference = OneProcess(copy.deepcopy(built), causal_loss)
            model = fabric.setup_module(built)
            optimizer = fabric.setup_optimizers(real_models.make_optimizer(model))
            state = {"model": model, "optimizer": optimizer, "steps": 0}
            saved: dict[str, torch.Tensor] = {}
            for batch in token_batches(3, 2 * self.world_size, self.device):
                chunks = batch.chunk(self.world_size)
                loss = causal_loss(model, chunks[self.rank])
                fabric.backward(loss)
                self.check_backward(reference, built, loss, chunks, self.rank)
                self.check_step(reference, built, optimizer)
                state["steps"] += 1
                if state["steps"] == 2:
                    fabric.save(folder / "checkpoint", state)
                    saved = copy.deepcopy(reference.model.state_dict())
            fabric.load(folder / "checkpoint", state)
        self.assertEqual(state["steps"], 2)
        for name, param in built.named_parameters():
            self.assert_same(param.full_tensor(), saved[name], name)


if __name__ == "__main__":
    run_tests()
