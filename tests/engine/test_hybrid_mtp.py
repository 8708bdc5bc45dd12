"""MTP heads of hybrids: their formulas, and where their tensors are found."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, is_greedy, lagging, prompts
from mtp import PlainHybrid, check_drafts, save_tiny_hybrid
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, VOCAB, Tiny, change_config, change_tensor, write_index

from outrider.engine.api import NewRequest
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import HeadError
from outrider.engine.models.heads.loading import load_head
from outrider.engine.models.loading import load_network
from outrider.engine.models.weight_files import stored_tensors, unread_files


def deep(*case: Any) -> Any:
    """What another test guards, too."""
    return pytest.param(*case, marks=pytest.mark.deep)


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3_5_text")


@pytest.fixture
def own(target: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(target, tmp_path / "own")


@pytest.mark.parametrize(
    "architecture",
    # test_quantised_hybrids.py has the others' formulas.
    ["qwen3_5_moe_text", deep("qwen3_5_text"), deep("qwen3_next")],
)
def test_the_mtp_head_drafts_by_its_formulas(architecture: str, tmp_path: Path) -> None:
    """Also behind rejected drafts, in chunks, and a step ahead; the answers are the target's.

    The experts of one mixture are stacked, those of the other one by one.
    """
    path = save_tiny_hybrid(tmp_path / "model", architecture)
    asked, plain = prompts([3, 70], VOCAB), PlainHybrid(path)
    engine = lagging(engine_config(path, path, k=2))
    assert engine.info.proposer == "mtp"
    requests = [
        NewRequest(request_id=str(i), prompt_token_ids=ids, params=GREEDY, returns_drafts=True)
        for i, ids in enumerate(asked)
    ]
    engine.submit(requests)
    known, num_drafts = [list(ids) for ids in asked], 0
    while engine.has_work():
        for output in engine.step():
            tokens_so_far = known[int(output.request_id)]
            if drafts := output.draft_token_ids:
                assert drafts == plain.drafts(tokens_so_far, len(drafts))
                num_drafts += len(drafts)
            tokens_so_far += output.token_ids
    assert num_drafts > 40
    for prompt, ids in zip(asked, known, strict=True):
        assert is_greedy(path, prompt, ids[len(prompt) :])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtp_num_hidden_layers": 2}, "its MTP head has 2 layers; one is read here"),
        ({"model_type": "llama"}, "no MTP head is known for models of type llama"),
    ],
)
def test_another_mtp_head_is_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    config = ModelConfig(path=str(path), dtype="float32", is_mtp=True)
    network = load_network(config, DEVICE)
    change_config(path, **changes)
    with pytest.raises(HeadError, match=says):
        load_head(config, network, config.path)


@pytest.mark.parametrize("dedicated", [True, False])
def test_an_mtp_head_reads_its_own_embedding_where_the_config_says_so(
    dedicated: bool, tmp_path: Path
) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    change_config(path, mtp_use_dedicated_embeddings=dedicated)
    own = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(2))
    change_tensor(path, "mtp.embed_tokens.weight", own)
    check_drafts(path, path)


def test_an_embedding_of_an_mtp_head_that_no_file_holds_is_the_targets_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    change_config(path, mtp_use_dedicated_embeddings=True)
    check_drafts(path, path)
    said = "its MTP head has an embedding of its own by its config (mtp_use_dedicated_embeddings)"
    assert f"{path}: {said}, and its files hold none: it reads the target's" in caplog.text


def test_an_mtp_head_is_found_under_the_models_name_too(tmp_path: Path) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    named = {f"model.{n}" if n.startswith("mtp.") else n: tensor for n, tensor in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    assert Engine(engine_config(path, path, k=2)).info.proposer == "mtp"


@pytest.mark.parametrize("indexed", ["nothing", "the model", "all"])
def test_an_mtp_head_may_have_a_file_of_its_own(indexed: str, tmp_path: Path) -> None:
    """Outside the index, in it, or in it although there is no such file."""
    path = save_tiny_hybrid(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    of_head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_file(of_head, path / "mtp.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(tensors, "model.safetensors")
    if indexed == "all":
        places |= dict.fromkeys(of_head, "mtp.safetensors")
    if indexed != "nothing":
        write_index(path, places)
    assert set(stored_tensors(path)) == {*tensors, *of_head}
    assert unread_files(path) == []
    config = ModelConfig(path=str(path), dtype="float32", is_mtp=True)
    network = load_network(config, DEVICE)
    load_head(config, network, config.path)
    (path / "mtp.safetensors").unlink()
    assert set(stored_tensors(path)) == {*tensors}
    with pytest.raises(HeadError, match="its files hold no MTP head"):
        load_head(config, network, config.path)


def test_a_missing_mtp_head_is_said(target: Path) -> None:
    config = ModelConfig(path=str(target), dtype="float32", is_mtp=True)
    with pytest.raises(HeadError, match=r"its files hold no MTP head \(mtp\.fc\.weight\)"):
        load_head(config, load_network(config, DEVICE), config.path)
