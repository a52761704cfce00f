"""How long the pages are, what is folded away, and the two-hour path."""

import re

import nbformat
import pytest
import reading
from test_book import texts

from notebooks import folded, pages, role

PAGES = pages()


@pytest.mark.parametrize("source, what", [
    ("import torch\n\ncharts.use_style()", "imports"), ("%load_ext jaxtyping", "imports"),
    ("#| export\nfrom torch import nn", "imports"), ("import torch\nprint(torch.ones(2))", ""),
    ("#| export\ndef f():\n    import torch", "library"), ("#| exporti\nN = 3", "library"),
    ("# alt: A line.\nplt.plot([1])", "drawing"), ("# C4: the variance\nassert True", "check")])
def test_a_cell_says_what_it_is_and_imports_drawing_and_library_code_fold(source, what):
    cell = nbformat.v4.new_code_cell(source)
    assert role(cell) == what
    assert bool(folded(cell)) == (what in ("imports", "drawing", "library"))


def test_the_book_is_short_enough_to_be_read():
    words = {path.name[:2]: reading.length(path).words for path in PAGES}
    # the appendix is for looking things up; nobody reads it through
    assert sum(count for page, count in words.items() if page < "64") <= 46_000
    assert sum(words.values()) <= 60_000 and max(words.values()) <= 3_500
    assert sum(count for page, count in words.items() if "01" <= page <= "08") <= 12_000


def test_the_two_hour_path_takes_two_hours_and_every_stop_names_the_next():
    stops, by_number = reading.two_hours(), {path.name[:2]: path for path in PAGES}
    assert 100 <= sum(stop.minutes for stop in stops) <= 120
    for stop, following in zip(stops, [*stops[1:], None], strict=True):
        text = "\n".join(texts(by_number[stop.page]))
        target = by_number[following.page].name if following else "../docs/live.md"
        leads = rf"^\*Two-hour path:\* .*\]\({re.escape(target)}"
        assert re.search(leads, text, re.M), f"{stop.page} does not lead on to {target}"


def test_the_introduction_lists_the_path():
    listed = "\n".join(texts(PAGES[0])).partition("## The two-hour path")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[.*?\]\((\d\d)_\w+\.ipynb\) \| (.*?) \| (.*?) \|$", listed, re.M)
    parts = [[name.split(" / ")[-1] for name in stop.sections or ["all of it"]]
             for stop in reading.two_hours()]
    assert rows == [(stop.page, ", ".join(names), stop.why)
                    for stop, names in zip(reading.two_hours(), parts, strict=True)]


def test_every_page_but_the_last_leads_on():
    for path, following in zip(PAGES, PAGES[1:], strict=False):
        leads = f"]({following.name})" in texts(path)[-1]
        assert leads, f"{path.name} does not lead to {following.name}"
