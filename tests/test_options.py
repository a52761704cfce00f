"""The options of the commands: each field has its flag and its words; presets give way to flags."""

import re
from dataclasses import fields

import pytest

from annotated import TrainingConfig, TransformerConfig, cli
from annotated.options import command_line, train_options
from annotated.training import loop


def test_help_says_what_every_field_means(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert stopped.value.code == 0 and max(map(len, text.splitlines()[1:])) <= 100
        assert text.startswith(f"usage: annotated {command} [")
        lines = [" ".join(line.strip("│ ").split()) for line in text.splitlines()]
        options = [line for line in lines if line.startswith("--")]
        assert len(options) >= 2
        said = re.sub(r"\s+", " ", text.replace("│", " "))
        for option in options:
            flag = option.split()[0]
            after = said[said.index(flag + " " if flag + " " in said else flag) :]
            words = re.sub(r"--\S+|\{.*?\}(\|\w+)?|\b[A-Z]+\b", "", after)[:200].strip()
            assert words and not words.startswith("(default"), f"{command} {flag}: no meaning"
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    for field in (*fields(TransformerConfig), *fields(TrainingConfig)):
        found = re.search(f"--{field.name.replace('_', '-')}[ ,]", text)
        assert bool(found) == (field.name != "pad_id"), field.name


def test_options_are_the_presets_but_for_what_is_given():
    for name, (sizes, config) in loop.PRESETS.items():
        read = train_options(["--out", "x", "--preset", name])
        assert (read.sizes, read.training) == (sizes, config)
    assert train_options(["--out", "x"]).training == loop.PRESETS["toy"][1]
    assert train_options(["multi30k", "--out", "x"]).sizes == loop.PRESETS["small"][0]
    words = "--out x --preset big --dropout 0.1 --d_ff 8 --compile --schedule noam".split()
    read = train_options(words)
    assert read.sizes == TransformerConfig.big(dropout=0.1, d_ff=8) and read.training.compile
    assert command_line("vary", ["two words"]) == "annotated vary 'two words'"
