"""All of Tune's surface has a case in the parity suite, or is listed as different on purpose."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
import ray.tune
from parity_differences import NOT_COMPARED, ON_PURPOSE
from parity_table import CASES
from ray.tune import schedulers, stopper

_HERE = Path(__file__).parent
pytestmark = pytest.mark.ray


def surface() -> Iterator[str]:
    """Every argument, setting, scheduler, stopper and call of a callback of Tune."""
    for name in ("run", "Tuner", "TuneConfig", "RunConfig", "CheckpointConfig", "FailureConfig"):
        yield from (f"{name}.{parameter}" for parameter in inspect.signature(getattr(ray.tune, name)).parameters)
    yield from (f"Tuner.restore.{parameter}" for parameter in inspect.signature(ray.tune.Tuner.restore).parameters)
    for module in (schedulers, stopper):
        yield from (name for name in module.__all__ if inspect.isclass(getattr(module, name)))
    for name, _ in inspect.getmembers(ray.tune.Callback, inspect.isfunction):
        if not name.startswith("_"):
            yield f"Callback.{name}"
    yield from ("ResultGrid", "Result", "ExperimentAnalysis", "ResumeConfig", "TuneContext", "Experiment")


def test_everything_has_a_case() -> None:
    covered = {name for case in CASES for name in case.covers}
    excused = {name for names in ON_PURPOSE.values() for name in names} | set(NOT_COMPARED)
    missing = sorted(set(surface()) - covered - excused - {f"Tuner.{name}" for name in _COVERED_BY_CONFIGS})
    assert not missing, "no case, and no entry in parity_differences.py"
    assert not covered & excused, "both a case and an excuse"
    assert excused <= set(surface()), "an excuse for what Tune does not have"


#: Arguments of ``Tuner`` that are configurations: each of their settings is listed.
_COVERED_BY_CONFIGS = ("tune_config", "run_config")


@pytest.mark.slow
def test_differences_on_purpose_are_those_of_the_documentation() -> None:
    page = (_HERE.parents[3] / "docs" / "ray_tune.md").read_text(encoding="utf-8")
    section = page.partition("These differ on purpose")[2].partition("\n## ")[0]
    headings = re.findall(r"^\* \*\*(.+?)\*\*", section, flags=re.MULTILINE)
    assert [heading.strip("`.") for heading in headings] == list(ON_PURPOSE)


@pytest.mark.slow
def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert sum(case.telling for case in CASES) <= 15, "CI has minutes for the telling cases"
