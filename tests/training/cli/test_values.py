"""Values that are not what they look like."""

import pytest

from gates.errors import GateError
from training.commands.table import read


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
