import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as t

from gates.errors import GateError
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, open_probability
from gates.model import GateConfig, GatedModel, get_gated_model
from gates.trainer import GatedTrainer

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 20}
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),  # on a machine without a GPU
    pytest.mark.usefixtures("frozen_imports"),
]


def gated_bert(*, dropout=0.0, seed=0, **config):
    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = t.BertForSequenceClassification(t.BertConfig(max_position_embeddings=16, initializer_range=0.1, **rates, **SIZE))
    return get_gated_model(model, GateConfig(**config))


def examples(count=256, *, seed=1):
    """Sequences of 8 tokens; the label says whether token 3 is among them, so the first position has to look for it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 20, (count, 8), generator=generator)
    labels = torch.arange(count) % 2
    ids[1::2, 1:][torch.arange(count // 2), torch.randint(7, (count // 2,), generator=generator)] = 3
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(ids, labels, strict=True)]


def arguments(directory, **more):
    defaults = {
        "output_dir": str(directory), "max_steps": 4, "per_device_train_batch_size": 8, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True,
    }  # fmt: skip
    return t.TrainingArguments(**{**defaults, **more})


@pytest.mark.integration
def test_trainer_learns_the_task_while_heads_close(tmp_path):
    gated = gated_bert()
    more = {"max_steps": 150, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "logging_steps": 10}
    trainer = GatedTrainer(
        gated,
        arguments(tmp_path, **more),
        train_dataset=examples(512),
        eval_dataset=examples(128, seed=9),
        price=0.05,
        gate_learning_rate=0.1,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    heads = [row["open_heads"] for row in trainer.state.log_history if "open_heads" in row]
    assert after < before / 4
    assert heads[0] == 8
    assert heads[-1] == sum(gated.open_heads()["encoder"]) < 6
    assert gated.gates.log_alpha.abs().max() <= LOG_ALPHA_LIMIT


@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_price_of_gates_that_learn_is_in_the_training_loss_and_not_in_the_evaluation_loss(tmp_path, is_fixed):
    gated, batch = gated_bert(), examples(8)
    if is_fixed:
        gated.set_mask_(torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]))
    losses = {}
    for price in (0.0, 5.0):
        trainer = GatedTrainer(gated, arguments(tmp_path), train_dataset=batch, eval_dataset=batch, price=price, price_ramp=0.0)
        inputs = trainer.data_collator(batch)
        torch.manual_seed(3)
        trainer.current_gradient_accumulation_steps = 1
        training = trainer.training_step(gated, inputs).item()
        losses[price] = training, trainer.evaluate()["eval_loss"]
    expected = 0 if is_fixed else 5.0 * open_probability(gated.gates.log_alpha).sum().item()
    assert losses[5.0][0] - losses[0.0][0] == pytest.approx(expected, rel=1e-4)
    assert losses[5.0][1] == losses[0.0][1]


def mean_of(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits.view(-1, outputs.logits.shape[-1]), labels.view(-1))


class OwnLoss(GatedTrainer):
    """A loss of one's own in place of Trainer's, the mean of a micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return mean_of(model(**inputs), inputs["labels"])


def sum_of(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits.view(-1, outputs.logits.shape[-1])
    total = torch.nn.functional.cross_entropy(logits, labels.view(-1), reduction="sum")
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def gated_of(family):
    torch.manual_seed(0)
    if family == "bert":
        return gated_bert(draw_per="batch")
    if family == "t5":
        config = t.T5Config(
            vocab_size=20, d_model=16, d_kv=4, d_ff=20, num_layers=1, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
        return get_gated_model(t.T5ForConditionalGeneration(config), GateConfig(draw_per="batch"))
    config = t.GPT2Config(
        n_embd=16, n_layer=1, n_head=4, vocab_size=20, n_positions=16, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return get_gated_model(t.GPT2LMHeadModel(config), GateConfig(draw_per="batch"))


def rows_for(family, count=44):
    rows = examples(count)
    if family == "bert":
        return rows
    names = ["input_ids", "labels", *["decoder_input_ids"] * (family == "t5")]
    return [dict.fromkeys(names, row["input_ids"]) for row in rows]


def without_shuffling(kind):
    """The trainer, with its examples in their order."""
    return type(
        kind.__name__,
        (kind,),
        {"_get_train_sampler": lambda self, *args: torch.utils.data.SequentialSampler(self.train_dataset)},
    )


@pytest.mark.parametrize(
    ("family", "kind", "more", "smoothing", "accumulation"),
    [
        ("bert", GatedTrainer, {}, 0.0, 1),
        ("bert", GatedTrainer, {}, 0.0, 3),
        ("t5", GatedTrainer, {}, 0.0, 3),
        ("bert", GatedTrainer, {}, 0.1, 3),
        ("t5", GatedTrainer, {}, 0.1, 3),
        ("gpt2", GatedTrainer, {}, 0.1, 3),
        ("bert", OwnLoss, {}, 0.0, 3),
        ("t5", OwnLoss, {}, 0.0, 3),
        ("t5", GatedTrainer, {"compute_loss_func": mean_of}, 0.0, 3),
        ("t5", GatedTrainer, {"compute_loss_func": sum_of}, 0.0, 3),
    ],
)
def test_training_is_that_of_a_loop_written_by_hand(tmp_path, family, kind, more, smoothing, accumulation):
    """Weights and gates after four steps: mean of the micro-batches, price for each step, weights alone clipped. The last step
    has fewer micro-batches where three are accumulated."""
    price, clip, rate, gate_rate = 0.3, 0.05, 0.1, 0.2
    rows, gated = rows_for(family), gated_of(family)
    gated.gates.generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(gated.parameter_groups(rate, gate_rate))
    settings = arguments(
        tmp_path, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation, max_grad_norm=clip,
        lr_scheduler_type="constant", label_smoothing_factor=smoothing,
    )  # fmt: skip
    scheduled = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    trainer = without_shuffling(kind)(
        gated, settings, train_dataset=rows, price=price, price_ramp=0.0, optimizers=scheduled, **more
    )
    trainer.train()

    other = gated_of(family).train()
    other.gates.generator = torch.Generator().manual_seed(5)
    batches = [t.default_data_collator(rows[start : start + 4]) for start in range(0, 44, 4)]
    for step in range(4):
        parts = batches[step * accumulation : (step + 1) * accumulation]
        for batch in parts:
            logits = other(**batch).logits.flatten(0, -2)
            labels = batch["labels"].flatten()
            if family == "gpt2":
                logits, labels = logits.view(4, 8, -1)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
            (loss / len(parts)).backward()
        (price * open_probability(other.gates.log_alpha).sum()).backward()
        torch.nn.utils.clip_grad_norm_(other.base_model.parameters(), clip)
        with torch.no_grad():
            for parameter in other.base_model.parameters():
                parameter -= rate * (0 if parameter.grad is None else parameter.grad)
            other.gates.log_alpha.sub_(gate_rate * other.gates.log_alpha.grad)
        other.zero_grad()
    torch.testing.assert_close(gated.gates.log_alpha, other.gates.log_alpha, rtol=1e-4, atol=1e-6)
    for (name, found), (_, expected) in zip(gated.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=name)


def test_each_training_has_a_new_model(tmp_path):
    made = []

    def model_init():
        made.append(gated_bert(draw_per="batch"))
        return made[-1]

    trainer = GatedTrainer(args=arguments(tmp_path), model_init=model_init, train_dataset=examples(32), budget=3)
    for count in (2, 3):
        trainer.train()
        assert len(made) == count
        assert trainer.model is made[-1]
        assert int(made[-1].mask().sum()) == 3
        assert made[-1].gates.mode == "masked"
    assert torch.equal(made[1].gates.log_alpha, made[2].gates.log_alpha)
    fresh = gated_bert()
    assert not torch.equal(made[1].classifier.weight, fresh.classifier.weight)
    with pytest.raises(GateError, match="expected a GatedModel"):
        GatedTrainer(args=arguments(tmp_path), model_init=lambda: gated_bert().unload())


def test_gates_have_their_own_learning_rate_and_no_decay(tmp_path):
    gated = gated_bert()
    trainer = GatedTrainer(gated, arguments(tmp_path, weight_decay=0.1), train_dataset=examples(8), gate_learning_rate=0.07)
    groups = trainer.create_optimizer().param_groups
    of_gates = [group for group in groups if any(p is gated.gates.log_alpha for p in group["params"])]
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in of_gates] == [(0.07, 0.0, 1)]
    rest = [id(p) for group in groups if group is not of_gates[0] for p in group["params"]]
    assert sorted(rest) == sorted(id(p) for p in gated.base_model.parameters())
    assert {group["lr"] for group in groups if group is not of_gates[0]} == {1e-3}


def state(gated):
    return {name: value.clone() for name, value in gated.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("family", ["bert", "gpt2"])  # dropout and gate noise; tied weights
def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path, family):
    def trainer(name, **more):
        gated = gated_bert(dropout=0.1) if family == "bert" else gated_of(family)
        return GatedTrainer(gated, arguments(tmp_path / name, max_steps=6, **more), train_dataset=rows_for(family, 64))

    whole = trainer("whole")
    whole.train()
    first = trainer("parts", save_strategy="steps", save_steps=3)
    first.train()
    again = trainer("parts")
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    expected, found = state(whole.model), state(again.model)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)
    assert bool((expected["gates.learned.log_alpha"] != 2.5).any())


def test_a_checkpoint_is_the_base_model_with_the_gates_beside_it(tmp_path):
    gated = gated_bert()
    trainer = GatedTrainer(gated, arguments(tmp_path, save_strategy="steps", save_steps=4), train_dataset=examples(32))
    trainer.train()
    directory = tmp_path / "checkpoint-4"
    assert {"config.json", "model.safetensors", "gate_config.json", "gates.safetensors"} <= {
        p.name for p in directory.iterdir()
    }
    model = t.AutoModelForSequenceClassification.from_pretrained(directory)
    reloaded = GatedModel.from_pretrained(model, directory)
    ids = torch.stack([row["input_ids"] for row in examples(4)])
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(ids).logits, gated.eval()(ids).logits)
    assert torch.equal(reloaded.gates.log_alpha, gated.gates.log_alpha)


def trainer_with_scores(gated, folder, scores, **options):
    """It saves and evaluates after every step, is told these scores, and loads the checkpoint of the highest at the end."""
    more = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": len(scores),
        "load_best_model_at_end": True, "metric_for_best_model": "worst", "greater_is_better": True,
    }  # fmt: skip
    rows, given = examples(32), iter(scores)
    trainer = GatedTrainer(
        gated, arguments(folder, **more), train_dataset=rows, eval_dataset=rows[:8], compute_metrics=lambda _: {}, **options
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_worst": next(given)}
    return trainer


@pytest.mark.parametrize(("best", "is_kept"), [(1, False), (4, True)])
def test_a_best_checkpoint_from_before_the_budget_is_left(tmp_path, best, is_kept):
    """The run ends with the budgeted heads, whatever did best on the way."""
    gated = gated_bert(budget=3)
    trainer = trainer_with_scores(gated, tmp_path, [float(step == best) for step in range(1, 6)], retrain=0.4)
    if is_kept:
        trainer.train()
    else:
        with pytest.warns(UserWarning, match="is from before the budget of 3 was reached"):
            trainer.train()
    assert gated.gates.mode == "masked"
    assert int(gated.mask().sum()) == 3
    at_end = gated_bert(budget=3)
    at_end.load_gates_(tmp_path / f"checkpoint-{best if is_kept else 5}")
    assert torch.equal(gated.gates.log_alpha, at_end.gates.log_alpha)


def test_a_checkpoint_of_other_gates_is_refused_before_the_run(tmp_path):
    more = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    GatedTrainer(gated_bert(), arguments(tmp_path, **more), train_dataset=examples(32)).train()
    other = gated_bert(temperature=0.5, seed=7)
    before = state(other)
    trainer = GatedTrainer(other, arguments(tmp_path, **more), train_dataset=examples(32))
    with pytest.raises(GateError, match=r"temperature 0\.33"):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, before[name]) for name, value in state(other).items())


def test_columns_the_model_does_not_take_are_dropped_and_labels_are_found(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = examples(16)
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [row["input_ids"].tolist() for row in rows],
            "labels": [row["labels"] for row in rows],
            "text": ["x"] * 16,
        }
    )
    trainer = GatedTrainer(gated_bert(), arguments(tmp_path), train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.label_names == ["labels"]
    predictions = trainer.predict(data)
    assert predictions.predictions.shape == (16, 2)
    assert predictions.label_ids.tolist() == [row["labels"] for row in rows]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"price": -1.0}, "price is -1.0"),
        ({"price": float("nan")}, "price is nan"),
        ({"price_ramp": 1.5}, "price_ramp is 1.5; expected a number from 0 to 1"),
        ({"gate_learning_rate": float("inf")}, "gate_learning_rate is inf"),
        ({"budget": 3, "price": 0.1}, r"a price of 0\.1 and a budget of 3 are given"),
        ({"budget": 9}, "the budget is 9"),
        ({"budget": 3, "retrain": 1.5}, r"retrain is 1\.5"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, more, message):
    with pytest.raises(GateError, match=message):
        GatedTrainer(gated_bert(), arguments(tmp_path), train_dataset=examples(8), **more)


PROCESS = """
import os, sys
import torch
from gates.trainer import GatedTrainer
from tests.gates.test_trainer import arguments, examples, gated_bert

gated = gated_bert(draw_per="example")
settings = arguments(sys.argv[1], ddp_backend="gloo", gradient_accumulation_steps=2)
trainer = GatedTrainer(gated, settings, train_dataset=examples(64), price=0.5, gate_learning_rate=0.1)
trainer.train()
assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
noise = torch.tensor(gated.gates.generator.initial_seed())
torch.save([gated.gates.log_alpha.detach(), gated.classifier.weight.detach(), noise], f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


@pytest.mark.nightly
def test_two_processes_stay_in_step(tmp_path):
    (tmp_path / "process.py").write_text(PROCESS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(tmp_path / "process.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, str(tmp_path)], check=True, capture_output=True, env=environment, cwd=tmp_path)
    (*first, noise), (*second, other_noise) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert noise != other_noise  # draws per example are each process's own
    for tensor, other, fresh in zip(first, second, (gated_bert().gates.log_alpha, gated_bert().classifier.weight), strict=True):
        assert torch.equal(tensor, other)
        assert not torch.allclose(tensor, fresh, atol=1e-4)


@pytest.mark.nightly
def test_importing_needs_no_accelerate():
    code = "import sys; sys.modules['accelerate'] = sys.modules['peft'] = None; import gates.trainer, gates.model"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- a budget ----------------------------------------------------------------------------------------------------


class Course(t.TrainerCallback):
    """Keeps the expected number of open heads and the mode of the gates after every step."""

    def __init__(self):
        self.expected, self.modes = [], []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.expected.append(float(model.gates.open_probability().detach().sum()))
        self.modes.append(model.gates.mode)


def test_training_ends_with_exactly_the_budget_and_retrains_with_it(tmp_path):
    course, gated = Course(), gated_bert(budget=3)
    settings = arguments(tmp_path, max_steps=10)
    trainer = GatedTrainer(gated, settings, train_dataset=examples(64), callbacks=[course], retrain=0.2)
    trainer.train()
    assert gated.gates.mode == "masked"
    assert sum(gated.open_heads()["encoder"]) == 3
    assert course.modes == ["stochastic"] * 7 + ["masked"] * 3
    assert course.expected[:5] == sorted(course.expected[:5], reverse=True)
    assert course.expected[-1] == pytest.approx(3, abs=0.5)
    logged = {row["step"]: row.get("gate_price") for row in trainer.state.log_history if "loss" in row}
    assert [step for step, price in logged.items() if price is not None] == list(range(1, 8))  # then the mask is fixed
    assert logged[2] > 0


def test_it_does_what_a_plain_loop_does(tmp_path):
    rows, batches = examples(32), []

    class Batches(GatedTrainer):
        def training_step(self, model, inputs, *more):
            batches.append({name: tensor.clone() for name, tensor in inputs.items()})
            return super().training_step(model, inputs, *more)

    settings = {"max_steps": 4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    gated, plain = gated_bert(), gated_bert(budget=3)
    for both in (gated, plain):
        both.gates.generator = torch.Generator().manual_seed(4)
    Batches(gated, arguments(tmp_path, **settings), train_dataset=rows, budget=3, retrain=0.0, gate_learning_rate=0.1).train()
    optimizer = torch.optim.AdamW(plain.train().parameter_groups(1e-3, gate_learning_rate=0.1), weight_decay=0.0)
    for step, batch in enumerate(batches):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step_((step + 1) / 4, optimizer)
    assert torch.equal(plain.fix_mask_(), gated.mask())
    torch.testing.assert_close(gated.gates.log_alpha, plain.gates.log_alpha, atol=1e-6, rtol=0)


def test_a_run_with_a_budget_resumes(tmp_path):
    more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = gated_bert()
    GatedTrainer(whole, arguments(tmp_path, **more), train_dataset=examples(64), budget=3).train()
    for step in (2, 4):  # before and after the mask is fixed
        again = gated_bert(seed=9)
        trainer = GatedTrainer(again, arguments(tmp_path, **more), train_dataset=examples(64), budget=3)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert int(again.mask().sum()) == 3
        if step == 4:
            assert torch.equal(again.mask(), whole.mask())
        torch.testing.assert_close(again.gates.log_alpha, whole.gates.log_alpha, atol=1e-6, rtol=0)


def test_the_best_checkpoint_brings_its_gates(tmp_path):
    gated = gated_bert()
    trainer_with_scores(gated, tmp_path, [0.3, 0.9, 0.1]).train()
    other = gated_bert()
    other.load_gates_(tmp_path / "checkpoint-2")
    assert torch.equal(gated.gates.log_alpha, other.gates.log_alpha)
    other.load_gates_(tmp_path / "checkpoint-3")
    assert not torch.equal(gated.gates.log_alpha, other.gates.log_alpha)
