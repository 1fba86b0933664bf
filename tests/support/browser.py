"""A page in a real browser without a window: Chromium, spoken to in its DevTools protocol over a pair of pipes.

That needs no package beside the browser itself: `apt-get install chromium`, or CHROMIUM=/path/to/chrome.
"""

import base64
import json
import os
import select
import shutil
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "no Chromium here: install it (apt-get install chromium), or name it (CHROMIUM=/path/to/chrome)"
PATIENCE = 60  # seconds; a browser that starts on a busy machine may need ten
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    " ": 32,
    "Enter": 13,
}


def executable():
    """Where the browser is, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(folder):
    """A tab to load pages in; the browser keeps its own files in `folder`, and ends with the block."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-background-networking", "about:blank"]
    program = executable()
    with open(folder / "stderr", "wb") as errors:
        # the browser reads from its file descriptor 3 and writes to 4; high numbers first, which may be 3 and 4 themselves
        high = [os.dup2(end, number) for end, number in ((to_browser, 103), (from_browser, 104))]
        actions = [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4), (os.POSIX_SPAWN_DUP2, errors.fileno(), 2)]
        actions += [(os.POSIX_SPAWN_DUP2, errors.fileno(), 1)]
        process = os.posix_spawn(program, [program, *flags], os.environ, file_actions=actions)
    for end in (to_browser, from_browser, *high):
        os.close(end)
    tab = Tab(commands, answers)
    try:
        tab.attach()
        yield tab
    finally:
        try:
            tab.call("Browser.close", session=False)
        finally:
            os.close(commands)
            os.close(answers)
            os.waitpid(process, 0)


class Tab:
    """One page. ``problems`` are what its console complained of, and requests that it made of a network."""

    def __init__(self, commands, answers):
        self.commands, self.answers = commands, answers
        self.number, self.session, self.rest = 0, None, b""
        self.problems, self.requests = [], []

    def attach(self):
        targets = self.call("Target.getTargets", session=False)["targetInfos"]
        (target,) = (t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", session=False, targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, session=True, **parameters):
        """Have the browser do something; what it answers."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session and self.session:
            message["sessionId"] = self.session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self.commands, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE} seconds"
            received = os.read(self.answers, 1 << 20)
            assert received, "the browser ended"
            self.rest += received
        content, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(content)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, method, event):
        if method == "Runtime.exceptionThrown":
            self.problems.append(event["exceptionDetails"])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(event["args"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    # What a person does.

    def open(self, path):
        """Load a file, and wait until its script is done."""
        self.problems, self.requests = [], []
        self.call("Page.navigate", url=path.as_uri())
        self.wait(f"location.href === {json.dumps(path.as_uri())} && document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition):
        """Until it is true in the page."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(condition):
            assert time.monotonic() < deadline, f"after {PATIENCE} seconds it is still not so: {condition}; {self.problems}"
            time.sleep(0.02)

    def value(self, expression):
        """Of JavaScript, as JSON."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, *keys):
        """On the keyboard, one after the other."""
        for key in keys:
            parameters = {"key": key, "code": key.replace(" ", "Space"), "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": {"Enter": "\r"}.get(key, key)} if key in (" ", "Enter") else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **parameters, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def size(self, width, height=900, phone=False):
        """Of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefers(self, **features):
        """Media features, such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def picture(self, **options):
        """Of what is in the window: a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"])
