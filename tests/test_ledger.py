"""The ledger of claims is whole, says what the pages and tests say, and notices every gap."""

import re

import nbformat
import pytest
from helpers import cells
from ledger import Incomplete, document, markdown, read
from site_pages import relink

from notebooks import NOTEBOOKS, ROOT, module_of, page_tests, pages

TABLE = """
[C1]
section = "3.1"
says = "The order is as printed."
[[C1.part]]
says = "as printed"
figure = ["moved by"]
[C2]
section = "5.4"
says = "It helps."
[[C2.part]]
says = "helps"
figure = ["C2:"]"""
EXACT = ("# C1: as printed\nfrom annotated import moved\nassert moved == 0", "moved   by 0\nand\n")
MEASURED = ("#| hide\n# alt: a picture\n# C2 (measured): it helps", "C2: 3 instead of 2, holds\n")
TESTS = "def test_c1_order(): assert moved\n\nclass A:\n    def test_c2_helps(self): assert x\n"


def book(folder, cells=(EXACT, MEASURED), tests=TESTS, table=TABLE):
    """Write a book of one page into a folder; returns the arguments with which `read` reads it."""
    made = [nbformat.v4.new_code_cell(source, execution_count=count, outputs=[
        nbformat.v4.new_output("stream", text=text)] if text else [])
        for count, (source, text) in enumerate(cells, 1)]
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / "01_page.ipynb")
    (folder / "test_page.py").write_text(tests)
    (folder / "claims.toml").write_text(table)
    return [folder / "01_page.ipynb"], folder, folder / "claims.toml"


@pytest.mark.parametrize("cells, tests, table, gap", [
    ([EXACT, ("x = 1\n# C2: not in the first line", "3 instead of 2")], TESTS, TABLE,
     "C2: no cell begins with `# C2: …`"),
    ([EXACT, (MEASURED[0], "")], TESTS, TABLE,
     "C2: no output of its cells (01_page.ipynb) has a line with 'C2:'"),
    ([(EXACT[0].replace("== 0", "== moved"), EXACT[1]), MEASURED], TESTS, TABLE,
     "C1: no line of its figure says whether it holds: as printed"),
    ([(EXACT[0].replace("from annotated import moved", "moved = 0"), EXACT[1]), MEASURED], TESTS,
     TABLE, "C1: no line of its figure says whether it holds: as printed"),
    ([EXACT, MEASURED], TESTS.replace("assert moved", "pass"), TABLE,
     "C1: no test that can fail is called `test_c1_…`"),
    ([EXACT, (MEASURED[0], "C2: 3 instead of 2\nholds")], TESTS, TABLE,
     "C2: no line of its figure says whether it holds: helps"),
    ([EXACT, MEASURED], TESTS.replace("test_c1_", "test_c11_"), TABLE,
     "C11: test_c11_order checks it, claims.toml does not list it"),
    ([EXACT, MEASURED, ("x = 1", "row E, for C2, does not")], TESTS, TABLE,
     "C2: 01_page.ipynb, cell 3 prints 'row E, for C2, does not', which no part of it shows"),
    ([EXACT, MEASURED], TESTS, TABLE.replace("C1", "C3"),
     "claims.toml does not list the claims from C1 on")])
def test_every_gap_is_an_error_that_names_it(tmp_path, cells, tests, table, gap):
    with pytest.raises(Incomplete, match=re.escape(gap)):
        read(*book(tmp_path, cells, tests, table))


@pytest.mark.parametrize("line", ["moved by 3, which does not", "moved by 1: within noise"])
def test_an_asserted_part_that_prints_another_verdict_is_an_error(tmp_path, line):
    with pytest.raises(Incomplete, match="C1: its cells assert it, and print"):
        read(*book(tmp_path, [(EXACT[0], line), MEASURED]))
    honest = EXACT[0].replace("C1:", "C1 (measured):"), line
    assert read(*book(tmp_path, [honest, MEASURED]))[0].kind == "measured"


@pytest.mark.parametrize("text, verdict", [
    ("C2: a mean above 1 does not hold", "does not"), ("C2: 1 holds\nC2: 2 holds", "holds"),
    ("C2: A holds\nC2: B within noise\nC2: C does not\nC2: D holds",
     "holds: 2, within noise: 1, does not: 1"),
    ("C2: {'holds': 8, 'within noise': 3} by BLEU, holds: 2 by loss", "holds: 10, within noise: 3"),
])
def test_the_verdict_comes_from_the_printed_lines(tmp_path, text, verdict):
    assert read(*book(tmp_path, [EXACT, (MEASURED[0], text)]))[1].parts[0].verdict == verdict


def test_what_is_printed_cannot_break_the_table_and_links_lead_on_in_the_site_too(tmp_path):
    paths, *rest = book(tmp_path, [(EXACT[0], "moved by `a | b`"), MEASURED])
    text, cell = markdown(read(paths, *rest)), cells(paths[0])[0].id
    assert r"`moved by 'a \| b'`" in text
    assert len({line.replace(r"\|", "").count("|") for line in text.split("\n")}) == 1
    assert f"[page 01, cell 1](#cell-{cell})" in relink(text)
    (page,) = pages(["06"])
    assert relink(f"[t](../{page_tests(page)})") == f"[t](api/{module_of(page)}.md#tests)"
    assert relink("[t](../tests/test_x.py)") == "{download}`t <tests/test_x.py>`"


@pytest.fixture(scope="module")
def rows():
    return read(pages())


def test_the_ledger_of_the_book_lists_31_of_31(rows):
    assert [row.claim for row in rows] == [f"C{n}" for n in range(1, 32)]
    assert all(row.says.endswith(".") and all(part.figures for part in row.parts) for row in rows)


def test_no_claim_about_what_training_or_time_brings_is_wholly_asserted(rows):
    """These the paper found by running something: an assertion could only repeat one run."""
    found = {"C6", "C17", "C19", "C20", "C25", "C27", "C29", "C30", "C31"}
    assert not found & {row.claim for row in rows if row.kind == "asserted"}


def test_the_introduction_shows_the_ledger_of_the_pages_as_they_are_stored(rows):
    outputs = [output for cell in cells(pages()[0]) for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    shown = [one["text/markdown"] for one in data if "text/markdown" in one]
    assert shown == [document(rows)], "run `make sync PAGES=00`"
    for page, cell in re.findall(r"\]\((\w+\.ipynb)#cell-id=(\w+)\)", shown[0]):
        assert cell in {c.id for c in cells(NOTEBOOKS / page)}
    for test, file in re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", shown[0]):
        assert f"def {test}(" in (ROOT / file).read_text()
