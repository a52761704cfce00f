"""Training in several processes, and runs that are killed: the same losses, and the same bits."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest
from helpers import ROOT
from small_runs import digests
from test_cli import write_corpus

from annotated.training.callbacks import INTERRUPTED
from annotated.training.checkpoints import run_checkpoints

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1",
                            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
LONG_RUN = '''
import json, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from annotated.training.checkpoints import run_checkpoints
from annotated.training.distributed import all_gather, parallelize, process_group, ranks
from small_runs import LONG, PAIRS, Poisoned, run, tiny
def long_run(folder, hook=None):
    config = replace(LONG, steps=40, accumulate=1, validate_every=10)
    return run(folder, ranks()[0], config, PAIRS * 12, hook)
torch.set_num_threads(1)'''
FAULTY = LONG_RUN + '''
folder, fault, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
rank, life = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
note, once = Path(f"{folder}.{rank}.{life}"), Path(f"{folder}.once")
# who this is and where it begins
note.write_text(f"{os.getpid()} {[path.name for path in run_checkpoints(folder)][-1:]}")
calls = []
def act(*_):
    calls.append(1)
    if fault != "none" and rank == 1 and len(calls) == 22 and not once.exists():  # of step 20
        while fault != "term" and not (folder / "step-00000018").is_dir():
            time.sleep(0.02)  # a thread of rank 0 writes it
        once.touch()
        os.kill(os.getpid(), getattr(signal, f"SIG{fault.upper()}"))
with process_group("cpu", timeout):
    note.with_suffix(f".{life}.met").touch()
    try:
        long_run(folder, act)
    except SystemExit as stopped:
        note.with_suffix(".code").write_text(str(stopped.code))
        raise'''
WORKER = LONG_RUN + '''
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from annotated.training import loop
from annotated.training.loader import BatchLoader
def counted(model):
    network = parallelize(model)
    if ranks()[1] > 1:
        network.register_comm_hook(
            None, lambda s, bucket: (sent.append(1), allreduce_hook(s, bucket))[1])
    return network
with process_group("cpu", 60):
    sent, seen, load, loop.parallelize = [], [], BatchLoader.load, counted
    BatchLoader.load = lambda loader, numbered: (
        seen.append(numbered[1].tolist()) or load(loader, numbered))
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (40, 2), generator=draw).tolist()
    pairs = [tuple(torch.randint(4, 16, (n,), generator=draw).tolist() for n in pair)
             for pair in lengths]
    model = Poisoned(tiny(ranks()[0]).config).double()  # DDP takes the first weights of rank 0
    config = replace(LONG, steps=50, warmup=10, validate_every=10, max_skipped=30)
    report = {"log": loop.train(model, pairs, pairs[:7], config, show_progress=False),
              "batches": seen[:50], "reductions": len(sent),
              "poisoned": [i for i, (source, _) in enumerate(pairs) if 9 in source],
              "weights": all_gather(sum(x.sum().item() for x in model.state_dict().values()))}
    if ranks()[1] > 1:
        long_run(Path(sys.argv[1]))
    if ranks()[0] == 0:
        print(json.dumps(report))'''


def execute(command):
    """Run Python in a process of its own; returns what its last line says as JSON."""
    printed = subprocess.check_output([sys.executable, *command], text=True, timeout=1800,
                                      env=ENVIRONMENT)
    return json.loads(printed.splitlines()[-1])


TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the scripts."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "worker.py").write_text(WORKER)
    (folder / "faulty.py").write_text(FAULTY)
    return folder


@pytest.fixture(scope="module")
def reports(place):
    """The same work by one process and by two."""
    command = [str(place / "worker.py"), str(place / "undisturbed")]
    return execute(command), execute([*TORCHRUN, "--max-restarts=3", *command])


@pytest.fixture(scope="module")
def undisturbed(reports, place):
    """The digests of the last checkpoint of a run of two processes that nothing happened to."""
    return digests(place / "undisturbed")


def launch(*command, **environment):
    """Start Python with a command; its output can be read at its end."""
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, start_new_session=True,
                            stderr=subprocess.PIPE, env=ENVIRONMENT | environment)


def launch_two(*command):
    """Start two processes that find each other without torchrun; {rank} in a word is theirs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [launch(*(str(word).format(rank=rank) for word in command),
                   RANK=str(rank), LOCAL_RANK=str(rank), **both) for rank in range(2)]


def meeting(start, folder, limit=60, met=None):
    """What `start()` returns, processes whose two workers have met, which `met(processes)` tells.

    Where the first handshake is lost, which gloo does not notice before its time limit, they are
    started again, with more time: the machine may be slow.
    """
    met = met or (lambda _: len(list(folder.parent.glob(f"{folder.name}*.met"))) == 2)
    for attempt in range(4):
        started, deadline = start(), time.monotonic() + limit * 2**attempt
        both = started if isinstance(started, list) else [started]
        while time.monotonic() < deadline:
            if met(both):
                return started
            time.sleep(0.02)
        for process in both:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
        for process, _ in lives(folder).values():  # torchrun gives its workers groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for note in folder.parent.glob(f"{folder.name}*.[01].*"):
            note.unlink()
    pytest.fail(f"two processes on this machine could not meet: {errors[-2000:]}")


def end(process, limit=1800):
    """(exit status, standard error) of a process; one that takes longer is killed, and fails."""
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, errors


def lives(folder):
    """{(rank, restart): (process id, newest checkpoint at its beginning)} of a run."""
    begun = {}
    for note in folder.parent.glob(f"{folder.name}*.[01].[0-9]"):
        process, newest = note.read_text().split(" ", 1)
        begun[tuple(map(int, note.name.split(".")[1:]))] = int(process), newest
    return begun


def test_two_processes_train_and_skip_steps_as_one(reports):
    alone, both = reports
    assert alone["batches"] == both["batches"] and 1 in map(len, both["batches"]), "no empty share"
    assert both["reductions"] == 50, "one for each batch, however many micro-batches it has"
    skipped = [row.pop("skipped", []) for report in reports for row in report["log"]]
    assert skipped[:5] == skipped[5:] and 3 < len(sum(skipped[:5], [])) < 47
    for entry in sum(skipped[:5], []):
        assert set(entry["pairs"]) & set(alone["poisoned"])
    for mine, theirs in zip(alone["log"], both["log"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    first, *_, last = (row["valid_loss"] for row in alone["log"])
    assert last < first - 0.1, "nothing was trained"
    (weights,), (first, second) = alone["weights"], both["weights"]
    assert first == second == pytest.approx(weights, abs=1e-9)


def test_dead_process_is_started_again_and_the_run_ends_with_the_same_bits(undisturbed, place):
    folder = place / "elastic"
    # gloo ends a lost handshake after 30 seconds, which costs a restart
    status, errors = end(launch(*TORCHRUN, "--max-restarts=5", place / "faulty.py", folder, "kill",
                                30))
    assert status == 0, errors[-3000:]
    begun = lives(folder)
    met = Counter(note.name.split(".")[2] for note in place.glob("elastic.*.met"))
    assert list(met.values()).count(2) == 2, "not one restart of both"
    assert begun[0, 0][1] == "[]" and begun[max(begun)][1] == "['step-00000018']"
    assert digests(folder) == undisturbed
    for process, _ in begun.values():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("fault, timeout", [
    ("kill", 600), pytest.param("stop", 5, marks=pytest.mark.long)])
def test_process_whose_partner_is_gone_ends_with_an_error(place, fault, timeout):
    folder = place / f"partner-{fault}"
    command = place / "faulty.py", folder, fault, timeout
    first, second = meeting(lambda: launch_two(*command), folder)
    try:
        status, errors = end(first)
        assert status not in (0, INTERRUPTED) and "RuntimeError" in errors
    finally:
        second.kill()
        second.communicate()
    assert run_checkpoints(folder)[-1].name == "step-00000018", "the last checkpoint before"


def test_sigterm_to_one_of_two_stops_both_and_rank_0_reads_for_all_when_they_go_on(
        undisturbed, place):
    folder = place / "term"
    run = meeting(lambda: launch_two(place / "faulty.py", folder, "term", 600), folder)
    assert [end(process)[0] for process in run] == [INTERRUPTED] * 2
    assert run_checkpoints(folder)[-1].name == "step-00000020", "not saved after the step"
    apart = place / "apart{rank}"  # rank 1 has another disk
    folder.rename(place / "apart0")
    run = meeting(lambda: launch_two(place / "faulty.py", apart, "none", 600), place / "apart")
    assert [end(process)[0] for process in run] == [0, 0]
    assert digests(place / "apart0") == undisturbed and not (place / "apart1").exists()


def test_a_rank_with_another_corpus_ends_all_with_the_same_message(place):
    for rank, word in enumerate(("Hund", "Katze")):
        write_corpus(place / f"corpus{rank}", [("a dog", f"ein {word}"), ("the dog", "der Hund")])
    options = ("--N 1 --d-model 16 --d-ff 16 --h 2 --steps 2 --max-tokens 64 --tokenizer words "
               "--source en --target de --device cpu").split()
    command = ["-m", "annotated", "train", place / "corpus{rank}", "--out", place / "never",
               *options]
    run = meeting(lambda: launch_two(*command), place / "never",
                  met=lambda both: all(process.poll() is not None for process in both))
    for status, errors in map(end, run):
        assert status == 2 and "error: rank 1 has another " in errors
        assert "give all processes the same" in errors
    assert not (place / "never").exists()
