"""The live page computes what the library computes, refuses what is no toy sentence, draws it."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
from types import SimpleNamespace

import live
import numpy as np
import pytest
import torch
from browsing import SIZE, new_tab
from helpers import ROOT

from annotated.data.corpora import load_corpus
from annotated.data.normalization import clean_text
from annotated.data.tokenizers import BEGIN, END, UNKNOWN, split_words
from annotated.model.multi_head import record_attention
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.checkpoints import book_model
from annotated.translation.search import beam_search, greedy_decode, translate

CODE = ROOT / "docs" / "_static" / "live"
HOSTILE = ["<img src=x onerror=window.hit=1>", "</script><script>window.hit=1</script>",
           '"><svg onload=window.hit=1>', "javascript:hit=1", "The\u200ddog",
           "${window.hit=1}", "__proto__", "constructor", "\ud800"]
GIRL = "The girl will eat potato soup because it is fresh."

# What the page is given

@pytest.fixture(scope="session")
def book():
    return book_model()


@pytest.fixture(scope="session")
def half(book):
    """The library's model, whose weights are those of the page: half precision holds them."""
    assert all(torch.equal(w.half().float(), w) for w in book.model.state_dict().values())
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
const T = require(folder + "/transformer.js"), W = require(folder + "/words.js");
const given = JSON.parse(fs.readFileSync(0, "utf8")), MODEL = require(model), END = W.END;
const net = new T.Transformer(MODEL);
const words = MODEL.vocabulary && new W.Words(MODEL);
const plain = (key, x) => (ArrayBuffer.isView(x) ? [...x] : x);
const answer = (x) => console.log(JSON.stringify(x, plain));
"""


def javascript(folder, script, given=None, model=None):
    """Run a script under Node with the page's code; returns what it gives to `answer`."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    command = ["node", "-e", PRELUDE + script, str(folder), str(model or folder / "model.js")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_half_precision_number_is_read_as_ieee_754_says(folder):
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    found = javascript(folder, "answer(given.map(T.fromHalf))", bits.tolist())
    assert found == bits.view(np.float16).tolist() and len(bits) == 2**16 - 2**11


def test_the_file_is_small_plain_and_the_same_each_time(folder, book, tmp_path):
    path = folder / "model.js"
    assert live.write(tmp_path / "new" / "folder", book).read_bytes() == path.read_bytes()
    assert path.stat().st_size < 2_500_000 and path.read_bytes().isascii()


@pytest.mark.parametrize("changes, message", [
    ({"norm_first": True}, "norm_first=True: transformer.js computes norm_first=False only"),
    ({"positions": "learned"}, "positions='learned'"), ({"d_v": 5}, "d_v=5"),
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
    translations = book.tokenizer.encode_batch(translate(chosen, half, book.tokenizer), "de")
    given = [[source_ids(book, english)[0].tolist(), [*german, END]]
             for english, german in zip(chosen, translations, strict=True)]
    script = """
    const found = given.map(([source, output]) => {
      let state = net.begin(net.encode(source).memory);
      const logits = [W.BEGIN, ...output.slice(0, -1)].map((token) => {
        const next = net.step(state, token);
        state = next.state;
        return [...next.logits];
      });
      return { logits, ...T.follow(net, source, output) };
    });
    answer(found);
    """

    def close(values, expected, atol=1e-5):
        torch.testing.assert_close(torch.tensor(values).double(), expected, atol=atol, rtol=0)

    double, compared = half.double(), 0
    for (source, output), found in zip(given, javascript(folder, script, given), strict=True):
        with torch.no_grad(), record_attention(double) as recorded:
            fed = torch.tensor([[BEGIN, *output[:-1]]])
            logits = double(torch.tensor([source]), fed)[0]
        close(found["logits"], logits, 2e-5)
        for layer in range(book.model.config.N):
            own = recorded[f"encoder.layers.{layer}.self_attention"][0]  # (h, queries, keys)
            close(found["encoder"][layer], own.transpose(0, 1))
            for kind, name in (("self", "self_attention"), ("cross", "cross_attention")):
                rows = recorded[f"decoder.layers.{layer}.{name}"][0]  # (h, positions, keys)
                for i, position in enumerate(found["positions"]):
                    keys = len(position[kind][layer][0])  # up to here
                    close(position[kind][layer], rows[:, i, :keys])
                    assert rows[:, i, keys:].sum() == 0
                    compared += 1
        chances = [position["probabilities"] for position in found["positions"]]
        close(chances, logits.softmax(dim=-1))
    half.float()
    assert len(given) == 20 and compared > 500


def test_three_hundred_translations_are_the_library_s(folder, book, half, sentences):
    """A third of them with a beam, too."""
    script = """
    answer(given.map((sentence, i) => {
      const source = [...words.encode(sentence).ids, END];
      const { output, score } = i % 3 ? { output: [] } : T.beamSearch(net, source);
      return [words.decode(T.greedy(net, source)), words.decode(output), score];
    }));
    """
    greedy, beam, scores = zip(*javascript(folder, script, sentences), strict=True)
    assert list(greedy) == translate(sentences, half, book.tokenizer) and len(set(greedy)) > 290
    assert list(beam[::3]) == translate(sentences[::3], half, book.tokenizer, beam=4)
    for sentence, score in list(zip(sentences, scores, strict=True))[::30]:
        assert abs(beam_search(half, source_ids(book, sentence))[0][0][1] - score) < 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_other_models_and_sentences_without_an_end_agree_too(folder, tmp_path, seed):
    """Random models mostly run into the limit, and beams hold hypotheses that end at once."""
    torch.manual_seed(seed)
    sizes = {"N": 1 + seed % 3, "d_model": 24, "d_ff": 40, "h": (1, 2, 3, 4)[seed]}
    model = Transformer(TransformerConfig(11, **sizes)).half().double().eval()
    tensors, weights = live.pack(model)
    data = {"config": {"d_model": 24, "h": sizes["h"]}, "tensors": tensors, "base64": weights}
    path = tmp_path / "model.js"
    path.write_text(f"module.exports = {json.dumps(data)};")
    sources = [[UNKNOWN + (seed + i * j) % 8 for j in range(1, 2 + i)] + [END] for i in range(8)]
    options, others = [(3, 1, 5), (5, 0, 2), (3, 2, 20)], 0
    script = f"""
    answer(given.map((source) => [T.greedy(net, source), ...{json.dumps(options)}.map((some) => {{
      const {{ output, score }} = T.beamSearch(net, source, ...some);
      return [output, score];
    }})]));
    """
    written = javascript(folder, script, sources, path)
    for source, (greedy, *found) in zip(sources, written, strict=True):
        ids = torch.tensor([source])
        assert [token for token in greedy if token != END] == greedy_decode(model, ids)[0]
        for (beam, alpha, extra), (output, score) in zip(options, found, strict=True):
            expected = beam_search(model, ids, beam, alpha, extra)[0][0]
            assert [token for token in output if token != END] == expected[0]
            assert abs(score - expected[1]) < 1e-4
            others += output != greedy
    assert others > 0, "nowhere does the beam say something else"


# The words

REASONS = re.compile(r"[.,?]+\w|[.,?]{2}|[^\w\s.,?]|\x1f")  # marks in a word, two marks, others
ENCODE = "answer(given.map((text) => words.encode(text)));"


def test_every_sentence_of_the_corpus_has_the_library_s_tokens(folder, book):
    corpus, tokenizer = load_corpus("toy"), book.tokenizer
    pairs = [*corpus.train[::5], *corpus.valid, *corpus.test, *corpus.novel]
    sources, targets = zip(*pairs, strict=True)
    found = javascript(folder, ENCODE, sources)
    assert [one["ids"] for one in found] == tokenizer.encode_batch(sources, "en")
    assert not any(one["unknown"] for one in found)
    ids = tokenizer.encode_batch(targets, "de")
    found = javascript(folder, "answer(given.map((ids) => words.decode(ids)));", ids)
    assert found == [tokenizer.decode(row) for row in ids]


def mixed_texts(vocabulary, count):
    """Words of both languages, marks, spaces and what is neither, put together by chance."""
    generator = random.Random(0)
    strange = ["zebra", "dont", "don't", "it's", "cannot", "A", "…", "...", "-", "!", "’s", "U.S.",
               "3", "<s>", "<unk>", "\u00a0", "\ufeff", "\u200b", "  ", "\t", "\x1f"]
    between = [" ", " ", " ", ". ", ", ", "? ", "?? ", " , ", ".", ",", ""]
    for _ in range(count):
        odd = [generator.random() < 0.12 for _ in range(generator.randint(1, 4))]
        parts = [generator.choice(strange if one else vocabulary) for one in odd]
        yield "".join(part + generator.choice(between) for part in parts)


def test_an_accepted_text_has_the_library_s_tokens_and_a_refused_one_holds_a_reason(folder, book):
    known = [book.tokenizer.table[index] for index in description(folder)["english"]]
    texts = list(mixed_texts(known * 3 + book.tokenizer.words, 4000))
    texts += [word + mark for word in known for mark in (".", ",", "?", "..", ".?", "?.")]
    accepted = 0
    for text, found in zip(texts, javascript(folder, ENCODE, texts), strict=True):
        pieces = split_words(clean_text(text), "en")
        if not found["unknown"]:
            assert found["pieces"] == pieces, repr(text)
            assert found["ids"] == book.tokenizer.encode(text, "en"), repr(text)
            accepted += 1
        elif set(pieces) <= set(known):
            assert REASONS.search(text), f"{text!r} refused for {found['unknown']}"
    assert accepted > 1500


def test_text_is_cleaned_as_the_library_cleans_it(folder):
    characters = [chr(code) for code in range(0x30000) if not 0xd800 <= code < 0xe000]
    blocks = ["x".join(characters[start:start + 256]) for start in range(0, len(characters), 256)]
    texts = [*blocks, "\x1b[31mred\x1b[0m", "Mu\u0308ller", "a\U000e0041b", "\x1b]0;", "\x1b("]
    found = javascript(folder, "answer(given.map(W.cleanText));", texts)
    for text, cleaned in zip(texts, found, strict=True):
        assert cleaned == clean_text(text), ascii(text)


# The page in a browser

@pytest.fixture(scope="module")
def address(site, serve):
    return serve(site)


@pytest.fixture
def visit(browser, address):
    """Open the page; in the end nothing may be requested elsewhere, gone wrong, or executed."""
    opened = []

    def visit(motion="reduce", viewport=SIZE):
        page = new_tab(browser, reduced_motion=motion, viewport=viewport)
        page.address = address
        opened.append(page)
        page.goto(f"{address}live.html")
        page.wait_for_selector("#live-heatmap rect")
        return page

    yield visit
    for page in opened:
        assert page.evaluate("window.hit") is None
        page.close()
        assert page.outside == page.mistakes == []


def enter(page, sentence):
    page.fill("#live-sentence", sentence)
    page.press("#live-sentence", "Enter")


def translation(page):
    return page.inner_text("#live-translation")


def numbers(page, places, attribute):
    """An attribute of the elements in these places, as numbers."""
    script = "(all, name) => all.map((one) => Number(one.getAttribute(name)))"
    return page.eval_on_selector_all(places, script, attribute)


def opacities(page):
    """The heat map as it is drawn."""
    return numbers(page, "#live-heatmap .live-weight", "fill-opacity")


def strokes(page):
    """The lines of the heads as they are drawn."""
    return numbers(page, "#live-lines line", "stroke-opacity")


def lines_of(weights, stressed=None):
    """The lines that should be drawn for weights (h, queries, keys), all but one query's faint."""
    share = [1 if stressed in (None, i) else 0.06 for i in range(weights.size(1))]
    return pytest.approx([share[i] * w for head in weights.tolist()
                          for i, row in enumerate(head) for w in row if w >= 0.02], abs=6e-4)


def written(page):
    return page.locator("#live-target bdi").all_text_contents()


def choose(page, **menus):
    for name, value in menus.items():
        page.select_option(f"#live-{name}", str(value))


BLOCKS = {"cross": "decoder.layers.{}.cross_attention",
          "encoder": "encoder.layers.{}.self_attention",
          "decoder": "decoder.layers.{}.self_attention"}


def library(book, half, sentence):
    """Greedy translation, its pieces and all recorded attention."""
    source = source_ids(book, sentence)
    ids = greedy_decode(half, source)[0]
    with torch.no_grad(), record_attention(half) as recorded:
        half(source, torch.tensor([[BEGIN, *ids]]))
    pieces = book.tokenizer.pieces
    return SimpleNamespace(text=book.tokenizer.decode(ids), keys=pieces(source[0].tolist()),
                           pieces=pieces([*ids, END]), attention=recorded)


def test_what_is_typed_is_translated_as_the_library_does(visit, book, half, sentences):
    page = visit()
    for sentence in sentences[::40]:
        enter(page, sentence)
        expected = library(book, half, sentence)
        assert translation(page) == expected.text and written(page) == expected.pieces
        assert expected.text in page.inner_text("#live-message"), "not announced"
    page.check("input[value=beam]")
    for sentence in ["The boy puts on his jacket.", *sentences[150::50]]:
        enter(page, sentence)
        assert translation(page) == translate([sentence], half, book.tokenizer, beam=4)[0]


def test_every_head_is_drawn_as_the_library_records_it(visit, book, half):
    page, drawings = visit(), set()
    N, h = book.model.config.N, book.model.config.h
    enter(page, GIRL)
    recorded = library(book, half, GIRL).attention

    def seen(kind, weights):  # the decoder's are a triangle
        return [w for i, row in enumerate(weights.tolist())
                for w in (row[: i + 1] if kind == "decoder" else row)]

    for kind, name in BLOCKS.items():
        choose(page, kind=kind)
        pictures = "all => all.map((canvas) => canvas.toDataURL())"
        small = page.eval_on_selector_all("#live-overview canvas", pictures)
        assert len(set(small)) == N * h
        for layer, head in itertools.product(range(N), (*range(h), -1)):
            choose(page, layer=layer + 1, head=head + 1)
            weights = recorded[name.format(layer)][0]
            weights = weights.mean(dim=0) if head < 0 else weights[head]
            drawn = opacities(page)
            assert drawn == pytest.approx(seen(kind, weights), abs=6e-4)
            drawings.add(tuple(drawn))
    assert len(drawings) == 3 * N * (h + 1)
    page.click("#live-overview button >> nth=5")
    weights = recorded["decoder.layers.1.self_attention"][0, 1]
    assert opacities(page) == pytest.approx(seen("decoder", weights), abs=6e-4)
    assert page.get_attribute("#live-overview button >> nth=5", "aria-pressed") == "true"
    page.click("#live-weights >> xpath=../summary")
    cells = page.locator("#live-weights tbody tr").nth(3).locator("td").all_inner_texts()
    assert cells[:4] == [f"{w:.2f}" for w in weights[3, :4].tolist()] and set(cells[4:]) == {"–"}


def test_a_weight_is_taken_apart_into_the_products_that_the_library_adds_up(visit, book, half):
    page, given = visit(), {}
    enter(page, GIRL)
    blocks = {kind: half.get_submodule(name.format(1)) for kind, name in BLOCKS.items()}
    hooks = [block.register_forward_pre_hook(lambda _, x, kind=kind: given.setdefault(kind, x))
             for kind, block in blocks.items()]
    recorded = library(book, half, GIRL).attention
    for hook in hooks:
        hook.remove()

    def numbers_in(texts):
        return [float(text.split("= ")[-1].replace("−", "-")) for text in texts]

    for kind, head, query, key in (("cross", 3, 4, 6), ("encoder", 0, 2, 5), ("decoder", 1, 5, 3)):
        choose(page, kind=kind, layer=2, head=head + 1, query=query, key=key)
        asking, read = given[kind][:2]
        q = blocks[kind].queries(asking)[0, head, query].double()
        k = blocks[kind].keys_and_values(read, read)[0][0, head, key].double()
        said = numbers_in(page.locator("#live-sum strong").all_inner_texts())
        weight = recorded[BLOCKS[kind].format(1)][0, head, query, key].item()
        product = (q @ k).item()
        assert said == pytest.approx([product, product / math.sqrt(len(q)), weight], abs=0.011)
        bars = page.locator("#live-products rect title").all_text_contents()[-len(q):]
        assert numbers_in(bars) == pytest.approx((q * k).tolist(), abs=0.011)
    page.locator("#live-heatmap .live-weight").nth(8).click()  # row 3 of a triangle: 6 to 9
    assert (page.input_value("#live-query"), page.input_value("#live-key")) == ("3", "2")


def test_lines_of_all_heads_follow_the_toggles_and_the_token_that_is_pointed_at(visit, book, half):
    page = visit()
    enter(page, "The dog sleeps.")
    recorded = library(book, half, "The dog sleeps.").attention
    weights = recorded["decoder.layers.1.cross_attention"][0]
    assert strokes(page) == lines_of(weights)
    page.uncheck("#live-toggles input >> nth=0")
    assert strokes(page) == lines_of(weights[1:])
    page.focus("#live-lines text[data-side=query] >> nth=1")
    assert strokes(page) == lines_of(weights[1:], stressed=1)


@pytest.mark.parametrize("phrase, block, heads, asking, read", [
    (0, "decoder.layers.1.cross_attention", [1], "Der", "uncle"),
    (1, "decoder.layers.1.cross_attention", [0, 2, 3], "ein", "invites"),
    (2, "encoder.layers.1.self_attention", [1, 3], "she", "aunt"),
])
def test_phrases_show_the_lines_of_heads(visit, book, half, phrase, block, heads, asking, read):
    page = visit()
    enter(page, "The dog sleeps.")
    button = page.locator("#live-guide button").nth(phrase)
    button.hover()
    assert page.input_value("#live-sentence") == "The dog sleeps."  # what was typed is left alone
    button.click()
    sentence = page.locator("#live-guide").get_attribute("data-sentence")
    assert page.input_value("#live-sentence") == sentence
    assert button.get_attribute("aria-pressed") == "true"
    expected = library(book, half, sentence)
    row = (expected.keys if block.startswith("encoder") else expected.pieces).index(asking)
    weights = expected.attention[block][0, heads]
    assert strokes(page) == lines_of(weights, stressed=row)
    others = weights[:, row].clone()
    if asking in expected.keys:
        others[:, expected.keys.index(asking)] = 0  # it looks at itself, and elsewhere, too
    assert read in {expected.keys[place] for place in others.argmax(dim=1)}


def test_a_head_is_followed_into_other_sentences(visit, book, half):
    page = visit()
    enter(page, "The dog sleeps.")
    choose(page, head=4, query=1)
    page.click("#live-search")
    page.wait_for_selector("#live-search-status:has-text('other sentences')")
    found = page.locator("#live-alike li")
    assert page.inner_text("#live-search-status").startswith("Hund stands in ")
    assert found.count() > 2
    for line in found.all()[:3]:
        sentence, key = line.locator("button").inner_text(), line.locator("strong").inner_text()
        expected = library(book, half, sentence)
        row = expected.pieces.index("Hund")
        weights = expected.attention["decoder.layers.1.cross_attention"][0, 3, row]
        assert key == expected.keys[int(weights.argmax())]
        said = float(line.inner_text().split()[-1])
        assert said == pytest.approx(weights.max().item(), abs=0.006)
    line.locator("button").click()
    assert page.input_value("#live-sentence") == sentence and translation(page) == expected.text


def test_steps_by_button_slider_and_keyboard(visit, book, half):
    page = visit()
    sentence = "The mouse that my uncle likes sleeps."
    enter(page, sentence)
    pieces, columns = library(book, half, sentence).pieces, len(source_ids(book, sentence)[0])
    page.click("#live-again")
    assert written(page) == pieces[:1]
    assert page.inner_text("#live-beam tr:first-child td").strip().endswith(pieces[0])
    for count in (2, 3):
        page.click("#live-next")
        assert written(page) == pieces[:count] and len(opacities(page)) == count * columns
        beam = page.locator("#live-beam tr td:nth-child(2)").all_inner_texts()
        assert {len(text.replace("★", "").split()) for text in beam} == {count}
    page.focus("#live-position")
    page.keyboard.press("ArrowRight")
    assert written(page) == pieces[:4]
    told = page.get_attribute("#live-position", "aria-valuetext")
    assert told.startswith(f"4 of {len(pieces)}")
    page.click("#live-whole")
    page.click("#live-next", force=True)  # still there for the keyboard, and without effect
    assert written(page) == pieces
    assert page.get_attribute("#live-next", "aria-disabled") == "true"
    chances = page.locator("#live-candidates tr").all_inner_texts()
    assert len(chances) == 5 and chances[0].startswith("</s>")


def test_played_token_by_token_unless_motion_is_unwanted(visit, book, half):
    page = visit(motion="no-preference")
    sentence = "The kitchen knife is under the table."
    pieces = library(book, half, sentence).pieces
    page.evaluate("""() => {
      const target = document.querySelector('#live-target');
      window.counts = [];
      const told = () => counts.push(target.querySelectorAll('li').length);
      new MutationObserver(told).observe(target, { childList: true, subtree: true });
    }""")
    enter(page, sentence)
    page.wait_for_function("count => counts.at(-1) === count", arg=len(pieces))
    assert written(page) == pieces
    steps = [count for count, _ in itertools.groupby(page.evaluate("counts"))]
    assert steps[-len(pieces):] == list(range(1, len(pieces) + 1)), "a token at a time"


def test_examples_and_random_sentences(visit, book, half):
    page, seen = visit(), set()
    page.select_option("#live-examples", index=2)
    assert translation(page) == library(book, half, page.input_value("#live-sentence")).text
    for _ in range(5):
        page.click("#live-random")
        seen.add(page.input_value("#live-sentence"))
        assert translation(page) == library(book, half, page.input_value("#live-sentence")).text
    assert len(seen) > 1


def test_unknown_words_are_said_and_a_near_one_put_in_their_place(visit, book, half):
    page = visit()
    before = translation(page)
    enter(page, "where is the zebra?")
    said = page.inner_text("#live-message")
    assert all(f"“{word}” is not in the toy language" in said for word in ("where", "zebra"))
    assert page.get_attribute("#live-sentence", "aria-invalid") == "true"
    assert translation(page) == before
    enter(page, "where is the dog?")
    page.click("#live-message button:text('Where')")
    assert page.input_value("#live-sentence") == "Where is the dog?"
    assert page.get_attribute("#live-sentence", "aria-invalid") is None
    assert translation(page) == library(book, half, "Where is the dog?").text
    for text, said in (("The Hund sleeps.", "“Hund” is a German word"), ("a " * 60, "60 tokens"),
                       ("   ", "Type a sentence"), ("the dog sleeps", "capital letter")):
        enter(page, text)
        assert said in page.inner_text("#live-message")
    assert translation(page)


def test_hostile_text_is_inert_and_shown_as_text(visit):
    page = visit()
    elements = "document.querySelectorAll('script, img, iframe, object').length"
    before = page.evaluate(elements)
    for text in HOSTILE:
        enter(page, text)
        assert "is not in the toy language" in page.inner_text("#live-message"), text
    for text, shown in (("The\u200ddog sleeps.", "The\\u{200d}dog"), (HOSTILE[0], "“<img”")):
        enter(page, text)
        assert shown in page.inner_text("#live-message")
    assert page.evaluate(elements) == before
    enter(page, "The dog sleeps.")
    assert translation(page) == "Der Hund schläft."


def test_dark_mode_changes_the_drawing(visit):
    page = visit()
    colours = []
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        page.evaluate("new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")
        fill = "rect => getComputedStyle(rect).fill"
        colours += [page.eval_on_selector("#live-heatmap .live-weight", fill),
                    page.eval_on_selector("#live-overview canvas", "canvas => canvas.toDataURL()")]
    assert len(set(colours)) == 4


def test_no_sideways_scroll_at_320_pixels(visit):
    page = visit(viewport={"width": 320, "height": 640})
    enter(page, "Twelve friendly brothers think that the daughters have bought a kitchen knife.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_it_works_from_the_disk_and_says_what_is_missing(browser, site, folder, tmp_path):
    page = browser.new_page(reduced_motion="reduce")
    page.goto((site / "live.html").as_uri())
    enter(page, "The dog sleeps.")
    assert translation(page) == "Der Hund schläft."
    without_model = shutil.ignore_patterns("model.js")
    shutil.copytree(folder, tmp_path / "_static" / "live", ignore=without_model)
    shutil.copy(site / "live.html", tmp_path)
    page.goto((tmp_path / "live.html").as_uri())
    assert "make site" in page.inner_text("#live-message") and page.is_hidden("#live-form")
    page.close()
