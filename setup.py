"""Gives the package its description: README.md without links and pictures that only the repository has.

An index shows the description by itself, where a link such as ``docs/install.md`` leads nowhere. All else is in
pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

_PAGES = "The pages that this text names are in the folder docs of the source distribution.\n"


def description(readme: str) -> str:
    """The text of a page with the words of its relative links only."""
    relative = r"(?!\w+:)[^)\s]+"
    picture_and_caption = rf"^!\[[^\]]*\]\({relative}\)\n\n(?:\*.*?\*\n\n)?"
    text = re.sub(picture_and_caption, "", readme, flags=re.DOTALL | re.MULTILINE)
    return re.sub(rf"\[([^\]]+)\]\({relative}\)", r"\1", text) + f"\n{_PAGES}"


if __name__ == "__main__":
    page = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(page), long_description_content_type="text/markdown")
