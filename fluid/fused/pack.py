"""Trains trials of one shape together, as one batched model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

from fluid.errors import FluidError, InvalidFieldError, require_integer
from fluid.fused.data import (
    Position,
    RowBatch,
    TensorData,
    row_evaluation_batches,
    row_train_batches,
    shared_tensors,
    tensor_bytes,
)
from fluid.fused.key import FusionKey, key_of
from fluid.fused.obstacles import FusionError, require_fusible
from fluid.fused.programs import RowPrograms, RowTensors
from fluid.fused.randomness import global_random_state_kept
from fluid.fused.row_masks import RowMasks
from fluid.fused.stacked_model import Matrices, StackedModel
from fluid.fused.stacked_optimizers import StackedOptimizer, StackedSteps, TrainingTensors, stacked_optimizer
from fluid.fused.step_graphs import StepGraphs, TrainingRows, capture_on, size_for
from fluid.fused.trainable import FusedState, FusedTrainable

# -- snapshot ------------------------------------------------------------------------------------
#
# A copy of a pack's state, to go back to when an iteration has failed.


class _TrialProgress(NamedTuple):
    """How far a trial is, and the learning rates in its own optimizer. Its random numbers follow from that."""

    iteration: int
    steps: int
    position: Position
    rates: tuple[Any, ...]

    @classmethod
    def of(cls, trial: FusedTrainable) -> _TrialProgress:
        state, groups = trial._fused, trial.torch_optimizer.param_groups
        return cls(trial.iteration, state.steps, state.position, tuple(group["lr"] for group in groups))

    def give(self, trial: FusedTrainable) -> None:
        trial._elastic.iteration = self.iteration
        trial._fused.steps, trial._fused.position = self.steps, self.position
        for group, rate in zip(trial.torch_optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate


class PackSnapshot:
    """The state of a pack's trials at one time. It keeps its tensors, so that the next copy allocates nothing.

    Args:
        model: of the pack.
        optimizer: of the pack.
        trials: of the pack; other ones need another snapshot.
    """

    def __init__(self, model: StackedModel, optimizer: StackedOptimizer, trials: Sequence[FusedTrainable]) -> None:
        self._optimizer = optimizer
        self._trials = trials
        self._tensors = [tensor[: len(trials)] for tensor in (*model.tensors(), *optimizer.tensors())]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self.take()

    def take(self) -> None:
        """Copies the state as it is now."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._tensors)
        self._progress = [_TrialProgress.of(trial) for trial in self._trials]
        self._optimizer_states = self._optimizer.own_states(self._trials)

    def restore(self) -> None:
        """Brings the copied state back."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._copies)
        for trial, progress in zip(self._trials, self._progress, strict=True):
            progress.give(trial)
        self._optimizer.set_own_states(self._trials, self._optimizer_states)


# -- pack ----------------------------------------------------------------------------------------


def has_graphs(trial: FusedTrainable) -> bool:
    """Whether packs on a trial's device replay captured steps. Then a pack of one is faster than the trial alone."""
    return capture_on(trial.device) is not None


#: On a CPU, rows train in blocks of equal size, each for a whole iteration: at most as many rows as have parameters,
#: gradients and states of about this many bytes, which then stay near the core. Fewer than 8 rows are not worth the
#: calls. A program is for any number of rows, so there is no use in powers of two, and none in dead rows.
_BLOCK_BYTES = 16 * 2**20
_LEAST_ROWS = 8
#: Matrices of the size of a row's parameters: these, gradients and two states.
_MATRICES = 4


class FusedPack:
    """Trains trials of a :class:`FusedTrainable` together: every operation computes for all of them at once.

    Each trial stays a trial. It has its own results, order of data and random numbers, and its state is that of the
    same trial alone, up to rounding. While it is in the pack, its model and its optimizer have views of the pack's
    tensors, so that ``save_checkpoint`` writes the checkpoint that the trial alone would write. It can leave between
    two iterations and continue alone or in another pack; one that was restored from a checkpoint can join.

    A trial whose numbers are not finite changes no other: no operation mixes rows. An exception in :meth:`step` leaves
    all trials within an iteration: :meth:`restore` takes them back to where :meth:`remember` was called.

    Args:
        trials: set up, and of equal :func:`fusion_key`. :func:`why_not_fused` tells beforehand whether their training
            gives the same results in a pack.

    Attributes:
        trials: one for each row.
        key: what trials that join must have in common with these.

    Raises:
        InvalidFieldError: there is no trial, or something else among them.
        FusionError: they cannot be fused, or differ in what must be equal.

    Example:
        >>> import torch
        >>> from fluid.fused import SGD, FusedPack, FusedTrainable, TensorData
        >>> class Line(FusedTrainable):
        ...     def build(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(model(x), y)
        ...     def optimizer(self, config):
        ...         return SGD(lr=config["lr"])
        ...     def data(self, config, seed):
        ...         x = torch.arange(8.0).reshape(8, 1) / 8
        ...         return TensorData([x, 3 * x], batch_size=4, seed=seed)
        >>> pack = FusedPack.of(Line, [{"lr": lr} for lr in (0.01, 0.1, 0.2)])
        >>> slow, _, fast = [result["loss"] for result in (pack.step(), pack.step())[1]]
        >>> fast < slow
        True
        >>> (left,) = pack.leave([0])
        >>> left.step()["loss"] < slow, len(pack.step())
        (True, 2)
    """

    def __init__(self, trials: Iterable[FusedTrainable]) -> None:
        new = list(trials)
        if not new:
            raise InvalidFieldError("trials", new, "must have at least one trial")
        self.trials: tuple[FusedTrainable, ...] = ()
        self._snapshot: PackSnapshot | None = None
        self.key = self._admit(new, None)
        first = new[0]
        self._device = first.device
        self._iteration_batches = first._fused.iteration_batches
        self._masks = RowMasks(self._device) if first._fused.has_dropout else None
        self._has_evaluation = type(first).evaluate is not FusedTrainable.evaluate
        self._programs = RowPrograms(first, self.key)
        new_capture = capture_on(first.device)
        self._graphs = None if new_capture is None else StepGraphs(new_capture)
        self._share_data(new)
        self._size = self._size_for(len(new))
        self._model = StackedModel([trial.model for trial in new], self._size)
        self._optimizer = stacked_optimizer(self._model.layout, new, self._size, self._device)
        self._changed((*new,))

    @classmethod
    def of(cls, trainable: type[FusedTrainable], configs: Iterable[Mapping[str, Any]]) -> FusedPack:
        """Makes a pack of new trials, one for each config."""
        trials = []
        for config in configs:
            trial = trainable()
            trial.setup(dict(config))
            trials.append(trial)
        return cls(trials)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.trials)

    @property
    def shared_bytes(self) -> int:
        """Bytes on the device that are there once for all rows: data, and parameters that are not trained."""
        datas = [trial._fused.data for trial in self.trials]
        return tensor_bytes((*shared_tensors(datas), *self._model.shared.values()))

    @property
    def traced(self) -> int:
        """Programs traced so far, and steps captured: a step that does so takes longer than later ones."""
        return self._programs.traced + (0 if self._graphs is None else self._graphs.captured)

    def step(self) -> list[dict[str, Any]]:
        """Runs one iteration of every trial; returns their metrics, in the order of :attr:`trials`.

        Raises:
            FusionError: the user's functions cannot be computed for several trials at once.
        """
        if not self.trials:
            return []
        with global_random_state_kept(), torch.no_grad():
            losses = self._train(self._iteration_batches)
            evaluation = self._evaluate()
        for trial in self.trials:
            trial._elastic.iteration += 1
        evaluations = [{name: values[row] for name, values in evaluation.items()} for row in range(len(self))]
        return [
            trial.summarize(FusedState.metrics({"loss": loss}, found))
            for trial, loss, found in zip(self.trials, losses, evaluations, strict=True)
        ]

    def remember(self) -> None:
        """Notes the state of all trials, so that :meth:`restore` can bring it back: call it before :meth:`step`.

        It copies parameters, buffers and optimizer states on the device. The next call uses the same memory, as long as
        no trial leaves or joins; then the copy is dropped.
        """
        if self._snapshot is None:
            self._snapshot = PackSnapshot(self._model, self._optimizer, self.trials)
        else:
            self._snapshot.take()

    def restore(self) -> None:
        """Brings the state of all trials back to what it was at the last :meth:`remember`, exactly.

        Raises:
            FluidError: there was none since trials left or joined.
        """
        if self._snapshot is None:
            raise FluidError("restore() needs a remember() of the same trials before it")
        self._snapshot.restore()

    def leave(self, rows: Sequence[int]) -> list[FusedTrainable]:
        """Takes trials out, in the order of ``rows``; the other rows move up. They can continue on their own.

        Raises:
            InvalidFieldError: there is no such row, or it is named twice.
        """
        wanted = [require_integer("rows", row, at_least=0, at_most=len(self) - 1) for row in rows]
        if len(set(wanted)) < len(wanted):
            raise InvalidFieldError("rows", list(rows), "names a row twice")
        left = [self.trials[row] for row in wanted]
        kept = [row for row in range(len(self)) if row not in set(wanted)]
        for trial in left:
            self._model.detach(trial.model)
            self._optimizer.detach(trial)
            trial._fused.pack = None
        trials = tuple(self.trials[row] for row in kept)
        self._resize(len(trials))
        self._model.take(kept, [trial.model for trial in trials], self._size)
        self._optimizer.take(kept, trials, self._size)
        self._changed(trials)
        return left

    def join(self, trials: Iterable[FusedTrainable]) -> None:
        """Appends trials, new or restored.

        Raises:
            FusionError: they differ from the others in what must be equal.
        """
        new = list(trials)
        if not new:
            return
        self._admit(new, self.key)
        everyone = (*self.trials, *new)
        self._share_data(everyone)
        self._resize(len(everyone))
        self._model.join([trial.model for trial in new], [trial.model for trial in everyone], self._size)
        self._optimizer.join(new, everyone, self._size)
        self._changed(everyone)

    # -- rows ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _admit(new: Sequence[FusedTrainable], key: FusionKey | None) -> FusionKey:
        """Checks that trials, at least one, may join those with a key, or make a pack; returns the key."""
        for number, trial in enumerate(new):
            if not isinstance(trial, FusedTrainable) or not hasattr(trial, "_fused"):
                raise InvalidFieldError("trials", trial, "must be FusedTrainables that are set up")
            if trial._fused.pack is not None or any(trial is other for other in new[:number]):
                raise InvalidFieldError("trials", trial, "is in a pack already")
            require_fusible(trial)
            own = key_of(trial)
            key = own if key is None else key
            difference = key.difference(own)
            if difference is not None:
                raise FusionError(difference)
        assert key is not None
        return key

    def _size_for(self, rows: int, present: int = 0) -> int:
        """Returns the rows in memory, with dead ones where there are graphs."""
        return rows if self._graphs is None else size_for(rows, present)

    def _resize(self, rows: int) -> None:
        """Drops what is of the present rows, before there are so many."""
        self._snapshot = None
        size = self._size_for(rows, self._size)
        if self._graphs is not None and size != self._size:
            self._graphs.drop()
        self._size = size

    def _changed(self, trials: tuple[FusedTrainable, ...]) -> None:
        """Called when the rows have changed."""
        self.trials = trials
        for trial in trials:
            trial._fused.pack = self
        self._blocks = self._divide(len(trials))
        if self._masks is not None:
            self._masks.set_rows(trials, self._size)
        longest = max((block.stop - block.start for block in self._blocks), default=0)
        # Graphs have gradients of their own, which are there during a step only.
        self._gradients = {} if self._graphs is not None else self._model.layout.empty(longest, self._device)

    def _divide(self, rows: int) -> list[slice]:
        """Returns the rows in blocks."""
        if self._device.type != "cpu" or self._graphs is not None:
            return [slice(0, rows)] if rows else []
        limit = max(_LEAST_ROWS, _BLOCK_BYTES // (_MATRICES * self._model.layout.row_bytes))
        blocks = math.ceil(rows / limit)
        ends = [rows * number // max(1, blocks) for number in range(blocks + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @staticmethod
    def _share_data(trials: Sequence[FusedTrainable]) -> None:
        """Lets trials with equal tensors share them."""
        first, *others = [trial._fused.data for trial in trials]
        if isinstance(first, TensorData):
            for data in others:
                assert isinstance(data, TensorData)
                data.share(first)

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self, count: int) -> list[float]:
        """Trains all trials on their next batches; returns each one's mean loss."""
        steps = self._optimizer.begin(self.trials, count)
        if self._masks is not None:
            self._masks.begin(count)
        losses = torch.cat([self._train_block(rows, steps, count) for rows in self._blocks]).tolist()
        for trial in self.trials:
            state = trial._fused
            state.steps += count
            state.position = state.position.after(count, len(state.data))
        self._optimizer.finish(self.trials)
        return losses  # type: ignore[no-any-return]

    def _train_block(self, rows: slice, steps: StackedSteps, count: int) -> torch.Tensor:
        """Trains some rows; returns their mean losses, ``float64 (rows,)``."""
        states = [trial._fused for trial in self.trials[rows]]
        batches = row_train_batches(
            [state.data for state in states], [state.position for state in states], count, self._device
        )
        if self._graphs is not None:
            return self._replay(batches, steps)
        training = self._training_rows(rows)
        masks = None if self._masks is None else self._masks.of_rows(rows)
        samples = 0
        for number, batch in enumerate(batches):
            found = [] if masks is None else masks(number, batch.batch)
            training.step(found, batch, partial(steps.apply, number, rows))
            samples += batch.samples
        return training.losses / samples

    def _replay(self, batches: Iterable[RowBatch], steps: StackedSteps) -> torch.Tensor:
        """Trains all rows by graphs; returns their mean losses, ``float64 (rows,)``."""
        assert self._graphs is not None
        self._graphs.begin(self._training_rows(slice(0, self._size)), len(self), steps)
        samples = 0
        for number, batch in enumerate(batches):
            masks = _no_masks if self._masks is None else self._masks.drawing(number, batch.batch)
            self._graphs.step(number, masks, batch)
            samples += batch.samples
        return self._graphs.finish() / samples

    def _evaluate(self, limit: int | None = None) -> dict[str, list[float]]:
        """Evaluates all trials, on so many batches if there is a limit; returns each one's means, by name."""
        if not self._has_evaluation:
            return {}
        found: dict[str, list[float]] = {}
        for rows in self._blocks:
            totals: dict[str, torch.Tensor] = {}
            tensors, samples = self._tensors(rows), 0
            datas = [trial._fused.data for trial in self.trials[rows]]
            for batch in islice(row_evaluation_batches(datas, self._device), limit):
                for name, values in self._programs.evaluate(tensors, batch).items():
                    added = values.double() * batch.samples
                    totals[name] = totals[name] + added if name in totals else added
                samples += batch.samples
            for name, total in totals.items():
                found.setdefault(name, []).extend((total / samples).tolist())
        return found

    def _tensors(self, rows: slice) -> RowTensors:
        trained = self._model.layout.views({dtype: matrix[rows] for dtype, matrix in self._model.matrices.items()})
        others, shared = self._model.others, self._model.shared
        names = self._programs.other_names
        return RowTensors(
            [trained[name] for name in self._programs.trained_names],
            [shared[name] if name in shared else others[name][rows] for name in names],
            tuple(name in shared for name in names),
        )

    def _training_rows(self, rows: slice) -> TrainingRows:
        """Returns views of the pack's tensors."""

        def part(matrices: Matrices) -> Matrices:
            return {dtype: matrix[rows] for dtype, matrix in matrices.items()}

        gradients = {dtype: matrix[: rows.stop - rows.start] for dtype, matrix in self._gradients.items()}
        states = {name: part(matrices) for name, matrices in self._optimizer.states.items()}
        tensors = TrainingTensors(part(self._model.matrices), states, gradients)
        inputs = self._tensors(rows)
        return TrainingRows(self._model.layout, self._programs, tensors, inputs.others, inputs.is_shared)


def _no_masks() -> list[torch.Tensor]:
    return []
