"""Calls that users make: what they say where they cannot be made.

An argument that the call does not have gets the name that it has here, if other libraries call it so. An error about
an argument reaches the user without the frames of Fluid's that it passed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from fluid.errors import FluidError, InvalidFieldError, WrongCallError

P = ParamSpec("P")
T = TypeVar("T")

#: Where the interpreter and installed packages are: what is elsewhere is the user's.
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep for folder in {sysconfig.get_path(it) for it in ("stdlib", "purelib", "platlib")}
)

#: Names of arguments by those of Fluid's that mean the same, the best one first. They are those of Optuna, Ray Tune,
#: Keras Tuner, scikit-learn, Hyperopt, Ax and W&B.
_PEERS = {
    "samples": "num_samples n_samples n_trials num_trials total_trials max_trials trials n_iter n_calls max_evals"
    " n_configs num_configs max_num_trials count",
    "n_trials": "num_samples n_samples samples num_trials total_trials max_trials n_iter n_calls max_evals",
    "budget": "num_epochs n_epochs epochs epoch max_epochs max_epoch max_t max_iter max_iters max_iterations"
    " num_iterations n_iterations iterations training_iteration max_resource max_resources max_budget max_steps"
    " num_steps n_steps steps num_boost_round",
    "min_budget": "grace_period min_t min_resource min_resources min_epochs min_iter min_iters",
    "eta": "reduction_factor factor halving_factor",
    "time_budget_s": "timeout timeout_s time_limit time_limit_s max_time max_seconds max_duration time_budget"
    " max_runtime max_run_time duration",
    "timeout": "time_budget_s time_limit max_time timeout_s time_budget",
    "trainable": "objective func function fn train_fn train_func training_function run_or_experiment hypermodel model"
    " estimator target program",
    "objective": "trainable func function fn",
    "space": "config configs param_space search_space hyperparameters hyperparams hparams param_distributions"
    " param_grid params parameters pbounds bounds distributions search_spaces",
    "config": "params parameters hyperparameters hyperparams hparams space",
    "trials": "experiments configs",
    "param_distributions": "space param_grid params param_space search_space search_spaces config",
    "param_grid": "space param_distributions params param_space search_space config",
    "metric": "metrics metric_name monitor objective_name loss score target_metric",
    "scoring": "metric monitor score",
    "mode": "direction directions goal optimize maximize minimize greater_is_better lower_is_better",
    "algorithm": "scheduler sampler pruner search_alg search_algorithm strategy tuner method algo optimizer",
    "seed": "random_state random_seed rng rstate",
    "random_state": "seed random_seed",
    "devices": "device n_jobs num_workers n_workers max_workers workers jobs gpus gpu num_gpus n_gpus cpus cpu"
    " num_cpus resources_per_trial resources_per_worker resources gpus_per_trial cpus_per_trial accelerator",
    "max_concurrent": "max_concurrent_trials max_parallel max_parallel_trials parallelism parallel_trials concurrency",
    "run_dir": "storage storage_path local_dir directory dir folder path out_dir output_dir log_dir logdir results_dir"
    " result_dir save_dir work_dir",
    "name": "study_name experiment_name exp_name project project_name sweep_name run_name",
    "resume": "load_if_exists restore continue_ resume_from restart",
    "if_exists": "overwrite exist_ok",
    "points": "points_to_evaluate initial_points init_points initial_params x0 enqueue_trial evaluated_rewards",
    "stop": "early_stopping early_stop stopper stopping stopping_criteria stopping_rule patience",
    "keep": "checkpoint_config checkpoint_freq keep_checkpoints_num num_to_keep save_checkpoints checkpoint_score_attr",
    "max_failures": "max_retries retries max_errors fail_fast max_consecutive_failed_trials",
    "retry_failed": "resume_errored restart_errored",
    "verbose": "verbosity show_progress_bar progress_bar progress_reporter progress",
    "loggers": "logger log_to report_to",
    "callbacks": "callback listeners",
    "backend": "executor_class runner cluster",
    "threads": "n_threads num_threads nthread",
    "memory": "mem memory_bytes gpu_memory",
    "timeout_s": "timeout",
}
_BY_PEERS_NAME: dict[str, list[str]] = {}
for _own, _names in _PEERS.items():
    for _name in _names.split():
        _BY_PEERS_NAME.setdefault(_name, []).append(_own)

#: Ways to say what another callable of the package takes: its name, an argument that the called one needs for this way,
#: and the way.
_ELSEWHERE = (
    ("FluidExecutor", "executor", "executor=fluid.FluidExecutor({name}=...)"),
    ("Trial", "trial_options", "trial_options={{{name!r}: ...}}"),
    ("run", "", "fluid.run(..., {name}=...)"),
    ("FluidExecutor", "", "fluid.FluidExecutor({name}=...)"),
    ("TrialGroup", "", "fluid.TrialGroup(..., {name}=...)"),
    ("Trial", "", "fluid.Trial(..., {name}=...)"),
)
#: What other libraries say of each trial, though an executor has an argument of the same name.
_OF_A_TRIAL = {"resources_per_trial", "resources_per_worker", "resources", "gpus_per_trial", "cpus_per_trial"}


@overload
def user_call(call: Callable[P, T]) -> Callable[P, T]: ...
@overload
def user_call(*, also: Collection[str]) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def user_call(call: Any = None, *, also: Collection[str] = ()) -> Any:
    """Has a function or method that users call say what is wrong with a call in their own terms.

    Args:
        call: the function; without it, a decorator is returned.
        also: names that it takes by ``**``.

    Raises:
        WrongCallError: raised by the call where its arguments do not fit; it is a ``TypeError``.
    """
    if call is None:
        return functools.partial(user_call, also=also)

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except FluidError as error:
            drop_own_frames(error)
            raise error
        except TypeError:
            if problem := _problem(called, args, kwargs):
                raise WrongCallError(problem) from None
            raise

    vars(called)["takes_also"] = tuple(also)
    return called


def _problem(call: Any, args: Any, kwargs: Any) -> str:
    """What is wrong with the arguments of a call; empty if they fit."""
    name, takes = str(call.__qualname__).removesuffix(".__init__").rpartition("<locals>.")[2], names_of(call)
    signature = inspect.signature(call)
    is_closed = bool(call.takes_also) or all(it.kind is not it.VAR_KEYWORD for it in signature.parameters.values())
    unknown = next((given for given in kwargs if given not in takes), None) if is_closed else None
    if unknown is not None:
        meant = hint(unknown, takes)
        return f"{name}() got an unexpected keyword argument {unknown!r}" + (meant and f": {meant}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parts = [it for it in signature.parameters.values() if it.name != "self"]
        by_place = [it.name for it in parts if it.kind is it.POSITIONAL_OR_KEYWORD]
        by_name = [f"{it.name}=..." for it in parts if it.kind is it.KEYWORD_ONLY and it.default is it.empty]
        return f"{name}(): {error}: write {name}({', '.join([*by_place, *by_name])})"
    return ""


C = TypeVar("C", bound=type)


def user_class(cls: C) -> C:
    """Has a class say what is wrong with the arguments of which users make an object, as :func:`user_call` does."""
    cls.__init__ = user_call(cls.__init__)  # type: ignore[misc]
    return cls


def names_of(call: Any) -> tuple[str, ...]:
    """The names of all arguments of a function or class."""
    function: Any = getattr(call, "__init__") if isinstance(call, type) else call  # noqa: B009 - mypy
    named = {name: it.kind for name, it in inspect.signature(function).parameters.items() if name != "self"}
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return (*(name for name, kind in named.items() if kind not in rest), *getattr(function, "takes_also", ()))


def hint(unknown: str, takes: Collection[str]) -> str:
    """What to write for an argument that a call does not have; empty if that is not known.

    Example:
        >>> hint("num_samples", ["samples", "budget"]), hint("buget", ["samples", "budget"]), hint("x", ["samples"])
        ('did you mean samples=?', 'did you mean budget=?', '')
    """
    meant = _BY_PEERS_NAME.get(unknown.lower(), [])
    is_of_a_trial = unknown in _OF_A_TRIAL and "trial_options" in takes
    if not is_of_a_trial and (own := next((name for name in meant if name in takes), None)):
        return f"did you mean {own}=?"
    close = difflib.get_close_matches(unknown, takes, 1, 0.7)
    if close:
        return f"did you mean {close[0]}=?"
    if tuple(takes) == ("metrics", "save"):
        return f"did you mean report({{{unknown!r}: ...}})?"
    package: Any = sys.modules["fluid"]
    ways = sorted(_ELSEWHERE, key=lambda way: unknown in _OF_A_TRIAL and way[0] != "Trial")
    for name in (unknown, *meant):
        for where, needs, way in ways:
            if (not needs or needs in takes) and name in names_of(getattr(package, where)):
                return f"did you mean {way.format(name=name)}?"
    return ""


def drop_own_frames(error: FluidError) -> None:
    """Drops the frames of Fluid's from an error that it raises on purpose.

    One that passed code of the user's, such as a callback, keeps all. An error about an argument says what the error
    behind it says; it keeps that, too, only if code of the user's raised it. Errors of other classes are never
    changed: where they come from is all that is known of a bug.
    """
    if not any(map(_is_users, _frames(error.__traceback__))):
        error.with_traceback(None)
    if isinstance(error, InvalidFieldError) and not any(map(_is_users, _frames_behind(error))):
        error.__cause__ = error.__context__ = None


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _frames_behind(error: BaseException) -> Iterator[FrameType]:
    behind = error.__cause__ or error.__context__
    while behind is not None:
        yield from _frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is neither Fluid's, nor the interpreter's, nor an installed package's."""
    if str(frame.f_globals.get("__name__")).split(".")[0] == "fluid":
        return False
    file = frame.f_code.co_filename
    return not file.startswith("<frozen") and not os.path.realpath(file).startswith(_INSTALLED)


# -- names that are looked up ----------------------------------------------------------------------------

#: What other libraries call parts of Fluid's modules and results, and what to write.
_NAMES = {
    "fluid": {
        **dict.fromkeys(("optimize", "minimize", "maximize", "fmin", "search_space"), "fluid.run(...)"),
        **dict.fromkeys(("Tuner", "TuneConfig", "RunConfig"), "fluid.run(...), or fluid.tune.Tuner with Ray Tune"),
        **dict.fromkeys(("create_study", "Study", "study"), "fluid.integrations.optuna.optimize(study, objective)"),
        **dict.fromkeys(("ASHAScheduler", "AsyncHyperBandScheduler", "schedulers"), "fluid.run(..., algorithm='asha')"),
        **dict.fromkeys(("GridSearchCV", "FluidSearchCV"), "fluid.integrations.sklearn.FluidSearchCV"),
        **{name: f"fluid.search.{name}" for name in ("uniform", "loguniform", "randint", "lograndint", "choice")},
    },
    "fluid.search": {
        **dict.fromkeys(("quniform", "q_uniform", "discrete_uniform"), "uniform(low, high, step=...)"),
        **dict.fromkeys(("qrandint", "qlograndint"), "randint(low, high, step=...)"),
        **dict.fromkeys(("qloguniform", "log_uniform", "LogUniform", "reciprocal"), "loguniform(low, high)"),
        **dict.fromkeys(("Float", "Real", "float", "suggest_float"), "uniform(low, high) or loguniform(low, high)"),
        **dict.fromkeys(("Int", "Integer", "int", "suggest_int"), "randint(low, high)"),
        **dict.fromkeys(("Categorical", "categorical", "grid_search", "suggest_categorical"), "choice([a, b])"),
        **dict.fromkeys(("Boolean", "bool"), "choice([True, False])"),
        "sample_from": "a function of an Optuna trial as the whole space",
    },
    "SweepResult": {
        **dict.fromkeys(("best_params", "best_config", "best_hyperparameters", "get_best_config"), "best.config"),
        **dict.fromkeys(("best_params_", "get_best_hyperparameters"), "best.config"),
        **dict.fromkeys(("best_value", "best_score", "best_score_", "best_metric"), "best.value"),
        **dict.fromkeys(("best_trial", "best_result", "get_best_result", "get_best_trial"), "best"),
        **dict.fromkeys(("best_checkpoint", "get_best_checkpoint"), "best.checkpoint"),
        **dict.fromkeys(("best_model", "best_estimator_", "get_best_models"), "best.load_checkpoint()"),
        **dict.fromkeys(("df", "trials_dataframe", "get_dataframe", "to_dataframe", "results_df"), "dataframe()"),
        **dict.fromkeys(("cv_results_", "results"), "trials, or dataframe()"),
        **dict.fromkeys(("best_trials",), "pareto"),
        **dict.fromkeys(("errors", "failed_trials"), "failures"),
    },
    "BestTrial": {
        **dict.fromkeys(("params", "hyperparameters", "parameters", "best_params", "values"), "config"),
        **dict.fromkeys(("score", "best_value", "loss"), "value"),
        **dict.fromkeys(("model", "estimator", "best_model"), "load_checkpoint()"),
        **dict.fromkeys(("id", "number", "trial_id"), "trial.trial_id"),
        **dict.fromkeys(("path", "log_dir", "logdir", "folder"), "trial.folder"),
    },
}


def missing_name(owner: str, name: str, what: str = "module {!r}") -> AttributeError:
    """Makes the error about a name that a module or an object does not have, with what other libraries mean by it."""
    text = f"{what.format(owner)} has no attribute {name!r}"
    meant = _NAMES.get(owner, {}).get(name, "")
    return AttributeError(text + (meant and f": did you mean {meant}?"), name=name)


class PeersNames:
    """Base of results: a name that they do not have is answered with what other libraries mean by it."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_name(type(self).__name__, name, "{!r} object")
