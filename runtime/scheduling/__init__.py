"""Which tokens run when and where their keys and values go: numbers alone, no tensors.

In the order of use: a `RequestState` is added to the `Scheduler`, whose `plan` gives a `StepPlan`
to the runner and whose `update` takes what was sampled. `StepPlanner` makes the plan: it asks
`Admission` which of the waiting requests fit, and takes blocks from the `BlockManager`, which
counts them in a `BlockAllocator` for each kind of layers and finds known ones in the `PrefixCache`.
`integrity` says what is true in between.
"""

from .config import KVKind, SchedulerConfig
from .plan import BlockCopy, SequenceRun, StepPlan
from .scheduler import Scheduler
from .sequence import RequestState, RequestStatus, Sequence
from .stats import RequestStats, SchedulerStats, request_stats

__all__ = [
    "BlockCopy",
    "KVKind",
    "RequestState",
    "RequestStats",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Sequence",
    "SequenceRun",
    "StepPlan",
    "request_stats",
]
