"""The snippet of finetuned.md prunes every kind of model that it names."""

import re
from pathlib import Path

import pytest
import torch
import transformers as t

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "finetuned.md"
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}


def classifier():
    return t.BertForSequenceClassification(t.BertConfig(**SIZES, num_labels=3))


def language_model():
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=4))


def translator():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    return t.T5ForConditionalGeneration(t.T5Config(vocab_size=32, **sizes))


def padded(filler, *, decodes):
    """Four batches of two texts with three to eight tokens, and a token of choice where there is none."""
    torch.manual_seed(1)
    lengths, batches = torch.tensor([3, 8]), []
    for _ in range(4):
        mask = (torch.arange(8) < lengths[:, None]).long()
        ids = torch.randint(1, 31, (2, 8)) * mask + filler * (1 - mask)
        batch = {"input_ids": ids, "attention_mask": mask}
        if decodes:
            batch |= {f"decoder_{name}": value[:, :6] for name, value in batch.items()}
        batches.append(batch)
    return batches


@pytest.mark.parametrize("make", [classifier, language_model, translator])
def test_the_snippet_prunes_and_does_not_look_at_padding(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    found = []
    for filler in (0, 31):
        torch.manual_seed(0)
        model = make().eval()
        names = {"model": model, "batches": padded(filler, decodes=make is translator), "tokenizer": None}
        exec(snippet.replace("budget=18", "budget=5"), names)
        found.append(names["gated"].gates.log_alpha.detach())
        assert int(names["gated"].mask().sum()) == 5
        assert (tmp_path / "smaller" / "model.safetensors").is_file()
    assert len(found[0].unique()) > 1
    torch.testing.assert_close(*found, atol=1e-3, rtol=0)
