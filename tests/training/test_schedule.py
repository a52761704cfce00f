"""The learning rate of section 5.3 against its closed form, and Adam against its equations."""

import pytest
import torch

from annotated.training.schedule import NoamSchedule, adam, noam_rate


def test_c24_peak_of_the_base_model():
    curve = [noam_rate(step, 512, 4000) for step in range(1, 20_001)]
    assert curve.index(max(curve)) + 1 == 4000
    assert f"{max(curve):.3e}" == "6.988e-04"


@pytest.mark.parametrize("arguments, named", [
    ((0, 512, 4000), "step=0, .*updates count from 1"), ((-3, 512, 4000), "step=-3"),
    ((1, 0, 4000), "d_model=0"), ((1, 512, 0), "warmup=0")])
def test_c24_steps_count_from_one(arguments, named):
    with pytest.raises(ValueError, match=named):
        noam_rate(*arguments)


def test_adam_follows_the_printed_equations():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    w, m, v = weight.detach().clone(), 0.0, 0.0
    optimizer = adam([weight])
    schedule = NoamSchedule(optimizer, 16, 7, factor=2.0)
    for t in range(1, 26):
        g = torch.randn_like(w) * 10 ** torch.empty_like(w).uniform_(-10, 2)
        weight.grad = g.clone()
        optimizer.step()
        schedule.step()
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        rate = 2 * 16**-0.5 * min(t**-0.5, t * 7**-1.5)
        w = w - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + 1e-9)
        assert torch.allclose(weight, w, rtol=0, atol=1e-9)
