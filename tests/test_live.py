"""The live page computes what the library computes, refuses what it cannot translate, draws it."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
import unicodedata
from types import SimpleNamespace

import live
import pytest
import torch
from browsing import SIZE, new_tab
from helpers import ROOT

from annotated import book_model, load_checkpoint, load_corpus, record_attention
from annotated.data.normalization import clean_text
from annotated.data.tokenizers import BEGIN, END, split_words
from annotated.model.transformer import Transformer
from annotated.translation.search import beam_search, greedy_decode, translate

CODE = ROOT / "docs" / "_static" / "live"
HOSTILE = ["<img src=x onerror=window.hit=1>", "</script><script>window.hit=1</script>",
           '"><svg onload=window.hit=1>', "javascript:hit=1", "The\u200ddog",
           "${window.hit=1}", "__proto__", "constructor"]
LIMIT = {"toy": 2_500_000, "captions": 4_000_000}  # bytes
each_model = pytest.mark.parametrize("name", LIMIT)

# What the page is given

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The models beside the scripts, as in the site."""
    folder = tmp_path_factory.mktemp("site") / "_static" / "live"
    shutil.copytree(CODE, folder)
    live.write(folder)
    return folder


def rounded(weight, bits):
    """A weight as the page has it."""
    if bits == 16 or weight.dim() == 1:
        return weight.half()
    scale, integers = live.quantized(weight)
    return scale * integers


class Library:
    """What the library makes of a sentence, with the page's weights."""

    def __init__(self, name, folder):
        self.saved = book_model() if name == "toy" else load_checkpoint(live.CAPTIONS)
        text = (folder / f"{name}.js").read_text(encoding="ascii")
        self.data = json.loads(re.search(rf"MODELS \?\?= {{}}\)\.{name} = (.*);", text)[1])
        self.tokenizer = self.saved.tokenizer
        self.model = Transformer(self.saved.model.config).double().eval()
        weights, bits = self.saved.model.state_dict(), {"toy": 16, "captions": 8}[name]
        self.model.load_state_dict({key: rounded(own, bits) for key, own in weights.items()})
        toy = load_corpus("toy")
        self.sentences = ([english for english, _ in (*toy.test[:150], *toy.novel[:150])]
                          if name == "toy" else live.captions(500, seed=1))

    def source(self, sentence):
        return torch.tensor([[*self.tokenizer.encode(sentence, "en"), END]])

    def translate(self, sentences, beam=1):
        return translate(sentences, self.model, self.tokenizer, beam=beam)

    def __call__(self, sentence):
        """Greedy translation, the pieces of both sides and all recorded attention."""
        source = self.source(sentence)
        ids = greedy_decode(self.model, source)[0]
        with torch.no_grad(), record_attention(self.model) as recorded:
            logits = self.model(source, torch.tensor([[BEGIN, *ids]]))[0]
        pieces = self.tokenizer.pieces
        return SimpleNamespace(text=self.tokenizer.decode(ids), keys=pieces(source[0].tolist()),
                               pieces=pieces([*ids, END]), attention=recorded,
                               chances=logits.softmax(dim=-1))


@pytest.fixture(scope="session")
def libraries(folder):
    return {name: Library(name, folder) for name in LIMIT}


@pytest.fixture
def library(libraries, name):
    return libraries[name]


@pytest.fixture
def toy(libraries):
    return libraries["toy"]


PRELUDE = """
const fs = require("fs"), [folder, file] = process.argv.slice(1);
const W = require(folder + "/words.js");
Object.assign(globalThis, W); // as scripts of one page
const Subwords = require(folder + "/subwords.js");
const given = JSON.parse(fs.readFileSync(0, "utf8")), DATA = require(file);
const words = DATA.subwords ? new Subwords(DATA.subwords) : DATA.vocabulary && new W.Words(DATA);
const plain = (key, x) => (ArrayBuffer.isView(x) ? [...x] : x);
const answer = (x) => console.log(JSON.stringify(x, plain));"""
ENCODE = "answer(given.map((text) => words.encode(text)));"


def javascript(folder, name, script, given=None):
    """Run a script under Node with the page's code and a model; what it gives to `answer`."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    command = ["node", "-e", PRELUDE + script, str(CODE), str(folder / f"{name}.js")]
    return json.loads(subprocess.check_output(command, input=json.dumps(given), text=True))


def test_files_are_small_plain_and_the_same_each_time(folder, tmp_path):
    for name, path in live.write(tmp_path / "new" / "folder").items():
        data = path.read_bytes()
        assert data.isascii() and len(data) < LIMIT[name]
        assert data == (folder / f"{name}.js").read_bytes()
    form = (ROOT / "docs" / "live" / "form.md").read_text(encoding="utf-8")
    assert f"loads {len(data) / 1e6:.1f} MB" in form


def test_weights_are_the_models_as_far_as_their_bits_go(libraries):
    for name, library in libraries.items():
        for key, own in library.saved.model.state_dict().items():
            lost = (library.model.state_dict()[key] - own.double()).abs()
            rounds = name == "captions" and own.dim() == 2
            # half of a step: 127 of them reach the largest of a row
            step = own.abs().amax(dim=-1, keepdim=True) / 127 if rounds else 0
            assert (lost <= step * 0.50001).all() and lost.any() == rounds, key


# The arithmetic

IN_PAGE = """([name, given]) => {
  const T = Transformer, DATA = MODELS[name], net = new T.Transformer(DATA);
  const words = DATA.subwords ? new Subwords(DATA.subwords) : new Words(DATA);
  const answer = (x) => JSON.stringify(x, (key, y) => (ArrayBuffer.isView(y) ? [...y] : y));
  return SCRIPT
}"""


@each_model
def test_hundreds_of_translations_are_the_library_s(visit, name, library):
    """In the browser: 300 of the toy language, 500 captions; a twentieth with a beam, too.

    And rows of the toy language's words by chance, some of which are translated without an end.
    """
    script = """answer(given.map((sentence, i) => {
      const source = [...words.encode(sentence).ids, END];
      const { output, score } = i % 20 ? { output: [] } : T.beamSearch(net, source);
      const brief = i % 40 ? [] : T.beamSearch(net, source, 4, 0.6, 1).output; // mostly cut off
      return [words.decode(T.greedy(net, source)), words.decode(output), score, brief];
    }));"""
    draw, words = random.Random(0), [word for text in library.sentences for word in text.split()]
    by_chance = [draw.choices(words, k=k % 20 + 1) for k in range(80 if name == "toy" else 0)]
    sentences = [*library.sentences, *map(" ".join, by_chance)]
    found = visit(name).evaluate(IN_PAGE.replace("SCRIPT", script), [name, sentences])
    greedy, beam, *more = zip(*json.loads(found), strict=True)
    assert list(greedy) == library.translate(sentences)
    assert len(set(greedy)) > 0.85 * len(sentences)
    assert name != "toy" or max(len(text.split()) for text in greedy) > 50
    assert list(beam[::20]) == library.translate(sentences[::20], beam=4)
    for sentence, score, brief in list(zip(sentences, *more, strict=True))[::40]:
        source = library.source(sentence)
        assert abs(beam_search(library.model, source)[0][0][1] - score) < 1e-4
        ids = beam_search(library.model, source, extra=1)[0][0][0]
        assert [token for token in brief if token != END] == ids


# The words of the toy language

REASONS = re.compile(r"[.,?]+\w|[.,?]{2}|[^\w\s.,?]|\x1f")  # marks in a word, two marks, others


ODD = """zebra dont don't it's cannot A dogs' o'clock 'tis 1990's ’s U.S. U.S.A. e.g. vs. p.m. St.
  no. pp. .' 3 3,5 5,300. 7 $5 5 % 50% € ½ ² # @you a@b.de www.x.org &amp; <s> <unk> < > & \\ / | ~
  [x] { } ( ) “ ” „ « » ' '' ‘ ’ ` ´ – — - -- … .. ... ..... ?! ; : ! ß İ Σας é e\u0301 дом 漢字 か
  한국 🎈 👩\u200d🚀 DDD ĠX ⁀""".split() + ["\u00a0", "\ufeff", "\u200b", "  ", "\t", "\x1f", " :"]
BETWEEN = [" ", " ", " ", ". ", ", ", "? ", "?? ", " , ", ".", ",", ""]


def mixed_texts(known, share, between=(), count=4000):
    """What is known, a share of what is odd, marks and spaces, put together by chance."""
    generator, between = random.Random(0), [*BETWEEN, *between]
    for _ in range(count):
        odd = [generator.random() < share for _ in range(generator.randint(1, 5))]
        parts = [generator.choice(ODD if one else known) for one in odd]
        yield "".join(part + generator.choice(between) for part in parts)


def test_an_accepted_text_has_the_library_s_tokens_and_a_refused_one_holds_a_reason(folder, toy):
    known = [toy.tokenizer.table[index] for index in toy.data["english"]]
    texts = [*mixed_texts(known * 3 + toy.tokenizer.words, share=0.12)]
    texts += [word + mark for word in known for mark in (".", ",", "?", "..", ".?", "?.")]
    accepted = 0
    for text, found in zip(texts, javascript(folder, "toy", ENCODE, texts), strict=True):
        pieces = split_words(clean_text(text), "en")
        if not found["unknown"]:
            assert found["pieces"] == pieces, repr(text)
            assert found["ids"] == toy.tokenizer.encode(text, "en"), repr(text)
            accepted += 1
        elif set(pieces) <= set(known):
            assert REASONS.search(text), f"{text!r} refused for {found['unknown']}"
    assert accepted > 1500


# A letter that Python's Unicode does not know yet is left out: a browser may know it.
CHARACTERS = [chr(code) for code in range(0x30000)
              if unicodedata.category(chr(code)) not in ("Cn", "Cs")]


FEW = [one for one in CHARACTERS if unicodedata.category(one) not in ("Lo", "Co")]  # no ideographs


def blocks(between):
    some = CHARACTERS if len(between) < 2 else FEW
    return [between.join(some[start:start + 64]) for start in range(0, len(some), 64)]


# The pieces of the model of captions

def test_every_text_has_the_library_s_pieces(folder, libraries):
    library = libraries["captions"]
    words = [word for text in library.sentences for word in text.split()]
    between = ["'", '"', "' ", " '", '" ', " (", ") ", "-"]
    texts = [*library.sentences, *mixed_texts(words, 0.4, between, count=2000)]
    texts += ["", " ", "\u200b", "x" * 300]
    texts += itertools.chain(*map(blocks, (" ", "", "'a'", "1,", "a. ")))
    texts += ["\x1b[31mred\x1b[0m", "Mu\u0308ller", "a\U000e0041b", "\x1b]0;", "\x1b("]
    found = javascript(folder, "captions", ENCODE, texts)
    for text, one, ids in zip(texts, found, library.tokenizer.encode_batch(texts, "en"),
                              strict=True):
        assert one["ids"] == ids, ascii(text)
        assert one["pieces"] == library.tokenizer.pieces(ids), ascii(text)
    assert not any(one["unknown"] for one in found)
    assert not any(one["strange"] for one in found[:500])
    [half] = javascript(folder, "captions", ENCODE, ["a \ud83c dog"])
    assert half["unknown"] == ["\ud83c"], "which the library refuses, too"


def test_every_row_of_pieces_is_joined_as_the_library_joins_it(folder, libraries):
    library, draw = libraries["captions"], random.Random(0)
    marks = [library.tokenizer.encode(mark) for mark in [*ODD, *".,:!?%)]}([{$¿"] * 3]
    rows = [[draw.randrange(3, 10_000) for _ in range(12)] for _ in range(1000)]
    rows += [[*itertools.chain(*draw.choices(marks, k=8)), END, 5] for _ in range(1000)]
    texts = [library.tokenizer.decode(row).replace("\ufffd", "") for row in rows]
    decode = "answer(given.map((ids) => words.decode(ids)));"
    assert javascript(folder, "captions", decode, rows) == texts
    labels = library.tokenizer.pieces(range(10_000))
    assert javascript(folder, "captions", "answer(words.labels);") == labels


# The page in a browser

@pytest.fixture
def visit(browser, address):
    """Open the page; in the end nothing may be requested elsewhere, gone wrong, or executed."""
    opened = []

    def visit(name="toy", sentence=None, motion="reduce", viewport=SIZE):
        page = new_tab(browser, reduced_motion=motion, viewport=viewport)
        page.address, page.files = address, []
        page.on("request", lambda request: page.files.append(request.url.rpartition("/")[2]))
        opened.append(page)
        page.goto(f"{address}live.html")
        page.wait_for_selector("#live-heatmap rect")
        if name != "toy":
            change_model(page, name)
        if sentence is not None:
            enter(page, sentence)
        return page

    yield visit
    for page in opened:
        assert page.evaluate("window.hit") is None
        page.close()
        assert page.outside == page.mistakes == []


def change_model(page, name):
    page.check(f"input[value={name}]")
    page.wait_for_function("() => !document.querySelector('#live-message').innerText"
                           ".startsWith('Loading')")


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


@each_model
def test_what_is_typed_or_chosen_is_translated_as_the_library_does(visit, name, library):
    page, seen = visit(name), set()
    for sentence in library.sentences[::60]:
        enter(page, sentence)
        expected = library(sentence)
        assert translation(page) == expected.text and written(page) == expected.pieces
        assert page.locator("#live-source bdi").all_text_contents() == expected.keys
        assert expected.text in page.inner_text("#live-message"), "not announced"
    page.select_option("#live-examples", index=2)
    for _ in range(5):
        seen.add(page.input_value("#live-sentence"))
        assert translation(page) == library(page.input_value("#live-sentence")).text
        page.click("#live-random")
    assert len(seen) > 2
    page.check("input[value=beam]")
    for sentence in library.sentences[150::50][:4]:
        enter(page, sentence)
        assert [translation(page)] == library.translate([sentence], beam=4)


def test_captions_are_loaded_only_when_asked_for_and_the_toy_comes_back(visit, libraries):
    page = visit("toy", "The girl will eat potato soup because it is fresh.")
    assert page.is_checked("input[value=toy]")
    assert "toy.js" in page.files and "captions.js" not in page.files
    for name in ("captions", "toy", "captions"):
        change_model(page, name)
        sentence = page.input_value("#live-sentence")
        assert sentence == libraries[name].data["examples"][0][1]
        assert translation(page) == libraries[name](sentence).text
        assert page.locator("#live-guide").is_visible() == (name == "toy")
        sizes = libraries[name].model.config
        assert page.locator("#live-overview button").count() == sizes.N * sizes.h
        assert f"{sizes.vocab_size:,}" in page.inner_text("#live-facts")
    assert page.files.count("captions.js") == 1


@each_model
def test_every_head_is_drawn_as_the_library_records_it(visit, name, library):
    N, h, sentence = library.model.config.N, library.model.config.h, library.sentences[0]
    page, drawings = visit(name, sentence), set()
    recorded = library(sentence).attention

    def seen(kind, weights):  # the decoder's are a triangle
        return [w for i, row in enumerate(weights.tolist())
                for w in (row[: i + 1] if kind == "decoder" else row)]

    for kind, block in BLOCKS.items():
        choose(page, kind=kind)
        pictures = "all => all.map((canvas) => canvas.toDataURL())"
        small = page.eval_on_selector_all("#live-overview canvas", pictures)
        assert len(set(small)) == N * h
        few = name == "captions"
        layers, heads = (0, N - 1) if few else range(N), (0, h - 1, -1) if few else (*range(h), -1)
        for layer, head in itertools.product(layers, heads):
            choose(page, layer=layer + 1, head=head + 1)
            weights = recorded[block.format(layer)][0]
            weights = weights.mean(dim=0) if head < 0 else weights[head]
            drawn = opacities(page)
            assert drawn == pytest.approx(seen(kind, weights), abs=6e-4)
            drawings.add(tuple(drawn))
    assert len(drawings) == 3 * len(layers) * len(heads)
    page.click("#live-overview button >> nth=5")
    weights = recorded["decoder.layers.1.self_attention"][0, 1]
    assert opacities(page) == pytest.approx(seen("decoder", weights), abs=6e-4)
    assert page.get_attribute("#live-overview button >> nth=5", "aria-pressed") == "true"
    page.click("#live-weights >> xpath=../summary")
    cells = page.locator("#live-weights tbody tr").nth(3).locator("td").all_inner_texts()
    assert cells[:4] == [f"{w:.2f}" for w in weights[3, :4].tolist()] and set(cells[4:]) == {"–"}


@each_model
def test_a_weight_is_taken_apart_into_the_products_that_the_library_adds_up(visit, name, library):
    page, given, sentence = visit(name, library.sentences[0]), {}, library.sentences[0]
    blocks = {kind: library.model.get_submodule(block.format(1)) for kind, block in BLOCKS.items()}
    hooks = [block.register_forward_pre_hook(lambda _, x, kind=kind: given.setdefault(kind, x))
             for kind, block in blocks.items()]
    recorded = library(sentence).attention
    for hook in hooks:
        hook.remove()

    def numbers_in(texts):
        return [float(text.split("= ")[-1].replace("−", "-")) for text in texts]

    for kind, head, query, key in (("cross", 3, 4, 3), ("encoder", 0, 2, 4), ("decoder", 1, 4, 3)):
        choose(page, kind=kind, layer=2, head=head + 1, query=query, key=key)
        asking, read = given[kind][:2]
        q = blocks[kind].queries(asking)[0, head, query]
        k = blocks[kind].keys_and_values(read, read)[0][0, head, key]
        said = numbers_in(page.locator("#live-sum strong").all_inner_texts())
        weight = recorded[BLOCKS[kind].format(1)][0, head, query, key].item()
        product = (q @ k).item()
        assert said == pytest.approx([product, product / math.sqrt(len(q)), weight], abs=0.011)
        bars = page.locator("#live-products rect title").all_text_contents()[-len(q):]
        assert numbers_in(bars) == pytest.approx((q * k).tolist(), abs=0.011)
    page.locator("#live-heatmap .live-weight").nth(8).click()  # row 3 of a triangle: 6 to 9
    assert (page.input_value("#live-query"), page.input_value("#live-key")) == ("3", "2")


@each_model
def test_lines_of_all_heads_follow_the_toggles_and_the_token_that_is_pointed_at(
        visit, name, library):
    page, sentence = visit(name, library.sentences[0]), library.sentences[0]
    last = library.model.config.N - 1
    weights = library(sentence).attention[f"decoder.layers.{last}.cross_attention"][0]
    assert strokes(page) == lines_of(weights)
    page.uncheck("#live-toggles input >> nth=0")
    assert strokes(page) == lines_of(weights[1:])
    page.focus("#live-lines text[data-side=query] >> nth=1")
    assert strokes(page) == lines_of(weights[1:], stressed=1)


@pytest.mark.parametrize("phrase, block, heads, asking, read", [
    (0, "decoder.layers.1.cross_attention", [1], "Der", "uncle"),
    (1, "decoder.layers.1.cross_attention", [0, 2, 3], "ein", "invites"),
    (2, "encoder.layers.1.self_attention", [1, 3], "she", "aunt")])
def test_phrases_show_the_lines_of_heads(visit, toy, phrase, block, heads, asking, read):
    page = visit("toy", "The dog sleeps.")
    button = page.locator("#live-guide button").nth(phrase)
    button.hover()
    assert page.input_value("#live-sentence") == "The dog sleeps."  # what was typed is left alone
    button.click()
    expected = toy(page.locator("#live-guide").get_attribute("data-sentence"))
    assert button.get_attribute("aria-pressed") == "true"
    row = (expected.keys if block.startswith("encoder") else expected.pieces).index(asking)
    weights = expected.attention[block][0, heads]
    assert strokes(page) == lines_of(weights, stressed=row)
    # it looks at itself, and elsewhere, too
    others = weights[:, row] * torch.tensor([key != asking for key in expected.keys])
    assert read in {expected.keys[place] for place in others.argmax(dim=1)}
    page.hover("#live-sum")
    enter(page, "The dog sleeps.")  # nothing is stressed any more
    weights = toy("The dog sleeps.").attention[block][0, heads]
    assert strokes(page) == lines_of(weights)
    assert button.get_attribute("aria-pressed") == "false"


def test_what_is_typed_while_a_model_loads_is_kept_for_it(visit, libraries):
    page, held, sentence = visit(), [], "A man rides a bicycle."
    page.route("**/captions.js", lambda route: held.append(route))
    with page.expect_request("**/captions.js"):
        page.check("input[value=captions]")
    enter(page, sentence)
    assert page.inner_text("#live-message").startswith("Loading")
    held[0].continue_()
    page.wait_for_selector("#live-target bdi:has-text('▁')")
    assert page.input_value("#live-sentence") == sentence
    assert translation(page) == libraries["captions"](sentence).text


def test_the_menus_take_the_largest_head_apart_where_the_mean_is_chosen(visit, toy):
    sentence = "The girl will eat potato soup because it is fresh."
    page, last = visit("toy", sentence), toy.model.config.N - 1
    weights = toy(sentence).attention[f"decoder.layers.{last}.cross_attention"][0]
    for query, key in ((0, 1), (1, 2), (5, 3)):
        for name, index in (("query", query), ("key", key)):
            page.select_option(f"#live-{name}", index=index)
        head = weights[:, query, key].argmax() + 1
        assert page.inner_text("#live-apart-head").endswith(f"head {head}")


@pytest.mark.parametrize("name, sentence, asking, last", [
    ("toy", "The dog sleeps.", "Hund", 1), ("captions", "A man plays the guitar.", "▁ein", 3)])
def test_a_head_is_followed_into_other_sentences(visit, name, library, sentence, asking, last):
    page = visit(name, sentence)
    choose(page, head=4, query=written(page).index(asking))
    page.click("#live-search")
    page.wait_for_selector("#live-search-status:has-text('other sentences')")
    found = page.locator("#live-alike li")
    assert page.inner_text("#live-search-status").startswith(f"{asking} stands in ")
    assert found.count() > 2
    for line in found.all()[:3]:
        other, key = line.locator("button").inner_text(), line.locator("strong").inner_text()
        expected = library(other)
        row = expected.pieces.index(asking)
        weights = expected.attention[f"decoder.layers.{last}.cross_attention"][0, 3, row]
        assert key == expected.keys[int(weights.argmax())]
        said = float(line.inner_text().split()[-1])
        assert said == pytest.approx(weights.max().item(), abs=0.006)
    line.locator("button").click()
    assert page.input_value("#live-sentence") == other and translation(page) == expected.text


def test_steps_by_button_slider_and_keyboard(visit, toy):
    page, sentence = visit(), "The mouse that my uncle likes sleeps."
    enter(page, sentence)
    pieces, columns = toy(sentence).pieces, len(toy(sentence).keys)
    page.click("#live-again")
    assert page.inner_text("#live-beam tr:first-child td").strip().endswith(pieces[0])
    for count in (1, 2, 3):
        assert written(page) == pieces[:count] and len(opacities(page)) == count * columns
        beam = page.locator("#live-beam tr td:nth-child(2)").all_inner_texts()
        assert {len(text.replace("★", "").split()) for text in beam} == {count}
        page.click("#live-next")
    page.focus("#live-position")
    page.keyboard.press("ArrowRight")
    assert written(page) == pieces[:5]
    told = page.get_attribute("#live-position", "aria-valuetext")
    assert told.startswith(f"5 of {len(pieces)}")
    page.click("#live-whole")
    page.click("#live-next", force=True)  # still there for the keyboard, and without effect
    assert written(page) == pieces
    assert page.get_attribute("#live-next", "aria-disabled") == "true"
    page.click("#live-again")
    p, ids = toy(sentence).chances[0].topk(5)
    shown = [row.split("\t")[:2] for row in page.locator("#live-candidates tr").all_inner_texts()]
    assert [piece for piece, _ in shown] == toy.tokenizer.pieces(ids.tolist())
    for (_, said), chance in zip(shown, 100 * p, strict=True):
        assert said in ("100 %", "< 0.1 %") or abs(float(said.split()[0]) - chance) < 0.051


def test_played_token_by_token_unless_motion_is_unwanted(visit, toy):
    page = visit(motion="no-preference")
    sentence = "The kitchen knife is under the table."
    pieces = toy(sentence).pieces
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


def test_unknown_words_are_said_and_a_near_one_put_in_their_place(visit, toy):
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
    assert translation(page) == toy("Where is the dog?").text


@pytest.mark.parametrize("name, text, said", [
    ("toy", "The Hund sleeps.", "“Hund” is a German word"), ("toy", "a " * 60, "60 tokens"),
    ("toy", "   ", "Type a sentence"), ("toy", "the dog sleeps", "capital letter"),
    ("captions", "", "Type a sentence"), ("captions", "\u200b ", "Type a sentence"),
    ("captions", "a " * 60, "60 tokens; this page draws 40"),
    ("captions", "A 🎈 and a дом.", "hardly met “🎈” “д” “о” “м” while it was trained")])
def test_what_a_sentence_lacks_is_said(visit, name, text, said):
    page = visit(name, text)
    assert said in page.inner_text("#live-message")
    assert translation(page)


@each_model
def test_hostile_text_is_inert_and_shown_as_text(visit, name, library):
    page = visit(name)
    elements = "document.querySelectorAll('script, img, iframe, object').length"
    before = page.evaluate(elements)
    for text in HOSTILE:
        enter(page, text)
        said = page.inner_text("#live-message")
        assert ("is not in the toy language" in said) == (name == "toy"), text
        assert name != "toy" or text != "The\u200ddog" or "The\\u{200d}dog" in said
    assert page.evaluate(elements) == before
    enter(page, "The dog sleeps.")
    assert translation(page) == library("The dog sleeps.").text


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


@each_model
def test_no_sideways_scroll_at_320_pixels(visit, name, library):
    page = visit(name, max(library.sentences, key=len), viewport={"width": 320, "height": 640})
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_it_works_from_the_disk_and_says_what_is_missing(browser, site, libraries, tmp_path):
    page = new_tab(browser, reduced_motion="reduce")
    page.goto((site / "live.html").as_uri())
    for name, library in libraries.items():
        change_model(page, name)
        enter(page, "The dog sleeps.")
        assert translation(page) == library("The dog sleeps.").text
    shutil.copytree(CODE, tmp_path / "_static" / "live")
    shutil.copy(site / "live.html", tmp_path)
    page.goto((tmp_path / "live.html").as_uri())
    page.wait_for_selector("#live-message:has-text('make site')")
    assert page.is_hidden("#live-form")
    page.close()
