"""A language model in memory on the tasks of lm-evaluation-harness (Gao et al.), through its Python interface.

The harness is an extra, so it is imported where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError, first_line
from training.commands.evaluate_line import check_harness, is_file
from training.tasks.encoding import end_token, start_token

RESAMPLES = 1000
"""Of the harness's bootstrap, for errors of metrics that are no means."""
SEED = 1234
"""Of the choice of solved examples; the harness's own."""
KEPT = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "n-samples", "higher_is_better")
"""Of what the harness returns; the rest is about the machine."""


@dataclass(frozen=True)
class Tasks:
    """Tasks of the harness.

    Args:
        names: of the harness's tasks, groups and tags, or YAML files.
        limit: examples of each, or a share of them; None for all.
        fewshot: solved examples before each; None for as many as the task says.
    """

    names: Sequence[str]
    limit: int | float | None = None
    fewshot: int | None = None

    def loaded(self) -> Any:
        """The tasks with their data.

        Raises:
            GateError: if the harness is not installed, or does not know one of them, or its data cannot be had.
        """
        check_harness()
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        manager = TaskManager(include_defaults=not all(map(is_file, self.names)))  # reading all of them takes a while
        for name in self.names:
            if not is_file(name) and name not in manager.task_index:
                raise GateError(
                    f"--tasks has {name!r}, which lm-evaluation-harness does not know; expected one of its tasks or groups "
                    "(python -m lm_eval ls tasks), or a YAML file"
                )
        try:
            found = manager.load(list(self.names))
            for task in found["tasks"].values():
                self._set(task)
        except Exception as error:  # of YAML, of templates, of downloads
            raise GateError(f"the tasks {', '.join(self.names)} cannot be loaded: {first_line(error)}") from error
        return found

    def _set(self, task: Any) -> None:
        """Solved examples, as the harness's own command decides on them."""
        stated = task.get_config("num_fewshot")
        if stated is None or (self.fewshot is not None and stated != 0):
            task.set_config(key="num_fewshot", value=self.fewshot or 0)
        task.set_fewshot_seed(seed=SEED)


def evaluated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Tasks, *, batch_size: int = 8
) -> dict[str, Any]:
    """What the harness says of a model, as JSON.

    Args:
        model: in evaluation mode, on its device; whatever gates are in force on it stay so.
        tokenizer: its own. An end token that it would put behind every prompt is left away.
        tasks: to evaluate on.
        batch_size: requests at a time.

    Raises:
        GateError: see :meth:`Tasks.loaded`; or if a task does not go with the model.
    """
    found = tasks.loaded()
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    ends = end_token(tokenizer)
    adds_end = ends is not None and tokenizer("a")["input_ids"][-1:] == [ends]
    try:
        subject = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            add_bos_token=False if adds_end else None,
            prefix_token_id=start_token(tokenizer),
        )
        said = evaluate(subject, found, limit=tasks.limit, bootstrap_iters=RESAMPLES, log_samples=False)
    except Exception as error:  # of metrics, of templates, of generation
        raise GateError(
            f"lm-evaluation-harness fails on {', '.join(tasks.names)}: {type(error).__name__}: {first_line(error)}"
        ) from error
    return {name: said[name] for name in KEPT if name in said}


def rows_of(said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for every metric of every task, and of every group that has metrics of its own."""
    for kind in ("results", "groups"):
        for task, values in said.get(kind, {}).items():
            for key, value in values.items():
                metric, comma, filtered = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                error = values.get(f"{metric}_stderr,{filtered}")
                if kind == "groups" and task in said["results"] and key in said["results"][task]:
                    continue
                yield {
                    "task": task,
                    "version": said.get("versions", {}).get(task),
                    "shots": said.get("n-shot", {}).get(task),
                    "examples": said.get("n-samples", {}).get(task, {}).get("effective"),
                    "metric": metric,
                    "filter": filtered,
                    "higher_is_better": said.get("higher_is_better", {}).get(task, {}).get(metric),
                    "value": float(value),
                    "error": float(error) if isinstance(error, int | float) else None,
                }
