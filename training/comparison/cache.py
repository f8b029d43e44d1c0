"""Keep experiments on disk under a hash of their inputs, so that interrupted work can continue."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from gates.files import bring_all_to_disk, bring_to_disk, naming
from training.config import PrunerOptions, Setup
from training.data.base import TaskData
from training.pruner.module import HeadPruner
from training.runs import processes
from training.runs.directory import remove_partials
from training.runs.hashing import checkpoint_fingerprint, file_fingerprint, key_of, weights_fingerprint
from training.runs.own_code import code_fingerprint
from training.runs.resume import FORMAT, OPTIONS
from training.runs.stored import damaged, read_json

WAIT = 60.0
"""The seconds after which the first of several processes reports that it still waits for another command."""
DETERMINED_BY, RESULT, CHECKSUMS = "experiment.json", "result.json", "checksums.json"
CHECKPOINT = ".ckpt"


@dataclass(frozen=True)
class Experiment:
    """Hold a finished experiment.

    Args:
        path: Its folder. The files were checked, but the parts of a checkpoint are checked when it is read.
    """

    key: str
    path: Path
    result: dict[str, Any]


class ExperimentCache:
    """Keep finished experiments in ``path/KEY``. Unfinished ones are in ``path/.KEY`` and are renamed at the end.

    Killed work leaves its folder, and finds its files, such as a checkpoint, there again. If several commands need the same
    experiment, one makes it, and the others wait; the lock ends with its process. If several processes train together, the
    first reads, locks and writes, and all do the work.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_before: dict[str, Experiment] = {}

    def holds_any(self) -> bool:
        """Return whether an experiment is finished."""
        return any(not path.name.startswith(".") for path in self.path.glob("*"))

    def get(self, determined_by: Mapping[str, Any]) -> Experiment | None:
        """Return the finished experiment; None if there is none."""
        return processes.in_first(lambda: self._read(key_of(determined_by)))

    def get_or_make(self, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Experiment:
        """Return the finished experiment, and make it if there is none.

        Args:
            determined_by: All inputs of the experiment, as JSON.
            make: A function that does the work in a given folder and returns the result, as JSON.
        """
        found = self.get(determined_by)
        if found is not None:
            return found
        with self._locked(key_of(determined_by)):
            return self.get(determined_by) or self._make(determined_by, make)  # another command may have made it meanwhile

    def _read(self, key: str) -> Experiment | None:
        folder = self.path / key
        if not folder.is_dir():
            return None
        if key not in self._read_before:
            mend = f"delete {str(folder)!r} and start again"
            try:
                sums = read_json(folder / CHECKSUMS, dict, mend=mend)
                found = _checksums(folder)
                for name, own in found.items():
                    if name not in sums:
                        raise GateError(
                            f"{str(folder / name)!r} is not of the experiment that lies there; remove it, or {mend}"
                        )
                    if sums[name] != own:
                        raise damaged(folder / name, "the written file", "its checksum is another", mend)
                if key_of(read_json(folder / DETERMINED_BY, dict, mend=mend)) != key:
                    raise damaged(
                        folder / DETERMINED_BY, "the inputs of this experiment", "they are those of another one", mend
                    )
                result: dict[str, Any] = read_json(folder / RESULT, dict, mend=mend)
                if lost := sorted(
                    name for name in set(sums) - set(found) if not name.endswith(CHECKPOINT)
                ):  # found missing when needed
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / lost[0]))
            except OSError as error:
                reason = error.strerror or first_line(error)
                raise GateError(f"{error.filename!r} of a finished experiment cannot be read: {reason}; {mend}") from error
            self._read_before[key] = Experiment(key, folder, result)
        return self._read_before[key]

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Lock this experiment during a ``with`` block. The first process reports that it waits; the others would time out."""
        path = self.path / f".{key}.lock"
        lock = FileLock(path)

        def acquired() -> bool:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=WAIT)
            except Timeout:
                return False
            return True

        while not processes.in_first(acquired):
            pass
        try:
            yield
            if processes.is_first():
                with suppress(OSError):  # Windows keeps open files
                    path.unlink()  # a finished experiment needs none: whoever comes later finds it before working
        finally:
            lock.release()

    def _make(self, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Experiment:
        key = key_of(determined_by)
        working = self.path / f".{key}"

        def begin() -> None:
            working.mkdir(exist_ok=True)
            remove_partials(working)
            text = json.dumps(determined_by, indent=2, sort_keys=True)
            (working / DETERMINED_BY).write_text(text + "\n", encoding="utf-8")

        processes.in_first(begin)
        with naming(self.path / key):
            result = make(working)
        processes.wait_for_all()  # the others may still read what lies in this folder, which is renamed now

        def finish() -> Experiment:
            (working / RESULT).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            (working / CHECKSUMS).write_text(json.dumps(_checksums(working), indent=2) + "\n", encoding="utf-8")
            bring_all_to_disk(working)
            os.replace(working, self.path / key)
            bring_to_disk(self.path)
            return Experiment(key, self.path / key, result)

        return processes.in_first(finish)


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every file by name, except the list itself; for checkpoints, that of their own checksums."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != CHECKSUMS and path.name[0] != "."]
    return {
        path.name: checkpoint_fingerprint(path) if path.suffix == CHECKPOINT else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# The identity of an experiment: all inputs of its result.

ELSEWHERE = {
    "backbone", "from_scratch", "trust_remote_code", "allow_pickle", "dtype", "latency_table", "swaps", "refit", "keep",
    "min_steps", "checkpoint_activations",
}  # fmt: skip
"""Options of the module that are not part of identities. Some act through the model or the budget, which are part of every
identity. Swaps and refits are modifiers of methods. The rest changes no result."""
OF_DENSE = ("finetune", "learning_rate", "lr_warm_up", "lr_decay", "weight_decay", "freeze", "unit")
"""Options that the dense model depends on. Later phases do not change it."""
AFTER_FINETUNING = ("prune_learning_rate", "freeze_while_pruning", "distil", "distil_temperature", "distil_hidden")
"""Options that training with a fixed mask depends on, in addition to its start and length."""
NUMERICS = (
    "accelerator", "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "limit_val_batches", "limit_test_batches",
)  # fmt: skip
"""Trainer settings that change results."""


def identity_of_dense(setup: Setup, pruner: HeadPruner, data: TaskData, *, processes: int) -> dict[str, Any]:
    """Return the identity of the dense model at the end of fine-tuning, as JSON.

    Args:
        processes: The number of processes that train together. Each has its own batches.
    """
    options, weights = setup.model, setup.weights
    trainer: dict[str, Any] = {name: getattr(setup.trainer, name) for name in NUMERICS}
    trainer |= {"average_last": weights.average_last, "average_every": weights.average_every}
    limits = (setup.trainer.limit_val_batches, setup.trainer.limit_test_batches)
    return {
        "format": FORMAT,
        "experiment": "dense",
        "seed": setup.run.seed,
        "weights": weights_fingerprint(pruner.backbone),
        "model": behaviour_of(pruner.backbone),
        "data": data.fingerprint(),
        "trainer": trainer,
        # Batches of evaluation change no result, but where they are limited they say which examples are evaluated.
        **({"eval_batch_size": data.options.eval_batch_size} if any(limit not in (None, 1.0) for limit in limits) else {}),
        **({"processes": processes} if processes > 1 else {}),
        **({"patience": weights.patience} if weights.patience is not None else {}),
        # A run from another run's checkpoint has its history, which nothing else here contains.
        **({"continues": file_fingerprint(Path(setup.run.ckpt_path))} if setup.run.ckpt_path is not None else {}),
        **own_code_of(data),
        **{name: getattr(options, name) for name in OF_DENSE},
    }


def run_inputs(setup: Setup, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Return all inputs of a run's training, as JSON: those of its dense model, and the options of the module."""
    elsewhere = ELSEWHERE - {"swaps", "refit", "keep"}  # the run does these itself
    return {**dense, OPTIONS: {name: value for name, value in asdict(setup.model).items() if name not in elsewhere}}


def own_code_of(data: TaskData) -> dict[str, str]:
    """Return the hash of a user's own code of data and task. Changes of this project's code raise :data:`FORMAT`."""
    modules = [type(part).__module__ for part in (data, data.task)]
    own = [name for name in modules if name.split(".")[0] != "training"]
    return {"code": code_fingerprint(own)} if own else {}


def options_of_gates(options: PrunerOptions) -> dict[str, Any]:
    """Return the options that trained gates depend on, in addition to the dense model."""
    return {name: value for name, value in asdict(options).items() if name not in ELSEWHERE}


def options_after_finetuning(options: PrunerOptions, *, averages: bool) -> dict[str, Any]:
    """Return the options that training with a fixed mask depends on, in addition to its start.

    The length is among them, and whether the learning rate waits for gates. Averages of weights are taken over the retrain
    phase alone, so with them the division into phases counts too.
    """
    after = {name: getattr(options, name) for name in AFTER_FINETUNING} | {"epochs": round(options.prune + options.retrain, 6)}
    after["pipelined"] = bool(options.pipelined)
    return after | ({"prune": round(options.prune, 6), "retrain": round(options.retrain, 6)} if averages else {})


def shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config fields of a new model like this one, including ``model_type``."""
    fields = model.config.to_diff_dict()
    left_out = ("architectures", "transformers_version", "_name_or_path", "dtype", "pruned_attention", "auto_map")
    return {"model_type": model.config.model_type} | {name: value for name, value in fields.items() if name not in left_out}


def behaviour_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's config without names, such as its dropout and sizes, with the generation config of a translator."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    names = ("_name_or_path", "architectures", "transformers_version", "id2label", "label2id", "auto_map")
    behaviour = {name: value for name, value in fields.items() if name not in names}
    generates = getattr(model, "generation_config", None)  # a classifier has none
    if model.config.is_encoder_decoder and generates is not None:
        generation = generates.to_diff_dict()
        behaviour["generation"] = {name: value for name, value in generation.items() if name not in names}
    return behaviour
