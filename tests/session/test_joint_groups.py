"""Groups that the programs of several drivers submit alike, in a shared folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joint_members import content, folders, options_of, require_alike, slow, together
from waiting import eventually

import fluid
from fluid import Device, FluidError, FluidExecutor, InvalidFieldError, Requires, Trial, TrialGroup
from fluid.session.handle import TrialGroupHandle

pytestmark = pytest.mark.slow


def trials(number: int = 4, budget: int = 3, **more: Any) -> list[Trial]:
    return [Trial(slow, {"x": place / 10}, budget=budget, trial_id=f"t{place}", **more) for place in range(number)]


def member(shared: Path, program: Callable[[FluidExecutor], Any], **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        with FluidExecutor(**options_of(shared, **options)) as executor:
            return program(executor)

    return run


def submitted(executor: FluidExecutor, *args: Any, **more: Any) -> TrialGroupHandle:
    return executor.submit_trialgroup(TrialGroup(trials(*args, **more), "g"))


def counted(handle: TrialGroupHandle) -> list[tuple[str, int]]:
    return sorted((result.trial_id, result.iteration) for result in handle.results())


def expected(**budgets: int) -> list[tuple[str, int]]:
    return [(name, iteration) for name, budget in budgets.items() for iteration in range(1, budget + 1)]


def states(handle: TrialGroupHandle) -> dict[str, str]:
    return dict(sorted((name, state.value) for name, state in handle.states.items()))


def test_trials_are_shared_and_each_member_hears_all(tmp_path: Path) -> None:
    def program(executor: FluidExecutor) -> Any:
        handle = submitted(executor, 6, 5)
        found = counted(handle)
        assert handle.wait(5) and handle.done
        best = handle.best("loss", "min")
        return found, states(handle), (best.trial_id, best.iteration), [trial.state for trial in handle.trials]

    shared = tmp_path / "shared"
    first, second = together(member(shared, program), member(shared, program))
    budgets = {f"t{place}": 5 for place in range(6)}
    assert first == second == (expected(**budgets), dict.fromkeys(budgets, "DONE"), ("t0", 5), ["DONE"] * 6)
    require_alike(shared, 2)
    ran = [len(list((folder / "trials").glob("*"))) for folder in folders(shared)]
    assert sum(ran) == 6, "each trial ran in one of them"


def test_any_member_stops_a_trial(tmp_path: Path) -> None:
    def stops(executor: FluidExecutor) -> Any:
        handle = submitted(executor, 4, 10)
        handle.stop("t1", "DONE")
        handle.stop("t3")
        handle.wait(30)
        return states(handle), {trial.trial_id: trial.state for trial in handle.trials}

    def looks(executor: FluidExecutor) -> Any:
        handle = submitted(executor, 4, 10)
        handle.wait(30)
        return states(handle), {trial.trial_id: trial.state for trial in handle.trials}

    shared = tmp_path / "shared"
    first, second = together(member(shared, stops), member(shared, looks))
    assert first == second
    assert first[0] == {"t0": "DONE", "t1": "STOPPED", "t2": "DONE", "t3": "STOPPED"}
    require_alike(shared, 2)


def test_a_trial_that_was_stopped_before_a_member_came_stays_so(tmp_path: Path) -> None:
    def stops(executor: FluidExecutor) -> Any:
        handle = submitted(executor, 2, 2)
        handle.stop("t1")
        handle.wait(30)
        time.sleep(1.5)
        return states(handle)

    def late(executor: FluidExecutor) -> Any:
        time.sleep(1.0)
        handle = submitted(executor, 2, 2)
        handle.wait(30)
        return states(handle)

    shared = tmp_path / "shared"
    first, second = together(member(shared, stops), member(shared, late))
    assert first == second == {"t0": "DONE", "t1": "STOPPED"}
    require_alike(shared, 2)


def test_what_all_members_extend_counts_once(tmp_path: Path) -> None:
    def program(executor: FluidExecutor) -> Any:
        handle = submitted(executor)
        handle.extend("t0", 1)
        handle.extend("t0", 1)
        handle.wait(30)
        for trial in ("t0", "t1", "t2", "t3"):
            handle.extend(trial, 2)
        handle.wait(30)
        handle.extend("t1", 1)
        handle.wait(30)
        return counted(handle), states(handle)

    shared = tmp_path / "shared"
    found = together(*[member(shared, program)] * 2)
    assert found == [(expected(t0=7, t1=6, t2=5, t3=5), dict.fromkeys(["t0", "t1", "t2", "t3"], "DONE"))] * 2
    require_alike(shared, 2)


def test_what_one_member_extends_all_see(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def extends(executor: FluidExecutor) -> Any:
        handle = submitted(executor)
        handle.wait(30)
        handle.extend("t1", 4)
        handle.wait(30)
        return counted(handle)

    def waits(executor: FluidExecutor) -> Any:
        handle = submitted(executor)
        eventually(lambda: len(content(executor.run_dir).get("t1", ("", ()))[1]) == 7)
        handle.wait(30)
        return counted(handle)

    found = together(member(shared, extends), member(shared, waits))
    assert found == [expected(t0=3, t1=7, t2=3, t3=3)] * 2
    require_alike(shared, 2)


def test_trials_that_are_added_are_shared_too(tmp_path: Path) -> None:
    def program(executor: FluidExecutor) -> Any:
        handle = submitted(executor, 2)
        handle.add(Trial(slow, {"x": 1.0}, budget=3, trial_id="u0"))
        handle.wait(30)
        handle.add(*[Trial(slow, {"x": 1.0}, budget=2, trial_id=name) for name in ("u1", "u2")])
        handle.wait(30)
        return counted(handle), states(handle)

    shared = tmp_path / "shared"
    first, second = together(*[member(shared, program)] * 2)
    assert first == second and first[0] == expected(t0=3, t1=3, u0=3, u1=2, u2=2)
    assert set(first[1].values()) == {"DONE"}
    require_alike(shared, 2)


def test_a_group_of_one_member_runs_there_alone(tmp_path: Path) -> None:
    def own(executor: FluidExecutor) -> Any:
        mine = executor.submit_trialgroup(TrialGroup([Trial(slow, budget=3, trial_id="mine")], "own"))
        assert mine.wait(30)
        handle = submitted(executor)
        handle.wait(30)
        return counted(mine), states(handle)

    def other(executor: FluidExecutor) -> Any:
        handle = submitted(executor)
        handle.wait(30)
        return None, states(handle)

    shared = tmp_path / "shared"
    first, second = together(member(shared, own), member(shared, other))
    assert first[0] == expected(mine=3)
    assert first[1] == second[1] == dict.fromkeys(["t0", "t1", "t2", "t3"], "DONE")


def test_a_trial_that_runs_elsewhere_is_not_paused_or_called(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def program(executor: FluidExecutor) -> Any:
        handle, found = submitted(executor, 4, 60), []
        time.sleep(1.0)
        for trial in ("t0", "t1", "t2", "t3"):
            try:
                handle.pause(trial)
                handle.resume(trial)
                found.append("here")
            except InvalidFieldError as error:
                assert "is not run by this driver" in str(error)
                with pytest.raises(InvalidFieldError, match="is not run by this driver"):
                    handle.call(trial, "count")
                found.append("elsewhere")
        handle.wait(30)
        return found

    first, second = together(*[member(shared, program)] * 2)
    assert all({"here", "elsewhere"} >= set(pair) for pair in zip(first, second, strict=True))
    assert "elsewhere" in first and "elsewhere" in second
    require_alike(shared, 2)


def test_only_who_has_the_devices_runs_a_trial(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def program(executor: FluidExecutor) -> Any:
        big = Requires(tags=("big",), wait=True)
        group = TrialGroup([*trials(3, 3, requires=big), Trial(slow, budget=20, trial_id="any")], "g")
        handle = executor.submit_trialgroup(group)
        assert handle.wait(30)
        return states(handle)

    plain, tagged = [Device(0, "cpu")], [Device(0, "cpu", tags=("big",))]
    found = together(member(shared, program, devices=plain), member(shared, program, devices=tagged))
    assert found == [dict.fromkeys(["any", "t0", "t1", "t2"], "DONE")] * 2
    require_alike(shared, 2)
    assert len(list((shared / "log").iterdir())) < 100


def test_a_trial_that_its_program_has_forgotten_does_no_harm(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def program(executor: FluidExecutor) -> Any:
        handle = submitted(executor)
        handle.wait(30)
        handle.forget("t0")
        handle.forget("t1")
        time.sleep(0.5)
        handle.add(Trial(slow, budget=2, trial_id="u"))
        handle.wait(30)
        return states(handle)

    found = together(*[member(shared, program)] * 2)
    assert found == [dict.fromkeys(["t2", "t3", "u"], "DONE")] * 2
    require_alike(shared, 2)


def other_code(config: dict[str, Any], state: int | None) -> Any:
    for metrics, count in slow(config, state):
        yield {**metrics, "loss": -1.0}, count


@pytest.mark.parametrize("after", [0.0, 0.8])
@pytest.mark.parametrize(("change", "named"), [({"x": 0.5}, '"x": 0.5'), ({"budget": 41}, "41 iterations")])
def test_programs_that_submit_other_trials_do_not_go_on(
    tmp_path: Path, after: float, change: dict[str, Any], named: str
) -> None:
    def program(executor: FluidExecutor, change: dict[str, Any], after: float = 0.0) -> Any:
        time.sleep(after)
        made = [Trial(slow, {"x": 0.0}, budget=40, trial_id=f"t{place}") for place in range(3)]
        last = Trial(slow, {"x": change.get("x", 0.0)}, budget=change.get("budget", 40), trial_id="t3")
        executor.submit_trialgroup(TrialGroup([*made, last], "g")).wait()
        return "done"

    shared = tmp_path / "shared"
    found = together(
        member(shared, lambda executor: program(executor, {})),
        member(shared, lambda executor: program(executor, change, after)),
    )
    refused = [error for error in found if error != "done"]
    assert len(refused) == 1 and (not after or found[0] == "done"), found
    text = str(refused[0])
    assert isinstance(refused[0], FluidError) and "'t3'" in text and named in text
    assert "the program of each must submit the same trials of the group 'g'" in text


def test_a_trial_that_is_added_must_be_the_same(tmp_path: Path) -> None:
    def program(executor: FluidExecutor, x: float) -> Any:
        handle = submitted(executor, 1, 30)
        handle.add(Trial(slow, {"x": x}, budget=3, trial_id="more"))
        handle.wait()
        return "done"

    found = together(*[member(tmp_path / "shared", lambda executor, x=x: program(executor, x)) for x in (1.0, 2.0)])
    assert sorted(isinstance(error, FluidError) and "'more'" in str(error) for error in found) == [False, True], found


def test_other_code_of_a_group_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def program(executor: FluidExecutor, trainable: Any) -> Any:
        made = [Trial(trainable, {"x": 0.0}, budget=5, trial_id=f"t{place}") for place in range(3)]
        executor.submit_trialgroup(TrialGroup(made, "g")).wait()
        return "done"

    shared = tmp_path / "shared"
    members = [member(shared, lambda executor, one=one: program(executor, one)) for one in (slow, slow, other_code)]
    assert together(*members) == ["done"] * 3
    notes = [note for note in fluid.load(shared, metric="loss", mode="min").notes if "other code" in note]
    assert len(notes) == caplog.text.count("this driver runs other code than the first one: other_code, slow") > 0
    assert all(note.startswith("g: driver ") for note in notes)
    assert len(notes) in (1, 2), "of the three, those whose code is not the first one's"


def test_a_folder_of_one_driver_cannot_be_joined(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0):
        pass
    with pytest.raises(InvalidFieldError, match="holds the session of one driver"):
        FluidExecutor(**options_of(tmp_path / "run"))
    with pytest.raises(InvalidFieldError, match="needs run_dir="):
        FluidExecutor("local", 1, join=True, verbose=0)
