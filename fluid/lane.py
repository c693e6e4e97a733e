"""The worker program: a warm process, bound to one device, that hosts trials and runs one iteration at a time.

The same code runs under every backend. The driver says what to run; between two iterations the lane looks for
new messages, so whatever is asked takes effect at the end of the current iteration. Trials stay resident when
they pause: going on with another one is a look-up.

Code of trials runs in the main thread, because gradient mode, autocast and OpenMP are per thread.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fluid._clock import Clock, MonotonicClock
from fluid.lane_channel import Channel, Connection
from fluid.lane_context import Context, Output, read_random_state, restore_random_state, write_random_state
from fluid.lane_device import Meter, bind, warm_up
from fluid.lane_errors import causes, is_out_of_memory, one_line
from fluid.lane_messages import (
    Failed,
    Forget,
    Iterated,
    LaneOptions,
    Pause,
    Paused,
    Ready,
    Released,
    Run,
    Save,
    Saved,
    Ship,
    Shutdown,
    Start,
    Started,
    Stop,
    trial_folder,
)
from fluid.lane_note import Note
from fluid.lane_store import CheckpointStore
from fluid.pickling import pack_metrics
from fluid.trainable import Resident, can_save, make_resident

#: An iteration shorter than this is reported together with others.
_SHORT_S = 0.001
#: The file, within a checkpoint, with what belongs to the lane and not to the trainable.
_LANE_STATE = "lane.pkl"
#: Exit status of a lane whose device cannot be used any more.
_UNUSABLE = 70


def serve(connection: Connection, options: LaneOptions, on_hangup: Callable[[], None]) -> None:
    """Runs a lane until it is told to end or the driver is gone.

    Args:
        connection: to the driver.
        options: which lane this is.
        on_hangup: called in another thread when the driver is gone; must end the process, whatever it does.
    """
    # The driver decides what an interrupt means. A handler, because SIG_IGN would pass to sub-processes.
    signal.signal(signal.SIGINT, lambda *_: None)
    bind(options)
    warm_up(options)
    clock = MonotonicClock()
    output = Output(sys.stdout)
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = output
    try:
        _Lane(Channel(connection, clock, on_hangup), options, clock, output).run()
    finally:
        sys.stdout, sys.stderr = streams


def run_as_process(connection: Connection, options: LaneOptions) -> NoReturn:
    """Runs a lane as all that this process does; it leads a process group of its own."""
    faulthandler.enable()
    serve(connection, options, _end_with_group)
    os._exit(0)


def _end_with_group() -> None:
    """Ends the process in the middle of whatever it does, and those that a trial started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


@dataclass(slots=True)
class _Hosted:
    """A trial in this lane.

    Attributes:
        iteration: iterations done.
        left: iterations still to run.
        finished: it said that it has no more to do; it runs no further, whatever is asked.
        unsaved: seconds of work since it was saved.
        save_cost: seconds the last save took.
        held: bytes it holds on the device between iterations.
        saves_itself: whether it is saved of the lane's own accord.
    """

    trial_id: str
    context: Context
    body: Resident | None = None
    iteration: int = 0
    left: int = 0
    finished: bool = False
    unsaved: float = 0.0
    save_cost: float = 0.0
    held: float = 0.0
    saves_itself: bool = field(default=False)


class _Lane:
    """The state of a lane."""

    def __init__(self, channel: Channel, options: LaneOptions, clock: Clock, output: Output) -> None:
        self._channel = channel
        self._options = options
        self._clock = clock
        self._output = output
        self._home = os.getcwd()
        self._note = Note(options.note)
        self._meter = Meter(options.kind)
        self._store = CheckpointStore(options.lane_id, options.run_folder, options.memory_folder, options.memory_bytes)
        self._payloads: dict[int, bytes] = {}
        self._trainables: dict[int, Any] = {}
        self._hosted: dict[str, _Hosted] = {}
        #: Trials with iterations left; the first one runs.
        self._queue: deque[_Hosted] = deque()
        #: Whose state the process is in.
        self._current: _Hosted | None = None
        self._ended = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Ship: self._ship,
            Start: self._start,
            Run: self._run,
            Pause: self._pause,
            Save: self._save,
            Stop: self._stop,
            Forget: lambda message: self._store.delete(message.trial_id),
            Shutdown: self._shutdown,
        }

    def run(self) -> None:
        self._tell(Ready(self._clock.now(), os.getpid()))
        while not self._ended:
            try:
                messages = self._channel.receive(block=not self._queue)
            except (EOFError, OSError):
                return  # The driver is gone.
            for message in messages:
                self._handlers[type(message)](message)
            if self._queue and not self._ended:
                self._iterate(self._queue[0])

    # -- what the driver asks ------------------------------------------------------------------------------

    def _ship(self, message: Ship) -> None:
        self._payloads[message.key] = message.payload
        sys.path += [path for path in message.sys_path if path not in sys.path]

    def _start(self, message: Start) -> None:
        if message.trial_id in self._hosted:
            self._release(self._hosted[message.trial_id])
        begun = self._clock.now()
        folder = trial_folder(self._options.run_folder, message.trial_id)
        hosted = _Hosted(message.trial_id, Context(os.path.join(folder, "output.log"), self._home))
        self._hosted[message.trial_id] = hosted
        try:
            self._enter(hosted)
            self._meter.begin()
            trainable = self._trainable(message.key)
            hosted.saves_itself = can_save(trainable)
            hosted.body = make_resident(trainable, trial_id=message.trial_id, folder=folder)
            hosted.body.setup(pickle.loads(message.config))
            if message.checkpoint is not None:
                self._restore(hosted, message.checkpoint)
                hosted.iteration = message.iteration
            self._measure(hosted)
        except BaseException as error:
            self._fail(hosted, error)
            return
        now = self._clock.now()
        started = Started(now, message.trial_id, hosted.iteration, now - begun)
        self._tell(started, at_once=now - begun > _SHORT_S)
        self._add(hosted, message.iterations)

    def _run(self, message: Run) -> None:
        hosted = self._hosted.get(message.trial_id)
        if hosted is not None:
            self._add(hosted, message.iterations)

    def _pause(self, message: Pause) -> None:
        hosted = self._hosted.get(message.trial_id)
        if hosted is not None:
            self._halt(hosted)
            self._tell(Paused(self._clock.now(), hosted.trial_id, hosted.iteration))

    def _save(self, message: Save) -> None:
        hosted = self._hosted.get(message.trial_id)
        if hosted is None:
            return
        try:
            saved = self._write(hosted)
        except BaseException as error:
            self._fail(hosted, error)
            return
        if message.drop:
            self._release(hosted)
        self._tell(saved._replace(at=self._clock.now(), dropped=message.drop))

    def _stop(self, message: Stop) -> None:
        # One that is not here has failed, and that has been reported.
        hosted = self._hosted.get(message.trial_id)
        if hosted is not None:
            self._release(hosted)
            self._tell(Released(self._clock.now(), message.trial_id))

    def _shutdown(self, message: Shutdown) -> None:
        for hosted in list(self._hosted.values()):
            self._release(hosted)
        self._channel.flush()
        self._ended = True

    # -- iterations ----------------------------------------------------------------------------------------

    def _add(self, hosted: _Hosted, iterations: int) -> None:
        if hosted.finished:
            if iterations > 0:
                nothing = Iterated(self._clock.now(), hosted.trial_id, hosted.iteration, 0.0, None, None, True)
                self._tell(nothing)
            return
        if iterations > 0 and hosted.left == 0:
            self._queue.append(hosted)
        hosted.left += iterations

    def _halt(self, hosted: _Hosted) -> None:
        if hosted.left:
            hosted.left = 0
            self._queue.remove(hosted)

    def _iterate(self, hosted: _Hosted) -> None:
        assert hosted.body is not None
        self._enter(hosted)
        self._meter.begin()
        begun = self._clock.now()
        try:
            step = hosted.body.step()
            ephemeral = self._measure(hosted)
            now = self._clock.now()
            metrics = None if step.metrics is None else pack_metrics(step.metrics)
        except BaseException as error:
            self._fail(hosted, error)
            return
        seconds = now - begun
        if metrics is not None:
            hosted.iteration += 1
            hosted.unsaved += seconds
        if step.finished:
            hosted.finished = True
            self._halt(hosted)
        else:
            hosted.left -= 1
            if not hosted.left:
                self._queue.popleft()
        memory = None if ephemeral is None else (max(0.0, hosted.held), max(0.0, ephemeral))
        done = Iterated(now, hosted.trial_id, hosted.iteration, seconds, metrics, memory, step.finished)
        self._tell(done, at_once=seconds > _SHORT_S)
        if hosted.saves_itself:
            self._save_if_due(hosted)

    def _measure(self, hosted: _Hosted) -> float | None:
        measured = self._meter.end()
        if measured is None:
            return None
        hosted.held += measured[0]
        return measured[1]

    # -- saving --------------------------------------------------------------------------------------------

    def _save_if_due(self, hosted: _Hosted) -> None:
        """Saves a trial of the lane's own accord, where that costs little against the work it protects."""
        if hosted.unsaved < max(self._options.save_after, self._options.save_ratio * hosted.save_cost):
            return
        try:
            saved = self._write(hosted)
        except Exception:
            # Not the trial's fault as far as its training goes: it runs on, and nobody relies on a save.
            hosted.saves_itself = False
            traceback.print_exc()
            return
        self._tell(saved)

    def _write(self, hosted: _Hosted) -> Saved:
        assert hosted.body is not None
        body = hosted.body
        self._enter(hosted)
        begun = self._clock.now()

        def fill(folder: str) -> None:
            random_state = read_random_state()
            body.save(folder)
            # What saving drew is no part of the training, which must not depend on when it was saved.
            write_random_state(random_state)
            with open(os.path.join(folder, _LANE_STATE), "wb") as file:
                pickle.dump({"finished": hosted.finished, "random": random_state}, file)

        stored = self._store.save(hosted.trial_id, hosted.iteration, fill)
        now = self._clock.now()
        hosted.save_cost, hosted.unsaved = now - begun, 0.0
        return Saved(now, hosted.trial_id, hosted.iteration, *stored, dropped=False, seconds=now - begun)

    def _restore(self, hosted: _Hosted, path: str) -> None:
        assert hosted.body is not None
        path = self._store.find(path)
        hosted.body.restore(path)
        self._store.restored(hosted.trial_id, path)
        with suppress(FileNotFoundError), open(os.path.join(path, _LANE_STATE), "rb") as file:
            state = pickle.load(file)
            hosted.finished = state["finished"]
            restore_random_state(state["random"])

    # -- residents -----------------------------------------------------------------------------------------

    def _trainable(self, key: int) -> Any:
        if key not in self._trainables:
            self._trainables[key] = pickle.loads(self._payloads[key])
        return self._trainables[key]

    def _enter(self, hosted: _Hosted) -> None:
        """Puts the process into a resident's state, if it is not in it."""
        self._note.write(hosted.trial_id)
        if self._current is not hosted:
            if self._current is not None:
                self._current.context.leave()
            hosted.context.enter(self._output)
            self._current = hosted

    def _tell(self, message: Any, *, at_once: bool = True) -> None:
        # The trial's code has returned: before anybody can know, nobody is to blame any more.
        self._note.write(None)
        self._channel.send(message, at_once=at_once)

    def _release(self, hosted: _Hosted) -> None:
        """Lets a resident go; what its clean-up raises is in its log."""
        self._enter(hosted)
        try:
            if hosted.body is not None:
                hosted.body.cleanup()
        except BaseException:
            traceback.print_exc()
        hosted.body = None
        self._halt(hosted)
        del self._hosted[hosted.trial_id]
        self._store.released(hosted.trial_id)
        self._output.switch(None)
        self._current = None
        self._meter.give_back()

    def _fail(self, hosted: _Hosted, error: BaseException) -> None:
        """Lets a resident go that raised, and tells the driver why."""
        kind = "out_of_memory" if is_out_of_memory(error) else "error"
        # The first frame is the lane's own.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = one_line(error)
        # The frames hold whatever filled the memory.
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)
        self._release(hosted)
        if kind == "out_of_memory":
            gc.collect()
        self._tell(Failed(self._clock.now(), hosted.trial_id, kind, message, text))
        if not self._meter.is_usable():
            os._exit(_UNUSABLE)
