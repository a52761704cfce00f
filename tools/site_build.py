"""`make site`: render the pages to HTML in _build/site/, from the executed copies of `make book` where they are there."""

import shutil

import ledger
import live
import site_front
import site_reference
from site_pages import render, stage

from notebooks import EXECUTED, NOTEBOOKS, ROOT, executed, pages

SOURCE, SITE = ROOT / "_build" / "site_source", ROOT / "_build" / "site"


def build():
    """Render all pages and return where the first one lies."""
    paths, shown = pages(), [EXECUTED / path.name if executed(path) else path for path in pages()]
    if not paths:
        raise SystemExit(f"{NOTEBOOKS} holds no page")
    fresh = SITE.with_name("site.part")
    for old in (SOURCE, fresh):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    live.write(SOURCE / "_static" / "live")  # the model of the page that translates in the browser
    shutil.copytree(NOTEBOOKS, SOURCE / "notebooks", ignore=shutil.ignore_patterns("[!0-9]*"))  # to be downloaded
    described = [site_reference.Page(path) for path in paths]
    site_reference.write(described, ledger.read(shown), SOURCE)
    rows = site_front.rows_of_path(described)
    (SOURCE / "index.md").write_text(site_front.front_page(described, rows, SOURCE), encoding="utf-8")
    for page, path in zip(described, shown, strict=True):
        stage(path, SOURCE, site_front.below_title(page, rows))
    render(SOURCE, fresh)
    shutil.rmtree(SITE, ignore_errors=True)  # only now: until a site is whole the one before stays
    fresh.rename(SITE)
    return (SITE / "index.html").relative_to(ROOT)


if __name__ == "__main__":
    print(f"[site] {len(pages())} pages: open {build()}")
