"""The length of the pages: words of prose, visible code, minutes of reading, and the two-hour path
of `docs/path.toml`.

    python tools/reading.py    a line for each page
"""

import re
import tomllib
from collections import namedtuple

import nbformat

from notebooks import ROOT, folded, pages

WORDS, LINES, PICTURES = 150, 25, 3  # that are read in a minute

# lines: of code that is not collapsed
Length = namedtuple("Length", "words lines pictures minutes")
# of the two-hour path: a page, and what of it to read (None: all)
Stop = namedtuple("Stop", "page sections why minutes")


def words(line):
    """Return the number of words of a line: texts between spaces with a letter or digit, which the
    bars of tables are not.
    """
    return sum(any(map(str.isalnum, word)) for word in line.split())


def length(path, sections=None):
    """Return the Length of a page, or of some of its sections and the text before the first.

    A section is a heading of the second level, or one of the third below it: "Checks", or "Checks /
    What the mask guarantees". Raises a ValueError for a section that the page does not have.
    """
    counts, section, part, seen = [0, 0, 0], "", "", set()
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for line in cell.source.split("\n"):
                if line.startswith("## "):
                    section = part = line.removeprefix("## ")
                elif line.startswith("### "):
                    part = f"{section} / {line.removeprefix('### ')}"
                seen |= {section, part}
                counts[0] += words(line) if not sections or {section, part} & {"", *sections} else 0
        elif "hide-cell" not in cell.metadata.get("tags", []) and (
            not sections or {section, part} & {"", *sections}):
            shown = [line for line in cell.source.split("\n") if line.strip()
                     and not re.match(r"#\||# alt: ", line)]
            counts[1] += 0 if folded(cell) else len(shown)
            counts[2] += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    if missing := set(sections or ()) - seen:
        raise ValueError(f"{path.name} has no section {', '.join(sorted(missing))}")
    return Length(*counts, counts[0] / WORDS + counts[1] / LINES + counts[2] / PICTURES)


def two_hours():
    """Return the stops of the two-hour path in order."""
    stops = tomllib.loads((ROOT / "docs" / "path.toml").read_text(encoding="utf-8"))["stop"]
    return [Stop(stop["page"], stop.get("sections"), stop["why"],
                 length(*pages([stop["page"]]), stop.get("sections")).minutes) for stop in stops]


if __name__ == "__main__":
    for path in pages():
        print(f"{path.stem:30}{{:8,}} words{{:6,}} lines{{:4}} pictures{{:6.0f}} "
              "minutes".format(*length(path)))
