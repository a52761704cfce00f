"""`make site`: render the pages to HTML in _build/site/, from the executed copies of `make book` if they are there."""

import re
import shutil
import subprocess
import sys

import nbformat

from notebooks import NOTEBOOKS, ROOT, pages

SOURCE, SITE = ROOT / "_build" / "site_source", ROOT / "_build" / "site"
DIRECTIVES = re.compile(r"^#\|.*\n?", re.MULTILINE)
ALT = re.compile(r"^# alt: (.*)\n", re.MULTILINE)


def stage():
    """Fill _build/site_source/: the texts of docs/ and the pages without `#|` directives, `# alt:` comments as alt texts."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    executed = ROOT / "_build" / "book"
    for path in pages():
        copy = executed / path.name
        notebook = nbformat.read(copy if copy.exists() else path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                alt = ALT.search(cell.source)
                if alt:
                    cell.metadata["mystnb"] = {"image": {"alt": alt[1]}}
                cell.source = ALT.sub("", DIRECTIVES.sub("", cell.source))
        notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
        nbformat.write(notebook, SOURCE / path.name)


def main():
    if not pages():
        raise SystemExit(f"{NOTEBOOKS} holds no page")
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", SOURCE, SITE], check=True)
    print(f"[site] {len(pages())} pages: open {(SITE / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
