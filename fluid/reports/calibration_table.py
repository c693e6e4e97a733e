"""The table of a real run beside the rehearsal that predicted it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fluid.display.format import duration, number, percent
from fluid.rehearsal.calibration import Calibration, Compared
from fluid.reports.rehearsal_table import number_of

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
    """The comparison in JSON."""
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
