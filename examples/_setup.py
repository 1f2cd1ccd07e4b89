"""Says in one line what to do where what a script imports is missing.

Import this first. Before ``make setup`` there is no PyTorch to import, and what lies in
the repository's ``torch/`` is only the files that the branch changes.
"""

import sys
from typing import Any


def _explain(kind: Any, error: BaseException, trace: Any) -> None:
    if not isinstance(error, ImportError):
        sys.__excepthook__(kind, error, trace)
        return
    of_models = str(error.name).partition(".")[0] in ("peft", "transformers")
    target = "models" if of_models else "setup"
    print(f"error: {error}: run `make {target}` first", file=sys.stderr)


sys.excepthook = _explain
