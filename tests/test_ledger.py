"""The ledger of claims is whole, says what the pages and tests say, and notices every gap."""

import re
import sys

import nbformat
import pytest
from helpers import cells

sys.path.insert(0, "tools")
from ledger import Incomplete, Part, markdown, read, summary  # noqa: E402
from site_pages import relink  # noqa: E402

from notebooks import NOTEBOOKS, ROOT, pages  # noqa: E402

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
figure = ["C2:"]
"""
EXACT = ("# C1: the order is as printed\nassert moved == 0", "moved   by 0.00\nand more\n")
MEASURED = ("#| hide\n# alt: a picture\n# C2 (measured): it helps", "C2: 3 instead of 2, holds\n")
TESTS = "def test_c1_order():\n    assert True\n\n\nclass TestMore:\n    def test_c2_helps(self):\n        assert True\n"


def book(folder, cells=(EXACT, MEASURED), tests=TESTS, table=TABLE):
    """Write a book of one page into a folder; returns the arguments with which `read` reads it."""
    made = []
    for source, text in cells:
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        made.append(nbformat.v4.new_code_cell(source, execution_count=len(made) + 1, outputs=outputs))
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / "01_page.ipynb")
    (folder / "test_page.py").write_text(tests)
    (folder / "claims.toml").write_text(table)
    return [folder / "01_page.ipynb"], folder, folder / "claims.toml"


def test_a_whole_ledger_says_what_was_printed(tmp_path):
    exact, measured = read(*book(tmp_path))
    assert (exact.claim, exact.section, exact.kind) == ("C1", "3.1", "asserted") and measured.kind == "measured"
    assert exact.parts == [Part("as printed", "asserted", ["moved by 0.00"], "asserted")]
    assert measured.parts == [Part("helps", "measured", ["C2: 3 instead of 2, holds"], "holds")]
    assert [test for _, test in measured.tests] == ["test_c2_helps"] and [cell.number for cell in measured.cells] == [2]
    assert summary([exact, measured]) == "2 claims: 1 asserted, 1 measured, 0 with a part of each."


@pytest.mark.parametrize("cells, tests, table, gap", [
    ([EXACT], TESTS, TABLE, "C2: no cell begins with `# C2: …`"),
    ([EXACT, ("x = 1\n# C2: not in the first line", "3 instead of 2")], TESTS, TABLE, "C2: no cell begins with"),
    ([EXACT, (MEASURED[0], "")], TESTS, TABLE, "C2: no output of its cells (01_page.ipynb) has a line with 'C2:'"),
    ([(EXACT[0], "moved on 0.00"), MEASURED], TESTS, TABLE, "C1: no output of its cells (01_page.ipynb) has a line with 'moved by'"),
    ([EXACT, (MEASURED[0], "C2: 3 instead of 2\nholds")], TESTS, TABLE, "C2: no line of its figure says whether it holds: helps"),
    ([EXACT, MEASURED], TESTS.replace("test_c2_", "test_second_"), TABLE, "C2: no test is called `test_c2_…`"),
    ([EXACT, MEASURED], TESTS.replace("test_c1_", "old_test_c1_"), TABLE, "C1: no test is called `test_c1_…`"),
    ([EXACT, MEASURED], TESTS.replace("test_c1_", "test_c11_"), TABLE, "C11: test_c11_order checks it, claims.toml does not list it"),
    ([("# C1: it is", "moved by 0"), MEASURED], TESTS, TABLE, "C1: no line of its figure says whether it holds: as printed"),
    ([EXACT, MEASURED, ("x = 1", "row E, for C2, does not")], TESTS, TABLE,
     "C2: 01_page.ipynb, cell 3 prints 'row E, for C2, does not', which no part of it shows"),
    ([EXACT, MEASURED, ("# C3: more", "")], TESTS, TABLE, "C3: 01_page.ipynb checks it, claims.toml does not list it"),
    ([EXACT, MEASURED], TESTS, TABLE.replace("C1", "C3"), "claims.toml does not list the claims from C1 on"),
])  # fmt: skip
def test_every_gap_is_an_error_that_names_it(tmp_path, cells, tests, table, gap):
    with pytest.raises(Incomplete, match=re.escape(gap)):
        read(*book(tmp_path, cells, tests, table))


@pytest.mark.parametrize("line", ["moved by 3, which does not", "moved by 1: within noise", "moved by 2: partly"])
def test_an_asserted_part_that_prints_another_verdict_is_an_error(tmp_path, line):
    with pytest.raises(Incomplete, match="C1: its cells assert it, and print"):
        read(*book(tmp_path, [(EXACT[0], line), MEASURED]))
    assert read(*book(tmp_path, [(EXACT[0].replace("C1:", "C1 (measured):"), line), MEASURED]))[0].kind == "measured"


@pytest.mark.parametrize("text, verdict", [
    ("C2: holds", "holds"),
    ("C2: a mean above 1 does not hold", "does not"),
    ("C2: it fails here", "does not"),
    ("C2: 1 holds\nC2: 2 holds", "holds"),
    ("C2: row A holds\nC2: row B within noise\nC2: row C does not\nC2: row D holds", "holds: 2, within noise: 1, does not: 1"),
    ("C2: {'holds': 8, 'within noise': 3} by BLEU, holds: 2 by loss", "holds: 10, within noise: 3"),
])  # fmt: skip
def test_the_verdict_comes_from_the_printed_lines(tmp_path, text, verdict):
    assert read(*book(tmp_path, [EXACT, (MEASURED[0], text)]))[1].parts[0].verdict == verdict


def test_a_claim_of_two_parts_has_a_verdict_for_each(tmp_path):
    table = TABLE + '[[C2.part]]\nsays = "by construction"\nfigure = ["exactly"]\n'
    paths, *rest = book(tmp_path, [EXACT, MEASURED, ("# C2: exact\nassert x == 0", "exactly 0")], table=table)
    row = read(paths, *rest)[1]
    assert [part[1::2] for part in row.parts] == [("measured", "holds"), ("asserted", "asserted")] and row.kind == "both"
    shown = "**holds** · helps<br>`C2: 3 instead of 2, holds`<br>**asserted** · by construction<br>`exactly 0`"
    assert shown in markdown([row]) and summary([row]).endswith("1 with a part of each.")


def test_links_lead_to_cells_and_tests_in_the_checkout_and_on_the_site(tmp_path):
    paths, *rest = book(tmp_path, [(EXACT[0], "moved by `a | b`"), MEASURED])
    (tmp_path / "test_page.py").rename(tmp_path / "test_masking.py")
    cell = cells(paths[0])[0].id
    text = markdown(read(paths, *rest))
    assert f"[page 01, cell 1](01_page.ipynb#cell-id={cell})" in text and "[test_c1_order](../tests/test_masking.py)" in text
    assert r"`moved by 'a \| b'`" in text and len({line.replace(r"\|", "").count("|") for line in text.split("\n")}) == 1
    site = relink(text)
    assert f"[page 01, cell 1](#cell-{cell})" in site and "[test_c1_order](api/masking.md#tests)" in site
    other = relink("[test_c31_heads](../tests/test_reading_attention.py)")
    assert other == "{download}`test_c31_heads <tests/test_reading_attention.py>`"


@pytest.fixture(scope="module")
def rows():
    return read(pages())


def test_the_ledger_of_the_book_lists_31_of_31(rows):
    assert [row.claim for row in rows] == [f"C{n}" for n in range(1, 32)]
    for row in rows:
        assert row.cells and row.tests and row.parts and row.says.endswith(".")
        assert all(part.figures and part.verdict for part in row.parts)


@pytest.mark.parametrize("claim", ["C6", "C17", "C19", "C20", "C25", "C27", "C29", "C30", "C31"])
def test_no_claim_about_what_training_or_time_brings_is_wholly_asserted(rows, claim):
    """These the paper found by running something: an assertion could only repeat what one run showed."""
    assert next(row.kind for row in rows if row.claim == claim) in ("measured", "both")


def test_the_introduction_shows_the_ledger_of_the_pages_as_they_are_stored(rows):
    outputs = [output for cell in cells(pages()[0]) for output in cell.get("outputs", [])]
    shown = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert shown == [markdown(rows)], "run `make sync PAGES=00`"
    for page, cell in re.findall(r"\]\((\w+\.ipynb)#cell-id=(\w+)\)", shown[0]):
        assert cell in {c.id for c in cells(NOTEBOOKS / page)}
    for test, file in re.findall(r"\[(test_\w+)\]\(\.\./(tests/test_\w+\.py)\)", shown[0]):
        assert f"def {test}(" in (ROOT / file).read_text()
