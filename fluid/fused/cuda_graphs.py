"""Captures work on a GPU as CUDA graphs, which the driver starts at once: no operation waits for the one before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

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
