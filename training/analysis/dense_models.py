"""The dense models of a run, which has one, or of a comparison, which has one for each seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gates.errors import GateError
from training.analysis.model import ONE_DEVICE, load_dense, read_configuration
from training.cli.comparison_parser import build_comparison_parser
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments
from training.config import ComparisonOptions, group_of
from training.runs.run_directory import CONFIG
from training.scoring.subject import Subject
from training.setup import Setup, open_data


def dense_of_seeds(path: str, overrides: Sequence[str] = ()) -> Iterator[tuple[int, Subject]]:
    """The seed and the dense model of a run, or those of every seed of a comparison, one after the other.

    Args:
        path: of a finished run, or of a comparison with its experiments.
        overrides: arguments in place of the configuration's.

    Raises:
        GateError: if there is none, or a model is no longer there.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir() or not (folder / CONFIG).is_file():
        dense = load_dense(path, overrides)
        yield dense.setup.run.seed, dense.subject()
        return
    yield from _of_comparison(folder, overrides)


def _of_comparison(folder: Path, overrides: Sequence[str]) -> Iterator[tuple[int, Subject]]:
    config = read_configuration(folder / CONFIG, "comparison", overrides, build_comparison_parser)
    options, setup = group_of(ComparisonOptions, config), Setup.of(config)
    setup = replace(setup, trainer=replace(setup.trainer, **ONE_DEVICE))
    if isinstance(setup.model.budget, str):  # a time, of a configuration that serves single runs
        setup = replace(setup, model=replace(setup.model, budget=None))
    cache = ExperimentCache(Path(options.experiments) if options.experiments else folder / "experiments")
    for seed in options.all_seeds:
        own = setup.with_seed(seed)
        experiments = Experiments(own, open_data(own), cache=cache)
        dense = cache.get_like(experiments.dense_is, "processes")  # as many as trained it
        if dense is None:
            raise GateError(
                f"the dense model of seed {seed} with these data and options is not among the experiments in "
                f"{str(cache.path)!r}; give the data that the comparison in {str(folder)!r} had, or start it again, which "
                "makes the model anew"
            )
        yield seed, experiments.subject(dense, {})
