"""A stand-in for ``nvidia-cuda-mps-control``: real processes and a real socket, but no GPU.

It takes ``-f`` and the commands that Fluid gives, and fails as it is told to, by files in the daemon's own folder, or,
for all daemons, in the folder that FAKE_MPS names:

refuses           the daemon says so and ends with status 1
never_answers     the daemon opens no socket
hangs             the daemon takes commands and does not answer
no_server         servers end as soon as they are started
fault             servers are in FAULT, until the next one is started
old               it knows neither the state of servers nor limits, nor "quit -t"
wordy             it answers in other words than usual
no_termination    the front end hangs when it is to end the work of a client
stays             the daemon does not quit
busy              the front end refuses all commands but "quit"; the daemon runs
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def told() -> Path:
    return Path(os.environ["FAKE_MPS"]) if "FAKE_MPS" in os.environ else pipe()


def pipe() -> Path:
    return Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])


def is_told(name: str) -> bool:
    return (told() / name).exists() or (pipe() / name).exists()


def serve(log: Path) -> int:
    """The daemon."""
    print("starting control daemon", flush=True)
    if is_told("refuses"):
        (log / "control.log").write_text("[Control] Failed to start : operation not permitted\n")
        return 1
    (told() / "environment.json").write_text(json.dumps(dict(os.environ)))
    if is_told("never_answers"):
        signal.pause()
    (pipe() / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    servers: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pipe() / "control"))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                line = stream.readline().strip()
                if is_told("hangs"):
                    signal.pause()
                servers = [server for server in servers if server.poll() is None]
                with suppress(OSError):
                    stream.write(answer(line.split(), servers))
                    stream.flush()
            if (line == "quit" and not is_told("stays")) or (
                line.startswith("quit") and not (is_told("stays") or is_told("old"))
            ):
                (log / "control.log").write_text(line)
                for server in servers:
                    server.kill()
                    server.wait()
                return 0


def answer(words: list[str], servers: list[subprocess.Popen[bytes]]) -> str:
    command, *arguments = words
    if command == "quit" and arguments and is_told("old"):
        return "Invalid command quit -t\n"
    if command in ("get_server_status", "set_default_device_pinned_mem_limit") and is_told("old"):
        return f"Invalid command {command}\n"
    if command == "start_server":
        assert arguments == ["-uid", str(os.getuid())]
        for folder in (told(), pipe()):
            (folder / "fault").unlink(missing_ok=True)
        servers.append(subprocess.Popen([sys.executable, __file__, "--server"]))
        if is_told("no_server"):
            servers[-1].kill()
            servers[-1].wait()
        (told() / command).touch()
        return ""
    if command == "get_server_list":
        prefix = "[2026-11-22 10:15:02.123 Control    41] server " if is_told("wordy") else ""
        return "".join(f"{prefix}{server.pid}\n" for server in servers)
    if command == "get_server_status":
        state = "FAULT" if is_told("fault") else "ACTIVE"
        return f"Server state: MPS_SERVER_{state}.\n" if is_told("wordy") else f"{state}\n"
    if command == "get_client_list":
        return f"{os.getpid()}\n"
    if command == "terminate_client":
        with (told() / command).open("a") as file:
            print(*arguments, "alive" if Path("/proc", arguments[1]).exists() else "dead", file=file)
        return ""
    if command in ("set_default_active_thread_percentage", "set_default_device_pinned_mem_limit", "quit"):
        (told() / command).write_text(" ".join(arguments))
        return ""
    return f"Invalid command {command}\n"


def ask() -> int:
    """The front end."""
    for line in sys.stdin:
        if is_told("busy") and not line.startswith("quit"):
            print("temporarily unavailable")
            return 1
        if is_told("no_termination") and line.startswith("terminate_client"):
            signal.pause()
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipe() / "control"))
            except OSError:
                print("Cannot find MPS control daemon process")
                return 1
            connection.sendall(line.encode())
            while data := connection.recv(4096):
                print(data.decode(), end="")
    return 0


def main() -> int:
    if sys.argv[1:] == ["--server"]:
        select.select([], [], [])
    return serve(Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])) if sys.argv[1:] == ["-f"] else ask()


if __name__ == "__main__":
    sys.exit(main())
