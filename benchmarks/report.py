"""From the JSON of a run to tables and pictures."""

import re
import statistics

from . import work

FOREIGN = 0.10  # share of the machine that others may take; a run with more is under load


def best_rates(results):
    """The best of each rate that the run measured: operations a second by precision, bytes a
    second, microseconds a call.
    """
    names = dict.fromkeys(name for rates in results["rates"] for name in rates)
    return {name: (min if name == "call_us" else max)(rates[name] for rates in results["rates"]
                                                      if name in rates) for name in names}


def machine_name(machine):
    """A machine in a few words: its processor without marks and clock, a matrix unit, threads, and
    the device if it is another.
    """
    processor = re.sub(r"\((R|TM)\)|\b(Processor|CPU)\b|@.*|\b\d+-Core\b", " ",
                       machine["processor"], flags=re.IGNORECASE)
    unit = " AMX" if "amx_bf16" in machine["flags"] else ""
    device = "" if machine["device"] == "cpu" else f", {machine['device']}"
    return f"{' '.join(processor.split())}{unit}, {machine['threads']} threads{device}"


def rows_of(cell, ours=True, claim=None):
    """The rows of a cell that did not fail, ours or those of all peers.

    Those that count in a claim, or all.
    """
    rows = [row for row in cell["entrants"] if "failed" not in row
            and row["system"].startswith("annotated") is ours]
    return [row for row in rows if claim is None or (claim.precision in (
        "best", row["precision"]) and (not claim.among or row["system"] in claim.among))]


def best_of(cell, systems):
    """The quickest row of these systems; None if there is none."""
    return max((row for row in cell["entrants"] if "failed" not in row
                and row["system"] in systems), key=speed, default=None)


def figure(results, claim):
    """(what a run found for a claim, the row of the peer beside whom it stands).

    None if it did not measure it.
    """
    for cell in results["cells"]:
        ours, peers = (rows_of(cell, mine, claim) for mine in (True, False))
        if cell["name"] != claim.cell or not ours:
            continue
        ours = max(ours, key=speed)
        if claim.what == work.SHARE:
            return paper_run(cell, ours, best_rates(results))[0], None
        if claim.what == work.MEMORY and ours["peak"] and (
            peers := [row for row in peers if row["peak"]]):
            leanest = min(peers, key=lambda row: row["peak"])
            return ours["peak"] / leanest["peak"], leanest
        if claim.what == work.SPEED and peers:
            quickest = max(peers, key=speed)
            return times_as_fast(ours, quickest)[0], quickest
    return None


def reached(claim, found):
    """Whether a figure is as it is to be."""
    return found <= claim.aim if claim.what == work.MEMORY else found >= claim.aim


def speed(row):
    """Tokens a second, by the median of the visits."""
    return row["tokens"] / statistics.median(row["seconds"])


def times_as_fast(ours, theirs):
    """How many times as many tokens per second ours does: the ratio of medians, and its range round
    by round.
    """
    work_done = ours["tokens"] / theirs["tokens"]
    each = [b / a * work_done for a, b in zip(ours["seconds"], theirs["seconds"], strict=False)]
    return speed(ours) / speed(theirs), min(each), max(each)


def ceiling(cell, row, rates):
    """Tokens a second that this machine could do at most for this work, by operations and bytes
    counted.
    """
    size = work.SIZES[cell["size"]]
    if cell["task"] == "train":
        lengths = work.equal_lengths(row["tokens"])
        return lengths[:, 1].sum() / work.training_floor(size, lengths, cell["units"], rates,
                                                         row["precision"])
    seconds = work.decoding_floor(size, cell["batch"], 4 if cell["task"] == "beam" else 1, rates,
                                  row["precision"])[2]
    return cell["batch"] * work.WRITTEN / seconds


def paper_run(cell, row, rates):
    """(share of the measured matrix rate, seconds for 100,000 steps of 25,000 target tokens) at the
    speed of this row (5.1, 5.2).

    Counted are the matrix products of forward and backward pass, without any padding.
    """
    # a target token, and its source token
    flops = 3 * work.forward_flops(work.SIZES[cell["size"]], [(32, 32)]) / 32
    return flops * speed(row) / rates[row["precision"]], 100_000 * 25_000 / speed(row)


def paper_table(cells, rates):
    """The paper's base run at the speeds of these cells, as a table of Markdown."""
    lines = ["### the paper's base run (100,000 steps of 25,000 target tokens) at these speeds", "",
             "| cell | system | of the measured matrix rate | days |", "|---|---|---:|---:|"]
    for cell in cells:
        for row in cell["entrants"]:
            if "failed" not in row:
                share, seconds = paper_run(cell, row, rates)
                lines.append(f"| {cell['name']} | {row['name']} | {share:.0%} | "
                             f"{seconds / 86400:,.2f} |")
    return "\n".join(lines)


def one_line(cell):
    """A cell while the run goes on."""
    parts = [f"{row['name']} {speed(row):,.0f}" if "failed" not in row else f"{row['name']} –"
             for row in cell["entrants"]]
    note = (f" (others took up to {cell['foreign']['worst']:.0%})"
            if cell["foreign"]["worst"] > FOREIGN else "")
    return f"{cell['name']}: {'; '.join(parts)} tokens/s{note}"


def setting_of(row):
    """In a few characters: threads, or workers of one thread each."""
    workers, threads = row["setting"]
    return f"{workers} × 1" if workers > 1 else f"{threads}"


def cell_table(cell, rates):
    """A cell as a table of Markdown."""
    heads = ["system", "threads, or workers × threads", "tokens/s", "ours, times as fast",
             "peak MiB", "most possible tokens/s", "of that", "visits", "parameters"]
    lines = [f"### {cell['name']}", "", f"| {' | '.join(heads)} |",
             "|---|" + "---:|" * (len(heads) - 1)]
    for row in cell["entrants"]:
        if "failed" in row:
            lines.append(f"| {row['name']} | failed: {row['failed']} |" + " |" * (len(heads) - 2))
            continue
        ours = max((mine for mine in rows_of(cell) if mine["precision"] == row["precision"]),
                   key=speed, default=None)
        times = "{:.2f} ({:.2f}–{:.2f})".format(*times_as_fast(ours, row)) if ours else ""
        most = ceiling(cell, row, rates) if rates else None
        peak = f"{row['peak'] / 2**20:,.0f}" if row.get("peak") else ""
        bound = f"{most:,.0f} | {speed(row) / most:.0%}" if most else " | "
        lines.append(f"| {row['name']} | {setting_of(row)} | {speed(row):,.0f} | {times} | {peak} "
                     f"| {bound} | {len(row['seconds'])} | {row['parameters']:,} |")
    if cell["lost_rounds"]:
        lines.append(f"\n{cell['lost_rounds']} rounds were disturbed and measured again.")
    if "by_hand" in cell:
        harness, hand = hand_and_harness(cell)
        lines.append(f"\nCTranslate2 called by hand, at its best: {hand:,.0f} tokens/s; here "
                     f"{harness / hand:.2f} of that.")
    return "\n".join(lines)


def hand_and_harness(cell):
    """Tokens a second of CTranslate2 in its best precision: here, and called by hand in the best of
    several settings.
    """
    return speed(best_of(cell, ["ctranslate2"])), max(rate for *_, rate in cell["by_hand"])


def split(results):
    """Where the time of a token goes in writing: a dictionary for each cell, ours and CTranslate2
    each at its best.

    A token here is a step: one for each sentence of the batch. Products at the measured rate, bytes
    at the measured bandwidth, what is left is calls (and whatever does not overlap); `calls` says
    how many of the measured length that is, None if none was measured.
    """
    rates, rows = best_rates(results), []
    for cell in results["cells"] if rates else []:
        for systems in (("annotated",), ("ctranslate2",
                                         )) if cell["task"] in ("greedy", "beam") else ():
            if row := best_of(cell, systems):
                beam = 4 if cell["task"] == "beam" else 1
                flops, moved, _ = work.decoding_floor(work.SIZES[cell["size"]], cell["batch"], beam,
                                                      rates, row["precision"])
                total = 1000 * cell["batch"] / speed(row)
                parts = [1000 * flops / rates[row["precision"]] / work.WRITTEN,
                         1000 * moved / rates["bandwidth"] / work.WRITTEN]
                rest = total - sum(parts)
                rows.append({"cell": cell["name"], "name": row["name"], "milliseconds": total,
                             "arithmetic": parts[0], "memory": parts[1], "rest": rest, "calls": 1000
                             * rest / rates["call_us"] if "call_us" in rates else None})
    return rows


def split_table(results):
    """The same as a table of Markdown."""
    lines = ["### where the milliseconds of a token go (one token for each sentence of the batch)",
             "", "| cell | system | ms | products | bytes | rest | that is so many calls |",
             "|---|---|---:|---:|---:|---:|---:|"]
    for row in split(results):
        calls = f"{row['calls']:,.0f}" if row["calls"] is not None else ""
        lines.append(f"| {row['cell']} | {row['name']} "
                     f"| {row['milliseconds']:.2f} | {row['arithmetic']:.2f} | {row['memory']:.2f} "
                     f"| {row['rest']:.2f} | {calls} |")
    return "\n".join(lines)


def aims_table(results):
    """What is aimed at in every run, and what this one found, as a table of Markdown."""
    lines = ["### aims", "", "| cell | ours is … | beside | aim | found |",
             "|---|---|---|---:|---:|"]
    for claim in work.AIMS:
        if result := figure(results, claim):
            (found, peer), sign = result, "≤" if claim.what == work.MEMORY else "≥"
            lines.append(f"| {claim.name} | {claim.what} | {peer['name'] if peer else ''} | {sign} "
                         f"{claim.aim} | {found:.2f} {'✓' if reached(claim, found) else '✗'} |")
    return "\n".join(lines)


def tables(results):
    """The whole report as Markdown."""
    machine, rates = results["machine"], best_rates(results)
    versions = {}
    for cell in results["cells"]:
        for row in cell["entrants"]:
            versions |= row.get("versions", {})
    head = [f"# {results['command']}",
            "", f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"{machine['memory'] / 2**30:.0f} GiB, {' '.join(machine['flags'])}; "
            f"device {machine['device']}; {results.get('seconds', 0)} s",
            "; ".join(f"{name} {version}" for name, version in versions.items())]
    if rates:
        products = ", ".join(f"{name} {rates[name] / 1e9:,.0f}"
                             for name in ("fp32", "bf16", "int8"))
        head.append(f"Measured in this run: {products} billion operations/s in matrix products; "
                    f"{rates['bandwidth'] / 1e9:.1f} "
                    "GB/s read from memory (weights of a tiny model may stay in the caches)"
                    + (f"; {rates['call_us']:.1f} µs per call." if "call_us" in rates else "."))
    if results.get("disturbed"):
        head.append(f"**A run under load: others took up to {max(results['load'].values()):.0%} of "
                    "the machine.**")
    parts = [cell_table(cell, rates) for cell in results["cells"]]
    base = [cell for cell in results["cells"] if (cell["task"], cell["size"]) == ("train", "base")]
    if base and rates:
        parts.append(paper_table(base, rates))
    if rates and split(results):
        parts.append(split_table(results))
    return "\n\n".join(["\n".join(head), aims_table(results), *parts])


def draw(results, folder):
    """Write a picture for each kind of cell; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from annotated import charts

    charts.use_style()
    paths, rates = [], best_rates(results)
    for task in ("train", "greedy", "beam"):
        cells = [cell for cell in results["cells"] if cell["task"] == task
                 and any("failed" not in row for row in cell["entrants"])]
        if not cells:
            continue
        heights = [sum("failed" not in row for row in cell["entrants"]) + 1.5 for cell in cells]
        figure, axes = plt.subplots(len(cells), 1, figsize=(7, 0.22 * sum(heights) + 0.6),
                                    squeeze=False, gridspec_kw={"height_ratios": heights},
                                    layout="constrained")
        for axis, cell in zip(axes[:, 0], cells, strict=True):
            rows = [row for row in cell["entrants"] if "failed" not in row]
            for place, row in enumerate(rows):
                ours = row["system"].startswith("annotated")
                axis.barh(place, speed(row), color=charts.COLOURS["accent" if ours else "data"])
                most = ceiling(cell, row, rates) if rates else None
                share = f" ({speed(row) / most:.0%})" if most else ""
                axis.annotate(f" {speed(row):,.0f}{share}", (speed(row), place), va="center",
                              fontsize=8)
            axis.set_yticks(range(len(rows)), [f"{row['name']}, {setting_of(row)}" for row in rows],
                            fontsize=8)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.25 * max(map(speed, rows)))
            axis.set_title(cell["name"], fontsize=9, loc="left")
        axes[-1, 0].set_xlabel("tokens per second (in brackets: of the most that this machine "
                               "could do)")
        paths.append(folder / f"bench_{task}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths
