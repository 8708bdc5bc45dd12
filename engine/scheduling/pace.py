"""How long steps take, so that the next one can be launched as late as possible."""

from collections import deque
from dataclasses import dataclass, field

from .plan import Plan

_NUM_TIMES = 8  # kept for each kind of step
_SPARE_S = 0.0005  # safety margin: an idle device costs more than a launch that came too soon


@dataclass(slots=True)
class _Times:
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    launch_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))


class Pace:
    """How long recent steps of each kind took on the device, and how long the host to launch them.

    The next step could be launched at once. But a request that arrives after the launch cannot join
    that step any more, and would wait for a whole step. So the host launches late.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], _Times] = {}

    def observe(self, plan: Plan, step_s: float, launch_s: float) -> None:
        times = self._times.setdefault(_kind(plan), _Times())
        times.step_s.append(step_s)
        times.launch_s.append(launch_s)

    def spare_s(self, plan: Plan, elapsed_s: float) -> float:
        """How long the host may wait before it must launch the step after `plan`.

        The device began `plan` `elapsed_s` ago. 0 until enough such steps were measured.
        """
        times = self._times.get(_kind(plan))
        if times is None or len(times.step_s) < _NUM_TIMES:
            return 0.0
        return max(0.0, min(times.step_s) - max(times.launch_s) - _SPARE_S - elapsed_s)


def _kind(plan: Plan) -> tuple[int, int]:
    """Steps of one kind take about as long: equal drafts, and rows within a factor of two."""
    num_rows = sum(s.num_new_tokens + s.num_drafts for s in plan.scheduled)
    return max(s.num_drafts for s in plan.scheduled), num_rows.bit_length()
