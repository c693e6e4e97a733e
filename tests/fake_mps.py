"""A stand-in for ``nvidia-cuda-mps-control``: real processes and a real socket, but no GPU.

It takes ``-f`` and the commands that Fluid gives, and fails as it is told to, by files in the folder that FAKE_MPS
names, without which it is the daemon's own:

refuses           the daemon says so and ends with status 1
never_answers     the daemon opens no socket
hangs             the daemon takes commands and does not answer
no_server         servers end as soon as they are started
fault             servers are in FAULT, until the next one is started
old               it knows neither the state of servers nor limits
stays             the daemon does not quit
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
    return Path(os.environ.get("FAKE_MPS") or os.environ["CUDA_MPS_PIPE_DIRECTORY"])


def is_told(name: str) -> bool:
    return (told() / name).exists()


def serve(pipe: Path, log: Path) -> int:
    """The daemon."""
    print("starting control daemon", flush=True)
    if is_told("refuses"):
        (log / "control.log").write_text("[Control] Failed to start : operation not permitted\n")
        return 1
    (told() / "environment.json").write_text(json.dumps(dict(os.environ)))
    if is_told("never_answers"):
        signal.pause()
    (pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    servers: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pipe / "control"))
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
            if line.startswith("quit") and not is_told("stays"):
                (log / "control.log").write_text(line)
                for server in servers:
                    server.kill()
                    server.wait()
                return 0


def answer(words: list[str], servers: list[subprocess.Popen[bytes]]) -> str:
    command, *arguments = words
    if command in ("get_server_status", "set_default_device_pinned_mem_limit") and is_told("old"):
        return f"Invalid command {command}\n"
    if command == "start_server":
        assert arguments == ["-uid", str(os.getuid())]
        (told() / "fault").unlink(missing_ok=True)
        servers.append(subprocess.Popen([sys.executable, __file__, "--server"]))
        if is_told("no_server"):
            servers[-1].kill()
            servers[-1].wait()
        (told() / command).touch()
        return ""
    if command == "get_server_list":
        return "".join(f"{server.pid}\n" for server in servers)
    if command == "get_server_status":
        return "FAULT\n" if is_told("fault") else "ACTIVE\n"
    if command == "get_client_list":
        return f"{os.getpid()}\n"
    if command in ("set_default_active_thread_percentage", "set_default_device_pinned_mem_limit", "quit"):
        (told() / command).write_text(" ".join(arguments))
        return ""
    return f"Invalid command {command}\n"


def ask(pipe: Path) -> int:
    """The front end."""
    for line in sys.stdin:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipe / "control"))
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
    pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    return serve(pipe, Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])) if sys.argv[1:] == ["-f"] else ask(pipe)


if __name__ == "__main__":
    sys.exit(main())
