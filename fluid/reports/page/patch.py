"""Patches of the HTML page's data: what has changed of runs that go on, for a page that shows an earlier reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluid.display.format import short_names
from fluid.reports.page.data import Importances, importances_data, metrics_of, page_data, run_summary
from fluid.reports.page.trials import Logs, Point, TrialsFrame, best_points, improving, points_of, progress_data
from fluid.reports.run.run import RecordedRun, TrialRun, run_names
from fluid.reports.tables.ranking import has_failed
from fluid.results.iterations import flat

#: The best values of a metric so far, by mode.
_Best = Mapping[str, list[Point]]


class PageDrawer:
    """Draws the data of a page that follows runs: all of it, or what has changed since.

    A patch has ``trials``, each changed or new one with its run and its row in it, and ``runs``, with the changed
    fields of each. Failures of trials in it hold their texts. What it leaves as it was: the timeline, the idle time,
    the Pareto set, and how many points and lines there are of curves and stories of trials without news.
    """

    def __init__(self) -> None:
        self._runs: tuple[RecordedRun, ...] = ()
        self._metrics: list[dict[str, Any]] = []
        self._parameters: dict[str, None] = {}
        #: What the page shows of each run: its summary, the short names of its trials and the best values by metric.
        self._summaries: list[dict[str, Any]] = []
        self._short: list[tuple[str, ...]] = []
        self._best: list[list[_Best | None]] = []

    def draw(self, runs: Sequence[RecordedRun], importances: Sequence[Importances]) -> dict[str, Any]:
        """All of the data."""
        data = page_data(runs, importances=importances, live=True)
        self._runs = tuple(runs)
        self._metrics, self._parameters = data["metrics"], dict.fromkeys(data["parameters"])
        self._summaries = [run_summary(run, name) for run, name in zip(runs, run_names(runs), strict=True)]
        self._short = [_short(run) for run in runs]
        self._best = [
            [best_points(run, each["name"]) if each["name"] in run.metrics else None for each in self._metrics]
            for run in runs
        ]
        return data

    def patch(self, runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
        """What has changed since the data was drawn, or since the last patch.

        Args:
            runs: the runs, whose trials so far are in the rows they were in.

        Returns:
            ``None`` if more has changed than a patch can tell, such as the metrics or the hyperparameters.
        """
        changed = [_changed_rows(before, run) for before, run in zip(self._runs, runs, strict=True)]
        if any(_names(before).items() - _names(run).items() for before, run in zip(self._runs, runs, strict=True)):
            return None
        if metrics_of(runs) != self._metrics or any(
            flat(run.trials[row].config).keys() - self._parameters.keys()
            for run, rows in zip(runs, changed, strict=True)
            for row in rows
        ):
            return None
        names = [each["name"] for each in self._metrics]
        frame = TrialsFrame.of(names, list(self._parameters), sum(len(run.trials) for run in runs))
        trials: list[tuple[int, int, dict[str, Any]]] = []
        for number, (run, rows) in enumerate(zip(runs, changed, strict=True)):
            logs, short = Logs(), self._short[number]
            if len(run.trials) > len(short):
                short = _short(run)
                if short[: len(self._short[number])] != self._short[number]:
                    rows = list(range(len(run.trials)))
                self._short[number] = short
            trials += ((number, row, {**frame.entry(run, number, row, logs), "short": short[row]}) for row in rows)
        parts = [self._run_patch(number, run, changed[number]) for number, run in enumerate(runs)]
        for number, (run, name) in enumerate(zip(runs, run_names(runs), strict=True)):
            summary = run_summary(run, name)
            known = self._summaries[number]
            parts[number].update({key: value for key, value in summary.items() if value != known[key]})
            self._summaries[number] = summary
        self._runs = tuple(runs)
        return _patch(trials, parts)

    def judged(self, importances: Sequence[Importances]) -> dict[str, Any]:
        """The patch that adds importances."""
        return _patch([], [{"importances": importances_data(each)} for each in importances])

    def _run_patch(self, number: int, run: RecordedRun, rows: Sequence[int]) -> dict[str, Any]:
        """The best values so far, if they have changed."""
        before, changed = self._runs[number], False
        failed = [row for row in rows if has_failed(run.trials[row])]
        # Values of failed trials do not count, those of trials that fail now no longer.
        lost = any(row < len(before.trials) and not has_failed(before.trials[row]) for row in failed)
        all_failed = all(map(has_failed, before.trials))  # Then their values counted.
        for place, metric in enumerate(self._metrics):
            best = self._best[number][place]
            if best is None:
                continue
            if lost or all_failed:
                found = best_points(run, metric["name"])
            else:
                new = points_of(run, metric["name"], [row for row in rows if row not in failed])
                found = {mode: improving([*points, *new], mode) for mode, points in best.items()}
            changed |= found != best
            self._best[number][place] = found
        if not changed:
            return {}
        return {"progress": [None if best is None else progress_data(best) for best in self._best[number]]}


def _patch(trials: Sequence[tuple[int, int, dict[str, Any]]], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"patch": True, "trials": trials, "runs": runs}


def _changed_rows(before: RecordedRun, run: RecordedRun) -> list[int]:
    """The rows of the trials that are new or have news."""
    known = before.trials
    return [
        row
        for row, trial in enumerate(run.trials)
        if row >= len(known) or trial is not known[row] or _story(run, trial) is not _story(before, known[row])
    ]


def _story(run: RecordedRun, trial: TrialRun) -> object:
    return run.stories.get((trial.group_id, trial.trial_id))


def _names(run: RecordedRun) -> dict[str, str]:
    return {group.group_id: group.name for group in run.groups}


def _short(run: RecordedRun) -> tuple[str, ...]:
    return short_names([trial.trial_id for trial in run.trials])
