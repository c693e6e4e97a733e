"""What a profile says of its keys, for tables and pages."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.measure.json_input import without_surrogates
from fluid.measure.profile import Profile


@dataclass(frozen=True)
class KeyMeasurements:
    """The measurements of one profile key, on one device model if it ran on several.

    Attributes:
        key: the profile key.
        seconds: per iteration, alone on one device; ``None`` if unknown.
        alpha, beta: packing and scaling overhead.
        packing: the largest measured number of trials on one device.
        c: the packing limit that follows from the measurements.
        rows: the largest measured number of fused trials; 1 if none were.
        fused: the number of fused trials that is worth it, as the measurements say; 1 if fusing is not.
        gain: how many times the iterations per second of one trial alone that many, or else two, do fused.
        model: the device model, ``"unknown model"`` for devices without one; ``None`` if the key ran on only one.
        speed: iterations per second alone on a device of that model, relative to the model that the key ran on first.
    """

    key: str
    seconds: float | None
    alpha: float
    beta: float
    packing: int
    c: int
    model: str | None = None
    speed: float = 1.0
    rows: int = 1
    fused: int = 1
    gain: float = 1.0


def key_measurements(profile: Profile | None) -> tuple[KeyMeasurements, ...]:
    """What a profile says of each of its keys; nothing without a profile."""
    if profile is None:
        return ()
    found = []
    keys = profile.keys()
    for key in keys:
        models = profile.models(key) or [None]
        speeds = profile.speeds(key, models)
        for model in models:
            packing, rates = profile.measured_packing(key, model), profile.fused_rates(key, model)
            rows = rates.rows[-1] if rates is not None else 1
            fused = profile.fused_limit(key, rows, model)
            found.append(
                KeyMeasurements(
                    without_surrogates(key),
                    None if profile.only_fused(key, model) else profile.seconds_per_iteration(key, model),
                    profile.alpha(key, model),
                    profile.beta(key),
                    packing,
                    profile.packing_limit(key, max(packing, 1), model),
                    (model or "unknown model") if len(models) > 1 else None,
                    speeds[model],
                    rows,
                    fused,
                    1.0 if rates is None else rates.gain(fused if fused > 1 else 2),
                )
            )
    return tuple(found)
