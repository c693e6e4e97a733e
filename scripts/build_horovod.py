"""Builds Horovod for this interpreter and its PyTorch, keeps the wheel, and prints where it is.

    pip install "$(python scripts/build_horovod.py)"

Horovod 0.28.1 is published as source only, which does not compile against today's PyTorch: PyTorch needs a newer C++
standard than Horovod requests. A wrapper around the compiler sets that standard. A wrapper around CMake makes the build
faster: several sources are compiled together, so that shared headers are read once. The build takes a few minutes, once
per version of Python and PyTorch; the wheel is kept in ``$XDG_CACHE_HOME/fluid/horovod``, by default
``~/.cache/fluid/horovod``.

Needs PyTorch in this environment, and a C++ compiler with make. It is built for CPUs, with gloo, without MPI.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

VERSION = "0.28.1"
#: CMake 4 refuses projects as old as Horovod; setuptools 81 has removed pkg_resources.
TOOLS = ("cmake<4", "setuptools<81", "wheel", "packaging", "pyyaml", "cloudpickle", "psutil")
#: Appended, so that they win over Horovod's own.
FLAGS = "-std=gnu++20 -include cstdint -g0 -O1"
#: Arguments of CMake's configure step. Gloo's sources cannot be compiled together: each is compiled by itself.
UNITY = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=9")
NO_UNITY = "set(CMAKE_UNITY_BUILD OFF)"
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
}


def cache_folder() -> Path:
    """Returns the folder of the wheel for this Python and PyTorch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        sys.exit("PyTorch is not installed in this environment; Horovod is built against it")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{sys.implementation.cache_tag}-torch{torch}-{platform.system().lower()}-{platform.machine()}-{VERSION}"
    return home / "fluid" / "horovod" / name


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command with its output on stderr, because stdout is for the path."""
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")


def wrap_compiler(path: Path) -> None:
    """Writes a compiler that adds the flags."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None or shutil.which("make") is None:
        sys.exit("a C++ compiler and make are needed to build Horovod (on Debian: apt install g++ make)")
    path.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" {FLAGS}\n', encoding="utf-8")
    path.chmod(0o755)


def wrap_cmake(path: Path, cmake: Path) -> None:
    """Writes a CMake that compiles several sources together."""
    exempt = path.with_suffix(".no-unity")
    exempt.write_text(f"{NO_UNITY}\n", encoding="utf-8")
    options = " ".join((*UNITY, f'"-DCMAKE_PROJECT_gloo_INCLUDE={exempt}"'))
    script = f"""#!/bin/sh
case "$1" in
--build) exec "{cmake}" "$@" ;;
*) exec "{cmake}" "$@" {options} ;;
esac
"""
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)


def build(folder: Path) -> Path:
    """Builds the wheel into a folder and returns its path."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory(prefix="fluid-horovod-") as name:
        work = Path(name)
        tools, out = work / "tools", work / "out"
        # Beside the environment, not into it: its packages must not change.
        run(*pip, "install", "--quiet", "--target", tools, *TOOLS)
        wrap_compiler(work / "c++")
        wrap_cmake(work / "cmake", tools / "cmake" / "data" / "bin" / "cmake")
        environment = {
            **SETTINGS,
            "PYTHONPATH": str(tools),
            "CXX": str(work / "c++"),
            "HOROVOD_CMAKE": str(work / "cmake"),
            "CMAKE": str(work / "cmake"),
            "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        }
        # Without pip's cache, whose wheels may have been built against another PyTorch.
        options = ("--no-build-isolation", "--no-deps", "--no-cache-dir", "--no-binary", "horovod")
        run(*pip, "wheel", *options, "--wheel-dir", out, f"horovod=={VERSION}", **environment)
        (wheel,) = out.glob("horovod-*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        # Moved at the end, atomically: an existing wheel is complete.
        partial = folder / f"{wheel.name}.{os.getpid()}"
        shutil.copy2(wheel, partial)
        return partial.rename(folder / wheel.name)


def main() -> None:
    """Prints the path of the wheel; builds it if it does not exist."""
    folder = cache_folder()
    found = sorted(folder.glob("horovod-*.whl"))
    print(found[0] if found else build(folder))


if __name__ == "__main__":
    main()
