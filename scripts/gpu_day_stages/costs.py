"""What a lane pays on its device: context, library handles, the cache, copies; and what is left once memory ran out."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from fluid.gpu.nvml import process_bytes, used_bytes
from fluid.lane.device.device import make_memory_meter
from fluid.lane.device.warming import expand_segments
from fluid.lane.protocol import LaneOptions
from gpu_day_stages.place import Place, seconds_of
from gpu_day_stages.results import Figures

_MIB = 2**20
#: Sizes of the copies, GiB.
_COPIES = (0.5, 1.5, 4.0)
#: Tensors of the fragmentation test, of which each seventh is kept, and elements of each.
_PIECES, _ELEMENTS = 400, 3 << 20


def costs(place: Place, figures: Figures) -> None:
    """Records seconds, bytes and rates."""
    _context(place, figures)
    _meter(place, figures)
    _cache(place, figures)
    for gib in _COPIES:
        figures[f"copies_{gib}_gib"] = copies(place, place.bytes_of(gib))
    figures.attempt("list_to_device_behind_work_ms", lambda: 1e3 * _list_to_device(place))


def _context(place: Place, figures: Figures) -> None:
    """What the process itself takes, beside tensors: after the context, the first product and a convolution."""
    import torch

    free_of_us = used_bytes(place.gpus[0]) if place.gpus else None

    def record(step: str) -> None:
        place.synchronize()
        if free_of_us is not None:
            used, own = used_bytes(place.gpus[0]), process_bytes(place.gpus[0], os.getpid())
            reserved = torch.cuda.memory_reserved()
            figures[f"device_bytes_after_{step}_mib"] = None if used is None else (used - free_of_us - reserved) / _MIB
            figures[f"process_bytes_after_{step}_mib"] = None if own is None else (own - reserved) / _MIB

    figures["context_s"] = seconds_of(lambda: torch.zeros(1, device=place.kind))
    record("context")
    matrix = torch.randn(512, 512, device=place.kind)
    figures["first_product_s"] = seconds_of(lambda: (matrix @ matrix, place.synchronize()))
    record("product")
    train = _small_convolution(place)
    figures["first_convolution_s"] = seconds_of(train)
    record("convolution")


def _small_convolution(place: Place) -> Any:
    import torch

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU()).to(place.kind)
    image = torch.randn(place.repeats(16), 3, 64, 64, device=place.kind)

    def train() -> None:
        net(image).mean().backward()
        place.synchronize()

    return train


def _meter(place: Place, figures: Figures) -> None:
    """What measuring an iteration's memory costs."""
    import torch

    meter = make_memory_meter(LaneOptions(0, kind="gpu" if place.gpus else "cpu"))
    figures["meter_us"] = 1e6 * seconds_of(lambda: (meter.begin(), meter.end()), place.repeats(300))
    for name in ("memory_allocated", "max_memory_reserved", "memory_stats") if place.gpus else ():
        figures[f"{name}_us"] = 1e6 * seconds_of(getattr(torch.cuda, name), place.repeats(300))
    figures["synchronize_us"] = 1e6 * seconds_of(place.synchronize, place.repeats(300))


def _cache(place: Place, figures: Figures) -> None:
    """What an emptied cache costs the next iteration, and what PyTorch keeps of it where tensors are scattered."""
    import torch

    train = _small_convolution(place)
    train()
    figures["iteration_ms"] = 1e3 * seconds_of(train, place.repeats(20))
    if not place.gpus:
        return
    figures["iteration_after_emptying_ms"] = 1e3 * seconds_of(lambda: (torch.cuda.empty_cache(), train()), 20)
    pieces = [torch.empty(_ELEMENTS, device=place.kind) for _ in range(_PIECES)]
    kept = pieces[::7]
    del pieces
    torch.cuda.empty_cache()
    figures["scattered_tensors"] = {
        "tensors": len(kept),
        "allocated_mib": torch.cuda.memory_allocated() / _MIB,
        "reserved_mib": torch.cuda.memory_reserved() / _MIB,
    }


def copies(place: Place, size: int) -> dict[str, Any]:
    """Returns the seconds to pin host memory, and the rates of copies to it and to pageable memory, GB/s."""
    import torch

    found: dict[str, Any] = {}
    on_device = torch.empty(size, dtype=torch.uint8, device=place.kind)
    for name, pinned in (("pinned", bool(place.gpus)), ("pageable", False)):
        before = _resident_bytes()
        host: list[Any] = []
        seconds = seconds_of(lambda p=pinned, h=host: h.append(torch.empty(size, dtype=torch.uint8, pin_memory=p)))
        found[f"{name}_made_s"] = seconds
        if pinned:
            found["pinned_bytes_per_byte"] = (_resident_bytes() - before) / size
        for way, to, source in (("to_host", host[0], on_device), ("to_device", on_device, host[0])):
            to.copy_(source)
            place.synchronize()
            seconds = seconds_of(
                lambda to=to, source=source: (to.copy_(source, non_blocking=True), place.synchronize()), 3
            )
            found[f"{name}_{way}_gb_per_s"] = size / seconds / 1e9
    return found


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _list_to_device(place: Place) -> float:
    """Seconds for which the host waits if it copies a list to the device behind queued work."""
    import torch

    matrix = torch.randn(8192 if place.gpus else 64, 8192 if place.gpus else 64, device=place.kind)
    place.synchronize()
    for _ in range(5):
        _ = matrix @ matrix
    seconds = seconds_of(lambda: torch.tensor([1.0] * 64, device=place.kind))
    place.synchronize()
    return seconds


# --- Out of memory

#: Holds so many bytes of the GPU until it is killed.
_HOG = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
time.sleep(600)
"""
#: GiB that it leaves, and sizes of what is allocated then, MiB.
_LEFT_GIB, _PIECE_MIB, _AFTER_MIB = 3, 100, 200


def out_of_memory(place: Place, figures: Figures) -> None:
    """Whether a process is whole after an out-of-memory error of the driver, and what a pack does that lacks memory.

    Another process holds nearly all memory. Lanes let segments expand, and so does this.
    """
    if not place.gpus:
        figures["skipped"] = "a CPU"
        return
    import torch

    torch.zeros(1, device=place.kind)
    torch.cuda.empty_cache()
    figures["expandable_segments"] = expand_segments(torch) or "accepted"
    meter = make_memory_meter(LaneOptions(0, kind="gpu"))
    free, _ = torch.cuda.mem_get_info()
    command = [sys.executable, "-c", _HOG, str(int(free - _LEFT_GIB * 2**30))]
    hog = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None
        figures["other_process"] = hog.stdout.readline().strip()
        for number in range(3):
            figures.attempt(f"round {number}", lambda: _run_out(meter))
    finally:
        hog.kill()
        hog.wait()
    figures.attempt("pack_with_little_memory", _little_memory)


def _run_out(meter: Any) -> str:
    import torch

    kept: list[Any] = []
    try:
        while True:
            kept.append(torch.ones(_PIECE_MIB * _MIB, dtype=torch.uint8, device="cuda"))
    except RuntimeError as error:
        said = f"{len(kept)} x {_PIECE_MIB} MiB, then {type(error).__name__}"
    kept.clear()
    meter.release_cached(collect=True)
    usable = meter.is_usable(allocates=True)
    try:
        total = float(torch.ones(_AFTER_MIB * _MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64))
        after = "works" if total == _AFTER_MIB * _MIB else f"is wrong: {total}"
    except RuntimeError as error:
        after = f"raises {type(error).__name__}: {error}"
    return f"{said}; is_usable says {usable}, and an allocation {after}"[:300]


def _little_memory() -> list[str]:
    """What the iterations of a pack do, the first of which has too little memory to capture its steps."""
    import torch

    from fluid.fused import FusedPack
    from gpu_day_stages.trainables import Net, configs

    torch.cuda.empty_cache()
    pack = FusedPack.of(Net, configs(64))
    _, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 6 * _MIB) / whole)
    said = []
    for _ in range(2):
        try:
            pack.step()
            said.append("graphs" if pack._graphs is not None and pack._graphs.size else "no graphs")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}"[:150])
        torch.cuda.set_per_process_memory_fraction(1.0)
    return said
