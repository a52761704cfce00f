"""Three changes of the model made from outside, each in at most 20 lines: rotary positions, RMSNorm, another way of writing."""

import cmath
import inspect
import math

import pytest
import torch
from helpers import random_model
from torch import nn

from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END, PAD, UNKNOWN
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import prepare, undo
from annotated.model.attention import DotProductAttention
from annotated.training.loop import TrainingConfig, train
from annotated.translation.search import beam_search, generate, greedy_decode


def tiny(seed=0, **changes):
    """A random model in double precision."""
    return random_model(seed=seed, N=2, **changes).double().eval()


def short(*parts):
    """Whether the code of these classes and functions takes at most 20 lines, empty ones left out."""
    return sum(bool(line.strip()) for part in parts for line in inspect.getsource(part).splitlines()) <= 20


SOURCE = pad([[4, 5, 6, 7, END], [8, END], [9, 9, 10, END]])
TARGET = pad([[BEGIN, 5, 6], [BEGIN, 7, 8, 9, 10, 11], [BEGIN, 4, 4, 4]])


# Rotary positions (Su et al., 2021): queries and keys are turned by angles that grow with their positions

class Rotary(DotProductAttention):
    def turned(self, x, start):
        places = torch.arange(start, start + x.size(-2), dtype=torch.float64)[:, None]
        angles = places * 10_000.0 ** -torch.linspace(0, 1, x.size(-1) // 2 + 1, dtype=torch.float64)[:-1]
        cos, sin, (even, odd) = angles.cos().to(x), angles.sin().to(x), (x[..., ::2], x[..., 1::2])
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def forward(self, query, key, value, mask=None):
        newest = key.size(-2) - query.size(-2)  # the queries are the last of the positions
        return super().forward(self.turned(query, newest), self.turned(key, 0), value, mask)


class NoPositions(nn.Module):
    def forward(self, x, start=0):
        return x


def with_rotary(model):
    model.source_positions = model.target_positions = NoPositions()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attention.attention = Rotary().train(model.training)
    return model


def test_rotary_scores_depend_on_distances_alone():
    torch.manual_seed(0)
    q, k, rotary = torch.randn(1, 1, 6, 8).double(), torch.randn(1, 1, 6, 8).double(), Rotary()
    scores = [rotary.turned(q, start) @ rotary.turned(k, start).mT for start in (0, 5, 31)]
    assert all((one - scores[0]).abs().max() < 1e-12 for one in scores)
    turned = torch.view_as_complex(rotary.turned(torch.tensor([[0.6, 0.8] * 4], dtype=torch.float64), 3).view(4, 2))
    expected = [complex(0.6, 0.8) * cmath.exp(3j * 10_000 ** (-pair / 4)) for pair in range(4)]
    assert (turned - torch.tensor(expected, dtype=torch.complex128)).abs().max() < 1e-12
    assert not torch.allclose(q @ k.mT, scores[0])


@pytest.mark.parametrize("norm_first", [False, True])
def test_rotary_positions_are_put_in_from_outside(norm_first):
    plain, model = tiny(norm_first=norm_first), with_rotary(tiny(norm_first=norm_first))
    ids, moved = torch.tensor([[4, 5, 6, END]]), torch.tensor([[PAD, PAD, PAD, 4, 5, 6, END]])
    with torch.no_grad():
        assert (model.encode(moved)[0][:, 3:] - model.encode(ids)[0]).abs().max() < 1e-12, "only distances count"
        assert (plain.encode(moved)[0][:, 3:] - plain.encode(ids)[0]).abs().max() > 0.01, "where places count"
        backwards = model.encode(ids.flip(1))[0].flip(1)
        assert (backwards - model.encode(ids)[0]).abs().max() > 0.01, "the order counts"
    assert short(Rotary, NoPositions, with_rotary)


def test_rotary_positions_go_on_from_step_to_step_and_when_prepared():
    model, expected = with_rotary(tiny()), []
    for ids in SOURCE:  # the whole prefix at each step, without a cache
        output = torch.tensor([[BEGIN]])
        while output.size(1) <= (ids != PAD).sum() + 5 and output[0, -1] != END:
            with torch.no_grad():
                logits = model(ids[None], output)[0, -1]
            output = torch.cat([output, logits[END:].argmax().view(1, 1) + END], dim=1)
        expected.append([token for token in output[0, 1:].tolist() if token != END])
    assert greedy_decode(model, SOURCE, extra=5) == expected and len({tuple(ids) for ids in expected}) == 3
    beams = [pairs[0][0] for pairs in beam_search(model, SOURCE, extra=5)]
    prepare(model)
    assert isinstance(model.encoder.layers[0].self_attention.attention, Rotary)
    assert greedy_decode(model, SOURCE, extra=5) == expected and [pairs[0][0] for pairs in beam_search(model, SOURCE, extra=5)] == beams


# RMSNorm (Zhang and Sennrich, 2019): layer norm without mean and offset

class RMSNorm(nn.Module):
    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x):
        return self.gain * x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()


def with_rms_norm(model):
    for module in list(model.modules()):
        if isinstance(getattr(module, "norm", None), nn.LayerNorm):
            module.norm = RMSNorm(model.config.d_model).to(model.embedding.weight)
    return model


@pytest.mark.parametrize("norm_first", [False, True])
def test_rms_norm_is_put_in_from_outside(norm_first):
    model, x = with_rms_norm(tiny(norm_first=norm_first)), torch.randn(3, 4, 16).double()
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 10 + 2 * norm_first and not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    for norm in norms:
        nn.init.normal_(norm.gain)
    residual = model.decoder.layers[0].residual[1]
    expected = nn.functional.rms_norm(x, (16,), residual.norm.gain, 1e-6)
    assert torch.allclose(residual.norm(x), expected, rtol=0, atol=1e-12)
    found = residual(x, torch.sin)
    inner, outer = (expected, x) if norm_first else (x, None)
    right = outer + inner.sin() if norm_first else nn.functional.rms_norm(x + x.sin(), (16,), residual.norm.gain, 1e-6)
    assert torch.allclose(found, right, rtol=0, atol=1e-12) and short(RMSNorm, with_rms_norm)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_with_rms_norm_learns_and_translates(prepared):
    pairs = [([a, b], [b, a, a]) for a in range(UNKNOWN, 12) for b in range(UNKNOWN, 12)]
    model = with_rms_norm(tiny()).float()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    if prepared:
        prepare(model)
    first = train(model, pairs, pairs[:9], TrainingConfig(steps=1, max_tokens=200, warmup=1), show_progress=False, loss=ChunkedLoss)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == set(before) and sum("gain" in name for name in changed) == 10
    log = train(model, pairs, pairs[:9], TrainingConfig(steps=40, max_tokens=400, warmup=20), show_progress=False)
    assert log[-1]["valid_loss"] < first[-1]["valid_loss"] - 0.3
    undo(model).eval()
    expected = model(SOURCE, TARGET).detach()
    found = prepare(model)(SOURCE, TARGET).detach()
    assert (found - expected).norm() < 1e-5 * expected.norm() and len(greedy_decode(model, SOURCE)) == 3


# Another way of writing: no token twice

def write_without_repeating(model, source, extra=50):
    said = torch.zeros(len(source), model.config.vocab_size, dtype=torch.bool)
    left, step = (source != PAD).sum(dim=1) + extra, 0

    def choose(logits):
        nonlocal said, left, step
        logits = logits.masked_fill(said, -math.inf)
        token, step = logits.argmax(dim=1, keepdim=True), step + 1
        stays = (token[:, 0] != END) & (step < left)
        said, left = said.scatter(1, token, True)[stays], left[stays]
        return token

    return generate(model, source, choose, extra)


def test_another_way_of_writing_is_put_in_from_outside():
    model, extra = tiny(seed=3), 4
    found = write_without_repeating(model, SOURCE, extra)
    for ids, output in zip(SOURCE, found, strict=True):
        tokens = [*output, END][: (ids != PAD).sum() + extra]
        for n, token in enumerate(tokens):
            with torch.no_grad():
                logits = model(ids[None], torch.tensor([[BEGIN, *tokens[:n]]]))[0, -1]
            logits[[PAD, BEGIN, *tokens[:n]]] = -math.inf
            assert logits.argmax() == token
        assert len(set(output)) == len(output)
    assert any(len(set(ids)) < len(ids) for ids in greedy_decode(model, SOURCE, extra)), "a model that does not repeat itself"
    assert write_without_repeating(prepare(model), SOURCE, extra) == found and short(write_without_repeating)
