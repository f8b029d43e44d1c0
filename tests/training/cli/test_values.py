"""Values that are not what they look like."""

import pytest

from gates.errors import GateError
from training.cli.command_line import takes_text
from training.commands.table import read


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "\uff11"], "--seed is '\uff11', whose digits are not those from 0 to 9"),
        (["--model.budget=٣"], "--model.budget is '٣'"),
        (["--model.learning_rate", "\uff11e-3"], "--model.learning_rate is '\uff11e-3'"),
        (["--curve", "[0.5, \uff10.25]"], "--curve is '\uff10.25'"),
        (["--data.batch_size", "\uff13\uff12"], "--data.batch_size is '\uff13\uff12'"),
        (["--seed", "010"], "--seed is 010, which YAML takes for another number"),
        (["--model.budget", "1:30"], "--model.budget is 1:30"),
        (["--name", "caf\udce9"], "not UTF-8 text"),
    ],
)
def test_numbers_that_look_like_others_are_refused(arguments, said):
    with pytest.raises(GateError) as caught:
        read("fit", arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "seed: \uff11",
        "seed: 010",
        "model: {budget: 1:30}",
        "data: {class_path: Synthetic, init_args: {batch_size: '\uff13\uff12'}}",
    ],
)
def test_so_are_those_of_a_configuration(text, tmp_path):
    (tmp_path / "my.yaml").write_text(text + "\n", encoding="utf-8")
    with pytest.raises(GateError, match=r"digits|YAML takes"):
        read("fit", ["--config", str(tmp_path / "my.yaml")])


def test_a_text_may_have_any_digits(tmp_path):
    assert read("fit", ["--name", "\uff12\uff10\uff12\uff16"]).options.name == "\uff12\uff10\uff12\uff16"
    assert read("fit", ["--wandb.tags", "['010']", "--seed", "0x10"]).options.seed == 16
    assert takes_text(str | None)
    assert takes_text(list[str] | str | None)
    assert not takes_text(int | float | dict[str, int | float] | None)


@pytest.mark.parametrize("name", ["fit", "compare"])
def test_neither_beginnings_of_names_nor_whole_groups_are_options(name):
    for argument in ("--model.bud", "--see", "--model.freez"):
        with pytest.raises(GateError, match=f"there is no option {argument}; did you mean"):
            read(name, [argument, "5"])
    with pytest.raises(GateError, match=r"--model stands for a group of options; give each as --model.NAME"):
        read(name, ["--model", "{budget: 5}"])
