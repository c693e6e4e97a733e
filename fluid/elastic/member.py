"""One process's share of an elastic trial, whoever drives it: a lane, or :mod:`fluid.elastic.worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fluid.elastic.group import GenerationBrokenError, Group
from fluid.elastic.runtime import SingleProcessGroup
from fluid.elastic.state import Snapshot, broadcast
from fluid.elastic.trainable import ElasticTrainable


class Iteration(NamedTuple):
    """What :meth:`ElasticMember.iterate` did.

    Attributes:
        iteration: iterations done.
        metrics: of this one.
        go_on: whether all members want another one.
        finished: whether the trial said that it has no more to do.
    """

    iteration: int
    metrics: dict[str, Any]
    go_on: bool
    finished: bool


class ElasticMember:
    """Hosts one trainable through a series of generations.

    All methods but :meth:`abort` are called by the thread that runs the user's code. When one of them raises
    :class:`GenerationBrokenError`, the member stands at the end of :attr:`iteration` and can join the next
    generation: at widths above 1 it keeps a copy of the state at the end of the last iteration, in host memory,
    and goes back to it if it was in the middle of one.

    Args:
        trainable: set up, and restored if need be.
        group: what it talks to the others through, from generation 1 on.
    """

    def __init__(self, trainable: ElasticTrainable, group: Group) -> None:
        self.trainable = trainable
        #: Metrics of the last iteration, if this member ran it.
        self.metrics: dict[str, Any] | None = None
        self._group = group
        #: The state at the end of the last iteration; ``None`` at width 1, where nobody could survive alone.
        self._snapshot: Snapshot | None = None
        self._generation = 0

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.trainable.iteration

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Opens the meeting point of the next generation, which this member will be rank 0 of.

        Args:
            address: this machine's address for the other members; ``"127.0.0.1"`` if they are on it too.
            generation: its number.
            size: how many members it will have.

        Returns:
            What to tell the members where to meet.
        """
        return self._group.open_rendezvous(address, generation, size)

    def join(self, generation: int, rank: int, size: int, rendezvous: str, sync: bool, reported: int = 0) -> None:
        """Goes on in another generation; waits for its other members.

        Args:
            generation: its number, larger than those before.
            rank: this member's rank.
            size: number of members; 1 to go on alone.
            meeting: what rank 0's :meth:`open_rendezvous` returned.
            sync: whether everybody takes rank 0's state; needed if a member is new, or behind.
            reported: the last iteration whose result is known outside.

        Raises:
            GenerationBrokenError: it did not come about; this member's state is what it was.
        """
        self._generation = generation
        if size > 1:
            self._meet(generation, rank, size, rendezvous, sync)
        else:
            self._group.shutdown()
            self._snapshot = None
        self.trainable._elastic.group = self._group if size > 1 else SingleProcessGroup()
        self.trainable._elastic_joined(reported, self.metrics)

    def _meet(self, generation: int, rank: int, size: int, rendezvous: str, sync: bool) -> None:
        try:
            self._group.configure(rendezvous, generation, rank, size)
            if sync:
                self._take_over(rank)
            elif self._snapshot is None:
                self._snapshot = Snapshot.take(self.trainable.state())
        except BaseException:
            self._break()
            raise

    def iterate(self, keep_going: Callable[[], bool]) -> Iteration:
        """Runs one iteration; all members call this.

        Args:
            keep_going: asked at the end of the iteration whether this member is to run another one; if any is
                not, all of them learn that they have to stop here.

        Raises:
            GenerationBrokenError: another member failed, or the generation was aborted.
            Exception: whatever the user's code raises. The generation is broken then, and this member of no use.
        """
        trainable = self.trainable
        width = trainable.size
        try:
            metrics = trainable.step()
            if width > 1:
                self._snapshot = Snapshot.take(trainable.state(), self._snapshot)
        except BaseException as error:
            # What the user's code makes of a broken generation need not be that error any more.
            peers = width > 1 and self._group.broken and isinstance(error, Exception)
            self._break()
            if not peers:
                raise
            reason = str(error)
        else:
            self.metrics = metrics
            go_on, finished = self._agree(keep_going(), _is_done(metrics))
            return Iteration(self.iteration, metrics, go_on, finished)
        self._roll_back()
        raise GenerationBrokenError(reason)

    def abort(self, generation: int) -> None:
        """Breaks a generation, now or when it is joined; called in any thread while the member runs."""
        self._group.abort(generation)

    def leave_generation(self) -> None:
        """Leaves the current generation at the end of an iteration, without waiting for anybody."""
        self._break()

    def leave(self) -> None:
        """Cleans up."""
        self.trainable.cleanup()
        self._group.shutdown()
        self._snapshot = None

    def _take_over(self, rank: int) -> None:
        trainable = self.trainable
        if rank == 0:
            # A snapshot of the last iteration's end is as good as a new one.
            current = self._snapshot or Snapshot.take(trainable.state())
            self._snapshot = broadcast(self._group, current)
            return
        # Not into this member's own snapshot: if the sender dies meanwhile, it is all that there is.
        received = broadcast(self._group, None)
        trainable.load_state(received.state())
        self._snapshot = received
        self.metrics = None

    def _agree(self, go_on: bool, finished: bool) -> tuple[bool, bool]:
        """Ends an iteration: once this returns anywhere, every member has the iteration's result."""
        if self.trainable.size == 1:
            return go_on and not finished, finished
        votes = torch.tensor([not go_on, finished], dtype=torch.float32)
        try:
            # No sum without every member's part: it is a barrier, too.
            self._group.all_reduce(votes)
        except GenerationBrokenError:
            # The iteration is complete here, and perhaps reported by others: there is nothing to go back from.
            self._break()
            raise
        stop, done = (bool(vote) for vote in votes.tolist())
        return not stop and not done, done

    def _break(self) -> None:
        """Leaves a generation in the middle of something; closing the connections tells its other members."""
        self._group.abort(self._generation)
        self._group.shutdown()
        self.trainable._elastic.group = SingleProcessGroup()

    def _roll_back(self) -> None:
        assert self._snapshot is not None
        self.trainable.load_state(self._snapshot.state())


def _is_done(metrics: Mapping[str, Any]) -> bool:
    return bool(metrics.get("done", False))
