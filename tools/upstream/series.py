"""The changes of the series, in order: each presupposes those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.upstream import (
    dtype_overrides,
    gather_by_dtype,
    reduction_per_dtype,
    several_storage_dtypes,
)


if TYPE_CHECKING:
    from tools.upstream.edits import Change


# Whose own files the edits were written for
RELEASE = "2.15.0"
SERIES: tuple[Change, ...] = (
    several_storage_dtypes.CHANGE,
    reduction_per_dtype.CHANGE,
    gather_by_dtype.CHANGE,
    dtype_overrides.CHANGE,
)
