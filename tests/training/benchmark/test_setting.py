import pytest
import torch
from transformers import GPT2Config

from gates import find_attention
from gates.errors import GateError
from training.benchmark.models import SHAPES
from training.benchmark.pruned import NEW_TOKENS, decoded_sizes
from training.benchmark.setting import DECODER, Setting, threads_of
from training.benchmark.size import Size

TINY = Setting("tiny", None, "cpu", 1, (Size(2, 16),))


@pytest.mark.parametrize("text", ["8", "8x", "x8", "0x8", "8x0", "8x16x2", "8*16", "-8x16", "8x1e3", "\uff18x16", ""])
def test_sizes_are_two_numbers(text):
    with pytest.raises(GateError, match="expected a batch size and a length, such as 8x128"):
        Size.parse(text)


def test_models_are_those_of_their_shape_and_the_same_each_time():
    shape = SHAPES["tiny"]
    for make in (TINY.classifier, TINY.generator):
        one, other = make(), make()
        assert [site.heads for site in find_attention(one)] == [shape.heads] * shape.layers
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_decoder_has_grouped_queries_and_learns_to_go_on():
    model, batch = TINY.trained(DECODER), TINY.batch(Size(3, 7), 1000, kind=DECODER)
    assert [(site.kind, site.heads, site.kv_heads) for site in find_attention(model)] == [("decoder", 4, 1)] * 2
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert model(**batch).loss.isfinite()


def test_a_model_that_is_given_stands_for_both(tmp_path):
    TINY.classifier().save_pretrained(tmp_path)
    own = Setting("tiny", str(tmp_path), "cpu", 1, (Size(2, 16),))
    assert TINY.kinds == ("encoder", "decoder")
    [kind] = own.kinds
    assert torch.equal(own.trained(kind).classifier.weight, TINY.classifier().classifier.weight)


def test_batches_fit_the_model():
    batch = TINY.batch(Size(3, 7), 1000)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 7)
    assert TINY.classifier()(**batch).loss.isfinite()


def test_a_model_of_ones_own(tmp_path):
    for part, writes in (("classifier", False), ("generator", True)):
        folder = tmp_path / part
        getattr(TINY, part)().save_pretrained(folder)
        own = Setting("tiny", str(folder), "cpu", 1, (Size(2, 16),))
        assert own.classifier()(**own.batch(Size(2, 16), 1000)).loss.isfinite()
        assert (own.generator() is not None) == writes
        own.check_lengths()
        too_long = Setting("tiny", str(folder), "cpu", 1, (Size(1, 5000),))
        with pytest.raises(GateError, match=r"--sizes has 1x5000, but the model has \d+ positions"):
            too_long.check_lengths()


def test_texts_that_are_written_on_leave_positions_for_it(tmp_path):
    sizes = (Size(1, 16), Size(2, 300), Size(2, 200), Size(4, 512))
    assert decoded_sizes(Setting("tiny", None, "cpu", 1, sizes)) == (Size(1, 16), Size(2, 128), Size(4, 128))
    for positions, expected in ((100, (Size(1, 16), Size(2, 68))), (NEW_TOKENS, ())):
        GPT2Config(n_positions=positions).save_pretrained(tmp_path)
        assert decoded_sizes(Setting("tiny", str(tmp_path), "cpu", 1, sizes[:3])) == expected


def test_a_folder_that_holds_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(GateError, match="holds no model"):
        Setting("tiny", str(tmp_path), "cpu", 1, (Size(1, 8),)).check_lengths()


def test_threads_are_those_before_afterwards():
    before = torch.get_num_threads()
    with threads_of(Setting("tiny", None, "cpu", before + 1, ())):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
