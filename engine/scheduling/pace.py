"""How long steps take, so that the next one can be planned as late as the device allows."""

from collections import deque
from dataclasses import dataclass, field

from .plan import Plan

_NUM_TIMES = 8  # kept of each kind of step
_SPARE_S = 0.0005  # sooner than need be: a device that idles costs more than a moment's wait


@dataclass(slots=True)
class _Times:
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    launch_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))


class Pace:
    """What steps of each kind took lately: on the device, and the host to launch them.

    A step that is launched behind another could be launched at once. But who comes in the meantime
    could not join it, and would wait for a whole step more.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], _Times] = {}

    def observe(self, plan: Plan, step_s: float, launch_s: float) -> None:
        times = self._times.setdefault(_kind(plan), _Times())
        times.step_s.append(step_s)
        times.launch_s.append(launch_s)

    def spare_s(self, plan: Plan, elapsed_s: float) -> float:
        """How long the host may wait before it launches the step behind this plan's, which the
        device began so long ago; 0 while little is known of such steps.
        """
        times = self._times.get(_kind(plan))
        if times is None or len(times.step_s) < _NUM_TIMES:
            return 0.0
        return max(0.0, min(times.step_s) - max(times.launch_s) - _SPARE_S - elapsed_s)


def _kind(plan: Plan) -> tuple[int, int]:
    """Steps that take about as long: of as many drafts, and rows within a factor of two."""
    num_rows = sum(s.num_new_tokens + s.num_drafts for s in plan.scheduled)
    return max(s.num_drafts for s in plan.scheduled), num_rows.bit_length()
