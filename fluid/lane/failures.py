"""Reports exceptions of trials' code, and finds out whether the device still works."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from fluid._clock import Clock
from fluid.engine.events import Failure, TrialCalled, TrialFailed
from fluid.errors import PrefixEndedError
from fluid.lane.device.device import MemoryMeter
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.errors import asked_beyond, describe, is_for_want_of_space
from fluid.lane.output import LaneStreams
from fluid.lane.protocol import LaneOptions
from fluid.lane.resident import ResidentTrial, is_not_savable, refusal_of
from fluid.lane.residents import Residents

# -- user code -----------------------------------------------------------------------------------
#
# Runs code of a trial, whose exceptions are the trial's.


class UserCode:
    """Runs a trial's code in a ``with`` block; an exception in the block fails the trial and is not raised again.

    So does a value that a shared run is not to know, and that its code has asked for.

    Args:
        resident: the trial.
        fail: called with the trial and the exception.

    Attributes:
        failed: whether it raised.
    """

    __slots__ = ("_fail", "_resident", "failed")

    def __init__(self, resident: ResidentTrial, fail: Callable[[ResidentTrial, BaseException], None]) -> None:
        self.failed = False
        self._resident = resident
        self._fail = fail

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if exc is None:
            text = asked_beyond(self._resident.trial_id)
            if text is None or self._resident.body is None:
                return False
            exc = PrefixEndedError(text)  # It has caught the error, and would report what depends on that.
        self.failed = True
        self._fail(self._resident, exc)
        return True


# -- failing -------------------------------------------------------------------------------------


#: Exit status of a lane whose device has failed.
_UNUSABLE = 70


class LaneFailures:
    """Reports exceptions of trials, and ends the process where its device cannot be used any more.

    Args:
        options: the lane's.
        clock: the lane's.
        output: has the log of the trial whose code runs.
        meter: of the device.
        own_memory: what the lane takes for itself, and others have.
        residents: the lane's.
        send: sends a message to the driver.
        flush: sends all messages that wait for others.
    """

    def __init__(
        self,
        options: LaneOptions,
        clock: Clock,
        output: LaneStreams,
        meter: MemoryMeter,
        own_memory: OwnMemory,
        residents: Residents,
        send: Callable[[Any], None],
        flush: Callable[[], None],
    ) -> None:
        self._options = options
        self._clock = clock
        self._output = output
        self._meter = meter
        self._own_memory = own_memory
        self._residents = residents
        self._send = send
        self._flush = flush

    def user_code(self, resident: ResidentTrial) -> UserCode:
        """Runs a trial's code in a ``with`` block; an exception in it fails the trial."""
        return UserCode(resident, self.fail)

    def saving(self, resident: ResidentTrial) -> UserCode:
        """As :meth:`user_code`, for code that saves the trial."""
        return UserCode(resident, self._fail_to_save)

    def fail(self, resident: ResidentTrial, error: BaseException, kind: str | None = None) -> None:
        """Releases a resident that raised, and reports its failure, of that kind if one is given."""
        raised, is_usable = self.describe(error, resident.iteration)
        raised = replace(raised, kind=kind or raised.kind)
        if (asked := asked_beyond(resident.trial_id)) is not None:
            raised = replace(raised, kind="parted", message=asked)
        if self._residents.current is resident:
            self._output.log.write(raised.traceback)  # The log is the first place where people look.
        self._residents.release(resident)
        self.send_raised(TrialFailed(self._clock.now(), resident.trial_id, resident.lane_id, raised), raised, is_usable)

    def _fail_to_save(self, resident: ResidentTrial, error: BaseException) -> None:
        """As for any error, but that of a full disk is not the trial's, and a state may be none that can be saved."""
        if is_not_savable(error):
            self._send(refusal_of(error, resident, self._clock.now(), refuses=True))
            return
        self.fail(resident, error, kind="not_saved" if is_for_want_of_space(error) else None)

    def describe(self, error: BaseException, iteration: int | None = None) -> tuple[Failure, bool]:
        """Describes an exception, of a trial after so many iterations; returns also whether the device can be used.

        Ends the process without a report if the device cannot be, and another lane may have caused that: MPS reports a
        fatal fault of one client to all of them, without naming it. The driver finds the culprit.
        """
        raised = describe(error, iteration)
        if raised.kind == "out_of_memory":
            raised = replace(raised, squeezed=self._own_memory.others_have_grown())
        if raised.kind == "out_of_memory" or self._meter.is_usable(raised.traceback):
            return raised, True
        if self._options.environment:
            self._end(raised)
        return replace(raised, kind="device"), False

    def describe_of_several(self, error: BaseException) -> Failure:
        """Describes an exception of a step of several trials; ends the process if the device cannot be used any more.

        It does so without a report: the driver then blames none of them, and tries each one by itself.
        """
        raised = describe(error)
        if not self._meter.is_usable(raised.traceback, allocates=raised.kind == "out_of_memory"):
            self._end(raised)
        return raised

    def _end(self, raised: Failure) -> None:
        self._flush()
        os.write(2, raised.traceback.encode(errors="replace"))  # The lane's log.
        os._exit(_UNUSABLE)

    def send_raised(self, message: TrialFailed | TrialCalled, raised: Failure, is_usable: bool) -> None:
        """Reports an exception; ends the process if its device cannot be used any more."""
        if raised.kind == "out_of_memory":
            self._meter.release_cached(collect=True)
            is_usable = self._meter.is_usable(allocates=True)
        self._send(message)
        if not is_usable:
            os._exit(_UNUSABLE)
