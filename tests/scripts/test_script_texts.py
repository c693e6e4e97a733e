"""What users write of a script: spaces, commands, sweep files, options; pure."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from script_sweeps import write_script

from fluid.cli import main
from fluid.errors import InvalidFieldError, MissingDependencyError
from fluid.scripts.command import Command, text_of
from fluid.scripts.options import BY_NAME, LEFT_OUT, OPTIONS
from fluid.scripts.space_text import parse_parameter, parse_space
from fluid.scripts.sweep_file import load_file, read_sweep_file
from fluid.scripts.trainable import Script
from fluid.search import Target, lograndint, loguniform, randint, uniform
from fluid.sweep import run

# -- spaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log:1e-5:1e-1", loguniform(1e-5, 1e-1)),
        ("0:1", uniform(0, 1)),
        ("uniform:-1:1", uniform(-1, 1)),
        ("0:1:0.25", uniform(0, 1, step=0.25)),
        ("int:1:8", randint(1, 9)),
        ("int:0:100:10", randint(0, 101, 10)),
        ("logint:1:1024", lograndint(1, 1025)),
        ("1,2,4", [1, 2, 4]),
        ("sgd, adam", ["sgd", "adam"]),
        ("true,False,null", [True, False, None]),
        ("none,cosine", ["none", "cosine"]),
        ("007,08,0,-1,00", ["007", "08", 0, -1, "00"]),
        ("choice:a:b,c:d", ["a:b", "c:d"]),
        ("choice:a", ["a"]),
        ("-1.5e-3", -0.0015),
        ("a b", "a b"),
    ],
)
def test_a_parameter(text: str, expected: Any) -> None:
    found = parse_parameter(text)
    assert found == expected
    assert [type(one) for one in found] == [type(one) for one in expected] if isinstance(found, list) else True


@pytest.mark.parametrize(
    "text", ["", "1:", "log:1", "log:0:1", "log:5:1", "int:1.5:2", "a:b", "1,,2", "0:1:2:3", "http://x"]
)
def test_what_is_no_parameter_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_parameter(text, "space['lr']")
    assert caught.value.field == "space['lr']" and caught.value.value == text


@pytest.mark.parametrize("text", ["schedule({0: 0.1, 20: 0.01})", " schedule(0.1)", "schedule:0:0.1"])
def test_a_schedule_is_refused_as_a_script_gets_its_values_once(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="a script gets its values once, as it starts"):
        parse_parameter(text, "space['lr']")
    assert parse_parameter("schedule,constant") == ["schedule", "constant"]


def test_a_nested_space() -> None:
    assert parse_space(["lr=0.1", "opt.name=sgd,adam", "opt.beta=0.9"]) == {
        "lr": 0.1,
        "opt": {"name": ["sgd", "adam"], "beta": 0.9},
    }
    for wrong in (["lr"], ["=1"], ["lr=1", "lr=2"], ["a=1", "a.b=2"], ["a..b=1"]):
        with pytest.raises(InvalidFieldError):
            parse_space(wrong)


# -- commands ------------------------------------------------------------------------------------


def test_a_command_is_filled_without_a_shell() -> None:
    command = Command.checked(["t", "--a={a}", "{b.c};$X", "{{a}}", "{trial_id}"], ["a", "b.c"])
    assert command.words({"a": [1, 2], "b": {"c": "x y"}}, {"trial_id": "t7"}) == [
        "t",
        "--a=[1, 2]",
        "x y;$X",
        "{a}",
        "t7",
    ]
    assert [text_of(value) for value in (True, None, 1e-5, 3, "x")] == ["True", "None", "1e-05", "3", "x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["t", "{lr}", "{rl}"], "{rl} is no placeholder"),
        (["t", "{lr}"], "no placeholder {depth}"),
        (["t", "{lr", "{depth}"], "a brace alone"),
        ([], "must be the script's command"),
    ],
)
def test_a_command_with_a_mistake_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(InvalidFieldError, match="(?s)" + said.replace("{", r"\{").replace("}", r"\}")):
        Command.checked(words, ["lr", "depth"])


def test_relative_paths_are_of_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script's working directory is the trial's own folder."""
    monkeypatch.chdir(tmp_path)
    Path(write_script(tmp_path, "#!/bin/sh", "train.sh")).chmod(0o700)
    for words, moved in (
        (["./train.sh", "a/b"], [f"{tmp_path}/train.sh", "a/b"]),
        (["sh", "train.sh"], ["sh", f"{tmp_path}/train.sh"]),
    ):
        for chdir, expected in ((True, moved), (False, words)):
            script = Script.checked(words, {"x": 1}, metric="loss", budget=1, chdir=chdir)
            assert list(script.command.template) == [*expected, "--x={x}"]


def test_parameters_are_appended_where_the_command_names_none() -> None:
    words = ["t", "--out", "{trial_dir}"]
    assert Command.checked(words, ["lr"]).template == ("t", "--out", "{trial_dir}", "--lr={lr}")
    for given in (["t", "{config}"], ["t", "{config_file}"]):
        assert Command.checked(given, ["lr"]).template == tuple(given)
    assert Command.checked(["t"], ["lr"], in_environment=True).template == ("t",)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"metric_from": ["csv"]}, "metric_from"),
        ({"metric_from": ["tensorboard"]}, "metric_from"),
        ({"metric_from": ["mlflow:/one/for/all"]}, "metric_from"),
        ({"metric_from": ["mlflow:{nothing}"]}, "metric_from"),
        ({"metric_regex": ["loss=(.*)"]}, "metric_regex"),
        ({"metric_regex": ["(?P<loss>"]}, "metric_regex"),
        ({"checkpoint_flag": "--resume {chekpoint}"}, "checkpoint_flag"),
        ({"checkpoint_flag": "--resume {checkpoint}"}, "checkpoint_flag"),
        ({"grace_s": "soon"}, "grace_s"),
        ({"grace_s": -1}, "grace_s"),
    ],
)
def test_an_option_of_a_script_that_cannot_be_used(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Script.checked([sys.executable, __file__], {"lr": 1}, metric="loss", budget=1, **options)
    assert caught.value.field == field


# -- options -------------------------------------------------------------------------------------


def test_every_argument_of_fluid_run_is_an_option_or_left_out_for_a_reason() -> None:
    parameters = set(inspect.signature(run).parameters)
    assert parameters - set(BY_NAME) - set(LEFT_OUT) == set(), "add a row to fluid/scripts/options.py"
    assert {option.name for option in OPTIONS if option.part == "run"} <= parameters
    assert set(LEFT_OUT) <= parameters and not set(LEFT_OUT) & set(BY_NAME)
    assert len(BY_NAME) == len(OPTIONS)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", *arguments]) == 2
    return capsys.readouterr().err


def test_what_is_refused_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", sys.executable, __file__]
    assert refusal(capsys, "--metric", "loss", *command).startswith("fluid: error: space=")
    assert refusal(capsys, "--space", "x=1", *command).startswith("fluid: error: metric=None")
    shared = ["--space", "x=1,2", "--metric", "loss"]
    assert refusal(capsys, *shared).startswith("fluid: error: command=")
    assert refusal(capsys, *shared, "--samples", "many", *command).startswith("fluid: error: samples='many'")
    assert refusal(capsys, *shared, "--stop", "0.5", *command).startswith("fluid: error: stop='0.5'")
    assert "is called --samples here" in refusal(capsys, *shared, "--num-samples", "3", *command)
    assert "did you mean python train.py?" in refusal(capsys, *shared, "--", "train.py")
    assert "without quotes around all of them" in refusal(capsys, *shared, "--", "python train.py")
    assert "is no file" in refusal(capsys, *shared, "--", sys.executable, "no/train.py")
    assert "follows --" in refusal(capsys, *shared, "python", "train.py")
    assert "follows --" in refusal(capsys, "train.py", *shared)
    assert refusal(capsys, "no.yaml", *shared, *command).startswith("fluid: error: file='no.yaml'")
    assert "is no program" in refusal(capsys, *shared, "--", "no-such-program")


def test_a_dry_run_shows_the_first_commands(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", "--space", "lr=log:1e-5:1e-1", "--space", "n=1,2,4", "--metric", "loss", "--dry-run"]
    assert main([*given, "--", sys.executable, __file__, "--out", "{trial_dir}"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line[:4] == [sys.executable, __file__, "--out", "{trial_dir}"]
        assert 1e-5 <= float(line[4].removeprefix("--lr=")) <= 1e-1 and line[5] in ("--n=1", "--n=2", "--n=4")
    given = ["run", "--space", "n=1,2", "--metric", "loss", "--algorithm", "grid", "--dry-run"]
    assert main([*given, "--", sys.executable, "-m", "train"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{sys.executable} -m train --n={n}" for n in (1, 2)]


# -- sweep files ---------------------------------------------------------------------------------

_OWN = """
command: python train.py --lr {lr}
space:
  lr: log:1e-5:1e-1
  layers: [1, 2e0, sgd]
  opt: {beta: 0:1, fixed: 1e-3}
metric: val_loss
mode: min
algorithm: asha
samples: 20
run-dir: runs/one
time_budget_s: 10m
points: [{lr: 0.1}]
"""


def test_a_sweep_file_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    found = load_file(write_script(tmp_path, _OWN, "sweep.yaml"))
    assert found.command == ["python", "train.py", "--lr", "{lr}"]
    assert found.space == {
        "lr": loguniform(1e-5, 1e-1),
        "layers": [1, 2.0, "sgd"],
        "opt": {"beta": uniform(0, 1), "fixed": 1e-3},
    }
    expected = {"metric": "val_loss", "mode": "min", "algorithm": "asha", "samples": 20, "run_dir": "runs/one"}
    assert found.options == {**expected, "time_budget_s": "10m", "points": [{"lr": 0.1}]} and not found.notes


def test_yaml_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match=r"PyYAML .or a sweep file of JSON."):
        load_file(write_script(tmp_path, _OWN, "sweep.yaml"))


def _wandb(**fields: Any) -> dict[str, Any]:
    parameters = {"lr": {"min": 0.1, "max": 1.0}}
    return {"program": "train.py", "method": "random", "metric": {"name": "loss"}, "parameters": parameters, **fields}


def test_a_sweep_file_of_wandb_s(tmp_path: Path) -> None:
    content = _wandb(
        project="mine",
        run_cap=12,
        metric={"name": "val/loss", "goal": "minimize", "target": 0.1},
        early_terminate={"type": "hyperband", "max_iter": 27, "s": 2},
        parameters={
            "lr": {"distribution": "log_uniform_values", "min": "1e-5", "max": "1e-1"},
            "depth": {"min": 1, "max": 8},
            "drop": {"distribution": "q_uniform", "min": 0.0, "max": 0.5, "q": 0.1},
            "units": {"distribution": "q_log_uniform_values", "min": 16, "max": 256},
            "name": {"values": ["a", "b"]},
            "seed": {"value": 7},
            "opt": {"parameters": {"beta": {"distribution": "uniform", "min": 0, "max": 1}}},
        },
    )
    found = load_file(write_script(tmp_path, json.dumps(content), "sweep.json"))
    assert found.space == {
        "lr": loguniform(1e-5, 1e-1),
        "depth": randint(1, 9),
        "drop": uniform(0.0, 0.5, step=0.1),
        "units": lograndint(16, 257),
        "name": ["a", "b"],
        "seed": 7,
        "opt": {"beta": uniform(0, 1)},
    }
    names = ("lr", "depth", "drop", "units", "name", "seed", "opt.beta")
    assert found.command == ["/usr/bin/env", "python", "train.py", *(f"--{name}={{{name}}}" for name in names)]
    options = dict(found.options)
    assert isinstance(options.pop("stop"), Target)
    expected = {"algorithm": "asha", "samples": 12, "metric": "val/loss", "mode": "min", "eta": 3, "budget": 27}
    assert options == {**expected, "min_budget": 3}
    for word in ("project", "nested", "hyperband"):
        assert any(word in note for note in found.notes), word


def test_the_command_of_a_sweep_file_of_wandb_s() -> None:
    def words(*command: str) -> list[str]:
        return read_sweep_file(_wandb(command=list(command))).command

    assert words("${env}", "python3", "${program}", "${args_no_hyphens}", "{x}") == [
        *("/usr/bin/env", "python3", "train.py", "lr={lr}", "{{x}}"),
    ]
    assert words("${interpreter}", "-m", "${program}", "${args_json}") == ["python", "-m", "train.py", "{config}"]
    assert read_sweep_file(_wandb(command=["python", "t.py"])).options["config_in_env"] is True
    assert words("run", "--config", "${args_json_file}") == ["run", "--config", "{config_file}"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"method": "pbt"}, "method"),
        ({"schedule": 1}, "schedule"),
        ({"metric": {"name": "loss", "goal": "less"}}, "metric.goal"),
        ({"metric": {"name": "loss", "impute": "worst"}}, "metric.impute"),
        ({"parameters": {"lr": {"distribution": "normal", "mu": 0, "sigma": 1}}}, "parameters.lr.distribution"),
        ({"parameters": {"lr": {"distribution": "beta", "min": 0, "max": 1}}}, "parameters.lr.distribution"),
        ({"parameters": {"lr": {"values": [1, 2], "probabilities": [0.5, 0.5]}}}, "parameters.lr.probabilities"),
        ({"parameters": {"lr": {"min": 1}}}, "parameters.lr"),
        ({"parameters": {"lr": {"min": 2.0, "max": 1.0}}}, "parameters.lr"),
        ({"parameters": {}}, "parameters"),
        ({"early_terminate": {"type": "envelope"}}, "early_terminate"),
        ({"early_terminate": {"type": "hyperband", "s": 2}}, "early_terminate.s"),
        ({"command": ["${envvar:X}"]}, "command"),
    ],
)
def test_what_has_no_meaning_in_a_sweep_file_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_sweep_file(_wandb(**fields))
    assert caught.value.field == field


def test_what_is_left_out_of_a_sweep_file_is_said() -> None:
    given = _wandb(method="bayes", early_terminate={"type": "hyperband", "max_iter": 9}, entity="me", description="x")
    found = read_sweep_file(given)
    assert found.options["algorithm"] == "tpe" and found.options["budget"] == 9
    for word in ("bayes", "early_terminate", "entity", "description"):
        assert any(word in note for note in found.notes), word
