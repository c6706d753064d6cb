"""A real browser without a window, driven over its debugging pipe: messages are JSON, each ended by a zero byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One page of a browser."""

    def __init__(self, commands: int, answers: int, url: str) -> None:
        self._commands = commands
        self._answers = answers
        self._held = b""
        self._count = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Returns when it is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not so within {seconds} s: {expression}"
            time.sleep(0.1)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            pass  # an event
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            more = os.read(self._answers, 65536)
            assert more, "the browser has ended"
            self._held += more
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextlib.contextmanager
def browsing(url: str, folder: Path) -> Iterator[Page]:
    """A page in a browser of its own; what the browser says is in `folder`."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--remote-debugging-pipe"]
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            # It reads from descriptor 3 and writes to 4.
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=log,
            stderr=log,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(commands, answers, url)
    finally:
        process.kill()
        process.wait(10)
        os.close(commands)
        os.close(answers)
