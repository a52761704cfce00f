"""The state of a run: what it counts, what must agree, and that it goes on with the same bits."""

import hashlib
import json
from dataclasses import fields, replace

import pytest
import torch
from helpers import TEXTS, one_thread, state
from small_runs import LONG, PAIRS, digests, run, tiny

from annotated.data.prepared import write_encoded
from annotated.data.tokenizers import WordTokenizer
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import SixteenBitDropout, prepare
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.results import read_json_lines
from annotated.training import distributed, loader, loop, run_state
from annotated.training.checkpoints import MANIFEST, load_checkpoint, run_checkpoints
from annotated.training.loop import TrainingConfig, start_run, train
from annotated.training.run_state import MetricReader, first_difference, run_facts

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_facts_change_with_what_is_computed_and_with_nothing_else():
    model, pairs = tiny(), ([([4], [5])], [([6], [7])])
    facts = run_facts(model, TrainingConfig(), pairs)
    assert json.loads(json.dumps(facts)) == facts
    assert facts != run_facts(model, TrainingConfig(), pairs[::-1])
    assert facts != run_facts(tiny(d_ff=64), TrainingConfig(), pairs)
    assert "clip" not in facts["training configuration"], "earlier runs had none"
    clipped = run_facts(model, TrainingConfig(clip=1.0), pairs)
    assert clipped["training configuration"]["clip"] == 1.0


def test_the_first_fact_that_differs_is_named():
    facts = {"corpus": "abc", "model": {"N": 1, "h": 2}}
    assert first_difference(facts, dict(facts)) is None
    other = {"corpus": "abd", "model": {}}
    assert first_difference(facts, other) == ("corpus", "corpus", "abc", "abd")
    other = {**facts, "model": {"N": 1, "h": 4}}
    assert first_difference(facts, other) == ("model", "h", 2, 4)
    assert first_difference({}, {"model": {"h": 4}}) == ("model", "h", None, 4)


def read_all(every, steps):
    """What `MetricReader` hands out after steps whose number is their loss; the flag is up at 3."""
    readings = MetricReader("cpu", every)
    handed = [readings.add(f"step {k}", k == 3, torch.tensor(float(k)), torch.tensor(k / 2))
              for k in range(1, steps + 1)]
    return handed, readings.flush(), readings.flush()


def numbers(*steps):
    return [(f"step {k}", [float(k == 3), float(k), k / 2]) for k in steps]


def test_readings_come_at_once_or_by_rounds_and_none_is_lost():
    assert read_all(1, 4) == ([numbers(k) for k in (1, 2, 3, 4)], [], [])
    handed = [[], numbers(1, 2), [], numbers(3, 4), [], numbers(5, 6), []]
    assert read_all(2, 7) == (handed, numbers(7), [])
    assert read_all(3, 3) == ([[], [], numbers(1, 2, 3)], [], [])
    assert MetricReader("cpu").every == 1 and run_state.READ_EVERY["cuda"] > 1


def test_a_number_of_the_device_is_not_read_before_its_round(monkeypatch):
    read = []
    monkeypatch.setattr(torch.Tensor, "tolist",
                        lambda tensor: read.append(tensor.shape) or [[0.0]] * len(tensor))
    readings = MetricReader("cpu", every=4)
    for _ in range(3):
        readings.add(None, False, torch.tensor(1.0))
    assert read == []
    readings.add(None, False, torch.tensor(1.0))
    assert read == [(4, 2)]


@pytest.fixture
def undisturbed(tmp_path):
    log, model = run(tmp_path / "undisturbed")
    return digests(tmp_path / "undisturbed"), log, state(model)


def test_the_log_of_a_run_that_broke_off_has_each_validation_once_in_the_end(tmp_path):
    def break_off(*_):
        calls.append(1)
        # in step 5: the rehearsal, two parts a step, two batches each of two validations
        if len(calls) == 1 + 2 * 4 + 2 * 2 + 1:
            raise KeyboardInterrupt

    calls, config, kept = [], replace(LONG, validate_every=2), tmp_path / "run" / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", hook=break_off, config=config)
    assert [path.name[-2:] for path in run_checkpoints(tmp_path / "run")] == ["03"]
    assert [row["step"] for row in read_json_lines(kept)] == [2, 4], "one sees how it goes"
    log, _ = run(tmp_path / "run", seed=5, config=config)
    assert read_json_lines(kept) == log and [row["step"] for row in log] == [2, 4, 6, 8, 10, 12]


def test_run_folder_changes_nothing_and_keeps_the_last(undisturbed, tmp_path):
    model = tiny(dropout=0.3)
    log = train(model, PAIRS, PAIRS[:2], LONG, show_progress=False)
    assert log == undisturbed[1] and torch.equal(state(model), undisturbed[2])
    kept = run_checkpoints(tmp_path / "undisturbed")
    assert [path.name for path in kept] == ["step-00000009", "step-00000012"]
    assert torch.equal(state(load_checkpoint(kept[-1]).model), undisturbed[2])


def as_of_an_earlier_version(folder, position):
    """Take from a training checkpoint what earlier versions did not write, in place."""
    names = "progress.json", "info.json"
    progress, info = (json.loads((folder / name).read_text()) for name in names)
    del progress["position"], progress["norms"], info["scheduled"]
    progress |= position
    for row in progress["log"]:
        del row["gradient_norm"]
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, value in (("progress.json", progress), ("info.json", info)):
        (folder / name).write_text(json.dumps(value))
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def position_of(checkpoint):
    return json.loads((checkpoint / "progress.json").read_text())["position"]


@pytest.mark.parametrize("name", ["position", "place", None])
def test_going_on_begins_where_it_stopped(undisturbed, tmp_path, monkeypatch, name):
    run(tmp_path / "run", config=replace(LONG, steps=9))
    last = run_checkpoints(tmp_path / "run")[-1]
    position = position_of(last)
    if name != "position":
        as_of_an_earlier_version(last, {"place": position} if name else {})
    epochs, real = [], loader.epoch_batches
    monkeypatch.setattr(loader, "epoch_batches", lambda *given, **skip:
                        epochs.append(given[2]) or real(*given, **skip))
    log, model = run(tmp_path / "run", seed=5)
    assert torch.equal(state(model), undisturbed[2])
    assert log[-1]["valid_loss"] == undisturbed[1][-1]["valid_loss"]
    assert epochs[0] == ((0, position[0]) if name else (0, 0)) and position[0] > 1
    ends = {folder: position_of(run_checkpoints(tmp_path / folder)[-1])
            for folder in ("run", "undisturbed")}
    assert ends["run"] == ends["undisturbed"]


@pytest.mark.parametrize("name", ["model.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_checkpoint_is_put_aside(undisturbed, tmp_path, capsys, name, damage):
    run(tmp_path / "run", config=replace(LONG, steps=6))
    file = run_checkpoints(tmp_path / "run")[-1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flipped" else data[:-7])
    log, model = run(tmp_path / "run", seed=5)
    errors = capsys.readouterr().err
    assert name in errors and "damaged-step-00000006" in errors
    assert digests(tmp_path / "run") == undisturbed[0] and log == undisturbed[1]
    assert len(list((tmp_path / "run").glob("damaged-*"))) == 1, "put aside, not deleted"


def test_another_vocabulary_model_or_corpus_is_refused_by_name(tmp_path):
    def go(texts, pairs, folder, steps=12):
        words = WordTokenizer.fit(texts)
        model = Transformer(TransformerConfig(len(words), N=1, d_model=16, d_ff=16, h=2))
        config = replace(LONG, steps=steps)
        return train(model, pairs, PAIRS[:1], config, False, tmp_path / folder, words)

    go(TEXTS, PAIRS[:2], "words")
    with pytest.raises(ValueError, match="words was made with another vocabulary"):
        go([("a", "b"), *TEXTS], PAIRS[:2], "words")
    disk = write_encoded(TEXTS, WordTokenizer.fit(TEXTS), tmp_path / "one")
    other = write_encoded([*TEXTS[:3], TEXTS[0]], WordTokenizer.fit(TEXTS), tmp_path / "other")
    assert len(go(TEXTS, disk, "disk", 4)) == 2 and len(go(TEXTS, disk, "disk", 8)) == 4
    with pytest.raises(ValueError, match="another corpus"):
        go(TEXTS, other, "disk")
    run(tmp_path / "run")
    longer = replace(LONG, steps=14, save_every=5)
    with pytest.raises(ValueError, match="another model .d_ff was 32 and is now 64"):
        run(tmp_path / "run", config=longer, d_ff=64)
    with pytest.raises(ValueError, match="another corpus"):
        run(tmp_path / "run", config=longer, pairs=PAIRS[:4])


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
    """Neither those the run began with nor those of another process."""
    _, model = run(tmp_path / "run", config=replace(LONG, steps=3))
    monkeypatch.setattr(run_state, "all_gather", lambda value: [value])
    monkeypatch.setattr(run_state, "run_on_rank_zero", lambda read: read())
    monkeypatch.setattr(loop, "ranks", lambda: (0, 3))
    drawn = []
    for rank in range(3):
        for module in (run_state, distributed):
            monkeypatch.setattr(module, "ranks", lambda rank=rank: (rank, 3))
        going_on = start_run(tiny(seed=5, dropout=0.3), LONG, (PAIRS, PAIRS[:2]), tmp_path / "run")
        drawn.append(torch.rand(8).tolist())
        distributed.seed_rank(LONG.seed)
        drawn.append(torch.rand(8).tolist())
        assert going_on.step == 3 and torch.equal(state(going_on.model), state(model))
    assert len(set(map(tuple, drawn))) == 6


def test_a_run_folder_on_one_rank_only_is_a_difference(monkeypatch, tmp_path):
    facts = []
    monkeypatch.setattr(loop, "check_ranks_agree", lambda given: facts.append(given) or 1 / 0)
    monkeypatch.setattr(loop, "ranks", lambda: (0, 2))
    for folder in (None, tmp_path / "run"):
        with pytest.raises(ZeroDivisionError):
            start_run(tiny(), LONG, (PAIRS, PAIRS), folder)
    monkeypatch.setattr(run_state, "all_gather", lambda given: facts)
    message = r"rank 1 has another run folder than rank 0 \(run folder is True there, False here\)"
    with pytest.raises(ValueError, match=message):
        run_state.check_ranks_agree(None)


def test_a_prepared_model_draws_sixteen_bits_and_goes_on_with_the_same_masks(tmp_path):
    wide = {"d_model": 256, "d_ff": 16, "dropout": 0.3}  # too many numbers for PyTorch's own way
    pairs = [([3 + i % 12] * 8, [3 + (i * 5) % 12] * 8) for i in range(64)]
    config = TrainingConfig(steps=2, max_tokens=576, warmup=2, validate_every=2, save_every=1)
    losses = []
    for folder, stops in (("whole", (2,)), ("parts", (1, 2))):
        for steps in stops:
            torch.manual_seed(0)
            model = prepare(tiny(**wide))
            log = train(model, pairs, pairs[:2], replace(config, steps=steps), False,
                        tmp_path / folder, loss=ChunkedLoss)
        kinds = {type(m) for m in model.modules() if isinstance(m, torch.nn.Dropout)}
        assert kinds == {SixteenBitDropout}
        losses.append((log[-1]["valid_loss"], model.embedding.weight.detach().clone()))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])
