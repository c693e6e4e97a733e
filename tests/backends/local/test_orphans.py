"""Whichever processes of a session are killed: sub-processes of its trials die, and no host memory stays in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid.backends.hosts import memory as host_memory
from fluid.backends.local import LocalBackend

#: Runs a trial with sub-processes of every kind, until it is killed or its standard input ends.
DRIVER = """
import json, multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
from fluid.backends.local import LocalBackend
from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import IterationDone
from fluid.trainables.payload import payload_of

SLEEP = ["sleep", "1000"]
DAEMON = '''
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "~", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + "~", sys.argv[1])
        time.sleep(1000)
'''

class Parent:
    def setup(self, config):
        self.note = Path(config["note"])

    def step(self):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        forked.start()
        pids = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid, forked.pid]
        subprocess.run([sys.executable, "-c", DAEMON, self.note], check=True)
        while not self.note.exists():
            time.sleep(0.01)
        server = os.getppid()
        guardian = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
        pids.append(int(self.note.read_text()))
        return {"lane": os.getpid(), "server": server, "guardian": guardian, "pids": pids}

    def save_checkpoint(self, folder): pass
    def load_checkpoint(self, folder): pass

backend = LocalBackend(1, preload=[], run_dir=sys.argv[1])
threading.Thread(target=lambda: (sys.stdin.read(), backend.wake()), daemon=True).start()
backend.register("a", payload_of(Parent, {"note": sys.argv[2]}))
backend.execute([StartLane(0, 0), StartTrial("a", (0,), iterations=1)])
while True:
    for event in backend.poll(None):
        if isinstance(event, IterationDone):
            print(json.dumps({"driver": os.getpid(), **event.metrics.decode()}), flush=True)
"""


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The processes of a session, by name; ``pids`` are the sub-processes of its trial."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), str(tmp_path / "daemon")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.kill()


def kill_at_once(*pids: int) -> None:
    """Kills processes, none of which can react to the end of another one."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with suppress(ProcessLookupError):  # The kernel kills children of those that were killed.
            os.kill(pid, signal.SIGKILL)


def memory_folders(run_folder: Path) -> list[Path]:
    """The folders in host memory of the session that has this one on disk."""
    sessions = Path(host_memory.RAM_DISK).glob("fluid-*/.session")
    return [session.parent for session in sessions if f'"{run_folder}"' in session.read_text()]


@pytest.mark.parametrize(
    "killed",
    ["lane", "server", "guardian", "guardian server", "driver", "driver server", "driver guardian"],
)
def test_sub_processes_of_trials_die(facts: dict[str, Any], processes: Any, tmp_path: Path, killed: str) -> None:
    names = killed.split()
    processes.watch(*facts["pids"], facts["lane"])
    if "driver" in names:
        processes.watch(facts["guardian"], facts["server"])
    assert len(memory_folders(tmp_path / "run")) == 1
    kill_at_once(*(facts[name] for name in names))
    assert processes.have_ended(within=30.0)
    if "driver" in names:
        eventually(lambda: not memory_folders(tmp_path / "run"))


def test_the_next_session_kills_what_one_has_left_of_which_all_was_killed(
    facts: dict[str, Any], processes: Any, tmp_path: Path
) -> None:
    ours = [facts[name] for name in ("driver", "guardian", "server", "lane")]
    processes.watch(*ours)
    kill_at_once(*ours)
    assert processes.have_ended(within=30.0)
    processes.watch(*facts["pids"])  # Fails if there is one that has ended.
    LocalBackend(1, preload=[]).close()
    assert processes.have_ended(within=30.0)
    assert not memory_folders(tmp_path / "run")
