"""One test per private name of Ray Tune: a release that moved one fails here by that name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.tune")

from ray.tune import Trainable
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
)
from tune_simulation import TIMED, Controller, a_population, replay

from fluid.integrations.ray_tune import private_api
from fluid.integrations.ray_tune.private_api import UnsupportedRayError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

SCHEDULERS = {
    ASHAScheduler: lambda: ASHAScheduler(**TIMED),
    HyperBandScheduler: lambda: HyperBandScheduler(**TIMED),
    MedianStoppingRule: lambda: MedianStoppingRule(**TIMED),
    PopulationBasedTraining: a_population,
}


@pytest.fixture(scope="module")
def controller(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Tune's own controller, as schedulers receive it."""
    from ray import tune

    met: list[Any] = []

    class Meets(FIFOScheduler):  # type: ignore[misc]
        def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
            met.append(private_api.controller_of(tune_controller))

    folder = str(tmp_path_factory.mktemp("tune"))
    tune.run(lambda config: {"score": 1}, scheduler=Meets(), storage_path=folder, verbose=0)
    yield met[0]


@pytest.mark.parametrize("name", private_api.CONTROLLER)
def test_the_controller_has(name: str, controller: Any) -> None:
    assert hasattr(controller, name)


@pytest.mark.parametrize("name", private_api.MANAGER)
def test_the_actor_manager_has(name: str, controller: Any) -> None:
    assert hasattr(controller._actor_manager, name)


@pytest.mark.parametrize("name", private_api.TRACKED_ACTOR)
def test_a_tracked_actor_has(name: str) -> None:
    assert hasattr(private_api.TrackedActor(0), name)


@pytest.mark.parametrize("name", private_api.TRIAL)
def test_a_trial_has(name: str) -> None:
    assert hasattr(Trial, name)


@pytest.mark.parametrize("name", private_api.TRAINABLE)
def test_a_trainable_has(name: str) -> None:
    class Small(Trainable):  # type: ignore[misc]
        def step(self) -> dict[str, int]:
            return {}

    assert hasattr(Small({}), name)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in private_api.SCHEDULERS.items() for name in names]
)
def test_a_scheduler_has(kind: type, name: str, tmp_path: Path) -> None:
    makers = {**SCHEDULERS, PopulationBasedTrainingReplay: lambda: replay(tmp_path, [2])}
    [make] = [make for known, make in makers.items() if issubclass(known, kind)]
    assert hasattr(make(), name)


def added(scheduler: Any) -> tuple[Any, Trial]:
    controller = Controller(scheduler)
    return scheduler, controller.add()


@pytest.mark.parametrize("name", private_api.ASHA_BRACKET)
def test_a_bracket_of_asha_has(name: str) -> None:
    scheduler, trial = added(ASHAScheduler(**TIMED))
    assert hasattr(scheduler._trial_info[trial.trial_id], name)


@pytest.mark.parametrize("name", private_api.HYPERBAND_BRACKET)
def test_a_bracket_of_hyperband_has(name: str) -> None:
    scheduler, trial = added(HyperBandScheduler(**TIMED))
    assert hasattr(scheduler._trial_info[trial][0], name)


@pytest.mark.parametrize("name", private_api.POPULATION_MEMBER)
def test_a_member_of_a_population_has(name: str) -> None:
    scheduler, trial = added(a_population())
    assert hasattr(scheduler._trial_state[trial], name)


def test_this_release_has_every_name(controller: Any) -> None:
    private_api.check(controller, ASHAScheduler(**TIMED))


def test_a_missing_name_is_reported_with_the_supported_releases(controller: Any) -> None:
    lacking = SimpleNamespace(
        **{name: getattr(controller, name) for name in private_api.CONTROLLER if name != "_stopper"}
    )
    with pytest.raises(UnsupportedRayError, match=r"TuneController\._stopper: Fluid runs under Ray Tune 2\.9 to 2\.60"):
        private_api.check(lacking, FIFOScheduler())


@pytest.mark.slow
def test_a_wrapper_without_a_controller_is_refused() -> None:
    with pytest.raises(UnsupportedRayError, match="_tune_controller"):
        private_api.controller_of(SimpleNamespace())


@pytest.mark.slow
def test_releases_before_2_43_are_imported() -> None:
    """Ray 2.9 to 2.42 have neither ``ray.tune.Checkpoint`` nor the name of the variable with callbacks."""
    program = """
import ray.train, ray.tune, ray.tune.constants
del ray.tune.Checkpoint, ray.tune.constants.RAY_TUNE_CALLBACKS_ENV_VAR
from fluid.integrations.ray_tune import drop_in, private_api
assert private_api.Checkpoint is ray.train.Checkpoint
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
