"""A sweep over recurrent language models on WikiText-2, by any of eight algorithms.

    python examples/wlm.py --data DIR                                       # ASHA on Fluid, minutes on two cores
    python examples/wlm.py --data DIR --algo hyperband --executor tune      # Ray Tune alone, to compare
    python examples/wlm.py --algo bohb --scale full                         # the paper's setting, on GPUs

See docs/first_sweep.md.
"""

from __future__ import annotations

from models.data import WIKITEXT2
from models.language import LanguageModel
from tuning.command_line import main
from tuning.interruption import exit_status
from tuning.workload import Workload

from fluid import tune

WORKLOAD = Workload(
    name="wlm",
    title="recurrent language models on WikiText-2",
    trainable=LanguageModel,
    data=WIKITEXT2,
    metric="perplexity",
    mode="min",
    space={
        "lr": tune.uniform(10.0, 30.0),
        "model": tune.choice(["RNN_TANH", "RNN_RELU", "LSTM", "GRU"]),
        "clip": tune.uniform(0.1, 0.5),
        "nlayers": tune.randint(2, 5),
        "nhid": tune.randint(100, 301),
        "emsize": tune.randint(100, 301),
        "dropout": tune.uniform(0.1, 0.5),
        "batch": tune.randint(10, 31),
        "bptt": tune.randint(30, 41),
    },
    changing=("lr", "clip", "dropout"),
)

if __name__ == "__main__":
    with exit_status():
        main(WORKLOAD)
