import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy.special import log_softmax

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from tests.models import build, inputs, logits
from tests.training.pruner.fits import N, Save, assert_same, fit, make_data, state
from tests.training.runs import make_pruner, make_trainer
from training.pruner.distillation import Teacher, distillation_terms, hidden_mse, layer_states, logit_kl, recorded_outputs

DISTIL = {"distil": 0.5, "distil_hidden": 0.3}
MASK = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])


TAUGHT = (N, N + 5, 2 * N + 3)
"""Steps of the shared run with a teacher after which checkpoints are kept."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folder with checkpoints of a run without distillation, at the end of its fine-tuning and after it."""
    folder = tmp_path_factory.mktemp("plain")
    fit(None, Save(folder, N, N + 3), max_steps=N + 3)
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """State at the end of a run with a teacher, and the folder with its checkpoints."""
    folder, pruner = tmp_path_factory.mktemp("taught"), make_pruner(**DISTIL)
    trainer = make_trainer(callbacks=[Save(folder, *TAUGHT)])
    trainer.fit(pruner, make_data())
    trainer.save_checkpoint(folder / "final.ckpt", weights_only=True)
    return state(pruner), folder


def distilled(*callbacks, **more):
    return fit(make_pruner(**DISTIL), *callbacks, **more)


# -- the terms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_logit_kl_is_the_divergence(temperature):
    student, teacher = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    valid = torch.rand(4, 6) > 0.4
    p, q = (log_softmax(logits.double().numpy() / temperature, axis=-1) for logits in (teacher, student))
    each = temperature**2 * (np.exp(p) * (p - q)).sum(-1)
    assert float(logit_kl(student, teacher, temperature=temperature)) == pytest.approx(each.mean(), rel=1e-5)
    found = logit_kl(student, teacher, valid=valid, temperature=temperature)
    assert float(found) == pytest.approx(each[valid.numpy()].mean(), rel=1e-5)
    student[~valid] = 100.0
    assert torch.equal(logit_kl(student, teacher, valid=valid, temperature=temperature), found)


def test_logit_kl_has_its_minimum_at_the_teacher_and_teaches_the_student_alone():
    teacher = torch.randn(3, 5, requires_grad=True)
    student = teacher.detach().clone().requires_grad_()
    loss = logit_kl(student, teacher, temperature=2.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(student.grad, torch.zeros(3, 5), atol=1e-6, rtol=0)
    assert teacher.grad is None
    assert float(logit_kl(student.detach(), teacher, valid=torch.zeros(3, dtype=torch.bool))) == 0.0


def test_hidden_mse_is_in_units_of_the_variance():
    teacher = [torch.randn(3, 4, 6) * scale + 2 for scale in (1.0, 10.0)]
    valid = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    student = [layer + torch.randn_like(layer) for layer in teacher]
    expected = []
    for own, goal in zip(student, teacher, strict=True):
        own, goal = own.numpy()[valid.bool()], goal.numpy()[valid.bool()]
        expected.append(((own - goal) ** 2).mean() / goal.var())
    assert float(hidden_mse(student, teacher, valid=valid)) == pytest.approx(np.mean(expected), rel=1e-4)
    assert float(hidden_mse(teacher, teacher, valid=valid)) == 0.0
    means = [torch.full_like(layer, float(layer.mean())) for layer in teacher]
    assert float(hidden_mse(means, teacher)) == pytest.approx(1.0, rel=1e-5)
    for layer in student:
        layer[valid == 0] = 1e4
    assert float(hidden_mse(student, teacher, valid=valid)) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["bert", "marian", "llama", "opt"])
def test_layer_states_are_of_every_layer(name):
    model, batch = build(name), inputs(name)
    expected = logits(model, batch)
    with recorded_outputs(model, hidden_states=True) as outputs:
        assert torch.equal(logits(model, batch), expected)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    states = layer_states(outputs[-1], "encoder")
    expected = {"encoder": 2, "decoder": 3} if name == "marian" else {"encoder": 2}
    assert {stack: len(found) for stack, found in states.items()} == expected
    with recorded_outputs(model, hidden_states=False) as outputs:
        logits(model, batch)
    with pytest.raises(GateError, match="has no hidden states"):
        layer_states(outputs[-1], "encoder")


# -- the teacher -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "marian", "vit"])
def test_the_teacher_is_the_dense_model_without_gates(name):
    model, batch = build(name), inputs(name)
    expected = logits(model, batch)
    gates = HeadGates(model).attach()
    gates.set_mask_(torch.zeros(gates.size))
    gated = logits(model, batch)
    assert not torch.equal(gated, expected)
    teacher = Teacher(model.train(), gates)
    assert torch.equal(logits(teacher.model, batch), expected)
    assert not teacher.model.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in teacher.model.modules())
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert gates.is_attached
    assert torch.equal(logits(model.eval(), batch), gated)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(teacher.model, batch), expected)


def test_padding_of_a_translation_does_not_count():
    """Logits [batch, target, vocabulary] with labels of -100 on padding, and three kinds of attention."""
    model, batch = build("marian"), inputs("marian", padding=False)
    batch["labels"] = torch.randint(3, 50, batch["decoder_input_ids"].shape)
    batch["labels"][0, 2:] = -100

    class Translation:
        def losses(self, model, batch):
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
            return logits.mean((1, 2)), logits

        def valid_queries(self, batch):
            target = batch["labels"] != -100
            return {"encoder": batch.get("attention_mask"), "decoder": target, "cross": target}

    task, gates = Translation(), HeadGates(model).attach()
    teacher = Teacher(model, gates)
    gates.set_mask_(torch.zeros(gates.size))

    def terms(batch):
        with torch.no_grad(), recorded_outputs(model, hidden_states=True) as outputs:
            logits = task.losses(model, batch)[1]
            found = distillation_terms(teacher, task, batch, logits, outputs[-1], temperature=2.0, hidden_states=True)
        return [float(term) for term in found]

    found = terms(batch)
    assert all(term > 1e-4 for term in found)
    batch["decoder_input_ids"][0, 3:] = 7  # after the last label, and seen by no earlier position
    assert terms(batch) == pytest.approx(found, rel=1e-5)
    batch["decoder_input_ids"][0, 1] = 9
    assert terms(batch) != pytest.approx(found, rel=1e-3)


# -- in training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [None, MASK])
def test_the_teacher_is_the_model_at_the_end_of_the_finetune(fixed, plain):
    dense, batches = {}, []

    class Compare(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            step = trainer.global_step
            if step == N:
                dense.update({name: tensor.clone() for name, tensor in pl_module.backbone.state_dict().items()})
                batches.append(batch)
                with torch.no_grad():
                    dense["logits"] = pl_module.task.losses(pl_module.backbone.eval(), batches[0])[1]
                pl_module.backbone.train()
            if step <= N:
                assert pl_module.teacher is None
                return
            teacher = pl_module.teacher.model
            assert all(torch.equal(tensor, dense[name]) for name, tensor in teacher.state_dict().items())
            assert torch.equal(pl_module.task.losses(teacher, batches[0])[1], dense["logits"])
            dense["seen"] = step

    pruner = make_pruner(**DISTIL)
    names = list(pruner.state_dict()), [name for name, _ in pruner.named_parameters()]
    if fixed is None:
        fit(pruner, Compare())
    else:  # a fine-tuning without fixed values, and the rest with them
        fit(pruner, Compare(), max_steps=N)
        fit(pruner, Compare(), fixed=fixed, ckpt_path=plain / f"{N}.ckpt")
    assert dense["seen"] == 3 * N
    assert names == (list(pruner.state_dict()), [name for name, _ in pruner.named_parameters()])
    assert pruner.teacher is None


def test_the_loss_is_made_of_its_terms():
    """One step, written again by hand from the pieces."""
    seen = {}

    class Loss(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen["batch"] = {name: tensor.clone() for name, tensor in batch.items()}

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    model = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
             "initializer_range": 0.5}  # fmt: skip
    settings = {"from_scratch": model, "distil": 0.4, "distil_hidden": 0.2, "distil_temperature": 3.0}
    pruner, again = (make_pruner(**settings) for _ in range(2))
    mask = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 1])
    fit(pruner, fixed=mask, max_steps=N)
    fit(again, Loss(), fixed=mask, max_steps=N + 1, log_every_n_steps=1)
    batch, backbone = seen["batch"], pruner.backbone.eval()
    with torch.no_grad():
        outputs = {}
        for name, values in (("teacher", torch.ones(8)), ("student", mask)):
            pruner.gates.set_mask_(values)
            given = {key: value for key, value in batch.items() if key != "labels"}
            outputs[name] = backbone(**given, output_hidden_states=True)
        student, teacher = outputs["student"], outputs["teacher"]
        task = torch.nn.functional.cross_entropy(student.logits, batch["labels"])
        kl = 9 * torch.nn.functional.kl_div(
            (student.logits / 3).log_softmax(-1), (teacher.logits / 3).softmax(-1), reduction="batchmean"
        )
        valid = batch["attention_mask"].bool()
        hidden = torch.stack([
            (own[valid] - goal[valid]).square().mean() / goal[valid].var(correction=0)
            for own, goal in zip(student.hidden_states[1:], teacher.hidden_states[1:], strict=True)
        ]).mean()  # fmt: skip
    assert seen["logged"]["train/task_loss"] == pytest.approx(float(task), rel=1e-4)
    assert seen["logged"]["train/logit_kl"] == pytest.approx(float(kl), rel=1e-3)
    assert seen["logged"]["train/hidden_mse"] == pytest.approx(float(hidden), rel=1e-3)
    expected = 0.6 * float(task) + 0.4 * float(kl) + 0.2 * float(hidden)
    assert seen["logged"]["train/loss"] == pytest.approx(expected, rel=1e-4)
    assert min(float(kl), float(hidden)) > 1e-3


@pytest.mark.parametrize("at", TAUGHT)
def test_resuming_gives_the_same_result(at, taught):
    whole, folder = taught
    torch.manual_seed(99)
    assert_same(state(distilled(ckpt_path=folder / f"{at}.ckpt")), whole)


def test_resuming_with_fixed_values_gives_the_same_result(tmp_path, plain):
    whole = state(distilled(Save(tmp_path, N + 5), fixed=MASK, ckpt_path=plain / f"{N}.ckpt"))
    torch.manual_seed(99)
    assert_same(state(distilled(fixed=MASK, ckpt_path=tmp_path / f"{N + 5}.ckpt")), whole)


def test_the_dense_checkpoint_serves_runs_with_and_without_a_teacher(plain, taught):
    expected, dense = taught[0], plain / f"{N}.ckpt"
    assert_same(state(distilled(ckpt_path=dense)), expected)
    untaught = state(fit(ckpt_path=dense))
    assert any(not torch.equal(tensor, untaught[name]) for name, tensor in expected.items())


def test_a_checkpoint_past_the_finetune_without_the_dense_model_is_refused(plain):
    with pytest.raises(GateError, match=rf"past fine-tuning .step {N + 3} of {N}.*start from dense\.ckpt"):
        distilled(ckpt_path=plain / f"{N + 3}.ckpt")


def test_the_teacher_is_saved_only_where_training_goes_on(taught):
    _, folder = taught
    kept = {path.stem: "teacher" in torch.load(path, weights_only=True) for path in folder.iterdir()}
    assert kept == {str(N): False, **{str(step): True for step in TAUGHT[1:]}, "final": False}


def test_without_weight_training_is_as_if_there_were_no_distillation():
    """Bit for bit that of a module whose training step is the task's loss and the penalty alone."""
    plain = make_pruner()

    def training_step(batch, batch_idx):
        noise = (plain.seed * 1_000_003 + batch_idx) * 4096
        plain.gates.generator = torch.Generator().manual_seed(noise + 1)
        torch.manual_seed(noise + 1)
        return plain.task.losses(plain.backbone, batch)[0].mean() + plain.steering.penalty(plain.ramp(plain.global_step))

    plain.training_step = training_step
    assert_same(state(fit(make_pruner(distil=0.0, distil_hidden=0.0))), state(fit(plain)))


def test_at_a_high_temperature_the_gradient_is_that_of_matching_centred_logits():
    """Hinton et al. 2015, equation 4: (v - z) / classes for centred logits, whatever the temperature."""
    student, teacher = (logits - logits.mean(-1, keepdim=True) for logits in torch.randn(2, 3, 5, dtype=torch.float64))
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(logit_kl(student, teacher, temperature=1000.0), student)
    torch.testing.assert_close(gradient.double(), (student.detach() - teacher) / 5 / 3, atol=1e-4, rtol=1e-2)
