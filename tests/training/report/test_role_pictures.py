"""Roles of heads in the report: from a directory's own table, or one that is given."""

import shutil

import matplotlib.colors
import pandas as pd
import pytest

from gates.errors import GateError
from gates.roles.roles import RULES
from tests.training.report.fixture import write_comparison
from training.commands.table import run_command
from training.report.pictures import COLOUR_OF, pictures_of_roles
from training.report.reading import read_contents, read_roles, roles_of_gates

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
    patches = found[0].figure.axes[0].patches
    assert len(patches) == 8 + 1  # the head with two roles is divided
    colours = [COLOUR_OF[name] for place in range(8) for name in HELD.get(place, [])]
    drawn = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in patches]
    assert sorted(colour for colour in drawn if colour != "#ffffff") == sorted(colour.lower() for colour in colours)
    widths = sorted(round(patch.get_width(), 3) for patch in patches)
    assert widths == [0.46] * 2 + [0.92] * 7


def test_the_page_has_the_section_and_nothing_of_the_network(comparison, tmp_path):
    assert run_command("report", [str(comparison), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("<h3>What the heads do</h3>") == 1
    section = text[text.index("<h3>What the heads do</h3>") : text.index("<h3>Cost")]
    assert section.index("figure-roles") < section.index("figure-roles_survival")
    assert "http" not in section.replace("http://www.w3.org/", "")
    assert (tmp_path / "figures" / "roles.svg").is_file()


def test_roles_from_elsewhere_and_none_at_all(comparison, tmp_path):
    plain = shutil.copytree(comparison, tmp_path / "plain")
    (plain / "roles.csv").unlink()
    assert read_contents(plain).roles is None
    assert pictures_of_roles(read_contents(plain)) == []
    given = read_contents(plain, comparison / "roles.csv")
    assert [one.name for one in pictures_of_roles(given)] == ["roles", "roles_survival"]


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
