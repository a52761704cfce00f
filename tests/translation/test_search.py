"""Greedy decoding and beam search against plain loops; translation of texts."""

import math
from collections import Counter

import pytest
import torch
from helpers import EXACT, examples, random_model
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END, PAD, UNKNOWN, SubwordTokenizer, WordTokenizer
from annotated.translation import search
from annotated.translation.search import beam_search, greedy_decode, sample, translate

PAIRS = [("the dog sees a cat .", "der Hund sieht eine Katze ."),
         ("the cat sleeps .", "die Katze schläft .")]
WORDS = WordTokenizer.fit(PAIRS)


def tiny(vocab_size=12, seed=0, **changes):
    """A random model in double precision, so that no tie is decided by the order of a sum."""
    return random_model(vocab_size, seed, **{"N": 2, "dropout": 0.4, **changes}).double().eval()


def small(seed, vocab_size=6, **changes):
    """A random model with clear preferences: some outputs end early, some do not."""
    model = tiny(vocab_size, seed, **{"N": 1, "d_model": 8, "d_ff": 16, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder"):
                scale = 0.2 if name.endswith("norm.bias") else 0.8
                parameter.copy_(scale * torch.randn_like(parameter))
            elif "positions" in name:
                parameter.mul_(9)  # so that each step says something else
    return model


def always(model, token):
    """Make the model give `token` the largest logit, always: the last norm puts out a constant."""
    norm = model.decoder.layers[-1].residual[-1].norm
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(torch.randn(16, dtype=torch.float64))
        model.embedding.weight[token] = norm.bias * 100
    return model


def plain_beam(model, source, beam, alpha, extra=50):
    """All that stands in the beam at the end, best first, as (ids, score): plain lists."""
    most = model.config.max_length if model.config.positions == "learned" else math.inf
    limit, hypotheses = min(len(source) + extra, most), [([], 0.0, 0.0, False)]
    while not all(ended for *_, ended in hypotheses):
        candidates = [one for one in hypotheses if one[3]]  # what has ended keeps its place
        live = [one for one in hypotheses if not one[3]]
        prefixes = torch.tensor([[BEGIN, *ids] for ids, *_ in live])
        with torch.no_grad():
            logits = model(torch.tensor([source]).expand(len(live), -1), prefixes)[:, -1]
        for (ids, before, *_), row in zip(live, logits.log_softmax(dim=-1).tolist(), strict=True):
            for k in range(END, len(row)):
                new, length = before + row[k], len(ids) + 1
                next_ids = ids if k == END else [*ids, k]
                ended = k == END or length == limit
                candidates.append((next_ids, new, new / ((5 + length) / 6) ** alpha, ended))
        hypotheses = sorted(candidates, key=lambda hypothesis: -hypothesis[2])[:beam]
    return [(ids, score) for ids, _, score, _ in hypotheses]


def assert_same(found, expected):
    """The same hypotheses in the same order, the scores within 1e-9."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == (theirs[0], pytest.approx(theirs[1], abs=1e-9))


# Greedy decoding

seeds, alphas = st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 1.0, 3.0])
short = st.lists(st.integers(UNKNOWN, 5), max_size=3).map(lambda ids: [*ids, END])
short_sources = st.lists(short, min_size=1, max_size=4)
kinds = st.fixed_dictionaries({
    "seed": seeds, "norm_first": st.booleans(), "d_v": st.sampled_from([None, 5]),
    "positions": st.sampled_from(["sinusoidal", "learned"]), "max_length": st.just(15)})


def best_of_beam(model, source, *given, **options):
    return [pairs[0][0] for pairs in beam_search(model, source, *given, **options)]


@examples(30)
@given(kinds, short_sources, st.integers(0, 9))
def test_c26_greedy_with_a_cache_in_a_batch_is_the_naive_loop_alone(kind, sources, extra):
    model, source = small(**kind), pad(sources)
    expected = [plain_beam(model, ids, 1, 0.0, extra)[0][0] for ids in sources]
    assert greedy_decode(model, source, extra) == expected


def watched(model):
    """A list to which each step adds (rows, tokens) that it computes."""
    fed = []
    model.decoder.layers[0].feed_forward.register_forward_pre_hook(
        lambda _, given: fed.append(tuple(given[0].shape[:2])))
    return fed


both = pytest.mark.parametrize("decode", [greedy_decode, best_of_beam])


@both
def test_each_sentence_stops_at_its_own_limit(decode):
    model = always(tiny(), token=7)  # never ends
    sources = pad([[4, END], [4, 5, 6, 7, END], [END]])
    assert decode(model, sources, extra=3) == [[7] * 5, [7] * 8, [7] * 4]
    lengths = [len(ids) for ids in decode(model, sources)]
    assert lengths == [52, 55, 51], "the paper's 50 more than the source"
    model = always(tiny(positions="learned", max_length=9), token=7)  # which end at the last place
    assert decode(model, sources, extra=6) == [[7] * 8, [7] * 9, [7] * 7]


@both
def test_each_step_computes_the_newest_token_only_for_the_sentences_that_go_on(decode):
    model, encoded, projected = small(58, positions="learned", max_length=15), [], []
    keys, fed = model.decoder.layers[0].cross_attention.W_K, watched(model)
    keys.register_forward_hook(lambda _, __, out: projected.append(len(out)))
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    outputs = decode(model, pad([[4, 5, END], [5, 3, 3, END], [3, 5, 4, 3, 5, END]]), extra=9)
    rows, lengths = zip(*fed, strict=True)
    assert set(lengths) == {1} and rows[0] == 3 and rows[-1] < max(rows)
    assert encoded == [1] and projected == [3], "the memory is projected once, and once each"
    assert decode is best_of_beam or len(fed) == max(map(len, outputs)) + 1


@pytest.mark.parametrize("token", [PAD, BEGIN])
def test_padding_and_begin_never_follow(token):
    model, sources = always(tiny(), token), pad([[4, END], [5, 6, END]])
    found = beam_search(model, sources, extra=2, n_best=4)
    assert all(len(pairs) == 4 and token not in ids for pairs in found for ids, _ in pairs)
    assert all(token not in ids and ids for ids in greedy_decode(model, sources, extra=2))


@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_dropout_is_off_no_gradient_is_kept_and_the_mode_restored(decode):
    model, source = small(0, 12), pad([[4, 5, 6, 7, END], [8, END]])
    expected, grads = decode(model, source, extra=5), []
    model.train()
    model.encoder.layers[0].eval()  # a part that somebody froze
    modes = [module.training for module in model.modules()]
    layer = model.decoder.layers[0].feed_forward
    layer.register_forward_hook(lambda _, __, hidden: grads.append(hidden.requires_grad))
    assert decode(model, source, extra=5) == expected
    assert grads and not any(grads) and torch.is_grad_enabled()
    with pytest.raises(IndexError):
        decode(model, torch.tensor([[99, END]]))
    assert [module.training for module in model.modules()] == modes


# Beam search

@examples(40)
@given(kinds, short_sources, st.integers(1, 7), alphas, st.integers(0, 4), st.data())
def test_c26_cached_in_a_batch_is_the_plain_search_alone(kind, sources, beam, alpha, extra, data):
    model, n_best = small(**kind), data.draw(st.integers(1, beam))
    found = beam_search(model, pad(sources), beam, alpha, extra, n_best)
    for source, pairs in zip(sources, found, strict=True):
        assert_same(pairs, plain_beam(model, source, beam, alpha, extra)[:n_best])


def test_c26_a_beam_wider_than_all_outputs_holds_each_once():
    model = small(0)
    (found,) = beam_search(model, torch.tensor([[END]]), beam=9, extra=0, n_best=9)
    assert_same(found, plain_beam(model, [END], 9, 0.6, 0))


def test_early_stop_saves_steps_and_waits_where_something_may_still_win():
    model = always(tiny(), token=END)
    calls = watched(model)
    assert best_of_beam(model, pad([[4, END], [5, 6, END]]), beam=3) == [[], []]
    assert len(calls) < 5, "50 steps for nothing"
    for seed in (4, 29):  # with a strong penalty a short one leads, and a long one overtakes it
        model, source = small(seed, len(WORDS)), [4, 5, END]
        expected = plain_beam(model, source, 3, 2.0)[:1]
        assert_same(beam_search(model, pad([source]), 3, 2.0)[0], expected)


def test_c26_the_beam_is_the_papers_where_nobody_says_otherwise():
    model, source = small(1, 12), pad([[5, 9, 7, END], [8, 11, 4, 6, END]])
    papers = beam_search(model, source, beam=4, alpha=0.6, extra=50, n_best=4)
    assert beam_search(model, source, n_best=4) == papers


@pytest.mark.parametrize("call, name, value, mend", [
    (greedy_decode, "extra", -1, "0 or more"), (beam_search, "extra", -1, "0 or more"),
    (beam_search, "beam", 0, "give 1"), (beam_search, "alpha", -0.1, "give 0"),
    (beam_search, "alpha", math.nan, "give 0"), (beam_search, "n_best", 5, "at most beam=4"),
    (beam_search, "n_best", 0, "at least 1"), (sample, "temperature", 0, "1e-6 to 1e6"),
    (sample, "temperature", math.nan, "1e-6 to 1e6"), (sample, "temperature", math.inf, "1e-6"),
    (sample, "top_k", 0, "from 1 up"),
    (sample, "top_p", 0.0, "at most 1"), (sample, "top_p", 1.1, "at most 1")])
def test_bad_options_are_refused(call, name, value, mend):
    with pytest.raises(ValueError, match=f"{name}={value} is invalid.*{mend}"):
        call(tiny(), pad([[4, END]]), **{name: value})


@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_a_model_that_pads_with_another_id_is_refused(decode):
    with pytest.raises(ValueError, match="pad_id=11 cannot be decoded: give a model with pad_id=0"):
        decode(tiny(pad_id=11), torch.tensor([[4, 5, 6, 7, END], [6, END, 11, 11, 11]]))


def test_scores_that_are_no_numbers_are_named():
    model = tiny()
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.W_1.weight[0, 0] = math.nan
    for decode in (beam_search, greedy_decode, sample):
        with pytest.raises(ValueError, match="are NaN: look for weights"):
            decode(model, torch.tensor([[4, 5, END]]))


# Sampling

def by_hand(logits, temperature, top_k=None, top_p=None):
    """{token: probability} of the next one, one after the other."""
    allowed = {token: math.exp(logits[token] / temperature) for token in range(END, len(logits))}
    p = {token: value / sum(allowed.values()) for token, value in allowed.items()}
    kept, together = {}, 0.0
    for token in sorted(p, key=p.get, reverse=True)[:top_k]:
        if top_p is not None and together >= top_p:
            break
        kept[token], together = p[token], together + p[token]
    return {token: value / together for token, value in kept.items()}


@pytest.mark.parametrize("knobs", [
    {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 100, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.7},
], ids=str)
def test_first_tokens_come_as_often_as_their_probability_says(knobs):
    model, source = small(3, vocab_size=12), torch.full((500, 1), END)
    with torch.no_grad():
        logits = model(source[:1], torch.tensor([[BEGIN]]))[0, -1].tolist()
    expected = by_hand(logits, **{"temperature": 1.0, **knobs})
    drawn = Counter(ids[0] if ids else END for seed in range(40)
                    for ids in sample(model, source, seed=seed, extra=0, **knobs))
    assert set(drawn) <= set(expected) and len(expected) > 1
    for token, p in expected.items():  # within 4 standard errors
        allowed = 4 * math.sqrt(p * (1 - p) / drawn.total()) + 1e-12
        assert drawn[token] / drawn.total() == pytest.approx(p, abs=allowed)


def test_a_seed_says_what_is_drawn_whatever_else_draws():
    model, source = small(1, 12), pad([[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, END]])
    before = torch.get_rng_state()
    first = sample(model, source, 2.0, seed=5, extra=9)
    assert torch.equal(torch.get_rng_state(), before), "draws from a generator of its own"
    torch.rand(3)
    assert sample(model, source, 2.0, seed=5, extra=9) == first
    assert len({str(sample(model, source, 2.0, seed=seed, extra=9)) for seed in range(5)}) == 5


# Steps

def test_several_tokens_at_once_are_as_a_whole_prefix_until_the_cache_is_full():
    model, source = small(0), pad([[4, 5, END], [3, END]])
    tokens = torch.tensor([[BEGIN, 3, 5, 4, 4], [BEGIN, 4, 3, 5, 5]])
    decoder = search.IncrementalDecoder(model, source, capacity=5)
    with torch.no_grad():
        steps = [decoder.step(part) for part in tokens.split([2, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model.hidden(source, tokens), **EXACT)
        with pytest.raises(ValueError, match="room for 5 positions, not 6: give a larger"):
            decoder.step(tokens[:, :1])


def test_a_cache_refuses_rows_that_it_does_not_hold(unenforced):
    """One row would be written into both."""
    two, cache = torch.randn(2, 4, 3, 6), search.KeyValueCache(4)
    cache.extend(two, two)
    with pytest.raises(ValueError, match="1 new rows for a cache of 2: call select"):
        cache.extend(two[:1, :, :1], two[:1, :, :1])
    assert cache.length == 3


# Texts

@pytest.fixture(scope="module")
def model():
    return small(8, len(WORDS), positions="learned", max_length=15)


TEXTS = ["the dog sees a cat .", "", "a cat .", "the cat sleeps .", " \t", "a a a a a a a", "cat"]


def test_translation_is_the_best_of_the_beam_for_each_text_alone(model):
    sources, seen = [[*WORDS.encode(text, "en"), END] for text in TEXTS], set()
    for beam, alpha in ((1, 0.6), (3, 0.0), (3, 2.0)):
        best = [plain_beam(model, ids, beam, alpha)[0][0] for ids in sources]
        expected = [text.strip() and WORDS.decode(ids)
                    for text, ids in zip(TEXTS, best, strict=True)]
        for max_tokens in (1, 40, 4096):  # 1: every sentence by itself
            once = (text for text in TEXTS)
            assert translate(once, model, WORDS, "en", max_tokens, beam, alpha) == expected
        assert translate(TEXTS[0], model, WORDS, beam=beam, alpha=alpha) == expected[0]
        seen.add(tuple(expected))
    assert len(seen) == 3, "neither beam nor alpha matters: a test that cannot fail"


def test_sentences_that_say_nothing_are_not_shown_to_the_model(model, monkeypatch):
    monkeypatch.setattr(WORDS, "prefix", lambda text: ">>de<<")  # as Marian's languages
    nothing = ["", " \t", "\u2028", "\x1b[0m", ">>de<< "]
    assert translate(nothing, model, WORDS, engine=lambda *_: 1 / 0) == [""] * 5
    assert translate([], model, WORDS) == []


def test_line_breaks_in_a_translation_become_spaces():
    pieces = SubwordTokenizer.fit([("a b", "c d")] * 2, vocab_size=260)
    for character in "\n\r":
        newline = pieces.encode(f"x{character}")[-1]
        assert set(translate(["a"], always(tiny(len(pieces)), newline), pieces)[0]) == {" "}


def test_what_is_no_text_or_lacks_its_tokenizer_is_named(model):
    with pytest.raises(TypeError, match="needs the tokenizer that it was trained with"):
        translate("the cat sleeps .", model)
    with pytest.raises(TypeError, match="a text must be a string, not int"):
        translate(["the cat", 3], model, WORDS)
    for options, message in (({"beam": 0}, "beam=0 is invalid"),
                             ({"language": "fr"}, "language is 'fr', expected one of 'en', 'de'")):
        with pytest.raises(ValueError, match=message):
            translate(["a cat ."], model, WORDS, **options)
