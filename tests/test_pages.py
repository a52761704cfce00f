"""nbval finds what a page no longer gives, and `make book` names the page and the cell."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys

import nbformat
from PIL import Image

from notebooks import ROOT

RUN = """import json, pathlib, sys, book
print(json.dumps(book.execute(list(map(pathlib.Path, sys.argv[1:])), [])))"""


def picture(grey):
    """An output: a picture of 9 pixels, one of which has this level of grey."""
    image, data = Image.new("L", (3, 3)), io.BytesIO()
    image.putpixel((1, 1), grey)
    image.save(data, "png")
    return [nbformat.v4.new_output("display_data", {
        "image/png": base64.b64encode(data.getvalue()).decode()})]


def text(words):
    return [nbformat.v4.new_output("stream", name="stdout", text=words)]


def test_a_changed_digit_a_removed_output_and_an_exception_are_found_and_named(tmp_path):
    folder = tmp_path / "notebooks"
    for name in ("tools/notebooks.py", "notebooks/conftest.py", "notebooks/sanitize.cfg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = {"application/vnd.vegalite.v5+json": {"data": [1.25]}}
    shown = "from IPython.display import display\ndisplay({}, raw=True)"
    pages = {
        "01_equal": ("print(os.environ['OMP_NUM_THREADS'], object())\n"
                     + shown.format(picture(100)[0]["data"]),
                     [*text("1 <object object at 0x7f3a5c0ab1c0>\n"), *picture(104)]),
        "02_digit": ("print(f'{1 / 3:.4f}')", text("0.3323\n")),
        "03_removed": ("print(f'{1 / 3:.4f}')", []), "04_raises": ("1 / 0", []),
        "05_chart": (shown.format(chart).replace("1.25", "1.26"),
                     [nbformat.v4.new_output("display_data", chart)]),
        "06_silent": ("pass", text("0.3333\n")),
        "08_ignored": ("print(os.getpid())", text("1\n"), "nbval-ignore-output"),
        "09_picture": (shown.format(picture(100)[0]["data"]), picture(109)),
        "11_lost": ("pass", picture(100))}
    for name, (source, output, *tags) in pages.items():
        cells = [nbformat.v4.new_code_cell("import os", execution_count=1),
                 nbformat.v4.new_code_cell(source, execution_count=2, outputs=output,
                                           metadata={"tags": tags})]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = [sys.executable, "-c", RUN, *sorted(map(str, folder.glob("*.ipynb")))]
    done = subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True, timeout=1800)
    outcomes = json.loads(done.stdout.strip().split("\n")[-1])
    by_page = {name.removesuffix(".ipynb"): what for name, what in outcomes.items()}
    differ = ("02_digit", "03_removed", "05_chart", "06_silent", "09_picture", "11_lost")
    wrong = dict.fromkeys(differ, "differs in cell 2")
    assert by_page == dict.fromkeys(pages, "equal") | wrong | {"04_raises": "failed in cell 2"}
    for name, what in by_page.items():
        assert re.search(rf"^  {name}\.ipynb .* of 9   {what}$", done.stdout, re.M), done.stdout
    assert "0.3323" in done.stdout and "ZeroDivisionError" in done.stdout, "not shown"
