from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.benchmark.large import (
    LADDER,
    TINY,
    TRIED_IN,
    Decoder,
    bytes_frozen,
    bytes_full,
    free_bytes,
    largest_fitting,
    prepare_frozen,
)  # fmt: skip
from training.benchmark.setting import Setting
from training.benchmark.size import Size

BY_NAME = {decoder.name.split()[0]: decoder for decoder in LADDER}


@pytest.mark.parametrize(
    ("name", "parameters", "gates"),
    [
        ("3.4B", 3_426_473_600, 832),
        ("7B", 6_738_415_616, 1024),
        ("13B", 13_015_864_320, 1600),
        ("70B", 68_976_648_192, 5120),
        ("1.1B", 1_100_048_384, 704),
    ],
)
def test_parameters_are_those_of_the_published_models(name, parameters, gates):
    assert (BY_NAME[name].parameters, BY_NAME[name].gates) == (parameters, gates)


@pytest.mark.parametrize("decoder", [TINY, LADDER[0], LADDER[1]], ids=lambda decoder: decoder.name)
def test_parameters_are_those_of_transformers(decoder):
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=decoder.vocabulary, hidden_size=decoder.width, intermediate_size=decoder.inner,
                num_hidden_layers=decoder.layers, num_attention_heads=decoder.heads, num_key_value_heads=decoder.key_heads,
            )
        )  # fmt: skip
    assert decoder.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_bytes_worked_out_by_hand():
    """7 billion: 6,738,415,616 weights of 2 bytes and 1,024 gates of 16; all trained, four copies of the weights."""
    assert bytes_frozen(BY_NAME["7B"], "bfloat16") == 13_476_847_616
    assert bytes_full(BY_NAME["7B"], "bfloat16") == 53_907_341_312
    assert bytes_frozen(BY_NAME["70B"], "bfloat16") == 137_953_296_384 + 5120 * 16
    assert bytes_full(BY_NAME["70B"], "float32") == 16 * 68_976_648_192 + 5120 * 16


@pytest.mark.parametrize(("memory", "name"), [(80e9, "13B"), (26e9, "7B"), (13e9, "3.4B"), (141e9, "70B"), (1e6, None)])
def test_the_largest_that_fits(memory, name):
    assert largest_fitting("bfloat16", memory) == (None if name is None else BY_NAME[name])


def test_memory_of_the_optimiser_is_as_reckoned():
    """AdamW's moments are as many numbers as the weights have, in their precision."""
    for dtype in (torch.float32, torch.bfloat16):
        weights = torch.nn.Parameter(torch.ones(10, dtype=dtype))
        optimizer = torch.optim.AdamW([weights])
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        moments = [value for value in optimizer.state[weights].values() if value.numel() == 10]
        copies = [weights, weights.grad, *moments]
        decoder = Decoder("", 0, 1, 1, 10, 0, 0)  # of ten parameters, those of the last norm
        assert sum(one.nbytes for one in copies) == bytes_full(decoder, str(dtype).removeprefix("torch."))


def test_gates_are_trained_on_weights_that_rest():
    prepare_frozen(Setting("tiny", None, "cpu", 1, (Size(1, 8),)), TINY, "bfloat16")()


def test_free_memory_is_told_or_nothing_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr("training.benchmark.large.MEMORY_INFO", tmp_path / "meminfo")
    assert free_bytes(torch.device("cpu")) == 0
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:       3 kB\n")
    assert free_bytes(torch.device("cpu")) == 3072


def test_the_published_table_has_the_models_of_this_program_and_the_largest_that_fits_was_tried():
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.split("\n## Large language models\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")][2:]
    assert list(dict.fromkeys(row[0] for row in cells)) == [decoder.name for decoder in LADDER]
    (tried,) = [row for row in cells if row[7] != "no"]
    assert tried[3] == TRIED_IN
    assert f"in {tried[8]} GB and {round(int(tried[9].split()[0].replace(',', '')) / 1000)} seconds" in " ".join(
        section.split()
    )
