"""Numbers in the prose of the pages that measure stand in the code or outputs of their section, or are known to come from elsewhere."""

import re
import sys

import nbformat
import pytest

sys.path.insert(0, "tools")
from notebooks import pages  # noqa: E402

MEASURING = {"09", *map(str, range(17, 27))}
NUMBER = re.compile(r"(?<![\w\[.,^_\-–])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w|\])")
PRINTED = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
UNCOUNTED = [  # what holds no number of a run: folded answers, code, formulas, addresses, citations, names, years
    r"<details>.*?</details>", r"```.*?```", r"`[^`]*`", r"\$\$.*?\$\$|\$[^$]*\$", r"\]\([^)]*\)|<[^>]+>", r"\[[^\]]*?\d{4}[^\]]*?\]",
    r"(?i)(?:pages?|sections?|tables?|figures?|equations?|claims?|seeds?|newstest|multi30k|WMT|rows?|parts?|to|and|\() ?\**\d\.\d\b",
    r"(?i)(?:pages?|sections?|tables?|figures?|seeds?|newstest|multi30k|WMT|rows?|parts?|python|torch) ?\**\d[\d.,–-]*(?: and \d+)?",
    r"\b(?:19|20)\d\d\b"]
PAPER = {50, 0.6, 0.4, 4.5, 36, 27.3, 28.4, 41.0, 9.5, 65, 16_000, 25_000, 32_000, 37_000, 40_000, 100_000, 300_000}  # printed there
ELSEWHERE = {"17": {54}, "19": {41.02, 2.5, 97.5}, "21": {370}, "23": {75}, "25": {50, 512, 1024}}  # other papers, arithmetic, exit codes


def prose(source):
    """The text of a cell without what holds no number of a run."""
    for pattern in UNCOUNTED:
        source = re.sub(pattern, " ", source, flags=re.DOTALL)
    return source


def shown(cell):
    """Code and outputs of a cell as text, without pictures."""
    parts = [cell.source]
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts += [text for kind, text in output.get("data", {}).items() if kind in ("text/plain", "text/html", "text/markdown")]
    return re.sub(r"data:[^\"']*", "", "\n".join(parts))


def numbers(text):
    """All numbers of a text."""
    return {float(found.replace(",", "")) for found in PRINTED.findall(text)}


def stands(number, values):
    """Whether a printed number is one of the values, rounded to its own digits; a share may be printed in per cent."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
    return any(abs(scale * value - float(number.replace(",", ""))) <= half for value in values for scale in (1, 100))


def sections(cells):
    """The cells in groups, a heading of the second level with all below it."""
    groups = [[]]
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            groups.append([])
        groups[-1].append(cell)
    return groups


def unfounded(notebook, page=""):
    """Numbers above twelve, or with a decimal point, that the prose of a page names and its section does not show."""
    everywhere = numbers("\n".join(shown(cell) for cell in notebook.cells if cell.cell_type == "code"))
    found = []
    for group in sections(notebook.cells):
        here = numbers("\n".join(shown(cell) for cell in group if cell.cell_type == "code"))
        if not here or group[0].source.startswith(("## Summary", "## Exercises")):  # they speak of the whole page
            here = everywhere
        values = here | PAPER | ELSEWHERE.get(page, set())
        for cell in group:
            if cell.cell_type == "markdown":
                text = prose(cell.source)
                for match in NUMBER.finditer(text):
                    if ("." in match[0] or float(match[0].replace(",", "")) > 12) and not stands(match[0], values):
                        found.append(f"{match[0]}: …{' '.join(text[max(0, match.start() - 50):match.end() + 30].split())}…")
    return found


@pytest.mark.parametrize("path", [path for path in pages() if path.name[:2] in MEASURING], ids=lambda path: path.stem)
def test_numbers_of_the_prose_stand_in_code_or_outputs_of_their_section(path):
    assert unfounded(nbformat.read(path, as_version=4), path.name[:2]) == []


def test_a_number_that_no_longer_comes_out_is_found():
    def page(output):
        code = nbformat.v4.new_code_cell("score(model)", outputs=[nbformat.v4.new_output("stream", text=f"BLEU {output}\n")])
        text = "## Result\n\nIt scores 39.4 (the paper: 27.3, in 3 runs; [Wu 2021](x14.5)), `17` rows of Table 3.\n<details>99</details>"
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), code])

    assert unfounded(page("39.44")) == []
    assert [line.split(":")[0] for line in unfounded(page("38.90"))] == ["39.4"]


def test_shares_and_thousands_are_read_as_printed():
    assert stands("73.2", {0.7321}) and stands("2,387", {2387.0}) and not stands("73.2", {0.7351}) and not stands("0.13", {0.1361})
