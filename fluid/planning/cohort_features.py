"""What the texts of configs say: numbers, or names.

A config reaches the planner as texts (``TrialSpec.config``). A feature of which at least half of the texts are numbers
is ordered; any other is a category. Booleans, ``None`` and lists are names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fluid.planning.runtime_model import FloatArray

#: Texts of a config's values by dotted name, as in ``TrialSpec.config``.
ConfigTexts = tuple[tuple[str, str], ...]
BoolArray = NDArray[np.bool_]


@lru_cache(maxsize=512)
def number_of(text: str) -> float | None:
    """The finite number that a text is; ``None`` if it is none.

    Example:
        >>> number_of("1e-3"), number_of("64"), number_of("True"), number_of("nan")
        (0.001, 64.0, None, None)
    """
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Feature:
    """A value of the configs of n trials.

    Attributes:
        name: its dotted name.
        numbers: (n,) the numbers, NaN where a config has none; of a category, the places of its names in ``names``.
        names: of a category, sorted; empty if the feature is ordered.
    """

    name: str
    numbers: FloatArray
    names: tuple[str, ...] = ()

    def of(self, rows: NDArray[np.int_]) -> Feature:
        """The same of some of the trials."""
        return Feature(self.name, self.numbers[rows], self.names)


def features_of(configs: Sequence[Mapping[str, str]]) -> list[Feature]:
    """The features that have more than one text among these configs, sorted by name."""
    features = []
    for name in sorted(set().union(*configs)):
        texts = [config.get(name) for config in configs]
        names = sorted({text for text in texts if text is not None})
        if len(names) < 2:
            continue
        place: dict[str | None, float] = {None: math.nan}
        for text in names:
            number = number_of(text)
            place[text] = math.nan if number is None else number
        is_ordered = 2 * sum(math.isnan(number) for number in place.values()) <= len(place) + 1
        if not is_ordered:
            place.update((text, float(index)) for index, text in enumerate(names))
        features.append(Feature(name, np.array([place[text] for text in texts]), () if is_ordered else tuple(names)))
    return features
