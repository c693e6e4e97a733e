"""Runs a scenario on devices that come and go: as the sizer decides for a deadline and a budget, or a fixed number.

What the sizer is told is what a session would know: predictions with their errors, and what was observed. Each device
is paid for from its coming until it is given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fluid.backends.simulated import SimulatedBackend
from fluid.engine.commands import Command, NoteDeviceLost, Report, ReportEnd
from fluid.engine.events import DeviceAdded, DeviceDraining, DeviceRetiring, Event
from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.forecasting.play import Player
from fluid.forecasting.scenario import MOST_SIMULATED, Scenario
from fluid.forecasting.search_now import SearchNow
from fluid.planners.planner import Planner
from fluid.policies.engine import EngineState
from fluid.simulation.observed_search import ObservedSearch
from fluid.simulation.simulate import simulate
from fluid.simulation.simulation_result import SimulationResult
from fluid.sizing.goals import Goals
from fluid.sizing.sizer import EndOn, Sizer, Sizing

#: Share of the deadline after which devices are decided upon again though no trial has ended.
_LOOK = 0.05
#: Share of the deadline in which a decision is not repeated, after trials have ended and otherwise.
_PAUSE, _REST = 0.005, 0.02
#: Seconds between two looks where there is no deadline.
_LOOK_S = 60.0
#: Seconds in which the states that an idle device keeps have to be saved.
_LEAVING_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On which terms devices are to be had.

    Args:
        most: devices that can be had.
        provision_s: seconds from asking for a device until it comes. Those of the first decision are there at once.
        preempt_every_s: mean seconds until the provider takes a device back; ``None`` if it never does.
        notice_s: seconds from its notice until the device is gone.
        profiled: whether predicted seconds per iteration are known before a trial runs; else nothing is.
        draws: plays per forecast.

    Raises:
        InvalidFieldError: a field is out of range.
    """

    most: int = 16
    provision_s: float = 60.0
    preempt_every_s: float | None = None
    notice_s: float = 30.0
    profiled: bool = True
    draws: int = 50

    def __post_init__(self) -> None:
        require_integer("most", self.most, at_least=1, at_most=MOST_SIMULATED)
        require_number("provision_s", self.provision_s, at_least=0.0)
        require_number("notice_s", self.notice_s, at_least=0.0)
        require_integer("draws", self.draws, at_least=1)
        every = self.preempt_every_s
        if every is not None and require_number("preempt_every_s", every, at_least=0.0) == 0.0:
            raise InvalidFieldError("preempt_every_s", every, "must be above 0")


@dataclass(frozen=True, kw_only=True)
class HeldResult:
    """What a scenario took on devices that came and went.

    Attributes:
        simulation: times and counts.
        device_s: device-seconds paid for.
        held: (seconds, devices held from then on), ascending.
        decisions: (seconds, decision), in order; none for a fixed number.
        preempted: devices that the provider took back.
    """

    simulation: SimulationResult
    device_s: float
    held: tuple[tuple[float, int], ...]
    decisions: tuple[tuple[float, Sizing], ...]
    preempted: int


def simulate_sized(scenario: Scenario, planner: Planner, goals: Goals, terms: Terms) -> HeldResult:
    """Runs a scenario on as many devices as the sizer decides at every departure.

    Args:
        scenario: what to run; its own devices and their changes do not count.
        planner: the planner.
        goals: deadline, budget and price.
        terms: on which devices are to be had.
    """
    return _run(scenario, planner, goals, terms, None)


def simulate_fixed(scenario: Scenario, planner: Planner, devices: int, terms: Terms) -> HeldResult:
    """Runs a scenario on a fixed number of devices; those that the provider takes back are asked for anew.

    Args:
        scenario: what to run; its own devices and their changes do not count.
        planner: the planner.
        devices: that are held from the beginning to the end.
        terms: on which devices are to be had.
    """
    return _run(scenario, planner, Goals(), terms, require_integer("devices", devices, at_least=1))


def first_sizing(scenario: Scenario, goals: Goals, terms: Terms) -> Sizing:
    """The decision before the first trial: whether the deadline can be met is said here at once.

    Args:
        scenario, goals, terms: as of :func:`simulate_sized`.
    """
    return _Held(_concurrent(scenario, terms), goals, terms, None).first()


def _concurrent(scenario: Scenario, terms: Terms) -> Scenario:
    """The scenario with as many trials under way as all devices can hold, if it leaves that open: not per device."""
    workload = scenario.workload
    return replace(scenario, workload=replace(workload, concurrency=workload.concurrency or terms.most))


def _run(scenario: Scenario, planner: Planner, goals: Goals, terms: Terms, fixed: int | None) -> HeldResult:
    scenario = _concurrent(scenario, terms)
    held = _Held(scenario, goals, terms, fixed)
    first = held.first().devices
    result = simulate(scenario.with_devices(first), planner, holder=held)
    return held.result(result)


class _Held:
    """The devices of one run: implements :class:`fluid.simulation.simulate.DeviceHolder`.

    Args:
        scenario: what runs.
        goals: deadline, budget and price.
        terms: on which devices are to be had.
        fixed: devices to hold; ``None`` for as many as the sizer decides.
    """

    def __init__(self, scenario: Scenario, goals: Goals, terms: Terms, fixed: int | None) -> None:
        self._goals = goals
        self._terms = terms
        self._fixed = fixed
        self.provision_s = terms.provision_s
        self._search = ObservedSearch(scenario, profiled=terms.profiled)
        self._sizer = Sizer(goals, terms.most, provision_s=terms.provision_s)
        self._scenario = scenario
        self._fates = np.random.default_rng([scenario.seed, 1])
        self._state: EngineState
        self._backend: SimulatedBackend
        #: When the provider takes each device back, with its notice.
        self._taken_at: dict[int, float] = {}
        self._draining: set[int] = set()
        self._given_back: set[int] = set()
        self._held: dict[int, float] = {}
        self._asked = 0
        self._paid_s = 0.0
        self._history: list[tuple[float, int]] = []
        self._decisions: list[tuple[float, Sizing]] = []
        self._preempted = 0
        self._urgent = self._changed = False
        self._decided_at = 0.0
        self._now = 0.0

    @property
    def next_at(self) -> float:
        """When a device is taken back, or a decision is due."""
        deadline = self._goals.deadline_s
        share = _PAUSE if self._urgent else _REST if self._changed else _LOOK
        if self._fixed is not None:
            decide_at = self._now if self._urgent else math.inf
        elif deadline is not None:
            decide_at = self._decided_at + share * deadline
        else:
            decide_at = self._decided_at + (_LOOK_S if share == _LOOK else 1.0)
        return max(self._now, min(decide_at, min(self._taken_at.values(), default=math.inf)))

    def first(self) -> Sizing:
        """The decision before the first trial."""
        if self._fixed is not None:
            return Sizing(devices=self._fixed)
        search = self._search.at_start()
        useful = self._useful_at_start()
        # Those of the first decision are there at once.
        sizer = Sizer(self._goals, self._terms.most, provision_s=0.0)
        sizing = sizer.decide(0.0, 0, self._end_on(search), useful)
        self._decisions.append((0.0, sizing))
        return sizing

    def begin(self, state: EngineState, backend: SimulatedBackend) -> None:
        """Takes the engine to read, and the backend to ask for devices."""
        self._state = state
        self._backend = backend
        state.set_most_devices(self._terms.most)

    def requested(self, trial: int, trial_id: str, granted: int, bracket: int, predicted: float) -> None:
        """A trial was requested."""
        self._search.requested(trial, trial_id, granted, bracket, predicted)
        self._changed = True

    def ended(self, trial: int, stopped: bool) -> None:
        """A trial has run as far as requested."""
        self._search.ended(trial, stopped)
        self._urgent = self._fixed is None

    def heard(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        self._now = self._backend.now()
        self._search.heard(events, commands)
        for event in events:
            if isinstance(event, DeviceAdded):
                self._came(event.device.index)
        for command in commands:
            if isinstance(command, NoteDeviceLost):
                self._left(command.device_id)
            elif isinstance(command, ReportEnd) or (isinstance(command, Report) and command.iteration == command.count):
                self._changed = True

    def act(self, now: float) -> list[Event]:
        """Takes devices back that the provider wants; decides, asks for devices and gives others back."""
        self._now = now
        events: list[Event] = []
        for device, at in list(self._taken_at.items()):
            if at <= now:
                del self._taken_at[device]
                if device in self._held and device not in self._draining:
                    self._preempted += 1
                    self._draining.add(device)
                    self._urgent = True
                    events.append(DeviceDraining(now, device, now + self._terms.notice_s))
        if events:
            return events  # The engine makes its plans without them first.
        self._urgent = self._changed = False
        self._decided_at = now
        holds = len(self._held) - len(self._draining)
        if self._fixed is not None:
            self._ask(self._fixed - holds)
            return []
        sizing = self._decide(now, holds)
        if sizing.devices >= holds:
            self._ask(sizing.devices - holds)
            return []
        self._ask(0)
        return self._give_back(now, holds - sizing.devices, sizing.interrupts)

    def result(self, simulation: SimulationResult) -> HeldResult:
        """What the run took."""
        end = simulation.makespan
        paid = self._paid_s + sum(max(0.0, end - came) for came in self._held.values())
        return HeldResult(
            simulation=simulation,
            device_s=paid,
            held=tuple(self._history),
            decisions=tuple(self._decisions),
            preempted=self._preempted,
        )

    # -- decisions -------------------------------------------------------------------------------------------

    def _decide(self, now: float, holds: int) -> Sizing:
        spent = self._paid_s + sum(now - came for came in self._held.values())
        sizing = self._sizer.decide(
            now,
            holds,
            self._end_on(self._search.now(self._state, now)),
            self._search.useful(self._state),
            asked=self._asked,
            spent_device_s=spent,
        )
        self._decisions.append((now, sizing))
        return sizing

    def _end_on(self, search: SearchNow | None) -> EndOn:
        if search is None:
            return lambda devices: None
        seed = self._scenario.seed + 7919 * len(self._decisions)
        return Player(search, draws=self._terms.draws, seed=seed).on

    def _useful_at_start(self) -> int:
        workload, shape = self._scenario.workload, self._scenario.d
        trials = {"hyperband": MOST_SIMULATED, "syncbohb": MOST_SIMULATED}.get(workload.algorithm, workload.trials)
        if workload.algorithm == "asha":
            trials = min(trials, workload.concurrency)
        return trials * shape

    def _ask(self, missing: int) -> None:
        """Makes it so many devices that are to come, as far as there is room beside those that are about to go."""
        missing = min(missing, max(self._terms.most, self._fixed or 0) - len(self._held))
        if max(0, missing) != self._asked:
            self._asked = max(0, missing)
            self._backend.ask(len(self._held) + self._asked)

    def _give_back(self, now: float, count: int, interrupts: bool) -> list[Event]:
        demand = self._state.demand
        idle = [device for device in demand.idle_since if device in self._held and device not in self._draining]
        going = [device for device in sorted(idle, reverse=True) if demand.may_give_back(device)][:count]
        events: list[Event] = [DeviceDraining(now, device, now + _LEAVING_S) for device in going]
        if interrupts:
            busy = sorted(self._held.keys() - self._draining - set(idle), reverse=True)[: count - len(going)]
            events += [DeviceRetiring(now, device) for device in busy]
            going += busy
        self._draining.update(going)
        self._given_back.update(going)
        return events

    # -- devices ---------------------------------------------------------------------------------------------

    def _came(self, device: int) -> None:
        if self._held:
            self._asked = max(0, self._asked - (self._now > 0.0))
        self._held[device] = self._now
        if self._terms.preempt_every_s is not None:
            self._taken_at[device] = self._now + self._fates.exponential(self._terms.preempt_every_s)
        self._note()

    def _left(self, device: int) -> None:
        self._paid_s += self._now - self._held.pop(device)
        self._taken_at.pop(device, None)
        self._urgent |= device in self._draining and device not in self._given_back
        self._draining.discard(device)
        self._note()

    def _note(self) -> None:
        if self._history and self._history[-1][0] == self._now:
            self._history.pop()
        self._history.append((self._now, len(self._held)))
