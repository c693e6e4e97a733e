"""Studies of Optuna rehearsed: its samplers and pruners decide, trials are replayed, and its clocks are virtual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.optuna import optimize
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing

optuna = pytest.importorskip("optuna")

from optuna.distributions import FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from same_study import everything  # noqa: E402

SPACE = {"x": FloatDistribution(0.0, 4.0), "width": IntDistribution(1, 8)}
BUDGET = 9


def loss_of(config: Mapping[str, Any], iteration: int) -> float:
    return float((config["x"] - 2.0) ** 2 + config["width"] / iteration)


class Curve:
    """A trainable that can only be replayed: a wide one takes longer."""

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        seconds = 60.0 + 7.0 * config["width"]
        return [ReplayedIteration({"loss": loss_of(config, i), "width": config["width"]}, seconds) for i in iterations]


class Objective:
    """A plain objective, which can also be replayed."""

    budget = BUDGET

    def __call__(self, trial: Any) -> float:
        config = self.suggest(trial)
        for step in range(BUDGET):
            loss = loss_of(config, step + 1)
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    def suggest(self, trial: Any) -> Mapping[str, Any]:
        return {"x": trial.suggest_float("x", 0.0, 4.0), "width": trial.suggest_int("width", 1, 8)}

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"value": loss_of(config, i)}, 60.0) for i in iterations]


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    raise AssertionError("it is not to run")
    yield {}


def returned(trial: Any) -> float:
    return float(trial.suggest_float("x", 0.0, 4.0))


def rehearse(study: Any, trainable: Any = None, devices: int = 4, **options: Any) -> float:
    """Optimizes; returns the virtual seconds that it took."""
    settings = {"space": SPACE, "metric": "loss", "budget": BUDGET, "n_trials": 24, **options}
    with FluidExecutor(backend="simulated", devices=devices, max_width=1, packing="off", verbose=0) as executor:
        optimize(study, Curve() if trainable is None else trainable, executor=executor, **settings)
        return executor.session.clock.now()


def timeline(study: Any) -> list[tuple[float, float]]:
    """When each trial began and ended, seconds since the first one began."""
    first = study.trials[0].datetime_start
    return [
        ((trial.datetime_start - first).total_seconds(), (trial.datetime_complete - first).total_seconds())
        for trial in study.trials
    ]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=6, constant_liar=True),
    "qmc": lambda: optuna.samplers.QMCSampler(seed=3),
    "nsga": lambda: optuna.samplers.NSGAIISampler(seed=3, population_size=6),
}
PRUNERS: dict[str, Callable[[], Any]] = {
    "none": lambda: optuna.pruners.NopPruner(),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
}


def study_of(sampler: str = "tpe", pruner: str = "hyperband", **options: Any) -> Any:
    """A study of a fixed name, from which the brackets of Hyperband follow."""
    settings = {"study_name": "rehearsed", "sampler": SAMPLERS[sampler](), "pruner": PRUNERS[pruner](), **options}
    return optuna.create_study(**settings)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(("sampler", "pruner"), [*zip(SAMPLERS, PRUNERS, strict=True), ("tpe", "hyperband")])
def test_the_same_seed_gives_the_same_study(sampler: str, pruner: str) -> None:
    studies = [study_of(sampler, pruner) for _ in range(3)]
    took = [rehearse(study) for study in studies]
    assert took[0] > 0.0
    for again, study in zip(took, studies, strict=True):
        assert again == took[0]
        assert everything(study) == everything(studies[0])
        assert timeline(study) == timeline(studies[0])


@pytest.mark.slow
def test_each_trial_has_its_virtual_time(tmp_path: Path) -> None:
    for storage in (None, f"sqlite:///{tmp_path / 'study.db'}"):
        study = study_of("random", "none", storage=storage)
        took = rehearse(study, devices=1, n_trials=4)
        seconds = [BUDGET * (60.0 + 7.0 * trial.params["width"]) for trial in study.trials]
        assert [trial.duration for trial in study.trials] == [timedelta(seconds=each) for each in seconds]
        assert took == pytest.approx(sum(seconds))
        ends = [end for _, end in timeline(study)]
        assert ends == [sum(seconds[: number + 1]) for number in range(4)]


def test_a_journal_has_virtual_times(tmp_path: Path) -> None:
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
    study = study_of("random", "none", storage=storage)
    rehearse(study, devices=1, n_trials=2)
    assert [trial.duration.total_seconds() for trial in study.trials] == [
        BUDGET * (60.0 + 7.0 * trial.params["width"]) for trial in study.trials
    ]


def test_storages_have_their_clock_back() -> None:
    study = study_of("random", "none")
    rehearse(study, n_trials=2)
    before = study.ask().datetime_start
    assert before is not None
    assert abs((before - optuna.create_study().ask().datetime_start).total_seconds()) < 60.0


def test_the_timeout_is_of_the_virtual_clock() -> None:
    study = study_of("random", "none")
    took = rehearse(study, devices=2, n_trials=None, timeout=4 * 3600.0)
    starts = [start for start, _ in timeline(study)]
    assert max(starts) < 4 * 3600.0 < took
    assert len(starts) > 20  # Of about half an hour each, two at a time.


@pytest.mark.parametrize("options", [{"batch_size": 6}, {"n_jobs": 3}, {"n_jobs": 1}], ids=str)
def test_batches_and_jobs(options: dict[str, Any]) -> None:
    study = study_of("random", "none")
    rehearse(study, devices=6, n_trials=12, **options)
    times = timeline(study)
    at_once = max(sum(start <= begun < end for start, end in times) for begun, _ in times)
    assert at_once == next(iter(options.values()))
    if "batch_size" in options:
        assert min(start for start, _ in times[6:]) == max(end for _, end in times[:6])


def test_callbacks_run_at_the_end_of_each_trial() -> None:
    seen: list[tuple[int, Any]] = []

    def note(study: Any, trial: Any) -> None:
        seen.append((trial.number, trial.datetime_complete))
        if len(seen) == 5:
            study.stop()

    study = study_of("random", "none")
    rehearse(study, devices=1, callbacks=[note])
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert [end for _, end in seen] == [trial.datetime_complete for trial in study.trials]


@pytest.mark.parametrize("pruner", ["median", "halving", "hyperband"])
def test_an_objective_that_can_be_replayed_does_as_study_optimize_does(pruner: str) -> None:
    expected, got = study_of("tpe", pruner), study_of("tpe", pruner)
    expected.optimize(Objective(), n_trials=16)
    nothing = {"space": None, "metric": None, "budget": None}
    rehearse(got, Objective(), n_trials=16, n_jobs=1, **nothing)
    assert everything(got) == everything(expected)
    assert TrialState.PRUNED in {trial.state for trial in got.trials}
    assert got.trials[0].duration == timedelta(seconds=60.0 * BUDGET)


def test_an_objective_of_several_values_without_reports() -> None:
    def both(trial: Any) -> tuple[float, float]:
        raise AssertionError("it is not to run")

    both.suggest = lambda trial: {"x": trial.suggest_float("x", 0.0, 4.0)}  # type: ignore[attr-defined]
    both.replay = lambda config, iterations: [  # type: ignore[attr-defined]
        ReplayedIteration({"values_0": config["x"], "values_1": -config["x"]}, 30.0) for _ in iterations
    ]
    study = optuna.create_study(directions=["minimize", "maximize"])
    assert rehearse(study, both, space=None, metric=None, budget=None, n_trials=3, devices=3) == pytest.approx(30.0)
    assert [trial.values for trial in study.trials] == [[t.params["x"], -t.params["x"]] for t in study.trials]


def test_what_cannot_be_replayed_is_refused_at_the_call(tmp_path: Path) -> None:
    nothing = {"space": None, "metric": None, "budget": None}
    study = study_of()
    with pytest.raises(InvalidFieldError, match=r"suggests while it trains.*suggest\(trial\).*replay"):
        rehearse(study, returned, **nothing)
    with pytest.raises(InvalidFieldError, match=r"cannot be rehearsed.*replay\(config, iterations\)"):
        rehearse(study, train)
    assert not study.trials
    with rehearsing(RehearsalPlan(source=Curve(), folder=tmp_path)):
        rehearse(study, train, n_trials=2)
        with pytest.raises(InvalidFieldError, match="suggests while it trains"):
            rehearse(study, returned, **nothing)
    assert len(study.trials) == 2


def test_a_callback_may_optimize_another_study() -> None:
    inner = study_of("random", "none", study_name="inner")

    def optimize_another(study: Any, trial: Any) -> None:
        if trial.number == 0:
            rehearse(inner, devices=1, n_trials=1)

    study = study_of("random", "none")
    rehearse(study, devices=1, n_trials=2, callbacks=[optimize_another])
    for trial in (*study.trials, *inner.trials):
        assert trial.duration == timedelta(seconds=BUDGET * (60.0 + 7.0 * trial.params["width"]))
