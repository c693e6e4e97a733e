"""What CI leaves out: tests that there are."""

from __future__ import annotations

from pathlib import Path

from long_tests import long_tests

HERE = Path(__file__).parent


def is_there(test: str) -> bool:
    file, *_, function = test.partition("[")[0].split("::")
    path = HERE / file
    return path.exists() and f"def {function}(" in path.read_text(encoding="utf-8")


def test_each_exists() -> None:
    assert [test for test in long_tests() if not is_there(test)] == []
