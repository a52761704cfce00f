"""Runs that survive: processes that find each other, devices, run folders, seconds, workers side by side."""

import json
import threading
import time

import pytest
import torch

from annotated import runs
from annotated.batches import Batch
from annotated.files import read_json_lines
from annotated.runs import (
    check_device,
    first_difference,
    forget_checkpoints,
    newest_checkpoint,
    run_checkpoints,
    run_facts,
)
from annotated.training import TrainingConfig
from annotated.transformer import Transformer, TransformerConfig


@pytest.mark.parametrize("machines, key", [(1, "3/address"), (2, "address")])
def test_a_restarted_process_does_not_read_what_the_dead_have_written(monkeypatch, machines, key):
    kept, groups = torch.distributed.HashStore(), []
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "GROUP_WORLD_SIZE": machines, "TORCHELASTIC_RESTART_COUNT": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(runs.dist, "rendezvous", lambda url, timeout: iter([(kept, 1, 2)]))
    monkeypatch.setattr(runs.dist, "init_process_group", lambda backend, **given: groups.append((backend, given)))
    monkeypatch.setattr(runs.dist, "destroy_process_group", lambda: None)
    with runs.process_group("cpu", 30):
        (backend, given), = groups
    given["store"].set("address", "here")
    assert kept.check([key]) and (backend, given["rank"], given["world_size"], given["timeout"].seconds) == ("gloo", 1, 2, 30)


def test_device_that_is_there_is_accepted():
    assert check_device("cpu") == torch.device("cpu")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f"device '{missing}' cannot be used .*this machine has cpu"):
        check_device(missing)


@pytest.mark.parametrize("there, processes, best", [
    (["cuda", "mps"], 1, "cuda"), (["cuda"], 2, "cuda"), (["mps"], 1, "mps"), (["mps"], 2, "cpu"), ([], 1, "cpu")])
def test_the_best_device_there_is_is_chosen_and_told_once(monkeypatch, capsys, there, processes, best):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in there)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for rank in reversed(range(processes)):
        monkeypatch.setenv("RANK", str(rank))
        assert runs.choose_device("auto") == best
        assert capsys.readouterr() == ("", f"The device is {best}; --device names another.\n" if rank == 0 else "")
    for name in ("cpu", "cuda:1", "mps", "abacus"):
        assert (runs.choose_device(name), *capsys.readouterr()) == (name, "", ""), "what is named is not chosen"


@pytest.mark.parametrize("per_update, taken", [(0.01, 1000), (0.1, 1000), (0.2, 750), (0.25, 600), (1.0, 400), (30.0, 400)])
def test_a_slow_machine_takes_as_many_updates_as_fit_but_not_too_few(monkeypatch, per_update, taken):
    clock, made = [100.0], []
    monkeypatch.setattr(runs.time, "perf_counter", lambda: clock[0])

    def run(updates):
        made.append(updates)
        clock[0] += updates * per_update

    assert runs.updates_in(150, 1000, run, least=0.4) == taken and made == [20]


def steps(folder, *numbers):
    for number in numbers:
        (folder / f"step-{number:08d}").mkdir(parents=True)
    return folder


def test_checkpoints_are_found_by_number_and_the_oldest_forgotten(tmp_path):
    folder = steps(tmp_path / "run", 9, 10, 100, 2)
    (folder / "step-other").mkdir()
    assert [path.name[-3:] for path in run_checkpoints(folder)] == ["002", "009", "010", "100"]
    forget_checkpoints(folder, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000100", "step-other"]


def test_the_newest_whole_one_is_taken_and_the_others_put_aside(tmp_path):
    folder, told = steps(tmp_path / "run", 1, 2, 3), []
    (folder / ".step-00000004.part-abc").mkdir()

    def check(path):
        if path.name.endswith("3"):
            raise ValueError("one bit is flipped")

    assert newest_checkpoint(folder, check, told.append).name == "step-00000002"
    assert len(told) == 1 and "one bit is flipped" in told[0]
    names = sorted(path.name for path in folder.iterdir())
    assert [name[:21] for name in names] == ["damaged-step-00000003", "step-00000001", "step-00000002"]
    assert newest_checkpoint(tmp_path / "none", check) is None
    with pytest.raises(ValueError, match="none of its 2 checkpoints is whole"):
        newest_checkpoint(folder, lambda path: check(path.with_name("3")), told.append)


def test_facts_change_with_what_is_computed_and_with_nothing_else():
    torch.manual_seed(0)
    model, pairs = Transformer(TransformerConfig(9, N=1, d_model=8, d_ff=8, h=1)), ([([4], [5])], [([6], [7])])
    facts = run_facts(model, TrainingConfig(), pairs)
    assert json.loads(json.dumps(facts)) == facts
    for free in ({"steps": 9}, {"save_every": 9}, {"keep_last": 9}, {"max_skipped": 9}):
        assert run_facts(model, TrainingConfig(**free), pairs) == facts
    assert run_facts(model, TrainingConfig(seed=1), pairs) != facts
    assert run_facts(model, TrainingConfig(), pairs[::-1]) != facts
    other = Transformer(TransformerConfig(9, N=1, d_model=8, d_ff=16, h=1))
    assert run_facts(other, TrainingConfig(), pairs) != facts


# Numbers that are read late, and tasks in the background

def read_all(every, steps):
    """What `Readings` hands out after each of some steps, whose number is their loss; the flag is up at step 3."""
    readings = runs.Readings("cpu", every)
    handed = [readings.add(f"step {k}", k == 3, torch.tensor(float(k)), torch.tensor(k / 2)) for k in range(1, steps + 1)]
    return handed, readings.rest(), readings.rest()


def numbers(*steps):
    return [(f"step {k}", [float(k == 3), float(k), k / 2]) for k in steps]


def test_readings_come_at_once_or_a_round_late_and_none_is_lost():
    assert read_all(1, 4) == ([numbers(k) for k in (1, 2, 3, 4)], [], [])
    assert read_all(2, 7) == ([[], [], [], numbers(1, 2), [], numbers(3, 4), []], numbers(5, 6, 7), [])
    assert read_all(3, 3) == ([[], [], []], numbers(1, 2, 3), [])
    assert runs.Readings("cpu").every == 1 and runs.READ_EVERY["cuda"] > 1


def test_a_number_of_the_device_is_not_read_before_its_round(monkeypatch):
    read = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor.shape) or [[0.0]] * len(tensor))
    readings = runs.Readings("cpu", every=4)
    for _ in range(7):
        readings.add(None, False, torch.tensor(1.0))
    assert read == []
    readings.add(None, False, torch.tensor(1.0))
    assert read == [(4, 2)]


def test_tasks_in_the_background_run_one_after_the_other_and_their_errors_come_back():
    told, go, writes = [], threading.Event(), runs.Background()
    writes.start(lambda: (go.wait(20), told.append("first")))
    writes.wait(only_if_done=True)
    assert told == [], "did not wait"
    second = threading.Thread(target=writes.start, args=(lambda: told.append("second"),))
    second.start()
    time.sleep(0.05)
    assert second.is_alive() and told == [], "two at once"
    go.set()
    second.join(20)
    writes.wait()
    assert told == ["first", "second"]
    for look in (writes.wait, lambda: writes.start(print)):
        writes.start(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            look()
        look()  # told once


def test_leaving_the_block_waits_for_the_task():
    told = []
    with pytest.raises(KeyError), runs.Background() as writes:
        writes.start(lambda: (time.sleep(0.1), told.append("written")))
        raise KeyError
    assert told == ["written"]


# Which checkpoints stay

def test_what_sigterm_wrote_is_not_scheduled_and_goes_with_the_next(tmp_path):
    folder = steps(tmp_path / "run", 3, 4, 6, 9)
    for number, scheduled in ((3, True), (4, False), (6, True)):  # 9 has no info, as those of an earlier version
        (folder / f"step-{number:08d}" / "info.json").write_text(json.dumps({"scheduled": scheduled}))
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["3", "4", "6", "9"]
    assert [path.name[-1] for path in run_checkpoints(folder, scheduled=True)] == ["3", "6", "9"]
    forget_checkpoints(folder, keep=3)
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["3", "6", "9"]
    (folder / "step-00000009" / "info.json").write_text(json.dumps({"scheduled": False}))
    forget_checkpoints(folder, keep=1)
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["6", "9"], "the newest stays, whatever it is"


def test_one_without_the_optimiser_is_passed_over_and_stays(tmp_path):
    folder, told = steps(tmp_path / "run", 1, 2, 3), []

    def check(path):
        if path.name.endswith("3"):
            raise ValueError("one bit is flipped")
        raise LookupError("no optimiser")

    with pytest.raises(ValueError, match="none of its 3 checkpoints is whole .step-00000002, step-00000001 lack the optimiser."):
        newest_checkpoint(folder, check, told.append)
    assert [path.name for path in run_checkpoints(folder)] == ["step-00000001", "step-00000002"] and len(told) == 1


def test_the_first_fact_that_differs_is_named():
    facts = {"corpus": "abc", "model": {"N": 1, "h": 2}}
    assert first_difference(facts, dict(facts)) is None
    assert first_difference(facts, {"corpus": "abd", "model": {}}) == ("corpus", "corpus", "abc", "abd")
    assert first_difference(facts, {**facts, "model": {"N": 1, "h": 4}}) == ("model", "h", 2, 4)
    assert first_difference({}, {"model": {"h": 4}}) == ("model", "h", None, 4)


def test_a_bound_on_the_gradient_is_a_fact_and_none_is_what_earlier_runs_had():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(9, N=1, d_model=8, d_ff=8, h=1))
    assert "clip" not in run_facts(model, TrainingConfig(), ())["training configuration"]
    assert run_facts(model, TrainingConfig(clip=1.0), ())["training configuration"]["clip"] == 1.0


@pytest.mark.parametrize("device, wanted", [("cpu", False), ("mps", False), ("cuda", True)])
def test_only_cuda_copies_without_waiting(monkeypatch, device, wanted):
    batch, readings, asked = Batch.collate([([5], [6])]), runs.Readings("cpu"), []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, non_blocking=False: asked.append(non_blocking) or tensor)
    runs.moved(batch, torch.device(device))
    assert len(asked) == 3
    if device != "cuda":  # there an event is needed
        readings.device = torch.device(device)
        readings.add(1, False, torch.tensor(1.0))
        assert len(asked) == 4
    assert set(asked) == {wanted}


def test_a_run_without_a_whole_checkpoint_is_refused_at_every_start(tmp_path):
    folder = steps(tmp_path / "run", 1, 2)

    def check(path):
        raise ValueError("one bit is flipped")

    for _ in range(2):
        with pytest.raises(ValueError, match="none of its 2 checkpoints is whole"):
            newest_checkpoint(folder, check, lambda line: None)


def test_only_the_first_process_keeps_the_log(tmp_path, monkeypatch):
    row = {"step": 2, "train_loss": 4.0, "valid_loss": 3.0, "valid_perplexity": 20.1}
    progress = {"step": 2, "tokens": 0, "log": [row]}
    for rank, there in ((1, False), (0, True)):
        monkeypatch.setattr(runs, "ranks", lambda rank=rank: (rank, 2))
        with runs.Teller(progress, 4, shown=False, folder=tmp_path) as teller:
            teller.row(row)
        assert (tmp_path / "log.jsonl").exists() == there
    assert read_json_lines(tmp_path / "log.jsonl") == [row]
