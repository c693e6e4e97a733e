"""Model speeds: how fast the trials of each profile key are on each device model, as measured."""

from __future__ import annotations

from collections.abc import Collection

from fluid.devices.models import Speeds
from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.measure.profile import Profile


class ModelSpeeds:
    """Iterations per second by profile key and device model, relative to the model that was there first.

    Devices of one model, and devices whose speed the user gave, have no measured speeds.

    Args:
        profile: what was measured.
        occupancy: knows the devices.
    """

    def __init__(self, profile: Profile, occupancy: Occupancy) -> None:
        self._profile = profile
        self._occupancy = occupancy
        self._by_key: dict[str, Speeds] = {}
        self._seen: tuple[object, ...] = ()

    def pop_changed(self) -> bool:
        """Whether devices of another model came, or the last of a model went, since the last call."""
        before, self._seen = self._seen, (*self._occupancy.models, self._occupancy.models.has_given_speeds)
        return before != self._seen

    def of(self, key: str) -> Speeds | None:
        """The speeds of a key by device model; ``None`` if the devices' own speeds hold."""
        if not self._are_used:
            return None
        known = self._by_key.get(key)
        if known is None:
            known = self._by_key[key] = self._measured(key)
        return known

    def update(self, key: str) -> Speeds | None:
        """Learns a key's speeds anew; returns the factor by which each has changed, or ``None`` if hardly any has."""
        if not self._occupancy.models:
            return None
        before, now = self._by_key.get(key, {}), self._measured(key)
        factors = {model: speed / before.get(model, 1.0) for model, speed in now.items()}
        # Once the devices' own speeds are used, a difference of any size is told: planners have to see the same speeds.
        exact: Collection[str | None] = () if self._are_used else self._occupancy.models
        most = {model: 0.0 if model in exact else tuning.SPEED_CHANGE for model in factors}
        if all(abs(factor - 1.0) <= most[model] for model, factor in factors.items()):
            self._by_key[key] = {**now, **before}
            return None
        self._by_key[key] = now
        return factors

    @property
    def _are_used(self) -> bool:
        """Whether these speeds are used, not the devices' own."""
        return self._occupancy.models.are_several and not self._occupancy.models.has_given_speeds

    def is_measured(self, key: str, model: str | None) -> bool:
        """Whether a key's trials ran alone on a device of that model often enough."""
        return not self._profile.needs_measuring(key, model)

    def _measured(self, key: str) -> Speeds:
        models = list(self._occupancy.models)
        if self._occupancy.models.has_given_speeds:
            return dict.fromkeys(models, 1.0)
        return self._profile.speeds(key, [*models, *(gone for gone in self._profile.models(key) if gone not in models)])
