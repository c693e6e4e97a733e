# needs: pandas
"""What the fragment of docs/results.md uses without defining it: two runs."""

import fluid
from fluid.search import uniform


def train(config):
    for step in range(1, 4):
        yield {"loss": config["x"] + 1.0 / step}


for algorithm in ("asha", "random"):
    fluid.run(
        train, {"x": uniform(0.0, 1.0)}, metric="loss", samples=3, budget=3, algorithm=algorithm, run_dir=f"runs/{algorithm}"
    )
