"""The messages between the worker and its engine processes, and the connection that carries them.

A frame is four bytes of length followed by one msgpack object. One frame carries all requests or completions that are
ready, so a row costs little more than its encoding. Sending never blocks: bytes that the socket does not accept wait
in a buffer, whose size is limited by the number of requests in flight.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import (
    Completion,
    EngineInfo,
    EngineStats,
    Failure,
    Request,
    RowKey,
    TextPiece,
)
from batchinfer.engines.config import EngineConfig

HEADER = struct.Struct("<I")
RECEIVE_BYTES = 1 << 20


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base class of all messages."""


class Load(Frame, frozen=True, kw_only=True, tag=True):
    """From the worker: load the engine with this configuration. It is always the first frame."""

    config: EngineConfig


class Work(Frame, frozen=True, kw_only=True, tag=True):
    """From the worker: answer these requests.

    Each request is encoded separately, so a request that cannot be decoded does not affect the others.
    """

    requests: list[msgspec.Raw]


class Abandon(Frame, frozen=True, kw_only=True, tag=True):
    """From the worker: drop all requests sent so far. Later requests belong to round `round`."""

    round: int


class Close(Frame, frozen=True, kw_only=True, tag=True):
    """From the worker: close the engine and exit."""


class Ready(Frame, frozen=True, kw_only=True, tag=True):
    """From the engine process: the model is loaded."""

    info: EngineInfo


class Failed(Frame, frozen=True, kw_only=True, tag=True):
    """From the engine process: this process ends because of an error.

    `kind` is the name of the error's class.
    """

    kind: str
    message: str
    hint: str = ""
    in_flight: list[RowKey] = []


class Done(Frame, frozen=True, kw_only=True, tag=True):
    """From the engine process: its counters, and the completions and pieces since its last `Done` frame, perhaps none.

    The worker ignores completions and pieces if `round` is an earlier round than its own, because it has dropped their
    requests. `tokens` is the number of generated tokens, including those of unfinished requests. While it grows, the
    worker's watchdog considers the engine to make progress.
    """

    round: int
    completions: list[Completion]
    stats: EngineStats
    tokens: int
    pieces: list[TextPiece] = []


ToEngine = Load | Work | Abandon | Close
ToWorker = Ready | Failed | Done

_encoder = msgspec.msgpack.Encoder()
_request_decoder = codec.msgpack_decoder(Request)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = codec.msgpack_decoder(
    ToEngine  # type: ignore[arg-type]  # mypy takes no union for a type
)
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = codec.msgpack_decoder(
    ToWorker  # type: ignore[arg-type]
)


class _KeyOnly(msgspec.Struct):
    key: RowKey


_key_decoder = codec.msgpack_decoder(_KeyOnly)


def pack_request(request: Request) -> msgspec.Raw | Completion:
    """Encode a request.

    Returns:
        The encoded request, or a completion with a failure if the request cannot be encoded. Examples of the latter
        are a text with a lone surrogate, and an integer of more than 64 bits.
    """
    try:
        return msgspec.Raw(_encoder.encode(request))
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        return _rejected(request.key, error)


def unpack_request(data: msgspec.Raw) -> Request | Completion:
    """Decode a request; return a completion with a failure if one of its values has a wrong type."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        return _rejected(_key_decoder.decode(data).key, error)


def _rejected(key: RowKey, error: Exception) -> Completion:
    failure = Failure(code="engine_rejected", message=f"not a valid request: {error}")
    return Completion(key=key, failure=failure)


class Closed(Exception):
    """The other side has closed the connection, or its process has ended."""


class Channel:
    """One end of the connection between the worker and an engine process.

    Args:
        connection: A stream socket in blocking mode. `Channel.close` closes it.
        decoder: Decoder of the frames that this end receives.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[ToEngine] | msgspec.msgpack.Decoder[ToWorker],
    ) -> None:
        self._socket = connection
        self._decoder = decoder
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `select`; negative once the socket is closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the buffer holds bytes that the socket has not accepted yet."""
        return bool(self._outgoing)

    def send(self, frame: Frame) -> None:
        """Put a frame into the buffer and send as much as the socket accepts. Never blocks.

        Raises:
            Closed: the other side is gone.
        """
        payload = _encoder.encode(frame)
        self._outgoing += HEADER.pack(len(payload))
        self._outgoing += payload
        self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as the socket accepts. Never blocks.

        Raises:
            Closed: the other side is gone.
        """
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Closed from error
            del self._outgoing[:sent]

    def receive(self, *, block: bool = False) -> list[ToEngine | ToWorker]:
        """Return the complete frames that have arrived, perhaps none.

        Args:
            block: Whether to wait until at least one byte has arrived.

        Raises:
            Closed: the other side is gone. Earlier calls have returned all frames that arrived completely.
        """
        flags = 0 if block else socket.MSG_DONTWAIT
        try:
            data = self._socket.recv(RECEIVE_BYTES, flags)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._incoming += data
        return self._whole_frames()

    def _whole_frames(self) -> list[ToEngine | ToWorker]:
        frames: list[ToEngine | ToWorker] = []
        buffer, start = self._incoming, 0
        while len(buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, start)
            end = start + HEADER.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                # Decode a copy of the bytes, since the `Raw` requests in the frame keep referring to the decoded bytes,
                # and this buffer changes.
                frames.append(self._decoder.decode(bytes(view[start + HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return frames

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
