"""`outrider doctor`, on this machine and on others that it is shown."""

import socket
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType
from pydantic import SecretStr
from safetensors.torch import load_file
from served import Served
from socket_server import on_a_socket
from tiny_pairs import save_tiny_model_with_tokenizer, write_tiny_gguf
from typer.testing import CliRunner

from outrider.engine.config import CacheConfig
from outrider.engine.ranks import fit
from outrider.server.cli import app
from outrider.server.config.server_settings import ServerSettings
from outrider.server.config.settings_loader import load_settings
from outrider.server.diagnosis import machine, network, weights
from outrider.server.models import known_drafts
from outrider.server.models.known_drafts import SUGGESTED, KnownDraft
from outrider.server.models.resolve import resolve


def test_everything_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, ["doctor", "--offline", "--set", "server.port=0"])
    assert result.exit_code == 0, result.output
    checked = "system Python torch GPU compiler memory disk port clients pair"
    for name in checked.split():
        assert f" {name} " in result.stdout
    assert "not fetched yet: smollm2-135m-instruct" in result.stdout
    assert "`outrider serve` starts the server" in result.stdout


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_model_whose_path_leads_nowhere_is_missing(name: str) -> None:
    settings = ["--set", "server.port=0", "--set", f"{name}.model=./nowhere"]
    result = CliRunner().invoke(app, ["doctor", "--offline", *settings])
    assert result.exit_code == 1
    assert "'./nowhere' does not exist" in " ".join(result.stdout.split())


def test_more_host_memory_for_the_cache_than_there_is_is_missing() -> None:
    """In the words of the engine, which would end the start with them."""
    settings = ["--set", "server.port=0", "--set", "cache.host_gib=1e6"]
    result = CliRunner().invoke(app, ["doctor", "--offline", *settings])
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "cache.host_gib is 1e+06, but the machine has room for" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_the_config_names_is_missing() -> None:
    assert machine.gpu("auto").state == "note"
    found = machine.gpu("cuda:0")
    assert (found.state, "target.device is 'cuda:0'" in found.text) == ("bad", True)


def test_a_taken_port_is_missing_and_another_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PORT_TIMEOUT_S", 0.1)  # who has it does not answer
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["doctor", "--offline", "--set", f"server.port={number}"])
    assert result.exit_code == 1
    assert f"{number} on 127.0.0.1: Address already in use" in result.stdout
    assert "--port" in result.stdout


def test_a_socket_of_the_file_system_needs_no_port() -> None:
    found = network.port(ServerSettings(host="192.0.2.1", uds=Path("outrider.sock")))
    assert (found.state, "outrider.sock" in found.text) == ("ok", True)


def test_a_gpu_beyond_those_that_are_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(name="A GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: one)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (1, 1))
    for device, state in (("cuda:0", "ok"), ("cuda", "ok"), ("auto", "ok"), ("cuda:3", "bad")):
        assert machine.gpu(device).state == state


def test_a_full_disk_does_not_matter_once_the_pair_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    monkeypatch.setattr(machine.store, "find", lambda name, source: None)
    found = machine.disk()
    assert (found.state, "OUTRIDER_HOME" in str(found.remedy)) == ("bad", True)
    monkeypatch.setattr(machine.store, "find", lambda name, source: Path(name))
    assert machine.disk().state == "note"


@pytest.mark.parametrize(
    ("setting", "words"),
    [("api_key_file", "server.api_key_file: cannot read"), ("tls", "server.tls_certificate) with")],
)
def test_files_for_clients_that_cannot_be_used_are_missing(
    tmp_path: Path, setting: str, words: str
) -> None:
    gone = str(tmp_path / "gone")
    names = ("tls_certificate", "tls_key") if setting == "tls" else (setting,)
    given = [part for name in names for part in ("--set", f"server.{name}={gone}")]
    result = CliRunner().invoke(app, ["doctor", "--offline", "--set", "server.port=0", *given])
    assert result.exit_code == 1, result.output
    assert words in " ".join(result.stdout.split())


def test_what_clients_need_is_shown() -> None:
    assert network.clients(ServerSettings()).text == "no key is asked for; no TLS"
    found = network.clients(ServerSettings(api_keys=(SecretStr("a"), SecretStr("b"))))
    assert (found.state, found.text) == ("ok", "2 keys; no TLS")


def test_a_server_of_ours_may_have_the_port(serve: Callable[..., Served]) -> None:
    with on_a_socket(serve()) as url:
        found = network.port(ServerSettings(port=int(url.rpartition(":")[2])))
    assert (found.state, found.remedy) == ("note", None)
    assert "Outrider serves there already" in found.text


@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "state", "words"),
    [
        (None, None, False, "ok", "CPUs only"),
        ("550.1", "12.8", True, "ok", "NVIDIA driver 550.1"),
        ("550.1", None, False, "note", "this torch cannot use it"),
        ("450.1", "13.0", False, "note", "too old for CUDA 13.0"),
    ],
)
def test_torch_is_held_against_the_driver(
    monkeypatch: pytest.MonkeyPatch,
    driver: str | None,
    cuda: str | None,
    usable: bool,
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    found = machine.torch_build()
    assert found.state == state
    assert words in f"{found.text} {found.remedy}"


def test_the_driver_is_asked_for_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_driver() is None
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    command.chmod(0o755)
    assert machine.nvidia_driver() == "550.54.15"
    command.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvidia_driver() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_layers_that_were_not_compiled_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.layers, "compiled", lambda: None)
    found = machine.compiler()
    assert found.state == "note"
    assert "apt install g++" in str(found.remedy)


def test_a_gpu_needs_a_compiler_and_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine.compiler().state == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    found = machine.compiler()
    assert found.state == "bad"
    assert found.remedy is not None
    assert "apt install gcc" in found.remedy
    assert "python3-dev" in found.remedy
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/gcc")
    (tmp_path / "Python.h").touch()
    assert machine.compiler().state == "ok"


@pytest.mark.parametrize(
    ("total_gb", "has_hub", "expected"),
    [
        (141, True, "Qwen/Qwen3-32B"),
        (24, True, "Qwen/Qwen3-8B"),
        (16, True, "Qwen/Qwen3-4B"),
        (12, True, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),  # a step does not fit beside 9.2 GB
        (141, False, "smollm2-135m-instruct"),
    ],
)
def test_the_largest_pair_that_fits_is_suggested(
    monkeypatch: pytest.MonkeyPatch, total_gb: int, has_hub: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total_gb * 10**9))
    assert machine.pair(has_hub=has_hub).remedy == f"outrider serve {expected}"


def gpus_of(monkeypatch: pytest.MonkeyPatch, *totals_gb: float) -> None:
    """A machine with these GPUs."""
    gpus = [
        SimpleNamespace(name="GPU", major=9, minor=0, total_memory=gb * 10**9) for gb in totals_gb
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i=0: (0, gpus[i].total_memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])


@pytest.mark.parametrize(
    ("totals_gb", "model", "words"),
    [
        ([48, 48], "Qwen/Qwen3-32B", "35.5 GB on the first of 2 ranks; each GPU has room for 38.4"),
        ([24] * 4, "Qwen/Qwen3-14B", "17.5 GB on the first of 2 ranks"),
        ([80, 24], "Qwen/Qwen3-14B", "in bfloat16; the first GPU has room for 64.0"),
        ([24, 80], "Qwen/Qwen3-8B", "in bfloat16; the first GPU has room for 18.6"),
        ([48, 48, 24], "Qwen/Qwen3-32B", "on the first of 2 ranks; each GPU has room for 38.4"),
        ([141, 141], "Qwen/Qwen3-32B", "in bfloat16; each GPU has room for 112.8"),
    ],
)
def test_several_gpus_are_shown_the_largest_pair_that_they_can_share(
    monkeypatch: pytest.MonkeyPatch, totals_gb: list[int], model: str, words: str
) -> None:
    gpus_of(monkeypatch, *totals_gb)
    found = machine.pair(has_hub=True)
    assert found.remedy == f"outrider serve {model}"
    assert words in found.text
    assert "ranks" not in machine.pair(has_hub=False).text


def test_a_pair_that_is_here_is_looked_at_on_any_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the server does: three ranks may share three KV heads."""
    monkeypatch.setattr(fit, "_STEP_BYTES", 0)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    model = save_tiny_model_with_tokenizer(
        tmp_path / "model", intermediate_size=96, num_hidden_layers=8, **heads
    )
    settings = load_settings(
        assignments=[f"target.model={model}", "speculation.proposer=none"], environ={}
    )
    counted = weights.counted(settings, has_hub=False)
    assert isinstance(counted, weights.PairWeights)
    total = counted.weights.of_first(3) / 0.8 + 1

    def found(*totals: float, utilization: float = 0.9) -> machine.Finding:
        gpus_of(monkeypatch, *(each / 1e9 for each in totals))
        return machine.pair(
            has_hub=False, configured=str(model), counted=counted, utilization=utilization
        )

    assert "on the first of 3 ranks" in found(*[total] * 4).text
    assert found(*[total] * 4).state == "ok"
    assert found(*[total] * 4, utilization=0.5).state == "note"
    assert "on the first of 6 ranks" in found(*[total] * 6, utilization=0.6).text


def test_a_configured_number_of_ranks_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-32B fits on no GPU of 48 GB, and on two of them."""
    gpus_of(monkeypatch, 48, 48)
    model = "Qwen/Qwen3-32B"
    assert machine.pair(has_hub=True, configured=model, num_ranks=1).state == "note"
    for num_ranks in (None, 2):  # unset, the server takes as many by itself
        found = machine.pair(has_hub=True, configured=model, num_ranks=num_ranks)
        assert found.state == "ok"
        assert "35.5 GB on the first of 2 ranks" in found.text
    found = machine.pair(has_hub=True, num_ranks=2)
    assert found.remedy == f"outrider serve {model} --tensor-parallel 2"
    assert machine.gpu("auto", 2).state == "ok"
    found = machine.gpu("auto", 4)
    assert (found.state, found.remedy) == ("bad", "Set it to 2 at most.")
    assert "target.tensor_parallel is 4, and there are only" in found.text


@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_ranks_that_cannot_share_the_pair_are_missing(draft_ranks: int, tmp_path: Path) -> None:
    """In the words of the engine, which would end the start with them."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_tiny_model_with_tokenizer(target, intermediate_size=62 + draft_ranks)
    save_tiny_model_with_tokenizer(draft, num_key_value_heads=1, intermediate_size=63)
    names = f"target.model={target}", f"draft.model={draft}", "target.tensor_parallel=2"
    settings = load_settings(
        assignments=[*names, f"draft.tensor_parallel={draft_ranks}"], environ={}
    )
    counted = weights.counted(settings, has_hub=False)
    found = machine.pair(has_hub=False, configured=str(target), counted=counted, num_ranks=2)
    refused = (
        "target.tensor_parallel is 2, but it does not divide intermediate_size 63: set it to 1"
        if draft_ranks == 1
        else "draft.tensor_parallel is 2, but it does not divide intermediate_size 63: leave it out"
    )
    assert found == machine.Finding("bad", refused)


def test_a_configured_pair_is_looked_at_in_place_of_suggested_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 24 * 10**9))
    for model, state, words in (
        ("Qwen/Qwen3-4B", "ok", "Qwen/Qwen3-4B and its draft take 9.2 GB"),
        ("Qwen/Qwen3-32B", "note", "Qwen/Qwen3-32B and its draft take 66.7 GB"),
    ):
        found = machine.pair(has_hub=True, configured=model)
        assert (found.state, words in found.text) == (state, True)


WEIGHT_FILES = [("model-00001-of-00002.safetensors", 90 * 10**9), ("mtp.safetensors", 10**9)]
OTHER_FILES = [("original/model.safetensors", 91 * 10**9), ("model.safetensors.index.json", 9**9)]


@pytest.mark.parametrize("hub", ["answers", "fails", "offline"])
def test_a_model_that_is_not_here_is_counted_by_the_hub_or_said_to_be_missing(
    hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(weights.HfApi, "model_info", partialmethod(hub_info, hub))
    gpus_of(monkeypatch, 80, 80)
    name = "meta-llama/Llama-3.1-70B-Instruct"

    def found(model: str, num_ranks: int | None = None) -> machine.Finding:
        settings = load_settings(assignments=[f"target.model={model}"], environ={})
        counted = weights.counted(settings, has_hub=hub != "offline")
        return machine.pair(has_hub=True, configured=model, counted=counted, num_ranks=num_ranks)

    if hub == "answers":
        for num_ranks, state, words in (
            (None, "ok", "91.0 GB of weights, at least 45.5 GB on the first of 2 ranks; each GPU"),
            (2, "ok", "91.0 GB of weights, at least 45.5 GB on the first of 2 ranks; each GPU"),
            (1, "note", "91.0 GB of weights; the first GPU has room for 64.0"),
        ):
            one = found(name, num_ranks)
            assert (one.state, f"by the hub its files take {words}" in one.text) == (state, True)
    else:
        text = f"how much memory {name} takes is not known: {name} is not in the hub's cache on "
        text += f"this machine; `outrider models fetch {name}` gets it"
        assert found(name) == machine.Finding("note", text)
    # A suggested one's draft is counted, too.
    assert "Qwen/Qwen3-32B and its draft take 66.7 GB" in found("Qwen/Qwen3-32B").text
    assert "no model 'mine'" in found("mine").text


def hub_info(_: object, hub: str, name: str, **asked: object) -> SimpleNamespace:
    assert asked["files_metadata"] is True
    if hub == "fails":
        raise httpx.ConnectTimeout("slow")
    files = [SimpleNamespace(rfilename=n, size=size) for n, size in WEIGHT_FILES + OTHER_FILES]
    return SimpleNamespace(siblings=files)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_pair_that_is_here_is_counted_by_its_files(
    has_head: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the server will load it, with the draft that it chooses."""
    gpus_of(monkeypatch, 80, 80)
    model = save_tiny_model_with_tokenizer(tmp_path / "mimo", has_mtp=has_head, architecture="mimo")
    settings = load_settings(assignments=[f"target.model={model}"], environ={})
    counted = weights.counted(settings, has_hub=False)
    assert isinstance(counted, weights.PairWeights)
    tensors = load_file(model / "model.safetensors")
    assert counted.weights.in_all == sum(4 * tensor.numel() for tensor in tensors.values())
    shared = sum(4 * t.numel() for name, t in tensors.items() if ".layers." in name)
    assert counted.weights.whole == counted.weights.in_all - shared
    text = f"{model} and its draft, mtp, take"
    if not has_head:
        text = "the draft mtp is not counted: its files hold no MTP head"
    assert counted.text.startswith(text)
    found = machine.pair(has_hub=False, configured=str(model), counted=counted, num_ranks=2)
    assert (found.state, "GB on the first of 2 ranks; each GPU has room" in found.text) == (
        "ok",
        True,
    )


@pytest.mark.parametrize("is_named", [True, False])
def test_a_draft_that_nobody_named_is_left_out_as_by_the_server(
    is_named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that is too large, and one that is damaged."""
    monkeypatch.setattr(fit, "_STEP_BYTES", 0)
    target = save_tiny_model_with_tokenizer(tmp_path / "target")
    draft = save_tiny_model_with_tokenizer(tmp_path / "draft")
    known = [KnownDraft(model=str(draft), num_parameters=0, family="tiny")]
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", known)
    given = [f"target.model={target}", *([f"draft.model={draft}"] if is_named else [])]
    settings = load_settings(assignments=given, environ={})

    def found(total_gb: float) -> machine.Finding:
        gpus_of(monkeypatch, total_gb)
        counted = weights.counted(settings, has_hub=False)
        return machine.pair(has_hub=False, configured=str(target), counted=counted)

    alone_gb = (target / "model.safetensors").stat().st_size / 1e9
    both = f"{target} and its draft, {draft}, take"
    assert found(2.3 * alone_gb).text.startswith(both)
    one = found(1.5 * alone_gb)
    left_out = f"the draft {draft} is left out, as it does not fit; {target} takes"
    assert one.text.startswith(both if is_named else left_out)
    assert one.state == ("note" if is_named else "ok")
    (draft / "model.safetensors").write_bytes(b"damaged")
    one = found(80)
    assert f": '{draft}' cannot be used: model.safetensors is damaged" in one.text
    assert one.state == ("note" if is_named else "ok")


def test_a_file_of_fewer_bits_counts_as_it_is_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    file = write_tiny_gguf(tmp_path / "tiny.gguf", type_=GGMLQuantizationType.Q8_0)
    settings = load_settings(
        assignments=[f"target.model={file}", "speculation.proposer=ngram"], environ={}
    )
    found = weights.counted(settings, has_hub=False)
    assert found == f"{file} is not in the store; `outrider models fetch {file}` gets it"
    resolve(str(file))
    found = weights.counted(settings, has_hub=False)
    assert isinstance(found, weights.PairWeights)
    assert found.text == f"{file} takes"
    assert 0.9 * file.stat().st_size < found.weights.in_all <= file.stat().st_size


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        (torch.bfloat16, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        (torch.float32, "smollm2-135m-instruct"),  # the other takes twice as much
    ],
)
def test_a_cpu_is_asked_in_which_dtype_models_run(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, model: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "available_bytes", lambda: 12 * 10**9)
    monkeypatch.setattr(machine, "resolve_dtype", lambda *_: dtype)
    assert machine.pair(has_hub=True).remedy == f"outrider serve {model}"


def test_a_small_machine_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 4 * 10**8)
    assert machine.memory(CacheConfig()).state == "note"
    assert machine.pair(has_hub=True).state == "bad"


def test_macos_is_shown_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    found = machine.system()
    assert (found.state, "CPU path only" in str(found.remedy)) == ("note", True)


def test_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(status: int) -> None:
        reply = httpx.Response(status, request=httpx.Request("HEAD", "http://hub"))
        monkeypatch.setattr(httpx, "head", lambda *args, **more: reply)

    answer(200)
    assert network.hub(offline=False).state == "ok"
    answer(503)
    assert "503" in network.hub(offline=False).text
    assert network.hub(offline=True).state == "note"


def test_suggestions_go_from_large_to_small() -> None:
    sizes = [each.size_gb for each in SUGGESTED]
    assert sizes == sorted(sizes, reverse=True)
