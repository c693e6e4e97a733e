"""A real headless browser for tests of pages: Chromium, driven over a pipe by the DevTools protocol.

Only the standard library is used. Every page has its own size and colour scheme, and collects what its console says.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Names under which Chromium is installed.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Seconds until the browser counts as hung. No test waits so long.
_PATIENCE_S = 120.0
_BUTTONS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9}


def chromium() -> str | None:
    """The path of the browser; ``None`` if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """A browser process.

    Args:
        folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path) -> None:
        path = chromium()
        assert path is not None, "Chromium is not installed"
        to_read, self._to_write = os.pipe()
        self._from_read, from_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-sandbox"]
        options += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--mute-audio"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

        def use_pipes() -> None:  # Chromium reads commands from 3 and writes answers to 4.
            read, write = os.dup(to_read), os.dup(from_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [path, *options, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=use_pipes,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        self._last = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Calls a method of the protocol; returns its result."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._to_write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def wait_for(self, event: str, session: str) -> dict[str, Any]:
        """Waits for an event of a page; returns its parameters."""
        while True:
            for position, found in enumerate(self.events):
                if found["method"] == event and found.get("sessionId") == session:
                    return dict(self.events.pop(position)["params"])
            self.events.append(self._read())

    @contextlib.contextmanager
    def page(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> Iterator[Page]:
        """Opens an empty page, which is closed at the end."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """Ends the browser and all its processes."""
        with contextlib.suppress(OSError, RuntimeError, EOFError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._to_write)
        os.close(self._from_read)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._from_read], [], [], _PATIENCE_S)[0]:
                raise TimeoutError("the browser does not answer")
            found = os.read(self._from_read, 1 << 20)
            if not found:
                raise EOFError("the browser ended")
            self._unread += found
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """A page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the protocol for this page."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, address: str | Path) -> None:
        """Opens an address or a file, and waits until its first drawing is done."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.call("Page.navigate", url=url)
        self._browser.wait_for("Page.loadEventFired", self._session)
        self.drawn()

    def drawn(self) -> None:
        """Waits until what was asked for has been drawn: filters of many trials wait for the next key a moment."""
        self.run(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 200))"
        )

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The text that an element shows, without empty lines."""
        shown = str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))
        return "\n".join(line.strip() for line in shown.splitlines() if line.strip())

    def texts(self, selector: str) -> list[str]:
        """The text that each of several elements shows."""
        script = f"Array.from(document.querySelectorAll({json.dumps(selector)}), (node) => node.innerText.trim())"
        return list(self.run(script))

    def select(self, selector: str, value: str) -> None:
        """Chooses a value of a select element."""
        script = f"(() => {{ const box = document.querySelector({json.dumps(selector)});"
        self.run(f"{script} box.value = {json.dumps(value)}; box.dispatchEvent(new Event('change')); }})()")
        self.drawn()

    def resize(self, width: int, height: int) -> None:
        """Changes the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of an element in the window, after it was scrolled there."""
        script = f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
        script += " node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
        script += " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        x, y = self.run(script)
        return x, y

    def corner(self, selector: str) -> tuple[float, float]:
        """The upper left corner of an element in the window, after it was scrolled there."""
        self.middle(selector)
        script = f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        x, y = self.run(script + " return [box.left, box.top]; })()")
        return x, y

    def click(self, target: str | tuple[float, float]) -> None:
        """Clicks on an element or on a place in the window."""
        at = self.middle(target) if isinstance(target, str) else target
        self.drag(at, at)

    def move(self, at: tuple[float, float]) -> None:
        """Moves the pointer."""
        self._mouse("mouseMoved", at)
        self.drawn()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the button at one place and lets it go at another."""
        self._mouse("mouseMoved", start)
        self._mouse("mousePressed", start)
        if start != end:
            middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
            self._mouse("mouseMoved", middle)
            self._mouse("mouseMoved", end)
        self._mouse("mouseReleased", end)
        self.drawn()

    def _mouse(self, kind: str, at: tuple[float, float]) -> None:
        pressed = kind != "mouseMoved"
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=at[0],
            y=at[1],
            button="left" if pressed else "none",
            clickCount=1 if pressed else 0,
        )

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of an input."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Delete", 46)
        self.drawn()

    def press(self, key: str, code: int | None = None) -> None:
        """Presses a key."""
        code = _BUTTONS[key] if code is None else code
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )
        self.drawn()

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A picture of the window as PNG, or of the whole page, for which the window is made as high as the page."""
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            self.resize(math.ceil(size["width"]), math.ceil(size["height"]))
            self.drawn()
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    @property
    def problems(self) -> list[str]:
        """What the page reported so far: exceptions, errors and warnings of its console, refused resources."""
        self.call("Runtime.evaluate", expression="0")  # What was reported before this call has come when it returns.
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                thrown = details["exceptionDetails"]
                found.append(thrown.get("exception", {}).get("description", thrown["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(each.get("value", each.get("description"))) for each in details["args"]))
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
        return found


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Starts a browser, which ends at the end."""
    with tempfile.TemporaryDirectory(prefix="fluid-browser-", ignore_cleanup_errors=True) as folder:
        found = Browser(Path(folder))
        try:
            yield found
        finally:
            found.close()
