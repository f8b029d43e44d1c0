import pytest
import torch

from gates.errors import GateError
from gates.recovery import least_squares
from gates.recovery.least_squares import ProjectionMoments, best_ridge, fit, squared_error


def sample(positions=200, features=5, outputs=3):
    torch.manual_seed(0)
    x = torch.randn(positions, features, dtype=torch.float64) @ torch.randn(features, features, dtype=torch.float64) + 2
    y = x @ torch.randn(features, outputs, dtype=torch.float64) + torch.randn(positions, outputs, dtype=torch.float64) - 1
    return x, y, torch.randn(outputs, features, dtype=torch.float64)


def moments_of(x, y):
    gathered = ProjectionMoments(x.shape[1], y.shape[1])
    gathered.update(x, y)
    return gathered.compute()


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_the_fit_is_that_of_a_stacked_system(ridge):
    """Ridge as further rows that ask for the old weight, without a bias."""
    x, y, weight = sample()
    price = (ridge * x.square().sum(0).mean()).sqrt()
    rows, targets = torch.cat([x, price * torch.eye(5, dtype=torch.float64)]), torch.cat([y, price * weight.T])
    expected = torch.linalg.lstsq(rows, targets).solution.T
    found, bias = fit(moments_of(x, y), weight, ridge=ridge, has_bias=False)
    assert bias is None
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_a_bias_is_fitted_without_a_price(ridge):
    """As a stacked system on centred data, whose bias is what is left of the means."""
    x, y, weight = sample()
    centred, left = x - x.mean(0), y - y.mean(0)
    price = (ridge * centred.square().sum(0).mean()).sqrt()
    expected = torch.linalg.lstsq(
        torch.cat([centred, price * torch.eye(5, dtype=torch.float64)]), torch.cat([left, price * weight.T])
    ).solution.T
    found, bias = fit(moments_of(x, y), weight, ridge=ridge, has_bias=True)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(bias, y.mean(0) - expected @ x.mean(0), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close((x @ found.T + bias).mean(0), y.mean(0))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_best_ridge_has_the_least_error_on_other_positions(seed, has_bias):
    """As fits in float64 that are applied to them, from noise alone to targets that the inputs give."""
    torch.manual_seed(seed)
    ridges, weight = [1e-3, 0.03, 1.0, 30.0], torch.randn(3, 20, dtype=torch.float64)
    x, noise = torch.randn(60, 20, dtype=torch.float64) + 1, torch.randn(60, 3, dtype=torch.float64)
    y = x @ (weight.T + torch.rand(()) * torch.randn(20, 3)) + 4 * torch.rand(()) * noise
    (own, other), (targets, held_out) = x.split(30), y.split(30)
    errors = []
    for ridge in ridges:
        found, _ = fit(moments_of(own, targets), weight, ridge=ridge, has_bias=has_bias)
        left = held_out - other @ found.T
        errors.append(float((left - left.mean(0) if has_bias else left).square().sum()))
    parts = moments_of(own, targets), moments_of(other, held_out)
    assert best_ridge(*parts, weight, ridges, has_bias=has_bias) == ridges[errors.index(min(errors))]


def test_the_best_ridge_is_chosen_in_single_precision_within_autocast():
    """Of two nearly equal ridges the better one, which bfloat16 cannot tell apart."""
    torch.manual_seed(0)
    x, weight = torch.randn(400, 60, dtype=torch.float64) + 3, torch.randn(4, 60, dtype=torch.float64)
    y = x @ weight.T + 0.1 * torch.randn(400, 4, dtype=torch.float64) + 0.02 * x @ torch.randn(60, 4, dtype=torch.float64)
    parts = moments_of(x[:200], y[:200]), moments_of(x[200:], y[200:])
    ridges = [1e-3 * 1.2**power for power in range(40)]
    expected = best_ridge(*parts, weight, ridges, has_bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert best_ridge(*parts, weight, ridges, has_bias=True) == expected
    assert ridges[0] < expected < ridges[-1]


def test_without_other_positions_the_largest_ridge_is_the_safest():
    x, y, weight = sample()
    parts = moments_of(x, y), moments_of(x[:0], y[:0])
    for given in (parts, parts[::-1]):
        assert best_ridge(*given, weight, [0.01, 1.0, 0.1], has_bias=True) == 1.0
    fits_exactly = moments_of(x, x @ (weight.T + 1))
    assert best_ridge(fits_exactly, fits_exactly, weight, [0.01, 1.0, 0.1], has_bias=True) == 0.01


def test_products_in_blocks_are_those_of_all_inputs(monkeypatch):
    x, y, _ = sample(features=11)
    whole = moments_of(x, y)
    monkeypatch.setattr(least_squares, "BLOCK", 4)
    for found, expected in zip(moments_of(x, y), whole, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(whole.xx, x.T @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_single_precision_lose_nothing_to_large_means(dtype):
    """What varies is a thousandth of the means; also within autocast."""
    x, y, _ = (part.float() for part in sample())
    x, y = (x / 1000 + 3).to(dtype), (y / 1000 - 2).to(dtype)
    exact = x.double().T @ y.double()
    gathered = ProjectionMoments(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        gathered.update(x, y)
    found = gathered.xy.clone()
    spread = (x.double() - x.double().mean(0)).T @ (y.double() - y.double().mean(0))
    assert float((found - exact).abs().max()) < 1e-4 * float(spread.abs().max())
    if dtype == torch.float32:
        assert float((x.T @ y - exact).abs().max()) > 100 * float((found - exact).abs().max())
    gathered.update(x[:0], y[:0])
    assert torch.equal(gathered.xy, found)
    assert gathered.positions == len(x)


def test_inputs_that_follow_from_others_are_no_obstacle():
    x, y, weight = sample()
    found, bias = fit(moments_of(torch.cat([x, x], 1), y), torch.cat([weight, weight], 1), ridge=1e-6, has_bias=True)
    alone, _ = fit(moments_of(x, y), 2 * weight, ridge=1e-6, has_bias=True)
    torch.testing.assert_close(found[:, :5] + found[:, 5:], alone, rtol=1e-4, atol=1e-4)
    assert bias.isfinite().all()


def test_no_inputs_and_inputs_of_zero():
    x, y, weight = sample()
    found, bias = fit(moments_of(x, y).of(torch.arange(0)), weight[:, :0], ridge=0.1, has_bias=True)
    assert found.shape == (3, 0)
    torch.testing.assert_close(bias, y.mean(0))
    found, bias = fit(moments_of(0 * x, y), weight, ridge=0.1, has_bias=True)
    assert torch.equal(found, weight)
    torch.testing.assert_close(bias, y.mean(0))


def test_errors_are_those_of_the_predictions():
    x, y, weight = sample()
    bias = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = (x @ weight.T + bias - y).square().sum()
    torch.testing.assert_close(squared_error(moments_of(x, y), weight, bias), expected)
    torch.testing.assert_close(squared_error(moments_of(x, y), weight, None), (x @ weight.T - y).square().sum())


def test_parts_add_up_and_features_are_chosen():
    x, y, _ = sample()
    gathered = ProjectionMoments(5, 3)
    for part in (slice(0, 10), slice(10, 11), slice(11, None)):
        gathered.update(x[part], y[part])
    for part, whole in zip(gathered.compute(), moments_of(x, y), strict=True):
        torch.testing.assert_close(part, whole)
    kept = torch.tensor([0, 3])
    for part, whole in zip(moments_of(x, y).of(kept), moments_of(x[:, kept], y), strict=True):
        torch.testing.assert_close(part, whole)


@pytest.mark.parametrize("ridge", [0.0, -1.0, float("nan")])
def test_a_ridge_is_above_0(ridge):
    x, y, weight = sample()
    with pytest.raises(GateError, match=r"ridge is .*; expected a number above 0"):
        fit(moments_of(x, y), weight, ridge=ridge, has_bias=True)


def test_a_ridge_below_what_single_precision_sums_to_is_too_small():
    """Fewer positions than inputs leave directions without a second moment, which sums to slightly less than nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 384, generator=generator)
    moments = moments_of(x, x[:, :3])
    with pytest.raises(GateError, match=r"ridge is 1e-09, which is too small for the 120 positions .* such as 0\.01"):
        fit(moments, torch.zeros(3, 384), ridge=1e-9, has_bias=True)
    weight, _ = fit(moments, torch.zeros(3, 384), ridge=1e-3, has_bias=True)
    assert weight.isfinite().all()


def test_there_has_to_be_something_to_fit_to():
    with pytest.raises(GateError, match="there are no positions to fit to"):
        fit(moments_of(torch.zeros(0, 2), torch.zeros(0, 2)), torch.zeros(2, 2), ridge=0.1, has_bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_float64(dtype):
    x, y, _ = sample(positions=3000)
    x, y = (x + 100).to(dtype), (y - 100).to(dtype)
    moments = moments_of(x, y)
    for found, expected in (
        (moments.x, x.double().sum(0)),
        (moments.y, y.double().sum(0)),
        (moments.yy, y.double().square().sum()),
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_the_unit_of_the_inputs_does_not_matter(factor, has_bias):
    """Inputs of another unit have weights of the inverse unit, and the same bias."""
    x, y, weight = sample()
    expected, bias = fit(moments_of(x, y), weight, ridge=0.1, has_bias=has_bias)
    found, other = fit(moments_of(x * factor, y), weight / factor, ridge=0.1, has_bias=has_bias)
    torch.testing.assert_close(found * factor, expected)
    assert (bias is None) is (other is None) is not has_bias
    if has_bias:
        torch.testing.assert_close(other, bias)


@pytest.mark.parametrize("part", ["x", "y", "xx", "xy"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_not_finite_are_refused(part, value):
    x, y, weight = sample()
    moments = moments_of(x, y)
    broken = getattr(moments, part).clone()
    broken.view(-1)[0] = value
    with pytest.raises(GateError, match="are not finite, so it cannot be refitted"):
        fit(moments._replace(**{part: broken}), weight, ridge=0.1, has_bias=True)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3])
def test_small_errors_are_neither_negative_nor_rounded_up(size):
    """Also of weights in single precision, which are taken as they are."""
    x, _, weight = sample()
    weight, bias = weight.float(), torch.tensor([0.5, -1.0, 2.0])
    y = x @ weight.double().T + bias.double()
    y[0, 0] += size
    found = squared_error(moments_of(x, y), weight, bias)
    assert found.dtype == torch.float64
    assert float(found) >= 0
    assert float(found) == pytest.approx(size**2, abs=1e-8)
