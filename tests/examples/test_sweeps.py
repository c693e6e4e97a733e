"""The three sweeps under each of the eight algorithms at the smallest scale, the same with Fluid and without."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
from sweep_configs import WORKLOADS
from tuning.algorithms import ALGORITHMS, SearchRequest, method
from tuning.command_line import main, summary
from tuning.outcome import Outcome
from tuning.running import Sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

needs_bohb = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ConfigSpace", "hpbandster")), reason="needs HpBandSter"
)


def with_marks(algorithms: Any) -> list[Any]:
    return [pytest.param(name, marks=needs_bohb if "bohb" in name else ()) for name in algorithms]


def sweep(name: str, algorithm: str, data: str, folder: Path, **options: Any) -> Sweep:
    workload = WORKLOADS[name]
    return Sweep(workload, algorithm, workload.scale("tiny"), data, devices=2, storage=folder, **options)


@pytest.mark.parametrize("algorithm", with_marks(ALGORITHMS))
@pytest.mark.parametrize("name", WORKLOADS)
def test_it_runs(name: str, algorithm: str, data: str, executor: Any, tmp_path: Path) -> None:
    run = sweep(name, algorithm, data, tmp_path)
    found = run.run(lambda: executor)
    search = method(algorithm, SearchRequest(run.workload, run.scale, None, 0, 2))
    points = math.prod(len(domain["grid_search"]) for domain in search.space.values()) if algorithm == "grid" else 1
    assert found.trials == search.samples * points
    lengths = [max(one.iteration for one in found.iterations if one.trial == trial) for trial in range(found.trials)]
    assert max(lengths) == run.scale.max_t
    if algorithm in ("random", "grid", "pbt"):
        assert set(lengths) == {run.scale.max_t}
    else:
        assert min(lengths) == 1, "no trial was stopped early"
    assert 0.0 < found.utilisation <= 1.0
    assert 0.0 < found.makespan < found.last_end <= found.wall_time
    assert all(math.isfinite(one.value) for one in found.iterations)
    assert f"{found.trials} trials" in summary(run, found, with_times=True)


@pytest.mark.parametrize(
    ("name", "algorithm", "reuse"),
    [
        pytest.param("cifar10", "grid", False, marks=pytest.mark.long),
        ("wlm", "random", True),
        ("dcgan", "random", True),
    ],
)
def test_the_same_with_and_without_fluid(
    name: str, algorithm: str, reuse: bool, data: str, executor: Any, tmp_path: Path
) -> None:
    # Tune's two actors start slowly; if they are reused, there is a third trial for them.
    samples = 3 if reuse else 2
    stock = sweep(name, algorithm, data, tmp_path / "stock", samples=samples, reuse_actors=reuse).run()
    fluid = sweep(name, algorithm, data, tmp_path / "fluid", samples=samples).run(lambda: executor)
    assert fluid.trials == stock.trials == samples
    # PyTorch adds numbers up in an order that depends on where they lie in memory, which shows in the tenth digit.
    assert results(fluid) == [(*which, pytest.approx(value, rel=1e-6)) for *which, value in results(stock)]
    assert len({one.process for one in stock.iterations}) <= 2


def results(outcome: Outcome) -> list[tuple[Any, ...]]:
    """Returns everything but times, in an order that does not depend on which trial was faster."""
    rows = [(one.trial, one.iteration, sorted(one.config.items()), one.value) for one in outcome.iterations]
    return sorted(rows, key=lambda row: row[:2])


def test_from_the_command_line(data: str, cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--algo", "random", "--scale", "tiny", "--samples", "2", "--data", data, "--devices", "2"]
    main(WORKLOADS["dcgan"], [*arguments, "--run-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert "2 trials with results, 6 iterations" in said
    assert "the best so far" in said
    assert "netG_lr" in said
    assert (tmp_path / "fluid" / "report.html").is_file()
    assert len(list((tmp_path / "tune").glob("dcgan_random_*"))) == 1
    with pytest.raises(SystemExit) as caught:
        main(WORKLOADS["dcgan"], [*arguments, "--run-dir", str(tmp_path)])
    assert caught.value.code == 2
    assert "fluid': holds a session already" in capsys.readouterr().err
