"""The pages of the site that are generated: the reference of the modules, the code of the model in
one page, the ledger of claims, and a table of sections, pages, modules and tests.
"""

import ast
import re
import shutil
import textwrap
from collections import defaultdict
from importlib import import_module

import ledger
import nbformat
import reading
from site_pages import relink

import annotated
from notebooks import ROOT, module_file, module_of, page_tests

SECTIONS = re.compile(r"\b[Ss]ections? \d[\d.]*(?:(?:, | and )\d[\d.]*)*")


def sections(text):
    """Return the numbers of the paper's sections that a text names, in order."""
    return list(dict.fromkeys(re.findall(r"\d+(?:\.\d+)*", " ".join(SECTIONS.findall(text)))))


class Page:
    """A notebook with the `sections` of the paper that it explains, its `module` and `tests`."""

    def __init__(self, path):
        self.path, self.module, notebook = path, module_of(path), nbformat.read(path, as_version=4)
        text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        self.title = text[0].partition("\n")[0].removeprefix("# ")
        self.line = text[0].partition("> ")[2].partition("\n")[0]
        where = next((cell.partition("\n\n")[2].partition("\n\n")[0]
                      for cell in text if cell.startswith("## Where it stands")), "")
        self.sections = sections(where) or sections(self.line)
        self.tests = ROOT / page_tests(path) if self.module else None

    def links(self):
        """Return the line of links below the title of the page, as Markdown."""
        parts = [f"{reading.length(self.path).minutes:.0f} minutes"]
        parts += [f"Paper: {format_sections(self.sections)}"] if self.sections else []
        if self.module:
            parts += [f"Code: [annotated.{self.module}](api/{self.module}.md)",
                      f"[Its tests](api/{self.module}.md#tests)"]
        parts.append(f"{{download}}`This notebook <notebooks/{self.path.name}>`")
        return " · ".join(parts)


def format_sections(numbers):
    """Return the numbers of sections in words."""
    return f"section{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def table(header, rows):
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |"
                     for line in lines)


def constants(module):
    """Return {name: Sphinx directive} of the public constants of a module, shapes among them."""
    values = {}
    for node in ast.parse(module_file(module).read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
            values |= {ast.unparse(name): ast.unparse(value) for name, value in pairs}
    short = {name: textwrap.shorten(values[name], 100, placeholder=" …")
             for name in ast.literal_eval(values["__all__"]) if name in values}
    return {name: f".. py:data:: {name}\n   :value: {text}\n" for name, text in short.items()}


def module_page(page):
    """Return the Markdown of the page on one module: its docstrings and its tests."""
    paper = f" · Paper: {format_sections(page.sections)}" if page.sections else ""
    assigned = constants(page.module)
    text = [f"# annotated.{page.module}\n\n{{.links}}",
            f"Explained in [{page.title}](../{page.path.name}){paper}\n\n```{{eval-rst}}",
            f".. automodule:: annotated.{page.module}", "   :members:", "   :undoc-members:",
            "   :member-order: bysource",
            *([f"   :exclude-members: {', '.join(assigned)}"] if assigned else []), "",
            *assigned.values(), "```\n"]
    count = len(re.findall(r"^\s*def test_", page.tests.read_text("utf-8"), re.MULTILINE))
    file = page.tests.relative_to(ROOT)
    text += ["## Tests\n", '<details class="listing">'
             f"<summary>{file}: {count} tests</summary>\n", f"```{{literalinclude}} ../{file}",
             ":language: python\n```\n\n</details>\n"]
    return "\n".join(text)


def plain_code(module):
    """Return the source of a module without the comments of the export and the imports from its own
    package.
    """
    source = module_file(module).read_text("utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    for node in tree.body:
        exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if exported or isinstance(node, ast.ImportFrom) and (
            node.level or node.module.startswith("annotated.")):
            lines[node.lineno - 1 : node.end_lineno] = ["#"] * (node.end_lineno - node.lineno + 1)
    kept = "\n".join(line for line in lines if not line.startswith("# ") and line != "#")
    return re.sub(r"\n{3,}", "\n\n\n", kept)


def model_code(pages):
    """Return the complete code of the model as Markdown, in the order of the pages."""
    return "\n\n".join(
        f"## [{page.title}]({page.path.name})\n\n```python\n{plain_code(page.module)}\n```"
        for page in pages if "01" <= page.path.name[:2] <= "08")


def sections_table(pages):
    """Return which page, module and tests belong to a section of the paper, as Markdown."""
    rows = []
    for page in pages:
        code = f"[annotated.{page.module}](api/{page.module}.md)" if page.module else "–"
        test = f"[{page.tests.name}](api/{page.module}.md#tests)" if page.tests else "–"
        rows.append([", ".join(page.sections) or "–", f"[{page.title}]({page.path.name})", code,
                     test])
    return table(["Section", "Page", "Code", "Tests"], rows)


def library_page(pages):
    """Return the Markdown of the front page of the reference: the names in `annotated` itself, then
    the modules by package.
    """
    names, packages = defaultdict(list), defaultdict(list)
    for name, module in annotated._HOMES.items():
        names[module].append(f"`{name}`")
    for page in pages:
        packages[page.module.rpartition(".")[0]].append(page)
    parts = ["# The library",
             "Every module is exported by the page of the book that explains it."]
    rows = [[", ".join(own), f"[annotated.{module}]({module}.md)"] for module, own in names.items()]
    parts += ["## From `annotated` itself",
              "`from annotated import Transformer, translate`: what most programs need. Each name "
              "is loaded when it is first used.", table(["Names", "Module"], rows)]
    for package, members in packages.items():
        rows = [[f"[annotated.{page.module}]({page.module}.md)", page.line] for page in members]
        head = ["## Modules outside the packages"]
        if package:
            document = import_module(f"annotated.{package}").__doc__
            head = [f"## annotated.{package}", document.partition("\n")[0]]
        parts += [*head, table(["Module", "What it holds"], rows)]
    modules = "\n".join(page.module for page in pages)
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{modules}\n```\n"])


def write(pages, claims, folder):
    """Write the reference into `folder`, with a copy of the tests, and complete the pages of docs/
    on model, sections and ledger; claims: the rows of the ledger.
    """
    (folder / "api").mkdir()
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    modules = [page for page in pages if page.module]
    for page in modules:
        (folder / "api" / f"{page.module}.md").write_text(module_page(page), "utf-8")
    (folder / "api" / "index.md").write_text(library_page(modules), "utf-8")
    for name, text in (("model", model_code(pages)), ("sections", sections_table(pages)),
                       ("ledger", relink(ledger.document(claims)))):
        with open(folder / f"{name}.md", "a", encoding="utf-8") as file:
            file.write(text)
