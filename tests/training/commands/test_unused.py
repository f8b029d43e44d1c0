"""Options that change nothing in the run that they are given to."""

import pytest

from gates.errors import GateError
from training.commands.preflight import COMPARISON_SPELLINGS, STREAMED, USED, check_run, check_used
from training.commands.table import read, run_command
from training.config import Setup

VALUES = {"--model.distil_temperature": "4", "--model.init_score": "obs", "--from_scratch_epochs": "3", "--average_every": "5",
          "--data.max_length": "64", "--retrained": "[his]", "--from_scratch": "[learned]", "--curve": "[0.5]",
          "--model.latency_table": "latency.json", **dict.fromkeys(STREAMED, "7")}  # fmt: skip
DOCUMENTS = ["--model.backbone", "a", "--data", "Documents", "--data.train_file", "a.txt", "--data.test_file", "b.txt"]
WITH = {
    "--model.distil_temperature": ["--model.distil", "0.5"],
    "--model.init_score": ["--model.init_spread", "1"],
    "--model.price": ["--model.budget", "null"],
    "--model.max_loss": ["--model.budget", "auto"],
    "--model.latency_table": ["--model.budget", "0.7x"],
    "--average_every": ["--average_last", "3"],
    "--retrained": ["--compare", "full"],
    "--from_scratch": ["--compare", "full"],
    "--curve": ["--compare", "posthoc"],
    "--from_scratch_epochs": ["--compare", "full", "--from_scratch", "[learned]"],
    "--from_scratch_learning_rate": ["--compare", "full", "--from_scratch", "[learned]"],
    **{option: [*DOCUMENTS, "--data.streaming", "true", "--data.train_blocks", "9"] for option in STREAMED},
}
WITHOUT = {
    "--data.max_length": ["--model.backbone", "a", "--data", "Images", "--data.train_folder", "a", "--data.test_folder", "b"],
    "--curve": ["--compare", "none"],
    **dict.fromkeys(STREAMED, DOCUMENTS),
}
OTHER_GATES = ["--model.gate", "relaxed-top-k"]


def check(*arguments):
    line = read("fit", list(arguments))
    check_used(Setup.of(line.options), line.given)


@pytest.mark.parametrize("option", USED)
def test_an_option_that_nothing_uses_is_refused(option):
    hard = option in ("--model.temperature", "--model.initial_log_alpha")
    without, used = (OTHER_GATES, []) if hard else (WITHOUT.get(option, []), WITH.get(option, []))
    given = f"{option}={VALUES.get(option, '0.5')}"
    with pytest.raises(GateError, match=f"{option} is given, but nothing in this run uses it"):
        check(given, *without)
    check(given, *used)


@pytest.mark.parametrize("option", COMPARISON_SPELLINGS)
def test_a_comparison_refuses_what_none_of_its_methods_uses(option):
    given = [option, VALUES.get(option, "0.5")]
    setting = WITHOUT.get(option, ["--config", "configs/default.yaml"])
    with pytest.raises(GateError, match=f"{option} is given, but nothing in this run uses it"):
        check_run(read("compare", [*setting, "--methods", "his,random", *given]))


def test_a_method_that_is_distilled_uses_its_temperature():
    line = read("compare", ["--methods", "his+distil,random", "--model.distil_temperature", "4"])
    check_run(line)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--verdict", "--methods", "his"], "--methods is given, but --verdict does not use it"),
        (["--verdict", "--metric=test_bleu"], "--metric is given, but --verdict does not use it"),
        (["--truth", "methods", "--costs"], "--costs is given, but --truth does not use it"),
    ],
)
def test_a_summary_refuses_what_it_would_not_use(given, said, capsys):
    assert run_command("summary", ["runs/a", *given]) == 2
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "option"), [("masked", "--measure=[1]"), ("gates", "--measure=[1]"), ("gates", "--length=64")]
)
def test_an_export_refuses_what_its_format_would_not_use(form, option, tmp_path, capsys):
    assert run_command("export", ["runs/a", "--format", form, option, "--output", str(tmp_path / "out")]) == 2
    assert f"error: {option.split('=')[0]} is given, but --format {form} does not use it" in capsys.readouterr().err
