"""``fluid.run``: a whole sweep in one call."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import secrets
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluid._clock import MonotonicClock
from fluid._given_executor import closes_executor
from fluid._logs import logger_of
from fluid.errors import FluidError, InvalidFieldError, parse_duration, require_integer, require_one_of, require_text
from fluid.executor import IN_FORCE, FluidExecutor, executor_in_force, executor_scope
from fluid.keeping import Keep
from fluid.loggers.logger import refuse_logger
from fluid.packing import Sharing
from fluid.policies.owners.deadlines import seconds_until
from fluid.rehearsal.plan import plan_in_force, seed_in_force
from fluid.resources import DeviceChoice, Requires
from fluid.results.best import BestTrial
from fluid.results.code_changes import code_notes
from fluid.results.metrics import Goal, goals_of, modes_of
from fluid.results.records import TrialResult
from fluid.results.run_files import TRIALS, JsonLines, is_used
from fluid.results.sweep import SweepResult
from fluid.search import BOHB, PBT, Searcher, Space, make_sampler, make_space
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.bohb import BohbSearcher
from fluid.search.population import make_population
from fluid.search.rungs import rungs_of
from fluid.search.schedulers import RungScheduler
from fluid.search.searchers import SamplerSearcher
from fluid.search.space import ConditionalSpace
from fluid.search.stop_rules import StopArgument, StopRules
from fluid.session.folder.existing import IF_EXISTS, holds_a_session
from fluid.session.folder.folder import folder_of
from fluid.session.folder.given_code import CODES
from fluid.session.listeners import SweepInterrupted, TrialListener, require_listener
from fluid.session.notice import NOTICE
from fluid.session.options import flattened
from fluid.session.output import Output
from fluid.session.reuse import reuse_of
from fluid.sizing.goals import Goals
from fluid.sweeping.algorithms import (
    ALGORITHMS,
    HALVING,
    LEARNING,
    WITH_SEARCHER,
    options_of,
    require_algorithm,
    require_concurrency,
    samples_of,
)
from fluid.sweeping.loop import SweepLoop
from fluid.sweeping.names import SweepNames
from fluid.sweeping.plan import (
    GroupOptions,
    SweepFailedError,
    SweepPlan,
    UnreportedMetricError,
    raise_if_all_failed,
    require_budgets_beyond,
    said_of_earlier,
    with_starts,
)
from fluid.sweeping.population import require_savable
from fluid.sweeping.resuming import EarlierSweep, read_sweep
from fluid.trialgroup import Trial
from fluid.user_calls import hint, user_call

#: Seconds to wait at most, at the end, for checkpoints that outlive the session.
_KEPT_S = 60.0
#: Seconds that trials have at most to be saved at the end of a sweep that goes on later.
_SAVED_S = 25.0
#: Seconds until a deadline at least: making an executor may take longer than the whole deadline.
_LEAST_S = 1e-3
_log = logger_of("fluid.session")
_CLOCK = MonotonicClock()
_NAMES = SweepNames()
#: Fields of a trial that the sweep sets.
_OWN_FIELDS = {"trainable", "config", "budget", "trial_id", "shown", "follow_up_iterations", "start_from", "at"}


@user_call
@closes_executor
def run(
    trainable: Any,
    space: Any = None,
    *,
    metric: str | Sequence[str],
    mode: str | Sequence[str] | None = None,
    samples: int | None = None,
    algorithm: str | BOHB | PBT = "asha",
    budget: int = 27,
    time_budget_s: float | str | None = None,
    deadline: float | str | None = None,
    stop: StopArgument = None,
    seed: int | None = 0,
    points: Sequence[Mapping[str, Any] | BestTrial | TrialResult] = (),
    searcher: Searcher | None = None,
    name: str | None = None,
    executor: FluidExecutor | None = None,
    sharing: Sharing | None = None,
    goals: Goals | None = None,
    keep: Keep | str | None = None,
    output: Output | None = None,
    run_dir: str | Path | None = None,
    devices: DeviceChoice = None,
    join: bool = False,
    if_exists: str | None = None,
    resume: bool = False,
    code: str = "begun",
    retry_failed: bool = False,
    reuse: bool | str = False,
    callbacks: Sequence[TrialListener] = (),
    loggers: Sequence[TrialListener] = (),
    metrics_port: int | str | None = None,
    on_oom: str = "fail",
    eta: int = 3,
    min_budget: int = 1,
    max_concurrent: int | None = None,
    trial_options: Mapping[str, Any] | None = None,
    requires: Requires | None = None,
    owner: str | None = None,
    priority: float = 1.0,
    preempt: bool = False,
    weight: float = 1.0,
) -> SweepResult:
    """Runs a sweep, and returns its trials and the best of them.

    Which limit to give: ``samples`` and ``budget`` say how much is tried, how many trials and how many iterations of
    each; they are enough if all of it is to be done, however long it takes. ``stop`` ends trials, or the sweep, as soon
    as what they report is good enough. ``time_budget_s`` ends the sweep for now after so long, wherever it stands, and
    a later call goes on. ``deadline`` says when it is to have ended: it decides how many devices are held, and what
    still begins. ``goals=Goals(budget_usd=)`` does so with money. Several may be given; the first one reached counts.

    Example:
        >>> import fluid
        >>> from fluid.search import loguniform
        >>> def train(config):
        ...     for step in range(1, 100):
        ...         yield {"loss": abs(config["lr"] - 0.01) + 1 / step}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, {"lr": loguniform(1e-4, 1)}, metric="loss", samples=9, budget=9)
        >>> len(result.trials), result.best.iteration, result.best.value < 0.2
        (9, 9, True)

    Args:
        trainable: what to train: a class, a generator function, or a function that returns its metrics.
        space: the hyperparameters by name: distributions of :mod:`fluid.search`, Optuna or Ray Tune, lists of choices,
            constants, dicts of these, what depends on others (:func:`fluid.search.conditions.when`) or on the iteration
            (:func:`fluid.search.schedules.schedule`); or a function of an Optuna trial. With a ``searcher``,
            constants only.
        metric: name of the metric that trials are compared by; nested names are joined by ``/``. Several names make
            :attr:`fluid.SweepResult.pareto` the outcome, with ``"random"``, ``"grid"``, ``"tpe"`` or ``"full"``.
        mode: ``"min"`` or ``"max"``, one per metric; ``None``, the default, for what the metric's name says
            (``docs/sweeps.md``): less is better of ``val_loss``, more of ``accuracy``.
        samples: number of trials. ``None``, the default: all of a grid; one round of the brackets of Hyperband and
            BOHB, if these have several rungs; 16 members of ``"pbt"``; else no limit if ``time_budget_s`` or a stop
            rule ends the sweep (not with brackets, nor with ``"sha"``), and 64 if none does. With a ``searcher``: the
            most that it is asked for.
        algorithm: ``"asha"``, the default, asynchronous successive halving; ``"tpe"``, whose configs Optuna suggests
            from the results, and whose trials stop at the same rungs; ``"sha"``, synchronous; ``"hyperband"``;
            ``"bohb"``, Hyperband whose configs a model suggests from the results, and its options,
            :class:`fluid.search.BOHB`; ``"pbt"``, population based training, and :class:`fluid.search.PBT`; or
            ``"random"`` and ``"grid"``, whose trials all run to the budget, as those of ``"tpe"`` do with several
            metrics or with ``min_budget`` equal to ``budget``. With a ``searcher``: ``"asha"``, in which no trial waits
            at a rung; or ``"full"``, all trials run to the budget.
        budget: most iterations of a trial; 27 by default. A trainable may end earlier.
        time_budget_s: seconds from the call, or text such as ``"1h"``, after which the sweep ends for now; each trial
            that runs rests after its iteration, whose result counts, and goes on in a call with ``resume=True``.
        deadline: when the sweep is to have ended: seconds from the call, or text such as ``"2h"``. It sizes the sweep:
            as few devices are held as meet it with 90 %, and you hear at once if none do (``docs/deadlines.md``). A
            trial that cannot end by then is saved after the last iteration that fits. In an executor with other
            groups it orders these, too, so that as many as can be meet theirs. ``time_budget_s``
            ends a sweep on all devices; both may be given.
        stop: values of metrics at which a trial stops, ``{"accuracy": 0.95}``; or rules: :class:`fluid.search.Target`,
            :class:`fluid.search.Plateau`, :class:`fluid.search.TrialPlateau`, one or several.
        seed: of the configs, and, together with the program's own random number generators as they are at the call, of
            those of the trials (``docs/trainables.md``, "Random numbers and seeds"); 0 by default, so that the same
            call tries the same configs again. ``None`` draws one in each call; the summary and the report show it. On
            one device without packing, the same seed gives the same decisions, too.
        points: configs, or parts of configs, to try first; or trials of earlier sweeps, as ``result.best``, that start
            from the state of their checkpoint and go on up to ``budget`` iterations in all.
        searcher: suggests the configs, and is told the results: :class:`fluid.search.AskTell`, or the adapter of a
            library (``fluid.integrations.ax``, ``fluid.integrations.smac``); ``None``, the default, to sample
            ``space``.
        name: of the sweep, as reports show it; ``None``, the default, for one of the trainable and the algorithm.
        executor: runs the trials; ``None``, the default, for the one in force (:func:`fluid.submit_trialgroup`), or
            else a new one. It is closed at the end, also of a call that raises, unless it is in force, as in a ``with``
            block.
        sharing: how the new executor's trials share devices and processes: see :class:`fluid.FluidExecutor`, as for
            ``goals``, ``keep`` and ``output``. They are refused where there is an executor, which has its own, and so
            are ``run_dir``, ``loggers`` and ``metrics_port``; but for a deadline, which is the sweep's.
        goals: when all is to have ended, and for how much money; the deadline counts from the call.
        keep: which checkpoints outlive the session.
        output: what is told of the session, where.
        run_dir: the run folder of the new executor; ``None``, the default, for one in ``~/fluid_runs``.
        devices: how many devices the new executor uses, or which; ``None``, the default, for all.
        join: whether ``run_dir`` is a folder that several drivers share: each makes this same call, on the same or on
            another machine, and they work one sweep together, with the devices of each. The first one begins it; others
            may come later, and go at any time (``docs/cluster.md``). ``False`` by default.
        if_exists: what to do where ``run_dir`` holds a session already: ``"error"``, to refuse it; ``"resume"``, which
            ``resume=True`` means too; ``"overwrite"``, to delete it; or ``"new"``, for a folder beside it: see
            :class:`fluid.Output`. ``None``, the default, for ``"error"``, or for what ``resume`` says.
        resume: whether to go on with the sweep of this name in ``run_dir``, if it has one, with the same arguments;
            ``False`` by default. It makes an executor from the folder, and is refused where there is one. The time
            budget, the deadline, stop rules, callbacks, loggers, ``on_oom``, ``max_concurrent`` and ``trial_options``
            may be others; so may the code of the trainable: see ``code``.
        code: which trials of a sweep that goes on run the trainable given where it has changed, which a warning names:
            ``"begun"``, the default: those that have reported nothing yet, while others keep the code that they began
            with; ``"new"``: all that have not ended. It needs ``resume``; or ``join``, where a driver whose code is not
            that of the first one is refused, but with ``"new"`` runs its own, which the results note.
        retry_failed: whether trials that failed in an earlier session are tried again, from their last checkpoint if
            they have one; ``False`` by default. It needs ``resume``.
        reuse: whether trials start from states that earlier runs in the same folder have of the same code, config,
            seed and data, and iterations that are known are not run again; ``False`` by default. A text names the data,
            which Fluid does not look at. The seeds then follow from ``seed`` and the config (``docs/sweeps.md``).
        callbacks: listeners of the trials, which are called besides, not of what an earlier session reported; their
            rules are those of :class:`fluid.TrialListener`.
        loggers: loggers of the new executor, see :class:`fluid.FluidExecutor`; none by default.
        metrics_port: where the new executor serves metrics for Prometheus, see :class:`fluid.FluidExecutor`; ``None``,
            the default, for none.
        on_oom: what a trial that ran out of memory counts as: ``"fail"``, the default, as failed; ``"worst"`` as one
            with the worst value so far, so that the algorithm avoids its like.
        eta: one in so many trials continues at each rung, with so many times the iterations; 3 by default.
        min_budget: iterations at the first rung, at least; 1 by default.
        max_concurrent: most trials under way at once; ``None``, the default, for as many as keep the devices busy. Not
            for ``"sha"`` and ``"hyperband"``, whose rungs start together, nor for ``"pbt"``.
        trial_options: further fields of each :class:`fluid.Trial`, such as ``{"devices": 2}`` or ``{"chdir": True}``.
        requires: what the sweep's devices must have, as of a :class:`fluid.TrialGroup`; ``None``, the default, for any.
        owner: whose sweep it is, as of a :class:`fluid.TrialGroup`; ``None``, the default, for an owner of its own.
        priority: of the sweep's group, as for :meth:`fluid.FluidExecutor.submit_trialgroup`; 1 by default.
        preempt: whether less important trials make room for it, as there; ``False`` by default.
        weight: how much it counts that the sweep misses its deadline, or, without one, that it waits, among the groups
            of an executor with several, as there; 1 by default.

    Returns:
        The sweep's trials. Its ``notes`` say what ended the sweep early, and which trials ran with changed code.

    Raises:
        InvalidFieldError: an argument cannot be used, or a metric without a mode may mean either; or no trial has
            reported the metric, and the error's ``result`` has what there is. A single trial that does not report it
            fails (``docs/sweeps.md``).
        SweepFailedError: all trials have failed, or the first ones so that no other can succeed (``docs/failures.md``).
        SweepInterrupted: Ctrl-C or a notice of preemption has ended the sweep; its ``result`` has what there is.
        FluidError: the executor was closed.
    """
    called = _CLOCK.now()
    configs, starts = with_starts(points)
    own: dict[str, Any] = {"deadline": deadline, "run_dir": run_dir, "devices": devices, "join": join or None}
    own |= {"loggers": loggers or None, "metrics_port": metrics_port, "if_exists": if_exists}
    objects = {"sharing": sharing, "goals": goals, "keep": keep, "output": output}
    asked = flattened({name: value for name, value in {**own, **objects}.items() if value is not None})
    run_dir, limit = asked.get("run_dir"), asked.pop("deadline", None)
    resume = _resumes(resume, asked)
    limit_s = None if limit is None else seconds_until("deadline", limit)
    given_algorithm, algorithm = (
        algorithm,
        require_algorithm(algorithm, ALGORITHMS if searcher is None else WITH_SEARCHER),
    )
    options = options_of(given_algorithm, algorithm)
    compared = _checked_goals(metric, mode, algorithm, searcher)
    name = _name_of(trainable, algorithm) if name is None else require_text("name", name)
    joins = _joins(executor, asked)
    if joins and algorithm == "pbt":
        reason = "cannot be with algorithm='pbt': its members compare themselves with all others, so one driver has all"
        raise InvalidFieldError("join", True, reason)
    if joins and resume:
        raise InvalidFieldError("resume", True, "cannot be with join=True, which goes on with what is there by itself")
    reused = reuse_of(reuse, seed)
    if algorithm == "pbt" and reused is not None:
        reason = "cannot be with algorithm='pbt', whose states follow from what all members have done: leave it out"
        raise InvalidFieldError("reuse", reuse, reason)
    if joins and reused is not None:
        raise InvalidFieldError("reuse", reuse, "cannot be with join=True: the drivers would find other states")
    if joins and starts:
        raise InvalidFieldError("points", "a trial", "cannot start from its state with join=True: give its config")
    if joins and seed is None:
        raise InvalidFieldError(
            "seed", None, "cannot be with join=True: all drivers make the same trials from one seed"
        )
    runs_on = executor or executor_in_force()
    earlier = _earlier_sweep(resume, run_dir, name, code, retry_failed, joins=joins, is_given=runs_on is not None)
    is_given = searcher is not None
    seed = _drawn(seed, earlier) if not is_given else seed
    if searcher is not None:
        if earlier is not None:
            raise InvalidFieldError("resume", resume, "cannot be with a searcher, whose library has its own state")
        constants, known_space = _checked_constants(searcher, space, configs), None
    else:
        constants, known_space = {}, make_space(space)
        sampler_seed = seed_in_force(seed)
        if earlier is not None and algorithm in LEARNING:
            if callable(space) and algorithm == "tpe":
                raise InvalidFieldError("resume", resume, "cannot be with TPE on a function of an Optuna trial")
            # What it suggested followed from what was done by then.
            done = [trial.config for trial in earlier.trials]
            configs = [*done, *(configs[len(done) :] if isinstance(configs, Sequence) else ())]
            if done and sampler_seed is not None and algorithm == "tpe":
                sampler_seed = _seed_behind(sampler_seed, len(done))
        kind = options if isinstance(options, BOHB) else algorithm
        searcher = _make_searcher(kind, known_space, compared, sampler_seed, configs)
    iterations = require_integer("budget", budget, at_least=1)
    eta = require_integer("eta", eta, at_least=2)
    rungs = rungs_of(iterations, eta, require_integer("min_budget", min_budget, at_least=1, at_most=iterations))
    rungs = rungs if len(compared) == 1 else rungs[-1:]  # Trials are compared by one metric.
    rules = StopRules(stop, {goal.metric: goal.less for goal in compared})
    seconds = None if time_budget_s is None else parse_duration("time_budget_s", time_budget_s, zero=True)
    is_limited = seconds is not None or rules.end_sweep
    number = samples_of(algorithm, samples, searcher, is_limited=is_limited, rungs=rungs, eta=eta)
    if samples is None and number is not None and earlier is not None and algorithm != "pbt":
        number = max(number, len(earlier.trials))  # The sessions before had a limit of time.
    facts: dict[str, Any] = {"rungs": rungs, "eta": eta, "samples": number, "is_told_once": is_given}
    facts["one_by_one"] = isinstance(options, BOHB) and options.synchronous and len(rungs) > 1
    scheduler: RungScheduler
    if isinstance(options, PBT):
        assert number is not None
        require_savable(trainable)
        drawn = seed_in_force(seed)
        scheduler = make_population(options, known_space, budget=iterations, samples=number, seed=drawn)
        require_budgets_beyond(starts, iterations, scheduler.interval)
    else:
        scheduler = make_scheduler(algorithm, **facts)
        require_budgets_beyond(starts, iterations)
    plan = SweepPlan(
        trainable=trainable,
        name=name,
        algorithm=algorithm,
        options=options,
        searcher=searcher,
        learns=is_given or algorithm in LEARNING,
        constants=constants,
        scheduler=scheduler,
        shape=shape_for(algorithm, **facts),
        rules=rules,
        goals=compared,
        samples=number,
        budget=iterations,
        under_way=require_concurrency(algorithm, max_concurrent),
        time_budget_s=seconds,
        oom_is_worst=require_one_of("on_oom", on_oom, ("fail", "worst")) == "worst",
        trial_options=_checked_options(trainable, trial_options),
        callbacks=_checked_callbacks(callbacks),
        group=GroupOptions.checked(requires, owner, priority, preempt, weight),
        seed=seed_in_force(seed),
        goes_on=not is_given,
        space=known_space,
        points=configs,
        starts=starts,
        reuse=reused,
        takes_other_code=code == "new",
    )
    if earlier is not None:
        earlier.require_goals(compared)
        earlier.require_group(plan.group)
        if plan.shape is not None:
            earlier.require_shape(plan.shape)
    given = _checked_executor(executor, asked, goes_on=earlier is not None)
    if earlier is None and given is None and not joins and executor_in_force() is None and plan_in_force() is None:
        _require_free(run_dir, asked.get("if_exists", "error"))
    if limit_s is not None:
        used = given or executor_in_force()
        rehearsed = plan_in_force() is not None if used is None else used.session.hold.is_virtual
        left_s = max(_LEAST_S, limit_s - (0.0 if rehearsed else _CLOCK.now() - called))
        if used is None:
            asked["deadline"] = left_s
        else:
            plan = replace(plan, deadline_s=left_s)
    searcher.begin([goal.metric for goal in compared], [goal.mode for goal in compared])
    farewell: list[str] = []
    failed_before = [] if earlier is None else earlier.failed
    chosen: FluidExecutor | None = None
    try:
        try:
            if earlier is not None:
                loop = SweepLoop(plan)
                given_now = {plan.name: Trial(trainable, **plan.trial_options)}
                resumed = FluidExecutor.resume(
                    asked.pop("run_dir"),
                    listeners={plan.name: loop},
                    trainables=given_now,
                    code=code,
                    retry_failed=retry_failed,
                    **asked,
                )
                with executor_scope(resumed) as chosen:
                    heard = _run(loop, chosen, earlier)
            else:
                with executor_scope(given, _name=plan.name, **asked) as chosen:
                    loop = SweepLoop(replace(plan, name=_NAMES.new(plan.name, chosen.session)))
                    heard = _run(loop, chosen, None)
            # Also of what lanes finished while it was closed.
            return _outcome(loop, chosen, heard, farewell, failed_before)
        except KeyboardInterrupt:
            if chosen is None:
                raise
            if not IN_FORCE.has(chosen):  # It came while the executor was closed. What there is counts all the same.
                chosen.close()
            return _outcome(loop, chosen, int(signal.SIGINT), farewell, failed_before)
    finally:
        for line in farewell:  # After what a closing executor says of its session.
            if chosen is not None and chosen.session.quiet:
                _log.warning("%s", line)
            else:
                print(f"fluid: {line}", file=sys.stderr, flush=True)


def _run(loop: SweepLoop, executor: FluidExecutor, earlier: EarlierSweep | None) -> int | None:
    """Runs a sweep; returns the number of the signal that has ended it, if one did."""
    heard = None
    try:
        with contextlib.ExitStack() as rest:
            if loop.plan.deadline_s is not None:
                rest.callback(executor.session.add_deadline(loop.plan.deadline_s, loop.closing))
            loop.run(executor, earlier)
        if loop.trials.unfinished and not _stays_open(executor) and not executor.session.hold.is_virtual:
            with contextlib.suppress(FluidError):  # The session has ended.
                executor.session.drain(None, _SAVED_S)  # Also saves what waits at a rung.
        with contextlib.suppress(FluidError):  # The session has ended, and they were brought as it did.
            executor.session.await_kept(_KEPT_S)
    except (SweepFailedError, UnreportedMetricError) as error:
        error.result = _result(loop, executor.run_dir)
        raise
    except KeyboardInterrupt:
        heard = int(signal.SIGINT)
        loop.abandon()
    except SystemExit:
        heard = NOTICE.heard
        if heard is None:
            raise
    finally:
        if _stays_open(executor) and heard in (None, signal.SIGINT):
            loop.trials.abandon()  # Others may use the executor further.
    return heard


def _stays_open(executor: FluidExecutor) -> bool:
    return IN_FORCE.has(executor) and not executor.closed


def _outcome(
    loop: SweepLoop, executor: FluidExecutor, heard: int | None, farewell: list[str], failed_before: Sequence[str]
) -> SweepResult:
    result, stays_open = _result(loop, executor.run_dir), _stays_open(executor)
    counted = f"{len(loop.trials.unfinished)} of {len(result.trials)} trials had not ended"
    there, resume = (
        f"fluid.load({str(result.run_dir)!r})",
        f"fluid.run(..., run_dir={str(result.run_dir)!r}, resume=True)",
    )
    if (command := getattr(loop.plan.trainable, "fluid_command", None)) is not None:  # The user has called that.
        there = f"fluid report {result.run_dir}"
        resume = f"the same {command} with --run-dir {result.run_dir} --resume"
    resume = f"; {resume} goes on"
    if executor.session.joint is not None:
        resume = f"; {executor.session.joint.others}"
    elif executor.session.hold.is_virtual or not loop.plan.goes_on:
        resume = ""  # A rehearsal begins anew.
    if heard is not None:
        call = f"{there} has what there is{'' if stays_open else resume}"
        if not executor.session.quiet:
            farewell.append(f"interrupted by {signal.Signals(heard).name}: {counted}; {call}")
        raise SweepInterrupted(128 + heard, result, loop.trials.unfinished)
    if loop.trials.unfinished and loop.reason is not None and not executor.session.quiet:
        farewell.append(f"{loop.reason}: {counted}{resume}")
    raise_if_all_failed(result, failed_before)
    if before := said_of_earlier(result.failures, failed_before):
        farewell.append(f"{len(result.failures)} of {len(result.trials)} trials failed; {before}")
    if len(loop.plan.goals) == 1:
        try:
            _ = result.best
        except FluidError as error:  # NaN only: the user should hear of it without asking for the best trial.
            farewell.append(str(error))
    return result


def _result(loop: SweepLoop, run_dir: Path) -> SweepResult:
    plan, joint = loop.plan, loop.trials.executor.session.joint
    metrics, modes = tuple(goal.metric for goal in plan.goals), tuple(goal.mode for goal in plan.goals)
    early = () if loop.reason is None else (f"The sweep ended early: {loop.reason}.",)
    entries = (line.entry for line in JsonLines(run_dir / TRIALS).there()) if loop.was_resumed else ()
    changes = code_notes(entries)
    return SweepResult(
        trials=loop.trials.results,
        metric=metrics if len(metrics) > 1 else metrics[0],
        mode=modes if len(modes) > 1 else modes[0],
        run_dir=run_dir if joint is None else joint.membership.shared,
        name=plan.name,
        state="UNFINISHED" if loop.trials.unfinished else "DONE",
        notes=(*early, *changes, *(() if joint is None else joint.at.log.notes)),
    )


def _checked_goals(metric: Any, mode: Any, algorithm: str, searcher: Any) -> tuple[Goal, ...]:
    said = getattr(searcher, "mode_of", None)
    if mode is None and callable(said):  # Where both the name and the library say it, begin() refuses what differs.
        mode = [known or said(name) for name, known in modes_of(metric, None)] or None
    goals = goals_of(metric, mode)
    if not goals:
        raise InvalidFieldError("metric", metric, "must be the name of a metric that trials report")
    if len(goals) > 1 and algorithm in (*HALVING, "pbt"):
        reason = f"{algorithm!r} compares trials by one metric; several go with random, grid, tpe and full"
        raise InvalidFieldError("metric", metric, reason)
    return goals


def _drawn(seed: int | None, earlier: EarlierSweep | None) -> int | None:
    """The seed; a drawn one in place of ``None``, which is shown, so that the sweep can be repeated.

    A sweep that goes on keeps its own; a rehearsal, whose seeds say which one it is, draws none.
    """
    if seed is not None or plan_in_force() is not None:
        return seed
    known = None if earlier is None or earlier.group is None else earlier.group.search
    return secrets.randbelow(2**31) if known is None or known.seed is None else known.seed


def _seed_behind(seed: int, trials: int) -> int:
    """The seed of what TPE suggests behind the trials of earlier sessions: with the same it would begin anew."""
    seed = require_integer("seed", seed, at_least=0, at_most=2**32 - 1)
    digest = hashlib.blake2b(f"{seed} {trials}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _make_searcher(
    algorithm: str | BOHB,
    space: Space | ConditionalSpace,
    goals: Sequence[Goal],
    seed: int | None,
    points: Sequence[Mapping[str, Any]],
) -> Searcher:
    if isinstance(algorithm, BOHB):
        return BohbSearcher(space, algorithm, mode=goals[0].mode, seed=seed, points=points)
    sampler = algorithm if algorithm in ("grid", "tpe") else "random"
    modes = [goal.mode for goal in goals]
    return SamplerSearcher(make_sampler(sampler, space, modes=modes, seed=seed, points=points))


def _checked_constants(searcher: Any, space: Any, points: Any) -> Mapping[str, Any]:
    """Returns what configs have besides what a searcher suggests."""
    for name in ("ask", "tell", "begin"):
        if not callable(getattr(searcher, name, None)):
            reason = "must be a Searcher; fluid.search.AskTell(object.ask, object.tell) makes one of most objects"
            raise InvalidFieldError("searcher", searcher, reason)
    if points:
        raise InvalidFieldError("points", points, "cannot be with a searcher: give them to its library")
    if space is None:
        return {}
    constants = make_space(space)
    if not isinstance(constants, Space) or constants.domains or constants.functions:
        raise InvalidFieldError("space", space, "must have nothing but constants: the searcher suggests the rest")
    return constants.config({})


def _checked_executor(executor: Any, asked: Mapping[str, Any], *, goes_on: bool) -> FluidExecutor | None:
    if executor is not None and not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor, such as FluidExecutor(devices=2)")
    given: FluidExecutor | None = executor
    if given is not None or executor_in_force() is not None:
        which = "the one in force" if given is None else "the one passed"
        if goes_on:
            reason = f"goes on in an executor made from the folder, and not in {which}: leave that out"
            raise InvalidFieldError("resume", True, reason)
        for name, value in ((name, value) for name, value in asked.items() if value is not None):
            reason = f"is of an executor, and this sweep runs on {which}: give it there, FluidExecutor({name}=...)"
            raise InvalidFieldError(name, str(value) if isinstance(value, Path) else value, reason)
    return given


def _checked_options(trainable: Any, options: Any) -> Mapping[str, Any]:
    """Returns further fields of trials; a first trial shows whether they, and the trainable, can be used."""
    if options is not None and not isinstance(options, Mapping):
        raise InvalidFieldError("trial_options", options, "must be a dict of fields of a Trial")
    fields = {} if options is None else dict(options)
    known = set(inspect.signature(Trial).parameters) - _OWN_FIELDS
    for name in fields:
        if name not in known:
            meant = hint(name, known)
            reason = f"must be one of {', '.join(sorted(known))}" + (meant and f"; {meant}")
            raise InvalidFieldError(f"trial_options[{name!r}]", fields[name], reason)
    Trial(trainable, **fields)
    return fields


def _checked_callbacks(callbacks: Any) -> tuple[TrialListener, ...]:
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise InvalidFieldError("callbacks", callbacks, "must be a list of TrialListeners")
    listeners = tuple(callbacks)
    for position, listener in enumerate(listeners):
        require_listener(listener, f"callbacks[{position}]")
        refuse_logger(listener, f"callbacks[{position}]")
    return listeners


def _joins(executor: Any, asked: Mapping[str, Any]) -> bool:
    """Whether the sweep is worked with other drivers, by this call or by the executor that it runs on."""
    used = executor if isinstance(executor, FluidExecutor) else executor_in_force()
    return bool(asked.get("join")) if used is None else used.session.joint is not None


def _resumes(resume: Any, asked: dict[str, Any]) -> Any:
    """What ``resume`` is to be, by ``if_exists``, which it takes out of the options where that asks for it."""
    what = require_one_of("if_exists", asked.get("if_exists", "error"), IF_EXISTS)
    if what != "resume":
        if resume is True and "if_exists" in asked:
            raise InvalidFieldError("if_exists", what, "contradicts resume=True, which means if_exists='resume'")
        return resume
    if asked.get("join"):
        raise InvalidFieldError(
            "if_exists", what, "cannot be with join=True, which goes on with what is there by itself"
        )
    if asked.get("run_dir") is None:
        raise InvalidFieldError("if_exists", what, "needs run_dir=, the folder of the sweep")
    asked.pop("if_exists")
    return True


def _require_free(run_dir: Any, if_exists: str) -> None:
    """Refuses a folder that holds a session, before anything starts, and says what can be done in ``run``'s words."""
    if if_exists == "error" and run_dir is not None and is_used(folder_of(run_dir)):
        raise InvalidFieldError("run_dir", str(run_dir), holds_a_session("resume=True"))


def _earlier_sweep(
    resume: Any, run_dir: Any, name: str, code: Any, retry_failed: Any, *, joins: bool, is_given: bool
) -> EarlierSweep | None:
    """Returns what there is to go on with; ``None`` if the folder is still empty.

    ``is_given`` says whether the sweep is to run on an executor that there is.
    """
    for argument, value in (("resume", resume), ("retry_failed", retry_failed)):
        if not isinstance(value, bool):
            raise InvalidFieldError(argument, value, "must be True or False")
    require_one_of("code", code, CODES)
    for argument, value, default in (("code", code, "begun"), ("retry_failed", retry_failed, False)):
        if value != default and not (resume or (joins and argument == "code")):
            raise InvalidFieldError(argument, value, "needs resume=True: it is about a sweep that goes on")
    if not resume or plan_in_force() is not None:  # A rehearsal begins anew.
        return None
    if run_dir is None:
        also = ", and no other executor: it goes on in one made from that folder" if is_given else ""
        raise InvalidFieldError("resume", resume, f"needs run_dir, the folder of the sweep{also}")
    return read_sweep(run_dir, name, retry_failed=retry_failed) if is_used(Path(run_dir).expanduser()) else None


def _name_of(trainable: Any, algorithm: str) -> str:
    name = getattr(trainable, "__name__", None) or type(trainable).__name__
    return f"{algorithm}-of-trials" if name == "<lambda>" else f"{name}-{algorithm}"
