from types import SimpleNamespace

import pytest
import torch

from gates.scores.ablation import effects, interchange
from tests.training.runs import make_data, make_pruner, make_trainer
from tests.training.truth.models import ScoringContext as CompiledSubject
from training.comparison.tables import Results, carried_rows, effects_on, shares_of, without_facts
from training.scoring.subject import ScoringContext


def test_shares_are_means_over_facts_and_harm_counts_as_none():
    shares = shares_of({"one": torch.tensor([0.3, 0.1, 0.0, -0.5]), "other": torch.tensor([0.0, 2.0, 2.0, 0.0])})
    torch.testing.assert_close(shares, torch.tensor([0.375, 0.375, 0.25, 0.0]))


def test_a_fact_that_no_head_carries_has_no_shares():
    found = {"one": torch.tensor([0.5, 0.5]), "other": torch.tensor([-0.5, 0.0])}
    torch.testing.assert_close(shares_of(found), torch.tensor([0.25, 0.25]))


@pytest.mark.integration
def test_a_model_that_has_learned_nothing_has_no_effects_and_its_user_is_told(monkeypatch):
    monkeypatch.setattr("training.comparison.tables.ROWS", 48)
    pruner, data = make_pruner(), make_data(interchange=True)
    make_trainer().fit(pruner, data)
    torch.nn.init.zeros_(pruner.backbone.classifier.weight)  # always the same answer
    assert effects_on(ScoringContext(pruner, data, make_trainer()), data) == {}
    results, setup = Results(), SimpleNamespace(data=data.options)
    results.carried = [{"seed": 1}]
    assert "interchange.csv has no row of seed 0, 2" in without_facts(setup, [0, 1, 2], results)
    assert without_facts(setup, [1], results) is None
    assert without_facts(SimpleNamespace(data=make_data().options), [0], results) is None


@pytest.mark.integration
def test_effects_are_of_the_open_model_and_of_every_fact(monkeypatch):
    monkeypatch.setattr("training.comparison.tables.ROWS", 48)
    monkeypatch.setattr("training.comparison.tables.LEARNED", 0.0)  # so short a training teaches nothing
    pruner, data = make_pruner(), make_data()
    make_trainer().fit(pruner, data)
    pruner.gates.set_mask_(torch.zeros(8))
    subject = ScoringContext(pruner, data, make_trainer())
    found = effects_on(subject, data)
    assert set(found) <= {"agree?", "order?", "rare?"}
    assert all(len(values) == 8 for values in found.values())
    assert pruner.gates.mode == "masked"
    fact = next(iter(found))
    moved, apart = torch.zeros(8, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    gates = pruner.gates
    pruner.gates.mode = "open"
    pruner.eval()
    for question, batch, other in data.counterparts(48):
        if question != fact:
            continue
        sign = 2.0 * batch["labels"] - 1
        again = interchange(gates, batch, other, lambda one, sign=sign: margin(pruner.backbone, one) * sign)
        moved, apart = moved + again.moved.sum(0), apart + again.apart.sum()
    torch.testing.assert_close(torch.tensor(found[fact], dtype=torch.float64), effects(moved, apart), atol=1e-4, rtol=1e-4)


def margin(model, batch):
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return logits[:, 1] - logits[:, 0]


@pytest.mark.parametrize("name", ["has", "majority", "bigram", "jumps-4"])
def test_the_needed_heads_of_a_compiled_program_carry_its_answers_and_no_other_does(name):
    """Each string is exchanged with one of the opposite answer; on the way to the answer there is one head in every layer."""
    compiled = CompiledSubject(name)
    yes, no = (compiled.ids[compiled.answers == answer] for answer in (1, 0))
    pairs = min(len(yes), len(no))

    def margin(ids):
        logits = compiled.model(ids).logits
        return logits[:, 1] - logits[:, 0]

    found = interchange(compiled.gates, yes[:pairs], no[:pairs], margin)
    share = effects(found.moved.sum(0), found.apart.sum())
    needed = [gate for (gate,) in compiled.functions]
    others = [gate for gate in range(compiled.gates.size) if gate not in needed]
    last = max(needed)  # whose output the answer is read from
    assert float(share[last]) > 0.9
    assert float(share[others].abs().max()) < 0.1


def test_a_row_says_what_a_mask_keeps_of_the_effects_of_all_heads(monkeypatch):
    found = {"agree?": [0.6, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0], "rare?": [0.0, 0.0, 0.0, 0.5, 0.5, -0.3, 0.0, 0.0]}
    monkeypatch.setattr("training.comparison.tables.effects_on", lambda subject, data: found)
    experiments = SimpleNamespace(
        seed=3,
        data=make_data(interchange=True),
        dense=lambda: SimpleNamespace(key="dense"),
        measure=lambda name, determined_by, work: SimpleNamespace(result=work(None)),
    )
    results = Results()
    results.masks = [
        {"seed": 3, "method": "dense", "budget": 8, "mask": [1] * 8},
        {"seed": 2, "method": "his", "budget": 2, "mask": [1, 1, 0, 0, 0, 0, 0, 0]},
        {"seed": 3, "method": "his", "budget": 2, "mask": [0] * 8, "post_hoc_mask": [1, 0, 0, 0, 0, 1, 0, 0]},
        {"seed": 3, "method": "learned", "budget": 6, "mask": [1, 1, 1, 1, 0, 0, 1, 0]},
    ]
    his, learned = carried_rows(experiments, results)
    assert (his["method"], his["seed"], his["carriers"], his["recall"]) == ("his", 3, 5, 0.5)
    assert (his["carried"], his["at_best"]) == pytest.approx((0.3, 0.55))
    assert (learned["carried"], learned["at_best"], learned["recall"]) == pytest.approx((0.75, 1.0, 4 / 5))
    experiments.data = make_data()
    assert carried_rows(experiments, results) == []
