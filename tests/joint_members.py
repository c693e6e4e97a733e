"""Members of a shared folder, for tests: as threads of this process, or as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fluid
from fluid.joint.membership import MEMBERS


def slow(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Counts, an iteration in some hundredths of a second; goes on from what it saved."""
    x, count = float(config.get("x", 0.0)), state or 0
    while True:
        time.sleep(config.get("seconds", 0.02))
        count += 1
        yield {"loss": x + 1.0 / count, "pid": os.getpid()}, count


def options_of(shared: Path, **more: Any) -> dict[str, Any]:
    """What members are made with."""
    return {"backend": "local", "devices": 1, "run_dir": shared, "join": True, "verbose": 0, "spare_lanes": 0, **more}


def together(*programs: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Runs programs in threads; returns what each returned, or raised."""
    found: list[Any] = [TimeoutError()] * len(programs)

    def run(place: int) -> None:
        try:
            found[place] = programs[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(programs))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return found


def start(folder: Path, text: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a member as a process of its own, in a session of its own: a script, in which ``shared`` is the folder.

    What the script puts into ``found`` is printed as it ends.
    """
    script = folder / "member.py"
    body = f"""
        import json, os, signal, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        import fluid
        import fluid.joint.membership as membership
        from fluid import FluidExecutor, Trial, TrialGroup
        from fluid.search import uniform
        from joint_members import *

        membership.LEASE_S = 4.0
        shared, found = Path({str(folder / "shared")!r}), None
    """
    whole = textwrap.dedent(body) + textwrap.dedent(text) + "\nprint(json.dumps(found))\n"
    if not script.exists() or script.read_text() != whole:
        script.write_text(whole)
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(member: subprocess.Popen[str], timeout: float = 60.0) -> Any:
    """What a member has found, once it has ended well."""
    out, err = member.communicate(timeout=timeout)
    assert member.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def folders(shared: Path) -> list[Path]:
    """The members' run folders."""
    return sorted((shared / MEMBERS).iterdir())


def told(folder: Path) -> list[tuple[str, int]]:
    """The iterations in a run folder, in order."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [(line["trial"], line["iteration"]) for line in lines]


def content(folder: Path) -> dict[str, tuple[str, tuple[tuple[int, float], ...]]]:
    """How each trial of a run folder has ended, and what it reported."""
    return {
        trial.trial_id: (trial.state, tuple((one.iteration, one.metrics["loss"]) for one in trial.results))
        for run in [fluid.load(folder)]
        for trial in run.trials
    }


def require_alike(shared: Path, members: int) -> dict[str, Any]:
    """Checks that the members' run folders hold the same, each iteration once; returns that."""
    found = folders(shared)
    assert len(found) == members
    first = content(found[0])
    for folder in found:
        assert content(folder) == first, folder
        lines = told(folder)
        assert len(lines) == len(set(lines)), folder
        assert lines == told(found[0])
    return first
