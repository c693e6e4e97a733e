"""Quick checks first: one iteration of what nothing is known of, at once (docs/theory.md, section 15).

A group of a profile key that was never measured may be a check of a minute behind a sweep of hours, or the other way
round: no order by the work that is left can say. It gets one iteration of one trial at once, its *quantum*: a running
trial of another owner pauses for it in place, on the device where that is soonest. Its person has a first result then,
and the engine knows its pace: if its owner comes first by that, or its group is more urgent, it keeps the device, and
else gives it back.

Quanta are few: one for each owner and profile key, and a tenth of the devices' time within an hour in all
(:mod:`fluid.policies.owners.quanta`). The worst case is an owner who submits ever new keys: it gets that tenth.

What it gains (``benchmarks/quick_checks.py``): a check of 60 s beside trials of 20 minutes ends after 90 s; it took
1,110 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fluid.engine.core import SessionState
from fluid.engine.events import IterationDone
from fluid.engine.policy import Policy
from fluid.engine.records import TrialRecord
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.policies.owners.quanta import QuantumAccount
from fluid.policies.owners.shares import GroupShares
from fluid.policies.urgent.rooms import is_pending, iteration_left, leaves
from fluid.trialgroup import TrialState


class _Clearing(NamedTuple):
    """A device that is being cleared for a quantum.

    Attributes:
        device: its index.
        victims: rows of the trials that were told to pause there.
    """

    device: int
    victims: tuple[int, ...]


class QuickChecks(Policy):
    """Clears devices for quanta, and decides after each who goes on there.

    Args:
        core: the state of the session.
        lifecycle: pauses trials.
        shares: ranks owners.
    """

    def __init__(self, core: SessionState, lifecycle: Lifecycle, shares: GroupShares) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._shares = shares
        self._account = QuantumAccount()
        #: The row of a trial of each owner and profile key of which nothing was known when it came.
        self._unknown: dict[tuple[int, str], int] = {}
        #: Owners and profile keys that had their quantum, of those that still are unknown.
        self._served: set[tuple[int, str]] = set()
        #: What is being cleared, by the row that waits; and what was, by the row that runs its quantum there.
        self._cleared: dict[int, _Clearing] = {}
        self._running: dict[int, _Clearing] = {}
        #: Those that have run it at this instant.
        self._over: dict[int, _Clearing] = {}

    # -- who has a quantum ---------------------------------------------------------------------------------

    def submitted(self, trial: TrialRecord) -> None:
        """Notes the first trial of an owner and a profile key."""
        self._unknown.setdefault((trial.owner, trial.spec.profile_key), trial.row)

    def after_starts(self) -> None:
        """Pauses trials where those of an unknown key wait, once all that fits has started."""
        for trial in self._waiting():
            chosen = None if self._may_begin_at() > self._core.now else self._choose(trial)
            if chosen is not None:
                self._clear(trial, *chosen)

    def _may_begin_at(self) -> float:
        return self._account.free_at(self._core.now, len(self._core.occupancy))

    def _waiting(self) -> list[TrialRecord]:
        """Trials that are to have a quantum, the most urgent first; none unless several owners have open trials."""
        core = self._core
        if not self._shares.ranks or not core.queue or core.drained:
            return []
        found = []
        for pair, row in list(self._unknown.items()):
            if pair in self._served:
                continue
            trial = core.trials.by_row.get(row) if row in core.queue else None
            if trial is None and row not in core.occupancy.held:
                trial = self._another(pair)  # The one that was noted is gone, or rests.
            if trial is not None and core.estimates.is_measured(trial):
                del self._unknown[pair]
            elif trial is not None and self._may_have_one(trial):
                found.append(trial)
        return sorted(found, key=lambda trial: (-trial.group_priority, trial.row))

    def _another(self, pair: tuple[int, str]) -> TrialRecord | None:
        """Notes another waiting trial of an owner and a profile key; forgets these if there is none."""
        trials = map(self._core.trials.by_row.__getitem__, self._core.queue)
        trial = next((each for each in trials if (each.owner, each.spec.profile_key) == pair), None)
        if trial is None:
            del self._unknown[pair]
        else:
            self._unknown[pair] = trial.row
        return trial

    def _pair_of(self, trial: TrialRecord) -> tuple[int, str]:
        """The owner and the profile key under which a trial was noted: it may be of a part of that key by now."""
        noted = (pair for pair, row in self._unknown.items() if row == trial.row)
        return next(noted, (trial.owner, trial.spec.profile_key))

    @staticmethod
    def _may_have_one(trial: TrialRecord) -> bool:
        """Whether a trial can run an iteration on one device that is cleared for it.

        A gang needs several at once. One that has a state goes on where that is.
        """
        if trial.restored_for_call or trial.calls or trial.residence.lane is not None:
            return False
        return trial.progress.done == 0 and (trial.fixed_width or 1) <= 1

    # -- where ---------------------------------------------------------------------------------------------

    def _choose(self, coming: TrialRecord) -> tuple[int, list[TrialRecord]] | None:
        """The device on which iterations end first, and the trials to pause there; ``None`` if none can be cleared.

        Nor is one cleared while an idle one would do: the newcomer waits for memory there, or for a better device.
        """
        core, occupancy = self._core, self._core.occupancy
        allowed, kept = core.scheduling.placing.allowed(coming), core.policies.all_kept_devices()
        best: tuple[float, int, int] | None = None
        victims: list[TrialRecord] = []
        for device, rows in occupancy.residents.items():
            if occupancy.is_closed(device) or (allowed is not None and device not in allowed):
                continue
            if not rows:
                return None
            usable, need = core.memory.usable_bytes(device), core.estimates.need_on(coming, device)
            if device in kept or (usable is not None and need is not None and need.peak_bytes > usable):
                continue
            there = [core.trials.by_row.get(row) for row in rows]
            trials = [each for each in there if each is not None and (_ends(each) or self._may_pause(each, coming))]
            if len(trials) < len(there):
                continue
            pausing = [each for each in trials if not _ends(each)]
            cost = max(iteration_left(core, each) for each in trials), len(pausing), device
            if best is None or cost < best:
                best, victims = cost, pausing
        return None if best is None else (best[2], victims)

    def _may_pause(self, trial: TrialRecord, coming: TrialRecord) -> bool:
        """Whether a running trial may make room: in its lane, without losing anything, and for another owner's.

        Left out are gangs and wide ones, whose pause costs more than an iteration (the engine narrows these as others
        wait). On a device whose memory is counted the state has to be able to leave it.
        """
        core, place = self._core, trial.placement
        if trial.state is not TrialState.RUNNING or place.preemption is not None or place.move is not None:
            return False
        if trial.spec.gang or len(place.lanes) > 1 or trial.calls:
            return False
        if trial.owner == coming.owner or trial.row in core.stepping:
            return False
        if trial.group_priority >= coming.group_priority and (
            self._shares.policy == "fifo"  # an explicit wish for the order of arrival
            or trial.group_priority > coming.group_priority
        ):
            return False
        (device,) = core.occupancy.held[trial.row]
        can_leave = trial.spec.can_save or core.memory.usable_bytes(device) is None
        return can_leave and self._shares.can_wait(trial.owner)

    def _clear(self, coming: TrialRecord, device: int, victims: list[TrialRecord]) -> None:
        core = self._core
        self._served.add(self._pair_of(coming))
        self._cleared[coming.row] = _Clearing(device, tuple(each.row for each in victims))
        if coming.width > 1.0:  # It is widened later if that pays.
            core.scheduling.withdraw(coming)
            core.scheduling.enqueue(coming, 1.0)
        core.note(coming, f"gets device {device} for one iteration, as nothing is known of its like")
        for each in victims:
            self._lifecycle.preempt(each, coming)
            core.note(each, f"makes room for one iteration of {coming.trial_id!r}, of which nothing is known")

    @property
    def wait_until(self) -> float | None:
        """From when on another quantum may begin, while one waits for that."""
        at = self._may_begin_at()
        return at if self._core.now < at < math.inf and self._waiting() else None

    # -- devices that are kept -----------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Keeps devices no longer for trials that have started, are gone, or turned out not to fit there."""
        is_free = False
        for row, clearing in list(self._cleared.items()):
            if self._is_being_cleared(row, clearing.device):
                continue
            del self._cleared[row]
            is_free = True
            if row in self._core.queue and not clearing.victims:
                self._served.discard(self._pair_of(self._core.trials.by_row[row]))  # No trial has paused in vain.
        return is_free

    def _is_being_cleared(self, row: int, device: int) -> bool:
        core, occupancy = self._core, self._core.occupancy
        if row not in core.queue or device not in occupancy.residents or occupancy.is_closed(device):
            return False
        there = [core.trials.by_row.get(each) for each in occupancy.residents[device]]
        return any(each is not None and _ends(each) for each in there) or is_pending(core, device)

    @property
    def keeps_devices(self) -> bool:
        """Whether devices are kept for quanta."""
        return bool(self._cleared or self._running)

    @property
    def kept_devices(self) -> frozenset[int]:
        """The devices that are cleared, and those on which quanta run: alone, so that their seconds tell the pace."""
        return frozenset(each.device for kept in (self._cleared, self._running) for each in kept.values())

    def forbidden_to(self, trial: TrialRecord) -> frozenset[int]:
        """Those that are kept for other trials than this one.

        A row of a pack that has paused waits for its device, or an idle one: nothing parts it again from a pack that it
        joins elsewhere, which is the slower from then on.
        """
        own = self._cleared.get(trial.row) or self._running.get(trial.row)
        kept = self.kept_devices
        if trial.is_fused and any(
            trial.row in each.victims for each in (*self._cleared.values(), *self._running.values())
        ):
            kept |= {device for device, rows in self._core.occupancy.residents.items() if rows}
        return kept if own is None else kept - {own.device}

    # -- the quantum ---------------------------------------------------------------------------------------

    def placed(self, trial: TrialRecord) -> None:
        """A trial for which a device was cleared begins there, with one iteration; elsewhere it needs no quantum."""
        clearing = self._cleared.get(trial.row)
        if clearing is not None and self._core.occupancy.held[trial.row] == (clearing.device,):
            self._running[trial.row] = self._cleared.pop(trial.row)
            self._core.stepping.add(trial.row)
            self._account.begin(trial.row, self._core.now)

    def iterated(self, trial: TrialRecord, event: IterationDone, observed: int) -> None:
        """The iteration of a quantum is done."""
        if trial.row in self._running:
            self._over[trial.row] = self._end(trial)

    def left(self, trial: TrialRecord) -> None:
        """A trial has left its device, maybe before it had done its iteration."""
        if trial.row in self._running:
            self._end(trial)

    def _end(self, trial: TrialRecord) -> _Clearing:
        self._account.end(trial.row, self._core.now)
        self._core.stepping.discard(trial.row)
        self._core.changed = True  # The device is not kept any more.
        return self._running.pop(trial.row)

    def after_events(self) -> None:
        """Decides who goes on where a quantum is over: what was a guess is measured now."""
        if not self._over:
            return
        self._shares.rank_anew()
        for row, clearing in self._over.items():
            trial = self._core.trials.by_row.get(row)
            if trial is not None and trial.state is TrialState.RUNNING and trial.placement.preemption is None:
                self._go_on(trial, clearing)
        self._over.clear()

    def _go_on(self, trial: TrialRecord, clearing: _Clearing) -> None:
        """Lets a trial keep its device after its quantum, or gives that back to the trial that had paused."""
        core = self._core
        back = next((core.trials.by_row[row] for row in clearing.victims if row in core.queue), None)
        first = back is None or trial.group_priority > back.group_priority
        if back is None or first or self._shares.is_before(trial.owner, back.owner):
            core.top_up(trial)
            return
        self._lifecycle.preempt(trial, back)
        core.note(trial, f"has run the iteration that it was to be known by, and gives its device to {back.trial_id!r}")

    def problems(self) -> Iterator[str]:
        """Trials of an unknown key that wait though another owner's could pause, and the account allows it."""
        core = self._core
        for trial in self._waiting():
            if self._may_begin_at() <= core.now and self._choose(trial) is not None:
                yield f"{trial.trial_id!r}, of which nothing is known, waits, and nothing makes room for an iteration"
        for row, clearing in self._running.items():
            if row not in core.stepping or core.occupancy.held.get(row) != (clearing.device,):
                yield f"row {row} is in a quantum and not on device {clearing.device}"
        if len(core.stepping) != len(self._running):
            yield f"{len(core.stepping)} trials run one iteration, and {len(self._running)} are in a quantum"


def _ends(trial: TrialRecord) -> bool:
    """Whether a trial leaves its device after its iteration in any case."""
    return leaves(trial) or (trial.state is TrialState.RUNNING and trial.progress.left <= 1 and not trial.calls)
