"""The measurements of all profile keys, by device model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from fluid.errors import require_text
from fluid.planning.measurements import ANY_MODEL, KeyProfile, require_key


@dataclass(slots=True)
class KeyTable:
    """Finds the measurements of a profile key on a device model.

    Attributes:
        by_key: by profile key, then by device model.
    """

    by_key: dict[str, dict[str | None, KeyProfile]] = field(default_factory=dict)

    def speeds(self, key: str, models: Sequence[str | None]) -> dict[str | None, float]:
        """Iterations per second of a key's trials on each of these device models, relative to the first of them.

        The ratio of the median seconds per iteration of trials alone on one device. A model on which the key has fewer
        than ``MIN_OBSERVATIONS`` of these has the median of the other keys' ratios, or else speed 1.
        """
        reference = models[0]
        seconds = {model: known.alone for model in models if (known := self.exact(key, model)).alone is not None}
        unit = seconds.get(reference)
        if unit is None and seconds:
            first = next(iter(seconds))
            unit = seconds[first] * self._usual_speed(first, reference)
        return {
            model: unit / seconds[model]
            if unit is not None and model in seconds
            else self._usual_speed(model, reference)
            for model in models
        }

    def exact(self, key: str, model: str | None) -> KeyProfile:
        """What was measured on that very model, or in a profile without models."""
        by_model = self.by_key.get(key, {})
        return by_model.get(model) or by_model.get(ANY_MODEL) or KeyProfile()

    def known(self, key: str, model: str | None) -> KeyProfile:
        """What was measured on a model; for ``None``, in a profile without models, or else on the key's first one."""
        by_model = self.by_key.get(key)
        if not by_model:
            return KeyProfile()
        known = by_model.get(model)
        if known is None and model is None:
            known = next(iter(by_model.values()))
        return known or self.exact(key, model)

    def own(self, key: str, model: str | None) -> KeyProfile:
        """Where observations of a key on a model are added."""
        if model is not None:
            require_text("model", model)
        by_model = self.by_key.setdefault(require_key("key", key), {})
        known = by_model.get(model)
        if known is None:
            known = by_model[model] = by_model.pop(ANY_MODEL) if ANY_MODEL in by_model else KeyProfile()
        return known

    def _usual_speed(self, model: str | None, reference: str | None) -> float:
        """The median over all keys of their speed on a model relative to another; 1 if no key has both measured."""
        if model == reference:
            return 1.0
        ratios = []
        for by_model in self.by_key.values():
            one, other = by_model.get(reference), by_model.get(model)
            if one is not None and other is not None and one.alone is not None and other.alone is not None:
                ratios.append(one.alone / other.alone)
        return statistics.median(ratios) if ratios else 1.0
