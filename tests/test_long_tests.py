"""What CI leaves out: tests that there are."""

from __future__ import annotations

from pathlib import Path

from long_tests import long_tests

from fluid.testing import backends

HERE = Path(__file__).parent


def is_there(test: str) -> bool:
    file, *_, function = test.partition("[")[0].split("::")
    path = HERE / file
    inherited = [Path(backends.__file__)] if file.startswith("conformance/") else []
    return path.exists() and any(f"def {function}(" in each.read_text(encoding="utf-8") for each in (path, *inherited))


def test_each_exists() -> None:
    assert [test for test in long_tests() if not is_there(test)] == []
