"""Which configuration and which kind of data a command line implies."""

import pytest
import yaml

from training.cli.command_line import CONFIGS, default_config, shipped, with_config
from training.commands.table import read

FILES = ["--data.train_file", "a.csv", "--data.test_file", "b.csv"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "default"),
        (["--model.budget", "5"], "default"),
        (["--model.backbone", "x"], "text"),
        (["--data.train_file=a.csv"], "text"),
        (["--data.dataset", "glue"], "text"),
        (["--data.train_source", "a.en", "--model.backbone", "x"], "translation"),
        (["--data", "Documents", "--data.train_file", "a.txt"], "causal_lm"),
        (["--seed", "1", "--data=SyntheticDocuments"], "synthetic_causal_lm"),
        (["--data", "Text", "--data.train_file", "a.csv"], "text"),
    ],
)
def test_the_configuration_follows_from_what_is_named(arguments, name):
    assert with_config(arguments) == ["--config", str(CONFIGS / f"{name}.yaml"), *arguments]
    assert default_config([argument.split("=")[0] for argument in arguments]).is_file()


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_files_imply_their_kind_where_the_configuration_says_nothing_of_data(tmp_path, form):
    (tmp_path / "model.yaml").write_text("model: {backbone: a/model}\n")
    given, config = [part.format(tmp_path / "model.yaml") for part in form], ["--config", str(tmp_path / "model.yaml")]
    assert with_config(["--seed", "1", *given, *FILES]) == [*config, "--data", "Text", "--seed", "1", *FILES]
    assert with_config([*given, "--data", "ParallelText", *FILES]) == [*config, "--data", "ParallelText", *FILES]
    line = read("fit", [*given, *FILES])
    assert line.options.data.class_path == "training.config.data.Text"
    assert line.options.data.init_args.train_file == "a.csv"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_configuration_trains_the_heads_of_other_methods_unless_a_user_says_so(path):
    assert yaml.safe_load(path.read_text()).get("compare", "posthoc") != "full"


def test_configurations_that_are_shipped_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("configs/text.yaml", "text.yaml", "configs/sweeps/small.yaml"):
        assert shipped(name) == str(CONFIGS / name.removeprefix("configs/"))
    (tmp_path / "text.yaml").write_text("name: mine\n")
    assert [shipped(name) for name in ("text.yaml", "nowhere.yaml")] == ["text.yaml", "nowhere.yaml"]
