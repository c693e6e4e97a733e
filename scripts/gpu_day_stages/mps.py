"""The MPS daemon: its start, two clients and what NVML lists, the kill of one, a fault, a restart, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fluid.gpu.nvml import process_bytes, processes_on
from fluid.mps import MpsDaemon, MpsError
from gpu_day_stages.place import Figures, Place, seconds_of

_CLIENT = Path(__file__).with_name("mps_client.py")
#: Stands for the GPU if the control program is a stand-in.
_NO_GPU = "GPU-0"
#: Longest wait for a client, seconds.
_PATIENCE_S = 60.0


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
        figures["alone_client"] = _ended(clients.start_computing(1.0))
        _kill_one_of_two(daemon, clients, figures)
        _fault_beside_another(place, daemon, clients, figures)
        figures["restart_s"] = seconds_of(daemon.restart)
        figures["client_after_restart"] = _ended(clients.start_computing(1.0))
        begun = time.perf_counter()
    figures["end_s"] = time.perf_counter() - begun


def _ended(client: subprocess.Popen[str]) -> str:
    """The end of a client's output, once it has ended."""
    return client.communicate(timeout=_PATIENCE_S)[0].strip()[-500:] or f"status {client.returncode}"


def _kill_one_of_two(daemon: MpsDaemon, clients: Clients, figures: Figures) -> None:
    one, other = clients.start_computing(20.0), clients.start_computing(6.0)
    figures["client_pids"] = [one.pid, other.pid]
    figures.attempt("listed_by_mps", daemon.clients)
    figures.attempt("servers", daemon.servers)
    figures.attempt("listed_by_nvml", lambda: _listed(daemon.devices[0]))
    figures["bytes_by_nvml"] = [process_bytes(daemon.devices[0], client.pid) for client in (one, other)]
    one.send_signal(signal.SIGKILL)
    one.communicate(timeout=_PATIENCE_S)
    figures["neighbour_of_a_killed_client"] = _ended(other)
    figures["problem_after_a_kill"] = daemon.problem()


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
