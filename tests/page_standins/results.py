# needs: pandas
"""What the fragment of docs/results.md uses without defining it: two runs."""

import fluid
from fluid.search import uniform


def train(config):
    for step in range(1, 4):
        yield {"loss": config["x"] + 1.0 / step}


for name in ("asha", "random"):
    space = {"x": uniform(0.0, 1.0)}
    fluid.run(train, space, metric="loss", samples=3, budget=3, algorithm=name, run_dir=f"runs/{name}")
