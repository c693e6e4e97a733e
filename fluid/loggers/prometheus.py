"""Prometheus: a page of metrics over HTTP, which are read from the session when Prometheus asks for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fluid._imports import try_import
from fluid.errors import FluidError, InvalidFieldError
from fluid.loggers.values import writable
from fluid.processes.http import HttpServer
from fluid.session.output import parse_address
from fluid.session.status import GroupStatus, Status

with try_import("prometheus_client", extra="prometheus") as _imports:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

#: Longest that a request may take to arrive, and its answer to be taken, seconds.
_REQUEST_S = 10.0
_QUEUED, _FAILED, _RUNNING = "QUEUED", "FAILED", "RUNNING"


class MetricsServer:
    """Serves the metrics until it is closed.

    Args:
        port: a port of the loopback interface, 0 for any that is free, or ``address:port``.
        status: gives the session's status; raises a FluidError once it has ended.
        backlog: gives the number of results that loggers were not told yet.

    Attributes:
        address: where it listens: ``127.0.0.1:9400``.

    Raises:
        InvalidFieldError: the port is no port, or is taken.
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(self, port: int | str, status: Callable[[], Status], backlog: Callable[[], int]) -> None:
        host, number = parse_address(port)
        _imports.check()
        registry = prometheus_client.CollectorRegistry()
        registry.register(SessionCollector(status, backlog))
        try:
            self._server = HttpServer((host, number), _handler_for(registry), "the port for metrics", _REQUEST_S)
        except OSError as error:
            raise InvalidFieldError(
                "metrics_port", port, f"cannot be listened on: {error.strerror or error}"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="fluid-metrics", daemon=True)
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_port}"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler_for(registry: Any) -> Any:
    """Returns the handler of requests. Every client may ask: one that has asked is no stranger."""

    class MetricsRequests(prometheus_client.MetricsHandler.factory(registry)):  # type: ignore[misc]
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            self.server.strangers.remove(self.connection)
            super().do_GET()

    return MetricsRequests


class SessionCollector:
    """Makes Prometheus' metrics of a session's status."""

    def __init__(self, status: Callable[[], Status], backlog: Callable[[], int]) -> None:
        self._status = status
        self._backlog = backlog

    def collect(self) -> Iterator[Any]:
        """Yields the metrics; none once the session has ended."""
        try:
            status = self._status()
        except FluidError:
            return
        yield _metric("fluid_session_seconds", "Seconds since the session began.", [((), status.at)])
        yield from _of_costs(status)
        yield from _of_groups(status.groups)
        yield from _of_devices(status)
        yield _metric(
            "fluid_packing",
            "Trials that are put on one device at most, as measured, by profile key.",
            [((key,), number) for key, number in status.packing.items()],
            "key",
        )
        yield _metric(
            "fluid_packing_overhead",
            "Measured overhead of packing, by profile key.",
            [((key,), alpha) for key, alpha in status.alpha.items()],
            "key",
        )
        yield _metric(
            "fluid_fused_rows",
            "Trials that are fused at most, as measured, by profile key.",
            [((key,), rows) for key, (rows, _) in status.fused.items()],
            "key",
        )
        yield _metric(
            "fluid_fused_gain",
            "Iterations per second of so many fused trials, relative to one trial alone, by profile key.",
            [((key,), gain) for key, (_, gain) in status.fused.items()],
            "key",
        )
        yield _metric("fluid_silent_trials", "Trials that have long given no result.", [((), len(status.silent))])
        yield _metric("fluid_unlogged_results", "Results that loggers were not told yet.", [((), self._backlog())])


def _of_groups(groups: tuple[GroupStatus, ...]) -> Iterator[Any]:
    trials: Counter[tuple[str, str]] = Counter()
    done: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    etas, bests = dict[str, float](), dict[tuple[str, str], float]()
    forecasts = dict[tuple[str, str], float]()
    for group in groups:  # Several may have one name.
        for odds, seconds in () if group.forecast is None else group.forecast.seconds.items():
            place = (group.name, f"{odds:g}")
            forecasts[place] = max(seconds, forecasts.get(place, 0.0))
        trials.update({(group.name, state): number for state, number in group.trials.items()})
        trials.update({(group.name, state): 0 for state in (_QUEUED, _RUNNING, _FAILED)})
        done[group.name] += group.iterations_done
        wanted[group.name] += group.iterations
        expected[group.name] += group.expected or sum(group.trials.values())
        if group.eta is not None:
            etas[group.name] = max(group.eta, etas.get(group.name, 0.0))
        if group.best is not None:
            bests[group.name, group.best.metric] = group.best.value
    text = "How urgent the group is, and whose it is; the owner is empty where it did not say."
    owners = {(group.name, group.owner or ""): group.priority for group in groups}
    yield _metric("fluid_group_priority", text, list(owners.items()), "group", "owner")
    text = "Whether trials of the group wait for devices that there are not."
    awaiting = Counter({group.name: 0 for group in groups})
    awaiting.update(group.name for group in groups if group.awaited)
    yield _metric("fluid_group_awaits_devices", text, _by_group(awaiting), "group")
    text = "Trials by group and state: queued, running, failed and so on."
    yield _metric("fluid_trials", text, list(trials.items()), "group", "state")
    text = "Trials that there will be, where the search says so, else that there are."
    yield _metric("fluid_expected_trials", text, _by_group(expected), "group")
    yield _metric("fluid_iterations_done", "Iterations done.", _by_group(done), "group")
    text = "Iterations done and to do, of a search as predicted; 0 if unknown."
    yield _metric("fluid_iterations_wanted", text, _by_group(wanted), "group")
    text = "Predicted seconds until all trials of the group have ended; missing while unknown."
    yield _metric("fluid_eta_seconds", text, _by_group(etas), "group")
    text = "Seconds until the group has ended with these odds; missing while unknown."
    yield _metric("fluid_forecast_seconds", text, list(forecasts.items()), "group", "odds")
    yield _metric("fluid_best_value", "The best value so far.", list(bests.items()), "group", "metric")


def _of_costs(status: Status) -> Iterator[Any]:
    goal = status.goal
    if goal is None:
        return
    text = "Seconds for which devices were held, added up over the devices."
    held = CounterMetricFamily("fluid_device_seconds", text)
    held.add_metric((), goal.device_seconds)
    yield held
    if goal.spent_usd is not None:
        yield _metric("fluid_cost_usd", "US dollars for the devices held so far.", [((), goal.spent_usd)])
    if goal.budget_usd is not None:
        yield _metric("fluid_budget_usd", "Most US dollars to spend.", [((), goal.budget_usd)])
    if goal.deadline_s is not None:
        yield _metric("fluid_deadline_seconds", "Seconds left until the deadline.", [((), goal.deadline_s)])


def _by_group(values: Any) -> list[tuple[tuple[str, ...], float]]:
    return [((name,), value) for name, value in values.items()]


def _of_devices(status: Status) -> Iterator[Any]:
    places = [((str(seen.device_id), seen.kind, seen.host), seen) for seen in status.devices]
    labels = ("device", "kind", "host")
    text = "Trials that run on each device."
    yield _metric("fluid_device_trials", text, [(place, len(seen.residents)) for place, seen in places], *labels)
    text = "Worker processes of each device."
    yield _metric("fluid_device_lanes", text, [(place, seen.lanes) for place, seen in places], *labels)
    busy = sum(bool(seen.residents) for seen in status.devices)
    yield _metric("fluid_devices", "Devices in use.", [((), len(status.devices))])
    yield _metric("fluid_devices_busy", "Devices on which a trial runs.", [((), busy)])
    share = busy / len(status.devices) if status.devices else 0.0
    yield _metric("fluid_busy_share", "Share of the devices on which a trial runs.", [((), share)])
    yield _metric("fluid_devices_asked", "Devices that were asked for and have not come.", [((), status.asked)])


def _metric(name: str, text: str, values: list[tuple[tuple[str, ...], float]], *labels: str) -> Any:
    family = GaugeMetricFamily(name, text, labels=labels)
    for place, value in values:
        family.add_metric([writable(name) for name in place], value)
    return family
