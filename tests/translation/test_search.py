"""Greedy decoding and beam search against plain loops and brute force; translation of texts."""

import copy
import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END, PAD, UNKNOWN, SubwordTokenizer, WordTokenizer
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.loop import TrainingConfig, train
from annotated.translation.search import (
    IncrementalDecoder,
    KeyValueCache,
    beam_search,
    greedy_decode,
    length_penalty,
    sample,
    translate,
)

PAIRS = [("the dog sees a cat .", "der Hund sieht eine Katze ."),
         ("the cat sleeps .", "die Katze schläft .")]
WORDS = WordTokenizer.fit(PAIRS)


def tiny(vocab_size=12, seed=0, **changes):
    """A random model in double precision, so that no tie is decided by the order of a sum."""
    torch.manual_seed(seed)
    sizes = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.4, **changes}
    return Transformer(TransformerConfig(vocab_size, **sizes)).double().eval()


@cache
def half_trained(seed):
    """A model that has begun to learn to repeat odd tokens: some outputs end, some do not."""
    generator, pairs = torch.Generator().manual_seed(seed), []
    for i in range(60):
        source = torch.randint(UNKNOWN, 12, (1 + i % 7,), generator=generator).tolist()
        pairs.append((source, [token for token in source for _ in range(1 + token % 2)]))
    model = tiny(seed=seed, dropout=0.0)
    config = TrainingConfig(steps=60, max_tokens=400, warmup=20, factor=0.5, label_smoothing=0.0)
    train(model, pairs, pairs[:1], config, show_progress=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.4  # would show
    return model


def always(model, token):
    """Make the model give `token` the largest logit, always: the last norm puts out a constant."""
    norm = model.decoder.layers[-1].residual[-1].norm
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(torch.randn(16, dtype=torch.float64))
        model.embedding.weight[token] = norm.bias * 100
    return model


def naive(model, ids, extra):
    """One sentence, the whole prefix through the whole model at each step, the largest logit."""
    output = [BEGIN]
    with torch.no_grad():
        while len(output) - 1 < len(ids) + extra:
            logits = model(torch.tensor([ids]), torch.tensor([output]))[0, -1].tolist()
            best = max(range(END, len(logits)), key=lambda i: logits[i])
            if best == END:
                break
            output.append(best)
    return output[1:]


# Greedy decoding

one_sentence = st.lists(st.integers(UNKNOWN, 11), max_size=7).map(lambda ids: [*ids, END])
sentences_of_ids = st.lists(one_sentence, min_size=1, max_size=5)


@examples(30)
@given(sentences_of_ids, st.integers(0, 2), st.integers(0, 9))
def test_c26_greedy_with_a_cache_in_a_batch_is_the_naive_loop_alone(sources, seed, extra):
    model = half_trained(seed)
    found = greedy_decode(model, pad(sources), extra)
    assert found == [naive(model, ids, extra) for ids in sources]


def test_half_trained_models_end_sometimes():
    """Without this the comparison above might only ever see the limit."""
    sources = [[3 + i, 4 + i, 5 + i, END] for i in range(7)]
    outputs = [tuple(ids) for seed in range(3)
               for ids in greedy_decode(half_trained(seed), pad(sources), extra=9)]
    lengths = {len(ids) for ids in outputs}
    assert len(lengths) > 4 and max(lengths) == 13 and len(set(outputs)) > 12


def best_of_beam(model, source, *given, **options):
    return [pairs[0][0] for pairs in beam_search(model, source, *given, **options)]


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
    model, encoded, projected = copy.deepcopy(half_trained(1)), [], []
    keys, fed = model.decoder.layers[0].cross_attention.W_K, watched(model)
    keys.register_forward_hook(lambda _, __, out: projected.append(len(out)))
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    sources = [[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, 9, END]]
    outputs = decode(model, pad(sources), extra=9)
    rows = [row for row, _ in fed]
    assert all(length == 1 for _, length in fed) and rows[0] == 3 and rows[-1] < max(rows)
    assert len(encoded) == 1 and projected == [3], "the memory is projected once, and once each"
    needed = max(min(len(ids) + 1, len(source) + 9)
                 for ids, source in zip(outputs, sources, strict=True))
    assert decode is best_of_beam or len(fed) == needed


@pytest.mark.parametrize("token", [PAD, BEGIN])
def test_padding_and_begin_never_follow(token):
    model, sources = always(tiny(), token), pad([[4, END], [5, 6, END]])
    found = beam_search(model, sources, extra=2, n_best=4)
    assert all(len(pairs) == 4 and token not in ids for pairs in found for ids, _ in pairs)
    assert all(token not in ids and ids for ids in greedy_decode(model, sources, extra=2))


@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_dropout_is_off_no_gradient_is_kept_and_the_mode_restored(decode):
    model, source = copy.deepcopy(half_trained(0)), pad([[4, 5, 6, 7, END], [8, END]])
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

def small(seed, vocab_size=6, **changes):
    """A random model with clear preferences, small enough to try every sentence."""
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, **changes}
    model = tiny(vocab_size, seed, **sizes)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.copy_(0.8 * torch.randn_like(parameter))
    return model


def log_probability(model, source, ids, limit):
    """log P and length of a hypothesis by one teacher-forced pass; at the limit it has no end."""
    tokens = [*ids, END][:limit]
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([[BEGIN, *tokens[:-1]]]))[0]
    log_p = logits.log_softmax(dim=-1)
    return sum(log_p[i, token].item() for i, token in enumerate(tokens)), len(tokens)


def plain_beam(model, source, beam, alpha, extra=50, drop_finished=False):
    """All that stands in the beam at the end, best first, as (ids, score): plain lists.

    With drop_finished, as it should not be: what has ended leaves the beam.
    """
    limit, hypotheses = len(source) + extra, [([], 0.0, 0.0, False)]
    while not all(ended for *_, ended in hypotheses):
        candidates = [] if drop_finished else [one for one in hypotheses if one[3]]
        live = [ids for ids, _, _, ended in hypotheses if not ended]
        prefixes = torch.tensor([[BEGIN, *ids] for ids in live])
        with torch.no_grad():
            logits = model(torch.tensor([source]).expand(len(live), -1), prefixes)[:, -1]
        before = (log_p for _, log_p, _, ended in hypotheses if not ended)
        for ids, log_p, row in zip(live, before, logits.log_softmax(dim=-1).tolist(), strict=True):
            for k in range(END, len(row)):
                new, length = log_p + row[k], len(ids) + 1
                next_ids = ids if k == END else [*ids, k]
                ended = k == END or length == limit
                candidates.append((next_ids, new, new / ((5 + length) / 6) ** alpha, ended))
        hypotheses = sorted(candidates, key=lambda hypothesis: -hypothesis[2])[:beam]
    return [(ids, score) for ids, _, score, _ in hypotheses]


def assert_same(found, expected):
    """The same hypotheses in the same order, the scores within 1e-9."""
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    scores = zip(found, expected, strict=True)
    assert all(abs(ours - theirs) < 1e-9 for (_, ours), (_, theirs) in scores)


seeds, alphas = st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 1.0, 3.0])
short = st.lists(st.integers(UNKNOWN, 5), max_size=3).map(lambda ids: [*ids, END])
short_sources = st.lists(short, min_size=1, max_size=4)


@examples(25)
@given(sentences_of_ids, st.integers(0, 2), alphas, st.integers(0, 9))
def test_c26_a_beam_of_1_is_greedy(sources, seed, alpha, extra):
    model = half_trained(seed)
    found = best_of_beam(model, pad(sources), beam=1, alpha=alpha, extra=extra)
    assert found == greedy_decode(model, pad(sources), extra)


@examples(30)
@given(seeds, short_sources, st.integers(1, 7), alphas, st.integers(0, 4), st.data())
def test_c26_cached_in_a_batch_is_the_plain_search_alone(seed, sources, beam, alpha, extra, data):
    model, n_best = small(seed), data.draw(st.integers(1, beam))
    found = beam_search(model, pad(sources), beam, alpha, extra, n_best)
    for source, pairs in zip(sources, found, strict=True):
        assert_same(pairs, plain_beam(model, source, beam, alpha, extra)[:n_best])


@examples(15)
@given(seeds, st.lists(st.integers(UNKNOWN, 5), max_size=2), alphas, st.integers(0, 2))
def test_c26_an_exhaustive_beam_is_brute_force(seed, start, alpha, extra):
    model, source = small(seed), [*start, END]
    limit, every = len(source) + extra, []
    for length in range(limit + 1):
        for ids in itertools.product(range(UNKNOWN, 6), repeat=length):
            log_p, generated = log_probability(model, source, ids, limit)
            every.append((list(ids), log_p / ((5 + generated) / 6) ** alpha))
    every.sort(key=lambda pair: -pair[1])
    wide = len(every) + 5
    assert_same(beam_search(model, pad([source]), wide, alpha, extra, n_best=wide)[0], every)
    assert_same(beam_search(model, pad([source]), wide - 5, alpha, extra)[0], every[:1])


def test_length_penalty_is_the_formula():
    assert length_penalty(1, 0.6) == 1 and length_penalty(7, 1.0) == 2
    assert abs(length_penalty(13, 0.6) - 3**0.6) < 1e-12


def test_c26_finished_hypotheses_keep_their_place():
    """In many a random model the best one ends before the others; without it, worse is found."""
    lost = 0
    for seed in range(30):
        model, source = small(seed), [5, 4, END]
        found = beam_search(model, pad([source]), beam=3, extra=3)[0]
        assert_same(found, plain_beam(model, source, 3, 0.6, extra=3)[:1])
        dropped = plain_beam(model, source, 3, 0.6, extra=3, drop_finished=True)
        lost += dropped[0][1] < found[0][1] - 1e-9
    assert lost >= 5, "no case in which it matters"


def test_early_stop_saves_steps_and_waits_where_something_may_still_win():
    model = always(tiny(), token=END)
    calls = watched(model)
    assert best_of_beam(model, pad([[4, END], [5, 6, END]]), beam=3) == [[], []]
    assert len(calls) < 5, "50 steps for nothing"
    for seed in (6, 11):  # with a strong penalty a short one leads, and a long one overtakes it
        model, source = small(seed, len(WORDS)), [4, 5, END]
        expected = plain_beam(model, source, 3, 2.0)[:1]
        assert_same(beam_search(model, pad([source]), 3, 2.0)[0], expected)


def test_c26_the_beam_is_the_papers_where_nobody_says_otherwise():
    model, source = half_trained(1), pad([[5, 9, 7, END], [8, 11, 4, 6, END]])
    papers = beam_search(model, source, beam=4, alpha=0.6, extra=50, n_best=4)
    assert beam_search(model, source, n_best=4) == papers


def translated(*_, **options):
    return translate(["a cat ."], tiny(len(WORDS)), WORDS, **options)


@pytest.mark.parametrize("call, options, message", [
    (greedy_decode, {"extra": -1}, "extra=-1.*0 or more"),
    (beam_search, {"extra": -1}, "extra=-1"),
    (beam_search, {"beam": 0}, "beam=0 is invalid: give 1"),
    (translated, {"beam": 0}, "beam=0 is invalid: give 1"),
    (beam_search, {"alpha": -0.1}, "alpha=-0.1 is invalid"),
    (translated, {"alpha": math.nan}, "alpha=nan is invalid"),
    (beam_search, {"n_best": 5}, "n_best=5 is invalid.*at most beam=4"),
    (beam_search, {"n_best": 0}, "n_best=0 is invalid"),
    (sample, {"temperature": 0}, "temperature=0 is invalid"),
    (sample, {"temperature": math.nan}, "temperature=nan is invalid"),
    (sample, {"top_k": 0}, "top_k=0 is invalid: give .* a top_k from 1 up"),
    (sample, {"top_p": 0.0}, "top_p=0.0 is invalid"),
    (sample, {"top_p": 1.1}, "top_p=1.1 is invalid"),
    (translated, {"language": "fr"}, "language is 'fr', expected one of 'en', 'de'"),
])
def test_bad_options_are_refused(call, options, message):
    with pytest.raises(ValueError, match=message):
        call(tiny(), pad([[4, END]]), **options)


@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_a_model_that_pads_with_another_id_is_refused(decode):
    with pytest.raises(ValueError, match="pad_id=11 cannot be decoded: give a model with pad_id=0"):
        decode(tiny(pad_id=11), torch.tensor([[4, 5, 6, 7, END], [6, END, 11, 11, 11]]))


def test_scores_that_are_no_numbers_are_named():
    model = tiny()
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.W_1.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="scores are NaN: look for weights"):
        beam_search(model, torch.tensor([[4, 5, END]]))


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


def assert_frequencies(drawn, expected):
    """Each outcome as often as its probability says, within 4 standard errors, and no other."""
    assert set(drawn) <= set(expected)
    for outcome, p in expected.items():
        allowed = 4 * math.sqrt(p * (1 - p) / drawn.total()) + 1e-12
        assert abs(drawn[outcome] / drawn.total() - p) <= allowed, outcome


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
    assert_frequencies(drawn, expected)
    assert len(expected) > 1


def test_a_seed_says_what_is_drawn_whatever_else_draws():
    model, source = half_trained(1), pad([[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, END]])
    before = torch.get_rng_state()
    first = sample(model, source, 2.0, seed=5, extra=9)
    assert torch.equal(torch.get_rng_state(), before), "draws from a generator of its own"
    torch.rand(3)
    assert sample(model, source, 2.0, seed=5, extra=9) == first
    assert len({str(sample(model, source, 2.0, seed=seed, extra=9)) for seed in range(5)}) == 5


# Steps

def lively(**changes):
    """A random model whose norms and biases do something too, in double precision."""
    model = tiny(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


kinds = st.fixed_dictionaries({
    "norm_first": st.booleans(), "positions": st.sampled_from(["sinusoidal", "learned"]),
    "max_length": st.just(15), "seed": st.integers(0, 999), "d_v": st.sampled_from([None, 5])})


@examples(25)
@given(kinds, sentences_of_ids, st.lists(st.integers(1, 3), min_size=1, max_size=5),
       st.integers(1, 3), st.integers(0, 999))
def test_rows_that_leave_or_share_a_memory_stay_themselves(kind, sources, cuts, slots, seed):
    """Each row is compared with its own prefix beside its own source, alone and without padding."""
    model, draw = lively(**kind), torch.Generator().manual_seed(seed)
    alive, rows = list(range(len(sources))), [(i, []) for i in range(len(sources))]
    with torch.no_grad():
        decoder = IncrementalDecoder(model, pad(sources), capacity=sum(cuts))
        for new in cuts:
            tokens = torch.randint(UNKNOWN, 12, (len(rows), new), generator=draw)
            rows = [(i, prefix + more)
                    for (i, prefix), more in zip(rows, tokens.tolist(), strict=True)]
            for hidden, (i, prefix) in zip(decoder.step(tokens), rows, strict=True):
                alone = model.hidden(torch.tensor([sources[i]]), torch.tensor([prefix]))
                assert (hidden - alone[0, -new:]).abs().max() < 1e-12
            stay = (torch.rand(len(alive), generator=draw) < 0.7).nonzero()[:, 0]
            stay = stay if len(stay) else torch.tensor([len(alive) - 1])
            each = len(rows) // len(alive)
            places = torch.randint(each, (len(stay), slots), generator=draw)
            chosen = (stay.unsqueeze(1) * each + places).flatten()
            decoder.select(chosen, stay)
            alive, rows = [alive[k] for k in stay], [rows[k] for k in chosen]
        with pytest.raises(ValueError, match=f"room for {sum(cuts)} pos.*, not {sum(cuts) + 1}:"):
            decoder.step(torch.full((len(rows), 1), UNKNOWN))


def test_a_cache_refuses_rows_that_it_does_not_hold(unenforced):
    """One row would be written into both."""
    two, cache = torch.randn(2, 4, 3, 6), KeyValueCache(4)
    cache.extend(two, two)
    with pytest.raises(ValueError, match="1 new rows for a cache of 2: call select"):
        cache.extend(two[:1, :, :1], two[:1, :, :1])
    assert cache.length == 3


# Texts

@pytest.fixture(scope="module")
def model():
    return small(5, len(WORDS))


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


def test_blank_sentences_are_not_shown_to_the_model(model):
    assert translate(["", " \t", "\u2028"], model, WORDS, engine=lambda *_: 1 / 0) == ["", "", ""]
    assert translate([], model, WORDS) == []


def test_words_never_seen_survive_as_unknown():
    never_knows = always(tiny(len(WORDS)), UNKNOWN)
    assert translate(["zebra"], never_knows, WORDS, max_tokens=9)[0].startswith("<unk> <unk>")


def test_line_breaks_in_a_translation_become_spaces():
    pieces = SubwordTokenizer.fit([("a b", "c d")] * 2, vocab_size=260)
    for character in "\n\r":
        newline = pieces.encode(f"x{character}")[-1]
        assert set(translate(["a"], always(tiny(len(pieces)), newline), pieces)[0]) == {" "}


def test_what_is_no_text_or_lacks_its_tokenizer_is_named(model):
    with pytest.raises(TypeError, match="needs the tokenizer that it was trained with"):
        translate("the cat sleeps .", model)
    with pytest.raises(TypeError, match="a text is a int"):
        translate(["the cat", 3], model, WORDS)
