"""Gates of a model that two processes share, in two real processes: those of one process with all examples."""

import os

import pytest
import torch
from packaging.version import Version
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from gates import GateConfig, GateError, get_gated_model, replicate_
from tests.gates.chosen import chosen

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 48, "pad_token_id": 0,
}  # fmt: skip
STEPS, BUDGET, SEED = 8, 3, 5
FORKED = "ignore:.*multi-threaded, use of fork.*:DeprecationWarning"
AVERAGES = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"),
    reason="over Gloo, FSDP2 of an older PyTorch sums gradients instead of averaging them",
)


def build(kind):
    torch.manual_seed(0)
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES))
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))


def shard_(model, world):
    mesh = distributed.init_device_mesh("cpu", (world,))
    layers = model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


def batch(kind, step, rank, world):
    """This process's share of a batch."""
    noise = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 50, (8, 7), generator=noise)
    labels = ids if kind == "llama" else torch.randint(2, (8,), generator=noise)
    return {"input_ids": ids[rank::world], "labels": labels[rank::world]}


def counted(layers):
    """How often layers run, as a list of one number."""
    runs = [0]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    return runs


def train(kind, rank, world, *, shard_first=False, checkpointed=False, stops_at=None):
    """The gates' gradients of each step, and how they end."""
    model = build(kind)
    attention = [part for part in model.modules() if type(part).__name__ in ("BertSelfAttention", "LlamaAttention")]
    runs = counted(attention)
    if checkpointed:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    if world > 1 and shard_first:
        shard_(model, world)
    gated = get_gated_model(model, GateConfig(budget=BUDGET, initial_log_alpha=0.0, draw_per="batch")).train()
    if world > 1 and not shard_first:
        shard_(gated.base_model, world)
    if world > 1:
        replicate_(gated.gates, seed=SEED)
    else:
        gated.gates.generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(gated.parameter_groups(1e-2, gate_learning_rate=0.05))
    gradients = []
    for step in range(STEPS):
        if step == stops_at and rank == 1:
            os._exit(9)
        for part in range(2):  # of what one optimiser step accumulates
            (gated(**batch(kind, 2 * step + part, rank, world)).loss / 2).backward()
        gradients.append(gated.gates.log_alpha.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        gated.step_((step + 1) / STEPS, optimizer)
    gated.fix_mask_()
    kept = {
        "runs": runs[0] // (2 * STEPS * len(attention)),
        "gradients": torch.stack(gradients),
        "log_alpha": gated.gates.log_alpha.detach(),
        "mask": gated.gates.mask,
    }
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(gated.base_model, options=whole) if world > 1 else gated.base_model.state_dict()
    return kept | {"sharded": type(next(gated.base_model.parameters()).data).__name__, "weights": weights}


def in_one_of_two(rank, folder, function, args):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def in_two(folder, function, *args):
    """What a function of the rank returns in each of two processes."""
    folder.mkdir(exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    torch.multiprocessing.start_processes(in_one_of_two, (str(folder), function, args), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@AVERAGES
@pytest.mark.filterwarnings(FORKED)
@pytest.mark.parametrize(
    ("kind", "shard_first", "checkpointed"),
    chosen(
        [("bert", False, False), ("bert", True, False), ("llama", False, False), ("bert", True, True), ("llama", False, True)],
        fast=(),
        integration=[("bert", True, False), ("llama", False, True)],
    ),
)
def test_a_sharded_model_has_the_gates_of_one_process(tmp_path, kind, shard_first, checkpointed):
    """The same gradients in every step, with accumulation, the same log_alpha and the same mask, up to the order of sums; also
    where every layer runs again in the backward pass."""
    whole = train(kind, 0, 1)
    found = in_two(tmp_path, lambda rank: train(kind, rank, 2, shard_first=shard_first, checkpointed=checkpointed))
    assert [one["runs"] for one in (whole, *found)] == [1, 1 + checkpointed, 1 + checkpointed]
    assert [one["sharded"] for one in (whole, *found)] == ["Tensor", "DTensor", "DTensor"]
    for name in ("gradients", "log_alpha", "mask"):
        assert torch.equal(found[0][name], found[1][name])
    scale = whole["gradients"].abs().max()
    assert scale > 1e-6
    assert (whole["gradients"] != 0).float().mean() > 0.1
    torch.testing.assert_close(found[0]["gradients"], whole["gradients"], atol=float(scale) * 1e-3, rtol=1e-3)
    torch.testing.assert_close(found[0]["log_alpha"], whole["log_alpha"], atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0]["mask"], whole["mask"])
    assert whole["mask"].sum() == BUDGET
    model = build(kind)
    model.load_state_dict(found[0]["weights"])  # gathered, and as good as those of one process
    before = build(kind).state_dict()
    change = max((weight - before[name]).abs().max() for name, weight in whole["weights"].items())
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], weight, atol=float(change) * 0.01, rtol=1e-3)


def draws(rank):
    drawn = {}
    for draw_per in ("batch", "example"):
        gated = get_gated_model(build("bert"), GateConfig(draw_per=draw_per, initial_log_alpha=0.0)).train()
        replicate_(gated.gates, seed=SEED)
        drawn[draw_per] = torch.rand(5, generator=gated.gates.generator)
    gated = get_gated_model(build("bert"), GateConfig(initial_log_alpha=float(rank)))
    for name, seed in (("gates", SEED), ("seed", rank)):
        try:
            replicate_(gated.gates, seed=seed)
        except GateError as error:
            drawn[name] = str(error)
        gated = get_gated_model(build("bert"))
    return drawn


@pytest.mark.filterwarnings(FORKED)
def test_a_draw_for_the_batch_is_shared_draws_per_example_are_not_and_gates_that_differ_are_refused(tmp_path):
    first, second = in_two(tmp_path, draws)
    assert torch.equal(first["batch"], second["batch"])
    assert not torch.equal(first["example"], second["example"])
    for found in (first, second):  # both say so, and neither waits for the other
        assert found["gates"] == found["seed"]
        assert "gates, masks or seeds of the processes differ" in found["gates"]


def survives(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        train("bert", rank, 2, stops_at=3)
    except RuntimeError as error:
        torch.save(str(error), f"{folder}/error.pt")
        os._exit(3)


@pytest.mark.integration
@pytest.mark.filterwarnings(FORKED)
def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    """Nobody waits in vain for its gradients."""
    context = torch.multiprocessing.get_context("fork")
    both = [context.Process(target=survives, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    ended = [process.exitcode for process in both]
    for process in both:
        process.kill()
    assert ended == [3, 9]
    assert torch.load(tmp_path / "error.pt", weights_only=True)


# -- what is refused --------------------------------------------------------------------------------------------


def test_one_process_is_refused():
    with pytest.raises(GateError, match="there is one process"):
        replicate_(get_gated_model(build("bert")).gates, seed=0)


def test_gates_that_are_sharded_too_are_refused(one_process):
    gated = get_gated_model(build("bert"))
    fully_shard(gated, mesh=distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(GateError, match="log_alpha of these gates is a DTensor, so the gates are sharded too"):
        replicate_(gated.gates, seed=0)


def test_a_sharded_model_is_not_run_again_to_find_out_which_rows_are_whose(one_process):
    """That would take the weights from the layer that is running."""
    gated = get_gated_model(build("bert"), GateConfig(draw_per="example")).train()
    shard_(gated.base_model, 1)
    replicate_(gated.gates, seed=0)
    gated(input_ids=torch.ones(3, 7, dtype=torch.long))  # its shape tells
    with pytest.raises(GateError, match=r"are ambiguous for.*unsharded.*draw_per='batch'"):
        gated(input_ids=torch.ones(4, 8, dtype=torch.long))
