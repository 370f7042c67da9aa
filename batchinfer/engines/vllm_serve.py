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
    own = command.subparser_init(parser.add_subparsers(dest="subparser"))
    own.allow_abbrev = False  # what is abbreviated would lose to the options that we add
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    try:
        command.validate(arguments)
        command.cmd(arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if getattr(error, "errno", None) in _MACHINE_ERRORS or _is_hub_down(error):
            raise
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.exit(2)


def _is_hub_down(error: BaseException | None) -> bool:
    """Whether an error comes from the Hub's failure, or from the network to it, which may pass."""
    from huggingface_hub import constants, errors

    while error is not None and not constants.HF_HUB_OFFLINE:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        kinds = (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)
        if status == 429 or status >= 500 or isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
