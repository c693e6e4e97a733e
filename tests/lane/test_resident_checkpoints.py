"""What a lane saves for good, without a process."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from fluid._clock import VirtualClock
from fluid.engine.events import TrialNotKept, TrialSaved
from fluid.keeping import QUOTA_USED_UP, KeepRule, WorstKept
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.save import ResidentCheckpoints
from fluid.lane.checkpoints.store import persist_checkpoints
from fluid.lane.protocol import KeepBar, LaneOptions
from fluid.lane.resident import ResidentTrial

RULE = KeepRule("best", "g", "loss", "min")


class Body:
    """A trial's code, as far as it is saved."""

    error: BaseException | None = None

    def save(self, folder: str) -> None:
        if self.error is not None:
            raise self.error
        Path(folder, "weights").write_bytes(bytes(1000))


@pytest.fixture
def checkpoints(tmp_path: Path) -> ResidentCheckpoints:
    options = LaneOptions(0, run_folder=str(tmp_path))
    nothing: Any = None
    return ResidentCheckpoints(options, VirtualClock(), nothing, nothing, lambda resident: None)


def resident(rule: KeepRule | None = RULE, name: str = "a") -> ResidentTrial:
    nothing: Any = None
    body: Any = Body()
    return ResidentTrial(
        trial_id=name,
        lane_id=0,
        link=nothing,
        code=nothing,
        process_state=nothing,
        body=body,
        rule=rule,
        autosaves=True,
    )


def told(checkpoints: ResidentCheckpoints, trial: ResidentTrial, losses: list[float | None]) -> list[int]:
    """Runs iterations with these losses; returns those whose checkpoints are kept."""
    kept = []
    for loss in losses:
        trial.iteration += 1
        checkpoints.keep_if_better(trial, {} if loss is None else {"loss": loss})
        if trial.unsent is not None:
            assert isinstance(trial.unsent, TrialSaved) and trial.unsent.kept is not None
            assert trial.unsent.checkpoint.iteration == trial.iteration and trial.unsent.kept.value == loss
            kept.append(trial.iteration)
            trial.unsent = None
    return kept


def test_each_better_iteration_is_saved(checkpoints: ResidentCheckpoints, tmp_path: Path) -> None:
    losses = [0.5, 0.6, 0.4, None, 0.4, float("nan"), 0.3]
    assert told(checkpoints, resident(), losses) == [1, 3, 7]
    assert len(list(tmp_path.glob("trials/a/kept/*"))) == 3, "the driver deletes those that were replaced"


def test_only_what_beats_the_bar_is_saved(checkpoints: ResidentCheckpoints) -> None:
    checkpoints.set_bar(KeepBar("g", WorstKept(0.45, place=1), None))
    checkpoints.set_bar(KeepBar("another group", WorstKept(0.0, place=0), None))
    assert told(checkpoints, resident(RULE._replace(place=2)), [0.5, 0.45, 0.44]) == [3]


def test_of_equal_values_that_of_the_trial_submitted_first_is_saved(checkpoints: ResidentCheckpoints) -> None:
    checkpoints.set_bar(KeepBar("g", WorstKept(0.45, place=1), None))
    assert told(checkpoints, resident(RULE._replace(place=0)), [0.5, 0.45, 0.45]) == [2]


def test_a_trial_that_was_restored_must_beat_its_best(checkpoints: ResidentCheckpoints) -> None:
    assert told(checkpoints, resident(RULE._replace(best=0.4)), [0.5, 0.4, 0.39]) == [3]


def test_nothing_is_saved_without_a_rule_or_by_that_of_the_last(checkpoints: ResidentCheckpoints) -> None:
    assert told(checkpoints, resident(None), [0.5]) == told(checkpoints, resident(KeepRule("last", "g")), [0.5]) == []


def test_beyond_the_quota_nothing_is_written(checkpoints: ResidentCheckpoints, tmp_path: Path) -> None:
    assert told(checkpoints, resident(), [0.5]) == [1], "its size was not known"
    checkpoints.set_bar(KeepBar("g", None, 100))
    other = resident(name="b")
    other.iteration = 1
    checkpoints.keep_if_better(other, {"loss": 0.1})
    assert isinstance(other.unsent, TrialNotKept) and other.unsent.reason == QUOTA_USED_UP
    assert not (tmp_path / "trials/b").exists()


def test_a_disk_that_is_almost_full_gets_no_checkpoint(
    checkpoints: ResidentCheckpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(total=1 << 40, free=(1 << 30) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    answer = checkpoints.keep(resident(KeepRule("last", "g")))
    assert isinstance(answer, TrialNotKept)
    assert answer.reason == f"the disk of {tmp_path} is almost full: 1,073,741,823 bytes are free"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk._replace(free=1 << 30))
    assert isinstance(checkpoints.keep(resident()), TrialSaved)


def test_the_last_state_for_which_the_disk_has_no_room_goes_to_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    StoreLedger(str(memory)).create(10**6, 10**6)
    nothing: Any = None
    options = LaneOptions(0, run_folder=str(run), memory_folder=str(memory))
    checkpoints = ResidentCheckpoints(options, VirtualClock(), nothing, nothing, lambda resident: None)
    room = shutil.disk_usage(tmp_path)._replace(total=1 << 40, free=1 << 40)
    full = room._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full if folder == str(run) else room)
    trial = resident(KeepRule("last", "g"))
    trial.iteration = 4
    answer = checkpoints.keep(trial)
    assert isinstance(answer, TrialNotKept) and "stays in host memory" in answer.reason
    persist_checkpoints(str(memory), str(run), temporary=False)
    assert [path.name[:8] for path in run.glob("trials/a/checkpoints/*")] == ["00000004"]


@pytest.mark.parametrize(("error", "again"), [(OSError(errno.ENOSPC, "full"), True), (RuntimeError("no"), False)])
def test_a_trial_that_cannot_be_saved_goes_on(
    checkpoints: ResidentCheckpoints, error: BaseException, again: bool
) -> None:
    trial = resident()
    body: Any = trial.body
    body.error = error
    trial.iteration = 1
    checkpoints.keep_if_better(trial, {"loss": 0.5})
    assert isinstance(trial.unsent, TrialNotKept) and str(error) in trial.unsent.reason
    body.error, trial.unsent = None, None
    assert told(checkpoints, trial, [0.4]) == ([2] if again else [])
