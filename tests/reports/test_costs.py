"""What a run cost: device time held, dollars, the deadline and the budget."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.display.format import device_time, dollar_column, dollars
from fluid.engine.commands import NoteDeviceLost, ReportEnd
from fluid.engine.events import DeviceAdded
from fluid.errors import InvalidFieldError
from fluid.reports.analysis.costs import Costs, Paid
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import RunReader, load_run
from fluid.resources import Device
from fluid.results.loading import load
from fluid.trialgroup import Trial, TrialState
from tests.checked_files import append_checked
from tests.json_fields import undescribed

Sessions = Callable[..., Any]
Captured = pytest.CaptureFixture[str]
#: When sessions begin on their clock, as in conftest.
ZERO = 5000.0
CLOCK = {"at": ZERO - 1.0, "time": "2026-01-31 12:34:56"}
FORMAT_SCRIPT = Path(__file__).parents[2] / "fluid" / "reports" / "page" / "page.format.js"


def trial(trial_id: str, budget: int = 1) -> Trial:
    return Trial(print, budget=budget, trial_id=trial_id)


def priced(session: Sessions, *, unended: bool = False, **facts: Any) -> Path:
    """Two packed trials on device 0, then a wide one on two devices, of which one comes at 2 s and leaves at 12 s."""
    made = session({}, clock=CLOCK, closed=ZERO + 19.0, **facts)
    made.happened(DeviceAdded(-1.0, Device(0)))
    made.submit("sweep", [trial("a", 1), trial("b", 1), trial("c", 1)], at=-1.0)
    made.happened(DeviceAdded(2.0, Device(1)))
    made.results(
        ("a", 1, 0.0, 5.0, 0.5, (0,), {"loss": 1.0}),
        ("b", 1, 0.0, 5.0, 0.5, (0,), {"loss": 2.0}),
        ("c", 1, 5.0, 10.0, 2.0, (0, 1), {"loss": 3.0}),
    )
    for name in ("a", "b") if unended else ("a", "b", "c"):
        made.happened(ReportEnd(name, "0", state=TrialState.DONE, iteration=1, at=10.0))
    made.happened(NoteDeviceLost(1, 12.0))
    return Path(made.close())


def test_devices_are_paid_for_from_their_arrival_to_their_loss(session: Sessions) -> None:
    run = load_run(priced(session, price_per_device_hour=3600.0))
    # Device 0 from -1 s to the end at 19 s, device 1 from 2 s to 12 s.
    assert run.costs.paid.held == pytest.approx(20.0 + 10.0)
    assert run.costs.usd == pytest.approx(30.0)
    # Device 0 was busy for 10 s, device 1 for 5 s.
    assert run.costs.busy_share == pytest.approx(15.0 / 30.0)
    assert run.costs.paid.took == pytest.approx(11.0), "from the session's beginning to the end of the last iteration"


def test_trials_that_share_a_device_share_its_cost(session: Sessions) -> None:
    run = load_run(priced(session, price_per_device_hour=3600.0))
    assert [found.device_seconds for found in run.trials] == pytest.approx([2.5, 2.5, 10.0])
    assert run.groups[0].device_seconds == pytest.approx(15.0)


def test_a_resumed_session_does_not_pay_for_the_break(session: Sessions) -> None:
    made = session({}, clock={"at": ZERO + 99.0, "time": "2026-01-31 12:36:36"}, closed=ZERO + 120.0)
    made.happened(*(DeviceAdded(-1.0, Device(index)) for index in (0, 1)))
    made.submit("sweep", [trial("a", 2)], at=-1.0)
    made.results(("a", 1, 0.0, 4.0, 1.0, (0,), {"loss": 1.0}))
    made.happened(ReportEnd("a", "0", state=TrialState.DONE, iteration=1, at=9.0))
    made.happened(*(DeviceAdded(100.0, Device(index)) for index in (0, 1)))
    made.results(("a", 2, 101.0, 110.0, 1.0, (0,), {"loss": 1.0}))
    assert load_run(made.close()).paid.held == pytest.approx(2 * 10.0 + 2 * 20.0)


def test_a_run_that_goes_on_pays_until_its_last_news(session: Sessions) -> None:
    path = priced(session)
    facts = json.loads((path / "session.json").read_text())
    del facts["closed"]
    (path / "session.json").write_text(json.dumps(facts))
    reader = RunReader(path, 3600.0)
    assert reader.read().paid.held == pytest.approx(13.0 + 10.0), "until device 1 was lost at 12 s"
    append_checked(path / "results.jsonl", json.dumps(_result("c", 2, 14.0, 18.0)))
    run = reader.read_on()
    assert run is not None
    assert run.paid.held == pytest.approx(19.0 + 10.0) and run.paid.busy == pytest.approx(15.0 + 4.0)
    assert run.costs.usd == pytest.approx(29.0)
    assert run.paid == load_run(path, 3600.0).paid


def _result(name: str, iteration: int, start: float, end: float) -> Mapping[str, Any]:
    fields = {"group": "0", "trial": name, "iteration": iteration, "metrics": {"loss": 0.5}}
    return {**fields, "seconds": end - start, "width": 1.0, "devices": [0], "at": ZERO + end}


@pytest.mark.parametrize(
    ("unended", "facts", "said"),
    [
        (False, {"deadline_s": 20.0}, "deadline 20 s: met with 9 s to spare"),
        (False, {"deadline_s": 10.0}, "deadline 10 s: missed by 1 s"),
        (True, {"deadline_s": 20.0}, "deadline 20 s: not met, 1 trial had not ended"),
        (False, {"price_per_device_hour": 1200.0, "budget_usd": 12.5}, "budget $12.50: $2.50 left"),
        (False, {"price_per_device_hour": 1200.0, "budget_usd": 9.0}, "budget $9.00: exceeded by $1.00"),
        # The session that was resumed had 9 dollars left, and has spent 3 of them.
        (False, {"price_per_device_hour": 1200.0, "budget_usd": 9.0, "device_s": 9.0}, "budget $9.00: $6.00 left"),
        (False, {"price_per_device_hour": 1200.0}, "30 device-seconds, $10.00 at $1,200.00 an hour; 50 % of it ran"),
        (False, {}, "30 device-seconds; 50 % of it ran iterations"),
    ],
)
def test_the_report_says_how_it_stood_to_its_goals(
    session: Sessions, capsys: Captured, unended: bool, facts: Mapping[str, float], said: str
) -> None:
    path = priced(session, unended=unended, **facts)
    assert main(["report", str(path)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in "; ".join(page_data([load_run(path)])["runs"][0]["costs"])


def test_a_deadline_is_open_while_trials_run(session: Sessions) -> None:
    run = load_run(priced(session, unended=True, deadline_s=20.0))
    ended = run.costs
    assert (ended.met, ended.slack_s) == (False, pytest.approx(9.0))
    running = Costs(paid=ended.paid, deadline_s=20.0, unended=1, is_running=True)
    assert running.met is None and running.texts[-1] == "deadline 20 s: 9 s left"
    late = Costs(paid=ended.paid, deadline_s=10.0, unended=1, is_running=True)
    assert late.met is False and late.texts[-1] == "deadline 10 s: passed 1 s ago"
    unknown = Costs(paid=Paid(1.0, 1.0), deadline_s=10.0)
    assert unknown.met is None and "does not tell" in unknown.texts[-1]


def test_a_price_can_be_given_to_the_report(session: Sessions, capsys: Captured) -> None:
    path = priced(session, price_per_device_hour=1200.0)
    assert main(["report", str(path), "--price", "2400", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["costs"]["cost_usd"] == pytest.approx(20.0)
    assert [found["cost_usd"] for found in data["trials"]] == pytest.approx([2.5 / 1.5, 2.5 / 1.5, 10.0 / 1.5])
    assert data["groups"][0]["cost_usd"] == pytest.approx(10.0)
    assert undescribed(data["costs"], Costs.as_json) == set()
    assert main(["report", str(path), "--price", "-1"]) == 2
    assert "price=-1.0: must be at least 0" in capsys.readouterr().err


def test_tables_have_the_cost_of_trials_and_groups(session: Sessions, capsys: Captured) -> None:
    path = str(priced(session, price_per_device_hour=1200.0))
    assert main(["report", path]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "c done 1/1 3 5 s $3.33 1/2, x2" in lines or "c done 1/1 3 5 s $3.33 x2" in lines
    assert "sweep 3 3 10 s $5.00 3 done" in lines
    assert main(["report", path, "--columns", "cost,device time"]) == 0
    assert "a done $0.83 2.50 s" in " ".join(capsys.readouterr().out.split())


def test_runs_are_compared_by_their_cost(session: Sessions, capsys: Captured) -> None:
    path, other = priced(session, name="one"), session({}, name="two").close()
    assert main(["report", str(path), str(other), "--price", "1200"]) == 0
    assert "$10.00" in capsys.readouterr().out
    assert main(["report", str(path), str(other), "--price", "1200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["costs"]["cost_usd"] == pytest.approx(10.0)


def test_dataframes_have_device_time_and_cost(session: Sessions) -> None:
    pytest.importorskip("pandas")
    path = priced(session, price_per_device_hour=3600.0)
    table = load(path).dataframe()
    assert list(table["device_seconds"]) == pytest.approx([2.5, 2.5, 10.0])
    assert list(table["cost_usd"]) == pytest.approx([2.5, 2.5, 10.0])
    each = load(path).dataframe("iteration")
    assert list(each["cost_usd"]) == pytest.approx([2.5, 2.5, 10.0])
    assert "cost_usd" not in load(priced(session, name="free")).dataframe().columns


def test_tables_of_an_export_have_them_too(session: Sessions, tmp_path: Path) -> None:
    path = priced(session, price_per_device_hour=3600.0)
    assert main(["export", str(path), "--csv", str(tmp_path / "csv")]) == 0
    for name in ("trials.csv", "iterations.csv"):
        head, first, *_ = (tmp_path / "csv" / name).read_text().splitlines()
        cells = dict(zip(head.split(","), first.split(","), strict=True))
        assert (float(cells["device_seconds"]), float(cells["cost_usd"])) == (2.5, 2.5)


def test_the_page_has_the_cost_of_each_trial(session: Sessions) -> None:
    data = page_data([load_run(priced(session, price_per_device_hour=1200.0))])
    run = data["runs"][0]
    assert (run["cost"], run["price"], run["groups"][0]["device_seconds"]) == ("$10.00", 1200.0, 15.0)
    assert [each["device_seconds"] for each in data["trials"]] == [2.5, 2.5, 10.0]


def test_a_damaged_price_is_none(session: Sessions) -> None:
    assert load_run(priced(session, price_per_device_hour="a lot")).costs.usd is None
    with pytest.raises(InvalidFieldError, match="price=nan"):
        load_run(priced(session, name="other"), float("nan"))


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0.0, "$0.00"), (8.0, "$8.00"), (1234.5, "$1,234.50"), (0.0123, "$0.01"), (0.0012, "$0.0012"), (-2.5, "-$2.50")],
)
def test_dollars(usd: float, text: str) -> None:
    assert dollars(usd) == text


def test_dollars_in_a_column_have_equally_many_decimals() -> None:
    assert dollar_column([0.0, 12.0, 0.004]) == ["$0.00", "$12.00", "$0.00"]
    assert dollar_column([0.04, 0.004]) == ["$0.040", "$0.004"]
    assert dollar_column([0.0004, 0.001]) == ["$0.0004", "$0.0010"]
    assert dollar_column([]) == []


def test_device_time_names_its_unit() -> None:
    texts = [device_time(seconds) for seconds in (1.0, 30.0, 720.0, 11520.0)]
    assert texts == ["1 device-second", "30 device-seconds", "12 device-minutes", "3.2 device-hours"]


def test_the_page_writes_dollars_as_python_does() -> None:
    values = [0.0, 8.0, 1234.5, 0.0123, 0.0012, 0.00099, 1e-6, -2.5, 1e6]
    source = f"{FORMAT_SCRIPT.read_text(encoding='utf-8')}\n"
    source += f"console.log(JSON.stringify({json.dumps(values)}.map(format.dollars)));"
    try:
        run = subprocess.run(["node", "-e", source], capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("node is not installed")
    assert json.loads(run.stdout) == [dollars(value) for value in values]
