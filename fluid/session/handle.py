"""What a submitter holds of a TrialGroup that runs: its results as they come, and ways to change it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid.directions import search_text
from fluid.engine.events import Failure, RungReached, TrialSetAside
from fluid.errors import FluidError, InvalidFieldError, parse_duration, require_integer
from fluid.random_state import Seeds
from fluid.resources import Device
from fluid.results.best import BestSoFar, BestTrial
from fluid.results.records import Result, TrialResult
from fluid.results.sweep import SweepResult
from fluid.search_shape import Rung
from fluid.session.facts import Forecast
from fluid.session.inbox import GroupInbox
from fluid.session.listeners import TrialFailedError
from fluid.session.live_trials import LiveTrials
from fluid.session.session import Session
from fluid.session.status import GroupStatus
from fluid.session.status_reader import Standing
from fluid.trainables.pickling import dump_arguments
from fluid.trial_fields import StartFrom, own_config
from fluid.trialgroup import Search, Shown, Trial, TrialState

if TYPE_CHECKING:
    from fluid.results.tables import DataFrame


# -- reprs ---------------------------------------------------------------------------------------
#
# How handles show themselves at a prompt and in a notebook.


#: Most characters of a config.
_MOST_CONFIG = 120
#: Most devices and groups that an executor names.
_MOST_NAMES = 8


def group_text(group: GroupStatus, run_dir: Path) -> str:
    """A group in one line: trials by state, the best result so far, and the run folder."""
    parts = [f"{group.name!r}", _trials(group.trials)]
    parts += [] if group.best is None else [f"best {_value(group.best)}, {_place(group.best)}"]
    parts += [] if group.open_metric is None else [f"no best: {search_text(group.open_metric)}"]
    return f"<TrialGroupHandle {'; '.join([*parts, f'run folder {run_dir}'])}>"


def group_html(group: GroupStatus, run_dir: Path) -> str:
    """A group as a table: trials by state, iterations, the best result so far with its config, and the run folder."""
    done = f"{group.iterations_done:,}" + (f" of {group.iterations:,}" if group.iterations else "")
    rows = {"group": group.name, "trials": _trials(group.trials), "iterations": done}
    if group.best is not None:
        config = repr(dict(group.best.config))
        config = config if len(config) <= _MOST_CONFIG else f"{config[: _MOST_CONFIG - 1]}…"
        rows |= {"best": f"{_value(group.best)}, {_place(group.best)}", "its config": config}
    if group.open_metric is not None:
        rows["best"] = search_text(group.open_metric)
    return table_html({**rows, "run folder": str(run_dir)})


def session_facts(session: Session) -> dict[str, str]:
    """What an executor shows of itself."""
    devices = None
    with contextlib.suppress(FluidError):  # It is closed.
        devices = session.devices
    return executor_facts(devices, [inbox.group.name for inbox in session.inboxes], session.run_dir)


def executor_facts(devices: Sequence[Device] | None, groups: Sequence[str], run_dir: Path) -> dict[str, str]:
    """What an executor shows of itself.

    Args:
        devices: its devices; ``None`` if it is closed.
        groups: names of its groups.
        run_dir: the run folder.
    """
    used = "closed" if devices is None else _listed([f"{device.kind} {device.index}" for device in devices])
    return {"devices": used, "groups": _listed(groups), "run folder": str(run_dir)}


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "none"


def table_html(rows: Mapping[str, str]) -> str:
    """Facts by name as a table."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"


def _trials(trials: Mapping[str, int]) -> str:
    total = sum(trials.values())
    states = ", ".join(f"{number:,} {state.lower()}" for state, number in sorted(trials.items()) if number)
    return f"{total:,} {'trial' if total == 1 else 'trials'}{': ' if states else ''}{states}"


def _value(best: BestSoFar) -> str:
    return f"{best.metric} {best.value:.4g} ({best.direction})"


def _place(best: BestSoFar) -> str:
    return f"{best.trial_id}, iteration {best.iteration:,}{best.fate}"


# -- handle --------------------------------------------------------------------------------------


#: The fields that a fork has from the trial from whose state it starts.
_INHERITED = (
    *("priority", "max_width", "memory", "retry_errors", "iteration_timeout_s", "requires", "devices", "threads"),
    *("isolation", "chdir", "prefix", "profile_key"),
)
#: Most seconds to wait for checkpoints that are still being saved.
_PATIENCE = 60.0


class TrialGroupHandle:
    """A submitted TrialGroup. :meth:`fluid.FluidExecutor.submit_trialgroup` makes it. Safe to use from several threads.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> def train(config):
        ...     for step in range(1, 100):
        ...         yield {"loss": config["lr"] / step}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.3}, budget=2, trial_id="a")])
        ...     handle = executor.submit_trialgroup(group)
        ...     done = handle.wait()
        ...     handle.extend("a", 1)
        ...     handle.add(Trial(train, {"lr": 0.6}, trial_id="b"))
        ...     losses = [(result.trial_id, round(result.metrics["loss"], 2)) for result in handle.results()]
        >>> sorted(losses)
        [('a', 0.1), ('a', 0.15), ('a', 0.3), ('b', 0.6)]
    """

    def __init__(self, session: Session, inbox: GroupInbox) -> None:
        self._session = session
        self._inbox = inbox
        self._group = inbox.group
        self._requests = session.requests(inbox)
        self._live = LiveTrials(session, [inbox])
        #: Numbers of forks, by the trial from whose state they start.
        self._forks_of: dict[str, itertools.count[int]] = {}

    def __repr__(self) -> str:
        return group_text(self._session.group_status(self._inbox.group_id), self._session.run_dir)

    def _repr_html_(self) -> str:
        return group_html(self._session.group_status(self._inbox.group_id), self._session.run_dir)

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def search(self) -> Search | None:
        """What the group's search algorithm said of it; ``None`` if none submits its trials."""
        return self._group.search

    # -- how it stands -------------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Gives every result from the first one on, as it comes, until all trials have ended.

        Each call starts at the first result. A trial that is extended or added before all have ended is waited
        for too. In a session that was resumed, the first results are those of the sessions before, read from the run
        folder: their metrics are what JSON makes of them. A listener of theirs is gone, so each group has results.

        Raises:
            FluidError: the session has ended before the trials, a listener would wait for its own session, or a
                listener was given, which gets the results instead.
        """
        if self._inbox.listener is not None:
            raise FluidError(f"group {self.name!r} has a listener, which gets its results; they are not kept for later")
        return self._inbox.results()

    def wait(self, timeout: float | str | None = None) -> bool:
        """Waits until all trials have ended. A trial that is paused has not.

        Args:
            timeout: seconds to wait at most, or text such as ``"2h"``; ``None``, the default, for no limit.

        Returns:
            Whether all trials have ended.

        Raises:
            FluidError: the session has ended before the trials, or a listener would wait for its own session.
        """
        if timeout is not None:
            timeout = parse_duration("timeout", timeout, zero=True)
        return self._inbox.wait(timeout)

    @property
    def done(self) -> bool:
        """Whether all trials have ended."""
        return self._inbox.done

    @property
    def makespan(self) -> float | None:
        """Seconds from the first start to the last finish so far; ``None`` before the first iteration ended.

        In a session that was resumed, the time between the sessions counts, unless the machine restarted.
        """
        return self._inbox.makespan

    @property
    def eta(self) -> float | None:
        """Predicted seconds until all trials have ended but those that are paused.

        ``None`` where no trial was measured yet, one hangs, or one waits for devices that there are not.
        """
        return self._session.eta(self._inbox.group_id)

    def forecast(self, q: Sequence[float] = (0.1, 0.5, 0.9)) -> Forecast | None:
        """When all trials have ended but those that are paused, with odds: see :class:`fluid.Forecast`.

        ``None`` where no trial was measured yet, one hangs, or one waits for devices that there are not.

        Args:
            q: odds in (0, 1), at least one: of ``0.9``, the forecast says by when the group has ended with 90 %.

        Raises:
            InvalidFieldError: ``q`` is no such sequence.
            FluidError: the executor is closed.
        """
        return self._session.forecasts.forecast(self._inbox.group_id, q)

    def stragglers(self, most: int = 3) -> list[tuple[str, float]]:
        """The trials that are likely to end last: their ids with the odds of that, the likeliest first.

        Empty where no trial was measured yet.

        Args:
            most: how many at most, at least 1.

        Raises:
            InvalidFieldError: ``most`` is below 1.
            FluidError: the executor is closed.
        """
        return self._session.forecasts.stragglers(self._inbox.group_id, most)

    @property
    def states(self) -> dict[str, TrialState]:
        """How each trial stands, by trial id: ``QUEUED``, ``RUNNING``, ``DONE`` and so on; equal to those strings.

        A trial that was stopped is ``STOPPED`` here; :attr:`trials` and reports show the outcome given to :meth:`stop`.
        Trials that were forgotten are left out. After the executor was closed, trials that had not ended keep the state
        that they had then.
        """
        standing, ended = self._session.standing([self._inbox.group_id]), self._inbox.states
        states, shared = standing.states.items(), self._inbox.shared_runs
        return {trial_id: ended.get(trial_id, state) for trial_id, state in states if trial_id not in shared}

    @property
    def failures(self) -> dict[str, Failure]:
        """Why trials failed for good, by trial id."""
        return {name: failure for name, failure in self._inbox.failures.items() if failure.kind != "infeasible"}

    @property
    def seeds(self) -> dict[str, Seeds]:
        """The seeds of the trials' random number generators when they were set up, by id."""
        return self._inbox.seeds

    def raise_failures(self) -> None:
        """Raises :class:`TrialFailedError` for the first trial that failed, if any did."""
        for trial_id, failure in self.failures.items():
            raise TrialFailedError(trial_id, failure)

    # -- what came of it -----------------------------------------------------------------------------------

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        """The trials with all their results so far, also those that wait, have failed or were forgotten.

        Results are read from the run folder: metrics are what JSON makes of them, and a listener does not matter. The
        handle keeps what it has read, so that the next call reads what is new. What a call gives is the caller's own.

        Raises:
            FluidError: the run folder was deleted.
        """
        return self._live.read()

    def best(self, metric: str | None = None, mode: str | None = None) -> BestTrial:
        """The trial with the best value of a metric, so far, at any of its iterations.

        A failed trial is best only if all have failed.

        Args:
            metric: its name; nested names are joined by ``/``. ``None``, the default, for that of the group's search.
            mode: ``"min"`` or ``"max"``; ``None``, the default, for that of the group's search, else for what the
                metric's name says (``docs/sweeps.md``).

        Raises:
            InvalidFieldError: neither the call nor the group's search names a metric, the mode is neither, or nothing
                says the mode of a metric that may mean either.
            FluidError: no trial has reported the metric, or the run folder was deleted.
        """
        return self._live.best(metric, mode)

    def result(self, metric: str | None = None, mode: str | None = None) -> SweepResult:
        """The trials as a :class:`fluid.SweepResult`, as they stand now; arguments are those of :meth:`best`."""
        return self._live.sweep(metric, mode)

    def dataframe(self, every: str = "trial") -> DataFrame:
        """A table of the trials: see :meth:`fluid.SweepResult.dataframe`."""
        return self.result().dataframe(every)

    def load_checkpoint(self, trial_id: str) -> Any:
        """Loads the newest checkpoint of a trial that is kept on disk: see :meth:`fluid.TrialResult.load_checkpoint`.

        Waits for checkpoints that are still being saved.

        Raises:
            InvalidFieldError: the trial is unknown.
            FluidError: no checkpoint is kept, or it is damaged.
        """
        with contextlib.suppress(FluidError):  # The session has ended, or a listener calls: what is there counts.
            self._session.await_kept(_PATIENCE)
        found = next((trial for trial in self.trials if trial.trial_id == trial_id), None)
        if found is None:
            raise InvalidFieldError("trial_id", trial_id, f"is unknown in group {self.name!r}")
        return found.load_checkpoint()

    # -- changing it ---------------------------------------------------------------------------------------

    def stop(self, trial_id: str, outcome: str | None = None, *, now: bool = False) -> None:
        """Stops a trial at the end of its current iteration, which counts. Stopping one that has ended is harmless.

        Args:
            trial_id: a trial of this group.
            outcome: how reports show it: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, or ``"PAUSED"`` for one that may
                come back as another trial; ``None``, the default, for the state in which it ends.
            now: whether to end the trial within about a second, by killing the processes that it runs in, as for one
                that hangs; ``False`` by default. Trials that wait in those processes go on from their checkpoints.

        Raises:
            InvalidFieldError: the trial or the outcome is unknown, or ``now`` is no bool.
        """
        if not isinstance(now, bool):
            raise InvalidFieldError("now", now, "must be True or False")
        self._require_known(trial_id)
        self._requests.stop(trial_id, outcome, now=now)

    def pause(self, trial_id: str) -> None:
        """Pauses a trial at the end of its current iteration, until :meth:`resume`. Pausing it twice is harmless.

        It leaves its devices to other trials. Its state stays in its process, and is saved when the device needs the
        memory; a state that cannot be saved stays. A trial that waits is held in the queue. A paused trial has not
        ended: :meth:`wait` and :meth:`results` wait for it. It can be stopped and extended, and a session that is
        resumed leaves it paused. A trial that ends before it has paused has ended.

        Args:
            trial_id: a trial of this group that has not ended.

        Raises:
            InvalidFieldError: the trial is unknown, or has ended.
        """
        self._require_known(trial_id)
        self._requests.pause(trial_id)

    def resume(self, trial_id: str) -> None:
        """Lets a paused trial go on from its state, as soon as a device is free.

        One that is not paused stays as it is.

        Args:
            trial_id: a trial of this group.

        Raises:
            InvalidFieldError: the trial is unknown.
        """
        self._require_known(trial_id)
        self._requests.resume(trial_id)

    def await_cleanup(self, timeout: float) -> tuple[str, ...]:
        """Waits until the trials that were stopped so far have left their processes, where ``cleanup()`` is called.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Ids of the trials whose ``cleanup()`` had not ended by then.

        Raises:
            FluidError: the executor is closed.
            InvalidFieldError: ``timeout`` is negative.
        """
        return self._session.await_departures(self._inbox.group_id, parse_duration("timeout", timeout, zero=True))

    def departure(self, trial_id: str) -> Future[None]:
        """Returns a future that is done when a trial that was stopped has left its process: see :meth:`await_cleanup`.

        Raises:
            FluidError: the executor is closed.
        """
        return self._session.departure(self._inbox.group_id, trial_id)

    def extend(self, trial_id: str, by: int, *, follow_up_iterations: int = 0) -> None:
        """Gives a trial further iterations, on top of its budget; one that was done continues where it was.

        If its state is gone, and it cannot be saved, it begins again, and a warning says so; it does not report again
        what it has reported.

        Args:
            trial_id: a trial of this group.
            by: how many more, at least 1.
            follow_up_iterations: iterations that later rungs may add after those (:class:`fluid.Trial`); 0 by default.

        Raises:
            InvalidFieldError: the trial is unknown, stopped or failed, ``by`` is below 1, or
                ``follow_up_iterations`` below 0.
        """
        by = require_integer("by", by, at_least=1)
        follow_up_iterations = require_integer("follow_up_iterations", follow_up_iterations, at_least=0)
        self._require_known(trial_id)
        self._requests.extend(trial_id, by, follow_up_iterations)

    def rank(self, trial_id: str, rung: Rung, score: float) -> None:
        """Tells that a trial has come to a rung, for search algorithms: checkpoints of the best stay in memory.

        Args:
            trial_id: a trial of this group, which has run its budget.
            rung: how many trials come there, and how many of them go on.
            score: how good it is; less is better.
        """
        self._require_known(trial_id)
        self._requests.ask(partial(RungReached, trial_id=trial_id, rung=rung, score=score))

    def fail(self, trial_id: str, failure: Failure) -> None:
        """Tells that a trial has failed, for search algorithms: it ends after its iteration, as if it had raised."""
        self._require_known(trial_id)
        self._requests.fail(trial_id, failure)

    def set_aside(self, trial_id: str) -> None:
        """Has a trial go on only in a session that resumes this one, for search algorithms: it is saved, and rests."""
        self._require_known(trial_id)
        self._requests.ask(partial(TrialSetAside, trial_id=trial_id))

    def standing(self) -> Standing:
        """How its trials stand as the engine sees them, for search algorithms."""
        return self._session.standing([self._inbox.group_id])

    def add(self, *trials: Trial) -> None:
        """Adds trials to the group; they are planned together.

        Raises:
            InvalidFieldError: the id of one is taken, or it cannot be pickled. Then none of them is added.
        """
        added: dict[str, Trial] = {}
        for trial in trials:
            if not isinstance(trial, Trial):
                raise InvalidFieldError("trial", trial, "must be a Trial")
            if trial.id in added or trial.id in self._group:
                raise InvalidFieldError("trial_id", trial.id, f"already in TrialGroup {self.name!r}")
            added[trial.id] = trial
        if added:
            self._requests.add(list(added.values()))

    def fork(
        self,
        trial_id: str,
        config: Mapping[str, Any] | None = None,
        at: int | None = None,
        *,
        budget: int | None = None,
        fork_id: str | None = None,
    ) -> str:
        """Adds a trial that starts from the state of another one, which goes on as it was.

        Its iterations count on from there. It has the other's trainable and fields, and a copy of its
        :func:`fluid.trial_dir`. It runs as soon as the state is saved and a device is free.

        Args:
            trial_id: a trial of this group, whose trainable can be saved.
            config: hyperparameters that differ from the other's; ``None``, the default, for none.
            at: iterations done by the state; ``None``, the default, for the newest one: of a trial that runs, that at
                the end of its iteration. The other trial may still have to come there; one that is beyond it must have
                kept a checkpoint of it.
            budget: iterations of the new trial in all, those of the state included; ``None``, the default, for as many
                as the other's.
            fork_id: the new trial's id; ``None``, the default, for the other's with a number.

        Returns:
            The new trial's id.

        Raises:
            InvalidFieldError: the trial is unknown, cannot be saved, or has no state of that iteration and will have
                none; the budget is used up by the state's iterations; or the new id is taken.
        """
        self._require_known(trial_id)
        parent = self._group[trial_id]
        changed = {} if config is None else own_config(config)
        if fork_id is None:
            taken = self._forks_of.setdefault(trial_id, itertools.count(1))
            fork_id = next(name for number in taken if (name := f"{trial_id}.{number}") not in self._group)
        start = StartFrom(trial_id, None if at is None else require_integer("at", at, at_least=1))
        if budget is None and at is not None and at >= parent.budget:
            reason = (
                f"leaves nothing to do of the budget of trial {trial_id!r}, {parent.budget} iterations: give budget="
            )
            raise InvalidFieldError("at", at, reason)
        made = Trial(
            parent.trainable,
            {**parent.config, **changed},
            budget=parent.budget if budget is None else budget,
            trial_id=fork_id,
            start_from=start,
            **{name: getattr(parent, name) for name in _INHERITED},
        )
        self.add(made)
        return fork_id

    def call(self, trial_id: str, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a method of a trial's trainable, in the trial's lane, between two of its iterations.

        The call is made as soon as the trial is set up and not moving to other devices; a trial that is done is
        restored for it, if need be. Calls of one trial are made in the order asked for, and before iterations that were
        asked for later. If the lane dies before it has answered, or the trial moves, the call is made again from the
        trial's checkpoint. An error in the method does not fail the trial.

        Args:
            trial_id: a trial of this group that was not stopped and has not failed.
            method: name of the method.
            args: its arguments; cloudpickle takes them there, and brings back what it returns.
            kwargs: its arguments by name.

        Returns:
            A future of what the method returns. Its exception is the method's own, where that can be pickled, and a
            :class:`CallFailedError` otherwise, or if the trial ended before. It cannot be cancelled.

        Raises:
            InvalidFieldError: the trial cannot be called, or an argument cannot be pickled.
        """
        self._require_known(trial_id)
        if not isinstance(method, str) or not method.isidentifier():
            raise InvalidFieldError("method", method, "must be the name of a method")
        payload = dump_arguments(args, kwargs)
        return self._requests.call(trial_id, method, payload)

    def show_config(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """Says which hyperparameters a trial has that chose them while it ran, as objectives of Optuna do.

        Reports, tables and the best trial show these in place of the trial's config.

        Args:
            trial_id: a trial of this group that was not forgotten.
            config: the hyperparameters.

        Raises:
            InvalidFieldError: the trial is unknown, or the config is no mapping.
            FluidError: the executor is closed.
        """
        self._require_known(trial_id)
        self._requests.show_config(trial_id, Shown(trial_id, config).config)

    def forget(self, trial_id: str) -> None:
        """Drops all that is kept of a trial that has ended, so that a long session does not grow; its files stay.

        A trial that was done cannot be extended then. Its id stays taken, and its results can still be read. The
        driver's memory is bounded, but for ids, in a session of any length whose groups have listeners and whose trials
        are added to a group and forgotten.

        Raises:
            InvalidFieldError: the trial is unknown, or has not ended.
        """
        self._require_known(trial_id)
        self._requests.forget(trial_id)

    def _require_known(self, trial_id: str) -> None:
        if not isinstance(trial_id, str) or trial_id not in self._group:
            raise InvalidFieldError("trial_id", trial_id, f"is unknown in group {self.name!r}")
