"""What a lane runs for a trial of LightGBM: a booster, round by round."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightgbm

from fluid.integrations.boosting import BoosterProgress, Rounds, Score, iterations, with_threads
from fluid.integrations.lightgbm.datasets import DatasetSources

#: The number of threads is the first of these that params have.
_THREADS = ("num_threads", "num_thread", "nthread", "nthreads", "n_jobs")
#: LightGBM's own metrics, as it reports them, without ``@k``.
_MORE = frozenset({"auc", "auc_mu", "average_precision", "ndcg", "map", "r2"})
_LESS = frozenset(
    {"l1", "l2", "rmse", "quantile", "mape", "huber", "fair", "poisson", "gamma", "gamma_deviance", "tweedie"}
    | {"binary_logloss", "binary_error", "multi_logloss", "multi_error", "cross_entropy", "cross_entropy_lambda"}
    | {"kullback_leibler"}
)
#: With these, every run gives the same trees.
_DETERMINISTIC = {"deterministic": True, "force_col_wise": True}
_BOOSTING = ("boosting", "boosting_type", "boost")
#: One parameter in the text of a model.
_PARAMETER = re.compile(r"^\[(\w+): (.*)\]$", re.MULTILINE)


def train_rounds(
    config: Mapping[str, Any],
    state: Any,
    *,
    sources: DatasetSources,
    names: Sequence[str],
    rounds: Rounds,
    obj: Any,
    feval: Any,
    begin: str | None,
) -> Iterator[tuple[dict[str, float], Any]]:
    """What a lane runs for a trial; ``state`` is the booster."""
    training = _LightGBMTraining(config, sources, names, obj, feval, begin)
    progress = BoosterProgress(0, {}) if state is None else training.resume(state)
    yield from iterations(training, rounds, progress)


class _LightGBMTraining:
    """A booster in a lane.

    LightGBM's random generators are in no model, and cannot be set. So a booster that draws goes on from a checkpoint
    by repeating its rounds, which gives the same trees; one that does not draw goes on from the model.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        sources: DatasetSources,
        names: Sequence[str],
        obj: Any,
        feval: Any,
        begin: str | None,
    ) -> None:
        params = {"feature_pre_filter": False, **config}
        if "verbose" not in params:
            params.setdefault("verbosity", -1)
        if not params.get("force_row_wise"):
            params = {**_DETERMINISTIC, **params}
        self._params = with_threads(params, _THREADS)
        self._sources = sources
        self._names = list(names)
        self._obj = obj
        self._feval = feval
        self._begin = begin
        self._first = 0 if begin is None else lightgbm.Booster(model_str=begin).current_iteration()
        self._stops = all(self._params.get(name) != "dart" for name in _BOOSTING)
        self._evaluates_train = False
        self.booster: Any = None

    def resume(self, saved: Any) -> BoosterProgress:
        """Goes on from a saved booster."""
        progress = BoosterProgress(*saved.fluid_progress)
        text = saved.model_to_string()
        if _draws(dict(_PARAMETER.findall(text))):
            for number in range(progress.done):
                self.advance(number)
            self.note(progress, None)
        else:
            self._begin = text
        return progress

    def advance(self, round_number: int) -> None:
        if self.booster is not None:
            self.booster.update(fobj=self._obj)
        elif self._begin is None:
            self.booster = self._new()
            self.booster.update(fobj=self._obj)
        else:
            self.booster = self._continued(self._begin)

    def _new(self) -> Any:
        train, valid = self._sources.get(self._params)
        booster = lightgbm.Booster(self._objective("none"), train)
        for dataset, name in zip(valid, self._names, strict=True):
            if dataset is train:
                self._evaluates_train = True
                booster.set_train_data_name(name)
            else:
                booster.add_valid(dataset, name)
        return booster

    def _continued(self, model: str) -> Any:
        """Trains one round more than a model has. Its sets know the model's predictions, so they are its own."""
        train, valid = self._sources.make(self._params)
        self._evaluates_train = any(dataset is train for dataset in valid)
        return lightgbm.train(
            self._objective(self._obj),
            train,
            1,
            valid_sets=valid,
            valid_names=self._names,
            init_model=lightgbm.Booster(model_str=model),
            keep_training_booster=True,
        )

    def _objective(self, objective: Any) -> dict[str, Any]:
        return self._params if self._obj is None else {**self._params, "objective": objective}

    def evaluate(self, round_number: int) -> list[Score]:
        told = self.booster.eval_train(self._feval) if self._evaluates_train else []
        counts = [False] * len(told)
        told = [*told, *self.booster.eval_valid(self._feval)]
        first = told[0][1] if told else ""
        for _, metric, *_ in told[len(counts) :]:
            counts.append(self._stops and (metric == first or not self._params.get("first_metric_only")))
        return [
            Score(f"{name}-{metric}", float(value), more, counted)
            for (name, metric, value, more), counted in zip(told, counts, strict=True)
        ]

    def note(self, progress: BoosterProgress, best_round: int | None) -> None:
        self.booster.fluid_progress = tuple(progress)  # Pickled with the booster, which others may load without Fluid.
        if best_round is not None:
            self.booster.best_iteration = self._first + best_round + 1


def _draws(params: Mapping[str, str]) -> bool:
    """Whether rounds make random draws, by the parameters that a model's text has."""

    def is_less_than_one(*names: str) -> bool:
        return any(float(params.get(name, 1.0)) < 1.0 for name in names)

    bags = is_less_than_one("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")
    return (
        (bags and params.get("bagging_freq") != "0")
        or is_less_than_one("feature_fraction", "feature_fraction_bynode")
        or params.get("boosting") != "gbdt"
        or params.get("data_sample_strategy", "bagging") != "bagging"
        or "1" in (params.get("extra_trees"), params.get("use_quantized_grad"))
        or params.get("objective") == "rank_xendcg"
    )


def direction(name: str) -> str | None:
    """``"min"`` or ``"max"`` for a metric of LightGBM, whose name may follow that of a set; ``None`` for others."""
    metric = name.rpartition("-")[2].partition("@")[0]
    return "max" if metric in _MORE else "min" if metric in _LESS else None


def is_more(name: str) -> bool:
    """Whether more of a metric of LightGBM is better."""
    return direction(name) == "max"
