"""Twelve mixtures of clients over HTTP: the engine's own choice of drafts beside every fixed k.

    python benchmarks/mixtures.py [--seconds 2] [--k auto 0 1 3] [-- ARGUMENTS OF SERVE]

For example, on a machine without a network:

    python benchmarks/mixtures.py --seconds 3 -- /models/target --draft /models/draft -k 6
    python benchmarks/mixtures.py --url http://gpu-server:8000 --k auto 0 3

It starts a server, or asks the one at --url. In each mixture the clients send completions, and the
next as soon as they have an answer. In a cell of --seconds the server chooses k (`auto`), or every
request names the same k; 0 is plain decoding. Behind a cell that does not count, since what comes
first meets sizes that were never computed, there are --rounds of cells, forth and back. Within a
round all k have the same seeds and lengths of answers. After each round those k are left out
whose tokens a second are less than BEHIND of the best: so the time is spent on what is close.
With --budget there are as many rounds as fit into so many seconds, the server's start included, and
--rounds is the most.

The table has mean tokens a second, prompts included, and how the own choice compares with plain
decoding and with the best fixed k, round by round: the mean ratio, and its standard error. `auto`
should be at least 0.98 of the best everywhere.

Tokens are counted by the server, while all clients are busy: from a quarter of the time on. Clients
that rest have whole bursts counted.

What a client asks for sets how good drafts are: an edit of a file is easy at temperature 0, a poem
at 1.5 is hopeless, and an adversarial client sends a prediction that is wrong at every fifth word.
With --vocab-size N prompts are random tokens below N, for models that have no text. With
--set-acceptance, too, each kind has drafts as good as `set_chances` says, for a head of random
weights (see set_acceptance.py): adversarial ones are good and useless by turns.

    python benchmarks/published_shapes.py qwen3-8b /tmp/m --served --fp8
    python benchmarks/mixtures.py --set-acceptance --vocab-size 100000 --seconds 1.5 --budget 300 \
        --k auto 0 1 3 6 -- /tmp/m --draft /tmp/m/eagle3 -k 6
"""

import argparse
import asyncio
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.table import Table
from serving import serving

TEXT = (
    "the a one of in and to river old machine letter every window slowly because table count "
    "north paper answer between seven green morning where road small light under question"
)
WORDS = TEXT.split()
BEHIND = 0.93  # of the best fixed k: what is below is not timed again


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    text: str  # which prompt: chat, code, document or raw
    num_tokens: int  # of an answer, on the average
    temperature: float
    set_chances: str  # of a draft, in tenths, if they are set: in every other part of the answer
    prediction: str | None = None  # right or wrong: what the client predicts
    named_k: int | None = None  # it names this k, whatever is measured
    verification: str | None = None


CHAT = Kind("chat", 200, 0.7, "77")
RAW = Kind("raw", 48, 0.8, "33")
EDIT = Kind("code", 200, 0.0, "99")
POEM = Kind("raw", 200, 1.5, "22")
DOCUMENT = Kind("document", 48, 0.0, "66")
PINNED = Kind("chat", 200, 0.7, "77", named_k=3, verification="match")
WRONG = Kind("code", 100, 1.5, "90", prediction="wrong")


@dataclass(frozen=True)
class Mixture:
    clients: int
    kinds: tuple[Kind, ...]  # client i asks for kind i modulo their number
    rests: bool = False  # all clients ask at once, when all have their answers


MIXTURES = {
    "one chat": Mixture(1, (Kind("chat", 256, 0.0, "88"),)),
    "one raw": Mixture(1, (RAW,)),
    "few edits": Mixture(4, (EDIT, Kind("code", 200, 0.0, "98", prediction="right"))),
    "few raw": Mixture(8, (RAW,)),
    "some documents": Mixture(16, (DOCUMENT,)),
    "some easy, some hard": Mixture(32, (EDIT, POEM)),
    "many chats": Mixture(32, (CHAT,)),
    "pinned among them": Mixture(48, (PINNED, CHAT, CHAT, CHAT)),
    "bursts": Mixture(64, (RAW,), rests=True),
    "easy beside hard": Mixture(64, (EDIT, POEM)),
    "adversarial": Mixture(64, (WRONG, WRONG, CHAT)),
    "a crowd": Mixture(256, (*[Kind("chat", 64, 0.7, "77")] * 7, DOCUMENT)),
}


class Requests:
    """What clients ask for, with prompts and predictions that no request before has had."""

    def __init__(self, vocab_size: int | None, *, sets_acceptance: bool) -> None:
        self._vocab_size, self._sets_acceptance = vocab_size, sets_acceptance
        self._rng = random.Random(time.time_ns())

    def body(self, kind: Kind, k: int | None, number: str) -> dict[str, object]:
        """Requests of one number have the same seed, and answers of the same length."""
        own_rng = random.Random(number)
        text, prediction, seed = self._text(kind.text), None, own_rng.randrange(1 << 24)
        if kind.prediction is not None:
            words = text.split(" ")
            step = 5 if kind.prediction == "wrong" else len(words) + 1
            words[::step] = ["otherwise"] * len(words[::step])
            prediction = " ".join(words)
        body: dict[str, object] = {
            "prompt": text,
            "max_tokens": own_rng.randrange(kind.num_tokens // 2, kind.num_tokens * 3 // 2),
            "temperature": kind.temperature,
            "seed": 100 * seed + int(kind.set_chances) if self._sets_acceptance else seed,
            "ignore_eos": True,
        }
        if self._vocab_size is not None:
            count = len(text) // 4
            body["prompt"] = [self._rng.randrange(2, self._vocab_size) for _ in range(count)]
        elif prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        named_k = k if kind.named_k is None else kind.named_k
        rule = kind.verification or ("token" if self._sets_acceptance else None)
        speculation = {"num_speculative_tokens": named_k, "verification": rule}
        body["speculation"] = {name: each for name, each in speculation.items() if each is not None}
        return body

    def _text(self, name: str) -> str:
        rng = self._rng
        number = rng.randrange(1 << 40)
        if name == "raw":
            return f"{number}. " + " ".join(rng.choices(WORDS, k=12))
        if name == "chat":
            words = " ".join(rng.choices(WORDS, k=20))
            return f"Question {number}: explain to a friend why {words}?\n\nAnswer:"
        if name == "document":
            words = " ".join(rng.choices(WORDS, k=1200))
            return f"Report {number}. {words}\n\nIn short, the report says that"
        lines = [
            f"def {a}_{i}({b}, {c}):\n    return {b} + {i} * {c}\n"
            for i, (a, b, c) in enumerate(rng.sample(WORDS, 3) for _ in range(24))
        ]
        file = "\n".join(lines)
        return f"# File {number}\n{file}\n# The same file, with type hints\n{file[:200]}"


async def ask(host: str, port: int, body: dict[str, object]) -> None:
    """Send a completion, and wait for the whole answer."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        answer = await reader.read(-1)
    finally:
        writer.close()
    status, _, rest = answer.partition(b"\r\n")
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode()}: {rest[-500:].decode(errors='replace')}")


async def generated(place: tuple[str, int]) -> int:
    """Tokens that the server has generated so far."""
    async with httpx.AsyncClient(timeout=30) as http:
        metrics = (await http.get("http://{}:{}/metrics".format(*place))).raise_for_status().text
    found = re.search(r"^outrider_generation_tokens_total (\S+)$", metrics, re.M)
    if found is None:
        raise RuntimeError("the server does not count its tokens")
    return int(float(found[1]))


async def tokens_per_s(
    place: tuple[str, int],
    mixture: Mixture,
    k: int | None,
    seconds: float,
    requests: Requests,
    round_: int = 0,
) -> float:
    """While all clients are busy; of those that rest, in the bursts that begin in this time. The
    requests of a round are alike for all k.
    """

    async def client(i: int, turns: range) -> None:
        kind = mixture.kinds[i % len(mixture.kinds)]
        for turn in turns:
            await ask(*place, requests.body(kind, k, f"{round_} {i} {turn}"))

    async def ask_all(turns: range) -> None:
        await asyncio.gather(*(client(i, turns) for i in range(mixture.clients)))

    if mixture.rests:
        start_s, before, turn = time.perf_counter(), await generated(place), 0
        while time.perf_counter() < start_s + seconds:
            await ask_all(range(turn, turn + 1))
            turn += 1
        return (await generated(place) - before) / (time.perf_counter() - start_s)
    clients = asyncio.create_task(ask_all(range(sys.maxsize)))
    await asyncio.wait([clients], timeout=seconds / 4)
    start_s, before = time.perf_counter(), await generated(place)
    await asyncio.wait([clients], timeout=seconds)
    elapsed_s, after = time.perf_counter() - start_s, await generated(place)
    clients.cancel()
    with suppress(asyncio.CancelledError):  # but not what a client has raised
        await clients
    return (after - before) / elapsed_s


Rates = dict[str, list[float]]  # by k, round by round; k is left out from some round on


def compare(
    ks: Sequence[str], rounds: int, rate: Callable[[str, int], float], until_s: float
) -> Rates:
    """`rate(k, round)` of every k in each round; fixed ones that fall behind are left out. A round
    begins if it is likely to end before `until_s`.
    """
    rates: Rates = {k: [] for k in ks}
    going = list(ks)
    for round_ in range(rounds):
        start_s = time.perf_counter()
        for k in going if round_ % 2 == 0 else reversed(going):
            rates[k].append(rate(k, round_))
        elapsed_s = time.perf_counter() - start_s
        most = max((mean(rates[k]) for k in going if k != "auto"), default=0.0)
        num_before = len(going)
        going = [k for k in going if k == "auto" or mean(rates[k]) >= BEHIND * most]
        if time.perf_counter() + elapsed_s * len(going) / num_before > until_s:
            break
    return rates


def ratio(rates: Rates, k: str) -> tuple[float, float]:
    """Of the own choice's tokens to those of a fixed k in the same rounds: the mean, and its
    standard error; nan with one round.
    """
    logs = [math.log(own / other) for own, other in zip(rates["auto"], rates[k], strict=False)]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    middle = math.exp(mean(logs))
    return middle, middle * error


def row(name: str, clients: int, rates: Rates) -> Sequence[str]:
    cells = [name, str(clients), *(f"{mean(each):.0f} ({len(each)})" for each in rates.values())]
    fixed = [k for k in rates if k != "auto"]
    if "auto" in rates and fixed:
        rounds = max(len(rates[k]) for k in fixed)
        best = max((k for k in fixed if len(rates[k]) == rounds), key=lambda k: mean(rates[k]))
        others = ["0", best] if "0" in rates else [best]
        for middle, error in (ratio(rates, k) for k in others):
            cells.append(f"{middle:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}"))
    return cells


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs, such as http://localhost:8000")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a cell")
    parser.add_argument("--rounds", type=int, default=4, help="of cells, at most")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds in all, start included"
    )
    parser.add_argument("--k", nargs="+", default=["auto", "0", "1", "3"], metavar="K")
    parser.add_argument("--mixtures", nargs="+", default=list(MIXTURES), metavar="NAME")
    parser.add_argument("--most-clients", type=int, default=256, help="leave larger mixtures out")
    parser.add_argument("--vocab-size", type=int, help="prompts are random tokens below this")
    parser.add_argument(
        "--set-acceptance", action="store_true", help="of the server's drafts, by kind of request"
    )
    args = parser.parse_args(sys.argv[1:at])
    end_s = time.perf_counter() + args.budget
    if unknown := [name for name in args.mixtures if name not in MIXTURES]:
        parser.error(f"there is no mixture {unknown[0]!r}; there are {', '.join(MIXTURES)}")
    log = Path(tempfile.mkdtemp(prefix="outrider-mixtures-")) / "serve.log"
    requests = Requests(args.vocab_size, sets_acceptance=args.set_acceptance)
    names = [f"k = {k}" if k != "auto" else "auto" for k in args.k]
    ratios = ["auto / plain"] * ("0" in args.k) + ["auto / best"] if "auto" in args.k else []
    table = Table("mixture", "clients", *names, *ratios, title="tokens a second (rounds)")
    with ExitStack() as stack:
        if args.url:
            url = urlsplit(args.url)
            place = url.hostname or "127.0.0.1", url.port or 80
        else:
            acceptance: Literal["seed"] | None = "seed" if args.set_acceptance else None
            started = serving(log, sys.argv[at + 1 :], tokens_a_step=acceptance)
            server = stack.enter_context(started)
            place = server.host, server.port
        print(" | ".join(["mixture", "clients", *names, *ratios]), flush=True)
        mixtures = {n: m for n in args.mixtures if (m := MIXTURES[n]).clients <= args.most_clients}
        for i, (name, mixture) in enumerate(mixtures.items()):
            start_s = time.perf_counter()
            until_s = start_s + (end_s - start_s) / (len(mixtures) - i)

            def rate(k: str, round_: int, mixture: Mixture = mixture) -> float:
                own_k = None if k == "auto" else int(k)
                cell = tokens_per_s(place, mixture, own_k, args.seconds, requests, round_)
                return asyncio.run(cell)

            asyncio.run(tokens_per_s(place, mixture, None, args.seconds / 2, requests, -1))
            cells = row(name, mixture.clients, compare(args.k, args.rounds, rate, until_s))
            table.add_row(*cells)
            print(" | ".join(cells), flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
