"""The process of a script: its command, its environment, its failures, and that nothing of it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_sweeps import ScriptSweeps, alive, losses, wait_until, write_script

from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.gpu.nvml import Gpu, GpuProcess
from fluid.lane.device import device
from fluid.lane.device.busy import BusyMeter
from fluid.processes.below import BELOW
from fluid.processes.children import is_stopped
from fluid.scripts import process
from fluid.scripts.trainable import Script
from fluid.search import uniform
from fluid.sweeping.plan import SweepFailedError
from fluid.trialgroup import Trial, TrialGroup

ROOT = Path(__file__).resolve().parents[2]


def test_what_a_script_is_given(sweeps: ScriptSweeps) -> None:
    text = """
        import json, os, sys
        print(json.dumps({"loss": 1, "words": " ".join(sys.argv[1:]), "config": os.environ["FLUID_CONFIG"],
            "cwd": os.getcwd(), "session": os.getsid(0) == os.getpid()}))
    """
    words = ["--x={x}", "{deep.y}", "{{x}}", "{budget}", "{trial_dir}", "{checkpoint}", "{config_file}"]
    space = {"x": [1e-5], "deep": {"y": ["a b;$HOME"]}}
    result = sweeps.run(text, *words, space=space, budget=3)
    (trial,) = result.trials
    folder = trial.folder
    words = f"--x=1e-05 a b;$HOME {{x}} 3 {folder} {folder}/checkpoint {folder}/config.json"
    assert trial.metrics == {
        "loss": 1,
        "words": words,
        "config": '{"x": 1e-05, "deep": {"y": "a b;$HOME"}}',
        "cwd": os.getcwd(),
        "session": True,
    }
    assert (folder / "config.json").stat().st_mode & 0o077 == 0


def test_the_trial_s_own_folder_as_the_working_directory(sweeps: ScriptSweeps) -> None:
    text = """print('{"loss": 1}'); open("here", "w").close()"""
    result = sweeps.run(text, trial_options={"chdir": True})
    assert (result.trials[0].folder / "here").exists()


def test_a_script_that_fails_is_told_by_its_last_lines(sweeps: ScriptSweeps) -> None:
    text = """
        import sys
        print('{"loss": 1}')
        int("seven")
    """
    with pytest.raises(SweepFailedError) as caught:
        sweeps.run(text, budget=2)
    failure = str(caught.value.__cause__)
    assert "ScriptFailedError: train exited with status 1: ValueError: invalid literal" in failure
    assert 'line 4, in <module> int("seven")' in failure, "the script's own traceback"


def test_a_script_that_runs_out_of_memory(sweeps: ScriptSweeps) -> None:
    with pytest.raises(SweepFailedError) as caught:
        sweeps.run("raise MemoryError")
    assert {failure.kind for failure in caught.value.result.failures.values()} == {"out_of_memory"}


def test_a_command_that_cannot_be_run_is_refused_at_once(sweeps: ScriptSweeps) -> None:
    with pytest.raises(InvalidFieldError, match="is no program"):
        Script.checked(["no-such-program"], {"x": 1}, metric="loss", budget=1)


def test_a_script_ends_with_its_budget_by_sigterm(sweeps: ScriptSweeps) -> None:
    """It reports on after it was told to stop, and what it does at its end has time."""
    text = """
        import itertools, json, os, signal, sys
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        for epoch in itertools.count():
            print(json.dumps({"loss": epoch}))
            if len(told) and epoch % 10 == 0:
                open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "told"), "w").close()
                sys.exit()
    """
    result = sweeps.run(text, budget=3)
    assert losses(result) == [[0.0, 1.0, 2.0]]
    wait_until((result.trials[0].folder / "told").exists)
    wait_until(lambda: not alive(str(sweeps.folder)))


def test_fluid_report_after_the_end_ends_the_script(sweeps: ScriptSweeps) -> None:
    text = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        import fluid
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            while True:
                fluid.report({"loss": 1})
        finally:
            open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "unwound"), "w").close()
    """
    result = sweeps.run(text, str(ROOT), budget=2)
    wait_until((result.trials[0].folder / "unwound").exists)
    assert losses(result) == [[1.0, 1.0]]


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_script_is_heard_to_its_end(kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the kernel has no descriptors of processes."""
    if kernel == "old":
        monkeypatch.setattr(process, "open_process", lambda pid: None)
    path = write_script(tmp_path, "print(1); import sys; sys.exit(7)")

    def read(data: bytes, ends: bool) -> Iterator[process.Said]:
        return iter([process.Said({"data": data}, "output")] if data else [])

    started = process.ScriptProcess([sys.executable, path], os.environ, [read, read], None)
    try:
        heard = b"".join(said.metrics["data"] for said in iter(started.next, None))
        assert (heard, started.exit_code) == (b"1\n", 7)
    finally:
        started.end(0.0, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_no_other_user_can_report() -> None:
    script = textwrap.dedent("""
        import contextlib, os, socket, sys
        link = socket.socket(socket.AF_UNIX)
        os.setuid(int(sys.argv[1]))
        link.connect("\\0" + os.environ["FLUID_SCRIPT"])
        with contextlib.suppress(ConnectionError):
            link.sendall(b'{"metrics": {"loss": 1}, "origin": "fluid", "saves": false}\\n')
            link.recv(1)  # Until it is closed.
    """)
    for user, heard in ((0, True), (65534, False)):
        command = [sys.executable, "-c", script, str(user)]
        started = process.ScriptProcess(command, os.environ, [lambda data, ends: iter(())] * 2, None)
        assert (started.next() is not None) == heard and not started.lines
        started.end(0.0, None)


def test_a_script_that_ignores_sigterm_is_killed(sweeps: ScriptSweeps) -> None:
    text = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            print('{"loss": 1}')
            time.sleep(0.001)
    """
    assert losses(sweeps.run(text, budget=2, grace_s="0.1s")) == [[1.0, 1.0]]
    wait_until(lambda: not alive(str(sweeps.folder)))


def test_a_daemon_of_a_script_ends_with_it(sweeps: ScriptSweeps) -> None:
    """It has a session of its own, holds the script's output open, and its parent has ended."""
    text = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "daemon"), "w").write(str(os.getpid()))
            while True:
                time.sleep(60)
        os.wait()
        path = os.path.join(os.environ["FLUID_TRIAL_DIR"], "daemon")
        while not os.path.exists(path) or not open(path).read():
            time.sleep(0.001)
        print('{"loss": 1}')
    """
    result = sweeps.run(text)
    assert losses(result) == [[1.0]]
    pid = int((result.trials[0].folder / "daemon").read_text())
    wait_until(lambda: pid not in alive(str(sweeps.folder)))


def test_a_script_waits_while_its_trial_does(sweeps: ScriptSweeps) -> None:
    """Its trials pause at rungs: one that prints does not run on meanwhile, and none computes anything twice."""
    text = """
        import json, os, sys, time
        x = float(sys.argv[1])
        for epoch in range(1, 10):
            print(json.dumps({"loss": x + 1 / epoch, "epoch": epoch}))
            with open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "epochs"), "a") as file:
                file.write(f"{epoch}\\n")
    """
    result = sweeps.run(text, "{x}", space={"x": uniform(0, 1)}, algorithm="sha", budget=9, samples=9)
    counts = sorted(trial.iteration for trial in result.trials)
    assert counts == [1] * 6 + [3] * 2 + [9]
    for trial in result.trials:
        assert [one.metrics["epoch"] for one in trial.results] == list(range(1, trial.iteration + 1))
        path = trial.folder / "epochs"
        ran = path.read_text().split() if path.exists() else []
        assert ran == [str(epoch) for epoch in range(1, len(ran) + 1)]


def test_a_script_that_prints_is_stopped_while_its_trial_is_paused(
    script_executor: FluidExecutor, tmp_path: Path
) -> None:
    text = """
        import os, sys, time
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            print('{"loss": 1}')
            time.sleep(0.001)
    """
    words = [sys.executable, write_script(tmp_path, text), str(tmp_path / "process")]
    script = Script.checked(words, {"x": 1}, metric="loss", budget=10**6, config_in_env=True)
    trial = Trial(script.trainable(), {"x": 1}, budget=10**6)
    handle = script_executor.submit_trialgroup(TrialGroup([trial]))
    wait_until(lambda: handle.trials[0].results)
    pid = int((tmp_path / "process").read_text())
    handle.pause(trial.id)
    wait_until(lambda: is_stopped(pid))
    handle.resume(trial.id)
    wait_until(lambda: not is_stopped(pid))
    handle.stop(trial.id)
    handle.wait()
    wait_until(lambda: not alive(str(tmp_path)))


def test_what_a_script_uses_counts_as_its_trial_s(sweeps: ScriptSweeps) -> None:
    """The processor time of its processes, also of those that it starts: the engine packs by that."""
    text = """
        import os, sys
        if len(sys.argv) == 1:
            sys.exit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, "child"]))
        import time
        for _ in range(4):
            until = time.process_time() + 0.05
            while time.process_time() < until:
                pass
            open("/dev/null", "wb").write(bytes(1 << 20))
            print('{"loss": 1}', flush=True)
    """
    result = sweeps.run(text)
    used = [one.usage for one in result.trials[0].results]
    assert len(used) == 4 and all((one.written_bytes or 0) >= 1 << 20 for one in used)


def test_a_device_is_busy_with_a_script() -> None:
    """Else the engine would take the device for idle, as the lane waits, and pack trials on it."""
    text = "import os, sys; os.spawnv(os.P_WAIT, sys.executable, [sys.executable, '-c', 'while True: pass'])"
    spinning = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    BELOW.leaders.add(spinning.pid)
    try:
        meter, clock = BusyMeter(1), MonotonicClock()
        wait_until(lambda: BELOW.processor_seconds() > 0.1)
        begun = clock.now()
        meter.begin()
        before = BELOW.processor_seconds()
        wait_until(lambda: BELOW.processor_seconds() > before + 0.1)
        assert BELOW.memory("VmRSS") > 4e6
        share = meter.end(clock.now() - begun)
        assert share is not None and share > 0.02, "at least a share of what a busy machine gives it"
        BELOW.leaders.clear()
        meter.begin()
        assert (meter.end(1000.0) or 0.0) < 0.01
    finally:
        BELOW.leaders.clear()
        os.killpg(spinning.pid, signal.SIGKILL)
        spinning.wait()


def test_what_a_script_holds_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML lists it; where it lists processes of another namespace, nothing is known."""
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    listed = [GpuProcess(holder.pid, 3e9), GpuProcess(os.getpid(), 7e9)]
    monkeypatch.setattr(device, "find_gpus", lambda: [Gpu("GPU-0", 80e9, "H200", 70e9)])
    monkeypatch.setattr(device, "processes_on", lambda token: listed)
    try:
        meter = device.DeviceMemoryMeter("gpu")
        meter.begin()
        BELOW.leaders.add(holder.pid)
        assert meter.end() == (3e9, 0.0)
        meter.begin()
        assert meter.end() == (0.0, 0.0)
        listed.append(GpuProcess(2**22 + 1, 1e9))
        assert meter.end() is None
    finally:
        BELOW.leaders.clear()
        holder.kill()
        holder.wait()


_DRIVER = """
    import sys
    import fluid
    from fluid.scripts.trainable import Script
    script = Script.checked(sys.argv[2:], {"x": [1, 2]}, metric="loss", budget=10**6, config_in_env=True)
    with fluid.FluidExecutor(devices=2, run_dir=sys.argv[1], verbose=0):
        fluid.run(script.trainable(), {"x": [1, 2]}, metric="loss", mode="min", algorithm="grid", budget=10**6)
"""


@pytest.mark.parametrize("victim", ["driver", "lane"])
def test_a_killed_process_of_fluid_s_leaves_no_script(victim: str, tmp_path: Path) -> None:
    text = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.path.join(sys.argv[1], str(os.getppid())), "w").close()
        while True:
            print('{"loss": 1}')
            time.sleep(0.01)
    """
    (lanes := tmp_path / "lanes").mkdir()
    driver_file = write_script(tmp_path, textwrap.dedent(_DRIVER), "driver.py")
    words = [sys.executable, write_script(tmp_path, text), str(lanes)]
    driver = subprocess.Popen(
        [sys.executable, driver_file, str(tmp_path / "run"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: len(list(lanes.iterdir())) == 2)
        mark = f"{words[1]}\0{lanes}"
        scripts = [pid for pid in alive(mark) if pid != driver.pid]
        assert len(scripts) == 2
        if victim == "driver":
            driver.kill()
            wait_until(lambda: not alive(mark))
        else:
            lane = int(next(iter(lanes.iterdir())).name)
            os.kill(lane, signal.SIGKILL)
            wait_until(lambda: len(set(scripts) & set(alive(mark))) == 1)
    finally:
        driver.kill()
        driver.wait()
        wait_until(lambda: not alive(str(lanes)))
