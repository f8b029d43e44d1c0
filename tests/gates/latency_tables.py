"""Latency tables that are drawn, and all masks of a few gates."""

import itertools

import torch

from gates.attention.sites import site_labels
from gates.gating.head_gates import HeadGates
from gates.gating.latency import LatencyTable, SiteTimes


def drawn_table(seed, sizes=(2, 3, 3)):
    """Of whole milliseconds, some of which are 0, so that sites have plateaus and sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    steps = [torch.randint(0, 4, (size,), generator=draw).cumsum(0).tolist() for size in sizes]
    sites = [SiteTimes(f"encoder.{index}", [0.0, *map(float, step)]) for index, step in enumerate(steps)]
    return LatencyTable(2.0, sites, inputs={"input_ids": [2, 7]}, hardware="none")


def table_of(model, times, rest=1.0, unit="head"):
    """The same times for every site of a model."""
    gates = HeadGates(model, unit)
    return LatencyTable(rest, [SiteTimes(label, list(times)) for label in site_labels(gates.sites)], unit=unit)


def all_masks(table):
    """Every mask with its counts."""
    sizes = [site.gates for site in table.sites]
    for values in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        mask = torch.tensor(values)
        yield mask, [int(part.sum()) for part in mask.split(sizes)]
