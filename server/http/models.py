"""GET /models: the model that is served, by each of its names."""

import datetime
from typing import Any

from fastapi import APIRouter

from ..api.protocol import Model, ModelList
from ..api.service import Service


def model_routes(service: Service, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    """Lists for OpenAI's and Anthropic's clients in one; `responses` are those of errors."""
    router = APIRouter(responses=responses)
    started = datetime.datetime.now(datetime.UTC).replace(microsecond=0)

    @router.get("/models")
    async def models() -> ModelList:
        """The model that is served, by each of its names."""
        names = service.model_names
        data = [_model(service, name, started) for name in names]
        return ModelList(
            object="list", data=data, first_id=names[0], last_id=names[-1], has_more=False
        )

    @router.get("/models/{model:path}")
    async def model(model: str) -> Model:
        service.check_model(model)
        return _model(service, model, started)

    return router


def _model(service: Service, name: str, started: datetime.datetime) -> Model:
    max_model_len = service.client.info.max_model_len if service.client.info else None
    return Model(
        id=name,
        object="model",
        created=int(started.timestamp()),
        owned_by="outrider",
        root=service.model_name,
        max_model_len=max_model_len,
        type="model",
        display_name=name,
        created_at=started.isoformat(),
        lifecycle="active",
        max_input_tokens=max_model_len,
    )
