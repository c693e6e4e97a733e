"""One session of torture.py: its drivers one after another, faults meanwhile, and the checks at the end.

    python benchmarks/torture_session.py SEED FOLDER OPTIONS

OPTIONS are JSON: ``faults``, ``kinds``, ``skipped``, ``sessions``. The last line that it prints is what was found,
as JSON. As root, it has a RAM disk of its own, so that what is left there is seen, and no other session disturbs it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torture_checks import check
from torture_driver import BROKEN, FINISHED, REFUSED
from torture_faults import MARK, Faults, describe, marked
from torture_files import tear
from torture_io import IO_FAULTS, WriteFaults
from torture_machine import boot_anew, mount_tmpfs, owns_memory, take_own_memory, with_clock, write_hostile_modules
from torture_plan import REQUESTED_FAULTS, RESUMED, Plan, draw

HERE = Path(__file__).resolve().parent
#: Seconds without any progress after which a driver hangs.
PATIENCE = 120.0
#: Seconds in which all processes of a session must be gone.
LEAVING_S = 10.0
#: Share of drivers whose first fault comes only after they have made progress, or after so many seconds.
_UNDISTURBED_STARTS = 0.75
_LONGEST_START_S = 20.0
#: Share of drivers one of whose first writes may fail.
_FAILS_EARLY = 0.25
#: Kinds of faults that are drawn until one has something to befall.
_TRIES = 5
#: Faults that show only when a trial is restored.
_FATAL_LATER = ("damage_checkpoint", "lose_memory")
_PR_SET_PDEATHSIG = 1
#: Seconds since a machine was booted at which a driver may start, at the least.
_UPTIME_S = 20.0
#: Seconds by which a clock goes forwards: another machine's uptime, or that of one that was suspended.
_FORWARD_S = (90.0, 5_000.0, 864_000.0)


class Session:
    """A session under faults.

    Args:
        plan: what it does.
        folder: where to.
        token: marks its processes.
        address: of the Ray cluster for its drivers, if there is one.
        library: lets writes fail, in the processes that load it; ``None`` if there is none.
    """

    def __init__(self, plan: Plan, folder: Path, token: str, address: str | None, library: Path | None) -> None:
        self._plan = plan
        self._folder = folder
        self._run = folder / "disk" / "run"
        self._token = token
        self._address = address
        self._draws = random.Random(f"{plan.seed}/faults")
        self._memory = Path("/dev/shm")
        fails = library is not None and any(kind in plan.fault_weights for kind in IO_FAULTS)
        self._library = library if fails else None
        self._writes = WriteFaults(folder / "writes", folder / "disk") if fails else None
        self._faults = Faults(
            folder, self._token, self._draws, self._memory, owns_memory=owns_memory(), writes=self._writes
        )
        #: Seconds by which the monotonic clock of drivers is ahead of this machine's.
        self._clock = 0.0
        self._left = plan.faults
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.drivers = 0
        self.hangs: list[str] = []
        self.refused: list[str] = []
        #: Last lines of drivers that ended by an error other than one of Fluid's.
        self.errors: list[str] = []
        self.orphans: list[str] = []
        self.litter: list[str] = []
        #: Writes that have failed since the driver was started.
        self._failed_writes = 0

    def run(self) -> None:
        """Runs drivers until one has finished."""
        while not self.hangs and not self.refused:
            status = self._run_driver()
            if status == FINISHED and not self._has_left_memory():
                break
            if status == REFUSED and not self._failed_writes:
                self._take_refusal()
            if self.drivers > 2 * self._plan.faults + 20:
                self.hangs.append(f"no driver has finished: {self.drivers} have ended early")
            if self._left > 0:
                self._fault_between()
        self._faults.end()
        self._wait_for_end("fluid-")
        self.counts.update(path.name.partition("@")[0] for path in (self._folder / "notes").glob("*@*"))

    def _run_driver(self) -> int:
        """Runs one driver, with faults; returns its exit status, which is negative for a signal."""
        number = self.drivers
        hostile = self._start_faults()
        kinds = [kind for kind in IO_FAULTS if kind in self._plan.fault_weights]
        if self._left > 0 and kinds and self._draws.random() < _FAILS_EARLY:
            self._faults.bring(self._draws.choice(kinds))
        self.drivers, self._failed_writes = number + 1, 0
        began = time.time()
        with (self._folder / f"driver-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                with_clock(
                    self._clock, [sys.executable, str(HERE / "torture_driver.py"), str(self._folder), str(number)]
                ),
                env=self._environment(),
                cwd=hostile,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._limit if self._plan.descriptors else None,
            )
        self._faults.driver = process.pid
        seen, since = self._progress(number), time.monotonic()
        # Most drivers are let start first, or few lanes would ever be hit.
        starts = self._draws.random() < _UNDISTURBED_STARTS
        next_fault = since + (_LONGEST_START_S if starts else self._draws.uniform(0.0, 1.5))
        while process.poll() is None:
            now = time.monotonic()
            self._count_failed_writes()
            if self._left > 0 and now >= next_fault:
                next_fault = now + self._bring_fault()
                since = now
            progress = self._progress(number)
            if progress != seen:
                seen, since = progress, now
                if starts:
                    starts, next_fault = False, now + self._draws.expovariate(1.5)
            if now - since > PATIENCE:
                self._note_hang(process, number)
                process.kill()
                process.wait()
            time.sleep(0.02)
        status = process.returncode
        self._count_failed_writes()
        ended = time.time()
        if self._faults.filler is not None:
            self._wait_for_end("fluid-")
            self._faults.make_room()
        try:
            journal = (self._run / "journal.jsonl").read_bytes().count(b"\n")
        except OSError:
            journal = 0
        self._note("drivers", driver=number, began=began, ended=ended, status=status, journal=journal)
        if status == 1:
            text = (self._folder / f"driver-{number}.log").read_text(errors="replace").strip()
            self.errors.append(text.rpartition("\n")[2][:300])
        self.ends[{FINISHED: "finished", REFUSED: "refused", BROKEN: "broken"}.get(status, f"status {status}")] += 1
        return status

    def _bring_fault(self) -> float:
        """Brings a fault about; returns the seconds until the next one."""
        kinds = {name: weight for name, weight in self._plan.fault_weights.items() if not name.startswith("torn_")}
        if not kinds:
            self._left = 0
            return 0.0
        for _ in range(_TRIES):
            kind = self._draws.choices(list(kinds), list(kinds.values()))[0]
            if self._faults.bring(kind):
                if kind not in IO_FAULTS:  # They are counted when they have happened.
                    self._count(kind)
                if kind in _FATAL_LATER and "kill_lane" in kinds and self._faults.bring("kill_lane"):
                    self._count("kill_lane")
                break
        return self._draws.expovariate(1.5)

    def _count(self, kind: str, driver: int | None = None) -> None:
        self.counts[kind] += 1
        self._left -= 1
        self._note("faults", driver=self.drivers - 1 if driver is None else driver, kind=kind)

    def _count_failed_writes(self) -> None:
        for kind in self._writes.new_hits() if self._writes is not None else ():
            self._failed_writes += 1
            self._count(kind)

    def _note(self, file: str, **facts: Any) -> None:
        with (self._folder / f"{file}.jsonl").open("a") as notes:
            notes.write(json.dumps({"at": time.time(), **facts}) + "\n")

    def _start_faults(self) -> Path | None:
        """Changes the machine that the next driver finds; returns the working directory for it, ``None`` for this."""
        hostile = None
        for kind, share in self._plan.start_shares.items():
            if self._left <= 0 or self._draws.random() >= share or (kind in RESUMED and not self._run.exists()):
                continue
            if kind == "hostile_cwd":
                hostile = self._folder / "cwd"
                if not hostile.exists():
                    write_hostile_modules(hostile, self._folder / "imported.txt")
            elif not {
                "clock_forward": self._clock_forward, "clock_back": self._clock_back, "other_boot": self._boot,
            }[kind]():  # fmt: skip
                continue
            self._count(kind, self.drivers)
        return hostile

    def _clock_forward(self) -> bool:
        self._clock += self._draws.choice(_FORWARD_S) * self._draws.uniform(0.5, 1.0)
        return True

    def _clock_back(self) -> bool:
        """The clock goes back to any time since the machine was booted, rather a small one."""
        now = time.monotonic() + self._clock
        if now < 2 * _UPTIME_S:
            return False
        self._clock += math.exp(self._draws.uniform(math.log(_UPTIME_S), math.log(now))) - now
        return True

    def _boot(self) -> bool:
        """Another boot, of this machine or another: no process is left, host memory is empty, the clock begins anew."""
        if not owns_memory():
            return False
        for process in marked(self._token):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self._wait_for_end("")
        for path in self._memory.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not boot_anew(self._folder):
            return False
        if "clock_back" in self._plan.start_shares:
            self._clock = self._draws.uniform(_UPTIME_S, 5_000.0) - time.monotonic()
        return True

    def _fault_between(self) -> None:
        """Files may be torn, and checkpoints damaged, while no driver runs."""
        if self._draws.random() < 0.3:
            time.sleep(self._draws.choice([0.0, 0.1, 2.0]))
        if self._draws.random() < 0.7:
            kinds = [name for name in self._plan.fault_weights if name.startswith(("torn_", "damage_", "lose_"))]
            for kind in self._draws.sample(kinds, min(len(kinds), self._draws.choice([1, 1, 2]))):
                torn = tear(kind, self._draws, self._run) if kind.startswith("torn_") else self._faults.bring(kind)
                if torn:
                    self._count(kind)

    def _take_refusal(self) -> None:
        """A session that was never told to have a group may be begun anew; any other must be resumed."""
        text = (self._folder / f"driver-{self.drivers - 1}.log").read_text(errors="replace")
        if "no journal" not in text or '"done"' in (self._folder / "requests.jsonl").read_text():
            self.refused.append(text[-2000:])
        else:
            self.ends["begun anew"] += 1
            shutil.rmtree(self._run, ignore_errors=True)

    def _has_left_memory(self) -> bool:
        """Whether the driver says that checkpoints stay in host memory: the next one must find them."""
        return "stay in host memory" in (self._folder / f"driver-{self.drivers - 1}.log").read_text(errors="replace")

    def _progress(self, number: int) -> int:
        sizes = 0
        places = [self._folder / f"told-{number}.jsonl", self._folder / "requests.jsonl"]
        for path in (*places, *(self._folder / "disk").glob("run*/results.jsonl")):
            with suppress(OSError):
                sizes += path.stat().st_size
        return sizes

    def _note_hang(self, process: subprocess.Popen[bytes], number: int) -> None:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)
        stacks = (self._folder / f"stacks-{number}.txt").read_text(errors="replace")
        processes = "\n".join(describe(other) for other in marked(self._token))
        (self._folder / "hang.txt").write_text(f"{processes}\n\n{stacks}")
        self.hangs.append(f"driver {number}: no progress for {PATIENCE:.0f} s")

    def check_leaving(self) -> None:
        """Checks that nothing is left of the session, whose cluster has ended."""
        self._wait_for_end("")
        if owns_memory():
            for path in sorted(self._memory.iterdir()):
                files = [file.relative_to(path) for file in path.glob("**/*") if file.is_file()]
                self.litter.append(f"{path.name}: {len(files)} files: {', '.join(map(str, files[:5]))}")

    def _wait_for_end(self, name: str) -> None:
        """Waits until no process is left whose name begins so; what is left is noted and killed."""
        deadline = time.monotonic() + LEAVING_S
        while (left := list(marked(self._token, name))) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.orphans += [describe(process) for process in left]
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        variables = {**os.environ, MARK: self._token, "OMP_NUM_THREADS": "1", "HOME": str(self._folder)}
        places = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        if self._address is not None:
            variables["RAY_ADDRESS"] = self._address
        if self._writes is not None and self._library is not None:
            variables |= self._writes.environment(self._library)
        variables |= {"RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0", "FAKE_MPS": str(self._folder / "mps")}
        return variables

    def _limit(self) -> None:
        import resource

        limit = self._plan.descriptors
        assert limit is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def write_mps_program(path: Path) -> None:
    """Writes the stand-in for MPS that the tests use."""
    program = (HERE.parent / "tests" / "fake_mps.py").read_text()
    path.write_text(f"#!{sys.executable} -SE\n{program}")
    path.chmod(0o755)


@contextmanager
def ray_cluster(token: str, machines: int) -> Iterator[str]:
    """A Ray cluster of four cores for the drivers of a session, on one or two machines; yields its address."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # The path of a socket has 107 characters at most.
    own = {MARK: token, "RAY_TMPDIR": folder, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    own |= {"RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    os.environ.update(own)
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 4 // machines, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        for other in range(1, machines):
            cluster.add_node(num_cpus=4 // machines, node_ip_address=f"127.0.0.{1 + other}")
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent(token: str) -> None:
    """Ends this process, and all of the session's, when its parent ends or this process is told to end."""

    def leave(number: int, frame: object) -> None:
        for process in marked(token):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main() -> int:
    """Runs one session; prints what was found."""
    seed, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    plan = draw(
        seed,
        faults=options["faults"],
        kinds=set(options["kinds"]),
        skipped=set(options["skipped"]),
        sessions=set(options["sessions"]),
    )
    take_own_memory(plan.memory_mb)
    for name in ("disk", "notes", "mps"):
        (folder / name).mkdir(parents=True)
    if plan.disk_mb is not None and not (owns_memory() and mount_tmpfs(folder / "disk", plan.disk_mb)):
        plan.disk_mb = None
    (folder / "requests.jsonl").touch()
    begun = time.monotonic()
    if plan.mps:
        write_mps_program(folder / "nvidia-cuda-mps-control")
    token = secrets.token_hex(8)
    end_with_parent(token)
    with ray_cluster(token, plan.machines) if plan.kind in ("tune", "ray") else nullcontext() as address:
        (folder / "plan.json").write_text(json.dumps({**plan.to_json(), "ray_address": address}, indent=1))
        library = Path(options["library"]) if options.get("library") else None
        session = Session(plan, folder, token, address, library)
        session.run()
    session.check_leaving()
    found = asdict(check(folder))
    if plan.disk_mb is not None:  # The mount ends with this process.
        shutil.copytree(folder / "disk", folder / "disk-copy")
    requests = (folder / "requests.jsonl").read_text().splitlines()
    for entry in map(json.loads, requests):
        if entry["what"] in REQUESTED_FAULTS and "done" in entry:
            session.counts[entry["what"]] += 1
    result: dict[str, Any] = {
        "seed": seed,
        "kind": plan.kind,
        "seconds": time.monotonic() - begun,
        "drivers": session.drivers,
        "ends": session.ends,
        "faults": session.counts,
        "hangs": session.hangs,
        "refused": session.refused,
        "errors": session.errors,
        "orphans": session.orphans,
        "litter": session.litter,
        **found,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
