"""`batchinfer stop`: workers end, and none starts before the run is resumed."""

import json
from pathlib import Path

from batchinfer.core import layout
from batchinfer.core.errors import StopRequested
from batchinfer.runs.stop import StopConfig, run_stop
from batchinfer.storage.opening import open_store
from simulation.stage import Stage


def test_a_running_worker_ends_with_3_and_none_starts_before_the_run_is_resumed():
    with Stage([[f"say {row}" for row in range(10)]] * 8) as stage:
        stage.engine.max_in_flight = 2
        outside = stage.outside()

        def stop(*, resume=False):
            config = StopConfig(run=stage.run_url, resume=resume)
            return run_stop(config, store=outside.open_store(stage.run_url), clock=outside.clock)

        stage.scheduler.after(5.0, stop)
        error = stage.run(checkpoint_seconds=0.5).error
        assert isinstance(error, StopRequested)
        assert error.exit_status == 3
        first = stage.objects()[layout.STOP_KEY]
        assert json.loads(first)["requested"]
        assert isinstance(stage.run().error, StopRequested)
        assert stop()["stopped"]
        assert stage.objects()[layout.STOP_KEY] == first, "a second request changes nothing"
        assert not stop(resume=True)["stopped"]
        assert not stop(resume=True)["stopped"], "a second time, too"
        assert stage.run().result["rows_resumed"] > 0


def test_a_run_that_has_only_begun_can_be_stopped(tmp_path, call):
    for key in (layout.worker_key("w0"), layout.launch_key("x")):
        run = tmp_path / key
        open_store(str(run)).create(key, b"{}")
        assert call("stop", run).status == 0
        assert Path(run, layout.STOP_KEY).exists()
