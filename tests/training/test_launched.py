"""Processes that torchrun, srun and others start: one training, or one sentence in each of them."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from pytorch_lightning.plugins.environments import KubeflowEnvironment, LightningEnvironment, TorchElasticEnvironment

from gates.errors import GateError
from tests.training.runs import make_setup, write_config
from training.config.run import TrainerOptions
from training.runs.launched import OF_MPI, VARIABLES, World, is_first_process, launched
from training.runs.processes import environment_of
from training.setup import make_trainer

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} | MEETING
ALONE = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
DEEPSPEED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", **MEETING}
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "2", **MEETING}
BATCH = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}


@pytest.fixture
def environment(monkeypatch):
    """Nothing of a launcher, and a way to set what it would."""
    for name in (*VARIABLES, *OF_MPI, "NODE_RANK", "SLURM_PROCID", "HEAD_GATES_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 4, 3, 2)),
        (SRUN | TORCHRUN, ("torchrun", 4, 3, 2)),  # torchrun in each task of srun
        (DEEPSPEED, ("a launcher (RANK and WORLD_SIZE)", 2, 1, 2)),
        (KUBEFLOW, ("a launcher (RANK and WORLD_SIZE)", 2, 1, 1)),
        (SRUN, ("srun", 4, 2, 4)),
        (SRUN | {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}, ("srun", 4, 2, 2)),
        (SRUN | {"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}, ("srun", 4, 2, 2)),
        (SRUN | {"PMI_SIZE": "4", "PMI_RANK": "2"}, ("srun", 4, 2, 4)),
        (BATCH | {"SLURM_NTASKS": "1"}, None),
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}, None),  # srun --pty bash
        (BATCH | {"SLURM_JOB_NAME": "interactive"}, None),  # a shell of salloc
        ({"SLURM_JOB_ID": "1234", "SLURM_PROCID": "0"}, None),  # no --ntasks
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **MEETING}, None),  # Lightning's own
        ({}, None),
    ],
)
def test_every_launcher_says_which_processes_there_are(environment, expected):
    world = launched(environment)
    assert world == (None if expected is None else World(*expected))
    if world is not None:
        assert is_first_process(environment) == (world.rank == 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, "^this process has the number 4, but torchrun started 4 processes; expected 0 to 3"),
        (SRUN | {"SLURM_PROCID": "9"}, "^this process has the number 9, but srun started 4 processes"),
        (KUBEFLOW | {"WORLD_SIZE": "1"}, r"^this process has the number 1, but a launcher \(RANK and WORLD_SIZE\) started 1"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "^LOCAL_RANK is 2, but torchrun started 2 processes on each machine; expected 0 to 1"),
        (BATCH, r"^the job has 4 tasks \(SLURM_NTASKS\), but srun did not start this process; put srun before"),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, "^srun started 4 tasks in a job called 'bash'"),
        (SRUN | {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "3,1"}, "^srun started 4 processes, not equally many on each"),
        (SRUN | {"SLURM_PROCID": "x"}, "^the environment variable SLURM_PROCID is 'x'; expected a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "5"}, "^torchrun started 5 processes, not equally many"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "^the environment variable WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEETING}, "set LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR or MASTER_PORT; set both"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"^mpirun started 2 processes \(OMPI_COMM_WORLD_SIZE\)"),
        (BATCH | {"OMPI_COMM_WORLD_SIZE": "4"}, "^mpirun started 4 processes"),
    ],
)
def test_processes_that_cannot_train_together_are_one_sentence(environment, message):
    with pytest.raises(GateError, match=message):
        launched(environment)


@pytest.mark.parametrize(("rank", "first"), [("LOCAL_RANK", False), ("NODE_RANK", False), ("RANK", False), ("GROUP", True)])
def test_a_process_with_a_rank_is_not_the_first(rank, first):
    assert is_first_process({rank: "1"}) == first


WORLD = World("torchrun", size=4, rank=1, per_node=2)


@pytest.mark.parametrize("devices", ["auto", -1, "-1", 2, "2", [0, 3]])
def test_devices_and_machines_follow_the_launcher(devices):
    for nodes in (1, 2):
        fitted = WORLD.fitted(TrainerOptions(devices=devices, num_nodes=nodes))
        assert (fitted.devices, fitted.num_nodes) == (devices if isinstance(devices, list) else 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, r"^--trainer.devices is 1, but torchrun started 4 processes \(processes on each machine: 2\); remove"),
        ({"devices": 4}, "^--trainer.devices is 4"),
        ({"num_nodes": 3}, r"^--trainer.num_nodes is 3, but torchrun started 4 processes \(machines: 2\)"),
    ],
)
def test_other_devices_than_the_launcher_has_are_refused(options, message):
    with pytest.raises(GateError, match=message):
        WORLD.fitted(TrainerOptions(**options))


def test_lightning_gets_the_environment_of_the_launcher(environment):
    assert isinstance(environment_of(None), LightningEnvironment)
    assert isinstance(environment_of(launched(TORCHRUN | ALONE)), LightningEnvironment)
    assert isinstance(environment_of(launched(KUBEFLOW)), KubeflowEnvironment)
    environment(SRUN)
    tasks = environment_of(launched(SRUN))
    assert (tasks.world_size(), tasks.global_rank(), tasks.local_rank(), tasks.node_rank()) == (4, 2, 2, 0)
    tasks.validate_settings(4, 1)
    environment(TORCHRUN)
    assert isinstance(environment_of(launched(TORCHRUN)), TorchElasticEnvironment)


def trainer_of(**options):
    setup = make_setup()
    return make_trainer(replace(setup, trainer=replace(setup.trainer, **options)))


def test_a_trainer_is_of_all_processes_or_refused(environment):
    assert trainer_of().world_size == 1
    environment({"LOCAL_RANK": "1"})
    with pytest.raises(GateError, match="is above 0, but this process trains alone"):
        trainer_of()
    environment(SRUN)
    assert trainer_of().world_size == 4
    with pytest.raises(GateError, match=r"^--trainer.devices is 1, but srun started 4"):
        trainer_of(devices=1)


def test_a_job_with_a_task_for_each_core_does_not_stop_what_lightning_starts(environment):
    """Of one task, Lightning's own environment of SLURM would be a world of one, whatever the devices."""
    environment(BATCH | {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "4"})
    assert trainer_of(devices=2).world_size == 2


def started(command, folder, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        command, cwd=folder, env=kept | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def two_tasks(folder, *command):
    """Run a command as two tasks of SLURM; returns their exit codes with what they said."""
    job = BATCH | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(random.randrange(10_000))}
    tasks = [
        started([sys.executable, "-m", *command], folder, **(job | {"SLURM_PROCID": n, "SLURM_LOCALID": n})) for n in ("0", "1")
    ]
    said = [task.communicate() for task in tasks]
    return [(task.returncode, *text) for task, text in zip(tasks, said, strict=True)]


@pytest.mark.nightly
def test_torchrun_makes_one_training_in_a_folder_that_it_finds_itself(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "training.fit"]
    process = started([*command, "--config", write_config(tmp_path), "--compare", "posthoc", "--curve", "[]"], tmp_path)
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    assert out.count("comparison: runs/tiny/comparison.csv") == 1  # one of the two speaks
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    table = pd.read_csv(tmp_path / "runs" / "tiny" / "comparison.csv")
    assert table.query("stage == 'retrained'")["steps"].tolist() == [16]  # two batches at a time
    assert (tmp_path / "runs" / "tiny" / "finished.json").is_file()


@pytest.mark.nightly
def test_tasks_of_slurm_make_one_training_and_hear_the_same_refusals(tmp_path):
    arguments = ["training.fit", "--config", write_config(tmp_path), "--run_dir", "run"]
    found = two_tasks(tmp_path, *arguments)
    assert [code for code, *_ in found] == [0, 0], found
    assert (tmp_path / "run" / "finished.json").is_file()
    for code, _, errors in two_tasks(tmp_path, *arguments):
        assert code == 2
        assert errors.splitlines()[-1].startswith("error: 'run' already holds a run")
