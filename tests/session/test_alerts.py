"""What is logged where nobody looks at the live view: failures, dropped trials, groups that failed as a whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import FluidExecutor, Trial, TrialGroup, TrialListener


def bad(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    raise config["kind"](f"on purpose {config['number']}")
    yield {}


def good(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    while True:
        yield {}


def fails(folder: Path, *kinds: type, listener: TrialListener | None = None, **options: Any) -> None:
    with FluidExecutor("local", 1, run_dir=folder, verbose=0, **options) as made:
        trials = [Trial(bad, {"kind": kind, "number": i}, trial_id=f"t{i}") for i, kind in enumerate(kinds)]
        made.submit_trialgroup(TrialGroup(trials, name="the group"), listener).wait(90)


@pytest.mark.slow
def test_the_first_failure_of_each_kind_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fails(tmp_path, ValueError, ValueError, KeyError, max_failures=0)
    failures = [text for text in caplog.messages if "trial 't" in text]
    assert len(failures) == 2
    assert "ValueError: on purpose 0" in failures[0] and "KeyError" in failures[1]
    assert str(tmp_path / "trials" / "t0" / "output.log") in failures[0]
    assert [text for text in caplog.messages if "all 3 trials of group 'the group' failed" in text]


@pytest.mark.slow
def test_a_failure_that_is_tried_again_is_logged_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fails(tmp_path, ValueError, max_failures=2)
    (text,) = [text for text in caplog.messages if "trial 't0'" in text]
    assert "failed and is tried again: ValueError: on purpose 0" in text


@pytest.mark.slow
def test_a_listener_that_tells_failures_keeps_the_log_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Tells(TrialListener):
        tells_failures = True

    fails(tmp_path / "told", ValueError, listener=Tells(), max_failures=0)
    assert caplog.messages == []
    # What is tried again is no failure to the listener.
    fails(tmp_path / "again", ValueError, listener=Tells(), max_failures=2)
    (text,) = caplog.messages
    assert "failed and is tried again: ValueError: on purpose 0" in text


def test_trials_that_are_dropped_are_counted_with_the_way_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path) as made:
        handle = made.submit_trialgroup(TrialGroup([Trial(good, {}, budget=10**9) for _ in range(3)]))
        next(handle.results())
    (text,) = [text for text in caplog.messages if "dropped" in text]
    assert text.startswith("3 trials that had not ended were dropped")
    assert f"FluidExecutor.resume({str(tmp_path)!r})" in text


def empty(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    yield from ()


def test_trials_that_end_without_an_iteration_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0) as made:
        trials = [Trial(empty, {}, trial_id=name) for name in "ab"] + [Trial(good, {}, trial_id="c")]
        made.submit_trialgroup(TrialGroup(trials)).wait(90)
    (text,) = caplog.messages
    assert text.startswith("trial 'a' ended without a result: its trainable ran no iteration")


@pytest.mark.slow
def test_nothing_is_logged_of_a_session_that_went_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0) as made:
        made.submit_trialgroup(TrialGroup([Trial(good, {}, budget=3)])).wait(90)
    assert caplog.messages == []


def test_a_script_without_logging_sees_it_on_stderr(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from fluid import FluidExecutor, Trial, TrialGroup\n"
        "def bad(config):\n    raise ValueError('on purpose')\n    yield {}\n"
        f"with FluidExecutor('local', 1, run_dir={str(tmp_path / 'run')!r}) as executor:\n"
        "    for result in executor.submit_trialgroup(TrialGroup([Trial(bad, {})])).results():\n        print(result)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=True)
    assert "ValueError: on purpose" in done.stderr and "the one trial of group" in done.stderr


def test_the_last_lines_count_what_failed_and_what_was_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials = [Trial(bad, {"kind": ValueError, "number": 0}), Trial(good, budget=10**6)]
    with FluidExecutor("local", 2, run_dir=tmp_path, max_failures=0) as made:
        handle = made.submit_trialgroup(TrialGroup(trials, name="the group"))
        eventually(lambda: handle.failures)
    assert f"1 of 2 trials of group 'the group' failed; their logs are in {tmp_path}" in caplog.messages
    (dropped,) = [text for text in caplog.messages if "dropped" in text]
    assert dropped.startswith("1 trial that had not ended was dropped, as the executor was closed: call handle.wait()")
