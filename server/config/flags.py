"""The flag of every setting: `server.port` is `--port`, `cache.dtype` is `--cache-dtype`."""

from functools import cache

from .settings_loader import is_list, setting_keys

# In this order a name belongs to the first section that has it; later ones put theirs before it.
SECTIONS = ("target", "draft", "speculation", "engine", "scheduler", "cache", "server")
_OWN = {"speculation.num_speculative_tokens": "-k", "draft.model": "--draft"}


@cache
def flag_names() -> dict[str, str]:
    """By `section.key`, the flag that sets it. A list has one for each item; seconds lose `_s`."""
    keys = sorted(setting_keys(), key=lambda key: SECTIONS.index(key.split(".")[0]))
    names: dict[str, str] = {}
    for key in keys:
        section, name = key.split(".")
        name = name.removesuffix("_s")
        if is_list(key):
            name = name.removesuffix("s")
        flag = f"--{name}".replace("_", "-")
        taken = flag in names.values()
        names[key] = _OWN.get(key) or (f"--{section}-{flag[2:]}" if taken else flag)
    return names
