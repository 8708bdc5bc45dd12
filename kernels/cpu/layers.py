"""A whole pass of a decoder in one call: embeddings, RMSNorm, attention with RoPE over pages, gated
MLP, output layer.

Between embeddings and logits all is float32; only KV is rounded, to the dtype of its cache. A
processor with AVX-512 VNNI, or with AVX2 and no AVX-512, multiplies weights as the integers that
they are with inputs of 16 bits, a scale for each 32 of them, and sums these exactly: either gives
the same bits. Others unpack weights to float32 in registers and sum in float32, one input after
another. The bits of a row do not depend on the batch or on the number of threads; nor on the
processor, as long as it does the same of the two and has fused multiply-add.

The C++ in this folder is compiled when Outrider is installed, if there is a compiler, and never
later.
"""

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .._dispatch import uses_triton
from .packing import PackedTiles
from .sources import digest_of_sources

log = logging.getLogger(__name__)

# torch.backends.cpu's names of processors, and the builds that they can run, the best first.
_BUILDS = {"AVX512": ("_layers_v4", "_layers_v3", "_layers"), "AVX2": ("_layers_v3", "_layers")}

_CALLS = (
    "outrider_pass", "outrider_product", "outrider_unpack", "outrider_pass_in_slots",
    "outrider_verify", "outrider_draw", "outrider_draft", "outrider_probabilities",
    "outrider_bitmask", "outrider_token_bias", "outrider_bad_words", "outrider_penalties",
)  # fmt: skip


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one kind, for a structure."""
    return [(name, kind) for name in names.split()]


class MatrixStruct(Structure):
    """A linear layer's weight and bias. This and the following structures mirror those in C++."""

    _fields_ = (*fields(c_void_p, "data bias"), *fields(c_int32, "n k layout"))


class LayerStruct(Structure):
    _fields_ = (
        *fields(c_void_p, "norm mlp_norm q_norm k_norm"),
        *fields(MatrixStruct, "qkv output gate_up down"),
        *fields(c_void_p, "keys values cos sin"),
        ("window", c_int32),
    )


class ShapeStruct(Structure):
    _fields_ = (
        *fields(c_int32, "hidden heads kv_heads head_dim intermediate page_size cache_is_bf16"),
        *fields(c_float, "eps head_eps scale"),
    )


class DecoderStruct(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("count", c_int32),
        ("shape", ShapeStruct),
        ("embedding", c_void_p),
        ("embedding_is_bf16", c_int32),
        ("norm", c_void_p),
        ("output_layer", MatrixStruct),
        *fields(c_void_p, "drafted read_as"),
    )


class BatchStruct(Structure):
    _fields_ = (
        *fields(c_int32, "sequences num_logits"),
        *fields(c_void_p, "first_rows lengths slots token_ids positions places logits_rows"),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        *fields(c_int32, "num_taps is_bf16"),
        *fields(c_void_p, "tapped taps logits"),
        ("vocab_size", c_int64),
    )


class SlotsStruct(Structure):
    _fields_ = (
        *fields(c_void_p, "slots starts row_counts logits_counts num_tokens token_ids"),
        ("token_stride", c_int64),
        ("rows", c_void_p),
    )


def builds() -> dict[str, ctypes.CDLL]:
    """The builds that are here and that this processor can run, the best first.

    Those of other sources than are here are left out, with one warning: they would be called as
    these are.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    folder, loaded, stale = Path(__file__).parent, {}, []
    digest = digest_of_sources(folder)
    for name in _BUILDS.get(capability, ("_layers",)):
        spec = importlib.util.find_spec(f"outrider.kernels.cpu.{name}")
        if spec is not None and spec.origin is not None:
            try:
                found = ctypes.CDLL(spec.origin)
                if digest and _sources_of(found) != digest:
                    stale.append(name)
                    continue
                for call in _CALLS:
                    getattr(found, call).restype = None
            except (OSError, AttributeError):  # built for another system or version
                continue
            loaded[name] = found
    if stale:
        log.warning(
            "%s in %s: compiled from other C++ than is there, so left out, and models run slower; "
            "`make serve` and `make test` compile it again, or `pip install --editable .`",
            ", ".join(stale),
            folder,
        )
    return loaded


def _sources_of(library: ctypes.CDLL) -> str:
    """The digest of the sources of a build; empty if it is too old to have one."""
    try:
        return (c_char_p.in_dll(library, "outrider_sources").value or b"").decode()
    except ValueError:
        return ""


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled layers for this processor; None if there are none."""
    return next(iter(builds().values()), None)


def library() -> ctypes.CDLL:
    """The compiled layers where there are some."""
    found = compiled()
    assert found is not None
    return found


def reads(logits: Tensor) -> bool:
    """Whether compiled calls are to read these logits, and can. Shape: [..., V]."""
    return (
        logits.device.type == "cpu"
        and not uses_triton(logits)
        and logits.dtype in (torch.float32, torch.bfloat16)
        and logits.stride(-1) == 1
        and compiled() is not None
    )


_own_threads: int | None = None  # None: as many as torch


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Give torch one thread, and the compiled layers as many as torch had.

    The threads of both spin before they sleep, so on the same cores they would slow each other
    down. The work that is left to torch besides compiled layers is too small to share anyway.
    """
    global _own_threads
    before = _own_threads, torch.get_num_threads()
    _own_threads = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _own_threads, count = before
        torch.set_num_threads(count)


def num_threads() -> int:
    """How many threads a call of the compiled layers gets."""
    return torch.get_num_threads() if _own_threads is None else _own_threads


def matrix(weight: PackedTiles, bias: Tensor | None) -> MatrixStruct:
    """Pointers to both; the caller must keep them alive. Shape: bias [N] float32."""
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    return MatrixStruct(
        weight.data.data_ptr(), 0 if bias is None else bias.data_ptr(), *weight.shape, weight.layout
    )


def tiles_product(x: Tensor, weight: PackedTiles, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. Shape: x [T, K] float32 -> [T, N] float32."""
    assert x.dtype == torch.float32
    assert x.shape[1] == weight.shape[1]
    x = x.contiguous()
    out = torch.empty(len(x), weight.shape[0])
    library().outrider_product(
        ctypes.byref(matrix(weight, bias)),
        c_void_p(x.data_ptr()),
        len(x),
        c_void_p(out.data_ptr()),
        num_threads(),
    )
    return out


def unpacked_tiles(weight: PackedTiles) -> Tensor:
    """The matrix in float32. Shape: [N, K]."""
    out = torch.empty(weight.shape)
    library().outrider_unpack(
        ctypes.byref(matrix(weight, None)), c_void_p(out.data_ptr()), num_threads()
    )
    return out


def run_pass(decoder: DecoderStruct, batch: BatchStruct) -> None:
    """Compute the rows of a batch: their KV, and the logits and taps that are asked for."""
    library().outrider_pass(ctypes.byref(decoder), ctypes.byref(batch), num_threads())


def run_pass_in_slots(decoder: DecoderStruct, batch: BatchStruct, slots: SlotsStruct) -> None:
    """`run_pass` for rows that are looked up in slots; `batch` lacks them."""
    library().outrider_pass_in_slots(
        ctypes.byref(decoder), ctypes.byref(batch), ctypes.byref(slots), num_threads()
    )


def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int:
    """The address of a dense tensor of this dtype; 0 for None."""
    if tensor is None:
        return 0
    assert tensor.dtype == dtype, tensor.dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()
