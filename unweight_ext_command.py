"""The command `unweight`, beside the package: to import that loads torch, a second or more, which `--help` needn't wait
for. `unweight_ext/__init__.py` looks whether this is here, and leaves its operators to what uses them."""

import sys


def main() -> int:
    """Runs a command. Returns the exit code."""
    from unweight_ext.cli import main

    return main(sys.argv[1:])
