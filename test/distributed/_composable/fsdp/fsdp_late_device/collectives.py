"""
What collectives compute, given the tensors of all ranks at once. Sums are in the
order of the ranks and in the tensors' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """Which collective, and how it reduces."""

    name: str
    operation: str | None

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Reads the inputs of all ranks, in the group's order, and fills the outputs."""
        if self.name.startswith("all_gather"):
            gathered = torch.cat([tensor.reshape(-1) for tensor in inputs])
            results = [gathered] * len(outputs)
        elif self.name.startswith("all_to_all"):
            parts = [tensor.reshape(len(inputs), -1) for tensor in inputs]
            results = [
                torch.cat([part[rank] for part in parts])
                for rank in range(len(outputs))
            ]
        else:
            reduced = self._reduce([tensor.reshape(-1) for tensor in inputs])
            results = [reduced] * len(outputs)
            if self.name.startswith("reduce_scatter"):
                results = [*reduced.chunk(len(outputs))]
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result.view(output.size()))

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            if self.operation in ("SUM", "AVG"):
                total += tensor
            elif self.operation == "MAX":
                total = torch.maximum(total, tensor)
            elif self.operation == "MIN":
                total = torch.minimum(total, tensor)
            else:
                raise NotImplementedError(f"a reduction by {self.operation}")
        return total / len(tensors) if self.operation == "AVG" else total


def functional_call(name: str, given: dict[str, Any]) -> tuple[Call, list[int]]:
    """
    Returns what the functional collective of that name and arguments is, and the size
    of its result.
    """
    operation = given.get("reduce_op")
    call = Call(name, operation and operation.upper())
    size = [*given["input"].size()]
    if name in ("all_gather_into_tensor", "all_gather_single"):
        size[0] *= given["group_size"]
    elif name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        size[0] //= given["group_size"]
    elif name != "all_reduce":
        raise NotImplementedError(f"the functional collective {name}")
    return call, size
