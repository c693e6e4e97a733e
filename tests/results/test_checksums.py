"""Checksums of run folders: what is damaged is not used, and that is told; nothing else is lost."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import time
from pathlib import Path

import pytest

import fluid
from benchmarks.damaged_folders import check_folder, make_folders
from fluid.checksums import LineChecks, checked_lines, checked_object, split_line, split_object
from fluid.errors import InvalidFieldError
from fluid.measure.profile import Profile
from fluid.reports.run.loader import RunReader
from fluid.results.checkpoints import checked_frames, read_payloads
from fluid.results.damage import end_of_lines
from fluid.results.run_files import JsonLines
from fluid.session.folder.files import AppendedFile
from tests.checked_files import without_checksums

TEXTS = [json.dumps({"trial": name, "loss": 0.5 / number}) for number, name in enumerate("abcdef", start=1)]
LINES = checked_lines(TEXTS, 0).splitlines(keepends=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A session's folder at its end, and as a killed driver would have left it in the middle."""
    return make_folders(tmp_path_factory.mktemp("folders"), seconds=0.01)


# -- a folder ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("state", ["ended", "killed"])
def test_no_reader_makes_something_else_of_a_damaged_file_silently(
    folders: dict[str, Path], tmp_path: Path, state: str
) -> None:
    checker = check_folder(folders[state], tmp_path, flips=16, seed=3, cuts=state == "ended")
    assert not checker.bad
    for name in ("results.jsonl", "trials.jsonl"):
        assert checker.counts[name, "load"]["told"] > 10, "the other lines are used"
    for name in ("journal.jsonl", "payloads.pkl"):
        assert checker.counts[name, "resume"]["refused"] > 10


def test_a_damaged_line_is_named_and_the_others_are_used(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in folders["ended"].glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes())
    whole = fluid.load(folder)
    content = (folder / "results.jsonl").read_bytes()
    at = content.index(b'"loss": 0.', content.index(b"\n")) + len(b'"loss": 0.')
    (folder / "results.jsonl").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    found = fluid.load(folder)
    assert any("1 line of results.jsonl could not be read, the first at line 2" in note for note in found.notes)
    results = [[len(trial.results) for trial in result.trials] for result in (whole, found)]
    assert sum(results[0]) == sum(results[1]) + 1
    assert RunReader(folder).read().notes == found.notes


def test_files_of_an_older_fluid_are_read_and_their_configs_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    older = Path(__file__).parents[1] / "data/f877213/killed"
    trials = json.loads((older / "trials.jsonl").read_bytes().splitlines()[1])
    assert trials["config"]["x"] in (0.5, 0.25, 1.0)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("journal.jsonl", "results.jsonl", "session.json", "payloads.pkl"):
        (folder / name).write_bytes((older / name).read_bytes())
    changed = (older / "trials.jsonl").read_bytes().replace(b'"x": 0.5', b'"x": 0.7')
    (folder / "trials.jsonl").write_bytes(changed)
    assert fluid.load(folder).trials[0].config["x"] in (0.7, 0.25, 1.0)
    with pytest.raises(
        InvalidFieldError, match=r"config of trial 'x0\.5' in payloads\.pkl is another one than in trials"
    ):
        fluid.FluidExecutor.resume(folder, backend="local", devices=1, verbose=0)


# -- lines -------------------------------------------------------------------------------------------------------------


def taken(lines: list[bytes], start: int = 0) -> tuple[str, int, int | None]:
    """The names in the lines that are used, how many are damaged, and the first of these."""
    checks = LineChecks(start)
    texts = [text for line in lines if (text := checks.take(line)) is not None]
    return "".join(json.loads(text)["trial"] for text in texts), checks.damage, checks.first


def test_every_flipped_bit_of_a_line_is_noticed() -> None:
    for bit in range(8 * len(LINES[1])):
        flipped = bytearray(LINES[1])
        flipped[bit // 8] ^= 1 << bit % 8
        parts = bytes(flipped).splitlines(keepends=True) if b"\n" in flipped[:-1] else [bytes(flipped)]
        if not flipped.endswith(b"\n"):  # It runs on into the next line.
            assert taken([LINES[0], bytes(flipped) + LINES[2], *LINES[3:]]) == ("adef", 1, 2)
            continue
        names, damage, first = taken([LINES[0], *parts, *LINES[2:]])
        # Behind the digits nothing of the content can be damaged.
        assert (names, damage) == ("abcdef", 0) or (names, first) == ("acdef", 2), bit


def test_lines_that_are_swapped_doubled_or_missing_are_noticed() -> None:
    a, b, c, d, e, f = LINES
    assert taken(LINES) == ("abcdef", 0, None)
    assert taken([a, c, b, d, e, f]) == ("acdef", 2, 2)
    assert taken([a, b, b, c, d, e, f]) == ("abcdef", 1, 3)
    assert taken([a, b, e, f]) == ("abef", 1, 3)
    assert taken([b, c]) == ("bc", 1, 1)
    assert taken([a, b"\n", b]) == ("ab", 1, 2)
    assert taken(LINES[2:], start=len(a + b)) == ("cdef", 0, None)


def test_lines_with_checksums_follow_on_those_of_an_older_fluid() -> None:
    older = [f"{text}\n".encode() for text in TEXTS[:3]]
    newer = checked_lines(TEXTS[3:], len(b"".join(older))).splitlines(keepends=True)
    assert taken([*older, *newer]) == ("abcdef", 0, None)
    assert taken([*older[1:], *newer]) == ("bcdef", 1, 3), "one is missing"
    assert taken([*older, newer[0], older[1], *newer[1:]]) == ("abcdef", 1, 5)


def test_a_reader_that_follows_a_growing_file_checks_as_it_goes(tmp_path: Path) -> None:
    path, content = tmp_path / "lines.jsonl", b"".join(LINES[:3])
    lines, names = JsonLines(path), ""
    with path.open("ab", buffering=0) as file:
        for byte in content:
            file.write(bytes([byte]))
            names += "".join(line.value["trial"] for line in lines.new())
        assert (names, lines.checks.damage) == ("abc", 0)
        file.write(LINES[4])
        assert [line.value["trial"] for line in lines.new()] == ["e"]
    assert (lines.checks.damage, lines.checks.first) == (1, 4)


def test_lines_behind_lost_ones_are_read(tmp_path: Path) -> None:
    """The session goes on behind a file that has lost lines, or has got further ones."""
    for kept in ([LINES[0], LINES[3]], [*LINES[:2], b"strange\n" * 50, *LINES[2:4]]):
        path = tmp_path / f"{len(kept)}.jsonl"
        path.write_bytes(b"".join(kept))
        with AppendedFile(path) as file:
            assert file.next_offset == end_of_lines(path) == len(b"".join(LINES[:4]))
            for text in TEXTS[4:]:
                file.append(checked_lines([text], file.next_offset))
        assert "".join(line.entry["trial"] for line in JsonLines(path).new() if line.entry)[-3:] == "def"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path, limits = tmp_path / "lines.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with AppendedFile(path) as file:
        file.append(LINES[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(LINES[0]) + 9, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                file.append(LINES[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == LINES[0]
        file.append(LINES[1])
    assert path.read_bytes() == LINES[0] + LINES[1]


# -- objects -----------------------------------------------------------------------------------------------------------


def test_an_object_remains_json_and_tells_of_damage(tmp_path: Path) -> None:
    content = {"a": [1, 2], "b": {"c": "}"}}
    data = checked_object(json.dumps(content, indent=1))
    assert json.loads(split_object(data) or b"") == content == {k: v for k, v in json.loads(data).items() if k != "crc"}
    assert split_object(data.replace(b"2", b"3")) is None
    profile = Profile()
    profile.observe("key", seconds=2.0)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").to_json() == profile.to_json()
    text = (tmp_path / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(text.replace("2.0", "3.0"))
    with pytest.raises(InvalidFieldError, match="its checksum is of another content; if you have changed the file"):
        Profile.load(tmp_path / "profile.json")


# -- payloads ----------------------------------------------------------------------------------------------------------


def frames(*, code: bytes = b"code", older: bool = False) -> list[bytes]:
    config = pickle.dumps({"x": 1})
    trainable = {"trainable": 0, "pickled": code}
    if older:
        trial = {"group": "0", "name": "g", "uses": 0, "config": config, "seeds": None}
        trials = [{**trial, "fields": {"trial_id": name, "budget": 3}} for name in "ab"]
    else:
        group = {"group": "0", "name": "g", "fields": {"budget": 3}}
        trials = [
            {**group, "trials": [(0, config, {"trial_id": name}, None) for name in names]} for names in ("ab", "c")
        ]
    trials[-1]["complete"] = True
    return [pickle.dumps(each) for each in (trainable, *trials)]


def test_damaged_frames_are_refused_and_torn_ones_cut_off(tmp_path: Path) -> None:
    path, content = tmp_path / "payloads.pkl", checked_frames(frames(), 0)
    path.write_bytes(content)
    stored = read_payloads(path)
    assert [(each.fields, each.trainable, each.is_checked) for each in stored.trials] == [
        ({"budget": 3, "trial_id": name}, b"code", True) for name in "abc"
    ]
    draws, cut_off = random.Random(5), 0
    for _ in range(400):
        flipped = bytearray(content)
        flipped[at := draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        path.write_bytes(flipped)
        try:
            found = read_payloads(path, lambda trial_id: False)
        except InvalidFieldError as error:
            assert "payloads.pkl is damaged at byte" in str(error)
        else:
            cut_off += 1
            assert not found.trials and found.whole_bytes == 0, at
    assert cut_off < 20, "as if the last frame had not been written: its begin, or its last byte"
    for cut in range(0, len(content), 7):
        for tail in (b"", bytes(4096)):  # Which some file systems leave after a power cut.
            path.write_bytes(content[:cut] + tail)
            assert read_payloads(path, lambda trial_id: False).whole_bytes == 0
    one, two, three = (checked_frames([frame], 0) for frame in frames())
    for wrong in (one + three, one + two + two + three, two + one + three):
        path.write_bytes(wrong)
        with pytest.raises(InvalidFieldError, match="damaged at byte"):
            read_payloads(path)


def test_frames_of_an_older_fluid_that_are_damaged_are_refused(tmp_path: Path) -> None:
    path, content = tmp_path / "payloads.pkl", b"".join(frames(older=True))
    path.write_bytes(content + checked_frames(frames(code=b"other"), len(content)))
    assert [(each.trainable, each.is_checked) for each in read_payloads(path).trials] == [
        *([(b"code", False)] * 2),
        *([(b"other", True)] * 3),
    ]
    for before, after in ((b"trial_id", b"trial_ie"), (b"uses", b"used"), (b"trainable", b"trainabld")):
        path.write_bytes(content.replace(before, after, 1))
        with pytest.raises(InvalidFieldError, match="damaged at byte"):
            read_payloads(path)


def test_frames_run_no_code(tmp_path: Path) -> None:
    def short(text: str) -> bytes:
        return b"\x8c" + bytes([len(text)]) + text.encode()

    called = tmp_path / "called"
    for module, name in (("fluid.resources", "os.mkdir"), ("fluid.resources", "os"), ("os", "mkdir")):
        evil = b"\x80\x04" + short(module) + short(name) + b"\x93" + short(str(called)) + b"\x85R."
        (tmp_path / "payloads.pkl").write_bytes(evil)
        assert not read_payloads(tmp_path / "payloads.pkl").trials
        (tmp_path / "payloads.pkl").write_bytes(checked_frames([evil], 0))
        with pytest.raises(InvalidFieldError):
            read_payloads(tmp_path / "payloads.pkl")
    assert not called.exists()


def test_a_large_torn_trainable_is_looked_through_once(tmp_path: Path) -> None:
    def seconds(size: int) -> float:
        inner = pickle.dumps({"weights": bytes(1000)}) * (size // 1000)
        content = pickle.dumps({"trainable": 0, "pickled": inner})
        (tmp_path / "payloads.pkl").write_bytes(content[:-10])
        before = time.process_time()
        assert not read_payloads(tmp_path / "payloads.pkl").trials
        return time.process_time() - before

    small, large = min(seconds(1 << 20) for _ in range(3)), min(seconds(1 << 23) for _ in range(3))
    assert large < 8 * 3 * max(small, 0.002), "eight times as many bytes; it was quadratic"


def test_offsets_are_those_of_the_file(folders: dict[str, Path]) -> None:
    for name in ("results.jsonl", "journal.jsonl", "trials.jsonl"):
        start = 0
        for line in (folders["ended"] / name).read_bytes().splitlines(keepends=True):
            assert split_line(line)[0] == start
            start += len(line)
        assert json.loads((folders["ended"] / "session.json").read_bytes())["bytes"][name] == start
    assert os.path.getsize(folders["ended"] / "payloads.pkl") > 0


def test_a_folder_without_checksums_says_nothing_else(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in folders["ended"].glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes())
    newer = fluid.load(folder)
    older = fluid.load(without_checksums(folder))
    assert (older.trials, older.notes) == (newer.trials, newer.notes)
