"""Turn stored notebooks into sources for Sphinx, and its HTML into pages that run only the book's
own scripts.
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
from ledger import FIRST_LINE

from annotated import charts
from notebooks import ROOT, folded, module_of, page_tests, pages, role

VEGA_LITE = "application/vnd.vegalite.v5+json"
DIRECTIVES = re.compile(r"^#\|.*\n?", re.MULTILINE)
ALT = re.compile(r"^# alt: (.*)\n?", re.MULTILINE)
# up to the last end tag: an output that closes the article early stays within
ARTICLE = re.compile("<article.*</article>", re.DOTALL)
SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>(.*?)</script>",
                    re.DOTALL)
TO_CELL = re.compile(r"\]\([\w.]+\.ipynb#cell-id=(\w+)\)")
TO_TEST = re.compile(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)")
ROWS_SHOWN = 100
FIGURE = """<figure class="chart" id="{name}">
<img class="chart-still" src="_static/charts/{name}.png" alt="{alt}">
<script type="application/json">{spec}</script>
{data}
</figure>"""
TABLE = """<details class="chart-data"><summary>Data of this chart</summary><p>{count}.
<a href="_static/charts/{name}.csv" download>Download {total} rows as CSV</a></p>
<div class="chart-table" tabindex="0" role="region" aria-label="Data of the chart {name}">
<table class="table"><thead>{head}</thead><tbody>{body}</tbody></table></div></details>"""


def picture_table(png):
    """Return (header, rows, number of rows in all) of the data that the book's charts store in the
    text of a picture, or None.
    """
    text = PIL.Image.open(io.BytesIO(png)).text
    if "Table" not in text:
        return None
    header, *rows = csv.reader(io.StringIO(text["Table"]))
    return header, rows, text.get("Table-Rows", f"{len(rows)} of {len(rows)}").split()[-1]


def data_table(table, name, folder):
    """Return the collapsed HTML table with the data of a chart, and write it as a CSV file."""
    header, rows, total = table
    with open(folder / f"_static/charts/{name}.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])

    def line(cells, tag):
        texts = (html.escape(str(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag.split()[0]}>' for text in texts)}</tr>"

    shown = rows[:ROWS_SHOWN]
    every = -(-int(total) // max(len(rows), 1))  # of long curves not every point is kept
    count = (f"{total} rows" + f", of which one in {every} is kept here" * (every > 1)
             + f"; the first {len(shown)} are shown" * (len(shown) < len(rows)))
    head, body = line(header, 'th scope="col"'), "".join(line(row, "td") for row in shown)
    return TABLE.format(name=name, count=count, total=len(rows), head=head, body=body)


def chart(output, name, alt, folder):
    """Return the HTML of an Altair output: its picture, which is also printed, the specification
    for charts.js, and its data.
    """
    (folder / f"_static/charts/{name}.png").write_bytes(base64.b64decode(output.data["image/png"]))
    spec = output.data[VEGA_LITE]
    header, rows = charts.table(spec)
    text = json.dumps(spec, separators=(",", ":")).replace("<", r"\u003c")
    return FIGURE.format(name=name, alt=html.escape(alt.replace("\0", "")), spec=text,
                         data=data_table((header, rows, len(rows)), name, folder))


@cache
def tested_modules():
    """Return {file of tests: the module that it tests} of the modules of the pages."""
    return {str(page_tests(path)): module for path in pages() if (module := module_of(path))}


def relink(text):
    """Return Markdown whose links to cells and tests lead to their places in the site."""
    def test(match):
        module = modules.get(match[2])
        return (f"[{match[1]}](api/{module}.md#tests)" if module
                else f"{{download}}`{match[1]} <{match[2]}>`")

    modules = tested_modules()
    return TO_TEST.sub(test, TO_CELL.sub(r"](#cell-\1)", text)).replace("](../docs/", "](")


def label(cell, section):
    """Return the tags of a code cell, which set its style, and the words on its collapsed part."""
    what, tags = role(cell), cell.metadata.get("tags", [])
    names = ", ".join(re.findall(r"^(?:class|def) (\w+)", cell.source, re.MULTILINE))
    words = {"imports": "Imports and settings", "drawing": "Code of this picture",
             "library": f"Library code: {names}" if names else "Library code: constants"}.get(what)
    if "hide-cell" in tags:
        return tags, "Solution" if section == "Exercises" else "Code and output"
    return [*tags, *([what] if what else []), *(["hide-input"] if folded(cell) else [])], words


def stage(path, folder, below_title=""):
    """Write the notebook `path` into `folder` in the form that Sphinx reads.

    below_title: Markdown to put below its title.
    """
    (folder / "_static" / "charts").mkdir(parents=True, exist_ok=True)
    notebook, cells, section = nbformat.read(path, as_version=4), [], ""
    notebook.cells = [cell for cell in notebook.cells if DIRECTIVES.sub("", cell.source).strip()]
    for cell in notebook.cells:
        if FIRST_LINE.match(cell.source):  # a target for links
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
                outputs += [as_html(data_table(table, name, folder))] if table else []
        cell.outputs = outputs
        cell.source = ALT.sub("", DIRECTIVES.sub("", cell.source))
    if below_title:
        notebook.cells[0].source += f"\n\n{below_title}\n"
    notebook.cells = cells
    nbformat.write(notebook, folder / path.name)


def as_html(text):
    """Return a cell output with this HTML."""
    return nbformat.v4.new_output("display_data", {"text/html": text})


def policy(page):
    """Return the HTML `page` with a content security policy that allows the theme's inline scripts.

    Outputs of a notebook are within the article, so a script that is smuggled into one is not
    allowed.
    """
    digests = {base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
               for code in SCRIPT.findall(ARTICLE.sub("", page)) if code}
    scripts = "".join(f" 'sha256-{digest}'" for digest in sorted(digests))
    rules = ("default-src 'none'; "
             f"script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
             "font-src 'self'; connect-src 'self'; worker-src 'self'; object-src 'none'; "
             "base-uri 'self'; form-action 'self'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    return page.replace("<head>", f"<head>\n{meta}", 1)


def name_controls(page):
    """Label the controls that the themes leave without a name for screen readers."""
    page = page.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    return page.replace('<summary><span class="toctree-toggle"',
                        '<summary aria-label="More pages"><span class="toctree-toggle"')


def render(source, site):
    """Run Sphinx on the folder `source`, and add the security policy to the pages in `site`.

    Vega is wrapped in a function scope.
    """
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version="6.1")
    (source / "_static" / "vega.js").write_text(f"(() => {{\n{vega}\n}})();\n", "utf-8")
    doctrees, processes = source.parent / f"{source.name}.doctrees", str(os.cpu_count() or 1)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-j",
               processes, "-d", doctrees]
    subprocess.run([*command, source, site], check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    for path in site.rglob("*.html"):
        if "_static" not in path.parts:
            path.write_text(policy(name_controls(path.read_text("utf-8"))), "utf-8")
