"""The simulated backend: the engine's commands to events, on a virtual clock.

Time stands still while the engine thinks, and jumps to the next thing that happens when it polls. Nothing really runs:
iterations report no metrics, and calls return nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fluid._clock import VirtualClock
from fluid.backends.base import ScalingLimits, VirtualBackend
from fluid.backends.simulated.devices import VirtualDevices
from fluid.backends.simulated.steps import NONE_LEFT, SimulatedTrial, Truth, VirtualStep, answer_to, placed_by
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
    DeviceAdded,
    Event,
    LaneLost,
    LaneReady,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.errors import FluidError, require_number, require_one_of
from fluid.keeping import Kept
from fluid.lane.policy import POLICIES
from fluid.planners.rollout import Segment
from fluid.resources import Device
from fluid.trainables.payload import TrialPayload
from fluid.waiting.clock_hold import NO_HOLD, ClockHold, VirtualClockHold

# -- booting -------------------------------------------------------------------------------------
#
# Virtual devices that were asked for and have not come yet.


class BootingDevices:
    """Gives each device some time after it was asked for.

    Args:
        boot_s: that time, seconds.
        devices: the devices at the start; further ones are like the first of them, and have indices of their own.
    """

    def __init__(self, boot_s: float, devices: Sequence[Device]) -> None:
        self._boot_s = boot_s
        self._like = devices[0] if devices else Device(0)
        self._next = 1 + max((device.index for device in devices), default=-1)
        #: When each of them comes, ascending.
        self._due: deque[float] = deque()

    @property
    def next_at(self) -> float:
        """When the next one comes, seconds; infinite if none was asked for."""
        return self._due[0] if self._due else math.inf

    def ask(self, count: int, now: float) -> None:
        """Makes it ``count`` devices that are to come; those asked for last are withdrawn first."""
        while len(self._due) > max(0, count):
            self._due.pop()
        while len(self._due) < count:
            self._due.append(now + self._boot_s)

    def pop(self, now: float) -> list[Device]:
        """Returns those that have come by now."""
        come = []
        while self._due and self._due[0] <= now:
            self._due.popleft()
            come.append(replace(self._like, index=self._next))
            self._next += 1
        return come


# -- machines ------------------------------------------------------------------------------------
#
# Virtual devices as a session holds them: those at the start, those that are added, and those that come as asked.


class VirtualMachines(VirtualBackend):
    """The devices of a virtual clock's backend.

    Args:
        devices: the devices at the start.
        scaling_limits: how far the session may scale; a device that it asks for is like the first one.
        record: whether to keep :attr:`segments`.
        lane_policy: which of several trials a lane runs next, one of those of :mod:`fluid.lane.policy`; ``None`` for
            the one that has waited longest.

    Attributes:
        clock: the virtual clock.
        scaling_limits: how far the session may scale.

    Raises:
        InvalidFieldError: a limit of scaling, or ``boot_s``, cannot be used.
    """

    def __init__(
        self,
        devices: Iterable[Device],
        scaling_limits: ScalingLimits,
        *,
        record: bool = True,
        lane_policy: str | None = None,
    ) -> None:
        if lane_policy is not None:
            require_one_of("lane_policy", lane_policy, tuple(POLICIES))
        self.lane_policy = lane_policy
        self.scaling_limits = scaling_limits
        self.clock = VirtualClock()
        self._devices = VirtualDevices(self.clock, record=record, lane_policy=lane_policy)
        self._devices.add(devices)
        boot_s = require_number("boot_s", scaling_limits.provision_s, at_least=0.0)
        self._booting = BootingDevices(boot_s, self._devices.all())

    @property
    def segments(self) -> list[Segment]:
        """Stretches of time in which a trial held devices, as they ended."""
        return self._devices.segments

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return self._devices.all()

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Adds devices."""
        self._devices.add(devices)

    def ask(self, devices: int) -> None:
        """Asks for the devices that are missing to so many in all."""
        self._booting.ask(devices - len(self._devices), self.clock.now())

    def can_give_back(self, device_id: int) -> bool:
        """Whether a device can be given back alone: each one can."""
        return device_id in self._devices

    def give_back(self, device_id: int) -> None:
        """Gives a device back."""
        self._devices.remove(device_id)


# -- standstill ----------------------------------------------------------------------------------
#
# When the virtual clock stands still: while a thread that submits acts, or where nothing will ever happen.


class Standstill:
    """Lets the thread that moves a virtual clock wait.

    Args:
        clock: the clock.
        held: whether the clock stands still while a thread that submits to the session acts; otherwise it goes on
            whatever other threads do.

    Attributes:
        hold: who holds the clock.
    """

    def __init__(self, clock: VirtualClock, *, held: bool) -> None:
        self._clock = clock
        self._virtual = VirtualClockHold(clock) if held else None
        self.hold: ClockHold = NO_HOLD if self._virtual is None else self._virtual
        self._woken = threading.Event()

    def wake(self) -> None:
        """Ends the wait in progress, or else the next; from any thread."""
        if self._virtual is None:
            self._woken.set()
        else:
            self._virtual.nudge()

    def await_submitters(self) -> bool:
        """Waits until no thread holds the clock; returns whether none does, and :meth:`wake` was not called."""
        if self._virtual is not None:
            return self._virtual.await_free()
        is_woken = self._woken.is_set()
        self._woken.clear()
        return not is_woken

    def end_waits(self, instant: float) -> bool:
        """Ends waits of submitters whose timeout comes before an instant, seconds, and moves the clock there.

        Where nothing will happen, as the instant is infinite, it ends the waits of those who only poll; and where there
        are none, waits for :meth:`wake`.

        Returns:
            Whether there was anything to do.
        """
        if self._virtual is None:
            if instant == float("inf"):
                self._woken.wait()
                self._woken.clear()
                return True
            return False
        if self._virtual.end_settled() or (instant == float("inf") and self._virtual.expire_limited_polls()):
            return True
        deadline = self._virtual.next_deadline
        if deadline < instant:
            self._clock.advance_to(max(deadline, self._clock.now()))
            return self._virtual.expire(self._clock.now())
        if instant < float("inf"):
            return False
        if not self._virtual.expire_polls():
            self._virtual.await_nudge()
        return True


# -- timers --------------------------------------------------------------------------------------
#
# What happens some virtual seconds after a command, beside the steps of trials.


class Timers:
    """Calls that are made at a virtual time, those of one instant in the order in which they were asked for."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    @property
    def next_at(self) -> float:
        """When the next call is due, seconds; infinite where none is."""
        return self._calls[0][0] if self._calls else float("inf")

    def at(self, instant: float, call: Callable[[], None]) -> None:
        """Has a call made at an instant, seconds."""
        heapq.heappush(self._calls, (instant, next(self._sequence), call))

    def fire(self, now: float) -> None:
        """Makes the calls that are due."""
        while self.next_at <= now:
            heapq.heappop(self._calls)[2]()


# -- backend -------------------------------------------------------------------------------------


#: Events closer together than this share of the time are one instant.
_SAME_INSTANT = 1e-12


class SimulatedBackend(VirtualMachines):
    """Implements :class:`fluid.backends.base.Backend` by the runtime model.

    Args:
        truth: how a trial really behaves, by its id and the config that it was registered with (empty if it was not).
        devices: the devices at the start.
        epsilon: seconds a resize really costs.
        start_s: seconds until a trial is set up, or restored, in a lane.
        saves: whether every iteration is saved, at no cost, so that a lost lane loses no more than the one in flight.
        record: whether to keep :attr:`segments`.
        autoscale, idle_timeout_s: see :class:`fluid.backends.base.ScalingLimits`.
        boot_s: seconds until a device that was asked for comes; it is like the first one.
        held: whether the clock stands still while a thread that submits to the session acts.
        lane_policy: which of several trials a lane runs next (:mod:`fluid.lane.policy`); ``None`` as for rounds.

    Attributes:
        clock: the virtual clock.
        hold: who holds it.
        resizes: resizes so far.
        scaling_limits: how far the session may scale.

    Raises:
        InvalidFieldError: a limit of scaling, or ``boot_s``, cannot be used.

    Example:
        >>> from fluid import Device
        >>> from fluid.backends.simulated import SimulatedBackend, Truth
        >>> from fluid.engine.commands import StartLane, StartTrial
        >>> backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=2.0), [Device(0)])
        >>> backend.execute([StartLane(lane_id=0, device_id=0), StartTrial("a", (0,), iterations=1)])
        >>> [type(event).__name__ for event in backend.poll()]
        ['LaneReady', 'TrialStarted']
        >>> [event.at for event in backend.poll()]
        [2.0]
    """

    def __init__(
        self,
        truth: Callable[[str, Mapping[str, Any]], Truth],
        devices: Iterable[Device] = (),
        *,
        epsilon: float = 0.0,
        start_s: float = 0.0,
        saves: bool = False,
        record: bool = True,
        autoscale: int | None = None,
        idle_timeout_s: float | None = None,
        boot_s: float = 0.0,
        held: bool = False,
        lane_policy: str | None = None,
    ) -> None:
        limits = ScalingLimits.of(autoscale, idle_timeout_s, boot_s)
        super().__init__(devices, limits, record=record, lane_policy=lane_policy)
        self._standstill = Standstill(self.clock, held=held)
        self.hold = self._standstill.hold
        self.resizes = 0
        self._truth = truth
        self._epsilon = epsilon
        self._start_s = start_s
        self._saves = saves
        self._timers = Timers()
        self._configs: dict[str, bytes] = {}  #: trial -> its config, pickled
        self._trials: dict[str, SimulatedTrial] = {}
        self._parts: dict[str, tuple[int, ...]] = {}  #: trial -> lanes that hold a part of it
        self._ready: list[Event] = []
        self._closed = False
        self._handlers: dict[type[Command], Callable[[Any], None]] = {
            StartLane: self._start_lane,
            StopLane: self._stop_lane,
            KillLane: self._kill_lane,
            DumpStacks: lambda _: None,  # No code runs.
            StartTrial: self._start,
            RunIteration: self._run,
            LimitMemory: lambda _: None,  # Nor is memory taken.
            LimitRows: lambda command: self._devices.limit_rows(command.lane_id, command.rows),
            Pause: self._pause,
            StopTrial: self._stop,
            Save: self._save,
            Persist: self._persist,
            Fork: self._fork,
            ForkSaved: self._fork_saved,
            ValueCheckpoints: lambda _: None,  # Host memory is boundless.
            PrefetchCheckpoint: lambda command: self._ready.append(placed_by(command, self.now())),
            Resize: self._resize,
            Call: self._call,
            Answer: lambda _: None,  # No code asks.
        }

    # -- the interface of a backend --------------------------------------------------------------------------

    def now(self) -> float:
        """Returns the virtual time, seconds."""
        return self.clock.now()

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes what a trial is. Its config tells ``truth`` how it behaves; the trainable is never loaded."""
        self._configs[trial_id] = payload.config

    def forget(self, trial_id: str) -> None:
        """Drops a trial that no command will name again."""
        self._configs.pop(trial_id, None)

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out, at this instant.

        Raises:
            FluidError: the backend was closed, or a command is not for a backend; then none of them was carried out.
        """
        self._check_open()
        for command in commands:
            if type(command) not in self._handlers:
                raise FluidError(f"{command} is no command for a backend")
            for device in command.device_ids if isinstance(command, StartLane) else ():
                if device not in self._devices:
                    raise FluidError(f"{command}: there is no device {device}")
        for command in commands:
            self._handlers[type(command)](command)

    def next_at(self) -> float:
        """When the next thing happens, seconds; infinite where nothing will."""
        self._devices.begin_steps()
        return self.now() if self._ready else self._next_at()

    def _next_at(self) -> float:
        return min(self._devices.next_at(), self._booting.next_at, self._timers.next_at)

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Advances, by at most ``timeout`` virtual seconds, to what happens next, and returns all that happens then.

        Time does not pass once :meth:`wake` was called; this waits for it where nothing will ever happen.
        """
        self._check_open()
        if self._standstill.await_submitters():
            self._devices.begin_steps()
            if not self._ready:
                self._advance(float("inf") if timeout is None else self.now() + max(0.0, timeout))
        elif self.hold.is_virtual:
            return []
        return self.end()

    def wake(self) -> None:
        """Makes :meth:`poll`, the one in progress or else the next, return; from any thread."""
        self._standstill.wake()

    def end(self) -> list[Event]:
        """Returns what has happened by now: see :meth:`fluid.backends.base.Backend.end`."""
        events, self._ready = self._ready, []
        return events

    def close(self) -> None:
        """Ends every lane. Closing twice is harmless."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise FluidError("this backend was closed")

    def _advance(self, latest: float) -> None:
        instant = max(self._next_at(), self.now())
        if self._standstill.end_waits(min(instant, latest)):
            return
        if instant > latest:
            self.clock.advance_to(latest)
        else:
            self.clock.advance_to(instant)
            come = self._booting.pop(instant)
            self._devices.add(come)
            self._ready += [DeviceAdded(instant, device) for device in come]
            self._timers.fire(instant)
            while self._devices.next_at() <= instant + _SAME_INSTANT * max(1.0, instant):
                step = self._devices.pop()
                if step.ended is None:
                    self._end_iteration(step)
                else:
                    self._ready.append(step.ended)
                    self._carry_out_forks(step.trials[0])
                    self._go_on(step.trials[0])

    # -- commands --------------------------------------------------------------------------------------------

    def _start_lane(self, command: StartLane) -> None:
        self._devices.start_lane(command.lane_id, command.device_ids)
        self._ready.append(LaneReady(self.now(), command.lane_id))

    def _stop_lane(self, command: StopLane) -> None:
        lane_id = command.lane_id
        ended: list[SimulatedTrial] = []
        for trial in list(self._trials.values()):
            parts = self._parts.get(trial.trial_id, ())
            if lane_id in trial.lanes and lane_id in parts:
                if trial.busy:
                    self._devices.vacate(trial)
                left = tuple(lane for lane in trial.lanes if lane != lane_id and lane in parts)
                if left and not trial.stopping:  # They stand still until the engine says how they go on.
                    trial.lanes, trial.left, trial.pausing = left, 0, None
                    continue
                del self._trials[trial.trial_id]
                ended.append(trial)
        for trial_id in [trial_id for trial_id, parts in self._parts.items() if lane_id in parts]:
            self._leave(trial_id, lane_id)
        self._devices.stop_lane(lane_id)
        for trial in ended:  # Its other lanes still owe the answer to a StopTrial.
            self._release(trial.trial_id, trial.stopping)

    def _kill_lane(self, command: KillLane) -> None:
        if self._devices.has_lane(command.lane_id):
            self._stop_lane(StopLane(command.lane_id))
            self._ready.append(LaneLost(self.now(), command.lane_id, command.reason))

    def _start(self, command: StartTrial) -> None:
        trial_id, done = command.trial_id, command.checkpoint.iteration if command.checkpoint else 0
        before = self._trials.get(trial_id)
        if before is not None and before.stopping:  # it starts elsewhere before the lanes it leaves have answered
            self._devices.vacate(before)
            self._release(trial_id, before.stopping)
        config = self._configs.get(trial_id)
        truth = self._truth(trial_id, {} if config is None else pickle.loads(config))
        self._trials[trial_id] = SimulatedTrial(trial_id, truth, command.lane_ids, done=done)
        self._parts[trial_id] = command.lane_ids
        rank0, seconds, key = command.lane_ids[0], self._setup_seconds(command), truth.fusion_key
        started = TrialStarted(self.now() + seconds, trial_id, rank0, iteration=done, seconds=seconds, fusion_key=key)
        if seconds > 0.0:
            self._devices.occupy(self._trials[trial_id])
            self._devices.begin_event(self._trials[trial_id], started)
        else:
            self._ready.append(started)
        self._run(command)

    def _setup_seconds(self, command: StartTrial) -> float:
        return self._start_s

    def _run(self, command: StartTrial | RunIteration) -> None:
        trial = self._trials[command.trial_id]
        trial.left += command.iterations
        if trial.truth.course is not None and trial.left > 0:
            trial.truth.course.prepare(range(trial.done + 1, trial.done + 1 + trial.left))
        if not trial.busy and trial.left > 0:
            trial.lanes = command.lane_ids
            self._devices.occupy(trial)
            self._devices.begin_iteration(trial)

    def _pause(self, command: Pause) -> None:
        if (trial := self._trials.get(command.trial_id)) is not None:
            trial.pausing = command.purpose
            if trial.step is None:
                self._rest(trial)

    def _stop(self, command: StopTrial) -> None:
        trial = self._trials.get(command.trial_id)
        if trial is not None:
            trial.keeping = command.keep
        if trial is not None and trial.busy and trial.lanes[0] in command.lane_ids:
            trial.stopping = command.lane_ids
            if trial.step is None:
                self._rest(trial)
        else:
            self._release(command.trial_id, command.lane_ids)

    def _save(self, command: Save) -> None:
        if (trial := self._trials.get(command.trial_id)) is None:
            return
        lane_id = command.lane_ids[0]
        checkpoint = self._checkpoint(trial, lane_id, in_memory=not command.durable)
        kept = Kept(0) if command.keep else None
        self._ready.append(TrialSaved(self.now(), trial.trial_id, lane_id, checkpoint, dropped=command.drop, kept=kept))
        if command.drop:
            self._leave(trial.trial_id, lane_id)
            del self._trials[trial.trial_id]

    def _persist(self, command: Persist) -> None:
        checkpoint = replace(command.checkpoint, in_memory=False)
        kept = Kept(0) if command.keep else None
        self._ready.append(TrialSaved(self.now(), command.trial_id, None, checkpoint, copied=True, kept=kept))

    def _fork(self, command: Fork) -> None:
        if (trial := self._trials.get(command.trial_id)) is not None:
            trial.forks.append(command)
            if trial.step is None:
                self._carry_out_forks(trial)

    def _carry_out_forks(self, trial: SimulatedTrial) -> None:
        """Between two iterations: saves a trial for those that start from the state that it is in."""
        finished = trial.played is not None and trial.played.finished
        for fork in list(trial.forks):
            wanted = trial.done if fork.at is None else fork.at
            if wanted <= trial.done or finished:
                trial.forks.remove(fork)
                self._forked(trial, fork, wanted)

    def _forked(self, trial: SimulatedTrial, fork: Fork, wanted: int) -> None:
        parent, lane_id, seconds = trial.trial_id, trial.lanes[0], self._fork_seconds()
        if wanted != trial.done:
            problem, is_past = f"{parent!r} has a state of {trial.done} iterations", wanted < trial.done
            self._ready.append(
                TrialForked(self.now(), fork.child, parent=parent, lane_id=lane_id, problem=problem, is_past=is_past)
            )
            return
        at, checkpoint = self.now() + seconds, self._checkpoint(trial, lane_id, in_memory=True)
        forked = TrialForked(at, fork.child, parent=parent, lane_id=lane_id, checkpoint=checkpoint, seconds=seconds)
        if seconds > 0.0:
            self._timers.at(at, lambda: self._ready.append(forked))
        else:
            self._ready.append(forked)

    def _fork_seconds(self) -> float:
        return 0.0

    def _fork_saved(self, command: ForkSaved) -> None:
        checkpoint, child = command.checkpoint, command.trial_id
        self._ready.append(TrialForked(self.now(), child, parent=command.parent, lane_id=None, checkpoint=checkpoint))

    def _resize(self, command: Resize) -> None:
        trial = self._trials[command.trial_id]
        trial.lanes = self._parts[command.trial_id] = command.lane_ids
        trial.left, self.resizes = command.iterations, self.resizes + 1
        self._devices.occupy(trial)
        self._devices.begin_resize(trial, self._epsilon)

    def _call(self, command: Call) -> None:
        if (trial := self._trials.get(command.trial_id)) is not None:
            self._ready.append(answer_to(command, trial, self.now()))

    # -- what happens ----------------------------------------------------------------------------------------

    def _end_iteration(self, step: VirtualStep) -> None:
        for trial in list(step.trials):
            played = trial.played
            trial.done += played is not NONE_LEFT and (played is None or played.failure is None)
            trial.left = 0 if played is not None and played.finished else trial.left - 1
            trial.record_iteration(self.now() - step.began)
            self._ready.append(step.iteration_done(trial, self.now()))
            if played is not None and played.failure is not None:
                self._fail(trial)
                step.trials.remove(trial)
            elif self._saves:
                lane_id = trial.lanes[0]
                self._ready.append(TrialSaved(self.now(), trial.trial_id, lane_id, self._checkpoint(trial, lane_id)))
        for trial in step.trials:
            self._carry_out_forks(trial)
            self._go_on(trial)

    def _fail(self, trial: SimulatedTrial) -> None:
        """Takes a trial that has raised off its devices, and out of the lane of rank 0."""
        self._devices.vacate(trial)
        self._leave(trial.trial_id, trial.lanes[0])
        del self._trials[trial.trial_id]

    def _checkpoint(self, trial: SimulatedTrial, lane_id: int, *, in_memory: bool = False) -> Checkpoint:
        return Checkpoint(trial.done, "", self._devices.host_of(lane_id), in_memory)

    def _go_on(self, trial: SimulatedTrial) -> None:
        if trial.left > 0 and not (trial.pausing or trial.stopping):
            self._devices.begin_iteration(trial)
        else:
            self._rest(trial)

    def _rest(self, trial: SimulatedTrial) -> None:
        """Takes a trial off its devices between two iterations, and answers what was asked of it."""
        if trial.busy:
            self._devices.vacate(trial)
        self._answer(trial)

    def _answer(self, trial: SimulatedTrial) -> None:
        """Answers what was asked of a trial while it was busy."""
        if trial.pausing is not None:
            purpose, trial.pausing, trial.left = trial.pausing, None, 0
            paused = TrialPaused(self.now(), trial.trial_id, trial.lanes[0], iteration=trial.done, purpose=purpose)
            self._ready.append(paused)
        if trial.stopping:
            self._release(trial.trial_id, trial.stopping)

    def _release(self, trial_id: str, lanes: tuple[int, ...]) -> None:
        for lane in lanes:
            if lane in self._parts.get(trial_id, ()):
                trial = self._trials.get(trial_id)
                if trial is not None and trial.keeping and trial.lanes[0] == lane:
                    checkpoint = self._checkpoint(trial, lane)
                    self._ready.append(TrialSaved(self.now(), trial_id, lane, checkpoint, kept=Kept(0)))
                self._leave(trial_id, lane)
                self._ready.append(TrialReleased(self.now(), trial_id, lane))
        if trial_id in self._trials and self._trials[trial_id].lanes[0] not in self._parts.get(trial_id, ()):
            del self._trials[trial_id]

    def _leave(self, trial_id: str, lane_id: int) -> None:
        if left := tuple([lane for lane in self._parts.pop(trial_id, ()) if lane != lane_id]):
            self._parts[trial_id] = left
