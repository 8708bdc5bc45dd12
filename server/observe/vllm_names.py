"""Shows our metrics under vLLM's names as well, for dashboards and routers that know those."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.engine.processes.client import EngineClient

from .tracing import OPERATIONS

# Our series for each name; counters without `_total`. What vLLM counts in another way is left out.
NAMES = {
    "vllm:num_requests_running": "outrider_requests_running",
    "vllm:num_requests_waiting": "outrider_requests_waiting",
    "vllm:kv_cache_usage_perc": "outrider_kv_cache_usage_ratio",
    "vllm:num_preemptions": "outrider_preemptions",
    "vllm:prompt_tokens": "outrider_prompt_tokens",
    "vllm:generation_tokens": "outrider_generation_tokens",
    "vllm:prefix_cache_queries": "outrider_prompt_tokens",
    "vllm:prefix_cache_hits": "outrider_cached_prompt_tokens",
    "vllm:spec_decode_num_drafts": "outrider_drafts",
    "vllm:spec_decode_num_draft_tokens": "outrider_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "outrider_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "outrider_accepted_tokens_per_position",
    "vllm:time_to_first_token_seconds": "outrider_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "outrider_inter_token_latency_seconds",
    "vllm:request_queue_time_seconds": "outrider_request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "outrider_request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "outrider_request_decode_time_seconds",
    "vllm:request_inference_time_seconds": "outrider_request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds": "outrider_request_time_per_token_seconds",
    "vllm:request_max_num_generation_tokens": "outrider_request_max_generation_tokens",
    "vllm:iteration_tokens_total": "outrider_step_tokens",
    "vllm:request_params_max_tokens": "outrider_request_max_tokens",
    "vllm:request_success": "outrider_sequences_ended",
    "vllm:request_prompt_tokens": "outrider_request_prompt_tokens",
    "vllm:request_generation_tokens": "outrider_request_generation_tokens",
    "vllm:e2e_request_latency_seconds": "outrider_request_duration_seconds",
}


class VLLMNames(Collector):
    """Repeats the metrics of a registry with vLLM's names and labels."""

    def __init__(self, registry: CollectorRegistry, client: EngineClient, model_name: str) -> None:
        self._registry = registry
        self._client = client
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        ours = {metric.name: metric for metric in self._registry.collect()}
        for name, our_name in NAMES.items():
            if our_name in ours:
                yield self._renamed(ours[our_name], name)
        if info := self._client.info:
            config = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV cache, in labels.",
                labels=["block_size", "num_gpu_blocks", *self._labels],
            )
            sizes = [str(info.page_size_tokens), str(info.num_pages)]
            config.add_metric([*sizes, *self._labels.values()], 1)
            yield config

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        renamed.samples = [
            sample._replace(
                name=name + sample.name.removeprefix(metric.name),
                labels=sample.labels | self._labels,
            )
            for sample in metric.samples
            # vLLM times requests that generate, and no others.
            if "path" not in sample.labels or sample.labels["path"] in OPERATIONS
        ]
        return renamed
