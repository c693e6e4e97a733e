"""Trials and TrialGroups: what a search algorithm asks Fluid to run (docs/searchers.md, "Submit groups yourself")."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from fluid.directions import mode_word, require_goals
from fluid.errors import (
    InvalidFieldError,
    parse_duration,
    require_integer,
    require_number,
    require_one_of,
    require_text,
)
from fluid.few_items import FewItems
from fluid.random_state import SeedOrigin
from fluid.resources import MemoryNeed, Requires, require_devices
from fluid.search_shape import SearchShape
from fluid.trial_fields import IterationTimeout, StartFrom, own_config, require_timeout, start_from_of
from fluid.user_calls import user_call, user_class


class _Numbers:
    """Makes names for trials and groups to which the user gave none.

    Args:
        pattern: of a name, with its number.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._numbers = itertools.count()

    def name(self) -> str:
        """Returns a new name."""
        return self._pattern.format(next(self._numbers))

    def avoid(self, names: Iterable[str]) -> None:
        """Makes none of these names, which another process has made, from now on."""
        prefix = self._pattern.partition("{")[0]
        numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        highest = max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=-1)
        self._numbers = itertools.count(max(highest + 1, next(self._numbers)))


_trial_names = _Numbers("trial-{:05d}")
_group_names = _Numbers("group-{}")


def avoid_names(trials: Iterable[str], groups: Iterable[str]) -> None:
    """Has trials and groups that are made from now on named otherwise than those of a session that goes on here."""
    _trial_names.avoid(trials)
    _group_names.avoid(groups)


#: Whether a trial runs in a process that has run no other trial.
ISOLATION = ("trial", "lane")


class TrialState(str, Enum):
    """A trial's state; :mod:`fluid.engine.records` says which may follow which."""

    #: Waits for devices.
    QUEUED = "QUEUED"
    #: Holds devices; its lanes start, or set it up.
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    #: Goes to another width between two iterations.
    RESIZING = "RESIZING"
    #: Has left its devices with iterations to do; its state is kept in a lane, or saved.
    PAUSED = "PAUSED"
    #: Its lanes were told to stop it.
    STOPPING = "STOPPING"
    #: Has used up its budget, and can be extended.
    DONE = "DONE"
    STOPPED = "STOPPED"
    #: Its code has found that its config cannot be evaluated (:class:`fluid.Infeasible`).
    INFEASIBLE = "INFEASIBLE"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    @property
    def holds_devices(self) -> bool:
        """Whether a trial in this state holds devices and lanes."""
        return self in _HOLDING

    @property
    def ended(self) -> bool:
        """Whether a trial in this state waits for nothing."""
        return self in _ENDED

    @property
    def is_over(self) -> bool:
        """Whether a trial in this state cannot be extended either."""
        return self in _OVER


# Tuples: membership compares by identity first, which is several times faster than hashing a member.
_HOLDING = (TrialState.RUNNING, TrialState.STARTING, TrialState.RESIZING, TrialState.STOPPING)
_OVER = (TrialState.STOPPED, TrialState.INFEASIBLE, TrialState.FAILED)
_ENDED = (TrialState.DONE, *_OVER)
_NONE: frozenset[str] = frozenset()
#: How displays and results show a trial that the user paused by hand; one that waits for its search is PAUSED.
PAUSED_BY_USER = "PAUSED BY THE USER"
#: What is shown of a trial that another driver of a shared folder runs, or may run.
IS_ELSEWHERE = "ELSEWHERE"


@user_class
@dataclass(frozen=True)
class Shown:
    """How reports show a trial that a search algorithm knows under an id of its own.

    Example:
        >>> from fluid import Shown, Trial
        >>> Trial(print, {"wrapped": {"lr": 0.1}}, shown=Shown("trial 7", {"lr": 0.1})).shown.trial_id
        'trial 7'

    Args:
        trial_id: the id to show. Several trials of one shown id are shown as one, in order of submission: a trial that
            its search algorithm restored from a checkpoint is a new trial to Fluid.
        config: the hyperparameters to show; none by default.
        iterations: iterations done before it was submitted; 0 by default.
        metrics: the entry of its results that holds the metrics; ``None``, the default, if the results are the metrics.
    """

    trial_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 0
    metrics: str | None = None

    def __post_init__(self) -> None:
        require_text("trial_id", self.trial_id)
        object.__setattr__(self, "config", own_config(self.config))
        if self.metrics is not None and not isinstance(self.metrics, str):
            raise InvalidFieldError("metrics", self.metrics, "must be a string or None")
        object.__setattr__(self, "iterations", require_integer("iterations", self.iterations, at_least=0))


@user_class
@dataclass(frozen=True)
class Search:
    """Says that a search algorithm submits a group's trials, and what it optimizes. Reports and the live view show it.

    With ``extends=True``, a trial that has used up its budget is shown as paused until the algorithm extends or stops
    it, and its process stays; else it is done.

    Example:
        >>> from fluid import Search, TrialGroup
        >>> TrialGroup(name="sweep", search=Search("loss", "min", trials=64)).search.trials
        64

    Args:
        metric: name of the metric that trials are compared by; ``None``, the default, if unknown.
        mode: ``"min"`` if less of the metric is better, or ``"max"``; ``None``, the default, for what its name says. A
            group whose search names a metric without a mode that may mean either is refused.
        trials: number of trials that there will be; ``None``, the default, if unknown.
        extends: whether the algorithm may extend a trial that has used up its budget; ``None``, the default, if
            unknown: then the state of such a trial is saved, if it can be. With ``False`` it is not.
        besides: further metrics that are optimized, each with its mode; none by default.
        time_budget_s: seconds from its submission, or text such as ``"1h"``, after which the search ends; ``None``, the
            default, for no limit.
        shape: how far the trials run and which of them continue, for forecasts; ``None``, the default, if unknown.
        keeps_best: whether the checkpoint of the best trial outlives the session unless ``FluidExecutor(keep=)`` says
            what does, as in the sweeps of :func:`fluid.run`; ``False`` by default. It needs a metric.
        seed: of the random numbers that its configs follow from, at least 0; ``None``, the default, if unknown.
    """

    metric: str | None = None
    mode: str | None = None
    trials: int | None = None
    extends: bool | None = None
    besides: tuple[tuple[str, str], ...] = ()
    time_budget_s: float | None = None
    shape: SearchShape | None = None
    keeps_best: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keeps_best, bool) or (self.keeps_best and not self.metric):
            raise InvalidFieldError("keeps_best", self.keeps_best, "must be True or False, and True needs a metric")
        if self.extends is not None and not isinstance(self.extends, bool):
            raise InvalidFieldError("extends", self.extends, "must be True, False or None")
        if self.metric is not None:
            require_text("metric", self.metric, empty=True)
        if self.mode is not None:
            object.__setattr__(self, "mode", mode_word("mode", self.mode))
        if self.trials is not None:
            object.__setattr__(self, "trials", require_integer("trials", self.trials, at_least=1))
        object.__setattr__(self, "besides", require_goals("besides", self.besides))
        if self.time_budget_s is not None:
            seconds = parse_duration("time_budget_s", self.time_budget_s, zero=True)
            object.__setattr__(self, "time_budget_s", seconds)
        if self.shape is not None and not isinstance(self.shape, SearchShape):
            raise InvalidFieldError("shape", self.shape, "must be a SearchShape or None")
        if self.seed is not None:
            object.__setattr__(self, "seed", require_integer("seed", self.seed, at_least=0))


class _WithSlots:
    """A session may have very many trials. Weak references to one are possible, as to any other object."""

    __slots__ = ("__weakref__",)


@user_class
@dataclass(frozen=True, eq=False, slots=True)
class Trial(_WithSlots):
    """One configuration to train, and the iterations it may run until the algorithm decides about it again.

    Example:
        >>> from fluid import Trial
        >>> def train(config):
        ...     for step in range(100):
        ...         yield {"loss": config["lr"] / (step + 1)}
        >>> trial = Trial(train, {"lr": 0.1}, budget=27, trial_id="a")
        >>> trial.id, trial.budget, trial.key
        ('a', 27, 'train')

    Args:
        trainable: what to train: a class with ``setup``/``step``/``save_checkpoint``/``load_checkpoint``/
            ``cleanup``, a generator function of the config, and of its ``state`` if it is to be saved, or a function
            trainable of Ray Tune. Planners do not look at it.
        config: the hyperparameters, of which the trial has a copy; none by default.
        budget: iterations to run, an integer of at least 1, the default.
        priority: trials of a higher priority start before those of a lower one; 1 by default.
        trial_id: unique name; ``None``, the default, for one that Fluid makes.
        profile_key: trials of one key share measured overheads; ``None``, the default, for the trainable's name.
        max_width: most devices that this trial may span; ``None``, the default, for the executor's ``max_width``. A
            trial that is not elastic takes one device.
        memory: device memory that the trial needs; ``None``, the default, to measure it.
        retry_errors: whether the trial is tried again after it raised, ``True`` by default; if not, it has failed. A
            trial whose lane died or ran out of memory is tried again either way.
        shown: how reports show it; ``None``, the default, for its own id and config.
        follow_up_iterations: iterations that later rungs may add after this budget, to this trial or to one that waits
            for it; 0 by default. The scheduler uses it as critical-path length: of one priority, trials with more start
            first.
        iteration_timeout_s: seconds that an iteration may take before it counts as hung, above 0; ``None`` for no
            limit; ``"auto"``, the default, for a limit that follows from what iterations of its profile key took, where
            its trials run several each (``docs/failures.md``). The process of a hung trial is killed. The trial goes on
            from its checkpoint once; if it hangs again, it fails, with ``"timeout"`` as the kind of its failure.
        requires: what a device must have to run the trial; ``None``, the default, if any device will do.
        devices: ``None``, the default, to let the engine decide. A whole number n: exactly n devices, which it shares
            with no other trial. An elastic trial has the fixed width n; any other one is a *gang* for n of at least 2:
            it runs in one process that sees all n, which are of one host. A fraction, such as 1/2: one device, shared
            by at most 1/fraction trials.
        threads: CPU threads of the trial's process while it runs the trial, as for OMP_NUM_THREADS and
            ``torch.set_num_threads``; ``None``, the default, for one where lanes share a machine.
        isolation: ``"trial"`` if it runs in a process that has run no other trial, ``"lane"`` if it may share one with
            others, as tiny trials do whose author knows that they do not disturb each other; ``None``, the default,
            for the executor's ``isolation``.
        chdir: whether the trial's working directory is a folder of its own, that of :func:`fluid.trial_dir`, so that
            trials which write files by relative paths do not write over each other's; ``False`` by default: that in
            which the executor was made.
        start_from: the state of another trial from which it starts: that trial's id, the path of a checkpoint, one of
            :attr:`fluid.TrialResult.checkpoints`, or a trial with checkpoints, as the best one of a sweep. ``None``,
            the default, to begin afresh. Its iterations count on from there, and so does its budget: one of 12, from a
            state of 8 iterations, runs 4 (``docs/sweeps.md``).
        at: iterations done by that state, at least 1; ``None``, the default, for the newest one: of a trial that runs,
            that at the end of its iteration; of :class:`fluid.BestTrial`, that of the best iteration.
        prefix: whether iterations for which it agrees with others may be run once for all of them, where its config
            has a :func:`fluid.search.schedule`; ``True`` by default.

    Raises:
        InvalidFieldError: a field cannot be used; the message names the field and the value.
    """

    trainable: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    budget: int = 1
    priority: float = 1.0
    trial_id: str | None = None
    profile_key: str | None = None
    max_width: int | None = None
    memory: MemoryNeed | None = None
    retry_errors: bool = True
    shown: Shown | None = None
    follow_up_iterations: int = 0
    iteration_timeout_s: IterationTimeout = "auto"
    requires: Requires | None = None
    devices: float | None = None
    threads: int | None = None
    isolation: str | None = None
    chdir: bool = False
    start_from: Any = None
    at: int | None = None
    prefix: bool = True
    #: Whether it is a run that Fluid adds for trials which agree until an iteration.
    is_shared_run: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (
            not callable(self.trainable)
            and not callable(getattr(self.trainable, "replay", None))
            and not hasattr(self.trainable, "step")
        ):
            reason = "must be a class with step(), or a function"
            if isinstance(self.trainable, Mapping):
                reason += "; the space comes behind it"
            elif inspect.isgenerator(self.trainable):
                reason += f": pass {self.trainable.__name__}, and do not call it"
            raise InvalidFieldError("trainable", self.trainable, reason)
        object.__setattr__(self, "budget", require_integer("budget", self.budget, at_least=1))
        object.__setattr__(self, "priority", require_number("priority", self.priority, at_least=0.0))
        if self.max_width is not None:
            object.__setattr__(self, "max_width", require_integer("max_width", self.max_width, at_least=1))
        if self.profile_key is not None:
            require_text("profile_key", self.profile_key)
        if self.memory is not None and not isinstance(self.memory, MemoryNeed):
            raise InvalidFieldError("memory", self.memory, "must be a MemoryNeed or None")
        object.__setattr__(
            self, "follow_up_iterations", require_integer("follow_up_iterations", self.follow_up_iterations, at_least=0)
        )
        timeout = require_timeout("iteration_timeout_s", self.iteration_timeout_s)
        object.__setattr__(self, "iteration_timeout_s", timeout)
        if self.requires is not None and not isinstance(self.requires, Requires):
            raise InvalidFieldError("requires", self.requires, "must be a Requires or None")
        object.__setattr__(self, "devices", require_devices("devices", self.devices))
        if self.threads is not None:
            object.__setattr__(self, "threads", require_integer("threads", self.threads, at_least=1))
        if self.isolation is not None:
            require_one_of("isolation", self.isolation, ISOLATION)
        for name in ("retry_errors", "chdir", "prefix"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidFieldError(name, getattr(self, name), "must be True or False")
        object.__setattr__(self, "config", own_config(self.config))
        start: StartFrom | None = start_from_of(self.start_from, self.at)
        if start is not None and start.at is not None and start.at >= self.budget:
            reason = f"is used up by the {start.at} iterations of the state from which the trial starts"
            raise InvalidFieldError("budget", self.budget, f"{reason}: give it more")
        object.__setattr__(self, "start_from", start)
        object.__setattr__(self, "at", None if start is None else start.at)
        if self.shown is not None and not isinstance(self.shown, Shown):
            raise InvalidFieldError("shown", self.shown, "must be a Shown or None")
        if self.trial_id is None:
            object.__setattr__(self, "trial_id", _trial_names.name())
        else:
            require_text("trial_id", self.trial_id)

    def changed(self, **fields: Any) -> Trial:
        """The trial with other fields, which were checked; its config is the same object."""
        made = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    @staticmethod
    def of_checked(fields: Mapping[str, Any]) -> Trial:
        """A trial of fields that were checked, as those in a run folder: it may have very many trials.

        Raises:
            AttributeError: there is no such field.
        """
        made = object.__new__(Trial)
        for name, value in {**_DEFAULTS, **fields}.items():
            object.__setattr__(made, name, value)
        return made

    @property
    def id(self) -> str:
        """The trial's unique name; unlike ``trial_id`` never ``None``, also to a type checker."""
        assert self.trial_id is not None
        return self.trial_id

    @property
    def key(self) -> str:
        """The profile key: the one given, or the trainable's qualified name."""
        if self.profile_key is not None:
            return self.profile_key
        return str(getattr(self.trainable, "__qualname__", None) or type(self.trainable).__qualname__)


#: What the fields of a trial are by default.
_DEFAULTS = {item.name: item.default for item in fields(Trial) if item.default is not MISSING}


class Submission:
    """What a user submits by one call, though its trials are submitted one after another, as those of a sweep are.

    A trainable is pickled as it is when its first trial is submitted; all trials of the submission run that, with what
    the script had set when the first of all was submitted. It is sent to a lane once. The seeds of the trials follow
    from the random number generators of the driver as they are now. Without a submission, trainables are pickled and
    generators are read anew at each call that submits or adds trials.

    Example:
        >>> from fluid import Trial, TrialGroup
        >>> from fluid.trialgroup import Submission
        >>> sweep = Submission()
        >>> stages = [TrialGroup([Trial(print)], name, submission=sweep) for name in ("stage 1", "stage 2")]

    Args:
        seed: adds to the seeds of the trials; 0 by default, ``None`` for other seeds every time.
        reuse: finds states of earlier runs, a :class:`fluid.session.reuse.Reuse`; ``None``, the default, if all is to
            be computed.
    """

    def __init__(self, seed: int | None = 0, reuse: Any = None) -> None:
        self.origin = SeedOrigin.now(seed)
        self.reuse = reuse
        #: What was pickled so far, by id(); keeping the trainable with its pickle keeps its id from being reused.
        self.pickled: dict[int, tuple[Any, Any]] = {}
        #: What the script had set; ``None`` before the first trial.
        self.script: Any = None


class TrialGroup:
    """Trials scheduled together, so that the time until the last of them ends, the makespan, is as short as possible.

    Trials can be added, extended, stopped and removed; those of a group that runs through its
    :class:`fluid.TrialGroupHandle`. Iterating over a group gives its trials in the order they were added.

    Example:
        >>> from fluid import Trial, TrialGroup
        >>> group = TrialGroup([Trial(print, trial_id="a"), Trial(print, trial_id="b")], name="rung-0")
        >>> group.stop("a")
        >>> [trial.id for trial in group.active], "a" in group, len(group)
        (['b'], True, 2)
        >>> group.extend("b", 2).budget
        3

    Args:
        trials: the first trials; none by default.
        name: the name that reports show; ``None``, the default, for one that Fluid makes.
        search: what a search algorithm optimizes with these trials; ``None``, the default, if none submits them.
        requires: what devices must have to run them, where a trial does not say otherwise; ``None``, the default, if
            any device will do.
        owner: whose group it is: the groups of one owner are scheduled as one, and owners share the devices
            (``docs/deadlines.md``). ``None``, the default, for an owner of its own.
        submission: the sweep that it is a part of, whose trainables are pickled once; ``None``, the default, if they
            are to be pickled as they are at each call that submits or adds trials.

    Raises:
        InvalidFieldError: two trials have one id.
    """

    @user_call
    def __init__(
        self,
        trials: Iterable[Trial] = (),
        name: str | None = None,
        *,
        search: Search | None = None,
        requires: Requires | None = None,
        owner: str | None = None,
        submission: Submission | None = None,
    ) -> None:
        if submission is not None and not isinstance(submission, Submission):
            raise InvalidFieldError("submission", submission, "must be a Submission or None")
        self.submission = submission
        if search is not None and not isinstance(search, Search):
            raise InvalidFieldError("search", search, "must be a Search or None")
        if isinstance(trials, (Trial, str)) or not isinstance(trials, Iterable):
            raise InvalidFieldError("trials", trials, "must be Trials in a list, as in TrialGroup([trial])")
        self.name = require_text("name", name, empty=True) if name is not None else _group_names.name()
        if requires is not None and not isinstance(requires, Requires):
            raise InvalidFieldError("requires", requires, "must be a Requires or None")
        self.search = search
        self.requires = requires
        self.owner = None if owner is None else require_text("owner", owner)
        self._trials = FewItems[str, Trial]()
        #: Most groups have none, and a session may have very many groups.
        self._stopped: frozenset[str] | set[str] = _NONE
        for trial in trials:
            self.add(trial)

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials.copy().values())

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._trials

    def __getitem__(self, trial_id: str) -> Trial:
        if trial_id not in self._trials:
            raise InvalidFieldError("trial_id", trial_id, f"no such trial in TrialGroup {self.name!r}")
        return self._trials[trial_id]

    def __repr__(self) -> str:
        text = f"TrialGroup(name={self.name!r}, trials={len(self)}, stopped={len(self._stopped)}"
        text += "" if self.requires is None else f", requires={self.requires!r}"
        return text + (")" if self.owner is None else f", owner={self.owner!r})")

    @property
    def active(self) -> list[Trial]:
        """The trials that were not stopped, in the order they were added."""
        return [trial for trial in self if trial.id not in self._stopped]

    def add(self, trial: Trial) -> Trial:
        """Adds a trial and returns it; its id must be new to the group."""
        if not isinstance(trial, Trial):
            raise InvalidFieldError("trial", trial, "must be a Trial")
        if trial.id in self._trials:
            raise InvalidFieldError("trial_id", trial.id, f"already in TrialGroup {self.name!r}")
        self._trials[trial.id] = trial
        return trial

    def extend(self, trial_id: str, budget: int, *, follow_up_iterations: int = 0) -> Trial:
        """Gives a trial ``budget`` further iterations, and returns the extended trial."""
        trial = self[trial_id]
        if trial_id in self._stopped:
            raise InvalidFieldError("trial_id", trial_id, "was stopped and cannot be extended")
        further = require_integer("budget", budget, at_least=1)
        extended = trial.changed(budget=trial.budget + further, follow_up_iterations=follow_up_iterations)
        self._trials[trial_id] = extended
        return extended

    def show(self, trial_id: str, config: Mapping[str, Any]) -> Trial:
        """Says which hyperparameters reports show of a trial, and returns the trial that says so."""
        trial = self[trial_id]
        shown = Shown(trial.id, config) if trial.shown is None else replace(trial.shown, config=config)
        self._trials[trial_id] = trial.changed(shown=shown)
        return self._trials[trial_id]

    def stop(self, trial_id: str) -> None:
        """Stops a trial: it stays in the group, but is no longer active. Stopping twice is harmless."""
        if not isinstance(self._stopped, set):
            self._stopped = set()
        self._stopped.add(self[trial_id].id)

    def remove(self, trial_id: str) -> Trial:
        """Removes a trial from the group and returns it."""
        trial = self[trial_id]
        del self._trials[trial_id]
        if isinstance(self._stopped, set):
            self._stopped.discard(trial_id)
        return trial

    def is_stopped(self, trial_id: str) -> bool:
        """Whether the trial was stopped."""
        return self[trial_id].id in self._stopped
