"""FluidExecutor: runs TrialGroups on real devices. The thread of its :mod:`fluid.session.pump` does the work."""

from __future__ import annotations

import atexit
import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fluid.backends.base import Backend
from fluid.elastic.messages import require_process_group
from fluid.engine.events import (
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceLost,
    GroupSubmitted,
    StopRequested,
    TrialAdded,
    TrialForgotten,
    TrialSpec,
)
from fluid.engine.state import DEFAULT_MAX_FAILURES, EngineState
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.lane.policy import DEFAULT_POLICY, POLICIES
from fluid.planners.by_name import make_planner
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.resources import Device
from fluid.session.backend_choice import make_backend
from fluid.session.handle import Controls, TrialGroupHandle
from fluid.session.pump import Pump
from fluid.session.results import TrialListener
from fluid.session.resume import LeftSession, read_session
from fluid.session.run_folder import RunFolder
from fluid.session.status import Status, eta_of, status_of
from fluid.trainables.payload import PayloadCache, TrialPayload
from fluid.trainables.trainable import can_save, is_elastic
from fluid.trialgroup import Trial, TrialGroup

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
        packing: all but ``"off"`` pack trials on a device as far as it is measured to pay. Those on one GPU run in
            turns with ``"timeslice"`` and side by side with ``"mps"``, which needs NVIDIA MPS; ``"auto"`` takes MPS
            where it can be used. See ``docs/gpu_sharing.md``.
        max_packing: most trials on one device.
        max_width: most devices for one trial.
        max_failures: times a trial is tried again after it failed.
        profile: what earlier sessions measured; it goes on learning.
        process_group: what the devices of one trial talk through: ``"torch"`` (NCCL between GPUs, memory between CPUs
            of one machine, else gloo) or ``"horovod"``; ``None`` for the backend's own, which is ``"torch"`` unless
            you make one yourself.
        run_dir: folder for this run's journal, results and logs; ``None`` for a new one in ``~/fluid_runs``.
        verbose: 1 for live progress on a terminal, 0 for silence.
        lane_policy: which trial a lane runs next if several have iterations left in it: ``"longest_first"`` (the
            default), the one with the longest work left; ``"srtf"``, the shortest; ``"fair"``, the one served least.

    Raises:
        InvalidFieldError: an argument cannot be used, or MPS was asked for and cannot be had.
        MissingDependencyError: Horovod is asked for and not installed.
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
        process_group: str | None = None,
        run_dir: str | Path | None = None,
        verbose: int = 1,
        lane_policy: str | None = None,
    ) -> None:
        require_one_of("packing", packing, PACKING)
        if lane_policy is not None:
            require_one_of("lane_policy", lane_policy, tuple(POLICIES))
        packed = DEFAULT_MAX_PACKING if max_packing is None else require_integer("max_packing", max_packing, at_least=1)
        widest = DEFAULT_MAX_WIDTH if max_width is None else require_integer("max_width", max_width, at_least=1)
        plans = make_planner(planner, c=packed, d=widest)
        if isinstance(devices, int):
            require_integer("devices", devices, at_least=1)
        if isinstance(backend, str):
            require_one_of("backend", backend, BACKENDS)
        failures = require_integer("max_failures", max_failures, at_least=0)
        if process_group is not None:
            require_process_group(process_group)
            if not isinstance(backend, str):
                raise InvalidFieldError("process_group", process_group, "is up to the backend, which is made already")
        self.folder = RunFolder.create(run_dir)
        try:
            wanted = "timeslice" if packing == "off" or (packing == "auto" and packed == 1) else packing
            self._backend = make_backend(backend, devices, self.folder.path, wanted, lane_policy, process_group)
        except BaseException:
            self.folder.close()
            raise
        self._state = EngineState(
            plans,
            profile,
            max_packing=1 if packing == "off" else packed,
            max_failures=failures,
        )
        facts = {"planner": planner, "packing": packing, "lane_policy": lane_policy or DEFAULT_POLICY}
        self._groups = itertools.count()
        self._payloads = PayloadCache()
        self._closing = False
        self._pump = Pump(self._state, self._backend, self.folder, facts)
        atexit.register(self.close)
        self._view = _make_view(self) if verbose else None

    # -- for the user --------------------------------------------------------------------------------------

    def submit_trialgroup(self, group: TrialGroup, listener: TrialListener | None = None) -> TrialGroupHandle:
        """Runs a group; returns at once.

        Args:
            group: what to run.
            listener: told of what happens as it does; the handle keeps no results then.

        Raises:
            InvalidFieldError: a trial's id is taken, or its trainable or config cannot be sent to another process.
                Nothing of the group runs then, and what runs already is not disturbed.
        """
        if not isinstance(group, TrialGroup):
            raise InvalidFieldError("group", group, "must be a TrialGroup")
        trials = group.active
        if not trials:
            raise InvalidFieldError("group", group.name, "has no active trial")
        payloads = {trial: self._payloads.payload_of(trial.trainable, trial.config) for trial in trials}
        group_id = f"{next(self._groups)}"
        handle = TrialGroupHandle(group_id, group, self._controls(), listener)
        specs = tuple(map(self._spec, trials))

        def accepted() -> None:
            self._pump.handles[group_id] = handle
            self._take_in(group_id, handle, payloads)

        def submit() -> None:
            self._pump.handle(GroupSubmitted(self._backend.now(), group_id, specs), accepted=accepted)

        self._pump.call(submit)
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
        executor._pump.call(lambda: executor._go_on(left))
        return executor

    @property
    def handles(self) -> list[TrialGroupHandle]:
        """The groups of this session, in order of submission."""
        return list(self._pump.handles.values())

    def add_device(self, device: Device) -> None:
        """Puts a further device to use while trials run."""

        def add() -> None:
            self._backend.add_devices([device])
            self._pump.handle(DeviceAdded(self._backend.now(), device))

        self._pump.call(add)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up: its trials go on elsewhere from their newest checkpoint."""
        self._pump.call(lambda: self._pump.handle(DeviceLost(self._backend.now(), device_id)))

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._state.profile

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return list(self._pump.call(lambda: list(self._state.occupancy.devices)))

    def status(self) -> Status:
        """How the session stands."""
        groups = {group_id: (handle.name, handle.search) for group_id, handle in list(self._pump.handles.items())}
        status: Status = self._pump.call(lambda: status_of(self._state, groups, self._backend.now() - self._pump.began))
        return status

    def close(self) -> None:
        """Ends all lanes, and waits until they are gone. Trials that have not ended are broken off."""
        if self._view is not None and not self._closing:
            self._view.close()  # First, so that it can still ask how things stand.
        self._closing = True
        with contextlib.suppress(ValueError):
            _in_force.remove(self)
        self._pump.close()
        atexit.unregister(self.close)

    def __enter__(self) -> FluidExecutor:
        _in_force.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- calls, from the user's threads --------------------------------------------------------------------

    def _take_in(self, group_id: str, handle: TrialGroupHandle, payloads: dict[Trial, TrialPayload]) -> None:
        """Makes trials that the engine has accepted known to the backend, and writes them."""
        for trial, payload in payloads.items():
            self._backend.register(trial.id, payload)
        self.folder.write_trials(group_id, handle.name, payloads, handle.search)

    def _spec(self, trial: Trial) -> TrialSpec:
        elastic = is_elastic(trial.trainable)
        return TrialSpec(
            trial.id,
            trial.budget,
            priority=trial.priority,
            profile_key=trial.key,
            max_width=(trial.max_width or self._state.planner.d) if elastic else 1,
            memory=trial.memory,
            can_save=can_save(trial.trainable),
            retry_errors=trial.retry_errors,
            follow_up_iterations=trial.follow_up_iterations,
        )

    def _controls(self) -> Controls:
        return Controls(
            add=self._add,
            stop=self._stop,
            extend=self._extend,
            call=self._call_method,
            forget=self._forget,
            eta=self._eta,
        )

    def _go_on(self, left: LeftSession) -> None:
        """Tells the engine of the groups of an earlier session."""
        for event in left.events(self._backend.now()):
            name, trials = left.groups[event.group_id]
            payloads = {trial.id: self._payloads.payload_of(trial.trainable, trial.config) for trial in trials.values()}
            handle = TrialGroupHandle(event.group_id, TrialGroup(trials.values(), name), self._controls())
            ended = {history.trial.trial_id: history.ended for history in event.trials if history.ended}
            handle.take_over(ended, left.recovered.failures)
            self._pump.handles[event.group_id] = handle

            def register(payloads: dict[str, TrialPayload] = payloads) -> None:
                for trial_id, payload in payloads.items():
                    self._backend.register(trial_id, payload)

            self._pump.handle(event, accepted=register)
        self._groups = itertools.count(len(self._pump.handles))

    def _add(self, group_id: str, trials: list[Trial]) -> None:
        payloads = {trial: self._payloads.payload_of(trial.trainable, trial.config) for trial in trials}
        specs = list(map(self._spec, trials))

        def add() -> None:
            handle, now = self._pump.handles[group_id], self._backend.now()
            self._pump.handle(
                *(TrialAdded(now, group_id, spec) for spec in specs),
                accepted=lambda: self._take_in(group_id, handle, payloads),
            )
            self._pump.tell(*(partial(handle.reopen, trial.id) for trial in trials))

        self._pump.call(add)

    def _stop(self, trial_id: str, outcome: str | None) -> None:
        self._pump.call(lambda: self._pump.handle(StopRequested(self._backend.now(), trial_id, outcome)))

    def _extend(self, trial_id: str, budget: int, follow_up_iterations: int) -> None:
        def extend() -> None:
            self._pump.handle(
                BudgetExtended(self._backend.now(), trial_id, budget, follow_up_iterations=follow_up_iterations)
            )
            trial = self._state.trials[trial_id]
            if not trial.state.ended:
                self._pump.tell(partial(self._pump.handles[trial.group_id].reopen, trial_id))

        self._pump.call(extend)

    def _call_method(self, trial_id: str, call_id: int, method: str, payload: bytes) -> None:
        self._pump.call(
            lambda: self._pump.handle(
                CallRequested(self._backend.now(), trial_id, call_id=call_id, method=method, payload=payload)
            )
        )

    def _forget(self, trial_id: str) -> None:
        def forget() -> None:
            known = self._state.trials.get(trial_id)
            self._pump.handle(TrialForgotten(self._backend.now(), trial_id))
            self._pump.tell(partial(self._backend.forget, trial_id))
            if known is not None:
                self._pump.tell(partial(self._pump.handles[known.group_id].drop, trial_id))

        self._pump.call(forget)

    def _eta(self, group_id: str) -> float | None:
        eta: float | None = self._pump.call(lambda: eta_of(self._state, group_id))
        return eta


def submit_trialgroup(group: TrialGroup, listener: TrialListener | None = None) -> TrialGroupHandle:
    """Submits a group to the executor in force: the innermost ``with FluidExecutor(...)``, or a default one.

    The default one is made on first use, and closed when the process ends.
    """
    if not _in_force:
        _in_force.append(FluidExecutor())
    return _in_force[-1].submit_trialgroup(group, listener)


def executor_in_force() -> FluidExecutor | None:
    """Returns the executor that :func:`submit_trialgroup` would use; ``None`` if it would make one."""
    return _in_force[-1] if _in_force else None


def is_in_force(executor: FluidExecutor) -> bool:
    """Whether an executor is in a ``with`` block that has not ended."""
    return any(other is executor for other in _in_force)


@contextlib.contextmanager
def executor_scope(given: FluidExecutor | None) -> Iterator[FluidExecutor]:
    """The executor to run on: the one given, that in force or a new one; closed at the end unless it is in force."""
    executor = given or executor_in_force() or FluidExecutor()
    try:
        yield executor
    finally:
        if not is_in_force(executor):
            executor.close()


def _make_view(executor: FluidExecutor) -> Any:
    from fluid.display.live import LiveView

    return LiveView(executor.status) if LiveView.wanted() else None
