"""Small tokenizers of the two common kinds, trained on the spot."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.server.text.tokenizer import Tokenizer, TokenizerData

EOS, BOS = "<eos>", "<bos>"
SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! naïve café "
    "你好世界 🙂👩‍👩‍👧 <stop> one two three four five six seven "
)
CHAT_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{% for message in messages %}
{% if message.role not in ["system", "user", "assistant", "tool"] %}
{{ raise_exception("nobody is called " + message.role) }}
{% endif %}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}
{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"""


def tokenizer_of(wrapper: PreTrainedTokenizerBase) -> Tokenizer:
    return Tokenizer(TokenizerData.of(wrapper))


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2's: every byte is a token, and any sequence of tokens has a text."""
    return tokenizer_of(byte_level_wrapper())


def byte_level_wrapper() -> PreTrainedTokenizerFast:
    """The same, as transformers has it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with a marker for their space, unknown characters become bytes."""
    return tokenizer_of(byte_fallback_wrapper())


def byte_fallback_wrapper() -> PreTrainedTokenizerFast:
    """The same, as transformers has it."""
    words = ["▁", "▁Hello", "▁world", "▁the", "capital", "▁is", "▁Paris", "▁capital", "▁of", "ñ"]
    vocab = {EOS: 0, "<unk>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([EOS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def unigram_wrapper() -> PreTrainedTokenizerFast:
    """As T5's: pieces of words with their probabilities."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([SAMPLE] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
