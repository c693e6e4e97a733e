"""From which state a trial starts, in words: another trial's, which was saved for it, or iterations run for several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from fluid.display.format import count, duration
from fluid.reports.story.history import Entry
from fluid.reports.story.words import StoryLine, medium_name
from fluid.results.iterations import StoredIteration

#: Gives the name under which reports show a submitted trial.
NameOf = Callable[[str], str]


def starts_from(start: Mapping[str, Any], name_of: NameOf) -> str:
    """From which state a trial starts, as it was submitted.

    Args:
        start: a :class:`fluid.engine.events.StartState`, as the journal has it.
        name_of: gives the names of trials.
    """
    parent, at = name_of(str(start["parent"])), start.get("at")
    checkpoint = start.get("checkpoint")
    if start.get("is_shared") and isinstance(checkpoint, Mapping):
        first = count(int(at or 0), "iteration")
        return f"its first {first} are those of an earlier run, whose state is {checkpoint.get('path')}"
    if start.get("is_shared"):
        return f"its first {count(int(at or 0), 'iteration')} are run once for several trials, by {parent!r}"
    where = f" ({checkpoint.get('path')})" if isinstance(checkpoint, Mapping) else ""
    when = ", from its newest state" if at is None else f" after {count(int(at), 'iteration')}"
    return f"it starts from trial {parent!r}{where}{when}"


def forked_line(entry: Entry, name_of: NameOf) -> StoryLine:
    """The state from which a trial starts was saved for it, or could not be."""
    fields, parent = entry.fields, name_of(str(entry.fields["parent"]))
    seconds, checkpoint = float(fields.get("seconds") or 0.0), fields.get("checkpoint")
    facts: dict[str, Any] = {"parent": parent, "seconds": seconds}
    if not isinstance(checkpoint, Mapping):
        text = f"the state of trial {parent!r} could not be had: {fields.get('problem')}"
        return StoryLine(entry.at, "forked", text, facts)
    facts["at"] = int(checkpoint["iteration"])
    how = "saved" if fields.get("lane_id") is not None else "copied"
    text = f"starts from trial {parent!r} after {count(facts['at'], 'iteration')}; its state was {how}"
    return StoryLine(entry.at, "forked", f"{text} to {medium_name(checkpoint)} in {duration(seconds)}", facts)


def shared_lines(iterations: Sequence[StoredIteration], name_of: NameOf) -> list[StoryLine]:
    """Which iterations of a trial another one has run, for all whose configs agree until then; a line for each one."""
    found = []
    for source, of_source in groupby(iterations, key=lambda each: each.source):
        run = list(of_source)
        first, last, name = run[0].number, run[-1].number, name_of(source)
        numbers = f"iteration {first} is that" if first == last else f"iterations {first} to {last} are those"
        text = f"{numbers} of {name!r}, which ran them for all trials that agree until then"
        found.append(StoryLine(run[-1].end, "shared", text, {"first": first, "last": last, "source": name}))
    return found


def awaits_text(start: Mapping[str, Any], name_of: NameOf, done: int) -> str:
    """What a trial waits for whose state to start from is not there.

    Args:
        start: as of :func:`starts_from`.
        name_of: gives the names of trials.
        done: iterations that the parent has reported.
    """
    parent, at = name_of(str(start["parent"])), start.get("at")
    which = "the newest state" if at is None else "the state"
    when = "" if at is None else f" at iteration {int(at)}"
    return f"waits for {which} of {parent!r}{when}: that one has done {done}"
