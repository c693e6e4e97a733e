"""Which trials of a recorded run were fused, and what that took, for trials that are replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from fluid.measure.runtime_model import FusedRates, residents_at, stretch_of
from fluid.policies.fusing.groups import FusionGroups, Group
from fluid.rehearsal.overheads import Overheads
from fluid.rehearsal.replayable import ReplayedFusion
from fluid.results.iterations import StoredIteration

#: Fields of the config decide alone, whatever the trainable.
_KEY = ""


class RecordedFusion:
    """How trials of a recorded run fused.

    Rates are those of the shape, or of the shape with the most iterations where it has none. Where no trial of a shape
    ran alone, the smallest pack stands for it: it is known to take no longer than that.

    Args:
        keys: by trial, the fusion key that its lane reported.
        texts: by trial, the texts of its config by name.
        reported: the finished iterations.
        overheads: of the run.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        texts: Mapping[str, Mapping[str, str]],
        reported: Iterable[StoredIteration],
        overheads: Overheads,
    ) -> None:
        self._groups = FusionGroups()
        self._keys = {trial: key for trial, key in keys.items() if trial in texts}
        for trial, key in self._keys.items():
            self._groups.learn(_KEY, _config(texts[trial]), key)
        seconds: dict[str, dict[int, list[float]]] = {}
        for one in reported:
            # The first iteration may warm up.
            if (known := self._keys.get(one.trial_id)) is not None and one.number > 1 and one.width <= 1.0:
                processes = stretch_of(overheads.alpha, overheads.beta, 1.0 / residents_at(one.width))
                seconds.setdefault(known, {}).setdefault(one.rows, []).append(one.seconds / processes)
        self._rates = {key: rates for key, found in seconds.items() if (rates := _rates_of(found)) is not None}
        most = max(self._rates, key=lambda key: sum(map(len, seconds[key].values())), default=None)
        self._usual = None if most is None else self._rates[most]
        self._of_group: dict[Group | None, str] = {
            self._groups.group(_KEY, _config(texts[trial])): key for trial, key in self._keys.items()
        }

    @property
    def rates(self) -> FusedRates | None:
        """Those with the most iterations; ``None`` if no pack was measured."""
        return self._usual

    @property
    def is_possible(self) -> bool:
        """Whether trials could be fused, also if none were."""
        return bool(self._keys)

    def of_trial(self, trial_id: str) -> FusedRates | None:
        """The rates by which a recorded trial ran; ``None`` if it was not fused."""
        key = self._keys.get(trial_id)
        return None if key is None else self._rates.get(key)

    def of_config(self, texts: Mapping[str, str]) -> ReplayedFusion | None:
        """How a trial of a config fuses; ``None`` if no pack was measured."""
        if self._usual is None:
            return None
        group = self._groups.group(_KEY, _config(texts))
        key = self._of_group.get(group)
        return ReplayedFusion(repr(group) if key is None else key, self._rates.get(key or "", self._usual))


def _config(texts: Mapping[str, str]) -> tuple[tuple[str, object], ...]:
    return tuple(texts.items())


def _rates_of(seconds: Mapping[int, list[float]]) -> FusedRates | None:
    """T(k)/T(1), by seconds of packs of k rows; ``None`` if there was no pack."""
    typical = {rows: median(found) for rows, found in seconds.items()}
    if max(typical) == 1 or min(typical.values()) <= 0.0:
        return None
    least = typical[min(typical)]
    return FusedRates.of({rows: each / least for rows, each in typical.items() if rows > 1})
