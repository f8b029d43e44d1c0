"""Classes of attention that are exceptions to the table of layouts, with the reasons."""

from __future__ import annotations

from gates.surgery.layouts import POSITIONS, SPARSE

DIFFERENCE = "each of its heads is the difference of two"
RELATIVE = "its table of position biases has an axis of heads that is not known how to cut"
WIDTH = "it takes the width of its input for that of its heads together"
GATE_ONLY_CLASSES = {
    "LongformerSelfAttention": SPARSE,
    "BigBirdBlockSparseAttention": SPARSE,
    "BigBirdSelfAttention": SPARSE,  # what a short text makes of it
    "PegasusXGlobalLocalAttention": SPARSE,
    "DiffLlamaAttention": DIFFERENCE,
    "LayoutLMv3SelfAttention": RELATIVE,
    "LayoutLMv2SelfAttention": RELATIVE,
    "TrOCRAttention": WIDTH,
    "MgpstrAttention": WIDTH,
    "modeling_fsmt.Attention": WIDTH,
    "GPTNeoXJapaneseAttention": "it adds a bias of its own behind its output projection",
    "IBertSelfAttention": "its quantised projections keep integers of their weights beside them",
    "ConvBertSelfAttention": "half of its heads are convolutions",
    "Pix2StructTextAttention": RELATIVE,
    "FastSpeech2ConformerAttention": POSITIONS,
    "Wav2Vec2ConformerSelfAttention": POSITIONS,
    "SeamlessM4TConformerSelfAttention": POSITIONS,
    "WavLMAttention": "the gate of its position biases has weights for each head that are not known how to cut",
    "DogeAttention": "the scores of its dynamic mask have weights for each head that are not known how to cut",
}
"""Attention with the projections of a row above whose heads cannot be removed, with the reason; by the name of the class, or of
its file and the class where the name alone says little."""
TIME_FIRST_CLASSES = ("modeling_fsmt.Attention", "MultiheadAttention", "WavLMAttention")
"""Attention whose heads are ``[query, batch, features]`` before the output projection."""
REFUSED_CLASSES = {
    "ProphetNetNgramSelfAttention": "it predicts several future tokens by streams that share one attention module",
}
"""Attention that cannot be gated either, with the reason."""
BESIDE_ATTENTION = ("AttentionMLP", "AttentionBias", "AttentionOutput", "AttentionGRUCell", "AttentionResidual")
"""Ends of the names of classes that have attention in them and do not mix tokens by heads."""
