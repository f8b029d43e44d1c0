"""Sweep files for tests, and trials that take no time."""

import sys

import yaml

from training.config import WandbOptions
from training.sweeps.space import Sweep

COMMAND = ["${env}", "${interpreter}", "-m", "training.fit", "${args}"]
RANDOM = {
    "name": "tiny",
    "method": "random",
    "run_cap": 2,
    "metric": {"name": "select/loss", "goal": "minimize"},
    "parameters": {
        "model.gate_learning_rate": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.5},
        "model.budget": {"values": [2, 0.5]},
        "model.retrain": {"value": 0.5},
        "model.learning_rate": {"value": 0.01},
    },
    "command": COMMAND,
}
GRID = {"model.price": {"values": [0.1, 0.2]}, "seed": {"values": [0, 1]}}
QUICK = """
import json, os, pathlib, sys, time

options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
run = pathlib.Path(options["run_dir"])
run.mkdir(parents=True)
price = float(options["model.price"])
run.joinpath("config.yaml").write_text(json.dumps({"name": "x", "run_dir": str(run), "existing": "refuse", "wandb": {}}))
while len(list(run.parent.glob("*/config.yaml"))) < int(options.get("meets", 0)):
    time.sleep(0.05)
at_once = sum(not path.with_name("metrics.json").exists() for path in run.parent.glob("*/config.yaml"))
time.sleep(float(options.get("sleep", 0)))
while not os.path.exists(options.get("waits_for", "/")):
    time.sleep(0.05)
if price > 0.8:
    sys.exit("Traceback\\n  somewhere\\nerror: the price is too high\\nand so on")
row = {"heads": round(10 * price), "select_loss": (price - 0.3) ** 2, "test_loss": -price}
metrics = {"run": {"result": row}, "heads": 16, "at_once": at_once, "threads": os.environ["OMP_NUM_THREADS"]}
run.joinpath("metrics.json").write_text(json.dumps(metrics))
"""


def write_sweep(folder, **changes):
    path = folder / "sweep_file.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (RANDOM | changes).items() if value is not None}))
    return path


def quick_sweep(folder, **changes):
    """Return a sweep file for :func:`stand_in`: the loss is a parabola of the price, and prices above 0.8 fail."""
    return str(write_sweep(folder, **({"parameters": {"model.price": {"min": 0.0, "max": 1.0}}, "run_cap": 4} | changes)))


def stand_in(monkeypatch):
    """Make trials that take no time."""

    def command(self, values, further=()):
        options = [f"--{name}={value}" for name, value in (self.constants | dict(values)).items()]
        return [sys.executable, "-S", "-c", QUICK, *further, *options]

    monkeypatch.setattr(Sweep, "trial_command", command)
    monkeypatch.setattr(Sweep, "check", lambda self, further: WandbOptions(mode="disabled"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
