"""Hugging Face's Trainer with FSDP2 in two real processes: the gates, losses and weights of one process with all examples.

Accelerate shards on GPUs alone; on CPUs it takes FSDP's settings and ignores them. ``sharding_on_cpus`` mends this one
decision, and all else is accelerate's own code."""

import os
from types import SimpleNamespace

import pytest
import torch
import transformers as t
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from gates.errors import GateError
from gates.gating.distributed import ReplicatedGates, leave_gates_whole_
from gates.model import GateConfig, GatedModel, get_gated_model
from gates.trainer import GatedTrainer
from tests.gates.chosen import chosen
from tests.gates.gating.test_distributed import AVERAGES, FORKED, in_two
from tests.gates.test_trainer import arguments, examples, gated_bert

LLAMA = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 16, "initializer_range": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
FSDP = {"ddp_backend": "gloo", "fsdp": True}
LAYERS = {"bert": ["BertLayer"], "llama": ["LlamaDecoderLayer"]}
pytestmark = [
    AVERAGES,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate shards on the accelerator, and these are of CPUs"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings(FORKED),
    pytest.mark.usefixtures("frozen_imports"),
]


def gated(kind, **config):
    if kind == "bert":
        return gated_bert(**{"initial_log_alpha": 1.0, "draw_per": "batch", **config})
    torch.manual_seed(0)
    config = GateConfig(initial_log_alpha=1.0, **{"draw_per": "batch", **config})
    return get_gated_model(t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), config)


def rows(kind, count, **more):
    found = examples(count, **more)
    return found if kind == "bert" else [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in found]


class NoiseOfTheStep(ReplicatedGates):
    """The noise of gates in several processes, for one process."""

    def on_train_begin(self, *args, **kwargs):
        pass


def train(folder, kind, world, *, fsdp=(), resume=None, config=(), trainer=(), **more):
    """What a run of six steps ends with."""
    model = gated(kind, **dict(config))
    if world > 1:
        more |= {**FSDP, "fsdp_config": {"transformer_layer_cls_to_wrap": LAYERS[kind], **dict(fsdp)}}
    settings = arguments(
        folder, **{"max_steps": 6, "per_device_train_batch_size": 8 // world, "per_device_eval_batch_size": 8 // world, **more}
    )
    data = {"train_dataset": rows(kind, 64), "eval_dataset": rows(kind, 16, seed=2)}
    taught = GatedTrainer(model, settings, callbacks=[NoiseOfTheStep()] * (world == 1), **data, **dict(trainer))
    taught.train(resume_from_checkpoint=resume)
    evaluated = taught.evaluate()["eval_loss"]
    logged = [[row["loss"], row["grad_norm"]] for row in taught.state.log_history if "loss" in row]
    taught.save_model(f"{folder}/saved")
    return {
        "log_alpha": model.gates.log_alpha.detach(),
        "mask": model.mask(),
        "evaluated": torch.tensor(evaluated),
        "logged": torch.tensor(logged),
        "sharded": type(next(model.base_model.parameters()).data).__name__,
    }


def sharding_on_cpus():
    """Let accelerate shard here too."""
    plain = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **more):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def sharded(rank, function, args, more):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    AcceleratorState._reset_state(reset_partial_state=True)
    sharding_on_cpus()
    return function(*args, **more)


def in_two_shards(folder, function, *args, **more):
    """What a function returns in each of two processes that shard its models."""
    return in_two(folder, sharded, function, args, more)


def check(found, whole):
    """Two processes agree to the bit, and with one up to the order of sums."""
    assert [one["sharded"] for one in (whole, *found)] == ["Tensor", "DTensor", "DTensor"]
    for name in ("log_alpha", "mask", "logged"):
        assert torch.equal(found[0][name], found[1][name])
    assert torch.equal(found[0]["mask"], whole["mask"])
    for name in ("log_alpha", "evaluated", "logged"):
        torch.testing.assert_close(found[0][name], whole[name], atol=2e-4, rtol=1e-3)


CASES = {
    "a budget, with clipped gradients": ("bert", {"max_grad_norm": 0.3, "trainer": {"budget": 3}}),
    "accumulated batches": ("bert", {"gradient_accumulation_steps": 2, "trainer": {"budget": 3}}),
    "a price": ("bert", {"eval_on_start": True, "trainer": {"price": 0.5, "price_ramp": 0.0, "gate_learning_rate": 0.1}}),
    "tied weights": ("llama", {"trainer": {"budget": 3}}),
    "layers run again": ("llama", {"fsdp": {"activation_checkpointing": True}, "trainer": {"budget": 3}}),
}


@pytest.mark.parametrize("case", chosen(CASES, fast=(), integration=["a budget, with clipped gradients", "layers run again"]))
def test_a_sharded_run_is_that_of_one_process(tmp_path, case):
    kind, more = CASES[case]
    whole = train(str(tmp_path / "one"), kind, 1, **more)
    found = in_two_shards(tmp_path / "two", train, str(tmp_path / "two"), kind, 2, **more)
    check(found, whole)
    assert not torch.equal(whole["log_alpha"], gated(kind).gates.log_alpha)
    saved = [type(gated(kind).base_model).from_pretrained(tmp_path / name / "saved") for name in ("one", "two")]
    inputs = torch.stack([row["input_ids"] for row in examples(8, seed=3)])
    again = [GatedModel.from_pretrained(model, tmp_path / "two" / "saved").eval() for model in saved]
    torch.testing.assert_close(*(model(input_ids=inputs).logits for model in again), atol=1e-3, rtol=1e-3)


def resumed(folder, kind, form):
    """How an unbroken run ends, and one that goes on from a checkpoint before and after the mask is fixed."""
    more = {
        "fsdp": {"state_dict_type": form}, "trainer": {"budget": 3},
        "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant",
    }  # fmt: skip
    whole = train(folder, kind, 2, **more)
    return [whole, *(train(f"{folder}/{at}", kind, 2, resume=f"{folder}/checkpoint-{at}", **more) for at in (2, 4))]


@pytest.mark.parametrize("form", chosen(["FULL_STATE_DICT", "SHARDED_STATE_DICT"], fast=(), integration=["FULL_STATE_DICT"]))
def test_a_sharded_run_resumes(tmp_path, form):
    for whole, *again in in_two_shards(tmp_path, resumed, str(tmp_path), "bert", form):
        for other in again:
            assert torch.equal(other["mask"], whole["mask"])
            for name in ("log_alpha", "evaluated"):
                torch.testing.assert_close(other[name], whole[name], atol=1e-6, rtol=0)
    assert (tmp_path / "saved" / "model.safetensors").exists() == (form == "FULL_STATE_DICT")
    kept = gated("bert", budget=3).load_gates_(tmp_path / "saved").mask()
    assert kept.sum() == 3


def best(folder):
    """The evaluation losses of a run whose best checkpoint is loaded at its end, and that of the loaded model."""
    losses = [0.5, 0.1, 0.7]
    found = []

    class Scores(GatedTrainer):
        def evaluate(self, *args, **more):
            metrics = super().evaluate(*args, **more)
            if self.is_in_train:
                found.append(metrics["eval_loss"])
                metrics["eval_loss"] = losses[len(found) - 1]
            return metrics

    more = {"max_steps": 6, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    more |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    more |= {**FSDP, "fsdp_config": {"transformer_layer_cls_to_wrap": LAYERS["bert"]}}
    data = {"train_dataset": rows("bert", 64), "eval_dataset": rows("bert", 16, seed=2)}
    trainer = Scores(gated("bert"), arguments(folder, **more), budget=3, retrain=0.7, **data)
    trainer.train()
    return {"found": torch.tensor(found), "loaded": torch.tensor(trainer.evaluate()["eval_loss"])}


@pytest.mark.nightly
def test_the_best_checkpoint_of_a_sharded_run_comes_back(tmp_path):
    for run in in_two_shards(tmp_path, best, str(tmp_path)):
        assert run["loaded"] == run["found"][1] != run["found"][2]


def test_each_step_has_noise_of_its_own_again_and_again():
    gates, callback = gated("bert").gates, ReplicatedGates()

    def noise(step):
        args, state = SimpleNamespace(seed=1, process_index=0), SimpleNamespace(global_step=step)
        callback.on_step_begin(args, state, None, SimpleNamespace(gates=gates))
        return torch.rand(4, generator=gates.generator)

    assert torch.equal(noise(2), noise(2))
    assert not torch.equal(noise(2), noise(3))


# -- what is refused --------------------------------------------------------------------------------------------


def refused(folder):
    """What is said to an evaluation before training, and to FSDP1."""
    said = []
    trainer = GatedTrainer(gated("bert"), arguments(folder, **FSDP), eval_dataset=rows("bert", 16))
    with pytest.raises(GateError) as error:
        trainer.evaluate()
    said.append(str(error.value))
    AcceleratorState._reset_state()
    settings = arguments(folder, **FSDP, fsdp_config={"version": 1, "sync_module_states": False})
    with pytest.raises(GateError) as error:
        GatedTrainer(gated("bert"), settings)
    return [*said, str(error.value)]


def test_an_evaluation_before_training_and_fsdp1_are_refused(tmp_path):
    for early, old in in_two_shards(tmp_path, refused, str(tmp_path)):
        assert "call train() first" in early
        assert "FSDP's version is 1, but gates need 2" in old


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cpu_ram_efficient_loading": True}, "cpu_ram_efficient_loading is True, but gates need False"),
        ({"cpu_offload": True}, "cpu_offload is True, but gates need False"),
        ({"ignored_modules": "bert.pooler"}, r"ignored_modules is 'bert\.pooler', but gates need None"),
    ],
)
def test_settings_that_take_no_whole_parameters_are_refused(monkeypatch, more, message):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # accelerate writes into it
    with pytest.raises(GateError, match=message):
        leave_gates_whole_(FullyShardedDataParallelPlugin(fsdp_version=2, **more), gated("bert").gates)


def test_a_second_trainer_leaves_its_own_gates_whole():
    plugin, second = FullyShardedDataParallelPlugin(fsdp_version=2), gated("bert").gates
    leave_gates_whole_(plugin, gated("bert").gates)
    leave_gates_whole_(plugin, second)
    assert plugin.ignored_modules == [second]


def test_draws_per_example_are_refused():
    with pytest.raises(GateError, match=r"the gates are drawn per example.*use GateConfig\(draw_per='batch'\)"):
        leave_gates_whole_(FullyShardedDataParallelPlugin(fsdp_version=2), gated("bert", draw_per="example").gates)
