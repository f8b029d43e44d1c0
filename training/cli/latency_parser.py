"""The command line that measures a latency table: that of the run it is for, and what is measured."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from training.cli.run_parser import build_parser
from training.config.latency import LatencyOptions


def build_latency_parser() -> ArgumentParser:
    """What reads the options of a table from a command line and configurations."""
    parser = build_parser(prog="python -m training latency")
    parser.add_class_arguments(LatencyOptions, None)
    return parser
