"""Results name their revision, and README, results/README.md and the cards say of them what they
hold.
"""

import re
import subprocess
from dataclasses import asdict
from types import SimpleNamespace

import keep
import pytest
from helpers import ROOT

import results
from annotated import results as written
from annotated.results import counting_seconds, made_at, provenance, read_json, read_json_lines
from annotated.training.checkpoints import load_checkpoint

FILES = results.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_names_its_revision(path):
    records = results.load_records(path)
    assert all(re.fullmatch(r"[0-9a-f]{40}", record["revision"]) for record in records)


def test_provenance_names_the_commit_and_changes_to_it(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=b", *words]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    monkeypatch.setattr(written, "CHECKOUT", tmp_path)
    (tmp_path / "a.py").write_text("1")
    assert provenance()["revision"] is None
    git("init", "-q"), git("add", "."), git("commit", "-q", "-m", "a")
    facts = provenance()
    assert facts == {"revision": git("rev-parse", "HEAD"), "date": facts["date"]}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", facts["date"])
    (tmp_path / "a.py").write_text("2")
    assert provenance() == facts | {"uncommitted changes": True}
    assert made_at(facts) == f"made at {facts['revision'][:7]}"


def test_the_table_says_at_which_revision_its_figures_were_made():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert results.update_table(text) == text, "run `make results`: it brings `made at` up to date"
    linked = {name for row in text.splitlines() for name in results.LINK.findall(row)}
    assert linked >= {"toy.json", "table3_multi30k.jsonl", "parsing_gum.json",
                      "multi30k_record.jsonl", "bench"}


def test_kept_models_are_small_can_be_loaded_and_have_a_card():
    folders = sorted(path for path in keep.FOLDER.iterdir())
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert {folder.name for folder in folders} <= keep.MODELS.keys() and folders
    assert max(sizes) <= keep.MAX_BYTES and sum(sizes) <= keep.MAX_TOTAL_BYTES
    for folder in folders:
        saved, card = load_checkpoint(folder), (folder / "README.md").read_text(encoding="utf-8")
        trained, result, figures = keep.MODELS[folder.name]
        facts = keep.load_result(ROOT / "results" / result, trained)
        assert saved.info["log"] == facts["log"]
        assert saved.info["training"] == facts["training"]
        assert asdict(saved.model.config) == facts["model"]
        sizes = f"{facts['parameters']:,} parameters", f"{facts['log'][-1]['step']:,} updates"
        assert all(words in card for words in (*sizes, *figures.values(), f"../../{result}"))


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_both_readmes_tell_what_is_less_than_the_best_too(name):
    """The other training, the error of the test set, and the share of the mutants."""
    toy, multi30k, mutants = (read_json(ROOT / "results" / f"{file}.json") for file in (
        "toy", "multi30k_intervals", "mutation_score"))
    taught, gain = multi30k["rows"]["taught"], multi30k["differences"]["taught minus to-the-end"]
    scores = [toy["scores"][split]["bleu"] for split in ("test", "novel")]
    scores += [*toy["other_trainings"][0]["bleu"].values(), taught["mean"], multi30k["published"]]
    figures = [*(f"{x:.1f}" for x in scores), f"{taught['low']:.1f} to {taught['high']:.1f}",
               f"{gain['low']:.2f} to {gain['high']:.2f}".replace("-", "−"),
               str(mutants["total"]["killed"]), f"of {mutants['total']['run']}"]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [figure for figure in figures if figure not in text] == []


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is no JSON"):
        read_json_lines(tmp_path / "log.jsonl")
    (tmp_path / "one.json").write_text('{"bleu": 1.')
    with pytest.raises(ValueError, match=r"one\.json is no JSON"):
        read_json(tmp_path / "one.json")


def test_seconds_of_all_starts_are_added_up(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    times = SimpleNamespace(time=lambda: clock.now, process_time=lambda: clock.now / 2)
    monkeypatch.setattr(written, "time", times)
    for start in (1, 2, 3):
        with counting_seconds(tmp_path / "run") as seconds:
            clock.now += 8
            assert seconds() == {"wall": 8.0 * start, "processor": 4.0 * start, "starts": start}
            assert read_json(tmp_path / "run" / "seconds.json") == seconds()  # though it be killed
        clock.now += 1000  # between two starts nothing counts
