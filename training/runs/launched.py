"""The processes that torchrun, accelerate, srun or a cluster started together, by their environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gates.errors import GateError
from training.config.run import TrainerOptions

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_STEP_ID")
"""Environment variables of a process that is one of several."""
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class World:
    """The processes of one job."""

    launcher: str
    size: int
    rank: int
    per_node: int

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise GateError(
                f"this process has the number {self.rank}, but {self.launcher} started {self.size} processes; expected 0 to "
                f"{self.size - 1}; start all processes by one launcher"
            )

    def fitted(self, options: TrainerOptions) -> TrainerOptions:
        """Return the trainer's options with the devices and machines of this job."""
        devices, nodes = options.devices, self.size // self.per_node
        count = len(devices) if isinstance(devices, list) else devices
        if str(count) not in ("auto", "-1", str(self.per_node)):
            raise self._unlike("devices", devices, self.per_node, "processes on each machine")
        if options.num_nodes not in (1, nodes):
            raise self._unlike("num_nodes", options.num_nodes, nodes, "machines")
        return replace(options, devices=devices if isinstance(devices, list) else self.per_node, num_nodes=nodes)

    def _unlike(self, name: str, given: object, expected: int, what: str) -> GateError:
        return GateError(
            f"--trainer.{name} is {given}, but {self.launcher} started {self.size} processes ({what}: {expected}); remove the "
            "option, or start as many processes as it says"
        )


def launched(environment: Mapping[str, str]) -> World | None:
    """Return the processes that something other than Lightning started together with this one, or None if nothing did."""
    given = environment.keys()
    if "TORCHELASTIC_RUN_ID" in given or {"RANK", "WORLD_SIZE"} <= given:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in given else "a launcher (RANK and WORLD_SIZE)"
        local = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if "LOCAL_RANK" in given else ()  # DeepSpeed has the second
        world = _world(environment, launcher, local)
        if local and (number := _number(environment, "LOCAL_RANK")) >= world.per_node:
            raise GateError(
                f"LOCAL_RANK is {number}, but {launcher} started {world.per_node} processes on each machine; expected 0 to "
                f"{world.per_node - 1}; start all processes by one launcher"
            )
        if world.size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= given:
            raise GateError(f"{launcher} started {world.size} processes, without MASTER_ADDR or MASTER_PORT; set both")
        return world
    tasks = _number(environment, "SLURM_NTASKS", 1)
    for name in OF_MPI:
        if (size := _number(environment, name, 1)) > 1 and not (name == "PMI_SIZE" and size == tasks):  # srun has that one too
            raise GateError(
                f"mpirun started {size} processes ({name}), which do not find each other; use torchrun, srun or "
                "--trainer.devices"
            )
    return _of_slurm(environment, tasks) if tasks > 1 else None


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Return whether this is the first of the processes that were started together, by Lightning or by a launcher."""
    world = launched(environment)
    if world is not None:
        return world.rank == 0
    return all(_number(environment, name, 0) == 0 for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def check_alone(command: str, environment: Mapping[str, str]) -> None:
    """Raise :class:`GateError` if a command that works in one process was started in several."""
    world = launched(environment)
    if world is not None and world.size > 1:
        raise GateError(
            f"{world.launcher} started {world.size} processes, but {command} works in one; start it once, without a launcher"
        )


def _of_slurm(environment: Mapping[str, str], tasks: int) -> World | None:
    """Return the tasks of a step of SLURM, or None for a shell in an allocation."""
    is_step = "SLURM_STEP_ID" in environment
    is_shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as in Lightning
    if is_step and is_shell:
        raise GateError(
            f"srun started {tasks} tasks in a job called {environment['SLURM_JOB_NAME']!r}, as if each were a shell; give srun "
            "another --job-name, or --ntasks 1"
        )
    if is_shell:
        return None
    if not is_step:
        raise GateError(
            f"the job has {tasks} tasks (SLURM_NTASKS), but srun did not start this process; put srun before the command, or "
            "give the job --ntasks 1"
        )
    of_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", _number(environment, "SLURM_NNODES", 1))
    if "," in of_nodes or tasks % nodes:
        raise _uneven("srun", tasks)
    return World("srun", tasks, _number(environment, "SLURM_PROCID"), tasks // nodes)


def _world(environment: Mapping[str, str], launcher: str, local: tuple[str, ...]) -> World:
    """Return the processes of a launcher; each machine has one if ``local`` names no variable with their number."""
    count = _number(environment, "WORLD_SIZE")
    stated = [name for name in local if name in environment]
    if local and not stated and count > 1:
        raise GateError(f"{launcher} started {count} processes, but not how many on each machine; set {local[0]}")
    per_node = _number(environment, stated[0]) if stated else 1
    if count % per_node:
        raise _uneven(launcher, count)
    return World(launcher, count, _number(environment, "RANK"), per_node)


def _uneven(launcher: str, size: int) -> GateError:
    return GateError(f"{launcher} started {size} processes, not equally many on each machine; start equally many on each")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name) or (None if default is None else str(default))
    if value is None or not value.isdecimal() or (int(value) == 0 and not name.endswith(("RANK", "PROCID"))):
        raise GateError(f"the environment variable {name} is {value!r}; expected a whole number, or start without a launcher")
    return int(value)
