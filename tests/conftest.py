"""What all tests need of the process that they run in."""

import os
import signal
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pytest_sessionstart():
    """Processes that tests start run this checkout's code, in whatever directory and whatever is installed; and Ctrl+C works
    in them, although a shell starts what it runs in the background with SIGINT ignored, which child processes inherit."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
