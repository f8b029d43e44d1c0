"""YAML of a few bytes that would take all memory or time."""

from pathlib import Path

import pytest
import yaml

from gates.errors import GateError
from training.commands.table import run_command
from training.config.comparison import split
from training.config.yaml_text import DEEPEST, LONGEST, MOST, check_yaml, load_yaml, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
BEYOND = {
    "billion laughs": (LAUGHS, f"more than {MOST:,} values"),
    "too long": (f"name: {'x' * LONGEST}", f"more than {LONGEST:,} characters"),
    "too deep": ("a: " + "[" * 20_000 + "]" * 20_000, f"more than {DEEPEST} deep"),
    "within itself": ("model: &m\n  freeze: *m\n", "contains itself"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_configuration_beyond_all_limits_is_one_sentence(name, tmp_path, capsys):
    text, said = BEYOND[name]
    file, outer = tmp_path / "inner.yaml", tmp_path / "outer.yaml"
    file.write_text(text)
    with pytest.raises(GateError, match=said):
        read_yaml(file, "the configuration")
    outer.write_text(f"data: {file}\n")
    for config in (file, outer):
        assert run_command("fit", ["--config", str(config)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_list_of_a_comparison_has_the_same_limits():
    with pytest.raises(GateError, match=f"more than {DEEPEST} deep"):
        split("[" * 100 + "]" * 100)


def test_what_is_within_the_limits_is_read(tmp_path):
    text = "base: &base {a: 1, b: [2, 3]}\nother: *base\n"
    assert load_yaml(text, "it") == {"base": {"a": 1, "b": [2, 3]}, "other": {"a": 1, "b": [2, 3]}}
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: [", "it")


def test_a_file_that_is_none_or_cannot_be_read_is_named(tmp_path, monkeypatch):
    for path, said in (("/dev/zero", "no regular file"), (tmp_path, "no regular file"), (tmp_path / "none", "does not exist")):
        with pytest.raises(GateError, match=said):
            read_yaml(path, "the configuration")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(GateError, match="not UTF-8"):
        read_yaml(tmp_path / "latin.yaml", "the configuration")

    def refused(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(GateError, match=r"latin.yaml' cannot be read: Permission denied"):
        read_yaml(tmp_path / "latin.yaml", "the configuration")


@pytest.mark.parametrize("text", ["model:\n  budget: 3\n  budget: 5\n", "a: [{b: 1, b: 2}]", "a: 1\nb: 2\na: 1\n"])
def test_a_key_that_is_there_twice_is_refused(text):
    with pytest.raises(GateError, match=r"twice within what begins at line [12]; leave one of them"):
        check_yaml(text, "the configuration")
    check_yaml("a: {b: 1}\nc: &x {b: 1}\nd: *x\ne: {<<: *x}\n", "the configuration")
