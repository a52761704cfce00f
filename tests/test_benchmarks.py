"""The benchmarks measure what they say: by numbers made by hand, by PyTorch's own counter, and with systems that are made up."""

import functools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from annotated.transformer import Transformer, TransformerConfig
from benchmarks import __main__ as program
from benchmarks import protocol, report, work
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


# -- figures --------------------------------------------------------------------------------------------------------


def test_median_and_ratio_by_hand():
    ours, theirs = [{"seconds": s} for s in (1.0, 9.0, 2.0)], [{"seconds": s} for s in (4.0, 9.0, 3.0)]
    assert protocol.median_of(ours) == 2.0
    assert protocol.ratio_of_medians(theirs, ours) == (2.0, 1.0, 4.0)


def test_times_as_fast_counts_tokens_not_visits():
    ours, theirs = row("annotated", "bf16", [2.0, 2.0, 2.0], tokens=100), row("torch", "bf16", [1.0, 4.0, 3.0], tokens=50)
    assert report.speed(ours) == 50 and report.speed(theirs) == 50 / 3
    assert report.times_as_fast(ours, theirs) == pytest.approx((3.0, 1.0, 4.0))


def test_report_shows_ratios_failures_aims_and_the_busy_mark():
    cell = made_up(entrants=[row("annotated", "bf16", [1.0]), row("ctranslate2", "int8", [1.6]), row("marian", "bf16", [1.5]),
                             {"system": "joeynmt", "precision": "fp32", "order": "bucketed", "name": "joeynmt fp32", "failed": "no luck"}])
    machine = {"processor": "P", "cores": 2, "threads": 2, "memory": 2**34, "flags": [], "device": "cpu"}
    results = {"command": "c", "machine": machine, "rates": [], "cells": [cell], "busy_anyway": False, "foreign_before": 0.0}
    text = report.tables(results)
    assert "| marian bf16 | 853 | 1.50 (1.50–1.50) | 1,024 |" in text
    assert "joeynmt fp32 | failed: no luck" in text
    assert "| greedy, base, batch 32 | annotated bf16 | ctranslate2 int8 | ≥ 1.5 | 1.60 ✓ |" in text
    assert "| annotated bf16 | marian bf16 | ≥ 1.7 | 1.50 ✗ |" in text
    assert "prove nothing" not in text
    results |= {"busy_anyway": True, "foreign_before": 0.4}
    assert "others took up to 40% of it. These figures prove nothing" in report.tables(results)


def test_every_aim_is_measured_by_some_cell():
    cells = work.cells()
    for name, ours, theirs, _ in work.AIMS:
        assert any(cell.name == name and {ours, theirs} <= set(cell.entrants) for cell in cells), name
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


def test_a_run_goes_on_without_a_system_that_fails(tmp_path, monkeypatch, capsys):
    """The whole program with made-up workers: one works, one cannot be built, one dies at its second visit."""
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
    monkeypatch.setattr(program.Watch, "foreign", lambda self: 0.0)
    monkeypatch.setattr(program.report, "draw", lambda *_: [])
    monkeypatch.setattr(program.Group, "start", staticmethod(lambda system, table, options: Worker(
        [sys.executable, "-c", code, system], {**os.environ, "PYTHONPATH": str(ROOT)})))
    arguments = ["--only", "train, base, equal lengths, fair", "--systems", "annotated,torch,marian", "--effort", "0.05"]
    assert program.main(arguments) == 0
    cells = json.loads((tmp_path / "_build/bench/part.json").read_text())["cells"]
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


def test_the_readme_quotes_what_both_machines_found():
    """Each ratio handed on from the second machine stands in results/README.md behind that of the first, and so do the aims reached."""
    first, second = (json.loads((ROOT / "results" / name).read_text()) for name in ("bench.json", "bench_second_machine.json"))
    line, = (line for line in (ROOT / "results" / "README.md").read_text(encoding="utf-8").split("\n") if line.startswith("| speed beside"))
    aims, reached = {(aim["cell"], aim["ours"], aim["theirs"]): aim["aim"] for aim in first["aims"] if aim["what"] == "times as fast"}, []
    for row in second["found"]:
        cell, = (c for c in first["cells"] if c["name"] == row["cell"] and row["ours"] in {e["name"] for e in c["entrants"]})
        speeds = {e["name"]: e["tokens"] / np.median(e["seconds"]) for e in cell["entrants"] if "failed" not in e}
        ratio, low, high = speeds[row["ours"]] / speeds[row["theirs"]], f"{row['lowest']:.2f}", f"{row['highest']:.2f}"
        assert f"{ratio:.2f} and {low}{f'–{high}' * (high > low)} ×" in line
        if aim := aims.get((row["cell"], row["ours"], row["theirs"])):
            reached.append((ratio >= aim, row["lowest"] >= aim))
    ours, theirs = (sum(column) for column in zip(*reached, strict=True))
    assert f"(of the {len(reached)} aims for which its figures are known it reached {theirs}, the first run {ours})" in line
    assert "incomplete" in line and second["complete"] is False
