"""One suite for every backend: the same engine drives each, and the same must hold, whether trials share lanes or not.

On the simulated backend time is virtual; on the others trials run in processes and sleep for their iterations.

The two devices of the Ray backend are on two nodes, the driver's and another machine's. Part of the suite also runs on
four nodes, two of them at the driver's address: what starts many trials, moves them, or ends a lane. The rest would
show there what it shows on two, and four nodes cost memory and time.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.backends.base import Backend, EndingBackend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import (
    CheckpointValue,
    Command,
    DumpStacks,
    KillLane,
    Notice,
    PrefetchCheckpoint,
    Report,
    ReportCall,
    ReportEnd,
    ReportRequest,
    ReportStart,
    StartTrial,
    ValueCheckpoints,
)
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    CallRequested,
    Checkpoint,
    CheckpointPlaced,
    DeviceAdded,
    DeviceDraining,
    DeviceLost,
    Event,
    GroupSubmitted,
    IterationDone,
    PauseRequested,
    RequestAnswered,
    ResumeRequested,
    StopRequested,
    Tick,
    TrialForgotten,
    TrialsAdded,
    TrialSaved,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.lane.checkpoints.seal import damage_of
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.validate import validate_state
from fluid.trainables.driver_link import driver_link, dump_message
from fluid.trainables.exception_pickle import load_exception
from fluid.trainables.payload import payload_of
from fluid.trainables.pickling import dump_arguments
from fluid.trainables.trainable import can_save

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class Sleeper:
    """Sleeps for each iteration, and can be saved."""

    def setup(self, config: dict[str, Any]) -> None:
        self.seconds, self.steps = config["seconds"], 0

    def step(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.steps += 1
        return {"step": self.steps}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "steps.json").write_text(json.dumps(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = json.loads((Path(folder) / "steps.json").read_text())

    def tell(self, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(value)
        return self.steps, value

    def cleanup(self) -> None:
        pass


class Asking(Sleeper):
    """Asks the submitter in each iteration."""

    def step(self) -> dict[str, Any]:
        return {**super().step(), "got": driver_link().ask(self.steps)}


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
in_all_forms = pytest.mark.parametrize(
    "form",
    ["class", "state", "reporting", pytest.param("reporting to Tune", marks=[pytest.mark.ray, pytest.mark.long])],
)
on_four_nodes_too = pytest.mark.parametrize(
    "kind", [*KINDS, pytest.param("ray-4", marks=[*_RAY, pytest.mark.long])], indirect=True
)


class Session:
    """An engine and a backend; the engine's state is checked after every step."""

    def __init__(self, backend: Backend, form: str = "class", *, isolation: str) -> None:
        self.backend = backend
        self.trainable = FORMS[form]
        self.isolated = isolation == "trial"
        self.is_real = not isinstance(backend, SimulatedBackend)
        self.state = EngineState(make_planner("portfolio"), max_packing=1, max_failures=1, spare_lanes=1)
        self.commands: list[Command] = []
        #: The newest checkpoint of each trial that outlives the run.
        self.kept: dict[str, Checkpoint] = {}
        self.calls = 0
        self.placed: list[CheckpointPlaced] = []
        self.saved: dict[str, Checkpoint] = {}
        self.tell(*(DeviceAdded(backend.now(), device) for device in backend.devices()))

    def tell(self, *events: Event) -> list[Command]:
        saves = [event for event in events if isinstance(event, TrialSaved) and event.kept is not None]
        self.saved |= {event.trial_id: event.checkpoint for event in events if isinstance(event, TrialSaved)}
        self.placed += [event for event in events if isinstance(event, CheckpointPlaced)]
        self.kept |= {event.trial_id: event.checkpoint for event in saves}
        commands = self.state.handle(*events)
        validate_state(self.state)
        self.commands += commands
        self.backend.execute([command for command in commands if not isinstance(command, Notice)])
        return commands

    def warm_up(self) -> None:
        """Waits until the lanes have started: on another node they take longer than here."""
        self.run(lambda: all(lane.ready for lane in self.state.lanes))

    def register(self, trial_id: str, seconds: float, elastic: bool = False) -> None:
        """Registers a trial whose iterations take so many seconds."""
        trainable = spreading() if elastic and self.is_real else self.trainable
        self.backend.register(trial_id, payload_of(trainable, {"seconds": seconds}))

    def spec(self, trial_id: str, budget: int, **fields: Any) -> TrialSpec:
        """What the engine is told of a trial."""
        return TrialSpec(trial_id, budget, isolated=self.isolated, **fields)

    def submit(self, group_id: str, *, keep_last: bool = False, **trials: tuple[int, float]) -> None:
        """Submits trials, each of so many iterations of so many seconds."""
        for trial_id, (_, seconds) in trials.items():
            self.register(trial_id, seconds)
        fields = {"can_save": can_save(self.trainable), "keep_last": keep_last}
        specs = tuple(self.spec(trial_id, budget, **fields) for trial_id, (budget, _) in trials.items())
        self.tell(GroupSubmitted(self.backend.now(), group_id, specs))

    def run(self, until: Callable[[], bool]) -> None:
        """Goes on until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, {trial.trial_id: trial.story for trial in self.state.trials.values()}
            ticking, alarm_at, begun = self.state.wants_tick, self.state.alarm_at, self.backend.now()
            left = PATIENCE if alarm_at is None else max(0.0, min(PATIENCE, alarm_at - begun))
            events = self.backend.poll(min(0.005, left) if ticking else left)
            if events or ticking:
                self.tell(*(events or [Tick(self.backend.now())]))
            if alarm_at is not None and begun >= alarm_at:
                self.tell(Alarm(self.backend.now()))

    def run_to_the_end(self) -> None:
        self.run(lambda: all(trial.state.ended for trial in self.state.trials.values()))

    def kept_at(self, trial_id: str) -> int:
        return self.kept[trial_id].iteration if trial_id in self.kept else 0

    def iterations(self, trial_id: str) -> list[int]:
        reports = [c for c in self.commands if isinstance(c, Report) and c.trial_id == trial_id]
        return [number for report in reports for number, _, _, _ in report.iterations]

    def call(self, trial_id: str, value: Any) -> int:
        """Asks for a call of ``tell``; returns its number."""
        self.calls += 1
        payload = dump_arguments((value,), {})
        self.tell(CallRequested(self.backend.now(), trial_id, call_id=self.calls, method="tell", payload=payload))
        return self.calls

    def answers(self) -> dict[int, ReportCall]:
        return {c.call_id: c for c in self.commands if isinstance(c, ReportCall)}

    def ends(self) -> dict[str, str]:
        return {c.trial_id: c.state for c in self.commands if isinstance(c, ReportEnd)}


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


@pytest.fixture
def session(kind: str, form: str, isolation: str, tmp_path: Path) -> Iterator[Session]:
    if kind == "simulated" and form != "class":
        pytest.skip("trials of the simulated backend run no code")
    backend = BACKENDS[kind](tmp_path)
    assert isinstance(backend, Backend)
    yield Session(backend, form, isolation=isolation)
    backend.close()
    backend.close()  # Harmless.


@in_all_forms
@on_four_nodes_too
def test_all_trials_run_to_the_end(session: Session) -> None:
    session.submit("g", **{f"t{x}": (x + 1, 0.001) for x in range(7)})
    session.run_to_the_end()
    for x in range(7):
        assert session.iterations(f"t{x}") == list(range(1, x + 2))
    assert session.ends() == {f"t{x}": "DONE" for x in range(7)}


def test_reports_carry_width_devices_and_times(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(3, 0.02), b=(3, 0.02))
    session.run_to_the_end()
    reports = [command for command in session.commands if isinstance(command, Report)]
    assert {report.device_ids for report in reports} == {(0,), (1,)}
    for report in reports:
        assert report.group_id == "g" and report.width == 1.0
        assert report.seconds >= 0.02 * (1 - 1e-9)
    at = [report.at for report in reports]
    assert at == sorted(at)


@in_all_forms
def test_a_trial_that_is_stopped_reports_the_iteration_that_it_finishes(session: Session) -> None:
    session.submit("g", a=(10**6, 0.01), b=(2, 0.01))
    session.run(lambda: len(session.iterations("a")) >= 2)
    session.tell(StopRequested(session.backend.now(), "a"))
    seen = len(session.iterations("a"))
    session.run_to_the_end()
    done = session.iterations("a")
    assert done == list(range(1, len(done) + 1)) and len(done) == session.state.trials["a"].progress.done >= seen
    assert session.ends() == {"a": "STOPPED", "b": "DONE"}


def test_what_lanes_finish_as_they_end_counts(session: Session) -> None:
    session.submit("g", a=(10**6, 0.01), b=(10**6, 0.01))
    session.run(lambda: len(session.iterations("a")) >= 2 <= len(session.iterations("b")))
    assert isinstance(session.backend, EndingBackend)
    finished = [event for event in session.backend.end() if isinstance(event, IterationDone)]
    session.commands += session.state.handle(*finished)  # Nothing is carried out any more.
    for name in "ab":
        done = session.iterations(name)
        assert done == list(range(1, session.state.trials[name].progress.done + 1))


@on_four_nodes_too
def test_a_trial_in_an_endless_iteration_is_stopped_at_once(session: Session) -> None:
    session.submit("g", a=(2, 1e6), b=(3, 0.01))
    session.run(lambda: session.state.trials["a"].state == "RUNNING" and session.ends().get("b") == "DONE")
    session.tell(StopRequested(session.backend.now(), "a", now=True))
    session.run(lambda: session.ends().get("a") == "STOPPED")
    session.submit("h", c=(2, 0.01), d=(2, 0.01))
    session.run_to_the_end()
    assert session.ends() == {"a": "STOPPED", "b": "DONE", "c": "DONE", "d": "DONE"}


def test_a_trial_whose_iterations_take_too_long_has_failed_the_second_time(session: Session, tmp_path: Path) -> None:
    session.register("slow", 1e6)
    session.tell(
        GroupSubmitted(session.backend.now(), "g", (session.spec("slow", 3, iteration_timeout_s=1.0),)),
    )
    session.run_to_the_end()
    (end,) = [command for command in session.commands if isinstance(command, ReportEnd)]
    assert end.state == "FAILED" and end.failure is not None and end.failure.kind == "timeout"
    assert sum(isinstance(command, KillLane) for command in session.commands) == 2
    assert sum(isinstance(command, DumpStacks) for command in session.commands) == 2
    if session.is_real:
        log = tmp_path / "trials" / "slow" / "output.log"
        deadline = time.monotonic() + PATIENCE
        while not (log.exists() and "in step" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@on_four_nodes_too
def test_a_trial_that_is_paused_by_hand_goes_on_once_it_is_resumed(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(30, 0.01), b=(3, 0.01), c=(3, 0.01))
    session.run(lambda: len(session.iterations("a")) >= 2)
    session.tell(PauseRequested(session.backend.now(), "a"))
    session.run(lambda: session.state.trials["a"].state == "PAUSED")
    session.run(lambda: session.ends() == {"b": "DONE", "c": "DONE"})
    done = len(session.iterations("a"))
    assert done < 30 and session.state.trials["a"].state == "PAUSED"
    session.tell(ResumeRequested(session.backend.now(), "a"))
    session.run_to_the_end()
    assert session.iterations("a") == list(range(1, 31)), "no iteration is lost or repeated"


def test_a_trial_whose_lane_dies_while_it_is_paused_stays_paused(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(20, 0.01), b=(2, 0.01))
    session.run(lambda: len(session.iterations("a")) >= 2)
    session.tell(PauseRequested(session.backend.now(), "a"))
    session.run(lambda: session.state.trials["a"].state == "PAUSED")
    (device,) = {session.state.trials["a"].residence.device}
    assert device is not None
    session.tell(DeviceLost(session.backend.now(), device))
    session.run(lambda: session.ends() == {"b": "DONE"})
    assert session.state.trials["a"].state == "PAUSED"
    session.tell(ResumeRequested(session.backend.now(), "a"))
    session.run_to_the_end()
    assert session.iterations("a") == list(range(1, 21)) and session.ends()["a"] == "DONE"


def test_queued_and_starting_trials_can_be_paused(session: Session) -> None:
    session.submit("g", a=(3, 0.01), b=(3, 0.01), c=(3, 0.01))
    for trial_id in "abc":
        session.tell(PauseRequested(session.backend.now(), trial_id))
    session.run(lambda: all(trial.state == "PAUSED" for trial in session.state.trials.values()))
    session.tell(StopRequested(session.backend.now(), "c"))
    for trial_id in "ab":
        session.tell(ResumeRequested(session.backend.now(), trial_id))
    session.run_to_the_end()
    assert session.ends() == {"a": "DONE", "b": "DONE", "c": "STOPPED"}


def test_a_queued_trial_can_be_stopped(session: Session) -> None:
    session.submit("g", a=(5, 0.01), b=(5, 0.01), c=(5, 0.01))
    session.tell(StopRequested(session.backend.now(), "c"))
    session.run_to_the_end()
    assert session.ends() == {"a": "DONE", "b": "DONE", "c": "STOPPED"} and session.iterations("c") == []


@in_all_forms
def test_budgets_can_be_extended_while_running_and_after(session: Session) -> None:
    session.submit("g", a=(3, 0.01), b=(1, 0.01))
    session.tell(BudgetExtended(session.backend.now(), "a", 2))
    session.run_to_the_end()
    assert session.iterations("a") == [1, 2, 3, 4, 5]
    session.tell(BudgetExtended(session.backend.now(), "b", 2))
    session.run_to_the_end()
    assert session.iterations("b") == [1, 2, 3]


def test_trials_and_groups_arrive_while_others_run(session: Session) -> None:
    session.submit("g", a=(20, 0.01))
    session.run(lambda: bool(session.iterations("a")))
    session.submit("h", b=(2, 0.01), c=(2, 0.01))
    session.register("d", 0.01)
    session.tell(TrialsAdded(session.backend.now(), "g", (session.spec("d", 2),)))
    session.run_to_the_end()
    assert set(session.ends().values()) == {"DONE"} and len(session.ends()) == 4


@in_all_forms
def test_a_lost_devices_trial_goes_on_elsewhere(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(12, 0.02), b=(12, 0.02))
    session.run(lambda: min(len(session.iterations("a")), len(session.iterations("b"))) >= 2)
    session.tell(DeviceLost(session.backend.now(), 1))
    session.run_to_the_end()
    for trial_id in ("a", "b"):
        assert session.iterations(trial_id) == list(range(1, 13))
    reports = [command for command in session.commands if isinstance(command, Report)]
    assert reports[-1].device_ids == (0,)


@in_all_forms
def test_the_trial_of_a_drained_device_goes_on_elsewhere_without_a_loss(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(12, 0.05), b=(12, 0.05))
    session.run(lambda: min(len(session.iterations("a")), len(session.iterations("b"))) >= 2)
    session.tell(DeviceDraining(session.backend.now(), 1, session.backend.now() + PATIENCE))
    session.run(lambda: 1 not in session.state.occupancy.residents)
    starts = sum(isinstance(command, StartTrial) for command in session.commands)
    session.run_to_the_end()
    for trial_id in ("a", "b"):
        assert session.iterations(trial_id) == list(range(1, 13))
    again = [command for command in session.commands if isinstance(command, StartTrial)][starts:]
    assert all(command.checkpoint is not None and command.checkpoint.iteration >= 2 for command in again)
    reports = [command for command in session.commands if isinstance(command, Report)]
    assert reports[-1].device_ids == (0,)
    if session.is_real:
        assert all(report.metrics.decode()["step"] == report.iteration for report in reports), (
            "it went on from its state"
        )


@in_all_forms
@on_four_nodes_too
def test_a_killed_lane_is_lost_and_its_trial_goes_on(session: Session) -> None:
    session.warm_up()
    session.submit("g", a=(12, 0.05), b=(12, 0.05))
    session.run(lambda: min(len(session.iterations("a")), len(session.iterations("b"))) >= 2)
    (lane_id,) = session.state.trials["a"].placement.lanes
    session.backend.execute([KillLane(lane_id, "was in the way", at=session.backend.now())])
    session.backend.execute([KillLane(lane_id, "was in the way", at=session.backend.now())])  # Harmless.
    session.run(lambda: lane_id not in session.state.lanes)
    assert any("was in the way" in text for _, text in session.state.trials["a"].story)
    session.run_to_the_end()
    session.backend.execute([KillLane(lane_id, "was in the way", at=session.backend.now())])  # It is gone: harmless.
    for trial_id in ("a", "b"):
        assert session.iterations(trial_id) == list(range(1, 13))
    assert session.ends() == {"a": "DONE", "b": "DONE"}


def test_trials_have_a_lane_of_their_own_or_share_those_of_the_devices(session: Session) -> None:
    session.submit("g", stopped=(10**6, 0.01), **{f"t{x}": (2, 0.001) for x in range(6)})
    session.run(lambda: len(session.iterations("stopped")) >= 2)
    session.tell(StopRequested(session.backend.now(), "stopped"))
    session.run_to_the_end()
    started = [command.lane_ids for command in session.commands if isinstance(command, StartTrial)]
    assert len(started) == 7 and all(len(lanes) == 1 for lanes in started)
    assert len(set(started)) == (7 if session.isolated else 2)
    session.tell(BudgetExtended(session.backend.now(), "t0", 2))
    session.run_to_the_end()
    assert session.iterations("t0") == [1, 2, 3, 4]
    (again,) = [c.lane_ids for c in session.commands if isinstance(c, StartTrial) and c.trial_id == "t0"][1:] or [None]
    assert (again is None) is not session.isolated, "a lane that ran it keeps its state, or has ended with it"
    assert again not in started


@in_all_forms
@on_four_nodes_too
def test_more_trials_than_a_device_keeps_resident_can_all_be_extended(session: Session) -> None:
    names = [f"t{x}" for x in range(24)]
    session.submit("g", **dict.fromkeys(names, (1, 0.001)))
    session.run_to_the_end()
    session.tell(*(BudgetExtended(session.backend.now(), name, 1) for name in names))
    session.run_to_the_end()
    assert all(session.iterations(name) == [1, 2] for name in names)


@on_four_nodes_too
def test_methods_are_called_while_a_trial_runs_and_after(session: Session) -> None:
    session.submit("g", a=(10**6, 0.01), b=(2, 0.01))
    session.run(lambda: len(session.iterations("a")) >= 2 and session.ends().get("b") == "DONE")
    running = [session.call("a", 1), session.call("a", "no"), session.call("a", 2)]
    done = session.call("b", 3)
    session.tell(BudgetExtended(session.backend.now(), "b", 2))
    session.run(lambda: len(session.answers()) == 4 and len(session.iterations("b")) == 4)
    session.tell(StopRequested(session.backend.now(), "a"))
    session.run_to_the_end()
    assert session.ends() == {"a": "STOPPED", "b": "DONE"}, "what a call raises does not fail a trial"
    answers = session.answers()
    assert [number for number in answers if number != done] == running, "in the order asked for"
    if not session.is_real:
        assert all(answer.result is None and answer.failure is None for answer in answers.values())
        return
    first, failed, second = (answers[number] for number in running)
    assert first.result is not None and second.result is not None and failed.failure is not None
    assert (failed.failure.kind, failed.failure.message) == ("error", "ValueError: no")
    assert failed.failure.exception is not None and load_exception(failed.failure.exception).args == ("no",)
    (steps, value), (later, other) = pickle.loads(first.result), pickle.loads(second.result)
    assert 2 <= steps <= later and (value, other) == (1, 2)
    assert answers[done].result is not None
    assert pickle.loads(answers[done].result) == (2, 3), "before it went on"


@on_four_nodes_too
def test_what_a_trial_asks_reaches_its_submitter(session: Session) -> None:
    if not session.is_real:
        pytest.skip("trials of the simulated backend run no code")
    for name in ("a", "b"):
        session.backend.register(name, payload_of(Asking, {"seconds": 0.0}))
    session.tell(GroupSubmitted(session.backend.now(), "g", (session.spec("a", 3), session.spec("b", 3))))
    answered: list[ReportRequest] = []

    def answer() -> bool:
        asked = [command for command in session.commands if isinstance(command, ReportRequest)]
        for request in asked[len(answered) :]:
            answered.append(request)
            payload = dump_message(f"{request.trial_id} {pickle.loads(request.payload)}")
            lane_id, number = request.lane_id, request.request_id
            now = session.backend.now()
            session.tell(RequestAnswered(now, request.trial_id, lane_id, request_id=number, payload=payload))
        return all(trial.state.ended for trial in session.state.trials.values())

    session.run(answer)
    for name in ("a", "b"):
        reports = [c for c in session.commands if isinstance(c, Report) and c.trial_id == name]
        assert [report.metrics.decode()["got"] for report in reports] == [f"{name} {step}" for step in (1, 2, 3)]


def test_a_trial_that_left_its_lane_is_brought_back_to_be_called(session: Session) -> None:
    names = [f"t{x}" for x in range(24)]
    session.submit("g", **dict.fromkeys(names, (2, 0.001)))
    session.run(
        lambda: all(trial.state.ended and not trial.residence.saving for trial in session.state.trials.values())
    )
    ends = [command for command in session.commands if isinstance(command, ReportEnd)]
    away = [name for name in names if session.state.trials[name].residence.lane is None]
    assert away, "not all of them can stay"
    numbers = {session.call(name, 7): name for name in names}
    session.run(lambda: len(session.answers()) == len(names))
    session.run_to_the_end()
    assert [command for command in session.commands if isinstance(command, ReportEnd)] == ends, "none ended twice"
    assert all(session.iterations(name) == [1, 2] for name in names)
    for number in numbers:
        answer = session.answers()[number]
        assert answer.failure is None
        assert answer.result is None or pickle.loads(answer.result) == (2, 7)


def test_a_trial_that_was_forgotten_leaves_nothing_behind(session: Session) -> None:
    session.submit("g", a=(2, 0.001), b=(2, 0.001))
    session.run_to_the_end()
    starts = [command.trial_id for command in session.commands if isinstance(command, ReportStart)]
    assert sorted(starts) == ["a", "b"]
    session.tell(TrialForgotten(session.backend.now(), "a"))
    with pytest.raises(InvalidFieldError, match="taken"):
        session.submit("h", a=(1, 0.001))
    session.tell(BudgetExtended(session.backend.now(), "b", 1))
    session.run_to_the_end()
    assert session.iterations("b") == [1, 2, 3] and list(session.state.trials) == ["b"]


def test_what_cannot_be_is_refused_and_changes_nothing(session: Session) -> None:
    session.submit("g", a=(3, 0.01))
    with pytest.raises(InvalidFieldError, match="'a'"):
        session.submit("h", a=(1, 0.01))
    with pytest.raises(InvalidFieldError, match="'b'"):
        session.tell(StopRequested(session.backend.now(), "b"))
    session.run_to_the_end()
    assert session.iterations("a") == [1, 2, 3]


@in_all_forms
def test_trials_that_are_left_over_take_turns_and_lose_nothing(session: Session) -> None:
    session.submit("first", x=(3, 0.15), y=(3, 0.15))  # From then on it is known how long they take.
    session.run_to_the_end()
    session.submit("g", a=(12, 0.15), b=(12, 0.15), c=(12, 0.15))
    session.run_to_the_end()
    reports = [c for c in session.commands if isinstance(c, Report)]
    for trial_id in "abc":
        own = [report for report in reports if report.trial_id == trial_id]
        assert [report.iteration for report in own] == list(range(1, 13))
        if session.is_real:
            assert [report.metrics.decode()["step"] for report in own] == list(range(1, 13)), (
                "it went on from its state"
            )
    ended = next(at for at, c in enumerate(session.commands) if isinstance(c, ReportEnd) and c.trial_id in "abc")
    begun = {c.trial_id for c in session.commands[:ended] if isinstance(c, Report)}
    assert begun >= set("abc"), "the third one did not wait until another one had ended"


@in_all_forms
def test_the_last_state_of_a_trial_is_saved_for_good(session: Session) -> None:
    session.submit("g", keep_last=True, done=(3, 0.001), stopped=(10**6, 0.01))
    session.run(lambda: session.kept_at("done") == 3)
    session.run(lambda: len(session.iterations("stopped")) >= 3)
    session.tell(StopRequested(session.backend.now(), "stopped"))
    session.run(lambda: session.ends().get("stopped") == "STOPPED")
    assert session.kept_at("stopped") == session.state.trials["stopped"].progress.done, "before it left its lane"
    session.tell(BudgetExtended(session.backend.now(), "done", 2))
    session.run(lambda: session.kept_at("done") == 5)
    assert session.iterations("done") == [1, 2, 3, 4, 5]
    for trial_id, checkpoint in session.kept.items():
        assert not checkpoint.in_memory
        if session.is_real:
            assert f"/trials/{trial_id}/kept/" in checkpoint.path and damage_of(checkpoint.path) is None


def test_a_trial_alone_spreads_and_makes_room_again(session: Session) -> None:
    session.register("wide", 0.05, elastic=True)
    session.tell(GroupSubmitted(session.backend.now(), "g", (session.spec("wide", 10**6, max_width=2),)))

    def widths() -> list[float]:
        return [c.width for c in session.commands if isinstance(c, Report) and c.trial_id == "wide"]

    session.run(lambda: widths().count(2.0) >= 3)
    session.submit("h", narrow=(3, 0.1))
    session.run(lambda: session.ends().get("narrow") == "DONE" and len(set(widths()[-3:])) == 1)
    session.tell(StopRequested(session.backend.now(), "wide"))
    session.run_to_the_end()
    reports = [c for c in session.commands if isinstance(c, Report) and c.trial_id == "wide"]
    assert [report.iteration for report in reports] == list(range(1, len(reports) + 1))
    assert all(len(report.device_ids) == report.width for report in reports)
    if session.is_real:
        assert all(report.metrics.decode()["devices"] == report.width for report in reports)
    assert 1.0 in widths()[widths().index(2.0) :], "it made room"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
def test_decisions_come_in_the_same_order_as_simulated(kind: str, isolation: str, tmp_path: Path) -> None:
    """Ends on the two devices are most of a second apart, so that no noise can swap them."""
    lengths = {"a": 9, "b": 5, "c": 12, "d": 3, "e": 8, "f": 20, "g": 2}

    def decisions(name: str) -> list[tuple[str, str]]:
        backend = BACKENDS[name](tmp_path / name)
        try:
            session = Session(backend, isolation=isolation)
            # All lanes are warm, so that starting them takes no part in the order.
            session.warm_up()
            session.submit("g", **{trial_id: (2, 0.3 * length / 2) for trial_id, length in lengths.items()})
            session.run_to_the_end()
        finally:
            backend.close()
        kinds = {StartTrial: "start", ReportEnd: "end"}
        return [(kinds[type(c)], c.trial_id) for c in session.commands if isinstance(c, (StartTrial, ReportEnd))]

    simulated = decisions("simulated")
    assert [trial_id for kind, trial_id in simulated if kind == "start"][:2] == ["a", "b"]
    assert decisions(kind) == simulated


def test_data_are_loaded_once_per_host(session: Session, tmp_path: Path) -> None:
    if not session.is_real:
        pytest.skip("trials of the simulated backend run no code")
    (notes := tmp_path / "notes").mkdir()
    session.submit("warm", a=(1, 0.01), b=(1, 0.01))
    session.warm_up()
    trials = [f"t{number}" for number in range(6)]
    for trial_id in trials:
        session.backend.register(trial_id, payload_of(sharing, {"seconds": 0.05, "folder": str(notes)}))
    specs = tuple(session.spec(trial_id, 1, can_save=False) for trial_id in trials)
    session.tell(GroupSubmitted(session.backend.now(), "g", specs))
    session.run_to_the_end()
    started = [command for command in session.commands if isinstance(command, StartTrial)]
    lanes = {command.lane_ids[0] for command in started if command.trial_id in trials}
    assert len(lanes) == (len(trials) if session.isolated else 2)
    hosts = {device.host for device in session.backend.devices()}
    assert (notes / "loads").read_text().split() == ["load"] * len(hosts)
    assert set(session.ends().values()) == {"DONE"}


def test_a_checkpoint_is_brought_into_the_memory_of_its_host(session: Session) -> None:
    session.submit("g", a=(1, 0.2))
    session.run_to_the_end()
    if session.is_real:
        session.run(lambda: "a" in session.saved)
    checkpoint = session.saved.get("a", Checkpoint(1, ""))
    session.backend.execute([ValueCheckpoints({"a": CheckpointValue(0.9, pinned=True)})])
    session.backend.execute([PrefetchCheckpoint("a", checkpoint, checkpoint.host)])
    session.run(lambda: bool(session.placed))
    (placed,) = session.placed
    assert (placed.trial_id, placed.checkpoint.host, placed.checkpoint.in_memory) == ("a", checkpoint.host, True)
    assert placed.checkpoint.iteration == checkpoint.iteration
