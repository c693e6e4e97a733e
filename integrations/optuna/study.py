"""The function that users call instead of ``study.optimize``, and the checks of its arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fluid._given_executor import closes_executor
from fluid._imports import try_import
from fluid.errors import InvalidFieldError, parse_duration, require_integer
from fluid.executor import FluidExecutor, executor_scope
from fluid.integrations.optuna.loop import OptimizeArguments, OptimizeLoop
from fluid.integrations.optuna.moving import moving, shared_with_callbacks
from fluid.integrations.optuna.objective import as_trainable
from fluid.integrations.optuna.rehearsed_objective import rehearsed
from fluid.integrations.optuna.work import ObjectiveWork, Space, TrainableWork, Work
from fluid.trainables.pickling import dump_trainable
from fluid.trainables.trainable import is_only_replayed, kind_of
from fluid.trial_fields import IterationTimeout, require_timeout
from fluid.user_calls import user_call

with try_import("Optuna", extra="optuna") as _imports:
    import optuna

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

#: The default of ``n_jobs``, as for ``study.optimize``: here one per device, there one per core.
_ALL = -1


class NoExceptionClassError(InvalidFieldError, TypeError):
    """``catch`` holds something else than classes of exceptions; ``study.optimize`` raises a ``TypeError``, too."""


@user_call
@closes_executor
def optimize(
    study: Study,
    trainable: Any,
    n_trials: int | None = None,
    timeout: float | None = None,
    n_jobs: int = _ALL,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[Callable[[Study, FrozenTrial], None]] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
    *,
    executor: FluidExecutor | None = None,
    batch_size: int | None = None,
    space: Mapping[str, BaseDistribution] | Callable[[Trial], Mapping[str, Any]] | None = None,
    metric: str | Sequence[str] | None = None,
    budget: int | None = None,
    iteration_timeout_s: IterationTimeout = "auto",
) -> None:
    """Optimizes a study as ``study.optimize`` does, with the trials on Fluid.

    Trials run a plain objective, which takes Optuna's trial, or, with ``space``, ``metric`` and ``budget``, a trainable
    of Fluid's. The study's sampler, pruner and storage are called in the calling thread, one call after another: an
    objective's ``suggest_float``, ``report`` and so on are requests to this process. Results of a trainable are
    reported to the study as they come, iteration ``i`` as step ``i - 1``. Trials that a killed run has left ``RUNNING``
    are told ``FAIL`` and run again with the same parameters, as part of ``n_trials``; see ``docs/optuna.md``.

    Args:
        study: the study to optimize, in its directions.
        trainable: an objective, as for ``study.optimize``; with ``space``, what to train, as for :class:`fluid.Trial`.
            It is not tried again after an exception, and may raise ``optuna.TrialPruned``.
        n_trials: number of trials to ask for in this call, however they end; ``None`` for no limit.
        timeout: seconds from the start of the first trial after which no further one is asked for; those under way are
            finished.
        n_jobs: without batches, how many trials are under way at once; -1 for as many as there are devices. More than
            that share devices where sharing is faster.
        catch: exceptions of a trial that do not end the study; the trial is told ``FAIL`` either way.
        callbacks: called with the study and the trial after each trial, in this thread; may call ``study.stop``.
        gc_after_trial: whether to collect garbage after each trial, here and, for an objective, in its lane.
        show_progress_bar: whether to show Optuna's progress bar.
        executor: runs the trials, and is closed at the end unless it is in a ``with`` block; ``None`` for the one in
            force, or else one made for this call.
        batch_size: number of trials in a batch. A batch is one TrialGroup, and the next one is asked for when all of it
            has ended. ``None`` for no batches: each trial that ends is replaced at once, in one open TrialGroup.
        space: distributions by name, or a function that suggests with a trial and returns the config; ``None`` for an
            objective, which suggests for itself.
        metric: with ``space``, name of the metric to optimize, among those that the trainable reports; a list of names
            if the study has several objectives. A trial's value is the last one it reported.
        budget: with ``space``, iterations of a trial that is not pruned. The pruner is not asked after the last.
        iteration_timeout_s: when an iteration counts as hung, as for :class:`fluid.Trial`; for an objective, the time
            between two requests, which ``"auto"``, the default, does not limit. A trial that hangs twice is told
            ``FAIL``.

    Raises:
        InvalidFieldError: an argument cannot be used, or a trial ended without having reported ``metric``.
        FluidError: the executor was closed. Trials under way are told ``FAIL``.
        RuntimeError: called from a callback of the study.
        Exception: what a trial, ``space`` or a callback raised, once the other trials under way have ended.

    Example:
        >>> import optuna
        >>> from fluid import FluidExecutor
        >>> from fluid.integrations.optuna import optimize
        >>> def objective(trial):
        ...     x = trial.suggest_float("x", 0.0, 4.0)
        ...     return (x - 2.0) ** 2
        >>> def train(config):
        ...     for iteration in range(3):
        ...         yield {"loss": (config["x"] - 2.0) ** 2 + 1.0 / (iteration + 1)}
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> study, other = optuna.create_study(), optuna.create_study()
        >>> space = {"x": optuna.distributions.FloatDistribution(0.0, 4.0)}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0):
        ...     optimize(study, objective, n_trials=4)
        ...     optimize(other, train, n_trials=4, space=space, metric="loss", budget=3)
        >>> len(study.trials), 0.0 <= study.best_params["x"] <= 4.0, len(other.trials)
        (4, True, 4)
    """
    _imports.check()
    if not isinstance(study, optuna.study.Study):
        raise InvalidFieldError("study", study, "must be a Study of Optuna")
    if isinstance(timeout, FluidExecutor):
        raise InvalidFieldError("timeout", timeout, "must be seconds; pass the executor as executor=")
    if executor is not None and not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
    work: Work
    if space is None:
        _refuse_options_of_a_trainable(metric, budget)
        work = ObjectiveWork(trainable=_checked_objective(trainable, gc_after_trial))
    else:
        work = _trainable_work(study, trainable, space, metric, budget)
    with moving(study, is_objective=space is None):
        dump_trainable(trainable)  # Raises here, before the study has a trial that could only fail.
    arguments = OptimizeArguments(
        work=work,
        n_trials=None if n_trials is None else require_integer("n_trials", n_trials, at_least=0),
        batch_size=None if batch_size is None else require_integer("batch_size", batch_size, at_least=1),
        n_jobs=_checked_jobs(n_jobs, batch_size),
        timeout=None if timeout is None else parse_duration("timeout", timeout, zero=True, finite=False),
        catch=_checked_catch(catch),
        callbacks=_checked_callbacks(callbacks),
        iteration_timeout_s=require_timeout("iteration_timeout_s", iteration_timeout_s),
        gc_after_trial=bool(gc_after_trial),
        show_progress_bar=bool(show_progress_bar),
    )
    if shared := shared_with_callbacks(study, trainable, arguments.callbacks):
        warnings.warn(
            f"the objective and a callback share {shared}: trials run in other processes, each with a copy of its own,"
            " so the callback does not see what the objective changes; pass results on by trial.set_user_attr",
            stacklevel=4,  # Two are of decorators.
        )
    with executor_scope(executor) as chosen:
        if (backend := chosen.session.backend).replays:
            arguments = replace(arguments, work=rehearsed(work, trainable, study, backend))
        elif is_only_replayed(work.trainable):
            kind_of(work.trainable)  # Raises.
        OptimizeLoop(study, arguments, chosen).run()


def _refuse_options_of_a_trainable(metric: Any, budget: Any) -> None:
    for name, value in (("metric", metric), ("budget", budget)):
        if value is not None:
            raise InvalidFieldError(
                name, value, "goes with space=, for a trainable; an objective returns its value, and takes neither"
            )


def _checked_objective(objective: Any, gc_after_trial: bool) -> Any:
    """Returns the trainable of an objective."""
    is_class = inspect.isclass(objective)
    if not callable(objective) or callable(getattr(objective, "step", None)) or _is_generator(objective):
        kind = "a trainable" if callable(objective) else "not callable"
        reason = f"is {kind}: pass space=, metric= and budget= with a trainable, or an objective, which takes a trial"
        raise InvalidFieldError("trainable", objective, reason)
    try:
        if not is_class:
            inspect.signature(objective).bind(None)
    except TypeError as error:
        raise InvalidFieldError("trainable", objective, f"must take a trial as its only argument: {error}") from None
    except ValueError:
        pass  # Some built-in callables have no signature.
    return as_trainable(objective, gc_after_trial=gc_after_trial)


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__)


def _trainable_work(study: Study, trainable: Any, space: Any, metric: Any, budget: Any) -> Work:
    kind = "replayed" if is_only_replayed(trainable) else kind_of(trainable)
    if kind in ("function", "ray_function") and next(iter(inspect.signature(trainable).parameters), None) == "trial":
        reason = (
            "takes a trial, as an objective does: leave space=, metric= and budget= out, or yield metrics of a config"
        )
        raise InvalidFieldError("trainable", trainable, reason)
    for name, value in (("metric", metric), ("budget", budget)):
        if value is None:
            raise InvalidFieldError(name, value, "is needed with space=; without space=, pass an objective of a trial")
    return TrainableWork(
        trainable=trainable,
        space=_checked_space(space),
        metrics=_checked_metrics(metric, study),
        budget=require_integer("budget", budget, at_least=1),
    )


def _checked_space(space: Any) -> Space:
    if isinstance(space, Mapping):
        for name, distribution in space.items():
            if not isinstance(name, str):
                raise InvalidFieldError("space", space, f"has the name {name!r}, which is not a string")
            if not isinstance(distribution, optuna.distributions.BaseDistribution):
                raise InvalidFieldError(f"space[{name!r}]", distribution, "must be one of optuna.distributions")
        return dict(space)
    if not callable(space):
        raise InvalidFieldError("space", space, "must be distributions by name, or a function of a trial")
    return space  # type: ignore[no-any-return]


def _checked_metrics(metric: Any, study: Study) -> tuple[str, ...]:
    names = (metric,) if isinstance(metric, str) else metric
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise InvalidFieldError("metric", metric, "must be a name, or a list of names")
    objectives = len(study.directions)
    if len(names) != objectives:
        raise InvalidFieldError("metric", metric, f"the study has {objectives} objective(s), and each needs one name")
    return tuple(names)


def _checked_jobs(n_jobs: Any, batch_size: int | None) -> int | None:
    """Returns how many trials are under way at once; ``None`` for as many as there are devices."""
    if n_jobs == _ALL:
        return None
    if batch_size is not None:
        raise InvalidFieldError("n_jobs", n_jobs, "cannot be combined with batch_size: all of a batch runs at once")
    return require_integer("n_jobs", n_jobs, at_least=1)


def _checked_catch(catch: Any) -> tuple[type[Exception], ...]:
    errors = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    for error in errors:
        if not isinstance(error, type) or not issubclass(error, Exception):
            raise NoExceptionClassError("catch", catch, "must be a class of exceptions, or several")
    return errors


def _checked_callbacks(callbacks: Any) -> tuple[Callable[[Any, Any], None], ...]:
    if callbacks is None:
        return ()
    if not isinstance(callbacks, Iterable):
        raise InvalidFieldError("callbacks", callbacks, "must be a list of functions of a study and a trial")
    functions = tuple(callbacks)
    for function in functions:
        if not callable(function):
            raise InvalidFieldError("callbacks", function, "must be a function of a study and a trial")
    return functions
