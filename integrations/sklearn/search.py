"""FluidSearchCV: a search of scikit-learn whose candidates are trials of Fluid."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils import indexable

from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError, require_integer
from fluid.executor import FluidExecutor, executor_in_force
from fluid.integrations.sklearn import private_api
from fluid.integrations.sklearn.candidates import (
    ListedCandidates,
    SampledCandidates,
    grid_of,
    sample_of,
    seed_of,
    tpe_sampler,
)
from fluid.integrations.sklearn.evaluation import DATA, FOLD, SearchTask, parameters_of
from fluid.integrations.sklearn.fit_callbacks import FitCallbacks
from fluid.integrations.sklearn.resources import (
    PARTIAL_FIT,
    Ladder,
    estimators_of,
    fit_on_all,
    make_ladder,
    resource_of,
)
from fluid.integrations.sklearn.running import (
    Evaluated,
    SearchRun,
    earlier_search,
    executor_for,
    identity_of,
    new_name,
    resumed_executor,
)
from fluid.results.run_files import is_used
from fluid.search.rungs import hyperband_shapes
from fluid.sweeping.resuming import EarlierSweep
from fluid.trial_fields import IterationTimeout
from fluid.user_calls import user_call

#: Candidates where ``samples`` is not given: as many as RandomizedSearchCV tries, and more where most end early.
_SAMPLES = {"random": 10, "tpe": 10, "asha": 64, "sha": 64}
_HALVING = ("asha", "hyperband", "sha")
_NO_FITS = "No fits were performed. Was the CV iterator empty? Were there no candidates?"
#: Candidates for each device from which on a trial is a candidate, not a fold of one.
_CANDIDATES_PER_DEVICE = 8


class FluidSearchCV(private_api.BaseSearchCV):  # type: ignore[misc]
    """Searches hyperparameters by cross-validation, as scikit-learn's searches do, with the fits on Fluid.

    Attributes and methods are those of ``RandomizedSearchCV``: ``best_params_``, ``best_estimator_``, ``cv_results_``,
    ``predict`` and so on. With ``algorithm="grid"`` the scores are those of ``GridSearchCV``; with ``"random"`` the
    candidates of a space of scikit-learn, and their scores, are those of ``RandomizedSearchCV`` with the same seed.
    Under ``"asha"``, ``"sha"`` and ``"hyperband"`` candidates train step by step, and those that fall behind stop;
    ``cv_results_["n_resources"]`` then has how far each one came, and the best one is chosen among those that came
    furthest.

    Example:
        >>> from scipy.stats import loguniform
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import SGDClassifier
        >>> from fluid import FluidExecutor
        >>> from fluid.integrations.sklearn import FluidSearchCV
        >>> x, y = load_iris(return_X_y=True)
        >>> model = SGDClassifier(random_state=0)
        >>> with FluidExecutor(backend="local", devices=1, verbose=0):
        ...     search = FluidSearchCV(model, {"alpha": loguniform(1e-6, 1e-1)}, samples=4, random_state=0).fit(x, y)
        ...     halving = FluidSearchCV(model, {"alpha": [1e-5, 1e-3, 0.1]}, algorithm="asha", budget=9).fit(x, y)
        >>> len(search.cv_results_["params"]), bool(search.best_score_ > 0.7), search.predict(x).shape
        (4, True, (150,))
        >>> int(max(halving.cv_results_["n_resources"]))
        9

    Args:
        estimator: what to fit. It is cloned.
        space: the parameters by name: lists of values, distributions of SciPy (anything with ``rvs``), of
            :mod:`fluid.search`, Optuna or Ray Tune, and constants; a list of such dicts, except for TPE; or a function
            of an Optuna trial, except for grids.
        algorithm: ``"random"``, the default; ``"grid"``, every combination; ``"asha"``, asynchronous successive
            halving; ``"sha"``, synchronous; ``"hyperband"``; or ``"tpe"``, which needs Optuna.
        samples: number of candidates. ``None``, the default: all of a grid, one round of Hyperband, 64 with ASHA and
            successive halving, else 10.
        budget: parts into which the resource is divided, 27 by default. With ``partial_fit``: passes over the data.
        eta: with halving, one in so many candidates continues at each rung, with so many times the resource; 3 by
            default.
        min_budget: parts of the resource at the first rung, at least; 1 by default.
        resource: how candidates train step by step. ``"partial_fit"``: by a pass over the data per iteration;
            ``"n_estimators"``, ``"max_iter"`` or another parameter: by warm starts that raise it up to the value that
            the estimator or the candidate has; ``"n_samples"``: by fits on more and more samples. That of a pipeline
            is its last step's. ``"auto"``, the default: with halving the first of these that the estimator can do;
            else ``None``, which fits at once.
        scoring: as for ``RandomizedSearchCV``.
        cv: as for ``RandomizedSearchCV``.
        refit: as for ``RandomizedSearchCV``. With ``partial_fit``, the best estimator gets as many passes over all
            data as its candidate.
        n_jobs: number of CPU cores of the executor that is made for a fit; ``None``, the default, and -1
            for all, -2 for all but one.
        executor: runs the trials, and stays open; ``None``, the default, for the one in force, or else one made for
            the fit. Clones share it, and pickles leave it out.
        run_dir: folder of the executor that is made: it keeps the fits, for ``fluid report`` and for ``resume``.
            ``None``, the default: one that is deleted; with ``verbose``, one in ``~/fluid_runs``.
        resume: whether to go on with the search in ``run_dir``, if it has one, with the same arguments and data. The
            ``random_state`` must be a number then, where candidates are drawn. ``False`` by default.
        random_state: of the candidates.
        error_score: as for ``RandomizedSearchCV``.
        return_train_score: as for ``RandomizedSearchCV``.
        verbose: 0, the default, for silence; 1 for the number of fits and the live view of the executor that is made;
            more for a line per fit, which the executor shows.
        iteration_timeout_s: when a trial's iteration counts as hung, as for :class:`fluid.Trial`; it is a pass over the
            data with ``partial_fit``, else a fit. ``"auto"``, the default, limits passes only: fits are not alike.
    """

    _parameter_constraints = {  # noqa: RUF012
        **{
            name: constraint
            for name, constraint in private_api.BaseSearchCV._parameter_constraints.items()
            if name not in ("n_jobs", "pre_dispatch")
        },
        "space": [dict, list, callable],
        "algorithm": [private_api.StrOptions({*_SAMPLES, "grid", "hyperband"})],
        "samples": [private_api.Interval(numbers.Integral, 1, None, closed="left"), None],
        "budget": [private_api.Interval(numbers.Integral, 1, None, closed="left")],
        "eta": [private_api.Interval(numbers.Integral, 2, None, closed="left")],
        "min_budget": [private_api.Interval(numbers.Integral, 1, None, closed="left")],
        "resource": [str, None],
        "n_jobs": [
            private_api.Interval(numbers.Integral, None, -1, closed="right"),
            private_api.Interval(numbers.Integral, 1, None, closed="left"),
            None,
        ],
        "executor": [FluidExecutor, None],
        "run_dir": [str, Path, None],
        "resume": ["boolean"],
        "random_state": ["random_state"],
        "iteration_timeout_s": [
            private_api.Interval(numbers.Real, 0, None, closed="neither"),
            private_api.StrOptions({"auto"}),
            None,
        ],
    }

    @user_call
    def __init__(
        self,
        estimator: Any,
        space: Any,
        *,
        algorithm: str = "random",
        samples: int | None = None,
        budget: int = 27,
        eta: int = 3,
        min_budget: int = 1,
        resource: str | None = "auto",
        scoring: Any = None,
        cv: Any = None,
        refit: Any = True,
        n_jobs: int | None = None,
        executor: FluidExecutor | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        random_state: Any = None,
        error_score: Any = np.nan,
        return_train_score: bool = False,
        verbose: int = 0,
        iteration_timeout_s: IterationTimeout = "auto",
    ) -> None:
        self.estimator = estimator
        self.space = space
        self.algorithm = algorithm
        self.samples = samples
        self.budget = budget
        self.eta = eta
        self.min_budget = min_budget
        self.resource = resource
        self.scoring = scoring
        self.cv = cv
        self.refit = refit
        self.n_jobs = n_jobs
        self.executor = executor
        self.run_dir = run_dir
        self.resume = resume
        self.random_state = random_state
        self.error_score = error_score
        self.return_train_score = return_train_score
        self.verbose = verbose
        self.iteration_timeout_s = iteration_timeout_s

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "executor": None}

    def __sklearn_clone__(self) -> FluidSearchCV:
        bare = copy.copy(self)  # Without the executor, which cannot be cloned.
        made: FluidSearchCV = super(FluidSearchCV, bare).__sklearn_clone__()
        made.executor = self.executor
        return made

    @private_api.fit_context
    def fit(self, X: Any, y: Any = None, **params: Any) -> FluidSearchCV:
        """Evaluates candidates, and fits the best one on all data.

        Args:
            X: data.
            y: targets; ``None`` for unsupervised learning.
            params: of the estimator's ``fit``, the scorer and the splitter, as for ``RandomizedSearchCV``.

        Returns:
            This search.

        Raises:
            InvalidFieldError: an argument cannot be used.
            ValueError: all fits failed.
            Exception: what a fit raised, with ``error_score="raise"``.
        """
        self._check_folder()
        scorers, refit_metric = self._get_scorers()
        X, y = indexable(X, y)
        params = private_api.method_params(X, params)
        routed = self._get_routed_params_for_fit(params)
        callbacks = FitCallbacks(self, X, y, params)
        cv = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        self.n_splits_ = cv.get_n_splits(X, y, **routed.splitter.split)
        splits = _splits(cv, X, y, routed.splitter.split, self.n_splits_)
        if not splits:
            raise ValueError(_NO_FITS)
        task = self._task(X, y, splits, scorers, routed)
        candidates = self._candidates(task)
        task = replace(task, ladder=self._ladder(task, candidates or ()))
        found = self._search(task, candidates, callbacks)
        fits = [fit for candidate in found for fit in candidate.fits]
        private_api.complete_fits(fits, self.scoring, self.error_score)
        more = {} if task.ladder is None else {"n_resources": [candidate.amount for candidate in found]}
        results = self._format_results([dict(candidate.params) for candidate in found], self.n_splits_, fits, more)
        self.multimetric_ = isinstance(fits[0]["test_scores"], dict)
        if callable(self.scoring) and self.multimetric_:
            self._check_refit_for_multimetric(fits[0]["test_scores"])
            refit_metric = self.refit
        if self.refit or not self.multimetric_:
            self.best_index_ = self._best_index(results, refit_metric, [candidate.iterations for candidate in found])
            if not callable(self.refit):
                self.best_score_ = results[f"mean_test_{refit_metric}"][self.best_index_]
            self.best_params_ = results["params"][self.best_index_]
        if self.refit:
            self._refit(X, y, dict(routed.estimator.fit), task.ladder, callbacks, found[self.best_index_])
        self.scorer_ = scorers._scorers if isinstance(scorers, private_api.MultimetricScorer) else scorers
        self.cv_results_ = results
        callbacks.end()
        return self

    def _task(self, X: Any, y: Any, splits: Sequence[tuple[Any, Any]], scorers: Any, routed: Any) -> SearchTask:
        is_multimetric = isinstance(scorers, private_api.MultimetricScorer)
        metric = self.refit if isinstance(self.refit, str) else None
        if is_multimetric and metric is None and self.algorithm in (*_HALVING, "tpe"):
            reason = f"{self.algorithm!r} compares candidates while they train, by one metric: give its name"
            raise InvalidFieldError("refit", self.refit, reason)
        return SearchTask(
            estimator=clone(self.estimator),
            X=X,
            y=y,
            splits=splits,
            scorer=scorers,
            metric=metric,
            fit_params=dict(routed.estimator.fit),
            score_params=dict(routed.scorer.score),
            return_train_score=self.return_train_score,
            error_score=self.error_score,
            verbose=self.verbose,
            settings=get_config(),
            ladder=None,
        )

    def _ladder(self, task: SearchTask, candidates: Sequence[Mapping[str, Any]]) -> Ladder | None:
        """Returns how candidates train step by step; ``None`` if they do not."""
        budget = require_integer("budget", self.budget, at_least=1)
        require_integer("min_budget", self.min_budget, at_least=1, at_most=budget)
        halves = self.algorithm in _HALVING
        if self.resource is None or (self.resource == "auto" and not halves):
            return None
        resource = resource_of(estimators_of(self.estimator, candidates), self.resource)
        rows = min(len(train) for train, _ in task.splits)
        # As HalvingRandomSearchCV has it.
        least = self.n_splits_ * 2 * (len(np.unique(task.y)) if is_classifier(self.estimator) else 1)
        return make_ladder(
            resource,
            budget=budget,
            eta=self.eta,
            min_budget=self.min_budget,
            least_share=min(1.0, least / max(1, rows)),
            seed=seed_of(self.random_state),
        )

    def _candidates(self, task: SearchTask) -> list[dict[str, Any]] | None:
        """Returns all candidates; ``None`` if they are suggested one after another."""
        if self.algorithm == "tpe":
            return None
        if self.algorithm == "grid":
            return grid_of(self.space)[: self.samples]
        number = _SAMPLES.get(self.algorithm)
        if number is None:
            ladder = self._ladder(task, ())
            rungs = (1,) if ladder is None else ladder.rungs
            number = sum(shape.sizes[0] for shape in hyperband_shapes(rungs, self.eta))
        return sample_of(self.space, self.samples, number, self.random_state)

    def _search(
        self, task: SearchTask, candidates: list[dict[str, Any]] | None, callbacks: FitCallbacks
    ) -> list[Evaluated]:
        size = (self.samples or _SAMPLES["tpe"]) if candidates is None else len(candidates)
        if self.verbose > 0:
            fits = f"totalling {size * self.n_splits_} fits"
            print(f"Fitting {self.n_splits_} folds for each of {size} candidates, {fits}")
        if not size:
            return []
        name = f"{type(self.estimator).__name__}-{self.algorithm}"
        folder = self.run_dir
        constants = {} if folder is None else {DATA: identity_of(task)}
        earlier = earlier_search(folder, name, constants) if folder is not None and self.resume else None
        with callbacks.fits(size * self.n_splits_) as in_lanes:
            if task.ladder is None:
                task = replace(task, callbacks=in_lanes)
            make = partial(SearchRun, task, algorithm=self.algorithm, eta=self.eta, constants=constants)
            if folder is not None and earlier is not None:
                is_whole = FOLD not in earlier.trials[0].config
                options = self._trial_options(task, "lane")
                search = make(self._sampler(candidates, is_whole, earlier), name=name, trial_options=options)
                with resumed_executor(folder, self.n_jobs, search, is_shown=self.verbose > 0) as executor:
                    return search.run(executor, earlier)
            with executor_for(self.executor, self.n_jobs, folder, is_shown=self.verbose > 0) as executor:
                is_whole = task.ladder is not None or size >= _CANDIDATES_PER_DEVICE * executor.max_devices
                options = self._trial_options(task, executor.isolating.of_sharing_sweep)
                sampler = self._sampler(candidates, is_whole, None)
                return make(sampler, name=new_name(name, executor), trial_options=options).run(executor)

    def _trial_options(self, task: SearchTask, isolation: str | None) -> dict[str, Any]:
        """Fields of the trials: they share processes as joblib's tasks do, and whole fits have no limit of others."""
        grows = task.ladder is not None and task.ladder.resource != PARTIAL_FIT  # From one iteration to the next.
        limit = None if grows and self.iteration_timeout_s == "auto" else self.iteration_timeout_s
        return {"isolation": isolation, "iteration_timeout_s": limit}

    def _sampler(self, candidates: list[dict[str, Any]] | None, is_whole: bool, earlier: EarlierSweep | None) -> Any:
        if candidates is not None:
            return ListedCandidates(candidates, None if is_whole else self.n_splits_)
        points = () if earlier is None else [parameters_of(trial.config) for trial in earlier.trials]
        return SampledCandidates(tpe_sampler(self.space, self.random_state, points), self.samples or _SAMPLES["tpe"])

    def _check_folder(self) -> None:
        """Checks the arguments that say where the fits are kept, and whether a search goes on."""
        if self.run_dir is not None and (self.executor or executor_in_force()) is not None:
            raise InvalidFieldError(
                "run_dir", self.run_dir, "is that of a new executor: pass it to the executor instead"
            )
        if not self.resume:
            if self.run_dir is not None and is_used(Path(self.run_dir).expanduser()):
                reason = "holds a session already: pass resume=True to go on, or give another folder"
                raise InvalidFieldError("run_dir", str(self.run_dir), reason)
            return
        if self.run_dir is None:
            raise InvalidFieldError("resume", True, "needs run_dir, the folder of the search")
        if self.algorithm != "grid" and not isinstance(self.random_state, numbers.Integral):
            reason = "must be a number with resume=True, so that the same candidates are drawn again"
            raise InvalidFieldError("random_state", self.random_state, reason)

    def _best_index(self, results: Mapping[str, Any], refit_metric: Any, iterations: Sequence[int]) -> int:
        if callable(self.refit):
            chosen: int = self._select_best_index(self.refit, refit_metric, results)
            return chosen
        furthest = np.flatnonzero(np.asarray(iterations) == max(iterations))
        return int(furthest[results[f"rank_test_{refit_metric}"][furthest].argmin()])

    def _refit(
        self, X: Any, y: Any, params: dict[str, Any], ladder: Ladder | None, callbacks: FitCallbacks, best: Evaluated
    ) -> None:
        self.best_estimator_ = clone(self.estimator).set_params(**clone(self.best_params_, safe=False))
        clock = MonotonicClock()
        with callbacks.refit(self.best_estimator_):
            began = clock.now()
            self.best_estimator_ = fit_on_all(self.best_estimator_, X, y, params, ladder, best.iterations)
            self.refit_time_ = clock.now() - began
        if hasattr(self.best_estimator_, "feature_names_in_"):
            self.feature_names_in_ = self.best_estimator_.feature_names_in_


def _splits(cv: Any, X: Any, y: Any, params: Mapping[str, Any], number: int) -> list[tuple[Any, Any]]:
    splits = list(cv.split(X, y, **params))
    if len(splits) != number:
        raise ValueError(
            f"cv.split and cv.get_n_splits return inconsistent results. Expected {number} splits, got {len(splits)}"
        )
    return splits
