"""Scripts of their own, which tests write, run and look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 180.0


def run_script(folder: Path, text: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Runs a script in a folder, as its user would.

    Returns:
        What it has written to ``found.json``; ``stdout`` and ``stderr`` have its output.
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    known = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "FLUID_RUNS": str(folder / "runs"),
        **variables,
    }
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    written = folder / "found.json"
    found = json.loads(written.read_text()) if written.exists() else {}
    return {**found, "stdout": done.stdout, "stderr": done.stderr}
