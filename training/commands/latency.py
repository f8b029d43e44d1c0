"""``head-gates latency``: how long a run's model takes with which heads, measured once for many runs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from gates.gating.latency import LatencyTable, SiteTimes
from training.cli.command_line import CommandLine
from training.cli.exit import stdout
from training.comparison.latency import measured_table
from training.config import group_of
from training.config.run import LatencyOptions
from training.runs.directory import check_new_output, writing_to
from training.setup import open_data, quiet_libraries


def measure_latency(line: CommandLine) -> None:
    """Measure, write and show."""
    quiet_libraries()
    options, setup = group_of(LatencyOptions, line.options), line.setup
    check_new_output(options.output, '"rest":', "latency table")
    table = measured_table(setup, open_data(setup), batch=options.batch_size, length=options.length)
    with writing_to(Path(options.output)):
        table.write(options.output)
    show(stdout(), table)
    stdout().print(f"latency table: {options.output}", soft_wrap=True, highlight=False)


def show(console: Console, table: LatencyTable) -> None:
    """Print the milliseconds of each site by its number of open gates; sites with equal times share a column."""
    by_times: dict[tuple[float, ...], list[SiteTimes]] = {}
    for site in table.sites:
        by_times.setdefault(tuple(site.milliseconds), []).append(site)
    shown = Table(title="milliseconds of a site, smoothed so that more heads never take less")
    shown.add_column(f"{table.unit}s left", justify="right")
    for first, *others in by_times.values():
        shown.add_column(f"{first.label} and {len(others)} more" if others else first.label, justify="right")
    for count in range(max(map(len, by_times))):
        shown.add_row(str(count), *(f"{times[count]:.4g}" if count < len(times) else "" for times in by_times))
    console.print(shown)
    for site, *_ in by_times.values():
        pairs = [(count, site.fastest_from(count)) for count in range(1, site.gates)]
        if slow := [f"{faster} {table.unit}s than {count}" for count, faster in pairs if faster > count]:
            console.print(f"faster before smoothing, at {site.label}: {', '.join(slow)}", soft_wrap=True, highlight=False)
    console.print(
        f"the model takes {table.dense:.4g} ms, and {table.least:.4g} ms without any {table.unit}",
        soft_wrap=True,
        highlight=False,
    )
    shapes = "; ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in (table.inputs or {}).items())
    console.print(f"measured on {table.hardware}, with {shapes}", soft_wrap=True, highlight=False)
