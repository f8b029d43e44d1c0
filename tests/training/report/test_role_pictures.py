"""Roles of heads in the report: from a directory's own table, or one that is given."""

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest

from gates.errors import GateError
from gates.roles.roles import RULES
from tests.training.report.fixture import write_comparison
from training.commands.table import run_command
from training.report.pictures import COLOUR_OF, pictures_of_roles
from training.report.reading import read_contents, read_roles, roles_of_gates
from training.stats.significance import cross_table, pooled_odds

HELD = {0: ["syntactic"], 1: ["syntactic", "coreference"], 4: ["positional"], 6: ["first-token"], 7: ["broad"]}


def write_roles(path, heads=4, layers=2):
    rows = []
    for place in range(heads * layers):
        held = HELD.get(place, [])
        rows.append(
            {
                "site": f"encoder.{place // heads}", "kind": "encoder", "layer": place // heads, "head": place % heads,
                "roles": ", ".join(held) or "none",
                "specialised": any(rule.specialised and rule.name in held for rule in RULES),
                **{f"{rule.name}_has": rule.name in held for rule in RULES},
            }
        )  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("roles") / "comparison")
    write_roles(folder / "roles.csv")
    for name in ("gates_over_time.csv", "scores.csv", "agreement.csv", "summary.csv"):
        (folder / name).unlink()  # of pictures, which take the time
    return folder


def test_the_map_comes_first_and_shows_overlaps(comparison):
    found = pictures_of_roles(read_contents(comparison))
    assert [picture.name for picture in found] == ["roles", "roles_survival"]
    assert "3 of 8 heads" in found[0].caption
    assert "3 have no role at all and 1 have more than one" in found[0].caption
    patches = found[0].figure.axes[0].patches
    assert len(patches) == 8 + 1  # the head with two roles is divided
    colours = [COLOUR_OF[name] for place in range(8) for name in HELD.get(place, [])]
    drawn = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in patches]
    assert sorted(colour for colour in drawn if colour != "#ffffff") == sorted(colour.lower() for colour in colours)
    widths = sorted(round(patch.get_width(), 3) for patch in patches)
    assert widths == [0.46] * 2 + [0.92] * 7


def test_what_survives_is_what_the_masks_keep(comparison):
    contents = read_contents(comparison)
    caption = pictures_of_roles(contents)[1].caption
    special = np.array([place in (0, 1, 4) for place in range(8)])
    masks = contents.masks["learned", 2][1]
    odds = pooled_odds([cross_table(mask, special) for mask in masks])
    assert f"learned keeps {masks[:, special].mean():.0%} of the specialised heads" in caption
    assert f"odds ratio {odds.ratio:.2f}" in caption


def test_a_gate_of_a_group_has_the_roles_of_all_its_heads(tmp_path):
    table = read_roles(write_roles(tmp_path / "roles.csv"))
    grouped = roles_of_gates(table, [("encoder.1", 2), ("encoder.0", 2)], "here")
    assert grouped["site"].tolist() == ["encoder.1"] * 2 + ["encoder.0"] * 2
    assert grouped["roles"].tolist() == ["positional", "first-token, broad", "syntactic, coreference", "none"]
    assert grouped["specialised"].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[:0], "has no head"),
        (lambda table: table.drop(columns="broad_has"), "has no column 'broad_has'"),
        (lambda table: table.assign(specialised="yes"), "is no table of roles: "),
        (lambda table: pd.concat([table, table[:1]]), "one row for each site and head"),
        (lambda table: table.assign(site="<script>.0", head=range(8)), "kind of attention '<script>'"),
    ],
)
def test_what_is_no_table_of_roles(tmp_path, change, message):
    path = write_roles(tmp_path / "roles.csv")
    change(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(GateError, match=message):
        read_roles(path)


@pytest.mark.integration
def test_roles_of_another_model_are_told(comparison, tmp_path, capsys):
    other = write_roles(tmp_path / "roles.csv", heads=2)
    arguments = [str(comparison), "--roles", str(other), "--output", str(tmp_path / "page.html")]
    assert run_command("report", arguments) == 2
    assert "the roles have 2 heads of encoder.0 and the masks in" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    assert run_command("report", [str(comparison), "--roles", "nowhere.csv", "--output", str(tmp_path / "page.html")]) == 2
    assert "there are no roles in 'nowhere.csv'" in capsys.readouterr().err
