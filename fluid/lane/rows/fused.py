"""The tensors of residents: their own, or, while they train in one step, those of a :class:`fluid.fused.FusedPack`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fluid._clock import Clock
from fluid.lane.errors import print_exception
from fluid.lane.resident import ResidentTrial, WorkQueue
from fluid.lane.rows.groups import RowGroups, RowPack


class FusedRows:
    """The residents that can be fused, and the packs that have their tensors. It loads PyTorch only if there are any.

    Args:
        queue: residents with iterations left.
        clock: the lane's.

    Attributes:
        groups: which of them train in one step.
    """

    def __init__(self, queue: WorkQueue, clock: Clock) -> None:
        self.groups = RowGroups(queue, clock)
        #: By resident, the pack that has its tensors.
        self._packs: dict[ResidentTrial, RowPack] = {}

    def identify(self, resident: ResidentTrial) -> str | None:
        """Finds out with which others a resident can be fused, after its set-up and whenever it may have changed.

        Returns:
            The digest of its fusion key; ``None`` if it cannot be fused.
        """
        self.groups.remove(resident)
        found = None if resident.member is not None else _key_of(resident.body)
        if found is None:
            return None
        digest, trainable = found
        if (threads := resident.process_state.asked_threads) is not None:
            digest = f"{digest}-{threads}"  # A step has the threads of all its rows.
        self.groups.add(resident, digest, trainable)
        return digest

    def others_like(self, rows: Sequence[ResidentTrial]) -> list[ResidentTrial]:
        """Returns the other residents that may share tensors with residents that run at once; any may be given."""
        group = self.groups.group_of(rows[0])
        return [] if group is None else list(group.members.difference(rows))

    def shared_bytes(self, rows: Sequence[ResidentTrial]) -> float:
        """Returns the bytes of residents that run at once that a pack has once; of one alone, those it can share."""
        if (pack := self._packs.get(rows[0])) is not None:
            return float(pack.fused.shared_bytes)
        is_fusible = self.groups.group_of(rows[0]) is not None
        return float(fused_trial_of(rows[0].body).shareable_bytes) if is_fusible else 0.0

    def forget(self, resident: ResidentTrial) -> None:
        """Takes a resident out of its pack and its group; any resident may be given."""
        self.groups.remove(resident)
        self.separate(resident)

    def separate(self, resident: ResidentTrial) -> None:
        """Gives a resident tensors of its own, if a pack has them."""
        if resident in self._packs:
            self._take_out([resident])

    def fuse(self, pack: RowPack, rows: Sequence[ResidentTrial]) -> None:
        """Gives the tensors of these residents, and of no others, to a pack.

        Raises:
            Exception: memory ran out. The residents have tensors of their own then.
        """
        from fluid.fused.pack import FusedPack

        staying = set(rows)
        for other in {self._packs[row] for row in rows if row in self._packs} - {pack}:
            self._take_out([row for row in other.fused_rows if row in staying])
        self._take_out([row for row in pack.fused_rows if row not in staying])
        there = set(pack.fused_rows)
        new = [row for row in rows if row not in there]
        if not new:
            return
        trainables = [fused_trial_of(row.body) for row in new]
        try:
            if pack.fused is None:
                pack.fused = FusedPack(trainables)
            else:
                pack.fused.join(trainables)
        except BaseException:
            self._take_out(pack.fused_rows)
            pack.fused = None
            raise
        pack.fused_rows += new
        self._packs.update(dict.fromkeys(new, pack))

    def _take_out(self, rows: Sequence[ResidentTrial]) -> None:
        """Gives residents, all in one pack, tensors of their own."""
        if not rows:
            return
        pack = self._packs[rows[0]]
        numbers = {row: number for number, row in enumerate(pack.fused_rows)}
        pack.fused.leave([numbers[row] for row in rows])
        pack.stepped = frozenset()
        leaving = set(rows)
        pack.fused_rows = [row for row in pack.fused_rows if row not in leaving]
        for row in leaving:
            del self._packs[row]


def fused_trial_of(body: Any) -> Any:
    """Returns what trains in a pack: the trainable of a resident, or the one that it wraps, as for Ray Tune."""
    trainable = getattr(body, "trainable", None)
    return getattr(trainable, "fused_trial", trainable)


def _key_of(body: Any) -> tuple[str, type] | None:
    """Returns the digest of a trial's fusion key, and its class; ``None`` if it cannot be fused."""
    if not getattr(type(getattr(body, "trainable", None)), "fluid_fusible", False):
        return None
    trainable = fused_trial_of(body)
    from fluid.fused.key import key_of
    from fluid.fused.obstacles import FusionError, require_fusible
    from fluid.fused.trainable import FusedTrainable

    if not isinstance(trainable, FusedTrainable):
        return None
    try:
        require_fusible(trainable)
        return key_of(trainable).digest, type(trainable)
    except FusionError:
        return None
    except Exception:  # Of the user's own Data.
        print_exception()
        return None
