"""Every view of one sentence shows what the model did, and strangers' words stay words."""

import html

import pytest
import torch
from helpers import TEXTS, random_model

from annotated import Translator, beam_search, look, save_checkpoint, translate
from annotated.cli import main
from annotated.data.tokenizers import BEGIN, END, WordTokenizer
from annotated.model.multi_head import record_attention

WORDS = WordTokenizer.fit(TEXTS)
SENTENCE = TEXTS[0][0]


@pytest.fixture
def saved():
    model = random_model(len(WORDS), seed=4, N=2).eval()
    return Translator(model, WORDS, {"source_language": "en", "target_language": "de"})


@pytest.mark.parametrize("beam", [1, 3])
def test_what_is_shown_is_what_the_model_did(saved, beam):
    """Weights and choices from one forward pass."""
    seen, model = look(SENTENCE, saved, beam=beam), saved.model
    assert seen.translation == translate([SENTENCE], model, WORDS, beam=beam)[0]
    source = torch.tensor([[*WORDS.encode(SENTENCE, "en"), END]])
    ids = beam_search(model, source, beam)[0][0][0]
    assert seen.source == WORDS.pieces(source[0].tolist())
    steps = [*ids, END][:source.size(1) + 50]  # no END where the output was cut off
    assert seen.written == WORDS.pieces(steps)
    blocks = ["encoder 1", "encoder 2", "decoder 1", "cross 1", "decoder 2", "cross 2"]
    assert list(seen.weights) == blocks
    with torch.no_grad(), record_attention(model) as recorded:
        p = model(source, torch.tensor([[BEGIN, *steps[:-1]]]))[0].softmax(dim=-1)
    for name, path in (("encoder 1", "encoder.layers.0.self_attention"),
                       ("cross 2", "decoder.layers.1.cross_attention")):
        torch.testing.assert_close(seen.weights[name], recorded[path][0])
    for step, row in zip(seen.top_tokens, p, strict=True):
        assert [token for token, _ in step] == WORDS.pieces(row.topk(5).indices.tolist())
        assert [value for _, value in step] == pytest.approx(row.topk(5).values.tolist(), rel=1e-5)


def test_an_output_that_is_cut_off_at_the_last_position_is_shown():
    model = random_model(len(WORDS), seed=4, positions="learned", max_length=12).eval()
    seen = look(SENTENCE, Translator(model, WORDS, {"source_language": "en"}), beam=1)
    assert len(seen.written) == len(seen.top_tokens) == 12 and seen.written[-1] != "</s>"
    assert seen.weights["cross 1"].shape[1:] == (12, len(seen.source))


def test_rows_to_spare_of_a_vocabulary_are_not_shown():
    model = random_model(len(WORDS) + 1, seed=4, N=2).eval()
    weight, saved = model.embedding.weight.data, Translator(model, WORDS, {"source_language": "en"})
    weight[-1] = 0
    first = WORDS.encode(look(SENTENCE, saved, beam=1).written[0], "de")[0]
    weight[-1] = 0.9 * weight[first]  # the second best, and never the best
    assert all(len(step) == 5 for step in look(SENTENCE, saved, beam=1).top_tokens)


def test_rows_are_queries_and_columns_are_keys(saved):
    seen = look(SENTENCE, saved)
    chart = seen.charts()["One head at a time"].to_dict()
    params = {param["name"]: param.get("value") for param in chart["params"]}
    fed = ["<s>", *seen.written[:-1]]
    steps = [f"{token} → {after}" for token, after in zip(fed, seen.written, strict=True)]
    rows = dict(zip(params["layers"], params["queries"], strict=True))
    columns = dict(zip(params["layers"], params["keys"], strict=True))
    assert params["layers"][0] == "cross 2", "the block that is looked at most is shown first"
    assert rows["cross 1"] == rows["decoder 1"] == steps
    assert columns["cross 1"] == seen.source and columns["decoder 1"] == fed
    assert rows["encoder 1"] == columns["encoder 1"] == seen.source


def test_a_page_holds_all_views_and_a_stranger_s_words_stay_words(saved, tmp_path):
    hostile = "<script>alert(1)</script> the dog"
    look(hostile, saved).save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    shown = page.partition("<main>")[2].partition("</main>")[0]
    assert f"<h1>{html.escape(hostile)} → " in shown and "<script>alert" not in page
    assert shown.count("<h2>") == 5 and shown.count("<img alt=") == 3
    assert page.count('vegaEmbed("#chart') == 2
    assert 'id="chart"' in page and 'id="chart4"' in page and "http-equiv" in page
    with pytest.raises(ValueError, match="the sentence is blank"):
        look(" \u00a0", saved)
    with pytest.raises(ValueError, match="beam"):
        look("the dog", saved, beam=0)


def test_the_command_writes_the_page_and_names_unknown_words(saved, tmp_path, capsys):
    save_checkpoint(tmp_path / "model", saved.model, WORDS, **saved.info)
    sentence = f"{SENTENCE} zebra"
    main(["look", sentence, "--model", str(tmp_path / "model"), "--out",
          str(tmp_path / "page.html"), "--device", "cpu"])
    printed = capsys.readouterr()
    assert "zebra" in printed.err
    assert printed.out.startswith(look(sentence, saved).translation + "\n")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(SystemExit, match="2"):
        main(["look", SENTENCE, "--out", str(tmp_path)])  # a folder
    assert "annotated look: error: " in capsys.readouterr().err
