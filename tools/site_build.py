"""`make site`: render the pages, as they are stored, to HTML in _build/site/."""

import shutil

import hosted
import ledger
import live
import site_front
import site_reference
from site_pages import render, stage

from notebooks import NOTEBOOKS, ROOT, pages

SOURCE, SITE = ROOT / "_build" / "site_source", ROOT / "_build" / "site"


def build():
    """Render all pages; returns the path of the front page."""
    paths = pages()
    fresh = SITE.with_name("site.part")
    for old in (SOURCE, fresh):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    live.write(SOURCE / "_static" / "live")  # the models of the page that translates in the browser
    # to be downloaded
    shutil.copytree(NOTEBOOKS, SOURCE / "notebooks", ignore=shutil.ignore_patterns("[!0-9]*"))
    described = [site_reference.Page(path) for path in paths]
    site_reference.write(described, ledger.read(paths), SOURCE)
    (SOURCE / "index.md").write_text(site_front.front_page(described, SOURCE), encoding="utf-8")
    for page, path in zip(described, paths, strict=True):
        stage(path, SOURCE, f"{{.links}}\n{page.links()}{hosted.link(path)}")
    render(SOURCE, fresh)
    hosted.write(paths, fresh / "notebooks")
    shutil.rmtree(SITE, ignore_errors=True)  # only now: until a site is whole the one before stays
    fresh.rename(SITE)
    return (SITE / "index.html").relative_to(ROOT)


if __name__ == "__main__":
    print(f"[site] {len(pages())} pages: open {build()}")
