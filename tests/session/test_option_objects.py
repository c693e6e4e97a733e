"""Sharing, Goals, Keep and Output: the same as the names of their fields by themselves, in all that takes options."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Goals, InvalidFieldError, Keep, Output, Sharing, Trial, TrialGroup
from fluid.loggers import CSV
from fluid.rehearsal.plan import RehearsalPlan, rehearsing
from fluid.results.run_files import read_facts
from fluid.session.listeners import TrialListener
from fluid.session.options import FIELDS, OBJECTS, ExecutorOptions, FlatOptions, flattened

#: A value of each field, which is not its default; a further field has to be added here.
VALUES: dict[str, Any] = {
    "packing": "timeslice",
    "max_packing": 3,
    "isolation": "lane",
    "lane_policy": "srtf",
    "rounds": True,
    "max_fused": 8,
    "deadline": "2h",
    "budget_usd": 40.0,
    "price_per_device_hour": 2.5,
    "keep": "best:3",
    "checkpoint_bytes": "10GB",
    "verbose": 0,
    "loggers": [CSV()],
    "metrics_port": "0.0.0.0:0",
    "run_dir": Path("runs"),
    "join": True,
    "if_exists": "new",
}
#: Those that an executor names itself: they may be given by position, or as the object.
BY_POSITION = {"packing", "max_packing", "keep"}
#: What a field cannot do without.
BESIDES: dict[str, dict[str, Any]] = {"budget_usd": {"price_per_device_hour": 2.5}, "join": {"run_dir": Path("runs")}}
#: Each field, with the argument whose object it is of.
ALL = [(name, field) for name, those in FIELDS.items() for field in those]


def asked(options: ExecutorOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options) if field.init}


@pytest.mark.parametrize(("name", "field"), ALL)
def test_a_field_by_itself_means_the_same_as_in_its_object(name: str, field: str) -> None:
    given = {field: VALUES[field], **BESIDES.get(field, {})}
    flat, made = ExecutorOptions.in_force(**given), OBJECTS[name](**given)
    assert asked(flat) == asked(ExecutorOptions.in_force(**{name: made}))
    assert asked(flat) != asked(ExecutorOptions()), "the value is the default, which shows nothing"
    assert flat.facts == ExecutorOptions.in_force(**{name: made}).facts
    assert made.given == given and replace(made) == made
    assert pickle.loads(pickle.dumps(made)).given.keys() == given.keys()


@pytest.mark.parametrize(("name", "field"), ALL)
def test_a_field_that_is_given_both_ways_must_be_the_same(name: str, field: str) -> None:
    if name == field:
        pytest.skip("keep is one argument, which takes both")
    given = {field: VALUES[field], **BESIDES.get(field, {})}
    made = OBJECTS[name](**given)
    assert asked(ExecutorOptions.in_force(**{name: made, field: VALUES[field]})) == asked(
        ExecutorOptions.in_force(**given)
    )
    default = getattr(OBJECTS[name](), field)
    for other, flat in ((made, default), (OBJECTS[name](**{field: default}), VALUES[field])):
        with pytest.raises(InvalidFieldError, match=rf"^{field}=.*: {name}=.*says {field}=.*give it once") as refused:
            ExecutorOptions.in_force(**{name: other, field: flat})
        assert refused.value.value == flat


def test_the_flat_names_are_the_fields() -> None:
    assert set(VALUES) == {field for _, field in ALL}
    assert set(FlatOptions.__annotations__) == set(VALUES) - BY_POSITION
    objects = {field.name: field.type for kind in OBJECTS.values() for field in fields(kind)}
    assert {name: FlatOptions.__annotations__[name].__forward_arg__ for name in set(VALUES) - BY_POSITION} == {
        name: objects[name] for name in set(VALUES) - BY_POSITION
    }, "their types differ"


def test_packing_may_be_given_by_position(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with FluidExecutor("local", 1, "fifo", "timeslice", 2, 1, run_dir=run, verbose=0):
        pass
    facts = json.loads((run / "session.json").read_text())
    assert (facts["planner"], facts["packing"]) == ("fifo", "timeslice")
    with pytest.raises(InvalidFieldError, match="packing='off': sharing=Sharing"):
        FluidExecutor("local", 1, "fifo", "off", sharing=Sharing("mps"))


def test_facts_that_only_one_says_are_put_together() -> None:
    both = ExecutorOptions.in_force(
        sharing=Sharing("timeslice"),
        max_packing=2,
        keep=Keep("last"),
        checkpoint_bytes=7,
        output=Output(0),
        run_dir="x",
    )
    assert both.sharing == Sharing("timeslice", max_packing=2)
    assert both.keep == Keep("last", checkpoint_bytes=7)
    assert both.output == Output(0, run_dir="x")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharing": "mps"}, r"^sharing='mps': must be a fluid.Sharing: Sharing\('mps'\), or packing='mps'"),
        ({"goals": "2h"}, r"^goals='2h': must be a fluid.Goals: Goals\('2h'\), or deadline='2h'"),
        ({"goals": 60.0}, r"^goals=60.0: must be a fluid.Goals: Goals\(60.0\), or deadline=60.0"),
        ({"output": 0}, r"^output=0: must be a fluid.Output: Output\(0\), or verbose=0"),
        ({"sharing": {"packing": "mps"}}, r"^sharing=\{'packing': 'mps'\}: must be a fluid.Sharing$"),
        ({"sharing": Sharing}, r"^sharing=.*must be a fluid.Sharing$"),
        ({"sharing": Goals()}, r"^sharing=.*must be a fluid.Sharing$"),
    ],
)
def test_something_else_than_the_object_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidFieldError, match=text):
        FluidExecutor("local", 1, **options)
    with pytest.raises(InvalidFieldError, match=text):
        fluid.run(train, {}, metric="loss", **options)
    with pytest.raises(InvalidFieldError, match=text):
        FluidExecutor.resume(tmp_path, **options)


def test_a_name_that_is_none_is_refused_as_python_does() -> None:
    wrong: dict[str, Any] = {"packin": "off"}
    with pytest.raises(TypeError, match=r"FluidExecutor\(\) got an unexpected keyword argument 'packin'"):
        FluidExecutor("local", 1, **wrong)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Sharing, {"packing": "yes"}, "packing='yes': must be one of auto, fused, lane, mps, off, timeslice"),
        (
            Sharing,
            {"max_packing": 0},
            "must be at least 1; with packing='auto' it is the most processes on a device",
        ),
        (
            Sharing,
            {"packing": "lane", "max_packing": 1.5},
            "max_packing=1.5: must be a whole number; with packing='lane' it is the most trials that take turns",
        ),
        (Sharing, {"packing": "off", "max_packing": 0}, "must be at least 1; with packing='off' it has no meaning"),
        (Sharing, {"rounds": 1}, "rounds=1: must be True or False"),
        (Sharing, {"rounds": True, "lane_policy": "fair"}, "lane_policy='fair': has no meaning with rounds=True"),
        (
            Sharing,
            {"packing": "lane", "isolation": "trial"},
            "isolation='trial': trials share a process with packing='lane'",
        ),
        (Sharing, {"packing": "fused", "max_fused": 1}, 'max_fused=1: must be at least 2 with packing="fused"'),
        (Goals, {"deadline": "soon"}, "deadline='soon': must be seconds above 0"),
        (Goals, {"budget_usd": 1.0}, "budget_usd=1.0: needs price_per_device_hour above 0"),
        (Goals, {"price_per_device_hour": -1}, "price_per_device_hour=-1: must be at least 0"),
        (Keep, {"keep": 3}, "keep=3: must be 'none', 'last' or 'best:k', such as 'best:1', a Keep with one of these"),
        (Keep, {"checkpoint_bytes": "much"}, "checkpoint_bytes='much': must be a number of bytes"),
        (Output, {"verbose": 2}, "verbose=2: must be 0 or 1"),
        (Output, {"loggers": "csv"}, "loggers='csv': must be a list of loggers"),
        (Output, {"loggers": [CSV(), 3]}, "loggers[1]=3: must be an object derived from TrialListener"),
        (Output, {"metrics_port": "web"}, "metrics_port='web': must be a port"),
    ],
)
def test_an_object_checks_itself_and_the_flat_names_are_checked_alike(
    kind: type[Any], given: dict[str, Any], text: str
) -> None:
    for make in (kind, ExecutorOptions.in_force):
        with pytest.raises(InvalidFieldError) as refused:
            make(**given)
        assert text in str(refused.value)


@pytest.mark.parametrize("kind", OBJECTS.values())
def test_only_the_first_field_goes_without_its_name(kind: type[Any]) -> None:
    first, second, *_ = fields(kind)
    assert kind(VALUES[first.name]).given == {first.name: VALUES[first.name]}
    with pytest.raises(TypeError):
        kind(VALUES[first.name], VALUES[second.name])
    with pytest.raises(AttributeError):
        kind().verbose = 1


# -- what takes them


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        yield {"loss": 1.0 / step}


class Hears(TrialListener):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_result(self, trial: Any, result: Any) -> None:
        self.losses.append(result.metrics["loss"])


def test_an_executor_made_of_objects(tmp_path: Path) -> None:
    logger = CSV()
    with FluidExecutor(
        "local",
        1,
        sharing=Sharing("lane", max_packing=2),
        goals=Goals(price_per_device_hour=2.0),
        keep=Keep("none", checkpoint_bytes="1GB"),
        output=Output(0, loggers=[logger], run_dir=tmp_path / "run"),
    ) as executor:
        executor.submit_trialgroup(TrialGroup([Trial(train, budget=2)])).wait(60.0)
    facts = read_facts(tmp_path / "run")
    assert facts["packing"] == "lane" and facts["isolation"] == "lane"
    assert facts["keep"] == "none" and facts["checkpoint_bytes"] == 10**9
    assert facts["price_per_device_hour"] == 2.0
    assert (tmp_path / "run" / "csv" / "trials.csv").exists()


def test_a_session_goes_on_with_objects_and_what_they_leave_out_is_its_own(tmp_path: Path) -> None:
    first = Output(0, run_dir=tmp_path / "run")
    goals = Goals("2h", budget_usd=40.0, price_per_device_hour=2.0)
    with FluidExecutor("local", 1, goals=goals, keep=Keep("last", checkpoint_bytes="1GB"), output=first):
        pass
    more = Goals(budget_usd=10.0, price_per_device_hour=4.0)
    FluidExecutor.resume(tmp_path / "run", backend="local", devices=1, output=first, goals=more, keep="none").close()
    facts = read_facts(tmp_path / "run")
    assert (facts["keep"], facts["checkpoint_bytes"]) == ("none", 10**9)
    assert (facts["budget_usd"], facts["price_per_device_hour"]) == (10.0, 4.0)
    assert 7000.0 < facts["deadline_s"] < 7200.0
    FluidExecutor.resume(tmp_path / "run", backend="local", devices=1, output=first, keep=Keep()).close()
    facts = read_facts(tmp_path / "run")
    assert (facts["keep"], facts["checkpoint_bytes"]) == ("none", 10**9), "an object that says nothing changes nothing"
    with pytest.raises(InvalidFieldError, match=r"^run_dir=.*says run_dir="):
        FluidExecutor.resume(tmp_path / "run", output=Output(run_dir=tmp_path / "other"))


def test_a_sweep_made_of_objects(tmp_path: Path) -> None:
    result = fluid.run(
        train,
        {"x": [1, 2]},
        metric="loss",
        algorithm="grid",
        budget=2,
        sharing=Sharing("off"),
        goals=Goals("2h", price_per_device_hour=2.0),
        keep="none",
        output=Output(0, run_dir=tmp_path / "run"),
    )
    facts = read_facts(tmp_path / "run")
    assert result.run_dir == tmp_path / "run" and len(result.trials) == 2
    assert facts["packing"] == "off" and facts["keep"] == "none" and facts["price_per_device_hour"] == 2.0
    assert 7000.0 < facts["deadline_s"] < 7200.0, "from the call on"


def test_a_sweep_on_an_executor_takes_its_deadline_only(tmp_path: Path) -> None:
    grid = {"metric": "loss", "algorithm": "grid", "budget": 1}
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0):
        for given, name in (
            ({"sharing": Sharing("off")}, "packing"),
            ({"goals": Goals(price_per_device_hour=2.0)}, "price_per_device_hour"),
            ({"keep": "last"}, "keep"),
            ({"output": Output(0)}, "verbose"),
            ({"output": Output(run_dir=tmp_path / "other")}, "run_dir"),
        ):
            with pytest.raises(InvalidFieldError, match=rf"^{name}=.*FluidExecutor\({name}=\.\.\.\)"):
                fluid.run(train, {"x": [1]}, **grid, **given)
        with pytest.raises(InvalidFieldError, match=r"^deadline='1h'.*says deadline='2h'"):
            fluid.run(train, {"x": [1]}, **grid, deadline="1h", goals=Goals("2h"))
        assert len(fluid.run(train, {"x": [1]}, **grid, goals=Goals("2h")).trials) == 1


def test_a_rehearsal_sets_fields_of_objects_too(tmp_path: Path) -> None:
    plan = RehearsalPlan(options=(("verbose", 0), ("packing", "off")), folder=tmp_path)
    given = {
        "sharing": Sharing("lane", max_packing=3),
        "keep": Keep("last"),
        "output": Output(loggers=[CSV()], metrics_port=0),
    }
    with rehearsing(plan):
        options = ExecutorOptions.in_force(**given)
    assert options.sharing == Sharing("off", max_packing=3)
    assert options.keep == Keep("none") and options.output == Output(0, run_dir=tmp_path / "1")


class Side(Sharing):
    """A user's own: what it says it says by its ``__init__``."""

    def __init__(self, most: int) -> None:
        super().__init__("lane", max_packing=most)


@dataclass(frozen=True)
class Noted(Sharing):
    note: str = ""


def test_a_subclass_means_what_it_says() -> None:
    for made in (Side(3), Side(most=3), pickle.loads(pickle.dumps(Side(3)))):
        assert flattened({"sharing": made}) == {"packing": "lane", "max_packing": 3}
    assert flattened({"sharing": Noted("off", note="why")}) == {"packing": "off"}


def test_options_by_names_of_their_own() -> None:
    assert flattened({"devices": 2, "sharing": None, "goals": Goals("2h"), "keep": None}) == {
        "devices": 2,
        "deadline": "2h",
        "keep": None,
    }
