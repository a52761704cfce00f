"""Turn stored notebooks into sources for Sphinx, and its HTML into pages that run no script but the
book's own.
"""

import base64
import csv
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
from functools import cache

import nbformat
import PIL.Image
import vl_convert
from ledger import claim_of

from annotated import charts
from notebooks import ROOT, folded, module_of, page_tests, pages, role

VEGA_LITE = "application/vnd.vegalite.v5+json"
DIRECTIVES = re.compile(r"^#\|.*\n?", re.MULTILINE)
ALT = re.compile(r"^# alt: (.*)\n?", re.MULTILINE)
# greedy: an output that closes it early does not get out
ARTICLE = re.compile("<article.*</article>", re.DOTALL)
SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>(.*?)</script>",
                    re.DOTALL)
TO_CELL = re.compile(r"\]\([\w.]+\.ipynb#cell-id=(\w+)\)")
TO_TEST = re.compile(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)")
ROWS_SHOWN = 100
FIGURE = """<figure class="chart" id="{name}">
<img class="chart-still" src="_static/charts/{name}.png" alt="{alt}">
<script type="application/json">{spec}</script>
{numbers}
</figure>"""
TABLE = """<details class="chart-data"><summary>Data of this chart</summary><p>{count}.
<a href="_static/charts/{name}.csv" download>Download {total} rows as CSV</a></p>
<div class="chart-table" tabindex="0" role="region" aria-label="Data of the chart {name}">
<table class="table"><thead>{head}</thead><tbody>{body}</tbody></table></div></details>"""


def picture_table(png):
    """(header, rows, how many there were) of the numbers that a picture of the book's charts
    carries in its text, or None.
    """
    notes = PIL.Image.open(io.BytesIO(png)).text
    if "Table" not in notes:
        return None
    header, *rows = csv.reader(io.StringIO(notes["Table"]))
    return header, rows, notes.get("Table-Rows", f"{len(rows)} of {len(rows)}").split()[-1]


def numbers(table, name, folder):
    """The folded HTML table behind a chart, with a CSV file of it in the site."""
    header, rows, total = table
    files = folder / "_static" / "charts"
    files.mkdir(parents=True, exist_ok=True)
    with open(files / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])

    def line(cells, tag):
        texts = (html.escape(str(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag.split()[0]}>' for text in texts)}</tr>"

    shown = rows[:ROWS_SHOWN]
    count = f"{len(shown)} of {total} rows" if len(shown) < int(total) else f"{total} rows"
    head, body = line(header, 'th scope="col"'), "".join(line(row, "td") for row in shown)
    return TABLE.format(name=name, count=count, total=len(rows), head=head, body=body)


def chart(output, name, alt, folder):
    """The HTML of an Altair output: its picture, which is also what is printed, the chart for
    charts.js, and its numbers.
    """
    pictures = folder / "_static" / "charts"
    pictures.mkdir(parents=True, exist_ok=True)
    (pictures / f"{name}.png").write_bytes(base64.b64decode(output.data["image/png"]))
    spec = output.data[VEGA_LITE]
    header, rows = charts.table(spec)
    text = json.dumps(spec, separators=(",", ":")).replace("<", r"\u003c")
    behind = numbers((header, rows, len(rows)), name, folder)
    return FIGURE.format(name=name, alt=html.escape(alt.replace("\0", "")), spec=text,
                         numbers=behind)


@cache
def tested_modules():
    """{file of tests, below the root: the module of a page that it tests}."""
    return {str(page_tests(path)): module for path in pages() if (module := module_of(path))}


def relink(text):
    """Markdown whose links to cells and tests lead to where the site has them."""
    def test(match):
        module = modules.get(match[2])
        return (f"[{match[1]}](api/{module}.md#tests)" if module
                else f"{{download}}`{match[1]} <{match[2]}>`")

    modules = tested_modules()
    return TO_TEST.sub(test, TO_CELL.sub(r"](#cell-\1)", text)).replace("](../docs/", "](")


def label(cell, section):
    """What a reader may know of a code cell before reading it: (tags, which give it its look, and
    the words on what is folded).
    """
    what, tags = role(cell), cell.metadata.get("tags", [])
    names = ", ".join(re.findall(r"^(?:class|def) (\w+)", cell.source, re.MULTILINE))
    words = {"imports": "Imports and settings", "drawing": "Code of this picture",
             "library": f"Library code: {names}" if names else "Library code: constants"}.get(what)
    if "hide-cell" in tags:
        return tags, "Solution" if section == "Exercises" else "Code and output"
    return [*tags, *([what] if what else []), *(["hide-input"] if folded(cell) else [])], words


def stage(path, folder, below_title=""):
    """Write the notebook `path` into `folder` as Sphinx is to read it.

    `below_title` is Markdown that goes below its title.
    """
    notebook, cells, section = nbformat.read(path, as_version=4), [], ""
    notebook.cells = [cell for cell in notebook.cells if DIRECTIVES.sub("", cell.source).strip()]
    for cell in notebook.cells:
        if claim_of(cell):  # something to link to
            cells.append(nbformat.v4.new_markdown_cell(f"(cell-{cell.id})="))
        cells.append(cell)
        if cell.cell_type != "code":
            cell.source = relink(cell.source)
            section = (re.findall(r"^## (.*)", cell.source, re.MULTILINE) or [section])[-1]
            continue
        cell.metadata["tags"], words = label(cell, section)
        prompts = {"code_prompt_show": words, "code_prompt_hide": words} if words else {}
        alt, outputs = ALT.search(cell.source), []
        cell.metadata["mystnb"] = {**prompts, **({"image": {"alt": alt[1]}} if alt else {})}
        for k, output in enumerate(cell.outputs):
            name, data = f"{path.stem}-{cell.execution_count}-{k}", output.get("data", {})
            if VEGA_LITE in data:
                outputs.append(as_html(chart(output, name, alt[1] if alt else "A chart.", folder)))
                continue
            if "text/markdown" in data:
                data["text/markdown"] = relink(data["text/markdown"])
            outputs.append(output)
            if "image/png" in data:
                table = picture_table(base64.b64decode(data["image/png"]))
                outputs += [as_html(numbers(table, name, folder))] if table else []
        cell.outputs = outputs
        cell.source = ALT.sub("", DIRECTIVES.sub("", cell.source))
    if below_title:
        notebook.cells[0].source += f"\n\n{below_title}\n"
    notebook.cells = cells
    nbformat.write(notebook, folder / path.name)


def as_html(text):
    """An output of a cell that is this HTML."""
    return nbformat.v4.new_output("display_data", {"text/html": text})


def policy(page):
    """Return the HTML `page` with a content security policy: of the inline scripts those run that
    the theme wrote.

    What a notebook shows stands in the article, so that a script smuggled into an output is never
    named.
    """
    codes = SCRIPT.findall(ARTICLE.sub("", page))
    digests = {base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
               for code in codes if code}
    scripts = "".join(f" 'sha256-{digest}'" for digest in sorted(digests))
    rules = ("default-src 'none'; "
             f"script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
             "font-src 'self'; connect-src 'self'; worker-src 'self'; object-src 'none'; "
             "base-uri 'self'; form-action 'self'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    return page.replace("<head>", f"<head>\n{meta}", 1)


def name_controls(page):
    """Give names to what the themes leave nameless for readers who cannot see it."""
    page = page.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    return page.replace('<summary><span class="toctree-toggle"',
                        '<summary aria-label="More pages"><span class="toctree-toggle"')


def render(source, site):
    """Run Sphinx on the folder `source`.

    The pages in `site` get their policy, and Vega a scope of its own.
    """
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version="6.1")
    (source / "_static" / "vega.js").write_text(f"(() => {{\n{vega}\n}})();\n")
    doctrees, processes = source.parent / f"{source.name}.doctrees", str(os.cpu_count() or 1)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-j",
               processes, "-d", doctrees]
    subprocess.run([*command, source, site], check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    for path in site.rglob("*.html"):
        if "_static" not in path.parts:
            path.write_text(policy(name_controls(path.read_text())))
