"""Runs that survive: processes that find each other, devices, run folders, seconds, workers side by side."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from annotated import runs
from annotated.runs import (
    check_device,
    counting_seconds,
    forget_checkpoints,
    newest_checkpoint,
    run_checkpoints,
    run_facts,
    side_by_side,
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


@pytest.mark.parametrize("per_update, taken", [(0.01, 1000), (0.1, 1000), (0.2, 750), (0.25, 600), (1.0, 400), (30.0, 400)])
def test_a_slow_machine_takes_as_many_updates_as_fit_but_not_too_few(monkeypatch, per_update, taken):
    clock, made = [100.0], []
    monkeypatch.setattr(runs.time, "perf_counter", lambda: clock[0])

    def run(updates):
        made.append(updates)
        clock[0] += updates * per_update

    assert runs.updates_in(150, 1000, run, least=0.4) == taken and made == [50]


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


def test_seconds_of_all_starts_are_added_up(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: clock.now, process_time=lambda: clock.now / 2))
    for start in (1, 2, 3):
        with counting_seconds(tmp_path / "seconds.json") as seconds:
            clock.now += 8
            assert seconds() == {"wall": 8.0 * start, "processor": 4.0 * start, "starts": start}
        clock.now += 1000  # between two starts nothing counts
    assert json.loads((tmp_path / "seconds.json").read_text())["starts"] == 3


def test_work_side_by_side_ends_each_task_once_and_tells_its_last_words(tmp_path):
    program = "import sys; print('first'); print('did', *sys.argv[1:]); sys.exit(int(sys.argv[1]))"
    told = {}
    commands = {("task", status): [sys.executable, "-c", program, str(status)] for status in (0, 3, 1)}
    assert side_by_side(commands, ["cpu"], tmp_path, lambda task, *said: told.update({task: said})) is False
    assert told == {("task", status): (status, f"did {status} --device cpu") for status in (0, 3, 1)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"task.seed{status}.log" for status in (0, 1, 3)]


def test_no_more_at_once_than_there_are_devices(tmp_path):
    program = ("import sys, time; begin = time.time(); time.sleep(0.3); print(sys.argv[2], begin, time.time())")
    spans = []
    commands = {("task", n): [sys.executable, "-c", program] for n in range(4)}
    side_by_side(commands, ["even", "odd"], tmp_path, lambda task, status, said: spans.append(said.split()))
    for device in ("even", "odd"):
        own = sorted((float(begin), float(end)) for name, begin, end in spans if name == device)
        assert all(end <= begin for (_, end), (begin, _) in zip(own, own[1:], strict=False))
    assert len(spans) == 4 and {name for name, *_ in spans} == {"even", "odd"}
