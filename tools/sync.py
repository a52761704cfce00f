"""Execute pages, store their normalised outputs, and export their modules: nothing else writes
notebooks/ and annotated/.

    python tools/sync.py            every page
    python tools/sync.py 05 06      these pages
    python tools/sync.py --export   export only, execute nothing
"""

import argparse
import os

import ledger
import nbformat

from notebooks import NOTEBOOKS, complaints, execute, export, normalise, pages


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="two-digit numbers; every page if none is given")
    parser.add_argument("--export", action="store_true", help="only export the modules")
    options = parser.parse_args()
    # 00 comes last, because its ledger of claims reads what the others print
    chosen = sorted(pages(options.pages), key=lambda path: path.name.startswith("00"))
    for path in chosen:  # first all modules, so that no page runs against an old one
        export(path)
    # stored pages train for all their updates, however slow the machine
    os.environ["PAGE_SECONDS"] = "1e9"
    for path in [] if options.export else chosen:
        if path.name.startswith("00"):
            (NOTEBOOKS / "ledger.md").write_text(ledger.document(ledger.read()), encoding="utf-8")
        notebook = normalise(execute(nbformat.read(path, as_version=4)))
        if messages := complaints(notebook):
            raise SystemExit("\n".join([f"{path.name}:", *messages]))
        nbformat.write(notebook, path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
