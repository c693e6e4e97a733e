"""What a lane tells of itself: modules that a trial has made it load."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from fluid.lane import news
from fluid.lane.device_messages import ModulesLoaded, OwnBytesChanged
from fluid.lane.messages import LaneOptions
from fluid.lane.news import LaneNews
from fluid.lane.own_memory import OwnMemory


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_modules_that_were_loaded_since_the_start_are_told_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("slow_base", "slow", "slow.late")
    monkeypatch.setattr(news, "_SLOW", names)
    load("slow_base", monkeypatch)
    told = LaneNews(OwnMemory(LaneOptions(lane_id=0, kind="cpu")))
    assert list(told.since_last(0.0, 1.0)) == []
    load("slow.late", monkeypatch)
    load("slow", monkeypatch)
    load("quick", monkeypatch)
    assert list(told.since_last(0.0, 2.0)) == [ModulesLoaded(2.0, ("slow", "slow.late"))]
    assert list(told.since_last(0.0, 3.0)) == []


def test_memory_of_its_own_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "_SLOW", ("slow",))
    own = OwnMemory(LaneOptions(lane_id=0, kind="cpu"))
    monkeypatch.setattr(own, "changed", lambda held: 500.0 - held)
    told = LaneNews(own)
    load("slow", monkeypatch)
    assert list(told.since_last(100.0, 1.0)) == [OwnBytesChanged(1.0, 400.0), ModulesLoaded(1.0, ("slow",))]
