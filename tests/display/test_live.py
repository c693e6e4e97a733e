from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from fluid.display.dashboard import render
from fluid.display.device_map import TrialNumbers
from fluid.display.follow import StatusFollower
from fluid.display.live import AboveRegion, LiveView
from fluid.display.notebook import status_html
from fluid.display.summary import folder_lines, shown_path, summary_lines
from fluid.errors import FluidError
from fluid.results.best import BestSoFar
from fluid.session.status import DeviceStatus, GroupStatus, Start, Status

Residents = tuple[tuple[str, float], ...]


def group_status(
    name: str,
    trials: dict[str, int],
    done: int,
    iterations: int,
    eta: float | None,
    expected: int | None = None,
    best: BestSoFar | None = None,
) -> GroupStatus:
    return GroupStatus(
        name=name,
        trials=trials,
        iterations_done=done,
        iterations=iterations,
        eta=eta,
        expected=expected,
        is_search=expected is not None,
        best=best,
    )


def best_of(value: float = 0.03125, trial_id: str = "trial-7", **config: object) -> BestSoFar:
    return BestSoFar(metric="loss", mode="min", value=value, trial_id=trial_id, iteration=12, config=config)


RUNNING = group_status("rung-1", {"RUNNING": 3, "QUEUED": 2}, 6, 24, 125.0)
EMPTY = Status(at=0.0, groups=(), devices=(), alpha={}, packing={})
ENDED = group_status("rung-0", {"DONE": 8, "FAILED": 1}, 9, 9, 0.0)


def status(
    *residents: Residents,
    groups: Sequence[GroupStatus] = (ENDED, RUNNING),
    at: float = 83.0,
    hosts: Sequence[str] = ("node",),
) -> Status:
    devices = tuple(
        DeviceStatus(device_id=k, kind="gpu", host=hosts[k % len(hosts)], residents=held, lanes=1)
        for k, held in enumerate(residents)
    )
    return Status(
        at=at, groups=tuple(groups), devices=devices, alpha={"net": 1.083, "mlp": 1.0}, packing={"net": 3, "mlp": 1}
    )


def many(devices: int, groups: int = 3) -> Status:
    def held(k: int) -> Residents:
        return ((), (("wide", 2.0),), ((f"t{k}", 0.5), (f"u{k}", 0.5)), ((f"t{k}", 1.0),))[k % 4]

    listed = [group_status(f"group {k}", {"RUNNING": 2, "QUEUED": k}, k, 100, None) for k in range(groups)]
    return status(*map(held, range(devices)), groups=[ENDED] * groups + listed)


def text_of(shown: object, width: int = 200, *, coloured: bool = False, encoding: str = "utf-8") -> list[str]:
    """What a terminal, or a file of that encoding, gets."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    system = "truecolor" if coloured else None
    console = Console(file=file, width=width, force_terminal=coloured, color_system=system, legacy_windows=False)  # type: ignore[arg-type]
    console.print(shown)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def lines(shown: Status, width: int = 100, height: int = 30, encoding: str = "utf-8") -> list[str]:
    return text_of(render(shown, width, height), width, encoding=encoding)


# --- Groups


def test_groups_tell_how_far_they_are() -> None:
    found = lines(status())
    assert found[0] == "Fluid  1:23  3 running, 2 queued, 8 done, 1 failed"
    assert found[2] == "1 ended group, 9 trials: 8 done, 1 failed"
    (line,) = [line for line in found if line.startswith("rung-1")]
    assert line.split("  ", 1)[1].strip("━─ ") == "25 %  6/24  3 running, 2 queued  ETA 2:05"
    assert line.count("━") * 3 == line.count("─")


def test_an_eta_that_is_not_known_is_no_number() -> None:
    group = group_status("g", {"QUEUED": 1}, 0, 0, None)
    assert any(line.endswith("ETA ?") for line in lines(status(groups=[group])))


def test_once_all_have_ended_the_last_group_stays() -> None:
    other = group_status("last", {"DONE": 2}, 4, 4, 0.0)
    found = lines(status(groups=[ENDED, other]))
    assert found[2] == "1 ended group, 9 trials: 8 done, 1 failed"
    assert "last" in found[3] and "100 %" in found[3] and "ETA" not in found[3]


def test_of_many_groups_the_newest_are_shown() -> None:
    found = lines(many(2, groups=50))
    assert "50 ended groups, 450 trials: 400 done, 50 failed" in found
    assert "45 more groups, 1,080 trials: 90 running, 990 queued" in found
    assert [line.split("  ")[0] for line in found if line.startswith("group ")] == [f"group {k}" for k in range(45, 50)]


SWEEP = group_status("sweep", {"RUNNING": 2, "PAUSED": 1, "STOPPED": 6, "DONE": 2}, 40, 160, 61.0, 32)


def test_a_sweep_tells_its_iterations_and_how_many_of_its_trials_have_ended() -> None:
    (line,) = [line for line in lines(status(groups=[SWEEP]), 120) if line.startswith("sweep")]
    assert line.split("  ", 1)[1].strip("━─ ") == "25 %  40/~160  8/32 trials  ETA 1:01"
    assert line.count("━") * 3 == line.count("─")
    assert "ETA" not in "".join(lines(status(groups=[replace(SWEEP, eta=None)]), 120)), "none rather than a silly one"


def test_a_sweep_none_of_whose_trials_has_ended_tells_how_many_have_begun() -> None:
    begun = replace(SWEEP, trials={"RUNNING": 2, "PAUSED": 8}, begun=10)
    (line,) = [line for line in lines(status(groups=[begun]), 120) if line.startswith("sweep")]
    assert "  10 of 32 trials begun  " in line


def test_a_view_tells_what_the_first_iterations_wait_for_and_since_when() -> None:
    follower = StatusFollower()
    said = []
    for at, start in (
        (1.0, Start("lanes", 2)),
        (3.0, Start("importing", 2, "torch")),
        (15.0, Start("importing", 1, "torch")),
        (16.0, Start("set up", 1)),
        (18.0, Start("iteration", 1)),
        (19.0, None),
    ):
        shown = replace(status(groups=[replace(SWEEP, best=None)], at=at), start=start)
        follower.take(shown)
        (line,) = [line for line in text_of(render(shown, 80, start=follower.start)) if "starting  " in line] or [""]
        said.append(line)
        assert line.replace("starting  ", "starting: ") in status_html(shown, {}, {}, start=follower.start)
    assert said == [
        "starting  2 lanes, 0:00",
        "starting  importing torch for 2 lanes, 0:00",
        "starting  importing torch for 1 lane, 0:12",
        "starting  setting up 1 trial, 0:00",
        "starting  the first iteration of 1 trial, 0:00",
        "",
    ]


def test_a_sweep_that_may_submit_any_number_of_trials_has_no_share() -> None:
    endless = replace(SWEEP, iterations=0, expected=None, eta=None)
    (line,) = [line for line in lines(status(groups=[endless]), 120) if line.startswith("sweep")]
    assert line.split() == ["sweep", "40", "iterations"]
    assert "%" not in line


def test_the_share_of_a_sweep_only_grows() -> None:
    follower = StatusFollower()
    seen = []
    for done, predicted in ((40, 160), (44, 400), (300, 400)):
        follower.take(status(groups=[replace(SWEEP, iterations_done=done, iterations=predicted)]))
        seen.append(follower.shares())
    assert seen == [{0: 0.25}, {0: 0.25}, {0: 0.75}]
    follower.take(status(groups=[replace(RUNNING, iterations=240)]))
    assert follower.shares() == {0: 0.025}, "a budget that is extended is no prediction"


def test_what_is_about_to_begin_is_told_until_it_does() -> None:
    follower = StatusFollower()
    follower.announce("Ray Tune is starting")
    follower.take(EMPTY)
    shown = render(EMPTY, 100, 30, announced=follower.announced)
    assert text_of(shown) == ["Fluid  0:00  Ray Tune is starting"]
    follower.take(status())
    assert follower.announced == ""
    follower.announce("Ray Tune is starting")
    follower.take(status())
    assert follower.announced == "Ray Tune is starting", "the groups are those of an earlier sweep"


# --- The best so far


def test_the_best_result_stands_below_its_group() -> None:
    group = replace(SWEEP, best=best_of(lr=0.1, layers={"n": 2}, activation="gelu"))
    found = lines(status(groups=[group]), 80, 23)
    (position,) = [at for at, line in enumerate(found) if line.startswith("sweep")]
    assert found[position + 1] == "  best loss 0.03125 (less is better)  trial-7, iteration 12  lr=0.1, +2"


def test_a_config_is_shown_as_far_as_there_is_room() -> None:
    many_of = {f"parameter_{k}": k / 7 for k in range(9)}
    group = replace(SWEEP, best=best_of(**many_of))
    for width in (50, 60, 80, 120):
        (line,) = [line for line in lines(status(groups=[group]), width) if line.startswith("  best")]
        assert len(line) <= width
        shown = line.count("=")
        assert shown == 0 or line.endswith(f"+{9 - shown}")
    assert "parameter_2=0.2857" in line


def test_with_many_groups_the_best_value_is_a_column() -> None:
    groups = [group_status(f"g{k}", {"RUNNING": 1}, 1, 3, None, best=best_of(k)) for k in range(4)]
    found = [line for line in lines(status(groups=groups), 100, 23) if line.startswith("g")]
    assert [line.split("  ")[-2:] for line in found] == [[f"loss {k} (less is better)", "ETA ?"] for k in range(4)]
    assert not any("best" in line for line in lines(status(groups=groups), 100, 23))


def test_names_that_differ_in_the_middle_stay_apart() -> None:
    names = [f"group number {k} with a rather long name" for k in range(6)]
    groups = [group_status(name, {"RUNNING": 1}, 1, 3, None) for name in names]
    found = [line for line in lines(status(groups=groups), 100, 40) if line.startswith("group")]
    assert len({line.split("…")[0] for line in found}) == 6


def test_the_states_of_the_only_group_are_told_once() -> None:
    found = lines(status(groups=[RUNNING]))
    assert found[0] == "Fluid  1:23  3 running, 2 queued"
    (line,) = [line for line in found if line.startswith("rung-1")]
    assert line.split("  ", 1)[1].strip("━─ ") == "25 %  6/24  ETA 2:05"


def test_a_line_stays_for_a_sweep() -> None:
    (line,) = [line.plain for line in summary_lines(status(groups=[SWEEP]), {0: 12.0}, width=90)]
    assert line == "sweep  11 trials: 1 paused, 2 interrupted, 2 done, 6 stopped; 40 iterations; 0:12"


# --- Devices


def strips(*residents: Residents, width: int = 47) -> list[str]:
    return [line for line in lines(status(*residents), width) if line.startswith("gpu ")]


def test_a_strip_shows_who_runs_there_and_at_what_width() -> None:
    assert strips(
        (("trial-1", 1.0),),
        (("trial-2", 0.5), ("trial-3", 0.25)),
        (("trial-4", 2.0),),
        (("trial-4", 2.0),),
        (),
    ) == [
        "gpu 0 │[trial-1 ───────────────────────────────",
        "gpu 1 │[trial-2 1/2 ───────[3 1/4 ───··········",
        "gpu 2 │[trial-4 x2 ────────────────────────────",
        "gpu 3 │[trial-4 x2 ────────────────────────────",
        "gpu 4 │········································",
    ]  # fmt: skip


def test_shares_that_add_up_to_more_than_a_device_are_scaled() -> None:
    (line,) = strips(tuple((f"t{k}", 0.5) for k in range(4)))
    assert [part.split()[0] for part in line.split("[")[1:]] == ["t0", "t1", "t2", "t3"]
    assert "·" not in line


def test_more_trials_than_characters_do_no_harm() -> None:
    (line,) = strips(tuple((f"t{k}", 1 / 99) for k in range(99)), width=20)
    assert len(line) == 20


def test_the_same_trial_has_the_same_colour_everywhere() -> None:
    shown = render(status((("a", 2.0),), (("a", 2.0),), (("b", 1.0),)), 60, 20)
    styles = [
        {str(segment.style.bgcolor) for segment in line if segment.style and segment.style.bgcolor}
        for line in Console(width=60, force_terminal=True, color_system="truecolor").render_lines(shown)
    ]
    first, second, third = [style for style in styles if style]
    assert first == second != third


def test_hosts_are_named_where_there_are_several() -> None:
    found = lines(status((), (), hosts=("alpha.example.org", "beta.example.org")))
    assert [line.split("│")[0] for line in found if "│" in line] == ["alpha gpu 0 ", "beta gpu 1  "]


def test_many_devices_stand_in_columns() -> None:
    found = lines(many(64), 120, 40)
    assert sum(line.count("gpu ") for line in found) == 64
    assert max(line.count("gpu ") for line in found) == 3


def test_very_many_devices_are_a_character_each() -> None:
    found = [line for line in lines(many(1000), 100, 30) if "│" in line]
    assert sum(len(line.split("│")[1]) for line in found) == 1000
    assert found[0].startswith("  0 │·a2d·a2g")


def test_devices_that_find_no_room_are_counted() -> None:
    assert any(line.startswith("… and 760 more devices, 570 busy") for line in lines(many(1000), 45, 10))


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (100, 30), (60, 24), (38, 12), (20, 5), (1, 1)])
def test_everything_fits(count: int, width: int, height: int) -> None:
    for groups in (0, 1, 40):
        for coloured in (False, True):
            shown = render(many(count, groups), width, height)
            options = Console(width=width, force_terminal=True, color_system="truecolor" if coloured else None)
            drawn = options.render_lines(shown, pad=False)
            assert len(drawn) <= height
            assert all(sum(segment.cell_length for segment in line) <= width for line in drawn)


def test_nothing_known_yet() -> None:
    assert lines(EMPTY) == ["Fluid  0:00", "", ""]


def test_devices_that_do_not_work_are_named() -> None:
    broken = replace(status(), given_up=((3, "no lane starts"),))
    assert [line for line in lines(broken) if "given up" in line] == ["given up  device 3, as no lane starts"]
    assert not any("given up" in line for line in lines(status()))
    assert "device 3 is given up: no lane starts" in status_html(broken, {}, {})


def test_trials_that_give_no_result_are_named() -> None:
    silent = replace(status(), silent=(("b", 125.0), ("a\n", 63.0)))
    (line,) = [line for line in lines(silent) if line.startswith("no result")]
    assert line == "no result  b for 2:05   a? for 1:03"
    assert not any("no result" in line for line in lines(status()))
    several = replace(status(), silent=tuple((f"trial-{k}", 63.0) for k in range(30)))
    (line,) = [line for line in lines(several) if line.startswith("no result")]
    assert line.endswith("more")


def test_what_was_measured_is_told_once_it_was() -> None:
    assert lines(status())[-1] == "measured  net: up to 3 a device, alpha 1.08"
    keys = {f"key-{k}": 2 for k in range(40)}
    found = lines(replace(EMPTY, packing=keys), 80)[-2:]
    assert found[0].startswith("measured  key-0: up to 2 a device, alpha 1   key-1")
    assert found[1].endswith("+37 more")


# --- Names and terminals


def test_ascii_terminals_get_ascii() -> None:
    names = status((("größe", 0.5), ("日本", 0.5)), groups=[group_status("gruppe ß", {"RUNNING": 1}, 1, 2, 1.0)])
    found = lines(names, encoding="ascii")
    assert any("gruppe ?" in line and "####" in line for line in found)
    assert any(line.startswith("gpu 0 |[gr??e 1/2 ---") for line in found)


def test_wide_characters_keep_their_width() -> None:
    shown = render(status((("日本語日本語", 0.5), ("b", 0.5))), 24, 10)
    drawn = Console(width=24, force_terminal=True, color_system="truecolor").render_lines(shown, pad=False)
    assert all(sum(segment.cell_length for segment in line) <= 24 for line in drawn)


def test_names_cannot_move_the_cursor() -> None:
    evil = "a\n\x1b[2Jb[red]"
    found = lines(status(((evil, 1.0),), groups=[group_status(evil, {"RUNNING": 1}, 0, 1, None)]))
    assert "\x1b" not in "".join(found)
    assert any("a??[2Jb[red]" in line for line in found if line.startswith("gpu"))
    assert any(line.startswith("a??[2Jb[red]") for line in found)


# --- Numbers of trials


def test_trials_keep_their_number_and_free_ones_are_used_again() -> None:
    numbers = TrialNumbers()
    assert numbers.update(status((("a", 0.5), ("b", 0.5)), (("c", 1.0),))) == {"a": 0, "b": 1, "c": 2}
    assert numbers.update(status((("b", 0.5),), (("c", 1.0),))) == {"b": 1, "c": 2}
    assert numbers.update(status((("b", 0.5),), (("d", 1.0),))) == {"b": 1, "d": 0}
    assert numbers.update(status((("b", 0.5), ("a", 0.5)), (("c", 1.0),))) == {"b": 1, "a": 0, "c": 2}


# --- The lines that stay


def test_the_summary_of_a_sweep_tells_its_seed() -> None:
    (line, *_) = summary_lines(status(groups=[replace(SWEEP, seed=7)]), {0: 12.0}, width=90)
    assert " trials, seed 7: " in line.plain


def test_a_line_per_group_stays() -> None:
    found = [line.plain for line in summary_lines(status(), {0: 12.0, 1: 61.0})]
    assert found == [
        "rung-0  9 trials: 8 done, 1 failed; 9/9 iterations; 0:12",
        "rung-1  5 trials: 5 interrupted; 6/24 iterations; 1:01",
    ]


def test_of_many_groups_a_line_sums_up_the_earlier_ones() -> None:
    found = [line.plain for line in summary_lines(status(groups=[ENDED] * 50), {})]
    assert len(found) == 20
    assert found[0] == "31 earlier groups, 279 trials: 248 done, 31 failed"


def test_the_best_results_stay() -> None:
    groups = [replace(ENDED, best=best_of()), replace(SWEEP, best=best_of(12345.678))]
    found = [line.plain for line in summary_lines(status(groups=groups), {0: 12.0, 1: 61.0}, width=120)]
    assert found == [
        "rung-0  best loss 0.03125 (less is better); 9 trials: 8 done, 1 failed; 9/9 iterations; 0:12",
        "sweep   best loss 12,346 (less is better); "
        "11 trials: 1 paused, 2 interrupted, 2 done, 6 stopped; 40 iterations; 1:01",
    ]
    alone = [line.plain for line in summary_lines(status(groups=[replace(ENDED, best=best_of(lr=0.1))]), {0: 12.0})]
    assert alone[0] == "best  loss 0.03125 (less is better)  trial-7, iteration 12  lr=0.1"


@pytest.mark.parametrize("width", range(20, 130, 7))
def test_lines_that_stay_do_not_wrap(width: int) -> None:
    groups = [replace(ENDED, best=best_of()), replace(SWEEP, best=best_of(12345.678, "some trial", lr=1e-5))]
    for shown in (groups, groups[1:]):
        found = summary_lines(status(groups=shown), {}, width=max(width, 40))
        assert all(line.cell_len <= max(width, 44) for line in found)


def test_the_run_folder_and_the_commands_to_see_it_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [line.plain for line in folder_lines(tmp_path / "runs" / "a b")] == [
        "results in 'runs/a b'",
        "  fluid report 'runs/a b'  tables and a page",
        "  fluid view 'runs/a b'  in a browser",
    ]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    assert shown_path(tmp_path / "runs" / "a b") == "~/'runs/a b'"
    assert shown_path(Path("/elsewhere/run")) == "/elsewhere/run"


# --- The view


class Source:
    """A session that says how it stands as often as it is asked; it closes after ``rounds`` rounds."""

    def __init__(self, *, rounds: int | None = None, groups: Sequence[GroupStatus] = (RUNNING,)) -> None:
        self.asked = 0
        self.rounds = rounds
        self.groups = groups
        self.seen = threading.Event()

    def __call__(self) -> Status:
        self.asked += 1
        if self.rounds is not None and self.asked > self.rounds:
            raise FluidError("the executor is closed")
        if self.asked > 2:
            self.seen.set()
        return status((("a", 1.0),), groups=self.groups, at=float(self.asked))


@pytest.fixture
def screen() -> Iterator[Console]:
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True, color_system=None, _environ={})
    yield console
    assert sys.stdout is not None and not isinstance(sys.stdout, AboveRegion)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def is_erased(text: str) -> bool:
    """Whether no dashboard is left; the cursor is never hidden."""
    return "gpu 0" not in text[text.rfind("\x1b[J") :] and "\x1b[?25l" not in text


def test_the_view_draws_until_it_is_closed(screen: Console) -> None:
    source = Source()
    view = LiveView(source, console=screen, interval=0.001)
    assert source.seen.wait(30)
    view.close()
    text = written(screen)
    assert "gpu 0 │" in text
    assert text[text.rindex("\x1b[J") + 3 :].startswith("rung-1  5 trials: 5 interrupted; 6/24 iterations; ")
    assert is_erased(text)
    asked = source.asked
    view.close()
    assert (source.asked, written(screen)) == (asked, text)


def test_the_last_status_is_the_one_that_stays(screen: Console) -> None:
    source = Source()
    view = LiveView(source, console=screen, interval=60.0)
    source.groups = (group_status("rung-1", {"DONE": 5}, 24, 24, 0.0),)
    view.close()
    assert "rung-1  5 trials: 5 done; 24/24 iterations" in written(screen)


def test_a_session_that_closes_ends_the_view_quietly(screen: Console) -> None:
    view = LiveView(Source(rounds=3), console=screen, interval=0.001)
    view._thread.join(30)
    assert not view._thread.is_alive()
    view.close()
    text = written(screen)
    assert text.count("rung-1  5 trials") == 1
    assert is_erased(text)


def test_an_error_gives_the_terminal_back_too(screen: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    caught = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_type))

    def broken() -> Status:
        raise ZeroDivisionError

    view = LiveView(broken, console=screen, interval=0.001)
    view._thread.join(30)
    view.close()
    assert caught == [ZeroDivisionError]
    assert is_erased(written(screen))


def test_without_groups_nothing_is_drawn(screen: Console) -> None:
    source = Source(groups=())
    view = LiveView(source, console=screen, interval=0.001)
    assert source.seen.wait(30)
    view.close()
    assert "Fluid" not in written(screen)


def test_only_one_view_draws(screen: Console) -> None:
    other = Console(file=io.StringIO(), force_terminal=True)
    first, second = Source(), Source()
    with_terminal = LiveView(first, console=screen, interval=0.001)
    without = LiveView(second, console=other, interval=0.001)
    assert first.seen.wait(30) and second.seen.wait(30)
    without.close()
    with_terminal.close()
    assert written(other) == ""
    # The terminal is free again.
    third = Source()
    again = LiveView(third, console=other, interval=0.001)
    assert third.seen.wait(30)
    again.close()
    assert "rung-1" in written(other)


def test_a_status_that_never_comes_holds_nothing_up(screen: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.display.live._PATIENCE", 0.001)
    come = threading.Event()

    def stuck() -> Status:
        come.wait(30)
        return status()

    view = LiveView(stuck, console=screen, interval=0.001)
    view.close()
    text = written(screen)
    assert is_erased(text)
    come.set()
    view._thread.join(30)
    assert written(screen) == text


def test_what_the_program_prints_stands_above(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    source = Source()
    console = Console(stderr=True, width=60, height=20, force_terminal=True, color_system=None, _environ={})
    view = LiveView(source, console=console, interval=0.001)
    assert source.seen.wait(30)
    print("said [b]as it is[/b] {'a': 1}")
    view.close()
    print("and after")
    text = terminal.getvalue()
    assert "said [b]as it is[/b] {'a': 1}\n" in text
    assert text.endswith("\nand after\n")
    assert sys.stdout is terminal and sys.stderr is terminal


def test_what_goes_into_a_file_is_left_alone(screen: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    view = LiveView(Source(), console=screen, interval=0.001)
    print("into the file")
    view.close()
    assert file.getvalue() == "into the file\n"


@pytest.mark.parametrize(
    ("terminal", "term", "wanted"), [(True, "xterm", True), (False, "xterm", False), (True, "dumb", False)]
)
def test_wanted(terminal: bool, term: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    assert LiveView.wanted() is wanted


def test_not_wanted_where_there_is_nothing_to_draw_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, FileProxy(Console(), io.StringIO()), AboveRegion(None, io.StringIO())):  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stderr", stream)
        assert not LiveView.wanted()


def test_the_header_tells_how_many_devices_were_asked_for() -> None:
    asking = replace(status((("t", 1.0),)), asked=3)
    assert "  1 of 1 device busy  3 more devices asked for  3 running" in lines(asking)[0]
    assert "1 more device asked for" in lines(replace(EMPTY, asked=1))[0]


def test_a_progress_bar_is_written_once_it_is_complete() -> None:
    written: list[str] = []

    class Region:
        def write(self, text: str) -> None:
            written.append(text)

    stream = AboveRegion(Region(), io.StringIO())  # type: ignore[arg-type]
    for percentage in (10, 60, 100):
        stream.write(f"\r{percentage} %")
        stream.flush()
    assert written == []
    stream.write("\nasked? ")
    stream.flush()
    stream.writelines(["a\nb", "c\n"])
    assert written == ["\r100 %\n", "asked? \n", "a\n", "bc\n"]
    with pytest.raises(TypeError, match="must be str, not bytes"):
        stream.write(b"bytes")  # type: ignore[arg-type]


def test_what_loggers_write_stands_above(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = logging.getLogger("tests.live")
    before, other = logging.StreamHandler(terminal), logging.StreamHandler(file)
    monkeypatch.setattr(logger, "handlers", [before, other])
    monkeypatch.setattr(logger, "propagate", False)
    source = Source()
    console = Console(file=terminal, width=60, height=20, force_terminal=True, color_system=None, _environ={})
    view = LiveView(source, console=console, interval=0.001)
    assert source.seen.wait(30)
    assert isinstance(before.stream, AboveRegion)
    assert other.stream is file
    during = logging.StreamHandler()
    logger.addHandler(during)
    logger.warning("said by a logger")
    view.close()
    assert before.stream is terminal and during.stream is terminal
    said = terminal.getvalue()
    assert said.count("said by a logger\n") == 2
    drawn = said[: said.rindex("said by a logger")]
    assert drawn.endswith("\x1b[J") or drawn.endswith("said by a logger\n"), "the dashboard was erased before"


def test_states_that_find_no_room_are_summed_up() -> None:
    trials = {"RUNNING": 3, "STARTING": 1, "QUEUED": 14, "PAUSED": 2, "DONE": 15, "STOPPED": 12, "FAILED": 1}
    session = status((("t", 1.0),), groups=[group_status("a", trials, 0, 100, None)])
    assert lines(session, 80)[0] == "Fluid  1:23  1 of 1 device busy  4 running, 16 waiting, 27 ended, 1 failed"
    assert lines(session, 60)[0] == "Fluid  1:23  4 running, 16 waiting, 27 ended, 1 failed"
    assert lines(session, 40)[0] == "Fluid  1:23  4 running, 1 failed"
    assert lines(session, 24)[0] == "Fluid  1:23  1 failed"


def test_a_narrow_header_keeps_the_failures() -> None:
    trials = {"RUNNING": 3, "STARTING": 1, "QUEUED": 14, "DONE": 15, "STOPPED": 12, "FAILED": 1}
    session = status((("t", 1.0),), groups=[group_status("a", trials, 0, 100, None)])
    wide, narrow = (lines(session, width)[0] for width in (110, 80))
    assert "1 of 1 device busy" in wide
    assert "device" not in narrow
    assert narrow.endswith("1 failed")
