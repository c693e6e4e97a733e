"""A trial's story in words: what happened to it and why, line by line, from the run's journal and its iterations."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fluid.display.format import count, duration
from fluid.reports.analysis.cohorts import predicted_text
from fluid.reports.analysis.restores import set_up_words
from fluid.reports.story.forks import awaits_text, forked_line, shared_lines, starts_from
from fluid.reports.story.history import UNUSABLE, Entry, RunHistory, Stay, is_awaiting, is_elsewhere, why_paused
from fluid.reports.story.waits import SHORTEST_WAIT, WaitTeller, fusing_ended
from fluid.reports.story.words import (
    StoryLine,
    after_iteration,
    devices_name,
    gained,
    medium_name,
    needs_text,
    ran_line,
    size_name,
)
from fluid.results.iterations import StoredIteration

T = TypeVar("T")
#: Iterations before a resize whose median is the pace that the trial would have kept.
_PACE_OVER = 5
#: Most trials that a line names.
_MOST_NAMES = 4
_FAILED = {
    "error": "failed",
    "out_of_memory": "ran out of device memory",
    "lane_lost": "lost its lane",
    "device": "failed on a device that answers no more",
    "timeout": "ran into its time limit",
    "no_device": "had no device left that could run it",
}
#: What becomes of trials of a group that cannot meet its deadline.
_BEHIND = "its trials give way to those of groups that can meet theirs"
_OUTCOMES = {
    "DONE": "ended it as done",
    "STOPPED": "stopped it early",
    "PAUSED": "paused it",
    "FAILED": "gave it up",
}


@dataclass(frozen=True)
class Storyteller:
    """Tells the stories of a run's trials.

    Attributes:
        history: the run's journal.
        name_of: the name under which reports show a submitted trial.
        log_of: path of a submitted trial's log.
        searched: whether a search algorithm submitted a trial.
        owner_of: whose the group of a submitted trial is, in words; empty if unknown.
    """

    history: RunHistory
    name_of: Callable[[str], str]
    log_of: Callable[[str], str]
    searched: Callable[[str], bool]
    owner_of: Callable[[str], str] = lambda _: ""

    def tell(self, trial: str, iterations: Sequence[StoredIteration]) -> list[StoryLine]:
        """The story of a submitted trial, in order of time.

        Args:
            trial: the submitted trial.
            iterations: its finished iterations, in order.
        """
        return _Story(self, trial, iterations).lines()

    def names(self, trials: Iterable[str]) -> str:
        """``"a, b and 3 others"``."""
        found = list(dict.fromkeys(map(self.name_of, trials)))
        more = len(found) - _MOST_NAMES
        if more > 0:
            return f"{', '.join(found[:_MOST_NAMES])} and {count(more, 'other')}"
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else ""


class _Story:
    """One trial's story while it is told."""

    def __init__(self, teller: Storyteller, trial: str, iterations: Sequence[StoredIteration]) -> None:
        self._teller = teller
        self._history = teller.history
        self._named = partial(devices_name, kinds=teller.history.kinds)
        self._trial = trial
        self._iterations = [one for one in iterations if not one.source]
        self._shared = [one for one in iterations if one.source]
        self._entries = teller.history.of_trial.get(trial, [])
        self._budget = 0
        self._ended = False
        #: What the submitter said of the trial when it stopped it; empty before.
        self._outcome = ""
        self._last_stay: Stay | None = None
        self._tellers: dict[str, Callable[[Entry], StoryLine | None]] = {
            "GroupSubmitted": self._submitted,
            "TrialsAdded": self._submitted,
            "GroupRecovered": self._recovered,
            "NotePlaced": self._placed,
            "NoteQueued": self._queued,
            "NotePaused": self._paused,
            "NotePreempted": self._preempted,
            "NoteResize": self._resized,
            "NoteHung": self._hung,
            "ReportSetBack": self._set_back,
            "NoteTrial": lambda entry: StoryLine(entry.at, "told", str(entry.fields["text"])),
            "TrialSaved": self._saved,
            "TrialForked": self._forked,
            "BudgetExtended": self._extended,
            "StopRequested": self._stop,
            "PauseRequested": lambda entry: StoryLine(entry.at, "pause", "the user paused it"),
            "ResumeRequested": lambda entry: StoryLine(entry.at, "resume", "the user resumed it"),
            "ReportEnd": self._reported_end,
        }

    def lines(self) -> list[StoryLine]:
        found: list[StoryLine] = []
        for entry in self._entries:
            if (teller := self._tellers.get(entry.what)) is not None:
                found += _told(teller, entry)
        waits = WaitTeller(self._history, self._teller.names, self._teller.owner_of)
        for wait in self._history.waits.get(self._trial, ()):
            found += _told(waits.line, wait)
        found += fusing_ended(self._history, self._trial, self._iterations)
        found += self._stands()
        found += self._ran(found)
        found += shared_lines(self._shared, self._teller.name_of)
        # What waits and iterations began at the same time as an entry follows it.
        found.sort(key=lambda line: line.at)
        if not self._ended and self._entries:
            found.append(self._unfinished())
        return found

    def _stands(self) -> list[StoryLine]:
        """How its group stood with regard to its deadline, until the trial ended."""
        group = self._history.group_of.get(self._trial, "")
        if not self._entries or not (notes := self._history.lateness.get(group)):
            return []
        ends = [entry.at for entry in self._entries if entry.what == "ReportEnd"]
        last = ends[-1] if ends else math.inf
        return [line for note in notes if self._entries[0].at <= note.at < last for line in _told(_lateness, note)]

    # -- submitted, resumed, extended ----------------------------------------------------------------------

    def _submitted(self, entry: Entry) -> StoryLine:
        self._budget = int(entry.fields["budget"])
        text = f"submitted, to run {count(self._budget, 'iteration')}{needs_text(entry.fields)}"
        if isinstance(start := entry.fields.get("start"), Mapping):
            text += f"; {starts_from(start, self._teller.name_of)}"
        return StoryLine(entry.at, "submitted", text, {"iterations": self._budget})

    def _recovered(self, entry: Entry) -> StoryLine:
        self._budget = int(entry.fields["budget"])
        ended, checkpoint = entry.fields.get("ended"), entry.fields.get("checkpoint")
        self._ended = ended is not None
        if ended is not None:
            return StoryLine(entry.at, "resumed", f"the session was resumed; the trial had ended: {ended}")
        state = f"goes on {after_iteration(int(checkpoint['iteration']) if isinstance(checkpoint, Mapping) else 0)}"
        waits = "the user still had the trial paused" if entry.fields.get("paused") else "the trial waits again"
        return StoryLine(entry.at, "resumed", f"the session was resumed, and {waits}; it {state}")

    def _extended(self, entry: Entry) -> StoryLine:
        further = int(entry.fields["iterations"])
        self._budget, self._ended = self._budget + further, False
        text = f"given {count(further, 'more iteration')}, {self._budget} in all"
        return StoryLine(entry.at, "extended", text, {"iterations": self._budget})

    # -- waiting and starting ------------------------------------------------------------------------------

    def _placed(self, entry: Entry) -> StoryLine:
        fields, started = entry.fields, self._started_after(entry)
        iteration, devices = int(fields["iteration"]), tuple(fields["device_ids"])
        stay = self._history.stay_at(self._trial, entry.at) or Stay(self._trial, entry.at, fields["width"], devices)
        lanes = ", ".join(map(str, fields["lane_ids"]))
        where = f"on {self._named(devices)}, in lane{'s' * (len(devices) > 1)} {lanes}"
        moved, self._last_stay = self._moved(stay), stay
        facts: dict[str, Any] = {"devices": list(devices), "width": stay.width, "iteration": iteration}
        if fields.get("resident"):
            text = f"went on {where}, which had kept its state {after_iteration(iteration)}"
        else:
            source = f" from its checkpoint {after_iteration(iteration)}" if iteration else ""
            text = f"started {where}{source}{moved}"
            if started is not None:
                seconds = float(started.fields["seconds"])
                facts["set_up_s"], facts["waited_for_lane_s"] = seconds, max(0.0, started.at - entry.at - seconds)
                if (lane := facts["waited_for_lane_s"]) >= SHORTEST_WAIT:
                    text += f"; {self._before_set_up(entry, started, stay)} {duration(lane)}"
                text += f"; {set_up_words(iteration, started.fields)}"
        text += self._company(stay, fields.get("alpha")) + predicted_text(fields, facts)
        return StoryLine(entry.at, "started", text, facts)

    def _before_set_up(self, placed: Entry, started: Entry, stay: Stay) -> str:
        if not stay.warm:
            return "its lane was ready after"
        fetched = any(
            entry.what == "TrialSaved" and entry.fields.get("dropped") and placed.at <= entry.at <= started.at
            for entry in self._entries
        )
        return "its state was there after" if fetched else "its lane was free after"

    def _started_after(self, placed: Entry) -> Entry | None:
        """The end of the set-up that a placement began; ``None`` if it did not come to that."""
        later = [entry for entry in self._entries if entry.at >= placed.at]
        for entry in later[later.index(placed) + 1 :]:
            if entry.what == "TrialStarted":
                return entry
            if entry.what in ("NotePlaced", "NoteQueued", "NotePaused", "ReportEnd", "GroupRecovered"):
                return None
        return None

    def _moved(self, stay: Stay) -> str:
        before = self._last_stay
        if before is None or set(before.devices) == set(stay.devices):
            return ""
        return f", moved from {self._named(before.devices)}"

    def _company(self, stay: Stay, alpha: object) -> str:
        """Beside whom a packed trial runs, and what packing is measured to give."""
        if not stay.beside:
            return ""
        if stay.shares_lane:
            purpose = "take turns" if stay.takes_turns else "be fused"
            return f"; joins {self._teller.names(stay.joins)} there, to {purpose}"
        together = len(stay.beside) + 1
        text = f"; beside {self._teller.names(stay.beside)}"
        if isinstance(alpha, (int, float)) and alpha > 0.0:
            gain = together / float(alpha) ** (together - 1)
            text += f", as {together} at once get {gain:.2f}x as much done as one (alpha {alpha:.2f} so far)"
        return text

    # -- iterations ----------------------------------------------------------------------------------------

    def _ran(self, lines: Sequence[StoryLine]) -> list[StoryLine]:
        """Iterations, those between two lines as one; what a trial saved on the way is told with them."""
        cuts = sorted(line.at for line in lines if line.what != "waited")
        saves = [entry for entry in self._entries if entry.what == "TrialSaved" and not entry.fields.get("dropped")]
        runs: list[list[StoredIteration]] = []
        for iteration in self._iterations:
            before = runs[-1][-1] if runs else None
            if before is None or _where(before) != _where(iteration) or _cut_between(cuts, before, iteration):
                runs.append([iteration])
            else:
                runs[-1].append(iteration)
        found = []
        placed = sorted(line.at for line in lines if line.what in ("started", "resized"))
        for position, run in enumerate(runs):
            until = runs[position + 1][0].end if position + 1 < len(runs) else math.inf
            among = [save for save in saves if run[0].start <= save.at < until]
            # The lane's clock and the driver's may differ slightly, and no trial runs before it was placed.
            middle = bisect.bisect_right(placed, (run[0].start + run[0].end) / 2.0)
            since = placed[middle - 1] if middle else -math.inf
            alone = self._history.seconds_alone(self._trial, run[-1].end)
            found.append(ran_line(run, among, not_before=since, kinds=self._history.kinds, alone=alone))
        return found

    # -- resizes, saves, preemptions -----------------------------------------------------------------------

    def _resized(self, entry: Entry) -> StoryLine:
        fields, pause = entry.fields, float(entry.fields["seconds"])
        devices, width, gain = tuple(fields["device_ids"]), float(fields["width"]), fields.get("gain")
        old, realised = fields.get("old_width"), self._realised(entry, pause)
        self._last_stay = self._history.stay_at(self._trial, entry.at)
        facts: dict[str, Any] = {"devices": list(devices), "width": width, "pause_s": pause}
        if not isinstance(old, (int, float)):
            return StoryLine(entry.at, "resized", f"went to {size_name(width)}: {self._named(devices)}", facts)
        facts["old_width"] = old
        was = size_name(old) if old < 1.0 else f"{old:g}"
        text = f"{'widened' if width > old else 'narrowed'} from {was} to {size_name(width)} ({self._named(devices)})"
        text = f"moved to {self._named(devices)}" if width == old else text
        text += f", paused for {duration(pause)}"
        if isinstance(begun := fields.get("begun_at"), (int, float)) and fields["at"] - begun >= SHORTEST_WAIT:
            text += f", as decided {duration(fields['at'] - begun)} before"
        if isinstance(gain, (int, float)):
            facts["predicted_gain_s"] = gain
            text += f"; predicted to end {gained(gain)}"
        else:
            text += ", as it lost a lane"
        if realised is not None:
            seconds, ran = realised
            facts["realised_gain_s"], facts["iterations"] = seconds, ran
            text += f"; realised over the {count(ran, 'iteration')} that it then ran so: {gained(seconds)}"
        return StoryLine(entry.at, "resized", text, facts)

    def _realised(self, entry: Entry, pause: float) -> tuple[float, int] | None:
        """Seconds gained by a resize, and the iterations that it ran at the new width.

        These iterations at the median pace of the last ones before the resize, less what they took, less the pause.
        """
        next_resize = min(
            (each.at for each in self._entries if each.what == "NoteResize" and each.at > entry.at), default=math.inf
        )
        middle = [(iteration.start + iteration.end) / 2.0 for iteration in self._iterations]
        pairs = list(zip(middle, self._iterations, strict=True))
        before = [one.end - one.start for at, one in pairs if at < entry.at][-_PACE_OVER:]
        after = [one.end - one.start for at, one in pairs if entry.at <= at < next_resize]
        if not before or not after:
            return None
        return len(after) * statistics.median(before) - math.fsum(after) - pause, len(after)

    def _saved(self, entry: Entry) -> StoryLine | None:
        """A state that left its lane; other saves are told with the iterations."""
        if not entry.fields.get("dropped"):
            return None
        seconds, checkpoint = float(entry.fields["seconds"]), entry.fields["checkpoint"]
        lane, done = entry.fields["lane_id"], int(checkpoint["iteration"])
        text = f"its state {after_iteration(done)} was moved out of lane {lane}"
        text += f" to {medium_name(checkpoint)} in {duration(seconds)}"
        return StoryLine(entry.at, "saved", text, {"seconds": seconds, "path": checkpoint.get("path")})

    def _forked(self, entry: Entry) -> StoryLine:
        """The state from which it starts was saved for it, or could not be."""
        return forked_line(entry, self._teller.name_of)

    def _preempted(self, entry: Entry) -> StoryLine:
        successor, together = entry.fields.get("successor"), entry.fields.get("co_residents")
        if isinstance(successor, str):
            name, urgent = self._teller.name_of(successor), entry.fields.get("urgent_group") is not None
            text = f"preempted: pauses after its iteration for {name}, which takes its device over; all end earlier so"
            text = f"makes room for {name}, whose group is urgent: pauses after its iteration" if urgent else text
            return StoryLine(entry.at, "preempted", text, {"successor": name})
        text = f"leaves its device after its iteration: {together} trials at once get less done there than fewer"
        return StoryLine(entry.at, "preempted", text)

    # -- failures and ends ---------------------------------------------------------------------------------

    def _queued(self, entry: Entry) -> StoryLine | None:
        fields = entry.fields
        iteration, kind, why = int(fields["iteration"]), fields.get("kind"), str(fields["why"])
        if why in ("extended", "resumed by the user"):  # Another entry says so.
            return None
        facts = {"iteration": iteration, "kind": kind, "failures": fields.get("failures")}
        if why.startswith("starts from the state"):  # Another entry says so.
            return None
        if is_awaiting(why):
            return StoryLine(entry.at, "awaits", why, facts)
        if kind is None:
            event = "paused" if why.startswith(("waits to go on", "made room for")) else f"queued again ({why})"
            return StoryLine(entry.at, "queued", f"{event}; it goes on {after_iteration(iteration)}", facts)
        repeated = max((one.number for one in self._iterations if one.end <= entry.at), default=0) - iteration
        text = f"{_FAILED.get(str(kind), f'failed ({kind})')}, {why}; it goes on {after_iteration(iteration)}"
        text += f", and repeats {count(repeated, 'iteration')}" if repeated > 0 else ""
        return StoryLine(entry.at, "queued", f"{text}; log: {self._teller.log_of(self._trial)}", facts)

    def _paused(self, entry: Entry) -> StoryLine | None:
        """The trial rests; after a failure, that is told instead."""
        if entry.fields.get("kind") is not None:
            return self._queued(entry)
        on, why = after_iteration(int(entry.fields["iteration"])), why_paused(entry)
        text = why if is_elsewhere(entry) else f"{why}: it holds no device, and goes on {on} once resumed"
        return StoryLine(entry.at, "paused", text)

    def _hung(self, entry: Entry) -> StoryLine:
        seconds = float(entry.fields["seconds"])
        text = f"gave no result for {duration(seconds)}"
        if entry.fields.get("killed"):
            text += ", and its lane was killed"
        else:
            limit = entry.fields["limit"]
            then = "" if limit is None else f", and after {duration(float(limit))} its lane is killed"
            text += f"; its stacks are in its log{then}: {self._teller.log_of(self._trial)}"
        return StoryLine(entry.at, "hung", text, {"seconds": seconds})

    def _set_back(self, entry: Entry) -> StoryLine:
        checkpoint, lost = entry.fields.get("checkpoint"), int(entry.fields["lost"])
        kept = int(checkpoint["iteration"]) if isinstance(checkpoint, Mapping) else 0
        text = (
            f"its state {after_iteration(lost)} was lost: {entry.fields['reason']}; it goes on {after_iteration(kept)}"
        )
        return StoryLine(entry.at, "set_back", text, {"iteration": kept})

    def _stop(self, entry: Entry) -> StoryLine:
        outcome, now = entry.fields.get("outcome"), " at once" if entry.fields.get("now") else ""
        who = "its search algorithm" if self._teller.searched(self._trial) else "the submitter"
        if outcome is None:
            return StoryLine(entry.at, "stop", f"{who} stopped it{now}", {"by": who})
        self._outcome = str(outcome)
        text = f"{who} {_OUTCOMES.get(self._outcome, f'ended it as {outcome}')}{now}"
        return StoryLine(entry.at, "stop", text, {"by": who, "outcome": outcome})

    def _reported_end(self, entry: Entry) -> StoryLine:
        self._ended = True
        iteration, state, failure = int(entry.fields["iteration"]), str(entry.fields["state"]), entry.fields["failure"]
        verb = "left its lane" if state == "STOPPED" and self._outcome not in ("", "STOPPED") else state.lower()
        text = f"{verb} after {count(iteration, 'iteration')}"
        if isinstance(failure, Mapping):
            message = str(failure.get("message", "")).strip().splitlines()
            how = "is infeasible" if state == "INFEASIBLE" else f"failed for good ({failure.get('kind')})"
            text = f"{how}: {message[0] if message else ''}"
            text += f"; log: {self._teller.log_of(self._trial)}"
        return StoryLine(entry.at, "ended", text, {"state": state, "iteration": iteration})

    def _awaits(self) -> str | None:
        """What it waits for, whose state to start from was not there when the journal was read; ``None`` if it was."""
        specs = [entry.fields for entry in self._entries if entry.what in ("GroupSubmitted", "TrialsAdded")]
        start = specs[-1].get("start") if specs else None
        has_begun = self._iterations or self._shared or self._history.stays.get(self._trial)
        if not isinstance(start, Mapping) or has_begun or any(each.what == "TrialForked" for each in self._entries):
            return None
        return awaits_text(start, self._teller.name_of, self._history.done.get(str(start.get("parent")), 0))

    def _unfinished(self) -> StoryLine:
        at = max(self._history.end, max((one.end for one in self._iterations), default=-math.inf))
        if self._trial in self._history.paused:
            return StoryLine(at, "unfinished", "was paused by the user when the journal was read")
        if (waits := self._awaits()) is not None:
            return StoryLine(at, "unfinished", waits)
        if self._history.is_waiting(self._trial):
            return StoryLine(at, "unfinished", "waited for a device when the journal was read")
        stays = self._history.stays.get(self._trial, [])
        held = f", and held {self._named(stays[-1].devices)}" if stays and math.isinf(stays[-1].end) else ""
        return StoryLine(at, "unfinished", f"had not ended when the journal was read{held}")


def _lateness(entry: Entry) -> StoryLine:
    """How a group stood with regard to its deadline."""
    due, odds, earliest = (entry.fields.get(name) for name in ("due_s", "odds", "earliest_s"))
    facts = {"due_s": due, "odds": odds, "earliest_s": earliest}
    if entry.fields.get("missed"):
        return StoryLine(entry.at, "deadline", f"its group missed its deadline; {_BEHIND}", facts)
    text = f"the deadline of its group, in {duration(float(entry.fields['due_s']))}, "
    if entry.fields.get("can_be_met") is False:
        first = "" if earliest is None else f": if the group came first, it would end in {duration(float(earliest))}"
        return StoryLine(entry.at, "deadline", f"{text}cannot be met{first}; {_BEHIND}", facts)
    text += f"is met with {float(entry.fields['odds']):.0%} in the present order"
    return StoryLine(entry.at, "deadline", text, facts)


def _told(teller: Callable[[T], StoryLine | None], about: T) -> list[StoryLine]:
    """The line that a teller makes; none of an entry that is not as it should be."""
    try:
        line = teller(about)
    except UNUSABLE:
        return []
    return [] if line is None else [line]


def _where(iteration: StoredIteration) -> tuple[object, ...]:
    """What is equal of iterations that are told as one; that of fused ones changes with each that comes or goes."""
    return (iteration.devices, 0.0 if iteration.rows > 1 else iteration.width)


def _cut_between(cuts: Sequence[float], before: StoredIteration, after: StoredIteration) -> bool:
    """Whether a line of the story lies between the ends of two iterations; ``cuts`` are in order."""
    return bisect.bisect_left(cuts, before.end) < bisect.bisect_left(cuts, after.end)
