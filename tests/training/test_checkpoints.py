"""Checkpoints: what is saved comes back, whole or not at all; damage is named; the mean is the mean."""

import hashlib
import json
import os
import pickle
import pickletools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PAIRS, examples, random_model
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from annotated import files
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer
from annotated.training import checkpoints as module
from annotated.training.checkpoints import (
    average_checkpoints,
    book_model,
    first_difference,
    load_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    run_checkpoints,
    save_checkpoint,
)
from annotated.training.loop import PRESETS, TrainingConfig

FILES = ["config.json", "info.json", "manifest.json", "model.safetensors", "tokenizer.json"]


def small_model(seed=0, vocab_size=30, **changes):
    return random_model(vocab_size, seed, **{"d_model": 8, "d_ff": 12, "dropout": 0.1, **changes})


@pytest.fixture(scope="module")
def words():
    return WordTokenizer.fit(PAIRS)


@pytest.fixture
def saved(tmp_path, words):
    save_checkpoint(tmp_path / "saved", small_model(), words, steps=7)
    return tmp_path / "saved"


def forge(folder, name, data):
    """Change a file and its digest: what no manifest can notice."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def changed_config(folder, **changes):
    return json.dumps({**json.loads((folder / "config.json").read_text()), **changes}).encode()


# -- saving and loading


@pytest.mark.parametrize("changes", [{}, {"norm_first": True, "positions": "learned", "max_length": 20}, {"d_k": 3, "d_v": 5}])
@pytest.mark.parametrize("kind", ["words", "bpe", "wordpiece", None])
def test_round_trip_is_exact(tmp_path, words, changes, kind):
    subwords = {"bpe": 280, "wordpiece": 530}
    tokenizer = SubwordTokenizer.fit(PAIRS, subwords[kind], kind) if kind in subwords else words if kind else None
    model = small_model(vocab_size=len(tokenizer) if kind else 30, **changes).train()
    info = {"steps": 3, "corpus": "täglich", "log": [{"loss": 0.1 + 0.2}], "nothing": None}
    save_checkpoint(tmp_path / "deep" / "er", model, tokenizer, **info)
    loaded = load_checkpoint(str(tmp_path / "deep" / "er"))

    states = model.state_dict(), loaded.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert loaded.model.config == model.config and loaded.info == info
    assert not any(part.training for part in loaded.model.modules())
    source, target = torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 4))
    assert torch.equal(loaded.model(source, target), model.eval()(source, target))
    if kind:
        assert type(loaded.tokenizer) is type(tokenizer) and len(loaded.tokenizer) == len(tokenizer)
        for text, language in (("a dog sees the cat", "en"), ("der Hund schläft", "de")):
            assert loaded.tokenizer.encode(text, language) == tokenizer.encode(text, language)
    else:
        assert loaded.tokenizer is None


def test_the_loaded_model_trains_and_owns_its_weights(saved):
    model = load_checkpoint(saved).model
    before = load_file(saved / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in before.items()}
    model(torch.tensor([[4, 5]]), torch.tensor([[1, 6]])).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    after = load_file(saved / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_that_changes_later_does_not_change_the_loaded_model(saved):
    before = small_model().state_dict()
    model = load_checkpoint(saved).model
    with open(saved / "model.safetensors", "r+b") as file:  # in place, as a careless copy would
        file.seek(-400, os.SEEK_END)
        file.write(bytes(400))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_keep_their_precision(tmp_path, dtype):
    model = small_model().to(dtype)
    save_checkpoint(tmp_path / "a", model)
    loaded = load_checkpoint(tmp_path / "a").model
    assert all(tensor.dtype == dtype for tensor in loaded.state_dict().values())
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_half_precision_is_for_the_file_only(tmp_path):
    model = small_model()
    expected = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    save_checkpoint(tmp_path / "a", model.half())
    assert all(tensor.dtype == torch.float16 for tensor in load_file(tmp_path / "a" / "model.safetensors").values())
    loaded = load_checkpoint(tmp_path / "a").model
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_loading_draws_no_random_numbers(saved):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_checkpoint(saved)
    assert torch.equal(torch.rand(3), expected)


def test_no_pickle(saved):
    assert sorted(path.name for path in saved.iterdir()) == FILES
    for path in saved.iterdir():
        with pytest.raises(Exception):  # noqa: B017 -- whatever pickle says, it must not read the file
            list(pickletools.genops(path.read_bytes()))
    source = open(module.__file__, encoding="utf-8").read()
    assert "torch.load(" not in source and "torch.save(" not in source and "pickle" not in source


def test_a_pickle_in_place_of_the_weights_is_not_run(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    forge(saved, "model.safetensors", pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_checkpoint(saved)
    assert not (tmp_path / "sprung").exists()


# -- whole or not at all


@pytest.mark.parametrize("there", ["checkpoint", "empty folder", "file", "dangling link"])
def test_what_exists_is_refused_and_left_alone(tmp_path, there):
    target = tmp_path / "taken"
    if there == "checkpoint":
        save_checkpoint(target, small_model())
    elif there == "empty folder":
        target.mkdir()
    elif there == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(path.read_bytes() for path in target.iterdir()) if target.is_dir() else target.lstat().st_size
    with pytest.raises(FileExistsError, match="taken exists already: choose another name"):
        save_checkpoint(target, small_model(seed=1))
    after = sorted(path.read_bytes() for path in target.iterdir()) if target.is_dir() else target.lstat().st_size
    assert before == after and [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("place", ["save_file", "write_json", "sha256_of", "_sync", "rename"])
def test_a_crash_in_the_middle_leaves_nothing(tmp_path, monkeypatch, words, place):
    def crash(*_, **__):
        raise KeyboardInterrupt

    owner = {"rename": Path, "_sync": files}.get(place, module)
    monkeypatch.setattr(owner, place, crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "new", small_model(), words)
    assert list(tmp_path.iterdir()) == []


# -- refused before anything is written


def test_what_cannot_be_saved_is_named(tmp_path, words):
    model = small_model()
    with pytest.raises(TypeError, match="model is a Linear: give the Transformer itself"):
        save_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="tokenizer is a dict: give a subclass of Tokenizer"):
        save_checkpoint(tmp_path / "a", model, {"a": 4})
    with pytest.raises(TypeError, match="when=.* is nothing JSON can hold"):
        save_checkpoint(tmp_path / "a", model, when={1, 2})
    with pytest.raises(ValueError, match="tokenizer has .* pieces, the model vocab_size=5"):
        save_checkpoint(tmp_path / "a", small_model(vocab_size=5), words)
    for one in ({"optimizer": torch.optim.Adam(model.parameters())}, {"progress": {"step": 1}}):
        with pytest.raises(TypeError, match="only one of optimizer and progress.* give the other"):
            save_checkpoint(tmp_path / "a", model, **one)
    assert list(tmp_path.iterdir()) == []


# -- damage


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    for load in (load_checkpoint, lambda folder: average_checkpoints([folder])):
        with pytest.raises(FileNotFoundError, match=f"checkpoint .*saved, file {name}: missing; .*restore"):
            load(saved)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere .*save_checkpoint wrote"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "grown", "foreign JSON", "binary"])
def test_damage_is_named(saved, name, damage):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes({"truncated": data[: len(data) // 2], "emptied": b"", "grown": data + b"}",
                                "foreign JSON": b'{"a": [1, 2]}', "binary": b"\xff\x00" * 50}[damage])
    for load in (load_checkpoint, lambda folder: average_checkpoints([folder])):
        with pytest.raises(ValueError, match=f"checkpoint .*saved, file {name}: .*restore the folder from a copy"):
            load(saved)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(saved, name, place, bit):
    original = (saved / name).read_bytes()
    data = bytearray(original)
    data[int(place * len(data))] ^= 1 << bit
    (saved / name).write_bytes(data)
    try:
        with pytest.raises((ValueError, FileNotFoundError), match="saved, file "):
            load_checkpoint(saved)
    finally:
        (saved / name).write_bytes(original)


FOREIGN = [  # (file, how its content is made, what the error says)
    *[("config.json", lambda folder, change=change: changed_config(folder, **change), f"file {file}")
      for change, file in (({"d_model": 16}, "model.safetensors: its weights are not those of"),
                           ({"N": 2}, "model.safetensors: its weights are not those of"),
                           ({"rotary": True}, "config.json: not a configuration .*rotary"),
                           ({"h": 3}, "config.json: not a configuration .*h=3"), ({"h": "2"}, "config.json: not a configuration"))],
    *[(name, lambda folder, data=data: data, f"file {name}: {what}") for name, data, what in (
        ("config.json", b"[1, 2]", "a list stands where an object"), ("config.json", b"{", "not JSON"),
        ("config.json", b"[" * 100_000, "not JSON"), ("info.json", b"7", "a int stands"),
        ("tokenizer.json", b'{"kind": "letters"}', "not a tokenizer .*letters"),
        ("model.safetensors", b"\0" * 40, "not a safetensors file"), ("model.safetensors", b"", "not a safetensors file"))],
]


@pytest.mark.parametrize(("name", "make", "match"), FOREIGN)
def test_foreign_contents_with_a_right_digest_are_named(saved, name, make, match, unenforced):
    forge(saved, name, make(saved))
    with pytest.raises(ValueError, match=f"checkpoint .*saved, {match}.*restore the folder"):
        load_checkpoint(saved)


@pytest.mark.parametrize("manifest", [{}, {"format": 2, "files": {}}, {"format": 1, "files": []},
                                      {"format": 1, "files": {"config.json": "0"}}, {"format": 1, "files": {"../config.json": "0"}}])
def test_a_foreign_manifest_is_refused(saved, manifest):
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="file manifest.json: not a manifest that this version can read"):
        load_checkpoint(saved)


# -- averaging


@pytest.mark.parametrize("count", [1, 2, 5])
def test_c27_the_mean_of_checkpoints_is_the_mean_of_each_weight(tmp_path, count):
    models = [small_model(seed) for seed in range(count)]
    for seed, model in enumerate(models):
        save_checkpoint(tmp_path / str(seed), model)
    mean = average_checkpoints([tmp_path / str(seed) for seed in range(count)])
    assert mean.keys() == models[0].state_dict().keys()
    for name, tensor in mean.items():
        expected = torch.stack([model.state_dict()[name] for model in models]).double().mean(dim=0)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected.float())
    small_model().load_state_dict(mean)


def test_c27_what_is_linear_in_the_weights_gives_the_mean_of_the_outputs(tmp_path):
    models, last = [small_model().double().eval() for _ in range(4)], "decoder.layers.0.residual.2.norm."
    for seed, model in enumerate(models):  # the logits are linear in gain and bias of the last norm
        torch.manual_seed(10 + seed)
        chosen = [weight for name, weight in model.named_parameters() if name.startswith(last)]
        assert len(chosen) == 2
        for weight in chosen:
            weight.data.normal_()
        save_checkpoint(tmp_path / str(seed), model)
    source, target = torch.randint(4, 30, (3, 5)), torch.randint(4, 30, (3, 4))
    with torch.no_grad():
        expected = torch.stack([model(source, target) for model in models]).mean(dim=0)
        models[0].load_state_dict(average_checkpoints([tmp_path / str(seed) for seed in range(4)]))
        assert (models[0](source, target) - expected).abs().max() < 1e-9 < expected.std()


def test_c27_whole_numbers_stay_whole_numbers(tmp_path):
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, small_model(seed=ord(name)))
        weights = {**load_file(tmp_path / name / "model.safetensors"), "counter": torch.tensor([3, 2**40])}
        save_file(weights, tmp_path / "with.safetensors")
        forge(tmp_path / name, "model.safetensors", (tmp_path / "with.safetensors").read_bytes())
    counter = average_checkpoints([tmp_path / "a", tmp_path / "b"])["counter"]
    assert counter.dtype == torch.int64 and counter.tolist() == [3, 2**40]


def test_many_checkpoints_lose_no_precision(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "one", model)
    mean = average_checkpoints([tmp_path / "one"] * 60)
    assert all(torch.equal(mean[name], tensor) for name, tensor in model.state_dict().items())


def test_c27_mismatches_are_refused_with_both_folders(tmp_path, words):
    other_words = WordTokenizer.fit([("one two", "eins zwei")])
    save_checkpoint(tmp_path / "a", small_model(), words)
    save_checkpoint(tmp_path / "heads", small_model(h=4), words)
    save_checkpoint(tmp_path / "dropped", small_model(), None)
    save_checkpoint(tmp_path / "words", small_model(), other_words)
    shutil.copytree(tmp_path / "a", tmp_path / "extra")
    weights = {**load_file(tmp_path / "a" / "model.safetensors"), "more": torch.zeros(2)}
    save_file(weights, tmp_path / "extra.safetensors")
    forge(tmp_path / "extra", "model.safetensors", (tmp_path / "extra.safetensors").read_bytes())
    for other, what in (("heads", "configurations"), ("dropped", "tokenizers"), ("words", "tokenizers"), ("extra", "weights")):
        with pytest.raises(ValueError, match=f"a and .*{other} have different {what}: average checkpoints of one"):
            average_checkpoints([tmp_path / "a", tmp_path / "a", tmp_path / other])


@pytest.mark.parametrize("paths", [[], (), "folder"])
def test_nothing_to_average(paths):
    with pytest.raises(ValueError, match="paths=.* give a list of at least one checkpoint folder"):
        average_checkpoints(paths)


# -- checkpoints to go on from


@pytest.fixture
def run_folder(tmp_path):
    """Four training checkpoints of a run, with what training leaves of them, and the model and optimiser at its end."""
    model = small_model().train()
    optimizer, torch_state = torch.optim.Adam(model.parameters(), lr=0.01), []
    for step in range(1, 5):
        model(torch.tensor([[4, 5]]), torch.tensor([[1, 6]])).sum().backward()
        optimizer.step()
        torch_state.append({name: weight.clone() for name, weight in model.state_dict().items()})
        contents = module.checkpoint_contents(model, None, optimizer, {"step": step, "facts": {}}, scheduled=True)
        module.add_to_run(tmp_path, step, contents, keep=4)
    return tmp_path, torch_state, optimizer


def test_what_will_be_written_is_a_copy():
    model = small_model()
    optimizer, progress = torch.optim.Adam(model.parameters()), {"losses": [1.0]}
    model(torch.tensor([[4, 5]]), torch.tensor([[1, 6]])).sum().backward()
    optimizer.step()
    contents = module.checkpoint_contents(model, None, optimizer, progress)
    before = json.dumps(contents, default=lambda tensor: tensor.tolist())
    optimizer.step()
    progress["losses"].append(2.0)
    assert json.dumps(contents, default=lambda tensor: tensor.tolist()) == before
    assert json.dumps(module.checkpoint_contents(model, None, optimizer, progress), default=lambda tensor: tensor.tolist()) != before


def test_only_the_newest_two_keep_their_optimiser_and_all_their_weights(run_folder):
    folder, states, _ = run_folder
    there = [sorted(path.name for path in checkpoint.iterdir()) for checkpoint in sorted(folder.iterdir())]
    assert ["optimizer.safetensors" in names for names in there] == [False, False, True, True]
    for checkpoint, expected in zip(sorted(folder.iterdir()), states, strict=True):
        loaded = load_checkpoint(checkpoint).model.state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    with pytest.raises(LookupError, match="step-00000002 holds no optimizer.safetensors"):
        module.check_folder(folder / "step-00000002", training=True)


def test_a_run_goes_on_from_the_second_newest_but_from_none_before(run_folder, capsys):
    folder, states, optimizer = run_folder
    (folder / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    model = small_model(seed=9)
    again = torch.optim.Adam(model.parameters(), lr=0.01)
    assert module.load_newest(folder, model, again, {})["step"] == 3
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in states[2].items())
    assert {entry["step"].item() for entry in again.state.values()} == {3.0}
    (folder / "step-00000003" / "progress.json").unlink()
    with pytest.raises(ValueError, match="none of its 3 checkpoints is whole .step-00000002, step-00000001 lack the optimiser"):
        module.load_newest(folder, model, again, {})
    average_checkpoints([folder / "step-00000001", folder / "step-00000002"])


def test_an_average_does_not_read_what_only_training_needs(run_folder, monkeypatch):
    folder, _, _ = run_folder
    read, real = [], module.sha256_of
    monkeypatch.setattr(module, "sha256_of", lambda path: read.append(path.name) or real(path))
    average_checkpoints(sorted(folder.iterdir()))
    load_checkpoint(folder / "step-00000004")
    assert {"model.safetensors"} < set(read) and not {"optimizer.safetensors", "progress.json"} & set(read)
    module.check_folder(folder / "step-00000004", training=True)
    assert {"optimizer.safetensors", "progress.json"} < set(read)


@pytest.mark.parametrize("place", ["write_json", "unlink"])
def test_a_crash_while_the_optimiser_is_removed_leaves_a_good_checkpoint(run_folder, monkeypatch, place):
    folder, states, _ = run_folder

    def crash(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module if place == "write_json" else Path, place, crash)
    with pytest.raises(KeyboardInterrupt):
        module.drop_optimizer(folder / "step-00000004")
    monkeypatch.undo()
    loaded = load_checkpoint(folder / "step-00000004").model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in states[3].items())
    module.drop_optimizer(folder / "step-00000004")
    assert not (folder / "step-00000004" / "optimizer.safetensors").exists()


def test_damage_of_an_old_checkpoint_does_not_end_the_run(run_folder):
    folder, _, optimizer = run_folder
    (folder / "step-00000002" / "manifest.json").unlink()
    contents = module.checkpoint_contents(small_model(), None, optimizer, {"step": 5, "facts": {}}, scheduled=True)
    module.add_to_run(folder, 5, contents, keep=4)
    assert (folder / "step-00000005").is_dir() and len(list(folder.glob("*/optimizer.safetensors"))) == 2


def steps(folder, *numbers):
    for number in numbers:
        (folder / f"step-{number:08d}").mkdir(parents=True)
    return folder


def test_checkpoints_are_found_by_number_and_the_oldest_forgotten(tmp_path):
    folder = steps(tmp_path / "run", 9, 10, 100, 2)
    (folder / "step-other").mkdir()
    assert [path.name[-3:] for path in run_checkpoints(folder)] == ["002", "009", "010", "100"]
    remove_old_checkpoints(folder, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000100", "step-other"]


def test_what_sigterm_wrote_is_not_scheduled_and_goes_with_the_next(tmp_path):
    folder = steps(tmp_path / "run", 3, 4, 6, 9)
    for number, scheduled in ((3, True), (4, False), (6, True)):  # 9 has no info, as those of an earlier version
        (folder / f"step-{number:08d}" / "info.json").write_text(json.dumps({"scheduled": scheduled}))
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["3", "4", "6", "9"]
    assert [path.name[-1] for path in run_checkpoints(folder, scheduled=True)] == ["3", "6", "9"]
    remove_old_checkpoints(folder, keep=3)
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["3", "6", "9"]
    (folder / "step-00000009" / "info.json").write_text(json.dumps({"scheduled": False}))
    remove_old_checkpoints(folder, keep=1)
    assert [path.name[-1] for path in run_checkpoints(folder)] == ["6", "9"], "the newest stays, whatever it is"


def test_what_killed_writes_left_is_removed_and_a_run_without_a_whole_checkpoint_refused_at_every_start(tmp_path, capsys):
    for left in (".step-00000004.part-abc", ".step-00000001.part-old"):
        (tmp_path / left).mkdir()
    assert newest_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []
    steps(tmp_path, 1, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of its 2 checkpoints is whole; give a new one"):
            newest_checkpoint(tmp_path)
    assert capsys.readouterr().err.count("put aside as damaged-step-0000000") == 2 and len(list(tmp_path.glob("damaged-*"))) == 2


def test_the_first_fact_that_differs_is_named():
    facts = {"corpus": "abc", "model": {"N": 1, "h": 2}}
    assert first_difference(facts, dict(facts)) is None
    assert first_difference(facts, {"corpus": "abd", "model": {}}) == ("corpus", "corpus", "abc", "abd")
    assert first_difference(facts, {**facts, "model": {"N": 1, "h": 4}}) == ("model", "h", 2, 4)
    assert first_difference({}, {"model": {"h": 4}}) == ("model", "h", None, 4)


def test_the_books_model_comes_with_the_package_for_single_precision():
    saved, (sizes, config) = book_model(), PRESETS["toy"]
    assert {weight.dtype for weight in saved.model.state_dict().values()} == {torch.float32} and not saved.model.training
    assert saved.model.config == replace(sizes, vocab_size=len(saved.tokenizer)) and TrainingConfig(**saved.info["training"]) == config
    assert saved.tokenizer.as_dict() == WordTokenizer.fit(load_corpus("toy").train).as_dict()
