"""FluidExecutor: runs TrialGroups on real devices. A :class:`fluid.session.session.Session` does the work."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fluid.backends.base import Backend
from fluid.display.terminal import Terminal
from fluid.errors import FluidError, InvalidFieldError
from fluid.keeping import Keep
from fluid.loggers.hub import Attached
from fluid.loggers.logger import refuse_logger
from fluid.measure.profile import Profile
from fluid.packing import Sharing
from fluid.policies.owners.deadlines import GivenDeadline
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY
from fluid.processes.collector import collector_held
from fluid.rehearsal.plan import plan_in_force
from fluid.resources import DeviceChoice
from fluid.results.run_files import is_used
from fluid.session.folder.folder import RunFolder, folder_of
from fluid.session.folder.given_code import GivenCode
from fluid.session.folder.resume import read_session
from fluid.session.handle import TrialGroupHandle, session_facts, table_html
from fluid.session.inbox import GroupInbox
from fluid.session.joint.session import joining
from fluid.session.listeners import TrialListener, require_listener
from fluid.session.live_trials import LiveTrials
from fluid.session.neighbours import Neighbours, SessionDevices
from fluid.session.notice import NOTICE, InForce
from fluid.session.options import DEFAULT_SPARE_LANES, ExecutorOptions, FlatOptions, flattened, goals_left
from fluid.session.output import Output
from fluid.session.session import Session, SessionDoor, save_all
from fluid.session.specs import terms_of
from fluid.session.status import Status
from fluid.session.waits import in_a_sessions_thread
from fluid.sizing.goals import Goals
from fluid.trialgroup import TrialGroup
from fluid.user_calls import user_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fluid.results.tables import DataFrame


class FluidExecutor(SessionDoor):
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
            default, for the Ray cluster that this process is connected to, and local processes if there is none;
            ``"simulated"`` to rehearse on a virtual clock (``docs/rehearsal.md``); or a backend object.
        devices: how many devices to use: GPUs if there are any, else CPU cores; or which of them: ``[0, 1]``,
            ``"cuda:1"``, ``"cpu"`` or a list of :class:`Device`; ``None``, the default, or ``"all"`` for all.
        planner: ``"portfolio"``, the default, ``"dynamic"``, ``"static"`` or ``"fifo"``.
        packing: a field of ``sharing`` by itself.
        max_packing: another one.
        max_width: most devices for one trial; ``None``, the default, for 8. Trials that are not elastic take one.
        sharing: how trials share devices and processes: a :class:`fluid.Sharing`; ``None``, the default, for what is
            measured to pay.
        goals: when all is to have ended, and for how much money: a :class:`fluid.Goals`; ``None``, the default, for no
            deadline and no budget.
        keep: which checkpoints outlive the session: a :class:`fluid.Keep`, or its first field: ``"none"``, ``"last"``
            or ``"best:k"``. ``None``, the default: the best trial's of each sweep of :func:`fluid.run`, and none of
            other groups.
        output: what is told of the session, where: a :class:`fluid.Output`; ``None``, the default, for progress on a
            terminal and a new run folder.
        max_failures: times that a failed trial is tried again, 0 for never. ``None``, the default: twice; once if it
            then fails alike, and never what cannot succeed (``docs/failures.md``).
        profile: measurements of earlier sessions, which this one adds to; ``None``, the default, for none.
        process_group: how the devices of one trial communicate: ``"torch"`` (NCCL between GPUs, shared memory between
            CPUs of one machine, else gloo) or ``"horovod"``; ``None``, the default, for the backend's own, which is
            ``"torch"`` unless you pass a backend object.
        group_policy: which of several groups gets devices first (``docs/deadlines.md``). ``"irs"``, the default: scarce
            devices go to those that can use no others, then the group with the least work left is first; ``"srsf"``:
            that group is first; ``"fifo"``: the one that came first.
        fairness: 0, the default, for the shortest mean time of groups; with more, such as 2, groups that got less than
            their share of the devices come earlier.
        spare_lanes: warm processes per device that no trial has used, for the next trial to start there, or one whose
            process dies; beyond one, no more than trials wait (``docs/trainables.md``). 1 by default, 0 for none.
        flat: further fields of these objects by themselves, as ``packing="off"`` means ``sharing=Sharing("off")``:
            ``isolation``, ``lane_policy``, ``rounds``, ``max_fused``; ``deadline``, ``budget_usd``,
            ``price_per_device_hour``; ``checkpoint_bytes``; ``verbose``, ``loggers``, ``metrics_port``, ``run_dir``,
            ``join``, ``if_exists``. What is given both ways must be the same.

    Attributes:
        run_dir: the run folder.
        metrics_address: where the metrics are served, ``"127.0.0.1:9400"``; ``None`` if they are not.

    Raises:
        InvalidFieldError: an argument cannot be used, or MPS was asked for and is not available.
        MissingDependencyError: Horovod is asked for and not installed.
    """

    @user_call(also=FlatOptions.__annotations__)
    def __init__(
        self,
        backend: str | Backend = "auto",
        devices: DeviceChoice = None,
        planner: str = "portfolio",
        packing: str | None = None,
        max_packing: int | None = None,
        max_width: int | None = None,
        *,
        sharing: Sharing | None = None,
        goals: Goals | None = None,
        keep: Keep | str | None = None,
        output: Output | None = None,
        max_failures: int | None = None,
        profile: Profile | None = None,
        process_group: str | None = None,
        group_policy: str = DEFAULT_GROUP_POLICY,
        fairness: float = 0.0,
        spare_lanes: int = DEFAULT_SPARE_LANES,
        _folder: RunFolder | None = None,
        _name: str = "",
        **flat: Unpack[FlatOptions],
    ) -> None:
        rehearsed = plan_in_force()
        packed = {"packing": packing, "max_packing": max_packing}
        asked: dict[str, Any] = {
            "backend": backend,
            "devices": devices,
            "planner": planner,
            "sharing": sharing,
            "goals": goals,
            "keep": keep,
            "output": output,
            "max_width": max_width,
            "max_failures": max_failures,
            "process_group": process_group,
            "group_policy": group_policy,
            "fairness": fairness,
            "spare_lanes": spare_lanes,
            **{name: value for name, value in packed.items() if value is not None},
            **flat,
        }
        options = ExecutorOptions.in_force(**asked)
        is_rehearsed = rehearsed is not None or backend == "simulated"
        if _folder is None and options.output.if_exists == "resume" and options.output.run_dir is not None:
            if is_rehearsed:
                reason = "cannot be in a rehearsal, which begins anew"
                raise InvalidFieldError("if_exists", "resume", reason)
            if is_used(folder_of(options.output.run_dir)):
                named = {**asked, "profile": profile}
                given = {name: value for name, value in named.items() if name in flat or not _is_default(name, value)}
                self._go_on(options.output.run_dir, given)
                return
        membership = joining(options.output, rehearsed=is_rehearsed)
        folder = options.output.run_dir if membership is None else membership.folder
        self._folder = _folder or RunFolder.create(folder, options.output.if_exists, name=_name)
        self.run_dir = self._folder.path
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.close)
            self._attached = Attached(options.output, self._folder, self.status)
            undo.callback(self._attached.close)
            chosen = options.make_backend(self.run_dir)
            engine = options.make_engine(profile, chosen)
            undo.pop_all()
        self.metrics_address = self._attached.metrics_address
        self._process: int = os.getpid()
        self._closing: bool = False
        self._close_lock = threading.RLock()  # Held while the session is closed.
        self._scopes = 0  # Sweeps that use it now: see executor_scope.
        self._handles: WeakValueDictionary[str, TrialGroupHandle] = WeakValueDictionary()  # By group id, while used.
        self._session = Session(
            engine,
            chosen,
            self._folder,
            options.plans.d,
            options.facts,
            options.keep,
            options.goals,
            options.isolating,
            membership,
            quiet=not options.output.verbose,
            widens_replayed=options.max_width is not None,
        )
        atexit.register(self.close)
        NOTICE.watch(self, partial(save_all, self._session), quiet=self._session.quiet)
        shared = None if membership is None else membership.shared
        own = SessionDevices.of(chosen, self.run_dir, shared) if options.output.verbose else None
        self._neighbours = Neighbours(own)
        self._terminal = Terminal(self.status, chosen, is_shown=bool(options.output.verbose))
        if rehearsed is not None and rehearsed.began is not None:
            rehearsed.began(self.run_dir)

    @collector_held()
    def _go_on(self, run_dir: str | Path, options: dict[str, Any]) -> None:
        """Makes this one that which goes on with a session, as for :meth:`resume`."""
        for listener in (listeners := options.pop("listeners", {})).values():
            require_listener(listener)
        given = GivenCode.checked(options.pop("trainables", {}), options.pop("code", "begun"))
        retry_failed = options.pop("retry_failed", False)
        if not isinstance(retry_failed, bool):
            raise InvalidFieldError("retry_failed", retry_failed, "must be True or False")
        if plan_in_force() is not None or options.get("backend") == "simulated":
            raise InvalidFieldError("run_dir", str(run_dir), "cannot be resumed in a rehearsal, which begins anew")
        asked = flattened({"run_dir": run_dir, **options})
        if (what := asked.get("if_exists", "resume")) != "resume":
            raise InvalidFieldError("if_exists", what, "cannot be where a session goes on")
        folder = RunFolder.reopen(run_dir)
        try:
            left = read_session(folder.path)
            folder.go_on_after(left.last_at)
            if retry_failed:
                left.retry_failed()
            changes = given.apply(left)
            merged = {**left.options, **goals_left(folder.path, asked), **asked}
            FluidExecutor.__init__(self, _folder=folder, **merged)
        except BaseException:
            folder.close()
            raise
        try:
            self._attached.recall(left)
            self._session.resume(left, listeners, changes)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<FluidExecutor {'; '.join(f'{name}: {text}' for name, text in session_facts(self._session).items())}>"

    def _repr_html_(self) -> str:
        return table_html(session_facts(self._session))

    @user_call
    def submit_trialgroup(
        self,
        group: TrialGroup,
        listener: TrialListener | None = None,
        *,
        priority: float = 1.0,
        preempt: bool = False,
        deadline: GivenDeadline = None,
        weight: float = 1.0,
        on_miss: str = "late",
    ) -> TrialGroupHandle:
        """Runs a group; returns at once.

        Args:
            group: the trials to run, at least one.
            listener: gets every start, result and end as it happens; the handle then keeps no results.
            priority: the group's trials start before those of groups of a lower priority, even if one of those
                trials has a higher priority of its own; 1 by default.
            preempt: whether running trials of groups of a lower priority make room: they pause between two
                iterations, and go on afterwards without repeating any. ``False`` by default.
            deadline: when the group is to have ended: seconds from the call, or text such as ``"2h"``; or steps of what
                an end costs, each after a time: ``[("1h", 1), ("2h", 3)]``, times and costs ascending. It orders groups
                so that as many as can be meet theirs; you hear as soon as it is known that this one cannot
                (``docs/deadlines.md``). Trials added later have it too. ``None``, the default, for no deadline.
            weight: how much it counts that the group is late, or, without a deadline, that it waits; 1 by default.
            on_miss: what happens to trials that have not ended at the deadline, of steps at the last one: ``"late"``,
                the default: they run on, behind what can be met; ``"stop"``: they are stopped, each after the last
                iteration that fits, whose result counts, and waiters go on. It needs a deadline.

        Raises:
            InvalidFieldError: a trial's id is taken, its trainable or config cannot be pickled, no device meets its
                requirements, one of the terms cannot be used, or the listener is none. Nothing of the group runs then,
                and nothing of it is left; what runs already is not disturbed.
            FluidError: no trial would run, as the session has ended or was drained, or no device works.
        """
        if not isinstance(group, TrialGroup):
            raise InvalidFieldError("group", group, "must be a TrialGroup, as in TrialGroup([trial])")
        if listener is not None:
            require_listener(listener)
            refuse_logger(listener, "listener")
        if not group.active:
            raise InvalidFieldError("group", group.name, "has no active trial")
        terms = terms_of(group, priority, preempt, deadline, weight, on_miss)
        handle = self._handle_of(self._session.submit(group, listener, terms))
        self._terminal.begin_group()
        return handle

    @classmethod
    @user_call
    def resume(cls, run_dir: str | Path, **options: Any) -> FluidExecutor:
        """Goes on with a session whose driver was killed: :attr:`handles` has its groups.

        Trials that had not ended go on from their newest checkpoint that can still be read. Iterations reported before
        are in ``handle.results()`` too, with metrics as JSON has them, and are not reported again. Trainables and
        configs are unpickled from ``payloads.pkl``, so resume only folders that you trust. A warning names what has
        changed of the code of the trainables, as far as it is seen (``docs/failures.md``).

        Args:
            run_dir: folder of the session; the new one appends to its files.
            options: as for :class:`FluidExecutor`; ``keep``, ``checkpoint_bytes``, the group policy and fairness, the
                price, and what is left of the deadline and the budget are the session's by default, also those that
                an object leaves out. Also ``listeners``, by name of a group: they get what its trials report from now
                on. ``trainables``, by name of a group: the trainable as it is now, or a :class:`Trial` without config
                and budget, whose other fields count, too, for all trials that have not ended. ``code``: ``"begun"``,
                the default, for trials that have reported nothing to take that trainable, where it has changed, and
                others to keep the one that they began with; ``"new"`` for all that have not ended to take it.
                ``retry_failed``: whether trials that have failed are tried again, from their last checkpoint if they
                have one; ``False`` by default.

        Raises:
            InvalidFieldError: the folder is not that of a session, its session still runs, it is of a newer Fluid, or
                its files cannot be read; or an option cannot be used.
        """
        executor = cls.__new__(cls)
        executor._go_on(run_dir, options)
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

    def close(self) -> None:
        """Ends all lanes, and waits until they are gone. Trials that have not ended are broken off.

        What they finish within 2 s counts, and their code has 60 s to clean up. A second call waits for the first.
        Called by a listener, it returns at once, and the session ends after the listener. An error while closing, such
        as that of a Ray cluster that is gone, is logged.

        Raises:
            FluidError: the session's thread has not ended within five minutes; the error says where it is.
        """
        if in_a_sessions_thread():
            self._closing = True
            NOTICE.unwatch(self)
            self._session.close()
            return  # Another call waits until all is gone: that of the with block, or the one at the program's end.
        with self._close_lock, contextlib.ExitStack() as rest:
            rest.callback(atexit.unregister, self.close)
            rest.callback(self._terminal.close)
            rest.callback(self._attached.close)
            rest.callback(self._neighbours.leave)
            if not self._closing:
                self._terminal.close_view()  # First, so that it can still ask how things stand.
            self._closing = True
            NOTICE.unwatch(self)
            IN_FORCE.leave(self)
            self._session.close()

    def close_if_unused(self) -> None:
        """Closes it, unless it is in force or a sweep uses it; for integrations that are given an executor."""
        with IN_FORCE.lock:
            is_used = bool(self._scopes) or IN_FORCE.has(self)
        if not is_used:
            self.close()

    @property
    def closed(self) -> bool:
        """Whether it runs no trial any more: it was closed or drained, has met a limit, or its session broke."""
        return self._closing or self._session.over is not None

    def __enter__(self) -> FluidExecutor:
        IN_FORCE.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_default(option: str, value: Any) -> bool:
    """Whether an option is as it is by default, so that a session that goes on has its own."""
    if option == "group_policy":
        return bool(value == DEFAULT_GROUP_POLICY)
    return value is None or (option == "fairness" and value == 0.0)


# -- the executor in force ----------------------------------------------------------------------------------

#: In a process that was forked, none of its parent's are.
IN_FORCE: InForce[FluidExecutor] = InForce(lambda executor: executor._closing or executor._process != os.getpid())


@user_call
def submit_trialgroup(
    group: TrialGroup,
    listener: TrialListener | None = None,
    *,
    priority: float = 1.0,
    preempt: bool = False,
    deadline: GivenDeadline = None,
    weight: float = 1.0,
    on_miss: str = "late",
) -> TrialGroupHandle:
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
        priority: as there.
        preempt: as there.
        deadline: when it is to have ended, as there.
        weight: as there.
        on_miss: what happens at the deadline, as there.

    Raises:
        InvalidFieldError: as for :meth:`FluidExecutor.submit_trialgroup`.
    """
    with IN_FORCE.lock:
        if (executor := IN_FORCE.find()) is None:
            executor = FluidExecutor()
            IN_FORCE.make_default(executor)
    terms: dict[str, Any] = {"priority": priority, "preempt": preempt, "deadline": deadline}
    return executor.submit_trialgroup(group, listener, **terms, weight=weight, on_miss=on_miss)


def executor_in_force() -> FluidExecutor | None:
    """Returns the executor that :func:`submit_trialgroup` would use; ``None`` if it would make one."""
    return IN_FORCE.find()


@contextlib.contextmanager
def executor_scope(given: FluidExecutor | None, **options: Any) -> Iterator[FluidExecutor]:
    """The one given, that in force, or a new one with these options.

    It is closed at the end, unless it is in force or another thread is still in a scope of it: several sweeps may
    share an executor, which the last of them closes.

    Raises:
        FluidError: the one given was closed.
    """
    if given is not None and given._closing:
        reason = "a call closes the executor that it is given at its end; use it in a with block for several calls"
        raise FluidError(f"the executor is closed: {reason}")
    executor = given or executor_in_force() or FluidExecutor(**options)
    with IN_FORCE.lock:
        executor._scopes += 1
    try:
        yield executor
    finally:
        with IN_FORCE.lock:
            executor._scopes -= 1
        executor.close_if_unused()
        if not executor._closing:
            executor._terminal.flush()
