"""Hostile tokens in outputs, alt texts and charts of a small site: shown as text, nothing runs."""

import shutil

import nbformat
import pytest
from browsing import ROOT, open_page
from site_pages import render, stage

from annotated import charts

OWN = "window.owned = true"
TAG = f"<script>{OWN}</script>"
TOKENS = [
    f"</script>{TAG}", f'"><img src=x onerror="{OWN}">', f"'><svg onload={OWN}>",
    f"javascript:{OWN}", f"<!--<script>{OWN}", f"--></article>{TAG}", f"]]>{TAG}", f"`${{{OWN}}}`",
    "\u202eright to left\u202c", "null\0byte", "&lt;b&gt;"]
PIXEL = ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5E"
         "rkJggg==")


def hostile_notebook(path, html):
    """A page whose outputs, alt text and chart are the tokens; with `html`, HTML with scripts."""
    v4, text = nbformat.v4, "\n".join(TOKENS)
    layers = {TOKENS[1]: [[[1 / len(TOKENS)] * len(TOKENS)] * len(TOKENS)] * 2}
    chart = charts.attention_explorer(layers, TOKENS, TOKENS, title=TOKENS[0]).to_dict()
    chart = {"application/vnd.vegalite.v5+json": chart, "image/png": PIXEL}
    data = [{"text/plain": text}, {"image/png": PIXEL}, chart]
    data += [{"text/html": token} for token in TOKENS if html]
    shown = [v4.new_output("display_data", item) for item in data]
    outputs = [v4.new_output("stream", text=text), *shown]
    source = f"# alt: {' '.join(TOKENS)}\nshow()"
    cell = v4.new_code_cell(source, execution_count=1, outputs=outputs)
    cells = [v4.new_markdown_cell("# Hostile\n\n> Tokens."), cell]
    python = {"language_info": {"name": "python"}}
    nbformat.write(v4.new_notebook(cells=cells, metadata=python), path)


@pytest.fixture(scope="module")
def hostile_site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    source = folder / "source"
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("*.md"))
    (source / "index.md").write_text("# Site\n\n```{toctree}\n01_text\n02_html\n```\n")
    for name, html in (("01_text", False), ("02_html", True)):
        hostile_notebook(folder / f"{name}.ipynb", html)
        stage(folder / f"{name}.ipynb", source)
    render(source, folder / "site")
    return folder / "site"


@pytest.mark.parametrize("name", ["01_text.html", "02_html.html"])
def test_hostile_tokens_are_shown_and_run_nothing(hostile_site, browser, serve, name):
    page = open_page(browser, serve(hostile_site), name)
    figure = page.query_selector("figure.chart")
    figure.query_selector_all("select")[-1].select_option(index=1)
    figure.query_selector("summary").click()
    figure.wait_for_selector(".chart-table td")
    bars = figure.query_selector_all(".chart-live .mark-rect path")
    assert len(bars) >= len(TOKENS)
    for bar in bars[:4]:
        bar.hover()
        bar.click(force=True)
    page.wait_for_timeout(300)
    assert page.evaluate("() => window.owned") is None and page.url.endswith(name)
    cells = figure.query_selector_all(".chart-table tbody tr td:nth-child(6)")[: len(TOKENS)]
    assert [cell.text_content().replace("␀", "\0") for cell in cells] == TOKENS
    if name == "01_text.html":  # nothing even tries; in the other the policy stops it, and says so
        assert TOKENS[0] in page.inner_text(".output.stream") and page.mistakes == []
    page.close()
