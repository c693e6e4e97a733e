"""Heuristics: the numbers by which the engine decides, each with its reason and the benchmark that shows its effect.

None of them is needed for a correct schedule. Times are in seconds. Those of one policy are in its module.
"""

from __future__ import annotations

# -- measuring (benchmarks/packing.py, benchmarks/engine.py) ------------------------------------------------

#: Weight of a trial's newest iteration in its pace. Half: a trial whose pace changes is followed within a few
#: iterations, and one outlier is forgotten as fast.
PACE_SMOOTHING = 0.5
#: The profile learns from so many of a key's first iterations at each co-residency or width: an overhead is then known
#: to a few percent. benchmarks/engine.py shows what learning from all of them would cost.
OBSERVE_ALL = 64
#: Later on, the profile learns from one iteration in so many, in order to follow drift.
OBSERVE_EVERY = 8
#: A key's speed on a device model is followed when it changes by more than this share: below it is noise, and every
#: change has the queue planned again.
SPEED_CHANGE = 0.05
#: A runtime whose logarithm is known to this standard deviation counts as certain: a percent changes no plan, and
#: planners are several times as fast without (benchmarks/odds.py).
LEAST_SIGMA = 0.01
#: A median over so many of the latest starts and saves predicts the next one: the first in a process also load modules.
LATEST_TIMES = 5

# -- packing and widening (benchmarks/packing.py, benchmarks/stragglers.py) ---------------------------------

#: Below this many seconds an iteration is mostly the lane's own overhead, and says nothing about packing.
TOO_SHORT_TO_PACK_S = 1e-3
#: Work left per device below which no further co-resident is tried: a lane for it costs up to half a second of the
#: processor (benchmarks/overhead.py), which the work left must repay.
WORTH_TRYING_S = 5.0
#: The same in starts of a trial in an unused lane, as measured. On a GPU one takes seconds, and a minute where it
#: compiles; it is repaid by what two trials at a time save, up to half of the work and often a fifth.
WORTH_TRYING_STARTS = 5.0
#: Work left per device below which no further doubling of fused rows is tried: it costs a few steps. It is short, as
#: Tune grants its trials the iterations up to the next decision only (benchmarks/fused_sweeps.py).
WORTH_FUSING_S = 0.2
#: The same in the time that a first step takes longer than later ones, as measured: compiling takes seconds.
WORTH_FUSING_PREPARATIONS = 5.0
#: Seconds of iterations alone before a first co-resident is tried, where lanes do not tell at once how busy a trial
#: keeps the device: a GPU's lane tells once a second, and the first time may fall into the warm-up.
LEAST_ALONE_S = 2.5
#: Fewest trials that were observed at a packing before one more co-resident is tried: the iterations of one say too
#: little, as the others may still have been warming up.
LEAST_OBSERVED = 2
#: Trials that come, for each device, to devices shared by one trial more than was measured, without any observation of
#: so many: then no more of them are packed for now, as their iterations cannot be measured. A few come before the first
#: observation even if iterations are long, as lanes start or die; trials of one or two iterations come for ever.
MOST_UNOBSERVED = 8
#: Observations at the packing that is measured after which one more co-resident is tried again: they show that the
#: trials' iterations can be measured by now. Each time that fails, twice as many.
OBSERVED_TO_RETRY = 64
#: A trial's first iteration on a device is as long as usual up to so many times the median of its key's latest ones.
USUAL = 2.0
#: Fewest iterations left for which an unmeasured width is worth trying: one is lost to warm-up, one is measured, the
#: rest must repay both.
LEAST_TO_TRY = 4
#: A trial about to end has at least this much work left, to the planner: heights are positive.
LEAST_HEIGHT_S = 1e-9

# -- hung trials (docs/failures.md) ---------------------------------------------------------------------------

#: An iteration is compared with so many of the latest of its key, once there are so many: with USUAL_QUANTILE of them
#: in order, which one slow iteration in a hundred does not change.
LATEST_ITERATIONS = 128
LEAST_DUMP_S = 60.0
#: The lanes are killed after so many times that, and at least so many seconds: a validation or a compilation is not.
KILL_FACTOR = 3.0
LEAST_KILL_S = 600.0
#: Where the user has set the limit, stacks are dumped after this share of it: a killed process has none.
DUMP_SHARE = 0.9
#: An Alarm that comes so many seconds late was held up by a suspension of the driver.
LATE_S = 1.0
#: A trial that times out more often has failed.
MOST_TIMEOUTS = 1
#: A lane in which so many trials have raised, one after another, is used no more: its process may be to blame.
MOST_RAISED = 3

# -- devices that take no further process --------------------------------------------------------------------

#: Seconds for which a device takes no more trials than it has once a lane could not start beside them; twice as long
#: each time that this happens again, up to the second figure. A start that fails costs some seconds of a processor.
CAP_S = 60.0
LONGEST_CAP_S = 3600.0
#: The cap lasts this share of that where memory was freed on the device meanwhile, or a process there has ended.
EASED_CAP = 0.1

# -- spare lanes, and lanes that end (benchmarks/isolation.py) -------------------------------------------------

#: A trial that was stopped or has ended has so many seconds to clean up while others wait for its device.
CLEAN_UP_S = 5.0

# -- order and preemption (benchmarks/ray_tune.py, workload hyperband) --------------------------------------

#: A trial overtakes a rung's critical path only if it is 10% longer, because paces are estimates.
OVERTAKES = 1.1
#: So many queued trials are planned again by kinds of trials that are alike: one by one, each costs some microseconds
#: (benchmarks/cluster.py).
LONG_QUEUE = 256

# -- kept states (benchmarks/ray_tune.py, workload pbt) -----------------------------------------------------

#: A device keeps so many times ``resident_limit`` states of trials that cannot be saved: dropping one loses its trial.
PINNED_ALLOWANCE = 8
#: A device keeps so many times ``resident_limit`` states whose bytes are known to fit: they also take host memory.
MEASURED_ALLOWANCE = 32
#: A checkpoint that may not be needed is saved if that takes at most this share of the work since the last one.
CHEAP_SAVE = 0.1

# -- memory limits (benchmarks/packing_safety.py) ------------------------------------------------------------

#: A trial that shares a device may take so many times the memory that its key was seen to need.
MEMORY_TOLERANCE = 1.25
#: A limit is told again once it is more than so many times what it would be now, or less than so many times that.
TIGHT_LIMIT = 1.02
LOOSE_LIMIT = 0.95
