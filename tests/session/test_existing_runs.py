"""``if_exists``: what is done where a run folder holds a session already, and how runs are deleted."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE

import fluid
from fluid import FluidExecutor, InvalidFieldError, Output, Trial, TrialGroup
from fluid.backends.hosts import memory as host_memory
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing
from fluid.resources import Device
from fluid.results.run_files import read_facts
from fluid.session.folder.existing import delete_run
from fluid.session.folder.folder import RunFolder


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    while True:
        yield {"loss": config["lr"]}


def replayed(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    yield {"loss": config["lr"]}


replayed.replay = lambda config, iterations: [ReplayedIteration({"loss": 1.0}, seconds=1.0) for _ in iterations]  # type: ignore[attr-defined]


def executor_in(folder: Path, **options: Any) -> FluidExecutor:
    backend = SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0)])
    return FluidExecutor(**{"backend": backend, "run_dir": folder, "verbose": 0, **options})


def use(folder: Path, trial: str = "a", **options: Any) -> Path:
    """Runs a session of one trial there; returns its run folder."""
    with executor_in(folder, **options) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5}, trial_id=trial)])).wait(PATIENCE)
        return executor.run_dir


def trials_in(folder: Path) -> list[str]:
    return [trial.trial_id for trial in fluid.load(folder).trials]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sweep(folder: Path | None, trainable: Any = train, **options: Any) -> fluid.SweepResult:
    given = {"samples": 2, "budget": 2, "algorithm": "random", "output": Output(verbose=0), **options}
    return fluid.run(trainable, {"lr": fluid.search.uniform(0, 1)}, metric="loss", run_dir=folder, **given)


# -- what takes the place of a run ---------------------------------------------------------------------------------


def test_a_run_is_replaced_once_the_new_session_has_trials(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    with executor_in(run, if_exists="overwrite") as executor:
        (aside,) = tmp_path.glob(".run.replaced-*")
        assert (aside / "results.jsonl").stat().st_size, "the old one is whole until then"
        assert executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5}, trial_id="b")])).wait(PATIENCE)
        assert os.listdir(tmp_path) == ["run"]
    assert trials_in(run) == ["b"]
    assert use(run, "c", if_exists="overwrite") == run and trials_in(run) == ["c"]


def test_a_run_stays_where_the_new_session_has_no_trials(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    before = content(run)
    executor_in(run, if_exists="overwrite").close()
    assert content(run) == before and os.listdir(tmp_path) == ["run"]
    refused = [
        (FluidExecutor, {"backend": "local", "devices": 1, "packing": "mps", "verbose": 0}, "packing"),
        (FluidExecutor, {"backend": "local", "devices": [99999999], "verbose": 0}, "devices"),
        (FluidExecutor, {"backend": "local", "devices": 1, "spare_lanes": -1, "verbose": 0}, "spare_lanes"),
    ]
    for make, options, field in refused:
        with pytest.raises(InvalidFieldError, match=f"^{field}"):
            make(run_dir=run, if_exists="overwrite", **options)
        assert content(run) == before and os.listdir(tmp_path) == ["run"]


def test_a_sweep_whose_arguments_do_not_fit_replaces_nothing(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    before, lock = content(run), threading.Lock()

    def broken(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        yield {"loss": float(lock.locked())}

    for options, field in (({"budget": 0}, "budget"), ({"trial_options": {"x": 1}}, r"trial_options\['x'\]")):
        with pytest.raises(InvalidFieldError, match=f"^{field}"):
            sweep(run, if_exists="overwrite", **options)
    with pytest.raises(InvalidFieldError, match="cannot be pickled"):
        sweep(run, broken, if_exists="overwrite")
    assert content(run) == before and os.listdir(tmp_path) == ["run"]


def test_only_what_sessions_write_is_deleted(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    (run / "train.py").write_text("mine")
    before = content(run)
    with pytest.raises(InvalidFieldError, match=r"holds other files than a session's: train\.py"):
        executor_in(run, if_exists="overwrite")
    with pytest.raises(InvalidFieldError, match=r"train\.py"):
        delete_run(run)
    assert content(run) == before
    with executor_in(tmp_path / "live") as executor:
        executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")]))
        for refused in (
            lambda: executor_in(executor.run_dir, if_exists="overwrite"),
            lambda: delete_run(tmp_path / "live"),
        ):
            with pytest.raises(InvalidFieldError, match="is in use: the session of this process"):
                refused()
    assert trials_in(tmp_path / "live") == ["a"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(InvalidFieldError, match="is not the folder of a run"):
        delete_run(tmp_path / "other")
    assert use(tmp_path / "other", if_exists="overwrite") == tmp_path / "other"
    assert (tmp_path / "other/notes.txt").read_text() == "mine", "there was no run to replace"


def test_checkpoints_that_a_killed_session_left_in_host_memory_go_with_its_run(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    places = [Path(host_memory.RAM_DISK, f"fluid-{secrets.token_hex(16)}-localhost") for _ in range(2)]
    for place, folder in zip(places, (run, tmp_path), strict=True):
        os.close(host_memory.enter(str(place), str(folder), temporary=False))
    try:
        executor_in(run, if_exists="overwrite").close()
        assert all(map(Path.exists, places)), "the run stays"
        use(run, "a", if_exists="overwrite")
        assert [place.exists() for place in places] == [False, True]
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def test_the_folder_in_which_the_program_runs_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = use(tmp_path / "run")
    monkeypatch.chdir(run / "logs")
    for folder in (run, Path("..")):
        with pytest.raises(InvalidFieldError, match="is not deleted: this program runs in that folder"):
            executor_in(folder, if_exists="overwrite")
    assert trials_in(run) == ["a"]


def test_a_link_to_a_run_stays_a_link(tmp_path: Path) -> None:
    run = use(tmp_path / "disk/run")
    (tmp_path / "link").symlink_to(run)
    use(tmp_path / "link", "b", if_exists="overwrite")
    assert (tmp_path / "link").is_symlink() and trials_in(run) == ["b"]


def test_what_a_killed_program_had_set_aside_goes_with_the_next_one(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    made = RunFolder.create(run, "overwrite")
    left = next(tmp_path.glob(".run.replaced-*"))
    assert made._replaced is not None
    made._replaced._lock.release()
    made._replaced = None  # As after a kill: nothing puts it back.
    made.close()
    assert trials_in(left) == ["a"], "no kill loses the run before there is another one"
    use(run, "b", if_exists="overwrite")
    use(run, "c", if_exists="overwrite")
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_beside_it(tmp_path: Path) -> None:
    names = [use(tmp_path / "run", if_exists="new").name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    (tmp_path / "run-4").write_text("a file")
    with (
        executor_in(tmp_path / "run", if_exists="new") as fifth,
        executor_in(tmp_path / "run", if_exists="new") as sixth,
    ):
        assert [fifth.run_dir.name, sixth.run_dir.name] == ["run-5", "run-6"]


def test_an_executor_goes_on_with_the_session(tmp_path: Path) -> None:
    run = use(tmp_path / "run", group_policy="srsf", keep="none")
    with executor_in(run, if_exists="resume", keep=None) as executor:
        assert executor.handles[0].states == {"a": "DONE"} and read_facts(run)["group_policy"] == "srsf"
    with pytest.raises(InvalidFieldError, match="if_exists='overwrite': cannot be where a session goes on"):
        FluidExecutor.resume(run, if_exists="overwrite")
    assert use(tmp_path / "new", if_exists="resume") == tmp_path / "new", "there was none to go on with"


# -- in the words of fluid.run -------------------------------------------------------------------------------------


def test_a_notebook_cell_is_run_again_after_a_fixed_typo(tmp_path: Path) -> None:
    def typo(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        yield {"loss": config["lrr"]}

    run = tmp_path / "run"
    with pytest.raises(fluid.SweepFailedError):
        sweep(run, typo)
    said = r"run_dir=.*holds a session already: pass resume=True to go on, if_exists='overwrite' to delete it, or 'new'"
    with pytest.raises(InvalidFieldError, match=said):
        sweep(run)
    assert len(sweep(run, if_exists="overwrite").trials) == 2
    assert sweep(run, if_exists="new").run_dir == tmp_path / "run-2"
    again = sweep(run, if_exists="resume")
    assert again.run_dir == run and [len(trial.results) for trial in again.trials] == [2, 2]
    assert sweep(run, output=Output(verbose=0, if_exists="resume"), resume=True).run_dir == run


def test_what_does_not_go_together(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    with pytest.raises(InvalidFieldError, match="if_exists='overwrite': contradicts resume=True"):
        sweep(run, if_exists="overwrite", resume=True)
    for what in ("resume", "overwrite"):
        with pytest.raises(InvalidFieldError, match=f"if_exists='{what}': needs run_dir"):
            sweep(None, if_exists=what)
        with pytest.raises(InvalidFieldError, match=f"if_exists='{what}': needs run_dir"):
            FluidExecutor("local", 1, output=Output(verbose=0, if_exists=what))
    for what in ("resume", "overwrite", "new"):
        with pytest.raises(InvalidFieldError, match=f"if_exists='{what}': cannot be with join=True"):
            sweep(tmp_path / "shared", if_exists=what, join=True)
    with pytest.raises(InvalidFieldError, match="if_exists='keep': must be one of"):
        sweep(run, if_exists="keep")
    with (
        executor_in(tmp_path / "in force"),
        pytest.raises(InvalidFieldError, match="if_exists='new': is of an executor"),
    ):
        sweep(None, if_exists="new", output=None)
    assert trials_in(run) == ["a"]


def test_a_rehearsal_deletes_nothing(tmp_path: Path) -> None:
    run = use(tmp_path / "run")
    before = content(run)
    with (
        rehearsing(RehearsalPlan(devices=1)),
        pytest.raises(InvalidFieldError, match="a rehearsal, which deletes nothing"),
    ):
        FluidExecutor(run_dir=run, if_exists="overwrite", verbose=0)
    with rehearsing(RehearsalPlan(devices=1, folder=tmp_path / "rehearsed")):
        for what in ("error", "overwrite", "resume"):
            with FluidExecutor(run_dir=run, if_exists=what, verbose=0) as executor:
                assert executor.run_dir.parent == tmp_path / "rehearsed"
    with pytest.raises(InvalidFieldError, match="if_exists='resume': cannot be in a rehearsal"):
        FluidExecutor("simulated", 1, run_dir=run, if_exists="resume", verbose=0)
    assert content(run) == before


# -- names of new folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [("train-asha", "train-asha-"), ("Größe / a:b", "Groe-a-b-"), ("../..", ""), ("", ""), ("x" * 300, "x" * 48 + "-")],
)
def test_the_name_of_a_new_folder_has_the_sweeps(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path))
    folder = RunFolder.create(None, name=name)
    folder.close()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-\d{{6}}-{re.escape(part)}[0-9a-f]{{6}}", folder.path.name)
    assert folder.path.parent == tmp_path


def test_a_sweep_that_makes_its_executor_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path))
    with rehearsing(RehearsalPlan(devices=1)):
        result = sweep(None, replayed, name="first try", output=None)
    assert "-first-try-" in result.run_dir.name


# -- several programs, and what is not a session's -------------------------------------------------------------------


def test_a_session_that_another_program_began_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = use(tmp_path / "run")
    others: list[FluidExecutor] = []
    made = RunFolder._made.__func__  # type: ignore[attr-defined]

    def made_late(kind: type[RunFolder], folder: Path) -> RunFolder:
        monkeypatch.setattr(RunFolder, "_made", classmethod(made))
        others.append(executor_in(run))  # As another program does at this moment, which finds an empty folder.
        others[0].submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5}, trial_id="other")]))
        return made(kind, folder)

    monkeypatch.setattr(RunFolder, "_made", classmethod(made_late))
    with pytest.raises(InvalidFieldError, match="is in use"):
        executor_in(run, if_exists="overwrite")
    assert trials_in(run) == ["other"], "the other program's run was deleted"
    others[0].close()
    (aside,) = tmp_path.glob(".run.replaced-*")
    assert trials_in(aside) == ["a"] and str(aside) in caplog.text


def test_a_folder_that_another_program_made_meanwhile_is_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rename = use(tmp_path / "run"), os.rename

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        monkeypatch.setattr(os, "rename", rename)
        run.mkdir()

    monkeypatch.setattr(os, "rename", renamed)
    assert use(run, "b", if_exists="overwrite") == run
    assert trials_in(run) == ["b"] and os.listdir(tmp_path) == ["run"]
    monkeypatch.setattr(os, "rename", renamed)
    delete_run(run)
    assert not run.exists() or not os.listdir(run)


@pytest.mark.parametrize(
    "mine", ["files/data.csv", "csv/data.csv", "logs/mine.log", "fluid-lr/results.jsonl", "trials/nested/results.jsonl"]
)
def test_what_has_a_name_as_of_a_session_may_be_the_users(tmp_path: Path, mine: str) -> None:
    run = use(tmp_path / "run")
    (run / mine).parent.mkdir(parents=True, exist_ok=True)
    (run / mine).write_text("mine\n")
    for deletes in (lambda: delete_run(run), lambda: executor_in(run, if_exists="overwrite")):
        with pytest.raises(InvalidFieldError, match=f"it holds other files than a session's: .*{mine.split('/')[0]}"):
            deletes()
    assert (run / mine).read_text() == "mine\n"


def test_what_the_loggers_write_is_a_sessions(tmp_path: Path) -> None:
    sweep(tmp_path / "run", loggers=[fluid.loggers.CSV()])
    assert (tmp_path / "run/csv/trials.csv").exists()
    delete_run(tmp_path / "run")
    assert not os.listdir(tmp_path)
