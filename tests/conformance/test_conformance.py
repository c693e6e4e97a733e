"""The conformance suite on every backend of Fluid, whether trials share lanes or not.

On the simulated backend time is virtual; on the others trials run in processes and sleep for their iterations.

The two devices of the Ray backend are on two nodes, the driver's and another machine's. Part of the suite also runs on
four nodes, two of them at the driver's address: what starts many trials, moves them, or ends a lane. The rest would
show there what it shows on two, and four nodes cost memory and time.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.backends.base import Backend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import ReportEnd, StartTrial
from fluid.engine.events import (
    Event,
    GroupSubmitted,
    LaneReady,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
)
from fluid.lane.checkpoints.seal import damage_of
from fluid.resources import Device
from fluid.testing.backends import BackendConformance
from fluid.testing.trainables import Sleeper
from fluid.trainables.payload import payload_of


def stateful(config: dict[str, Any], state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Sleeps for each iteration; its state is the number of them."""
    steps = state or 0
    while True:
        time.sleep(config["seconds"])
        steps += 1
        yield {"step": steps}, steps


def reporting_to_tune(config: dict[str, Any]) -> None:
    """Sleeps for each iteration, and reports a checkpoint of each to Ray Tune."""
    import tempfile

    from ray import tune

    steps, checkpoint = 0, tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            steps = json.loads((Path(folder) / "steps.json").read_text())
    while True:
        time.sleep(config["seconds"])
        steps += 1
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "steps.json").write_text(json.dumps(steps))
            tune.report({"step": steps}, checkpoint=tune.Checkpoint.from_directory(folder))


def reporting_to_fluid(config: dict[str, Any]) -> None:
    """Sleeps for each iteration, and can save the number of them."""
    folder = fluid.get_checkpoint()
    steps = 0 if folder is None else json.loads((folder / "steps.json").read_text())

    def save(to: Path) -> None:
        (to / "steps.json").write_text(json.dumps(steps))

    while True:
        time.sleep(config["seconds"])
        steps += 1
        fluid.report({"step": steps}, save)


def load_shared(folder: str) -> list[int]:
    """Notes that it was called."""
    with open(Path(folder, "loads"), "a") as file:
        file.write("load\n")
    return [1, 2, 3]


def sharing(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Uses the data that trials of a host share; ``folder`` is that of the session."""
    data = fluid.shared(load_shared, config["folder"])
    while True:
        time.sleep(config["seconds"])
        yield {"step": sum(data)}


FORMS: dict[str, Any] = {
    "class": Sleeper,
    "state": stateful,
    "reporting": reporting_to_fluid,
    "reporting to Tune": reporting_to_tune,
}


def spreading() -> type:
    """Makes a trainable that can span several devices, where PyTorch is installed."""
    pytest.importorskip("torch")
    import torch

    from fluid.elastic import ElasticTrainable

    class Spreading(ElasticTrainable):
        """Sleeps as long as each of its devices would work."""

        def build(self, config: dict[str, Any]) -> None:
            self.seconds = config["seconds"]
            self.model = torch.nn.Linear(2, 1)

        def train_iteration(self) -> dict[str, Any]:
            time.sleep(self.seconds / self.size)
            return {"step": self.iteration + 1, "devices": self.all_reduce_mean(self.size, 1)}

    return Spreading


def simulated(folder: Path) -> Backend:
    return SimulatedBackend(lambda _, config: Truth(config["seconds"]), [Device(0), Device(1)])


def local(folder: Path) -> Backend:
    from fluid.backends.local import LocalBackend

    return LocalBackend([Device(0), Device(1)], run_dir=folder)


def ray(folder: Path) -> Backend:
    """One device on the driver's node, one on the other."""
    from ray_drive import OTHER_MACHINE, THIS_MACHINE

    from fluid.backends.ray import RayBackend

    places = (THIS_MACHINE, OTHER_MACHINE)
    return RayBackend([Device(index, host=place) for index, place in enumerate(places)], run_dir=folder, preload=[])


def ray_on_four(folder: Path) -> Backend:
    """One device on each node."""
    from fluid.backends.ray import RayBackend

    return RayBackend(4, run_dir=folder, preload=[])


BACKENDS: dict[str, Callable[[Path], Backend]] = {
    "simulated": simulated,
    "local": local,
    "ray": ray,
    "ray-4": ray_on_four,
}
#: The cluster of each backend that has one.
CLUSTERS = {"ray": "two_nodes", "ray-4": "four_nodes"}
_RAY = [pytest.mark.ray, pytest.mark.slow]
KINDS = ["simulated", "local", pytest.param("ray", marks=_RAY)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kind of backend; this process is connected to its cluster, if it has one."""
    if request.param not in CLUSTERS:
        yield request.param
        return
    import ray

    cluster = request.getfixturevalue(CLUSTERS[request.param])
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield request.param
    ray.shutdown()


@pytest.fixture
def form() -> str:
    """A form of trainables; a test may ask for others."""
    return "class"


@pytest.fixture(params=["trial", "lane"])
def isolation(request: pytest.FixtureRequest, kind: str) -> str:
    """Whether each trial has a lane of its own."""
    if kind == "ray-4" and request.param == "lane":
        pytest.skip("two nodes show it")
    return str(request.param)


class TestBackends(BackendConformance):
    """The suite, and what holds beyond it for the backends of Fluid."""

    @pytest.fixture(autouse=True)
    def choose(self, kind: str, form: str, isolation: str) -> None:
        if kind == "simulated" and form != "class":
            pytest.skip("trials of the simulated backend run no code")
        self.kind, self.runs_code = kind, kind != "simulated"
        self.trainable, self.isolated = FORMS[form], isolation == "trial"

    def make_backend(self, folder: Path) -> Backend:
        return BACKENDS[self.kind](folder)

    def test_a_trial_whose_iterations_take_too_long_has_failed_the_second_time(self) -> None:
        super().test_a_trial_whose_iterations_take_too_long_has_failed_the_second_time()
        if self.runs_code:
            log = self.folder / "trials" / "slow" / "output.log"
            deadline = time.monotonic() + self.patience_s
            while not (log.exists() and "in step" in log.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def test_the_last_state_of_a_trial_is_saved_for_good(self) -> None:
        super().test_the_last_state_of_a_trial_is_saved_for_good()
        for trial_id, checkpoint in self.session.kept.items() if self.runs_code else ():
            assert f"/trials/{trial_id}/kept/" in checkpoint.path and damage_of(checkpoint.path) is None

    @pytest.mark.slow
    def test_a_trial_alone_spreads_and_makes_room_again(self) -> None:
        self.wide = spreading() if self.runs_code else None
        super().test_a_trial_alone_spreads_and_makes_room_again()

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
    def test_decisions_come_in_the_same_order_as_simulated(self) -> None:
        """Ends on the two devices are most of a second apart, so that no noise can swap them."""
        lengths = {"a": 9, "b": 5, "c": 12, "d": 3, "e": 8, "f": 20, "g": 2}

        def decisions(kind: str) -> list[tuple[str, str]]:
            self.kind = kind
            session = self.open()
            # All lanes are warm, so that starting them takes no part in the order.
            session.warm_up()
            session.submit("g", **{trial_id: (2, 0.3 * length / 2) for trial_id, length in lengths.items()})
            session.run()
            kinds = {StartTrial: "start", ReportEnd: "end"}
            return [(kinds[type(c)], c.trial_id) for c in session.commands if isinstance(c, (StartTrial, ReportEnd))]

        real = decisions(self.kind)
        simulated = decisions("simulated")
        assert [trial_id for kind, trial_id in simulated if kind == "start"][:2] == ["a", "b"]
        assert real == simulated

    def test_data_are_loaded_once_per_host(self) -> None:
        if not self.runs_code:
            pytest.skip("trials of the simulated backend run no code")
        session = self.open()
        (notes := self.folder / "notes").mkdir()
        session.submit("warm", a=(1, 0.01), b=(1, 0.01))
        session.warm_up()
        trials = [f"t{number}" for number in range(6)]
        for trial_id in trials:
            session.backend.register(trial_id, payload_of(sharing, {"seconds": 0.05, "folder": str(notes)}))
        specs = tuple(session.spec(trial_id, 1, can_save=False) for trial_id in trials)
        session.tell(GroupSubmitted(session.backend.now(), "g", specs))
        session.run()
        lanes = {command.lane_ids[0] for command in session.told(StartTrial) if command.trial_id in trials}
        assert len(lanes) == (len(trials) if self.isolated else 2)
        hosts = {device.host for device in session.backend.devices()}
        assert (notes / "loads").read_text().split() == ["load"] * len(hosts)
        assert set(session.ends().values()) == {"DONE"}


def _run_with(mark: pytest.MarkDecorator, *names: str) -> None:
    """Marks tests of the suite in this module only."""
    for name in names:
        test = getattr(TestBackends, name)
        setattr(TestBackends, name, mark(functools.wraps(test)(lambda self, test=test: test(self))))


_run_with(
    pytest.mark.parametrize(
        "form",
        [
            "class",
            pytest.param("state", marks=pytest.mark.slow),
            pytest.param("reporting", marks=pytest.mark.slow),
            pytest.param("reporting to Tune", marks=[pytest.mark.ray, pytest.mark.long]),
        ],
    ),
    "test_all_trials_run_to_the_end",
    "test_a_trial_that_is_stopped_reports_the_iteration_that_it_finishes",
    "test_budgets_can_be_extended_while_running_and_after",
    "test_a_lost_devices_trial_goes_on_elsewhere",
    "test_the_trial_of_a_drained_device_goes_on_elsewhere_without_a_loss",
    "test_a_killed_lane_is_lost_and_its_trial_goes_on",
    "test_more_trials_than_a_device_keeps_resident_can_all_be_extended",
    "test_trials_that_are_left_over_take_turns_and_lose_nothing",
    "test_the_last_state_of_a_trial_is_saved_for_good",
)
_run_with(
    pytest.mark.parametrize("kind", [*KINDS, pytest.param("ray-4", marks=[*_RAY, pytest.mark.long])], indirect=True),
    "test_all_trials_run_to_the_end",
    "test_a_trial_in_an_endless_iteration_is_stopped_at_once",
    "test_a_trial_that_is_paused_by_hand_goes_on_once_it_is_resumed",
    "test_a_killed_lane_is_lost_and_its_trial_goes_on",
    "test_more_trials_than_a_device_keeps_resident_can_all_be_extended",
    "test_methods_are_called_while_a_trial_runs_and_after",
    "test_what_a_trial_asks_reaches_its_submitter",
)


class Mute(SimulatedBackend):
    """Never tells of some kind of event."""

    def __init__(self, kind: type[Event]) -> None:
        super().__init__(lambda _, config: Truth(config["seconds"]), [Device(0), Device(1)])
        self._kind = kind

    def poll(self, timeout: float | None = None) -> list[Event]:
        return [event for event in super().poll(timeout) if not isinstance(event, self._kind)]


@pytest.mark.parametrize("kind", [LaneReady, TrialForked, TrialPaused, TrialSaved, TrialReleased])
def test_the_suite_finds_a_backend_that_does_not_answer(kind: type[Event]) -> None:
    class Suite(BackendConformance):
        runs_code = False

        def make_backend(self, folder: Path) -> Backend:
            return Mute(kind)

    with pytest.raises(AssertionError, match=r"Suite\.test_\w+: "):
        Suite.check()
