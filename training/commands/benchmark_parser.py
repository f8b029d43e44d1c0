"""The options of ``python -m training benchmark``; without PyTorch, so that help comes at once."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser

from training.config.paths import LocalPath

PARTS = ("step", "precision", "scores", "entropy", "pruned", "profile", "job", "growth", "methods", "large", "goals")
"""Of a benchmark; the last is a table of all others' goals."""


def benchmark_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training benchmark",
        description="What gates, scores and pruned models cost on this machine: measured in turn, into --run_dir. With "
        "directories of earlier benchmarks, their tables as Markdown.",
        epilog="The same command again goes on: parts that --run_dir has are not measured anew.",
    )
    parser.add_argument("runs", type=LocalPath, nargs="*", metavar="RUN", help="Directories of benchmarks, to be shown.")
    parser.add_argument("--run_dir", type=LocalPath | None, default=None, help="Directory to write.")
    parser.add_argument(
        "--parts", type=str | None, default=None, help=f"Some of {', '.join(PARTS)}, separated by commas (default: all)."
    )
    parser.add_argument(
        "--model", type=LocalPath | None, default=None, metavar="DIR", help="Folder of a model (default: a random one)."
    )
    parser.add_argument(
        "--shape",
        type=Literal["tiny", "small", "base"] | None,
        default=None,
        help="Of the random model: 2 x 4, 6 x 12 or 12 x 12 heads, the last two as MiniLM-L6 and BERT-base (default: small on "
        "a CPU, base on a GPU).",
    )
    parser.add_argument(
        "--sizes",
        type=str | None,
        default=None,
        help="Batches by examples and tokens, such as 8x128,32x64 (default: 1x128,8x128,32x64 on a CPU, "
        "1x128,32x128,32x512 on a GPU).",
    )
    parser.add_argument(
        "--device", type=Literal["cpu", "cuda"] | None, default=None, help="Default: cuda where there is a GPU."
    )
    parser.add_argument("--threads", type=int | None, default=None, help="Of the CPU (default: as PyTorch finds them).")
    parser.add_argument(
        "--processor_time",
        action="store_true",
        help="The time that a CPU worked for this, in place of the time that went by: for a machine that does other work too.",
    )
    parser.add_argument("--quick", action="store_true", help="A short look at everything with tiny sizes: that it runs.")
    parser.add_argument(
        "--update", type=LocalPath | None, default=None, metavar="FILE", help="Make every table of this document anew."
    )
    return parser
