"""Reading on in a run folder that grows gives what a fresh reading of it gives."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_patches import patched, shown
from page_runs import write_sweep

from fluid.engine.events import GroupRecovered, TrialHistory, TrialSpec
from fluid.errors import InvalidFieldError
from fluid.reports.page.data import page_data
from fluid.reports.page.patch import PageDrawer
from fluid.reports.run.loader import RunReader, load_run
from fluid.reports.run.run import RecordedRun
from fluid.trialgroup import Search, Shown, Trial

Sessions = Callable[..., Any]
#: What patches leave as it was.
_SLOW = {"drawn", "busy_share", "busy_text", "devices_text", "idle", "lanes", "hosts", "placements", "segments"}
_SLOW |= {"blocks", "absent", "busy", "pareto", "facts"}
#: In these journals devices do not arrive: for how long they were held is told by the timeline.
_SLOW |= {"costs", "cost"}
_GROWING = ("trials.jsonl", "journal.jsonl", "results.jsonl")


class Growing:
    """A copy of a run folder that grows to the whole, cut anywhere.

    Args:
        whole: the folder.
        path: of the copy.
        rng: chooses the cuts.
    """

    def __init__(self, whole: Path, path: Path, rng: random.Random) -> None:
        self._whole, self._path, self._rng = whole, path, rng
        path.mkdir()
        for file in whole.iterdir():
            if file.is_file() and file.name not in _GROWING:
                shutil.copy(file, path)
        (path / "results.jsonl").touch()

    def grow(self, share: float) -> None:
        """Lets each file grow by a random part of what is missing, up to ``share`` of it."""
        for name in _GROWING:
            content, file = (self._whole / name).read_bytes(), self._path / name
            have = file.stat().st_size if file.exists() else 0
            more = round((len(content) - have) * (1.0 if share == 1.0 else self._rng.uniform(0.0, share)))
            with file.open("ab") as added:
                added.write(content[have : have + more])


def same_but_for_the_timeline(one: RecordedRun, other: RecordedRun) -> None:
    for name in ("session", "groups", "keys", "notes", "clock", "is_running"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.makespan, one.wall) == (other.makespan, other.wall)


def resumed(session: Sessions) -> Path:
    """A session that was resumed after its machine restarted, with trials that a search shows under one name."""
    made = session({}, name="resumed", clock={"at": 4999.0, "time": "2026-01-31 12:34:56"})
    stages = [
        Trial(print, {"lr": k}, budget=3, trial_id=f"t{k}-{stage}", shown=Shown(f"t{k}", {"lr": k}, stage * 3, "m"))
        for k in range(3)
        for stage in range(2)
    ]
    made.submit("sweep", stages, Search("loss", "min", 3))
    made.results(
        *(
            (f"t{k}-0", n, 10.0 * k + 2 * n - 2, 10.0 * k + 2 * n, 1.0, (k % 2,), {"m": {"loss": k - 0.1 * n}})
            for k in range(3)
            for n in range(1, 4)
        )
    )
    specs = tuple(TrialSpec(trial.id, trial.budget) for trial in stages)
    made.happened(GroupRecovered(-4000.0, "0", tuple(TrialHistory(spec, reported=3, budget=3) for spec in specs)))
    made.results(
        *(
            (f"t{k}-1", n, -3900.0 + 2 * n, -3898.0 + 2 * n, 1.0, (k,), {"m": {"loss": -0.1 * n, "other": n}})
            for k in range(3)
            for n in range(1, 4)
        )
    )
    for k in range(3):
        made.end(f"t{k}-1", "DONE", 3)
    return Path(made.close())


@pytest.fixture(params=["sweep", "small", "resumed"])
def whole(request: pytest.FixtureRequest, session: Sessions, small_run: Path) -> Path:
    """A run folder."""
    if request.param == "sweep":
        return write_sweep(session, "sweep", 30, failed=3)
    return small_run if request.param == "small" else resumed(session)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_as_a_fresh_reading_after_each_step(whole: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    growing = Growing(whole, tmp_path / "growing", rng)
    growing.grow(rng.random())
    reader = RunReader(tmp_path / "growing")
    assert reader.read() == load_run(tmp_path / "growing")
    steps = 0
    for share in [rng.choice([0.05, 0.3]) for _ in range(12)] + [1.0]:
        growing.grow(share)
        fresh, run = load_run(tmp_path / "growing"), reader.read_on()
        if run is None or rng.random() < 0.3:
            assert reader.read() == fresh
        else:
            same_but_for_the_timeline(run, fresh)
            steps += 1
    assert reader.read() == load_run(tmp_path / "growing")
    assert steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_patched_page_is_as_one_drawn_anew(whole: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    growing = Growing(whole, tmp_path / "growing", rng)
    growing.grow(0.7)
    reader, drawer = RunReader(tmp_path / "growing"), PageDrawer()
    data = shown(drawer.draw([reader.read()], []))
    steps = 0
    for share in [rng.choice([0.05, 0.3]) for _ in range(12)] + [1.0]:
        growing.grow(share)
        run = reader.read_on()
        patch = None if run is None else drawer.patch([run])
        fresh = shown(page_data([load_run(tmp_path / "growing")], live=True))
        if patch is None:
            data = shown(drawer.draw([reader.read()], []))
            assert data == fresh
            continue
        steps += 1
        data = patched(data, json.loads(json.dumps(patch)))
        assert [quick(trial) for trial in data["trials"]] == [quick(trial) for trial in fresh["trials"]]
        assert [data[name] for name in ("metrics", "parameters")] == [fresh[name] for name in ("metrics", "parameters")]
        for name in data["runs"][0].keys() - _SLOW:
            assert data["runs"][0][name] == fresh["runs"][0][name], name
    assert steps
    assert shown(drawer.draw([reader.read()], [])) == fresh


def quick(trial: dict[str, Any]) -> dict[str, Any]:
    """What a patch tells of each trial at once: all but stories, which those of others may change."""
    return {name: value for name, value in trial.items() if name != "story"}


@pytest.mark.slow
def test_a_file_that_was_replaced_is_read_anew(session: Sessions, tmp_path: Path) -> None:
    whole = write_sweep(session, "sweep", 5)
    reader = RunReader(whole)
    reader.read()
    other = write_sweep(session, "other", 6, seed=1)
    for name in _GROWING:
        shutil.copy(other / name, whole / name)
    assert reader.read_on() is None
    assert reader.read().groups == load_run(whole).groups
    (whole / "results.jsonl").write_bytes(b"")
    assert reader.read_on() is None
    assert reader.read() == load_run(whole)
    shutil.rmtree(whole)
    assert reader.read_on() is None
    with pytest.raises(InvalidFieldError, match="does not exist"):
        reader.read()
