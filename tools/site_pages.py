"""Turn stored notebooks into sources for Sphinx, and its HTML into pages that run no script but the book's own."""

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys

import nbformat
import vl_convert

from notebooks import ROOT

VEGA_LITE = "application/vnd.vegalite.v5+json"
DIRECTIVES = re.compile(r"^#\|.*\n?", re.MULTILINE)
ALT = re.compile(r"^# alt: (.*)\n?", re.MULTILINE)
ARTICLE = re.compile("<article.*</article>", re.DOTALL)  # greedy: an output that closes it early does not get out
SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>(.*?)</script>", re.DOTALL)
FIGURE = """<figure class="chart" id="{name}">
<img class="chart-still" src="_static/charts/{name}.png" alt="{alt}">
<script type="application/json">{spec}</script>
</figure>"""


def chart(output, name, alt, folder):
    """The HTML of an Altair output: its picture, which is also what is printed, and the chart as data for charts.js."""
    pictures = folder / "_static" / "charts"
    pictures.mkdir(parents=True, exist_ok=True)
    (pictures / f"{name}.png").write_bytes(base64.b64decode(output.data["image/png"]))
    spec = json.dumps(output.data[VEGA_LITE], separators=(",", ":")).replace("<", r"\u003c")
    return FIGURE.format(name=name, alt=html.escape(alt.replace("\0", "")), spec=spec)


def stage(path, folder, below_title=""):
    """Write the notebook `path` into `folder` as Sphinx is to read it; `below_title` is Markdown that goes below its title."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        alt = ALT.search(cell.source)
        if alt:
            cell.metadata["mystnb"] = {"image": {"alt": alt[1]}}
        for k, output in enumerate(cell.outputs):
            if VEGA_LITE in output.get("data", {}):
                name = f"{path.stem}-{cell.execution_count}-{k}"
                figure = chart(output, name, alt[1] if alt else "A chart.", folder)
                cell.outputs[k] = nbformat.v4.new_output("display_data", {"text/html": figure})
        cell.source = ALT.sub("", DIRECTIVES.sub("", cell.source))
    if below_title:
        notebook.cells[0].source += f"\n\n{below_title}\n"
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    nbformat.write(notebook, folder / path.name)


def policy(page):
    """Return the HTML `page` with a content security policy: of the inline scripts those run that the theme wrote.

    What a notebook shows stands in the article, so that a script smuggled into an output is never named.
    """
    codes = SCRIPT.findall(ARTICLE.sub("", page))
    digests = {base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes if code}
    rules = [
        "default-src 'none'", " ".join(["script-src 'self'", *(f"'sha256-{digest}'" for digest in sorted(digests))]),
        "style-src 'self' 'unsafe-inline'", "img-src 'self' data:", "font-src 'self'", "connect-src 'self'", "worker-src 'self'",
        "object-src 'none'", "base-uri 'self'", "form-action 'self'",
    ]  # fmt: skip
    return page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">', 1)


def mend(page):
    """Name what the themes leave nameless, or name otherwise than they show it, for readers who cannot see it."""
    page = page.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    return page.replace('<summary><span class="toctree-toggle"', '<summary aria-label="More pages"><span class="toctree-toggle"')


def render(source, site):
    """Run Sphinx on the folder `source`; the pages in `site` get their policy, and Vega a scope of its own."""
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version="6.1")
    (source / "_static" / "vega.js").write_text(f"(() => {{\n{vega}\n}})();\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", source.parent / f"{source.name}.doctrees"]
    subprocess.run([*command, source, site], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for path in site.rglob("*.html"):
        if "_static" not in path.parts:
            path.write_text(policy(mend(path.read_text())))
