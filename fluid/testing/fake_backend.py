"""A fake backend: its lanes answer the engine, fail and die at random, one step at a time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from fluid.engine.commands import (
    Answer,
    Call,
    Command,
    DumpStacks,
    Fork,
    ForkSaved,
    KillLane,
    LimitMemory,
    LimitRows,
    Notice,
    Pause,
    Persist,
    PrefetchCheckpoint,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
    ValueCheckpoints,
)
from fluid.engine.events import (
    Checkpoint,
    CleanUpLasts,
    Event,
    Failure,
    FusionLimited,
    IterationDone,
    LaneLost,
    LaneMeasured,
    LaneOutdated,
    LaneReady,
    LaneSpent,
    ResizeDone,
    SavabilityChanged,
    StateMeasured,
    TrialAsked,
    TrialCalled,
    TrialFailed,
    TrialForked,
    TrialNotKept,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialSpec,
    TrialStarted,
)
from fluid.keeping import Kept
from fluid.resources import MemoryNeed
from fluid.testing.fake_packs import Hosted, Rows, shape_of
from fluid.trainables.encoded_metrics import encode_metrics

#: (persistent, ephemeral) bytes as they may be measured, on devices of 100.
MEASURED = [(30.0, 10.0), (10.0, 5.0), (40.0, 30.0)]
#: How many times as long as others trials take: cohorts.
SIZES = (1, 1, 4, 1, 2)


@dataclass
class Lane:
    """A lane: commands wait in its inbox, events in its outbox."""

    device_id: int
    ready: bool = False
    dead: bool = False
    inbox: deque[Command] = field(default_factory=deque)
    outbox: deque[Event] = field(default_factory=deque)
    hosted: dict[str, Hosted] = field(default_factory=dict)
    #: trials that it was told to set up
    seen: set[str] = field(default_factory=set)
    rows: Rows = field(default_factory=Rows)


@dataclass
class Chances:
    """Probabilities of mishaps, each time one could happen."""

    fail: float = 0.0
    out_of_memory: float = 0.0
    finish: float = 0.0
    save_fails: float = 0.0
    false_start: float = 0.0
    #: That an exception leaves the lane's device unusable.
    device: float = 0.0
    own_save: float = 0.0
    hang: float = 0.0
    damaged: float = 0.0
    memory: float = 0.0
    #: Bytes that lanes take for themselves; not a chance.
    own_bytes: float = 0.0
    ask: float = 0.0
    #: That a state cannot be saved, or can be again, or that only an earlier one can.
    unsavable: float = 0.0
    #: That a trial whose spec says that it can be fused cannot.
    unlike: float = 0.0
    #: That trials refuse to be fused, or that fewer of them fit, in a step of several.
    refuse: float = 0.0
    #: That a step of several trials ends the lane.
    die: float = 0.0
    #: That a step changes the lane's process for good.
    spend: float = 0.0
    #: That, with a step, lanes that start from now on have more modules loaded than those that there are.
    outdate: float = 0.0
    #: That the clean-up of a trial that is stopped lasts.
    clean_up: float = 0.0


class FakeBackend:
    """Carries commands out in :meth:`work`, and reports them in :meth:`collect`."""

    def __init__(self, rng: random.Random, chances: Chances | None = None) -> None:
        self.rng = rng
        self.chances = chances or Chances()
        self.now = 0.0
        self.lanes: dict[int, Lane] = {}
        #: lanes that were ended, and of which not everything was heard yet
        self.gone: list[Lane] = []
        #: trial -> iterations done, which rank 0 tells the others
        self.progress: dict[str, int] = {}
        #: what hosts are asked to copy, and say of that
        self.copies = Lane(-1, ready=True)
        #: machine of each device
        self.hosts: dict[int, str] = {}
        #: speed of each device that has another than 1
        self.speeds: dict[int, float] = {}
        #: (trial, call) -> iterations done when the method was called, each time it was
        self.called: dict[tuple[str, int], list[int]] = {}
        self.requests = 0
        #: trial -> iterations done by the state of another one from which it starts
        self.starts: dict[str, int] = {}
        #: trial -> what the engine knows of it
        self.specs: dict[str, TrialSpec] = {}
        #: trial -> its fusion key, which is the same in all lanes
        self.fusion_keys: dict[str, str | None] = {}
        #: most trials that the engine may run at once in one lane
        self.max_fused = 1
        #: most trials that take turns on a device
        self.most_turns = 1
        #: seconds of a step of k trials are k to this power times those of one
        self.fused_power = 0.5
        #: steps of so many trials
        self.fused_steps: Counter[int] = Counter()

    # -- what the engine asks ------------------------------------------------------------------------------

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out: lanes find them in their inboxes."""
        for command in commands:
            if isinstance(command, StartLane):
                assert command.lane_id not in self.lanes
                self.lanes[command.lane_id] = Lane(command.device_id)
            elif isinstance(command, StopLane):
                self._remove(command.lane_id)
            elif isinstance(command, KillLane):
                self._kill(command)
            elif isinstance(command, Resize) and self._refuses(command):
                pass
            elif isinstance(command, Resize):
                for lane_id in dict.fromkeys((*command.lane_ids, *command.old_lane_ids)):
                    self._post(lane_id, command)
            elif isinstance(command, (ValueCheckpoints, PrefetchCheckpoint)):
                pass  # There are no stores.
            elif isinstance(command, (Persist, ForkSaved)):
                self.copies.inbox.append(command)
            elif isinstance(command, LimitRows):
                self._post(command.lane_id, command)
            elif isinstance(command, (StartTrial, RunIteration, Pause, Save, Fork, StopTrial, Call)):
                for lane_id in command.lane_ids:
                    self._post(lane_id, command)
            elif isinstance(command, LimitMemory):
                assert command.limit_bytes is None or command.limit_bytes > 0.0
                self._post(command.lane_ids[0], command)
            elif isinstance(command, Answer):
                self._take_answer(command)
            else:
                assert isinstance(command, (Notice, DumpStacks))

    def _post(self, lane_id: int, command: Command) -> None:
        lane = self.lanes.get(lane_id)
        if lane is not None and not lane.dead:
            assert lane.ready, f"{command} was sent to a lane that is not ready"
            lane.inbox.append(command)

    def _remove(self, lane_id: int) -> None:
        lane = self.lanes.pop(lane_id, None)
        if lane is not None:
            lane.dead = True
            self.gone.append(lane)

    def _take_answer(self, command: Answer) -> None:
        lane = self.lanes.get(command.lane_id)
        hosted = None if lane is None else lane.hosted.get(command.trial_id)
        if hosted is not None and hosted.asking == command.request_id:
            hosted.asking = None

    @staticmethod
    def _waits(lane: Lane, trial_id: str, hosted: Hosted) -> bool:
        """Whether a trial's code waits for an answer; a request of a trial that is stopped is refused."""
        told = (isinstance(command, StopTrial) and command.trial_id == trial_id for command in lane.inbox)
        if hosted.asking is not None and any(told):
            hosted.asking = None
        return hosted.asking is not None

    # -- what lanes do -------------------------------------------------------------------------------------

    def kill(self, lane_id: int) -> None:
        """SIGKILL."""
        lane = self.lanes[lane_id]
        called = next((command.trial_id for command in lane.inbox if isinstance(command, Call)), None)
        running = lane.rows.next_step(lane_id, lane.hosted)
        known = self.rng.random() < (0.3 if len(running) < 2 else 0.1)
        culprit = self.rng.choice(running or [called]) if known else None
        lane.dead = True
        lane.inbox.clear()
        lane.hosted.clear()
        blameless = culprit is None and self.rng.random() < 0.3
        lane.outbox.append(LaneLost(self.now, lane_id, "killed", culprit=culprit, blameless=blameless))

    def _kill(self, command: KillLane) -> None:
        lane = self.lanes.get(command.lane_id)
        if lane is not None and not lane.dead:
            lane.dead = True
            lane.inbox.clear()
            lane.hosted.clear()
            lane.outbox.append(LaneLost(self.now, command.lane_id, command.reason))

    def work(self, lane_id: int) -> None:
        """One step of a lane: all its messages, then one iteration."""
        lane = self.lanes[lane_id]
        if lane.dead:
            return
        self.now += 0.01
        if not lane.ready:
            if self._happens(self.chances.false_start):
                lane.dead = True
                position = self.rng.choice([None, 0])
                lane.outbox.append(LaneLost(self.now, lane_id, "did not start", failed_position=position))
            else:
                lane.ready = True
                lane.outbox.append(
                    LaneReady(self.now, lane_id, self.chances.own_bytes * self.rng.choice([0.0, 0.5, 1.0]))
                )
            return
        if any(hosted.hung or self._waits(lane, name, hosted) for name, hosted in lane.hosted.items()):
            return
        while lane.inbox:
            self._obey(lane_id, lane, lane.inbox.popleft())
        for trial_id in lane.hosted:
            if self._happens(self.chances.memory):
                held = 1.5 * self.rng.choice(MEASURED)[0] * self.rng.random()
                lane.outbox.append(StateMeasured(self.now, trial_id, lane_id, held))
        names = lane.rows.next_step(lane_id, lane.hosted)
        if names:
            self._step(lane_id, lane, names)
            if not lane.dead and self._happens(self.chances.spend):
                lane.outbox.append(LaneSpent(self.now, lane_id, "a thread of a trial goes on"))
            if not lane.dead and self._happens(self.chances.outdate):
                lane.outbox += [LaneOutdated(self.now, other) for other in self.lanes]
            if not lane.dead and self.chances.own_bytes and self._happens(0.2):
                lane.outbox.append(LaneMeasured(self.now, lane_id, self.chances.own_bytes * self.rng.random()))

    def _check_company(self, lane_id: int, lane: Lane) -> None:
        """Only trials that may be fused run at once in one lane, and no more of them than the engine may fuse."""
        trials = lane.hosted.items()
        running = {name: each for name, each in trials if each.left and not each.finished and each.lanes[0] == lane_id}
        if len(running) > 1 and self.most_turns > 1:
            assert len(running) <= max(self.max_fused, self.most_turns), f"lane {lane_id} is to run {list(running)}"
            assert all(hosted.lanes == (lane_id,) for hosted in running.values()), f"one of {running} is wide"
        elif len(running) > 1:
            assert len(running) <= self.max_fused, f"lane {lane_id} is to run {list(running)} at once"
            known = [self.specs[name] for name in running if name in self.specs]  # not those of an earlier session
            assert all(spec.fusible for spec in known), f"{list(running)} cannot be fused"
            assert all(hosted.lanes == (lane_id,) for hosted in running.values()), f"one of {running} is wide"

    def _admit(self, lane_id: int, lane: Lane, trial_id: str) -> None:
        """A trial that is to have a process of its own is set up where none was, itself included; others elsewhere."""
        known = (name for name in (trial_id, *lane.seen) if name in self.specs)  # not those of an earlier session
        if any(self.specs[name].isolated for name in known):
            assert not lane.seen, f"{trial_id} is to be set up in lane {lane_id}, which has seen {lane.seen}"
        lane.seen.add(trial_id)

    def _obey(self, lane_id: int, lane: Lane, command: Command) -> None:
        if isinstance(command, StartTrial):
            done = command.checkpoint.iteration if command.checkpoint else 0
            if command.lane_ids[0] == lane_id and command.checkpoint and self._happens(self.chances.damaged):
                done = self._set_back(lane_id, lane, command.trial_id, command.checkpoint)
            key = self._fusion_key(command.trial_id)
            self._admit(lane_id, lane, command.trial_id)
            is_broken = command.must_restore and (not done or self._happens(self.chances.damaged))
            if is_broken and command.lane_ids[0] == lane_id:
                broken = Failure("error", "its state cannot be restored")
                lane.outbox.append(TrialFailed(self.now, command.trial_id, lane_id, broken))
                return
            lane.hosted[command.trial_id] = Hosted(command.lane_ids, done, fusion_key=key)
            if command.lane_ids[0] != lane_id:
                return
            self.progress[command.trial_id] = done
            if not self._fails(lane_id, lane, command.trial_id):
                lane.hosted[command.trial_id].left = command.iterations
                lane.outbox.append(
                    TrialStarted(self.now, command.trial_id, lane_id, iteration=done, seconds=0.1, fusion_key=key)
                )
                self._check_company(lane_id, lane)
            return
        if isinstance(command, Resize):
            self._move(lane_id, lane, command)
            return
        if isinstance(command, LimitRows):
            assert 1 <= command.rows <= self.max_fused, command
            lane.rows.limit = command.rows
            return
        trial_id: str = command.trial_id  # type: ignore[attr-defined]
        hosted = lane.hosted.get(trial_id)
        if hosted is None:
            return
        if isinstance(command, RunIteration):
            hosted.lanes = command.lane_ids
            hosted.left += command.iterations
            self._check_company(lane_id, lane)
        elif isinstance(command, Pause) and hosted.lanes[0] == lane_id:
            hosted.left = 0
            lane.outbox.append(TrialPaused(self.now, trial_id, lane_id, iteration=hosted.done, purpose=command.purpose))
        elif isinstance(command, StopTrial):
            if command.keep and hosted.lanes[0] == lane_id and hosted.done:
                self._keep(lane_id, lane, trial_id, Checkpoint(hosted.done, f"{trial_id}/{hosted.done}"))
            del lane.hosted[trial_id]
            if self._happens(self.chances.clean_up):
                lane.outbox.append(CleanUpLasts(self.now, trial_id, lane_id, self.now - 10.0 * self.rng.random()))
            lane.outbox.append(TrialReleased(self.now, trial_id, lane_id))
        elif isinstance(command, Call):
            assert hosted.lanes[0] == lane_id, "a lane that is not rank 0's is asked"
            assert command.call_id not in hosted.called, "it was told twice"
            hosted.called.append(command.call_id)
            self.called.setdefault((trial_id, command.call_id), []).append(hosted.done)
            failure = Failure("error", "it raised") if self._happens(self.chances.fail) else None
            result = None if failure else command.payload
            lane.outbox.append(
                TrialCalled(self.now, trial_id, lane_id, call_id=command.call_id, result=result, failure=failure)
            )
        elif isinstance(command, Save):
            self._save(lane_id, lane, trial_id, hosted, command)
        elif isinstance(command, Fork):
            assert hosted.lanes[0] == lane_id, "a lane that is not rank 0's is asked"
            hosted.forks.append(command)
            self._fork(lane_id, lane, trial_id, hosted)

    def _set_back(self, lane_id: int, lane: Lane, trial_id: str, wanted: Checkpoint) -> int:
        """The checkpoint is damaged; returns the iteration of the one that is used instead."""
        older = self.rng.randrange(self.starts.get(trial_id, 0), wanted.iteration + 1)
        checkpoint = Checkpoint(older, f"{trial_id}/{older}", in_memory=self.rng.random() < 0.5) if older else None
        cannot_load = checkpoint is None and self.rng.random() < 0.3
        lane.outbox.append(
            TrialSetBack(self.now, trial_id, lane_id, checkpoint=checkpoint, reason="damaged", cannot_load=cannot_load)
        )
        return older

    def _move(self, lane_id: int, lane: Lane, command: Resize) -> None:
        lane.hosted.pop(command.trial_id, None)
        if lane_id in command.lane_ids and lane_id not in command.old_lane_ids:
            self._admit(lane_id, lane, command.trial_id)
        if lane_id not in command.lane_ids:
            return
        key = self._fusion_key(command.trial_id)
        lane.hosted[command.trial_id] = Hosted(command.lane_ids, self.progress[command.trial_id], fusion_key=key)
        if lane_id == command.lane_ids[0] and command.done is not None:
            self._tell_what_was_reported(command.trial_id, lane)
        if lane_id != command.lane_ids[0] or self._fails(lane_id, lane, command.trial_id):
            return
        done = self.progress[command.trial_id]
        unheard = 0 if command.done is None else done - command.done
        lane.hosted[command.trial_id].left = max(0, command.iterations - unheard)
        migrates = len(command.lane_ids) == len(command.old_lane_ids) == 1 and not unheard
        if migrates and self._happens(self.chances.damaged):
            wanted = Checkpoint(done, f"{command.trial_id}/{done}")
            older = self._set_back(lane_id, lane, command.trial_id, wanted)
            lane.hosted[command.trial_id].done = self.progress[command.trial_id] = older
        self._check_company(lane_id, lane)
        lane.outbox.append(ResizeDone(self.now, command.trial_id, 0.05, lane_id))

    def _tell_what_was_reported(self, trial_id: str, lane: Lane) -> None:
        """What lanes that are gone had reported of a trial comes before what is reported of it now."""
        for other in self.gone:
            known = [event for event in other.outbox if isinstance(event, IterationDone) and event.trial_id == trial_id]
            lane.outbox.extend(known)
            other.outbox = deque(event for event in other.outbox if event not in known)

    def _fork(self, lane_id: int, lane: Lane, trial_id: str, hosted: Hosted) -> None:
        """Between two iterations: saves a trial for those that start from the state that it is in."""
        for fork in list(hosted.forks):
            wanted = hosted.done if fork.at is None else fork.at
            if wanted > hosted.done and not hosted.finished:
                continue
            hosted.forks.remove(fork)
            forked = TrialForked(self.now, fork.child, parent=trial_id, lane_id=lane_id)
            if wanted != hosted.done:
                is_past = wanted < hosted.done
                forked = structs.replace(forked, problem=f"it has done {hosted.done} iterations", is_past=is_past)
            elif self._happens(self.chances.unsavable):
                forked = structs.replace(forked, problem="cannot pickle 'lock'", cannot=True)
            else:
                host = self.hosts.get(lane.device_id, "localhost")
                forked = self._made(forked, Checkpoint(wanted, "", host, self.rng.random() < 0.5))
            lane.outbox.append(forked)

    def _made(self, forked: TrialForked, state: Checkpoint) -> TrialForked:
        """Says that a trial can start from a copy of a state, or that the copy could not be made."""
        if self._happens(self.chances.save_fails):
            return structs.replace(forked, problem="the disk is full")
        self.starts[forked.trial_id] = state.iteration
        return structs.replace(forked, checkpoint=replace(state, path=f"{forked.trial_id}/{state.iteration}"))

    def copy(self) -> None:
        """Has hosts do the oldest of what they are asked."""
        if not self.copies.inbox:
            return
        command = self.copies.inbox.popleft()
        if isinstance(command, ForkSaved):
            forked = TrialForked(self.now, command.trial_id, parent=command.parent, lane_id=None)
            self.copies.outbox.append(self._made(forked, command.checkpoint))
            return
        assert isinstance(command, Persist)
        fails = self._happens(self.chances.save_fails)
        if command.keep:
            self._keep(None, self.copies, command.trial_id, command.checkpoint, fails)
        else:
            copy = replace(command.checkpoint, in_memory=fails)
            self.copies.outbox.append(TrialSaved(self.now, command.trial_id, None, copy, copied=True))

    def _keep(
        self, lane_id: int | None, lane: Lane, trial_id: str, checkpoint: Checkpoint, fails: bool = False
    ) -> None:
        """Saves a trial for good, or says that it was not."""
        if fails:
            no = TrialNotKept(self.now, trial_id, iteration=checkpoint.iteration, reason="the disk is full")
            lane.outbox.append(no)
            return
        host = checkpoint.host if lane_id is None else self.hosts.get(lane.device_id, "localhost")
        kept = replace(checkpoint, path=f"kept/{checkpoint.path}", host=host, in_memory=False)
        lane.outbox.append(TrialSaved(self.now, trial_id, lane_id, kept, kept=Kept(9), copied=lane_id is None))

    def _refuses(self, command: Resize) -> bool:
        """Whether the lane of a trial that is to go to another one cannot save it, so that it stays."""
        (old, *others), (new, *further) = command.old_lane_ids, command.lane_ids
        lane = self.lanes.get(old)
        if others or further or old == new or lane is None or lane.dead or command.trial_id not in lane.hosted:
            return False
        if not self._happens(self.chances.unsavable):
            return False
        lane.outbox.append(self._savability(command.trial_id, old, can_save=False, refuses=True))
        return True

    def _savability(self, trial_id: str, lane_id: int, *, can_save: bool, refuses: bool = False) -> SavabilityChanged:
        reason = "" if can_save else "cannot pickle 'lock'"
        return SavabilityChanged(self.now, trial_id, lane_id, can_save=can_save, reason=reason, refuses=refuses)

    def _save(self, lane_id: int, lane: Lane, trial_id: str, hosted: Hosted, command: Save) -> None:
        if command.keep:
            checkpoint = Checkpoint(hosted.done, f"{trial_id}/{hosted.done}")
            self._keep(lane_id, lane, trial_id, checkpoint, self._happens(self.chances.save_fails))
            return
        if self._happens(self.chances.save_fails):
            del lane.hosted[trial_id]
            lane.outbox.append(TrialFailed(self.now, trial_id, lane_id, Failure("error", "could not be saved")))
            return
        if self._happens(self.chances.unsavable):
            lane.outbox.append(self._savability(trial_id, lane_id, can_save=False, refuses=True))
            return
        if command.drop:
            del lane.hosted[trial_id]
        in_memory = self.rng.random() < 0.5 and not command.durable
        done = hosted.done - (hosted.done > 1 and self._happens(self.chances.unsavable))
        checkpoint = Checkpoint(
            done,
            f"{trial_id}/{done}",
            host=self.hosts.get(lane.device_id, "localhost"),
            in_memory=in_memory,
        )
        lane.outbox.append(TrialSaved(self.now, trial_id, lane_id, checkpoint, dropped=command.drop))

    def _size(self, trial_id: str) -> float:
        """How many times as long as others a trial takes, by its config."""
        spec = self.specs.get(trial_id)
        return float(dict(spec.config).get("size", 1.0)) if spec is not None else 1.0

    def _fusion_key(self, trial_id: str) -> str | None:
        if trial_id not in self.fusion_keys:
            spec = self.specs.get(trial_id)
            unlike = spec is None or (spec.fusible and self._happens(self.chances.unlike))
            self.fusion_keys[trial_id] = None if spec is None or unlike else shape_of(spec)
        return self.fusion_keys[trial_id]

    def _step(self, lane_id: int, lane: Lane, names: list[str]) -> None:
        """An iteration of one trial, or of several together."""
        hosted = [lane.hosted[name] for name in names]
        if any(peer not in self.lanes or self.lanes[peer].dead for peer in hosted[0].lanes):
            lane.rows.count_step(names, lane.hosted)
            return  # it hangs
        which = self.rng.randrange(len(names)) if len(names) > 1 else 0
        trial_id, one = names[which], hosted[which]
        if not one.finished and self._happens(self.chances.hang):  # Else the lane answers by itself.
            one.hung = True
            return
        if self._happens(self.chances.ask):
            self.requests += 1
            one.asking = self.requests
            lane.outbox.append(TrialAsked(self.now, trial_id, lane_id, request_id=self.requests, payload=b"ask"))
            return
        if len(names) > 1 and self._is_refused(lane_id, lane, names):
            return
        if self._fails(lane_id, lane, trial_id):
            names = [name for name in names if name != trial_id and not lane.dead]
            if not names or self.rng.random() < 0.5:
                return  # The others take the step anew.
        settled = lane.rows.count_step(names, lane.hosted)
        if len(names) > 1:
            self.fused_steps[len(names)] += 1
        stretch = len(names) ** self.fused_power
        seconds = stretch * self.rng.choice([0.1, 0.11, 0.12]) / self.speeds.get(lane.device_id, 1.0)
        seconds *= self._size(names[0])
        for name in names:
            self._end_iteration(lane_id, lane, name, seconds, len(names), settled)

    def _is_refused(self, lane_id: int, lane: Lane, names: list[str]) -> bool:
        """Whether several trials do not take a step together after all: fewer can, or the lane dies of it."""
        if self._happens(self.chances.die):
            self.kill(lane_id)
            return True
        if not self._happens(self.chances.refuse):
            return False
        rows = self.rng.choice([1, max(1, len(names) // 2)])
        key = lane.hosted[names[0]].fusion_key
        assert key is not None
        lane.rows.found[key] = rows
        reason = "they differ from trials alone" if rows == 1 else "out of memory"
        lane.outbox.append(FusionLimited(self.now, self.rng.choice(names), lane_id, rows=rows, reason=reason))
        return True

    def _end_iteration(self, lane_id: int, lane: Lane, trial_id: str, seconds: float, rows: int, settled: bool) -> None:
        hosted = lane.hosted[trial_id]
        if hosted.finished or self._happens(self.chances.finish):
            hosted.done += not hosted.finished and self.rng.random() < 0.5
            hosted.finished, hosted.left = True, 0
            lane.outbox.append(
                IterationDone(
                    self.now,
                    trial_id,
                    lane_id,
                    iteration=hosted.done,
                    seconds=seconds,
                    finished=True,
                    rows=rows,
                    settled=settled,
                )
            )
            self._fork(lane_id, lane, trial_id, hosted)
            return
        hosted.done += 1
        hosted.left -= 1
        self.progress[trial_id] = hosted.done
        memory = None
        if self._happens(self.chances.memory):
            persistent, ephemeral = self.rng.choice(MEASURED)
            memory = MemoryNeed(persistent * self._size(trial_id) / 2.0, ephemeral)
        lane.outbox.append(
            IterationDone(
                self.now,
                trial_id,
                lane_id,
                iteration=hosted.done,
                seconds=seconds,
                metrics=encode_metrics({"done": hosted.done}),
                memory=memory,
                busy=0.3 if rows > 1 else None,
                rows=rows,
                settled=settled,
            )
        )
        if self._happens(self.chances.unsavable):
            lane.outbox.append(self._savability(trial_id, lane_id, can_save=self.rng.random() < 0.7))
        if self._happens(self.chances.own_save):
            checkpoint = Checkpoint(
                hosted.done, f"{trial_id}/{hosted.done}", host=self.hosts.get(lane.device_id, "localhost")
            )
            lane.outbox.append(TrialSaved(self.now, trial_id, lane_id, checkpoint))
        self._fork(lane_id, lane, trial_id, hosted)

    def _fails(self, lane_id: int, lane: Lane, trial_id: str) -> bool:
        kind = ""
        if self._happens(self.chances.fail):
            kind = "infeasible" if lane.hosted[trial_id].done % 3 == 2 else "error"
        if self._happens(self.chances.out_of_memory):
            kind = "out_of_memory"
        if self._happens(self.chances.device):
            kind = "device"
        if kind:
            del lane.hosted[trial_id]
            lane.outbox.append(TrialFailed(self.now, trial_id, lane_id, Failure(kind, f"{kind} of {trial_id}")))
        if kind == "device":
            lane.dead = True
            lane.inbox.clear()
            lane.hosted.clear()
            lane.outbox.append(LaneLost(self.now, lane_id, "exited with status 70"))
        return bool(kind)

    def _happens(self, chance: float) -> bool:
        return chance > 0.0 and self.rng.random() < chance

    # -- what is heard of it -------------------------------------------------------------------------------

    def lanes_with_news(self) -> list[Lane]:
        """Returns the lanes of which something was not heard yet."""
        return [lane for lane in (*self.lanes.values(), *self.gone, self.copies) if lane.outbox]

    def collect(self, lane: Lane, count: int) -> list[Event]:
        """Takes the oldest events of a lane."""
        events = [lane.outbox.popleft() for _ in range(min(count, len(lane.outbox)))]
        for event in events:
            if isinstance(event, LaneLost):
                self.lanes.pop(event.lane_id, None)
        self.gone = [lane for lane in self.gone if lane.outbox]
        return events
