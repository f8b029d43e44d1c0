"""What a comparison whose tables are there may go on with: more methods, budgets and seeds, of the same dense models."""

from __future__ import annotations

import yaml

from gates.errors import GateError
from training.runs.resolved_options import flat_options, is_among, read_options, same_value
from training.runs.resuming import FREE_WHEN_RESUMED
from training.runs.run_directory import CONFIG, METRICS, RunDirectory

COMPARED = (
    "seed", "seeds", "methods", "budgets", "stages", "prices", "experiments", "list_methods", "restarts.", "swap.", "draws.",
    "refit.", "distil.", "model.budget", "launcher", "ray_",
)  # fmt: skip
"""Options that say what is compared and where, or beginnings of them: new tables are of what is asked for now."""
FREE = {*FREE_WHEN_RESUMED, *COMPARED}


def goes_on(run: RunDirectory, resolved: str) -> bool:
    """Whether a comparison goes on with what an earlier call measured: after :func:`check_same_comparison` that of finished
    tables, and otherwise only of just the same configuration.

    Args:
        run: the comparison's directory.
        resolved: the configuration of this command, as YAML.
    """
    file = run.path / CONFIG
    return (run.path / METRICS).is_file() or (file.is_file() and file.read_text(encoding="utf-8") == resolved)


def check_same_comparison(run: RunDirectory, resolved: str) -> None:
    """Whether new tables would be of the same model, data and training as the finished ones that they take the place of.

    Args:
        run: the comparison's directory.
        resolved: the configuration of this command, as YAML.

    Raises:
        GateError: naming the first option that differs.
    """
    file = run.path / CONFIG
    if not (run.path / METRICS).is_file() or not file.is_file():
        return
    began = read_options(file, mend="remove it to have it written anew")
    now = flat_options(yaml.safe_load(resolved))
    for name in sorted(began.keys() & now.keys()):
        if not same_value(began[name], now[name]) and not is_among(name, FREE):
            raise GateError(
                f"{str(run.path)!r} holds a comparison whose {name} was {began[name]!r} and is {now[name]!r} now, so its "
                "tables are not replaced; give another --run_dir"
            )
