"""What ``fluid why`` prints: one trial of a recorded run, and its story."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fluid.display.format import count, duration, durations, printable
from fluid.display.names import state_style
from fluid.errors import InvalidFieldError
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.story.words import StoryLine
from fluid.reports.tables.run import start_json, story_json

#: Most similar names that the error about an unknown trial lists.
_MOST_MATCHES = 5
#: What lines about trouble look like.
_STYLES = {"waited": "yellow", "unfinished": "yellow", "preempted": "yellow"}


def find_trials(run: RecordedRun, name: str) -> list[TrialRun]:
    """The trials of that name, one in each group at most, or the one that was submitted by that id.

    Raises:
        InvalidFieldError: there is none; the message lists similar names.
    """
    found = [trial for trial in run.rows if trial.trial_id == name]
    if not found:
        found = [trial for trial in run.rows if trial.files and name in dict(trial.files.submitted)]
    if found:
        return found
    names = list(dict.fromkeys(trial.trial_id for trial in run.rows))
    close = [other for other in names if name and name in other][:_MOST_MATCHES]
    close += [other for other in difflib.get_close_matches(name, names, n=_MOST_MATCHES) if other not in close]
    hint = f"did you mean {', '.join(close[:_MOST_MATCHES])}?" if close else f"it has {count(len(names), 'trial')}"
    raise InvalidFieldError("trial", name, f"is not in this run; {hint}")


def story_text(run: RecordedRun, trial: TrialRun) -> RenderableType:
    """A trial's story as a headline and a table of times and sentences."""
    lines = run.story_of(trial)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    if run.clock is not None:
        table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for line, time in zip(lines, durations([line.at for line in lines]), strict=True):
        clock = [] if run.clock is None else [run.clock_time(line.at)]
        table.add_row(time, *clock, Text(printable(line.text), style=_style(line)))
    began = "the first iteration of the run" if run.timeline.segments else "the session"
    note = Text(f"Times are since {began} began.", style="dim")
    if trial.seeds is not None:
        note.append(" Its seeds: " + ", ".join(f"{name} {seed}" for name, seed in trial.seeds._asdict().items()) + ".")
    return Group(_headline(run, trial), Padding(table, (1, 0)) if lines else Text("The journal tells nothing."), note)


def as_json(run: RecordedRun, trials: Sequence[TrialRun]) -> dict[str, Any]:
    """The output of ``fluid why --json``.

    * ``run``: the run folder
    * ``trials``: of each ``trial`` of that name ``group``, ``state``, ``iterations``, ``budget``, ``start`` and
      ``failure`` as of ``fluid report --json``; ``is_shared_run``, whether Fluid added it, to run iterations once for
      several trials; ``seeds`` by library, ``null`` if none were set; and ``story``, a list with ``at_s``, seconds
      since the first iteration of the run, ``clock``, the time of day (``null`` if unknown), ``what`` (one word),
      ``text``, and ``facts`` (the figures in the text, by name)
    """
    return {
        "run": str(run.path),
        "trials": [
            {
                "trial": trial.trial_id,
                "group": trial.group_id,
                "state": trial.state,
                "iterations": trial.iterations,
                "budget": trial.budget,
                "start": start_json(trial),
                "is_shared_run": trial.is_shared_run,
                "failure": trial.failure_text,
                "seeds": None if trial.seeds is None else trial.seeds._asdict(),
                "story": story_json(run, trial),
            }
            for trial in trials
        ],
    }


def _headline(run: RecordedRun, trial: TrialRun) -> Text:
    line = Text().append(printable(trial.trial_id), style="bold")
    if not run.is_one_search:
        groups = {group.group_id: group for group in run.groups}
        group = groups.get(trial.group_id)
        line.append(f" of {printable(trial.group_id if group is None else group.name)}")
        line.append(f" ({printable(group.said)})" if group is not None and group.said else "")
    line.append(" (a shared run, which Fluid has added)" if trial.is_shared_run else "")
    line.append(": ").append(trial.state.lower(), style=state_style(trial.state))
    of_budget = "" if trial.budget is None else f" of {trial.budget}"
    return line.append(f", {trial.iterations}{of_budget} iterations in {duration(trial.seconds)}")


def _style(line: StoryLine) -> str:
    if line.what == "ended":
        return state_style(str(line.facts.get("state", ""))) or "bold"
    if line.what == "queued" and line.facts.get("kind") is not None:
        return "red"
    return _STYLES.get(line.what, "")
