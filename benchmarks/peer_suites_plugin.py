"""A plugin of pytest that puts Fluid in place of a peer's own machinery, and notes how each test ended.

``peer_suites.py`` loads it with ``-p peer_suites_plugin`` and says by variables of the environment what to put in place
(``FLUID_PEER_SUITE``; ``FLUID_PEER_SIDE``, ``fluid`` or ``stock``) of which package (``FLUID_PEER_PACKAGE``), how it
names the file of tests (``FLUID_PEER_FILE``) and where to write how they ended (``FLUID_PEER_OUTCOMES``), in lines of
JSON.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import peer_suites_adapters
import pytest

_OUTCOMES = Path(os.environ["FLUID_PEER_OUTCOMES"])
#: What a test came to where its phases differ: the first of these that one of them had.
_RANK = ("failed", "xpassed", "xfailed", "skipped", "passed")


def _note(record: dict[str, Any]) -> None:
    with _OUTCOMES.open("a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    _note(
        {
            "version": metadata.version(os.environ["FLUID_PEER_PACKAGE"]),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        }
    )
    peer_suites_adapters.install(os.environ["FLUID_PEER_SUITE"], os.environ["FLUID_PEER_SIDE"])


def pytest_unconfigure(config: pytest.Config) -> None:
    peer_suites_adapters.close()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note({"broken": report.nodeid, "text": str(report.longrepr)[-2000:]})


def pytest_collection_finish(session: pytest.Session) -> None:
    _note({"collected": [_name(item) for item in session.items]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    reports: list[pytest.TestReport] = []
    item.stash[_REPORTS] = reports
    runs = peer_suites_adapters.runs
    result = yield
    peer_suites_adapters.end_test()
    outcome = min((_outcome(report) for report in reports), key=_RANK.index)
    failed = next((report for report in reports if report.failed), None)
    _note(
        {
            "test": _name(item),
            "outcome": outcome,
            "on_fluid": peer_suites_adapters.runs > runs,
            "seconds": round(sum(report.duration for report in reports), 2),
            "text": "" if failed is None else failed.longreprtext[-4000:],
        }
    )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    item.stash[_REPORTS].append(report)
    return report


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return report.outcome


def _name(item: pytest.Item) -> str:
    """The id of a test with the file as the suite names it, wherever it lies."""
    return "::".join((os.environ["FLUID_PEER_FILE"], *item.nodeid.split("::")[1:]))
