"""The devices that runs of Ray Train within a sweep's trials need, as the trials' lanes say when they get there.

The first trials of a sweep find out. They, and all after them, are then submitted with the devices that it takes.
"""

from __future__ import annotations

from collections import Counter

import ray

from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.private_api import Trial
from fluid.integrations.ray_tune.train.inner_training import DevicesWanted


class InnerNeeds:
    """Answers the trials that ask for devices, and learns from them.

    Args:
        executor: runs them.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        self._executor = executor
        #: Devices of a trial, by the name of its trainable; the fewest where trials differ.
        self._devices: dict[str, int] = {}

    def devices_of(self, trial: Trial) -> int | None:
        """Returns how many devices a trial needs for Ray Train, as far as is known."""
        return self._devices.get(trial.trainable_name)

    def most_at_once(self, trial: Trial) -> int | None:
        """Returns how many such trials can run at once; ``None`` if there is no bound.

        No more are begun, as the workers of a trial that waits for a decision keep their memory.
        """
        devices = self.devices_of(trial)
        if devices is None:
            return None
        return max(1, sum(count // devices for count in self._by_host().values()))

    def answer(self, trial: Trial, held: int, wanted: DevicesWanted) -> int | None:
        """Answers a trial that holds so many devices.

        Returns:
            How many devices it has to be started anew with; ``None`` if it may go on.

        Raises:
            FluidError: there are too few.
        """
        if wanted.devices <= held:
            return None
        most = max(self._by_host().values(), default=0)
        if not wanted.of_ray:
            devices = min(wanted.devices, most)  # Ray has the CPUs; these are the cores that go with them.
        elif wanted.devices <= most:
            devices = wanted.devices
        else:
            self._require_elsewhere(wanted, most)
            return None
        if devices <= held:
            return None
        name = trial.trainable_name
        self._devices[name] = min(devices, self._devices.get(name, devices))
        return devices

    def _require_elsewhere(self, wanted: DevicesWanted, most: int) -> None:
        """Checks that Ray has the devices beside those of the session.

        Raises:
            FluidError: it has not.
        """
        kind, own = wanted.kind.upper(), len(self._executor.devices)
        others = int(ray.cluster_resources().get(kind, 0.0)) - own
        if wanted.devices > others:
            raise FluidError(
                f"{wanted.what} needs {wanted.devices} {kind}s of one machine: Fluid has {own}, of which the largest "
                f"machine has {most}, and the Ray cluster has {max(0, others)} others"
            )

    def _by_host(self) -> Counter[str]:
        return Counter(device.host for device in self._executor.devices)
