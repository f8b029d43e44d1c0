"""The README: a short page, whose section on the library is a program that runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_library_page import BEFORE

README = Path(__file__).parents[1] / "README.md"

AFTER = """
from gates import find_attention
pruned = AutoModelForSequenceClassification.from_pretrained("smaller", trust_remote_code=True)
assert sum(site.heads for site in find_attention(pruned)) == 18
assert AutoTokenizer.from_pretrained("smaller").get_vocab() == tokenizer.get_vocab()
assert torch.isfinite(pruned(**batches[0]).logits).all()
"""


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.integration
def test_the_section_on_the_library_begins_early_and_runs(tmp_path):
    text = README.read_text(encoding="utf-8")
    before, section = text.split("\n## The library\n")
    assert len(before.splitlines()) < 70
    snippets = re.findall(r"^```python\n(.*?)^```$", section.split("\n## ")[0], flags=re.DOTALL | re.MULTILINE)
    assert sum(len(snippet.splitlines()) for snippet in snippets) <= 20
    (tmp_path / "snippets.py").write_text("\n".join([BEFORE, *snippets, AFTER]), encoding="utf-8")
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **home, "PYTHONPATH": str(README.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "snippets.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_snippets_say_why_they_are_not_run():
    outside = re.sub(r"\n## The library\n.*?(?=\n## )", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert outside.count("```python") == len(re.findall(r"<!-- not run: \w[^\n]* -->\n```python", outside))
