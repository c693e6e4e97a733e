"""Follows ``results.jsonl`` while its session writes it: each call reads what is new."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from fluid.errors import FluidError
from fluid.results.iterations import ReportedIteration, read_reported
from fluid.results.run_files import RESULTS, entry_of


class ResultsFollower:
    """Reads the results of some groups.

    Args:
        run_dir: the run folder.
        group_ids: the groups.
    """

    def __init__(self, run_dir: Path, group_ids: Collection[str]) -> None:
        self._path = run_dir / RESULTS
        self._groups = frozenset(group_ids)
        #: How the lines of these groups begin. Other lines are skipped unread.
        self._begin = tuple(f'{{"group": {json.dumps(group_id)}, '.encode() for group_id in group_ids)
        #: Bytes read so far, whole lines.
        self._position = 0

    def read_new(self) -> Iterator[ReportedIteration]:
        """Yields the results that were written since the last call; all of them must be taken.

        Raises:
            FluidError: the file was deleted.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            raise FluidError(f"the results are gone: {self._path} was deleted") from None
        with file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # It is being written.
                self._position += len(line)
                if line.startswith(b'{"group": ') and not line.startswith(self._begin):
                    continue
                reported = read_reported(entry_of(line) or {})
                if reported is not None and reported.group_id in self._groups:
                    yield reported
