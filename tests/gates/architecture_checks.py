"""All checks of one architecture. The tests and ``python -m tools.coverage`` both run them.

A check returns the cell of the table. It raises an error where something is wrong.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.intercept import sparse_site
from gates.attention.output_hooks import is_bypassed
from gates.attention.sites import AttentionSite, find_attention
from gates.errors import GateError
from gates.export.onnx import export_onnx
from gates.gating.head_gates import HeadGates
from gates.modeling_pruned import Headless
from gates.recovery.refit import refit_
from gates.scores.attention import AttentionEntropy
from gates.scores.importance import head_gradients
from gates.scores.observe import observe_attention
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.gates.kinds import seen_kinds
from tools.coverage import architectures as zoo
from tools.coverage.checks import (
    GatedModel,
    check_reloaded,
    describe_kinds,
    entropy_route,
    in_float64,
    masked_outputs,
    outputs,
    tensors,
)

FALCON_ALIBI = "Falcon (ALiBi)"
WITH_SINKS = ("GptOss", "HYV4")
PADDING_SEES_NO_KEY = (FALCON_ALIBI, "GPTNeoXJapanese", "Doge")
"""Architectures whose gradients are wrong for queries that see no key, with or without gates."""
NO_ONNX = {
    FALCON_ALIBI: "ONNX Runtime has no multiplication of bfloat16 on CPUs, in which it computes its slopes",
    "NllbMoe": "torch.onnx.export does not take its experts",
}
NOT_APPLICABLE = "-"
COLUMNS = ("gate", "his", "entropy", "refit", "prune", "generate", "reload", "onnx")
"""The checks of an architecture and the columns of its table."""


class ArchitectureChecks:
    """All checks of one architecture, on one model that is built once.

    Args:
        architecture: The row of the table of architectures.
    """

    def __init__(self, architecture: zoo.Architecture) -> None:
        self.architecture = architecture
        self.built = zoo.build(architecture)
        self.batch = zoo.inputs(architecture)
        self.unpadded = zoo.inputs(architecture, padding=False)
        self.heads = architecture.heads

    def run(self, column: str) -> str:
        """Run one check on a copy of the model and return its cell."""
        if self.architecture.gate_only and column in ("generate", "reload", "onnx"):
            return NOT_APPLICABLE
        cell: str = getattr(self, column)(copy.deepcopy(self.built))
        return cell

    def gate(self, model: PreTrainedModel) -> str:
        """All sites are found, of their kinds; gates of one change nothing; a zero gate is a zero block; none is bypassed."""
        known, sites = self.architecture, find_attention(model)
        assert describe_kinds(sites) == known.kinds
        assert {(site.heads, site.kv_heads) for site in sites} == {(4, known.kv_heads)}
        assert {site.head_dim for site in sites} == set(known.head_dims)
        assert len({site.name for site in sites}) == len(sites) == self.heads // 4
        assert bool(sites[0].gate_only) == known.gate_only
        one = zoo.inputs(known, batch=1, padding=False)
        shown = seen_kinds(sites, lambda: model(**one))
        assert shown == [site.kind for site in sites], f"its attention behaves as {shown}"
        gated = GatedModel(model, self.batch)
        gated.ones()
        every_third = range(0, self.heads, 3)
        assert gated.zeros(every_third, 1e-5) == {head for head in every_third if head >= self.heads - known.idle}
        self._bypass(model, sites)
        return "yes"

    def _bypass(self, model: PreTrainedModel, sites: tuple[AttentionSite, ...]) -> None:
        """With all gates at zero, no token reaches another one through any call of any attention module."""
        modules, bypassed = {id(site.module): site.module for site in sites}, []

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            bypassed.append(is_bypassed(module, [site.output for site in sites if site.module is module], (args, kwargs)))
            assert is_bypassed(module, [nn.Identity()], (args, kwargs))  # without these gates, tokens reach each other

        hooks = [module.register_forward_hook(look, with_kwargs=True) for module in modules.values()]
        outputs(model, self.batch)
        for hook in hooks:
            hook.remove()
        assert bypassed.count(False) == len(bypassed) >= len(modules)

    def his(self, model: PreTrainedModel) -> str:
        """Per-example gradients equal slopes and those of single examples; no gate lacks a gradient."""
        precise, batch = model, self.unpadded if self.architecture.name in PADDING_SEES_NO_KEY else self.batch
        if self.architecture.name not in ("Longformer", "LED"):  # gradients of their padded queries are NaN in float64
            precise, batch = in_float64(model, batch)
        gated = GatedModel(precise, batch, outputs_of=self._outputs_of_examples)
        rows, _ = gated.scores()
        idle = self.architecture.idle
        assert rows.shape == (3, self.heads)
        assert (rows.abs().amax(0) > 0).tolist() == [True] * (self.heads - idle) + [False] * idle
        loose = gated.dtype == torch.float32 or self.architecture.name in ("GPTJ", "CodeGen")  # these mask in float32
        gated.slopes(rows, 3e-2 if loose else 1e-3)
        singles = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(3)]
        losses = [GatedModel(precise, one, outputs_of=self._outputs_of_examples).loss for one in singles]
        alone = torch.cat([head_gradients(gated.gates, loss) for loss in losses])
        check_close(rows / rows.abs().max(), alone / rows.abs().max(), "the gradient of a single example", atol=1e-4, rtol=0.0)
        return "yes"

    def _outputs_of_examples(self, output: Any) -> Iterable[Tensor]:
        """Return the outputs without those that compare examples with each other."""
        return [output.image_embeds, output.text_embeds] if self.architecture.name == "CLIP" else tensors(output)

    def entropy(self, model: PreTrainedModel) -> str:
        """Entropies are those of the attention matrices, for a batch as for its examples; observation changes no bit."""
        sites = find_attention(model)
        if sparse_site(sites) is not None:
            with refused("not defined over all keys"), observe_attention(model, sites, [AttentionEntropy(sites)], {}):
                pass
            return "no: a query of block-sparse attention does not see all keys, so its entropy is not comparable"
        metrics = [AttentionEntropy(sites), AttentionEntropy(sites)]
        self._observed(model, metrics[0], self.unpadded)
        for row in range(3):
            self._observed(model, metrics[1], {name: tensor[row : row + 1] for name, tensor in self.unpadded.items()})
        self._observed(model, AttentionEntropy(sites), self.batch)
        found = metrics[0].compute()
        check_close(found, metrics[1].compute(), "the entropy of single examples", atol=1e-5, rtol=0.0)
        assert bool(((found > 0) & (found <= 1 + 1e-6)).all()), f"entropies from {found.min():.3g} to {found.max():.3g}"
        eager = copy.deepcopy(self.built)
        eager.set_attn_implementation("eager")
        for batch in (self.unpadded, self.batch):
            self._observed(eager, AttentionEntropy(find_attention(eager)), batch)
        if self.architecture.name != FALCON_ALIBI:  # eager adds its bias twice (Transformers 5.23)
            reference = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
            reference.load_state_dict(self.built.state_dict())
            check_close(
                found, self._from_matrices(reference.eval(), sites), "the entropy of the matrices", atol=2e-5, rtol=1e-4
            )
        return entropy_route(sites)

    def _observed(self, model: PreTrainedModel, metric: AttentionEntropy, batch: Mapping[str, Tensor]) -> None:
        expected, before = outputs(model, batch), model.config._attn_implementation
        with observe_attention(model, find_attention(model), [metric], {}):
            observed = outputs(model, batch)
            assert model.config._attn_implementation == before
        for found in (observed, outputs(model, batch)):
            assert all(map(torch.equal, found, expected)), "observation changes outputs"

    @torch.no_grad()
    def _from_matrices(self, eager: PreTrainedModel, sites: tuple[AttentionSite, ...]) -> Tensor:
        """Compute the entropy of every head from the attention matrices that the model returns."""
        found = eager(**self.unpadded, output_attentions=True)
        by_kind: dict[str, Any] = {"cross": getattr(found, "cross_attentions", None)}
        if "cross" in self.architecture.kinds:
            by_kind |= {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions}
        elif self.architecture.name == "CLIP":
            by_kind |= {"encoder": found.vision_model_output.attentions, "decoder": found.text_model_output.attentions}
        else:
            by_kind |= dict.fromkeys(("encoder", "decoder"), found.attentions)
        parts = []
        for site in sites:
            matrices = by_kind[site.kind] if len(sites) == 1 else by_kind[site.kind][site.layer : site.layer + 1]
            totals, count = torch.zeros(4, dtype=torch.float64), 0
            for matrix in matrices:  # several passes where all layers share one module
                p = matrix.double()
                keys = (p > 0).sum(-1)
                if self.architecture.name in WITH_SINKS:  # the sink has the rest of the probability
                    p, keys = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1), keys + 1
                h = -(p * p.clamp(min=1e-300).log()).sum(-1) / keys.clamp(min=2).double().log()
                totals += (h * (keys > 1)).sum((0, 2))
                count += int((keys[:, 0] > 1).sum())
            parts.append(totals / count)
        return torch.cat(parts)

    def refit(self, model: PreTrainedModel) -> str:
        """No refitted projection is further from the dense stream than before; the outputs come nearer to the dense ones."""
        mask, gates = zoo.random_mask(self.architecture), HeadGates(model)

        @torch.no_grad()
        def output(values: Tensor) -> Tensor:
            with gates.attached(), gates.use(values):
                first: Tensor = model(**self.batch)[0]
            return first

        dense, pruned = output(torch.ones_like(mask)), output(mask)
        done = refit_(gates, mask, lambda: [self.batch], lambda batch: model(**batch), lambda batch: {})
        worse = [one.name for one in done if not one.after <= one.before]
        assert done, "no projection is refitted"
        assert not worse, f"{len(worse)} of {len(done)} refitted projections become worse"
        left = float((output(mask) - dense).norm() / (pruned - dense).norm())
        assert left < 0.95, f"the outputs are {left:.2g} times as far from the dense model's as before"
        return "yes"

    def prune(self, model: PreTrainedModel) -> str:
        """Pruned equals masked: for random masks and values, without any head, in two steps, and with uneven groups."""
        if self.architecture.gate_only:
            return self._refused(model)
        dense, gates = outputs(model, self.batch), HeadGates(self.built)
        for seed in (2, 3):
            mask = zoo.random_mask(self.architecture, seed=seed)
            values = torch.rand(self.heads, generator=torch.Generator().manual_seed(9)) if seed == 3 else None
            pruned, expected = self._pruned(gates, mask, values)
            assert max((one - other).abs().max() for one, other in zip(dense, expected, strict=True)) > 1e-3
            assert sum(site.heads for site in find_attention(pruned)) == int(mask.sum())
            again = remove_heads_(pruned, torch.ones(int(mask.sum())))
            check_close(outputs(again, self.batch), expected, "removing no more heads")
        pruned, _ = self._pruned(gates, torch.zeros(self.heads))
        assert sum(isinstance(module, Headless) for module in pruned.modules()) == self.heads // 4
        self._two_steps(gates)
        if self.architecture.kv_heads == 2:
            for keep, kv_heads in ((1, 1, 1, 0), 3), ((1, 0, 0, 1), 2), ((1, 1, 0, 0), 1), ((0, 0, 0, 1), 1):
                pruned, _ = self._pruned(gates, torch.tensor(keep * 2, dtype=torch.float32))
                assert {(site.heads, site.kv_heads) for site in find_attention(pruned)} == {(sum(keep), kv_heads)}
        return "yes"

    def _pruned(self, gates: HeadGates, mask: Tensor, values: Tensor | None = None) -> tuple[PreTrainedModel, list[Tensor]]:
        """Return a pruned copy and the masked outputs, once both are found equal."""
        expected = masked_outputs(self.built, self.batch, mask if values is None else mask * values, gates)
        pruned = remove_heads_(copy.deepcopy(self.built), mask, values=values)
        check_close(outputs(pruned, self.batch), expected, "removing heads")
        return pruned, expected

    def _two_steps(self, gates: HeadGates) -> None:
        first = torch.ones(self.heads)
        first[1::4] = 0.0
        both = first.clone()
        both[2::4] = 0.0
        once, expected = self._pruned(gates, both)
        twice, _ = self._pruned(gates, first)
        remove_heads_(twice, both[first.bool()])
        check_close(outputs(twice, self.batch), expected, "removing heads in two steps")
        assert twice.config.pruned_attention == once.config.pruned_attention
        shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (twice, once)]
        assert shapes[0] == shapes[1]

    def _refused(self, model: PreTrainedModel) -> str:
        """Removal is refused with the reason, and the masked form works."""
        mask = zoo.random_mask(self.architecture)
        expected = masked_outputs(model, self.batch, mask)
        with refused("gated but not removed"):
            remove_heads_(model, mask)
        check_close(outputs(zero_heads_(model, mask), self.batch), expected, "the masked form")
        return f"no: {find_attention(model)[0].gate_only}"

    def generate(self, model: PreTrainedModel) -> str:
        """Greedy text is the same pruned as masked, with a dynamic cache, a static one and none."""
        if not self.architecture.generates:
            return NOT_APPLICABLE
        ways: dict[str, dict[str, Any]] = {
            "dynamic": {},
            "static": {"cache_implementation": "static"},
            "": {"use_cache": False},
        }
        if self.architecture.name == FALCON_ALIBI:  # Transformers has no static cache for it, pruned or dense
            del ways["static"]
        for seed in (2, 3):
            mask = zoo.random_mask(self.architecture, seed=seed)
            gates = HeadGates(model)
            with gates.attached(), gates.use(mask):
                expected = [self._text(model, way) for way in ways.values()]
            pruned = remove_heads_(copy.deepcopy(model), mask)
            for (name, way), text in zip(ways.items(), expected, strict=True):
                assert torch.equal(self._text(pruned, way), text), f"other text with {name or 'no'} cache"
        return ", ".join(filter(None, ways))

    def _text(self, model: PreTrainedModel, way: dict[str, Any]) -> Tensor:
        prompt = {name: tensor for name, tensor in self.batch.items() if name != "decoder_input_ids"}
        length = {"max_new_tokens": 6, "min_new_tokens": 6}
        text: Tensor = model.generate(**prompt, **length, do_sample=False, **way)  # type: ignore[operator]
        return text

    def reload(self, model: PreTrainedModel) -> str:
        """Saved, loaded and pickled, the outputs are those of the masked model."""
        loaded, expected = check_reloaded(model, zoo.random_mask(self.architecture), self.batch)
        found = outputs(loaded, self.batch)
        check_close(found, expected, "loading")
        if self.architecture.name != "Wav2Vec2":  # PyTorch pickles no parametrised modules, dense or pruned
            assert all(map(torch.equal, outputs(pickle.loads(pickle.dumps(loaded)), self.batch), found))
        return "yes"

    def onnx(self, model: PreTrainedModel) -> str:
        """The pruned model in ONNX Runtime equals PyTorch; of an encoder-decoder, at least its encoder."""
        remove_heads_(model, zoo.random_mask(self.architecture, seed=3))
        with tempfile.TemporaryDirectory() as folder:
            try:
                export_onnx(model, Path(folder) / "model.onnx", self.unpadded)
                return "yes"
            except GateError as error:
                if reason := NO_ONNX.get(self.architecture.name):
                    return f"no: {reason}"
                if "cross" not in self.architecture.kinds or "torch.onnx.export does not take" not in str(error):
                    raise
            own = {name: tensor for name, tensor in self.unpadded.items() if not name.startswith("decoder")}
            export_onnx(model.get_encoder(), Path(folder) / "encoder.onnx", own)
        return "encoder"


def check_close(found: Any, expected: Any, what: str, atol: float = 5e-6, rtol: float = 2e-5) -> None:
    """Compare tensors or lists of tensors element by element; by default, only rounding of float32 may differ."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Check that the block raises a GateError with this reason."""
    try:
        yield
    except GateError as error:
        if reason not in str(error):
            raise
    else:
        raise AssertionError(f"it is not refused as {reason}")
