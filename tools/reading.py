"""How long the pages are: words of prose, code in view, minutes of reading, and the two-hour path of `docs/path.toml`.

    python tools/reading.py    a line for each page, and the sums that a test holds
"""

import re
import tomllib
from dataclasses import dataclass

import nbformat

from notebooks import ROOT, folded, pages

WORDS, LINES, PICTURES = 220, 40, 5  # that a reader takes in within a minute


@dataclass
class Length:
    """How much there is to read in some cells."""

    words: int = 0
    lines: int = 0  # of code that is not folded away
    pictures: int = 0

    @property
    def minutes(self):
        return self.words / WORDS + self.lines / LINES + self.pictures / PICTURES


def lengths(path):
    """{heading of a section: Length} of a page, in order; what stands before the first section is under ""."""
    found, section, page = {"": Length()}, "", path.name[:2]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for line in cell.source.split("\n"):
                if line.startswith("## "):
                    section = line.removeprefix("## ")
                    found[section] = Length()
                found[section].words += len(line.split())
        elif "hide-cell" not in cell.metadata.get("tags", []):
            shown = [line for line in cell.source.split("\n") if line.strip() and not re.match(r"#\||# alt: ", line)]
            found[section].lines += 0 if folded(cell, page) else len(shown)
            found[section].pictures += sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return found


def whole(path, sections=None):
    """The Length of a page, or of some of its sections."""
    parts = [length for name, length in lengths(path).items() if not sections or name in ("", *sections)]
    return Length(*(sum(getattr(part, name) for part in parts) for name in ("words", "lines", "pictures")))


@dataclass
class Stop:
    """A stop of the two-hour path: a page, and what of it to read (None: all)."""

    page: str
    sections: list | None
    why: str
    minutes: float


def two_hours():
    """The stops of the path, in order; ValueError for a page or a section that is not there."""
    stops, by_number = [], {path.name[:2]: path for path in pages()}
    for stop in tomllib.loads((ROOT / "docs" / "path.toml").read_text(encoding="utf-8"))["stop"]:
        path, sections = by_number[stop["page"]], stop.get("sections")
        missing = set(sections or ()) - set(lengths(path))
        if missing:
            raise ValueError(f"docs/path.toml: {path.name} has no section {', '.join(sorted(missing))}")
        stops.append(Stop(stop["page"], sections, stop["why"], whole(path, sections).minutes))
    return stops


def main():
    everything = {path: whole(path) for path in pages()}
    print(f"{'page':30}{'words':>8}{'lines':>8}{'pictures':>10}{'minutes':>9}")
    for path, length in everything.items():
        print(f"{path.stem:30}{length.words:8,}{length.lines:8,}{length.pictures:10}{length.minutes:9.0f}")
    for name, some in (("01 to 08", [p for p in everything if "01" <= p.name[:2] <= "08"]), ("all", everything)):
        print(f"{name:30}{sum(everything[path].words for path in some):8,}{'':18}{sum(everything[path].minutes for path in some):9.0f}")
    print(f"the two-hour path: {sum(stop.minutes for stop in two_hours()):.0f} minutes")


if __name__ == "__main__":
    main()
