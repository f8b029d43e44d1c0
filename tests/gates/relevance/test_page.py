"""docs/explanation/relevance.md names every family, and its program runs."""

import re
from pathlib import Path

import torch

from gates.relevance.heads import FAMILIES
from gates.relevance.rules import EPSILON
from tests.models import build, inputs

PAGE = (Path(__file__).parents[3] / "docs" / "explanation" / "relevance.md").read_text(encoding="utf-8")


def test_every_family_is_named():
    listed = PAGE[PAGE.index("Conservation is tested") : PAGE.index("Other families")]
    assert re.findall(r"`([\w-]+)`", listed) == list(FAMILIES)
    assert f"with epsilon {EPSILON:.0e}".replace("e-06", "e-6") in PAGE


def test_its_program_runs(capsys):
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    given = {"input_ids": inputs("bert")["input_ids"], "labels": torch.tensor([0, 1, 0])}
    names = {"torch": torch, "model": build("bert"), "batches": [given]}
    exec(program.replace("steps=100", "steps=2"), names)
    torch.testing.assert_close(names["shares"].view(2, 4).sum(1), torch.ones(2).double())
    assert names["simple"].shape == (8,)
    assert capsys.readouterr().out.count("'") == 16
