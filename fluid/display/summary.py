"""What remains when a session ends: a line per group with its best result, the run folder, and how to see it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.style import Style
from rich.text import Text

from fluid.display.dashboard import best_text, no_best_text, states_text_within, sum_of_groups
from fluid.display.format import clock_time, count
from fluid.display.names import metric_text, shortened_apart, states_text, with_interrupted
from fluid.session.status import GroupStatus, Status

_LONGEST_NAME = 24
_DIM, _BOLD = Style(dim=True), Style(bold=True)


def summary_lines(status: Status, seconds: Mapping[int, float], *, width: int = 80, most: int = 20) -> list[Text]:
    """The lines that remain on the terminal when the session ends: one per group, its best result first.

    Args:
        status: the last status.
        seconds: how long each group ran, by position in ``status.groups``.
        width: characters per line; a line leaves parts out that do not fit.
        most: most lines; the first line then sums up the earlier groups.
    """
    groups = status.groups
    skipped = max(0, len(groups) - most + 1) if len(groups) > most else 0
    names = shortened_apart([group.name for group in groups[skipped:]], _LONGEST_NAME)
    name_width = max(map(len, names), default=0)
    lines = []
    if len(groups) == 1 and groups[0].best is not None:
        lines.append(best_text(groups[0].best, width, lead="best  "))
    lines += [sum_of_groups(groups[:skipped], "earlier group")] if skipped else []
    for position, group in enumerate(groups[skipped:], skipped):
        name = f"{names[position - skipped]:<{name_width}}"
        lines.append(_group_line(name, group, seconds.get(position, status.at), width, with_best=len(groups) > 1))
    if len(groups) == 1 and groups[0].open_metric is not None:
        lines.append(no_best_text(groups[0].open_metric, width))
    return lines


def folder_lines(run_dir: Path, width: int = 80) -> list[Text]:
    """The run folder, and the commands that show it."""
    folder = shown_path(run_dir)
    lines = [Text("results in ").append(folder, style=_BOLD)]
    for command, what in ((f"fluid report {folder}", "tables and a page"), (f"fluid view {folder}", "in a browser")):
        line = Text(f"  {command}")
        lines.append(line.append(f"  {what}", style=_DIM) if line.cell_len + len(what) + 2 <= width else line)
    return lines


def shown_path(path: Path) -> str:
    """A path as a shell takes it, relative to the current folder or to the home folder if it is in there."""
    forms = [shlex.quote(str(path))]
    home = Path(os.path.expanduser("~"))
    if path.is_relative_to(home) and path != home:
        forms.append(f"~/{shlex.quote(str(path.relative_to(home)))}")
    with contextlib.suppress(OSError):  # The current folder was removed.
        here = Path.cwd()
        if path.is_relative_to(here) and path != here and here != Path("/"):
            forms.append(shlex.quote(str(path.relative_to(here))))
    return min(forms, key=len)


def _group_line(name: str, group: GroupStatus, seconds: float, width: int, *, with_best: bool) -> Text:
    trials = with_interrupted(group.trials)
    iterations, took = f"; {_iterations(group)}", f"; {clock_time(seconds)}"
    seed = "" if group.seed is None else f", seed {group.seed}"
    counted, best = f"  {count(sum(trials.values()), 'trial')}{seed}: ", ""
    if group.best is not None and with_best:
        best = f"  best {group.best.metric} {metric_text(group.best.value)}{group.best.less_note};"
        counted = counted[1:]
    for lead, tail in ((best, iterations + took), (best, took), (best, ""), ("", "")):
        line = Text(name, style=_BOLD).append(lead + counted, style=Style(bold=False))
        states = states_text_within(trials, width - line.cell_len - len(tail))
        if states.plain == states_text(trials):
            break
    return line.append_text(states).append(tail, style=Style(bold=False))


def _iterations(group: GroupStatus) -> str:
    """The finished iterations; and their budget, unless a search algorithm decides about it."""
    budget = "" if group.is_search else f"/{group.iterations:,}"
    return f"{group.iterations_done:,}{budget} iterations"
