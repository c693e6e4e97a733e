"""The checker of a shared folder's log finds what it looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from check_log import check_log

from fluid.joint.entries import Begun, Claimed, Ended, Item, Iterated, Joined, Lost, entry_of
from fluid.joint.log import SharedLog

LOSSES = [[0.5, 0.4, 0.3], [0.2, 0.1, 0.05], [0.9, 0.8, 0.7]]
Entry = tuple[str, list[Item]]


def iterated(number: int, lease: int, iteration: int, loss: float | None = None) -> Iterated:
    metrics = (json.dumps({"loss": LOSSES[number][iteration - 1] if loss is None else loss}),)
    return Iterated(
        f"g-{number:05d}",
        lease,
        iteration=iteration,
        metrics=metrics,
        seconds=(1.0,),
        at=1.0,
        ages=(0.0,),
        width=1.0,
        device_ids=(0,),
    )


def ended(number: int, lease: int, iteration: int, state: str = "DONE") -> Ended:
    return Ended(f"g-{number:05d}", lease, state=state, iteration=iteration)


def joined(name: str) -> Entry:
    return name, [Joined(folder=name, host="h", pid=1, process="p", devices={0: "cpu"}, version="v")]


def log() -> list[Entry]:
    """ASHA with the rungs 1 and 3: the second one of three trials goes on, with the member b, as a is lost."""
    return [
        joined("a"),
        joined("b"),
        ("a", [Begun("g", {"x": 0}, 3)]),
        ("b", [Begun("g", {"x": 1}, 3)]),
        ("a", [iterated(0, 2, 1), ended(0, 2, 1)]),
        ("b", [iterated(1, 3, 1), ended(1, 3, 1)]),
        ("a", [Begun("g", {"x": 2}, 3)]),
        ("a", [iterated(2, 6, 1)]),
        ("b", [Lost("a", "silent")]),
        ("b", [Claimed("g", "g-00002")]),
        ("b", [iterated(2, 6, 1), iterated(2, 9, 1), ended(2, 9, 1)]),  # The first two are void.
        ("b", [iterated(1, 3, 2)]),
        ("b", [iterated(1, 3, 3), ended(1, 3, 3)]),
        ("b", [ended(0, 3, 1, "STOPPED")]),  # Void.
    ]


def check(folder: Path, entries: list[Entry], results: dict[str, list[Any]] | None = None) -> Any:
    shared = SharedLog(folder, "test")
    for number, (writer, items) in enumerate(entries):
        list(shared.append(entry_of(writer, number, items)))
    known = {
        "g-00000": [{"loss": 0.5}],
        "g-00001": [{"loss": 0.2}, {"loss": 0.1}, {"loss": 0.05}],
        "g-00002": [{"loss": 0.9}],
    }
    return check_log(
        folder,
        algorithm="asha",
        samples=3,
        budget=3,
        alone=[({"x": number}, LOSSES[number]) for number in range(3)],
        results_of=lambda member: (results or known) if member.name == "b" else None,
    )


def test_a_right_log(tmp_path: Path) -> None:
    found = check(tmp_path, log())
    assert found.lost == {"a"} and found.void == {"Iterated": 2, "Ended": 1}
    assert [event.what for event in found.events if event.trial_id == "g-00002"] == ["begun", "iteration", "ended"]


@pytest.mark.parametrize(
    ("place", "entry", "problem"),
    [
        (3, ("b", [Begun("g", {"x": 7}, 3)]), "'x': 7"),
        (4, ("a", [iterated(0, 2, 1), iterated(0, 2, 2)]), "was not granted"),
        (5, ("b", [iterated(1, 3, 1, loss=0.3), ended(1, 3, 1)]), r"\[0.3"),
        (8, ("a", [Lost("b")]), "takes no part"),
        (10, ("b", [ended(2, 9, 1, "STOPPED")]), "no decision has ended it"),
        (12, ("b", [ended(1, 3, 2)]), "short of its rung"),
        (12, ("b", [ended(1, 3, 3)]), "but 2 were told"),
        (12, ("b", [iterated(1, 3, 3)]), "did not run to their rungs"),
        (13, ("a", [ended(0, 2, 1, "STOPPED")]), "takes no part"),
        (13, joined("a"), "joins twice"),
    ],
)
def test_a_wrong_log(tmp_path: Path, place: int, entry: Entry, problem: str) -> None:
    entries = log()
    entries[place] = entry
    with pytest.raises(AssertionError, match=problem):
        check(tmp_path, entries)


def test_a_trial_that_did_not_begin(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(tmp_path, log()[:6])


@pytest.mark.parametrize("told", [[], [{"loss": 0.5}, {"loss": 0.5}], [{"loss": 0.6}]])
def test_wrong_results(tmp_path: Path, told: list[Any]) -> None:
    results = {"g-00000": told, "g-00001": [{"loss": loss} for loss in LOSSES[1]], "g-00002": [{"loss": 0.9}]}
    with pytest.raises(AssertionError, match="other results than the log"):
        check(tmp_path, log(), results)
