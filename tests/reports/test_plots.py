"""Plots of a sweep's trials from Python, by matplotlib and by plotly."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from page_runs import write_sweep

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError
from fluid.reports.page.html import html_page
from fluid.reports.plots.field import field
from fluid.reports.plots.trials import PlotData, axis_of, is_logarithmic
from fluid.reports.run.loader import load_run
from fluid.results.loading import load
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult
from fluid.results.sweep import SweepResult
from fluid.trialgroup import Trial

LOSS = Goal("loss", True)
KINDS = ("history", "parallel", "slice", "contour")


def trial(number: int, config: Mapping[str, Any], *losses: float, failed: bool = False, **others: float) -> TrialResult:
    """A trial that reported these losses."""
    name = f"t{number}"
    results = tuple(
        Result(
            trial_id=name,
            iteration=k,
            metrics={"loss": loss, **others},
            seconds=1.0,
            width=1.0,
            device_ids=(0,),
            config=config,
        )
        for k, loss in enumerate(losses, 1)
    )
    return TrialResult(
        trial_id=name,
        config=config,
        state="FAILED" if failed else "DONE",
        iteration=len(losses),
        metrics=results[-1].metrics if results else {},
        results=results,
        failure=Failure("error", "ValueError: no") if failed else None,
    )


def conditional(count: int = 24) -> list[TrialResult]:
    """Trials of a space of all kinds of hyperparameters; one failed, one reported no number, and one diverged."""
    found = []
    for k in range(count):
        config: dict[str, Any] = {"lr": 10.0 ** (-4 + 3 * k / count), "net": {"depth": 1 + k % 4}, "data": "x"}
        config |= {"optimizer": "sgd", "momentum": 0.5 + k / 50} if k % 2 else {"optimizer": "adam"}
        found.append(trial(k, config, 2.0, 0.1 + abs(k - 10) / 10, time=float(k)))
    found.append(trial(count, {"lr": 0.05, "net": {"depth": 1}, "optimizer": "adam"}, -5.0, failed=True))
    found.append(trial(count + 1, {"lr": 0.06, "net": {"depth": 1}, "optimizer": "adam"}, math.nan))
    found.append(trial(count + 2, {"lr": 0.07, "net": {"depth": 2}, "optimizer": "adam"}, 1e12))
    return found


def sweep(trials: Sequence[TrialResult], metric: Any = "loss", mode: Any = "min") -> SweepResult:
    return SweepResult.make(trials, metric, mode, run_dir=Path("/nowhere"), name="sweep")


@pytest.fixture(params=["matplotlib", "plotly"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    pytest.importorskip(request.param)
    yield request.param


# --- What is plotted


def test_failed_trials_and_those_without_a_number_are_left_out() -> None:
    data = PlotData.of(conditional(), LOSS)
    assert [shown.trial_id for shown in data.trials] == [f"t{k}" for k in (*range(24), 26)]
    assert (data.trials[10].value, data.trials[10].quality) == (0.1, 1.0)
    assert data.trials[-1].quality == 0.0
    assert data.trials[9].quality == data.trials[11].quality, "equal values have equal ranks"
    # They count where there are no others.
    assert [shown.value for shown in PlotData.of([trial(0, {}, 1.0, failed=True)], LOSS).trials] == [1.0]


def test_axes_are_of_numbers_or_of_categories() -> None:
    axes = PlotData.of(conditional(), LOSS).axes
    assert list(axes) == ["lr", "net/depth", "data", "optimizer", "momentum"]
    lr, depth, _, optimizer, momentum = axes.values()
    assert (lr.log, lr.is_numeric, lr.few) == (True, True, ())
    assert (depth.log, depth.few) == (False, (1.0, 2.0, 3.0, 4.0))
    assert optimizer.categories == ("adam", "sgd")
    assert momentum.is_numeric and (momentum.low, momentum.high) == (0.52, 0.96)
    adam, sgd = PlotData.of(conditional(), LOSS).trials[:2]
    assert math.isnan(momentum.share(adam)) and momentum.share(sgd) == 0.0
    assert (optimizer.place(adam), optimizer.share(adam), optimizer.share(sgd)) == (0.0, 0.25, 0.75)
    assert axis_of("n", [{"n": "16"}, {"n": "8"}, {}]).categories == ("8", "16", "none")
    assert axis_of("n", [{"n": True}, {"n": False}]).categories == ("false", "true")
    assert axis_of("n", [{"n": 3}, {}]).share(PlotData.of([trial(0, {"n": 3}, 1.0)], LOSS).trials[0]) == 0.5


def test_logarithmic_axes() -> None:
    assert is_logarithmic([1e-4, 1e-3, 1e-2, 1e-1]) and is_logarithmic([16, 16, 32, 64, 128])
    assert not is_logarithmic([0.0, 1e-3, 1.0]) and not is_logarithmic([1, 2, 3, 4])
    assert not is_logarithmic([0.1] * 20 + [1e9]), "one that diverged is no reason"


def test_a_trial_that_diverged_does_not_flatten_the_others() -> None:
    low, high, beyond = PlotData.of(conditional(), LOSS).limits
    assert -0.1 < low < 0.1 and high < 2.0 and beyond == 1
    best = PlotData.of([trial(k, {}, value) for k, value in enumerate((3.0, 5.0, 2.0, 2.5, 1.0))], LOSS).best_so_far
    assert best == ([0, 2, 4], [3.0, 2.0, 1.0])


def test_of_many_trials_the_best_and_the_worst_are_drawn() -> None:
    data = PlotData.of([trial(k, {"lr": 0.1}, float(k)) for k in range(3000)], LOSS)
    assert len(data.drawn) == 1000
    assert (data.drawn[0].value, data.drawn[-1].value) == (2999.0, 0.0)


# --- How it is drawn


def test_every_plot_is_drawn(backend: str) -> None:
    result = sweep(conditional())
    chosen = {"contour": {"parameters": ["momentum", "net/depth"]}}
    for kind in KINDS:
        figure = getattr(result, f"plot_{kind}")(backend=backend, **chosen.get(kind, {}))
        if backend == "matplotlib":
            image = figure._repr_png_()
            assert image.startswith(b"\x89PNG") and len(image) > 5000
        else:
            assert kind == "history" or "momentum" in figure.to_json()


def test_a_notebook_shows_plots_and_the_page(session: Any) -> None:
    pytest.importorskip("matplotlib")
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    assert "image/png" in formatter.format(sweep(conditional()).plot_history(backend="matplotlib"))[0]
    shown, _ = formatter.format(load(write_sweep(session, "sweep", 3)).page())
    assert shown["text/html"].startswith("<iframe srcdoc=")


def test_slices_have_the_scales_of_their_hyperparameters() -> None:
    pytest.importorskip("matplotlib")
    figure = sweep(conditional()).plot_slice(parameters=["lr", "momentum", "optimizer"], backend="matplotlib")
    lr, momentum, optimizer = (axes for axes in figure.axes if axes.get_xlabel())
    assert [axes.get_xscale() for axes in (lr, momentum, optimizer)] == ["log", "linear", "linear"]
    assert [label.get_text() for label in optimizer.get_xticklabels()] == ["adam", "sgd"]
    sizes = [len(axes.collections[0].get_offsets()) for axes in (lr, momentum, optimizer)]
    assert sizes == [25, 12, 25], "adam has no momentum"
    assert lr.get_ylabel() == "loss (less is better)\n(beyond the axis: 1 trial)"


def test_a_contour_over_chosen_hyperparameters() -> None:
    pytest.importorskip("matplotlib")
    figure = sweep(conditional()).plot_contour(parameters=("lr", "optimizer"), backend="matplotlib")
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("lr", "optimizer", "log")
    assert axes.collections[0].get_array().shape == (2, 100)


def test_importance_is_that_of_the_report(backend: str) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    figure = sweep(conditional()).plot_importance(backend=backend)
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()] if backend == "matplotlib" else None
    names = figure.data[0].y if shown is None else shown
    assert set(names) == {"lr", "net/depth", "optimizer"}, "those that some trials lack cannot be judged"
    with pytest.raises(FluidError, match=r"no importances for loss: needs 8 trials that reported it; there are 2$"):
        sweep(conditional()[:2]).plot_importance(backend=backend)


def test_pyplot_and_what_draws_are_imported_only_when_asked() -> None:
    program = """
import sys
from test_plots import conditional, sweep
result = sweep(conditional())
repr(result), result.best
assert not {"matplotlib", "plotly", "optuna"} & set(sys.modules), "before"
result.plot_history(backend="matplotlib")._repr_png_()
assert not {"matplotlib.pyplot", "plotly", "optuna"} & set(sys.modules), "after"
"""
    pytest.importorskip("matplotlib")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    program = f"import sys; sys.path[:0] = {folders!r}\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- What cannot be drawn


def test_the_metric_must_be_one(backend: str) -> None:
    both = sweep(conditional(), ("loss", "time"), ("min", "max"))
    with pytest.raises(InvalidFieldError, match=r"metric=None: name one of the sweep's: loss, time"):
        both.plot_history(backend=backend)
    figure = both.plot_history("time", backend=backend)
    label = figure.axes[0].get_ylabel() if backend == "matplotlib" else figure.layout.yaxis.title.text
    assert label == "time (more is better)", "the mode is the sweep's"
    with pytest.raises(FluidError, match="no trial has reported a number as 'accuracy'"):
        both.plot_slice("accuracy", "max", backend=backend)


def test_parameters_are_named_as_they_are(backend: str) -> None:
    result = sweep(conditional())
    with pytest.raises(InvalidFieldError, match=r"parameters='depth': is no hyperparameter in which trials differ: lr"):
        result.plot_parallel(parameters=["depth"], backend=backend)
    with pytest.raises(InvalidFieldError, match="must name 2 different hyperparameters"):
        result.plot_contour(parameters=["lr"], backend=backend)
    alike = sweep([trial(k, {"lr": 0.1}, float(k)) for k in range(3)])
    with pytest.raises(FluidError, match="differ in 0 hyperparameters"):
        alike.plot_slice(backend=backend)


def test_without_a_package_that_draws_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in ("matplotlib", "plotly") else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(MissingDependencyError, match="plots need matplotlib or plotly, of which neither is installed"):
        sweep(conditional()).plot_history()
    with pytest.raises(InvalidFieldError, match=r"backend='bokeh': must be one of matplotlib, plotly"):
        sweep(conditional()).plot_history(backend="bokeh")


# --- The field of a contour, and the page


def test_a_field_is_a_mean_of_the_trials_near() -> None:
    cells = field([(0.1, 0.1, 1.0)] * 9, 5, 5)
    assert np.allclose(cells[:2, :2], 1.0) and np.isnan(cells[-1, -1])
    left, right = field([(0.1, 0.5, 0.0), (0.9, 0.5, 1.0)], 10, 1)[0][[0, -1]]
    assert left < 0.1 and right > 0.9
    assert field([(0.25, 0.25, 0.0), (0.25, 0.25, 1.0), (0.75, 0.75, 0.4)], 2, 2, False, False).tolist()[0][0] == 0.5
    assert np.isnan(field([(0.25, 0.25, 0.0)], 2, 2, False, False)[1, 1])


@pytest.mark.browser
def test_the_page_has_the_same_field(browser: Browser, session: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / "page.html"
    run = load_run(write_sweep(session, "sweep", 24))
    file.write_text(html_page([run], importances=[{"loss": [("optimizer", 0.5), ("lr", 0.3)]}]), encoding="utf-8")
    with browser.page() as page:
        page.open(file)
        for numeric in ((True, True), (True, False), (False, False)):
            points = rng.random((40, 3))
            for axis, is_numeric in enumerate(numeric):
                if not is_numeric:
                    points[:, axis] = (np.floor(points[:, axis] * 3) + 0.5) / 3
            columns, rows = (20 if numeric[0] else 3), (15 if numeric[1] else 3)
            flags = ", ".join(str(each).lower() for each in numeric)
            call = f"contour.field({points.tolist()}, {columns}, {rows}, {flags})"
            values = page.run(f"Array.from({call}, (value) => isNaN(value) ? null : value)")
            found = np.array(values, dtype=float).reshape(rows, columns)
            assert np.allclose(found, field(points.tolist(), columns, rows, *numeric), atol=1e-9, equal_nan=True)

        # At first it shows the most important hyperparameters; the other axis gives way to one that is chosen.
        chosen = "[draw.byId('contour-x').value, draw.byId('contour-y').value]"
        page.middle("#contour")
        page.drawn()
        assert page.run(chosen) == ["optimizer", "lr"]
        page.select("#contour-y", "optimizer")
        assert page.run(chosen) == ["lr", "optimizer"]
        page.select("#contour-x", "net/depth")
        assert page.run(chosen) == ["net/depth", "optimizer"]
        assert page.problems == []


@pytest.mark.browser
def test_a_conditional_hyperparameter_leaves_trials_out_of_the_contour(
    tmp_path: Path, browser: Browser, session: Any
) -> None:
    made = session({}, name="run")
    names = [f"t{k}" for k in range(8)]
    configs = [{"lr": 0.1 * (k + 1), **({"momentum": 0.1 * k + 0.05} if k % 2 else {})} for k in range(8)]
    made.submit("g", [Trial(print, config, trial_id=name) for name, config in zip(names, configs, strict=True)])
    made.results(*((name, 1, 0.0, 1.0, 1.0, (0,), {"loss": float(k)}) for k, name in enumerate(names)))
    file = tmp_path / "page.html"
    file.write_text(html_page([load_run(made.close())]), encoding="utf-8")
    with browser.page() as page:
        page.open(file)
        page.middle("#contour")
        page.drawn()
        assert page.text("#contour-note").endswith(" smoothed; 4 trials without both are left out")
        assert page.problems == []


def test_a_result_has_its_page(session: Any, tmp_path: Path) -> None:
    run = write_sweep(session, "sweep", 6)
    page = load(run).page()
    assert page.path == run / "report.html" and str(run / "report.html") in repr(page)
    assert Path(page).read_text(encoding="utf-8") == page.html
    frame = page._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and "<script" not in frame
    assert load(run).page(tmp_path / "other.html").path == tmp_path / "other.html"
    with pytest.raises(InvalidFieldError, match="cannot be written"):
        load(run).page(tmp_path / "no folder" / "page.html")


def test_dollars_in_names_and_values_begin_no_formula() -> None:
    pytest.importorskip("matplotlib")
    configs = [{"$x_{1$": k / 16, "price": ("$a_{$", "b")[k % 2]} for k in range(16)]
    result = sweep([trial(k, config, float(k)) for k, config in enumerate(configs)])
    for kind in ("parallel", "slice", "contour"):
        figure = getattr(result, f"plot_{kind}")(backend="matplotlib")
        figure.canvas.draw()
