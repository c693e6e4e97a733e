"""Keeps one note in all pages that say what Fluid does on GPUs: what of it has run on one.

    python scripts/gpu_note.py    # writes the note into the pages, after a run on a GPU has changed it

A page that says much about GPUs has it at its first paragraph. Pages are read as files, too, where an admonition of
MkDocs would be noise, so it is a quotation.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The note. Its section in docs/devices.md has the details.
NOTE = """\
> **What has run on a GPU:** sweeps in each way to share one NVIDIA H200, with equal results (2026-11-27). What has not:
> several GPUs, NCCL between them, MIG, faults among trials under MPS, the tests marked `gpu`
> ([details](devices.md#what-has-run-on-a-gpu)).
"""
#: A page that names GPUs, CUDA or NCCL so often says what Fluid does there.
MANY = 3
_WRITTEN = re.compile(r"^> \*\*What has run on a GPU:\*\*.*\n(?:>.*\n)*\n", re.MULTILINE)


def with_note(page: str) -> str:
    """Returns the text of a page with the note, or without it if it says little about GPUs."""
    bare = _WRITTEN.sub("", page)
    if len(re.findall(r"\b(?:GPUs?|CUDA|NCCL)\b", bare)) < MANY:
        return bare
    title, paragraph, rest = bare.split("\n\n", 2)
    first = [NOTE, f"{paragraph}\n"] if paragraph.endswith(":") else [f"{paragraph}\n", NOTE]
    return "\n".join([f"{title}\n", *first, rest])


def main() -> None:
    """Writes the note into all pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := with_note(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
