"""`make book`: translate three sentences, render the stored pages, then execute every page with
nbval and print the outcomes.

A page is "equal" if the outputs of all cells are the stored ones, "differs" in a cell whose output
is another, or "failed" in one that raises. The exit status is 1 unless all are equal.
"""

import sys
import time
from collections import Counter

import ledger
import pytest
import site_build

from annotated.data.corpora import load_corpus
from annotated.translation.search import translate
from notebooks import pages

PROCESSES = ("-n", "logical", "--maxprocesses=4", "--dist=loadfile")  # pages in parallel


class Pages:
    """A pytest plugin that prints a line for each page and collects the `outcomes` of pages."""

    def __init__(self, total):
        self.total, self.first, self.outcomes = total, {}, {}
        self.left, self.seconds = Counter(), Counter()

    def pytest_collection_finish(self, session):
        self.left = Counter(item.path.name for item in session.items)

    # the pages are executed by other processes
    def pytest_xdist_node_collection_finished(self, ids):
        self.left = self.left or Counter(map(page_of, ids))

    def pytest_report_teststatus(self, report):
        return report.outcome if report.when == "call" or not report.passed else "", "", ""

    def pytest_runtest_logreport(self, report):
        page = page_of(report.nodeid)
        self.seconds[page] += report.duration
        if not report.passed:
            what = "differs" if "Cell outputs differ" in str(report.longrepr) else "failed"
            cell = int(report.nodeid.rpartition(" ")[2]) + 1  # nbval counts from 0, readers from 1
            self.first.setdefault(page, f"{what} in cell {cell}")
        self.left[page] -= report.when == "teardown"
        if not self.left[page]:
            self.outcomes[page] = self.first.get(page, "equal")
            print(f"  {page:32s} {self.seconds[page]:5.0f} s   {len(self.outcomes)} of "
                  f"{self.total}   {self.outcomes[page]}", flush=True)


def page_of(nodeid):
    """Return the file name of a test such as "notebooks/05_positional.ipynb::Cell 3"."""
    return nodeid.partition("::")[0].rpartition("/")[2]


def execute(chosen, processes=PROCESSES):
    """Execute pages with nbval and print the outcomes.

    Returns {file name: "equal", or what is wrong} of the pages that were executed.
    """
    plugin = Pages(len(chosen))
    quiet = ["-q", "--no-header", "-o", "console_output_style=classic", "-p", "no:cacheprovider",
             "-p", "no:warnings"]
    pytest.main(["--nbval", *quiet, *processes, *map(str, chosen)], plugins=[plugin])
    return plugin.outcomes


def main():
    begin, chosen = time.time(), pages()
    ledger.read(chosen)  # a claim that nothing checks is better found now than at the end
    print("[book 1/3] the book's model translates three sentences that it never saw:", flush=True)
    sentences = [source for source, _ in load_corpus("toy").test[:3]]
    for source, output in zip(sentences, translate(sentences), strict=True):
        print(f"  {source}\n    -> {output}")
    print(f"[book 2/3] the pages as they are stored: {site_build.build()}", flush=True)
    print(f"[book 3/3] executing {len(chosen)} pages: does each give what it shows?", flush=True)
    outcomes = execute(chosen)
    wrong = [path.name for path in chosen if outcomes.get(path.name) != "equal"]
    print(f"[book] {len(chosen) - len(wrong)} of {len(chosen)} pages equal, "
          f"{time.time() - begin:.0f} s", flush=True)
    for name in wrong:
        print(f"[book] {name}: {outcomes.get(name, 'not executed')}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
