"""Models of published shapes with random weights, each made within seconds.

    python benchmarks/published_shapes.py SHAPE FOLDER [--fp8] [--tiny] [--layers N] [--served]

SHAPE is one of SHAPES below. With --fp8 the linear layers are in FP8 with a scale for each block
of 128 x 128, as Qwen publishes them. With --tiny all is narrow, so that the way to a table can be
tried on a CPU; with --layers the target has fewer, for a look at a layer's kernels. FOLDER gets the
target, in place of an older one; FOLDER/eagle3 or FOLDER/mtp its head, if there is one.

A file of torch.save keeps one block of random numbers, and every weight is a part of it that
begins elsewhere: 2 GB for 141. On a GPU each weight is a tensor of its own, as with real ones. An
MTP head lies in a folder of its own, in safetensors, which must not share numbers. With --served
all is in safetensors, as a server reads no other files, and an MTP head lies with its target.

The tables in docs/performance.md and more, on an H200; each prints its rows as they are done:

    python benchmarks/published_shapes.py qwen3-30b-a3b /tmp/m
    python benchmarks/engine.py /tmp/m /tmp/m/eagle3 --batch 1 8 32 64 --k 0 3 --best-of 0 \
        --tokens-a-step 2.7 --temperature 1 --batch-invariant --once

    python benchmarks/published_shapes.py qwen3.6-27b /tmp/m            # and with --fp8
    python benchmarks/published_shapes.py qwen3.6-35b-a3b /tmp/m        # and with --fp8
    python benchmarks/engine.py /tmp/m mtp --batch 1 16 --sequences 1 --k 3 --best-of 0 \
        --prompt-tokens 8192 --new-tokens 1024 --tokens-a-step 3.2 --temperature 1 \
        --batch-invariant --once

    python benchmarks/published_shapes.py gpt-oss-20b /tmp/m
    python benchmarks/engine.py /tmp/m /tmp/m/eagle3 --batch 1 8 32 64 --k 0 3 --best-of 0 \
        --tokens-a-step 2.7 --temperature 1 --once

    python benchmarks/published_shapes.py qwen3-8b /tmp/m
    python benchmarks/engine.py /tmp/m /tmp/m/eagle3 --k 0 3 --best-of 0 --tokens-a-step 2.7 \
        --temperature 1 --batch-invariant --once

Over HTTP:

    python benchmarks/published_shapes.py qwen3-8b /tmp/m --served
    python benchmarks/poisson.py --tokens-a-step 2.7 --at-k 3 -- /tmp/m --draft /tmp/m/eagle3
    python benchmarks/predictions.py -- /tmp/m --draft /tmp/m/eagle3

On two H200s:

    python benchmarks/published_shapes.py llama-3.1-70b /tmp/m
    python benchmarks/published_shapes.py llama-3.2-1b /tmp/d
    python benchmarks/engine.py /tmp/m /tmp/d --tensor-parallel 2 --batch 1 8 32 --sequences 1 \
        --k 0 4 --best-of 0 --tokens-a-step 3.05 --temperature 0 --once
"""

import argparse
import json
import math
import shutil
import string
import time
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

_DRAWN = 16_777_259  # random numbers that differ; a prime, so that no row has those of another
_APART = 10_007 * 64  # how far behind each other weights begin in the block
_BLOCK = 128  # of FP8: outputs and inputs that share a scale
_FILE_BYTES = 4 << 30  # of safetensors
_FP8_SCALE, _MXFP4_SCALE = 0.02 / 100, 119  # the second: 2^(119 - 127)
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK],
        "activation_scheme": "dynamic"}  # fmt: skip

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
           "tie_word_embeddings": False, "attention_bias": False}  # fmt: skip
_QWEN3 = {**_COMMON, "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
          "rope_theta": 1e6, "num_attention_heads": 32}  # fmt: skip
_LLAMA = {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
          "rms_norm_eps": 1e-5, "vocab_size": 128256, "max_position_embeddings": 131072,
          "rope_theta": 5e5, "num_key_value_heads": 8, "bos_token_id": 128000,
          "eos_token_id": 128001}  # fmt: skip
_LLAMA_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
_QWEN36 = {**_COMMON, "vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                               "partial_rotary_factor": 0.25},
           "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
           "linear_num_key_heads": 16, "full_attention_interval": 4}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3.6-27b": {
        **_QWEN36, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
        "mtp_num_hidden_layers": 1,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN36, "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1,
    },
    "gpt-oss-20b": {
        **_COMMON, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
        "swiglu_limit": 7.0, "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "original_max_position_embeddings": 4096, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "llama-3.1-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "head_dim": 128,
        "rope_scaling": {**_LLAMA_ROPE, "factor": 8.0},
    },
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA_ROPE, "factor": 32.0},
    },
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
_NO_HEAD = ("llama-3.1-70b", "llama-3.2-1b")
_EAGLE_VOCAB = 32000


def config_of(
    shape: str, *, fp8: bool = False, tiny: bool = False, layers: int | None = None
) -> dict[str, Any]:
    """What config.json says. Raises ValueError if the shape is not published in FP8."""
    config = dict(SHAPES[shape])
    if fp8:
        if "quantization_config" in config:
            raise ValueError(f"{shape} is in {config['quantization_config']['quant_method']}")
        config["quantization_config"] = _FP8
    if tiny:
        config |= {key: value for key, value in _TINY.items() if key in config}
    if layers:
        config["num_hidden_layers"] = layers
    return config


class Numbers:
    """Random weights, each a part of one block."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, Tensor] = {}
        self._constants: dict[tuple[float, torch.dtype], Tensor] = {}
        self._num_given = 0

    def weight(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        size = math.prod(shape)
        block = self._block(size, dtype)
        self._num_given += 1
        first = self._num_given * _APART % max(1, len(block) - size)
        return block[first // 64 * 64 :][:size].view(shape)

    def constant(self, value: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        size, key = math.prod(shape), (value, dtype)
        if key not in self._constants or len(self._constants[key]) < size:
            self._constants[key] = torch.full((size,), value).to(dtype)
        return self._constants[key][:size].view(shape)

    def _block(self, size: int, dtype: torch.dtype) -> Tensor:
        """At least so many numbers. Weights that were given before keep what they have."""
        block = self._blocks.get(dtype)
        if block is None or len(block) < size:
            if dtype == torch.uint8:
                drawn = torch.randint(256, (_DRAWN,), dtype=dtype)
            else:
                scale = 100 if dtype == torch.float8_e4m3fn else 0.02
                drawn = (torch.randn(_DRAWN) * scale).clamp(-448, 448).to(dtype)
            as_bytes = drawn.view(torch.uint8)  # which can be repeated in any dtype
            num_bytes = (size + _DRAWN // 4) * drawn.element_size()
            block = as_bytes.repeat(-(-num_bytes // len(as_bytes)))[:num_bytes].view(dtype)
            self._blocks[dtype] = block
        return block


class Checkpoint:
    """The tensors of a model, by the names of its files."""

    def __init__(self, config: dict[str, Any], numbers: Numbers) -> None:
        self.config, self.numbers = config, numbers
        self.tensors: dict[str, Tensor] = {}
        self._in_fp8 = config.get("quantization_config") == _FP8
        self._adds_one = "linear_num_key_heads" in config  # norms multiply by 1 + w

    def linear(
        self, name: str, num_out: int, num_in: int, *, bias: bool = False, plain: bool = False
    ) -> None:
        if self._in_fp8 and not plain:
            blocks = -(-num_out // _BLOCK), -(-num_in // _BLOCK)
            codes = self.numbers.weight(num_out, num_in, dtype=torch.float8_e4m3fn)
            self.tensors[f"{name}.weight"] = codes
            self.tensors[f"{name}.weight_scale_inv"] = self.numbers.constant(_FP8_SCALE, *blocks)
        else:
            self.tensors[f"{name}.weight"] = self.numbers.weight(num_out, num_in)
        if bias:
            self.tensors[f"{name}.bias"] = self.numbers.weight(num_out)

    def norm(self, name: str, size: int, *, adds_one: bool | None = None) -> None:
        adds_one = self._adds_one if adds_one is None else adds_one
        self.tensors[f"{name}.weight"] = self.numbers.constant(0.0 if adds_one else 1.0, size)

    def model(self) -> None:
        config = self.config
        vocab, width = config["vocab_size"], config["hidden_size"]
        self.linear("model.embed_tokens", vocab, width, plain=True)
        self.norm("model.norm", width)
        if not config["tie_word_embeddings"]:
            self.linear("lm_head", vocab, width, plain=True)
        for i in range(config["num_hidden_layers"]):
            interval = config.get("full_attention_interval", 1)
            self.layer(f"model.layers.{i}", is_delta_net=(i + 1) % interval != 0)

    def layer(self, name: str, *, is_delta_net: bool = False) -> None:
        width = self.config["hidden_size"]
        self.norm(f"{name}.input_layernorm", width)
        self.norm(f"{name}.post_attention_layernorm", width)
        if is_delta_net:
            self.delta_net(f"{name}.linear_attn")
        else:
            self.attention(f"{name}.self_attn", width)
        if self.config["model_type"] == "gpt_oss":
            self.mxfp4_experts(f"{name}.mlp")
        elif "num_experts" in self.config:
            self.experts(f"{name}.mlp")
        else:
            self.mlp(f"{name}.mlp", self.config["intermediate_size"])

    def attention(self, name: str, num_in: int) -> None:
        config, dim = self.config, self.config["head_dim"]
        bias, is_gated = config["attention_bias"], "linear_num_key_heads" in config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.linear(f"{name}.q_proj", (1 + is_gated) * heads * dim, num_in, bias=bias)
        self.linear(f"{name}.k_proj", kv_heads * dim, num_in, bias=bias)
        self.linear(f"{name}.v_proj", kv_heads * dim, num_in, bias=bias)
        self.linear(f"{name}.o_proj", config["hidden_size"], heads * dim, bias=bias)
        if config["model_type"].startswith("qwen3"):
            self.norm(f"{name}.q_norm", dim)
            self.norm(f"{name}.k_norm", dim)
        if config["model_type"] == "gpt_oss":
            self.tensors[f"{name}.sinks"] = self.numbers.weight(heads)

    def delta_net(self, name: str) -> None:
        config, width = self.config, self.config["hidden_size"]
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        num_values = config["linear_num_value_heads"]
        values = num_values * config["linear_value_head_dim"]
        self.linear(f"{name}.in_proj_qkv", 2 * keys + values, width)
        self.linear(f"{name}.in_proj_z", values, width)
        for part in ("in_proj_a", "in_proj_b"):
            self.linear(f"{name}.{part}", num_values, width, plain=True)
        self.linear(f"{name}.out_proj", width, values)
        self.norm(f"{name}.norm", config["linear_value_head_dim"], adds_one=False)
        num_taps = config["linear_conv_kernel_dim"]
        self.tensors[f"{name}.conv1d.weight"] = self.numbers.weight(2 * keys + values, 1, num_taps)
        self.tensors[f"{name}.A_log"] = self.numbers.constant(0.5, num_values)
        self.tensors[f"{name}.dt_bias"] = self.numbers.constant(1.0, num_values)

    def mlp(self, name: str, inner: int) -> None:
        width = self.config["hidden_size"]
        self.linear(f"{name}.gate_proj", inner, width)
        self.linear(f"{name}.up_proj", inner, width)
        self.linear(f"{name}.down_proj", width, inner)

    def experts(self, name: str) -> None:
        config, width = self.config, self.config["hidden_size"]
        num, inner = config["num_experts"], config["moe_intermediate_size"]
        self.linear(f"{name}.gate", num, width, plain=True)
        is_stacked = config["model_type"] == "qwen3_5_moe_text" and not self._in_fp8
        if is_stacked:
            both = self.numbers.weight(num, 2 * inner, width)
            self.tensors[f"{name}.experts.gate_up_proj"] = both
            self.tensors[f"{name}.experts.down_proj"] = self.numbers.weight(num, width, inner)
        else:
            for i in range(num):
                self.mlp(f"{name}.experts.{i}", inner)
        if "shared_expert_intermediate_size" in config:
            self.mlp(f"{name}.shared_expert", config["shared_expert_intermediate_size"])
            self.linear(f"{name}.shared_expert_gate", 1, width, plain=True)

    def mxfp4_experts(self, name: str) -> None:
        config, width, byte = self.config, self.config["hidden_size"], torch.uint8
        num, inner = config["num_local_experts"], config["intermediate_size"]
        self.linear(f"{name}.router", num, width, bias=True)
        for part, num_out, num_in in (
            ("gate_up_proj", 2 * inner, width),
            ("down_proj", width, inner),
        ):
            at, groups = f"{name}.experts.{part}", num_in // 32
            blocks = self.numbers.weight(num, num_out, groups, 16, dtype=byte)
            scales = self.numbers.constant(_MXFP4_SCALE, num, num_out, groups, dtype=byte)
            self.tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
            self.tensors[f"{at}_bias"] = self.numbers.weight(num, num_out)

    def mtp_head(self) -> None:
        width = self.config["hidden_size"]
        self.linear("mtp.fc", width, 2 * width, plain=True)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norm(f"mtp.{norm}", width)
        self.layer("mtp.layers.0")

    def eagle3_head(self) -> None:
        config, width = self.config, self.config["hidden_size"]
        drafted = config["draft_vocab_size"]
        self.linear("fc", width, 3 * width)
        self.linear("lm_head", drafted, width)
        for norm in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm",
                     "midlayer.post_attention_layernorm"):  # fmt: skip
            self.norm(norm, width)
        self.attention("midlayer.self_attn", 2 * width)
        self.mlp("midlayer.mlp", config["intermediate_size"])
        self.tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
        self.tensors["t2d"] = torch.arange(config["vocab_size"]) < drafted


def eagle3_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a head of a target of this shape, with a dense layer, as such heads have."""
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_theta")  # fmt: skip
    return {
        **_COMMON,
        **{key: config[key] for key in kept},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 3 * config["hidden_size"],
        "draft_vocab_size": min(_EAGLE_VOCAB, config["vocab_size"] // 2),
    }


def save(shape: str, folder: Path, config: dict[str, Any], *, served: bool = False) -> None:
    """Write the target, and its head in a folder below; `served`: in files that a server reads."""
    save_tensors = _save_safetensors if served else _save_block
    numbers = Numbers()
    target = Checkpoint(config, numbers)
    target.model()
    for old in ("mtp", "eagle3"):
        shutil.rmtree(folder / old, ignore_errors=True)
    _save(folder, config)
    save_tokenizer(folder, config["vocab_size"])
    if "mtp_num_hidden_layers" in config:
        head = Checkpoint(config, numbers)
        head.mtp_head()
        if served:
            target.tensors |= head.tensors
        else:
            _save(folder / "mtp", config)
            _save_safetensors(head.tensors, folder / "mtp")
    elif shape not in _NO_HEAD:
        head_config = eagle3_config(config)
        head = Checkpoint(head_config, numbers)
        head.eagle3_head()
        _save(folder / "eagle3", head_config)
        save_tensors(head.tensors, folder / "eagle3")
    save_tensors(target.tensors, folder)


def _save_block(tensors: dict[str, Tensor], folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def _save_safetensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """In files of some gigabytes: while a tensor is written, its numbers are its own."""
    files, left = list[dict[str, Tensor]](), 0
    for name, tensor in tensors.items():
        if left < tensor.nbytes:
            files.append({})
            left = max(_FILE_BYTES, tensor.nbytes)
        files[-1][name] = tensor
        left -= tensor.nbytes
    of_tensor = {}
    for i, part in enumerate(files):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}.safetensors"
        save_file({name: tensor.clone() for name, tensor in part.items()}, folder / file)
        of_tensor |= dict.fromkeys(part, file)
    if len(files) > 1:
        index = json.dumps({"metadata": {}, "weight_map": of_tensor})
        (folder / "model.safetensors.index.json").write_text(index)


def _save(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A token for each character of ASCII; each of the others is a space and up to four letters.

    So the text of any tokens is, but for chance, read as these tokens again.
    """
    characters = [i if 33 <= i < 127 else 256 + min(i, 33) for i in range(128)]  # in a vocabulary
    letters = string.ascii_lowercase
    every = ("".join(word) for size in range(1, 5) for word in product(letters, repeat=size))
    words = list(islice(every, vocab_size - len(characters)))
    tokens = [*map(chr, characters), *(f"Ġ{word}" for word in words)]
    numbers = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(numbers, [(f"Ġ{word[:-1]}", word[-1]) for word in words]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokens[-1]).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fp8", action="store_true", help="linear layers in FP8, in blocks")
    parser.add_argument("--tiny", action="store_true", help="narrow, to try it on a CPU")
    parser.add_argument("--layers", type=int, help="of the target")
    parser.add_argument("--served", action="store_true", help="in files that a server reads")
    args = parser.parse_args()
    start_s = time.monotonic()
    config = config_of(args.shape, fp8=args.fp8, tiny=args.tiny, layers=args.layers)
    save(args.shape, args.folder, config, served=args.served)
    num_bytes = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.shape}: {num_bytes / 1e9:.2f} GB in {time.monotonic() - start_s:.1f} s")


if __name__ == "__main__":
    main()
