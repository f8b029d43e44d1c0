import torch

from gates.gating.schedule import NOT_CLOSED, closing_ranking, update_closing_step


def history(steps=40, gates=12, seed=0):
    """Gate values over time, most of which close and some of which open again."""
    generator = torch.Generator().manual_seed(seed)
    walk = 1 + torch.cumsum(torch.randn(steps, gates, generator=generator) - 0.15, 0) * 0.3
    return walk.clamp(0, 1)


def test_the_closing_step_is_the_last_one():
    values = history()
    closing = torch.full((12,), NOT_CLOSED)
    for step, row in enumerate(values, start=1):
        closing = update_closing_step(closing, row, step)
        for gate in range(12):  # read off the history by hand
            course = values[:step, gate].tolist()
            open_steps = [index for index, value in enumerate(course, start=1) if value > 0]
            expected = NOT_CLOSED if course[-1] > 0 else (open_steps[-1] if open_steps else 0) + 1
            assert int(closing[gate]) == expected
    reopened = [(values[:-1, gate] == 0).logical_and(values[1:, gate] > 0).any() for gate in range(12)]
    assert any(reopened)
    assert len(closing.unique()) > 3


def test_it_sorts_as_tuples_do():
    generator = torch.Generator().manual_seed(1)
    closing = torch.randint(-1, 4, (50,), generator=generator)
    log_alpha = torch.randint(0, 3, (50,), generator=generator).float()
    keys = [(float("inf") if c == NOT_CLOSED else c, a, -i) for i, (c, a) in enumerate(zip(closing, log_alpha, strict=True))]
    expected = sorted(range(50), key=lambda i: tuple(float(part) for part in keys[i]))
    ranks = closing_ranking(closing, log_alpha)
    assert ranks.argsort().tolist() == expected
    assert sorted(ranks.tolist()) == list(range(50))


def test_a_ranking_is_where_its_gates_are():
    """The meta device stands for any that is not the processor."""
    closing, log_alpha = torch.empty(5, dtype=torch.long, device="meta"), torch.empty(5, device="meta")
    assert closing_ranking(closing, log_alpha).device.type == "meta"


def test_a_gate_may_close_at_step_0():
    closing = update_closing_step(torch.full((2,), NOT_CLOSED), torch.tensor([0.0, 0.5]), 0)
    closing = update_closing_step(closing, torch.tensor([0.0, 0.0]), 1)
    assert closing.tolist() == [0, 1]
    opened = update_closing_step(closing, torch.tensor([0.0, 0.5]), 2)
    assert closing_ranking(opened, torch.tensor([3.0, -3.0])).tolist() == [0.0, 1.0]
