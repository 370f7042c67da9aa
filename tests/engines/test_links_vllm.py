"""Links in rows: vLLM's server, as a worker starts it, fetches none of them."""

from __future__ import annotations

import pytest

from batchinfer.engines.config import EngineConfig
from batchinfer.engines.server import write_vllm_command

pytestmark = pytest.mark.vllm


def test_a_link_that_a_body_hides_from_the_worker_is_not_fetched_by_the_server() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.media import MediaConnector
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def domains(*typed: str) -> list[str]:
        config = EngineConfig(model="m", server_args=list(typed))
        command = write_vllm_command(config, "m", [], 1, 0)
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        return list(parser.parse_known_args(command[4:])[0].allowed_media_domains)

    assert domains("--allowed-media-domains", "example.com") == ["example.com"]
    connector = MediaConnector(allowed_media_domains=domains())
    with pytest.raises(ValueError, match="allowed domains"):
        connector.fetch_image("http://127.0.0.1:9/a.png")
