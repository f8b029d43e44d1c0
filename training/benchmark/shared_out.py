"""HIS by several processes of one machine, each with its share of the texts: how long the one works that works longest."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from gates import HeadGates
from gates.scores.importance import HeadImportance
from training.benchmark.alternate import Effort, Times, order_of, stopwatch_of
from training.benchmark.models import Shape, random_classifier
from training.benchmark.scores import head_scores
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.runs import progress

PROCESSES = (1, 2)


def share_out(shape: Shape, size: Size, batches: int, effort: Effort) -> Times:
    """Milliseconds of the process that works longest, by the number of processes, which take turns.

    Each process computes with one thread. The sums of all are added up at the end, which counts; waiting for the others does
    not where the time that a processor works is measured.

    Args:
        shape: of the random model.
        size: of a batch.
        batches: that are scored, by all together.
        effort: how long is measured.
    """
    with tempfile.TemporaryDirectory() as folder, progress.stage("measuring processes that share out texts"):
        arguments = (folder, shape, size, batches, replace(effort, turns=min(effort.turns, 10)))
        multiprocessing.spawn(_process, arguments, nprocs=max(PROCESSES))
        return Times(torch.load(Path(folder) / "times.pt"))


def _process(rank: int, folder: str, shape: Shape, size: Size, batches: int, effort: Effort) -> None:
    torch.set_num_threads(1)
    world = max(PROCESSES)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        taken = _turns(rank, shape, size, batches, effort)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        torch.save(taken, Path(folder) / "times.pt")


def _turns(rank: int, shape: Shape, size: Size, batches: int, effort: Effort) -> dict[str, list[float]]:
    setting = Setting("", None, "cpu", 1, (size,))
    gates, batch = HeadGates(random_classifier(shape).eval()), setting.batch(size, shape.vocabulary)
    measure = stopwatch_of(setting.on, processor_time=effort.processor_time)

    def score(processes: int) -> None:
        importance = HeadImportance(gates.size, sync_on_compute=processes > 1)
        for _ in range(batches // processes):
            importance.update(head_scores(gates, batch))
        importance.compute()

    taken: dict[str, list[float]] = {str(processes): [] for processes in PROCESSES}
    for turn in range(effort.warm_up + effort.turns):
        for name in order_of(list(taken), turn):
            distributed.barrier()
            own = measure(lambda name=name: score(int(name))) if rank < int(name) else 0.0  # type: ignore[misc]
            longest = torch.tensor(own)
            distributed.all_reduce(longest, distributed.ReduceOp.MAX)
            if turn >= effort.warm_up:
                taken[name].append(float(longest))
    return taken
