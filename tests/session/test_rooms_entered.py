"""How many modules of Fluid one submit, and one result, enter in the driver: those that a reader of them has to open.

The numbers are limits that are to fall; a feature that is not in use should not be entered.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, threading, time

seen = None


def note(frame, event, argument):
    if event == "call" and seen is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("fluid."):
            seen.add(name)


def train(config):
    for _ in range(3):
        time.sleep(0.2)
        yield {"loss": 1.0}


if __name__ == "__main__":
    threading.setprofile(note)
    sys.setprofile(note)
    from fluid import FluidExecutor, Trial, TrialGroup

    def submit(name):
        return executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=3, trial_id=name)]))

    with FluidExecutor("local", ["cpu:0"], run_dir=sys.argv[1], verbose=0) as executor:
        submit("first").wait()  # Its lane is warm from here on.
        time.sleep(0.5)
        seen = set()
        handle = submit("second")
        while handle.states["second"].value in ("QUEUED", "STARTING"):
            time.sleep(0.002)
        submitted = seen
        seen = set()
        handle.wait()
        print(len(submitted), len(seen))
        seen = None
"""


def test_a_plain_trial_does_not_pass_through_every_room(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "run")]
    counts = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    to_submit, to_report = map(int, counts)
    # Before features were policies, these were 160 and 106.
    assert 20 < to_submit <= 135  # 121 to 133, by whether what the session does at times falls into it.
    assert 10 < to_report <= 100
