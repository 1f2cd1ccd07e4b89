"""Says in one line what to do where what a script imports is missing.

Import this first. Before ``make setup`` there is no PyTorch to import, and what lies in
the repository's ``torch/`` is only the files that the branch changes.
"""

import sys
from pathlib import Path
from types import TracebackType


def _explain(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, ImportError):
        sys.__excepthook__(kind, error, trace)
        return
    of_models = str(error.name).partition(".")[0] in ("peft", "transformers")
    target = "models" if of_models else "setup"
    script = Path(sys.argv[0]).name
    print(
        f"error: {error}: run `make {target}` first, then "
        f".venv/bin/python examples/{script}",
        file=sys.stderr,
    )


sys.excepthook = _explain
