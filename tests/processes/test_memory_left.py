"""How much memory is left, read from files like those of Linux."""

from __future__ import annotations

from pathlib import Path

from fluid.processes.memory_left import memory_left

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    500 kB\n"


def write(root: Path, files: dict[str, object]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(root)


def test_without_control_groups_what_the_machine_has_counts(tmp_path: Path) -> None:
    assert memory_left(str(tmp_path)) is None
    assert memory_left(write(tmp_path, {"proc/meminfo": MEMINFO})) == 500 * 1024


def test_version_2_counts_every_group_above(tmp_path: Path) -> None:
    above, group = "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b",
            f"{above}/memory.max": 300_000,
            f"{above}/memory.current": 150_000,
            f"{above}/memory.stat": "anon 1\ninactive_file 50000\nactive_file 7",
            f"{group}/memory.max": "max",
            f"{group}/memory.current": 150_000,
        },
    )
    assert memory_left(root) == 200_000, "the page cache can be dropped"
    write(tmp_path, {f"{group}/memory.max": 160_000, f"{group}/memory.stat": "inactive_file 0"})
    assert memory_left(root) == 10_000
    write(tmp_path, {f"{group}/memory.current": 170_000})
    assert memory_left(root) == 0


def test_version_1_in_a_container_whose_group_is_the_root(tmp_path: Path) -> None:
    mounted = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/",
            f"{mounted}/memory.limit_in_bytes": 400_000,
            f"{mounted}/memory.usage_in_bytes": 100_000,
            f"{mounted}/memory.stat": "inactive_file 1\ntotal_inactive_file 20000",
        },
    )
    assert memory_left(root) == 320_000
    write(tmp_path, {f"{mounted}/memory.limit_in_bytes": 9223372036854771712})
    assert memory_left(root) == 500 * 1024


def test_this_machine_says_something_plausible() -> None:
    left = memory_left()
    assert left is None or 0 <= left < 1 << 50
