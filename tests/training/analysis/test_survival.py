"""What is kept of specialised and of other heads, by methods and budgets whose masks are known."""

import json

import numpy as np
import pandas as pd
import pytest

from gates.errors import GateError
from gates.roles.roles import RULES
from training.analysis.survival import masks_of_heads, survival_of_roles
from training.commands.table import run_command
from training.stats.significance import Table, exact_odds, pooled_odds, ratio_of_odds

SPECIAL = [1, 1, 1, 0, 0, 0, 0, 0]


def write_roles(folder):
    table = pd.DataFrame({"site": ["encoder.0"] * 4 + ["encoder.1"] * 4, "head": [0, 1, 2, 3] * 2, "specialised": SPECIAL})
    table["specialised"] = table["specialised"].astype(bool)
    table["roles"] = np.where(table["specialised"], "syntactic", "none")
    for rule in RULES:
        table[f"{rule.name}_has"] = table["specialised"] & (rule.name == "syntactic")
    table.to_csv(folder / "roles.csv", index=False)
    return str(folder / "roles.csv")


def write_run(folder, masks, *, gates=4, sites=2):
    folder.mkdir(exist_ok=True)
    entries = [{"seed": seed, "method": method, "budget": budget, "mask": mask} for method, budget, seed, mask in masks]
    (folder / "masks.json").write_text(json.dumps(entries))
    site = {"kind": "encoder", "heads": 4, "gates": gates}
    (folder / "sites.json").write_text(json.dumps([{"label": f"encoder.{n}", "layer": n, **site} for n in range(sites)]))
    return folder


LEARNED = [[1, 1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 0, 0]]
HIS = [[1, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 0, 0, 1]]


def tables(masks):
    special = np.array(SPECIAL, dtype=bool)
    groups = (special, ~special)
    return [Table(*(int((np.array(mask) == state)[own].sum()) for own in groups for state in (1, 0))) for mask in masks]


def test_shares_and_odds_over_seeds(tmp_path):
    rows = [("dense", 8, 0, [1] * 8)]
    rows += [("learned", 3, seed, mask) for seed, mask in enumerate(LEARNED)] + [("his", 3, s, m) for s, m in enumerate(HIS)]
    finding = survival_of_roles(str(write_run(tmp_path / "run", rows)), write_roles(tmp_path))
    kept = finding.tables["survival"].set_index("method")
    assert list(kept.index) == ["learned", "his"]
    assert kept.loc["learned", "specialised_kept"] == pytest.approx((2 / 3 + 1 + 2 / 3) / 3)
    assert kept.loc["learned", "others_kept"] == pytest.approx((1 + 0 + 1) / 15)
    np.testing.assert_allclose(kept.loc["his", ["odds_ratio", "low", "high"]].astype(float), pooled_odds(tables(HIS)))
    factor = ratio_of_odds(tables(LEARNED), tables(HIS))
    assert f"{factor.ratio:.2f} times (95 % interval {factor.low:.2f} to {factor.high:.2f})" in finding.sentences[-1]
    by_role = finding.tables["survival_by_role"].set_index(["method", "role"])
    assert by_role.loc[("learned", "syntactic"), "kept"] == pytest.approx(7 / 3)
    assert by_role.loc[("learned", "none"), "heads"] == 5
    assert "survival" in finding.figures


def test_one_seed_has_the_exact_interval_and_no_comparison(tmp_path):
    rows = [("learned", 3, 0, LEARNED[0]), ("his", 3, 0, HIS[0])]
    finding = survival_of_roles(str(write_run(tmp_path / "run", rows)), write_roles(tmp_path))
    found = finding.tables["survival"].iloc[0][["odds_ratio", "low", "high"]].astype(float)
    np.testing.assert_allclose(found, exact_odds(tables(LEARNED)[0]))
    assert "these seeds do not say how sure that is" in finding.sentences[-1]


def test_what_does_not_belong_together(tmp_path, capsys):
    roles = write_roles(tmp_path)
    run = write_run(tmp_path / "run", [("learned", 2, 0, [1, 0, 0, 1])], gates=4, sites=1)
    with pytest.raises(GateError, match=r"has 8 heads and the masks in .* 4"):
        survival_of_roles(str(run), roles)
    with pytest.raises(GateError, match="has no mask but the dense one"):
        masks_of_heads(write_run(tmp_path / "dense", [("dense", 4, 0, [1] * 4)], sites=1))
    (tmp_path / "other.csv").write_text("site,head\nencoder.0,0\n")
    for arguments, message in (
        ([str(run)], "there are no roles in"),
        ([str(run), "--roles", str(tmp_path / "other.csv")], "has no column"),
        ([str(tmp_path), "--roles", roles], "has no masks.json and sites.json"),
    ):
        assert run_command("analyze", [*arguments, "--experiments", "survival", "--run_dir", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
