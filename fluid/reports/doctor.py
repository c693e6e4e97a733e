"""Examines this machine for ``fluid doctor``: what it has, and what Fluid would use.

Packages are not imported: their versions are read from their installed metadata.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fluid._imports import install_command
from fluid._version import __version__
from fluid.display.format import count, number, percent
from fluid.gpu.mps_control import find_program
from fluid.gpu.mps_refusals import recall_refusal
from fluid.gpu.mps_support import unsupported_reason_here
from fluid.gpu.nvml import GpuState, describe_gpus, driver_version, no_gpu_reason
from fluid.resources import available_cores

#: The first and the last version of Ray that were tested.
RAY_RANGE = ((2, 9), (2, 60))
_SHM = "/dev/shm"
_CGROUP = "/sys/fs/cgroup"
#: Version 1 of cgroups expresses "no limit" by a number of about this size.
_NO_LIMIT = 1 << 60
#: Fewer open files than this are too few for some hundred lanes, each of which needs several in the driver.
_FEW_FILES = 1024
_LITTLE_SHM = 1 << 30


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        name: its name in the package index.
        version: ``None`` if it is not installed.
        cuda: the CUDA version that PyTorch was built for; ``None`` without CUDA and for other packages.
    """

    name: str
    version: str | None
    cuda: str | None = None


@dataclass(frozen=True)
class Machine:
    """The hardware, limits and packages of a machine. Sizes are in bytes; unknown values and unset limits are ``None``.

    Attributes:
        cores: CPU cores that this process may run on; ``machine_cores``: all CPU cores of the machine.
        cpu_quota: CPU time that the container may use, in cores.
        memory_limit: memory that the container may use.
        open_files: most files that a process may have open at once.
        no_gpus: why no GPU was found; empty if one was found.
        mps_program: path of the MPS control program.
        no_mps: why MPS cannot be used; empty if no obstacle was found.
    """

    fluid: str
    python: str
    system: str
    cores: int
    machine_cores: int
    cpu_quota: float | None
    memory: int | None
    memory_limit: int | None
    shm: int | None
    shm_free: int | None
    open_files: int | None
    gpus: tuple[GpuState, ...]
    driver: str | None
    no_gpus: str
    mps_program: str | None
    no_mps: str
    packages: dict[str, Package]


@dataclass(frozen=True)
class MachineAdvice:
    """What Fluid would use of a machine.

    Attributes:
        devices: number of devices.
        kind: their kind: ``gpu`` or ``cpu``.
        uses: what Fluid uses, in sentences.
        not_used: what Fluid does not use, and why.
        warnings: what may go wrong.
    """

    devices: int
    kind: str
    uses: list[str] = field(default_factory=list)
    not_used: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine() -> Machine:
    """Examines this machine without starting or changing anything."""
    gpus = tuple(describe_gpus())
    shm = shutil.disk_usage(_SHM) if os.path.isdir(_SHM) else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Machine(
        fluid=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cores=len(available_cores()),
        machine_cores=os.cpu_count() or 1,
        cpu_quota=read_cpu_quota(_CGROUP),
        memory=_physical_memory(),
        memory_limit=read_memory_limit(_CGROUP),
        shm=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        open_files=None if files == resource.RLIM_INFINITY else files,
        gpus=gpus,
        driver=driver_version(),
        no_gpus="" if gpus else no_gpu_reason(),
        mps_program=find_program(),
        no_mps=unsupported_reason_here(gpus) or next(filter(None, (recall_refusal(gpu.token) for gpu in gpus)), ""),
        packages={name: find_package(name) for name in ("torch", "horovod", "ray", "nvidia-ml-py")},
    )


def advise(machine: Machine) -> MachineAdvice:
    """Determines what Fluid would use of a machine, what it would not use, and why."""
    advice = MachineAdvice(len(machine.gpus), "gpu") if machine.gpus else MachineAdvice(machine.cores, "cpu")
    _advise_devices(machine, advice)
    _advise_gpu_sharing(machine, advice)
    _advise_torch(machine, advice)
    _advise_ray(machine, advice)
    if machine.packages["horovod"].version is None:
        advice.not_used.append("Horovod is not installed.")
    _advise_limits(machine, advice)
    return advice


def ray_is_supported(version: str) -> bool | None:
    """Whether this version of Ray lies between the tested ones; ``None`` if it is not a version number."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return None
    return RAY_RANGE[0] <= (int(numbers[1]), int(numbers[2])) <= RAY_RANGE[1]


# -- examining the machine -----------------------------------------------------------------------------------


def find_package(name: str) -> Package:
    """Finds a package without importing it."""
    try:
        version: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or name != "torch":
        return Package(name, version)
    return Package(name, version, _cuda_of_torch())


def _cuda_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return read_torch_cuda(Path(spec.origin).with_name("version.py"))


def read_torch_cuda(path: Path) -> str | None:
    """The CUDA version that PyTorch was built for, from its ``version.py``; ``None`` without CUDA."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        named = any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return None


def read_cpu_quota(cgroup: str) -> float | None:
    """CPU time that the container may use, in cores; ``None`` if it is not limited.

    Args:
        cgroup: the folder where cgroups, of version 1 or 2, are mounted.
    """
    try:
        if (words := _read(cgroup, "cpu.max").split())[:1] != []:
            return None if words[0] == "max" else int(words[0]) / int(words[1])
        quota = int(_read(cgroup, "cpu/cpu.cfs_quota_us") or -1)
        return quota / int(_read(cgroup, "cpu/cpu.cfs_period_us")) if quota > 0 else None
    except (ValueError, IndexError, ZeroDivisionError):
        return None


def read_memory_limit(cgroup: str) -> int | None:
    """Bytes of memory that the container may use; ``None`` if it is not limited.

    Args:
        cgroup: the folder where cgroups, of version 1 or 2, are mounted.
    """
    text = _read(cgroup, "memory.max") or _read(cgroup, "memory/memory.limit_in_bytes")
    limit = int(text) if text.strip().isdecimal() else None
    return None if limit is None or limit >= _NO_LIMIT else limit


def _read(folder: str, name: str) -> str:
    try:
        return Path(folder, name).read_text(encoding="ascii")
    except OSError:
        return ""


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


# -- advice --------------------------------------------------------------------------------------------------


def _advise_devices(machine: Machine, advice: MachineAdvice) -> None:
    if machine.gpus:
        advice.uses.append(f"Fluid would use {count(advice.devices, 'GPU')}, with devices=None.")
        return
    advice.uses.append(f"Fluid would use {count(advice.devices, 'CPU core')} as devices, with devices=None.")
    advice.not_used.append(f"No GPU is used: {machine.no_gpus}.")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        advice.warnings.append(
            f"This container is limited to the CPU time of {machine.cpu_quota:g} cores but sees {machine.cores}: use "
            f"devices={max(1, int(machine.cpu_quota))}, or trials will slow each other down."
        )


def _advise_gpu_sharing(machine: Machine, advice: MachineAdvice) -> None:
    if not machine.gpus:
        advice.not_used.append("MPS is not used: it needs a GPU.")
        return
    if machine.no_mps:
        advice.uses.append("Trials packed on a GPU would share it by time slices.")
        advice.not_used.append(f"MPS cannot be used: {machine.no_mps}.")
    else:
        advice.uses.append("Trials packed on a GPU can run side by side under MPS, or share it by time slices.")
    for gpu in machine.gpus:
        if (gpu.compute_mode or "").startswith("EXCLUSIVE") and machine.no_mps:
            advice.warnings.append(
                f"The compute mode of {gpu.token} is {gpu.compute_mode}: without MPS only one process can use the GPU, "
                "so packing would fail. Fluid does not change compute modes."
            )
        if gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes)
            advice.warnings.append(f"{gpu.token} is in use (process {pids}): Fluid's measurements will be inaccurate.")


def _advise_torch(machine: Machine, advice: MachineAdvice) -> None:
    torch = machine.packages["torch"]
    if torch.version is None:
        effect = ": Fluid cannot measure the GPU memory of trials" if machine.gpus else ""
        advice.not_used.append(f"PyTorch is not installed{effect}.")
    elif machine.gpus and torch.cuda is None:
        advice.warnings.append(f"PyTorch {torch.version} was built without CUDA: its trials cannot use the GPUs.")


def _advise_ray(machine: Machine, advice: MachineAdvice) -> None:
    version = machine.packages["ray"].version
    low, high = (".".join(map(str, bound)) for bound in RAY_RANGE)
    if version is None:
        advice.uses.append("Trials would run in local processes.")
        advice.not_used.append(f"Ray is not installed. It is needed only for clusters: {install_command('ray')}.")
        return
    advice.uses.append(
        f"Trials would run in local processes, or on Ray {version} if it is connected or with backend='ray'."
    )
    if not ray_is_supported(version):
        advice.warnings.append(f"Ray {version} is outside of {low} to {high}, the first and the last that were tested.")


def _advise_limits(machine: Machine, advice: MachineAdvice) -> None:
    if machine.shm is None:
        advice.not_used.append(f"Checkpoints are not kept in memory: this machine has no {_SHM}.")
    elif (machine.shm_free or 0) < _LITTLE_SHM:
        advice.warnings.append(
            f"{_SHM} has little free space ({_size(machine.shm_free)}): once it is full, checkpoints go to disk and "
            "data loaders may fail. In Docker, enlarge it with --shm-size."
        )
    if machine.open_files is not None and machine.open_files < _FEW_FILES:
        advice.warnings.append(
            f"A process may open only {machine.open_files} files: many trials at once may fail. "
            f"Raise the limit with ulimit -n {_FEW_FILES}."
        )


# -- doctor report -------------------------------------------------------------------------------
#
# Prints what ``fluid doctor`` found: as a table with sentences, or as JSON.


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def machine_report(machine: Machine, advice: MachineAdvice) -> RenderableType:
    """The machine as a table, followed by what Fluid would use of it, in sentences."""
    parts: list[RenderableType] = named_values(_rows(machine))
    if machine.gpus:
        parts += [Text(), _gpu_table(machine.gpus)]
    parts.append(Text())
    parts += sentences("+", advice.uses, "green")
    parts += sentences("-", advice.not_used, "")
    parts += sentences("!", advice.warnings, "yellow")
    return Group(*parts)


def as_json(machine: Machine, advice: MachineAdvice) -> dict[str, Any]:
    """The output of ``fluid doctor --json``. Sizes are in bytes; unknown values and unset limits are ``null``.

    * ``fluid``, ``python``, ``system``: versions
    * ``cpu``: ``cores`` that Fluid may run on, ``machine_cores``, and ``quota``, the CPU time, in cores, that a
      container may use
    * ``memory``: ``bytes``, and ``limit_bytes`` of a container; ``shm``: ``bytes`` and ``free_bytes`` of ``/dev/shm``
    * ``open_files``: most open files of a process
    * ``driver``: version of the NVIDIA driver
    * ``gpus``: a list of ``uuid``, ``name``, ``memory_bytes``, ``used_bytes``, ``busy`` (share of the time, 0 to 1),
      ``mig``, ``compute_mode``, ``capability`` and ``processes``; ``no_gpus``: why there are none
    * ``mps``: ``program`` (its path), ``usable``, and ``reason`` if it is not
    * ``packages``: by name, the ``version``; for torch also the ``cuda`` version that it was built for
    * ``ray_supported``: whether Ray's version is between the first and the last that were tested
    * ``advice``: ``devices``, ``kind`` (``gpu`` or ``cpu``), and the sentences: ``uses``, ``not_used``, ``warnings``
    """
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


def named_values(rows: Iterable[tuple[str, str]]) -> list[RenderableType]:
    """Names and their values, in two columns."""
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return [_Hanging(Text.assemble((f"{name:<{width}}  ", "bold")), value) for name, value in listed]


def _package(package: Package) -> str:
    if package.version is None:
        return "not installed"
    text = package.version
    if package.name == "torch":
        text += f", for CUDA {package.cuda}" if package.cuda else ", without CUDA"
    if package.name == "ray":
        text += "" if ray_is_supported(package.version) else ", outside of the tested versions"
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


def sentences(bullet: str, texts: Iterable[str], style: str) -> list[RenderableType]:
    """A bulleted list; empty if there are none."""
    return [_Hanging(Text.assemble((f"{bullet} ", style)), text) for text in texts]


#: Commands in what is said: they are for copying, so that no line is broken within one.
_COMMANDS = re.compile(r"pip install (?:'[^']+'|[\w.-]+\w)(?: '[^']+')*|ulimit -n \d+")


@dataclass(frozen=True)
class _Hanging:
    """A text behind a lead, with hanging indents; a word or a command that is longer than a line stays whole."""

    lead: Text
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = self.lead.cell_len
        whole = _COMMANDS.sub(lambda found: found[0].replace(" ", "\0"), self.text)
        width = max(1, options.max_width - indent)
        lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False) or [""]
        for place, line in enumerate(lines):
            lead = Text(" " * indent) if place else self.lead.copy()
            lead.append(line.replace("\0", " "))
            lead.no_wrap, lead.overflow = True, "ignore"
            yield lead


def _size(size: float | None) -> str:
    if size is None:
        return "?"
    unit = 0
    while size >= 1024.0 and unit < len(_UNITS) - 1:
        size, unit = size / 1024.0, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 999.5 else f"{size:.0f} {_UNITS[unit]}"
