"""Results name their revision, and README, results/README.md and the cards say of them what they hold."""

import json
import math
import re
import statistics
import subprocess
import sys
from copy import deepcopy as copy_of
from dataclasses import asdict

import pytest
import torch
from helpers import ROOT

from annotated.checkpoints import load_checkpoint, save_checkpoint
from annotated.fast import prepare
from annotated.files import made_at, provenance, read_json, read_json_lines
from annotated.transformer import Transformer, TransformerConfig
from annotated.variations import compare, read_results, rows

sys.path[:0] = ["experiments", "tools"]
import keep  # noqa: E402
import kill_loop  # noqa: E402

import results  # noqa: E402

FILES = results.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_names_its_revision(path):
    assert all(re.fullmatch(r"[0-9a-f]{40}", facts["revision"]) for facts in results.facts_of(path))


def test_provenance_names_the_commit():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("not a git checkout")
    facts = provenance()
    assert facts["revision"] == head.stdout.strip() and made_at(facts) == f"made at {facts['revision'][:7]}"


def test_the_table_says_at_which_revision_its_figures_were_made():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert results.marked(text) == text, "run `make results`: it brings the column `made at` of results/README.md up to date"
    linked = {name for row in text.splitlines() for name in results.LINK.findall(row)}
    assert linked >= {"toy.json", "table3_multi30k.jsonl", "parsing_gum.json", "multi30k_record.jsonl", "bench"}


def test_kept_models_are_small_can_be_loaded_and_have_a_card():
    folders = sorted(path for path in keep.PLACE.iterdir())
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert {folder.name for folder in folders} <= keep.MODELS.keys() and folders
    assert max(sizes) <= keep.MOST and sum(sizes) <= keep.MOST_TOGETHER
    for folder in folders:
        saved, card = load_checkpoint(folder), (folder / "README.md").read_text(encoding="utf-8")
        _, result, told = keep.MODELS[folder.name]
        facts = keep.measured(ROOT / "results" / result)
        assert saved.info["log"] == facts["log"]
        assert saved.info["training"] == facts["training"] and asdict(saved.model.config) == facts["model"]
        assert f"{facts['parameters']:,} parameters" in card and f"{facts['log'][-1]['step']:,} updates" in card
        assert all(words in card for words in told.values()) and f"../../{result}" in card


def test_a_model_that_is_kept_comes_back_rounded_and_a_large_one_is_refused(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(50, N=1, d_model=8, d_ff=16, h=2)).eval()
    info = {"training": {"steps": 5, "seed": 0}, "averaged": [], "log": [{"step": 3}]}
    save_checkpoint(tmp_path / "trained", model, **info)
    told = {"purpose": "a test", "command": "make new", "license": "mit", "language": "en", "data": "nothing"}
    monkeypatch.setitem(keep.MODELS, "new", ("trained", "new.json", told))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new.json").write_text('{"machine": "this one"}')
    for _ in "ab":  # the second takes the place of the first
        keep.keep("new", tmp_path / "models", tmp_path)
    kept = load_checkpoint(tmp_path / "models" / "new")
    for name, weight in model.state_dict().items():
        assert torch.equal(kept.model.state_dict()[name], weight.half().float())
    assert kept.info == info and "3 updates" in (tmp_path / "models/new/README.md").read_text()
    monkeypatch.setattr(keep, "MOST", 1000)
    with pytest.raises(ValueError, match="the model new has .* keep a smaller one"):
        keep.keep("new", tmp_path / "models", tmp_path)
    assert load_checkpoint(tmp_path / "models" / "new")


def test_the_table_has_the_toy_scores_of_the_file():
    facts = json.loads((ROOT / "results" / "toy.json").read_text(encoding="utf-8"))
    row = next(line for line in (ROOT / "results" / "README.md").read_text(encoding="utf-8").splitlines() if "./toy.json" in line)
    assert f"BLEU {facts['scores']['test']['bleu']:.1f} on `test`, {facts['scores']['novel']['bleu']:.1f} on `novel`" in row
    assert f"{facts['parameters']:,} parameters" in row and f"{facts['training']['steps']:,} updates" in row
    assert facts["training_seconds"] is None or f"{facts['training_seconds']:.0f} s of training" in row


def test_every_row_of_the_record_was_scored_as_was_chosen_on_val():
    chosen = read_json(ROOT / "results/multi30k_choices.json")["choices"]
    best = max(chosen, key=lambda choice: choice["bleu"])
    scored = [run for run in read_json_lines(ROOT / "results/multi30k_record.jsonl") if run["split"] == "test"]
    assert scored
    for facts in scored:
        assert facts["decoding"] == f"beam {best['beam']}, alpha {best['alpha']}"
        assert len(facts["averaged_checkpoints"]) == best["checkpoints"] and facts["sentences"] == 1000


def signed(number, digits=2):
    """A number as the tables print it: with a true minus sign."""
    return f"{number:.{digits}f}".replace("-", "−")


def row_of(readme, words):
    """The row of a table in README.md or results/README.md that begins with these words."""
    return next(line for line in (ROOT / readme).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {words}"))


def test_both_readmes_tell_the_worse_training_of_the_toy_model_too():
    facts = json.loads((ROOT / "results/toy.json").read_text(encoding="utf-8"))
    scores = [facts["scores"][split]["bleu"] for split in ("test", "novel")]
    for other in facts["other_trainings"]:
        scores += other["bleu"].values()
    for readme in ("README.md", "results/README.md"):
        row = row_of(readme, "the book's model")
        assert "the better of two trainings" in row and len(facts["other_trainings"]) == 1
        assert all(re.search(rf"\b{score:.1f}\b", row) for score in scores)


def test_the_rows_of_multi30k_tell_the_error_of_the_test_set_the_looks_at_it_and_the_hours_of_the_teachers():
    sure = read_json(ROOT / "results/multi30k_intervals.json")
    scored = [run for run in read_json_lines(ROOT / "results/multi30k_record.jsonl") if run["split"] == "test"]
    rows = {run["row"] for run in scored}
    assert sure["rows"].keys() == rows and len(rows) == 8 and sure["draws"] >= 1000
    for name, row in sure["rows"].items():
        ours = [run["entries"]["multi30k"]["score"] for run in scored if run["row"] == name]
        assert row["scores"] == pytest.approx(ours) and row["mean"] == pytest.approx(sum(ours) / len(ours))
        assert row["low"] < min(ours) and row["high"] > max(ours), "a test set of 1,000 sentences errs more than seeds"
    taught, gain = sure["rows"]["taught"], sure["differences"]["taught minus to-the-end"]
    assert gain["mean"] == pytest.approx(taught["mean"] - sure["rows"]["to-the-end"]["mean"])
    short, row = (row_of(readme, "Multi30k English to German, as" if readme == "README.md" else "Multi30k, test_2016_flickr, as")
                  for readme in ("README.md", "results/README.md"))
    words = (ROOT / "results/README.md").read_text(encoding="utf-8")
    section = words.split("## Multi30k as the literature scores it")[1].split("\n## ")[0]
    assert f"between {taught['low']:.1f} and {taught['high']:.1f}" in short and f"{taught['mean']:.1f} for models" in short
    assert f"its gain over the three, {gain['mean']:.2f}, between {signed(gain['low'])} and {signed(gain['high'])}" in short
    assert f"{taught['low']:.1f} to {taught['high']:.1f}, its gain over the teachers +{gain['mean']:.2f} ({signed(gain['low'])} to" in row
    for name, told in (("smaller-start", "smaller start"), ("to-the-end", "to the last update"), ("fp32", "fp32"), ("taught", "taught")):
        assert f"{told} {sure['rows'][name]['low']:.1f} to {sure['rows'][name]['high']:.1f}" in section
        if name != "taught":
            by = sure["differences"][f"taught minus {name}"]
            assert f"+{by['mean']:.2f} ({signed(by['low'])} to {signed(by['high'])})" in section
    for text in (short, section):
        assert re.search("(?i)eight configurations", text) and re.search("adopted after the printed one had failed", text)
    hours = {name: [run["training_seconds"]["processor"] / 3600 for run in scored if run["row"] == name]
             for name in ("to-the-end", "taught")}
    teachers = sum(hours["to-the-end"])
    assert f"{min(hours['taught']):.1f} to {max(hours['taught']):.1f}, and {teachers:.1f} for its three teachers |" in section
    assert f"{teachers + min(hours['taught']):.1f} to {teachers + max(hours['taught']):.1f} hours, or all three together " \
           f"{teachers + sum(hours['taught']):.1f}" in section


@pytest.mark.parametrize("processes", [1, 2])
def test_kills_were_aimed_and_the_table_tells_where_they_came(processes):
    facts = json.loads((ROOT / f"results/kill_loop_{processes}.json").read_text(encoding="utf-8"))
    assert facts["kills"] == len(facts["each"]) == 20 and facts["equal to the last bit"] and facts["processes"] == processes
    for place in kill_loop.PLACES:
        assert facts[f"of them {place}"] == sum(kill["place"] == place for kill in facts["each"]) == 5
    planned = kill_loop.plan(20, processes, facts["seed"])
    assert [(kill["place"], kill["process"]) for kill in facts["each"]] == [(kill.place, kill.rank) for kill in planned]
    saved = [0, *(kill["newest update saved"] for kill in facts["each"])]
    for kill, before, after in zip(planned, saved, saved[1:], strict=False):  # each was killed no sooner and no later than it was to be
        lost = kill.place == kill_loop.WRITING
        assert after - before == kill_loop.EACH * (kill.saves - lost)
    row = row_of("results/README.md", "runs killed with `kill -9` 20 times")
    assert "by one and by two processes 5 kills each before anything was saved" in row and "13 and 11 of 20" in row


def test_the_table_has_the_width_of_the_noise_among_the_changes_since_the_paper():
    """With t of the 16 degrees of freedom of eight variants of three seeds, 3.54, computed by hand."""
    runs = json.loads((ROOT / "results/since_the_paper.json").read_text(encoding="utf-8"))["runs"]
    row, bands = row_of("results/README.md", "eight versions of a small model on `toy`"), {}
    for part in ("short", "long"):
        groups = {}
        for run in runs:
            groups.setdefault(run["variant"], []).append(run[part]["bleu"])
        assert len(groups) == 8 and {len(group) for group in groups.values()} == {3}
        error = math.sqrt(statistics.fmean(statistics.variance(group) for group in groups.values()) * 2 / 3)
        bands[part] = 3.544 * error, 3 * error
        assert max(statistics.fmean(group) for group in groups.values()) < statistics.fmean(groups["as printed"]) + bands[part][0]
    assert f"of no change could a gain be seen: noise is ± {bands['short'][0]:.1f} BLEU on short sentences, ± {bands['long'][0]:.1f}" in row
    assert f"(± {bands['short'][1]:.1f} and ± {bands['long'][1]:.1f} BLEU)" in row


def test_the_section_on_table_3_has_the_bands_and_the_counts_of_the_files():
    text = (ROOT / "results/README.md").read_text(encoding="utf-8").split("## Table 3")[1].split("\n## ")[0]
    lines = {scale: compare(rows(scale, found[0]["model"]["vocab_size"]), found)[0][1:] for scale, found in (
        (scale, read_results(ROOT / f"results/table3_{scale}.jsonl")) for scale in ("multi30k-long", "toy-long", "toy-few"))}
    band = {scale: some[0].band for scale, some in lines.items()}
    tell = {scale: {m: [line.row.name for line in some if line.verdict[m] == "holds"] for m in some[0].verdict}
            for scale, some in lines.items()}
    assert f"mean of two runs, noise ± {band['multi30k-long']['loss']:.3f}" in text
    assert f"By BLEU (± {band['multi30k-long']['bleu']:.1f}) d_k/4 is worse" in text and tell["multi30k-long"]["bleu"] == ["B-dk16"]
    assert tell["multi30k-long"]["loss"] == ["B-dk16", "C-N2", "C-dff1024", "D-P0.0"]
    assert all(line.row.config.N <= 3 and line.parameters <= 2.1e6 for line in lines["multi30k-long"]), "none is bigger: the text says so"
    assert "whether bigger is better than base was not tried" in text
    assert f"together by {band['toy-long']['exact']:.1f} or {band['toy-long']['bleu']:.1f}" in text
    for place in ("By BLEU 5 rows hold", "By perplexity 8 hold"):
        assert place in text
    assert [len(tell["toy-long"][m]) for m in ("bleu", "loss")] == [5, 8] and tell["toy-long"]["exact"] == ["A-h32", "C-N2", "C-dmodel256"]
    assert f"± {band['toy-few']['exact']:.1f} points and ± {band['toy-few']['bleu']:.1f} BLEU" in text
    assert tell["toy-few"]["exact"] == tell["toy-few"]["bleu"] == ["D-P0.0"]


def test_what_the_readme_says_of_prepare_is_so():
    """The same function up to rounding, without dropout the same gradients; with it other masks from the same seed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "with the same numbers" not in text and "with dropout it draws other masks from the same seed" in text
    for dropout in (0.0, 0.1):
        torch.manual_seed(0)
        plain = Transformer(TransformerConfig(300, N=1, d_model=256, d_ff=1024, h=4, dropout=dropout))
        quick, ids = prepare(copy_of(plain)), torch.randint(4, 300, (32, 32))
        found = []
        for model in (plain, quick):
            torch.manual_seed(1)
            loss = torch.nn.functional.cross_entropy(model.train()(ids, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            slopes = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
            with torch.no_grad():
                found.append((model.eval()(ids, ids), slopes))
        (logits, slopes), (ours, same) = found
        # float32: logits up to 5 after some 250 roundings in a chain, 2^-24 each: 7e-5.
        assert torch.allclose(logits, ours, rtol=0, atol=1e-4), "without dropout's draws it is one function"
        apart = max(((slopes[name] - same[name]).norm() / slopes[name].norm()).item() for name in slopes)
        assert apart < 1e-4 if dropout == 0 else apart > 0.01


def test_without_git_the_revision_is_unknown_and_said_in_full(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    facts = provenance()
    assert facts["revision"] is None and made_at(facts) == "made at an unknown revision"
