"""FluidExecutor: runs TrialGroups on real devices.

One thread, the pump, owns the engine and the backend: it takes events in and carries commands out. Calls of the
user's threads are handed to it and answered by it, so a refused call disturbs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from fluid.backends.base import Backend
from fluid.engine.commands import Command, Report, ReportEnd
from fluid.engine.events import (
    BudgetExtended,
    DeviceAdded,
    DeviceLost,
    Event,
    GroupSubmitted,
    StopRequested,
    Tick,
    TrialAdded,
    TrialSpec,
)
from fluid.engine.state import DEFAULT_MAX_FAILURES, EngineState
from fluid.errors import FluidError, InvalidFieldError, require_integer, require_one_of
from fluid.handle import Controls, TrialGroupHandle
from fluid.planners import make_planner
from fluid.profile import Profile
from fluid.resources import Device
from fluid.resuming import LeftSession, read_session
from fluid.run_folder import RunFolder
from fluid.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.status import Status, eta_of, status_of
from fluid.trainable import can_save, is_elastic
from fluid.trialgroup import Trial, TrialGroup

#: How long the engine waits for the submitter's answer to what ended before it resizes trials, in seconds.
_SETTLING = 0.005
#: How often a waiting call looks whether the pump is still there to answer it, in seconds.
_PUMP_CHECK = 1.0
BACKENDS = ("auto", "local", "ray")
PACKING = ("auto", "mps", "timeslice", "off")

_in_force: list[FluidExecutor] = []


class FluidExecutor:
    """Runs TrialGroups. Use it as a context manager, or call :meth:`close`; no process is left behind.

    Args:
        backend: ``"local"`` for processes on this machine, ``"ray"`` for actors of a Ray cluster, ``"auto"`` for the
            Ray cluster this process is connected to if there is one and local processes otherwise, or a backend.
        devices: how many devices to use, or which; ``None`` for all: GPUs if there are any, else CPU cores.
        planner: ``"portfolio"``, ``"dynamic"``, ``"static"`` or ``"fifo"``.
        packing: ``"auto"`` and ``"timeslice"`` pack trials on a device as far as it is measured to pay; ``"off"``
            never does; ``"mps"`` is not there yet.
        max_packing: most trials on one device.
        max_width: most devices for one trial.
        max_failures: times a trial is tried again after it failed.
        profile: what earlier sessions measured; it goes on learning.
        run_dir: folder for this run's journal, results and logs; ``None`` for a new one in ``~/fluid_runs``.
        verbose: 1 for live progress on a terminal, 0 for silence.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """

    def __init__(
        self,
        backend: str | Backend = "auto",
        devices: int | list[Device] | None = None,
        planner: str = "portfolio",
        packing: str = "auto",
        max_packing: int | None = None,
        max_width: int | None = None,
        *,
        max_failures: int = DEFAULT_MAX_FAILURES,
        profile: Profile | None = None,
        run_dir: str | Path | None = None,
        verbose: int = 1,
    ) -> None:
        if require_one_of("packing", packing, PACKING) == "mps":
            raise InvalidFieldError("packing", packing, "this version cannot start NVIDIA MPS; use auto or timeslice")
        packed = DEFAULT_MAX_PACKING if max_packing is None else require_integer("max_packing", max_packing, at_least=1)
        widest = DEFAULT_MAX_WIDTH if max_width is None else require_integer("max_width", max_width, at_least=1)
        plans = make_planner(planner, c=packed, d=widest)
        if isinstance(devices, int):
            require_integer("devices", devices, at_least=1)
        if isinstance(backend, str):
            require_one_of("backend", backend, BACKENDS)
        failures = require_integer("max_failures", max_failures, at_least=0)
        self.folder = RunFolder.create(run_dir)
        try:
            self._backend = _make_backend(backend, devices, self.folder.path)
        except BaseException:
            self.folder.close()
            raise
        self._state = EngineState(
            plans,
            profile,
            max_packing=1 if packing == "off" else packed,
            max_failures=failures,
        )
        self._planner = planner
        self._handles: dict[str, TrialGroupHandle] = {}
        self._groups = itertools.count()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._began = self._backend.now()
        self._closing = False
        self._broken: BaseException | None = None
        self._verbose = verbose
        self._pump = threading.Thread(target=self._run, name="fluid-pump", daemon=True)
        self._pump.start()
        atexit.register(self.close)
        self._view = _make_view(self) if verbose else None

    # -- for the user --------------------------------------------------------------------------------------

    def submit_trialgroup(self, group: TrialGroup) -> TrialGroupHandle:
        """Runs a group; returns at once.

        Raises:
            InvalidFieldError: a trial's id is taken, or its trainable or config cannot be sent to another process.
                Nothing of the group runs then, and what runs already is not disturbed.
        """
        if not isinstance(group, TrialGroup):
            raise InvalidFieldError("group", group, "must be a TrialGroup")
        trials = group.active
        if not trials:
            raise InvalidFieldError("group", group.name, "has no active trial")
        self._refuse_taken(trials)
        group_id = f"{next(self._groups)}"
        controls = Controls(add=self._add, stop=self._stop, extend=self._extend, eta=self._eta)
        handle = TrialGroupHandle(group_id, group, controls)
        specs = tuple(self._register(trial) for trial in trials)

        def submit() -> None:
            self.folder.write_trials(group_id, group.name, trials)
            self._handles[group_id] = handle
            try:
                self._handle(GroupSubmitted(self._backend.now(), group_id, specs))
            except BaseException:
                del self._handles[group_id]
                raise

        self._call(submit)
        return handle

    @classmethod
    def resume(cls, run_dir: str | Path, **options: Any) -> FluidExecutor:
        """Goes on with a session whose driver was killed: its groups are there again as :attr:`handles`.

        Trials that had not ended go on from their newest checkpoint that can still be read; iterations that were
        reported are not reported again.

        Args:
            run_dir: folder of the session; the new one writes on there.
            options: as for :class:`FluidExecutor`.

        Raises:
            InvalidFieldError: the folder is not that of a session, or its files cannot be read.
        """
        left = read_session(run_dir)
        executor = cls(run_dir=left.folder, profile=options.pop("profile", left.recovered.profile), **options)
        executor._call(lambda: executor._go_on(left))
        return executor

    @property
    def handles(self) -> list[TrialGroupHandle]:
        """The groups of this session, in order of submission."""
        return list(self._handles.values())

    def add_device(self, device: Device) -> None:
        """Puts a further device to use while trials run."""

        def add() -> None:
            self._backend.add_devices([device])
            self._handle(DeviceAdded(self._backend.now(), device))

        self._call(add)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up: its trials go on elsewhere from their newest checkpoint."""
        self._call(lambda: self._handle(DeviceLost(self._backend.now(), device_id)))

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._state.profile

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return list(self._call(lambda: list(self._state.scheduling.devices)))

    def status(self) -> Status:
        """How the session stands."""
        names = {group_id: handle.name for group_id, handle in list(self._handles.items())}
        status: Status = self._call(lambda: status_of(self._state, names, self._backend.now() - self._began))
        return status

    def close(self) -> None:
        """Ends all lanes, and waits until they are gone. Trials that have not ended are broken off."""
        if self._closing:
            return
        if self._view is not None:
            self._view.close()  # first, so that it can still ask how things stand
        self._closing = True
        with contextlib.suppress(ValueError):
            _in_force.remove(self)
        self._backend.wake()
        self._pump.join()
        atexit.unregister(self.close)

    def __enter__(self) -> FluidExecutor:
        _in_force.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- calls, from the user's threads --------------------------------------------------------------------

    def _call(self, work: Callable[[], Any]) -> Any:
        """Has the pump do something between two events, and returns or raises what came of it."""
        if self._closing or self._broken is not None:
            raise FluidError("the executor is closed") from self._broken
        if threading.current_thread() is self._pump:
            return work()
        answer: Future[Any] = Future()
        self._calls.put((work, answer))
        self._backend.wake()
        while not answer.done():
            wait([answer], timeout=_PUMP_CHECK)
            if not self._pump.is_alive() and not answer.done():
                raise FluidError("the executor is closed") from self._broken
        return answer.result()

    def _refuse_taken(self, trials: list[Trial]) -> None:
        """Refuses ids that are taken, before the backend is told anything about them."""
        taken = self._call(lambda: [trial.id for trial in trials if trial.id in self._state.trials])
        if taken:
            raise InvalidFieldError("trial_id", taken[0], "is taken by another trial of this session")

    def _register(self, trial: Trial) -> TrialSpec:
        self._backend.register(trial.id, trial.trainable, trial.config)
        elastic = is_elastic(trial.trainable)
        return TrialSpec(
            trial.id,
            trial.budget,
            trial.priority,
            trial.key,
            (trial.max_width or self._state.scheduling.planner.d) if elastic else 1,
            trial.memory,
            can_save(trial.trainable),
        )

    def _go_on(self, left: LeftSession) -> None:
        """Tells the engine of the groups of an earlier session."""
        controls = Controls(add=self._add, stop=self._stop, extend=self._extend, eta=self._eta)
        for event in left.events(self._backend.now()):
            name, trials = left.groups[event.group_id]
            for trial in trials.values():
                self._backend.register(trial.id, trial.trainable, trial.config)
            handle = TrialGroupHandle(event.group_id, TrialGroup(trials.values(), name), controls)
            ended = {history.trial.trial_id: history.ended for history in event.trials if history.ended}
            handle.take_over(ended, left.recovered.failures)
            self._handles[event.group_id] = handle
            self._handle(event)
        self._groups = itertools.count(len(self._handles))

    def _add(self, group_id: str, trial: Trial) -> None:
        self._refuse_taken([trial])
        spec = self._register(trial)

        def add() -> None:
            self.folder.write_trials(group_id, self._handles[group_id].name, [trial])
            self._handle(TrialAdded(self._backend.now(), group_id, spec))
            self._handles[group_id].reopen(trial.id)

        self._call(add)

    def _stop(self, trial_id: str) -> None:
        self._call(lambda: self._handle(StopRequested(self._backend.now(), trial_id)))

    def _extend(self, trial_id: str, budget: int) -> None:
        def extend() -> None:
            self._handle(BudgetExtended(self._backend.now(), trial_id, budget))
            trial = self._state.trials[trial_id]
            if not trial.state.ended:
                self._handles[trial.group_id].reopen(trial_id)

        self._call(extend)

    def _eta(self, group_id: str) -> float | None:
        eta: float | None = self._call(lambda: eta_of(self._state, group_id))
        return eta

    # -- the pump ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            devices = self._backend.devices()
            self.folder.write_session(planner=self._planner, devices=[asdict(device) for device in devices])
            for device in devices:
                self._handle(DeviceAdded(self._backend.now(), device))
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._backend.close()
            self._break_off(self._broken or FluidError("the executor was closed"))
            self.folder.write_profile(self._state.profile)
            self.folder.close()

    def _turn(self) -> None:
        """One round: the user's calls, then what the backend reports, then a tick if one is due."""
        answered = self._answer_calls()
        events = self._backend.poll(_SETTLING if self._state.wants_tick else None)
        if events:
            self._handle(*events)
        elif self._state.wants_tick and not answered:
            self._handle(Tick(self._backend.now()))

    def _answer_calls(self) -> bool:
        answered = False
        for work, answer in self._waiting_calls():
            answered = True
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
        return answered

    def _waiting_calls(self) -> Iterator[tuple[Callable[[], Any], Future[Any]]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._calls.get_nowait()

    def _handle(self, *events: Event) -> None:
        commands = self._state.handle(*events)
        self.folder.journal(events, commands)
        self._backend.execute([command for command in commands if not isinstance(command, (Report, ReportEnd))])
        self._publish(commands)

    def _publish(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Report):
                self._handles[command.group_id].report(command)
            elif isinstance(command, ReportEnd):
                self._handles[command.group_id].report_end(command)

    def _break_off(self, error: BaseException) -> None:
        for _, answer in self._waiting_calls():
            answer.set_exception(FluidError("the executor is closed"))
        for handle in self._handles.values():
            handle.break_off(error)


def submit_trialgroup(group: TrialGroup) -> TrialGroupHandle:
    """Submits a group to the executor in force: the innermost ``with FluidExecutor(...)``, or a default one.

    The default one is made on first use, and closed when the process ends.
    """
    if not _in_force:
        _in_force.append(FluidExecutor())
    return _in_force[-1].submit_trialgroup(group)


def _make_backend(backend: str | Backend, devices: int | list[Device] | None, run_dir: Path) -> Backend:
    if not isinstance(backend, str):
        return backend
    if backend == "ray" or (backend == "auto" and _ray_is_connected()):
        from fluid.backends.ray import RayBackend

        on_ray: Backend = RayBackend(devices=devices, run_dir=run_dir)
        return on_ray
    from fluid.backends.local import LocalBackend

    return LocalBackend(devices=devices, run_dir=run_dir)


def _ray_is_connected() -> bool:
    """Whether this process uses Ray already; it is not imported to find out."""
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _make_view(executor: FluidExecutor) -> Any:
    from fluid.live import LiveView

    return LiveView(executor.status) if LiveView.wanted() else None
