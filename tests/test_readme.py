"""The Python snippets of the README's section on the library, run in order as one program."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from training.commands.table import run_command

main = partial(run_command, "summary")

README = Path(__file__).parents[1] / "README.md"

BEFORE = """
import torch, transformers
from tokenizers import Tokenizer, models
torch.manual_seed(0)
size = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=8, intermediate_size=40, vocab_size=50)
transformers.BertForSequenceClassification(transformers.BertConfig(**size)).save_pretrained("path/to/model")
words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(50)}, unk_token="word0"))
transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0").save_pretrained("path/to/model")
ids = torch.randint(50, (24, 8))
train_set = [dict(input_ids=row, attention_mask=torch.ones_like(row), labels=int(row[0] > 25)) for row in ids]
select_set = train_set[:8]
batches = [transformers.default_data_collator(train_set[at : at + 8]) for at in range(0, 24, 8)]
prune_batches, retrain_batches = batches[:2], batches[2:]
"""
"""What the section takes as given: a model in a folder, data sets, batches."""

AFTER = """
from gates.sites import find_attention

assert int(heads.sum()) == 18 == sum(site.heads for site in find_attention(pruned))
assert gated.base_model is trained and not gated.gates.is_attached
assert trainer.state.global_step == 3
with torch.no_grad():
    gates = get_gated_model(trained).set_mask_(mask)
    torch.testing.assert_close(pruned(**batch).logits, gates(**batch).logits, atol=1e-6, rtol=1e-4)
"""


def test_the_snippets_of_the_library_section_run(tmp_path):
    section = README.read_text(encoding="utf-8").split("## Use it in your own code")[1].split("\n## ")[0]
    snippets = re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    assert len(snippets) == 5
    (tmp_path / "snippets.py").write_text("\n".join([BEFORE, *snippets, AFTER]), encoding="utf-8")
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **home, "PYTHONPATH": str(README.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "snippets.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^open heads: 18 of 24", done.stdout, flags=re.MULTILINE)


def test_its_tables_are_those_of_the_files(tmp_path):
    (tmp_path / "README.md").write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "notebooks").symlink_to(README.parent / "notebooks")
    assert main(["--update", str(tmp_path / "README.md")]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == README.read_text(encoding="utf-8")
    assert README.read_text(encoding="utf-8").count("<!-- end -->") >= 5
