"""What a lane runs for a trial of XGBoost: a booster, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import xgboost

from fluid.integrations.boosting import BoosterProgress, Rounds, Score, iterations, with_threads, without_set
from fluid.integrations.xgboost.matrices import Sets

#: The number of threads is the first of these that params have.
_THREADS = ("nthread", "n_jobs")
#: XGBoost's own metrics, without ``@n`` and the ``-`` behind.
_MORE = frozenset({"auc", "aucpr", "pre", "map", "ndcg", "ams", "interval-regression-accuracy"})
_LESS = frozenset(
    {"rmse", "rmsle", "mae", "mape", "mphe", "logloss", "error", "merror", "mlogloss", "quantile", "expectile"}
    | {"poisson-nloglik", "gamma-nloglik", "cox-nloglik", "aft-nloglik", "tweedie-nloglik", "gamma-deviance"}
)
#: Parameters with which rows or columns are drawn at random unless they are 1.
_SAMPLING = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")


def train_rounds(
    config: dict[str, Any],
    state: Any,
    *,
    sets: Sets,
    rounds: Rounds,
    obj: Any,
    custom_metric: Any,
    maximize: bool | None,
    begin: bytes | None,
    modes: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[dict[str, float], Any]]:
    """What a lane runs for a trial; ``state`` is the booster, and ``modes`` are those of the sweep's metrics."""
    training = _XGBoostTraining(config, sets, obj, custom_metric, maximize, begin, modes)
    progress = training.resume(state) if state is not None else BoosterProgress(0, {})
    yield from iterations(training, rounds, progress)


class _XGBoostTraining:
    """A booster in a lane.

    The booster that goes on from a checkpoint must make the same random draws as one that was never interrupted. So
    every round's draws follow from the seed and the round alone: XGBoost's own ``seed_per_iteration``, and new updaters
    in each round, as these keep a generator of their own.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        sets: Sets,
        obj: Any,
        custom_metric: Any,
        maximize: bool | None,
        begin: Any,
        modes: Mapping[str, str],
    ) -> None:
        self._params = with_threads({"seed_per_iteration": True, **config}, _THREADS)
        self._obj = obj
        self._custom_metric = custom_metric
        self._maximize = maximize
        self._modes = modes
        self._matrix, self._evals = sets.matrices()
        self._names = [name for _, name in self._evals]
        self._threads = int(next(self._params[name] for name in _THREADS if name in self._params))
        method = self._params.get("tree_method", "auto")
        #: Two methods in turn, so that XGBoost makes new updaters; none if no draw depends on the old ones.
        self._methods = ("hist" if method == "approx" else "approx", method) if _draws(self._params) else ()
        self._first = 0 if begin is None else xgboost.Booster(model_file=bytearray(begin)).num_boosted_rounds()
        self.booster = self._make(begin)

    def _make(self, model: bytes | None) -> Any:
        matrices = dict.fromkeys((self._matrix, *(matrix for matrix, _ in self._evals)))
        return xgboost.Booster(self._params, list(matrices), model_file=None if model is None else bytearray(model))

    def resume(self, saved: Any) -> BoosterProgress:
        """Goes on from a saved booster."""
        done = saved.num_boosted_rounds() - self._first
        if _has_to_repeat(self._params):
            for number in range(done):
                self.advance(number)
            self.booster.set_attr(**saved.attributes())
        else:
            self.booster = self._make(raw(saved))
        score, number = saved.attr("best_score"), saved.attr("best_iteration")
        if score is None or number is None:
            return BoosterProgress(done, {})
        return BoosterProgress(done, {0: (float(score), int(number) - self._first)})

    def advance(self, round_number: int) -> None:
        # Else no more than OMP_NUM_THREADS, which was one when this process loaded XGBoost.
        xgboost.set_config(nthread=self._threads)
        if round_number:
            for method in self._methods:
                self.booster.set_param("tree_method", method)
                self.booster.num_boosted_rounds()  # Applies the parameter.
        self.booster.update(self._matrix, round_number, fobj=self._obj)

    def evaluate(self, round_number: int) -> list[Score]:
        text = self.booster.eval_set(self._evals, round_number, self._custom_metric, self._obj is not None)
        parts = [part.rpartition(":") for part in text.split()[1:]]
        scores = []
        for number, (name, _, value) in enumerate(parts, start=1):
            said = None if self._maximize is None else "max" if self._maximize else "min"
            mode = said or self._modes.get(without_set(name, self._names)) or direction(name)
            scores.append(Score(name, float(value), mode == "max", counts=number == len(parts)))
        return scores

    def note(self, progress: BoosterProgress, best_round: int | None) -> None:
        for value, number in progress.best.values():  # XGBoost looks at the last score alone.
            self.booster.set_attr(best_score=str(value), best_iteration=str(self._first + number))


def _draws(params: Mapping[str, Any]) -> bool:
    """Whether rounds make random draws, from generators that updaters keep."""
    return any(float(params.get(name, 1.0)) != 1.0 for name in _SAMPLING) and not _has_to_repeat(params)


def _has_to_repeat(params: Mapping[str, Any]) -> bool:
    """Whether only the rounds themselves lead to the same state again: what these updaters keep is in no model."""
    return "updater" in params or params.get("booster") == "gblinear"


def direction(name: str) -> str | None:
    """``"min"`` or ``"max"`` for a metric of XGBoost, whose name may follow that of a set; ``None`` for others."""
    words = name.partition("@")[0].rstrip("-").split("-")
    endings = {"-".join(words[first:]) for first in range(len(words))}
    return "max" if endings & _MORE else "min" if endings & _LESS else None


def is_more(name: str) -> bool:
    """Whether more of a metric of XGBoost is better."""
    return direction(name) == "max"


def raw(booster: Any) -> bytes:
    """Returns the model of a booster."""
    return bytes(booster.save_raw("ubj"))
