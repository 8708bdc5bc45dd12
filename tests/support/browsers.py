"""A headless browser, if this machine has one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WAIT_S = 60.0


@contextmanager
def browser(*, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Any]:
    """Chromium, driven by selenium; skips the test where either is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    # Both by path: selenium would else look for them on other hosts.
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if program is None or driver_path is None:
        pytest.skip("no chromium with its chromedriver (Debian: apt install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        yield driver
    finally:
        driver.quit()


class Page:
    """What tests do with the page at /ui."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, view: str = "playground") -> None:
        self.driver.get(f"{self.url}/ui/#{view}")
        self.driver.refresh()  # another view of the same page is no new page

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0]).textContent", selector))

    def fill(self, **fields: object) -> None:
        """Set fields of the form that is shown, by their names."""
        for name, value in fields.items():
            self.script(
                "for (const form of document.querySelectorAll('form.card'))"
                " if (form.checkVisibility() && form[arguments[0]]) {"
                "   form[arguments[0]].value = arguments[1];"
                "   form.dispatchEvent(new Event('change', {bubbles: true})); }",
                name,
                str(value),
            )

    def press(self, *keys: str) -> None:
        """Send keys to whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(
            lambda _: condition(), f"waited for {what}"
        )

    def wait_for(self, selector: str, part: str) -> None:
        """Wait until an element's text has this part."""
        self.wait(lambda: part in self.text(selector), f"{part!r} in {selector}")

    def complaints(self) -> list[str]:
        """What the browser's console says went wrong, blocked content included."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]
