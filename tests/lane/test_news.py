"""What a lane tells of itself: modules that a trial has made it load."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from fluid.engine.events import LaneMeasured
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.news import LaneNews
from fluid.lane.protocol import LaneOptions, ModulesLoaded

INSTALLED = "/opt/venv/lib/python3.11/site-packages"


def load(name: str, monkeypatch: pytest.MonkeyPatch, folder: str | None = INSTALLED, own_name: str = "") -> None:
    module = ModuleType(name)
    origin = None if folder is None else f"{folder}/{name}.py"
    module.__spec__ = ModuleSpec(own_name or name, None, origin=origin)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def own() -> OwnMemory:
    return OwnMemory(LaneOptions(lane_id=0, kind="cpu"))


def test_installed_modules_that_were_loaded_since_the_start_are_told_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, own: OwnMemory
) -> None:
    load("there", monkeypatch)
    told = LaneNews(own, 0)
    assert list(told.since_last(0.0, 1.0)) == []
    load("slow", monkeypatch)
    load("slow.late", monkeypatch, "/usr/lib/python3/dist-packages")
    assert list(told.since_last(0.0, 2.0)) == [ModulesLoaded(("slow", "slow.late"))]
    assert list(told.since_last(0.0, 3.0)) == []
    monkeypatch.delitem(sys.modules, "slow")
    load("other", monkeypatch)
    load("another", monkeypatch)
    assert list(told.since_last(0.0, 4.0)) == [ModulesLoaded(("other", "another"))]


def test_nothing_is_told_of_the_users_own_code_and_of_what_no_import_finds(
    monkeypatch: pytest.MonkeyPatch, own: OwnMemory
) -> None:
    told = LaneNews(own, 0)
    load("train", monkeypatch, "/home/user/project")
    load("namespace", monkeypatch, None)
    load("six.moves.alias", monkeypatch, own_name="alias")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    monkeypatch.setitem(sys.modules, "blocked", None)  # type: ignore[arg-type]
    assert list(told.since_last(0.0, 1.0)) == []


def test_fluids_own_modules_are_told_wherever_they_are(monkeypatch: pytest.MonkeyPatch, own: OwnMemory) -> None:
    told = LaneNews(own, 0)
    load("fluid.integrations.another", monkeypatch, "/home/user/checkout/integrations")
    load("fluidity", monkeypatch, "/home/user/project")
    assert list(told.since_last(0.0, 1.0)) == [ModulesLoaded(("fluid.integrations.another",))]


def test_memory_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch, own: OwnMemory) -> None:
    monkeypatch.setattr(own, "changed", lambda held: 500.0 - held)
    told = LaneNews(own, 0)
    load("slow", monkeypatch)
    assert list(told.since_last(100.0, 1.0)) == [LaneMeasured(1.0, 0, 400.0), ModulesLoaded(("slow",))]
