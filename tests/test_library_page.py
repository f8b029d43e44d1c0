"""The snippets of docs/howto/library.md, run in order as one program."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "library.md"

BEFORE = """
import torch, transformers
from tokenizers import Tokenizer, models
torch.manual_seed(0)
size = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=8, intermediate_size=40, vocab_size=50)
transformers.BertForSequenceClassification(transformers.BertConfig(**size)).save_pretrained("path/to/model")
words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(50)}, unk_token="word0"))
transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0").save_pretrained("path/to/model")
ids = torch.randint(50, (48, 8))
train_set = [dict(input_ids=row, attention_mask=torch.ones_like(row), labels=int(row[0] > 25)) for row in ids]
select_set = train_set[:8]
def batches_of(rows):
    return [transformers.default_data_collator(rows[at : at + 8]) for at in range(0, len(rows), 8)]
prune_batches, retrain_batches, batches = batches_of(train_set[:32]), batches_of(train_set[32:]), batches_of(select_set)
"""
"""What this page and the README take as given: a model with its tokenizer in a folder, data sets, batches."""

AFTER = """
from gates import find_attention
def heads_of(model):
    return sum(site.heads for site in find_attention(model))
assert heads_of(pruned) == heads_of(again) == int(trainer.model.mask().sum()) == int(heads.sum()) == 18
assert trainer.model.gates.mode == "masked"
assert transformers.AutoTokenizer.from_pretrained("smaller").get_vocab() == tokenizer.get_vocab()
assert entropy.compute().shape == his.shape == (24,)
assert [one.after <= one.before for one in done] == [True] * len(done) and done
assert mask.tolist() == (his >= his.sort(descending=True).values[17]).float().tolist()
"""


def snippets():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_page_is_short_and_begins_with_a_program_of_at_most_25_lines():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 155
    assert len(snippets()[0].splitlines()) <= 25


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_its_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # where the page's batches are
    exec(compile("\n".join([BEFORE, *snippets(), AFTER]), "snippets.py", "exec"), {"__name__": "__main__"})
