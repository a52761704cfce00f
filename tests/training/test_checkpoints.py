"""Checkpoints: what is saved comes back, whole or not at all; damage is named; means are means."""

import itertools
import json
import os
import pickle
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import PAIRS, random_model
from safetensors.torch import load_file
from small_runs import forge

from annotated import files
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer
from annotated.training import checkpoints as module
from annotated.training.checkpoints import average_checkpoints, load_checkpoint, save_checkpoint
from annotated.training.loop import PRESETS, TrainingConfig

FILES = ["config.json", "info.json", "manifest.json", "model.safetensors", "tokenizer.json"]
SOURCE, TARGET = torch.tensor([[4, 5]]), torch.tensor([[1, 6]])
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)  # names, types and bits


def small_model(seed=0, vocab_size=30, **changes):
    return random_model(vocab_size, seed, **{"d_model": 8, "d_ff": 12, "dropout": 0.1, **changes})


@pytest.fixture(scope="module")
def words():
    return WordTokenizer.fit(PAIRS)


@pytest.fixture
def saved(tmp_path, words):
    save_checkpoint(tmp_path / "saved", small_model(), words, steps=7)
    return tmp_path / "saved"


def crash(*_, **__):
    raise KeyboardInterrupt


# -- saving and loading


@pytest.mark.parametrize("changes, dtype", [
    ({}, torch.float32), ({"d_k": 3, "d_v": 5}, torch.bfloat16),
    ({"norm_first": True, "positions": "learned", "max_length": 20}, torch.float64)])
@pytest.mark.parametrize("kind", ["words", "bpe", "wordpiece", None])
def test_round_trip_is_exact(tmp_path, words, changes, dtype, kind):
    tokenizer = words if kind == "words" else kind and SubwordTokenizer.fit(
        PAIRS, {"bpe": 280, "wordpiece": 530}[kind], kind)
    model = small_model(vocab_size=len(tokenizer) if kind else 30, **changes).to(dtype).train()
    info = {"steps": 3, "corpus": "täglich", "log": [{"loss": 0.1 + 0.2}], "nothing": None}
    save_checkpoint(tmp_path / "deep" / "er", model, tokenizer, **info)
    before = torch.get_rng_state()
    loaded = load_checkpoint(str(tmp_path / "deep" / "er"))
    assert torch.equal(torch.get_rng_state(), before), "loading draws random numbers"

    assert_same(dict(loaded.model.state_dict()), dict(model.state_dict()))
    assert loaded.model.config == model.config and loaded.info == info
    assert not any(part.training for part in loaded.model.modules())
    source, target = torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 4))
    assert_same(loaded.model(source, target), model.eval()(source, target))
    assert type(loaded.tokenizer) is type(tokenizer)
    for text, language in (("a dog sees the cat", "en"), ("der Hund schläft", "de")) * bool(kind):
        assert loaded.tokenizer.encode(text, language) == tokenizer.encode(text, language)


def test_the_loaded_model_trains_and_shares_no_memory_with_its_file(saved):
    model = load_checkpoint(saved).model
    model(SOURCE, TARGET).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with open(saved / "model.safetensors", "r+b") as file:  # in place, as a careless copy would
        file.seek(-400, os.SEEK_END)
        file.write(bytes(400))
    assert_same(dict(model.state_dict()), dict(small_model().state_dict()))


def test_files_have_one_mode_and_the_tokenizer_knows_the_languages(tmp_path):
    save_checkpoint(tmp_path / "saved", small_model(), WordTokenizer.fit(PAIRS, "ar", "fr"))
    assert len({path.stat().st_mode for path in (tmp_path / "saved").iterdir()}) == 1
    assert load_checkpoint(tmp_path / "saved").languages == ("ar", "fr")


def test_half_precision_is_for_the_file_only(tmp_path):
    model = small_model().half()
    save_checkpoint(tmp_path / "a", model)
    assert_same(load_file(tmp_path / "a" / "model.safetensors"), dict(model.state_dict()))
    loaded = load_checkpoint(tmp_path / "a").model
    assert_same(dict(loaded.state_dict()), dict(model.float().state_dict()))


def test_a_pickle_in_place_of_the_weights_is_not_run(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    forge(saved, "model.safetensors", pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="model.safetensors: not of this version"):
        load_checkpoint(saved)
    assert not (tmp_path / "sprung").exists()


# -- whole or not at all


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_exists_is_refused_and_left_alone(tmp_path, make):
    make(taken := tmp_path / "taken")
    before = taken.lstat()
    with pytest.raises(FileExistsError, match="taken exists already: choose another name"):
        save_checkpoint(taken, small_model())
    assert taken.lstat() == before and list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("owner, place", [
    (module, "save_file"), (module, "write_json"), (module, "sha256_of"), (files, "_sync"),
    (Path, "rename")])
def test_a_crash_in_the_middle_leaves_nothing(tmp_path, monkeypatch, words, owner, place):
    monkeypatch.setattr(owner, place, crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "new", small_model(), words)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_named_and_nothing_is_left(tmp_path, words):
    with pytest.raises(TypeError, match="model is a Linear: give the Transformer itself"):
        save_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="type set is not JSON serializable"):
        save_checkpoint(tmp_path / "a", small_model(), when={1, 2})
    with pytest.raises(ValueError, match="tokenizer has .* pieces, the model vocab_size=5"):
        save_checkpoint(tmp_path / "a", small_model(vocab_size=5), words)
    assert list(tmp_path.iterdir()) == []


# -- damage


def refused(folder, match):
    """Neither loading nor averaging takes a checkpoint."""
    for load in (load_checkpoint, lambda folder: average_checkpoints([folder])):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            load(folder)


@pytest.mark.parametrize("name, damage", [
    *itertools.product(FILES, (None, lambda old: old[:-1] + bytes([old[-1] ^ 4]))),
    *(("manifest.json", damage) for damage in (
        lambda old: old[: len(old) // 2], lambda old: b"", lambda old: old + b"}",
        lambda old: b'{"a": [1, 2]}', lambda old: b"\xff\x00" * 50))])
def test_what_is_missing_or_damaged_is_named(saved, name, damage):
    data = (saved / name).read_bytes()
    (saved / name).unlink()
    if damage:
        (saved / name).write_bytes(damage(data))
    refused(saved, f"saved.*{name}")
    refused(saved.with_name("nowhere"), "no folder .*nowhere .*save_checkpoint")


@pytest.mark.parametrize("changes, match", [
    ({"d_model": 16}, "file model.safetensors: its weights are not those of"),
    ({"N": 2}, "file model.safetensors: its weights are not those of"),
    ({"rotary": True}, "not of this version .*rotary"), ({"h": 3}, "not of this version .*h=3"),
    ({"h": "2"}, "not of this version"), (b"[1, 2]", "not of this version"),
    (b"[" * 100_000, "config.json is no JSON")])
def test_files_of_another_version_are_named(saved, changes, match, unenforced):
    forge(saved, "tokenizer.json", b'{"kind": "letters"}')
    with pytest.raises(ValueError, match="saved.tokenizer.json is not a tokenizer .*letters"):
        load_checkpoint(saved)
    if isinstance(changes, dict):
        config = json.loads((saved / "config.json").read_text())
        changes = json.dumps({**config, **changes}).encode()
    forge(saved, "config.json", changes)
    with pytest.raises(ValueError, match=f"checkpoint .*saved, .*{match}.*restore the folder"):
        load_checkpoint(saved)


@pytest.mark.parametrize("manifest", [
    {}, [], {"format": 2, "files": {}}, {"format": 1, "files": []},
    {"format": 1, "files": {"config.json": "0"}}, {"format": 1, "files": {"../config.json": "0"}}])
def test_a_foreign_manifest_is_refused(saved, manifest):
    (saved / "manifest.json").write_text(json.dumps(manifest))
    refused(saved, "file manifest.json: not a manifest that this version can read")


# -- averaging


@pytest.mark.parametrize("count", [1, 2, 5])
def test_c27_the_mean_of_checkpoints_is_the_mean_of_each_weight(tmp_path, count):
    models = [small_model(seed) for seed in range(count)]
    for seed, model in enumerate(models):
        save_checkpoint(tmp_path / str(seed), model)
    expected = {name: torch.stack([model.state_dict()[name] for model in models]).double().mean(0)
                .float() for name in models[0].state_dict()}
    assert_same(average_checkpoints([tmp_path / str(seed) for seed in range(count)]), expected)
    assert_same(average_checkpoints([tmp_path / "0"] * 60), dict(models[0].state_dict()))


def test_c27_mismatches_are_refused_with_both_folders(tmp_path, words):
    other_words = WordTokenizer.fit([("one", "eins")])
    for name, what, model, tokenizer in (
            ("a", None, small_model(), words), ("b", "configurations", small_model(h=4), words),
            ("c", "tokenizers", small_model(), None), ("d", "weights", small_model().half(), words),
            ("e", "tokenizers", small_model(), other_words)):
        save_checkpoint(tmp_path / name, model, tokenizer)
        if what:
            message = f"a and .*{name} have different {what}: average checkpoints of one"
            with pytest.raises(ValueError, match=message):
                average_checkpoints([tmp_path / "a", tmp_path / "a", tmp_path / name])
    with pytest.raises(ValueError, match="paths=.* give a list of at least one checkpoint folder"):
        average_checkpoints([])


# -- checkpoints to resume from


@pytest.fixture
def run(tmp_path):
    """The folder of a run with four checkpoints, written late, and the weights at each."""
    model = small_model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    progress, contents, weights = {"steps": []}, [], []
    for step in range(1, 5):
        model(SOURCE, TARGET).sum().backward()
        optimizer.step()
        progress["steps"].append(step)
        weights.append(deepcopy(dict(model.state_dict())))
        contents.append(module.checkpoint_contents(model, None, {}, optimizer, progress))
    for step, content in enumerate(contents, start=1):
        module.add_to_run(tmp_path, step, content, keep=4)
    return tmp_path, weights


def test_only_the_newest_two_keep_their_optimiser_and_all_their_weights(run):
    folder, weights = run
    kept = [path.parent.name[-1] for path in sorted(folder.glob("*/optimizer.safetensors"))]
    assert kept == ["3", "4"]
    for checkpoint, expected in zip(sorted(folder.iterdir()), weights, strict=True):
        assert_same(dict(load_checkpoint(checkpoint).model.state_dict()), expected)


def test_a_run_goes_on_from_the_second_newest_but_from_none_before(run, capsys):
    folder, weights = run
    (folder / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    assert_same(average_checkpoints([folder / "step-00000004"]), weights[3])  # which needs it not
    read, state, progress = module.read_newest(folder)
    assert progress == {"steps": [1, 2, 3]}
    assert_same(read, weights[2])
    assert {entry["step"].item() for entry in state.values()} == {3.0}
    (folder / "step-00000003" / "progress.json").unlink()
    with pytest.raises(ValueError, match="each of its checkpoints is damaged or lacks the optimi"):
        module.read_newest(folder)
    average_checkpoints([folder / "step-00000001", folder / "step-00000002"])


@pytest.mark.parametrize("owner, place", [(module, "write_json"), (Path, "unlink")])
def test_a_crash_while_the_optimiser_is_removed_leaves_a_good_checkpoint(
        run, monkeypatch, owner, place):
    last = run[0] / "step-00000004"
    with monkeypatch.context() as crashing, pytest.raises(KeyboardInterrupt):
        crashing.setattr(owner, place, crash)
        module.drop_optimizer(last)
    assert_same(dict(load_checkpoint(last).model.state_dict()), run[1][3])
    module.drop_optimizer(last)
    assert not (last / "optimizer.safetensors").exists()


def test_damage_of_an_old_checkpoint_does_not_end_the_run(run):
    folder, _ = run
    (folder / "step-00000002" / "manifest.json").unlink()
    optimizer = torch.optim.Adam(small_model().parameters())
    contents = module.checkpoint_contents(small_model(), None, {}, optimizer, {})
    module.add_to_run(folder, 5, contents, keep=4)
    assert len(list(folder.glob("*/optimizer.safetensors"))) == 2


def numbers_in(folder, **options):
    return [int(path.name[5:]) for path in module.run_checkpoints(folder, **options)]


def test_the_oldest_are_forgotten_and_what_sigterm_wrote_goes_with_the_next(tmp_path):
    def note(number, scheduled):
        info = tmp_path / f"step-{number:08d}" / "info.json"
        info.write_text(json.dumps({"scheduled": scheduled}))

    for number in (9, 10, 100, 2):
        (tmp_path / f"step-{number:08d}").mkdir()
    (tmp_path / "step-other").mkdir()
    for number, scheduled in ((2, True), (9, False), (10, True)):  # 100: of an earlier version
        note(number, scheduled)
    assert numbers_in(tmp_path) == [2, 9, 10, 100]
    assert numbers_in(tmp_path, scheduled=True) == [2, 10, 100]
    module.remove_old_checkpoints(tmp_path, keep=3)
    assert numbers_in(tmp_path) == [2, 10, 100] and (tmp_path / "step-other").is_dir()
    note(100, False)
    module.remove_old_checkpoints(tmp_path, keep=1)
    assert numbers_in(tmp_path) == [10, 100], "the newest stays, whatever it is"


def test_leftovers_are_removed_and_a_run_without_a_whole_checkpoint_is_refused(tmp_path, capsys):
    for left in (".step-00000004.part-abc", ".step-00000001.part-old"):
        (tmp_path / left).mkdir()
    assert module.newest_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name).mkdir()
    for _ in range(2):  # at every start
        with pytest.raises(ValueError, match="each of its checkpoints is damaged .* give a new on"):
            module.newest_checkpoint(tmp_path)
    assert capsys.readouterr().err.count("put aside as damaged-step-0000000") == 2
    assert len(list(tmp_path.glob("damaged-*"))) == 2


def test_the_books_model_comes_with_the_package_for_single_precision():
    book, (sizes, config) = module.book_model(), PRESETS["toy"]
    assert {weight.dtype for weight in book.model.state_dict().values()} == {torch.float32}
    assert book.model.config == replace(sizes, vocab_size=len(book.tokenizer))
    assert TrainingConfig(**book.info["training"]) == config and not book.model.training
    assert book.tokenizer.as_dict() == WordTokenizer.fit(load_corpus("toy").train).as_dict()
