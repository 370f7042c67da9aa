"""`batchinfer check`: find out without a GPU, before paying for one, whether a run will work.

The command reports all problems that it finds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
import msgspec

from batchinfer.check.steps import ERROR, CheckConfig, CheckWorld, Examination, Problem
from batchinfer.cli.options import SectionCommand
from batchinfer.cli.origins import origins_in
from batchinfer.cli.run_options import fields_of, run_options, value_of
from batchinfer.cli.settings import common_options, price_options
from batchinfer.cli.terminal import say
from batchinfer.cli.values import NumberRange
from batchinfer.core import units
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import BatchinferError, ConfigError
from batchinfer.core.prices import Prices
from batchinfer.split.command import parse_delimiter
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.command import engine_config, prompt_config, sampling_config
from batchinfer.worker.config import Limits


def run_check(config: CheckConfig, world: CheckWorld) -> dict[str, Any]:
    """Check everything, and return the problems with the other results.

    If the run's URL is given, a probe object is written there and removed again.

    Returns:
        The result as a dictionary. Its entry `problems` lists all problems, errors before warnings.
    """
    scratch = Scratch(config.scratch_dir)
    try:
        return Examination(config, world, scratch).run()
    finally:
        scratch.close()


# --------------------------------------------------------------------------- the command


def make_config(options: dict[str, Any]) -> CheckConfig:
    """Make a config from command-line options. A wrong option becomes a problem; the others are still read."""
    problems: list[Problem] = []

    def attempt(make: Callable[[dict[str, Any]], Any]) -> Any:
        try:
            return make(options)
        except BatchinferError as error:
            problems.append(
                Problem(level=ERROR, area="config", message=error.message, hint=error.hint)
            )
            return None

    config = CheckConfig(
        sources=list(options["sources"]),
        delimiter=options["delimiter"],
        manifests=list(options["manifests"]),
        job=options["job"],
        output=(options["output"] or "").rstrip("/"),
        limit=options["limit"],
        allow_absolute=options["allow_absolute"],
        engine=attempt(engine_config),
        prompt=attempt(prompt_config),
        sampling=attempt(sampling_config),
        run_seed=attempt(partial(value_of, "seed")),
        checkpoint_seconds=options["checkpoint_seconds"],
        gpu=options["gpu"] or "",
        rate=options["rate"],
        rate_from=options["rate_from"] or "",
        workers=options["workers"],
        hours=options["hours"],
        max_cost=options["max_cost"],
        max_hours=options["max_hours"],
        is_spot=options["is_spot"],
        sample_rows=options["sample_rows"],
        show=options["show"],
        synthetic=options["synthetic"],
        scratch_dir=str(options["scratch_dir"]) if options["scratch_dir"] else None,
        limits=Limits(**fields_of("Limits", options)),
    )
    return msgspec.structs.replace(config, problems=problems)


def tell(result: dict[str, Any]) -> None:
    """Print a result to stderr as text."""
    lengths = (result.get("sample") or {}).get("lengths")
    if lengths:
        say(
            f"prompt tokens: {lengths['mean']:.0f} on average, 95 % up to {lengths['p95']}, "
            f"longest {lengths['longest']}"
        )
        most = max(lengths["histogram"].values())
        for bound, count in lengths["histogram"].items():
            bar = "#" * max(1, round(40 * count / most))
            say(f"{'up to ' + bound:>14} {count:>6} {bar}")
    if images := (result.get("sample") or {}).get("images"):
        say(
            f"images: {images['mean']:.3g} a row, of {units.count(round(images['mean_bytes']))} bytes on average, "
            f"largest {images['largest']}"
        )
    if "memory" in result:
        say(f"memory: {result['memory']['explanation']}")
    if "estimate" in result:
        found = result["estimate"]
        say(
            f"estimate: {units.count(found['rows'])} rows, {units.many(found['workers'], 'worker')}, "
            f"{units.duration(found['hours'] * 3600)}, {units.money(found['cost'])}"
        )
    for line in result.get("advice", ()):
        say(f"advice: {line}")
    for problem in result["problems"]:
        hint = f" ({problem['hint']})" if problem["hint"] else ""
        say(f"{problem['level']}: {problem['message']}{hint}")
        for origin in origins_in(problem["message"]):
            say(f"hint: {origin}")


@click.command("check", cls=SectionCommand)
@click.argument("sources", nargs=-1)
@click.option(
    "--delimiter",
    callback=parse_delimiter,
    metavar="CHARACTER",
    help="As in split: the character between the fields of SOURCE's CSV.",
)
@click.option(
    "--gpu",
    metavar="NAME[:N]",
    help="GPUs of one worker, for the memory sums: L4, H100:8; or alternatives, as in L4,A100.",
)
@click.option("--rate", type=NumberRange(0, min_open=True), help="Rows per second of one worker.")
@click.option("--rate-from", metavar="RUN", help="Take the rate that an earlier run's workers had.")
@click.option("--workers", type=click.IntRange(1), help="How many there will be.")
@click.option(
    "--hours",
    type=NumberRange(0, min_open=True),
    help="Advise how many workers finish in so long.",
)
@click.option(
    "--sample-rows",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Rows to look at, from all over the data.",
)
@click.option(
    "--show", type=click.IntRange(0), default=3, show_default=True, help="Prompts to show in full."
)
@click.option("--synthetic", type=click.IntRange(1), metavar="N", help="Check with N made-up rows.")
@price_options
@run_options(with_look=False, without=("price_per_hour", "headless"))
@common_options
def command(**options: Any) -> dict[str, Any]:
    """Find out before paying: SOURCE (or --job) and the worker's own options, without a GPU.

    Looks at the configuration, credentials (a probe object is written to --output and removed), the
    model's files, prompts of some rows and their lengths, memory, time and cost. Exit 2 with all problems at once.
    """
    from batchinfer.engines.models import describe_model
    from batchinfer.engines.tokenizers import tokenizer_for
    from batchinfer.storage.opening import open_store, probe

    config = make_config(options)
    world = CheckWorld(
        open_store=open_store,
        probe=probe,
        describe_model=describe_model,
        load_tokenizer=tokenizer_for,
        prices=Prices(options["price_per_hour"]),
        clock=SystemClock(),
    )
    result = run_check(config, world)
    tell(result)
    if result["errors"]:
        error = ConfigError(
            f"would not work: {units.many(result['errors'], 'error')}, listed above",
            hint="fix them and check again; nothing was started",
        )
        error.attach_result(result)
        raise error
    return result
