"""The end of a session or a sweep by a deadline or its money, on the virtual clock: each trial by its own forecast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import Device, FluidExecutor, LimitReachedError, Trial, TrialGroup
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.rehearsal import ReplayedIteration
from fluid.search import uniform

#: Virtual seconds after which a test gives up.
PATIENCE = 1e5
#: Trials, their iterations, the devices, and deadlines that suffice: an iteration takes 50 s.
TABLE = [
    *((16, 2, 4, float(limit)) for limit in (402, 410, 440, 460, 480, 500, 600)),
    *((4, 2, 4, float(limit)) for limit in (102, 105, 110, 130, 160, 250)),
    *((16, 1, 4, float(limit)) for limit in (202, 205, 260)),
    *((3, 9, 1, float(limit)) for limit in (1352, 1400)),
]


class Replayed:
    """Its config says how long an iteration takes."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["x"] + 1.0 / i}, config["seconds"]) for i in iterations]


def unused(config: dict[str, Any], state: Any = None) -> Iterator[tuple[dict[str, Any], Any]]:
    raise AssertionError("no code runs")
    yield {}, None


def rehearsed(folder: Path, devices: int, **options: Any) -> FluidExecutor:
    return FluidExecutor("simulated", devices, packing="off", max_width=1, run_dir=folder / "run", verbose=0, **options)


def simulated(folder: Path, devices: int, **options: Any) -> FluidExecutor:
    backend = SimulatedBackend(lambda _, config: Truth(config["seconds"]), map(Device, range(devices)), held=True)
    return FluidExecutor(backend, packing="off", max_width=1, run_dir=folder / "run", verbose=0, **options)


def group(*trials: tuple[float, int], name: str = "t") -> TrialGroup:
    """Trials "t0", "t1" ... of so many seconds an iteration, and so many iterations."""
    return TrialGroup(
        [
            Trial(unused, {"seconds": seconds}, budget=budget, trial_id=f"{name}{number}", profile_key=f"{seconds:g} s")
            for number, (seconds, budget) in enumerate(trials)
        ]
    )


def journal(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "journal.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["what"] == what]


def iterations(folder: Path) -> dict[str, list[float]]:
    """When each trial ended its iterations."""
    found: dict[str, list[float]] = {}
    for entry in journal(folder, "IterationReported"):
        found.setdefault(entry["trial_id"], []).append(entry["at"])
    return found


@pytest.mark.parametrize(("trials", "budget", "devices", "deadline"), TABLE)
@pytest.mark.parametrize("own", [True, False])
def test_a_sweep_that_fits_ends_whole(
    trials: int, budget: int, devices: int, deadline: float, own: bool, tmp_path: Path
) -> None:
    """By the deadline of the sweep in an executor that stays, and by that of the session itself."""
    space = {"seconds": 50.0, "x": uniform(0.0, 1.0)}
    given = {"deadline": deadline} if own else {}
    with rehearsed(tmp_path, devices, **({} if own else {"deadline": deadline})) as executor:
        result = fluid.run(
            *(Replayed, space), metric="loss", algorithm="random", samples=trials, budget=budget, **given
        )
        assert [trial.iteration for trial in result.trials] == [budget] * trials
        assert {trial.state for trial in result.trials} == {"DONE"} and not result.notes
        assert executor.session.clock.now() <= deadline


#: Seconds of an iteration, and iterations: of a trial that does not end within 130 s, of one that does, and of one of
#: which not even an iteration does.
UNLIKE = [(30.0, 10), (20.0, 5), (400.0, 2)]


class Unlike:
    """Its config says which of these it is."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        seconds, budget = UNLIKE[config["which"]]
        return [ReplayedIteration({"loss": 1.0 / i}, seconds) for i in iterations if i <= budget]


def test_a_sweep_stops_what_cannot_end_after_the_last_iteration_that_fits(tmp_path: Path) -> None:
    with rehearsed(tmp_path, 3) as executor:
        space = {"which": [0, 1, 2]}
        result = fluid.run(Unlike, space, metric="loss", algorithm="grid", budget=10, deadline=130.0)
        assert executor.session.clock.now() < 450.0, "a trial stops after its iteration"
    assert result.notes == ("The sweep ended early: the deadline of 2 min 10 s has come.",)
    told = [(trial.config["which"], trial.state, trial.iteration) for trial in result.trials]
    assert sorted(told) == [(0, "STOPPED", 4), (1, "DONE", 5), (2, "STOPPED", 1)]
    assert max(at for name, ends in iterations(tmp_path).items() for at in ends if len(ends) > 1) == 120.0


@pytest.mark.parametrize("options", [{"algorithm": "asha"}, {"algorithm": "random", "max_concurrent": 4}])
def test_a_sweep_without_end_starts_nothing_that_would_complete_no_iteration(
    options: dict[str, Any], tmp_path: Path
) -> None:
    space = {"seconds": 30.0, "x": uniform(0.0, 1.0)}
    with rehearsed(tmp_path, 4) as executor:
        result = fluid.run(Replayed, space, metric="loss", samples=500, budget=9, deadline=610.0, **options)
        assert executor.session.clock.now() == 600.0, "the last iteration that fits"
    assert result.notes == ("The sweep ended early: the deadline of 10 min 10 s has come.",)
    assert sum(trial.iteration for trial in result.trials) == 4 * 20, "no device is idle before"
    assert {trial.state for trial in result.trials} <= {"DONE", "STOPPED"}


def test_a_session_saves_what_cannot_end_after_the_last_iteration_that_fits(tmp_path: Path) -> None:
    with simulated(tmp_path, 3, deadline=130.0) as executor:
        handle = executor.submit_trialgroup(group(*UNLIKE))
        with pytest.raises(LimitReachedError) as caught:
            handle.wait(timeout=PATIENCE)
    assert iterations(tmp_path) == {"t0": [30.0, 60.0, 90.0, 120.0], "t1": [20.0, 40.0, 60.0, 80.0, 100.0]}
    assert (caught.value.unfinished, caught.value.unsaved) == (2, ("t2",))
    assert [(entry["trial_id"], entry["at"]) for entry in journal(tmp_path, "ReportEnd")] == [("t1", 100.0)]
    saved = [entry for entry in journal(tmp_path, "TrialSaved") if entry["trial_id"] == "t0"]
    assert [(entry["checkpoint"]["iteration"], entry["checkpoint"]["in_memory"]) for entry in saved] == [(4, False)]
    assert saved[0]["at"] == 120.0, "at the end of the last iteration that fits"


def test_a_slow_trial_is_set_aside_and_the_others_go_on_in_its_place(tmp_path: Path) -> None:
    # Of the slow one no third iteration ends in time; the quick ones run on its device then.
    with simulated(tmp_path, 1, deadline=1000.0, planner="fifo") as executor:
        handle = executor.submit_trialgroup(group((400.0, 9), *[(20.0, 3)] * 3, (20.0, 50)))
        with pytest.raises(LimitReachedError) as caught:
            handle.wait(timeout=PATIENCE)
    assert iterations(tmp_path) == {
        "t0": [400.0, 800.0],
        "t1": [820.0, 840.0, 860.0],
        "t2": [880.0, 900.0, 920.0],
        "t3": [940.0, 960.0, 980.0],
    }
    assert (caught.value.unfinished, caught.value.unsaved) == (2, ())
    assert [entry["trial_id"] for entry in journal(tmp_path, "TrialSetAside")] == ["t0", "t4"]
    states = {trial.trial_id: trial.state for trial in handle.trials}
    assert states == {trial.trial_id: trial.state for trial in fluid.load(tmp_path / "run").trials}
    assert states == {"t0": "UNFINISHED", "t1": "DONE", "t2": "DONE", "t3": "DONE", "t4": "UNFINISHED"}
    # Who goes on with the session finds it as any other that had not ended, and not as one that the user paused.
    backend = SimulatedBackend(lambda _, config: Truth(config["seconds"]), [Device(0)])
    with FluidExecutor.resume(tmp_path / "run", backend=backend, packing="off", verbose=0, deadline=None) as executor:
        (handle,) = executor.handles
        assert handle.wait(timeout=PATIENCE) and set(handle.states.values()) == {"DONE"}
        done = [(result.trial_id, result.iteration) for result in handle.results()]
    assert len(done) == len(set(done)) == 9 + 3 * 3 + 50, "no iteration is repeated, or lost"


def test_the_money_ends_only_what_cannot_end_by_it(tmp_path: Path) -> None:
    # 0.1 cents a second for each of two devices: 402 s of both, 400 s of work.
    with simulated(tmp_path, 2, budget_usd=0.804, price_per_device_hour=3.6) as executor:
        handle = executor.submit_trialgroup(group(*[(50.0, 2)] * 8))
        assert handle.wait(timeout=PATIENCE) and set(handle.states.values()) == {"DONE"}
    facts = json.loads((tmp_path / "run" / "session.json").read_text())
    assert facts["device_s"] <= 804.0


def test_a_session_whose_trials_have_all_ended_at_its_limit_says_nothing_of_it_and_takes_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(tmp_path, 1, deadline=100.2) as executor:  # The last iteration ends while all is saved.
        handle = executor.submit_trialgroup(group((50.0, 2)))
        assert handle.wait(timeout=PATIENCE) and handle.states == {"t0": "DONE"}
        assert journal(tmp_path, "SessionDraining") and "unfinished" not in caplog.text
        with pytest.raises(LimitReachedError, match="the deadline of 1 min 40 s has come"):
            executor.submit_trialgroup(group((1.0, 1), name="late")).wait(timeout=PATIENCE)
