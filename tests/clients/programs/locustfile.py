"""Users who ask in streams, and fail a stream that does not end as it should."""

from locust import HttpUser, task


class Reader(HttpUser):
    @task
    def ask(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "stream": True}
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if not lines or lines[-1] != b"data: [DONE]":
                answer.failure(f"the stream ended with {lines[-1:]}")
