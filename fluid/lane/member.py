"""A lane's part in a trial that trains in several lanes together. PyTorch is loaded only once there is such a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fluid._clock import Clock
from fluid.elastic.messages import MemberIterated, Prepared
from fluid.lane.messages import FromMember, Membership

if TYPE_CHECKING:
    from fluid.elastic.member import Iteration

_LOOPBACK = "127.0.0.1"
#: An address that is nobody's, by RFC 5737: which way packets would go to it tells this machine's own.
_ANYWHERE = ("192.0.2.1", 9)

Memory = tuple[float, float] | None


class LaneMember:
    """What a lane adds to a resident that is a member.

    Args:
        trial_id: the resident's.
        trainable: the resident's, an :class:`fluid.elastic.ElasticTrainable` that is set up.
        terms: on which it takes part.
        host: name of the lane's machine.
        tell: sends a message to the driver.
        clock: the lane's.

    Raises:
        MissingDependencyError: the process group needs what is not installed.
    """

    def __init__(
        self,
        trial_id: str,
        trainable: Any,
        membership: Membership,
        host: str,
        send_to_driver: Callable[[Any], None],
        clock: Clock,
    ) -> None:
        from fluid.elastic.make_group import make_group
        from fluid.elastic.member import ElasticMember
        from fluid.elastic.member_protocol import MemberProtocol

        self._trial_id = trial_id
        self._epoch = membership.epoch
        self._host = host
        self._send_to_driver = send_to_driver
        self._clock = clock
        self._trainable = trainable
        self._memory: Memory = None
        self._protocol = MemberProtocol(
            ElasticMember(trainable, make_group(membership.process_group, trainable.device)), self.send, clock
        )
        #: For the thread that reads ahead.
        self.preview = self._protocol.preview
        #: Takes messages about generations.
        self.handle = self._protocol.handle
        #: Leaves its generation, without waiting for anybody.
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
        """Tells the controller something."""
        memory = self._memory if isinstance(message, MemberIterated) else None
        self._send_to_driver(FromMember(self._clock.now(), self._trial_id, self._epoch, message, memory))

    def send_prepared(self, seconds: float) -> None:
        """Says that it could train now, after so many seconds of being set up."""
        self.send(Prepared(self.iteration, own_address(self._host), seconds))

    def iterate(self, measure: Callable[[], Memory]) -> Iteration | None:
        """Runs an iteration together with the other lanes; ``None`` if it came to nothing, because one is gone."""

        def note() -> None:
            self._memory = measure()

        return self._protocol.iterate(note)


def own_address(host: str) -> str:
    """The address under which other machines reach this one.

    Args:
        host: name of this machine; ``"localhost"`` for the driver's own, which lanes elsewhere know by another name.
    """
    if host != "localhost":
        return host
    from fluid.elastic.group import own_address_towards

    try:
        return own_address_towards(*_ANYWHERE)
    except OSError:
        return _LOOPBACK  # Without a network there are no other machines.
