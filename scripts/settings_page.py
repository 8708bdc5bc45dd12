"""Write docs/settings.md: every setting, from the settings themselves.

.venv/bin/python -P scripts/settings_page.py
"""

import json
import re
from pathlib import Path

from outrider.server.cli.config import allowed_values
from outrider.server.config.settings import Settings

PAGE = Path(__file__).parents[1] / "docs/settings.md"
HEAD = """\
# Every setting

This page is generated: `make docs` writes it from `server/config`.
`outrider config --example` prints the same as TOML. [How to set one](configuration.md).
"""


def settings_page() -> str:
    parts = [HEAD]
    for section_name, section in Settings():
        schemas = type(section).model_json_schema()["properties"]
        lines = [
            f"## `[{section_name}]`\n",
            f"{(type(section).__doc__ or '').strip()}\n",
            "| key | default | |",
            "|---|---|---|",
        ]
        for name, value in section.model_dump(mode="json").items():
            default = "unset" if value is None else f"`{json.dumps(value)}`"
            text = f"{schemas[name]['description']}{allowed_values(schemas[name])}"
            lines.append(f"| `{name}` | {default} | {_escaped(text)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Characters that Markdown would read in a table's cell."""
    return re.sub(r"[|*<]", r"\\\g<0>", text)


if __name__ == "__main__":
    PAGE.write_text(settings_page())
