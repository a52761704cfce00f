"""The benchmarks measure what they say: by numbers made by hand, by PyTorch's own counter, and with systems that are made up."""

import functools
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from annotated.transformer import Transformer, TransformerConfig
from benchmarks import __main__ as program
from benchmarks import over, protocol, report, work
from benchmarks.protocol import Worker, WorkerFailed

ROOT = Path(__file__).parents[1]
FAKE = """
import os, sys, time
from benchmarks.protocol import serve
def handle(request):
    what = request["do"]
    if what == "fail":
        raise ValueError("no such\\nluck")
    if what == "die":
        os._exit(7)
    if what == "sleep":
        time.sleep(30)
    if what == "burn":
        end = time.process_time() + 0.3
        while time.process_time() < end: pass
    return {"got": request, "pid": os.getpid()}
serve(handle, sys.stdin, sys.stdout)
"""


@pytest.fixture
def fake():
    worker = Worker([sys.executable, "-c", FAKE], {**os.environ, "PYTHONPATH": str(ROOT)})
    yield worker
    worker.close()


def made_up(name="greedy, base, batch 32", task="greedy", entrants=(), **changes):
    """A cell of a report, made by hand."""
    cell = {"name": name, "task": task, "size": "base", "table": "fair", "lengths": "equal", "batch": 32, "units": 1, "training": True,
            "lost_rounds": 0, "foreign": {"mean": 0.0, "worst": 0.0}, "entrants": list(entrants)}
    return cell | changes


def row(system, precision, seconds, tokens=1280, **changes):
    return {"system": system, "precision": precision, "order": "bucketed", "name": f"{system} {precision}", "seconds": seconds,
            "tokens": tokens, "peak": 2**30, "parameters": 10, "versions": {"torch": "2"}, "threads": 2} | changes


def run_of(cells, rates=(), **changes):
    """A run made by hand."""
    machine = {"processor": "P", "cores": 2, "threads": 2, "memory": 2**34, "flags": [], "device": "cpu"}
    return {"command": "python -m benchmarks", "machine": machine, "rates": list(rates), "cells": list(cells),
            "load": {"before": 0.0, "worst": 0.0}, "disturbed": False, "revision": "1234567890"} | changes


# -- figures --------------------------------------------------------------------------------------------------------


def test_times_as_fast_counts_tokens_not_visits():
    ours, theirs = row("annotated", "bf16", [2.0, 2.0, 2.0], tokens=100), row("torch", "bf16", [1.0, 4.0, 3.0], tokens=50)
    assert report.speed(ours) == 50 and report.speed(theirs) == 50 / 3
    assert report.times_as_fast(ours, theirs) == pytest.approx((3.0, 1.0, 4.0))


def test_report_shows_ratios_failures_aims_and_the_busy_mark():
    cell = made_up(entrants=[row("annotated", "bf16", [1.0]), row("ctranslate2", "int8", [1.6]), row("marian", "bf16", [1.5]),
                             {"system": "joeynmt", "precision": "fp32", "order": "bucketed", "name": "joeynmt fp32", "failed": "no luck"}])
    results = run_of([cell], disturbed=False, command="c")
    text = report.tables(results)
    assert "| marian bf16 | 853 | 1.50 (1.50–1.50) | 1,024 |" in text
    assert "joeynmt fp32 | failed: no luck" in text
    assert "| greedy, base, batch 32 | annotated best | ctranslate2 best | ≥ 1.0 | 1.60 ✓ |" in text
    assert "| greedy, base, batch 32 | annotated best | others best | ≥ 1.3 | 1.50 ✓ |" in text
    cell["entrants"][0]["seconds"] = [1.7]
    text = report.tables(results)
    assert "| ctranslate2 best | ≥ 1.0 | 0.94 ✗ |" in text and "| others best | ≥ 1.3 | 0.88 ✗ |" in text
    assert "under load" not in text
    results |= {"disturbed": True, "load": {"before": 0.4, "worst": 0.2}}
    assert "A run under load: others took up to 40% of the machine." in report.tables(results)


def test_attention_by_itself_has_a_table_of_microseconds():
    cells = [made_up(f"attention, length {length}, forwards", "attention", [
        row("annotated", "fp32", [0.002 * length], tokens=1000), row("annotated", "bf16", [0.001 * length], tokens=1000),
        {"system": "torch", "precision": "fp32", "order": "bucketed", "name": "torch fp32", "failed": "no luck"}]) for length in (1, 2)]
    text = report.tables(run_of(cells, command="c"))
    assert "| | annotated fp32 | annotated bf16 | torch fp32 |" in text
    assert "| length 1, forwards | 2.00 | 1.00 | – |" in text and "| length 2, forwards | 4.00 | 2.00 | – |" in text


def test_every_aim_is_measured_by_some_cell():
    cells = work.cells()
    for claim in (*work.AIMS, *work.claims()):
        rows = [made_up(cell.name, cell.task, [row(one.system, one.precision, [1.0], order=one.order) for one in cell.entrants])
                for cell in cells if cell.name == claim.cell]
        rates = {"fp32": 1e12, "bf16": 1e12, "int8": 1e12, "bandwidth": 1e10}
        assert report.figure(run_of(rows, [rates]), claim) is not None, claim.key
    assert {claim.theirs.system for claim in work.claims()} == {"torch", "marian", "x-transformers", "joeynmt", "ctranslate2"}
    assert len({claim.key for claim in work.AIMS}) == len(work.AIMS) and len({claim.key for claim in work.claims()}) == len(work.claims())
    assert {cell.name for cell in work.cells(quick=True)} <= {cell.name for cell in cells}
    assert len({(cell.name, entrant) for cell in cells for entrant in cell.entrants}) == sum(len(cell.entrants) for cell in cells)
    assert sum(cell.seconds for cell in cells) < 16 * 60 and sum(cell.seconds for cell in work.cells(quick=True)) < 5 * 60


def test_ceilings_are_those_of_the_work_by_hand():
    """At rates where only the products count: three forward passes for an update, whatever the batches' padding was."""
    rates, size = {"fp32": 1e12, "bandwidth": 1e30}, work.SIZES["base"]
    cell = made_up("train", "train", units=2, batch=0)
    flops = 3 * work.forward_flops(size, [(32, 32)] * 128)
    assert report.ceiling(cell, row("torch", "fp32", [1.0], tokens=4096), rates) == pytest.approx(4096 / (flops / 1e12))
    rates = {"fp32": 1e30, "bandwidth": 1e9}
    assert report.ceiling(cell, row("torch", "fp32", [1.0], tokens=4096), rates) == pytest.approx(4096 / (2 * 28 * sum(size.weights) / 1e9))
    assert report.ceiling(made_up(task="attention"), row("torch", "fp32", [1.0]), rates) is None


def test_the_paper_s_run_takes_as_long_as_its_tokens_and_a_share_of_the_products_alone():
    cell, ours = made_up("train", "train", batch=0), row("annotated", "fp32", [2.0], tokens=50_000)
    rates = {"fp32": 1e14, "bandwidth": 1e30}
    share, seconds = report.paper_run(cell, ours, rates)
    assert seconds == 100_000 and share == pytest.approx(report.speed(ours) / report.ceiling(cell, ours, rates))
    size = work.SIZES["base"]
    assert share == pytest.approx(25_000 * 6 * sum(size.weights) / 1e14, rel=0.02)  # attention itself is the rest
    assert f"| train | annotated fp32 | {share:.0%} | 1.16 |" in report.paper_table([cell | {"entrants": [ours]}], rates)


def test_the_best_of_a_system_and_of_the_others_is_the_quickest_that_ran():
    cell = made_up(entrants=[row("annotated", "fp32", [2.0]), row("annotated", "int8", [1.0]), row("annotated, compiled", "fp32", [0.1]),
                             row("ctranslate2", "int8", [1.5]), row("ctranslate2", "fp32", [9.0]), row("marian", "fp32", [4.0]),
                             row("joeynmt", "fp32", [3.0]), {**row("torch", "bf16", [0.5]), "failed": "no luck"},
                             row("torch", "fp32", [0.2], order="random", name="torch fp32, random batches")])
    names = {system: report.row_of(cell, work.Entrant(system, "best"))["name"] for system in ("annotated", "ctranslate2", "others")}
    assert names == {"annotated": "annotated int8", "ctranslate2": "ctranslate2 int8", "others": "joeynmt fp32"}
    assert report.row_of(cell, work.Entrant("annotated", "fp32"))["seconds"] == [2.0]
    assert report.row_of(cell, work.Entrant("torch", "bf16")) is None is report.row_of(cell, work.Entrant("x-transformers", "best"))
    claim = work.Claim(cell["name"], work.Entrant("annotated", "best"), work.Entrant("others", "best"))
    assert report.figure(run_of([cell]), claim) == 3.0
    assert report.figure(run_of([cell]), work.replace(claim, cell="beam 4, base, batch 32")) is None


def test_figures_of_memory_and_of_the_matrix_rate():
    ours, theirs = row("annotated", "bf16", [1.0], tokens=2048, peak=60), row("torch", "bf16", [1.0], tokens=2048, peak=80)
    cell = made_up("c", "train", [ours, theirs], batch=0)
    run = run_of([cell], [{"fp32": 1e12, "bf16": 1e14, "bandwidth": 1e10}, {"fp32": 1e12, "bf16": 2e14, "bandwidth": 1e10}])
    claim = work.Claim("c", work.Entrant("annotated", "bf16"), work.Entrant("torch", "bf16"), 0.75, what="of the peak memory")
    assert report.figure(run, claim) == 0.75 and report.reached(claim, 0.75) and not report.reached(claim, 0.76)
    share = work.replace(claim, theirs=None, every=0.45, what="of the matrix rate")
    flops = 3 * work.forward_flops(work.SIZES["base"], [(32, 32)] * 64)
    assert report.figure(run, share) == pytest.approx(flops / 2e14) and report.reached(share, 0.45) and not report.reached(share, 0.44)
    assert report.reached(work.replace(share, every=None), 0.4) is None is report.reached(share, None)


def test_the_time_of_a_token_is_split_by_the_measured_rates():
    """Of 40 tokens for each of 32 sentences: products and bytes by hand, what is left as calls of the measured length."""
    cell = made_up(entrants=[row("annotated", "int8", [0.8]), row("annotated", "fp32", [4.0]), row("ctranslate2", "int8", [1.6])])
    rates = {"fp32": 1e12, "bf16": 1e12, "int8": 4e12, "bandwidth": 2e10, "call_us": 5.0}
    ours, theirs = report.split(run_of([cell], [{**rates, "call_us": 9.0}, rates]))
    flops, moved, _ = work.decoding_floor(work.SIZES["base"], 32, 1, rates, "int8")
    assert (ours["name"], theirs["name"]) == ("annotated int8", "ctranslate2 int8")
    assert ours["milliseconds"] == pytest.approx(20) and theirs["milliseconds"] == pytest.approx(40)
    assert ours["arithmetic"] == pytest.approx(1000 * flops / 4e12 / 40) and ours["memory"] == pytest.approx(1000 * moved / 2e10 / 40)
    assert ours["arithmetic"] + ours["memory"] + ours["rest"] == pytest.approx(20) and ours["calls"] == pytest.approx(ours["rest"] * 200)
    del rates["call_us"]
    assert report.split(run_of([cell], [rates]))[0]["calls"] is None and report.split(run_of([cell])) == []


def test_rates_hold_the_time_of_a_call(monkeypatch):
    """Half a second for whatever is done: a thousand calls are then counted, and seen."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from benchmarks import worker

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += function is torch.ops.aten.add_.Tensor
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(worker, "best_of", lambda function, seconds=0.5: function() and 0.5 or 0.5)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda a, b: a)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a)
    with Count() as count:
        rates = worker.machine_rates("cpu")
    assert count.seen == 1000 and rates["call_us"] == pytest.approx(500) and rates["bandwidth"] == pytest.approx(512e6)


# -- all stored runs ------------------------------------------------------------------------------------------------


def three_runs():
    """The same cell three times: ours 0.5, 2 and 1.2 times as fast; the last under load and handed on as a ratio only."""
    rates = {"fp32": 1e12, "bf16": 1e12, "int8": 1e12, "bandwidth": 1e10}
    first, second = (run_of([made_up(entrants=[row("annotated", "int8", [ours]), row("ctranslate2", "int8", [3 - ours])])], [rates])
                     for ours in (2.0, 1.0))
    copied = {"cell": "greedy, base, batch 32", "ours": "annotated best", "theirs": "ctranslate2 best", "found": 1.2}
    third = run_of([], [{"bf16": 1e12, "bandwidth": 1e10}], found=[copied], disturbed=True, load={"before": None, "worst": 0.3})
    del third["cells"]
    third["machine"]["processor"] = "Q"
    return {"A": first, "B": second, "C": third}


def test_worst_median_and_best_over_all_runs_by_hand():
    runs = three_runs()
    claim, = (claim for claim in work.AIMS if claim.cell == "greedy, base, batch 32" and claim.theirs.system == "ctranslate2")
    found = over.figures(runs, claim)
    assert found == {"A": 0.5, "B": 2.0, "C": 1.2}
    assert over.spread(found, claim) == (("A", 0.5), 1.2, ("B", 2.0)) and over.met(found, claim) == (2, False)
    assert over.spread(found, work.replace(claim, what="of the peak memory")) == (("B", 2.0), 1.2, ("A", 0.5))
    floor = work.decoding_floor(work.SIZES["base"], 32, 1, report.best_rates(runs["A"]), "int8")[2]
    assert over.ceilings(runs, claim) == pytest.approx((floor / 2, floor))
    text = over.tables(runs)
    assert (f"| greedy, base, batch 32 | best | ctranslate2 best | 0.50 A | 1.20 | 2.00 B | {floor / 2:.0%}–{floor:.0%} "
            "| ≥ 1.0, median ≥ 1.3 | 2 of 3, median ✗ | 0.50 A ✗ |") in text
    assert f"| int8 | ctranslate2 int8 | 0.50 A | 1.25 | 2.00 B | {floor / 2:.0%}–{floor:.0%} | 2 |" in text
    assert "| C | Q, 2 threads; incomplete; under load | ?, 1,000, ? | 10 | ? | 30% | 1234567 |" in text
    assert over.reached_by_all(runs) == (0, 1) and over.reached_by_all({"B": runs["B"]}) == (1, 1)
    assert over.reached_by_all({"B": runs["B"], "C": runs["C"]}) == (1, 1), "the median of 2 and 1.2 is enough"
    assert over.reached_by_all({"C": runs["C"]}) == (0, 1), "1.2 is enough for every run, and too little for the median"
    later = runs | {"D": runs["B"]}  # the last three have no A any more
    assert over.reached_by_all(later) == (0, 1) and over.reached_by_all(later, over.latest) == (1, 1)
    assert "≥ 1.0, median ≥ 1.3 | 3 of 4, median ✓ | 1.20 C ✓ |" in over.claims_table(later, work.AIMS, aims=True)
    assert over.quote(runs, claim.cell, ("annotated", "best"), ("ctranslate2", "best")) == "0.50 / 1.20 / 2.00"
    assert over.quote(runs, claim.cell, ("annotated", "int8"), ("ctranslate2", "int8")) == "0.50 / 1.25 / 2.00 (2 runs)"
    assert over.extent(runs) == "3 runs on machines of 2 names"
    assert over.marks(runs["A"]) == [] and over.marks(runs["A"] | {"command": "python -m benchmarks --only ^train"}) == ["some cells"]


def test_runs_are_lettered_by_their_files_and_reported_by_folder(tmp_path, monkeypatch, capsys):
    for name, run in zip(("b-1", "b-1-2", "a-9"), three_runs().values(), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    runs = over.stored(tmp_path)
    assert list(runs) == ["A", "B", "C"] and "found" in runs["A"]
    assert [runs[letter]["cells"][0]["entrants"][0]["seconds"] for letter in "BC"] == [[2.0], [1.0]]
    for number in range(27):
        (tmp_path / f"c-{number:02d}.json").write_text("{}")
    many = list(over.stored(tmp_path))
    assert len(set(many)) == 30 and many[23:26] == ["Z", "AA", "AB"] and not set("IO") & set("".join(many)), "I and O look like marks"
    for path in tmp_path.glob("c-*"):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    assert program.main(["--report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == over.tables(runs) + "\n" and (tmp_path / "_build/bench/bench_over.png").exists()


def test_the_picture_holds_every_run_of_every_cell_and_says_who_leads():
    runs = three_runs()
    (training, writing), name = over.draw(runs).axes, "greedy, base, batch 32"
    assert writing.chart_table[1] == [[name, "ctranslate2", "A", 0.5], [name, "ctranslate2", "B", 2.0], [name, "ctranslate2", "C", 1.2]]
    letters = {text.get_text(): text.get_position()[0] for text in writing.texts}
    assert letters == {"A": 0.5, "B": 2.0, "C": 1.2} and not training.texts
    found = {name for cell in work.cells() if cell.task in ("train", "greedy", "beam") for name in [cell.name]}
    assert {cell for task in ("train", "write") for cell, _ in over.rows(task)} == found
    for letters, where in (("ABC", "ahead in some runs"), ("BC", "ahead in every run"), ("A", "ahead in none")):
        sides = over.sides({letter: runs[letter] for letter in letters}, "write")
        assert sides[where] == [name] and sum(sides.values(), []) == [name]


@given(st.dictionaries(st.text("ABCDEFGH", min_size=1, max_size=1), st.floats(0.3, 9)), st.floats(1.01, 1.5))
def test_letters_of_one_lane_stand_apart_and_the_lanes_are_few(found, apart):
    """No more lanes than the most figures that lie within a factor of one another: fewer cannot do."""
    places, count = over.lanes(found, apart)
    assert places.keys() == found.keys() and set(places.values()) == set(range(count))
    for lane in range(count):
        values = sorted(found[letter] for letter in places if places[letter] == lane)
        assert all(high >= apart * low for low, high in itertools.pairwise(values))
    assert count == max((sum(low <= value < apart * low for value in found.values()) for low in found.values()), default=0)


def test_a_run_is_named_by_machine_and_revision_and_overwrites_none(tmp_path):
    results = run_of([], revision="abcdef1234")
    results["machine"] |= {"processor": "Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "flags": ["amx_bf16", "avx2"]}
    assert report.machine_name(results["machine"]) == "Intel Xeon Platinum 8488C AMX, 2 threads"
    assert report.machine_name(results["machine"] | {"processor": "AMD EPYC 7763 64-Core Processor", "flags": [], "device": "cuda"}) == \
        "AMD EPYC 7763, 2 threads, cuda"
    options, names = program.parse([]), []
    for _ in range(3):
        names.append(program.place(results, options, tmp_path))
        names[-1].write_text("")
    stem = "intel-xeon-platinum-8488c-amx-2-threads-abcdef1"
    assert [path.name for path in names] == [f"{number}-{stem}.json" for number in ("01", "02", "03")]
    names[0].unlink()
    (tmp_path / "99-other.json").write_text("")
    assert program.place(results, options, tmp_path).name == f"100-{stem}.json", "after the last, whatever is gone"
    for partial in (["--quick"], ["--only", "greedy"], ["--systems", "torch"], ["--against", "HEAD"], ["--effort", "0.5"]):
        assert program.place(results, program.parse(partial), tmp_path).parent == program.BUILD
    assert program.place(results, program.parse(["--busy-anyway"]), tmp_path).parent == tmp_path, "a run under load is kept, and marked"


def test_the_readmes_quote_what_all_stored_runs_found():
    """Both rows on speed are made from the files; and every stored run says what is asked of one."""
    runs = over.stored(ROOT / "results" / "bench")
    assert over.row_of_readme(runs) in (ROOT / "README.md").read_text(encoding="utf-8").split("\n"), "run `make results`"
    assert over.row_of_results(runs) in (ROOT / "results" / "README.md").read_text(encoding="utf-8"), "run `make results`"
    for run in runs.values():
        worst = max([share for share in run["load"].values() if share is not None], default=0.0)
        assert run["disturbed"] == (worst > report.FOREIGN) and report.best_rates(run)["bandwidth"] > 0
        assert ("found" in run) != ("cells" in run) and ("found" not in run or run["complete"] is False)
    first = next(run for run in runs.values() if run["revision"].startswith("c279044"))
    ratio = report.figure(first, work.AIMS[0])
    seconds = {entrant["name"]: np.median(entrant["seconds"]) for entrant in first["cells"][1]["entrants"]}
    assert ratio == pytest.approx(seconds["torch bf16"] / seconds["annotated bf16"])
    assert f"training in bf16 {ratio:.2f} / {ratio:.2f} / {ratio:.2f} ×" in over.row_of_results({"A": first})
    rows = {row["system"]: np.median(row["seconds"]) for row in first["cells"][1]["entrants"] if row["system"] != "annotated"}
    name = min(rows, key=rows.get)
    assert name == "joeynmt" and first["cells"][1]["name"] == "train, base, equal lengths, fair"
    found = rows[name] / seconds["annotated bf16"]
    told = f"in bf16 {found:.2f} / {found:.2f} / {found:.2f} × the quickest peer (JoeyNMT in 1)"
    assert told in over.row_of_readme({"A": first}) and told in over.row_of_results({"A": first})


# -- rounds ---------------------------------------------------------------------------------------------------------


def test_visits_are_interleaved_and_the_failed_are_left_out():
    order = []

    def visit(name):
        order.append(name)
        return None if name == "b" and order.count("b") == 2 else {"seconds": 0.0}

    visits, lost = protocol.rounds("abc", visit, lambda: True, seconds=1e9, most=4)
    assert "".join(order) == "abcabcacac" and lost == 0
    assert [len(visits[name]) for name in "abc"] == [4, 1, 4]


def test_disturbed_rounds_are_measured_again_and_not_kept():
    verdicts, count = iter([True, False, None, False, True, True, True]), iter(range(100))
    visits, lost = protocol.rounds("a", lambda name: {"seconds": 0.0, "number": next(count)}, lambda: next(verdicts), 1e9, most=3)
    assert [visit["number"] for visit in visits["a"]] == [0, 4, 5] and lost == 3


def test_always_disturbed_gives_no_figures():
    visits, lost = protocol.rounds("a", lambda name: {"seconds": 0.0}, lambda: False, 1e9, most=3)
    assert visits == {"a": []} and lost == 6


def test_slow_ones_are_visited_once():
    visits, _ = protocol.rounds("ab", lambda name: {"seconds": 50.0 if name == "b" else 0.0}, lambda: True, seconds=100, most=5)
    assert [len(visits[name]) for name in "ab"] == [5, 1]


# -- the watch ------------------------------------------------------------------------------------------------------

STAT = "cpu  100 20 30 5000 40 5 6 7 90 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
PROCESS = "4242 (a (b) c) S 1 4242 4242 0 -1 4194560 100 0 0 0 {} {} {} {} 20 0 2 0 100 1000 10 0 0\n"


def test_ticks_are_read_from_proc():
    assert protocol.busy_ticks(STAT) == 100 + 20 + 30 + 5 + 6 + 7  # neither idle nor waiting; guests are in the first already
    assert protocol.process_ticks(PROCESS.format(11, 22, 33, 44)) == 110


def test_foreign_share_is_what_others_took_of_all_processors():
    assert protocol.foreign_share(busy=300, own=100, seconds=4, processors=2, ticks=100) == 0.25
    assert protocol.foreign_share(busy=100, own=101, seconds=4, processors=2, ticks=100) == 0


def test_watch_subtracts_this_process_and_its_workers(tmp_path, monkeypatch, fake):
    def put(busy, mine, theirs):
        (tmp_path / "stat").write_text(f"cpu {busy} 0 0 999 0 0 0 0 0 0\n")
        for pid, ticks in ((os.getpid(), mine), (fake.process.pid, theirs)):
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            (tmp_path / str(pid) / "stat").write_text(PROCESS.format(ticks, 0, 0, 0))

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(time, "monotonic", iter([0.0, 10.0, 10.0]).__next__)
    put(1000, 10, 20)
    watch = protocol.Watch(lambda: [fake], tmp_path)
    put(1000 + 900, 10 + 100, 20 + 300)
    assert watch.foreign() == pytest.approx(500 / (10 * protocol.TICKS * 2))


def test_a_busy_machine_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.Watch, "foreign", lambda self: 0.3)
    monkeypatch.setattr(program.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(program.Group, "start", lambda *_: pytest.fail("it began to measure"))
    assert program.main([]) == 3
    assert "busy with something else (30% of it)" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("arguments", "worst", "lost"), [([], 0.08, 2), (["--busy-anyway"], 0.3, 0)])
def test_the_load_of_a_cell_is_that_of_the_rounds_that_count(arguments, worst, lost):
    """Of four rounds, two of them disturbed: they are measured again, or kept and told."""
    shares = iter([0.05, 0.3, 0.2, 0.08] + [0.01] * 30)
    watch = type("Watch", (), {"seconds": 2.0, "start": lambda self: None, "foreign": lambda self: next(shares)})()
    key = program.Group.key
    group = type("Group", (), {"key": staticmethod(key), "failed": {}, "facts": {("annotated", "fp32"): {"parameters": 1}},
                               "visit": lambda *_: {"seconds": 1.0, "tokens": 5}})()
    cell = work.Cell("greedy", "tiny", (work.Entrant("annotated"),), batch=1, seconds=1e9)
    found = program.run_cell(cell, group, watch, program.parse(arguments))
    assert found["foreign"]["worst"] == worst and found["lost_rounds"] == lost and len(found["entrants"][0]["seconds"]) == 9


# -- workers --------------------------------------------------------------------------------------------------------


def test_a_worker_answers_and_survives_its_errors(fake):
    assert fake.ask(do="hello", number=1)["got"] == {"do": "hello", "number": 1}
    with pytest.raises(WorkerFailed, match="ValueError: no such luck"):
        fake.ask(do="fail")
    assert fake.ask(do="hello")["pid"] == fake.process.pid


def test_a_worker_that_dies_or_hangs_is_reported():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for request, match in (({"do": "die"}, "ended with status 7"), ({"do": "sleep"}, "no reply within 0.2 s")):
        worker = Worker([sys.executable, "-c", FAKE], environment)
        worker.ask(do="hello")
        with pytest.raises(WorkerFailed, match=match):
            worker.ask(timeout=0.2 if request["do"] == "sleep" else 20, **request)
        worker.close()
        assert worker.process.poll() is not None


@pytest.mark.parametrize("load", [0.02, 0.3])
def test_a_run_goes_on_without_a_system_that_fails(tmp_path, monkeypatch, capsys, load):
    """The whole program with made-up workers: one works, one cannot be built, one dies at its second visit; marked if under load."""
    code = """
import os, sys
from benchmarks.protocol import serve
name, count = sys.argv[1], [0]
def handle(request):
    if request["do"] == "rates":
        return {"fp32": 1e12, "bf16": 2e12, "int8": 2e12, "bandwidth": 1e10}
    if request["do"] == "build":
        if name == "marian": raise ImportError("no such package")
        return {"parameters": 1, "versions": {"torch": "2"}, "threads": 1}
    count[0] += 1
    if name == "torch" and count[0] == 2: os._exit(1)
    return {"seconds": 0.5 if name == "torch" else 0.25, "tokens": 100, **({"peak": 5} if request["first"] else {})}
serve(handle, sys.stdin, sys.stdout)
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.Watch, "foreign", lambda self: load)
    monkeypatch.setattr(program.report, "draw", lambda *_: [])
    monkeypatch.setattr(program.Group, "start", staticmethod(lambda system, table, options: Worker(
        [sys.executable, "-c", code, system], {**os.environ, "PYTHONPATH": str(ROOT)})))
    arguments = ["--only", "train, base, equal lengths, fair", "--systems", "annotated,torch,marian", "--effort", "0.05",
                 "--busy-anyway"]
    assert program.main(arguments) == 0
    results = json.loads((tmp_path / "_build/bench/part.json").read_text())
    assert results["load"]["before"] == load and results["disturbed"] is (load > 0.1) and len(results["rates"]) == 1
    cells = results["cells"]
    rows = {entry["name"]: entry for entry in cells[0]["entrants"]}
    assert rows["annotated fp32"]["tokens"] == 100 and len(rows["annotated fp32"]["seconds"]) >= 3 and rows["annotated fp32"]["peak"] == 5
    assert rows["marian fp32"]["failed"] == "ImportError: no such package"
    assert "ended with status 1" in rows["torch fp32"]["failed"]
    assert "| annotated fp32 | 400 | 1.00" in capsys.readouterr().out


# -- the work -------------------------------------------------------------------------------------------------------


def test_ragged_lengths_are_as_described():
    lengths = work.ragged_lengths(20_000)
    assert lengths.shape == (20_000, 2) and lengths.min() >= 2 and lengths.max() == 100
    assert lengths.mean(axis=0) == pytest.approx([27, 27], abs=0.5)
    logs = np.log(lengths[:, 0])
    assert logs.std() == pytest.approx(0.55, abs=0.03) and abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.2
    assert np.array_equal(lengths[:50], work.ragged_lengths(20_000)[:50]), "the same for every process"


@pytest.mark.parametrize("order", ["bucketed", "random"])
def test_batches_hold_every_sentence_once_and_about_2048_tokens(order):
    lengths = work.ragged_lengths(2000)
    batches = work.cut(lengths, order)
    assert sorted(i for batch in batches for i in batch) == list(range(2000))
    tokens = [lengths[batch, 1].sum() for batch in batches]
    assert 1700 < np.mean(tokens) <= 2100
    if order == "bucketed":
        assert max(len(batch) * lengths[batch].max() for batch in batches) <= 2048
    equal = work.equal_lengths()
    assert equal.shape == (64, 2) and (equal == 32).all()


def test_sentences_have_the_lengths_with_their_ends():
    pairs = work.sentences(np.array([[3, 5], [2, 2]]), 50)
    assert [(len(source), len(target)) for source, target in pairs] == [(2, 4), (1, 1)]
    assert all(4 <= i < 49 for pair in pairs for side in pair for i in side)


def test_flops_are_those_of_torchs_counter():
    size = work.Size(N=2, d_model=32, d_ff=64, h=4, vocab_size=100)
    model = Transformer(TransformerConfig(100, N=2, d_model=32, d_ff=64, h=4, dropout=0.0)).train()
    source, target = torch.randint(4, 100, (3, 7)), torch.randint(4, 100, (3, 5))
    with FlopCounterMode(display=False) as counter:
        logits = model(source, target)
    assert counter.get_total_flops() == work.forward_flops(size, [(7, 5)] * 3)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * work.forward_flops(size, [(7, 5)] * 3)


def test_decoding_counts_a_token_at_a_time():
    """Without rates that matter: the operations are those of the encoder, the memory's keys and values, and each step."""
    size, rates = work.Size(2, 32, 64, 4, 100), {"fp32": 1e9, "bandwidth": 1e30}
    flops, _, seconds = work.decoding_floor(size, 3, 1, rates, "fp32", source=7, written=5)
    model = Transformer(TransformerConfig(100, N=2, d_model=32, d_ff=64, h=4, dropout=0.0))
    layers, d = model.decoder.layers, 32
    own = sum(layer.self_attention.W_Q.weight.numel() * 4 + layer.cross_attention.W_Q.weight.numel() * 2
              + layer.feed_forward.W_1.weight.numel() * 2 for layer in layers) + model.embedding.weight.numel()
    matrices = sum(p.numel() for p in model.encoder.parameters() if p.dim() == 2)
    encoder = 7 * matrices + 2 * 2 * 7 * 7 * d
    memory = 7 * sum(layer.cross_attention.W_K.weight.numel() * 2 for layer in layers)
    attention = sum(2 * 2 * d * (t + 7) for t in range(1, 6))
    assert flops == 3 * 2 * (encoder + memory + 5 * own + attention)
    assert seconds == pytest.approx(flops / 1e9)
    _, moved, seconds = work.decoding_floor(size, 1, 1, {"bf16": 1e30, "bandwidth": 1.0}, "bf16", source=7, written=1)
    assert moved == seconds == 2 * (matrices + memory // 7 + own) + 2 * 2 * 32 * 2 * (1 + 7)


def test_sizes_are_the_models_own():
    size = work.SIZES["base"]
    matrices = sum(p.numel() for p in Transformer(TransformerConfig.base()).parameters() if p.dim() == 2)
    assert sum(size.weights) == matrices


# -- the systems ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(work.SIZES, "tiny", work.Size(1, 16, 32, 2, 60))


@pytest.mark.parametrize("system", ["annotated", "torch", "marian"])
def test_systems_learn_and_write_as_many_tokens_as_asked(system, small):
    """Those whose packages the tests have anyway: a loss that falls, the same dropout places, 40 tokens without an end."""
    from benchmarks.worker import Bench

    threads = torch.get_num_threads()
    bench = Bench(system, 1)
    try:
        facts = bench.handle({"do": "build", "task": "train", "size": "tiny", "table": "fair"})
        assert facts["threads"] == 1 and facts["parameters"] == sum(p.numel() for p in bench.system.model.parameters() if p.requires_grad)
        batch = bench._batches("equal", "bucketed", 1, 128)[0]
        for group in bench.system.optimizer.param_groups:
            group["lr"] = 0.01
            assert group["fused"]
        losses = [bench.system.train_step(batch, "fp32") for _ in range(8)]
        assert losses[-1] < losses[0]
        rates = [m.p for m in bench.system.model.modules() if isinstance(m, torch.nn.Dropout)]
        assert sorted(set(rates)) in ([0.0, 0.1], [0.1], [])
        bench.handle({"do": "build", "task": "greedy", "size": "tiny", "table": "fair", "precision": "fp32"})
        for beam in (1, 4):
            reply = bench.handle({"do": "visit", "kind": "write", "precision": "fp32", "beam": beam, "batch": 2, "first": True})
            assert reply["tokens"] == 80 and reply["seconds"] > 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("system", ["annotated", "torch", "marian"])
def test_compiled_systems_learn_the_same(system, small, monkeypatch, unenforced):
    from benchmarks.systems import make
    from benchmarks.worker import Bench

    kept = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=lambda graph, _: kept.append(graph) or graph.forward))
    bench = Bench(system, torch.get_num_threads())
    bench.size = "tiny"
    batch, losses = bench._batches("equal", "bucketed", 1, 128)[0], {}
    for name in (system, f"{system}, compiled"):
        one = make(name, "tiny", "fair")
        assert not kept
        torch.manual_seed(1)
        losses[name] = [one.train_step(batch, "fp32") for _ in range(3)]
    assert kept, "nothing was compiled"
    assert losses[system] == pytest.approx(losses[name], rel=1e-5)


def test_on_a_gpu_all_may_compile():
    def entrants(device, name):
        return {str(entrant) for cell in work.cells(device=device) if cell.name == name for entrant in cell.entrants}

    for name in {cell.name for cell in work.cells() if cell.task == "train" and cell.lengths == "equal"}:
        assert entrants("cuda", name) - entrants("cpu", name) == {f"{system}, compiled bf16" for system in work.TRAINERS}


def test_beams_around_torch_find_what_greedy_finds_with_one(small):
    """The beam search that people write: with beams it is never worse than greedy by the model's own score."""
    from benchmarks.systems import END, NEVER, Torch

    system = Torch("tiny", "fair", "fp32")
    source = torch.randint(4, 59, (3, 6), generator=torch.Generator().manual_seed(0))

    def score(found):
        with torch.no_grad():
            logits = system.model(source, torch.cat([torch.ones(3, 1, dtype=torch.long), torch.tensor(found)[:, :-1]], dim=1))
            logits[..., END] += NEVER
            return logits.log_softmax(-1).gather(-1, torch.tensor(found)[..., None]).sum(dim=(1, 2))

    greedy, beams = system.write(source, 1, 5), system.write(source, 4, 5)
    assert (score(beams) >= score(greedy) - 1e-5).all() and len(beams[0]) == 5
    assert all(END not in row for row in greedy + beams)
