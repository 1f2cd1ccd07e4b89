"""The changes of the series, in order: each presupposes those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from tools.upstream.edits import Change


# Whose own files the edits were written for
RELEASE = "2.15.0"
SERIES: tuple[Change, ...] = ()
