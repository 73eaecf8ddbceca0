"""The commands of `python -m muon_optax`, one module each.

A command's module has `add_parser(subparsers)`, which sets `run` on its parser: a function of the
parsed arguments that returns the exit code.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from muon_optax.cli import parity, plan, report

__all__ = ["main"]

_COMMANDS = (plan, report, parity)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments; None takes the process's.

    Returns:
      The exit code: 0, or 1 where the check that was asked for fails, or 2 for errors.
    """
    parser = argparse.ArgumentParser(prog="python -m muon_optax", description="Muon for JAX.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # as in `plan ... | head`; Python would complain again on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
