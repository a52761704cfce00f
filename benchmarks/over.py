"""What all stored runs found together: worst, median and best of every figure that is claimed, with
the peers and machines named.
"""

import json
import statistics
from pathlib import Path

from . import report, work

NAMES = {"torch": "`torch.nn.Transformer`", "marian": "MarianMT",
         "x-transformers": "x-transformers", "joeynmt": "JoeyNMT", "ctranslate2": "CTranslate2"}
ALIKE = 1.5  # rates of machines of one kind differ by no more than so many times


def stored(folder):
    """The runs in a folder, in the order of their files' numbers: that of time."""
    return [json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(Path(folder).glob("*.json"))]


def figures(runs, claim):
    """What the runs that measured a claim found: [(run's number, figure, row of the peer), …]."""
    found = [(number, report.figure(run, claim)) for number, run in enumerate(runs, 1)]
    return [(number, *result) for number, result in found if result]


def spread(found, claim):
    """Worst, median and best of the figures; of memory less is better."""
    order = sorted((value for _, value, _ in found), reverse=claim.what == work.MEMORY)
    return order[0], statistics.median(order), order[-1]


def peers(found):
    """The names of the systems beside whom we stand, most often met first."""
    systems = [row["system"] for *_, row in found if row]
    return " or ".join(NAMES[system] for system in sorted(dict.fromkeys(systems), key=systems.count,
                                                          reverse=True))


def reached_by_all(runs):
    """(aims that every run reached which measured them, aims that some run measured)."""
    known = [all(report.reached(claim, value) for _, value, _ in found)
             for claim in work.AIMS if (found := figures(runs, claim))]
    return sum(known), len(known)


def kinds(runs):
    """The kinds of machine, told by what was measured, not by a name: [numbers of the runs, …]."""
    found = []
    for number, run in enumerate(runs, 1):
        rates = report.best_rates(run)
        for first, numbers in found:
            if all(max(rates[name] / first[name], first[name] / rates[name]) <= ALIKE
                   for name in ("fp32", "bf16", "int8", "bandwidth")):
                numbers.append(number)
                break
        else:
            found.append((rates, [number]))
    return [numbers for _, numbers in found]


# -- tables ----------------------------------------------------------------------------------------


def machines_table(runs):
    """The runs and their machines as a table of Markdown: rates, load, revision."""
    lines = ["| run | machine | fp32, bf16, int8: billion operations/s | GB/s | µs per call | "
             "others took at most | revision |", "|---|---|---:|---:|---:|---:|---|"]
    for number, run in enumerate(runs, 1):
        rates = report.best_rates(run)
        products = ", ".join(f"{rates[name] / 1e9:,.0f}" for name in ("fp32", "bf16", "int8"))
        name = report.machine_name(run["machine"]) + "; under load" * run["disturbed"]
        load = max(run["load"].values())
        lines.append(f"| {number} | {name} | {products} | {rates['bandwidth'] / 1e9:.0f} | "
                     f"{rates['call_us']:.1f} | {load:.0%} | {run['revision'][:7]} |")
    return "\n".join(lines)


def claims_table(runs):
    """All claims as a table of Markdown: against whom, worst, median and best, what is aimed at,
    and whether every run reached it.
    """
    lines = ["| cell | ours is … | beside | worst | median | best | aim | every run |",
             "|---|---|---|---:|---:|---:|---:|---|"]
    for claim in work.AIMS:
        if found := figures(runs, claim):
            worst, middle, best = spread(found, claim)
            lines.append(f"| {claim.name} | "
                         f"{claim.what} | {peers(found)} | {worst:.2f} | {middle:.2f} | {best:.2f} "
                         f"| {'≤' if claim.what == work.MEMORY else '≥'} {claim.aim} | "
                         f"{'✓' if report.reached(claim, worst) else '✗'} |")
    return "\n".join(lines)


def settings_table(runs):
    """Of each cell of claims of speed the two that stand beside each other, with their settings and
    tokens per second.
    """
    lines = ["| run | cell | ours | threads | tokens/s | quickest peer | threads | tokens/s |",
             "|---|---|---|---:|---:|---|---:|---:|"]
    for number, run in enumerate(runs, 1):
        for claim in (claim for claim in work.AIMS if claim.what == work.SPEED):
            for cell in (cell for cell in run["cells"] if cell["name"] == claim.cell):
                both = [max(rows, key=report.speed)
                        for mine in (True, False) if (rows := report.rows_of(cell, mine, claim))]
                if len(both) == 2:
                    words = (f"{row['name']} | {report.setting_of(row)} | {report.speed(row):,.0f}"
                             for row in both)
                    lines.append(f"| {number} | {claim.cell} | {' | '.join(words)} |")
    return "\n".join(lines)


def tables(runs):
    """The whole comparison as Markdown."""
    parts = ["# What all stored runs found", machines_table(runs), "## aims", claims_table(runs),
             "## settings", settings_table(runs)]
    parts += [f"## run {number}\n\n{report.split_table(run)}"
              for number, run in enumerate(runs, 1) if report.split(run)]
    return "\n\n".join(parts)


# -- a picture -------------------------------------------------------------------------------------


def draw(runs):
    """A row for each claim of speed, a dot for each run: how many times as fast ours is as the
    quickest peer, who is named.
    """
    from matplotlib import pyplot as plt

    from annotated import charts
    from annotated.charts import theme

    rows = [(claim, found) for claim in work.AIMS if claim.what == work.SPEED
            and (found := figures(runs, claim))]
    values = [1, *(value for _, found in rows for _, value, _ in found)]
    figure, axis = plt.subplots(figsize=(7.4, 0.34 * len(rows) + 1), layout="constrained")
    for place, (_, found) in enumerate(rows):
        for number, value, _ in found:
            colour = charts.COLOURS["key_text" if runs[number - 1]["disturbed"] else "query"]
            axis.plot(value, place, "o", color=colour, markersize=5)
        axis.text(1.02, place, peers(found).replace("`", ""), fontsize=8, va="center",
                  transform=axis.get_yaxis_transform())
    numbers = [(claim.name, row["name"], number, value)
               for claim, found in rows for number, value, row in found]
    theme.remember(axis, ("cell", "quickest peer", "run", "times as fast"), numbers)
    axis.axvline(1, color=charts.COLOURS["text"], linewidth=1)
    axis.set_yticks(range(len(rows)), [claim.name for claim, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set(xscale="log", xlim=(0.9 * min(values), 1.1 * max(values)))
    ticks = [tick for tick in (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
             if 0.9 * min(values) <= tick <= max(values)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_title("Ours, times as fast as the quickest peer", fontsize=9, loc="left")
    return figure


# -- what the two READMEs quote --------------------------------------------------------------------


def claim_of(cell, precision="best", what=work.SPEED, among=()):
    """The claim of this cell among those that are aimed at."""
    wanted = cell, precision, what, among
    return next(claim for claim in work.AIMS
                if (claim.cell, claim.precision, claim.what, claim.among) == wanted)


def quote(runs, *claim, named=True, **more):
    """Worst and median of a claim, and beside whom; arguments as for `claim_of`."""
    claim = claim_of(*claim, **more)
    found = figures(runs, claim)
    worst, middle, _ = spread(found, claim)
    form = "{:.0%}" if claim.what == work.SHARE else "{:.2f}"
    figure = " / ".join(map(form.format, (worst, middle)[: len(found)]))  # one run has one figure
    return figure + f" × {peers(found)}" * (named and claim.what != work.SHARE)


def greedy(runs, size, among=()):
    """What greedy decoding of one sentence and of 32 found, and beside whom."""
    cells = [f"greedy, {size}, batch {batch}" for batch in (1, 32)]
    beside = peers([one for cell in cells for one in figures(runs, claim_of(cell, among=among))])
    return (f"{size} {' and '.join(quote(runs, cell, among=among, named=False) for cell in cells)} "
            f"× {beside}")


def extent(runs):
    """So many runs, on so many kinds of machine."""
    count, kind = len(runs), len(kinds(runs))
    return (f"{'worst / median of ' * (count > 1)}{count} run{'s' * (count > 1)} on {kind} "
            f"kind{'s' * (kind > 1)} of machine")


def of_code(runs):
    """Which code was measured."""
    revisions = ", ".join(dict.fromkeys(f"`{run['revision'][:7]}`" for run in runs))
    return f"at {revisions}"


def row_of_readme(runs):
    """The row of README.md on speed."""
    train = [f"{kind} {quote(runs, 'train, base', kind)}" for kind in ("bf16", "fp32")]
    best, alone = ("; ".join(greedy(runs, size, among) for size in ("base", "tiny"))
                   for among in ((), work.PYTORCH))
    return (f"| speed beside the quickest peer of each task, {extent(runs)}, {of_code(runs)} "
            f"| training, base: {'; '.join(train)}. Greedy decoding of one and of 32 sentences, by "
            f"the quickest engine: {best}; by PyTorch alone: {alone} |")


def row_of_results(runs):
    """The row of results/README.md on speed, without its last column."""
    parts = [f"training {size} in {kind} {quote(runs, f'train, {size}', kind)}"
             for size in ("base", "tiny") for kind in ("bf16", "fp32")]
    parts += [f"{task}, {size}, {batch} sentence{'s' * (batch > 1)} "
              f"{quote(runs, f'{task}, {size}, batch {batch}')}, by PyTorch alone "
              f"{quote(runs, f'{task}, {size}, batch {batch}', among=work.PYTORCH)}"
              for size in ("base", "tiny") for task in ("greedy", "beam 4") for batch in (1, 32)]
    parts.append("by itself, training base in bf16 takes "
                 f"{quote(runs, 'train, base', 'bf16', work.SHARE)} of the measured matrix rate")
    parts.append("peak memory, training base: "
                 + ", ".join(f"{kind} {quote(runs, 'train, base', kind, work.MEMORY)}"
                             for kind in ("bf16", "fp32")) + " (the leanest)")
    whole, measured = reached_by_all(runs)
    load = f"{sum(run['disturbed'] for run in runs)} under load"
    return ("| speed beside the quickest of `torch.nn.Transformer`, "
            "MarianMT, x-transformers, JoeyNMT and CTranslate2 in each task, "
            f"each in its best setting, random text | {'; '.join(parts)} "
            f"| `make bench`: {extent(runs)}, {of_code(runs)}, {load}; {whole} of {measured} "
            "aims reached in every run; [a file for each run](./bench), page 24 |")
