"""Warnings that reach a user who watches no display: failures, and trials that are dropped when the executor closes.

They go to the logger ``fluid.session``, and so to stderr where the user has configured no logging.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from fluid._logs import logger_of
from fluid.engine.commands import Command, NoteDeviceLost, NoteHung, NotePaused, NoteQueued, ReportEnd
from fluid.engine.events import Failure
from fluid.lane.output import trial_log
from fluid.policies.engine import EngineState
from fluid.policies.forking.shared_runs import PARTED
from fluid.session.inbox import GroupInbox
from fluid.trialgroup import TrialState

_log = logger_of("fluid.session")


class Alerts:
    """Warns about the trials of a session.

    Args:
        state: the engine.
        folder: the run folder.
        inboxes: the groups, by id.
        resumable: whether the session can be resumed; one that is rehearsed cannot.
        news: the level at which the log tells what did not go wrong.
    """

    def __init__(
        self,
        state: EngineState,
        folder: Path,
        inboxes: Mapping[str, GroupInbox],
        *,
        resumable: bool = True,
        news: int = logging.WARNING,
    ) -> None:
        self._state = state
        self.resumable = resumable
        self._news = news
        #: Who goes on with what is left of a session in a shared folder.
        self.others = ""
        self._folder = str(folder)
        self._inboxes = inboxes
        #: (group, kind, class of the exception) of the failures that were told.
        self._told: set[tuple[str, str, str]] = set()

    @property
    def names_files(self) -> bool:
        """Whether a warning has told where the log of a trial is."""
        return any(kind != PARTED for _, kind, _ in self._told)

    def look(self, commands: Iterable[Command]) -> None:
        """Warns of the first failure of each kind in a group, of trials that hang or end without a result, and of
        devices that are given up."""
        for command in commands:
            if isinstance(command, NoteDeviceLost) and command.reason:
                _log.warning("device %d is given up: %s", command.device_id, command.reason)
            if isinstance(command, NoteDeviceLost):
                self._device_lost()
            elif isinstance(command, NoteHung):
                self._hangs(command)
            elif isinstance(command, ReportEnd) and self._is_shared_run(command.trial_id):
                self._parted(command)  # What else becomes of one becomes of its trials.
            elif isinstance(command, ReportEnd) and command.state is TrialState.FAILED and command.failure is not None:
                self._failed(command.group_id, command.trial_id, command.failure, again=False)
            elif isinstance(command, ReportEnd) and not command.iteration and command.state is TrialState.DONE:
                self._gave_nothing(command)
            # That of a timeout was told before.
            elif isinstance(command, (NoteQueued, NotePaused)) and command.kind not in (None, "timeout"):
                trial = self._state.trials.get(command.trial_id)
                if trial is not None and trial.limits.failure is not None:
                    self._failed(trial.group_id, command.trial_id, trial.limits.failure, again=True)

    def at_close(self) -> None:
        """Warns of trials that are dropped, and of groups in which every trial failed."""
        state = self._state
        dropped = sum(
            self._is_open(trial.state) and not self._is_told_elsewhere(trial.group_id, "tells_unfinished")
            for trial in state.trials.values()
            if not trial.spec.is_shared_run
        )
        if dropped and not state.drained:
            trials = "1 trial that had not ended was" if dropped == 1 else f"{dropped} trials that had not ended were"
            further = f"; FluidExecutor.resume({self._folder!r}) goes on with the session" if self.resumable else ""
            further = f", as the executor was closed: call handle.wait() before the end of its with block{further}"
            if self.others:
                _log.log(self._news, "%s left: %s", trials, self.others)
            else:
                _log.log(self._news, "%s dropped%s", trials, further)
        for group_id, group in state.groups.items():
            own = [state.trials[trial_id] for trial_id in group.trial_ids]
            states = [trial.state for trial in own if not trial.spec.is_shared_run]
            failed = states.count(TrialState.FAILED) + group.past[TrialState.FAILED.value]
            number = len(states) + group.past.total()
            if failed and not self._is_told_elsewhere(group_id):
                name = self._inboxes[group_id].group.name
                some = "all" if failed == number else f"{failed} of"
                what = "the one trial" if number == 1 else f"{some} {number} trials"
                _log.warning("%s of group %r failed; their logs are in %s", what, name, self._folder)

    def _is_shared_run(self, trial_id: str) -> bool:
        trial = self._state.trials.get(trial_id)
        return trial is not None and trial.spec.is_shared_run

    def _parted(self, ended: ReportEnd) -> None:
        """Says so, once for a group, if trials do not share what they could."""
        key = (ended.group_id, PARTED, "")
        if ended.failure is not None and ended.failure.kind == PARTED and key not in self._told:
            self._told.add(key)
            text = "trials of %r run alone that could share their first iterations: %s"
            _log.warning(text, self._inboxes[ended.group_id].group.name, ended.failure.message)

    @staticmethod
    def _is_open(state: TrialState) -> bool:
        return not state.ended and state is not TrialState.STOPPING

    def _failed(self, group_id: str, trial_id: str, failure: Failure, *, again: bool) -> None:
        line = failure.message.partition("\n")[0]
        key = (group_id, failure.kind, line.partition(":")[0])
        if key in self._told or (not again and self._is_told_elsewhere(group_id)):
            return
        self._told.add(key)
        what = "failed and is tried again" if again else "failed"
        log = trial_log(self._folder, trial_id)
        _log.warning("trial %r %s: %s; further failures like this are not logged; see %s", trial_id, what, line, log)

    def _gave_nothing(self, ended: ReportEnd) -> None:
        key = (ended.group_id, "nothing", "")
        if key not in self._told and not self._is_told_elsewhere(ended.group_id):
            self._told.add(key)
            text = "trial %r ended without a result: its trainable ran no iteration; further such trials are not logged"
            _log.warning(text, ended.trial_id)

    def _is_told_elsewhere(self, group_id: str, how: str = "tells_failures") -> bool:
        inbox = self._inboxes.get(group_id)
        return inbox is not None and bool(getattr(inbox.listener, how, False))

    def _device_lost(self) -> None:
        """Says so where trials wait for what nothing will bring but the user."""
        state = self._state
        if state.devices or state.most_devices or state.drained:
            return
        if waiting := sum(group.open for group in state.groups.values()):
            _log.warning("no device is left: %d unfinished trials wait until add_device() adds one", waiting)

    def _hangs(self, hung: NoteHung) -> None:
        if hung.killed:
            what = "its processes are killed"
        elif hung.limit is None:
            what = "others took far less; it goes on, unless iteration_timeout_s= sets a limit"
        else:
            what = f"after {hung.limit:.0f} s its processes are killed; iteration_timeout_s=None sets no limit"
        log = trial_log(self._folder, hung.trial_id)
        _log.warning(
            "trial %r has given no result for %.0f s: %s; see its stacks in %s", hung.trial_id, hung.seconds, what, log
        )
