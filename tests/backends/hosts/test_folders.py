"""A session's folders on a machine, and checkpoints that move between machines."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders, locate, pack, unpack
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.paths import host_of
from fluid.lane.checkpoints.store import CheckpointStore


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    path = tmp_path / "ram"
    path.mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(path))
    return path


@pytest.fixture
def session(tmp_path: Path) -> SessionFolders:
    (tmp_path / "run").mkdir()
    return SessionFolders("0a" * 8, str(tmp_path / "run"), temporary=False)


def save(home: HostFolders, trial_id: str, iteration: int, text: str, lane_id: int = 0) -> str:
    if home.memory_folder:
        StoreLedger(home.memory_folder).create(10**9, 10**9)
    store = CheckpointStore(lane_id, home.run_folder, home.memory_folder)
    return store.save(trial_id, iteration, lambda folder: _write(folder, text)).path


def _write(folder: str, text: str) -> None:
    (Path(folder) / "state").write_text(text)


def test_a_path_tells_which_machine_wrote_it(ram: Path, session: SessionFolders) -> None:
    for host in (HERE, "10.0.0.7"):
        home = HostFolders(session, host)
        assert host_of(save(home, "a", 1, "x")) == host
        home.memory_folder = ""
        assert host_of(save(home, "a", 2, "x")) == host
        home.leave(clear=False)


def test_machines_that_share_the_run_folder_use_it_and_others_do_not(ram: Path, session: SessionFolders) -> None:
    Path(session.marker).touch()
    assert HostFolders(session, "10.0.0.7").run_folder == session.run_folder
    os.unlink(session.marker)
    assert HostFolders(session, "10.0.0.7").run_folder != session.run_folder


NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /tmp."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def nowhere(session: SessionFolders) -> SessionFolders:
    return session._replace(run_folder="/proc/nowhere/run")


def test_where_the_run_folder_cannot_be_made_processes_share_a_temporary_one(
    ram: Path, session: SessionFolders, temporary: Path
) -> None:
    homes = [HostFolders(nowhere(session), "10.0.0.7") for _ in range(2)]
    (folder,) = {home.run_folder for home in homes}
    assert folder == str(temporary / f"fluid-{session.token}-10.0.0.7")
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@pytest.mark.parametrize("planted", ["folder", "own folder for all", "link", "file"])
def test_a_temporary_folder_that_another_made_is_not_used(
    ram: Path, session: SessionFolders, temporary: Path, tmp_path: Path, planted: str
) -> None:
    taken = temporary / f"fluid-{session.token}-10.0.0.7"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        taken.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777)
        if planted == "folder":
            if os.getuid():
                pytest.skip("only root can play another user")
            os.chown(taken, NOBODY, NOBODY)
    home = HostFolders(nowhere(session), "10.0.0.7")
    found = os.lstat(home.run_folder)
    assert home.run_folder != str(taken) and os.path.dirname(home.run_folder) == str(temporary)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o700)
    home.leave(clear=True)
    assert not (tmp_path / "elsewhere").exists() or os.listdir(tmp_path / "elsewhere") == []


@needs_root
@pytest.mark.parametrize("planted", ["run", "marker", "hosts"])
def test_a_run_folder_that_another_planted_on_this_machine_is_not_used(
    ram: Path, session: SessionFolders, temporary: Path, tmp_path: Path, planted: str
) -> None:
    """Its path can be listed on the driver's machine, and made on another one before Fluid makes it."""
    there = session._replace(run_folder=str(tmp_path / "planted"))
    for folder in (tmp_path / "planted", tmp_path / "planted" / "hosts"):
        folder.mkdir()
        folder.chmod(0o777)
        if planted in ("run", "marker") or folder.name == "hosts":
            os.chown(folder, NOBODY, NOBODY)
    if planted == "marker":
        Path(there.marker).touch()
        os.chown(there.marker, NOBODY, NOBODY)
    home = HostFolders(there, "10.0.0.7")
    assert os.path.dirname(home.run_folder) == str(temporary)
    home.leave(clear=True)


@pytest.mark.slow
def test_the_last_one_to_leave_puts_checkpoints_on_disk(ram: Path, session: SessionFolders) -> None:
    driver, lane = HostFolders(session, HERE), HostFolders(session, HERE)
    path = save(lane, "a", 3, "third")
    assert path.startswith(str(ram))
    lane.leave(clear=True)
    assert os.path.isdir(path)  # The driver is still there.
    driver.leave(clear=True)
    assert os.listdir(ram) == []
    found = locate(path, session.run_folder)
    assert found is not None and (Path(found) / "state").read_text() == "third"


@pytest.mark.parametrize("host", [HERE, "10.0.0.7"])
def test_what_a_killed_process_left_is_swept_up_by_the_next(ram: Path, session: SessionFolders, host: str) -> None:
    home = HostFolders(session, host)
    path = save(home, "a", 3, "third")
    host_memory.sweep()
    assert os.path.isdir(path)  # A process uses it.
    os.close(home._lock)  # As when it is killed.
    other = HostFolders(session._replace(token="0b" * 8), HERE)
    assert os.listdir(ram) == [os.path.basename(other.memory_folder)]
    assert locate(path, session.run_folder) is not None


def test_a_temporary_session_leaves_nothing(ram: Path, session: SessionFolders) -> None:
    temporary = session._replace(temporary=True)
    for host in ("10.0.0.7", HERE):
        home = HostFolders(temporary, host)
        save(home, "a", 1, "x")
        home.leave(clear=True)
        assert os.listdir(ram) == []
    assert not os.path.exists(session.run_folder)


def test_without_host_memory_everything_is_on_disk(session: SessionFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    home = HostFolders(session, HERE)
    assert (home.memory_folder, host_memory.free_bytes(home.memory_folder)) == ("", 0)
    assert home.note(3).startswith(session.run_folder)
    assert home.place_for("a", "n", 10).startswith(session.run_folder)
    home.leave(clear=True)


def test_a_checkpoint_travels_whole(ram: Path, session: SessionFolders, tmp_path: Path) -> None:
    there, here = HostFolders(session, "10.0.0.7"), HostFolders(session, HERE)
    path = save(there, "a/b", 4, "fourth")
    os.mkdir(os.path.join(path, "sub"))
    (Path(path) / "sub" / "more").write_bytes(b"\x00" * 1000)
    target = here.place_for("a/b", os.path.basename(path), 1000)
    assert pack(path, session.run_folder)[0] == os.path.basename(path)
    unpack(pack(path, session.run_folder)[1], target)
    names = {p.relative_to(target).as_posix() for p in Path(target).rglob("*")}
    assert names == {"seal.json", "state", "sub", "sub/more"}
    unpack(pack(path, session.run_folder)[1], target)  # Two lanes may want it at once.
    assert locate(target, session.run_folder) == target
    assert locate(path.replace("00000004", "00000005"), session.run_folder) is None
    with pytest.raises(FileNotFoundError, match="there is none before it"):
        pack(path.replace("00000004", "00000003"), session.run_folder)


def test_of_a_checkpoint_that_is_damaged_or_gone_the_one_before_travels(ram: Path, session: SessionFolders) -> None:
    there = HostFolders(session, "10.0.0.7")
    StoreLedger(there.memory_folder).create(10**9, 10**9)
    store = CheckpointStore(0, there.run_folder, there.memory_folder)
    first, second = (store.save("a", number, lambda folder: _write(folder, "state")).path for number in (4, 5))
    (Path(second) / "state").write_text("FIFTH")
    gone = second.replace("00000005", "00000006")
    for wanted in (second, gone):
        assert pack(wanted, session.run_folder)[0] == os.path.basename(first)
    there.leave(clear=True)  # Both go to disk.
    assert pack(second, session.run_folder)[0] == os.path.basename(first)
