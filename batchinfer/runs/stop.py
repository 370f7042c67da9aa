"""`batchinfer stop`: write the object stop.json, which makes every worker of a run end, or remove it again."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from batchinfer.cli.config_commands import config_command
from batchinfer.cli.terminal import say
from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock, iso_utc
from batchinfer.core.errors import AlreadyExists, BatchinferError, ConfigError
from batchinfer.core.option_help import NO_OPTION
from batchinfer.core.records import Record
from batchinfer.ledger.runs import no_run
from batchinfer.runs.launched import cancel_launches
from batchinfer.storage import Store


class StopConfig(Record, frozen=True, kw_only=True):
    """Which run to stop."""

    run: Annotated[str, NO_OPTION]
    resume: bool = False
    """Take the request back: workers may start again."""
    cancel: bool = False
    """Cancel what `batchinfer launch` submitted, too, and say what is left."""
    namespace: str = ""
    """Namespace of what is cancelled (kubernetes)."""


def run_stop(config: StopConfig, *, store: Store, clock: Clock) -> dict[str, Any]:
    """Write or remove the stop request, stop.json. No other object is touched, and a second call changes nothing.

    Workers look for stop.json when they start and with each heartbeat (every quarter of the lease). A worker that
    finds it finishes the rows in flight as far as its grace period allows, writes checkpoints, gives its claims back
    and exits with status 3.

    Raises:
        InputError: there is no run.
    """
    require_run(store)
    if config.resume:
        store.delete([layout.STOP_KEY])
    else:
        # Workers stop because the object exists; what it says only informs people.
        request = {"requested": iso_utc(clock.now())}
        with contextlib.suppress(AlreadyExists):  # it is stopped already
            store.create(layout.STOP_KEY, codec.encode_pretty(request))
    return {"status": "SUCCESS", "run": store.url, "stopped": not config.resume}


def require_run(store: Store) -> None:
    """Refuse what is no run.

    Raises:
        InputError: there is no run.
    """
    if not has_begun(store) and not any(store.list(layout.OUTPUTS)):
        raise no_run(store)


def has_begun(store: Store) -> bool:
    """Whether a launch or a worker has written there, as the first of a run's objects."""
    # A worker writes its record first, and run.json only after its engine has been loaded.
    places = (layout.RUN_KEY, layout.WORKERS, layout.LAUNCHES)
    return any(next(iter(store.list(place)), None) for place in places)


@config_command("stop", StopConfig)
def command(config: StopConfig) -> dict[str, Any]:
    """Stop every worker of a run, wherever it is, and keep new ones from starting.

    Workers see it with their next heartbeat (a quarter of --lease-seconds, 30 s by default), keep what they have
    finished, and exit with 3, which SkyPilot does not restart. `stop --resume` lets the run go on.
    """
    from batchinfer.storage.opening import open_store

    if config.resume and config.cancel:
        raise ConfigError("--resume and --cancel: expected one of them", hint="leave one out")
    store, clock = open_store(config.run), Clock()
    result = run_stop(config, store=store, clock=clock)
    if config.cancel:
        result["left"] = cancel_launches(store, clock, config.namespace)
    text = "is stopped; its workers end within a heartbeat and their grace"
    if config.resume:
        text = "may go on; start its workers again"
    for line in (f"{result['run']}: {text}", *result.get("left", ())):
        say(line)
    if result.get("left"):
        what = "not all launches are cancelled, so machines may still cost money"
        error = BatchinferError(
            f"{result['run']}: {what}", hint="cancel them by the cluster's tools"
        )
        error.attach_result(result)
        raise error
    return result
