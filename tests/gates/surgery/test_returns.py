"""What the code of an attention module says of its outputs."""

import pytest
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.openai.modeling_openai import Attention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention
from transformers.models.sam.modeling_sam import SamAttention

from gates.surgery.slices import returned


@pytest.mark.parametrize(
    ("attention", "output", "expected"),
    [
        (VisionAttention, "proj", (1, False)),
        (BertAttention, "output.dense", (2, False)),
        (SamAttention, "out_proj", (2, False)),
        (Attention, "c_proj", (2, True)),
    ],
)
def test_outputs_are_counted(attention, output, expected):
    assert returned(attention.forward, output) == expected


def test_code_that_cannot_be_read_is_taken_for_the_usual():
    assert returned(len, "proj") == (2, False)
