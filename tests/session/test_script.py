"""What a script sets before it submits, as its trials find it: whole scripts, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import run_script

#: Sets what a script may set, and tells, in whatever process, what is in force. Each of the values differs from that
#: of a fresh process.
SETTINGS = """
import decimal, json, logging, multiprocessing, pickle, sys, warnings
import cloudpickle
import matplotlib, numpy, pandas, sklearn, sklearn.exceptions, torch
import fluid

class Doubtful(UserWarning):
    pass

def set_all():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.multiprocessing.set_sharing_strategy("file_system")
    numpy.seterr(all="raise")
    decimal.getcontext().prec = 50
    decimal.getcontext().traps[decimal.Inexact] = True
    pandas.set_option("display.max_rows", 7)
    sklearn.set_config(transform_output="pandas")
    matplotlib.use("svg")
    matplotlib.rcParams["figure.dpi"] = 77.0
    sys.setrecursionlimit(5000)
    multiprocessing.set_start_method("spawn", force=True)
    warnings.simplefilter("error", Doubtful)
    warnings.filterwarnings("error", "not so .*", sklearn.exceptions.ConvergenceWarning)
    logging.getLogger("third.part").setLevel(logging.DEBUG)
    logging.getLogger("sklearn").setLevel(logging.ERROR)
    logging.disable(logging.DEBUG)

def raises(message, category):
    try:
        warnings.warn(message, category)
    except Warning:
        return True
    return False

def seen():
    import matplotlib, numpy, pandas, sklearn.exceptions, torch
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "deterministic": [torch.are_deterministic_algorithms_enabled(),
                          torch.is_deterministic_algorithms_warn_only_enabled()],
        "matmul": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32],
        "reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
                  torch.backends.cudnn.allow_tf32],
        "sdp": torch.backends.cuda.flash_sdp_enabled(),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "numpy": numpy.geterr(),
        "decimal": [decimal.getcontext().prec, decimal.getcontext().traps[decimal.Inexact]],
        "pandas": pandas.get_option("display.max_rows"),
        "sklearn": sklearn.get_config()["transform_output"],
        "matplotlib": [matplotlib.get_backend(), matplotlib.rcParams["figure.dpi"]],
        "recursion": sys.getrecursionlimit(),
        "start method": multiprocessing.get_start_method(),
        "warnings": [raises("any", Doubtful), raises("any", UserWarning),
                     raises("not so fast", sklearn.exceptions.ConvergenceWarning),
                     raises("any", sklearn.exceptions.ConvergenceWarning)],
        "levels": [logging.getLogger(name).level for name in ("", "third.part", "sklearn")],
        "disabled": logging.root.manager.disable,
        "argv": sys.argv[1:],
        "file": sys.modules["__main__"].__file__,
    }
"""


@pytest.mark.slow
def test_a_trial_finds_what_the_script_has_set(tmp_path: Path) -> None:
    """In lanes that have loaded the modules, and in those that load them in the trial, after it was all set."""
    found = run_script(
        tmp_path,
        SETTINGS
        + """
def train(config):
    yield {"seen": seen()}

def train_late(config):
    late = [name for name in ("pandas", "sklearn", "matplotlib") if name not in sys.modules]
    yield {"seen": pickle.loads(config["seen"])(), "late": late}

def run(trainable, config):
    with fluid.FluidExecutor("local", 1, verbose=0) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(trainable, config)]))
        (result,) = handle.results()
    return dict(result.metrics)

if __name__ == "__main__":
    before = seen()
    set_all()
    found = {"before": before, "alone": seen(), "loaded": run(train, {})}
    found["late"] = run(train_late, {"seen": cloudpickle.dumps(seen)})  # Of which nobody knows what it imports.
    with open("found.json", "w") as file:
        json.dump(found, file)
""",
        "--flag",
        "value",
    )
    alone, before = found["alone"], found["before"]
    assert {name for name in alone if alone[name] == before[name]} == {"argv", "file"}, "else the test shows nothing"
    assert found["loaded"]["seen"] == alone
    assert found["late"] == {"seen": alone, "late": ["pandas", "sklearn", "matplotlib"]}
    assert alone["argv"] == ["--flag", "value"]


def test_what_is_set_between_two_submissions_is_of_the_second(tmp_path: Path) -> None:
    """Also where both share a lane, which has the first one's values; each goes by what was set as it was submitted."""
    found = run_script(
        tmp_path,
        """
        import json, logging, warnings
        import numpy
        import fluid

        def train(config):
            handlers = [type(each).__name__ for each in logging.getLogger("part").handlers]
            first = warnings.filters[1][0]
            yield {"seen": [numpy.geterr()["divide"], logging.getLogger("part").level, handlers, first]}

        if __name__ == "__main__":
            with fluid.FluidExecutor("local", 1, verbose=0) as executor:
                def run(name):
                    handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train)], name))
                    return [result.metrics["seen"] for result in handle.results()]
                handler = logging.NullHandler()
                found = {"1 plain": run("1")}
                with numpy.errstate(divide="raise"), warnings.catch_warnings():
                    warnings.simplefilter("error")
                    logging.getLogger("part").setLevel(5)
                    logging.getLogger("part").addHandler(handler)
                    found["2 set"] = run("2")
                logging.getLogger("part").setLevel(0)
                logging.getLogger("part").removeHandler(handler)
                found["3 plain"] = run("3")
            with open("found.json", "w") as file:
                json.dump(found, file)
        """,
    )
    assert found["2 set"] == [["raise", 5, ["DriversHandler"], "error"]]
    assert found["1 plain"] == found["3 plain"] == [["warn", 0, [], found["1 plain"][0][3]]]
    assert found["1 plain"][0][3] != "error"


def test_objects_that_raise_and_cannot_be_pickled_break_no_submission(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import json, logging, sys, threading, types, warnings
        import numpy, pandas
        import fluid

        class Hostile:
            def __getattribute__(self, name):
                raise SystemExit(3)

        class Level(int):
            def __int__(self):
                raise RuntimeError("level")

        def train(config):
            yield {"divide": numpy.geterr()["divide"]}

        if __name__ == "__main__":
            numpy.seterr(divide="raise")
            pandas.options.display.float_format = lambda value, lock=threading.Lock(): str(value)
            sys.argv = ["x", Hostile(), "y"]
            logging.root.addHandler(logging.NullHandler(Level(3)))
            with fluid.FluidExecutor("local", 1, verbose=0) as executor:
                sys.modules["sklearn"] = Hostile()
                sys.modules["decimal"] = types.ModuleType("decimal")
                handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train)]))
                found = [each.metrics["divide"] for each in handle.results()]
            with open("found.json", "w") as file:
                json.dump({"found": found}, file)
        """,
    )
    assert found["found"] == ["raise"]


NAMES = """
import concurrent.futures, json, multiprocessing, pickle, sys
import fluid

FACTOR = 1

def square(x):
    return FACTOR * x * x

class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and other.x == self.x

    def moved(self):
        return Point(self.x + FACTOR)

def train(config):
    import torch
    from torch.utils.data import DataLoader
    found = {}
    for how in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(how)
        with context.Pool(1) as pool:
            found[how] = pool.map(square, range(3))
            found[f"{how}, objects"] = [point.x for point in pool.map(Point.moved, [Point(1)])]
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            found[f"{how}, executor"] = list(pool.map(square, range(3)))
    found["pickle"] = pickle.loads(pickle.dumps(Point(5))) == Point(5)
    found["main"] = sys.modules["__main__"].square is square
    loader = DataLoader(Points(), num_workers=1, multiprocessing_context="spawn", collate_fn=collate)
    found["loader"] = [batch for batch in loader]
    yield {"found": found}

def points():
    global Points
    import torch.utils.data

    class Points(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return square(index)

    Points.__qualname__ = "Points"

def collate(batch):
    return [float(x) for x in batch]

points()
"""
SUBMIT = """
    FACTOR = 3
    with fluid.FluidExecutor("local", 1, verbose=0, max_failures=0) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train)]))
        results = [result.metrics["found"] for result in handle.results()]
        print([failure.message for failure in handle.failures.values()])
    with open("found.json", "w") as file:
        json.dump({"found": results}, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"], ids=["guarded", "not guarded"])
def test_process_pools_and_workers_in_a_trial_find_functions_and_classes_of_the_script(
    tmp_path: Path, guard: str
) -> None:
    """With what the main block has set; and in a script without a guard, which is not run again."""
    found = run_script(tmp_path, NAMES + guard + SUBMIT)
    squares, expected = [0, 3, 12], {}
    for how in ("fork", "spawn", "forkserver"):
        expected |= {how: squares, f"{how}, objects": [4], f"{how}, executor": squares}
    expected |= {"pickle": True, "main": True, "loader": [[0.0], [3.0]]}
    assert found["found"] == [expected], found["stdout"]


@pytest.mark.slow
def test_a_script_without_a_file_has_names_too(tmp_path: Path) -> None:
    """As a notebook, or a program that is read from standard input."""
    text = "import runpy, sys\nprogram = open('program.py').read()\nimport subprocess\n"
    text += "done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)\n"
    text += "print(done.stderr)\nsys.exit(done.returncode)\n"
    (tmp_path / "program.py").write_text(NAMES + "if True:" + SUBMIT)
    found = run_script(tmp_path, text)
    assert found["found"][0]["spawn"] == [0, 3, 12], found["stdout"]


def test_what_a_text_names_is_there_and_what_nothing_names_is_said_to_be_missing(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import importlib, json
        import fluid

        class Named:
            width = 8

        class Large:
            data = bytes(1 << 21)

        class Other:
            pass

        TARGETS = ["__main__.Named", "__main__.Large"]

        def train(config):
            found = []
            for target in [*TARGETS, "".join(reversed("rehtO.__niam__"))]:
                try:
                    found.append(getattr(importlib.import_module("__main__"), target.split(".")[1]).width)
                except AttributeError as error:
                    found.append(str(error))
            yield {"found": found}

        if __name__ == "__main__":
            with fluid.FluidExecutor("local", 1, verbose=0) as executor:
                handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train)]))
                found = [each.metrics["found"] for each in handle.results()]
            with open("found.json", "w") as file:
                json.dump({"found": found}, file)
        """,
    )
    missing = "module '__main__' has no attribute '{}': the trainable does not refer to it"
    assert found["found"] == [[8, missing.format("Large"), missing.format("Other")]]


LOGS = """
import json, logging, sys, warnings
import fluid

def train(config):
    log = logging.getLogger("my.app")
    log.debug("too fine")
    log.info("training with %s", config["x"], extra={"lane": object()})
    logging.getLogger("my.other").info("not of the root's handlers")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("went wrong")
    warnings.warn("doubtful")
    yield {"x": config["x"]}

class Own(logging.Handler):
    def emit(self, record):
        record.exc_info, record.args  # As any handler may ask.
        LINES.append(f"{record.trial_id} {record.name} {record.levelname} {record.getMessage()}")
        if record.getMessage() == "went wrong":
            LINES.append(record.exc_text.splitlines()[-1])

LINES = []

def run(**options):
    with fluid.FluidExecutor("local", 1, run_dir="run", **options) as executor:
        trials = [fluid.Trial(train, {"x": 1}, trial_id="a"), fluid.Trial(train, {"x": 2}, trial_id="b")]
        executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
"""


def test_records_of_trials_reach_the_handlers_of_the_script(tmp_path: Path) -> None:
    """Once each, with the trial's id; they are on the terminal as the script's handlers have it, and nowhere else."""
    found = run_script(
        tmp_path,
        LOGS
        + """
if __name__ == "__main__":
    terminal = logging.StreamHandler()
    terminal.setFormatter(logging.Formatter("MINE %(trial_id)s %(message)s", defaults={"trial_id": "-"}))
    logging.basicConfig(level=logging.INFO, handlers=[terminal, logging.FileHandler("mine.log"), Own()])
    logging.captureWarnings(True)
    other = logging.getLogger("my.other")
    other.propagate = False
    other.addHandler(Own(logging.INFO))
    run(verbose=1)
    with open("found.json", "w") as file:
        json.dump({"lines": LINES}, file)
""",
    )
    for trial, x in (("a", 1), ("b", 2)):
        lines = [line for line in found["lines"] if line.startswith(f"{trial} ")]
        assert lines[:3] == [
            f"{trial} my.app INFO training with {x}",
            f"{trial} my.other INFO not of the root's handlers",
            f"{trial} my.app ERROR went wrong",
        ]
        assert len(lines) == 4 and "UserWarning: doubtful" in lines[3]
        assert found["stderr"].count(f"MINE {trial} training with {x}\n") == 1
        text = (tmp_path / "run" / "trials" / trial / "output.log").read_text()
        assert f"INFO:my.app:training with {x}\n" in text and "ZeroDivisionError" in text
        assert (tmp_path / "mine.log").read_text().count(f"training with {x}\n") == 1
    assert found["lines"].count("ZeroDivisionError: division by zero") == 2
    assert "too fine" not in found["stderr"]
    assert (found["stdout"] + found["stderr"]).count("training with") == 2


def test_a_script_that_configures_no_logging_has_the_warnings_of_trials_in_their_output(tmp_path: Path) -> None:
    found = run_script(tmp_path, LOGS + "\nif __name__ == '__main__':\n    run(verbose=0)\n")
    assert "training" not in found["stderr"] and "went wrong" not in found["stderr"]
    text = (tmp_path / "run" / "trials" / "a" / "output.log").read_text()
    assert text.startswith("went wrong\nTraceback") and "training" not in text


@pytest.mark.slow
def test_a_trial_that_configures_logging_keeps_what_it_configures(tmp_path: Path) -> None:
    text = """
    import json, logging
    import fluid

    def train(config):
        logging.basicConfig(filename=config["file"], level=20, force=config["force"], format="OWN %(message)s")
        logging.info("of the trial")
        yield {"x": 1}

    if __name__ == "__main__":
        if CONFIGURES:
            logging.basicConfig(filename="script.log", level=logging.INFO, format="SCRIPT %(message)s")
        with fluid.FluidExecutor("local", 1, verbose=0) as executor:
            import os
            config = {"file": os.path.abspath("trial.log"), "force": CONFIGURES}
            executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train, config)])).wait()
    """
    run_script(tmp_path, text.replace("CONFIGURES", "False"))
    assert (tmp_path / "trial.log").read_text() == "OWN of the trial\n"
    (tmp_path / "trial.log").unlink()
    run_script(tmp_path, text.replace("CONFIGURES", "True"))
    assert (tmp_path / "trial.log").read_text() == "OWN of the trial\n"
    assert "of the trial" not in (tmp_path / "script.log").read_text()


@pytest.mark.slow
def test_a_flood_of_records_ends_and_says_how_many_were_dropped(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import json, logging, resource, threading
        import fluid

        NUMBER = 100_000
        SEEN = []

        def train(config):
            for number in range(NUMBER):
                logging.info("record %d of many", number)
            yield {"x": 1}

        class Held(logging.Handler):
            def emit(self, record):
                if threading.current_thread() is not threading.main_thread():
                    released.wait()
                SEEN.append(record.getMessage())

        if __name__ == "__main__":
            released = threading.Event()
            logging.basicConfig(level=logging.INFO, handlers=[Held()])
            with fluid.FluidExecutor("local", 1, verbose=0) as executor:
                handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train, trial_id="a")]))
                assert handle.wait(), "a handler that blocks holds no trial up"
                before = len(SEEN)
                released.set()
            told = [line for line in SEEN if "were dropped" in line]
            with open("found.json", "w") as file:
                json.dump({"before": before, "seen": len(SEEN) - len(told), "told": told}, file)
        """,
    )
    assert found["before"] == 0
    assert 0 < found["seen"] < 100_000
    assert len(found["told"]) == 1
    assert int(found["told"][0].split()[0]) == 100_000 - found["seen"]


def test_a_handler_that_raises_and_calls_fluid_ends_nothing(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import json, logging, sys
        import fluid

        STATES = []

        def train(config):
            for step in range(3):
                logging.info("step %d", step)
                yield {"x": step}

        class Hostile(logging.Handler):
            def emit(self, record):
                if hasattr(record, "trial_id"):
                    STATES.append(handle.wait(0.001))
                    sys.exit(3)

        if __name__ == "__main__":
            logging.basicConfig(level=logging.INFO, handlers=[Hostile()])
            with fluid.FluidExecutor("local", 1, verbose=0) as executor:
                handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train, budget=3)]))
                assert handle.wait()
                states = [state.value for state in handle.states.values()]
            with open("found.json", "w") as file:
                json.dump({"states": states, "heard": len(STATES)}, file)
        """,
    )
    assert found["states"] == ["DONE"]
    assert found["heard"] == 3


@pytest.mark.slow
def test_a_sweep_that_is_resumed_has_the_settings_of_the_script_that_resumes(tmp_path: Path) -> None:
    text = """
    import json, os
    import numpy
    import fluid

    def train(config):
        for step in range(2):
            yield {"divide": numpy.geterr()["divide"]}
            while step == 0 and not os.path.exists(config["resumed"]):
                pass

    def write(found):
        with open("found.json", "w") as file:
            json.dump({"found": found}, file)

    if __name__ == "__main__":
        numpy.seterr(divide=DIVIDE)
        if DIVIDE == "ignore":
            with fluid.FluidExecutor("local", 1, verbose=0, run_dir="run") as executor:
                trial = fluid.Trial(train, {"resumed": os.path.abspath("resumed")}, budget=2, trial_id="a")
                handle = executor.submit_trialgroup(fluid.TrialGroup([trial]))
                write([next(iter(handle.results())).metrics["divide"]])
                os._exit(0)
        open("resumed", "w").close()
        with fluid.FluidExecutor.resume("run", backend="local", devices=1, verbose=0) as executor:
            (handle,) = executor.handles
            write([each.metrics["divide"] for each in handle.results()])
    """
    assert run_script(tmp_path, text.replace("DIVIDE", "'ignore'"))["found"] == ["ignore"]
    assert run_script(tmp_path, text.replace("DIVIDE", "'raise'"))["found"][-1] == "raise"
