"""A server of MCP with one tool, which writes a file into the current folder."""

import json
import sys
from pathlib import Path

TEXT = {"type": "string"}
TOOL = {
    "name": "write",
    "description": "Writes a file.",
    "inputSchema": {
        "type": "object",
        "properties": {"path": TEXT, "content": TEXT},
        "required": ["path", "content"],
    },
}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    match request["method"]:
        case "initialize":
            result = {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "notes", "version": "1"},
            }
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            given = request["params"]["arguments"]
            Path(given["path"]).write_text(given["content"])
            result = {"content": [{"type": "text", "text": "written"}]}
        case _:
            result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
