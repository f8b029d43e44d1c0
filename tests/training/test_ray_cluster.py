"""Whether a cluster of Ray can be had, and what a task gets of it; nothing is started here."""

import importlib.util
import socket
from dataclasses import replace

import pytest

from gates.errors import GateError
from tests.training.runs import make_setup, write_config
from training.commands.preflight import check_run
from training.commands.table import read
from training.config import LauncherOptions
from training.config.comparison import alone
from training.runs.ray_cluster import check_ray, gpus_per_task

pytest.importorskip("ray", reason="Ray, an extra, is not installed")


def on_ray(**more):
    return LauncherOptions(launcher="ray", **more)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GateError, match="which is not installed; run pip install ray"):
        check_ray(on_ray())


def test_an_address_where_nobody_answers_is_told(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            GateError, match=f"no cluster of Ray at --ray_address {address}: .*refused.*; start one by ray start"
        ):
            check_ray(on_ray(ray_address=address))


def test_an_address_that_answers_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_ray(on_ray(ray_address=f"127.0.0.1:{server.getsockname()[1]}"))
    check_ray(on_ray(ray_address="auto"))
    check_ray(on_ray())


@pytest.mark.parametrize(
    ("machines", "accelerator", "options", "expected"),
    [
        ([{"CPU": 2.0}], "auto", {}, 0.0),
        ([{"CPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}], "auto", {}, 1.0),
        ([{"CPU": 8.0, "GPU": 4.0}], "cpu", {}, 0.0),
        ([{"CPU": 8.0, "GPU": 4.0}], "gpu", {"ray_gpus_per_task": 0.5}, 0.5),
        ([{"CPU": 8.0, "GPU": 4.0}], "auto", {"ray_gpus_per_task": 0}, 0.0),
        ([{"CPU": 2.0}], "auto", {"ray_cpus_per_task": 3}, "no machine of the cluster has more than 2 processor cores"),
        ([{"CPU": 2.0}, {"CPU": 2.0}], "gpu", {}, "each experiment is to have 1 GPUs, but no machine .* more than 0"),
        ([{"CPU": 2.0, "GPU": 2.0}], "auto", {"ray_gpus_per_task": 3}, "to have 3 GPUs, but no machine .* more than 2"),
        ([{"CPU": 2.0, "GPU": 2.0}], "cpu", {"ray_gpus_per_task": 1}, "--trainer.accelerator cpu uses none"),
        ([{"CPU": 2.0, "GPU": 2.0}], "gpu", {"ray_gpus_per_task": 0}, "--trainer.accelerator gpu needs one"),
    ],
)
def test_what_a_task_gets_is_what_a_machine_has(monkeypatch, machines, accelerator, options, expected):
    import ray

    nodes = [{"Alive": True, "Resources": one} for one in machines] + [{"Alive": False, "Resources": {"CPU": 99, "GPU": 99}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    if isinstance(expected, str):
        with pytest.raises(GateError, match=expected):
            gpus_per_task(on_ray(**options), accelerator)
    else:
        assert gpus_per_task(on_ray(**options), accelerator) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray_address", "auto"], "--ray_address is given, but nothing uses it; add --launcher ray"),
        (["--launcher", "ray", "--ray_address", "127.0.0.1:1"], "there is no cluster of Ray at --ray_address 127.0.0.1:1"),
        (["--launcher", "ray", "--trainer.devices", "2"], "--trainer.devices is 2, but --launcher ray runs each"),
        (["--launcher", "ray", "--trainer.num_nodes", "2"], "--trainer.num_nodes is 2"),
        (["--launcher", "ray", "--trainer.strategy", "ddp"], "--trainer.strategy is ddp, but --launcher ray"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(tmp_path, arguments, said):
    with pytest.raises(GateError, match=said):
        check_run(read("compare", ["--config", write_config(tmp_path), *arguments]))


def test_one_process_trains_each_experiment_however_many_devices_a_machine_has():
    setup = make_setup()
    assert setup.trainer.devices == "auto"
    assert alone(setup).trainer.devices == 1
    assert alone(replace(setup, trainer=replace(setup.trainer, devices=[3]))).trainer.devices == 1
