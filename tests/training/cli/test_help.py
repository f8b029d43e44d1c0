"""Help that fits a person, and help that has everything."""

from dataclasses import fields

import pytest

from training.cli.command_line import COMPARISON_GROUPS, GROUPS, build_parser
from training.cli.help import IN_ORDER_OF_USE, kind_of, options_of_group
from training.commands.table import run_command
from training.config import PrunerOptions
from training.config.data import KINDS, Text

OF_THE_PARSER = ("--help", "--print_config", "--data.help", "--model", "--trainer", "--wandb")


@pytest.mark.parametrize("group", [group for group, _ in (*GROUPS, *COMPARISON_GROUPS)] + list(KINDS.values()))
def test_every_option_says_what_it_is_for(group):
    options = {option.name: option for option in options_of_group(group)}
    assert list(options) == [field.name for field in fields(group) if field.init]
    for option in options.values():
        assert len(option.text) > 10
        assert option.kind != "VALUE"


def test_defaults_and_kinds_are_those_of_the_fields():
    shown = {option.name: option for option in options_of_group(PrunerOptions, "model.")}
    assert (shown["model.budget"].kind, shown["model.budget"].default) == ("N|X|{..}|auto|12ms|0.7x", "0.25")
    assert (shown["model.backbone"].kind, shown["model.backbone"].default) == ("NAME|PATH", "none")
    assert (shown["model.pipelined"].kind, shown["model.pipelined"].default) == ("true|false", "none")
    assert shown["model.unit"].kind == "head|group"
    assert {option.name: option.default for option in options_of_group(Text)}["batch_size"] == "32"
    assert kind_of(list[int] | None) == "[..]"


def test_the_short_help_has_some_thirty_options_that_exist(capsys):
    chosen = [name for names in IN_ORDER_OF_USE.values() for name in names]
    assert 25 <= len(chosen) <= 40
    assert run_command("fit", ["--help"]) == 0
    short = capsys.readouterr().out
    assert all(f"--{name} " in short for name in chosen)
    assert len(short.splitlines()) < 100
    assert run_command("fit", ["--help-all"]) == 0
    everything = capsys.readouterr().out
    for action in build_parser()._actions:
        for option in action.option_strings:
            if option.startswith("--") and option not in OF_THE_PARSER and not option.endswith("+"):
                assert f"  {option} " in everything, option
    for kind in KINDS.values():
        assert all(f"  --data.{field.name} " in everything for field in fields(kind))
