"""Runs `vllm serve` with the options after it, as a program: ``python -m batchinfer.engines.vllm_serve MODEL …``.

The command `vllm` itself asks for the version of the distribution "vllm", which the CPU build does not have. Errors
that a fresh start cannot help end with status 2, as those of vLLM's parser do: options that do not fit the model, a
model that cannot be read, an adapter that vLLM refuses.
"""

from __future__ import annotations

import sys
from errno import EAGAIN, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC

_MACHINE_ERRORS = (EAGAIN, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC)
"""Error numbers of the operating system that say that the machine is at fault, and not a path or an option."""


def main() -> None:
    """Parse the options as `vllm serve` does, and serve until a signal ends it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    try:
        command.validate(arguments)
        command.cmd(arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if getattr(error, "errno", None) in _MACHINE_ERRORS:
            raise
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
