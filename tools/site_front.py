"""The front page of the site: the live translator, the picture of the model as a map of the book,
the two-hour path.
"""

import reading
from matplotlib import pyplot as plt
from matplotlib.patches import Circle, FancyBboxPatch

from annotated import charts
from notebooks import ROOT

PARTS = [  # of the book: name, first and last page
    ("The model", "00", "09"), ("The data", "10", "13"), ("Learning", "14", "17"),
    ("Translating", "18", "20"), ("The paper's experiments", "21", "23"),
    ("Engineering", "24", "25"),
    ("Since the paper", "26", "26"), ("Finding faults", "27", "27"), ("Appendix", "64", "99"),
]
# {part of the picture, by its name there: number of the page that explains it}; the first fits
MAP = {
    "attention": "01", "masking": "06", "multi_head": "02", "residual": "07",
    "feed_forward": "03", "embeddings": "04", "softmax": "04", "positional": "05",
    "data": "12", "decoding": "18", "training": "17",
}
ALT = ("Diagram of the Transformer: the encoder stack on the left, the decoder stack on the right, "
       "embeddings and positions below, output projection and softmax on top. Each box links to "
       "the page that explains it.")
LIVE = 10  # minutes at the live page, with which the path ends


def path_table(pages):
    """Markdown of the two-hour path, the live page at its end; pages: those of `site_reference`."""
    known = {page.path.name[:2]: page for page in pages}
    rows = [(known[stop.page].title, known[stop.page].path.name, stop.why, stop.minutes)
            for stop in reading.two_hours()]
    rows.append(("Translate in your browser", "live.md",
                 "watch every head while it translates your own sentence", LIVE))
    lines = ["| number | stop | why | minutes |", "|---|---|---|---|"]
    lines += [f"| {n} | [{title}]({address}) | {why} | {minutes:.0f} |"
              for n, (title, address, why, minutes) in enumerate(rows, 1)]
    return "\n".join(lines)


def model_map(pages, folder):
    """HTML of the model's picture, drawn into `folder`; each box links to the page on it."""
    explaining = {page.path.name[:2]: page for page in pages}
    figure = plt.figure(figsize=(5, 5 * 129 / 111))
    ax = charts.model_diagram(ax=figure.add_axes((0, 0, 1, 1)))
    links = []
    for patch in (patch for patch in ax.patches if isinstance(patch, FancyBboxPatch | Circle)):
        name = next((MAP[part] for part in MAP if part in (patch.get_gid() or "").split()), None)
        if name:
            box = patch.get_window_extent().transformed(ax.transAxes.inverted())
            place = {"left": box.x0, "top": 1 - box.y1, "width": box.width, "height": box.height}
            style = "; ".join(f"{side}: {100 * share:.2f}%" for side, share in place.items())
            page = explaining[name]
            links.append(f'<a href="{page.path.stem}.html" aria-label="{page.title}" '
                         f'title="{page.title}" style="{style}"></a>')
    (folder / "_static" / "charts").mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "_static" / "charts" / "map.png", dpi=200, metadata={"Software": None})
    plt.close(figure)
    image = f'<div class="model-map"><img src="_static/charts/map.png" alt="{ALT}">'
    return "\n".join(["```{raw} html", image, *links, "</div>", "```"])


def contents():
    """The parts of the book as tables of contents, in Markdown."""
    trees = []
    for name, first, last in PARTS:
        stems = [path.stem for path in reading.pages() if first <= path.name[:2] <= last]
        head = ["```{toctree}", ":maxdepth: 1", f":caption: {name}", ""]
        trees.append("\n".join([*head, *stems, "```"]))
    return "\n\n".join(trees)


def front_page(pages, folder):
    """Markdown of the front page, `docs/index.md` with its places filled; folder: the sources."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    text = text.replace("<!-- MAP -->", model_map(pages, folder))
    return text.replace("<!-- PATH -->", path_table(pages)).replace("<!-- CONTENTS -->", contents())
