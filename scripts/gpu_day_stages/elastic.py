"""Resizes of an elastic trial: over NCCL where there are two GPUs; on one GPU two processes share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid.elastic import ElasticRun
from gpu_day_stages.place import Place, seconds_of
from gpu_day_stages.results import Figures

#: Width of the hidden layers: about 10 million parameters on a GPU.
_HIDDEN, _HIDDEN_ON_CPU = 2816, 64


def elastic(place: Place, figures: Figures) -> None:
    """Records the figures."""
    import torch.distributed as dist

    figures["gpus"] = len(place.gpus)
    group = dist.ProcessGroupNCCL if place.gpus else dist.ProcessGroupGloo
    figures.attempt("group_of_one", lambda: _group_of_one(place, group))
    _resizes(place, figures)


def _group_of_one(place: Place, group: Any) -> dict[str, float]:
    """Seconds that a communicator takes to be made, used first, used again, and ended."""
    import torch
    import torch.distributed as dist

    store = dist.HashStore()
    ones = torch.ones(1 << 20, device=place.kind)
    made: list[Any] = []
    found = {"made_s": seconds_of(lambda: made.append(group(store, 0, 1)))}

    def reduce() -> None:
        made[0].allreduce([ones]).wait()
        place.synchronize()

    found["first_all_reduce_s"] = seconds_of(reduce)
    found["all_reduce_s"] = seconds_of(reduce, place.repeats(20))
    end: Callable[[], Any] = made[0].abort if place.gpus else made.clear
    found["ended_s"] = seconds_of(end)
    return found


def _resizes(place: Place, figures: Figures) -> None:
    from elastic_resize_workload import Perceptron

    config = {"hidden": _HIDDEN if place.gpus else _HIDDEN_ON_CPU}
    settled = place.repeats(10)
    with ElasticRun(Perceptron, config, 1, gpus=place.gpus[:2]) as run:
        run.run(settled)
        figures["iteration_at_width_1_s"] = seconds_of(lambda: run.run(1), settled)
        for round_ in range(place.repeats(3)):
            run.prepare(1)
            figures[f"resize_1_to_2_s_{round_}"] = seconds_of(lambda: (run.resize(2), run.run(1)))
            figures["iteration_at_width_2_s"] = seconds_of(lambda: run.run(1), settled)
            figures[f"resize_2_to_1_s_{round_}"] = seconds_of(lambda: (run.resize(1), run.run(1)))
