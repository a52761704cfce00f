"""From the JSON of a run to tables and pictures."""

import re
import statistics

from . import work

FOREIGN = 0.10  # share of the machine that others may take; a run with more is under load


def best_rates(results):
    """The best of each rate that the run measured: operations a second by precision, bytes a second, microseconds a call."""
    names = dict.fromkeys(name for rates in results["rates"] for name in rates)
    return {name: (min if name == "call_us" else max)(rates[name] for rates in results["rates"] if name in rates) for name in names}


def machine_name(machine):
    """A machine in a few words: its processor without marks and clock, a matrix unit, threads, and the device if it is another."""
    processor = re.sub(r"\((R|TM)\)|\b(Processor|CPU)\b|@.*|\b\d+-Core\b", " ", machine["processor"], flags=re.IGNORECASE)
    unit = " AMX" if "amx_bf16" in machine["flags"] else ""
    device = "" if machine["device"] == "cpu" else f", {machine['device']}"
    return f"{' '.join(processor.split())}{unit}, {machine['threads']} threads{device}"


def row_of(cell, entrant):
    """The row of an entrant in a cell, the quickest if several are meant ("best", "others"); None if all are missing or have failed."""
    systems = work.OTHERS if entrant.system == "others" else [entrant.system]
    rows = [row for row in cell["entrants"] if "failed" not in row and row["system"] in systems and row["order"] == entrant.order
            and entrant.precision in ("best", row["precision"])]
    return max(rows, key=speed, default=None)


def figure(results, claim):
    """What a run found for a claim; None if it did not measure it."""
    for row in results.get("found", []):  # a run of which only ratios were handed on
        if (row["cell"], row["ours"], row["theirs"], row.get("what", "times as fast")) == claim.key:
            return row["found"]
    for cell in results.get("cells", []):
        ours, theirs = (row_of(cell, entrant) if entrant else None for entrant in (claim.ours, claim.theirs))
        if cell["name"] != claim.cell or not ours or claim.theirs and not theirs:
            continue
        if claim.what == "times as fast":
            return times_as_fast(ours, theirs)[0]
        if claim.what == "of the matrix rate" and results["rates"]:
            return paper_run(cell, ours, best_rates(results))[0]
        if claim.what == "of the peak memory" and ours.get("peak") and theirs.get("peak"):
            return ours["peak"] / theirs["peak"]
    return None


def of_ceiling(results, claim):
    """Which share of what its machine could do at most ours reached in the cell of a claim; None if that is not known."""
    for cell in results.get("cells", []):
        if cell["name"] == claim.cell and results["rates"] and (row := row_of(cell, claim.ours)):
            return speed(row) / ceiling(cell, row, best_rates(results))
    return None


def reached(claim, found, limit=None):
    """Whether a figure is as it is to be (in every run, if no other limit is given); None without an aim or a figure."""
    limit = claim.every if limit is None else limit
    if found is None or limit is None:
        return None
    return found <= limit if claim.what == "of the peak memory" else found >= limit


def speed(row):
    """Tokens a second, by the median of the visits."""
    return row["tokens"] / statistics.median(row["seconds"])


def times_as_fast(ours, theirs):
    """How many times as many tokens a second ours does: the ratio of medians, and its range round by round."""
    work_done = ours["tokens"] / theirs["tokens"]
    each = [b / a * work_done for a, b in zip(ours["seconds"], theirs["seconds"], strict=False)]
    return speed(ours) / speed(theirs), min(each), max(each)


def ceiling(cell, row, rates):
    """Tokens a second that this machine could do at most for this work, by operations and bytes counted; None for attention."""
    size = work.SIZES[cell["size"]]
    if cell["task"] == "attention":
        return None
    if cell["task"] == "train":
        tokens = row["tokens"]
        lengths = work.equal_lengths(tokens) if cell["lengths"] == "equal" else work.ragged_lengths(round(tokens / work.LENGTHS["mean"]))
        return lengths[:, 1].sum() / work.training_floor(size, lengths, cell["units"], rates, row["precision"])
    seconds = work.decoding_floor(size, cell["batch"], 4 if cell["task"] == "beam" else 1, rates, row["precision"])[2]
    return cell["batch"] * work.WRITTEN / seconds


def paper_run(cell, row, rates):
    """(share of the measured matrix rate, seconds for 100,000 steps of 25,000 target tokens) at the speed of this row (5.1, 5.2).

    Counted are the matrix products of forward and backward pass, without any padding.
    """
    flops = 3 * work.forward_flops(work.SIZES[cell["size"]], [(32, 32)]) / 32  # a target token, and its source token
    return flops * speed(row) / rates[row["precision"]], 100_000 * 25_000 / speed(row)


def paper_table(cells, rates):
    """The paper's base run at the speeds of these cells, as a table of Markdown."""
    lines = ["### the paper's base run (100,000 steps of 25,000 target tokens) at these speeds", "",
             "| cell | system | of the measured matrix rate | days |", "|---|---|---:|---:|"]
    for cell in cells:
        for row in cell["entrants"]:
            if "failed" not in row:
                share, seconds = paper_run(cell, row, rates)
                lines.append(f"| {cell['name']} | {row['name']} | {share:.0%} | {seconds / 86400:,.2f} |")
    return "\n".join(lines)


def one_line(cell):
    """A cell while the run goes on."""
    parts = [f"{row['name']} {speed(row):,.0f}" if "failed" not in row else f"{row['name']} –" for row in cell["entrants"]]
    note = f" (others took up to {cell['foreign']['worst']:.0%})" if cell["foreign"]["worst"] > FOREIGN else ""
    return f"{cell['name']}: {'; '.join(parts)} tokens/s{note}"


def cell_table(cell, rates):
    """A cell as a table of Markdown."""
    heads = ["system", "tokens/s", "ours, times as fast", "peak MiB", "most possible tokens/s", "of that", "visits", "parameters"]
    lines = [f"### {cell['name']}", "", f"| {' | '.join(heads)} |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in cell["entrants"]:
        if "failed" in row:
            lines.append(f"| {row['name']} | failed: {row['failed']} | | | | | | |")
            continue
        ours = row_of(cell, work.Entrant("annotated", row["precision"]))
        times = "{:.2f} ({:.2f}–{:.2f})".format(*times_as_fast(ours, row)) if ours else ""
        most = ceiling(cell, row, rates) if rates else None
        peak = f"{row['peak'] / 2**20:,.0f}" if row.get("peak") else ""
        bound = f"{most:,.0f} | {speed(row) / most:.0%}" if most else " | "
        lines.append(f"| {row['name']} | {speed(row):,.0f} | {times} | {peak} | {bound} | {len(row['seconds'])} | {row['parameters']:,} |")
    if cell["lost_rounds"]:
        lines.append(f"\n{cell['lost_rounds']} rounds were disturbed and measured again.")
    return "\n".join(lines)


def attention_table(cells):
    """All attention cells of a run in one table: microseconds a position."""
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["entrants"]))
    lines = ["### attention by itself, microseconds a position (d_model 512, 8 heads)", "",
             "| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for label in dict.fromkeys(cell["name"] for cell in cells):
        values = []
        for name in names:
            rows = [row for cell in cells if cell["name"] == label for row in cell["entrants"]
                    if row["name"] == name and "failed" not in row]
            values.append(f"{1e6 / speed(rows[0]):.2f}" if rows else "–")
        lines.append(f"| {label.removeprefix('attention, ')} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def split(results):
    """Where the time of a token goes in writing: a dictionary for each cell, ours and CTranslate2 each at its best.

    A token here is a step: one for each sentence of the batch. Products at the measured rate, bytes at the measured bandwidth, what
    is left is calls (and whatever does not overlap); `calls` says how many of the measured length that is, None if none was measured.
    """
    rates, rows = best_rates(results), []
    for cell in results.get("cells", []) if rates else []:
        for system in ("annotated", "ctranslate2") if cell["task"] in ("greedy", "beam") else ():
            if row := row_of(cell, work.Entrant(system, "best")):
                beam = 4 if cell["task"] == "beam" else 1
                flops, moved, _ = work.decoding_floor(work.SIZES[cell["size"]], cell["batch"], beam, rates, row["precision"])
                total = 1000 * cell["batch"] / speed(row)
                parts = [1000 * flops / rates[row["precision"]] / work.WRITTEN, 1000 * moved / rates["bandwidth"] / work.WRITTEN]
                rest = total - sum(parts)
                rows.append({"cell": cell["name"], "name": row["name"], "milliseconds": total, "arithmetic": parts[0], "memory": parts[1],
                             "rest": rest, "calls": 1000 * rest / rates["call_us"] if "call_us" in rates else None})
    return rows


def split_table(results):
    """The same as a table of Markdown."""
    lines = ["### where the milliseconds of a token go (one token for each sentence of the batch)", "",
             "| cell | system | ms | products | bytes | rest | that is so many calls |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in split(results):
        calls = f"{row['calls']:,.0f}" if row["calls"] is not None else ""
        lines.append(f"| {row['cell']} | {row['name']} | {row['milliseconds']:.2f} | {row['arithmetic']:.2f} | {row['memory']:.2f} "
                     f"| {row['rest']:.2f} | {calls} |")
    return "\n".join(lines)


def aims_table(results):
    """What is aimed at in every run, and what this one found, as a table of Markdown."""
    lines = ["### aims", "", "| cell | ours | against | aim | found |", "|---|---|---|---:|---:|"]
    for claim in work.AIMS:
        found, (cell, ours, theirs, what) = figure(results, claim), claim.key
        if found is not None:
            name, sign = cell if what == "times as fast" else f"{cell}: {what}", "≤" if what == "of the peak memory" else "≥"
            mark = "✓" if reached(claim, found) else "✗"
            lines.append(f"| {name} | {ours} | {theirs or ''} | {sign} {claim.every} | {found:.2f} {mark} |")
    return "\n".join(lines)


def tables(results):
    """The whole report as Markdown."""
    machine, rates = results["machine"], best_rates(results)
    versions = {}
    for cell in results["cells"]:
        for row in cell["entrants"]:
            versions |= row.get("versions", {})
    head = [f"# {results['command']}", "",
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['memory'] / 2**30:.0f} GiB, "
            f"{' '.join(machine['flags'])}; device {machine['device']}; {results.get('seconds', 0)} s",
            "; ".join(f"{name} {version}" for name, version in versions.items())]
    if rates:
        products = ", ".join(f"{name} {rates[name] / 1e9:,.0f}" for name in ("fp32", "bf16", "int8"))
        head.append(f"Measured in this run: {products} billion operations/s in matrix products; "
                    f"{rates['bandwidth'] / 1e9:.1f} GB/s read from memory (weights of a tiny model may stay in the caches)"
                    + (f"; {rates['call_us']:.1f} µs a call." if "call_us" in rates else "."))
    if results.get("disturbed"):
        head.append(f"**A run under load: others took up to {max(results['load'].values()):.0%} of the machine.**")
    attention = [cell for cell in results["cells"] if cell["task"] == "attention"]
    parts = [cell_table(cell, rates) for cell in results["cells"] if cell["task"] != "attention"]
    base = [cell for cell in results["cells"] if (cell["task"], cell["size"], cell["lengths"]) == ("train", "base", "equal")]
    if base and rates:
        parts.append(paper_table(base, rates))
    if rates and split(results):
        parts.append(split_table(results))
    return "\n\n".join(["\n".join(head), aims_table(results), *parts, *([attention_table(attention)] if attention else [])])


def draw(results, folder):
    """Write a picture for each kind of cell; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from annotated import charts

    charts.use_style()
    paths, rates = [], best_rates(results)
    for task in ("train", "greedy", "beam"):
        cells = [cell for cell in results["cells"] if cell["task"] == task and any("failed" not in row for row in cell["entrants"])]
        if not cells:
            continue
        heights = [sum("failed" not in row for row in cell["entrants"]) + 1.5 for cell in cells]
        figure, axes = plt.subplots(len(cells), 1, figsize=(7, 0.22 * sum(heights) + 0.6), squeeze=False,
                                    gridspec_kw={"height_ratios": heights}, layout="constrained")
        for axis, cell in zip(axes[:, 0], cells, strict=True):
            rows = [row for row in cell["entrants"] if "failed" not in row]
            for place, row in enumerate(rows):
                axis.barh(place, speed(row), color=charts.COLOURS["accent"] if row["system"] == "annotated" else charts.COLOURS["data"])
                most = ceiling(cell, row, rates) if rates else None
                share = f" ({speed(row) / most:.0%})" if most else ""
                axis.annotate(f" {speed(row):,.0f}{share}", (speed(row), place), va="center", fontsize=8)
            axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.25 * max(map(speed, rows)))
            axis.set_title(cell["name"], fontsize=9, loc="left")
        axes[-1, 0].set_xlabel("tokens a second (in brackets: of the most that this machine could do)")
        paths.append(folder / f"bench_{task}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    cells = [cell for cell in results["cells"] if cell["task"] == "attention"]
    if cells:
        kinds = [(training, precision) for training in (True, False) for precision in ("fp32", "bf16")]
        figure, axes = plt.subplots(2, 2, figsize=(7, 5.5), sharex=True, layout="constrained")
        for axis, (training, precision) in zip(axes.flat, kinds, strict=True):
            for system in dict.fromkeys(row["system"] for cell in cells for row in cell["entrants"]):
                points = [(cell["batch"], 1e6 / speed(row)) for cell in cells if cell["training"] == training
                          for row in cell["entrants"] if (row["system"], row["precision"]) == (system, precision) and "failed" not in row]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{'with gradients' if training else 'forwards'}, {precision}", fontsize=9)
        handles, labels = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda found: len(found[1]))
        figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=3)
        figure.supxlabel("length of the sequences (positions)", fontsize=9)
        figure.supylabel("microseconds a position", fontsize=9)
        paths.append(folder / "bench_attention.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths
