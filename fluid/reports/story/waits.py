"""Why a trial waited, and why trials like it were fused no more, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fluid.display.format import count, duration
from fluid.reports.story.history import Measured, Reason, RunHistory, Wait
from fluid.reports.story.words import StoryLine, bytes_name, devices_name
from fluid.results.iterations import StoredIteration

#: Most owners that a line names.
_MOST_OWNERS = 3
#: Shorter waits, in seconds, are not told: the trial started at once.
SHORTEST_WAIT = 0.01


def fusing_ended(history: RunHistory, trial: str, iterations: Sequence[StoredIteration]) -> list[StoryLine]:
    """When trials like one were fused no more while it ran: that was measured not to pay, or was refused.

    Args:
        history: the run's journal.
        trial: the submitted trial.
        iterations: its finished iterations, in order.
    """
    if not iterations:
        return []
    of_key = history.measured.get(history.key_of.get(trial, ""), [])
    first, last = iterations[0].start, iterations[-1].end
    found = []
    for model in dict.fromkeys(each.model for each in of_key):
        measured = [each for each in of_key if each.model == model]
        for before, after in pairwise(measured):
            if before.rows > 1 == after.rows and first <= after.at < last:
                text = f"trials like it are not fused any more: {before.rows} at once did not pay, or were refused"
                found.append(StoryLine(after.at, "told", text))
    return found


@dataclass(frozen=True)
class WaitTeller:
    """Tells what trials waited for.

    Attributes:
        history: the run's journal.
        names: some trials in words.
        owner_of: whose the group of a trial is, in words; empty if unknown.
    """

    history: RunHistory
    names: Callable[[Iterable[str]], str]
    owner_of: Callable[[str], str] = lambda _: ""

    def line(self, wait: Wait) -> StoryLine | None:
        """How long a trial waited, and for what; ``None`` if it started at once, or the journal does not tell."""
        if not self.history.tells:
            return None
        if math.isinf(wait.end):
            seconds, begun = self.history.end - wait.start, "has waited {} so far"
        else:
            seconds, begun = wait.end - wait.start, "waited {}"
        if seconds < SHORTEST_WAIT:
            return None
        reasons = [reason for reason in wait.reasons if reason.at < wait.end]
        parts: list[str] = []
        for position, reason in enumerate(reasons):
            if position and reason.reason == reasons[position - 1].reason:
                continue  # it joined another line, and waits for the same
            after = f"from {duration(reason.at)} on, " if parts else ""
            parts.append(after + self._why(reason, max(wait.start, reason.at), wait.trial))
        parts += self._ramp(wait)
        drained = self.history.drained.get(None, math.inf)
        parts += [f"from {duration(drained)} on the session was drained, and nothing started"] * (drained < wait.end)
        others = self.history.placed_between(wait.start, wait.end)
        parts += [f"{count(others, 'other trial')} got devices meanwhile"] if parts and others else []
        text = begun.format(duration(seconds)) + (f": {'; '.join(parts)}" if parts else "")
        return StoryLine(wait.start, "waited", text, {"seconds": seconds})

    def _ramp(self, wait: Wait) -> list[str]:
        """How packing or fusing was measured meanwhile: trials wait until it is known to pay for more."""
        of_key = self.history.measured.get(self.history.key_of.get(wait.trial, ""), [])
        told = []
        for model in dict.fromkeys(each.model for each in of_key):
            measured = [each for each in of_key if each.model == model]
            where = f" on {model}" if model is not None and len(set(self.history.models.values())) > 1 else ""
            ways: list[tuple[str, Callable[[Measured], int]]] = [
                ("packing", lambda each: 1 if each.rows > 1 else each.packing),  # That counts fused ones, too.
                ("fusing", lambda each: each.rows),
            ]
            for way, most in ways:
                before = max((most(each) for each in measured if each.at <= wait.start), default=1)
                rises = {most(each): each.at for each in reversed(measured) if wait.start < each.at <= wait.end}
                steps = [f"{number} from {duration(at)} on" for number, at in sorted(rises.items()) if number > before]
                told += [f"{way} was being measured{where}, up to {', '.join(steps)}"] if steps else []
        return told

    def _why(self, reason: Reason, at: float, trial: str) -> str:
        if reason.reason == "LANE":
            return "another trial ran in the lane that keeps its state, which cannot be saved"
        if reason.reason == "MEMORY":
            return self._why_memory(reason)
        if not reason.devices:
            return "there was no device"
        if reason.reason == "REQUIREMENTS":
            wanted = reason.note.get("wanted")
            return "no device, free or taken, was as it requires" + (f": it waited for {wanted}" if wanted else "")
        width, fitting = float(reason.note["width"]), self.history.fitting(trial)
        number = reason.devices if fitting is None else min(reason.devices, len(fitting))
        which = "" if fitting is None else " that it may use"
        head = f"all devices{which} were taken" if number > 1 else f"the only device{which} was taken"
        if width > 1.0:
            head = f"it is to run on {width:g} devices, and fewer were free"
        holders = self.history.taken_at(at, fitting)
        taken = [
            f"{devices_name([device], self.history.kinds)} by {self.names(trials)}"
            for device, trials in holders.items()
        ]
        more = number - len(taken)
        tail = f" and {count(more, 'further device')}" if more > 0 and len(taken) > 1 and width <= 1.0 else ""
        if not taken:
            return head
        own, owners = self.owner_of(trial), [self.owner_of(each) for trials in holders.values() for each in trials]
        ahead = [owner for owner in dict.fromkeys(owners) if owner and owner != own] if own else []
        behind = f"; it waited behind {' and '.join(ahead[:_MOST_OWNERS])}" if ahead else ""
        return f"{head}, at first {', '.join(taken)}{tail}{behind}"

    def _why_memory(self, reason: Reason) -> str:
        need = reason.note.get("need_bytes")
        text = "device memory was short"
        if isinstance(need, (int, float)):
            text += f": it needs {bytes_name(need)}"
        rooms = [
            f"{self._named(int(each['device_id']))} had {bytes_name(each['free'])} of {bytes_name(each['usable'])} free"
            for each in reason.note.get("memory") or ()
        ]
        return f"{text}, and {', '.join(rooms)}" if rooms else text

    def _named(self, device: int) -> str:
        return devices_name([device], self.history.kinds)
