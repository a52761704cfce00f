"""The ledger of claims: what the paper says, the cells that show it, the tests that guard it, and what came out.

    python tools/ledger.py      prints it as Markdown

The claims and their parts stand in docs/claims.toml. All the rest is read from the notebooks with their stored outputs and from the
names of the tests, so that it cannot say anything else than they do: a part is asserted if the cells that print its figures assert
something, else measured, and then those lines must say whether it holds. Whatever is missing or contradicts this is an error.
An assertion counts, in a cell or a test, if it could fail: what it asks comes from the package, and is not compared with itself.
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
VERDICT = re.compile(r"\b(within noise|does not|do not|fails|partly|holds)\b(?:'?: (\d+))?")  # or how often: "holds: 8"
SAME = {"do not": "does not", "fails": "does not"}
OURS = {"annotated", "benchmarks"}  # what can be broken
EQUAL = ("equal", "allclose", "isclose", "assert_close")
CHOICES = (ast.IfExp, ast.If, ast.Dict, ast.Subscript, ast.FunctionDef)  # what can choose between two verdicts


class Incomplete(Exception):
    """The ledger has gaps; the message names each claim and what it lacks."""


# number: execution count; lines: what it printed, with single spaces; fixed: verdicts in its code that cannot come out otherwise
Cell = namedtuple("Cell", "path id number lines measured fixed")
Part = namedtuple("Part", "says kind figures verdict")
Row = namedtuple("Row", "claim section says kind parts cells tests")  # tests: (file, name of the function)


def claim_of(cell):
    """The number of the claim that a code cell names in its first line ("C4"), or None."""
    found = FIRST_LINE.match(cell.source) if cell.cell_type == "code" else None
    return found and found[1]


def printed(cell):
    text = "\n".join(output.get("text", "") for output in cell.get("outputs", []) if output.get("name") == "stdout")
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def verdicts(lines):
    """How often each verdict is given in these lines."""
    words = Counter()
    for word, count in VERDICT.findall("\n".join(lines)):
        words[SAME.get(word, word)] += int(count or 1)
    return words


def can_vary(node):
    """Whether what a choice asks depends on anything: `if 1 > 0` does not."""
    return any(isinstance(part, ast.Name) for part in ast.walk(getattr(node, "test", node)))


def names(*nodes):
    """The names in code, parameters among them, and "assert" if it asserts."""
    parts = [part for node in nodes if node for part in ast.walk(node)]
    calls = [ast.unparse(part.func).split(".")[-1] for part in parts if isinstance(part, ast.Call)]
    asserts = any(isinstance(part, ast.Assert) for part in parts) or any(re.match("assert_|raises$", call) for call in calls)
    found = {getattr(part, "id", None) or part.arg for part in parts if isinstance(part, ast.Name | ast.arg)}
    return found | {"assert"} if asserts else found


def sources(tree):
    """{name: the names it comes from} of what code imports, defines, assigns, or changes as `kept.append(x)` does."""
    found, imported, inner = defaultdict(set), {}, set()
    for node in ast.walk(tree):
        taken, given = getattr(node, "targets", []) + [getattr(node, "target", None)], [getattr(node, "value", None)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {each.asname or each.name: {(getattr(node, "module", None) or each.name).split(".")[0]} for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] |= names(node)
            inner |= set(ast.walk(node)) if node is not tree else set()
            taken, given = ([node.args], node.decorator_list) if node is tree else ([], [])
        elif isinstance(node, ast.For | ast.comprehension):
            given = [node.iter]
        elif isinstance(node, ast.With):
            taken, given = [item.optional_vars for item in node.items], [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            taken, given = [node.func.value], [*node.args]
        for name in names(*taken) if node not in inner else ():
            found[name] |= names(*given)
    return found | imported


def can_fail(tree, known):
    """Whether code has a check that counts; `known` says what names come from."""
    for node in ast.walk(tree):
        checks = isinstance(node, ast.Assert | ast.Expr) or isinstance(node, ast.With) and "assert" in names(*node.items)
        new, reached = names(node) if checks else set(), set()
        while new:
            reached, new = reached | new, set().union(*(known.get(name, ()) for name in new)) - reached - new
        sides = [[part.left, *part.comparators] if isinstance(part, ast.Compare) else part.args[:2] for part in ast.walk(node)
                 if isinstance(part, ast.Compare) or isinstance(part, ast.Call) and ast.unparse(part.func).endswith(EQUAL)]  # fmt: skip
        if "assert" in reached and reached & OURS and all(len(set(map(ast.dump, each))) > 1 for each in sides):
            return True
    return False


def spoken(tree):
    """The string literals with a verdict below a node, but for docstrings, keys, and what is only compared with."""
    aside = set()
    for node in ast.walk(tree):
        aside |= {node.slice} if isinstance(node, ast.Subscript) else set()
        aside |= set(ast.iter_child_nodes(node)) if isinstance(node, (ast.Expr, ast.Compare)) else set()
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and node not in aside and VERDICT.search(node.value)]  # fmt: skip


def fixed(tree):
    """The verdicts of a cell that cannot come out otherwise: in no condition, table or function is there another to choose."""
    choices = [node for node in ast.walk(tree) if isinstance(node, CHOICES) and can_vary(node)]
    free = {word for node in choices for word in spoken(node) if len(verdicts(each.value for each in spoken(node))) > 1}
    return [word.value for word in spoken(tree) if word not in free]


def shown(paths):
    """{claim: its cells} of these notebooks: those that begin with it, and those that print a verdict on it."""
    found = defaultdict(list)
    for path in paths:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        known = sources(ast.parse(re.sub("(?m)^%.*", "", "\n".join(code))))
        for node in [node for each in code if each.startswith("#| export") for node in ast.parse(each).body if hasattr(node, "name")]:
            known[node.name] = {"annotated"}  # what the page defines for the package
        for cell in cells:
            titled, lines = claim_of(cell), printed(cell)
            spoken_of = [line for line in lines if VERDICT.search(line)]
            for claim in {titled, *re.findall(r"\bC\d+\b", "\n".join(spoken_of))} - {None}:
                own = lines if claim == titled else [line for line in spoken_of if re.search(rf"\b{claim}\b", line)]
                tree, marked = ast.parse(cell.source), titled and FIRST_LINE.match(cell.source)[2]
                measured = bool(marked) or not can_fail(tree, known)
                found[claim].append(Cell(path, cell.id, cell.execution_count, own, measured, fixed(tree)))
    return found


def guarded(folder):
    """{claim: [(file, function, whether it can fail)]} of the tests in a folder: `test_c4_…` guards C4."""
    found = defaultdict(list)
    for path in sorted(Path(folder).rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        outer = sources(tree)
        for node in [*tree.body, *(node for part in tree.body if isinstance(part, ast.ClassDef) for node in part.body)]:
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_c(\d+)_", node.name)):
                found[f"C{match[1]}"].append((path.relative_to(folder), node.name, can_fail(node, sources(node) | outer)))
    return found


def part_of(entry, cells):
    """(part of a claim, list of what it lacks)."""
    reached = [(cell, line) for cell in cells for line in cell.lines if any(text in line for text in entry["figure"])]
    figures = list(dict.fromkeys(line for _, line in reached))
    words, measured, lacks = verdicts(figures), any(cell.measured for cell, _ in reached), []
    if missing := [text for text in entry["figure"] if not any(text in line for line in figures)]:
        names = ", ".join(dict.fromkeys(cell.path.name for cell in cells))
        lacks.append(f"no output of its cells ({names}) has a line with {' or '.join(map(repr, missing))}")
    elif measured and not words:
        lacks.append(f"no line of its figure says whether it holds: {entry['says']}")
    elif not measured and set(words) - {"holds"}:
        lacks.append(f"its cells assert it, and print {', '.join(set(words) - {'holds'})}: {entry['says']}")
    found = next(iter(words), "") if len(words) < 2 else ", ".join(f"{word}: {count}" for word, count in words.items())
    return Part(entry["says"], "measured" if measured else "asserted", figures, found if measured else "asserted"), lacks


def row_of(claim, entry, cells, tests):
    """(row of the ledger, list of what the claim lacks)."""
    found = [part_of(part, cells) for part in entry["part"]] if cells else []
    parts, lacks = [part for part, _ in found], [lack for _, several in found for lack in several]
    if not tests:
        lacks.append(f"no test is called `test_{claim.lower()}_…`")
    if not cells:
        lacks.append(f"no cell begins with `# {claim}: …`")
    for cell in cells:
        where, figures = f"{cell.path.name}, cell {cell.number}", [line for part in parts for line in part.figures]
        lacks += [f"{where} can only say {word!r}" for word in cell.fixed if cell.measured]
        lacks += [f"{where} prints {line!r}, which no part of it shows"
                  for line in cell.lines if re.search(rf"\b{claim}\b", line) and VERDICT.search(line) and line not in figures]  # fmt: skip
        if cell.measured and (hidden := verdicts(cell.lines).keys() - verdicts(figures).keys()):
            lacks.append(f"{where} prints {', '.join(sorted(hidden))}, which no part of it shows")
    kinds = {part.kind for part in parts}
    return Row(claim, entry["section"], entry["says"], "both" if len(kinds) > 1 else "".join(kinds), parts, cells, tests), lacks


def read(paths=None, tests=TESTS, claims=CLAIMS):
    """The rows of the ledger; raises Incomplete, with every gap named."""
    paths = pages() if paths is None else paths
    table, cells, guards = tomllib.loads(Path(claims).read_text(encoding="utf-8")), shown(paths), guarded(tests)
    read_rows = [row_of(claim, entry, cells[claim], [test[:2] for test in guards[claim]]) for claim, entry in table.items()]
    gaps = [f"{row.claim}: {lack}" for row, lacks in read_rows for lack in lacks]
    gaps += [f"{claim}: {test} checks nothing of the package" for claim, found in guards.items() for _, test, sound in found if not sound]
    for claim in sorted((cells.keys() | guards.keys()) - table.keys()):
        where = [cell.path.name for cell in cells[claim]] + [test for _, test, _ in guards[claim]]
        gaps.append(f"{claim}: {', '.join(where)} checks it, {Path(claims).name} does not list it")
    if list(table) != [f"C{n}" for n in range(1, len(table) + 1)]:
        gaps.append(f"{Path(claims).name} does not list the claims from C1 on without a gap")
    if gaps:
        raise Incomplete("\n  ".join(["the ledger of claims has gaps:", *gaps]))
    return [row for row, _ in read_rows]


def markdown(rows):
    """The ledger as a Markdown table whose links lead from a page in notebooks/ to cells and tests."""
    text = ["| claim, section | what it says, and where it is checked | verdict on each part, and figure |", "|---|---|---|"]
    for row in rows:
        cells = [f"[page {cell.path.name[:2]}, cell {cell.number}]({cell.path.name}#cell-id={cell.id})" for cell in row.cells]
        tests = []
        for path in dict.fromkeys(path for path, _ in row.tests):
            first, *others = [test for file, test in row.tests if file == path]
            tests.append(f"[{first}](../tests/{path})" + f" and {len(others)} more" * bool(others))
        where = f"Shown in {', '.join(cells)}.<br>Guarded by {', '.join(tests)}."
        lines = []
        for part in row.parts:
            lines.append(f"**{part.verdict}** · {part.says}")
            lines += ["`" + line.replace("`", "'").replace("|", r"\|") + "`" for line in part.figures]
        text.append(f"| **{row.claim}**<br>{row.section} | {row.says}<br>{where} | {'<br>'.join(lines)} |")
    return "\n".join(text)


def summary(rows):
    """One sentence: how many claims there are, and how many of them are asserted or measured."""
    kinds = Counter(row.kind for row in rows)
    return f"{len(rows)} claims: {kinds['asserted']} asserted, {kinds['measured']} measured, {kinds['both']} with a part of each."


if __name__ == "__main__":
    print(markdown(read()))
