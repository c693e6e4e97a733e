"""``fluid view``: the server, and the command around it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from page_patches import patched
from stranger_processes import KINDS, strangers_at
from waiting import PATIENCE, eventually

from fluid.cli import main
from fluid.reports.page.server import RunServer
from fluid.trialgroup import Trial
from tests.checked_files import checked

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
Sessions = Callable[..., Any]
#: A request to this machine must not go through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def serving(*runs: Path) -> Iterator[str]:
    """Serves runs in a thread; gives the address."""

    with RunServer(runs) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server.url
        finally:
            server.follower.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()


def get(url: str, **headers: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Events:
    """The events of a page, as a browser listens to them."""

    def __init__(self, url: str, after: int) -> None:
        self._answer = _OPENER.open(f"{url}events?after={after}", timeout=PATIENCE)
        assert self._answer.headers["Content-Type"] == "text/event-stream"
        self._data: Any = None

    def next(self) -> Any:
        """The data of the page after the next event; ``None`` if the stream has ended."""
        for line in self._answer:
            if line.startswith(b"data: "):
                sent = json.loads(line.removeprefix(b"data: "))
                self._data = patched(self._data, sent) if "patch" in sent else sent
                return self._data
        return None

    def until(self, holds: Callable[[Any], bool]) -> Any:
        """The data of the first event of which something holds."""
        while not holds(data := self.next()):
            pass
        return data


def begin(session: Sessions, name: str = "run") -> Any:
    """A session that runs: one trial has finished its first iteration."""
    made = session({"g": [Trial(print, {"lr": 0.1}, budget=9, trial_id="a")]}, name=name)
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 0.5}))
    return made


def test_the_page_listens_to_its_events(session: Sessions) -> None:
    made = begin(session)
    with serving(made.path) as url:
        status, page = get(url)
        assert (status, page[:15]) == (200, "<!doctype html>")
        assert 'data-events="events?after=1"' in page and "connect-src 'self'" in page
        # Under its other name, too.
        assert get(url.replace("127.0.0.1", "localhost"))[0] == 200
    made.close()


@pytest.mark.slow
def test_a_new_iteration_arrives_and_so_does_the_end(session: Sessions) -> None:
    made = begin(session)
    with serving(made.path) as url:
        events = Events(url, after=0)
        (run,) = events.next()["runs"]
        assert (run["iterations"], run["running"]) == (1, True)
        made.results(("a", 2, 1.0, 2.0, 1.0, (0,), {"loss": 0.25}))
        data = events.until(lambda data: data["runs"][0]["iterations"] == 2)
        assert data["trials"][0]["last"] == [0.25]
        made.close()
        assert not events.until(lambda data: not data["runs"][0]["running"])["runs"][0]["running"]
    assert events.next() is None


@pytest.mark.slow
def test_patches_arrive_and_all_is_drawn_in_the_end(session: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.reports.run.following._SHARE_OF_DRAWING", 1e-6)
    made = begin(session)
    with serving(made.path) as url:
        events = Events(url, after=0)
        assert events.next()["runs"][0]["drawn"] == 1.0
        made.results(("a", 2, 1.0, 2.0, 1.0, (0,), {"loss": 0.25}))
        for page in (events, Events(url, after=0)):  # One that is opened later is sent all that it needs.
            data = page.until(lambda data: data["runs"][0]["iterations"] == 2)
            assert data["trials"][0]["last"] == [0.25]
            assert (data["runs"][0]["makespan"], data["runs"][0]["drawn"]) == (2.0, 1.0)
        made.close()
        assert events.until(lambda data: not data["runs"][0]["running"])["runs"][0]["drawn"] == 2.0
    assert events.next() is None


@pytest.mark.slow
def test_half_a_line_is_not_read_before_its_end(session: Sessions) -> None:
    made = begin(session)
    with serving(made.path) as url:
        events = Events(url, after=0)
        events.next()
        before = (made.path / "results.jsonl").read_bytes()
        line = checked([before.replace(b'"iteration": 1', b'"iteration": 2')], len(before))
        with (made.path / "results.jsonl").open("ab") as file:
            file.write(line[:40])
            file.flush()
            half = events.next()
            assert half["runs"][0]["iterations"] == 1 and half["runs"][0]["notes"] == []
            file.write(line[40:])
        events.until(lambda data: data["runs"][0]["iterations"] == 2)
    made.close()


def test_importances_come_later(two_sweeps: tuple[Path, Path]) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    with serving(*two_sweeps) as url:
        events = Events(url, after=0)
        assert [run["importances"] for run in events.next()["runs"]] == [{}, {}]
        data = events.until(lambda data: bool(data["runs"][0]["importances"]))
        assert [name for name, _ in data["runs"][1]["importances"]["loss"]] == ["lr", "optimizer/name"]


def test_only_who_knows_the_address_gets_an_answer(session: Sessions) -> None:
    made = begin(session)
    with serving(made.path) as url, serving(made.path) as other:
        base, token = url.rsplit("/", 2)[:2]
        # The random part is new each time, and long.
        assert token != other.rsplit("/", 2)[1] and len(token) >= 20
        for path in ("", "x/", f"{token}x/", f"{token[:-1]}/", f"{token}/session.json", f"{token}/../", "events"):
            assert get(f"{base}/{path}") == (404, "")
        for host in ("evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""):
            assert get(url, Host=host) == (403, "")
            assert get(f"{url}events", Host=host) == (403, "")
        connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=PATIENCE)
        connection.request("POST", f"/{token}/")
        assert connection.getresponse().status == 501
        connection.close()
    made.close()


def test_it_listens_on_the_loopback_only(session: Sessions) -> None:
    made = begin(session)
    with serving(made.path) as url:
        assert url.startswith("http://127.0.0.1:")
        port = int(url.split(":")[2].partition("/")[0])
        with socket.socket() as asked, pytest.raises(ConnectionRefusedError):
            asked.connect(("127.0.0.2", port))
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kind"), [(600, kind) for kind in KINDS])
def test_strangers_take_neither_threads_nor_the_page(session: Sessions, count: int, kind: str) -> None:
    made = begin(session)
    with serving(made.path) as url:
        before = threading.active_count()
        events = Events(url, after=0)
        assert events.next() is not None
        with strangers_at(("127.0.0.1", int(url.split(":")[2].split("/")[0])), count, kind):
            begun = time.monotonic()
            assert [get(url)[0] for _ in range(3)] == [200] * 3
            assert time.monotonic() - begun < 5.0
            assert threading.active_count() < before + 100
            made.results(("a", 2, 1.0, 2.0, 1.0, (0,), {"loss": 0.25}))
            assert events.until(lambda data: data["runs"][0]["iterations"] == 2), "an open page stays open"
    made.close()


def test_several_runs_are_shown_together(two_sweeps: tuple[Path, Path]) -> None:
    with serving(*two_sweeps) as url:
        assert [run["name"] for run in Events(url, after=0).next()["runs"]] == ["asha", "random"]


@pytest.mark.browser
def test_an_open_page_follows_the_run(session: Sessions, browser: Browser) -> None:
    made = begin(session)
    with serving(made.path) as url, browser.page() as page:
        page.open(url)
        assert page.text(".live") == "running"
        assert "loss 0.5" in page.text("#best").replace("\n", " ")
        made.results(("a", 2, 1.0, 2.0, 1.0, (0,), {"loss": 0.25}))
        eventually(lambda: "loss 0.25" in page.text("#best").replace("\n", " "))
        made.end("a", "STOPPED", iteration=2)
        made.close()
        eventually(lambda: page.text(".live") == "the session has ended")
        assert page.problems == []


# --- The command


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line on stderr with which the command is refused."""
    assert main(["view", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fluid: error: ") and printed.err.count("\n") == 1
    return printed.err


def test_nonsense_is_refused_in_one_line(small_run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert f"run='{tmp_path}/no': does not exist" in refusal(capsys, f"{tmp_path}/no")
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in refusal(capsys, f"{tmp_path}/empty")
    assert "is given twice" in refusal(capsys, str(small_run), f"{small_run}/")
    assert "port=70000" in refusal(capsys, str(small_run), "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port={port}: cannot be used: Address already in use" in refusal(
            capsys, str(small_run), "--port", str(port)
        )


def run_view(folder: Path, **environment: str) -> subprocess.Popen[str]:
    shell = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
    return subprocess.Popen(
        [sys.executable, "-m", "fluid.cli", "view", str(folder)],
        env={**shell, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_ends_it_with_one_line(small_run: Path) -> None:
    before = sorted(small_run.iterdir())
    process = run_view(small_run)
    assert process.stdout is not None
    url = process.stdout.readline().split()[0]
    assert get(url)[0] == 200
    page = Events(url, after=0)
    page.next()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, errors) == (0, "no longer served\n", "")
    assert page.next() is None
    assert sorted(small_run.iterdir()) == before


def test_a_browser_opens_by_a_file_that_does_not_tell_the_address_to_others(small_run: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$@" > {seen}.tmp\ncat "${{1#file://}}" >> {seen}.tmp\nmv {seen}.tmp {seen}\n')
    program.chmod(0o755)
    process = run_view(small_run, DISPLAY=":0", BROWSER=f"{program} %s")
    assert process.stdout is not None
    url = process.stdout.readline().split()[0]
    eventually(seen.exists)
    arguments, _, page = seen.read_text().partition("\n")
    assert re.fullmatch(rf"file://{re.escape(str(small_run))}/\.view-\w+\.html", arguments)
    assert f"url={url}" in page
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert not list(small_run.glob(".view-*"))
