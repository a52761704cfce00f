"""Training in several processes, and runs that are killed: the same losses, and the same bits."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from annotated.training.callbacks import INTERRUPTED
from annotated.training.checkpoints import MANIFEST, run_checkpoints

ROOT = Path(__file__).resolve().parent.parent
LONG_RUN = '''
import os, random, signal, sys, time
from pathlib import Path
import torch
from annotated.training.checkpoints import run_checkpoints
from annotated.training.distributed import parallelize, process_group, ranks, sum_over_ranks
from annotated.training.loop import TrainingConfig, train
from annotated.model.transformer import Transformer, TransformerConfig

def long_run(folder, before_forward=lambda calls: None):
    """A run with dropout and checkpoints; `before_forward` gets the number of each call."""
    draw, calls = random.Random(0), []
    pairs = [([draw.randrange(4, 16) for _ in range(draw.randrange(1, 9))],
              [draw.randrange(4, 16)]) for _ in range(60)]
    torch.manual_seed(ranks()[0])
    model = Transformer(TransformerConfig(16, N=1, d_model=16, d_ff=32, h=2, dropout=0.1))
    model.encoder.register_forward_pre_hook(
        lambda *_: (calls.append(1), before_forward(len(calls)))[1])
    config = TrainingConfig(steps=40, max_tokens=64, warmup=20, factor=0.3, validate_every=10,
                            save_every=3, keep_last=2)
    return train(model, pairs, pairs[:9], config, show_progress=False, run_folder=folder)
'''
FAULTY = LONG_RUN + '''
folder, fault, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
rank, life = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
note = Path(f"{folder}.{rank}.{life}")  # who this is and where it begins
note.write_text(f"{os.getpid()} {[path.name for path in run_checkpoints(folder)][-1:]}")

def act(calls):
    if fault == "slow":
        time.sleep(0.05)
    elif fault != "none" and rank == 1 and calls == 22 and life == 0:
        while fault != "term" and not (folder / "step-00000018").is_dir():
            time.sleep(0.02)  # a thread of rank 0 writes it
        os.kill(os.getpid(), getattr(signal, f"SIG{fault.upper()}"))

torch.set_num_threads(1)
with process_group("cpu", timeout):
    note.with_suffix(f".{life}.met").touch()
    try:
        long_run(folder, act)
    except SystemExit as stopped:
        note.with_suffix(".code").write_text(str(stopped.code))
        raise
'''
WORKER = LONG_RUN + '''
import copy, json, math
import numpy as np
from annotated.training import loop
from annotated.training.distributed import all_gather
from annotated.training.loader import BatchLoader
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.training.loop import forward_backward

class Poisoned(Transformer):
    """Hidden vectors are NaN for a batch with the source token 9, once the rehearsal is over."""

    healthy = 1

    def hidden(self, source, target):
        self.healthy -= self.training
        bad = self.healthy < 0 and (source == 9).any()
        return super().hidden(source, target) * (math.nan if bad else 1)

torch.set_num_threads(1)
with process_group("cpu", 60):
    rank, world = ranks()
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (40, 2), generator=draw).tolist()
    pairs = [tuple(torch.randint(4, 20, (n,), generator=draw).tolist() for n in pair)
             for pair in lengths]
    torch.manual_seed(rank)  # DDP takes the first weights of rank 0
    model = Transformer(TransformerConfig(20, N=1, d_model=16, d_ff=32, h=2, dropout=0.0)).double()
    report = {"world": world, "gradients": []}
    other = copy.deepcopy(model)
    network = parallelize(other)
    criterion = LabelSmoothingLoss(0.1, reduction="sum")
    synchronised = []
    if world > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        network.register_comm_hook(
            None, lambda s, bucket: (synchronised.append(1), allreduce_hook(s, bucket))[1])
    for size, accumulate in ((12, 1), (12, 3), (1, 2)):  # of one three shares are empty
        other.zero_grad()
        loader = BatchLoader(pairs, TrainingConfig(accumulate=accumulate))
        batch = loader.load(((0, 1), np.arange(size)))
        loss = forward_backward(other, batch.micro_batches, batch.tokens, criterion,
                                network=network)
        gradient = torch.cat([weight.grad.flatten() for weight in other.parameters()])
        report["gradients"].append([*sum_over_ranks(loss.item()), *gradient.tolist()])
    report["reductions"] = len(synchronised)
    seen, load = [], BatchLoader.load
    BatchLoader.load = lambda loader, numbered: (
        seen.append(numbered[1].tolist()) or load(loader, numbered))
    config = TrainingConfig(steps=50, max_tokens=32, warmup=10, factor=0.3, validate_every=1)
    report["log"] = train(model, pairs, pairs[:7], config, show_progress=False)
    report["batches"] = seen
    BatchLoader.load, validate = load, loop.validation_loss
    loop.validation_loss = lambda *_, **__: 1.0
    torch.manual_seed(0)
    poisoned = Poisoned(model.config).double()
    config = TrainingConfig(steps=30, max_tokens=16, warmup=10, factor=0.3, validate_every=10,
                            max_skipped=30)
    log = train(poisoned, pairs, pairs[:7], config, show_progress=False)
    loop.validation_loss = validate
    report["skipped"] = [entry for row in log for entry in row.get("skipped", [])]
    report["poisoned losses"] = [row["train_loss"] for row in log]
    weights = sum(weight.sum().item() for weight in poisoned.state_dict().values())
    report["poisoned weights"] = [sum_over_ranks(weights * (rank == r))[0] for r in range(world)]
    report["poisoned pairs"] = [i for i, (source, _) in enumerate(pairs) if 9 in source]
    dropped = []
    model = Transformer(TransformerConfig(20, N=1, d_model=16, d_ff=32, h=2, dropout=0.5))
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    first.register_forward_hook(
        lambda _, given, out: dropped.append(((out == 0) & (given[0] != 0)).flatten().tolist()))
    config = TrainingConfig(steps=2, max_tokens=200, warmup=10)
    train(model, pairs, pairs[:7], config, show_progress=False)
    report["dropped"] = all_gather(dropped[1])  # by the first step, after the rehearsal
    if world > 1:
        long_run(Path(sys.argv[1]))
    if rank == 0:
        print(json.dumps(report))
'''


def execute(command):
    """Run Python in a process of its own; returns what its last line says as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240,
                          env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


APART = LONG_RUN + '''
import json
torch.set_num_threads(1)
with process_group("cpu", 60):
    from annotated.training import run_state
    from annotated.training.distributed import all_gather
    read, real = [], run_state.read_newest
    run_state.read_newest = lambda folder: read.append(1) or real(folder)
    log = long_run(Path(sys.argv[1]) if ranks()[0] == 0 else Path(sys.argv[1] + "-elsewhere"))
    read = all_gather(len(read))
    if ranks()[0] == 0:
        print(json.dumps({"steps": log[-1]["step"], "read": read}))
'''


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


def digests(folder):
    """What identifies the end of a run: weights, optimiser, random numbers, log."""
    last = run_checkpoints(folder)[-1]
    assert last.name == "step-00000040"
    return json.loads((last / MANIFEST).read_text())["files"]


def launch(*command, **environment):
    """Start Python with a command; its output can be read at its end."""
    environment = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, start_new_session=True,
                            stderr=subprocess.PIPE,
                            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def launch_two(*command):
    """Start two processes that find each other without torchrun; {rank} in a word is theirs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [launch(*(str(word).format(rank=rank) for word in command),
                   RANK=rank, LOCAL_RANK=rank, **both) for rank in range(2)]


def meeting(start, folder, limit=60):
    """What `start()` returns, processes whose two workers have met.

    Where the first handshake is lost, which gloo does not notice before its time limit, they are
    started again.
    """
    for _ in range(4):
        started, deadline = start(), time.time() + limit
        both = started if isinstance(started, list) else [started]
        while time.time() < deadline and all(process.poll() is None for process in both):
            if len(list(folder.parent.glob(f"{folder.name}.*.met"))) == 2:
                return started
            time.sleep(0.02)
        for process in both:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for process, _ in lives(folder).values():  # torchrun gives its workers groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for note in folder.parent.glob(f"{folder.name}.*"):
            note.unlink()
    pytest.fail("two processes on this machine could not meet")


def end(process, limit=240):
    """(exit status, standard error) of a process; one that takes longer is killed, and fails."""
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, errors


def wait_for_checkpoint(process, folder, least, limit=240):
    """Wait until a run has saved itself after so many steps."""
    deadline = time.time() + limit
    while not (newest := run_checkpoints(folder)[-1:]) or int(newest[0].name[5:]) < least:
        assert process.poll() is None and time.time() < deadline, f"not at step {least} in time"
        time.sleep(0.02)


def lives(folder):
    """{(rank, restart): (process id, newest checkpoint at its beginning)} of a run."""
    begun = {}
    for note in folder.parent.glob(f"{folder.name}.[01].[0-9]"):
        process, newest = note.read_text().split(" ", 1)
        begun[tuple(map(int, note.name.split(".")[1:]))] = int(process), newest
    return begun


def assert_all_gone(folder):
    """No process of a run is left over."""
    for process, _ in lives(folder).values():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_two_processes_give_the_gradient_of_one(reports):
    alone, both = reports
    assert (alone["world"], both["world"]) == (1, 2)
    for mine, theirs in zip(alone["gradients"], both["gradients"], strict=True):
        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-9
        assert max(map(abs, mine[1:])) > 1e-3
    assert both["reductions"] == 3, "one for each batch, however many micro-batches it has"


def test_two_processes_see_the_same_batches_and_losses(reports):
    alone, both = reports
    assert alone["batches"][:50] == both["batches"][:50]
    assert len(alone["log"]) == len(both["log"]) == 50
    for mine, theirs in zip(alone["log"], both["log"], strict=True):
        for name in ("train_loss", "valid_loss"):
            assert abs(mine[name] - theirs[name]) < 1e-9, f"{name} at step {mine['step']}"
        assert (mine["rate"], mine["tokens"]) == (theirs["rate"], theirs["tokens"])
    first, *_, last = (row["valid_loss"] for row in alone["log"])
    assert last < first - 0.1, "nothing was trained"


def test_each_process_draws_dropout_of_its_own(reports):
    _, both = reports
    pairs = list(zip(*both["dropped"]))  # noqa: B905  the shares of a batch differ in size
    assert len(pairs) > 200 and all(0.4 < sum(mask) / len(mask) < 0.6 for mask in both["dropped"])
    assert 0.35 < sum(mine == theirs for mine, theirs in pairs) / len(pairs) < 0.65


def test_two_processes_skip_the_same_steps_together(reports):
    alone, both = reports
    assert alone["skipped"] == both["skipped"] and 3 < len(alone["skipped"]) < 27
    assert all(set(entry["pairs"]) & set(alone["poisoned pairs"]) for entry in alone["skipped"])
    (weights,), (first, second) = alone["poisoned weights"], both["poisoned weights"]
    assert first == second == pytest.approx(weights, abs=1e-9)
    assert both["poisoned losses"] == pytest.approx(alone["poisoned losses"], abs=1e-9)


def test_dead_process_is_started_again_and_the_run_ends_with_the_same_bits(undisturbed, place):
    folder = place / "elastic"
    command = [*TORCHRUN, "--max-restarts=1", place / "faulty.py", folder, "kill", 30]
    status, errors = end(meeting(lambda: launch(*command), folder), limit=480)
    assert status == 0, errors[-3000:]
    begun = lives(folder)
    assert set(begun) == {(0, 0), (1, 0), (0, 1), (1, 1)}, "not one restart of both"
    assert begun[0, 0][1] == "[]" and begun[1, 1][1] == "['step-00000018']", "not from the last"
    assert digests(folder) == undisturbed
    assert_all_gone(folder)


def test_dead_process_without_restarts_ends_the_run_within_a_minute(place):
    folder = place / "dead"
    command = [*TORCHRUN, place / "faulty.py", folder, "kill", 600]
    process = meeting(lambda: launch(*command), folder)
    wait_for_checkpoint(process, folder, 18)  # two steps later one is dead
    status, errors = end(process, limit=60)
    assert status != 0 and "Signal 9 (SIGKILL)" in errors and len(lives(folder)) == 2
    assert_all_gone(folder)


@pytest.mark.parametrize("fault, timeout", [
    ("kill", 600), pytest.param("stop", 5, marks=pytest.mark.long)])
def test_process_whose_partner_is_gone_ends_with_an_error(place, fault, timeout):
    folder = place / f"partner-{fault}"
    command = place / "faulty.py", folder, fault, timeout
    first, second = meeting(lambda: launch_two(*command), folder)
    try:
        wait_for_checkpoint(first, folder, 18)
        status, errors = end(first, limit=60)
        assert status not in (0, INTERRUPTED) and "RuntimeError" in errors
    finally:
        second.kill()
        second.communicate()
    assert run_checkpoints(folder)[-1].name == "step-00000018", "the last checkpoint before"


@pytest.fixture(scope="module")
def stopped(place):
    """The folder of a run of two processes, one of which got SIGTERM, and how both ended."""
    folder = place / "term"
    run = meeting(lambda: launch_two(place / "faulty.py", folder, "term", 60), folder)
    return folder, [end(process)[0] for process in run]


def test_sigterm_to_one_of_two_processes_stops_both_after_one_step(stopped, undisturbed, place):
    folder = shutil.copytree(stopped[0], place / "goes-on")
    assert stopped[1] == [INTERRUPTED] * 2
    assert run_checkpoints(folder)[-1].name == "step-00000020", "not saved after the step"
    run = meeting(lambda: launch_two(place / "faulty.py", folder, "none", 60), folder)
    assert [end(process)[0] for process in run] == [0, 0]
    assert digests(folder) == undisturbed


def test_rank_0_reads_for_all_when_a_run_goes_on(stopped, undisturbed, place):
    folder = shutil.copytree(stopped[0], place / "apart")
    (place / "apart.py").write_text(APART)
    report = execute([*TORCHRUN, str(place / "apart.py"), str(folder)])
    assert report == {"steps": 40, "read": [1, 0]}
    assert digests(folder) == undisturbed and not (place / "apart-elsewhere").exists()


def test_a_rank_with_another_corpus_ends_all_with_the_same_message(place):
    for name, word in (("corpus0", "Hund"), ("corpus1", "Katze")):
        (place / name).mkdir()
        for split in ("train", "valid", "test"):
            for language, lines in (("en", "a dog sleeps\nthe dog sees a cat\n"),
                                    ("de", f"ein {word} schläft\nder Hund sieht eine {word}\n")):
                (place / name / f"{split}.{language}").write_text(lines)
    options = ("--N 1 --d-model 16 --d-ff 16 --h 2 --steps 2 --max-tokens 64 --tokenizer words "
               "--source en --target de").split()
    run = launch_two("-m", "annotated", "train", place / "corpus{rank}", "--out", place / "never",
                     *options)
    for status, errors in [end(process, limit=120) for process in run]:
        assert status == 2 and "error: rank 1 has another " in errors
        assert "give all processes the same" in errors
    assert not (place / "never").exists()


def test_sigterm_to_torchrun_saves_and_leaves_nobody(place):
    folder = place / "launcher"
    command = [*TORCHRUN, place / "faulty.py", folder, "slow", 600]
    process = meeting(lambda: launch(*command), folder)
    wait_for_checkpoint(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    status, errors = end(process, limit=60)
    assert status == 1, errors[-3000:]
    codes = [note.read_text() for note in place.glob("launcher.*.code")]
    assert codes == [str(INTERRUPTED)] * 2
    assert 3 <= int(run_checkpoints(folder)[-1].name[5:]) < 40
    assert_all_gone(folder)


@pytest.mark.long  # one that dies and is started again: above
@pytest.mark.parametrize("processes", [1, 2])
def test_run_that_is_killed_three_times_ends_with_the_same_bits(processes):
    report = execute([str(ROOT / "experiments" / "kill_loop.py"), "--kills", "3", "--processes",
                      str(processes)])
    assert report["kills"] == 3 and report["equal to the last bit"]
    assert report["of them while a checkpoint was written"] >= 1
    assert report["of them before anything was saved since the kill before"] >= 1
