"""transformers' classes of models, with those of architectures that it does not know."""

from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from .architectures import MiMoConfig

__all__ = ["AutoModelForCausalLM"]


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its MTP layer."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012


AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
