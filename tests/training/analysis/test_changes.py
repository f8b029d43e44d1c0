"""Roles before and after: of tables that are made for it, and of the dense and the pruned model of a run."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModel

from gates.sites import find_attention
from tests.training.analysis.test_role_page import Page
from tests.training.analysis.test_roles import texts_of, write_treebank
from tests.training.report.test_role_pictures import write_roles
from tests.training.runs import make_data, write_config
from training.analysis.changes import changes_of_roles
from training.analysis.model import load_pruned
from training.analysis.observed import observe_run
from training.analysis.role_texts import RoleFiles, read_texts
from training.analysis.roles import roles_of_heads
from training.commands.table import run_command
from training.fit import main as fit


def changed(path, new, drop=()):
    """The table of roles with other roles of some heads, and without some."""
    table = pd.read_csv(path)
    for place, roles in new.items():
        has = [name for name in table if name.endswith("_has")]
        table.loc[place, has] = [name.removesuffix("_has") in roles for name in has]
        table.loc[place, "roles"] = ", ".join(roles) or "none"
        table.loc[place, "specialised"] = bool(set(roles) & {"positional", "syntactic", "rare", "coreference"})
    table = table.drop(index=list(drop))
    table.to_csv(path.with_name("after.csv"), index=False)
    return str(path.with_name("after.csv"))


def test_heads_that_keep_lose_and_gain_roles(tmp_path):
    before = write_roles(tmp_path / "roles.csv")  # syntactic 0 and 1, coreference 1, positional 4, first-token 6, broad 7
    finding = changes_of_roles(str(before), changed(before, {0: [], 1: ["syntactic"], 2: ["syntactic"]}, drop=[7]))
    rows = finding.tables["role_changes"].set_index("role")
    assert rows.loc["syntactic", ["before", "after", "kept", "lost", "gained"]].tolist() == [2, 2, 1, 1, 1]
    assert rows.loc["coreference", ["before", "after", "kept", "lost", "gained"]].tolist() == [1, 0, 0, 1, 0]
    assert rows.loc["broad", "before"] == 0  # that head is pruned
    assert rows.loc["specialised", "share"] == pytest.approx(2 / 3)
    assert rows.loc["specialised", "by_chance"] == pytest.approx(3 / 7)
    assert rows.loc["specialised", "low"] < 2 / 3 < rows.loc["specialised", "high"]
    assert finding.numbers == {"heads": 7, "same": 4, "pruned": 1}
    assert "4 of 7 heads" in finding.sentences[0]
    assert "(without 1 head of 8 that the second model has not)" in finding.sentences[0]
    same = changes_of_roles(str(before), str(before)).tables["role_changes"]
    assert (same["kept"] == same["before"]).all()


def test_the_dense_and_the_pruned_model_of_a_run(tmp_path, capsys):
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run")]) == 0
    trees = write_treebank(tmp_path, texts_of(make_data()))
    dense, pruned = tmp_path / "dense", tmp_path / "pruned"

    def call(out, *arguments):
        return run_command("analyze", [str(tmp_path / "run"), "--run_dir", str(out), *arguments])

    assert call(dense, "--experiments", "roles", "--conllu", trees) == 0
    before = ["--before", str(dense / "roles.csv")]
    assert call(pruned, "--experiments", "roles,changes", "--conllu", trees, "--weights", "pruned", *before) == 0
    assert "these alone count" in capsys.readouterr().out
    table = pd.read_csv(pruned / "roles.csv")
    masks = json.loads((tmp_path / "run" / "masks" / "learned.json").read_text())
    kept = [(f"{site['kind']}.{site['layer']}", head) for site in masks["sites"] for head in site["kept"]]
    assert list(zip(table["site"], table["head"], strict=True)) == kept
    found = json.loads((pruned / "metrics.json").read_text())["experiments"]["changes"]["numbers"]
    assert found["heads"] == len(kept)
    assert found["pruned"] == 8 - len(kept)
    page = Page((pruned / "roles.html").read_text())
    assert [head["name"] for head in page.attention["heads"]] == [f"{site}.{head}" for site, head in kept]

    # Another way there: the export, whose other heads are physically gone.
    run, mask = load_pruned(str(tmp_path / "run"))
    backbone = AutoModel.from_pretrained(tmp_path / "run" / "export", trust_remote_code=True).eval()
    sites = find_attention(backbone)
    assert sum(site.heads for site in sites) == len(kept)
    exported = replace(observe_run(run, mask), backbone=backbone, sites=sites, gates=None, mask=None)
    own = roles_of_heads(exported, read_texts(RoleFiles(trees), exported)).tables["roles"]
    columns = [name for name in table if name.endswith(("_strength", "_low", "_high", "_baseline"))]
    np.testing.assert_allclose(own[columns].to_numpy(float), table[columns].to_numpy(float), atol=1e-4)


def test_what_does_not_belong_together(tmp_path, capsys):
    small, large = write_roles(tmp_path / "small.csv", layers=1), write_roles(tmp_path / "large.csv")
    arguments = [str(tmp_path), "--experiments", "changes", "--run_dir", str(tmp_path / "out")]
    assert run_command("analyze", [*arguments, "--before", str(small), "--roles", str(large)]) == 2
    assert "has heads that" in capsys.readouterr().err
    assert run_command("analyze", [*arguments, "--before", str(tmp_path / "no.csv"), "--roles", str(large)]) == 2
    assert "there are no roles in" in capsys.readouterr().err
