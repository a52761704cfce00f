"""What the pages show is what they compute: their stored outputs are those of the copies that were executed on this machine.

`make book` and `make test` execute the copies; here nothing is executed twice. Pictures are not compared, and neither are cells with the
tag `nbval-ignore-output`, whose digits or times are the machine's.
"""

import math
import re
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest

sys.path.insert(0, "tools")
import book  # noqa: E402

from notebooks import TRAINS, Stopped, Watch, execute, executed, pages  # noqa: E402

IGNORED = "nbval-ignore-output"


def comparable(output):
    """An output without its pictures and without addresses in memory."""
    data = {kind: value for kind, value in output.get("data", {}).items() if kind != "image/png"}
    kept = {name: value for name, value in output.items() if name not in ("data", "metadata", "execution_count")} | {"data": data}
    return re.sub(r"0x[0-9a-f]{6,}", "ADDRESS", repr(sorted(kept.items())))


def differences(stored, fresh):
    """The cells of two notebooks whose outputs differ, as lines of text."""
    found = [] if len(stored.cells) == len(fresh.cells) else [f"{len(stored.cells)} cells against {len(fresh.cells)}"]
    for one, other in zip(stored.cells, fresh.cells, strict=False):
        if one.source != other.source:
            found.append(f"another cell: {one.source[:60]!r}")
        elif one.cell_type == "code" and IGNORED not in one.metadata.get("tags", []):
            before, after = ([comparable(output) for output in cell.outputs] for cell in (one, other))
            if before != after:
                found.append(f"cell [{one.execution_count}] {one.source[:60]!r}\n  stored {before}\n  here   {after}")
    return found


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_stored_outputs_are_what_the_page_computes(path):
    fresh = executed(path)
    if fresh is None and path.name[:2] in TRAINS:
        pytest.skip("trains for minutes: `make book` executes it")
    assert fresh is not None, "not executed in its present state, or it failed: run `make book` or `make test`"
    assert not (found := differences(nbformat.read(path, as_version=4), fresh)), "\n".join([*found, "run `make sync` and look"])


def notebook(*cells):
    """A notebook of code cells, each a source or (source, outputs, tags)."""
    made = []
    for cell in cells:
        source, outputs, tags = (cell, [], []) if isinstance(cell, str) else cell
        made.append(nbformat.v4.new_code_cell(source, outputs=outputs, metadata={"tags": tags}))
    return nbformat.v4.new_notebook(cells=made)


def text(words):
    return nbformat.v4.new_output("stream", name="stdout", text=words)


def test_a_difference_is_found_and_named():
    here = notebook(("print(1)", [text("1\n")], []), ("x", [text("0x7f00deadbeef")], []), ("t", [text("3 s")], [IGNORED]))
    assert differences(here, here) == []
    other = notebook(("print(1)", [text("1\n")], []), ("x", [text("0x7f00deadbeee")], []), ("t", [text("4 s")], [IGNORED]))
    assert differences(here, other) == []  # an address in memory, and a cell that is not compared
    other.cells[0].outputs = [text("holds\n")]
    assert len(differences(here, other)) == 1 and "holds" in differences(here, other)[0]
    other.cells[0].outputs = []
    assert len(differences(here, other)) == 1  # an output that is not there any more
    assert differences(here, notebook("print(1)")) == ["3 cells against 1", differences(here, other)[0]]
    picture = nbformat.v4.new_output("display_data", {"image/png": "aaaa", "text/plain": "<Figure>"})
    drawn, redrawn = notebook(("draw", [picture], [])), notebook(("draw", [{**picture, "data": {**picture.data, "image/png": "b"}}], []))
    assert differences(drawn, redrawn) == [] and differences(drawn, notebook("draw"))


def test_a_cell_that_stands_still_ends_its_page_and_is_named():
    with pytest.raises(Stopped, match=r"cell \[1\] 'import time; time.sleep\(600\)' stands still: no work for 4 seconds"):
        execute(notebook("1 + 1", "import time; time.sleep(600)"), Watch(still=4))


def test_a_cell_that_waits_for_a_process_that_stands_still_ends_with_it(monkeypatch):
    kill = psutil.Process.kill
    monkeypatch.setattr(psutil.Process, "kill", lambda self: (kill(self), time.sleep(1)))  # time enough to go on without it
    waits = "import subprocess; subprocess.run(['sleep', '600'])"
    with pytest.raises(Stopped, match="stands still"):
        execute(notebook(waits), Watch(still=4))


def test_a_cell_without_end_is_stopped_and_a_slow_one_is_not():
    work = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\nprint('done')"
    with pytest.raises(Stopped, match=r"cell \[0\] .* finds no end: 3 seconds of processor time"):
        execute(notebook(work.format(600)), Watch(still=4, longest=3))
    done = execute(notebook(work.format(6)), Watch(still=3, longest=60))  # twice as long as it may stand still, but at work
    assert done.cells[0].outputs[0].text == "done\n"


def test_work_of_a_process_below_the_kernel_counts():
    inner = "import time\\nend = time.process_time() + 8\\nwhile time.process_time() < end: pass"
    below = f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', '{inner}']).returncode)"
    assert execute(notebook(below), Watch(still=4)).cells[0].outputs[0].text == "0\n"


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of three pages, one of which raises and one of which stands still, executed into a folder of its own."""
    for name, cell in (("01_whole", "print(2)"), ("02_raises", "x = 1\nx / 0"), ("03_stands", "import time; time.sleep(600)")):
        nbformat.write(notebook(cell), tmp_path / f"{name}.ipynb")
    found = sorted(tmp_path.glob("*.ipynb"))
    monkeypatch.setattr(book, "pages", lambda *_: found)
    monkeypatch.setattr(book, "EXECUTED", tmp_path / "executed")
    monkeypatch.setattr(book, "execute", lambda page: execute(page, Watch(still=4)))
    monkeypatch.setattr(book, "executed", lambda path: None)
    monkeypatch.setattr(book, "sources", lambda path: "now")
    monkeypatch.setenv("LEDGER_PAGES", "")
    return found, tmp_path / "executed"


def test_pages_that_fail_are_named_and_the_others_are_kept(small_book):
    found, folder = small_book
    wrong = book.run_pages(found)
    assert set(wrong) == {"02_raises.ipynb", "03_stands.ipynb"}
    assert wrong["02_raises.ipynb"] == "ZeroDivisionError: division by zero" and "stands still" in wrong["03_stands.ipynb"]
    assert [path.name for path in folder.glob("*.ipynb")] == ["01_whole.ipynb"]
    assert nbformat.read(folder / "01_whole.ipynb", as_version=4).cells[0].outputs[0].text == "2\n"


def test_the_book_says_how_far_it_is_and_how_long_the_rest_will_take(small_book, capsys):
    found, _ = small_book
    book.run_pages(found[:2])
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 2 pages, about 1 min left" in lines[0] and lines[1].split(" s   ")[1].startswith("2 of 2 pages")
    three = [Path(f"{number}_x.ipynb") for number in ("01", "17", "22")]
    assert book.what_is_left(60, three[:1], three[1:]) == f"1 of 3 pages, about {math.ceil(220 / 12)} min left"
    assert book.what_is_left(100, three, []) == "3 of 3 pages"


def test_pages_that_train_wait_until_the_stored_ones_are_rendered(small_book, monkeypatch):
    found, _ = small_book
    long = found[0].with_name("17_long.ipynb")
    nbformat.write(notebook("print(3)"), long)
    began, rendered = {}, threading.Event()
    monkeypatch.setattr(book, "execute", lambda page: began.setdefault(page.cells[0].source, rendered.is_set()) and None or page)
    book.run_pages([found[0], long], lambda: time.sleep(1) or rendered.set())
    assert began == {"print(2)": False, "print(3)": True}


@pytest.fixture
def steps(small_book, monkeypatch):
    """The order in which `make book` goes through its steps; pages and model are as `wrong` says."""
    taken, wrong = [], {}
    monkeypatch.setattr(book.site_build, "build", lambda: taken.append("site") or "_build/site/index.html")
    monkeypatch.setattr(book, "run_pages", lambda chosen, first: first() or taken.append("pages") or wrong)
    monkeypatch.setattr(book, "book_model", lambda: type("Saved", (), {"model": None, "tokenizer": None}))
    monkeypatch.setattr(book, "translate", lambda model, tokenizer, sentences: taken.append("translate") or sentences)
    monkeypatch.setattr(book.ledger, "read", lambda paths: None)
    monkeypatch.setattr(sys, "argv", ["book.py"])
    return taken, wrong


@pytest.mark.parametrize("wrong", [{}, {"02_raises.ipynb": "ZeroDivisionError"}])
def test_the_book_translates_and_renders_at_once_and_again_and_fails_if_a_page_did(steps, capsys, wrong):
    taken, result = steps
    result |= wrong
    with pytest.raises(SystemExit) as ended:
        book.main()
    assert ended.value.code == bool(wrong) and taken == ["translate", "site", "pages", "site"]
    assert all(f"{name}: {reason}; its stored outputs are kept" in capsys.readouterr().out for name, reason in wrong.items())
