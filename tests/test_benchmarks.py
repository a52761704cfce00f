"""The benchmarks against figures computed by hand, PyTorch's own counter, and fake systems."""

import contextlib
import functools
import itertools
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, random_model
from torch.utils.flop_counter import FlopCounterMode

from annotated.model.transformer import Transformer, TransformerConfig
from benchmarks import __main__ as program
from benchmarks import harness, report, summary, worker, workloads
from benchmarks.harness import Worker, WorkerFailed
from benchmarks.systems import make_system
from benchmarks.workloads import find_target

BASE = workloads.SIZES["base"]
RATES = {"fp32": 1e12, "bf16": 1e12, "int8": 1e12, "bandwidth": 1e10, "call_us": 3.0}
FAKE = "handle = lambda request: time.sleep(request.get('seconds', 0)) or {'got': request}\n"


def start(code, *arguments):
    """A worker that answers requests by the function `handle` of this code."""
    code = ("import os, sys, time\nfrom benchmarks.harness import serve\n" + code
            + "\nserve(handle, sys.stdin, sys.stdout)")
    return Worker([sys.executable, "-c", code, *arguments], os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def fake():
    with contextlib.closing(start(FAKE)) as process:
        yield process


def made_up(name="greedy, base, batch 32", task="greedy", entrants=(), **changes):
    """A cell of a report, made by hand."""
    cell = {"name": name, "task": task, "size": "base", "batch": 32, "units": 1, "lost_rounds": 0,
            "foreign": {"mean": 0.0, "worst": 0.0}, "entrants": list(entrants)}
    return cell | changes


def row(system, precision, seconds, tokens=1280, **changes):
    return {"system": system, "precision": precision, "name": f"{system} {precision}",
            "seconds": seconds, "tokens": tokens, "peak": 2**30, "parameters": 10,
            "versions": {"torch": "2"}, "setting": [1, 2], "tried": [[1, 2, 9.0]]} | changes


def run_of(cells, rates=(), **changes):
    """A run made by hand."""
    machine = {"processor": "P", "cores": 2, "threads": 2, "memory": 2**34, "flags": [],
               "device": "cpu"}
    return {"command": "python -m benchmarks", "machine": machine, "rates": list(rates),
            "cells": list(cells), "load": {"before": 0.0, "worst": 0.0}, "disturbed": False,
            "revision": "1234567890"} | changes


# -- figures ---------------------------------------------------------------------------------------


def test_times_as_fast_counts_tokens_not_visits():
    ours = row("annotated", "bf16", [2.0, 2.0, 2.0], tokens=100)
    theirs = row("torch", "bf16", [1.0, 4.0, 3.0], tokens=50)
    assert report.throughput(ours) == 50 and report.throughput(theirs) == 50 / 3
    assert report.speedup(ours, theirs) == pytest.approx((3.0, 1.0, 4.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_every_aim_is_measured_by_some_cell_and_every_cell_has_an_aim(compiled):
    cells = workloads.cells(compiled=compiled)
    for target in workloads.TARGETS:
        run = run_of([made_up(cell.name, cell.task, [row(one.system, one.precision, [1.0])
                                                     for one in cell.contenders])
                      for cell in cells if cell.name == target.cell], [RATES])
        assert report.evaluate(run, target) is not None, target
    targets = workloads.TARGETS
    assert len({(target.name, target.metric) for target in targets}) == len(targets)
    assert {target.cell for target in targets} == {cell.name for cell in cells}


def test_ceilings_are_those_of_the_work_by_hand():
    """Either the products of three forward passes decide, or the bytes of two updates."""
    cell, peer = made_up("train", "train", units=2, batch=0), row("torch", "fp32", [1.0], 4096)
    products = 3 * workloads.forward_flops(BASE, 32, 32, 128) / 1e12
    for rates, seconds in (({"fp32": 1e12, "bandwidth": 1e30}, products),
                           ({"fp32": 1e30, "bandwidth": 1e9}, 2 * 28 * sum(BASE.weights) / 1e9)):
        assert report.max_throughput(cell, peer, rates) == pytest.approx(4096 / seconds)


def test_a_claim_is_against_the_quickest_peer_that_ran():
    """Ours at its best, too; failures do not count, nor systems of another precision than named."""
    peers = [row("ctranslate2", "int8", [1.5]), row("ctranslate2", "fp32", [9.0]),
             row("marian", "fp32", [4.0]), row("joeynmt", "bf16", [1.2]),
             {**row("torch", "bf16", [0.5]), "failed": "no luck"}]
    cell = made_up(entrants=[row("annotated", "fp32", [2.0]), row("annotated", "int8", [1.0]),
                             *peers])
    engine = [*cell["entrants"], row("annotated, CTranslate2", "int8", [0.5])]
    name = cell["name"]
    for entrants, target, expected in [
            (cell["entrants"], find_target(name), (1.2, "joeynmt bf16")),
            (cell["entrants"], workloads.Target(name, "fp32", 1.0), (2.0, "marian fp32")),
            (cell["entrants"], find_target(name, systems=workloads.PYTORCH), (4.0, "marian fp32")),
            (engine, find_target(name), (2.4, "joeynmt bf16")),
            (engine, find_target(name, systems=workloads.PYTORCH), (4.0, "marian fp32")),
            (cell["entrants"], find_target("beam 4, base, batch 32"), None),
            (peers, find_target(name), None)]:
        figure = report.evaluate(run_of([cell | {"entrants": entrants}]), target)
        assert expected == (figure and (figure[0], figure[1]["name"]))


def test_figures_of_memory_and_of_the_matrix_rate():
    """Memory is beside the leanest peer, who need not be the quickest."""
    ours = row("annotated", "bf16", [1.0], tokens=2048, peak=60)
    lean = row("torch", "bf16", [3.0], tokens=2048, peak=80)
    quick = row("joeynmt", "bf16", [0.5], tokens=2048, peak=200)
    run = run_of([made_up("train, base", "train", [ours, quick, lean], batch=0)],
                 [RATES | {"bf16": 1e14}, RATES | {"bf16": 2e14}])
    share = pytest.approx(3 * workloads.forward_flops(BASE, 32, 32, 64) / 2e14)
    for metric, value, off in ((workloads.PEAK_MEMORY, (0.75, lean), 0.01),
                               (workloads.MFU, (share, None), -0.01)):
        target = find_target("train, base", "bf16", metric)
        assert report.evaluate(run, target) == value and target.is_met(target.value)
        assert not target.is_met(target.value + off)


def test_the_time_of_a_token_is_split_by_the_measured_rates():
    """40 tokens of 32 sentences: products and bytes by hand, the rest as calls of 5 µs."""
    cell = made_up(entrants=[row("annotated", "int8", [0.8]), row("annotated", "fp32", [4.0]),
                             row("ctranslate2", "int8", [1.6])])
    rates = {"fp32": 1e12, "bf16": 1e12, "int8": 4e12, "bandwidth": 2e10, "call_us": 5.0}
    ours, theirs = report.time_breakdown(run_of([cell], [{**rates, "call_us": 9.0}, rates]))
    flops, moved, _ = workloads.decoding_cost(BASE, 32, 1, rates, "int8")
    assert (ours["name"], theirs["name"]) == ("annotated int8", "ctranslate2 int8")
    products, memory = 1000 * flops / 4e12 / 40, 1000 * moved / 2e10 / 40
    rest = 20 - products - memory
    assert [ours[what] for what in ("milliseconds", "arithmetic", "memory", "rest", "calls")] == (
        pytest.approx([20, products, memory, rest, rest * 200]))
    assert theirs["milliseconds"] == pytest.approx(40)
    assert report.time_breakdown(run_of([cell])) == []


# -- all stored runs -------------------------------------------------------------------------------


def three_runs():
    """One cell in three runs: ours 0.5, 2 and 1.2 times as fast as the quickest of two peers.

    The last run is under load.
    """
    runs = [run_of([made_up(entrants=[row("annotated", "int8", [ours]), row("marian", "fp32", [c]),
                                      row("ctranslate2", "int8", [b])])], [RATES])
            for ours, b, c in ((2.0, 1.0, 4.0), (1.0, 2.0, 9.0), (1.0, 9.0, 1.2))]
    runs[2] |= {"disturbed": True, "load": {"before": 0.1, "worst": 0.3}}
    return runs


def test_worst_median_and_best_over_all_runs_by_hand():
    runs, target = three_runs(), find_target("greedy, base, batch 32")
    figures = summary.evaluate_runs(runs, target)
    assert [(number, value, peer["system"]) for number, value, peer in figures] == [
        (1, 0.5, "ctranslate2"), (2, 2.0, "ctranslate2"), (3, 1.2, "marian")]
    assert summary.worst_median_best(figures, target) == (0.5, 1.2, 2.0)
    # of memory less is better
    memory = find_target("train, base", "bf16", workloads.PEAK_MEMORY)
    assert summary.worst_median_best(figures, memory) == (2.0, 1.2, 0.5)
    line = f"| {target.cell} | {workloads.SPEEDUP} | CTranslate2 or MarianMT | 0.50 |"
    assert line in summary.to_markdown(runs)
    # reached is what every run reached
    assert summary.count_met_targets(runs) == (0, 2)
    assert summary.count_met_targets(runs[1:2]) == (2, 2)
    assert summary.format_target(runs, target.cell) == "0.50 / 1.20 × CTranslate2 or MarianMT"
    for run in runs:
        run["cells"][0]["entrants"].append(row("annotated, CTranslate2", "int8", [1.0]))
    spread = [summary.format_cells(runs, [target.cell], *systems) for systems in summary.DECODERS]
    assert spread == ["1.00 / 2.00", "0.50 / 2.00"]


def test_kinds_of_machine_are_told_by_measured_rates_not_by_names():
    """One name at two speeds is two kinds, two names at one speed are one."""
    runs = three_runs()
    assert summary.format_runs(runs) == "worst / median of 3 runs on 1 kind of machine"
    runs[1]["machine"]["processor"] = "Q"
    runs[2]["rates"] = [RATES | {"bf16": 2e12}]
    assert summary.group_by_machine(runs) == [[1, 2], [3]]
    assert summary.format_runs(runs) == "worst / median of 3 runs on 2 kinds of machine"


def test_a_whole_run_overwrites_no_other_and_a_partial_one_is_not_kept(tmp_path):
    for taken, number in (("01-other", "02-"), ("02-other", "03-"), ("99-other", "100-")):
        (tmp_path / f"{taken}.json").write_text("")
        kept = program.output_path(run_of([]), program.parse_args(["--allow-load"]), tmp_path)
        assert kept.parent == tmp_path and kept.name.startswith(number)
    for partial in (["--only", "greedy"], ["--systems", "torch"], ["--against", "HEAD"],
                    ["--time-scale", "0.5"]):
        path = program.output_path(run_of([]), program.parse_args(partial), tmp_path)
        assert path.parent == program.BUILD


def test_the_readmes_quote_what_all_stored_runs_found():
    """Both rows on speed come from the files by `make results`, and every stored run is whole."""
    runs = summary.load_runs(ROOT / "results" / "bench")
    assert summary.readme_row(runs) in (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    assert summary.results_row(runs) in (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    for run in runs:
        assert run["disturbed"] == (max(run["load"].values()) > report.MAX_LOAD)
        assert report.best_rates(run)["bandwidth"] > 0
        # a part is no run
        assert {cell["name"] for cell in run["cells"]} == {cell.name for cell in workloads.cells()}
        for entrant in (entrant for cell in run["cells"] for entrant in cell["entrants"]):
            best = max(entrant.get("tried", ()), key=lambda trial: trial[2], default=())
            assert "failed" in entrant or entrant["setting"] == best[:2]
        hands = {(cell["task"], cell["size"], cell["batch"]): report.harness_and_direct(cell)
                 for cell in run["cells"] if "by_hand" in cell}
        assert hands.keys() == program.DIRECT_CELLS


# -- rounds ----------------------------------------------------------------------------------------


def test_visits_are_interleaved_and_the_failed_are_left_out():
    order = []

    def visit(name):
        order.append(name)
        return None if name == "b" and order.count("b") == 2 else {"seconds": 0.0}

    visits, lost = harness.run_rounds("abc", visit, lambda: True, seconds=1e9, max_rounds=4)
    assert "".join(order) == "abcabcacac" and lost == 0
    assert [len(visits[name]) for name in "abc"] == [4, 1, 4]


def test_rounds_on_a_machine_that_stays_busy_come_to_an_end():
    visits, lost = harness.run_rounds("a", lambda name: {"seconds": 0.0}, lambda: False, 1e9,
                                      max_rounds=3)
    assert visits == {"a": []} and lost == 6


# -- load ------------------------------------------------------------------------------------------


def test_load_monitor_subtracts_this_process_and_its_workers(tmp_path, monkeypatch, fake):
    """Neither idle nor waiting is busy, and guests are in the first number already."""
    def put(busy, mine, theirs):
        (tmp_path / "stat").write_text(f"cpu  {busy} 20 30 {5 * busy} {3 * busy} 5 6 7 {busy} 0\n"
                                       "cpu0 1 2 3 4 5 6 7 8 9 10\n")
        for pid, ticks in ((os.getpid(), mine), (fake.process.pid, theirs)):
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            spent = f"{ticks} {2 * ticks} {3 * ticks} {4 * ticks}"
            (tmp_path / str(pid) / "stat").write_text(
                f"4242 (a (b) c) S 1 4242 4242 0 -1 4194560 100 0 0 0 {spent} 20 0 2 0 100 10 0\n")

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    clock = SimpleNamespace(monotonic=iter([0.0, 10.0, 10.0, 20.0]).__next__)
    monkeypatch.setattr(harness, "time", clock)  # other threads keep the real one
    put(1000, 10, 20)
    monitor = harness.LoadMonitor(lambda: [fake], tmp_path)
    put(1900, 20, 50)
    available = 10 * harness.CLOCK_TICKS * 2
    assert monitor.other_load() == pytest.approx((900 - 10 * (10 + 30)) / available)


@pytest.fixture
def awake(monkeypatch):
    """The program does not sleep, and leaves SIGTERM as it was."""
    monkeypatch.setattr(program, "time", SimpleNamespace(**vars(time) | {"sleep": lambda _: None}))
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)


def test_a_busy_machine_is_refused(awake, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.LoadMonitor, "other_load", lambda self: 0.3)
    monkeypatch.setattr(program, "start_worker", lambda *_: pytest.fail("it began to measure"))
    assert program.main([]) == 3
    assert "busy with something else (30% of it)" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def pool_of(seconds, failed=()):
    """Fake processes: 100 tokens take them seconds(system, precision, setting)."""
    return SimpleNamespace(
        key=program.WorkerPool.key, model_info=defaultdict(dict),
        failures=dict.fromkeys(failed, "no luck"),
        measure=lambda key, _, request, setting: {"seconds": seconds(*key, setting), "tokens": 100})


def monitor_of(shares):
    """A fake load monitor: the shares of the machine that other programs use in the rounds."""
    return SimpleNamespace(seconds=2.0, start=lambda: None, other_load=lambda: next(shares))


def test_every_system_races_in_the_setting_that_it_does_best_in():
    """Of threads 4, 2, 1 and four workers of one thread: the figures are those of the best."""
    best = {"annotated": (1, 4), "ctranslate2": (4, 1), "marian": (1, 1)}
    pool = pool_of(lambda system, _, setting: 0.1 if setting == best[system] else 0.5,
                   failed=[("torch", "fp32")])
    contenders = tuple(workloads.Contender(system) for system in (*best, "torch"))
    cell = workloads.Cell("greedy", "tiny", contenders, batch=32, seconds=1e9)
    options = program.parse_args(["--threads", "4", "--time-scale", "0.0001"])
    entrants = program.run_cell(cell, pool, monitor_of(itertools.repeat(0.0)), options)["entrants"]
    assert entrants.pop()["failed"] == "no luck"
    for (system, setting), entrant in zip(best.items(), entrants, strict=True):
        assert entrant["system"] == system and entrant["setting"] == setting
        assert set(entrant["seconds"]) == {0.1}
        assert [tuple(trial) for trial in entrant["tried"]] == [
            (*s, 1000 if s == setting else 200) for s in ((1, 4), (1, 2), (1, 1), (4, 1))]


def test_one_disturbed_visit_does_not_decide_a_setting():
    """Two workers are the best, and their first visit takes 1.8 times as long as it should."""
    disturbed = iter([0.18])
    pool = pool_of(lambda system, _, setting: next(disturbed, 0.1) if setting == (2, 1) else 0.12)
    cell = workloads.Cell("beam", "base", (workloads.Contender("ctranslate2", "int8"),), batch=32)
    options = program.parse_args(["--threads", "2", "--time-scale", "0"])
    speeds = program.tune(cell, cell.contenders[0], pool, options)
    assert max(speeds, key=speeds.get) == (2, 1) and speeds[2, 1] == 1000


@pytest.mark.parametrize(("arguments", "worst", "lost"),
                         [([], 0.08, 2), (["--allow-load"], 0.3, 0)])
def test_the_load_of_a_cell_is_that_of_the_rounds_that_count(arguments, worst, lost):
    """Of four rounds, two of them disturbed: they are measured again, or kept and reported."""
    monitor = monitor_of(iter([0.05, 0.3, 0.2, 0.08] + [0.01] * 30))
    cell = workloads.Cell("greedy", "tiny", (workloads.Contender("annotated"),), batch=1,
                          seconds=1e9)
    result = program.run_cell(cell, pool_of(lambda *_: 1.0), monitor, program.parse_args(arguments))
    assert result["foreign"]["worst"] == worst and result["lost_rounds"] == lost
    assert len(result["entrants"][0]["seconds"]) == 9


# -- workers ---------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_reported_and_ended(fake):
    assert fake.ask(method="hello", number=1)["got"] == {"method": "hello", "number": 1}
    with pytest.raises(WorkerFailed, match="no reply within 0.2 s"):
        fake.ask(method="sleep", seconds=30, timeout=0.2)
    fake.close()
    assert fake.process.poll() is not None


@pytest.mark.parametrize("load", [0.02, 0.3])
def test_a_run_goes_on_without_a_system_that_fails(awake, tmp_path, monkeypatch, capsys, load):
    """One worker works, one cannot be built, one dies at its second visit; marked if under load."""
    code = """
name, count = sys.argv[1], [0]
def handle(request):
    if request["method"] == "rates":
        return {"fp32": 1e12, "bf16": 2e12, "int8": 2e12, "bandwidth": 1e10}
    if request["method"] == "build":
        if name == "marian": raise ImportError("no such\\npackage")
        return {"parameters": 1, "versions": {"torch": "2"}}
    count[0] += 1
    if name == "torch" and count[0] == 2: os._exit(1)
    reply = {"seconds": 0.5 if name == "torch" else 0.25, "tokens": 100}
    return reply | ({"peak": 5} if request["warmup"] else {})"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.LoadMonitor, "other_load", lambda self: load)
    monkeypatch.setattr(program, "start_worker", lambda system, _: start(code, system))
    arguments = ["--only", "train, base", "--systems", "annotated,torch,marian",
                 "--time-scale", "0.05", "--threads", "1", "--allow-load"]
    assert program.main(arguments) == 0
    results = json.loads((tmp_path / "_build/bench/part.json").read_text())
    assert results["load"]["before"] == load and results["disturbed"] is (load > 0.1)
    assert len(results["rates"]) == 1
    rows = {entrant["system"]: entrant for entrant in results["cells"][1]["entrants"]
            if entrant["precision"] == "fp32"}
    assert (rows["annotated"]["tokens"], rows["annotated"]["peak"]) == (100, 5)
    assert len(rows["annotated"]["seconds"]) >= 3
    assert rows["marian"]["failed"] == "ImportError: no such package"
    assert "ended with status 1" in rows["torch"]["failed"]
    text = capsys.readouterr().out
    assert "| annotated fp32 | 1 | 400 | 1.00" in text and "| marian fp32 | failed: Imp" in text
    assert ("A run under load: others took up to 30%" in text) is (load > 0.1)


# -- the work --------------------------------------------------------------------------------------


def test_flops_are_those_of_torchs_counter():
    size = workloads.Size(N=2, d_model=32, d_ff=64, h=4, vocab_size=100)
    model = random_model(100, N=2, d_model=32, d_ff=64, h=4)
    source, target = torch.randint(4, 100, (3, 7)), torch.randint(4, 100, (3, 5))
    with FlopCounterMode(display=False) as counter:
        logits = model(source, target)
    assert counter.get_total_flops() == workloads.forward_flops(size, 7, 5, 3)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * workloads.forward_flops(size, 7, 5, 3)


def test_decoding_counts_a_token_at_a_time():
    """The operations are those of the encoder, the memory's keys and values, and each step."""
    size, rates, d = workloads.Size(2, 32, 64, 4, 100), {"fp32": 1e9, "bandwidth": 1e30}, 32
    flops, _, seconds = workloads.decoding_cost(size, 3, 1, rates, "fp32", source=7, target=5)
    matrices = 2 * (4 * d * d + 2 * d * 64)
    own = matrices + 2 * (2 * d * d) + d * 100  # of a token that is written
    encoder, memory = 7 * matrices + 2 * 2 * 7 * 7 * d, 7 * 2 * (2 * d * d)
    attention = sum(2 * 2 * d * (t + 7) for t in range(1, 6))
    assert flops == 3 * 2 * (encoder + memory + 5 * own + attention)
    assert seconds == pytest.approx(flops / 1e9)
    rates = {"bf16": 1e30, "bandwidth": 1.0}
    _, moved, seconds = workloads.decoding_cost(size, 1, 1, rates, "bf16", source=7, target=1)
    assert moved == seconds == 2 * (matrices + memory // 7 + own) + 2 * 2 * d * 2 * (1 + 7)


def test_sizes_are_the_models_own():
    with torch.device("meta"):
        parameters = Transformer(TransformerConfig.base()).parameters()
    assert sum(BASE.weights) == sum(weight.numel() for weight in parameters if weight.dim() == 2)


# -- the systems -----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setitem(workloads.SIZES, "tiny", workloads.Size(1, 16, 32, 2, 60))
    yield
    torch.set_num_threads(threads)


def test_our_engine_on_ctranslate2_writes_as_many_tokens_as_asked(small, tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))  # where what it reads is kept
    handler = worker.RequestHandler("annotated, CTranslate2")
    handler.handle({"method": "build", "size": "tiny", "precision": "fp32"})
    request = {"method": "measure", "precision": "fp32", "setting": [1, 1], "warmup": True}
    reply = handler.handle({**request, "task": "generate", "beam": 1, "batch": 2})
    assert reply["tokens"] == 80


@pytest.mark.parametrize("system", ["annotated", "torch", "marian"])
def test_systems_learn_and_write_as_many_tokens_as_asked(system, small):
    """Those that the tests can train: the loss falls, 40 tokens are written without an end."""
    torch.manual_seed(0)
    handler = worker.RequestHandler(system)
    facts = handler.handle({"method": "build", "size": "tiny"})
    trained = [weight for weight in handler.system.model.parameters() if weight.requires_grad]
    assert facts["parameters"] == sum(weight.numel() for weight in trained)
    request = {"method": "measure", "precision": "fp32", "setting": [1, 1], "warmup": True}
    reply = handler.handle({**request, "task": "train", "tokens": 128})
    assert reply["tokens"] == 128 and torch.get_num_threads() == 1
    batch = handler._batches(1, 128)[0]
    for group in handler.system.optimizer.param_groups:
        group["lr"] = 0.01
        assert group["fused"]
    losses = [handler.system.train_step(batch, "fp32") for _ in range(8)]
    assert losses[-1] < losses[0]
    rates = [m.p for m in handler.system.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert sorted(set(rates)) in ([0.0, 0.1], [0.1], [])
    if system == "torch":  # which has no decoding of its own
        return
    handler.handle({"method": "build", "size": "tiny", "precision": "fp32"})
    for beam in (1, 4):
        reply = handler.handle({**request, "task": "generate", "beam": beam, "batch": 2})
        assert reply["tokens"] == 80 and reply["end"] - reply["start"] == reply["seconds"] > 0


@pytest.mark.parametrize("system", ["annotated", "torch", "marian"])
def test_compiled_systems_learn_the_same(system, small, monkeypatch, unenforced):
    """Through a backend that only keeps the graphs: all steps, with the losses of the plain one."""
    graphs, calls = [], []

    def backend(graph, _):
        graphs.append(graph)
        return lambda *arguments: calls.append(graph) or graph.forward(*arguments)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self:
                        setattr(self, "_compiled_call_impl", torch.compile(self._call_impl)))
    handler = worker.RequestHandler(system)
    handler.size = "tiny"
    batch, losses = handler._batches(1, 128)[0], {}
    for name in (system, f"{system}, compiled"):
        trainer = make_system(name, "tiny")
        assert not graphs, "the plain one was compiled"
        torch.manual_seed(1)
        losses[name] = [trainer.train_step(batch, "fp32") for _ in range(3)]
    assert len(calls) >= 3, "not every step went through what was compiled"
    assert len(set(losses[system])) == 3 and losses[system] == pytest.approx(losses[name], rel=1e-5)


def test_waits_are_the_warnings_of_pytorch_s_own_watch(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with worker.record_syncs("cuda") as found:
        for text in ("called a synchronizing CUDA operation (Triggered internally)", "old") * 2:
            warnings.warn(text, stacklevel=1)
    assert len(found) == 2 and modes == ["warn", "default"]


def test_several_workers_share_a_batch_timed_from_the_first_start_to_the_last_end(monkeypatch):
    """Two made-up workers: 17 and 16 of 33 sentences; one begins at 1 s, the other ends at 5 s."""
    code = """
n = int(sys.argv[1])
def handle(request):
    if request["method"] == "build":
        return {"parameters": 1, "versions": {}}
    assert request["setting"] == [1, 1], request
    return {"seconds": 3.0, "start": 1.0 + n, "end": 4.0 + n, "tokens": 40 * request["batch"]}"""
    numbers = itertools.count()
    monkeypatch.setattr(program, "start_worker", lambda *_: start(code, str(next(numbers))))
    cell = workloads.Cell("greedy", "tiny", (workloads.Contender("annotated"),), batch=33)
    with contextlib.closing(program.WorkerPool([cell], program.parse_args([]), [])) as pool:
        request = program.measure_request(cell, cell.contenders[0], workloads.BATCH_TOKENS)
        reply = pool.measure(("annotated", "fp32"), True, request, (2, 1))
        assert reply == {"seconds": 4.0, "tokens": 40 * 33}
