"""What the site says beside the pages is read from the notebooks and tests, and its pages name the scripts that may run."""

import json
import sys

import nbformat
import pytest

sys.path.insert(0, "tools")
import site_reference  # noqa: E402
from site_pages import VEGA_LITE, policy, stage  # noqa: E402

from annotated import charts  # noqa: E402
from notebooks import PACKAGE, pages  # noqa: E402


@pytest.mark.parametrize("text, expected", [
    ("Section 3.5 of the paper.", ["3.5"]),
    ("Sections 3.2.2 and 3.2.3 of the paper", ["3.2.2", "3.2.3"]),
    ("Sections 5.1 to 5.4 of the paper, and above all 5.2", ["5.1", "5.2", "5.3", "5.4"]),
    ("(section 5.2), and again (section 6.1): twenty", ["5.2", "6.1"]),
    ("This section has 8 heads.", []),
])  # fmt: skip
def test_sections_are_read_from_a_sentence(text, expected):
    assert site_reference.sections(text) == expected


def test_pages_know_their_sections_modules_and_tests():
    found = {path.name[:2]: site_reference.Page(path) for path in pages()}
    assert found["02"].sections == ["3.2.2", "3.2.3"] and found["02"].module == "multi_head"
    assert found["18"].sections == ["6.1"] and found["18"].tests.name == "test_decoding.py"
    assert all(page.sections for number, page in found.items() if "01" <= number <= "19")


def test_every_module_has_a_page_and_every_page_a_row():
    found = [site_reference.Page(path) for path in pages()]
    assert {page.module for page in found if page.module} == {path.stem for path in PACKAGE.glob("[!_]*.py")}
    rows = site_reference.sections_page(found).split("\n")
    for page in found:
        assert any(f"]({page.path.name})" in row and (not page.module or f"annotated.{page.module}]" in row) for row in rows)


def test_policy_names_the_scripts_of_the_theme_and_none_of_an_output():
    page = "<html><head><script>theme()</script></head><body><article>{}</article><script>search()</script></body></html>"
    named = policy(page.format("")).partition("script-src ")[2].partition(";")[0]
    assert named.count("'sha256-") == 2 and "unsafe" not in named
    for output in ("<script>owned()</script>", "</article><script>owned()</script><article>", "</article><script>owned()</script>"):
        assert policy(page.format(output)).partition("script-src ")[2].partition(";")[0] == named


def test_a_cell_that_checks_a_claim_can_be_linked_to(tmp_path):
    table = nbformat.v4.new_output("display_data", {"text/markdown": "[here](01_page.ipynb#cell-id=abc) and [there](01_page.ipynb)"})
    cells = [nbformat.v4.new_markdown_cell("# Page"), nbformat.v4.new_code_cell("# C4: it is\n1", id="abc", outputs=[table]),
             nbformat.v4.new_code_cell("1\n# C4: only mentioned")]  # fmt: skip
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_page.ipynb")
    (tmp_path / "staged").mkdir()
    stage(tmp_path / "01_page.ipynb", tmp_path / "staged")
    staged = nbformat.read(tmp_path / "staged" / "01_page.ipynb", as_version=4).cells
    assert [cell.source for cell in staged] == ["# Page", "(cell-abc)=", "# C4: it is\n1", "1\n# C4: only mentioned"]
    assert staged[2].outputs[0].data["text/markdown"] == "[here](#cell-abc) and [there](01_page.ipynb)"


def test_a_chart_becomes_a_picture_and_data_that_cannot_end_its_script(tmp_path):
    spec = charts.attention_explorer({"layer": [[[0.5, 0.5]]]}, ["</script><script>", "a"], ["b"]).to_dict()
    output = nbformat.v4.new_output("display_data", {VEGA_LITE: spec, "image/png": "iVBORw0KGgo="})
    cell = nbformat.v4.new_code_cell('# alt: A "bar" <chart>.\nshow()', execution_count=1, outputs=[output])
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Page"), cell]), tmp_path / "01_page.ipynb")
    (tmp_path / "staged").mkdir()
    stage(tmp_path / "01_page.ipynb", tmp_path / "staged", "below")
    title, cell = nbformat.read(tmp_path / "staged" / "01_page.ipynb", as_version=4).cells
    figure = cell.outputs[0].data["text/html"]
    assert title.source == "# Page\n\nbelow\n" and cell.source == "show()"
    assert (tmp_path / "staged" / "_static" / "charts" / "01_page-1-0.png").read_bytes().startswith(b"\x89PNG")
    assert 'alt="A &quot;bar&quot; &lt;chart&gt;."' in figure and figure.count("</script>") == 1
    assert "<td>&lt;/script&gt;&lt;script&gt;</td>" in figure
    assert (tmp_path / "staged" / "_static" / "charts" / "01_page-1-0.csv").read_text().count("</script><script>") == 1
    assert json.loads(figure.partition('json">')[2].partition("</script>")[0]) == spec
