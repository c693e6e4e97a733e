"""An independent reading of a shared folder's log: what counts, and whether all that followed from it was right.

It has nothing of :mod:`fluid.joint.state`, nor of a sweep's loop: the rules are written down here a second time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fluid
from fluid.joint.entries import Begun, Claimed, Ended, Iterated, Joined, Left, Lost, Released, Started, read_entry
from fluid.joint.log import SharedLog
from fluid.search.algorithms import make_scheduler
from fluid.search.rungs import RungDecision, rungs_of

#: A trial that has taken so many members with it counts as failed.
MOST_LOSSES = 3


class Event(NamedTuple):
    """Something of a trial that counts.

    Attributes:
        what: ``begun``, ``iteration`` or ``ended``.
        trial_id: the trial.
        value: its config, the metrics of an iteration, or the state in which it ended.
        number: of the iteration, or of those that it has done.
        by_itself: of its end: whether it has no more to do.
    """

    what: str
    trial_id: str
    value: Any
    number: int = 0
    by_itself: bool = False


@dataclass
class Merged:
    """What a log comes to.

    Attributes:
        events: those that count, in order.
        folders: of the members, by their names.
        lost: names of members that were taken for dead.
        void: how many items of each kind did not count.
    """

    events: list[Event] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    void: Counter[str] = field(default_factory=Counter)

    def iterations(self) -> dict[str, list[Any]]:
        """The metrics of the trials' iterations, by id."""
        found: dict[str, list[Any]] = {event.trial_id: [] for event in self.events if event.what == "begun"}
        for event in self.events:
            if event.what == "iteration":
                found[event.trial_id].append(event.value)
        return found


def merged(shared: Path) -> Merged:
    """Reads a log, and keeps what counts."""
    result = Merged()
    gone: set[str] = set()
    groups: set[str] = set()
    #: Whose each trial is by which lease; how far it is; how often it was lost since, while it ran; and those over.
    leases: dict[str, tuple[str, int]] = {}
    reached: dict[str, int] = {}
    losses: Counter[str] = Counter()
    runs: set[str] = set()
    over: set[str] = set()

    def leave(name: str, *, is_lost: bool) -> Iterator[Event]:
        gone.add(name)
        for trial_id in [one for one, (holder, _) in leases.items() if holder == name]:
            del leases[trial_id]
            losses[trial_id] += is_lost and trial_id in runs
            runs.discard(trial_id)
            if is_lost and losses[trial_id] >= MOST_LOSSES:
                over.add(trial_id)
                yield Event("ended", trial_id, "FAILED", reached[trial_id])

    def read(number: int, writer: str, item: Any) -> Iterator[Event]:
        if isinstance(item, Joined):
            assert writer not in result.folders, f"{writer} joins twice"
            result.folders[writer] = item.folder
            return
        # A member reads all that was told before it appends an entry: it never speaks after its own death.
        assert writer in result.folders and writer not in gone, f"entry {number}: {writer} takes no part"
        if isinstance(item, Left):
            yield from leave(writer, is_lost=False)
        elif isinstance(item, Lost) and item.member in result.folders and item.member not in gone:
            result.lost.add(item.member)
            yield from leave(item.member, is_lost=True)
        elif isinstance(item, Begun):
            groups.add(item.group)
            assert len(groups) == 1, groups
            if item.most is None or len(reached) < item.most:
                trial_id = f"{item.group}-{len(reached):05d}"
                reached[trial_id] = 0
                if not item.is_free:
                    leases[trial_id] = writer, number
                yield Event("begun", trial_id, item.config)
        elif isinstance(item, Claimed):
            if item.trial_id in reached and item.trial_id not in leases and item.trial_id not in over:
                leases[item.trial_id] = writer, number
            else:
                result.void["Claimed"] += 1
        elif isinstance(item, (Started, Iterated, Ended, Released)):
            if leases.get(item.trial_id) == (writer, item.lease):
                yield from of_trial(item)
            else:
                result.void[type(item).__name__] += 1

    def of_trial(item: Any) -> Iterator[Event]:
        trial_id = item.trial_id
        if isinstance(item, Started):
            runs.add(trial_id)
        elif isinstance(item, Released):
            del leases[trial_id]
            runs.discard(trial_id)
        elif isinstance(item, Ended):
            runs.discard(trial_id)
            if item.state != "DONE":
                del leases[trial_id]
                over.add(trial_id)
            yield Event("ended", trial_id, item.state, item.iteration, item.by_itself)
        else:
            first = item.iteration - len(item.metrics) + 1
            if first != reached[trial_id] + 1 or not item.metrics:
                result.void["Iterated"] += 1
                return
            reached[trial_id], losses[trial_id] = item.iteration, 0
            runs.add(trial_id)
            for place, text in enumerate(item.metrics):
                yield Event("iteration", trial_id, json.loads(text), first + place)

    for expected, (number, content) in enumerate(SharedLog(shared, "check").read()):
        assert number == expected
        writer, items = read_entry(content)
        for item in items:
            result.events += read(number, writer, item)
    return result


def check_log(
    shared: Path,
    *,
    algorithm: str,
    samples: int,
    budget: int,
    eta: int = 3,
    alone: Sequence[tuple[Mapping[str, Any], Sequence[float]]],
    results_of: Callable[[Path], dict[str, list[Any]]] | None = None,
    ended_well: int = 1,
) -> Merged:
    """Checks that a sweep of several members came to what one driver comes to on the same order of events.

    Args:
        shared: the members' folder.
        algorithm: of the sweep.
        samples: its trials.
        budget: the most iterations of a trial.
        eta: one in so many trials continues.
        alone: the trials of one driver that has the same arguments, in the order in which they began: their configs,
            and the losses of their iterations.
        results_of: the metrics of each trial's iterations by a member's folder; ``None`` if it has none, as it did not
            end well. ``None`` for folders of Fluid.
        ended_well: how many members have at least ended well.

    Returns:
        What the log comes to.
    """
    found = merged(shared)
    iterations = found.iterations()
    begun = list(iterations)
    assert len(begun) == samples == len(alone)
    _check_order(found.events)
    for trial_id, (config, losses) in zip(begun, alone, strict=True):
        told = [metrics["loss"] for metrics in iterations[trial_id]]
        assert all(mine == theirs for mine, theirs in zip(told, losses, strict=False)), (trial_id, told, losses)
        told_config = next(event.value for event in found.events if event.trial_id == trial_id)
        assert told_config is None or _plain(told_config) == _plain(config), (trial_id, told_config, config)
    _check_decisions(found.events, make_scheduler(algorithm, rungs=rungs_of(budget, eta, 1), eta=eta, samples=samples))
    checked = 0
    for name in sorted(set(found.folders.values())):
        results = (results_of or fluid_results)(shared / "members" / name)
        if results is not None:
            assert results == iterations, f"{name} has other results than the log"
            checked += 1
    assert checked >= ended_well, f"only {checked} members have results"
    return found


def _plain(config: Any) -> Any:
    return json.loads(json.dumps(config))


def _check_order(events: Sequence[Event]) -> None:
    """Each iteration once, none left out, none after the end."""
    reached: dict[str, int] = {}
    over: set[str] = set()
    for event in events:
        assert event.trial_id not in over, f"{event} after its end"
        if event.what == "begun":
            assert event.trial_id not in reached
            reached[event.trial_id] = 0
        elif event.what == "iteration":
            reached[event.trial_id] += 1
            assert event.number == reached[event.trial_id], event
        else:
            assert event.number == reached[event.trial_id], f"{event}, but {reached[event.trial_id]} were told"
            if event.value != "DONE":
                over.add(event.trial_id)


def _check_decisions(events: Sequence[Event], scheduler: Any) -> None:
    """What members did is what the scheduler, told the same events in the same order, lets them do."""
    ids: list[str] = []
    budgets: dict[str, int] = {}
    losses: dict[str, float] = {}
    heading: set[str] = set()
    stopped: set[str] = set()

    def decide(decision: RungDecision) -> None:
        for promotion in decision.promoted:
            budgets[ids[promotion.trial]] = promotion.budget
            heading.add(ids[promotion.trial])
        stopped.update(ids[number] for number in decision.ended)

    for event in events:
        trial_id = event.trial_id
        if event.what == "begun":
            started = scheduler.start()
            assert started is not None and started.trial == len(ids)
            ids.append(trial_id)
            budgets[trial_id] = started.budget
            heading.add(trial_id)
        elif event.what == "iteration":
            assert trial_id in heading and event.number <= budgets[trial_id], f"{event} was not granted"
            losses[trial_id] = event.value["loss"]
        elif trial_id not in heading:
            assert trial_id in stopped, f"{event}, but no decision has ended it"
        else:
            heading.remove(trial_id)
            if event.value == "DONE" and not event.by_itself:
                assert event.number == budgets[trial_id], f"{event} short of its rung at {budgets[trial_id]}"
                decide(scheduler.reached(ids.index(trial_id), losses[trial_id]))
            else:
                assert event.value in ("DONE", "FAILED"), f"{event}, but no decision has ended it"
                stopped.add(trial_id)
                decide(scheduler.ended(ids.index(trial_id)))
    assert not heading, f"{sorted(heading)} did not run to their rungs"
    assert scheduler.start() is None, "trials did not begin"
    assert stopped == set(ids), f"{sorted(set(ids) - stopped)} wait for ever"


def fluid_results(folder: Path) -> dict[str, list[Any]] | None:
    """The metrics of all trials in a run folder of Fluid, by id; ``None`` if its session did not end."""
    session = folder / "session.json"
    if not session.exists() or (folder / "alive").exists():
        return None
    return {trial.trial_id: [result.metrics for result in trial.results] for trial in fluid.load(folder).trials}
