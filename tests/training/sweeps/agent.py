"""W&B's own agent, without their server."""

from types import SimpleNamespace

import yaml
from wandb import wandb_agent


def in_agents_environment(folder, monkeypatch):
    """Be on a machine where the agent was started in this folder; everything that the agent sets is undone after the test."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")


def agent_command(path, values, monkeypatch):
    """Return the command that the agent starts for these values of a sweep file's parameters."""
    started = []
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda command, **_: started.append(command) or SimpleNamespace())
    start_with_agent(path, values)
    return started[0]


def start_with_agent(path, values):
    """Let the agent run one trial, as their server would ask it to; return the agent."""
    content = yaml.safe_load(path.read_text())
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="s1")
    agent._sweep_command = content["command"]
    args = {name: {"value": value} for name, value in values.items()}
    agent._command_run({"run_id": "trial7", "program": content.get("program"), "args": args})
    return agent
