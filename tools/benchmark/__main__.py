"""Measure the cost of gates, scores and pruned models, or show stored results: ``python -m tools.benchmark``."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import gates
from gates.errors import GateError
from gates.export.cost import hardware
from gates.files import replacing
from tools.benchmark.growth import measure_growth
from tools.benchmark.large import measure_large
from tools.benchmark.pruned import measure_graphs, measure_pruned, measure_roofline, measure_stock
from tools.benchmark.scores import measure_entropy, measure_scores
from tools.benchmark.setting import DEFAULT_SIZES, POSITIONS, SHAPES, Row, Setting, Size
from tools.benchmark.steps import (
    measure_compiled_steps,
    measure_counts,
    measure_gates_alone,
    measure_job,
    measure_steps,
)
from tools.benchmark.tables import markdown
from training.runs import progress
from training.runs.directory import only_writer
from training.runs.own_code import folders_fingerprint
from training.runs.tracking import versions
from training.setup import quiet_libraries

FILE = "benchmark.json"
PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "step": measure_steps,
    "step_bfloat16": partial(measure_steps, dtype="bfloat16"),
    "counts": measure_counts,
    "gates_alone": measure_gates_alone,
    "scores": measure_scores,
    "entropy": measure_entropy,
    "pruned": measure_pruned,
    "stock": measure_stock,
    "graphs": measure_graphs,
    "roofline": measure_roofline,
    "compiled": measure_compiled_steps,
    "job": measure_job,
    "growth": measure_growth,
    "large": measure_large,
}
ON_GPU = tuple(PARTS)[:11]
"""The parts that are measured on a GPU by default, each in less than three minutes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    options = parser.parse_args(arguments)
    names = options.parts.split(",") if options.parts else []
    if unknown := [name for name in names if name not in PARTS and name != "goals"]:
        parser.error(f"--parts has {unknown[0]!r}; expected some of {', '.join(PARTS)}, goals")
    if (options.run_dir is None) == (not options.runs):
        parser.error("give --run_dir to measure, or directories of earlier benchmarks to show, not both")
    try:
        if options.run_dir:
            names = names or [*(ON_GPU if options.device == "cuda" else PARTS), "goals"]
        records = [measure(options, names, arguments)] if options.run_dir else [read(run) for run in options.runs]
    except GateError as error:
        parser.error(str(error))
    print("\n\n".join(markdown(record, names or [*record["parts"], "goals"]) for record in records))


def parser_of() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m tools.benchmark", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="directories of earlier benchmarks to show")
    parser.add_argument("--run_dir", type=Path, help="directory to write; the same command again measures missing parts")
    parser.add_argument(
        "--parts",
        help=f"some of {', '.join(PARTS)}, goals, separated by commas (default: all; on a GPU the first {len(ON_GPU)}, which "
        "take less than three minutes each)",
    )
    parser.add_argument("--shape", choices=SHAPES, help="of the random models (default: small on a CPU, base on a GPU)")
    parser.add_argument("--sizes", help=f"batches, such as {DEFAULT_SIZES['cpu']} (default: by the device)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument(
        "--processor_time", action="store_true", help="measure the time that the CPU worked, on a machine that does other work"
    )
    parser.add_argument("--quick", action="store_true", help="run everything briefly; the figures mean nothing")
    return parser


def measure(options: Namespace, names: Sequence[str], arguments: Sequence[str] | None) -> dict[str, Any]:
    """Measure the parts that the directory lacks, and write the record after each of them."""
    quiet_libraries()
    setting, file = setting_of(options), options.run_dir / FILE
    torch.set_num_threads(setting.threads)
    with only_writer(options.run_dir), progress.displayed():
        record = new_record(setting, sys.argv[1:] if arguments is None else arguments)
        if file.exists():
            earlier = read(options.run_dir)
            for key in ("setting", "machine", "versions", "code"):
                if earlier[key] != record[key]:
                    raise GateError(f"{file} was measured with another {key}, {earlier[key]}; give another --run_dir")
            record = earlier
        missing = [name for name in names if name in PARTS and name not in record["parts"]]
        with progress.stage("benchmark", total=len(missing)) as stage:
            for name in missing:
                stage.work_on(name)
                start = time.monotonic()
                record["parts"][name] = PARTS[name](setting)
                record["seconds"][name] = round(time.monotonic() - start, 1)
                with replacing(file) as partial:
                    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
                stage.advance()
    return record


def setting_of(options: Namespace) -> Setting:
    if options.device == "cuda" and options.processor_time:
        raise GateError("--processor_time is for CPUs; remove it, or give --device cpu")
    shape = options.shape or ("tiny" if options.quick else "base" if options.device == "cuda" else "small")
    sizes = (options.sizes or DEFAULT_SIZES["quick" if options.quick else options.device]).split(",")
    if wrong := [size for size in sizes if not re.fullmatch("[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", size)]:
        raise GateError(f"--sizes has {wrong[0]!r}; expected a batch size and a length, such as 8x128")
    chosen = tuple(Size(*map(int, size.split("x"))) for size in dict.fromkeys(sizes))
    if (longest := max(size.length for size in chosen)) > POSITIONS:
        raise GateError(f"--sizes has {longest} tokens, but the models have {POSITIONS} positions; give less")
    return Setting(shape, options.device, options.threads, chosen, options.processor_time, options.quick)


def new_record(setting: Setting, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a record without parts, whose command names only the last part of a directory."""
    words = [Path(word).name if before == "--run_dir" else word for before, word in pairwise(["", *arguments])]
    return {
        "command": shlex.join(["python", "-m", "tools.benchmark", *words]),
        "machine": {"hardware": hardware(setting.on), "cores": os.cpu_count(), "system": platform.system()},
        "versions": versions(),
        "setting": asdict(setting) | {"sizes": [str(size) for size in setting.sizes]},
        "parts": {},
        "seconds": {},
        "code": folders_fingerprint(Path(gates.__file__).parent, Path(__file__).parent)[:16],
    }


def read(folder: Path) -> dict[str, Any]:
    if not (folder / FILE).is_file():
        raise GateError(f"{folder} has no {FILE}; measure it with --run_dir {folder}")
    record: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return record


if __name__ == "__main__":
    main()
