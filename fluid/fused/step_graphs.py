"""Training steps of a pack as graphs: captured once, then replayed, so that no step waits for Python.

A graph reads and writes the same memory in each replay. So rows train in static tensors, for a number of rows that is
a power of two. Before an iteration the state of the pack's rows is copied into them, before each step its batches,
masks and columns of hyperparameters, and after the iteration the state is copied back. The places that are left are
*dead rows*: they do what the last row does, and nothing reads their results. So trials leave and join within a size
without another capture.

What captures is an argument: CUDA graphs on a GPU (:mod:`fluid.fused.step_graphs`), and nothing on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fluid.fused.data import RowBatch
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
        tensors: parameters, optimizer states and gradients of these rows.
        others: buffers, and parameters that are not trained, in the programs' order.
        is_shared: of each of the others, whether it is one tensor for all rows.

    Attributes:
        tensors: as given.
        inputs: of the programs.
        losses: sums over the samples so far, ``float64 (rows,)``.
    """

    def __init__(
        self,
        layout: Layout,
        programs: RowPrograms,
        tensors: TrainingTensors,
        others: Sequence[torch.Tensor],
        is_shared: tuple[bool, ...],
    ) -> None:
        self._layout = layout
        self._programs = programs
        self.tensors = tensors
        trained, gradients = layout.views(tensors.parameters), layout.views(tensors.gradients)
        names = programs.trained_names
        self.inputs = RowTensors([trained[name] for name in names], list(others), is_shared)
        self._gradients = [gradients[name] for name in names]
        self.losses = torch.zeros(len(self), dtype=torch.float64, device=self._gradients[0].device)

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

    def like(self, rows: int) -> TrainingRows:
        """Returns other tensors of this kind for so many rows, without their values; shared ones are the same."""
        device = self.losses.device

        def empty() -> Matrices:
            return self._layout.empty(rows, device)

        tensors = TrainingTensors(empty(), {name: empty() for name in self.tensors.states}, empty())
        others = [
            other if is_shared else other.new_empty(rows, *other.shape[1:])
            for other, is_shared in zip(self.inputs.others, self.inputs.is_shared, strict=True)
        ]
        return TrainingRows(self._layout, self._programs, tensors, others, self.inputs.is_shared)

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
        torch._foreach_copy_(self._gradients, list(gradients))
        optimize(self.tensors)
        self.losses += losses.double() * batch.samples


# -- step graphs ---------------------------------------------------------------------------------


#: Runs a function, maybe several times, and returns what repeats its work on the same tensors.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

_log = logging.getLogger(__name__)


def capture_on(device: torch.device) -> Callable[[], Capture] | None:
    """Returns what makes a :data:`Capture` for a device; ``None`` if steps run as they are there."""
    return (lambda: CudaCapture(device)) if device.type == "cuda" else None


def size_for(rows: int, present: int = 0) -> int:
    """Returns for how many rows to capture: the next power of two.

    Args:
        rows: that train, at least 1.
        present: the size so far. Half as many rows keep it, so that one row that leaves and comes back at a power of
            two captures nothing.

    Example:
        >>> [size_for(rows) for rows in (1, 3, 4, 5)]
        [1, 4, 4, 8]
        >>> size_for(4, present=8), size_for(3, present=8)
        (8, 4)
    """
    return present if present <= 2 * rows and rows <= present else 1 << (rows - 1).bit_length()


class _Graph(NamedTuple):
    """A captured step: the tensors that it reads masks and batches from, and what replays it."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None]


class StepGraphs:
    """The captured training steps of one pack. Call :meth:`begin`, :meth:`step` for each batch, and :meth:`finish`.

    There is a graph for each shape of batch. All are dropped when the size changes, or what the optimizer computes,
    or which parameters all rows share. A step that cannot be captured runs as it is, on the static tensors. That is
    logged once, and the step is not captured again.

    Args:
        new_capture: makes what captures, for graphs that are dropped together.

    Attributes:
        captured: how often a step was captured so far, or was found not to be.
    """

    def __init__(self, new_capture: Callable[[], Capture]) -> None:
        self._new_capture = new_capture
        self.captured = 0
        self._failed: set[Any] = set()
        self.drop()

    @property
    def size(self) -> int:
        """The rows of the graphs, with dead ones; 0 if there are none."""
        return 0 if self._static is None else len(self._static)

    @property
    def is_worthwhile(self) -> bool:
        """Whether any step could be captured, or none was tried."""
        return not self._failed or any(key not in self._failed for key in self._graphs)

    def drop(self) -> None:
        """Drops all graphs and their memory."""
        self._graphs: dict[Any, _Graph] = {}
        self._static: TrainingRows | None = None
        self._rows: TrainingRows | None = None
        self._kind: Any = None
        self._capture: Capture | None = None

    def begin(self, rows: TrainingRows, steps: StackedSteps) -> None:
        """Takes over the state of rows, at least one, for some steps."""
        size = size_for(len(rows), self.size)
        # The graphs hold the shared tensors, so that no others get their addresses.
        kind = (size, steps.terms, rows.inputs.is_shared, [tensor.data_ptr() for tensor in rows.shared()])
        if kind != self._kind:
            self.drop()
            device = rows.losses.device
            self._columns = {
                dtype: torch.empty(size, steps.table(dtype)[0].shape[-1], dtype=dtype, device=device)
                for dtype in {wide(dtype) for dtype in rows.tensors.parameters}
            }
            self._static, self._kind, self._capture = rows.like(size), kind, self._new_capture()
        assert self._static is not None
        self._rows = rows
        self._steps = steps
        places = [*range(len(rows)), *[len(rows) - 1] * (size - len(rows))]
        self._places = torch.tensor(places, device=self._static.losses.device)
        for static, tensor in zip(self._static.state(), rows.state(), strict=True):
            self._fill(static, tensor)
        self._static.losses.zero_()
        self._tables = {dtype: steps.table(dtype)[0].index_select(1, self._places) for dtype in self._columns}

    def step(self, number: int, masks: Sequence[torch.Tensor], batch: RowBatch) -> None:
        """Trains the rows on one batch each.

        Args:
            number: of the step, among those that the rows began.
            masks: of the rows' Dropouts.
            batch: not common to the rows.

        Raises:
            FusionError: the loss cannot be computed for rows at once.
            OutOfMemoryError: PyTorch's; the step does not fit, or its graph cannot be captured in what is left.
        """
        for dtype, columns in self._columns.items():
            columns.copy_(self._tables[dtype][number])
        leaves, structure = tree_flatten(batch.batch)
        inputs = [*masks, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        key = (structure, tuple(others), len(masks), *((tensor.shape[1:], tensor.dtype) for tensor in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            statics = [tensor.index_select(0, self._places) for tensor in inputs]
            remaining = iter(statics[len(masks) :])
            leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            static_batch = batch._replace(batch=tree_unflatten(leaves, structure))
            graph = self._graphs[key] = _Graph(statics, self._captured(key, statics[: len(masks)], static_batch))
        else:
            for static, tensor in zip(graph.inputs, inputs, strict=True):
                self._fill(static, tensor)
        graph.replay()

    def finish(self) -> None:
        """Gives the rows their state, and their sums of losses."""
        assert self._static is not None and self._rows is not None
        rows, self._rows = self._rows, None
        count = len(rows)
        torch._foreach_copy_(rows.state(), [static[:count] for static in self._static.state()])
        rows.losses.copy_(self._static.losses[:count])

    def _fill(self, static: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies the rows of a tensor to their places, and the last one to those of dead rows."""
        torch.index_select(tensor, 0, self._places, out=static)

    def _captured(self, key: Any, masks: Sequence[torch.Tensor], batch: RowBatch) -> Callable[[], None]:
        """Captures the step on the static tensors, which are as before afterwards."""
        assert self._static is not None and self._capture is not None
        static, change, columns = self._static, self._steps.change, self._columns
        places = self._steps.table(next(iter(columns)))[1]

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return columns[wide(dtype)][:, places[name]]

        def optimize(tensors: TrainingTensors) -> None:
            change(tensors, column)

        def run() -> None:
            static.step(masks, batch, optimize)

        if key in self._failed:
            return run
        self.captured += 1
        changed = [*static.state(), static.losses]
        before = [tensor.clone() for tensor in changed]
        try:
            return self._capture(run)
        except torch.cuda.OutOfMemoryError:
            # Capturing needs more memory than a step without a graph. Fewer rows fit, and train several times as fast.
            self._capture = self._new_capture()
            raise
        except FusionError:
            raise
        except Exception as error:
            _log.warning("training steps of a pack run without a graph: they cannot be captured: %s", one_line(error))
            self._failed.add(key)
            self._capture = self._new_capture()  # What is left of the failed one may keep the pool from being used.
            return run
        finally:
            torch._foreach_copy_(changed, before)
