"""The rules are those of Ray, which the last test asks."""

from __future__ import annotations

import random
import re

import pytest

from fluid.display.trial_output import Deduplicator, PrintedLine


def line(text: str, pid: int = 1, *, is_error: bool = False) -> PrintedLine:
    return PrintedLine("train", pid, pid, "localhost", is_error, text)


def texts(told: list[tuple[PrintedLine, str]]) -> list[str]:
    return [shown.text + suffix.partition(" (")[0] for shown, suffix in told]


def test_equal_lines_of_several_processes_are_counted() -> None:
    lines = Deduplicator({})
    assert [lines.shows(line(f"epoch {pid} done", pid), 0.0) for pid in (1, 2, 3)] == [True, False, False]
    assert lines.shows(line("something else", 2), 1.0)
    assert lines.due(4.9) == []
    (told,) = lines.due(5.0)
    assert told[0] == line("epoch 3 done", 3) and told[1].startswith(" [repeated 2x across cluster] (Equal lines")
    assert not lines.shows(line("epoch 9 done", 1), 6.0)  # A new window has begun.
    assert texts(lines.due(10.0)) == ["epoch 9 done"]


def test_the_explanation_is_given_once() -> None:
    lines = Deduplicator({})
    for text in ("one", "two"):
        for pid in (1, 2, 3):
            lines.shows(line(text, pid), 0.0)
    assert ["(Equal" in suffix for _, suffix in lines.flush()] == [True, False]
    assert lines.flush() == []


def test_what_is_always_shown() -> None:
    lines = Deduplicator({})
    for pid in (1, 2, 1):
        assert lines.shows(line("0.5 17", pid), 0.0)  # Nothing but numbers.
        assert lines.shows(line("", pid), 0.0)
    for _ in range(3):
        assert lines.shows(line("of one process", 4), 0.0)
    assert lines.shows(line("of one process", 5, is_error=True), 0.0)  # The streams do not mix.


def test_the_environment() -> None:
    off = Deduplicator({"RAY_DEDUP_LOGS": "0"})
    assert all(off.shows(line("same", pid), 0.0) for pid in range(3))
    lines = Deduplicator(
        {
            "RAY_DEDUP_LOGS_AGG_WINDOW_S": "60",
            "RAY_DEDUP_LOGS_ALLOW_REGEX": "important",
            "RAY_DEDUP_LOGS_SKIP_REGEX": "boring",
        }
    )
    assert [lines.shows(line("important", pid), 0.0) for pid in (1, 2)] == [True, True]
    assert not lines.shows(line("boring"), 0.0)
    assert [lines.shows(line("same", pid), 0.0) for pid in (1, 2)] == [True, False]
    assert lines.due(59.0) == [] and texts(lines.due(60.0)) == ["same"]
    assert Deduplicator({"RAY_DEDUP_LOGS_AGG_WINDOW_S": "x", "RAY_DEDUP_LOGS_SKIP_REGEX": "("}).shows(line("a"), 0.0)


def test_lines_of_fits_are_each_shown() -> None:
    lines = Deduplicator({})
    for pid, score in ((1, 0.25), (2, 0.5), (3, 0.75)):
        assert lines.shows(line(f"[CV {pid}/3] END ..........C=1, score={score} total time= 0.1s", pid), 0.0)
    assert lines.flush() == []


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(5))
def test_it_shows_what_ray_shows(seed: int) -> None:
    logging = pytest.importorskip("ray._private.ray_logging")
    draw = random.Random(seed)
    now = 0.0
    theirs = logging.LogDeduplicator(5, None, None, _timesource=lambda: now)
    ours = Deduplicator({})

    def cleaned(text: str) -> str:
        return re.sub(r"\x1b\[\d+m| \(Ray deduplicates.*\)| \(Equal lines.*\)", "", text)

    def told(batches: list[dict[str, object]]) -> list[str]:
        return [cleaned(text) for batch in batches for text in batch["lines"]]  # type: ignore[attr-defined]

    for _ in range(300):
        now += draw.choice([0.0, 0.1, 1.0, 3.0])
        text, pid = f"{draw.choice(['epoch', 'loss', ''])} {draw.randrange(3)}", draw.randrange(1, 4)
        expected = told(theirs.deduplicate({"ip": "localhost", "pid": pid, "lines": [text]}))
        shown = [text] if ours.shows(line(text, pid), now) else []
        shown += [cleaned(held.text + suffix) for held, suffix in ours.due(now)]
        assert shown == expected
    assert [cleaned(held.text + suffix) for held, suffix in ours.flush()] == told(theirs.flush())
