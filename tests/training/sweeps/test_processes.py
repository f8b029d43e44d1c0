import signal
import subprocess
import sys

import pytest

from training.sweeps.processes import end, last_error, trial_environment


def test_each_job_has_a_gpu_where_there_are_several(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [trial_environment(3, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "7", "4"]
    assert trial_environment(1, 0)["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_a_process_that_ignores_ctrl_c_is_killed(monkeypatch):
    monkeypatch.setattr("training.sweeps.processes.GRACE", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], process_group=0, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        end([process])
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("log", "returncode", "why"),
    [
        ("a warning\nerror: the budget is 99\nmore\n", 2, "the budget is 99"),
        ("Traceback\nValueError: a mistake\n\n", 1, "ValueError: a mistake"),
        ("", 1, "exit code 1"),
        ("error: too late\n", -9, "ended by SIGKILL"),
    ],
)
def test_why_a_trial_failed(tmp_path, log, returncode, why):
    (tmp_path / "0.log").write_text(log)
    assert last_error(tmp_path / "0.log", returncode) == why
