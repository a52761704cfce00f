"""Tables of one run, from its JSON."""

import re
import statistics

from . import workloads
from .workloads import MFU, PEAK_MEMORY, SPEEDUP

MAX_LOAD = 0.10  # share of the machine that other programs may use; a run with more is under load


def best_rates(results):
    """Return the best of each rate that the run measured: operations a second by precision, bytes a
    second, microseconds a call.
    """
    names = dict.fromkeys(name for rates in results["rates"] for name in rates)
    return {name: (min if name == "call_us" else max)(rates[name] for rates in results["rates"]
                                                      if name in rates) for name in names}


def machine_name(machine):
    """Return a short name of a machine: its processor without trademarks and clock, a matrix unit,
    the threads, and the device if it is not the processor.
    """
    processor = re.sub(r"\((R|TM)\)|\b(Processor|CPU)\b|@.*|\b\d+-Core\b", " ",
                       machine["processor"], flags=re.IGNORECASE)
    unit = " AMX" if "amx_bf16" in machine["flags"] else ""
    device = "" if machine["device"] == "cpu" else f", {machine['device']}"
    return f"{' '.join(processor.split())}{unit}, {machine['threads']} threads{device}"


def succeeded(cell):
    """Return the rows of a cell that did not fail."""
    return [row for row in cell["entrants"] if "failed" not in row]


def is_ours(row):
    """Whether a row is of this library, as it is now: "annotated@REVISION" was earlier."""
    return row["system"].startswith("annotated") and "@" not in row["system"]


def fastest(cell, systems):
    """Return the fastest row of these systems; None if there is none."""
    return max((row for row in succeeded(cell) if row["system"] in systems), key=throughput,
               default=None)


def rows_of_target(cell, target):
    """Return the rows of a cell that count for a target: ours, and those of the peers."""
    rows = [row for row in succeeded(cell) if target.precision in ("best", row["precision"])
            and (not target.systems or row["system"] in target.systems)]
    return [row for row in rows if is_ours(row)], [row for row in rows if not is_ours(row)]


def evaluate(results, target):
    """Return (what a run measured for a target, the row of the peer that we are compared with).

    None if the run did not measure it.
    """
    for cell in results["cells"]:
        ours, peers = rows_of_target(cell, target)
        if cell["name"] != target.cell or not ours:
            continue
        ours = max(ours, key=throughput)
        if target.metric == MFU:
            return paper_run(cell, ours, best_rates(results))[0], None
        if target.metric == PEAK_MEMORY and ours["peak"] and (
            peers := [row for row in peers if row["peak"]]):
            leanest = min(peers, key=lambda row: row["peak"])
            return ours["peak"] / leanest["peak"], leanest
        if target.metric == SPEEDUP and peers:
            quickest = max(peers, key=throughput)
            return speedup(ours, quickest)[0], quickest
    return None


def throughput(row):
    """Return tokens per second, by the median of the timed runs."""
    return row["tokens"] / statistics.median(row["seconds"])


def speedup(ours, theirs):
    """Return the ratio of our tokens per second to theirs: of medians, and its least and greatest
    value within a round.
    """
    tokens = ours["tokens"] / theirs["tokens"]
    ratios = [b / a * tokens for a, b in zip(ours["seconds"], theirs["seconds"], strict=False)]
    return throughput(ours) / throughput(theirs), min(ratios), max(ratios)


def beam_of(cell):
    """Return the beam of a cell that decodes."""
    return 4 if cell["task"] == "beam" else 1


def max_throughput(cell, row, rates):
    """Return the tokens per second that this machine can reach at most in this work, by its
    operations and bytes.
    """
    size = workloads.SIZES[cell["size"]]
    if cell["task"] == "train":
        pairs = row["tokens"] // workloads.TRAINING_LENGTH
        return pairs * workloads.TRAINING_LENGTH / workloads.min_training_seconds(
            size, pairs, cell["units"], rates, row["precision"])
    seconds = workloads.decoding_cost(size, cell["batch"], beam_of(cell), rates,
                                      row["precision"])[2]
    return cell["batch"] * workloads.TARGET_LENGTH / seconds


def paper_run(cell, row, rates):
    """Return (model FLOPs utilisation, seconds for 100,000 steps of 25,000 target tokens) at the
    speed of this row (Sections 5.1 and 5.2).

    The matrix products of forward and backward pass count, without padding, against the measured
    rate.
    """
    # of a target token and its source token
    flops = 3 * workloads.forward_flops(workloads.SIZES[cell["size"]], 32, 32) / 32
    return flops * throughput(row) / rates[row["precision"]], 100_000 * 25_000 / throughput(row)


def paper_table(cells, rates):
    """Return the time of the paper's base run at the speeds of these cells as a Markdown table."""
    lines = ["### the paper's base run (100,000 steps of 25,000 target tokens) at these speeds", "",
             "| cell | system | of the measured matrix rate | days |", "|---|---|---:|---:|"]
    for cell in cells:
        for row in succeeded(cell):
            utilisation, seconds = paper_run(cell, row, rates)
            lines.append(f"| {cell['name']} | {row['name']} | {utilisation:.0%} | "
                         f"{seconds / 86400:,.2f} |")
    return "\n".join(lines)


def progress_line(cell):
    """Return the result of a cell in one line, which is printed while the run goes on."""
    parts = [f"{row['name']} {throughput(row):,.0f}" if "failed" not in row else f"{row['name']} –"
             for row in cell["entrants"]]
    note = (f" (others took up to {cell['foreign']['worst']:.0%})"
            if cell["foreign"]["worst"] > MAX_LOAD else "")
    return f"{cell['name']}: {'; '.join(parts)} tokens/s{note}"


def format_setting(row):
    """Return a setting in short: the threads, or the workers of one thread each."""
    workers, threads = row["setting"]
    return f"{workers} × 1" if workers > 1 else f"{threads}"


def cell_table(cell, rates):
    """Return a cell as a Markdown table."""
    heads = ["system", "threads, or workers × threads", "tokens/s", "ours, times as fast",
             "peak MiB", "most possible tokens/s", "of that", "visits", "parameters"]
    lines = [f"### {cell['name']}", "", f"| {' | '.join(heads)} |",
             "|---|" + "---:|" * (len(heads) - 1)]
    for row in cell["entrants"]:
        if "failed" in row:
            lines.append(f"| {row['name']} | failed: {row['failed']} |" + " |" * (len(heads) - 2))
            continue
        base, _, revision = row["system"].partition("@")  # an earlier one is compared with itself
        ours = max((other for other in succeeded(cell)
                    if is_ours(other) and other["precision"] == row["precision"]
                    and (not revision or other["system"] == base)), key=throughput, default=None)
        ratio = "{:.2f} ({:.2f}–{:.2f})".format(*speedup(ours, row)) if ours else ""
        most = max_throughput(cell, row, rates) if rates else None
        peak = f"{row['peak'] / 2**20:,.0f}" if row.get("peak") else ""
        share = f"{most:,.0f} | {throughput(row) / most:.0%}" if most else " | "
        lines.append(f"| {row['name']} | {format_setting(row)} | {throughput(row):,.0f} | {ratio} "
                     f"| {peak} | {share} | {len(row['seconds'])} | {row['parameters']:,} |")
    if cell["lost_rounds"]:
        lines.append(f"\n{cell['lost_rounds']} rounds were disturbed and measured again.")
    if "by_hand" in cell:
        harness, direct = harness_and_direct(cell)
        lines.append(f"\nCTranslate2 called by hand, at its best: {direct:,.0f} tokens/s; here "
                     f"{harness / direct:.2f} of that.")
    return "\n".join(lines)


def harness_and_direct(cell):
    """Return the tokens per second of CTranslate2 in its best precision: as measured here, and
    called directly in the best of several settings.
    """
    return throughput(fastest(cell, ["ctranslate2"])), max(rate for *_, rate in cell["by_hand"])


def time_breakdown(results):
    """Return where the time of a decoding step goes: a dictionary for each cell, of this library
    and of CTranslate2, each at its fastest.

    A step generates one token of each sentence in the batch. "arithmetic": its products at the
    measured rate; "memory": its bytes at the measured bandwidth; "rest": what remains, mostly
    calls; "calls": how many calls of the measured length that is, None if none was measured.
    """
    rates, rows = best_rates(results), []
    for cell in results["cells"] if rates else []:
        for system in ("annotated", "ctranslate2") if cell["task"] in ("greedy", "beam") else ():
            if row := fastest(cell, [system]):
                flops, bytes_moved, _ = workloads.decoding_cost(
                    workloads.SIZES[cell["size"]], cell["batch"], beam_of(cell), rates,
                    row["precision"])
                total = 1000 * cell["batch"] / throughput(row)
                parts = [1000 * flops / rates[row["precision"]] / workloads.TARGET_LENGTH,
                         1000 * bytes_moved / rates["bandwidth"] / workloads.TARGET_LENGTH]
                rest = total - sum(parts)
                rows.append({"cell": cell["name"], "name": row["name"], "milliseconds": total,
                             "arithmetic": parts[0], "memory": parts[1], "rest": rest, "calls": 1000
                             * rest / rates["call_us"] if "call_us" in rates else None})
    return rows


def breakdown_table(results):
    """Return `time_breakdown` as a Markdown table."""
    lines = ["### where the milliseconds of a token go (one token for each sentence of the batch)",
             "", "| cell | system | ms | products | bytes | rest | that is so many calls |",
             "|---|---|---:|---:|---:|---:|---:|"]
    for row in time_breakdown(results):
        calls = f"{row['calls']:,.0f}" if row["calls"] is not None else ""
        lines.append(f"| {row['cell']} | {row['name']} "
                     f"| {row['milliseconds']:.2f} | {row['arithmetic']:.2f} | {row['memory']:.2f} "
                     f"| {row['rest']:.2f} | {calls} |")
    return "\n".join(lines)


def targets_table(results):
    """Return the targets, and what this run measured, as a Markdown table."""
    lines = ["### aims", "", "| cell | ours is … | beside | aim | found |",
             "|---|---|---|---:|---:|"]
    for target in workloads.TARGETS:
        if result := evaluate(results, target):
            (value, peer), sign = result, "≤" if target.metric == PEAK_MEMORY else "≥"
            lines.append(f"| {target.name} | {target.metric} | {peer['name'] if peer else ''} "
                         f"| {sign} {target.value} "
                         f"| {value:.2f} {'✓' if target.is_met(value) else '✗'} |")
    return "\n".join(lines)


def to_markdown(results):
    """Return the whole report as Markdown."""
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
    if time_breakdown(results):
        parts.append(breakdown_table(results))
    return "\n\n".join(["\n".join(head), targets_table(results), *parts])
