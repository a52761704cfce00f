"""The learning rate of section 5.3 against its closed form, and Adam against its equations."""

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.training.schedule import NoamSchedule, adam, noam_rate


def optimizer_of():
    return adam([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])


def rates(schedule, optimizer, updates):
    """The rates at which the next updates really run."""
    used = []
    for _ in range(updates):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def test_c24_peak_of_the_base_model():
    curve = [noam_rate(step, 512, 4000) for step in range(1, 20_001)]
    assert curve.index(max(curve)) + 1 == 4000
    assert f"{max(curve):.3e}" == "6.988e-04"


@examples(100)
@given(st.integers(1, 10**6), st.integers(1, 2048), st.integers(1, 20_000), st.floats(0.1, 10))
def test_c24_linear_then_inverse_square_root(step, d_model, warmup, factor):
    peak = factor / math.sqrt(d_model * warmup)
    expected = peak * step / warmup if step <= warmup else peak * math.sqrt(warmup / step)
    assert math.isclose(noam_rate(step, d_model, warmup, factor), expected, rel_tol=1e-12)


@pytest.mark.parametrize("arguments, named", [
    ((0, 512, 4000), "step=0, .*updates count from 1"), ((-3, 512, 4000), "step=-3"),
    ((1, 0, 4000), "d_model=0"), ((1, 512, 0), "warmup=0")])
def test_c24_steps_count_from_one(arguments, named):
    with pytest.raises(ValueError, match=named):
        noam_rate(*arguments)


def test_c24_update_k_runs_at_rate_k():
    optimizer = optimizer_of()
    used = rates(NoamSchedule(optimizer, 512, 10, factor=2.0), optimizer, 40)
    assert used == [noam_rate(k, 512, 10, 2.0) for k in range(1, 41)]
    assert len(set(used[:10])) == 10  # no two updates of the warm-up share a rate


@pytest.mark.parametrize("first", ["schedule", "optimizer"])
def test_resuming_goes_on_at_the_rate_where_it_stopped(first):
    optimizer = optimizer_of()
    schedule = NoamSchedule(optimizer, 512, 8)
    rates(schedule, optimizer, 11)
    fresh = optimizer_of()
    resumed = NoamSchedule(fresh, 512, 8)
    if first == "schedule":
        resumed.load_state_dict(schedule.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    if first == "optimizer":
        resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == [noam_rate(12, 512, 8)]
    assert rates(resumed, fresh, 5) == [noam_rate(k, 512, 8) for k in range(12, 17)]


def test_adam_follows_the_printed_equations():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    w, m, v = weight.detach().clone(), 0.0, 0.0
    optimizer = adam([weight])
    schedule = NoamSchedule(optimizer, 16, 7)
    for t in range(1, 26):
        g = torch.randn_like(w) * 10 ** torch.empty_like(w).uniform_(-10, 2)
        weight.grad = g.clone()
        optimizer.step()
        schedule.step()
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        rate = 16**-0.5 * min(t**-0.5, t * 7**-1.5)
        w = w - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + 1e-9)
        assert torch.allclose(weight, w, rtol=0, atol=1e-9)
