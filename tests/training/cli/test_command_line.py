"""What commands are told, and what they say to what they cannot take."""

import subprocess
import sys
from pathlib import Path

import pytest

from gates.errors import GateError
from training.commands.table import COMMANDS, load, read, run_command, usage
from training.config.data import KINDS

TEXT = ["--model.backbone", "a/model", "--data.train_file", "train.csv", "--data.test_file", "test.csv"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model.bugdet", "3"], "there is no option --model.bugdet; did you mean --model.budget?"),
        (["--budget=3"], "there is no option --budget; did you mean --model.budget?"),
        (["--model.budget", "abc"], "--model.budget is abc, which it does not take; expected a whole number, a number, one"),
        (["--model.budget"], "--model.budget needs a value"),
        (["--run.run_dir", "a"], "there is no option --run.run_dir; did you mean --run_dir?"),
        (["--compare", "fast"], "--compare is fast, which it does not take; expected none, posthoc or full"),
        (["--data", "Txt"], f"there is no kind of data 'Txt'; expected one of {', '.join(KINDS)}"),
        (
            [*TEXT, "--data.more_tests", "news.tsv"],
            "--data.more_tests is news.tsv, which it does not take; expected names with",
        ),
        (["--data", "Images", "--data.more_tests", "{a: b.txt}"], "Images data have no option more_tests; choose another kind"),
        (["--data", "Glue", "--data.subset", "cobla"], "--data.subset is cobla, which it does not take; expected cola, sst2"),
        ([*TEXT, "--data.columns", "a"], "--data.columns is a, which it does not take; expected a list"),
        (["--config", "nowhere.yaml"], "the configuration 'nowhere.yaml' does not exist; check the path"),
        (["extra"], "'extra' stands where no value is expected"),
        (["--model.budget="], "--model.budget is empty, which it does not take"),
        (["--", "--model.budget", "3"], "fit passes nothing on"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    assert run_command("fit", arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1


def test_an_option_counts_more_than_configurations_wherever_it_stands():
    for given in (["--model.budget", "3", "--config", "configs/default.yaml"], ["--config=default.yaml", "--model.budget=3"]):
        assert read("fit", given).options.model.budget == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle:\n  budget: 3\n", "there is no option modle.budget; did you mean --model.budget?"),
        ("model:\n  bugdet: 3\n", "there is no option model.bugdet; did you mean --model.budget?"),
        ("data:\n  class_path: Text\n  init_args:\n    train_fiel: 3\n", "there is no option data.train_fiel; did you mean"),
        ("a: [\n", "Problems parsing config"),
    ],
)
def test_a_mistake_in_a_configuration_is_one_line(text, said, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(text)
    assert run_command("fit", ["--config", str(tmp_path / "my.yaml")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_refuses_an_option_it_does_not_have(name, capsys):
    for option in ("--help", "--help-all"):
        assert run_command(name, [option]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: head-gates {name} ")
        assert not [word for word in ("Optional", "Literal", "Union", "VALUE") if word in shown]
    assert run_command(name, ["--no_such_thing", "1"]) == 2
    assert "there is no option --no_such_thing" in capsys.readouterr().err
    assert run_command(name, ["--version"]) == 0
    assert capsys.readouterr().out.startswith("head-gates ")
    assert f"  {name:<10} {COMMANDS[name].purpose}" in usage()


@pytest.mark.integration
def test_help_and_mistakes_load_nothing_heavy():
    """So that an answer takes less than a second."""
    lines = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["fit", "--budegt"]]
    code = (
        "import sys\nfrom training.__main__ import main\ncodes = []\n"
        f"for arguments in {lines}:\n"
        "    try:\n        codes.append(main(arguments))\n"
        "    except SystemExit as stop:\n        codes.append(stop.code)\n"
        "heavy = {'torch', 'transformers', 'pytorch_lightning', 'wandb', 'datasets', 'pandas', 'matplotlib'}\n"
        "print(codes, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[2, *[0] * (len(lines) - 2), 2]} []"


def test_a_kind_of_data_of_ones_own_has_its_own_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom training.config.data import Text\n\n\n"
        "@dataclass(frozen=True)\nclass Tweets(Text):\n    '''Tweets.\n\n    Args:\n        emoji: whether they stay.\n"
        "    '''\n\n"
        "    emoji: bool = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = read(
        "fit", [*TEXT, "--data", "mine.Tweets", "--data.emoji", "false", "--data.train_file", "a", "--data.test_file", "b"]
    )
    assert line.options.data.class_path == "mine.Tweets"
    assert line.options.data.init_args.emoji is False
    with pytest.raises(GateError, match="emojis"):
        read("fit", ["--data", "mine.Tweets", "--data.emojis", "false"])


@pytest.mark.integration
@pytest.mark.parametrize("own", ["training.py", "training/__init__.py"])
def test_the_program_runs_in_a_folder_with_a_module_of_its_name(own, tmp_path):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("raise SystemExit('the module of the user')\n")
    program = Path(sys.prefix) / "bin" / "head-gates"
    done = subprocess.run([program, "summary", "nowhere"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'nowhere' ")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_table_names_is_there(name):
    command = COMMANDS[name]
    for path in filter(None, (command.work, command.check)):
        assert callable(load(path)), path


# -- values that are not what they look like --


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--curve", "[010]"], "has 010, which YAML takes for another number; write it in decimal"),
        (["--model.budget", "1:30"], "has 1:30"),
        (["--name", "caf\udce9"], "not UTF-8 text"),
    ],
)
def test_numbers_that_look_like_others_are_refused(arguments, said):
    with pytest.raises(GateError, match=said):
        read("fit", arguments)


@pytest.mark.parametrize("text", ["seed: 010", "model: {budget: 1:30}"])
def test_so_are_those_of_a_configuration(text, tmp_path):
    (tmp_path / "my.yaml").write_text(text + "\n", encoding="utf-8")
    with pytest.raises(GateError, match="YAML takes"):
        read("fit", ["--config", str(tmp_path / "my.yaml")])


def test_a_text_may_have_any_digits():
    assert read("fit", ["--name", "2026"]).options.name == "2026"
    assert read("fit", ["--model.budget", "010"]).options.model.budget == 10
    options = read("fit", ["--wandb.tags", "['010']", "--seed", "0x10", "--name", "010"]).options
    assert (options.wandb.tags, options.seed, options.name) == (["010"], 16, "010")


@pytest.mark.parametrize("name", ["fit", "compare"])
def test_neither_beginnings_of_names_nor_whole_groups_are_options(name):
    for argument in ("--model.bud", "--see", "--model.freez"):
        with pytest.raises(GateError, match=f"there is no option {argument}; did you mean"):
            read(name, [argument, "5"])
    with pytest.raises(GateError, match=r"--model stands for a group of options; give each as --model.NAME"):
        read(name, ["--model", "{budget: 5}"])
