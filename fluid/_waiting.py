"""Waits in which the main thread hears signals.

Python runs the handler of a signal in the main thread, between two bytecodes. A signal that another thread received, or
that came just before the main thread began to wait, does not wake it: a wait without end would leave Ctrl-C and notices
of preemption unheard. So every wait of unknown length is made of short ones.
"""

from __future__ import annotations

#: Seconds after which a thread that waits runs a few bytecodes.
LOOK_UP_S = 0.5
