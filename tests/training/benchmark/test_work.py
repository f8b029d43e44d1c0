"""What is measured does what it is called by."""

import pytest
import torch
from torch.distributions import Categorical

from gates import HeadGates, find_attention
from gates.surgery import verify
from training.benchmark import entropy, growth, job, precision, pruned, scores, step
from training.benchmark.setting import Setting
from training.benchmark.size import Size

SIZE = Size(3, 16)
SETTING = Setting("tiny", None, "cpu", 1, (SIZE,), quick=True)


@pytest.mark.parametrize("kind", SETTING.kinds)
@pytest.mark.parametrize("gated", [False, True])
def test_steps_train_the_weights_and_the_gates(gated, kind, monkeypatch):
    made = []
    stepping = step.stepping
    monkeypatch.setattr(step, "stepping", lambda model, *rest, **more: made.append(model) or stepping(model, *rest, **more))
    work = step.prepare_step(SETTING, kind, SIZE, gated, compiled=False)
    before = {name: parameter.detach().clone() for name, parameter in made[0].named_parameters()}
    work()
    changed = {name for name, parameter in made[0].named_parameters() if not torch.equal(parameter, before[name])}
    assert any("attention" in name or "self_attn" in name for name in changed)
    assert any("log_alpha" in name for name in changed) == gated


@pytest.mark.parametrize("kind", SETTING.kinds)
def test_passes_are_rounded_under_autocast_alone(kind):
    for exact in precision.passes(SETTING, kind, SIZE).values():
        rounded = precision.in_bfloat16(exact, "cpu")
        assert 1e-5 < precision.distance(exact(), rounded()) < 0.1
        assert torch.equal(exact(), exact())


def test_a_step_in_bfloat16_multiplies_in_it(monkeypatch):
    made = []
    stepping = step.stepping
    monkeypatch.setattr(step, "stepping", lambda model, *rest, **more: made.append(model) or stepping(model, *rest, **more))
    types = []
    for bfloat16 in (False, True):
        work = step.prepare_step(SETTING, "encoder", SIZE, gated=True, compiled=False, bfloat16=bfloat16)
        linear = next(module for module in made[-1].modules() if isinstance(module, torch.nn.Linear))
        linear.register_forward_hook(lambda module, args, output: types.append(output.dtype))
        work()
        assert linear.weight.dtype == torch.float32
    assert types == [torch.float32, torch.bfloat16]


def test_a_distance_by_hand():
    assert precision.distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5], dtype=torch.bfloat16)) == pytest.approx(0.1)


@pytest.mark.parametrize("mask", entropy.MASKS)
def test_the_definition_is_the_entropy_under_every_mask(mask):
    works = {name: entropy.prepare(SETTING, "float32", mask, 9, name) for name in ("attention", "entropy", "definition")}
    found, visible = works["entropy"]()
    torch.testing.assert_close(found, works["definition"](), rtol=1e-4, atol=1e-5)
    texts = 2 if "padded" in mask else 1
    assert works["attention"]().shape[:3] == found.shape == (texts, entropy.HEADS, 9)
    last = 9 if "causal" not in mask else torch.arange(1, 10)
    counts = torch.full((texts, 1, 9), 9).clamp(max=torch.as_tensor(last))
    counts[1:] = counts[1:].clamp(max=6)  # three quarters of 9 tokens
    assert torch.equal(visible.expand(texts, 1, 9), counts)


def test_the_definition_by_hand():
    query, key = torch.randn(2, 1, 2, 9, 4).unbind(0)
    expected = Categorical(logits=query @ key.transpose(-1, -2) / 2).entropy()
    torch.testing.assert_close(entropy.explicit_entropy(query, key, 0.5), expected)


@pytest.mark.parametrize("kind", SETTING.kinds)
def test_the_least_goes_back_to_the_heads_of_the_first_layer(kind):
    """What the leaf's gradient times the heads gives is HIS of that layer, summed over the batch."""
    model = SETTING.trained(kind).eval()
    gates, batch = HeadGates(model), SETTING.batch_for(model, SIZE, kind)
    with scores.beginning_at(gates.sites[0].output) as leaves:
        [gradient] = torch.autograd.grad(scores.losses_of(model, batch).sum(), leaves)
    by_head = (gradient * leaves[0]).unflatten(-1, (4, -1)).sum(-1)
    torch.testing.assert_close(by_head.sum((0, 1)), scores.head_scores(gates, batch).sum(0)[:4], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", SETTING.kinds)
def test_gradients_one_by_one_are_those_of_the_batch(kind):
    """So that the two that are compared do the same."""
    model = SETTING.trained(kind).eval()
    gates, batch = HeadGates(model), SETTING.batch_for(model, SIZE, kind)
    together = scores.head_scores(gates, batch)
    each = [
        scores.head_scores(gates, {name: tensor[index : index + 1] for name, tensor in batch.items()}) for index in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(each), rtol=1e-3, atol=1e-6)
    for work in scores.passes(SETTING, kind, SIZE).values():
        work()


@pytest.mark.parametrize("heads", [8, 72, 144])
@pytest.mark.parametrize("share", pruned.SHARES)
def test_masks_keep_their_share_in_every_part_of_the_model(heads, share):
    mask = pruned.spread_mask(heads, share)
    assert mask.sum() == heads * share
    for half in mask.chunk(2):
        assert abs(half.sum() - heads * share / 2) <= 0.5


@pytest.mark.parametrize("how", ["eager", "decode"])
def test_pruned_models_lack_their_heads(how):
    for share in pruned.SHARES:
        model = pruned.subject(SETTING, how, share)
        assert sum(site.heads for site in find_attention(model)) == 8 * share


def test_every_variant_writes_as_many_tokens():
    for share in (1.0, 0.125):
        ids = pruned.prepare(SETTING, "decode", SIZE, share, "")()
        assert ids.shape == (3, SIZE.length + pruned.NEW_TOKENS)


def test_the_ideal_is_that_of_the_operations_worked_out_by_hand():
    """One example of 16 tokens, 2 layers of width 64: a head of 16 has 2 * 16 * 64 * 16 operations in each of four projections
    and twice 2 * 16 * 16 * 16 in its two products."""
    costs = {share: pruned._cost(SETTING, "eager", SIZE, share)[1] for share in (1.0, 0.5)}
    head = 4 * 2 * 16 * 64 * 16 + 2 * 2 * 16 * 16 * 16
    assert costs[1.0] - costs[0.5] == 4 * head


def test_the_job_ends_without_half_of_the_heads_and_can_be_done_again(monkeypatch):
    checks = []
    compare = verify._Check.compare
    monkeypatch.setattr(verify._Check, "compare", lambda check, model: checks.append(1) or compare(check, model))
    work = job.prepare_job(SETTING, SIZE, 6)
    for _ in range(2):
        assert sum(site.heads for site in find_attention(work())) == 4
    assert len(checks) == 2, "every job checks what it removed"
    assert sum(site.heads for site in find_attention(job.prepare_plain(SETTING, SIZE, 2)())) == 8


def test_growth_has_a_row_for_each_value(monkeypatch):
    monkeypatch.setattr(growth, "SIZE", Size(1, 8))
    monkeypatch.setattr(growth, "VALUES", {"heads": (4, 8), "layers": (1,), "tokens": (8, 16)})
    rows = growth.measure(SETTING)
    assert [(row["varied"], row["value"]) for row in rows] == [
        ("heads", 4), ("heads", 8), ("layers", 1), ("tokens", 8), ("tokens", 16), ("texts scored", 1), ("texts scored", 2),
        ("processes", 1), ("processes", 2),
    ]  # fmt: skip
    assert all(row["his_ms"]["median"] > 0 for row in rows)
    assert [row["time_ratio"] is None for row in rows] == [False] * 5 + [True] * 4
