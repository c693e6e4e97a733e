"""Passwords in the address of a logger reach neither a file nor the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid._logs import brief, brief_traceback, without_secrets
from fluid.executor import FluidExecutor
from fluid.loggers import MLflow, TrialLogger
from fluid.loggers.sink import LOGGERS, read_progress
from fluid.trialgroup import Trial, TrialGroup

PATIENCE = 90.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:5000/path", "http://host:5000/path"),
        ("https://hunter2@host", "https://host"),
        ("mysql+pymysql://me:hun@ter/2@db/runs", "mysql+pymysql://db/runs"),
        ("sqlite:////tmp/m.db?password=hunter2&mode=rw", "sqlite:////tmp/m.db?password=***&mode=***"),
        ("http://host/?token=hunter2#part", "http://host/?token=***#part"),
        ("redis://:hunter2@host", "redis://host"),
        ("(http://me:hun?ter2@host/?a=1)", "(http://host/?a=***)"),
        ("host=db user=me password='hunter2 x' dbname=runs", "host=db user=me password=*** dbname=runs"),
        ("{'api_key': 'hunter2', 'n': 1}", "{'api_key': ***, 'n': 1}"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=***"),
        ("AccountKey=hunter2;EndpointSuffix=net", "AccountKey=***;EndpointSuffix=net"),
        ("s3://bucket/runs and /plain/path and a@b", "s3://bucket/runs and /plain/path and a@b"),
        ("tokens: 12", "tokens: 12"),
    ],
)
def test_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_brief_errors() -> None:
    error = UnicodeEncodeError("utf-8", "table " * 10_000, 0, 1, "surrogates not allowed")
    assert brief(error) == "UnicodeEncodeError('surrogates not allowed')"
    assert len(brief(ValueError("x" * 10_000))) < 400
    try:
        try:
            raise ValueError("no such user in postgresql://me:hunter2@db")
        except ValueError as cause:
            raise RuntimeError("cannot connect: (psycopg) password=hunter2") from cause
    except RuntimeError as raised:
        text = brief_traceback(raised)
    assert "test_brief_errors" in text and text.endswith("RuntimeError('cannot connect: (psycopg) password=***')")
    assert "no such user" not in text, "what a cause says of the address is not known"


class ToServer(TrialLogger):
    destination = "http://me:hunter2@host:5000?token=hunter2"

    def on_start(self, trial_id: str) -> None:
        raise ConnectionError(f"no answer from {self.destination}")

    def on_broken(self, error: BaseException) -> None:
        raise ConnectionError(f"no answer from {self.destination}")


class Stores(ToServer):
    def on_start(self, trial_id: str) -> None:
        """Does nothing."""

    def on_broken(self, error: BaseException) -> None:
        """Does nothing."""


def _train(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    yield {"loss": 1}


def _run(folder: Path, *loggers: TrialLogger) -> None:
    with FluidExecutor("local", 1, loggers=loggers, run_dir=folder, verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(_train, {}, 1, trial_id="a")])).wait(PATIENCE)


def _holding(folder: Path, secret: str) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@pytest.mark.slow
def test_neither_files_nor_log_have_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _run(tmp_path / "run", ToServer(), Stores())
    assert "ToServer(http://host:5000?token=***) raised ConnectionError(" in caplog.text
    assert "hunter2" not in caplog.text and _holding(tmp_path / "run", "hunter2") == []
    assert "Stores(http://host:5000?token=***)" in (tmp_path / "run" / LOGGERS).read_text()


def test_a_file_of_an_older_fluid_is_understood(tmp_path: Path) -> None:
    entry = {"logger": f"ToServer({ToServer.destination})", "results": 7, "ends": {"a": "DONE"}}
    (tmp_path / LOGGERS).write_text(json.dumps(entry) + "\n")
    assert read_progress(tmp_path)[ToServer().key].results == 7


@pytest.mark.frameworks("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _run(
        tmp_path / "run", MLflow(f"sqlite:///{tmp_path}/m.db?password=hunter2"), MLflow("http://me:hunter2@127.0.0.1:9")
    )
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("fluid")]
    assert any(text.startswith("logger MLflow(http://127.0.0.1:9) raised") for text in ours)
    assert "hunter2" not in "".join(ours) and _holding(tmp_path / "run", "hunter2") == []
