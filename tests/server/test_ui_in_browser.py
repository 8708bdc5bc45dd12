"""The page at /ui in a real browser, over a real server with tiny models."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsers import Page, browser
from running_server import RunningServer, running_server
from tiny_pairs import save_tiny_model_with_tokenizer

pytestmark = [pytest.mark.deep, pytest.mark.slow]

PROMPT = "The quick brown fox"
KEY = "a-key-of-this-test"
LONG = 4096


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair of which some drafts are accepted and some are not."""
    folder = tmp_path_factory.mktemp("models")
    size = {"max_position_embeddings": LONG}
    target = save_tiny_model_with_tokenizer(folder / "target", **size)
    draft = save_tiny_model_with_tokenizer(folder / "draft", num_hidden_layers=1, **size)
    sets = {
        "target.model": target,
        "draft.model": draft,
        "target.dtype": "float32",
        "cache.num_pages": 600,
        "speculation.num_speculative_tokens": 4,
        "server.served_model_name": "tiny",
    }
    return [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(
    models: list[str], driver: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("log") / "log", models) as server:
        yield server


@pytest.fixture
def page(driver: Any, server: RunningServer) -> Page:
    page = Page(driver, server.url)
    page.driver.get_log("browser")
    page.open()
    page.script("localStorage.clear(); location.reload()")  # what the test before has left
    page.wait_for("#state", "ready")
    page.wait(lambda: len(page.all("#ask [name=drafts] option")) > 2, "the choices of k")
    return page


def ask(page: Page, **fields: object) -> None:
    page.fill(**{"prompt": PROMPT, "temperature": 0.8, "seed": 5, "drafts": 3, **fields})
    page.one("#send").click()


def finished(page: Page) -> str:
    page.wait(lambda: page.one("#send").is_enabled() and page.text("#status"), "the answer")
    return page.text("#status")


def trace_of(server: RunningServer, **fields: object) -> list[dict[str, Any]]:
    """The trace of the same completion, asked for without the page."""
    body = {"prompt": PROMPT, "temperature": 0.8, "seed": 5, "max_tokens": 40, "logprobs": 5}
    speculation = {"num_speculative_tokens": 3, "trace": True}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body | {"speculation": speculation} | fields
    )
    return list(answer.json()["choices"][0]["trace"])


def test_tokens_have_the_text_and_the_kind_that_the_server_returns(
    page: Page, server: RunningServer
) -> None:
    ask(page, mode="completion", max_tokens=40)
    assert finished(page).startswith("Cut off at the maximum number of tokens: 40 tokens in ")
    trace = trace_of(server)
    shown = page.script(
        "return [...document.querySelectorAll('.answer .token')].map(t =>"
        " [t.textContent, t.classList[1]])"
    )
    assert shown == [[token["text"], token["kind"]] for step in trace for token in step["tokens"]]
    assert {kind for _, kind in shown} >= {"accepted", "recovered"}
    drafted = sum(len(step["drafts"]) for step in trace)
    accepted = sum(step["num_accepted"] for step in trace)
    assert f"{accepted} of {drafted} drafts accepted" in page.text("#totals")
    assert page.complaints() == []


def test_a_chat_goes_on_with_what_was_said(page: Page) -> None:
    ask(page, max_tokens=8, temperature=0)
    finished(page)
    ask(page, prompt="And then?", max_tokens=8)
    finished(page)
    assert len(page.all(".answer")) == 2
    page.one("#copy-as").click()
    code = page.text("#code")
    assert code.index(PROMPT) < code.index('"assistant"') < code.index("And then?")


def test_a_stopped_turn_stays_in_the_conversation_also_after_a_reload(page: Page) -> None:
    ask(page, max_tokens=3000)
    page.wait(lambda: len(page.all(".answer .token")) > 10, "tokens")
    page.press("\ue00c")  # Escape
    finished(page)
    text = page.script("return document.querySelector('.as-text > .prose').textContent").strip()
    num_tokens = len(page.all(".answer .token"))
    page.open()
    page.wait_for("#state", "ready")
    assert len(page.all(".answer .token")) == num_tokens > 10
    assert page.text(".turn > .note") == "Stopped."
    assert page.one("[name=max_tokens]").get_attribute("value") == "3000"
    page.fill(prompt="And then?", max_tokens=3)
    page.one("#copy-as").click()
    code = page.text("#code")
    assert code.index(PROMPT) < code.index('"assistant"') < code.index("And then?")
    assert text[:5] in code
    page.one("#code-close").click()
    page.one("#clear").click()
    page.open()
    assert page.all(".turn") == []


def test_an_answer_during_which_the_page_was_left_can_be_continued(page: Page) -> None:
    ask(page, max_tokens=3000)
    page.wait(lambda: len(page.all(".answer .token")) > 10, "tokens")
    page.open()
    page.wait_for("#state", "ready")
    num_tokens = len(page.all(".answer .token"))
    assert num_tokens > 10
    assert page.text(".turn > .note") == "Interrupted."
    page.fill(max_tokens=4)
    page.one(".turn .resume").click()
    assert finished(page).startswith("Cut off at the maximum number of tokens: 4 tokens in ")
    assert len(page.all(".turn")) == 1
    assert len(page.all(".answer .token")) == num_tokens + 4


def test_a_question_that_got_no_answer_stays_but_is_not_sent_again(page: Page) -> None:
    ask(page, prompt="x" * 2 * LONG, max_tokens=4)
    assert finished(page) == "Ended by an error, without an answer."
    assert "maximum context length" in page.text("#problem")
    ask(page, max_tokens=4)
    assert ": 4 tokens in " in finished(page)
    assert len(page.all(".turn")) == 2


def test_an_answer_that_ended_by_itself_is_no_interrupted_one_after_a_reload(page: Page) -> None:
    ask(page, max_tokens=60, stop="e")
    assert finished(page).startswith("Done")
    page.open()
    page.wait_for("#state", "ready")
    assert len(page.all(".turn")) == 1
    assert page.text(".turn > .note") == ""


def test_a_long_answer_keeps_stop_in_sight_and_is_shown_from_its_end_after_a_reload(
    page: Page,
) -> None:
    def is_in_sight(selector: str) -> bool:
        found = "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        return bool(
            page.script(f"{found} return box.top >= 0 && box.bottom <= innerHeight", selector)
        )

    def num_tokens() -> int:
        return len(page.all(".answer .token"))

    ask(page, prompt="a\n" * 60, max_tokens=2000, temperature=0)  # longer than the window
    page.wait(lambda: num_tokens() > 10, "tokens")
    assert is_in_sight("#stop")
    assert page.script("return scrollY") > 0  # it follows the answer, unless the reader goes up
    page.script("scrollTo(0, 0)")
    num_then = num_tokens()
    page.wait(lambda: num_tokens() > num_then + 20, "more of it")
    assert page.script("return scrollY") == 0
    assert is_in_sight("#stop")
    page.press("\ue00c")  # Escape
    finished(page)
    page.open()
    page.wait_for("#state", "ready")
    assert is_in_sight(".turn > .note")
    assert page.text(".turn > .note") == "Stopped."
    # What the keyboard reaches is not behind the composer.
    page.script("scrollTo(0, 0); document.querySelector('.answer').focus({preventScroll: true})")
    page.press("\ue011")  # Home
    composer = "document.querySelector('.composer').getBoundingClientRect().top"
    token = "document.querySelector('.token.active').getBoundingClientRect().bottom"
    assert page.script(f"return {token} <= {composer}")


def test_only_the_selected_answer_has_marks(page: Page) -> None:
    for _ in range(2):
        ask(page, mode="completion", max_tokens=30)
        finished(page)
        page.all(".turn:last-child .answer .token")[1].click()
    assert page.all(".turn:first-of-type .answer .now") == []
    assert page.all(".turn:first-of-type .answer .later") == []
    assert page.all(".turn:last-child .answer .now")
    page.script("document.querySelector('.answer .token').click()")
    assert page.all(".turn:last-child .answer .now, .turn:last-child .answer .later") == []
    assert page.all(".turn:first-of-type .answer .now")


def test_the_last_answer_can_be_continued_made_again_and_asked_otherwise(
    page: Page, server: RunningServer
) -> None:
    def tokens() -> list[str]:
        return [each.text for each in page.all(".turn:last-child .answer .token")]

    def click(button: str) -> None:
        page.script(
            "for (const b of document.querySelectorAll('.turn:last-child button'))"
            " if (b.textContent === arguments[0]) b.click()",
            button,
        )
        page.wait(lambda: page.one("#send").is_enabled(), "the answer")

    ask(page, mode="completion", max_tokens=8, temperature=0)
    finished(page)
    first = tokens()
    click("Continue")
    assert tokens()[:8] == first
    assert len(tokens()) == 16
    assert len(page.all(".turn")) == 1
    click("Regenerate")
    assert tokens() == first
    click("Edit")
    assert page.one("[name=prompt]").get_attribute("value") == PROMPT
    page.press("\ue00c")  # Escape keeps the question
    assert page.one("[name=prompt]").get_attribute("value") == ""
    click("Edit")
    ask(page, mode="completion", prompt="Another", max_tokens=8, temperature=0)
    finished(page)
    assert len(page.all(".turn")) == 1
    assert page.text(".said") == "Another"


def test_text_is_markdown_without_html_or_images(page: Page) -> None:
    ask(page, mode="completion", max_tokens=4)
    finished(page)
    page.one("#views [value=text]").click()
    assert not page.one(".answer").is_displayed()
    page.driver.set_script_timeout(10)
    page.driver.execute_async_script(
        "const [text, done] = arguments;"
        "import(new URL('markdown.js', location.href)).then(({showMarkdown}) => {"
        " showMarkdown(document.querySelector('.as-text > .prose'), text); done(); })",
        "**bold**\n\n```\nx = 1\n```\n<script>x</script> <img src=x> ![i](//e.test/i.png)"
        " [link](javascript:alert(1)) [other](https://e.test/)",
    )
    shown = page.script("return document.querySelector('.as-text > .prose').innerHTML")
    assert "<strong>bold</strong>" in shown
    assert "<script" not in shown
    assert "<img" not in shown
    assert 'href="javascript' not in shown
    assert 'rel="noopener noreferrer"' in shown
    assert page.one(".code button").text == "Copy"
    assert page.one(".as-text").is_displayed()
    assert page.complaints() == []


def test_a_schema_binds_the_answer_and_a_wrong_one_is_not_sent(page: Page) -> None:
    page.script("document.querySelector('#ask details').open = true")
    page.fill(schema="{")
    ask(page, mode="completion", max_tokens=20, temperature=0)
    assert page.script("return document.querySelector('#ask').schema.validationMessage")
    assert page.all(".turn") == []
    page.fill(schema='{"type": "boolean"}')
    ask(page, mode="completion", max_tokens=20, temperature=0)
    finished(page)
    assert page.text(".as-text > .prose").strip() in ("true", "false")


def test_pointing_at_a_token_shows_all_that_is_known_of_it(
    page: Page, server: RunningServer
) -> None:
    from selenium.webdriver import ActionChains

    ask(page, mode="completion", max_tokens=40)
    finished(page)
    trace = trace_of(server)
    step = next(step for step in trace if len(step["drafts"]) - step["num_accepted"] > 1)
    index = sum(len(each["tokens"]) for each in trace[: step["step"]]) - 1
    page.script("arguments[0].scrollIntoView({block: 'center'})", page.all(".answer .token")[index])
    ActionChains(page.driver).move_to_element(page.all(".answer .token")[index]).perform()
    page.wait(lambda: page.one("#peek").is_displayed(), "the card of the token")
    card = page.text("#peek")
    assert f"recovered, token {step['num_accepted'] + 1} of step {step['step']}" in card
    assert f"Drafts by draft_model: {step['num_accepted']} of {len(step['drafts'])}" in card
    assert "Logprob -" in card
    rejected = [each.text for each in page.all("#peek .rejected")]
    assert len(rejected) == len(step["drafts"]) - step["num_accepted"]
    assert len(page.all("#peek meter")) >= 5


def test_everything_can_be_reached_with_the_keyboard(page: Page) -> None:
    page.fill(mode="completion", prompt="a", max_tokens=30, temperature=0, drafts=3)
    page.script("document.querySelector('#ask').prompt.focus()")
    page.press("\ue010", "\ue008\ue007", "b")  # End, Shift+Enter
    page.press("\ue007")  # Enter
    finished(page)
    assert page.text(".said") == "a\nb"
    page.script("document.querySelector('#views input:checked').focus()")
    page.press("\ue004")  # Tab
    assert page.driver.switch_to.active_element.get_attribute("role") == "listbox"

    def active() -> str:
        return str(
            page.script(
                "const l = document.querySelector('.answer');"
                "const id = l.getAttribute('aria-activedescendant');"
                "return id && document.getElementById(id).getAttribute('aria-label')"
            )
        )

    assert ", step 1, token 1 of " in active()
    page.press("\ue015")  # down: the next step
    assert ", step 2, token 1 of " in active()
    assert page.one("#peek").is_displayed()
    page.press("\ue007")  # Enter: the slider goes there
    assert page.text("#step-number") == "2"
    page.press("\ue010")  # End
    assert f", step {page.text('#step-count')}, " in active()
    page.press("\ue00c")  # Escape
    assert not page.one("#peek").is_displayed()
    page.script("document.querySelector('#step').focus()")
    page.press("\ue011", "\ue014")  # Home, right
    assert page.text("#step-number") == "2"
    assert "step 2" in page.one("#step").get_attribute("aria-valuetext")


def test_the_slider_goes_back_to_any_step(page: Page, server: RunningServer) -> None:
    ask(page, mode="completion", max_tokens=40)
    finished(page)
    trace = trace_of(server)
    for number in (1, len(trace) // 2, len(trace)):
        page.script(
            "const s = document.querySelector('#step'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            number,
        )
        shown = len(page.all(".answer .token:not(.later)"))
        assert shown == sum(len(step["tokens"]) for step in trace[:number])
        step = trace[number - 1]
        words = [each.text for each in page.all("#anatomy small")]
        accepted, drafts = step["num_accepted"], len(step["drafts"])
        assert words.count("rejected") == (accepted < drafts)
        assert words.count("dropped") == max(0, drafts - accepted - 1)
        assert words.count("accepted") == accepted
        assert len(page.all(".answer .token.now")) == len(step["tokens"])


def test_a_race_has_one_text_and_two_clocks(page: Page) -> None:
    page.open("race")
    page.wait(lambda: len(page.all("#race-form [name=drafts] option")) > 2, "the choices of k")
    page.fill(prompt=PROMPT, temperature=0.9, seed=11, max_tokens=60, drafts=3)
    page.one("#race-start").click()
    page.wait_for("#verdict", "With drafts it ")
    assert "the same " in page.text("#verdict")

    def clocks() -> list[str]:
        return [page.text(f"#lane-{name} .clock") for name in ("plain", "drafts")]

    ended = clocks()
    assert "0.00 s" not in ended
    num_tokens = len(page.all("#race-text .token"))
    assert f"the same {num_tokens} tokens" in page.text("#verdict")
    page.one("#race-replay").click()
    page.wait(lambda: page.all("#race-text .unread"), "the replay's beginning")
    page.wait(lambda: clocks() == ended, "the replay's end")
    assert page.all("#race-text .unread") == []


def test_the_strip_shows_what_the_server_does(page: Page) -> None:
    ask(page, max_tokens=60)
    finished(page)
    page.wait(lambda: page.text("#live-token") != "–", "latencies")
    page.wait(lambda: "%" in page.text("#live-accepted"), "acceptance")
    assert page.text("#live-source") == "draft_model"
    assert 1 <= len(page.all("#live-positions li")) <= 4  # k follows what drafts cost here
    assert "of 599" in page.text("#live-pages-note")


def test_the_pairs_card_says_what_info_says(page: Page, server: RunningServer) -> None:
    page.open("pair")
    page.wait_for("#pair-card", "Verification rule")
    card = page.text("#pair-card")
    assert "Modeltarget" in card
    assert f"{server.url}/v1" in card
    assert "599" in card


@pytest.mark.parametrize("mode", ["chat", "completion"])
@pytest.mark.parametrize("language", ["curl", "python", "javascript"])
def test_a_request_copied_as_code_runs(
    page: Page, tmp_path: Path, mode: str, language: str
) -> None:
    programs = {"curl": "bash", "python": sys.executable, "javascript": "node"}
    program = shutil.which(programs[language])
    if program is None or (language == "curl" and shutil.which("curl") is None):
        pytest.skip(f"no program that runs {language}")
    page.fill(mode=mode, prompt='It\'s "one" \\ two\nlines', max_tokens=5, temperature=0, seed=5)
    page.fill(top_k=7, stop="<stop>", drafts=2)
    page.one("#copy-as").click()
    page.one(f"[name=language][value={language}]").click()
    file = tmp_path / ("code.mjs" if language == "javascript" else "code")
    file.write_text(page.text("#code"))
    run = subprocess.run([program, str(file)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)["choices"][0] if language == "curl" else None
    if said is None:
        assert run.stdout.strip("\n")
    else:
        assert said["finish_reason"] in ("length", "stop")


def test_stop_ends_the_request_on_the_server_too(page: Page, server: RunningServer) -> None:
    ask(page, max_tokens=3000)
    page.wait(lambda: len(page.all(".answer .token")) > 10, "tokens")
    page.press("\ue00c")  # Escape
    assert finished(page).startswith("Stopped: ")
    server.wait_for("outrider_requests_running 0")


def test_a_slow_engine_is_shown_and_may_yet_answer(page: Page, server: RunningServer) -> None:
    server.engine.suspend()
    try:
        ask(page, max_tokens=10)
        page.wait_for("#status", "Nothing has come for ")
        assert page.one("#stop").is_displayed()
    finally:
        server.engine.resume()
    assert ": 10 tokens in " in finished(page)


def test_an_engine_that_dies_is_shown_and_the_next_answer_comes(
    page: Page, server: RunningServer
) -> None:
    ask(page, max_tokens=3000)
    page.wait(lambda: len(page.all(".answer .token")) > 10, "tokens")
    server.engine.kill()
    assert finished(page).startswith("Ended by an error: ")
    assert "engine died" in page.text("#problem")
    assert len(page.all(".answer .token")) > 10  # what had come stays
    page.wait_for("#state", "restarting")
    page.wait_for("#state", "ready")
    ask(page, max_tokens=5)
    assert ": 5 tokens in " in finished(page)
    assert not page.one("#problem").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_and_can_be_read(server: RunningServer, width: int, scheme: str) -> None:
    with browser(width=width, height=800, scheme=scheme) as driver:
        page = Page(driver, server.url)
        page.open()
        page.wait_for("#state", "ready")
        ask(page, max_tokens=40)
        finished(page)
        for view in ("playground", "race", "pair"):
            page.script("location.hash = arguments[0]", view)
            page.wait(lambda view=view: page.one(f"#{view}").is_displayed(), view)
            assert page.script("return document.documentElement.scrollWidth") <= width
            weak = page.script(CONTRASTS, 4.5)
            assert weak == [], (view, weak)
        page.script("location.hash = 'playground'")
        above, below = (
            page.script(
                "return document.querySelector(arguments[0]).getBoundingClientRect().top", each
            )
            for each in ("#transcript", ".composer")
        )
        assert above < below
        assert page.complaints() == []


# Texts whose colour stands out less from what is behind them, as WCAG 2 counts it. Tokens of later
# steps are faint on purpose.
CONTRASTS = """
const parse = (css) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) =>
  c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = parse(getComputedStyle(element).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll('body *')].filter((e) =>
  e.checkVisibility() && !e.closest('.later, :disabled, .unseen, .unread') &&
  [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
).filter((e) => {
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < arguments[0];
}).map((e) => e.outerHTML.slice(0, 120));
"""


def test_nothing_comes_from_another_host(page: Page, server: RunningServer) -> None:
    page.driver.get_log("performance")
    for view in ("playground", "race", "pair"):
        page.open(view)
        page.wait_for("#state", "ready")
    messages = [
        json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")
    ]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(f"{server.url}/")] == []


def test_fields_and_buttons_have_names(page: Page) -> None:
    ask(page, max_tokens=5)
    finished(page)
    for view in ("playground", "race"):
        page.script("location.hash = arguments[0]", view)
        for element in page.all("input, select, textarea, button, [role=listbox], progress"):
            if element.is_displayed():
                assert element.accessible_name, element.get_attribute("outerHTML")


def test_a_key_is_asked_for_until_it_is_right(
    models: list[str], driver: Any, tmp_path: Path
) -> None:
    arguments = [*models, "--api-key", KEY]
    with running_server(tmp_path / "log", arguments) as server:
        page = Page(driver, server.url)
        page.open()
        page.wait(lambda: page.one("#key-dialog").is_displayed(), "the question for a key")
        page.wait_for("#state", "needs a key")
        assert "asks for a key" in page.text("#key-reason")
        page.one("#key").send_keys("wrong", "\ue007")
        page.wait_for("#key-reason", "did not take this key")
        page.wait(lambda: page.one("#key-dialog").is_displayed(), "the next question")
        page.one("#key").clear()
        page.one("#key").send_keys(KEY, "\ue007")
        page.wait_for("#state", "ready")
        ask(page, max_tokens=5)
        assert ": 5 tokens in " in finished(page)
        page.one("#copy-as").click()
        assert KEY not in page.text("#code")
        file = tmp_path / "code"
        file.write_text(page.text("#code"))
        environment = os.environ | {"OUTRIDER_API_KEY": KEY}
        run = subprocess.run(["bash", file], env=environment, capture_output=True, timeout=60)
        assert b'"choices"' in run.stdout
        page.one("#code-close").click()

        server.stop()
        page.wait_for("#state", "out of reach")
        ask(page, max_tokens=5)
        finished(page)
        assert "cannot be reached" in page.text("#problem")
