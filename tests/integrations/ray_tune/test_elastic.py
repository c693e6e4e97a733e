"""Trials that Fluid widens under Ray Tune: Tune sees one trial each, with the results of one device."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
import ray.tune  # noqa: E402
from ray.train._internal.storage import StorageContext  # noqa: E402
from ray.tune import Checkpoint, CheckpointConfig  # noqa: E402
from ray.tune.schedulers import (  # noqa: E402
    ASHAScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)

from fluid import FluidExecutor, Trial, TrialGroup, tune  # noqa: E402
from fluid.elastic.state import Snapshot  # noqa: E402
from fluid.integrations.ray_tune.lane.elastic_lane_trial import lane_trial_for  # noqa: E402
from fluid.integrations.ray_tune.lane.lane_trial import (  # noqa: E402
    RESULT,
    SAVED,
    SPEC,
    CheckpointSchedule,
    LaneTrialSpec,
)
from fluid.integrations.ray_tune.serialization import ActorEnvironment, ShippedTrainable, pickle_arguments  # noqa: E402
from fluid.trainables import trial_code  # noqa: E402
from fluid.trainables.trial_code import TrialCode  # noqa: E402

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_elastic import Fitted, TuneFitted, losses  # noqa: E402
from tune_sweeps import Climber, Left, Sweep, sweep  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Seconds of a batch. An iteration takes long enough that widening pays on a slow machine.
SECONDS = 0.06
#: Seconds after which a test gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 120.0
#: A single trial that is done after so many wide iterations.
ALONE = {"lr": 0.01, "seconds": SECONDS, "wide": 12}
SCORE = {"metric": "loss", "mode": "min"}
TIMED = {"time_attr": "training_iteration"}
RATES = [0.02, 0.003, 0.001]


def slow(rate: float) -> Any:
    """Returns the seconds of a batch, with more for the trial of that rate: it runs after the others have ended."""
    return tune.sample_from(lambda config: (4.0 if config["lr"] == rate else 1.0) * SECONDS)


Run = Callable[..., Sweep]


@pytest.fixture(scope="module")
def two(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Two devices of this machine, with at most one trial on each."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, max_packing=1, run_dir=folder, verbose=0) as made:
        warm = [Trial(Fitted, {"lr": 0.01}, budget=1, trial_id=f"warm-{number}") for number in range(2)]
        assert made.submit_trialgroup(TrialGroup(warm)).wait(PATIENCE)  # Both lanes have imported everything.
        yield made


@pytest.fixture
def run(two: FluidExecutor, tmp_path: Path) -> Run:
    """Runs a sweep under Fluid, or without."""

    def run(name: str = "fluid", trainable: Any = TuneFitted, **options: Any) -> Sweep:
        options.setdefault("config", {"lr": tune.grid_search(RATES), "seconds": SECONDS})
        return sweep(trainable, tmp_path / name, None if name == "stock" else two, options)

    return run


def widths(trial: Left) -> set[int]:
    return {row["width"] for row in trial.rows}


def as_alone(trial: Left, iterations: int) -> None:
    """Checks that Tune received each iteration once, in order, with the loss of one device."""
    assert trial.iterations == list(range(1, iterations + 1))
    expected = losses(trial.config["lr"], iterations)
    assert [row["loss"] for row in trial.rows] == pytest.approx(expected, rel=1e-5)
    assert [row["loss"] for row in trial.logged] == [row["loss"] for row in trial.rows]


def go_on(folder: Path, lr: float) -> tuple[int, float]:
    """Runs the iteration after a checkpoint in this process; returns its number and its loss."""
    trial = Fitted()
    trial.setup({"lr": lr})
    trial.load_checkpoint(str(folder))
    loss = float(trial.step()["loss"])
    return trial.iteration, loss


def checkpoints(trial: Left) -> list[Path]:
    return sorted(trial.folder.glob("checkpoint_*"))


def test_the_straggler_of_a_sweep_is_widened_and_stays_one_trial(run: Run) -> None:
    config = {"lr": tune.grid_search(RATES), "seconds": slow(RATES[-1])}
    done = run(
        config=config, stop={"training_iteration": 24}, checkpoint_config=CheckpointConfig(checkpoint_frequency=8)
    )
    assert done.statuses == ["TERMINATED"] * 3
    for trial in done.trials:
        as_alone(trial, 24)
        expected = losses(trial.config["lr"], 25)
        assert [path.name for path in checkpoints(trial)] == [f"checkpoint_00000{number}" for number in range(3)]
        for path, iteration in zip(checkpoints(trial), (8, 16, 24), strict=True):
            assert go_on(path, trial.config["lr"]) == (iteration + 1, pytest.approx(expected[iteration], rel=1e-5))
    assert 2 in widths(done.trials[-1])
    assert len({row["pid"] for row in done.trials[-1].rows}) == 1, "Tune sees rank 0 only"


@pytest.mark.parametrize(
    ("make", "config", "most", "lengths"),
    [
        # The best trial starts last, remains alone, and runs until it has been wide.
        (
            lambda: ASHAScheduler(**TIMED, **SCORE, max_t=900, grace_period=8, reduction_factor=2),
            {"lr": tune.grid_search([0.01, 0.001, 0.0003, 0.02]), "seconds": SECONDS, "wide": 6},
            900,
            {8},
        ),
        # A bracket of two trials, which are never compared, and one of three, of which one is promoted.
        (
            lambda: HyperBandScheduler(**TIMED, **SCORE, max_t=20, reduction_factor=10),
            {"lr": tune.grid_search([0.01, 0.03, *RATES]), "seconds": slow(0.03)},
            20,
            {2, 20},
        ),
    ],
    ids=["asha", "hyperband"],
)
def test_trials_that_are_stopped_and_paused_by_their_scheduler(
    run: Run, make: Any, config: dict[str, Any], most: int, lengths: set[int]
) -> None:
    done = run(config=config, scheduler=make(), stop={"training_iteration": most})
    assert set(done.statuses) == {"TERMINATED"}
    assert {len(trial.rows) for trial in done.trials} >= lengths
    for trial in done.trials:
        as_alone(trial, len(trial.rows))
    assert any(2 in widths(trial) for trial in done.trials)


@pytest.mark.long
def test_a_population_is_the_same_with_and_without_fluid(run: Run) -> None:
    sweeps = []
    for name in ("stock", "fluid"):
        random.seed(5)
        np.random.seed(5)
        population = PopulationBasedTraining(
            **TIMED, **SCORE, perturbation_interval=10, hyperparam_mutations={"lr": [0.003]}, synch=True
        )
        sweeps.append(run(name, scheduler=population, stop={"training_iteration": 20}, reuse_actors=True))
    stock, fluid = sweeps
    assert fluid.configs == stock.configs != [{"lr": rate, "seconds": SECONDS} for rate in RATES], "one was copied"
    for ours, theirs in zip(fluid.trials, stock.trials, strict=True):
        assert ours.iterations == theirs.iterations
        assert [row["loss"] for row in ours.rows] == pytest.approx([row["loss"] for row in theirs.rows], rel=1e-5)
        assert widths(theirs) == {1}
    assert any(2 in widths(trial) for trial in fluid.trials)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_costs_no_result_and_no_checkpoint(run: Run, rank: int, tmp_path: Path) -> None:
    done = run(
        config={**ALONE, "dies": rank, "note": str(tmp_path / "died")},
        checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
        log_to_file=True,
    )
    (trial,) = done.trials
    length = len(trial.rows)
    as_alone(trial, length)
    assert trial.status == "TERMINATED" and trial.failures == 0
    wide = [row for row in trial.rows if row["width"] == 2][2]
    after = trial.rows[wide["training_iteration"]]
    assert (tmp_path / "died").exists() and after["pids"] == [wide["pids"][1 - rank]], "who was left went on"
    assert after["pid"] == wide["pids"][1 - rank], "and is who Tune sees"
    expected = losses(0.01, length + 1)
    found = [go_on(path, 0.01) for path in checkpoints(trial)]
    assert [iteration - 1 for iteration, _ in found] == list(range(2, length + 1, 2)), "none was lost or overwritten"
    assert [loss for _, loss in found] == pytest.approx([expected[iteration - 1] for iteration, _ in found], rel=1e-5)
    lines = (Path(done.analysis.trials[0].storage.trial_working_directory) / "stdout").read_text().splitlines()
    # The iteration in which rank 0 died may have been printed, and is run again.
    printed = [line for line in lines if line.startswith("iteration")]
    assert list(dict.fromkeys(printed)) == [f"iteration {number}" for number in range(1, length + 1)]
    assert len(printed) <= length + 1


def test_a_checkpoint_goes_on_with_and_without_fluid(run: Run) -> None:
    at_end = CheckpointConfig(checkpoint_at_end=True)
    first = run(config=ALONE, checkpoint_config=at_end)
    length = len(first.trials[0].rows)
    second = run(
        "stock",
        config={**ALONE, "wide": 24, "last": length + 2},
        restore=str(checkpoints(first.trials[0])[-1]),
        checkpoint_config=at_end,
    )
    third = run("again", config={**ALONE, "wide": 24}, restore=str(checkpoints(second.trials[0])[-1]))
    rows = [row for done in (first, second, third) for row in done.trials[0].rows]
    assert len(second.trials[0].rows) == 2
    assert [row["loss"] for row in rows] == pytest.approx(losses(0.01, len(rows)), rel=1e-5)
    assert widths(second.trials[0]) == {1} and all(2 in widths(done.trials[0]) for done in (first, third))


def test_a_trial_has_the_width_that_it_requests(run: Run) -> None:
    options = {"config": {"lr": 0.01, "seconds": SECONDS}, "stop": {"training_iteration": 10}}
    (asking,) = run("asking", tune.with_resources(TuneFitted, {"cpu": 2}), **options).trials
    assert widths(asking) == {2}
    as_alone(asking, 10)


def grows(tune_controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> tune.PlacementGroupFactory:
    """A share of a device for three iterations, then two devices."""
    return tune.PlacementGroupFactory([{"CPU": 0.9 if result["training_iteration"] < 3 else 2}])


def test_a_changed_request_changes_the_width(run: Run) -> None:
    options = {"config": {"lr": 0.01, "seconds": SECONDS}, "stop": {"training_iteration": 8}}
    changing = ResourceChangingScheduler(resources_allocation_function=grows)
    (trial,) = run("changing", **options, scheduler=changing, resources_per_trial={"cpu": 0.9}).trials
    assert [row["width"] for row in trial.rows] == [1] * 3 + [2] * 5
    as_alone(trial, 8)


def test_a_trial_that_is_not_elastic_keeps_one_device(run: Run) -> None:
    options = {"config": {"lr": 0.01, "seconds": SECONDS}, "stop": {"training_iteration": 20}}

    class Derived(TuneFitted):  # type: ignore[misc, valid-type]
        """It may hold state that Fluid does not transfer."""

    (derived,) = run("derived", Derived, **options).trials
    assert widths(derived) == {1}
    as_alone(derived, 20)
    (rigid,) = run("rigid", Climber, config={"x": 1.0, "seconds": SECONDS}, stop={"training_iteration": 5}).trials
    assert rigid.iterations == [1, 2, 3, 4, 5]


# -- in this process --------------------------------------------------------------------------------------------


def test_a_new_rank_0_makes_the_checkpoint_that_the_last_one_died_before_reporting(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Tune's Trainable changes to the trial's folder; this restores the folder.
    monkeypatch.setattr(trial_code, "_live", set())
    TrialCode(SimpleNamespace(folder="", trial_id="trial", ask=None)).begin()

    def config(checkpoints: CheckpointSchedule, restore: Any = None) -> dict[str, Any]:
        storage = StorageContext(str(tmp_path), experiment_dir_name="sweep", trial_dir_name="trial")
        arguments = {"config": {"lr": 0.01}, "storage": storage}
        path = storage._get_session_path()
        spec = LaneTrialSpec(arguments=arguments, checkpoints=checkpoints, session_path=path, restore_from=restore)
        return {SPEC: pickle_arguments(spec)}

    lane_trial = lane_trial_for(TuneFitted, ShippedTrainable(TuneFitted, ActorEnvironment.of_driver()))
    gone = ray.tune.Checkpoint.from_directory(str(tmp_path / "gone"))
    host, other = lane_trial(), lane_trial()
    host.setup(config(CheckpointSchedule(every=2)))
    other.setup_to_join(
        config(CheckpointSchedule(), restore=gone)
    )  # What the trial began from is not needed, or is no more.
    host.step()
    other.load_elastic_state(Snapshot.take(host.elastic_state()).state())
    told, kept = host.step(), other.step()
    assert told[SAVED] is not None and kept[SAVED] is None, "only rank 0 writes"
    assert kept[RESULT]["training_iteration"] == 2 and kept[RESULT]["loss"] == told[RESULT]["loss"]
    other._elastic_joined(2, kept)
    assert kept[SAVED] is None, "that iteration was reported"
    other._elastic_joined(1, kept)
    names = [Path(saved.checkpoint.path).name for saved in (told[SAVED], kept[SAVED])]
    assert names == ["checkpoint_000000", "checkpoint_000001"], "an existing checkpoint is not overwritten"
    assert isinstance(kept[SAVED].checkpoint, Checkpoint)
    iteration, loss = go_on(Path(kept[SAVED].checkpoint.path), 0.01)
    assert (iteration, loss) == (3, pytest.approx(losses(0.01, 3)[-1], rel=1e-5))
    for trial in (host, other):
        trial.cleanup()
