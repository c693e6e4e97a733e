"""Heuristics: the numbers by which the engine decides, each with its reason and the benchmark that shows its effect.

None of them is needed for a correct schedule. Times are in seconds.
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

# -- hung trials (docs/running.md) ----------------------------------------------------------------------------

#: An iteration is compared with so many of the latest of its key, once there are so many: with USUAL_QUANTILE of them
#: in order, which one slow iteration in a hundred does not change.
LATEST_ITERATIONS = 128
LEAST_MEASURED = 5
USUAL_QUANTILE = 0.99
#: Stacks are dumped after so many times that long, and at least so many seconds.
DUMP_FACTOR = 10.0
LEAST_DUMP_S = 60.0
#: Displays show it after so many times that long, and at least so many seconds.
LEAST_SHOWN_S = 10.0
#: The lanes are killed after so many times that, and at least so many seconds: a validation or a compilation is not.
KILL_FACTOR = 3.0
LEAST_KILL_S = 600.0
#: Where the user has set the limit, stacks are dumped after this share of it: a killed process has none.
DUMP_SHARE = 0.9
#: An Alarm that comes so many seconds late was held up by a suspension of the driver.
LATE_S = 1.0
#: A trial that times out more often has failed.
MOST_TIMEOUTS = 1
#: A device is given up after exceptions of so many trials that left it unusable, if other devices work.
MOST_STRIKES = 3
#: A lane in which so many trials have raised, one after another, is used no more: its process may be to blame.
MOST_RAISED = 3

# -- devices that take no further process (docs/gpu_sharing.md) ----------------------------------------------

#: Seconds for which a device takes no more trials than it has once a lane could not start beside them; twice as long
#: each time that this happens again, up to the second figure. A start that fails costs some seconds of a processor.
CAP_S = 60.0
LONGEST_CAP_S = 3600.0
#: The cap lasts this share of that where memory was freed on the device meanwhile, or a process there has ended.
EASED_CAP = 0.1

# -- spare lanes, and lanes that end (benchmarks/isolation.py) -------------------------------------------------

#: A trial that was stopped or has ended has so many seconds to clean up while others wait for its device.
CLEAN_UP_S = 5.0
#: No spare lane is started on a device for so many seconds after one could not be started there.
SPARE_REFUSED_S = 600.0

# -- order and preemption (benchmarks/ray_tune.py, workload hyperband) --------------------------------------

#: A trial overtakes a rung's critical path only if it is 10% longer, because paces are estimates.
OVERTAKES = 1.1
#: So many queued trials are planned again by kinds of trials that are alike: one by one, each costs some microseconds
#: (benchmarks/cluster.py).
LONG_QUEUE = 256
#: With more trials waiting per device, none is preempted: each device has further work to fill gaps with, and looking
#: for preemptions costs time (benchmarks/engine.py).
MOST_WAITING = 2

# -- kept states (benchmarks/ray_tune.py, workload pbt) -----------------------------------------------------

#: A device keeps so many times ``resident_limit`` states of trials that cannot be saved: dropping one loses its trial.
PINNED_ALLOWANCE = 8
#: A device keeps so many times ``resident_limit`` states whose bytes are known to fit: they also take host memory.
MEASURED_ALLOWANCE = 32
#: A checkpoint that may not be needed is saved if that takes at most this share of the work since the last one.
CHEAP_SAVE = 0.1

# -- checkpoints in host memory (benchmarks/checkpoint_values.py) ---------------------------------------------

#: Probability that a trial that runs is restored from its newest checkpoint: its lane has to die first.
LOST_LANES = 0.05
#: The same of a trial that has done all iterations that it was said to get.
GOES_ON_UNSAID = 0.05
#: A probability that changes by less is not told anew: hardly ever another checkpoint would be evicted.
VALUE_STEP = 0.02

# -- memory limits (benchmarks/packing_safety.py) ------------------------------------------------------------

#: A trial that shares a device may take so many times the memory that its key was seen to need.
MEMORY_TOLERANCE = 1.25
#: A limit is told again once it is more than so many times what it would be now, or less than so many times that.
TIGHT_LIMIT = 1.02
LOOSE_LIMIT = 0.95

# -- admission where memory is scarce (benchmarks/admission.py) ----------------------------------------------

#: So many queue lines are looked at, and about twice as many trials of them: more would take milliseconds each time.
LINES_ADMITTED = 256
#: A device is kept for a trial that was passed over for long for one device in so many, and for one at least.
DEVICES_PER_KEPT = 8

# -- cohorts (benchmarks/predict.py) -------------------------------------------------------------------------

#: Trials are predicted anew once something was learnt from one in so many of them: each prediction takes some tens of
#: microseconds.
TRIALS_PREDICTED = 20
#: Predictions are rounded to steps of this share: planners see most trials of a long queue as alike.
PREDICTION_STEP = 0.05
#: A prediction from all trials of a key is used if its logarithm differs by so much from what is known of the key.
WORTH_PREDICTING = 0.2
#: So many trials must have been learnt from for that: of a few, often only the first iteration is known.
LEAST_TO_PREDICT = 8

# -- groups of several owners (benchmarks/groups.py) ----------------------------------------------------------

#: An owner without open trials for so long has ended: if it comes again, it is the last that came.
OWNER_GONE_S = 30.0
#: Owners are ranked anew, and devices shared out, at most so often while the same jobs are open.
SHARES_S = 1.0
#: A trial makes room for trials of other owners so many times, and so many do at one instant.
MOST_TRANSFERS = 2
MOST_TRANSFERS_AT_ONCE = 16

# -- waiting for the submitter (benchmarks/ray_tune.py, benchmarks/stragglers.py) ---------------------------

#: The submitter has this long to answer what ended before the engine resizes trials.
SETTLING_S = 0.005
#: Where events keep coming, as with thousands of devices, a tick comes so many seconds after one was first wanted.
LATEST_TICK_S = 0.25
#: Such ticks take at most this share of the time of the session's thread: with thousands of devices one takes tens of
#: milliseconds (benchmarks/cluster.py).
MOST_TICKING = 0.02
#: An idle device is kept free for the median of so many of the latest set-ups, and not longer than this.
LATEST_SETUPS = 5
LONGEST_SETUP_S = 1.0
