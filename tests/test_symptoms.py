"""Page 27: the sound recipe is the library's, and the long run trained what the page shows."""

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


def test_results_hold_every_fault_of_the_page(space):
    facts = json.loads((ROOT / "results" / "symptoms.json").read_text(encoding="utf-8"))
    assert list(facts["faults"]) == list(space["FAULTS"])
    assert facts["training"].startswith(f"{symptoms.STEPS} updates of {symptoms.MAX_TOKENS} tokens")
    sources = {source for source, _ in facts["examples"]}
    for run in facts["faults"].values():
        assert len(run["curve"]) == symptoms.STEPS // symptoms.EVERY
        assert run["outputs"].keys() == sources
