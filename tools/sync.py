"""Execute pages, store their normalised outputs, export their modules. The only writer of
notebooks/ and annotated/.

    python tools/sync.py            every page
    python tools/sync.py 05 06      these pages
    python tools/sync.py --from DIR 05   first take the text of page 05 from DIR/05_*.py (jupytext percent format)
    python tools/sync.py --export   export only, execute nothing
"""

import argparse
import os
import time
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs

from notebooks import NOTEBOOKS, complaints, execute, export, introduction_last, normalise, pages


def adopt(folder, numbers):
    """Bring notebooks/ up to date with the text in `folder`, keeping the ids and outputs of
    unchanged cells.
    """
    for number in numbers:
        sources = sorted(Path(folder).glob(f"{number}_*.py"))
        if len(sources) != 1:
            raise SystemExit(f"{folder} holds {len(sources)} files {number}_*.py; exactly one "
                             "is needed")
        target = NOTEBOOKS / f"{sources[0].stem}.ipynb"
        notebook = jupytext.read(sources[0])
        if target.exists():
            notebook = combine_inputs_with_outputs(notebook, nbformat.read(target, as_version=4))
        nbformat.write(normalise(notebook), target)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*",
                        help="two-digit numbers of the pages; all if none is given")
    parser.add_argument("--from", dest="source", metavar="DIR",
                        help="take the text of the pages from DIR/NN_*.py")
    parser.add_argument("--export", action="store_true", help="only export the modules")
    options = parser.parse_args()
    if options.source:
        adopt(options.source, options.pages)
    chosen = introduction_last(pages(options.pages))
    for path in chosen:  # first all modules, so that no page runs against an old one
        export(path)
    # what is stored has all the updates that its page asks for, however slow the machine
    os.environ["PAGE_SECONDS"] = "1e9"
    for path in [] if options.export else chosen:
        start = time.time()
        notebook = normalise(execute(nbformat.read(path, as_version=4)))
        wrong = complaints(notebook)
        if wrong:
            raise SystemExit("\n".join([f"{path.name}:", *wrong]))
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
