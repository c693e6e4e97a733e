"""By when a group has ended with 90 %, as live views show it: beside the ETA, to a fitting precision, not jumping."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from fluid.display.dashboard import render
from fluid.display.follow import EndTimes, time_text
from fluid.display.notebook import status_html
from fluid.session.facts import Forecast
from fluid.session.status import GroupStatus, Status

#: Tuesday, 3 February 2026, 14:00:00 UTC.
NOW = 1770127200.0


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def status(seconds: float | None, trials: dict[str, int] | None = None) -> Status:
    forecast = None if seconds is None else Forecast(seconds={0.1: 0.5 * seconds, 0.9: seconds})
    group = GroupStatus(
        name="rung-0",
        trials={"RUNNING": 2} if trials is None else trials,
        iterations_done=5,
        iterations=20,
        eta=600.0,
        forecast=forecast,
    )
    return Status(at=10.0, groups=(group,), devices=(), alpha={}, packing={})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.0, "14:00:05"),
        (42.0, "14:00:45"),
        (1920.0, "14:32"),
        (1921.0, "14:33"),
        (5 * 3600.0, "19:00"),
        (12 * 3600.0, "Wed 02:00"),
        (26 * 3600.0, "Wed 16:00"),
        (9 * 86400.0, "12 Feb 14:00"),
    ],
)
def test_times_are_rounded_up_to_what_one_wants_to_know(seconds: float, text: str) -> None:
    assert time_text(NOW + seconds, NOW) == text


def test_a_time_stays_while_the_forecast_hardly_changes() -> None:
    ends = EndTimes()
    ends.take(status(1920.0), NOW)
    assert ends.texts == {0: "90 % by 14:32"}
    ends.take(status(1920.0 - 60.0 + 150.0), NOW + 60.0)
    assert ends.texts == {0: "90 % by 14:32"}, "two and a half minutes of 31 do not count"
    ends.take(status(1920.0 - 60.0 + 600.0), NOW + 60.0)
    assert ends.texts == {0: "90 % by 14:42"}
    ends.take(status(300.0), NOW + 60.0)
    assert ends.texts == {0: "90 % by 14:06:00"}


def test_a_time_that_has_passed_is_not_shown() -> None:
    ends = EndTimes()
    ends.take(status(20.0), NOW)
    ends.take(status(0.5), NOW + 21.0)
    assert ends.texts == {0: "90 % by 14:00:25"}


@pytest.mark.parametrize("shown", [status(None), status(5.0, {"DONE": 2})])
def test_nothing_is_shown_without_a_forecast_or_at_the_end(shown: Status) -> None:
    ends = EndTimes()
    ends.take(status(20.0), NOW)
    ends.take(shown, NOW + 1.0)
    assert ends.texts == {}


@pytest.mark.parametrize("width", [200, 80, 60, 40, 20])
def test_the_dashboard_has_it_beside_the_eta_where_there_is_room(width: int) -> None:
    shown = status(1920.0)
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(render(shown, width, 20, ends={0: "90 % by 14:32"}))
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert ("ETA 10:00  90 % by 14:32" in text) == (width >= 60)
    assert "ETA 10:00" in text or width < 30


def test_notebooks_have_it_in_a_column_of_its_own() -> None:
    html = status_html(status(1920.0), {}, {0: 0.25}, "", {0: "90 % by 14:32"})
    assert ">ETA 10:00</td><td" in html and ">90 % by 14:32</td>" in html
