"""The ledger of claims: what the paper says, the cells that show it, the tests that guard it, and
what came out.

    python tools/ledger.py      prints it; `make sync PAGES=00` writes it to notebooks/ledger.md

The claims and their parts stand in docs/claims.toml. All the rest is read from the notebooks with
their stored outputs and from the names of the tests, so that it cannot say anything else than they
do: a part is asserted if the cells that print its figures assert something, else measured, and then
those lines must say whether it holds. Whatever is missing or contradicts this is an error.
"""

import re
import tomllib
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

import nbformat

from notebooks import ROOT, pages

CLAIMS, TESTS = ROOT / "docs" / "claims.toml", ROOT / "tests"
FIRST_LINE = re.compile(r"(?:#\|.*\n|# alt: .*\n)*# (C\d+)\b( \(measured\))?[^:\n]*: \S")
# or how often: "holds: 8"
VERDICT = re.compile(r"\b(within noise|does not|do not|fails|partly|holds)\b(?:'?: (\d+))?")
SAME = {"do not": "does not", "fails": "does not"}


class Incomplete(Exception):
    """The ledger has gaps; the message names each claim and what it lacks."""


# number: execution count; lines: what it printed, with single spaces
Cell = namedtuple("Cell", "path id number lines measured")
Part = namedtuple("Part", "says kind figures verdict")
# tests: (file, name of the function)
Row = namedtuple("Row", "claim section says kind parts cells tests")


def claim_of(cell):
    """The number of the claim that a code cell names in its first line ("C4"), or None."""
    match = FIRST_LINE.match(cell.source) if cell.cell_type == "code" else None
    return match and match[1]


def printed(cell):
    text = "\n".join(output.get("text", "")
                     for output in cell.get("outputs", []) if output.get("name") == "stdout")
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def verdicts(lines):
    """How often each verdict is given in these lines."""
    words = Counter()
    for word, count in VERDICT.findall("\n".join(lines)):
        words[SAME.get(word, word)] += int(count or 1)
    return words


def shown(paths):
    """{claim: its cells} of these notebooks: those that begin with it, and those that print a
    verdict on it.
    """
    cells = defaultdict(list)
    for path in paths:
        for cell in nbformat.read(path, as_version=4).cells:
            titled, lines = claim_of(cell), printed(cell)
            spoken_of = [line for line in lines if VERDICT.search(line)]
            for claim in {titled, *re.findall(r"\bC\d+\b", "\n".join(spoken_of))} - {None}:
                own = lines if claim == titled else [line for line in spoken_of
                                                     if re.search(rf"\b{claim}\b", line)]
                marked = titled and FIRST_LINE.match(cell.source)[2]
                measured = bool(marked) or not re.search(r"^\s*assert ", cell.source, re.MULTILINE)
                cells[claim].append(Cell(path, cell.id, cell.execution_count, own, measured))
    return cells


def guarded(folder):
    """{claim: [(file, function)]} of the tests in a folder: `test_c4_…` guards C4."""
    tests = defaultdict(list)
    for path in sorted(Path(folder).rglob("test_*.py")):
        for name, number in re.findall(r"^(?:    )?def (test_c(\d+)_\w+)",
                                       path.read_text(encoding="utf-8"), re.MULTILINE):
            tests[f"C{number}"].append((path.relative_to(folder), name))
    return tests


def part_of(entry, cells):
    """(part of a claim, list of what it lacks)."""
    reached = [(cell, line) for cell in cells
               for line in cell.lines if any(text in line for text in entry["figure"])]
    figures = list(dict.fromkeys(line for _, line in reached))
    words, measured, lacks = verdicts(figures), any(cell.measured for cell, _ in reached), []
    if missing := [text for text in entry["figure"] if not any(text in line for line in figures)]:
        names = ", ".join(dict.fromkeys(cell.path.name for cell in cells))
        lacks.append(f"no output of its cells ({names}) has a line with "
                     f"{' or '.join(map(repr, missing))}")
    elif measured and not words:
        lacks.append(f"no line of its figure says whether it holds: {entry['says']}")
    elif not measured and set(words) - {"holds"}:
        lacks.append(f"its cells assert it, and print {', '.join(set(words) - {'holds'})}: "
                     f"{entry['says']}")
    verdict = (next(iter(words), "") if len(words) < 2
               else ", ".join(f"{word}: {count}" for word, count in words.items()))
    return Part(entry["says"], "measured" if measured else "asserted", figures,
                verdict if measured else "asserted"), lacks


def row_of(claim, entry, cells, tests):
    """(row of the ledger, list of what the claim lacks)."""
    results = [part_of(part, cells) for part in entry["part"]] if cells else []
    parts = [part for part, _ in results]
    lacks = [lack for _, several in results for lack in several]
    if not tests:
        lacks.append(f"no test is called `test_{claim.lower()}_…`")
    if not cells:
        lacks.append(f"no cell begins with `# {claim}: …`")
    for cell in cells:
        where = f"{cell.path.name}, cell {cell.number}"
        figures = [line for part in parts for line in part.figures]
        lacks += [f"{where} prints {line!r}, which no part of it shows"
                  for line in cell.lines if re.search(rf"\b{claim}\b", line)
                  and VERDICT.search(line) and line not in figures]
        if cell.measured and (hidden := verdicts(cell.lines).keys() - verdicts(figures).keys()):
            lacks.append(f"{where} prints {', '.join(sorted(hidden))}, which no part of it shows")
    kinds = {part.kind for part in parts}
    return Row(claim, entry["section"], entry["says"], "both" if len(kinds) > 1 else "".join(kinds),
               parts, cells, tests), lacks


def read(paths=None, tests=TESTS, claims=CLAIMS):
    """The rows of the ledger; raises Incomplete, with every gap named."""
    paths = pages() if paths is None else paths
    table, cells = tomllib.loads(Path(claims).read_text(encoding="utf-8")), shown(paths)
    guards = guarded(tests)
    read_rows = [row_of(claim, entry, cells[claim], guards[claim])
                 for claim, entry in table.items()]
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
    """The ledger as a Markdown table whose links lead from a page in notebooks/ to cells and
    tests.
    """
    text = ["| claim, section | what it says, and where it is checked | verdict on each part, and "
            "figure |", "|---|---|---|"]
    for row in rows:
        cells = [f"[page {cell.path.name[:2]}, cell "
                 f"{cell.number}]({cell.path.name}#cell-id={cell.id})" for cell in row.cells]
        first = {path: test for path, test in reversed(row.tests)}  # of each file
        tests = [f"[{test}](../tests/{path})" for path, test in sorted(first.items())]
        where = f"Shown in {', '.join(cells)}.<br>Guarded by {', '.join(tests)}."
        lines = []
        for part in row.parts:
            lines.append(f"**{part.verdict}** · {part.says}")
            lines += ["`" + line.replace("`", "'").replace("|", r"\|") + "`"
                      for line in part.figures]
        text.append(f"| **{row.claim}**<br>{row.section} | {row.says}<br>{where} | "
                    f"{'<br>'.join(lines)} |")
    return "\n".join(text)


def summary(rows):
    """One sentence: how many claims there are, and how many of them are asserted or measured."""
    kinds = Counter(row.kind for row in rows)
    return (f"{len(rows)} claims: {kinds['asserted']} asserted, {kinds['measured']} measured, "
            f"{kinds['both']} with a part of each.")


def document(rows):
    """The summary and the table as they stand in notebooks/ledger.md, which page 00 shows."""
    return f"{summary(rows)}\n\n{markdown(rows)}\n"


if __name__ == "__main__":
    print(document(read()), end="")
