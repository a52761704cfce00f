"""The ledger of claims: what the paper says, the cells that show it, the tests that guard it, and what came out.

    python tools/ledger.py      prints it as Markdown

The claims stand in docs/claims.toml. All the rest is read from the notebooks with their stored outputs and from the names of the
tests, so that it cannot say anything else than they do. A claim without a cell, a figure, a verdict or a test is an error.
"""

import ast
import os
import re
import tomllib
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

import nbformat

from notebooks import ROOT, pages

CLAIMS, TESTS = ROOT / "docs" / "claims.toml", ROOT / "tests"
FIRST_LINE = re.compile(r"(?:#\|.*\n|# alt: .*\n)*# (C\d+)\b[^:\n]*: \S")
VERDICT = re.compile(r"\b(within noise|does not|do not|fails|partly|holds)\b(?:'?: (\d+))?")  # or how often: "holds: 8"
SAME = {"do not": "does not", "fails": "does not"}
ASSERTED = "holds: asserted"


class Incomplete(Exception):
    """The ledger has gaps; the message names each claim and what it lacks."""


# number: execution count; lines: what it printed, with single spaces
Cell = namedtuple("Cell", "path id number lines asserts")
# tests: (file, name of the function)
Row = namedtuple("Row", "claim section says kind cells tests figures verdict")


def claim_of(cell):
    """The number of the claim that a code cell names in its first line ("C4"), or None."""
    found = FIRST_LINE.match(cell.source) if cell.cell_type == "code" else None
    return found and found[1]


def printed(cell):
    text = "\n".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def shown(paths):
    """{claim: its cells} of these notebooks."""
    found = defaultdict(list)
    for path in paths:
        for cell in nbformat.read(path, as_version=4).cells:
            if claim := claim_of(cell):
                asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))
                found[claim].append(Cell(path, cell.id, cell.execution_count, printed(cell), asserts))
    return found


def guarded(folder):
    """{claim: [(file, function)]} of the tests in a folder: `test_c4_…` guards C4."""
    found = defaultdict(list)
    for path in sorted(Path(folder).glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [*tree.body, *(node for part in tree.body if isinstance(part, ast.ClassDef) for node in part.body)]:
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_c(\d+)_", node.name)):
                found[f"C{match[1]}"].append((path, node.name))
    return found


def stored(executed=None):
    """The notebooks of the book: from the folder `executed` those that are there, the others as they are kept."""
    return [Path(executed) / path.name if executed and (Path(executed) / path.name).exists() else path for path in pages()]


def row_of(claim, entry, cells, tests):
    """(row of the ledger, list of what the claim lacks)."""
    lines = [line for cell in cells for line in cell.lines]
    found = {text: [line for line in lines if text in line] for text in entry["figure"]}
    figures = list(dict.fromkeys(line for matching in found.values() for line in matching))
    words = Counter()
    for word, count in VERDICT.findall("\n".join(figures)):
        words[SAME.get(word, word)] += int(count or 1)
    lacks = []
    if not tests:
        lacks.append(f"no test is called `test_{claim.lower()}_…`")
    if not cells:
        lacks.append(f"no cell begins with `# {claim}: …`")
    elif missing := [text for text, matching in found.items() if not matching]:
        names = ", ".join(dict.fromkeys(cell.path.name for cell in cells))
        lacks.append(f"no output of its cells ({names}) has a line with {' or '.join(map(repr, missing))}")
    elif entry["kind"] != "asserted" and not words:
        lacks.append("no line of its figure says whether it holds")
    if cells and entry["kind"] != "measured" and not any(cell.asserts for cell in cells):
        lacks.append("none of its cells asserts anything")
    measured = next(iter(words)) if len(words) == 1 else ", ".join(f"{word}: {count}" for word, count in words.items())
    verdict = {"asserted": ASSERTED, "measured": measured, "both": f"{ASSERTED}; measured: {measured}"}[entry["kind"]]
    return Row(claim, entry["section"], entry["says"], entry["kind"], cells, tests, figures, verdict), lacks


def read(paths=None, tests=TESTS, claims=CLAIMS):
    """The rows of the ledger; raises Incomplete, with every gap named."""
    paths = stored(os.environ.get("LEDGER_PAGES")) if paths is None else paths  # `make book`: what it has just executed
    table, cells, guards = tomllib.loads(Path(claims).read_text(encoding="utf-8")), shown(paths), guarded(tests)
    read_rows = [row_of(claim, entry, cells[claim], guards[claim]) for claim, entry in table.items()]
    gaps = [f"{row.claim}: {lack}" for row, lacks in read_rows for lack in lacks]
    for claim in sorted((cells.keys() | guards.keys()) - table.keys()):
        where = [cell.path.name for cell in cells[claim]] + [test for _, test in guards[claim]]
        gaps.append(f"{claim}: {', '.join(where)} checks it, {Path(claims).name} does not list it")
    if list(table) != [f"C{n}" for n in range(1, len(table) + 1)]:
        gaps.append(f"{Path(claims).name} does not list the claims from C1 on without a gap")
    if gaps:
        raise Incomplete("\n  ".join(["the ledger of claims has gaps:", *gaps]))
    return [row for row, _ in read_rows]


def markdown(rows):
    """The ledger as a Markdown table whose links lead from a page in notebooks/ to cells and tests."""
    text = ["| claim, section | what it says, and where it is checked | verdict, and figure measured |", "|---|---|---|"]
    for row in rows:
        cells = [f"[page {cell.path.name[:2]}, cell {cell.number}]({cell.path.name}#cell-id={cell.id})" for cell in row.cells]
        tests = []
        for path in dict.fromkeys(path for path, _ in row.tests):
            first, *others = [test for file, test in row.tests if file == path]
            tests.append(f"[{first}](../tests/{path.name})" + f" and {len(others)} more" * bool(others))
        where = f"Shown in {', '.join(cells)}.<br>Guarded by {', '.join(tests)}."
        figures = "<br>".join("`" + line.replace("`", "'").replace("|", r"\|") + "`" for line in row.figures)
        text.append(f"| **{row.claim}**<br>{row.section} | {row.says}<br>{where} | **{row.verdict}**<br>{figures} |")
    return "\n".join(text)


def summary(rows):
    """One sentence: how many claims there are, and how many of them are asserted or measured."""
    kinds = Counter(row.kind for row in rows)
    return f"{len(rows)} claims: {kinds['asserted']} asserted, {kinds['measured']} measured, {kinds['both']} with a part of each."


if __name__ == "__main__":
    print(markdown(read()))
