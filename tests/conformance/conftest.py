"""Has pytest show the values of what fails in the suite, and says which combinations no CI waits for."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("fluid.testing.backends", "fluid.testing.fork_suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks forms of trainables on Ray as long: only lanes know them, and the local backend has the same lanes."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("kind") == "ray" and params.get("form", "class") != "class":
            item.add_marker(pytest.mark.long)
