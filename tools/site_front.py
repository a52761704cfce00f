"""The generated parts of the site's front page: the picture of the model, whose boxes link to the
pages, and the two-hour path.
"""

import reading
from matplotlib import pyplot as plt
from matplotlib.patches import Circle, FancyBboxPatch
from site_reference import table

from annotated import charts
from notebooks import ROOT

# {part of the picture, by its name there: number of the page that explains it}; the first match
# counts
PAGE_OF_PART = {
    "attention": "01", "masking": "06", "multi_head": "02", "residual": "07", "feed_forward": "03",
    "embeddings": "04", "softmax": "04", "positional": "05", "data": "12", "decoding": "18",
    "training": "17"}
ALT = ("Diagram of the Transformer: the encoder stack on the left, the decoder stack on the right, "
       "embeddings and positions below, output projection and softmax on top. Each box links to "
       "the page that explains it.")


def path_table(pages):
    """Return the two-hour path as a Markdown table; pages: instances of `site_reference.Page`."""
    by_number = {page.path.name[:2]: page for page in pages}
    rows = [(by_number[stop.page].title, by_number[stop.page].path.name, stop.why, stop.minutes)
            for stop in reading.two_hours()]
    rows.append(("Translate in your browser", "live.md",
                 "watch every head while it translates your own sentence", 10))
    return table(["number", "stop", "why", "minutes"],
                 [[str(number), f"[{title}]({address})", why, f"{minutes:.0f}"]
                  for number, (title, address, why, minutes) in enumerate(rows, 1)])


def model_map(pages, folder):
    """Draw the model into `folder`; returns HTML in which each box links to its page."""
    by_number = {page.path.name[:2]: page for page in pages}
    figure = plt.figure(figsize=(5, 5 * 129 / 111))
    ax = charts.model_diagram(ax=figure.add_axes((0, 0, 1, 1)))
    links = []
    for patch in (patch for patch in ax.patches if isinstance(patch, FancyBboxPatch | Circle)):
        name = next((PAGE_OF_PART[part] for part in PAGE_OF_PART
                     if part in (patch.get_gid() or "").split()), None)
        if name:
            box = patch.get_window_extent().transformed(ax.transAxes.inverted())
            place = {"left": box.x0, "top": 1 - box.y1, "width": box.width, "height": box.height}
            style = "; ".join(f"{side}: {100 * share:.2f}%" for side, share in place.items())
            page = by_number[name]
            links.append(f'<a href="{page.path.stem}.html" aria-label="{page.title}" '
                         f'title="{page.title}" style="{style}"></a>')
    (folder / "_static" / "charts").mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "_static" / "charts" / "map.png", dpi=200, metadata={"Software": None})
    plt.close(figure)
    image = f'<div class="model-map"><img src="_static/charts/map.png" alt="{ALT}">'
    return "\n".join(["```{raw} html", image, *links, "</div>", "```"])


def front_page(pages, folder):
    """Return the front page: `docs/index.md` with map and path filled in; folder: the sources."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    text = text.replace("<!-- MAP -->", model_map(pages, folder))
    return text.replace("<!-- PATH -->", path_table(pages))
