"""What a script sets before it tunes, as its trials find it under Ray Tune."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import run_script

pytest.importorskip("ray")

pytestmark = pytest.mark.slow


@pytest.mark.ray
def test_trials_find_arguments_settings_and_names_of_the_script(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import json, logging, multiprocessing, sys
        import torch
        from ray.tune import Trainable
        from fluid import FluidExecutor, tune

        def square(x):
            return x * x

        def seen():
            found = {"dtype": str(torch.get_default_dtype()), "argv": sys.argv[1:]}
            for how in ("fork", "spawn"):
                with multiprocessing.get_context(how).Pool(1) as pool:
                    found[how] = pool.map(square, range(3))
            logging.getLogger("my.app").info("trained")
            return found

        class Train(Trainable):
            def step(self):
                return {"x": 1.0, "seen": seen(), "done": True}

            def save_checkpoint(self, folder):
                return {}

        def train(config):
            tune.report({"x": 1.0, "seen": seen()})

        if __name__ == "__main__":
            logging.basicConfig(level=logging.INFO, handlers=[logging.FileHandler("mine.log")])
            torch.set_default_dtype(torch.float64)
            found = {}
            for name, trainable in (("class", Train), ("function", train)):
                with FluidExecutor("local", 1, verbose=0) as executor:
                    results = tune.run(trainable, config={}, num_samples=1, verbose=0, executor=executor)
                    found[name] = [trial.last_result["seen"] for trial in results.trials]
            with open("found.json", "w") as file:
                json.dump(found, file)
        """,
        "--flag",
    )
    expected = [{"dtype": "torch.float64", "argv": ["--flag"], "fork": [0, 1, 4], "spawn": [0, 1, 4]}]
    assert found["class"] == expected
    assert found["function"] == expected
    assert (tmp_path / "mine.log").read_text().count("trained") == 2
