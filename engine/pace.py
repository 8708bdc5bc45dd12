"""How long steps take, so that the next one can be launched as late as possible."""

from collections import deque

from .plan import Plan

_NUM_TIMES = 8  # kept for each kind of step
_SPARE_S = 0.0005  # safety margin: an idle device costs more than a launch that came too soon


class Pace:
    """How long recent steps of each kind took on the device, and how long the host to plan and
    launch them.

    The next step could be launched at once. But a request that arrives after the launch cannot join
    that step any more, and would wait for a whole step. So the host launches late.
    """

    def __init__(self) -> None:
        # By kind, of recent steps: seconds on the device, and of the host to plan and launch.
        self._times: dict[tuple[int, int], deque[tuple[float, float]]] = {}

    def observe(self, plan: Plan, step_s: float, launch_s: float) -> None:
        times = self._times.setdefault(_kind(plan), deque(maxlen=_NUM_TIMES))
        times.append((step_s, launch_s))

    def spare_s(self, plan: Plan, elapsed_s: float) -> float:
        """How long the host may wait before it must launch the step after `plan`.

        The device began `plan` `elapsed_s` ago. 0 until enough such steps were measured.
        """
        times = self._times.get(_kind(plan), ())
        if len(times) < _NUM_TIMES:
            return 0.0
        step_s, launch_s = min(step for step, _ in times), max(launch for _, launch in times)
        return max(0.0, step_s - launch_s - _SPARE_S - elapsed_s)


def _kind(plan: Plan) -> tuple[int, int]:
    """Steps of one kind take about as long: equal drafts, and rows within a factor of two, if all
    drafts have some.
    """
    num_rows = sum([s.num_new_tokens + s.num_made for s in plan.scheduled])
    return max([s.num_made for s in plan.scheduled]), num_rows.bit_length()
