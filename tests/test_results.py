"""Results know their code: fields, digests against git's history, a planted change, what README and pages say of them."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from helpers import ROOT

from annotated import files
from annotated.checkpoints import load_checkpoint, save_checkpoint
from annotated.files import changed_modules, code_digest, made_at, module_digests, provenance, read_result
from annotated.transformer import Transformer, TransformerConfig

sys.path.insert(0, "tools")
import keep  # noqa: E402

import results  # noqa: E402

FILES = results.files()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A checkout of its own to plant changes in."""
    shutil.copytree(ROOT / "annotated", tmp_path / "annotated", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_names_its_revision_and_its_modules(path):
    facts = results.facts_of(path)
    assert re.fullmatch(r"[0-9a-f]{40}", facts["revision"]) and facts["modules"]
    assert all(re.fullmatch(r"(annotated|tools|benchmarks|experiments)/\w+\.py", name) for name in facts["modules"])
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in facts["modules"].values())


def test_digests_are_those_of_the_revision():
    """As far as this clone has the history; what is recorded cannot be other code than that of the revision."""
    recorded = {(facts["revision"], name, digest) for facts in map(results.facts_of, FILES) for name, digest in facts["modules"].items()}
    wanted = "".join(f"{revision}:{name}\n" for revision, name, _ in recorded)
    answer = subprocess.run(["git", "cat-file", "--batch"], cwd=ROOT, input=wanted.encode(), capture_output=True).stdout
    place, checked = 0, 0
    for revision, name, digest in recorded:
        head, _, rest = answer[place:].partition(b"\n")
        place += len(head) + 1
        if head and not head.endswith(b"missing"):
            size = int(head.split()[-1])
            assert code_digest(rest[:size].decode("utf-8")) == digest, f"{name} is other code at {revision[:7]}"
            place, checked = place + size + 1, checked + 1
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not checked and shallow == "true":
        pytest.skip("a shallow clone lacks the revisions to compare with: git fetch --unshallow")
    assert checked or not (ROOT / ".git").exists()


def test_a_planted_change_is_listed_and_a_comment_is_not(copy):
    facts = provenance("annotated/decoding.py")
    assert not changed_modules(facts) and "by the present code" in made_at(facts)
    module = copy / "annotated" / "masking.py"
    text = module.read_text(encoding="utf-8")
    module.write_text(text.replace('"""', '"""Other words: ', 1) + "\n# a comment\n", encoding="utf-8")
    assert not changed_modules(facts)
    module.write_text(text.replace(".tril()", ".tril(1)"), encoding="utf-8")
    assert changed_modules(facts) == ["annotated/masking.py"] and "before the present code" in made_at(facts)
    (copy / "annotated" / "attention.py").unlink()
    assert changed_modules(facts) == ["annotated/attention.py", "annotated/masking.py"]


def test_the_planted_change_reaches_the_rows_and_the_table(copy, monkeypatch, tmp_path):
    path = ROOT / "results" / "kept.json"
    facts = provenance("annotated/feed_forward.py")
    monkeypatch.setattr(results, "facts_of", lambda path: {**facts, "revision": "1234567" + 33 * "0"})
    assert results.row(path).endswith("1234567  by the present code") and results.made("[figures](./toy.json)") == "`1234567`"
    module = copy / "annotated" / "feed_forward.py"
    module.write_text(module.read_text(encoding="utf-8") + "\nEXTRA = 1\n", encoding="utf-8")
    assert results.row(path).endswith("1234567  ? commits since, changed: annotated/feed_forward.py")
    assert results.made("[figures](./toy.json)") == "`1234567`, older than the code"
    assert results.marked("| a | [f](./toy.json) | |\n| b | c | |\n") == \
        "| a | [f](./toy.json) | `1234567`, older than the code |\n| b | c | |\n"


def test_digests_follow_imports_and_nothing_else():
    sources = {"annotated/a.py": '"""A."""\nfrom .b import x\nimport json\n', "annotated/b.py": "def f():\n    from annotated.c import y\n",
               "annotated/c.py": "from . import a\n", "annotated/d.py": "", "tools/t.py": "from annotated.d import z\n"}
    assert list(module_digests(["annotated/a.py"], sources.get)) == ["annotated/a.py", "annotated/b.py", "annotated/c.py"]
    assert list(module_digests(["tools/t.py"], sources.get)) == ["tools/t.py"]  # a script's own imports are named with it
    found = module_digests(["annotated/b.py"], sources.get)
    assert found["annotated/b.py"] == hashlib.sha256(b"def f():\n    from annotated.c import y").hexdigest()


def test_provenance_names_the_commit():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("not a git checkout")
    assert provenance("annotated/schedule.py")["revision"] == head.stdout.strip()


def test_stamp_names_the_present_code(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"claim": "C22", "recorded_afterwards": True}))
    results.stamp(path, "annotated/batches.py")
    facts = json.loads(path.read_text())
    assert facts["claim"] == "C22" and "annotated/batches.py" in facts["modules"] and not changed_modules(facts)
    assert "recorded_afterwards" not in facts


def test_the_table_says_at_which_revision_its_figures_were_made():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert results.marked(text) == text, "run `make results`: it brings the column `made at` of results/README.md up to date"
    linked = {name for row in text.splitlines() for name in results.LINK.findall(row)}
    assert linked >= {"toy.json", "variations", "parsing_gum.json", "multi30k_record", "bench"}


def test_kept_models_are_small_can_be_loaded_and_have_a_card():
    folders = sorted(path for path in keep.PLACE.iterdir())
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert {folder.name for folder in folders} <= keep.MODELS.keys() and folders
    assert max(sizes) <= keep.MOST and sum(sizes) <= keep.MOST_TOGETHER
    for folder in folders:
        saved, card = load_checkpoint(folder), (folder / "README.md").read_text(encoding="utf-8")
        _, result, told = keep.MODELS[folder.name]
        facts = read_result(ROOT / "results" / result)
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
    chosen = json.loads((ROOT / "results/multi30k_record/choices.json").read_text(encoding="utf-8"))["choices"]
    best = max(chosen, key=lambda choice: choice["bleu"])
    scored = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "results/multi30k_record").glob("*/seed*/test.json")]
    assert scored
    for facts in scored:
        assert facts["decoding"] == f"beam {best['beam']}, alpha {best['alpha']}"
        assert len(facts["averaged_checkpoints"]) == best["checkpoints"] and facts["sentences"] == 1000


def test_without_git_the_revision_is_unknown_and_said_in_full(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    facts = provenance("annotated/schedule.py")
    assert facts["revision"] is None and made_at(facts).startswith("made at an unknown revision, ")
