"""A script as a trainable: each report is an iteration, and what it writes as a checkpoint is its state."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fluid._private_files import make_folder, open_private
from fluid.errors import FluidError, InvalidFieldError, parse_duration, require_number
from fluid.keeping import value_of
from fluid.processes.children import describe_exit
from fluid.scripts.checkpoint import COPY, Signature, copy_steady, put, remove, signature_of
from fluid.scripts.command import OWN, Command, filled, require_placeholders
from fluid.scripts.process import Said, ScriptProcess
from fluid.scripts.readers import FILES, POLLED, LineReader, Origin, compile_patterns, parse_origins
from fluid.trainables.driver_link import driver_link
from fluid.trainables.resident import NoIterationLeftError, NotSavableError
from fluid.trainables.script_link import CHECKPOINT_DIR, TRIAL_DIR, plain
from fluid.user_values import dotted

#: Seconds that a script has from SIGTERM to SIGKILL.
GRACE_S = 10.0
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
#: Tells the hook that wandb.log is read.
_WANDB = "FLUID_SCRIPT_WANDB"
#: In Fluid's checkpoint: the value of the iteration key in the last report that was counted, and how it was saved.
_FACTS = "script.json"
#: Above so many times the usual step of the iteration key, a report does not follow the one before.
_MOST_STRIDES = 1.5
#: Most characters of a script's last lines in an error.
_LONGEST_TAIL = 2000


class ScriptFailedError(FluidError, RuntimeError):
    """A script has ended with another status than 0, or without a report; the message has its last lines."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, and how it is heard.

    Attributes:
        command: its command.
        metrics: the sweep's metrics; a report has all of them.
        budget: most iterations of a trial.
        origins: how reports may come.
        patterns: regular expressions for lines of output.
        iteration_key: a field of reports that counts up; ``None`` if they count by their order.
        checkpoint_flag: words for the command of a trial that goes on from a checkpoint; none if the script finds it
            by itself; ``None`` if it does not go on from one.
        grace_s: seconds from SIGTERM to SIGKILL.
    """

    command: Command
    metrics: tuple[str, ...]
    budget: int
    origins: tuple[Origin, ...]
    patterns: tuple[str, ...] = ()
    iteration_key: str | None = None
    checkpoint_flag: tuple[str, ...] | None = None
    grace_s: float = GRACE_S
    #: Placeholders that any text of it may have.
    known: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def checked(
        cls,
        words: Sequence[str],
        space: Mapping[str, Any],
        *,
        metric: str | Sequence[str],
        budget: int,
        metric_from: Sequence[str] = (),
        metric_regex: Sequence[str] = (),
        iteration_key: str | None = None,
        checkpoint_flag: str | None = None,
        config_in_env: bool = False,
        grace_s: float | str = GRACE_S,
        chdir: bool = False,
    ) -> Script:
        """What a user asks for, checked.

        Raises:
            InvalidFieldError: something cannot be used; the error names it as ``fluid run`` has it.
        """
        names = [name for name, _ in dotted(space)]
        known = (*OWN, *names)
        command = Command.checked(words, names, in_environment=config_in_env)
        program = command.template[0]
        if "{" not in program and shutil.which(program) is None:
            hint = f": did you mean python {program}?" if program.endswith(".py") else ""
            hint = ": give its words, without quotes around all of them" if " " in program else hint
            raise InvalidFieldError("command", program, f"is no program that can be found and executed{hint}")
        if (file := _file_of(command.template)) is not None and not Path(file).exists():
            raise InvalidFieldError("command", file, "is no file that is there")
        if chdir:  # From there, a relative path leads elsewhere.
            moved = (file, program if os.sep in program and "{" not in program else None)
            words = [os.path.abspath(word) if any(word is one for one in moved) else word for word in command.template]
            command = Command(tuple(words))
        flag = None if checkpoint_flag is None else tuple(shlex.split(checkpoint_flag))
        require_placeholders("checkpoint_flag", flag or (), known)
        if flag is not None and iteration_key is None:
            reason = "needs --iteration-key, a field of the reports that counts up, such as epoch: what iteration a"
            raise InvalidFieldError("checkpoint_flag", checkpoint_flag, f"{reason} checkpoint is of is known by that")
        compile_patterns(metric_regex)
        seconds = parse_duration("grace_s", grace_s) if isinstance(grace_s, str) else grace_s
        return cls(
            command=command,
            metrics=(metric,) if isinstance(metric, str) else tuple(metric),
            budget=budget,
            origins=parse_origins(metric_from, known, own_folder=chdir),
            patterns=tuple(metric_regex),
            iteration_key=iteration_key,
            checkpoint_flag=flag,
            grace_s=require_number("grace_s", seconds, at_least=0.0),
            known=known,
        )

    @property
    def name(self) -> str:
        """Its file's, or its program's."""
        words = self.command.template
        module = words[words.index("-m") + 1] if "-m" in words[1:-1] else words[0]
        return Path(next(filter(is_file, words), module.rpartition(".")[2])).stem or "script"

    def trainable(self) -> type:
        """The class whose trials run it, of its name."""
        return type(self.name, (ScriptTrial,), {"script": self, "__module__": __name__, "__qualname__": self.name})

    def reports_in(self, metrics: Mapping[str, Any]) -> bool:
        """Whether a mapping has all of the sweep's metrics, as numbers: "loss" may also name a function."""
        values = (value_of(metrics, name) for name in self.metrics)
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


class ScriptTrial:
    """A trial of a script; :meth:`Script.trainable` derives from it."""

    script: ClassVar[Script]
    #: With what the user has begun the sweep, so that advice is in the same terms.
    fluid_command = "fluid run"
    #: What is saved is what the script has written, which may be older than its last report.
    fluid_reports_states = True

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config
        link = driver_link()
        self._folder = os.path.abspath(link.folder)
        make_folder(self._folder)
        self._own = {
            "trial_id": link.trial_id,
            "trial_dir": self._folder,
            "checkpoint": os.path.join(self._folder, "checkpoint"),
            "budget": str(self.script.budget),
            "config_file": os.path.join(self._folder, "config.json"),
        }
        self._is_first_try = not os.path.exists(self._own["config_file"])
        with open_private(self._own["config_file"], "w", encoding="utf-8") as file:
            json.dump(config, file)
        self._process: ScriptProcess | None = None
        #: What ended the last iteration.
        self._last: Said | None = None
        #: Where the state is that it goes on from, and whether ``fluid.report(save=...)`` has written that.
        self._restored, self._is_own_save = "", False
        self._origin = ""
        self._told: set[str] = set()
        self._seen: set[str] = set()
        self._others: dict[str, Any] = {}
        self._reports = 0
        #: The iteration key in the last report that was counted, and in the one before; and in the last one before the
        #: checkpoint was written.
        self._keys: tuple[float | None, float | None] = None, None
        self._keys_at_write: tuple[float | None, float | None] = self._keys
        #: Whether reports may be of iterations that were counted before the script was started.
        self._repeats = False
        self._signature: Signature | None = None
        self._since: int | None = None

    def step(self) -> dict[str, Any]:
        process = self._process or self._start()
        if self._last is not None:
            process.answer(self._last)
        try:
            while (said := process.next()) is not None:
                if self._counts(said):
                    if self._is_beyond():
                        process = self._begin_again(process)
                        continue
                    self._last = said
                    return self._take(said)
                process.answer(said)
            self._last = None
        finally:
            if self._last is None or self._last.waiting is None:
                process.hold()
        raise self._ended(process)

    def unsaved_iterations(self) -> int | None:
        if self._last is not None and self._last.saves and self._last.waiting is not None:
            return 0
        if self._restored and self._reports == 0:
            return 0
        if self.script.checkpoint_flag is None or self._since is None or self._keys[1] is None:
            return None  # By two reports it is known by what the key rises.
        # What was written since the report is of that iteration, too.
        return self._since if signature_of(self._own["checkpoint"]) == self._signature else 0

    def save_checkpoint(self, folder: str) -> None:
        own_save = self._last is not None and self._last.saves and self._last.waiting is not None
        if own_save:
            assert self._last is not None and self._process is not None
            place = os.path.join(folder, COPY)
            os.mkdir(place, 0o700)
            if (error := self._process.save(self._last, place)) is not None:
                raise NotSavableError(f"its save raised {error}")
        elif self._restored and self._reports == 0:
            own_save = self._is_own_save
            put(self._restored, os.path.join(folder, COPY))
        else:
            assert self._process is not None
            copy_steady(self._own["checkpoint"], folder, self._process)
        with open(os.path.join(folder, _FACTS), "w", encoding="utf-8") as file:
            keys = self._keys if own_save or not self.unsaved_iterations() else self._keys_at_write
            json.dump({"keys": keys, "own_save": own_save}, file)

    def load_checkpoint(self, folder: str) -> None:
        with open(os.path.join(folder, _FACTS), encoding="utf-8") as file:
            facts = json.load(file)
        self._keys = self._keys_at_write = tuple(facts["keys"])
        self._is_own_save, self._repeats = facts["own_save"], True
        self._restored = self._own["checkpoint"] + (".saved" if self._is_own_save else "")
        put(os.path.join(folder, COPY), self._restored)
        self._signature, self._since = signature_of(self._own["checkpoint"]), 0

    @staticmethod
    def fluid_saved_path(folder: str) -> Path:
        """Where a checkpoint has what the script wrote, for who loads it outside of a trial."""
        return Path(folder, COPY)

    def cleanup(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.end(self.script.grace_s, self._last)
        if self._is_own_save:
            remove(self._restored)

    # -- its process ---------------------------------------------------------------------------------------

    def _start(self) -> ScriptProcess:
        script = self.script
        words = script.command.words(self._config, self._own)
        environment = {
            "PYTHONUNBUFFERED": "1",  # Else what it prints comes long after, where our hook is not loaded.
            **os.environ,
            "FLUID_CONFIG": json.dumps(self._config),
            "FLUID_TRIAL_ID": self._own["trial_id"],
            "FLUID_CHECKPOINT": self._own["checkpoint"],
            TRIAL_DIR: self._folder,
            "PYTHONPATH": os.pathsep.join(filter(None, [_HOOK, os.environ.get("PYTHONPATH")])),
            _WANDB: "1" if any(origin.kind == "wandb" for origin in script.origins) else "0",
        }
        environment.pop(CHECKPOINT_DIR, None)
        if not self._restored:
            remove(self._own["checkpoint"])  # Of an earlier try, which did not get as far as to be saved.
            if not self._is_first_try:
                advice = " (--checkpoint-flag would have it go on)" if script.checkpoint_flag is None else ""
                text = f"fluid: {script.name} begins again: there is no checkpoint{advice}"
                print(f"{text}; what it has reported before is not counted twice", flush=True)
        elif self._is_own_save:
            environment[CHECKPOINT_DIR] = self._restored
        else:
            words += filled(script.checkpoint_flag or (), self._config, self._own)
        takes_json = any(origin.kind == "json" for origin in script.origins)
        lines = [LineReader(takes_json, compile_patterns(script.patterns)) for _ in range(2)]
        files = [
            (origin.kind, FILES[origin.kind](filled([origin.folder], self._config, self._own)[0], script.metrics))
            for origin in script.origins
            if origin.kind in POLLED
        ]
        for _, reader in files:
            reader.poll()  # What an earlier try has left does not count.

        def read(reader: LineReader, data: bytes, ends: bool) -> Iterator[Said]:
            return (Said(plain(found), "output") for found in reader.feed(data, ends=ends))

        def poll() -> list[Said]:
            return [Said(found, kind) for kind, reader in files for found in reader.poll()]

        self._process = ScriptProcess(
            words,
            environment,
            [lambda data, ends, reader=reader: read(reader, data, ends) for reader in lines],  # type: ignore[misc]
            poll if files else None,
        )
        return self._process

    # -- its reports ---------------------------------------------------------------------------------------

    def _counts(self, said: Said) -> bool:
        """Whether something said is the next iteration's report; keeps what else it says for that."""
        if said.origin not in ("output", *(origin.kind for origin in self.script.origins)):
            return False
        self._seen.update(said.metrics)
        is_report = said.origin == "fluid" or self.script.reports_in({**self._others, **said.metrics})
        if not is_report:
            self._others.update(said.metrics)
            return False
        self._origin = self._origin or said.origin
        if said.origin != self._origin:
            if said.origin not in self._told:
                self._told.add(said.origin)
                print(f"fluid: the same metric also comes by {said.origin}; reports by {self._origin} are counted")
            return False
        return not self._is_repeat(said)

    def _is_repeat(self, said: Said) -> bool:
        """Whether a script that goes on from a checkpoint repeats what was counted before it; notes the key if not."""
        name = self.script.iteration_key
        if name is None:
            return False
        told = {**self._others, **said.metrics}
        key = value_of(told, name)
        if isinstance(key, bool) or not isinstance(key, (int, float)):
            raise ScriptFailedError(f"a report lacks the iteration key {name!r}, as a number: it has {_names(told)}")
        if self._repeats and self._keys[0] is not None and key <= self._keys[0]:
            self._others = {}
            return True
        self._keys = float(key), self._keys[0]
        return False

    def _is_beyond(self) -> bool:
        """Whether the first report of a script that goes on does not follow the last one that was counted.

        It had run on, and written a further checkpoint, before it could be stopped.
        """
        if not self._repeats:
            return False
        self._repeats = False
        key, last = self._keys
        if not self._restored or self._is_own_save or key is None or last is None:
            return False
        _, before = self._keys_at_write
        return before is None or key - last > _MOST_STRIDES * (last - before)

    def _begin_again(self, process: ScriptProcess) -> ScriptProcess:
        """Starts a script whose checkpoint is too new from the beginning, and leaves out what was counted already."""
        print(f"fluid: {self.script.name} begins again: its checkpoint was of a later iteration", flush=True)
        process.end(self.script.grace_s, None)
        self._keys, self._repeats, self._restored = (self._keys[1], None), True, ""
        self._others, self._since, self._is_first_try = {}, None, True
        return self._start()

    def _take(self, said: Said) -> dict[str, Any]:
        self._reports += 1
        metrics, self._others = {**self._others, **said.metrics}, {}
        if self.script.checkpoint_flag is not None:
            found = signature_of(self._own["checkpoint"])
            if found is not None and found != self._signature:
                self._signature, self._since, self._keys_at_write = found, 0, self._keys
            elif self._since is not None:
                self._since += 1
        return metrics

    def _ended(self, process: ScriptProcess) -> Exception:
        """What says how a script has ended."""
        code, name = process.exit_code, self.script.name
        if code == 0 and (self._reports or self._restored):
            return NoIterationLeftError()
        if code == 0:
            ways = [*(origin.kind for origin in self.script.origins), *(["regex"] if self.script.patterns else [])]
            wanted = f"{', '.join(self.script.metrics)} by {', '.join(ways)}"
            seen = f"; what came had {_names(self._seen)}" if self._seen else ""
            what = f"no metric was reported: {name} ended, and has not reported {wanted}{seen}"
            return ScriptFailedError(_with_tail(what, process.lines, least=1))
        assert code is not None
        how = describe_exit(code)
        last = process.errors or process.lines
        text = f"{name} {how}{': ' + last[-1] if last else ''}"
        if code == -signal.SIGKILL:
            text += ", as the kernel does where memory runs out"
        elif last and last[-1].startswith("MemoryError"):
            text += " (out of memory)"
        return ScriptFailedError(_with_tail(text, process.errors or process.lines))


def is_file(word: str) -> bool:
    """Whether a word of a command is that of a script's file, by its suffix, and no text with a placeholder."""
    return word.endswith((".py", ".sh", ".R", ".jl")) and not word.startswith("-") and "{" not in word


def _file_of(words: Sequence[str]) -> str | None:
    """The script's file where a command surely names it, as ``python -u train.py`` does; else ``None``."""
    rest = [word for word in words[1:] if not word.startswith("-")]
    if rest and Path(words[0]).name == "env":
        rest = rest[1:]
    return rest[0] if rest and is_file(rest[0]) else None


def _with_tail(text: str, lines: Sequence[str], least: int = 2) -> str:
    return f"{text}\nits last lines:\n{chr(10).join(lines)[-_LONGEST_TAIL:]}" if len(lines) >= least else text


def _names(metrics: Any) -> str:
    return ", ".join(sorted(map(str, metrics))) or "nothing"
