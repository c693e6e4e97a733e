"""One process of an elastic trial: a member, driven by a lane or by :mod:`fluid.elastic.members.worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fluid.elastic.groups.generation import GenerationBrokenError
from fluid.elastic.groups.group import Group
from fluid.elastic.groups.rendezvous import Rendezvous
from fluid.elastic.runtime import SingleProcessGroup
from fluid.elastic.state import Snapshot, broadcast
from fluid.elastic.trainable import ElasticTrainable


class Iteration(NamedTuple):
    """The result of :meth:`ElasticMember.iterate`.

    Attributes:
        iteration: iterations done.
        metrics: of this iteration.
        go_on: whether all members continue with another iteration.
        finished: whether the trial said that it is done.
    """

    iteration: int
    metrics: dict[str, Any]
    go_on: bool
    finished: bool


class ElasticMember:
    """Takes one trainable through a series of generations.

    The thread that runs the user's code calls all methods except :meth:`abort`. After a
    :class:`GenerationBrokenError` the member is at the end of :attr:`iteration` and can join the next generation: at
    widths above 1 it keeps a snapshot of the last iteration's end, and rolls back to it.

    Args:
        trainable: set up, and restored if there is a checkpoint.
        group: the process group for widths above 1.

    Example:
        A member that trains alone, in generation 1:

        >>> from fluid.elastic import ElasticMember, ElasticTrainable
        >>> from fluid.elastic.groups.torch_group import TorchGroup
        >>> class Counter(ElasticTrainable):
        ...     def build(self, config):
        ...         self.total = config["start"]
        ...     def train_iteration(self):
        ...         self.total += 1
        ...         return {"total": self.total}
        >>> trainable = Counter()
        >>> trainable.setup({"start": 10})
        >>> member = ElasticMember(trainable, TorchGroup())
        >>> member.join(None, rank=0, size=1, sync=False)
        >>> member.iterate(keep_going=lambda: True)
        Iteration(iteration=1, metrics={'total': 11}, go_on=True, finished=False)
        >>> member.leave()
    """

    def __init__(self, trainable: ElasticTrainable, group: Group) -> None:
        self.trainable = trainable
        #: Metrics of the last iteration, if this member ran it.
        self.metrics: dict[str, Any] | None = None
        self._group = group
        #: The state at the end of the last iteration; ``None`` at width 1, where there are no survivors.
        self._snapshot: Snapshot | None = None
        self._generation = 0

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.trainable.iteration

    def connect(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Connects to the members of a generation to come, in another thread than the one that trains.

        Raises:
            GenerationBrokenError: not all members connected.
        """
        self._group.connect(rendezvous, rank, size)

    def disconnect(self, generation: int) -> None:
        """Closes the connections of a generation that is not the current one. May be called in any thread."""
        self._group.disconnect(generation)

    def join(
        self,
        rendezvous: Rendezvous | None,
        rank: int,
        size: int,
        sync: bool,
        reported: int = 0,
        connection: int = 0,
    ) -> None:
        """Joins a generation; waits for its other members.

        Args:
            rendezvous: the generation's, whose number is larger than all before; ``None`` for a size of 1.
            rank: this member's rank.
            size: number of members; 1 to train alone.
            sync: whether all members take rank 0's state; needed if one is new, or behind.
            reported: the last iteration whose result the controller has received.
            connection: the generation for which the members connected to each other; 0 if they have not.

        Raises:
            GenerationBrokenError: not all members joined; this member's state is unchanged.
        """
        if rendezvous is not None:
            self._generation = rendezvous.generation
            self._meet(rendezvous, rank, size, sync, connection)
        else:
            self._group.shutdown()
            self._snapshot = None
        self.trainable._elastic.join(self._group if size > 1 else SingleProcessGroup())
        self.trainable._elastic_joined(reported, self.metrics)

    def _meet(self, rendezvous: Rendezvous, rank: int, size: int, sync: bool, connection: int) -> None:
        try:
            self._group.configure(rendezvous, rank, size, connection)
            if sync:
                self._sync_from_rank_zero(rank)
            elif self._snapshot is None:
                self._snapshot = Snapshot.take(self.trainable.elastic_state())
        except BaseException:
            self._break()
            raise

    def iterate(self, keep_going: Callable[[], bool]) -> Iteration:
        """Runs one iteration; all members call this.

        Args:
            keep_going: called at the end of the iteration; returns whether this member continues. If one member does
                not, all of them stop here.

        Raises:
            GenerationBrokenError: another member failed, or the generation was aborted.
            Exception: what the user's code raises. The generation is then broken, and this member cannot be used.
        """
        trainable = self.trainable
        width = trainable.size
        try:
            metrics = trainable.step()
            if width > 1:
                # Before the snapshot is overwritten: gradients may have been sent too early, or not be averaged yet, or
                # their sum was aborted.
                trainable._elastic.overlap.confirm(self._group)
                self._group.confirm()
                self._snapshot = Snapshot.take(trainable.elastic_state(), self._snapshot)
        except BaseException as error:
            is_fatal = width == 1 or not self._is_of_a_broken_generation(error)
            self._break()
            if is_fatal:
                raise
            reason = str(error)
        else:
            self.metrics = metrics
            go_on, finished = self._vote(keep_going(), _is_done(metrics))
            return Iteration(self.iteration, metrics, go_on, finished)
        self._roll_back()
        raise GenerationBrokenError(reason)

    def abort(self, generation: int) -> None:
        """Breaks a generation, now or when this member joins it. May be called in any thread."""
        self._group.abort(generation)

    def leave_generation(self) -> None:
        """Leaves the current generation at the end of an iteration, without waiting for its other members."""
        self._break()

    def leave(self) -> None:
        """Cleans the trainable up and leaves the group."""
        self.trainable.cleanup()
        self._group.shutdown()
        self._snapshot = None

    def _sync_from_rank_zero(self, rank: int) -> None:
        trainable = self.trainable
        if rank == 0:
            # The snapshot of the last iteration's end is the current state.
            current = self._snapshot or Snapshot.take(trainable.elastic_state())
            self._snapshot = broadcast(self._group, current)
            self._group.confirm()
            return
        # Not into this member's own snapshot, which it still needs if the sender dies meanwhile.
        received = broadcast(self._group, None)
        self._group.confirm()
        trainable.load_elastic_state(received.state())
        self._snapshot = received
        self.metrics = None

    def _vote(self, go_on: bool, finished: bool) -> tuple[bool, bool]:
        """Agrees on whether to continue. Once it returns in one member, all members have the iteration's result."""
        if self.trainable.size == 1:
            return go_on and not finished, finished
        votes = torch.tensor([not go_on, finished, True], dtype=torch.float32)
        try:
            # The sum needs every member's part, so it is a barrier too.
            self._group.all_reduce(votes)
            if votes[2] != self._group.size:
                raise GenerationBrokenError("a member of the generation failed: the vote was aborted")
        except GenerationBrokenError:
            # The iteration is complete here, and rank 0 may have reported it: there is nothing to roll back.
            self._break()
            raise
        stop, done, _ = (bool(vote) for vote in votes.tolist())
        return not stop and not done, done

    def _is_of_a_broken_generation(self, error: BaseException) -> bool:
        """Whether an error of the user's code may come from the generation, and not from that code.

        The code may have turned the generation's error into another one, or trained on gradients sent too early.
        """
        if not isinstance(error, Exception):
            return False
        if self._group.broken:
            return True
        try:
            return self.trainable._elastic.overlap.has_failed()
        except RuntimeError:  # The GPU cannot be read any more, which is no fault of the generation.
            return False

    def _break(self) -> None:
        """Breaks and leaves a generation; closing the connections interrupts its other members."""
        self._group.abort(self._generation)
        self._group.shutdown()
        self.trainable._elastic.join(SingleProcessGroup())

    def _roll_back(self) -> None:
        assert self._snapshot is not None
        self.trainable.load_elastic_state(self._snapshot.state())


def _is_done(metrics: Mapping[str, Any]) -> bool:
    return bool(metrics.get("done", False))
