"""``roles.csv`` of the experiment roles, read again, and what methods keep of every role."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_integer_dtype

from gates.errors import GateError, first_line
from gates.roles.roles import RULES
from gates.sites import KINDS
from training.runs.stored import read_text

SPECIALISED = "specialised"
"""The column that says whether a head has a role that is no background."""
HAS = [f"{rule.name}_has" for rule in RULES]
NONE = "none"
"""The role of a head without any."""
FIND_AGAIN = "find the roles again with --experiments roles"


def read_roles(path: Path) -> pd.DataFrame:
    """A table that the experiment roles wrote, a row for each head, with its kind of attention.

    Raises:
        GateError: if there is none, or it is no such table.
    """
    try:
        table = pd.read_csv(io.StringIO(read_text(path, mend=FIND_AGAIN)), keep_default_na=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"there are no roles in {str(path)!r}; find them with --experiments roles, or give --roles FILE"
        ) from error
    except ValueError as error:
        raise GateError(f"{str(path)!r} is no table of roles: {first_line(error)}") from error
    if lacking := sorted({"site", "head", "roles", SPECIALISED, *HAS} - set(table.columns)):
        raise GateError(f"{str(path)!r} has no column {lacking[0]!r}; give roles.csv of the experiment roles")
    if not len(table):
        raise GateError(f"{str(path)!r} has no head; {FIND_AGAIN}")
    for name in (SPECIALISED, *HAS):
        if not is_bool_dtype(table[name]):
            raise GateError(f"the column {name!r} of {str(path)!r} has {table[name].iloc[0]!r}; expected True or False in it")
    if not is_integer_dtype(table["head"]) or table.duplicated(["site", "head"]).any():
        raise GateError(f"{str(path)!r} does not have one row for each site and head; {FIND_AGAIN}")
    table = table.assign(site=table["site"].astype(str))
    table["kind"] = table["site"].str.partition(".")[0]
    if others := sorted(set(table["kind"]) - set(KINDS)):
        raise GateError(f"{str(path)!r} has the kind of attention {others[0]!r}; expected some of {', '.join(KINDS)}")
    return table


def roles_of_gates(table: pd.DataFrame, sites: Sequence[tuple[str, int]], where: str) -> pd.DataFrame:
    """A row for each gate: site, its number within the site, and the roles of its heads, all of them where a group of heads has
    one gate.

    Args:
        table: of roles, a row for each head.
        sites: label and number of gates of each site, in the order of gates.
        where: what the gates are those of, for the error.

    Raises:
        GateError: if the two are not of the same heads.
    """
    found = []
    for label, gates in sites:
        own = table[table["site"] == label].sort_values("head")
        if not len(own) or len(own) % gates or own["head"].tolist() != list(range(len(own))):
            raise GateError(f"the roles have {len(own)} heads of {label} and {where} {gates}; give the roles of the same model")
        gate = (np.arange(len(own)) // (len(own) // gates)).tolist()
        held = own[[SPECIALISED, *HAS]].groupby(gate).any().reset_index(drop=True)
        found.append(held.assign(site=label, head=range(gates)))
    if others := sorted(set(table["site"]) - {label for label, _ in sites}):
        raise GateError(f"the roles have heads of {others[0]} and {where} none; give the roles of the same model")
    joined = pd.concat(found, ignore_index=True)
    names = [[rule.name for rule in RULES if row[f"{rule.name}_has"]] for _, row in joined.iterrows()]
    return joined.assign(roles=[", ".join(own) or NONE for own in names])[["site", "head", "roles", SPECIALISED, *HAS]]


def members_by_role(table: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
    """For every role that some head has, and for having none, which heads do, ``[heads]``."""
    groups = {rule.name: table[f"{rule.name}_has"].to_numpy(dtype=bool) for rule in RULES}
    groups[NONE] = (table["roles"] == NONE).to_numpy()
    return {name: members for name, members in groups.items() if members.any()}


def role_counts(table: pd.DataFrame, masks: Mapping[tuple[str, int], Mapping[int, NDArray[np.float64]]]) -> pd.DataFrame:
    """Heads of every role that each method keeps, means over seeds.

    Args:
        table: of roles, a row for each head.
        masks: by method and budget, by seed, ``[heads]``.
    """
    rows = []
    for (method, budget), of_seeds in masks.items():
        kept = np.mean([mask > 0 for mask in of_seeds.values()], axis=0)
        for name, members in members_by_role(table).items():
            counts = {"heads": int(members.sum()), "kept": kept[members].sum()}
            rows.append({"method": method, "budget": budget, "role": name, **counts})
    return pd.DataFrame(rows)
