"""What all tests need of the process that they run in."""

import signal


def pytest_sessionstart():
    """Ctrl+C works: a shell starts what it runs in the background with SIGINT ignored, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
