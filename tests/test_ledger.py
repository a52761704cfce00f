"""The ledger of claims is whole, says what the pages and tests say, and notices every gap."""

import re
import sys

import nbformat
import pytest

sys.path.insert(0, "tools")
import ledger  # noqa: E402
from ledger import Incomplete, markdown, read, summary  # noqa: E402
from site_pages import relink  # noqa: E402

from notebooks import NOTEBOOKS, ROOT, pages  # noqa: E402

TABLE = """
[C1]
section = "3.1"
says = "The order is as printed."
kind = "asserted"
figure = ["moved by"]

[C2]
section = "5.4"
says = "It helps."
kind = "measured"
figure = ["C2:"]
"""
EXACT = ("# C1: the order is as printed\nassert True", "moved   by 0.00\nand more\n")
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
    assert (exact.claim, exact.section, exact.figures, exact.verdict) == ("C1", "3.1", ["moved by 0.00"], "holds: asserted")
    assert (measured.figures, measured.verdict) == (["C2: 3 instead of 2, holds"], "holds")
    assert [test for _, test in measured.tests] == ["test_c2_helps"] and [cell.number for cell in measured.cells] == [2]
    assert summary([exact, measured]) == "2 claims: 1 asserted, 1 measured, 0 with a part of each."


@pytest.mark.parametrize("cells, tests, table, gap", [
    ([EXACT], TESTS, TABLE, "C2: no cell begins with `# C2: …`"),
    ([EXACT, ("x = 1\n# C2: not in the first line", MEASURED[1])], TESTS, TABLE, "C2: no cell begins with"),
    ([EXACT, (MEASURED[0], "")], TESTS, TABLE, "C2: no output of its cells (01_page.ipynb) has a line with 'C2:'"),
    ([(EXACT[0], "moved on 0.00"), MEASURED], TESTS, TABLE, "C1: no output of its cells (01_page.ipynb) has a line with 'moved by'"),
    ([EXACT, (MEASURED[0], "C2: 3 instead of 2\nholds")], TESTS, TABLE, "C2: no line of its figure says whether it holds"),
    ([("# C1: it is", "moved by 0"), MEASURED], TESTS, TABLE, "C1: none of its cells asserts anything"),
    ([("# C1: it is\nprint('assert')", "moved by 0"), MEASURED], TESTS, TABLE, "C1: none of its cells asserts anything"),
    ([EXACT, MEASURED], TESTS.replace("test_c2_", "test_second_"), TABLE, "C2: no test is called `test_c2_…`"),
    ([EXACT, MEASURED], TESTS.replace("test_c1_", "old_test_c1_"), TABLE, "C1: no test is called `test_c1_…`"),
    ([EXACT, MEASURED], TESTS.replace("test_c1_", "test_c11_"), TABLE, "C11: test_c11_order checks it, claims.toml does not list it"),
    ([EXACT, MEASURED, ("# C3: more", "")], TESTS, TABLE, "C3: 01_page.ipynb checks it, claims.toml does not list it"),
    ([EXACT, MEASURED], TESTS, TABLE.replace("[C1]", "[C3]"), "claims.toml does not list the claims from C1 on"),
])  # fmt: skip
def test_every_gap_is_an_error_that_names_it(tmp_path, cells, tests, table, gap):
    with pytest.raises(Incomplete, match=re.escape(gap)):
        read(*book(tmp_path, cells, tests, table))


@pytest.mark.parametrize("text, verdict", [
    ("C2: holds", "holds"),
    ("C2: a mean above 1 does not hold", "does not"),
    ("C2: it fails here", "does not"),
    ("C2: 1 holds\nC2: 2 holds", "holds"),
    ("C2: row A holds\nC2: row B within noise\nC2: row C does not\nC2: row D holds", "holds: 2, within noise: 1, does not: 1"),
    ("C2: {'holds': 8, 'within noise': 3} by BLEU, holds: 2 by loss", "holds: 10, within noise: 3"),
])  # fmt: skip
def test_the_verdict_comes_from_the_printed_lines(tmp_path, text, verdict):
    assert read(*book(tmp_path, [EXACT, (MEASURED[0], text)]))[1].verdict == verdict
    both = TABLE.replace('"measured"', '"both"')
    with pytest.raises(Incomplete, match="C2: none of its cells asserts anything"):
        read(*book(tmp_path, [EXACT, (MEASURED[0], text)], table=both))
    row = read(*book(tmp_path, [EXACT, (MEASURED[0] + "\nassert True", text)], table=both))[1]
    assert row.verdict == f"holds: asserted; measured: {verdict}"


def test_links_lead_to_cells_and_tests_in_the_checkout_and_on_the_site(tmp_path):
    paths, *rest = book(tmp_path, [(EXACT[0], "moved by `a | b`"), MEASURED])
    (tmp_path / "test_page.py").rename(tmp_path / "test_masking.py")
    cell = nbformat.read(paths[0], as_version=4).cells[0].id
    text = markdown(read(paths, *rest))
    assert f"[page 01, cell 1](01_page.ipynb#cell-id={cell})" in text and "[test_c1_order](../tests/test_masking.py)" in text
    assert r"`moved by 'a \| b'`" in text and len({line.replace(r"\|", "").count("|") for line in text.split("\n")}) == 1
    site = relink(text)
    assert f"[page 01, cell 1](#cell-{cell})" in site and "[test_c1_order](api/masking.md#tests)" in site
    other = relink("[test_c31_heads](../tests/test_reading_attention.py)")
    assert other == "{download}`test_c31_heads <tests/test_reading_attention.py>`"


def test_executed_pages_take_the_place_of_stored_ones(tmp_path):
    (tmp_path / pages()[3].name).write_text("")
    assert ledger.stored() == pages()
    assert ledger.stored(tmp_path) == [*pages()[:3], tmp_path / pages()[3].name, *pages()[4:]]


def test_the_ledger_of_the_book_lists_31_of_31():
    rows = read(pages())
    assert [row.claim for row in rows] == [f"C{n}" for n in range(1, 32)]
    for row in rows:
        assert row.cells and row.tests and row.figures and row.verdict and row.says.endswith(".")
    assert {row.claim for row in rows if row.kind != "asserted"} == {"C6", "C19", "C20", "C25", "C27", "C29", "C31"}


def test_the_introduction_shows_the_ledger_of_the_pages_as_they_are_stored():
    outputs = [output for cell in nbformat.read(pages()[0], as_version=4).cells for output in cell.get("outputs", [])]
    shown = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert shown == [markdown(read(pages()))], "run `make sync PAGES=00`"
    for page, cell in re.findall(r"\]\((\w+\.ipynb)#cell-id=(\w+)\)", shown[0]):
        assert cell in {c.id for c in nbformat.read(NOTEBOOKS / page, as_version=4).cells}
    for test, file in re.findall(r"\[(test_\w+)\]\(\.\./(tests/test_\w+\.py)\)", shown[0]):
        assert f"def {test}(" in (ROOT / file).read_text()
