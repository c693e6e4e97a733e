"""A sweep over generative adversarial networks on MNIST, by any of eight algorithms.

    python examples/dcgan.py --data DIR                                       # ASHA on Fluid, minutes on two cores
    python examples/dcgan.py --data DIR --algo hyperband --executor tune      # Ray Tune alone, to compare
    python examples/dcgan.py --algo bohb --scale full                         # the paper's setting, on GPUs

A small classifier of digits scores the generated images. It is trained once and kept in ~/.cache.
See docs/first_sweep.md.
"""

from __future__ import annotations

from models.data import MNIST
from models.gan import Dcgan, train_classifier
from tuning.command_line import main
from tuning.interruption import exit_status
from tuning.workload import Workload

from fluid import tune

WORKLOAD = Workload(
    name="dcgan",
    title="generative adversarial networks on MNIST",
    trainable=Dcgan,
    data=MNIST,
    metric="inception",
    mode="max",
    space={"netG_lr": tune.uniform(1e-4, 5e-4), "netD_lr": tune.uniform(1e-4, 5e-4)},
    changing=("netG_lr", "netD_lr"),
    prepare=lambda folder: {"classifier": train_classifier(folder)},
)

if __name__ == "__main__":
    with exit_status():
        main(WORKLOAD)
