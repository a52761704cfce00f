"""Greedy decoding and beam search against plain loops and brute force; translation of texts line by line."""

import copy
import inspect
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import sacrebleu
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.batches import pad
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import BEGIN, END, PAD, UNKNOWN, SubwordTokenizer, WordTokenizer
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.checkpoints import book_model
from annotated.training.loop import TrainingConfig, train
from annotated.translation.search import (
    IncrementalDecoder,
    KeyValueCache,
    beam_search,
    check_beam,
    generate,
    greedy_decode,
    length_penalty,
    rule_out,
    sample,
    translate,
)

PAIRS = [("the dog sees a cat .", "der Hund sieht eine Katze ."), ("the cat sleeps .", "die Katze schläft .")]
WORDS = WordTokenizer.fit(PAIRS)


def tiny(vocab_size=12, seed=0, **changes):
    """A random model in double precision, so that no tie is decided by the order of a sum."""
    torch.manual_seed(seed)
    sizes = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.4, **changes}
    return Transformer(TransformerConfig(vocab_size, **sizes)).double().eval()


@cache
def half_trained(seed):
    """A model that has begun to learn to repeat odd tokens: its outputs vary, some end and some do not."""
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
    """One sentence, the whole prefix through the whole model at each step, a plain search for the largest logit."""
    output = [BEGIN]
    with torch.no_grad():
        while len(output) - 1 < len(ids) + extra:
            logits = model(torch.tensor([ids]), torch.tensor([output]))[0, -1].tolist()
            best = max((i for i in range(len(logits)) if i not in (PAD, BEGIN)), key=lambda i: logits[i])
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
    assert greedy_decode(model, pad(sources), extra) == [naive(model, ids, extra) for ids in sources]


def test_half_trained_models_end_sometimes():
    """Without this the comparison above might only ever see the limit."""
    sources = [[3 + i, 4 + i, 5 + i, END] for i in range(7)]
    outputs = [tuple(ids) for seed in range(3) for ids in greedy_decode(half_trained(seed), pad(sources), extra=9)]
    lengths = {len(ids) for ids in outputs}
    assert len(lengths) > 4 and max(lengths) == 13 and len(set(outputs)) > 12


def test_each_sentence_stops_at_its_own_limit():
    model = always(tiny(), token=7)  # never ends
    sources = [[4, END], [4, 5, 6, 7, END], [END]]
    assert greedy_decode(model, pad(sources), extra=3) == [[7] * 5, [7] * 8, [7] * 4]
    lengths = [len(ids) for ids in greedy_decode(model, pad(sources))]
    assert lengths == [52, 55, 51], "the paper's 50 more than the source"


def test_stops_at_the_end_token():
    model, calls = always(tiny(), token=END), []
    model.decoder.layers[0].feed_forward.register_forward_hook(lambda *_: calls.append(1))
    assert greedy_decode(model, pad([[4, END], [5, 6, END]])) == [[], []]
    assert len(calls) == 1, "went on after every sentence had ended"


def test_decoding_encodes_once_and_stops_when_all_have_ended():
    model, counts = copy.deepcopy(half_trained(1)), {"encoder": 0, "decoder": 0}
    for name, part in (("encoder", model.encoder), ("decoder", model.decoder.layers[-1].feed_forward)):
        part.register_forward_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
    sources = [[4, 5, END], [6, 7, 8, END]]
    outputs = greedy_decode(model, pad(sources), extra=9)
    needed = max(min(len(ids) + 1, len(source) + 9) for ids, source in zip(outputs, sources, strict=True))
    assert counts == {"encoder": 1, "decoder": needed}


@pytest.mark.parametrize("decode", [greedy_decode, beam_search])
def test_each_step_computes_the_newest_token_only_for_the_sentences_that_go_on(decode):
    model, fed, projected = copy.deepcopy(half_trained(1)), [], []
    model.decoder.layers[0].feed_forward.register_forward_pre_hook(lambda _, given: fed.append(tuple(given[0].shape[:2])))
    model.decoder.layers[0].cross_attention.W_K.register_forward_hook(lambda _, __, out: projected.append(len(out)))
    sources = [[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, 9, END]]
    decode(model, pad(sources), extra=9)
    assert all(length == 1 for _, length in fed) and fed[0] == (3, 1) and fed[-1][0] < max(rows for rows, _ in fed)
    assert projected == [3], "the memory is projected once, and once per sentence"


@pytest.mark.parametrize("token", [PAD, BEGIN])
def test_padding_and_begin_never_follow(token):
    model = always(tiny(), token)
    found = beam_search(model, pad([[4, END], [5, 6, END]]), extra=2, n_best=4)
    assert all(len(pairs) == 4 and token not in ids for pairs in found for ids, _ in pairs)
    model = always(tiny(), token)  # gives them the largest logit
    assert all(token not in ids and ids for ids in greedy_decode(model, pad([[4, END], [5, 6, END]]), extra=2))


def test_padding_of_the_source_makes_no_difference():
    model, source = half_trained(2), pad([[4, 5, 6, END]])
    padded = torch.cat([source, torch.full((1, 9), PAD)], dim=1)
    assert greedy_decode(model, padded, extra=4) == greedy_decode(model, source, extra=4)


def test_dropout_is_off_and_the_mode_restored():
    model, source = copy.deepcopy(half_trained(0)), pad([[4, 5, 6, 7, END], [8, END]])
    expected = greedy_decode(model, source)
    assert not model.training
    model.train()
    model.encoder.layers[0].eval()  # a part that somebody froze
    modes = [module.training for module in model.modules()]
    assert all(greedy_decode(model, source) == expected for _ in range(3))
    assert [module.training for module in model.modules()] == modes


def test_mode_is_restored_after_an_error():
    model = tiny().train()
    with pytest.raises(IndexError):
        greedy_decode(model, torch.tensor([[99, END]]))
    assert all(module.training for module in model.modules()) and torch.is_grad_enabled()


def test_no_gradient_is_kept():
    model, grads = tiny().train(), []
    model.decoder.layers[0].feed_forward.register_forward_hook(lambda _, __, hidden: grads.append(hidden.requires_grad))
    greedy_decode(model, pad([[4, END]]), extra=1)
    assert grads and not any(grads) and torch.is_grad_enabled()


def test_learned_positions_end_the_translation_at_their_last_place():
    model = always(tiny(positions="learned", max_length=9), token=7)
    assert greedy_decode(model, pad([[4, 5, END], [END]]), extra=3) == [[7] * 6, [7] * 4]
    assert greedy_decode(model, pad([[4, 5, END], [END]])) == [[7] * 9] * 2


@pytest.mark.parametrize("source, extra, message", [
    (torch.tensor([[4, END]]), -1, "extra=-1.*0 or more"), (torch.tensor([4, END]), 5, r"source has shape \(2,\)"),
    (torch.tensor([[4.0, END]]), 5, "source is of torch.float32"),
    (torch.zeros(0, 3, dtype=torch.int64), 5, r"source has shape \(0, 3\)"),
])
def test_bad_input_is_refused(source, extra, message, unenforced):
    with pytest.raises(ValueError, match=message):
        greedy_decode(tiny(), source, extra)


# Beam search

def small(seed, vocab_size=6, **changes):
    """A random model with clear preferences among its tokens, small enough to try every sentence."""
    sizes = {"N": 1, "d_model": 8, "d_ff": 16, "h": 2, **changes}
    model = tiny(vocab_size, seed, **sizes)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.copy_(0.8 * torch.randn_like(parameter))
    return model


def log_probability(model, source, ids, limit):
    """log P and length of a finished hypothesis by one teacher-forced pass; at the limit there is no end token."""
    tokens = [*ids, END][:limit]
    with torch.no_grad():
        log_p = model(torch.tensor([source]), torch.tensor([[BEGIN, *tokens[:-1]]]))[0].log_softmax(dim=-1)
    return sum(log_p[i, token].item() for i, token in enumerate(tokens)), len(tokens)


def plain_beam(model, source, beam, alpha, extra=50, drop_finished=False):
    """All that stands in the beam at the end, best first, as (ids, score): lists, no cache, no batch, no early stop.

    With drop_finished, as it should not be: what has ended leaves the beam, and only the last to end are found.
    """
    limit, hypotheses = len(source) + extra, [([], 0.0, 0.0, False)]
    while not all(ended for *_, ended in hypotheses):
        candidates = [] if drop_finished else [hypothesis for hypothesis in hypotheses if hypothesis[3]]
        live = [ids for ids, _, _, ended in hypotheses if not ended]
        prefixes = torch.tensor([[BEGIN, *ids] for ids in live])
        with torch.no_grad():
            logits = model(torch.tensor([source]).expand(len(live), -1), prefixes)[:, -1].log_softmax(dim=-1).tolist()
        for ids, log_p, row in zip(live, (h[1] for h in hypotheses if not h[3]), logits, strict=True):
            for k in range(END, len(row)):
                new, length = log_p + row[k], len(ids) + 1
                next_ids = ids if k == END else [*ids, k]
                candidates.append((next_ids, new, new / ((5 + length) / 6) ** alpha, k == END or length == limit))
        hypotheses = sorted(candidates, key=lambda hypothesis: -hypothesis[2])[:beam]
    return [(ids, score) for ids, _, score, _ in hypotheses]


def assert_same(found, expected):
    """The same hypotheses in the same order, the scores within 1e-9."""
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert all(abs(ours - theirs) < 1e-9 for (_, ours), (_, theirs) in zip(found, expected, strict=True))


seeds, alphas = st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 1.0, 3.0])
short = st.lists(st.integers(UNKNOWN, 5), max_size=3).map(lambda ids: [*ids, END])
short_sources = st.lists(short, min_size=1, max_size=4)


@examples(25)
@given(sentences_of_ids, st.integers(0, 2), alphas, st.integers(0, 9))
def test_c26_a_beam_of_1_is_greedy(sources, seed, alpha, extra):
    model = half_trained(seed)
    found = beam_search(model, pad(sources), beam=1, alpha=alpha, extra=extra)
    greedy = greedy_decode(model, pad(sources), extra)
    assert [[ids for ids, _ in pairs] for pairs in found] == [[ids] for ids in greedy]


@examples(30)
@given(seeds, short_sources, st.integers(1, 7), alphas, st.integers(0, 4), st.data())
def test_c26_cached_in_a_batch_is_the_plain_search_alone(seed, sources, beam, alpha, extra, data):
    model, n_best = small(seed), data.draw(st.integers(1, beam))
    found = beam_search(model, pad(sources), beam, alpha, extra, n_best)
    for source, pairs in zip(sources, found, strict=True):
        assert_same(pairs, plain_beam(model, source, beam, alpha, extra)[:n_best])


@pytest.mark.parametrize("beam", [2, 5])
def test_c26_models_that_have_learned_something_agree_with_the_plain_search(beam):
    sources = [[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, END], [UNKNOWN, END]]
    for seed in range(3):
        found = beam_search(half_trained(seed), pad(sources), beam, extra=6, n_best=beam)
        for source, pairs in zip(sources, found, strict=True):
            assert_same(pairs, plain_beam(half_trained(seed), source, beam, 0.6, extra=6))


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
    count = len(every)
    assert count == sum(3**length for length in range(limit + 1))
    assert_same(beam_search(model, pad([source]), count + 5, alpha, extra, n_best=count + 5)[0], every)
    assert_same(beam_search(model, pad([source]), count, alpha, extra)[0], every[:1])


@examples(20)
@given(seeds, short_sources, st.integers(1, 5), alphas)
def test_c26_scores_are_the_model_s_own_log_probabilities(seed, sources, beam, alpha):
    model = small(seed, positions="learned", max_length=6)
    for source, pairs in zip(sources, beam_search(model, pad(sources), beam, alpha, extra=3, n_best=beam), strict=True):
        for ids, score in pairs:
            log_p, length = log_probability(model, source, ids, limit=min(len(source) + 3, 6))
            assert abs(score - log_p / length_penalty(length, alpha)) < 1e-9
        assert [score for _, score in pairs] == sorted((score for _, score in pairs), reverse=True)
        assert len({tuple(ids) for ids, _ in pairs}) == len(pairs) >= 1


def test_length_penalty_is_the_formula_with_the_end_token_counted():
    assert length_penalty(1, 0.6) == 1 and length_penalty(7, 1.0) == 2 and length_penalty(7, 0.0) == 1
    assert abs(length_penalty(13, 0.6) - 3**0.6) < 1e-12
    model = always(tiny(), token=END)
    (ids, score), = beam_search(model, pad([[4, 5, END]]), beam=1)[0]
    assert ids == [] and abs(score - log_probability(model, [4, 5, END], [], 9)[0]) < 1e-9


def test_c26_finished_hypotheses_keep_their_place():
    """In many a random model the best hypothesis ends before the others; a beam that drops it finds a worse one."""
    lost = 0
    for seed in range(30):
        model, source = small(seed), [5, 4, END]
        found = beam_search(model, pad([source]), beam=3, extra=3)[0]
        assert_same(found, plain_beam(model, source, 3, 0.6, extra=3)[:1])
        lost += plain_beam(model, source, 3, 0.6, extra=3, drop_finished=True)[0][1] < found[0][1] - 1e-9
    assert lost >= 5, "no case in which it matters"


def test_c26_a_wider_beam_may_lose_and_mostly_does_not():
    sources = [[a, b, END] for a in range(UNKNOWN, 8) for b in range(UNKNOWN, 8)]
    losses, gains, total = 0, 0, 0.0
    for seed in (15, 16, 17, 18):  # 15 has a loss, as some one model in fifty does
        model = small(seed, vocab_size=8)
        scores = [[pairs[0][1] for pairs in beam_search(model, pad(sources), beam, extra=3)] for beam in (1, 2)]
        losses += sum(two < one - 1e-9 for one, two in zip(*scores, strict=True))
        gains += sum(two > one + 1e-9 for one, two in zip(*scores, strict=True))
        total += sum(scores[1]) - sum(scores[0])
    assert 0 < losses < gains and total > 0


def test_early_stop_saves_steps_and_waits_where_something_may_still_win():
    model, calls = always(tiny(), token=END), []
    model.decoder.layers[0].feed_forward.register_forward_hook(lambda *_: calls.append(1))
    found = beam_search(model, pad([[4, END], [5, 6, END]]), beam=3)
    assert [pairs[0][0] for pairs in found] == [[], []] and len(calls) < 5, "50 steps for nothing"
    for seed in (6, 11):  # with a strong penalty a short one leads, and a long one overtakes it
        model = small(seed, len(WORDS))
        assert_same(beam_search(model, pad([[4, 5, END]]), 3, 2.0)[0], plain_beam(model, [4, 5, END], 3, 2.0)[:1])


def test_beam_limits_are_those_of_each_sentence():
    model = always(tiny(), token=7)  # never ends
    sources = [[4, END], [4, 5, 6, 7, END], [END]]
    assert [pairs[0][0] for pairs in beam_search(model, pad(sources), extra=3)] == [[7] * 5, [7] * 8, [7] * 4]
    model = always(tiny(positions="learned", max_length=9), token=7)
    assert [pairs[0][0] for pairs in beam_search(model, pad(sources))] == [[7] * 9] * 3


def test_beam_search_has_no_dropout_and_restores_the_mode():
    model, source = copy.deepcopy(half_trained(0)), pad([[4, 5, 6, 7, END], [8, END]])
    expected = beam_search(model, source, extra=5)
    model.train()
    assert beam_search(model, source, extra=5) == expected and model.training


def test_c26_the_beam_is_the_papers_where_nobody_says_otherwise():
    model, source = half_trained(1), pad([[5, 9, 7, END], [8, 11, 4, 6, END]])
    assert beam_search(model, source, n_best=4) == beam_search(model, source, beam=4, alpha=0.6, extra=50, n_best=4)
    with pytest.raises(ValueError, match="n_best=5 .* at most beam=4"):
        beam_search(model, source, n_best=5)


@pytest.mark.parametrize("options, message", [
    ({"beam": 0}, "beam=0 is invalid: give 1"), ({"alpha": -0.1}, "alpha=-0.1 is invalid"),
    ({"alpha": float("nan")}, "alpha=nan is invalid"),
    ({"beam": 3, "n_best": 4}, "n_best=4 is invalid.*at most beam=3"),
    ({"n_best": 0}, "n_best=0 is invalid"), ({"extra": -1}, "extra=-1"),
])
def test_bad_options_of_the_beam_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(tiny(), pad([[4, END]]), **options)
    if set(options) == {"beam"} or set(options) == {"alpha"}:
        with pytest.raises(ValueError, match=message):
            translate(["a cat ."], tiny(len(WORDS)), WORDS, **options)
    if "extra" not in options:
        with pytest.raises(ValueError, match=message):
            check_beam(**options)


# Sampling

def by_hand(logits, temperature, top_k=None, top_p=None):
    """{token: probability} of the next one, one after the other."""
    allowed = {token: math.exp(logits[token] / temperature) for token in range(len(logits)) if token not in (PAD, BEGIN)}
    p = {token: value / sum(allowed.values()) for token, value in allowed.items()}
    kept, together = {}, 0.0
    for token in sorted(p, key=p.get, reverse=True)[:top_k]:
        if top_p is not None and together >= top_p:
            break
        kept[token], together = p[token], together + p[token]
    return {token: value / together for token, value in kept.items()}


def assert_frequencies(drawn, expected):
    """Each outcome as often as its probability says, within 4 standard errors; none that has no probability."""
    assert set(drawn) <= set(expected)
    for outcome, p in expected.items():
        assert abs(drawn[outcome] / drawn.total() - p) <= 4 * math.sqrt(p * (1 - p) / drawn.total()) + 1e-12, outcome


@pytest.mark.parametrize("knobs", [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 1.5, "top_k": 5, "top_p": 0.7},
    {"top_k": 2, "top_p": 0.99}, {"top_k": 100, "top_p": 1.0},
], ids=str)
def test_first_tokens_come_as_often_as_their_probability_says(knobs):
    model, source = small(3, vocab_size=12), torch.full((500, 1), END)
    with torch.no_grad():
        logits = model(source[:1], torch.tensor([[BEGIN]]))[0, -1].tolist()
    expected = by_hand(logits, **{"temperature": 1.0, **knobs})
    drawn = Counter(ids[0] if ids else END for seed in range(40) for ids in sample(model, source, seed=seed, extra=0, **knobs))
    assert_frequencies(drawn, expected)
    assert len(expected) == {"{'top_k': 3}": 3, "{'top_k': 2, 'top_p': 0.99}": 2}.get(str(knobs), len(expected)) and len(expected) > 1


def test_later_tokens_are_drawn_after_what_was_drawn():
    model, source = small(5), pad([[4, END], [5, END]] * 250)
    expected = [{}, {}]
    for found, ids in zip(expected, ([4, END], [5, END]), strict=True):
        for first, second in itertools.product(range(END, 6), repeat=2):
            words = [first] if first == END else [first, second]
            with torch.no_grad():
                logits = model(torch.tensor([ids]), torch.tensor([[BEGIN, *words[:-1]]]))[0].tolist()
            shares = [by_hand(row, temperature=1.3)[word] for row, word in zip(logits, words, strict=True)]
            found[tuple(word for word in words if word != END)] = math.prod(shares)
    assert all(abs(sum(found.values()) - 1) < 1e-9 for found in expected)
    drawn = [tuple(ids) for seed in range(20) for ids in sample(model, source, temperature=1.3, seed=seed, extra=0)]
    for start, found in enumerate(expected):
        assert_frequencies(Counter(drawn[start::2]), found)


def test_a_seed_says_what_is_drawn_and_one_token_to_choose_from_is_greedy():
    model, source = half_trained(1), pad([[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, END]])
    before = torch.get_rng_state()
    first = sample(model, source, 2.0, seed=5, extra=9)
    torch.rand(3)
    assert sample(model, source, 2.0, seed=5, extra=9) == first
    torch.set_rng_state(before)
    assert len({str(sample(model, source, 2.0, seed=seed, extra=9)) for seed in range(5)}) == 5
    assert torch.equal(torch.get_rng_state(), before), "draws from a generator of its own"
    greedy = greedy_decode(model, source, extra=9)
    assert sample(model, source, 2.0, top_k=1, extra=9) == sample(model, source, 2.0, top_p=1e-9, extra=9) == greedy != first


@pytest.mark.parametrize("knobs, message", [
    ({"temperature": 0}, "temperature=0 is invalid"), ({"temperature": -1.0}, "temperature=-1.0 is invalid"),
    ({"temperature": math.nan}, "temperature=nan is invalid"), ({"top_k": 0}, "top_k=0 is invalid: give .* a top_k from 1 up"),
    ({"top_p": 0.0}, "top_p=0.0 is invalid"), ({"top_p": 1.1}, "top_p=1.1 is invalid"), ({"extra": -1}, "extra=-1 is invalid"),
])
def test_knobs_that_leave_nothing_to_draw_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        sample(tiny(), pad([[4, END]]), **knobs)


# A way of one's own

def greedy_after(model, source, prefix, extra=50):
    """Greedy decoding of translations that begin with these tokens."""
    left = list(prefix)

    def choose(logits):
        if left:
            return source.new_full((len(logits), 1), left.pop(0))
        return logits.argmax(dim=1, keepdim=True)

    return generate(model, source, choose, extra)


def test_another_way_of_writing_is_a_function_of_a_few_lines():
    model, sources, prefix = half_trained(1), [[4, 5, END], [6, 7, 8, END], [11, 9, 9, 9, 9, END]], [9, 4, 4]
    found = greedy_after(model, pad(sources), prefix, extra=6)
    for ids, output in zip(sources, found, strict=True):
        assert output[:3] == prefix
        for n in range(3, len(ids) + 6):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), torch.tensor([[BEGIN, *output[:n]]]))[0, -1]
            assert logits[END:].argmax() + END == (output[n] if n < len(output) else END)
            if n >= len(output):
                break
    assert found != greedy_decode(model, pad(sources), extra=6) and len(inspect.getsource(greedy_after).splitlines()) <= 20


# Steps

def lively(**changes):
    """A random model whose norms and biases do something too, in double precision."""
    model = tiny(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


kinds = st.fixed_dictionaries({"norm_first": st.booleans(), "positions": st.sampled_from(["sinusoidal", "learned"]),
                               "max_length": st.just(15), "seed": st.integers(0, 999)})


@examples(25)
@given(kinds, sentences_of_ids, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_steps_of_one_or_more_tokens_are_the_whole_decoder(kind, sources, cuts):
    model, source = lively(**kind), pad(sources)
    target = torch.randint(UNKNOWN, 12, (len(sources), sum(cuts)))
    with torch.no_grad():
        decoder = IncrementalDecoder(model, source, capacity=sum(cuts))
        found = torch.cat([decoder.step(part) for part in target.split(cuts, dim=1)], dim=1)
        assert (found - model.hidden(source, target)).abs().max() < 1e-12
    with pytest.raises(ValueError, match=f"room for {sum(cuts)} positions, not {sum(cuts) + 1}: give a larger capacity"):
        decoder.step(target[:, :1])


@examples(25)
@given(kinds, sentences_of_ids, st.lists(st.integers(1, 2), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 999))
def test_rows_that_leave_change_places_or_share_a_memory_stay_themselves(kind, sources, cuts, slots, seed):
    """Each row is compared with its own prefix beside its own source, alone and without padding."""
    model, draw = lively(**kind), torch.Generator().manual_seed(seed)
    alive, rows = list(range(len(sources))), [(i, []) for i in range(len(sources))]
    with torch.no_grad():
        decoder = IncrementalDecoder(model, pad(sources), capacity=sum(cuts))
        for new in cuts:
            tokens = torch.randint(UNKNOWN, 12, (len(rows), new), generator=draw)
            rows = [(i, prefix + more) for (i, prefix), more in zip(rows, tokens.tolist(), strict=True)]
            for hidden, (i, prefix) in zip(decoder.step(tokens), rows, strict=True):
                expected = model.hidden(torch.tensor([sources[i]]), torch.tensor([prefix]))[0, -new:]
                assert (hidden - expected).abs().max() < 1e-12
            stay = (torch.rand(len(alive), generator=draw) < 0.7).nonzero()[:, 0]
            stay = stay if len(stay) else torch.tensor([len(alive) - 1])
            each = len(rows) // len(alive)
            chosen = (stay.unsqueeze(1) * each + torch.randint(each, (len(stay), slots), generator=draw)).flatten()
            decoder.select(chosen, stay)
            alive, rows = [alive[k] for k in stay], [rows[k] for k in chosen]


def test_a_cache_gives_back_what_it_was_given():
    cache, draw = KeyValueCache(6), torch.Generator().manual_seed(0)
    K, V = torch.zeros(3, 2, 0, 4), torch.zeros(3, 2, 0, 5)  # d_k is not d_v
    for new, rows in ((1, [2, 0, 0, 1]), (2, [3, 1]), (1, [0, 1, 1, 0, 0]), (2, [4])):
        k, v = torch.randn(len(K), 2, new, 4, generator=draw), torch.randn(len(K), 2, new, 5, generator=draw)
        K, V = torch.cat([K, k], dim=2), torch.cat([V, v], dim=2)
        found = cache.extend(k, v)
        assert torch.equal(found[0], K) and torch.equal(found[1], V)
        cache.select(torch.tensor(rows))
        K, V = K[rows], V[rows]
    with pytest.raises(ValueError, match="room for 6 positions, not 7"):
        cache.extend(k[:1, :, :1], v[:1, :, :1])


def test_a_cache_refuses_rows_that_it_does_not_hold(unenforced):
    """One row would be written into both."""
    two, cache = torch.randn(2, 4, 3, 6), KeyValueCache(4)
    cache.extend(two, two)
    with pytest.raises(ValueError, match="1 new rows for a cache of 2: call select"):
        cache.extend(two[:1, :, :1], two[:1, :, :1])
    assert cache.length == 3


def test_what_is_ruled_out_never_comes_first():
    scores, allowed = torch.randn(40, 50), torch.rand(40, 50) < 0.3
    allowed[:, 7] = True
    expected = scores.masked_fill(~allowed, -torch.inf)
    expected[:, [PAD, BEGIN]] = -torch.inf
    assert torch.equal(rule_out(scores.clone(), allowed), expected)
    assert torch.equal(rule_out(scores)[:, END:], scores[:, END:]) and scores[:, [PAD, BEGIN]].isinf().all()


def compiled_steps():
    """What the test below runs in a process of its own, where shapes are not enforced: compilers cannot see through that."""
    model, sources = copy.deepcopy(half_trained(1)), [[7, 4, 9], [5, 5, 8, 6, 10, 4], [11], [6, 7, 8, 9]]
    source = pad([[*ids, END] for ids in sources])
    expected = greedy_decode(model, source, extra=6), beam_search(model, source, 3, extra=6, n_best=2)
    calls, compiled = [], torch.compile(IncrementalDecoder.step, dynamic=True)
    IncrementalDecoder.step = lambda *given: calls.append(len(given[1])) or compiled(*given)
    assert greedy_decode(model, source, extra=6) == expected[0] and len(calls) > 3
    for found, plain in zip(beam_search(model, source, 3, extra=6, n_best=2), expected[1], strict=True):
        assert_same(found, plain)
    print("the same")


@pytest.mark.long  # the compiler takes a minute
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_writes_the_same():
    here = Path(__file__).parent
    paths = os.pathsep.join(str(path) for path in (here, *here.parents[:2]))
    done = subprocess.run([sys.executable, "-c", "import test_search; test_search.compiled_steps()"], text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0 and done.stdout == "the same\n", done.stderr


# Texts

@pytest.fixture(scope="module")
def model():
    return tiny(len(WORDS), seed=2, N=1)


TEXTS = ["the dog sees a cat .", "", "a cat .", "the cat sleeps .", "   ", "a a a a a a a a a", "cat"]


def test_translation_alone_is_translation_in_company(model):
    alone = [translate([text], model, WORDS)[0] for text in TEXTS]
    assert len(set(alone)) > 3, "a test that could not notice a wrong order"
    for max_tokens in (1, 12, 4096):  # 1: every sentence by itself
        assert translate(TEXTS, model, WORDS, max_tokens=max_tokens) == alone
    assert translate(TEXTS[::-1], model, WORDS) == alone[::-1]
    assert translate((text for text in TEXTS), model, WORDS) == alone, "a generator can be read only once"


def test_translation_is_greedy_decoding_between_the_tokenizers_ends(model):
    expected = WORDS.decode(naive(model, [*WORDS.encode(TEXTS[0], "en"), END], extra=50))
    assert translate([TEXTS[0]], model, WORDS) == [expected]


def test_translation_with_a_beam_is_the_best_of_the_beam():
    texts, seen = [text for text in TEXTS if text.strip()], set()
    model = small(5, len(WORDS))
    for beam, alpha in ((1, 0.6), (3, 0.0), (3, 2.0)):
        best = [plain_beam(model, [*WORDS.encode(text, "en"), END], beam, alpha)[0][0] for text in texts]
        expected = [WORDS.decode(ids) for ids in best]
        for max_tokens in (1, 40, 4096):
            assert translate(texts, model, WORDS, beam=beam, alpha=alpha, max_tokens=max_tokens) == expected
        seen.add(tuple(expected))
    assert len(seen) == 3, "neither beam nor alpha matters: a test that cannot fail"


def test_blank_sentences_stay_blank_and_are_not_shown_to_the_model(model):
    assert translate(["", " \t", "\u2028"], model, WORDS) == ["", "", ""]
    assert translate([], model, WORDS) == []
    outputs = translate(TEXTS, model, WORDS)
    assert [bool(output) for output in outputs] == [bool(text.strip()) for text in TEXTS]


def test_words_never_seen_survive_as_unknown(model):
    assert WORDS.encode("zebra", "en") == [UNKNOWN]
    seen = []
    hook = model.encoder.register_forward_pre_hook(lambda *_: seen.append(1))
    assert translate(["the zebra sleeps ."], model, WORDS)[0]
    hook.remove()
    never_knows = always(tiny(len(WORDS)), UNKNOWN)
    assert seen and translate(["zebra"], never_knows, WORDS, max_tokens=9)[0].startswith("<unk> <unk>")


def test_line_breaks_in_a_translation_become_spaces():
    pieces = SubwordTokenizer.fit([("a b", "c d")] * 2, vocab_size=260)
    for character in "\n\r":
        newline = pieces.encode(f"x{character}")[-1]
        assert set(translate(["a"], always(tiny(len(pieces)), newline), pieces)[0]) == {" "}


def test_a_string_gives_a_string_and_a_model_needs_its_tokenizer(model):
    assert translate("the cat sleeps .", model, WORDS) == translate(["the cat sleeps ."], model, WORDS)[0]
    with pytest.raises(TypeError, match="needs the tokenizer that it was trained with"):
        translate("the cat sleeps .", model)
    with pytest.raises(TypeError, match="a text is a int"):
        translate(["the cat", 3], model, WORDS)


def test_unknown_language_is_named(model):
    with pytest.raises(ValueError, match="language is 'fr', expected one of 'en', 'de'"):
        translate(["le chat dort ."], model, WORDS, language="fr")


def test_progress_is_shown_only_on_request(model, capsys):
    translate(TEXTS, model, WORDS)
    assert capsys.readouterr() == ("", "")
    translate(TEXTS, model, WORDS, show_progress=True)
    assert "translating" in capsys.readouterr().err


# The book's model

@pytest.fixture(scope="session")
def book():
    """The one that comes with the package."""
    return book_model()


def test_book_model_translates_the_test_set(book):
    corpus = load_corpus("toy")
    scores = {}
    for split in ("test", "novel"):
        sources, references = zip(*getattr(corpus, split), strict=True)
        scores[split] = sacrebleu.corpus_bleu(translate(sources, book.model, book.tokenizer), [references]).score
    assert scores["test"] >= 95 and scores["novel"] >= 50, scores


@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_a_model_that_pads_with_another_id_is_refused(decode):
    model = Transformer(TransformerConfig.tiny(12, pad_id=11)).eval()
    with pytest.raises(ValueError, match="pad_id=11 cannot be decoded: give a model with pad_id=0"):
        decode(model, torch.tensor([[4, 5, 6, 7, END], [6, END, 11, 11, 11]]))


def test_scores_that_are_no_numbers_are_named():
    model = Transformer(TransformerConfig.tiny(12)).eval()
    with torch.no_grad():
        model.decoder.layers[0].feed_forward.W_1.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="scores are NaN: look for weights"):
        beam_search(model, torch.tensor([[4, 5, END]]))
