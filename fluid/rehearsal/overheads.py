"""What packing, scaling, resizes and moves cost in a rehearsal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fluid.errors import require_number
from fluid.measure.measurements import Bucket
from fluid.measure.profile import Profile, bounded_exp, slope, weighted_median
from fluid.measure.runtime_model import residents_at
from fluid.results.iterations import StoredIteration
from fluid.results.stored_run import read_run

#: What each overhead is where it costs nothing.
_COSTS = {
    **{"alpha": 1.0, "beta": 1.0, "epsilon": 0.0},
    **dict.fromkeys(("server_s", "lane_s", "start_s", "save_s", "restore_s"), 0.0),
}
#: Said where alpha is 1.
UNPACKED = "trials are not packed, as it is not known what that costs"


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The overheads of the runtime model (docs/theory.md, section 1), and the seconds of starts and moves.

    Example:
        >>> from fluid.rehearsal import Overheads
        >>> overheads = Overheads(alpha=1.2, lane_s=8.0, source="measured on one H200")
        >>> overheads.alpha, overheads.epsilon
        (1.2, 0.0)
        >>> Overheads(alpha=1.2, lane_s=8.0).source
        'given: alpha 1.2, lane_s 8; all else costs nothing'

    Attributes:
        alpha: each of two trials on one device takes so many times as long as alone, and each of p trials
            ``alpha**(p - 1)`` times. At 1, the default, trials are not packed, as it is not known what that costs.
        beta: on two devices, a trial takes so many times half as long as on one, and on w devices
            ``beta**(w - 1) / w`` times as long.
        epsilon: seconds of a resize.
        server_s: seconds until the fork server of a host has loaded what trials import; its first lanes wait for it.
        lane_s: seconds until a new lane is ready. A trial with a process of its own waits for that each time that it
            starts, unless a spare lane is ready.
        start_s: seconds until a trial is set up in a lane.
        save_s, restore_s: seconds to save a trial, and to go on from what was saved.
        source: where these come from, in words, for people; empty, the default, for what is given here.

    Raises:
        InvalidFieldError: one of them cannot be used.
    """

    alpha: float = 1.0
    beta: float = 1.0
    epsilon: float = 0.0
    server_s: float = 0.0
    lane_s: float = 0.0
    start_s: float = 0.0
    save_s: float = 0.0
    restore_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, least in _COSTS.items():
            require_number(name, getattr(self, name), at_least=least)
        if not self.source:
            object.__setattr__(self, "source", self._given())

    def _given(self) -> str:
        """What is given, in words."""
        given = [f"{name} {getattr(self, name):g}" for name in _COSTS if getattr(self, name) != _COSTS[name]]
        told = f"given: {', '.join(given)}; all else costs nothing" if given else "none: scaling and moves cost nothing"
        return told if self.alpha > 1.0 else f"{told}; {UNPACKED}"

    def with_given(self, given: Mapping[str, float]) -> Overheads:
        """The same with some that a user gives in place of these.

        Example:
            >>> from fluid.rehearsal import Overheads
            >>> Overheads(lane_s=8.0, source="measured on one H200").with_given({"alpha": 1.2}).source
            'given: alpha 1.2; others measured on one H200'

        Args:
            given: by name.

        Raises:
            InvalidFieldError: one of them cannot be used.
        """
        if not given:
            return self
        if self == FREE:
            return replace(self, **dict(given), source="")
        told = ", ".join(f"{name} {value:g}" for name, value in given.items())
        return replace(self, **dict(given), source=f"given: {told}; others {self.source}")


#: Nothing costs anything.
FREE = Overheads()


# -- measured overheads --------------------------------------------------------------------------
#
# The overheads that a run has measured, for rehearsals.


#: What each overhead is in words, in the order in which they are told.
_NAMES = {
    "alpha": "alpha (packing)",
    "beta": "beta (more devices)",
    "epsilon": "epsilon (a resize)",
    "server_s": "the start of a host's fork server",
    "lane_s": "the start of a lane",
    "start_s": "the set-up of a trial",
    "save_s": "saving",
    "restore_s": "restoring",
}
#: Alpha where packing was measured to cost nothing: 1 says that it is not known what it costs.
_LEAST_ALPHA = 1.001


class _WarmLane(NamedTuple):
    """A lane that became warm.

    Attributes:
        at: when, seconds.
        seconds: that its start took.
    """

    at: float
    seconds: float


class _Placed(NamedTuple):
    """When a trial got its lanes."""

    at: float
    lanes: tuple[int, ...]


def overheads_of(run: str | Path | Profile) -> Overheads:
    """Returns the overheads that a run, or a profile, has measured; what was not measured costs nothing, and where
    alpha was not, nothing is packed.

    Packing and scaling are told by trials that ran at several widths, each compared with itself; where there are none,
    by the profile, with the median over its keys, each counted as often as it was observed. Resizes are those of the
    profile. The start of a lane, the set-up of a trial, saving and restoring are medians over the run's journal. A
    profile alone knows nothing of these.

    Example:
        >>> from fluid import Profile
        >>> from fluid.rehearsal import overheads_of
        >>> profile = Profile()
        >>> for _ in range(5):
        ...     profile.observe("resnet", seconds=2.0)
        ...     profile.observe("resnet", seconds=2.2, co_residents=2)
        >>> overheads = overheads_of(profile)
        >>> round(overheads.alpha, 3), overheads.beta
        (1.1, 1.0)

    Args:
        run: a run folder, or a profile.

    Raises:
        InvalidFieldError: it is neither.
    """
    if isinstance(run, Profile):
        return overheads_in(run, (), "a profile", "")
    stored = read_run(run, "run")
    return overheads_in(stored.newest_profile, stored.entries, str(run), stored.date, stored.ran)


def overheads_in(
    profile: Profile,
    entries: Iterable[Mapping[str, Any]],
    where: str,
    date: str,
    reported: Iterable[StoredIteration] = (),
) -> Overheads:
    """The overheads that a profile, the entries of a journal and finished iterations tell.

    Args:
        profile: what was measured of iterations.
        entries: of the journal, as JSON has them, in order.
        where: where they come from, in words.
        date: when they were measured; empty if unknown.
        reported: the finished iterations.
    """
    found = {**_of_profile(profile), **_of_iterations(reported), **_of_journal(entries)}
    if "alpha" in found:
        found["alpha"] = max(_LEAST_ALPHA, found["alpha"])
    told = [f"{_NAMES[name]} {_shown(name, found[name])}" for name in _NAMES if name in found]
    assumed = [_NAMES[name] for name in _NAMES if name not in found and name != "alpha"]
    source = f"measured in {where}{f' on {date}' if date else ''}: {', '.join(told)}" if told else f"from {where}"
    if assumed:
        source += f"; not measured there, and taken to cost nothing: {', '.join(assumed)}"
    if "alpha" not in found:
        source += f"; {UNPACKED}"
    return Overheads(**found, source=source)


def _of_profile(profile: Profile) -> dict[str, float]:
    content: Any = profile.to_json()
    alphas: list[tuple[float, float]] = []
    betas: list[tuple[float, float]] = []
    for key, models in content["keys"].items():
        for known in models:
            model = known["model"] or None
            packed = _observations(known, "co_residents")
            wide = _observations(known, "width")
            # One alone and one packed make a slope; the profile tells 1 where it could fit none.
            if packed and profile.measured_packing(key, model) >= 2:
                alphas.append((profile.alpha(key, model), packed))
            if wide:
                betas.append((profile.beta(key, model), wide))
    found = {}
    if alphas:
        found["alpha"] = weighted_median(alphas)
    if betas:
        found["beta"] = weighted_median(betas)
    if content["resizes"]["seconds"]:
        found["epsilon"] = profile.epsilon
    return found


def _of_iterations(reported: Iterable[StoredIteration]) -> dict[str, float]:
    """Of trials that ran at several widths: between unlike trials, their sizes would pass for overheads."""
    packed: dict[str, dict[int, Bucket]] = {}
    wide: dict[str, dict[int, Bucket]] = {}
    for one in reported:
        if one.rows > 1 or one.seconds <= 0.0:
            continue
        if one.width <= 1.0:
            packed.setdefault(one.trial_id, {}).setdefault(residents_at(one.width), Bucket()).seconds.append(
                one.seconds
            )
        if one.width >= 1.0 and one.width == len(one.devices):
            wide.setdefault(one.trial_id, {}).setdefault(round(one.width), Bucket()).seconds.append(one.seconds)
    found = {}
    for name, lines in (("alpha", packed), ("beta", wide)):
        slopes = [
            (slope(dict(sorted(line.items())), shared=name == "beta"), sum(len(each.seconds) for each in line.values()))
            for line in lines.values()
            if len(line) > 1
        ]
        if slopes:
            found[name] = max(1.0, bounded_exp(weighted_median(slopes)))
    return found


def _observations(known: Mapping[str, Any], axis: str) -> int:
    """How many iterations were measured with more than one along an axis."""
    return sum(len(bucket["seconds"]) for bucket in known["buckets"] if bucket[axis] > 1)


def _of_journal(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds beside iterations; entries of other versions that lack a field are passed over.

    A trial with a process of its own pays all of its set-up. Where trials share lanes, what the first set-up in a lane
    takes beyond the usual one, such as to import PyTorch and to load the data, is part of the lane's start: no later
    trial pays it.
    """
    seconds: dict[str, list[float]] = {}
    placed: dict[str, _Placed] = {}
    lanes: list[_WarmLane] = []
    used: set[int] = set()
    shares = False
    #: Of the first trial of each lane: from when it was placed until it was set up, and its set-up alone.
    firsts: list[tuple[float, float]] = []
    for entry in entries:
        what = entry.get("what")
        if what == "NotePlaced":
            placed[str(entry.get("trial_id"))] = _Placed(_number(entry, "at"), tuple(entry.get("lane_ids") or ()))
        elif what == "LaneReady":
            lanes.append(_WarmLane(_number(entry, "at"), _number(entry, "seconds")))
        elif what == "TrialStarted":
            took = _number(entry, "seconds")
            one = placed.pop(str(entry.get("trial_id")), None)
            if one is not None and not used.intersection(one.lanes) and not entry.get("iteration"):
                firsts.append((_number(entry, "at") - one.at, took))
            else:
                shares |= one is not None and not entry.get("iteration")
                seconds.setdefault("restore_s" if entry.get("iteration") else "start_s", []).append(took)
            used.update(() if one is None else one.lanes)
        elif what == "TrialSaved":
            seconds.setdefault("save_s", []).append(_number(entry, "seconds"))
    if not shares:
        seconds["start_s"] = [*seconds.get("start_s", ()), *(took for _, took in firsts)]
    medians = {name: _median(values) for name, values in seconds.items()}
    medians["lane_s"] = _median([until - medians["start_s"] for until, _ in firsts])
    if lanes and not shares:
        medians |= _of_lanes(lanes)
    return {name: max(0.0, value) for name, value in medians.items() if math.isfinite(value)}


def _of_lanes(lanes: Sequence[_WarmLane]) -> dict[str, float]:
    """The start of a lane, and what the first ones took beyond it: those that were started before any was ready."""
    ready = min(lane.at for lane in lanes)
    first = _median([lane.seconds for lane in lanes if lane.at - lane.seconds < ready])
    later = [lane.seconds for lane in lanes if lane.at - lane.seconds >= ready]
    return {"lane_s": _median(later), "server_s": first - _median(later)} if later else {"lane_s": first}


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else math.nan


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _shown(name: str, value: float) -> str:
    if name in ("alpha", "beta"):
        return f"{value:.3g}"
    return f"{1000.0 * value:.3g} ms" if 0.0 < value < 0.1 else f"{value:.3g} s"
