"""A lane's part in an elastic trial, which trains in several lanes. PyTorch is loaded only for such a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fluid._clock import Clock
from fluid.elastic.messages import MemberIterated, Prepared
from fluid.lane.protocol import FromMember, Membership
from fluid.resources import MemoryNeed
from fluid.trainables.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from fluid.elastic.members.member import Iteration


class LaneMember:
    """Makes a resident a member of an elastic trial.

    Args:
        trial_id: the resident's.
        trainable: the resident's, an :class:`fluid.elastic.ElasticTrainable` that is set up.
        membership: how it takes part.
        address: at which other machines reach the lane's machine.
        send_to_driver: sends the driver a message.
        clock: the lane's.

    Raises:
        MissingDependencyError: the process group needs a library that is not installed.
    """

    def __init__(
        self,
        trial_id: str,
        trainable: Any,
        membership: Membership,
        address: str,
        send_to_driver: Callable[[Any], None],
        clock: Clock,
    ) -> None:
        from fluid.elastic.groups.make import make_group
        from fluid.elastic.members.member import ElasticMember
        from fluid.elastic.members.protocol import MemberProtocol

        self._trial_id = trial_id
        self._epoch = membership.epoch
        self._address = address
        self._send_to_driver = send_to_driver
        self._clock = clock
        self._trainable = trainable
        self._took: tuple[MemoryNeed | None, Usage] = (None, NO_USAGE)
        self._protocol = MemberProtocol(
            ElasticMember(trainable, make_group(membership.process_group, trainable.device)), self.send, clock
        )
        #: Called by the thread that reads ahead; see :meth:`MemberProtocol.preview`.
        self.preview = self._protocol.preview
        #: Handles the messages about generations.
        self.handle = self._protocol.handle
        #: Leaves its generation without waiting for the other members.
        self.leave_generation = self._protocol.leave_generation

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return int(self._trainable.iteration)

    @property
    def left(self) -> int:
        """Iterations still to run."""
        return self._protocol.left

    @property
    def is_rank_zero(self) -> bool:
        """Whether it is rank 0, which saves for all."""
        return bool(self._trainable.rank == 0)

    def send(self, message: Any) -> None:
        """Sends the controller a message."""
        memory, usage = self._took if isinstance(message, MemberIterated) else (None, NO_USAGE)
        self._send_to_driver(FromMember(self._clock.now(), self._trial_id, self._epoch, message, memory, usage))

    def send_prepared(self, seconds: float) -> None:
        """Reports that it could train now, after a set-up of so many seconds."""
        self.send(Prepared(self.iteration, self._address, seconds))

    def iterate(self, at_end: Callable[[Iteration], tuple[MemoryNeed | None, Usage]]) -> Iteration | None:
        """Runs an iteration together with the other members; returns ``None`` if one of them failed.

        Args:
            at_end: called at its end, before it is reported; returns what it took.
        """

        def record(done: Iteration) -> None:
            self._took = at_end(done)

        return self._protocol.iterate(record)
