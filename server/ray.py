"""Ray Serve: each replica is a complete server with its own engine. See docs/scaling.md.

    serve run outrider.server.ray:app
    serve run outrider.server.ray:build config=qwen3-8b-eagle3 num_gpus=1 max_replicas=8
    serve build outrider.server.ray:app --output-path serve.yaml

Needs the extra `ray`. Settings come from OUTRIDER_* variables and from `config`, as everywhere.
"""

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from rich.console import Console
from starlette.types import ASGIApp

from outrider.engine.processes.client import EngineUnavailableError
from outrider.engine.processes.process_engine import ProcessEngine

from .config.settings_loader import load_settings
from .http.http_server import load_app
from .http.middleware import Gate
from .models.prepare import prepare
from .observe.logs import configure_logging

# Ray's own router that keeps a session (header x-session-id) on one replica, where the conversation
# so far is cached. Requests without a session are spread evenly.
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Arguments(BaseModel):
    """The arguments of `serve run … NAME=VALUE`, and of `args` in Serve's config files."""

    model_config = ConfigDict(extra="forbid")

    config: str | None = Field(default=None, description="As `outrider serve --config`.")
    num_gpus: float = Field(default=0, ge=0, description="GPUs of a replica; 0: it has the CPU.")
    num_cpus: float = Field(default=1, gt=0, description="CPUs of a replica.")
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(
        default=24, gt=0, description="Requests of a replica above which another is started."
    )
    max_ongoing_requests: int = Field(
        default=64, ge=1, description="Requests that Ray hands to a replica; more wait with Ray."
    )


@serve.deployment(name="outrider")
@serve.ingress()
class Replica:
    """An engine in a process of its own, and the application over it; Ray's proxy speaks HTTP."""

    async def __init__(self, config: str | None) -> None:  # type: ignore[misc]
        # Ray's proxy may have any host name; server.allowed_hosts still applies.
        flags = {"server.host": "0.0.0.0"}
        settings = load_settings(Path(config) if config else None, flags=flags)
        server = settings.server
        configure_logging(server.log_level, server.log_format, Console(file=sys.stderr))
        self._prepared = await prepare(settings)
        self._engine = ProcessEngine(
            self._prepared.engine,
            step_timeout_s=settings.engine.step_timeout_s,
            log_format=server.log_format,
        )
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.stop()
            raise

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        # Ray drains replicas itself: a stopping one gets no new requests, so the gate stays open.
        return await load_app(self._prepared, self._engine, Gate())

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed; a restarting engine is back sooner."""
        if self._engine.state == "failed":
            raise EngineUnavailableError(self._engine.status_reason)

    async def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            await engine.stop()


def build(arguments: Arguments) -> serve.Application:
    """The application with these arguments; without any, one replica on the CPU."""
    deployment = Replica.options(  # type: ignore[attr-defined]
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=max(arguments.min_replicas, arguments.max_replicas),
            target_ongoing_requests=arguments.target_ongoing_requests,
            upscale_delay_s=5,  # a replica takes tens of seconds to start, so decide early
            downscale_delay_s=300,
        ),
        max_ongoing_requests=arguments.max_ongoing_requests,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=60,
    )
    return deployment.bind(arguments.config)


app = build(Arguments())
