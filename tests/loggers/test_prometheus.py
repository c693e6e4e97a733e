"""The page for Prometheus, by HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from stranger_processes import KINDS, strangers_at
from waiting import eventually

import fluid
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.session.listeners import TrialListener
from fluid.session.output import parse_address
from fluid.trialgroup import Search, Trial, TrialGroup

pytestmark = pytest.mark.frameworks("prometheus_client")
PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 10**9):
        if step == config.get("fails_at"):
            raise ValueError("no such luck")
        time.sleep(config.get("seconds", 0.0))
        yield {"loss": config["lr"] / step}


def read(executor: FluidExecutor) -> dict[tuple[str, ...], float]:
    assert executor.metrics_address is not None
    return read_at(executor.metrics_address)


def read_at(address: str) -> dict[tuple[str, ...], float]:
    """The values on the page: by the metric's name and the values of its labels."""
    from prometheus_client.parser import text_string_to_metric_families as families

    with urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    return {(one.name, *one.labels.values()): one.value for family in families(text) for one in family.samples}


def test_metrics_of_a_session(tmp_path: Path) -> None:
    executor = FluidExecutor("local", 1, packing="off", run_dir=tmp_path, metrics_port=0, verbose=0, max_failures=0)
    with executor:
        search = Search("loss", "min", trials=5, extends=True)
        trials = [
            Trial(train, {"lr": 0.5, "fails_at": 2}, 2, trial_id="fails", priority=3),
            Trial(train, {"lr": 1.0}, 1, trial_id="done", priority=2),
            Trial(train, {"lr": 2.0, "seconds": 0.01}, 10**9, trial_id="runs"),
            Trial(train, {"lr": 2.0}, 1, trial_id="waits", priority=0),
        ]
        handle = executor.submit_trialgroup(TrialGroup(trials, "sweep", search=search))
        seen = eventually(lambda: page if ("fluid_packing", "train") in (page := read(executor)) else None)
        assert seen["fluid_trials", "sweep", "PAUSED"] == 1
        assert seen["fluid_trials", "sweep", "FAILED"] == 1
        assert seen["fluid_trials", "sweep", "QUEUED"] == 1
        assert seen["fluid_expected_trials", "sweep"] == 5
        assert seen["fluid_best_value", "sweep", "loss"] <= 1.0
        assert seen["fluid_devices",] == 1 and seen["fluid_devices_busy",] == 1 and seen["fluid_busy_share",] == 1
        assert seen["fluid_device_trials", "0", "localhost", "cpu"] == 1
        assert seen["fluid_iterations_done", "sweep"] >= 1
        assert seen["fluid_session_seconds",] > 0 and seen["fluid_silent_trials",] == 0
        assert 0 < seen["fluid_device_seconds_total",] <= seen["fluid_session_seconds",] + PATIENCE
        assert ("fluid_cost_usd",) not in seen and ("fluid_deadline_seconds",) not in seen
        handle.stop("runs")
        assert handle.wait(PATIENCE)
        address = executor.metrics_address
    with pytest.raises(URLError):
        urlopen(f"http://{address}/metrics", timeout=PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_take_neither_threads_nor_the_page(tmp_path: Path, kind: str) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, metrics_port=0) as executor:
        assert executor.metrics_address is not None
        host, _, port = executor.metrics_address.partition(":")
        before = threading.active_count()
        with strangers_at((host, int(port)), 600, kind):
            begun = time.monotonic()
            for _ in range(3):
                assert read(executor)["fluid_devices",] == 1
            assert time.monotonic() - begun < 5.0
            assert threading.active_count() < before + 100


def test_a_port_that_is_taken_is_refused_at_the_call(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidFieldError, match=r"metrics_port=.*Address already in use"):
            FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, metrics_port=taken.getsockname()[1])
    FluidExecutor("local", 1, run_dir=tmp_path, verbose=0).close()


@pytest.mark.parametrize("port", [-1, 65536, True, 9400.5, "", "web", "127.0.0.1", ":9400", "::1:", [9400]])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with pytest.raises(InvalidFieldError, match="metrics_port"):
        parse_address(port)


def test_it_listens_where_it_is_told(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0, metrics_port="0.0.0.0:0") as executor:
        assert executor.metrics_address is not None and executor.metrics_address.startswith("0.0.0.0:")
        assert read(executor)["fluid_devices",] == 1


def test_a_native_sweep_serves_metrics(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages: list[dict[tuple[str, ...], float]] = []
    reader = threading.Thread(target=lambda: pages.append(read_at(f"127.0.0.1:{port}")))

    class Reads(TrialListener):
        def on_start(self, trial_id: str) -> None:
            reader.start()

    options: dict[str, Any] = {
        "metric": "loss",
        "algorithm": "grid",
        "budget": 100,
        "run_dir": tmp_path,
        "name": "sweep",
    }
    fluid.run(train, {"lr": [1.0], "seconds": 0.02}, metrics_port=port, callbacks=[Reads()], **options)
    reader.join(PATIENCE)
    assert pages[0]["fluid_trials", "sweep", "RUNNING"] == 1


def test_metrics_have_the_cost_the_deadline_and_the_forecast(tmp_path: Path) -> None:
    goals: dict[str, Any] = {"price_per_device_hour": 3600.0, "budget_usd": 1e6, "deadline": "2h"}
    with FluidExecutor("local", 1, run_dir=tmp_path, metrics_port=0, verbose=0, **goals) as executor:
        trials = [Trial(train, {"lr": 1.0, "seconds": 0.05}, 10**4, trial_id="runs")]
        handle = executor.submit_trialgroup(TrialGroup(trials, "sweep"))
        known = ("fluid_forecast_seconds", "sweep", "0.9")
        seen = eventually(lambda: page if known in (page := read(executor)) else None)
        assert seen["fluid_cost_usd",] == pytest.approx(seen["fluid_device_seconds_total",])
        assert seen["fluid_budget_usd",] == 1e6 and 0 < seen["fluid_deadline_seconds",] <= 7200.0
        assert seen["fluid_forecast_seconds", "sweep", "0.5"] <= seen[known]
        handle.stop("runs")


def test_a_port_is_that_of_a_new_executor(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path, verbose=0), pytest.raises(InvalidFieldError, match="metrics_port"):
        fluid.run(train, {"lr": [1.0]}, metric="loss", budget=1, metrics_port=0)
