"""Activation checkpointing changes no result: what is drawn is drawn once, though layers run twice."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from gates.gating.head_gates import HeadGates
from tests.training.pruner.fits import fit
from tests.training.runs import make_pruner
from training.pruner.module import checkpoint_activations_

SMALL = {"vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, **SMALL}
BERT = {"model_type": "bert", **SIZES}
LLAMA = {"model_type": "llama", **SIZES}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **SMALL,
}  # fmt: skip


def trained(**settings):
    """The weights and gates of a run, and for each training step its loss and how often a layer's attention ran in it."""
    pruner, losses, runs = make_pruner(**settings), [], [0]
    attention = pruner.backbone.bert.encoder.layer[0].attention.self
    attention.register_forward_pre_hook(lambda module, args: runs.__setitem__(0, runs[0] + torch.is_grad_enabled()))
    step = pruner.training_step

    def noted(batch, batch_idx):
        loss = step(batch, batch_idx)
        losses.append(loss.detach().clone())
        return loss

    pruner.training_step = noted
    fit(pruner, limit_val_batches=1, val_check_interval=4)
    return dict(pruner.named_parameters()), torch.stack(losses), runs[0] / len(losses)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{"draw_per": "example"}, {"draw_per": "batch", "pipelined": False}])
def test_the_same_to_the_bit(settings):
    """With dropout and stochastic gates, of each example or of the batch, whether weights rest or not, and validation."""
    kept, losses, once = trained(**settings)
    anew, again, twice = trained(**settings, checkpoint_activations=True)
    assert (once, twice) == (1, 2)
    assert torch.equal(losses, again)
    assert kept.keys() == anew.keys()
    assert all(torch.equal(kept[name], anew[name]) for name in kept)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("family", [BERT, LLAMA, BART], ids=lambda family: family["model_type"])
def test_less_is_kept_and_gradients_are_the_same(family, is_frozen):
    """Also where layers have dropout of their own (BART) and caches (Llama)."""
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**family)).train(not is_frozen)
        if checkpointed:
            checkpoint_activations_(model, is_frozen=is_frozen)
        gates, ids = HeadGates(model, initial_log_alpha=0.0), torch.arange(3, 19).view(2, 8).index_fill_(1, torch.tensor(7), 2)
        gates.mode = "stochastic"
        kept = [0]

        def count(tensor, kept=kept):
            kept[0] += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        with gates.attached(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1])).loss
            loss.backward()
        found.append((kept[0], loss.detach(), gates.log_alpha.grad, [p.grad for p in model.parameters()]))
        model.eval()
        assert not any(module.training for module in model.modules())
    (most, loss, gradient, of_weights), (least, again, same, of_same) = found
    assert least < most / 2
    assert gradient.abs().max() > 0
    torch.testing.assert_close((loss, gradient, of_weights), (again, same, of_same), rtol=0, atol=0)
