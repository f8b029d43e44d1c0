"""The README: a short page, whose section on the library is a program that runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"

BEFORE = """
import torch, transformers
from tokenizers import Tokenizer, models
torch.manual_seed(0)
size = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=8, intermediate_size=40, vocab_size=50)
transformers.BertForSequenceClassification(transformers.BertConfig(**size)).save_pretrained("path/to/model")
words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(50)}, unk_token="word0"))
transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0").save_pretrained("path/to/model")
ids = torch.randint(50, (48, 8))
rows = [dict(input_ids=row, attention_mask=torch.ones_like(row), labels=int(row[0] > 25)) for row in ids]
batches = [transformers.default_data_collator(rows[at : at + 8]) for at in range(0, 48, 8)]
"""
"""What the section takes as given: a model with its tokenizer in a folder, and batches."""

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
