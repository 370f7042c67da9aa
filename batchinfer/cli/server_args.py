"""Options of the server that the worker starts: taken as they are typed, and handed on.

No option of vLLM is declared here. What is none of our options goes to the server, whose parser judges it before it
loads anything. A name that is nearly one of ours is refused, since it is most likely a misspelling. Options may also
stand in the section ``vllm`` of a settings file and in variables, as in ``BATCHINFER_WORKER_MAX_MODEL_LEN``. What is
typed replaces what a variable says, and both replace what the file says.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence

import click

from batchinfer.cli.help import SectionCommand
from batchinfer.cli.options import LEFT_OUT
from batchinfer.cli.settings import FROM_FILE, unknown_variables, write_option
from batchinfer.core.errors import ConfigError
from batchinfer.core.redaction import is_secret, redact
from batchinfer.engines.engine_config import OPTION, grouped

_NAME = re.compile(r"--?[A-Za-z][\w.-]*")
_NEARLY = 0.85
_NO_MISSPELLING = ("--load-format", "--worker-cls")
"""Options of vLLM's server whose names are nearly ours."""
_MANAGED = {
    "the worker chooses where its server listens; leave it out": "--uds --host --port",
    "only the worker reaches its server": "--api-key --ssl-keyfile --root-path",
    "write --replicas: a server is started for each": "--data-parallel-size -dp",
    "a server's GPUs are those of --tensor-parallel-size and --pipeline-parallel-size": (
        "--prefill-context-parallel-size -pcp"
    ),
    "the server's statistics tell the worker that it goes on; leave it out": "--disable-log-stats",
    "the worker speaks HTTP with its server; leave it out": "--grpc",
    "write --tensor-parallel-size": "-tp",
    "write --pipeline-parallel-size": "-pp",
    "write --nnodes": "-n",
    "write --node-rank": "-r",
}
"""Options of vLLM's server that the worker sets itself, by what to do instead."""


class ServerCommand(SectionCommand):
    """A command that starts a server, and takes its options. Their words are the parameter `server_args`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command."""
        own, typed = divide(args, self.get_params(ctx))
        left_out = getattr(self.callback, LEFT_OUT, ())
        try:
            rest = super().parse_args(ctx, own)
        except click.MissingParameter as error:
            if not typed or not isinstance(error.param, click.Argument):
                raise
            more = f"Write it before {typed[0]}, which takes all words after it."
            raise click.MissingParameter(more, ctx, error.param) from error
        words = merge(ctx.meta.get(FROM_FILE, ()), from_variables(ctx), typed)
        for option, _ in grouped(words):
            name = option.partition("=")[0]
            if name.lstrip("-").replace("-", "_") in left_out:
                raise ConfigError(f"{name}: is no option of {self.name}")
        ctx.params["server_args"] = words
        return rest


def merge(*sources: Sequence[str]) -> list[str]:
    """Join the words of several sources. An option replaces the same option of an earlier source. Pure.

    >>> merge(["--dtype", "half", "--seq", "1"], ["--dtype=float"], ["--no-x"])
    ['--dtype=float', '--seq', '1', '--no-x']
    """
    found: dict[str, list[str]] = {}
    for words in sources:
        here: dict[str, list[str]] = {}
        for option, values in grouped(words):
            name = option.partition("=")[0].lstrip("-").replace("_", "-").removeprefix("no-")
            here.setdefault(name, []).extend([option, *values])
        found |= here
    return [word for words in found.values() for word in words]


def without_secrets_in(words: Sequence[str]) -> list[str]:
    """Leave out the options whose names say that their values are secrets, and the secrets of URLs. Pure."""
    kept = [
        [option, *values]
        for option, values in grouped(words)
        if not is_secret(option.partition("=")[0].lstrip("-"))
    ]
    return [redact(word) for each in kept for word in each]


def divide(
    words: Sequence[str], parameters: Sequence[click.Parameter]
) -> tuple[list[str], list[str]]:
    """Divide a command line into the words of our own options and arguments, and those of the server's options. Pure.

    All words after an option of the server's that are no options belong to it, and so does everything after ``--``.

    Raises:
        ConfigError: an option is nearly one of ours, or `--` is not followed by one.
    """
    options = {
        name: parameter
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    own: list[str] = []
    server: list[str] = []
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if word == "--":
            if waiting and not OPTION.match(waiting[-1]):
                where = "stands after --, where only the server's options stand"
                raise ConfigError(f"{redact(waiting[-1])}: {where}", hint="write it before --")
            server += reversed(waiting)
            break
        name, has_value, _ = word.partition("=")
        if not OPTION.match(word):
            own.append(word)
        elif (option := options.get(name)) is not None or name[:2] in options:
            own.append(word)
            takes_value = option is not None and not (option.is_flag or has_value)
            if takes_value and waiting:
                own.append(waiting.pop())
        else:
            check_name(name, options)
            server.append(word)
            while waiting and waiting[-1] != "--" and not OPTION.match(waiting[-1]):
                server.append(waiting.pop())
    return own, server


def check_name(name: str, known: Iterable[str]) -> None:
    """Refuse what cannot be an option's name, and a name that is nearly one of ours.

    Raises:
        ConfigError: the message names ours.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"No such option: {redact(name)}", hint="see --help")
    long_names = [each for each in known if each.startswith("--")]
    spelled = "--" + name.lstrip("-").replace("_", "-").lower()
    near = difflib.get_close_matches(spelled, long_names, n=1, cutoff=_NEARLY)
    if near and name.startswith("--") and spelled not in _NO_MISSPELLING:
        hint = f"if the server has an option of this name, write it after `--`, as in `-- {name} …`"
        hint += "; fields of requests without an option go by --sampling, as in top_k=40"
        raise ConfigError(f"No such option: {name}. Did you mean {near[0]}?", hint=hint)


def from_variables(ctx: click.Context) -> list[str]:
    """Return the server's options in the environment: variables of this command that set no option of ours.

    Raises:
        ConfigError: a variable's name is nearly that of one of ours.
    """
    prefix = f"{ctx.auto_envvar_prefix}_"
    options = [name for each in ctx.command.params for name in each.opts]
    words: list[str] = []
    for name, _ in unknown_variables(ctx, os.environ):
        option = "--" + name.removeprefix(prefix).replace("_", "-").lower()
        check_name(option, options)
        text = os.environ[name]
        flags = {"": True, "true": True, "false": False}
        words += write_option(option, flags.get(text.lower(), text))
    return words


def check_server_args(words: Sequence[str], engine: str) -> None:
    """Refuse options of a server where no server is started, and those that the worker sets itself.

    Raises:
        ConfigError: the message names the option.
    """
    names = [word.partition("=")[0] for word in words if OPTION.match(word)]
    if words and engine == "openai":
        hint = "--engine openai starts no server that could take it; see --help"
        raise ConfigError(f"No such option: {names[0]}", hint=hint)
    for name in names:
        for advice, managed in _MANAGED.items():
            if name.replace("_", "-") in managed.split():
                raise ConfigError(f"{name}: is not an option here", hint=advice)
