from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

from fluid.checksums import LineChecks
from fluid.engine.events import PLAIN_TERMS, GroupSubmitted, TrialsAdded, TrialSpec
from fluid.results.checkpoints import read_payloads
from fluid.results.journal import replay
from fluid.results.submitted import GroupLine
from fluid.session.folder.folder import RunFolder
from fluid.trainables.payload import trainable_payload, trial_payload
from fluid.trialgroup import Trial

#: More than are written together, and no multiple of that.
TRIALS = 3000


def train(config: dict[str, Any]) -> Any:
    yield {"loss": config["x"]}


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file; none is damaged."""
    checks = LineChecks()
    lines = [checks.take(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert not checks.damage and checks.is_checked
    return [line for line in lines if line is not None]


def test_a_large_submission_is_written_whole_in_little_memory(tmp_path: Path) -> None:
    listed = [Trial(train, {"x": x}, trial_id=f"t{x}") for x in range(TRIALS)]
    code = trainable_payload(train)
    trials = {trial: trial_payload(code, trial.config) for trial in listed}
    specs = tuple(TrialSpec(trial.id, 1, priority=float(x), config=(("x", f"{x}"),)) for x, trial in enumerate(listed))
    folder = RunFolder.create(tmp_path / "run")
    few = GroupSubmitted(at=1.0, group_id="0", trials=specs[:1], terms=PLAIN_TERMS)
    many = TrialsAdded(at=2.0, group_id="0", trials=specs[1:])
    tracemalloc.start()
    try:
        folder.write_trials("0", GroupLine("g", None, None, PLAIN_TERMS), trials)
        folder.journal([few, many], ())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        folder.close()
    assert peak < 400 * TRIALS, "frames, lines and an entry of all of them take six times as much"
    journal = lines_of(tmp_path / "run" / "journal.jsonl")
    assert len(journal) == 2, "a submission that is cut off counts for nothing"
    assert [history.trial for history in replay(journal).groups["0"].values()] == list(specs)
    assert len(lines_of(tmp_path / "run" / "trials.jsonl")) == 1 + TRIALS
    stored = read_payloads(tmp_path / "run" / "payloads.pkl").trials
    assert [(each.trial_id, each.load_config()) for each in stored] == [(trial.id, trial.config) for trial in listed]
