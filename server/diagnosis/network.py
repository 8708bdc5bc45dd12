"""Findings about the network: what this machine can reach, and whether it can be reached."""

import importlib.metadata
import socket

import httpx
from huggingface_hub import constants, get_token

from ..config.server_settings import ServerSettings
from .machine import Finding

HUB_TIMEOUT_S = 10.0
PORT_TIMEOUT_S = 2.0


def port(settings: ServerSettings) -> Finding:
    """Whether the server could listen there."""
    host, number = settings.host, settings.port
    if settings.uds is not None:
        return Finding("ok", f"none: the server listens at {settings.uds}")
    if number == 0:
        return Finding("ok", f"any free one on {host}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if _is_ours(host, number):
            return Finding("note", f"{number} on {host}: Outrider serves there already")
        return Finding(
            "bad",
            f"{number} on {host}: {error.strerror}",
            "Start with another: outrider serve --port 8001.",
        )
    return Finding("ok", f"{number} on {host} is free")


def _is_ours(host: str, number: int) -> bool:
    """Whether a server of this same version listens there."""
    address = f"[{host}]" if ":" in host else host
    try:
        answer = httpx.get(f"http://{address}:{number}/version", timeout=PORT_TIMEOUT_S)
        return bool(answer.json() == {"version": importlib.metadata.version("outrider")})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False


def clients(settings: ServerSettings) -> Finding:
    """Whether the files of keys, and of the certificate, can be used."""
    try:
        num_keys = len(settings.read_api_keys())
        settings.check_certificate()
    except OSError as error:
        return Finding("bad", str(error))
    keys = f"{num_keys} key{'s' * (num_keys > 1)}" if num_keys else "no key is asked for"
    certificate = settings.tls_certificate
    return Finding("ok", f"{keys}; {f'TLS with {certificate}' if certificate else 'no TLS'}")


def hub(*, offline: bool) -> Finding:
    """Whether models can be downloaded from the hub, and as which user."""
    token = "with a token" if get_token() else "without a token: gated models need `hf auth login`"
    without = "The default pair, directories and GGUF files work without it."
    if offline or constants.HF_HUB_OFFLINE:
        return Finding("note", "not tried: offline", without)
    endpoint = constants.ENDPOINT
    try:
        response = httpx.head(endpoint, timeout=HUB_TIMEOUT_S, follow_redirects=True)
        response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        text = f"cannot reach {endpoint} ({reason.partition(chr(10))[0]})"
        return Finding("note", text, without)
    return Finding("ok", f"{endpoint} answers, {token}")
