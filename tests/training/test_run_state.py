"""The state of a run: what must agree, and that it goes on with the same bits."""

import json
import shutil
from dataclasses import fields, replace

import pytest
import torch
from helpers import TEXTS, one_thread, random_model, state
from small_runs import LONG, PAIRS, digests, forge, run, tiny

from annotated.data.prepared import write_encoded
from annotated.data.tokenizers import WordTokenizer
from annotated.training import distributed, loader, loop, run_state
from annotated.training.checkpoints import load_checkpoint, run_checkpoints
from annotated.training.loop import TrainingConfig, start_run, train
from annotated.training.schedule import SCHEDULES

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_run_folder_changes_nothing_and_keeps_the_last(undisturbed):
    model = tiny(dropout=0.3)
    log = train(model, PAIRS, PAIRS[:2], LONG, show_progress=False)
    assert log == undisturbed.log and torch.equal(state(model), undisturbed.weights)
    kept = run_checkpoints(undisturbed.folder)
    assert [path.name for path in kept] == ["step-00000009", "step-00000012"]
    assert torch.equal(state(load_checkpoint(kept[-1]).model), undisturbed.weights)


def position_of(checkpoint):
    return json.loads((checkpoint / "progress.json").read_text())["position"]


def test_going_on_begins_where_it_stopped(undisturbed, tmp_path, monkeypatch):
    run(tmp_path / "run", config=replace(LONG, steps=9))
    position = position_of(run_checkpoints(tmp_path / "run")[-1])
    epochs, real = [], loader.epoch_batches
    monkeypatch.setattr(loader, "epoch_batches", lambda *given, **skip:
                        epochs.append(given[2]) or real(*given, **skip))
    log, model = run(tmp_path / "run", seed=5)
    assert torch.equal(state(model), undisturbed.weights)
    assert log[-1]["valid_loss"] == undisturbed.log[-1]["valid_loss"]
    assert epochs[0] == (0, position[0]) and position[0] > 1
    ends = [position_of(run_checkpoints(folder)[-1])
            for folder in (tmp_path / "run", undisturbed.folder)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("schedule", [
    lambda optimizer, *_: torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 11]),
    lambda optimizer, *_: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 14)])
def test_any_schedule_of_pytorch_goes_on_as_it_was(schedule, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "theirs", schedule)
    config = replace(LONG, schedule="theirs", save_every=6)
    whole = run(tmp_path / "whole", config=config)
    for checkpoint in run_checkpoints(tmp_path / "whole")[1:]:
        shutil.rmtree(checkpoint)
    log, model = run(tmp_path / "whole", config=config, seed=5)
    assert torch.equal(state(model), state(whole[1])) and log[-1]["rate"] == whole[0][-1]["rate"]


def test_a_run_of_version_0_1_0_goes_on(undisturbed, tmp_path):
    run(tmp_path / "run", config=replace(LONG, steps=9))
    last = run_checkpoints(tmp_path / "run")[-1]
    progress = json.loads((last / "progress.json").read_text())
    del progress["groups"], progress["facts"]["pairs"]
    forge(last, "progress.json", json.dumps(progress).encode())
    assert "clip" not in progress["facts"]["training configuration"]
    assert torch.equal(state(run(tmp_path / "run", seed=5)[1]), undisturbed.weights)


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    run(tmp_path / "run", config=replace(LONG, steps=9))
    with pytest.raises(ValueError, match="has made 9 updates: give more steps"):
        run(tmp_path / "run", config=replace(LONG, steps=6))


def test_a_folder_that_cannot_hold_a_run_is_named_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        run(tmp_path / "file", hook=lambda *_: pytest.fail("a step was made"))


@pytest.mark.parametrize("name, damage", [
    ("model.safetensors", lambda data: data[:-7]), ("manifest.json", None), ("progress.json", None),
    ("optimizer.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 4]))])
def test_damaged_checkpoint_is_put_aside(undisturbed, tmp_path, capsys, name, damage):
    run(tmp_path / "run", config=replace(LONG, steps=6))
    file = run_checkpoints(tmp_path / "run")[-1] / name
    data = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(data))
    log, _ = run(tmp_path / "run", seed=5)
    errors = capsys.readouterr().err
    assert name in errors and "damaged-step-00000006" in errors
    assert digests(tmp_path / "run") == undisturbed.digests and log == undisturbed.log
    assert len(list((tmp_path / "run").glob("damaged-*"))) == 1, "put aside, not deleted"


def test_another_vocabulary_model_or_corpus_is_refused_by_name(tmp_path):
    words, more = WordTokenizer.fit(TEXTS), WordTokenizer.fit([("a", "b"), *TEXTS])
    disk = write_encoded(TEXTS, words, tmp_path / "one")
    other = write_encoded([*TEXTS[:3], TEXTS[0]], words, tmp_path / "other")

    def go(folder, tokenizer, pairs, steps=12, **changes):
        model = random_model(len(tokenizer), **changes)
        config = replace(LONG, steps=steps)
        return train(model, pairs, PAIRS[:1], config, False, tmp_path / folder, tokenizer)

    go("list", words, PAIRS[:2])
    train(random_model(len(words)), [*PAIRS[:2], PAIRS[0]][:1], [PAIRS[1], PAIRS[0]],
          replace(LONG, steps=12), False, tmp_path / "split", words)  # the same, split elsewhere
    assert len(go("disk", words, disk, 4)) == 2 and len(go("disk", words, disk, 8)) == 4
    for folder, message, given, changes in (
            ("list", "list was made with another vocabulary", (more, PAIRS[:2]), {}),
            ("list", "another model .d_ff was 32 and is now 64", (words, PAIRS[:2]), {"d_ff": 64}),
            ("list", "another corpus", (words, PAIRS[:3]), {}),
            ("split", "another pairs", (words, PAIRS[:2]), {}),
            ("disk", "another corpus", (words, other), {})):
        with pytest.raises(ValueError, match=message):
            go(folder, *given, 14, **changes)


def test_every_number_that_decides_a_run_must_be_the_same_when_it_goes_on(tmp_path):
    run(tmp_path / "run")
    free = {"steps": 14, "save_every": 5, "keep_last": 3, "max_skipped": 2, "patience": 9}
    other = {"max_tokens": 32, "accumulate": 1, "warmup": 4, "factor": 0.4, "label_smoothing": 0.2,
             "validate_every": 3, "precision": "bf16", "compile": True, "seed": 1, "clip": 2.0}
    names = {field.name for field in fields(TrainingConfig)}
    assert free.keys() | other.keys() == names - {"schedule"}  # tests/test_outside.py has another
    for name, value in other.items():
        message = f"another training configuration .{name} was .* and is now {value!r}"
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", config=replace(LONG, steps=14, **{name: value}))
    assert run(tmp_path / "run", config=replace(LONG, **free))[0][-1]["step"] == 14


def test_going_on_with_other_processes_repeats_no_random_numbers(monkeypatch, tmp_path):
    """Neither those a run begins with nor those of another process."""
    _, model = run(tmp_path / "run", config=replace(LONG, steps=3))
    monkeypatch.setattr(run_state, "all_gather", lambda value: [value])
    monkeypatch.setattr(run_state, "run_on_rank_zero", lambda read: read())
    monkeypatch.setattr(loop, "ranks", lambda: (0, 3))
    drawn = []
    for rank in range(3):
        for module in (run_state, distributed):
            monkeypatch.setattr(module, "ranks", lambda rank=rank: (rank, 3))
        for folder in (None, tmp_path / "run"):
            begun = start_run(tiny(seed=5, dropout=0.3), LONG, (PAIRS, PAIRS[:2]), folder)
            drawn.append(torch.rand(8).tolist())
        assert begun.step == 3 and torch.equal(state(begun.model), state(model))
    torch.manual_seed(LONG.seed)
    assert drawn[0] == torch.rand(8).tolist(), "rank 0 draws those of one process"
    assert len(set(map(tuple, drawn))) == 6


def test_a_run_folder_on_one_rank_only_is_a_difference(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "ranks", lambda: (0, 2))
    for folder, other in ((None, True), (tmp_path / "run", False)):
        monkeypatch.setattr(run_state, "all_gather",
                            lambda facts, other=other: [facts | {"run folder": other}, facts])
        message = rf"rank 1 has another run folder than rank 0 \(run folder is {not other} there"
        with pytest.raises(ValueError, match=message):
            start_run(tiny(), LONG, (PAIRS, PAIRS), folder)
