"""Records are decoded by many threads at once, from the first one on; lines are read one by one."""

import io
import subprocess
import sys

import pytest

from batchinfer.core import codec

_DECODE = """
import sys, threading
import msgspec
from batchinfer.core import codec

USES = {
    "decode": lambda data, kind: codec.decode(data, kind, name="x"),
    "convert": lambda data, kind: codec.convert(msgspec.json.decode(data), kind),
    "json": lambda data, kind: codec.json_decoder(kind).decode(data),
}
use = USES[sys.argv[1]]
sys.setswitchinterval(1e-6)
for _ in range(100):
    fields = [(f"f{k}", "list[dict[str, int | str | None]]", []) for k in range(20)]
    inner = msgspec.defstruct("Inner", fields)
    outer = msgspec.defstruct("Outer", [(f"g{k}", inner | None, None) for k in range(20)])
    barrier = threading.Barrier(8)

    def decode():
        barrier.wait()
        found = use(b'{"g19": {"f19": [{"x": 1}]}}', outer)
        assert found.g19.f19 == [{"x": 1}]

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("use", ["decode", "convert", "json"])
def test_threads_may_decode_the_first_records_of_a_class_at_once(use):
    """`verify` died of SIGSEGV now and then: msgspec let a thread see a class that another one had begun to read."""
    done = subprocess.run([sys.executable, "-c", _DECODE, use], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_newlines_end_lines():
    assert list(codec.lines(io.BytesIO(b"a\rb\r\n\nc"))) == [b"a\rb\r", b"", b"c"]
