"""The page of all runs that ``fluid view DIR`` serves."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import Browser, Page
from waiting import PATIENCE, eventually

from fluid.cli import main
from fluid.reports.index.server import IndexServer
from fluid.trialgroup import Search, Trial

Sessions = Callable[..., Any]


@contextmanager
def serving(home: Path) -> Iterator[IndexServer]:
    """Serves the runs below a folder in a thread."""
    with IndexServer(home) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.index.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()


def ask(server: IndexServer, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, str]:
    """The status and the body of an answer; names of headers have ``_`` for ``-``."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=PATIENCE)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, parts.path + path, body or None, given)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def data_of(server: IndexServer) -> dict[str, Any]:
    """What the page of all runs embeds."""
    page = ask(server, "")[1]
    return dict(json.loads(page.partition('id="data">')[2].partition("</script>")[0]))


def ids_of(server: IndexServer) -> dict[str, str]:
    """The id of each run, by its name."""
    return {row["run"]: row["id"] for row in data_of(server)["rows"]}


def begin(session: Sessions, name: str, loss: float = 0.5, **facts: Any) -> Any:
    """A session that goes on: one of two trials has finished an iteration."""
    made = session({}, name=name, **{"began": "2026-01-31 12:34:56", **facts})
    trials = [Trial(print, {"lr": 0.1}, budget=9, trial_id=f"{name}-{each}") for each in "ab"]
    made.submit(f"sweep-{name}", trials, Search("loss", "min", 2))
    made.results((trials[0].id, 1, 0.0, 1.0, 1.0, (0,), {"loss": loss}))
    return made


def end(made: Any) -> Path:
    for each in sorted(made.group_of):
        made.end(each)
    return Path(made.close())


@pytest.fixture
def runs(session: Sessions, tmp_path: Path) -> Iterator[Path]:
    """A folder with two runs that have ended, one that goes on, a damaged one, and folders that are none."""
    end(begin(session, "runs/first", 0.25))
    end(begin(session, "runs/deeper/second", 0.125, began="2026-02-01 12:00:00"))
    live = begin(session, "runs/live", began="2026-02-02 12:00:00")
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/session.json").write_text("{")
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/notes/a.txt").write_text("mine")
    yield tmp_path / "runs"
    live.close()


def test_the_page_has_all_runs(runs: Path) -> None:
    with serving(runs) as server:
        rows = {row["run"]: row for row in data_of(server)["rows"]}
        assert {name: row["state"] for name, row in rows.items()} == {
            "first": "done",
            "deeper/second": "done",
            "live": "running",
            "torn": "damaged",
        }
        first = rows["first"]
        assert (first["value"], first["metric"], first["direction"]) == (0.25, "loss", "less is better")
        assert (first["name"], first["trials"], first["bytes"] > 0) == ("sweep-runs/first", 2, True)
        assert str(runs) not in first["id"] and len(set(ids_of(server).values())) == 4


def test_a_run_and_a_comparison_have_pages_of_their_own(runs: Path) -> None:
    with serving(runs) as server:
        ids = ids_of(server)
        for which, names in ((ids["first"], ["sweep-runs/first"]), (f"{ids['first']}+{ids['deeper/second']}", None)):
            status, page = ask(server, f"runs/{which}/")
            shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
            assert status == 200 and [run["name"] for run in shown["runs"]] == (
                names or ["sweep-runs/first", "sweep-runs/deeper/second"]
            )
        events = page.partition('data-events="')[2].partition('"')[0].replace("&amp;", "&")
        assert events.startswith("events?after=1&of=")
        status, page = ask(server, f"runs/{ids['torn']}/")
        assert "This run cannot be shown" in page and "has no results.jsonl" in page
        for path in ("runs/", "runs/0/", f"runs/{ids['first']}", f"runs/{ids['first']}/x/events", "runs/../", "other"):
            status, _ = ask(server, path)
            assert status == (200 if path == f"runs/{ids['first']}" else 404), path


def test_one_strange_folder_hides_no_others(runs: Path) -> None:
    """A name that is no text; a pipe, which would not end, for a file."""
    strange = Path(os.fsdecode(os.fsencode(runs) + b"/\xff"))
    shutil.copytree(runs / "first", strange)
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe/session.json")
    with serving(runs) as server:
        ids = ids_of(server)
        assert set(ids) == {"first", "deeper/second", "live", "torn", "?"}
        assert ask(server, f"runs/{ids['?']}/")[0] == 200
    assert main(["report", str(strange)]) == 0 and (strange / "report.html").stat().st_size


def test_a_page_that_comes_back_to_another_follower_is_sent_all(runs: Path) -> None:
    with serving(runs) as server:
        which = ids_of(server)["first"]
        ask(server, f"runs/{which}/")
        for of in ("0", ""):  # With its own name, one that is at this version would wait for the next.
            connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port or 0, timeout=PATIENCE)
            connection.request("GET", f"{urlsplit(server.url).path}runs/{which}/events?after=1&of={of}")
            lines = iter(connection.getresponse().readline, b"")
            data = json.loads(next(line for line in lines if line.startswith(b"data: ")).removeprefix(b"data: "))
            assert "patch" not in data and len(data["trials"]) == 2
            connection.close()


def test_only_its_own_page_can_delete(runs: Path) -> None:
    with serving(runs) as server:
        data, ids = data_of(server), ids_of(server)
        host = urlsplit(server.url).netloc
        body = json.dumps({"runs": [ids["first"]]})
        good = {"Host": host, "Origin": f"http://{host}", "X_Fluid_Key": data["key"]}
        bad: list[tuple[dict[str, str], int]] = [
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
            ({"X_Fluid_Key": "guess"}, 403),
            ({"X_Fluid_Key": ""}, 403),
        ]
        for change, status in bad:
            assert ask(server, "delete", "POST", body, **{**good, **change}) == (status, "")
        without = {name: value for name, value in good.items() if name != "Origin"}
        assert ask(server, "delete", "POST", body, **without)[0] == 403
        assert ask(server, "delete", "GET", **good)[0] == 404
        for nonsense in ("", "[]", '{"runs": 3}', '{"runs": [1]}', "[" * 5000):
            assert ask(server, "delete", "POST", nonsense, **good)[0] == 404
        assert ask(server, "../delete", "POST", body, **good)[0] == 404
        assert (runs / "first/results.jsonl").is_file()
        assert ask(server, "delete", "POST", body, **good) == (200, '{"refused": {}}')
        assert not (runs / "first").exists() and len(os.listdir(runs)) == 4
        eventually(lambda: "first" not in ids_of(server))


def test_what_is_no_run_of_the_folder_or_goes_on_is_not_deleted(runs: Path, session: Sessions, tmp_path: Path) -> None:
    outside = end(begin(session, "outside"))
    (runs / "link").symlink_to(outside)
    (runs / "again").symlink_to("deeper/second")
    (runs / "first/thesis.tex").write_text("mine")
    with serving(runs) as server:
        ids, host = ids_of(server), urlsplit(server.url).netloc
        headers = {"Host": host, "Origin": f"http://{host}", "X_Fluid_Key": data_of(server)["key"]}
        asked = [ids["live"], ids["link"], ids["again"], ids["first"], "../outside", str(outside)]
        status, answer = ask(server, "delete", "POST", json.dumps({"runs": asked}), **headers)
        refused = json.loads(answer)["refused"]
        assert status == 200 and list(refused) == asked
        assert "is in use" in refused[ids["live"]] and f"by a link, from {outside}" in refused[ids["link"]]
        assert "by a link" in refused[ids["again"]] and (runs / "deeper/second/results.jsonl").is_file()
        assert "thesis.tex" in refused[ids["first"]] and "not one of the runs" in refused["../outside"]
    assert (outside / "results.jsonl").is_file() and (runs / "first/thesis.tex").read_text() == "mine"
    assert (runs / "live/results.jsonl").is_file()


def test_the_command_serves_runs_below_a_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(runs / "notes")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["view", str(runs / "notes/a.txt")]) == 2
    assert main(["view", str(runs), "--port", "70000"]) == 2
    assert "port=70000" in capsys.readouterr().err


# -- in a browser --------------------------------------------------------------------------------------------------


def names(page: Page) -> list[str]:
    return page.texts("#index td.run a, #index td.run span")


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True)])
def test_the_list_is_filtered_sorted_and_live(
    runs: Path, session: Sessions, browser: Browser, width: int, dark: bool
) -> None:
    with serving(runs) as server, browser.page(width, 700, dark=dark) as page:
        page.open(server.url)
        assert names(page)[1:] == ["live", "deeper/second", "first"] and names(page)[0] == "torn"
        assert page.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert "4 runs, 1 running" in page.text("#shown")
        page.click("#index th:nth-child(4) button")
        assert names(page) == ["deeper/second", "first", "live", "torn"], "by value, the best first"
        page.type("#filter", "sweep-runs DONE")
        assert names(page) == ["deeper/second", "first"] and "2 of 4 runs" in page.text("#shown")
        page.type("#filter", "")
        page.select("#state", "damaged")
        assert names(page) == ["torn"]
        page.select("#state", "")
        end(begin(session, "runs/<img src=x onerror=alert(1)>", 0.0625))
        eventually(lambda: "<img src=x onerror=alert(1)>" in names(page))
        assert page.run("document.querySelectorAll('#index img').length") == 0
        assert page.problems == []


@pytest.mark.browser
def test_runs_are_compared_and_deleted_from_the_list(runs: Path, browser: Browser) -> None:
    with serving(runs) as server, browser.page(1280, 700) as page:
        page.open(server.url)
        assert page.run("document.querySelector('#compare').disabled && document.querySelector('#delete').disabled")

        def tick(name: str) -> None:
            which = ids_of(server)[name]
            page.click(f'tr[data-id="{which}"] input')

        tick("live")
        assert page.run("document.querySelector('#delete').disabled"), "it goes on"
        tick("live")
        tick("first")
        tick("deeper/second")
        page.run("document.querySelector('#compare').click()")
        eventually(
            lambda: (
                page.run("document.title") == "sweep-runs/deeper/second vs. sweep-runs/first - Fluid"
                or page.run("document.title") == "sweep-runs/first vs. sweep-runs/deeper/second - Fluid"
            )
        )
        page.open(server.url)
        tick("first")
        page.click("#delete")
        assert "Delete 1 run" in page.text("#question") and page.texts("#doomed li") == ["first"]
        page.click("#keep")
        assert (runs / "first/results.jsonl").is_file()
        page.click("#delete")
        page.click("#really")
        eventually(lambda: not (runs / "first").exists())
        eventually(lambda: "first" not in names(page))
        assert page.problems == []
