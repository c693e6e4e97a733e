"""The data of a fused trainable: batches in an order of the trial's own, and batches for evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_flatten, tree_map

from fluid.elastic.state import is_plain_tensor
from fluid.errors import FluidError, InvalidFieldError, require_integer
from fluid.fused.randomness import Purpose, own_generator

#: The samples of an evaluation batch, unless the user says otherwise.
_EVALUATION_BATCH = 1024


@runtime_checkable
class Data(Protocol):
    """What ``FusedTrainable.data`` returns. A batch is a tensor, or tuples, lists and dicts of tensors.

    Dimension 0 of every tensor is the sample.

    Example:
        >>> from fluid.fused import Data, TensorData
        >>> issubclass(TensorData, Data)
        True
    """

    def __len__(self) -> int:
        """Training batches in an epoch."""
        ...

    def train_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Yields the batches of an epoch from position ``start``; the same ones whenever it is called."""
        ...

    def evaluation_batches(self) -> Iterable[Any]:
        """Returns the batches for evaluation."""
        ...


class TensorData:
    """Tensors in memory, in batches; each epoch has an order of its own, drawn from the seed.

    Trials of a pack whose tensors are equal share them, on the device.

    Args:
        train: tensors with one row per sample; a batch is a tuple with rows of each.
        evaluation: the same for evaluation, in their order; none by default.
        batch_size: samples in a training batch.
        seed: of the orders; pass on what :meth:`FusedTrainable.data` was given.
        evaluation_batch_size: samples in an evaluation batch, by default up to 1,024.
        shuffle: whether each epoch has its own order.
        drop_last: whether to skip the last batch of an epoch if it is not full.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> import torch
        >>> from fluid.fused import TensorData
        >>> data = TensorData([torch.arange(5)], batch_size=2, seed=0, shuffle=False)
        >>> [batch[0].tolist() for batch in data.train_batches(epoch=0, start=1)], len(data)
        ([[2, 3], [4]], 3)
    """

    def __init__(
        self,
        train: Sequence[torch.Tensor],
        evaluation: Sequence[torch.Tensor] = (),
        *,
        batch_size: int,
        seed: int,
        evaluation_batch_size: int = _EVALUATION_BATCH,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.train = _tensors("train", train)
        self.evaluation = _tensors("evaluation", evaluation) if len(evaluation) else ()
        self.batch_size = require_integer("batch_size", batch_size, at_least=1)
        self.evaluation_batch_size = require_integer("evaluation_batch_size", evaluation_batch_size, at_least=1)
        self.seed = require_integer("seed", seed, at_least=0)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        if not len(self):
            raise InvalidFieldError("train", len(self.train[0]), "has too few samples for one batch")

    def __len__(self) -> int:
        """Training batches in an epoch."""
        full, rest = divmod(len(self.train[0]), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def is_ragged(self) -> bool:
        """Whether the last batch of an epoch is smaller than the others."""
        return not self.drop_last and len(self.train[0]) % self.batch_size != 0

    def order(self, epoch: int) -> torch.Tensor:
        """Returns the positions of an epoch's samples, ``int64 (samples,)`` on the CPU."""
        if not self.shuffle:
            return torch.arange(len(self.train[0]))
        generator = own_generator("cpu", self.seed, Purpose.ORDER, epoch)
        return torch.randperm(len(self.train[0]), generator=generator)

    def train_batches(self, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the batches of an epoch from position ``start``."""
        order = self.order(epoch).to(self.train[0].device)
        for number in range(start, len(self)):
            picked = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield tuple(tensor.index_select(0, picked) for tensor in self.train)

    def evaluation_batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the batches for evaluation."""
        for start in range(0, len(self.evaluation[0]) if self.evaluation else 0, self.evaluation_batch_size):
            # A copy, as training batches are: a trial that writes to a batch must not change the data of others.
            yield tuple(tensor[start : start + self.evaluation_batch_size].clone() for tensor in self.evaluation)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return *self.train, *self.evaluation

    def move_to(self, device: torch.device) -> None:
        """Moves the tensors to a device, where equal ones of other trials are taken in their place."""
        # A derived class may write to its tensors.
        move = once_on if type(self) is TensorData else torch.Tensor.to
        self.train = tuple(move(tensor, device) for tensor in self.train)
        self.evaluation = tuple(move(tensor, device) for tensor in self.evaluation)

    def share(self, other: TensorData) -> bool:
        """Takes the other's tensors in place of its own if they are equal; returns whether both share theirs."""
        if not (_equal(self.train, other.train) and _equal(self.evaluation, other.evaluation)):
            return False
        self.train, self.evaluation = other.train, other.evaluation
        return True

    def shares(self, other: object) -> bool:
        """Whether the other has the very same tensors."""
        if not isinstance(other, TensorData):
            return False
        return all(one is two for one, two in zip(self.tensors, other.tensors, strict=True))


def _tensors(field: str, value: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    tensors = tuple(value) if isinstance(value, (list, tuple)) else ()
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise InvalidFieldError(field, value, "must be a list or tuple of tensors with one row per sample")
    if len({len(tensor) for tensor in tensors}) > 1:
        raise InvalidFieldError(field, [len(tensor) for tensor in tensors], "the tensors differ in their samples")
    return tensors


def _equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return one is two or (alike and torch.equal(one, two))

    return len(ours) == len(theirs) and all(map(same, ours, theirs))


# -- one copy on a device -------------------------------------------------------------------------------------
#
# Trials of one process need one copy of what none of them writes to. Each makes it anew, and it is compared with what
# is there before it is moved, so that a device never has two, not even for a moment.


#: The tensors of trials on devices, by what equal ones have in common.
_present: dict[Any, list[weakref.ref[torch.Tensor]]] = {}
#: Most bytes that are compared at once: as many are moved to the device for that.
_COMPARED_BYTES = 32 * 2**20


def once_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor that nothing writes to on a device: the same one for all that are equal in every bit."""
    key = (tensor.shape, tensor.dtype, device)
    alike = [known for known in _present.get(key, ()) if known() is not None]
    for known in alike:
        there = known()
        if there is not None and (there is tensor or _is_copy(tensor, there)):
            return there
    there = tensor.to(device)
    _present[key] = [*alike, weakref.ref(there)]
    for other in [other for other, known in _present.items() if not any(each() is not None for each in known)]:
        del _present[other]
    return there


def share_no_more(tensor: torch.Tensor) -> None:
    """Lets :func:`once_on` return a tensor no more."""
    for alike in _present.values():
        alike[:] = [known for known in alike if known() is not tensor]


def _is_copy(tensor: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type, maybe on two devices, have the same bits."""
    if not (can_be_shared(tensor) and can_be_shared(there)):
        return False
    if tensor.device == there.device and tensor.data_ptr() == there.data_ptr():
        return True
    # As bits: zeros have signs, and what is not a number equals nothing.
    ours, theirs = _bits(tensor, there)
    step = max(1, _COMPARED_BYTES // ours.itemsize)
    pairs = zip(ours.split(step), theirs.split(step), strict=True)
    return all(torch.equal(one.to(two.device), two) for one, two in pairs)


def sum_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns a number for each tensor that :func:`once_on` shares, which is another one after most writes to it."""
    sums = [bits.sum(dtype=torch.int64) for tensor in tensors for bits in _bits(tensor)]
    return torch.stack(sums).tolist() if sums else []


def _bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views tensors of one size as integers: as large ones as can be, which are several times as fast."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    is_whole = all(part.nbytes % 8 == 0 and part.storage_offset() * part.itemsize % 8 == 0 for part in flat)
    return [part.view(torch.int64 if is_whole else torch.uint8) for part in flat]


def can_be_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has its numbers, one after the other, and nothing else tells what they mean."""
    return is_plain_tensor(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def shared_tensors(datas: Sequence[Data]) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that are there once for all rows; none if rows have their own."""
    first = datas[0] if datas else None
    return first.tensors if isinstance(first, TensorData) and all(first.shares(data) for data in datas) else ()


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of tensors, of which some may be the same."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


# -- positions and batches ------------------------------------------------------------------------------------


class Position(NamedTuple):
    """The next batch of a trial: its epoch, and its number within the epoch."""

    epoch: int = 0
    batch: int = 0

    def after(self, batches: int, in_epoch: int) -> Position:
        """Returns the position so many batches later."""
        epochs, batch = divmod(self.batch + batches, in_epoch)
        return Position(self.epoch + epochs, batch)


def batches_from(data: Data, position: Position, count: int) -> Iterator[Any]:
    """Yields that many training batches from a position, across epochs if needed.

    Raises:
        InvalidFieldError: an epoch has fewer batches than the data's length.
    """
    while count:
        expected = min(count, len(data) - position.batch)
        found = 0
        for batch in data.train_batches(position.epoch, position.batch):
            yield batch
            found += 1
            if found == expected:
                break
        if found < expected:
            raise InvalidFieldError("data", len(data), f"epoch {position.epoch} has fewer batches than len(data)")
        count -= expected
        position = position.after(expected, len(data))


def is_on(batch: Any, device: torch.device) -> bool:
    """Whether all tensors of a batch are on a kind of device."""
    return all(leaf.device.type == device.type for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor))


def _leaves(batch: Any) -> Iterable[Any]:
    # Most batches are flat, and then there is no need of PyTorch's slower way.
    flat = type(batch) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in batch)
    leaves: Iterable[Any] = batch if flat else tree_flatten(batch)[0]
    return leaves


def structure_key(structure: Any) -> Any:
    """What tells the structure of a batch from others, as a key: those of PyTorch 2.4 have no hash."""
    try:
        hash(structure)
    except TypeError:
        return repr(structure)
    return structure


def samples_in(batch: Any) -> int:
    """Returns the number of samples in a batch.

    Raises:
        InvalidFieldError: it has no tensor, or its tensors differ in their samples.
    """
    counts = {len(tensor) for tensor in _leaves(batch) if isinstance(tensor, torch.Tensor)}
    if len(counts) != 1:
        raise InvalidFieldError("batch", sorted(counts), "needs tensors of which dimension 0 is the sample")
    return counts.pop()


def map_batch(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Changes the tensors of a batch."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


class RowBatch(NamedTuple):
    """One batch of each of some rows.

    Attributes:
        batch: with tensors ``(rows, samples, ...)``, or ``(samples, ...)`` if it is common to all rows.
        samples: of each row.
        common: whether all rows have the same batch.
    """

    batch: Any
    samples: int
    common: bool


def row_train_batches(
    datas: Sequence[Data], positions: Sequence[Position], count: int, device: torch.device
) -> Iterator[RowBatch]:
    """Yields that many training batches of each of some rows, which are at positions of their own."""
    if (shared := _shared(datas)) is not None:
        yield from _gathered(shared, datas, positions, count, device)
        return
    each = [batches_from(data, position, count) for data, position in zip(datas, positions, strict=True)]
    for batches in zip(*each, strict=True):
        yield _stacked(batches, device)


def row_evaluation_batches(datas: Sequence[Data], device: torch.device) -> Iterator[RowBatch]:
    """Yields the evaluation batches of each of some rows."""
    if (shared := _shared(datas)) is not None:
        for batch in shared.evaluation_batches():
            yield RowBatch(batch, samples_in(batch), common=True)
        return
    for batches in zip(*(data.evaluation_batches() for data in datas), strict=True):
        yield _stacked(batches, device)


def _shared(datas: Sequence[Data]) -> TensorData | None:
    """Returns the data whose tensors all rows have; ``None`` if they have their own, or batches of a derived class."""
    first = datas[0]
    plain = all(type(data) is TensorData for data in datas)
    return first if plain and isinstance(first, TensorData) and all(first.shares(data) for data in datas) else None


def _gathered(
    shared: TensorData, datas: Sequence[Data], positions: Sequence[Position], count: int, device: torch.device
) -> Iterator[RowBatch]:
    """Gathers from tensors that all rows share, each row in its own order."""
    sizes, *others = (_sizes(shared, batch, count) for batch in {position.batch for position in positions})
    if any(other != sizes for other in others):
        raise FluidError("rows of a pack have batches of different sizes at the same time")
    pairs = zip(datas, positions, strict=True)
    matrix = torch.stack([_positions_of_samples(data, position, count) for data, position in pairs]).to(device)
    for picked in matrix.split(sizes, dim=1):
        flat = picked.reshape(-1)
        batch = tuple(tensor.index_select(0, flat).view(*picked.shape, *tensor.shape[1:]) for tensor in shared.train)
        yield RowBatch(batch, picked.shape[1], common=False)


def _sizes(data: TensorData, batch: int, count: int) -> list[int]:
    """Returns the samples of each of the next batches, from the one with this number in an epoch on."""
    samples = min(len(data.train[0]), len(data) * data.batch_size)
    last = samples - (len(data) - 1) * data.batch_size
    return [last if (batch + step + 1) % len(data) == 0 else data.batch_size for step in range(count)]


def _positions_of_samples(data: Any, position: Position, count: int) -> torch.Tensor:
    """Returns the positions of the samples of the next batches, ``int64 (samples,)``."""
    found = []
    while count:
        batches = min(count, len(data) - position.batch)
        begin = position.batch * data.batch_size
        found.append(data.order(position.epoch)[begin : begin + batches * data.batch_size])
        position, count = position.after(batches, len(data)), count - batches
    return found[0] if len(found) == 1 else torch.cat(found)


def _stacked(batches: Sequence[Any], device: torch.device) -> RowBatch:
    moved = [map_batch(lambda tensor: tensor.to(device), batch) for batch in batches]
    return RowBatch(tree_map(lambda *rows: torch.stack(rows), *moved), samples_in(moved[0]), common=False)
