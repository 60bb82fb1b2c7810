"""Browser: a headless Chromium, told what to do over its debugging pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from typing import Any, Self

COMMAND = shutil.which("chromium") or shutil.which("chromium-browser")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
MODIFIER_CTRL = 2


class BrowserError(Exception):
    """The browser refused a command, or a script in the page failed."""


class Browser:
    """One tab; use as an async context manager. `complaints` are errors that the page caused."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None

    async def __aenter__(self) -> Self:
        assert COMMAND is not None, "the test is skipped without"
        self._folder = tempfile.TemporaryDirectory(prefix="legato-browser-")
        told_read, told_write = os.pipe()
        said_read, said_write = os.pipe()
        words = (
            *(
                COMMAND,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ),
            *("--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "--no-first-run"),
            *("--disable-extensions", "--disable-background-networking", "--no-proxy-server"),
            "about:blank",
        )
        # It speaks on descriptors 3 and 4.
        line = f'exec "$@" 3<&{told_read} 4>&{said_write}'
        self._process = await asyncio.create_subprocess_exec(
            *("bash", "-c", line, "bash", *words),
            pass_fds=(told_read, said_write),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(told_read)
        os.close(said_write)
        self._tell = os.fdopen(told_write, "wb", buffering=0)
        self._reader = asyncio.StreamReader(limit=1 << 26)
        said = os.fdopen(said_read, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), said
        )
        self._listening = asyncio.create_task(self._listen())
        try:
            await self._attach()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _attach(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            target = await self._call("Target.createTarget", url="about:blank")
            attached = await self._call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                await self._call(f"{domain}.enable")

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()
        self._transport.close()
        self._tell.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._folder.cleanup()

    async def open(self, url: str, width: int, height: int) -> None:
        """Loads the page in a window of that size, in CSS pixels."""
        await self.resize(width, height)
        await self._call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        """A phone's where it is narrow."""
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )

    async def run(self, script: str) -> Any:  # noqa: ANN401  # JSON
        """An expression's value; promises are waited for."""
        result = await self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def until(self, script: str, timeout_s: float = 20.0) -> None:
        """The expression becomes true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.run(script):  # noqa: ASYNC110  # the state is remote
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"not true within {timeout_s:g} s: {script}") from None

    async def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """One key, by its name and its number."""
        for kind in ("rawKeyDown", "keyUp"):
            await self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
            )

    async def type(self, text: str) -> None:
        """Where the focus is."""
        await self._call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        size = await self.run("[document.documentElement.clientWidth, document.body.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1] + 10, "scale": 1}
        shot = await self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        self._tell.write(json.dumps(message).encode() + b"\0")
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await answered
        finally:
            del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                waiting = self._answers.get(message["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                continue
            self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
