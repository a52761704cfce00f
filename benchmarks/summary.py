"""A summary of all stored runs: worst, median and best value of every target, with the peers and
the machines.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

from . import report
from .workloads import MFU, PEAK_MEMORY, PYTORCH, SPEEDUP, TARGETS, find_target

DISPLAY_NAMES = {"torch": "`torch.nn.Transformer`", "marian": "MarianMT",
                 "x-transformers": "x-transformers", "joeynmt": "JoeyNMT",
                 "ctranslate2": "CTranslate2"}
DECODERS = ("annotated, CTranslate2", "ctranslate2"), ("annotated", "ctranslate2")  # and a peer
SAME_MACHINE = 1.5  # largest ratio between the rates of machines of one kind


def load_runs(folder):
    """Return the runs in a folder in the order of their numbers, which is that of time."""
    return [json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(Path(folder).glob("*.json"))]


def evaluate_runs(runs, target):
    """Return what the runs measured for a target: [(number of the run, value, row of the peer), …].

    Runs that did not measure it are left out.
    """
    results = [(number, report.evaluate(run, target)) for number, run in enumerate(runs, 1)]
    return [(number, *result) for number, result in results if result]


def worst_median_best(values, target):
    """Return worst, median and best of what `evaluate_runs` gives; less memory is better."""
    order = sorted((value for _, value, _ in values), reverse=target.metric == PEAK_MEMORY)
    return order[0], statistics.median(order), order[-1]


def peer_names(values):
    """Return the names of the peers that we are compared with, the most frequent first."""
    systems = [row["system"] for *_, row in values if row]
    return " or ".join(DISPLAY_NAMES.get(system, system) for system in sorted(
        dict.fromkeys(systems), key=systems.count, reverse=True))


def count_met_targets(runs):
    """Return (targets met in every run that measured them, targets measured at all)."""
    met = [all(target.is_met(value) for _, value, _ in values)
           for target in TARGETS if (values := evaluate_runs(runs, target))]
    return sum(met), len(met)


def group_by_machine(runs):
    """Group the runs by kind of machine, which is told by the measured rates and not by a name.

    Returns [numbers of the runs on one kind, …].
    """
    groups = []
    for number, run in enumerate(runs, 1):
        rates = report.best_rates(run)
        for first, numbers in groups:
            if all(max(rates[name] / first[name], first[name] / rates[name]) <= SAME_MACHINE
                   for name in ("fp32", "bf16", "int8", "bandwidth")):
                numbers.append(number)
                break
        else:
            groups.append((rates, [number]))
    return [numbers for _, numbers in groups]


# -- tables ----------------------------------------------------------------------------------------


def machines_table(runs):
    """Return the runs with their machines, rates, load and revision as a Markdown table."""
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


def targets_table(runs):
    """Return all targets as a Markdown table: the peers, worst, median and best value, and whether
    every run met the target.
    """
    lines = ["| cell | ours is … | beside | worst | median | best | aim | every run |",
             "|---|---|---|---:|---:|---:|---:|---|"]
    for target in TARGETS:
        if values := evaluate_runs(runs, target):
            worst, median, best = worst_median_best(values, target)
            lines.append(f"| {target.name} | {target.metric} | {peer_names(values)} "
                         f"| {worst:.2f} | {median:.2f} | {best:.2f} "
                         f"| {'≤' if target.metric == PEAK_MEMORY else '≥'} {target.value} | "
                         f"{'✓' if target.is_met(worst) else '✗'} |")
    return "\n".join(lines)


def settings_table(runs):
    """Return for each target of speed our fastest contender and the fastest peer as a Markdown
    table, with their settings and tokens per second.
    """
    lines = ["| run | cell | ours | threads | tokens/s | quickest peer | threads | tokens/s |",
             "|---|---|---|---:|---:|---|---:|---:|"]
    for number, run in enumerate(runs, 1):
        for target in (target for target in TARGETS if target.metric == SPEEDUP):
            for cell in (cell for cell in run["cells"] if cell["name"] == target.cell):
                ours, peers = report.rows_of_target(cell, target)
                if ours and peers:
                    fastest = [max(rows, key=report.throughput) for rows in (ours, peers)]
                    words = (f"{row['name']} | {report.format_setting(row)} | "
                             f"{report.throughput(row):,.0f}" for row in fastest)
                    lines.append(f"| {number} | {target.cell} | {' | '.join(words)} |")
    return "\n".join(lines)


def to_markdown(runs):
    """Return the whole summary as Markdown."""
    parts = ["# What all stored runs found", machines_table(runs), "## aims", targets_table(runs),
             "## settings", settings_table(runs)]
    parts += [f"## run {number}\n\n{report.breakdown_table(run)}"
              for number, run in enumerate(runs, 1) if report.time_breakdown(run)]
    return "\n\n".join(parts)


def draw(runs):
    """Return a figure with a row for each target of speed and a dot for each run: our speedup over
    the quickest peer, whose name stands at the right.
    """
    from matplotlib import pyplot as plt

    from annotated import charts
    from annotated.charts import theme

    rows = [(target, values) for target in TARGETS if target.metric == SPEEDUP
            and (values := evaluate_runs(runs, target))]
    speedups = [1, *(value for _, values in rows for _, value, _ in values)]
    figure, axis = plt.subplots(figsize=(7.4, 0.34 * len(rows) + 1), layout="constrained")
    for place, (_, values) in enumerate(rows):
        for number, value, _ in values:
            colour = charts.COLOURS["key_text" if runs[number - 1]["disturbed"] else "query"]
            axis.plot(value, place, "o", color=colour, markersize=5)
        axis.text(1.02, place, peer_names(values).replace("`", ""), fontsize=8, va="center",
                  transform=axis.get_yaxis_transform())
    data = [(target.name, row["name"], number, value)
            for target, values in rows for number, value, row in values]
    theme.remember(axis, ("cell", "quickest peer", "run", "times as fast"), data)
    axis.axvline(1, color=charts.COLOURS["text"], linewidth=1)
    axis.set_yticks(range(len(rows)), [target.name for target, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    limits = 0.9 * min(speedups), 1.1 * max(speedups)
    axis.set(xscale="log", xlim=limits)
    ticks = [tick for tick in (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
             if limits[0] <= tick <= max(speedups)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_title("Ours, times as fast as the quickest peer", fontsize=9, loc="left")
    return figure


# -- rows of README.md and results/README.md -------------------------------------------------------


def format_target(runs, *key):
    """Return worst and median of a target, and the peers; the key is that of `find_target`."""
    target = find_target(*key)
    values = evaluate_runs(runs, target)
    return format_values(values, target) + f" × {peer_names(values)}" * (target.metric != MFU)


def format_values(values, target):
    """Return worst and median of what the runs measured for a target."""
    worst, median, _ = worst_median_best(values, target)
    form = "{:.0%}" if target.metric == MFU else "{:.2f}"
    return " / ".join(map(form.format, (worst, median)[: len(values)]))  # one run has one value


def format_cells(runs, cells, *systems):
    """Return worst and median of these systems in some cells of decoding."""
    targets = [replace(find_target(cell), systems=systems) for cell in cells]
    return " and ".join(format_values(evaluate_runs(runs, target), target) for target in targets)


def format_span(runs, *systems):
    """Return the lowest worst and the highest median of these systems in all cells of decoding."""
    targets = [replace(find_target(f"{task}, {size}, batch {batch}"), systems=systems)
               for size in ("base", "tiny") for task in ("greedy", "beam 4") for batch in (1, 32)]
    found = [worst_median_best(evaluate_runs(runs, target), target) for target in targets]
    lowest, highest = min(worst for worst, *_ in found), max(median for _, median, _ in found)
    return f"{lowest:.2f} to {highest:.2f}"


def format_runs(runs):
    """Return the number of runs and of kinds of machine in words."""
    count, machines = len(runs), len(group_by_machine(runs))
    return (f"{'worst / median of ' * (count > 1)}{count} run{'s' * (count > 1)} on {machines} "
            f"kind{'s' * (machines > 1)} of machine")


def format_revisions(runs):
    """Return the revisions that were measured in words."""
    return "at " + ", ".join(dict.fromkeys(f"`{run['revision'][:7]}`" for run in runs))


def readme_row(runs):
    """Return the row on speed of README.md."""
    train = [f"{precision} {format_target(runs, 'train, base', precision)}"
             for precision in ("bf16", "fp32")]
    engine, pytorch = (", ".join(
        f"{size} " + format_cells(runs, [f"greedy, {size}, batch {b}" for b in (1, 32)], *systems)
        for size in ("base", "tiny")) for systems in DECODERS)
    return ("| speed as a multiple of the quickest peer's (above 1 is faster), "
            f"{format_runs(runs)}, {format_revisions(runs)} "
            f"| Training base: {', '.join(train)}. Greedy decoding of one and of 32 sentences, × "
            "CTranslate2 called directly, in int8: with `--engine ctranslate2 --precision int8` "
            f"{engine}; by PyTorch alone, which has no int8, {pytorch} |")


def results_row(runs):
    """Return the row on speed of results/README.md, without its last column."""
    parts = [f"training {size} in {precision} {format_target(runs, f'train, {size}', precision)}"
             for size in ("base", "tiny") for precision in ("bf16", "fp32")]
    engine, pytorch, marian = (format_span(runs, *systems) for systems in (*DECODERS, PYTORCH))
    parts.append("decoding (eight tasks, from the lowest worst to the highest median) by the "
                 f"engine on CTranslate2 {engine} × CTranslate2 called directly, both in int8, by "
                 f"PyTorch alone, which has no int8, {pytorch} × CTranslate2, {marian} × MarianMT")
    parts.append("by itself, training base in bf16 takes "
                 f"{format_target(runs, 'train, base', 'bf16', MFU)} of the measured matrix rate")
    memory = (f"{precision} {format_target(runs, 'train, base', precision, PEAK_MEMORY)}"
              for precision in ("bf16", "fp32"))
    parts.append(f"peak memory, training base: {', '.join(memory)} (the leanest)")
    met, measured = count_met_targets(runs)
    load = f"{sum(run['disturbed'] for run in runs) or 'no'} run under load"
    return ("| speed beside the quickest of `torch.nn.Transformer`, "
            "MarianMT, x-transformers, JoeyNMT and CTranslate2 in each task, "
            f"each in its best setting, random text | {'; '.join(parts)} "
            f"| `make bench`: {format_runs(runs)}, {format_revisions(runs)}, {load}; {met} of "
            f"the {measured} aims of page 24 reached in every run; [a file for each run](./bench), "
            "page 24 |")
