"""The live page computes what the library computes, refuses what is not in the toy language, and draws what it says."""

import base64
import functools
import http.server
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT

from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import BEGIN, END, UNKNOWN, split_words
from annotated.model.multi_head import record_attention
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.checkpoints import book_model
from annotated.translation.search import beam_search, greedy_decode, length_penalty, translate

sys.path.insert(0, "tools")
import live  # noqa: E402

CODE = ROOT / "docs" / "_static" / "live"
HOSTILE = ["<img src=x onerror=window.hit=1>", "</script><script>window.hit=1</script>", '"><svg onload=window.hit=1>', "javascript:hit=1",
           "\u202eThe dog", "The\u200fdog", "dog\x00", "${window.hit=1}", "__proto__", "constructor", "toString", "\ud800"]

# What the page is given

@pytest.fixture(scope="session")
def book():
    return book_model()


@pytest.fixture(scope="session")
def half(book):
    """The library's model, whose weights are those of the page: half precision holds each of them."""
    assert all(torch.equal(weight.half().float(), weight) for weight in book.model.state_dict().values())
    return book.model


@pytest.fixture(scope="session")
def folder(book, tmp_path_factory):
    """model.js beside the scripts, as in the site."""
    folder = tmp_path_factory.mktemp("site") / "_static" / "live"
    shutil.copytree(CODE, folder, ignore=shutil.ignore_patterns("model.js"))
    live.write(folder, book)
    return folder


@pytest.fixture(scope="session")
def sentences():
    corpus = load_corpus("toy")
    return [english for english, _ in (*corpus.test[:150], *corpus.novel[:150])]


def description(folder):
    text = (folder / "model.js").read_text(encoding="ascii")
    return json.loads(re.search(r"^const MODEL = (.*);$", text, re.MULTILINE)[1])


PRELUDE = """
const fs = require("fs"), [folder, model] = process.argv.slice(1);
const T = require(folder + "/transformer.js"), W = require(folder + "/words.js"), MODEL = require(model);
const given = JSON.parse(fs.readFileSync(0, "utf8")), net = new T.Transformer(MODEL), END = W.END;
const words = MODEL.vocabulary && new W.Words(MODEL);
const plain = (key, x) => (ArrayBuffer.isView(x) ? [...x] : x);
const answer = (x) => console.log(JSON.stringify(x, plain));
"""


def javascript(folder, script, given=None, model=None):
    """Run a script under Node with the page's code; returns what it gives to `answer`."""
    if not shutil.which("node"):
        pytest.skip("node is not installed: the page's arithmetic is not run outside a browser")
    command = ["node", "-e", PRELUDE + script, str(folder), str(model or folder / "model.js")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_half_precision_number_is_read_as_ieee_754_says(folder):
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    found = javascript(folder, "answer(given.map(T.fromHalf))", bits.tolist())
    assert np.array_equal(np.array(found), bits.view(np.float16).astype(float)) and len(bits) == 2**16 - 2**11


def test_weights_arrive_bit_for_bit(folder, half):
    script = """
    const flat = (node) => node instanceof Float32Array ? [node] : Object.values(node).flatMap(flat);
    const all = [net.embedding, ...flat({ encoder: net.encoderLayers, decoder: net.decoderLayers })];
    answer(all.map((values) => Buffer.from(values.buffer).toString("base64")));
    """
    found = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in javascript(folder, script)]
    expected = [weight.flatten().numpy() for weight in half.state_dict().values()]
    assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
    assert sum(map(len, found)) == description(folder)["parameters"] == sum(w.numel() for w in half.parameters())


def test_the_file_is_small_plain_and_the_same_each_time(folder, book, tmp_path):
    path = folder / "model.js"
    assert live.write(tmp_path / "new" / "folder", book).read_bytes() == path.read_bytes()
    assert path.stat().st_size < 2_500_000 and path.read_bytes().isascii()
    for name, sentence in description(folder)["examples"]:
        corpus = load_corpus("toy")
        assert sentence in {english for english, _ in (*corpus.test, *corpus.novel)}, f"{name}: {sentence}"


@pytest.mark.parametrize("changes, message", [
    ({"norm_first": True}, "norm_first=True: transformer.js computes norm_first=False only"),
    ({"positions": "learned"}, "positions='learned'"), ({"d_k": 5}, "d_k=5"), ({"d_v": 5}, "d_v=5"),
])
def test_a_model_that_the_page_cannot_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        live.check(TransformerConfig.tiny(9, **changes))


def test_a_weight_too_large_for_half_precision_is_refused():
    model = Transformer(TransformerConfig.tiny(9, N=1, d_model=8, d_ff=8, h=2))
    with torch.no_grad():
        model.embedding.weight[3, 3] = 70_000
    with pytest.raises(ValueError, match="too large for half precision"):
        live.pack(model)


# The arithmetic

def source_ids(book, sentence):
    return torch.tensor([[*book.tokenizer.encode(sentence, "en"), END]])


def test_logits_and_every_attention_weight_are_the_library_s(folder, book, half, sentences):
    chosen = sentences[::15]
    translations = translate(chosen, half, book.tokenizer)
    given = [[source_ids(book, english)[0].tolist(), [*book.tokenizer.encode(german, "de"), END]]
             for english, german in zip(chosen, translations, strict=True)]
    script = """
    const found = given.map(([source, output]) => {
      const { memory, weights } = net.encode(source), logits = [];
      let state = net.begin(memory);
      for (const token of [W.BEGIN, ...output.slice(0, -1)]) {
        const next = net.step(state, token);
        state = next.state;
        logits.push([...next.logits]);
      }
      return { logits, ...T.follow(net, source, output) };
    });
    answer(found);
    """
    double, layers, compared = half.double(), range(book.model.config.N), 0
    for (source, output), found in zip(given, javascript(folder, script, given), strict=True):
        with torch.no_grad(), record_attention(double) as recorded:
            logits = double(torch.tensor([source]), torch.tensor([[BEGIN, *output[:-1]]]))[0]
        torch.testing.assert_close(torch.tensor(found["logits"]).double(), logits, atol=2e-5, rtol=0)
        for layer in layers:
            own = recorded[f"encoder.layers.{layer}.self_attention"][0].transpose(0, 1)  # (queries, h, keys)
            torch.testing.assert_close(torch.tensor(found["encoder"][layer]).double(), own, atol=1e-5, rtol=0)
            for kind, name in (("self", "self_attention"), ("cross", "cross_attention")):
                rows = recorded[f"decoder.layers.{layer}.{name}"][0].transpose(0, 1)  # (positions, h, keys)
                for i, position in enumerate(found["positions"]):
                    weights = torch.tensor(position[kind][layer]).double()  # (h, keys up to here)
                    torch.testing.assert_close(weights, rows[i, :, : weights.size(1)], atol=1e-5, rtol=0)
                    assert rows[i, :, weights.size(1):].sum() == 0
                    compared += 1
        chances = [position["probabilities"] for position in found["positions"]]
        torch.testing.assert_close(torch.tensor(chances).double(), logits.softmax(dim=-1), atol=1e-5, rtol=0)
    half.float()
    assert len(given) == 20 and compared > 500


@pytest.fixture(scope="session")
def translated(folder, sentences):
    script = "answer(given.map((sentence) => words.decode(T.greedy(net, [...words.encode(sentence).ids, END]))));"
    return javascript(folder, script, sentences)


def test_three_hundred_greedy_translations_are_the_library_s(translated, book, half, sentences):
    assert translated == translate(sentences, half, book.tokenizer)
    assert len(translated) == 300 and len(set(translated)) > 290


def test_a_hundred_translations_with_a_beam_are_the_library_s(folder, book, half, sentences):
    script = """
    answer(given.map((sentence) => {
      const { output, score } = T.beamSearch(net, [...words.encode(sentence).ids, END]);
      return [words.decode(output), score];
    }));
    """
    chosen = sentences[::3]
    found = javascript(folder, script, chosen)
    assert [text for text, _ in found] == translate(chosen, half, book.tokenizer, beam=4)
    for sentence, (_, score) in list(zip(chosen, found, strict=True))[::10]:
        assert abs(beam_search(half, source_ids(book, sentence))[0][0][1] - score) < 1e-4


def test_the_hypotheses_of_every_step_have_the_model_s_own_log_probabilities(folder, book, half, sentences):
    script = """
    answer(given.map((sentence) => T.beamSearch(net, [...words.encode(sentence).ids, END]).steps.map((step) =>
      step.map(({ tokens, logP, score, ended }) => ({ tokens, logP, score, ended })))));
    """
    chosen = sentences[140:152:2]
    for sentence, steps in zip(chosen, javascript(folder, script, chosen), strict=True):
        source = source_ids(book, sentence)
        for number, step in enumerate(steps, 1):
            assert len(step) == 4 and len({tuple(one["tokens"]) for one in step}) == 4
            assert [one["score"] for one in step] == sorted((one["score"] for one in step), reverse=True)
            for one in step:
                ids = one["tokens"]
                assert len(ids) == number or one["ended"]
                with torch.no_grad():
                    log_p = half(source, torch.tensor([[BEGIN, *ids[:-1]]])).log_softmax(dim=-1)
                expected = log_p[0, range(len(ids)), ids].sum().item()
                assert abs(one["logP"] - expected) < 1e-4 and abs(one["score"] - expected / length_penalty(len(ids), 0.6)) < 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_other_models_and_sentences_without_an_end_agree_too(folder, tmp_path, seed):
    """Random models mostly run into the limit, and their beams hold hypotheses that end at once: what a trained one never shows."""
    torch.manual_seed(seed)
    sizes = {"N": 1 + seed % 3, "d_model": 24, "d_ff": 40, "h": (1, 2, 3, 4)[seed]}
    model = Transformer(TransformerConfig(11, **sizes)).half().double().eval()
    tensors, weights = live.pack(model)
    data = {"config": {"d_model": 24, "h": sizes["h"]}, "tensors": tensors, "base64": weights}
    (tmp_path / "model.js").write_text(f"module.exports = {json.dumps(data)};")
    sources = [[UNKNOWN + (seed + i * j) % 8 for j in range(1, 2 + i)] + [END] for i in range(8)]
    script = """
    answer(given.map((source) => [
      T.greedy(net, source), T.beamSearch(net, source, 3, 1, 5).output, T.beamSearch(net, source, 5, 0, 2).score,
      T.beamSearch(net, source, 3, 2, 20).output]));
    """
    lengths, others = set(), 0
    for source, (greedy, beam, score, late) in zip(sources, javascript(folder, script, sources, tmp_path / "model.js"), strict=True):
        ids = torch.tensor([source])
        assert [token for token in greedy if token != END] == greedy_decode(model, ids)[0]
        assert [token for token in beam if token != END] == beam_search(model, ids, 3, 1.0, extra=5)[0][0][0]
        assert abs(score - beam_search(model, ids, 5, 0.0, extra=2)[0][0][1]) < 1e-4
        assert [token for token in late if token != END] == beam_search(model, ids, 3, 2.0, extra=20)[0][0][0], "stopped too early"
        lengths.add(len(greedy) - len(source))
        others += beam != greedy
    assert 50 in lengths, "none ran into the limit"
    assert others > 0, "nowhere does the beam say something else"


# The words

REASONS = re.compile(r"[.,?]+\w|[.,?]{2}|[^\w\s.,?]|\x1f")  # a mark inside a word, two marks, other characters
ENCODE = "answer(given.map((text) => words.encode(text)));"


def test_every_sentence_of_the_corpus_has_the_library_s_tokens(folder, book):
    corpus = load_corpus("toy")
    pairs = [*corpus.train[::5], *corpus.valid, *corpus.test, *corpus.novel]
    sources, targets = zip(*pairs, strict=True)
    found = javascript(folder, ENCODE, sources)
    assert [one["ids"] for one in found] == book.tokenizer.encode_batch(sources, "en")
    assert not any(one["unknown"] for one in found)
    ids = book.tokenizer.encode_batch(targets, "de")
    decoded = javascript(folder, "answer(given.map((ids) => words.decode(ids)));", [[*row, END, 5] for row in ids])
    assert decoded == [book.tokenizer.decode(row) for row in ids]


def mixed_texts(vocabulary, count):
    """Words of both languages, marks, spaces and what is neither, put together by chance."""
    generator = random.Random(0)
    strange = ["zebra", "dont", "don't", "it's", "cannot", "Cannot", "a", "A", "…", "...", "-", "!", "’s", "U.S.", "3", "gonna",
               "No", "<s>", "</s>", "<unk>", "\u00a0", "\ufeff", "\u200b", "  ", "\t", "\x1f"]
    between = [" ", " ", " ", ". ", ", ", "? ", "?? ", " , ", ".", ",", ""]
    for _ in range(count):
        parts = [generator.choice(strange if generator.random() < 0.12 else vocabulary) for _ in range(generator.randint(1, 4))]
        yield "".join(part + generator.choice(between) for part in parts)


def test_an_accepted_text_has_the_library_s_tokens_and_a_refused_one_holds_a_reason(folder, book):
    known = [book.tokenizer.table[index] for index in description(folder)["english"]]
    texts = list(mixed_texts(known * 3 + book.tokenizer.words, 4000))
    texts += [word + mark for word in known for mark in (".", ",", "?", "..", ".?", "?.")]
    accepted = 0
    for text, found in zip(texts, javascript(folder, ENCODE, texts), strict=True):
        pieces = split_words(text, "en")
        if not found["unknown"]:
            assert found["pieces"] == pieces and found["ids"] == book.tokenizer.encode(text, "en"), repr(text)
            accepted += 1
        elif set(pieces) <= set(known):
            assert REASONS.search(text), f"{text!r} refused for {found['unknown']}"
    assert accepted > 1500


def test_unknown_words_are_named_once_and_near_ones_offered(folder):
    found = javascript(folder, ENCODE, ["The zebra sees a zebra and where the Hund slep.", "toString __proto__ constructor", "  "])
    assert found[0]["unknown"] == ["zebra", "where", "Hund", "slep"]
    assert found[1]["unknown"] == ["toString", "__proto__", "constructor"]
    assert found[2] == {"pieces": [], "ids": [], "unknown": []}
    script = "answer(given.map((word) => words.similar(word)));"
    where, slep, nothing, empty, long = javascript(folder, script, ["where", "slep", "xylophone", "", "x" * 5000])
    assert where == ["Where"] and "sleep" in slep and nothing == empty == long == []
    assert javascript(folder, 'answer(["Hund", "dog", "zebra", "."].map((word) => words.german.has(word)))') == [True, False, False, False]


# The page in a browser

def shell():
    """The page's own HTML without the theme: the blocks that docs/live.md gives to Sphinx, under the site's policy."""
    text = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
    text = re.sub(r"^```\{include\} (\S+)\n```", lambda part: (ROOT / "docs" / part[1]).read_text(encoding="utf-8"), text, flags=re.M)
    blocks = re.findall(r"^```\{raw\} html\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    policy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:"
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width"><title>live</title><link rel="icon" href="data:,">'
            f"<main><h1>Live</h1>{''.join(blocks)}</main></html>")


@pytest.fixture(scope="session")
def site(folder):
    """The folder with live.html: the built site where there is one, else a shell around the page."""
    built = ROOT / "_build" / "site"
    if (built / "live.html").exists():
        return built
    (folder.parent.parent / "live.html").write_text(shell(), encoding="utf-8")
    return folder.parent.parent


@pytest.fixture(scope="session")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def visit(browser, address):
    """Open the page; afterwards nothing may have been requested elsewhere, written to the console or executed by a text."""
    opened, wrong = [], []

    def visit(url=f"{address}/live.html", motion="reduce", **options):
        page = browser.new_page(reduced_motion=motion, **options)
        opened.append(page)
        own = (address, "file:", "data:", "blob:")
        page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(request.url))
        page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(url)
        page.wait_for_selector("#live-heatmap rect")
        return page

    yield visit
    for page in opened:
        assert page.evaluate("window.hit") is None
        page.close()
    assert wrong == []


def enter(page, sentence):
    page.fill("#live-sentence", sentence)
    page.press("#live-sentence", "Enter")


def opacities(page):
    """The heat map as it is drawn."""
    return page.eval_on_selector_all("#live-heatmap .live-weight", "all => all.map((rect) => Number(rect.getAttribute('fill-opacity')))")


def written(page):
    return page.eval_on_selector_all("#live-target bdi", "all => all.map((item) => item.textContent)")


def library(book, half, sentence, output=None):
    """Greedy translation, its pieces and all recorded attention."""
    source = source_ids(book, sentence)
    ids = output or greedy_decode(half, source)[0]
    with torch.no_grad(), record_attention(half) as recorded:
        half(source, torch.tensor([[BEGIN, *ids]]))
    return SimpleNamespace(text=book.tokenizer.decode(ids), pieces=book.tokenizer.pieces([*ids, END]), attention=recorded)


def test_what_is_typed_is_translated_as_the_library_does(visit, book, half, sentences):
    page = visit()
    for sentence in sentences[::40]:
        enter(page, sentence)
        expected = library(book, half, sentence)
        assert page.inner_text("#live-translation") == expected.text and written(page) == expected.pieces
        assert expected.text in page.inner_text("#live-message"), "not announced"
    page.check("input[value=beam]")
    for sentence in ["The boy puts on his jacket.", *sentences[150::50]]:
        enter(page, sentence)
        assert page.inner_text("#live-translation") == translate([sentence], half, book.tokenizer, beam=4)[0]


def test_every_head_is_drawn_as_the_library_records_it(visit, book, half):
    page = visit()
    sentence = "The girl will eat potato soup because it is fresh."
    enter(page, sentence)
    recorded, drawings = library(book, half, sentence).attention, set()
    for kind, name in (("cross", "decoder.layers.{}.cross_attention"), ("encoder", "encoder.layers.{}.self_attention"),
                       ("decoder", "decoder.layers.{}.self_attention")):
        page.select_option("#live-kind", kind)
        small = page.eval_on_selector_all("#live-overview canvas", "all => all.map((canvas) => canvas.toDataURL())")
        assert len(set(small)) == book.model.config.N * book.model.config.h
        for layer in range(book.model.config.N):
            page.select_option("#live-layer", value=str(layer + 1))
            for head in (*range(book.model.config.h), -1):
                page.select_option("#live-head", value=str(head + 1))
                weights = recorded[name.format(layer)][0]
                weights = weights.mean(dim=0) if head < 0 else weights[head]
                seen = [w for i, row in enumerate(weights.tolist()) for w in (row[: i + 1] if kind == "decoder" else row)]
                drawn = opacities(page)
                assert drawn == pytest.approx(seen, abs=6e-4)
                drawings.add(tuple(drawn))
    assert len(drawings) == 3 * 2 * 5
    page.click("#live-overview button >> nth=5")
    weights = recorded["decoder.layers.1.self_attention"][0, 1]
    assert opacities(page) == pytest.approx([w for i, row in enumerate(weights.tolist()) for w in row[: i + 1]], abs=6e-4)
    assert page.get_attribute("#live-overview button >> nth=5", "aria-pressed") == "true"
    page.click("#live-weights >> xpath=../summary")
    cells = page.locator("#live-weights tbody tr").nth(3).locator("td").all_inner_texts()
    assert cells[:4] == [f"{w:.2f}" for w in weights[3, :4].tolist()] and set(cells[4:]) == {"–"}


def test_a_weight_is_taken_apart_into_the_products_that_the_library_adds_up(visit, book, half):
    page = visit()
    sentence = "The girl will eat potato soup because it is fresh."
    enter(page, sentence)
    blocks = {"cross": half.decoder.layers[1].cross_attention, "encoder": half.encoder.layers[1].self_attention,
              "decoder": half.decoder.layers[1].self_attention}
    given = {}
    hooks = [block.register_forward_pre_hook(lambda _, inputs, kind=kind: given.setdefault(kind, inputs)) for kind, block in blocks.items()]
    recorded = library(book, half, sentence).attention
    for hook in hooks:
        hook.remove()
    names = {"cross": "decoder.layers.1.cross_attention", "encoder": "encoder.layers.1.self_attention",
             "decoder": "decoder.layers.1.self_attention"}
    for kind, head, query, key in (("cross", 3, 4, 6), ("encoder", 0, 2, 5), ("decoder", 1, 5, 3)):
        page.select_option("#live-kind", kind)
        page.select_option("#live-layer", "2")
        page.select_option("#live-head", str(head + 1))
        page.select_option("#live-query", str(query))
        page.select_option("#live-key", str(key))
        asking, read = given[kind][:2]
        q = blocks[kind].queries(asking)[0, head, query].double()
        k = blocks[kind].keys_and_values(read, read)[0][0, head, key].double()
        said = [float(text.replace("−", "-")) for text in page.locator("#live-sum strong").all_inner_texts()]
        weight = recorded[names[kind]][0, head, query, key].item()
        assert said == pytest.approx([(q @ k).item(), (q @ k).item() / math.sqrt(len(q)), weight], abs=0.011)
        bars = page.eval_on_selector_all("#live-products rect title", "all => all.slice(-32).map((one) => one.textContent)")
        assert [float(bar.split("= ")[1].replace("−", "-")) for bar in bars] == pytest.approx((q * k).tolist(), abs=0.011)
    page.select_option("#live-head", "4")
    cells = page.locator("#live-heatmap .live-weight")
    cells.nth(8).click()  # row 3 of the decoder's triangle has four cells: 6 to 9
    assert (page.input_value("#live-query"), page.input_value("#live-key")) == ("3", "2")


def test_lines_of_all_heads_follow_the_toggles_and_the_token_that_is_pointed_at(visit, book, half):
    page = visit()
    sentence = "The dog sleeps."
    enter(page, sentence)
    weights = library(book, half, sentence).attention["decoder.layers.1.cross_attention"][0]
    drawn = "all => all.map((line) => Number(line.getAttribute('stroke-opacity')))"
    expected = [w for head in weights.tolist() for row in head for w in row if w >= 0.02]
    assert page.eval_on_selector_all("#live-lines line", drawn) == pytest.approx(expected, abs=6e-4)
    page.uncheck("#live-toggles input >> nth=0")
    kept = [w for head in weights[1:].tolist() for row in head for w in row if w >= 0.02]
    assert page.eval_on_selector_all("#live-lines line", drawn) == pytest.approx(kept, abs=6e-4)
    page.focus("#live-lines text[data-side=query] >> nth=1")
    stressed = [w if i == 1 else 0.06 * w for head in weights[1:].tolist() for i, row in enumerate(head) for w in row if w >= 0.02]
    assert page.eval_on_selector_all("#live-lines line", drawn) == pytest.approx(stressed, abs=6e-4)


@pytest.mark.parametrize("phrase, block, heads, asking, read", [
    (0, "decoder.layers.1.cross_attention", [1], "Der", "uncle"), (1, "decoder.layers.1.cross_attention", [0, 2, 3], "ein", "invites"),
    (2, "encoder.layers.1.self_attention", [1, 3], "she", "aunt"),
])
def test_phrases_show_the_lines_they_speak_of_and_these_what_is_said(visit, book, half, phrase, block, heads, asking, read):
    page = visit()
    enter(page, "The dog sleeps.")
    button = page.locator("#live-guide button").nth(phrase)
    button.hover()
    assert page.input_value("#live-sentence") == "The dog sleeps."  # what a visitor typed is left alone
    button.click()
    sentence = page.locator("#live-guide").get_attribute("data-sentence")
    assert page.input_value("#live-sentence") == sentence and button.get_attribute("aria-pressed") == "true"
    expected = library(book, half, sentence)
    keys = [*book.tokenizer.pieces(book.tokenizer.encode(sentence, "en")), "</s>"]
    row = (keys if block.startswith("encoder") else expected.pieces).index(asking)
    weights = expected.attention[block][0, heads]
    stressed = [w if i == row else 0.06 * w for head in weights.tolist() for i, line in enumerate(head) for w in line if w >= 0.02]
    drawn = page.eval_on_selector_all("#live-lines line", "all => all.map((line) => Number(line.getAttribute('stroke-opacity')))")
    assert drawn == pytest.approx(stressed, abs=6e-4)
    others = weights[:, row].clone()
    others[:, keys.index(asking) if asking in keys else slice(0, 0)] = 0  # a word that looks at itself looks somewhere else, too
    assert read in {keys[place] for place in others.argmax(dim=1)}
    if phrase == 2:
        assert weights[:, row, keys.index(read)].max() < 0.25
    else:
        assert {keys[place] for place in weights[:, row].argmax(dim=1)} == {read}


def test_a_head_is_followed_into_other_sentences(visit, book, half):
    page = visit()
    enter(page, "The dog sleeps.")
    page.select_option("#live-head", "4")
    page.select_option("#live-query", "1")
    page.click("#live-search")
    page.wait_for_selector("#live-search-status:has-text('other sentences')")
    found = page.locator("#live-alike li")
    assert page.inner_text("#live-search-status").startswith("Hund stands in ") and found.count() > 2
    for line in found.all()[:3]:
        sentence, key, weight = line.locator("button").inner_text(), line.locator("strong").inner_text(), line.inner_text().split()[-1]
        expected = library(book, half, sentence)
        row = expected.attention["decoder.layers.1.cross_attention"][0, 3, expected.pieces.index("Hund")]
        read = [*book.tokenizer.pieces(book.tokenizer.encode(sentence, "en")), "</s>"]
        assert key == read[int(row.argmax())] and float(weight) == pytest.approx(row.max().item(), abs=0.006)
    first = found.first.locator("button").inner_text()
    found.first.locator("button").click()
    assert page.input_value("#live-sentence") == first and page.inner_text("#live-translation") == library(book, half, first).text


def test_steps_by_button_slider_and_keyboard(visit, book, half):
    page = visit()
    sentence = "The mouse that my uncle likes sleeps."
    enter(page, sentence)
    pieces = library(book, half, sentence).pieces
    assert written(page) == pieces
    page.click("#live-again")
    assert written(page) == pieces[:1] and page.inner_text("#live-beam tr:first-child td").strip().endswith(pieces[0])
    columns = len(source_ids(book, sentence)[0])
    for count in (2, 3):
        page.click("#live-next")
        assert written(page) == pieces[:count] and len(opacities(page)) == count * columns
        assert all(len(text.replace("★", "").split()) == count for text in page.locator("#live-beam tr td:nth-child(2)").all_inner_texts())
    page.focus("#live-position")
    page.keyboard.press("ArrowRight")
    assert written(page) == pieces[:4] and page.get_attribute("#live-position", "aria-valuetext").startswith(f"4 of {len(pieces)}")
    page.click("#live-whole")
    page.click("#live-next", force=True)  # still there for the keyboard, and without effect
    assert written(page) == pieces and page.get_attribute("#live-next", "aria-disabled") == "true"
    chances = page.locator("#live-candidates tr").all_inner_texts()
    assert len(chances) == 5 and chances[0].startswith("</s>")


def test_played_token_by_token_unless_motion_is_unwanted(visit, book, half):
    page = visit(motion="no-preference")
    sentence = "The kitchen knife is under the table."
    pieces = library(book, half, sentence).pieces
    page.evaluate("""() => {
      window.counts = [];
      const told = () => counts.push(document.querySelectorAll('#live-target li').length);
      new MutationObserver(told).observe(document.querySelector('#live-target'), { childList: true, subtree: true });
    }""")
    enter(page, sentence)
    page.wait_for_function("count => counts.at(-1) === count", arg=len(pieces))
    assert written(page) == pieces
    steps = [count for count, _ in itertools.groupby(page.evaluate("counts"))]
    assert steps[-len(pieces):] == list(range(1, len(pieces) + 1)), "a token at a time, however late one looks"


def test_examples_and_random_sentences(visit, book, half):
    page = visit()
    for sentence in list(live.EXAMPLES.values())[:3]:
        page.select_option("#live-examples", sentence)
        assert page.inner_text("#live-translation") == library(book, half, sentence).text
    seen = set()
    for _ in range(5):
        page.click("#live-random")
        sentence = page.input_value("#live-sentence")
        assert page.inner_text("#live-translation") == library(book, half, sentence).text
        seen.add(sentence)
    assert len(seen) > 1


def test_unknown_words_are_said_and_a_near_one_put_in_their_place(visit, book, half):
    page = visit()
    before = page.inner_text("#live-translation")
    enter(page, "where is the zebra?")
    said = page.inner_text("#live-message")
    assert "“where” is not in the toy language" in said and "“zebra” is not in the toy language" in said
    assert page.get_attribute("#live-sentence", "aria-invalid") == "true" and page.inner_text("#live-translation") == before
    page.fill("#live-sentence", "where is the dog?")
    page.press("#live-sentence", "Enter")
    page.click("#live-message button:text('Where')")
    assert page.input_value("#live-sentence") == "Where is the dog?" and page.get_attribute("#live-sentence", "aria-invalid") is None
    assert page.inner_text("#live-translation") == library(book, half, "Where is the dog?").text
    enter(page, "The Hund sleeps.")
    assert "“Hund” is a German word" in page.inner_text("#live-message")
    enter(page, "   ")
    assert "Type a sentence" in page.inner_text("#live-message")
    enter(page, "a " * 60)
    assert "60 tokens" in page.inner_text("#live-message")
    enter(page, "the dog sleeps")
    assert "capital letter" in page.inner_text("#live-message") and page.inner_text("#live-translation")


def test_hostile_text_is_inert_and_shown_as_text(visit):
    page = visit()
    elements = page.evaluate("document.querySelectorAll('script, img, iframe, object').length")
    for text in HOSTILE:
        enter(page, text)
        assert "is not in the toy language" in page.inner_text("#live-message"), text
    enter(page, "\u202eThe dog\x00 sleeps.")
    assert "\\u{202e}The" in page.inner_text("#live-message")
    enter(page, "<img src=x onerror=window.hit=1>")
    assert "“<img”" in page.inner_text("#live-message")
    assert page.evaluate("document.querySelectorAll('script, img, iframe, object').length") == elements
    enter(page, "The dog sleeps.")
    assert page.inner_text("#live-translation") == "Der Hund schläft."


def test_dark_mode_changes_the_drawing(visit):
    page = visit()
    colours = {}
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        colours[theme] = (page.eval_on_selector("#live-heatmap .live-weight", "rect => getComputedStyle(rect).fill"),
                          page.eval_on_selector("#live-overview canvas", "canvas => canvas.toDataURL()"))
    assert all(light != dark for light, dark in zip(colours["light"], colours["dark"], strict=True))


def test_no_sideways_scroll_at_320_pixels(visit):
    page = visit(viewport={"width": 320, "height": 640})
    for sentence in ("The dog sleeps.", "Twelve friendly brothers think that the daughters have bought a kitchen knife and a shirt today."):
        enter(page, sentence)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_it_works_from_the_disk_and_says_what_is_missing(browser, site, folder, tmp_path):
    page = browser.new_page(reduced_motion="reduce")
    page.goto((site / "live.html").as_uri())
    enter(page, "The dog sleeps.")
    assert page.inner_text("#live-translation") == "Der Hund schläft."
    shutil.copytree(folder, tmp_path / "_static" / "live", ignore=shutil.ignore_patterns("model.js"))
    (tmp_path / "live.html").write_text(shell(), encoding="utf-8")
    page.goto((tmp_path / "live.html").as_uri())
    assert "make site" in page.inner_text("#live-message") and page.is_hidden("#live-form")
    page.close()
