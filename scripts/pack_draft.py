"""Put a distilled draft into the package, as the default target's.

outrider distill --target smollm2-135m-instruct --out /tmp/draft --budget 10m --size 4x256
.venv/bin/python -P scripts/pack_draft.py /tmp/draft
"""

import sys
from pathlib import Path

from outrider.server.models.builtin import SHIPPED_DRAFT
from outrider.server.models.packed import pack

if __name__ == "__main__":
    pack(Path(sys.argv[1]), SHIPPED_DRAFT)
    for file in sorted(SHIPPED_DRAFT.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file}")
