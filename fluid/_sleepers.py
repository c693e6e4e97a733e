"""Tells threads that sleep, and so wait for something else than a session, from those that think."""

from __future__ import annotations

from fluid._clock import MonotonicClock, ThreadState, thread_state

#: Seconds between two looks at these threads, and how many looks in a row have to find them asleep.
LOOK_S, _LOOKS = 0.02, 8
#: Most of a processor that a thread uses which only looks, every now and then, how things stand.
_IDLE_SHARE = 0.05


class Sleepers:
    """Follows some threads, look by look."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.restart()

    def restart(self) -> None:
        """A thread acts that did not, or asks for something: it thinks until it was seen to sleep."""
        self._since: float | None = None
        self._looked_at: float | None = None
        self._looks = 0
        #: CPU seconds that each thread had used then.
        self._used: dict[int, float] = {}

    def look(self, threads: set[int], seconds: float) -> tuple[set[int], bool]:
        """Looks at these threads, unless it is too early to look again.

        Args:
            threads: by their identifiers.
            seconds: how long they have to sleep.

        Returns:
            Those that have ended, and whether all others have slept for so many seconds, by all looks so far.
        """
        now = self._clock.now()
        if self._looked_at is None or now < self._looked_at + LOOK_S:  # Most act for less than that.
            self._looked_at = now if self._looked_at is None else self._looked_at
            return set(), False
        self._looked_at = now
        states = {thread: thread_state(thread) for thread in threads}
        alive = {thread: state for thread, state in states.items() if state is not None}
        since = self._since
        if since is None or any(self._thinks(thread, state, now - since) for thread, state in alive.items()):
            self._since = since = now
            self._looks = 0
            self._used = {thread: state.seconds for thread, state in alive.items()}
        self._looks += 1
        return threads - alive.keys(), self._looks >= _LOOKS and now - since >= seconds

    def _thinks(self, thread: int, state: ThreadState, seconds: float) -> bool:
        before = self._used.get(thread)
        return not state.sleeps or before is None or state.seconds - before > _IDLE_SHARE * max(seconds, LOOK_S)
