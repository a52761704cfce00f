"""The ledger of claims: what the paper says, the cells that show it, the tests that guard it, and
the results. `make sync PAGES=00` writes it to notebooks/ledger.md.

The claims and their parts are listed in docs/claims.toml. Everything else is read from the stored
outputs of the notebooks and from the names of the tests, so the ledger cannot contradict them. A
part is asserted if the cells that print its figures use the package and assert something that can
fail. Otherwise it is measured, and those lines must say whether it holds. Anything missing or
contradictory is an error; lines with a verdict that do not name the claim are compared by the kinds
of verdict alone.
"""

import ast
import re
import tomllib
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

import nbformat

from notebooks import ROOT, pages

CLAIMS, TESTS = ROOT / "docs" / "claims.toml", ROOT / "tests"
FIRST_LINE = re.compile(r"(?:#\|.*\n|# alt: .*\n)*# (C\d+)\b( \(measured\))?[^:\n]*: \S")
# a verdict, or its count as in "holds: 8"
VERDICT = re.compile(r"\b(within noise|does not|partly|holds|alike)\b(?:'?: (\d+))?")


class Incomplete(Exception):
    """The ledger has gaps; the message names each claim and what it lacks."""


# number: execution count; lines: what it printed, with single spaces
Cell = namedtuple("Cell", "path id number lines measured")
Part = namedtuple("Part", "says kind figures verdict")
# tests: (file, name of the function)
Row = namedtuple("Row", "claim section says kind parts cells tests")


def printed_lines(cell):
    """Return the lines that a cell printed, with single spaces."""
    text = "\n".join(output.get("text", "")
                     for output in cell.get("outputs", []) if output.get("name") == "stdout")
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def verdicts(lines):
    """Return how often each verdict occurs in these lines."""
    counts = Counter()
    for word, count in VERDICT.findall("\n".join(lines)):
        counts[word] += int(count or 1)
    return counts


def can_fail(node):
    """Whether a node of a syntax tree may raise an AssertionError; `x == x` and `True` may not."""
    if isinstance(node, ast.Call):
        return re.search("assert|raises", ast.unparse(node.func)) is not None
    test = node.test if isinstance(node, ast.Assert) else ast.Constant(True)
    if isinstance(test, ast.Compare) and ast.dump(test.left) == ast.dump(test.comparators[-1]):
        return False
    return any(isinstance(part, ast.Name) for part in ast.walk(test))


def names_of(nodes):
    """Return the names that code uses, those that it makes, and those from the package."""
    used, made, package = set(), set(), set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and "annotated" in ast.unparse(node):
            package |= {name.asname or name.name for name in node.names}
    return used, made, package


def cells_by_claim(paths):
    """Return {claim: cells} of these notebooks: the cells that begin with the claim, and those that
    print a verdict on it.
    """
    cells = defaultdict(list)
    for path in paths:
        known = set()  # names that come from the package, and what was made of them
        for cell in nbformat.read(path, as_version=4).cells:
            code = re.sub(r"(?m)^%.*", "", cell.source) if cell.cell_type == "code" else ""
            used, made, package = names_of(nodes := list(ast.walk(ast.parse(code))))
            known |= package
            known |= made if cell.source.startswith("#| export") or used & known else set()
            match, lines = FIRST_LINE.match(code), printed_lines(cell)
            title, marked = match.groups() if match else (None, None)
            judged = [line for line in lines if VERDICT.search(line)]
            for claim in {title, *re.findall(r"\bC\d+\b", "\n".join(judged))} - {None}:
                own = lines if claim == title else [line for line in judged
                                                    if re.search(rf"\b{claim}\b", line)]
                measured = bool(marked) or not used & known or not any(map(can_fail, nodes))
                cells[claim].append(Cell(path, cell.id, cell.execution_count, own, measured))
    return cells


def tests_by_claim(folder):
    """Return {claim: [(file, function)]} of the tests in a folder: `test_c4_…` guards C4."""
    tests = defaultdict(list)
    for path in sorted(Path(folder).rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            number = re.match(r"test_c(\d+)_", getattr(node, "name", None) or "")
            if number and any(map(can_fail, ast.walk(node))):
                tests[f"C{number[1]}"].append((path.relative_to(folder), node.name))
    return tests


def part_of(entry, cells):
    """Return a part of a claim, and the list of its gaps."""
    sources = [(cell, line) for cell in cells
               for line in cell.lines if any(text in line for text in entry["figure"])]
    figures = list(dict.fromkeys(line for _, line in sources))
    counts, measured, gaps = verdicts(figures), any(cell.measured for cell, _ in sources), []
    if missing := [text for text in entry["figure"] if not any(text in line for line in figures)]:
        names = ", ".join(dict.fromkeys(cell.path.name for cell in cells))
        gaps.append(f"no output of its cells ({names}) has a line with "
                    f"{' or '.join(map(repr, missing))}")
    elif measured and not counts:
        gaps.append(f"no line of its figure says whether it holds: {entry['says']}")
    elif not measured and set(counts) - {"holds"}:
        gaps.append(f"its cells assert it, and print {', '.join(set(counts) - {'holds'})}: "
                    f"{entry['says']}")
    verdict = (next(iter(counts), "") if len(counts) < 2
               else ", ".join(f"{word}: {count}" for word, count in counts.items()))
    kind = "measured" if measured else "asserted"
    return Part(entry["says"], kind, figures, verdict if measured else kind), gaps


def row_of(claim, entry, cells, tests):
    """Return the row of a claim, and the list of its gaps."""
    results = [part_of(part, cells) for part in entry["part"]] if cells else []
    parts = [part for part, _ in results]
    gaps = [gap for _, several in results for gap in several]
    figures = [line for part in parts for line in part.figures]
    if not tests:
        gaps.append(f"no test that can fail is called `test_{claim.lower()}_…`")
    if not cells:
        gaps.append(f"no cell begins with `# {claim}: …`")
    for cell in cells:
        where = f"{cell.path.name}, cell {cell.number}"
        gaps += [f"{where} prints {line!r}, which no part of it shows"
                 for line in cell.lines if re.search(rf"\b{claim}\b", line)
                 and VERDICT.search(line) and line not in figures]
        if cell.measured and (hidden := verdicts(cell.lines).keys() - verdicts(figures).keys()):
            gaps.append(f"{where} prints {', '.join(sorted(hidden))}, which no part of it shows")
    kinds = {part.kind for part in parts}
    return Row(claim, entry["section"], entry["says"], "both" if len(kinds) > 1 else "".join(kinds),
               parts, cells, tests), gaps


def read(paths=None, tests=TESTS, claims=CLAIMS):
    """Return the rows of the ledger; raises Incomplete, which names every gap."""
    table = tomllib.loads(Path(claims).read_text(encoding="utf-8"))
    cells, guards = cells_by_claim(pages() if paths is None else paths), tests_by_claim(tests)
    results = [row_of(claim, entry, cells[claim], guards[claim]) for claim, entry in table.items()]
    gaps = [f"{row.claim}: {gap}" for row, several in results for gap in several]
    for claim in sorted((cells.keys() | guards.keys()) - table.keys()):
        where = [cell.path.name for cell in cells[claim]] + [test for _, test in guards[claim]]
        gaps.append(f"{claim}: {', '.join(where)} checks it, {Path(claims).name} does not list it")
    if list(table) != [f"C{n}" for n in range(1, len(table) + 1)]:
        gaps.append(f"{Path(claims).name} does not list the claims from C1 on without a gap")
    if gaps:
        raise Incomplete("\n  ".join(["the ledger of claims has gaps:", *gaps]))
    return [row for row, _ in results]


def markdown(rows):
    """Return the ledger as a Markdown table, with links from notebooks/ to cells and tests."""
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


def document(rows):
    """Return notebooks/ledger.md, which page 00 shows: the numbers of claims, and the table."""
    kinds = Counter(row.kind for row in rows)
    return (f"{len(rows)} claims: {kinds['asserted']} asserted, {kinds['measured']} measured, "
            f"{kinds['both']} with a part of each.\n\n{markdown(rows)}\n")
