"""A run folder as a source of replayed trials."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid.errors import InvalidFieldError, MissingDependencyError
from fluid.rehearsal import Overheads, ReplayedIteration, ReplayedRun, overheads_of, recorded
from fluid.rehearsal.sources import source_by_name
from fluid.search import make_space
from tests.rehearsal.recorded_sweeps import SPACE, Formula, sweep, told

WHOLE = range(1, 28)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ASHA sweep of 64 trials."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    sweep(folder)
    return folder


@pytest.fixture(scope="module")
def source(run: Path) -> ReplayedRun:
    return recorded(run)


def others(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Configs of the space that were not run."""
    rng = np.random.default_rng(seed)
    return [make_space(SPACE).sample(rng) for _ in range(number)]


def losses(played: Any) -> list[float]:
    return [one.metrics["loss"] for one in played]


# -- configs that were run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["asha", "hyperband"])
def test_the_sweep_that_was_recorded_is_the_one_rehearsed(algorithm: str, tmp_path: Path) -> None:
    first = sweep(tmp_path / "first", algorithm=algorithm, samples=24)
    second = sweep(tmp_path / "second", recorded(tmp_path / "first"), algorithm=algorithm, samples=24)
    assert told(tmp_path / "second") == told(tmp_path / "first")
    assert len({trial.iteration for trial in first.trials}) > 1  # Some were stopped early.
    assert second.best.config == first.best.config


def test_more_devices_are_rehearsed_from_the_same_folder(run: Path, source: ReplayedRun, tmp_path: Path) -> None:
    sweep(tmp_path / "truth", devices=3)
    sweep(tmp_path / "rehearsed", source, devices=3)

    def end(folder: Path) -> float:
        at = [json.loads(line)["at"] for line in (folder / "results.jsonl").read_text().splitlines()]
        return max(at)

    # Trials run further than in the recording are guessed: their loss may differ, not their seconds.
    assert end(tmp_path / "rehearsed") == pytest.approx(end(tmp_path / "truth"), rel=0.15)


def test_a_trial_that_was_stopped_goes_on_from_its_last_value(run: Path, source: ReplayedRun) -> None:
    stopped = [trial for trial in fluid.load(run).trials if trial.iteration == 3]
    assert stopped
    for trial in stopped:
        played = source.replay(trial.config, WHOLE)
        assert [one.metrics for one in played[:3]] == [result.metrics for result in trial.results]
        values, spreads = losses(played), [one.spread for one in played]
        assert all(after < before for before, after in itertools.pairwise(values))
        assert values[2] - values[3] < values[1] - values[2]
        assert spreads[:3] == [0.0, 0.0, 0.0]
        assert spreads == sorted(spreads)
        truth = losses(Formula().replay(trial.config, WHOLE))
        assert values[-1] == pytest.approx(truth[-1], abs=0.1)
        assert played[-1].metrics["epoch"] == 26
        assert played[-1].metrics["tag"] == trial.config["act"]
        assert played[-1].seconds == pytest.approx(trial.results[0].seconds)


def test_iterations_asked_for_in_parts_are_those_of_the_whole(run: Path, source: ReplayedRun) -> None:
    for config in (fluid.load(run).trials[3].config, others(1)[0]):
        whole = list(source.replay(config, WHOLE))
        assert [*source.replay(config, range(1, 5)), *source.replay(config, range(5, 28))] == whole


def test_whole_numbers_are_the_same_whether_int_or_float(run: Path, source: ReplayedRun) -> None:
    trial = fluid.load(run).trials[0]
    config = {**trial.config, "layers": float(trial.config["layers"]), "lr": np.float64(trial.config["lr"])}
    assert source.replay(config, range(1, 2))[0].metrics == trial.results[0].metrics


# -- configs that were not run ---------------------------------------------------------------------------------


def test_configs_that_were_not_run_are_guessed(source: ReplayedRun) -> None:
    configs = others(200)
    guessed = [source.replay(config, WHOLE) for config in configs]
    truth = [Formula().replay(config, WHOLE) for config in configs]
    for at in (0, 26):
        guess, true = np.array([losses(each)[at] for each in guessed]), np.array([losses(each)[at] for each in truth])
        assert np.corrcoef(guess, true)[0, 1] > 0.85
        inside = np.abs(guess - true) <= [each[at].spread for each in guessed]
        assert 0.6 <= inside.mean() <= 0.97  # It says 80 %.
    assert abs(np.mean([losses(g)[26] - losses(t)[26] for g, t in zip(guessed, truth, strict=True)])) < 0.05
    for one, true_one in zip(guessed, truth, strict=True):
        values = losses(one)
        assert all(after <= before + 1e-12 for before, after in itertools.pairwise(values))
        assert [each.metrics["epoch"] for each in one] == list(range(27))
        assert set(one[0].metrics["deep"]) == {"accuracy"}
        assert one[5].seconds == pytest.approx(true_one[5].seconds, rel=0.02)
        assert one[5].memory_bytes == pytest.approx(true_one[5].memory_bytes, rel=0.02)


def test_the_same_folder_gives_the_same_guesses(run: Path, source: ReplayedRun) -> None:
    again = recorded(run)
    for config in reversed(others(20)):
        assert again.replay(config, WHOLE) == source.replay(config, WHOLE)


@pytest.mark.slow
def test_draws_differ_by_seed_as_much_as_the_guess_is_uncertain(run: Path, source: ReplayedRun) -> None:
    config = others(1, seed=4)[0]
    drawn = [losses(recorded(run, noise=seed).replay(config, WHOLE))[0] for seed in range(12)]
    assert len(set(drawn)) > 3
    assert recorded(run, noise=5).replay(config, WHOLE) == recorded(run, noise=5).replay(config, WHOLE)
    middle = source.replay(config, WHOLE)[0]
    assert abs(np.median(drawn) - middle.metrics["loss"]) <= 2.0 * middle.spread
    # Draws of 60 configs: half of the range of 80 % of them is the spread.
    sources = [recorded(run, noise=seed) for seed in range(20)]
    shares = []
    for other in others(60):
        values = [losses(each.replay(other, WHOLE))[0] for each in sources]
        low, high = np.quantile(values, (0.1, 0.9))
        shares.append(0.5 * (high - low) / source.replay(other, WHOLE)[0].spread)
    assert np.median(shares) == pytest.approx(1.0, abs=0.15)
    known = fluid.load(run).trials[0]
    assert recorded(run, noise=1).replay(known.config, range(1, 2))[0].metrics == known.results[0].metrics


def test_few_trials_stand_for_the_nearest_config_without_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    sweep(tmp_path / "few", samples=4, algorithm="random")
    few = recorded(tmp_path / "few")
    trial = fluid.load(tmp_path / "few").trials[2]
    config = {**trial.config, "lr": trial.config["lr"] * 1.01}
    (one,) = few.replay(config, range(27, 28))
    assert one.metrics["loss"] == pytest.approx(trial.metrics["loss"])
    assert any(line.startswith("only 4 trials: a config that was not run") for line in few.describe())


def test_what_a_forest_needs_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    source = recorded(run)
    assert len(source.replay(fluid.load(run).trials[0].config, WHOLE)) == 27
    with pytest.raises(MissingDependencyError, match="scikit-learn"):
        source.replay(others(1)[0], WHOLE)
    assert any("cannot be guessed: this needs scikit-learn" in line for line in source.describe())


def test_it_tells_how_well_it_guesses_and_what_lay_outside(run: Path) -> None:
    source = recorded(run)
    text = "\n".join(source.describe())
    assert "64 trials with" in text
    assert "it guesses the loss of configs that were not run within +-0." in text
    assert "rank correlation 0." in text
    assert "left out in turn (those that were stopped before may be further off); their seconds within 0 %" in text
    inside = fluid.load(run).trials[0].config
    for config in (inside, inside, {**inside, "lr": 10.0}, {**inside, "act": "selu"}, {**inside, "fixed": 4}):
        source.replay(config, range(1, 2))
    assert source.describe()[-2:] == [
        "1 of 4 configs were run before; the others are guessed",
        "3 of 4 configs lie outside of what was recorded",
    ]


def test_it_tells_what_the_recording_does_not_have(run: Path) -> None:
    source = recorded(run)
    config = fluid.load(run).trials[0].config
    known = source.replay(config, WHOLE)
    assert not any("stay as they are" in line or "no effect" in line for line in source.describe())
    further = source.replay({**config, "decay": 0.1, "model": {"depth": 3}}, range(27, 31))
    assert [one.metrics["loss"] for one in further] == [pytest.approx(known[-1].metrics["loss"])] * 4
    assert source.describe()[-2:] == [
        "no recorded config has decay, model.depth: taken to have no effect",
        "iterations up to 30 were rehearsed; from 27 on, the last one recorded, metrics stay as they are",
    ]


# -- folders ---------------------------------------------------------------------------------------------------


def test_it_is_a_benchmark(run: Path) -> None:
    source = source_by_name(f"run:{run}")
    assert (source.metric, source.mode, source.max_iterations) == ("loss", "min", 27)
    best = fluid.load(run).best
    assert source.best_known == best.value
    assert source.regret(best.value) == 0.0
    assert source.regret(source.worst_known) == 1.0
    assert set(source.space) == set(SPACE)
    assert source.space["act"].size == 3
    assert source.space["fixed"] == 3
    low, high = source.space["lr"].low, source.space["lr"].high
    assert 1e-5 <= low < 1e-4
    assert 1e-2 < high <= 1e-1
    assert source.space["lr"].log


@pytest.mark.parametrize("number", [2, 9])
def test_a_run_that_reported_no_number(number: int, tmp_path: Path) -> None:
    """Such as one that diverged at once: seconds are replayed, and metrics that are no numbers."""

    def train(config: dict[str, Any]) -> Any:
        yield {}

    def replay(config: dict[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": float("nan"), "name": "a"}, 2.0) for _ in iterations]

    train.replay = replay  # type: ignore[attr-defined]
    trials = [fluid.Trial(train, {"lr": 0.1 * each}, budget=3) for each in range(1, number + 1)]
    with fluid.FluidExecutor(backend="simulated", devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
    source = recorded(tmp_path / "run", metric="loss")
    (one,) = source.replay({"lr": 0.15}, range(2, 3))
    assert (one.metrics, one.spread) == ({"name": "a"}, 0.0)
    assert one.seconds == pytest.approx(2.0)
    why = "only 2 trials" if number == 2 else "no metric is a number"
    assert any(line.startswith(f"{why}: a config that was not run") for line in source.describe())
    assert np.isnan(source.best_known)


def test_several_folders_are_one_source(run: Path, tmp_path: Path) -> None:
    sweep(tmp_path / "more", samples=5, algorithm="random")
    both = recorded([run, tmp_path / "more"])
    for folder in (run, tmp_path / "more"):
        trial = fluid.load(folder).trials[-1]
        assert [one.metrics for one in both.replay(trial.config, range(1, trial.iteration + 1))] == [
            result.metrics for result in trial.results
        ]
    assert len([line for line in both.describe() if ", recorded on " in line]) == 2


def test_a_session_that_was_killed_is_read_as_far_as_it_came(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(run, folder)
    (folder / "profile.json").unlink()
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(lines[:100]) + lines[100][:40])
    killed = recorded(folder)
    one = json.loads(lines[99])
    config = next(trial.config for trial in fluid.load(folder).trials if trial.trial_id == one["trial"])
    (played,) = killed.replay(config, range(one["iteration"], one["iteration"] + 1))
    assert (played.metrics, played.seconds) == (one["metrics"], one["seconds"])
    assert losses(killed.replay(others(1)[0], WHOLE))


def test_a_trial_that_ended_by_itself_ends_when_replayed(tmp_path: Path) -> None:
    class Short:
        def replay(self, config: Any, iterations: range) -> list[ReplayedIteration]:
            return [ReplayedIteration({"loss": config["lr"] / i}, 1.0) for i in iterations if i <= 5]

    def train(config: dict[str, Any]) -> Any:
        yield {}

    train.replay = Short().replay  # type: ignore[attr-defined]
    trials = [fluid.Trial(train, {"lr": lr}, budget=9) for lr in (0.1, 0.2, 0.3)]
    with fluid.FluidExecutor(backend="simulated", devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
    source = recorded(tmp_path / "run")
    assert len(source.replay({"lr": 0.2}, range(1, 10))) == 5
    assert len(source.replay({"lr": 0.25}, range(1, 10))) == 5
    assert len(source.replay({"lr": 0.25}, range(6, 10))) == 0


def test_seconds_of_trials_that_shared_a_device_are_those_alone(tmp_path: Path) -> None:
    costs = Overheads(alpha=1.2)
    sweep(tmp_path / "packed", samples=12, algorithm="random", devices=2, overheads=costs)
    widths = {result.width for trial in fluid.load(tmp_path / "packed").trials for result in trial.results}
    assert min(widths) < 1.0
    source = recorded(tmp_path / "packed")
    assert source.overheads.alpha == pytest.approx(1.2, rel=0.1)
    assert "alpha (packing) 1.2" in source.overheads.source
    shares = []
    for trial in fluid.load(tmp_path / "packed").trials:
        played, truth = source.replay(trial.config, WHOLE), Formula().replay(trial.config, WHOLE)
        shares.append(sum(one.seconds for one in played) / sum(one.seconds for one in truth))
    assert np.median(shares) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("what", ["missing", "empty", "unfinished", "newer"])
def test_folders_that_cannot_be_replayed_are_refused(what: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what in ("unfinished", "newer"):
        (folder / "results.jsonl").touch()
    if what == "newer":
        (folder / "session.json").write_text('{"format": 99}')
    with pytest.raises(InvalidFieldError, match="run_dir"):
        recorded(folder)
    with pytest.raises(InvalidFieldError):
        overheads_of(folder / "none")


@pytest.mark.parametrize("options", [{"run_dir": []}, {"run_dir": 3}, {"noise": -1}, {"metric": 3}])
def test_bad_arguments_are_refused(options: dict[str, Any], run: Path) -> None:
    with pytest.raises(InvalidFieldError):
        recorded(**{"run_dir": run, **options})
