"""Thinking: how a model marks what it thinks before it answers, and whether a prompt has opened or closed it. No torch.

`forerun.verify.grammar.thinking` makes budgets and grammars part of the law; `forerun.server.parsers` splits answers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Start = Literal["open", "may", "none"]  # a text starts thinking | may begin to | does not think
# tokens of thinking at most, by the OpenAI API's reasoning_effort; None = as many as it takes
EFFORTS: dict[str, int | None] = {
    "none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None,
}  # fmt: skip
TAIL = 24  # last tokens of a prompt that show whether it has opened thinking


class ThinkingMarks(NamedTuple):
    """The marks of one family of models."""

    begin: str  # what opens thinking; of harmony, what a prompt ends with
    end: str  # what the answer comes behind
    close: str  # what is written to end thinking: its last part is `end`
    name: str = "think"

    def start_of(self, prompt: str) -> Start:
        """How a text behind a prompt, of which the last part is given, starts."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "none" if prompt.endswith(self.end) or self.name == "harmony" else "may"


HARMONY_FINAL = "<|channel|>final<|message|>"
HARMONY = ThinkingMarks("<|start|>assistant", HARMONY_FINAL, f"<|end|><|start|>assistant{HARMONY_FINAL}", "harmony")
_TAGS = (ThinkingMarks("<think>", "</think>", "</think>"), ThinkingMarks("[THINK]", "[/THINK]", "[/THINK]"))


def marks_of(chat_template: str | None) -> ThinkingMarks | None:
    """How a model with this chat template marks its thinking; None = it does not think."""
    if chat_template is None:
        return None
    if "<|channel|>" in chat_template:
        return HARMONY
    return next((marks for marks in _TAGS if marks.end in chat_template), None)
