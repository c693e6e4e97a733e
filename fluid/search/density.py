"""Densities of good and bad configs, and what they suggest: the model of BOHB (Falkner et al., ICML 2018).

Configs are vectors here: of a number its place in the unit interval, of a choice its index, NaN for what a config does
not have. It decides as HpBandSter 0.7.4, the authors' program, does with the same random numbers
(``tests/integrations/hpbandster/test_bohb_parity.py``). The estimator is that of statsmodels' ``KDEMultivariate``
with the normal reference rule, which HpBandSter uses: these few lines in place of it save pandas and SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.user_calls import user_class

_Floats = npt.NDArray[np.float64]

#: Least density in the ratio of two.
_LEAST = 1e-32
_NORMAL = NormalDist()
#: Least and greatest share of a normal distribution that has a place on it.
_FIRST, _LAST = 5e-324, 1.0 - 2.0**-53


@user_class
@dataclass(frozen=True, kw_only=True)
class BOHB:
    """BOHB as the algorithm of :func:`fluid.run`: Hyperband's brackets, whose configs a model of the results suggests.

    The model is one of the largest budget with enough results: a density of the good configs and one of the others.
    Of ``num_samples`` configs drawn around good ones, that is tried whose densities differ most.

    Example:
        >>> import fluid
        >>> from fluid.search import BOHB, uniform
        >>> def train(config):
        ...     for step in range(1, 10):
        ...         yield {"loss": (config["x"] - 0.3) ** 2 + 1 / step}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(
        ...         train, {"x": uniform(0, 1)}, metric="loss", budget=9, algorithm=BOHB(random_fraction=0.2)
        ...     )
        >>> len(result.trials), result.best.iteration
        (17, 9)

    Args:
        min_points_in_model: results at a budget that its model needs at least, and configs that count as good at least;
            ``None``, the default, for one more than there are hyperparameters, which is the least.
        top_n_percent: of the configs that count as good, 1 to 99; 15 by default.
        num_samples: configs of which the most promising one is tried; 64 by default.
        random_fraction: share of the configs that are drawn at random; 1/3 by default.
        bandwidth_factor: how much wider than the density of the good configs candidates are drawn; 3 by default.
        min_bandwidth: least width of a density, as a share of a hyperparameter's range, at most 1; 0.001 by default.
        synchronous: whether a bracket begins when the one before has ended; ``False``, the default: as soon as a device
            is free, as with one rung, whose brackets would be single trials.

    Raises:
        InvalidFieldError: a field cannot be used; the message names the field and the value.
    """

    min_points_in_model: int | None = None
    top_n_percent: int = 15
    num_samples: int = 64
    random_fraction: float = 1 / 3
    bandwidth_factor: float = 3.0
    min_bandwidth: float = 1e-3
    synchronous: bool = False

    def __post_init__(self) -> None:
        if self.min_points_in_model is not None:
            require_integer("min_points_in_model", self.min_points_in_model, at_least=2)
        require_integer("top_n_percent", self.top_n_percent, at_least=1, at_most=99)
        require_integer("num_samples", self.num_samples, at_least=1)
        for name, zero, most in (
            ("random_fraction", True, 1),
            ("bandwidth_factor", False, 1e9),
            ("min_bandwidth", False, 1),
        ):
            number = require_number(name, getattr(self, name), at_least=0.0)
            if number > most or not (number or zero):
                bounds = f"from 0 to {most:g}" if zero else f"greater than 0, and at most {most:g}"
                raise InvalidFieldError(name, getattr(self, name), f"must be {bounds}")
        if not isinstance(self.synchronous, bool):
            raise InvalidFieldError("synchronous", self.synchronous, "must be True or False")

    def points_for(self, hyperparameters: int) -> int:
        """Results that a model of so many hyperparameters needs.

        Raises:
            InvalidFieldError: ``min_points_in_model`` is too small for them.
        """
        least, given = hyperparameters + 1, self.min_points_in_model
        if given is not None and given < least:
            reason = f"must be at least {least}, as the space has {hyperparameters} hyperparameters; or None"
            raise InvalidFieldError("min_points_in_model", given, reason)
        return least if given is None else given


class Density:
    """A density of configs: a product of kernels around each of them.

    Args:
        data: the configs; a row has a value for each hyperparameter.
        choices: how many choices each hyperparameter has; 0 for a number.
        min_bandwidth: of a kernel.
    """

    def __init__(self, data: _Floats, choices: npt.NDArray[np.int_], min_bandwidth: float) -> None:
        self.data = data
        rows, columns = data.shape
        # Scott's rule.
        self.bandwidths: _Floats = np.clip(
            1.06 * np.std(data, axis=0) * rows ** (-1.0 / (4 + columns)), min_bandwidth, None
        )
        self._is_choice = choices > 0
        self._volume = float(np.prod(self.bandwidths[~self._is_choice]))
        found = np.array(
            [len(np.unique(column)) if several else 2 for column, several in zip(data.T, choices, strict=True)]
        )
        # As in statsmodels, a choice that none of the configs has is infinitely likely where they all have the same.
        with np.errstate(divide="ignore"):
            self._if_other = self.bandwidths / (found - 1)

    def at(self, vector: Sequence[float]) -> float:
        """The density of a config; it may be infinite or NaN."""
        place, widths = np.asarray(vector, dtype=float), self.bandwidths
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            of_numbers = (1.0 / math.sqrt(2 * math.pi)) * np.exp(-((self.data - place) ** 2) / (widths**2 * 2.0))
            of_choices = np.where(self.data == place, 1 - widths, self._if_other)
            kernels = np.where(self._is_choice, of_choices, of_numbers)
            return float((kernels.prod(axis=1) / self._volume).sum() / len(self.data))


class _Model(NamedTuple):
    """What is known of a budget."""

    good: Density
    bad: Density


class DensityModels:
    """The results of a search by budget, and a model of each budget that has enough of them.

    Example:
        >>> import numpy as np
        >>> from fluid.search.density import BOHB, DensityModels
        >>> models, rng = DensityModels([0], BOHB(random_fraction=0.0)), np.random.default_rng(0)
        >>> models.suggest(rng) is None
        True
        >>> for x in np.linspace(0, 1, 20):
        ...     models.add(9, [x], abs(x - 0.3), rng)
        >>> abs(models.suggest(rng)[0] - 0.3) < 0.2
        True

    Args:
        choices: how many choices each hyperparameter has; 0 for a number.
        options: of the search.
    """

    def __init__(self, choices: Sequence[int], options: BOHB) -> None:
        self._choices = np.array(choices, dtype=int)
        self._options = options
        self._least = options.points_for(len(choices))
        #: The vectors and losses by budget, in the order in which they came.
        self._results: dict[int, tuple[list[Sequence[float]], list[float]]] = {}
        self._models: dict[int, _Model] = {}

    def add(self, budget: int, vector: Sequence[float], loss: float, rng: np.random.Generator) -> None:
        """Takes a result.

        Args:
            budget: iterations after which it came.
            vector: the config.
            loss: less is better; what is not finite counts as the worst.
            rng: fills in what configs do not have.
        """
        if not len(self._choices) or budget < max(self._models, default=budget):
            return
        vectors, losses = self._results.setdefault(budget, ([], []))
        vectors.append(vector)
        losses.append(loss if math.isfinite(loss) else math.inf)
        count, top = len(losses), self._options.top_n_percent
        if count < self._least:
            return
        good = max(self._least, top * count // 100)
        bad = max(self._least, (100 - top) * count // 100)
        data, order = np.array(vectors, dtype=float), np.argsort(np.array(losses))
        splits = [self._filled(data[order[:good]], rng), self._filled(data[order[good : good + bad]], rng)]
        if min(map(len, splits)) > len(self._choices):
            densities = (Density(split, self._choices, self._options.min_bandwidth) for split in splits)
            self._models[budget] = _Model(*densities)

    def suggest(self, rng: np.random.Generator) -> list[float] | None:
        """A config to try; ``None`` if it is to be drawn at random."""
        if not self._models or rng.random() < self._options.random_fraction:
            return None
        model = self._models[max(self._models)]
        found, least = None, math.inf
        for _ in range(self._options.num_samples):
            candidate = self._near(model.good, rng)
            good, bad = model.good.at(candidate), model.bad.at(candidate)
            # Both as in HpBandSter, also where one is NaN: then that of the good ones makes the ratio NaN.
            ratio = max(_LEAST, bad) / max(good, _LEAST)
            if not math.isfinite(ratio) and math.isfinite(good):
                return candidate  # It has a choice that no bad config has.
            if ratio < least:
                found, least = candidate, ratio
        return found

    def _near(self, density: Density, rng: np.random.Generator) -> list[float]:
        """Draws a config around one of a density's."""
        datum, vector = density.data[int(rng.integers(len(density.data)))], list[float]()
        for value, width, choices in zip(datum.tolist(), density.bandwidths.tolist(), self._choices, strict=True):
            if not choices:
                vector.append(truncated_normal(value, width * self._options.bandwidth_factor, rng.random()))
            elif rng.random() < 1 - width:
                vector.append(value)
            else:
                vector.append(int(rng.integers(choices)))
        return vector

    def _filled(self, data: _Floats, rng: np.random.Generator) -> _Floats:
        """Fills in what configs do not have, from others that have it; else at random."""
        filled: _Floats = data.copy()
        for row in filled:
            while (missing := np.flatnonzero(np.isnan(row))).size:
                first = missing[0]
                known = np.flatnonzero(np.isfinite(data[:, first]))
                if known.size:
                    row[missing] = data[known[int(rng.integers(len(known)))], missing]
                else:
                    choices: Any = self._choices[first]
                    row[first] = int(rng.integers(choices)) if choices else rng.random()
        return filled


def truncated_normal(mean: float, deviation: float, share: float) -> float:
    """The value below which a share of a normal distribution lies that is cut off at 0 and 1.

    Args:
        mean: 0 to 1, as all values of the unit interval.
        deviation: the standard deviation, before it is cut off; greater than 0.
        share: from 0 up to 1.

    Example:
        >>> from fluid.search.density import truncated_normal
        >>> truncated_normal(0.5, 0.1, 0.5), truncated_normal(0.0, 0.1, 0.0)
        (0.5, 0.0)
    """
    below, up_to = _normal_share(-mean / deviation), _normal_share((1.0 - mean) / deviation)
    place = _NORMAL.inv_cdf(min(max(below + share * (up_to - below), _FIRST), _LAST))
    return min(max(mean + deviation * place, 0.0), 1.0)


def _normal_share(place: float) -> float:
    return 0.5 * math.erfc(-place / math.sqrt(2.0))
