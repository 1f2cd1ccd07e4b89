"""Whether losses, gradients and parameters of a few steps have the release's bits."""

from typing import Any

from _models import AS_IT_IS, ask_both, BLOCKS, digest_of, language_model, PER_DTYPE
from _ratios import Row
from _sides import Side

import torch
import torch.distributed as dist


STEPS = 3


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns a digest of each tensor on each rank."""
    model, x = language_model(block, way, device, "small")
    # The release's units of one dtype have other names, in another order
    params = sorted(model.named_parameters())
    optimizer = torch.optim.SGD([param for _, param in params], lr=0.01)
    digests: dict[str, str] = {}
    for step in range(STEPS):
        loss = model(x).float().square().mean()
        loss.backward()
        tensors = {"loss": loss}
        tensors |= {f"gradient {n}": p.grad._local_tensor for n, p in params}  # type: ignore[union-attr]
        optimizer.step()
        tensors |= {n: p._local_tensor for n, p in params}  # type: ignore[attr-defined]
        for name, tensor in tensors.items():
            digests[f"step {step} {name} {tensor.dtype}"] = digest_of(tensor)[:12]
        optimizer.zero_grad()
    of_all: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_all, digests)
    return {f"{rank} {n}": d for rank, of in enumerate(of_all) for n, d in of.items()}


def run(sides: dict[str, Side], **options: Any) -> list[Row]:
    """Counts the tensors that differ."""
    rows = []
    for block in BLOCKS:
        found = ask_both(sides, __name__, AS_IT_IS, PER_DTYPE, block=block)
        ours, theirs = found["branch"], found["release"]
        differ = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        case = f"{block} blocks{f', first {differ[0]}' if differ else ''}"
        counts = (len(theirs) + len(differ), "release", len(theirs))
        rows.append(Row("bits", case, "tensors, and those that differ", *counts, 1.0))
    return rows
