"""The entry point: answers signals from its first line on, before the imports that take most of a short run."""

import os
import signal
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    # Nothing has been opened yet, and half-imported modules must not run their clean-up.
    os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    from widen_cli.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
