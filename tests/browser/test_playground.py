"""The playground in Chromium, on a live server: conversations with several models, tools, tokens, and saved lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys
from tinker import types

from support.browser import Browser
from support.dashboard_data import BASE, Site

SECOND = ".column:nth-child(2)"
SHORT_ANSWERS = "temperature=0&max_tokens=16"
RECORD = """
const [held] = arguments;
const fetchNow = window.fetch;
const gate = new Promise((resolve) => { window.release = resolve; });
window.sent = [];
window.fetch = async (where, options) => {
  if (where.startsWith("/oai/") && options.method === "POST") {
    const body = JSON.parse(options.body);
    window.sent.push(body);
    if (body.model === held) await gate;
  }
  return fetchNow(where, options);
};
"""
"""Records the requests for answers, and holds those to one model until `release` is called."""


def open_playground(browser: Browser, query: str = SHORT_ANSWERS) -> None:
    browser.driver.get("about:blank")
    browser.open(f"playground?{query}", "Playground")
    browser.until(lambda: browser.all("input[id^=model]"), "the models")


def models_of(browser: Browser) -> list[str]:
    return [str(field.get_attribute("value")) for field in browser.all("input[id^=model]")]


def send(browser: Browser, text: str) -> None:
    """Send a message and wait for every column's answer."""
    message = browser.one("#prompt")
    message.send_keys(Keys.CONTROL, "a")
    message.send_keys(text)
    num_columns, num_answers = len(browser.all(".column")), len(browser.all(".message.assistant .about"))
    browser.click("button.primary", "Send")
    browser.until(
        lambda: len(browser.all(".message.assistant .about")) == num_answers + num_columns, "an answer in every column"
    )


def copied_text(browser: Browser, label: str) -> str:
    browser.driver.execute_script("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    browser.click("button", label)
    return str(browser.until(lambda: browser.driver.execute_script("return window.copied"), "the text"))


def test_models_converse_side_by_side_over_several_turns(alice: Site, browser: Browser) -> None:
    open_playground(browser)
    models = models_of(browser)
    assert models[0] == BASE and models[1].startswith("tinker://")
    send(browser, "Say hello.")
    assert "hello" in browser.text(f"{SECOND} .message.assistant .text"), "the second model was trained to say it"
    send(browser, "Say yes.")
    first_turns = [turn.split()[0] for turn in browser.texts(".column:nth-child(1) .message")]
    assert first_turns == ["user", "assistant"] * 2
    about = browser.texts(".column:nth-child(1) .about")
    prompt_tokens = [int(text.split()[0]) for text in about]
    assert prompt_tokens[1] > prompt_tokens[0] + 8, "the second prompt has the first turn"
    browser.click(f"{SECOND} button", "Undo")
    browser.until(lambda: len(browser.all(f"{SECOND} .message")) == 2, "the last exchange's end")
    browser.click(".actions button", "New conversation")
    browser.until(lambda: not browser.all(".message"), "empty conversations")


def test_what_is_done_during_the_answers_loses_and_repeats_nothing(browser: Browser) -> None:
    open_playground(browser)
    slow = models_of(browser)[1]
    send(browser, "Say hello.")
    browser.driver.execute_script(RECORD, slow)
    prompt = browser.one("#prompt")
    prompt.send_keys("Say yes.")
    browser.driver.execute_script("for (const turn of [1, 2]) document.querySelector('form.ask').requestSubmit()")
    browser.until(lambda: len(browser.all(".about")) == 3, "the answer of the first model")
    prompt.send_keys("Say no.")
    browser.click(".actions button", "New conversation")
    browser.until(lambda: "Stop the answers first." in browser.text("#news"), "the refusal")
    assert len(browser.all(".column:nth-child(1) .message")) == 4, "no conversation ends before the others"
    browser.driver.execute_script("release()")
    browser.until(lambda: len(browser.all(".about")) == 4, "both answers")
    browser.until(lambda: "Done" in browser.text("#news"), "the end")
    assert prompt.get_attribute("value") == "Say no.", "the next message stays"
    assert len(browser.driver.execute_script("return sent")) == 2, "one request to each model"


def test_tokens_of_an_answer_have_alternatives(browser: Browser) -> None:
    open_playground(browser)
    send(browser, "Say hello.")
    browser.type(f"{SECOND} .tokens", Keys.ARROW_RIGHT)
    described = browser.until(lambda: browser.text(f"{SECOND} .said"), "words")
    assert "logprob" in described and "most likely" in described
    token = browser.one(f"{SECOND} .token.chosen")
    assert token.value_of_css_property("display") == "inline", "the text stays as it is"
    browser.click(f"{SECOND} summary", "View as table")
    browser.until(lambda: browser.all(f"{SECOND} tbody tr"), "the numbers")


def test_columns_are_added_and_removed(browser: Browser) -> None:
    open_playground(browser)
    browser.click("button", "Add a model")
    browser.click("button", "Add a model")
    assert len(browser.all(".column")) == 4
    more = next(button for button in browser.all(".actions button") if button.text == "Add a model")
    assert not more.is_enabled(), "no more than four"
    browser.click("button", "Remove column 1")
    assert len(browser.all(".column")) == 3


def test_a_tool_is_called_and_its_result_continues_the_conversation(alice: Site, browser: Browser) -> None:
    open_playground(browser, f"models={BASE.replace('/', '%252F')}&max_tokens=120&tool_choice=required")
    browser.click(".definitions summary")
    browser.click("button", "Insert an example")
    send(browser, "Weather?")
    assert browser.text(".message.assistant .part.tool p") == "calls weather"
    arguments = json.loads(browser.text(".message.assistant .part.tool pre"))
    assert set(arguments) == {"city"}
    browser.type("#prompt", "And now?")
    browser.click("button.primary", "Send")
    browser.until(lambda: "waits for the results" in browser.text("#news"), "the refusal of another message")
    browser.driver.execute_script("document.getElementById('tool_choice').value = 'none'")
    browser.type("#result1-0", "sunny")
    browser.click(".results button", "Send the result")
    browser.until(lambda: len(browser.all(".message.assistant .about")) == 2, "the answer to the result")
    assert browser.driver.switch_to.active_element.get_attribute("aria-label") == "Conversation 1", "the focus stays"
    for theme in ("light", "dark"):
        browser.driver.execute_script("tinsmithTheme.set(arguments[0])", theme)
        assert Axe().run(browser.driver)["violations"] == [], theme
    browser.driver.execute_script("tinsmithTheme.set('system')")
    assert browser.text(".message.returned").startswith("result of weather")
    line = json.loads(copied_text(browser, "Copy conversation 1 as a JSON line"))
    user, call, result, answer = line["messages"]
    assert (user["role"], call["role"], answer["role"]) == ("user", "assistant", "assistant")
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == arguments
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "name": "weather",
        "content": "sunny",
    }
    assert line["tools"][0]["function"]["name"] == "weather"
    tokenizer = alice.model.get_tokenizer()
    text = tokenizer.apply_chat_template(line["messages"], tools=line["tools"], tokenize=False)
    assert call["tool_calls"][0]["function"]["arguments"] in text and "<tool_response>\nsunny\n" in text


@pytest.mark.parametrize(("tools", "words"), [("{", "not JSON"), ('[{"name": "weather"}]', "must be a list of")])
def test_wrong_tools_are_refused_before_anything_is_sent(browser: Browser, tools: str, words: str) -> None:
    open_playground(browser)
    browser.click(".definitions summary")
    browser.type("#tools", tools)
    browser.click("button.primary", "Send")
    browser.until(lambda: words in browser.text("#news"), "the reason")
    assert not browser.all(".message")
    assert browser.attribute("#prompt", "value") == "Say hello.", "the message stays"


def test_a_saved_conversation_trains_a_model(alice: Site, browser: Browser) -> None:
    open_playground(browser)
    browser.type("#system", "Be kind.")
    send(browser, "Say hello.")
    browser.type("#system", " Be brief.")
    browser.type("#prompt", "Say yes.")
    browser.click("button.primary", "Send")
    browser.until(lambda: "began with another system prompt." in browser.text("#news"), "the refusal")
    assert len(browser.all(".message")) == 4 and browser.attribute("#prompt", "value") == "Say yes."
    line = json.loads(copied_text(browser, "Copy conversation 2 as a JSON line"))
    assert line["messages"][0] == {"role": "system", "content": "Be kind."}, "that of the answer"
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant"]
    tokenizer = alice.model.get_tokenizer()
    tokens = tokenizer.encode(tokenizer.apply_chat_template(line["messages"], tokenize=False), add_special_tokens=False)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    assert alice.model.forward([datum], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_link_has_the_models_the_first_message_and_the_settings(browser: Browser) -> None:
    open_playground(browser)
    browser.type("#system", "Be brief.")
    send(browser, "Say yes.")
    send(browser, "Say no.")
    models, address = models_of(browser), browser.driver.current_url
    browser.driver.get("about:blank")
    browser.driver.get(address)
    browser.until(lambda: models_of(browser) == models, "the same models")
    values = {name: browser.attribute(f"#{name}", "value") for name in ("prompt", "system", "max_tokens")}
    assert values == {"prompt": "Say yes.", "system": "Be brief.", "max_tokens": "16"}


def test_a_checkpoint_and_a_run_are_compared_with_their_base_model(alice: Site, browser: Browser) -> None:
    browser.open(f"checkpoints/{alice.checkpoints[1].removeprefix('tinker://')}", "Checkpoint answers")
    browser.click("button", "Use answers")
    browser.until(
        lambda: f'base_url="{alice.server.url}", api_key="' in browser.text("dialog pre"), "the whole address"
    )
    browser.click("dialog button", "Close")
    browser.until(lambda: not browser.all("dialog"), "its end")
    browser.click("a", "Compare answers with its base model")
    browser.until(lambda: models_of(browser) == [BASE, alice.checkpoints[1]], "both models")
    browser.open("checkpoints", "Checkpoints")
    browser.click("a", "Sample answers in the playground")
    browser.until(lambda: models_of(browser) == [alice.checkpoints[1]], "the checkpoint alone")
    browser.open(f"runs/{alice.run}", "Run ")
    browser.click("a", "Compare with its base model")
    browser.until(lambda: models_of(browser) == [BASE, f"tinker://{alice.run}"], "the run's newest weights")
    browser.click("button.primary", "Send")
    browser.until(lambda: len(browser.all(".message.assistant .about")) == 2, "both answers")


def test_a_prompt_is_continued_without_the_template(browser: Browser) -> None:
    open_playground(browser, "chat=off&temperature=0&max_tokens=4")
    assert not browser.is_displayed("#system")
    browser.click("button.primary", "Send")
    browser.until(lambda: len(browser.all(".column .tokens")) == 2, "both answers")
    assert not browser.all(".message.user"), "there is no conversation"
    browser.driver.execute_script(RECORD, "")
    browser.click("#chat")
    browser.click("button.primary", "Send")
    browser.until(lambda: len(browser.all(".message.user")) == len(browser.all(".about")) == 2, "the chat's answers")
    for body in browser.driver.execute_script("return sent"):
        assert body["messages"] == [{"role": "user", "content": "Say hello."}], "without the continued prompt"
    line = json.loads(copied_text(browser, "Copy conversation 1 as a JSON line"))
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"]


def test_a_refused_sample_shows_the_reason_and_can_be_repeated(browser: Browser) -> None:
    open_playground(browser)
    field = browser.one("#model1")
    field.clear()
    field.send_keys("no/such-model")
    browser.click("button.primary", "Send")
    browser.until(lambda: "no/such-model" in browser.text(".column .warning"), "the reason")
    browser.until(lambda: browser.all(f"{SECOND} .about"), "the other model's answer")
    browser.until(lambda: browser.text("#news") == "1 of 2 models answered.", "the outcome")
    assert browser.attribute("#prompt", "value") == ""
    assert browser.attribute("#temperature", "max") == "2", "the most that the server takes"
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(BASE)
    browser.click("button", "Try again in column 1")
    browser.until(lambda: len(browser.all(".message.assistant .about")) == 2, "the answer")
    assert all("404" in complaint for complaint in browser.complaints())


def test_a_message_that_no_model_answers_stays(browser: Browser) -> None:
    open_playground(browser, "models=no-such-model")
    browser.click("button.primary", "Send")
    browser.until(lambda: browser.text("#news") == "No model answered.", "the outcome")
    assert browser.attribute("#prompt", "value") == "Say hello."
    assert all("404" in complaint for complaint in browser.complaints())
