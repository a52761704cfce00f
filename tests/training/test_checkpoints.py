"""Checkpoints: what is saved comes back, whole or not at all; damage is named; means are means."""

import hashlib
import json
import os
import pickle
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
    load_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    run_checkpoints,
    save_checkpoint,
)
from annotated.training.loop import PRESETS, TrainingConfig

FILES = ["config.json", "info.json", "manifest.json", "model.safetensors", "tokenizer.json"]
SOURCE, TARGET = torch.tensor([[4, 5]]), torch.tensor([[1, 6]])


def small_model(seed=0, vocab_size=30, **changes):
    return random_model(vocab_size, seed, **{"d_model": 8, "d_ff": 12, "dropout": 0.1, **changes})


def equal(weights, others):
    """Two state dicts have the same names and the same bits."""
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights)


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


# -- saving and loading


@pytest.mark.parametrize("changes", [
    {}, {"norm_first": True, "positions": "learned", "max_length": 20}, {"d_k": 3, "d_v": 5}])
@pytest.mark.parametrize("kind", ["words", "bpe", "wordpiece", None])
def test_round_trip_is_exact(tmp_path, words, changes, kind):
    tokenizer = words if kind == "words" else kind and SubwordTokenizer.fit(
        PAIRS, {"bpe": 280, "wordpiece": 530}[kind], kind)
    model = small_model(vocab_size=len(tokenizer) if kind else 30, **changes).train()
    info = {"steps": 3, "corpus": "täglich", "log": [{"loss": 0.1 + 0.2}], "nothing": None}
    save_checkpoint(tmp_path / "deep" / "er", model, tokenizer, **info)
    loaded = load_checkpoint(str(tmp_path / "deep" / "er"))

    assert equal(model.state_dict(), loaded.model.state_dict())
    assert loaded.model.config == model.config and loaded.info == info
    assert not any(part.training for part in loaded.model.modules())
    source, target = torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 4))
    assert torch.equal(loaded.model(source, target), model.eval()(source, target))
    assert type(loaded.tokenizer) is type(tokenizer)
    for text, language in (("a dog sees the cat", "en"), ("der Hund schläft", "de")) * bool(kind):
        assert loaded.tokenizer.encode(text, language) == tokenizer.encode(text, language)


def test_the_loaded_model_trains_and_shares_no_memory_with_its_file(saved):
    before = {name: tensor.clone() for name, tensor in small_model().state_dict().items()}
    model = load_checkpoint(saved).model
    model(SOURCE, TARGET).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with open(saved / "model.safetensors", "r+b") as file:  # in place, as a careless copy would
        file.seek(-400, os.SEEK_END)
        file.write(bytes(400))
    assert equal(before, model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_keep_their_precision(tmp_path, dtype):
    model = small_model().to(dtype)
    save_checkpoint(tmp_path / "a", model)
    loaded = load_checkpoint(tmp_path / "a").model.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {dtype}
    assert equal(loaded, model.state_dict())


def test_half_precision_is_for_the_file_only(tmp_path):
    model = small_model()
    expected = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    save_checkpoint(tmp_path / "a", model.half())
    written = load_file(tmp_path / "a" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}
    loaded = load_checkpoint(tmp_path / "a").model.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert equal(loaded, expected)


def test_loading_draws_no_random_numbers(saved):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_checkpoint(saved)
    assert torch.equal(torch.rand(3), expected)


def test_a_pickle_in_place_of_the_weights_is_not_run(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    forge(saved, "model.safetensors", pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="model.safetensors: not of this version"):
        load_checkpoint(saved)
    assert not (tmp_path / "sprung").exists()
    assert "pickle" not in Path(module.__file__).read_text(encoding="utf-8")


# -- whole or not at all


@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_what_exists_is_refused_and_left_alone(tmp_path, there):
    target = tmp_path / "taken"
    if there == "folder":
        save_checkpoint(target, small_model())
    elif there == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")

    def content():
        read = target.iterdir() if target.is_dir() else [target] if target.exists() else []
        return sorted(path.read_bytes() for path in read)

    before = content()
    with pytest.raises(FileExistsError, match="taken exists already: choose another name"):
        save_checkpoint(target, small_model(seed=1))
    assert content() == before and [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("place", ["save_file", "write_json", "sha256_of", "_sync", "rename"])
def test_a_crash_in_the_middle_leaves_nothing(tmp_path, monkeypatch, words, place):
    def crash(*_, **__):
        raise KeyboardInterrupt

    owner = {"rename": Path, "_sync": files}.get(place, module)
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


def refused(folder, error, match):
    """Neither loading nor averaging takes a checkpoint."""
    for load in (load_checkpoint, lambda folder: average_checkpoints([folder])):
        with pytest.raises(error, match=match):
            load(folder)


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, FileNotFoundError, f"saved.*{name}")
    refused(saved.with_name("nowhere"), FileNotFoundError, "no folder .*nowhere .*save_checkpoint")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "grown", "foreign JSON", "binary"])
def test_damage_is_named(saved, name, damage):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes({
        "truncated": data[: len(data) // 2], "emptied": b"", "grown": data + b"}",
        "foreign JSON": b'{"a": [1, 2]}', "binary": b"\xff\x00" * 50}[damage])
    refused(saved, ValueError, f"saved.*{name}")


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(saved, name, place, bit):
    original = (saved / name).read_bytes()
    data = bytearray(original)
    data[int(place * len(data))] ^= 1 << bit
    (saved / name).write_bytes(data)
    try:
        with pytest.raises((ValueError, FileNotFoundError), match="saved"):
            load_checkpoint(saved)
    finally:
        (saved / name).write_bytes(original)


@pytest.mark.parametrize(("changes", "match"), [
    ({"d_model": 16}, "file model.safetensors: its weights are not those of"),
    ({"N": 2}, "file model.safetensors: its weights are not those of"),
    ({"rotary": True}, "not of this version .*rotary"), ({"h": 3}, "not of this version .*h=3"),
    ({"h": "2"}, "not of this version"), (b"[1, 2]", "not of this version"),
    (b"[" * 100_000, "config.json is no JSON")])
def test_a_configuration_of_another_version_is_named(saved, changes, match, unenforced):
    if isinstance(changes, dict):
        config = json.loads((saved / "config.json").read_text())
        changes = json.dumps({**config, **changes}).encode()
    forge(saved, "config.json", changes)
    with pytest.raises(ValueError, match=f"checkpoint .*saved, .*{match}.*restore the folder"):
        load_checkpoint(saved)


def test_a_tokenizer_of_another_kind_is_named(saved):
    forge(saved, "tokenizer.json", b'{"kind": "letters"}')
    with pytest.raises(ValueError, match="saved.tokenizer.json is not a tokenizer .*letters"):
        load_checkpoint(saved)


@pytest.mark.parametrize("manifest", [
    {}, [], {"format": 2, "files": {}}, {"format": 1, "files": []},
    {"format": 1, "files": {"config.json": "0"}}, {"format": 1, "files": {"../config.json": "0"}}])
def test_a_foreign_manifest_is_refused(saved, manifest):
    (saved / "manifest.json").write_text(json.dumps(manifest))
    refused(saved, ValueError, "file manifest.json: not a manifest that this version can read")


# -- averaging


@pytest.mark.parametrize("count", [1, 2, 5])
def test_c27_the_mean_of_checkpoints_is_the_mean_of_each_weight(tmp_path, count):
    models = [small_model(seed) for seed in range(count)]
    for seed, model in enumerate(models):
        save_checkpoint(tmp_path / str(seed), model)
    expected = {name: torch.stack([model.state_dict()[name] for model in models]).double().mean(0)
                for name in models[0].state_dict()}
    expected = {name: tensor.float() for name, tensor in expected.items()}
    assert equal(average_checkpoints([tmp_path / str(seed) for seed in range(count)]), expected)
    assert equal(average_checkpoints([tmp_path / "0"] * 60), models[0].state_dict())


def test_c27_what_is_linear_in_the_weights_gives_the_mean_of_the_outputs(tmp_path):
    models = [small_model().double().eval() for _ in range(4)]
    for seed, model in enumerate(models):  # the logits are linear in gain and bias of the last norm
        torch.manual_seed(10 + seed)
        for weight in model.decoder.layers[0].residual[2].norm.parameters():
            weight.data.normal_()
        save_checkpoint(tmp_path / str(seed), model)
    source, target = torch.randint(4, 30, (3, 5)), torch.randint(4, 30, (3, 4))
    with torch.no_grad():
        expected = torch.stack([model(source, target) for model in models]).mean(dim=0)
        models[0].load_state_dict(average_checkpoints([tmp_path / str(seed) for seed in range(4)]))
        assert (models[0](source, target) - expected).abs().max() < 1e-9 < expected.std()


def with_more(folder, tensor):
    """Add a tensor to the weights of a checkpoint."""
    weights = {**load_file(folder / "model.safetensors"), "more": tensor}
    save_file(weights, folder / "with.safetensors")
    forge(folder, "model.safetensors", (folder / "with.safetensors").read_bytes())


def test_c27_whole_numbers_stay_whole_numbers(tmp_path):
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, small_model(seed=ord(name)))
        with_more(tmp_path / name, torch.tensor([3, 2**40]))
    more = average_checkpoints([tmp_path / "a", tmp_path / "b"])["more"]
    assert more.dtype == torch.int64 and more.tolist() == [3, 2**40]


def test_c27_mismatches_are_refused_with_both_folders(tmp_path, words):
    save_checkpoint(tmp_path / "a", small_model(), words)
    save_checkpoint(tmp_path / "heads", small_model(h=4), words)
    save_checkpoint(tmp_path / "dropped", small_model(), None)
    save_checkpoint(tmp_path / "words", small_model(), WordTokenizer.fit([("one", "eins")]))
    with_more(shutil.copytree(tmp_path / "a", tmp_path / "extra"), torch.zeros(2))
    for other, what in (("heads", "configurations"), ("dropped", "tokenizers"),
                        ("words", "tokenizers"), ("extra", "weights")):
        message = f"a and .*{other} have different {what}: average checkpoints of one"
        with pytest.raises(ValueError, match=message):
            average_checkpoints([tmp_path / "a", tmp_path / "a", tmp_path / other])
    with pytest.raises(ValueError, match="paths=.* give a list of at least one checkpoint folder"):
        average_checkpoints([])


# -- checkpoints to resume from


@pytest.fixture
def run(tmp_path):
    """The folder of a run with four checkpoints, the weights at each, and the optimiser."""
    model = small_model().train()
    optimizer, weights = torch.optim.Adam(model.parameters(), lr=0.01), []
    for step in range(1, 5):
        model(SOURCE, TARGET).sum().backward()
        optimizer.step()
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
        contents = module.checkpoint_contents(model, None, {}, optimizer, {"step": step})
        module.add_to_run(tmp_path, step, contents, keep=4)
    return tmp_path, weights, optimizer


def test_what_will_be_written_is_a_copy():
    def written():
        contents = module.checkpoint_contents(model, None, {}, optimizer, progress)
        return contents, as_text(contents)

    def as_text(contents):
        return json.dumps(contents, default=lambda tensor: tensor.tolist())

    model = small_model()
    optimizer, progress = torch.optim.Adam(model.parameters()), {"losses": [1.0]}
    model(SOURCE, TARGET).sum().backward()
    optimizer.step()
    contents, before = written()
    optimizer.step()
    progress["losses"].append(2.0)
    assert as_text(contents) == before != written()[1]


def test_only_the_newest_two_keep_their_optimiser_and_all_their_weights(run):
    folder, weights, _ = run
    kept = [path.parent.name[-1] for path in sorted(folder.glob("*/optimizer.safetensors"))]
    assert kept == ["3", "4"]
    for checkpoint, expected in zip(sorted(folder.iterdir()), weights, strict=True):
        assert equal(load_checkpoint(checkpoint).model.state_dict(), expected)


def test_a_run_goes_on_from_the_second_newest_but_from_none_before(run, capsys):
    folder, weights, _ = run
    (folder / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    read, state, progress = module.read_newest(folder)
    assert progress == {"step": 3} and equal(read, weights[2])
    assert {entry["step"].item() for entry in state.values()} == {3.0}
    (folder / "step-00000003" / "progress.json").unlink()
    with pytest.raises(ValueError, match="each of its checkpoints is damaged or lacks the optimi"):
        module.read_newest(folder)
    average_checkpoints([folder / "step-00000001", folder / "step-00000002"])


def test_an_average_does_not_read_what_only_training_needs(run, monkeypatch):
    folder, _, _ = run
    read, real = [], module.sha256_of
    monkeypatch.setattr(module, "sha256_of", lambda path: read.append(path.name) or real(path))
    average_checkpoints(sorted(folder.iterdir()))
    load_checkpoint(folder / "step-00000004")
    only_training = {"optimizer.safetensors", "progress.json"}
    assert {"model.safetensors"} < set(read) and not only_training & set(read)
    module.read_newest(folder)
    assert only_training < set(read)


@pytest.mark.parametrize("place", ["write_json", "unlink"])
def test_a_crash_while_the_optimiser_is_removed_leaves_a_good_checkpoint(run, monkeypatch, place):
    def crash(*_, **__):
        raise KeyboardInterrupt

    last = run[0] / "step-00000004"
    monkeypatch.setattr(module if place == "write_json" else Path, place, crash)
    with pytest.raises(KeyboardInterrupt):
        module.drop_optimizer(last)
    monkeypatch.undo()
    assert equal(load_checkpoint(last).model.state_dict(), run[1][3])
    module.drop_optimizer(last)
    assert not (last / "optimizer.safetensors").exists()


def test_damage_of_an_old_checkpoint_does_not_end_the_run(run):
    folder, _, optimizer = run
    (folder / "step-00000002" / "manifest.json").unlink()
    contents = module.checkpoint_contents(small_model(), None, {}, optimizer, {"step": 5})
    module.add_to_run(folder, 5, contents, keep=4)
    assert (folder / "step-00000005").is_dir()
    assert len(list(folder.glob("*/optimizer.safetensors"))) == 2


def steps(folder, *numbers):
    for number in numbers:
        (folder / f"step-{number:08d}").mkdir(parents=True)
    return folder


def numbers_in(folder, **options):
    return [int(path.name[5:]) for path in run_checkpoints(folder, **options)]


def test_checkpoints_are_found_by_number_and_the_oldest_forgotten(tmp_path):
    folder = steps(tmp_path / "run", 9, 10, 100, 2)
    (folder / "step-other").mkdir()
    assert numbers_in(folder) == [2, 9, 10, 100]
    remove_old_checkpoints(folder, keep=2)
    assert numbers_in(folder) == [10, 100] and (folder / "step-other").is_dir()


def test_what_sigterm_wrote_is_not_scheduled_and_goes_with_the_next(tmp_path):
    def note(number, scheduled):
        info = folder / f"step-{number:08d}" / "info.json"
        info.write_text(json.dumps({"scheduled": scheduled}))

    folder = steps(tmp_path / "run", 3, 4, 6, 9)
    for number, scheduled in ((3, True), (4, False), (6, True)):  # 9: of an earlier version
        note(number, scheduled)
    assert numbers_in(folder) == [3, 4, 6, 9]
    assert numbers_in(folder, scheduled=True) == [3, 6, 9]
    remove_old_checkpoints(folder, keep=3)
    assert numbers_in(folder) == [3, 6, 9]
    note(9, False)
    remove_old_checkpoints(folder, keep=1)
    assert numbers_in(folder) == [6, 9], "the newest stays, whatever it is"


def test_leftovers_are_removed_and_a_run_without_a_whole_checkpoint_is_refused(tmp_path, capsys):
    for left in (".step-00000004.part-abc", ".step-00000001.part-old"):
        (tmp_path / left).mkdir()
    assert newest_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []
    steps(tmp_path, 1, 2)
    for _ in range(2):  # at every start
        with pytest.raises(ValueError, match="each of its checkpoints is damaged .* give a new on"):
            newest_checkpoint(tmp_path)
    assert capsys.readouterr().err.count("put aside as damaged-step-0000000") == 2
    assert len(list(tmp_path.glob("damaged-*"))) == 2


def test_the_books_model_comes_with_the_package_for_single_precision():
    book, (sizes, config) = book_model(), PRESETS["toy"]
    assert {weight.dtype for weight in book.model.state_dict().values()} == {torch.float32}
    assert book.model.config == replace(sizes, vocab_size=len(book.tokenizer))
    assert TrainingConfig(**book.info["training"]) == config and not book.model.training
    assert book.tokenizer.as_dict() == WordTokenizer.fit(load_corpus("toy").train).as_dict()
