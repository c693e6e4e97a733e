"""What fusing gains: packs of 1 to 256 trials against one alone, a loop by hand, and a CUDA graph; and what fuses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from fusion import Captured, Plain
from fusion_workload import TRAINED, Digits
from fusion_workload import configs as digits_configs

from fluid.fused import FusedPack, FusedTrainable, why_not_fused
from gpu_day_stages.place import Place
from gpu_day_stages.results import Figures
from gpu_day_stages.trainables import BATCH, BATCHES, NETS, Autocast, Dropping, OfNet, configs

_ROWS, _ROWS_ON_CPU = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2)
#: Seconds that are left to the rest of a stage.
_REST_S = 5.0
#: Rows of the packs that show whether a net fuses.
_FEW = 16
#: The models of benchmarks/fusion_workload.py, in order of worth.
_DIGITS = ("MLP, width 32", "CNN, 8 and 16 channels", "transformer block, width 32", "MLP, width 256")


def fusion(place: Place, figures: Figures) -> None:
    """Samples per second, memory of each row, and seconds of the first iteration, which traces and captures."""
    if not place.gpus:
        torch.set_num_threads(1)
    plans: list[Callable[[float], None]] = []
    for model in _DIGITS if place.gpus else _DIGITS[:1]:
        some = digits_configs(model, max(_ROWS))
        alone = {"alone": lambda s=some: _made(Digits, s[0]).step, "by hand": lambda s=some: Plain(s[0]).step}
        if place.gpus:
            alone["CUDA graph alone"] = lambda s=some: Captured(s[0]).step
        plans.append(lambda share, m=model, s=some, a=alone: _packs(place, figures, m, Digits, s, TRAINED, a, share))
    plans.insert(2, lambda share: _dropout(place, figures, share))
    plans.insert(3, lambda share: _lora(place, figures, share))
    for number, plan in enumerate(plans):
        plan((place.left() - _REST_S) / (len(plans) - number))


def _dropout(place: Place, figures: Figures, share: float) -> None:
    some = configs(max(_ROWS))
    alone = {"alone": lambda: _made(Dropping, some[0]).step}
    _packs(place, figures, "MLP with Dropout", Dropping, some, BATCHES * BATCH, alone, share)


def _lora(place: Place, figures: Figures, share: float) -> None:
    import fusion_lora

    some = fusion_lora.configs(128, max(_ROWS))
    samples = 32 * fusion_lora.Adapters.iteration_batches
    alone = {
        "alone": lambda: _made(fusion_lora.Adapters, some[0]).step,
        "by hand": lambda: fusion_lora.Plain(some[0]).step,
    }
    _packs(place, figures, "LoRA, width 128", fusion_lora.Adapters, some, samples, alone, share)


def _made(cls: type[FusedTrainable], config: dict[str, Any]) -> FusedTrainable:
    trial = cls()
    trial.setup(config)
    return trial


def _seconds(place: Place, step: Callable[[], Any]) -> float:
    """The median of some iterations, once one has run."""
    step()
    took = []
    for _ in range(place.repeats(3)):
        place.synchronize()
        begun = time.perf_counter()
        step()
        place.synchronize()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _packs(
    place: Place,
    figures: Figures,
    model: str,
    cls: type[FusedTrainable],
    some: list[dict[str, Any]],
    samples: int,
    alone: dict[str, Callable[[], Callable[[], Any]]],
    share: float,
) -> None:
    """Measures a model, for so many seconds."""
    end = time.monotonic() + share
    for name, make in alone.items():
        figures.attempt(f"{model}, {name}", lambda m=make: {"per_s": samples / _seconds(place, m())})
    for rows in _ROWS if place.gpus else _ROWS_ON_CPU:
        if time.monotonic() > end:
            break
        figures.attempt(f"{model}, k = {rows}", lambda k=rows: _pack(place, cls, some[:k], samples))


def _pack(place: Place, cls: type[FusedTrainable], some: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    rows, before = len(some), 0.0
    if place.gpus:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
    begun = time.perf_counter()
    pack = FusedPack.of(cls, some)
    pack.step()
    place.synchronize()
    first = time.perf_counter() - begun
    found: dict[str, Any] = {"per_s": rows * samples / _seconds(place, pack.step), "first_s": first}
    if place.gpus:
        found["mib_per_row"] = (torch.cuda.max_memory_reserved() - before) / rows / 2**20
        found["graphs"] = None if pack._graphs is None else pack._graphs.size
    return found


def fusible(place: Place, figures: Figures) -> None:
    """Which kinds of nets fuse here, whether as a CUDA graph, and why others do not."""
    for net in NETS:
        figures.attempt(net, lambda n=net: _fuses(place, OfNet, n))
    figures.attempt("MLP, autocast to bfloat16", lambda: _fuses(place, Autocast, "MLP"))
    torch.set_float32_matmul_precision("high")
    figures.attempt("CNN, BatchNorm, TF32", lambda: _fuses(place, OfNet, "CNN, BatchNorm"))


def _fuses(place: Place, cls: type[FusedTrainable], net: str) -> dict[str, Any]:
    rows = _FEW if place.gpus else 2
    several = [{"net": net, "seed": seed} for seed in range(rows)]
    if reason := why_not_fused(cls, several[0]):
        return {"refused": reason[:300]}
    pack = FusedPack.of(cls, several)
    seconds = _seconds(place, pack.step)
    return {"step_ms": 1e3 * seconds, "graphs": None if pack._graphs is None else pack._graphs.size}
