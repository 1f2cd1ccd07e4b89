# Owner(s): ["oncall: distributed"]

import threading

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.testing._internal.common_fsdp import FSDPTestMultiThread, get_devtype
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode


device_type = torch.device(get_devtype())
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Bag(nn.Module):
    """Parameters of some dtypes, whose shards have an odd number of elements."""

    def __init__(self, *dtypes: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        self.params = nn.ParameterList(
            nn.Parameter(torch.randn(10 + i, 3, generator=generator).to(dtype))
            for i, dtype in enumerate(dtypes)
        )

    def forward(self) -> torch.Tensor:
        return sum(param.float().sum() for param in self.params)


class RecordedAllGather(DefaultAllGather):
    """Notes what it gathers."""

    def __init__(self):
        self.calls: list[tuple[torch.dtype, int]] = []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        nbytes = input_tensor.numel() * input_tensor.dtype.itemsize
        self.calls.append((input_tensor.dtype, nbytes))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CopyCounter(TorchDispatchMode):
    """Counts the copies of one thread."""

    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()
        self.counts = dict.fromkeys(
            ("all_gather_copy_in", "_foreach_copy_", "_to_copy"), 0
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if threading.get_ident() == self.thread and name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class TestGatherDtypes(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 4

    def shard(self, *dtypes: torch.dtype, param_dtype=None, own=(), **kwargs):
        """Shards a unit; parameters whose index is in ``own`` keep their dtype."""
        module = Bag(*dtypes).to(device_type)
        ids = {id(module.params[i]) for i in own}
        mp_policy = MixedPrecisionPolicy(
            param_dtype,
            param_dtype_override_fn=lambda p: p.dtype if id(p) in ids else None,
        )
        mesh = init_device_mesh(device_type.type, (self.world_size,))
        return fully_shard(module, mesh=mesh, mp_policy=mp_policy, **kwargs)

    def test_unsharded_parameters_are_the_cast_parameters(self):
        self.run_subtests(
            {
                "dtypes": [
                    (BF16, FP32, FP16),
                    (FP32, FP32),
                    (BF16, FP64, BF16, FP32),
                ],
                "param_dtype": [BF16, FP32],
                "own": [(), (0,)],
                "kwargs": [{}, {"reshard_after_forward": 2}],
            },
            self._test_unsharded_parameters_are_the_cast_parameters,
        )

    def _test_unsharded_parameters_are_the_cast_parameters(
        self, dtypes, param_dtype, own, kwargs
    ):
        module = self.shard(*dtypes, param_dtype=param_dtype, own=own, **kwargs)
        plain = Bag(*dtypes).to(device_type)
        for _ in range(2):
            module().backward()
            module.unshard()
            for i, (param, full) in enumerate(zip(module.params, plain.params)):
                dtype = full.dtype if i in own else param_dtype or full.dtype
                self.assertEqual(param.dtype, dtype)
                self.assertEqual(param, full.to(dtype), atol=0, rtol=0)
            module.reshard()

    def test_one_collective_of_the_bytes_that_are_computed_with(self):
        comm = RecordedAllGather()
        module = self.shard(BF16, FP32, FP32, param_dtype=BF16, own=(2,))
        module.set_custom_all_gather(comm)
        module.unshard()
        # Of 3 elements a row, 3 rows of each parameter
        self.assertEqual(comm.calls, [(torch.uint8, 9 * 2 + 9 * 2 + 9 * 4)])
        comm.calls.clear()
        module = self.shard(BF16, FP32, FP32, param_dtype=BF16)
        module.set_custom_all_gather(comm)
        module.unshard()
        self.assertEqual(comm.calls, [(BF16, 3 * 9 * 2)])

    def test_copies_of_a_gather(self):
        self.run_subtests(
            {
                "dtypes_own_and_copies": [
                    # The operator casts what comes in several dtypes
                    ((FP32, FP32), (0, 1), [1, 0, 0]),
                    ((FP32, FP32), (), [1, 0, 0]),
                    ((FP32, FP16, FP32, FP16), (), [1, 0, 0]),
                    # Bytes, and what is cast into them
                    ((BF16, FP32, FP32), (2,), [0, 2, 0]),
                ]
            },
            self._test_copies_of_a_gather,
        )

    def _test_copies_of_a_gather(self, dtypes_own_and_copies):
        dtypes, own, copies = dtypes_own_and_copies
        module = self.shard(*dtypes, param_dtype=BF16, own=own)
        module.unshard()
        module.reshard()
        dist.barrier()
        with CopyCounter() as counter:
            module.unshard(async_op=True)
        self.assertEqual([*counter.counts.values()], copies)
        module.unshard()

    def test_unaligned_slots_are_cast_before(self):
        # 9 elements of 2 bytes behind 9 of 4: every other rank's segment starts at no
        # multiple of 4
        module = self.shard(BF16, BF16, param_dtype=FP32, own=(1,))
        module.unshard()
        module.reshard()
        with CopyCounter() as counter:
            module.unshard(async_op=True)
        self.assertEqual(counter.counts["_to_copy"], dist.get_rank() % 2)
        module.unshard()
        self.assertEqual(module.params[0].dtype, FP32)


if __name__ == "__main__":
    run_tests()
