"""Damages every file of a run folder in many ways, and checks that no reader makes something else of it silently.

    python benchmarks/damaged_folders.py [--flips 200] [--quick] [--resumes 10] [--seed 1] [--json FILE]

A session runs on this machine, with a logger and a price; its folder is copied in the middle, as a killed driver
leaves it, and at the end. Each file that ``fluid.load``, ``fluid report``, ``fluid why`` or a resume reads is then
damaged in a copy: single bits are flipped, the end is cut off, blocks are zeroed, bytes are taken out, and lines are
swapped, doubled and dropped. Of each damage, three readers read the folder: ``fluid.load``; ``fluid report --json`` and
``fluid why --json``; and the part of ``FluidExecutor.resume`` that reads. What counts is what becomes of it:

    same      the reader makes of the folder what it makes of the undamaged one
    told      it makes something else of it, and says so: in the notes, or in the log of a resume
    refused   it raises a FluidError
    silent    it makes something else of it without a word
    traceback it raises another exception

The last two are to be 0. Files of the killed session are not cut at their ends, as a crash may leave them so.
``--resumes`` resumes so many damaged folders of the killed session to their end:
what is reported then is compared with what an undisturbed session reports.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fluid
from fluid import FluidExecutor, Trial, TrialGroup, TrialListener
from fluid.errors import FluidError
from fluid.loggers.sink import read_progress
from fluid.reports.run.loader import load_run
from fluid.reports.tables.run import as_json as report_json
from fluid.reports.tables.why import as_json as why_json
from fluid.session.folder.resume import read_session

FILES = (
    *("results.jsonl", "journal.jsonl", "trials.jsonl", "payloads.pkl"),
    *("session.json", "profile.json", "forecasts.jsonl", "loggers.jsonl"),
)
READERS = ("load", "report", "resume")
OUTCOMES = ("same", "told", "refused", "silent", "traceback")
#: What sets the trials apart, by their ids, and their iterations.
CONFIGS = {f"t{number}": 0.1 + number / 8 for number in range(6)}
_ITERATIONS = 24


class Chain:
    """Each value follows from all before it, so that a state or a config that is not right shows."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.value, self.count = config, 0.0, 0

    def step(self) -> dict[str, Any]:
        time.sleep(self.config["seconds"])
        self.count += 1
        self.value = chained(self.value, self.config["x"], self.count)
        return {"loss": self.value, "count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "state.json").write_text(json.dumps([self.value, self.count]))

    def load_checkpoint(self, folder: str) -> None:
        self.value, self.count = json.loads(Path(folder, "state.json").read_text())


def chained(value: float, x: float, count: int) -> float:
    """The value that follows."""
    return (3.7 * value + x * count) % 1.0


def expected(x: float) -> list[float]:
    """The values of a trial."""
    found = [0.0]
    for count in range(1, _ITERATIONS + 1):
        found.append(chained(found[-1], x, count))
    return found[1:]


class _Deaf(TrialListener):
    """A logger whose progress is noted, as it does not begin anew."""


class _Copier(TrialListener):
    """Copies the run folder in the middle of the session."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder, self._target, self._heard = folder, target, 0

    def on_result(self, result: Any) -> None:
        self._heard += 1
        if self._heard == len(CONFIGS) * _ITERATIONS // 2:
            shutil.copytree(self._folder, self._target)


def make_folders(place: Path, seconds: float = 0.05) -> dict[str, Path]:
    """Runs a session; returns its folder as it was in the middle, and at the end."""
    ended, killed = place / "ended", place / "killed"
    trials = [Trial(Chain, {"x": x, "seconds": seconds}, _ITERATIONS, trial_id=name) for name, x in CONFIGS.items()]
    options: dict[str, Any] = {"price_per_device_hour": 2.0, "keep": "last", "loggers": [_Deaf()]}
    with FluidExecutor("local", devices=2, run_dir=ended, verbose=0, **options) as executor:
        group = TrialGroup(trials, "chains", search=fluid.Search("loss", "min", trials=len(CONFIGS)))
        assert executor.submit_trialgroup(group, _Copier(ended, killed)).wait()
    return {"ended": ended, "killed": killed}


# -- damages -----------------------------------------------------------------------------------------------------------


def damages(content: bytes, flips: int, draws: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damages of a file, each with its kind. A "cut" is what a crash may leave: half a line, or zeros at the end."""
    size, others = len(content), max(2, flips // 8)
    for _ in range(flips):
        flipped = bytearray(content)
        flipped[draws.randrange(size)] ^= 1 << draws.randrange(8)
        yield "flip", bytes(flipped)
    for _ in range(others):
        start, length = draws.randrange(size), draws.choice([1, 2, 16, 64, 512])
        yield "cut", content[:start]
        end = min(size, start + length)
        if any(content[start:end]):
            yield "zeros" if end < size else "cut", content[:start] + bytes(end - start) + content[end:]
        yield "hole" if end < size else "cut", content[:start] + content[end:]
        yield "doubled block", content[:end] + content[start:]
    lines = content.splitlines(keepends=True)
    for _ in range(others if len(lines) > 2 else 0):
        one, other = sorted(draws.sample(range(len(lines)), 2))
        swapped = [*lines[:one], lines[other], *lines[one + 1 : other], lines[one], *lines[other + 1 :]]
        yield "swapped lines", b"".join(swapped)
        yield "doubled line", b"".join([*lines[: one + 1], *lines[one:]])
        yield "dropped line", b"".join([*lines[:one], *lines[one + 1 :]])
        yield "line elsewhere", b"".join([*lines[:one], *lines[one + 1 : other + 1], lines[one], *lines[other + 1 :]])


# -- readers -----------------------------------------------------------------------------------------------------------


class _Log(logging.Handler):
    """Keeps the warnings of Fluid."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def read_load(folder: Path) -> tuple[str, list[str]]:
    """What ``fluid.load`` makes of a folder, as text, and what it says."""
    result = fluid.load(folder)
    trials = [
        (trial.trial_id, trial.group, trial.state, dict(trial.config), trial.seeds, trial.failure, each)
        for trial in result.trials
        for each in [[(r.iteration, r.metrics, r.seconds, r.width, r.device_ids, r.rows) for r in trial.results]]
    ]
    return repr((result.name, result.state, result.metric, result.mode, trials)), list(result.notes)


def read_report(folder: Path) -> tuple[str, list[str]]:
    """What ``fluid report --json`` and ``fluid why --json`` print, and their notes."""
    run = load_run(folder)
    content = report_json(run)
    notes = content.pop("notes")
    content["run"] = ""
    return json.dumps([content, why_json(run, list(run.trials))], default=repr).replace(str(folder), ""), notes


def read_resume(folder: Path) -> tuple[str, list[str]]:
    """What a resume makes of a folder before it runs anything, and what it logs."""
    log = _Log()
    logger = logging.getLogger("fluid")
    logger.addHandler(log)
    try:
        left = read_session(folder)
        progress = read_progress(folder)
        found = left.recovered
        trials = {group_id: dict(group.trials) for group_id, group in left.groups.items()}
        results = {name: list(group.read(trials.get(name, {}).get)) for name, group in left.results.groups.items()}
        content = (
            *(found.groups, found.terms, found.outcomes, found.failures, found.durable, found.forgotten, found.at),
            None if found.profile is None else found.profile.to_json(),
            {name: (group.line, list(group.trials)) for name, group in left.groups.items()},
            [(trial.id, trial.config, trial.budget, trial.key) for of in trials.values() for trial in of.values()],
            [(r.trial_id, r.iteration, r.metrics, r.seconds, r.width) for of in results.values() for r in of],
            *(left.results.reported, left.written.shown, sorted(left.seeds.items()), sorted(left.lost)),
            {name: value for name, value in left.options.items() if name != "profile"},
            sorted(progress.items()),
        )
        return repr(content), log.texts
    finally:
        logger.removeHandler(log)


_READ: dict[str, Callable[[Path], tuple[str, list[str]]]] = {
    "load": read_load,
    "report": read_report,
    "resume": read_resume,
}


class Checker:
    """Damages the files of a folder and counts what becomes of it.

    Args:
        source: the folder, of which copies are damaged.
        place: where the copies are made.
    """

    def __init__(self, source: Path, place: Path) -> None:
        self._source, self._place = source, place
        self.files = [name for name in FILES if (source / name).is_file()]
        #: By file and reader.
        self.counts: dict[tuple[str, str], Counter[str]] = {}
        self.bad: list[str] = []
        self._whole = {reader: _READ[reader](self.copy()) for reader in READERS}

    def copy(self, name: str = "", content: bytes = b"") -> Path:
        """A copy of the folder, in which a file has another content."""
        folder = self._place / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each in self.files:
            shutil.copy(self._source / each, folder / each)
        if name:
            (folder / name).write_bytes(content)
        return folder

    def check(self, name: str, kind: str, content: bytes) -> None:
        """Lets all readers read the folder with a damaged file."""
        for reader in READERS:
            outcome, why = self._outcome(reader, self.copy(name, content))
            self.counts.setdefault((name, reader), Counter())[outcome] += 1
            if outcome in ("silent", "traceback"):
                kept = self._place / f"bad-{len(self.bad)}-{name}"
                kept.write_bytes(content)
                self.bad.append(f"{name}, {kind}, {reader}: {outcome} {why} ({kept})")

    def _outcome(self, reader: str, folder: Path) -> tuple[str, str]:
        whole, told = self._whole[reader]
        try:
            found, notes = _READ[reader](folder)
        except FluidError:
            return "refused", ""
        except Exception as error:
            return "traceback", repr(error)
        if found == whole:
            return "same", ""
        if set(notes) - set(told):
            return "told", ""
        at = max(0, next((at for at, (a, b) in enumerate(zip(whole, found, strict=False)) if a != b), 0) - 60)
        return "silent", f"{whole[at : at + 100]!r} -> {found[at : at + 100]!r}"


def check_folder(source: Path, place: Path, flips: int, seed: int, *, cuts: bool = True) -> Checker:
    """Damages each file of a folder; without ``cuts``, no file is cut at its end."""
    checker = Checker(source, place)
    for name in checker.files:
        content, draws = (source / name).read_bytes(), random.Random(f"{seed} {name}")
        for kind, damaged in damages(content, flips, draws):
            if damaged != content and (cuts or kind != "cut"):
                checker.check(name, kind, damaged)
    return checker


def resume_wholly(source: Path, place: Path, number: int, seed: int) -> Counter[str]:
    """Resumes damaged copies of a killed session to their end."""
    draws, outcomes = random.Random(f"{seed} resumes"), Counter[str]()
    for _ in range(number):
        folder, log = place / "resumed", _Log()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        name = draws.choice([name for name in FILES if (folder / name).is_file()])
        content = bytearray((folder / name).read_bytes())
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        (folder / name).write_bytes(content)
        logging.getLogger("fluid").addHandler(log)
        try:
            with FluidExecutor.resume(folder, backend="local", devices=2, verbose=0) as executor:
                values: dict[str, list[float]] = {trial_id: [] for trial_id in CONFIGS}
                for handle in executor.handles:
                    for result in handle.results():
                        values[result.trial_id].append(result.metrics["loss"])
            right = values == {trial_id: expected(x) for trial_id, x in CONFIGS.items()}
            outcomes["told" if log.texts else "same" if right else "silent"] += 1
        except FluidError:
            outcomes["refused"] += 1
        finally:
            logging.getLogger("fluid").removeHandler(log)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="Damages the files of run folders, and reads them.")
    parser.add_argument("--flips", type=int, default=200, help="single-bit flips of each file (default: 200)")
    parser.add_argument("--quick", action="store_true", help="20 flips, and 2 resumes")
    parser.add_argument("--resumes", type=int, default=10, help="damaged folders that are resumed to their end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    flips, resumes = (20, 2) if options.quick else (options.flips, options.resumes)
    logging.getLogger("fluid").propagate = False

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"What readers make of damaged files; {flips} flips of each, and other damages")
    for column in ("folder", "file", "reader", *OUTCOMES):
        table.add_column(column, justify="left" if column in ("folder", "file", "reader") else "right")
    figures: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/damaged_folders.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "outcomes": {},
    }
    place = Path(tempfile.mkdtemp(prefix="damaged-"))
    folders, bad = make_folders(place), []
    for state, folder in folders.items():
        checker = check_folder(folder, place, flips, options.seed, cuts=state == "ended")
        bad += checker.bad
        for (name, reader), counts in checker.counts.items():
            table.add_row(state, name, reader, *(f"{counts[outcome]:,}" for outcome in OUTCOMES))
            figures["outcomes"].setdefault(state, {}).setdefault(name, {})[reader] = dict(counts)
    wholly = figures["resumes"] = dict(resume_wholly(folders["killed"], place, resumes, options.seed))
    Console().print(table)
    print(f"resumed to the end: {wholly}")
    for line in bad[:20]:
        print(line)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    if not bad:
        shutil.rmtree(place)
    return 1 if bad or wholly.get("silent") else 0


if __name__ == "__main__":
    sys.exit(main())
