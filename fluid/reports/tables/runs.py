"""What ``fluid runs`` prints: a table of all runs below a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fluid._clock import local_time
from fluid.directions import direction_text
from fluid.display.format import count, duration, number, printable
from fluid.keeping import bytes_text
from fluid.results.runs import RunSummary

#: Folders without a run that are named at most.
_MOST_OTHERS = 5
#: The width, in characters, from which the table has all its columns.
_ROOM_FOR_ALL = 110
#: How states are shown.
_STYLES = {"running": "bold", "interrupted": "yellow", "unfinished": "yellow", "damaged": "red", "unreadable": "red"}


def name_of(run: RunSummary, home: Path) -> str:
    """The name of a run below a folder: its path from there; of the folder itself, its own name."""
    return run.path.name if run.path == home else str(run.path.relative_to(home))


def runs_table(
    runs: Sequence[RunSummary],
    home: Path,
    size_of: Callable[[Path], int],
    *,
    width: int,
    left_out: int = 0,
    others: Sequence[Path] = (),
) -> RenderableType:
    """The table.

    Args:
        runs: the runs to show, in that order.
        home: the folder below which they are.
        size_of: the bytes of a folder on the disk.
        width: of the terminal, in characters.
        left_out: how many more runs there are.
        others: folders without a run.
    """
    if not runs:
        return Group(Text(f"no run in {printable(str(home))}"), *_others(others, home))
    is_wide = width >= _ROOM_FOR_ALL
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2 if is_wide else 1, 0, 0), pad_edge=False)
    headers = ["run", "sweep", "state", "best", "trials", "began", "took", "size"]
    if not is_wide:
        headers = [header for header in headers if header not in ("sweep", "took")]
    for header in headers:
        figures = header in ("trials", "took", "size")
        table.add_column(header, justify="right" if figures else "left", no_wrap=header == "state", overflow="fold")
    for run in runs:
        cells: dict[str, str | Text] = {
            "run": Text(printable(name_of(run, home))),
            "sweep": Text("" if run.name == run.path.name else printable(run.name)),
            "state": Text(run.state, style=_STYLES.get(run.state, "")),
            "best": Text(printable(run.why) if run.why else best_text(run, " " if is_wide else "\n")),
            "trials": trials_text(run.trials),
            "began": "" if run.began is None else local_time(run.began, "%Y-%m-%d %H:%M" if is_wide else "%m-%d %H:%M"),
            "took": "" if run.seconds is None else duration(run.seconds),
            "size": bytes_text(size_of(run.path)),
        }
        table.add_row(*(cells[header] for header in headers))
    parts: list[RenderableType] = [table]
    if left_out:
        parts.append(Text(f"... and {count(left_out, 'older run')}; --limit 0 shows all"))
    return Group(*parts, *_others(others, home))


def best_text(run: RunSummary, between: str) -> str:
    """The best value: ``"loss 0.117 (less is better)"``; empty if there is none.

    Args:
        run: the run.
        between: what stands before the direction: a space, or a line break.
    """
    best = run.best
    if best is None:
        return ""
    return f"{printable(best.metric)} {number(best.value)}{between}({direction_text(best.mode)})"


def trials_text(trials: Mapping[str, int]) -> str:
    """How many trials there are, and how many of them have failed."""
    failed = trials.get("FAILED", 0)
    return f"{sum(trials.values()):,}" + (f", {failed:,} failed" if failed else "")


def as_json(
    runs: Sequence[RunSummary], home: Path, size_of: Callable[[Path], int], others: Sequence[Path]
) -> dict[str, Any]:
    """The output of ``fluid runs --json``.

    * ``dir``: the folder that was looked through; ``others``: folders in it without a run
    * ``runs``: of each ``run`` (the name below ``dir``) ``path``, ``name`` (of the sweep), ``state``, ``why`` (what is
      damaged, or ``null``), ``best`` (``metric``, ``mode``, ``value`` and ``trial``, or ``null``), ``trials``,
      ``states`` (how many trials are in each), ``began``, ``seconds`` (from begin to end, or until now) and ``bytes``
    """
    return {"dir": str(home), "runs": [run_json(run, home, size_of) for run in runs], "others": list(map(str, others))}


def run_json(run: RunSummary, home: Path, size_of: Callable[[Path], int]) -> dict[str, Any]:
    """A run, as JSON."""
    return {
        "run": name_of(run, home),
        "path": str(run.path),
        "name": run.name,
        "state": run.state,
        "why": run.why or None,
        "best": None if run.best is None else run.best._asdict(),
        "trials": sum(run.trials.values()),
        "states": dict(run.trials),
        "began": None if run.began is None else local_time(run.began, "%Y-%m-%dT%H:%M:%S%z"),
        "seconds": run.seconds,
        "bytes": size_of(run.path),
    }


def _others(others: Sequence[Path], home: Path) -> list[RenderableType]:
    if not others:
        return []
    named = ", ".join(printable(str(other.relative_to(home))) for other in others[:_MOST_OTHERS])
    more = ", ..." if len(others) > _MOST_OTHERS else ""
    return [Text(f"{count(len(others), 'folder')} without a run: {named}{more}", style="dim")]
