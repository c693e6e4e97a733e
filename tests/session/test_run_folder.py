"""The run folder: one session at a time, for its owner only, and what is refused as one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.local import LocalBackend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.reports.run.loader import load_run
from fluid.resources import Device
from fluid.results.run_files import FORMAT, is_locked
from fluid.session.folder.lock import FolderLock
from fluid.trialgroup import Trial, TrialGroup

PATIENCE = 90.0


def endless(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("hello")
    step = 0
    while True:
        step += 1
        yield {"step": step}


class Slow:
    """Counts, and is saved."""

    def setup(self, config: dict[str, Any]) -> None:
        self.seconds, self.count = config["seconds"], 0

    def step(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.count += 1
        return {"count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.count))

    def load_checkpoint(self, folder: str) -> None:
        self.count = int(Path(folder, "count").read_text())


def executor_in(folder: Any, **options: Any) -> FluidExecutor:
    backend = SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0)])
    return FluidExecutor(**{"backend": backend, "run_dir": folder, "verbose": 0, **options})


def resume(folder: Any) -> FluidExecutor:
    backend = SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0)])
    return FluidExecutor.resume(folder, backend=backend, verbose=0)


def use(folder: Path) -> None:
    with executor_in(folder) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(endless, trial_id="a")])).wait(PATIENCE)


# -- one folder, one session ---------------------------------------------------------------------------------------


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    use(tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(InvalidFieldError, match=r"run_dir=.*holds a session already.*'resume'.*'overwrite'.*'new'"):
        executor_in(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == files
    with resume(tmp_path / "run") as executor:
        assert executor.handles[0].states == {"a": "DONE"}


def test_a_folder_in_which_no_session_began_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    use(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(InvalidFieldError, match="packing"):
        executor_in(tmp_path / "other", backend="local", devices=[Device(0, kind="cpu")], packing="mps")
    use(tmp_path / "other")
    assert (tmp_path / "other/notes.txt").read_text() == "mine"


def test_a_session_of_this_process_keeps_others_out(tmp_path: Path) -> None:
    with executor_in(tmp_path / "run") as executor:
        for second in (executor_in, resume):
            with pytest.raises(InvalidFieldError, match="is in use: the session of this process runs there"):
                second(tmp_path / "run")
        assert executor.submit_trialgroup(TrialGroup([Trial(endless)])).wait(PATIENCE), "it was not disturbed"
    resume(tmp_path / "run").close()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with resume(tmp_path / "run"), pytest.raises(InvalidFieldError, match="is in use"):
        resume(tmp_path / "link")


DRIVER = """
    import sys, time
    from fluid import FluidExecutor, Trial, TrialGroup

    def wait(config):
        while True:
            time.sleep(0.01)
            yield {}

    if __name__ == "__main__":
        executor = FluidExecutor(backend="local", devices=1, run_dir=sys.argv[1], verbose=0)
        handle = executor.submit_trialgroup(TrialGroup([Trial(wait, budget=10**9, trial_id="a")]))
        next(handle.results())
        print("runs", flush=True)
        handle.wait()
"""


def test_a_living_session_is_named_and_a_killed_one_is_free(tmp_path: Path) -> None:
    script, folder = tmp_path / "driver.py", tmp_path / "run"
    script.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "runs\n"
        with pytest.raises(InvalidFieldError, match=f"the session of process {driver.pid} runs there"):
            resume(folder)
        (folder / "session.lock").write_text(json.dumps({"pid": driver.pid, "host": "elsewhere"}))
        with pytest.raises(InvalidFieldError, match=f"the session of process {driver.pid} on elsewhere runs there"):
            resume(folder)
        driver.kill()
    with FluidExecutor.resume(folder, backend="local", devices=1, verbose=0) as executor:
        executor.handles[0].stop("a")
        assert executor.handles[0].wait(PATIENCE)


def test_a_forked_child_neither_holds_the_folder_nor_gives_it_free(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    number = (tmp_path / "session.lock").stat().st_ino
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        held = number in [os.stat(name).st_ino for name in names if os.path.exists(name)]
        lock.release()
        os.write(writer, b"held" if held else b"free")
        os._exit(0)
    try:
        assert os.read(reader, 4) == b"free"
        with pytest.raises(InvalidFieldError, match="is in use"):
            FolderLock(tmp_path)
        lock.release()
        FolderLock(tmp_path).release()
    finally:
        os.waitpid(child, 0)
        os.close(writer)
        os.close(reader)


# -- who may read --------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of all that it holds, by relative path."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("exists", [False, True])
def test_a_run_folder_is_for_its_owner_only(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir(0o777)
    with executor_in(folder, backend="local", devices=1) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(endless, trial_id="a")])).wait(PATIENCE)
    found = modes(folder)
    assert found["."] == 0o700
    assert {name for name, mode in found.items() if mode & 0o077 and (folder / name).is_file()} == set()
    assert {"payloads.pkl", "session.json", "profile.json", "logs/forkserver.log", "trials/a/output.log"} <= set(found)


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_holds_other_files_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "notes.txt").write_text("mine")
    use(tmp_path)
    found = modes(tmp_path)
    assert found["."] == 0o755 and found["notes.txt"] == 0o666
    assert found["payloads.pkl"] == found["trials.jsonl"] == found["session.lock"] == 0o600


def test_files_of_an_older_session_are_closed_to_others_when_it_is_resumed(tmp_path: Path) -> None:
    use(tmp_path / "run")
    (tmp_path / "run/payloads.pkl").chmod(0o644)
    resume(tmp_path / "run").close()
    assert modes(tmp_path / "run")["payloads.pkl"] == 0o600


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run_dir", "reason"),
    [
        ("/etc/passwd", "is a file"),
        ("/etc/passwd/run", "cannot be used: Not a directory"),
        ("/proc/run", "cannot be used: No such file or directory"),
        ("no\0thing", "must be the path of a folder"),
        ("~nobody-of-that-name/run", "home"),
        ("", "must be the path of a folder"),
        (5, "must be the path of a folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(run_dir: Any, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        executor_in(run_dir)
    assert caught.value.field == "run_dir"


@pytest.mark.parametrize("folder", ["/etc/passwd", "/proc/run", "/etc", 5])
def test_what_is_no_session_is_not_resumed(folder: Any) -> None:
    with pytest.raises(InvalidFieldError, match="run_dir"):
        resume(folder)


def test_a_folder_of_a_newer_fluid_is_refused(tmp_path: Path) -> None:
    use(tmp_path / "run")
    path = tmp_path / "run/session.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1, "fluid": "9.0"}))
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    for read in (resume, load_run):
        with pytest.raises(
            InvalidFieldError, match=rf"is of Fluid 9\.0, format {FORMAT + 1}; this Fluid reads formats up to {FORMAT}"
        ):
            read(tmp_path / "run")
    assert {path: path.read_bytes() for path in files} == files


def test_a_trainable_that_this_process_cannot_unpickle_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("def train(config):\n    yield {}\n")
    import mine  # type: ignore[import-not-found]

    with executor_in(tmp_path / "run") as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(mine.train, trial_id="a")])).wait(PATIENCE)
    del sys.modules["mine"]
    (tmp_path / "mine.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    resume(tmp_path / "run").close()
    assert "trial 'a' cannot go on: its trainable and config cannot be unpickled" in caplog.text
    assert "ModuleNotFoundError: No module named 'mine'" in caplog.text


# -- what happens to the folder meanwhile --------------------------------------------------------------------------


def remove(folder: Path) -> None:
    while folder.exists():  # Lanes may write there meanwhile.
        shutil.rmtree(folder, ignore_errors=True)


def exchange(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()


def replace_by_copy(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


#: What is done to a run folder, and what is said of it.
ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (remove, "the run folder {folder} was deleted while the session ran: its results are lost"),
    "moved": (
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        "the run folder {folder} was moved to {elsewhere} while the session ran",
    ),
    "exchanged": (exchange, "the run folder {folder} was moved to {elsewhere} while the session ran"),
    "results deleted": (
        lambda folder: (folder / "results.jsonl").unlink(),
        "results.jsonl was deleted or replaced in the run folder {folder}",
    ),
    "journal replaced": (
        lambda folder: replace_by_copy(folder / "journal.jsonl"),
        "journal.jsonl was deleted or replaced in the run folder {folder}",
    ),
    "results truncated": (
        lambda folder: os.truncate(folder / "results.jsonl", 0),
        "results.jsonl was truncated in the run folder {folder}",
    ),
}


@pytest.mark.parametrize(
    "accident", [pytest.param(name, marks=() if name == "moved" else pytest.mark.slow) for name in ACCIDENTS]
)
def test_a_session_whose_folder_is_lost_ends_within_seconds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accident: str
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    do, text = ACCIDENTS[accident]
    told = text.format(folder=folder, elsewhere=elsewhere)
    with executor_in(folder, backend="local", devices=1) as executor:
        trial = Trial(Slow, {"seconds": 0.05}, budget=10**6, trial_id="a")
        handle = executor.submit_trialgroup(TrialGroup([trial]))
        next(handle.results())
        do(folder)
        since = time.monotonic()
        with pytest.raises(FluidError, match=re.escape(told)):
            handle.wait(PATIENCE)
        assert time.monotonic() - since < 30.0
    said = [record for record in caplog.records if told in record.getMessage()]
    assert len(said) == 1 and "goes on with the session" not in caplog.text.replace(told, "").replace(
        f"FluidExecutor.resume({str(elsewhere)!r}) goes on with the session", ""
    )
    assert not [lock for lock in Path("/dev/shm").glob("fluid-*/.session") if str(tmp_path) in lock.read_text()]
    if accident == "exchanged":
        assert not any((folder / name).exists() for name in ("session.json", "profile.json", "journal.jsonl"))
    if accident in ("moved", "exchanged"):
        steps = len((elsewhere / "results.jsonl").read_text().splitlines())
        with FluidExecutor.resume(elsewhere, backend="local", devices=1, verbose=0) as executor:
            (handle,) = executor.handles
            numbers = [next(results).iteration for results in [iter(handle.results())] for _ in range(steps + 1)]
        assert numbers == list(range(1, steps + 2))


@pytest.mark.parametrize("name", ["session.lock", "journal.jsonl"])
def test_a_deleted_lock_lets_no_second_session_in(tmp_path: Path, name: str) -> None:
    first = FolderLock(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InvalidFieldError, match="is in use"):
        FolderLock(tmp_path)
    assert is_locked(tmp_path)
    first.release()
    assert not is_locked(tmp_path)
    FolderLock(tmp_path).release()


@pytest.mark.parametrize("is_live", [True, False])
def test_a_lock_is_of_the_folder_that_is_there(is_live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a program waits for the lock, another one replaces the run: the lock of that is worth nothing."""
    run, locks = tmp_path / "run", list[FolderLock]()
    run.mkdir()
    flock = fcntl.flock

    def replaced_before(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        run.rename(tmp_path / "aside")
        run.mkdir()
        if is_live:
            locks.append(FolderLock(run))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced_before)
    if is_live:
        with pytest.raises(InvalidFieldError, match="is in use"):
            FolderLock(run)
        locks[0].release()
    else:
        lock = FolderLock(run)
        assert is_locked(run) and not is_locked(tmp_path / "aside")
        lock.release()
    assert not is_locked(run)


@pytest.mark.slow
def test_whoever_looks_whether_a_session_runs_keeps_none_from_beginning(tmp_path: Path) -> None:
    """Many readers look all the time, each for an instant."""
    FolderLock(tmp_path).release()
    looks = "import sys; from pathlib import Path; from fluid.results.run_files import is_locked\n"
    looks += "while True: is_locked(Path(sys.argv[1]))"
    readers = [subprocess.Popen([sys.executable, "-c", looks, str(tmp_path)]) for _ in range(2)]
    try:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            lock = FolderLock(tmp_path)
            assert is_locked(tmp_path)
            lock.release()
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("how", ["--pid", "--mount", "--user"])
def test_a_session_is_seen_to_run_from_another_namespace(tmp_path: Path, how: str) -> None:
    """As from another container, where the kernel's list of locks is empty or names other devices."""
    looks = "import sys; from pathlib import Path; from fluid.results.run_files import is_locked\n"
    looks += "print(is_locked(Path(sys.argv[1])))"

    def seen() -> str:
        command = ["unshare", how, "--fork", sys.executable, "-c", looks, str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode and "unshare" in found.stderr:
            pytest.skip("namespaces cannot be made here")
        return found.stdout.strip()

    lock = FolderLock(tmp_path)
    assert seen() == "True"
    lock.release()
    assert seen() == "False"


LIMITED = """
    import resource, signal, sys
    from fluid import FluidExecutor, Trial, TrialGroup

    class Count:
        def setup(self, config):
            self.step_number = 0
        def step(self):
            self.step_number += 1
            return {"step": self.step_number, "text": "x" * 500}
        def save_checkpoint(self, folder):
            pass
        def load_checkpoint(self, folder):
            pass

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        executor = FluidExecutor(backend="local", devices=1, run_dir=sys.argv[1], verbose=0)
        trials = [Trial(Count, {}, budget=40, trial_id=name) for name in "ab"]
        try:
            executor.submit_trialgroup(TrialGroup(trials)).wait()
        finally:
            executor.close()
"""


@pytest.mark.slow
def test_files_that_reach_their_limit_end_the_session_which_goes_on_later(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    script, folder = tmp_path / "driver.py", tmp_path / "run"
    script.write_text(textwrap.dedent(LIMITED))
    ended = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.search(
        r"ended early: OSError: \[Errno 27\] File too large: '.*/run/\w+\.jsonl'$", ended.stderr, re.MULTILINE
    )
    for _ in range(2):
        with FluidExecutor.resume(folder, backend="local", devices=1, verbose=0) as executor:
            (handle,) = executor.handles
            assert handle.wait(PATIENCE) and handle.states == {"a": "DONE", "b": "DONE"}
            results = list(handle.results())
            for name in "ab":
                steps = [(each.iteration, each.metrics["step"]) for each in results if each.trial_id == name]
                assert [iteration for iteration, _ in steps] == list(range(1, 41))
    assert len((folder / "results.jsonl").read_text().splitlines()) == 80


FULL_AT_THE_END = """
    import resource, sys
    from fluid import FluidExecutor, Trial, TrialGroup

    def train(config):
        yield {}

    with FluidExecutor("local", 1, run_dir=sys.argv[1], verbose=0) as executor:
        executor.submit_trialgroup(TrialGroup([Trial(train, trial_id="a")])).wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
"""


@pytest.mark.slow
def test_what_cannot_be_written_at_the_end_is_told_in_a_line(tmp_path: Path) -> None:
    folder, command = tmp_path / "run", [sys.executable, "-c", textwrap.dedent(FULL_AT_THE_END)]
    ended = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "not written" in line]
    assert line.startswith("session.json and profile.json were not written as the session ended ([Errno 27] File too")
    with FluidExecutor.resume(folder, backend="local", devices=1, verbose=0) as executor:
        assert executor.handles[0].states == {"a": "DONE"}


class FullAtClose(LocalBackend):
    """A backend that finds the disk full as it is closed."""

    def close(self) -> None:
        super().close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_of_the_environment_at_the_close_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FluidExecutor(FullAtClose(1, run_dir=tmp_path / "run"), run_dir=tmp_path / "run", verbose=0):
        pass
    (record,) = [record for record in caplog.records if record.name.startswith("fluid.session")]
    assert record.getMessage() == "the session could not be closed in order: [Errno 28] No space left on device"
    assert record.exc_info is None


# -- listeners, options and trials ---------------------------------------------------------------------------------


class Half:
    def on_start(self, trial_id: str) -> None:
        pass


def test_a_listener_is_checked_at_the_call(tmp_path: Path) -> None:
    from fluid.session.listeners import TrialListener

    class Whole(TrialListener):
        pass

    with executor_in(tmp_path / "run") as executor:
        refused = ((print, "on_start, on_result"), (Half(), "no on_result, on_end"), (Whole, "class itself"))
        for wrong, reason in refused:
            with pytest.raises(InvalidFieldError, match=f"listener=.*{reason}"):
                executor.submit_trialgroup(TrialGroup([Trial(endless, trial_id="a")]), wrong)  # type: ignore[arg-type]
        assert executor.submit_trialgroup(TrialGroup([Trial(endless, trial_id="a")]), Whole()).wait(PATIENCE)


@pytest.mark.parametrize("verbose", ["loud", 2, -1, None, 0.5])
def test_verbose_is_checked(tmp_path: Path, verbose: Any) -> None:
    with pytest.raises(InvalidFieldError, match="verbose"):
        executor_in(tmp_path / "run", verbose=verbose)
    assert not (tmp_path / "run").exists()


def test_a_session_that_was_closed_is_closed_for_its_folder_too(tmp_path: Path) -> None:
    executor = executor_in(tmp_path / "run")
    executor.close()
    with pytest.raises(FluidError, match="closed"):
        executor.submit_trialgroup(TrialGroup([Trial(endless)]))
    executor.close()
    resume(tmp_path / "run").close()


# -- how long a session took ----------------------------------------------------------------------------------------


def test_the_wall_time_is_that_from_opening_to_closing(tmp_path: Path) -> None:
    backend = SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0)])
    with FluidExecutor(backend=backend, run_dir=tmp_path, verbose=0) as executor:
        executor.submit_trialgroup(TrialGroup([Trial(endless, budget=3, trial_id="a")])).wait(PATIENCE)
        # Of a session that runs it is the time up to the newest entry.
        open_yet = load_run(tmp_path).wall
        began = json.loads((tmp_path / "session.json").read_text())["clock"]["at"]
    closed = json.loads((tmp_path / "session.json").read_text())["closed"]
    assert open_yet is not None and 3.0 <= open_yet <= closed - began
    assert load_run(tmp_path).wall == closed - began


def test_the_name_of_a_run_folder_may_be_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    with FluidExecutor(backend="local", devices=1, run_dir=folder, verbose=0) as executor:
        group = TrialGroup([Trial(Slow, {"seconds": 0.0}, budget=2, trial_id="a")])
        handle = executor.submit_trialgroup(group)
        assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"}
    assert os.listdir(tmp_path) == [folder.name]
