"""Masks and scores read by blocks, against the whole matrix."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gates.scores import attention as module
from gates.scores.attention import attention_confidence, attention_entropy, bias_of, distribution_blocks, visible_keys

LOWEST = torch.finfo(torch.float32).min
CPU = torch.device("cpu")


def tensors(queries, keys, heads=3):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, length, 8, generator=generator) for length in (queries, keys))


@pytest.mark.parametrize("rows", [None, 1, 10])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_the_rows_of_the_whole(monkeypatch, rows, softcap, causal):
    monkeypatch.setattr(module, "BLOCK", 4)
    query, key = tensors(10, 6)
    bias = None if rows is None else torch.randn(2, 3, rows, 6)
    blocks = [scores for scores, _ in distribution_blocks(query, key, 0.3, bias, causal=causal, softcap=softcap)]
    assert [block.shape[2] for block in blocks] == [4, 4, 2]
    whole = torch.einsum("bhqd,bhkd->bhqk", query, key) * 0.3
    whole = whole if softcap is None else softcap * torch.tanh(whole / softcap)
    whole = whole if bias is None else whole + bias
    hidden = torch.ones(10, 6, dtype=torch.bool).triu(1)
    torch.testing.assert_close(torch.cat(blocks, 2), whole.masked_fill(hidden, -torch.inf) if causal else whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 10])
def test_all_kinds_of_masks_hide_the_same_keys(monkeypatch, causal, rows):
    monkeypatch.setattr(module, "BLOCK", 4)
    query, key = tensors(10, 6)
    visible = torch.rand(2, 1, rows, 8, generator=torch.Generator().manual_seed(1)) < 0.6  # of keys that are not there yet too
    whole = (visible[..., :6] & torch.ones(10, 6, dtype=torch.bool).tril() if causal else visible[..., :6]).expand(2, 1, 10, 6)
    for lowest in (LOWEST, -torch.inf):
        for mask in (visible, torch.zeros(2, 1, rows, 8).masked_fill(~visible, lowest)):
            assert torch.equal(visible_keys(query, key, mask, causal), whole.sum(-1))
            bias = bias_of(mask, causal, slice(0, 10), 6, CPU)
            assert torch.equal(bias.expand(2, 1, 10, 6), torch.zeros(2, 1, 10, 6).masked_fill(~whole, -torch.inf))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_may_say_the_same_of_all_keys(kind):
    query, key = tensors(3, 4)
    visible = torch.tensor([True, False, True]).view(1, 1, 3, 1)
    mask = visible if kind == torch.bool else torch.zeros(1, 1, 3, 1).masked_fill(~visible, LOWEST)
    assert visible_keys(query, key, mask, False).tolist() == [[[4, 0, 4]]]
    assert visible_keys(query, key, mask, True).tolist() == [[[1, 0, 3]]]
    assert bias_of(mask, False, slice(0, 3), 4, CPU).shape == (1, 1, 3, 4)


class Largest(TorchDispatchMode):
    """The largest tensor that is made, in bytes; views of what was there before do not count."""

    def __init__(self, *given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("measure", [attention_entropy, attention_confidence])
@pytest.mark.parametrize("given", ["nothing", "causal", "padding", "padding, as a summand", "sliding window"])
def test_memory_grows_with_the_length_and_not_with_its_square(measure, given):
    largest = []
    for length in (1024, 4096):
        query, key = (torch.randn(1, 2, length, 16) for _ in range(2))
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        if "window" in given:
            mask &= ~torch.ones(length, length, dtype=torch.bool).tril(-64)
        else:
            mask[..., : length // 4] = False
        mask = torch.where(mask, 0.0, LOWEST) if "summand" in given else mask
        mask = None if given in ("nothing", "causal") else mask
        with Largest(*(tensor for tensor in (query, key, mask) if tensor is not None)) as seen:
            measure(query, key, 0.25, mask, causal=given == "causal")
            visible_keys(query, key, mask, given == "causal")
        largest.append(seen.bytes)
    assert largest[1] <= 4.01 * largest[0]
    assert largest[1] < 4 * 4096**2, "the matrix of one head"
