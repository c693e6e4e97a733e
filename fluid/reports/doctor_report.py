"""Prints what ``fluid doctor`` found: as a table with sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fluid.display.format import count, number, percent
from fluid.gpu.nvml import GpuState
from fluid.reports.doctor import Machine, MachineAdvice, Package, ray_is_supported

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def machine_report(machine: Machine, advice: MachineAdvice) -> RenderableType:
    """The machine as a table, followed by what Fluid would use of it, in sentences."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(machine):
        table.add_row(Text(name), Text(value))
    parts: list[RenderableType] = [table]
    if machine.gpus:
        parts += [Text(), _gpu_table(machine.gpus)]
    parts.append(Text())
    parts += _sentences("+", advice.uses, "green")
    parts += _sentences("-", advice.not_used, "")
    parts += _sentences("!", advice.warnings, "yellow")
    return Group(*parts)


def as_json(machine: Machine, advice: MachineAdvice) -> dict[str, Any]:
    """The output of ``fluid doctor --json``; sizes are in bytes."""
    gpus = [
        {
            "uuid": gpu.token,
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "used_bytes": gpu.used_bytes,
            "busy": gpu.busy,
            "mig": gpu.mig,
            "compute_mode": gpu.compute_mode,
            "capability": None if gpu.capability is None else list(gpu.capability),
            "processes": None if gpu.processes is None else [process._asdict() for process in gpu.processes],
        }
        for gpu in machine.gpus
    ]
    return {
        "fluid": machine.fluid,
        "python": machine.python,
        "system": machine.system,
        "cpu": {"cores": machine.cores, "machine_cores": machine.machine_cores, "quota": machine.cpu_quota},
        "memory": {"bytes": machine.memory, "limit_bytes": machine.memory_limit},
        "shm": {"bytes": machine.shm, "free_bytes": machine.shm_free},
        "open_files": machine.open_files,
        "driver": machine.driver,
        "gpus": gpus,
        "no_gpus": machine.no_gpus,
        "mps": {"program": machine.mps_program, "usable": not machine.no_mps, "reason": machine.no_mps},
        "packages": {
            name: {"version": package.version, **({"cuda": package.cuda} if name == "torch" else {})}
            for name, package in machine.packages.items()
        },
        "ray_supported": _ray_supported(machine.packages["ray"]),
        "advice": asdict(advice),
    }


def _rows(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "Fluid", f"{machine.fluid}, on Python {machine.python}, {machine.system}"
    cores = count(machine.cores, "core")
    if machine.cores < machine.machine_cores:
        cores += f" of {machine.machine_cores}"
    if machine.cpu_quota is not None:
        cores += f", limited to the CPU time of {number(machine.cpu_quota)}"
    yield "CPU", cores
    memory = _size(machine.memory)
    yield "memory", memory if machine.memory_limit is None else f"{memory}, limited to {_size(machine.memory_limit)}"
    yield "/dev/shm", "none" if machine.shm is None else f"{_size(machine.shm)}, {_size(machine.shm_free)} free"
    yield "open files", "no limit" if machine.open_files is None else f"{machine.open_files:,} a process"
    yield "NVIDIA driver", machine.driver or "none"
    yield "GPUs", count(len(machine.gpus), "GPU") if machine.gpus else f"none: {machine.no_gpus}"
    yield "MPS", machine.mps_program or "nvidia-cuda-mps-control is not installed"
    for package in machine.packages.values():
        yield package.name, _package(package)


def _package(package: Package) -> str:
    if package.version is None:
        return "not installed"
    text = package.version
    if package.name == "torch":
        text += f", for CUDA {package.cuda}" if package.cuda else ", without CUDA"
    if package.name == "ray":
        text += "" if ray_is_supported(package.version) else ", not among the tested versions"
    return text


def _ray_supported(package: Package) -> bool | None:
    return None if package.version is None else ray_is_supported(package.version)


def _gpu_table(gpus: Iterable[GpuState]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for header in ("", "GPU", "memory", "used", "busy", "compute mode", "MIG"):
        table.add_column(header, justify="left" if header in ("GPU", "compute mode", "MIG") else "right")
    for index, gpu in enumerate(gpus):
        table.add_row(
            str(index),
            Text(f"{gpu.name}\n{gpu.token}"),
            _size(gpu.memory_bytes),
            _size(gpu.used_bytes),
            "?" if gpu.busy is None else percent(gpu.busy),
            gpu.compute_mode or "?",
            "?" if gpu.mig is None else ("yes" if gpu.mig else "no"),
        )
    return table


def _sentences(bullet: str, sentences: Iterable[str], style: str) -> list[RenderableType]:
    """A bulleted list with hanging indents; empty if there are no sentences."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for sentence in sentences:
        grid.add_row(Text(bullet, style=style), Text(sentence))
    return [grid] if grid.row_count else []


def _size(size: float | None) -> str:
    if size is None:
        return "?"
    unit = 0
    while size >= 1024.0 and unit < len(_UNITS) - 1:
        size, unit = size / 1024.0, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 999.5 else f"{size:.0f} {_UNITS[unit]}"
