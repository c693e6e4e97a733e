"""The backend in processes that are forked from the executor's: they run tasks, or have an executor of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks("joblib", "numpy")
pytest.importorskip("joblib")

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
    import multiprocessing, os, sys, warnings
    import joblib
    import fluid
    import fluid.integrations.joblib

    context = multiprocessing.get_context("fork")

    def squares(send=None):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = joblib.Parallel(n_jobs=2, backend="fluid")(joblib.delayed(pow)(each, 2) for each in range(3))
            processes = joblib.Parallel(n_jobs=2)(joblib.delayed(os.getpid)() for _ in range(4))
        outcome = found, [str(each.message) for each in told if "fluid" in str(each.message).lower()], len({*processes})
        if send is not None:
            send.send(outcome)
        return outcome

    with fluid.FluidExecutor("local", devices=2, verbose=0, packing="off"), joblib.parallel_config("fluid", n_jobs=2):
        print(squares()[0])
        if sys.argv[1] == "pool":
            with context.Pool(1) as pool:
                print(*pool.apply(squares))
        else:
            receive, send = context.Pipe()
            child = context.Process(target=squares, args=(send,))
            child.start()
            print(*(receive.recv() if receive.poll(100) else ["nothing"]))
            child.join(60)
            print(child.exitcode)
        print(squares()[0])  # The parent's executor is not harmed.
"""


@pytest.mark.parametrize("kind", ["pool", "process"])
def test_a_forked_process_gets_its_results(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLUID_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, str(program), kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    first, *middle, last = run.stdout.splitlines()
    assert first == last == "[0, 1, 4]" and run.returncode == 0, run.stderr
    if kind == "pool":
        text = "Fluid-backed parallel loops cannot run in a process of multiprocessing, setting n_jobs=1"
        assert middle == [f"[0, 1, 4] {[text, text]} 1"]
    else:
        assert middle[0].startswith("[0, 1, 4] []") and middle[1] == "0", run.stderr
