"""`launch --what split`: ranks of one command on a cluster, which split a data set together.

Such a launch leaves no record: job.json says when it is done. The same launch can be made again after
failures, as ranks do only what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from batchinfer.cli.shell import quote
from batchinfer.clusters import Cluster, OutcomeUnknown, Plan, check_cluster_options, find_cluster
from batchinfer.clusters.launches import new_id
from batchinfer.core.clock import Clock
from batchinfer.core.errors import ConfigError
from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.pipeline.launching import outcome_unknown
from batchinfer.split import command as split
from batchinfer.split.finding import locate
from batchinfer.storage.opening import check_writable, split_url


class RankLaunch:
    """One launch of ranks: `plan` checks everything, then `submit` hands them to the cluster.

    Args:
        what: Name of the command, split.
        words: Its arguments and options, without --rank and --of.
        cluster: Name of the cluster.
        plan: The plan with all that the user said of the cluster. Its other fields are filled in.
        open_store: Opens stores.
        clock: Tells the time.
    """

    def __init__(
        self,
        what: str,
        words: Sequence[str],
        cluster: str,
        plan: Plan,
        *,
        open_store: OpenStore,
        clock: Clock,
    ) -> None:
        self._what = what
        self._words = list(words)
        self._name = cluster
        self._plan = plan
        self._open_store = open_store
        self._clock = clock
        self.cluster: Cluster = find_cluster(cluster)

    def plan(self) -> Plan:
        """Check everything, and return what to submit. Nothing is written.

        Raises:
            ConfigError: It would not work.
            InputError: A source or the run cannot be read, or the run is not complete.
        """
        check_cluster_options(self._name, self._plan.options)
        self._check_split()
        plan = msgspec.structs.replace(
            self._plan,
            id=new_id(self._clock.now()),
            what=self._what,
            words=" ".join(map(quote, self._words)),
            gpu=self._plan.gpu or "none",
        )
        self.cluster.check(plan)
        return plan

    def submit(self, plan: Plan) -> dict[str, Any]:
        """Submit the ranks, and return what names them in the cluster.

        Raises:
            OutcomeUnknown: The cluster may have got the ranks or not.
            ConfigError: The cluster refuses.
        """
        try:
            return self.cluster.submit(plan)
        except OutcomeUnknown as error:
            raise outcome_unknown(error, self.cluster, plan, "and launch again") from error

    def _parse(self, command: click.Command) -> click.Context:
        """Parse the words as the command line of one rank.

        Raises:
            ConfigError: The command has no such option, or the words have --rank, which `launch` gives.
        """
        try:
            context = command.make_context(self._what, list(self._words))
        except click.UsageError as error:
            raise ConfigError(
                f"--what {self._what}: {error.format_message()}",
                hint="give its own arguments after --, as in: launch --what split --on … -- SOURCE --output JOB",
            ) from error
        if context.params["rank"] is not None or context.params["num_ranks"] is not None:
            raise ConfigError(
                "--rank, --of: launch gives them to each rank",
                hint="leave them out; say --workers N",
            )
        context.params |= {"rank": 0, "num_ranks": self._plan.workers}
        return context

    def _check_split(self) -> None:
        config = split.config_of(self._parse(split.command))
        check_writable(config.output, option="--output")
        self._refuse_local_places([*config.sources, config.output])
        load_job(config.output, self._open_store)  # credentials, and a job that cannot be read
        for source in config.sources:
            locate(source)

    def _refuse_local_places(self, urls: Sequence[str]) -> None:
        for url in urls:
            if self.cluster.is_remote and split_url(url)[0] in ("file", "memory"):
                raise ConfigError(
                    f"{url}: ranks on {self._name} cannot reach a folder of this machine",
                    hint="name a place in a bucket, as in s3://bucket/job",
                )
