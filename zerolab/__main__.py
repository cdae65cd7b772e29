"""`zerolab` and `python -m zerolab`, as torchrun starts it, are the same command."""

import sys


def run() -> int:
    """The exit code of `zerolab.cli.main`; of Ctrl-C while that is imported too."""
    try:
        from zerolab.cli import main

        return main()
    except KeyboardInterrupt:
        print("zerolab: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
