"""One driver of a session of torture.py: runs or resumes it, makes random requests, and writes down what it is told.

    python benchmarks/torture_driver.py FOLDER NUMBER

The folder has ``plan.json``. The driver writes ``told-NUMBER.jsonl``, a line per result, and appends its requests to
``requests.jsonl``: one line before it makes a request, one after the request has returned. Its exit status: 0 if all
trials have ended, 3 if the session could not be resumed, 4 if the session broke or was ended.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

import torture_search
import torture_trials

from fluid import Device, FluidError, FluidExecutor, InvalidFieldError, Trial, TrialGroup, TrialListener
from fluid.reports.run.loader import load_run
from fluid.results.records import Result

FINISHED, REFUSED, BROKEN = 0, 3, 4
#: Seconds in which a call must be answered once all trials have ended.
ANSWER_S = 30.0
#: The way in which results are told that are read again when all trials have ended.
AT_THE_END = "results at the end"


class Log:
    """A file of JSON lines, each of which is written by one call: a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **entry: Any) -> None:
        entry["at"] = time.time()
        os.write(self._file, (json.dumps(entry) + "\n").encode())


class Told(TrialListener):
    """Writes down results: as a listener, or read from a handle.

    Args:
        log: where to.
        way: "listener", "results" or :data:`AT_THE_END`.
    """

    def __init__(self, log: Log, way: str) -> None:
        self._log = log
        self._way = way

    def on_result(self, result: Result) -> None:
        value = result.metrics.get("value") if isinstance(result.metrics, dict) else None
        self._log.write(
            trial=result.trial_id, iteration=result.iteration, value=value, width=result.width, way=self._way
        )

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        text = None if failure is None else f"{failure.kind}: {failure.message}"
        self._log.write(trial=trial_id, ended=str(state), failure=text, way=self._way)


def make_trial(fields: dict[str, Any], notes: str) -> Trial:
    """Makes a trial of a plan."""
    if fields["form"] == "elastic":
        from torture_elastic import ElasticChain

        trainable: Any = ElasticChain
    else:
        trainable = {"class": torture_trials.Chain, "generator": torture_trials.generate}[fields["form"]]
    options: dict[str, Any] = {"priority": fields["priority"], "retry_errors": not fields["doomed"]}
    if fields["iteration_timeout_s"] is not None:
        options["iteration_timeout_s"] = fields["iteration_timeout_s"]
    config = {**fields["config"], "notes": notes}
    return Trial(trainable, config, budget=fields["budget"], trial_id=fields["id"], **options)


def answer_of(future: Future[Any]) -> Any:
    """Returns what a call returned; ``None`` if it failed, as calls of trials that were stopped do."""
    try:
        return future.result(timeout=ANSWER_S)
    except TimeoutError:
        return "never answered"
    except FluidError:
        return None


class Driver:
    """A driver.

    Args:
        folder: the session's.
        number: of the driver.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._plan = json.loads((folder / "plan.json").read_text())
        self._draws = random.Random(f"{self._plan['seed']}/{number}")
        self._told = Log(folder / f"told-{number}.jsonl")
        self._requests = Log(folder / "requests.jsonl")
        self._run = folder / "disk" / "run"
        self._made = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
        self._readers: list[threading.Thread] = []
        #: Calls of this driver: the trial, and the future answer.
        self._calls: list[tuple[str, Future[Any]]] = []
        #: Groups whose results this driver reads from their handles.
        self._read_here: set[str] = set()

    # -- the session -----------------------------------------------------------------------------------------

    def open(self) -> FluidExecutor:
        """Begins or resumes the session."""
        plan, resumes = self._plan, self._run.exists()
        options: dict[str, Any] = {**plan["options"], "verbose": 0}
        options["devices"] = plan["devices"]
        options["backend"] = "ray" if plan["kind"] == "ray" else "local"
        if plan["mps"]:
            from fluid.backends.local import LocalBackend

            options["backend"] = LocalBackend(
                plan["devices"],
                run_dir=self._run,
                sharing="mps",
                lane_policy=options.pop("lane_policy") or "longest_first",
                _mps_program=str(self._folder / "nvidia-cuda-mps-control"),
            )
            options["devices"] = None
        if plan["kind"] in ("tune", "optuna"):  # They continue from Tune's or Optuna's own record of the sweep.
            number = sum(1 for _ in self._folder.glob("told-*.jsonl"))
            return FluidExecutor(run_dir=self._run.with_name(f"run-{number}"), **options)
        if not resumes:
            return FluidExecutor(run_dir=self._run, **options)
        return FluidExecutor.resume(self._run, **options)

    def work(self, executor: FluidExecutor) -> None:
        """Submits what was not submitted yet, makes requests, and waits for all trials."""
        if self._plan["kind"] == "tune":
            return torture_search.run_tune(self._plan, self._folder, executor, self._told)
        if self._plan["kind"] == "optuna":
            return torture_search.run_optuna(self._plan, self._folder, executor, self._draws)
        handles = {handle.name: handle for handle in executor.handles}
        for handle in handles.values():
            self._read(handle)
        waiting = [name for name in self._plan["groups"] if name not in handles]
        left = self._plan["requests"] - sum("done" in entry for entry in self._made)
        while waiting or left > 0:
            if waiting and (not handles or self._draws.random() < 0.4):
                name = waiting.pop(0)
                handles[name] = self._submit(executor, name)
            elif left > 0:
                left -= 1
                self._request(executor, handles)
            time.sleep(self._draws.expovariate(4.0))
        for handle in handles.values():
            handle.wait()
        for reader in self._readers:
            reader.join()
        for handle in handles.values():
            if handle.name in self._read_here:  # A reader has ended with its group, which may have grown since.
                for result in handle.results():
                    Told(self._told, AT_THE_END).on_result(result)
        for trial_id, future in self._calls:
            self._told.write(called=trial_id, answer=answer_of(future))
        for name, handle in handles.items():
            states = {trial_id: str(state) for trial_id, state in handle.states.items()}
            failures = {trial_id: failure.message for trial_id, failure in handle.failures.items()}
            self._told.write(group=name, states=states, failures=failures, makespan=handle.makespan)

    def report(self) -> None:
        """Writes down what Fluid says of a session that has ended: times in seconds."""
        if self._plan["kind"] in ("tune", "optuna"):
            return
        run = load_run(self._run)
        self._told.write(
            report={
                "makespan": run.makespan, "wall": run.wall, "held": run.paid.held, "busy": run.paid.busy,
                "utilisation": run.timeline.utilisation, "device_seconds": run.timeline.device_seconds,
            },
            iterations={
                trial.trial_id: [trial.iterations, trial.seconds] for group in run.groups for trial in group.trials
            },
        )  # fmt: skip

    def _submit(self, executor: FluidExecutor, name: str) -> Any:
        trials = [make_trial(fields, str(self._folder / "notes")) for fields in self._plan["groups"][name]]
        self._requests.write(what="submit", group=name)
        listens = self._draws.random() < 0.5
        listener = Told(self._told, "listener") if listens else None
        handle = executor.submit_trialgroup(TrialGroup(trials, name=name), listener)
        self._requests.write(what="submit", group=name, done=True)
        if not listens:
            self._read(handle)
        return handle

    def _read(self, handle: Any) -> None:
        told = Told(self._told, "results")
        self._read_here.add(handle.name)

        def read() -> None:
            try:
                for result in handle.results():
                    told.on_result(result)
            except FluidError as error:
                self._told.write(broken=str(error))

        self._readers.append(threading.Thread(target=read, daemon=True))
        self._readers[-1].start()

    # -- requests --------------------------------------------------------------------------------------------

    def _request(self, executor: FluidExecutor, handles: dict[str, Any]) -> None:
        from torture_plan import REQUESTED_FAULTS, REQUESTS, trial

        what = self._draws.choices(list(REQUESTS), list(REQUESTS.values()))[0]
        handle = handles[self._draws.choice(sorted(handles))]
        known = [fields["id"] for fields in self._plan["groups"][handle.name]]
        known += [entry["fields"]["id"] for entry in self._made if entry["what"] == "add" and "done" in entry
                  and entry["group"] == handle.name]  # fmt: skip
        trial_id = self._draws.choice(known)
        facts: dict[str, Any] = {"what": what, "trial": trial_id, "group": handle.name}
        if what == "extend":
            facts["by"] = self._draws.randint(1, 8)
        elif what == "add":
            number = self._draws.randrange(1_000_000)
            seed = f"{self._plan['seed']}/{handle.name}-a{number}"
            facts["fields"] = trial(self._draws, seed, self._plan["kind"], [])
        elif what in REQUESTED_FAULTS:
            facts["device"] = self._draws.randrange(self._plan["devices"])
        self._requests.write(**facts)
        try:
            self._make(executor, handle, facts)
        except InvalidFieldError as error:
            self._requests.write(**facts, refused=str(error))
        else:
            self._requests.write(**facts, done=True)
            self._made.append({**facts, "done": True})

    def _make(self, executor: FluidExecutor, handle: Any, facts: dict[str, Any]) -> None:
        what, trial_id = facts["what"], facts["trial"]
        if what == "extend":
            handle.extend(trial_id, facts["by"])
        elif what == "stop":
            handle.stop(trial_id)
        elif what == "stop_now":
            handle.stop(trial_id, now=True)
        elif what == "forget":
            handle.forget(trial_id)
        elif what == "add":
            handle.add(make_trial(facts["fields"], str(self._folder / "notes")))
        elif what == "call":
            self._calls.append((trial_id, handle.call(trial_id, "poke", 7)))
        elif what == "remove_device" and len(executor.devices) > 1:
            executor.remove_device(facts["device"])
        elif what == "drain_device" and len(executor.devices) > 1:
            executor.drain(facts["device"], self._draws.uniform(0.0, 5.0))
        elif what == "add_device" and facts["device"] not in {device.index for device in executor.devices}:
            executor.add_device(Device(facts["device"], kind="cpu"))


def main() -> int:
    """Runs a driver; returns its exit status."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    faulthandler.register(signal.SIGUSR2, file=(folder / f"stacks-{number}.txt").open("w"), all_threads=True)
    logging.basicConfig(format="%(asctime)s %(message)s")
    driver = Driver(folder, number)
    try:
        executor = driver.open()
    except InvalidFieldError as error:
        print("refused:", error, file=sys.stderr)
        return REFUSED
    except (FluidError, OSError) as error:
        print(f"not begun: {type(error).__name__}: {error}", file=sys.stderr)
        return BROKEN
    try:
        with executor:
            driver.work(executor)
        driver.report()
    except (FluidError, KeyboardInterrupt, OSError) as error:
        print(f"broken: {type(error).__name__}: {error}", file=sys.stderr)
        return BROKEN
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
