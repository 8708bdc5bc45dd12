"""What a worker needs before its first step: pages, compiled kernels, captured graphs."""

from .api import ReportProgress
from .config import EngineConfig
from .measuring import allocate_host_pages, measure_pages, naming_what_to_lower
from .worker import Worker


def make_ready(worker: Worker, config: EngineConfig, report: ReportProgress) -> tuple[int, int]:
    """Allocate the KV cache, as large as fits if its size is not set; on a GPU compile all kernels
    and capture all graphs.

    Returns the number of pages, and the tokens of the longest sequence.
    """
    is_gpu = worker.device.type == "cuda"
    if is_gpu:
        worker.allocate(1)
        with naming_what_to_lower(config):
            worker.compile(report)
    if config.cache.host_gib:
        report("pinning host memory" if is_gpu else "allocating host memory", 0, 1)
        worker.host_pages = allocate_host_pages(worker, config)
    num_pages = config.cache.num_pages
    if num_pages is None:
        num_pages = measure_pages(worker, config, report)
    report("allocating the KV cache", 0, 1)
    max_model_len = worker.pair.longest_sequence(num_pages, worker.slots, config)
    worker.allocate(num_pages)
    if is_gpu and not config.enforce_eager:
        with naming_what_to_lower(config):
            worker.capture(report)
    return num_pages, max_model_len
