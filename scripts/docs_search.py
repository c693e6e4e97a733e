"""Asks the site's own search what users ask, in a browser, and says how far each answer is.

    make docs && python scripts/docs_search.py site    # ends with 1 if an answer is not among the first results

An answer is a passage that a pattern finds in the section to which a result leads. The seconds are an estimate: one for
each result that is looked at and for each click, and a quarter for each word from the section's beginning to the
answer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from browser import Browser, Page

#: What users type, and what the section has to say.
QUESTIONS = {
    "how do I resume": r"resume=True",
    "why is my trial waiting": r"fluid why",
    "best checkpoint": r"load_checkpoint|best\.checkpoint",
    "conditional hyperparameters": r"\bwhen\(",
    "compare runs": r"fluid report (RUN_A RUN_B|A B|RUN RUN|RUN1 RUN2|ONE TWO)|fluid view",
    "progress bar": r"verbose=|show_progress_bar",
    "overwrite run folder": r"overwrite",
    "windows": r"WSL ?2",
    "several trials on one GPU": r"packing=",
    "stop after two hours": r"time_budget_s|deadline=",
}
#: Results that a reader looks at before they type something else.
FIRST = 5


def main() -> int:
    """Prints a row for each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that make docs has made")
    site: Path = parser.parse_args().site
    sections = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = {section["location"]: re.sub(r"<[^>]+>", " ", section["text"]) for section in sections}
    missing = 0
    with (
        served(site) as address,
        tempfile.TemporaryDirectory() as profile,
        contextlib.closing(Browser(Path(profile))) as browser,
    ):
        for question, pattern in QUESTIONS.items():
            with browser.page() as page:
                results = found_by(page, address, question)
            place, words = next(
                (
                    (place, len(texts[location][: answer.start()].split()))
                    for place, location in enumerate(results, 1)
                    if (answer := re.search(pattern, texts.get(location, "")))
                ),
                (0, 0),
            )
            missing += not 0 < place <= FIRST
            where = (
                f"result {place}: {results[place - 1]}, 2 clicks, {2 + place + words / 4:.0f} s"
                if place
                else "not found"
            )
            print(f"{question:30} {where}", flush=True)
    print(f"{len(QUESTIONS) - missing} of {len(QUESTIONS)} are answered by one of the first {FIRST} results")
    return int(missing > 0)


def found_by(page: Page, address: str, question: str) -> list[str]:
    """Returns the sections to which the results of a search lead, in their order."""
    page.open(f"{address}/index.html")
    page.run("document.querySelector('#__search').click()")
    typed = json.dumps(question)
    page.run(
        "(() => { const box = document.querySelector('.md-search__input'); box.focus();"
        f" box.value = {typed}; box.dispatchEvent(new Event('input', {{bubbles: true}}));"
        " box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
    )
    links: list[str] = []
    for _ in range(50):  # The search loads its index in the background.
        page.drawn()
        links = page.run("Array.from(document.querySelectorAll('.md-search-result__link'), (link) => link.href)")
        if links:
            break
    return [re.sub(r"\?h=[^#]*", "", link).removeprefix(f"{address}/") for link in links]


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site on this machine; its search does not work from files."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A handler that does not log."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    sys.exit(main())
