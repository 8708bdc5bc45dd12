"""The messages between the engine and the processes that hold its grammars.

They are a file of their own so that the engine does not load llguidance, which only those need.
"""

import socket
import struct
from typing import Literal

import msgspec

Syntax = Literal["lark", "gbnf", "regex"]

_LENGTH = struct.Struct("!Q")


class Table(msgspec.Struct, array_like=True):
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    max_lexer_states: int
    max_step_items: int  # of one mask or one token; bounds memory and time


class Begin(msgspec.Struct, array_like=True):
    """Compile this within `timeout_s` seconds."""

    syntax: Syntax
    text: str
    timeout_s: float


class Verdict(msgspec.Struct, array_like=True):
    """The grammar in llguidance's dialect of Lark, or why it cannot be used."""

    lark: str
    error: str | None
    timed_out: bool = False


class Question(msgspec.Struct, array_like=True):
    """Advance by the newly known tokens. Then: which tokens may follow these drafts? Or, if `fits`,
    how many of these drafts are allowed?
    """

    sequence: int
    known: list[int]
    drafts: list[int]
    fits: bool


class Questions(msgspec.Struct, array_like=True):
    """Questions about different sequences; each gets an answer, in the same order."""

    dropped: list[int]  # sequences that ended
    questions: list[Question]


class GrammarAnswer(msgspec.Struct, array_like=True):
    """If the grammar fails after the drafts, the mask has no bit set. `error` is set if it failed
    after the known tokens already, `is_over` if the text had ended before.
    """

    mask: bytes = b""
    num_fitting: int = 0
    is_over: bool = False
    error: str | None = None


class Answers(msgspec.Struct, array_like=True):
    answers: list[GrammarAnswer]
    spent_s: float  # processor time


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> bytes:
    """The next message's bytes; raises EOFError if the other end was closed."""
    (num_bytes,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, num_bytes)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
