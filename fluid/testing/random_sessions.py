"""Random sessions: an engine and a fake backend that take random steps, and what must hold after each.

Lanes raise, die and fail to start, devices come and go, and a submitter adds, extends, stops, pauses and calls trials.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from fluid.engine.commands import (
    Command,
    NoteDrained,
    NotePaused,
    NotePreempted,
    Report,
    ReportCall,
    ReportEnd,
    ReportRequest,
    ReportStart,
    RunIteration,
    StartTrial,
)
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceDraining,
    DeviceLost,
    DeviceRetained,
    DeviceRetiring,
    Event,
    GroupDeadline,
    GroupSubmitted,
    GroupTerms,
    PauseRequested,
    RequestAnswered,
    ResumeRequested,
    SessionDraining,
    StartState,
    StopRequested,
    Tick,
    TrialForgotten,
    TrialsAdded,
    TrialSetAside,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.policies.owners.shares import GROUP_POLICIES
from fluid.resources import Device, MemoryNeed, Requires
from fluid.testing.fake_backend import SIZES, Chances, FakeBackend
from fluid.testing.validate import validate_owners, validate_state
from fluid.trialgroup import TrialState

#: Steps after which what can end must have ended.
_PATIENCE = 3000

#: States of trials that can be neither extended nor called.
GONE = (TrialState.STOPPING, *(state for state in TrialState if state.is_over))


def fingerprint(state: EngineState) -> str:
    """The state of the engine as text: equal if nothing changed."""
    trials = [repr(trial) for trial in state.trials.values()]
    lanes = [repr(lane) for lane in state.lanes]
    occupancy = state.occupancy
    rest = (state.groups, list(state.queue), occupancy.held, occupancy.residents, state.memory.reserved)
    return repr((trials, lanes, rest, state.allocations.running, state.wants_tick))


#: How fast devices are by model, where the engine is not told.
_SPEEDS: dict[str | None, float] = {"NVIDIA A100-SXM4-80GB": 1.0, "Tesla T4": 0.3, None: 2.0}


#: How profile keys begin of which nothing is known in any profile.
_NEW = "new "


class Known(Profile):
    """A profile for which all is measured but new keys: packing and widening begin at once."""

    def seconds_per_iteration(self, key: str, model: str | None = None) -> float | None:
        return super().seconds_per_iteration(key, model) if key.startswith(_NEW) else 0.1

    def measured_packing(self, key: str, model: str | None = None) -> int:
        return 8

    def needs_measuring(self, key: str, model: str | None = None, *, co_residents: int = 1, width: int = 1) -> bool:
        return False


class Sours(Known):
    """A profile that measures after a while that packing hurts."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def observe(self, key: str, seconds: float, **more: Any) -> None:
        super().observe(key, seconds, **more)
        self._left -= 1

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        return c_max if self._left > 0 else 1

    def alpha(self, key: str, model: str | None = None) -> float:
        return 1.0 if self._left > 0 else 10.0


class Fuses(Known):
    """A profile that has measured that packs pay."""

    def fused_rates(self, key: str, model: str | None = None) -> FusedRates | None:
        return FusedRates.of({2: 1.1, 64: 8.0})

    def fused_measured(self, key: str, model: str | None = None) -> int:
        return 64

    def fused_limit(self, key: str, most: int, model: str | None = None) -> int:
        return 1 << (most.bit_length() - 1)


class RandomSession:
    """Takes steps, and checks the engine after each.

    Args:
        rng: decides.
        chances: of mishaps.
        planner: its name.
        undivided: whether trials can neither be packed nor widened, so that they preempt each other.
        sparse: whether trials are few, long and wide, so that they are resized; narrow, if devices are unlike.
        picky: whether trials ask for certain devices, or for a number of them.
        turns, in_rounds: how many trials take turns on a device, and whether all advance in rounds.
        options: of the engine.
    """

    def __init__(
        self,
        rng: random.Random,
        chances: Chances,
        planner: str = "portfolio",
        *,
        undivided: bool = False,
        sparse: bool = False,
        picky: bool = False,
        turns: int = 1,
        in_rounds: bool = False,
        **options: Any,
    ) -> None:
        self.rng = rng
        #: draws the terms of groups; of its own, so that sessions stay as they were
        self.terms_rng = random.Random(repr(rng.getstate()[1][:8]))
        options.setdefault("group_policy", self.terms_rng.choice(GROUP_POLICIES))
        options.setdefault("fairness", self.terms_rng.choice([0.0, 0.0, 2.0]))
        self.picky = picky
        self.undivided, self.sparse = undivided, sparse
        #: whether devices of some models are faster, which the engine has to measure
        self.unlike = rng.random() < (0.5 if sparse else 0.3)
        #: whether trials are narrow and long, so that they move to faster devices
        self.moves = sparse and self.unlike
        if undivided:
            options["max_packing"] = 1
        #: the widths of the models of trials that can be fused; empty if there are none
        self.shapes: list[int] = [] if rng.random() < 0.5 else rng.choice([[32], [32, 64], [32, 64, 256]])
        self.backend = FakeBackend(rng, chances)
        if self.shapes:
            self.backend.max_fused = rng.choice([1, 2, 4, 8, 64])
            self.backend.fused_power = rng.choice([0.2, 0.5, 0.9, 1.0, 1.5])
            options["max_fused"] = self.backend.max_fused
            options["insists_on_fusing"] = self.backend.max_fused > 1 and rng.random() < 0.3
        self.backend.most_turns = turns
        if turns > 1 or in_rounds:
            options |= {"turns": turns, "in_rounds": in_rounds}
        profile = rng.choice([Known(), Known(), Sours(rng.randint(1, 30)), Profile()])
        if self.shapes and rng.random() < 0.5:
            profile = Fuses()
        self.state = EngineState(
            make_planner(planner),
            profile,
            max_failures=rng.choice([0, 2, 5]),
            resident_limit=rng.choice([0, 1, 3]),
            **options,
        )
        if picky and rng.random() < 0.3:
            self.state.set_most_devices(8)
        self.reported: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.forgotten: set[str] = set()
        #: calls that were not answered: trial -> call -> (iterations reported, budget) when it was asked for
        self.calls: dict[str, dict[int, tuple[int, int]]] = {}
        self.answers = 0
        #: requests of trials that were not answered
        self.requests: list[ReportRequest] = []
        self.requests_answered = 0
        #: times that a trial which was paused by hand came to rest, and that one was told to pause for an urgent one
        self.pauses = self.urgent_pauses = 0
        self._next_call = 0
        #: the events of each call of the engine, and what it said
        self.told: list[tuple[tuple[Event, ...], list[Command]]] = []
        #: devices that drain, and drains that have ended
        self.draining: set[int] = set()
        #: devices that were told to retire
        self.retired: set[int] = set()
        self.drained: list[NoteDrained] = []
        self._next_device = 0
        self._next_group = 0
        self._next_trial = 0
        #: Decides how urgent groups are; ``None`` if none is. The other seeds give the sessions that they always gave.
        self.urgencies: random.Random | None = None
        #: Decides which trials have processes of their own; ``None`` if none have.
        self.isolations: random.Random | None = None
        #: draws deadlines and weights of groups; ``None`` for a session without them
        self.lateness: random.Random | None = None
        #: Decides which trials start from another one's state, and which share a run; ``None`` if none do.
        self.forking: random.Random | None = None
        #: Decides which trials have a profile key of which nothing is known; ``None`` if none have.
        self.novelties: random.Random | None = None
        self.memory = rng.choice([None, 100.0])
        for _ in range(rng.choice([4, 6] if picky else [2, 3] if undivided else [3, 4] if sparse else [1, 2, 4])):
            self.add_device()

    # -- steps ---------------------------------------------------------------------------------------------

    def handle(self, *events: Event) -> None:
        """Tells the engine events of one instant, checks its state and what it says, and has that carried out.

        Raises:
            AssertionError: something is wrong; it names the events, and how many were told before.
        """
        self.told.append((events, []))
        try:
            commands = self.state.handle(*events)
            self.told[-1][1].extend(commands)
            validate_state(self.state)
            validate_owners(self.state)
            self.check(commands)
        except Exception as error:
            raise AssertionError(f"event {len(self.told)}, {events}: {error or repr(error)}") from error
        self.backend.execute(commands)

    def check(self, commands: Sequence[Command]) -> None:
        """Checks what the engine says against what it has said, and takes note of it."""
        resting = [command.trial_id if isinstance(command, NotePaused) else None for command in commands]
        for position, command in enumerate(commands):
            if isinstance(command, Report):
                assert command.iteration == self.reported_before(command.trial_id) + 1, command
                if self.state.trials[command.trial_id].spec.is_shared_run:
                    self.ends.pop(command.trial_id, None)  # The engine extends it as its trials need it.
                assert command.trial_id not in self.ends, command
                assert len(command.device_ids) == max(1, round(command.width)), command
                self.reported[command.trial_id] = command.iteration
            elif isinstance(command, ReportStart):
                if self.state.trials[command.trial_id].spec.is_shared_run:
                    self.ends.pop(command.trial_id, None)  # The engine extends it as its trials need it.
                assert command.trial_id not in self.ends, command
            elif isinstance(command, ReportEnd):
                before = self.ends.get(command.trial_id)
                assert before is None or (before == "DONE" and command.state != "DONE"), command
                self.ends[command.trial_id] = command.state
            elif isinstance(command, ReportCall):
                self.answered(command)
            elif isinstance(command, ReportRequest):
                assert self.ends.get(command.trial_id, "DONE") == "DONE", command
                self.requests.append(command)
            elif isinstance(command, NoteDrained):
                self.note_drained(command)
            elif isinstance(command, NotePaused):
                self.pauses += 1
            elif isinstance(command, NotePreempted):
                self.urgent_pauses += command.urgent_group is not None
            elif isinstance(command, (StartTrial, RunIteration)):
                paused = self.state.trials[command.trial_id].state is TrialState.PAUSED
                # Events of one instant may tell a trial to run, and then that its lane is lost.
                assert not paused or command.trial_id in resting[position + 1 :], command

    def reported_before(self, trial_id: str) -> int:
        """Iterations that a trial has reported, or that were done by the state from which it starts."""
        start = self.state.trials[trial_id].spec.start
        starts_at = 0 if start is None or start.is_shared else start.at or 0
        return self.reported.get(trial_id, starts_at)

    def answered(self, command: ReportCall) -> None:
        """Checks the answer to a call: it is the first one, and the call was made when it was asked for."""
        asked = self.calls[command.trial_id]
        assert command.call_id in asked, f"{command} was answered already"
        reported, budget = asked[command.call_id]
        trial = self.state.trials.get(command.trial_id)
        over = trial is None or trial.state.is_over
        made = self.backend.called.get((command.trial_id, command.call_id), [])
        assert made or over or (command.failure is not None and command.failure.kind == "lane_lost"), command
        if trial is not None and not trial.progress.finished_early:
            most = max(budget, trial.progress.starts_at)  # The state was not there when the call was asked for.
            assert all(reported <= done <= most for done in made), (command, made, reported, most)
        if command.failure is None:
            assert command.result == f"{command.trial_id} {command.call_id}".encode()
            assert min(asked) == command.call_id, "an older one was asked for"
        del asked[command.call_id]
        self.answers += 1

    def spec(self) -> TrialSpec:
        """Draws a trial."""
        rng = self.rng
        self._next_trial += 1
        memory = MemoryNeed(rng.choice([0.0, 20.0]), rng.choice([5.0, 30.0, 60.0])) if rng.random() < 0.3 else None
        requires, devices = self.asked() if self.picky and rng.random() < 0.6 else (None, None)
        widths = [1, 1, 1, 2] if self.moves else [2, 4] if self.sparse else [1, 1, 2, 4]
        max_width = 1 if self.undivided else rng.choice(widths)
        longest = 100 if self.moves else 30 if self.sparse else 15 if self.undivided else 8
        gang = max_width == 1 and devices is not None and devices >= 2
        fusible = bool(self.shapes) and not gang and rng.random() < 0.8
        shape: tuple[tuple[str, str], ...] = (
            (("lr", str(rng.random())), ("width", str(rng.choice(self.shapes)))) if fusible else ()
        )
        shape += (("size", str(SIZES[self._next_trial % len(SIZES)])),)  # Of the trials of a key, some are larger.
        spec = TrialSpec(
            f"t{self._next_trial}",
            budget=rng.randint(1, longest),
            priority=rng.choice([1.0, 1.0, 2.0]),
            profile_key=rng.choice(["a"] if self.moves else ["a", "b"]),
            max_width=max_width,
            memory=memory,
            can_save=rng.random() < (0.9 if self.undivided or self.moves else 0.7),
            retry_errors=rng.random() < 0.8,
            follow_up_iterations=rng.choice([0, 0, 9]),
            iteration_timeout_s=rng.choice(["auto", None, 0.5, 3.0]),
            requires=requires,
            devices=devices,
            gang=gang,
            keep_last=rng.random() < 0.3,
            fusible=fusible,
            config=shape,
        )
        if self.isolations is not None and self.isolations.random() < 0.8:
            spec = structs.replace(spec, isolated=True, extends=self.isolations.choice([None, True, False]))
        if self.novelties is not None and self.novelties.random() < 0.5:
            spec = structs.replace(spec, profile_key=f"{_NEW}{self.novelties.randint(1, 6)}")
        self.backend.specs[spec.trial_id] = spec
        return spec

    def asked(self) -> tuple[Requires | None, float | None]:
        """What a trial asks of its devices."""
        rng = self.rng
        choices = [Requires(model="A100"), Requires(model="H100|T4"), Requires(host="there"), Requires(tags=("fast",))]
        requires = rng.choice([None, None, *choices, Requires(kind="gpu"), Requires(memory_bytes=100.0)])
        if rng.random() < 0.2:
            requires = replace(requires or Requires(), wait=True)
        return requires, rng.choice([None, 1, 0.5, 1 / 3, 0.25, 2, 2, 3])

    def fits(self, spec: TrialSpec) -> bool:
        """Whether the devices that there are, or may come, could run a trial."""
        state, most = self.state, 8 if self.state.most_devices else 0
        if spec.requires is not None and spec.requires.wait:
            return True
        usable = state.memory.usable_bytes
        fitting = [
            device
            for device in state.occupancy.devices
            if spec.memory is None or (room := usable(device.index)) is None or spec.memory.peak_bytes <= room
        ]
        fitting = [device for device in fitting if spec.requires is None or spec.requires.met_by(device)]
        width = max(1, spec.devices or 1)
        if not state.occupancy.devices or most:
            return not most or not state.occupancy.devices or width <= most
        per_host = Counter(device.host if spec.gang else "" for device in fitting)
        return max(per_host.values(), default=0) >= width

    def request(self, event: GroupSubmitted | TrialsAdded) -> bool:
        """Asks for trials, which must be refused if one of them fits nowhere; returns whether they were accepted."""
        if all(map(self.fits, event.trials)):
            if any(spec.start is not None for spec in event.trials):
                return self.may_be_refused(event)
            self.handle(event)
            return True
        self.refused(event)
        return False

    def may_be_refused(self, event: GroupSubmitted | TrialsAdded) -> bool:
        """Asks for trials whose states there may not be; a refusal must change nothing."""
        before = fingerprint(self.state)
        try:
            self.handle(event)
        except AssertionError as error:
            if not isinstance(error.__cause__, InvalidFieldError):
                raise
            assert fingerprint(self.state) == before
            return False
        return True

    def with_starts(self, specs: tuple[TrialSpec, ...]) -> tuple[TrialSpec, ...]:
        """Trials some of which start from another one's state; several may share a run, and one within that."""
        rng = self.forking
        if rng is None:
            return specs
        if len(specs) > 1 and rng.random() < 0.4:
            return self.sharing(specs, rng)
        made = []
        for spec in specs:
            parents = [trial for trial in self.state.trials.values() if trial.spec.can_save]
            if parents and rng.random() < 0.5:
                parent = rng.choice(parents)
                at = rng.choice([None, None, parent.progress.done, rng.randint(1, 9)]) or None
                budget = spec.budget + (at or parent.progress.done)
                spec = structs.replace(spec, start=StartState(parent.trial_id, at), budget=budget)
            made.append(spec)
        for spec in made:
            self.backend.specs[spec.trial_id] = spec
        return tuple(made)

    def sharing(self, specs: tuple[TrialSpec, ...], rng: random.Random) -> tuple[TrialSpec, ...]:
        """The trials as those of a shared run, the last half of them perhaps of one within it; and the runs."""
        first, inner = rng.randint(1, 5), rng.randint(1, 4)
        nested = len(specs) > 2 and rng.random() < 0.5
        half = len(specs) // 2 if nested else len(specs)
        names = [f"r{self._next_trial}", f"q{self._next_trial}"]
        model = structs.replace(specs[0], can_save=True, fusible=False, max_width=1, is_shared_run=True, extends=None)
        outer_end, inner_end = first, first + inner
        made = [
            structs.replace(
                spec,
                can_save=True,
                start=StartState(names[place >= half], inner_end if place >= half else outer_end, is_shared=True),
                budget=spec.budget + rng.choice([0, first]),
            )
            for place, spec in enumerate(specs)
        ]
        most = max(spec.budget for spec in made)
        runs = [structs.replace(model, trial_id=names[0], budget=min(outer_end, most))]
        if nested:
            start = StartState(names[0], outer_end, is_shared=True)
            budget = min(inner_end, max(spec.budget for spec in made[half:]))
            runs.append(structs.replace(model, trial_id=names[1], budget=budget, start=start))
        for spec in (*runs, *made):
            self.backend.specs[spec.trial_id] = spec
        return (*runs, *made)

    def submit(self, count: int) -> None:
        """Submits a group of so many trials, some of which may be refused."""
        group_id = f"g{self._next_group + 1}"
        specs = self.with_starts(tuple(self.spec() for _ in range(count)))
        terms = self.terms()
        if self.urgencies is not None and self.urgencies.random() < 0.4:
            priority, preempt = self.urgencies.choice([0.5, 2.0, 2.0, 3.0]), self.urgencies.random() < 0.8
            terms = replace(terms, priority=priority, preempt=preempt)
        if self.lateness is not None and self.lateness.random() < 0.6:
            terms = self.with_lateness(terms, self.lateness)
        if self.request(GroupSubmitted(self.backend.now, group_id, specs, terms)):
            self._next_group += 1

    def terms(self) -> GroupTerms:
        """Those of a group of one of a few owners, or of none."""
        rng = self.terms_rng
        owner, priority = rng.choice([None, "ann", "bob", "bob"]), rng.choice([1.0, 1.0, 1.0, 2.0])
        return GroupTerms(owner, priority, expected_trials=rng.choice([None, None, 3, 40]))

    @staticmethod
    def with_lateness(terms: GroupTerms, rng: random.Random) -> GroupTerms:
        """The same terms with a deadline, some of which have passed or are missed soon, or a weight, or both."""
        firsts = [rng.choice([-5.0, 0.5, 5.0, 20.0, 60.0, 300.0]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
        passed = 10.0 if -5.0 in firsts else 0.0  # Of a group of an earlier session.
        steps = tuple((seconds + passed, float(cost)) for cost, seconds in enumerate(sorted({*firsts}), start=1))
        deadline = GroupDeadline(steps, rng.choice(["late", "stop"]), passed) if steps else None
        return replace(terms, deadline=deadline, weight=rng.choice([1.0, 1.0, 0.5, 3.0, 100.0]))

    def add_trial(self) -> None:
        """Adds a trial to a group."""
        if self._next_group:
            group = f"g{self.rng.randint(1, self._next_group)}"
            self.request(TrialsAdded(self.backend.now, group, self.with_starts((self.spec(),))))

    def extend(self) -> None:
        """Extends a trial; it must be refused or go on, and a refusal must change nothing."""
        if self.state.trials:
            trial_id = self.rng.choice(list(self.state.trials))
            trial = self.state.trials[trial_id]
            follow_up_iterations = self.rng.choice([0, 0, 6])
            event = BudgetExtended(
                self.backend.now, trial_id, self.rng.randint(1, 5), follow_up_iterations=follow_up_iterations
            )
            if trial.state in GONE or trial.progress.finished_early:
                self.refused(event)
                return
            self.ends.pop(trial_id, None)
            self.handle(event)

    def stop(self) -> None:
        """Stops a trial, after its iteration or at once."""
        if self.state.trials:
            trial_id = self.rng.choice(list(self.state.trials))
            self.handle(StopRequested(self.backend.now, trial_id, now=self.rng.random() < 0.4))

    def pause(self) -> None:
        """Pauses a trial, or sets it aside; it must be refused if it has ended, and twice must change nothing more."""
        if self.state.trials:
            trial = self.state.trials[self.rng.choice(list(self.state.trials))]
            kind = PauseRequested if trial.row % 3 else TrialSetAside
            event = kind(self.backend.now, trial.trial_id)
            if trial.state.ended or trial.state is TrialState.STOPPING or trial.restored_for_call:
                self.refused(event)
                return
            self.handle(event)
            if trial.state.is_over and trial.spec.start is not None:
                return  # Its shared run had ended as others were started.
            assert trial.held and trial.row not in self.state.queue
            before = fingerprint(self.state)
            self.handle(event)
            assert fingerprint(self.state) == before

    def resume(self) -> None:
        """Resumes a trial that is paused, if there is one, or one that is not."""
        held = [trial_id for trial_id, trial in self.state.trials.items() if trial.held]
        if held or self.state.trials:
            trial_id = self.rng.choice(held or list(self.state.trials))
            self.handle(ResumeRequested(self.backend.now, trial_id))
            trial = self.state.trials[trial_id]
            assert trial.state is not TrialState.PAUSED or trial.awaits

    def call(self) -> None:
        """Calls a method of a trial; it must be refused or answered."""
        if not self.state.trials:
            return
        trial_id = self.rng.choice(list(self.state.trials))
        trial = self.state.trials[trial_id]
        self._next_call += 1
        payload = f"{trial_id} {self._next_call}".encode()
        event = CallRequested(self.backend.now, trial_id, call_id=self._next_call, method="method", payload=payload)
        if trial.state in GONE:
            self.refused(event)
            return
        self.calls.setdefault(trial_id, {})[self._next_call] = (trial.progress.reported, trial.progress.budget)
        self.handle(event)

    def answer_request(self) -> None:
        """Answers what a trial has asked; the trial may have ended, or left that lane, meanwhile."""
        if self.requests:
            asked = self.requests.pop(self.rng.randrange(len(self.requests)))
            number, lane_id = asked.request_id, asked.lane_id
            event = RequestAnswered(self.backend.now, asked.trial_id, lane_id, request_id=number, payload=b"answer")
            self.handle(event)
            self.requests_answered += 1

    def forget(self) -> None:
        """Forgets a trial; it must have ended."""
        if not self.state.trials:
            return
        trial_id = self.rng.choice(list(self.state.trials))
        event = TrialForgotten(self.backend.now, trial_id)
        if not self.state.trials[trial_id].state.ended:
            self.refused(event)
            return
        self.handle(event)
        assert not self.calls.get(trial_id), "calls are left"
        self.forgotten.add(trial_id)
        self.refused(TrialsAdded(self.backend.now, f"g{self._next_group}", (TrialSpec(trial_id, 1),)))

    def refused(self, *events: Event) -> None:
        """Tells the engine requests; it must refuse them, and a refusal must change nothing."""
        before = fingerprint(self.state)
        try:
            self.state.handle(*events)
        except InvalidFieldError:
            assert fingerprint(self.state) == before
        else:
            raise AssertionError(f"{events} was not refused")

    def submit_nonsense(self) -> None:
        """Submits a group together with a request that cannot be: both must be refused."""
        self._next_group += 1
        good = GroupSubmitted(self.backend.now, f"g{self._next_group}", (self.spec(),))
        taken = TrialSpec(next(iter(self.state.trials)), 1) if self.state.trials else TrialSpec("x", 0)
        bad: list[Event] = [
            GroupSubmitted(0.0, f"g{self._next_group}", (self.spec(),)),
            GroupSubmitted(0.0, "other", (TrialSpec("x", 1), TrialSpec("x", 1))),
            GroupSubmitted(0.0, "other", (taken,)),
            TrialsAdded(0.0, "unknown", (TrialSpec("x", 1),)),
            TrialsAdded(0.0, good.group_id, (TrialSpec("x", 1, priority=float("nan")),)),
            BudgetExtended(0.0, "unknown", 1),
            BudgetExtended(0.0, good.trials[0].trial_id, 0),
            StopRequested(0.0, "unknown"),
            CallRequested(0.0, "unknown", call_id=1, method="method", payload=b""),
            PauseRequested(0.0, "unknown"),
            ResumeRequested(0.0, "unknown"),
            TrialForgotten(0.0, "unknown"),
            TrialForgotten(0.0, good.trials[0].trial_id),
        ]
        self._next_group -= 1
        self.refused(good, self.rng.choice(bad))

    def add_device(self) -> None:
        """Adds a device."""
        self._next_device += 1
        host = self.rng.choice(["here", "there"])
        speed = self.rng.choice([1.0, 1.0, 2.0])
        self.backend.hosts[self._next_device] = host
        more: dict[str, Any] = {}
        if self.picky:
            more["model"] = self.rng.choice(["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "Tesla T4", None])
            more["tags"] = self.rng.choice([(), ("fast",)])
            more["kind"] = self.rng.choice(["gpu", "gpu", "cpu"])
        if self.unlike:
            more["model"], speed = self.rng.choice([*_SPEEDS]), 1.0
            self.backend.speeds[self._next_device] = _SPEEDS[more["model"]]
        device = Device(self._next_device, host=host, speed=speed, memory_bytes=self.memory, **more)
        self.handle(DeviceAdded(self.backend.now, device))

    def lose_device(self) -> None:
        """Loses a device, if there is one."""
        devices = self.state.occupancy.devices
        if devices:
            self.handle(DeviceLost(self.backend.now, self.rng.choice(devices).index))

    def drain_device(self) -> None:
        """Drains a device, if there is one, until some time."""
        devices = self.state.occupancy.devices
        if devices:
            device = self.rng.choice(devices).index
            self.draining.add(device)
            deadline = self.backend.now + self.rng.choice([0.0, 0.5, 2.0, 1e9])
            self.handle(DeviceDraining(self.backend.now, device, deadline))
        self.refused(DeviceDraining(self.backend.now, -1, 1.0))

    def note_drained(self, note: NoteDrained) -> None:
        """Checks that a drain which has ended was asked for, and that its device is gone."""
        self.drained.append(note)
        if note.device_id is not None:
            retired = note.device_id in self.retired and note.device_id not in self.state.retirements.devices
            assert note.device_id in self.draining or retired, note
            assert note.device_id not in self.state.occupancy.residents
            self.draining.discard(note.device_id)
            self.retired.discard(note.device_id)

    def retire_device(self) -> None:
        """Retires a device; it must be refused if it is needed, and trials that run there must stay."""
        devices = self.state.occupancy.devices
        if devices:
            device = self.rng.choice(devices).index
            event = DeviceRetiring(self.backend.now, device)
            if device not in self.state.retirements.devices and not self.state.retirements.may_retire(device):
                self.refused(event)
                return
            held = dict(self.state.occupancy.held)
            before = {row: places for row, places in held.items() if device in places}
            self.retired.add(device)
            self.handle(event)
            for row, places in before.items():
                assert self.state.occupancy.held.get(row) == places, "a trial was moved off a device that retires"
        self.refused(DeviceRetiring(self.backend.now, -1))

    def retain_device(self) -> None:
        """Retains a device that retires, or is refused."""
        retiring = self.state.retirements.devices
        if retiring:
            device = self.rng.choice(sorted(retiring))
            self.handle(DeviceRetained(self.backend.now, device))
            assert device not in retiring and not self.state.occupancy.is_closed(device)
        self.refused(DeviceRetained(self.backend.now, -1))

    def kill_lane(self) -> None:
        """Kills a lane, if one runs."""
        alive = [lane_id for lane_id, lane in self.backend.lanes.items() if lane.ready and not lane.dead]
        if alive:
            self.backend.kill(self.rng.choice(alive))

    def work(self, steps: int) -> None:
        """Has lanes take so many steps."""
        for _ in range(steps):
            self.backend.copy()
            if self.backend.lanes:
                self.backend.work(self.rng.choice(list(self.backend.lanes)))

    def hear(self, *, everything: bool = False) -> bool:
        """Delivers what lanes said, of one lane or of several at once."""
        talking = self.backend.lanes_with_news()
        if not talking:
            return False
        chosen = talking if everything else self.rng.sample(talking, self.rng.randint(1, len(talking)))
        events: list[Event] = []
        for lane in chosen:
            events += self.backend.collect(lane, self.rng.randint(1, 4))
        self.handle(*events)
        return True

    def tick(self) -> None:
        """Sends a Tick."""
        self.handle(Tick(self.backend.now))

    def alarm(self) -> None:
        """Sends an Alarm: in time, or, as after a suspension of the driver, late."""
        alarm_at = self.state.alarm_at
        if alarm_at is not None:
            self.backend.now = max(self.backend.now, alarm_at) + self.rng.choice([0.0, 0.0, 0.5, 100.0])
            self.handle(Alarm(self.backend.now))

    # -- the end -------------------------------------------------------------------------------------------

    def drain_session(self) -> None:
        """Drains the session with nothing going wrong any more, and checks that nothing that can be saved is lost."""
        self.backend.chances = Chances()
        before = len(self.drained)
        self.handle(SessionDraining(self.backend.now, self.backend.now + 1e4))
        for _ in range(_PATIENCE):
            while self.requests:
                self.answer_request()
            self.backend.copy()
            for lane_id in list(self.backend.lanes):
                self.backend.work(lane_id)
            if self.hear():
                continue
            if any(note.device_id is None for note in self.drained[before:]):
                break
            if self.state.wants_tick:
                self.tick()
            elif self.state.alarm_at is not None:
                self.alarm()
        (note,) = [note for note in self.drained[before:] if note.device_id is None]
        assert not self.draining or note.unsaved, "devices are drained with the session"
        for trial in self.state.trials.values():
            story = f"{trial}\n{list(trial.story)}"
            if trial.state.holds_devices:  # It hangs.
                assert trial.trial_id in note.unsaved or trial.state is TrialState.STOPPING, story
                continue
            saved = 0 if trial.residence.durable is None else trial.residence.durable.iteration
            # One whose machine was lost goes on from an older checkpoint.
            done = trial.residence.restart_at if trial.residence.lane is None else trial.progress.done
            if trial.state in (TrialState.QUEUED, TrialState.PAUSED) and done > saved and not trial.awaits:
                assert trial.trial_id in note.unsaved, story
                kept = None if (where := trial.residence.lane) is None else self.backend.lanes.get(where)
                if kept is not None and any(hosted.hung for hosted in kept.hosted.values()):
                    continue  # A lane saves nothing beside a trial that hangs.
                assert not trial.spec.can_save, story

    def drain(self) -> None:
        """Lets everything end, with nothing going wrong any more, and checks what came of it."""
        self.backend.chances = Chances()
        if self.state.most_devices:  # None come any more: what waits for others fails.
            self.state.set_most_devices(0)
            self.add_device()
        for trial in list(self.state.trials.values()):
            if trial.held:
                self.handle(ResumeRequested(self.backend.now, trial.trial_id))
        for _ in range(_PATIENCE):
            if not self.state.occupancy:
                self.add_device()
            while self.requests:
                self.answer_request()
            self.backend.copy()
            for lane_id in list(self.backend.lanes):
                self.backend.work(lane_id)
            if self.hear():
                continue
            for trial in list(self.state.trials.values()):
                if self.state.awaits_devices(trial.trial_id):  # None comes, and one that drained may have gone since.
                    self.handle(StopRequested(self.backend.now, trial.trial_id))
            if self.state.wants_tick:
                self.tick()
            elif self.state.alarm_at is not None:
                self.alarm()
            hung = {name for lane in self.backend.lanes.values() for name, hosted in lane.hosted.items() if hosted.hung}
            for trial_id in hung:  # Nothing but its submitter ends it.
                stuck_one = self.state.trials.get(trial_id)
                if stuck_one is not None and not isinstance(stuck_one.spec.iteration_timeout_s, float):
                    self.handle(StopRequested(self.backend.now, trial_id, now=True))
            if not any(group.open for group in self.state.groups.values()) and not any(self.calls.values()):
                break
        stuck = [trial for trial in self.state.trials.values() if not trial.state.ended]
        assert not any(self.calls.values()), f"calls were not answered: {self.calls}"
        assert not stuck, "\n".join(f"{trial}\n{list(trial.story)}" for trial in stuck)
        for trial_id, trial in self.state.trials.items():
            assert self.ends.get(trial_id) == trial.state.value, trial
            assert trial_id not in self.forgotten, trial
            if trial.state is TrialState.DONE:
                progress = trial.progress
                is_whole = progress.starts_at >= progress.budget or progress.finished_early  # It reports nothing.
                assert is_whole or self.reported.get(trial_id, 0) == progress.budget, trial


def random_session(
    seed: int,
    steps: int,
    share_of_turns: float = 0.3,
    *,
    with_deadlines: bool = False,
    new_keys: bool = False,
    forks: bool = False,
    **options: Any,
) -> RandomSession:
    """Plays a session of random steps, to its end.

    Args:
        seed: decides all of it.
        steps: before the session is brought to its end.
        share_of_turns: in so many of all sessions, trials take turns in lanes.
        with_deadlines: whether groups have deadlines and weights.
        new_keys: whether trials come of which nothing is known, so that others make room for an iteration of them.
        forks: whether trials start from others' states, and share runs.
        options: of the engine.

    Raises:
        AssertionError: something is wrong; it names the seed, and the event.
    """
    try:
        return _play(
            seed, steps, share_of_turns, options, with_deadlines=with_deadlines, new_keys=new_keys, forks=forks
        )
    except Exception as error:
        raise AssertionError(f"session of seed {seed}: {error or repr(error)}") from error


def _play(
    seed: int,
    steps: int,
    share_of_turns: float,
    options: dict[str, Any],
    *,
    with_deadlines: bool,
    new_keys: bool,
    forks: bool,
) -> RandomSession:
    rng = random.Random(seed)
    wild = rng.random()
    chances = Chances(
        fail=rng.choice([0.0, 0.02]) * wild,
        out_of_memory=rng.choice([0.0, 0.03]) * wild,
        finish=rng.choice([0.0, 0.02]),
        save_fails=rng.choice([0.0, 0.2]),
        false_start=rng.choice([0.0, 0.1]),
        own_save=rng.choice([0.0, 0.3]),
        damaged=rng.choice([0.0, 0.3]),
        memory=rng.choice([0.0, 0.1]),
        own_bytes=rng.choice([0.0, 4.0, 12.0]),
        hang=rng.choice([0.0, 0.05]) * wild,
    )
    if not chances.hang:  # While a lane waits for an answer, a drain may rely on one that hangs.
        chances.ask = rng.choice([0.0, 0.1])
    chances.unsavable = rng.choice([0.0, 0.0, 0.2])
    chances.device = rng.choice([0.0, 0.0, 0.05])
    if rng.random() < 0.7:
        chances.unlike, chances.refuse = rng.choice([0.0, 0.2]), rng.choice([0.0, 0.02, 0.2])
        chances.die = rng.choice([0.0, 0.05]) * wild
    undivided = rng.random() < 0.3
    sparse = not undivided and rng.random() < 0.45
    planners = ["portfolio"] if undivided else ["portfolio", "dynamic", *([] if sparse else ["static", "fifo"])]
    planner = rng.choice(planners)
    picky = rng.random() < 0.5
    sharing = random.Random(f"turns {seed}")
    options["turns"] = sharing.choice([2, 4, 64]) if sharing.random() < share_of_turns else 1
    options["in_rounds"] = sharing.random() < 0.5
    session = RandomSession(rng, chances, planner, undivided=undivided, sparse=sparse, picky=picky, **options)
    urgencies = random.Random(f"urgent {seed}")
    session.urgencies = urgencies if urgencies.random() < 0.4 else None
    session.lateness = random.Random(f"deadlines {seed}") if with_deadlines else None
    session.forking = random.Random(f"forks {seed}") if forks else None
    session.novelties = random.Random(f"new keys {seed}") if new_keys else None
    isolations = random.Random(f"isolated {seed}")
    session.isolations = isolations if isolations.random() < 0.7 else None
    if session.isolations is not None:
        chances.spend = isolations.choice([0.0, 0.0, 0.05])
        chances.outdate = isolations.choice([0.0, 0.0, 0.05])
        chances.clean_up = isolations.choice([0.0, 0.0, 0.3])
        session.state.lanes.most_idle = isolations.choice([0, 1, 3, 32])
        session.state.lanes.most_processes = isolations.choice([1, 4, 128])
    rare = [session.lose_device, session.add_device, session.kill_lane, session.submit_nonsense, session.drain_device]
    # The other seeds give the sessions that they always gave.
    retires = random.Random(f"retires {seed}").random() < 0.5
    rare += [session.retire_device, session.retire_device, session.retain_device] if retires else []
    for _ in range(steps):
        # Preemptions and resizes need ticks as a driver sends them, and fewer requests of the submitter.
        lively = not (undivided or sparse)
        if not lively and session.state.wants_tick:
            session.tick()
        if session.moves and len(session.state.occupancy) < 6 and rng.random() < 0.02:
            session.add_device()
        pick = rng.random() if lively or rng.random() < 0.3 else rng.uniform(0.3, 0.9)
        if pick < 0.04:
            session.submit(1 if sparse else rng.randint(1, 6))
        elif pick < 0.06:
            session.add_trial()
        elif pick < 0.12:
            session.extend()
        elif pick < 0.14:
            session.stop()
        elif pick < 0.15:
            session.forget()
        elif pick < 0.17:
            session.pause()
        elif pick < 0.19:
            session.resume()
        elif pick < 0.24:
            session.call()
        elif pick < 0.24 + 0.05 * wild:
            rng.choice(rare)()
        elif pick < 0.59:
            session.work(rng.randint(1, 6))
        elif pick < 0.9:
            session.hear()
        elif pick < 0.93:
            session.answer_request()
        elif pick < 0.97:
            session.tick()
        else:
            session.alarm()
    if rng.random() < 0.3:
        session.drain_session()
    else:
        session.drain()
    return session
