"""What ``make test QUICK=1`` runs of tests that are parametrized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from torch.testing._internal.common_utils import subtest


def quick_alone(quick: str, values: Iterable[str]) -> list[Any]:
    """Returns ``values`` for ``parametrize``, of which ``quick`` alone is marked so."""
    result: list[Any] = [*values]
    result[result.index(quick)] = subtest(quick, decorators=[pytest.mark.quick])
    return result
