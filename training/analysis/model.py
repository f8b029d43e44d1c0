"""The dense model of a finished run under any masks: its predictions, and the scores of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jsonargparse import ArgumentError
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from gates.attention.intercept import observing
from gates.attention.sites import AttentionSite, find_attention
from gates.errors import GateError, first_line
from gates.gating.head_gates import HeadGates
from gates.gating.latency import LatencyTable
from gates.recovery.residual import FinishedStates, find_writers
from gates.scores.ablation import ablate
from gates.scores.importance import HeadImportance, head_gradients
from training.cli.command_line import build_parser, complaint_of
from training.config import Source
from training.config.model import AUTO
from training.config.paths import HubName
from training.config.yaml_text import read_text
from training.data.base import TaskData
from training.data.text import ClassificationData
from training.pruner.checkpoints import check_identity, read_checkpoint
from training.runs.directory import BUDGET_SEARCH, CONFIG, LATENCY, RunDirectory
from training.runs.resume import check_same_data, noted_identity
from training.runs.stored import check_unchanged
from training.scoring.subject import ScoringContext
from training.setup import Setup, make_pruner, make_trainer, open_data
from training.stats.bootstrap import METRICS, Array, Difference, metric_values, resample_metric, resampled_difference
from training.stats.significance import interval, mcnemar
from training.tasks.encoder_decoder import check_vocabulary, positions
from training.tasks.loading import load_pretrained, read_config, read_tokenizer

# The quality of a model under masks: the metric of a classifier, the loss of other tasks, with paired tests over examples.

LOSS = "loss"


@dataclass(frozen=True)
class Measure:
    """The format of a metric: the factor and digits of shown values, and the sign, which is 1 if more is better, else -1."""

    name: str
    scale: float = 100.0
    sign: int = 1
    digits: int = 1
    unit: str = " points"

    @classmethod
    def of(cls, metric: str) -> Measure:
        """Return the measure of a classifier's metric, or of the loss."""
        return cls(LOSS, 1.0, -1, 3, "") if metric == LOSS else cls(metric)

    @property
    def worsens(self) -> str:
        """The verb for a change for the worse."""
        return "lowers" if self.sign > 0 else "raises"

    @property
    def improves(self) -> str:
        return "raises" if self.sign > 0 else "lowers"

    def text(self, value: float, *, change: bool = False) -> str:
        """Return a value, or a change with its sign and unit, as text."""
        shown = self.scale * value
        return f"{shown:+.{self.digits}f}{self.unit}" if change else f"{shown:.{self.digits}f}"


@dataclass(frozen=True)
class Outcomes:
    """The outcome of every example under every mask.

    Args:
        losses: ``[masks, examples]``.
        metric: The metric of a classifier, or the loss for every other task.
        predictions: The classes of a classifier, ``[masks, examples]``.
        targets: The classes, ``[examples]``.
    """

    losses: Array
    metric: str = LOSS
    predictions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    targets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def measure(self) -> Measure:
        return Measure.of(self.metric)

    @property
    def values(self) -> Array:
        """The metric under every mask, ``[masks]``."""
        if self.metric == LOSS:
            return self.losses.mean(axis=1)
        return metric_values(self.predictions, self.targets, self.metric)

    def against_first(self) -> list[Difference]:
        """Return the change of the metric from the first mask to each other one.

        A loss has Student's paired test over examples. Other intervals of 95 % are of the paired bootstrap over examples, and
        the p value for accuracy is of McNemar's exact test.
        """
        if self.metric == LOSS:
            return [paired_change(losses - self.losses[0]) for losses in self.losses[1:]]
        values, replicates = resample_metric(self.predictions, self.targets, self.metric)
        found = []
        for index in range(1, len(values)):
            difference = resampled_difference(float(values[index] - values[0]), replicates[:, index] - replicates[:, 0])
            if self.metric == "accuracy":
                right = self.predictions == self.targets
                difference = difference._replace(p=mcnemar(right[index], right[0]))
            found.append(difference)
        return found


def paired_change(changes: Array) -> Difference:
    """Return the mean of changes ``[examples]`` with Student's interval and paired test.

    Changes that are all alike have no spread, and p is 1 if they are zero and else 0.
    """
    found = interval(changes)
    constant = found.seeds < 2 or found.std == 0
    p = float(found.mean == 0) if constant else float(stats.ttest_1samp(changes, 0).pvalue)
    return Difference(found.mean, found.low, found.high, p)


ONE_DEVICE: dict[str, Any] = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
OTHER_DATA = ("--data", "--config", "--seed", "--model.backbone")
"""Beginnings of options of fit by which other data can be read, or the same be encoded otherwise."""
SAME_DATA = ("--data.num_workers",)
Split = Literal["score", "select", "test"]


@dataclass(frozen=True)
class LoadedRun(ScoringContext):
    """The model of a finished run with its data, in evaluation mode on one device.

    Args:
        mask: The mask ``[gates]`` that the weights were trained with; None for the dense weights.
    """

    run: RunDirectory
    setup: Setup
    mask: Tensor | None = None

    @property
    def is_classifier(self) -> bool:
        return isinstance(self.data, ClassificationData) and self.metric in METRICS

    @property
    def metric(self) -> str:
        """The main metric, by its name in :data:`training.stats.bootstrap.METRICS`."""
        return self.task.main_metric

    @property
    def measure(self) -> Measure:
        """What masks are judged by: the main metric of a classifier, the loss of every other task."""
        return Measure.of(self.metric if self.is_classifier else LOSS)


@dataclass(frozen=True)
class AnalysisResult:
    """The result of one experiment."""

    tables: dict[str, pd.DataFrame]
    figures: dict[str, Figure]
    sentences: list[str]
    numbers: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)


def load_run(path: str, overrides: Sequence[str] = (), weights: Literal["dense", "pruned"] = "dense") -> LoadedRun:
    """Rebuild the model and the data of a finished run from its configuration.

    Args:
        overrides: Arguments of ``training.fit`` that replace those of the configuration, such as where the data are.
        weights: The weights at the end of fine-tuning, or those at the end of the run with their mask.
    """
    run, name = RunDirectory.finished(path), "dense" if weights == "dense" else "final"
    setup = setup_of(run, overrides)
    checkpoint = read_checkpoint(run.checkpoint(name))
    check_identity(checkpoint, run.checkpoint(name), noted_identity(run, name), f"the run in {path!r}")
    data = _open_data(run, setup, overrides, str(run.checkpoint(name)))
    pruner = make_pruner(setup, data)
    state = checkpoint["state_dict"]
    try:  # without the gates, which are all open here
        pruner.backbone.load_state_dict(
            {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
        )
    except RuntimeError as error:
        raise GateError(
            f"{name}.ckpt in {path!r} is not of the model in its config.yaml; give the run that wrote both"
        ) from error
    trainer = make_trainer(setup, **ONE_DEVICE)
    device, mask = trainer.strategy.root_device, None
    if weights == "pruned":
        mask = state.get("gates.mask")
        if mask is None or mask.shape != (pruner.gates.size,) or not 0 < int((mask > 0).sum()) < pruner.gates.size:
            raise GateError(f"the run in {path!r} pruned no head and has no pruned weights; use --weights dense")
        mask = (mask > 0).to(device, torch.float32)
    return LoadedRun(pruner.to(device).eval(), data, trainer, run, setup, mask)


def names_of_other_data(overrides: Sequence[str]) -> list[str]:
    """Return the arguments of ``training.fit`` that may name other data than a run's, without their values."""
    return [given.split("=")[0] for given in overrides if given.startswith(OTHER_DATA) and not given.startswith(SAME_DATA)]


def _open_data(run: RunDirectory, setup: Setup, overrides: Sequence[str], checkpoint: str) -> TaskData:
    """Open the data of a run with the vocabulary of its training, and check that they are unchanged unless others are named."""
    reads_others = bool(names_of_other_data(overrides))
    try:
        data = open_data(setup, checkpoint)
    except GateError as error:
        if reads_others:
            raise
        raise GateError(
            f"{error}; config.yaml of the run in {str(run.path)!r} says so, and options of fit behind a lone -- take the place "
            "of its own"
        ) from error
    if not reads_others:
        check_same_data(run, data.fingerprint)
    return data


def setup_of(run: RunDirectory, overrides: Sequence[str] = (), given: str = "what follows --") -> Setup:
    """Return the setup of a finished run.

    Args:
        overrides: Arguments of ``training.fit`` that replace those of the run.
        given: The name of these arguments in errors.
    """
    file = run.path / CONFIG
    check_unchanged(file, read_text(file, "the configuration"))
    options = _parse(["--config", str(file)], f"the run's configuration cannot be used ({str(file)!r})")
    if overrides:
        options = _parse(["--config", str(file), *overrides], f"{given} cannot be used")
    setup = Setup.of(options)
    if setup.model.budget == AUTO:
        return setup.with_budget(run.read_json(BUDGET_SEARCH)["budget"])
    return setup.within(LatencyTable.read(run.path / LATENCY)) if setup.model.is_timed else setup


def _parse(arguments: list[str], wrong: str) -> Any:
    """Parse arguments of ``training.fit``. Raise :class:`GateError` that begins with ``wrong``."""
    parser = build_parser()
    parser.exit_on_error = False
    try:
        return parser.parse_args(arguments)
    except (ArgumentError, UnicodeDecodeError, RecursionError) as error:
        reason = complaint_of(error, parser) if isinstance(error, ArgumentError) else first_line(error)
        raise GateError(f"{wrong}: {reason}") from error


def _loader(data: TaskData, split: Split) -> Iterable[Any]:
    return {"score": data.score_dataloader, "select": data.val_dataloader, "test": data.test_dataloader}[split]()


def outcomes(dense: LoadedRun, masks: Tensor, split: Split, *, data: TaskData | None = None) -> Outcomes:
    """Return the losses, and the predictions of a classifier, under every mask ``[masks, gates]`` on a split of the data."""
    loader = _loader(data or dense.data, split)
    task, backbone = dense.task, dense.backbone
    with_classes = dense.is_classifier

    def per_example(batch: dict[str, Tensor]) -> Tensor:
        losses, logits = task.losses(backbone, batch)
        if not with_classes:
            return losses.float().unsqueeze(-1)
        return torch.stack([losses.float(), logits.argmax(-1).float(), batch["labels"].float()], dim=-1)

    batches = dense.on_device(loader, f"evaluating {len(masks)} masks")
    first = list(islice(batches, 1))
    entered = _entering(dense.gates, first, per_example)
    found = ablate(dense.gates, masks, chain(first, batches), per_example, entered).cpu().numpy()
    losses = found[..., 0].astype(np.float64)
    if not with_classes:
        return Outcomes(losses)
    return Outcomes(losses, dense.metric, found[..., 1].astype(np.int64), found[0, :, 2].astype(np.int64))


def _entering(
    gates: HeadGates, first: Sequence[Any], forward: Callable[[Any], object]
) -> Callable[[int, Tensor], AbstractContextManager[None]]:
    """Return a context for each batch and mask in which a pass starts at the first layer with a closed gate.

    The layers before it compute the same under several masks. Every pass is a full one where a trial on the first batch is
    not equal to the last bit.
    """
    with torch.no_grad(), gates.attached(), observing(gates.model, gates.sites):
        try:
            writers, reenters = find_writers(gates, next(iter(first), None), forward)
        except GateError:  # projections may share their weights
            writers, reenters = [], False
    states, last = FinishedStates(), (-1, 0)

    def enter(number: int, mask: Tensor) -> AbstractContextManager[None]:
        nonlocal states, last
        is_open = [bool((part == 1).all()) for part in mask.split(gates.sizes)]
        before = list(takewhile(lambda writer: reenters and is_open[writer.attention], writers))
        behind = {writer.block for writer in writers[len(before) :]}
        finished = [block for block in dict.fromkeys(writer.block for writer in before) if block and block not in behind]
        if number != last[0] or len(finished) < last[1]:  # states are of one batch and its last finished layer
            states = FinishedStates()
        last = number, len(finished)
        return states.entered(number, finished)

    return enter


def head_importance(
    dense: LoadedRun, mask: Tensor | None = None, split: Split = "score", *, data: TaskData | None = None
) -> Tensor:
    """Return HIS of every gate ``[gates]`` on the CPU, raw, under a mask ``[gates]`` (by default all heads are open).

    The scores of closed gates have no meaning.
    """
    gates, loader = dense.gates, _loader(data or dense.data, split)
    task, backbone = dense.task, dense.backbone
    importance = HeadImportance(gates.size).to(dense.device)
    values = torch.ones(gates.size) if mask is None else mask
    for batch in dense.on_device(loader, "scoring heads"):
        with gates.use(values.to(dense.device)):
            importance.update(head_gradients(gates, lambda batch=batch: task.losses(backbone, batch)[0]))  # type: ignore[misc]
    return importance.compute().his.cpu()


def gate_columns(gates: HeadGates) -> pd.DataFrame:
    """Return where each gate is: gate, site, kind, layer, and its number within the site."""
    table = place_columns(gates.sites, [(site, head) for site, size in enumerate(gates.sizes) for head in range(size)])
    table.insert(0, "gate", range(len(table)))
    return table


def place_columns(sites: Sequence[AttentionSite], places: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """Return site, kind, layer and number of some heads or gates, by the number of the site and their own within it."""
    rows = [(sites[site].label, sites[site].kind, sites[site].layer, head) for site, head in places]
    return pd.DataFrame(rows, columns=["site", "kind", "layer", "head"])


# A model whose attention is observed: that of a run, or one in a folder that Transformers can load.


@dataclass(frozen=True)
class ObservedModel:
    """A model whose attention is observed.

    Args:
        backbone: The model, in evaluation mode on ``device``.
        tokenizer: Its own tokenizer, or that of the run's data.
        gates: The gates on the model; None for a folder's.
        data: The data of the run; None for a folder's.
        mask: The mask in force, ``[gates]``; None for all gates open.
    """

    backbone: PreTrainedModel
    sites: tuple[AttentionSite, ...]
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    gates: HeadGates | None = None
    data: TaskData | None = None
    mask: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """The places of the heads that are not pruned, in the order of all heads."""
        if self.gates is None or self.mask is None:
            return torch.arange(sum(site.heads for site in self.sites), device=self.device)
        return self.gates.to_heads(self.mask).nonzero().flatten()

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The site's number, and the head's number there, of every head that is not pruned."""
        places = [(number, head) for number, site in enumerate(self.sites) for head in range(site.heads)]
        return [places[place] for place in self.kept.tolist()]

    @property
    def limit(self) -> int | None:
        """The most tokens of a text that the model takes; None where nothing limits them."""
        # A tokenizer that does not know its model's length states one beyond all texts.
        stated = [positions(self.backbone.config, side) for side in ("encoder", "decoder")]
        limits = [limit for limit in (*stated, self.tokenizer.model_max_length) if limit is not None and limit < 1_000_000]
        return min(limits, default=None)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.backbone.config.is_encoder_decoder)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Switch off gradients, and open every gate that is not pruned."""
        with torch.no_grad():
            if self.gates is None:
                yield
                return
            with self.gates.use(torch.ones(self.gates.size, device=self.device) if self.mask is None else self.mask):
                yield


def is_model_folder(path: str) -> bool:
    """Return whether a directory holds a model of Transformers and no run."""
    folder = Path(path)
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file()


def observe_run(loaded: LoadedRun) -> ObservedModel:
    """Return the model of a run under its mask."""
    tokenizer, gates = loaded.data.tokenizer, loaded.gates
    if tokenizer is None:
        raise GateError("the experiment roles is of words, and these data have no tokenizer; choose among causal and relevance")
    return ObservedModel(loaded.backbone, gates.sites, tokenizer, loaded.device, gates, loaded.data, loaded.mask)


def observe_folder(path: str) -> ObservedModel:
    """Load a model in a folder, with its own tokenizer; no code from the folder is run."""
    tokenizer = read_tokenizer(path)
    backbone = load_pretrained(AutoModel, Source(HubName(path)), read_config(path), what="a model").eval()
    if "input_ids" not in backbone.main_input_name:
        raise GateError(f"{type(backbone).__name__} in {path!r} reads no text; give a model of texts")
    check_vocabulary(backbone, tokenizer, repr(path))
    return ObservedModel(backbone, find_attention(backbone), tokenizer, torch.device("cpu"))
