"""Training steps of a pack as graphs: captured once, then replayed, so that no step waits for Python.

A graph reads and writes the same memory in each replay. So the tensors of a pack have certain sizes, and stay the same
ones as long as the size does. Before each step its batches and columns of hyperparameters are copied to static tensors.
The places after the pack's rows are *dead rows*: they do what the last row does, and nothing reads their results. So
trials leave and join within a size without another capture.

What captures is an argument: CUDA graphs on a GPU (:mod:`fluid.fused.step_graphs`), and nothing on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fluid.fused.data import RowBatch, structure_key
from fluid.fused.obstacles import FusionError, one_line
from fluid.fused.programs import RowPrograms, RowTensors
from fluid.fused.stacked_model import Layout, Matrices
from fluid.fused.stacked_optimizers import StackedSteps, TrainingTensors, wide

# -- cuda graphs ---------------------------------------------------------------------------------
#
# Captures work on a GPU as CUDA graphs, which the driver starts at once: no operation waits for the one before it.


#: How often work runs before it is captured: libraries choose algorithms, and allocate their workspaces, in first runs.
WARM_UP = 3


class CudaCapture:
    """Captures functions that read and write the same tensors in each call; their graphs share one pool of memory.

    A replay may overwrite what another graph has left in the pool, so a function's results must be in tensors that
    were there before. The pool's memory is free again when all of its graphs are gone.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Runs a function some times, captures it, and returns what replays it on the current stream.

        Raises:
            Exception: what the function raises, or CUDA about what cannot be captured. The current stream is as before.
        """
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
            try:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP):
                        function()
                current.wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                # Other threads of the process may use the GPU meanwhile, as those that save checkpoints do.
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    function()
            finally:
                # PyTorch leaves its side stream current where the end of a capture fails.
                torch.cuda.set_stream(current)
        replay: Callable[[], None] = graph.replay
        return replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Returns a GPU's stream to capture on: one for all packs, as libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


# -- training step -------------------------------------------------------------------------------
#
# One training step of some rows of a pack: gradients, and what the optimizer makes of them.


class TrainingRows:
    """The tensors that training steps of some rows read and write.

    Args:
        layout: of the trained parameters.
        programs: of the pack.
        tensors: parameters and optimizer states of these rows, and their gradients if these are to be kept.
        others: buffers, and parameters that are not trained, in the programs' order.
        is_shared: of each of the others, whether it is one tensor for all rows.
        losses: sums over the samples so far, ``float64 (rows,)``; by default zeros.

    Attributes:
        tensors: as given.
        inputs: of the programs.
        losses: as given.
    """

    def __init__(
        self,
        layout: Layout,
        programs: RowPrograms,
        tensors: TrainingTensors,
        others: Sequence[torch.Tensor],
        is_shared: tuple[bool, ...],
        losses: torch.Tensor | None = None,
    ) -> None:
        self._layout = layout
        self._programs = programs
        self.tensors = tensors
        trained = layout.views(tensors.parameters)
        self.inputs = RowTensors([trained[name] for name in programs.trained_names], list(others), is_shared)
        device = self.inputs.trained[0].device
        self.losses = torch.zeros(len(self), dtype=torch.float64, device=device) if losses is None else losses

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.inputs.trained[0])

    def state(self) -> list[torch.Tensor]:
        """Returns all that training changes, but for the losses; dimension 0 is the row."""
        of_states = [matrix for matrices in self.tensors.states.values() for matrix in matrices.values()]
        others = zip(self.inputs.others, self.inputs.is_shared, strict=True)
        return [*self.tensors.parameters.values(), *of_states, *(other for other, is_shared in others if not is_shared)]

    def shared(self) -> list[torch.Tensor]:
        """Returns the tensors that are there once for all rows."""
        others = zip(self.inputs.others, self.inputs.is_shared, strict=True)
        return [other for other, is_shared in others if is_shared]

    def part(self, rows: slice) -> TrainingRows:
        """Returns views of the tensors of some rows, their losses included."""

        def of(matrices: Matrices) -> Matrices:
            return {dtype: matrix[rows] for dtype, matrix in matrices.items()}

        parameters, states, gradients = self.tensors
        tensors = TrainingTensors(
            of(parameters), {name: of(matrices) for name, matrices in states.items()}, of(gradients)
        )
        others = zip(self.inputs.others, self.inputs.is_shared, strict=True)
        return TrainingRows(
            self._layout,
            self._programs,
            tensors,
            [other if is_shared else other[rows] for other, is_shared in others],
            self.inputs.is_shared,
            self.losses[rows],
        )

    def step(self, masks: Sequence[torch.Tensor], batch: RowBatch, optimize: Callable[[TrainingTensors], None]) -> None:
        """Trains on one batch.

        Args:
            masks: of the rows' Dropouts.
            batch: of the rows.
            optimize: changes parameters and states, given the gradients.

        Raises:
            FusionError: the loss cannot be computed for rows at once.
        """
        gradients, losses = self._programs.train(self.inputs, masks, batch)
        matrices = self.tensors.gradients or self._layout.empty(len(self), self.losses.device)
        views = self._layout.views(matrices)
        torch._foreach_copy_([views[name] for name in self._programs.trained_names], list(gradients))
        del gradients
        optimize(self.tensors._replace(gradients=matrices))
        self.losses += losses.double() * batch.samples


# -- step graphs ---------------------------------------------------------------------------------


#: Runs a function, maybe several times, and returns what repeats its work on the same tensors.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

_log = logging.getLogger(__name__)


def capture_on(device: torch.device) -> Callable[[], Capture] | None:
    """Returns what makes a :data:`Capture` for a device; ``None`` if steps run as they are there."""
    return (lambda: CudaCapture(device)) if device.type == "cuda" else None


def size_for(rows: int, present: int = 0) -> int:
    """Returns how many rows to have in memory: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, so at most half of them dead.

    Args:
        rows: that train.
        present: the size so far. It stays if it is but one larger than needed, so that one row that leaves and comes
            back captures nothing.

    Example:
        >>> [size_for(rows) for rows in (0, 1, 3, 4, 5, 7, 9)]
        [0, 1, 3, 4, 6, 8, 12]
        >>> size_for(5, present=8), size_for(4, present=8)
        (8, 4)
    """
    size = _least_size(rows)
    return present if rows and present in (size, _least_size(size + 1)) else size


def _least_size(rows: int) -> int:
    power = 1 << (rows - 1).bit_length() if rows else 0
    return power // 4 * 3 if rows <= power // 4 * 3 else power


class _Graph(NamedTuple):
    """A captured step: the tensors that it reads batches from, and what replays it."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None]


class StepGraphs:
    """The captured training steps of one pack. Call :meth:`begin`, :meth:`step` for each batch, and :meth:`finish`.

    There is a graph for each shape of batch. All are dropped when the pack gets other tensors, as with another size, or
    when what the optimizer computes changes. A step that cannot be captured runs as it is, and is not captured again
    before that. It is logged once.

    Args:
        new_capture: makes what captures, for graphs that are dropped together.

    Attributes:
        captured: how often a step was captured so far, or was found not to be.
    """

    def __init__(self, new_capture: Callable[[], Capture]) -> None:
        self._new_capture = new_capture
        self.captured = 0
        #: Shapes of batches whose steps could not be captured, with any size.
        self._logged: set[Any] = set()
        self.drop()

    @property
    def size(self) -> int:
        """The rows of the graphs, with dead ones; 0 if there are none."""
        return 0 if self._rows is None or not any(self._graphs.values()) else len(self._rows)

    def drop(self) -> None:
        """Drops all graphs and their memory."""
        #: By shape of batch; ``None`` where the step cannot be captured.
        self._graphs: dict[Any, _Graph | None] = {}
        self._rows: TrainingRows | None = None
        self._kind: Any = None
        self._capture: Capture | None = None

    def begin(self, rows: TrainingRows, present: int, steps: StackedSteps) -> None:
        """Begins some steps of rows.

        Args:
            rows: all that are in memory.
            present: how many of them, at least one, are no dead rows.
            steps: of those.
        """
        # The graphs hold the tensors, so that no others get their addresses.
        kind = (steps.terms, rows.inputs.is_shared, [tensor.data_ptr() for tensor in (*rows.state(), *rows.shared())])
        size, device = len(rows), rows.losses.device
        if kind != self._kind:
            self.drop()
            self._columns = {
                dtype: torch.empty(size, steps.table(dtype)[0].shape[-1], dtype=dtype, device=device)
                for dtype in {wide(dtype) for dtype in rows.tensors.parameters}
            }
            self._rows, self._kind, self._capture = rows, kind, self._new_capture()
        assert self._rows is not None
        # Dead rows are the last one once more: other numbers could be such that an operation refuses them.
        dead = [(tensor[present:], tensor[present - 1 : present]) for tensor in rows.state() if present < size]
        for tensor, last in dead:
            tensor.copy_(last)
        self._present = present
        self._steps = steps
        self._places = torch.tensor([*range(present), *[present - 1] * (size - present)], device=device)
        self._rows.losses.zero_()
        self._tables = {dtype: steps.table(dtype)[0].index_select(1, self._places) for dtype in self._columns}

    def step(self, number: int, masks: Callable[[], list[torch.Tensor]], batch: RowBatch) -> None:
        """Trains the rows on one batch each.

        Args:
            number: of the step, among those that the rows began.
            masks: makes those of all rows in memory, dead ones included, by operations that a graph can repeat.
            batch: of the present rows, and not common to them.

        Raises:
            FusionError: the loss cannot be computed for rows at once.
            OutOfMemoryError: PyTorch's; the step does not fit, or its graph cannot be captured in what is left.
        """
        for dtype, columns in self._columns.items():
            columns.copy_(self._tables[dtype][number])
        leaves, structure = tree_flatten(batch.batch)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        key = (structure_key(structure), *others, *((tensor.shape[1:], tensor.dtype) for tensor in inputs))
        if key not in self._graphs:
            statics = [tensor.index_select(0, self._places) for tensor in inputs]
            remaining = iter(statics)
            leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            replay = self._captured(key, masks, batch._replace(batch=tree_unflatten(leaves, structure)))
            self._graphs[key] = None if replay is None else _Graph(statics, replay)
        elif (graph := self._graphs[key]) is not None:
            for static, tensor in zip(graph.inputs, inputs, strict=True):
                torch.index_select(tensor, 0, self._places, out=static)
        if (graph := self._graphs[key]) is not None:
            graph.replay()
            return
        assert self._rows is not None
        present = slice(0, self._present)
        optimize = partial(self._steps.apply, number, present)
        self._rows.part(present).step([mask[present] for mask in masks()], batch, optimize)

    def finish(self) -> torch.Tensor:
        """Returns the sums of losses of the present rows, ``float64 (rows,)``."""
        assert self._rows is not None
        return self._rows.losses[: self._present]

    def _captured(
        self, key: Any, masks: Callable[[], list[torch.Tensor]], batch: RowBatch
    ) -> Callable[[], None] | None:
        """Captures the step; its tensors are as before afterwards. Returns ``None`` if it cannot be captured."""
        assert self._rows is not None and self._capture is not None
        rows, change, columns = self._rows, self._steps.change, self._columns
        places = self._steps.table(next(iter(columns)))[1]

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return columns[wide(dtype)][:, places[name]]

        def run() -> None:
            rows.step(masks(), batch, lambda tensors: change(tensors, column))

        self.captured += 1
        changed = [*rows.state(), rows.losses]
        before = [tensor.to("cpu", copy=True) for tensor in changed]  # Captures are rare, a GPU's memory is scarce.
        try:
            return self._capture(run)
        except torch.cuda.OutOfMemoryError:
            # Capturing needs more memory than a step without a graph. Fewer rows fit, and train several times as fast.
            self._capture = self._new_capture()
            raise
        except FusionError:
            raise
        except Exception as error:
            if key not in self._logged:
                self._logged.add(key)
                why = one_line(error)
                _log.warning("training steps of a pack run without a graph: they cannot be captured: %s", why)
            self._capture = self._new_capture()  # What is left of the failed one may keep the pool from being used.
            return None
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
