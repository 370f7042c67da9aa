"""What the worker and its engine processes say to each other, and how it travels.

A frame is four bytes of length and one msgpack object. Requests and completions go in batches, a frame
for all that is at hand, so that the cost per row is that of encoding it. Neither side ever blocks on
sending: what the socket does not take stays in a buffer, which the number of requests in flight bounds.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from batchinfer.core.records import Completion, EngineInfo, EngineStats, Failure, Request, RowKey
from batchinfer.engines.config import EngineConfig

HEADER = struct.Struct("<I")
RECEIVE_BYTES = 1 << 20


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of everything that is sent."""


class Load(Frame, frozen=True, kw_only=True, tag=True):
    """Worker: load this engine. The first frame."""

    config: EngineConfig


class Work(Frame, frozen=True, kw_only=True, tag=True):
    """Worker: answer these. Each is an encoded Request, so that a broken one harms no other."""

    requests: list[msgspec.Raw]


class Abandon(Frame, frozen=True, kw_only=True, tag=True):
    """Worker: forget every request so far. What comes next is of this round."""

    round: int


class Close(Frame, frozen=True, kw_only=True, tag=True):
    """Worker: free what you hold and exit."""


class Ready(Frame, frozen=True, kw_only=True, tag=True):
    """Engine process: the model is loaded."""

    info: EngineInfo


class Failed(Frame, frozen=True, kw_only=True, tag=True):
    """Engine process: the end. `kind` is the name of the error's class in batchinfer.core.errors."""

    kind: str
    message: str
    hint: str = ""
    in_flight: list[RowKey] = []


class Done(Frame, frozen=True, kw_only=True, tag=True):
    """Engine process: these finished (perhaps none), and how far it is.

    `round` tells them from those of an abandoned `generate`. `tokens` counts generated tokens, those of
    unfinished requests included: what the watchdog looks at.
    """

    round: int
    completions: list[Completion]
    stats: EngineStats
    tokens: int


ToEngine = Load | Work | Abandon | Close
ToWorker = Ready | Failed | Done

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)


class _KeyOnly(msgspec.Struct):
    key: RowKey


_key_decoder = msgspec.msgpack.Decoder(_KeyOnly)


def pack_request(request: Request) -> msgspec.Raw | Completion:
    """A request as it travels, or the failure of one that cannot be encoded (a lone surrogate, a huge integer)."""
    try:
        return msgspec.Raw(_encoder.encode(request))
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        return _rejected(request.key, error)


def unpack_request(data: msgspec.Raw) -> Request | Completion:
    """A request that has travelled, or the failure of one whose values have not the types that they should."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        return _rejected(_key_decoder.decode(data).key, error)


def _rejected(key: RowKey, error: Exception) -> Completion:
    failure = Failure(code="engine_rejected", message=f"not a valid request: {error}")
    return Completion(key=key, failure=failure)


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of the connection.

    Args:
        connection: A stream socket in blocking mode; closed by `close`.
        decoder: For the frames that this end receives.
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
        """The socket's descriptor, for select; negative once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._outgoing)

    def send(self, frame: Frame) -> None:
        """Queue a frame and send what the socket takes. Never blocks.

        Raises:
            Closed: the other side is gone.
        """
        payload = _encoder.encode(frame)
        self._outgoing += HEADER.pack(len(payload))
        self._outgoing += payload
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes. Never blocks. Raises Closed."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Closed from error
            del self._outgoing[:sent]

    def receive(self, *, block: bool = False) -> list[ToEngine | ToWorker]:
        """Whole frames that have arrived, perhaps none; with `block`, waits for at least some bytes.

        Raises:
            Closed: the other side is gone and every whole frame was given.
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
                # A copy: what is still encoded in it is a view, and the buffer is reused.
                frames.append(self._decoder.decode(bytes(view[start + HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return frames

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
