"""The MPS daemon: its start and words, two clients and what NVML lists, their ends, a fault, a restart, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fluid.gpu.mps_control import PIPE_VARIABLE, Control, search_paths
from fluid.gpu.nvml import process_bytes, processes_on
from fluid.mps import MpsDaemon, MpsError
from gpu_day_stages.place import Place, seconds_of
from gpu_day_stages.results import Figures

_CLIENT = Path(__file__).with_name("mps_client.py")
#: Stands for the GPU if the control program is a stand-in.
_NO_GPU = "GPU-0"
#: Longest wait for a client, seconds.
_PATIENCE_S = 20.0
#: Longest wait for an answer of the daemon, seconds.
_ANSWER_S = 5.0


class Clients:
    """Makes clients of a daemon.

    Args:
        place: the GPU.
        daemon: the daemon.
    """

    def __init__(self, place: Place, daemon: MpsDaemon) -> None:
        self._place, self._daemon = place, daemon

    def start(self, what: str) -> subprocess.Popen[str]:
        """Starts a client."""
        return subprocess.Popen(
            [sys.executable, str(_CLIENT), self._place.kind, what],
            env={**os.environ, **self._daemon.lane_environment(self._daemon.devices[0])},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start_computing(self, seconds: float) -> subprocess.Popen[str]:
        """Starts a client that computes for so long on a GPU; returns once it does."""
        client = self.start(str(seconds if self._place.gpus else 0.3))
        assert client.stdout is not None
        line = client.stdout.readline()
        if line.strip() != "up":
            raise RuntimeError(f"a client did not start: {line}{client.communicate(timeout=_PATIENCE_S)[0][-500:]}")
        return client


def mps(place: Place, figures: Figures) -> None:
    """Records the figures."""
    begun = time.perf_counter()
    try:
        daemon = MpsDaemon([place.gpus[0] if place.gpus else _NO_GPU], program=place.mps_program)
    except MpsError as error:
        figures["not_possible"] = str(error)
        return
    figures["daemon_start_s"] = time.perf_counter() - begun
    with daemon:
        clients = Clients(place, daemon)
        figures.attempt("words, idle", lambda: _words(daemon))
        figures["alone_client"] = _ended(clients.start_computing(1.0))
        _kill_one_of_two(daemon, clients, figures)
        _end_one_of_two(place, daemon, clients, figures)
        _fault_beside_another(place, daemon, clients, figures)
        figures["restart_s"] = seconds_of(daemon.restart)
        figures["client_after_restart"] = _ended(clients.start_computing(1.0))
        begun = time.perf_counter()
    figures["end_s"] = time.perf_counter() - begun


def _ended(client: subprocess.Popen[str]) -> str:
    """The end of a client's output, once it has ended; it is killed if that takes too long."""
    try:
        return client.communicate(timeout=_PATIENCE_S)[0].strip()[-500:] or f"status {client.returncode}"
    except subprocess.TimeoutExpired:
        client.kill()
        return f"did not end: {client.communicate()[0].strip()[-400:]}"


def _kill_one_of_two(daemon: MpsDaemon, clients: Clients, figures: Figures) -> None:
    one, other = clients.start_computing(20.0), clients.start_computing(6.0)
    figures["client_pids"] = [one.pid, other.pid]
    figures.attempt("listed_by_mps", daemon.clients)
    figures.attempt("servers", daemon.servers)
    figures.attempt("listed_by_nvml", lambda: _listed(daemon.devices[0]))
    figures["bytes_by_nvml"] = [process_bytes(daemon.devices[0], client.pid) for client in (one, other)]
    figures.attempt("words, two clients", lambda: _words(daemon))
    one.send_signal(signal.SIGKILL)
    one.communicate(timeout=_PATIENCE_S)
    figures["neighbour_of_a_killed_client"] = _ended(other)
    figures["problem_after_a_kill"] = daemon.problem()


def _end_one_of_two(place: Place, daemon: MpsDaemon, clients: Clients, figures: Figures) -> None:
    """As Fluid ends a lane that hangs: the daemon ends its work on the GPU first."""
    one, other = clients.start_computing(20.0), clients.start_computing(3.0)
    figures.attempt("terminate_client_s", lambda: seconds_of(lambda: _control(daemon).terminate_client(one.pid)))
    if not place.gpus:
        one.kill()
    figures["terminated_client"] = _ended(one)
    figures["neighbour_of_a_terminated_client"] = _ended(other)


def _control(daemon: MpsDaemon) -> Control:
    environment = {**os.environ, **search_paths(daemon.program, os.environ), PIPE_VARIABLE: daemon.pipe_folder}
    return Control(daemon.program, environment, _ANSWER_S)


def _words(daemon: MpsDaemon) -> dict[str, Any]:
    """What the daemon says, word for word, and what Fluid makes of it."""
    control, said = _control(daemon), dict[str, Any]()
    said["get_server_list"] = control.query("get_server_list")
    for server in said["get_server_list"].split()[:1]:
        for command in ("get_server_status", "get_client_list"):
            said[command] = control.query(f"{command} {server}")
    return {**said, "as read": str((daemon.servers(), daemon.clients(), daemon.problem()))}


def _listed(gpu: str) -> Any:
    return [tuple(process) for process in processes_on(gpu) or ()]


def _fault_beside_another(place: Place, daemon: MpsDaemon, clients: Clients, figures: Figures) -> None:
    neighbour = clients.start_computing(6.0)
    begun = time.perf_counter()
    figures["faulting_client"] = _ended(clients.start("fault"))
    figures["neighbour_of_a_fault"] = _ended(neighbour)
    states = []
    for _ in range(6):
        states.append((round(time.perf_counter() - begun, 2), daemon.problem()))
        if states[-1][1]:
            break
        time.sleep(0.3 if place.gpus else 0.0)
    figures["problem_after_a_fault"] = states
    figures.attempt("words, after a fault", lambda: _words(daemon))
