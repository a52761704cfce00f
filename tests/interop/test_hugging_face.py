"""Exports compute what the model computes, and come back; a model of Transformers is fine-tuned."""

import copy
import io
import json
from functools import partial

import pytest
import safetensors.torch
import sentencepiece
import torch
import transformers
import yaml
from helpers import PAIRS
from small_exports import BPE, TOKENIZERS, copy_of, model_that_writes, random_batch, small_model
from test_cli import write_corpus
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, MarianTokenizer

from annotated.cli import main
from annotated.data.batches import pad
from annotated.data.prepared import prepare_corpus
from annotated.data.tokenizers import BEGIN, END, PAD, UNKNOWN
from annotated.interop import hugging_face as hf
from annotated.interop.hugging_face import export_to_hugging_face, import_from_hugging_face
from annotated.training.builders import builder_of
from annotated.training.checkpoints import load_checkpoint, save_checkpoint
from annotated.translation.search import beam_search, greedy_decode, translate

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()


def same_logits(ours, marian, ids=None, atol=1e-9):
    """Assert equal logits of a model and Marian's; ids: for each token here, Marian's."""
    source = pad(random_batch(len(BPE), (9, 1, 30)))
    target = pad([[BEGIN, *row] for row in random_batch(len(BPE), (7, 12, 3), 1)])
    ids = torch.arange(ours.config.vocab_size) if ids is None else torch.tensor(ids)
    with torch.no_grad():
        theirs = marian(ids[source], source != PAD, decoder_input_ids=ids[target]).logits[..., ids]
        logits = ours(source, target)
    real = target != PAD
    torch.testing.assert_close(theirs[real], logits[real], atol=atol, rtol=0)
    assert logits[real].std() > 0.5, "logits that are all alike would agree for nothing"


# The same function


@pytest.mark.parametrize("changes", [
    {}, {"N": 1, "d_model": 9, "h": 3, "d_ff": 7}, {"h": 4, "d_k": 4, "d_v": 4, "vocab_size": 301}])
def test_marian_computes_the_same_logits_with_padding(tmp_path, changes):
    model = small_model(dtype=torch.float64, **changes)
    export_to_hugging_face(model, BPE, tmp_path / "out")
    marian = MarianMTModel.from_pretrained(tmp_path / "out").eval()
    assert marian.dtype == torch.float64
    same_logits(model, marian)


# There and back

NUMBERS = {"max_position_embeddings": 70, "dropout": 0.3, "attention_dropout": 0.1,
           "activation_dropout": 0.2}


@pytest.mark.parametrize("kind, dtype", [
    *((kind, torch.float32) for kind in TOKENIZERS),
    ("words", torch.float64), ("words", torch.bfloat16)])
def test_everything_comes_back_to_the_bit(tmp_path, dtype, kind):
    tokenizer = TOKENIZERS[kind]
    rates = {"dropout": 0.3, "attention_dropout": 0.1, "feed_forward_dropout": 0.2}
    model = small_model(3, len(tokenizer), dtype, d_model=15, h=3, max_length=70, **rates)
    weights = copy.deepcopy(model.state_dict())
    export_to_hugging_face(model, tokenizer, tmp_path / "out", source_language="fr")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: fields[name] for name in NUMBERS} == NUMBERS
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    before = torch.get_rng_state()
    returned = import_from_hugging_face(str(tmp_path / "out"))
    assert torch.equal(torch.get_rng_state(), before), "importing draws random numbers"
    for after in (returned.model, model):  # which stays as it is
        torch.testing.assert_close(after.state_dict(), weights, rtol=0, atol=0)
    assert returned.model.config == model.config and not returned.model.training
    assert returned.info == {"source_language": "fr", "target_language": "de"}
    languages = {"languages": ["fr", "de"]} if kind == "words" else {}
    assert returned.tokenizer.as_dict() == tokenizer.as_dict() | languages


def test_comes_back_from_what_transformers_saved(tmp_path, exported):
    MarianMTModel.from_pretrained(exported).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    returned, model = import_from_hugging_face(tmp_path / "again"), small_model()
    torch.testing.assert_close(returned.model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert returned.model.config == model.config and builder_of(returned.model) == "transformer"
    assert returned.tokenizer.as_dict() == BPE.as_dict()


# A model that Transformers made: in, fine-tuned, and out


SIZE = len(BPE) - 1  # padding begins a translation: there is no id for it


def random_marian(folder, biases=True, size=SIZE, **changes):
    """A MarianMTModel with random weights, saved by Transformers; with Marian's own special ids."""
    torch.manual_seed(0)
    marian = MarianMTModel(MarianConfig(**{
        **hf.marian_fields(small_model().config), "vocab_size": size, "decoder_vocab_size": size,
        "pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1,
        "activation_function": "swish", "max_position_embeddings": 128, **changes})).eval()
    with torch.no_grad():
        for name, weight in marian.named_parameters():
            if "positions" not in name and (biases or "_proj.bias" not in name):
                weight.add_(torch.randn_like(weight) * (0.5 if weight.dim() == 1 else 0.2))
        if biases:
            marian.final_logits_bias.normal_()
    marian.save_pretrained(folder)
    return marian


IDS = [len(BPE) - 2, len(BPE) - 2, 0, 3, 1, 2, *range(4, len(BPE) - 2)]  # Marian's


@pytest.mark.parametrize("activation, biases, builder", [
    ("swish", True, "marian-swish"), ("gelu", False, "marian-gelu"), ("relu", True, "marian-relu"),
    ("relu", False, "transformer")])
def test_a_marian_model_of_transformers_becomes_ours(tmp_path, activation, biases, builder):
    marian = random_marian(tmp_path / "hf", biases, activation_function=activation)
    saved = import_from_hugging_face(tmp_path / "hf")
    assert builder_of(saved.model) == builder and saved.tokenizer is None
    assert hf.marian_ids(marian.config, tmp_path / "hf") == IDS
    save_checkpoint(tmp_path / "ours", saved.model)
    again = load_checkpoint(tmp_path / "ours").model
    same_logits(again, marian, IDS, 1e-4)
    source = pad(random_batch(len(BPE), (9, 4)))
    for row, steps in zip(source, beam_search(again, source, beam=1, extra=2), strict=True):
        whole = again(row[None, row != PAD], torch.tensor([[BEGIN, *steps[0][0]]]))[0]
        best = whole.index_fill(1, torch.tensor([PAD, BEGIN]), -torch.inf).argmax(dim=1).tolist()
        assert best[: len(steps[0][0])] == steps[0][0]  # decoding has the biases, too


def test_the_id_of_unknown_words_is_that_of_marians_vocabulary(tmp_path):
    marian = random_marian(tmp_path)
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 1}')
    assert hf.marian_ids(marian.config, tmp_path)[:6] == [*IDS[:3], 1, 2, 3]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A corpus of a few pairs; in "prepared" with a tokenizer of its own."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus") / "own", PAIRS * 6)
    prepare_corpus(folder, folder / "prepared", len(BPE))
    return folder


def fine_tuned(corpus, start, out, *more):
    """What `annotated train --from` makes in one hundred updates."""
    settings = "--steps 100 --warmup 10 --factor 0.5 --max-tokens 200 --validate-every 50"
    main(["train", str(corpus), "--from", str(start), "--out", str(out), "--device", "cpu",
          *settings.split(), *more])
    return load_checkpoint(out)


def test_a_marian_model_is_fine_tuned_and_goes_back(tmp_path, prepared):
    marian = random_marian(tmp_path / "hf")
    before = import_from_hugging_face(tmp_path / "hf").model
    same_logits(before, marian, IDS, 1e-4)
    saved = fine_tuned(prepared / "prepared", tmp_path / "hf", tmp_path / "tuned")
    first, last = saved.info["log"]
    assert last["step"] == 100 and last["valid_loss"] < first["valid_loss"] < 3
    assert saved.info["started_from"] == str(tmp_path / "hf")
    main(["export", str(tmp_path / "tuned"), "--out", str(tmp_path / "back")])
    again = MarianMTModel.from_pretrained(tmp_path / "back").eval()
    same_logits(saved.model, again, atol=1e-4)
    returned = import_from_hugging_face(tmp_path / "back").model.state_dict()
    for name, weight in saved.model.state_dict().items():
        assert torch.equal(returned[name], weight)
        assert not torch.equal(weight, before.state_dict()[name]), f"{name} has not learned"


def test_an_export_and_a_checkpoint_of_ours_are_fine_tuned_with_their_tokenizer(
        tmp_path, exported, prepared):
    once = fine_tuned(prepared, exported, tmp_path / "once")
    twice = fine_tuned(prepared, tmp_path / "once", tmp_path / "twice", "--steps", "2")
    for saved in (once, twice):
        assert saved.tokenizer.as_dict() == BPE.as_dict()
        assert saved.model.config == small_model().config
    losses = [saved.info["log"][-1]["valid_loss"] for saved in (once, twice)]
    assert abs(losses[1] - losses[0]) < 0.5, "it began anew"


def opus_mt(folder):
    """A random model with the files of OPUS-MT: a SentencePiece model a side, ids in vocab.json."""
    folder.mkdir()
    ids = {"</s>": 0, "<unk>": 1, ">>deu<<": 2}
    for side, texts in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 3), model_writer=model, vocab_size=90,
            hard_vocab_limit=False, minloglevel=2)
        (folder / f"{side}.spm").write_bytes(model.getvalue())
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        for index in range(3, len(pieces)):
            ids.setdefault(pieces.id_to_piece(index), len(ids))
    (folder / "vocab.json").write_text(json.dumps(ids | {"<pad>": len(ids)}), encoding="utf-8")
    random_marian(folder, size=len(ids) + 1)
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de"}')
    return folder


def test_a_model_of_opus_mt_brings_its_tokenizer(tmp_path, prepared):
    start = opus_mt(tmp_path / "hf")
    saved, marian = import_from_hugging_face(start), MarianMTModel.from_pretrained(start).eval()
    save_checkpoint(tmp_path / "ours", saved.model, saved.tokenizer, **saved.info)
    tuned = fine_tuned(prepared, start, tmp_path / "tuned")
    assert tuned.info["log"][-1]["valid_loss"] < tuned.info["log"][0]["valid_loss"]
    main(["export", str(tmp_path / "tuned"), "--out", str(tmp_path / "back")])
    tokenizers = (saved.tokenizer, load_checkpoint(tmp_path / "ours").tokenizer, tuned.tokenizer,
                  import_from_hugging_face(tmp_path / "back").tokenizer)
    ids = hf.marian_ids(marian.config, start)
    for folder, known in ((start, ids), (tmp_path / "back", range(len(ids)))):
        theirs = AutoTokenizer.from_pretrained(folder)
        for source, target in [*PAIRS, ("", ""), (">>deu<< 犬 two  spaces", "½ ﬁre")]:
            row = theirs(source, text_target=target)
            for tokenizer in tokenizers:
                ours = [[*tokenizer.encode(text, language), END]
                        for text, language in ((source, "en"), (target, "de"))]
                assert [[known[i] for i in each] for each in ours] == [row["input_ids"],
                                                                     row["labels"]]
                if UNKNOWN not in ours[1]:
                    text = theirs.decode(row["labels"], skip_special_tokens=True)
                    assert tokenizer.decode(ours[1]) == text
    with pytest.raises(ValueError, match="language 'fr' is not one of this tokenizer's: give one"):
        saved.tokenizer.encode("le chien", "fr")
    theirs = MarianTokenizer.from_pretrained(start)
    written = marian.generate(**theirs(PAIRS[0][0], return_tensors="pt"), num_beams=1,
                              max_new_tokens=9, bad_words_ids=[[len(ids) - 2]])[0]
    text = theirs.decode(written, skip_special_tokens=True)
    (ours,) = translate([PAIRS[0][0]], saved.model, saved.tokenizer)
    assert len(text) > 5 and ours.startswith(text)


@pytest.mark.parametrize("words, message", [
    (["--d-model", "32"], "leave out the model's sizes"),
    (["--builder", "marian-gelu"], "--from brings model and tokenizer"),
    (["--normalize", "lowercase"], "leave --normalize out")])
def test_options_that_contradict_the_start_are_refused(
        tmp_path, exported, prepared, words, message, capsys):
    with pytest.raises(SystemExit):
        fine_tuned(prepared, exported, tmp_path / "out", *words)
    assert message in capsys.readouterr().err


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, prepared, capsys):
    random_marian(tmp_path / "hf")
    random_marian(tmp_path / "small", size=99)
    (opus_mt(tmp_path / "spm") / "source.spm").write_bytes(b"x")
    (opus_mt(tmp_path / "mute") / "tokenizer_config.json").write_text("{}")
    words = TOKENIZERS["words"]
    export_to_hugging_face(small_model(vocab_size=len(words)), words, tmp_path / "words")
    for start, corpus, message in (
            ("none", "", "there is no folder"), ("hf", "", "no tokenizer"),
            ("words", "prepared", "with another tokenizer"),
            ("small", "prepared", "with another tokenizer"),
            ("spm", "", "this is no SentencePiece model"),
            ("mute", "", "lacks source_lang or target_lang: add both")):
        with pytest.raises(SystemExit):
            fine_tuned(prepared / corpus, tmp_path / start, tmp_path / "out")
        assert message in capsys.readouterr().err


# Refusals


def with_rms_norm():
    model = small_model()
    model.encoder.layers[0].residual[0].norm = torch.nn.RMSNorm(16)
    return model


@pytest.mark.parametrize("build, tokenizer, message", [
    (partial(small_model, norm_first=True), BPE,
     "norm_first=True cannot be exported, only False: .* post-norm"),
    *((partial(small_model, **{name: value}), BPE, f"{name}={value!r} cannot be exported")
      for name, value in (("positions", "learned"), ("d_k", 3), ("pad_id", 3))),
    (partial(small_model, h=3, d_k=4, d_v=4), BPE, "h=3 cannot be exported: Marian's heads"),
    (with_rms_norm, BPE, "residual.0.norm, whose class is RMSNorm.*Marian has no such"),
    (partial(torch.nn.Linear, 2, 2), BPE, "got Linear: give a Transformer"),
    (small_model, None, "a NoneType cannot be exported: Marian takes a WordTokenizer or"),
    (small_model, TOKENIZERS["wordpiece"], "pieces, the model vocab_size=")])
def test_what_marian_cannot_express_is_named(tmp_path, build, tokenizer, message):
    with pytest.raises((ValueError, TypeError), match=message):
        export_to_hugging_face(build(), tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, value", [
    ("model_type", "bart"), ("activation_function", "tanh"), ("scale_embedding", False),
    ("decoder_layers", 1), ("tie_word_embeddings", False)])
def test_what_a_transformer_cannot_express_is_named(name, value):
    config = MarianConfig(**hf.marian_fields(small_model().config))
    assert hf.book_config(config) == small_model().config
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"config.json: {name}={value!r} cannot be imported"):
        hf.book_config(config)


def with_weights(change):
    """A change of the tensors in a file of safetensors."""
    def changed(data):
        weights = safetensors.torch.load(data)
        change(weights)
        return safetensors.torch.save(weights, metadata={"format": "pt"})
    return changed


NORM = "model.decoder.layers.0.encoder_attn_layer_norm.weight"
FURTHER = "model.encoder.layers.7.fc1.bias"
TABLE = "model.encoder.embed_positions.weight"


@pytest.mark.parametrize("name, change, message", [
    *((name, change, name.replace(".", r"\.")) for change in (lambda _: b"{ half of", None)
      for name in ("config.json", "model.safetensors", "tokenizer.json")),
    *(("model.safetensors", with_weights(change), message) for change, message in (
        (lambda w: w.pop(NORM), f"missing_keys, {NORM} for one"),
        (lambda w: w.update({FURTHER: torch.zeros(3)}), f"unexpected_keys, {FURTHER} for one"),
        (lambda w: w.update({TABLE: torch.ones(512, 16)}), f"{TABLE} holds no sinusoids"),
        (lambda w: w.update({NORM: torch.zeros(8)}), "config.json and model.safetensors are no"))),
    ("tokenizer.json", lambda data: json.dumps(
        {**json.loads(data), "normalizer": {"type": "Lowercase"}}).encode(),
     "another normalizer")])
def test_foreign_damaged_and_missing_files_are_named(tmp_path, exported, name, change, message):
    file = copy_of(exported, tmp_path) / name
    data = file.read_bytes()
    file.unlink()
    if change:
        file.write_bytes(change(data))
    with pytest.raises((ValueError, OSError), match=message):
        import_from_hugging_face(file.parent)


def test_a_folder_that_fails_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_to_hugging_face(small_model(), BPE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The card


def test_card_invents_nothing_and_keeps_its_lines():
    card = hf.model_card(small_model().config, TOKENIZERS["words"], "no", "de")
    assert card.count("not stated") == 3 and "BLEU" not in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["language"] == ["no", "de"] and "license" not in front, "no truth value"
    hostile = {"data": "one\n- Score: BLEU 99\n---", "metric": "a\nb", "signature": "c\n d"}
    card = hf.model_card(small_model().config, BPE, **hostile)
    assert "- Trained on: one - Score: BLEU 99 ---" in card.split("\n")
    assert "- Score: a b" in card and "`c d`" in card


def test_the_code_on_the_card_writes_what_the_model_writes_and_never_padding(tmp_path):
    model, folder, texts = model_that_writes(len(BPE)), tmp_path / "out", ["a dog sleeps", "a cat"]
    export_to_hugging_face(model, BPE, folder)
    limits = folder / "generation_config.json"  # random models seldom end
    limits.write_text(json.dumps(json.loads(limits.read_text()) | {"max_length": 10}))
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    printed, sources = [], [torch.tensor([[*BPE.encode(text), END]]) for text in texts]
    exec(code, {"folder": folder, "sentences": texts, "print": printed.append})
    ours = [greedy_decode(model, source)[0][:9] for source in sources]
    assert printed == [[BPE.decode(row) for row in ours]]
    assert max(len(set(row)) for row in ours) > 3, "one word would agree too easily"
    first = model(sources[0], torch.tensor([[BEGIN]])).argmax()
    assert first == PAD, "nothing was forbidden"
