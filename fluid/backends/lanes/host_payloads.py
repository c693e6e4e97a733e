"""Large payloads, trainables and configs, which the launcher keeps on the hosts of lanes, once for all lanes there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fluid.backends.base import Keeping, Launcher
from fluid.backends.lanes.connections import LaneConnection
from fluid.elastic.messages import Prepared
from fluid.lane import protocol as m


class HostPayloads:
    """Has payloads kept on the hosts of lanes that are to read them, and dropped when no lane is.

    Args:
        launcher: keeps them.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        #: How many trainables and trials have each payload, by name.
        self._uses: Counter[str] = Counter()
        #: Lane, trial and config of the trials with large configs that lanes were told to start and have not yet.
        self._starts: list[tuple[int, str, str]] = []

    def add(self, name: str) -> None:
        """Counts a trainable or a trial that has a payload."""
        self._uses[name] += 1

    def remove(self, name: str) -> None:
        """Counts one less; drops the payload of the last one."""
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
            self.drop_unread(name)

    def shipment(
        self, lane: LaneConnection, name: str, whole: m.ShipTrainable | m.StartResident
    ) -> m.ShipTrainable | m.StartResident | m.ReleaseResident | None:
        """Returns the message by which a lane gets a payload; ``None`` while the lane's host does not have it yet.

        Args:
            lane: the lane. If it was told to end, it neither waits nor gets the payload.
            name: the payload's.
            whole: the message with the payload.
        """
        data = whole.payload if isinstance(whole, m.ShipTrainable) else whole.config
        assert isinstance(data, bytes)
        is_used = name in self._uses  # If not, all that has it was forgotten before the message could leave.
        keeping = self._launcher.keep(lane.lane_id, name, data) if is_used else Keeping.REFUSED
        if keeping is Keeping.UNDER_WAY and lane.leaving:
            return m.ReleaseResident("")  # It does nothing: the lane would only drop the trial again.
        if keeping is Keeping.UNDER_WAY:
            return None
        if keeping is Keeping.REFUSED:
            return whole
        kept = m.KeptPayload(name)
        return whole._replace(payload=kept) if isinstance(whole, m.ShipTrainable) else whole._replace(config=kept)

    def renew(self, lane_id: int, name: str, data: bytes) -> None:
        """Has a payload kept again that a lane did not find on its host."""
        self._launcher.drop(name)
        self._launcher.keep(lane_id, name, data)

    # -- configs: their lanes read them once ---------------------------------------------------------------

    def starting(self, lane_id: int, trial_id: str, name: str) -> None:
        """Takes note that a lane is told to start a trial with a large config."""
        self._starts.append((lane_id, trial_id, name))

    def hear(self, lane_id: int, message: Any) -> None:
        """Takes a message of a lane: one that answers a start comes after the config was read."""
        if not self._starts:
            return
        is_answer = isinstance(message, (m.ResidentStarted, m.ResidentFailed)) or (
            isinstance(message, m.FromMember) and isinstance(message.message, Prepared)
        )
        if is_answer:
            for start in self._starts:
                if start[:2] == (lane_id, message.trial_id):
                    self._starts.remove(start)
                    self._drop_unused(start[2])
                    return

    def lane_is_gone(self, lane_id: int) -> None:
        """Forgets the starts in a lane of which no message will come any more."""
        gone = [start for start in self._starts if start[0] == lane_id]
        self._starts = [start for start in self._starts if start[0] != lane_id]
        for _, _, name in gone:
            self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        if name not in self._uses:
            self.drop_unread(name)

    def drop_unread(self, name: str) -> None:
        """Drops a config that no lane is going to read; where a trial starts again, hosts get it again."""
        if not any(start[2] == name for start in self._starts):
            self._launcher.drop(name)
