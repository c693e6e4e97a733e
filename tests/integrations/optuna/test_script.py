"""What a script sets before it optimizes, as objectives find it, and where their log records go."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import run_script

pytest.importorskip("optuna")

pytestmark = pytest.mark.slow


def test_objectives_find_what_the_script_has_set_and_log_to_its_handlers(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import json, logging, multiprocessing, sys, warnings
        import numpy, optuna
        from fluid import FluidExecutor
        from fluid.integrations.optuna import optimize

        def square(x):
            return x * x

        def raises():
            try:
                warnings.warn("doubtful", RuntimeWarning)
            except RuntimeWarning:
                return True
            return False

        def seen():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                squares = pool.map(square, range(3))
            return {
                "divide": numpy.geterr()["divide"],
                "argv": sys.argv[1:],
                "optuna": logging.getLogger("optuna").level,
                "raises": raises(),
                "squares": squares,
            }

        def objective(trial):
            x = trial.suggest_float("x", 0, 1)
            logging.getLogger("my.app").info("training with x=%.2f", x)
            trial.set_user_attr("seen", seen())
            return x

        def run(how):
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
            how(study, objective, n_trials=2, n_jobs=1)
            return [trial.user_attrs["seen"] for trial in study.trials]

        if __name__ == "__main__":
            logging.basicConfig(level=logging.INFO, handlers=[logging.FileHandler("mine.log")])
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            numpy.seterr(all="raise")
            warnings.simplefilter("error", RuntimeWarning)
            alone = run(lambda study, *args, **options: study.optimize(*args, **options))
            with FluidExecutor("local", 1, verbose=0) as executor:
                here = run(optimize)
            with open("found.json", "w") as file:
                json.dump({"alone": alone, "here": here}, file)
        """,
        "--flag",
    )
    assert found["here"] == found["alone"]
    assert found["alone"][0]["argv"] == ["--flag"] and found["alone"][0]["divide"] == "raise"
    assert found["alone"][0]["optuna"] == 40 and found["alone"][0]["raises"]
    # Both draw the same values, and so log the same.
    lines = (tmp_path / "mine.log").read_text().splitlines()
    assert len(lines) == 4 and lines[:2] == lines[2:]
