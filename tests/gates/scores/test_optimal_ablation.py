import torch

from gates.scores.ablation import descend_each


def quadratics(problems=5, features=4):
    """Bowls of very different widths, with their minima."""
    generator = torch.Generator().manual_seed(0)
    minima = torch.randn(problems, features, generator=generator, dtype=torch.float64)
    stretch = torch.rand(problems, features, generator=generator, dtype=torch.float64) + 0.2
    stretch *= 10.0 ** torch.arange(-3, 2)[:, None]

    def evaluate(points):
        away = points - minima
        return (stretch * away.square()).sum(1) / 2 + 1, stretch * away

    return minima, evaluate


def test_every_problem_finds_its_own_minimum():
    minima, evaluate = quadratics()
    points, values = descend_each(torch.zeros_like(minima), evaluate, floor=1.0, steps=60)
    torch.testing.assert_close(points, minima, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, torch.ones(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_it_never_goes_up_whatever_the_function_does():
    def wild(points):
        values = torch.cos(9 * points).sum(1) + torch.where(points.abs() > 2, torch.nan, 0.0).sum(1)
        return values, -9 * torch.sin(9 * points)

    start = torch.linspace(-1.9, 1.9, 40, dtype=torch.float64).view(20, 2)
    last = wild(start)[0]
    assert bool(torch.isnan(wild(start + 3)[0]).any())
    for steps in range(12):
        points, values = descend_each(start, wild, floor=-100.0, steps=steps)  # a first step that is far too long
        assert torch.equal(wild(points)[0], values)
        assert bool((values <= last).all())
        last = values
    assert bool((last < wild(start)[0] - 0.5).sum() > 10)


def test_problems_do_not_touch_each_other():
    minima, evaluate = quadratics()
    together, _ = descend_each(torch.zeros_like(minima), evaluate, floor=1.0, steps=5)

    def third(points):
        values, slopes = evaluate(points.repeat(5, 1))
        return values[2:3], slopes[2:3]

    alone, _ = descend_each(torch.zeros_like(minima[:1]), third, floor=1.0, steps=5)
    torch.testing.assert_close(alone[0], together[2])


def test_a_start_without_slope_stays():
    flat = torch.zeros(2, 3)
    points, values = descend_each(flat, lambda at: (at.sum(1) * 0 + 2, torch.zeros_like(at)), floor=1.0, steps=3)
    assert torch.equal(points, flat)
    assert values.tolist() == [2.0, 2.0]
