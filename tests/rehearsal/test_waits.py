"""A rehearsal's clock stands still while a submitter acts, and no wait for the session is endless."""

import asyncio
import signal
import threading
import time

import pytest

import fluid
from fluid.errors import FluidError
from fluid.rehearsal import Overheads, RehearsalBackend, ReplayedIteration
from fluid.search import uniform


class Model:
    """Each iteration takes a minute."""

    @staticmethod
    def replay(config, iterations):
        seconds = config.get("seconds", 60.0)
        return [ReplayedIteration({"loss": config.get("lr", 1.0) / i}, seconds) for i in iterations]


@pytest.fixture
def executor(tmp_path):
    with fluid.FluidExecutor(backend="simulated", devices=2, max_width=1, run_dir=tmp_path / "run", verbose=0) as made:
        yield made


def group(*rates, budget=3, **more):
    return fluid.TrialGroup([fluid.Trial(Model, {"lr": rate, **more}, budget=budget) for rate in rates])


def now(executor):
    return executor._session.clock.now()


def test_no_time_passes_before_the_first_trial_and_none_between_two_groups(executor):
    burn(0.05)
    first = executor.submit_trialgroup(group(1.0))
    assert first.wait()
    assert (now(executor), first.makespan) == (180.0, 180.0)
    burn(0.05)
    second = executor.submit_trialgroup(group(1.0))
    burn(0.05)
    assert now(executor) == 180.0
    assert second.wait()
    assert now(executor) == 360.0


def burn(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_a_deadline_does_not_pass_before_the_first_trial(tmp_path):
    with fluid.FluidExecutor(
        backend="simulated", devices=1, max_width=1, run_dir=tmp_path / "run", verbose=0, deadline=3600.0
    ) as executor:
        burn(0.05)
        handle = executor.submit_trialgroup(group(1.0))
        assert handle.wait()
        assert now(executor) == 180.0


def test_results_are_read_while_trials_are_extended_added_and_stopped(executor):
    submitted = group(1.0, 2.0)
    first, second = submitted
    handle = executor.submit_trialgroup(submitted)
    seen = []
    for result in handle.results():
        seen.append((result.trial_id, result.iteration))
        burn(0.002)
        if seen[-1] == (first.id, 3):
            handle.extend(first.id, 2)
        if seen[-1] == (first.id, 1):
            handle.add(fluid.Trial(Model, {"lr": 3.0}, budget=1))
        if seen[-1] == (second.id, 2):
            handle.stop(second.id)
    assert (first.id, 5) in seen
    assert (second.id, 3) in seen  # It was under way when the trial was stopped.
    assert len(seen) == 5 + 3 + 1
    assert now(executor) == 300.0  # The added trial runs where the second one was stopped.


def test_waits_time_out_on_the_virtual_clock(executor):
    handle = executor.submit_trialgroup(group(1.0, seconds=1000.0))
    assert not handle.wait(timeout=1500.0)
    assert now(executor) == 1500.0
    assert len(executor.dataframe("iteration")) == 1
    assert handle.wait(timeout=1500.0)
    assert now(executor) == 3000.0


def test_a_wait_for_what_never_ends_is_ended_by_its_timeout(executor):
    submitted = group(1.0)
    handle = executor.submit_trialgroup(submitted)
    handle.pause(next(iter(submitted)).id)
    assert not handle.wait(timeout=1e6)
    assert now(executor) == 1e6


def test_two_threads_submit_and_wait(executor):
    made = []

    def sweep():
        for _ in range(5):
            handle = executor.submit_trialgroup(group(1.0, budget=1))
            assert handle.wait()
            made.append(handle)

    threads = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(made) == 10
    assert 300.0 <= now(executor) <= 600.0


def test_calls_are_answered(executor):
    submitted = group(1.0)
    handle = executor.submit_trialgroup(submitted)
    assert handle.call(next(iter(submitted)).id, "anything").result() is None
    assert now(executor) <= 60.0


def test_a_listener_alone_drives_a_sweep_while_its_thread_sleeps(executor):
    ended = threading.Event()

    class Listener(fluid.TrialListener):
        def on_result(self, result):
            if result.iteration == 3 and result.config["lr"] < 4:
                rate = result.config["lr"] + 1
                handles[0].add(fluid.Trial(Model, {"lr": rate}, budget=3))
            elif result.iteration == 3:
                ended.set()

    handles = []
    handles.append(executor.submit_trialgroup(group(1.0), Listener()))
    assert ended.wait(60.0)
    assert now(executor) >= 4 * 180.0


def test_asyncio_awaits_a_sweep(executor):
    async def sweep():
        handle = executor.submit_trialgroup(group(1.0))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, handle.wait)

    assert asyncio.run(sweep())
    assert now(executor) == 180.0


def test_closing_while_trials_run_ends_the_waits_of_other_threads(tmp_path):
    raised = []

    class Endless:
        @staticmethod
        def replay(config, iterations):
            time.sleep(0.002)
            return [ReplayedIteration({"loss": 1.0}, 1.0) for _ in iterations]

    executor = fluid.FluidExecutor(backend="simulated", devices=1, max_width=1, run_dir=tmp_path / "run", verbose=0)
    handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Endless, {}, budget=10**5)]))

    def wait():
        try:
            handle.wait()
        except FluidError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.4)
    executor.close()
    thread.join(30.0)
    assert not thread.is_alive()
    assert "closed" in str(raised[0])


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_and_the_session_closes(executor):
    class Slow:
        @staticmethod
        def replay(config, iterations):
            time.sleep(0.002)
            return [ReplayedIteration({"loss": 1.0}, 1.0) for _ in iterations]

    handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(Slow, {}, budget=10**5)]))
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    executor.close()
    assert not handle.done
    with pytest.raises(FluidError, match="closed"):
        handle.wait()


def test_a_thread_finds_all_that_has_happened_at_an_instant(executor):
    class Slow(fluid.TrialListener):
        def on_result(self, result):
            time.sleep(0.2)  # Meanwhile, the thread that waits for the first group could run.

    first = executor.submit_trialgroup(group(1.0, budget=1))
    second = executor.submit_trialgroup(group(1.0, budget=1), Slow())
    third = executor.submit_trialgroup(group(1.0, budget=1))
    assert first.wait()
    assert (second.done, third.done) == (True, False)
    assert now(executor) == 60.0
    assert third.wait()


def test_a_listener_cannot_wait_for_its_own_session(executor):
    found = []

    class Waits(fluid.TrialListener):
        def on_result(self, result):
            found.append(handle.wait(timeout=0.0))
            with pytest.raises(FluidError, match="listener cannot wait"):
                handle.wait(timeout=9.0)
            with pytest.raises(FluidError, match="listener cannot wait"):
                handle.wait()
            with pytest.raises(FluidError, match="listener cannot wait"):
                handle.call(result.trial_id, "anything").result()
            found.append(now(executor))

    handle = executor.submit_trialgroup(group(1.0, budget=2), Waits())
    assert handle.wait()
    assert found == [False, 60.0, False, 120.0]


def test_a_listener_may_wait_for_a_thread_that_waits_for_results(executor, monkeypatch):
    monkeypatch.setattr("fluid.waiting.clock_hold.LOOK_UP_S", 0.01)
    seen, found = threading.Event(), []

    class Waits(fluid.TrialListener):
        def on_result(self, result):
            found.append(seen.wait(20.0))

    first = executor.submit_trialgroup(group(1.0, budget=1))
    second = executor.submit_trialgroup(group(1.0, budget=1), Waits())
    for _ in first.results():
        seen.set()
    assert second.wait()
    assert found == [True]


@pytest.mark.parametrize("looks", [1, 2])
def test_a_look_at_how_things_stand_changes_nothing(tmp_path, looks):
    class Elastic(Model):
        fluid_elastic = True

    def journal(folder, times):
        backend = RehearsalBackend(2, overheads=Overheads(beta=1.1, epsilon=2.0))
        trials = [fluid.Trial(Elastic, {}, budget=budget, trial_id=f"of-{budget}") for budget in (2, 20)]
        with fluid.FluidExecutor(backend=backend, run_dir=folder, verbose=0) as executor:
            for _ in executor.submit_trialgroup(fluid.TrialGroup(trials)).results():
                for _ in range(times):
                    executor.status()
        return (folder / "journal.jsonl").read_bytes()

    assert journal(tmp_path / "looks", looks) == journal(tmp_path / "none", 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asha", "random"])
def test_the_same_seed_gives_the_same_sweep_however_slow_the_submitter_is(tmp_path, how):
    ran = [sweep(tmp_path / name, how, think) for name, think in (("quick", 0.0), ("busy", 0.004), ("sleepy", -0.01))]
    assert ran[0] == ran[1] == ran[2]
    assert len(ran[0].splitlines()) > 20


def sweep(run_dir, how, think):
    class Thinks(fluid.TrialListener):
        def on_result(self, result):
            time.sleep(-think) if think < 0 else burn(think)

    with fluid.FluidExecutor(backend="simulated", devices=4, max_width=1, run_dir=run_dir, verbose=0) as executor:
        fluid.run(
            Model,
            {"lr": uniform(0.1, 1.0), "seconds": uniform(10.0, 90.0)},
            metric="loss",
            algorithm=how,
            samples=12,
            budget=9,
            seed=3,
            executor=executor,
            callbacks=[Thinks()],
        )
    return (run_dir / "results.jsonl").read_bytes()
