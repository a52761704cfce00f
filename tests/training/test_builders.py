"""A model that is not built as printed has a named builder: saved, it loads as what it was."""

import pytest
import torch

from annotated.model.attention import DotProductAttention
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.builders import BUILDERS, build_model, builder_of, foreign_part
from annotated.training.checkpoints import load_checkpoint, run_checkpoints, save_checkpoint
from annotated.training.loop import TrainingConfig, train

IDS = torch.tensor([[4, 5, 2]])
TINY = TransformerConfig.tiny(12)


class Rotated(DotProductAttention):
    """Another attention; its weights have the plain names and shapes."""

    def forward(self, query, key, value, mask=None):
        return super().forward(query.roll(1, -1), key, value, mask)


def changed(path, name, value):
    """A builder of models that have something else at one place."""
    def build(config):
        model = Transformer(config)
        setattr(model.get_submodule(path), name, value)
        return model
    return build


with_rotated = changed("decoder.layers.0.self_attention", "attention", Rotated())


class OtherModel(Transformer):
    pass


@pytest.mark.parametrize("build, part", [
    (with_rotated, "decoder.layers.0.self_attention.attention"), (OtherModel, "the model"),
    (changed("encoder.layers.0.residual.0", "norm", torch.nn.RMSNorm(128)),
     "encoder.layers.0.residual.0.norm"),
    (changed("decoder.layers.0.self_attention", "h", 2),  # the same shapes, cut otherwise
     "decoder.layers.0.self_attention")])
def test_a_model_is_saved_with_its_builder_or_refused(tmp_path, build, part, monkeypatch):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=f"'transformer' would not make {part}, wh.*BUILDERS"):
        save_checkpoint(tmp_path / "model", build(TINY))
    assert not (tmp_path / "model").exists()
    monkeypatch.setitem(BUILDERS, "mine", build)
    model = build_model(TINY, "mine").eval()
    save_checkpoint(tmp_path / "model", model)
    again = load_checkpoint(tmp_path / "model")
    assert torch.equal(again.model(IDS, IDS), model(IDS, IDS)) and again.info == {}
    assert builder_of(again.model) == "mine" and foreign_part(again.model) is None
    save_checkpoint(tmp_path / "again", again.model)  # the name goes on
    monkeypatch.delitem(BUILDERS, "mine")
    with pytest.raises(ValueError, match="again, file info.json: the builder 'mine' is not in"):
        load_checkpoint(tmp_path / "again")
    given = load_checkpoint(tmp_path / "again", build=build).model
    assert torch.equal(given(IDS, IDS), model(IDS, IDS))


def test_a_part_replaced_after_the_model_was_built_by_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(BUILDERS, "mine", with_rotated)
    model = build_model(TINY, "mine")
    model.encoder.layers[1].feed_forward = torch.nn.Identity()
    with pytest.raises(ValueError, match="'mine' would not make encoder.layers.1.feed_forward"):
        save_checkpoint(tmp_path / "model", model)
    with pytest.raises(ValueError, match="no builder 'other', only transformer, marian-.*mine"):
        build_model(TINY, "other")


def test_a_run_of_an_unnamed_model_is_kept_and_goes_on_but_not_loaded_as_another(tmp_path):
    pairs = [([4, 5], [5, 4]), ([6], [7, 8])] * 4
    for steps in (1, 2):
        model = with_rotated(TINY)
        config = TrainingConfig(steps=steps, max_tokens=40, warmup=2, save_every=1)
        log = train(model, pairs, pairs[:2], config, False, tmp_path / "run")
    assert log[-1]["step"] == 2
    newest = run_checkpoints(tmp_path / "run")[-1]
    with pytest.raises(ValueError, match="the builder 'unnamed' is not in BUILDERS"):
        load_checkpoint(newest)
    again = load_checkpoint(newest, build=with_rotated).model
    assert torch.equal(again(IDS, IDS), model.eval()(IDS, IDS))
