"""Writes docs/benchmarks.md and the table of figures in README.md, from benchmarks/results.

    python scripts/benchmarks_page.py    # after python benchmarks/measure.py has measured

The page is ``benchmarks_page.md`` beside this program, the table ``benchmarks_readme.md``, in which stand

* ``{{overhead: busy.run_and_total_s.fluid_local[0]; .1f}}``: a figure of benchmarks/results/overhead.json: an
  expression of Python on what the benchmark wrote, and how it is shown. It is computed for each run of the file. If
  runs differ in the digits shown, the least and the most stand there: ``2.1 to 2.4``;
* ``{{command: overhead}}``: the command of that file;
* ``{{rows: paper_shapes: tables["compared"][1:]}}``: rows of a table, which are the same in all runs;
* ``{{machine}}``, ``{{dates}}``: what all files that ``measure.py`` wrote have in common.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->\n"
_PLACE = re.compile(r"\{\{(.+?)\}\}")
_FIGURE = re.compile(r"(?P<name>[\w-]+): (?P<expression>.+);\s*(?P<shown>[^;]*)")


class Table(dict[str, Any]):
    """Figures of JSON, of which ``table.key`` is ``table["key"]``."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


def read(name: str) -> Any:
    """Returns a file of benchmarks/results; its dicts are tables."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"), object_hook=Table)


def runs_of(content: Any) -> list[Any]:
    """Returns what each run of a file measured. A file that ``measure.py`` has not written is one run."""
    return [run.figures for run in content.runs] if isinstance(content.get("runs"), list) else [content]


def paper_gain(cells: Mapping[str, Any], algorithm: str) -> Any:
    """Returns what scheduling gains in the paper's sweep of sleeping trials, by benchmarks/paper_gains.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import paper_gains
    finally:
        sys.path.pop(0)
    return paper_gains.gain_of(algorithm, cells["sleep"][algorithm], target=0.7)


def rehearsed(rows: Sequence[Any], algorithm: str) -> Any:
    """Returns what first come first served takes, in times of Fluid, on all numbers of devices."""
    (found,) = (row for row in rows if (row.way, row.algorithm, row.devices) == ("fifo", algorithm, "all"))
    return found


def regret(regrets: Mapping[str, Any], way: str) -> float:
    """Returns the mean regret over tasks and seeds."""
    return statistics.fmean(found[way] for of_task in regrets.values() for found in of_task)


def damages(outcomes: Mapping[str, Any], *kinds: str) -> int:
    """Returns how many readings of damaged files ended so, or how many there were."""
    counts = [count for files in outcomes.values() for readers in files.values() for count in readers.values()]
    return sum(number for count in counts for kind, number in count.items() if not kinds or kind in kinds)


def pack_gain(model: Mapping[str, Any], trials: int, alone: str = "alone_per_s") -> float:
    """Returns how many times as many samples a pack of fused trials trains in a second as one trial alone."""
    return float(model[str(trials)]["per_s"] / model[alone])


def worst_error(workloads: Mapping[str, Any]) -> float:
    """Returns how far off the rehearsed ends of sweeps are at most."""
    return max(abs(sweep.makespan_error) for found in workloads.values() for sweep in found.sweeps.values())


#: What expressions may use besides the keys of a run's figures, which are ``f`` as a whole.
HELPERS: Mapping[str, Any] = {
    each.__name__: each for each in (len, set, sum, paper_gain, rehearsed, regret, damages, pack_gain, worst_error)
}


def evaluate(expression: str, figures: Any) -> Any:
    """Returns the value of an expression of the template, for one run."""
    names = {"__builtins__": {}, **HELPERS, **(figures if isinstance(figures, dict) else {}), "f": figures}
    return eval(expression, names)  # The template is part of the checkout.


def shown(values: Sequence[Any], spec: str) -> str:
    """Returns how a figure of several runs is written: once, or as the least and the most."""
    texts = [format(value, spec) for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def wrapped(text: str) -> str:
    """Returns Markdown whose paragraphs and items are wrapped, and whose tables have no blanks around cells."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if block.startswith(("#", "|", ">", "![")):
            blocks.append(re.sub(r" *\| *", "|", block) if block.startswith("|") else block)
            continue
        items = (" ".join(item.split()) for item in re.split(r"\n(?=\* )", block))
        shape: dict[str, Any] = {"width": 120, "break_long_words": False, "break_on_hyphens": False}
        blocks.append(
            "\n".join(textwrap.fill(each, subsequent_indent="  " * each.startswith("* "), **shape) for each in items)
        )
    return "\n\n".join(blocks) + "\n"


class Page:
    """Fills in a template, and notes which files of benchmarks/results it used."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.measured = {path.stem: read(path.stem) for path in sorted(RESULTS.glob("*.json"))}

    def fill(self, template: str) -> str:
        """Returns the text of a template with its figures."""
        return _PLACE.sub(lambda place: self._fill(place[1].strip()), template)

    def _fill(self, place: str) -> str:
        try:
            if place in ("machine", "dates"):
                return self._common()[place]
            if place.startswith("command: "):
                return str(self._content(place.removeprefix("command: ")).command)
            if place.startswith("rows: "):
                name, expression = place.removeprefix("rows: ").split(": ", 1)
                return "\n".join(self._rows(name, expression))
            if (figure := _FIGURE.fullmatch(place)) is None:
                raise ValueError("no figure, command, or rows")
            runs = runs_of(self._content(figure["name"]))
            return shown([evaluate(figure["expression"], run) for run in runs], figure["shown"])
        except Exception as error:
            raise type(error)(f"{error} in {{{{{place}}}}}") from error

    def _content(self, name: str) -> Any:
        self.used.add(name)
        return self.measured[name]

    def _rows(self, name: str, expression: str) -> Iterator[str]:
        first, *others = [evaluate(expression, run) for run in runs_of(self._content(name))]
        if any(other != first for other in others):
            raise ValueError(f"the runs of {name} differ")
        for row in first:
            yield f"| {' | '.join(map(str, row))} |"

    def _common(self) -> Mapping[str, str]:
        files = [content for content in self.measured.values() if isinstance(content.get("runs"), list)]
        machine, dates = files[0].machine, sorted({content.date for content in files})
        versions = f"{machine.cores} shared CPU cores, Python {machine.python.rpartition('.')[0]}, Ray {machine.ray}"
        return {"machine": versions, "dates": " and ".join(dates)}


def page() -> tuple[str, str, set[str]]:
    """Returns the page, the table of README, and the names of the files that they used."""
    sys.path.insert(0, str(HERE))
    try:
        from gpu_note import with_note
    finally:
        sys.path.pop(0)
    filled = Page()
    texts = [filled.fill((HERE / f"benchmarks_{each}.md").read_text(encoding="utf-8")) for each in ("page", "readme")]
    return with_note(wrapped(texts[0])), wrapped(texts[1]), filled.used


def with_table(readme: str, table: str) -> str:
    """Returns README with another table."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.split(END)[1]}"


def main() -> None:
    """Writes both."""
    text, table, _ = page()
    PAGE.write_text(text, encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
