"""
The examples of real models, for tests that take them apart. Importing this makes
the modules of ``examples/`` importable, as they import one another: by name. Both the
sharded model and the one process that it is compared with multiply as the examples do.
"""

from __future__ import annotations

import os
import sys
import unittest
from importlib.util import find_spec
from typing import Any

from fsdp_common.utils import PRELOADED, REPO_ROOT


EXAMPLES = REPO_ROOT / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
PRELOADED += ["transformers", "peft", "diffusers", "torch._dynamo.backends.debugging"]


from _half_products import widen_half_products  # noqa: E402


# In each process of a test: tiny bf16 models would mostly wait for slow products
widen_half_products()


def example_of(name: str) -> Any:
    """Returns what builds and shards a model."""
    from _tiny_models import TINY_MODELS

    return TINY_MODELS[name]


def needs(*packages: str) -> Any:
    """
    Skips tests where packages of other people's are missing: one that was yanked stops
    no test of FSDP itself. Continuous integration has all of them.
    """
    missing = [name for name in packages if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed, see requirements-models.txt"
    return unittest.skipIf(bool(missing) and not os.environ.get("CI"), reason)
