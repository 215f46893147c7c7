"""The page in a real browser, by keyboard alone: two widths, light and dark. Skips itself where there is no Chromium.

Set FORERUN_PICTURES to a folder to keep screenshots to look at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.chromium import BINARY, Chromium
from tests.server.conftest import Running

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium on this machine")
BUSY = "document.getElementById('send').disabled"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    opened = Chromium(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Chromium, served: Running) -> Chromium:
    browser.look(1200)
    browser.open(f"{served.url}/?fresh={os.urandom(4).hex()}")
    browser.until("document.getElementById('drafter').options.length > 1")
    browser.ask("document.getElementById('tokens').value = 24")
    return browser


def send(page: Chromium, text: str) -> None:
    """Type a message and press Enter; wait until it is answered."""
    assert page.ask("document.activeElement.id") == "prompt", "one can type at once"
    page.type(text)
    page.press("Enter")
    page.until(f"!{BUSY} && document.querySelectorAll('.facts:not(:empty)').length")


def keep(page: Chromium, name: str) -> None:
    """A screenshot, where they are wanted."""
    if folder := os.environ.get("FORERUN_PICTURES"):
        page.picture(Path(folder) / f"page-{name}.png")


def tab_to(page: Chromium, what: str, shift: bool = False) -> None:
    for _ in range(30):
        page.press("Tab", shift)
        if page.ask(f"document.activeElement.matches({what!r})"):
            return
    raise AssertionError(f"the Tab key does not reach {what}")


def test_a_chat_by_keyboard_alone(page: Chromium, served: Running) -> None:
    send(page, "one two three four one two three four one two")
    spoken = page.ask("[...document.querySelectorAll('.token:not(.special)')].map((t) => t.textContent).join('')")
    asked = [{"role": "user", "content": "one two three four one two three four one two"}]
    assert spoken == served.llm.chat(asked, max_tokens=24, temperature=0).text
    tab_to(page, ".token", shift=True)
    page.press("ArrowRight")
    assert page.ask("document.activeElement === document.querySelectorAll('.token')[1]")
    told = page.ask("document.getElementById('tip').textContent")
    assert re.search(r"(drafted and accepted|the target's own), probability [\d.]+%, round \d+", told)
    page.press("Enter")
    assert page.ask("document.getElementById('round').open")
    shown = page.ask("document.getElementById('round-body').textContent")
    assert "Drafted and rejected" in shown
    assert "%" in shown
    page.press("Escape")
    assert not page.ask("document.getElementById('round').open")
    assert page.ask("document.activeElement.matches('.token')"), "the focus goes back to where it was"
    assert page.errors == []


def test_characters_of_several_tokens_are_shown_whole(page: Chromium, served: Running) -> None:
    asked = "Repeat: one two three, one two three. And an emoji 😀"
    send(page, asked)
    body = {"messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 24}
    content = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    wanted = content["message"]["content"]
    assert any(ord(c) > 0xFFFF for c in wanted), "the model writes such characters"
    shown = page.ask("[...document.querySelectorAll('.token:not(.special)')].map((t) => t.textContent).join('')")
    assert shown == wanted


def test_pointing_at_a_token_tells_where_it_came_from(page: Chromium) -> None:
    send(page, "Hello! " * 12)
    assert page.ask("document.getElementById('tip').hidden")
    page.hover(".token.drafted")
    page.until("!document.getElementById('tip').hidden")
    assert "drafted and accepted, probability" in page.ask("document.getElementById('tip').textContent")
    keep(page, "tip")
    page.hover("h1")
    page.until("document.getElementById('tip').hidden")


def test_figures_are_live(page: Chromium, served: Running) -> None:
    page.ask("document.getElementById('tokens').value = 200")
    before = served.stats()["tokens"]
    page.type("one two three four one two three four one two three four, and so on without an end")
    page.press("Enter")
    page.until("document.querySelector('#plot-batch').getAttribute('aria-label').includes('most 1')")
    page.until(f"!{BUSY}")
    page.until(f"Number(document.querySelector('#now dd:nth-of-type(5)').textContent) > {before + 8}")
    for name in ("rate", "round"):
        said = page.ask(f"document.querySelector('#plot-{name}').getAttribute('aria-label')")
        most = float(re.search(r"most ([\d.]+)", said)[1])  # type: ignore[index]
        assert most > 1, said
        page.until(f"document.querySelector('#plot-{name} polyline').getAttribute('points').split(' ').length > 1")
        assert "NaN" not in page.ask(f"document.querySelector('#plot-{name} polyline').getAttribute('points')")
    positions = len(served.stats()["accepted_per_position"])  # the page asks for them once a second
    page.until(f"document.querySelectorAll('#plot-position rect').length === {positions}")
    assert re.search(r"\d+ (plain|chain)", page.ask("document.getElementById('now').textContent"))
    keep(page, "figures")


def test_a_chat_can_be_exported(page: Chromium, served: Running) -> None:
    send(page, "Name two colours.")
    page.ask("URL.createObjectURL = (data) => { window.exported = data; return 'blob:none'; }; 0")
    tab_to(page, "#export", shift=True)
    page.press("Enter")
    (turn,) = json.loads(page.ask("window.exported.text()"))["turns"]
    assert turn["messages"] == [{"role": "user", "content": "Name two colours."}]
    assert turn["answer"]["text"] == served.llm.chat(turn["messages"], max_tokens=24, temperature=0).text
    assert sum(len(each["tokens"]) for each in turn["answer"]["rounds"]) == len(turn["answer"]["tokens"])
    assert {"logprob", "round", "drafted", "top_logprobs"} <= set(turn["answer"]["tokens"][0])


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_with_and_without_speculation_side_by_side(page: Chromium, temperature: float) -> None:
    page.ask(f"document.getElementById('temperature').value = {temperature}")
    page.type("Name two colours.")
    tab_to(page, "#compare")
    page.press("Enter")
    page.until(f"!{BUSY} && document.querySelectorAll('.sides .facts:not(:empty)').length === 2")
    texts = page.ask("[...document.querySelectorAll('.sides .text')].map((t) => t.textContent)")
    assert len(texts) == 2
    assert texts[0] == texts[1]
    said = page.ask("document.querySelector('.equal > .facts').textContent")
    assert re.fullmatch(
        r"The texts are equal( \(drawn with seed \d+\))?\. [\d.]+ s with drafts, [\d.]+ s without: [\d.]+x as fast\.",
        said,
    )
    assert ("seed" in said) is (temperature > 0)
    keep(page, f"compare-{temperature}")
    assert not page.ask("document.querySelectorAll('.sides .turn')[1].querySelector('.drafted')")


def test_rejected_branches_are_shown(page: Chromium) -> None:
    """With a budget of its own: what the controller drafts depends on how fast this machine is."""
    budget = '{"drafter":"eagle3","budget":{"nodes":8,"depth":4,"width":2}}'
    change_requests(page, '"on"', budget)
    send(page, "Write about the sea.")
    found = page.ask(
        "(() => { for (const token of document.querySelectorAll('.token')) { token.click();"
        " const text = document.querySelectorAll('#round-body pre')[1].textContent;"
        " document.getElementById('round').close(); if (text.includes('after')) return text; } })()"
    )
    assert found, "a drafter of trees is not always right"
    page.ask("document.querySelector('.token:nth-of-type(4)').click()")
    keep(page, "round")


CODE = "def area(width, height):\n    return width * height\n"
NUMBER = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}
SUM = {"type": "object", "properties": {"sum": {"enum": [3, 4]}}, "required": ["sum"], "additionalProperties": False}


def fill(page: Chromium, **values: object) -> None:
    """Into the boxes below the message."""
    for box, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        page.ask(f"(document.getElementById({box!r}).value = {json.dumps(text)}, 0)")


def words(page: Chromium, what: str) -> str:
    found: str = page.ask(f"[...document.querySelectorAll({what!r})].map((t) => t.textContent).join('')")
    return found


def change_requests(page: Chromium, old: str, new: str) -> None:
    """What the page has no box for."""
    page.ask(
        "(() => { const real = window.fetch; window.fetch = (path, asked) => real(path, asked?.body ?"
        f" {{ ...asked, body: asked.body.replace({old!r}, {new!r}) }} : asked); }})()"
    )


def test_tokens_of_the_prediction_are_marked(page: Chromium) -> None:
    """With a budget of its own: what the controller drafts depends on how fast this machine is."""
    fill(page, prediction=CODE, tokens="60", prompt=f"Repeat this code exactly:\n```python\n{CODE}```")
    change_requests(page, '"on"', '{"budget":8}')
    page.ask("document.getElementById('ask').requestSubmit()")
    page.until(f"!{BUSY} && document.querySelectorAll('.facts:not(:empty)').length")
    assert len(words(page, ".token.predicted")) > 10, words(page, ".token")
    told = page.ask("[...document.querySelectorAll('.token.predicted')].map((t) => t.textContent.trim())")
    assert all(text in CODE for text in told), told
    keep(page, "prediction")
    page.hover(".token.predicted")
    page.until("!document.getElementById('tip').hidden")
    assert "drafted from the prediction and accepted" in page.ask("document.getElementById('tip').textContent")


def test_a_call_of_a_tool_has_a_box_of_its_own(page: Chromium) -> None:
    fill(page, tools=[ADD], tokens="40")
    change_requests(page, '"stream":', '"tool_choice":"required","stream":')
    send(page, "What is 1 + 2?")
    assert page.ask("document.querySelector('.call h4').textContent") == "Calls add"
    assert json.loads(words(page, ".call .token:not(.special)"))["name"] == "add"
    keep(page, "call")
    fill(page, tools="[")
    page.ask("document.querySelectorAll('.facts').forEach((each) => each.remove())")
    page.type("And now?")
    page.press("Enter")
    page.until(f"!{BUSY} && document.querySelector('.error')")
    assert words(page, ".error") == "failed: the list of tools is not JSON"


def test_thinking_is_apart_and_structure_is_shown(browser: Chromium, thinking: Running) -> None:
    for width in (1200, 420):
        browser.look(width)
        browser.open(f"{thinking.url}/?fresh={os.urandom(4).hex()}")
        browser.until("document.getElementById('drafter').options.length > 1")
        fill(browser, schema=SUM, thinking="12", tokens="80")
        send(browser, "What is 1 + 2?")
        assert browser.ask("document.querySelector('details.thinking').open")
        assert words(browser, ".thinking .token")
        assert '"sum"' not in words(browser, ".thinking .token")
        said = browser.ask(
            "[...document.querySelectorAll('.token:not(.special)')].filter((t) => !t.closest('.thinking'))"
            ".map((t) => t.textContent).join('')"
        )
        assert said.lstrip().startswith("{"), "the mark, of several tokens here, is a part of the thought"
        assert set(json.loads(words(browser, ".json pre"))) == {"sum"}
        browser.ask("document.querySelector('details.thinking summary').click()")
        assert not browser.ask("document.querySelector('details.thinking').open")
        keep(browser, f"thinking-{width}")
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        assert browser.errors == []


def test_enter_waits_for_the_answer_that_is_being_written(page: Chromium) -> None:
    """A second answer at the same time would mix with the first, and Stop would end only one of them."""
    page.ask("document.getElementById('tokens').value = 300")
    page.type("one two three four one two three four")
    page.press("Enter")
    page.until("document.querySelector('.token')")
    page.type("and this one later")
    page.press("Enter")
    assert page.ask(BUSY), "the first answer is still being written"
    assert page.ask("document.querySelectorAll('#log > .turn').length") == 2
    assert page.ask("document.getElementById('prompt').value") == "and this one later"
    page.ask("document.getElementById('stop').click()")
    page.until(f"!{BUSY}")


def test_what_was_written_before_stop_stays_in_the_conversation(page: Chromium) -> None:
    page.ask("document.getElementById('tokens').value = 300")
    page.type("one two three four one two three four")
    page.press("Enter")
    page.until("document.querySelectorAll('.token').length > 3")
    page.ask("document.getElementById('stop').click()")
    page.until(f"!{BUSY}")
    written = page.ask("[...document.querySelectorAll('.token')].map((t) => t.textContent).join('')")
    page.ask("document.getElementById('tokens').value = 4")
    page.ask("document.querySelectorAll('.facts').forEach((each) => each.remove())")
    send(page, "Go on.")
    page.ask("URL.createObjectURL = (data) => { window.exported = data; return 'blob:none'; }; 0")
    page.ask("document.getElementById('export').click()")
    stopped, last = json.loads(page.ask("window.exported.text()"))["turns"]
    assert stopped["stopped"] is True
    assert [each["role"] for each in last["messages"]] == ["user", "assistant", "user"]
    assert last["messages"][1]["content"] == stopped["answer"]["text"] != ""
    assert written.startswith(stopped["answer"]["text"])


def test_a_message_that_failed_is_there_to_send_again(page: Chromium) -> None:
    page.ask("(() => { const box = document.getElementById('tokens'); box.max = 1e9; box.value = 1e8; })()")
    page.type("Name two colours.")
    page.press("Enter")
    page.until("document.querySelector('#log .error') && !document.getElementById('send').disabled")
    assert "context" in page.ask("document.querySelector('#log .error').textContent")
    assert page.ask("document.getElementById('prompt').value") == "Name two colours."
    assert page.ask("document.querySelectorAll('#log > .turn').length") == 2, "what was asked, and why it failed"
    page.ask("document.getElementById('tokens').value = 24")
    page.press("Enter")
    page.until(f"!{BUSY} && document.querySelectorAll('.facts:not(:empty)').length")


@pytest.mark.parametrize("button", ["send", "compare"])
@pytest.mark.parametrize(("field", "value"), [("tokens", ""), ("temperature", "9"), ("seed", "1.5")])
def test_a_field_that_is_wrong_is_shown_and_nothing_is_sent(
    page: Chromium, button: str, field: str, value: str
) -> None:
    """An empty number would be sent as 0 tokens, and Compare is no submission that the browser checks by itself."""
    page.type("Name two colours.")
    page.ask(f"document.getElementById({field!r}).value = {value!r}")
    page.ask(f"document.getElementById({button!r}).click()")
    assert page.ask("document.activeElement.id") == field
    assert page.ask("document.querySelectorAll('#log > .turn').length") == 0
    assert page.ask("document.getElementById('prompt').value") == "Name two colours."
    assert not page.ask(BUSY)


def test_the_end_of_a_comparison_is_in_view(page: Chromium) -> None:
    page.look(390, 700)
    page.type("one two three four one two three four one two " * 4)
    page.ask("document.getElementById('tokens').value = 60")
    page.ask("document.getElementById('compare').click()")
    page.until(f"!{BUSY} && document.querySelector('.equal')")
    height, seen, top = page.ask(
        "['scrollHeight', 'clientHeight', 'scrollTop'].map((name) => document.getElementById('log')[name])"
    )
    assert height > seen, "it is too long to be seen whole"
    assert height - seen - top < 2


def test_whoever_scrolls_up_is_left_there(page: Chromium) -> None:
    page.look(390, 500)
    send(page, "one two three four one two three four one two " * 6)
    page.ask("document.getElementById('tokens').value = 300")
    page.type("one two three four one two three four")
    page.press("Enter")
    page.until("document.querySelectorAll('.token').length > 30")
    page.ask("document.getElementById('log').scrollTop = 0")
    seen = page.ask("document.querySelectorAll('.token').length")
    page.until(f"document.querySelectorAll('.token').length > {seen} + 3 || !{BUSY}")
    assert page.ask("document.getElementById('log').scrollTop") == 0
    page.ask("document.getElementById('stop').click()")
    page.until(f"!{BUSY}")


def test_a_server_that_does_not_answer_is_named(page: Chromium) -> None:
    page.ask("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
    page.type("Are you there?")
    page.press("Enter")
    page.until("document.querySelector('#log .error')")
    assert page.ask("document.querySelector('#log .error').textContent") == "failed: the server does not answer"
    page.until("document.getElementById('model').textContent === 'no connection: the server does not answer'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_fits_and_can_be_read(page: Chromium, width: int, scheme: str) -> None:
    page.look(width, scheme=scheme)
    page.type("Hello! " * 12)
    page.press("Enter")
    page.until(f"!{BUSY} && document.querySelector('.facts:not(:empty)')")
    sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    whole, seen = page.ask(sizes)
    assert whole <= seen, "nothing sticks out to the right"
    for selector in ("body", ".hint", "#send", ".facts"):
        assert page.contrast(selector) >= 4.5, f"{selector} is hard to read"
    keep(page, f"{width}-{scheme}")
