"""The program of :mod:`fluid.integrations.comparing.playing`: plays the sweeps that come on stdin, until that ends."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import suppress
from typing import Any

from fluid.errors import MissingDependencyError
from fluid.integrations.comparing.playing import Unplayed


def _answer(play: Any, *arguments: Any) -> Any:
    try:
        return play(*arguments)
    except Exception as error:
        traceback.print_exc()  # To the log, which the message of the problem names.
        is_missing = isinstance(error, MissingDependencyError)
        return Unplayed(str(error) if is_missing else f"{type(error).__name__}: {error}", is_missing)


def main() -> None:
    """Plays them; what libraries print goes to the log, not between the answers."""
    with os.fdopen(os.dup(1), "wb") as answers, suppress(EOFError):
        os.dup2(2, 1)
        while True:
            pickle.dump(_answer(*pickle.load(sys.stdin.buffer)), answers)
            answers.flush()


if __name__ == "__main__":
    main()
