"""Studies of functions, as Optuna's examples have them: the same on Fluid, with one changed line."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
np = pytest.importorskip("numpy")

from optuna.trial import TrialState  # noqa: E402
from same_study import assert_same  # noqa: E402

from fluid.integrations.optuna import optimize  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*has been deprecated:FutureWarning"
)


def seeded(**options: Any) -> Any:
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=7), **options)


def bowl(trial: Any) -> float:
    """A continuous and a whole parameter."""
    x = trial.suggest_float("x", -100.0, 100.0)
    y = trial.suggest_int("y", -5, 5)
    return float(x * x + 3 * y)


@pytest.mark.slow
def test_a_quadratic_function() -> None:
    study = assert_same(seeded, bowl, 30)
    assert study.best_value < 1000.0


@pytest.mark.slow
def test_a_quadratic_function_with_a_constraint() -> None:
    def allowed(trial: Any) -> tuple[float]:
        return (trial.user_attrs["excess"],)

    def make() -> Any:
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=7, constraints_func=allowed))

    def objective(trial: Any) -> float:
        x, y = (trial.suggest_float(name, -15.0, 30.0) for name in "xy")
        trial.set_user_attr("excess", 4.0 - (x + y))
        return float((x - 1.0) ** 2 + y**2)

    assert_same(make, objective, 25)


@pytest.mark.slow
def test_two_quadratic_functions() -> None:
    def objective(trial: Any) -> tuple[float, float]:
        x, y = trial.suggest_float("x", 0.0, 5.0), trial.suggest_float("y", 0.0, 3.0)
        return 4 * x**2 + 4 * y**2, (x - 5) ** 2 + (y - 5) ** 2

    def make() -> Any:
        sampler = optuna.samplers.NSGAIISampler(seed=7, population_size=6)
        return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)

    assert assert_same(make, objective, 24).best_trials


def test_trials_that_are_enqueued() -> None:
    def make() -> Any:
        study = seeded()
        study.enqueue_trial({"x": 1.0, "y": -5})
        study.enqueue_trial({"x": 0.5})
        return study

    study = assert_same(make, bowl, 8)
    assert study.trials[0].value == -14.0


def test_a_limit_of_completed_trials() -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", -1.0, 1.0)
        if x < 0.0:
            raise optuna.TrialPruned
        return float(x)

    limit = optuna.study.MaxTrialsCallback(5, states=(TrialState.COMPLETE,))
    study = assert_same(seeded, objective, 100, callbacks=[limit])
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 5


def test_artifacts(tmp_path: Path) -> None:
    from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact

    store = FileSystemArtifactStore(str(tmp_path))

    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        path = tmp_path / f"note-{trial.number}.txt"
        path.write_text(repr(x), encoding="utf-8")
        artifact = upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
        trial.set_user_attr("artifact", artifact)
        return float(x)

    study = seeded()
    optimize(study, objective, n_trials=4, n_jobs=1)
    for trial in study.trials:
        assert (tmp_path / trial.user_attrs["artifact"]).read_text() == repr(trial.params["x"])
        assert len(get_all_artifact_meta(trial, storage=study._storage)) == 1


class Annealing(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Simulated annealing: a step from the current point, which the last trial moves if it is better, or by chance."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)
        self._fallback = optuna.samplers.RandomSampler(seed=seed)
        self._temperature = 100.0
        self._current: Any = None

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not search_space or not done:
            return {}
        last = done[-1]
        rise = 0.0 if self._current is None else last.value - self._current.value
        if rise <= 0.0 or self._random.rand() < math.exp(-rise / self._temperature):
            self._current = last
        self._temperature *= 0.9
        step = {}
        for name, space in search_space.items():
            width = 0.1 * (space.high - space.low)
            low = max(space.low, self._current.params[name] - width)
            step[name] = self._random.uniform(low, min(space.high, self._current.params[name] + width))
        return step

    def sample_independent(self, study: Any, trial: Any, name: str, space: Any) -> Any:
        return self._fallback.sample_independent(study, trial, name, space)


def test_a_sampler_of_the_users_own() -> None:
    def objective(trial: Any) -> float:
        x, y = trial.suggest_float("x", -10.0, 10.0), trial.suggest_float("y", -5.0, 5.0)
        return float(x**2 + y)

    assert_same(lambda: optuna.create_study(sampler=Annealing(seed=7)), objective, 25)


@pytest.mark.slow
def test_annealing_of_tours_under_the_wilcoxon_pruner() -> None:
    cities = np.random.RandomState(0).rand(6, 12, 2)

    def length(places: Any, tour: list[int]) -> float:
        return float(sum(np.linalg.norm(places[a] - places[b]) for a, b in zip(tour, tour[1:] + tour[:1], strict=True)))

    def anneal(places: Any, start: float, cooling: float, seed: int) -> float:
        draws = random.Random(seed)
        tour = list(range(len(places)))
        current = best = length(places, tour)
        for step in range(60):
            first, last = sorted(draws.sample(range(len(tour)), 2))
            other = tour[:first] + tour[first : last + 1][::-1] + tour[last + 1 :]
            new = length(places, other)
            if new < current or draws.random() < math.exp((current - new) / (start * cooling**step)):
                tour, current = other, new
                best = min(best, current)
        return best

    def objective(trial: Any) -> float:
        start = trial.suggest_float("start", 0.01, 10.0, log=True)
        cooling = trial.suggest_float("cooling", 0.8, 0.999)
        lengths = []
        for instance in np.random.RandomState(trial.number).permutation(len(cities)):
            lengths.append(anneal(cities[instance], start, cooling, int(instance)))
            trial.report(lengths[-1], int(instance))
            if trial.should_prune():
                return sum(lengths) / len(lengths)
        return sum(lengths) / len(lengths)

    assert_same(lambda: seeded(pruner=optuna.pruners.WilcoxonPruner(p_threshold=0.2)), objective, 10)
