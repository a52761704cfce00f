"""`make book`: render the pages as they are stored, execute copies of all of them, render those.

    python tools/book.py            every page, and the site
    python tools/book.py 05 06      these pages, without the site

A page that fails, stands still or finds no end keeps its stored outputs; it is named at the end, and the exit status is 1.
"""

import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

import ledger
import nbformat
import site_build
from nbclient.exceptions import CellExecutionError, DeadKernelError

from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.training import book_model
from notebooks import EXECUTED, TRAINS, Stopped, execute, executed, normalise, pages, sources

SHORT = ("01", "02", "03", "04")  # executed while the stored pages are rendered
LONG = ("24", *TRAINS)  # begun next, so that no core waits for them at the end
AT_FIRST = "; beside the first of them the pages as they are stored are rendered"
SECONDS = {"07": 60, "09": 60, "10": 25, "14": 30, "17": 90, "18": 45, "20": 40, "21": 110, "22": 130, "23": 60, "24": 110, "25": 50,
           "26": 90, "83": 40}  # about so many a page takes on a quiet machine; the others take USUAL
USUAL = 12
WORKERS = min(4, os.cpu_count() or 1)  # one kernel a core


def render(what):
    """Render the site and say where it lies."""
    print(f"[book {what}: {site_build.build()}", flush=True)


def run(path, rendered):
    """Execute a copy of one page into _build/book/; returns (seconds, what went wrong or None). A page that trains waits for the site."""
    if path.name[:2] in LONG:
        rendered.result()
    notebook, start, digest = nbformat.read(path, as_version=4), time.time(), sources(path)
    try:
        notebook = normalise(execute(notebook), path.name[:2])
    except (CellExecutionError, DeadKernelError, Stopped) as error:
        return time.time() - start, last_words(error)
    notebook.metadata["sources"] = digest
    nbformat.write(notebook, EXECUTED / path.name)
    return time.time() - start, None


def last_words(error):
    """An error in one line: of a traceback what was raised."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in str(error).split("\n")]
    return next(line for line in reversed(lines) if line)


def what_is_left(seconds, done, rest):
    """How far the pages are, in words: `done` ones took so many seconds by the clock, so the `rest` will take about …"""
    weigh = [sum(SECONDS.get(path.name[:2], USUAL) for path in some) for some in (done, rest)]
    minutes = math.ceil(seconds * weigh[1] / weigh[0] / 60)
    return f"{len(done)} of {len(done) + len(rest)} pages" + (f", about {minutes} min left" if rest else "")


def run_pages(chosen, first=lambda: None):
    """Execute copies of these pages, where there is none of their present state, beside `first`; returns {page: what went wrong}."""
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for path in pages():
        if executed(path) is None:
            (EXECUTED / path.name).unlink(missing_ok=True)
    os.environ["LEDGER_PAGES"] = str(EXECUTED)  # page 00 shows what this machine measured
    wrong, done, begin = {}, [], time.time()
    ranks = dict.fromkeys(SHORT, 0) | dict.fromkeys(LONG, 1)
    order = sorted((path for path in chosen if executed(path) is None), key=lambda path: ranks.get(path.name[:2], 2))
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        rendered = pool.submit(first)
        for batch in (lambda name: name != "00", lambda name: name == "00"):  # 00 reads what all others print
            running = {pool.submit(run, path, rendered): path for path in order if batch(path.name[:2])}
            for job in as_completed(running):
                seconds, reason = job.result()
                done.append(running[job])
                left = what_is_left(time.time() - begin, done, [path for path in order if path not in done])
                print(f"  {running[job].name:32s} {seconds:5.0f} s   {left}{'   FAILED' if reason else ''}", flush=True)
                wrong |= {running[job].name: reason} if reason else {}
    rendered.result()
    return wrong


def main():
    begin, chosen, whole = time.time(), pages(sys.argv[1:]), not sys.argv[1:]
    ledger.read(pages())  # a claim that nothing checks is better found now than at the end
    if whole:
        print("[book 1/3] the book's model translates three sentences that it never saw:", flush=True)
        sentences, saved = [source for source, _ in load_corpus("toy").test[:3]], book_model()
        for source, output in zip(sentences, translate(saved.model, saved.tokenizer, sentences), strict=True):
            print(f"  {source}\n    -> {output}")
    print(f"[book 2/3] copies of {len(chosen)} pages, with the outputs of this machine{AT_FIRST if whole else ''}", flush=True)
    wrong = run_pages(chosen, partial(render, "2/3] the pages as they are stored")) if whole else run_pages(chosen)
    if whole:
        render("3/3] the pages as they came out here")
    print(f"[book] {time.time() - begin:.0f} s", flush=True)
    for name, reason in wrong.items():
        print(f"[book] {name}: {reason}; its stored outputs are kept", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
