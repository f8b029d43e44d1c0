"""A user's own score: found by its name, run on a model at rest, and refused where its numbers would be wrong."""

import sys

import pytest
import torch

from gates.errors import GateError
from gates.scores.importance import head_gradients
from tests.training.runs import make_trainer
from tests.training.scoring.subjects import close, make_subject
from training.runs.hashing import weights_fingerprint
from training.scoring.scorers import OwnScore, own_score, run_own_score

MODULE = """
import functools
from os.path import join
NUMBER = 3
def score(subject): return range(subject.gates.size)
def with_default(subject, power=2): return None
def two(subject, other): return None
of_two = functools.partial(two, other=1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory, which is not on the path; its name."""
    name = f"scores_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)
    own_score.cache_clear()


@pytest.fixture(scope="module")
def subject():
    return make_subject()


def run(function, subject, **how):
    return run_own_score(OwnScore("mine:score", function, ""), subject, **how)


# -- by its name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["score", "with_default", "of_two"])
def test_a_function_of_the_working_directory_is_found(module, function):
    found = own_score(f"{module}:{function}")
    assert found.function is getattr(sys.modules[module], function)
    assert found.name == f"{module}:{function}"


def test_its_code_is_that_of_its_file(module, tmp_path):
    first = own_score(f"{module}:score").code
    assert own_score(f"{module}:with_default").code == first
    (tmp_path / f"{module}.py").write_text(MODULE + "# edited")
    assert own_score(f"{module}:score").code == first  # what is imported stays as it is
    sys.modules.pop(module)
    own_score.cache_clear()
    assert own_score(f"{module}:score").code != first


def test_code_that_is_only_named_elsewhere_counts_too(module, tmp_path):
    """The package's own file names the function, another one defines it."""
    outer = f"{module}_outer"
    (tmp_path / f"{outer}.py").write_text(f"from {module} import score\n")
    codes = []
    for text in (MODULE, MODULE + "# edited"):
        (tmp_path / f"{module}.py").write_text(text)
        codes.append(own_score(f"{outer}:score").code)
        for name in (module, outer):
            sys.modules.pop(name)
        own_score.cache_clear()
    assert codes[0] != codes[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.mine:score", "there is no module 'nowhere' for the score 'nowhere.mine:score' in '/"),
        ("{}:scores", "has no 'scores'; it has score, with_default, two"),
        ("{}:NUMBER", "is 3; expected a function"),
        ("{}:two", "missing a required argument: 'other'"),
        ("{}:", "is no module:function"),
        ("{}:a.b", "is no module:function"),
        (":score", "is no module:function"),
        ("folder/mine.py:score", "names a file; name its module, as an import does: folder.mine:score"),
    ],
)
def test_names_that_lead_to_no_function_are_refused(module, name, said):
    with pytest.raises(GateError, match=said.replace(".", r"\.").replace("(", r"\(")):
        own_score(name.format(module))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import module_that_nobody_has", "ModuleNotFoundError: No module named 'module_that_nobody_has'"),
        ("def score(subject)", "SyntaxError: expected ':'"),
        ("raise SystemExit('usage')", "SystemExit: usage"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(module, tmp_path, text, said):
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(GateError, match=f"the module of the score '{module}:score' cannot be imported: {said}"):
        own_score(f"{module}:score")


# -- as it runs ---------------------------------------------------------------------------------------------------


def gain(subject):
    """The mean gradient of the loss with respect to gates."""
    total, examples = torch.zeros(subject.gates.size), torch.zeros(1)
    for batch in subject.batches():
        values = torch.ones(subject.gates.size, requires_grad=True)
        with subject.gates.use(values):
            losses = subject.losses(batch)
        losses.sum().backward()  # weights get gradients too
        total += values.grad
        examples += len(losses)
    return subject.summed(total) / subject.summed(examples)


def test_it_finds_the_model_at_rest_and_its_numbers_are_taken(subject):
    seen = []

    def score(given):
        seen.append((given.gates.mode, given.backbone.training, torch.is_grad_enabled()))
        return gain(given)

    found = run(score, subject)
    assert seen == [("open", False, True)]
    assert found.dtype == torch.float64
    with subject.at_rest():
        parts = [head_gradients(subject.gates, lambda batch=batch: subject.losses(batch)) for batch in subject.batches()]
    close(found, torch.cat(parts).detach().mean(dim=0))


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda values: torch.tensor(values).numpy()])
def test_numbers_come_as_lists_tensors_or_arrays(subject, kind):
    assert run(lambda given: kind([0.5, 1, 2, 3, 4, 5, 6, 7]), subject).tolist() == [0.5, 1, 2, 3, 4, 5, 6, 7]


def test_what_it_leaves_on_parameters_and_modules_goes(subject):
    def score(given):
        given.backbone.train()
        for parameter in given.backbone.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.requires_grad_(False)
        return range(8)

    subject.module.eval()
    run(score, subject)
    parameters = list(subject.backbone.parameters())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in parameters)
    assert not any(part.training for part in subject.backbone.modules())


def test_its_random_numbers_are_those_of_the_seed_and_nobody_elses(subject):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (run(lambda given: torch.rand(8), subject, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.rand(3), expected)


def changes_weights(subject):
    subject.backbone.classifier.bias.data += 1


def changes_gates(subject):
    subject.gates.set_mask_(torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changes_weights, "changed the model's weights"),
        (changes_gates, "changed the gates"),
        (lambda subject: subject.gates.detach(), "changed the gates"),
        (lambda subject: subject.backbone.register_forward_hook(lambda *given: None), "left a hook on the model"),
    ],
)
def test_a_changed_model_is_refused(change, said):
    with pytest.raises(GateError, match=f"the score 'mine:score' {said}"):
        run(lambda subject: (change(subject), range(8))[1], make_subject())


def fails(subject):
    raise KeyError("no such head")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda subject: torch.ones(8, 2), r"returned the shape \[8, 2\]; expected \[8\]"),
        (lambda subject: 1.0, r"returned the shape \[\]; expected \[8\]"),
        (lambda subject: None, "returned 'NoneType'; expected a tensor of 8 numbers"),
        (lambda subject: ["high"] * 8, "returned 'list'; expected a tensor of 8 numbers"),
        (lambda subject: [0, 1, float("nan"), 3, 4, 5, 6, 7], "is nan for gate 2; expected finite"),
        (lambda subject: [0, 1, 2, 3, float("-inf"), 5, 6, 7], "is -inf for gate 4; expected finite"),
        (lambda subject: [2.5] * 8, "is 2.5 for every gate, which ranks none"),
        (fails, rf"raised KeyError: 'no such head' \(.*test_own_score.py, line {fails.__code__.co_firstlineno + 1}\)"),
    ],
)
def test_what_is_no_number_for_each_gate_is_refused(subject, function, said):
    before = weights_fingerprint(subject.backbone)
    with pytest.raises(GateError, match=f"the score 'mine:score' {said}"):
        run(function, subject)
    assert weights_fingerprint(subject.backbone) == before
    assert not subject.trainer.training


def in_processes(rank, world, folder):
    """A score that is a sum over processes, and one that forgets to sum."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    subject = make_subject()
    trainer = make_trainer(strategy="ddp", devices=2)
    subject = type(subject)(subject.module, subject.data, trainer)
    found = {"summed": run(gain, subject).tolist()}

    def fails_in_one(given):
        if rank == 1:
            raise OSError("no disk")
        return range(8)

    for name, score in {"differs": lambda given: [rank, 1, 2, 3, 4, 5, 6, 7], "fails": fails_in_one}.items():
        with pytest.raises(GateError) as error:
            run(score, subject)
        found[name] = str(error.value)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_two_processes_come_to_the_numbers_of_one(tmp_path):
    expected = run(gain, make_subject())
    torch.multiprocessing.start_processes(in_processes, (2, str(tmp_path)), nprocs=2, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for one in found:
        torch.testing.assert_close(torch.tensor(one["summed"], dtype=torch.float64), expected, atol=1e-6, rtol=1e-4)
        assert "differs between 2 processes" in one["differs"]
        assert "raised OSError: no disk" in one["fails"]
