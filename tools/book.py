"""`make book`: train the book's model if it is not there, execute copies of all notebooks, show what the model says.

    python tools/book.py            every page
    python tools/book.py 05 06      these pages
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ledger
import nbformat

from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.training import book_model
from notebooks import ROOT, TRAINS, execute, introduction_last, normalise, pages

EXECUTED = ROOT / "_build" / "book"


def run(path):
    """Execute a copy of one page into _build/book/; returns its line for the log."""
    start = time.time()
    timeout = None if os.environ.get("WMT_RUN") == "full" else 600  # the full run of page 23 takes days
    notebook = normalise(execute(nbformat.read(path, as_version=4), timeout))
    nbformat.write(notebook, EXECUTED / path.name)
    return f"  {path.name:40s} {time.time() - start:5.0f} s"


def main():
    begin = time.time()
    ledger.read(pages())  # a claim that nothing checks is better found now than at the end
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for old in EXECUTED.glob("*.ipynb"):
        old.unlink()
    print("[book 1/3] the book's model", flush=True)
    book = book_model()
    print(f"[book 2/3] executing copies of the notebooks in {EXECUTED.relative_to(ROOT)}/", flush=True)
    chosen = introduction_last(pages(sys.argv[1:]))
    light = [path for path in chosen if path.name[:2] not in (*TRAINS, "00")]
    os.environ["LEDGER_PAGES"] = str(EXECUTED)  # page 00 shows what this run measured
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # one kernel a core
        for line in pool.map(run, light):
            print(line, flush=True)
    for path in (path for path in chosen if path not in light):  # these use every core themselves
        print(run(path), flush=True)
    print("[book 3/3] five sentences of the test set, which the model never saw:", flush=True)
    pairs = load_corpus("toy").test[:5]
    for (source, _), output in zip(pairs, translate(book.model, book.tokenizer, [s for s, _ in pairs]), strict=True):
        print(f"  {source}\n    -> {output}")
    print(f"[book] {len(chosen)} pages in {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
