"""Page 67: what the workbook shows and hides, checks in other processes, a model of one's parts."""

import ast
import csv
import io
import json
import re

import nbformat
import pytest
import reading
import torch

from annotated import cli, workbook
from annotated.checks import CHECKS, PAGES, exercises, fault
from annotated.data.corpora import load_corpus
from annotated.model.transformer import TransformerConfig
from annotated.training.loop import encode_pairs
from annotated.workbook import (
    check_notebook,
    check_submissions,
    compare_bleu,
    read_parts,
    run_definitions,
    train_parts,
    write_workbook,
)

MASK = """import torch

def causal_mask(length, device=None):
    return torch.ones(length, length, dtype=torch.bool).{}()"""
ATTENTION = """from annotated.model.attention import *
import torch

class DotProductAttention(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout

    def forward(self, query, key, value, mask=None):
        dropout = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, mask, dropout)"""


def write(path, *cells):
    """A notebook of these cells of code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{solutions?: folder} of a whole workbook, empty and solved."""
    place = tmp_path_factory.mktemp("workbooks")
    for solutions in (False, True):
        write_workbook(place / str(solutions), solutions=solutions)
    return {solutions: place / str(solutions) for solutions in (False, True)}


def notebooks(folder):
    paths = sorted(folder.glob("*.ipynb"))
    return {path.name[:2]: nbformat.read(path, as_version=4) for path in paths}


def sources(notebook, kind="code"):
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_a_workbook_has_a_notebook_per_page_and_one_for_the_model(folders):
    for folder in folders.values():
        found = notebooks(folder)
        assert list(found) == [*PAGES, "99"]
        for notebook in found.values():
            nbformat.validate(notebook)
            assert not re.search(r"#\| (default_exp|export)", "\n".join(sources(notebook)))
            for code in sources(notebook):
                ast.parse(re.sub(r"^%.*", "", code, flags=re.MULTILINE))
        last = "\n".join(sources(found["99"]))
        assert all(f"{name}(" in last for name in ("read_parts", "train_parts", "compare_bleu"))


@pytest.mark.parametrize("page, module", PAGES.items())
def test_the_empty_one_keeps_prose_and_pictures_and_hides_the_code(folders, page, module):
    notebook = notebooks(folders[False])[page]
    code, prose = "\n\n".join(sources(notebook)), "\n".join(sources(notebook, "markdown"))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "## The equation" in prose and "$$" in prose and "## Exercises" in prose
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert "### Solutions" not in prose and "hide-cell" not in str(notebook)
    file = (workbook.CHECKOUT / "annotated" / module.replace(".", "/")).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    tasks = [node for node in ast.parse(source).body if getattr(node, "name", "") in CHECKS]
    for node in tasks:
        for part in [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef)]:
            last = ast.get_source_segment(source, part.body[-1])
            assert part.name == "extra_repr" or last not in code, f"{node.name} is given away"
        assert len(re.findall(rf"^(?:def|class) {node.name}\b", code, re.MULTILINE)) == 1
        assert ast.get_docstring(node).split("\n")[0] in code
        assert prose.count(f"**Write `{node.name}`.**") == code.count(f'check("{node.name}")') == 1
    assert prose.count("<summary>Hint 3") == len(tasks) > 0
    asked = {name: judge.args[0] for name, judge in exercises().items() if name.startswith(page)}
    for name, right in asked.items():
        (cell,) = [cell for cell in sources(notebook) if f'check("{name}", ' in cell]
        assert cell.count("    '") + cell.count('    "') == cell.count(": ...,\n") == len(right)
    assert code.count('check("') == len(tasks) + len(asked) and len(asked) >= 3


def test_links_lead_to_notebooks_of_the_workbook(folders):
    for folder in folders.values():
        for notebook in notebooks(folder).values():
            prose = "\n".join(sources(notebook, "markdown"))
            for target in re.findall(r"\]\((\w+\.ipynb)[#)]", prose):
                assert (folder / target).is_file(), target


@pytest.mark.parametrize("solutions", [False, True])
def test_an_empty_workbook_fails_each_check_and_a_solved_one_passes_all(folders, solutions):
    verdicts = {}
    for path in sorted(folders[solutions].glob("[01]*.ipynb")):
        space = {"__name__": "__main__"}
        ran = run_definitions(path, space)
        names = CHECKS.keys() | exercises().keys()
        verdicts |= {name: ran[name] or fault(name, space[name]) for name in names & ran.keys()}
    assert verdicts.keys() == names
    if solutions:
        assert verdicts == dict.fromkeys(names)
    else:
        for name, told in verdicts.items():
            what = "its code" if name in CHECKS else "a number, True or False"
            assert f"still empty: write {what} in place of the dots" in told


@pytest.mark.parametrize("folder, page, kind, words", [
    ("new", "09", ValueError, "no page 09 to write: give one of 01, 02"),
    ("full", None, FileExistsError, "holds something already: give a new folder"),
    ("outside", None, FileNotFoundError, "not part of an installed package; clone the repository"),
])  # fmt: skip
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, folder, page, kind, words):
    mine = write(tmp_path / "full" / "mine.ipynb", "mine")
    if folder == "outside":
        monkeypatch.setattr(workbook, "CHECKOUT", tmp_path)
    with pytest.raises(kind, match=words):
        write_workbook(tmp_path / folder, page)
    assert list(tmp_path.rglob("*.ipynb")) == [mine]


# Checking


def test_definitions_and_answers_are_run_and_nothing_else(tmp_path):
    path = write(
        tmp_path / "x.ipynb", "%matplotlib inline\nimport math", "x = 1 / 0",
        "def a():\n    return W\n\nprint(1 / 0)\nW = 2", "W = 3\ndef b() -> Missing:\n    return W",
        "def c(:\n", "class D:\n    y = 1 / 0", "raise SystemExit",
        'print("by")\nshare = 1 / 4\ncheck("06, exercise 4", {"at 2": share,\n})',
        'check("06, exercise 3", {"pairs": depends})')  # fmt: skip
    space = {}
    found = run_definitions(path, space)
    assert found["a"] is None is found["b"] and space["b"]() == space["a"]() == 3
    assert "math" in space and "x" not in space
    assert "SyntaxError" in found["c"] and "ZeroDivisionError" in found["D"]
    assert found["06, exercise 4"] is None and space["06, exercise 4"] == {"at 2": 0.25}
    assert found["06, exercise 3"] == "its cell raises NameError: name 'depends' is not defined"


def test_each_notebook_is_checked_in_a_process_of_its_own(tmp_path):
    write(tmp_path / "ann" / "06.ipynb", MASK.format("tril"), "print('out')")
    write(tmp_path / "=1+1.ipynb", MASK.format("triu"))
    leave = "import os\n\nclass Leave:\n    os._exit(3)"
    write(tmp_path / "ben" / "06.ipynb", MASK.format("tril"), leave)
    write(tmp_path / "cay" / "06.ipynb").write_text("no notebook")
    (tmp_path / "cay" / "z.ipynb").mkdir()
    for stray in ("ann/z_draft.ipynb", "ann/._06.ipynb", ".DS_Store", "README.txt"):
        (tmp_path / stray).write_text("no notebook")
    with pytest.raises(ValueError, match="nowhere holds no submissions: give a folder"):
        check_submissions(tmp_path / "nowhere")
    table = csv.DictReader(io.StringIO(check_submissions(tmp_path)))
    rows = {row["submission"]: row for row in table}
    told = {name: row["causal_mask"] for name, row in rows.items()}
    assert told.keys() == {"'=1+1.ipynb", "ann", "ben", "cay"}
    assert told["ann"] == "passed" and told["'=1+1.ipynb"].startswith("it is turned round")
    assert "ended with status 3" in told["ben"] and "06.ipynb is no notebook" in told["cay"]
    assert [row["passed"] for row in rows.values()] == ["0", "1", "0", "0"]
    assert rows["ann"]["padding_mask"] == "z_draft.ipynb is no notebook"
    assert rows["ben"]["padding_mask"] == "" and rows["ann"].keys() > CHECKS.keys()


def test_what_does_not_end_is_stopped(tmp_path):
    sleep = "class Forever:\n    import time\n    time.sleep(1000)"
    told = check_notebook(write(tmp_path / "x.ipynb", MASK.format("tril"), sleep), limit=0.5)
    assert told == {
        "causal_mask": "no verdict within 0.5 seconds: is there a loop that does not end?"}


def test_the_commands_write_and_check(tmp_path, capsys):
    assert cli.main(["workbook", str(tmp_path / "w"), "--page", "06"]) == 0
    (path,) = (tmp_path / "w").iterdir()
    assert cli.main(["check", str(path)]) == 1
    told = capsys.readouterr().out
    asked = sum(name.startswith("06") for name in exercises())
    assert told.count("empty: write its code") == 2
    assert told.count("empty: write a number") == asked > 0
    right, out = write(tmp_path / "class" / "right.ipynb", MASK.format("tril")), tmp_path / "a.csv"
    (right.parent / "._right.ipynb").write_text("of another system")
    assert cli.main(["check", str(right.parent)]) == 0
    assert cli.main(["check", str(tmp_path / "class"), "--csv", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("submission,passed,masked_softmax,")
    with pytest.raises(SystemExit):
        cli.main(["check", str(write(tmp_path / "none.ipynb", "x = 1"))])
    assert "holds no part that has a check" in capsys.readouterr().err


def test_the_teachers_table_agrees_with_the_path_and_the_exercises():
    text = (workbook.CHECKOUT / "notebooks" / "67_workbook.ipynb").read_text(encoding="utf-8")
    minutes = {stop.page: stop.minutes for stop in reading.two_hours()}
    rows = re.findall(r"\| (\d\d(?:, \d\d)+) \| (\d+) \| \d+ \| (\d+) \|", text)
    listed = [pages.split(", ") for pages, *_ in rows]
    assert sorted(sum(listed, [])) == [*PAGES, "99"]
    for pages, (_, read, asked) in zip(listed, rows, strict=True):
        assert abs(int(read) - sum(minutes.get(page, 0) for page in pages)) < 1
        assert int(asked) == sum(name[:2] in pages for name in exercises())


# A model of a reader's parts


def test_parts_that_pass_are_linked_and_the_library_s_take_the_place_of_others(tmp_path):
    inverted = "def padding_mask(ids, pad_id=0):\n    return ids == pad_id"
    with pytest.raises(ValueError, match="holds no notebooks: give the folder of a workbook"):
        read_parts(tmp_path)
    write(tmp_path / "06_masking.ipynb", MASK.format("tril"), inverted)
    imports = "from annotated.model.attention import DotProductAttention"
    write(tmp_path / "02_multi_head.ipynb", imports)
    write(tmp_path / "01_attention.ipynb", ATTENTION)
    parts, faults = read_parts(tmp_path)
    assert faults["causal_mask"] is None is faults["DotProductAttention"]
    assert "inverted" in faults["padding_mask"]
    model = parts["Transformer"](TransformerConfig(9, N=1, d_model=8, d_ff=8, h=2))
    own = parts["DotProductAttention"]
    assert type(model.decoder.layers[0].cross_attention.attention) is own
    assert own.forward.__code__.co_filename.endswith("01_attention.ipynb")
    for function in (type(model).decode, parts["IncrementalDecoder"].step):
        assert function.__globals__["causal_mask"] is parts["causal_mask"]
    assert parts["padding_mask"](torch.tensor([[4, 0]])).tolist() == [[[[True, False]]]]


def test_the_parts_train_and_translate(folders):
    parts, faults = read_parts(folders[True])
    assert faults == dict.fromkeys(CHECKS)
    model, tokenizer = train_parts(parts, steps=20, show_progress=False)
    assert type(model) is parts["Transformer"] and len(tokenizer) == model.config.vocab_size
    unseen = encode_pairs(load_corpus("toy").valid[:100], tokenizer)
    losses = [parts["validation_loss"](one, unseen) for one in (type(model)(model.config), model)]
    assert losses[1] < losses[0] - 0.5
    bleu = compare_bleu(parts, model, tokenizer, sentences=3)
    assert len(bleu) == 4 and bleu["the library's", "greedy"] > bleu["yours", "greedy"]


@pytest.mark.long
def test_a_solved_workbook_trains_to_bleu_95(folders):
    parts, _ = read_parts(folders[True])
    bleu = compare_bleu(parts, *train_parts(parts, show_progress=False))
    assert min(bleu.values()) >= 95, bleu
