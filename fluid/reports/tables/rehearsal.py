"""The table of rehearsed sweeps: a line for each number of devices, algorithm or planner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import dollar_column, duration, durations, figures, number, percent
from fluid.rehearsal.calibration import Calibration, Compared
from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.analysis.knee import Knee
from fluid.results.metrics import Goal

# -- rehearsal figures ---------------------------------------------------------------------------
#
# Figures of rehearsed sweeps: medians and ranges over seeds, times to targets, and the knee.


#: Times are given until the best so far is within these shares of the target.
SHARES = (0.05, 0.01)


@dataclass(frozen=True)
class ValueScale:
    """What values of the metric are worth.

    Attributes:
        goal: the metric.
        best: the best value that is known, or was found.
        worst: the worst that is known; ``None`` if unknown: distances are relative to the best value then, and not to
            the range of values.
    """

    goal: Goal
    best: float
    worst: float | None = None

    @classmethod
    def found_in(cls, outcomes: Mapping[str, Sequence[SweepOutcome]]) -> ValueScale | None:
        """The scale of the best value that any of some sweeps found; ``None`` if none found one."""
        every = [outcome for of_name in outcomes.values() for outcome in of_name]
        goal = next((outcome.goal for outcome in every if outcome.goal is not None), None)
        found = [outcome.best for outcome in every if outcome.best is not None]
        if goal is None or not found:
            return None
        return cls(goal, min(found) if goal.less else max(found))

    def within(self, share: float) -> float:
        """The value that is so far from the best: of the range of values, if that is known, else of the best."""
        span = abs(self.best) if self.worst is None else abs(self.worst - self.best)
        return self.best + share * span if self.goal.less else self.best - share * span

    def regret(self, value: float) -> float:
        """How far a value is from the best: 0 at the best, and 1 at the worst if that is known."""
        distance = value - self.best if self.goal.less else self.best - value
        return distance if self.worst is None else distance / (abs(self.worst - self.best) or 1.0)

    @property
    def is_regret(self) -> bool:
        """Whether the best and the worst are known, and not only what was found."""
        return self.worst is not None


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; infinite where a target was never reached.

    Attributes:
        median: of all.
        low, high: the least and the most.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """That of some values, ``None`` of which are infinite; ``None`` if there are none."""
        known = [math.inf if value is None else value for value in values]
        return cls(median(known), min(known), max(known)) if known else None

    def as_json(self, scale: float = 1.0) -> dict[str, float | None]:
        """The spread in JSON, times ``scale``: ``null`` for what was never reached."""
        every = {"median": self.median, "low": self.low, "high": self.high}
        return {name: value * scale if math.isfinite(value) else None for name, value in every.items()}


@dataclass(frozen=True)
class RehearsedFigures:
    """One way to run a sweep, over some seeds.

    Attributes:
        name: of the way, such as a number of devices or an algorithm.
        outcomes: one for each seed.
        scale: what values are worth; ``None`` if no value is known.
        price: US dollars for a device-hour; ``None`` if unknown.
        of_seeds: the scale of each seed, where the best value is that which any way found with the same seed; empty
            where all seeds have one.
    """

    name: str
    outcomes: tuple[SweepOutcome, ...]
    scale: ValueScale | None
    price: float | None = None
    of_seeds: tuple[ValueScale | None, ...] = ()

    @property
    def devices(self) -> int:
        """The most devices of any of them."""
        return max(outcome.devices for outcome in self.outcomes)

    @property
    def makespan_s(self) -> Spread:
        """Seconds to the end."""
        return self._spread([outcome.makespan_s for outcome in self.outcomes])

    @property
    def device_hours(self) -> Spread:
        """Device-hours held."""
        return self._spread([outcome.device_hours for outcome in self.outcomes])

    @property
    def busy_share(self) -> Spread:
        """The share of these in which iterations ran."""
        return self._spread([outcome.busy_share for outcome in self.outcomes])

    @property
    def usd(self) -> Spread | None:
        """US dollars; ``None`` if the price is unknown."""
        price = self.price
        return None if price is None else self._spread([outcome.cost(price) for outcome in self.outcomes])

    @property
    def best(self) -> Spread | None:
        """The best value; ``None`` if there is none."""
        return Spread.of([value for value in (outcome.best for outcome in self.outcomes) if value is not None])

    @property
    def regret(self) -> Spread | None:
        """The regret at the end; ``None`` unless the best and the worst are known."""
        scale = self.scale
        if scale is None or not scale.is_regret:
            return None
        return Spread.of([None if each.best is None else scale.regret(each.best) for each in self.outcomes])

    def seconds_within(self, share: float) -> Spread | None:
        """Seconds until the best so far was so near to the target; ``None`` if no value is known."""
        if self.scale is None:
            return None
        scales = self.of_seeds or [self.scale] * len(self.outcomes)
        return self._spread(
            [
                None if scale is None else outcome.seconds_to(scale.within(share))
                for outcome, scale in zip(self.outcomes, scales, strict=True)
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """The figures of one way, such as a number of devices, in ``rows`` of ``fluid rehearse --json``.

        * ``name`` of the way, and its ``devices``
        * ``makespan_s``, ``best``, ``regret``, ``seconds_within_0.05`` and ``seconds_within_0.01`` (until the best
          value was so near to the target), ``busy_share``, ``device_hours``, ``cost_usd``: each by ``median``, ``low``
          and ``high`` over the seeds, ``null`` for what was never reached
        * ``seeds``: of each ``makespan_s``, ``best``, ``busy_share``, ``device_hours``, ``trials``, ``results``, and
          ``trace``: pairs of seconds and the best value from then on
        """
        within = {f"seconds_within_{share:g}": self.seconds_within(share) for share in SHARES}
        spreads = {
            "makespan_s": self.makespan_s,
            "best": self.best,
            "regret": self.regret,
            **within,
            "busy_share": self.busy_share,
            "device_hours": self.device_hours,
            "cost_usd": self.usd,
        }
        return {
            "name": self.name,
            "devices": self.devices,
            **{name: None if spread is None else spread.as_json() for name, spread in spreads.items()},
            "seeds": [
                {
                    "makespan_s": each.makespan_s,
                    "best": each.best,
                    "busy_share": each.busy_share,
                    "device_hours": each.device_hours,
                    "trials": each.trials,
                    "results": each.results,
                    "trace": [list(point) for point in each.trace],
                }
                for each in self.outcomes
            ],
        }

    @staticmethod
    def _spread(values: Sequence[float | None]) -> Spread:
        spread = Spread.of(values)
        assert spread is not None
        return spread


def figures_of(
    outcomes: Mapping[str, Sequence[SweepOutcome]], *, scale: ValueScale | None = None, price: float | None = None
) -> list[RehearsedFigures]:
    """Figures of several ways to run a sweep.

    Args:
        outcomes: those of each way, one for each seed, by name; a way without outcomes is left out.
        scale: the best and worst values that are known; ``None`` for the best that any of them found. If each way has
            the same number of seeds, times are then to the best that was found with the same seed: other seeds have
            other configs, of which the best may be far better.
        price: US dollars for a device-hour; ``None`` if unknown.
    """
    known = ValueScale.found_in(outcomes) if scale is None else scale
    numbers = {len(each) for each in outcomes.values() if each}
    of_seeds: tuple[ValueScale | None, ...] = ()
    if scale is None and len(numbers) == 1 and numbers != {1}:
        of_seeds = tuple(
            ValueScale.found_in({name: [each[seed]] for name, each in outcomes.items() if each})
            for seed in range(*numbers)
        )
    return [RehearsedFigures(name, tuple(each), known, price, of_seeds) for name, each in outcomes.items() if each]


def knee_of(figures: Sequence[RehearsedFigures]) -> Knee | None:
    """The knee of the median makespans; ``None`` unless each way has another number of devices."""
    by_devices = {each.devices: each.makespan_s.median for each in figures}
    return Knee.of(sorted(by_devices.items())) if len(by_devices) == len(figures) > 0 else None


# -- rehearsal table -----------------------------------------------------------------------------


def rehearsal_table(
    outcomes: Mapping[str, Sequence[SweepOutcome]],
    title: str = "",
    *,
    label: str = "devices",
    scale: ValueScale | None = None,
    price: float | None = None,
    compact: bool = False,
) -> Group:
    """Compares ways to run a sweep: medians over seeds, with the range of those figures that are to be compared.

    Args:
        outcomes: those of each way, one for each seed, by name.
        title: the line above the table.
        label: what the names are.
        scale: the best and worst values that are known, for regret; ``None`` for the best that any of them found.
        price: US dollars for a device-hour; ``None`` to leave dollars out.
        compact: for narrow terminals: without ranges.
    """
    rows = figures_of(outcomes, scale=scale, price=price)
    knee = knee_of(rows) if label == "devices" else None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if compact else 2, 0, 0), pad_edge=False)
    columns = _columns(rows, label, compact=compact)
    for header in columns:
        table.add_column(header, justify="left" if header == label and label != "devices" else "right", no_wrap=True)
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*cells, style="bold green" if knee is not None and row.devices == knee.n else "")
    lines = [Text(title, style="bold")] if title else []
    return Group(*lines, table, Text(_note(rows, with_range=not compact), style="dim"))


def _columns(rows: Sequence[RehearsedFigures], label: str, *, compact: bool) -> dict[str, list[str]]:
    with_range = not compact and any(len(row.outcomes) > 1 for row in rows)

    def times(spreads: Sequence[Spread | None]) -> list[str]:
        known = [spread or Spread(math.inf, math.inf, math.inf) for spread in spreads]
        every = durations([value for spread in known for value in (spread.median, spread.low, spread.high)])
        return [_cell(every[3 * row : 3 * row + 3], with_range=with_range) for row in range(len(known))]

    def values(spreads: Sequence[Spread | None]) -> list[str]:
        shown = [
            [number_of(value) for value in (each.median, each.low, each.high)] if each else None for each in spreads
        ]
        return [_cell(each, with_range=with_range) if each else "-" for each in shown]

    columns = {label: [row.name for row in rows]}
    if label != "devices" and len({row.devices for row in rows}) > 1:
        columns["devices"] = [str(row.devices) for row in rows]
    columns["makespan"] = times([row.makespan_s for row in rows])
    if any(row.best is not None for row in rows):
        columns["best"] = values([row.best for row in rows])
        if any(row.regret is not None for row in rows):
            columns["regret"] = values([row.regret for row in rows])
        for share in SHARES:
            columns[f"to {share * 100.0:g} %"] = times([row.seconds_within(share) for row in rows])
    columns["busy"] = [percent(row.busy_share.median) for row in rows]
    columns["device-hours"] = figures([row.device_hours.median for row in rows])
    costs = [row.usd.median for row in rows if row.usd is not None]
    if len(costs) == len(rows) and costs:
        columns["dollars"] = dollar_column(costs)
    return columns


def number_of(value: float) -> str:
    """A value of a metric to four significant digits."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0.0 else number(value)


def _cell(shown: Sequence[str], *, with_range: bool) -> str:
    middle, low, high = shown
    if not with_range or low == high:
        return middle
    unit = f" {middle.rpartition(' ')[2]}" if " " in middle else ""
    return f"{middle} ({low.removesuffix(unit)}-{high.removesuffix(unit)})"


def _note(rows: Sequence[RehearsedFigures], *, with_range: bool) -> str:
    seeds = max((len(row.outcomes) for row in rows), default=0)
    parts = [] if seeds < 2 else [f"medians over {seeds} seeds{', with the least and the most' if with_range else ''}"]
    scale = rows[0].scale if rows else None
    if scale is not None:
        metric, best = scale.goal.metric, f"{number_of(scale.best)} ({scale.goal.direction})"
        if scale.is_regret:
            parts.append(f"regret: 0 at the best known {metric}, {best}, and 1 at the worst; to 5 %: until it is 0.05")
        else:
            found = "of the same seed" if rows[0].of_seeds else "of all"
            parts.append(f"to 5 %: until {metric} is within 5 % of the best {found}; the best of all is {best}")
    return "; ".join(parts)


# -- calibration table ---------------------------------------------------------------------------
#
# The table of a real run beside the rehearsal that predicted it.


#: Most trials that are listed of those that were decided otherwise.
_MOST_TRIALS = 8


def calibration_table(calibration: Calibration, title: str) -> Group:
    """The figures of both, with the errors of the prediction; then the decisions, and what explains the difference.

    Args:
        calibration: the comparison.
        title: the line above the table.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for header in ("", "rehearsed", "real", "error"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for each in calibration.figures:
        table.add_row(each.name, _shown(each, each.predicted), _shown(each, each.real), _error(each))
    real, matched = calibration.real, calibration.matched
    same = len(matched) - len(calibration.differing)
    lines = [
        f"Decisions: {same} of {len(real.played)} trials reached the same iteration "
        f"({percent(calibration.same_decisions)})"
        + (
            f"; {len(real.played) - len(matched)} have no trial of the same config"
            if len(matched) < real.trials
            else ""
        )
    ]
    for one, other in calibration.differing[:_MOST_TRIALS]:
        lines.append(f"  {other.trial_id}: rehearsed {one.iterations}, real {other.iterations}")
    if len(calibration.differing) > _MOST_TRIALS:
        lines.append(f"  and {len(calibration.differing) - _MOST_TRIALS} more")
    orders = {"ends": calibration.order, "best values": calibration.value_order}
    known = [f"{name} {tau:.2f}" for name, tau in orders.items() if tau is not None]
    if known:
        lines.append(f"Order of trials (Kendall's tau, 1 is the same order): {', '.join(known)}")
    lines += calibration.explain()
    return Group(Text(title, style="bold"), table, Text("\n".join(lines)))


def calibration_as_json(calibration: Calibration) -> dict[str, Any]:
    """The output of ``fluid rehearse --calibrate RUN --json``: ``calibrations``, a list, of each sweep its ``name`` and

    * ``figures``: by name, ``rehearsed``, ``real`` and the ``error`` of the prediction
    * ``target``: the value within 5 % of the worse of the two best ones
    * ``same_decisions``: the share of the real trials that the rehearsal took to the same iteration; ``differing``: a
      list of each ``trial`` of which that is not so, with its iterations ``rehearsed`` and ``real``; ``matched``:
      trials that are in both
    * ``order_tau``, ``value_order_tau``: Kendall's tau of the order in which trials ended, and of their best values
    * ``iteration_ratio``: how many times as long iterations took for real, in the median; ``explanation``: sentences on
      the difference
    """
    return {
        "figures": {
            each.name: {"rehearsed": each.predicted, "real": each.real, "error": each.error}
            for each in calibration.figures
        },
        "target": calibration.target,
        "same_decisions": calibration.same_decisions,
        "differing": [
            {"trial": other.trial_id, "rehearsed": one.iterations, "real": other.iterations}
            for one, other in calibration.differing
        ],
        "matched": len(calibration.matched),
        "order_tau": calibration.order,
        "value_order_tau": calibration.value_order,
        "iteration_ratio": calibration.iteration_ratio,
        "explanation": calibration.explain(),
    }


def _shown(figure: Compared, value: float | None) -> str:
    if value is None:
        return "never" if figure.unit == "s" else "-"
    if figure.unit == "s":
        return duration(value, like=max(abs(figure.predicted or 0.0), abs(figure.real or 0.0)))
    if figure.unit == "share":
        return percent(value)
    return {"count": f"{value:,.0f}", "value": number_of(value)}.get(figure.unit, number(value))


def _error(figure: Compared) -> str:
    return "-" if figure.error is None else f"{100.0 * figure.error:+.1f} %"
