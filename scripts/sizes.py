"""Prints how large the rooms of the house are, for judgement: nothing of it fails a test.

    python scripts/sizes.py [--folders]

Named are folders with more files than a reader holds, files that are long, and small modules that one other module
imports alone. ``--folders`` prints the code lines of every folder: without blank lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
#: Folders with more files, and files with more lines, are named; so are modules with fewer code lines and one importer.
_FILES, _LINES, _FEW = 12, 700, 60
_SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """How many lines of a module are neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def _sources() -> dict[str, str]:
    """Path from the root to source, of every module that is shipped."""
    return {
        path.relative_to(_ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("fluid", "integrations")
        for path in sorted((_ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(_ROOT / "fluid" / "integrations")  # The link.
    }


def _module(path: str) -> str:
    names = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(names if names[0] == "fluid" else ["fluid", *names])


def _importers(sources: dict[str, str]) -> dict[str, set[str]]:
    """By module, those that import it or a name of it."""
    modules = {_module(path): path for path in sources}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
            for name in names:
                if name in modules and modules[name] != path:
                    importers[modules[name]].add(path)
    return importers


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", action="store_true", help="print the code lines of every folder")
    options = parser.parse_args()
    sources = _sources()
    code = {path: code_lines(source) for path, source in sources.items()}
    files: Counter[str] = Counter(str(Path(path).parent) for path in sources if not path.endswith("__init__.py"))
    if options.folders:
        for folder, count in sorted(files.items()):
            lines = sum(code[path] for path in sources if str(Path(path).parent) == folder)
            print(f"{folder:36} {count:4} files {lines:7,} code lines")
    print(f"{len(sources)} modules, {sum(code.values()):,} code lines")
    many = [f"{folder} {count}" for folder, count in files.most_common() if count > _FILES]
    print(f"folders of more than {_FILES} files: {', '.join(many) or 'none'}")
    long = [f"{path} {count}" for path, source in sources.items() if (count := source.count("\n")) > _LINES]
    print(f"files of more than {_LINES} lines: {', '.join(long) or 'none'}")
    importers = _importers(sources)
    few = [path for path, count in code.items() if count < _FEW and not path.endswith("__init__.py")]
    small = [path for path in few if len(importers[path]) == 1]
    print(f"modules of fewer than {_FEW} code lines with one importer: {', '.join(small) or 'none'}")


if __name__ == "__main__":
    main()
