"""
fp32 master weights of bf16 parameters, and their checkpoint

Parameters are stored, gathered and computed in bf16; the optimizer steps fp32 copies of
the shards, so its moments are fp32 too. `grad_dtype` keeps the fp32 sums of the
reduction, which `.grad` would otherwise round to bf16. `get_optimizer_state_dict` fails
for such an optimizer (`KeyError: 0`), since its parameters are not the model's: save
masters and state by name.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 64, dtype=torch.bfloat16), nn.RMSNorm(64)
        )
        self.model[0].register_forward_hook(lambda module, args, out: out.float())
        for param in self.model.parameters():
            param.grad_dtype = torch.float32
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.masters = {
            name: param.detach().float().clone()
            for name, param in self.model.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-4)

    def step(self, x):
        self.model(x).square().mean().backward()
        for name, param in self.model.named_parameters():
            self.masters[name].grad, param.grad = param.grad, None
        self.optimizer.step()
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.masters[name])

    def state(self):
        return {
            "model": self.model.state_dict(),
            "masters": self.masters,
            "optimizer": {
                name: self.optimizer.state[master]
                for name, master in self.masters.items()
            },
        }


folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)
batches = torch.randn(3, 4, 64, dtype=torch.bfloat16)
trainer = Trainer()
trainer.step(batches[0])
dcp.save(trainer.state(), checkpoint_id=folders[0])
trainer.step(batches[1])

resumed = Trainer()
resumed.step(batches[2])  # allocates the optimizer's state, which is then overwritten
dcp.load(resumed.state(), checkpoint_id=folders[0])
resumed.step(batches[1])
for name, master in trainer.masters.items():
    assert master.dtype == trainer.optimizer.state[master]["exp_avg"].dtype
    assert master.dtype == torch.float32
    assert torch.equal(resumed.masters[name].to_local(), master.to_local())
dist.destroy_process_group()
