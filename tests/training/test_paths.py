"""Options that name a place on this machine: the home directory, and addresses of other machines."""

import os
import re
from typing import get_args

import pytest
import yaml

from gates.errors import GateError
from training.cli.command_line import hints_of
from training.commands.table import COMMANDS, read, run_command
from training.config import Setup
from training.config.paths import HubName, LocalPath, local_path

ELSEWHERE = ["s3://bucket/a", "gs://bucket/a", "hdfs://host/a", "https://host/a", "http://host/a", "file:///a", "s3:/bucket/a"]
FILES = ["--data.train_file", "train.csv", "--data.test_file", "test.csv"]
MODEL = ["--model.backbone", "model"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home directory of its own, and an empty working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_the_home_directory(home, monkeypatch):
    assert local_path("~/a") == str(home / "a")
    assert local_path("~") == str(home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where no home directory is known
    with pytest.raises(GateError, match="'~/a' is not on this machine"):
        local_path("~/a")


def test_a_run_directory_in_a_configuration(home):
    with open("run.yaml", "w") as file:
        yaml.dump({"run_dir": "~/runs/one", "model": {"backbone": "~/model"}}, file)
    options = read("fit", ["--config", "text.yaml", "--config", "run.yaml", *FILES]).options
    setup = Setup.of(options)
    assert setup.run.run_dir == str(home / "runs" / "one")
    assert setup.model.backbone == str(home / "model")
    assert type(setup.run.run_dir) is str


def test_a_home_directory_within_lists_and_names(home):
    options = read("fit", [*MODEL, *FILES, "--data.more_tests", "{news: ~/news.csv}", "--data.tokenizer=~/tokenizer"]).options
    assert options.data.init_args.more_tests == {"news": str(home / "news.csv")}
    assert options.data.init_args.tokenizer == str(home / "tokenizer")
    assert read("summary", ["~/a", "b"]).options.runs == [str(home / "a"), "b"]


@pytest.mark.parametrize(
    ("command", "arguments", "shown", "expected"),
    [
        ("fit", [*MODEL, *FILES, "--run_dir"], "--run_dir", "a path on this machine"),
        ("fit", [*FILES, "--model.backbone"], "--model.backbone", "a hub name or a path on this machine"),
        ("compare", [*MODEL, *FILES, "--experiments"], "--experiments", "a path on this machine"),
        ("sweep", [], "FILE", "a path on this machine"),
    ],
)
def test_a_place_elsewhere_is_refused_before_anything_is_made(command, arguments, shown, expected, capsys):
    place = ELSEWHERE[0]
    assert run_command(command, [*arguments, place]) == 2
    assert capsys.readouterr().err == f"error: {shown} is {place}, which it does not take; expected {expected}\n"
    assert os.listdir() == []


def test_every_option_that_names_a_place_is_of_such_a_type():
    """By the ends of the options' names."""
    names = re.compile(
        r"(?:^|\.)runs?$|(?:^|[._])(dir|file|folder|output|tokenizer|dataset|backbone|path|table|source|target|json)$"
    )
    for command, of_command in COMMANDS.items():
        for name, hint in hints_of(of_command.parser()).items():
            if names.search(name):
                assert {hint, *get_args(hint)} & {LocalPath, HubName}, (command, name, hint)
