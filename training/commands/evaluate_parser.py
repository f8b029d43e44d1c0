"""The options of ``python -m training evaluate``; without PyTorch, so that help comes at once."""

from __future__ import annotations

from typing import Literal, get_args

from jsonargparse import ArgumentParser

from training.config.paths import HubName, LocalPath

Form = Literal["dense", "gated", "pruned"]
FORMS: tuple[Form, ...] = get_args(Form)


def evaluate_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training evaluate",
        description="A language model on the tasks of lm-evaluation-harness: a run's, dense, gated and pruned, or any other.",
    )
    parser.add_argument(
        "model", type=HubName, metavar="MODEL", help="A run directory that fit wrote, an export, or another folder or hub name."
    )
    parser.add_argument(
        "--tasks",
        type=str,
        required=True,
        help="Names of the harness's tasks and groups, or YAML files of your own, separated by commas.",
    )
    parser.add_argument(
        "--forms",
        type=list[Form],
        default=["dense", "pruned"],
        help="Of a run: dense, at the end of fine-tuning; gated, with the mask in force; pruned, without the heads.",
    )
    parser.add_argument(
        "--limit", type=int | float | None, default=None, help="Examples of each task, or a share of them (default: all)."
    )
    parser.add_argument(
        "--fewshot", type=int | None, default=None, help="Solved examples before each (default: as the task says)."
    )
    parser.add_argument("--batch_size", type=int, default=8, help="Requests at a time.")
    parser.add_argument("--device", type=str, default="cpu", help="Such as cuda.")
    parser.add_argument(
        "--output",
        type=LocalPath | None,
        default=None,
        help="Folder for results.json and results.csv (default: evaluation in a run's directory; of other models nothing is "
        "written).",
    )
    return parser
