"""What Fluid's processes on Ray import, where the driver's working directory has modules of any name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_drive import ROOT

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = """
import json, os, sys
import ray
from fluid.backends.ray.remote import call
from fluid.processes.interpreters import import_path

if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    print(json.dumps([ray.get(call(import_path)), import_path()]))
"""


@pytest.mark.parametrize("is_imported_from", [False, True])
def test_the_working_directory_is_the_last_place_unless_the_driver_imports_from_it(
    tmp_path: Path, ray_folder: str, is_imported_from: bool
) -> None:
    here, script = tmp_path / "here", tmp_path / "script" / "driver.py"
    for folder in (here, script.parent):
        folder.mkdir()
    (here / "fluid.py").write_text("raise SystemExit('a module of the working directory was imported')")
    script.write_text(SCRIPT, encoding="utf-8")
    places = (ROOT, str(here)) if is_imported_from else (ROOT,)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "RAY_TMPDIR": ray_folder}
    env.pop("RAY_ADDRESS", None)
    if is_imported_from:  # Ray puts it first in any case.
        (here / "fluid.py").unlink()
    ran = subprocess.run([sys.executable, str(script)], cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    there, of_driver = json.loads(ran.stdout.splitlines()[-1])
    assert set(of_driver) <= set(there)
    assert (there[-1] == str(here)) is not is_imported_from
