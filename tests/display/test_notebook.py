"""The live view in a notebook: cells that a real kernel runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_TESTS := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_TESTS)
from notebooks import Notebook, forms_of

#: What they do to one another at import and at exit is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_SETUP = """
import pathlib, time
from fluid import FluidExecutor, Search, Trial, TrialGroup

def train(config):
    print("a trial prints", config["lr"])
    for step in range(1, 10_000):
        time.sleep(0.01)
        yield {"loss": config["lr"] / step}

def group(name, budget):
    trials = [Trial(train, {"lr": rate}, budget=budget) for rate in (0.1, 0.2, 0.3)]
    return TrialGroup(trials, name=name, search=Search("loss", "min", 3, extends=False))
"""
_SWEEP = """
with FluidExecutor("local", devices=2, run_dir="first", packing="off") as executor:
    handle = executor.submit_trialgroup(group("sweep <1>", 100))
    print("submitted")
    done = handle.wait()
"""
_LONG = """
executor = FluidExecutor("local", devices=2, run_dir="second", packing="off")
handle = executor.submit_trialgroup(group("long", 9_000))
for result in handle.results():
    if result.iteration == 20:
        print("far enough", flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    return tmp_path


@pytest.mark.slow
def test_a_sweep_is_one_display_that_is_updated(environment: Path) -> None:
    book = Notebook([_SETUP, _SWEEP, "handle", "executor"], environment)
    _, sweep, handle, executor = book.run()

    displays = [output for output in sweep if output.output_type == "display_data"]
    assert len(displays) == 1, sweep
    html, text = forms_of(displays[0])
    lines = text.splitlines()
    assert lines[0].startswith("best  loss 0.001 (less is better)  trial-")
    assert lines[0].endswith("iteration 100  lr=0.1")
    assert lines[1].startswith("sweep <1>  3 trials: 3 done; 300 iterations; ")
    assert lines[2:] == [
        "results in first",
        "  fluid report first  tables and a page",
        "  fluid view first  in a browser",
    ]
    assert "sweep &lt;1&gt;" in html and "<b>0.001</b>" in html and "fluid report first" in html

    messages = book.displays[1]
    assert [message["msg_type"] for message in messages[:1]] == ["display_data"]
    assert {message["msg_type"] for message in messages[1:]} == {"update_display_data"}
    assert len({message["content"]["transient"]["display_id"] for message in messages}) == 1
    under_way = [forms_of(message["content"]) for message in messages[1:-1]]
    assert any("ETA" in text and "best loss" in text for _, text in under_way), under_way
    assert all(html.startswith("<div") for html, _ in under_way)
    seconds = len(messages) / 2.0
    assert seconds < 30, "about two updates a second, of a sweep of a few"

    printed = "".join(output["text"] for output in sweep if output.output_type == "stream")
    assert "submitted" in printed and printed.count("a trial prints") >= 1

    html, text = forms_of(handle[0])
    assert text.startswith("<TrialGroupHandle 'sweep <1>'; 3 trials: 3 done; best loss 0.001 (less is better), trial-")
    assert "<table>" in html and "sweep &lt;1&gt;" in html and "{&#x27;lr&#x27;: 0.1}" in html
    html, text = forms_of(executor[0])
    assert text.startswith("<FluidExecutor devices: closed; groups: sweep <1>; run folder: ")
    assert "<table>" in html


@pytest.mark.slow
def test_an_interrupt_leaves_a_kernel_that_can_be_used(environment: Path) -> None:
    book = Notebook([_SETUP, _LONG, "print(6 * 7)", "executor.close(); print(handle)"], environment)
    interrupted: list[Any] = []

    def interrupt(text: str, client: Any) -> None:
        if "far enough" in text and not interrupted:
            interrupted.append(asyncio.ensure_future(client.km.interrupt_kernel()))

    book.on_print = interrupt
    _, long, after, closed = book.run()
    assert [output["ename"] for output in long if output.output_type == "error"] == ["KeyboardInterrupt"]
    assert "42" in "".join(output["text"] for output in after if output.output_type == "stream")
    printed = "".join(output["text"] for output in closed if output.output_type == "stream")
    assert "'long'; 3 trials: 3 interrupted" in printed
    html, text = forms_of(next(output for output in long if output.output_type == "display_data"))
    assert "3 interrupted" in text and "results in second" in text, text
    assert "3 interrupted" in html


@pytest.mark.slow
def test_each_cell_that_submits_has_a_display(environment: Path) -> None:
    cells = [
        _SETUP,
        'executor = FluidExecutor("local", devices=1, run_dir="run", packing="off")\nexecutor',
        'executor.submit_trialgroup(group("a", 3)).wait(60)\nexecutor.submit_trialgroup(group("b", 3)).wait(60)',
        'executor.submit_trialgroup(group("c", 3)).wait(60)',
        "executor.close()",
    ]
    outputs = Notebook(cells, environment).run()
    counts = [sum(output.output_type == "display_data" for output in cell) for cell in outputs]
    assert counts == [0, 0, 1, 1, 0]
    assert forms_of(outputs[1][0])[1].startswith("<FluidExecutor devices: cpu 0; groups: none; run folder: ")


def test_a_script_has_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluid.display.notebook import NotebookView

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not NotebookView.wanted()
