"""What the fragments of docs/sweeps.md use without defining it."""

import atexit
import time

import fluid
from fluid.search import loguniform


def train(config, state):
    step, loss = (0, 1.0) if state is None else state
    while True:
        rate = config["lr"].at(step) if hasattr(config["lr"], "at") else config["lr"]
        step, loss = step + 1, 0.9 * loss + 0.1 * abs(rate - 0.03)
        yield {"loss": loss}, (step, loss)


def slow(config, state):
    for outcome in train(config, state):
        time.sleep(0.02)  # A fork is asked for while it runs.
        yield outcome


space = {"lr": loguniform(1e-4, 1.0)}
executor = fluid.FluidExecutor(devices=2, verbose=0)
atexit.register(executor.close)
handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(slow, {"lr": 0.1}, budget=9, trial_id="a")]))
