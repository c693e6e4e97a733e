"""Population based training decides as Ray Tune's does, with the same scores and random numbers; and where it does not.

Tune's own scheduler and trials run in a simulated controller. Each result goes to both, and each exploit of one must be
the other's: the same trial, from the same one, with the same new config.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining, pbt

from fluid.search import PBT, choice, loguniform, make_space, randint, uniform
from fluid.search.domains import Choice
from fluid.search.population import Explorer, Population, Standing
from fluid.search.rungs import Exploit, RungDecision

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_simulation import METRIC, TIMED, Controller, Sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

#: Whole numbers so large that each factor moves them: small ones stay where they are under Tune.
SPACE = {
    "rate": uniform(0.25, 8.0),
    "decay": loguniform(1e-5, 1e-1),
    "width": randint(50, 5000),
    "optimizer": ["sgd", "adam", "lion"],
    "layers": choice([1, 2, 4, 8]),
}


class SameNumbers:
    """What Tune takes of the module ``random``, by a generator of numpy."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.random = rng.random
        self._rng = rng

    def choice(self, values: Any) -> Any:
        return values[int(self._rng.integers(len(values)))]


class Both:
    """Tune's scheduler and ours, each told what the other one is.

    Args:
        options: of ours.
        budget: iterations at which members end by themselves.
        members: how many.
        seed: of the random numbers.
    """

    def __init__(self, options: PBT, *, budget: int, members: int, seed: int) -> None:
        theirs, ours = np.random.default_rng(seed), np.random.default_rng(seed)
        self.numbers = SameNumbers(theirs)
        self.space = make_space(SPACE)
        domains = self.space.domains
        mutations: dict[str, Any] = {
            name: list(domain.choices) if isinstance(domain, Choice) else (lambda one=domain: one.sample(theirs))
            for name, domain in domains.items()
        }
        self.scheduler = PopulationBasedTraining(
            **TIMED,
            perturbation_interval=options.interval(budget),
            hyperparam_mutations=mutations,
            quantile_fraction=options.quantile,
            resample_probability=options.resample,
            perturbation_factors=list(options.perturb),
            custom_explore_fn=self.within,
            synch=options.synchronous,
            log_config=False,
        )
        self.controller = Telling(self, theirs)
        explorer = Explorer(self.space, options.resample, options.perturb, ours)
        self.population = Population(options, budget, members, explorer)
        self.population.standing = self.standing
        self.budget = budget
        self.configs: list[dict[str, Any]] = []
        self.targets: list[int] = []
        self.iterations: list[int] = []
        self.exploits: list[Exploit] = []
        self.results: list[int] = []

    def within(self, config: dict[str, Any]) -> dict[str, Any]:
        """What users of Tune have to write so that values stay within their distributions."""
        for name in ("rate", "decay", "width"):
            domain: Any = self.space.domains[name]
            most = domain.high if name == "width" else domain.greatest
            config[name] = min(max(config[name], domain.low), most)
        return config

    def standing(self, parent: int, trial: int) -> Standing:
        """With the state that Tune has of a member: that of the last time it was ready, if it was among the best."""
        state = self.scheduler._trial_state[self.controller.trials[parent]]
        at = None if state.last_checkpoint is None else int(state.last_train_time)
        return Standing(self.configs[parent], self.iterations[parent], at)

    def added(self, trial: Trial) -> None:
        begun = self.population.start()
        assert begun is not None and self.controller.trials[begun.trial] is trial
        self.configs.append(dict(trial.config))
        self.targets.append(begun.budget)
        self.iterations.append(0)

    def result(self, trial: Trial, iteration: int, ends: bool, process: Callable[[], str]) -> None:
        number, before = self.controller.trials.index(trial), [dict(one.config) for one in self.controller.trials]
        self.iterations[number] = iteration
        self.results.append(number)
        process()
        exploits: dict[int, Exploit] = {}
        if iteration == self.targets[number]:
            decision = self.population.reached(number, -trial.last_result[METRIC])
            assert ends == (number in decision.ended)
            exploits = self.take(decision)
        changed = {
            place
            for place, (config, one) in enumerate(zip(before, self.controller.trials, strict=True))
            if config != one.config
        }
        assert changed <= exploits.keys()  # A config that was explored may be the old one.
        for place, exploit in exploits.items():
            one = self.controller.trials[place]
            assert {**self.configs[place], **one.config} == {**one.config, **exploit.config}
            assert exploit.at in (None, self.controller.goes_on_from(one))
        assert self.scheduler._num_perturbations == len(self.exploits)

    def failed(self, trial: Trial) -> None:
        self.take(self.population.ended(self.controller.trials.index(trial)))

    def take(self, decision: RungDecision) -> dict[int, Exploit]:
        for exploit in decision.forked:
            self.configs[exploit.trial], self.targets[exploit.trial] = exploit.config, exploit.budget
        for sent in decision.promoted:
            self.targets[sent.trial] = sent.budget
        self.exploits += decision.forked
        return {exploit.trial: exploit for exploit in decision.forked}


class Telling(Controller):
    """Tells of trials that begin, and of those that have failed for good."""

    def __init__(self, both: Both, rng: np.random.Generator) -> None:
        super().__init__(both.scheduler)
        self.both, self.rng = both, rng

    def add(self, **options: Any) -> Trial:
        before = self.rng.bit_generator.state
        # First configs are no matter of ours.
        self.rng.bit_generator.state = np.random.default_rng(len(self.trials)).bit_generator.state
        trial = super().add(**options)
        self.rng.bit_generator.state = before
        self.both.added(trial)
        return trial

    def fail(self, trial: Trial, recovers: bool) -> None:
        super().fail(trial, recovers)
        if not recovers:
            self.both.failed(trial)


def play(options: PBT, *, budget: int, members: int, seed: int, failures: float, patch: pytest.MonkeyPatch) -> Both:
    both = Both(options, budget=budget, members=members, seed=seed)
    patch.setattr(pbt, "random", both.numbers)
    sweep = Sweep(
        both.controller,
        Random(seed),
        trials=members,
        options=dict,
        on_start=lambda *_: None,
        on_result=both.result,
        failures=failures,
        length=budget,
    )
    if options.synchronous:
        while sweep.to_come:  # Ours waits for all members to begin.
            sweep._add()
    # As Sweep.run does, but with random scores members may exploit those behind them for ever.
    while (sweep._start() or sweep.iteration or sweep.to_come) and len(both.results) < 1500:
        if sweep.to_come and (not sweep.iteration or sweep.random.random() < 0.1):
            sweep._add()
        elif sweep.iteration:
            sweep._train(sweep.random.choice(list(sweep.iteration)))
    return both


FACTORS = st.sampled_from([(1.2, 0.8), (2.0, 0.5), (1.5,), (1.1, 0.9, 3.0)])


@settings(max_examples=40, deadline=None)
@given(
    synchronous=st.booleans(),
    members=st.integers(1, 13),
    ready=st.integers(1, 7),
    quantile=st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5]),
    resample=st.sampled_from([0.0, 0.25, 1.0]),
    perturb=FACTORS,
    fails=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_same_decisions(
    synchronous: bool,
    members: int,
    ready: int,
    quantile: float,
    resample: float,
    perturb: tuple[float, ...],
    fails: bool,
    seed: int,
) -> None:
    options = PBT(ready=ready, quantile=quantile, resample=resample, perturb=perturb, synchronous=synchronous)
    failures = 0.02 if fails and not synchronous else 0.0
    with pytest.MonkeyPatch.context() as patch:
        both = play(options, budget=40, members=members, seed=seed, failures=failures, patch=patch)
    assert both.results


@pytest.mark.parametrize("synchronous", [False, True])
def test_there_are_many_exploits(synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PBT(ready=3, synchronous=synchronous)
    both = play(options, budget=300, members=16, seed=5, failures=0.0, patch=monkeypatch)
    assert len(both.exploits) > 100 and {exploit.trial for exploit in both.exploits} == set(range(16))


# -- where Tune is wrong -----------------------------------------------------------------------------------


def at_the_first_comparison(scores: list[float], *, fails: bool = False) -> tuple[Both, RungDecision]:
    """Synchronous members whose first scores these are; the last one may fail before it has one."""
    both = Both(PBT(ready=1, synchronous=True, quantile=0.25), budget=9, members=len(scores), seed=1)
    for _ in scores:
        both.controller.add().set_status(Trial.RUNNING)
    decision = RungDecision()
    for number, (trial, score) in enumerate(zip(both.controller.trials, scores, strict=True)):
        both.iterations[number] = 1
        if fails and number == len(scores) - 1:
            Controller.fail(both.controller, trial, recovers=False)
            decision = both.population.ended(number)
        else:
            both.controller.process(trial, {"training_iteration": 1, METRIC: score})
            decision = both.population.reached(number, -score)
    return both, decision


def test_a_member_that_is_nan_trains_on_under_tune() -> None:
    scores = [1.0, math.nan, 3.0, 4.0, math.nan, 0.5]
    both, decision = at_the_first_comparison(scores)
    lower, upper = both.scheduler._quantiles()
    worst, best = ([both.controller.trials.index(one) for one in of] for of in (lower, upper))
    assert [exploit.trial for exploit in decision.forked] == [1, 4, *worst] and worst == [5]
    assert {exploit.parent for exploit in decision.forked} <= set(best)


def test_members_that_wait_for_one_that_fails_wait_for_ever_under_tune() -> None:
    both, decision = at_the_first_comparison([4.0, 3.0, 2.0, 1.0], fails=True)
    assert both.scheduler.choose_trial_to_run(both.controller) is None
    assert {trial.status for trial in both.controller.get_live_trials()} == {Trial.PAUSED}
    assert [one.trial for one in decision.promoted] == [0, 1, 2]  # Tune has no state of any yet.


@pytest.mark.parametrize(
    ("domain", "value", "theirs", "ours"),
    [
        (tune.uniform(0.0, 1.0), 0.9, 1.08, math.nextafter(1.0, 0.0)),  # Out of the range.
        (tune.randint(0, 10), 2, 2, 3),  # It never moves.
        (tune.quniform(0.0, 1.0, 0.5), 0.5, 0.6, 1.0),  # Between two steps.
        (tune.choice([1, 10, 100]), 10, 12, 100),  # Not one of them.
        (tune.uniform(0.0, 2.0), 1, 1, 1.2),  # Whole for good, as it was first given as a whole number.
    ],
)
def test_values_that_tune_gives(domain: Any, value: Any, theirs: Any, ours: Any) -> None:
    found, _ = pbt._explore({"x": value}, {"x": domain}, 0.0, (1.2,), None)
    assert found["x"] == pytest.approx(theirs)
    explorer = Explorer(make_space({"x": domain}), 0.0, (1.2,), np.random.default_rng(0))
    values = sorted({explorer.explore({"x": value})["x"] for _ in range(20)})
    assert values[-1] == pytest.approx(ours) and values[:-1] in ([], [1])


def test_a_choice_of_words_cannot_be_changed_under_tune() -> None:
    with pytest.raises(TypeError):
        pbt._explore({"x": "sgd"}, {"x": tune.choice(["sgd", "adam"])}, 0.0, (1.2,), None)
