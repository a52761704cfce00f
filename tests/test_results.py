"""Results name their revision, and README, results/README.md and the cards say of them what they hold."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

from annotated import results as written
from annotated.results import add_json_line, counting_seconds, describe_machine, made_at, provenance, read_json, read_json_lines
from annotated.training.checkpoints import load_checkpoint

sys.path[:0] = ["experiments", "tools"]
import keep  # noqa: E402

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


def test_the_machine_is_named_with_its_cores_and_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        words = describe_machine()
    finally:
        torch.set_num_threads(before)
    assert words.endswith(f", {os.cpu_count()} cores, 3 thread(s), torch {torch.__version__}") and not words.startswith(",")


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is no JSON"):
        read_json_lines(tmp_path / "log.jsonl")
    (tmp_path / "one.json").write_text('{"bleu": 1.')
    with pytest.raises(ValueError, match=r"one\.json is no JSON"):
        read_json(tmp_path / "one.json")


def test_lines_that_many_add_at_once_all_come_and_replace_their_like(tmp_path):
    path = tmp_path / "some" / "runs.jsonl"
    for value in (1, 2):
        threads = [threading.Thread(target=add_json_line, args=(path, {"row": row, "seed": seed, "value": value}, ("row", "seed")))
                   for row in "abcd" for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = sorted((line["row"], line["seed"], line["value"]) for line in read_json_lines(path))
        assert found == [(row, seed, value) for row in "abcd" for seed in range(5)]


def test_seconds_of_all_starts_are_added_up(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(written, "time", SimpleNamespace(time=lambda: clock.now, process_time=lambda: clock.now / 2))
    for start in (1, 2, 3):
        with counting_seconds(tmp_path / "run") as seconds:
            clock.now += 8
            assert seconds() == {"wall": 8.0 * start, "processor": 4.0 * start, "starts": start}
        clock.now += 1000  # between two starts nothing counts
    assert json.loads((tmp_path / "run" / "seconds.json").read_text())["starts"] == 3
