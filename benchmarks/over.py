"""What all stored runs found together: worst, median and best of every ratio that is claimed, with the machines named."""

import itertools
import json
import statistics
from pathlib import Path
from string import ascii_uppercase

from . import report, work

LATEST = 3  # so many runs of each cell count as recent


def stored(folder):
    """The runs in a folder by letter (A to Z without I and O, AA, AB, …), in the order of their files' numbers: that of time."""
    files = sorted(Path(folder).glob("*.json"), key=lambda file: file.stem)
    readable = ascii_uppercase.replace("I", "").replace("O", "")  # in a picture an I looks like a line, and an O like a dot
    letters = itertools.chain(readable, map("".join, itertools.product(readable, repeat=2)))
    return {letter: json.loads(file.read_text(encoding="utf-8")) for file, letter in zip(files, letters, strict=False)}


def figures(runs, claim):
    """{letter: figure} of the runs that measured a claim."""
    found = {letter: report.figure(run, claim) for letter, run in runs.items()}
    return {letter: value for letter, value in found.items() if value is not None}


def latest(found):
    """Of figures by letter those of the last runs: of recent programs, where all of them are of all that it has been."""
    return dict(list(found.items())[-LATEST:])


def spread(found, claim):
    """((letter, worst), median, (letter, best)) of figures by letter; of memory less is better."""
    order = sorted(found.items(), key=lambda pair: pair[1], reverse=claim.what == "of the peak memory")
    return order[0], statistics.median(found.values()), order[-1]


def met(found, claim):
    """(how many of the figures are as aimed at, whether the median is as aimed at for itself: None if nothing is)."""
    return (sum(report.reached(claim, value) for value in found.values()),
            report.reached(claim, statistics.median(found.values()), claim.median) if claim.median else None)


def reached_by_all(runs, some=dict):
    """(aims that every run reached which measured them, and the median where it has one of its own; aims that some run measured).

    some: `latest`, to ask this of the last runs only.
    """
    known = [(len(found), *met(found, claim)) for claim in work.AIMS if (found := some(figures(runs, claim)))]
    return sum(count == every and middle is not False for every, count, middle in known), len(known)


def ceilings(runs, claim):
    """The lowest and the highest share of its machine's own ceiling that ours reached; None where no run tells."""
    shares = [share for run in runs.values() if (share := report.of_ceiling(run, claim)) is not None]
    return (min(shares), max(shares)) if shares else None


# -- tables -----------------------------------------------------------------------------------------------------------


def marks(run):
    """What must be said of a run: that only some of it is known, that some cells only were asked for, or that others used its machine."""
    return ["incomplete"] * ("found" in run) + ["some cells"] * ("--only" in run["command"]) + ["under load"] * run["disturbed"]


def machines_table(runs):
    """The runs and their machines as a table of Markdown: rates, load, revision."""
    lines = ["| run | machine | fp32, bf16, int8: billion operations/s | GB/s | µs a call | others took at most | revision |",
             "|---|---|---:|---:|---:|---:|---|"]
    for letter, run in runs.items():
        rates, load = report.best_rates(run), [share for share in run["load"].values() if share is not None]
        products = ", ".join(f"{rates[name] / 1e9:,.0f}" if name in rates else "?" for name in ("fp32", "bf16", "int8"))
        call = f"{rates['call_us']:.1f}" if "call_us" in rates else "?"
        lines.append(f"| {letter} | {'; '.join([report.machine_name(run['machine']), *marks(run)])} | {products} "
                     f"| {rates['bandwidth'] / 1e9:.0f} | {call} | {f'{max(load):.0%}' if load else '?'} | {run['revision'][:7]} |")
    return "\n".join(lines)


def claims_table(runs, claims, aims=False):
    """Claims as a table of Markdown; with what is aimed at, how many runs reached it, and what the worst of the last ones found."""
    last = ["aim", "reached", f"last {LATEST}"] if aims else ["runs"]
    heads = ["cell", "ours", "against", "worst", "median", "best", "of the ceiling", *last]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|" + "---:|" * (len(heads) - 3)]
    for claim in claims:
        found, (cell, ours, theirs, what) = figures(runs, claim), claim.key
        if not found:
            continue
        (low, worst), middle, (high, best) = spread(found, claim)
        shares = ceilings(runs, claim) if what == "times as fast" else None
        ours = ours.removeprefix("annotated ")
        cells = [cell if what == "times as fast" else f"{cell}: {what}", ours, theirs or "", f"{worst:.2f} {low}", f"{middle:.2f}",
                 f"{best:.2f} {high}", f"{shares[0]:.0%}–{shares[1]:.0%}" if shares else ""]
        (late, value), *_ = spread(latest(found), claim)
        mark = "✓" if report.reached(claim, value) else "✗"
        cells += [aim_of(claim), verdict(found, claim), f"{value:.2f} {late} {mark}"] if aims else [str(len(found))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def aim_of(claim):
    """What is aimed at, in a few characters."""
    sign = "≤" if claim.what == "of the peak memory" else "≥"
    return f"{sign} {claim.every}" + (f", median {sign} {claim.median}" if claim.median else "")


def verdict(found, claim):
    """How many runs reached an aim, and whether the median did, in a few characters."""
    count, middle = met(found, claim)
    return f"{count} of {len(found)}" + {True: ", median ✓", False: ", median ✗", None: ""}[middle]


def tables(runs):
    """The whole comparison as Markdown."""
    parts = ["# What all stored runs found", machines_table(runs), "A letter behind a figure names its run. "
             f"A run is under load if others took more than {report.FOREIGN:.0%} of the machine; it counts all the same.",
             "## aims", claims_table(runs, work.AIMS, aims=True), "## every ratio", claims_table(runs, work.claims())]
    parts += [f"## run {letter}\n\n{report.split_table(run)}" for letter, run in runs.items() if report.split(run)]
    return "\n\n".join(parts)


# -- a picture --------------------------------------------------------------------------------------------------------

REFERENCES = {"train": "torch", "write": "ctranslate2"}


def rows(task):
    """The rows of the picture: {(cell, ours): {system of theirs: claim}}, in training by precision, in writing each at its best."""
    found = {}
    for claim in work.claims():
        alike = claim.cell.startswith("train") if task == "train" else claim.ours.precision == "best"
        if alike and claim.theirs.order == "bucketed":
            found.setdefault((claim.cell, claim.ours), {})[claim.theirs.system] = claim
    return found


def sides(runs, task):
    """The rows of the picture by where their runs lie beside the reference: {"ahead in every run": names, …}."""
    found = {"ahead in every run": [], "ahead in some runs": [], "ahead in none": []}
    for (cell, ours), claims in rows(task).items():
        ahead = [value > 1 for value in figures(runs, claims[REFERENCES[task]]).values()]
        if ahead:
            place = "ahead in every run" if all(ahead) else "ahead in some runs" if any(ahead) else "ahead in none"
            found[place].append(label(cell, ours))
    return found


def label(cell, ours):
    """A row's name."""
    return f"{cell.removeprefix('train, ').replace(' lengths', '')}, {ours.precision}".removesuffix(", best")


def lanes(found, apart):
    """A lane for each figure by letter, as few as keep figures of one lane so many times as large as one another, and their number."""
    ends, places = [], {}
    for letter, value in sorted(found.items(), key=lambda pair: pair[1]):
        lane = next((lane for lane, end in enumerate(ends) if value >= apart * end), len(ends))
        ends[lane:lane + 1] = [value]
        places[letter] = lane
    return places, len(ends)


def draw(runs):
    """A row for each cell: by letters how many times as fast as the reference each run found ours, by dots as the other peers."""
    from matplotlib import pyplot as plt

    panels = {task: rows(task) for task in REFERENCES}
    figure, axes = plt.subplots(2, 1, figsize=(7.4, 0.4 * sum(map(len, panels.values())) + 1.4), layout="constrained",
                                height_ratios=[len(panel) for panel in panels.values()])
    titles = ("Training: times as fast as torch.nn.Transformer in the same precision",
              "Writing: times as fast as CTranslate2, each in its best precision")
    for axis, title, (task, panel) in zip(axes, titles, panels.items(), strict=True):
        _draw_panel(axis, runs, panel, REFERENCES[task])
        axis.set_title(title, fontsize=9, loc="left")
    return figure


def _draw_panel(axis, runs, panel, reference):
    """Its rows on an axis of their own; bold: the last runs of each row."""
    from annotated import charts

    drawn = [(label(claim.cell, claim.ours), system, letter, value) for claims in panel.values() for system, claim in claims.items()
             for letter, value in figures(runs, claim).items()]
    values = [1, *(row[-1] for row in drawn)]
    for place, claims in enumerate(panel.values()):
        for claim in (claim for system, claim in claims.items() if system != reference):
            found = figures(runs, claim)
            axis.plot(found.values(), [place] * len(found), "o", color=charts.COLOURS["data"], markersize=3, zorder=2)
        found = figures(runs, claims[reference])
        lane_of, count = lanes(found, (max(values) / min(values)) ** 0.03)
        for letter, value in found.items():
            axis.text(value, place + 0.23 * (lane_of[letter] - (count - 1) / 2), letter, ha="center", va="center", fontsize=8, zorder=3,
                      fontweight="bold" if letter in latest(found) else "normal",
                      color=charts.COLOURS["key_text" if runs[letter]["disturbed"] else "query"])
    charts.remember(axis, ("cell", "against", "run", "times as fast"), drawn)
    for place in range(0, len(panel), 2):
        axis.axhspan(place - 0.5, place + 0.5, color=charts.COLOURS["grid"], alpha=0.4, linewidth=0, zorder=0)
    axis.axvline(1, color=charts.COLOURS["text"], linewidth=1)
    axis.set_yticks(range(len(panel)), [label(*row) for row in panel], fontsize=8)
    axis.set_ylim(len(panel) - 0.5, -0.5)
    axis.set(xscale="log", xlim=(0.9 * min(values), 1.1 * max(values)))
    ticks = [tick for tick in (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 16) if min(values) <= tick <= max(values)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


# -- what the two READMEs quote ---------------------------------------------------------------------------------------


def quote(runs, cell, ours, theirs, what="times as fast"):
    """Worst, median and best of a ratio or a share, and of how many runs if not of all."""
    claim = work.Claim(cell, work.Entrant(*ours), theirs and work.Entrant(*theirs), what=what)
    found = figures(runs, claim)
    (_, worst), middle, (_, best) = spread(found, claim)
    few = f" ({len(found)} run{'s' * (len(found) > 1)})" if len(found) < len(runs) else ""
    return " / ".join(f"{value:.2f}" if theirs else f"{value:.0%}" for value in (worst, middle, best)) + few


def extent(runs):
    """So many runs, on machines of so many names; one name may stand for several speeds, as the measured rates tell."""
    return f"{len(runs)} runs on machines of {len({report.machine_name(run['machine']) for run in runs.values()})} names"


NAMES = {"torch": "torch.nn.Transformer", "marian": "MarianMT", "joeynmt": "JoeyNMT"}
WITHDRAWN = ("no figure beside CTranslate2, since all these runs gave one translation two threads, which on two virtual processors "
             "wait for each other")


def quickest_peer(runs, cell, precision):
    """Which of the PyTorch peers was the quickest in a cell, and in how many of the runs that measured it."""
    asked, names = work.Entrant("others", precision), []
    for run in runs.values():
        rows = [row for one in run.get("cells", []) if one["name"] == cell and (row := report.row_of(one, asked))]
        names += [rows[0]["system"]] if rows else []
    often = dict.fromkeys(sorted(names, key=names.count, reverse=True))
    return ", ".join(f"{NAMES.get(name, name)} in {names.count(name)}" for name in often)


def beside_the_quickest(runs):
    """Training of base beside the quickest peer of each run, in both precisions, with the names of the peers."""
    cell, parts = "train, base, equal lengths, fair", []
    for kind in ("bf16", "fp32"):
        ratio = quote(runs, cell, ("annotated", kind), ("others", kind))
        parts.append(f"in {kind} {ratio} × the quickest peer ({quickest_peer(runs, cell, kind)})")
    return ", ".join(parts)


def row_of_readme(runs):
    """The row of README.md on speed."""
    head = "| speed of training, base, equal dropout, worst / median / best of stored runs"
    return f"{head} | {beside_the_quickest(runs)}; translating: {WITHDRAWN} |"


def row_of_results(runs):
    """The row of results/README.md on speed, without its last column."""
    parts = [f"training {beside_the_quickest(runs)}"]
    for table, words in (("fair", "with dropout in the same places"), ("people", "as people write it")):
        cell = f"train, base, equal lengths, {table}"
        bf16, fp32 = (quote(runs, cell, ("annotated", kind), ("torch", kind)) for kind in ("bf16", "fp32"))
        parts.append(f"training in bf16 {bf16} × `torch.nn.Transformer` {words}, in fp32 {fp32} ×")
    share = quote(runs, "train, base, equal lengths, fair", ("annotated", "bf16"), None, "of the matrix rate")
    parts += [f"of the measured bf16 matrix rate, with dropout in the same places, {share}", f"translating: {WITHDRAWN}"]
    load, part = (sum(mark in marks(run) for run in runs.values()) for mark in ("under load", "incomplete"))
    return ("| speed beside `torch.nn.Transformer`, MarianMT, x-transformers, JoeyNMT and CTranslate2, the paper's base model, random "
            f"text, worst / median / best of all stored runs | {'; '.join(parts)} | `make bench`, {extent(runs)}: {load} under load, "
            f"{part} incomplete and copied by hand; [a file for each run](./bench), page 24 |")
