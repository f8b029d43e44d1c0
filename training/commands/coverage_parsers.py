"""The command lines of what is tried with every architecture: how exports load, what runs them, and what works for which."""

from __future__ import annotations

from typing import Literal, get_args

from jsonargparse import ArgumentParser

from training.config.paths import LocalPath

DeploymentTable = Literal["routes", "runtimes", "gguf", "vllm", "speed"]


def deployment_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training deployment",
        description="How exports load and what runs them, tried on tiny random models on this machine, with what is installed.",
    )
    parser.add_argument(
        "--only", type=list[str], default=[], help="Parts of names of architectures for routes, gguf and vllm; all if empty."
    )
    parser.add_argument(
        "--tables", type=list[DeploymentTable], default=list(get_args(DeploymentTable)), help="Some of these, such as [speed]."
    )
    parser.add_argument(
        "--vllm_python",
        type=LocalPath | None,
        default=None,
        metavar="PATH",
        help="The Python, 3.11 or later, of an environment with vLLM, which wants other versions than this one has; without it "
        "vLLM is not tried.",
    )
    parser.add_argument("--batch_sizes", type=list[int], default=[1, 8], help="Of the measured speed.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed calls of each model and batch size.")
    parser.add_argument(
        "--output", type=LocalPath | None, default=None, help="File to write the page for the documentation to."
    )
    return parser


def coverage_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m training coverage", description="What works for which architecture.")
    parser.add_argument("--only", type=list[str], default=[], help="Parts of names of architectures; all if empty.")
    parser.add_argument("--json", type=LocalPath | None, default=None, help="Write the rows to this file as a list.")
    parser.add_argument(
        "--output", type=LocalPath | None, default=None, help="File to write the table for the documentation to."
    )
    parser.add_argument("--onnx", type=bool, default=True, help="Whether to export every model to ONNX too.")
    parser.add_argument("--types", type=bool, default=True, help="Whether to go over every model type of Transformers too.")
    text = "Take one part of all, such as 1/4, so that several processes share the work."
    parser.add_argument("--shard", type=str | None, default=None, help=text)
    text = "File with a line for each model type; it is added to, and what it has is not run again."
    parser.add_argument("--results", type=LocalPath | None, default=None, help=text)
    return parser
