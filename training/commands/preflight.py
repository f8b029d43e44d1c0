"""What can be told of a run's model and data before PyTorch is loaded: most typing mistakes, within a second or two.

Everything here is checked again where it is used. Only what is sure is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gates.errors import GateError
from gates.gating.latency import LatencyTable
from training.cli.command_line import COMPARISON_GROUPS, CommandLine
from training.config import BudgetOption, ComparisonOptions, LauncherOptions, PrunerOptions, Setup, group_at, group_of
from training.config.comparison import BY_RELEVANCE, alone
from training.config.data import TOKENIZER_FILES, Documents, Glue, Images, ParallelText, Ratings, SentenceFiles, Tags
from training.data.files import (
    check_beginning,
    check_label_headers,
    check_there,
    choose_columns,
    no_padding,
    read_table,
    refuse_broken_quotes,
)
from training.data.image_folders import check_image_classes, read_folder
from training.data.labels import check_classes, check_numbers
from training.data.tagged_files import check_tags, read_tagged
from training.runs.directory import RunDirectory, refuse_busy
from training.runs.launched import check_alone, is_first_process, launched
from training.runs.ray_cluster import check_ray

# Options on a command line that nothing would use. A configuration, which may serve other runs too, may have them.


def _streams(setup: Setup) -> bool:
    return isinstance(setup.data, Documents) and setup.data.streaming


STREAMED = ("--data.kept_blocks", "--data.select_blocks", "--data.test_blocks", "--data.shuffle_buffer")
USED: dict[str, tuple[Callable[[Setup], bool], str]] = {
    "--model.distil_temperature": (lambda setup: setup.model.distil > 0, "add --model.distil, such as 0.5"),
    "--model.price": (
        lambda setup: setup.model.budget is None or setup.model.gate == "clamped-linear",
        "add --model.budget null, so that the price decides how many heads stay",
    ),
    "--model.latency_table": (
        lambda setup: isinstance(setup.model.budget, str),
        "add --model.budget with a time, such as 0.7x",
    ),
    "--model.init_score": (lambda setup: setup.model.init_spread != 0, "add --model.init_spread, such as 1"),
    "--model.temperature": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--model.initial_log_alpha": (lambda setup: setup.model.gate == "hard-concrete", "it is of hard-concrete gates"),
    "--data.max_length": (lambda setup: not isinstance(setup.data, Images), "images have no length"),
    "--average_every": (lambda setup: setup.weights.average_last > 1, "add --average_last, such as 5"),
    "--from_scratch_epochs": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    "--from_scratch_learning_rate": (lambda setup: bool(setup.end.from_scratch), "add --from_scratch [learned]"),
    **dict.fromkeys(STREAMED, (_streams, "add --data.streaming true")),
}
"""Options by what uses them, and what to do where it does not."""


COMPARISON_SPELLINGS = ("--model.distil_temperature", "--model.init_score", "--average_every", "--data.max_length", *STREAMED)
"""Those of them that no method of a comparison would use by itself."""


def check_used(setup: Setup, given: Sequence[str], among: Collection[str] = tuple(USED)) -> None:
    """Raises :class:`GateError` for the first option that is given and changes nothing.

    Args:
        setup: of the run.
        given: arguments of the command line.
        among: options that are looked at.
    """
    names = {argument.split("=")[0] for argument in given}
    for option, (is_used, instead) in USED.items():
        if option in names and option in among and not is_used(setup):
            raise GateError(f"{option} is given, but nothing in this run uses it; {instead}, or leave it away")


def check_no_others(given: Sequence[str], option: str, others: Collection[str]) -> None:
    """Raises :class:`GateError` for the first option that is given beside one that takes no notice of it.

    Args:
        given: arguments of the command line.
        option: with its value, if that is what takes no notice.
        others: that it does not use.
    """
    for argument in given:
        if (name := argument.split("=")[0]) in others:
            raise GateError(f"{name} is given, but {option} does not use it; leave one of them away")


LARGEST = 20_000_000
"""Bytes of files that are read for this alone."""
FIRST_LINES = 10_000
"""Of larger files."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LAYERS, HEADS = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
)
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""What a Linux machine with a GPU for PyTorch has."""


def check_run(line: CommandLine) -> None:
    """Raises :class:`GateError` for options, a model or files that cannot be used."""
    world = launched(os.environ)
    if getattr(line.options, "list_methods", False) or (world is None and not is_first_process(os.environ)):
        return  # the process that started this one has checked
    setup = Setup.of(line.options)
    budgets: list[BudgetOption | None] = [setup.model.budget]
    methods = setup.end.retrained or []
    if "methods" in line.options:
        for group, prefix in COMPARISON_GROUPS:
            group_at(group, line.options, prefix)  # raises
        check_launcher(group_of(LauncherOptions, line.options), setup, line.given)
        comparison = group_of(ComparisonOptions, line.options)
        budgets = [*comparison.all_budgets, *budgets]
        methods = comparison.all_methods
        distils = any("+distil" in str(method) for method in comparison.all_methods)
        check_used(setup, line.given, set(COMPARISON_SPELLINGS) - ({"--model.distil_temperature"} if distils else set()))
    else:
        check_used(setup, line.given)
        if world is None:  # otherwise the first process claims it for all
            RunDirectory.claim(setup.run.run_dir, setup.run.name, setup.run.existing)
    if world is None and setup.run.run_dir is not None:
        refuse_busy(Path(setup.run.run_dir))
    if world is not None:
        world.fitted(setup.trainer)  # raises
    check_accelerator(setup.trainer.accelerator)
    if setup.model.latency_table is not None:
        setup.within(LatencyTable.read(setup.model.latency_table))  # raises
    heads = check_model(setup.model)
    for budget in budgets:
        check_budget(budget, heads)
    if isinstance(setup.data, Glue):
        check_tokenizer(setup.data.tokenizer or setup.model.backbone)
    elif isinstance(setup.data, SentenceFiles):
        if setup.data.train_file is not None:
            check_text(setup.data)
        check_tokenizer(setup.data.tokenizer or setup.model.backbone)
    elif isinstance(setup.data, Tags):
        check_one_prediction(methods)
        check_tagged(setup.data)
        check_tokenizer(setup.data.tokenizer or setup.model.backbone)
    elif isinstance(setup.data, Images):
        if folders := setup.data.folders:
            check_image_classes({split: read_folder(folder, split).classes for split, folder in folders.items()})
    elif isinstance(setup.data, ParallelText):
        check_files(setup.data.local)
    elif isinstance(setup.data, Documents):
        check_files({split: (file,) for split, file in setup.data.files.items()})


def check_launcher(options: LauncherOptions, setup: Setup, given: Sequence[str]) -> None:
    """Raises :class:`GateError` for a cluster of Ray that cannot be had, and for options of one where none is asked for."""
    if options.launcher == "ray":
        alone(setup)  # raises
        check_alone("--launcher ray", os.environ)
        check_ray(options)
        return
    for argument in given:
        if argument.startswith("--ray_"):
            raise GateError(f"{argument.split('=')[0]} is given, but nothing uses it; add --launcher ray, or leave it away")


def check_files(of_splits: Mapping[str, Sequence[str]]) -> None:
    """Raises :class:`GateError` for files that are not there, or whose first lines are no text."""
    for split, files in of_splits.items():
        for file in files:
            check_there(file, split)
            check_beginning(file, FIRST_LINES)


def check_accelerator(accelerator: str) -> None:
    """Raises :class:`GateError` for a GPU that is asked for on a Linux machine without any."""
    missing = not any(Path(device).exists() for device in DEVICES) and shutil.which("nvidia-smi") is None
    if accelerator in ("gpu", "cuda") and Path("/proc").is_dir() and missing:
        raise GateError(
            f"--trainer.accelerator is {accelerator}, but this machine has no GPU for PyTorch; leave it out, or give cpu"
        )


def check_model(options: PrunerOptions) -> int | None:
    """The model's heads, where they can be told without loading it.

    Raises:
        GateError: for a local folder that holds no model of a form that can be read.
    """
    fields: Mapping[str, Any] = options.from_scratch or {}
    if options.backbone is not None:
        folder = Path(options.backbone)
        if folder.suffix == ".gguf":
            raise GateError(
                f"{options.backbone!r} is a GGUF file, whose weights are rounded for inference; give the folder or hub name of "
                "the original model"
            )
        if not folder.is_dir():
            if folder.is_absolute() or options.backbone.startswith((".", "~")) or options.backbone.count("/") > 1:
                raise GateError(f"the model folder {options.backbone!r} does not exist; check --model.backbone")
            return None  # a name of the hub
        check_weights(folder, allow_pickle=options.allow_pickle)
        fields = read_json(folder / "config.json")
        if not fields:
            raise GateError(f"{options.backbone!r} has no readable config.json, so it holds no model; check --model.backbone")
    return heads_of(fields)


def check_weights(folder: Path, *, allow_pickle: bool) -> None:
    """Raises :class:`GateError` for weights in another form than safetensors."""
    if any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return
    if any(folder.glob("*.gguf")):
        raise GateError(
            f"{str(folder)!r} holds a GGUF file, whose weights are rounded for inference; give the original model's folder or "
            "hub name"
        )
    if any(folder.glob("pytorch_model*.bin")) and not allow_pickle:
        raise GateError(
            f"{str(folder)!r} has its weights as pytorch_model.bin, a format that can run code; add --model.allow_pickle true "
            "(it is read without running code), or save the model again as safetensors"
        )


def heads_of(fields: Mapping[str, Any]) -> int | None:
    """Heads of a model with one stack of equal layers; None if its config says something else."""
    nested = any(isinstance(value, dict) and "hidden_size" in value for value in fields.values())
    if nested or fields.get("is_encoder_decoder") or "encoder_layers" in fields or fields.get("pruned_attention"):
        return None
    layers = [fields[name] for name in LAYERS if isinstance(fields.get(name), int)]
    heads = [fields[name] for name in HEADS if isinstance(fields.get(name), int)]
    return layers[0] * heads[0] if len(layers) == len(heads) == 1 else None


def check_budget(budget: BudgetOption | None, heads: int | None) -> None:
    """Raises :class:`GateError` for a number of heads to keep that the model does not have."""
    if isinstance(budget, int) and not isinstance(budget, bool) and heads is not None and budget > heads:
        raise GateError(f"the budget is {budget}, but the model has {heads} heads; give fewer, or a fraction such as 0.25")


def check_tokenizer(name: str | None) -> None:
    """Raises :class:`GateError` for a local folder without a tokenizer, or with one that cannot fill up batches."""
    if name is None or not Path(name).is_dir():
        return
    folder = Path(name)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise GateError(
            f"{name!r} has no tokenizer files (such as tokenizer.json); save the tokenizer there too, or name another folder "
            "or hub name with --data.tokenizer"
        )
    stated = read_json(folder / "tokenizer_config.json") | read_json(folder / "special_tokens_map.json")
    generic = stated.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")  # others have their own tokens
    if generic and not any(stated.get(f"{token}_token") for token in ("pad", "eos", "unk")):
        raise GateError(no_padding(name))


def check_text(options: SentenceFiles) -> None:
    """Raises :class:`GateError` for files that cannot be read, columns that are not there, and labels that are no classes, or
    no numbers where those are asked for."""
    for split, file in options.files.items():
        check_there(file, split)
    if sum(Path(file).stat().st_size for file in options.files.values()) > LARGEST:
        for file in options.files.values():
            check_beginning(file, FIRST_LINES)
        return
    labels, tables, columns = {}, {}, {}
    for split, file in options.files.items():
        tables[split] = table = read_table(file, options.columns, options.quoting, checked=options.check_header)
        refuse_broken_quotes(file, options.quoting)
        chosen = choose_columns(split, [str(name) for name in table.columns], options)
        columns[split] = chosen["label"]
        if len(table) == 0:
            raise GateError(f"the {split} split is empty; expected at least one example")
        if table[chosen["label"]].isna().any():
            return  # told where the examples are read, with the example
        labels[split] = [str(value).strip() for value in table[chosen["label"]]]
    if options.columns is not None and options.check_header:
        check_label_headers(tables, columns, options.files)
    if isinstance(options, Ratings):
        check_numbers(labels)
    else:
        check_classes(labels)


def check_one_prediction(methods: Sequence[str]) -> None:
    """Raises :class:`GateError` for methods that follow one prediction back, which models that tag every word have not."""
    for method in methods:
        if str(method).split("+")[0] in BY_RELEVANCE:
            raise GateError(
                f"{method} follows the one prediction of an example back through the model, and with --data Tags every word "
                "has its own; take it out of the methods"
            )


def check_tagged(options: Tags) -> None:
    """Raises :class:`GateError` for files that cannot be read, and tags that the training file has not."""
    for split, file in options.files.items():
        check_there(file, split)
    if sum(Path(file).stat().st_size for file in options.files.values()) <= LARGEST and options.files:
        check_tags({split: read_tagged(file, options) for split, file in options.files.items()})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise  # which is no damage
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
