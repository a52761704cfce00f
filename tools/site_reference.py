"""What the site says beside the pages: the reference of the modules, and which section, page,
module and test belong together.
"""

import ast
import re
from importlib import import_module

import ledger
import nbformat
import reading
from site_pages import relink

import annotated
from notebooks import ROOT, module_file, module_of, page_tests

TESTS = ROOT / "tests"
SECTIONS = re.compile(r"\b[Ss]ections? (\d[\d.]*\d|\d)((?:, | and | to )\d(?:[\d.]*\d)?)*")


def sections(text):
    """The numbers of the paper's sections that a text names, in order: "Sections 5.1 to 5.3" are
    three.
    """
    numbers = []
    for match in SECTIONS.finditer(text):
        for joint, number in re.findall(r"(, | and | to |)(\d+(?:\.\d+)*)",
                                        match[0].split(" ", 1)[1]):
            if joint == " to ":
                stem, _, last = number.rpartition(".")
                first = int(numbers[-1].rpartition(".")[2]) + 1
                numbers += [f"{stem}.{k}" for k in range(first, int(last))]
            numbers.append(number)
    return list(dict.fromkeys(numbers))


class Page:
    """One notebook, and what belongs to it: `sections` of the paper, `module`, `tests`."""

    def __init__(self, path):
        self.path, self.module, notebook = path, module_of(path), nbformat.read(path, as_version=4)
        text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        self.title = text[0].partition("\n")[0].removeprefix("# ")
        self.line = text[0].partition("> ")[2].partition("\n")[0]
        where = next((cell.partition("\n\n")[2].partition("\n\n")[0]
                      for cell in text if cell.startswith("## Where it stands")), "")
        self.sections = sections(where) or sections(self.line)
        tests = page_tests(path)
        self.tests = ROOT / tests if tests and (ROOT / tests).exists() else None

    def links(self):
        """The line of links below the title of the page, as Markdown."""
        parts = [f"{reading.length(self.path).minutes:.0f} minutes"]
        parts += [f"Paper: {numbered(self.sections)}"] if self.sections else []
        if self.module:
            parts.append(f"Code: [annotated.{self.module}](api/{self.module}.md)")
        if self.tests:
            parts.append(f"[Its tests](api/{self.module}.md#tests)")
        parts.append(f"{{download}}`This notebook <notebooks/{self.path.name}>`")
        return " · ".join(parts)


def numbered(numbers):
    return f"section{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else "–"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |"
                     for line in lines)


def constants(module):
    """(name, directive) for the public names of a module that it assigns: constants, and names of
    shapes.
    """
    tree = ast.parse(module_file(module).read_text())
    assigned = {}
    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        for target in node.targets:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts,
                                   strict=True) if several else [(target, node.value)]:
                assigned[ast.unparse(name)] = value
    for name in ast.literal_eval(assigned["__all__"]):
        if name in assigned:
            value = ast.unparse(assigned[name])
            value = value if len(value) < 100 else value[:80] + " …"
            yield name, f".. py:data:: {name}\n   :value: {value}\n"


def module_page(page):
    """Markdown of the page on one module: its docstrings, and its tests."""
    paper = f" · Paper: {numbered(page.sections)}" if page.sections else ""
    assigned = dict(constants(page.module))
    text = [f"# annotated.{page.module}\n\n{{.links}}",
            f"Explained in [{page.title}](../{page.path.name}){paper}\n\n```{{eval-rst}}",
            f".. automodule:: annotated.{page.module}", "   :members:", "   :undoc-members:",
            "   :member-order: bysource",
            *([f"   :exclude-members: {', '.join(assigned)}"] if assigned else []), "",
            *assigned.values(), "```\n"]
    if page.tests:
        count = len(re.findall(r"^\s*def test_", page.tests.read_text(), re.MULTILINE))
        file = page.tests.relative_to(ROOT)
        text += ["## Tests\n", '<details class="listing">'
                 f"<summary>{file}: {count} tests</summary>\n", f"```{{literalinclude}} ../{file}",
                 ":language: python\n```\n\n</details>\n"]
    return "\n".join(text)


def plain_code(module):
    """The source of a module as a reader wants it: without the marks of the export and the imports
    of its own package.
    """
    source = module_file(module).read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    for node in tree.body:
        exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if exported or isinstance(node, ast.ImportFrom) and (
            node.level or node.module.startswith("annotated.")):
            lines[node.lineno - 1 : node.end_lineno] = ["#"] * (node.end_lineno - node.lineno + 1)
    kept = "\n".join(line for line in lines if not line.startswith("# ") and line != "#")
    return re.sub(r"\n{3,}", "\n\n\n", kept)


def model_page(pages):
    """Markdown of the page that shows the model in one sitting: the exported code of its modules,
    one after the other.
    """
    model = [page for page in pages if "01" <= page.path.name[:2] <= "08"]
    parts = [f"## [{page.title}]({page.path.name})\n\n```python\n{plain_code(page.module)}\n```"
             for page in model]
    line = "The complete code of the model, in the order of the pages that export it."
    return "\n\n".join(["# The model in one sitting", line, *parts]) + "\n"


def sections_page(pages):
    """Markdown of the page that joins paper, book, code and tests, read from the notebooks and the
    tests themselves.
    """
    rows = []
    for page in pages:
        code = f"[annotated.{page.module}](api/{page.module}.md)" if page.module else "–"
        test = f"[{page.tests.name}](api/{page.module}.md#tests)" if page.tests else "–"
        rows.append([numbered(page.sections).partition(" ")[2] or "–",
                     f"[{page.title}]({page.path.name})", code, test])
    return "\n\n".join([
        "# Paper, book, code, tests",
        "Which page explains a section of the paper, which module it exports, and which tests "
        "check it. [The ledger of claims](ledger.md) lists what the paper claims and what came "
        "out.",
        table(["Section", "Page", "Code", "Tests"], rows)])


def ledger_page(rows):
    """Markdown of the page on the claims, whose links lead to the cells and tests of the site."""
    return "\n\n".join([
        "# The ledger of claims",
        "Each row is a claim of the paper that a program can check, with the cells that show it, "
        "the tests that guard it, and a verdict and a figure for each of its parts. An exact part "
        "is asserted: its page stops with an error if it fails. A measured part says what the run "
        "found, whether it agrees with the paper or not. The sentences are ours; the rest is read "
        "from the pages and tests.",
        ledger.summary(rows), relink(ledger.markdown(rows))])


def face():
    """{module: the names of it that can be had from `annotated` itself}, in their order there."""
    names = {}
    for name, module in annotated._HOMES.items():
        names.setdefault(module, []).append(name)
    return names


def library_page(pages):
    """Markdown of the front page of the reference: what `annotated` itself offers, then package by
    package.
    """
    parts = ["# The library",
             "Every module is exported by the page of the book that explains it."]
    rows = [[", ".join(f"`{name}`" for name in names), f"[annotated.{module}]({module}.md)"]
            for module, names in face().items()]
    parts += ["## From `annotated` itself",
              "`from annotated import Transformer, translate`: what most programs need. Each name "
              "is loaded when it is first used.", table(["Names", "Module"], rows)]
    packages = {}
    for page in pages:
        packages.setdefault(page.module.rpartition(".")[0], []).append(page)
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
    """Write all of this into `folder`, beside copies of the tests.

    `claims` are the rows of the ledger.
    """
    (folder / "api").mkdir()
    for path in TESTS.rglob("test_*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    modules = [page for page in pages if page.module]
    for page in modules:
        (folder / "api" / f"{page.module}.md").write_text(module_page(page))
    (folder / "api" / "index.md").write_text(library_page(modules))
    (folder / "model.md").write_text(model_page(pages))
    (folder / "sections.md").write_text(sections_page(pages))
    (folder / "ledger.md").write_text(ledger_page(claims))
