"""The tests that CI leaves out, as they take long."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def long_tests() -> set[str]:
    """The node ids in ``long.txt``, relative to this folder; without parameters, all tests of a function."""
    lines = (_HERE / "long.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}
