# Owner(s): ["oncall: distributed"]

"""
The operators ``fsdp::*``, which compiled graphs are matched with. Their schemas are in
``test_fully_shard_divide_factors.py``, which calls the release as well.
"""

from fsdp_common.utils import DeviceFreeTest

import torch
from torch.testing._internal.common_utils import run_tests


class TestOperators(DeviceFreeTest):
    def test_copy_in_fills_the_segment_of_its_rank(self):
        for device in ("cpu", "meta"):
            inputs = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
            inputs = [tensor.to(device) for tensor in inputs]
            output = torch.zeros(15, device=device)
            segment, same = torch.ops.fsdp.all_gather_copy_in(
                inputs, output, [3, 2], 5, 1
            )
            self.assertEqual(segment.size(), (5,))
            self.assertEqual(segment.storage_offset(), 5)
            self.assertEqual((same.size(), same.device.type), ((15,), device))
            if device == "cpu":
                self.assertEqual(output.tolist(), [0] * 5 + [1, 2, 3, 4, 5] + [0] * 5)

    def test_split_copy_takes_columns(self):
        for device in ("cpu", "meta"):
            rows = torch.arange(10.0).view(2, 5).to(device)
            out = [torch.empty(2, size, device=device) for size in (3, 2)]
            torch.ops.fsdp.split_with_sizes_copy(rows, [3, 2], dim=1, out=out)
            self.assertEqual([t.size() for t in out], [(2, 3), (2, 2)])
            if device == "cpu":
                self.assertEqual(out[1].tolist(), [[3, 4], [8, 9]])

    def test_chunk_cat_gives_each_rank_a_padded_row(self):
        for device in ("cpu", "meta"):
            tensors = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
            tensors = [tensor.to(device) for tensor in tensors]
            out = torch.full((2, 3), -1.0, device=device)
            torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=2, out=out)
            self.assertEqual(out.size(), (2, 3))
            if device == "cpu":
                self.assertEqual(out.tolist(), [[1, 2, 4], [3, 0, 5]])


if __name__ == "__main__":
    run_tests()
