"""A run's results: as JSON, as pictures, and as a page of the documentation."""

import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _where
from _pictures import draw
from _rows import PartResult, table

import torch
from _half_products import slow_dtypes


RESULTS = "results.json"
UNFINISHED = "unfinished.json"  # of a run that has not come to its end

PAGE = """\
# Benchmarks

Written by `make bench DOCS=1`, from one run. The *release* is PyTorch {torch}, and the
*branch* is the release with the files of this repository over it.

{machine}

Release and branch run in separate processes and take turns. A round measures one after
the other and gives one ratio. The table shows the median of the ratios and their quartiles.
*Branch* and *other* are given for bytes, collectives and memory, which are counted and the
same in every run. Times are given as ratios alone, except in the last two tables. *At most*
is the ratio that this branch aims at.

{pictures}
{table}

## Where host time goes

Microseconds per unit and step, of the model that *host* measures. Each line is without
what the lines below it take. *The rest* is what runs around a unit's own functions: hooks
of `nn.Module`, and autograd's nodes. The release does not take the mixed unit.

{where}

## What is measured

- **host**: processor time per unit of one step, forward and backward. The model has eight
  units whose parameters have 128 elements each, and the time of the same model without
  `fully_shard` is subtracted. The process group is a fake one of eight ranks, and the
  fastest step of a round counts. *release, one unit per dtype* makes three units where the
  branch makes one.
- **bytes**: the sizes of the collectives of one step, counted where they are called, over
  eight ranks. The model has three blocks, resharded after forward. *Gradients promoted* is
  computed: all gradients of a unit in one reduce-scatter of the widest dtype. That is how
  PyTorch 2.15 reduces gradients of several dtypes whose parameters are stored alike. It
  refuses units whose trainable parameters are not.
- **step**: wall-clock time of a training step of four gloo processes that share the cores
  named above. *Gradients promoted* is the branch with `reduce_dtype=torch.float32`. Blocks of
  one dtype send and compute the same on both sides. Their steps differ by host time, which
  is about 1 % of such a step and less than the spread.
- **memory**: the peak that `FSDPMemTracker` counts on one of eight ranks in one step,
  without an optimizer.
- **growth**: straight lines fitted to host time, over 1 to 64 units of 16 parameters
  and over 1 to 256 parameters in each of 4 units.
- **where**: the functions that `_where.py` names are timed, on each side its own, and the
  time that this takes is subtracted. The fastest step of a round counts, and the median
  of 12 rounds is shown.
- **cuda**: bytes written per second by copy-in and copy-out of a layer of 218 million
  parameters, compared with a device-to-device copy of as many bytes, and the host
  time of a step on the device.
"""


@dataclass
class Results:
    machine: dict[str, Any]
    parts: dict[str, PartResult]

    def save(self, folder: Path) -> None:
        self._save_values(folder / RESULTS)
        (folder / UNFINISHED).unlink(missing_ok=True)
        (folder / "table.txt").write_text(self.text() + "\n")
        draw(self.parts, folder)

    def save_unfinished(self, folder: Path) -> None:
        self._save_values(folder / UNFINISHED)

    def _save_values(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {name: part.as_json() for name, part in self.parts.items()}
        found = {"machine": self.machine, "parts": parts}
        path.write_text(json.dumps(found, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Results":
        found = json.loads((folder / RESULTS).read_text())
        parts = {name: PartResult.of_json(p) for name, p in found["parts"].items()}
        return cls(found["machine"], parts)

    def text(self, style: str = "simple") -> str:
        """Returns the table of all ratios, and what has tables of its own."""
        texts = [table(self.parts, style)]
        if (where := self.parts.get("where")) is not None:
            texts.append(_where.tables(where, style))
        return "\n\n".join(texts)

    def document(self, docs: Path) -> None:
        """Writes the page, with its pictures beside it."""
        pictures = docs / "benchmarks"
        shutil.rmtree(pictures, ignore_errors=True)
        pictures.mkdir(parents=True)
        drawn = draw(self.parts, pictures)
        links = [f"![{path.stem}](benchmarks/{path.name})\n" for path in drawn]
        skipped = [f"{p.skipped}.\n" for p in self.parts.values() if p.skipped]
        page = PAGE.format(
            torch=self.machine["torch"],
            machine=describe(self.machine),
            pictures="\n".join(links),
            table="\n".join([table(self.parts, "github"), "", *skipped]).rstrip(),
            where=_where.tables(self.parts["where"], "github"),
        )
        (docs / "benchmarks.md").write_text(page)


def machine() -> dict[str, Any]:
    """What times depend on: the hardware, and nothing that names the machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    has_device = torch.cuda.is_available()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "fp32_products": sorted(str(dtype) for dtype in slow_dtypes()),
        "device": torch.cuda.get_device_name() if has_device else "",
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "system": platform.system(),
    }


def describe(machine: dict[str, Any]) -> str:
    device = machine["device"] or "CPU only"
    widened = " and ".join(machine.get("fp32_products", ()))
    products = f" In *step*, products of {widened} are computed in fp32."
    return (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, {device}, with "
        f"Python {machine['python']} on {machine['system']}."
        + (products.replace("torch.", "") if widened else "")
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()
