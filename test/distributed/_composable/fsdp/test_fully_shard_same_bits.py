# Owner(s): ["oncall: distributed"]

"""``examples/same_bits.py``: with ``grad_comm_dtype`` the mesh changes no bit."""

import argparse
import contextlib
import io
import sys
from pathlib import Path

from fsdp_common.utils import DEVICE_TYPE, FSDPProcessTest

from torch.testing._internal.common_utils import run_tests


EXAMPLES = Path(__file__).parents[4] / "examples"


class TestSameBits(FSDPProcessTest):
    world_size = 4

    def test_meshes_agree_with_it_and_only_with_it(self) -> None:
        sys.path.insert(0, str(EXAMPLES))
        import same_bits

        args = argparse.Namespace(nproc=self.world_size, steps=3, device=DEVICE_TYPE)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.assertEqual(same_bits.compare(args), 0)
        if self.rank == 0:
            narrow, wide, _ = printed.getvalue().strip().split("\n\n")
            self.assertEqual(len({*self.digests(narrow)}), 1)
            # Each mesh drifts its own way; of one shard, all is replicated
            self.assertEqual(len({*self.digests(wide)}), 3)

    def digests(self, table: str) -> list[tuple[str, ...]]:
        """Returns those of losses, gradients and parameters on each mesh."""
        rows = [line.rsplit(maxsplit=6) for line in table.splitlines()[2:]]
        return [tuple(row[1:4]) for row in rows]


if __name__ == "__main__":
    run_tests()
