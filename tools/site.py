"""`make site`: render the pages to HTML in _build/site/, from the executed copies of `make book` if they are there."""

import shutil

import ledger
import live
import site_reference
from site_pages import render, stage

from notebooks import NOTEBOOKS, ROOT, pages

SOURCE, SITE = ROOT / "_build" / "site_source", ROOT / "_build" / "site"


def main():
    paths, executed = pages(), ledger.stored(ROOT / "_build" / "book")
    if not paths:
        raise SystemExit(f"{NOTEBOOKS} holds no page")
    for old in (SOURCE, SITE):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    live.write(SOURCE / "_static" / "live")  # the model of the page that translates in the browser
    shutil.copytree(NOTEBOOKS, SOURCE / "notebooks", ignore=shutil.ignore_patterns("[!0-9]*"))  # to be downloaded
    described = [site_reference.Page(path) for path in paths]
    site_reference.write(described, ledger.read(executed), SOURCE)
    for page, path in zip(described, executed, strict=True):
        stage(path, SOURCE, page.below_title())
    render(SOURCE, SITE)
    print(f"[site] {len(paths)} pages: open {(SITE / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
