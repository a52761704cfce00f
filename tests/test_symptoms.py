"""Page 27: each fault is what its name says, and the long run trained what the page shows."""

import json

import pytest
import symptoms
import torch
from helpers import ROOT, random_model

from annotated import Batch, LabelSmoothingLoss, Transformer

PAIRS = [([5, 6, 7], [8, 9]), ([6], [9, 8, 7])]


@pytest.fixture(scope="module")
def space():
    names = {"__name__": "page"}
    exec(symptoms.page_code(symptoms.PAGE), names)
    return names


def test_the_sound_recipe_is_the_library_s(space):
    model, batch = random_model(12, seed=0), Batch.collate(PAIRS)
    logits, right = space["Recipe"]().logits(model, batch)
    assert torch.equal(logits, model(batch.source, batch.target_in))
    assert torch.equal(right, batch.target_out)
    assert space["Recipe"]().loss(logits, right) == LabelSmoothingLoss(0.1)(logits, right)
    assert space["Recipe"]().build is Transformer


def test_faults_are_what_they_are_called(space):
    """A key's weights sum to 1, hidden keys are seen, padding adds to the loss, 0 · ln 0 is NaN."""
    torch.manual_seed(0)
    q, mask = torch.randn(1, 4, 8), torch.tensor([[True, True, False, False]])
    assert torch.allclose(space["OverQueries"]()(q, q, q)[1].sum(dim=-2), torch.ones(1, 4))
    weights = space["Inverted"]()(q, q, q, mask)[1]
    assert (weights[..., :2] == 0).all() and torch.allclose(weights.sum(dim=-1), torch.ones(1, 4))
    logits, target = torch.randn(1, 3, 12), torch.tensor([[5, 6, 0]])
    assert space["counts_padding"](logits, target) != space["smoothed"](logits, target)
    assert space["counts_padding"](logits[:, :2], target[:, :2]) == pytest.approx(
        space["smoothed"](logits[:, :2], target[:, :2]).item())
    assert space["log_of_zero"](logits, target).isnan()
    assert space["FAULTS"]["missing shift"].feed(1, 2) == 2
    assert space["FAULTS"]["none"].feed(1, 2) == 1


def test_a_run_says_what_its_author_would_see(space, monkeypatch):
    monkeypatch.setattr(symptoms, "MAX_TOKENS", 64)
    monkeypatch.setattr(symptoms, "translate", lambda sources, model, *_:
                        [] if model.training else ["der Hund"] * len(sources))

    def run(recipe, steps):
        data = PAIRS * 8, range(12), [("the dog", "der Hund")] * 4  # of the tokenizer its length
        return symptoms.run(recipe, space["train"], *data, steps)

    result = run(space["Recipe"](), 2 * symptoms.EVERY)
    (first, first_loss), (second, second_loss) = result["curve"]
    assert (first, second) == (symptoms.EVERY, 2 * symptoms.EVERY) and second_loss < first_loss
    assert result["outputs"] == {"the dog": "der Hund"}
    curve = run(space["FAULTS"]["log of zero"], symptoms.EVERY)["curve"]
    assert curve == [[symptoms.EVERY, None]]


def test_results_hold_every_fault_of_the_page(space):
    facts = json.loads((ROOT / "results" / "symptoms.json").read_text(encoding="utf-8"))
    assert list(facts["faults"]) == list(space["FAULTS"])
    assert facts["training"].startswith(f"{symptoms.STEPS} updates of {symptoms.MAX_TOKENS} tokens")
    sources = {source for source, _ in facts["examples"]}
    for run in facts["faults"].values():
        assert len(run["curve"]) == symptoms.STEPS // symptoms.EVERY
        assert run["outputs"].keys() == sources
