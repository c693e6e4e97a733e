"""Runs steps of several trials at once, as a :class:`fluid.fused.FusedPack`, and takes packs apart that fail."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fluid._clock import Clock
from fluid._private_files import make_folder
from fluid.engine.events import FusionLimited
from fluid.lane.errors import is_out_of_memory, one_line
from fluid.lane.failures import LaneFailures
from fluid.lane.output import LaneStreams
from fluid.lane.protocol import LaneOptions
from fluid.lane.resident import ResidentTrial
from fluid.lane.residents import Residents
from fluid.lane.rows.fused import fused_trial_of
from fluid.lane.rows.groups import RowGroup, RowPack
from fluid.trainables.resident import Step, step_of

# -- row checks ----------------------------------------------------------------------------------
#
# The self-check of fused trials in a lane: once for each kind of trials and machine, before the first are fused.


#: The folder, within a run's, of what lanes of this machine have found.
_FOLDER = "fusion"


class RowChecks:
    """Finds out whether trials may be fused.

    The result is kept in a file in the run's folder, so that the other lanes of the machine need no check of their own.

    Args:
        options: the lane's.
        origin: returns what tells the trainable of a resident from others with the same name.
    """

    def __init__(self, options: LaneOptions, origin: Callable[[ResidentTrial], str]) -> None:
        self._folder = os.path.join(options.run_folder, _FOLDER)
        self._kind = options.kind
        self._origin = origin

    def known(self, group: RowGroup, one: ResidentTrial) -> str | None:
        """Returns what a lane of this machine has found, as :meth:`why_not` does; ``None`` if none has."""
        with suppress(OSError, UnicodeDecodeError), open(self._path(group, one), encoding="utf-8") as file:
            return file.read()
        return None

    def why_not(self, group: RowGroup, one: ResidentTrial, two: ResidentTrial | None) -> str:
        """Says why trials of a group should not be fused, in one line; empty if they can be.

        Trains new trials of the configs of two of them, or of one with two seeds, alone and together; see
        :func:`fluid.fused.why_not_fused`.

        Raises:
            Exception: what the user's code raises in a trial that trains alone.
        """
        if (found := self.known(group, one)) is not None:
            return found
        from fluid.fused.check import why_alike_not_fused

        other = None if two is None else fused_trial_of(two.body)
        reason = why_alike_not_fused(fused_trial_of(one.body), other) or ""
        path = self._path(group, one)
        with suppress(OSError):
            make_folder(self._folder)
            own = f"{path}.{os.getpid()}"
            with open(own, "w", encoding="utf-8", errors="replace") as file:
                file.write(reason)
            os.replace(own, path)
        return reason

    def _path(self, group: RowGroup, one: ResidentTrial) -> str:
        return os.path.join(self._folder, f"{group.digest}-{self._origin(one)}-{self._kind}")


# -- row steps -----------------------------------------------------------------------------------


#: Self-checks that raise before trials are taken for such that cannot be fused.
_FAILED_CHECKS = 2
#: What a self-check takes: so many set-ups, and some seconds to record programs. For the sake of one trial it is made
#: where that has work left for so many times as long: as a pack, it takes half of the time or less.
_CHECK_SET_UPS = 4
_CHECK_S = 2.0
_CHECK_WORTH = 2.0


class RowSteps:
    """Runs iterations of residents that train in one step.

    Args:
        clock: the lane's.
        output: has the log of the trial whose code runs.
        residents: the lane's.
        options: its settings.
        failures: reports exceptions.
        send: sends a message to the driver.
        iterate_alone: runs an iteration of one resident, and reports it.
        report: sends the reports of a step of several.
    """

    def __init__(
        self,
        clock: Clock,
        output: LaneStreams,
        residents: Residents,
        options: LaneOptions,
        failures: LaneFailures,
        send: Callable[[Any], None],
        iterate_alone: Callable[[ResidentTrial], None],
        report: Callable[[Sequence[tuple[ResidentTrial, Any]]], None],
    ) -> None:
        self._clock = clock
        self._output = output
        self._residents = residents
        self._checks = RowChecks(options, residents.origin)
        self._failures = failures
        self._send = send
        self._iterate_alone = iterate_alone
        self._report = report

    def iterate(self, pack: RowPack, rows: Sequence[ResidentTrial]) -> None:
        """Runs an iteration of some rows of a pack, and reports it.

        Where a step raises, halves of the pack step by themselves, down to the trial that raises alone. Only that one
        fails.
        """
        begun, was_checked = self._clock.now(), pack.group.is_checked
        is_pack = len(rows) > 1 or self._is_worth_a_pack(pack.group, rows[0])
        if not is_pack or self._may_fuse(pack.group, rows):
            self._iterate(pack, rows, begun, was_checked=was_checked)
            self._residents.fused.groups.note_step(pack, rows, self._clock.now() - begun)

    def _is_worth_a_pack(self, group: RowGroup, row: ResidentTrial) -> bool:
        """Whether one trial should train as a pack, for which a self-check may be made."""
        if not self._gains_as_pack(group, row):
            return False
        if group.is_checked or self._checks.known(group, row) is not None:
            return True
        if row.pace is None or self._residents.fused.groups.most == math.inf:  # The driver has not spoken of fusing.
            return False
        return row.left * row.pace > _CHECK_WORTH * (_CHECK_SET_UPS * row.set_up_s + _CHECK_S)

    def _gains_as_pack(self, group: RowGroup, row: ResidentTrial) -> bool:
        """Whether one trial would train faster as a pack, and nothing is known against it."""
        if not group.packs_of_one or group.most <= 1:
            return False
        from fluid.fused.pack import has_graphs

        return has_graphs(fused_trial_of(row.body))

    def _iterate(self, pack: RowPack, rows: Sequence[ResidentTrial], begun: float, *, was_checked: bool = True) -> None:
        if len(rows) == 1 and not (pack.group.is_checked and self._gains_as_pack(pack.group, rows[0])):
            self._residents.fused.separate(rows[0])
            self._iterate_alone(rows[0])
            return
        try:
            self._step(pack, rows, begun, was_checked=was_checked)
            return
        except BaseException as error:
            is_for_memory, reason = is_out_of_memory(error), one_line(error)
            raised = self._failures.describe_of_several(error)
        self._output.log.write(raised.traceback)
        if is_for_memory:
            self._residents.memory.release_cached()
        if len(rows) == 1:
            pack.group.packs_of_one = False
            self._iterate(pack, rows, self._clock.now())
            # If it has failed alone, too, it was to blame itself.
            pack.group.packs_of_one = self._residents.get(rows[0].trial_id) is not rows[0]
            return
        if is_for_memory:
            self._limit(pack.group, rows[0], len(rows) // 2, f"{len(rows)} trials do not fit: {reason}")
            return
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            self._iterate(pack, half, self._clock.now())
        if all(self._residents.get(row.trial_id) is row for row in rows) and pack.group.most > 1:
            self._limit(pack.group, rows[0], 1, f"only in a pack, the trials raise {reason}")

    def _step(self, pack: RowPack, rows: Sequence[ResidentTrial], begun: float, *, was_checked: bool) -> None:
        """Runs an iteration of rows as one; the state of all is as before if that raises."""
        residents = self._residents
        residents.begin_step(rows, begun)
        residents.fused.fuse(pack, rows)
        fused, order = pack.fused, list(pack.fused_rows)
        traced, has_changed = fused.traced, pack.stepped != frozenset(rows)
        fused.remember()
        try:
            results = fused.step()
            took = residents.end_step(rows, settle=has_changed)
        except BaseException:
            fused.restore()
            raise
        # Tracing, and the self-check before it, come once; rows come and go as long as the sweep lasts.
        is_settled = was_checked and fused.traced == traced
        reports = []
        for row, metrics in zip(order, results, strict=True):
            with self._failures.user_code(row):
                step = self._step_of(row, metrics, took.seconds)
                reports.append((row, residents.book(row, step, took, rows=len(rows), settled=is_settled)))
        self._report(reports)

    def _step_of(self, row: ResidentTrial, metrics: dict[str, Any], seconds: float) -> Step:
        """The step of one row: what the pack gives, or what a trainable that wraps that trial makes of it."""
        trainable = row.body.trainable  # type: ignore[union-attr]
        if fused_trial_of(row.body) is trainable:
            return step_of(metrics, "step()")
        self._residents.enter(row)
        trainable.take_step(metrics, seconds)
        return row.body.step()  # type: ignore[union-attr]

    def _may_fuse(self, group: RowGroup, rows: Sequence[ResidentTrial]) -> bool:
        """Whether trials of a group can be fused; checks it the first time, for one trial or more, and tells if not."""
        if group.is_checked:
            return True
        self._residents.enter_several(rows)
        try:
            reason = self._checks.why_not(group, rows[0], rows[1] if len(rows) > 1 else None)
        except BaseException as error:
            raised = self._failures.describe_of_several(error)
            group.failed_checks += 1
            if group.failed_checks >= _FAILED_CHECKS:
                self._limit(group, rows[0], 1, f"the self-check raises {raised.message}")
            else:  # One of them may fail by itself.
                for row in rows:
                    self._residents.fused.separate(row)
                    self._iterate_alone(row)
            return False
        finally:
            self._residents.memory.release_cached()
        group.is_checked = not reason
        if reason:
            self._limit(group, rows[0], 1, reason)
        return group.is_checked

    def _limit(self, group: RowGroup, resident: ResidentTrial, rows: int, reason: str) -> None:
        """Lets at most so many trials of a group train in one step from now on."""
        group.most = rows
        how = "are not fused" if rows == 1 else f"are fused {rows} at a time at most"
        self._output.log.write(f"Fluid: trials like this one {how} here: {reason}\n")
        self._send(FusionLimited(self._clock.now(), resident.trial_id, resident.lane_id, rows=rows, reason=reason))
