"""A sweep over a network like AlexNet on CIFAR-10, by any of eight algorithms.

    python examples/cifar10.py --data DIR                                       # ASHA on Fluid, minutes on two cores
    python examples/cifar10.py --data DIR --algo hyperband --executor tune      # Ray Tune alone, to compare
    python examples/cifar10.py --algo bohb --scale full                         # the paper's setting, on GPUs

See docs/first_sweep.md.
"""

from __future__ import annotations

from models.alexnet import Cifar10
from models.data import CIFAR10
from tuning.command_line import main
from tuning.interruption import exit_status
from tuning.workload import Workload

from fluid import tune

WORKLOAD = Workload(
    name="cifar10",
    title="a network like AlexNet on CIFAR-10",
    trainable=Cifar10,
    data=CIFAR10,
    metric="accuracy",
    mode="max",
    space={
        "lr": tune.loguniform(1e-3, 1.0),
        "momentum": tune.uniform(0.1, 0.9),
        "conv_1": tune.choice([32, 64, 128]),
        "conv_2": tune.choice([64, 128, 256]),
        "dense_1": tune.choice([128, 256, 512, 1024]),
        "dropout_1": tune.uniform(0.01, 0.1),
        "dropout_2": tune.uniform(0.05, 0.2),
    },
    changing=("lr", "momentum", "dropout_1", "dropout_2"),
)

if __name__ == "__main__":
    with exit_status():
        main(WORKLOAD)
