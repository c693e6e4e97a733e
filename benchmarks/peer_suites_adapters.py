"""What puts Fluid in place of the machinery that a peer's own tests call, one function for each peer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fluid import FluidExecutor

#: How often Fluid has run something in place of the peer's machinery.
runs = 0
#: Closed when the tests have ended.
_open = ExitStack()
#: The executor of a test, if it has made one; open for all of its sweeps.
_of_test: list[FluidExecutor] = []


def install(suite: str, side: str) -> None:
    """Prepares a suite's tests; on the side ``"fluid"``, puts Fluid in place."""
    if suite == "ray":
        _start_ray_as_its_ci_does()
    if side == "fluid":
        _ADAPTERS[suite]()


def end_test() -> None:
    """Closes the executor of a test, if it has made one."""
    while _of_test:
        _of_test.pop().__exit__(None, None, None)


def close() -> None:
    """Closes the executor of all tests."""
    _open.close()


def count() -> None:
    """Notes that Fluid has run something for the test."""
    global runs
    runs += 1


def _executor_in_force() -> None:
    """Opens an executor of two CPU devices, which Fluid's integrations then use by themselves."""
    _open.enter_context(FluidExecutor(backend="local", devices=2, verbose=1))


def _joblib() -> None:
    from joblib.parallel import BACKENDS

    from fluid.integrations.joblib import FluidBackend

    class CountedBackend(FluidBackend):
        def submit(self, func: Any, callback: Any = None) -> Any:
            count()
            return super().submit(func, callback)

        apply_async = submit

    _executor_in_force()
    BACKENDS["loky"] = CountedBackend
    # The tests' parameters are all backends that there are.
    BACKENDS.pop("fluid")


#: By the name of a search of scikit-learn's: our algorithm, and which of its arguments are the space and the samples.
_SEARCHES = {
    "GridSearchCV": ("grid", "param_grid", None),
    "RandomizedSearchCV": ("random", "param_distributions", "n_iter"),
}


def __getattr__(name: str) -> Any:
    """Makes the searches that stand for scikit-learn's: lanes look them up here by name, too."""
    if name not in _SEARCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _search_on_fluid(name)
    return found


def _search_on_fluid(name: str) -> type[Any]:
    """A class of FluidSearchCV with the name and the arguments of a search of scikit-learn's."""
    import sklearn.model_selection

    from fluid.integrations.sklearn import FluidSearchCV

    stock = getattr(sklearn.model_selection, name)
    algorithm, space, samples = _SEARCHES[name]
    arguments = inspect.signature(stock.__init__)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = arguments.bind(self, *args, **kwargs)
        given.apply_defaults()
        for argument, value in given.arguments.items():
            if argument != "self":
                setattr(self, argument, value)

    def fit(self: Any, X: Any, y: Any = None, **params: Any) -> Any:
        count()
        return FluidSearchCV.fit(self, X, y, **params)

    __init__.__signature__ = arguments  # type: ignore[attr-defined]
    own = {name: value.default for name, value in inspect.signature(FluidSearchCV).parameters.items()}
    ours = {name: value for name, value in own.items() if name not in arguments.parameters}
    ours |= {"algorithm": algorithm, "space": property(lambda self: getattr(self, space))}
    if samples is not None:
        ours["samples"] = property(lambda self: getattr(self, samples))
    constraints = {"_parameter_constraints": stock._parameter_constraints, "__module__": __name__}
    return type(name, (FluidSearchCV,), {**ours, **constraints, "__init__": __init__, "fit": fit})


def _sklearn() -> None:
    import sklearn.model_selection

    made = {name: __getattr__(name) for name in _SEARCHES}
    for name, search in made.items():
        setattr(sklearn.model_selection, name, search)
        setattr(sklearn.model_selection._search, name, search)
    _executor_in_force()


def _optuna() -> None:
    from optuna.study import Study

    from fluid.integrations.optuna import optimize

    @functools.wraps(Study.optimize)
    def optimize_on_fluid(
        self: Study,
        func: Any,
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Any = (),
        callbacks: Any = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        count()
        optimize(self, func, n_trials, timeout, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar)

    _executor_in_force()
    Study.optimize = optimize_on_fluid


def _hydra() -> None:
    """Nothing: the tests name the launcher, which Hydra finds as a plugin of its own."""


def _start_ray_as_its_ci_does() -> None:
    """Gives Ray four CPUs where a test does not say, as its CI has, and no dashboard, which takes seconds to start."""
    import ray

    stock = ray.init

    @functools.wraps(stock)
    def init(*args: Any, **options: Any) -> Any:
        address = options.get("address") or (args[0] if args else None)
        return stock(*args, **({} if address else {"num_cpus": 4, "include_dashboard": False} | options))

    ray.init = init


def _ray() -> None:
    import ray.tune.tune

    from fluid.integrations.ray_tune import drop_in

    within = False
    stock_run, stock_tuner = ray.tune.run, ray.tune.Tuner

    def executor() -> FluidExecutor:
        count()
        if not _of_test:
            _of_test.append(FluidExecutor(backend="local", devices=2, verbose=0).__enter__())
        return _of_test[0]

    @functools.wraps(stock_run)
    def run(run_or_experiment: Any, **options: Any) -> Any:
        nonlocal within
        if within:
            return stock_run(run_or_experiment, **options)
        within = True
        try:
            return drop_in.run(run_or_experiment, executor=executor(), **options)
        finally:
            within = False

    class Tuner(drop_in.Tuner):
        def __init__(self, trainable: Any = None, **options: Any) -> None:
            if not within:
                options.setdefault("executor", executor())
            super().__init__(trainable, **options)

        @classmethod
        def restore(cls, path: str, trainable: Any, **options: Any) -> Any:
            nonlocal within
            if within:
                return stock_tuner.restore(path, trainable, **options)
            within = True
            try:
                return super().restore(path, trainable, **{"executor": executor(), **options})
            finally:
                within = False

        def fit(self) -> Any:
            nonlocal within
            within = True
            try:
                return super().fit()
            finally:
                within = False

    # run_experiments calls the name of its own module.
    ray.tune.run = ray.tune.tune.run = run
    ray.tune.Tuner = ray.tune.tuner.Tuner = Tuner


_ADAPTERS: dict[str, Callable[[], None]] = {
    "joblib": _joblib,
    "sklearn": _sklearn,
    "optuna": _optuna,
    "hydra": _hydra,
    "ray": _ray,
}
