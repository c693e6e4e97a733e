"""FluidExecutor: runs TrialGroups on real devices. A :class:`fluid.session.session.Session` does the work."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fluid.backends.base import Backend
from fluid.display.terminal import Terminal
from fluid.engine.state import DEFAULT_MAX_FAILURES
from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.loggers.attached import Attached
from fluid.loggers.logger import refuse_logger
from fluid.planning.profile import Profile
from fluid.resources import Device, DeviceChoice
from fluid.session.handle import TrialGroupHandle
from fluid.session.in_force import InForce
from fluid.session.inbox import GroupInbox
from fluid.session.live_trials import LiveTrials
from fluid.session.notice import NOTICE
from fluid.session.options import DEFAULT_MAX_FUSED, ExecutorOptions
from fluid.session.reprs import session_facts, table_html
from fluid.session.results import TrialListener, require_listener
from fluid.session.resume import read_session
from fluid.session.run_folder import RunFolder
from fluid.session.saving import save_all
from fluid.session.session import Session
from fluid.session.status import Status
from fluid.trialgroup import TrialGroup

if TYPE_CHECKING:
    from fluid.results.tables import DataFrame


class FluidExecutor:
    """Runs TrialGroups. Use it as a context manager, or call :meth:`close`; no process is left behind.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> def train(config):
        ...     for step in range(1, 100):
        ...         yield {"loss": config["lr"] / step}
        >>> trials = [Trial(train, {"lr": lr}, budget=3) for lr in (0.3, 0.9)]
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     results = list(executor.submit_trialgroup(TrialGroup(trials)).results())
        >>> sorted((result.config["lr"], result.iteration) for result in results)
        [(0.3, 1), (0.3, 2), (0.3, 3), (0.9, 1), (0.9, 2), (0.9, 3)]
        >>> round(min(result.metrics["loss"] for result in results), 2)
        0.1

    Args:
        backend: ``"local"`` for processes on this machine; ``"ray"`` for those of a Ray cluster; ``"auto"``, the
            default, for the Ray cluster that this process is connected to, and local processes if there is none; or a
            backend object.
        devices: how many devices to use: GPUs if there are any, else CPU cores; or which of them: ``[0, 1]``,
            ``"cuda:1"``, ``"cpu"`` or a list of :class:`Device`; ``None``, the default, or ``"all"`` for all.
        planner: ``"portfolio"``, the default, ``"dynamic"``, ``"static"`` or ``"fifo"``.
        packing: how trials share a device. ``"fused"``: those of one shape train as one batched model.
            ``"timeslice"``: in processes that take turns on a GPU; ``"mps"``: side by side, by NVIDIA MPS. ``"auto"``,
            the default: what is measured to pay. ``"off"``: they do not (``docs/gpu_sharing.md``, ``docs/fused.md``).
        max_packing: most trials with a process of their own on one device; ``None``, the default, for 4.
        max_width: most devices for one trial; ``None``, the default, for 8. Trials that are not elastic take one.
        max_fused: most trials in one fused pack; 64 by default. 1 switches fusing off.
        max_failures: times that a failed trial is tried again; 2 by default, 0 for never.
        profile: measurements of earlier sessions, which this one adds to; ``None``, the default, for none.
        process_group: how the devices of one trial communicate: ``"torch"`` (NCCL between GPUs, shared memory between
            CPUs of one machine, else gloo) or ``"horovod"``; ``None``, the default, for the backend's own, which is
            ``"torch"`` unless you pass a backend object.
        run_dir: folder for this session's journal, results and logs, in which no session has written yet; ``None``,
            the default, for a new one in ``$FLUID_RUNS``, or in ``~/fluid_runs`` if that is not set.
        verbose: 1, the default, for live progress on a terminal and what trials print; 0 for neither.
        lane_policy: which of several trials in it a lane runs next: ``"longest_first"``, the default, the one with the
            longest work left; ``"srtf"``, the shortest; ``"fair"``, the one that has run least.
        keep: which checkpoints outlive the session: ``"none"``, the default; ``"last"``, the newest of each trial;
            ``"best:k"``, those of the k best trials of each group by the metric of its search (``docs/results.md``).
        checkpoint_bytes: most bytes of these, such as ``"10GB"``; ``None``, the default, for no limit.
        loggers: get all results, in a thread of their own: :class:`fluid.loggers.TensorBoard` and so on, or any
            :class:`TrialListener`; none by default (``docs/logging.md``).
        metrics_port: port of the loopback interface with metrics for Prometheus, 0 for any, or ``"address:port"``;
            ``None``, the default, for no metrics.

    Attributes:
        run_dir: the run folder.
        metrics_address: where the metrics are served, ``"127.0.0.1:9400"``; ``None`` if they are not.

    Raises:
        InvalidFieldError: an argument cannot be used, or MPS was asked for and is not available.
        MissingDependencyError: Horovod is asked for and not installed.
    """

    def __init__(
        self,
        backend: str | Backend = "auto",
        devices: DeviceChoice = None,
        planner: str = "portfolio",
        packing: str = "auto",
        max_packing: int | None = None,
        max_width: int | None = None,
        *,
        max_fused: int = DEFAULT_MAX_FUSED,
        max_failures: int = DEFAULT_MAX_FAILURES,
        profile: Profile | None = None,
        process_group: str | None = None,
        run_dir: str | Path | None = None,
        verbose: int = 1,
        lane_policy: str | None = None,
        keep: str = "none",
        checkpoint_bytes: int | str | None = None,
        loggers: Sequence[TrialListener] = (),
        metrics_port: int | str | None = None,
        _folder: RunFolder | None = None,
    ) -> None:
        options = ExecutorOptions(
            backend=backend,
            devices=devices,
            planner=planner,
            packing=packing,
            max_packing=max_packing,
            max_width=max_width,
            max_fused=max_fused,
            max_failures=max_failures,
            process_group=process_group,
            verbose=verbose,
            lane_policy=lane_policy,
            keep=keep,
            checkpoint_bytes=checkpoint_bytes,
        )
        self._folder = _folder or RunFolder.create(run_dir)
        self.run_dir = self._folder.path
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.close)
            self._attached = Attached(loggers, metrics_port, self._folder, self.status)
            undo.callback(self._attached.close)
            chosen = options.make_backend(self.run_dir)
            undo.pop_all()
        self.metrics_address = self._attached.metrics_address
        self._closing, self._close_lock = False, threading.RLock()  # Held while the session is closed.
        self._handles: WeakValueDictionary[str, TrialGroupHandle] = WeakValueDictionary()  # By group id, while used.
        engine = options.make_engine(profile, chosen)
        self._session = Session(engine, chosen, self._folder, options.plans.d, options.facts, options.retention)
        atexit.register(self.close)
        NOTICE.watch(self, partial(save_all, self._session))
        self._terminal = Terminal(self.status, chosen, is_shown=bool(verbose))

    def __repr__(self) -> str:
        return f"<FluidExecutor {'; '.join(f'{name}: {text}' for name, text in session_facts(self._session).items())}>"

    def _repr_html_(self) -> str:
        return table_html(session_facts(self._session))

    # -- trials --------------------------------------------------------------------------------------------

    def submit_trialgroup(self, group: TrialGroup, listener: TrialListener | None = None) -> TrialGroupHandle:
        """Runs a group; returns at once.

        Args:
            group: the trials to run, at least one.
            listener: gets every start, result and end as it happens; the handle then keeps no results.

        Raises:
            InvalidFieldError: a trial's id is taken, its trainable or config cannot be pickled, or the listener is
                none. Nothing of the group runs then, and nothing of it is left; what runs already is not disturbed.
        """
        if not isinstance(group, TrialGroup):
            raise InvalidFieldError("group", group, "must be a TrialGroup")
        if listener is not None:
            require_listener(listener)
            refuse_logger(listener, "listener")
        if not group.active:
            raise InvalidFieldError("group", group.name, "has no active trial")
        handle = self._handle_of(self._session.submit(group, listener))
        self._terminal.begin_group()
        return handle

    @classmethod
    def resume(cls, run_dir: str | Path, **options: Any) -> FluidExecutor:
        """Goes on with a session whose driver was killed: :attr:`handles` has its groups.

        Trials that had not ended go on from their newest checkpoint that can still be read. Iterations reported before
        are in ``handle.results()`` too, with metrics as JSON has them, and are not reported again. Trainables and
        configs are unpickled from ``payloads.pkl``, so resume only folders that you trust.

        Args:
            run_dir: folder of the session; the new one appends to its files.
            options: as for :class:`FluidExecutor`; ``keep`` and ``checkpoint_bytes`` are the session's by default.
                Also ``listeners``, by name of a group: they get what its trials report from now on.

        Raises:
            InvalidFieldError: the folder is not that of a session, its session still runs, it is of a newer Fluid, or
                its files cannot be read.
        """
        for listener in (listeners := options.pop("listeners", {})).values():
            require_listener(listener)
        folder = RunFolder.reopen(run_dir)
        try:
            left = read_session(folder.path)
            executor = cls(_folder=folder, **{**left.options, **options})
        except BaseException:
            folder.close()
            raise
        try:
            executor._attached.recall(left)
            executor._session.resume(left, listeners)
        except BaseException:
            executor.close()
            raise
        return executor

    @property
    def handles(self) -> list[TrialGroupHandle]:
        """The groups of this session, in order of submission."""
        return list(map(self._handle_of, self._session.inboxes))

    def dataframe(self, every: str = "trial") -> DataFrame:
        """A table of all trials of this session, as they stand now: see :meth:`fluid.SweepResult.dataframe`."""
        return LiveTrials(self._session, self._session.inboxes).sweep().dataframe(every)

    def _handle_of(self, inbox: GroupInbox) -> TrialGroupHandle:
        return self._handles.setdefault(inbox.group_id, TrialGroupHandle(self._session, inbox))

    # -- devices, and how it stands ------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Puts a further device to use while trials run.

        Raises:
            InvalidFieldError: the device does not exist, or is in use already.
        """
        self._session.add_device(device)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up: its trials go on elsewhere from their newest checkpoint."""
        self._session.remove_device(device_id)

    def drain(self, device: int | Device, deadline_s: float) -> bool:
        """Gives a device up without losing work; waits until it is gone.

        The device takes no new trial. Each trial that runs there is paused at the end of its iteration, saved to disk,
        and goes on elsewhere; no iteration is repeated. States that the device keeps are saved too. At the deadline the
        device is removed as it is: trials that are not saved by then go on from their newest checkpoint.

        Args:
            device: its index, or the device.
            deadline_s: seconds that trials have to be saved. One that cannot be saved runs on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the device is not in use, or the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        index = device.index if isinstance(device, Device) else require_integer("device", device, at_least=0)
        return not self._session.drain(index, require_number("deadline_s", deadline_s, at_least=0.0))

    def drain_all(self, deadline_s: float) -> bool:
        """Saves all trials, so that :meth:`close` loses nothing; waits until they are saved.

        No trial starts any more. Each trial that runs is paused at the end of its iteration and saved to disk.
        :meth:`resume` then goes on with the session and repeats nothing.

        Args:
            deadline_s: seconds that trials have to be saved. One that cannot be saved runs on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        return not self._session.drain(None, require_number("deadline_s", deadline_s, at_least=0.0))

    @property
    def session(self) -> Session:
        """What runs the trials; for integrations."""
        return self._session

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._session.profile

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return self._session.devices

    @property
    def max_devices(self) -> int:
        """Most devices that the session may come to hold: those in use, or ``autoscale`` if that is more."""
        return self._session.max_devices

    def status(self) -> Status:
        """How the session stands."""
        return self._session.status()

    @property
    def is_live(self) -> bool:
        """Whether a live view of this executor is shown, on a terminal or in a notebook."""
        return self._terminal.is_live

    def announce(self, text: str) -> None:
        """Shows in the live view what is about to begin, until the next group is submitted; for integrations."""
        self._terminal.announce(text)

    # -- its end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all lanes, and waits until they are gone. Trials that have not ended are broken off.

        A second call waits for the first. Called by a listener, it returns at once, and the session ends after the
        listener. An error while closing, such as that of a Ray cluster that is gone, is logged.
        """
        if self._session.is_in_thread:
            self._closing = True
            NOTICE.unwatch(self)
            self._session.close()
            return  # Another call waits until all is gone: that of the with block, or the one at the program's end.
        with self._close_lock:
            if not self._closing:
                self._terminal.close_view()  # First, so that it can still ask how things stand.
            self._closing = True
            NOTICE.unwatch(self)
            IN_FORCE.leave(self)
            self._session.close()
            self._attached.close()
            self._terminal.close()
            atexit.unregister(self.close)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    def __enter__(self) -> FluidExecutor:
        IN_FORCE.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- the executor in force ----------------------------------------------------------------------------------

IN_FORCE: InForce[FluidExecutor] = InForce()


def submit_trialgroup(group: TrialGroup, listener: TrialListener | None = None) -> TrialGroupHandle:
    """Submits a group to the executor in force.

    That is the innermost ``with FluidExecutor(...)`` block that the calling thread or asyncio task is in; where it is
    in none, the innermost one of the process; where there is none, a default executor, which is made on first use and
    closed when the process ends.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, submit_trialgroup
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0):
        ...     handle = submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5})]))
        ...     [result.metrics for result in handle.results()]
        [{'loss': 0.25}]

    Args:
        group: the trials to run.
        listener: as for :meth:`FluidExecutor.submit_trialgroup`.

    Raises:
        InvalidFieldError: as for :meth:`FluidExecutor.submit_trialgroup`.
    """
    with IN_FORCE.lock:
        if (executor := IN_FORCE.find()) is None:
            executor = FluidExecutor()
            IN_FORCE.make_default(executor)
    return executor.submit_trialgroup(group, listener)


def executor_in_force() -> FluidExecutor | None:
    """Returns the executor that :func:`submit_trialgroup` would use; ``None`` if it would make one."""
    return IN_FORCE.find()


@contextlib.contextmanager
def executor_scope(given: FluidExecutor | None, **options: Any) -> Iterator[FluidExecutor]:
    """The one given, that in force, or a new one with these options; closed at the end unless it is in force."""
    executor = given or executor_in_force() or FluidExecutor(**options)
    try:
        yield executor
    finally:
        if not IN_FORCE.has(executor):
            executor.close()
        else:
            executor._terminal.flush()
