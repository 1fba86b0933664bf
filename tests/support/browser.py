"""Open pages in Chromium without a window, by means of Playwright.

Playwright's own download of a browser is not needed: it drives the Chromium of the system (`apt-get install chromium`), or the
one that the environment variable CHROMIUM names.
"""

import os
import shutil
from contextlib import contextmanager
from importlib.util import find_spec

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60_000  # milliseconds; a browser may need ten seconds to start on a busy machine


def executable():
    """Return the path of the browser, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def missing():
    """Return what the tests of a page lack, or an empty string."""
    if executable() is None:
        return "no Chromium: install it (apt-get install chromium) or set CHROMIUM=/path/to/chrome"
    return "" if find_spec("playwright") else "no Playwright: install it (pip install playwright)"


@contextmanager
def browser():
    """Yield a tab that can open files. The browser ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], timeout=TIMEOUT
        )
        try:
            yield Tab(chromium.new_page())
        finally:
            chromium.close()


class Tab:
    """One page. ``problems`` holds the errors and warnings of its console, ``requests`` the addresses that it loaded."""

    def __init__(self, page):
        self.page = page
        self.problems, self.requests = [], []
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(request.url))
        self.value = page.evaluate
        self.session = page.context.new_cdp_session(page)

    def _note(self, message):
        if message.type in ("error", "warning", "assert"):
            self.problems.append(message.text)

    def open(self, path):
        """Load a file, and wait until its script is done."""
        self.problems, self.requests = [], []
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    def press(self, *keys):
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    def size(self, width, height=900, phone=False):
        """Set the size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def call(self, method, **parameters):
        """Call a method of the DevTools protocol, for what Playwright cannot do or only in a new context."""
        return self.session.send(method, parameters)
