"""`make book`: render the pages as they are stored, train the book's model, execute copies of all pages, render those.

    python tools/book.py            every page, and the site
    python tools/book.py 05 06      these pages, without the site

A page that fails, stands still or finds no end keeps its stored outputs; it is named at the end, and the exit status is 1.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import ledger
import nbformat
import site_build
from nbclient.exceptions import CellExecutionError

from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.training import book_model
from notebooks import ENVIRONMENT, EXECUTED, TRAINS, Stopped, execute, executed, normalise, pages, sources

LONG = ("24", *TRAINS)  # begun first, so that no core waits for them at the end
MODEL = "the book's model"
WORKERS = min(4, os.cpu_count() or 1)  # one kernel a core


def train_model():
    """Train the book's model, if it is not there, in a process of its own; its progress bar goes to the terminal."""
    quiet = {} if sys.stderr.isatty() else {"TQDM_MININTERVAL": "15"}  # a log wants a line now and then
    program = "from annotated.training import book_model; book_model()"
    subprocess.run([sys.executable, "-c", program], env=os.environ | ENVIRONMENT | quiet, check=True)


def run(path, model):
    """Execute a copy of one page into _build/book/, after the model if it asks for that; returns (seconds, what went wrong or None)."""
    notebook, start, digest = nbformat.read(path, as_version=4), time.time(), sources(path)
    try:
        if any(re.search(r"^\w.*= book_model\(", cell.source, re.M) for cell in notebook.cells if cell.cell_type == "code"):
            model.result()
            start = time.time()
        notebook = normalise(execute(notebook))
    except subprocess.CalledProcessError:
        return 0, f"{MODEL} was not trained"
    except (CellExecutionError, Stopped) as error:
        return time.time() - start, last_words(error)
    notebook.metadata["sources"] = digest
    nbformat.write(notebook, EXECUTED / path.name)
    return time.time() - start, None


def last_words(error):
    """An error in one line: of a traceback what was raised."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in str(error).split("\n")]
    return next(line for line in reversed(lines) if line)


def run_pages(chosen):
    """Execute copies of these pages, where there is none of their present state; returns {page, or the model: what went wrong}."""
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for path in pages():
        if executed(path) is None:
            (EXECUTED / path.name).unlink(missing_ok=True)
    os.environ["LEDGER_PAGES"] = str(EXECUTED)  # page 00 shows what this machine measured
    wrong = {}
    order = sorted((path for path in chosen if executed(path) is None), key=lambda path: path.name[:2] not in LONG)
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        model = pool.submit(train_model)
        for batch in (lambda name: name != "00", lambda name: name == "00"):  # 00 reads what all others print
            running = {pool.submit(run, path, model): path for path in order if batch(path.name[:2])}
            for job in as_completed(running):
                seconds, reason = job.result()
                print(f"  {running[job].name:40s} {seconds:5.0f} s{'  FAILED' if reason else ''}", flush=True)
                wrong |= {running[job].name: reason} if reason else {}
    if model.exception():
        wrong[MODEL] = str(model.exception())
    return wrong


def main():
    begin, chosen, whole = time.time(), pages(sys.argv[1:]), not sys.argv[1:]
    ledger.read(pages())  # a claim that nothing checks is better found now than at the end
    if whole:
        print(f"[book 1/4] the pages as they are stored: {site_build.build(model=False)}", flush=True)
    print(f"[book 2/4] {MODEL}, and copies of {len(chosen)} pages with the outputs of this machine", flush=True)
    wrong = run_pages(chosen)
    if whole:
        print(f"[book 3/4] the pages as they came out here: {site_build.build(model=MODEL not in wrong)}", flush=True)
    if MODEL not in wrong:
        print("[book 4/4] five sentences of the test set, which the model never saw:", flush=True)
        pairs, saved = load_corpus("toy").test[:5], book_model(show_progress=False)
        for (source, _), output in zip(pairs, translate(saved.model, saved.tokenizer, [s for s, _ in pairs]), strict=True):
            print(f"  {source}\n    -> {output}")
    print(f"[book] {time.time() - begin:.0f} s", flush=True)
    for name, reason in wrong.items():
        print(f"[book] {name}: {reason}; its stored outputs are kept", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
