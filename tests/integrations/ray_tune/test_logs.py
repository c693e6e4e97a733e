"""No lines are lost when Tune replaces a trial's logs by their uploaded copies."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
import pyarrow.fs
from ray.train._internal.syncer import _BackgroundProcess

from fluid.integrations.ray_tune.logs.loggers import save_logs

pytestmark = pytest.mark.ray
LINES = '{"training_iteration": 1}\n'


@pytest.fixture
def trial(tmp_path: Path) -> SimpleNamespace:
    """The parts of a trial with a checkpoint that its logs need; uploads are local files."""
    for name in ("local", "remote"):
        (tmp_path / name).mkdir()
    storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        trial_fs_path=str(tmp_path / "remote"),
        experiment_fs_path=str(tmp_path),
        syncer=SimpleNamespace(wait=lambda: None),
    )
    return SimpleNamespace(checkpoint=object(), local_path=str(tmp_path / "local"), storage=storage)


def test_lines_that_were_not_uploaded_yet(trial: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "local" / "result.json").write_text(LINES * 2)
    (tmp_path / "remote" / "result.json").write_text(LINES)
    save_logs(trial)
    assert (tmp_path / "remote" / "result.json").read_text() == LINES * 2
    assert not (tmp_path / "remote" / "progress.csv").exists()


def test_lines_that_only_the_upload_has(trial: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "local" / "result.json").write_text("")
    (tmp_path / "remote" / "result.json").write_text(LINES)
    save_logs(trial)
    assert (tmp_path / "remote" / "result.json").read_text() == LINES


@pytest.mark.slow
def test_an_upload_that_runs_has_emptied_the_file(trial: SimpleNamespace, tmp_path: Path) -> None:
    remote = tmp_path / "remote" / "result.json"
    remote.write_text(LINES)
    shutil.copy(remote, tmp_path / "local")
    emptied, go_on = threading.Event(), threading.Event()

    def upload() -> None:
        with remote.open("w") as file:
            emptied.set()
            assert go_on.wait(60)
            file.write(LINES)

    sync = _BackgroundProcess(upload)
    sync.start()
    assert emptied.wait(60)
    trial.storage.syncer.wait = lambda: (go_on.set(), sync.wait())
    save_logs(trial)
    assert remote.read_text() == LINES


@pytest.mark.slow
def test_an_upload_that_failed(trial: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no space left")

    trial.storage.syncer.wait = fail
    save_logs(trial)
    assert "no space left" in caplog.text
