"""The trees of forks of a run: which trial starts from whose state, as rows in the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fluid.reports.run.run import TrialRun


class Lineage(NamedTuple):
    """A trial in a tree of forks, drawn from the state that it starts from to its last iteration.

    Attributes:
        row: its position among the trials.
        parent: that of the trial from whose state it starts; ``None`` for one that begins afresh, or whose parent is
            of another run.
        at: iterations done by that state; 0 for one that begins afresh. As long as it is unknown, what the parent has
            done.
        last: its last iteration, at least ``at``.
        outside: the parent of another run, or its checkpoint; empty if it has none.
    """

    row: int
    parent: int | None
    at: int
    last: int
    outside: str


def lineages(trials: Sequence[TrialRun]) -> list[Lineage]:
    """The trees, each from its root on, a trial's children below it: the later they leave it, the nearer.

    So the lines from a trial to its children cross no other ones. Trials that are in no tree are left out.

    Args:
        trials: all trials of a run, those that Fluid has added included.
    """
    row_of = {name: row for row, trial in enumerate(trials) for name in _names(trial)}
    children: dict[int, list[Lineage]] = {}
    roots: list[Lineage] = []
    for row, trial in enumerate(trials):
        start = trial.start
        if start is None:
            continue
        parent = None if start.path else row_of.get(start.parent)
        known = 0 if parent is None else trials[parent].iterations
        at = known if start.at is None else start.at
        outside = (start.parent or start.path) if parent is None else ""
        found = Lineage(row, parent, at, max(at, trial.iterations), outside)
        if parent is None:
            roots.append(found)
        else:
            children.setdefault(parent, []).append(found)
    begun = {lineage.row for lineage in roots} | {lineage.row for each in children.values() for lineage in each}
    roots += [Lineage(row, None, 0, trials[row].iterations, "") for row in children if row not in begun]
    return [each for root in sorted(roots) for each in _below(root, children)]


def _below(root: Lineage, children: dict[int, list[Lineage]]) -> Iterator[Lineage]:
    left = [root]
    while left:
        found = left.pop()
        yield found
        left += sorted(children.get(found.row, ()), key=lambda each: (each.at, -each.row))


def _names(trial: TrialRun) -> list[str]:
    """The ids under which others may name it as their parent."""
    return [trial.trial_id, *(name for name, _ in (trial.files.submitted if trial.files else ()))]
