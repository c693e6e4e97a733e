"""Successive Halving by hand: one TrialGroup whose best trials are extended from rung to rung.

python examples/successive_halving.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tuning.interruption import exit_status

from fluid import FluidExecutor, Trial, TrialGroup


class LogisticRegression:
    """A linear classifier of two overlapping clouds of points; one iteration is a pass over the points."""

    def setup(self, config: dict[str, Any]) -> None:
        points = random.Random(0)
        self.data = [
            (points.gauss(label, 1.0), points.gauss(-label, 1.0), label) for label in (-1, 1) for _ in range(2_000)
        ]
        self.lr = config["lr"]
        self.weights = [0.0, 0.0, 0.0]

    def step(self) -> dict[str, float]:
        right = 0
        for x, y, label in self.data:
            score = self.weights[0] * x + self.weights[1] * y + self.weights[2]
            right += score * label > 0.0
            if score * label < 1.0:
                for i, feature in enumerate((x, y, 1.0)):
                    self.weights[i] += self.lr * label * feature
        return {"accuracy": right / len(self.data)}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "weights.json").write_text(json.dumps(self.weights))

    def load_checkpoint(self, folder: str) -> None:
        self.weights = json.loads((Path(folder) / "weights.json").read_text())

    def cleanup(self) -> None:
        pass


def main() -> None:
    """Reduces 27 learning rates to the best one."""
    rates = random.Random(1)
    trials = [Trial(LogisticRegression, {"lr": 10 ** rates.uniform(-6, 1)}, budget=2) for _ in range(27)]
    with FluidExecutor() as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials, name="halving"))
        alive = {trial.id: trial for trial in trials}
        for rung in range(4):
            handle.wait()
            last = {result.trial_id: result.metrics["accuracy"] for result in handle.results()}
            best = sorted(alive, key=lambda trial_id: -last[trial_id])
            rate = alive[best[0]].config["lr"]
            print(f"rung {rung}: {len(best)} trials, best accuracy {last[best[0]]:.4f} at lr {rate:.2g}")
            keep = best[: max(1, len(best) // 3)]
            for trial_id in set(alive) - set(keep):
                handle.stop(trial_id)
            alive = {trial_id: alive[trial_id] for trial_id in keep}
            if rung < 3:
                for trial_id in keep:
                    handle.extend(trial_id, 2 * 3 ** (rung + 1) - 2 * 3**rung)
        handle.raise_failures()
        print(f"makespan {handle.makespan:.1f} s; run folder {executor.run_dir}")


if __name__ == "__main__":
    with exit_status():
        main()
