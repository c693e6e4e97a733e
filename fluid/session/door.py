"""What an executor offers of its session beside groups: its devices, drains, and what was measured."""

from __future__ import annotations

from fluid.errors import require_integer, require_number
from fluid.measure.profile import Profile
from fluid.resources import Device
from fluid.session.session import Session
from fluid.session.specs import Isolating


class SessionDoor:
    """The part of :class:`fluid.executor.FluidExecutor` that hands requests on to its session."""

    _session: Session

    def add_device(self, device: Device) -> None:
        """Puts a further device to use while trials run.

        Raises:
            InvalidFieldError: the device does not exist, or is in use already.
        """
        self._session.add_device(device)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up: its trials go on elsewhere from their newest checkpoint.

        Raises:
            InvalidFieldError: the device is not in use.
        """
        self._session.remove_device(device_id)

    def drain(self, device: int | Device, deadline_s: float) -> bool:
        """Gives a device up without losing work; waits until it is gone.

        The device takes no new trial. Each trial that runs there is paused at the end of its iteration, saved to disk,
        and goes on elsewhere; no iteration is repeated. States that the device keeps are saved too. At the deadline the
        device is removed as it is: trials that are not saved by then go on from their newest checkpoint.

        Args:
            device: its index, or the device.
            deadline_s: seconds that trials have to be saved. One that cannot be saved runs on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the device is not in use, or the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        index = device.index if isinstance(device, Device) else require_integer("device", device, at_least=0)
        return not self._session.drain(index, require_number("deadline_s", deadline_s, at_least=0.0))

    def drain_all(self, deadline_s: float) -> bool:
        """Saves all trials, so that :meth:`close` loses nothing; waits until they are saved.

        No trial starts any more. Each trial that runs is paused at the end of its iteration and saved to disk.
        :meth:`resume` then goes on with the session and repeats nothing. Further work is refused.

        Args:
            deadline_s: seconds that trials have to be saved. One that cannot be saved runs on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        return not self._session.drain(None, require_number("deadline_s", deadline_s, at_least=0.0))

    @property
    def session(self) -> Session:
        """What runs the trials; for integrations."""
        return self._session

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._session.profile

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return self._session.devices

    @property
    def in_rounds(self) -> bool:
        """Whether all trials advance together, an iteration each in turn."""
        return self._session.in_rounds

    @property
    def isolating(self) -> Isolating:
        """Which trials run in a process that has run no other one, of those that do not say so themselves."""
        return self._session.isolating

    @property
    def max_devices(self) -> int:
        """Most devices that the session may come to hold: those in use, those parked, or ``autoscale`` if more."""
        return self._session.max_devices
