"""The function that users call to run an optimizer of HpBandSter on Fluid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid._given_executor import closes_executor
from fluid.directions import require_mode
from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.executor import FluidExecutor, executor_scope
from fluid.integrations.hpbandster.loop import OptimizerLoop
from fluid.integrations.hpbandster.optimizers import SeededRandom, Worker, make, quiet
from fluid.integrations.hpbandster.trials import TrainableTrials, TrialFactory, WorkerTrials
from fluid.integrations.hpbandster.worker_course import RehearsedWorker
from fluid.trainables.trainable import is_only_replayed, kind_of
from fluid.user_calls import user_call


@user_call
@closes_executor
def run(
    optimizer: Any,
    configspace: Any,
    trainable: Any,
    *,
    max_budget: float,
    min_budget: float = 1,
    eta: float = 3,
    n_iterations: int = 1,
    metric: str = "loss",
    mode: str | None = None,
    synchronous: bool = False,
    resume: bool = True,
    executor: FluidExecutor | None = None,
    seed: int | None = None,
    worker_options: Mapping[str, Any] | None = None,
    working_directory: str = ".",
    **options: Any,
) -> Any:
    """Runs an optimizer of HpBandSter to its end.

    Args:
        optimizer: ``RandomSearch``, ``HyperBand``, ``BOHB`` or another subclass of HpBandSter's ``Master``; or the
            name of one of the three.
        configspace: a ``ConfigSpace.ConfigurationSpace``.
        trainable: any trainable of Fluid, whose budget is a number of iterations; or a subclass of HpBandSter's
            ``Worker``, whose ``compute`` is called once for each budget of a configuration. To be rehearsed, a worker
            has a static or class method ``replay(config, budget)``, which returns a
            :class:`fluid.rehearsal.ReplayedIteration` of what ``compute`` returns, and its seconds.
        max_budget: the largest budget. With a trainable, budgets are rounded to whole iterations.
        min_budget: the smallest budget.
        eta: 1 in ``eta`` configurations continues, to a budget ``eta`` times as large; at least 2.
        n_iterations: how many times Successive Halving is run.
        metric: the metric to optimize, among those that a trainable reports; a worker's is ``"loss"``.
        mode: ``"min"`` or ``"max"``; ``None``, the default, for what the metric's name says. The losses in the result
            are always to be minimized.
        synchronous: whether an iteration begins only when the one before it is complete. If not, it begins when fewer
            trials are under way than there are devices.
        resume: whether a configuration continues to a larger budget from where it is, instead of from the beginning.
        executor: runs the trials; ``None`` for the one in force, or else one made for this run. It is closed at the end
            unless it is in a ``with`` block.
        seed: of the configurations. The same seed gives the same ones if the run is synchronous; without a model, as
            for ``RandomSearch`` and ``HyperBand``, always.
        worker_options: arguments of the worker.
        working_directory: passed to a worker's ``compute``.
        options: of the optimizer, such as ``random_fraction``; and ``result_logger`` and ``previous_result``.

    Returns:
        HpBandSter's ``Result``. A run that failed has a loss of ``None`` and its traceback.

    Raises:
        InvalidFieldError: an argument cannot be used, or trials do not report ``metric``.
        FluidError: the executor was closed during the run.

    Example:
        >>> import ConfigSpace
        >>> from fluid import FluidExecutor
        >>> from fluid.integrations.hpbandster import run
        >>> def train(config):
        ...     for iteration in range(9):
        ...         yield {"loss": (config["x"] - 2.0) ** 2 + 1.0 / (iteration + 1)}
        >>> space = ConfigSpace.ConfigurationSpace({"x": (0.0, 4.0)})
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     result = run("HyperBand", space, train, max_budget=9, executor=executor, seed=1)
        >>> len(result.get_id2config_mapping())
        9
        >>> sorted({int(one.budget) for one in result.get_all_runs()})
        [1, 3, 9]
    """
    is_worker = isinstance(trainable, type) and issubclass(trainable, Worker)
    if not is_worker:
        if not is_only_replayed(trainable):
            kind_of(trainable)
    elif metric != "loss":
        raise InvalidFieldError("metric", metric, "must be loss for a worker")
    elif mode not in (None, "min"):
        raise InvalidFieldError("mode", mode, "must be min for a worker")
    require_number("min_budget", min_budget, at_least=0.0 if is_worker else 1.0)
    if min_budget == 0:
        raise InvalidFieldError("min_budget", min_budget, "must be positive")
    require_number("max_budget", max_budget, at_least=min_budget)
    require_number("eta", eta, at_least=2.0)
    brackets = require_integer("n_iterations", n_iterations, at_least=1)
    mode = require_mode(metric, mode)
    if executor is not None and not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
    random = SeededRandom(seed)
    with quiet(), random.activate():
        state = make(optimizer, configspace, eta=eta, min_budget=min_budget, max_budget=max_budget, **options)
        if seed is not None:
            configspace.seed(seed)
    trials: TrialFactory
    with executor_scope(executor) as chosen:
        if is_worker:
            isolation = chosen.isolating.of_sharing_sweep  # A worker serves one configuration after another.
            trials = WorkerTrials(state, trainable, dict(worker_options or {}), working_directory, isolation)
        else:
            trials = TrainableTrials(trainable, metric, mode, resume)
        if (backend := chosen.session.backend).replays:
            backend.require_replayable(RehearsedWorker(trainable) if is_worker else trainable)
        elif is_only_replayed(trainable):
            kind_of(trainable)  # Raises.
        loop = OptimizerLoop(state=state, trials=trials, executor=chosen, random=random, synchronous=synchronous)
        return loop.run(brackets)
