"""
The examples of real models, for tests that take them apart. Importing this makes
the modules of ``examples/`` importable, as they import one another: by name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from fsdp_test_utils import PRELOADED, REPO_ROOT


EXAMPLES = REPO_ROOT / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
PRELOADED += ["transformers", "peft", "torch._dynamo.backends.debugging"]


def example_of(name: str) -> ModuleType:
    """Returns the script that trains a model."""
    return importlib.import_module(f"train_{name}")
