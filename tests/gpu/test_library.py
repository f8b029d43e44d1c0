"""The library on a GPU computes what it computes on the CPU."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from gates import (
    AttentionEntropy,
    GateConfig,
    HeadGates,
    find_attention,
    get_gated_model,
    head_gradients,
    load_pruned,
    measure_cost,
    observe_attention,
    refit_,
    remove_heads_,
    save_pruned,
)
from gates.attention.modes import kept_generators
from gates.gating.hard_concrete import HardConcrete, Stretch
from gates.gating.price import solve_price
from gates.scores import entropy_kernel
from gates.scores.attention import attention_entropy
from gates.surgery.verify import relative_difference
from tests.gates.scores import kernel_cases
from tests.models import FAMILIES, build, inputs, logits, random_mask

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the compiler and the card
MODELS = pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bart", "vit"])


def on(device, batch):
    return {name: tensor.to(device) for name, tensor in batch.items()}


def near(found, expected, tolerance=2e-4):
    torch.testing.assert_close(found.detach().float().cpu(), expected.detach().float().cpu(), rtol=tolerance, atol=tolerance)


def masked_logits(model, name, mask):
    gates = HeadGates(model).eval()
    with gates.attached(), gates.use(mask.to(model.device)):
        return logits(model, on(model.device, inputs(name)))


@MODELS
def test_gated_outputs_are_those_of_the_cpu(name, device):
    values = torch.rand(HeadGates(build(name)).size, generator=torch.Generator().manual_seed(3))
    near(masked_logits(build(name).to(device), name, values), masked_logits(build(name), name, values))


@MODELS
def test_a_model_without_heads_computes_what_the_masked_one_did(name, device):
    model, mask = build(name).to(device), random_mask(name)
    expected = masked_logits(model, name, mask)
    remove_heads_(model, mask.to(device))
    near(logits(model, on(device, inputs(name))), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_half_precision_weights_are_removed(dtype, device):
    model, mask = build("bert").to(device, dtype), random_mask("bert")
    expected = masked_logits(model, "bert", mask)
    remove_heads_(model, mask.to(device))
    near(logits(model, on(device, inputs("bert"))), expected, 0.05)


@pytest.mark.parametrize("draw_per", ["batch", "example"])
def test_a_seed_gives_the_same_draws(draw_per, device):
    model = build("bert").to(device)
    gated = get_gated_model(model, GateConfig(budget=3, draw_per=draw_per)).train()
    gated.gates.log_alpha.data.zero_()
    found = []
    for seed in (1, 1, 2):
        gated.gates.generator = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(0)
        found.append(gated(**on(device, inputs("bert"))).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_draws_have_the_probabilities_of_the_cpu(device):
    gates = HardConcrete(3)
    gates.log_alpha.data.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    draws = copy.deepcopy(gates).to(device).train()(torch.Generator(device).manual_seed(0), draws=100_000)
    near((draws > 0).float().mean(0), gates.open_probability(), 0.01)


def test_the_price_is_that_of_the_cpu(device):
    log_alpha = torch.randn(144, generator=torch.Generator().manual_seed(0)) + 3
    near(solve_price(log_alpha.to(device), 100.0, Stretch()), solve_price(log_alpha, 100.0, Stretch()), 1e-6)


def test_the_optimiser_sees_the_gate_gradients_of_the_cpu(device):
    """All gates without noise: the same steps, prices and mask."""
    found = []
    for place in (torch.device("cpu"), device):
        gated = get_gated_model(build("bert").to(place), GateConfig(budget=3)).train()
        optimizer = torch.optim.AdamW(gated.parameter_groups(1e-3, 0.05))
        batch = on(place, inputs("bert") | {"labels": torch.tensor([0, 1, 0])})
        for step in range(8):
            gated(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            gated.step_(step / 8, optimizer)
        found.append((gated.gates.log_alpha.detach(), gated.fix_mask_()))
    near(found[1][0], found[0][0], 1e-3)
    assert torch.equal(found[1][1].cpu(), found[0][1])


def scores_of(model, batch, labels, rows=slice(None)):
    gates = HeadGates(model).eval()
    own = {name: tensor[rows] for name, tensor in batch.items()}
    return head_gradients(gates, lambda: cross_entropy(model(**own).logits, labels[rows], reduction="none"))


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_head_gradients_are_those_of_the_cpu_and_of_single_examples(name, device):
    labels, model = torch.tensor([0, 1, 0]), build(name).to(device)
    batch = on(device, inputs(name, padding=False))
    found = scores_of(model, batch, labels.to(device))
    near(found, scores_of(build(name), inputs(name, padding=False), labels))
    near(found, torch.cat([scores_of(model, batch, labels.to(device), slice(row, row + 1)) for row in range(3)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_gradients_under_autocast(dtype, device):
    labels, model, batch = torch.tensor([0, 1, 0]), build("bert").to(device), on(device, inputs("bert"))
    with torch.autocast(device.type, dtype):
        found = scores_of(model, batch, labels.to(device))
    expected = scores_of(build("bert"), inputs("bert"), labels)
    assert float((found.cpu() - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("hiding", ["nothing", "causal", "mask"])
def test_entropy_is_its_definition(dtype, tolerance, hiding, device):
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 200, 16, generator=draw).to(device, dtype) for _ in range(2))
    seen = torch.ones(2, 1, 200, 200, dtype=torch.bool)
    seen[1, :, :, 150:] = hiding != "mask"
    seen = (seen.tril() if hiding == "causal" else seen).to(device)
    found = attention_entropy(query, key, 0.25, seen if hiding == "mask" else None, causal=hiding == "causal")
    log_p = (query.double() @ key.double().mT * 0.25).masked_fill(~seen, -torch.inf).log_softmax(-1)
    near(found, -(log_p.exp() * log_p).nan_to_num(0).sum(-1), tolerance)


def test_the_entropy_kernel_is_exact_and_in_use(device):
    """In three precisions, with all kinds of masks, grouped queries and sinks."""
    query, key = kernel_cases.inputs(torch.bfloat16)
    if not entropy_kernel.supports(query.to(device), key.to(device), 0.3):
        pytest.skip("the kernel needs a CUDA device of capability 8.0 with Triton, a C compiler and Python's headers")
    assert max(kernel_cases.errors(device).items(), key=lambda item: item[1])[1] < 5e-5


def test_the_entropy_kernel_reads_masks_of_more_than_2_gib(device):
    """The second row of this mask begins 4 GiB behind the first one."""
    query, key = (torch.randn(1, 1, length, 64, device=device, dtype=torch.bfloat16) for length in (8, 8192))
    if not entropy_kernel.supports(query, key, 0.125):
        pytest.skip("the kernel does not run here")
    rows = torch.zeros(2**16, 2**16, dtype=torch.bool, device=device)
    rows[-1, 100:200] = True
    mask = rows[:: 2**16 - 1][None, None, :, :8192].expand(1, 1, 2, 8192)
    found = attention_entropy(query[:, :, :2], key, 0.125, mask)
    weights, _ = kernel_cases.exact(query[:, :, :2], key, 0.125, mask)
    near(found, torch.special.entr(weights).sum(-1), 5e-5)


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_observed_entropy_is_that_of_the_cpu(name, device):
    found = []
    for place in (torch.device("cpu"), device):
        model = build(name).to(place)
        batch, sites = on(place, inputs(name)), find_attention(model)
        entropy = AttentionEntropy(sites).to(place)
        valid = dict.fromkeys(FAMILIES[name].kinds, batch["attention_mask"])
        if name == "bart":
            valid["decoder"] = valid["cross"] = None
        with torch.no_grad(), observe_attention(model, sites, [entropy], valid):
            model(**batch)
        found.append(entropy.compute())
    near(found[1], found[0], 1e-3)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_refitted_weights_are_those_of_the_cpu(name, device):
    mask, found = random_mask(name), []
    mask[0] = 1.0
    for place in (torch.device("cpu"), device):
        model = build(name).to(place)
        batches = [on(place, inputs(name, batch=8, seed=seed)) for seed in (1, 2)]
        refit_(
            HeadGates(model),
            mask.to(place),
            lambda b=batches: b,
            lambda batch, m=model: logits(m, batch),
            lambda batch: {},
            ridge=1e-2,
        )
        found.append(masked_logits(model, name, mask))
    near(found[1], found[0], 2e-3)


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_an_export_is_reloaded(name, device, tmp_path):
    model, mask = build(name).to(device), random_mask(name)
    expected = masked_logits(model, name, mask)
    save_pruned(model, tmp_path / "export", mask.to(device))
    near(logits(load_pruned(tmp_path / "export").to(device), on(device, inputs(name))), expected)


def test_generators_are_kept(device):
    model = build("bert").to(device)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        relative_difference(model, model, inputs("bert"))
        with kept_generators(model, seed=3):
            torch.rand(2, device=device)
        draws.append(torch.rand(3, device=device))
    assert torch.equal(*draws)


def test_the_cost_of_a_model_is_measured(device):
    dense, pruned = build("bert").to(device), build("bert").to(device)
    remove_heads_(pruned, random_mask("bert").to(device))
    cost = measure_cost(dense, pruned, on(device, inputs("bert")), batch_sizes=[2])
    on_cpu = measure_cost(dense.cpu(), pruned.cpu(), inputs("bert"), batch_sizes=[])
    assert (cost.dense_flops, cost.pruned_flops) == (on_cpu.dense_flops, on_cpu.pruned_flops)
    assert cost.latency[0].dense_ms > 0


def test_peak_memory_is_measured_in_a_process_that_has_not_used_the_device(device):
    code = (
        "import torch; from training.runs.cost import measured\n"
        f"with measured(torch.device('{device.type}'), None) as meter: torch.ones(2**20, device='{device.type}')\n"
        "print(meter.cost.peak_memory_mb)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 4


def without_dropout(device):
    model = build("bert").to(device).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("draw_per", ["batch", "example"])
def test_checkpointing_uses_the_same_draw(draw_per, device):
    model = without_dropout(device)
    model.set_attn_implementation("eager")
    gates = HeadGates(model, initial_log_alpha=0.0, draw_per=draw_per).attach().train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        gates.generator = torch.Generator(device).manual_seed(5)
        gates.zero_grad()
        model(**on(device, inputs("bert"))).logits.square().mean().backward()
        found.append(gates.log_alpha.grad.clone())
    near(found[1], found[0], 1e-5)


def test_a_gated_pass_is_captured_as_a_cuda_graph(device):
    """Replays draw as eager passes do, and give their gradients."""
    if device.type != "cuda":
        pytest.skip("only CUDA has graphs")
    gated = get_gated_model(without_dropout(device), GateConfig(budget=3)).train()
    gated.gates.log_alpha.data.zero_()
    ids = inputs("bert", padding=False)["input_ids"].to(device)

    def work():
        gated(input_ids=ids).logits.square().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture needs passes before it on a stream of their own
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    gated.zero_grad()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        work()
    for seed in (5, 6):
        torch.manual_seed(seed)
        graph.replay()
        found.append(gated.gates.log_alpha.grad.clone())
    assert not torch.equal(*found)
    torch.manual_seed(5)
    gated.zero_grad()
    work()
    near(found[0], gated.gates.log_alpha.grad, 1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_model_computes_what_the_eager_one_does(training, device):
    torch._dynamo.reset()
    gated = get_gated_model(without_dropout(device), GateConfig(budget=3)).train(training)
    batch, found = on(device, inputs("bert")), []
    for run in (gated, torch.compile(gated)):
        gated.gates.generator = torch.Generator(device).manual_seed(5)
        torch.manual_seed(5)
        output = run(**batch).logits
        gated.zero_grad()
        if training:
            output.square().mean().backward()
            found.append((output, gated.gates.log_alpha.grad.clone()))
        else:
            found.append((output,))
    for one, other in zip(*found, strict=True):
        near(other, one, 1e-3)
