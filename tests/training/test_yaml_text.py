"""YAML whose values are others than they seem, and files that cannot be read."""

from pathlib import Path

import pytest
import yaml

from gates.errors import GateError
from training.config.yaml_text import check_yaml, load_yaml, read_yaml


def test_values_and_aliases_are_read():
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

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(GateError, match=r"latin.yaml' cannot be read: Permission denied"):
        read_yaml(tmp_path / "latin.yaml", "the configuration")


@pytest.mark.parametrize("text", ["model:\n  budget: 3\n  budget: 5\n", "a: [{b: 1, b: 2}]", "a: 1\nb: 2\na: 1\n"])
def test_a_key_that_is_there_twice_is_refused(text):
    with pytest.raises(GateError, match=r"twice within what begins at line [12]; leave one of them"):
        check_yaml(text, "the configuration")
    check_yaml("a: {b: 1}\nc: &x {b: 1}\nd: *x\ne: {<<: *x}\n", "the configuration")
