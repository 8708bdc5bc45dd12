"""Whatever JSON comes in, the answer is a success or an error that names a reason."""

from typing import Any

import pytest
from asgi import post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_client import steps
from served import Served
from tokenizers_for_tests import byte_level_tokenizer

from outrider.server.protocol import NEUTRAL_VALUES, CompletionRequest

FIELDS = [*CompletionRequest.model_fields, *NEUTRAL_VALUES, "guided_json", "unheard_of"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()  # NaN and infinities among them, which Python writes and we refuse
    | st.text(max_size=10)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(lambda request: steps(request, [70, 71]), byte_level_tokenizer())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES, with_prompt=st.booleans())
def test_any_fields_are_answered(served: Served, body: dict[str, Any], with_prompt: bool) -> None:
    reply = post(served.app, ({"prompt": "Hi"} | body) if with_prompt else body)
    if reply.status != 200:
        assert reply.status in (400, 404)
        assert reply.error["message"]
        assert len(reply.body) < 4000


@settings(max_examples=100, deadline=None)
@given(body=JSON)
def test_any_value_as_the_body_is_answered(served: Served, body: object) -> None:
    assert post(served.app, body).status == 400
