"""Numbers in the prose of the pages that measure come from their section, or from elsewhere.

A number with a decimal point is a result: an output of the section shows it, or an assertion holds
it. A whole number may also be a setting in the code. What the paper prints counts where the text
speaks of the paper.
"""

import re

import nbformat
import pytest

from notebooks import pages

MEASURING = {"09", *map(str, range(17, 27))}
NUMBER = re.compile(r"(?<![\w\[.,^_\-–])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w|\])")
PRINTED = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
NAMED = r"figures?|tables?|sections?|pages?|seeds?|newstest|multi30k|WMT|rows?|parts?"
UNCOUNTED = [  # no number of a run: folded answers, code, formulas, addresses, citations, names
    r"<details>.*?</details>", r"```.*?```", r"`[^`]*`", r"\$\$.*?\$\$|\$[^$]*\$",
    r"\]\([^)]*\)|<[^>]+>", r"\[[^\]]*?\d{4}[^\]]*?\]",
    rf"(?i)(?:{NAMED}|equations?|claims?|to|and|\() ?\**\d\.\d\b",
    rf"(?i)(?:{NAMED}|python|torch) ?\**\d[\d.,–-]*(?: and \d+)?",
    r"\b(?:19|20)\d\d\b", r"settings of \d\.\d"]
SHARE = re.compile(r"(?: (?:and|to|or|of) [\d.]+|–[\d.]+)? ?(?:%|percent|per cent|points?\b)")
PAPER = {50, 0.6, 0.4, 4.5, 36, 27.3, 28.4, 41.0, 9.5, 65, 16_000, 25_000, 32_000, 37_000, 40_000,
         100_000, 300_000}  # printed there
ELSEWHERE = {"17": {54}, "18": {100}, "19": {41.02, 2.5, 97.5}, "21": {370, 0.01}, "23": {75, 2000},
             "24": {300}, "25": {50, 512, 1024}}  # other papers, arithmetic, exit codes, rules


def prose(source):
    """The text of a cell without what holds no number of a run."""
    for pattern in UNCOUNTED:
        source = re.sub(pattern, " ", source, flags=re.DOTALL)
    return source


def shown(cell, code=True):
    """Code and outputs of a cell as text, no pictures; of the code only assertions if so asked."""
    lines = cell.source.split("\n")
    parts = [line for line in lines if code or line.lstrip().startswith("assert ")]
    for output in cell.outputs:
        texts = {"text": output.get("text", ""), **output.get("data", {})}
        parts += [text for kind, text in texts.items() if kind.startswith("text")]
    return re.sub(r"data:[^\"']*", "", "\n".join(parts))


def numbers(text):
    """All numbers of a text; in code thousands may be set apart by `_`."""
    matches = PRINTED.findall(re.sub(r"(?<=\d)_(?=\d{3})", "", text))
    return {float(number.replace(",", "")) for number in matches}


def stands(number, values, after=""):
    """Whether a number is one of the values, rounded as it is; `after` it per cent and millions."""
    scales = (1, 100) if SHARE.match(after) else (1, 1e-6) if after.startswith(" million") else (1,)
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
    figure = float(number.replace(",", ""))
    return any(abs(scale * value - figure) <= half for value in values for scale in scales)


def sections(cells):
    """The cells in groups, a heading of the second level with all below it."""
    groups = [[]]
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            groups.append([])
        groups[-1].append(cell)
    return groups


def unfounded(notebook, page=""):
    """Numbers above twelve, or with a point, that the prose names and its section does not show."""
    everywhere, messages = [cell for cell in notebook.cells if cell.cell_type == "code"], []
    for group in sections(notebook.cells):
        here, head = [cell for cell in group if cell.cell_type == "code"], group[0].source
        if not here or head.startswith(("## Summary", "## Exercises")):  # of the whole page
            here = everywhere
        results, settings = (numbers("\n".join(shown(cell, code) for cell in here))
                             for code in (False, True))
        for text in [prose(cell.source) for cell in group if cell.cell_type == "markdown"]:
            for match in NUMBER.finditer(text):
                whole = "." not in match[0]
                chosen = whole or head.startswith("## Exercises")
                values = (settings if chosen else results) | ELSEWHERE.get(page, set())
                values |= PAPER if page == "23" or "paper" in text.lower() else set()
                counts = not whole or float(match[0].replace(",", "")) > 12
                if counts and not stands(match[0], values, text[match.end():]):
                    around = text[max(0, match.start() - 50):match.end() + 30]
                    messages.append(f"{match[0]}: …{' '.join(around.split())}…")
    return messages


@pytest.mark.parametrize("path", pages(sorted(MEASURING)), ids=lambda path: path.stem)
def test_numbers_of_the_prose_stand_in_code_or_outputs_of_their_section(path):
    assert unfounded(nbformat.read(path, as_version=4), path.name[:2]) == []
