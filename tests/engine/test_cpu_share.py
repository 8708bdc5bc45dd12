"""Threads give way to a neighbour, and only where bits do not hang on them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from engines import GREEDY, engine_config, prompts, run
from tiny_models import DEVICE, VOCAB, Tiny

from outrider.engine import cpu_share
from outrider.engine.config import ModelConfig
from outrider.engine.cpu_share import CPUShare, fitting
from outrider.engine.engine import Engine
from outrider.engine.models.batch_invariance import alike_thread_counts
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Pass


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Two cores of four, a clock, and what has been computed on them."""

    now_s = own_s = idle_s = 0.0

    def pass_time(self, seconds: float, *, own: float, others: float) -> None:
        self.now_s += seconds
        self.own_s += own * seconds
        self.idle_s += (2 - own - others) * seconds

    def cpu_times(self, *, percpu: bool) -> list[SimpleNamespace]:
        assert percpu
        neighbour = SimpleNamespace(idle=77.0, iowait=1.0)
        ours = SimpleNamespace(idle=self.idle_s / 3, iowait=self.idle_s / 6)
        return [neighbour, ours, neighbour, ours]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    machine.pass_time(1.0, own=0, others=0)
    monkeypatch.setattr(psutil, "cpu_times", machine.cpu_times)
    clock = SimpleNamespace(monotonic=lambda: machine.now_s, process_time=lambda: machine.own_s)
    monkeypatch.setattr(cpu_share, "time", clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    return machine


def test_threads_give_way_to_a_neighbour_and_come_back(machine: Machine) -> None:
    share = CPUShare((2, 1))
    share.begin()
    seen = []
    for own, others in ((2, 0), (1.4, 0.6), (1, 1), (1, 0.2), (1, 0.05), (1.85, 0.15)):
        machine.pass_time(0.3, own=own, others=others)
        share.adapt()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 1, 2, 2]


def test_what_others_did_while_we_had_no_work_does_not_count(machine: Machine) -> None:
    share = CPUShare((2, 1))
    share.begin()
    machine.pass_time(9, own=0, others=2)
    share.begin()
    machine.pass_time(0.3, own=2, others=0)
    share.adapt()
    assert torch.get_num_threads() == 2


def test_one_count_is_left_alone(machine: Machine) -> None:
    share = CPUShare((2,))
    share.begin()
    machine.pass_time(1, own=0.5, others=1.5)
    share.adapt()
    assert torch.get_num_threads() == 2


def unreadable(*, percpu: bool) -> list[SimpleNamespace]:
    raise FileNotFoundError("/proc/stat")


@pytest.mark.parametrize(
    "cpu_times",
    [unreadable, lambda percpu: [], lambda percpu: [SimpleNamespace(idle=1.0)] * 4],
    ids=["unreadable", "fewer CPUs", "no iowait"],
)
def test_a_system_that_reports_nothing_changes_nothing(
    cpu_times: Callable[..., Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    share = CPUShare((2, 1))
    share.begin()
    machine.pass_time(1, own=0.5, others=1.5)
    share.adapt()
    assert torch.get_num_threads() == 2


def test_as_many_threads_as_cores_are_left_for() -> None:
    counts = (16, 8, 4, 2, 1)
    for others, wanted in ((0, 16), (0.2, 16), (1, 8), (7.5, 8), (9, 4), (15, 1), (16, 1)):
        assert fitting(counts, 16, 16, others) == wanted
    assert fitting((8, 4, 2, 1), 8, 16, 7) == 8  # a thread for every second core


@pytest.mark.parametrize("is_compiled", [False, True])
def test_only_counts_with_the_same_bits_are_offered(
    is_compiled: bool, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("threads of a CPU")
    path = tiny_model("llama", hidden_size=64, intermediate_size=128)
    network = load_network(ModelConfig(path=str(path)), DEVICE, is_draft=is_compiled)
    real = type(network).__call__

    def by_threads(self: Any, context: Any) -> Pass:
        found: Pass = real(self, context)
        found.logits.add_(torch.get_num_threads())  # in place: all passes may write to one tensor
        return found

    assert 2 in alike_thread_counts(network)
    monkeypatch.setattr(type(network), "__call__", by_threads)
    assert alike_thread_counts(network) == (2,)
    assert torch.get_num_threads() == 2
    assert all(attention.pages is None for attention in network.attentions)


def test_each_number_of_threads_has_its_own_prices(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUShare, "adapt", lambda self: None)
    engine = Engine(engine_config(tiny_model("llama"), tiny_model("llama"), k=2, adaptive=True))
    adaptive, prices = engine.sequences.adaptive, []
    assert adaptive is not None
    for num_threads in (2, 1, 2):
        torch.set_num_threads(num_threads)
        run(engine, prompts([5], VOCAB), GREEDY)
        prices.append(adaptive.price)
    assert prices[0] is prices[2] is not prices[1]
    assert all(price.knows(1) for price in prices)
