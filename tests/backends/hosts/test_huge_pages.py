"""Memory of a process that forks often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluid.backends.hosts.forkserver.modules import huge_places

MAPS = """\
55e000000000-55e000601000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000300000 rw-p 00000000 00:00 0
7f0000400000-7f0000600000 r--p 00000000 00:00 0
7f0000800000-7f0000a00000 rw-p 00000000 08:01 1234                       /usr/lib/libtorch_cpu.so
7f0000c00000-7f0000e00000 rw-s 00000000 00:01 99                         /dev/zero (deleted)
7f0001000000-7f0001200000 rw-p 00000000 00:00 0                          [anon:glibc]
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""

JOINS = """
import os
from fluid.backends.hosts.forkserver.modules import join_memory

def joined():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages:"))

data = [bytes([k % 256]) * 4000 for k in range(10_000)]
before = joined()
for _ in join_memory():
    pass
assert data == [bytes([k % 256]) * 4000 for k in range(10_000)]
child = os.fork()
if not child:
    os._exit(sum(len(each) for each in data) != 40_000_000)
assert os.waitpid(child, 0)[1] == 0
print(joined() - before)
"""


def test_huge_pages_fit_where_memory_is_the_processes_own() -> None:
    huge = 2 << 20
    own = [0x55E000000000, 0x55E000000000 + huge, 0x55E000000000 + 2 * huge, 0x7F0001000000]
    assert list(huge_places(MAPS.splitlines(keepends=True))) == own


def test_memory_that_was_joined_is_as_it_was() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True, check=True)
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii") or release < (6, 1):
        pytest.skip("this system joins no pages at a process's wish")
    assert int(found.stdout) > 0, "nothing was joined"
