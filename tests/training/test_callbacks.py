"""Callbacks: progress, log, checkpoints in a thread, SIGTERM, early stopping, and a user's own."""

import signal
import time
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from helpers import one_thread, state
from safetensors import SafetensorError
from small_runs import LONG, PAIRS, QUICK, digests, interrupt, run, tiny

from annotated.results import read_json_lines
from annotated.training import callbacks, checkpoints, loop, run_state
from annotated.training.callbacks import INTERRUPTED, Callback, CheckpointWriter, LogFile, hooks
from annotated.training.checkpoints import run_checkpoints
from annotated.training.loop import train

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


class Record(Callback):
    """Notes each hook with its step, and may do something at one."""

    def __init__(self, at=None, act=None):
        self.seen, self.at, self.act = [], at, act

    def note(self, hook, run=None):
        self.seen.append((hook, run and run.step))
        if self.seen[-1] == self.at:
            self.act(run)


for hook in ("on_start", "on_validation", "on_step", "on_end", "close"):
    setattr(Record, hook, lambda self, run=None, row=None, hook=hook: self.note(hook, run))


def test_hooks_come_in_order_and_all_are_closed_after_an_error():
    record = Record()
    log = train(tiny(), PAIRS, PAIRS, replace(QUICK, steps=3), False, callbacks=[record])
    assert record.seen == [
        ("on_start", 0), ("on_step", 1), ("on_validation", 2), ("on_step", 2),
        ("on_validation", 3), ("on_step", 3), ("on_end", 3), ("close", None)] and len(log) == 2
    first, second = Record(), Record(("on_step", None), lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError), hooks([first, second]) as call:
        call("on_step", None)
    assert first.seen[-1] == second.seen[-1] == ("close", None)


def steps_in(folder):
    return [row["step"] for row in read_json_lines(folder / "log.jsonl")]


def names(folder, **options):
    return [path.name for path in run_checkpoints(folder, **options)]


def test_a_callback_may_end_a_run_well_or_interrupt_it(tmp_path):
    well = Record(("on_step", 4), lambda run: setattr(run, "finished", True))
    log = train(tiny(), PAIRS, PAIRS, LONG, False, tmp_path / "well", callbacks=[well])
    assert log[-1]["step"] == 4
    assert names(tmp_path / "well", scheduled=True)[-1] == "step-00000004"
    stop = Record(("on_step", 4), lambda run: setattr(run, "stop_requested", True))
    with pytest.raises(SystemExit) as stopped:
        train(tiny(), PAIRS, PAIRS, LONG, False, tmp_path / "stop", callbacks=[stop])
    assert stopped.value.code == INTERRUPTED == 75
    assert stop.seen[-2:] == [("on_end", 5), ("close", None)]
    assert names(tmp_path / "stop", scheduled=True) == ["step-00000003"]
    assert names(tmp_path / "stop")[-1] == "step-00000005"


def test_progress_is_shown_on_request_with_real_target_tokens_a_second(monkeypatch, capsys):
    train(tiny(), PAIRS, PAIRS, QUICK, show_progress=False)
    assert capsys.readouterr() == ("", "")
    clock = chain([100.0], repeat(104.0))
    monkeypatch.setattr(run_state, "time", SimpleNamespace(time=clock.__next__))
    rows = []
    log = train(tiny(), PAIRS, PAIRS[:1], QUICK, report=rows.append)
    assert [row.pop("tokens_per_second") for row in rows] == [row["tokens"] / 4 for row in log]
    assert rows == log and len(log) == 3
    shown = f"{log[-1]['tokens'] / 4:,.0f} tokens/s, train {log[-1]['train_loss']:.3f}, valid "
    assert shown in capsys.readouterr().err


def test_only_the_first_process_keeps_the_log(tmp_path, monkeypatch):
    row = {"step": 2, "train_loss": 4.0}
    for rank, there in ((1, False), (0, True)):
        monkeypatch.setattr(callbacks, "ranks", lambda rank=rank: (rank, 2))
        LogFile(tmp_path).on_validation(SimpleNamespace(log=[row]), row)
        assert (tmp_path / "log.jsonl").exists() == there
    assert read_json_lines(tmp_path / "log.jsonl") == [row]


LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.2, 3.1, 2.0]  # lowest in row 4; equal is not lower


@pytest.mark.parametrize("patience, rows", [(0, 9), (1, 3), (2, 6), (4, 8), (5, 9)])
def test_a_training_ends_when_the_loss_stands_still(patience, rows, tmp_path, monkeypatch):
    losses = iter(LOSSES)
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: next(losses))
    config = replace(QUICK, steps=18, save_every=18, patience=patience)
    log = train(tiny(), PAIRS, PAIRS, config, False, tmp_path)
    assert [row["valid_loss"] for row in log] == LOSSES[:rows] and log[-1]["step"] == 2 * rows
    assert names(tmp_path) == [f"step-{2 * rows:08}"]
    again = train(tiny(), PAIRS, PAIRS, config, False, tmp_path)
    assert again == log, "a run that has ended ends again at once"
    more = train(tiny(), PAIRS, PAIRS, replace(config, patience=9), False, tmp_path)
    assert [row["valid_loss"] for row in more] == LOSSES, "with more patience it goes on"


def test_leaving_the_block_waits_for_the_task():
    finished = []
    with pytest.raises(KeyError), hooks([writer := CheckpointWriter("nowhere")]):
        writer.start(lambda: (time.sleep(0.1), finished.append("written")))
        raise KeyError
    assert finished == ["written"]


def test_an_error_of_the_last_checkpoint_is_raised_at_the_end():
    with pytest.raises(ZeroDivisionError), hooks([writer := CheckpointWriter("nowhere")]) as call:
        writer.start(lambda: 1 / 0)
        call("on_end", None)


STEP_4 = 1 + 2 * 3 + 2 + 1  # the rehearsal, two micro-batches a step, two validation batches


@pytest.fixture
def heard():
    """Signals that a shell ignores for a program in the background are heard again."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(name, undisturbed, tmp_path, capsys, heard):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", hook=interrupt(STEP_4, number))
    assert stopped.value.code == INTERRUPTED and signal.getsignal(number) is before
    told = capsys.readouterr().err
    assert "interrupted after step 4: the checkpoint is saved" in told
    assert ("press Ctrl-C again to end at once" in told) == (name == "SIGINT")
    assert names(tmp_path / "run") == ["step-00000003", "step-00000004"]
    log, model = run(tmp_path / "run", seed=5)
    assert digests(tmp_path / "run") == undisturbed.digests and log == undisturbed.log
    assert torch.equal(state(model), undisturbed.weights)
    assert run(tmp_path / "run", seed=6)[0] == log, "a finished run is not trained on"


def test_sigterm_is_heard_late_where_numbers_are_read_late(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": 3})
    config = replace(LONG, save_every=100, validate_every=12)
    with pytest.raises(SystemExit):  # in step 4, whose round is that of steps 5 and 6
        run(tmp_path / "run", hook=interrupt(after=1 + 2 * 3 + 1), config=config)
    assert names(tmp_path / "run") == ["step-00000006"]
    log, model = run(tmp_path / "run", seed=5, config=config)
    assert torch.equal(state(model), undisturbed.weights)
    assert log[-1]["valid_loss"] == undisturbed.log[-1]["valid_loss"]


def test_training_goes_on_while_it_is_saved_and_a_full_disk_leaves_what_was_saved_before(
        undisturbed, tmp_path, monkeypatch):
    passes, seen, real = [], [], checkpoints.save_file

    def slow(tensors, path):
        before, deadline = len(passes), time.time() + 20
        # until the loop goes on
        while not seen and len(passes) == before and time.time() < deadline:
            time.sleep(0.001)
        seen.append(len(passes) - before)
        if len(seen) == 4:  # the optimiser of the second checkpoint
            path.write_bytes(b"half of it")
            raise SafetensorError("I/O error: No space left on device")
        real(tensors, path)

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(checkpoints, "save_file", slow)
        run(tmp_path / "run", hook=lambda *_: (passes.append(1), time.sleep(0.005))[0])
    assert seen[0] > 0, "the loop stood still"
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["log.jsonl", "step-00000003"]
    assert run(tmp_path / "run", seed=5)[0] == undisturbed.log
    assert digests(tmp_path / "run") == undisturbed.digests


def test_a_second_ctrl_c_ends_at_once_and_nohup_stays_in_force(tmp_path, heard):
    def twice(run):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    def go(act):
        train(tiny(), PAIRS, PAIRS, LONG, False, tmp_path / "run",
              callbacks=[Record(("on_step", 4), act)])

    with pytest.raises(KeyboardInterrupt):
        go(twice)
    assert names(tmp_path / "run") == ["step-00000003"] and steps_in(tmp_path / "run") == [2, 4]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    go(lambda run: signal.raise_signal(signal.SIGHUP))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert steps_in(tmp_path / "run") == [2, 4, 6, 8, 10, 12], "each validation once"
